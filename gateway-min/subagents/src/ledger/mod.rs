//! The ledger of a thread's delegations: the channel `delegations` of its state.
//!
//! An entry is written with the answer that delegates, and again with the result; that of a call which a client has put
//! into the answer with the result only. Its id is the execution's, which is ours; the model's id of the call, which
//! providers repeat, is only a field. The ledger is a channel of its own, so it survives a summary of the messages.

mod calls;
mod limits;
mod render;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json, json};
use threadkeep::state::StateSnapshot;
use threadkeep_agent::model::message;

use crate::outcome::Recorded;

pub(crate) use calls::{added_execution, entry_of, executions_of};
pub use calls::{has_unfinished, withdrawn};
pub(crate) use limits::Ledger;
pub use limits::{Limits, STOP_REASON};

/// The channel.
pub const CHANNEL: &str = "delegations";
/// The tool whose calls it lists.
pub const TASK: &str = "task";
/// The status of an entry without a result.
const IN_PROGRESS: &str = "in_progress";
/// The longest description, in characters.
const DESCRIPTION_MAX: usize = 200;

/// A delegation (service reference, "Status vocabularies").
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// The execution.
    pub(crate) id: String,
    /// The model's id of the call.
    #[serde(default)]
    pub(crate) tool_call_id: String,
    /// The answer with the call.
    #[serde(default)]
    pub(crate) message_id: String,
    /// The call's index among the calls of that answer, as it was when the model gave it.
    #[serde(default)]
    pub(crate) call_index: usize,
    /// The SHA-256 of the call's arguments; `None` in an entry of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) args_sha256: Option<String>,
    /// The run that delegated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) run_id: Option<String>,
    pub(crate) description: String,
    pub(crate) subagent_type: String,
    pub(crate) status: String,
    pub(crate) created_at: String,
    /// What is known once it has ended.
    #[serde(flatten)]
    pub(crate) ended: Map<String, Json>,
}

impl Entry {
    /// The entry of a call that has no result yet.
    pub(crate) fn begun(
        id: String,
        run_id: &str,
        answer: &Json,
        call_index: usize,
        call: &Json,
        now: DateTime<Utc>,
    ) -> Self {
        let arg = |key: &str| call["args"][key].as_str().unwrap_or_default();
        Self {
            id,
            tool_call_id: call["id"].as_str().unwrap_or_default().to_owned(),
            message_id: answer["id"].as_str().unwrap_or_default().to_owned(),
            call_index,
            args_sha256: Some(calls::args_digest(call)),
            run_id: Some(run_id.to_owned()),
            description: description(arg("description"), arg("prompt"))
                .chars()
                .take(DESCRIPTION_MAX)
                .collect(),
            subagent_type: arg("subagent_type").to_owned(),
            status: IN_PROGRESS.to_owned(),
            created_at: now.to_rfc3339_opts(SecondsFormat::Millis, true),
            ended: Map::new(),
        }
    }

    /// Whether this is the content of its call.
    fn is_of(&self, call: &Json) -> bool {
        call["name"] == TASK
            && call["id"].as_str().unwrap_or_default() == self.tool_call_id
            && self.args_sha256.as_ref().is_some_and(|digest| *digest == calls::args_digest(call))
    }

    /// Whether it has no result.
    pub(crate) fn is_in_progress(&self) -> bool {
        self.status == IN_PROGRESS
    }

    /// The entry with what the metadata of its tool message says. Without valid metadata it failed: the tool did not get
    /// as far as running.
    pub(crate) fn ended(&self, result: &Json) -> Self {
        let metadata = result["additional_kwargs"].as_object();
        let recorded = metadata.and_then(Recorded::from_metadata);
        let mut ended = Map::new();
        let mut put = |key: &str, value: Json| ended.insert(key.to_owned(), value);
        let status = if let Some(recorded) = &recorded {
            if let Some(reason) = recorded.stop_reason {
                put("stop_reason", json!(reason));
            }
            put("result_brief", json!(recorded.ledger_brief()));
            put("result_sha256", json!(recorded.ledger_digest()));
            if let Some(verdict) = &recorded.citations {
                put("receipt_verdict", json!(verdict));
            }
            if let Some(verdict) = &recorded.acceptance {
                put("acceptance_verdict", json!(verdict));
            }
            recorded.status
        } else {
            let text = message::text(result);
            put("result_brief", json!(crate::bounds::bounded(&text)));
            put("result_sha256", json!(threadkeep_agent::receipts::sha256(&text)));
            crate::contract::Status::Failed
        };
        let reference = [&result["id"], &result["tool_call_id"]].into_iter().find_map(Json::as_str);
        put("result_ref", json!(reference.unwrap_or(&self.tool_call_id)));
        Self { status: status.as_str().to_owned(), ended, ..self.clone() }
    }

    /// Whether the conversation has got the result of its execution. One that a new question turned away from has none.
    pub(crate) fn has_result(&self) -> bool {
        self.ended.contains_key("result_ref")
    }

    /// The entry of a delegation whose run was cancelled, and that no run goes on with: it refers to no result.
    pub(crate) fn cancelled(&self) -> Self {
        let status = crate::contract::Status::Cancelled;
        let ended = [
            ("result_brief", status.phrase().to_owned()),
            ("result_sha256", threadkeep_agent::receipts::sha256(status.phrase())),
        ];
        let ended = ended.into_iter().map(|(key, value)| (key.to_owned(), json!(value))).collect();
        Self { status: status.as_str().to_owned(), ended, ..self.clone() }
    }

    pub(crate) fn to_json(&self) -> Json {
        json!(self)
    }
}

/// What a delegation is about: its description or, without one, its prompt.
pub(crate) fn description<'t>(description: &'t str, prompt: &'t str) -> &'t str {
    if description.trim().is_empty() { prompt } else { description }
}

/// The entries in a state, oldest first. Entries that something else has put there and that do not read are left out.
pub(crate) fn entries(state: Option<&StateSnapshot>) -> threadkeep::Result<Vec<Entry>> {
    let list = state.map(|state| state.json(CHANNEL)).transpose()?.flatten();
    let Some(Json::Array(list)) = list else { return Ok(Vec::new()) };
    Ok(list.into_iter().filter_map(|entry| serde_json::from_value(entry).ok()).collect())
}

//! How many delegations a model may make at once and in a run, and the ledger's part in every model call.

use serde_json::{Map, Value as Json};
use threadkeep_agent::model::message;
use threadkeep_agent::{After, AgentError, Before, Middleware, View};

use super::calls::index_of;
use super::{CHANNEL, Entry, TASK, entries, render};

/// The stop reason of a run that used up its delegations (service reference, "Status vocabularies").
pub const STOP_REASON: &str = "subagent_limit_capped";
/// What the text about used up delegations begins with.
const NOTICE: &str = "[SUBAGENT LIMIT REACHED]";

/// How many delegations there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// In one answer of the model.
    pub concurrent: usize,
    /// In one run.
    pub total: usize,
}

/// Keeps the ledger of a lead agent: shows it to the model, takes away calls beyond the limits, and adds the others.
pub(crate) struct Ledger {
    pub(crate) limits: Limits,
}

impl Middleware for Ledger {
    fn before_model(&self, view: &View<'_>) -> Result<Before, AgentError> {
        let mut entries = entries(view.state)?;
        for settled in settled(&entries, view.turn) {
            if let Some(entry) = entries.iter_mut().find(|entry| entry.id == settled.id) {
                *entry = settled;
            }
        }
        let messages = render::message(&entries).into_iter().collect();
        Ok(Before { messages, ..Before::default() })
    }

    fn limit_calls(&self, view: &View<'_>, answer: &mut Json) -> Result<Option<String>, AgentError> {
        let known = entries(view.state)?;
        let of_run = known.iter().filter(|entry| entry.run_id.as_deref() == Some(view.run_id)).count();
        let remaining = self.limits.total.saturating_sub(of_run);
        Ok(cut(answer, self.limits.concurrent.min(remaining), remaining, self.limits.total))
    }

    fn after_model(&self, view: &View<'_>, answer: &mut Json) -> Result<After, AgentError> {
        let mut changed = settled(&entries(view.state)?, view.turn);
        for (index, call) in message::tool_calls(answer).iter().enumerate() {
            if call["name"] == TASK {
                let (id, now) = (view.ids.text(), view.ids.now());
                changed.push(Entry::begun(id, view.run_id, answer, index, call, now));
            }
        }
        let mut writes = Map::new();
        if !changed.is_empty() {
            let changed: Json = changed.iter().map(Entry::to_json).collect();
            writes.insert(CHANNEL.to_owned(), changed);
        }
        Ok(After { writes, ..After::default() })
    }
}

/// What came of the entries in progress: no subagent is at work while the model is asked. A call with a result in the
/// conversation that the tool never saw, for example because its arguments were wrong, failed; one without a result was
/// cancelled with its run, and so was one that a client has edited or taken away.
fn settled(known: &[Entry], turn: &[Json]) -> Vec<Entry> {
    let result = |entry: &Entry| {
        let answer = turn.iter().position(|message| message["id"] == *entry.message_id)?;
        let index = index_of(known, &turn[answer], entry)?;
        let results = turn[answer + 1..].iter().take_while(|message| message["type"] == "tool");
        result_of(&turn[answer], index, results)
    };
    let in_progress = known.iter().filter(|entry| entry.is_in_progress());
    in_progress
        .map(|entry| result(entry).map_or_else(|| entry.cancelled(), |result| entry.ended(result)))
        .collect()
}

/// The result of a call of the answer, among those after it. A client may have answered only some of the calls, and in
/// any order; of calls to which the provider gave the same id, the first one has the first result.
fn result_of<'m>(answer: &Json, index: usize, results: impl Iterator<Item = &'m Json>) -> Option<&'m Json> {
    let (before, call) = (message::tool_calls(answer).get(..index)?, message::tool_calls(answer).get(index)?);
    let same_before = before.iter().filter(|other| other["id"] == call["id"]).count();
    results.filter(|result| result["tool_call_id"] == call["id"]).nth(same_before)
}

/// Takes the `task` calls beyond the first `allowed` out of the answer. If none `remain` in the run, the text says so,
/// and the result is the run's stop reason.
fn cut(answer: &mut Json, allowed: usize, remain: usize, total: usize) -> Option<String> {
    let is_task = |call: &Json| call["name"] == TASK;
    let asked = message::tool_calls(answer).iter().filter(|call| is_task(call)).count();
    if asked <= allowed {
        return None;
    }
    let mut seen = 0;
    let dropped: Vec<bool> = message::tool_calls(answer)
        .iter()
        .map(|call| {
            seen += usize::from(is_task(call));
            is_task(call) && seen > allowed
        })
        .collect();
    tracing::info!(asked, allowed, "delegations beyond the limit were taken out of an answer");
    let notice = (remain == 0).then(|| {
        format!(
            "{NOTICE} This run has made all of its {total} delegations. Go on with the results there are."
        )
    });
    *answer = message::drop_tool_calls(answer, &dropped, notice.as_deref());
    notice.map(|_| STOP_REASON.to_owned())
}

#[cfg(test)]
mod tests {
    use chrono::DateTime;
    use serde_json::json;
    use threadkeep::id::IdSource;

    use super::*;

    fn answer(names: &[&str]) -> Json {
        let calls: Vec<Json> = names
            .iter()
            .map(|name| json!({"type": "tool_call", "name": name, "id": "call_0", "args": {"prompt": "p", "subagent_type": "bash"}}))
            .collect();
        json!({"type": "ai", "id": "m", "content": "text", "tool_calls": calls, "response_metadata": {"finish_reason": "tool_calls"}})
    }

    fn names(answer: &Json) -> Vec<&str> {
        message::tool_calls(answer).iter().map(|call| call["name"].as_str().unwrap()).collect()
    }

    #[test]
    fn the_first_calls_are_kept_in_order_and_other_tools_are_not_counted() {
        let mut message = answer(&["task", "ls", "task", "task", "grep"]);
        assert_eq!(cut(&mut message, 2, 5, 6), None, "a cut that is not the run's limit is silent");
        assert_eq!(names(&message), ["task", "ls", "task", "grep"]);
        assert_eq!(message["content"], "text");
        assert_eq!(message["response_metadata"]["finish_reason"], "tool_calls");
    }

    #[test]
    fn used_up_delegations_are_all_taken_away_and_the_text_says_so() {
        let mut message = answer(&["task", "task"]);
        assert_eq!(cut(&mut message, 0, 0, 6).as_deref(), Some("subagent_limit_capped"));
        assert_eq!(names(&message), [""; 0]);
        assert!(message["content"].as_str().unwrap().contains("[SUBAGENT LIMIT REACHED]"));
        assert_eq!(message["response_metadata"]["finish_reason"], "stop");
        // The other calls go on.
        let mut mixed = answer(&["ls", "task"]);
        assert!(cut(&mut mixed, 0, 0, 6).is_some());
        assert_eq!(names(&mixed), ["ls"]);
    }

    #[test]
    fn an_entry_per_call_with_an_id_of_ours() {
        let ledger = Ledger { limits: Limits { concurrent: 3, total: 6 } };
        let mut message = answer(&["ls", "task", "task"]);
        let ids = IdSource::default();
        let view = View { run_id: "r", state: None, ids: &ids, turn: &[], stop_reason: None };
        let after = ledger.after_model(&view, &mut message).unwrap();
        let made: Vec<Entry> = serde_json::from_value(after.writes[CHANNEL].clone()).unwrap();
        assert_eq!(made.iter().map(|entry| entry.call_index).collect::<Vec<_>>(), [1, 2]);
        assert_ne!(made[0].id, made[1].id, "although the provider repeats its ids");
        assert!(made.iter().all(|entry| entry.tool_call_id == "call_0" && entry.is_in_progress()));
    }

    /// Scenario 45, of the description.
    #[test]
    fn a_description_of_201_characters_is_cut_and_a_missing_one_is_the_prompt() {
        let about = |args: Json| {
            let call = json!({"id": "c", "args": args});
            Entry::begun("e".into(), "r", &answer(&[]), 0, &call, DateTime::UNIX_EPOCH).description
        };
        assert_eq!(about(json!({"description": "\u{e9}".repeat(201)})), "\u{e9}".repeat(200));
        assert_eq!(about(json!({"description": "x".repeat(200)})), "x".repeat(200));
        assert_eq!(about(json!({"description": " ", "prompt": "look around"})), "look around");
    }

    #[test]
    fn a_call_that_the_tool_never_saw_ends_as_failed() {
        let calling = answer(&["ls", "task"]);
        let entry =
            Entry::begun("e".into(), "r", &calling, 1, &calling["tool_calls"][1], DateTime::UNIX_EPOCH);
        let result =
            |text: &str| json!({"type": "tool", "id": "x", "tool_call_id": "call_0", "content": text});
        let turn = [calling, result("files"), result("Error: argument `prompt` is missing")];
        let ended = settled(std::slice::from_ref(&entry), &turn);
        assert_eq!(
            (ended[0].status.as_str(), &ended[0].ended["result_brief"]),
            ("failed", &json!("Error: argument `prompt` is missing"))
        );
        let cancelled = settled(std::slice::from_ref(&entry), &turn[..2]);
        assert_eq!(
            (cancelled[0].status.as_str(), &cancelled[0].ended["result_brief"]),
            ("cancelled", &json!("Task cancelled by user."))
        );
        assert_eq!(settled(&ended, &turn), [], "once");
        // A client has put another call in its place.
        let mut edited = turn;
        edited[0]["tool_calls"][1]["args"]["prompt"] = json!("other");
        assert_eq!(settled(std::slice::from_ref(&entry), &edited), cancelled);
    }

    /// A client may answer calls itself and go on with the model.
    #[test]
    fn a_result_that_a_client_wrote_is_that_of_its_call() {
        let mut calling = answer(&["task", "task", "task"]);
        for (index, call) in calling["tool_calls"].as_array_mut().unwrap().iter_mut().enumerate() {
            call["id"] = json!(format!("call_{index}"));
        }
        let calls = message::tool_calls(&calling).iter().enumerate();
        let begun = |(index, call): (usize, &Json)| {
            Entry::begun(index.to_string(), "r", &calling, index, call, DateTime::UNIX_EPOCH)
        };
        let entries: Vec<Entry> = calls.map(begun).collect();
        let result = |call: &str| json!({"type": "tool", "id": "x", "tool_call_id": call, "content": call});
        let turn = [calling, result("call_2"), result("call_0")];
        let ended = settled(&entries, &turn);
        let found: Vec<_> =
            ended.iter().map(|entry| (entry.status.as_str(), &entry.ended["result_brief"])).collect();
        assert_eq!(
            found,
            [
                ("failed", &json!("call_0")),
                ("cancelled", &json!("Task cancelled by user.")),
                ("failed", &json!("call_2")),
            ]
        );
    }
}

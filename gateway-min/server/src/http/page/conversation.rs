//! A thread's conversation.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Query, State};
use axum::response::Html;
use serde_json::Value;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::Load;
use threadkeep::state::StateSnapshot;
use threadkeep_agent::goal;
use threadkeep_agent::model::message::{is_hidden, kind, text, tool_calls};
use threadkeep_agent::serialize;
use threadkeep_agent::summary::CHANNEL as SUMMARY_CHANNEL;
use threadkeep_page::{
    Call, CallState, Conversation, Excerpt, Goal, GoalPanel, Message, ThreadHead, Waiting, count, seconds,
};

use super::super::error::{ApiError, OrApiError as _};
use super::super::extract::{ApiPath, ThreadPath};
use super::super::state::checkpoint_absent;
use super::super::threads::{absent, derived_status, status_text};
use super::super::turns;
use super::executions::Executions;
use super::message::checkpoint;
use super::session::Viewer;
use super::{Page, Parameters, waiting};
use crate::app::App;
use threadkeep_records::{OperationKind, RunQuery, RunStatus, ThreadStatus};

const FAILED: &str = "Failed to read conversation";
/// The tool with which an agent asks a person.
const CLARIFICATION: &str = "ask_clarification";
/// Messages on a page.
const SHOWN: usize = 200;
/// The maximum characters of a call's arguments on one line.
const SUMMARY_CHARS: usize = 160;

/// `GET /threads/{thread_id}`
pub(super) async fn show(
    State(app): State<Arc<App>>,
    Viewer(session): Viewer,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    Query(parameters): Query<Parameters>,
) -> Page {
    let at = checkpoint(&parameters, "at")?;
    let end = parameters.get("end").and_then(|end| end.parse().ok());
    Ok(Html(read(&app, &thread_id, at, end).await?.page(&session)))
}

async fn read(
    app: &Arc<App>,
    thread: &ThreadId,
    at: Option<CheckpointId>,
    end: Option<usize>,
) -> Result<Conversation, ApiError> {
    let active_run = active_run(app, thread).await?;
    let load = Load::Only([MESSAGES_CHANNEL, SUMMARY_CHANNEL, goal::CHANNEL].map(ChannelName::from).into());
    let state = app.threads.accessor().get_loading(thread, at, load).await.or_engine(thread, FAILED)?;
    if let Some(at) = at
        && state.is_none()
    {
        return Err(checkpoint_absent(at));
    }
    let row = app.records.threads().get(thread.as_str(), None).await.or_internal(FAILED)?;
    if row.is_none() && state.is_none() {
        return Err(absent(thread));
    }
    let stored = row.as_ref().map(|row| row.status);
    let status = match (&active_run, &state) {
        (Some(_), _) => ThreadStatus::Running,
        (None, Some(state)) if at.is_none() => derived_status(state, stored),
        _ => stored.unwrap_or(ThreadStatus::Idle),
    };
    let title = row.and_then(|row| row.display_name);
    let head = ThreadHead { id: thread.to_string(), title, status: status_text(status).to_owned() };
    let failure = if active_run.is_none() && at.is_none() { failure(app, thread).await? } else { None };
    let mut conversation = Conversation {
        thread: head,
        at: at.map(|at| at.to_string()),
        earlier: 0,
        messages: Vec::new(),
        goal: at.is_none().then(|| GoalPanel { goal: None, can_change: active_run.is_none() }),
        waiting: None,
        active_run,
        can_compact: at.is_none() && app.config.current_async().await.summarization.enabled,
        failure,
    };
    let Some(state) = state else { return Ok(conversation) };
    if let Some(panel) = &mut conversation.goal {
        panel.goal = state.json(goal::CHANNEL).or_engine(thread, FAILED)?.as_ref().and_then(shown_goal);
    }
    let mut messages = messages(app, thread, &state, at.is_none()).await?;
    let is_newest = at.is_none() && end.is_none_or(|end| end >= messages.len());
    messages.truncate(end.unwrap_or(usize::MAX));
    let executions = Executions::of(app, thread).await?;
    let can_change = is_newest && conversation.active_run.is_none();
    if can_change {
        conversation.waiting = waiting::of(&state, &messages);
    }
    let shown = Shown {
        executions: &executions,
        can_change,
        is_running: conversation.active_run.is_some(),
        waits_for_answers: matches!(conversation.waiting, Some(Waiting::Answers(_))),
    };
    // A tool's result belongs to the answer before it.
    let mut start = messages.len().saturating_sub(SHOWN);
    while start > 0 && kind(&messages[start]) == "tool" {
        start -= 1;
    }
    conversation.earlier = start;
    conversation.messages = shown.of(&messages[start..]);
    if start == 0
        && let Some(Value::String(summary)) = state.json(SUMMARY_CHANNEL).or_engine(thread, FAILED)?
    {
        let (id, name) = (SUMMARY_CHANNEL.to_owned(), "Summary of earlier messages");
        conversation.messages.insert(0, Message::Note { id, name, text: Excerpt::of(&summary) });
    }
    Ok(conversation)
}

/// A goal as it is stored.
fn shown_goal(goal: &Value) -> Option<Goal> {
    let evaluation = &goal["last_evaluation"];
    let reason = evaluation["reason"].as_str().filter(|reason| !reason.is_empty());
    Some(Goal {
        objective: goal["objective"].as_str()?.to_owned(),
        continuations: goal["continuation_count"].as_u64().unwrap_or(0),
        max_continuations: goal["max_continuations"].as_u64().unwrap_or(0),
        reason: reason.map(Excerpt::of),
        suspended: evaluation["stand_down_reason"].as_str().map(|why| why.replace('_', " ")),
    })
}

/// The run that is active on a thread.
pub(super) async fn active_run(app: &App, thread: &ThreadId) -> Result<Option<String>, ApiError> {
    let holder = app.records.runs().active_for_thread(thread.as_str()).await.or_internal(FAILED)?;
    Ok(holder.filter(|holder| holder.operation_kind == OperationKind::Run).map(|holder| holder.run_id))
}

/// Why the last run failed.
async fn failure(app: &App, thread: &ThreadId) -> Result<Option<String>, ApiError> {
    let newest = RunQuery { status: None, limit: 1, offset: 0 };
    let runs = app.records.runs().list_by_thread(thread.as_str(), &newest).await.or_internal(FAILED)?;
    let failed = runs.into_iter().next().filter(|run| run.status == RunStatus::Error);
    Ok(failed.map(|run| run.error.unwrap_or_else(|| "It gave no reason.".to_owned())))
}

/// The messages of a state; those of the head with their runs and durations.
async fn messages(
    app: &Arc<App>,
    thread: &ThreadId,
    state: &StateSnapshot,
    is_head: bool,
) -> Result<Vec<Value>, ApiError> {
    let mut values = serialize::values(state).or_engine(thread, FAILED)?;
    let Some(Value::Array(mut messages)) = values.remove(MESSAGES_CHANNEL) else { return Ok(Vec::new()) };
    if is_head {
        // What was looked up is noted by readers of the history, which may write.
        let _missing = turns::attribute(app, thread, state, &mut messages).await?;
    }
    messages.retain(|message| !is_hidden(message));
    Ok(messages)
}

/// How messages are shown.
struct Shown<'a> {
    executions: &'a Executions,
    /// Whether the last turn can be run again.
    can_change: bool,
    is_running: bool,
    /// Whether the questions of the last answer are asked below it.
    waits_for_answers: bool,
}

impl Shown<'_> {
    fn of(&self, messages: &[Value]) -> Vec<Message> {
        let results: BTreeMap<&str, &Value> = messages
            .iter()
            .filter(|message| kind(message) == "tool")
            .filter_map(|message| Some((message["tool_call_id"].as_str()?, message)))
            .collect();
        let last = |wanted: &str| messages.iter().rposition(|message| kind(message) == wanted);
        let (last_question, last_answer) = (last("human"), last("ai"));
        let mut shown = Vec::with_capacity(messages.len());
        for (at, message) in messages.iter().enumerate() {
            let id = message["id"].as_str().unwrap_or_default().to_owned();
            let excerpt = Excerpt::of(&text(message));
            shown.push(match kind(message) {
                "tool" => continue,
                "human" => Message::Person {
                    id,
                    text: excerpt,
                    can_edit: self.can_change && Some(at) == last_question && last_answer > last_question,
                },
                "ai" => {
                    let calls = tool_calls(message);
                    let follows = messages.get(at + 1).map(kind);
                    let ends_turn =
                        calls.is_empty() && matches!(follows, None | Some("human")) && !self.is_running;
                    Message::Agent {
                        id,
                        text: excerpt,
                        calls: calls
                            .iter()
                            .map(|call| self.call(message, call, &results, Some(at) == last_answer))
                            .collect(),
                        facts: facts(message),
                        ends_turn,
                        can_repeat: ends_turn && self.can_change && Some(at) == last_answer,
                    }
                }
                _ => Message::Note { id, name: "Note", text: excerpt },
            });
        }
        shown
    }

    fn call(
        &self,
        message: &Value,
        call: &Value,
        results: &BTreeMap<&str, &Value>,
        is_of_last_answer: bool,
    ) -> Call {
        let id = call["id"].as_str().unwrap_or_default();
        let result = results.get(id);
        let state = match result {
            None => CallState::Open,
            Some(result) if result["status"] == "error" => CallState::Failed,
            Some(_) => CallState::Done,
        };
        Call {
            id: id.to_owned(),
            name: call["name"].as_str().unwrap_or_default().to_owned(),
            summary: summary(&call["args"]),
            arguments: Excerpt::of(&pretty(&call["args"])),
            result: result.map(|result| {
                (result["id"].as_str().unwrap_or_default().to_owned(), Excerpt::of(&text(result)))
            }),
            batch: result
                .and_then(|result| result["additional_kwargs"]["subagent_batch_id"].as_str())
                .map(str::to_owned),
            state,
            is_open: call["name"] == CLARIFICATION && !(is_of_last_answer && self.waits_for_answers),
            // The model's ids of calls may repeat in another run.
            delegations: self.executions.of_call(id, message["run_id"].as_str()),
        }
    }
}

/// Duration and tokens of an answer.
fn facts(message: &Value) -> Vec<String> {
    let took = message["additional_kwargs"]["turn_duration"].as_u64().map(seconds);
    let tokens = message["usage_metadata"]["total_tokens"].as_u64().filter(|tokens| *tokens > 0);
    took.into_iter().chain(tokens.map(|tokens| format!("{} tokens", count(tokens)))).collect()
}

pub(super) fn pretty(value: &Value) -> String {
    // A value always has a JSON form.
    serde_json::to_string_pretty(value).unwrap_or_default()
}

/// The arguments of a call on one line; a text that is the only one, without its name.
pub(super) fn summary(arguments: &Value) -> String {
    let text = match arguments {
        Value::Object(fields) if fields.len() == 1 => match fields.values().next() {
            Some(Value::String(text)) => text.clone(),
            _ => arguments.to_string(),
        },
        Value::Object(fields) if fields.is_empty() => String::new(),
        other => other.to_string(),
    };
    text.chars().take(SUMMARY_CHARS).map(|char| if char.is_control() { ' ' } else { char }).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tool_results_are_shown_with_their_calls() {
        let messages = [
            json!({"type": "human", "id": "h1", "content": "list"}),
            json!({"type": "ai", "id": "a1", "content": "", "tool_calls": [
                {"name": "ls", "id": "c1", "args": {"path": "x"}}, {"name": "rm", "id": "c2", "args": {}}, {"name": "cp", "id": "c3"},
            ]}),
            json!({"type": "tool", "id": "t1", "tool_call_id": "c1", "content": "files"}),
            json!({"type": "tool", "id": "t2", "tool_call_id": "c2", "content": "no", "status": "error"}),
            json!({"type": "ai", "id": "a2", "content": "done"}),
        ];
        let shown = Shown {
            executions: &Executions::default(),
            can_change: true,
            is_running: false,
            waits_for_answers: false,
        }
        .of(&messages);
        let [Message::Person { can_edit, .. }, Message::Agent { calls, ends_turn, .. }, last] = &shown[..]
        else {
            panic!("{shown:?}")
        };
        assert!(*can_edit && !ends_turn);
        let states: Vec<_> = calls.iter().map(|call| (call.state, call.summary.as_str())).collect();
        assert_eq!(states, [(CallState::Done, "x"), (CallState::Failed, ""), (CallState::Open, "null")]);
        assert!(matches!(last, Message::Agent { ends_turn: true, can_repeat: true, .. }), "{last:?}");
    }
}

//! Handles the value of `command.resume`.
//!
//! | The thread is | The value |
//! |---|---|
//! | before or after a breakpoint, or where a run was interrupted: it has nodes to run next | answers nothing; the run continues, and the value is stored as a pending `__resume__` row of the checkpoint from which it continues |
//! | at a question of `ask_clarification` | is the answer: a string becomes the next human message, an object with only `messages` these messages, anything else is refused |
//! | anywhere else, or has no checkpoint | is refused |
//!
//! So a value is never dropped. No value (`null`) means to continue without one. The question is a tool message that
//! ends the run, so its answer is the next human message, and sending it as `input` has the same effect.
//!
//! It is checked twice: when the run is created, so that clients get a 4xx, and when it starts, because earlier runs
//! may have moved the thread; then the run fails.

use serde_json::Value as Json;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::checkpoint::{RESUME_CHANNEL, TaskWrites, Write};
use threadkeep::id::{TaskId, ThreadId};
use threadkeep::state::{StateAccessor, StateSnapshot};
use threadkeep::value::ChannelValue;
use threadkeep_agent::tools::asks;

use super::request::Resume;

/// The node and the task under which an unused value is stored. There is one per checkpoint; a later value replaces it.
const RESUME_NODE: &str = "__resume__";
const RESUME_TASK: TaskId = TaskId::from_bytes([0; 16]);

/// Why a value is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResumeError {
    /// There is no question and nothing to continue with.
    #[error("Thread {0} waits for no answer: send messages as input instead of command.resume")]
    NothingWaits(ThreadId),
    /// There is a question, and the value is not an answer to it.
    #[error(
        "Thread {0} waits for the answer to a question: command.resume must be a string or an object with messages"
    )]
    NoAnswer(ThreadId),
    /// The state cannot be read or written.
    #[error(transparent)]
    State(#[from] threadkeep::Error),
}

/// What a resumed run does.
#[derive(Debug, PartialEq)]
pub(crate) enum Resumed<'a> {
    /// It starts with these messages.
    Answer(&'a [Json]),
    /// It continues from this state with its next nodes, and the value must be [stored](keep).
    GoOn(&'a StateSnapshot),
}

/// What `resume` means for a thread in this state.
///
/// # Errors
/// [`ResumeError`].
pub(crate) fn resolve<'a>(
    thread: &ThreadId,
    state: Option<&'a StateSnapshot>,
    resume: &'a Resume,
) -> Result<Resumed<'a>, ResumeError> {
    let Some(state) = state else { return Err(ResumeError::NothingWaits(thread.clone())) };
    if !state.next.is_empty() {
        return Ok(Resumed::GoOn(state));
    }
    let messages = state.json(MESSAGES_CHANNEL)?.unwrap_or_default();
    if !asks(messages.as_array().map_or(&[], Vec::as_slice)) {
        return Err(ResumeError::NothingWaits(thread.clone()));
    }
    let answer = resume.messages.as_deref().filter(|messages| !messages.is_empty());
    answer.map(Resumed::Answer).ok_or_else(|| ResumeError::NoAnswer(thread.clone()))
}

/// The row of a value that answers nothing, for the checkpoint from which the run continues.
///
/// # Errors
/// If the value cannot be stored.
pub(crate) fn row(value: &Json) -> threadkeep::Result<TaskWrites> {
    let value = ChannelValue::from_json(value)?;
    let write = Write { channel: RESUME_CHANNEL.into(), value, overwrite: false };
    Ok(TaskWrites { task: RESUME_TASK, node: RESUME_NODE.into(), index: 0, writes: vec![write] })
}

/// Stores a value that answers nothing on the checkpoint from which the run continues.
///
/// # Errors
/// The saver's.
pub(crate) async fn keep(
    accessor: &StateAccessor,
    state: &StateSnapshot,
    value: &Json,
) -> threadkeep::Result<()> {
    accessor.saver().put_writes(&state.key, &row(value)?).await
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::super::request::{Change, RunInput, RunOptions, RunRequest, StreamMode};
    use super::super::tests::{Gateway, ask, options};
    use super::*;
    use threadkeep_agent::Interrupts;
    use threadkeep_records::RunStatus;

    fn resuming(value: Json) -> RunRequest {
        let input = RunInput::Resume(Resume { messages: None, value });
        RunRequest { input, ..ask("") }
    }

    /// The values stored on a checkpoint.
    async fn kept(gateway: &Gateway, at: &StateSnapshot) -> Vec<Json> {
        let read =
            gateway.app.threads.accessor().get(&at.key.thread, Some(at.key.id)).await.unwrap().unwrap();
        let writes = read.writes.iter().flat_map(|row| &row.writes);
        let kept = writes.filter(|write| write.channel.as_str() == RESUME_CHANNEL);
        kept.map(|write| write.value.to_json().unwrap()).collect()
    }

    #[tokio::test]
    async fn a_value_that_answers_nothing_is_kept_where_the_run_went_on() {
        let script = json!({"rules": [
            {"answers": [{"tool_calls": [{"name": "ls"}]}, {"text": "done"}]},
        ]});
        for mode in ["full", "delta"] {
            let gateway = Gateway::start(mode, &script).await;
            let stopping = || RunOptions {
                interrupt_before: Interrupts::Nodes(vec!["tools".to_owned()]),
                interrupt_after: Interrupts::Nodes(vec!["tools".to_owned()]),
                ..options([StreamMode::Values])
            };
            gateway.run(RunRequest { options: stopping(), ..ask("go") }).await;
            let before_tools = gateway.head().await.unwrap();
            assert_eq!(kept(&gateway, &before_tools).await, [] as [Json; 0]);

            let value = json!({"approved": true, "by": ["me"]});
            let (_, row) = gateway.run(RunRequest { options: stopping(), ..resuming(value.clone()) }).await;
            assert_eq!(row.status, RunStatus::Success);
            assert_eq!(kept(&gateway, &before_tools).await, [value]);
            let after_tools = gateway.head().await.unwrap();
            let history = gateway.history().await;
            let children = history.iter().filter(|state| state.parent == Some(before_tools.key.id));
            assert_eq!(
                children.map(|state| state.metadata.step).collect::<Vec<_>>(),
                [2],
                "it continued from there"
            );
            assert_eq!(kept(&gateway, &after_tools).await, [] as [Json; 0]);

            let (_, row) = gateway.run(resuming(json!("yes"))).await;
            assert_eq!(row.status, RunStatus::Success);
            assert_eq!(kept(&gateway, &after_tools).await, [json!("yes")]);
            let head = gateway.head().await.unwrap();
            let texts = head.json("messages").unwrap().unwrap();
            assert_eq!(
                (texts.as_array().unwrap().len(), &texts[3]["content"]),
                (4, &json!("done")),
                "{mode}"
            );

            let state = gateway.app.threads.accessor();
            keep(state, &after_tools, &json!("no")).await.unwrap();
            assert_eq!(kept(&gateway, &after_tools).await, [json!("no")], "the later value replaces it");
        }
    }

    /// An update beside the value makes a checkpoint of its own, from which the run goes on.
    #[tokio::test]
    async fn a_value_beside_an_update_is_kept_where_the_run_went_on() {
        let script = json!({"rules": [
            {"answers": [{"tool_calls": [{"name": "ls"}]}, {"text": "done"}]},
        ]});
        for mode in ["full", "delta"] {
            for goto in [None, Some(Some("tools".into()))] {
                let gateway = Gateway::start(mode, &script).await;
                let stopping = RunOptions {
                    interrupt_before: Interrupts::Nodes(vec!["tools".to_owned()]),
                    ..options([StreamMode::Values])
                };
                gateway.run(RunRequest { options: stopping, ..ask("go") }).await;
                let parked = gateway.head().await.unwrap();
                let update = Map::from_iter([("title".to_owned(), json!("Seen"))]);
                let resume = Some(Resume { messages: None, value: json!("yes") });
                let input = RunInput::Change(Change { update, goto, resume });
                let (_, row) = gateway.run(RunRequest { input, ..ask("") }).await;
                assert_eq!(row.status, RunStatus::Success, "{mode}");
                let history = gateway.history().await;
                let changed = history.iter().find(|state| state.parent == Some(parked.key.id)).unwrap();
                assert_eq!(kept(&gateway, changed).await, [json!("yes")], "{mode}");
                assert_eq!(kept(&gateway, &parked).await, [] as [Json; 0], "{mode}");
            }
        }
    }
}

//! How a run comes to be: checks, admission by the database, and the task that works on it.

use std::sync::Arc;

use serde_json::{Map, Value as Json, json};
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::saver::{CheckpointSelector, Load};
use uuid::Uuid;

use super::RunRequest;
use super::bridge::Subscription;
use super::frames::Frames;
use super::worker::{AGENT_BINDING, RunSpec, work};
use crate::agent::RunInput;
use crate::app::App;
use crate::model::message;
use crate::store::{Admission, NewEvent, NewRun, NewThread, RunRow, SeedRun, StoreError};

/// The binding of a run without an assistant of its own.
const DEFAULT_AGENT: &str = "__default__";

/// Why a run was not created. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CreateError {
    /// The thread has no row.
    #[error("Thread {0} not found")]
    ThreadNotFound(String),
    /// The selected checkpoint is not there.
    #[error("Checkpoint {0} not found")]
    CheckpointNotFound(String),
    /// The selected checkpoint could not be looked up.
    #[error("Failed to validate checkpoint")]
    CheckpointUnreadable(#[source] threadkeep::Error),
    /// The head, which would fill the empty event feed, cannot be read.
    #[error("{0}")]
    HeadUnreadable(threadkeep::Error),
    /// The model is not configured.
    #[error("Model '{0}' is not in the configured model allowlist")]
    UnknownModel(String),
    /// The gateway is stopping.
    #[error("the gateway is stopping; try again in a moment")]
    Stopping,
    /// The records refuse the run: another operation holds the thread, or the store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// On which threads a run may be created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// On a thread that has a row.
    Existing,
    /// On any; the thread gets its row with the run.
    Anywhere,
}

/// A run that was admitted, and the stream of what it does.
pub(crate) struct Created {
    pub(crate) run: RunRow,
    pub(crate) stream: Subscription,
}

impl App {
    /// Admits a run on a thread and starts to work on it.
    ///
    /// The order of checks is the reference's: checkpoint selector, event feed, admission. A caller that drops the
    /// future may have started the run all the same.
    pub(crate) async fn create_run(
        self: &Arc<Self>,
        thread_id: &str,
        place: Place,
        request: RunRequest,
        owner: Option<&str>,
    ) -> Result<Created, CreateError> {
        if self.is_stopping() {
            return Err(CreateError::Stopping);
        }
        let checkpoint = match &request.checkpoint_id {
            Some(id) => Some(self.selected(thread_id, id).await?),
            None => None,
        };
        self.seed_feed(thread_id).await?;
        if place == Place::Anywhere {
            let row = NewThread {
                thread_id: thread_id.to_owned(),
                user_id: owner.map(str::to_owned),
                ..NewThread::default()
            };
            self.store.threads().create(row).await?;
        }
        let run_id = Uuid::new_v4().to_string();
        let new = NewRun {
            run_id: run_id.clone(),
            thread_id: thread_id.to_owned(),
            assistant_id: request.assistant_id.clone(),
            user_id: owner.map(str::to_owned),
            model_name: request.model_name.clone(),
            metadata: request.metadata.clone(),
            kwargs: request.kwargs.clone(),
            first_human_message: first_human(request.input.as_ref()),
            ..NewRun::default()
        };
        let app = Arc::clone(self);
        let thread = thread_id.to_owned();
        // From the admission on, somebody must work on the run: a task of its own, which no dropped request can stop.
        let created = tokio::spawn(async move { app.admit(thread, run_id, new, checkpoint, request).await });
        created.await.map_err(|_| CreateError::Stopping)?
    }

    async fn admit(
        self: Arc<Self>,
        thread_id: String,
        run_id: String,
        new: NewRun,
        checkpoint: Option<CheckpointId>,
        request: RunRequest,
    ) -> Result<Created, CreateError> {
        // The stream exists before anybody can know the run, and the handle before the run can be cancelled.
        let publisher = self.bridge.open(&run_id);
        let guard = self.local_runs.enter(&run_id, &thread_id);
        let run = match self.store.runs().admit(new, request.strategy).await {
            Ok(Admission::Admitted(run) | Admission::Existing(run)) => run,
            Ok(Admission::Waiting { run, predecessor, superseded, .. }) => {
                for stopped in [Some(predecessor), superseded].into_iter().flatten() {
                    if let Some(control) = self.local_runs.get(&stopped) {
                        control.cancel.cancel();
                    }
                }
                run
            }
            Err(error) => {
                publisher.end();
                return Err(error.into());
            }
        };
        let stream = self.bridge.subscribe(&run_id, None);
        let metadata = checkpoint_metadata(&run_id, &request);
        let spec = RunSpec {
            run_id,
            thread_id: thread_id.clone(),
            input: request.input.map(RunInput),
            checkpoint,
            model_name: request.model_name,
            thinking: request.thinking,
            reasoning_effort: request.reasoning_effort,
            recursion_limit: request.recursion_limit,
            breakpoints: request.breakpoints,
            metadata: metadata.clone(),
        };
        let frames = Frames::new(publisher, request.stream_modes, &thread_id, metadata);
        tokio::spawn(work(self, spec, frames, guard));
        Ok(Created { run, stream: if request.cancel_on_disconnect { stream.owning() } else { stream } })
    }

    /// The checkpoint that a selector names. A raw existence check: the gate comes when the run starts.
    async fn selected(&self, thread_id: &str, id: &str) -> Result<CheckpointId, CreateError> {
        let absent = || CreateError::CheckpointNotFound(id.to_owned());
        let checkpoint: CheckpointId = id.parse().map_err(|_| absent())?;
        let selector = CheckpointSelector {
            id: Some(checkpoint),
            ..CheckpointSelector::head(&ThreadId::from(thread_id)).loading(Load::None)
        };
        let found =
            self.accessor().saver().get(&selector).await.map_err(CreateError::CheckpointUnreadable)?;
        found.map(|_| checkpoint).ok_or_else(absent)
    }

    /// Fills the event feed of a thread that has checkpoints but no message events, so that it shows what was said
    /// before. The head is read through the gate.
    async fn seed_feed(&self, thread_id: &str) -> Result<(), CreateError> {
        if self.store.events().count_messages(thread_id).await? > 0 {
            return Ok(());
        }
        let load = Load::Only([MESSAGES_CHANNEL.into()].into());
        let head = self.accessor().get_loading(&ThreadId::from(thread_id), None, load).await;
        let head = head.map_err(CreateError::HeadUnreadable)?;
        let messages = head.map(|state| state.json(MESSAGES_CHANNEL)).transpose();
        let Some(Json::Array(messages)) = messages.map_err(CreateError::HeadUnreadable)?.flatten() else {
            return Ok(());
        };
        let runs = seed_runs(thread_id, messages);
        if !runs.is_empty() {
            self.store.events().seed(thread_id, runs).await?;
        }
        Ok(())
    }
}

/// The messages of a conversation as the events of one synthetic run per turn.
fn seed_runs(thread_id: &str, messages: Vec<Json>) -> Vec<SeedRun> {
    let mut runs: Vec<SeedRun> = Vec::new();
    for message in messages {
        let event_type = match message["type"].as_str() {
            Some("human") => "llm.human.input",
            Some("ai") => "llm.ai.response",
            Some("tool") => "llm.tool.result",
            _ => continue,
        };
        if event_type == "llm.human.input" || runs.is_empty() {
            let run_id = format!("checkpoint-seed-{thread_id}-{}", runs.len());
            runs.push(SeedRun { run_id, events: Vec::new() });
        }
        if let Some(run) = runs.last_mut() {
            run.events.push(NewEvent::new(event_type, "message", message));
        }
    }
    runs
}

/// What every checkpoint of the run carries in its metadata: scalars of the request's configuration, the run, the
/// agent it belongs to. A client's own run id or binding is overwritten.
fn checkpoint_metadata(run_id: &str, request: &RunRequest) -> Map<String, Json> {
    let scalar = |value: &Json| !value.is_object() && !value.is_array() && !value.is_null();
    let mut metadata = request.checkpoint_metadata.clone();
    metadata.retain(|key, value| !key.starts_with("__") && key != "thread_id" && scalar(value));
    metadata.insert("run_id".to_owned(), json!(run_id));
    let agent = request.assistant_id.as_deref().filter(|name| *name != "lead_agent");
    metadata.insert(AGENT_BINDING.to_owned(), json!(agent.unwrap_or(DEFAULT_AGENT)));
    metadata
}

fn first_human(input: Option<&Map<String, Json>>) -> Option<String> {
    let messages = input?.get("messages")?.as_array()?;
    messages.iter().find(|m| m["type"] == "human").map(message::text).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_is_seeded_as_one_run_a_turn() {
        let say = |kind: &str, text: &str| json!({"type": kind, "content": text});
        let messages = vec![
            say("human", "a"),
            say("ai", "b"),
            say("tool", "c"),
            say("system", "s"),
            say("human", "d"),
            say("ai", "e"),
        ];
        let runs = seed_runs("t", messages);
        let shape: Vec<(&str, Vec<&str>)> = runs
            .iter()
            .map(|run| (run.run_id.as_str(), run.events.iter().map(|e| e.event_type.as_str()).collect()))
            .collect();
        assert_eq!(
            shape,
            [
                ("checkpoint-seed-t-0", vec!["llm.human.input", "llm.ai.response", "llm.tool.result"]),
                ("checkpoint-seed-t-1", vec!["llm.human.input", "llm.ai.response"]),
            ]
        );
    }
}

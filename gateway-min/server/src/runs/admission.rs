//! Creates runs: checks, admission by the database, and the task that works on the run.

use std::sync::Arc;

use serde_json::{Map, Value as Json, json};
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::checkpoint::CheckpointKey;
use threadkeep::id::{CheckpointId, Namespace, ThreadId};
use threadkeep::saver::{CheckpointSelector, Load};
use threadkeep_agent::model::message;
use threadkeep_agent::{AGENT_BINDING, Breakpoints, DEFAULT_AGENT, Durability};
use tracing::Instrument as _;

use super::Runs;
use super::frames::Frames;
use super::request::{OnDisconnect, Resume, RunInput, RunRequest};
use super::resume::{self, ResumeError};
use super::worker::{self, RunSpec};
use crate::auth::Principal;
use crate::streams::bridge::Subscription;
use threadkeep_records::{
    Admission, Entity, MultitaskStrategy, NewEvent, NewRun, NewThread, RecordsError, RunRow, SEED_PREFIX,
    SeedRun, persistently,
};

/// The key of a run's metadata that says how it repeats a turn, and its value for an edited question.
pub(crate) const REPLAY_KIND: &str = "replay_kind";
pub(crate) const EDIT: &str = "edit";

/// Why a run was not created. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CreateError {
    /// The selected checkpoint does not exist.
    #[error("Checkpoint {0} not found")]
    CheckpointNotFound(String),
    /// The selected checkpoint could not be looked up.
    #[error("Failed to validate checkpoint")]
    CheckpointUnreadable(#[source] threadkeep::Error),
    /// The thread does not wait for the value that the run resumes with.
    #[error(transparent)]
    Resume(ResumeError),
    /// The head, from which the empty event feed would be filled, cannot be read.
    #[error("{0}")]
    HeadUnreadable(threadkeep::Error),
    /// The gateway is stopping.
    #[error("the gateway is stopping; try again shortly")]
    Stopping,
    /// The records refused the run: another operation holds the thread, or the store failed.
    #[error(transparent)]
    Records(#[from] RecordsError),
}

/// On which threads a run may be created. Its admission looks at the owner: since the request was let in, another user
/// may have made the thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnThread<'a> {
    /// On a thread that has a row, and that this caller may see.
    Existing(&'a Principal),
    /// On any thread that this caller may see; a missing row is created with the run.
    Visible(&'a Principal),
}

impl OnThread<'_> {
    fn caller(&self) -> &Principal {
        match self {
            Self::Existing(caller) | Self::Visible(caller) => caller,
        }
    }
}

/// An admitted run, and its stream.
pub(crate) struct Created {
    pub(crate) run: RunRow,
    /// The input and the configuration that the request of the run had.
    pub(crate) kwargs: Json,
    pub(crate) stream: Subscription,
}

impl Runs {
    /// Admits a run on a thread and starts to work on it.
    ///
    /// If the idempotency key was used before, returns the run created then, and starts nothing. Otherwise the checks
    /// run in the reference's order: checkpoint selector, event feed, admission; a resume value is checked after the
    /// selector. If the caller drops the future, the run may have been started.
    pub(crate) async fn create(
        self: &Arc<Self>,
        thread_id: &str,
        place: OnThread<'_>,
        request: RunRequest,
        owner: Option<&str>,
        idempotency_key: Option<String>,
    ) -> Result<Created, CreateError> {
        if self.is_stopping() {
            return Err(CreateError::Stopping);
        }
        if let Some(key) = &idempotency_key
            && let Some(run) = self.records.runs().get_by_idempotency_key(key).await?
        {
            return self.joined(run).await;
        }
        if let Some(selected) = request.checkpoint {
            self.check_selected(thread_id, selected).await?;
        }
        if let Some(resume) = request.input.resume() {
            self.check_resume(thread_id, request.checkpoint, resume).await?;
        }
        // Where the feed is in the database, the admission on an existing thread sees whether it has begun.
        let is_seeded = !self.records.events().are_in_database() || matches!(place, OnThread::Visible(_));
        let seed = if is_seeded { self.seed(thread_id).await? } else { Vec::new() };
        if let OnThread::Visible(caller) = place {
            let row = NewThread {
                thread_id: thread_id.to_owned(),
                user_id: owner.map(str::to_owned),
                ..NewThread::default()
            };
            // Another request may have taken the id first.
            if !self.records.threads().create(row).await?.row.visible_to(caller.sees()) {
                let id = thread_id.to_owned();
                return Err(RecordsError::NotFound { entity: Entity::Thread, id }.into());
            }
        }
        self.fill_feed(thread_id, seed).await?;
        let run_id = self.threads.accessor().ids().text();
        // A client that follows the run sees its end only after everything of it is on disk.
        let acknowledged =
            idempotency_key.is_some() || request.options.on_disconnect == OnDisconnect::Continue;
        let new = NewRun {
            run_id: run_id.clone(),
            thread_id: thread_id.to_owned(),
            visible_to: place.caller().sees().map(str::to_owned),
            assistant_id: request.assistant_id.clone(),
            user_id: owner.map(str::to_owned),
            idempotency_key,
            model_name: text(&request, "model_name"),
            metadata: request.metadata.clone(),
            kwargs: request.kwargs.clone(),
            first_human_message: first_human(&request.input),
            edits: request.metadata.get(REPLAY_KIND).is_some_and(|kind| kind == EDIT),
            acknowledged: acknowledged || request.options.durability == Durability::Sync,
            ..NewRun::default()
        };
        let runs = Arc::clone(self);
        let thread = thread_id.to_owned();
        // An admitted run must be worked on, so this is a separate task, which no dropped request can stop.
        let created = tokio::spawn(
            async move { runs.admit(thread, run_id, new, is_seeded, request).await }.in_current_span(),
        );
        created.await.map_err(|_| CreateError::Stopping)?
    }

    async fn admit(
        self: Arc<Self>,
        thread_id: String,
        run_id: String,
        new: NewRun,
        is_seeded: bool,
        request: RunRequest,
    ) -> Result<Created, CreateError> {
        // Create the stream before the run becomes known, and the handle before it can be cancelled.
        let publisher = self.streams.open(&run_id);
        let guard = self.local.enter(&run_id);
        // A stop that begins from here on waits for this run. One that began before has not seen it.
        if self.is_stopping() {
            publisher.discard();
            return Err(CreateError::Stopping);
        }
        let admitted = self.admission(&new, is_seeded, request.options.multitask_strategy).await;
        let holds_thread = matches!(admitted, Ok(Admission::Admitted(_)));
        let run = match admitted {
            Ok(Admission::Admitted(run) | Admission::Queued(run)) => run,
            Err(CreateError::Records(error @ RecordsError::InDoubt { .. })) => {
                let Some(run) = self.settle(&new).await else {
                    publisher.discard();
                    return Err(error.into());
                };
                run
            }
            // A concurrent request with the same key was faster.
            Ok(Admission::Existing(run)) => {
                publisher.discard();
                return self.joined(run).await;
            }
            Ok(Admission::Waiting { run, predecessor, superseded, .. }) => {
                for stopped in superseded.into_iter().chain([predecessor]) {
                    if let Some(control) = self.local.get(&stopped) {
                        control.cancel.cancel();
                    }
                }
                run
            }
            Err(error) => {
                publisher.discard();
                return Err(error);
            }
        };
        let stream = self.streams.subscribe(&run_id);
        self.streams.announce();
        let metadata = checkpoint_metadata(&run_id, &request);
        let spec = RunSpec {
            run_id,
            thread_id: thread_id.clone(),
            holds_thread,
            model_name: text(&request, "model_name"),
            thinking: request.config.context.get("thinking_enabled").and_then(Json::as_bool),
            reasoning_effort: text(&request, "reasoning_effort"),
            recursion_limit: request.config.recursion_limit,
            delegation: request.delegation,
            asks: !request.config.forbids_questions(),
            breakpoints: Breakpoints {
                before: request.options.interrupt_before,
                after: request.options.interrupt_after,
            },
            checkpoint: request.checkpoint,
            durability: request.options.durability,
            edits: new.edits,
            input: request.input,
            metadata: metadata.clone(),
        };
        let publisher = Arc::new(publisher);
        let mut shown = metadata;
        if !request.config.tags.is_empty() {
            shown.insert("tags".to_owned(), json!(request.config.tags));
        }
        let frames = Frames::new(
            (Arc::clone(&publisher), self.streams.rendered()),
            (request.options.stream_modes, request.options.stream_subgraphs),
            &thread_id,
            shown,
        );
        worker::start(self, spec, publisher, frames, guard);
        let owned = request.options.on_disconnect == OnDisconnect::Cancel;
        Ok(Created { run, kwargs: request.kwargs, stream: if owned { stream.owning() } else { stream } })
    }

    /// Admits the run, after its thread's feed was filled if that has no messages.
    async fn admission(
        &self,
        new: &NewRun,
        is_seeded: bool,
        strategy: MultitaskStrategy,
    ) -> Result<Admission, CreateError> {
        let runs = self.records.runs();
        if !is_seeded {
            let unnoted = self.threads.unnoted(&new.thread_id).await;
            let admitted = runs.admit_after_messages(new.clone(), strategy).await?;
            drop(unnoted);
            if let Some(admitted) = admitted {
                return Ok(admitted);
            }
            let seed = self.seed(&new.thread_id).await?;
            self.fill_feed(&new.thread_id, seed).await?;
        }
        let _unnoted = self.threads.unnoted(&new.thread_id).await;
        Ok(runs.admit(new.clone(), strategy).await?)
    }

    /// The run, if an admission with an unknown outcome stored it: it then holds its thread and must be worked on. Runs
    /// that it cancels are notified as if another process had cancelled them. A run of which that stays unknown is not
    /// worked on, and ends once the database is available.
    async fn settle(self: &Arc<Self>, new: &NewRun) -> Option<RunRow> {
        let run_id = &new.run_id;
        let found = match persistently(|| self.records.runs().admitted(new)).await {
            Ok(found) => found,
            Err(error) => {
                tracing::error!(run_id, %error, "whether a run was admitted is unknown; it ends if it was");
                let (runs, run_id) = (Arc::clone(self), run_id.clone());
                tokio::spawn(async move { runs.bury(&run_id, None).await });
                None
            }
        };
        if found.is_some()
            && let Err(error) = self.notice().await
        {
            tracing::warn!(run_id, %error, "could not notify the runs that a new run cancels");
        }
        found
    }

    /// A run created by an earlier request. Its stream belongs to that request: leaving it here does not stop the run.
    async fn joined(self: &Arc<Self>, run: RunRow) -> Result<Created, CreateError> {
        let only = std::slice::from_ref(&run.run_id);
        // The first one is read whatever its size.
        let kwargs = self.records.runs().kwargs(only, 0).await?.remove(&run.run_id);
        let stream = self.streams.follow(&run, None);
        Ok(Created { run, kwargs: kwargs.unwrap_or_default(), stream })
    }

    /// Checks that the selected checkpoint exists, without the gate, which comes when the run starts.
    async fn check_selected(&self, thread_id: &str, selected: CheckpointId) -> Result<(), CreateError> {
        let at = CheckpointKey { thread: thread_id.into(), namespace: Namespace::root(), id: selected };
        let selector = CheckpointSelector::at(&at).loading(Load::None);
        let found = self
            .threads
            .accessor()
            .saver()
            .get(&selector)
            .await
            .map_err(CreateError::CheckpointUnreadable)?;
        found.map(|_| ()).ok_or_else(|| CreateError::CheckpointNotFound(selected.to_string()))
    }

    /// Checks that the thread waits for the value. This is unknown while another run is active; and if the state cannot
    /// be read, for example because of the gate, the run itself fails with the reason.
    async fn check_resume(
        &self,
        thread_id: &str,
        selected: Option<CheckpointId>,
        resume: &Resume,
    ) -> Result<(), CreateError> {
        if self.records.runs().active_for_thread(thread_id).await?.is_some() {
            return Ok(());
        }
        let thread = ThreadId::from(thread_id);
        let load = Load::Only([MESSAGES_CHANNEL.into()].into());
        let state = self.threads.accessor().get_loading(&thread, selected, load).await;
        let state = match state {
            Ok(state) => state,
            // It is reported once: the run would not hear of it.
            Err(error @ threadkeep::Error::HistoryLost { .. }) => {
                return Err(CreateError::HeadUnreadable(error));
            }
            Err(_) => return Ok(()),
        };
        match resume::resolve(&thread, state.as_ref(), resume) {
            Ok(_) | Err(ResumeError::State(_)) => Ok(()),
            Err(refused) => Err(CreateError::Resume(refused)),
        }
    }

    /// What the event feed of a thread that has checkpoints but no message events lacks to show the conversation so
    /// far. The head is read through the gate.
    async fn seed(&self, thread_id: &str) -> Result<Vec<SeedRun>, CreateError> {
        if self.records.events().has_messages(thread_id).await? {
            return Ok(Vec::new());
        }
        let load = Load::Only([MESSAGES_CHANNEL.into()].into());
        let head = self.threads.accessor().get_loading(&ThreadId::from(thread_id), None, load).await;
        let head = head.map_err(CreateError::HeadUnreadable)?;
        let messages = head.map(|state| state.json(MESSAGES_CHANNEL)).transpose();
        let Some(Json::Array(messages)) = messages.map_err(CreateError::HeadUnreadable)?.flatten() else {
            return Ok(Vec::new());
        };
        Ok(seed_runs(&format!("{SEED_PREFIX}{thread_id}"), messages))
    }

    /// Fills the feed of a thread that has a row.
    async fn fill_feed(&self, thread_id: &str, seed: Vec<SeedRun>) -> Result<(), RecordsError> {
        if !seed.is_empty() {
            self.records.events().seed(thread_id, seed).await?;
        }
        Ok(())
    }
}

/// The messages of a conversation as the events of one synthetic run per turn, with the ids `<prefix>-<n>`.
pub(crate) fn seed_runs(prefix: &str, messages: Vec<Json>) -> Vec<SeedRun> {
    let mut runs: Vec<SeedRun> = Vec::new();
    for message in messages {
        let event_type = match message["type"].as_str() {
            Some("human") => "llm.human.input",
            Some("ai") => "llm.ai.response",
            Some("tool") => "llm.tool.result",
            _ => continue,
        };
        if event_type == "llm.human.input" || runs.is_empty() {
            let run_id = format!("{prefix}-{}", runs.len());
            runs.push(SeedRun { run_id, events: Vec::new() });
        }
        if let Some(run) = runs.last_mut() {
            run.events.push(NewEvent::new(event_type, "message", message));
        }
    }
    runs
}

/// The metadata of every checkpoint of the run: scalars from the request's configuration, the run, and its agent. A
/// client's own run id or binding is overwritten.
fn checkpoint_metadata(run_id: &str, request: &RunRequest) -> Map<String, Json> {
    let scalar = |value: &Json| !value.is_object() && !value.is_array() && !value.is_null();
    let config = &request.config;
    let mut metadata = config.metadata.clone();
    metadata.extend(config.configurable.clone());
    metadata.retain(|_, value| scalar(value));
    metadata.insert("run_id".to_owned(), json!(run_id));
    metadata.insert(AGENT_BINDING.to_owned(), json!(request.agent.as_deref().unwrap_or(DEFAULT_AGENT)));
    metadata
}

/// A string in the run's context.
fn text(request: &RunRequest, key: &str) -> Option<String> {
    request.config.context.get(key).and_then(Json::as_str).map(str::to_owned)
}

fn first_human(input: &RunInput) -> Option<String> {
    let RunInput::Values(values) = input else { return None };
    let messages = values.get(MESSAGES_CHANNEL)?.as_array()?;
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
        let runs = seed_runs("checkpoint-seed-t", messages);
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

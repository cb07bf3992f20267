//! How a run comes to be: checks, admission by the database, and the task that works on it.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value as Json, json};
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::saver::{CheckpointSelector, Load};
use uuid::Uuid;

use super::StreamMode;
use super::bridge::Subscription;
use super::frames::Frames;
use super::worker::{AGENT_BINDING, RunSpec, work};
use crate::agent::{Breakpoints, RunInput};
use crate::app::App;
use crate::model::message;
use crate::store::{
    Admission, CancelAction, MultitaskStrategy, NewEvent, NewRun, NewThread, RunRow, SeedRun, StoreError,
};

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
        let run_id = Uuid::new_v4().to_string();
        let new = NewRun {
            run_id: run_id.clone(),
            thread_id: thread_id.to_owned(),
            assistant_id: request.assistant_id.clone(),
            user_id: owner.map(str::to_owned),
            model_name: request.model_name.clone(),
            metadata: request.metadata.clone(),
            kwargs: request.kwargs.clone(),
            first_human_message: first_human(&request.input),
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
            Ok(Admission::Waiting { run, predecessor, superseded }) => {
                for stopped in [Some(predecessor.run_id), superseded].into_iter().flatten() {
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
        Ok(Created { run, stream })
    }
}

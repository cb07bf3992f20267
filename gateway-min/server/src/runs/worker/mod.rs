//! The life of one run, from its admission to its last write.

mod conclude;
mod execute;
mod notes;
mod turn;

use std::sync::Arc;

use serde_json::{Map, Value as Json};
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::metadata::{RESTORED_KEY, ROLLED_BACK_KEY};
use threadkeep::state::{KnownHead, RollbackPoint, StateSnapshot};
use threadkeep_agent::tools::Snapshot;
use threadkeep_agent::{AgentSpec, Breakpoints, DEFAULT_AGENT, Durability, Ended, binding};
use tracing::Instrument as _;

use super::Runs;
use super::control::RunGuard;
use super::ending::DIED;
use super::error::RunError;
use super::frames::Frames;
use super::journal::Journal;
use super::owned::Owned;
use super::report::Reporter;
use super::request::{Delegation, RunInput};
use super::usage::UsageLedger;
use crate::streams::bridge::Publisher;
use crate::streams::verdict::{UNREAD, failed, failure};
use crate::telemetry::spans;
use threadkeep_records::{RecordsError, RunEnd};
use threadkeep_subagents::hooks::{TaskConclusion, TaskInfo};
use threadkeep_subagents::ledger::Limits;

/// The work of a run.
pub(crate) struct RunSpec {
    pub(crate) run_id: String,
    pub(crate) thread_id: String,
    /// Whether it was admitted to its thread at once, and need not wait for it.
    pub(crate) holds_thread: bool,
    /// The run's input.
    pub(crate) input: RunInput,
    /// The checkpoint to start from; `None` for the head.
    pub(crate) checkpoint: Option<CheckpointId>,
    pub(crate) model_name: Option<String>,
    pub(crate) thinking: Option<bool>,
    pub(crate) reasoning_effort: Option<String>,
    pub(crate) recursion_limit: u64,
    /// What the run may delegate.
    pub(crate) delegation: Delegation,
    /// Whether the agent may ask the user.
    pub(crate) asks: bool,
    pub(crate) breakpoints: Breakpoints,
    /// Whether the run repeats a turn with an edited question, and keeps the old turn if it fails.
    pub(crate) edits: bool,
    /// When the run's supersteps are on disk.
    pub(crate) durability: Durability,
    /// Scalar entries in the metadata of every checkpoint of the run.
    pub(crate) metadata: Map<String, Json>,
}

/// The outcome of a run's work.
enum Outcome {
    Ended { stop_reason: Option<String>, fallback: Option<String> },
    Cancelled,
    Failed { name: &'static str, message: String },
}

impl RunSpec {
    /// How much the run may delegate; `None` for nothing.
    fn delegates(&self) -> Option<Limits> {
        let Delegation { enabled, max_concurrent, max_total } = self.delegation;
        enabled.then_some(Limits { concurrent: max_concurrent as usize, total: max_total as usize })
    }

    fn agent(&self) -> AgentSpec<'_> {
        AgentSpec {
            run_id: &self.run_id,
            thread_id: &self.thread_id,
            model_name: self.model_name.as_deref(),
            thinking: self.thinking,
            reasoning_effort: self.reasoning_effort.as_deref(),
        }
    }
}

/// Starts the task that works on a run. If it panics, the run ends in error, so that its thread is released, and its
/// stream as its row does.
pub(crate) fn start(
    runs: Arc<Runs>,
    spec: RunSpec,
    publisher: Arc<Publisher>,
    frames: Frames,
    guard: RunGuard,
) {
    let (ending, run_id, stream) = (Arc::clone(&runs), spec.run_id.clone(), Arc::clone(&publisher));
    let info = TaskInfo::lead(&spec.run_id, &spec.thread_id, DEFAULT_AGENT);
    let span = spans::run(&spec.thread_id, &spec.run_id);
    let task = tokio::spawn(work(runs, spec, publisher, frames, guard).instrument(span));
    tokio::spawn(async move {
        // A task that ends with its runtime has not failed: the next process ends its run.
        if task.await.is_err_and(|error| error.is_panic()) {
            // Who waits for the run waits for its row.
            let guard = ending.local.enter(&run_id);
            ending.delegator.hooks.broke_off(&run_id, &info).await;
            ending.bury(&run_id, None).await;
            // Its lease is not renewed while its followers wait for another process to end it.
            drop(guard);
            let streams = Arc::clone(&ending.streams);
            streams.in_background(async move { ending.end_stream(run_id, stream, DIED).await });
        }
    });
}

/// Works on a run until everything of it is written.
async fn work(runs: Arc<Runs>, spec: RunSpec, publisher: Arc<Publisher>, frames: Frames, guard: RunGuard) {
    let mut run = Worker {
        reporter: Reporter {
            frames,
            journal: Journal::new(runs.records.clone(), &spec.thread_id, &spec.run_id),
            usage: UsageLedger::default(),
            owned: Owned::new(&runs, &spec.run_id),
            history_lost: None,
            model_failed: None,
        },
        thread: ThreadId::from(spec.thread_id.as_str()),
        first_head: None,
        head: None,
        left: None,
        noted: None,
        rollback: None,
        workspace: None,
        restored: false,
        taken_over: false,
        ends_as: None,
        runs: &runs,
        spec: &spec,
        guard: &guard,
    };
    let abandoned = publisher.abandoned();
    let lived = async {
        let mut living = std::pin::pin!(run.live());
        // Its client disconnected, and requested that the run end with it. The run works on meanwhile: it may be in the
        // transaction for whose end the cancellation waits.
        let interrupted = async {
            abandoned.cancelled().await;
            runs.interrupt_left(&spec.run_id).await;
        };
        tokio::select! {
            biased;
            lived = &mut living => return lived,
            () = interrupted => {}
        }
        living.await
    };
    let lived = Box::pin(lived).await;
    if let Err(error) = lived {
        tracing::error!(run_id = spec.run_id, thread_id = spec.thread_id, %error, "cannot write the run's records");
        run.show_lost_start();
        // Its clients need not wait for an unavailable database.
        if let Some(end) = &run.ends_as {
            run.show_end(end, &publisher);
            publisher.end();
        } else {
            publisher.leave(&failure(DIED));
        }
        run.reporter.note_loss().await;
        let end = run.ends_as.take().or_else(|| run.end_if_lost());
        runs.bury(&spec.run_id, end).await;
    } else if run.taken_over {
        drop(run);
        drop(guard);
        let (streams, run_id) = (Arc::clone(&runs.streams), spec.run_id);
        streams.in_background(async move { runs.end_stream(run_id, publisher, UNREAD).await });
    } else {
        if let Some(end) = &run.ends_as {
            run.show_end(end, &publisher);
        }
        publisher.end();
    }
}

struct Worker<'a> {
    runs: &'a Arc<Runs>,
    spec: &'a RunSpec,
    thread: ThreadId,
    guard: &'a RunGuard,
    reporter: Reporter,
    /// The head that was read before the run started: that it could start then shows that no other process had taken its
    /// thread, and wrote to it, before the read.
    first_head: Option<threadkeep::Result<KnownHead>>,
    /// The head as the run knows it: the one it started on, then its own last commit. Every write of the run carries it.
    head: Option<KnownHead>,
    /// The state that the agent left.
    left: Option<StateSnapshot>,
    /// The checkpoint with its note or the thread's title, which is written after the last step.
    noted: Option<CheckpointId>,
    /// The state before the run; `None` until it is captured, or if that failed.
    rollback: Option<RollbackPoint>,
    /// The thread's files before the run; `None` until they are read, or if that failed.
    workspace: Option<Snapshot>,
    /// Whether the state is the one from before the run.
    restored: bool,
    /// Whether another process has ended the run, or taken it over.
    taken_over: bool,
    /// How its row ends, once everything else is written.
    ends_as: Option<RunEnd>,
}

impl Worker<'_> {
    /// Lives through the whole run.
    async fn live(&mut self) -> Result<(), RecordsError> {
        // Held to the end: the thread's next run starts after this one's last write.
        let mut lock = None;
        if self.spec.holds_thread {
            lock = Some(self.runs.threads.lock(&self.spec.thread_id).await);
            self.first_head = Some(self.read_head().await);
        }
        if let Some(why) = self.await_turn().await? {
            return self.never_started(why).await;
        }
        let lock = match lock {
            Some(lock) => lock,
            None => self.runs.threads.lock(&self.spec.thread_id).await,
        };
        self.guard.control.begun();
        let started = self.runs.records.now();
        self.reporter.journal.start().await?;
        let accessor = match self.runs.threads.accessor_for_run().await {
            Ok(accessor) => accessor,
            Err(error) => {
                let outcome = Outcome::Failed { name: error.class_name(), message: error.to_string() };
                return self.conclude(None, outcome, started).await;
            }
        };
        let hooks = &self.runs.delegator.hooks;
        let info = TaskInfo::lead(&self.spec.run_id, &self.spec.thread_id, DEFAULT_AGENT);
        hooks.started(&self.spec.run_id, &info).await;
        let ended = self.execute(accessor).await;
        if let Some(error) = ended.as_ref().err().and_then(RunError::of_engine) {
            self.reporter.report_if_lost(error).await;
        }
        hooks.stopped(&self.spec.run_id, &info, TaskConclusion::of_lead(&ended)).await;
        let outcome = match ended {
            Ok(Ended::Done { stop_reason, fallback }) => Outcome::Ended { stop_reason, fallback },
            Ok(Ended::Cancelled) => Outcome::Cancelled,
            Err(error) => Outcome::Failed { name: error.class_name(), message: error.to_string() },
        };
        self.conclude(Some(accessor), outcome, started).await?;
        drop(lock);
        Ok(())
    }

    /// Drops the head that was read for a start which does not come, or comes later. What that read found to be lost is
    /// reported.
    async fn drop_first_head(&mut self) {
        self.show_lost_start();
        self.reporter.note_loss().await;
    }

    /// The same, without a note of it.
    fn show_lost_start(&mut self) {
        if let Some(Err(error)) = self.first_head.take() {
            self.reporter.show_if_lost(&error);
        }
    }

    /// Shows why the run did not succeed, if it did not and nothing has shown that.
    fn show_end(&self, end: &RunEnd, stream: &Publisher) {
        let failed = failed(end.status, end.error.as_deref());
        if let Some(message) = failed.filter(|message| self.reporter.model_failed.as_deref() != Some(message))
        {
            stream.fail(&failure(message));
        }
    }
}

/// The metadata of the checkpoint that rolls a run back to this state.
pub(super) fn rolling_back(run_id: &str, state: &StateSnapshot) -> Map<String, Json> {
    let mut extra = restoring(state.key.id, &state.metadata.extra);
    extra.insert(ROLLED_BACK_KEY.to_owned(), run_id.into());
    extra
}

/// The metadata of a checkpoint that restores the state of this one.
pub(super) fn restoring(checkpoint: CheckpointId, extra: &Map<String, Json>) -> Map<String, Json> {
    let mut extra = binding(extra);
    extra.insert(RESTORED_KEY.to_owned(), checkpoint.to_string().into());
    extra
}

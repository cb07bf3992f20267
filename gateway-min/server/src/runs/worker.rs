//! The life of one run, from its admission to its last write.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::{Map, Value as Json};
use threadkeep::Error;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::Load;
use threadkeep::state::{KnownHead, RollbackPoint, StateAccessor, StateSnapshot};
use threadkeep::step::StepWriter;
use threadkeep_agent::duration::{self, RunNotes};
use threadkeep_agent::tools::Snapshot;
use threadkeep_agent::{AgentSpec, Breakpoints, Ended, RunTerms, Session, binding};
use tracing::Instrument as _;

use super::Runs;
use super::control::RunGuard;
use super::error::RunError;
use super::frames::Frames;
use super::interrupted_title;
use super::journal::Journal;
use super::progress;
use super::report::Reporter;
use super::request::RunInput;
use super::resume::{self, Resumed};
use super::usage::UsageLedger;
use crate::store::{
    CancelAction, DecideOutcome, FinishOutcome, RunEnd, RunStatus, RunTotals, StartOutcome, Store,
    StoreError, ThreadStatus, persistently,
};
use crate::streams::bridge::Publisher;
use crate::telemetry::spans;
use crate::threads::lineage::RESTORED;

/// The error of a run that its user rolled back.
const ROLLED_BACK: &str = "Rolled back by user";
/// The error of a run whose model failed without a reason.
const MODEL_FAILED: &str = "LLM provider failed after retries";

/// The error of a run whose task panicked, or could not write its records.
const DIED: &str = "The gateway failed while it worked on this run; its log says more.";

/// How often a waiting run checks whether it still waits.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What a run should do.
pub(crate) struct RunSpec {
    pub(crate) run_id: String,
    pub(crate) thread_id: String,
    /// The run's input.
    pub(crate) input: RunInput,
    /// The checkpoint to start from; `None` for the head.
    pub(crate) checkpoint: Option<CheckpointId>,
    pub(crate) model_name: Option<String>,
    pub(crate) thinking: Option<bool>,
    pub(crate) reasoning_effort: Option<String>,
    pub(crate) recursion_limit: u64,
    pub(crate) breakpoints: Breakpoints,
    /// Whether the run repeats a turn with an edited question, and keeps the old turn if it fails.
    pub(crate) edits: bool,
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

/// Starts the task that works on a run. If it panics, the run ends in error, so that its thread is released.
pub(crate) fn start(
    runs: Arc<Runs>,
    spec: RunSpec,
    publisher: Arc<Publisher>,
    frames: Frames,
    guard: RunGuard,
) {
    let (store, run_id) = (runs.store.clone(), spec.run_id.clone());
    let span = spans::run(&spec.thread_id, &spec.run_id);
    let task = tokio::spawn(work(runs, spec, publisher, frames, guard).instrument(span));
    tokio::spawn(async move {
        if task.await.is_err() {
            bury(&store, &run_id).await;
        }
    });
}

/// Ends a run whose task panicked or could not write its records, unless it has ended.
async fn bury(store: &Store, run_id: &str) {
    let end = RunEnd {
        status: RunStatus::Error,
        error: Some(DIED.to_owned()),
        stop_reason: None,
        totals: RunTotals::default(),
    };
    if let Err(error) = persistently(|| store.runs().finish(run_id, &end)).await {
        tracing::error!(run_id, %error, "a run's task failed and its row could not be ended");
    }
}

/// Works on a run until everything of it is written.
async fn work(runs: Arc<Runs>, spec: RunSpec, publisher: Arc<Publisher>, frames: Frames, guard: RunGuard) {
    let mut run = Worker {
        reporter: Reporter {
            frames,
            journal: Journal::new(runs.store.clone(), &spec.thread_id, &spec.run_id),
            usage: UsageLedger::default(),
        },
        thread: ThreadId::from(spec.thread_id.as_str()),
        head: None,
        rollback: None,
        workspace: None,
        runs: &runs,
        spec: &spec,
        guard: &guard,
    };
    let abandoned = publisher.abandoned();
    let lived = async {
        let mut living = std::pin::pin!(run.live());
        tokio::select! {
            biased;
            lived = &mut living => return lived,
            () = abandoned.cancelled() => {}
        }
        // Its client disconnected, and requested that the run end with it.
        runs.cancel(&spec.run_id, CancelAction::Interrupt).await?;
        living.await
    };
    if let Err(error) = Box::pin(lived).await {
        tracing::error!(run_id = spec.run_id, thread_id = spec.thread_id, %error, "cannot write the run's records");
        // Its clients need not wait for an unavailable database.
        publisher.end();
        bury(&runs.store, &spec.run_id).await;
    }
    publisher.end();
}

struct Worker<'a> {
    runs: &'a Arc<Runs>,
    spec: &'a RunSpec,
    thread: ThreadId,
    guard: &'a RunGuard,
    reporter: Reporter,
    /// The head as the run knows it: the one it started on, then its own last commit. Every write of the run carries it.
    head: Option<KnownHead>,
    /// The state before the run; `None` until it is captured, or if that failed.
    rollback: Option<RollbackPoint>,
    /// The thread's files before the run; `None` until they are read, or if that failed.
    workspace: Option<Snapshot>,
}

impl Worker<'_> {
    async fn live(&mut self) -> Result<(), StoreError> {
        if let Some(action) = self.await_turn().await? {
            return self.never_started(action).await;
        }
        // Held to the end: the thread's next run starts after this one's last write.
        let lock = self.runs.threads.lock(&self.spec.thread_id).await;
        self.guard.control.begun();
        let started = Utc::now();
        self.runs.store.threads().set_status(&self.spec.thread_id, ThreadStatus::Running).await?;
        self.reporter.journal.start().await?;
        let accessor = match self.runs.threads.accessor_for_run().await {
            Ok(accessor) => accessor,
            Err(error) => {
                let outcome = Outcome::Failed { name: error.class_name(), message: error.to_string() };
                return self.conclude(None, outcome, started).await;
            }
        };
        let outcome = match self.execute(accessor).await {
            Ok(Ended::Done { stop_reason, fallback }) => Outcome::Ended { stop_reason, fallback },
            Ok(Ended::Cancelled) => Outcome::Cancelled,
            Err(error) => Outcome::Failed { name: error.class_name(), message: error.to_string() },
        };
        self.conclude(Some(accessor), outcome, started).await?;
        drop(lock);
        Ok(())
    }

    /// Waits until the run holds the thread. Returns the action if it is cancelled first.
    async fn await_turn(&mut self) -> Result<Option<CancelAction>, StoreError> {
        let in_doubt = AtomicBool::new(false);
        loop {
            let promoted = self.guard.control.promoted.notified();
            let started = persistently(|| async {
                let started = self.runs.store.runs().start(&self.spec.run_id).await;
                in_doubt.fetch_or(matches!(started, Err(StoreError::InDoubt { .. })), Ordering::Relaxed);
                started
            });
            match started.await? {
                StartOutcome::Started => return Ok(None),
                StartOutcome::NotPending(RunStatus::Running) if in_doubt.load(Ordering::Relaxed) => {
                    return Ok(None);
                }
                StartOutcome::Cancelled(action) => return Ok(Some(action)),
                StartOutcome::NotPending(_) => return Ok(Some(CancelAction::Interrupt)),
                StartOutcome::Waiting => {
                    tokio::select! {
                        () = promoted => {}
                        // A stopping gateway cancels its runs without recording that in their rows.
                        () = self.guard.control.cancel.cancelled() => {
                            self.runs.cancel(&self.spec.run_id, CancelAction::Interrupt).await?;
                        }
                        changed = self.row_changed() => changed?,
                    }
                }
            }
        }
    }

    /// Polls the row of the waiting run until it no longer waits: the predecessor may be another process's run or
    /// another writer, whose end is not announced.
    async fn row_changed(&self) -> Result<(), StoreError> {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let row = self.runs.store.runs().get(&self.spec.run_id).await?;
            if row.is_none_or(|row| !row.waiting || row.cancel_action.is_some()) {
                return Ok(());
            }
        }
    }

    async fn execute(&mut self, accessor: &StateAccessor) -> Result<Ended, RunError> {
        let (spec, thread) = (self.spec, &self.thread);
        let mut head = accessor.known_head(thread).await?;
        if spec.checkpoint.is_some() {
            accessor.check(thread, spec.checkpoint).await?;
        }
        self.still_owned().await?;
        self.head = Some(head.clone());
        self.reporter.frames.metadata(&spec.run_id);
        self.workspace = self.look_at_workspace().await;
        match accessor.capture(&mut head).await {
            Ok(point) => self.rollback = Some(point),
            Err(error @ Error::Conflict { .. }) => return Err(error.into()),
            Err(error) => {
                tracing::warn!(run_id = spec.run_id, %error, "no rollback possible: cannot read the state before the run");
            }
        }
        // Before the first write: a run whose agent cannot be built leaves its thread unchanged, in either mode.
        let agent = self.runs.agents.lead(&spec.agent()).await?;
        spans::run_model(agent.model.name());
        let at = self.linearized(accessor, &mut head).await;
        self.head = Some(head.clone());
        let mut writer = StepWriter::open_known(accessor, head, at?).await?;
        let input = self.input(accessor, writer.state()).await?;
        let (store, run_id) = (&self.runs.store, &spec.run_id);
        let progress =
            progress::report(self.reporter.usage.watch(), self.runs.progress_every, |totals| async move {
                store.runs().progress(run_id, &totals).await.map(|_| ())
            });
        let terms = RunTerms {
            run_id: spec.run_id.clone(),
            metadata: spec.metadata.clone(),
            recursion_limit: spec.recursion_limit,
            breakpoints: spec.breakpoints.clone(),
            cancel: self.guard.control.cancel.clone(),
        };
        let mut session = Session::new(terms, &mut writer, &mut self.reporter);
        // A run that waits for the thread goes first, and evaluates the goal after its own turn.
        let yields = || async { Ok(store.runs().is_waited_for(&spec.thread_id).await?) };
        let ended = tokio::select! {
            biased;
            ended = agent.work(&mut session, input, yields) => Ok(ended?),
            never = progress => match never {},
        };
        self.head = Some(writer.head().clone());
        ended
    }

    /// Checks that the run is still this process's, after its head was read: then nobody else wrote to the thread
    /// between the run's start and that read, and from there on each write carries the head.
    async fn still_owned(&self) -> Result<(), RunError> {
        let runs = self.runs.store.runs();
        if runs.owner().is_none() {
            return Ok(());
        }
        let row = runs.get(&self.spec.run_id).await?;
        if row.is_some_and(|row| row.status.is_active()) { Ok(()) } else { Err(RunError::TakenOver) }
    }

    /// The agent's input, by channel; `None` continues with the thread's next nodes.
    async fn input(
        &self,
        accessor: &StateAccessor,
        state: Option<&StateSnapshot>,
    ) -> Result<Option<Map<String, Json>>, RunError> {
        let resume = match &self.spec.input {
            RunInput::Values(values) => return Ok(Some(values.clone())),
            RunInput::Continue => return Ok(None),
            RunInput::Resume(resume) => resume,
        };
        match resume::resolve(&self.thread, state, resume)? {
            Resumed::Answer(messages) => {
                Ok(Some(Map::from_iter([(MESSAGES_CHANNEL.to_owned(), messages.into())])))
            }
            Resumed::GoOn(state) => {
                resume::keep(accessor, state, &resume.value).await?;
                Ok(None)
            }
        }
    }

    /// The checkpoint to open: `None` for the head, including after the selected state was written onto the head.
    async fn linearized(
        &self,
        accessor: &StateAccessor,
        head: &mut KnownHead,
    ) -> Result<Option<CheckpointId>, RunError> {
        let Some(selected) = self.spec.checkpoint else { return Ok(None) };
        let source = accessor.get_loading(&self.thread, Some(selected), Load::None).await?;
        let extra = source.map(|state| restoring(selected, &state.metadata.extra)).unwrap_or_default();
        match accessor.linearize(head, selected, extra).await {
            Ok(restored) => Ok(if restored.is_some() { None } else { Some(selected) }),
            Err(error @ (Error::NotFound { .. } | Error::BrokenLineage { .. } | Error::Corrupt { .. })) => {
                let (run, checkpoint) = (self.spec.run_id.clone(), selected);
                tracing::error!(run_id = run, %checkpoint, %error, "cannot read the checkpoint to resume from");
                Err(RunError::NotMaterialized { run, checkpoint })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Finishes the run: rolls back if requested, ends the row, and does all remaining writes.
    async fn conclude(
        &mut self,
        accessor: Option<&StateAccessor>,
        outcome: Outcome,
        started: DateTime<Utc>,
    ) -> Result<(), StoreError> {
        let mut end = match outcome {
            Outcome::Cancelled => self.cancelled(accessor).await?,
            Outcome::Failed { name, message } => {
                self.reporter.frames.error(name, &message);
                self.reporter.journal.error(name, &message);
                End { error: Some(message), ..End::new(RunStatus::Error) }
            }
            Outcome::Ended { stop_reason, fallback: None } => {
                self.reporter.journal.end();
                End { stop_reason, ..End::new(RunStatus::Success) }
            }
            Outcome::Ended { stop_reason, fallback: Some(reason) } => {
                let reason = if reason.is_empty() { MODEL_FAILED.to_owned() } else { reason };
                self.reporter.journal.error("LLMProviderError", &reason);
                End { error: Some(reason), stop_reason, ..End::new(RunStatus::Error) }
            }
        };
        self.undo_edit(accessor, &mut end).await;
        self.note_workspace_changes().await;
        self.reporter.journal.close().await;
        let mut decided = self.decide(&end).await?;
        if let DecideOutcome::CancelRequested(_) = decided {
            end = self.cancelled(accessor).await?;
            self.undo_edit(accessor, &mut end).await;
            decided = self.decide(&end).await?;
        }
        if let DecideOutcome::AlreadyTerminal(status) = decided {
            // Another process considered this one dead; from now on this run must not write.
            tracing::error!(run_id = self.spec.run_id, %status, "the run was ended by another process");
            return Ok(());
        }
        if let Some(accessor) = accessor {
            if end.status == RunStatus::Success {
                self.note_duration(accessor, started).await;
            }
            self.settle_title(accessor, &end).await;
        }
        // Last: ending the row releases the thread, also to other processes.
        self.end_row(&end).await
    }

    /// The thread's current files. A failure only costs the summary of their changes.
    async fn look_at_workspace(&self) -> Option<Snapshot> {
        let root = self.runs.agents.thread_dir(&self.spec.thread_id);
        let taken = tokio::task::spawn_blocking(move || Snapshot::take(&root)).await;
        let taken = taken.unwrap_or_else(|error| Err(error.into()));
        let run_id = &self.spec.run_id;
        taken.inspect_err(|error| tracing::warn!(run_id, %error, "cannot read the thread's files")).ok()
    }

    /// Reports what the run changed in the thread's directory, if anything.
    async fn note_workspace_changes(&mut self) {
        let Some(before) = self.workspace.take() else { return };
        let Some(after) = self.look_at_workspace().await else { return };
        if let Some(changes) = before.changes(&after) {
            self.reporter.journal.workspace_changes(&changes);
        }
    }

    /// Carries out a cancellation: an interrupted run keeps what it committed, a rolled back one restores the state
    /// before it.
    async fn cancelled(&mut self, accessor: Option<&StateAccessor>) -> Result<End, StoreError> {
        // A run that another process has ended has nothing to restore.
        let row = self.runs.store.runs().get(&self.spec.run_id).await?.filter(|row| row.status.is_active());
        let rolls_back = row.and_then(|row| row.cancel_action) == Some(CancelAction::Rollback);
        if !rolls_back || !self.restore(accessor).await {
            return Ok(End::new(RunStatus::Interrupted));
        }
        Ok(End { error: Some(ROLLED_BACK.to_owned()), restored: true, ..End::new(RunStatus::Error) })
    }

    /// Restores the old turn if the edited turn that should replace it does not finish.
    async fn undo_edit(&mut self, accessor: Option<&StateAccessor>, end: &mut End) {
        if !self.spec.edits || end.status == RunStatus::Success || end.restored {
            return;
        }
        // What another process has ended no longer belongs to this one.
        let row = persistently(|| self.runs.store.runs().get(&self.spec.run_id)).await;
        if row.is_ok_and(|row| row.is_some_and(|row| row.status.is_active())) {
            end.restored = self.restore(accessor).await;
        }
    }

    /// Restores the state before the run; `false` if that is not possible. Followers of an edit are shown the restored
    /// state.
    async fn restore(&mut self, accessor: Option<&StateAccessor>) -> bool {
        let run_id = &self.spec.run_id;
        let (Some(accessor), Some(head), Some(point)) = (accessor, &mut self.head, &self.rollback) else {
            tracing::warn!(run_id, "not rolled back: the state before the run was not captured");
            return false;
        };
        let captured = point.snapshot().map(|state| restoring(state.key.id, &state.metadata.extra));
        let restored = accessor.restore(head, point, captured.unwrap_or_default()).await;
        let shown = restored.and_then(|state| match state {
            Some(state) if self.spec.edits => self.reporter.frames.values(&state),
            _ => Ok(()),
        });
        shown.inspect_err(|error| tracing::error!(run_id, %error, "not rolled back")).is_ok()
    }

    /// A run that was cancelled before it started writes no checkpoint and shows only its end.
    async fn never_started(&mut self, action: CancelAction) -> Result<(), StoreError> {
        let end = match action {
            CancelAction::Rollback => {
                End { error: Some(ROLLED_BACK.to_owned()), ..End::new(RunStatus::Error) }
            }
            CancelAction::Interrupt => End::new(RunStatus::Interrupted),
        };
        self.reporter.journal.close().await;
        self.end_row(&end).await?;
        Ok(())
    }

    /// Ends the run's row, after everything else is written, and wakes the run that waited for it.
    async fn end_row(&self, end: &End) -> Result<(), StoreError> {
        let status = end.status;
        let end = self.row_end(end);
        let outcome = persistently(|| self.runs.store.runs().finish(&self.spec.run_id, &end)).await?;
        if matches!(outcome, FinishOutcome::Finished { .. }) {
            self.runs.metrics.run_ended(status);
            spans::run_ended(status);
        }
        if let FinishOutcome::Finished { promoted: Some(next) } = &outcome
            && let Some(control) = self.runs.local.get(next)
        {
            control.promoted.notify_one();
        }
        Ok(())
    }

    /// Stores how the run will end; no later cancellation changes it.
    async fn decide(&self, end: &End) -> Result<DecideOutcome, StoreError> {
        let end = self.row_end(end);
        persistently(|| self.runs.store.runs().decide(&self.spec.run_id, &end)).await
    }

    fn row_end(&self, end: &End) -> RunEnd {
        RunEnd {
            status: end.status,
            error: end.error.clone(),
            stop_reason: end.stop_reason.clone(),
            totals: self.reporter.usage.totals(),
        }
    }

    /// Notes how long the run took. A failure only costs a later history read some work.
    async fn note_duration(&self, accessor: &StateAccessor, started: DateTime<Utc>) {
        let (run_id, seconds) = (&self.spec.run_id, (Utc::now() - started).num_seconds());
        let notes = RunNotes {
            durations: [(run_id.clone(), u64::try_from(seconds).unwrap_or(0))].into(),
            messages: self.reporter.journal.answers().map(|id| (id.to_owned(), run_id.clone())).collect(),
        };
        let head = self.head.as_ref().and_then(KnownHead::id);
        if let Err(error) = duration::note(accessor, &self.thread, head, &notes).await {
            tracing::warn!(run_id, %error, "could not note the duration of the run");
        }
    }

    /// Gives an interrupted or failed first turn its title, and copies the state's title to the thread's display name.
    async fn settle_title(&self, accessor: &StateAccessor, end: &End) {
        let load = Load::Only([ChannelName::from("title")].into());
        let settled = async {
            // A restored state is unchanged, and a failed edit is not a first turn.
            if end.status != RunStatus::Success && !end.restored && !self.spec.edits {
                let config = self.runs.config.current_async().await;
                if let Some(head) = self.head.clone() {
                    interrupted_title::write(accessor, head, &config.title).await?;
                }
            }
            let state = accessor.get_loading(&self.thread, None, load).await?;
            if let Some(Json::String(title)) = state.map(|state| state.json("title")).transpose()?.flatten() {
                let (threads, id) = (self.runs.store.threads(), &self.spec.thread_id);
                let row = threads.get(id, None).await?;
                // Most turns keep the title, and a read waits for nothing.
                if row.is_none_or(|row| row.display_name.as_ref() != Some(&title)) {
                    threads.set_display_name(id, Some(&title)).await?;
                }
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        };
        if let Err(error) = settled.await {
            tracing::warn!(thread_id = self.spec.thread_id, %error, "could not set the title");
        }
    }
}

/// How a run ends.
struct End {
    status: RunStatus,
    error: Option<String>,
    stop_reason: Option<String>,
    /// Whether the state is that from before the run.
    restored: bool,
}

impl End {
    fn new(status: RunStatus) -> Self {
        Self { status, error: None, stop_reason: None, restored: false }
    }
}

/// The metadata of a checkpoint that restores the state of this one.
fn restoring(checkpoint: CheckpointId, extra: &Map<String, Json>) -> Map<String, Json> {
    let mut extra = binding(extra);
    extra.insert(RESTORED.to_owned(), checkpoint.to_string().into());
    extra
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{MultitaskStrategy, NewRun, NewThread, StoreOptions};

    #[tokio::test]
    async fn a_run_whose_task_died_ends_in_error_and_frees_its_thread() {
        let store = Store::open_memory(StoreOptions::default()).await.unwrap();
        store.threads().create(NewThread { thread_id: "t".into(), ..NewThread::default() }).await.unwrap();
        let run = |id: &str| NewRun { run_id: id.into(), thread_id: "t".into(), ..NewRun::default() };
        store.runs().admit(run("r"), MultitaskStrategy::Reject).await.unwrap();
        bury(&store, "r").await;
        let row = store.runs().get("r").await.unwrap().unwrap();
        assert_eq!((row.status, row.error.as_deref()), (RunStatus::Error, Some(DIED)));
        store.runs().admit(run("next"), MultitaskStrategy::Reject).await.unwrap();
        bury(&store, "r").await;
        assert_eq!(store.runs().get("r").await.unwrap().unwrap(), row, "once");
        let held = store.runs().active_for_thread("t").await.unwrap().unwrap();
        assert_eq!(held.run_id, "next", "another run keeps its thread");
    }
}

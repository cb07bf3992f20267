//! Rollbacks of runs whose process, or task, is gone, if they were requested, or the run is an edit, whose old turn
//! comes back: the process that has the run then carries them out.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Map;
use threadkeep::Error;
use threadkeep::deletion::RUN_ID_KEY;
use threadkeep::id::{CheckpointId, TaskId, ThreadId};
use threadkeep::metadata::{Metadata, ROLLED_BACK_KEY};
use threadkeep::saver::Load;
use threadkeep::state::{HistoryQuery, StateAccessor, StateSnapshot};
use threadkeep_agent::duration::RUN_DURATIONS;
use threadkeep_records::{CancelAction, FinishOutcome, RecordsError, RunEnd, RunRow, RunStatus};
use tokio::time::Instant;

use super::Runs;
use super::control::RunGuard;
use super::ending::DIED;
use super::error::RunError;
use super::worker::rolling_back;
use crate::streams::verdict::ROLLED_BACK;

/// Checkpoints read at once while looking for the state before a run.
const PAGE: usize = 20;
/// How long a store that is unavailable is waited for. Without it no other run could work on the thread either.
const PATIENCE: Duration = Duration::from_mins(10);
/// The pauses between the attempts.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// What is left of the time in which a restore is attempted.
pub(super) struct Patience {
    until: Instant,
    pause: Duration,
}

impl Patience {
    pub(super) fn begin() -> Self {
        Self { until: Instant::now() + PATIENCE, pause: PAUSE }
    }
}

impl Runs {
    /// Waits until a restore is attempted again; `false` if it is not, because that was done for long enough, or the
    /// gateway stops.
    pub(super) async fn may_try_again(&self, patience: &mut Patience) -> bool {
        let pause = patience.pause;
        patience.pause = (2 * pause).min(LONGEST_PAUSE);
        if Instant::now() + pause >= patience.until {
            return false;
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => true,
            () = self.delegator.stopping.cancelled() => false,
        }
    }

    /// Restores the state before each of these runs, which are this process's and have no task, and ends them.
    pub(crate) fn roll_back(self: &Arc<Self>, taken_over: Vec<RunRow>) {
        for row in taken_over {
            tracing::warn!(
                run_id = row.run_id,
                thread_id = row.thread_id,
                "rolling back a run whose process or task is gone"
            );
            let (runs, run_id) = (Arc::clone(self), row.run_id.clone());
            // Before anyone can ask for the run: who waits for its end finds it here, and its lease is renewed.
            let guard = self.local.enter(&run_id);
            tokio::spawn(async move {
                let task = {
                    let runs = Arc::clone(&runs);
                    tokio::spawn(async move { runs.roll_back_one(row, guard).await })
                };
                // Another attempt may panic, too, and its thread is needed.
                if task.await.is_err_and(|error| error.is_panic()) {
                    let _guard = runs.local.enter(&run_id);
                    let end = RunEnd { rollback_settled: true, ..RunEnd::failed(DIED) };
                    runs.bury(&run_id, Some(end)).await;
                }
            });
        }
    }

    /// Holds `guard` until the run has ended. One that cannot be rolled back ends, too: its thread is needed.
    async fn roll_back_one(self: &Arc<Self>, row: RunRow, guard: RunGuard) {
        let _lock = self.threads.lock(&row.thread_id).await;
        guard.control.begun();
        let asked = row.cancel_action == Some(CancelAction::Rollback);
        let named = |head: Option<CheckpointId>| Some(head.map(|id| id.to_string()).unwrap_or_default());
        let mut lost = None;
        let (error, left) = match self.restore_when_possible(&row, &mut lost).await {
            Ok(Undone::Succeeded(head)) => (None, named(Some(head))),
            Ok(Undone::Restored(head)) if asked => (Some(ROLLED_BACK.to_owned()), named(head)),
            // Nobody asked for that: it ends with what it died of.
            Ok(Undone::Restored(head)) => {
                (Some(row.error.clone().unwrap_or_else(|| DIED.to_owned())), named(head))
            }
            // It is another process's, or will be: that one rolls it back.
            Err(error @ RunError::TakenOver) => {
                return tracing::warn!(run_id = row.run_id, %error, "not rolled back");
            }
            Err(error) if self.is_stopping() => {
                return tracing::warn!(run_id = row.run_id, %error, "left to be rolled back by the next process");
            }
            Err(error) => {
                tracing::error!(run_id = row.run_id, %error, "cannot roll back a run whose process or task is gone");
                let run_id = &row.run_id;
                let kept =
                    format!("Run {run_id} could not be rolled back, and what it committed is kept: {error}");
                (Some(kept), None)
            }
        };
        let error = lost.or(error);
        let end = RunEnd {
            status: if error.is_some() { RunStatus::Error } else { RunStatus::Success },
            stop_reason: row.stop_reason.filter(|_| error.is_some()),
            error,
            display_name: None,
            left_checkpoint: left,
            rollback_settled: true,
            not_before: None,
            totals: row.totals,
        };
        match self.finish(&row.run_id, &end).await {
            Ok(FinishOutcome::TakenOver) => {
                tracing::warn!(run_id = row.run_id, "another process rolls the run back again");
            }
            // A success that is cancelled before it is stored is none.
            Ok(FinishOutcome::CancelRequested(_)) => self.bury(&row.run_id, None).await,
            Ok(_) => {}
            Err(error) => {
                tracing::error!(run_id = row.run_id, %error, "cannot end a run that was rolled back");
                self.bury(&row.run_id, Some(end)).await;
            }
        }
    }

    /// Restores the state before the run, again while the store is unavailable or another writer is in the way. `lost`
    /// says what the store lost of what it had acknowledged: another attempt does not find it again.
    async fn restore_when_possible(
        &self,
        row: &RunRow,
        lost: &mut Option<String>,
    ) -> Result<Undone, RunError> {
        let mut patience = Patience::begin();
        loop {
            match self.restore_before(row).await {
                Err(error) if error.may_pass() => {
                    tracing::warn!(run_id = row.run_id, %error, "cannot roll back a run yet");
                    if error.is_history_lost() {
                        let found = error.to_string();
                        self.note_loss(&row.run_id, &found).await;
                        lost.get_or_insert(found);
                    }
                    if !self.may_try_again(&mut patience).await {
                        return Err(error);
                    }
                }
                done => return done,
            }
        }
    }

    async fn restore_before(&self, row: &RunRow) -> Result<Undone, RunError> {
        // An edited cadence keeps runs from starting; this one has run, and what it owes was accepted with it.
        let accessor = self.threads.accessor();
        let thread = ThreadId::from(row.thread_id.as_str());
        let mut head = accessor.known_head(&thread).await?;
        // Only its owner writes to the thread, so the head stays until this process is taken for dead too.
        if !self.still_has(&row.run_id).await? {
            return Err(RunError::TakenOver);
        }
        let before = match (Wrote::find(accessor, &thread, row).await?, head.id()) {
            (Wrote::All(undone), _) => return Ok(undone),
            (Wrote::Since(before), _) => before,
            // Its process may be about to write. It finds another head then.
            (Wrote::Nothing, Some(head)) => Before { head: Some(head), since: Vec::new() },
            (Wrote::Nothing, None) => return Ok(Undone::Restored(None)),
        };
        let noted = self.records.runs().finished_before(&row.run_id).await?;
        let finished_before = |task: TaskId| match &noted {
            Some(noted) => noted.contains(&task.to_string()),
            None => !before.since.contains(&task),
        };
        let point = accessor.captured_at(&thread, before.head, finished_before).await?;
        let extra = point.snapshot().map(|state| rolling_back(&row.run_id, state));
        accessor.restore(&mut head, &point, extra.unwrap_or_default()).await?;
        Ok(Undone::Restored(head.id()))
    }

    /// Whether the run is active, and this process's.
    pub(super) async fn still_has(&self, run_id: &str) -> Result<bool, RecordsError> {
        let runs = self.records.runs();
        let found = runs.get(run_id).await?;
        Ok(found.is_some_and(|row| row.status.is_active() && row.owner_worker_id.as_deref() == runs.owner()))
    }
}

/// What comes of a run that owes a restore. With the head that is left; none if the thread has no checkpoint.
enum Undone {
    /// The state before it is restored.
    Restored(Option<CheckpointId>),
    /// It had succeeded, and what it has written stays.
    Succeeded(CheckpointId),
}

/// What a run has written: while it held the thread, all newer checkpoints were its own.
enum Wrote {
    Nothing,
    /// Its last checkpoint: nothing is left to do.
    All(Undone),
    /// Checkpoints since this state.
    Since(Before),
}

/// The state before a run.
struct Before {
    /// The head; none if the thread had no checkpoint.
    head: Option<CheckpointId>,
    /// The tasks that the run's first checkpoint has applied.
    since: Vec<TaskId>,
}

impl Wrote {
    /// # Errors
    /// [`Error::InvalidInput`] if an operator's prune has removed the state before the run since; the accessor's.
    async fn find(accessor: &StateAccessor, thread: &ThreadId, row: &RunRow) -> threadkeep::Result<Self> {
        let (mut before, mut first) = (None, None::<StateSnapshot>);
        loop {
            let query = HistoryQuery { before, limit: Some(PAGE), filter: Map::new(), load: Load::None };
            let page = accessor.history(thread, query).await?;
            let ended = page.len() < PAGE;
            for state in page {
                before = Some(state.key.id);
                let is_of_run =
                    |key: &str| state.metadata.extra.get(key).is_some_and(|named| *named == row.run_id);
                let (is_own, restores) = (is_of_run(RUN_ID_KEY), is_of_run(ROLLED_BACK_KEY));
                if !is_own && !restores {
                    return Self::since(first, before);
                }
                if first.is_none() {
                    // Its process died between the restore, which is one write, and the end of its row.
                    if restores {
                        return Ok(Self::All(Undone::Restored(before)));
                    }
                    if row.cancel_action.is_none() && is_note_of(&state.metadata, &row.run_id) {
                        return Ok(Self::All(Undone::Succeeded(state.key.id)));
                    }
                }
                first = Some(state);
            }
            if ended {
                return Self::since(first, None);
            }
        }
    }

    /// With the run's first checkpoint, if there is one, and the one that is older.
    fn since(first: Option<StateSnapshot>, head: Option<CheckpointId>) -> threadkeep::Result<Self> {
        first.map_or(Ok(Self::Nothing), |first| Before::of(first, head).map(Self::Since))
    }
}

/// Whether this is the note of a run on itself, which is written only once its success is decided: a power loss may
/// take the decision, and leave the note.
fn is_note_of(metadata: &Metadata, run_id: &str) -> bool {
    let noted = metadata.extra.object(RUN_DURATIONS);
    metadata.is_duration_only() && noted.is_some_and(|runs| runs.get(run_id).is_some())
}

impl Before {
    /// With the run's first checkpoint, and the one that is older.
    fn of(first: StateSnapshot, head: Option<CheckpointId>) -> threadkeep::Result<Self> {
        // The first checkpoint of a thread has no parent, and it alone is before step 0. This one has lost its parent
        // since, so the older one, or that there is none, is not what the run began with.
        if first.parent.is_none() && first.metadata.step >= 0 {
            let thread = &first.key.thread;
            return Err(Error::InvalidInput(format!("thread {thread}: the state before the run was pruned")));
        }
        Ok(Self { head, since: first.applied })
    }
}

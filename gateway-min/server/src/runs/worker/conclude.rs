//! The end of a run: its final state, and its row.

use chrono::{DateTime, Utc};
use threadkeep::Error;
use threadkeep::state::StateAccessor;

use super::turn::NeverStarts;
use super::{Outcome, Worker, rolling_back};
use crate::runs::error::RunError;
use crate::runs::takeover::Patience;
use crate::streams::verdict::{MODEL_FAILED, ROLLED_BACK};
use crate::telemetry::spans;
use threadkeep_records::{
    CancelAction, DecideOutcome, FinishOutcome, LEASE_EXPIRED_ERROR, RecordsError, RunEnd, RunStatus,
    persistently,
};

/// The error of a run that a stopping gateway interrupts: its clients did not ask for that.
const STOPPED: &str =
    "The gateway stopped before this run ended. What it completed is kept; run the thread again to go on.";
/// The error of a run whose model failed without a reason.
const UNEXPLAINED: &str = "LLM provider failed after retries";

/// The outcome of a run.
pub(super) struct End {
    pub(super) status: RunStatus,
    error: Option<String>,
    stop_reason: Option<String>,
    /// Whether a rollback, if it was requested or the run is an edit, is carried out, impossible, or has nothing to
    /// restore.
    rollback_settled: bool,
}

impl End {
    fn new(status: RunStatus) -> Self {
        Self { status, error: None, stop_reason: None, rollback_settled: false }
    }

    /// Of a run whose state is the one from before it, as was requested.
    fn rolled_back() -> Self {
        Self { error: Some(ROLLED_BACK.to_owned()), rollback_settled: true, ..Self::new(RunStatus::Error) }
    }
}

/// What came of an attempt to restore the state before a run.
enum Restored {
    Done,
    /// That is not possible: what was committed is kept.
    Not,
    /// Another process has the run, or the next one will: that one restores.
    Elsewhere,
}

impl Worker<'_> {
    /// Finishes the run: rolls back if requested, ends the row, and does all remaining writes.
    pub(super) async fn conclude(
        &mut self,
        accessor: Option<&StateAccessor>,
        outcome: Outcome,
        started: DateTime<Utc>,
    ) -> Result<(), RecordsError> {
        if let Outcome::Failed { message, .. } = &outcome
            && self.reporter.owned.is_taken_over().await
        {
            let run_id = &self.spec.run_id;
            tracing::error!(run_id, error = %message, "another process has ended the run, or taken it over");
            // Its clients are shown how that one ends it.
            self.close_and_leave().await;
            return Ok(());
        }
        let mut end = match outcome {
            Outcome::Cancelled => {
                let Some(end) = self.cancelled(accessor).await? else {
                    self.close_and_leave().await;
                    return Ok(());
                };
                end
            }
            Outcome::Failed { name, message } => {
                // What it lost is shown.
                if self.reporter.history_lost.as_ref() != Some(&message) {
                    self.reporter.frames.error(name, &message);
                    self.reporter.journal.error(name, &message);
                }
                End { error: Some(message), ..End::new(RunStatus::Error) }
            }
            Outcome::Ended { stop_reason, fallback: None } => {
                self.reporter.journal.end();
                End { stop_reason, ..End::new(RunStatus::Success) }
            }
            Outcome::Ended { stop_reason, fallback: Some(reason) } => {
                let reason = if reason.is_empty() { UNEXPLAINED.to_owned() } else { reason };
                self.reporter.journal.error(MODEL_FAILED, &reason);
                self.reporter.model_failed = Some(reason.clone());
                End { error: Some(reason), stop_reason, ..End::new(RunStatus::Error) }
            }
        };
        if !self.undo_edit(accessor, &mut end).await? {
            self.close_and_leave().await;
            return Ok(());
        }
        self.note_workspace_changes().await;
        let mut decided = match self.reporter.journal.close_and_decide(&self.row_end(&end)).await {
            Some(decided) => decided,
            None => self.decide(&end).await?,
        };
        // Accepted while the run finished, or failed.
        if let DecideOutcome::CancelRequested(_) = decided {
            let Some(cancelled) = self.cancelled(accessor).await? else {
                self.leave();
                return Ok(());
            };
            end = cancelled;
            if !self.undo_edit(accessor, &mut end).await? {
                self.leave();
                return Ok(());
            }
            decided = self.decide(&end).await?;
        }
        if matches!(decided, DecideOutcome::AlreadyTerminal(_) | DecideOutcome::TakenOver) {
            // Another process considered this one dead; from now on this run must not write.
            tracing::error!(
                run_id = self.spec.run_id,
                ?decided,
                "another process has ended the run, or taken it over"
            );
            self.leave();
            return Ok(());
        }
        let mut title = None;
        if let Some(accessor) = accessor {
            if end.status == RunStatus::Success {
                self.note_duration(accessor, started).await;
            }
            title = self.settle_title(accessor, &end).await;
        }
        // Last: ending the row releases the thread, also to other processes.
        self.end_row(&end, title).await
    }

    /// Leaves the run to the process that has ended it, has taken it over, or will.
    fn leave(&mut self) {
        self.taken_over = true;
    }

    /// The same before its last events are written.
    async fn close_and_leave(&mut self) {
        self.reporter.journal.close().await;
        self.leave();
    }

    /// Carries out a cancellation: an interrupted run keeps what it committed, a rolled back one restores the state
    /// before it. None if another process rolls it back, which has taken the run over, or will.
    async fn cancelled(&mut self, accessor: Option<&StateAccessor>) -> Result<Option<End>, RecordsError> {
        // A run that another process has ended has nothing to restore.
        let row = persistently(|| self.runs.records.runs().get(&self.spec.run_id)).await?;
        if row.as_ref().is_some_and(|row| row.status.is_active() && self.runs.streams.is_foreign(row)) {
            return Ok(None);
        }
        let row = row.filter(|row| row.status.is_active());
        let action = row.as_ref().and_then(|row| row.cancel_action);
        if row.is_some() && action.is_none() && self.guard.control.is_lost() {
            return Ok(Some(self.lost()));
        }
        let rolls_back = action == Some(CancelAction::Rollback);
        if rolls_back {
            match self.restore(accessor).await? {
                Restored::Done => return Ok(Some(End::rolled_back())),
                Restored::Elsewhere => return Ok(None),
                Restored::Not => {}
            }
        }
        // What was committed stays, also after a power loss.
        if let (Some(accessor), Some(_)) = (accessor, &self.left)
            && let Err(error) = accessor.saver().flush(&self.thread).await
        {
            self.reporter.report_if_lost(&error).await;
            tracing::warn!(run_id = self.spec.run_id, %error, "a power loss may take what the run has written");
        }
        if row.is_some() && action.is_none() && self.runs.is_stopping() {
            return Ok(Some(self.stopped()));
        }
        Ok(Some(End { rollback_settled: rolls_back, ..End::new(RunStatus::Interrupted) }))
    }

    /// The end of a run that its stopping gateway interrupts. It is stored why: without an error, a run has succeeded, or
    /// its client has cancelled it.
    fn stopped(&mut self) -> End {
        self.reporter.frames.error("RunError", STOPPED);
        End { error: Some(STOPPED.to_owned()), ..End::new(RunStatus::Interrupted) }
    }

    /// The end of a run whose lease could not be renewed in time, and that is still its process's.
    fn lost(&mut self) -> End {
        self.reporter.frames.error("RunError", LEASE_EXPIRED_ERROR);
        self.reporter.journal.error("RunError", LEASE_EXPIRED_ERROR);
        End { error: Some(LEASE_EXPIRED_ERROR.to_owned()), ..End::new(RunStatus::Error) }
    }

    /// Restores the old turn if the edited turn that should replace it does not finish. `false` if another process has
    /// ended the run or taken it over, or will take it over: that one restores.
    ///
    /// # Errors
    /// The run's owner cannot be read. The row has not ended, so the process that ends it restores.
    async fn undo_edit(
        &mut self,
        accessor: Option<&StateAccessor>,
        end: &mut End,
    ) -> Result<bool, RecordsError> {
        if !self.spec.edits || end.status == RunStatus::Success {
            return Ok(true);
        }
        // What a rollback could not restore was attempted for long enough.
        if !self.restored && !end.rollback_settled {
            if !persistently(|| self.runs.still_has(&self.spec.run_id)).await? {
                return Ok(false);
            }
            match self.restore(accessor).await? {
                Restored::Elsewhere => return Ok(false),
                Restored::Not => {}
                // A rollback that was requested meanwhile, unnoticed by the run, is carried out by this.
                Restored::Done => {
                    let row = persistently(|| self.runs.records.runs().get(&self.spec.run_id)).await?;
                    if row.is_some_and(|row| row.cancel_action == Some(CancelAction::Rollback)) {
                        *end = End::rolled_back();
                    }
                }
            }
        }
        // Where that is not possible, what was committed is kept.
        end.rollback_settled = true;
        Ok(true)
    }

    /// Restores the state before the run, again while the store is unavailable, as for a process that is gone: the row
    /// does not end before that. Followers of an edit are shown the restored state.
    ///
    /// # Errors
    /// The run's owner cannot be read before another attempt.
    async fn restore(&mut self, accessor: Option<&StateAccessor>) -> Result<Restored, RecordsError> {
        let (runs, run_id) = (self.runs, &self.spec.run_id);
        let (Some(accessor), Some(head)) = (accessor, &mut self.head) else {
            // It has failed before it read its thread, and has written nothing.
            self.restored = true;
            return Ok(Restored::Done);
        };
        if self.restored {
            return Ok(Restored::Done);
        }
        let Some(point) = &self.rollback else {
            tracing::warn!(run_id, "not rolled back: the state before the run was not captured");
            return Ok(Restored::Not);
        };
        let extra = point.snapshot().map(|state| rolling_back(run_id, state)).unwrap_or_default();
        let mut patience = Patience::begin();
        let state = loop {
            let error = match accessor.restore(head, point, extra.clone()).await {
                Ok(state) => break state,
                Err(error) => error,
            };
            // Another attempt works on what the store has now, and does not find it again.
            self.reporter.report_if_lost(&error).await;
            let is_final = match &error {
                // A commit of the run that was in doubt may have arrived; somebody else's write stays.
                Error::Conflict { found, .. } => head.is_moved_to(*found),
                // Nothing keeps the first commit to a thread out, and it may never arrive.
                Error::InDoubt { .. } => head.id().is_none(),
                _ => false,
            };
            let error = RunError::from(error);
            if is_final || !error.may_pass() {
                tracing::error!(run_id, %error, "not rolled back");
                return Ok(Restored::Not);
            }
            tracing::warn!(run_id, %error, "cannot roll back a run yet");
            let again = runs.may_try_again(&mut patience).await;
            if runs.is_stopping() {
                tracing::warn!(run_id, "left to be rolled back by the next process");
                return Ok(Restored::Elsewhere);
            }
            if !again {
                tracing::error!(run_id, %error, "not rolled back");
                return Ok(Restored::Not);
            }
            // A process that took the run over may have restored the state, and the next run may continue from it.
            if !persistently(|| runs.still_has(run_id)).await? {
                return Ok(Restored::Elsewhere);
            }
        };
        self.restored = true;
        if let Some(state) = state
            && self.spec.edits
            && let Err(error) = self.reporter.frames.values(&state)
        {
            tracing::warn!(run_id, %error, "the restored state is not shown");
        }
        Ok(Restored::Done)
    }

    /// A run that never started writes no checkpoint and shows only its end.
    pub(super) async fn never_started(&mut self, why: NeverStarts) -> Result<(), RecordsError> {
        let end = match why {
            NeverStarts::Cancelled(CancelAction::Rollback) => End::rolled_back(),
            NeverStarts::Cancelled(CancelAction::Interrupt) => End::new(RunStatus::Interrupted),
            NeverStarts::Lost => self.lost(),
            NeverStarts::Stopped => self.stopped(),
        };
        // It has written nothing.
        let end = End { rollback_settled: true, ..end };
        self.drop_first_head().await;
        self.reporter.journal.close().await;
        self.end_row(&end, None).await?;
        Ok(())
    }

    /// Ends the run's row, after everything else is written, and wakes the run that waited for it.
    async fn end_row(&mut self, end: &End, title: Option<String>) -> Result<(), RecordsError> {
        let end = RunEnd { display_name: title, ..self.row_end(end) };
        let status = end.status;
        self.ends_as = Some(end.clone());
        let outcome = self.runs.finish(&self.spec.run_id, &end).await?;
        if matches!(outcome, FinishOutcome::Finished { .. }) {
            self.runs.metrics.run_ended(status, self.guard.control.entered.elapsed());
            spans::run_ended(status);
        }
        self.taken_over |= matches!(outcome, FinishOutcome::AlreadyTerminal(_) | FinishOutcome::TakenOver);
        Ok(())
    }

    /// Stores how the run will end; no later cancellation changes it.
    async fn decide(&self, end: &End) -> Result<DecideOutcome, RecordsError> {
        let end = self.row_end(end);
        persistently(|| self.runs.records.runs().decide(&self.spec.run_id, &end)).await
    }

    /// The newest checkpoint that the run leaves, empty if its thread has none; `None` if that is unknown.
    fn left_checkpoint(&self) -> Option<String> {
        let head = self.head.as_ref().filter(|head| !head.is_in_doubt())?;
        Some(head.id().max(self.noted).map(|id| id.to_string()).unwrap_or_default())
    }

    /// The end of a run whose records fail before it is known how it ends, if the history of its thread was lost.
    pub(super) fn end_if_lost(&self) -> Option<RunEnd> {
        self.reporter.history_lost.as_ref().map(|_| self.row_end(&End::new(RunStatus::Error)))
    }

    fn row_end(&self, end: &End) -> RunEnd {
        let (status, error) = match &self.reporter.history_lost {
            Some(lost) => (RunStatus::Error, Some(lost.clone())),
            None => (end.status, end.error.clone()),
        };
        RunEnd {
            status,
            error,
            stop_reason: end.stop_reason.clone(),
            display_name: None,
            left_checkpoint: self.left_checkpoint(),
            rollback_settled: end.rollback_settled,
            not_before: self.reporter.frames.latest(),
            totals: self.reporter.usage.totals(),
        }
    }
}

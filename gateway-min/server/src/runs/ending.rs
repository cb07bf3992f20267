//! Ending the row of a run, which frees its thread.

use std::sync::Arc;

use super::Runs;
use crate::streams::bridge::Publisher;
use crate::streams::verdict::{DELETED, LEFT, failure};
use threadkeep_records::{
    FinishOutcome, RecordsError, RunEnd, RunRow, RunStatus, persistently, until_available,
};

/// The error of a run whose task panicked, or could not write its records.
pub(super) const DIED: &str = "The gateway failed while it worked on this run; its log says more.";

impl Runs {
    /// Ends the row of a run of this process, and wakes the run that waited for it.
    pub(super) async fn finish(&self, run_id: &str, end: &RunEnd) -> Result<FinishOutcome, RecordsError> {
        let outcome = persistently(|| self.records.runs().finish(run_id, end)).await?;
        self.wake_next(&outcome);
        Ok(outcome)
    }

    /// Notes in the row of an active run that its store lost acknowledged changes, for the process that ends the run. If
    /// that fails, only this process can say so.
    pub(super) async fn note_loss(&self, run_id: &str, lost: &str) {
        match persistently(|| self.records.runs().note_history_lost(run_id, lost)).await {
            Ok(true) => {}
            Ok(false) => tracing::error!(run_id, lost, "a run had ended before its loss was found"),
            Err(error) => tracing::error!(run_id, lost, %error, "cannot note a loss in the row of its run"),
        }
    }

    /// Ends the stream of a run that another process, or another task, ends: as its row does, once it has. `unknown` is
    /// shown if that cannot be read, or nothing works on the run any more.
    pub(super) async fn end_stream(self: Arc<Self>, run_id: String, stream: Arc<Publisher>, unknown: &str) {
        let row = tokio::select! {
            biased;
            ended = self.ended(&run_id) => ended,
            // Its clients do not wait for the next process.
            () = self.delegator.stopping.cancelled() => self.records.runs().get(&run_id).await,
        };
        match row {
            Ok(Some(row)) if row.status.is_active() => {
                let unknown = if self.is_stopping() { LEFT } else { unknown };
                let known = row.history_lost.or(row.error);
                stream.leave(&failure(known.as_deref().unwrap_or(unknown)));
            }
            Ok(Some(row)) => self.streams.end_as(&row, &stream).await,
            Ok(None) => {
                stream.fail(&failure(DELETED));
                stream.end();
            }
            Err(error) => {
                tracing::warn!(run_id, %error, "cannot read how a run was ended");
                stream.leave(&failure(unknown));
            }
        }
    }

    fn wake_next(&self, outcome: &FinishOutcome) {
        if let FinishOutcome::Finished { promoted: Some(next) } = outcome
            && let Some(control) = self.local.get(next)
        {
            control.promoted.notify_one();
        }
    }

    /// Ends the row of a run whose task panicked or could not write its records, unless it has ended: as its task
    /// would have, if that is known. One that [owes a restore](RunRow::owes_restore) is rolled back.
    ///
    /// While the database is unavailable, the row stays active. One with a lease is ended by any process when that
    /// expires, and may be another's by then; one without a lease has only this process, which tries until it stops, or
    /// until the records accept no write before a restart.
    pub(super) async fn bury(self: &Arc<Self>, run_id: &str, end: Option<RunEnd>) {
        let buried = persistently(|| self.end_unfinished(run_id, end.as_ref())).await;
        match buried {
            Err(error) if error.is_unavailable() && self.records.runs().owner().is_none() => {
                tracing::error!(run_id, %error, "the row of a run cannot be ended; trying until it can");
                let (runs, run_id) = (Arc::clone(self), run_id.to_owned());
                tokio::spawn(async move {
                    let ending = until_available(|| runs.end_unfinished(&run_id, end.as_ref()));
                    tokio::select! {
                        ended = ending => log_end(&run_id, ended),
                        // The next process ends it.
                        () = runs.delegator.stopping.cancelled() => {}
                    }
                });
            }
            buried => log_end(run_id, buried),
        }
    }

    pub(super) async fn end_unfinished(
        self: &Arc<Self>,
        run_id: &str,
        mut end: Option<&RunEnd>,
    ) -> Result<(), RecordsError> {
        let runs = self.records.runs();
        loop {
            let outcome = if let Some(end) = end {
                runs.finish(run_id, end).await?
            } else {
                // Deleted with its thread.
                let Some(row) = runs.get(run_id).await? else { return Ok(()) };
                if row.owner_worker_id.as_deref() != runs.owner() {
                    // The process that has taken it over ends it.
                    return Ok(());
                }
                if row.owes_restore() {
                    // One that was taken over has what it died of.
                    let error = row.error.clone().or_else(|| Some(DIED.to_owned()));
                    self.roll_back(vec![RunRow { error, ..row }]);
                    return Ok(());
                }
                let (status, error) = match row.decided_status {
                    Some(status) => (status, row.error),
                    None => (RunStatus::Error, Some(DIED.to_owned())),
                };
                let end = RunEnd {
                    status,
                    error,
                    stop_reason: row.stop_reason,
                    display_name: None,
                    left_checkpoint: None,
                    // One that waits has written nothing.
                    rollback_settled: row.waiting,
                    not_before: None,
                    totals: row.totals,
                };
                runs.finish(run_id, &end).await?
            };
            // A cancellation was accepted after its row was read, or its end was planned: the row says how it ends now.
            if matches!(outcome, FinishOutcome::CancelRequested(_)) {
                end = None;
                continue;
            }
            self.wake_next(&outcome);
            return Ok(());
        }
    }
}

fn log_end(run_id: &str, ended: Result<(), RecordsError>) {
    match ended {
        Ok(()) => tracing::warn!(run_id, "ended, or rolls back, a run whose task could not"),
        Err(error) => tracing::error!(run_id, %error, "a run's task failed and its row could not be ended"),
    }
}

//! Cancelling a run, and waiting for its end.

use std::time::Duration;

use super::Runs;
use threadkeep_records::{CancelAction, CancelOutcome, RecordsError, RunRow, until_available};

/// How often the row of a run that no task of this process works on is polled.
const POLL: Duration = Duration::from_millis(250);
/// How often in a row that row may be unreadable, as while a server fails over. Each look has the patience of the database.
const UNREAD: u32 = 2;

impl Runs {
    /// Records the cancellation of a run in the database and notifies the task that works on it, if it belongs to this
    /// process; another process polls for it. Requests do this in a separate task: dropped between the two, the run would
    /// not know of it.
    pub(crate) async fn cancel(
        &self,
        run_id: &str,
        action: CancelAction,
    ) -> Result<CancelOutcome, RecordsError> {
        let request = || self.records.runs().request_cancel(run_id, action);
        let outcome = match request().await {
            // The cancellation is recorded, now or before; the task must be notified either way.
            Err(RecordsError::InDoubt { .. }) => request().await?,
            outcome => outcome?,
        };
        if matches!(outcome, CancelOutcome::Accepted | CancelOutcome::AlreadyInterrupted)
            && let Some(control) = self.local.get(run_id)
        {
            control.cancel.cancel();
        }
        Ok(outcome)
    }

    /// Interrupts a run whose client has left, as soon as that can be recorded.
    pub(super) async fn interrupt_left(&self, run_id: &str) {
        if let Err(error) = until_available(|| self.cancel(run_id, CancelAction::Interrupt)).await {
            tracing::warn!(run_id, %error, "a run goes on although its client has left");
        }
    }

    /// Waits until the run has done its last write, here or in another process, also while its row cannot be read for a moment.
    /// Returns the row, `None` if it was deleted. It is active if its end could not be written yet: nothing of this
    /// process works on it then.
    ///
    /// # Errors
    /// Those of the read of the row: clients do not wait for a database that stays away.
    pub(crate) async fn ended(&self, run_id: &str) -> Result<Option<RunRow>, RecordsError> {
        let (mut left_before, mut unread) = (false, 0);
        loop {
            // Again if it was entered again, to be rolled back.
            while let Some(control) = self.local.get(run_id) {
                control.ended().await;
            }
            // Its row ends with its last write.
            let row = match self.records.runs().get(run_id).await {
                Ok(row) => row,
                Err(error) if error.is_unavailable() && unread < UNREAD => {
                    unread += 1;
                    tokio::time::sleep(POLL).await;
                    continue;
                }
                Err(error) => return Err(error),
            };
            unread = 0;
            let Some(run) = row.as_ref().filter(|run| run.status.is_active()) else { return Ok(row) };
            let left = !self.streams.is_foreign(run) && self.local.get(run_id).is_none();
            // Looked at twice: one task may be about to take it from another.
            if left && left_before {
                return Ok(row);
            }
            left_before = left;
            tokio::time::sleep(POLL).await;
        }
    }
}

//! Cancelling a run, and waiting for its end.

use std::time::Duration;

use super::Runs;
use threadkeep_records::{CancelAction, CancelOutcome, RecordsError, until_available};

/// How often the row of another process's run is polled.
const POLL: Duration = Duration::from_millis(250);

impl Runs {
    /// Records the cancellation of a run in the database and notifies the task that works on it, if it belongs to this
    /// process; another process polls for it.
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

    /// Waits until the run has done its last write, here or in another process. Returns early if the database fails.
    pub(crate) async fn ended(&self, run_id: &str) {
        // Again if it was entered again, to be rolled back.
        while let Some(control) = self.local.get(run_id) {
            control.ended().await;
        }
        // Its row ends with its last write.
        while let Ok(Some(run)) = self.records.runs().get(run_id).await
            && run.status.is_active()
            && self.streams.is_foreign(&run)
        {
            tokio::time::sleep(POLL).await;
        }
    }
}

//! Cancelling a run.

use super::relay::POLL;
use crate::app::App;
use crate::store::{CancelAction, CancelOutcome, StoreError};

impl App {
    /// Marks the run for cancellation in the database and tells the task that works on it, if it is this process's; another
    /// process finds the mark.
    pub(crate) async fn cancel_run(
        &self,
        run_id: &str,
        action: CancelAction,
    ) -> Result<CancelOutcome, StoreError> {
        let request = || self.store.runs().request_cancel(run_id, action);
        let outcome = match request().await {
            // The mark is there, or is set now; either way the task has yet to be told.
            Err(StoreError::InDoubt { .. }) => request().await?,
            outcome => outcome?,
        };
        if matches!(outcome, CancelOutcome::Accepted | CancelOutcome::AlreadyInterrupted)
            && let Some(control) = self.local_runs.get(run_id)
        {
            control.cancel.cancel();
        }
        Ok(outcome)
    }

    /// Waits until nothing of the run is written any more, here or in another process. Ends early if the database cannot
    /// tell.
    pub(crate) async fn run_ended(&self, run_id: &str) {
        if let Some(control) = self.local_runs.get(run_id) {
            control.ended().await;
        }
        // Its row ends with its last write.
        while let Ok(Some(run)) = self.store.runs().get(run_id).await
            && run.status.is_active()
            && self.is_foreign(&run)
        {
            tokio::time::sleep(POLL).await;
        }
    }
}

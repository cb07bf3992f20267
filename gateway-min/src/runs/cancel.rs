//! Cancelling a run.

use crate::app::App;
use crate::store::{CancelAction, CancelOutcome, StoreError};

impl App {
    /// Marks the run for cancellation in the database and tells the task that works on it, if it is this process's.
    pub(crate) async fn cancel_run(
        &self,
        run_id: &str,
        action: CancelAction,
    ) -> Result<CancelOutcome, StoreError> {
        let outcome = self.store.runs().request_cancel(run_id, action).await?;
        if outcome == CancelOutcome::Accepted
            && let Some(control) = self.local_runs.get(run_id)
        {
            control.cancel.cancel();
        }
        Ok(outcome)
    }

    /// Waits until this process writes nothing of the run any more. At once if it does not work on it.
    pub(crate) async fn run_ended(&self, run_id: &str) {
        if let Some(control) = self.local_runs.get(run_id) {
            control.ended().await;
        }
    }
}

//! Looks whether a run is still this process's before it writes.
//!
//! A process that ends the run of another one does not move the head of its thread: nothing in the checkpoints keeps
//! out the step at which that one stood still. So it looks at the run's row, if it has not done so for longer than the
//! time after which leases are renewed. What stood still between this look and the write still writes, unless somebody
//! else has written since.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use threadkeep_records::persistently;

use super::Runs;
use super::error::RunError;

/// What this process knows of its ownership of a run.
pub(super) struct Owned {
    runs: Arc<Runs>,
    run_id: String,
    /// When the run was last known to be this process's, just before it was started or its row read, or its row could
    /// not be read before a step.
    at: DateTime<Utc>,
}

impl Owned {
    pub(super) fn new(runs: &Arc<Runs>, run_id: &str) -> Self {
        Self { runs: Arc::clone(runs), run_id: run_id.to_owned(), at: runs.records.now() }
    }

    /// The database is about to say that the run is this process's.
    pub(super) fn begin(&mut self) {
        self.at = self.runs.records.now();
    }

    /// Looks at the row.
    ///
    /// # Errors
    /// [`RunError::TakenOver`] if the run has ended or is another process's; those of the records.
    pub(super) async fn check(&self) -> Result<(), RunError> {
        if self.runs.records.runs().owner().is_none() {
            return Ok(());
        }
        let has = persistently(|| self.runs.still_has(&self.run_id)).await?;
        if has { Ok(()) } else { Err(RunError::TakenOver) }
    }

    /// The same before the run's first writes, if the last look is too long ago.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub(super) async fn before_first_write(&mut self) -> Result<(), RunError> {
        let now = self.runs.records.now();
        if self.is_too_long_ago(now) {
            self.check().await?;
            self.at = now;
        }
        Ok(())
    }

    /// The same before a step of a run that has written. Records that do not answer keep no run from going on: its
    /// lease says how long it may.
    ///
    /// # Errors
    /// [`RunError::TakenOver`].
    pub(super) async fn before_step(&mut self) -> Result<(), RunError> {
        let now = self.runs.records.now();
        if !self.is_too_long_ago(now) {
            return Ok(());
        }
        self.at = now;
        match self.runs.still_has(&self.run_id).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(RunError::TakenOver),
            Err(error) => {
                tracing::warn!(run_id = self.run_id, %error, "cannot look whether a run is still this process's");
                Ok(())
            }
        }
    }

    /// Whether the run is known to be no longer this process's: what fails it here is not why it ends.
    pub(super) async fn is_taken_over(&self) -> bool {
        let is_shared = self.runs.records.runs().owner().is_some();
        is_shared && matches!(self.runs.still_has(&self.run_id).await, Ok(false))
    }

    /// Notes in the run's row that its store lost acknowledged changes.
    pub(super) async fn note_loss(&self, lost: &str) {
        self.runs.note_loss(&self.run_id, lost).await;
    }

    fn is_too_long_ago(&self, now: DateTime<Utc>) -> bool {
        let lease = self.runs.records.runs().lease();
        // Of a clock that was set back it is not known how long ago that was.
        lease.is_some_and(|lease| (now - self.at).abs() > lease.length / 3)
    }
}

//! Waiting until the run holds the thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::Worker;
use threadkeep_records::{CancelAction, RecordsError, RunStatus, StartOutcome, persistently};

/// How often a waiting run checks whether it still waits.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Why a run that waited never starts.
pub(super) enum NeverStarts {
    Cancelled(CancelAction),
    /// Its lease could not be renewed in time, so it may be another process's by now. Nobody asked for that.
    Lost,
    /// The gateway stops. Nobody asked for that either.
    Stopped,
}

impl Worker<'_> {
    /// Waits until the run holds the thread. Returns why, if it never does.
    pub(super) async fn await_turn(&mut self) -> Result<Option<NeverStarts>, RecordsError> {
        let in_doubt = AtomicBool::new(false);
        loop {
            let promoted = self.guard.control.promoted.notified();
            self.reporter.owned.begin();
            let started = persistently(|| async {
                let started = self.runs.records.runs().start(&self.spec.run_id).await;
                in_doubt.fetch_or(matches!(started, Err(RecordsError::InDoubt { .. })), Ordering::Relaxed);
                started
            });
            match started.await? {
                StartOutcome::Started { after } => {
                    self.reporter.frames.begin_after(after);
                    return Ok(None);
                }
                StartOutcome::NotPending(RunStatus::Running) if in_doubt.load(Ordering::Relaxed) => {
                    self.reporter.frames.begin_after(self.runs.records.now());
                    return Ok(None);
                }
                StartOutcome::Cancelled(action) => return Ok(Some(NeverStarts::Cancelled(action))),
                StartOutcome::NotPending(_) => {
                    return Ok(Some(NeverStarts::Cancelled(CancelAction::Interrupt)));
                }
                StartOutcome::Waiting => {
                    // Others write to the thread meanwhile.
                    self.drop_first_head().await;
                    tokio::select! {
                        () = promoted => {}
                        () = self.guard.control.cancel.cancelled() => {
                            if self.guard.control.is_lost() {
                                return Ok(Some(NeverStarts::Lost));
                            }
                            // A stopping gateway cancels its runs without recording that in their rows.
                            if self.runs.is_stopping() && !self.is_cancelled().await? {
                                return Ok(Some(NeverStarts::Stopped));
                            }
                            self.runs.cancel(&self.spec.run_id, CancelAction::Interrupt).await?;
                        }
                        changed = self.row_changed() => changed?,
                    }
                }
            }
        }
    }

    /// Whether the cancellation of the run is recorded.
    async fn is_cancelled(&self) -> Result<bool, RecordsError> {
        let row = persistently(|| self.runs.records.runs().get(&self.spec.run_id)).await?;
        Ok(row.is_none_or(|row| !row.status.is_active() || row.cancel_action.is_some()))
    }

    /// Polls the row of the waiting run until it no longer waits: the predecessor may be another process's run or
    /// another writer, whose end is not announced.
    async fn row_changed(&self) -> Result<(), RecordsError> {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let row = match self.runs.records.runs().get(&self.spec.run_id).await {
                Ok(row) => row,
                Err(error) if error.is_unavailable() => {
                    tracing::debug!(run_id = self.spec.run_id, %error, "cannot look whether a run still waits");
                    continue;
                }
                Err(error) => return Err(error),
            };
            if row.is_none_or(|row| !row.waiting || row.cancel_action.is_some()) {
                return Ok(());
            }
        }
    }
}

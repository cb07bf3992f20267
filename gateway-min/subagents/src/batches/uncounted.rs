//! Attempts that somebody else ended: their batch was cancelled, or their last worker died. What they used is in their
//! checkpoints; a worker adds it to the sum of the batch, once, when nobody can be at work on them any more.

use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep_records::UncountedItem;

use super::worker::Worker;
use crate::delegator::CatchUpError;
use crate::progress::Progress;

impl Worker {
    /// Counts them all, those that ended first. One that this process cannot count keeps no other one waiting.
    pub(super) async fn count_uncounted(&self) -> Result<(), CatchUpError> {
        let batches = self.delegator.records.batches();
        // Those that it cannot count stay where they are.
        let mut left = 0;
        loop {
            let found = batches.uncounted(self.longest(), left).await?;
            if found.is_empty() {
                return Ok(());
            }
            for item in found {
                if self.stop.is_cancelled() {
                    return Ok(());
                }
                let execution_id = item.as_ref().ok().map(|item| item.row.execution_id.clone());
                let counted = match item {
                    Ok(item) => self.count(item).await,
                    Err(error) => Err(error.into()),
                };
                match counted {
                    Ok(()) => {}
                    Err(error) if error.is_unavailable() => return Err(error),
                    Err(error) => {
                        tracing::warn!(execution_id, %error, "the tokens of an attempt are not counted");
                        left += 1;
                    }
                }
            }
        }
    }

    async fn count(&self, UncountedItem { batch_id, row }: UncountedItem) -> Result<(), CatchUpError> {
        let thread = ThreadId::from(row.child_thread.as_str());
        let read = self.accessor.get(&thread, None).await;
        let usage = match read.and_then(|state| Progress::of(state.as_ref())) {
            Ok(progress) => progress.by_model(),
            // No process can read it later either.
            Err(
                error @ (Error::Corrupt { .. }
                | Error::BrokenLineage { .. }
                | Error::HistoryLost { .. }
                | Error::ForeignChanges { .. }
                | Error::InvalidInput(_)),
            ) => {
                let id = &row.execution_id;
                tracing::warn!(execution_id = id, %error, "the tokens of an attempt cannot be read");
                row.usage.clone()
            }
            Err(error) => return Err(error.into()),
        };
        Ok(self.delegator.records.batches().used(&batch_id, &row, &usage).await?)
    }
}

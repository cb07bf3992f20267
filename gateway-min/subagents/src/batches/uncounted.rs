//! Attempts that somebody else ended: their batch was cancelled, or their last worker died. What they used is in their
//! checkpoints; a worker adds it to the sum of the batch, once, when nobody can be at work on them any more.

use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep_records::UncountedItem;

use super::worker::Worker;
use crate::delegator::CatchUpError;
use crate::progress::Progress;

impl Worker {
    /// Counts them all, those that ended first.
    pub(super) async fn count_uncounted(&self) -> Result<(), CatchUpError> {
        let batches = self.delegator.records.batches();
        loop {
            let uncounted = batches.uncounted(self.longest()).await?;
            if uncounted.is_empty() || self.stop.is_cancelled() {
                return Ok(());
            }
            for UncountedItem { batch_id, row } in uncounted {
                let thread = ThreadId::from(row.child_thread.as_str());
                let read = self.accessor.get(&thread, None).await;
                let usage = match read.and_then(|state| Progress::of(state.as_ref())) {
                    Ok(progress) => progress.by_model(),
                    // It cannot be read later either.
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
                batches.used(&batch_id, &row, &usage).await?;
            }
        }
    }
}

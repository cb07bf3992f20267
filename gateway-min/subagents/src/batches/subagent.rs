//! The subagent that works on an item.

use std::time::Duration;

use threadkeep::id::ThreadId;
use threadkeep::step::StepWriter;
use threadkeep_agent::AgentError;
use threadkeep_records::{ExecutionEnd, ExecutionRow, ExecutionStatus};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::execution::{End, ExecutionError, Work};
use crate::outcome::TaskOutcome;
use crate::progress::Progress;
use crate::watched::STOPS_WITHIN;

/// What came of a subagent's work.
pub(super) struct Done {
    pub(super) outcome: TaskOutcome,
    pub(super) row: ExecutionRow,
    pub(super) end: ExecutionEnd,
}

pub(super) type Worked = Result<Option<Done>, ExecutionError>;
pub(super) type Joined = Result<Worked, tokio::task::JoinError>;

/// Stops a subagent and waits for it; what came of it if it had ended, `None` if it had to be given up.
pub(super) async fn stopped(cancel: &CancellationToken, mut running: JoinHandle<Worked>) -> Option<Joined> {
    cancel.cancel();
    if let Ok(ended) = tokio::time::timeout(STOPS_WITHIN, &mut running).await {
        return Some(ended);
    }
    running.abort();
    // Returns when it is dropped, so that it writes nothing afterwards.
    let _ = tokio::time::timeout(Duration::from_secs(1), running).await;
    None
}

impl Work {
    /// Works on an item of a batch that was launched: from its task, or from where an earlier process stopped. `None`
    /// if it was cancelled.
    pub(super) async fn work_on_item(&self) -> Worked {
        let thread = ThreadId::from(self.row.child_thread.as_str());
        let mut writer = StepWriter::open(&self.accessor, &thread, None).await?;
        // One that has ended spends nothing any more, and must not wait for the sum of its batch.
        let is_done = writer.state().is_some_and(|state| state.next.is_empty());
        if let Some(item) = self.item.as_ref().filter(|_| !is_done) {
            item.begin(Progress::of(writer.state())?.by_model()).await?;
        }
        self.begin(writer.state().is_some()).await;
        let ended = match self.run(&mut writer).await? {
            End::Agent(Err(AgentError::Engine(error))) => {
                self.stopped(ExecutionStatus::Failed).await;
                return Err(error.into());
            }
            End::Agent(Err(AgentError::Stopping)) => {
                self.stopped(ExecutionStatus::Cancelled).await;
                return Ok(None);
            }
            ended => ended,
        };
        let state = writer.state().cloned();
        let end = self.end(ended, state.as_ref())?;
        if end.status == ExecutionStatus::Cancelled {
            self.stopped(end.status).await;
            return Ok(None);
        }
        let row = ExecutionRow {
            status: end.status,
            error: end.error.clone(),
            stop_reason: end.stop_reason.clone(),
            ..self.row.clone()
        };
        let outcome = self.outcome(&row, state.as_ref()).await?;
        self.stopped(row.status).await;
        Ok(Some(Done { outcome, row, end }))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Scenario 64: whatever becomes of an attempt after its launch, its subagent has stopped before anybody else may
    /// begin, also one that does not listen.
    #[tokio::test(start_paused = true)]
    async fn s64_a_subagent_that_does_not_stop_is_ended_before_its_item_is_given_back() {
        let steps = Arc::new(AtomicU64::new(0));
        let (cancel, counted) = (CancellationToken::new(), Arc::clone(&steps));
        let running = tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(10)).await;
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        assert!(stopped(&cancel, running).await.is_none());
        let after = steps.load(Ordering::Relaxed);
        assert!(after >= 400, "it had its time to stop: {after}");
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(steps.load(Ordering::Relaxed), after, "it does nothing afterwards");
        // One that ends by itself is waited for, with its result.
        let (cancel, done) = (CancellationToken::new(), CancellationToken::new());
        let (asked, ended) = (cancel.clone(), done.clone());
        let running = tokio::spawn(async move {
            asked.cancelled().await;
            tokio::time::sleep(Duration::from_secs(2)).await;
            ended.cancel();
            Ok(None)
        });
        assert!(matches!(stopped(&cancel, running).await, Some(Ok(Ok(None)))));
        assert!(done.is_cancelled());
    }
}

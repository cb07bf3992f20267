//! An execution at work, and the watch over it: one that does not stop when it should is ended without it.
//!
//! A subagent may be stuck where no cancellation reaches it: a store that does not answer, a tool that blocks. Then its run
//! goes on without it. The terminal status in the records is set for it, with the tokens that its checkpoints show, and
//! whatever it does when it wakes up comes too late: the first terminal status wins, and no report is passed on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use threadkeep::id::ThreadId;
use threadkeep_records::{ExecutionEnd, ExecutionStatus};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::execution::{CANCELLED, ExecutionError, Work};
use crate::outcome::{Ending, TaskOutcome, TokenUsage};
use crate::progress::Progress;

/// How long after its deadline an execution that has not ended is given up.
pub(crate) const GRACE: Duration = Duration::from_mins(1);
/// How long a cancelled subagent may take to stop by itself.
pub(crate) const STOPS_WITHIN: Duration = Duration::from_secs(5);
/// How long the stores may take to end the execution of a subagent that does not.
const ENDS_WITHIN: Duration = Duration::from_secs(4);
/// How long a run must wait for a cancelled execution to be settled.
pub(crate) const SETTLES_WITHIN: Duration = Duration::from_secs(10);

/// What is logged of an end that could not be written.
const UNRECORDED: &str = "the end of an execution was not recorded";

/// Whether the tokens of an execution have been reported.
#[derive(Debug, Clone, Default)]
pub(crate) struct Settled(Arc<AtomicBool>);

impl Settled {
    /// Sets it; false if it was set before.
    pub(crate) fn now(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    /// Whether it is set.
    pub(crate) fn is(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// The end of an execution in the records.
struct Recorded {
    status: ExecutionStatus,
    /// Whether it is the one that was to be written, and not an earlier one.
    first: bool,
    outcome: TaskOutcome,
}

/// Why there is no outcome.
pub(crate) enum NoOutcome {
    /// The execution could not be carried out or recorded, and has failed with these tokens, if they are known.
    Failed(ExecutionError, Option<TokenUsage>),
    /// Its task panicked. It has failed with these tokens, if they are known.
    Panicked(String, Option<TokenUsage>),
    /// Another run goes on with it.
    TakenOver(ExecutionError),
    /// It had ended before this run, and what came of it cannot be read now.
    Unread(String),
}

/// An execution in a task of its own. Dropping this cancels it: it then settles what it has begun, although nobody waits
/// for it.
pub(crate) struct Watched {
    work: Arc<Work>,
    /// `None` when it has ended.
    task: Option<JoinHandle<Result<Option<TaskOutcome>, ExecutionError>>>,
}

impl Watched {
    /// Starts the work.
    pub(crate) fn start(work: Work) -> Self {
        let work = Arc::new(work);
        let executor = Arc::clone(&work);
        Self { work, task: Some(tokio::spawn(async move { executor.carry_out().await })) }
    }

    /// What came of it; what the records say of it, if it does not end although it should; `None` if it is left to the next
    /// run.
    pub(crate) async fn outcome(mut self) -> Result<Option<TaskOutcome>, NoOutcome> {
        let Some(task) = &mut self.task else {
            return Err(NoOutcome::Panicked("it has ended".to_owned(), None));
        };
        let given_up = self.work.deadline() + GRACE;
        let ended = tokio::select! {
            biased;
            ended = task => ended,
            () = stuck(&self.work.cancel) => return self.work.end_without(ExecutionStatus::Cancelled).await,
            () = tokio::time::sleep_until(given_up) => {
                return self.work.end_without(ExecutionStatus::TimedOut).await;
            }
        };
        self.task = None;
        let failed = match ended {
            Ok(Ok(outcome)) => return Ok(outcome),
            Ok(Err(error @ ExecutionError::TakenOver { .. })) => {
                let _ = self.work.announce(ExecutionStatus::Cancelled).await;
                return Err(NoOutcome::TakenOver(error));
            }
            Ok(Err(error)) => Ok(error),
            Err(panic) => Err(panic.to_string()),
        };
        let error = failed.as_ref().map_or_else(String::clone, ToString::to_string);
        // The run must get the same end as the one that the records have.
        let usage = match self.work.fail(error).await {
            Some(Ok(Recorded { first: true, outcome, .. })) => outcome.usage,
            // It has ended already, and what failed came after that.
            Some(Ok(Recorded { first: false, outcome, .. })) => return Ok(Some(outcome)),
            unrecorded => {
                let unrecorded = unrecorded.and_then(Result::err).map(|error| error.to_string());
                let error = unrecorded.unwrap_or_else(|| "its task panicked".to_owned());
                if self.work.row.status.is_terminal() {
                    return Err(NoOutcome::Unread(error));
                }
                tracing::warn!(execution_id = self.work.row.execution_id, error, "{UNRECORDED}");
                None
            }
        };
        Err(match failed {
            Ok(error) => NoOutcome::Failed(error, usage),
            Err(panic) => NoOutcome::Panicked(panic, usage),
        })
    }
}

/// Returns when the subagent was cancelled and has had its time to stop.
async fn stuck(cancel: &CancellationToken) {
    cancel.cancelled().await;
    tokio::time::sleep(STOPS_WITHIN).await;
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.work.cancel.cancel();
        let Some(mut task) = self.task.take() else { return };
        let work = Arc::clone(&self.work);
        // Without a runtime nothing is at work any more.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            if tokio::time::timeout(STOPS_WITHIN, &mut task).await.is_ok() {
                // One that failed or panicked could not say so itself. The next run records its end.
                work.stopped(ExecutionStatus::Failed).await;
                return;
            }
            if !work.settled.is() {
                // A failure is logged there.
                let _ = work.end_without(ExecutionStatus::Cancelled).await;
            }
            // Its slot comes back here or, if it blocks a thread, when that goes on.
            task.abort();
        });
    }
}

impl Work {
    /// Ends the execution in place of its subagent, which is stuck: as timed out, or as cancelled; not if it is left to the
    /// next run, which is `None`.
    async fn end_without(
        self: &Arc<Self>,
        status: ExecutionStatus,
    ) -> Result<Option<TaskOutcome>, NoOutcome> {
        let until = Instant::now() + ENDS_WITHIN;
        // Once its end is announced, it no longer shows.
        let stuck_as = self.standing();
        // If it wakes up and is faster, it says so itself.
        let announced = self.announce(status);
        let ended = self.end_stuck(status, stuck_as).await;
        // Extensions may take longer than the run can wait.
        let _ = tokio::time::timeout_at(until, announced).await;
        ended
    }

    /// Records the failure of a subagent that could not record it itself, and announces its end to extensions, both
    /// also if nobody waits for that. `None` if this panics.
    async fn fail(self: &Arc<Self>, error: String) -> Option<Result<Recorded, ExecutionError>> {
        let work = Arc::clone(self);
        let failing = tokio::spawn(async move {
            let recorded = work.record_end(ExecutionStatus::Failed, &error).await;
            let status = recorded.as_ref().map_or(ExecutionStatus::Failed, |recorded| recorded.status);
            work.stopped(status).await;
            recorded
        });
        failing.await.ok()
    }

    /// Tells extensions of an end that the subagent could not tell them of, also if nobody waits for that.
    fn announce(self: &Arc<Self>, status: ExecutionStatus) -> JoinHandle<()> {
        let work = Arc::clone(self);
        tokio::spawn(async move { work.stopped(status).await })
    }

    async fn end_stuck(
        &self,
        status: ExecutionStatus,
        stuck_as: ExecutionStatus,
    ) -> Result<Option<TaskOutcome>, NoOutcome> {
        let id = &self.row.execution_id;
        tracing::error!(
            execution_id = id,
            status = stuck_as.as_str(),
            "a subagent does not stop and is given up"
        );
        let (ending, error) = if status == ExecutionStatus::TimedOut {
            let timeout = self.definition.timeout;
            let execution_status = stuck_as.as_str().to_owned();
            let error = format!("Execution timed out after {} seconds and did not stop", timeout.as_secs());
            (Ending::PollingTimedOut { timeout, execution_status }, error)
        } else {
            (Ending::Cancelled { error: Some(CANCELLED.to_owned()) }, CANCELLED.to_owned())
        };
        let unknown =
            TaskOutcome { model_name: Some(self.model.clone()), ..TaskOutcome::new(ending.clone()) };
        if status == ExecutionStatus::Cancelled && self.outlives_its_run().await {
            // The run that goes on with the parent's goes on with this one, and counts it.
            self.settled.now();
            return Ok(None);
        }
        match tokio::time::timeout(ENDS_WITHIN, self.record_end(status, &error)).await {
            // It woke up and was faster.
            Ok(Ok(Recorded { first: false, outcome, .. })) => Ok(Some(outcome)),
            Ok(Ok(Recorded { first: true, outcome, .. })) => Ok(Some(TaskOutcome { ending, ..outcome })),
            Ok(Err(error @ ExecutionError::TakenOver { .. })) => Err(NoOutcome::TakenOver(error)),
            failed => {
                let error = failed.map_or_else(
                    |_| "the stores do not answer".to_owned(),
                    |failed| failed.err().map_or_else(String::new, |error| error.to_string()),
                );
                // Its result is stored, and must not be replaced.
                if self.row.status.is_terminal() {
                    return Err(NoOutcome::Unread(error));
                }
                tracing::warn!(execution_id = id, error, "{UNRECORDED}");
                Ok(Some(unknown))
            }
        }
    }

    /// How far it had come when it was given up.
    fn standing(&self) -> ExecutionStatus {
        if self.row.status.is_terminal() {
            return self.row.status;
        }
        let begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        if begun { ExecutionStatus::Running } else { ExecutionStatus::Pending }
    }

    /// Writes the end of the execution, unless it has one, and reports its tokens, unless they were.
    async fn record_end(&self, status: ExecutionStatus, error: &str) -> Result<Recorded, ExecutionError> {
        let thread = ThreadId::from(self.row.child_thread.as_str());
        let state = self.accessor.get(&thread, None).await?;
        let usage = Progress::of(state.as_ref())?.by_model();
        let end = ExecutionEnd { status, error: Some(error.to_owned()), stop_reason: None, usage };
        let row = self.finish(&end).await?;
        if row.run_id != self.row.run_id {
            return Err(ExecutionError::TakenOver { execution: row.execution_id, run: row.run_id });
        }
        let first = !self.row.status.is_terminal() && (row.status, &row.error) == (end.status, &end.error);
        // Another end may have come after further answers.
        let state = if first { state } else { self.accessor.get(&thread, None).await? };
        let status = row.status;
        Ok(Recorded { status, first, outcome: self.settle(&row, state.as_ref()).await? })
    }
}

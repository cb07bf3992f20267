//! Durable batches: many items of the same kind of work, which outlive the run that submits them and the processes that
//! work on them.
//!
//! | Module | What it does |
//! |---|---|
//! | `spec` | what a worker must know of a batch, stored with it |
//! | `submission` | what may be submitted |
//! | `tools` | `batch_task`, `batch_status`, `cancel_batch` |
//! | `worker` | claims items for the slots that this process has |
//! | `endings` | writes the ends of attempts |
//! | `leases` | keeps what was claimed, and notices what was lost |
//! | `item` | one attempt at one item |
//! | `subagent` | the subagent that works on it |
//! | `ended` | how the attempt ends |
//! | `budgets` | the limits of tokens that bind a batch in all processes |
//! | `sharing` | what a run knows of what its batches have used of its limit, and they of the run |
//! | `uncounted` | counts what attempts used that nobody ended |
//!
//! Delivery is at least once: an item whose process died is worked on again, where its subagent stopped. An attempt
//! counts only while the process holds the item's lease, so that of two attempts one ends it.

mod budgets;
mod ended;
mod endings;
mod item;
mod leases;
mod sharing;
mod spec;
mod subagent;
mod submission;
mod tools;
mod uncounted;
mod worker;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use threadkeep_config::SubagentBatches;
use tokio::sync::Notify;

pub(crate) use budgets::ItemBudget;
pub(crate) use sharing::Sharing;
pub(crate) use tools::{BATCHES_PROMPT, BatchStatusTool, BatchTask, CancelBatch};
pub use worker::BatchWorker;

/// A thread `t` with a run `r` that is active: only such a run submits batches.
#[cfg(test)]
async fn begin_run(records: &threadkeep_records::Records) {
    use threadkeep_records::{MultitaskStrategy, NewRun, NewThread};
    let thread = NewThread { thread_id: "t".into(), ..NewThread::default() };
    records.threads().create(thread).await.unwrap();
    let run = NewRun { run_id: "r".into(), thread_id: "t".into(), ..NewRun::default() };
    records.runs().admit(run, MultitaskStrategy::Reject).await.unwrap();
}

/// A batch `b` of that run with this number of items, all of which may be at work at the same time.
#[cfg(test)]
fn new_batch(items: usize) -> threadkeep_records::NewBatch {
    use threadkeep_records::{JsonObject, NewBatch, NewBatchItem};
    let item = |n: usize| NewBatchItem { key: n.to_string(), prompt: "p".into(), acceptance_criteria: None };
    let at_once = u32::try_from(items).unwrap();
    NewBatch {
        id: "b".into(),
        thread_id: "t".into(),
        run_id: "r".into(),
        tool_call_id: "c".into(),
        submission_key: "k".into(),
        title: "t".into(),
        subagent_type: "s".into(),
        max_live_items: at_once,
        max_running_items: at_once,
        max_attempts: 1,
        execution_spec: JsonObject::new(),
        budget_id: None,
        items: (0..items).map(item).collect(),
    }
}

/// What the batches of a process share: the tools that submit them and the worker that works on them.
#[derive(Debug)]
pub struct Batching {
    settings: SubagentBatches,
    wake: Notify,
    working: AtomicBool,
    attempts: [AtomicU64; 4],
}

/// How an attempt of this process at an item ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptEnd {
    /// With a result.
    Succeeded,
    /// Without one.
    Failed,
    /// It was given back, because the process stops.
    Released,
    /// It did not count: it was cancelled, or another process has the item.
    Lost,
}

impl AttemptEnd {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Succeeded, Self::Failed, Self::Released, Self::Lost];

    /// Its name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Released => "released",
            Self::Lost => "lost",
        }
    }
}

impl Batching {
    /// Batches with these settings, which hold as long as the process lives.
    pub fn new(settings: SubagentBatches) -> Self {
        Self {
            settings,
            wake: Notify::new(),
            working: AtomicBool::new(false),
            attempts: [const { AtomicU64::new(0) }; 4],
        }
    }

    /// Whether a worker works on batches in this process.
    pub fn is_working(&self) -> bool {
        self.working.load(Ordering::Acquire)
    }

    /// Makes the worker look for items at once: some may have become claimable.
    pub fn wake(&self) {
        self.wake.notify_one();
    }

    /// How many attempts of this process ended in this way.
    pub fn attempts(&self, end: AttemptEnd) -> u64 {
        self.attempts[end as usize].load(Ordering::Relaxed)
    }

    fn count(&self, end: AttemptEnd) {
        self.attempts[end as usize].fetch_add(1, Ordering::Relaxed);
    }
}

//! Runs: admission, the worker of a run, its events, and who owns it.

pub(crate) mod admission;
mod cancel;
mod control;
mod delivery;
mod ending;
mod error;
mod frames;
pub(crate) mod instance;
mod interrupted_title;
mod journal;
mod owned;
pub(crate) mod ownership;
mod progress;
mod report;
pub mod request;
pub(crate) mod resume;
pub(crate) mod subagent_events;
mod takeover;
#[cfg(test)]
mod tests;
mod usage;
mod worker;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use self::control::LocalRuns;
pub(crate) use self::progress::EVERY as PROGRESS_EVERY;
use crate::metrics::Metrics;
use crate::streams::Streams;
use crate::threads::Threads;
use threadkeep_config::ConfigHandle;
use threadkeep_records::Records;
use threadkeep_subagents::Delegator;

/// The runs of this process, and what it knows of those of others.
pub(crate) struct Runs {
    config: ConfigHandle,
    records: Records,
    threads: Arc<Threads>,
    streams: Arc<Streams>,
    delegator: Arc<Delegator>,
    metrics: Metrics,
    local: LocalRuns,
    /// How often the totals of a running run are stored.
    progress_every: Duration,
    stopping: AtomicBool,
}

impl Runs {
    pub(crate) fn new(
        config: ConfigHandle,
        records: Records,
        threads: Arc<Threads>,
        streams: Arc<Streams>,
        delegator: Arc<Delegator>,
        metrics: Metrics,
        progress_every: Duration,
    ) -> Self {
        Self {
            config,
            records,
            threads,
            streams,
            delegator,
            metrics,
            local: LocalRuns::default(),
            progress_every,
            stopping: AtomicBool::new(false),
        }
    }

    /// Stops accepting runs, interrupts running ones, and waits for their last writes.
    pub(crate) async fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.delegator.stopping.cancel();
        let runs = self.local.all();
        for run in &runs {
            run.cancel.cancel();
        }
        for run in &runs {
            run.ended().await;
        }
    }

    /// The number of runs that this process works on, and of those that wait here for their thread.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let runs = self.local.all();
        let waiting = runs.iter().filter(|run| run.is_waiting()).count();
        (runs.len() - waiting, waiting)
    }

    /// Whether no new runs are accepted, because the process is stopping.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }
}

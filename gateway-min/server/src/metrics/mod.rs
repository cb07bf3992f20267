//! The metrics for `/metrics`. Each gateway has its own registry; no label contains a thread, run or user.

mod cache;
mod records;
mod refusal;
mod saver;
mod sqlite;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use threadkeep_storage::{FileSize, SqliteSaver};
use threadkeep_subagents::admission::Counts;

pub(crate) use cache::MeteredCache;
pub(crate) use refusal::Refusal;
pub(crate) use saver::MeteredSaver;

use threadkeep_records::{Commits, RunStatus};

/// The content type of [`Metrics::rendered`].
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// The prefix of every name.
const PREFIX: &str = "threadkeep";

/// The states in which runs end.
const ENDS: [RunStatus; 4] =
    [RunStatus::Success, RunStatus::Error, RunStatus::Timeout, RunStatus::Interrupted];

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RunLabels {
    outcome: &'static str,
}

/// The outcome of a call to the saver.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    outcome: CallOutcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "these are the values of a label")]
enum CallOutcome {
    ok,
    /// Another writer moved the head.
    conflict,
    in_doubt,
    error,
}

impl CallOutcome {
    const ALL: [Self; 4] = [Self::ok, Self::conflict, Self::in_doubt, Self::error];

    fn as_str(self) -> &'static str {
        match self {
            Self::ok => "ok",
            Self::conflict => "conflict",
            Self::in_doubt => "in_doubt",
            Self::error => "error",
        }
    }
}

/// Why a connection was closed or refused.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RefusalLabels {
    reason: &'static str,
}

/// The outcome of a history cache lookup.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LookupLabels {
    result: &'static str,
}

/// The history cache had the path.
const HIT: &str = "hit";
/// It had not.
const MISS: &str = "miss";

/// The status of a batch or of an item.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StatusLabels {
    status: &'static str,
}

/// The counters of a gateway. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Metrics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    registry: Registry,
    runs: Family<RunLabels, Counter>,
    run_times: Family<RunLabels, Histogram, fn() -> Histogram>,
    lost: Counter,
    taken_over: Counter,
    failed_renewals: Counter,
    commits: Family<CallLabels, Histogram, fn() -> Histogram>,
    commit_bytes: Counter,
    replayed: Histogram,
    lookups: Family<LookupLabels, Counter>,
    refused: Family<RefusalLabels, Counter>,
    now: Now,
}

/// Gauges that are set when the metrics are read.
#[derive(Debug, Default)]
struct Now {
    connections: Gauge,
    runs: Gauge,
    waiting: Gauge,
    subagents: Gauge,
    subagents_waiting: Gauge,
    background: Gauge,
    streams: Gauge,
    followers: Gauge,
    stream_bytes: Gauge,
    heads: Gauge,
    config_valid: Gauge,
    database_bytes: Gauge<u64, AtomicU64>,
    database_free_bytes: Gauge<u64, AtomicU64>,
    batches: Family<StatusLabels, Gauge>,
    batch_items: Family<StatusLabels, Gauge>,
    batch_attempts: Family<RunLabels, Counter>,
}

/// The current state of the gateway's parts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Snapshot {
    /// Connections of clients.
    pub(crate) connections: usize,
    /// Runs that this process is working on.
    pub(crate) runs: usize,
    /// Runs in this process that wait for their thread.
    pub(crate) waiting: usize,
    /// Subagents of this process.
    pub(crate) subagents: Counts,
    /// Background tasks.
    pub(crate) background: usize,
    /// Runs whose frames are kept for clients.
    pub(crate) streams: usize,
    /// Clients that follow a run.
    pub(crate) followers: usize,
    /// Bytes of the kept frames.
    pub(crate) stream_bytes: usize,
    /// Threads whose newest state is kept in memory.
    pub(crate) heads: usize,
    /// Whether the current configuration file is in use.
    pub(crate) config_valid: bool,
    /// The size of the checkpoint database, if it is a file.
    pub(crate) database: Option<FileSize>,
    /// The batches, if this process works on them.
    pub(crate) batches: Option<BatchSnapshot>,
}

/// The batches that have not ended, of all processes, and the attempts of this one.
#[derive(Debug, Clone, Default)]
pub(crate) struct BatchSnapshot {
    /// Batches by status.
    pub(crate) batches: Vec<(&'static str, u64)>,
    /// Their items by status.
    pub(crate) items: Vec<(&'static str, u64)>,
    /// Attempts of this process, by how they ended.
    pub(crate) attempts: Vec<(&'static str, u64)>,
}

impl Metrics {
    /// Counters at zero, plus those that `sqlite` and the gateway's records count themselves.
    pub(crate) fn new(sqlite: Option<Arc<SqliteSaver>>, records: Arc<Commits>) -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        let of = &mut registry;
        let runs = Family::default();
        of.register("runs", "Runs that ended, by outcome", runs.clone());
        let run_times = Family::new_with_constructor(run_times as fn() -> Histogram);
        let help = "Time from the admission of a run to its end, by outcome";
        of.register_with_unit("run", help, Unit::Seconds, run_times.clone());
        let lost = Counter::default();
        let help = "Runs of this process that were stopped because their lease was not renewed in time";
        of.register("runs_lost", help, lost.clone());
        let taken_over = Counter::default();
        let help = "Runs of other processes whose lease was over, which this process ended or rolled back";
        of.register("runs_taken_over", help, taken_over.clone());
        let failed_renewals = Counter::default();
        of.register("lease_renewals_failed", "Attempts to renew leases that failed", failed_renewals.clone());
        let commits = Family::new_with_constructor(latencies as fn() -> Histogram);
        of.register_with_unit("commit", "Duration of superstep commits", Unit::Seconds, commits.clone());
        let commit_bytes = Counter::default();
        let help = "Bytes of values in committed supersteps, before sharing and compression";
        of.register_with_unit("commit_values", help, Unit::Bytes, commit_bytes.clone());
        let replayed = Histogram::new(exponential_buckets(1.0, 2.0, 13));
        let help = "Supersteps replayed after the seed when a delta channel was read";
        of.register("replay_supersteps", help, replayed.clone());
        let lookups = Family::default();
        of.register("history_cache_lookups", "History cache lookups, by result", lookups.clone());
        let refused = Family::default();
        let help = "Connections and requests that the limits of the section `gateway` ended, by reason";
        of.register("refused", help, refused.clone());
        let now = Now::default();
        of.register("connections_open", "Connections of clients", now.connections.clone());
        of.register("runs_active", "Runs that this process is working on", now.runs.clone());
        let help = "Runs of this process that wait for their thread";
        of.register("runs_waiting", help, now.waiting.clone());
        of.register("subagents_active", "Subagents that have a slot of this process", now.subagents.clone());
        let help = "Subagents of this process that wait for a slot";
        of.register("subagents_waiting", help, now.subagents_waiting.clone());
        of.register("background_tasks", "Background tasks", now.background.clone());
        of.register("streams_kept", "Runs whose frames are kept for clients", now.streams.clone());
        let help = "Bytes of the frames kept for clients";
        of.register_with_unit("streams_kept", help, Unit::Bytes, now.stream_bytes.clone());
        of.register("streams_open", "Clients that follow a run", now.followers.clone());
        let help = "Threads whose newest state is kept in memory";
        of.register("warm_heads", help, now.heads.clone());
        let help = "Whether the current configuration file is in use";
        of.register("config_valid", help, now.config_valid.clone());
        of.register("batches", "Batches that have not ended, by status", now.batches.clone());
        let help = "Items of batches that have not ended, by status";
        of.register("batch_items", help, now.batch_items.clone());
        let help = "Attempts of this process at items of batches, by outcome";
        of.register("batch_attempts", help, now.batch_attempts.clone());
        of.register_collector(Box::new(records::Collected(records)));
        if let Some(sqlite) = sqlite {
            let help = "Size of the checkpoint database";
            of.register_with_unit("database", help, Unit::Bytes, now.database_bytes.clone());
            let help = "Free space in the checkpoint database";
            of.register_with_unit("database_free", help, Unit::Bytes, now.database_free_bytes.clone());
            of.register_collector(Box::new(sqlite::Collected(sqlite)));
        }
        let metrics = Self(Arc::new(Inner {
            registry,
            runs,
            run_times,
            lost,
            taken_over,
            failed_renewals,
            commits,
            commit_bytes,
            replayed,
            lookups,
            refused,
            now,
        }));
        metrics.begin();
        metrics
    }

    /// Creates each counter that has a label. One that begins with what it counts first has no increase by that, and
    /// no alert sees it.
    fn begin(&self) {
        for outcome in ENDS.map(RunStatus::as_str) {
            drop(self.0.runs.get_or_create(&RunLabels { outcome }));
            drop(self.0.run_times.get_or_create(&RunLabels { outcome }));
        }
        for outcome in CallOutcome::ALL {
            drop(self.0.commits.get_or_create(&CallLabels { outcome }));
        }
        for result in [HIT, MISS] {
            drop(self.0.lookups.get_or_create(&LookupLabels { result }));
        }
        for reason in Refusal::ALL.map(Refusal::as_str) {
            drop(self.0.refused.get_or_create(&RefusalLabels { reason }));
        }
    }

    /// Counts a run that has ended, `took` after its admission.
    pub(crate) fn run_ended(&self, status: RunStatus, took: Duration) {
        let labels = RunLabels { outcome: status.as_str() };
        self.0.runs.get_or_create(&labels).inc();
        self.0.run_times.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// Counts a run that this process stopped because its lease was over.
    pub(crate) fn run_lost(&self) {
        self.0.lost.inc();
    }

    /// Counts runs of other processes that this one has taken over.
    pub(crate) fn runs_taken_over(&self, number: usize) {
        self.0.taken_over.inc_by(u64::try_from(number).unwrap_or(u64::MAX));
    }

    /// Counts a failed renewal of the leases.
    pub(crate) fn renewal_failed(&self) {
        self.0.failed_renewals.inc();
    }

    fn committed(&self, took: Duration, bytes: u64, outcome: CallOutcome) {
        self.0.commits.get_or_create(&CallLabels { outcome }).observe(took.as_secs_f64());
        if outcome == CallOutcome::ok {
            self.0.commit_bytes.inc_by(bytes);
        }
    }

    fn replayed(&self, supersteps: usize) {
        let supersteps = u32::try_from(supersteps).unwrap_or(u32::MAX);
        self.0.replayed.observe(supersteps.into());
    }

    fn looked_up(&self, found: bool) {
        let result = if found { HIT } else { MISS };
        self.0.lookups.get_or_create(&LookupLabels { result }).inc();
    }

    /// Counts a connection or a request that a limit ended.
    pub(crate) fn refused(&self, why: Refusal) {
        self.0.refused.get_or_create(&RefusalLabels { reason: why.as_str() }).inc();
    }

    /// All metrics as text, with the current state.
    pub(crate) fn rendered(&self, snapshot: Snapshot) -> String {
        let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let now = &self.0.now;
        now.connections.set(count(snapshot.connections));
        now.runs.set(count(snapshot.runs));
        now.waiting.set(count(snapshot.waiting));
        now.subagents.set(count(snapshot.subagents.running));
        now.subagents_waiting.set(count(snapshot.subagents.waiting()));
        now.followers.set(count(snapshot.followers));
        now.stream_bytes.set(count(snapshot.stream_bytes));
        now.background.set(count(snapshot.background));
        now.streams.set(count(snapshot.streams));
        now.heads.set(count(snapshot.heads));
        now.config_valid.set(snapshot.config_valid.into());
        if let Some(size) = snapshot.database {
            now.database_bytes.set(size.bytes);
            now.database_free_bytes.set(size.free);
        }
        if let Some(batches) = snapshot.batches {
            let gauge = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
            for (status, number) in batches.batches {
                now.batches.get_or_create(&StatusLabels { status }).set(gauge(number));
            }
            for (status, number) in batches.items {
                now.batch_items.get_or_create(&StatusLabels { status }).set(gauge(number));
            }
            for (outcome, number) in batches.attempts {
                let counter = now.batch_attempts.get_or_create(&RunLabels { outcome });
                counter.inner().store(number, Ordering::Relaxed);
            }
        }
        let mut text = String::new();
        // Writing to a text cannot fail.
        let _ = text::encode(&mut text, &self.0.registry);
        text
    }
}

/// Buckets from a tenth of a millisecond to some seconds.
fn latencies() -> Histogram {
    Histogram::new(exponential_buckets(0.0001, 2.0, 16))
}

/// Buckets from ten milliseconds to twenty minutes.
fn run_times() -> Histogram {
    Histogram::new(exponential_buckets(0.01, 2.0, 18))
}

#[cfg(test)]
mod tests;

//! Assembles the gateway: configuration, stores, locks, models.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use chrono::{TimeDelta, Utc};
use threadkeep::cache::CachedSaver;
use threadkeep::channel::Schema;
use threadkeep::id::IdSource;
use threadkeep::mode::ModeRegister;
use threadkeep::saver::Saver;
use threadkeep::state::StateAccessor;
use threadkeep_agent::AgentBuilder;
use threadkeep_storage::{Checkpoints, OpenError, channel_mode, history_cache, open_records};
use tokio_util::task::TaskTracker;

use crate::auth::Authenticator;
use crate::config::{Config, ConfigHandle, RunEventsBackend};
use crate::metrics::{MeteredCache, MeteredSaver, Metrics, Snapshot};
use crate::runs::bridge::{BridgeOptions, StreamBridge};
use crate::runs::control::{LocalRuns, ThreadLocks};
use crate::runs::instance::Instance;
use crate::runs::ownership::{self, Terms};
use crate::runs::progress;
use crate::store::{Store, StoreError};

/// How long a stopping gateway waits for its runs.
const DRAIN: Duration = Duration::from_secs(5);

/// Why a gateway could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A store.
    #[error(transparent)]
    Storage(#[from] OpenError),
    /// The clocks of the machines that share the database differ too much.
    #[error(
        "the clock of this machine and the database's differ by {skew} s, more than run_ownership.grace_seconds ({grace}); \
         processes could take each other for gone; set the clocks right"
    )]
    Clock {
        /// The difference in seconds.
        skew: i64,
        /// The maximum in seconds.
        grace: i64,
    },
}

impl From<threadkeep::Error> for StartError {
    fn from(error: threadkeep::Error) -> Self {
        Self::Storage(error.into())
    }
}

impl From<StoreError> for StartError {
    fn from(error: StoreError) -> Self {
        Self::Storage(error.into())
    }
}

/// A running gateway without its HTTP server.
pub struct App {
    pub(crate) config: ConfigHandle,
    pub(crate) agents: AgentBuilder,
    pub(crate) auth: Authenticator,
    pub(crate) counted: Metrics,
    pub(crate) store: Store,
    pub(crate) ids: Arc<IdSource>,
    pub(crate) bridge: StreamBridge,
    pub(crate) locks: ThreadLocks,
    pub(crate) local_runs: LocalRuns,
    /// How often the totals of a running run are stored.
    pub(crate) progress_every: Duration,
    /// Work that outlives its request or its client; all of it writes to the stores.
    pub(crate) background: TaskTracker,
    modes: Arc<ModeRegister>,
    accessor: StateAccessor,
    checkpoints: Checkpoints,
    stopping: AtomicBool,
    /// The lock of the state directory, if several processes share a database.
    _instance: Option<Instance>,
}

impl App {
    /// Opens the stores, freezes mode and cadence, and recovers runs that a dead process left unfinished. `modes` is
    /// the process's register; each gateway in a test has its own.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start(config: ConfigHandle, modes: Arc<ModeRegister>) -> Result<Arc<Self>, StartError> {
        let current = config.current_async().await;
        modes.freeze_mode(channel_mode(&current))?;
        modes.freeze_frequency(i64::try_from(current.snapshot_frequency()).unwrap_or(i64::MAX))?;
        let ownership = Terms::of(&current);
        let checkpoints = Checkpoints::open(&current).await?;
        let store = open_records(&current).await?;
        let counted = Metrics::new(checkpoints.sqlite().cloned(), store.commits());
        let saver = with_history_cache(checkpoints.saver(), &current, &counted)?;
        let saver = Arc::new(MeteredSaver::new(saver, counted.clone()));
        let grace =
            TimeDelta::seconds(i64::try_from(current.run_ownership.grace_seconds).unwrap_or(i64::MAX));
        if ownership.is_some() {
            check_sharing(&store, &current, grace).await?;
        }
        let mut recovered = store.runs().recover_orphans(Utc::now(), grace).await?.runs;
        let (instance, predecessors) = ownership::take_over(&store, &current.state_dir).await?;
        recovered.extend(predecessors);
        for run in &recovered {
            tracing::warn!(
                run_id = run.run_id,
                thread_id = run.thread_id,
                "recovered an unfinished run of an earlier process"
            );
        }
        let ids = Arc::new(IdSource::default());
        let table = Schema::thread_state().compile(channel_mode(&current), modes.frequency(None)?)?;
        let accessor = StateAccessor::new(saver, Arc::new(table), Arc::clone(&ids));
        let followed = config.clone();
        let app = Arc::new(Self {
            accessor: accessor.remembering(move || followed.last_known().accessor_graph_max()),
            bridge: StreamBridge::new(BridgeOptions {
                queue_maxsize: current.stream_bridge.queue_maxsize,
                ..BridgeOptions::default()
            }),
            agents: AgentBuilder::new(config.clone(), &current),
            auth: Authenticator::new(&current.auth),
            counted,
            config,
            store,
            ids,
            locks: ThreadLocks::default(),
            local_runs: LocalRuns::default(),
            progress_every: progress::EVERY,
            background: TaskTracker::new(),
            modes,
            checkpoints,
            stopping: AtomicBool::new(false),
            _instance: instance,
        });
        if let Some(terms) = ownership {
            ownership::keep(&app, terms);
        }
        Ok(app)
    }

    /// The state accessor of this process, with the frozen mode and cadence.
    pub(crate) fn accessor(&self) -> &StateAccessor {
        &self.accessor
    }

    /// The accessor for a run that starts now.
    ///
    /// # Errors
    /// The reconfiguration error, if the cadence was edited since the process started. An edited mode is ignored.
    pub(crate) async fn accessor_for_run(&self) -> threadkeep::Result<&StateAccessor> {
        let frequency = self.config.current_async().await.snapshot_frequency();
        self.modes.freeze_frequency(i64::try_from(frequency).unwrap_or(i64::MAX))?;
        Ok(&self.accessor)
    }

    /// Counters since the start and current gauges, as text for `/metrics`.
    pub(crate) async fn metrics(&self) -> String {
        let database = match self.checkpoints.sqlite() {
            Some(sqlite) => sqlite.file_size().await.ok(),
            None => None,
        };
        self.config.current_async().await;
        let runs = self.local_runs.all();
        let waiting = runs.iter().filter(|run| run.is_waiting()).count();
        self.counted.rendered(Snapshot {
            runs: runs.len() - waiting,
            waiting,
            background: self.background.len(),
            streams: self.bridge.kept(),
            followers: self.bridge.followers(),
            heads: self.accessor.remembered(),
            config_valid: self.config.last_error().is_none(),
            database,
        })
    }

    /// Whether the gateway accepts no new runs because it is stopping.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Stops accepting runs, interrupts running ones, and waits for their last writes and for background work: the
    /// first part of stopping, while clients still receive the end of their streams.
    pub async fn stop_runs(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        let runs = self.local_runs.all();
        for run in &runs {
            run.cancel.cancel();
        }
        let drained = async {
            for run in &runs {
                run.ended().await;
            }
            self.background.close();
            self.background.wait().await;
        };
        if tokio::time::timeout(DRAIN, drained).await.is_err() {
            tracing::warn!(
                seconds = DRAIN.as_secs(),
                "some runs or other writers did not stop in time; the next start recovers the runs"
            );
        }
    }

    /// Closes the stores: the last part of stopping.
    pub async fn close(&self) {
        self.store.close().await;
        self.checkpoints.close().await;
    }
}

/// Checks that several processes can share the database, as this one may be the first of several.
async fn check_sharing(store: &Store, config: &Config, grace: TimeDelta) -> Result<(), StartError> {
    let skew = store.clock_skew().await?.abs();
    // A query may take up to a second on a busy machine.
    if skew > grace.max(TimeDelta::seconds(1)) {
        return Err(StartError::Clock { skew: skew.num_seconds(), grace: grace.num_seconds() });
    }
    if config.run_events.backend == RunEventsBackend::Memory {
        tracing::warn!(
            "run_events.backend is memory: if several processes share the database, each shows only the events of its own runs"
        );
    }
    Ok(())
}

#[cfg(test)]
impl App {
    /// Wraps the saver.
    pub(crate) fn wrap_saver(&mut self, wrap: impl FnOnce(Arc<dyn Saver>) -> Arc<dyn Saver>) {
        let (saver, table) = (Arc::clone(self.accessor.saver()), self.accessor.table().clone());
        self.accessor = StateAccessor::new(wrap(saver), Arc::new(table), Arc::clone(&self.ids));
    }
}

/// The saver behind the configured history cache. Only delta mode has histories to cache.
fn with_history_cache(
    saver: Arc<dyn Saver>,
    config: &Config,
    counted: &Metrics,
) -> Result<Arc<dyn Saver>, OpenError> {
    let Some(cache) = history_cache(config)? else { return Ok(saver) };
    Ok(Arc::new(CachedSaver::new(saver, Arc::new(MeteredCache::new(cache, counted.clone())))))
}

//! Assembles the gateway's services: threads, streams, runs.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use chrono::{TimeDelta, Utc};
use threadkeep::cache::CachedSaver;
use threadkeep::channel::Schema;
use threadkeep::id::{IdSource, ThreadId};
use threadkeep::mode::ModeRegister;
use threadkeep::saver::Saver;
use threadkeep::state::StateAccessor;
use threadkeep_acp::external_agents;
use threadkeep_agent::AgentBuilder;
use threadkeep_storage::{
    Checkpoints, OpenError, Stores, channel_mode, form_difference, history_cache, open_records,
};
use threadkeep_subagents::Delegator;
use threadkeep_subagents::admission::Admission;
use threadkeep_subagents::batches::{AttemptEnd, BatchWorker, Batching};
use threadkeep_subagents::catalog::Catalog;
use threadkeep_subagents::hooks::Hooks;
use threadkeep_subagents::managed::configured_store;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::auth::Authenticator;
use crate::connections::Connections;
use crate::metrics::{BatchSnapshot, MeteredCache, MeteredSaver, Metrics, Snapshot};
use crate::runs::instance::Instance;
use crate::runs::ownership::{self, Terms};
use crate::runs::{PROGRESS_EVERY, Runs};
use crate::streams::Streams;
use crate::streams::bridge::{BridgeOptions, StreamBridge};
use crate::threads::Threads;
use threadkeep_config::{Backend, Config, ConfigHandle, RunEventsBackend};
use threadkeep_mcp::McpServers;
use threadkeep_processes::Guard;
use threadkeep_records::{BatchStatus, Delegating, Records, RecordsError, RunRow};

/// How long a stopping gateway waits for its runs.
const DRAIN: Duration = Duration::from_secs(5);
/// How long the metrics wait for figures that only a store knows. Prometheus waits ten seconds for all of them, and
/// needs the others most while a store is away.
const FIGURES_WITHIN: Duration = Duration::from_secs(5);

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
    /// The operating system has no thread to renew leases on.
    #[error("cannot start the thread that renews the leases of runs: {0}")]
    Leases(io::Error),
}

impl From<threadkeep::Error> for StartError {
    fn from(error: threadkeep::Error) -> Self {
        Self::Storage(error.into())
    }
}

impl From<RecordsError> for StartError {
    fn from(error: RecordsError) -> Self {
        Self::Storage(error.into())
    }
}

/// A running gateway without its HTTP server.
pub struct App {
    pub(crate) config: ConfigHandle,
    pub(crate) auth: Authenticator,
    pub(crate) agents: Arc<AgentBuilder>,
    /// The slots of this process for subagents.
    pub(crate) admission: Admission,
    /// The subagents that runs may delegate to.
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) records: Records,
    pub(crate) ids: Arc<IdSource>,
    pub(crate) threads: Arc<Threads>,
    pub(crate) streams: Arc<Streams>,
    pub(crate) runs: Arc<Runs>,
    /// The batches of this process; `None` if it does not work on any.
    pub(crate) batching: Option<Arc<Batching>>,
    batch_worker: Option<BatchWorker>,
    /// The setting `database.backend` at the start: an edit waits for the next.
    pub(crate) backend: Backend,
    /// Whether batches can be read: the records outlive the process.
    pub(crate) has_batches: bool,
    connections: Arc<Connections>,
    /// See [`threadkeep_config::Gateway::history_max_bytes`].
    pub(crate) history_max_bytes: usize,
    metrics: Metrics,
    checkpoints: Checkpoints,
    /// Work that outlives its request or its client; all of it writes to the stores.
    pub(crate) background: TaskTracker,
    /// Whether there is a page for browsers.
    pub(crate) has_page: bool,
    /// How long it waits for its runs when it stops.
    drain: Duration,
    /// The lock of the state directory, if several processes share a database.
    _instance: Option<Instance>,
}

/// Puts another saver in the place of the gateway's, usually one around it.
pub(crate) type WrapSaver = Box<dyn FnOnce(Arc<dyn Saver>) -> Arc<dyn Saver> + Send>;

/// Parts that a test replaces.
pub(crate) struct Parts {
    /// Wraps the saver.
    pub(crate) wrap_saver: WrapSaver,
    /// How often the totals of a running run are stored.
    pub(crate) progress_every: Duration,
    /// How long a stopping gateway waits for its runs.
    pub(crate) drain: Duration,
    /// The source of the ids and times of runs.
    pub(crate) ids: Arc<IdSource>,
    /// Where the checkpoints are.
    pub(crate) stores: Stores,
    /// The records; `None` for those that the configuration names.
    pub(crate) records: Option<Records>,
    /// The extensions; `None` for those that the configuration names.
    pub(crate) hooks: Option<Hooks>,
}

impl Default for Parts {
    fn default() -> Self {
        Self {
            wrap_saver: Box::new(|saver| saver),
            progress_every: PROGRESS_EVERY,
            drain: DRAIN,
            ids: Arc::default(),
            stores: Stores::default(),
            records: None,
            hooks: None,
        }
    }
}

impl App {
    /// Opens the stores, freezes mode and cadence, and recovers runs that a dead process left unfinished. `modes` is
    /// the process's register; each gateway in a test has its own.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start(config: ConfigHandle, modes: Arc<ModeRegister>) -> Result<Arc<Self>, StartError> {
        Self::start_with(config, modes, Parts::default()).await
    }

    /// The same on stores that the program chooses.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start_on(
        stores: Stores,
        config: ConfigHandle,
        modes: Arc<ModeRegister>,
    ) -> Result<Arc<Self>, StartError> {
        Self::start_with(config, modes, Parts { stores, ..Parts::default() }).await
    }

    pub(crate) async fn start_with(
        config: ConfigHandle,
        modes: Arc<ModeRegister>,
        parts: Parts,
    ) -> Result<Arc<Self>, StartError> {
        let current = config.at_start();
        modes.freeze_mode(channel_mode(&current))?;
        modes.freeze_frequency(i64::try_from(current.snapshot_frequency()).unwrap_or(i64::MAX))?;
        let ownership = Terms::of(&current);
        let checkpoints = parts.stores.checkpoints(&current).await?;
        let records = match parts.records {
            Some(records) => records,
            None => open_records(&current).await?,
        };
        if let Some(difference) = form_difference(&records, &current).await? {
            tracing::warn!("{difference}");
        }
        let metrics = Metrics::new(checkpoints.sqlite().cloned(), records.commits());
        let saver = with_history_cache(checkpoints.saver(), &current, &metrics)?;
        let saver = (parts.wrap_saver)(Arc::new(MeteredSaver::new(saver, metrics.clone())));
        let (instance, rollbacks) = recover(&records, &current, ownership).await?;
        let ids = parts.ids;
        let hooks = parts.hooks.unwrap_or_else(|| Hooks::configured(&current.subagent_hooks));
        let table = Schema::thread_state().compile(channel_mode(&current), modes.frequency(None)?)?;
        let followed = config.clone();
        let accessor = StateAccessor::new(saver, Arc::new(table), Arc::clone(&ids))
            .remembering(move || followed.last_known().accessor_graph_max());
        let bridge = BridgeOptions {
            queue_maxsize: current.stream_bridge.queue_maxsize,
            queue_max_bytes: current.stream_bridge.queue_max_bytes,
            total_max_bytes: current.stream_bridge.total_max_bytes,
            ..BridgeOptions::default()
        };
        let bridge = StreamBridge::with_clock(bridge, Arc::clone(&ids));
        let background = TaskTracker::new();
        let servers = Arc::new(McpServers::new(Guard::this_program()));
        servers.connect(&current.mcp_servers);
        let agents = Arc::new(AgentBuilder::new(config.clone(), &current).with_source(servers));
        let catalog = Arc::new(Catalog::new(&current, configured_store(&current, &records)));
        let admission = Admission::new(&current.subagent_runtime);
        let threads =
            Arc::new(Threads::new(records.clone(), config.clone(), accessor, modes, background.clone()));
        let streams =
            Arc::new(Streams::new(records.clone(), Arc::clone(&threads), bridge, background.clone()));
        let settings = &current.subagent_batches;
        let batching = settings.enabled.then(|| Arc::new(Batching::new(settings.clone())));
        let delegator = Arc::new(Delegator {
            records: records.clone(),
            delegating: Delegating::Run,
            agents: Arc::clone(&agents),
            admission: admission.clone(),
            catalog: Arc::clone(&catalog),
            config: config.clone(),
            hooks: Arc::new(hooks),
            external: Arc::new(external_agents(Guard::this_program())),
            stopping: CancellationToken::new(),
            batches: batching.clone(),
        });
        let batch_worker =
            BatchWorker::start(&delegator, threads.accessor().clone()).await.map_err(StartError::Leases)?;
        let runs = Arc::new(Runs::new(
            config.clone(),
            records.clone(),
            Arc::clone(&threads),
            Arc::clone(&streams),
            delegator,
            metrics.clone(),
            parts.progress_every,
        ));
        runs.roll_back(rollbacks);
        match ownership {
            Some(terms) => ownership::keep(&runs, terms).await.map_err(StartError::Leases)?,
            // Nobody else can open records in memory.
            None if current.database.backend == Backend::Memory => {}
            None => ownership::look_for_dead(&runs, Terms::configured(&current)),
        }
        Ok(Arc::new(Self {
            auth: Authenticator::new(&current.auth),
            config,
            agents,
            admission,
            catalog,
            records,
            ids,
            threads,
            streams,
            runs,
            batching,
            batch_worker,
            backend: current.database.backend,
            has_batches: current.database.backend.is_sql(),
            connections: Connections::new(&current.gateway, metrics.clone()),
            history_max_bytes: current.gateway.history_max_bytes,
            metrics,
            checkpoints,
            background,
            has_page: current.page.enabled,
            drain: parts.drain,
            _instance: instance,
        }))
    }

    /// Counters since the start and current gauges, as text for `/metrics`.
    pub(crate) async fn metrics(&self) -> String {
        let database = async { self.checkpoints.sqlite()?.file_size().await.ok() };
        let (database, batches) = tokio::join!(in_time(database), in_time(self.batches()));
        self.config.current_async().await;
        let ((runs, waiting), (streams, followers)) = (self.runs.counts(), self.streams.counts());
        self.metrics.rendered(Snapshot {
            connections: self.connections.open(),
            runs,
            waiting,
            subagents: self.admission.counts(),
            background: self.background.len(),
            streams,
            followers,
            stream_bytes: self.streams.bytes(),
            heads: self.threads.accessor().remembered(),
            config_valid: self.config.last_error().is_none(),
            database,
            batches,
        })
    }

    /// The bytes that a thread's rows take, if the driver knows them and they can be read.
    pub(crate) async fn stored_bytes(&self, thread: &ThreadId) -> Option<u64> {
        let bytes = self.checkpoints.stored_bytes(thread).await;
        bytes
            .inspect_err(|error| tracing::warn!(%thread, %error, "could not read the size of a thread"))
            .ok()?
    }

    /// The batches, if this process works on them and the database answers.
    async fn batches(&self) -> Option<BatchSnapshot> {
        let batching = self.batching.as_ref()?;
        let (batches, items) = self.records.batches().live_counts().await.ok()?;
        let live = [BatchStatus::Queued, BatchStatus::Running, BatchStatus::Paused];
        let number = |status: BatchStatus| batches.get(status.as_str()).copied().unwrap_or_default();
        Some(BatchSnapshot {
            batches: live.into_iter().map(|status| (status.as_str(), number(status))).collect(),
            items: items.iter().map(|(status, number)| (status.as_str(), number)).collect(),
            attempts: AttemptEnd::ALL.map(|end| (end.as_str(), batching.attempts(end))).into(),
        })
    }

    /// The connections of its clients, for [`http::serve`](crate::http::serve).
    pub fn connections(&self) -> Arc<Connections> {
        Arc::clone(&self.connections)
    }

    /// Stops accepting runs, interrupts running ones, gives items of batches back, and waits for their last writes and for background work: the
    /// first part of stopping, while clients still receive the end of their streams.
    pub async fn stop_runs(&self) {
        let drained = async {
            let batches = async {
                if let Some(worker) = &self.batch_worker {
                    worker.stop().await;
                }
            };
            tokio::join!(self.runs.stop(), batches);
            self.background.close();
            self.background.wait().await;
        };
        if tokio::time::timeout(self.drain, drained).await.is_err() {
            tracing::warn!(
                seconds = self.drain.as_secs(),
                "some runs or other writers did not stop in time; the next start recovers the runs"
            );
        }
    }

    /// Closes the stores: the last part of stopping.
    pub async fn close(&self) {
        self.records.close().await;
        self.checkpoints.close().await;
    }
}

/// A figure of a store; `None` if the store does not answer in time.
async fn in_time<T>(figure: impl Future<Output = Option<T>>) -> Option<T> {
    tokio::time::timeout(FIGURES_WITHIN, figure).await.ok().flatten()
}

/// Ends the runs that earlier processes left unfinished. Returns the lock of the state directory, if it is needed.
async fn recover(
    records: &Records,
    config: &Config,
    ownership: Option<Terms>,
) -> Result<(Option<Instance>, Vec<RunRow>), StartError> {
    let grace = TimeDelta::seconds(i64::try_from(config.run_ownership.grace_seconds).unwrap_or(i64::MAX));
    if ownership.is_some() {
        check_sharing(records, config, grace).await?;
    }
    let mut recovered = records.runs().recover_orphans(Utc::now(), grace).await?;
    let (instance, predecessors) = ownership::take_over(records, &config.state_dir).await?;
    recovered.runs.extend(predecessors.runs);
    recovered.rollbacks.extend(predecessors.rollbacks);
    for run in &recovered.runs {
        tracing::warn!(
            run_id = run.run_id,
            thread_id = run.thread_id,
            "recovered an unfinished run of an earlier process"
        );
    }
    Ok((instance, recovered.rollbacks))
}

/// Checks that several processes can share the database, as this one may be the first of several.
async fn check_sharing(records: &Records, config: &Config, grace: TimeDelta) -> Result<(), StartError> {
    let skew = records.clock_skew().await?.abs();
    // Also without a grace: no two clocks are quite the same.
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

/// The saver with the configured history cache. Only delta mode has histories to cache.
fn with_history_cache(
    saver: Arc<dyn Saver>,
    config: &Config,
    counted: &Metrics,
) -> Result<Arc<dyn Saver>, OpenError> {
    let Some(cache) = history_cache(config)? else { return Ok(saver) };
    Ok(Arc::new(CachedSaver::new(saver, Arc::new(MeteredCache::new(cache, counted.clone())))))
}

//! What the turns of a client delegate with: the records of their subagents, opened when a turn first needs them.

use std::sync::Arc;

use threadkeep_acp::external_agents;
use threadkeep_agent::AgentBuilder;
use threadkeep_config::{Config, ConfigHandle};
use threadkeep_processes::Guard;
use threadkeep_records::{Delegating, OperationKind, Records, RecordsOptions};
use threadkeep_storage::is_served;
use threadkeep_subagents::Delegator;
use threadkeep_subagents::admission::{self, Admission};
use threadkeep_subagents::catalog::Catalog;
use threadkeep_subagents::external::ExternalAgents;
use threadkeep_subagents::hooks::Hooks;
use threadkeep_subagents::ledger::Limits;
use threadkeep_subagents::managed::configured_store;
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

use super::checkpointer::SharedStore;
use super::{ClientError, TurnOptions};

/// Where the executions of a client's subagents are recorded.
pub(super) enum RecordsSource {
    /// With the configured store, and so shared with the gateway.
    Shared(Arc<SharedStore>),
    /// With the client, which has a store of its own or none.
    Client,
}

/// The subagents of one client.
pub(super) struct Delegation {
    config: ConfigHandle,
    /// The configuration that the process started with.
    at_start: Arc<Config>,
    agents: Arc<AgentBuilder>,
    source: RecordsSource,
    slots: Admission,
    pub(super) hooks: Arc<Hooks>,
    external: ExternalAgents,
    /// Set when the process ends: subagents that still work are left to be continued.
    pub(super) stopping: CancellationToken,
    records: OnceCell<Records>,
    delegator: OnceCell<Arc<Delegator>>,
}

impl Delegation {
    pub(super) fn new(
        config: ConfigHandle,
        at_start: Arc<Config>,
        agents: Arc<AgentBuilder>,
        source: RecordsSource,
    ) -> Self {
        let slots = match &source {
            RecordsSource::Shared(store) => store.slots().clone(),
            RecordsSource::Client => Admission::new(&at_start.subagent_runtime),
        };
        let hooks = Arc::new(Hooks::configured(&at_start.subagent_hooks));
        Self {
            config,
            at_start,
            agents,
            source,
            slots,
            hooks,
            external: Arc::new(external_agents(Guard::this_program())),
            stopping: CancellationToken::new(),
            records: OnceCell::new(),
            delegator: OnceCell::new(),
        }
    }

    /// How much a turn may delegate; `None` for nothing. `left` says that it goes on with delegations, which it can only
    /// if it delegates.
    pub(super) fn limits(&self, options: &TurnOptions, current: &Config, left: bool) -> Option<Limits> {
        if !options.subagent_enabled.unwrap_or(left) {
            return None;
        }
        let slots = u32::try_from(self.slots.capacity()).unwrap_or(u32::MAX);
        let concurrent = admission::concurrency(options.max_concurrent_subagents, slots);
        let total = admission::total(options.max_total_subagents, current.subagents.max_total_per_run);
        Some(Limits { concurrent: concurrent as usize, total: total as usize })
    }

    /// The records.
    pub(super) async fn records(&self) -> Result<&Records, ClientError> {
        let open = || async {
            match &self.source {
                RecordsSource::Shared(store) => store.records(&self.at_start).await,
                RecordsSource::Client => Ok(Records::open_memory(RecordsOptions::default()).await?),
            }
        };
        self.records.get_or_try_init(open).await
    }

    /// Refuses a turn on a thread on which a run of a gateway is at work: the turn would take the run's subagents away from
    /// it, and count what the run counts. A run whose gateway is gone is in nobody's way.
    pub(super) async fn check_free(&self, thread_id: &str) -> Result<(), ClientError> {
        if matches!(self.source, RecordsSource::Client) {
            return Ok(());
        }
        let records = self.records().await?;
        let holder = records.runs().active_for_thread(thread_id).await?;
        let Some(run) = holder.filter(|row| row.operation_kind == OperationKind::Run) else { return Ok(()) };
        let at_work = if let Some(lease) = run.lease_expires_at {
            lease > records.now()
        } else {
            let config = Arc::clone(&self.at_start);
            // One that cannot be asked may be at work.
            tokio::task::spawn_blocking(move || is_served(&config)).await.unwrap_or(true)
        };
        if at_work {
            return Err(ClientError::RunAtWork { thread_id: run.thread_id, run_id: run.run_id });
        }
        Ok(())
    }

    /// What equips a turn.
    pub(super) async fn delegator(&self) -> Result<&Arc<Delegator>, ClientError> {
        let records = self.records().await?;
        let delegator = || async {
            Arc::new(Delegator {
                records: records.clone(),
                delegating: Delegating::Unrecorded,
                agents: Arc::clone(&self.agents),
                admission: self.slots.clone(),
                catalog: Arc::new(Catalog::new(&self.at_start, configured_store(&self.at_start, records))),
                config: self.config.clone(),
                hooks: Arc::clone(&self.hooks),
                external: Arc::clone(&self.external),
                stopping: self.stopping.clone(),
                // A client ends with its program; the gateway's processes work on batches.
                batches: None,
            })
        };
        Ok(self.delegator.get_or_init(delegator).await)
    }
}

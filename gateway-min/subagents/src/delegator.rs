//! Delegation in one process: what every run's `task` calls share, and giving a run the means to delegate.

use std::sync::Arc;

use threadkeep::state::StateAccessor;
use threadkeep_agent::{Agent, AgentBuilder};
use threadkeep_config::{ConfigHandle, ReceiptsRenderMode};
use threadkeep_records::Records;
use tokio_util::sync::CancellationToken;

use crate::admission::Admission;
use crate::budget::{Budget, Budgeting};
use crate::catalog::Catalog;
use crate::evidence::{Receipting, Showing};
use crate::ledger::{Ledger, Limits};
use crate::managed::StoreError;
use crate::prompts;
use crate::task::Task;

/// The subagents of a process.
pub struct Delegator {
    /// Where executions are recorded.
    pub records: Records,
    /// Builds the agents.
    pub agents: Arc<AgentBuilder>,
    /// The slots in which subagents run.
    pub admission: Admission,
    /// Which subagents there are.
    pub catalog: Arc<Catalog>,
    /// The configuration, read live.
    pub config: ConfigHandle,
    /// Set when the process stops: a run that is cancelled then is to go on in another process, and so are its
    /// subagents.
    pub stopping: CancellationToken,
}

impl Delegator {
    /// Gives an agent its token budget and, with `limits`, the means to delegate: the tool `task`, the ledger, receipts.
    /// `allowed` limits the subagents; an empty list switches delegation off.
    ///
    /// # Errors
    /// [`StoreError`] if the managed subagents cannot be read.
    pub async fn equip(
        self: &Arc<Self>,
        agent: &mut Agent,
        accessor: &StateAccessor,
        limits: Option<Limits>,
        allowed: Option<&[String]>,
    ) -> Result<(), StoreError> {
        let config = self.config.current_async().await;
        let budget = config.token_budget.enabled.then(|| Budget::new(config.token_budget, None));
        if let Some(budget) = &budget {
            agent.middleware.push(Arc::new(Budgeting::new(Arc::clone(budget))));
        }
        let Some(limits) = limits else { return Ok(()) };
        let available = self.catalog.available(&config, allowed).await?;
        if !available.offers_delegation() {
            return Ok(());
        }
        let receipts = config.verification.receipts_enabled;
        agent.middleware.push(Arc::new(Ledger { limits }));
        if receipts {
            let showing = match config.verification.receipts_render_mode {
                ReceiptsRenderMode::Always => Showing::Always,
                ReceiptsRenderMode::DelegationOnly => Showing::AfterDelegation,
            };
            agent.middleware.push(Arc::new(Receipting(showing)));
        }
        agent.tool_context.receipts = receipts;
        agent.prompt.sections.push(prompts::delegation(&available, limits, receipts));
        let mut toolbox = (*agent.toolbox).clone();
        toolbox.add(Arc::new(Task {
            delegator: Arc::clone(self),
            accessor: accessor.clone(),
            available,
            model: agent.model.name().to_owned(),
            budget,
            receipts,
        }));
        agent.toolbox = Arc::new(toolbox);
        Ok(())
    }
}

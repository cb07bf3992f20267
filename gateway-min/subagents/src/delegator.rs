//! Delegation in one process: what every run's `task` calls share, and giving a run the means to delegate.

use std::sync::Arc;

use threadkeep::state::{StateAccessor, StateSnapshot};
use threadkeep_agent::{Agent, AgentBuilder};
use threadkeep_config::{ConfigHandle, ReceiptsRenderMode};
use threadkeep_records::{Records, RecordsError};
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

use crate::admission::Admission;
use crate::budget::{Budget, Budgeting};
use crate::catalog::Catalog;
use crate::evidence::{Receipting, Showing};
use crate::hooks::Hooks;
use crate::ledger::{self, Entry, Ledger, Limits};
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
    /// What extensions do at the start and at the end of tasks.
    pub hooks: Hooks,
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
            counted: OnceCell::new(),
            receipts,
        }));
        agent.toolbox = Arc::new(toolbox);
        Ok(())
    }

    /// Records the deliveries that a process which died could not record: the ledger at the thread's head has the results.
    /// Otherwise a run that starts again from before them would take these results for its own.
    ///
    /// # Errors
    /// If the state or the executions cannot be read or written.
    pub async fn catch_up(&self, thread_id: &str, head: Option<&StateSnapshot>) -> Result<(), CatchUpError> {
        let entries = ledger::entries(head)?;
        if entries.iter().all(Entry::is_in_progress) {
            return Ok(());
        }
        let executions = self.records.executions();
        for row in executions.of_thread(thread_id).await?.iter().filter(|row| !row.delivered) {
            if entries.iter().any(|entry| entry.id == row.execution_id && !entry.is_in_progress()) {
                executions.delivered(thread_id, &row.execution_id).await?;
            }
        }
        Ok(())
    }
}

/// Why deliveries could not be recorded.
#[derive(Debug, thiserror::Error)]
pub enum CatchUpError {
    /// The state could not be read.
    #[error(transparent)]
    Engine(#[from] threadkeep::Error),
    /// The executions could not be read or written.
    #[error(transparent)]
    Records(#[from] RecordsError),
}

//! Delegation in one process: what every run's `task` calls share, and giving a run the means to delegate.

use std::sync::Arc;

use threadkeep::id::ThreadId;
use threadkeep::state::{StateAccessor, StateSnapshot};
use threadkeep_agent::tools::{ToolContext, WorkUsage};
use threadkeep_agent::{Agent, AgentBuilder};
use threadkeep_config::{Config, ConfigHandle, ReceiptsRenderMode};
use threadkeep_records::{Delegating, ExecutionKind, ExecutionRow, Records, RecordsError};
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

use crate::admission::Admission;
use crate::batches::{BATCHES_PROMPT, BatchStatusTool, BatchTask, Batching, CancelBatch, Sharing};
use crate::budget::{Budget, Budgeting};
use crate::catalog::Catalog;
use crate::evidence::{Receipting, Showing};
use crate::external::{External, ExternalAgents};
use crate::hooks::Hooks;
use crate::ledger::{self, Entry, Ledger, Limits};
use crate::managed::StoreError;
use crate::progress::Progress;
use crate::prompts;
use crate::task::Task;

/// The error of a delegation that no run goes on with.
const ABANDONED: &str = "The run that delegated it ended, and the conversation went on without it";
/// The error of a delegation whose call a client has edited or taken away.
const WITHDRAWN: &str = "Its call was changed before it had ended";
/// The error of an external agent's work whose run has ended without its end.
const INTERRUPTED: &str = "Its run ended before it";
/// The error of an execution whose result the conversation has, and whose end could not be recorded.
const STUCK: &str = "It did not stop, and its end could not be recorded";

/// The subagents of a process.
pub struct Delegator {
    /// Where executions are recorded.
    pub records: Records,
    /// Whether its runs have rows, as a gateway's: [`Delegating::Run`], or [`Delegating::Unrecorded`].
    pub delegating: Delegating,
    /// Builds the agents.
    pub agents: Arc<AgentBuilder>,
    /// The slots in which subagents run.
    pub admission: Admission,
    /// Which subagents there are.
    pub catalog: Arc<Catalog>,
    /// The configuration, read live.
    pub config: ConfigHandle,
    /// What extensions do at the start and at the end of tasks.
    pub hooks: Arc<Hooks>,
    /// Makes the tool that calls external agents.
    pub external: ExternalAgents,
    /// Set when the process stops: a run that is cancelled then is to go on in another process, and so are its
    /// subagents.
    pub stopping: CancellationToken,
    /// The batches that runs may submit; `None` if this process does not work on any.
    pub batches: Option<Arc<Batching>>,
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
        let sharing = self.batches.as_ref().map(|_| {
            let ToolContext { thread_id, run_id, .. } = &agent.tool_context;
            Sharing::new(self.records.batches().clone(), thread_id, run_id)
        });
        let budget = limit(agent, &config, sharing);
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
        if let Some(batching) = &self.batches {
            agent.prompt.sections.push(BATCHES_PROMPT.to_owned());
            toolbox.add(Arc::new(BatchTask {
                delegator: Arc::clone(self),
                accessor: accessor.clone(),
                batching: Arc::clone(batching),
                available: available.clone(),
                model: agent.model.name().to_owned(),
                budget: budget.clone(),
                receipts,
            }));
            toolbox.add(Arc::new(BatchStatusTool { delegator: Arc::clone(self) }));
            toolbox
                .add(Arc::new(CancelBatch { delegator: Arc::clone(self), batching: Arc::clone(batching) }));
        }
        toolbox.add(Arc::new(Task {
            delegator: Arc::clone(self),
            accessor: accessor.clone(),
            available,
            model: agent.model.name().to_owned(),
            budget,
            counted: OnceCell::new(),
            receipts,
        }));
        if let Some(external) = External::tool(self, &config, None) {
            toolbox.add(external);
        }
        agent.toolbox = Arc::new(toolbox);
        Ok(())
    }

    /// Records what an earlier run of the thread could not record, because its process died or its database did not answer:
    /// the deliveries of the results that the ledger at the thread's head has, and the ends of their executions.
    /// Otherwise a run that starts again from before them would take these results for its own. Returns what was done
    /// for executions that have ended and are counted by no run; the run `run_id` counts it.
    ///
    /// An entry that a new question turned away from has no result. Its execution stays undelivered: a run that starts
    /// again from before that question gets what it left, without asking its models again.
    ///
    /// # Errors
    /// If the state or the executions cannot be read or written.
    pub async fn catch_up(
        &self,
        accessor: &StateAccessor,
        thread_id: &str,
        run_id: &str,
        head: Option<&StateSnapshot>,
    ) -> Result<Vec<WorkUsage>, CatchUpError> {
        let entries = ledger::entries(head)?;
        let mut uncounted = Vec::new();
        if entries.is_empty() && self.config.current_async().await.acp_agents.is_empty() {
            return Ok(uncounted);
        }
        let executions = self.records.executions();
        for row in executions.unsettled(thread_id).await? {
            let has_result =
                entries.iter().any(|entry| entry.id == row.execution_id && Entry::has_result(entry));
            if row.kind == ExecutionKind::Acp {
                if !row.status.is_terminal()
                    && self.take_over(accessor, &row, run_id, INTERRUPTED).await?.is_some()
                {
                    // It cannot be continued, only repeated.
                    executions.delivered(thread_id, &row.execution_id).await?;
                }
                continue;
            }
            if is_uncounted(&row) || (has_result && !row.status.is_terminal()) {
                uncounted.extend(self.take_over(accessor, &row, run_id, STUCK).await?);
            }
            if has_result && !row.delivered {
                executions.delivered(thread_id, &row.execution_id).await?;
            }
        }
        Ok(uncounted)
    }

    /// Cancels the executions that the run `run_id` turns away from with a new question, and returns what was done for
    /// them and counted by no run: an orderly stop leaves executions to the next run, and a process that dies counts
    /// nothing. From then on they are this run's, which counts them.
    ///
    /// # Errors
    /// If the state of a subagent or the executions cannot be read or written.
    pub async fn abandon(
        &self,
        accessor: &StateAccessor,
        thread_id: &str,
        run_id: &str,
    ) -> Result<Vec<WorkUsage>, CatchUpError> {
        let mut uncounted = Vec::new();
        for row in self.records.executions().unsettled(thread_id).await? {
            if !row.status.is_terminal() || is_uncounted(&row) {
                uncounted.extend(self.take_over(accessor, &row, run_id, ABANDONED).await?);
            }
        }
        Ok(uncounted)
    }

    /// Cancels these executions for the run `run_id`, and returns the same as [`Self::abandon`]. Their calls were edited or
    /// taken away from the answer with whose other calls the run goes on. A call that is changed back is made again.
    ///
    /// # Errors
    /// As for [`Self::abandon`].
    pub async fn withdraw(
        &self,
        accessor: &StateAccessor,
        thread_id: &str,
        run_id: &str,
        executions: &[String],
    ) -> Result<Vec<WorkUsage>, CatchUpError> {
        let mut uncounted = Vec::new();
        if executions.is_empty() {
            return Ok(uncounted);
        }
        for row in self.records.executions().unsettled(thread_id).await? {
            let at_work = !row.status.is_terminal();
            if executions.contains(&row.execution_id) && (at_work || is_uncounted(&row)) {
                let taken = self.take_over(accessor, &row, run_id, WITHDRAWN).await?;
                if at_work && taken.is_some() {
                    // Nobody wants what it left: whatever makes the call again begins with a new attempt.
                    self.records.executions().delivered(thread_id, &row.execution_id).await?;
                }
                uncounted.extend(taken);
            }
        }
        Ok(uncounted)
    }

    /// Makes an execution that nobody goes on with the run's, cancelled for this reason unless it has ended, and returns
    /// what was done for it. Nothing, if another run was faster or this one has ended.
    async fn take_over(
        &self,
        accessor: &StateAccessor,
        row: &ExecutionRow,
        run_id: &str,
        error: &str,
    ) -> Result<Option<WorkUsage>, CatchUpError> {
        let state = accessor.get(&ThreadId::from(row.child_thread.as_str()), None).await?;
        let progress = Progress::of(state.as_ref())?;
        let run = (run_id, self.delegating);
        let taken = self.records.executions().take_over(row, run, error, &progress.by_model()).await?;
        Ok(taken.then(|| progress.used(row)))
    }
}

/// Whether models did something for an execution that has ended and no run has counted it: the process of its run died.
fn is_uncounted(row: &ExecutionRow) -> bool {
    row.status.is_terminal() && !row.counted && !row.usage.is_empty()
}

/// Gives a lead agent its token budget, if the configuration has one (service reference, "Subagent settings").
pub fn limit_tokens(agent: &mut Agent, config: &Config) -> Option<Arc<Budget>> {
    limit(agent, config, None)
}

/// The same for a run that may have batches, with which it shares the budget.
fn limit(agent: &mut Agent, config: &Config, sharing: Option<Sharing>) -> Option<Arc<Budget>> {
    let budget = config.token_budget.enabled.then(|| Budget::of_run(config.token_budget, sharing))?;
    agent.middleware.push(Arc::new(Budgeting::new(Arc::clone(&budget))));
    Some(budget)
}

/// Why the subagents of a thread could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum CatchUpError {
    /// The checkpoints could not be read or changed.
    #[error(transparent)]
    Engine(#[from] threadkeep::Error),
    /// The executions could not be read or written.
    #[error(transparent)]
    Records(#[from] RecordsError),
}

impl CatchUpError {
    /// Whether a store is unavailable, so that the same may succeed later.
    pub(crate) fn is_unavailable(&self) -> bool {
        match self {
            Self::Engine(error) => error.is_unavailable(),
            Self::Records(error) => error.is_unavailable(),
        }
    }
}

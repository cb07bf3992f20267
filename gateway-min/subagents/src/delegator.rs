//! Delegation in one process: what every run's `task` calls share, and giving a run the means to delegate.

use std::sync::Arc;

use threadkeep::id::ThreadId;
use threadkeep::state::{StateAccessor, StateSnapshot};
use threadkeep_agent::{Agent, AgentBuilder, Tokens};
use threadkeep_config::{Config, ConfigHandle, ReceiptsRenderMode};
use threadkeep_records::{ExecutionRow, RECOVERY_STOP_REASON, Records, RecordsError};
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

use crate::admission::Admission;
use crate::budget::{Budget, Budgeting};
use crate::catalog::Catalog;
use crate::evidence::{Receipting, Showing};
use crate::execution;
use crate::hooks::Hooks;
use crate::ledger::{self, Entry, Ledger, Limits};
use crate::managed::StoreError;
use crate::progress::Progress;
use crate::prompts;
use crate::task::Task;

/// The error of a delegation that no run goes on with.
const ABANDONED: &str = "The run that delegated it ended, and the conversation went on without it";
/// The error of an execution whose result the conversation has, and whose end could not be recorded.
const STUCK: &str = "It did not stop, and its end could not be recorded";

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
    pub hooks: Arc<Hooks>,
    /// Whether runs are rows of the records. An embedded client has none: what has ended there was counted when it ended.
    pub records_runs: bool,
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
        let budget = limit_tokens(agent, &config);
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

    /// Records what an earlier run of the thread could not record, because its process died or its database did not answer:
    /// the deliveries of the results that the ledger at the thread's head has, and the ends of their executions.
    /// Otherwise a run that starts again from before them would take these results for its own. Returns what was done
    /// for the ended ones; the run `run_id` counts it.
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
    ) -> Result<Vec<Uncounted>, CatchUpError> {
        let mut entries = ledger::entries(head)?;
        entries.retain(Entry::has_result);
        let mut uncounted = Vec::new();
        if entries.is_empty() {
            return Ok(uncounted);
        }
        let executions = self.records.executions();
        for row in executions.of_thread(thread_id).await? {
            if !entries.iter().any(|entry| entry.id == row.execution_id) {
                continue;
            }
            if !row.status.is_terminal() {
                uncounted.extend(self.take_over(accessor, &row, run_id, STUCK).await?);
            }
            if !row.delivered {
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
    ) -> Result<Vec<Uncounted>, CatchUpError> {
        let mut uncounted = Vec::new();
        for row in self.records.executions().of_thread(thread_id).await? {
            let is_open = !row.status.is_terminal();
            if is_open || (!row.delivered && self.has_died(&row.run_id).await?) {
                uncounted.extend(self.take_over(accessor, &row, run_id, ABANDONED).await?);
            }
        }
        Ok(uncounted)
    }

    /// Makes an execution that nobody goes on with the run's, cancelled for this reason unless it has ended, and returns
    /// what was done for it. Nothing, if another run was faster.
    async fn take_over(
        &self,
        accessor: &StateAccessor,
        row: &ExecutionRow,
        run_id: &str,
        error: &str,
    ) -> Result<Vec<Uncounted>, CatchUpError> {
        let state = accessor.get(&ThreadId::from(row.child_thread.as_str()), None).await?;
        let progress = Progress::of(state.as_ref())?;
        let taken = self.records.executions().abandon(row, run_id, error, &progress.by_model()).await?;
        let caller = caller(&row.agent_name);
        let uncounted = progress.usage.into_iter().map(|(model, used)| Uncounted {
            model,
            caller: caller.clone(),
            calls: used.calls,
            tokens: execution::signed(used.tokens),
        });
        Ok(uncounted.filter(|_| taken).collect())
    }

    /// Whether the process of a run died before the run had ended, and with it what it had counted.
    pub(crate) async fn has_died(&self, run_id: &str) -> Result<bool, RecordsError> {
        let run = self.records.runs().get(run_id).await?;
        let Some(run) = run else { return Ok(self.records_runs) };
        Ok(run.stop_reason.as_deref() == Some(RECOVERY_STOP_REASON))
    }
}

/// Gives a lead agent its token budget, if the configuration has one (service reference, "Subagent settings").
pub fn limit_tokens(agent: &mut Agent, config: &Config) -> Option<Arc<Budget>> {
    let budget = config.token_budget.enabled.then(|| Budget::new(config.token_budget, None))?;
    agent.middleware.push(Arc::new(Budgeting::new(Arc::clone(&budget))));
    Some(budget)
}

/// Who asks the models of a subagent with this name, in sums of usage.
pub(crate) fn caller(agent_name: &str) -> String {
    format!("subagent:{agent_name}")
}

/// Model calls for a subagent that no run has counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uncounted {
    /// The configured name of the model.
    pub model: String,
    /// Who asked it.
    pub caller: String,
    /// How often.
    pub calls: u64,
    /// The tokens of these calls.
    pub tokens: Tokens,
}

/// Why deliveries and ends could not be recorded.
#[derive(Debug, thiserror::Error)]
pub enum CatchUpError {
    /// The state could not be read.
    #[error(transparent)]
    Engine(#[from] threadkeep::Error),
    /// The executions could not be read or written.
    #[error(transparent)]
    Records(#[from] RecordsError),
}

//! One execution: a subagent at work on its own checkpointed thread, from its row to its result.
//!
//! The row comes first, then the subagent's checkpoints, then the terminal status, then the result for the parent. So
//! whatever a crash interrupts, the next run that reaches the same call goes on where it stopped: with the result, if
//! there is one, else at the head of the subagent's thread.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Map, Value as Json, json};
use threadkeep::id::ThreadId;
use threadkeep::state::{StateAccessor, StateSnapshot};
use threadkeep::step::StepWriter;
use threadkeep_agent::tools::{Report as ToolReport, Reports};
use threadkeep_agent::{AgentError, Ended, Middleware, Prompt, RunTerms, Session, SubagentSpec, Tokens};
use threadkeep_records::{
    ExecutionEnd, ExecutionRow, ExecutionStatus, RECOVERY_STOP_REASON, RecordsError, RunRow, persistently,
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::acceptance::Criteria;
use crate::admission::{Class, Refused};
use crate::batches::ItemBudget;
use crate::budget::{Budget, Budgeting};
use crate::catalog::Definition;
use crate::delegator::Delegator;
use crate::evidence::{Receipting, Showing};
use crate::external::External;
use crate::hooks::{TaskInfo, TaskKind};
use crate::observer::ChildObserver;
use crate::outcome::TaskOutcome;
use crate::progress::{Counting, Progress, signed};
use crate::watched::Settled;

/// The error of an execution that was cancelled.
pub(crate) const CANCELLED: &str = "Cancelled by user";

/// What a subagent works on.
pub(crate) struct Work {
    pub(crate) delegator: Arc<Delegator>,
    pub(crate) accessor: StateAccessor,
    /// The execution.
    pub(crate) row: ExecutionRow,
    /// Whether its tokens were counted when this run came to it.
    pub(crate) counted: bool,
    pub(crate) definition: Arc<Definition>,
    /// The configured name of its model.
    pub(crate) model: String,
    /// Its first messages.
    pub(crate) messages: Vec<Json>,
    /// What its result is checked against.
    pub(crate) criteria: Option<Criteria>,
    /// Further sections of its system prompt.
    pub(crate) sections: Vec<String>,
    /// The budget above its own.
    pub(crate) budget: Option<Arc<Budget>>,
    /// What an item of a batch counts on; the budget above is that of its batch.
    pub(crate) item: Option<ItemBudget>,
    /// Whether its tool calls get receipts.
    pub(crate) receipts: bool,
    pub(crate) reports: Reports,
    /// The place of the call in the parent's graph.
    pub(crate) namespace: String,
    pub(crate) cancel: CancellationToken,
    /// Whether its tokens have been reported; nothing is reported after them.
    pub(crate) settled: Settled,
    /// What extensions know of it, from its start to its end.
    pub(crate) begun: Mutex<Option<TaskInfo>>,
}

/// Why an execution could not be carried out or recorded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecutionError {
    /// Its row could not be read or written.
    #[error(transparent)]
    Records(#[from] RecordsError),
    /// Its checkpoints could not be read.
    #[error(transparent)]
    Engine(#[from] threadkeep::Error),
    /// Its call is not part of a conversation.
    #[error("the call has no turn: there are no messages in its state")]
    NoTurn,
    /// Another run has taken it over meanwhile.
    #[error("run {run} goes on with execution {execution}; its result is not this run's")]
    TakenOver {
        /// The execution.
        execution: String,
        /// The run that goes on with it.
        run: String,
    },
}

impl ExecutionError {
    /// Whether the same may succeed later.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Self::Records(error) => error.is_unavailable(),
            Self::Engine(error) => error.is_unavailable(),
            Self::NoTurn | Self::TakenOver { .. } => false,
        }
    }
}

/// How the work of a subagent ended.
pub(crate) enum End {
    Agent(Result<Ended, AgentError>),
    Refused(Refused),
    Stopped,
    /// It was stopped at its deadline. A clock that is read afterwards may not say so: it can have been set back.
    TimedOut,
}

impl Work {
    /// Works until the execution has ended, and returns what came of it; `None` if the run that goes on with the parent's
    /// goes on with it. An execution that has ended already is not repeated. The slot is given back when everything is
    /// written.
    pub(crate) async fn carry_out(&self) -> Result<Option<TaskOutcome>, ExecutionError> {
        let thread = ThreadId::from(self.row.child_thread.as_str());
        if self.row.status.is_terminal() {
            let state = self.accessor.get(&thread, None).await?;
            return self.settle(&self.row, state.as_ref()).await.map(Some);
        }
        let entered = self.delegator.records.now();
        let deadline = self.deadline();
        let slot = tokio::select! {
            biased;
            () = self.cancel.cancelled() => Err(End::Stopped),
            () = tokio::time::sleep_until(deadline) => Err(End::TimedOut),
            slot = self.delegator.admission.acquire(&Class::Interactive) => slot.map_err(End::Refused),
        };
        let (end, state, slot) = match slot {
            Err(end) => (end, self.accessor.get(&thread, None).await?, None),
            Ok(slot) => {
                let waited = (self.delegator.records.now() - entered).num_milliseconds().max(0);
                let executions = self.delegator.records.executions();
                if persistently(|| executions.started(&self.row, &self.model, waited)).await? {
                    let mut writer = StepWriter::open(&self.accessor, &thread, None).await?;
                    self.begin(writer.state().is_some()).await;
                    let ended = self.run(&mut writer).await?;
                    (ended, writer.state().cloned(), Some(slot))
                } else {
                    // Its row says how it has ended, or who goes on with it: two of them would write to one thread.
                    (End::Stopped, self.accessor.get(&thread, None).await?, Some(slot))
                }
            }
        };
        let end = self.end(end, state.as_ref())?;
        if end.status == ExecutionStatus::Cancelled && self.outlives_its_run().await {
            self.leave().await;
            self.stopped(end.status).await;
            return Ok(None);
        }
        let row = self.finish(&end).await?;
        self.stopped(row.status).await;
        drop(slot);
        if row.run_id != self.row.run_id {
            return Err(ExecutionError::TakenOver { execution: row.execution_id, run: row.run_id });
        }
        self.settle(&row, state.as_ref()).await.map(Some)
    }

    /// Ends the execution in the records, and returns its row as it is then: what another process decided first stays.
    /// If its thread is deleted by now, so is what it has left: it may have written that after the deletion looked.
    pub(crate) async fn finish(&self, end: &ExecutionEnd) -> Result<ExecutionRow, ExecutionError> {
        let executions = self.delegator.records.executions();
        let finished = persistently(|| executions.finish(&self.row, end.clone())).await;
        if finished.as_ref().is_err_and(RecordsError::is_not_found) {
            self.delete_checkpoints().await;
        }
        Ok(finished?)
    }

    /// Leaves the execution to the next run. If its thread is deleted by now, there is none, and it is as in
    /// [`Self::finish`].
    async fn leave(&self) {
        let executions = self.delegator.records.executions();
        let found = executions.newest(&self.row.thread_id, &self.row.execution_id).await;
        if matches!(found, Ok(None)) {
            self.delete_checkpoints().await;
        }
    }

    /// Deletes the checkpoints of an execution that has no row any more.
    async fn delete_checkpoints(&self) {
        let thread = ThreadId::from(self.row.child_thread.as_str());
        if let Err(error) = self.delete_unless_taken(&thread).await {
            tracing::warn!(%thread, %error, "the checkpoints of a deleted subagent may remain");
        }
    }

    /// Deletes what is seen of its thread, unless another execution has that by now: a copy of the parent's thread has the
    /// same ids, and its attempts get numbers that were deleted. A row comes before its checkpoints, so without one after
    /// the look, what was seen is nobody's.
    async fn delete_unless_taken(&self, thread: &ThreadId) -> Result<(), ExecutionError> {
        let seen = self.accessor.look(thread).await?;
        if !self.delegator.records.executions().exists(&self.row).await? {
            self.accessor.delete_seen(seen).await?;
        }
        Ok(())
    }

    /// Tells extensions of the start.
    pub(crate) async fn begin(&self, resumed: bool) {
        let info = TaskInfo {
            task_id: self.row.execution_id.clone(),
            run_id: self.row.run_id.clone(),
            thread_id: self.row.thread_id.clone(),
            kind: TaskKind::Subagent,
            parent_task_id: Some(self.row.run_id.clone()),
            agent_name: self.definition.name.clone(),
            resumed,
        };
        *self.begun.lock().unwrap_or_else(PoisonError::into_inner) = Some(info.clone());
        self.delegator.hooks.started(&self.row.tool_call_id, &info).await;
    }

    /// Tells extensions of the end, once, if they know of the start.
    pub(crate) async fn stopped(&self, status: ExecutionStatus) {
        let info = self.begun.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(info) = info {
            self.delegator.hooks.stopped(&self.row.tool_call_id, &info, status.into()).await;
        }
    }

    /// Whether its run was stopped without anybody wanting that: the process stops, or has lost the run.
    pub(crate) async fn outlives_its_run(&self) -> bool {
        if self.delegator.stopping.is_cancelled() {
            return true;
        }
        let run = self.delegator.records.runs().get(&self.row.run_id).await;
        let is_lost = |run: RunRow| {
            run.stop_reason.as_deref() == Some(RECOVERY_STOP_REASON)
                || run.lease_expires_at.is_some_and(|lease| lease <= self.delegator.records.now())
        };
        // Without the database nothing says that it is still the process's own.
        run.map_or(true, |run| run.is_some_and(is_lost))
    }

    /// Reports what the models did, once, unless it is counted already, and returns what the parent gets.
    pub(crate) async fn settle(
        &self,
        row: &ExecutionRow,
        state: Option<&StateSnapshot>,
    ) -> Result<TaskOutcome, ExecutionError> {
        let outcome = self.outcome(row, state).await?;
        let is_counted = self.counted && self.row.status.is_terminal();
        if !self.settled.now() || is_counted {
            return Ok(outcome);
        }
        let progress = Progress::of(state)?;
        if !progress.usage.is_empty() {
            self.reports.send(ToolReport::Usage(progress.used(&self.row))).await;
        }
        Ok(outcome)
    }

    /// When the execution must have ended, on this process's clock.
    pub(crate) fn deadline(&self) -> Instant {
        let left = (self.row.deadline - self.delegator.records.now()).to_std().unwrap_or(Duration::ZERO);
        Instant::now() + left
    }

    /// Runs the agent's loop on the subagent's thread: from its task, or from where it stopped.
    pub(crate) async fn run(&self, writer: &mut StepWriter) -> Result<End, ExecutionError> {
        let progress = Progress::of(writer.state())?;
        let budget = Budget::new(self.definition.token_budget, self.budget.clone());
        // The run that goes on with this has counted it.
        budget.go_on_from(tokens(&progress));
        let mut middleware: Vec<Arc<dyn Middleware>> = vec![Arc::new(Budgeting::knowing(budget))];
        if let Some(item) = self.item.clone() {
            middleware.push(Arc::new(item));
        }
        if self.receipts {
            middleware.push(Arc::new(Receipting(Showing::Always)));
        }
        let counting = Counting {
            model: self.model.clone(),
            max_turns: self.definition.max_turns,
            commands: self.criteria.is_some(),
        };
        middleware.push(Arc::new(counting));
        let mut toolbox = self.delegator.agents.toolbox().await;
        let config = self.delegator.config.current_async().await;
        if let Some(external) = External::tool(&self.delegator, &config, Some(&self.row)) {
            toolbox.add(external);
        }
        toolbox.retain(|tool| self.definition.permits(tool));
        let spec = SubagentSpec {
            name: &self.definition.name,
            run_id: &self.row.run_id,
            thread_id: &self.row.thread_id,
            model_name: &self.model,
            prompt: Prompt {
                own: Some(self.definition.system_prompt.clone()),
                sections: self.sections.clone(),
            },
            toolbox,
            skills: self.definition.skills_within(None),
            middleware,
        };
        let mut agent = match self.delegator.agents.subagent(spec).await {
            Ok(agent) => agent,
            Err(error) => return Ok(End::Agent(Err(error))),
        };
        agent.tool_context.receipts = self.receipts;
        // The date of the dispatch: once an execution, whatever midnight and restarts come in between.
        let date = agent.zone.date(self.row.created_at);
        agent.prompt.sections.push(format!("<current_date>{date}</current_date>"));
        let mut observer = ChildObserver::new(
            self.reports.clone(),
            self.settled.clone(),
            (&self.row.tool_call_id, &self.namespace),
            &self.definition.name,
            &self.model,
            self.item.clone(),
            writer.state(),
        )?;
        let input = writer.state().is_none().then(|| {
            let writes: Map<String, Json> =
                [("messages".to_owned(), json!(self.messages))].into_iter().collect();
            writes.into()
        });
        let stopping = self.cancel.child_token();
        let terms = RunTerms {
            metadata: [("execution_id".to_owned(), json!(self.row.execution_id))].into_iter().collect(),
            cancel: stopping.clone(),
            // Its turns are limited, not its supersteps.
            ..RunTerms::new(&self.row.run_id, u64::MAX)
        };
        let (ended, is_late) = {
            let mut session = Session::new(terms, writer, &mut observer);
            let mut running = std::pin::pin!(agent.run(&mut session, input));
            tokio::select! {
                biased;
                ended = &mut running => (ended, false),
                () = tokio::time::sleep_until(self.deadline()) => {
                    stopping.cancel();
                    (running.await, true)
                }
            }
        };
        observer.flush().await;
        Ok(match ended {
            Ok(Ended::Cancelled) if is_late => End::TimedOut,
            ended => End::Agent(ended),
        })
    }
}

/// The tokens that a subagent with this state has used.
pub(crate) fn used(state: Option<&StateSnapshot>) -> threadkeep::Result<Tokens> {
    Ok(tokens(&Progress::of(state)?))
}

/// The tokens that a subagent has used.
fn tokens(progress: &Progress) -> Tokens {
    signed(progress.tokens().unwrap_or_default())
}

/// The conversation in a subagent's state; empty before its first checkpoint.
pub(crate) fn messages(state: Option<&StateSnapshot>) -> threadkeep::Result<Vec<Json>> {
    match state.map(|state| state.json("messages")).transpose()?.flatten() {
        Some(Json::Array(messages)) => Ok(messages),
        _ => Ok(Vec::new()),
    }
}

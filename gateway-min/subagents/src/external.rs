//! Calls of external agents: the tool of another crate, with a row in the executions for each call.
//!
//! Such a call uses no slot and has neither events nor an entry in the ledger. It cannot be continued: after a crash, the
//! next run that reaches it makes a new attempt.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, TimeDelta};
use serde_json::{Map, Value as Json, json};
use threadkeep_agent::receipts::sha256;
use threadkeep_agent::tools::{Tool, ToolContext, ToolError, ToolOutput, ToolSpec, ToolStatus};
use threadkeep_config::{AcpAgent, Config};
use threadkeep_records::{
    Delegating, ExecutionEnd, ExecutionKind, ExecutionRow, ExecutionStatus, NewExecution, RecordsError,
    persistently,
};

use crate::bounds;
use crate::delegator::Delegator;

/// Makes the tool that calls the external agents of a configuration; `None` if it has none.
pub type ExternalAgents = Arc<dyn Fn(&Config) -> Option<Arc<dyn Tool>> + Send + Sync>;

/// The key of a result's `artifact` that says how a call ended: [`TIMED_OUT`], or left out.
pub const ENDING: &str = "ending";
/// The call took longer than it may.
pub const TIMED_OUT: &str = "timed_out";

/// The longest error in a row, in characters.
const ERROR_MAX: usize = 2_000;

/// The tool of one run or of one subagent.
pub(crate) struct External {
    delegator: Arc<Delegator>,
    config: Arc<Config>,
    tool: Arc<dyn Tool>,
    /// The execution of the subagent; `None` for the lead agent.
    parent: Option<String>,
    delegating: Delegating,
}

impl External {
    /// The tool, if external agents are configured, for the subagent of this execution; `None` for the lead agent.
    pub(crate) fn tool(
        delegator: &Arc<Delegator>,
        config: &Arc<Config>,
        parent: Option<&ExecutionRow>,
    ) -> Option<Arc<dyn Tool>> {
        let tool = (delegator.external)(config)?;
        let (delegator, config) = (Arc::clone(delegator), Arc::clone(config));
        // A batch outlives the run that submitted it.
        let of_item = parent.is_some_and(|row| row.kind == ExecutionKind::BatchItem);
        let delegating = if of_item { Delegating::Item } else { delegator.delegating };
        let parent = parent.map(|row| row.execution_id.clone());
        Some(Arc::new(Self { delegator, config, tool, parent, delegating }))
    }

    /// The row of a call, as a new attempt if one before it has ended.
    ///
    /// # Errors
    /// [`RecordsError::RunEnded`], also if another run has taken the call over meanwhile, or its thread was deleted.
    async fn open(
        &self,
        context: &ToolContext,
        name: &str,
        prompt: &str,
    ) -> Result<ExecutionRow, RecordsError> {
        let agent = &self.config.acp_agents[name];
        let executions = self.delegator.records.executions();
        let timeout =
            TimeDelta::from_std(Duration::from_secs(agent.timeout_seconds)).unwrap_or(TimeDelta::MAX);
        let now = self.delegator.records.now();
        let definition = definition(agent);
        let new = NewExecution {
            execution_id: execution_id(context),
            thread_id: context.thread_id.clone(),
            run_id: context.run_id.clone(),
            delegating: self.delegating,
            parent_execution: self.parent.clone(),
            kind: ExecutionKind::Acp,
            tool_call_id: context.tool_call_id.clone(),
            agent_name: name.to_owned(),
            definition_digest: sha256(&Json::Object(definition.clone()).to_string()),
            definition,
            description: bounds::first(prompt, 200).to_owned(),
            deadline: now.checked_add_signed(timeout).unwrap_or(DateTime::<chrono::Utc>::MAX_UTC),
        };
        let mut row = executions.open(new.clone()).await?.row;
        if row.status.is_terminal() {
            // It ended, and its result was lost with its run.
            executions.delivered(&row.thread_id, &row.execution_id).await?;
            row = executions.open(new).await?.row;
        }
        // What an agent that is not told its model works with, only the agent knows.
        if !executions.started(&row, agent.model.as_deref().unwrap_or("unknown"), 0).await? {
            // The run that has the call now makes it. The agent must not work twice.
            return Err(RecordsError::RunEnded { run_id: row.run_id });
        }
        Ok(row)
    }
}

/// The id of a call's execution: from its place, so that whatever repeats it there makes a new attempt.
fn execution_id(context: &ToolContext) -> String {
    let checkpoint = context.state.as_ref().map(|state| state.key.id.to_string()).unwrap_or_default();
    sha256(&format!("{}\n{checkpoint}\n{}", context.thread_id, context.index))[..32].to_owned()
}

/// What the row keeps of an agent: not its environment, which has keys.
fn definition(agent: &AcpAgent) -> Map<String, Json> {
    let AcpAgent { command, args, env: _, description, model, auto_approve_permissions, timeout_seconds } =
        agent;
    let definition = json!({
        "command": command, "args": args, "description": description, "model": model,
        "auto_approve_permissions": auto_approve_permissions, "timeout_seconds": timeout_seconds,
    });
    definition.as_object().cloned().unwrap_or_default()
}

/// How a call with this result has ended.
fn ended(output: &Result<ToolOutput, ToolError>, cancelled: bool) -> ExecutionEnd {
    let (status, error) = match output {
        Ok(output) if output.status == ToolStatus::Success => (ExecutionStatus::Completed, None),
        Ok(output) if output.artifact[ENDING] == TIMED_OUT => {
            (ExecutionStatus::TimedOut, Some(output.content.clone()))
        }
        _ if cancelled => (ExecutionStatus::Cancelled, Some(crate::execution::CANCELLED.to_owned())),
        Ok(output) => (ExecutionStatus::Failed, Some(output.content.clone())),
        Err(error) => (ExecutionStatus::Failed, Some(error.to_string())),
    };
    let error = error.map(|error| bounds::first(&error, ERROR_MAX).to_owned());
    ExecutionEnd { status, error, stop_reason: None, usage: std::collections::BTreeMap::new() }
}

#[async_trait]
impl Tool for External {
    fn spec(&self) -> ToolSpec {
        self.tool.spec()
    }

    fn output_max_chars(&self) -> usize {
        self.tool.output_max_chars()
    }

    fn stops_within(&self) -> Option<Duration> {
        self.tool.stops_within()
    }

    async fn stored(&self, context: &ToolContext) {
        let id = execution_id(context);
        if let Err(error) = self.delegator.records.executions().delivered(&context.thread_id, &id).await {
            tracing::warn!(execution_id = id, %error, "the delivery of an external agent's result was not recorded");
        }
    }

    async fn call(&self, context: &ToolContext, args: Json) -> Result<ToolOutput, ToolError> {
        let text = |key: &str| args[key].as_str().unwrap_or_default().to_owned();
        let (name, prompt) = (text("agent"), text("prompt"));
        if !self.config.acp_agents.contains_key(&name) {
            return self.tool.call(context, args).await;
        }
        let unrecorded = |error: RecordsError| match error {
            // Another run may go on with the call: a failed result would be stored for good.
            RecordsError::RunEnded { .. } => ToolError::Undelivered(error.to_string()),
            error => ToolError::Failed(format!(
                "the call of the external agent could not be recorded: {error}. Try again later"
            )),
        };
        let row = self.open(context, &name, &prompt).await.map_err(unrecorded)?;
        let output = self.tool.call(context, args).await;
        let end = ended(&output, context.cancel.is_cancelled());
        let executions = self.delegator.records.executions();
        if let Err(error) = persistently(|| executions.finish(&row, end.clone())).await {
            tracing::warn!(execution_id = row.execution_id, %error, "the end of an external agent's work was not recorded");
        }
        output
    }
}

//! The tool `invoke_acp_agent` (service reference, "Tool signatures").

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Value as Json, json};
use threadkeep_agent::tools::{Tool, ToolContext, ToolError, ToolOutput, ToolSpec, ToolStatus};
use threadkeep_config::{AcpAgent, Config};
use threadkeep_files::create_private_dir;
use threadkeep_processes::{ENDS_WITHIN, Guard};

use crate::invocation::{CANCEL_WITHIN, Invocation, InvocationError};
use crate::servers::{hidden, used};

/// The name of the tool.
pub const INVOKE_ACP_AGENT: &str = "invoke_acp_agent";

/// The directory of external agents in that of their thread.
const DIRECTORY: &str = "acp-workspace";
/// The longest answer in the conversation, in characters: as much as that of a subagent.
const RESULT_MAX: usize = 100_000;

/// The tool that hands a task to an external agent and returns its answer.
pub struct InvokeAcpAgent {
    guard: Guard,
    agents: BTreeMap<String, AcpAgent>,
    servers: Vec<Json>,
}

#[derive(Deserialize)]
struct Args {
    agent: String,
    prompt: String,
}

impl InvokeAcpAgent {
    /// The tool for these agents, by name; `None` if there are none. They may use these MCP servers, each as the protocol
    /// describes it.
    pub fn new(guard: Guard, agents: &BTreeMap<String, AcpAgent>, servers: Vec<Json>) -> Option<Self> {
        (!agents.is_empty()).then(|| Self { guard, agents: agents.clone(), servers })
    }

    fn unknown(&self, name: &str) -> ToolError {
        let names: Vec<&str> = self.agents.keys().map(String::as_str).collect();
        ToolError::Failed(format!("Unknown agent '{name}'. Available: {}", names.join(", ")))
    }
}

#[async_trait]
impl Tool for InvokeAcpAgent {
    fn spec(&self) -> ToolSpec {
        let agents: Vec<String> =
            self.agents.iter().map(|(name, agent)| format!("- {name}: {}", agent.description)).collect();
        ToolSpec {
            name: INVOKE_ACP_AGENT.to_owned(),
            description: format!(
                "Hands a task to an external agent and returns its answer. The agent sees nothing of this conversation. It \
                 works in the directory `{DIRECTORY}` of the working directory: what it writes is there afterwards, and what \
                 it is to read must be put there first.\n\nAgents:\n{}",
                agents.join("\n")
            ),
            parameters: json!({
                "type": "object",
                "properties": {
                    "agent": {"type": "string", "description": "The name of the agent."},
                    "prompt": {"type": "string", "description": "The whole task: the agent sees nothing else."},
                },
                "required": ["agent", "prompt"],
            }),
        }
    }

    fn output_max_chars(&self) -> usize {
        RESULT_MAX
    }

    fn stops_within(&self) -> Option<Duration> {
        Some(CANCEL_WITHIN + ENDS_WITHIN + Duration::from_secs(3))
    }

    async fn call(&self, context: &ToolContext, args: Json) -> Result<ToolOutput, ToolError> {
        let Args { agent: name, prompt } = serde_json::from_value(args)
            .map_err(|error| ToolError::Arguments(format!("invalid arguments: {error}")))?;
        let agent = self.agents.get(&name).ok_or_else(|| self.unknown(&name))?;
        let directory = match directory(context.root.clone()).await {
            Ok(directory) => directory,
            Err(error) => {
                return Ok(failed(&name, &format!("cannot use the directory `{DIRECTORY}`: {error}")));
            }
        };
        let hidden = hidden(agent, &self.servers);
        let invocation = Invocation {
            guard: &self.guard,
            agent,
            hidden: &hidden,
            prompt: &prompt,
            directory,
            servers: &self.servers,
            max_chars: RESULT_MAX,
            cancel: context.cancel.clone(),
        };
        Ok(match invocation.carry_out().await {
            Ok(text) => ToolOutput::text(text),
            Err(InvocationError::TimedOut) => ToolOutput {
                artifact: json!({"ending": "timed_out"}),
                ..error(format!(
                    "Error: ACP agent '{name}' timed out after {} seconds. The ACP invocation was not completed, and its \
                 process was ended. For longer tasks raise `acp_agents.{name}.timeout_seconds`.",
                    agent.timeout_seconds
                ))
            },
            Err(other) => failed(&name, &hidden.from(&other.to_string())),
        })
    }
}

/// Makes the tool for the external agents of a configuration, whose programs run under `guard`. They may use its MCP servers.
pub fn external_agents(guard: Guard) -> impl Fn(&Config) -> Option<Arc<dyn Tool>> + Send + Sync {
    move |config| {
        let tool = InvokeAcpAgent::new(guard.clone(), &config.acp_agents, used(config))?;
        Some(Arc::new(tool) as Arc<dyn Tool>)
    }
}

/// The directory of external agents, which is created if it does not exist.
async fn directory(root: PathBuf) -> io::Result<PathBuf> {
    let directory = tokio::task::spawn_blocking(move || {
        let directory = root.join(DIRECTORY);
        create_private_dir(&directory)?;
        let (root, directory) = (root.canonicalize()?, directory.canonicalize()?);
        let is_inside = directory.parent() == Some(Path::new(&root));
        if is_inside { Ok(directory) } else { Err(io::Error::other("it leads out of the working directory")) }
    });
    directory.await.map_err(io::Error::other)?
}

fn failed(name: &str, reason: &str) -> ToolOutput {
    error(format!("Error invoking ACP agent '{name}': {reason}"))
}

fn error(text: String) -> ToolOutput {
    ToolOutput { status: ToolStatus::Error, ..ToolOutput::text(text) }
}

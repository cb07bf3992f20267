//! Agents that are shell scripts.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, mknodat};
use serde_json::{Value as Json, json};
use threadkeep_acp::InvokeAcpAgent;
use threadkeep_agent::tools::{Tool as _, ToolContext, ToolError, ToolOutput};
use threadkeep_config::{AcpAgent, Secret};
use threadkeep_processes::Guard;

/// The beginning of a script: answers to the first two requests, and functions that say things.
///
/// `held` is a pipe that the script and whatever it starts hold open.
const PROLOGUE: &str = r#"
exec 9>"$ROOT/held"
answer() { printf '{"jsonrpc":"2.0","id":%s,"result":%s}\n' "$1" "$2"; }
say() { printf '{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s","update":{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"%s"}}}}\n' "$1"; }
ask() { printf '{"jsonrpc":"2.0","id":"%s","method":"%s","params":%s}\n' "$1" "$2" "$3"; }
hear() { IFS= read -r line || exit 0; printf '%s\n' "$line" >> "$ROOT/heard"; }
initialized() { hear; answer 0 '{"protocolVersion":1,"agentCapabilities":{}}'; }
opened() { initialized; hear; answer 1 '{"sessionId":"s"}'; }
prompted() { opened; hear; }
stop() { answer 2 "{\"stopReason\":\"${1:-end_turn}\"}"; }
"#;

/// A thread's directory, and a pipe that ends with the last process of an agent.
pub(crate) struct Scene {
    folder: tempfile::TempDir,
    held: File,
    pub(crate) context: ToolContext,
}

impl Scene {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("held");
        mknodat(CWD, &path, FileType::Fifo, 0o600.into(), 0).unwrap();
        // A reader that does not wait for writers.
        let held = File::options().read(true).custom_flags(0o4000).open(&path).unwrap();
        let context = ToolContext::new("t", "r", folder.path().join("thread"));
        Self { folder, held, context }
    }

    /// The agent `a`, which is this script.
    pub(crate) fn agent(&self, script: &str) -> AcpAgent {
        AcpAgent {
            command: "sh".into(),
            args: vec!["-c".into(), format!("{PROLOGUE}{script}")],
            env: [("ROOT".into(), Secret::new(self.folder.path().display().to_string()))].into(),
            description: "Does what its script says".into(),
            model: None,
            auto_approve_permissions: false,
            timeout_seconds: 60,
        }
    }

    pub(crate) async fn call(&self, agent: AcpAgent) -> ToolOutput {
        self.invoke(agent, vec![], json!({"agent": "a", "prompt": "Do it"})).await.unwrap()
    }

    pub(crate) async fn run(&self, script: &str) -> ToolOutput {
        self.call(self.agent(script)).await
    }

    pub(crate) async fn invoke(
        &self,
        agent: AcpAgent,
        servers: Vec<Json>,
        args: Json,
    ) -> Result<ToolOutput, ToolError> {
        tool(&[("a", agent)].map(|(name, agent)| (name.to_owned(), agent)).into(), servers)
            .unwrap()
            .call(&self.context, args)
            .await
    }

    /// What the agent has heard, message by message.
    pub(crate) fn heard(&self) -> Vec<Json> {
        self.heard_text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The lines that the agent has heard.
    pub(crate) fn heard_text(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("heard")).unwrap()
    }

    /// Whether a file with this name is in the directory of the scene.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.folder.path().join(name).exists()
    }

    /// The pipe that the agent's processes hold.
    pub(crate) fn pipe(&self) -> &File {
        &self.held
    }

    /// Asserts that no process of an agent is left.
    pub(crate) fn assert_nobody_is_left(&mut self) {
        let patience = Instant::now() + Duration::from_mins(10);
        // Fails with `WouldBlock` while a writer lives: on a busy machine a call may not wait for long enough.
        while self.held.read_to_end(&mut Vec::new()).is_err() {
            assert!(Instant::now() < patience, "a process of the agent is left");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

pub(crate) fn tool(agents: &BTreeMap<String, AcpAgent>, servers: Vec<Json>) -> Option<InvokeAcpAgent> {
    let guard = Guard::program(env!("CARGO_BIN_EXE_threadkeep-acp-guard"));
    InvokeAcpAgent::new(guard, agents, servers)
}

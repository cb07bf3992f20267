//! Servers that are shell scripts.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{CWD, FileType, mknodat};
use serde_json::Value as Json;
use threadkeep_agent::tools::{Tool, ToolContext, ToolError, ToolOutput};
use threadkeep_config::{McpServer, Secret};
use threadkeep_mcp::McpServers;
use threadkeep_processes::Guard;

/// Reads requests one by one: `$method`, `$id`, `$line`.
const PROLOGUE: &str = r#"
exec 9>"$ROOT/held"
echo started >> "$ROOT/starts"
answer() { printf '{"jsonrpc":"2.0","id":%s,"result":%s}\n' "$id" "$1"; }
text() { answer "{\"content\":[{\"type\":\"text\",\"text\":\"$1\"}]}"; }
hear() {
    IFS= read -r line || exit 0
    method=${line#*\"method\":\"}; method=${method%%\"*}
    id=${line#*\"id\":}; id=${id%%[,\}]*}
}
initialize() { hear; first=$line; answer '{"protocolVersion":"2025-06-18","capabilities":{"tools":{"listChanged":true}},"serverInfo":{"name":"ours","version":"1"}}'; hear; }
list() { hear; answer '{"tools":[{"name":"say","description":"Says it","inputSchema":{"type":"object","properties":{"what":{"type":"string"}},"required":["what"]}},{"name":"other","inputSchema":{"type":"object"}}]}'; }
ready() { initialize; list; }
"#;

pub(crate) struct Scene {
    folder: tempfile::TempDir,
    held: File,
    pub(crate) servers: McpServers,
    pub(crate) configured: BTreeMap<String, McpServer>,
}

impl Scene {
    /// A process whose one server, `s`, is this script.
    pub(crate) fn new(script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("held");
        mknodat(CWD, &path, FileType::Fifo, 0o600.into(), 0).unwrap();
        let held = File::options().read(true).custom_flags(0o4000).open(&path).unwrap();
        let server = McpServer {
            command: Some("sh".into()),
            args: vec!["-c".into(), format!("{PROLOGUE}{script}")],
            env: [("ROOT".into(), Secret::new(folder.path().display().to_string()))].into(),
            ..server()
        };
        let configured = [("s".to_owned(), server)].into();
        let guard = Guard::program(env!("CARGO_BIN_EXE_threadkeep-mcp-guard"));
        Self { folder, held, servers: McpServers::new(guard), configured }
    }

    pub(crate) async fn tools(&self) -> Vec<Arc<dyn Tool>> {
        self.servers.tools(&self.configured).await
    }

    /// The tools of a server that can be started. On a busy machine that may take longer than a run waits for it.
    pub(crate) async fn connected(&self) -> Vec<Arc<dyn Tool>> {
        let connected = async {
            loop {
                let tools = self.tools().await;
                if !tools.is_empty() {
                    return tools;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_mins(10), connected).await.expect("it is never connected")
    }

    /// How often the server was started.
    pub(crate) fn starts(&self) -> usize {
        let starts = std::fs::read_to_string(self.folder.path().join("starts")).unwrap_or_default();
        starts.lines().count()
    }

    /// What the server has written to this file.
    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path().join(name)).unwrap()
    }

    /// Waits until a file with this name is in the directory of the scene.
    pub(crate) async fn until(&self, name: &str) {
        while !self.folder.path().join(name).exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until the server was started. On a busy machine that may take longer than a run waits for it.
    pub(crate) async fn until_started(&self) {
        let started = async {
            while self.starts() == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_mins(10), started).await.expect("it is never started");
    }

    /// Waits until no process of the server is left.
    pub(crate) async fn until_nobody_is_left(&self) {
        // An error while somebody holds it, zero bytes afterwards.
        let left = async {
            while (&self.held).read(&mut [0]).is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_mins(10), left).await.expect("a process is left");
    }
}

/// A server that is nowhere yet.
pub(crate) fn server() -> McpServer {
    McpServer {
        command: None,
        args: vec![],
        env: BTreeMap::new(),
        url: None,
        headers: BTreeMap::new(),
        enabled: true,
        timeout_seconds: 60,
        group: None,
        routing: BTreeMap::new(),
    }
}

pub(crate) fn names(tools: &[Arc<dyn Tool>]) -> Vec<String> {
    tools.iter().map(|tool| tool.spec().name).collect()
}

pub(crate) async fn call(tool: &Arc<dyn Tool>, args: Json) -> Result<ToolOutput, ToolError> {
    tool.call(&ToolContext::new("t", "r", "/nonexistent"), args).await
}

//! MCP servers of a real gateway: a run calls their tools, and one that hangs keeps neither the start nor a run waiting.

use serde_json::{Value as Json, json};
use tempfile::TempDir;

use super::{Gateway, configured, texts};

/// A server with one tool, which answers with the arguments' length.
const SERVER: &str = r#"
hear() { IFS= read -r line || exit 0; id=${line#*\"id\":}; id=${id%%[,\}]*}; }
answer() { printf '{"jsonrpc":"2.0","id":%s,"result":%s}\n' "$id" "$1"; }
hear; answer '{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},"serverInfo":{"name":"ours","version":"1"}}'
hear
hear; answer '{"tools":[{"name":"look","description":"Looks","inputSchema":{"type":"object"}}]}'
while hear; do answer '{"content":[{"type":"text","text":"seen"}]}'; done
"#;

fn with_servers() -> TempDir {
    let dir = configured("full");
    let mut config: Json =
        serde_json::from_str(&std::fs::read_to_string(dir.path().join("config.yaml")).unwrap()).unwrap();
    config["mcp_servers"] = json!({
        "ours": {"command": "sh", "args": ["-c", SERVER]},
        "hangs": {"command": "sh", "args": ["-c", "cat > /dev/null"]},
        "missing": {"command": "no-such-server"},
    });
    std::fs::write(dir.path().join("config.yaml"), config.to_string()).unwrap();
    let script = json!({"record": dir.path().join("requests.jsonl"), "rules": [{"answers": [
        {"text": "", "tool_calls": [{"name": "mcp_ours_look", "args": {}}]},
        {"text": "{{tool_result}}"},
    ]}]});
    std::fs::write(dir.path().join("script.json"), script.to_string()).unwrap();
    dir
}

#[tokio::test]
async fn a_run_calls_a_tool_of_an_mcp_server_while_another_server_hangs() {
    let dir = with_servers();
    let gateway = Gateway::start(dir.path());
    gateway.post("/api/threads", json!({"thread_id": "t"})).await;
    let values = gateway.ask("Look").await;
    assert_eq!(texts(&values).last(), Some(&"seen"));
    let requests = std::fs::read_to_string(dir.path().join("requests.jsonl")).unwrap();
    assert!(requests.contains("mcp_ours_look") && !requests.contains("mcp_hangs"), "{requests}");
}

//! MCP servers of a real gateway: a run calls their tools, and one that hangs keeps neither the start nor a run waiting.

use std::time::Duration;

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

/// Asks until the tool was called. On a busy machine the server may be connected later than a run waits for it: then
/// the run has no such tool.
async fn seen(gateway: &Gateway, text: &str) {
    let seen = async {
        loop {
            let values = gateway.ask(text).await;
            let said = *texts(&values).last().unwrap();
            if said == "seen" {
                return;
            }
            assert!(said.contains("there is no tool `mcp_ours_look`"), "{said}");
        }
    };
    tokio::time::timeout(Duration::from_mins(10), seen).await.expect("the tool is never there");
}

/// The question has a keyword of the tool: it is loaded without a search, which the feed says.
#[tokio::test]
async fn a_deferred_tool_is_loaded_by_a_word_of_the_question() {
    let dir = with_servers();
    let file = dir.path().join("config.yaml");
    let mut config: Json = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    config["tool_search"] = json!({"enabled": true});
    config["mcp_servers"] = json!({"ours": {
        "command": "sh", "args": ["-c", SERVER], "routing": {"look": {"mode": "prefer", "keywords": ["view"]}},
    }});
    std::fs::write(&file, config.to_string()).unwrap();
    let gateway = Gateway::start(dir.path());
    gateway.post("/api/threads", json!({"thread_id": "t"})).await;
    let refused = gateway.ask("Look").await;
    let refused = texts(&refused).last().unwrap().to_string();
    assert!(refused.contains("there is no tool `mcp_ours_look`"), "{refused}");
    seen(&gateway, "A view, please").await;
    let runs = gateway.get("/api/threads/t/runs").await;
    let mut events = Vec::new();
    for run in runs.as_array().unwrap() {
        let run = run["run_id"].as_str().unwrap();
        let of_run = gateway
            .get(&format!("/api/threads/t/runs/{run}/events?event_types=middleware:tool_search"))
            .await;
        events.extend(of_run.as_array().unwrap().clone());
    }
    let names = json!(["mcp_ours_look"]);
    let of_lead = json!({"tool_names": names, "is_subagent": false, "agent_id": null});
    assert_eq!(events.iter().map(|event| &event["content"]["changes"]).collect::<Vec<_>>(), [&of_lead]);
    // The task of a subagent loads tools by its words, too.
    let task = json!({"name": "task", "args": {"prompt": "A view", "subagent_type": "general-purpose"}});
    let script = json!({"rules": [
        {"when": {"caller": "subagent"}, "answers": [{"text": "Seen."}]},
        {"answers": [{"text": "", "tool_calls": [task]}, {"text": "Done."}]},
    ]});
    std::fs::write(dir.path().join("script.json"), script.to_string()).unwrap();
    drop(gateway);
    let gateway = Gateway::start(dir.path());
    let input = json!({"messages": [{"role": "user", "content": "Delegate"}]});
    let body = json!({"input": input, "context": {"subagent_enabled": true}});
    let loaded = async {
        loop {
            let (status, values) = gateway.post("/api/threads/t/runs/wait", body.clone()).await;
            assert_eq!(status, 200, "{values}");
            let run = gateway.get("/api/threads/t/runs").await[0]["run_id"].as_str().unwrap().to_owned();
            let path = format!("/api/threads/t/runs/{run}/events?event_types=middleware:tool_search");
            let events = gateway.get(&path).await;
            // As above, the server may be late.
            if events != json!([]) {
                return events;
            }
        }
    };
    let events = tokio::time::timeout(Duration::from_mins(10), loaded).await.expect("it is never loaded");
    let changes = json!({"tool_names": names, "is_subagent": true, "agent_id": "general-purpose"});
    assert_eq!(events.as_array().unwrap().len(), 1, "{events}");
    assert_eq!(events[0]["content"]["changes"], changes);
}

#[tokio::test]
async fn a_run_calls_a_tool_of_an_mcp_server_while_another_server_hangs() {
    let dir = with_servers();
    let gateway = Gateway::start(dir.path());
    gateway.post("/api/threads", json!({"thread_id": "t"})).await;
    seen(&gateway, "Look").await;
    let requests = std::fs::read_to_string(dir.path().join("requests.jsonl")).unwrap();
    assert!(requests.contains("mcp_ours_look") && !requests.contains("mcp_hangs"), "{requests}");
}

//! External agents of a real gateway: what they see, how they are recorded, and that they end with the gateway, however
//! that ends.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{CWD, FileType, mknodat};
use serde_json::{Value as Json, json};
use tempfile::TempDir;
use threadkeep_testing::unconfigured;

use super::{Gateway, command, configured, texts};

/// An agent that answers with its environment, or hangs together with a daemon; all of it holds a pipe open.
const AGENT: &str = r#"
exec 9>"$ROOT/held"
read -r l; printf '{"jsonrpc":"2.0","id":0,"result":{"protocolVersion":1}}\n'
read -r l; printf '{"jsonrpc":"2.0","id":1,"result":{"sessionId":"s"}}\n'
read -r l
case "$l" in *hang*)
    (setsid sh -c "trap '' TERM; sleep 1000" &)
    trap '' TERM
    touch "$ROOT/reached"
    while :; do sleep 1000; done
esac
seen=$(env | cut -d= -f1 | sort | tr '\n' ' ')
printf '{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s","update":{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"%s"}}}}\n' "$seen"
printf '{"jsonrpc":"2.0","id":2,"result":{"stopReason":"end_turn"}}\n'
"#;

fn with_an_agent() -> TempDir {
    let dir = configured("full");
    let mut config: Json =
        serde_json::from_str(&std::fs::read_to_string(dir.path().join("config.yaml")).unwrap()).unwrap();
    config["acp_agents"] = json!({"coder": {
        "command": "sh", "args": ["-c", AGENT], "env": {"ROOT": dir.path()}, "description": "Codes",
    }});
    std::fs::write(dir.path().join("config.yaml"), config.to_string()).unwrap();
    let call =
        |prompt: &str| json!({"name": "invoke_acp_agent", "args": {"agent": "coder", "prompt": prompt}});
    let script = json!({"rules": [
        {"when": {"contains": ["hang"]}, "answers": [{"text": "", "tool_calls": [call("hang")]}]},
        {"answers": [{"text": "", "tool_calls": [call("look")]}, {"text": "{{tool_result}}"}]},
    ]});
    std::fs::write(dir.path().join("script.json"), script.to_string()).unwrap();
    dir
}

/// Makes the pipe `held` in `dir`. It ends when no process has it open for writing.
pub(super) fn held(dir: &Path) -> File {
    let pipe = dir.join("held");
    mknodat(CWD, &pipe, FileType::Fifo, 0o600.into(), 0).unwrap();
    File::options().read(true).custom_flags(0o4000).open(pipe).unwrap()
}

async fn ask(gateway: &Gateway, text: &str) -> Json {
    let input = json!({"messages": [{"role": "user", "content": text}]});
    let body = json!({"input": input, "context": {"subagent_enabled": true}});
    let (status, run) = gateway.post("/api/threads/t/runs", body).await;
    assert_eq!(status, 200, "{run}");
    run["run_id"].as_str().unwrap().into()
}

#[tokio::test]
async fn an_external_agent_sees_no_key_of_the_gateway_and_its_call_is_recorded() {
    let dir = with_an_agent();
    let held = held(dir.path());
    let gateway = Gateway::start_by(command(dir.path()).env("OPENAI_API_KEY", "sk-1"));
    gateway.post("/api/threads", json!({"thread_id": "t"})).await;
    let run = ask(&gateway, "Go").await;
    gateway.until(run.as_str().unwrap(), "success").await;
    let state = gateway.get("/api/threads/t/state").await;
    let said = texts(&state["values"]).last().unwrap().to_string();
    assert!(said.contains("HOME") && said.contains("PATH") && said.contains("ROOT"), "{said}");
    assert!(!said.contains("OPENAI_API_KEY") && !said.contains("SVC_HOME"), "{said}");
    let executions = gateway.get("/api/threads/t/executions").await;
    let execution = &executions["executions"][0];
    assert_eq!(
        (&execution["kind"], &execution["agent_name"], &execution["status"], &execution["delivered"]),
        (&json!("acp"), &json!("coder"), &json!("completed"), &json!(true))
    );
    for (what, expected) in [("tree", "coder"), ("verify", "1 execution: what is recorded is what happened.")]
    {
        let mut delegations = unconfigured(env!("CARGO_BIN_EXE_threadkeep"));
        let delegations = delegations.current_dir(dir.path()).args(["delegations", what, "t"]);
        let output = delegations.env("SVC_HOME", dir.path().join("state")).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && text.contains(expected), "{text}");
    }
    drop(held);
}

/// Waits until nobody holds the pipe.
pub(super) async fn until_nobody_is_left(mut held: &File) {
    // An error while somebody holds it, zero bytes afterwards.
    let left = async {
        while held.read(&mut [0]).is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), left).await.expect("a process is left");
}

pub(super) async fn reached(dir: &Path) {
    while !dir.join("reached").exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Check 12 of the design: no process is left, a daemon's neither.
#[tokio::test]
async fn an_external_agent_ends_with_the_gateway_however_that_ends() {
    for signal in ["-9", "-TERM"] {
        let dir = with_an_agent();
        let held = held(dir.path());
        let mut gateway = Gateway::start(dir.path());
        gateway.post("/api/threads", json!({"thread_id": "t"})).await;
        ask(&gateway, "hang").await;
        reached(dir.path()).await;
        gateway.signal(signal);
        gateway.child.wait().unwrap();
        until_nobody_is_left(&held).await;
    }
}

/// A run that is cancelled does not wait for its agent longer than a few seconds, and leaves nothing of it.
#[tokio::test]
async fn an_external_agent_ends_with_its_run() {
    let dir = with_an_agent();
    let held = held(dir.path());
    let gateway = Gateway::start(dir.path());
    gateway.post("/api/threads", json!({"thread_id": "t"})).await;
    let run = ask(&gateway, "hang").await;
    reached(dir.path()).await;
    let url = format!("{}/api/threads/t/runs/{}/cancel?wait=true", gateway.base, run.as_str().unwrap());
    let cancelled = gateway.client.post(url).send().await.unwrap();
    assert!(cancelled.status().is_success(), "{cancelled:?}");
    until_nobody_is_left(&held).await;
    let executions = gateway.get("/api/threads/t/executions").await;
    assert_eq!(executions["executions"][0]["status"], "cancelled");
}

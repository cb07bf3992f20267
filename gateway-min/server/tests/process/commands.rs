//! What a command of an agent sees of the gateway that runs it.

use std::process::Stdio;

use serde_json::{Value as Json, json};
use tempfile::TempDir;
#[cfg(target_os = "linux")]
use threadkeep_testing::unconfigured;

use super::{Gateway, command};

const SECRET: &str = "the-key-of-the-provider";

/// Looks for the secret of the parent process wherever Linux shows it.
const LOOK: &str = r"exec 2>&1
for file in environ mem maps; do echo $file:; tr '\0' '\n' < /proc/$PPID/$file | head -c 4000; done
echo own:; env";

/// A directory whose model runs [`LOOK`] and then answers.
fn looking() -> TempDir {
    let dir = TempDir::new().unwrap();
    let script = json!({"rules": [{"answers": [
        {"tool_calls": [{"name": "bash", "args": {"command": LOOK}}]},
        {"text": "looked"},
    ]}]});
    std::fs::write(dir.path().join("script.json"), script.to_string()).unwrap();
    let config = json!({
        "config_version": 49,
        "database": {"backend": "memory"},
        "sandbox": {"use": "local", "allow_host_bash": true},
        "models": [{"name": "m", "use": "scripted", "model": "m", "script": "script.json"}],
    });
    std::fs::write(dir.path().join("config.yaml"), config.to_string()).unwrap();
    dir
}

/// What the command printed, among the messages of a thread.
fn printed(messages: &Json) -> &str {
    let tool = messages.as_array().unwrap().iter().find(|message| message["type"] == "tool");
    tool.expect("the command ran")["content"].as_str().unwrap()
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_command_reads_neither_the_environment_nor_the_memory_of_the_gateway() {
    // The gateway's own parent may read it until then: the test would see a secret that is there.
    assert!(std::fs::read("/proc/self/environ").is_ok());
    let dir = looking();
    let gateway = Gateway::start_by(command(dir.path()).env("PROVIDER_KEY", SECRET));
    gateway.post("/api/threads", json!({"thread_id": "t"})).await;
    let values = gateway.ask("look").await;
    let printed = printed(&values["messages"]);
    assert!(printed.contains("own:\n") && printed.contains("PATH="), "{printed}");
    assert!(!printed.contains(SECRET), "{printed}");
    assert_eq!(printed.matches("Permission denied").count(), 3, "{printed}");
}

#[cfg(target_os = "linux")]
#[test]
fn nor_those_of_the_chat() {
    let dir = looking();
    let chat = unconfigured(env!("CARGO_BIN_EXE_threadkeep"))
        .current_dir(dir.path())
        .args(["chat", "--config", "config.yaml", "--json", "look"])
        .env("SVC_HOME", dir.path().join("state"))
        .env("PROVIDER_KEY", SECRET)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let events = String::from_utf8(chat.stdout).unwrap();
    let mut values = events.lines().map(|line| serde_json::from_str::<Json>(line).unwrap());
    let last = values.rfind(|event| event["type"] == "values").unwrap();
    let printed = printed(&last["data"]["messages"]);
    assert!(printed.contains("own:\n") && !printed.contains(SECRET), "{printed}");
    assert_eq!(printed.matches("Permission denied").count(), 3, "{printed}");
}

//! What a command of an agent sees of the gateway that runs it, and that it ends with the gateway.

use std::path::Path;
use std::process::Stdio;
#[cfg(target_os = "linux")]
use std::time::Duration;

use serde_json::{Value as Json, json};
use tempfile::TempDir;
#[cfg(target_os = "linux")]
use threadkeep_testing::unconfigured;

#[cfg(target_os = "linux")]
use super::external::{held, reached, until_nobody_is_left};
use super::{Gateway, command};

const SECRET: &str = "the-key-of-the-provider";

/// Looks for the secret of the parent process wherever Linux shows it.
const LOOK: &str = r"exec 2>&1
for file in environ mem maps; do echo $file:; tr '\0' '\n' < /proc/$PPID/$file | head -c 4000; done
echo own:; env";

/// A directory whose model runs [`LOOK`] and then answers.
fn looking() -> TempDir {
    let dir = TempDir::new().unwrap();
    configure(dir.path(), LOOK, &[]);
    dir
}

/// Has the model run `bash` and then answer, and these commands of the shell run at the start of each task.
fn configure(dir: &Path, bash: &str, hooks: &[&str]) {
    let script = json!({"rules": [{"answers": [
        {"tool_calls": [{"name": "bash", "args": {"command": bash}}]},
        {"text": "looked"},
    ]}]});
    std::fs::write(dir.join("script.json"), script.to_string()).unwrap();
    let hooks = hooks.iter().map(|hook| json!({"command": ["sh", "-c", hook], "events": ["start"]}));
    let config = json!({
        "config_version": 49,
        "database": {"backend": "memory"},
        "sandbox": {"use": "local", "allow_host_bash": true},
        "subagent_runtime": {"hooks": hooks.collect::<Vec<Json>>()},
        "models": [{"name": "m", "use": "scripted", "model": "m", "script": "script.json"}],
    });
    std::fs::write(dir.join("config.yaml"), config.to_string()).unwrap();
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

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_command_ends_with_the_gateway_however_that_ends() {
    for signal in ["-9", "-TERM"] {
        for is_hook in [false, true] {
            let dir = TempDir::new().unwrap();
            let place = dir.path().display();
            // Ignores what can be ignored, and sends it to its group. It runs no program before it says that it is
            // there: a hook has three seconds.
            let hang = format!(
                "exec 9>{place}/held; trap '' TERM HUP INT; kill -TERM 0; (sleep 1000; sleep 1000) & \
                 : > {place}/reached; while :; do sleep 1000; done"
            );
            if is_hook {
                configure(dir.path(), "true", &[hang.as_str()]);
            } else {
                configure(dir.path(), &hang, &[]);
            }
            let held = held(dir.path());
            let mut gateway = Gateway::start(dir.path());
            gateway.post("/api/threads", json!({"thread_id": "t"})).await;
            // A hook that a busy machine did not start in time is left out.
            while !dir.path().join("reached").exists() {
                let body = json!({"input": {"messages": [{"role": "user", "content": "hang"}]}});
                let (status, run) = gateway.post("/api/threads/t/runs", body).await;
                assert_eq!(status, 200, "{run}");
                let run = run["run_id"].as_str().unwrap().to_owned();
                tokio::select! {
                    () = reached(dir.path()) => {}
                    _ = gateway.until(&run, "success") => {}
                }
            }
            gateway.signal(signal);
            gateway.child.wait().unwrap();
            until_nobody_is_left(&held).await;
        }
    }
}

/// How many guards of process groups are children of this process.
#[cfg(target_os = "linux")]
fn guards(of: u32) -> usize {
    let is_one = |process: &Path| {
        let read = |name: &str| std::fs::read_to_string(process.join(name)).unwrap_or_default();
        read("cmdline").contains("\0guard-a-group\0") && read("status").contains(&format!("\nPPid:\t{of}\n"))
    };
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes.filter(|process| is_one(&process.path())).count()
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_guard_of_a_command_ends_with_it() {
    let dir = TempDir::new().unwrap();
    let go = format!("{}/go", dir.path().display());
    configure(dir.path(), &format!("while ! test -e {go}; do sleep 0.01; done; kill -9 $$"), &[]);
    let gateway = Gateway::start(dir.path());
    gateway.post("/api/threads", json!({"thread_id": "t"})).await;
    let until = async |count: usize| {
        let there = async {
            while guards(gateway.child.id()) != count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_mins(10), there).await.expect("another number of guards");
    };
    let asked = async {
        until(1).await;
        std::fs::write(&go, "").unwrap();
    };
    let (values, ()) = tokio::join!(gateway.ask("go"), asked);
    assert_eq!(printed(&values["messages"]), "[killed by signal 9]");
    until(0).await;
}

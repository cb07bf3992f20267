//! The binary as an operator meets it: killed in the middle of a run, restarted, stopped by a signal, pointed at a bad
//! configuration.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

#[path = "process/killed.rs"]
mod killed;

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use reqwest::Client;
use serde_json::{Value as Json, json};
use tempfile::TempDir;

/// Waits at a gate that nobody opens on `hang`, answers in many pieces on `slow`.
fn script() -> Json {
    json!({"chunk_chars": 1, "rules": [
        {"when": {"contains": ["hang"]}, "answers": [{"text": "never", "gate": {"name": "shut"}}]},
        {"when": {"contains": ["slow"]}, "answers": [{"text": "one two three four", "delay_ms": 1}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

fn configured(mode: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("script.json"), script().to_string()).unwrap();
    let config = json!({
        "config_version": 49,
        "database": {"backend": "sqlite", "checkpoint_channel_mode": mode},
        "run_events": {"backend": "db"},
        "models": [{"name": "m", "use": "scripted", "model": "m", "script": "script.json"}],
    });
    std::fs::write(dir.path().join("config.yaml"), config.to_string()).unwrap();
    dir
}

fn command(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_threadkeep"));
    command.current_dir(dir).args(["serve", "--port", "0"]).env("SVC_HOME", dir.join("state"));
    for name in ["SVC_CONFIG_PATH", "SVC_PROJECT_ROOT", "RUST_LOG", "GATEWAY_HOST", "GATEWAY_PORT"] {
        command.env_remove(name);
    }
    command
}

/// A gateway in a process of its own; killed when dropped.
struct Gateway {
    child: Child,
    base: String,
    client: Client,
}

impl Gateway {
    fn start(dir: &Path) -> Self {
        let mut child = command(dir).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let base = loop {
            let line = lines.next().expect("the gateway ended before it served").unwrap();
            if let Some(at) = line.find("serving on ") {
                let rest = &line[at + "serving on ".len()..];
                break rest.split([',', ' ']).next().unwrap().to_owned();
            }
        };
        // What it says later must not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        rustls::crypto::ring::default_provider().install_default().ok();
        Self { child, base, client: Client::builder().no_proxy().build().unwrap() }
    }

    async fn post(&self, path: &str, body: Json) -> (u16, Json) {
        let answer = self.client.post(format!("{}{path}", self.base)).json(&body).send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap())
    }

    async fn get(&self, path: &str) -> Json {
        self.client.get(format!("{}{path}", self.base)).send().await.unwrap().json().await.unwrap()
    }

    async fn ask(&self, text: &str) -> Json {
        let input = json!({"messages": [{"role": "user", "content": text}]});
        let (status, values) = self.post("/api/threads/t/runs/wait", json!({ "input": input })).await;
        assert_eq!(status, 200, "{values}");
        values
    }

    fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn texts(values: &Json) -> Vec<&str> {
    values["messages"].as_array().unwrap().iter().map(|m| m["content"].as_str().unwrap()).collect()
}

/// Three turns, `kill -9` in the middle of the fourth, restart: the run is in error with the recovery text, and the
/// thread goes on.
#[tokio::test]
async fn a_gateway_killed_in_a_run_recovers_it_and_the_thread_goes_on() {
    for mode in ["full", "delta"] {
        let dir = configured(mode);
        let gateway = Gateway::start(dir.path());
        gateway.post("/api/threads", json!({"thread_id": "t"})).await;
        for text in ["one", "two", "three"] {
            gateway.ask(text).await;
        }
        let input = json!({"messages": [{"role": "user", "content": "hang"}]});
        let (status, run) = gateway.post("/api/threads/t/runs", json!({ "input": input })).await;
        assert_eq!(status, 200, "{run}");
        // In the middle of the run: its input is committed, its answer never comes.
        while texts(&gateway.get("/api/threads/t/state").await["values"]).last() != Some(&"hang") {
            tokio::task::yield_now().await;
        }
        gateway.signal("-9");
        drop(gateway);

        let gateway = Gateway::start(dir.path());
        let run = gateway.get(&format!("/api/threads/t/runs/{}", run["run_id"].as_str().unwrap())).await;
        assert_eq!(run["status"], "error");
        assert_eq!(run["error"], "Gateway restarted before this run reached a durable final state.");
        assert_eq!(run["stop_reason"], "orphan_recovered");
        let (_, found) = gateway.post("/api/threads/search", json!({"ids": ["t"]})).await;
        assert_eq!(found[0]["status"], "error");
        let values = gateway.ask("five").await;
        assert_eq!(
            texts(&values),
            [
                "one",
                "You said: one",
                "two",
                "You said: two",
                "three",
                "You said: three",
                "hang",
                "five",
                "You said: five"
            ],
            "{mode}: everything acknowledged is there"
        );
        assert_eq!(gateway.get("/api/threads/t").await["status"], "idle");
    }
}

#[tokio::test]
async fn a_terminated_gateway_interrupts_its_run_and_exits_in_order() {
    let dir = configured("delta");
    let mut gateway = Gateway::start(dir.path());
    gateway.post("/api/threads", json!({"thread_id": "t"})).await;
    let input = json!({"messages": [{"role": "user", "content": "hang"}]});
    let (_, run) = gateway.post("/api/threads/t/runs", json!({ "input": input })).await;
    gateway.signal("-TERM");
    assert!(gateway.child.wait().unwrap().success());

    let gateway = Gateway::start(dir.path());
    let run = gateway.get(&format!("/api/threads/t/runs/{}", run["run_id"].as_str().unwrap())).await;
    assert_eq!((&run["status"], &run["error"]), (&json!("interrupted"), &Json::Null));
}

fn refused(dir: &Path, arguments: &[&str]) -> Output {
    let mut command = command(dir);
    let mut child = command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let status = child.wait().unwrap();
    let mut output = Output { status, stdout: Vec::new(), stderr: Vec::new() };
    child.stdout.unwrap().read_to_end(&mut output.stdout).unwrap();
    child.stderr.unwrap().read_to_end(&mut output.stderr).unwrap();
    output
}

#[test]
fn a_start_that_cannot_work_says_why_and_exits_with_one() {
    let dir = configured("sideways");
    let output = refused(dir.path(), &[]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("database.checkpoint_channel_mode") && said.contains("sideways"), "{said}");

    let output = refused(dir.path(), &["--config", "absent.yaml"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("absent.yaml"), "{said}");

    let dir = configured("full");
    std::fs::create_dir_all(dir.path().join("state/data")).unwrap();
    std::fs::write(
        dir.path().join("state/data/checkpoints.db"),
        "this is no database, and long enough to be one",
    )
    .unwrap();
    let output = refused(dir.path(), &[]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("checkpoints.db"), "{said}");
}

#[test]
fn a_wrong_command_line_exits_with_two() {
    let dir = configured("full");
    assert_eq!(refused(dir.path(), &["--nonsense"]).status.code(), Some(2));
}

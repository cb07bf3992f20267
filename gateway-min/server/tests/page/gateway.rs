//! The gateway's own process.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use reqwest::Client;
use serde_json::{Value, json};
use tempfile::TempDir;
use threadkeep_testing::unconfigured;

/// A gateway, killed when dropped.
pub(crate) struct Gateway {
    child: Child,
    /// Its address.
    pub(crate) base: String,
    dir: TempDir,
    client: Client,
}

impl Gateway {
    /// Starts a gateway whose model plays `script`.
    pub(crate) fn start(script: &Value, mode: &str, has_keys: bool) -> Self {
        let dir = TempDir::new().unwrap();
        std::fs::write(dir.path().join("script.json"), script.to_string()).unwrap();
        let config = json!({
            "config_version": 49,
            "database": {"backend": "sqlite", "checkpoint_channel_mode": mode},
            "run_events": {"backend": "db"},
            "summarization": {"enabled": true},
            "auth": {"enabled": has_keys},
            "subagent_batches": {"enabled": true, "poll_interval_seconds": 0.1, "max_attempts": 1},
            "models": [{"name": "m", "use": "scripted", "model": "m", "script": "script.json"}],
        });
        std::fs::write(dir.path().join("config.yaml"), config.to_string()).unwrap();
        rustls::crypto::ring::default_provider().install_default().ok();
        // A gateway closes connections that were unused for a minute, also while a request is on its way.
        let client = Client::builder().no_proxy().pool_idle_timeout(Duration::from_secs(20)).build().unwrap();
        let (child, base) = serve(&dir, "0").expect("the gateway ended before it served");
        Self { child, base, dir, client }
    }

    /// Ends it without a warning, as a power failure does.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again, in its directory and at its address, which somebody else may have for a while.
    pub(crate) fn start_again(&mut self) {
        let port = self.base.rsplit_once(':').unwrap().1.to_owned();
        let until = Instant::now() + Duration::from_mins(10);
        (self.child, _) = loop {
            if let Some(served) = serve(&self.dir, &port) {
                break served;
            }
            assert!(Instant::now() < until, "the gateway does not serve again");
            std::thread::sleep(Duration::from_millis(100));
        };
    }

    /// A new key of this user.
    pub(crate) fn key(&self, user: &str) -> String {
        let output = command(&self.dir).args(["keys", "create", "--user", user]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        let answer = self.client.post(format!("{}{path}", self.base)).json(&body).send().await.unwrap();
        assert!(answer.status().is_success(), "{path}: {}", answer.text().await.unwrap());
        answer.json().await.unwrap()
    }

    /// Creates a thread; returns its id.
    pub(crate) async fn thread(&self) -> String {
        self.post("/api/threads", json!({})).await["thread_id"].as_str().unwrap().to_owned()
    }

    /// Creates a thread with this many messages, each in a checkpoint of its own.
    pub(crate) async fn long(&self, messages: usize) -> String {
        let step = |at: usize| {
            let kind = if at.is_multiple_of(2) { "human" } else { "ai" };
            let message = json!({"type": kind, "id": format!("m{at}"), "content": format!("message {at}")});
            json!({"updates": [{"as_node": "model", "values": {"messages": [message]}}]})
        };
        let steps: Vec<Value> = (0..messages).map(step).collect();
        self.post("/api/threads", json!({"supersteps": steps})).await["thread_id"]
            .as_str()
            .unwrap()
            .to_owned()
    }

    /// The answer to a request.
    pub(crate) async fn get(&self, path: &str) -> Value {
        self.client.get(format!("{}{path}", self.base)).send().await.unwrap().json().await.unwrap()
    }

    /// The working directory of a thread.
    pub(crate) fn thread_dir(&self, thread: &str) -> PathBuf {
        self.dir.path().join("state/threads").join(thread)
    }

    /// Runs a turn that may delegate.
    pub(crate) async fn delegate(&self, thread: &str, text: &str) {
        let input = json!({"messages": [{"role": "user", "content": text}]});
        let body = json!({"input": input, "context": {"subagent_enabled": true}});
        self.post(&format!("/api/threads/{thread}/runs/wait"), body).await;
    }

    /// Starts a run in the background.
    pub(crate) async fn start_run(&self, thread: &str, text: &str) {
        let body = json!({"input": {"messages": [{"role": "user", "content": text}]}});
        self.post(&format!("/api/threads/{thread}/runs"), body).await;
    }

    /// Runs a turn.
    pub(crate) async fn ask(&self, thread: &str, text: &str) {
        let body = json!({"input": {"messages": [{"role": "user", "content": text}]}});
        self.post(&format!("/api/threads/{thread}/runs/wait"), body).await;
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(dir: &TempDir) -> Command {
    let mut command = unconfigured(env!("CARGO_BIN_EXE_threadkeep"));
    command.current_dir(dir.path()).env("SVC_HOME", dir.path().join("state"));
    command
}

/// A gateway and its address, unless it ended before it served.
fn serve(dir: &TempDir, port: &str) -> Option<(Child, String)> {
    let mut child = command(dir).args(["serve", "--port", port]).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let base = lines.by_ref().map_while(Result::ok).find_map(|line| {
        let (_, rest) = line.split_once("serving on ")?;
        Some(rest.split([',', ' ']).next()?.to_owned())
    });
    let Some(base) = base else {
        child.wait().unwrap();
        return None;
    };
    // Later output must not fill the pipe.
    std::thread::spawn(move || lines.for_each(drop));
    Some((child, base))
}

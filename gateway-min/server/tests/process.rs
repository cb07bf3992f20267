//! The binary as an operator sees it: killed during a run, restarted, stopped by a signal, given an invalid
//! configuration.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

#[path = "process/backup.rs"]
mod backup;
#[cfg(target_os = "linux")]
#[path = "process/batches.rs"]
mod batches;
#[path = "process/beside.rs"]
mod beside;
#[cfg(target_os = "linux")]
#[path = "process/chaos/mod.rs"]
mod chaos;
#[path = "process/commands.rs"]
mod commands;
#[path = "process/delegation.rs"]
mod delegation;
#[cfg(target_os = "linux")]
#[path = "process/external.rs"]
mod external;
#[path = "process/killed.rs"]
mod killed;
#[path = "process/load.rs"]
mod load;
#[path = "process/own_store.rs"]
mod own_store;
#[cfg(unix)]
#[path = "process/private.rs"]
mod private;
#[cfg(target_os = "linux")]
#[path = "process/scale.rs"]
mod scale;
#[path = "process/servers.rs"]
mod servers;
#[path = "process/traces.rs"]
mod traces;

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use reqwest::Client;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value as Json, json};
use tempfile::TempDir;
use threadkeep_testing::{Postgres, postgres, unconfigured};
use tokio_postgres::NoTls;

/// On `hang`, waits at a gate that is never opened; on `slow`, answers in many pieces.
fn script() -> Json {
    json!({"chunk_chars": 1, "rules": [
        {"when": {"contains": ["hang"]}, "answers": [{"text": "never", "gate": {"name": "shut"}}]},
        {"when": {"contains": ["slow"]}, "answers": [{"text": "one two three four", "delay_ms": 1}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

fn configured(mode: &str) -> TempDir {
    configured_with(json!({"backend": "sqlite", "checkpoint_channel_mode": mode}), json!({}))
}

/// On the Postgres database at `url`. Leases are short, so that a test can wait for them to expire, but longer than a
/// process stalls on a busy machine.
fn on_postgres(url: &str, mode: &str) -> TempDir {
    configured_with(
        json!({"backend": "postgres", "postgres_url": url, "checkpoint_channel_mode": mode}),
        json!({"lease_seconds": 6, "grace_seconds": 4}),
    )
}

fn configured_with(database: Json, run_ownership: Json) -> TempDir {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("script.json"), script().to_string()).unwrap();
    let config = json!({
        "config_version": 49,
        "database": database,
        "run_events": {"backend": "db"},
        "run_ownership": run_ownership,
        "models": [{"name": "m", "use": "scripted", "model": "m", "script": "script.json"}],
    });
    std::fs::write(dir.path().join("config.yaml"), config.to_string()).unwrap();
    dir
}

fn command(dir: &Path) -> Command {
    serve(dir, "0")
}

fn serve(dir: &Path, port: &str) -> Command {
    let mut command = unconfigured(env!("CARGO_BIN_EXE_threadkeep"));
    command.current_dir(dir).args(["serve", "--port", port]).env("SVC_HOME", dir.join("state"));
    command
}

/// A client of gateways. It uses no connection again that was unused for a while: a gateway closes those after a
/// minute, one that stood still when it goes on, and does not answer a request that is on its way then.
fn client() -> Client {
    rustls::crypto::ring::default_provider().install_default().ok();
    Client::builder().no_proxy().pool_idle_timeout(Duration::from_secs(20)).build().unwrap()
}

/// A gateway in its own process; killed when dropped.
struct Gateway {
    child: Child,
    base: String,
    client: Client,
}

impl Gateway {
    fn start(dir: &Path) -> Self {
        Self::start_by(&mut command(dir))
    }

    fn start_by(command: &mut Command) -> Self {
        Self::try_start(command).unwrap_or_else(|said| panic!("the gateway ended before it served: {said}"))
    }

    /// The gateway, or what it said before it ended.
    fn try_start(command: &mut Command) -> Result<Self, String> {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut said = String::new();
        let base = loop {
            let Some(line) = lines.next() else {
                child.wait().unwrap();
                return Err(said);
            };
            let line = line.unwrap();
            if let Some(at) = line.find("serving on ") {
                let rest = &line[at + "serving on ".len()..];
                break rest.split([',', ' ']).next().unwrap().to_owned();
            }
            said.push_str(&line);
            said.push('\n');
        };
        // Later output must not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Ok(Self { child, base, client: client() })
    }

    async fn post(&self, path: &str, body: Json) -> (u16, Json) {
        self.try_post(path, body).await.unwrap()
    }

    /// As [`Self::post`], where the answer may be broken off.
    async fn try_post(&self, path: &str, body: Json) -> reqwest::Result<(u16, Json)> {
        let answer = self.client.post(format!("{}{path}", self.base)).json(&body).send().await?;
        Ok((answer.status().as_u16(), answer.json().await?))
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

    /// Starts a run that never ends by itself, and waits until its input is stored.
    async fn hang(&self, text: &str) -> String {
        let input = json!({"messages": [{"role": "user", "content": text}]});
        let (status, run) = self.post("/api/threads/t/runs", json!({ "input": input })).await;
        assert_eq!(status, 200, "{run}");
        while texts(&self.get("/api/threads/t/state").await["values"]).last() != Some(&text) {
            tokio::task::yield_now().await;
        }
        run["run_id"].as_str().unwrap().to_owned()
    }

    /// Waits until a run has this status; returns its record.
    async fn until(&self, run: &str, status: &str) -> Json {
        let found = async {
            loop {
                let record = self.get(&format!("/api/threads/t/runs/{run}")).await;
                if record["status"] == status {
                    return record;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(Duration::from_mins(10), found).await.expect("never happened")
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

/// What was said in a state: nothing in that of a thread without a checkpoint.
fn texts(values: &Json) -> Vec<&str> {
    values["messages"].as_array().into_iter().flatten().map(|m| m["content"].as_str().unwrap()).collect()
}

/// Three turns, `kill -9` in the middle of the fourth, restart: the run is in error with the recovery text, and the
/// thread continues.
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
    let gateway = Gateway::start(dir.path());
    exits_in_order(dir.path(), gateway, "-TERM").await;
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_gateway_whose_terminal_is_gone_interrupts_its_run_and_exits_in_order() {
    let dir = configured("delta");
    let gateway = Gateway::start_by(&mut with_hangup(dir.path(), "--default-signal=HUP"));
    exits_in_order(dir.path(), gateway, "-HUP").await;
}

/// As `nohup` starts it.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_gateway_that_was_started_to_outlive_its_terminal_does() {
    let dir = configured("full");
    let mut gateway = Gateway::start_by(&mut with_hangup(dir.path(), "--ignore-signal=HUP"));
    gateway.signal("-HUP");
    gateway.post("/api/threads", json!({"thread_id": "t"})).await;
    assert_eq!(texts(&gateway.ask("one").await), ["one", "You said: one"]);
    gateway.signal("-TERM");
    assert!(gateway.child.wait().unwrap().success());
}

/// A gateway with this option of `env`, whatever these tests were started to do at a hangup.
#[cfg(target_os = "linux")]
fn with_hangup(dir: &Path, option: &str) -> Command {
    let mut command = unconfigured("env");
    command.args([option, env!("CARGO_BIN_EXE_threadkeep"), "serve", "--port", "0"]);
    command.current_dir(dir).env("SVC_HOME", dir.join("state"));
    command
}

async fn exits_in_order(dir: &Path, mut gateway: Gateway, signal: &str) {
    gateway.post("/api/threads", json!({"thread_id": "t"})).await;
    let input = json!({"messages": [{"role": "user", "content": "hang"}]});
    let (_, run) = gateway.post("/api/threads/t/runs", json!({ "input": input })).await;
    let run = run["run_id"].as_str().unwrap();
    let body = json!({"input": input, "multitask_strategy": "enqueue"});
    let (_, waiting) = gateway.post("/api/threads/t/runs", body).await;
    let waiting = waiting["run_id"].as_str().unwrap();
    let mut followed = Vec::new();
    for run in [run, waiting] {
        let stream = gateway.client.get(format!("{}/api/threads/t/runs/{run}/stream", gateway.base));
        followed.push(stream.send().await.unwrap());
    }
    gateway.signal(signal);
    // Followers did not ask for it, so they are not shown a bare end.
    for stream in followed {
        let frames = stream.text().await.unwrap();
        let error = "event: error\ndata: {\"message\":\"The gateway stopped before this run ended.";
        assert!(frames.contains(error) && frames.ends_with("event: end\ndata: null\n\n"), "{frames}");
    }
    assert!(gateway.child.wait().unwrap().success());

    let gateway = Gateway::start(dir);
    for run in [run, waiting] {
        let run = gateway.get(&format!("/api/threads/t/runs/{run}")).await;
        let error = run["error"].as_str().unwrap();
        assert_eq!(run["status"], "interrupted");
        assert!(error.starts_with("The gateway stopped before this run ended."), "{error}");
    }
}

#[test]
fn a_gateway_that_is_terminated_as_soon_as_it_serves_exits_in_order() {
    let dir = configured("full");
    for _ in 0..20 {
        let mut gateway = Gateway::start(dir.path());
        let process = Pid::from_child(&gateway.child);
        kill_process(process, Signal::TERM).unwrap();
        assert!(gateway.child.wait().unwrap().success());
    }
}

/// The first process of a container ignores a signal that it does not catch.
#[test]
fn a_gateway_that_is_terminated_while_it_waits_for_its_database_exits_in_order() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let dir = on_postgres(&format!("postgres://u@{}/d", silent.local_addr().unwrap()), "full");
    let mut child = command(dir.path()).stderr(Stdio::null()).spawn().unwrap();
    silent.set_nonblocking(true).unwrap();
    let until = Instant::now() + Duration::from_mins(1);
    let _waited_for = loop {
        match silent.accept() {
            Ok(connection) => break connection,
            Err(error) => assert!(Instant::now() < until, "it does not connect: {error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success());
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
fn a_second_gateway_on_the_same_sqlite_files_is_refused_and_one_after_a_kill_is_not() {
    let dir = configured("full");
    let mut first = Gateway::start(dir.path());
    let output = refused(dir.path(), &[]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let named =
        format!("another gateway (process {}, {}) serves the SQLite stores in", first.child.id(), first.base);
    assert!(said.contains(&named), "{said}");
    first.child.kill().unwrap();
    first.child.wait().unwrap();
    let second = Gateway::start(dir.path());

    // With leases, both may serve.
    drop(second);
    let dir = configured_with(json!({"backend": "sqlite"}), json!({"heartbeat_enabled": true}));
    let (_one, _two) = (Gateway::start(dir.path()), Gateway::start(dir.path()));
}

#[test]
fn a_wrong_command_line_exits_with_two() {
    let dir = configured("full");
    assert_eq!(refused(dir.path(), &["--nonsense"]).status.code(), Some(2));
}

const LEASE_OVER: &str = "Run lease expired \u{2014} owning worker is unreachable.";

/// Two processes on one database, one of them killed during a run: the other one ends the run, once, and continues.
#[tokio::test]
async fn a_process_that_was_killed_is_cleared_up_by_another_one() {
    for mode in ["full", "delta"] {
        let database = postgres().unwrap().database().await.unwrap();
        let dirs = [(); 2].map(|()| on_postgres(database.url(), mode));
        let [first, second] = [&dirs[0], &dirs[1]].map(|dir| Gateway::start(dir.path()));
        first.post("/api/threads", json!({"thread_id": "t"})).await;
        first.ask("one").await;
        second.ask("two").await;
        let run = first.hang("hang").await;
        let joined = format!("{}/api/threads/t/runs/{run}/stream", second.base);
        let joined = second.client.get(joined).send().await.unwrap();
        first.signal("-9");
        let record = second.until(&run, "error").await;
        assert_eq!(
            (&record["error"], &record["stop_reason"]),
            (&json!(LEASE_OVER), &json!("orphan_recovered"))
        );
        // The follower on the other gateway gets the end.
        let frames = joined.text().await.unwrap();
        assert!(
            frames.contains(&json!(LEASE_OVER).to_string()) && frames.ends_with("event: end\ndata: null\n\n"),
            "{frames}"
        );
        assert_eq!(second.get("/api/threads/t").await["status"], "error");
        let values = second.ask("three").await;
        let expected = ["one", "You said: one", "two", "You said: two", "hang", "three", "You said: three"];
        assert_eq!(texts(&values), expected, "{mode}");
        drop(first);
        let again = Gateway::start(dirs[0].path());
        assert_eq!(texts(&again.get("/api/threads/t/state").await["values"]), expected);
        assert_eq!(again.get(&format!("/api/threads/t/runs/{run}")).await, record, "it was ended once");
    }
}

/// With leases of the default length, the process that replaces a killed one waits for none of them. It leaves alone
/// what another live process is running, even one on a copy of its directory.
#[tokio::test]
async fn a_process_that_was_killed_is_cleared_up_at_once_by_the_one_in_its_place() {
    for mode in ["full", "delta"] {
        let database = postgres().unwrap().database().await.unwrap();
        let settings =
            json!({"backend": "postgres", "postgres_url": database.url(), "checkpoint_channel_mode": mode});
        let dirs = [(); 2].map(|()| configured_with(settings.clone(), json!({})));
        let [first, second] = [&dirs[0], &dirs[1]].map(|dir| Gateway::start(dir.path()));
        first.post("/api/threads", json!({"thread_id": "other"})).await;
        first.post("/api/threads", json!({"thread_id": "t"})).await;
        first.ask("one").await;
        let run = first.hang("hang").await;
        let input = json!({"messages": [{"role": "user", "content": "hang"}]});
        let (_, live) = second.post("/api/threads/other/runs", json!({ "input": input })).await;
        let live = format!("/api/threads/other/runs/{}", live["run_id"].as_str().unwrap());

        // A copy of a live process's directory is no proof of its death.
        let copy = configured_with(settings.clone(), json!({}));
        std::fs::create_dir_all(copy.path().join("state")).unwrap();
        std::fs::copy(dirs[0].path().join("state/instance.json"), copy.path().join("state/instance.json"))
            .unwrap();
        drop(Gateway::start(copy.path()));
        assert_eq!(first.get(&format!("/api/threads/t/runs/{run}")).await["status"], "running");

        first.signal("-9");
        drop(first);
        let again = Gateway::start(dirs[0].path());
        let record = again.get(&format!("/api/threads/t/runs/{run}")).await;
        let text = "Gateway restarted before this run reached a durable final state.";
        assert_eq!((&record["status"], &record["error"]), (&json!("error"), &json!(text)), "{mode}");
        assert_eq!(record["stop_reason"], "orphan_recovered");
        let values = again.ask("two").await;
        assert_eq!(texts(&values), ["one", "You said: one", "hang", "two", "You said: two"]);
        let live = second.get(&live).await;
        assert!(["pending", "running"].contains(&live["status"].as_str().unwrap()), "{live}");
    }
}

/// Without leases every unfinished run is taken for one of a process that has ended. A gateway that cannot serve must not
/// get as far as that.
#[tokio::test]
async fn a_gateway_whose_port_is_taken_leaves_the_runs_of_the_other_alone() {
    let database = postgres().unwrap().database().await.unwrap();
    let settings =
        json!({"backend": "postgres", "postgres_url": database.url(), "checkpoint_channel_mode": "delta"});
    let dir = configured_with(settings, json!({"heartbeat_enabled": false}));
    let gateway = Gateway::start(dir.path());
    gateway.post("/api/threads", json!({"thread_id": "t"})).await;
    let run = gateway.hang("hang").await;
    let port = gateway.base.rsplit(':').next().unwrap();
    let mut again = serve(dir.path(), port);
    let output = tokio::task::spawn_blocking(move || again.output().unwrap()).await.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("cannot listen on"), "{said}");
    assert_eq!(gateway.get(&format!("/api/threads/t/runs/{run}")).await["status"], "running");
}

/// It wakes up when its run is over and another process holds the thread.
#[tokio::test]
async fn a_process_that_stood_still_changes_nothing_when_it_goes_on() {
    let database = postgres().unwrap().database().await.unwrap();
    let dirs = [(); 2].map(|()| on_postgres(database.url(), "delta"));
    let [first, second] = [&dirs[0], &dirs[1]].map(|dir| Gateway::start(dir.path()));
    first.post("/api/threads", json!({"thread_id": "t"})).await;
    first.ask("one").await;
    let run = first.hang("hang").await;
    first.signal("-STOP");
    let record = second.until(&run, "error").await;
    assert_eq!(record["error"], LEASE_OVER);
    let next = second.hang("hang again").await;
    first.signal("-CONT");
    // It answers and stops its work: there is nothing left to wait for.
    let left =
        first.client.post(format!("{}/api/threads/t/runs/{run}/cancel?wait=true", first.base)).send().await;
    assert_eq!(left.unwrap().status(), 409);
    first.get(&format!("/api/threads/t/runs/{run}/join")).await;
    assert_eq!(second.get(&format!("/api/threads/t/runs/{run}")).await, record);
    assert_eq!(second.get(&format!("/api/threads/t/runs/{next}")).await["status"], "running");
    let state = second.get("/api/threads/t/state").await;
    assert_eq!(texts(&state["values"]), ["one", "You said: one", "hang", "hang again"]);
    assert_eq!(first.get("/api/threads/t/state").await, state);
    assert_eq!(first.get("/api/threads/t").await["status"], "busy");
}

#[tokio::test]
async fn a_terminated_process_hands_its_thread_to_the_others() {
    let database = postgres().unwrap().database().await.unwrap();
    let dirs = [(); 2].map(|()| on_postgres(database.url(), "full"));
    let [mut first, second] = [&dirs[0], &dirs[1]].map(|dir| Gateway::start(dir.path()));
    first.post("/api/threads", json!({"thread_id": "t"})).await;
    first.ask("one").await;
    let run = first.hang("hang").await;
    first.signal("-TERM");
    assert!(first.child.wait().unwrap().success());
    let record = second.get(&format!("/api/threads/t/runs/{run}")).await;
    assert_eq!(record["status"], "interrupted");
    let error = record["error"].as_str().unwrap();
    assert!(error.starts_with("The gateway stopped before this run ended."), "{error}");
    let values = second.ask("two").await;
    assert_eq!(texts(&values), ["one", "You said: one", "hang", "two", "You said: two"]);
}

/// Turns on many threads while the server is away for a while: what was acknowledged is stored, what failed was refused
/// as such, and afterwards everything works.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_goes_away_under_load_costs_answers_but_nothing_that_was_acknowledged() {
    let server = tokio::task::spawn_blocking(|| Postgres::start().unwrap()).await.unwrap();
    let database = server.database().await.unwrap();
    let dir = on_postgres(database.url(), "delta");
    let gateway = Arc::new(Gateway::start(dir.path()));
    let (done, refused) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let answered = Arc::new(AtomicUsize::new(0));
    // Before the load: a client that is late could not create its thread, because the server is away.
    for n in 0..4 {
        let (status, thread) = gateway.post("/api/threads", json!({"thread_id": format!("t{n}")})).await;
        assert_eq!(status, 200, "{thread}");
    }
    let talks: Vec<_> = (0..4)
        .map(|n| {
            let (gateway, done, refused) = (gateway.clone(), done.clone(), refused.clone());
            let answered = answered.clone();
            tokio::spawn(async move {
                let (thread, mut acknowledged, mut afterwards) = (format!("t{n}"), Vec::new(), 0);
                for turn in 0.. {
                    let back = done.load(Ordering::SeqCst);
                    if afterwards == 3 {
                        break;
                    }
                    let text = format!("q{turn}");
                    let input = json!({"messages": [{"role": "user", "content": text}]});
                    let wait = format!("/api/threads/{thread}/runs/wait");
                    let (status, body) = match gateway.try_post(&wait, json!({ "input": input })).await {
                        Ok(answer) => answer,
                        // The outage was longer than an answer is silent, so its head was there.
                        Err(error) if error.is_decode() => {
                            refused.fetch_add(1, Ordering::SeqCst);
                            continue;
                        }
                        Err(error) => panic!("{error}"),
                    };
                    match status {
                        200 if body.get("status").is_none() => {
                            acknowledged.push(format!("You said: {text}"));
                            answered.fetch_add(1, Ordering::SeqCst);
                            afterwards += usize::from(back);
                        }
                        // The outage has failed a run, or the one before it is not over yet.
                        200 | 409 => tokio::time::sleep(Duration::from_millis(100)).await,
                        503 => {
                            refused.fetch_add(1, Ordering::SeqCst);
                        }
                        other => panic!("{other}: {body}"),
                    }
                }
                (thread, acknowledged)
            })
        })
        .collect();
    // The server goes away in the middle of the load.
    while answered.load(Ordering::SeqCst) < 20 {
        assert!(talks.iter().all(|talk| !talk.is_finished()));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let server = tokio::task::spawn_blocking(move || {
        server.crash().unwrap();
        server
    });
    let server = server.await.unwrap();
    while refused.load(Ordering::SeqCst) == 0 {
        assert!(talks.iter().all(|talk| !talk.is_finished()));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let _server = tokio::task::spawn_blocking(move || {
        server.resume().unwrap();
        server
    })
    .await
    .unwrap();
    done.store(true, Ordering::SeqCst);
    for talk in talks {
        let (thread, acknowledged) = talk.await.unwrap();
        let state = gateway.get(&format!("/api/threads/{thread}/state")).await;
        let there = texts(&state["values"]);
        for text in acknowledged {
            assert_eq!(there.iter().filter(|found| **found == text).count(), 1, "{text} in {there:?}");
        }
        let (_, runs) = gateway.post("/api/threads/search", json!({"ids": [thread]})).await;
        assert_eq!(runs[0]["status"], "idle");
    }
}

/// The owner of the tables has served once; from then on, rights on the rows suffice.
#[tokio::test]
async fn a_role_that_may_only_read_and_write_rows_can_serve() {
    let database = postgres().unwrap().database().await.unwrap();
    let owner = on_postgres(database.url(), "delta");
    let gateway = Gateway::start(owner.path());
    gateway.post("/api/threads", json!({"thread_id": "t"})).await;
    drop(gateway);
    let role = database.name().replace("threadkeep", "app");
    let (client, connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    let grants = format!(
        "CREATE ROLE {role} LOGIN PASSWORD 'secret'; GRANT USAGE ON SCHEMA public TO {role};
         GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}"
    );
    client.batch_execute(&grants).await.unwrap();
    let mut url = url::Url::parse(database.url()).unwrap();
    url.set_username(&role).unwrap();
    url.set_password(Some("secret")).unwrap();
    let dir = on_postgres(url.as_str(), "delta");
    let gateway = Gateway::start(dir.path());
    assert_eq!(texts(&gateway.ask("one").await), ["one", "You said: one"]);
    drop(gateway);
    client.batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await.unwrap();
}

//! The gateway, or the server that it is compared with, as a child process.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use reqwest::Client;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::case::Mode;
use crate::meter::Process;

/// How long a gateway may take to start, and to stop.
const PATIENCE: Duration = Duration::from_mins(2);
/// How often a starting or stopping process is polled.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The start of the log line that names the address.
const SERVING: &str = "serving on ";

/// The other server's agent: its graph, and where it is found.
const PEER_FILES: [(&str, &str); 2] = [
    ("agent.py", include_str!("../../peers/langgraph/agent.py")),
    ("langgraph.json", include_str!("../../peers/langgraph/langgraph.json")),
];

/// A running gateway, or the server that it is compared with. Killed when dropped.
pub(crate) struct Gateway {
    child: Child,
    base: String,
    kind: Kind,
    log: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Own,
    /// LangGraph's development server, which keeps its threads in memory.
    Langgraph,
}

impl Gateway {
    /// Starts a gateway that keeps its state in `directory`, or in the Postgres database at `postgres`.
    pub(crate) fn start(binary: &Path, directory: &Path, postgres: Option<&str>, mode: Mode) -> Result<Self> {
        let mut database = match mode {
            Mode::Full => json!({"checkpoint_channel_mode": "full"}),
            Mode::Delta(every) => json!({
                "checkpoint_channel_mode": "delta", "checkpoint_delta": {"snapshot_frequency": every},
            }),
        };
        database["backend"] = if postgres.is_some() { "postgres" } else { "sqlite" }.into();
        database["postgres_url"] = postgres.into();
        let config = json!({
            "config_version": 49,
            "database": database,
            "run_events": {"backend": "db"},
            "models": [{"name": "m", "use": "scripted", "model": "m", "script": "script.json"}],
        });
        let answer =
            json!({"text": "You said: {{input}}", "usage": {"input_tokens": 200, "output_tokens": 200}});
        // The script answers at once. Real models do not send a long answer in many small pieces at once, and those
        // would exceed the frames that a stream buffers for a slow client.
        let script = json!({"chunk_chars": 512, "rules": [{"answers": [answer]}]});
        fs::write(directory.join("config.yaml"), config.to_string())?;
        fs::write(directory.join("script.json"), script.to_string())?;
        Self::again(binary, directory)
    }

    /// Starts a gateway in a directory that [`Self::start`] has prepared.
    pub(crate) fn again(binary: &Path, directory: &Path) -> Result<Self> {
        let log = directory.join("log");
        let mut command = command(binary, directory);
        command
            .args(["serve", "--host", "127.0.0.1", "--port", "0", "--config", "config.yaml"])
            .env("RUST_LOG", "info");
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?).spawn();
        let child = child.with_context(|| format!("{} does not start", binary.display()))?;
        let mut gateway = Self { child, base: String::new(), kind: Kind::Own, log };
        gateway.base = gateway.address()?;
        Ok(gateway)
    }

    /// Starts LangGraph's development server, `langgraph dev`, in `directory`, with an agent that answers as the gateway's
    /// does. It may work on `runs` runs at the same time; by default it works on one.
    pub(crate) fn start_langgraph(program: &Path, directory: &Path, runs: usize) -> Result<Self> {
        for (name, content) in PEER_FILES {
            fs::write(directory.join(name), content)?;
        }
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let log = directory.join("log");
        let mut command = Command::new(program);
        command.args(["dev", "--no-browser", "--no-reload", "--host", "127.0.0.1"]);
        command.args(["--port", &port.to_string(), "--n-jobs-per-worker", &runs.to_string()]);
        command.current_dir(directory).env("LANGSMITH_TRACING", "false");
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?).spawn();
        let child = child.with_context(|| format!("{} does not start", program.display()))?;
        let base = format!("http://127.0.0.1:{port}");
        let mut server = Self { child, base, kind: Kind::Langgraph, log };
        let deadline = Instant::now() + PATIENCE;
        // It binds its port when it is ready.
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            let said = fs::read_to_string(&server.log)?;
            ensure!(server.child.try_wait()?.is_none(), "langgraph dev ended: {}", last_line(&said));
            ensure!(
                Instant::now() < deadline,
                "langgraph dev does not accept connections: {}",
                last_line(&said)
            );
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(server)
    }

    /// Waits until the gateway logs its address.
    fn address(&mut self) -> Result<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let said = fs::read_to_string(&self.log)?;
            if let Some((_, rest)) = said.split_once(SERVING)
                && let Some((address, _)) = rest.split_once(',')
            {
                return Ok(address.to_owned());
            }
            ensure!(self.child.try_wait()?.is_none(), "the gateway ended: {}", last_line(&said));
            ensure!(
                Instant::now() < deadline,
                "the gateway does not accept connections: {}",
                last_line(&said)
            );
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Where the threads are.
    pub(crate) fn api(&self) -> Api {
        match self.kind {
            Kind::Own => {
                Api { threads: format!("{}/api/threads", self.base), assistant: "lead_agent", last: "end" }
            }
            Kind::Langgraph => {
                Api { threads: format!("{}/threads", self.base), assistant: "agent", last: "values" }
            }
        }
    }

    /// Its address.
    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// The gateway's process, for its CPU and memory.
    pub(crate) fn process(&self) -> Process {
        Process::of(self.child.id())
    }

    /// The gateway's counters by name, without those that have labels.
    pub(crate) async fn counted(&self, client: &Client) -> Result<BTreeMap<String, u64>> {
        if self.kind == Kind::Langgraph {
            return Ok(BTreeMap::new());
        }
        let answer = client.get(format!("{}/metrics", self.base)).send().await?;
        let text = answer.error_for_status()?.text().await?;
        let counters = text.lines().filter_map(|line| {
            let (name, count) = line.split_once(' ')?;
            Some((name.to_owned(), count.parse().ok()?))
        });
        Ok(counters.collect())
    }

    /// Stops the gateway and waits until it has exited.
    pub(crate) async fn stop(mut self) -> Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("no process id")?;
        kill_process(pid, Signal::TERM)?;
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            ensure!(Instant::now() < deadline, "the gateway did not stop");
            tokio::time::sleep(LOOK_EVERY).await;
        };
        if self.kind == Kind::Own && !status.success() {
            bail!("the gateway ended with {status}: {}", last_line(&fs::read_to_string(&self.log)?));
        }
        Ok(())
    }
}

/// The program, in the directory of a gateway and without settings from the environment.
pub(crate) fn command(binary: &Path, directory: &Path) -> Command {
    let mut command = Command::new(binary);
    for (name, _) in std::env::vars_os() {
        // The environment must not change the measured configuration.
        if name.to_str().is_some_and(|name| ["SVC_", "GATEWAY_", "OTEL_"].iter().any(|p| name.starts_with(p)))
        {
            command.env_remove(name);
        }
    }
    command.current_dir(directory).env("SVC_HOME", directory.join("state"));
    command
}

/// What a client must know of a server.
#[derive(Debug, Clone)]
pub(crate) struct Api {
    /// The URL of its threads.
    pub(crate) threads: String,
    /// The name of its agent.
    pub(crate) assistant: &'static str,
    /// The event that ends a stream which went well.
    pub(crate) last: &'static str,
}

impl Drop for Gateway {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn last_line(text: &str) -> &str {
    text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it printed nothing")
}

//! Load on the gateway: many threads whose turns are streamed over HTTP at the same time.
//!
//! The gateway is a child process with a fresh directory and, on Postgres, a fresh database. Each thread has one
//! client, which sends a turn, reads its stream to the end, and sends the next. The case fails if a stream does not end
//! with `end` or contains an error, or if a thread lost a message. The same clients can send the same turns to LangGraph's
//! development server, which keeps its threads in memory.

pub(crate) mod client;
pub(crate) mod gateway;
mod table;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::{Deserialize, Serialize};
use threadkeep_testing::{Database, Postgres};

use crate::case::Mode;
use crate::measure::{ms, percentile, seconds};
use crate::meter::{self, Process};
use crate::store::Watch;
use client::{Conversation, Turn};
use gateway::Gateway;

pub use table::table;

/// Where the gateway keeps its threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum StoreKind {
    /// SQLite files; each commit is flushed.
    Sqlite,
    /// A private server that flushes each commit.
    Postgres,
    /// No gateway: LangGraph's development server, which stores nothing. It has one mode.
    Langgraph,
}

/// What to measure: every store in every mode.
#[derive(Debug, Clone)]
pub struct Load {
    /// The gateway binary.
    pub gateway: PathBuf,
    /// The program `langgraph`, for [`StoreKind::Langgraph`].
    pub langgraph: Option<PathBuf>,
    /// Directory for the gateway's state, on the disk to measure.
    pub scratch: PathBuf,
    /// The stores.
    pub stores: Vec<StoreKind>,
    /// The modes.
    pub modes: Vec<Mode>,
    /// Threads running at the same time.
    pub threads: usize,
    /// Measured turns per thread; one unmeasured turn precedes them.
    pub turns: usize,
    /// The frames that each turn asks for (`stream_mode`).
    pub frames: Vec<String>,
    /// Whether each turn's stream is read from a second gateway on the same database, and from the first one to compare.
    pub follow: bool,
}

/// One line of results. Times are milliseconds unless the name says otherwise, memory is bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    /// The row format's version.
    pub v: u32,
    /// The store.
    pub store: StoreKind,
    /// The channel mode.
    pub mode: Mode,
    /// Whether another gateway on the same database streamed the turns.
    pub followed: bool,
    /// Concurrent threads.
    pub threads: usize,
    /// Measured turns of all threads.
    pub turns_done: usize,
    /// From the first turn's request to the last one's end.
    pub wall_s: f64,
    /// Turns of all threads over that.
    pub turns_per_s: f64,
    /// From sending a request to its first frame.
    pub first_frame_p50_ms: f64,
    /// 99th percentile.
    pub first_frame_p99_ms: f64,
    /// From sending a request to the end of its stream.
    pub turn_p50_ms: f64,
    /// 99th percentile.
    pub turn_p99_ms: f64,
    /// How much later each frame but the first arrives from the other gateway than at a client of the one that works on
    /// the run, if the turns are followed.
    pub frame_delay_p50_ms: Option<f64>,
    /// 99th percentile.
    pub frame_delay_p99_ms: Option<f64>,
    /// The same for the end of the stream.
    pub end_delay_p50_ms: Option<f64>,
    /// 99th percentile.
    pub end_delay_p99_ms: Option<f64>,
    /// Median over the first tenth of each thread's turns: with few threads, whether a turn grows with its thread.
    pub turn_first10pct_ms: f64,
    /// Median over the last tenth.
    pub turn_last10pct_ms: f64,
    /// CPU time per turn of the gateway that carries the turns out.
    pub gateway_cpu_ms: f64,
    /// The same over the first tenth of the turns of a single thread; several threads are not at the same turn.
    pub gateway_cpu_first10pct_ms: Option<f64>,
    /// Over the last tenth.
    pub gateway_cpu_last10pct_ms: Option<f64>,
    /// CPU time per turn of the other gateway, from which the streams are read.
    pub follower_cpu_ms: Option<f64>,
    /// System calls per turn with which the gateway reads and writes.
    pub gateway_calls: f64,
    /// How often a thread of the gateway waits per turn.
    pub gateway_waits: f64,
    /// CPU time of all Postgres processes per turn.
    pub server_cpu_ms: Option<f64>,
    /// CPU time of the clients per turn; they share the machine.
    pub client_cpu_ms: f64,
    /// Peak memory of the gateway.
    pub rss_peak: u64,
    /// Memory of the gateway at the end.
    pub rss_end: u64,
    /// Flushes of the checkpoint database per turn; known for SQLite only.
    pub checkpoint_flushes: Option<f64>,
    /// Commits of the gateway's own records per turn.
    pub record_commits: Option<f64>,
    /// How many of these waited for the disk, per turn; known for SQLite only.
    pub record_flushes: Option<f64>,
    /// Statements on the gateway's own records per turn.
    pub record_statements: Option<f64>,
    /// How often the gateway waited for Postgres's answer about its records, per turn.
    pub record_round_trips: Option<f64>,
}

/// The row format's version.
const VERSION: u32 = 4;

impl Load {
    /// Measures every case in turn, and writes each row as soon as it is known.
    ///
    /// # Errors
    /// If a gateway does not start or stop, or a stream did not end properly; the text says which.
    pub async fn run(&self, mut out: impl Write) -> Result<Vec<Row>> {
        ensure!(self.threads > 0 && self.turns > 0, "a load has at least one thread and one turn");
        ensure!(
            !self.follow || self.stores.iter().all(|store| *store == StoreKind::Postgres),
            "only gateways on Postgres share a database: add --store postgres"
        );
        let needs_server = self.stores.contains(&StoreKind::Postgres);
        let server = needs_server.then(Postgres::start_flushing).transpose();
        let server = server.map_err(anyhow::Error::from_boxed)?;
        let cases: usize = self.stores.iter().map(|store| self.modes_of(*store).len()).sum();
        let bar = bar(self.threads * (self.turns + 1) * cases)?;
        let mut rows = Vec::new();
        for store in &self.stores {
            for mode in self.modes_of(*store) {
                let name = format!("{store:?}, {mode}").to_lowercase();
                bar.set_message(name.clone());
                let row = self.case(*store, *mode, server.as_ref(), &bar).await.context(name)?;
                serde_json::to_writer(&mut out, &row)?;
                out.write_all(b"\n")?;
                out.flush()?;
                rows.push(row);
            }
        }
        bar.finish_and_clear();
        Ok(rows)
    }

    fn modes_of(&self, store: StoreKind) -> &[Mode] {
        if store == StoreKind::Langgraph { &[Mode::Full] } else { &self.modes }
    }

    async fn case(
        &self,
        store: StoreKind,
        mode: Mode,
        server: Option<&Postgres>,
        bar: &ProgressBar,
    ) -> Result<Row> {
        let database = match (store, server) {
            (StoreKind::Postgres, Some(server)) => {
                Some(server.database().await.map_err(anyhow::Error::from_boxed)?)
            }
            _ => None,
        };
        let directory = tempfile::Builder::new().prefix("threadkeep-load-").tempdir_in(&self.scratch)?;
        let url = database.as_ref().map(Database::url);
        let gateway = if store == StoreKind::Langgraph {
            let program = self.langgraph.as_ref().context("pass --langgraph, or use `make load`")?;
            Gateway::start_langgraph(program, directory.path(), self.threads)?
        } else {
            Gateway::start(&self.gateway, directory.path(), url, mode)?
        };
        let beside = directory.path().join("follower");
        let follower = if self.follow {
            std::fs::create_dir(&beside)?;
            Some(Gateway::start(&self.gateway, &beside, url, mode)?)
        } else {
            None
        };
        let measured = self.measure(&gateway, follower.as_ref(), store, mode, url, bar).await;
        // Check how they ended even if the measurement failed.
        let mut stopped = Ok(());
        for gateway in follower.into_iter().chain([gateway]) {
            stopped = stopped.and(gateway.stop().await);
        }
        let row = measured?;
        stopped?;
        Ok(row)
    }

    async fn measure(
        &self,
        gateway: &Gateway,
        follower: Option<&Gateway>,
        store: StoreKind,
        mode: Mode,
        url: Option<&str>,
        bar: &ProgressBar,
    ) -> Result<Row> {
        let watch = match url {
            Some(url) => Some(Watch::open(url).await?),
            None => None,
        };
        let server = watch.as_ref().and_then(|watch| watch.server);
        let client = client::http()?;
        let mut conversations = Vec::new();
        for number in 0..self.threads {
            let (api, follower) = (gateway.api(), follower.map(Gateway::api));
            conversations.push(Conversation::create(&client, api, follower, number, &self.frames).await?);
        }
        // The first turn opens connections, sets titles and prepares statements; it is not measured.
        let (mut conversations, _) = rounds(conversations, 1, bar).await?;
        let before = gateway.counted(&client).await?;
        let (cpu, own_cpu) = (gateway.process().cpu(), meter::cpu());
        let (calls, waits) = (gateway.process().calls(), gateway.process().waits());
        let server_cpu = server.map(|server| server.cpu());
        let follower = follower.map(Gateway::process);
        let follower_cpu = follower.map(Process::cpu);
        let tenth = self.turns.div_ceil(10);
        // Several threads would wait for each other between the parts.
        let parts = match self.turns.checked_sub(2 * tenth) {
            Some(between) if self.threads == 1 => vec![tenth, between, tenth],
            _ => vec![self.turns],
        };
        let (mut turns, mut cpus) = (Vec::new(), vec![cpu]);
        let began = Instant::now();
        for part in &parts {
            let taken;
            (conversations, taken) = rounds(conversations, *part, bar).await?;
            turns.extend(taken);
            cpus.push(gateway.process().cpu());
        }
        let wall = began.elapsed();
        let per_turn = |time: Duration| ms(time / u32::try_from(turns.len()).unwrap_or(u32::MAX));
        let (cpu, own_cpu) =
            (gateway.process().cpu().saturating_sub(cpu), meter::cpu().saturating_sub(own_cpu));
        let server_cpu = server.zip(server_cpu).map(|(server, before)| server.cpu().saturating_sub(before));
        let follower_cpu =
            follower.zip(follower_cpu).map(|(follower, before)| follower.cpu().saturating_sub(before));
        let calls = gateway.process().calls().saturating_sub(calls);
        let waits = gateway.process().waits().saturating_sub(waits);
        let after = gateway.counted(&client).await?;
        for conversation in &conversations {
            conversation.check(self.turns + 1).await?;
        }
        let at = |time: fn(&Turn) -> Duration, percent| {
            percentile_ms(turns.iter().map(time), percent).unwrap_or_default()
        };
        let cpu_of = |part: usize| {
            let count = u32::try_from(tenth).unwrap_or(u32::MAX);
            (parts.len() > 1).then(|| ms(cpus[part + 1].saturating_sub(cpus[part]) / count))
        };
        let delays = || turns.iter().filter_map(|turn| turn.delays.as_ref());
        let frame_delay =
            |percent| percentile_ms(delays().flat_map(|delays| delays.frames.iter().copied()), percent);
        let end_delay = |percent| percentile_ms(delays().map(|delays| delays.end), percent);
        let median = |from: usize| {
            let each = turns.chunks(self.turns).flat_map(|turns| &turns[from..from + tenth]);
            percentile_ms(each.map(|turn| turn.whole), 50.0).unwrap_or_default()
        };
        // Before the peak: the gateway may need more meanwhile.
        let rss_end = gateway.process().resident();
        let counted =
            |name: &str| Some(ratio(after.get(name)?.checked_sub(*before.get(name)?)?, turns.len()));
        Ok(Row {
            v: VERSION,
            store,
            mode,
            followed: self.follow,
            threads: self.threads,
            turns_done: turns.len(),
            wall_s: seconds(wall),
            turns_per_s: (10.0 * as_float(turns.len()) / wall.as_secs_f64()).round() / 10.0,
            first_frame_p50_ms: at(|turn| turn.first_frame, 50.0),
            first_frame_p99_ms: at(|turn| turn.first_frame, 99.0),
            turn_p50_ms: at(|turn| turn.whole, 50.0),
            turn_p99_ms: at(|turn| turn.whole, 99.0),
            frame_delay_p50_ms: frame_delay(50.0),
            frame_delay_p99_ms: frame_delay(99.0),
            end_delay_p50_ms: end_delay(50.0),
            end_delay_p99_ms: end_delay(99.0),
            turn_first10pct_ms: median(0),
            turn_last10pct_ms: median(self.turns - tenth),
            gateway_cpu_ms: per_turn(cpu),
            gateway_cpu_first10pct_ms: cpu_of(0),
            gateway_cpu_last10pct_ms: cpu_of(2),
            follower_cpu_ms: follower_cpu.map(per_turn),
            gateway_calls: ratio(calls, turns.len()),
            gateway_waits: ratio(waits, turns.len()),
            server_cpu_ms: server_cpu.map(per_turn),
            client_cpu_ms: per_turn(own_cpu),
            rss_peak: gateway.process().peak(),
            rss_end,
            checkpoint_flushes: counted("threadkeep_sqlite_syncs_total"),
            record_commits: counted("threadkeep_records_commits_total"),
            record_flushes: counted("threadkeep_records_flushes_total"),
            record_statements: counted("threadkeep_records_statements_total"),
            record_round_trips: counted("threadkeep_records_round_trips_total"),
        })
    }
}

/// Runs `turns` turns of each conversation, all conversations concurrently. Returns the first failure.
async fn rounds(
    conversations: Vec<Conversation>,
    turns: usize,
    bar: &ProgressBar,
) -> Result<(Vec<Conversation>, Vec<Turn>)> {
    let mut tasks = tokio::task::JoinSet::new();
    for mut conversation in conversations {
        let bar = bar.clone();
        tasks.spawn(async move {
            let mut done = Vec::with_capacity(turns);
            for _ in 0..turns {
                done.push(conversation.turn().await?);
                bar.inc(1);
            }
            anyhow::Ok((conversation, done))
        });
    }
    let (mut conversations, mut all) = (Vec::new(), Vec::new());
    while let Some(done) = tasks.join_next().await {
        let (conversation, turns) = done??;
        conversations.push(conversation);
        all.extend(turns);
    }
    Ok((conversations, all))
}

/// The gateway binary next to this program.
///
/// # Errors
/// If there is none; the text says how to build it.
pub fn gateway_beside(own: &Path) -> Result<PathBuf> {
    let path = own.with_file_name(format!("threadkeep{}", std::env::consts::EXE_SUFFIX));
    ensure!(path.exists(), "{} is missing; build it with `make load`, or pass --gateway", path.display());
    Ok(path)
}

/// A percentile in milliseconds; `None` if there are no times.
fn percentile_ms(times: impl IntoIterator<Item = Duration>, percent: f64) -> Option<f64> {
    let mut times: Vec<Duration> = times.into_iter().collect();
    times.sort_unstable();
    percentile(&times, percent).map(ms)
}

#[allow(clippy::cast_precision_loss, reason = "counts of turns")]
fn as_float(count: usize) -> f64 {
    count as f64
}

/// A count per turn, with two digits.
#[allow(clippy::cast_precision_loss, reason = "shown with two digits")]
fn ratio(count: u64, turns: usize) -> f64 {
    (100.0 * count as f64 / as_float(turns)).round() / 100.0
}

fn bar(turns: usize) -> Result<ProgressBar> {
    let bar = ProgressBar::with_draw_target(Some(turns as u64), ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template("[{bar:30}] {pos}/{len} turns {elapsed}, {eta} left  {msg}")?);
    bar.enable_steady_tick(Duration::from_millis(250));
    Ok(bar)
}

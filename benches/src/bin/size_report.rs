//! Bytes and time per turn of one growing thread, in full mode and in delta mode.
//!
//! ```text
//! cargo run --release -p threadkeep-benches --bin size_report
//! cargo run --release -p threadkeep-benches --bin size_report -- postgres
//! ```
//!
//! A turn does what the gateway does: open the head, one superstep for the question, one for the answer, and a
//! checkpoint that only records the duration. `step` is the second superstep: the first one after opening also indexes
//! the head's message ids, once. Messages are realistic; raw bytes are the messages as compact JSON. SQLite bytes are
//! the size of the closed file, Postgres bytes the size of all tables and indexes on a server with fsync on.

use std::io::{self, Write as _};
use std::time::Duration;

use anyhow::{Result, bail};
use tempfile::TempDir;
use threadkeep_benches::case::{Backend, Case, Each, Mode};
use threadkeep_benches::conversation::Conversation;
use threadkeep_benches::measure::{median, ms};
use threadkeep_benches::store::{Store, file_bytes};
use threadkeep_benches::workload::Workload;
use threadkeep_testing::Postgres;

#[tokio::main]
async fn main() -> Result<()> {
    let server = match std::env::args().nth(1).as_deref() {
        None => None,
        Some("postgres") => Some(Postgres::start_flushing().map_err(anyhow::Error::from_boxed)?),
        Some(other) => {
            bail!("unknown store {other}; pass postgres, or nothing for SQLite")
        }
    };
    let mut out = io::stdout();
    writeln!(
        out,
        "{:<13} {:>5} {:>10} {:>10} {:>9}   {:>9} {:>9} {:>5}   {:>9} {:>9} {:>5}",
        "mode",
        "turns",
        "raw bytes",
        "file",
        "file/raw",
        "step @20",
        "step @end",
        "x",
        "turn @20",
        "turn @end",
        "x"
    )?;
    for turns in [200, 2_000] {
        for mode in [Mode::Full, Mode::Delta(1), Mode::Delta(10), Mode::Delta(1_000)] {
            writeln!(out, "{}", line(server.as_ref(), mode, turns).await?)?;
        }
    }
    Ok(())
}

async fn line(server: Option<&Postgres>, mode: Mode, turns: usize) -> Result<String> {
    let directory = TempDir::new()?;
    let database = match server {
        Some(server) => Some(server.database().await.map_err(anyhow::Error::from_boxed)?),
        None => None,
    };
    let (backend, target) = match &database {
        Some(database) => (Backend::Postgres, database.url().to_owned()),
        None => (Backend::Sqlite, directory.path().join("checkpoints.db").display().to_string()),
    };
    let case = Case {
        workload: Workload::Plain,
        backend,
        mode,
        turns,
        size: 0,
        threads: 1,
        writers: 1,
        seed: 7,
        rep: 0,
        cap_s: 0,
        paired: false,
        flush: Each::Step,
    };
    let store = Store::open(backend, &target).await?;
    let mut conversation = Conversation::new(&case, 0, store.saver.clone())?;
    let (mut raw, mut steps, mut whole) = (0, Vec::new(), Vec::new());
    for _ in 0..turns {
        let spent = conversation.turn(None).await?;
        raw += spent.raw_bytes;
        steps.extend(spent.steps.last());
        whole.push(spent.wall);
    }
    drop(conversation);
    let tables = store.bytes().await?;
    store.close().await;
    let bytes = if backend == Backend::Postgres { tables } else { file_bytes(&target) };
    let typical = |times: &[Duration], around: usize| {
        let window = &times[around.saturating_sub(10)..(around + 10).min(times.len())];
        median(window.iter().copied()).map_or(0.0, ms)
    };
    let pair = |times: &[Duration]| (typical(times, 20), typical(times, turns - 10));
    let ((step_20, step_end), (turn_20, turn_end)) = (pair(&steps), pair(&whole));
    #[allow(clippy::cast_precision_loss, reason = "a ratio with three digits")]
    let over = bytes as f64 / raw as f64;
    let name = match mode {
        Mode::Full => "full".to_owned(),
        Mode::Delta(frequency) => format!("delta K={frequency}"),
    };
    Ok(format!(
        "{name:<13} {turns:>5} {raw:>10} {bytes:>10} {over:>9.3}   {step_20:>6.2} ms {step_end:>6.2} ms {:>5.2}   \
         {turn_20:>6.2} ms {turn_end:>6.2} ms {:>5.2}",
        step_end / step_20,
        turn_end / turn_20
    ))
}

//! Measures the gateway under load.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Parser;
use threadkeep_benches::case::Mode;
use threadkeep_benches::load::{Load, StoreKind, gateway_beside, table};

/// Sends turns to a gateway from many clients at once; reports throughput, latency and resources.
///
/// The gateway is a child process with fresh state and a scripted model. Each client streams turn after turn of one
/// thread over a kept-alive connection. A stream that does not end properly fails the run.
#[derive(Parser)]
#[command(
    version,
    after_help = "\
Examples:
  load                                      1 and 64 threads, SQLite and Postgres, both modes: the short form
  load --turns 100 --out rows.jsonl         longer threads; rows as JSON, one a line
  load --store sqlite --mode full --threads 1,8,64
  load --threads 1 --turns 5000 --frames updates   whether a turn grows with its thread: the first tenth and the last one
  load --store postgres --follow            how soon another process shows what a run does"
)]
struct Cli {
    /// Where the gateway keeps its threads. Postgres is a private server in TMPDIR with fsync on. `langgraph` is no gateway
    /// but LangGraph's development server, for comparison.
    #[arg(long, value_delimiter = ',', value_enum, default_value = "sqlite,postgres")]
    store: Vec<StoreKind>,
    /// Channel modes: full, or delta:K with a snapshot every K updates.
    #[arg(long, value_delimiter = ',', default_value = "full,delta:10")]
    mode: Vec<Mode>,
    /// Threads running at the same time.
    #[arg(long, value_delimiter = ',', default_value = "1,64")]
    threads: Vec<usize>,
    /// Measured turns per thread, but at least 200 turns of all; one unmeasured turn precedes them.
    #[arg(long, default_value_t = 10)]
    turns: usize,
    /// The frames that each turn asks for.
    #[arg(long, value_delimiter = ',', default_value = "values,messages-tuple")]
    frames: Vec<String>,
    /// Reads each turn's stream from a second gateway on the same database: times count from the request to that one, and
    /// later frames and ends from their arrival at a client of the first one.
    #[arg(long)]
    follow: bool,
    /// The file to append rows to.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Directory for the gateway's state; put it on the disk to measure.
    #[arg(long, default_value_os_t = std::env::temp_dir())]
    scratch: PathBuf,
    /// The gateway binary; defaults to the one next to this program.
    #[arg(long)]
    gateway: Option<PathBuf>,
    /// The program `langgraph`, with which the store `langgraph` is started.
    #[arg(long)]
    langgraph: Option<PathBuf>,
}

/// Fewer turns say little about percentiles.
const TURNS_MIN: usize = 200;

fn main() -> Result<()> {
    let cli = Cli::parse();
    let gateway = match cli.gateway {
        // The gateway runs in another working directory.
        Some(path) => std::path::absolute(path)?,
        None => gateway_beside(&std::env::current_exe()?)?,
    };
    let langgraph = cli.langgraph.map(std::path::absolute).transpose()?;
    let mut out: Box<dyn io::Write> = match &cli.out {
        Some(path) => {
            let file = File::options().create(true).append(true).open(path);
            Box::new(file.with_context(|| path.display().to_string())?)
        }
        None => Box::new(io::sink()),
    };
    let runtime = tokio::runtime::Runtime::new()?;
    let mut rows = Vec::new();
    for threads in cli.threads {
        let load = Load {
            gateway: gateway.clone(),
            langgraph: langgraph.clone(),
            scratch: cli.scratch.clone(),
            stores: cli.store.clone(),
            modes: cli.mode.clone(),
            threads,
            turns: cli.turns.max(TURNS_MIN.div_ceil(threads.max(1))),
            frames: cli.frames.clone(),
            follow: cli.follow,
        };
        rows.extend(runtime.block_on(load.run(&mut out))?);
    }
    io::stdout().write_all(table(&rows).as_bytes())?;
    Ok(())
}

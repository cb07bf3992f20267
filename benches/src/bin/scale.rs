//! Measures operators' commands and the gateway's routes on large stores.

use std::fs;
use std::io::{self, Write as _};
use std::num::NonZeroU32;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use threadkeep_benches::load::{StoreKind, gateway_beside};
use threadkeep_benches::scale::{Form, Scale, tables};

/// Makes a large store, one whose long threads have a tenth of the turns, and one with a tenth of the threads too, and
/// measures commands and routes on them: wall, CPU, peak memory, bytes read and printed. On the large one it measures
/// turns alone and beside commands, too.
#[derive(Parser)]
#[command(
    version,
    after_help = "\
Examples:
  scale                                     10,000 threads, long ones of 5,000 turns, SQLite and Postgres
  scale --threads 500 --turns 500           minutes
  scale --store sqlite --out scale.md       the tables in Markdown too"
)]
struct Cli {
    /// The stores.
    #[arg(long, value_delimiter = ',', value_enum, default_value = "sqlite,postgres")]
    store: Vec<StoreKind>,
    /// Threads of the larger stores; the smallest one has a tenth.
    #[arg(long, default_value_t = 10_000)]
    threads: usize,
    /// Turns of the long threads, one in each mode; in the smaller stores they have a tenth.
    #[arg(long, default_value_t = 5_000)]
    turns: usize,
    /// Turns that are measured alone, and at least beside each command; 0 leaves that out.
    #[arg(long, default_value_t = 400)]
    beside: usize,
    /// Turns that are due in a second, of all clients; their times count from when they are due. Without it, a client begins
    /// its next turn when the last one has ended, as fast as the machine can.
    #[arg(long)]
    rate: Option<NonZeroU32>,
    /// A file for the tables in Markdown; the figures go beside it, as JSON.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Directory for the stores; put it on the disk to measure.
    #[arg(long, default_value_os_t = std::env::temp_dir())]
    scratch: PathBuf,
    /// The gateway binary; defaults to the one next to this program.
    #[arg(long)]
    gateway: Option<PathBuf>,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let gateway = match cli.gateway {
        // It runs in another working directory.
        Some(path) => std::path::absolute(path)?,
        None => gateway_beside(&std::env::current_exe()?)?,
    };
    let scale = Scale {
        gateway,
        scratch: cli.scratch,
        stores: cli.store,
        threads: cli.threads,
        turns: cli.turns,
        beside: cli.beside,
        rate: cli.rate,
    };
    let runtime = tokio::runtime::Runtime::new()?;
    // Nothing is lost if nobody reads what is being done.
    let report = runtime.block_on(scale.run(|what| drop(writeln!(io::stderr(), "{what}"))))?;
    if let Some(path) = &cli.out {
        fs::write(path, tables(&report, Form::Markdown)).with_context(|| path.display().to_string())?;
        fs::write(path.with_extension("json"), serde_json::to_vec_pretty(&report)?)?;
    }
    io::stdout().write_all(tables(&report, Form::Aligned).as_bytes())?;
    let failures = report.failures();
    ensure!(failures.is_empty(), "these rows do not count:\n{}", failures.join("\n"));
    Ok(())
}

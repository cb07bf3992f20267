//! Measures delegation.

use std::io::{self, Write as _};
use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use threadkeep_benches::delegation::{batches, dispatch, growth, live, placement, table, work};

/// Measures what delegation costs beside the models, whose answers are scripted.
#[derive(Parser)]
#[command(
    version,
    after_help = "\
Examples:
  delegation                               all five; minutes
  delegation dispatch --runs 1000
  delegation placement --scratch /mnt/disk"
)]
struct Cli {
    /// What to measure.
    #[arg(value_enum, default_values = ["dispatch", "growth", "placement", "batches", "live"])]
    what: Vec<What>,
    /// Delegations a store, for `dispatch`.
    #[arg(long, default_value_t = 300)]
    runs: usize,
    /// Subagents at once, for `growth`.
    #[arg(long, default_value_t = 64)]
    subagents: usize,
    /// Model calls of each, for `growth`.
    #[arg(long, default_value_t = 150)]
    turns: usize,
    /// Items of a batch, for `batches`.
    #[arg(long, default_value_t = 2000)]
    items: usize,
    /// Live items of a batch, for `live`.
    #[arg(long, default_value_t = 5000)]
    live_items: usize,
    /// Repetitions, for `placement`.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Works on the batches of this database until standard input ends; `batches` starts processes with it.
    #[arg(long, hide = true)]
    worker_of: Option<String>,
    /// Directory for the stores; put it on the disk to measure.
    #[arg(long, default_value_os_t = std::env::temp_dir())]
    scratch: PathBuf,
}

#[derive(Clone, Copy, ValueEnum)]
enum What {
    /// From dispatch to result, and between events.
    Dispatch,
    /// Memory and retention with many subagents.
    Growth,
    /// Hidden threads against namespaces.
    Placement,
    /// Durable batches with one process and with several.
    Batches,
    /// Memory with many live items of a batch.
    Live,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let runtime = tokio::runtime::Runtime::new()?;
    if let Some(url) = &cli.worker_of {
        return runtime.block_on(work(url, &cli.scratch));
    }
    for what in &cli.what {
        let text = match what {
            What::Dispatch => table(
                &["store", "result p50, ms", "result p99", "event p50, ms", "event p99"],
                &runtime.block_on(dispatch(cli.runs, &cli.scratch))?,
            ),
            What::Growth => {
                let grown = runtime.block_on(growth(cli.subagents, cli.turns, &cli.scratch))?;
                format!(
                    "{} subagents x {} turns: {} MiB more at most, in {:.1} s; a retention pass over the parent takes \
                     {:.3} ms, {:.3} ms without them\n",
                    cli.subagents,
                    cli.turns,
                    grown.bytes >> 20,
                    grown.took.as_secs_f64(),
                    grown.pass.as_secs_f64() * 1e3,
                    grown.pass_without.as_secs_f64() * 1e3,
                )
            }
            What::Batches => table(
                &[
                    "store",
                    "processes",
                    "items a second",
                    "item and slot, ms",
                    "statements an item",
                    "round trips an item",
                    "CPU an item, ms",
                ],
                &runtime.block_on(batches(cli.items, &cli.scratch))?,
            ),
            What::Live => table(
                &["store", "at work", "waiting", "memory, MiB", "at most"],
                &runtime.block_on(live(cli.live_items, &cli.scratch))?,
            ),
            What::Placement => table(
                &["store", "place", "16 x 50 commits, ms", "reading the parent, ms"],
                &runtime.block_on(placement(cli.rounds, &cli.scratch))?,
            ),
        };
        writeln!(io::stdout(), "{text}")?;
    }
    Ok(())
}

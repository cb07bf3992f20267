//! The workload runner.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use clap::{Args, Parser, Subcommand};
use threadkeep_benches::case::{Backend, Each, Mode};
use threadkeep_benches::measure::{Job, measure};
use threadkeep_benches::row;
use threadkeep_benches::runner::{Matrix, Plan, Runner};
use threadkeep_benches::summary;
use threadkeep_benches::workload::Workload;

/// Runs conversations on checkpoint stores and measures time, CPU, memory and bytes.
///
/// Each case has its own process and database. Rows go to --out as JSON lines; benches/README.md describes the fields.
/// A case whose final state differs from its script, or from other stores and modes, is an error.
#[derive(Parser)]
#[command(
    version,
    after_help = "\
Examples:
  workloads run                                        lean, SQLite, both modes, 100 turns
  workloads run --workload plain --turns 20,2000 --backend sqlite,raw-sqlite --out rows.jsonl
  workloads run --workload lean --threads 64 --writers 1,2,4,8 --turns 20 --backend sqlite,postgres
  workloads plan short --out rows.jsonl                what `make bench` runs
  workloads summarize rows.jsonl --plots plots         tables, and plots/index.html

Workloads:
  lean   a model and nothing else: 3 checkpoints and 2 messages a turn
  lead   an agent with 18 hooks: 21 checkpoints a turn, all messages sent again in each
  plain  realistic messages, 2 a turn, in one line
  agent  realistic messages with tool calls, regenerated and edited turns, forks, compactions"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run every combination of the given lists.
    Run(Box<Run>),
    /// Run a named plan.
    Plan {
        /// The plan.
        plan: Plan,
        /// Repetitions of every case.
        #[arg(long, default_value_t = 1)]
        reps: usize,
        #[command(flatten)]
        how: How,
    },
    /// Print tables of rows, and write plots. Refuses rows whose final states differ.
    Summarize {
        /// Files of rows.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// Directory for the SVG files and the index.html that shows them.
        #[arg(long)]
        plots: Option<PathBuf>,
    },
    /// Measure one case in this process (used by `run` and `plan`).
    #[command(hide = true)]
    Job {
        /// The job as JSON.
        job: String,
    },
}

#[derive(Args)]
struct Run {
    /// Workloads: lean, lead, plain, agent.
    #[arg(long, value_delimiter = ',', default_value = "lean")]
    workload: Vec<Workload>,
    /// Stores.
    #[arg(long, value_delimiter = ',', value_enum, default_value = "sqlite")]
    backend: Vec<Backend>,
    /// Channel modes: full, or delta:K with a snapshot every K updates.
    #[arg(long, value_delimiter = ',', default_value = "full,delta:10")]
    mode: Vec<Mode>,
    /// Turns per conversation.
    #[arg(long, value_delimiter = ',', default_value = "100")]
    turns: Vec<usize>,
    /// Bytes of a message's text (lean and lead).
    #[arg(long, value_delimiter = ',', default_value = "128")]
    size: Vec<usize>,
    /// Conversations. With more than one, they are written concurrently and not read afterwards.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    threads: Vec<usize>,
    /// Tasks that write concurrently.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    writers: Vec<usize>,
    /// Repetitions of every case.
    #[arg(long, default_value_t = 1)]
    reps: usize,
    /// The seed of realistic messages.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Seconds of writing after which a case ends early and its row says capped.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    cap: u64,
    /// Also write each superstep's bytes to a raw store right after it, so that noise affects both sides of the ratio.
    #[arg(long)]
    paired: bool,
    /// What is flushed before it is acknowledged: every superstep, or each turn with its last superstep (Threadkeep
    /// savers only).
    #[arg(long, value_delimiter = ',', value_enum, default_value = "step")]
    flush: Vec<Each>,
    #[command(flatten)]
    how: How,
}

#[derive(Args)]
struct How {
    /// The file to append rows to; stdout by default.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Directory for databases; put it on the disk to measure. The private Postgres is in TMPDIR.
    #[arg(long, default_value_os_t = std::env::temp_dir())]
    scratch: PathBuf,
    /// A Python with LangGraph's savers, for the langgraph-* stores.
    #[arg(long)]
    python: Option<PathBuf>,
    /// How many new processes read the head of each finished case.
    #[arg(long, default_value_t = 3)]
    colds: usize,
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Run(run) => {
            let Run {
                workload,
                backend,
                mode,
                turns,
                size,
                threads,
                writers,
                reps,
                seed,
                cap,
                paired,
                flush,
                how,
            } = *run;
            let matrix = Matrix {
                workloads: workload,
                backends: backend,
                modes: mode,
                turns,
                sizes: size,
                threads,
                writers,
                reps,
                seed,
                cap_s: cap,
                paired,
                flushes: flush,
            };
            how.run(&matrix.cases())
        }
        Command::Plan { plan, reps, how } => {
            let cases = (0..reps).flat_map(|rep| {
                plan.cases().into_iter().map(move |mut case| {
                    case.rep = rep;
                    case
                })
            });
            how.run(&cases.collect::<Vec<_>>())
        }
        Command::Summarize { files, plots } => {
            let mut rows = Vec::new();
            for file in files {
                let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
                rows.extend(row::parse(&text).with_context(|| file.display().to_string())?);
            }
            let wrong = row::rejected(&rows);
            ensure!(wrong.is_empty(), "these rows do not count:\n{}", wrong.join("\n"));
            io::stdout().write_all(summary::tables(&rows).as_bytes())?;
            if let Some(directory) = plots {
                summary::write_plots(&rows, &directory)?;
            }
            Ok(())
        }
        Command::Job { job } => {
            let job: Job = serde_json::from_str(&job)?;
            let measured = tokio::runtime::Runtime::new()?.block_on(measure(&job, |row| {
                let line = serde_json::to_string(row).unwrap_or_default();
                // The reader may be gone; there is nobody left to report that to.
                let _ = writeln!(io::stdout(), "{line}");
            }));
            if let Err(error) = measured {
                // One line, which the runner copies into the row.
                let _ = writeln!(io::stderr(), "{}", format!("{error:#}").replace('\n', " "));
                std::process::exit(1);
            }
            Ok(())
        }
    }
}

impl How {
    fn run(self, cases: &[threadkeep_benches::case::Case]) -> Result<()> {
        ensure!(!cases.is_empty(), "none of these combinations is valid");
        let runner = Runner { scratch: self.scratch, python: self.python, colds: self.colds };
        match self.out {
            Some(path) => {
                let file = File::options().create(true).append(true).open(&path);
                let rows = runner.run(cases, file.with_context(|| path.display().to_string())?)?;
                io::stdout().write_all(summary::tables(&rows).as_bytes())?;
            }
            None => {
                runner.run(cases, io::stdout())?;
            }
        }
        Ok(())
    }
}

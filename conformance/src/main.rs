//! The command line of the suite, for our own savers.

use std::io::Write as _;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use threadkeep_conformance::savers::{Cached, Memory, Postgres, Sqlite};
use threadkeep_conformance::{BoxError, Case, Report, Settings, child, run};

/// Run the conformance suite on one of Threadkeep's savers and print a report.
///
/// Exits with 1 if a case failed.
#[derive(Parser)]
#[command(name = "threadkeep-conformance")]
struct Arguments {
    /// The saver.
    #[arg(long)]
    saver: Name,
    /// Only cases whose name contains this text.
    #[arg(long, default_value = "")]
    case: String,
    /// Only cases of this level: core, delta, deletion, concurrency or durability.
    #[arg(long)]
    level: Option<String>,
    /// The seed of random choices.
    #[arg(long, default_value_t = Settings::from_env().seed)]
    seed: u64,
    /// Number of random programs.
    #[arg(long, default_value_t = Settings::from_env().programs)]
    programs: u32,
    /// Report as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Name {
    Memory,
    Sqlite,
    /// A private server, or the one at `THREADKEEP_POSTGRES_TEST_URL`.
    Postgres,
    /// The same, through `PgBouncer` in transaction mode.
    PostgresPgbouncer,
    /// SQLite behind a history cache in memory.
    Cached,
}

const DIRECT: Postgres = Postgres { pooled: false };
const POOLED: Postgres = Postgres { pooled: true };

async fn report(arguments: &Arguments) -> Report {
    let settings = Settings { seed: arguments.seed, programs: arguments.programs };
    let wanted = |case: &Case| {
        let level = case.level.to_string();
        case.name.contains(&arguments.case) && arguments.level.as_ref().is_none_or(|only| *only == level)
    };
    match arguments.saver {
        Name::Memory => run(Memory, settings, wanted).await,
        Name::Sqlite => run(Sqlite, settings, wanted).await,
        Name::Postgres => run(DIRECT, settings, wanted).await,
        Name::PostgresPgbouncer => run(POOLED, settings, wanted).await,
        Name::Cached => run(Cached(Sqlite), settings, wanted).await,
    }
}

fn main() -> Result<ExitCode, BoxError> {
    let code = child(&Sqlite).or_else(|| child(&Cached(Sqlite)));
    if let Some(code) = code.or_else(|| child(&DIRECT)).or_else(|| child(&POOLED)) {
        return Ok(code);
    }
    let arguments = Arguments::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build()?;
    let report = runtime.block_on(report(&arguments));
    let mut out = std::io::stdout().lock();
    if arguments.json {
        writeln!(out, "{:#}", report.to_json())?;
    } else {
        writeln!(out, "{report}")?;
    }
    if report.cases.is_empty() {
        return Err("no case has this name and level".into());
    }
    Ok(if report.failed().is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

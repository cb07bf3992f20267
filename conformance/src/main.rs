//! The command line of the suite, for our own savers.

use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use threadkeep_conformance::savers::{Cached, Memory, Postgres, Sqlite};
use threadkeep_conformance::{BoxError, ReportArguments, child};

/// Run the conformance suite on one of Threadkeep's savers and print a report.
///
/// Exits with 1 if a case failed.
#[derive(Parser)]
#[command(name = "threadkeep-conformance")]
struct Arguments {
    /// The saver.
    #[arg(long)]
    saver: Name,
    #[command(flatten)]
    report: ReportArguments,
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

fn main() -> Result<ExitCode, BoxError> {
    let code = child(&Sqlite).or_else(|| child(&Cached(Sqlite)));
    if let Some(code) = code.or_else(|| child(&DIRECT)).or_else(|| child(&POOLED)) {
        return Ok(code);
    }
    let Arguments { saver, report } = Arguments::parse();
    match saver {
        Name::Memory => report.report(Memory),
        Name::Sqlite => report.report(Sqlite),
        Name::Postgres => report.report(DIRECT),
        Name::PostgresPgbouncer => report.report(POOLED),
        Name::Cached => report.report(Cached(Sqlite)),
    }
}

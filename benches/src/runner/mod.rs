//! Runs cases one after the other, each in its own process and database.

mod matrix;
mod plans;
mod process;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tempfile::TempDir;
use threadkeep_testing::{Database, Postgres};
use tokio::runtime::Runtime;

use crate::case::{Backend, Case, Kind};
use crate::measure::{Job, Phase, median, ms};
use crate::row::{Found, Row, rejected};

pub use matrix::Matrix;
pub use plans::Plan;

/// How cases run.
pub struct Runner {
    /// Directory for databases. It should be on the disk to measure.
    pub scratch: PathBuf,
    /// A Python with LangGraph's savers, for the cases that need it.
    pub python: Option<PathBuf>,
    /// How many new processes read the head of each finished case.
    pub colds: usize,
}

impl Runner {
    /// Runs the cases and writes each row as soon as it is known.
    ///
    /// # Errors
    /// If a case cannot run, or its final state is wrong; in the latter case all rows are written first.
    pub fn run(&self, cases: &[Case], mut out: impl Write) -> Result<Vec<Row>> {
        let peers = cases.iter().any(|case| case.backend.kind() == Kind::Peer);
        ensure!(
            !peers || self.python.is_some(),
            "LangGraph's savers need --python; `make bench-peers` installs one"
        );
        let runtime = Runtime::new()?;
        let servers = cases.iter().any(|case| case.backend.needs_postgres());
        let server = servers.then(Postgres::start_flushing).transpose().map_err(anyhow::Error::from_boxed)?;
        let bar = bar(cases.len())?;
        let mut rows = Vec::new();
        for case in cases {
            bar.set_message(format!("{} {} {} x{}", case.workload, case.backend, case.mode, case.turns));
            let place = Prepared::new(&runtime, &self.scratch, server.as_ref(), case)?;
            let row = self.case(case, &place);
            serde_json::to_writer(&mut out, &row)?;
            out.write_all(b"\n")?;
            out.flush()?;
            rows.push(row);
            bar.inc(1);
        }
        bar.finish_and_clear();
        let failed = rows.iter().filter_map(|row| {
            let error = row.found.error.as_ref()?;
            Some(format!("{} on {} in {}: {error}", row.case.workload, row.case.backend, row.case.mode))
        });
        let problems: Vec<String> = failed.chain(rejected(&rows)).collect();
        ensure!(problems.is_empty(), "these cases do not count:\n{}", problems.join("\n"));
        Ok(rows)
    }

    fn case(&self, case: &Case, place: &Prepared) -> Row {
        let job = |phase| Job {
            case: case.clone(),
            target: place.target.clone(),
            floor_target: place.floor.clone(),
            phase,
        };
        // Writing is capped, and reading may take as long again; after that the process hangs and is killed.
        let patience = Duration::from_secs(2 * case.cap_s + 60);
        let mut row = match process::run(
            &job(Phase::Write),
            self.python.as_deref(),
            place.directory.path(),
            patience,
        ) {
            Ok(row) => row,
            Err(error) => {
                let mut row = Row::new(case.clone());
                row.found.error = Some(format!("{error:#}"));
                return row;
            }
        };
        row.found.at = Some(now());
        if case.threads == 1 && case.backend != Backend::Memory && row.found.error.is_none() {
            let cold = |phase| {
                let run =
                    |_| process::run(&job(phase), self.python.as_deref(), place.directory.path(), patience);
                (0..self.colds).map(run).collect::<Result<Vec<_>>>()
            };
            let delta = row.case.mode != crate::case::Mode::Full && case.backend.kind() != Kind::Raw;
            let result = cold(Phase::ColdHead).and_then(|head| {
                let back = if delta { cold(Phase::ColdBack)? } else { Vec::new() };
                take_cold(&mut row.found, &head, &back);
                Ok(())
            });
            if let Err(error) = result {
                row.found.error = Some(format!("reading in a new process: {error:#}"));
            }
        }
        row
    }
}

/// Sets the medians of what the new processes measured.
fn take_cold(found: &mut Found, heads: &[Row], backs: &[Row]) {
    let typical = |rows: &[Row], field: fn(&Found) -> Option<f64>| {
        let times =
            rows.iter().filter_map(|row| field(&row.found)).map(|ms| Duration::from_secs_f64(ms / 1e3));
        median(times).map(ms)
    };
    found.cold_open_ms = typical(heads, |found| found.cold_open_ms);
    found.cold_head_ms = typical(heads, |found| found.cold_head_ms);
    found.cold_back_ms = typical(backs, |found| found.cold_back_ms);
    // Keep a digest that differs, if there is one.
    let differing = heads.iter().find(|row| row.found.cold_digest != found.digest);
    found.cold_digest = differing.or(heads.first()).and_then(|row| row.found.cold_digest.clone());
}

/// The fresh database of a case; removed on drop.
struct Prepared {
    target: String,
    floor: Option<String>,
    directory: TempDir,
    _databases: Vec<Database>,
}

impl Prepared {
    fn new(runtime: &Runtime, scratch: &Path, server: Option<&Postgres>, case: &Case) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("threadkeep-bench-").tempdir_in(scratch)?;
        let mut databases = Vec::new();
        let mut target = |file: &str| -> Result<String> {
            if !case.backend.needs_postgres() {
                let path = directory.path().join(file);
                return Ok(path.to_str().context("the scratch directory's name is not UTF-8")?.to_owned());
            }
            let server = server.context("no Postgres server was started")?;
            let database = runtime.block_on(server.database()).map_err(anyhow::Error::from_boxed)?;
            let url = database.url().to_owned();
            databases.push(database);
            Ok(url)
        };
        let of_case = target("case.db")?;
        let floor = case.paired.then(|| target("floor.db")).transpose()?;
        Ok(Self { target: of_case, floor, directory, _databases: databases })
    }
}

fn bar(cases: usize) -> Result<ProgressBar> {
    let bar = ProgressBar::with_draw_target(Some(cases as u64), ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template("[{bar:30}] {pos}/{len} {elapsed}, {eta} left  {msg}")?);
    bar.enable_steady_tick(Duration::from_millis(250));
    Ok(bar)
}

/// Seconds since the epoch, as text.
fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_secs().to_string()
}

//! The report of the suite from a command line, for any saver.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser};

use crate::case::{Case, Level};
use crate::factory::{BoxError, Factory};
use crate::report::Report;
use crate::run::run;
use crate::settings::Settings;

/// Which cases to run, and how to report them.
#[derive(Debug, Clone, Args)]
pub struct ReportArguments {
    /// Only cases whose name contains this text.
    #[arg(long, default_value = "")]
    case: String,
    /// Only cases of this level: core, delta, deletion, concurrency or durability.
    #[arg(long, value_parser = level)]
    level: Option<Level>,
    /// The seed of random choices.
    #[arg(long, default_value_t = defaults().seed)]
    seed: u64,
    /// Number of random programs.
    #[arg(long, default_value_t = defaults().programs)]
    programs: u32,
    /// Seconds after which a case that has not ended has failed.
    #[arg(long, default_value_t = defaults().limit.as_secs())]
    limit: u64,
    /// Report as JSON, with every case.
    #[arg(long)]
    json: bool,
    /// Report as the JSON that shields.io shows as a badge.
    #[arg(long, conflicts_with = "json")]
    badge: bool,
}

/// What the variables say; [`ReportArguments::report`] refuses one that is no number.
fn defaults() -> Settings {
    Settings::from_env().unwrap_or_default()
}

fn level(text: &str) -> Result<Level, String> {
    let names = || Level::ALL.map(|level| level.to_string()).join(", ");
    let known = Level::ALL.into_iter().find(|level| level.to_string() == text);
    known.ok_or_else(|| format!("the levels are {}", names()))
}

impl ReportArguments {
    /// Runs the suite on a saver and prints the report. Fails if a case fails; starts a runtime of its own.
    ///
    /// # Errors
    /// If no case is selected, a variable of [`Settings::from_env`] is no number, or the report cannot be printed.
    pub fn report<F: Factory>(&self, factory: F) -> Result<ExitCode, BoxError> {
        Settings::from_env()?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build()?;
        let limit = Duration::from_secs(self.limit);
        let settings = Settings { seed: self.seed, programs: self.programs, limit };
        let wanted = |case: &Case| {
            case.name.contains(&self.case) && self.level.is_none_or(|level| case.level == level)
        };
        let report = runtime.block_on(run(factory, settings, wanted));
        if report.cases.is_empty() {
            return Err("no case has this name and level".into());
        }
        self.print(&report)?;
        Ok(if report.failed().is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn print(&self, report: &Report) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        if self.json {
            writeln!(out, "{:#}", report.to_json())
        } else if self.badge {
            writeln!(out, "{}", report.to_badge())
        } else {
            writeln!(out, "{report}")
        }
    }
}

/// Runs the conformance suite and prints a report. Exits with 1 if a case failed.
#[derive(Parser)]
#[command(name = "report")]
struct Arguments {
    #[command(flatten)]
    report: ReportArguments,
}

/// The report that is asked for, if the first argument of this program is `report`.
pub(crate) fn requested() -> Option<ReportArguments> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    (arguments.first()? == "report").then(|| Arguments::parse_from(arguments).report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_of_some_cases_and_in_one_form() {
        let parsed = |arguments: &[&str]| {
            let arguments = ["report"].iter().chain(arguments);
            Arguments::try_parse_from(arguments).map(|arguments| arguments.report)
        };
        let report = parsed(&["--level", "deletion", "--case", "prune", "--seed", "7", "--json"]).unwrap();
        assert_eq!((report.level, report.case.as_str(), report.seed), (Some(Level::Deletion), "prune", 7));
        assert!(report.json && !report.badge);
        assert!(parsed(&["--json", "--badge"]).is_err());
        let unknown = parsed(&["--level", "none"]).unwrap_err().to_string();
        assert!(
            unknown.contains("the levels are core, delta, deletion, concurrency, durability"),
            "{unknown}"
        );
    }
}

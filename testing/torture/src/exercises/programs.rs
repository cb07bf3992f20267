//! Random programs of saver calls against the naive model: the conformance suite's own case, with different seeds each
//! time.

use anyhow::ensure;
use threadkeep_conformance::savers::{Memory, Postgres, Sqlite};
use threadkeep_conformance::{Report, Settings, Verdict, run as suite};

use crate::exercise::{About, Turn};
use crate::storage::Kind;

/// What it tries, and what each run of it does.
pub const ABOUT: About = About {
    what: "random programs of saver calls; after each call every read equals the naive model's",
    needs: &["programs"],
};

const CASE: &str = "random_programs_agree_with_the_model";

/// Runs some programs.
///
/// # Errors
/// The smallest program on which saver and model differ.
pub async fn run(turn: Turn) -> anyhow::Result<()> {
    crate::vfs::install()?;
    let settings = Settings { seed: turn.seed, programs: 4 * turn.effort, ..Settings::default() };
    let report = match turn.saver {
        Kind::Memory => suite(Memory, settings, |case| case.name == CASE).await,
        Kind::Sqlite => suite(Sqlite, settings, |case| case.name == CASE).await,
        Kind::Postgres => suite(Postgres { pooled: false }, settings, |case| case.name == CASE).await,
    };
    turn.tally.add("programs", settings.programs as usize);
    passed(&report)
}

/// Fails unless the case was run and passed: one that the suite does not have does not fail either.
fn passed(report: &Report) -> anyhow::Result<()> {
    let mut verdicts = report.cases.iter().map(|case| &case.verdict);
    ensure!(verdicts.next() == Some(&Verdict::Passed), "{report}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_that_was_not_run_has_not_passed() {
        let report = Report { saver: "memory", settings: Settings::default(), cases: Vec::new() };
        assert!(passed(&report).is_err());
    }
}

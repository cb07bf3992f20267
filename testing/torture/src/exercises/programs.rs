//! Random programs of saver calls against the naive model: the conformance suite's own case, with different seeds each
//! time.

use anyhow::ensure;
use threadkeep_conformance::savers::{Memory, Postgres, Sqlite};
use threadkeep_conformance::{Settings, run as suite};

use crate::exercise::Turn;
use crate::storage::Kind;

/// What it tries, in one line.
pub const ABOUT: &str = "random programs of saver calls; after each call every read equals the naive model's";

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
    ensure!(report.failed().is_empty(), "{report}");
    Ok(())
}

//! Measures one case, in the process started for it.

mod cold;
mod concurrent;
mod floor;
mod reads;
mod single;

use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::case::{Case, Kind};
use crate::row::{Found, Row};

/// What a process was started for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// The case.
    pub case: Case,
    /// The file or URL of the database.
    pub target: String,
    /// The database of the raw store of a paired case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor_target: Option<String>,
    /// The part of the case to measure.
    pub phase: Phase,
}

/// A part of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Writing, and reading in the same process.
    Write,
    /// Reading the head in a new process.
    ColdHead,
    /// Reading the checkpoint before the head in a new process.
    ColdBack,
}

/// Runs a job. `report` receives the row repeatedly as it fills; the last call wins, so a killed process still leaves
/// what it had measured.
///
/// # Errors
/// The store's.
pub async fn measure(job: &Job, mut report: impl FnMut(&Row)) -> Result<()> {
    let mut row = Row::new(job.case.clone());
    match (job.phase, job.case.backend.kind()) {
        (Phase::Write, Kind::Raw) => floor::write(job, &mut row, &mut report).await?,
        (Phase::ColdHead | Phase::ColdBack, Kind::Raw) => floor::cold(job, &mut row.found).await?,
        (Phase::Write, _) if job.case.threads > 1 => concurrent::write(job, &mut row, &mut report).await?,
        (Phase::Write, _) => single::write(job, &mut row, &mut report).await?,
        (Phase::ColdHead | Phase::ColdBack, _) => cold::read(job, &mut row.found).await?,
    }
    report(&row);
    Ok(())
}

/// Milliseconds, to a tenth of a microsecond.
pub fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e7).round() / 1e4
}

/// Seconds, to a millisecond.
pub fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e3).round() / 1e3
}

/// The value below which the given percentage of `sorted` lies; `None` if it is empty.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an index"
)]
pub fn percentile(sorted: &[Duration], percent: f64) -> Option<Duration> {
    let last = sorted.len().checked_sub(1)?;
    sorted.get(((last as f64) * percent / 100.0).round() as usize).copied()
}

/// The median; `None` if there are no times.
pub fn median(times: impl IntoIterator<Item = Duration>) -> Option<Duration> {
    let mut times: Vec<Duration> = times.into_iter().collect();
    times.sort_unstable();
    percentile(&times, 50.0)
}

/// What is known about the turns of a case, for the row.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    pub(crate) wall: Vec<Duration>,
    pub(crate) cpu: Vec<Duration>,
}

/// The turns around the twentieth, and as many at the end, whose CPU time is compared.
const WINDOW: std::ops::Range<usize> = 10..30;

impl Turns {
    pub(crate) fn describe(&self, found: &mut Found) {
        let tenth = (self.wall.len() / 10).max(1).min(self.wall.len());
        let mut sorted = self.wall.clone();
        sorted.sort_unstable();
        let at = |percent| percentile(&sorted, percent).map(ms);
        found.turns_done = Some(self.wall.len() as u64);
        found.turn_p50_ms = at(50.0);
        found.turn_p99_ms = at(99.0);
        found.turn_first10pct_ms = median(self.wall[..tenth].iter().copied()).map(ms);
        found.turn_last10pct_ms = median(self.wall[self.wall.len() - tenth..].iter().copied()).map(ms);
        found.turn_sum_s = Some(seconds(self.wall.iter().sum()));
        let percents = [1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9, 100.0];
        found.percentiles = percents.into_iter().filter_map(|p| Some((p, at(p)?))).collect();
        if let Some(early) = self.cpu.get(WINDOW) {
            found.cpu_turn_at20_ms = median(early.iter().copied()).map(ms);
            found.cpu_turn_end_ms = median(self.cpu[self.cpu.len() - WINDOW.len()..].iter().copied()).map(ms);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_sorted_times() {
        let times: Vec<Duration> = (1..=101).map(Duration::from_millis).collect();
        for (percent, expected) in [(0.0, 1), (50.0, 51), (99.0, 100), (100.0, 101)] {
            assert_eq!(percentile(&times, percent), Some(Duration::from_millis(expected)));
        }
        assert_eq!((percentile(&[], 50.0), median([])), (None, None));
        assert_eq!(median(times.into_iter().rev()), Some(Duration::from_millis(51)));
    }

    #[test]
    fn the_first_and_the_last_tenth_are_told_apart() {
        let wall: Vec<Duration> =
            (0..100).map(|n| Duration::from_millis(if n < 50 { 1 } else { 7 })).collect();
        let (cpu, mut found) = (wall.clone(), Found::default());
        Turns { wall, cpu }.describe(&mut found);
        assert_eq!((found.turn_first10pct_ms, found.turn_last10pct_ms), (Some(1.0), Some(7.0)));
        assert_eq!((found.cpu_turn_at20_ms, found.cpu_turn_end_ms), (Some(1.0), Some(7.0)));
        assert_eq!((found.turns_done, found.turn_sum_s), (Some(100), Some(0.4)));
        let mut short = Found::default();
        Turns { wall: vec![Duration::from_millis(2)], cpu: Vec::new() }.describe(&mut short);
        assert_eq!((short.turn_p99_ms, short.cpu_turn_at20_ms), (Some(2.0), None));
    }
}

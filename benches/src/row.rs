//! The result of a case: one line of JSON. The README describes the fields.

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use crate::case::Case;

/// The row format's version.
pub const VERSION: u32 = 1;

/// One line of results. What was not measured is omitted.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    /// [`VERSION`].
    pub v: u32,
    /// The case.
    #[serde(flatten)]
    pub case: Case,
    /// The results.
    #[serde(flatten)]
    pub found: Found,
}

/// What was measured. Times end in `_ms` or `_s`, sizes are bytes.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs, reason = "the README has the table of the fields")]
pub struct Found {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settings: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layout: Option<String>,
    // Writing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub turns_done: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoints: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flushes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub raw_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub turn_p50_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub turn_p99_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub turn_first10pct_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub turn_last10pct_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub turn_sum_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wall_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_cpu_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_p50_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub floor_step_p50_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_turn_at20_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_turn_end_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_cpu_turn_at20_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_cpu_turn_end_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub turns_per_s: Option<f64>,
    // Size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rss_base: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rss_peak: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rss_peak_all: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_open: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_closed: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_write_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wal_bytes: Option<u64>,
    // Reading.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub messages: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub back_digest: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ok: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_warm_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_state_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_kept_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub back_warm_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub list10_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub list50_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub list100_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub list200_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub list100_state_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub list100_old_state_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cold_open_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cold_head_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cold_back_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cold_digest: Option<String>,
    // Curves.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub curve: Vec<Point>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub percentiles: Vec<(f64, f64)>,
    // How it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capped: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The turns since the previous point, up to `turn`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Turns done at its end.
    pub turn: u64,
    /// The median turn of the stretch, wall time.
    pub ms: f64,
    /// The median turn of the stretch, CPU time of the process.
    #[serde(default)]
    pub cpu_ms: f64,
    /// Bytes of the store at its end.
    pub bytes: u64,
    /// Bytes of all new messages so far.
    pub raw_bytes: u64,
}

impl Row {
    /// A row without results.
    pub fn new(case: Case) -> Self {
        Self { v: VERSION, case, found: Found::default() }
    }
}

/// Parses rows, one per line.
///
/// # Errors
/// Names the first line that is not a row of this version.
pub fn parse(text: &str) -> Result<Vec<Row>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(number, line)| {
            let row: Row = serde_json::from_str(line).with_context(|| format!("line {}", number + 1))?;
            if row.v != VERSION {
                bail!("line {}: row version {} is not supported, only {VERSION}", number + 1, row.v);
            }
            Ok(row)
        })
        .collect()
}

/// The problems with final states: each row whose state differs from its script's, or from that of another store or
/// mode after the same turns. Empty if all agree.
pub fn rejected(rows: &[Row]) -> Vec<String> {
    let mut reasons = Vec::new();
    for (number, row) in rows.iter().enumerate() {
        let (case, found) = (&row.case, &row.found);
        let name = format!("{} on {} in {}, {} turns", case.workload, case.backend, case.mode, case.turns);
        if found.ok == Some(false) {
            reasons.push(format!("{name}: the state differs from what was written"));
        }
        if found.cold_digest.is_some() && found.cold_digest != found.digest {
            reasons.push(format!("{name}: a new process reads a different state than the writer"));
        }
        let same = |other: &&Row| {
            let (a, b) = (&other.case, case);
            (a.workload, a.size, a.seed, a.threads) == (b.workload, b.size, b.seed, b.threads)
                && other.found.turns_done == found.turns_done
                && other.found.digest.is_some()
        };
        if found.digest.is_some()
            && let Some(other) = rows[..number].iter().find(same)
        {
            let with = format!("{} in {}", other.case.backend, other.case.mode);
            if other.found.digest != found.digest {
                reasons.push(format!("{name}: the state differs from that of {with}"));
            }
            // The Python savers store another checkpoint before the head.
            let both = other.found.back_digest.is_some() && found.back_digest.is_some();
            if both && other.found.back_digest != found.back_digest {
                reasons.push(format!("{name}: the state before the head differs from that of {with}"));
            }
        }
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Backend, Each, Mode};
    use crate::workload::Workload;

    fn row(backend: Backend, mode: Mode, digest: &str) -> Row {
        let case = Case {
            workload: Workload::Lean,
            backend,
            mode,
            turns: 10,
            size: 128,
            threads: 1,
            writers: 1,
            seed: 0,
            rep: 0,
            cap_s: 10,
            paired: false,
            flush: Each::Step,
        };
        let mut row = Row::new(case);
        row.found.turns_done = Some(10);
        row.found.digest = Some(digest.to_owned());
        row
    }

    #[test]
    fn states_that_differ_between_stores_or_modes_are_rejected() {
        let alike = [row(Backend::Sqlite, Mode::Full, "a"), row(Backend::Memory, Mode::Delta(10), "a")];
        assert_eq!(rejected(&alike), Vec::<String>::new());
        let other = [row(Backend::Sqlite, Mode::Full, "a"), row(Backend::Sqlite, Mode::Delta(10), "b")];
        assert_eq!(
            rejected(&other),
            ["lean on sqlite in delta:10, 10 turns: the state differs from that of sqlite in full"]
        );
        let mut back = alike.clone();
        back[0].found.back_digest = Some("c".to_owned());
        back[1].found.back_digest = Some("d".to_owned());
        assert_eq!(rejected(&back).len(), 1);
    }

    #[test]
    fn a_state_that_is_not_the_scripts_or_not_the_same_when_read_cold_is_rejected() {
        let mut rows = [row(Backend::Sqlite, Mode::Full, "a")];
        rows[0].found.ok = Some(false);
        assert_eq!(rejected(&rows).len(), 1);
        rows[0].found.ok = Some(true);
        rows[0].found.cold_digest = Some("b".to_owned());
        assert_eq!(rejected(&rows).len(), 1);
    }

    #[test]
    fn cases_that_are_about_other_turns_are_not_compared() {
        let mut rows = [row(Backend::Sqlite, Mode::Full, "a"), row(Backend::Sqlite, Mode::Delta(10), "b")];
        rows[1].found.turns_done = Some(9);
        assert_eq!(rejected(&rows), Vec::<String>::new());
        rows[1].found.turns_done = Some(10);
        rows[1].case.seed = 1;
        assert_eq!(rejected(&rows), Vec::<String>::new());
    }

    #[test]
    fn a_row_survives_its_line_and_another_version_is_refused() {
        let mut row = row(Backend::Postgres, Mode::Delta(10), "a");
        row.found.percentiles = vec![(50.0, 1.5), (99.0, 3.0)];
        row.found.curve = vec![Point { turn: 5, ms: 1.0, cpu_ms: 0.5, bytes: 7, raw_bytes: 3 }];
        let line = serde_json::to_string(&row).unwrap();
        assert!(!line.contains("null"), "{line}");
        let back = &parse(&format!("{line}\n\n")).unwrap()[0];
        assert_eq!(serde_json::to_string(back).unwrap(), line);
        let newer = line.replacen("\"v\":1", "\"v\":2", 1);
        assert!(parse(&newer).unwrap_err().to_string().starts_with("line 1: row version 2"));
    }
}

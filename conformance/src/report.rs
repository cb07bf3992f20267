//! The result of a run of the suite, as text and as JSON.

use std::fmt;
use std::time::Duration;

use serde_json::{Value as Json, json};

use crate::case::{Case, Level};
use crate::settings::Settings;

/// How a case ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The saver does what the case requires.
    Passed,
    /// It does not; what was observed, and where.
    Failed(String),
    /// The case was not run: the saver or its factory does not offer what it needs.
    NotClaimed,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Passed => "passed",
            Self::Failed(_) => "failed",
            Self::NotClaimed => "not claimed",
        })
    }
}

/// A case, and how it ended.
#[derive(Debug, Clone)]
pub struct CaseReport {
    /// The case.
    pub case: Case,
    /// How it ended.
    pub verdict: Verdict,
    /// How long it took; nothing if it was not run.
    pub took: Duration,
}

/// The result of a run of the suite. Displayed as tables; [`Self::to_json`] is machine-readable.
#[derive(Debug, Clone)]
pub struct Report {
    /// The name of the factory.
    pub saver: &'static str,
    /// The settings of the run.
    pub settings: Settings,
    /// Each selected case, in the order of [`crate::cases`].
    pub cases: Vec<CaseReport>,
}

impl Report {
    /// The names of the cases that failed.
    pub fn failed(&self) -> Vec<&'static str> {
        let failed = self.cases.iter().filter(|report| matches!(report.verdict, Verdict::Failed(_)));
        failed.map(|report| report.case.name).collect()
    }

    /// As JSON: an object with `saver`, `seed`, `programs`, the numbers `passed`, `failed` and `not_claimed`, and
    /// `cases`, each with `name`, `level`, `verdict` and `why`; one that was run with `seconds`, one that failed with
    /// `failure`, and one that needs a claim with `needs`.
    pub fn to_json(&self) -> Json {
        let case = |CaseReport { case, verdict, took }: &CaseReport| {
            let mut json = json!({
                "name": case.name,
                "level": case.level.to_string(),
                "verdict": verdict.to_string(),
                "why": case.why,
            });
            if let Some(claim) = case.needs {
                json["needs"] = claim.to_string().into();
            }
            if *verdict != Verdict::NotClaimed {
                json["seconds"] = took.as_secs_f64().into();
            }
            if let Verdict::Failed(what) = verdict {
                json["failure"] = what.clone().into();
            }
            json
        };
        let [passed, failed, not_claimed] = self.counts(|_| true);
        json!({
            "saver": self.saver,
            "seed": self.settings.seed,
            "programs": self.settings.programs,
            "passed": passed,
            "failed": failed,
            "not_claimed": not_claimed,
            "cases": self.cases.iter().map(case).collect::<Vec<_>>(),
        })
    }

    /// As the JSON that shields.io shows as a badge: how many of the claimed cases passed.
    pub fn to_badge(&self) -> Json {
        let [passed, failed, _] = self.counts(|_| true);
        json!({
            "schemaVersion": 1,
            "label": "threadkeep conformance",
            "message": format!("{passed} of {}", passed + failed),
            "color": if failed == 0 { "brightgreen" } else { "red" },
        })
    }

    /// How many passed, failed and were not claimed, among the cases that `of` selects.
    fn counts(&self, of: impl Fn(&Case) -> bool) -> [usize; 3] {
        let mut counts = [0; 3];
        for CaseReport { verdict, .. } in self.cases.iter().filter(|report| of(&report.case)) {
            counts[match verdict {
                Verdict::Passed => 0,
                Verdict::Failed(_) => 1,
                Verdict::NotClaimed => 2,
            }] += 1;
        }
        counts
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.cases.iter().map(|report| report.case.name.len()).max().unwrap_or(0);
        let level = Level::ALL.iter().map(|level| level.to_string().len()).max().unwrap_or(0);
        for CaseReport { case, verdict, .. } in &self.cases {
            write!(f, "{:level$}  {:width$}  ", case.level, case.name)?;
            match (verdict, case.needs) {
                (Verdict::Failed(what), _) => {
                    writeln!(f, "FAILED\n    otherwise {}\n    {what}", case.why)?;
                    writeln!(f, "    again: case {}, PROPTEST_RNG_SEED={}", case.name, self.settings.seed)?;
                }
                (Verdict::NotClaimed, Some(claim)) => writeln!(f, "not claimed: {claim}")?,
                (verdict, _) => writeln!(f, "{verdict}")?,
            }
        }
        writeln!(f)?;
        for of in Level::ALL {
            let [passed, failed, not_claimed] = self.counts(|case| case.level == of);
            if passed + failed + not_claimed > 0 {
                writeln!(
                    f,
                    "{of:level$}  {passed:4} passed  {failed:4} failed  {not_claimed:4} not claimed"
                )?;
            }
        }
        let [passed, failed, not_claimed] = self.counts(|_| true);
        let Settings { seed, programs, .. } = self.settings;
        write!(
            f,
            "{}: {passed} passed, {failed} failed, {not_claimed} not claimed (seed {seed}, {programs} programs)",
            self.saver
        )
    }
}

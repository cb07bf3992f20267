//! The verdict on acceptance criteria, and how it reads.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::criteria::MAX_CRITERIA;
use crate::bounds::{first, one_line};

const SOURCE: &str = "acceptance_checklist";
const REQUIREMENT: &str = "delegation_acceptance_criteria";
/// The maximum length of a detail, in characters.
const DETAIL_MAX_CHARS: usize = 160;
/// The service reference, "Acceptance criteria", has this text.
const HEADING: &str = "Acceptance checklist (deterministic checks; execution evidence only, does not validate claim \
                       correctness):";
/// What a ledger says after the counts (service reference, "Acceptance criteria").
const LIMITS: &str = " \u{2014} execution evidence only, does not validate claim correctness";

/// What kind of check a criterion asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// A file exists.
    FileExists,
    /// A file is not empty.
    FileNonEmpty,
    /// A file was written and can be read.
    FileWritten,
    /// A command ran the tests, and they passed.
    TestsPassed,
    /// Nothing that can be checked without judgement.
    Undecidable,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finding {
    /// The criterion holds.
    Holds(String),
    /// It does not.
    DoesNotHold(String),
    /// It was not decided.
    Unchecked(String),
}

/// One criterion and its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leaf {
    /// The criterion.
    pub criterion: String,
    /// What kind of check it asks for.
    pub family: Family,
    /// Whether it was decided; if not, it neither holds nor does not.
    pub checked: bool,
    /// Whether it holds; never true if it was not decided.
    pub holds: bool,
    /// What was found.
    pub detail: String,
}

/// The results of all criteria of a delegation: `subagent_acceptance_verdict` (service reference, "Acceptance
/// criteria").
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptanceVerdict {
    source: String,
    requirement: String,
    /// The results, in the order of the criteria.
    pub leaves: Vec<Leaf>,
    /// The criteria that were not decided.
    pub unchecked: Vec<String>,
    /// Whether every criterion was decided and holds.
    pub all_hold: bool,
}

impl Leaf {
    /// The result of `criterion`.
    pub fn new(criterion: impl Into<String>, family: Family, finding: Finding) -> Self {
        let (checked, holds, detail) = match finding {
            Finding::Holds(detail) => (true, true, detail),
            Finding::DoesNotHold(detail) => (true, false, detail),
            Finding::Unchecked(detail) => (false, false, detail),
        };
        Self { criterion: criterion.into(), family, checked, holds, detail: short(&detail) }
    }

    /// `holds`, `does not hold` or `UNVERIFIED`.
    pub fn mark(&self) -> &'static str {
        match (self.checked, self.holds) {
            (true, true) => "holds",
            (true, false) => "does not hold",
            (false, _) => "UNVERIFIED",
        }
    }

    /// The result on one line, whatever the criterion contains: a criterion with a newline must not look like two.
    fn line(&self) -> String {
        format!("- [{}] {} \u{2014} {}", self.mark(), one_line(&self.criterion), one_line(&self.detail))
    }

    fn is_consistent(&self) -> bool {
        (self.checked || !self.holds) && self.detail.chars().count() <= DETAIL_MAX_CHARS
    }
}

impl AcceptanceVerdict {
    /// The verdict with these results.
    pub fn new(leaves: Vec<Leaf>) -> Self {
        let unchecked =
            leaves.iter().filter(|leaf| !leaf.checked).map(|leaf| leaf.criterion.clone()).collect();
        Self {
            source: SOURCE.to_owned(),
            requirement: REQUIREMENT.to_owned(),
            all_hold: leaves.iter().all(|leaf| leaf.checked && leaf.holds),
            unchecked,
            leaves,
        }
    }

    /// A stored verdict; `None` if it is malformed or contradicts itself.
    pub fn from_json(stored: &Value) -> Option<Self> {
        let verdict = Self::deserialize(stored).ok()?;
        let count = verdict.leaves.len();
        let valid = (1..=MAX_CRITERIA).contains(&count) && verdict.leaves.iter().all(Leaf::is_consistent);
        (valid && verdict == Self::new(verdict.leaves.clone())).then_some(verdict)
    }

    /// The section that the text of a result ends with.
    pub fn section(&self) -> String {
        let lines: Vec<String> = self.leaves.iter().map(Leaf::line).collect();
        format!("{HEADING}\n{}", lines.join("\n"))
    }

    /// The counts in a ledger's entry.
    pub fn ledger_text(&self) -> String {
        let count = |mark: &str| self.leaves.iter().filter(|leaf| leaf.mark() == mark).count();
        let counts = [("holds", "hold"), ("does not hold", "does not hold"), ("UNVERIFIED", "UNVERIFIED")];
        let counted =
            counts.into_iter().map(|(mark, word)| (count(mark), word)).filter(|(count, _)| *count > 0);
        let texts: Vec<String> = counted.map(|(count, word)| format!("{count} {word}")).collect();
        format!("acceptance: {}{LIMITS}", texts.join(", "))
    }

    /// The first criterion that does not hold, and the first that was not decided: what a ledger keeps as examples.
    pub fn gaps(&self) -> impl Iterator<Item = &Leaf> {
        let find = |mark: &'static str| self.leaves.iter().find(move |leaf| leaf.mark() == mark);
        find("does not hold").into_iter().chain(find("UNVERIFIED"))
    }
}

/// A detail on one line, cut.
fn short(detail: &str) -> String {
    let detail = one_line(detail);
    if detail.chars().count() <= DETAIL_MAX_CHARS {
        return detail;
    }
    format!("{}...", first(&detail, DETAIL_MAX_CHARS - 3))
}

//! Finds citations: `[r7]`, or anchored to a tool, `[r7 bash]`.

use std::collections::HashSet;
use std::sync::LazyLock;

use regex::Regex;

/// The maximum number of digits of an id; a longer one is no citation.
const MAX_DIGITS: usize = 10;

/// One citation of a receipt.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Citation {
    /// The receipt's number.
    pub number: u64,
    /// The tool that the report says it is of.
    pub anchor: Option<String>,
}

impl Citation {
    /// The id of the receipt, without leading zeros.
    pub fn id(&self) -> String {
        format!("r{}", self.number)
    }
}

/// The citations of a report, each pair of id and anchor once, in the order in which they appear.
pub fn cited(report: &str) -> Vec<Citation> {
    #[allow(clippy::unwrap_used, reason = "a constant pattern")]
    static CITATION: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"\[r([0-9]+)(?:[ \t]+([\p{L}_][\w.\-]*))?\]").unwrap());
    let mut seen = HashSet::new();
    let mut found = Vec::new();
    for capture in CITATION.captures_iter(report) {
        let number = Some(&capture[1]).filter(|digits| digits.len() <= MAX_DIGITS);
        let Some(number) = number.and_then(|digits| digits.parse().ok()) else { continue };
        let anchor = capture.get(2).map(|anchor| anchor.as_str().to_owned());
        let citation = Citation { number, anchor };
        if seen.insert(citation.clone()) {
            found.push(citation);
        }
    }
    found
}

//! The bodies of fuzz targets: texts that the models of subagents write. They accept any bytes, must not panic, and assert
//! invariants.

use serde_json::json;

use crate::citations::{CitationVerdict, cited};

/// A command line and the criterion that it is compared with, separated by a NUL.
pub fn command_line(data: &[u8]) {
    crate::acceptance::command_line(data);
}

/// A report with citations.
///
/// # Panics
/// If a citation is not in the report, or its verdict is not the one that is read back.
pub fn citations(data: &[u8]) {
    let report = String::from_utf8_lossy(data);
    let citations = cited(&report);
    assert!(citations.len() <= report.matches("[r").count());
    for citation in &citations {
        assert!(report.contains(&citation.number.to_string()), "{citation:?}");
        assert!(citation.anchor.as_ref().is_none_or(|anchor| report.contains(anchor.as_str())));
    }
    // Without receipts, all are unknown.
    let verdict = CitationVerdict::of(&report, &[]);
    assert_eq!(verdict.unknown.len(), citations.len());
    assert!(citations.is_empty() || !verdict.citation_resolved);
    assert_eq!(CitationVerdict::from_json(&json!(verdict)), Some(verdict));
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpus_of_command_lines_is_harmless() {
        for input in threadkeep_testing::corpus("command_line").unwrap() {
            super::command_line(&input);
        }
    }

    #[test]
    fn the_corpus_of_citations_is_harmless() {
        for input in threadkeep_testing::corpus("citations").unwrap() {
            super::citations(&input);
        }
    }
}

use proptest::prelude::*;
use serde_json::{Value, json};
use threadkeep_agent::receipts::{Receipt, ReceiptStatus, Stamp};

use super::*;

fn receipt(number: u64, tool: &str, status: ReceiptStatus) -> Receipt {
    let stamp = Stamp {
        tool_call_id: "c".to_owned(),
        tool_name: tool.to_owned(),
        status,
        args_sha256: "0".repeat(16),
        output_sha256: "0".repeat(16),
        output_bytes: 0,
        created_at: "1970-01-01T00:00:00+00:00".to_owned(),
    };
    Receipt { number, stamp }
}

/// r1 to r3: a success, a failure, a part of a success.
fn three() -> Vec<Receipt> {
    vec![
        receipt(1, "bash", ReceiptStatus::Success),
        receipt(2, "write_file", ReceiptStatus::Error),
        receipt(3, "mcp.fetch-url", ReceiptStatus::PartialSuccess),
    ]
}

fn ids(report: &str) -> Vec<String> {
    cited(report)
        .into_iter()
        .map(|citation| match citation.anchor {
            Some(ref anchor) => format!("{} {anchor}", citation.id()),
            None => citation.id(),
        })
        .collect()
}

/// Scenario 30 and bug 24, of the parser.
#[test]
fn only_ids_and_anchored_ids_are_citations() {
    assert_eq!(
        ids("a [r1], [r2 bash] and [r1] again, [r1 bash], [r007]"),
        ["r1", "r2 bash", "r1 bash", "r7"]
    );
    assert_eq!(
        ids("[r1 mcp.fetch-url] [r1 _x] [r1 \u{e9}t\u{e9}]"),
        ["r1 mcp.fetch-url", "r1 _x", "r1 \u{e9}t\u{e9}"]
    );
    assert_eq!(ids("[r0]"), ["r0"]);
    assert_eq!(ids("[r9999999999]"), ["r9999999999"]);
    for none in [
        "[r]",
        "[1]",
        "[R1]",
        "[ r1]",
        "[r1 ]",
        "[r1 two words]",
        "[r1 9x]",
        "[r1,r2]",
        "[r-1]",
        "r1",
        "[r1\nbash]",
    ] {
        assert_eq!(ids(none), [] as [&str; 0], "{none}");
    }
    assert_eq!(ids("[r12345678901] [r00000000001]"), [] as [&str; 0], "more than 10 digits");
    assert_eq!(ids(&format!("[r{}]", "9".repeat(30))), [] as [&str; 0]);
}

/// Scenario 30.
#[test]
fn a_citation_is_resolved_unknown_or_failed() {
    let of = |report: &str| {
        let verdict = CitationVerdict::of(report, &three());
        let failed: Vec<String> = verdict.failed.iter().map(|f| format!("{} {}", f.id, f.reason)).collect();
        (verdict.citation_resolved, verdict.resolved, failed, verdict.unknown)
    };
    let none = Vec::<String>::new;
    assert_eq!(of("did it [r1]"), (true, vec!["r1".into()], none(), none()));
    assert_eq!(of("did it [r1 bash]"), (true, vec!["r1".into()], none(), none()));
    assert_eq!(of("did it [r4]"), (false, none(), none(), vec!["r4".into()]));
    assert_eq!(of("did it [r0]"), (false, none(), none(), vec!["r0".into()]));
    assert_eq!(of("did it [r2]"), (false, none(), vec!["r2 receipt status=error".into()], none()));
    assert_eq!(of("did it [r3]"), (false, none(), vec!["r3 receipt status=partial_success".into()], none()));
    assert_eq!(
        of("did it [r1 ls]"),
        (false, none(), vec!["r1 cited as ls, receipt is of bash".into()], none())
    );
    assert_eq!(of("[r1] and [r001] and [r1]"), (true, vec!["r1".into()], none(), none()), "once each");
    let verdict = CitationVerdict::of(&format!("[r1] [r{}]", "1".repeat(30)), &three());
    assert_eq!((verdict.citation_resolved, verdict.cited), (true, vec!["r1".to_owned()]));
}

/// Scenario 31.
#[test]
fn claims_without_a_citation_are_noticed() {
    let claims = |report: &str, receipts: &[Receipt]| {
        let verdict = CitationVerdict::of(report, receipts);
        assert_eq!(verdict.citation_resolved, !verdict.no_citation_claims, "{report}");
        verdict.no_citation_claims
    };
    for claim in [
        "I created the page",
        "Tests RAN",
        "see src/lib.rs",
        "see notes.md",
        "\u{5df2}\u{4fee}\u{6539}\u{914d}\u{7f6e}",
        // Words of other alphabets follow those of these without a space.
        "\u{6211}created\u{4e86}\u{9875}\u{9762}",
        "\u{7ed3}\u{679c}\u{5728}notes.md\u{91cc}",
        "notes.md\u{306b}\u{3042}\u{308b}",
        "\u{d398}\u{c774}\u{c9c0}\u{b97c} created\u{d588}\u{b2e4}",
    ] {
        assert!(claims(claim, &[]), "{claim}");
        assert!(claims(claim, &three()), "{claim}");
    }
    for nothing in ["OK", "", "The answer is 42.", "Prerandomized, i.e. not.", "T\u{e9}h\u{e9}ran"] {
        assert!(!claims(nothing, &[]) && !claims(nothing, &three()), "{nothing}");
    }
    let neutral =
        |count: usize| format!(" {}\n", "so-it-is;".repeat(30).chars().take(count).collect::<String>());
    assert!(claims(&neutral(240), &three()));
    assert!(!claims(&neutral(239), &three()));
    assert!(!claims(&neutral(240), &[]), "there was nothing to cite");
    let unknown = CitationVerdict::of("I created it [r9]", &three());
    assert!(!unknown.no_citation_claims && !unknown.citation_resolved, "it cites, though an unknown id");
}

#[test]
fn a_ledger_shows_counts_or_the_missing_citations_or_nothing() {
    let text = |report: &str| CitationVerdict::of(report, &three()).ledger_text();
    assert_eq!(text("OK"), None);
    assert_eq!(
        text("I created it").as_deref(),
        Some("citations: UNVERIFIED \u{2014} action claims without receipt citations")
    );
    let limits = "execution evidence only, does not validate claim correctness";
    assert_eq!(text("[r1]"), Some(format!("citations: 1 resolved \u{2014} {limits}")));
    assert_eq!(
        text("[r1] [r2] [r3] [r9]"),
        Some(format!("citations: 1 resolved, 2 failed, 1 unknown \u{2014} {limits}"))
    );
    assert_eq!(text("[r9]"), Some(format!("citations: 0 resolved, 1 unknown \u{2014} {limits}")));
}

#[test]
fn no_text_says_more_than_the_evidence() {
    for report in ["[r1]", "[r1] [r2] [r9]", "I created it"] {
        let text = CitationVerdict::of(report, &three()).ledger_text().unwrap().to_lowercase();
        for word in [" verified", "passed", "satisfied"] {
            assert!(!text.contains(word), "{text}");
        }
    }
}

#[test]
fn a_stored_verdict_is_read_back_or_refused_whole() {
    let verdict = CitationVerdict::of("[r1] [r2] [r9]", &three());
    let stored = json!(verdict);
    assert_eq!(
        stored,
        json!({
            "source": "receipt_citations", "requirement": "cited_ids_in_execution_record",
            "citation_resolved": false, "cited": ["r1", "r2", "r9"], "resolved": ["r1"],
            "failed": [{"id": "r2", "reason": "receipt status=error"}], "unknown": ["r9"],
            "no_citation_claims": false,
        })
    );
    assert_eq!(CitationVerdict::from_json(&stored), Some(verdict));
    for (field, value) in [
        ("citation_resolved", json!(true)),
        ("citation_resolved", json!("false")),
        ("source", json!("me")),
        ("requirement", json!("none")),
        ("resolved", json!(["r1", "r2"])),
        ("unknown", json!([])),
        ("unknown", json!([9])),
        ("failed", json!(["r2"])),
        ("no_citation_claims", json!(true)),
        ("cited", Value::Null),
    ] {
        let mut changed = stored.clone();
        changed[field] = value;
        assert_eq!(CitationVerdict::from_json(&changed), None, "{changed}");
    }
}

proptest! {
    /// The parser is total and bounded by the text; the verdict accounts for each citation and survives storage.
    #[test]
    fn every_report_has_one_consistent_verdict(report in r"(?s)(\[r[0-9]{0,12}( [a-z_.\-]{0,8})?\]|.){0,200}") {
        let citations = cited(&report);
        prop_assert!(citations.len() <= report.len() / 4);
        let verdict = CitationVerdict::of(&report, &three());
        prop_assert_eq!(verdict.cited.len(), citations.len());
        prop_assert_eq!(CitationVerdict::from_json(&json!(verdict)), Some(verdict));
    }
}

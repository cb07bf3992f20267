use chrono::DateTime;
use proptest::prelude::*;
use serde_json::json;
use threadkeep_agent::receipts::{ledger, stamp};
use threadkeep_agent::tools::ToolStatus;

use super::*;
use crate::acceptance::{Family, Finding, Leaf};

fn completed(text: &str) -> TaskOutcome {
    TaskOutcome::new(Ending::Completed(Report { text: text.to_owned(), ..Report::default() }))
}

fn receipts(count: usize) -> Vec<Receipt> {
    let call = json!({"id": "c", "name": "ls", "args": {}});
    let mut result = json!({"type": "tool", "content": "a"});
    stamp(&mut result, &call, ToolStatus::Success, DateTime::UNIX_EPOCH);
    ledger(&vec![result; count])
}

#[test]
fn the_text_of_each_ending_is_the_fixed_one() {
    let error = |text: &str| Some(text.to_owned());
    let (turns, tokens, calls) = (StopReason::TurnCapped, StopReason::TokenCapped, StopReason::LoopCapped);
    for (ending, stop_reason, expected) in [
        (completed("All done.").ending, None, "Task Succeeded. Result: All done."),
        (completed("Half.").ending, Some(tokens), "Task Succeeded (capped: token budget). Result: Half."),
        (Ending::Failed { error: None }, None, "Task failed."),
        (Ending::Failed { error: error(" ") }, None, "Task failed."),
        (Ending::Failed { error: error("It broke") }, None, "Task failed. Error: It broke"),
        (Ending::Failed { error: None }, Some(turns), "Task failed (capped: turn budget)."),
        (
            Ending::Failed { error: error("Reached max_turns=3") },
            Some(calls),
            "Task failed (capped: repeated tool-call loop). Error: Reached max_turns=3",
        ),
        (Ending::Cancelled { error: None }, None, "Task cancelled by user."),
        (
            Ending::Cancelled { error: error("Cancelled by user") },
            None,
            "Task cancelled by user. Error: Cancelled by user",
        ),
        (Ending::TimedOut { error: None }, None, "Task timed out."),
        (
            Ending::TimedOut { error: error("Execution timed out after 5 seconds") },
            None,
            "Task timed out. Error: Execution timed out after 5 seconds",
        ),
        (
            Ending::PollingTimedOut {
                timeout: Duration::from_secs(1_859),
                execution_status: "running".to_owned(),
            },
            None,
            "Task polling timed out after 30 minutes. This may indicate the background task is stuck. Status: running",
        ),
    ] {
        let outcome = TaskOutcome { stop_reason, ..TaskOutcome::new(ending) };
        assert_eq!(outcome.text(), expected);
    }
}

#[test]
fn a_checklist_follows_the_result_after_a_blank_line() {
    let verdict = AcceptanceVerdict::new(vec![Leaf::new(
        "file:a exists",
        Family::FileExists,
        Finding::Holds("exists, 3 bytes".to_owned()),
    )]);
    let report = Report { text: "Done.".to_owned(), citations: None, acceptance: Some(verdict) };
    assert_eq!(
        TaskOutcome::new(Ending::Completed(report)).text(),
        "Task Succeeded. Result: Done.\n\nAcceptance checklist (deterministic checks; execution evidence only, does \
         not validate claim correctness):\n- [holds] file:a exists \u{2014} exists, 3 bytes"
    );
}

/// What is longer than the tool's output may be is cut at its end. A report could show a checklist of its own there.
#[test]
fn a_long_report_is_cut_before_its_checklist() {
    let finding = Finding::DoesNotHold("file does not exist".to_owned());
    let verdict = AcceptanceVerdict::new(vec![Leaf::new("file:a exists", Family::FileExists, finding)]);
    let of = |length: usize| {
        let text = "\u{e9}".repeat(length);
        let report = Report { text, citations: None, acceptance: Some(verdict.clone()) };
        TaskOutcome::new(Ending::Completed(report)).text()
    };
    let (head, end) = ("Task Succeeded. Result: ", format!("\n\n{}", verdict.section()));
    let room = TEXT_MAX - head.len() - end.chars().count();
    assert_eq!(of(room), format!("{head}{}{end}", "\u{e9}".repeat(room)), "it is whole if it fits");
    let cut = of(room + 1);
    assert_eq!(cut.chars().count(), TEXT_MAX);
    assert!(cut.ends_with(&format!("\u{e9}\n[report cut: it has {} characters]{end}", room + 1)));
}

/// Scenario 8.
#[test]
fn a_long_result_has_a_brief_and_the_digest_of_the_whole_untrimmed_text() {
    let text = format!("{} \n", "x".repeat(2_001));
    let metadata = completed(&text).metadata();
    let brief = format!("{}\n...\n{}", "x".repeat(1_333), "x".repeat(662));
    assert_eq!(metadata[keys::RESULT_BRIEF], brief);
    assert_eq!(metadata[keys::RESULT_SHA256], sha256(&text));
    assert_ne!(metadata[keys::RESULT_SHA256], sha256(text.trim()));
    // printf abc | sha256sum
    assert_eq!(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");

    let blank = completed(" \n\t").metadata();
    assert_eq!(json!(blank), json!({"subagent_status": "completed"}), "no brief and no digest");
}

#[test]
fn each_key_is_there_exactly_when_it_should_be() {
    let failed = |error: Option<&str>| TaskOutcome::new(Ending::Failed { error: error.map(str::to_owned) });
    let only = |outcome: &TaskOutcome| json!(outcome.metadata());
    assert_eq!(only(&failed(Some(" why "))), json!({"subagent_status": "failed", "subagent_error": "why"}));
    assert_eq!(only(&failed(None)), json!({"subagent_status": "failed", "subagent_error": "Task failed."}));
    let cancelled = TaskOutcome::new(Ending::Cancelled { error: None });
    assert_eq!(only(&cancelled), json!({"subagent_status": "cancelled"}));
    let stuck = Ending::PollingTimedOut { timeout: Duration::ZERO, execution_status: "running".to_owned() };
    assert_eq!(only(&TaskOutcome::new(stuck)), json!({"subagent_status": "polling_timed_out"}));

    let all = TaskOutcome {
        stop_reason: Some(StopReason::TurnCapped),
        model_name: Some(" m ".to_owned()),
        usage: Some(TokenUsage { input: 1, output: 2, total: 3 }),
        receipts: Some(receipts(1)),
        ..TaskOutcome::new(Ending::TimedOut { error: None })
    };
    assert_eq!(
        only(&all),
        json!({
            "subagent_status": "timed_out", "subagent_stop_reason": "turn_capped", "subagent_model_name": "m",
            "subagent_token_usage": {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
            "subagent_tool_receipts": receipts(1),
        })
    );
    let none = TaskOutcome {
        model_name: Some(" ".to_owned()),
        receipts: Some(Vec::new()),
        ..TaskOutcome::new(Ending::Cancelled { error: None })
    };
    assert_eq!(only(&none), json!({"subagent_status": "cancelled"}), "a blank model and no valid receipt");
}

/// Scenario 34, of the result: without harvested receipts there is neither a list nor a verdict.
#[test]
fn a_completed_result_without_harvest_has_no_receipt_keys() {
    let outcome = completed("Created a.txt");
    let keys: Vec<_> = outcome.metadata().into_iter().map(|(key, _)| key).collect();
    assert_eq!(keys, [keys::RESULT_BRIEF, keys::RESULT_SHA256, keys::STATUS]);
}

#[test]
fn metadata_is_read_back_as_it_was_written() {
    let report = Report {
        text: "Listed it [r1]".to_owned(),
        citations: Some(CitationVerdict::of("Listed it [r1]", &receipts(1))),
        acceptance: Some(AcceptanceVerdict::new(vec![Leaf::new(
            "be nice",
            Family::Undecidable,
            Finding::Unchecked("not deterministically checkable".to_owned()),
        )])),
    };
    let outcome = TaskOutcome {
        stop_reason: Some(StopReason::LoopCapped),
        model_name: Some("m".to_owned()),
        usage: Some(TokenUsage { input: 1, output: 2, total: 3 }),
        receipts: Some(receipts(1)),
        ..TaskOutcome::new(Ending::Completed(report.clone()))
    };
    assert_eq!(
        Recorded::from_metadata(&outcome.metadata()),
        Some(Recorded {
            status: Status::Completed,
            stop_reason: Some(StopReason::LoopCapped),
            result_brief: Some("Listed it [r1]".to_owned()),
            result_sha256: Some(sha256("Listed it [r1]")),
            error: None,
            model_name: Some("m".to_owned()),
            usage: outcome.usage,
            receipts: receipts(1),
            citations: report.citations,
            acceptance: report.acceptance,
        })
    );
}

fn read(metadata: serde_json::Value) -> Option<Recorded> {
    Recorded::from_metadata(metadata.as_object().unwrap())
}

/// Bug 38.
#[test]
fn the_legacy_status_is_a_capped_result() {
    let with_brief = read(json!({"subagent_status": "max_turns_reached", "subagent_result_brief": "half"}));
    let with_brief = with_brief.unwrap();
    assert_eq!(
        (with_brief.status, with_brief.stop_reason),
        (Status::Completed, Some(StopReason::TurnCapped))
    );
    let without =
        read(json!({"subagent_status": "max_turns_reached", "subagent_stop_reason": "token_capped"}));
    let without = without.unwrap();
    assert_eq!((without.status, without.stop_reason), (Status::Failed, Some(StopReason::TurnCapped)));
}

#[test]
fn what_is_malformed_counts_as_absent() {
    assert_eq!(read(json!({})), None);
    for status in [json!("in_progress"), json!("success"), json!(1), json!(null)] {
        assert_eq!(read(json!({"subagent_status": status})), None);
    }
    let digest = "A".repeat(64);
    let found = read(json!({
        "subagent_status": "completed", "subagent_stop_reason": "bored", "subagent_result_sha256": digest,
        "subagent_token_usage": {"input_tokens": true, "output_tokens": 0, "total_tokens": 0},
        "subagent_tool_receipts": [{"id": "r1"}], "subagent_receipt_verdict": {"source": "receipt_citations"},
        "subagent_acceptance_verdict": {"leaves": [], "all_hold": true}, "subagent_model_name": 3,
    }));
    let bare = read(json!({"subagent_status": "completed"}));
    assert!(bare.is_some() && found == bare, "{found:?}");
    for usage in [
        json!({"input_tokens": -1, "output_tokens": 0, "total_tokens": 0}),
        json!({"input_tokens": 1}),
        json!([]),
    ] {
        let found = read(json!({"subagent_status": "failed", "subagent_token_usage": usage})).unwrap();
        assert_eq!(found.usage, None);
    }
}

#[test]
fn a_ledger_keeps_the_brief_or_the_error_or_a_phrase() {
    let brief = |metadata: serde_json::Value| {
        let read = read(metadata).unwrap();
        (read.ledger_brief(), read.ledger_digest())
    };
    let digest = "0".repeat(64);
    let whole = json!({
        "subagent_status": "completed", "subagent_result_brief": "brief", "subagent_result_sha256": digest,
    });
    assert_eq!(brief(whole), ("brief".to_owned(), digest));
    let failed = json!({"subagent_status": "failed", "subagent_error": "why"});
    assert_eq!(brief(failed), ("why".to_owned(), sha256("why")));
    for (status, phrase) in [
        ("failed", "Task failed."),
        ("cancelled", "Task cancelled by user."),
        ("timed_out", "Task timed out."),
        ("polling_timed_out", "Task polling timed out."),
    ] {
        assert_eq!(brief(json!({"subagent_status": status})), (phrase.to_owned(), sha256(phrase)));
    }
}

proptest! {
    /// Nothing that a store can contain makes the reader panic or invent a verdict.
    #[test]
    fn reading_is_total(status in "[a-z_]{0,20}|completed", text in "(?s).{0,50}", number in any::<i64>()) {
        for value in [json!(text), json!(number), json!([text]), json!({"leaves": text}), json!(null)] {
            let metadata = json!({
                "subagent_status": status, "subagent_error": value, "subagent_result_brief": value,
                "subagent_token_usage": value, "subagent_tool_receipts": value,
                "subagent_receipt_verdict": value, "subagent_acceptance_verdict": value,
            });
            if let Some(read) = read(metadata) {
                prop_assert!(read.citations.is_none() && read.acceptance.is_none());
                prop_assert!(read.ledger_brief().chars().count() <= crate::bounds::MAX_CHARS);
            }
        }
    }
}

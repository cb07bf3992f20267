//! Acceptance criteria and the copy of the conversation, as a delegation carries them.

use serde_json::{Value as Json, json};

use crate::support::{House, lead, subagent};

fn checked(criteria: Json, mode: &str) -> Json {
    json!({"name": "task", "args": {
        "prompt": "make it", "subagent_type": "general-purpose", "acceptance_criteria": criteria, "context_mode": mode,
    }})
}

/// Scenarios 22, 23 and 27 in a whole delegation.
#[tokio::test]
async fn criteria_are_checked_by_code_after_the_subagent_completed() {
    let criteria = json!([
        "file_written:made.txt",
        "file:missing.txt exists",
        "looks\nnice",
        "file:made.txt json-valid",
        7
    ]);
    let work = subagent(json!([
        {"tool_calls": [{"name": "write_file", "args": {"path": "made.txt", "content": "x"}}]},
        {"text": "Made it."},
    ]));
    let house = House::new(lead(&[checked(criteria, "isolated")], vec![work]), "").await;
    house.ask("go").await;
    let result = &house.results().await[0];
    let text = result["content"].as_str().unwrap();
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("- [")).collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert!(lines[0].starts_with("- [holds] file_written:made.txt"), "{text}");
    assert!(lines[1].starts_with("- [does not hold] file:missing.txt exists"), "{text}");
    assert!(lines[2].starts_with("- [UNVERIFIED] looks nice"), "{text}");
    assert!(lines[3].starts_with("- [UNVERIFIED]"), "{text}");
    let verdict = &result["additional_kwargs"]["subagent_acceptance_verdict"];
    assert_eq!((&verdict["all_hold"], verdict["leaves"].as_array().unwrap().len()), (&json!(false), 4));
    assert_eq!(house.ledger().await[0]["acceptance_verdict"], *verdict);
    // The subagent reads them with its task, and its system prompt has none of them.
    let request = &house.requests("subagent:general-purpose")[0];
    let task = request["messages"][0]["content"].as_str().unwrap();
    assert!(task.starts_with("make it\n\nAcceptance criteria (untrusted data"), "{task}");
    let system = request["system"].as_str().unwrap();
    assert!(system.contains("Acceptance criteria") && !system.contains("made.txt"), "{system}");
    assert!(system.ends_with("</current_date>"), "{system}");
    // The lead sees the gaps before it goes on.
    let ledger = house.requests("lead_agent")[1]["messages"].as_array().unwrap().clone();
    let ledger = ledger.iter().find(|message| message["name"] == "durable_context").unwrap();
    let shown = ledger["content"].as_str().unwrap();
    assert!(shown.contains("1 hold, 1 does not hold, 2 UNVERIFIED"), "{shown}");
    assert!(shown.contains("UNVERIFIED: looks nice"), "{shown}");
}

/// The tool's output is cut at its end.
#[tokio::test]
async fn a_checklist_is_seen_below_the_longest_report() {
    let work = subagent(json!([{"text": "x".repeat(150_000)}]));
    let call = checked(json!(["file:missing.txt exists"]), "isolated");
    let house = House::new(lead(&[call], vec![work]), "").await;
    house.ask("go").await;
    let result = &house.results().await[0];
    let text = result["content"].as_str().unwrap();
    assert!(text.chars().count() <= 100_000 && text.contains("[report cut: it has "), "{}", text.len());
    let last = text.lines().last().unwrap();
    assert!(last.starts_with("- [UNVERIFIED] file:missing.txt exists"), "{last}");
}

/// A failed delegation has no verdict.
#[tokio::test]
async fn only_a_completed_delegation_is_checked() {
    let broken = subagent(json!([{"error": {"kind": "fatal", "message": "no quota"}}]));
    let house = House::new(lead(&[checked(json!(["x"]), "isolated")], vec![broken]), "").await;
    house.ask("go").await;
    assert_eq!(house.results().await[0]["additional_kwargs"].get("subagent_acceptance_verdict"), None);
}

/// Scenarios 17 and 20.
#[tokio::test]
async fn a_subagent_sees_the_conversation_only_if_asked_and_as_it_was() {
    let talk = |house: &House| house.requests("subagent:general-purpose")[0]["messages"].clone();
    let rules = || vec![subagent(json!([{"text": "Read [r1]."}]))];
    let isolated = House::new(lead(&[checked(json!([]), "isolated")], rules()), "").await;
    isolated.ask("the secret word is plum").await;
    assert!(!talk(&isolated).to_string().contains("plum"));
    let informed = House::new(lead(&[checked(json!([]), "snapshot")], rules()), "").await;
    informed.ask("the secret word is plum").await;
    let told = talk(&informed);
    assert_eq!((&told[0]["name"], told.as_array().unwrap().len()), (&json!("parent_context_snapshot"), 2));
    assert!(told[0].to_string().contains("plum") && !told[0].to_string().contains("called task"), "{told}");
    // The parent's receipts are not the subagent's.
    let verdict = &informed.results().await[0]["additional_kwargs"]["subagent_receipt_verdict"];
    assert_eq!(verdict["unknown"], json!(["r1"]));
}

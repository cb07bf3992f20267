//! Receipts from the call to the verdict: what a subagent sees, what it may cite, what the lead gets.

use serde_json::{Value as Json, json};
use threadkeep::id::ThreadId;
use threadkeep_agent::receipts::{LEDGER_KEY, LEDGER_NAME, RECEIPT_KEY};
use threadkeep_records::ExecutionRow;
use threadkeep_subagents::recheck;

use crate::support::{House, lead, subagent, task};

/// A subagent that makes these calls in one turn each, then reports.
fn reporting(calls: &[Json], report: &str) -> Json {
    let mut answers: Vec<Json> = calls.iter().map(|call| json!({"text": "", "tool_calls": [call]})).collect();
    answers.push(json!({"text": report}));
    subagent(json!(answers))
}

/// A house in which one subagent worked like this.
async fn worked(calls: &[Json], report: &str, sections: &str) -> House {
    let script = lead(&[task("work", "general-purpose")], vec![reporting(calls, report)]);
    let house = House::new(script, sections).await;
    house.ask("go").await;
    house
}

fn ls() -> Json {
    json!({"name": "ls", "args": {}})
}

fn missing() -> Json {
    json!({"name": "read_file", "args": {"path": "none"}})
}

async fn verdict(calls: &[Json], report: &str) -> Json {
    let house = worked(calls, report, "").await;
    house.results().await[0]["additional_kwargs"]["subagent_receipt_verdict"].clone()
}

/// The ledgers of receipts that a caller's models were shown.
fn shown(house: &House, caller: &str) -> Vec<Option<String>> {
    let ledger = |request: &Json| {
        let messages = request["messages"].as_array().unwrap();
        let ledger = messages.iter().find(|message| message["name"] == LEDGER_NAME)?;
        ledger["content"].as_str().map(str::to_owned)
    };
    house.requests(caller).iter().map(ledger).collect()
}

/// Scenario 30, over the whole way.
#[tokio::test]
async fn a_report_is_checked_against_the_calls_that_were_made() {
    let calls = [ls(), missing()];
    let found = verdict(&calls, "Looked [r1 ls].").await;
    assert_eq!((&found["citation_resolved"], &found["resolved"]), (&json!(true), &json!(["r1"])));
    let found = verdict(&calls, "Read it [r2], wrote it [r3], and again [r1 bash].").await;
    assert_eq!(
        (&found["citation_resolved"], &found["unknown"], &found["failed"]),
        (
            &json!(false),
            &json!(["r3"]),
            &json!([
                {"id": "r2", "reason": "receipt status=error"},
                {"id": "r1", "reason": "cited as bash, receipt is of ls"},
            ])
        )
    );
    let found = verdict(&[], "I created everything.").await;
    assert_eq!((&found["citation_resolved"], &found["no_citation_claims"]), (&json!(false), &json!(true)));
}

#[tokio::test]
async fn a_subagent_sees_its_receipts_and_its_report_records_which() {
    let house = worked(&[ls(), missing()], "Looked [r1].", "").await;
    let shown = shown(&house, "subagent:general-purpose");
    let lines = |ledger: &Option<String>| {
        let lines = ledger.iter().flat_map(|ledger| ledger.lines().filter(|line| line.starts_with("- [r")));
        lines.map(|line| line.split(" args").next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(
        shown.iter().map(lines).collect::<Vec<_>>(),
        [
            vec![],
            vec!["- [r1] ls status=success".to_owned()],
            vec!["- [r1] ls status=success".to_owned(), "- [r2] read_file status=error".to_owned()],
        ]
    );
    let result = &house.results().await[0]["additional_kwargs"];
    let ids: Vec<_> =
        result["subagent_tool_receipts"].as_array().unwrap().iter().map(|r| r["id"].clone()).collect();
    assert_eq!(ids, ["r1", "r2"]);
    // The lead's own ledger is of its own calls: one of `task`.
    assert_eq!(result[RECEIPT_KEY]["tool_name"], "task");
    let lead = self::shown(&house, "lead_agent");
    assert!(
        lead[0].is_none() && lead[1].as_ref().is_some_and(|ledger| ledger.contains("[r1] task")),
        "{lead:?}"
    );
}

/// Scenario 34 and bug 25.
#[tokio::test]
async fn without_receipts_nobody_hears_of_them() {
    let on = worked(&[ls()], "Created it [r1].", "").await;
    let off = worked(&[ls()], "Created it [r1].", "verification: {receipts_enabled: false}").await;
    let prompts = |house: &House| {
        let callers = ["lead_agent", "subagent:general-purpose"];
        callers.map(|caller| house.requests(caller)[0]["system"].to_string()).to_vec()
    };
    for (with, without) in prompts(&on).iter().zip(&prompts(&off)) {
        assert!(with.to_lowercase().contains("receipt") && with.contains("[r3"), "{with}");
        assert!(!without.to_lowercase().contains("receipt") && !without.contains("[r3"), "{without}");
    }
    for caller in ["lead_agent", "subagent:general-purpose"] {
        assert!(shown(&off, caller).iter().all(Option::is_none), "{caller}");
    }
    let messages = json!(off.messages().await).to_string();
    for key in [RECEIPT_KEY, LEDGER_KEY, "subagent_tool_receipts", "subagent_receipt_verdict"] {
        assert!(!messages.contains(key), "{key}");
        assert!(json!(on.messages().await).to_string().contains(key), "{key} with receipts");
    }
    assert!(!json!(off.ledger().await).to_string().contains("receipt_verdict"));
    assert!(json!(on.ledger().await).to_string().contains("receipt_verdict"));
}

/// Calls of another answer, or one that a client has put in the place of this one, may have its id.
#[tokio::test]
async fn a_report_that_no_conversation_got_is_not_missed_there() {
    let house = worked(&[ls()], "Created it [r1].", "").await;
    let [row] = &house.executions().await[..] else { panic!("one execution") };
    let child = house.accessor.get(&ThreadId::from(row.child_thread.as_str()), None).await.unwrap();
    let mut parent = house.messages().await;
    let result = parent.iter_mut().find(|message| message["type"] == "tool").unwrap();
    result["additional_kwargs"]["subagent_result_sha256"] = json!("0".repeat(64));
    let found = |row: &ExecutionRow| recheck(row, child.as_ref(), &parent).unwrap();
    assert_eq!(found(row), ["the report in the conversation is not the one in its checkpoints"]);
    let left = ExecutionRow { delivered: false, ..row.clone() };
    assert_eq!(found(&left), Vec::<String>::new());
}

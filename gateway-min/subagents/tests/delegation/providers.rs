//! Providers that misbehave, with several subagents at work.

use std::collections::BTreeSet;

use serde_json::{Value as Json, json};
use threadkeep_agent::Ended;
use threadkeep_records::ExecutionStatus;

use crate::support::{House, Seen, lead, subagent, task};

const NO_LOOPS: &str = "loop_detection: {enabled: false}";

/// Check 14 and bug 13.
#[tokio::test]
async fn sixty_calls_with_the_same_id_are_fifty_delegations_that_nothing_mixes_up() {
    let call = |number: usize| {
        let mut call = task(&format!("work {number}"), "general-purpose");
        call["id"] = json!("call_0");
        call
    };
    let mut answers: Vec<Json> =
        (0..60).map(|number| json!({"text": "Next.", "tool_calls": [call(number)]})).collect();
    answers.push(json!({"text": "Done."}));
    let script = json!({"rules": [
        {"when": {"caller": "lead_agent"}, "answers": answers},
        subagent(json!([{"text": "Report of {{input}}."}])),
    ]});
    // Fifty calls of one tool would be a loop.
    let mut house = House::new(script, NO_LOOPS).await;
    house.limits.total = 50;
    let ended = house.run("r", Some("go"), &mut Seen::default()).await.unwrap();
    let reason = Some("subagent_limit_capped".to_owned());
    assert_eq!(ended, Ended::Done { stop_reason: reason, fallback: None });
    let rows = house.executions().await;
    assert_eq!(rows.len(), 50, "the cap is exact");
    assert!(rows.iter().all(|row| row.status == ExecutionStatus::Completed && row.delivered));
    let ledger = house.ledger().await;
    let ids: BTreeSet<&str> = ledger.iter().map(|entry| entry["id"].as_str().unwrap()).collect();
    assert_eq!((ledger.len(), ids.len()), (50, 50), "none was replaced");
    for (number, entry) in ledger.iter().enumerate() {
        assert_eq!(
            (&entry["tool_call_id"], &entry["status"], &entry["result_brief"]),
            (&json!("call_0"), &json!("completed"), &json!(format!("Report of work {number}."))),
        );
    }
    let results: Vec<String> =
        house.results().await.iter().map(|result| result["content"].as_str().unwrap().to_owned()).collect();
    let expected: Vec<String> =
        (0..50).map(|number| format!("Task Succeeded. Result: Report of work {number}.")).collect();
    assert_eq!(results, expected, "each call has its own");
}

/// A lead with a subagent for each of these prompts.
async fn house(prompts: &[&str], rules: Vec<Json>, sections: &str) -> House {
    let calls: Vec<Json> = prompts.iter().map(|prompt| task(prompt, "general-purpose")).collect();
    House::new(lead(&calls, rules), sections).await
}

#[tokio::test]
async fn a_provider_that_answers_nothing_leaves_no_response() {
    let silent = subagent(json!([{"text": ""}]));
    let house = house(&["a", "b", "c"], vec![silent], "").await;
    let seen = house.ask("go").await;
    let results = house.results().await;
    assert_eq!(results.len(), 3);
    for result in results {
        assert_eq!(result["content"], "Task Succeeded. Result: No response generated");
        assert_eq!(result["additional_kwargs"].get("subagent_token_usage"), None);
    }
    assert_eq!(seen.types().iter().filter(|kind| **kind == "task_completed").count(), 3);
    assert_eq!(house.delegator.admission.counts().running, 0);
}

/// Subagents that call tools for ever end with their turns, and a lead that delegates for ever with its delegations.
#[tokio::test]
async fn a_provider_that_never_comes_to_an_end_is_stopped() {
    let endless = |caller: &str, calls: Json| {
        json!({"when": {"caller": caller}, "repeat_last": true, "answers": [{
            "text": "And on.", "tool_calls": calls, "usage": {"input_tokens": 5, "output_tokens": 1},
        }]})
    };
    let calls = json!(["a", "b", "c"].map(|prompt| task(prompt, "general-purpose")));
    let script = json!({"rules": [
        endless("lead_agent", calls), endless("subagent", json!([{"name": "ls", "args": {}}])),
    ]});
    let sections = format!("subagents: {{max_turns: 7}}\n{NO_LOOPS}");
    let house = House::new(script, &sections).await;
    let mut seen = Seen::default();
    let ended = house.run("r", Some("go"), &mut seen).await.unwrap();
    let reason = Some("subagent_limit_capped".to_owned());
    assert_eq!(ended, Ended::Done { stop_reason: reason, fallback: None });
    let results = house.results().await;
    assert_eq!(results.len(), 6, "all that a run has");
    for result in results {
        assert_eq!(result["content"], "Task Succeeded (capped: turn budget). Result: And on.");
    }
    assert_eq!(house.requests("subagent:general-purpose").len(), 6 * 7);
    assert_eq!(seen.used.iter().map(|(.., tokens)| tokens.total).sum::<i64>(), 6 * 7 * 6);
    assert_eq!(house.delegator.admission.counts().running, 0);
}

/// One of three subagents fails at its third model call for good, one for a moment, one not at all.
#[tokio::test]
async fn a_provider_that_fails_on_the_third_call_fails_that_subagent_alone() {
    let turns = |prompt: &str, error: Option<Json>| {
        let turn = |turn: usize| {
            json!({
                "text": format!("{turn}."), "tool_calls": [{"name": "glob", "args": {"pattern": turn.to_string()}}],
                "usage": {"input_tokens": 5, "output_tokens": 1},
            })
        };
        let mut last = json!({"text": "Done.", "usage": {"input_tokens": 5, "output_tokens": 1}});
        if let Some(error) = error {
            last["error"] = error;
        }
        json!({"when": {"caller": "subagent", "contains": [prompt]}, "answers": [turn(1), turn(2), last]})
    };
    let rules = vec![
        turns("alpha", Some(json!({"kind": "fatal", "message": "no quota"}))),
        turns("bravo", Some(json!({"kind": "transient", "message": "busy", "attempts": 1}))),
        turns("charlie", None),
    ];
    let house = house(&["alpha", "bravo", "charlie"], rules, "").await;
    let mut seen = Seen::default();
    let ended = house.run("r", Some("go"), &mut seen).await.unwrap();
    assert_eq!(ended, Ended::Done { stop_reason: None, fallback: None }, "the run goes on");
    let mut rows = house.executions().await;
    // They begin side by side, so in any order.
    rows.sort_by(|one, other| one.description.cmp(&other.description));
    let found: Vec<_> = rows
        .iter()
        .map(|row| (row.description.as_str(), row.status, row.tokens().unwrap().total_tokens))
        .collect();
    assert_eq!(
        found,
        [
            ("alpha", ExecutionStatus::Failed, 12),
            ("bravo", ExecutionStatus::Completed, 18),
            ("charlie", ExecutionStatus::Completed, 18),
        ],
        "what was used before the failure counts"
    );
    let results = house.results().await;
    let failed = results[0]["content"].as_str().unwrap();
    assert!(failed.starts_with("Task failed. Error: "), "{failed}");
    assert_eq!(results[0]["additional_kwargs"]["subagent_tool_receipts"].as_array().unwrap().len(), 2);
    assert_eq!(results[1]["content"], "Task Succeeded. Result: Done.");
    assert_eq!(seen.used.iter().map(|(.., tokens)| tokens.total).sum::<i64>(), 12 + 18 + 18);
}

//! The lead's token budget, which binds everything it delegates, also over a restart.

use serde_json::{Value as Json, json};
use threadkeep_agent::Ended;
use threadkeep_agent::model::scripted::gate;
use threadkeep_records::ExecutionRow;

use crate::batches::gate_name;
use crate::restart::killed_at;
use crate::support::{House, Seen, lead, subagent, task};

const LIMIT: u64 = 1000;
/// Tokens of one answer of a subagent.
const CALL: u64 = 20;
/// Subagents at work at once.
const IN_FLIGHT: u64 = 3;

async fn house() -> House {
    let calls: Vec<Json> = (0..50).map(|index| task(&format!("work {index}"), "general-purpose")).collect();
    let mut answers: Vec<Json> = (0..2)
        .map(|turn| {
            json!({"text": format!("{turn}."), "tool_calls": [{"name": "glob", "args": {"pattern": turn.to_string()}}],
                   "usage": {"input_tokens": 19, "output_tokens": 1}})
        })
        .collect();
    answers.push(json!({"text": "Done.", "usage": {"input_tokens": 19, "output_tokens": 1}}));
    // Fifty calls of one tool would be a loop.
    let sections =
        format!("token_budget: {{enabled: true, max_tokens: {LIMIT}}}\nloop_detection: {{enabled: false}}");
    let mut house = House::new(lead(&calls, vec![subagent(json!(answers))]), &sections).await;
    (house.limits.concurrent, house.limits.total) = (50, 50);
    house
}

/// Check 7: fifty subagents under the lead's limit, with a restart in the middle.
#[tokio::test]
async fn a_restart_gives_no_budget_back() {
    for events in [20, 80, 140] {
        let house = house().await;
        killed_at(&house, Some("go"), events);
        house.settled().await;
        let next = house.restarted();
        let ended = next.run("r2", None, &mut Seen::default()).await.unwrap();
        let Ended::Done { stop_reason, .. } = ended else { panic!("{events}: {ended:?}") };
        assert_eq!(stop_reason.as_deref(), Some("token_capped"), "{events}");
        assert_eq!(next.requests("lead_agent").len(), 1, "{events}: the lead is not asked again");
        let rows = next.executions().await;
        assert_eq!(rows.len(), 50, "{events}");
        assert!(rows.iter().all(|row| row.status.is_terminal() && row.delivered), "{events}: {rows:?}");
        let stored: u64 =
            rows.iter().filter_map(ExecutionRow::tokens).map(|tokens| tokens.total_tokens).sum();
        // Of the lead, 12.
        let most = LIMIT + IN_FLIGHT * CALL;
        assert!((LIMIT..=most).contains(&(12 + stored)), "{events}: {stored}");
        // What was under way at the kill is asked again.
        let asked = next.requests("subagent:general-purpose").len() as u64 * CALL;
        assert!(asked <= stored + IN_FLIGHT * CALL, "{events}: {asked} of {stored}");
        assert_eq!(next.delegator.admission.counts().running, 0, "{events}");
    }
}

/// Wherever the process of a subagent dies, its model is warned with the call after the answer that reached the share,
/// and with no other.
#[tokio::test]
async fn a_restart_repeats_no_warning_and_loses_none() {
    let used = |number: usize, input: u64| {
        json!({"text": format!("{number}."), "tool_calls": [{"name": "glob", "args": {"pattern": number.to_string()}}],
               "usage": {"input_tokens": input, "output_tokens": 1}})
    };
    let mut answers = vec![used(0, 399), used(1, 349), used(2, 49), used(3, 49)];
    answers.push(json!({"text": "Done.", "usage": {"input_tokens": 49, "output_tokens": 1}}));
    let script = lead(&[task("work", "general-purpose")], vec![subagent(json!(answers))]);
    let sections = "subagents: {token_budget: {enabled: true, max_tokens: 1000, warn_threshold: 0.7}}";
    // Started, nine messages, completed.
    for events in 1..=11 {
        let house = House::new(script.clone(), sections).await;
        killed_at(&house, Some("go"), events);
        house.settled().await;
        let next = house.restarted();
        let ended = next.run("r2", None, &mut Seen::default()).await.unwrap();
        assert!(matches!(ended, Ended::Done { .. }), "{events}: {ended:?}");
        let requests = next.requests("subagent:general-purpose");
        let of_warned =
            requests.iter().filter(|request| request["messages"].to_string().contains("budget_warning"));
        // The call under way when the process died is made again.
        let said = of_warned.map(|request| {
            request["messages"].as_array().unwrap().iter().filter(|message| message["type"] == "ai").count()
        });
        let said: Vec<usize> = said.collect();
        assert!(!said.is_empty() && said.iter().all(|said| *said == 2), "{events}: {said:?}");
    }
}

/// A run that goes on with a turn of which a summary has replaced the beginning knows what that used; without a limit
/// nothing is kept of it.
#[tokio::test]
async fn a_summary_gives_no_tokens_back() {
    for limit in ["token_budget: {enabled: true, max_tokens: 1000}", ""] {
        let name = gate_name("summary");
        let answer = |number: usize| {
            json!({"text": format!("{number}."), "tool_calls": [{"name": "glob", "args": {"pattern": number.to_string()}}],
                   "usage": {"input_tokens": 199, "output_tokens": 1}})
        };
        let mut answers: Vec<Json> = (0..7).map(answer).collect();
        answers[3]["gate"] = json!({"name": name});
        answers.push(json!({"text": "Done."}));
        // What it has said, however much of that a summary has replaced.
        let mut rules = vec![
            json!({"when": {"caller": "middleware:summarization"}, "answers": [{"text": "It searched."}]}),
        ];
        for (number, answer) in answers.into_iter().enumerate().rev() {
            let said = number.checked_sub(1).map_or_else(|| "go".to_owned(), |last| format!("{last}."));
            rules.push(json!({"when": {"caller": "lead_agent", "anywhere": [said]}, "repeat_last": true, "answers": [answer]}));
        }
        let sections = format!(
            "summarization: {{enabled: true, trigger: {{type: messages, value: 5}}, keep: {{type: messages, value: 2}}}}\n{limit}"
        );
        let house = House::new(json!({"rules": rules}), &sections).await;
        let (mut seen, gate) = (Seen::default(), gate(&name));
        tokio::select! {
            ended = house.run("r1", Some("go"), &mut seen) => panic!("{ended:?}"),
            () = gate.reached() => {}
        }
        assert!(!house.requests("middleware:summarization").is_empty(), "it was summarized");
        let question = &house.messages().await[0];
        let kept = &question["additional_kwargs"]["summarized_token_usage"];
        gate.open();
        let next = house.restarted();
        let ended = next.run("r2", None, &mut Seen::default()).await.unwrap();
        let Ended::Done { stop_reason, .. } = ended else { panic!("{ended:?}") };
        let requests = next.requests("lead_agent").len();
        if limit.is_empty() {
            assert_eq!((kept, stop_reason.as_deref(), requests), (&Json::Null, None, 9));
        } else {
            // Three answers before, one under way when the first run ended, and two after.
            assert_eq!((stop_reason.as_deref(), requests), (Some("token_capped"), 6));
            assert_eq!(kept["total_tokens"], 400);
        }
    }
}

//! The lead's token budget, which binds everything it delegates, also over a restart.

use serde_json::{Value as Json, json};
use threadkeep_agent::Ended;
use threadkeep_records::ExecutionRow;

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

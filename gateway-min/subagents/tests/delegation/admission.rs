//! Slots for subagents, as a lead agent meets them.

use serde_json::{Value as Json, json};
use threadkeep_agent::Ended;
use threadkeep_records::{Delegating, ExecutionStatus, JsonObject, NewExecution};
use threadkeep_subagents::admission::{Class, Slot};
use tokio_util::sync::CancellationToken;

use crate::support::{House, Seen, lead, subagent, task};

/// A lead with two tasks, in a process whose only slot somebody else has.
async fn no_slot(sections: &str) -> (House, Slot) {
    let calls = [task("one", "general-purpose"), task("other", "general-purpose")];
    let house = House::new(lead(&calls, vec![subagent(json!([{"text": "ok"}]))]), sections).await;
    let held = house.delegator.admission.acquire(&Class::Interactive).await.unwrap();
    (house, held)
}

/// Both delegations ended with this event, status and error, and no model was asked.
async fn both_ended(house: &House, seen: &Seen, event: &str, status: ExecutionStatus, error: &str) {
    let events: Vec<&Json> = seen.events.iter().filter(|found| found["type"] == event).collect();
    assert_eq!(events.iter().map(|found| &found["error"]).collect::<Vec<_>>(), [error; 2]);
    let rows = house.executions().await;
    assert_eq!(
        rows.iter().map(|row| (row.status, row.error.as_deref())).collect::<Vec<_>>(),
        [(status, Some(error)); 2]
    );
    assert_eq!(house.requests("subagent:general-purpose").len(), 0);
    let counts = house.delegator.admission.counts();
    assert_eq!((counts.running, counts.waiting()), (1, 0), "what the other has");
}

/// Scenario 37.
#[tokio::test]
async fn a_delegation_that_may_not_wait_fails_with_the_numbers() {
    for section in [
        "subagent_runtime: {max_running: 1, admission_policy: reject}",
        "subagent_runtime: {max_running: 1, max_queued: 0}",
    ] {
        let (house, _held) = no_slot(section).await;
        let seen = house.ask("go").await;
        let error = "Subagent execution capacity is full (1 running, 0 queued)";
        both_ended(&house, &seen, "task_failed", ExecutionStatus::Failed, error).await;
        assert_eq!(house.results().await[0]["content"], format!("Task failed. Error: {error}"));
    }
}

/// Scenario 38.
#[tokio::test]
async fn a_delegation_waits_for_a_slot_until_its_own_time_or_the_queues_is_up() {
    let (house, _held) = no_slot("subagent_runtime: {max_running: 1, queue_timeout_seconds: 1}").await;
    let seen = house.ask("go").await;
    let error = "Timed out after 1s waiting for a subagent execution slot";
    both_ended(&house, &seen, "task_failed", ExecutionStatus::Failed, error).await;

    let own =
        "subagent_runtime: {max_running: 1, queue_timeout_seconds: 60}\nsubagents: {timeout_seconds: 1}";
    let (house, _held) = no_slot(own).await;
    let seen = house.ask("go").await;
    let error = "Execution timed out after 1 seconds";
    both_ended(&house, &seen, "task_timed_out", ExecutionStatus::TimedOut, error).await;
}

/// A process stood still in the queue. Another run goes on with its subagent by then: two would write to one thread.
#[tokio::test]
async fn a_delegation_that_was_taken_over_in_the_queue_does_not_begin() {
    let script = lead(&[task("one", "general-purpose")], vec![subagent(json!([{"text": "ok"}]))]);
    let house = House::new(script, "subagent_runtime: {max_running: 1}").await;
    let held = house.delegator.admission.acquire(&Class::Interactive).await.unwrap();
    let mut seen = Seen::default();
    let (ended, ()) = tokio::join!(house.run("r1", Some("go"), &mut seen), async {
        while house.delegator.admission.counts().waiting() == 0 {
            tokio::task::yield_now().await;
        }
        let row = house.executions().await.remove(0);
        let next = NewExecution {
            execution_id: row.execution_id,
            thread_id: row.thread_id,
            run_id: "r2".to_owned(),
            delegating: Delegating::Unrecorded,
            parent_execution: None,
            kind: row.kind,
            tool_call_id: row.tool_call_id,
            agent_name: row.agent_name,
            definition: JsonObject::new(),
            definition_digest: row.definition_digest,
            description: row.description,
            deadline: row.deadline,
        };
        house.delegator.records.executions().open(next).await.unwrap();
        drop(held);
    });
    let error = ended.unwrap_err().to_string();
    assert!(error.contains("run r2 goes on with execution"), "{error}");
    assert_eq!(house.results().await, Vec::<Json>::new());
    let row = house.executions().await.remove(0);
    assert_eq!((row.run_id.as_str(), row.status), ("r2", ExecutionStatus::Pending));
    assert_eq!(house.requests("subagent:general-purpose").len(), 0);
}

/// Scenario 39.
#[tokio::test]
async fn a_delegation_that_is_cancelled_in_the_queue_leaves_no_place_there() {
    let (house, held) = no_slot("subagent_runtime: {max_running: 1}").await;
    let cancel = CancellationToken::new();
    let mut seen = Seen::default();
    let (ended, ()) = tokio::join!(house.run_until("r", Some("go"), &mut seen, cancel.clone()), async {
        while house.delegator.admission.counts().waiting() < 2 {
            tokio::task::yield_now().await;
        }
        cancel.cancel();
        cancel.cancel();
    });
    assert_eq!(ended.unwrap(), Ended::Cancelled);
    let rows = house.executions().await;
    assert_eq!(rows.iter().map(|row| row.status).collect::<Vec<_>>(), [ExecutionStatus::Cancelled; 2]);
    assert!(rows.iter().all(|row| row.started_at.is_none()), "they never began: {rows:?}");
    drop(held);
    let counts = house.delegator.admission.counts();
    assert_eq!((counts.running, counts.waiting()), (0, 0));
}

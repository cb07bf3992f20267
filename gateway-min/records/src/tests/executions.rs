use std::collections::BTreeMap;

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::json;

use super::support::*;
use crate::*;

fn new(fixture: &Fixture, id: &str) -> NewExecution {
    NewExecution {
        execution_id: id.to_owned(),
        thread_id: "t".to_owned(),
        run_id: "r1".to_owned(),
        delegating: Delegating::Unrecorded,
        parent_execution: None,
        kind: ExecutionKind::Task,
        tool_call_id: "call_0".to_owned(),
        agent_name: "bash".to_owned(),
        definition: object(json!({"name": "bash"})),
        definition_digest: "d".to_owned(),
        description: "look".to_owned(),
        deadline: fixture.clock.now() + TimeDelta::seconds(5),
    }
}

fn end(status: ExecutionStatus) -> ExecutionEnd {
    let tokens = ExecutionTokens { input_tokens: 3, output_tokens: 4, total_tokens: 7 };
    ExecutionEnd {
        status,
        error: None,
        stop_reason: Some("turn_capped".to_owned()),
        usage: BTreeMap::from([("a".to_owned(), tokens), ("b".to_owned(), tokens)]),
    }
}

/// A row as lists have it.
fn listed(row: ExecutionRow) -> ExecutionRow {
    ExecutionRow { definition: None, ..row }
}

#[tokio::test]
async fn an_execution_is_opened_started_and_ended_once() {
    let fixture = fixture().await;
    let executions = fixture.records.executions();
    let row = executions.open(new(&fixture, "e")).await.unwrap().row;
    assert_eq!(
        (row.attempt, row.status, row.child_thread.as_str()),
        (1, ExecutionStatus::Pending, "subagent:e")
    );
    assert_eq!(row.tokens(), None, "unknown is not zero");
    fixture.clock.advance_seconds(1);
    executions.started(&row, "m", 12).await.unwrap();
    // A process that goes on with it keeps the first times.
    fixture.clock.advance_seconds(1);
    executions.started(&row, "m", 99).await.unwrap();
    let ended = executions.finish(&row, end(ExecutionStatus::Completed)).await.unwrap();
    assert_eq!(
        (ended.status, ended.waited_ms, ended.model_name.as_deref()),
        (ExecutionStatus::Completed, Some(12), Some("m"))
    );
    assert_eq!(ended.started_at.unwrap() + TimeDelta::seconds(1), ended.completed_at.unwrap());
    assert_eq!(ended.tokens().unwrap().total_tokens, 14);
    // The first end wins, and nothing starts after it.
    let late = executions.finish(&row, end(ExecutionStatus::Cancelled)).await.unwrap();
    assert_eq!(late, ended);
    executions.started(&row, "other", 1).await.unwrap();
    assert_eq!(executions.of_thread("t").await.unwrap(), [listed(ended)]);
    let error = executions.finish(&row, end(ExecutionStatus::Running)).await.unwrap_err();
    assert!(matches!(error, RecordsError::Invalid { field: "status", .. }), "{error}");
}

#[tokio::test]
async fn a_deadline_beyond_all_times_is_the_last_one() {
    let fixture = fixture().await;
    let executions = fixture.records.executions();
    let endless = NewExecution { deadline: DateTime::<Utc>::MAX_UTC, ..new(&fixture, "e") };
    let row = executions.open(endless).await.unwrap().row;
    assert_eq!(row.deadline.to_rfc3339(), "9999-12-31T23:59:59.999999+00:00");
    assert_eq!(executions.of_thread("t").await.unwrap(), [listed(row)]);
}

#[tokio::test]
async fn an_undelivered_attempt_is_found_again_and_a_delivered_one_is_followed_by_another() {
    let fixture = fixture().await;
    let executions = fixture.records.executions();
    let first = executions.open(new(&fixture, "e")).await.unwrap().row;
    executions.finish(&first, end(ExecutionStatus::Failed)).await.unwrap();
    fixture.clock.advance_seconds(60);
    let undelivered = executions.undelivered("t", "e").await.unwrap().unwrap();
    assert_eq!((undelivered.attempt, undelivered.status), (1, ExecutionStatus::Failed));
    assert_eq!(executions.undelivered("u", "e").await.unwrap(), None, "of another thread");
    let again = NewExecution { run_id: "r2".to_owned(), ..new(&fixture, "e") };
    let Opened { row: found, counted } = executions.open(again.clone()).await.unwrap();
    assert!(!counted, "the run before did not");
    let Opened { row: same, counted } = executions.open(again.clone()).await.unwrap();
    assert_eq!((same, counted), (found.clone(), true), "this one does");
    assert_eq!((found.attempt, found.status, found.run_id.as_str()), (1, ExecutionStatus::Failed, "r2"));
    assert_eq!(found.deadline, first.deadline, "it goes on over a restart");
    executions.delivered("t", "e").await.unwrap();
    assert_eq!(executions.undelivered("t", "e").await.unwrap(), None);
    let next = executions.open(again).await.unwrap().row;
    assert_eq!(
        (next.attempt, next.status, next.child_thread.as_str()),
        (2, ExecutionStatus::Pending, "subagent:e:2")
    );
    assert_eq!(executions.of_thread("t").await.unwrap().len(), 2);
}

#[tokio::test]
async fn what_no_run_goes_on_with_is_cancelled_and_a_deleted_thread_takes_all() {
    let fixture = fixture().await;
    let executions = fixture.records.executions();
    let ended = executions.open(new(&fixture, "ended")).await.unwrap().row;
    let ended = executions.finish(&ended, end(ExecutionStatus::TimedOut)).await.unwrap();
    fixture.clock.advance_seconds(1);
    let left = executions.open(new(&fixture, "left")).await.unwrap().row;
    let elsewhere = NewExecution { thread_id: "u".to_owned(), ..new(&fixture, "elsewhere") };
    executions.open(elsewhere).await.unwrap();
    let used = end(ExecutionStatus::Cancelled).usage;
    for (row, taken) in [(&ended, true), (&left, true), (&ended, false), (&left, false)] {
        let abandoned = executions
            .take_over(row, ("r2", Delegating::Unrecorded), "the run is over", &used)
            .await
            .unwrap();
        assert_eq!(abandoned, taken, "of two that ask, one gets it");
    }
    let rows = executions.of_thread("t").await.unwrap();
    assert_eq!(rows[0], listed(ExecutionRow { run_id: "r2".to_owned(), ..ended.clone() }), "it had ended");
    assert_eq!(
        (rows[1].status, rows[1].error.as_deref(), rows[1].run_id.as_str()),
        (ExecutionStatus::Cancelled, Some("the run is over"), "r2")
    );
    assert_eq!(rows[1].usage, used);
    executions.counted("t", "r2", &[("ended".to_owned(), 2)]).await.unwrap();
    assert!(!executions.of_thread("t").await.unwrap()[0].counted, "another attempt");
    executions.counted("t", "r2", &[("ended".to_owned(), 1)]).await.unwrap();
    assert!(
        !executions
            .take_over(&rows[0], ("r3", Delegating::Unrecorded), "the run is over", &used)
            .await
            .unwrap(),
        "counted"
    );
    assert_eq!(executions.of_thread("u").await.unwrap()[0].status, ExecutionStatus::Pending);

    fixture
        .records
        .threads()
        .create(NewThread { thread_id: "t".into(), ..NewThread::default() })
        .await
        .unwrap();
    let reservation = fixture.records.runs().reserve("t", WriterKind::Delete).await.unwrap();
    fixture.records.delete_thread(reservation).await.unwrap();
    assert_eq!(executions.of_thread("t").await.unwrap(), []);
    let error = executions.finish(&ended, end(ExecutionStatus::Completed)).await.unwrap_err();
    assert_eq!(error.to_string(), "Execution ended not found");
}

/// A process that stood still wakes up and finds that another run goes on with its subagent.
#[tokio::test]
async fn a_run_that_an_execution_was_taken_from_decides_nothing_about_it() {
    let fixture = fixture().await;
    let executions = fixture.records.executions();
    let former = executions.open(new(&fixture, "e")).await.unwrap().row;
    let taken = NewExecution { run_id: "r2".to_owned(), ..new(&fixture, "e") };
    let taken = executions.open(taken).await.unwrap().row;
    executions.started(&former, "m", 1).await.unwrap();
    let seen = executions.finish(&former, end(ExecutionStatus::Cancelled)).await.unwrap();
    assert_eq!((seen.status, seen.run_id.as_str()), (ExecutionStatus::Pending, "r2"));
    let ended = executions.finish(&taken, end(ExecutionStatus::Completed)).await.unwrap();
    assert_eq!(ended.status, ExecutionStatus::Completed);
}

/// A process that stood still has lost its run. The execution that the next run goes on with stays that one's, and
/// the stale run opens none.
#[tokio::test]
async fn a_run_that_has_ended_takes_no_execution_and_opens_none() {
    let fixture = fixture().await;
    let (records, executions) = (&fixture.records, fixture.records.executions());
    let of = |run: &str, id: &str| NewExecution {
        run_id: run.to_owned(),
        delegating: Delegating::Run,
        ..new(&fixture, id)
    };
    let refused = async |run: &str, id: &str| {
        let error = executions.open(of(run, id)).await.unwrap_err();
        assert!(matches!(error, RecordsError::RunEnded { .. }), "{error}");
    };
    refused("r1", "e").await;
    create_thread(records, "t").await;
    start(records, "t", "r1").await;
    executions.open(of("r1", "e")).await.unwrap();
    records.runs().recover_orphans(fixture.clock.now(), TimeDelta::zero()).await.unwrap();
    start(records, "t", "r2").await;
    let row = executions.open(of("r2", "e")).await.unwrap().row;
    assert_eq!(row.run_id, "r2", "that goes on with it");
    refused("r1", "e").await;
    refused("r1", "other").await;
    let none = BTreeMap::new();
    let taken = executions.take_over(&row, ("r1", Delegating::Run), "the run is over", &none);
    assert!(!taken.await.unwrap());
    assert_eq!(executions.of_thread("t").await.unwrap(), [listed(row.clone())]);
    let taken = executions.take_over(&row, ("r2", Delegating::Run), "the run is over", &none);
    assert!(taken.await.unwrap());
    // A run of another thread.
    create_thread(records, "u").await;
    start(records, "u", "r3").await;
    refused("r3", "e").await;
}

/// A process stood still while another one took its run over, to roll it back: the row is active, and no more its own.
#[tokio::test]
async fn a_run_that_was_taken_over_delegates_nothing_more() {
    let fixture = fixture().await;
    let (own, other) = (fixture.owner("own").await, fixture.owner("other").await);
    create_thread(&own, "t").await;
    start(&own, "t", "r1").await;
    let of_run = |id: &str| NewExecution { delegating: Delegating::Run, ..new(&fixture, id) };
    let row = own.executions().open(of_run("e")).await.unwrap().row;
    own.runs().request_cancel("r1", CancelAction::Rollback).await.unwrap();
    let found = other.runs().recover_owner(fixture.clock.now(), "own").await.unwrap();
    assert_eq!(found.rollbacks.len(), 1);
    for id in ["e", "late"] {
        let error = own.executions().open(of_run(id)).await.unwrap_err();
        assert!(matches!(error, RecordsError::RunEnded { .. }), "{error}");
    }
    let none = BTreeMap::new();
    let taken = own.executions().take_over(&row, ("r1", Delegating::Run), "the run is over", &none);
    assert!(!taken.await.unwrap());
    let batch = NewBatch { run_id: "r1".to_owned(), ..super::batches::batch("late", 1, 1, 1) };
    let error = own.batches().submit(batch).await.unwrap_err();
    assert!(matches!(error, RecordsError::RunEnded { .. }), "{error}");
    assert_eq!(own.executions().of_thread("t").await.unwrap(), [listed(row)]);
    assert_eq!(own.batches().get("late").await.unwrap(), None);
}

/// Of a thread that was deleted nothing is shown to the next user who takes its id.
#[tokio::test]
async fn late_executions_of_a_deleted_thread_are_refused() {
    let fixture = fixture().await;
    let (records, executions) = (&fixture.records, fixture.records.executions());
    create_thread(records, "t").await;
    start(records, "t", "r1").await;
    let batch_item = NewExecution { kind: ExecutionKind::BatchItem, ..new(&fixture, "item") };
    let item = executions.open(batch_item).await.unwrap().row;
    let of_run = || NewExecution { delegating: Delegating::Run, ..new(&fixture, "e") };
    let of_item = |id: &str| NewExecution {
        delegating: Delegating::Item,
        parent_execution: Some("item".to_owned()),
        ..new(&fixture, id)
    };
    executions.open(of_run()).await.unwrap();
    records.runs().finish("r1", &super::support::end(RunStatus::Success)).await.unwrap();
    executions.open(of_item("call")).await.unwrap();
    executions.finish(&item, end(ExecutionStatus::Completed)).await.unwrap();
    let ended = executions.open(of_item("late")).await.unwrap_err();
    assert_eq!(ended.to_string(), "Execution item not found", "it has ended");
    let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
    records.delete_thread(reservation).await.unwrap();
    create_thread(records, "t").await;
    start(records, "t", "of another user").await;
    let late = executions.open(of_run()).await.unwrap_err();
    assert!(matches!(late, RecordsError::RunEnded { .. }), "{late}");
    assert!(executions.open(of_item("call")).await.unwrap_err().is_not_found());
    assert_eq!(executions.of_thread("t").await.unwrap(), []);
}

/// A copied thread has the ledger of its source, and with it the ids of the source's executions.
#[tokio::test]
async fn a_copy_of_a_thread_takes_no_execution_of_its_source() {
    let fixture = fixture().await;
    let executions = fixture.records.executions();
    let source = executions.open(new(&fixture, "e")).await.unwrap().row;
    let of_copy =
        NewExecution { thread_id: "copy".to_owned(), run_id: "r2".to_owned(), ..new(&fixture, "e") };
    let copy = executions.open(of_copy.clone()).await.unwrap().row;
    assert_eq!((copy.attempt, copy.child_thread.as_str()), (2, "subagent:e:2"));
    assert_eq!(executions.of_thread("t").await.unwrap(), [listed(source)], "it is left alone");
    assert_eq!(executions.open(of_copy).await.unwrap().row, copy, "found again");
    executions.delivered("t", "e").await.unwrap();
    assert!(!executions.of_thread("copy").await.unwrap()[0].delivered);
    assert!(executions.of_thread("t").await.unwrap()[0].delivered);
    let next = executions.open(new(&fixture, "e")).await.unwrap().row;
    assert_eq!((next.attempt, next.thread_id.as_str()), (3, "t"));
}

/// An execution is counted in the transaction that writes the sums of its run, and by that run alone.
#[tokio::test]
async fn the_sums_of_a_run_and_what_they_contain_are_written_together() {
    let fixture = fixture().await;
    let (records, executions) = (&fixture.records, fixture.records.executions());
    create_thread(records, "t").await;
    admit(records, "t", "r1").await;
    for id in ["decided", "early", "foreign", "late"] {
        let row = executions.open(new(&fixture, id)).await.unwrap().row;
        assert!(!executions.finish(&row, end(ExecutionStatus::Completed)).await.unwrap().counted);
    }
    let rows = executions.of_thread("t").await.unwrap();
    let foreign = rows.into_iter().find(|row| row.execution_id == "foreign").unwrap();
    assert!(
        executions.take_over(&foreign, ("r2", Delegating::Unrecorded), "", &BTreeMap::new()).await.unwrap()
    );
    let counted = async || -> BTreeMap<String, bool> {
        let rows = executions.of_thread("t").await.unwrap();
        rows.into_iter().map(|row| (row.execution_id, row.counted)).collect()
    };
    let of = |ids: &[&str]| RunTotals {
        executions: ids.iter().map(|id| ((*id).to_owned(), 1)).collect(),
        ..RunTotals::default()
    };
    // The foreign one is another run's.
    let expected = |marked: &[&str]| -> BTreeMap<String, bool> {
        let ids = ["decided", "early", "foreign", "late"];
        ids.into_iter().map(|id| (id.to_owned(), marked.contains(&id))).collect()
    };
    assert!(!records.runs().progress("r1", &of(&["early"])).await.unwrap(), "it does not run yet");
    assert_eq!(counted().await, expected(&[]));
    records.runs().start("r1").await.unwrap();
    assert!(records.runs().progress("r1", &of(&["early"])).await.unwrap());
    assert_eq!(counted().await, expected(&["early"]));
    // A process that dies between the two leaves the decided sums.
    let decided = RunEnd { totals: of(&["early", "decided"]), ..super::support::end(RunStatus::Success) };
    records.runs().decide("r1", &decided).await.unwrap();
    assert_eq!(counted().await, expected(&["early", "decided"]));
    let ends = RunEnd {
        totals: of(&["early", "decided", "late", "foreign"]),
        ..super::support::end(RunStatus::Success)
    };
    records.runs().finish("r1", &ends).await.unwrap();
    assert_eq!(counted().await, expected(&["early", "decided", "late"]));
}

#[tokio::test]
async fn a_run_reads_what_is_left_of_its_thread_and_no_items_of_batches() {
    let fixture = fixture().await;
    let executions = fixture.records.executions();
    let open = async |id: &str, kind, parent: Option<&str>| {
        let parent_execution = parent.map(str::to_owned);
        executions.open(NewExecution { parent_execution, kind, ..new(&fixture, id) }).await.unwrap().row
    };
    for number in 0..1000 {
        let item = open(&format!("item{number}"), ExecutionKind::BatchItem, None).await;
        executions.finish(&item, end(ExecutionStatus::Completed)).await.unwrap();
    }
    let left = async || {
        let rows = executions.unsettled("t").await.unwrap().into_iter();
        rows.map(|row| row.execution_id).collect::<Vec<_>>()
    };
    assert!(left().await.is_empty());
    let task = open("task", ExecutionKind::Task, None).await;
    assert_eq!(left().await, ["task"], "at work");
    executions.finish(&task, end(ExecutionStatus::Completed)).await.unwrap();
    assert_eq!(left().await, ["task"], "not delivered, not counted");
    executions.delivered("t", "task").await.unwrap();
    assert_eq!(left().await, ["task"], "not counted");
    executions.counted("t", "r1", &[("task".to_owned(), 1)]).await.unwrap();
    assert!(left().await.is_empty());
    let unused = open("unused", ExecutionKind::Task, None).await;
    let nothing = ExecutionEnd { usage: BTreeMap::new(), ..end(ExecutionStatus::Failed) };
    executions.finish(&unused, nothing).await.unwrap();
    executions.delivered("t", "unused").await.unwrap();
    assert!(left().await.is_empty(), "there is nothing to count");

    // A call of an external agent is looked at while it works, and not if an item at work makes it.
    let (item, acp) = (ExecutionKind::BatchItem, ExecutionKind::Acp);
    let item = open("item", item, None).await;
    let call = open("call", acp, None).await;
    open("call of an item", acp, Some("item")).await;
    assert_eq!(left().await, ["call"]);
    executions.finish(&call, end(ExecutionStatus::Completed)).await.unwrap();
    executions.finish(&item, end(ExecutionStatus::Completed)).await.unwrap();
    assert_eq!(left().await, ["call of an item"], "its item has ended");

    assert_eq!(executions.number("t").await.unwrap(), 1005);
    let threads = executions.child_threads("t").await.unwrap();
    assert!(threads.len() == 1005 && threads.contains(&"subagent:item0".to_owned()));
    assert_eq!(executions.number("u").await.unwrap(), 0);
}

/// A definition is long, and nobody who lists executions prints it.
#[tokio::test]
async fn lists_of_executions_read_no_definition() {
    let fixture = fixture().await;
    let executions = fixture.records.executions();
    let first = executions.open(new(&fixture, "e")).await.unwrap().row;
    executions.finish(&first, end(ExecutionStatus::Completed)).await.unwrap();
    executions.delivered("t", "e").await.unwrap();
    let second = executions.open(new(&fixture, "e")).await.unwrap().row;
    let of_batch = NewExecution { kind: ExecutionKind::BatchItem, ..new(&fixture, "item") };
    executions.open(of_batch).await.unwrap();
    assert_eq!(executions.definition(&second).await.unwrap(), Some(object(json!({"name": "bash"}))));
    sql(&fixture.records, "UPDATE executions SET definition_json = 'no JSON'").await;
    assert!(executions.definition(&second).await.is_err(), "what reads it fails");
    assert_eq!(executions.of_thread("t").await.unwrap().len(), 3);
    assert_eq!(executions.delegated_by_runs("t").await.unwrap().len(), 2);
    assert_eq!(executions.unsettled("t").await.unwrap().len(), 2);
    assert_eq!(executions.newest("t", "e").await.unwrap(), Some(listed(second)));
    assert_eq!(executions.newest("t", "item").await.unwrap(), None, "the batch may be another user's");
    assert_eq!(executions.newest("u", "e").await.unwrap(), None);
}

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::json;

use super::support::*;
use crate::*;

fn totals(n: i64) -> RunTotals {
    RunTotals {
        message_count: n,
        first_human_message: Some(format!("hello {n}")),
        last_ai_message: Some(format!("bye {n}")),
        total_input_tokens: n + 1,
        total_output_tokens: n + 2,
        total_tokens: n + 3,
        llm_call_count: n + 4,
        lead_agent_tokens: n + 5,
        subagent_tokens: n + 6,
        middleware_tokens: n + 7,
        token_usage_by_model: object(json!({"m": {"total_tokens": n}})),
        executions: Vec::new(),
    }
}

#[tokio::test]
async fn run_goes_from_pending_to_success() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    let admitted = admit(records, "t", "r").await;
    // Only a running run makes progress.
    assert!(!runs.progress("r", &totals(1)).await.unwrap());
    assert_eq!(run(records, "r").await, admitted);

    fixture.clock.advance_micros(1);
    assert!(matches!(runs.start("r").await.unwrap(), StartOutcome::Started { .. }));
    let running = RunRow { status: RunStatus::Running, updated_at: fixture.clock.now(), ..admitted };
    assert_eq!(run(records, "r").await, running);

    fixture.clock.advance_micros(1);
    assert!(runs.progress("r", &totals(10)).await.unwrap());
    // Omitted texts are kept.
    assert!(
        runs.progress("r", &RunTotals { first_human_message: None, last_ai_message: None, ..totals(10) })
            .await
            .unwrap()
    );
    let progressed = RunRow { totals: totals(10), updated_at: fixture.clock.now(), ..running };
    assert_eq!(run(records, "r").await, progressed);

    fixture.clock.advance_micros(1);
    let finish = RunEnd {
        status: RunStatus::Success,
        error: None,
        stop_reason: Some("loop_capped".to_owned()),
        // Long texts are truncated.
        display_name: Some("é".repeat(300)),
        left_checkpoint: Some("c2".to_owned()),
        rollback_settled: false,
        not_before: None,
        totals: RunTotals {
            first_human_message: None,
            last_ai_message: Some("é".repeat(2001)),
            ..totals(20)
        },
    };
    assert_eq!(runs.finish("r", &finish).await.unwrap(), FinishOutcome::Finished { promoted: None });
    let finished = RunRow {
        status: RunStatus::Success,
        stop_reason: Some("loop_capped".to_owned()),
        left_checkpoint: Some("c2".to_owned()),
        totals: RunTotals {
            first_human_message: Some("hello 10".to_owned()),
            last_ai_message: Some("é".repeat(2000)),
            ..totals(20)
        },
        updated_at: fixture.clock.now(),
        ..progressed
    };
    assert_eq!(run(records, "r").await, finished);
    assert_eq!(thread(records, "t").await.display_name, Some("é".repeat(DISPLAY_NAME_MAX_CHARS)));
    assert_eq!(holder(records, "t").await, None);
}

/// Its last frames were ahead of the clock; or its process's clock is, which is the same for the next process.
#[tokio::test]
async fn a_run_starts_after_the_end_of_the_run_before_it_unless_the_clock_was_set_back() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    let now = fixture.clock.now();
    let starts = async |run_id: &str| {
        admit(records, "t", run_id).await;
        match runs.start(run_id).await.unwrap() {
            StartOutcome::Started { after } => after,
            other => panic!("{other:?}"),
        }
    };
    let ends = async |run_id: &str, not_before: DateTime<Utc>| {
        let end = RunEnd { not_before: Some(not_before), ..end(RunStatus::Success) };
        runs.finish(run_id, &end).await.unwrap();
        run(records, run_id).await.updated_at
    };
    let seconds = TimeDelta::seconds;
    assert_eq!(starts("r1").await, now);
    assert_eq!(ends("r1", now - seconds(1)).await, now);
    assert_eq!(starts("r2").await, now);
    assert_eq!(ends("r2", now + seconds(5)).await, now + seconds(5));
    assert_eq!(starts("r3").await, now + seconds(5));
    assert_eq!(ends("r3", now + seconds(60)).await, now, "it does not count");

    // The time of the thread is still that of the end of the second run.
    fixture.clock.advance_seconds(-54);
    assert_eq!(starts("r4").await, now + seconds(5));
    assert_eq!(ends("r4", now).await, now);
    fixture.clock.advance_seconds(-1);
    assert_eq!(starts("r5").await, now - seconds(55));
}

#[tokio::test]
async fn runs_are_read_in_brief_and_for_their_usage() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    for thread_id in ["t", "other"] {
        create_thread(records, thread_id).await;
    }
    for run_id in ["r1", "r2"] {
        start(records, "t", run_id).await;
        fixture.clock.advance_micros(1);
        let end = RunEnd { totals: totals(10), ..end(RunStatus::Success) };
        runs.finish(run_id, &end).await.unwrap();
    }
    let reservation = runs.reserve("t", WriterKind::CheckpointWrite).await.unwrap();
    let brief = async |run_id: &str| {
        let RunRow { run_id, status, created_at, updated_at, .. } = run(records, run_id).await;
        RunBrief { run_id, status, created_at, updated_at }
    };
    let (first, second) = (brief("r1").await, brief("r2").await);
    assert_eq!(runs.briefs("t", u32::MAX).await.unwrap(), [second.clone(), first]);
    assert_eq!(runs.briefs("t", 1).await.unwrap(), [second]);
    assert_eq!(runs.briefs("other", 9).await.unwrap(), []);
    let used = RunUsage {
        status: RunStatus::Success,
        model_name: None,
        total_input_tokens: 11,
        total_output_tokens: 12,
        total_tokens: 13,
        lead_agent_tokens: 15,
        subagent_tokens: 16,
        middleware_tokens: 17,
        token_usage_by_model: object(json!({"m": {"total_tokens": 10}})),
    };
    assert_eq!(runs.usage("t").await.unwrap(), [used.clone(), used]);
    assert_eq!(runs.usage("other").await.unwrap(), []);
    reservation.release().await.unwrap();
}

/// A process that dies between the decision and the end has said what the run leaves.
#[tokio::test]
async fn what_a_run_leaves_stays_unless_a_later_end_knows_better() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    let left =
        |left: Option<&str>| RunEnd { left_checkpoint: left.map(str::to_owned), ..end(RunStatus::Success) };
    for (run_id, decided, finished, expected) in [
        ("r1", None, None, None),
        ("r2", Some("c1"), None, Some("c1")),
        ("r3", Some("c1"), Some("c2"), Some("c2")),
        ("r4", Some("c1"), Some(""), Some("")),
    ] {
        start(records, "t", run_id).await;
        runs.decide(run_id, &left(decided)).await.unwrap();
        assert_eq!(run(records, run_id).await.left_checkpoint.as_deref(), decided);
        runs.finish(run_id, &left(finished)).await.unwrap();
        assert_eq!(run(records, run_id).await.left_checkpoint.as_deref(), expected);
    }
}

#[tokio::test]
async fn run_starts_once() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t").await;
    start(&fixture.records, "t", "r").await;
    let runs = fixture.records.runs();
    assert_eq!(runs.start("r").await.unwrap(), StartOutcome::NotPending(RunStatus::Running));
    assert_eq!(runs.start("unknown").await.unwrap_err().to_string(), "Run unknown not found");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn start_racing_with_cancel_has_one_winner() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    for round in 0..50 {
        let run_id = format!("r{round}");
        admit(records, "t", &run_id).await;
        let (runs, id) = (records.runs().clone(), run_id.clone());
        let cancelling =
            tokio::spawn(async move { runs.request_cancel(&id, CancelAction::Interrupt).await.unwrap() });
        let started = records.runs().start(&run_id).await.unwrap();
        assert_eq!(cancelling.await.unwrap(), CancelOutcome::Accepted);
        let status = match started {
            StartOutcome::Started { .. } => RunStatus::Running,
            StartOutcome::Cancelled(CancelAction::Interrupt) => RunStatus::Pending,
            other => panic!("{other:?}"),
        };
        assert_eq!(run(records, &run_id).await.status, status);
        records.runs().finish(&run_id, &end(RunStatus::Interrupted)).await.unwrap();
    }
}

#[tokio::test]
async fn every_final_status_ends_a_run_for_good() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    for status in [RunStatus::Success, RunStatus::Error, RunStatus::Timeout, RunStatus::Interrupted] {
        let run_id = status.as_str();
        start(records, "t", run_id).await;
        let finish = RunEnd { error: Some("why".to_owned()), ..end(status) };
        runs.finish(run_id, &finish).await.unwrap();
        let row = run(records, run_id).await;
        assert_eq!((row.status, row.error.as_deref()), (status, Some("why")));

        let before = dump(records).await;
        let again = runs.finish(run_id, &end(RunStatus::Success)).await.unwrap();
        assert_eq!(again, FinishOutcome::AlreadyTerminal(status));
        assert_eq!(runs.start(run_id).await.unwrap(), StartOutcome::NotPending(status));
        assert!(!runs.progress(run_id, &totals(1)).await.unwrap());
        let cancel = runs.request_cancel(run_id, CancelAction::Rollback).await.unwrap();
        let expected = match status {
            RunStatus::Interrupted => CancelOutcome::AlreadyInterrupted,
            status => CancelOutcome::AlreadyTerminal(status),
        };
        assert_eq!(cancel, expected);
        assert_eq!(dump(records).await, before);
    }
    let unknown = runs.finish("unknown", &end(RunStatus::Error)).await.unwrap_err();
    assert_eq!(unknown.to_string(), "Run unknown not found");
}

#[tokio::test]
async fn pending_and_running_are_no_ends() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t").await;
    start(&fixture.records, "t", "r").await;
    let before = dump(&fixture.records).await;
    for status in [RunStatus::Pending, RunStatus::Running] {
        let error = fixture.records.runs().finish("r", &end(status)).await.unwrap_err();
        assert!(matches!(error, RecordsError::Invalid { field: "status", .. }), "{error}");
    }
    assert_eq!(dump(&fixture.records).await, before);
}

#[tokio::test]
async fn cancelled_run_is_reported_at_once_and_keeps_its_thread() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    start(records, "t", "r").await;
    fixture.clock.advance_micros(1);
    assert_eq!(runs.request_cancel("r", CancelAction::Rollback).await.unwrap(), CancelOutcome::Accepted);
    let row = run(records, "r").await;
    assert_eq!((row.status, row.reported_status()), (RunStatus::Running, RunStatus::Interrupted));
    assert_eq!(row.cancel_action, Some(CancelAction::Rollback));
    assert_eq!(row.cancel_requested_at, Some(fixture.clock.now()));
    assert_eq!(holder(records, "t").await.as_deref(), Some("r"));

    let before = dump(records).await;
    let again = runs.request_cancel("r", CancelAction::Interrupt).await.unwrap();
    assert_eq!(again, CancelOutcome::AlreadyInterrupted);
    assert_eq!(dump(records).await, before);
    assert_eq!(
        runs.request_cancel("unknown", CancelAction::Interrupt).await.unwrap(),
        CancelOutcome::NotFound
    );
}

#[tokio::test]
async fn cancelled_run_does_not_end_as_success() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    start(records, "t", "r").await;
    runs.request_cancel("r", CancelAction::Rollback).await.unwrap();
    let before = dump(records).await;
    let refused = runs.finish("r", &end(RunStatus::Success)).await.unwrap();
    assert_eq!(refused, FinishOutcome::CancelRequested(CancelAction::Rollback));
    assert_eq!(dump(records).await, before);
    let rolled_back = RunEnd { error: Some("Rolled back by user".to_owned()), ..settled(RunStatus::Error) };
    runs.finish("r", &rolled_back).await.unwrap();
    assert_eq!(run(records, "r").await.reported_status(), RunStatus::Error);
}

/// The run fails while its rollback is accepted: its end must not drop what was accepted.
#[tokio::test]
async fn a_run_ends_only_once_its_rollback_is_settled() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    start(records, "t", "r").await;
    runs.request_cancel("r", CancelAction::Rollback).await.unwrap();
    let before = dump(records).await;
    for status in [RunStatus::Success, RunStatus::Error, RunStatus::Interrupted] {
        let end = RunEnd { error: Some("why".to_owned()), ..end(status) };
        let refused = runs.decide("r", &end).await.unwrap();
        assert_eq!(refused, DecideOutcome::CancelRequested(CancelAction::Rollback), "{status}");
        let refused = runs.finish("r", &end).await.unwrap();
        assert_eq!(refused, FinishOutcome::CancelRequested(CancelAction::Rollback), "{status}");
    }
    assert_eq!(dump(records).await, before);
    let refused = runs.decide("r", &settled(RunStatus::Success)).await.unwrap();
    assert_eq!(refused, DecideOutcome::CancelRequested(CancelAction::Rollback), "it has not succeeded");
    assert_eq!(runs.decide("r", &settled(RunStatus::Error)).await.unwrap(), DecideOutcome::Decided);
    runs.finish("r", &end(RunStatus::Error)).await.unwrap();
    assert_eq!(run(records, "r").await.status, RunStatus::Error);
    // An interruption leaves what was committed: there is nothing to settle.
    start(records, "t", "s").await;
    runs.request_cancel("s", CancelAction::Interrupt).await.unwrap();
    assert_eq!(runs.decide("s", &end(RunStatus::Error)).await.unwrap(), DecideOutcome::Decided);
}

/// No end but a success drops the old turn, whichever process writes it.
#[tokio::test]
async fn an_edit_fails_only_once_its_restore_is_settled() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    let admit = async |run_id: &str| {
        let edit = NewRun { edits: true, ..new_run("t", run_id) };
        runs.admit(edit, MultitaskStrategy::Reject).await.unwrap();
    };
    admit("r").await;
    runs.start("r").await.unwrap();
    let before = dump(records).await;
    for status in [RunStatus::Error, RunStatus::Interrupted] {
        let refused = runs.decide("r", &end(status)).await.unwrap();
        assert_eq!(refused, DecideOutcome::CancelRequested(CancelAction::Rollback), "{status}");
        let refused = runs.finish("r", &end(status)).await.unwrap();
        assert_eq!(refused, FinishOutcome::CancelRequested(CancelAction::Rollback), "{status}");
    }
    assert_eq!(dump(records).await, before);
    assert_eq!(runs.decide("r", &settled(RunStatus::Error)).await.unwrap(), DecideOutcome::Decided);
    runs.finish("r", &end(RunStatus::Error)).await.unwrap();
    assert_eq!(run(records, "r").await.status, RunStatus::Error);
    // A success keeps the new turn, and one that has not started has written none.
    admit("s").await;
    runs.start("s").await.unwrap();
    runs.finish("s", &end(RunStatus::Success)).await.unwrap();
    assert_eq!(run(records, "s").await.status, RunStatus::Success);
    admit("p").await;
    runs.finish("p", &end(RunStatus::Interrupted)).await.unwrap();
    assert_eq!(run(records, "p").await.status, RunStatus::Interrupted);
}

#[tokio::test]
async fn run_cancelled_before_its_start_does_not_start() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    admit(records, "t", "r").await;
    runs.request_cancel("r", CancelAction::Interrupt).await.unwrap();
    assert_eq!(runs.start("r").await.unwrap(), StartOutcome::Cancelled(CancelAction::Interrupt));
    assert_eq!(run(records, "r").await.status, RunStatus::Pending);
    runs.finish("r", &end(RunStatus::Interrupted)).await.unwrap();
    assert_eq!(holder(records, "t").await, None);
}

#[tokio::test]
async fn waiting_run_that_is_cancelled_ends_without_taking_the_thread() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    start(records, "t", "r1").await;
    wait(records, "t", "r2", MultitaskStrategy::Interrupt).await;
    runs.request_cancel("r2", CancelAction::Interrupt).await.unwrap();
    assert_eq!(runs.start("r2").await.unwrap(), StartOutcome::Cancelled(CancelAction::Interrupt));
    let outcome = runs.finish("r2", &end(RunStatus::Interrupted)).await.unwrap();
    assert_eq!(outcome, FinishOutcome::Finished { promoted: None });
    assert_eq!(holder(records, "t").await.as_deref(), Some("r1"));
    // No run waits any more.
    let outcome = runs.finish("r1", &end(RunStatus::Interrupted)).await.unwrap();
    assert_eq!(outcome, FinishOutcome::Finished { promoted: None });
    assert_eq!(holder(records, "t").await, None);
}

#[tokio::test]
async fn runs_are_listed_last_admitted_first() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    create_thread(records, "other").await;
    admit(records, "other", "elsewhere").await;
    for (run_id, status) in
        [("z", RunStatus::Success), ("a", RunStatus::Error), ("m", RunStatus::Interrupted)]
    {
        start(records, "t", run_id).await;
        runs.finish(run_id, &end(status)).await.unwrap();
        // Clocks may go backwards.
        fixture.clock.advance_micros(-1);
    }
    start(records, "t", "now").await;
    let list = async |status, limit, offset| {
        let rows = runs.list_by_thread("t", &RunQuery { status, limit, offset }).await.unwrap();
        rows.into_iter().map(|row| row.run_id).collect::<Vec<_>>()
    };
    assert_eq!(list(None, 100, 0).await, ["now", "m", "a", "z"]);
    assert_eq!(list(None, 2, 1).await, ["m", "a"]);
    assert_eq!(list(None, 2, u64::MAX).await, [""; 0]);
    assert_eq!(list(Some(RunStatus::Running), 9, 0).await, ["now"]);
    assert_eq!(list(Some(RunStatus::Error), 9, 0).await, ["a"]);
    assert_eq!(list(Some(RunStatus::Timeout), 9, 0).await, [""; 0]);

    // The filter uses the status that clients see.
    wait(records, "t", "next", MultitaskStrategy::Interrupt).await;
    assert_eq!(list(Some(RunStatus::Running), 9, 0).await, [""; 0]);
    assert_eq!(list(Some(RunStatus::Interrupted), 9, 0).await, ["now", "m"]);
    assert_eq!(list(Some(RunStatus::Pending), 9, 0).await, ["next"]);
    assert_eq!(
        runs.list_by_thread("unknown", &RunQuery { status: None, limit: 9, offset: 0 }).await.unwrap(),
        []
    );
}

#[test]
fn names_read_back_and_others_do_not() {
    for status in ["pending", "running", "success", "error", "timeout", "interrupted"] {
        assert_eq!(status.parse::<RunStatus>().unwrap().to_string(), status);
    }
    for kind in ["run", "checkpoint_write", "artifact_write", "delete"] {
        assert_eq!(kind.parse::<OperationKind>().unwrap().to_string(), kind);
    }
    for strategy in ["reject", "interrupt", "rollback", "enqueue"] {
        assert_eq!(strategy.parse::<MultitaskStrategy>().unwrap().to_string(), strategy);
    }
    assert_eq!(
        "queue".parse::<MultitaskStrategy>().unwrap_err().to_string(),
        "unknown multitask strategy 'queue'"
    );
    assert!("Pending".parse::<RunStatus>().is_err());
}

#[tokio::test]
async fn the_last_events_are_stored_with_the_decided_end_or_its_refusal() {
    let fixture = fixture_with(EventBackend::Database).await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    let event = |event_type: &str| NewEvent::new(event_type, "trace", json!(null));
    let conclude = async |run_id: &'static str, status: RunStatus| {
        let end = end(status);
        records
            .conclude_and_decide(("t", run_id), (0, vec![event("last")]), event("run.delivery"), &end)
            .await
    };
    let missing = conclude("r", RunStatus::Success).await.unwrap_err();
    assert_eq!(missing.to_string(), "Run r not found");
    start(records, "t", "r").await;
    runs.request_cancel("r", CancelAction::Interrupt).await.unwrap();
    let refused = conclude("r", RunStatus::Success).await.unwrap();
    assert_eq!(refused, DecideOutcome::CancelRequested(CancelAction::Interrupt));
    let types = async || {
        let listed = records.events().list(&EventQuery::new("t", "r")).await.unwrap();
        listed.into_iter().map(|event| event.event_type).collect::<Vec<_>>()
    };
    assert_eq!(types().await, ["last", "run.delivery"]);
    assert_eq!(runs.decide("r", &end(RunStatus::Interrupted)).await.unwrap(), DecideOutcome::Decided);
    // A repetition after a doubt stores nothing twice.
    assert_eq!(conclude("r", RunStatus::Interrupted).await.unwrap(), DecideOutcome::Decided);
    assert_eq!(types().await, ["last", "run.delivery"]);
    fixture.clock.advance_seconds(1);
    assert_eq!(conclude("r", RunStatus::Interrupted).await.unwrap(), DecideOutcome::Decided);
    assert_eq!(types().await, ["last", "run.delivery", "last"]);
    runs.finish("r", &end(RunStatus::Interrupted)).await.unwrap();
    let over = conclude("r", RunStatus::Interrupted).await.unwrap();
    assert_eq!(over, DecideOutcome::AlreadyTerminal(RunStatus::Interrupted));

    let fixture = fixture_with(EventBackend::Memory).await;
    let end = end(RunStatus::Success);
    let elsewhere =
        fixture.records.conclude_and_decide(("t", "r"), (0, vec![]), event("run.delivery"), &end).await;
    assert!(matches!(elsewhere, Err(RecordsError::Invalid { field: "events", .. })), "{elsewhere:?}");
}

/// Refused requests take numbers of the sequence in Postgres, and deleted runs leave gaps in any database.
#[tokio::test]
async fn refused_requests_and_deleted_runs_hide_no_run_that_ended() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    start(records, "t", "ended").await;
    runs.finish("ended", &end(RunStatus::Error)).await.unwrap();
    start(records, "t", "holds").await;
    if records.db.dialect() == query::Dialect::Postgres {
        // As after 20,000 of the following requests.
        sql(records, "ALTER TABLE runs ALTER COLUMN admission_seq RESTART WITH 20000").await;
    }
    let refused = runs.admit(new_run("t", "refused"), MultitaskStrategy::Reject).await.unwrap_err();
    assert!(refused.is_conflict(), "{refused}");
    runs.finish("holds", &end(RunStatus::Success)).await.unwrap();
    start(records, "t", "works").await;
    if records.db.dialect() == query::Dialect::Sqlite {
        // As after the deletion of 20,000 runs.
        sql(records, "UPDATE runs SET admission_seq = admission_seq + 20000 WHERE run_id = 'works'").await;
    }
    let of = async |status, limit| {
        let found = runs.of_all_threads(None, &RunQuery { status, limit, offset: 0 }).await.unwrap();
        found.into_iter().map(|run| run.run_id).collect::<Vec<_>>()
    };
    assert_eq!(of(None, 9).await, ["works", "holds", "ended"]);
    assert_eq!(of(Some(RunStatus::Error), 1).await, ["ended"]);
    assert_eq!(of(Some(RunStatus::Running), 9).await, ["works"]);
}

#[tokio::test]
async fn what_had_finished_before_a_run_is_noted_while_it_runs() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    admit(records, "t", "r").await;
    let tasks = ["a".to_owned(), "b".to_owned()];
    assert!(runs.note_finished_before("r", &tasks).await.unwrap_err().is_not_found(), "it has not started");
    runs.start("r").await.unwrap();
    assert_eq!(runs.finished_before("r").await.unwrap(), None, "it has not looked");
    runs.note_finished_before("r", &[]).await.unwrap();
    assert_eq!(runs.finished_before("r").await.unwrap(), Some(Vec::new()));
    runs.note_finished_before("r", &tasks).await.unwrap();
    assert_eq!(runs.finished_before("r").await.unwrap().unwrap(), tasks);
    assert!(runs.note_finished_before("none", &tasks).await.unwrap_err().is_not_found());
    assert_eq!(runs.finished_before("none").await.unwrap(), None);
}

/// A run that is read alone has it.
#[tokio::test]
async fn large_metadata_of_a_run_is_left_out_of_lists() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t").await;
    let runs = fixture.records.runs();
    let omitted = object(json!({ METADATA_OMITTED_KEY: true }));
    for (run_id, length, is_listed) in [("fits", 65_528, true), ("large", 65_529, false)] {
        // As JSON eight bytes more.
        let metadata = object(json!({"k": "x".repeat(length)}));
        let new = NewRun { metadata: metadata.clone(), ..new_run("t", run_id) };
        runs.admit(new, MultitaskStrategy::Enqueue).await.unwrap();
        assert_eq!(runs.get(run_id).await.unwrap().unwrap().metadata, metadata);
        let newest = RunQuery { status: None, limit: 1, offset: 0 };
        for listed in [
            runs.list_by_thread("t", &newest).await.unwrap(),
            runs.of_all_threads(None, &newest).await.unwrap(),
        ] {
            let [listed] = &listed[..] else { panic!("{listed:?}") };
            assert_eq!((listed.run_id.as_str(), listed.metadata == metadata), (run_id, is_listed));
            assert!(is_listed || listed.metadata == omitted, "{:?}", listed.metadata);
        }
    }
}

/// The request of the first run, and of those after it while they fit.
#[tokio::test]
async fn requests_are_read_up_to_a_limit_in_bytes() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t").await;
    let runs = fixture.records.runs();
    let ids = ["r1", "r2", "r3"].map(str::to_owned);
    for run_id in &ids {
        // As JSON 102 bytes.
        let new = NewRun { kwargs: json!("x".repeat(100)), ..new_run("t", run_id) };
        runs.admit(new, MultitaskStrategy::Enqueue).await.unwrap();
    }
    for (max_bytes, expected) in [(0, 1), (203, 1), (204, 2), (305, 2), (306, 3), (usize::MAX, 3)] {
        let asked = runs.kwargs(&ids, max_bytes).await.unwrap();
        assert_eq!(asked.keys().collect::<Vec<_>>(), ids.iter().take(expected).collect::<Vec<_>>());
    }
}

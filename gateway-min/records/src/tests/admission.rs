use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::Barrier;
use tokio::time::timeout;

use super::support::*;
use crate::MultitaskStrategy::{Enqueue, Interrupt, Reject, Rollback};
use crate::*;

#[tokio::test]
async fn admitted_run_reads_back() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t").await;
    let owner = fixture.owner("w").await;
    fixture.clock.advance_micros(9);
    let new = NewRun {
        run_id: "r".to_owned(),
        thread_id: "t".to_owned(),
        visible_to: Some("ann".to_owned()),
        assistant_id: Some("lead_agent".to_owned()),
        user_id: Some("ann".to_owned()),
        idempotency_key: Some("key".to_owned()),
        model_name: Some("m".to_owned()),
        metadata: object(json!({"a": 1})),
        kwargs: json!({"input": {"messages": []}, "config": null}),
        first_human_message: Some("é".repeat(2001)),
        follow_up_to_run_id: Some("r0".to_owned()),
        edits: true,
        acknowledged: true,
    };
    let admission = owner.runs().admit(new, Reject).await.unwrap();
    let expected = RunRow {
        run_id: "r".to_owned(),
        thread_id: "t".to_owned(),
        assistant_id: Some("lead_agent".to_owned()),
        user_id: Some("ann".to_owned()),
        status: RunStatus::Pending,
        operation_kind: OperationKind::Run,
        waiting: false,
        idempotency_key: Some("key".to_owned()),
        model_name: Some("m".to_owned()),
        multitask_strategy: Reject,
        metadata: object(json!({"a": 1})),
        error: None,
        stop_reason: None,
        totals: RunTotals { first_human_message: Some("é".repeat(2000)), ..RunTotals::default() },
        follow_up_to_run_id: Some("r0".to_owned()),
        edits: true,
        owner_worker_id: Some("w".to_owned()),
        lease_expires_at: Some(fixture.clock.now() + chrono::TimeDelta::seconds(30)),
        cancel_action: None,
        cancel_requested_at: None,
        decided_status: None,
        left_checkpoint: None,
        history_lost: None,
        created_at: fixture.clock.now(),
        updated_at: fixture.clock.now(),
    };
    assert_eq!(admission, Admission::Admitted(expected.clone()));
    assert_eq!(run(&fixture.records, "r").await, expected);
    let runs = fixture.records.runs();
    assert_eq!(runs.active_for_thread("t").await.unwrap(), Some(expected));
    let asked = runs.kwargs(&["r".to_owned(), "none".to_owned()], 0).await.unwrap();
    assert_eq!(asked, [("r".to_owned(), json!({"input": {"messages": []}, "config": null}))].into());
    assert_eq!(runs.kwargs(&[], 0).await.unwrap(), [].into());
}

/// A feed without messages is first filled from the thread's checkpoints.
#[tokio::test]
async fn a_run_waits_for_the_first_messages_of_its_feed() {
    let fixture = fixture_with(EventBackend::Database).await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    let admit_after = async |run_id: &'static str, strategy: MultitaskStrategy| {
        runs.admit_after_messages(new_run("t", run_id), strategy).await
    };
    let missing = admit_after("r1", Reject).await.unwrap_err();
    assert_eq!(missing.to_string(), "Thread t not found");
    create_thread(records, "t").await;
    let before = dump(records).await;
    assert_eq!(admit_after("r1", Reject).await.unwrap(), None);
    assert_eq!(dump(records).await, before);
    admit(records, "t", "r1").await;
    // Not one of another thread, and no other event.
    create_thread(records, "u").await;
    admit(records, "u", "s").await;
    let event = |category: &str| vec![NewEvent::new("x", category, json!({}))];
    records.events().append("u", "s", event(MESSAGE_CATEGORY)).await.unwrap();
    records.events().append("t", "r1", event("trace")).await.unwrap();
    // The feed comes before the run that holds the thread.
    for strategy in [Reject, Interrupt, Enqueue] {
        assert_eq!(admit_after("r2", strategy).await.unwrap(), None);
    }
    records.events().append("t", "r1", event(MESSAGE_CATEGORY)).await.unwrap();
    assert!(matches!(admit_after("r2", Reject).await, Err(RecordsError::Conflict { .. })));
    assert!(matches!(admit_after("r2", Enqueue).await.unwrap(), Some(Admission::Queued(_))));
    runs.finish("r1", &end(RunStatus::Success)).await.unwrap();
    runs.finish("r2", &end(RunStatus::Success)).await.unwrap();
    assert!(matches!(admit_after("r3", Reject).await.unwrap(), Some(Admission::Admitted(_))));
}

#[tokio::test]
async fn thread_without_row_takes_no_run() {
    let fixture = fixture().await;
    for strategy in [Reject, Interrupt, Rollback] {
        let error = fixture.records.runs().admit(new_run("t", "r"), strategy).await.unwrap_err();
        assert_eq!((error.is_not_found(), error.to_string()), (true, "Thread t not found".to_owned()));
    }
    assert!(dump(&fixture.records).await.is_empty());
}

#[tokio::test]
async fn another_users_thread_takes_no_run() {
    let fixture = fixture_with(EventBackend::Database).await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    let owned = NewThread { thread_id: "of ann".into(), user_id: Some("ann".into()), ..NewThread::default() };
    records.threads().create(owned).await.unwrap();
    create_thread(records, "shared").await;
    let asked = |user: &str, thread_id: &str, run_id: &str| NewRun {
        visible_to: Some(user.to_owned()),
        ..new_run(thread_id, run_id)
    };
    let refused_to_bob = async || {
        let before = dump(records).await;
        for strategy in [Reject, Enqueue, Interrupt, Rollback] {
            let new = || asked("bob", "of ann", "of bob");
            for error in [
                runs.admit(new(), strategy).await.unwrap_err(),
                runs.admit_after_messages(new(), strategy).await.unwrap_err(),
            ] {
                assert_eq!(
                    (error.is_not_found(), error.to_string()),
                    (true, "Thread of ann not found".to_owned())
                );
            }
        }
        // In particular no run is cancelled for it.
        assert_eq!(dump(records).await, before);
    };
    refused_to_bob().await;
    let admitted = runs.admit(asked("ann", "of ann", "r1"), Reject).await.unwrap();
    assert!(matches!(admitted, Admission::Admitted(_)), "{admitted:?}");
    refused_to_bob().await;
    let message = NewEvent::new("x", MESSAGE_CATEGORY, json!({}));
    records.events().append("of ann", "r1", vec![message]).await.unwrap();
    refused_to_bob().await;
    runs.finish("r1", &end(RunStatus::Success)).await.unwrap();
    refused_to_bob().await;
    let again = runs.admit_after_messages(asked("ann", "of ann", "r2"), Reject).await.unwrap();
    assert!(matches!(again, Some(Admission::Admitted(_))), "{again:?}");
    let shared = runs.admit(asked("bob", "shared", "r3"), Reject).await.unwrap();
    assert!(matches!(shared, Admission::Admitted(_)), "{shared:?}");
}

/// Its record says `interrupted` from the request on, so the thread is not at work for its clients.
#[tokio::test]
async fn reject_waits_for_the_last_writes_of_a_cancelled_run_but_not_behind_others() {
    let fixture = fixture().await;
    let records = &fixture.records;
    for action in [CancelAction::Interrupt, CancelAction::Rollback] {
        let thread = action.as_str();
        let id = |run: &str| format!("{thread}-{run}");
        create_thread(records, thread).await;
        start(records, thread, &id("1")).await;
        records.runs().request_cancel(&id("1"), action).await.unwrap();
        let admission = records.runs().admit(new_run(thread, &id("2")), Reject).await.unwrap();
        let Admission::Queued(row) = admission else { panic!("{admission:?}") };
        assert!(row.waiting);
        let refused = records.runs().admit(new_run(thread, &id("3")), Reject).await.unwrap_err();
        assert!(matches!(refused, RecordsError::Conflict { holder: OperationKind::Run, .. }), "{refused}");
        let outcome = records.runs().finish(&id("1"), &settled(RunStatus::Interrupted)).await.unwrap();
        assert_eq!(outcome, FinishOutcome::Finished { promoted: Some(id("2")) });
        assert!(matches!(records.runs().start(&id("2")).await.unwrap(), StartOutcome::Started { .. }));
    }
}

#[tokio::test]
async fn reject_names_what_holds_the_thread() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    start(records, "t", "r1").await;
    let before = dump(records).await;
    let error = records.runs().admit(new_run("t", "r2"), Reject).await.unwrap_err();
    assert!(
        matches!(&error, RecordsError::Conflict { thread_id, holder: OperationKind::Run } if thread_id == "t")
    );
    assert_eq!(error.to_string(), "Thread t already has an active run");
    assert_eq!(dump(records).await, before);
    records.runs().finish("r1", &end(RunStatus::Success)).await.unwrap();

    for kind in
        [WriterKind::CheckpointWrite, WriterKind::ArtifactWrite, WriterKind::Branch, WriterKind::Delete]
    {
        let reservation = records.runs().reserve("t", kind).await.unwrap();
        for strategy in [Reject, Interrupt, Rollback] {
            let before = dump(records).await;
            let error = records.runs().admit(new_run("t", "r2"), strategy).await.unwrap_err();
            assert!(
                matches!(error, RecordsError::Conflict { holder, .. } if holder == kind.into()),
                "{error}"
            );
            assert_eq!(error.to_string(), "Thread t already has an active checkpoint write");
            assert_eq!(dump(records).await, before);
        }
        reservation.release().await.unwrap();
    }
    admit(records, "t", "r2").await;
}

/// Of any process. With these strategies a run does not wait in the queue.
#[tokio::test]
async fn a_run_is_admitted_after_a_note() {
    let fixture = fixture().await;
    let (records, other) = (&fixture.records, fixture.reopen(EventBackend::Memory).await);
    for strategy in [Reject, Interrupt, Rollback] {
        let thread = strategy.as_str();
        create_thread(records, thread).await;
        let note = other.runs().reserve(thread, WriterKind::Note).await.unwrap();
        // A task of its own: a future that nobody polls would keep the thread's lock in Postgres, for which the release
        // waits, until the server ends its transaction.
        let (runs, new) = (records.runs().clone(), new_run(thread, thread));
        let mut run = tokio::spawn(async move { runs.admit(new, strategy).await });
        let early = timeout(Duration::from_millis(50), &mut run).await;
        assert!(early.is_err(), "{strategy}: {early:?}");
        note.release().await.unwrap();
        let admitted = run.await.unwrap().unwrap();
        assert!(matches!(admitted, Admission::Admitted(_)), "{strategy}: {admitted:?}");
    }
}

#[tokio::test]
async fn threads_do_not_hinder_each_other() {
    let fixture = fixture().await;
    for (thread_id, run_id) in [("t1", "r1"), ("t2", "r2")] {
        create_thread(&fixture.records, thread_id).await;
        start(&fixture.records, thread_id, run_id).await;
    }
    assert_eq!(holder(&fixture.records, "t1").await.as_deref(), Some("r1"));
    assert_eq!(holder(&fixture.records, "t2").await.as_deref(), Some("r2"));
}

#[tokio::test]
async fn taken_run_id_is_an_error_and_changes_nothing() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t1").await;
    create_thread(records, "t2").await;
    start(records, "t1", "r1").await;
    start(records, "t2", "r2").await;
    let before = dump(records).await;
    // On a thread that is taken, with the cancellation of its holder undone; and on a free one.
    let waiting = records.runs().admit(new_run("t1", "r2"), Interrupt).await.unwrap_err();
    assert!(matches!(waiting, RecordsError::DuplicateRun { ref run_id } if run_id == "r2"), "{waiting}");
    assert_eq!(dump(records).await, before);
    records.runs().finish("r1", &end(RunStatus::Success)).await.unwrap();
    let free = records.runs().admit(new_run("t1", "r2"), Reject).await.unwrap_err();
    assert_eq!(free.to_string(), "Run r2 already exists; use a new run id");
    assert_eq!(holder(records, "t1").await, None);
}

#[tokio::test]
async fn the_database_itself_allows_one_active_row() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t").await;
    start(&fixture.records, "t", "r1").await;
    for status in ["pending", "running"] {
        let insert = fixture.records.db.builder(&format!(
            "INSERT INTO runs (run_id, thread_id, status, operation_kind, waiting, multitask_strategy, \
             metadata_json, kwargs_json, created_at, updated_at) \
             VALUES ('r3', 't', '{status}', 'run', FALSE, 'reject', '{{}}', 'null', '', '')"
        ));
        let insert = insert.build();
        let inserted = fixture.records.db.write("t", move |tx| Box::pin(tx.execute(insert)));
        let error = inserted.await.unwrap_err().to_string();
        assert!(
            error.contains("UNIQUE constraint failed: runs.thread_id")
                || error.contains("one_active_per_thread"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn idempotency_key_returns_the_first_run_forever() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    let keyed =
        |run_id: &str, key: &str| NewRun { idempotency_key: Some(key.to_owned()), ..new_run("t", run_id) };
    let first = match records.runs().admit(keyed("r1", "k"), Reject).await.unwrap() {
        Admission::Admitted(row) => row,
        other => panic!("{other:?}"),
    };
    for strategy in [Reject, Interrupt, Rollback] {
        let before = dump(records).await;
        let again = records.runs().admit(keyed("r2", "k"), strategy).await.unwrap();
        assert_eq!(again, Admission::Existing(first.clone()));
        assert_eq!(dump(records).await, before);
    }
    records.runs().finish("r1", &end(RunStatus::Success)).await.unwrap();
    let Admission::Existing(row) = records.runs().admit(keyed("r2", "k"), Reject).await.unwrap() else {
        panic!("started a second run");
    };
    assert_eq!((row.run_id.as_str(), row.status), ("r1", RunStatus::Success));
    assert_eq!(records.runs().get_by_idempotency_key("k").await.unwrap(), Some(row));
    assert_eq!(records.runs().get_by_idempotency_key("other").await.unwrap(), None);
    assert!(matches!(
        records.runs().admit(keyed("r2", "other"), Reject).await.unwrap(),
        Admission::Admitted(_)
    ));
}

#[tokio::test]
async fn taking_over_marks_the_holder_and_waits() {
    for (strategy, action) in [(Interrupt, CancelAction::Interrupt), (Rollback, CancelAction::Rollback)] {
        let fixture = fixture().await;
        let records = &fixture.records;
        create_thread(records, "t").await;
        start(records, "t", "r1").await;
        fixture.clock.advance_micros(3);
        let Admission::Waiting { run: waiter, predecessor, action: said, superseded } =
            wait(records, "t", "r2", strategy).await
        else {
            unreachable!()
        };
        assert!(superseded.is_empty());
        assert_eq!((waiter.status, waiter.waiting), (RunStatus::Pending, true));
        assert_eq!(waiter.multitask_strategy, strategy);
        assert_eq!((predecessor.as_str(), said), ("r1", action));
        let old = run(records, "r1").await;
        assert_eq!((old.status, old.cancel_action), (RunStatus::Running, Some(action)));
        assert_eq!(old.cancel_requested_at, Some(fixture.clock.now()));
        // The old run holds the thread until it has ended.
        assert_eq!(holder(records, "t").await.as_deref(), Some("r1"));
        assert_eq!(records.runs().start("r2").await.unwrap(), StartOutcome::Waiting);

        let outcome = records.runs().finish("r1", &settled(RunStatus::Interrupted)).await.unwrap();
        assert_eq!(outcome, FinishOutcome::Finished { promoted: Some("r2".to_owned()) });
        assert_eq!(holder(records, "t").await.as_deref(), Some("r2"));
        assert!(matches!(records.runs().start("r2").await.unwrap(), StartOutcome::Started { .. }));
    }
}

#[tokio::test]
async fn taking_over_a_free_thread_does_not_wait() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t").await;
    let admission = fixture.records.runs().admit(new_run("t", "r"), Rollback).await.unwrap();
    assert!(matches!(admission, Admission::Admitted(_)), "{admission:?}");
}

#[tokio::test]
async fn taking_over_leaves_an_earlier_cancellation_as_it_is() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    start(records, "t", "r1").await;
    records.runs().request_cancel("r1", CancelAction::Interrupt).await.unwrap();
    let cancelled = run(records, "r1").await;
    fixture.clock.advance_micros(3);
    let Admission::Waiting { action, .. } = wait(records, "t", "r2", Rollback).await else { unreachable!() };
    assert_eq!(action, CancelAction::Interrupt);
    assert_eq!(run(records, "r1").await, cancelled);
}

#[tokio::test]
async fn newer_run_supersedes_the_waiting_one() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    start(records, "t", "r1").await;
    wait(records, "t", "r2", Rollback).await;
    fixture.clock.advance_micros(3);
    let Admission::Waiting { superseded, .. } = wait(records, "t", "r3", Interrupt).await else {
        unreachable!()
    };
    assert_eq!(superseded, ["r2"]);
    let r2 = run(records, "r2").await;
    assert_eq!((r2.status, r2.waiting), (RunStatus::Interrupted, false));
    assert_eq!(r2.cancel_requested_at, Some(fixture.clock.now()));
    assert_eq!(records.runs().start("r2").await.unwrap(), StartOutcome::NotPending(RunStatus::Interrupted));
    let late = records.runs().finish("r2", &end(RunStatus::Error)).await.unwrap();
    assert_eq!(late, FinishOutcome::AlreadyTerminal(RunStatus::Interrupted));

    // A run that rejects is not admitted while another waits, not even between the two.
    assert!(records.runs().admit(new_run("t", "r4"), Reject).await.unwrap_err().is_conflict());
    records.runs().finish("r1", &settled(RunStatus::Interrupted)).await.unwrap();
    assert!(records.runs().admit(new_run("t", "r4"), Reject).await.unwrap_err().is_conflict());
    assert_eq!(holder(records, "t").await.as_deref(), Some("r3"));
}

#[tokio::test]
async fn superseded_run_keeps_an_earlier_cancellation() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    start(records, "t", "r1").await;
    wait(records, "t", "r2", Interrupt).await;
    records.runs().request_cancel("r2", CancelAction::Rollback).await.unwrap();
    let cancelled = run(records, "r2").await;
    fixture.clock.advance_micros(3);
    wait(records, "t", "r3", Interrupt).await;
    let superseded = run(records, "r2").await;
    assert_eq!(superseded.status, RunStatus::Interrupted);
    assert_eq!(superseded.cancel_action, Some(CancelAction::Rollback));
    assert_eq!(superseded.cancel_requested_at, cancelled.cancel_requested_at);
}

/// Runs `count` admissions concurrently, half of them through second records on the same file.
async fn admit_together(
    fixture: &Fixture,
    count: usize,
    strategy: MultitaskStrategy,
) -> Vec<Result<Admission, RecordsError>> {
    let second = fixture.reopen(EventBackend::Memory).await;
    let barrier = Arc::new(Barrier::new(count));
    let tasks = (0..count).map(|i| {
        let records = if i % 2 == 0 { fixture.records.clone() } else { second.clone() };
        let barrier = barrier.clone();
        tokio::spawn(async move {
            barrier.wait().await;
            records.runs().admit(new_run("t", &format!("r{i:02}")), strategy).await
        })
    });
    futures::future::try_join_all(tasks).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_fifty_parallel_admissions_one_succeeds() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t").await;
    let results = admit_together(&fixture, 50, Reject).await;
    let admitted: Vec<_> = results.iter().filter_map(|result| result.as_ref().ok()).collect();
    let [Admission::Admitted(winner)] = admitted[..] else { panic!("{admitted:?}") };
    assert_eq!(holder(&fixture.records, "t").await.as_deref(), Some(winner.run_id.as_str()));
    for error in results.iter().filter_map(|result| result.as_ref().err()) {
        assert_eq!(error.to_string(), "Thread t already has an active run");
    }
    assert_eq!(dump(&fixture.records).await.len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_many_parallel_takeovers_one_runs_and_all_others_are_told() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t").await;
    start(&fixture.records, "t", "first").await;
    let results = admit_together(&fixture, 20, Interrupt).await;
    let mut superseded_ids = BTreeSet::new();
    for result in &results {
        let Ok(Admission::Waiting { predecessor, superseded, .. }) = result else { panic!("{result:?}") };
        assert_eq!(predecessor, "first");
        superseded_ids.extend(superseded.clone());
    }
    assert_eq!(superseded_ids.len(), 19);

    let outcome = fixture.records.runs().finish("first", &settled(RunStatus::Interrupted)).await.unwrap();
    let FinishOutcome::Finished { promoted: Some(winner) } = outcome else { panic!("{outcome:?}") };
    assert!(!superseded_ids.contains(&winner));
    assert!(matches!(fixture.records.runs().start(&winner).await.unwrap(), StartOutcome::Started { .. }));
    for loser in &superseded_ids {
        let outcome = fixture.records.runs().start(loser).await.unwrap();
        assert_eq!(outcome, StartOutcome::NotPending(RunStatus::Interrupted));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn takeover_racing_with_the_end_gets_the_thread_either_way() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    for round in 0..50 {
        let (old, new) = (format!("old{round}"), format!("new{round}"));
        start(records, "t", &old).await;
        let (runs, next) = (records.runs().clone(), new_run("t", &new));
        let taking = tokio::spawn(async move { runs.admit(next, Interrupt).await.unwrap() });
        let mut outcome = records.runs().finish(&old, &end(RunStatus::Success)).await.unwrap();
        if outcome == FinishOutcome::CancelRequested(CancelAction::Interrupt) {
            outcome = records.runs().finish(&old, &settled(RunStatus::Interrupted)).await.unwrap();
        }
        let (admission, FinishOutcome::Finished { promoted }) = (taking.await.unwrap(), outcome) else {
            panic!("the old run did not end");
        };
        assert_eq!(
            promoted.is_some(),
            matches!(admission, Admission::Waiting { .. }),
            "{promoted:?} {admission:?}"
        );
        assert!(matches!(records.runs().start(&new).await.unwrap(), StartOutcome::Started { .. }));
        records.runs().finish(&new, &end(RunStatus::Success)).await.unwrap();
    }
}

/// Admits runs that wait in the queue.
async fn enqueue(records: &Records, thread_id: &str, run_ids: &[&str]) {
    for run_id in run_ids {
        let admission = records.runs().admit(new_run(thread_id, run_id), Enqueue).await.unwrap();
        let Admission::Queued(row) = admission else { panic!("{admission:?}") };
        assert_eq!((row.status, row.waiting, row.cancel_action), (RunStatus::Pending, true, None));
    }
}

async fn finish(records: &Records, run_id: &str) -> Option<String> {
    match records.runs().finish(run_id, &settled(RunStatus::Interrupted)).await.unwrap() {
        FinishOutcome::Finished { promoted } => promoted,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn enqueued_runs_get_the_thread_one_after_the_other_in_the_order_of_their_admission() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    let admission = records.runs().admit(new_run("t", "r1"), Enqueue).await.unwrap();
    assert!(matches!(admission, Admission::Admitted(_)), "nothing to wait for: {admission:?}");
    records.runs().start("r1").await.unwrap();
    enqueue(records, "t", &["z", "a", "m"]).await;
    assert_eq!(run(records, "r1").await.cancel_action, None, "it continues");
    assert!(records.runs().admit(new_run("t", "no"), Reject).await.unwrap_err().is_conflict());
    for (ended, next) in [("r1", Some("z")), ("z", Some("a")), ("a", Some("m")), ("m", None)] {
        assert_eq!(finish(records, ended).await.as_deref(), next);
        assert_eq!(holder(records, "t").await.as_deref(), next);
        if let Some(next) = next {
            assert!(matches!(records.runs().start(next).await.unwrap(), StartOutcome::Started { .. }));
        }
    }
}

#[tokio::test]
async fn a_cancelled_run_leaves_the_queue_and_gives_nobody_the_thread() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    start(records, "t", "r1").await;
    enqueue(records, "t", &["r2", "r3", "r4"]).await;
    records.runs().request_cancel("r3", CancelAction::Rollback).await.unwrap();
    assert_eq!(records.runs().start("r3").await.unwrap(), StartOutcome::Cancelled(CancelAction::Rollback));
    assert!(records.delete_run("t", "r3").await.unwrap_err().is_conflict(), "it has not ended");
    assert_eq!(finish(records, "r3").await, None);
    records.delete_run("t", "r3").await.unwrap();
    assert_eq!(holder(records, "t").await.as_deref(), Some("r1"));
    // A run whose cancellation is only recorded gets the thread and passes it on.
    records.runs().request_cancel("r2", CancelAction::Interrupt).await.unwrap();
    assert_eq!(finish(records, "r1").await.as_deref(), Some("r2"));
    assert_eq!(records.runs().start("r2").await.unwrap(), StartOutcome::Cancelled(CancelAction::Interrupt));
    assert_eq!(finish(records, "r2").await.as_deref(), Some("r4"));
}

#[tokio::test]
async fn a_takeover_interrupts_the_whole_queue_and_later_runs_wait_behind_it() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    start(records, "t", "r1").await;
    enqueue(records, "t", &["r2", "r3"]).await;
    let Admission::Waiting { mut superseded, predecessor, .. } = wait(records, "t", "r4", Interrupt).await
    else {
        unreachable!()
    };
    superseded.sort_unstable();
    assert_eq!((predecessor.as_str(), superseded), ("r1", vec!["r2".to_owned(), "r3".to_owned()]));
    for run_id in ["r2", "r3"] {
        let row = run(records, run_id).await;
        assert_eq!((row.status, row.waiting), (RunStatus::Interrupted, false));
    }
    enqueue(records, "t", &["r5"]).await;
    assert_eq!(finish(records, "r1").await.as_deref(), Some("r4"));
    assert_eq!(finish(records, "r4").await.as_deref(), Some("r5"));
}

#[tokio::test]
async fn a_run_waits_for_other_writers_too_but_not_for_a_deletion() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    for kind in [WriterKind::CheckpointWrite, WriterKind::ArtifactWrite, WriterKind::Branch] {
        let reservation = records.runs().reserve("t", kind).await.unwrap();
        let run_id = format!("{kind:?}");
        enqueue(records, "t", &[&run_id]).await;
        assert_eq!(records.runs().start(&run_id).await.unwrap(), StartOutcome::Waiting);
        reservation.release().await.unwrap();
        assert!(matches!(records.runs().start(&run_id).await.unwrap(), StartOutcome::Started { .. }));
        finish(records, &run_id).await;
    }
    let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
    let refused = records.runs().admit(new_run("t", "late"), Enqueue).await.unwrap_err();
    assert!(matches!(refused, RecordsError::Conflict { holder: OperationKind::Delete, .. }), "{refused}");
    records.delete_thread(reservation).await.unwrap();
    assert!(records.runs().admit(new_run("t", "late"), Enqueue).await.unwrap_err().is_not_found());
}

#[tokio::test]
async fn a_hundred_runs_wait_and_no_more() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    start(records, "t", "first").await;
    for n in 0..QUEUE_MAX {
        enqueue(records, "t", &[&format!("r{n}")]).await;
    }
    let before = dump(records).await;
    let refused = records.runs().admit(new_run("t", "more"), Enqueue).await.unwrap_err();
    let text = "Thread t has 100 waiting runs, which is the maximum; try again when some have ended";
    assert_eq!(refused.to_string(), text);
    assert_eq!(dump(records).await, before);
    assert_eq!(finish(records, "first").await.as_deref(), Some("r0"));
    enqueue(records, "t", &["more"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn parallel_enqueued_runs_all_get_the_thread_in_the_order_of_their_admission() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    let results = admit_together(&fixture, 20, Enqueue).await;
    let rows: Vec<RunRow> = results
        .into_iter()
        .map(|result| match result.unwrap() {
            Admission::Admitted(row) | Admission::Queued(row) => row,
            other => panic!("{other:?}"),
        })
        .collect();
    let newest_first =
        records.runs().list_by_thread("t", &RunQuery { status: None, limit: 99, offset: 0 }).await;
    let admitted: Vec<String> = newest_first.unwrap().into_iter().rev().map(|row| row.run_id).collect();
    assert_eq!(admitted.len(), rows.len());
    for (ended, next) in admitted.iter().zip(admitted[1..].iter().map(Some).chain([None])) {
        assert_eq!(holder(records, "t").await.as_ref(), Some(ended));
        assert_eq!(finish(records, ended).await.as_ref(), next);
    }
}

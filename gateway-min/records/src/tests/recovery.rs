use std::collections::BTreeSet;

use chrono::TimeDelta;

use super::support::*;
use crate::*;

const GRACE: TimeDelta = TimeDelta::seconds(10);

#[tokio::test]
async fn nothing_to_recover_changes_nothing() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    start(records, "t", "r").await;
    records.runs().finish("r", &end(RunStatus::Success)).await.unwrap();
    let before = dump(records).await;
    fixture.clock.advance_micros(1);
    let recovered = records.runs().recover_orphans(fixture.clock.now(), GRACE).await.unwrap();
    assert_eq!(recovered, Recovered::default());
    assert_eq!(dump(records).await, before);
}

#[tokio::test]
async fn runs_of_a_dead_process_become_errors_and_free_their_threads() {
    let fixture = fixture().await;
    for thread_id in ["running", "pending", "cancelled"] {
        create_thread(&fixture.records, thread_id).await;
    }
    start(&fixture.records, "running", "r1").await;
    fixture.records.threads().set_status("running", ThreadStatus::Running).await.unwrap();
    admit(&fixture.records, "pending", "r2").await;
    start(&fixture.records, "cancelled", "r3").await;
    fixture.records.runs().request_cancel("r3", CancelAction::Interrupt).await.unwrap();
    let reservation = fixture.records.runs().reserve("reserved", WriterKind::Delete).await.unwrap();
    // The process ends without cleaning up.
    std::mem::forget(reservation);
    fixture.records.close().await;

    let records = fixture.reopen(EventBackend::Memory).await;
    fixture.clock.advance_micros(1);
    let recovered = records.runs().recover_orphans(fixture.clock.now(), GRACE).await.unwrap();
    assert_eq!(recovered.released, ["reserved"]);
    assert!(recovered.promoted.is_empty());
    let mut recovered_ids: Vec<_> = recovered.runs.iter().map(|row| row.run_id.as_str()).collect();
    recovered_ids.sort_unstable();
    assert_eq!(recovered_ids, ["r1", "r2", "r3"]);
    for row in recovered.runs {
        assert_eq!(row.status, RunStatus::Error);
        assert_eq!(
            row.error.as_deref(),
            Some("Gateway restarted before this run reached a durable final state.")
        );
        assert_eq!(row.stop_reason.as_deref(), Some("orphan_recovered"));
        assert_eq!(row.updated_at, fixture.clock.now());
        assert_eq!(run(&records, &row.run_id).await, row);
        assert_eq!(thread(&records, &row.thread_id).await.status, ThreadStatus::Error);
        // Usable at once.
        admit(&records, &row.thread_id, &format!("{}-next", row.run_id)).await;
    }
    records.runs().reserve("reserved", WriterKind::Delete).await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn waiting_run_is_recovered_with_its_predecessor() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    start(records, "t", "r1").await;
    wait(records, "t", "r2", MultitaskStrategy::Interrupt).await;
    let recovered = records.runs().recover_orphans(fixture.clock.now(), GRACE).await.unwrap();
    assert_eq!(recovered.runs.len(), 2);
    assert!(recovered.promoted.is_empty());
    for run_id in ["r1", "r2"] {
        let row = run(records, run_id).await;
        assert_eq!((row.status, row.waiting), (RunStatus::Error, false));
    }
    admit(records, "t", "r3").await;
}

#[tokio::test]
async fn live_leases_and_their_grace_are_respected() {
    let fixture = fixture().await;
    let records = &fixture.records;
    let owner = fixture.owner("a").await;
    for (name, by, advance) in [
        ("dead", &owner, 1),
        // Its lease of 30 seconds ended exactly the grace ago.
        ("grace", &owner, 40_000_000),
        ("live", &owner, 0),
        ("none", records, 0),
    ] {
        create_thread(records, name).await;
        admit(by, name, name).await;
        records.threads().set_status(name, ThreadStatus::Running).await.unwrap();
        fixture.clock.advance_micros(advance);
    }
    let now = fixture.clock.now();
    let recovered = records.runs().recover_orphans(now, GRACE).await.unwrap();
    let mut recovered: Vec<_> = recovered.runs.into_iter().map(|row| row.run_id).collect();
    recovered.sort_unstable();
    assert_eq!(recovered, ["dead", "none"]);
    for name in ["live", "grace"] {
        assert_eq!(run(records, name).await.status, RunStatus::Pending);
        assert_eq!(thread(records, name).await.status, ThreadStatus::Running);
    }
}

#[tokio::test]
async fn live_run_inherits_the_thread_of_a_dead_one() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    start(records, "t", "dead").await;
    wait(&fixture.owner("a").await, "t", "live", MultitaskStrategy::Interrupt).await;
    let recovered = records.runs().recover_orphans(fixture.clock.now(), GRACE).await.unwrap();
    assert_eq!(recovered.promoted, ["live"]);
    // As after a run that ends by itself: until the next one starts, none works on the thread.
    assert_eq!(thread(records, "t").await.status, ThreadStatus::Error);
    assert!(matches!(records.runs().start("live").await.unwrap(), StartOutcome::Started { .. }));
    assert_eq!(thread(records, "t").await.status, ThreadStatus::Running);
}

#[tokio::test]
async fn a_thread_whose_heir_never_starts_does_not_stay_running() {
    let fixture = fixture().await;
    let (records, dead, live) = (&fixture.records, fixture.owner("dead").await, fixture.owner("live").await);
    for (thread_id, decided, expected) in
        [("undecided", None, ThreadStatus::Error), ("decided", Some(RunStatus::Success), ThreadStatus::Idle)]
    {
        create_thread(records, thread_id).await;
        let id = |name: &str| format!("{thread_id}-{name}");
        start(&dead, thread_id, &id("dead")).await;
        if let Some(status) = decided {
            dead.runs().decide(&id("dead"), &end(status)).await.unwrap();
        }
        live.runs().admit(new_run(thread_id, &id("heir")), MultitaskStrategy::Enqueue).await.unwrap();
        let recovered = records.runs().recover_owner(fixture.clock.now(), "dead").await.unwrap();
        assert_eq!(recovered.promoted, [id("heir")]);
        live.runs().request_cancel(&id("heir"), CancelAction::Interrupt).await.unwrap();
        let started = live.runs().start(&id("heir")).await.unwrap();
        assert_eq!(started, StartOutcome::Cancelled(CancelAction::Interrupt));
        live.runs().finish(&id("heir"), &end(RunStatus::Interrupted)).await.unwrap();
        assert_eq!(thread(records, thread_id).await.status, expected, "{thread_id}");
    }
}

/// The run that waited was the thread's last one, but another works on it.
#[tokio::test]
async fn a_dead_run_that_waited_leaves_the_status_of_a_thread_that_is_worked_on() {
    let fixture = fixture().await;
    let (records, dead, live) = (&fixture.records, fixture.owner("dead").await, fixture.owner("live").await);
    create_thread(records, "t").await;
    start(&live, "t", "works").await;
    dead.runs().admit(new_run("t", "waited"), MultitaskStrategy::Enqueue).await.unwrap();
    let recovered = records.runs().recover_owner(fixture.clock.now(), "dead").await.unwrap();
    assert_eq!(recovered.runs.len(), 1);
    assert_eq!(thread(records, "t").await.status, ThreadStatus::Running);
    live.runs().finish("works", &end(RunStatus::Success)).await.unwrap();
    assert_eq!(thread(records, "t").await.status, ThreadStatus::Idle);
}

#[tokio::test]
async fn thread_left_running_gets_the_status_of_its_last_run() {
    let fixture = fixture().await;
    let records = &fixture.records;
    for (thread_id, status, expected) in [
        ("success", Some(RunStatus::Success), ThreadStatus::Idle),
        ("error", Some(RunStatus::Error), ThreadStatus::Error),
        ("timeout", Some(RunStatus::Timeout), ThreadStatus::Error),
        ("interrupted", Some(RunStatus::Interrupted), ThreadStatus::Interrupted),
        ("none", None, ThreadStatus::Idle),
    ] {
        create_thread(records, thread_id).await;
        if let Some(status) = status {
            start(records, thread_id, thread_id).await;
            records.runs().finish(thread_id, &end(status)).await.unwrap();
        }
        records.threads().set_status(thread_id, ThreadStatus::Running).await.unwrap();
        records.runs().recover_orphans(fixture.clock.now(), GRACE).await.unwrap();
        assert_eq!(thread(records, thread_id).await.status, expected, "{thread_id}");
    }
}

#[tokio::test]
async fn thread_without_row_is_recovered_too() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    start(records, "t", "r").await;
    sql(records, "DELETE FROM threads_meta").await;
    let recovered = records.runs().recover_orphans(fixture.clock.now(), GRACE).await.unwrap();
    assert_eq!(recovered.runs.len(), 1);
    assert_eq!(run(records, "r").await.status, RunStatus::Error);
}

#[tokio::test]
async fn live_runs_of_a_queue_go_on_when_others_of_it_died() {
    let fixture = fixture().await;
    let records = &fixture.records;
    let owner = fixture.owner("a").await;
    for (thread_id, first, promoted) in
        [("held", &owner, None), ("orphaned", records, Some("orphaned-live1"))]
    {
        create_thread(records, thread_id).await;
        let id = |name: &str| format!("{thread_id}-{name}");
        admit(first, thread_id, &id("holder")).await;
        for (name, by) in [("dead", records), ("live1", &owner), ("live2", &owner)] {
            by.runs().admit(new_run(thread_id, &id(name)), MultitaskStrategy::Enqueue).await.unwrap();
        }
        let recovered = records.runs().recover_orphans(fixture.clock.now(), GRACE).await.unwrap();
        assert_eq!(recovered.promoted, Vec::from_iter(promoted.map(str::to_owned)));
        let dead = run(records, &id("dead")).await;
        assert_eq!((dead.status, dead.waiting), (RunStatus::Error, false));
        let expected = promoted.map_or_else(|| id("holder"), str::to_owned);
        assert_eq!(holder(records, thread_id).await, Some(expected));
        assert!(run(records, &id("live2")).await.waiting);
    }
}

#[tokio::test]
async fn a_live_run_inherits_the_thread_of_a_dead_writer() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    std::mem::forget(records.runs().reserve("t", WriterKind::CheckpointWrite).await.unwrap());
    let owner = fixture.owner("a").await;
    owner.runs().admit(new_run("t", "live"), MultitaskStrategy::Enqueue).await.unwrap();
    let recovered = records.runs().recover_orphans(fixture.clock.now(), GRACE).await.unwrap();
    assert_eq!((recovered.released, recovered.promoted), (vec!["t".to_owned()], vec!["live".to_owned()]));
    assert!(matches!(records.runs().start("live").await.unwrap(), StartOutcome::Started { .. }));
}

/// The process that takes over a dead process's thread also carries out what was asked of that process.
#[tokio::test]
async fn a_run_that_is_to_be_rolled_back_is_taken_over_and_keeps_its_thread() {
    let fixture = fixture().await;
    let (dead, live) = (fixture.owner("dead").await, fixture.owner("live").await);
    for thread in ["asked", "not asked", "decided", "interrupted"] {
        create_thread(&dead, thread).await;
        start(&dead, thread, thread).await;
    }
    wait(&dead, "asked", "waiting", MultitaskStrategy::Rollback).await;
    live.runs().request_cancel("waiting", CancelAction::Rollback).await.unwrap();
    dead.runs().decide("decided", &end(RunStatus::Success)).await.unwrap();
    live.runs().request_cancel("decided", CancelAction::Rollback).await.unwrap();
    live.runs().request_cancel("interrupted", CancelAction::Interrupt).await.unwrap();
    fixture.clock.advance_seconds(31);
    let found =
        live.runs().recover_expired(fixture.clock.now(), TimeDelta::zero(), &mut watched()).await.unwrap();
    let ids = |runs: &[RunRow]| runs.iter().map(|row| row.run_id.clone()).collect::<BTreeSet<_>>();
    assert_eq!(ids(&found.rollbacks), BTreeSet::from(["asked".to_owned()]));
    let ended = ["not asked", "decided", "interrupted", "waiting"].map(str::to_owned);
    assert_eq!(ids(&found.runs), BTreeSet::from(ended));
    let row = run(&live, "asked").await;
    assert_eq!((row.status, row.owner_worker_id.as_deref()), (RunStatus::Running, Some("live")));
    assert_eq!(holder(&live, "asked").await.as_deref(), Some("asked"));
    // It is renewed as any other, and taken over again if that process dies too.
    live.runs().renew(&["asked".to_owned()]).await.unwrap();
    let again =
        dead.runs().recover_expired(fixture.clock.now(), TimeDelta::zero(), &mut watched()).await.unwrap();
    assert_eq!(again, Recovered::default());
    fixture.clock.advance_seconds(31);
    let again =
        dead.runs().recover_expired(fixture.clock.now(), TimeDelta::zero(), &mut watched()).await.unwrap();
    assert_eq!(ids(&again.rollbacks), BTreeSet::from(["asked".to_owned()]));
    dead.runs().finish("asked", &settled(RunStatus::Error)).await.unwrap();
    assert_eq!(thread(&live, "asked").await.status, ThreadStatus::Error);
}

/// It stood still while its run was taken over, and does not know it: what it says of the run changes nothing.
#[tokio::test]
async fn a_run_that_was_taken_over_is_ended_by_its_new_owner_alone() {
    let fixture = fixture().await;
    let (own, other) = (fixture.owner("own").await, fixture.owner("other").await);
    create_thread(&own, "t").await;
    start(&own, "t", "r").await;
    other.runs().request_cancel("r", CancelAction::Rollback).await.unwrap();
    wait(&other, "t", "next", MultitaskStrategy::Interrupt).await;
    let found = other.runs().recover_owner(fixture.clock.now(), "own").await.unwrap();
    assert_eq!(found.rollbacks.len(), 1);
    let taken = dump(&own).await;
    // Also if it says that there is nothing to restore.
    for late in [end(RunStatus::Success), end(RunStatus::Error), settled(RunStatus::Interrupted)] {
        let late = RunEnd { left_checkpoint: Some("late".to_owned()), ..late };
        assert_eq!(own.runs().decide("r", &late).await.unwrap(), DecideOutcome::TakenOver);
        assert_eq!(own.runs().finish("r", &late).await.unwrap(), FinishOutcome::TakenOver);
    }
    let used = RunTotals { total_tokens: 7, ..RunTotals::default() };
    assert!(!own.runs().progress("r", &used).await.unwrap());
    assert!(own.runs().note_finished_before("r", &[]).await.unwrap_err().is_not_found());
    assert_eq!(own.runs().finished_before("r").await.unwrap(), None);
    assert_eq!(dump(&own).await, taken);
    assert!(other.runs().progress("r", &used).await.unwrap());
    let rolled_back = settled(RunStatus::Error);
    assert_eq!(other.runs().decide("r", &rolled_back).await.unwrap(), DecideOutcome::Decided);
    let finished = other.runs().finish("r", &rolled_back).await.unwrap();
    assert_eq!(finished, FinishOutcome::Finished { promoted: Some("next".to_owned()) });
    let late = own.runs().decide("r", &rolled_back).await.unwrap();
    assert_eq!(late, DecideOutcome::AlreadyTerminal(RunStatus::Error));
}

/// A gateway without leases takes it over from one that had some, and the other way round.
#[tokio::test]
async fn the_owner_without_a_name_ends_its_runs_alone_too() {
    let fixture = fixture().await;
    let (unnamed, named) = (&fixture.records, fixture.owner("named").await);
    for (thread_id, first, next) in [("to none", &named, unnamed), ("from none", unnamed, &named)] {
        create_thread(first, thread_id).await;
        start(first, thread_id, thread_id).await;
        first.runs().request_cancel(thread_id, CancelAction::Rollback).await.unwrap();
        fixture.clock.advance_seconds(31);
        let found = next.runs().recover_orphans(fixture.clock.now(), TimeDelta::zero()).await.unwrap();
        assert_eq!(found.rollbacks.len(), 1, "{thread_id}");
        let rolled_back = settled(RunStatus::Error);
        assert_eq!(first.runs().finish(thread_id, &rolled_back).await.unwrap(), FinishOutcome::TakenOver);
        let finished = next.runs().finish(thread_id, &rolled_back).await.unwrap();
        assert_eq!(finished, FinishOutcome::Finished { promoted: None }, "{thread_id}");
    }
}

/// Such a gateway may have taken some over without hearing of it. Its other runs end as their tasks have decided, also
/// later, once the database is available.
#[tokio::test]
async fn only_runs_that_owe_a_restore_are_found_by_a_process_without_leases() {
    let fixture = fixture().await;
    let (records, leased) = (&fixture.records, fixture.owner("leased").await);
    for (thread_id, edits) in
        [("rolled back", false), ("edit", true), ("decided", true), ("plain", false), ("pending", true)]
    {
        create_thread(records, thread_id).await;
        let run = NewRun { edits, ..new_run(thread_id, thread_id) };
        records.runs().admit(run, MultitaskStrategy::Reject).await.unwrap();
        if thread_id != "pending" {
            let started = records.runs().start(thread_id).await.unwrap();
            assert!(matches!(started, StartOutcome::Started { .. }));
        }
    }
    create_thread(records, "leased").await;
    let run = NewRun { edits: true, ..new_run("leased", "leased") };
    leased.runs().admit(run, MultitaskStrategy::Reject).await.unwrap();
    leased.runs().start("leased").await.unwrap();
    records.runs().request_cancel("rolled back", CancelAction::Rollback).await.unwrap();
    records.runs().decide("decided", &settled(RunStatus::Error)).await.unwrap();
    let found = records.runs().owing_without_lease().await.unwrap();
    let expected = BTreeSet::from(["rolled back", "edit"].map(str::to_owned));
    assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), expected);
}

/// A new turn that did not succeed gives way to the old one, whichever process finds that its own is gone.
#[tokio::test]
async fn an_edit_of_a_dead_process_is_taken_over_until_its_old_turn_is_back() {
    let fixture = fixture().await;
    let (dead, live) = (fixture.owner("dead").await, fixture.owner("live").await);
    let edit = |thread_id: &str, run_id: &str| NewRun { edits: true, ..new_run(thread_id, run_id) };
    for thread_id in ["running", "interrupted", "succeeded", "failed", "pending"] {
        create_thread(&dead, thread_id).await;
        dead.runs().admit(edit(thread_id, thread_id), MultitaskStrategy::Reject).await.unwrap();
        if thread_id != "pending" {
            let started = dead.runs().start(thread_id).await.unwrap();
            assert!(matches!(started, StartOutcome::Started { .. }));
        }
    }
    dead.runs().admit(edit("running", "waiting"), MultitaskStrategy::Enqueue).await.unwrap();
    live.runs().request_cancel("interrupted", CancelAction::Interrupt).await.unwrap();
    dead.runs().decide("succeeded", &end(RunStatus::Success)).await.unwrap();
    dead.runs().decide("failed", &settled(RunStatus::Error)).await.unwrap();
    let ids = |runs: &[RunRow]| runs.iter().map(|row| row.run_id.clone()).collect::<BTreeSet<_>>();
    let owing = BTreeSet::from(["running", "interrupted"].map(str::to_owned));

    let found = live.runs().recover_owner(fixture.clock.now(), "dead").await.unwrap();
    assert_eq!(ids(&found.rollbacks), owing);
    let ended = ["succeeded", "failed", "pending", "waiting"].map(str::to_owned);
    assert_eq!(ids(&found.runs), BTreeSet::from(ended));
    assert_eq!(run(&live, "succeeded").await.status, RunStatus::Success);
    for row in &found.rollbacks {
        assert_eq!((row.status, row.owner_worker_id.as_deref()), (RunStatus::Running, Some("live")));
        let dies_of = (row.error.as_deref(), row.stop_reason.as_deref());
        assert_eq!(dies_of, (Some(RECOVERY_ERROR), Some("orphan_recovered")));
    }
    // That process dies too.
    fixture.clock.advance_seconds(31);
    let again =
        dead.runs().recover_expired(fixture.clock.now(), TimeDelta::zero(), &mut watched()).await.unwrap();
    assert_eq!((ids(&again.rollbacks), again.runs.len()), (owing.clone(), 0));
    for run_id in &owing {
        assert_eq!(run(&dead, run_id).await.error.as_deref(), Some(LEASE_EXPIRED_ERROR));
        assert_eq!(holder(&dead, run_id).await.as_ref(), Some(run_id));
        let late = live.runs().finish(run_id, &settled(RunStatus::Error)).await.unwrap();
        assert_eq!(late, FinishOutcome::TakenOver);
        let finished = dead.runs().finish(run_id, &settled(RunStatus::Error)).await.unwrap();
        assert_eq!(finished, FinishOutcome::Finished { promoted: None });
    }
}

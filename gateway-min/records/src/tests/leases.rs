//! Several processes on one database, as seen by the store.

use chrono::TimeDelta;

use super::support::*;
use crate::MultitaskStrategy::Interrupt;
use crate::*;

const GRACE: TimeDelta = TimeDelta::seconds(10);

async fn expired(records: &Records, clock: &TestClock) -> Recovered {
    records.runs().recover_expired(clock.now(), GRACE, &mut watched()).await.unwrap()
}

#[tokio::test]
async fn renewed_rows_are_kept_and_the_others_of_the_process_are_not() {
    let fixture = fixture().await;
    let (a, b) = (fixture.owner("a").await, fixture.owner("b").await);
    for thread_id in ["kept", "dropped"] {
        create_thread(&a, thread_id).await;
        start(&a, thread_id, thread_id).await;
    }
    let reservation = a.runs().reserve("reserved", WriterKind::CheckpointWrite).await.unwrap();
    let forgotten = a.runs().reserve("forgotten", WriterKind::CheckpointWrite).await.unwrap();
    // Its task is gone, and the row could not be deleted.
    a.runs().reserved.lock().unwrap().retain(|row| row != forgotten.row_id());
    forgotten.forget();
    for _ in 0..5 {
        fixture.clock.advance_seconds(10);
        a.runs().renew(&["kept".to_owned()]).await.unwrap();
        // A process does not renew rows of another.
        b.runs().renew(&["dropped".to_owned()]).await.unwrap();
    }
    let recovered = expired(&b, &fixture.clock).await;
    assert_eq!(recovered.released, ["forgotten"]);
    let [run] = &recovered.runs[..] else { panic!("{recovered:?}") };
    assert_eq!((run.run_id.as_str(), run.status), ("dropped", RunStatus::Error));
    assert_eq!(run.error.as_deref(), Some("Run lease expired \u{2014} owning worker is unreachable."));
    assert_eq!(run.stop_reason.as_deref(), Some("orphan_recovered"));
    assert_eq!(thread(&b, "dropped").await.status, ThreadStatus::Error);
    assert_eq!(holder(&b, "kept").await.as_deref(), Some("kept"));
    assert!(holder(&b, "reserved").await.is_some());
    assert_eq!(expired(&a, &fixture.clock).await, Recovered::default());
    reservation.release().await.unwrap();
    assert_eq!(a.runs().reserved.lock().unwrap().len(), 0);
}

/// It was killed in the middle of the deletion, and there may never be a gateway that looks for what it left.
#[tokio::test]
async fn a_thread_that_a_dead_client_was_deleting_is_free_again() {
    let fixture = fixture().await;
    let (dead, next) = (fixture.owner("dead").await, fixture.client("next").await);
    create_thread(&dead, "t").await;
    std::mem::forget(dead.runs().reserve("t", WriterKind::Delete).await.unwrap());
    fixture.clock.advance_seconds(40);
    let early = next.runs().reserve("t", WriterKind::Delete).await.unwrap_err();
    assert!(early.is_conflict(), "its lease and the grace are not over: {early}");
    fixture.clock.advance_seconds(1);
    let reservation = next.runs().reserve("t", WriterKind::Delete).await.unwrap();
    assert!(next.delete_thread(reservation).await.unwrap().thread);
    assert!(dump(&next).await.is_empty());
}

#[tokio::test]
async fn what_waits_for_a_dead_writer_comes_before_the_next_writer() {
    let fixture = fixture().await;
    let (dead, next) = (fixture.owner("dead").await, fixture.client("next").await);
    create_thread(&dead, "t").await;
    std::mem::forget(dead.runs().reserve("t", WriterKind::CheckpointWrite).await.unwrap());
    let queued = next.runs().admit(new_run("t", "waits"), MultitaskStrategy::Enqueue).await.unwrap();
    assert!(matches!(queued, Admission::Queued(_)), "{queued:?}");
    fixture.clock.advance_seconds(41);
    let refused = next.runs().reserve("t", WriterKind::CheckpointWrite).await.unwrap_err();
    assert_eq!(refused.to_string(), "Thread t already has an active run");
    assert_eq!(holder(&next, "t").await.as_deref(), Some("waits"));
    assert!(matches!(next.runs().start("waits").await.unwrap(), StartOutcome::Started { .. }));
}

/// A reservation whose process is alive is nobody's to take, and a run is ended by gateways only.
#[tokio::test]
async fn a_writer_takes_no_thread_from_a_run_or_from_a_row_without_a_lease() {
    let fixture = fixture().await;
    let (dead, next) = (fixture.owner("dead").await, fixture.client("next").await);
    create_thread(&dead, "run").await;
    start(&dead, "run", "r").await;
    std::mem::forget(fixture.records.runs().reserve("alone", WriterKind::CheckpointWrite).await.unwrap());
    fixture.clock.advance_seconds(1000);
    let before = dump(&next).await;
    for thread_id in ["run", "alone"] {
        assert!(next.runs().reserve(thread_id, WriterKind::Delete).await.unwrap_err().is_conflict());
    }
    assert_eq!(dump(&next).await, before);
}

/// Also while all threads of the process are busy.
#[tokio::test]
async fn reservations_are_renewed_while_work_goes_on() {
    let fixture = fixture().await;
    let lease = Lease {
        renews_reservations: true,
        ..Lease::new("client", std::time::Duration::from_millis(300), std::time::Duration::ZERO)
    };
    let options = RecordsOptions { lease: Some(lease), ..options(&fixture.clock, EventBackend::Memory) };
    let client = fixture.place.open(options.clone()).await;
    let reservation = client.runs().reserve("t", WriterKind::Delete).await.unwrap();
    let (place, clock) = (fixture.place, fixture.clock);
    let place = std::thread::spawn(move || {
        // The thread of this test only waits meanwhile.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(soon(async {
            let other = place.open(options).await;
            for _ in 0..3 {
                clock.advance_seconds(1000);
                let now = clock.now();
                while other.runs().active_for_thread("t").await.unwrap().unwrap().lease_expires_at < Some(now)
                {
                    tokio::task::yield_now().await;
                }
            }
            other.close().await;
            place
        }))
    });
    let _place = place.join().unwrap();
    assert!(reservation.is_held().await.unwrap());
    reservation.release().await.unwrap();
    assert_eq!(holder(&client, "t").await, None);
}

#[tokio::test]
async fn a_row_without_a_lease_is_left_alone_while_others_work() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t").await;
    start(&fixture.records, "t", "r").await;
    let a = fixture.owner("a").await;
    fixture.clock.advance_seconds(1000);
    assert_eq!(expired(&a, &fixture.clock).await, Recovered::default());
    assert_eq!(a.runs().recover_orphans(fixture.clock.now(), GRACE).await.unwrap().runs.len(), 1);
}

/// It stalled for too long: whatever it does about its run is too late.
#[tokio::test]
async fn a_process_that_lost_its_lease_can_change_nothing_of_its_run() {
    let fixture = fixture().await;
    let (a, b) = (fixture.owner("a").await, fixture.owner("b").await);
    create_thread(&a, "t").await;
    start(&a, "t", "r").await;
    fixture.clock.advance_seconds(41);
    assert_eq!(expired(&b, &fixture.clock).await.runs.len(), 1);
    start(&b, "t", "next").await;
    let before = dump(&b).await;

    let success = end(RunStatus::Success);
    assert_eq!(
        a.runs().decide("r", &success).await.unwrap(),
        DecideOutcome::AlreadyTerminal(RunStatus::Error)
    );
    assert_eq!(
        a.runs().finish("r", &success).await.unwrap(),
        FinishOutcome::AlreadyTerminal(RunStatus::Error)
    );
    assert!(!a.runs().progress("r", &RunTotals { message_count: 9, ..RunTotals::default() }).await.unwrap());
    assert_eq!(a.runs().start("r").await.unwrap(), StartOutcome::NotPending(RunStatus::Error));
    a.runs().renew(&["r".to_owned()]).await.unwrap();
    let noticed = a.runs().noticed(&["r".to_owned(), "next".to_owned()]).await.unwrap();
    assert_eq!(
        noticed.iter().map(|run| (run.run_id.as_str(), run.stopped)).collect::<Vec<_>>(),
        [("r", true)]
    );
    assert_eq!(dump(&b).await, before);
}

/// The clock of the process that looks has jumped, or the machine was suspended: what lives renews its leases soon.
#[tokio::test]
async fn a_gateway_whose_clock_jumps_ends_no_run_and_takes_no_thread_of_others() {
    let fixture = fixture().await;
    let (a, b) = (fixture.owner("a").await, fixture.owner("b").await);
    create_thread(&a, "t").await;
    start(&a, "t", "r").await;
    let reservation = a.runs().reserve("reserved", WriterKind::CheckpointWrite).await.unwrap();
    let mut seen = SeenLeases::new(std::time::Duration::from_hours(1));
    for renewed in [false, true, false] {
        fixture.clock.advance_seconds(3600);
        if renewed {
            a.runs().renew(&["r".to_owned()]).await.unwrap();
        }
        let before = dump(&b).await;
        let found = b.runs().recover_expired(fixture.clock.now(), GRACE, &mut seen).await.unwrap();
        assert_eq!(found, Recovered::default());
        assert!(b.runs().reserve("reserved", WriterKind::Delete).await.unwrap_err().is_conflict());
        assert_eq!(dump(&b).await, before);
    }
    assert!(reservation.is_held().await.unwrap());
    let found = expired(&b, &fixture.clock).await;
    assert_eq!((found.runs.len(), found.released.len()), (1, 1), "both were over by this clock");
    reservation.forget();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_many_processes_one_recovers_a_run() {
    let fixture = fixture().await;
    let a = fixture.owner("a").await;
    for round in 0..10 {
        let thread_id = format!("t{round}");
        create_thread(&a, &thread_id).await;
        start(&a, &thread_id, &thread_id).await;
        wait(&a, &thread_id, &format!("{thread_id}-next"), Interrupt).await;
        fixture.clock.advance_seconds(41);
        let others = [fixture.owner("b").await, fixture.owner("c").await, fixture.owner("d").await];
        let now = fixture.clock.now();
        let recoveries = others.map(|records| {
            tokio::spawn(
                async move { records.runs().recover_expired(now, GRACE, &mut watched()).await.unwrap() },
            )
        });
        let mut recovered = Vec::new();
        for recovery in recoveries {
            recovered.extend(recovery.await.unwrap().runs.into_iter().map(|run| run.run_id));
        }
        recovered.sort();
        assert_eq!(recovered, [thread_id.clone(), format!("{thread_id}-next")]);
    }
}

#[tokio::test]
async fn a_decided_run_keeps_its_thread_until_it_is_finished_and_takes_no_cancellation() {
    let fixture = fixture().await;
    let records = &fixture.records;
    let runs = records.runs();
    create_thread(records, "t").await;
    start(records, "t", "r").await;
    records.threads().set_status("t", ThreadStatus::Running).await.unwrap();
    let success =
        RunEnd { totals: RunTotals { message_count: 2, ..RunTotals::default() }, ..end(RunStatus::Success) };
    assert_eq!(runs.decide("r", &success).await.unwrap(), DecideOutcome::Decided);
    let row = run(records, "r").await;
    assert_eq!((row.status, row.reported_status()), (RunStatus::Running, RunStatus::Running));
    assert_eq!((row.decided_status, row.totals.message_count), (Some(RunStatus::Success), 2));
    assert_eq!(holder(records, "t").await.as_deref(), Some("r"));
    let cancelled = runs.request_cancel("r", CancelAction::Rollback).await.unwrap();
    assert_eq!(cancelled, CancelOutcome::AlreadyTerminal(RunStatus::Success));
    wait(records, "t", "next", Interrupt).await;
    assert_eq!(run(records, "r").await.cancel_action, None);
    // Again, as after a commit with an unknown outcome.
    assert_eq!(runs.decide("r", &success).await.unwrap(), DecideOutcome::Decided);

    let finished = runs.finish("r", &success).await.unwrap();
    assert_eq!(finished, FinishOutcome::Finished { promoted: Some("next".to_owned()) });
    assert_eq!(run(records, "r").await.status, RunStatus::Success);
    assert_eq!(thread(records, "t").await.status, ThreadStatus::Idle);
}

#[tokio::test]
async fn a_cancelled_run_is_not_decided_to_be_a_success() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    start(records, "t", "r").await;
    records.runs().request_cancel("r", CancelAction::Rollback).await.unwrap();
    let before = dump(records).await;
    let outcome = records.runs().decide("r", &end(RunStatus::Success)).await.unwrap();
    assert_eq!(outcome, DecideOutcome::CancelRequested(CancelAction::Rollback));
    assert_eq!(dump(records).await, before);
    let outcome = records.runs().decide("r", &settled(RunStatus::Interrupted)).await.unwrap();
    assert_eq!(outcome, DecideOutcome::Decided);
}

/// Who repeats the request, to wait for the end of the run, is not told that it is over while it still has its thread.
#[tokio::test]
async fn a_run_that_is_being_rolled_back_takes_a_cancellation_again_until_it_has_ended() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    start(records, "t", "r").await;
    let cancel = || records.runs().request_cancel("r", CancelAction::Rollback);
    assert_eq!(cancel().await.unwrap(), CancelOutcome::Accepted);
    let rolled_back = settled(RunStatus::Error);
    assert_eq!(records.runs().decide("r", &rolled_back).await.unwrap(), DecideOutcome::Decided);
    assert_eq!(run(records, "r").await.reported_status(), RunStatus::Interrupted);
    assert_eq!(cancel().await.unwrap(), CancelOutcome::AlreadyInterrupted);
    records.runs().finish("r", &rolled_back).await.unwrap();
    assert_eq!(cancel().await.unwrap(), CancelOutcome::AlreadyTerminal(RunStatus::Error));
}

#[tokio::test]
async fn a_decided_run_of_a_process_that_is_gone_ends_as_it_was_decided() {
    let fixture = fixture().await;
    let (a, b) = (fixture.owner("a").await, fixture.owner("b").await);
    for (thread_id, status, error, left) in [
        ("t1", RunStatus::Success, None, ThreadStatus::Idle),
        ("t2", RunStatus::Error, Some("why"), ThreadStatus::Error),
        ("t3", RunStatus::Interrupted, None, ThreadStatus::Interrupted),
    ] {
        create_thread(&a, thread_id).await;
        start(&a, thread_id, thread_id).await;
        let decided = RunEnd { error: error.map(str::to_owned), ..end(status) };
        a.runs().decide(thread_id, &decided).await.unwrap();
        fixture.clock.advance_seconds(41);
        let recovered = expired(&b, &fixture.clock).await.runs;
        assert_eq!(recovered.len(), 1);
        let row = run(&b, thread_id).await;
        assert_eq!((row.status, row.error.as_deref(), row.stop_reason), (status, error, None));
        assert_eq!(thread(&b, thread_id).await.status, left);
    }
}

#[tokio::test]
async fn only_a_run_that_worked_on_its_thread_changes_the_status_of_the_thread() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    start(records, "t", "works").await;
    records.threads().set_status("t", ThreadStatus::Running).await.unwrap();
    wait(records, "t", "waits", Interrupt).await;
    records.runs().finish("waits", &end(RunStatus::Interrupted)).await.unwrap();
    assert_eq!(thread(records, "t").await.status, ThreadStatus::Running);
    records.runs().finish("works", &end(RunStatus::Timeout)).await.unwrap();
    assert_eq!(thread(records, "t").await.status, ThreadStatus::Error);
}

#[tokio::test]
async fn runs_that_were_cancelled_ended_or_followed_are_told() {
    let fixture = fixture().await;
    let (a, b) = (fixture.owner("a").await, fixture.owner("b").await);
    for thread_id in ["goes", "cancelled", "ended", "followed", "both"] {
        create_thread(&a, thread_id).await;
        start(&a, thread_id, thread_id).await;
    }
    for cancelled in ["cancelled", "both"] {
        b.runs().request_cancel(cancelled, CancelAction::Interrupt).await.unwrap();
    }
    a.runs().finish("ended", &end(RunStatus::Error)).await.unwrap();
    for followed in ["followed", "both", "ended", "not-there-yet"] {
        b.runs().follow(followed).await.unwrap();
    }
    let asked = ["goes", "cancelled", "ended", "followed", "both", "not-there-yet"].map(str::to_owned);
    let mut told = a.runs().noticed(&asked).await.unwrap();
    told.sort_by(|one, other| one.run_id.cmp(&other.run_id));
    let told: Vec<_> = told.iter().map(|run| (run.run_id.as_str(), run.stopped, run.followed)).collect();
    let expected =
        [("both", true, true), ("cancelled", true, false), ("ended", true, true), ("followed", false, true)];
    assert_eq!(told, expected);
    assert_eq!(a.runs().noticed(&[]).await.unwrap(), []);
    let kept = ["ended", "goes"].map(str::to_owned);
    assert_eq!(a.runs().followed(&kept).await.unwrap(), [("ended".to_owned(), "ended".to_owned())]);
    assert!(b.runs().followed(&kept).await.unwrap().is_empty(), "it was another process's");
    assert!(a.runs().followed(&[]).await.unwrap().is_empty());
}

/// Rows of a process known to be gone, whatever their leases; no other rows.
#[tokio::test]
async fn what_a_process_left_that_is_known_to_be_gone_is_ended_at_once() {
    let fixture = fixture().await;
    let (a, b) = (fixture.owner("a").await, fixture.owner("b").await);
    for (records, thread_id) in [(&a, "t1"), (&b, "t2")] {
        create_thread(records, thread_id).await;
        start(records, thread_id, thread_id).await;
    }
    wait(&a, "t1", "waits", Interrupt).await;
    std::mem::forget(a.runs().reserve("reserved", WriterKind::CheckpointWrite).await.unwrap());
    let recovered = b.runs().recover_owner(fixture.clock.now(), "a").await.unwrap();
    assert_eq!((recovered.released, recovered.promoted), (vec!["reserved".to_owned()], vec![]));
    let mut ended: Vec<_> = recovered.runs.iter().map(|run| run.run_id.as_str()).collect();
    ended.sort_unstable();
    assert_eq!(ended, ["t1", "waits"]);
    for run in recovered.runs {
        let text = "Gateway restarted before this run reached a durable final state.";
        assert_eq!((run.status, run.error.as_deref()), (RunStatus::Error, Some(text)));
        assert_eq!(run.stop_reason.as_deref(), Some("orphan_recovered"));
    }
    assert_eq!((holder(&b, "t1").await, holder(&b, "t2").await.as_deref()), (None, Some("t2")));
    let again = b.runs().recover_owner(fixture.clock.now(), "a").await.unwrap();
    assert_eq!(again, Recovered::default());
}

fn batch(first_seq: u64, frames: &[&str], ends: bool) -> FrameBatch {
    let next_seq = first_seq + frames.len() as u64;
    FrameBatch { first_seq, next_seq, frames: frames.iter().copied().map(Into::into).collect(), ends }
}

#[tokio::test]
async fn frames_are_kept_for_a_run_that_is_there_in_their_order_and_up_to_a_bound() {
    let fixture = fixture().await;
    let (a, b) = (fixture.owner("a").await, fixture.owner("b").await);
    create_thread(&a, "t").await;
    start(&a, "t", "r").await;
    let append = async |batch: &FrameBatch, keep_from| {
        a.runs().append_frames("t", "r", batch, keep_from).await.unwrap();
    };
    let first = batch(0, &["a", "b"], false);
    for _ in 0..2 {
        append(&first, 0).await;
    }
    append(&batch(2, &["c\0 \u{1f980}"], false), 0).await;
    append(&batch(3, &[], true), 0).await;
    let all = b.runs().frames("r", 0, 10).await.unwrap();
    assert_eq!(
        all.iter().map(|found| (found.first_seq, found.next_seq)).collect::<Vec<_>>(),
        [(0, 2), (2, 3), (3, 3)]
    );
    assert_eq!((&all[0], all[2].ends), (&first, true));
    assert_eq!(b.runs().frames("r", 0, 2).await.unwrap(), all[..2]);
    assert_eq!(b.runs().frames("r", 1, 10).await.unwrap(), all[..], "the batch that contains it");
    assert_eq!(b.runs().frames("r", 2, 10).await.unwrap(), all[1..]);
    assert_eq!(b.runs().frames("r", 9, 10).await.unwrap(), all[2..], "every follower gets the end");
    append(&batch(3, &["d"], false), 3).await;
    let left = b.runs().frames("r", 0, 10).await.unwrap();
    assert_eq!(left.iter().map(|found| found.first_seq).collect::<Vec<_>>(), [3, 3]);

    a.runs().append_frames("t", "gone", &batch(0, &["x"], false), 0).await.unwrap();
    assert_eq!(b.runs().frames("gone", 0, 10).await.unwrap(), [], "nothing would remove them");
    a.runs().forget_frames("t", "r").await.unwrap();
    assert_eq!(b.runs().frames("r", 0, 10).await.unwrap(), []);
}

#[tokio::test]
async fn frames_go_with_their_run_and_thread_and_those_left_behind_some_time_after_the_run() {
    let fixture = fixture().await;
    let records = &fixture.records;
    for run in ["active", "left", "deleted", "threads", "other"] {
        create_thread(records, run).await;
        start(records, run, run).await;
        records.runs().append_frames(run, run, &batch(0, &["x"], false), 0).await.unwrap();
        if run != "active" {
            records.runs().finish(run, &end(RunStatus::Success)).await.unwrap();
        }
    }
    let there = async || {
        let mut there = Vec::new();
        for run in ["active", "left", "deleted", "threads", "other"] {
            if !records.runs().frames(run, 0, 1).await.unwrap().is_empty() {
                there.push(run);
            }
        }
        there
    };
    records.delete_run("deleted", "deleted").await.unwrap();
    let reservation = records.runs().reserve("threads", WriterKind::Delete).await.unwrap();
    records.delete_thread(reservation).await.unwrap();
    records.runs().forget_frames("other", "other").await.unwrap();
    assert_eq!(there().await, ["active", "left"], "it may still be read");
    fixture.clock.advance_seconds(601);
    records.runs().forget_frames("other", "other").await.unwrap();
    assert_eq!(there().await, ["active"]);
}

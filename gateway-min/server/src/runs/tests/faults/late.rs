//! A process that stands still before a write of a run, while another one ends the run or takes it over: when it goes
//! on, the run writes nothing. The processes of these tests do not look at the rows of their runs now and then.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use chrono::{TimeDelta, Utc};
use futures::future::BoxFuture;
use tempfile::TempDir;
use threadkeep_agent::model::scripted::gate;

use super::super::frames;
use super::*;
use crate::streams::verdict::{DELETED, UNREAD};
use threadkeep_records::{Clock, DATABASE_FILE, EventBackend, Lease, NewRun, RECOVERY_ERROR, RecordsOptions};

/// Two processes: the first one's saver fails on demand, and the other one uses it, too.
pub(super) struct Two {
    pub(super) own: Gateway,
    pub(super) other: Gateway,
    pub(super) faults: Faults,
    /// How many minutes the first one's clock is ahead. Its leases have an hour.
    ahead: Arc<AtomicI64>,
    dir: TempDir,
    mode: &'static str,
}

impl Two {
    /// With one turn in the thread.
    pub(super) async fn start(on @ (_, mode): On, gate: &str) -> Self {
        let dir = TempDir::new().unwrap();
        let ahead = Arc::new(AtomicI64::new(0));
        let (own, faults) = faulty_with(on, gate, Some(process(&dir, "own", &ahead).await)).await;
        let other = beside(&own, &dir, ("other", mode), gate).await;
        Self { own, other, faults, ahead, dir, mode }
    }

    /// Another process, which works on nothing.
    pub(super) async fn third(&self) -> Gateway {
        beside(&self.own, &self.dir, ("third", self.mode), "none").await
    }

    /// What the other process does to take over the run of the thread, which is to be rolled back.
    pub(super) fn take_over(&self) -> BoxFuture<'static, Vec<RunRow>> {
        let records = self.other.app.records.clone();
        Box::pin(async move {
            let run = records.runs().active_for_thread("t").await.unwrap().unwrap();
            let accepted = records.runs().request_cancel(&run.run_id, CancelAction::Rollback).await.unwrap();
            assert_eq!(accepted, CancelOutcome::Accepted);
            let found = records.runs().recover_owner(records.now(), "own").await.unwrap();
            assert_eq!(found.rollbacks.len(), 1);
            found.rollbacks
        })
    }
}

/// A gateway beside this one, with the same saver.
async fn beside(own: &Gateway, dir: &TempDir, (owner, mode): (&str, &'static str), gate: &str) -> Gateway {
    let saver = Arc::clone(own.app.threads.accessor().saver());
    let parts = Parts {
        wrap_saver: Box::new(move |_| saver),
        records: Some(process(dir, owner, &Arc::default()).await),
        ..Parts::default()
    };
    Gateway::start_with(("memory", mode), 3, &script(gate), parts).await
}

async fn process(dir: &TempDir, owner: &str, ahead: &Arc<AtomicI64>) -> Records {
    let (hour, ahead) = (Duration::from_hours(1), Arc::clone(ahead));
    let clock = Clock::from_fn(move || Utc::now() + TimeDelta::minutes(ahead.load(Ordering::SeqCst)));
    let options = RecordsOptions {
        clock,
        event_backend: EventBackend::Memory,
        lease: Some(Lease::new(owner, hour, hour)),
        ..RecordsOptions::default()
    };
    Records::open(&dir.path().join(DATABASE_FILE), options).await.unwrap()
}

/// Does this before the first read of a run that has started.
fn before_read_of_started(faults: &Faults, records: Records, what: BoxFuture<'static, ()>) {
    let again = faults.clone();
    faults.before_read(async move {
        let run = records.runs().active_for_thread("t").await.unwrap();
        if run.is_some_and(|run| run.status == RunStatus::Running) {
            what.await;
        } else {
            before_read_of_started(&again, records, what);
        }
    });
}

/// Waits until this process has written its last event of a run, and works on it no longer.
pub(super) async fn has_left(own: &Gateway, run_id: &str) {
    while !own.events(run_id).await.iter().any(|event| event == "run.delivery") {
        tokio::task::yield_now().await;
    }
}

/// The last frames of a run that another process has ended.
fn recovered() -> [(String, Json); 2] {
    let failure = json!({"message": RECOVERY_ERROR, "name": "RunError"});
    [("error".to_owned(), failure), ("end".to_owned(), Json::Null)]
}

const FIRST: [&str; 2] = ["first", "You said: first"];

/// The other process finds nothing of the run to restore, and moves the head: the first write expects another one.
#[tokio::test]
async fn a_run_that_was_rolled_back_elsewhere_before_its_first_write_writes_nothing() {
    for on in everywhere() {
        let two = Two::start(on, "none").await;
        let (taking, runs) = (two.take_over(), Arc::clone(&two.other.app.runs));
        two.faults.before_write(async move {
            let found = taking.await;
            let run_id = found[0].run_id.clone();
            runs.roll_back(found);
            runs.ended(&run_id).await.unwrap();
        });
        let (shown, row) = two.own.run(ask("late")).await;
        assert!(
            shown.iter().all(|(name, _)| name != "error"),
            "{on:?}: who rolled it back knows why: {shown:?}"
        );
        let ended = (row.status, row.error.as_deref());
        assert_eq!(ended, (RunStatus::Error, Some("Rolled back by user")), "{on:?}");
        assert_eq!(said(&two.own.head().await.unwrap()), FIRST, "{on:?}");
        let left = left_by(&two.own, &row).await;
        assert_eq!(left.map(|messages| messages.len()), Some(2), "{on:?}");
        goes_on(&two.own).await;
    }
}

/// Nothing moves the head for a run that is only ended: it looks at its row, because its first write comes late.
#[tokio::test]
async fn a_run_that_was_ended_elsewhere_long_before_its_first_write_writes_nothing() {
    for on in everywhere() {
        let two = Two::start(on, "none").await;
        let before = count(&two.own).await;
        let (records, ahead) = (two.other.app.records.clone(), Arc::clone(&two.ahead));
        let ending = async move {
            // More than a third of a lease has passed.
            ahead.store(21, Ordering::SeqCst);
            let found = records.runs().recover_owner(records.now(), "own").await.unwrap();
            assert_eq!(found.runs.len(), 1);
        };
        before_read_of_started(&two.faults, two.own.app.records.clone(), Box::pin(ending));
        let (_, row) = two.own.run(ask("late")).await;
        assert_eq!(row.error.as_deref(), Some(RECOVERY_ERROR), "{on:?}");
        assert_eq!(count(&two.own).await, before, "{on:?}");
        goes_on(&two.own).await;
    }
}

/// Nor does anything move it while its model answers, or while its process's clock is set back. Its clients are shown
/// what ended it.
#[tokio::test]
async fn a_run_that_was_ended_elsewhere_while_its_model_answered_stores_no_answer() {
    let everywhere = everywhere().flat_map(|on| [21, -41].map(|ahead| (on, ahead)));
    for (on @ (saver, mode), ahead) in everywhere {
        let name = format!("late-answer-{saver}-{mode}-{ahead}");
        let two = Two::start(on, &name).await;
        let created = two.own.create(ask("wait")).await.unwrap();
        at_gate(&two.own, &name, "wait").await;
        let before = count(&two.own).await;
        // More than a third of a lease has passed, or it is not known how much.
        two.ahead.store(ahead, Ordering::SeqCst);
        let records = &two.other.app.records;
        let found = records.runs().recover_owner(records.now(), "own").await.unwrap();
        assert_eq!(found.runs.len(), 1, "{on:?}");
        gate(&name).open();
        let run_id = created.run.run_id.clone();
        let shown = frames(created.stream).await;
        assert!(shown.ends_with(&recovered()), "{on:?} {ahead}: {shown:?}");
        let row = two.own.row(&run_id).await;
        assert_eq!(row.error.as_deref(), Some(RECOVERY_ERROR), "{on:?}");
        assert_eq!(count(&two.own).await, before, "{on:?} {ahead}");
        goes_on(&two.own).await;
    }
}

/// The process that has ended the run may know nothing of it.
#[tokio::test]
async fn clients_of_a_run_that_was_ended_elsewhere_are_shown_what_its_write_finds_lost() {
    for on @ (saver, mode) in everywhere() {
        let name = format!("late-lost-{saver}-{mode}");
        let two = Two::start(on, &name).await;
        let created = two.own.create(ask("wait")).await.unwrap();
        at_gate(&two.own, &name, "wait").await;
        let records = two.other.app.records.clone();
        two.faults.before_write(async move {
            let found = records.runs().recover_owner(records.now(), "own").await.unwrap();
            assert_eq!(found.runs.len(), 1);
        });
        two.faults.write(1, Fault::Lost);
        gate(&name).open();
        let run_id = created.run.run_id.clone();
        let shown = frames(created.stream).await;
        let error = json!({"message": lost().to_string(), "name": "CheckpointHistoryLostError"});
        let last = [("error".to_owned(), error), ("end".to_owned(), Json::Null)];
        assert!(shown.ends_with(&last), "{on:?}: {shown:?}");
        assert_eq!(two.own.row(&run_id).await.error.as_deref(), Some(RECOVERY_ERROR), "{on:?}");
    }
}

/// Their stream stays open until the old turn is back, and the row of the edit has ended.
#[tokio::test]
async fn clients_of_an_edit_that_was_taken_over_are_shown_what_it_died_of() {
    for on @ (saver, mode) in everywhere() {
        let name = format!("late-edit-{saver}-{mode}");
        let two = Two::start(on, &name).await;
        let base = two.own.head().await.unwrap();
        two.own.run(ask("second")).await;
        let before = said(&two.own.head().await.unwrap());
        let created = two.own.create(edit(from(&base, ask("wait")))).await.unwrap();
        at_gate(&two.own, &name, "wait").await;
        // More than a third of a lease has passed.
        two.ahead.store(21, Ordering::SeqCst);
        let records = &two.other.app.records;
        let found = records.runs().recover_owner(records.now(), "own").await.unwrap();
        assert_eq!(found.rollbacks.len(), 1, "{on:?}");
        gate(&name).open();
        let run_id = created.run.run_id.clone();
        let shown = tokio::spawn(frames(created.stream));
        has_left(&two.own, &run_id).await;
        assert!(!shown.is_finished(), "{on:?}");
        two.other.app.runs.roll_back(found.rollbacks);
        let shown = shown.await.unwrap();
        assert!(shown.ends_with(&recovered()), "{on:?}: {shown:?}");
        assert_eq!(two.other.row(&run_id).await.error.as_deref(), Some(RECOVERY_ERROR), "{on:?}");
        assert_eq!(said(&two.own.head().await.unwrap()), before, "{on:?}");
        goes_on(&two.own).await;
    }
}

/// Neither its question nor, in delta mode, the state that it should resume from.
#[tokio::test]
async fn a_run_that_is_cancelled_before_its_first_write_writes_nothing() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        let older = gateway.head().await.unwrap();
        gateway.run(ask("second")).await;
        let before = gateway.history().await;
        let (records, runs) = (gateway.app.records.clone(), Arc::clone(&gateway.app.runs));
        let cancelling = async move {
            let run = records.runs().active_for_thread("t").await.unwrap().unwrap();
            let accepted = runs.cancel(&run.run_id, CancelAction::Interrupt).await.unwrap();
            assert_eq!(accepted, CancelOutcome::Accepted);
        };
        before_read_of_started(&faults, gateway.app.records.clone(), Box::pin(cancelling));
        let (_, row) = gateway.run(from(&older, ask("late"))).await;
        assert_eq!(row.status, RunStatus::Interrupted, "{on:?}");
        assert_eq!(gateway.history().await, before, "{on:?}");
        goes_on(&gateway).await;
    }
}

/// It reads the head again, because a pass removed the one that it had read. By then the other process has the run, and
/// has not rolled it back yet.
#[tokio::test]
async fn a_run_that_was_taken_over_does_not_go_on_from_another_head() {
    for on in everywhere() {
        let two = Two::start(on, "none").await;
        let (taking, there) = (two.take_over(), two.own.app.threads.accessor().clone());
        let (taken, found) = tokio::sync::oneshot::channel();
        two.faults.before_write(async move {
            remove_note(&there).await;
            taken.send(taking.await).unwrap();
        });
        let created = two.own.create(ask("late")).await.unwrap();
        let run_id = created.run.run_id.clone();
        let shown = tokio::spawn(frames(created.stream));
        has_left(&two.own, &run_id).await;
        assert_eq!(said(&two.own.head().await.unwrap()), FIRST, "{on:?}");
        let row = two.own.app.records.runs().get(&run_id).await.unwrap().unwrap();
        assert!(row.status.is_active() && !shown.is_finished(), "{on:?}: the other process ends it");
        two.other.app.runs.roll_back(found.await.unwrap());
        let shown = shown.await.unwrap();
        assert!(shown.iter().all(|(name, _)| name != "error"), "{on:?}: as was asked: {shown:?}");
        assert_eq!(two.other.row(&run_id).await.error.as_deref(), Some("Rolled back by user"), "{on:?}");
        assert_eq!(said(&two.own.head().await.unwrap()), FIRST, "{on:?}");
        goes_on(&two.own).await;
    }
}

/// Its task could not write how the run ends, and somebody else does so in its place.
#[tokio::test]
async fn a_run_that_was_taken_over_is_not_ended_for_its_former_process() {
    let two = Two::start(("memory", "full"), "none").await;
    let runs = two.own.app.records.runs();
    let run = NewRun { run_id: "gone".into(), thread_id: "t".into(), ..NewRun::default() };
    runs.admit(run, MultitaskStrategy::Reject).await.unwrap();
    runs.start("gone").await.unwrap();
    let found = two.take_over().await;
    let ends = RunEnd { rollback_settled: true, ..RunEnd::failed("late") };
    for end in [Some(ends), None] {
        two.own.app.runs.bury("gone", end).await;
        assert_eq!(runs.get("gone").await.unwrap().as_ref(), found.first());
    }
    two.other.app.runs.roll_back(found);
    assert_eq!(two.other.row("gone").await.error.as_deref(), Some("Rolled back by user"));
    goes_on(&two.own).await;
}

/// Clients of a run that another process has ended are not shown the end of a success because its row cannot be read,
/// or was deleted meanwhile.
#[tokio::test]
async fn an_end_of_another_process_that_cannot_be_read_is_no_success() {
    let gateway = Gateway::start_on(("memory", "full"), &script("none")).await;
    for (failing, expected) in [(2, "This run was deleted"), (3, "Another process has ended this run")] {
        let run_id = format!("gone-{failing}");
        let publisher = Arc::new(gateway.app.streams.open(&run_id));
        let stream = gateway.app.streams.subscribe(&run_id);
        gateway.app.records.fail_reads(failing);
        Arc::clone(&gateway.app.runs).end_stream(run_id, publisher, UNREAD).await;
        assert!(!gateway.app.records.fail_statement(0), "each read that should fail has failed");
        let shown = frames(stream).await;
        let [(error, data), (end, _)] = &shown[..] else { panic!("{shown:?}") };
        assert_eq!((error.as_str(), &data["name"], end.as_str()), ("error", &json!("RunError"), "end"));
        assert!(data["message"].as_str().unwrap().starts_with(expected), "{data}");
    }
}

/// Nor are clients that follow it on another process.
#[tokio::test]
async fn the_end_of_a_run_elsewhere_that_was_deleted_meanwhile_is_no_success() {
    let gateway = Gateway::start_on(("memory", "full"), &script("none")).await;
    let (_, row) = gateway.run(ask("once")).await;
    let deleted = RunRow { run_id: "gone".to_owned(), status: RunStatus::Running, ..row };
    let shown = frames(gateway.app.streams.follow(&deleted, None)).await;
    let failure = json!({"message": DELETED, "name": "RunError"});
    assert_eq!(shown, [("error".to_owned(), failure), ("end".to_owned(), Json::Null)]);
}

//! Rollbacks that are taken over from a process that is gone, and cannot be carried out at once, or at all.

use std::time::Duration;

use chrono::TimeDelta;
use serde_json::{Value as Json, json};
use threadkeep::checkpoint::TaskWrites;
use threadkeep::deletion::{Boundary, Keep, Prune, prune};
use threadkeep::id::ThreadId;
use threadkeep::metadata::Source;
use threadkeep::saver::Load;
use threadkeep::state::Update;
use threadkeep::step::StepWriter;
use threadkeep_agent::Interrupts;
use threadkeep_agent::duration::{self, RunNotes};
use threadkeep_agent::model::scripted::gate;
use threadkeep_records::{
    CancelAction, MultitaskStrategy, NewRun, RECOVERY_ERROR, RunRow, RunStatus, RunTotals,
};

use super::super::{Gateway, MODES, ask, everywhere, frames, from, options};
use super::saver::Fault;
use super::{at_gate, count, edit, faulty, goes_on, said};
use crate::runs::ending::DIED;
use crate::runs::request::{RunOptions, RunRequest, StreamMode};
use crate::runs::worker::rolling_back;

/// A run that has written a message and is to be rolled back, whose process is gone.
pub(super) async fn left(gateway: &Gateway) -> RunRow {
    worked(gateway, false).await;
    let runs = gateway.app.records.runs();
    runs.request_cancel("gone", CancelAction::Rollback).await.unwrap();
    runs.get("gone").await.unwrap().unwrap()
}

/// A run that has written a message, perhaps as an edit, and whose process is gone.
async fn worked(gateway: &Gateway, edits: bool) {
    let runs = gateway.app.records.runs();
    let run = NewRun { run_id: "gone".into(), thread_id: "t".into(), edits, ..NewRun::default() };
    runs.admit(run, MultitaskStrategy::Reject).await.unwrap();
    runs.start("gone").await.unwrap();
    runs.progress("gone", &RunTotals { total_tokens: 7, ..RunTotals::default() }).await.unwrap();
    write(gateway, "more", json!({"run_id": "gone"})).await;
}

/// Writes a message with this metadata.
async fn write(gateway: &Gateway, text: &str, extra: Json) {
    let accessor = gateway.app.threads.accessor();
    let message = json!([{"type": "human", "content": text, "id": text}]);
    let extra = extra.as_object().unwrap().clone();
    let writes = vec![accessor.write("messages", message, false).unwrap()];
    let update = Update { at: None, node: "model".into(), writes, extra };
    accessor.update(&ThreadId::from("t"), update).await.unwrap();
}

/// Ends what a process left, as the next one does at its start. Returns the row of its edit, once it has ended.
async fn restarted(gateway: &Gateway) -> RunRow {
    let records = &gateway.app.records;
    let found = records.runs().recover_orphans(records.now(), TimeDelta::zero()).await.unwrap();
    let [row] = <[RunRow; 1]>::try_from(found.rollbacks).unwrap();
    rolled_back(gateway, row).await
}

/// Takes the run over, and waits for its end.
pub(super) async fn rolled_back(gateway: &Gateway, row: RunRow) -> RunRow {
    gateway.app.runs.roll_back(vec![row]);
    let ended = gateway.row("gone");
    tokio::time::timeout(Duration::from_mins(10), ended).await.expect("it holds its thread for ever")
}

#[tokio::test]
async fn a_rollback_that_cannot_be_carried_out_ends_its_run_and_frees_its_thread() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        let before = gateway.head().await.unwrap();
        let row = left(&gateway).await;
        faults.damage(before.key.id);
        let row = rolled_back(&gateway, row).await;
        faults.disarm();
        assert_eq!((row.status, row.totals.total_tokens), (RunStatus::Error, 7), "{on:?}");
        let error = row.error.unwrap();
        assert!(
            error.starts_with("Run gone could not be rolled back, and what it committed is kept: "),
            "{error}"
        );
        assert!(error.ends_with("corrupt data: a checkpoint: injected fault"), "{error}");
        assert_eq!(said(&gateway.head().await.unwrap()), ["first", "You said: first", "more"], "{on:?}");
        goes_on(&gateway).await;
    }
}

/// An operator's prune has left only what the run has written. That is no thread which began with the run.
#[tokio::test]
async fn a_rollback_to_a_state_that_was_pruned_deletes_nothing() {
    for on in everywhere() {
        let (gateway, _) = faulty(on, "none").await;
        let row = left(&gateway).await;
        let (accessor, thread) = (gateway.app.threads.accessor(), ThreadId::from("t"));
        let latest = Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(Keep::Latest) };
        prune(&**accessor.saver(), &thread, &latest, accessor.table()).await.unwrap();
        assert_eq!(gateway.history().await.len(), 1, "{on:?}");
        let row = rolled_back(&gateway, row).await;
        assert_eq!(row.status, RunStatus::Error, "{on:?}");
        let error = row.error.unwrap();
        let kept = "Run gone could not be rolled back, and what it committed is kept: ";
        assert!(error.starts_with(kept) && error.contains("was pruned"), "{error}");
        assert_eq!(said(&gateway.head().await.unwrap()), ["first", "You said: first", "more"], "{on:?}");
        goes_on(&gateway).await;
    }
}

/// An edited cadence keeps new runs from starting. This run has been accepted, and what is written is written as before.
#[tokio::test]
async fn a_rollback_is_carried_out_although_the_cadence_was_edited() {
    for on @ (backend, mode) in everywhere() {
        let (gateway, _) = faulty(on, "none").await;
        let row = left(&gateway).await;
        let mut database = gateway.section("database");
        database["checkpoint_delta"]["snapshot_frequency"] = json!(4);
        gateway.configure("database", &database);
        let row = rolled_back(&gateway, row).await;
        assert_eq!(row.error.as_deref(), Some("Rolled back by user"), "{backend} {mode}");
        assert_eq!(said(&gateway.head().await.unwrap()), ["first", "You said: first"], "{backend} {mode}");
        database["checkpoint_delta"]["snapshot_frequency"] = json!(3);
        gateway.configure("database", &database);
        goes_on(&gateway).await;
    }
}

/// In the middle of a superstep of which one task had finished before the run, and one in it: before the run's first
/// checkpoint, after it, and with a store that goes away during the rollback, or whose answer is lost.
#[tokio::test]
async fn a_rollback_that_is_taken_over_leaves_just_the_rows_of_before_the_run() {
    for on in everywhere() {
        for (commits, fault) in [
            (false, None),
            (true, None),
            (false, Some(Fault::Away)),
            (true, Some(Fault::Away)),
            (false, Some(Fault::InDoubt)),
            (true, Some(Fault::InDoubt)),
        ] {
            let (gateway, faults) = faulty(on, "none").await;
            let stopping = RunOptions {
                interrupt_before: Interrupts::Nodes(vec!["tools".to_owned()]),
                ..options([StreamMode::Values])
            };
            gateway.run(RunRequest { options: stopping, ..ask("two tools") }).await;
            let (accessor, thread) = (gateway.app.threads.accessor(), ThreadId::from("t"));
            let head = gateway.head().await.unwrap();
            let [earlier, own] = [0, 1].map(|index| TaskWrites {
                task: accessor.ids().task(),
                node: "tools".into(),
                index,
                writes: Vec::new(),
            });
            accessor.saver().put_writes(&head.key, &earlier).await.unwrap();
            let runs = gateway.app.records.runs();
            let run = NewRun { run_id: "gone".into(), thread_id: "t".into(), ..NewRun::default() };
            runs.admit(run, MultitaskStrategy::Reject).await.unwrap();
            runs.start("gone").await.unwrap();
            runs.note_finished_before("gone", &[earlier.task.to_string()]).await.unwrap();
            accessor.saver().put_writes(&head.key, &own).await.unwrap();
            if commits {
                let mut writer = StepWriter::open(accessor, &thread, None).await.unwrap();
                writer.adopt(earlier.task).unwrap();
                writer.adopt(own.task).unwrap();
                let extra = json!({"run_id": "gone"}).as_object().unwrap().clone();
                writer.commit(Source::Loop, Vec::new(), extra).await.unwrap();
            }
            runs.request_cancel("gone", CancelAction::Rollback).await.unwrap();
            let row = runs.get("gone").await.unwrap().unwrap();
            if let Some(fault) = fault {
                // The checkpoint and its row are one write.
                faults.write(1, fault);
            }
            let row = rolled_back(&gateway, row).await;
            assert!(!faults.disarm(), "{on:?} {commits}");
            assert_eq!(row.error.as_deref(), Some("Rolled back by user"), "{on:?} {commits}");
            let left = gateway.head().await.unwrap();
            assert_eq!(
                (&left.writes, &left.next),
                (&vec![earlier], &head.next),
                "{on:?} {commits} {fault:?}"
            );
            assert_eq!(said(&left), said(&head));
        }
    }
}

#[tokio::test]
async fn a_rollback_waits_for_a_store_that_is_unavailable() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        let row = left(&gateway).await;
        faults.away(3);
        let row = rolled_back(&gateway, row).await;
        assert!(!faults.disarm(), "{on:?}");
        assert_eq!(row.error.as_deref(), Some("Rolled back by user"), "{on:?}");
        assert_eq!(said(&gateway.head().await.unwrap()), ["first", "You said: first"], "{on:?}");
        goes_on(&gateway).await;
    }
}

#[tokio::test]
async fn a_rollback_that_a_stopping_process_has_not_carried_out_is_left_to_the_next() {
    let (gateway, faults) = faulty(("sqlite", "delta"), "none").await;
    let row = left(&gateway).await;
    faults.away(usize::MAX);
    gateway.app.runs.roll_back(vec![row]);
    tokio::time::timeout(Duration::from_mins(10), gateway.app.stop_runs()).await.expect("it stops");
    faults.disarm();
    let row = gateway.app.records.runs().get("gone").await.unwrap().unwrap();
    assert_eq!((row.status, row.cancel_action), (RunStatus::Running, Some(CancelAction::Rollback)));
}

/// What its task could not do any more is done for it: the client was told that the run is rolled back.
#[tokio::test]
async fn a_run_that_its_task_could_not_end_is_rolled_back_if_that_was_accepted() {
    for on in everywhere() {
        let (gateway, _) = faulty(on, "none").await;
        let before = gateway.head().await.unwrap();
        let row = left(&gateway).await;
        gateway.app.runs.bury(&row.run_id, None).await;
        let ended = tokio::time::timeout(Duration::from_mins(10), gateway.row("gone")).await.unwrap();
        assert_eq!((ended.status, ended.error.as_deref()), (RunStatus::Error, Some("Rolled back by user")));
        assert_eq!(said(&gateway.head().await.unwrap()), ["first", "You said: first"], "{on:?}");
        let left = gateway.app.threads.left_by(&ended, &Load::All).await.unwrap().unwrap();
        assert_eq!(left.values().unwrap(), before.values().unwrap(), "{on:?}");
        goes_on(&gateway).await;
    }
}

#[tokio::test]
async fn followers_of_a_rollback_that_is_taken_over_see_its_end() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        let row = left(&gateway).await;
        faults.away(usize::MAX);
        gateway.app.runs.roll_back(vec![row.clone()]);
        let followed = tokio::spawn(frames(gateway.app.streams.follow(&row, None)));
        // One that comes later sees the same.
        let second = frames(gateway.app.streams.follow(&row, None));
        faults.disarm();
        let all = async { (followed.await.unwrap(), second.await) };
        let (followed, second) = tokio::time::timeout(Duration::from_mins(10), all).await.unwrap();
        assert_eq!(followed, second, "{on:?}");
        let names: Vec<&str> = followed.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["metadata", "values", "end"], "{on:?}");
        let messages = followed[1].1["messages"].as_array().unwrap();
        assert_eq!(
            messages.iter().map(|message| &message["content"]).collect::<Vec<_>>(),
            ["first", "You said: first"]
        );
        assert!(!gateway.row("gone").await.status.is_active());
    }
}

/// The spec's edit that ends without success: here because its process died.
#[tokio::test]
async fn an_edit_whose_process_is_gone_gives_way_to_the_old_turn() {
    for on in everywhere() {
        let (gateway, _) = faulty(on, "none").await;
        let before = gateway.head().await.unwrap();
        worked(&gateway, true).await;
        let row = restarted(&gateway).await;
        assert_eq!((row.status, row.error.as_deref()), (RunStatus::Error, Some(RECOVERY_ERROR)), "{on:?}");
        assert_eq!((row.stop_reason.as_deref(), row.totals.total_tokens), (Some("orphan_recovered"), 7));
        assert_eq!(said(&gateway.head().await.unwrap()), ["first", "You said: first"], "{on:?}");
        let left = gateway.app.threads.left_by(&row, &Load::All).await.unwrap().unwrap();
        assert_eq!(left.values().unwrap(), before.values().unwrap(), "{on:?}");
        goes_on(&gateway).await;
    }
}

/// The process that took it over did not hear of that, and finds it later.
#[tokio::test]
async fn an_edit_that_was_taken_over_without_an_answer_ends_with_what_it_died_of() {
    let (gateway, _) = faulty(("sqlite", "delta"), "none").await;
    worked(&gateway, true).await;
    let records = &gateway.app.records;
    let unheard = records.runs().recover_orphans(records.now(), TimeDelta::zero()).await.unwrap();
    assert_eq!(unheard.rollbacks.len(), 1);
    gateway.app.runs.bury("gone", None).await;
    let row = tokio::time::timeout(Duration::from_mins(10), gateway.row("gone")).await.unwrap();
    let died_of = (row.error.as_deref(), row.stop_reason.as_deref());
    assert_eq!(died_of, (Some(RECOVERY_ERROR), Some("orphan_recovered")));
    goes_on(&gateway).await;
}

/// The process died after it had restored the old turn, and before the run's row ended.
#[tokio::test]
async fn an_edit_is_undone_once() {
    for on in everywhere() {
        let (gateway, _) = faulty(on, "none").await;
        let (accessor, thread) = (gateway.app.threads.accessor(), ThreadId::from("t"));
        let mut known = accessor.known_head(&thread).await.unwrap();
        let point = accessor.capture(&mut known).await.unwrap();
        worked(&gateway, true).await;
        let mut known = accessor.known_head(&thread).await.unwrap();
        let extra = rolling_back("gone", point.snapshot().unwrap());
        accessor.restore(&mut known, &point, extra).await.unwrap();
        let (head, written) = (gateway.head().await.unwrap(), count(&gateway).await);
        let row = restarted(&gateway).await;
        assert_eq!((row.status, row.error.as_deref()), (RunStatus::Error, Some(RECOVERY_ERROR)), "{on:?}");
        assert_eq!(row.left_checkpoint, Some(head.key.id.to_string()), "{on:?}");
        assert_eq!((gateway.head().await.unwrap().key, count(&gateway).await), (head.key, written), "{on:?}");
        goes_on(&gateway).await;
    }
}

/// Only a run whose success is decided writes its note. A power loss may take the decision; a rollback that was
/// accepted since is carried out.
#[tokio::test]
async fn an_edit_that_had_succeeded_before_its_process_died_keeps_its_turn() {
    for on in everywhere() {
        for asked in [false, true] {
            let (gateway, _) = faulty(on, "none").await;
            worked(&gateway, true).await;
            let (accessor, thread) = (gateway.app.threads.accessor(), ThreadId::from("t"));
            let notes = RunNotes { durations: [("gone".to_owned(), 1)].into(), ..RunNotes::default() };
            let noted = duration::note(accessor, &thread, None, &notes).await.unwrap().unwrap();
            if asked {
                let runs = gateway.app.records.runs();
                runs.request_cancel("gone", CancelAction::Rollback).await.unwrap();
            }
            let row = restarted(&gateway).await;
            let (error, left) = (row.error.as_deref(), said(&gateway.head().await.unwrap()));
            if asked {
                assert_eq!((row.status, error), (RunStatus::Error, Some("Rolled back by user")), "{on:?}");
                assert_eq!(left, ["first", "You said: first"], "{on:?}");
            } else {
                assert_eq!((row.status, error, row.stop_reason), (RunStatus::Success, None, None), "{on:?}");
                assert_eq!(row.left_checkpoint, Some(noted.key.id.to_string()), "{on:?}");
                assert_eq!(left, ["first", "You said: first", "more"], "{on:?}");
            }
            goes_on(&gateway).await;
        }
    }
}

/// Somebody else took the run for lost, and wrote to its thread.
#[tokio::test]
async fn an_edit_is_not_undone_below_what_somebody_else_wrote() {
    for on in everywhere() {
        let (gateway, _) = faulty(on, "none").await;
        worked(&gateway, true).await;
        write(&gateway, "newer", json!({})).await;
        let row = restarted(&gateway).await;
        assert_eq!(row.status, RunStatus::Error, "{on:?}");
        let kept = ["first", "You said: first", "more", "newer"];
        assert_eq!(said(&gateway.head().await.unwrap()), kept, "{on:?}");
        goes_on(&gateway).await;
    }
}

#[tokio::test]
async fn an_edit_whose_task_panics_gives_way_to_the_old_turn() {
    for on @ (saver, mode) in everywhere() {
        let name = format!("edit-panics-{saver}-{mode}");
        let (gateway, faults) = faulty(on, &name).await;
        let base = gateway.head().await.unwrap();
        gateway.run(ask("second")).await;
        let before = said(&gateway.head().await.unwrap());
        let created = gateway.create(edit(from(&base, ask("wait")))).await.unwrap();
        at_gate(&gateway, &name, "wait").await;
        faults.before_write(async { panic!("a saver that panics") });
        gate(&name).open();
        let row = gateway.row(&created.run.run_id).await;
        assert_eq!((row.status, row.error.as_deref()), (RunStatus::Error, Some(DIED)), "{on:?}");
        assert_eq!(said(&gateway.head().await.unwrap()), before, "{on:?}");
        goes_on(&gateway).await;
    }
}

/// Whose a failed edit is cannot be read in any of three attempts.
#[tokio::test]
async fn a_failed_edit_whose_row_cannot_be_read_gives_way_to_the_old_turn() {
    for mode in MODES {
        let name = format!("edit-unread-{mode}");
        let (gateway, _) = faulty(("sqlite", mode), &name).await;
        let base = gateway.head().await.unwrap();
        gateway.run(ask("second")).await;
        let before = said(&gateway.head().await.unwrap());
        let created = gateway.create(edit(from(&base, ask("break")))).await.unwrap();
        gate(&name).reached().await;
        gateway.app.records.fail_reads(3);
        gate(&name).open();
        // The row is read once these have failed.
        created.stream.ended().await;
        assert!(!gateway.app.records.fail_statement(0), "the reads failed");
        let row = gateway.row(&created.run.run_id).await;
        assert_eq!(row.status, RunStatus::Error, "{mode}");
        assert_eq!(said(&gateway.head().await.unwrap()), before, "{mode}");
        goes_on(&gateway).await;
    }
}

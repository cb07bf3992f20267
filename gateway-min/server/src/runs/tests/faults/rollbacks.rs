//! Rollbacks of runs whose reads or writes fail.

use std::time::Duration;

use chrono::TimeDelta;
use serde_json::{Map, Value as Json, json};
use threadkeep::checkpoint::{INTERRUPT_CHANNEL, TaskWrites, Write};
use threadkeep::id::ThreadId;
use threadkeep::state::Update;
use threadkeep::value::ChannelValue;
use threadkeep_agent::model::scripted::gate;
use threadkeep_records::{
    CancelAction, CancelOutcome, EventQuery, MultitaskStrategy, RECOVERY_ERROR, RunRow, RunStatus,
};

use super::super::left::left_by;
use super::super::{Gateway, ask, everywhere, from, options};
use super::saver::{Fault, Faults};
use super::{at_gate, count, edit, faulty, goes_on, said};
use crate::runs::request::{RunOptions, RunRequest, StreamMode};

/// The row of a task that waits for the user, and of one that has finished.
fn rows(gateway: &Gateway) -> Vec<TaskWrites> {
    let ids = gateway.app.threads.accessor().ids();
    let value = |json: Json| ChannelValue::from_json(&json).unwrap();
    let interrupt =
        Write { channel: INTERRUPT_CHANNEL.into(), value: value(json!(["who?"])), overwrite: false };
    let said = gateway.app.threads.accessor().write(
        "messages",
        json!([{"type": "ai", "content": "of a task", "id": "x"}]),
        false,
    );
    let title = gateway.app.threads.accessor().write("title", json!("of a task"), false);
    let row = |index, writes| TaskWrites { task: ids.task(), node: "worker".into(), index, writes };
    vec![row(0, vec![interrupt]), row(1, vec![said.unwrap(), title.unwrap()]), row(2, Vec::new())]
}

/// Runs until the gate and cancels there, with a rollback whose `k`-th write fails so.
async fn rolled_back(gateway: &Gateway, faults: &Faults, name: &str, (k, fault): (usize, Fault)) -> RunRow {
    let created = gateway.create(ask("wait")).await.unwrap();
    at_gate(gateway, name, "wait").await;
    faults.write(k, fault);
    gateway.app.runs.cancel(&created.run.run_id, CancelAction::Rollback).await.unwrap();
    gateway.row(&created.run.run_id).await
}

/// Scenario 65, and its write failed once: the state and its rows are one.
#[tokio::test]
async fn a_rollback_restores_the_pending_rows_exactly_or_says_that_it_did_not() {
    for on @ (saver, mode) in everywhere() {
        for k in 1.. {
            let name = format!("fault-rollback-{saver}-{mode}");
            let (gateway, faults) = faulty(on, &name).await;
            let before = gateway.head().await.unwrap();
            let rows = rows(&gateway);
            for row in &rows {
                gateway.app.threads.accessor().saver().put_writes(&before.key, row).await.unwrap();
            }
            let row = rolled_back(&gateway, &faults, &name, (k, Fault::Refused)).await;
            let fired = !faults.disarm();
            let head = gateway.head().await.unwrap();
            if fired {
                assert_eq!((row.status, row.error), (RunStatus::Interrupted, None), "{on:?} {k}");
                assert_eq!(said(&head), ["first", "You said: first", "wait"], "what was committed stays");
            } else {
                assert_eq!(row.error.as_deref(), Some("Rolled back by user"));
                assert_eq!(head.values().unwrap(), before.values().unwrap(), "{on:?} {k}");
                assert_eq!(head.writes, rows, "order, tasks and values");
                assert!(head.key.id > before.key.id);
            }
            goes_on(&gateway).await;
            if !fired {
                assert_eq!(k, 2, "one write");
                break;
            }
        }
    }
}

/// The store is away when the state is to be restored: the run keeps its thread until it is back.
#[tokio::test]
async fn a_cancelled_run_is_rolled_back_once_the_store_is_back() {
    for on @ (saver, mode) in everywhere() {
        let name = format!("away-rollback-{saver}-{mode}");
        let (gateway, faults) = faulty(on, &name).await;
        let before = gateway.head().await.unwrap();
        let row = rolled_back(&gateway, &faults, &name, (1, Fault::Away)).await;
        assert!(!faults.disarm(), "{on:?}");
        let ended = (row.status, row.error.as_deref());
        assert_eq!(ended, (RunStatus::Error, Some("Rolled back by user")), "{on:?}");
        assert_eq!(gateway.head().await.unwrap().values().unwrap(), before.values().unwrap(), "{on:?}");
        goes_on(&gateway).await;
    }
}

/// The same for an edit, whose followers are shown the restored state.
#[tokio::test]
async fn a_failed_edit_gives_way_to_the_old_turn_once_the_store_is_back() {
    for on @ (_, mode) in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        let base = gateway.head().await.unwrap();
        gateway.run(ask("second")).await;
        let before = gateway.head().await.unwrap();
        // In delta mode the resume, then the input and the fallback answer; the restore.
        faults.write(if mode == "delta" { 4 } else { 3 }, Fault::Away);
        let (frames, row) = gateway.run(edit(from(&base, ask("fail")))).await;
        assert!(!faults.disarm(), "{on:?}: it failed there");
        let names: Vec<&str> = frames.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["metadata", "values", "values", "values", "end"], "{on:?}");
        assert_eq!(row.status, RunStatus::Error, "{on:?}");
        assert_eq!(gateway.head().await.unwrap().values().unwrap(), before.values().unwrap(), "{on:?}");
        goes_on(&gateway).await;
    }
}

/// The answer to a write of the run is lost, and somebody else writes before the repeat: the run does not hold its
/// thread as for a store that may come back.
#[tokio::test]
async fn a_rollback_ends_at_once_if_somebody_else_has_written_after_a_doubt() {
    for on @ (saver, mode) in everywhere() {
        let name = format!("doubt-rollback-{saver}-{mode}");
        let (gateway, faults) = faulty(on, &name).await;
        let created = gateway.create(ask("wait")).await.unwrap();
        let run_id = &created.run.run_id;
        at_gate(&gateway, &name, "wait").await;
        // Not through the gateway, which would tell the task.
        let accepted = gateway.app.records.runs().request_cancel(run_id, CancelAction::Rollback).await;
        assert_eq!(accepted.unwrap(), CancelOutcome::Accepted);
        let (accessor, repeat) = (gateway.app.threads.accessor().clone(), faults.clone());
        let meanwhile = async move {
            let message = json!([{"type": "human", "content": "newer", "id": "newer"}]);
            let writes = vec![accessor.write("messages", message, false).unwrap()];
            let update = Update { at: None, node: "model".into(), writes, extra: Map::new() };
            accessor.update(&ThreadId::from("t"), update).await.unwrap();
            repeat.write(1, Fault::Away);
        };
        let second = faults.clone();
        faults.before_write(async move { second.before_write(meanwhile) });
        faults.write(1, Fault::InDoubt);
        gate(&name).open();
        // Less than a store that is away is waited for.
        let ended = tokio::time::timeout(Duration::from_mins(5), gateway.row(run_id)).await;
        let row = ended.expect("it is tried again and again");
        assert!(!faults.disarm(), "{on:?}");
        assert_eq!((row.status, row.error), (RunStatus::Interrupted, None), "{on:?}");
        let kept = ["first", "You said: first", "wait", "late", "newer"];
        assert_eq!(said(&gateway.head().await.unwrap()), kept, "{on:?}");
        goes_on(&gateway).await;
    }
}

/// A rollback that was accepted, and an edit that the stop interrupts, while the store is away.
#[tokio::test]
async fn what_a_stopping_process_cannot_restore_is_left_to_the_next() {
    for asked in [true, false] {
        let name = format!("left-to-the-next-{asked}");
        let (gateway, faults) = faulty(("sqlite", "delta"), &name).await;
        let base = gateway.head().await.unwrap();
        gateway.run(ask("second")).await;
        let before = gateway.head().await.unwrap();
        let created = gateway.create(edit(from(&base, ask("wait")))).await.unwrap();
        let run_id = &created.run.run_id;
        at_gate(&gateway, &name, "wait").await;
        faults.away(usize::MAX);
        if asked {
            gateway.app.runs.cancel(run_id, CancelAction::Rollback).await.unwrap();
        }
        let stopped = tokio::time::timeout(Duration::from_mins(10), gateway.app.stop_runs()).await;
        stopped.expect("it stops");
        // Once its task is gone, however long the stop has waited for that.
        let row = gateway.row(run_id).await;
        faults.disarm();
        assert!(row.owes_restore(), "{asked}: {row:?}");
        let (records, runs) = (&gateway.app.records, gateway.app.records.runs());
        let events = records.events().list(&EventQuery::new("t", run_id)).await.unwrap();
        assert!(events.iter().any(|event| event.event_type == "llm.human.input"), "{asked}: its events stay");
        let found = runs.recover_orphans(records.now(), TimeDelta::zero()).await.unwrap();
        gateway.app.runs.roll_back(found.rollbacks);
        let row = gateway.row(run_id).await;
        let error = if asked { "Rolled back by user" } else { RECOVERY_ERROR };
        assert_eq!((row.status, row.error.as_deref()), (RunStatus::Error, Some(error)));
        assert_eq!(gateway.head().await.unwrap().values().unwrap(), before.values().unwrap(), "{asked}");
    }
}

/// A run that continues with finished tasks leaves rows on the captured head itself.
#[tokio::test]
async fn a_rollback_of_a_run_that_committed_nothing_leaves_no_row_of_it() {
    for on in everywhere() {
        let (gateway, _) = faulty(on, "none").await;
        let (accessor, thread) = (gateway.app.threads.accessor(), ThreadId::from("t"));
        let before = gateway.head().await.unwrap();
        let mut known = accessor.known_head(&thread).await.unwrap();
        let point = accessor.capture(&mut known).await.unwrap();
        let written = count(&gateway).await;
        let same = accessor.restore(&mut known, &point, Map::new()).await.unwrap().unwrap();
        assert_eq!((same.key, count(&gateway).await), (before.key.clone(), written), "nothing to restore");
        for row in rows(&gateway) {
            accessor.saver().put_writes(&before.key, &row).await.unwrap();
        }
        let restored = accessor.restore(&mut known, &point, Map::new()).await.unwrap().unwrap();
        assert_eq!(gateway.head().await.unwrap().key, restored.key);
        assert_eq!(
            (restored.writes.len(), restored.values().unwrap()),
            (0, before.values().unwrap()),
            "{on:?}"
        );
        goes_on(&gateway).await;
    }
}

/// Scenario 64: the run continues, and there is nothing to restore.
#[tokio::test]
async fn a_rollback_after_a_failed_capture_writes_and_deletes_nothing() {
    for on @ (saver, mode) in everywhere() {
        let mut unusable = Vec::new();
        for k in 1..=4 {
            let name = format!("fault-capture-{saver}-{mode}-{k}");
            let (gateway, faults) = faulty(on, &name).await;
            let before = gateway.head().await.unwrap();
            faults.read(k);
            let created = gateway.create(ask("wait")).await.unwrap();
            let shut = gate(&name);
            tokio::select! {
                () = shut.reached() => {}
                _ = gateway.app.runs.ended(&created.run.run_id) => {}
            }
            faults.disarm();
            let cancelled = gateway.head().await.unwrap();
            gateway.app.runs.cancel(&created.run.run_id, CancelAction::Rollback).await.unwrap();
            let row = gateway.row(&created.run.run_id).await;
            let head = gateway.head().await.unwrap();
            if row.status == RunStatus::Interrupted {
                unusable.push(k);
                assert_eq!(head.key, cancelled.key, "{on:?} {k}: what was committed stays");
                assert_eq!(said(&head).last().map(String::as_str), Some("wait"));
            } else {
                assert_eq!(head.values().unwrap(), before.values().unwrap(), "{on:?} {k}");
            }
            goes_on(&gateway).await;
        }
        assert_eq!(unusable, [2], "only the capture itself, after the gate");
    }
}

/// The request is accepted while the run fails: its task has not noticed it. The run's own write fails, its model, or
/// that of an edited turn, which restores the turn before it in any case.
#[tokio::test]
async fn a_run_that_fails_once_its_rollback_was_accepted_is_rolled_back() {
    for on @ (saver, mode) in everywhere() {
        for (text, refused, edits) in
            [("wait", true, false), ("break", false, false), ("wait", true, true), ("break", false, true)]
        {
            let name = format!("fails-{saver}-{mode}-{text}-{edits}");
            let (gateway, faults) = faulty(on, &name).await;
            let base = gateway.head().await.unwrap();
            gateway.run(ask("second")).await;
            let before = gateway.head().await.unwrap();
            let request = if edits { edit(from(&base, ask(text))) } else { ask(text) };
            let created = gateway.create(request).await.unwrap();
            let run_id = &created.run.run_id;
            at_gate(&gateway, &name, text).await;
            // Not through the gateway, which would tell the task.
            let accepted = gateway.app.records.runs().request_cancel(run_id, CancelAction::Rollback).await;
            assert_eq!(accepted.unwrap(), CancelOutcome::Accepted);
            if refused {
                faults.write(1, Fault::Refused);
            }
            gate(&name).open();
            let row = gateway.row(run_id).await;
            assert!(!faults.disarm(), "{on:?} {text}");
            let what = format!("{on:?} {text} {edits}");
            assert_eq!(
                (row.status, row.error.as_deref()),
                (RunStatus::Error, Some("Rolled back by user")),
                "{what}"
            );
            let head = gateway.head().await.unwrap();
            assert_eq!(head.values().unwrap(), before.values().unwrap(), "{what}");
            let left = left_by(&gateway, &row).await;
            assert_eq!(left.map(|messages| messages.len()), Some(4), "{what}");
            goes_on(&gateway).await;
        }
    }
}

/// A run that fails before it has read its thread has written nothing: the state is the one before it.
#[tokio::test]
async fn a_run_that_fails_before_its_first_write_is_rolled_back_without_one() {
    for on @ (saver, mode) in everywhere() {
        let name = format!("fails-early-{saver}-{mode}");
        let (gateway, _) = faulty(on, &name).await;
        let first = gateway.create(ask("wait")).await.unwrap();
        gate(&name).reached().await;
        let waits =
            RunOptions { multitask_strategy: MultitaskStrategy::Enqueue, ..options([StreamMode::Values]) };
        let second = gateway.create(RunRequest { options: waits, ..ask("more") }).await.unwrap();
        // Taken when the first run ends, before the second one gets it.
        let mut lock = std::pin::pin!(gateway.app.threads.lock("t"));
        assert!(futures::poll!(&mut lock).is_pending());
        gate(&name).open();
        let (lock, _) = tokio::join!(lock, gateway.row(&first.run.run_id));
        let before = gateway.history().await;
        let runs = gateway.app.records.runs();
        while runs.get(&second.run.run_id).await.unwrap().unwrap().status != RunStatus::Running {
            tokio::task::yield_now().await;
        }
        let accepted = runs.request_cancel(&second.run.run_id, CancelAction::Rollback).await;
        assert_eq!(accepted.unwrap(), CancelOutcome::Accepted);
        let mut database = gateway.section("database");
        database["checkpoint_delta"]["snapshot_frequency"] = json!(4);
        gateway.configure("database", &database);
        drop(lock);
        let row = gateway.row(&second.run.run_id).await;
        assert_eq!(
            (row.status, row.error.as_deref()),
            (RunStatus::Error, Some("Rolled back by user")),
            "{on:?}"
        );
        assert_eq!(gateway.history().await, before, "{on:?}");
        database["checkpoint_delta"]["snapshot_frequency"] = json!(3);
        gateway.configure("database", &database);
        goes_on(&gateway).await;
    }
}

//! Whatever ends a run, its followers are shown the same end: in the process that worked on it, in the one that ended
//! it, and in any other; those who were there, those who come later, and those who wait. Only a success, and what a
//! client has asked for, ends with `end` alone.

use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use chrono::TimeDelta;
use serde_json::{Value as Json, json};
use threadkeep_agent::model::scripted::gate;

use super::super::frames;
use super::late::{Two, has_left};
use super::*;
use crate::runs::ending::DIED;
use crate::streams::verdict::{LEFT, failed};
use threadkeep_records::{NewRun, RECOVERY_ERROR};

const FOR_EVER: Duration = Duration::from_mins(10);
/// One saver a mode: those who follow on another gateway wait two seconds for the last frames.
const ON: [On; 2] = [("memory", "full"), ("postgres", "delta")];
const FIRST: [&str; 2] = ["first", "You said: first"];

type Shown = Vec<(String, Json)>;

/// The frame of a run whose store lost changes.
fn loss() -> (String, Json) {
    let error = json!({"message": lost().to_string(), "name": "CheckpointHistoryLostError"});
    ("error".to_owned(), error)
}

/// Follows the run in this process, as it is now.
async fn follow(gateway: &Gateway, run_id: &str) -> tokio::task::JoinHandle<Shown> {
    let run = gateway.app.records.runs().get(run_id).await.unwrap().unwrap();
    tokio::spawn(frames(gateway.app.streams.follow(&run, None)))
}

/// What these clients were shown, and what each process shows one that comes now or waits for the run, is how the run
/// ended.
async fn agree(on: &[&Gateway], run_id: &str, shown: Vec<tokio::task::JoinHandle<Shown>>) -> RunRow {
    let row = on[0].row(run_id).await;
    let mut all = Vec::new();
    for shown in shown {
        all.push(tokio::time::timeout(FOR_EVER, shown).await.expect("no end is shown").unwrap());
    }
    for gateway in on {
        all.push(follow(gateway, run_id).await.await.unwrap());
        let join = Request::get(format!("/api/threads/t/runs/{run_id}/join")).body(Body::empty()).unwrap();
        let (status, joined) = send(gateway, join).await;
        assert_eq!((status, &joined["error"]), (200, &json!(row.error)), "{joined}");
        assert_eq!(joined["__error__"]["message"], json!(row.error), "{joined}");
    }
    let expected = failed(row.status, row.error.as_deref());
    for shown in all {
        let errors: Vec<_> = shown.iter().filter(|(name, _)| name == "error").collect();
        let messages: Vec<_> = errors.iter().map(|(_, data)| data["message"].as_str().unwrap()).collect();
        assert_eq!(messages, Vec::from_iter(expected), "{shown:?}");
        assert_eq!(shown.last().unwrap().0, "end", "{shown:?}");
        if row.history_lost.is_some() {
            // The state that is restored may follow it, as that of an edit does.
            assert_eq!(*errors[0], loss(), "{shown:?}");
        }
    }
    row
}

/// The process that takes it over had known more of the thread, which the one that had worked on it cannot know.
#[tokio::test]
async fn followers_of_a_rollback_that_was_taken_over_are_shown_what_the_store_lost() {
    for on @ (saver, mode) in everywhere() {
        let name = format!("shown-taken-{saver}-{mode}");
        let two = Two::start(on, &name).await;
        let third = two.third().await;
        let created = two.own.create(ask("wait")).await.unwrap();
        let run_id = created.run.run_id.clone();
        at_gate(&two.own, &name, "wait").await;
        let mut shown = vec![tokio::spawn(frames(created.stream))];
        shown.push(follow(&two.other, &run_id).await);
        let found = two.take_over().await;
        two.faults.lose(1);
        two.other.app.runs.roll_back(found);
        let row = two.other.row(&run_id).await;
        assert!(!two.faults.disarm(), "{on:?}");
        assert_eq!((row.status, row.error), (RunStatus::Error, Some(lost().to_string())), "{on:?}");
        gate(&name).open();
        let row = agree(&[&two.own, &two.other, &third], &run_id, shown).await;
        assert_eq!(row.history_lost, Some(lost().to_string()), "{on:?}");
        assert_eq!(said(&two.own.head().await.unwrap()), FIRST, "{on:?}");
        goes_on(&two.own).await;
    }
}

/// The one that had worked on it learns of that before the other one has ended it: its followers wait.
#[tokio::test]
async fn followers_of_a_run_that_was_taken_over_wait_for_its_end() {
    for impossible in [false, true] {
        let name = format!("shown-waits-{impossible}");
        let two = Two::start(("memory", "delta"), &name).await;
        let before = two.own.head().await.unwrap();
        let created = two.own.create(ask("wait")).await.unwrap();
        let run_id = created.run.run_id.clone();
        at_gate(&two.own, &name, "wait").await;
        let shown = vec![tokio::spawn(frames(created.stream)), follow(&two.other, &run_id).await];
        let found = two.take_over().await;
        let own = two.own.app.runs.cancel(&run_id, CancelAction::Rollback).await.unwrap();
        assert_eq!(own, CancelOutcome::AlreadyInterrupted, "its task looks at its row");
        has_left(&two.own, &run_id).await;
        assert!(!shown[0].is_finished());
        if impossible {
            two.faults.damage(before.key.id);
        }
        two.other.app.runs.roll_back(found);
        let row = two.other.row(&run_id).await;
        two.faults.disarm();
        assert_eq!(row.error.as_deref() == Some("Rolled back by user"), !impossible, "{row:?}");
        agree(&[&two.own, &two.other], &run_id, shown).await;
        goes_on(&two.own).await;
    }
}

/// Makes the next write find changes lost, and the next call after it panic, a read or a write.
fn lose_then_panic(faults: &Faults) {
    let panics = |faults: Faults| async move {
        faults.disarm();
        panic!("a saver that panics");
    };
    let next = faults.clone();
    let armed = async move {
        next.before_read(panics(next.clone()));
        next.before_write(panics(next.clone()));
    };
    faults.before_write(armed);
    faults.write(1, Fault::Lost);
}

/// A rollback is carried out for it; an interrupted run, which flushes and reads its title, just ends.
#[tokio::test]
async fn followers_of_a_run_whose_task_panics_are_shown_what_it_had_found_lost() {
    for on @ (saver, mode) in ON {
        for action in [CancelAction::Rollback, CancelAction::Interrupt] {
            let name = format!("shown-panics-{saver}-{mode}-{action:?}");
            let two = Two::start(on, &name).await;
            let created = two.own.create(ask("wait")).await.unwrap();
            let run_id = created.run.run_id.clone();
            at_gate(&two.own, &name, "wait").await;
            let shown = vec![tokio::spawn(frames(created.stream)), follow(&two.other, &run_id).await];
            lose_then_panic(&two.faults);
            two.own.app.runs.cancel(&run_id, action).await.unwrap();
            let row = agree(&[&two.own, &two.other], &run_id, shown).await;
            assert!(!two.faults.disarm(), "{on:?} {action:?}");
            let ended = (row.status, row.error, row.history_lost);
            assert_eq!(ended, (RunStatus::Error, Some(lost().to_string()), Some(lost().to_string())));
            let left = said(&two.own.head().await.unwrap());
            match action {
                CancelAction::Rollback => assert_eq!(left, FIRST, "{on:?}"),
                CancelAction::Interrupt => assert_eq!(left, [FIRST[0], FIRST[1], "wait"], "{on:?}"),
            }
            goes_on(&two.own).await;
        }
    }
}

/// Its thread is free, and nobody waits for ever.
#[tokio::test]
async fn followers_of_a_rollback_whose_task_panics_are_shown_that_it_did() {
    for on @ (saver, mode) in ON {
        for loses in [false, true] {
            let name = format!("shown-rollback-panics-{saver}-{mode}-{loses}");
            let two = Two::start(on, &name).await;
            let created = two.own.create(ask("wait")).await.unwrap();
            let run_id = created.run.run_id.clone();
            at_gate(&two.own, &name, "wait").await;
            let shown = vec![tokio::spawn(frames(created.stream)), follow(&two.other, &run_id).await];
            let found = two.take_over().await;
            if loses {
                lose_then_panic(&two.faults);
            } else {
                two.faults.before_write(async { panic!("a saver that panics") });
            }
            two.other.app.runs.roll_back(found);
            let row =
                tokio::time::timeout(FOR_EVER, two.other.row(&run_id)).await.expect("it holds its thread");
            let error = if loses { lost().to_string() } else { DIED.to_owned() };
            assert_eq!((row.status, row.error), (RunStatus::Error, Some(error)), "{on:?}");
            gate(&name).open();
            agree(&[&two.own, &two.other], &run_id, shown).await;
            goes_on(&two.own).await;
        }
    }
}

/// What the stopping process found is how the next one ends the run. Its own followers are shown that it is not carried
/// out yet; those on other gateways wait for the next process, whether they get the frames of the first one or not.
#[tokio::test]
async fn followers_of_a_rollback_that_a_stopping_process_leaves_are_shown_the_end_that_the_next_one_gives_it()
{
    for on @ (saver, mode) in ON {
        for (loses, forwards) in [(true, true), (true, false), (false, true), (false, false)] {
            let what = format!("shown-stops-{saver}-{mode}-{loses}-{forwards}");
            let two = Two::start(on, &what).await;
            let third = two.third().await;
            let created = two.own.create(ask("wait")).await.unwrap();
            let run_id = created.run.run_id.clone();
            at_gate(&two.own, &what, "wait").await;
            let own = tokio::spawn(frames(created.stream));
            let shown = vec![follow(&two.other, &run_id).await, follow(&third, &run_id).await];
            if forwards {
                two.own.app.streams.hand_on("t".to_owned(), run_id.clone());
            }
            let away = two.faults.clone();
            two.faults.before_write(async move { away.away(usize::MAX) });
            two.faults.write(1, if loses { Fault::Lost } else { Fault::Away });
            two.own.app.runs.cancel(&run_id, CancelAction::Rollback).await.unwrap();
            let stopped = tokio::time::timeout(FOR_EVER, two.own.app.stop_runs()).await;
            stopped.expect("it stops");
            two.faults.disarm();
            let own = own.await.unwrap();
            let errors: Vec<_> = own.iter().filter(|(name, _)| name == "error").collect();
            let [(_, error)] = &errors[..] else { panic!("{what}: {own:?}") };
            let expected = if loses { lost().to_string() } else { LEFT.to_owned() };
            assert_eq!(error["message"], json!(expected), "{what}: {own:?}");
            assert_eq!(own.last().unwrap().0, "end", "{what}");
            let row = two.other.app.records.runs().get(&run_id).await.unwrap().unwrap();
            assert!(row.owes_restore() && shown.iter().all(|shown| !shown.is_finished()), "{what}: {row:?}");
            let records = &two.other.app.records;
            let found = records.runs().recover_owner(records.now(), "own").await.unwrap();
            assert_eq!(found.rollbacks.len(), 1, "{what}");
            two.other.app.runs.roll_back(found.rollbacks);
            let row = agree(&[&two.other, &third], &run_id, shown).await;
            let error = if loses { lost().to_string() } else { "Rolled back by user".to_owned() };
            assert_eq!((row.status, row.error), (RunStatus::Error, Some(error)), "{what}");
            assert_eq!(said(&two.other.head().await.unwrap()), FIRST, "{what}");
            goes_on(&two.other).await;
        }
    }
}

/// Its client had asked for an interruption, or its model had failed: neither is how it ended.
#[tokio::test]
async fn followers_of_a_run_whose_process_died_are_shown_that_whatever_was_before() {
    for cancelled in [true, false] {
        let (gateway, _) = faulty(("memory", "full"), "none").await;
        let records = &gateway.app.records;
        let run = NewRun { run_id: "gone".into(), thread_id: "t".into(), ..NewRun::default() };
        records.runs().admit(run, MultitaskStrategy::Reject).await.unwrap();
        records.runs().start("gone").await.unwrap();
        if cancelled {
            records.runs().request_cancel("gone", CancelAction::Interrupt).await.unwrap();
        } else {
            let mut journal = crate::runs::journal::Journal::new(records.clone(), "t", "gone");
            journal.error(crate::streams::verdict::MODEL_FAILED, "overloaded");
            journal.close().await;
        }
        let shown = vec![follow(&gateway, "gone").await];
        let found = records.runs().recover_orphans(records.now(), TimeDelta::zero()).await.unwrap();
        assert_eq!(found.runs.len(), 1);
        let row = agree(&[&gateway], "gone", shown).await;
        assert_eq!((row.status, row.error.as_deref()), (RunStatus::Error, Some(RECOVERY_ERROR)));
        goes_on(&gateway).await;
    }
}

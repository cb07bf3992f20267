//! A run that noted that its store lost acknowledged changes ends in that error, whichever process ends it.

use chrono::TimeDelta;

use super::support::*;
use crate::*;

const LOST: &str = "the store lost changes";

/// The run and its thread end in the loss.
async fn ends_with_the_loss(records: &Records, run_id: &str) {
    let row = run(records, run_id).await;
    assert_eq!((row.status, row.error.as_deref()), (RunStatus::Error, Some(LOST)), "{run_id}");
    assert_eq!(thread(records, &row.thread_id).await.status, ThreadStatus::Error, "{run_id}");
    assert_eq!(holder(records, &row.thread_id).await, None, "{run_id}");
}

#[tokio::test]
async fn a_run_that_found_changes_lost_has_no_other_end() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    let statuses = [RunStatus::Success, RunStatus::Interrupted, RunStatus::Error];
    for status in statuses {
        for decides in [true, false] {
            for before in [true, false] {
                let id = format!("{status}-{decides}-{before}");
                create_thread(records, &id).await;
                start(records, &id, &id).await;
                let failed = RunEnd { error: Some("another".to_owned()), ..end(status) };
                let note = async || {
                    assert!(runs.note_history_lost(&id, LOST).await.unwrap());
                    assert!(runs.note_history_lost(&id, "later").await.unwrap(), "the first note stays");
                };
                if before {
                    note().await;
                }
                if decides {
                    assert_eq!(runs.decide(&id, &failed).await.unwrap(), DecideOutcome::Decided);
                }
                if !before {
                    note().await;
                }
                let finished = runs.finish(&id, &failed).await.unwrap();
                assert_eq!(finished, FinishOutcome::Finished { promoted: None }, "{id}");
                ends_with_the_loss(records, &id).await;
                assert_eq!(run(records, &id).await.history_lost.as_deref(), Some(LOST));
            }
        }
    }
}

/// Its rollback is still carried out first.
#[tokio::test]
async fn a_rollback_that_found_changes_lost_ends_once_it_is_settled() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    start(records, "t", "r").await;
    runs.request_cancel("r", CancelAction::Rollback).await.unwrap();
    assert!(runs.note_history_lost("r", LOST).await.unwrap());
    for status in [RunStatus::Success, RunStatus::Interrupted, RunStatus::Error] {
        let refused = FinishOutcome::CancelRequested(CancelAction::Rollback);
        assert_eq!(runs.finish("r", &end(status)).await.unwrap(), refused);
    }
    let done = runs.finish("r", &settled(RunStatus::Error)).await.unwrap();
    assert_eq!(done, FinishOutcome::Finished { promoted: None });
    ends_with_the_loss(records, "r").await;
}

#[tokio::test]
async fn what_a_dead_process_found_lost_is_how_its_runs_end() {
    let fixture = fixture().await;
    let (dead, live) = (fixture.owner("dead").await, fixture.owner("live").await);
    for id in ["failed", "decided", "asked", "edit"] {
        create_thread(&dead, id).await;
        let new = NewRun { edits: id == "edit", ..new_run(id, id) };
        dead.runs().admit(new, MultitaskStrategy::Reject).await.unwrap();
        dead.runs().start(id).await.unwrap();
        assert!(dead.runs().note_history_lost(id, LOST).await.unwrap());
    }
    let decided = dead.runs().decide("decided", &end(RunStatus::Success)).await.unwrap();
    assert_eq!(decided, DecideOutcome::Decided);
    live.runs().request_cancel("asked", CancelAction::Rollback).await.unwrap();
    fixture.clock.advance_seconds(31);
    let found =
        live.runs().recover_expired(fixture.clock.now(), TimeDelta::zero(), &mut watched()).await.unwrap();
    assert_eq!((found.runs.len(), found.rollbacks.len()), (2, 2));
    for run in &found.rollbacks {
        assert_eq!((run.error.as_deref(), run.history_lost.as_deref()), (Some(LOST), Some(LOST)));
        let ending = settled(RunStatus::Success);
        live.runs().finish(&run.run_id, &settled(RunStatus::Error)).await.unwrap();
        assert_eq!(
            live.runs().finish(&run.run_id, &ending).await.unwrap(),
            FinishOutcome::AlreadyTerminal(RunStatus::Error)
        );
    }
    for id in ["failed", "decided", "asked", "edit"] {
        ends_with_the_loss(&live, id).await;
    }
}

/// By a process that the run was taken over from, too; not of a run that has ended.
#[tokio::test]
async fn any_process_notes_a_loss_of_an_active_run() {
    let fixture = fixture().await;
    let (own, other) = (fixture.owner("own").await, fixture.owner("other").await);
    create_thread(&own, "t").await;
    start(&own, "t", "r").await;
    other.runs().request_cancel("r", CancelAction::Rollback).await.unwrap();
    let found = other.runs().recover_owner(fixture.clock.now(), "own").await.unwrap();
    assert_eq!(found.rollbacks[0].history_lost, None);
    assert!(own.runs().note_history_lost("r", LOST).await.unwrap());
    other.runs().finish("r", &settled(RunStatus::Error)).await.unwrap();
    ends_with_the_loss(&own, "r").await;
    let before = dump(&own).await;
    for run_id in ["r", "none"] {
        assert!(!own.runs().note_history_lost(run_id, "later").await.unwrap());
    }
    assert_eq!(dump(&own).await, before);
}

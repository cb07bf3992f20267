//! The store has lost what it had acknowledged, and says so once: the run of which a call finds it ends with it.

use super::super::frames;
use super::*;
use threadkeep_records::{NewRun, RECOVERY_ERROR, RECOVERY_STOP_REASON};

/// In the run's stream, and in its row.
fn ends_with_the_loss(frames: &[(String, Json)], row: &RunRow, what: &str) {
    let error = json!({"message": lost().to_string(), "name": "CheckpointHistoryLostError"});
    let shown: Vec<_> = frames.iter().filter(|(name, _)| name == "error").map(|(_, data)| data).collect();
    assert_eq!(shown, [&error], "{what}");
    assert_eq!((row.status, row.error.clone()), (RunStatus::Error, Some(lost().to_string())), "{what}");
}

#[tokio::test]
async fn a_run_fails_of_what_its_first_reads_find_lost_and_writes_nothing() {
    for on in everywhere() {
        for k in 1.. {
            let (gateway, faults) = faulty(on, "none").await;
            let before = count(&gateway).await;
            faults.lose(k);
            let (frames, row) = gateway.run(ask("second")).await;
            if faults.disarm() {
                assert!(k > 2, "the gate, the capture");
                break;
            }
            ends_with_the_loss(&frames, &row, &format!("{on:?} {k}"));
            assert_eq!(count(&gateway).await, before, "{on:?} {k}");
            goes_on(&gateway).await;
        }
    }
}

#[tokio::test]
async fn a_run_that_is_cancelled_before_it_starts_ends_with_what_the_store_lost() {
    for on in everywhere() {
        for action in [CancelAction::Interrupt, CancelAction::Rollback] {
            let (gateway, faults) = faulty(on, "none").await;
            let records = gateway.app.records.clone();
            faults.before_read(async move {
                let run = records.runs().active_for_thread("t").await.unwrap().unwrap();
                let accepted = records.runs().request_cancel(&run.run_id, action).await.unwrap();
                assert_eq!(accepted, CancelOutcome::Accepted);
            });
            faults.lose(1);
            let (frames, row) = gateway.run(ask("second")).await;
            let what = format!("{on:?} {action:?}");
            assert!(!faults.disarm(), "{what}");
            ends_with_the_loss(&frames, &row, &what);
            assert_eq!(said(&gateway.head().await.unwrap()), ["first", "You said: first"], "{what}");
            goes_on(&gateway).await;
        }
    }
}

/// The note of its duration is written once its success is decided.
#[tokio::test]
async fn a_run_whose_note_finds_what_the_store_lost_is_no_success() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        // Input, answer, note.
        faults.write(3, Fault::Lost);
        let (frames, row) = gateway.run(ask("second")).await;
        assert!(!faults.disarm(), "{on:?}");
        ends_with_the_loss(&frames, &row, &format!("{on:?}"));
        let all = ["first", "You said: first", "second", "You said: second"];
        assert_eq!(said(&gateway.head().await.unwrap()), all, "{on:?}: only the note is missing");
        goes_on(&gateway).await;
    }
}

/// The restore, the flush and the title.
#[tokio::test]
async fn a_cancelled_run_ends_with_what_any_of_its_last_calls_finds_lost() {
    for on @ (saver, mode) in everywhere() {
        for action in [CancelAction::Interrupt, CancelAction::Rollback] {
            for reads in [true, false] {
                for k in 1.. {
                    let what = format!("lost-{saver}-{mode}-{action:?}-{reads}-{k}");
                    let (gateway, faults) = faulty(on, &what).await;
                    let created = gateway.create(ask("wait")).await.unwrap();
                    at_gate(&gateway, &what, "wait").await;
                    if reads {
                        faults.lose(k);
                    } else {
                        faults.write(k, Fault::Lost);
                    }
                    gateway.app.runs.cancel(&created.run.run_id, action).await.unwrap();
                    let shown = frames(created.stream).await;
                    let row = gateway.row(&created.run.run_id).await;
                    if faults.disarm() {
                        assert!(k > 1, "{what}");
                        break;
                    }
                    ends_with_the_loss(&shown, &row, &what);
                    let left = said(&gateway.head().await.unwrap());
                    let kept = ["first", "You said: first", "wait"];
                    assert_eq!(left, kept[..if action == CancelAction::Rollback { 2 } else { 3 }], "{what}");
                    goes_on(&gateway).await;
                }
            }
        }
    }
}

/// The process that takes the run over had known more of the thread.
#[tokio::test]
async fn a_rollback_that_is_taken_over_ends_with_what_the_store_lost() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        let row = takeover::left(&gateway).await;
        faults.lose(1);
        let row = takeover::rolled_back(&gateway, row).await;
        assert!(!faults.disarm(), "{on:?}");
        assert_eq!((row.status, row.error), (RunStatus::Error, Some(lost().to_string())), "{on:?}");
        assert_eq!(said(&gateway.head().await.unwrap()), ["first", "You said: first"], "{on:?}");
        goes_on(&gateway).await;
    }
}

/// So had the process of a client that follows it.
#[tokio::test]
async fn who_follows_a_run_whose_process_is_gone_is_shown_what_the_store_lost() {
    let (gateway, faults) = faulty(("memory", "full"), "none").await;
    let runs = gateway.app.records.runs();
    let run = NewRun { run_id: "gone".into(), thread_id: "t".into(), ..NewRun::default() };
    runs.admit(run, MultitaskStrategy::Reject).await.unwrap();
    runs.start("gone").await.unwrap();
    let run = runs.get("gone").await.unwrap().unwrap();
    faults.lose(1);
    let followed = gateway.app.streams.follow(&run, None);
    let stop_reason = Some(RECOVERY_STOP_REASON.to_owned());
    let end = RunEnd { stop_reason, ..RunEnd::failed(RECOVERY_ERROR) };
    runs.finish("gone", &end).await.unwrap();
    let shown = frames(followed).await;
    assert!(!faults.disarm(), "{shown:?}");
    let error = json!({"message": lost().to_string(), "name": "CheckpointHistoryLostError"});
    assert!(shown.ends_with(&[("error".to_owned(), error), ("end".to_owned(), Json::Null)]), "{shown:?}");
}

//! Notes of what a read of the history had to look up.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use axum::serve::Listener as _;
use serde_json::{Map, Value, json};
use threadkeep::checkpoint::ERROR_CHANNEL;
use threadkeep::metadata::Source;
use threadkeep::step::{Durability, StepWriter};
use threadkeep_agent::duration::RunNotes;
use threadkeep_records::{RunStatus, WriterKind};
use tokio::net::TcpStream;
use tokio::sync::OwnedMutexGuard;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

use super::super::history::Page;
use super::super::{listen, router, turns};
use super::{Gateway, MODES};
use crate::program::serve_until;

/// The runs and durations that the first entry shows on its answers.
fn shown(page: &Page) -> Vec<(Value, Value)> {
    let messages = page.entries[0].values["messages"].as_array().unwrap().iter();
    let answers = messages.filter(|message| message["type"] == "ai");
    answers.map(|m| (m["run_id"].clone(), m["additional_kwargs"]["turn_duration"].clone())).collect()
}

#[tokio::test]
async fn what_was_searched_for_is_noted_once_for_all_later_readers() {
    for mode in MODES {
        let gateway = Gateway::start(mode).await;
        for run in ["r1", "r2"] {
            gateway.record(run, RunStatus::Success).await;
            gateway.turn(run).await;
        }
        let before = gateway.checkpoints().await;
        let first = gateway.page().await;
        let expected = [(json!("r1"), json!(0)), (json!("r2"), json!(0))];
        assert_eq!(shown(&first), expected);
        first.note.unwrap().await.unwrap();
        let after = gateway.checkpoints().await;
        assert_eq!(after[1..], before);
        let note = &after[0].metadata;
        assert!(note.is_duration_only());
        assert_eq!(note.extra["run_durations"], json!({"r1": 0, "r2": 0}));
        assert_eq!(note.extra["run_message_ids"], json!({"a-r1": "r1", "a-r2": "r2"}));

        let second = gateway.page().await;
        assert_eq!(shown(&second), expected);
        assert!(second.note.is_none(), "there is nothing left to note");
        assert!(gateway.app.records.runs().active_for_thread("t").await.unwrap().is_none());

        gateway.record("r3", RunStatus::Error).await;
        gateway.turn("r3").await;
        gateway.page().await.note.unwrap().await.unwrap();
        let note = &gateway.checkpoints().await[0].metadata.extra;
        assert_eq!(note["run_durations"], json!({"r1": 0, "r2": 0, "r3": 0}), "older notes are kept");
        assert_eq!(
            note["writes"],
            json!({"runtime_run_duration": {"run_ids": ["r3"], "message_ids": ["a-r3"]}})
        );
        assert!(gateway.page().await.note.is_none());
    }
}

#[tokio::test]
async fn a_busy_thread_is_read_but_not_noted() {
    for mode in MODES {
        let gateway = Gateway::start(mode).await;
        gateway.record("r1", RunStatus::Interrupted).await;
        gateway.turn("r1").await;
        let before = gateway.checkpoints().await;
        let reservation = gateway.app.records.runs().reserve("t", WriterKind::CheckpointWrite).await.unwrap();
        let read = gateway.page().await;
        assert_eq!(shown(&read), [(json!("r1"), json!(0))]);
        read.note.unwrap().await.unwrap();
        assert_eq!(gateway.checkpoints().await, before);
        reservation.release().await.unwrap();
        gateway.page().await.note.unwrap().await.unwrap();
        assert_eq!(gateway.checkpoints().await.len(), before.len() + 1);
    }
}

#[tokio::test]
async fn a_run_at_work_and_one_without_a_record_have_no_duration() {
    let gateway = Gateway::start("full").await;
    gateway.turn("unknown").await;
    gateway.record("r1", RunStatus::Running).await;
    gateway.turn("r1").await;
    let read = gateway.page().await;
    assert_eq!(shown(&read), [(json!("unknown"), Value::Null), (json!("r1"), Value::Null)]);
    assert!(read.note.is_none());
}

/// A run that has just ended notes its own duration, which may be rounded differently from its record.
#[tokio::test]
async fn a_note_that_came_first_stands() {
    for mode in MODES {
        let gateway = Gateway::start(mode).await;
        gateway.record("r1", RunStatus::Success).await;
        gateway.turn("r1").await;
        gateway.page().await.note.unwrap().await.unwrap();
        let noted = gateway.checkpoints().await;
        let late = RunNotes {
            durations: [("r1".to_owned(), 1)].into(),
            messages: [("a-r1".to_owned(), "other".to_owned())].into(),
        };
        turns::note(Arc::clone(&gateway.app), gateway.thread.clone(), late).await;
        assert_eq!(gateway.checkpoints().await, noted);
    }
}

/// A run is about to continue these tasks, and needs the thread.
#[tokio::test]
async fn nothing_is_noted_on_a_head_with_tasks_left() {
    for mode in MODES {
        let gateway = Gateway::start(mode).await;
        gateway.record("r1", RunStatus::Interrupted).await;
        gateway.turn("r1").await;
        gateway.leave_task(ERROR_CHANNEL, json!("it broke")).await;
        let read = gateway.page().await;
        assert_eq!(shown(&read), [(json!("r1"), json!(0))]);
        assert!(read.note.is_none());
    }
}

/// The history was read from a settled head. By the time of its note a run was interrupted in the middle of its calls.
#[tokio::test]
async fn a_late_note_hides_no_result_of_a_finished_call() {
    for mode in MODES {
        let gateway = Gateway::start(mode).await;
        gateway.turn("r1").await;
        let accessor = gateway.app.threads.accessor();
        let mut writer = StepWriter::open(accessor, &gateway.thread, None).await.unwrap();
        writer.commit(Source::Loop, vec!["tools".into(), "tools".into()], Map::new()).await.unwrap();
        let task = writer.start_task(&"tools".into(), 0);
        let result = json!([{"type": "tool", "id": "t", "tool_call_id": "c", "content": "done"}]);
        let result = vec![writer.write("messages", result, false).unwrap()];
        writer.finish_task(task, result, Durability::Now).await.unwrap();
        let left = gateway.checkpoints().await;
        let late = RunNotes { durations: [("r1".to_owned(), 1)].into(), ..RunNotes::default() };
        turns::note(Arc::clone(&gateway.app), gateway.thread.clone(), late).await;
        assert_eq!(gateway.checkpoints().await, left);
        let writer = StepWriter::open(accessor, &gateway.thread, None).await.unwrap();
        assert_eq!(writer.recovered().len(), 1, "{mode}: the next run does not repeat it");
    }
}

/// A note of the only turn, which waits for the thread.
async fn held_note(gateway: &Gateway) -> (OwnedMutexGuard<()>, Page) {
    gateway.record("r1", RunStatus::Success).await;
    gateway.turn("r1").await;
    let lock = gateway.app.threads.lock("t").await;
    let read = gateway.page().await;
    assert!(read.note.is_some());
    while gateway.app.records.runs().active_for_thread("t").await.unwrap().is_none() {
        tokio::task::yield_now().await;
    }
    (lock, read)
}

/// A read of the history notes what it had to look up. Nobody is refused the thread because of that.
#[tokio::test]
async fn a_writer_right_after_a_read_waits_for_the_note_of_the_read() {
    let (t, none) = ("/api/threads/t", Value::Null);
    for mode in MODES {
        for (method, path, body) in [
            ("POST", format!("{t}/state"), json!({"values": {"title": "named"}})),
            ("PUT", format!("{t}/goal"), json!({"objective": "done"})),
            ("DELETE", format!("{t}/goal"), none.clone()),
            ("POST", format!("{t}/branches"), json!({"message_id": "a-r1"})),
            ("POST", format!("{t}/copy"), json!({})),
            (
                "POST",
                "/api/threads/prune".to_owned(),
                json!({"thread_ids": ["t"], "strategy": "keep_latest"}),
            ),
            ("DELETE", t.to_owned(), none.clone()),
        ] {
            let gateway = Gateway::start(mode).await;
            let (lock, read) = held_note(&gateway).await;
            let request = Request::builder().method(method).uri(&path);
            let request = request.header("content-type", "application/json");
            let body = if body.is_null() { Body::empty() } else { body.to_string().into() };
            let request = request.body(body);
            let mut answer = tokio::spawn(router(Arc::clone(&gateway.app)).oneshot(request.unwrap()));
            let early = timeout(Duration::from_millis(50), &mut answer).await;
            assert!(early.is_err(), "{mode} {method} {path}: {early:?}");
            drop(lock);
            read.note.unwrap().await.unwrap();
            assert_eq!(answer.await.unwrap().unwrap().status(), 200, "{mode} {method} {path}");
            let noted = gateway.checkpoints().await.iter().any(|state| state.metadata.is_duration_only());
            assert_eq!(noted, (method, &*path) != ("DELETE", t), "{mode} {method} {path}");
        }
    }
}

/// This gateway knows of it from the database only.
#[tokio::test]
async fn a_writer_waits_for_the_note_of_another_gateway() {
    let gateway = Gateway::start("full").await;
    gateway.turn("r1").await;
    let runs = gateway.app.records.runs();
    for (method, path, body) in [
        ("POST", "/api/threads/t/state", json!({"values": {"title": "named"}})),
        ("PUT", "/api/threads/t/goal", json!({"objective": "done"})),
    ] {
        loop {
            let begun = Instant::now();
            let note = runs.reserve("t", WriterKind::Note).await.unwrap();
            let request = Request::builder().method(method).uri(path);
            let request = request.header("content-type", "application/json");
            let request = request.body(Body::from(body.to_string())).unwrap();
            let mut answer = tokio::spawn(router(Arc::clone(&gateway.app)).oneshot(request));
            let early = timeout(Duration::from_millis(50), &mut answer).await;
            let waits = early.is_err();
            note.release().await.unwrap();
            let answered = match early {
                Ok(answered) => answered,
                Err(_elapsed) => answer.await,
            };
            let status = answered.unwrap().unwrap().status();
            // A writer waits for five seconds. If the machine stood still for that long, once more.
            let stood_still = status == 409 && begun.elapsed() >= Duration::from_secs(5);
            if !stood_still {
                assert!(waits, "{method} {path}: {status}");
                assert_eq!(status, 200, "{method} {path}");
                break;
            }
        }
    }
}

#[tokio::test]
async fn a_stopping_gateway_waits_for_a_note_and_starts_none() {
    for mode in MODES {
        // Longer than anything here takes on a busy machine.
        let gateway = Gateway::start_draining(mode, false, Duration::from_mins(10)).await;
        let before = gateway.checkpoints().await.len();
        let (lock, _) = held_note(&gateway).await;
        let mut stopping = std::pin::pin!(gateway.app.stop_runs());
        assert!(timeout(Duration::from_millis(50), &mut stopping).await.is_err(), "it did not wait");
        let read = gateway.page().await;
        assert_eq!(shown(&read), [(json!("r1"), json!(0))]);
        assert!(read.note.is_none(), "a note was started while the gateway stops");
        drop(lock);
        stopping.await;
        let noted = gateway.checkpoints().await;
        assert_eq!(noted.len(), before + 2, "the turn and the note");
        assert!(noted[0].metadata.is_duration_only(), "{mode}");
    }
}

#[tokio::test]
async fn a_note_that_does_not_come_to_its_end_holds_a_stopping_gateway_up_for_five_seconds() {
    let gateway = Gateway::start("delta").await;
    let (_lock, _) = held_note(&gateway).await;
    tokio::time::pause();
    let start = Instant::now();
    gateway.app.stop_runs().await;
    assert_eq!(start.elapsed().as_secs(), 5);
}

/// A balancer goes to another gateway where it is refused a connection, and not where a run is refused.
#[tokio::test]
async fn the_port_is_closed_while_a_stopping_gateway_waits_for_what_it_does() {
    let gateway = Gateway::start_draining("delta", false, Duration::from_mins(10)).await;
    let (lock, _) = held_note(&gateway).await;
    let listener = listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let (address, app) = (listener.local_addr().unwrap(), Arc::clone(&gateway.app));
    let stop = CancellationToken::new();
    let asked = stop.clone().cancelled_owned();
    let serving = tokio::spawn(async move {
        serve_until(&app, listener, router(Arc::clone(&app)), asked).await;
    });
    TcpStream::connect(address).await.unwrap();
    stop.cancel();
    let closed = async {
        while TcpStream::connect(address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_mins(5), closed).await.expect("the port stays open");
    assert!(!serving.is_finished(), "it did not wait");
    drop(lock);
    serving.await.unwrap();
}

//! Checkpoints that take the place of a head from which tasks had finished: what had finished is under them from the
//! first moment on, also if nothing can be written after them.

use axum::body::Body;
use axum::http::Request;
use serde_json::{Map, Value as Json, json};
use threadkeep::checkpoint::TaskWrites;
use threadkeep::id::ThreadId;
use threadkeep::metadata::Source;
use threadkeep::step::{Durability, StepWriter};
use threadkeep_agent::Interrupts;
use threadkeep_config::Title;
use threadkeep_records::RunStatus;

use super::super::{Gateway, ask, everywhere, options};
use super::saver::Fault;
use super::{faulty, send};
use crate::runs::interrupted_title;
use crate::runs::request::{Change, RunInput, RunOptions, RunRequest, StreamMode};

/// Leaves the first of the two calls at which the thread stops as finished. Returns its row.
async fn one_finished(gateway: &Gateway) -> TaskWrites {
    let stopping = RunOptions {
        interrupt_before: Interrupts::Nodes(vec!["tools".to_owned()]),
        ..options([StreamMode::Values])
    };
    gateway.run(RunRequest { options: stopping, ..ask("two tools") }).await;
    let accessor = gateway.app.threads.accessor();
    let mut writer = StepWriter::open(accessor, &ThreadId::from("t"), None).await.unwrap();
    let task = writer.start_task(&"tools".into(), 0);
    let result = json!([{"type": "tool", "id": "result", "tool_call_id": "a", "content": "as it was then"}]);
    let result = vec![writer.write("messages", result, false).unwrap()];
    writer.finish_task(task, result, Durability::Now).await.unwrap();
    let mut rows = gateway.head().await.unwrap().writes;
    assert_eq!(rows.len(), 1);
    rows.remove(0)
}

#[tokio::test]
async fn a_goal_and_a_compaction_keep_what_had_finished_in_one_write() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        gateway.configure("summarization", &json!({"enabled": true}));
        let row = one_finished(&gateway).await;
        for (method, path, body) in [
            ("PUT", "goal", json!({"objective": "Get it done"})),
            ("DELETE", "goal", Json::Null),
            ("POST", "compact", json!({"keep": {"type": "messages", "value": 2}})),
        ] {
            let before = gateway.head().await.unwrap();
            faults.write(2, Fault::Refused);
            let request = Request::builder().method(method).uri(format!("/api/threads/t/{path}"));
            let body = if body.is_null() { Body::empty() } else { Body::from(body.to_string()) };
            let request = request.header("content-type", "application/json").body(body).unwrap();
            let (status, answer) = send(&gateway, request).await;
            assert!(faults.disarm(), "{on:?} {method} {path}: there was a second write");
            assert_eq!(status, 200, "{on:?} {method} {path}: {answer}");
            let head = gateway.head().await.unwrap();
            assert_eq!((head.parent, &head.next), (Some(before.key.id), &before.next), "{on:?} {path}");
            assert_eq!(head.writes, std::slice::from_ref(&row), "{on:?} {method} {path}");
        }
    }
}

#[tokio::test]
async fn an_update_keeps_what_had_finished_if_its_run_can_write_nothing_more() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        let row = one_finished(&gateway).await;
        let before = gateway.head().await.unwrap();
        let update = Map::from_iter([("title".to_owned(), json!("Seen"))]);
        let input = RunInput::Change(Change { update, goto: None, resume: None });
        faults.write(2, Fault::Refused);
        let (_, run) = gateway.run(RunRequest { input, ..ask("") }).await;
        assert!(!faults.disarm(), "{on:?}");
        assert_eq!(run.status, RunStatus::Error, "{on:?}");
        let head = gateway.head().await.unwrap();
        assert_eq!((head.parent, &head.next), (Some(before.key.id), &before.next), "{on:?}");
        assert_eq!(head.writes, [row], "{on:?}");
    }
}

#[tokio::test]
async fn a_title_keeps_what_had_finished_in_one_write() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        let (accessor, thread) = (gateway.app.threads.accessor(), ThreadId::from("untitled"));
        let mut writer = StepWriter::open(accessor, &thread, None).await.unwrap();
        let task = writer.start_task(&"__input__".into(), 0);
        let human = json!([{"type": "human", "content": "two tools", "id": "h"}]);
        let writes = vec![writer.write("messages", human, false).unwrap()];
        writer.finish_task(task, writes, Durability::WithCommit).await.unwrap();
        writer.commit(Source::Input, vec!["tools".into(), "tools".into()], Map::new()).await.unwrap();
        let task = writer.start_task(&"tools".into(), 1);
        writer.finish_task(task, Vec::new(), Durability::Now).await.unwrap();
        let rows = accessor.get(&thread, None).await.unwrap().unwrap().writes;
        assert_eq!(rows.len(), 1);

        let known = accessor.known_head(&thread).await.unwrap();
        faults.write(2, Fault::Refused);
        let titled = interrupted_title::write(accessor, known, "r", &Title::default()).await.unwrap();
        assert!(faults.disarm(), "{on:?}: there was a second write");
        let head = accessor.get(&thread, None).await.unwrap().unwrap();
        assert_eq!(Some(head.key.id), titled, "{on:?}");
        assert_eq!(head.json("title").unwrap(), Some(json!("two tools")), "{on:?}");
        assert_eq!(head.writes, rows, "{on:?}");
    }
}

//! Deletions of threads that change meanwhile, or that are damaged.

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value as Json, json};
use threadkeep::id::ThreadId;
use threadkeep::state::Update;
use threadkeep_records::RunStatus;

use super::super::{Gateway, ask, everywhere};
use super::{faulty, goes_on, said, send};
use crate::testing::execution_of;

async fn deleted(gateway: &Gateway) -> (u16, Json) {
    send(gateway, Request::delete("/api/threads/t").body(Body::empty()).unwrap()).await
}

/// What another process acknowledges between the look at a thread and its deletion stays, with the thread's files.
#[tokio::test]
async fn a_thread_is_deleted_as_it_was_seen_or_not_at_all() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        let file = gateway.app.agents.thread_dir("t").join("kept.txt");
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "kept").unwrap();
        let there = gateway.app.threads.accessor().clone();
        faults.before_write(async move {
            let message = json!([{"type": "human", "content": "acknowledged", "id": "x"}]);
            let writes = vec![there.write("messages", message, false).unwrap()];
            let update = Update { at: None, node: "n".into(), writes, extra: serde_json::Map::new() };
            there.update(&ThreadId::from("t"), update).await.unwrap();
        });
        let (status, answer) = deleted(&gateway).await;
        let busy = "Thread has work in flight. Delete it after the work finishes.";
        assert_eq!((status, &answer["detail"]), (409, &json!(busy)), "{on:?}");
        assert_eq!(said(&gateway.head().await.unwrap()), ["first", "You said: first", "acknowledged"]);
        assert!(file.exists());
        goes_on(&gateway).await;
        assert_eq!(deleted(&gateway).await.0, 200);
        assert!(gateway.head().await.is_none() && !file.exists());
    }
}

/// A process stands still in a deletion, after it has deleted the checkpoints. Another one takes the thread for
/// free, and a run writes a file: that stays.
#[tokio::test]
async fn a_deletion_that_was_overtaken_removes_no_file_of_a_later_run() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        let records = gateway.app.records.clone();
        execution_of(&records, "t").await.unwrap();
        let file = gateway.app.agents.thread_dir("t").join("later.txt");
        let meanwhile = {
            let file = file.clone();
            async move {
                let later = records.now() + chrono::TimeDelta::hours(1);
                records.runs().recover_orphans(later, chrono::TimeDelta::zero()).await.unwrap();
                std::fs::create_dir_all(file.parent().unwrap()).unwrap();
                std::fs::write(&file, "later").unwrap();
            }
        };
        // The first write deletes the thread's checkpoints, the second those of its subagent.
        let second = faults.clone();
        faults.before_write(async move { second.before_write(meanwhile) });
        let (status, answer) = deleted(&gateway).await;
        let busy = "Thread has work in flight. Delete it after the work finishes.";
        assert_eq!((status, &answer["detail"]), (409, &json!(busy)), "{on:?}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "later", "{on:?}");
        let (_, row) = gateway.run(ask("next")).await;
        assert_eq!(row.status, RunStatus::Success, "{on:?}: {:?}", row.error);
        assert_eq!(deleted(&gateway).await.0, 200, "{on:?}");
        assert!(gateway.head().await.is_none() && !file.exists(), "{on:?}");
    }
}

/// A damaged thread has no revision that could have changed; it can be deleted all the same.
#[tokio::test]
async fn a_damaged_thread_can_be_deleted() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        faults.damage(gateway.head().await.unwrap().key.id);
        assert_eq!(deleted(&gateway).await.0, 200, "{on:?}");
        faults.disarm();
        assert!(gateway.head().await.is_none());
    }
}

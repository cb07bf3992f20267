//! Deleting threads.

use axum::http::Method;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{ALL, Gateway, MODES, Setup, connect, question, texts};

const BUSY: &str = "Thread has work in flight. Delete it after the work finishes.";

fn deleted(message: &str) -> Value {
    json!({"success": true, "message": message})
}

/// Everything that a client can see of a thread.
async fn seen(gateway: &Gateway, thread: &str) -> Vec<Value> {
    let mut seen = vec![
        gateway.get(&format!("/api/threads/{thread}")).await.body,
        gateway.get(&format!("/api/threads/{thread}/state")).await.body,
        json!(gateway.history(thread).await),
    ];
    let runs = gateway.get(&format!("/api/threads/{thread}/runs")).await.ok();
    for run in runs.as_array().unwrap() {
        let run = run["run_id"].as_str().unwrap();
        seen.push(gateway.get(&format!("/api/threads/{thread}/runs/{run}/events")).await.ok());
    }
    seen.push(runs);
    seen
}

#[tokio::test]
async fn a_deleted_thread_is_gone_with_all_that_belongs_to_it_and_others_stay() {
    for (backend, mode) in ALL {
        let script = json!({"rules": [
            {"when": {"contains": ["file"]}, "answers": [
                {"tool_calls": [{"name": "write_file", "args": {"path": "a.txt", "content": "A"}}]}, {"text": "ok"},
            ]},
            {"answers": [{"text": "You said: {{input}}"}]},
        ]});
        let gateway = Setup { script, ..Setup::on(backend, mode) }.start().await;
        gateway.create("other").await;
        gateway.ask("other", "file").await;
        let before = if backend == "sqlite" { Some(gateway.rows().await) } else { None };
        let other = seen(&gateway, "other").await;

        gateway.create("t").await;
        let run = gateway.ask("t", "file").await;
        assert!(gateway.thread_dir("t").join("a.txt").exists());
        let answer = gateway.delete("/api/threads/t").await.ok();
        assert_eq!(answer, deleted("Deleted local thread data for t"));

        assert!(!gateway.thread_dir("t").exists());
        gateway.get("/api/threads/t").await.refused(404, "Thread t not found");
        gateway.get("/api/threads/t/state").await.refused(404, "Thread t not found");
        assert_eq!(gateway.get("/api/threads/t/runs").await.ok(), json!([]));
        assert_eq!(gateway.get(&format!("/api/threads/t/runs/{run}/events")).await.ok(), json!([]));
        gateway.delete("/api/threads/t").await.refused(404, "Thread t not found");
        if let Some(before) = before {
            // Both threads use the same node and channel names, which are stored once and shared.
            let after = gateway.rows().await;
            let differing: Vec<_> = before.iter().filter(|(table, rows)| after[*table] != **rows).collect();
            assert_eq!(differing, [] as [(&String, &i64); 0], "{after:?}");
        }
        assert_eq!(seen(&gateway, "other").await, other);

        gateway.create("t").await;
        assert_eq!(gateway.history("t").await.len(), 1, "the id begins anew");
        gateway.ask("t", "again").await;
        assert_eq!(texts(&gateway.state("t").await), ["again", "You said: again"]);
        assert_eq!(gateway.delete("/api/threads/t").await.ok()["success"], true);
    }
}

#[tokio::test]
async fn a_thread_without_files_says_so() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    assert_eq!(gateway.delete("/api/threads/t").await.ok(), deleted("No local data for t"));
}

#[tokio::test]
async fn a_thread_is_not_deleted_while_a_run_works_on_it() {
    for mode in MODES {
        let name = format!("delete-{mode}");
        let script = json!({"rules": [{"answers": [{"text": "late", "gate": {"name": name}}]}]});
        let gateway = Setup { script, ..Setup::on("sqlite", mode) }.start().await;
        gateway.create("t").await;
        let run = gateway.start_run("t", "hello").await;
        gate(&name).reached().await;
        let refused = gateway.delete("/api/threads/t").await;
        refused.refused(409, BUSY);
        assert_eq!(refused.body.as_object().unwrap().len(), 1, "nothing but the detail");
        gate(&name).open();
        gateway.join("t", &run).await;
        assert_eq!(texts(&gateway.state("t").await), ["hello", "late"], "nothing was lost");
        gateway.delete("/api/threads/t").await.ok();
        gateway.get("/api/threads/t").await.refused(404, "Thread t not found");
    }
}

/// The first one wins, and the other gets an error. The run never ends by itself.
#[tokio::test(flavor = "multi_thread")]
async fn of_a_deletion_and_a_run_that_race_exactly_one_wins() {
    let script = json!({"rules": [{"answers": [{"text": "never", "gate": {"name": "delete-race"}}]}]});
    let gateway = Setup { script, ..Setup::default() }.start().await;
    for _ in 0..100 {
        gateway.create("t").await;
        let run = gateway.post("/api/threads/t/runs", question("hello"));
        let (run, deletion) = tokio::join!(run, gateway.delete("/api/threads/t"));
        match (run.status, deletion.status) {
            (200, 409) => {
                deletion.refused(409, BUSY);
                let run = run.body["run_id"].as_str().unwrap();
                let cancel = format!("/api/threads/t/runs/{run}/cancel?wait=true");
                assert_eq!(gateway.call(Method::POST, &cancel, None).await.status, 204);
                gateway.delete("/api/threads/t").await.ok();
            }
            (404 | 409, 200) => {}
            other => panic!("{other:?}: {} {}", run.body, deletion.body),
        }
        gateway.get("/api/threads/t").await.refused(404, "Thread t not found");
        assert_eq!(gateway.get("/api/threads/t/runs").await.ok(), json!([]));
    }
}

/// Ids that would name a directory elsewhere can be deleted, but no directory is touched.
#[tokio::test]
async fn an_id_of_old_can_be_deleted() {
    let gateway = Setup::on("sqlite", "full").start().await;
    gateway.create("t").await;
    let kept = gateway.data().parent().unwrap().join("kept");
    std::fs::create_dir_all(&kept).unwrap();
    let id = "../kept";
    let gateway = gateway
        .reopen_after("full", |data| async move {
            let db = connect(&data.join("gateway.db"));
            let sql = "UPDATE threads_meta SET thread_id = $1";
            assert_eq!(db.execute(sql, [id]).unwrap(), 1);
        })
        .await;
    let answer = gateway.delete("/api/threads/..%2Fkept").await.ok();
    assert_eq!(answer, deleted("Skipped local data cleanup for legacy thread ID"));
    assert!(kept.exists());
    assert_eq!(gateway.post("/api/threads/count", json!({})).await.ok(), json!(0));
    gateway.delete("/api/threads/..%2Fkept").await.refused(404, "Thread ../kept not found");
}

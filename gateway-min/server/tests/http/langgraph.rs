//! Threads that graphs of LangGraph wrote to, with delta channels whose reducers are Python.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::json;
use threadkeep::saver::{Saver, ThreadImage};
use threadkeep_sqlite::{Options, SqliteSaver};

use crate::graph::{Entry, Graph};
use crate::support::{Setup, says};

async fn open(data: PathBuf) -> Arc<SqliteSaver> {
    Arc::new(SqliteSaver::open_async(data.join("checkpoints.db"), Options::default()).await.unwrap())
}

async fn image(data: PathBuf, thread: &str) -> ThreadImage {
    let saver = open(data).await;
    let image = saver.read_thread(&thread.into()).await.unwrap();
    saver.close().await;
    image
}

#[tokio::test]
async fn a_thread_with_delta_channels_of_langgraph_is_not_pruned_by_replaying_them() {
    let gateway = Setup::on("sqlite", "delta").start().await;
    for thread in ["free", "graph"] {
        gateway.create(thread).await;
    }
    gateway.ask("free", "one").await;
    let written = |data: PathBuf| async move {
        let saver = open(data).await;
        let graph = Graph::on(saver.clone(), "graph");
        graph.put(0, vec![("messages", Entry::Snapshot(json!([says("human", "h", "hello")])))]).await;
        for n in 1..4 {
            // Only the graph's reducer knows what to do with it.
            graph.put(n, vec![("messages", Entry::Changed(json!({"replace": n})))]).await;
        }
        saver.close().await;
    };
    let gateway = gateway.reopen_after("delta", written).await;
    let before = image(gateway.data(), "graph").await;

    let refusal = "Thread graph has delta channels that only LangGraph can replay, so no snapshot of them can be stored \
                   and nothing was removed. Use `threadkeep prune apply --thread graph --keep latest`, which keeps what \
                   they are replayed from.";
    let body = json!({"thread_ids": ["free", "graph"], "strategy": "keep_latest"});
    gateway.post("/api/threads/prune", body).await.refused(409, refusal);
    assert_eq!(gateway.history("free").await.len(), 1, "those before it are pruned");
    let page = gateway.get("/threads/graph/storage?keep=last:2").await;
    let text = page.body.as_str().unwrap_or_default();
    assert!(page.status == 409 && text.contains("only LangGraph can replay"), "{}", page.body);
    assert!(text.contains("prune apply --thread graph --keep last:2"), "{}", page.body);
    assert!(image(gateway.data(), "graph").await == before, "nothing of it is changed");

    // Nor does a check replay them.
    let page = gateway.get("/threads/graph/storage?verify=1").await;
    let text = page.body.as_str().unwrap_or_default();
    assert!(page.status == 200 && text.contains("No violations"), "{}", page.body);
    // What needs no replay is pruned.
    let body = json!({"thread_ids": ["graph"], "strategy": "delete"});
    assert_eq!(gateway.post("/api/threads/prune", body).await.ok()["pruned_count"], 1);
}

//! Threads that graphs of LangGraph wrote to, with delta channels whose reducers are Python.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::json;
use threadkeep::saver::{Saver, ThreadImage};
use threadkeep_sqlite::{Options, SqliteSaver};

use crate::graph::{Entry, Graph};
use crate::support::{Gateway, Setup, says};

async fn open(data: PathBuf) -> Arc<SqliteSaver> {
    Arc::new(SqliteSaver::open_async(data.join("checkpoints.db"), Options::default()).await.unwrap())
}

async fn image(data: PathBuf, thread: &str) -> ThreadImage {
    let saver = open(data).await;
    let image = saver.read_thread(&thread.into()).await.unwrap();
    saver.close().await;
    image
}

/// A gateway on a thread of the name `graph`: a snapshot of `messages` and three changes of it by LangGraph.
async fn with_changes_of_langgraph() -> Gateway {
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
            // As our reducer has it, a message more; only the graph's reducer knows what to do with it.
            graph.put(n, vec![("messages", Entry::Changed(json!([says("human", "x", "replace all")])))]).await;
        }
        saver.close().await;
    };
    gateway.reopen_after("delta", written).await
}

#[tokio::test]
async fn messages_that_langgraph_stored_as_changes_are_refused_and_never_computed() {
    let gateway = with_changes_of_langgraph().await;
    let before = image(gateway.data(), "graph").await;
    let ids: Vec<String> = before.checkpoints.keys().map(|(_, id)| id.to_string()).collect();
    let refusal = |id: &str| {
        format!(
            "thread graph, checkpoint {id}: LangGraph stored channel messages as changes, and only the graph that wrote \
             them can replay them; read and continue the thread with that graph"
        )
    };
    let head = ids.last().unwrap();
    gateway.get("/api/threads/graph/state").await.refused(409, &refusal(head));
    for id in &ids[1..] {
        gateway.get(&format!("/api/threads/graph/state/{id}")).await.refused(409, &refusal(id));
    }
    gateway.post("/api/threads/graph/history", json!({})).await.refused(409, &refusal(head));
    let update = json!({"values": {"messages": [says("human", "more", "more")]}});
    gateway.post("/api/threads/graph/state", update).await.refused(409, &refusal(head));
    // What LangGraph stored as a value is shown.
    let first = gateway.get(&format!("/api/threads/graph/state/{}", ids[0])).await.ok();
    assert_eq!(first["values"]["messages"][0]["content"], "hello");
    // A run says why it fails, and writes nothing.
    let run = gateway.post("/api/threads/graph/runs", json!({"input": {"messages": "hello"}})).await.ok();
    let run = run["run_id"].as_str().unwrap().to_owned();
    let joined = gateway.get(&format!("/api/threads/graph/runs/{run}/join")).await;
    assert!(joined.body.to_string().contains("only the graph that wrote them"), "{}", joined.body);
    assert!(image(gateway.data(), "graph").await == before, "nothing was written");
}

#[tokio::test]
async fn a_thread_with_delta_channels_of_langgraph_is_not_pruned_by_replaying_them() {
    let gateway = with_changes_of_langgraph().await;
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

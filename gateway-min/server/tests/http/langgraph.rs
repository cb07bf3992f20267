//! Threads that graphs of LangGraph wrote to, with delta channels whose reducers are Python.

use std::path::PathBuf;
use std::sync::Arc;

use axum::http::Method;
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
            graph
                .put(n, vec![("messages", Entry::Changed(json!([says("human", "x", "replace all")])))])
                .await;
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
    // The first is the gateway's, from when the thread was created; the second is the snapshot.
    for id in &ids[2..] {
        gateway.get(&format!("/api/threads/graph/state/{id}")).await.refused(409, &refusal(id));
    }
    gateway.post("/api/threads/graph/history", json!({})).await.refused(409, &refusal(head));
    let update = json!({"values": {"messages": [says("human", "more", "more")]}});
    gateway.post("/api/threads/graph/state", update).await.refused(409, &refusal(head));
    // What LangGraph stored as a value is shown.
    let first = gateway.get(&format!("/api/threads/graph/state/{}", ids[1])).await.ok();
    assert_eq!(first["values"]["messages"][0]["content"], "hello");
    for route in ["runs", "runs/wait", "runs/stream"] {
        let run = json!({"input": {"messages": "hello"}});
        gateway.post(&format!("/api/threads/graph/{route}"), run).await.refused(409, &refusal(head));
    }
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

#[tokio::test]
async fn a_graph_reads_its_thread_after_the_gateway_set_a_goal_on_it() {
    let gateway = with_changes_of_langgraph().await;
    let goal = Some(json!({"objective": "all done"}));
    gateway.call(Method::PUT, "/api/threads/graph/goal", goal).await.ok();
    let head = image(gateway.data(), "graph").await.checkpoints.into_keys().next_back().unwrap().1;
    let read = move |data: PathBuf| async move {
        let saver = open(data).await;
        let graph = Graph::on(saver.clone(), "graph");
        assert_eq!(graph.values().await.len(), 6, "every checkpoint can be read");
        // The graph replays the gateway's checkpoint as its own: it repeats its parent.
        let (seed, writes) = graph.replayed(head, "messages").await;
        assert!(seed.is_some() && writes.len() == 3, "{seed:?}, {writes:?}");
        saver.close().await;
    };
    gateway.reopen_after("delta", read).await;
}

//! `stream_subgraphs`: the frames of subagents in the stream of the run that delegated, with the place of the call in
//! their names.

use std::collections::{BTreeMap, BTreeSet};

use axum::http::Request;
use serde_json::{Value, json};

use crate::sse::{self, Frame};
use crate::support::{Gateway, MODES, Setup, question};

/// A lead that delegates two tasks, and subagents of two turns.
fn script() -> Value {
    let task = |prompt: &str| json!({"name": "task", "args": {"prompt": prompt, "subagent_type": "general-purpose"}});
    json!({"chunk_chars": 4, "rules": [
        {"when": {"caller": "subagent"}, "answers": [
            {"text": "Looking around.", "tool_calls": [{"name": "ls", "args": {}}]},
            {"text": "Done: {{input}}"},
        ]},
        {"answers": [{"text": "I delegate.", "tool_calls": [task("one"), task("two")]}, {"text": "Both are done."}]},
    ]})
}

async fn delegated(gateway: &Gateway, thread: &str, subgraphs: Option<bool>) -> Vec<Frame> {
    gateway.create(thread).await;
    let mut body = question("please delegate");
    body["context"] = json!({"subagent_enabled": true});
    body["on_disconnect"] = json!("continue");
    body["stream_mode"] =
        json!(["values", "messages-tuple", "updates", "tasks", "checkpoints", "debug", "custom"]);
    if let Some(subgraphs) = subgraphs {
        body["stream_subgraphs"] = json!(subgraphs);
    }
    let request = Request::post(format!("/api/threads/{thread}/runs/stream"))
        .header("content-type", "application/json");
    sse::all(gateway.open_answer(request.body(body.to_string().into()).unwrap()).await).await
}

/// How many frames of each name there are.
fn counts<'f>(names: impl Iterator<Item = &'f str>) -> BTreeMap<&'f str, usize> {
    names.fold(BTreeMap::new(), |mut counts, name| {
        *counts.entry(name).or_default() += 1;
        counts
    })
}

fn of<'f>(frames: &'f [Frame], name: &str) -> Vec<&'f Value> {
    frames.iter().filter(|frame| frame.name == name).map(|frame| &frame.data).collect()
}

#[tokio::test]
async fn subagents_are_streamed_under_the_place_of_their_call() {
    for mode in MODES {
        let gateway = Setup { mode, script: script(), ..Setup::default() }.start().await;
        let frames = delegated(&gateway, "t", Some(true)).await;
        let places: BTreeSet<&str> =
            frames.iter().filter_map(|frame| Some(frame.name.split_once('|')?.1)).collect();
        let calls: BTreeSet<String> = of(&frames, "tasks")
            .into_iter()
            .filter(|task| task["name"] == "tools")
            .map(|task| format!("tools:{}", task["id"].as_str().unwrap()))
            .collect();
        assert_eq!(places, calls.iter().map(String::as_str).collect(), "{mode}");
        assert_eq!(places.len(), 2);
        let mut reports = Vec::new();
        for place in places {
            let here = |event: &str| of(&frames, &format!("{event}|{place}"));
            let text = |id: &str| -> String {
                let chunks = here("messages").into_iter().filter(|data| data[0]["id"] == id);
                chunks.map(|data| data[0]["content"].as_str().unwrap()).collect()
            };
            let nodes: Vec<String> = here("updates")
                .iter()
                .map(|update| update.as_object().unwrap().keys().next().unwrap().clone())
                .collect();
            assert_eq!(nodes, ["model", "tools", "model"], "{mode}");
            let answers: Vec<&str> = here("updates")
                .iter()
                .filter_map(|update| update["model"]["messages"][0]["id"].as_str())
                .collect();
            assert_eq!(text(answers[0]), "Looking around.", "{mode}: the chunks, as they come");
            let metadata = &here("messages")[0][1];
            let namespace = metadata["langgraph_checkpoint_ns"].as_str().unwrap();
            assert!(namespace.starts_with(&format!("{place}|model:")), "{namespace}");
            let steps: Vec<usize> =
                here("values").iter().map(|state| state["messages"].as_array().unwrap().len()).collect();
            assert_eq!(steps, [1, 2, 3, 4], "{mode}");
            assert_eq!(here("tasks").len(), 6, "three tasks start and end");
            assert_eq!(here("checkpoints").len(), 4);
            assert!(
                here("checkpoints").iter().all(|it| it["config"]["configurable"]["checkpoint_ns"] == place)
            );
            assert_eq!((here("debug").len(), here("custom").len()), (10, 0));
            reports.push(text(answers[1]));
        }
        reports.sort();
        assert_eq!(reports, ["Done: one", "Done: two"], "{mode}");

        // Without the flag there is what there was, and with it nothing else but the nested frames.
        let own = frames.iter().map(|frame| frame.name.as_str()).filter(|name| !name.contains('|'));
        for (thread, subgraphs) in [("u", Some(false)), ("v", None)] {
            let without = delegated(&gateway, thread, subgraphs).await;
            assert_eq!(
                counts(own.clone()),
                counts(without.iter().map(|frame| frame.name.as_str())),
                "{mode}"
            );
        }
    }
}

#[tokio::test]
async fn nested_frames_are_replayed_like_all_others() {
    let gateway = Setup { script: script(), ..Setup::default() }.start().await;
    let frames = delegated(&gateway, "t", Some(true)).await;
    let run = frames[0].data["run_id"].as_str().unwrap();
    let nested: Vec<usize> = (0..frames.len()).filter(|at| frames[*at].name.contains('|')).collect();
    for at in [0, nested[0], nested[nested.len() / 2], *nested.last().unwrap()] {
        let id = frames[at].id.as_deref().unwrap();
        let request = Request::get(format!("/api/threads/t/runs/{run}/stream")).header("last-event-id", id);
        let answer = gateway.open_answer(request.body(axum::body::Body::empty()).unwrap()).await;
        assert_eq!(sse::all(answer).await, frames[at + 1..], "after {at}");
    }
    let request = Request::get(format!("/api/threads/t/runs/{run}/stream?stream_mode=updates"));
    let request = request.header("last-event-id", frames[0].id.as_deref().unwrap());
    let updates = sse::all(gateway.open_answer(request.body(axum::body::Body::empty()).unwrap()).await).await;
    let wanted = frames.iter().filter(|frame| {
        let name = frame.name.split('|').next().unwrap();
        ["updates", "error", "end"].contains(&name)
    });
    assert_eq!(updates, wanted.cloned().collect::<Vec<_>>());
}

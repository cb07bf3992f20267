//! The calls of SDK clients besides those on one thread and one run.

use axum::body::Body;
use axum::http::{Method, Request};
use futures::StreamExt as _;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::sse::Frames;
use crate::support::{ALL, Gateway, MODES, Setup, id, question, texts};

#[tokio::test]
async fn threads_are_pruned_by_deleting_them() {
    for (backend, mode) in ALL {
        let gateway = Setup::on(backend, mode).start().await;
        for thread in ["a", "b", "c"] {
            gateway.create(thread).await;
            gateway.ask(thread, "one").await;
        }
        let body = json!({"thread_ids": ["a", "none", "c"]});
        let pruned = gateway.post("/api/threads/prune", body.clone()).await.ok();
        assert_eq!(pruned, json!({"pruned_count": 2, "not_found": ["none"], "busy": []}), "{backend} {mode}");
        for (thread, status) in [("a", 404), ("b", 200), ("c", 404)] {
            assert_eq!(gateway.get(&format!("/api/threads/{thread}")).await.status, status);
        }
        let again = gateway.post("/api/threads/prune", body).await.ok();
        assert_eq!(again, json!({"pruned_count": 0, "not_found": ["a", "none", "c"], "busy": []}));
    }
}

#[tokio::test]
async fn as_many_threads_are_pruned_at_once_as_a_search_finds() {
    let gateway = Setup::default().start().await;
    let ids = |number: usize| (0..number).map(|id| format!("none-{id}")).collect::<Vec<_>>();
    let refused = gateway.post("/api/threads/prune", json!({"thread_ids": ids(1001)})).await;
    refused.invalid("too_long", &json!(["body", "thread_ids"]));
    let pruned = gateway.post("/api/threads/prune", json!({"thread_ids": ids(1000)})).await.ok();
    assert_eq!(pruned["not_found"].as_array().map(Vec::len), Some(1000));
}

#[tokio::test]
async fn pruning_to_the_latest_keeps_the_state_and_the_thread_goes_on() {
    for (backend, mode) in ALL {
        let gateway = Setup::on(backend, mode).start().await;
        gateway.create("t").await;
        for text in ["one", "two", "three"] {
            gateway.ask("t", text).await;
        }
        let before = gateway.state("t").await;
        let body = json!({"thread_ids": ["t"], "strategy": "keep_latest"});
        assert_eq!(gateway.post("/api/threads/prune", body).await.ok()["pruned_count"], 1);
        assert_eq!(gateway.history("t").await.len(), 1, "{backend} {mode}");
        let pruned = gateway.state("t").await;
        assert_eq!(pruned["values"], before["values"]);
        // What is left is the note on the last turn.
        let answer = |state: &Value, at: usize| json!({"message_id": state["values"]["messages"][at]["id"]});
        gateway.post("/api/threads/t/branches", answer(&pruned, 5)).await.ok();
        gateway.ask("t", "four").await;
        let state = gateway.state("t").await;
        let again = "/api/threads/t/runs/regenerate/prepare";
        let prepared = gateway.post(again, answer(&state, 7)).await.ok();
        assert_eq!(prepared["checkpoint"]["checkpoint_id"], id(&pruned));
        assert_eq!(texts(&state)[..6], texts(&before)[..]);
        assert_eq!(texts(&state)[6..], ["four", "You said: four"]);
    }
}

#[tokio::test]
async fn a_busy_thread_is_not_pruned() {
    for strategy in ["delete", "keep_latest"] {
        let name = format!("prune-{strategy}");
        let script = json!({"rules": [{"answers": [{"text": "late", "gate": {"name": name}}]}]});
        let gateway = Setup { script, ..Setup::on("sqlite", "full") }.start().await;
        gateway.create("t").await;
        gateway.create("free").await;
        let run = gateway.start_run("t", "hello").await;
        gate(&name).reached().await;
        let body = json!({"thread_ids": ["t", "free"], "strategy": strategy});
        let pruned = gateway.post("/api/threads/prune", body).await.ok();
        assert_eq!(pruned, json!({"pruned_count": 1, "not_found": [], "busy": ["t"]}));
        gate(&name).open();
        gateway.join("t", &run).await;
        assert_eq!(texts(&gateway.state("t").await), ["hello", "late"]);
    }
}

#[tokio::test]
async fn a_batch_creates_its_runs_or_none_that_goes_on() {
    for mode in MODES {
        let gateway = Setup::on("sqlite", mode).start().await;
        gateway.create("t").await;
        let on = |thread: &str, text: &str| {
            let mut body = question(text);
            body["thread_id"] = json!(thread);
            body
        };
        // As the JavaScript client sends it: its own names, and the assistant's in both spellings.
        let mut camel = question("three");
        camel["assistantId"] = json!("lead_agent");
        camel["assistant_id"] = json!("lead_agent");
        camel["streamMode"] = json!(["values"]);
        let runs =
            gateway.post("/api/runs/batch", json!([on("t", "one"), question("two"), camel])).await.ok();
        let mut threads = Vec::new();
        for (run, text) in runs.as_array().unwrap().iter().zip(["one", "two", "three"]) {
            let (thread, run) = (run["thread_id"].as_str().unwrap(), run["run_id"].as_str().unwrap());
            gateway.join(thread, run).await;
            assert_eq!(texts(&gateway.state(thread).await)[0], text);
            threads.push(thread.to_owned());
        }
        assert_eq!((threads.len(), threads[0].as_str()), (3, "t"));
        // Malformed: nothing starts.
        let rows = gateway.rows().await;
        let refused = gateway.post("/api/runs/batch", json!([on("t", "x"), {"inptu": 1}])).await;
        refused.invalid("extra_forbidden", &json!(["body", 1, "inptu"]));
        let refused =
            gateway.post("/api/runs/batch", json!([{"streamMode": "a", "stream_mode": "values"}])).await;
        refused.invalid("extra_forbidden", &json!(["body", 0, "streamMode"]));
        assert_eq!(gateway.post("/api/runs/batch", json!({})).await.status, 422);
        assert_eq!(gateway.post("/api/runs/batch", Value::from(vec![json!({}); 101])).await.status, 422);
        assert_eq!(gateway.rows().await, rows);
        // One that cannot be admitted: it is named, and those before it are cancelled.
        let name = format!("batch-{mode}");
        let refused = gateway.post("/api/runs/batch", json!([on("t", "x"), on("none", "y")])).await;
        refused.refused(404, "Run 1 of the batch: Thread none not found");
        let listed = gateway.get("/api/threads/t/runs").await.ok();
        gateway.join("t", listed[0]["run_id"].as_str().unwrap()).await;
        assert_eq!(listed.as_array().unwrap().len(), 2, "{name}");
    }
}

/// The frames of the thread's stream that come after `start` has begun, until one has been read `count` times.
async fn frames(
    gateway: &Gateway,
    request: Request<Body>,
    start: impl AsyncFnOnce(),
    (frame, count): (&str, usize),
) -> Vec<String> {
    let answer = gateway.open_answer(request).await;
    assert_eq!(answer.status(), 200);
    let mut body = answer.into_body().into_data_stream();
    start().await;
    let mut text = String::new();
    while text.matches(frame).count() < count {
        let chunk = tokio::time::timeout(std::time::Duration::from_mins(10), body.next()).await;
        text.push_str(std::str::from_utf8(&chunk.unwrap().unwrap().unwrap()).unwrap());
    }
    text.split("\n\n").filter(|frame| !frame.is_empty()).map(str::to_owned).collect()
}

fn join(query: &str, last: Option<&str>) -> Request<Body> {
    let request = Request::builder().uri(format!("/api/threads/t/stream{query}"));
    let request = last.into_iter().fold(request, |request, id| request.header("last-event-id", id));
    request.body(Body::empty()).unwrap()
}

#[tokio::test]
async fn the_stream_of_a_thread_has_its_runs_one_after_the_other() {
    let gateway = Setup::on("sqlite", "full").start().await;
    gateway.create("t").await;
    gateway.ask("t", "before").await;
    let done = |run: &str| format!(r#"{{"run_id":"{run}","status":"run_done","thread_id":"t"}}"#);
    let mut runs = Vec::new();
    let asking = async || {
        for text in ["one", "two"] {
            runs.push(gateway.ask("t", text).await);
        }
    };
    let shown = frames(&gateway, join("", None), asking, ("run_done", 2)).await;
    let (first, second) =
        shown.split_at(shown.iter().position(|frame| frame.contains(&done(&runs[0]))).unwrap() + 1);
    for (part, run, text) in [(first, &runs[0], "You said: one"), (second, &runs[1], "You said: two")] {
        assert!(part[0].starts_with("event: metadata") && part[0].contains(&**run), "{part:?}");
        assert!(
            part.iter().any(|frame| frame.starts_with("event: values") && frame.contains(text)),
            "{part:?}"
        );
        assert!(part.last().unwrap().contains(&done(run)), "{part:?}");
    }
    assert!(!shown.iter().any(|frame| frame.starts_with("event: end")), "the stream goes on");

    // A client that lost its connection goes on after its last event.
    let last = first[0].rsplit_once("id: ").unwrap().1;
    let again = frames(&gateway, join("", Some(last)), async || {}, ("run_done", 2)).await;
    assert_eq!(again, shown[1..]);

    // Without the frames of the runs.
    let asking = async || {
        runs.push(gateway.ask("t", "three").await);
    };
    let shown = frames(&gateway, join("?stream_mode=lifecycle", None), asking, ("run_done", 1)).await;
    assert!(shown.iter().all(|frame| frame.starts_with("event: metadata")) && shown.len() == 2, "{shown:?}");

    let refused = gateway.get("/api/threads/t/stream?stream_mode=state_update").await;
    refused.invalid("literal_error", &json!(["query", "stream_mode", 0]));
    assert_eq!(gateway.get("/api/threads/none/stream").await.status, 404);
}

#[tokio::test]
async fn the_stream_of_a_thread_begins_with_its_active_run() {
    let name = "thread-stream";
    let script = json!({"rules": [{"answers": [{"text": "late", "gate": {"name": name}}]}]});
    let gateway = Setup { script, ..Setup::default() }.start().await;
    gateway.create("t").await;
    let run = gateway.start_run("t", "hello").await;
    gate(name).reached().await;
    let shown = frames(&gateway, join("", None), async || gate(name).open(), ("run_done", 1)).await;
    assert!(shown[0].starts_with("event: metadata") && shown[0].contains(&run), "{shown:?}");
    assert!(shown.iter().any(|frame| frame.contains("late")), "{shown:?}");
}

/// A client that reads too slowly loses events of a run, but neither the rest of them nor its end.
#[tokio::test]
async fn the_stream_of_a_thread_goes_on_after_a_gap() {
    let name = "thread-gap";
    let script = json!({"rules": [
        {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": name}}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]});
    let sections = json!({"stream_bridge": {"queue_maxsize": 2}});
    let gateway = Setup { script, sections, ..Setup::default() }.start().await;
    gateway.create("t").await;
    let mut body = question("wait");
    body["stream_mode"] = json!(["values", "updates", "messages-tuple"]);
    let run = gateway.post("/api/threads/t/runs", body).await.ok()["run_id"].as_str().unwrap().to_owned();
    gate(name).reached().await;
    let mut stream = Frames::of(gateway.open_answer(join("", None)).await);
    stream.next().await.unwrap();
    gate(name).open();
    gateway.join("t", &run).await;
    // Two runs have ended by the time the client reads on.
    let next = gateway.ask("t", "more").await;
    let mut names = Vec::new();
    for run in [&run, &next] {
        loop {
            let frame = stream.next().await.unwrap();
            if frame.data["status"] == "run_done" {
                assert_eq!(frame.data["run_id"], **run, "after {names:?}");
                break;
            }
            names.push(frame.name);
        }
    }
    assert_eq!(names[..3], ["gap", "updates", "values"], "{names:?}");
}

#[tokio::test]
async fn assistants_have_one_version_and_no_nested_graphs() {
    let gateway = Setup::default().start().await;
    let versions =
        gateway.post("/api/assistants/lead_agent/versions", json!({"limit": 10, "offset": 0})).await.ok();
    assert_eq!((versions.as_array().unwrap().len(), &versions[0]["version"]), (1, &json!(1)));
    let none = gateway.post("/api/assistants/lead_agent/versions", json!({"offset": 1})).await.ok();
    assert_eq!(none, json!([]));
    let latest = gateway.post("/api/assistants/lead_agent/latest", json!({"version": 1})).await.ok();
    assert_eq!(latest["assistant_id"], "lead_agent");
    let refused = gateway.post("/api/assistants/lead_agent/latest", json!({"version": 2})).await;
    refused.refused(404, "Assistant lead_agent has no version 2");
    for path in ["subgraphs", "subgraphs?recurse=true", "subgraphs/some%7Cns?recurse=false"] {
        assert_eq!(gateway.get(&format!("/api/assistants/lead_agent/{path}")).await.ok(), json!({}));
        assert_eq!(gateway.get(&format!("/api/assistants/none/{path}")).await.status, 404);
    }
    for xray in ["true", "0", "3"] {
        gateway.get(&format!("/api/assistants/lead_agent/graph?xray={xray}")).await.ok();
    }
    assert_eq!(gateway.get("/api/assistants/lead_agent/graph?xray=deep").await.status, 422);
}

/// The record of a run has the name of its assistant as it was sent.
#[tokio::test]
async fn an_assistant_that_a_run_may_name_can_be_read_by_that_name() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    let agent = gateway.get("/api/assistants/lead_agent").await.ok();
    for name in ["lead-agent", "Lead_Agent"] {
        let mut body = question("hello");
        body["assistant_id"] = json!(name);
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        let runs = gateway.get("/api/threads/t/runs?limit=1").await.ok();
        assert_eq!(runs[0]["assistant_id"], name);
        for path in ["", "/graph", "/schemas", "/subgraphs"] {
            gateway.get(&format!("/api/assistants/{name}{path}")).await.ok();
        }
        assert_eq!(gateway.get(&format!("/api/assistants/{name}")).await.ok(), agent);
        let found = gateway.post("/api/assistants/search", json!({ "graph_id": name })).await.ok();
        assert_eq!(found, json!([agent]));
    }
}

#[tokio::test]
async fn assistants_and_their_versions_are_filtered_by_metadata_as_threads_are() {
    let gateway = Setup::default().start().await;
    let versions = "/api/assistants/lead_agent/versions";
    for (metadata, found) in [
        (json!({"created_by": "system"}), 1),
        (json!({"created_by": "me"}), 0),
        (json!({"created_by": "system", "other": null}), 0),
    ] {
        for path in ["/api/assistants/search", versions] {
            let listed = gateway.post(path, json!({"metadata": metadata, "limit": 1})).await.ok();
            assert_eq!(listed.as_array().unwrap().len(), found, "{path} {metadata}");
        }
    }
    for path in ["/api/assistants/search", "/api/assistants/count", versions] {
        let key = gateway.post(path, json!({"metadata": {"a b": 1}})).await;
        key.refused(
            400,
            "Invalid metadata filter entries: 'a b': a key has only letters, digits, '_' and '-'",
        );
        let value = gateway.post(path, json!({"metadata": {"k": []}})).await;
        value.invalid("metadata_filter_value", &json!(["body", "metadata", "k"]));
    }
    let sorted = gateway.post("/api/assistants/search", json!({"sort_by": "age", "sort_order": "asc"})).await;
    sorted.invalid("literal_error", &json!(["body", "sort_by"]));
    let latest = gateway.post("/api/assistants/lead_agent/latest", json!({})).await;
    latest.invalid("missing", &json!(["body", "version"]));
}

#[tokio::test]
async fn what_is_not_supported_answers_501_with_a_sentence() {
    let gateway = Setup::default().start().await;
    for (method, path) in [
        ("POST", "/api/threads/t/runs/crons"),
        ("POST", "/api/runs/crons"),
        ("PATCH", "/api/runs/crons/c"),
        ("DELETE", "/api/runs/crons/c"),
        ("POST", "/api/runs/crons/search"),
        ("POST", "/api/runs/crons/count"),
        ("PUT", "/api/store/items"),
        ("GET", "/api/store/items"),
        ("GET", "/api/store/items?namespace=a&key=b&refresh_ttl=true"),
        ("DELETE", "/api/store/items"),
        ("POST", "/api/store/items/search"),
        ("POST", "/api/store/namespaces"),
        ("POST", "/api/assistants"),
        ("PATCH", "/api/assistants/lead_agent"),
        ("DELETE", "/api/assistants/lead_agent?delete_threads=true"),
        ("PATCH", "/api/threads/t/state"),
        ("POST", "/api/ui/lead_agent"),
    ] {
        let body = (method != "GET").then(|| json!({"any": "thing"}));
        let answer = gateway.call(method.parse::<Method>().unwrap(), path, body).await;
        let text = answer.body["detail"].as_str().unwrap_or_default();
        assert!(
            answer.status == 501 && text.len() > 40,
            "{method} {path}: {} {}",
            answer.status,
            answer.body
        );
    }
    let _: Value = gateway.get("/api/assistants/lead_agent").await.ok();
}

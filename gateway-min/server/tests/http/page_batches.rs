//! Batches on the page.

use axum::body::Body;
use axum::http::{Method, Request};
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::page::{Guarded, html};
use crate::support::{DURABLE, Gateway, Setup, question};

/// A lead that submits two items: one that fails, and one that waits.
fn setup(backend: &'static str, gate: &str) -> Setup {
    let items = json!([{"key": "<b>fails", "prompt": "be luckless"}, {"key": "waits", "prompt": "wait"}]);
    let call = json!({"name": "batch_task", "args": {"title": "<i>Files", "items": items,
        "subagent_type": "general-purpose"}});
    let script = json!({"rules": [
        {"when": {"caller": "subagent", "contains": ["luckless"]}, "answers": [{"error": {"kind": "fatal", "message": "no luck"}}]},
        {"when": {"caller": "subagent"}, "answers": [{"text": "<b>waited", "gate": {"name": gate},
            "usage": {"input_tokens": 3, "output_tokens": 2}}]},
        {"when": {"contains": ["submit"]}, "answers": [{"tool_calls": [call]}, {"text": "Submitted."}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]});
    // An item has no card: the setting hides nothing of it.
    let sections = json!({"token_usage": {"enabled": false},
        "subagent_batches": {"enabled": true, "poll_interval_seconds": 0.1, "max_attempts": 1}});
    Setup { script, sections, ..Setup::on(backend, "delta") }
}

fn submission() -> Value {
    let mut body = question("please submit");
    body["context"] = json!({"subagent_enabled": true});
    body
}

/// The page at `path` once it says `part`.
async fn until(gateway: &Gateway, path: &str, part: &str) -> String {
    let found = async {
        loop {
            let page = html(&gateway.get(path).await).to_owned();
            if page.contains(part) {
                return page;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_mins(10), found).await.expect("never happened")
}

#[tokio::test]
async fn a_batch_shows_its_progress_its_items_and_what_can_be_done_with_them() {
    for backend in DURABLE {
        let name = format!("page-batches-{backend}");
        let gateway = setup(backend, &name).start().await;
        gateway.create("t").await;
        gateway.post("/api/threads/t/runs/wait", submission()).await.ok();
        gate(&name).reached().await;
        let batches = gateway.get("/api/threads/t/subagent-batches").await.ok();
        let id = batches[0]["id"].as_str().unwrap().to_owned();
        let list = until(&gateway, "/threads/t/runs", "<b>1</b> failed").await;
        assert!(
            list.contains(&format!("href=\"/threads/t/batches/{id}\"")) && list.contains("data-watch"),
            "{list}"
        );
        assert!(
            list.contains("&lt;i&gt;Files")
                && list.contains("rect class=\"failed\" x=\"500\" y=\"0\" width=\"500\""),
            "{list}"
        );

        let path = format!("/threads/t/batches/{id}");
        // There may be thousands of items, and the page of the conversation is read again with each step.
        let conversation = gateway.get("/threads/t").await;
        let shown = html(&conversation);
        assert!(!shown.contains("Delegated to") && shown.contains(&format!("href=\"{path}\"")), "{shown}");
        let shown = html(&gateway.get(&path).await).to_owned();
        for part in ["&lt;b&gt;fails", "refused the request", "waits", "/pause\"", "/cancel\"", "data-watch"]
        {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        assert_eq!(shown.matches("/retry\"").count(), 1, "only what failed: {shown}");
        let failed = gateway.get(&format!("{path}?status=failed")).await;
        assert!(html(&failed).contains("fails") && !html(&failed).contains("waits"), "{}", html(&failed));
        let none = gateway.get(&format!("{path}?status=succeeded")).await;
        assert!(html(&none).contains("No item has this status."));
        assert_eq!(gateway.get("/threads/t/batches/none").await.status, 404);
        // A batch may be another user's than its thread: the steps of its items are not shown.
        let executions = gateway.get("/api/threads/t/executions").await.ok();
        let item = executions["executions"][0]["execution_id"].as_str().unwrap();
        let steps = gateway.get(&format!("/api/threads/t/executions/{item}/steps")).await;
        steps.refused(404, &format!("Execution {item} not found"));
        gateway.create("other").await;
        let other = gateway.get(&format!("/threads/other/batches/{id}")).await;
        assert_eq!(other.status, 404, "a batch is one of its thread");

        gate(&name).open();
        let done = until(&gateway, &path, "&lt;b&gt;waited").await;
        let done = if done.contains("data-watch") { until(&gateway, &path, "completed").await } else { done };
        assert!(
            !done.contains("/pause\"") && !done.contains("/cancel\"") && done.contains("/retry\""),
            "{done}"
        );
        assert!(done.contains("5 tokens"), "{done}");
    }
}

#[tokio::test]
async fn another_users_batch_is_not_found() {
    let guarded = Guarded::with(setup("sqlite", "page-batches-of-users")).await;
    let (_, ann) = guarded.signed_in("ann").await;
    let (_, bob) = guarded.signed_in("bob").await;
    let token = guarded.token(&ann).await;
    let send = async |path: &str, body: Value| {
        let request = Request::builder().method(Method::POST).uri(path).header("cookie", &ann);
        let request = request.header("x-page-token", &token).header("content-type", "application/json");
        guarded.gateway.send(request.body(Body::from(body.to_string())).unwrap()).await.ok()
    };
    send("/api/threads", json!({"thread_id": "t"})).await;
    send("/api/threads/t/runs/wait", submission()).await;
    let batches = guarded.api(Method::GET, "/api/threads/t/subagent-batches", &ann, None).await.ok();
    let path = format!("/threads/t/batches/{}", batches[0]["id"].as_str().unwrap());
    assert!(html(&guarded.get(&path, &ann).await).contains("&lt;i&gt;Files"));
    let refused = guarded.get(&path, &bob).await;
    assert_eq!(refused.status, 404);
    assert!(!html(&refused).contains("Files"));
}

//! Batches over HTTP: what owners see and change, and what others do not.

use axum::body::{Body, BodyDataStream, Bytes};
use axum::http::{Method, Request};
use futures::StreamExt as _;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;
use threadkeep_config::{KeyFile, Role};
use threadkeep_testing::Log;

use crate::support::{Answer, DURABLE, Gateway, Setup, connect, question};

const BATCHES: &str = "/api/threads/t/subagent-batches";

/// A lead that submits the items, and subagents that answer.
fn script(items: &Value, answers: &Value) -> Value {
    let call = json!({"name": "batch_task", "args": {"title": "Files", "items": items,
        "subagent_type": "general-purpose"}});
    json!({"rules": [
        {"when": {"caller": "subagent"}, "answers": answers, "repeat_last": true},
        {"when": {"contains": ["submit"]}, "answers": [
            {"text": "", "tool_calls": [call]}, {"text": "Submitted."},
        ]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

fn items(number: usize) -> Value {
    (0..number).map(|n| json!({"key": format!("k{n}"), "prompt": format!("secret-prompt {n}")})).collect()
}

fn setup(backend: &'static str, mode: &'static str, script: Value) -> Setup {
    let sections =
        json!({"subagent_batches": {"enabled": true, "poll_interval_seconds": 0.1, "max_attempts": 1}});
    Setup { script, sections, ..Setup::on(backend, mode) }
}

/// The batch that a run of the thread `t` submitted.
async fn submitted(gateway: &Gateway) -> Value {
    gateway.create("t").await;
    let mut body = question("please submit");
    body["context"] = json!({"subagent_enabled": true});
    gateway.post("/api/threads/t/runs/wait", body).await.ok();
    gateway.get(BATCHES).await.ok()[0].clone()
}

/// A request with a key.
fn asked_by(key: &str, method: Method, path: &str, body: &Value) -> Request<Body> {
    let request = Request::builder().method(method).uri(path).header("x-api-key", key);
    request.header("content-type", "application/json").body(Body::from(body.to_string())).unwrap()
}

/// As [`submitted`], with a key; returns the batch's id.
async fn submitted_by(gateway: &Gateway, key: &str) -> String {
    let send = async |method: Method, path: &str, body: Value| {
        gateway.send(asked_by(key, method, path, &body)).await.ok()
    };
    send(Method::POST, "/api/threads", json!({"thread_id": "t"})).await;
    let mut body = question("please submit");
    body["context"] = json!({"subagent_enabled": true});
    send(Method::POST, "/api/threads/t/runs/wait", body).await;
    send(Method::GET, BATCHES, Value::Null).await[0]["id"].as_str().unwrap().to_owned()
}

async fn batch(gateway: &Gateway, id: &str) -> Value {
    gateway.get(&format!("{BATCHES}/{id}")).await.ok()
}

async fn until(gateway: &Gateway, id: &str, is: impl Fn(&Value) -> bool) -> Value {
    let found = async {
        loop {
            let batch = batch(gateway, id).await;
            if is(&batch) {
                return batch;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_mins(10), found).await.expect("never happened")
}

async fn ended(gateway: &Gateway, id: &str) -> Value {
    until(gateway, id, |batch| !batch["completed_at"].is_null()).await
}

/// Waits until the metrics say so: an attempt is counted after its end is stored.
async fn counted(gateway: &Gateway, line: &str) {
    let found = async {
        while !gateway.get("/metrics").await.ok().as_str().unwrap().contains(line) {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_mins(10), found).await.expect("it is not counted");
}

async fn act(gateway: &Gateway, id: &str, action: &str) -> Answer {
    gateway.call(Method::POST, &format!("{BATCHES}/{id}/{action}"), None).await
}

/// No text of it says what only workers may know.
fn assert_public(body: &Value) {
    let text = body.to_string();
    for secret in [
        "secret-prompt",
        "system_prompt",
        "execution_spec",
        "lease_",
        "user_id",
        "submission_key",
        "run_id",
        "tool_call_id",
    ] {
        assert!(!text.contains(secret), "{secret}: {text}");
    }
}

#[tokio::test]
async fn s60_owners_see_a_batch_and_its_items_and_nothing_that_is_the_workers() {
    for backend in DURABLE {
        let usage = json!({"input_tokens": 5, "output_tokens": 1});
        let answers = json!([{"text": "x".repeat(2_500), "usage": usage}]);
        let gateway = setup(backend, "delta", script(&items(3), &answers)).start().await;
        let first = submitted(&gateway).await;
        let id = first["id"].as_str().unwrap().to_owned();
        assert!(id.starts_with("subagent-batch-"), "{id}");
        let batch = ended(&gateway, &id).await;
        let keys: Vec<&String> = batch.as_object().unwrap().keys().collect();
        let mut expected = [
            "id",
            "thread_id",
            "title",
            "subagent_type",
            "status",
            "total_items",
            "max_live_items",
            "max_running_items",
            "max_attempts",
            "created_at",
            "updated_at",
            "completed_at",
            "counts",
        ];
        expected.sort_unstable();
        let mut sorted = keys.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, expected);
        assert_eq!(
            (&batch["status"], &batch["title"], &batch["total_items"]),
            (&json!("completed"), &json!("Files"), &json!(3))
        );
        let counts = json!({"pending": 0, "queued": 0, "leased": 0, "running": 0, "succeeded": 3, "failed": 0, "cancelled": 0});
        assert_eq!(batch["counts"], counts);
        let listed = gateway.get(&format!("{BATCHES}/{id}/items")).await.ok();
        assert_eq!(listed.as_array().unwrap().len(), 3);
        for (position, item) in listed.as_array().unwrap().iter().enumerate() {
            assert_eq!((&item["position"], &item["status"]), (&json!(position), &json!("succeeded")));
            assert_eq!(item["result_preview"].as_str().unwrap().len(), 2_000);
            assert_eq!(item["token_usage"]["total_tokens"], 6);
            assert!(item.get("result").is_none());
        }
        let request = Request::get(format!("{BATCHES}/{id}/results.jsonl")).body(Body::empty()).unwrap();
        let answer = gateway.open_answer(request).await;
        assert_eq!(answer.headers()["content-type"], "application/x-ndjson");
        let name = format!("attachment; filename=\"{id}-results.jsonl\"");
        assert_eq!(answer.headers()["content-disposition"], name.as_str());
        let bytes = axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
        let lines: Vec<Value> = String::from_utf8(bytes.to_vec())
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len(), 3);
        for (line, item) in lines.iter().zip(listed.as_array().unwrap()) {
            assert_eq!(line["result"].as_str().unwrap().len(), 2_500);
            assert_eq!((&line["id"], &line["token_usage"]), (&item["id"], &item["token_usage"]));
            assert_public(line);
        }
        assert_public(&batch);
        assert_public(&listed);
        // What batches used is in the sums of their thread, and in no run's.
        let usage = gateway.get("/api/threads/t/token-usage").await.ok();
        assert_eq!(
            (&usage["by_caller"]["subagent"], &usage["total_tokens"]),
            (&json!(18), &json!(18)),
            "{usage}"
        );
        let executions = gateway.get("/api/threads/t/executions").await.ok();
        assert_eq!(executions["executions"][0]["kind"], "batch_item");
        counted(&gateway, "threadkeep_batch_attempts_total{outcome=\"succeeded\"} 3").await;
        let features = gateway.get("/api/features").await.ok();
        let expected =
            json!({"enabled": true, "repository_available": true, "worker_running": true, "max_running": 3});
        assert_eq!(features["subagent_batches"], expected);
        gateway.delete("/api/threads/t").await.ok();
        assert_eq!(gateway.get(BATCHES).await.ok(), json!([]), "{backend}");
        gateway.get(&format!("{BATCHES}/{id}")).await.refused(404, "Subagent batch not found");
    }
}

#[tokio::test]
async fn s59_another_threads_and_another_users_batches_are_not_found() {
    for backend in DURABLE {
        let gateway = setup(backend, "delta", script(&items(2), &json!([{"text": "ok"}]))).start().await;
        let id = submitted(&gateway).await["id"].as_str().unwrap().to_owned();
        ended(&gateway, &id).await;
        gateway.create("other").await;
        let of_other = format!("/api/threads/other/subagent-batches/{id}");
        for path in [
            of_other.clone(),
            format!("{of_other}/items"),
            format!("{of_other}/results.jsonl"),
            format!("{BATCHES}/none"),
        ] {
            gateway.get(&path).await.refused(404, "Subagent batch not found");
        }
        for action in ["pause", "resume", "cancel", "items/x/retry"] {
            let answer = gateway.call(Method::POST, &format!("{of_other}/{action}"), None).await;
            answer.refused(404, "Subagent batch not found");
        }
        let path = format!("{BATCHES}/{id}/items");
        gateway.get(&format!("{path}?status=done")).await.refused(422, "Unknown batch item status");
        assert_eq!(gateway.get(&format!("{path}?status=failed")).await.ok(), json!([]));
        assert_eq!(gateway.get(&format!("{path}?offset=1&limit=1")).await.ok()[0]["position"], 1);
        for query in ["limit=0", "limit=501", "offset=-1", "limit=x"] {
            assert_eq!(gateway.get(&format!("{path}?{query}")).await.status, 422, "{query}");
        }
        for query in ["limit=0", "limit=101"] {
            assert_eq!(gateway.get(&format!("{BATCHES}?{query}")).await.status, 422, "{query}");
        }
    }
}

#[tokio::test]
async fn s59_a_batch_is_found_by_its_owner_alone() {
    for backend in DURABLE {
        let script = script(&items(1), &json!([{"text": "ok"}]));
        let mut wanted = setup(backend, "full", script);
        wanted.sections["auth"] = json!({"enabled": true});
        let gateway = wanted.start().await;
        let keys = KeyFile::new(&gateway.data().parent().unwrap().join("api-keys.json"));
        let key = |user| keys.create(user, Role::User).unwrap().1.expose().to_owned();
        let (ada, bob) = (key("ada"), key("bob"));
        let send = async |key: &str, method: Method, path: &str, body: Value| {
            gateway.send(asked_by(key, method, path, &body)).await
        };
        let id = submitted_by(&gateway, &ada).await;
        for path in [BATCHES.to_owned(), format!("{BATCHES}/{id}"), format!("{BATCHES}/{id}/results.jsonl")] {
            assert_eq!(send(&bob, Method::GET, &path, Value::Null).await.status, 404, "{path}");
            assert_eq!(send("nobody", Method::GET, &path, Value::Null).await.status, 401, "{path}");
        }
        assert_eq!(
            send(&bob, Method::POST, &format!("{BATCHES}/{id}/cancel"), Value::Null).await.status,
            404
        );
    }
}

/// The first line of an export, and the rest of it.
async fn begun(gateway: &Gateway, request: Request<Body>) -> (Bytes, BodyDataStream) {
    let mut lines = gateway.open_answer(request).await.into_body().into_data_stream();
    (lines.next().await.unwrap().unwrap(), lines)
}

/// To a client, an end without an error would be that of the whole export.
#[tokio::test]
async fn an_export_breaks_off_when_its_key_is_revoked() {
    let mut wanted = setup("postgres", "delta", script(&items(25), &json!([{"text": "ok"}])));
    wanted.sections["auth"] = json!({"enabled": true});
    let gateway = wanted.start().await;
    let keys = KeyFile::new(&gateway.data().parent().unwrap().join("api-keys.json"));
    let (record, key) = keys.create("ada", Role::User).unwrap();
    let id = submitted_by(&gateway, key.expose()).await;
    let path = format!("{BATCHES}/{id}/results.jsonl");
    let (_, rest) = begun(&gateway, asked_by(key.expose(), Method::GET, &path, &Value::Null)).await;
    // The next read waits until the key is looked at again.
    let mut held = gateway.postgres().await;
    let lock = held.transaction().await.unwrap();
    let sql = "LOCK TABLE threadkeep_gateway_subagent_batch_items IN ACCESS EXCLUSIVE MODE";
    lock.batch_execute(sql).await.unwrap();
    keys.revoke(&record.id).unwrap();
    let rest = rest.collect::<Vec<_>>();
    let rest = tokio::time::timeout(std::time::Duration::from_mins(10), rest).await.expect("it goes on");
    let ended = rest.last().unwrap().as_ref().unwrap_err().to_string();
    assert!(rest.len() < 25 && ended.contains("revoked"), "{ended}");
}

/// The client sees only that its connection breaks.
#[tokio::test]
async fn an_export_that_cannot_be_read_to_its_end_breaks_off_and_is_in_the_log() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
    let _logged = tracing::subscriber::set_default(subscriber);
    let script = script(&items(25), &json!([{"text": "ok"}]));
    let gateway = setup("sqlite", "delta", script).start().await;
    let id = submitted(&gateway).await["id"].as_str().unwrap().to_owned();
    let request = Request::get(format!("{BATCHES}/{id}/results.jsonl")).body(Body::empty()).unwrap();
    let (first, rest) = begun(&gateway, request).await;
    let line: Value = serde_json::from_slice(&first).expect("one line");
    assert_eq!(line["position"], 0);
    let sql = "ALTER TABLE subagent_batch_items RENAME TO away";
    connect(&gateway.data().join("gateway.db")).execute_batch(sql).unwrap();
    let rest: Vec<_> = rest.collect().await;
    assert!(rest.len() < 25 && rest.last().unwrap().is_err(), "{rest:?}");
    assert_eq!(log.count("Failed to read subagent batches"), 1, "{}", log.text());
}

#[tokio::test]
async fn s55_a_batch_is_paused_resumed_and_cancelled_and_a_failed_item_tried_again() {
    for backend in DURABLE {
        let name = format!("batches-{backend}");
        let answers = json!([{"text": "ok", "gate": {"name": name}}]);
        let mut wanted = setup(backend, "delta", script(&items(3), &answers));
        wanted.sections["subagent_runtime"] = json!({"max_running": 1});
        let gateway = wanted.start().await;
        let id = submitted(&gateway).await["id"].as_str().unwrap().to_owned();
        gate(&name).reached().await;
        assert_eq!(act(&gateway, &id, "pause").await.ok()["status"], "paused");
        gate(&name).open();
        // What runs ends, and nothing else begins.
        let paused = until(&gateway, &id, |batch| batch["counts"]["succeeded"] == 1).await;
        assert_eq!((&paused["status"], &paused["counts"]["running"]), (&json!("paused"), &json!(0)));
        assert_eq!(act(&gateway, &id, "resume").await.ok()["status"], "queued");
        ended(&gateway, &id).await;
        for action in ["pause", "resume", "cancel"] {
            assert_eq!(act(&gateway, &id, action).await.ok()["status"], "completed", "{action}");
        }
        let items = gateway.get(&format!("{BATCHES}/{id}/items")).await.ok();
        let item = items[0]["id"].as_str().unwrap();
        act(&gateway, &id, &format!("items/{item}/retry"))
            .await
            .refused(409, "Only failed items can be retried");
        act(&gateway, &id, "items/none/retry").await.refused(409, "Only failed items can be retried");
    }
}

#[tokio::test]
async fn s57_a_failed_item_is_tried_again_over_http() {
    for backend in DURABLE {
        let answers = json!([{"error": {"kind": "fatal", "message": "no"}}]);
        let gateway = setup(backend, "delta", script(&items(1), &answers)).start().await;
        let id = submitted(&gateway).await["id"].as_str().unwrap().to_owned();
        assert_eq!(ended(&gateway, &id).await["status"], "failed");
        let item = gateway.get(&format!("{BATCHES}/{id}/items")).await.ok()[0].clone();
        assert!(item["error"].as_str().unwrap().contains("no"), "{item}");
        let path = format!("items/{}/retry", item["id"].as_str().unwrap());
        let again = act(&gateway, &id, &path).await.ok();
        assert_eq!(
            (&again["status"], &again["attempt"], &again["error"]),
            (&json!("pending"), &json!(0), &Value::Null)
        );
        let ended = ended(&gateway, &id).await;
        assert_eq!((&ended["status"], &ended["counts"]["failed"]), (&json!("failed"), &json!(1)));
    }
}

#[tokio::test]
async fn without_a_worker_or_a_sql_database_batches_say_so() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    for path in [BATCHES.to_owned(), format!("{BATCHES}/x"), format!("{BATCHES}/x/items")] {
        gateway.get(&path).await.refused(503, "Subagent batch repository not available");
    }
    let expected = json!({"enabled": false, "repository_available": false, "worker_running": false});
    assert_eq!(gateway.get("/api/features").await.ok()["subagent_batches"], expected);
    let gateway = Setup::on("sqlite", "full").start().await;
    gateway.create("t").await;
    assert_eq!(gateway.get(BATCHES).await.ok(), json!([]));
    act(&gateway, "x", "cancel").await.refused(503, "Subagent batch worker is not running");
    act(&gateway, "x", "pause").await.refused(404, "Subagent batch not found");
}

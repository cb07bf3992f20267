//! API keys: who is admitted, and whose threads they see.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request};
use futures::SinkExt as _;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;
use threadkeep_config::{KeyFile, Role};
use threadkeep_testing::Log;

use crate::sse::Frames;
use crate::support::{Answer, Gateway, MODES, Setup, connect, question, texts};

/// A gateway with authentication, and its key file.
struct Guarded {
    gateway: Gateway,
    keys: KeyFile,
}

/// Requests with a key.
struct As<'a>(&'a Gateway, String);

impl As<'_> {
    async fn call(&self, method: Method, path: &str, body: Option<Value>) -> Answer {
        let request = Request::builder().method(method).uri(path).header("x-api-key", &self.1);
        let request = match body {
            Some(body) => request.header("content-type", "application/json").body(body.to_string().into()),
            None => request.body(Body::empty()),
        };
        self.0.send(request.unwrap()).await
    }

    async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path, None).await
    }

    async fn post(&self, path: &str, body: Value) -> Answer {
        self.call(Method::POST, path, Some(body)).await
    }

    /// The ids and the count of the threads that a search finds.
    async fn threads(&self) -> (Vec<String>, Value) {
        let found = self.post("/api/threads/search", json!({})).await.ok();
        let found = found.as_array().unwrap().iter().map(|thread| thread["thread_id"].as_str().unwrap());
        let mut found: Vec<String> = found.map(str::to_owned).collect();
        found.sort();
        (found, self.post("/api/threads/count", json!({})).await.ok())
    }
}

impl Guarded {
    async fn start(setup: Setup) -> Self {
        let mut setup = setup;
        setup.sections["auth"] = json!({"enabled": true});
        let gateway = setup.start().await;
        let keys = KeyFile::new(&gateway.data().parent().unwrap().join("api-keys.json"));
        Self { gateway, keys }
    }

    fn caller(&self, user: &str, role: Role) -> As<'_> {
        As(&self.gateway, self.keys.create(user, role).unwrap().1.expose().to_owned())
    }
}

const REFUSED: &str = r#"{"detail":{"code":"not_authenticated","message":"Authentication required"}}"#;

#[tokio::test]
async fn nobody_gets_in_without_a_key_that_stands() {
    let guarded = Guarded::start(Setup::default()).await;
    let gateway = &guarded.gateway;
    let (record, key) = guarded.keys.create("ann", Role::User).unwrap();
    let send = async |headers: &[(&str, &str)], path: &str| {
        let mut request = Request::get(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        gateway.send(request.body(Body::empty()).unwrap()).await
    };
    let bearer = format!("Bearer {}", key.expose());
    for headers in [vec![("x-api-key", key.expose())], vec![("authorization", bearer.as_str())]] {
        send(&headers, "/api/models").await.ok();
        send(&headers, "/api/langgraph/models").await.ok();
    }
    let wrong = key.expose().replace("tk_", "tk_0");
    for headers in [
        vec![],
        vec![("x-api-key", "")],
        vec![("x-api-key", wrong.as_str())],
        vec![("authorization", key.expose())],
        vec![("cookie", bearer.as_str())],
    ] {
        for path in ["/api/models", "/api/langgraph/models", "/api/threads/t", "/api/nothing", "/metrics"] {
            let answer = send(&headers, path).await;
            assert_eq!(
                (answer.status, answer.body.to_string().as_str()),
                (401, REFUSED),
                "{path} {headers:?}"
            );
            assert_eq!(answer.headers["www-authenticate"], "Bearer");
        }
        for path in ["/health", "/openapi.json"] {
            send(&headers, path).await.ok();
        }
    }
    let answer = gateway.post("/api/threads", json!({"thread_id": "t"})).await;
    assert_eq!(answer.status, 401, "before the body is looked at");
    guarded.keys.revoke(&record.id).unwrap();
    assert_eq!(send(&[("x-api-key", key.expose())], "/api/models").await.status, 401);
}

/// Every operation of the OpenAPI document needs a key, so that none is forgotten.
#[tokio::test]
async fn every_described_operation_needs_a_key_but_the_public_ones() {
    let guarded = Guarded::start(Setup::default()).await;
    let document = guarded.gateway.get("/openapi.json").await.ok();
    for (path, item) in document["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys() {
            let method: Method = method.to_uppercase().parse().unwrap();
            let called = path.replace(['{', '}'], "");
            let status = guarded.gateway.call(method.clone(), &called, None).await.status;
            assert_eq!(status == 401, path != "/health", "{method} {path}: {status}");
        }
    }
}

/// For another user, every operation on a thread answers as if the thread did not exist.
#[tokio::test]
async fn another_users_thread_is_not_found_on_any_route() {
    for mode in MODES {
        let guarded = Guarded::start(Setup::on("sqlite", mode)).await;
        let (ann, bob) = (guarded.caller("ann", Role::User), guarded.caller("bob", Role::Admin));
        ann.post("/api/threads", json!({"thread_id": "t", "metadata": {"a": 1}})).await.ok();
        ann.post("/api/threads/t/runs/wait", question("hello")).await.ok();
        let run = ann.get("/api/threads/t/runs").await.ok()[0]["run_id"].as_str().unwrap().to_owned();
        let state = ann.get("/api/threads/t/state").await.ok();
        let before = guarded.gateway.rows().await;

        let document = guarded.gateway.get("/openapi.json").await.ok();
        let mut tried = 0;
        for (path, item) in document["paths"].as_object().unwrap() {
            if !path.contains("{thread_id}") {
                continue;
            }
            let checkpoint = state["checkpoint_id"].as_str().unwrap();
            let path = path
                .replace("{thread_id}", "t")
                .replace("{run_id}", &run)
                .replace("{checkpoint_id}", checkpoint);
            for method in item.as_object().unwrap().keys() {
                let method: Method = method.to_uppercase().parse().unwrap();
                for path in [path.clone(), path.replacen("/api/", "/api/langgraph/", 1)] {
                    let body = (method != Method::GET && method != Method::DELETE).then(|| question("mine"));
                    let answer = bob.call(method.clone(), &path, body).await;
                    answer.refused(404, "Thread t not found");
                    tried += 1;
                }
            }
        }
        assert!(tried > 40, "{tried}");
        let named = json!({"configurable": {"thread_id": "t"}});
        for path in ["/api/runs", "/api/runs/stream", "/api/runs/wait"] {
            let mut body = question("mine");
            body["config"] = named.clone();
            bob.post(path, body).await.refused(404, "Thread t not found");
        }
        bob.post("/api/threads", json!({"thread_id": "t"})).await.refused(404, "Thread t not found");
        let raise = json!({"thread_id": "t", "if_exists": "raise"});
        bob.post("/api/threads", raise).await.refused(404, "Thread t not found");
        let cancel = json!({"thread_id": "t", "status": "all"});
        bob.post("/api/runs/cancel", cancel).await.refused(404, "Thread t not found");
        assert_eq!(guarded.gateway.rows().await, before, "nothing was written");
        assert_eq!(ann.get("/api/threads/t/state").await.ok(), state);
    }
}

/// A reserved key and an unknown model are refused before the thread's owner is checked, malformed messages after.
#[tokio::test]
async fn a_stateless_request_is_checked_in_the_order_of_the_contract() {
    let guarded = Guarded::start(Setup::default()).await;
    let (ann, bob) = (guarded.caller("ann", Role::User), guarded.caller("bob", Role::User));
    ann.post("/api/threads", json!({"thread_id": "t"})).await.ok();
    let message = json!({"messages": [{"role": "wizard", "content": "x"}]});
    let mut body = json!({"input": message, "config": {"configurable": {"thread_id": "t"}}});
    for path in ["/api/runs", "/api/runs/stream", "/api/runs/wait"] {
        bob.post(path, body.clone()).await.refused(404, "Thread t not found");
    }
    body["context"] = json!({"model_name": "gpt-9"});
    for path in ["/api/runs", "/api/runs/stream", "/api/runs/wait"] {
        let refused = bob.post(path, body.clone()).await;
        refused.refused(400, "Model 'gpt-9' is not in the configured model allowlist");
    }
    body["metadata"] = json!({"auth_token": "hunter2"});
    for path in ["/api/runs", "/api/runs/stream", "/api/runs/wait"] {
        assert_eq!(bob.post(path, body.clone()).await.status, 422, "{path}");
    }
}

/// Metadata may have the size of a body.
#[tokio::test]
async fn a_request_asks_whose_a_thread_is_without_reading_its_metadata() {
    let guarded = Guarded::start(Setup::on("sqlite", "delta")).await;
    let (ann, bob) = (guarded.caller("ann", Role::User), guarded.caller("bob", Role::User));
    ann.post("/api/threads", json!({"thread_id": "t"})).await.ok();
    let database = connect(&guarded.gateway.data().join("gateway.db"));
    database.execute_batch("UPDATE threads_meta SET metadata_json = '{'").unwrap();
    assert!(ann.get("/api/threads/t").await.status >= 500, "it cannot be read");
    assert_eq!(ann.get("/api/threads/t/runs").await.ok(), json!([]));
    bob.get("/api/threads/t/runs").await.refused(404, "Thread t not found");
}

/// Also while a run works on it, which nobody else learns.
#[tokio::test]
async fn another_users_thread_in_a_body_is_not_found_either() {
    for mode in MODES {
        let name = format!("auth-body-{mode}");
        let late =
            json!({"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": name}}]});
        let script = json!({"rules": [late, {"answers": [{"text": "hi"}]}]});
        let guarded = Guarded::start(Setup { script, ..Setup::on("sqlite", mode) }).await;
        let (ann, bob) = (guarded.caller("ann", Role::User), guarded.caller("bob", Role::Admin));
        ann.post("/api/threads", json!({"thread_id": "t"})).await.ok();
        ann.post("/api/threads/t/runs/wait", question("hello")).await.ok();
        let run = ann.post("/api/threads/t/runs", question("wait")).await.ok();
        let run = run["run_id"].as_str().unwrap();
        gate(&name).reached().await;
        for is_busy in [true, false] {
            if !is_busy {
                gate(&name).open();
                ann.get(&format!("/api/threads/t/runs/{run}/join")).await.ok();
            }
            for strategy in ["delete", "keep_latest"] {
                let prune = json!({"thread_ids": ["t"], "strategy": strategy});
                let pruned = bob.post("/api/threads/prune", prune).await.ok();
                let expected = json!({"pruned_count": 0, "not_found": ["t"], "busy": []});
                assert_eq!(pruned, expected, "{mode} {is_busy} {strategy}");
            }
            let (mut on, mut named) = (question("mine"), question("mine"));
            on["thread_id"] = json!("t");
            named["config"] = json!({"configurable": {"thread_id": "t"}});
            for body in [on, named] {
                let refused = bob.post("/api/runs/batch", json!([body])).await;
                refused.refused(404, "Run 0 of the batch: Thread t not found");
            }
            let cancel = json!({"thread_id": "t", "run_ids": [run]});
            bob.post("/api/runs/cancel", cancel).await.refused(404, "Thread t not found");
            assert_eq!(bob.post("/api/threads/search", json!({"ids": ["t"]})).await.ok(), json!([]));
            assert_eq!(bob.post("/api/threads/count", json!({"ids": ["t"]})).await.ok(), json!(0));
        }
        let state = ann.get("/api/threads/t/state").await.ok();
        assert_eq!(texts(&state), ["hello", "hi", "wait", "late"], "{mode}");
        let runs = ann.get("/api/threads/t/runs").await.ok();
        assert!(runs.as_array().unwrap().iter().all(|run| run["status"] == "success"), "{runs}");
    }
}

/// A request is authorized against the thread as it is when the request touches it, not as it was when the first byte
/// arrived.
#[tokio::test]
async fn a_body_that_arrives_slowly_does_not_open_a_thread_that_was_created_meanwhile() {
    for mode in MODES {
        let guarded = Guarded::start(Setup::on("sqlite", mode)).await;
        let (ann, bob) = (guarded.caller("ann", Role::User), guarded.caller("bob", Role::Admin));
        let document = guarded.gateway.get("/openapi.json").await.ok();
        let mut routes = Vec::new();
        for (path, item) in document["paths"].as_object().unwrap() {
            let methods =
                item.as_object().unwrap().keys().map(|method| method.to_uppercase().parse().unwrap());
            let with_body = methods.filter(|method| !matches!(*method, Method::GET));
            routes.extend(
                with_body.filter(|_| path.contains("{thread_id}")).map(|method| (path.clone(), method)),
            );
        }
        assert!(routes.len() > 15, "{}", routes.len());
        for (number, (path, method)) in routes.into_iter().enumerate() {
            let thread = format!("t{number}");
            let path =
                path.replace("{thread_id}", &thread).replace("{run_id}", "r").replace("{checkpoint_id}", "c");
            let (mut sent, body) = futures::channel::mpsc::channel::<Result<String, io::Error>>(0);
            let request = Request::builder().method(method.clone()).uri(&path).header("x-api-key", &bob.1);
            let request =
                request.header("content-type", "application/json").body(Body::from_stream(body)).unwrap();
            let text = question("mine").to_string();
            let (first, rest) = text.split_at(1);
            let answer = guarded.gateway.send(request);
            let meanwhile = async {
                // The channel has no room: this returns once the byte is taken.
                sent.send(Ok(first.to_owned())).await.unwrap();
                assert!(!sent.is_closed(), "the rest of the body is not waited for");
                ann.post("/api/threads", json!({"thread_id": thread})).await.ok();
                ann.post(&format!("/api/threads/{thread}/runs/wait"), question("secret")).await.ok();
                let state = ann.get(&format!("/api/threads/{thread}/state")).await.ok();
                sent.send(Ok(rest.to_owned())).await.unwrap();
                drop(sent);
                state
            };
            let (answer, state) = tokio::join!(answer, meanwhile);
            assert_eq!(answer.status, 404, "{method} {path}: {}", answer.body);
            assert!(!answer.body.to_string().contains("secret"), "{method} {path}: {}", answer.body);
            assert_eq!(ann.get(&format!("/api/threads/{thread}/state")).await.ok(), state, "{method} {path}");
        }
    }
}

/// Otherwise a client could open requests now and use a key after it is revoked.
#[tokio::test]
async fn a_key_that_is_revoked_while_the_body_arrives_admits_nothing() {
    let guarded = Guarded::start(Setup::default()).await;
    let (record, key) = guarded.keys.create("ann", Role::User).unwrap();
    let (mut sent, body) = futures::channel::mpsc::channel::<Result<String, io::Error>>(0);
    let request = Request::builder().method(Method::POST).uri("/api/threads/t/runs/wait");
    let request = request.header("x-api-key", key.expose()).header("content-type", "application/json");
    let answer = guarded.gateway.send(request.body(Body::from_stream(body)).unwrap());
    let text = question("late").to_string();
    let (first, rest) = text.split_at(1);
    let meanwhile = async {
        // The channel has no room: this returns once the byte is taken.
        sent.send(Ok(first.to_owned())).await.unwrap();
        assert!(!sent.is_closed(), "the rest of the body is not waited for");
        guarded.keys.revoke(&record.id).unwrap();
        sent.send(Ok(rest.to_owned())).await.unwrap();
        drop(sent);
    };
    let (answer, ()) = tokio::join!(answer, meanwhile);
    assert_eq!((answer.status, answer.body.to_string().as_str()), (401, REFUSED));
    let ann = guarded.caller("ann", Role::User);
    assert_eq!(ann.threads().await, (vec![], json!(0)), "nothing was created");
}

#[tokio::test]
async fn threads_are_found_and_counted_by_those_who_may_see_them() {
    let guarded = Guarded::start(Setup::on("sqlite", "full")).await;
    let (ann, bob) = (guarded.caller("ann", Role::User), guarded.caller("bob", Role::User));
    ann.post("/api/threads", json!({"thread_id": "a1"})).await.ok();
    bob.post("/api/threads", json!({"thread_id": "b1"})).await.ok();
    ann.call(Method::PUT, "/api/threads/a2/goal", Some(json!({"objective": "x"}))).await.ok();
    let mut stateless = question("hello");
    stateless["config"] = json!({"configurable": {"thread_id": "b2"}});
    bob.post("/api/runs/wait", stateless).await.ok();
    ann.post("/api/threads/a1/runs/wait", question("hello")).await.ok();
    let copy = ann.post("/api/threads/a1/copy", json!({})).await.ok();
    let copy = copy["thread_id"].as_str().unwrap().to_owned();

    let mut of_ann = vec!["a1".to_owned(), "a2".to_owned(), copy];
    of_ann.sort();
    assert_eq!(ann.threads().await, (of_ann.clone(), json!(3)));
    assert_eq!(bob.threads().await, (vec!["b1".to_owned(), "b2".to_owned()], json!(2)));
    // Another key of the same user is the same user.
    assert_eq!(guarded.caller("ann", Role::Admin).threads().await, (of_ann, json!(3)));
    ann.call(Method::DELETE, "/api/threads/a1", None).await.ok();
    bob.post("/api/threads", json!({"thread_id": "a1"})).await.ok();
    ann.get("/api/threads/a1").await.refused(404, "Thread a1 not found");
}

/// Threads from before authentication belong to the user `default`; rows without an owner are shared.
#[tokio::test]
async fn switching_authentication_on_keeps_each_thread_with_its_owner() {
    let mut gateway = Setup::on("sqlite", "full").start().await;
    gateway.create("mine").await;
    gateway.create("shared").await;
    gateway.reconfigure(|setup| setup.sections["auth"] = json!({"enabled": true}));
    assert_eq!(gateway.get("/api/threads/mine").await.status, 200, "read at start only");
    let gateway = gateway
        .reopen_after("full", |data| async move {
            let db = crate::support::connect(&data.join("gateway.db"));
            let sql = "UPDATE threads_meta SET user_id = NULL WHERE thread_id = 'shared'";
            db.execute_batch(sql).unwrap();
        })
        .await;
    let keys = KeyFile::new(&gateway.data().parent().unwrap().join("api-keys.json"));
    let key = |user| keys.create(user, Role::User).unwrap().1.expose().to_owned();
    let (default, ann) = (As(&gateway, key("default")), As(&gateway, key("ann")));
    assert_eq!(default.threads().await.0, ["mine", "shared"]);
    assert_eq!(ann.threads().await.0, ["shared"]);
    ann.get("/api/threads/shared").await.ok();
    ann.get("/api/threads/mine").await.refused(404, "Thread mine not found");
}

#[tokio::test]
async fn cancelling_many_stops_the_callers_runs_only() {
    let script = json!({"rules": [{"answers": [{"text": "late", "gate": {"name": "auth-cancel"}}]}]});
    let guarded = Guarded::start(Setup { script, ..Setup::default() }).await;
    let (ann, bob) = (guarded.caller("ann", Role::User), guarded.caller("bob", Role::Admin));
    let mut runs = Vec::new();
    for (caller, thread) in [(&ann, "a"), (&bob, "b")] {
        caller.post("/api/threads", json!({ "thread_id": thread })).await.ok();
        let run = caller.post(&format!("/api/threads/{thread}/runs"), question("x")).await.ok();
        runs.push(format!("/api/threads/{thread}/runs/{}", run["run_id"].as_str().unwrap()));
    }
    assert_eq!(bob.post("/api/runs/cancel", json!({"status": "all"})).await.status, 204);
    assert_eq!(bob.get(&runs[1]).await.ok()["status"], "interrupted");
    assert_ne!(ann.get(&runs[0]).await.ok()["status"], "interrupted");
    gate("auth-cancel").open();
    ann.get(&format!("{}/join", runs[0])).await.ok();
    assert_eq!(ann.get(&runs[0]).await.ok()["status"], "success");
}

#[tokio::test]
async fn another_users_run_is_not_found_without_its_thread_either() {
    let guarded = Guarded::start(Setup::default()).await;
    let (ann, bob) = (guarded.caller("ann", Role::User), guarded.caller("bob", Role::Admin));
    let run = ann.post("/api/runs", question("hello")).await.ok();
    let (thread, run) = (run["thread_id"].as_str().unwrap(), run["run_id"].as_str().unwrap());
    ann.get(&format!("/api/threads/{thread}/runs/{run}/join")).await.ok();
    let stream = format!("/api/runs/{run}/stream");
    assert_eq!(ann.get(&stream).await.status, 200);
    bob.get(&stream).await.refused(404, &format!("Run {run} not found"));
}

/// The same idempotency key from two users on a shared thread makes two requests.
#[tokio::test]
async fn an_idempotency_key_is_its_users() {
    let gateway = Setup::on("sqlite", "full").start().await;
    gateway.create("t").await;
    let mut gateway = gateway;
    gateway.reconfigure(|setup| setup.sections["auth"] = json!({"enabled": true}));
    let gateway = gateway
        .reopen_after("full", |data| async move {
            let db = crate::support::connect(&data.join("gateway.db"));
            db.execute_batch("UPDATE threads_meta SET user_id = NULL").unwrap();
        })
        .await;
    let keys = KeyFile::new(&gateway.data().parent().unwrap().join("api-keys.json"));
    let mut runs = Vec::new();
    for user in ["ann", "bob", "ann"] {
        let key = keys.create(user, Role::User).unwrap().1;
        let request = Request::post("/api/threads/t/runs/wait")
            .header("x-api-key", key.expose())
            .header("idempotency-key", "once")
            .header("content-type", "application/json");
        let answer = gateway.send(request.body(question("x").to_string().into()).unwrap()).await;
        runs.push(answer.headers["content-location"].to_str().unwrap().to_owned());
        answer.ok();
    }
    assert_eq!(runs[0], runs[2]);
    assert_ne!(runs[0], runs[1]);
}

#[tokio::test]
async fn keys_that_cannot_be_read_let_nobody_in() {
    let guarded = Guarded::start(Setup::default()).await;
    let ann = guarded.caller("ann", Role::User);
    ann.get("/api/models").await.ok();
    let file = guarded.gateway.data().parent().unwrap().join("api-keys.json");
    std::fs::write(&file, "{").unwrap();
    ann.get("/api/models").await.refused(503, "Authentication is not available");
    guarded.gateway.get("/health").await.ok();
    std::fs::remove_file(&file).unwrap();
    assert_eq!(ann.get("/api/models").await.status, 401);
}

/// Every file under a directory.
fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

fn contains(bytes: &[u8], part: &str) -> bool {
    bytes.windows(part.len()).any(|window| window == part.as_bytes())
}

/// Neither the API key of a request nor a secret in its body appears in any file, log line, error or answer.
#[tokio::test]
async fn no_secret_is_stored_logged_or_shown() {
    for mode in MODES {
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE);
        let subscriber = subscriber.with_writer(log.clone()).finish();
        let _logged = tracing::subscriber::set_default(subscriber);

        let events = if mode == "full" { "db" } else { "jsonl" };
        let guarded = Guarded::start(Setup { events, ..Setup::on("sqlite", mode) }).await;
        let ann = guarded.caller("ann", Role::User);
        let secret = "s3cr3t-of-the-caller";
        ann.post("/api/threads", json!({"thread_id": "t"})).await.ok();
        let mut body = question("hello");
        body["config"] = json!({"configurable": {"erp_token": secret, "api_key": secret}, "metadata": {"password": secret}});
        body["context"] = json!({"github_token": secret, "mine": {"token": secret}});
        let mut shown = ann.post("/api/threads/t/runs/wait", body).await.ok().to_string();
        let runs = ann.get("/api/threads/t/runs").await.ok();
        let run = runs[0]["run_id"].as_str().unwrap().to_owned();
        shown += &runs.to_string();
        for path in ["", "/state", &format!("/runs/{run}/events"), &format!("/runs/{run}"), "/token-usage"] {
            shown += &ann.get(&format!("/api/threads/t{path}")).await.ok().to_string();
        }
        shown += &ann.post("/api/threads/t/history", json!({})).await.ok().to_string();
        // Refused in every way.
        let refused = ann.post("/api/threads/t/runs", json!({"context": {"secrets": {"ERP": secret}}})).await;
        assert_eq!(refused.status, 422, "{mode}");
        shown += &refused.body.to_string();
        shown += &ann.get("/api/threads/other").await.body.to_string();
        shown += &ann
            .post("/api/threads/t/runs", json!({"input": 5, "metadata": {"token": secret}}))
            .await
            .body
            .to_string();
        let wrong = As(&guarded.gateway, format!("{}0", ann.1));
        shown += &wrong.get("/api/models").await.body.to_string();

        let root = guarded.gateway.data().parent().unwrap().to_owned();
        // Something to log: the key file is unreadable for a moment.
        let keys = root.join("api-keys.json");
        let stored = std::fs::read(&keys).unwrap();
        std::fs::write(&keys, [b"[", stored.as_slice()].concat()).unwrap();
        let refused = ann.get("/api/models").await;
        assert_eq!(refused.status, 503, "{mode}: {}", refused.body);
        shown += &refused.body.to_string();
        std::fs::write(&keys, stored).unwrap();
        let log = log.text();
        let random = ann.1.rsplit('_').next().unwrap();
        for hidden in [random, secret] {
            assert!(!shown.contains(hidden), "{mode}: an answer shows {hidden}: {shown}");
            assert!(!log.contains(hidden), "{mode}: the log shows {hidden}");
            for file in files(&root) {
                let content = std::fs::read(&file).unwrap();
                assert!(!contains(&content, hidden), "{mode}: {hidden} is in {}", file.display());
            }
        }
        assert!(
            log.contains("cannot authenticate requests"),
            "{mode}: the refusal is not in the log:\n{log}"
        );
    }
}

/// A browser sends whatever a page asks for: without keys, pages of other sites change nothing.
#[tokio::test]
async fn without_keys_other_sites_and_other_names_are_refused() {
    let variables = vec![("GATEWAY_CORS_ORIGINS", "http://app.example".to_owned())];
    let gateway = Setup { variables, ..Setup::default() }.start().await;
    let send = async |method: Method, headers: &[(&str, &str)]| {
        let mut request = Request::builder().method(method).uri("/api/threads/search");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        gateway.send(request.body(Body::from("{}")).unwrap()).await
    };
    let host = ("host", "127.0.0.1:8001");
    let cross_site =
        "Cross-site request denied. List the origins whose pages may use the API in GATEWAY_CORS_ORIGINS.";
    send(Method::POST, &[host]).await.ok();
    send(Method::POST, &[host, ("origin", "http://127.0.0.1:8001")]).await.ok();
    send(Method::POST, &[host, ("origin", "http://app.example")]).await.ok();
    send(Method::POST, &[host, ("origin", "http://evil.example")]).await.refused(403, cross_site);
    send(Method::POST, &[host, ("sec-fetch-site", "cross-site")]).await.refused(403, cross_site);
    let rebound = send(Method::POST, &[("host", "evil.example:8001")]).await;
    assert_eq!(rebound.status, 403, "{}", rebound.body);
    assert!(
        rebound.body["detail"].as_str().unwrap().contains("auth.allow_unauthenticated"),
        "{}",
        rebound.body
    );

    let sections = json!({"auth": {"allow_unauthenticated": true}});
    let open = Setup { sections, ..Setup::default() }.start().await;
    let request = Request::get("/api/models").header("host", "agents.example").body(Body::empty()).unwrap();
    open.send(request).await.ok();

    // With keys, a page needs one, and may then come from any site.
    let guarded = Guarded::start(Setup::default()).await;
    let key = guarded.caller("ann", Role::User).1;
    let request = Request::post("/api/threads/search")
        .header("host", "agents.example")
        .header("origin", "http://evil.example");
    let answer = guarded.gateway.send(request.header("x-api-key", key).body(Body::from("{}")).unwrap()).await;
    answer.ok();
}

/// A browser sends no key when it asks whether a page may send one, and shows the page no answer that does not allow
/// it: not even why it was refused.
#[tokio::test]
async fn a_page_of_a_listed_origin_may_ask_without_a_key_and_reads_why_it_is_refused() {
    let variables = vec![("GATEWAY_CORS_ORIGINS", "http://app.example".to_owned())];
    let guarded = Guarded::start(Setup { variables, ..Setup::default() }).await;
    let key = guarded.caller("ann", Role::User).1;
    let asks =
        vec![("access-control-request-method", "GET"), ("access-control-request-headers", "x-api-key")];
    let with_key = || vec![("x-api-key", key.as_str())];
    for (method, path, headers, status) in [
        (Method::OPTIONS, "/api/models", asks, 200),
        (Method::GET, "/api/models", vec![], 401),
        (Method::GET, "/api/models", vec![("x-api-key", "tk_wrong")], 401),
        (Method::GET, "/api/models", with_key(), 200),
        (Method::GET, "/api/nothing", with_key(), 404),
        (Method::GET, "/api/threads/a.b", with_key(), 422),
    ] {
        let mut request = Request::builder().method(method).uri(path).header("origin", "http://app.example");
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let answer = guarded.gateway.send(request.body(Body::empty()).unwrap()).await;
        assert_eq!(answer.status, status, "{path}");
        assert_eq!(answer.headers["access-control-allow-origin"], "http://app.example", "{status} {path}");
    }
}

/// The run is treated as if its client had disconnected.
#[tokio::test]
async fn a_stream_and_a_wait_end_when_their_key_is_revoked_and_those_of_others_go_on() {
    for mode in MODES {
        let name = format!("auth-revoked-{mode}");
        let script = json!({"rules": [{"answers": [{"text": "late", "gate": {"name": name}}]}]});
        let guarded = Guarded::start(Setup { script, ..Setup::on("memory", mode) }).await;
        let (gateway, keys) = (&guarded.gateway, &guarded.keys);
        let ((lost, lost_key), (_, kept)) =
            (keys.create("ann", Role::User).unwrap(), keys.create("ann", Role::User).unwrap());
        let (lost_key, kept) = (lost_key.expose(), kept.expose());
        let ann = As(gateway, kept.to_owned());
        for thread in ["left", "stays", "waits"] {
            ann.post("/api/threads", json!({"thread_id": thread})).await.ok();
        }
        let send = async |key: &str, thread: &str, form: &str| {
            let request = Request::post(format!("/api/threads/{thread}/runs/{form}"))
                .header("content-type", "application/json")
                .header("x-api-key", key);
            gateway.open_answer(request.body(question("hello").to_string().into()).unwrap()).await
        };
        let mut left = Frames::of(send(lost_key, "left", "stream").await);
        left.until("values").await;
        let mut stays = Frames::of(send(kept, "stays", "stream").await);
        stays.until("values").await;
        let ending = async {
            let (waited, ()) = tokio::join!(send(lost_key, "waits", "wait"), async {
                while ann.get("/api/threads/waits/runs").await.ok().as_array().unwrap().is_empty() {}
                keys.revoke(&lost.id).unwrap();
            });
            (waited.status(), left.rest().await)
        };
        let (status, rest) = tokio::time::timeout(Duration::from_mins(10), ending).await.expect("they go on");
        assert_eq!(status, 401);
        assert_eq!(rest, [], "{mode}: the stream ends, and nothing follows");
        for thread in ["left", "waits"] {
            let run = ann.get(&format!("/api/threads/{thread}/runs")).await.ok()[0]["run_id"].clone();
            let place = format!("/api/threads/{thread}/runs/{}", run.as_str().unwrap());
            ann.get(&format!("{place}/join")).await.ok();
            assert_eq!(ann.get(&place).await.ok()["status"], "interrupted", "its client left");
        }
        gate(&name).open();
        let frames = stays.rest().await;
        assert_eq!(frames.last().unwrap().name, "end");
        assert_eq!(ann.get("/api/threads/stays/runs").await.ok()[0]["status"], "success");
    }
}

/// A client that reads slowly gets the state in the place of what it missed, but not that of a thread which another
/// user has created under the same id since.
#[tokio::test]
async fn a_stream_with_a_gap_does_not_show_the_thread_that_another_user_has_created_since() {
    // The oldest frames of the run are dropped; all of them, as soon as another run publishes.
    for (kept, bridge) in [("some", json!({"queue_maxsize": 2})), ("none", json!({"total_max_bytes": 1}))] {
        for mode in MODES {
            let name = format!("auth-gap-{kept}-{mode}");
            let slowly =
                json!({"text": "One piece after the other.", "gate": {"name": name, "after_chunks": 1}});
            let script = json!({"chunk_chars": 4, "rules": [
                {"when": {"contains": ["slowly"]}, "answers": [slowly]},
                {"answers": [{"text": "You said: {{input}}"}]},
            ]});
            let sections = json!({ "stream_bridge": bridge });
            let guarded = Guarded::start(Setup { script, sections, ..Setup::on("memory", mode) }).await;
            let (ann, bob) = (guarded.caller("ann", Role::User), guarded.caller("bob", Role::User));
            ann.post("/api/threads", json!({"thread_id": "t"})).await.ok();
            let mut body = question("slowly");
            body["stream_mode"] = json!(["values", "messages-tuple"]);
            let run = ann.post("/api/threads/t/runs", body).await.ok();
            gate(&name).reached().await;
            let filter = json!({"channels": ["values", "checkpoints", "lifecycle"]});
            let request = Request::post("/api/threads/t/stream/events").header("x-api-key", &ann.1);
            let request = request.header("content-type", "application/json");
            let answer = guarded.gateway.open_answer(request.body(filter.to_string().into()).unwrap()).await;
            let mut stream = Frames::of(answer);
            // In the middle of the run, the client stops reading.
            stream.until("lifecycle").await;
            gate(&name).open();
            let run = run["run_id"].as_str().unwrap();
            ann.get(&format!("/api/threads/t/runs/{run}/join")).await.ok();
            ann.call(Method::DELETE, "/api/threads/t", None).await.ok();
            bob.post("/api/threads", json!({"thread_id": "t"})).await.ok();
            bob.post("/api/threads/t/runs/wait", question("a secret")).await.ok();

            while let Some(frame) = stream.next().await {
                let shown = frame.data.to_string();
                assert!(!shown.contains("secret"), "{kept} {mode}: {frame:?}");
            }
        }
    }
}

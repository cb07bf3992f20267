//! Every request of the OpenAPI document, and every form of the page, is dropped at every point where it waits, as when
//! its client leaves: no connection, transaction, lock or reservation stays behind, and the thread works as before.

use std::collections::BTreeSet;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request};
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;
use threadkeep_testing::DropAfter;
use tokio_postgres::Client;

use crate::page_checkpoints::plan_of;
use crate::support::{Answer, Gateway, Setup, connect, question, texts};

/// The forms of the page, which are in no document. Its script sends requests of the API.
const FORMS: [&str; 5] = ["/threads", DELETE, STORAGE, "/sign-out", "/sign-in"];
const DELETE: &str = "/threads/{thread_id}/delete";
const STORAGE: &str = "/threads/{thread_id}/storage";

/// These follow what happens next, and have no end.
const ENDLESS: [&str; 2] =
    ["GET /api/threads/{thread_id}/stream", "POST /api/threads/{thread_id}/stream/events"];
/// How long they are followed, if they are not dropped before: on a busy machine too they have come to rest by then.
const FOLLOWED: Duration = Duration::from_secs(3);
/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_mins(10);

/// What a request is about: a thread with a turn, and with a batch if that is what it is about.
struct Subject {
    thread: String,
    run: String,
    checkpoint: String,
    question: String,
    answer: String,
    /// The path of the batch, and an item of it that has failed.
    batch: Option<(String, String)>,
}

impl Subject {
    async fn new(gateway: &Gateway, number: usize, template: &str) -> Self {
        let thread = format!("t{number}");
        gateway.create(&thread).await;
        let run = gateway.ask(&thread, "before").await;
        let state = gateway.state(&thread).await;
        let checkpoint = state["checkpoint"]["checkpoint_id"].as_str().unwrap().to_owned();
        let message = |at: usize| state["values"]["messages"][at]["id"].as_str().unwrap().to_owned();
        let (question, answer) = (message(0), message(1));
        let mut batch = None;
        if template.contains("{batch_id}") {
            batch = Some(submitted(gateway, &thread).await);
        }
        Self { thread, run, checkpoint, question, answer, batch }
    }

    /// Makes the thread one on which the request does something, after others were carried out although they were
    /// dropped.
    async fn restore(&mut self, gateway: &Gateway, method: &Method, template: &str, what: &str) {
        if method == Method::DELETE || [DELETE, STORAGE].contains(&template) {
            self.run = first_turn(gateway, &self.thread, what).await;
        }
        let undo = match template.rsplit_once('/') {
            Some((_, "pause")) => "resume",
            Some((_, "resume")) => "pause",
            _ => return,
        };
        if let Some((batch, _)) = &self.batch {
            gateway.call(Method::POST, &format!("{batch}/{undo}"), None).await.ok();
        }
    }

    async fn request(&self, gateway: &Gateway, method: &Method, template: &str) -> Request<Body> {
        let request = Request::builder().method(method.clone()).uri(self.path(template));
        let request = if FORMS.contains(&template) {
            let body = self.form(gateway, template).await;
            request.header("content-type", "application/x-www-form-urlencoded").body(body.into())
        } else if let Some(body) = self.body(method, template) {
            request.header("content-type", "application/json").body(body.to_string().into())
        } else {
            request.body(Body::empty())
        };
        request.unwrap()
    }

    /// The fields of a form.
    async fn form(&self, gateway: &Gateway, template: &str) -> String {
        if template != STORAGE {
            return String::new();
        }
        let preview = gateway.get(&format!("/threads/{}/storage?keep=latest", self.thread)).await;
        format!("keep=latest&plan={}", plan_of(&preview))
    }

    fn path(&self, template: &str) -> String {
        let (batch, item) = match &self.batch {
            Some((batch, item)) => (batch.rsplit_once('/').unwrap().1, item.as_str()),
            None => ("none", "none"),
        };
        template
            .replace("{thread_id}", &self.thread)
            .replace("{run_id}", &self.run)
            .replace("{checkpoint_id}", &self.checkpoint)
            .replace("{assistant_id}", "lead_agent")
            .replace("{namespace}", "tools")
            .replace("{name}", "dropped")
            .replace("{batch_id}", batch)
            .replace("{item_id}", item)
    }

    /// The body of a request, if it needs one.
    fn body(&self, method: &Method, template: &str) -> Option<Value> {
        let run = question("again");
        let body = match (method.as_str(), template) {
            ("POST", "/api/runs/batch") => {
                let mut run = run;
                run["assistant_id"] = json!("lead_agent");
                json!([run])
            }
            ("POST", "/api/runs/cancel") => json!({"thread_id": self.thread, "run_ids": [self.run]}),
            ("POST", "/api/assistants/{assistant_id}/latest") => json!({"version": 1}),
            ("POST", "/api/subagents") => {
                json!({"name": "dropped", "description": "d", "system_prompt": "p", "tools": ["ls"]})
            }
            ("PUT", "/api/subagents/{name}") => json!({"max_turns": 3}),
            ("POST", "/api/threads") => json!({"thread_id": self.thread, "if_exists": "do_nothing"}),
            ("POST", "/api/threads/prune") => json!({"thread_ids": [self.thread], "strategy": "keep_latest"}),
            ("PATCH", "/api/threads/{thread_id}") => json!({"metadata": {"a": 1}}),
            ("POST", "/api/threads/{thread_id}/branches") => json!({"message_id": self.answer}),
            ("POST", "/api/threads/{thread_id}/commands") => {
                json!({"id": 1, "method": "run.start", "params": {"input": {"messages": []}}})
            }
            ("PUT", "/api/threads/{thread_id}/goal") => json!({"objective": "Get it done"}),
            ("POST", "/api/threads/{thread_id}/runs/edit-regenerate/prepare") => {
                json!({"human_message_id": self.question, "replacement_text": "other"})
            }
            ("POST", "/api/threads/{thread_id}/runs/regenerate/prepare") => {
                json!({"message_id": self.answer})
            }
            ("POST", "/api/threads/{thread_id}/state") => json!({"values": {"title": "other"}}),
            ("POST", "/api/threads/{thread_id}/stream/events") => json!({"channels": ["values"]}),
            ("POST", path)
                if path.ends_with("/runs")
                    || path.ends_with("/runs/stream")
                    || path.ends_with("/runs/wait") =>
            {
                run
            }
            _ => return None,
        };
        Some(body)
    }
}

/// The path of a batch that the thread submits, and its item that has failed. The other one is at work.
async fn submitted(gateway: &Gateway, thread: &str) -> (String, String) {
    let mut body = question("please submit");
    body["context"] = json!({"subagent_enabled": true});
    gateway.post(&format!("/api/threads/{thread}/runs/wait"), body).await.ok();
    let batches = format!("/api/threads/{thread}/subagent-batches");
    let batch = gateway.get(&batches).await.ok()[0]["id"].as_str().unwrap().to_owned();
    let batch = format!("{batches}/{batch}");
    let failed = async {
        loop {
            let items = gateway.get(&format!("{batch}/items?status=failed")).await.ok();
            if let Some(item) = items[0]["id"].as_str() {
                return item.to_owned();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let item = tokio::time::timeout(PATIENCE, failed).await.expect("no item has failed");
    (batch, item)
}

/// A model for leads that submit two items, of which one fails and one is at work until its batch is cancelled.
fn script(gate: &str) -> Value {
    let items = json!([{"key": "fails", "prompt": "be luckless"}, {"key": "works", "prompt": "work"}]);
    let call = json!({"name": "batch_task", "args": {"title": "Files", "items": items,
        "subagent_type": "general-purpose"}});
    json!({"rules": [
        {"when": {"caller": "subagent", "contains": ["luckless"]},
            "answers": [{"error": {"kind": "fatal", "message": "no luck"}}]},
        {"when": {"caller": "subagent"}, "answers": [{"text": "never", "gate": {"name": gate}}]},
        {"when": {"contains": ["submit"]}, "answers": [{"tool_calls": [call]}, {"text": "Submitted."}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

/// What a request does in the database is over: no session is in a transaction, nobody holds an advisory lock, and no
/// thread is reserved.
async fn nothing_left(gateway: &Gateway, client: Option<&Client>, what: &str) {
    let over = async {
        match client {
            Some(client) => nothing_left_in_postgres(client, what).await,
            None => nothing_left_in_sqlite(gateway).await,
        }
    };
    tokio::time::timeout(PATIENCE, over)
        .await
        .unwrap_or_else(|_| panic!("{what}: something stays in the database"));
}

async fn nothing_left_in_postgres(client: &Client, what: &str) {
    // The server itself ends a transaction that is left alone after five seconds; that must not be what ends it.
    let sql = "SELECT \
               COALESCE(string_agg(state || ' for ' || (now() - state_change) || ': ' || query, '; '), ''), \
               COALESCE(string_agg(query, '; ') FILTER (WHERE state LIKE 'idle in transaction%' \
               AND now() - state_change > interval '4 seconds'), ''), \
               (SELECT COALESCE(string_agg(operation_kind || ' of ' || thread_id, '; '), '') \
               FROM threadkeep_gateway_runs WHERE operation_kind <> 'run') \
               FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() \
               AND (state LIKE 'idle in transaction%' OR state = 'active' OR EXISTS ( \
               SELECT 1 FROM pg_locks WHERE pg_locks.pid = pg_stat_activity.pid AND locktype = 'advisory'))";
    let mut looks = 0;
    loop {
        let row = client.query_one(sql, &[]).await.unwrap();
        let [open, left, reserved] = [0_usize, 1, 2].map(|column| row.get::<_, String>(column));
        // After a moment in which the whole machine stood still, the gateway goes on too.
        looks = if left.is_empty() { 0 } else { looks + 1 };
        assert!(looks < 3, "{what}: left in a transaction: {left}");
        if open.is_empty() && reserved.is_empty() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn nothing_left_in_sqlite(gateway: &Gateway) {
    // Where a transaction that writes is open, this waits for its end.
    for file in ["gateway.db", "checkpoints.db"] {
        connect(&gateway.data().join(file)).execute_batch("BEGIN IMMEDIATE; ROLLBACK").unwrap();
    }
    let records = connect(&gateway.data().join("gateway.db"));
    let sql = "SELECT COUNT(*) FROM runs WHERE operation_kind <> 'run'";
    while records.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap() > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A turn of a thread which a dropped request may have deleted, or may be about to change.
async fn turn(gateway: &Gateway, thread: &str, body: &Value, what: &str) -> Answer {
    let path = format!("/api/threads/{thread}/runs/wait");
    let asked = async {
        loop {
            gateway.post("/api/threads", json!({ "thread_id": thread })).await;
            let answer = gateway.post(&path, body.clone()).await;
            if answer.status == 200 {
                return answer;
            }
            assert!([404, 409].contains(&answer.status), "{what}: {} {}", answer.status, answer.body);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, asked).await.unwrap_or_else(|_| panic!("{what}: no turn ends"))
}

/// The first turn of such a thread.
async fn first_turn(gateway: &Gateway, thread: &str, what: &str) -> String {
    let answer = turn(gateway, thread, &question("before"), what).await;
    let place = answer.headers["content-location"].to_str().unwrap();
    place.rsplit_once('/').unwrap().1.to_owned()
}

/// The thread takes a turn, after runs that a dropped request may have started. Others may start still.
async fn goes_on(gateway: &Gateway, subject: &Subject, what: &str) {
    let mut body = question("after");
    body["multitask_strategy"] = json!("enqueue");
    let left = turn(gateway, &subject.thread, &body, what).await.body;
    assert_eq!(texts(&json!({ "values": left })).last(), Some(&"You said: after"), "{what}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_is_dropped_anywhere_leaves_nothing_behind() {
    dropped_anywhere("postgres", "delta").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_is_dropped_anywhere_leaves_nothing_behind_on_sqlite() {
    dropped_anywhere("sqlite", "full").await;
}

async fn dropped_anywhere(backend: &'static str, mode: &'static str) {
    let setup = Setup {
        script: script(&format!("dropped-batches-{backend}")),
        sections: json!({"agent_storage": {"backend": "db"}, "summarization": {"enabled": true},
            "subagent_batches": {"enabled": true, "poll_interval_seconds": 0.1, "max_attempts": 1}}),
        ..Setup::on(backend, mode)
    };
    let gateway = setup.start().await;
    let client = if backend == "postgres" { Some(gateway.postgres().await) } else { None };
    let client = client.as_ref();
    let operations = operations(&gateway).await;
    let mut tried = BTreeSet::new();
    let mut waits = 0;
    for (number, (method, template)) in operations.iter().enumerate() {
        let name = format!("{method} {template}");
        let is_endless = ENDLESS.contains(&name.as_str());
        let mut subject = Subject::new(&gateway, number, template).await;
        for left in 0.. {
            let what = format!("{name} dropped at {left}");
            if left > 0 {
                subject.restore(&gateway, method, template, &what).await;
            }
            let request = subject.request(&gateway, method, template).await;
            let dropped = DropAfter::waits(gateway.send(request), left);
            let longest = if is_endless { FOLLOWED } else { PATIENCE };
            let Ok(answer) = tokio::time::timeout(longest, dropped).await else {
                assert!(is_endless, "{what}: it waits for ever");
                break;
            };
            if let Some(answer) = &answer {
                // Refused for what it says, it would have tried nothing.
                let has_tried = if FORMS.contains(&template.as_str()) {
                    answer.status == 303
                } else {
                    ![400, 405, 415, 422].contains(&answer.status)
                };
                assert!(has_tried, "{what}: {} {}", answer.status, answer.body);
                tried.insert(name.clone());
            }
            nothing_left(&gateway, client, &what).await;
            waits = waits.max(left);
            if answer.is_some() {
                break;
            }
        }
        if let Some((batch, _)) = &subject.batch {
            // So that its other item leaves its slot to the next one's.
            gateway.call(Method::POST, &format!("{batch}/cancel"), None).await.ok();
        }
        nothing_left(&gateway, client, &name).await;
        goes_on(&gateway, &subject, &name).await;
    }
    // A request waits for SQLite once a transaction, for Postgres once a statement.
    let least = if client.is_some() { 10 } else { 5 };
    assert!(waits > least, "at most {waits} waits");
    assert_eq!(tried.len() + ENDLESS.len(), operations.len(), "{tried:?}");
}

/// Everything that clients and the page can ask for: the methods and the templates of the paths.
async fn operations(gateway: &Gateway) -> Vec<(Method, String)> {
    let document = gateway.get("/openapi.json").await.ok();
    let mut operations: Vec<_> = FORMS.map(|path| (Method::POST, path.to_owned())).into();
    for (path, methods) in document["paths"].as_object().unwrap() {
        let methods = methods.as_object().unwrap().keys().filter(|name| *name != "parameters");
        operations.extend(methods.map(|name| (name.to_uppercase().parse::<Method>().unwrap(), path.clone())));
    }
    operations
}

/// Without leases nothing looks at the row of a run at work: the request itself has to reach it.
#[tokio::test]
async fn a_run_whose_cancellation_is_recorded_ends_although_the_request_was_dropped() {
    for together in [false, true] {
        for left in 0.. {
            let name = format!("dropped-{together}-{left}");
            let script = json!({"rules": [{"answers": [{"text": "never", "gate": {"name": name}}]}]});
            let gateway = Setup { script, ..Setup::on("sqlite", "full") }.start().await;
            gateway.create("t").await;
            let run = gateway.start_run("t", "wait").await;
            gate(&name).reached().await;
            let (path, body) = if together {
                ("/api/runs/cancel".to_owned(), Some(json!({"thread_id": "t", "run_ids": [run]})))
            } else {
                (format!("/api/threads/t/runs/{run}/cancel"), None)
            };
            let answer = DropAfter::waits(gateway.call(Method::POST, &path, body), left).await;
            // The writer has carried out by then what the dropped request has given it.
            gateway.patch("/api/threads/t", json!({"metadata": {"a": 1}})).await.ok();
            let row = || {
                let sql = "SELECT status, cancel_action IS NOT NULL FROM runs WHERE run_id = ?1";
                let row = connect(&gateway.data().join("gateway.db"))
                    .query_row(sql, [&run], |row| Ok((row.get::<_, String>(0)?, row.get::<_, bool>(1)?)));
                row.unwrap()
            };
            let (_, is_recorded) = row();
            assert!(is_recorded || answer.is_none());
            if is_recorded {
                let ended = async {
                    while row().0 != "interrupted" {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                };
                tokio::time::timeout(PATIENCE, ended)
                    .await
                    .unwrap_or_else(|_| panic!("dropped at {left}: the run works on"));
            }
            if let Some(answer) = answer {
                assert_eq!(answer.status, if together { 204 } else { 202 });
                break;
            }
        }
    }
}

//! Every request of the OpenAPI document is dropped at every point where it waits, as when its client leaves: no
//! connection, transaction, lock or reservation stays behind, and the thread works as before.

use std::collections::BTreeSet;
use std::time::Duration;

use axum::http::Method;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;
use threadkeep_testing::DropAfter;

use crate::support::{Answer, Gateway, Setup, connect, question, texts};

/// These follow what happens next, and have no end.
const ENDLESS: [&str; 2] =
    ["GET /api/threads/{thread_id}/stream", "POST /api/threads/{thread_id}/stream/events"];
/// How long they are followed, if they are not dropped before: on a busy machine too they have come to rest by then.
const FOLLOWED: Duration = Duration::from_secs(3);
/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_mins(10);

/// What a request is about: a thread with a turn.
struct Subject {
    thread: String,
    run: String,
    checkpoint: String,
    question: String,
    answer: String,
}

impl Subject {
    async fn new(gateway: &Gateway, number: usize) -> Self {
        let thread = format!("t{number}");
        gateway.create(&thread).await;
        let run = gateway.ask(&thread, "before").await;
        let state = gateway.state(&thread).await;
        let checkpoint = state["checkpoint"]["checkpoint_id"].as_str().unwrap().to_owned();
        let message = |at: usize| state["values"]["messages"][at]["id"].as_str().unwrap().to_owned();
        let (question, answer) = (message(0), message(1));
        Self { thread, run, checkpoint, question, answer }
    }

    fn path(&self, template: &str) -> String {
        template
            .replace("{thread_id}", &self.thread)
            .replace("{run_id}", &self.run)
            .replace("{checkpoint_id}", &self.checkpoint)
            .replace("{assistant_id}", "lead_agent")
            .replace("{namespace}", "tools")
            .replace("{name}", "dropped")
            .replace("{batch_id}", "none")
            .replace("{item_id}", "none")
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

/// What each request does in the database is over: no session is in a transaction, nobody holds an advisory lock, and no thread is
/// reserved.
async fn nothing_left(gateway: &Gateway, what: &str) {
    let sql = "SELECT COALESCE(string_agg(state || ' for ' || (now() - state_change) || ': ' || query, '; '), '') \
               FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() \
               AND (state LIKE 'idle in transaction%' OR state = 'active' OR EXISTS ( \
               SELECT 1 FROM pg_locks WHERE pg_locks.pid = pg_stat_activity.pid AND locktype = 'advisory'))";
    // The server itself ends a transaction that is left alone after five seconds; that must not be what ends it.
    let left = "SELECT COALESCE(string_agg(query, '; '), '') FROM pg_stat_activity WHERE datname = current_database() \
                AND state LIKE 'idle in transaction%' AND now() - state_change > interval '4 seconds'";
    let reserved = "SELECT COALESCE(string_agg(operation_kind || ' of ' || thread_id, '; '), '') \
                    FROM threadkeep_gateway_runs WHERE operation_kind <> 'run'";
    let client = gateway.postgres().await;
    let over = async {
        let mut looks = 0;
        loop {
            let open: String = client.query_one(sql, &[]).await.unwrap().get(0);
            let left: String = client.query_one(left, &[]).await.unwrap().get(0);
            // After a moment in which the whole machine stood still, the gateway goes on too.
            looks = if left.is_empty() { 0 } else { looks + 1 };
            assert!(looks < 3, "{what}: left in a transaction: {left}");
            let reserved: String = client.query_one(reserved, &[]).await.unwrap().get(0);
            if open.is_empty() && reserved.is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, over)
        .await
        .unwrap_or_else(|_| panic!("{what}: something stays in the database"));
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
    let setup = Setup {
        sections: json!({"agent_storage": {"backend": "db"}, "subagent_batches": {"enabled": true},
                         "summarization": {"enabled": true}}),
        ..Setup::on("postgres", "delta")
    };
    let gateway = setup.start().await;
    let document = gateway.get("/openapi.json").await.ok();
    let mut tried = BTreeSet::new();
    let operations = document["paths"].as_object().unwrap().iter().flat_map(|(path, operations)| {
        operations
            .as_object()
            .unwrap()
            .keys()
            .filter(|name| *name != "parameters")
            .map(move |name| (path, name))
    });
    let mut waits = 0;
    for (number, (template, method)) in operations.enumerate() {
        let method: Method = method.to_uppercase().parse().unwrap();
        let mut subject = Subject::new(&gateway, number).await;
        for left in 0.. {
            let what = format!("{method} {template} dropped at {left}");
            let path = subject.path(template);
            let request = gateway.call(method.clone(), &path, subject.body(&method, template));
            let dropped = DropAfter::waits(request, left);
            let is_endless = ENDLESS.contains(&format!("{method} {template}").as_str());
            let longest = if is_endless { FOLLOWED } else { PATIENCE };
            let Ok(answer) = tokio::time::timeout(longest, dropped).await else {
                assert!(is_endless, "{what}: it waits for ever");
                break;
            };
            if let Some(answer) = &answer {
                // Refused for what it says, it would have tried nothing.
                assert!(
                    ![400, 405, 415, 422].contains(&answer.status),
                    "{what}: {} {}",
                    answer.status,
                    answer.body
                );
                tried.insert(format!("{method} {template}"));
            }
            if method == Method::DELETE {
                nothing_left(&gateway, &what).await;
                subject.run = first_turn(&gateway, &subject.thread, &what).await;
            }
            waits = waits.max(left);
            if answer.is_some() {
                break;
            }
        }
        let what = format!("{method} {template}");
        nothing_left(&gateway, &what).await;
        goes_on(&gateway, &subject, &what).await;
    }
    assert!(waits > 10, "at most {waits} waits");
    let all = document["paths"].as_object().unwrap().values().map(|operations| {
        operations.as_object().unwrap().keys().filter(|name| *name != "parameters").count()
    });
    assert_eq!(tried.len() + ENDLESS.len(), all.sum::<usize>(), "{tried:?}");
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

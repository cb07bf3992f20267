//! A gateway whose Postgres fails over to an asynchronous standby, which lacks turns that were acknowledged.

use std::time::Duration;

use axum::http::{Method, Request};
use serde_json::{Value, json};
use threadkeep_testing::{Cluster, Replication};
use tokio::task::block_in_place;

use crate::sse::Frames;
use crate::support::{Gateway, MODES, Setup, question, texts};

const LOST: &str = "the store lost changes that it had acknowledged";
/// Longer than a failover takes on a busy machine.
const PATIENCE: Duration = Duration::from_mins(10);

/// Requests that are refused with the loss, each as the first one on the thread of its name.
fn refused() -> [(&'static str, Method, &'static str, Option<Value>); 8] {
    let resume = json!({"command": {"resume": "yes"}});
    [
        ("state", Method::GET, "/state", None),
        ("history", Method::POST, "/history", Some(json!({"limit": 10}))),
        ("usage", Method::GET, "/token-usage", None),
        ("update", Method::POST, "/state", Some(json!({"values": {"title": "other"}}))),
        ("resume", Method::POST, "/runs/wait", Some(resume)),
        ("goal", Method::PUT, "/goal", Some(json!({"objective": "Get it done"}))),
        ("replay", Method::POST, "/runs/regenerate/prepare", Some(json!({"message_id": "none"}))),
        ("delete", Method::DELETE, "", None),
    ]
}

fn is_told(told: &Value, thread: &str) -> bool {
    told.as_str().is_some_and(|told| told.starts_with(&format!("thread {thread}: {LOST}")))
}

/// A gateway with a turn on each thread.
async fn gateway(cluster: &Cluster, mode: &str, threads: &[&str]) -> Gateway {
    let name = format!("threads_{mode}");
    block_in_place(|| cluster.execute(&format!("CREATE DATABASE {name}")).unwrap());
    let database = json!({
        "backend": "postgres",
        "checkpoint_channel_mode": mode,
        "checkpoint_delta": {"snapshot_frequency": 3},
        "postgres_url": cluster.url(&name),
    });
    let gateway = Setup { sections: json!({ "database": database }), ..Setup::default() }.start().await;
    for thread in threads {
        gateway.create(thread).await;
        gateway.ask(thread, "kept").await;
    }
    gateway
}

/// What the event stream of its thread says of the end of the newest run.
async fn end_of_events(gateway: &Gateway) -> Value {
    let request = Request::post("/api/threads/events/stream/events");
    let request = request.header("content-type", "application/json");
    let request = request.body(json!({"channels": ["lifecycle"]}).to_string().into()).unwrap();
    let mut events = Frames::of(gateway.open_answer(request).await);
    loop {
        let event = events.next().await.expect("the end of the run");
        let data = &event.data["params"]["data"];
        if data["event"] != "running" {
            return data.clone();
        }
    }
}

/// Waits until turns are acknowledged again.
async fn until_it_is_back(gateway: &Gateway) {
    let is_back = async {
        loop {
            let answer = gateway.post("/api/threads/spare/runs/wait", question("on")).await;
            // A run that did not succeed has its status there.
            if answer.status == 200 && answer.body["status"].is_null() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(PATIENCE, is_back).await.expect("no turn after the failover");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turns_that_a_failover_lost_are_reported_before_anything_more_is_acknowledged() {
    let cluster = block_in_place(|| Cluster::start(Replication::Asynchronous).unwrap());
    let mut lost = vec!["turn", "join", "events"];
    lost.extend(refused().map(|(thread, ..)| thread));
    let all = [&lost[..], &["spare"]].concat();
    let mut gateways = Vec::new();
    for mode in MODES {
        let gateway = gateway(&cluster, mode, &all).await;
        let run = gateway.ask("join", "kept, too").await;
        gateways.push((mode, gateway, run));
    }
    block_in_place(|| {
        cluster.wait_until_standby_has_everything().unwrap();
        cluster.hold_replication().unwrap();
    });
    for (_, gateway, _) in &gateways {
        for thread in &lost {
            gateway.ask(thread, "lost").await;
        }
    }
    block_in_place(|| {
        cluster.kill_primary().unwrap();
        cluster.promote().unwrap();
    });
    for (mode, gateway, run) in &gateways {
        until_it_is_back(gateway).await;
        let answer = gateway.post("/api/threads/turn/runs/wait", question("next")).await.ok();
        assert!(answer["status"] == "error" && is_told(&answer["error"], "turn"), "{mode}: {answer}");
        let answer = gateway.get(&format!("/api/threads/join/runs/{run}/join")).await.ok();
        assert!(answer["status"] == "error" && is_told(&answer["error"], "join"), "{mode}: {answer}");
        let end = end_of_events(gateway).await;
        assert!(end["event"] == "failed" && is_told(&end["error"], "events"), "{mode}: {end}");
        for (thread, method, path, body) in refused() {
            let answer = gateway.call(method, &format!("/api/threads/{thread}{path}"), body).await;
            let is_refused = answer.status == 409 && is_told(&answer.body["detail"], thread);
            assert!(is_refused, "{mode} {thread}: {answer:?}");
        }
        // Once. Then each thread goes on from what is there.
        for thread in &lost {
            let state = gateway.state(thread).await;
            assert!(texts(&state).ends_with(&before(thread)), "{mode} {thread}: {state}");
            gateway.ask(thread, "after").await;
            let state = gateway.state(thread).await;
            let (found, mut expected) = (texts(&state), vec!["kept", "You said: kept"]);
            if *thread == "join" {
                expected.extend(before(thread));
            }
            expected.extend(["after", "You said: after"]);
            assert_eq!(found, expected, "{mode} {thread}");
        }
    }
}

/// The last turn of a thread that is not lost.
fn before(thread: &str) -> [&'static str; 2] {
    if thread == "join" { ["kept, too", "You said: kept, too"] } else { ["kept", "You said: kept"] }
}

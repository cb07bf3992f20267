//! Several gateways on one database.

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request};
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;
use threadkeep_testing::Postgres;

use crate::sse;
use crate::support::{Gateway, MODES, Setup, question, texts};

/// On `work`, calls a tool and waits at `gate`; on `loop`, waits at `<gate>-loop` and calls tools for ever; else answers.
pub(crate) fn script(gate: &str) -> Value {
    json!({"rules": [
        {"when": {"contains": ["work"]}, "answers": [
            {"text": "Looking.", "tool_calls": [{"name": "ls"}]},
            {"text": "Done.", "gate": {"name": gate}},
        ]},
        {"when": {"contains": ["loop"]}, "repeat_last": true, "answers": [
            {"tool_calls": [{"name": "ls"}], "gate": {"name": format!("{gate}-loop")}},
        ]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

/// Two gateways on one database, and a thread `t`.
pub(crate) async fn two(mode: &'static str, gate: &str) -> (Gateway, Gateway) {
    let first = Setup { script: script(gate), ..Setup::on("postgres", mode) }.start().await;
    let second = first.beside().await;
    first.create("t").await;
    (first, second)
}

async fn cancel(gateway: &Gateway, run: &str, query: &str) -> u16 {
    gateway.call(Method::POST, &format!("/api/threads/t/runs/{run}/cancel{query}"), None).await.status
}

/// Waits until the run has this status, as this gateway sees it.
pub(crate) async fn until(gateway: &Gateway, run: &str, status: &str) -> Value {
    let found = async {
        loop {
            let record = gateway.run("t", run).await;
            if record["status"] == status {
                return record;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), found).await.expect("never happened")
}

#[tokio::test]
async fn a_run_of_one_is_joined_on_the_other_with_all_that_it_wrote() {
    for mode in MODES {
        let name = format!("several-join-{mode}");
        let (first, second) = two(mode, &name).await;
        second.ask("t", "hello").await;
        let run = first.start_run("t", "work").await;
        gate(&name).reached().await;
        assert_eq!(second.run("t", &run).await["status"], "running");
        assert_eq!(second.get("/api/threads/t").await.ok()["status"], "busy");
        let place = format!("/api/threads/t/runs/{run}/join");
        let join = second.get(&place);
        let open = async {
            tokio::task::yield_now().await;
            gate(&name).open();
        };
        let (joined, ()) = tokio::join!(join, open);
        let values = joined.ok();
        assert_eq!(values["messages"].as_array().unwrap().last().unwrap()["content"], "Done.");
        // All of it is there, including the run's last note, on both gateways.
        assert_eq!(second.run("t", &run).await["status"], "success");
        assert_eq!(second.history("t").await, first.history("t").await);
        let metadata = &second.state("t").await["metadata"];
        assert!(metadata["run_durations"].get(&run).is_some(), "{metadata}");
        assert_eq!(first.get("/api/threads/t").await.ok()["status"], "idle");
        // The next run, on the other gateway, follows without a gap.
        let next = second.ask("t", "on").await;
        assert_eq!(first.run("t", &next).await["status"], "success");
        assert_eq!(first.state("t").await, second.state("t").await);
    }
}

/// Blocks all writes to a table until the client is dropped.
async fn lock(gateway: &Gateway, table: &str) -> tokio_postgres::Client {
    let client = gateway.postgres().await;
    client.batch_execute(&format!("BEGIN; LOCK TABLE {table} IN EXCLUSIVE MODE")).await.unwrap();
    client
}

/// The last note of a run is written before its row says that it has ended, so it cannot conflict with another run.
#[tokio::test]
async fn a_run_keeps_its_thread_until_its_last_note_is_written() {
    for mode in MODES {
        let name = format!("several-last-{mode}");
        let (first, second) = two(mode, &name).await;
        let run = first.start_run("t", "work").await;
        gate(&name).reached().await;
        let events = lock(&first, "threadkeep_gateway_run_events").await;
        gate(&name).open();
        // Its last step is stored; its last events wait.
        while texts(&second.state("t").await).last() != Some(&"Done.") {}
        let checkpoints = lock(&first, "threadkeep_checkpoint").await;
        drop(events);
        let asking = second.postgres().await;
        let sql = "SELECT 1 FROM threadkeep_gateway_runs WHERE decided_status = 'success'";
        while asking.query(sql, &[]).await.unwrap().is_empty() {}
        // Its outcome is decided; its duration note waits.
        assert_eq!(second.run("t", &run).await["status"], "running");
        let refused = second.post("/api/threads/t/runs", question("too early")).await;
        refused.refused(409, "Thread t already has an active run");
        assert_eq!(cancel(&second, &run, "").await, 409, "it is too late for that");
        drop(checkpoints);
        second.join("t", &run).await;
        assert_eq!(second.run("t", &run).await["status"], "success");
        let next = second.ask("t", "on").await;
        assert_eq!(first.run("t", &next).await["status"], "success");
    }
}

/// Its lease expires while the database is away: others may recover the run as soon as the database is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_cannot_renew_its_leases_stops_its_runs_by_itself() {
    let server = tokio::task::spawn_blocking(|| Postgres::start().unwrap()).await.unwrap();
    let database = server.database().await.unwrap();
    let sections = json!({"run_ownership": {"lease_seconds": 8, "grace_seconds": 1}});
    let setup = Setup { script: script("several-away"), sections, ..Setup::on("postgres", "delta") };
    let gateway = setup.start_on(database).await;
    gateway.create("t").await;
    let request = Request::post("/api/threads/t/runs/stream").header("content-type", "application/json");
    let stream = gateway.open_answer(request.body(question("work").to_string().into()).unwrap()).await;
    gate("several-away").reached().await;
    let server = tokio::task::spawn_blocking(move || {
        server.crash().unwrap();
        server
    });
    let server = server.await.unwrap();
    // The gate stays shut, so the run does not end by itself.
    let frames = tokio::time::timeout(Duration::from_mins(10), sse::all(stream)).await.expect("it goes on");
    let [.., error, end] = &frames[..] else { panic!("{frames:?}") };
    assert_eq!((error.name.as_str(), end.name.as_str()), ("error", "end"), "it did not succeed");
    let _server = tokio::task::spawn_blocking(move || {
        server.resume().unwrap();
        server
    })
    .await
    .unwrap();
    let runs = loop {
        let runs = gateway.get("/api/threads/t/runs").await;
        if runs.status == 200 && runs.body[0]["status"] == "error" {
            break runs.body;
        }
        assert!([200, 503].contains(&runs.status), "{runs:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    assert_eq!(runs.as_array().unwrap().len(), 1);
    // A client that comes later gets to know, too.
    let path = format!("/api/threads/t/runs/{}/stream", runs[0]["run_id"].as_str().unwrap());
    let joined = sse::all(gateway.open_answer(Request::get(path).body(Body::empty()).unwrap()).await).await;
    assert!(sse::names(&joined).ends_with(&["error", "end"]), "{joined:?}");
    let next = gateway.ask("t", "on").await;
    let run = gateway.run("t", &next).await;
    assert_eq!(run["status"], "success", "{run}");
}

/// A rolled-back run has ended in error, and a further cancellation is refused: the run is kept from its end until the second
/// one was answered.
#[tokio::test]
async fn a_run_of_one_is_cancelled_on_the_other() {
    for mode in MODES {
        for action in ["interrupt", "rollback"] {
            let name = format!("several-cancel-{mode}-{action}");
            let (first, second) = two(mode, &name).await;
            first.ask("t", "before").await;
            let before = first.state("t").await;
            let run = first.start_run("t", "work").await;
            gate(&name).reached().await;
            // A rollback has to write one. An interruption has not, but is accepted again when it is over.
            let checkpoints = lock(&first, "threadkeep_checkpoint").await;
            let (query, wait) = (format!("?action={action}"), format!("?action={action}&wait=true"));
            let (waited, ()) = tokio::join!(cancel(&second, &run, &wait), async {
                until(&first, &run, "interrupted").await;
                assert_eq!(cancel(&second, &run, &query).await, 202, "again");
                assert_eq!(first.run("t", &run).await["status"], "interrupted");
                drop(checkpoints);
            });
            assert_eq!(waited, 204, "to its end");
            let record = second.run("t", &run).await;
            let state = second.state("t").await;
            if action == "rollback" {
                assert_eq!(
                    (&record["status"], &record["error"]),
                    (&json!("error"), &json!("Rolled back by user"))
                );
                assert_eq!(state["values"], before["values"]);
            } else {
                assert_eq!((&record["status"], &record["error"]), (&json!("interrupted"), &Value::Null));
                assert_eq!(texts(&state)[2], "work");
            }
            second.ask("t", "after").await;
            assert_eq!(texts(&first.state("t").await).last(), Some(&"You said: after"));
        }
    }
}

/// Every thread of its runtime is at work for longer than its lease. That is not death: the other process leaves its run alone, and
/// so does it itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_whose_threads_are_busy_for_longer_than_its_lease_keeps_its_runs() {
    let sections = json!({"run_ownership": {"lease_seconds": 9, "grace_seconds": 3}});
    let setup = Setup { script: script("several-deaf"), sections, ..Setup::on("postgres", "delta") };
    let first = setup.start().await;
    let second = first.beside().await;
    first.create("t").await;
    let run = first.start_run("t", "work").await;
    gate("several-deaf").reached().await;
    let both = Arc::new(Barrier::new(2));
    let busy = || {
        let both = Arc::clone(&both);
        tokio::spawn(async move {
            both.wait();
            thread::sleep(Duration::from_secs(14));
        })
    };
    for busy in [busy(), busy()] {
        busy.await.unwrap();
    }
    gate("several-deaf").open();
    second.join("t", &run).await;
    let record = second.run("t", &run).await;
    assert_eq!((&record["status"], &record["error"]), (&json!("success"), &Value::Null), "{record}");
}

fn said(state: &Value) -> Vec<Value> {
    state["values"]["messages"].as_array().cloned().unwrap_or_default()
}

/// The process that has the run is gone before it notices that it should roll back: another one does it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rollback_is_carried_out_by_the_process_that_takes_the_run_over() {
    for mode in MODES {
        for first_turn in [true, false] {
            let name = format!("several-dead-{mode}-{first_turn}");
            let sections = json!({"run_ownership": {"lease_seconds": 6, "grace_seconds": 1}});
            let setup = Setup { script: script(&name), sections, ..Setup::on("postgres", mode) };
            let first = setup.start().await;
            let second = first.beside().await;
            first.create("t").await;
            if !first_turn {
                first.ask("t", "before").await;
            }
            let before = first.state("t").await;
            let run = first.start_run("t", "work").await;
            gate(&name).reached().await;
            assert_ne!(said(&second.state("t").await), said(&before));
            // It becomes the run of a process that does not answer, and is gone later; its own leaves it.
            let set = async |what: &str| {
                let sql = format!("UPDATE threadkeep_gateway_runs SET {what} WHERE status = 'running'");
                first.postgres().await.batch_execute(&sql).await.unwrap();
            };
            set("owner_worker_id = 'gone', lease_expires_at = '2999-01-01T00:00:00.000000+00:00'").await;
            assert_eq!(cancel(&second, &run, "?action=rollback").await, 202);
            set("lease_expires_at = '2000-01-01T00:00:00.000000+00:00'").await;
            let record = until(&second, &run, "error").await;
            assert_eq!(record["error"], "Rolled back by user");
            assert_eq!(said(&second.state("t").await), said(&before), "{mode}");
            second.ask("t", "after").await;
            assert_eq!(texts(&first.state("t").await).last(), Some(&"You said: after"));
        }
    }
}

/// The cancellation waits for the transaction in which the run decides how it ends, and that goes on meanwhile.
#[tokio::test]
async fn a_client_that_leaves_while_its_run_is_written_does_not_fail_it() {
    for mode in MODES {
        let name = format!("several-left-{mode}");
        let (first, second) = two(mode, &name).await;
        let mut body = question("work");
        body["on_disconnect"] = json!("cancel");
        let request = Request::post("/api/threads/t/runs/stream").header("content-type", "application/json");
        let stream = first.open_answer(request.body(body.to_string().into()).unwrap()).await;
        gate(&name).reached().await;
        let run = first.get("/api/threads/t/runs").await.ok()[0]["run_id"].as_str().unwrap().to_owned();
        let events = lock(&first, "threadkeep_gateway_run_events").await;
        gate(&name).open();
        let asking = second.postgres().await;
        // Other tests wait for locks on the same server.
        let waits = "SELECT 1 FROM pg_locks WHERE NOT granted \
                     AND relation = 'threadkeep_gateway_run_events'::regclass \
                     AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
        while asking.query(waits, &[]).await.unwrap().is_empty() {}
        assert_eq!(texts(&second.state("t").await).last(), Some(&"Done."), "only its end is to be written");
        drop(stream);
        // The run's task learns that its client is gone before the transaction goes on.
        tokio::task::yield_now().await;
        drop(events);
        second.join("t", &run).await;
        let record = second.run("t", &run).await;
        assert_eq!((&record["status"], &record["error"]), (&json!("success"), &Value::Null), "{record}");
        let next = second.ask("t", "on").await;
        assert_eq!(first.run("t", &next).await["status"], "success");
    }
}

#[tokio::test]
async fn a_run_on_one_keeps_writers_on_the_other_out_and_gives_way_to_a_run_that_takes_over() {
    for mode in MODES {
        let name = format!("several-busy-{mode}");
        let (first, second) = two(mode, &name).await;
        first.ask("t", "before").await;
        let run = first.start_run("t", "work").await;
        gate(&name).reached().await;
        let refused = second.post("/api/threads/t/runs", question("no")).await;
        refused.refused(409, "Thread t already has an active run");
        assert_eq!(second.post("/api/threads/t/state", json!({"values": {"title": "x"}})).await.status, 409);
        assert_eq!(second.delete("/api/threads/t").await.status, 409);
        assert_eq!(first.run("t", &run).await["status"], "running");

        let mut body = question("instead");
        body["multitask_strategy"] = json!("rollback");
        let next = second.post("/api/threads/t/runs", body).await.ok();
        let next = next["run_id"].as_str().unwrap();
        second.join("t", next).await;
        assert_eq!(second.run("t", next).await["status"], "success");
        assert_eq!(second.run("t", &run).await["error"], "Rolled back by user");
        let state = first.state("t").await;
        assert_eq!(texts(&state), ["before", "You said: before", "instead", "You said: instead"]);
        assert_eq!(second.delete("/api/threads/t").await.status, 200);
        assert_eq!(first.get("/api/threads/t").await.status, 404);
    }
}

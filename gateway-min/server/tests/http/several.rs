//! Several gateways on one database, with a load balancer in front.

use std::net::SocketAddr;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request};
use futures::future::join_all;
use reqwest::Client;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;
use threadkeep_testing::Postgres;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

use crate::sse::{self, Frames};
use crate::support::{Gateway, MODES, Setup, question, texts};

/// On `work`, calls a tool and waits at `gate`; on `loop`, waits at `<gate>-loop` and calls tools for ever; else answers.
fn script(gate: &str) -> Value {
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
async fn two(mode: &'static str, gate: &str) -> (Gateway, Gateway) {
    let first = Setup { script: script(gate), ..Setup::on("postgres", mode) }.start().await;
    let second = first.beside().await;
    first.create("t").await;
    (first, second)
}

async fn cancel(gateway: &Gateway, run: &str, query: &str) -> u16 {
    gateway.call(Method::POST, &format!("/api/threads/t/runs/{run}/cancel{query}"), None).await.status
}

/// Waits until the run has this status, as this gateway sees it.
async fn until(gateway: &Gateway, run: &str, status: &str) -> Value {
    loop {
        let record = gateway.run("t", run).await;
        if record["status"] == status {
            return record;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
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
    let sections = json!({"run_ownership": {"lease_seconds": 5, "grace_seconds": 1}});
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

#[tokio::test]
async fn the_stream_of_a_run_elsewhere_shows_its_state_its_failure_and_its_end() {
    for mode in MODES {
        let name = format!("several-stream-{mode}");
        let (first, second) = two(mode, &name).await;
        let run = first.start_run("t", "work").await;
        gate(&name).reached().await;
        let request =
            || Request::get(format!("/api/threads/t/runs/{run}/stream")).body(Body::empty()).unwrap();
        let (one, other) = (second.open_answer(request()).await, second.open_answer(request()).await);
        let (frames, open) =
            (async { tokio::join!(sse::all(one), sse::all(other)) }, async { gate(&name).open() });
        let ((frames, again), ()) = tokio::join!(frames, open);
        assert_eq!(frames[0].name, "metadata");
        assert_eq!(frames[0].data, json!({"run_id": run, "thread_id": "t"}));
        let (end, shown) = frames[1..].split_last().unwrap();
        assert_eq!((end.name.as_str(), &end.data), ("end", &Value::Null));
        assert!(!shown.is_empty() && shown.iter().all(|frame| frame.name == "values"), "{shown:?}");
        assert_eq!(shown.last().unwrap().data["messages"], first.state("t").await["values"]["messages"]);
        assert_eq!(again.last().unwrap().name, "end", "every subscriber gets it");
        // For a run that has ended and had no follower: only the end.
        let alone = first.ask("t", "alone").await;
        let path = format!("/api/threads/t/runs/{alone}/stream");
        let ended = sse::all(second.open_answer(Request::get(path).body(Body::empty()).unwrap()).await).await;
        assert_eq!(sse::names(&ended), ["end"]);

        let failing = json!({"input": question("loop")["input"], "config": {"recursion_limit": 2}});
        let failed = first.post("/api/threads/t/runs", failing).await.ok();
        let run = failed["run_id"].as_str().unwrap();
        let looping = format!("{name}-loop");
        gate(&looping).reached().await;
        let path = format!("/api/threads/t/runs/{run}/stream");
        let stream = second.open_answer(Request::get(path).body(Body::empty()).unwrap()).await;
        gate(&looping).open();
        let frames = sse::all(stream).await;
        let record = second.run("t", run).await;
        assert_eq!(record["status"], "error");
        let [.., error, end] = &frames[..] else { panic!("{frames:?}") };
        assert_eq!((error.name.as_str(), end.name.as_str()), ("error", "end"));
        let shown = json!({"message": record["error"], "name": "GraphRecursionError"});
        assert_eq!(error.data, shown);
    }
}

/// Its process is gone, and nothing is left of its stream. A client has what that process sent: more than is kept here, the
/// same number of frames, or less.
#[tokio::test]
async fn how_a_run_of_another_process_ended_comes_whatever_a_client_has() {
    let sections = json!({"run_ownership": {"lease_seconds": 3, "grace_seconds": 1}});
    let setup = Setup { script: script("none"), sections, ..Setup::on("postgres", "delta") };
    let first = setup.start().await;
    let second = first.beside().await;
    first.create("t").await;
    let run = first.ask("t", "hello").await;
    let path = format!("/api/threads/t/runs/{run}/stream");
    let follow = async |gateway: &Gateway, last: Option<&str>| {
        let request =
            last.into_iter().fold(Request::get(&path), |request, id| request.header("Last-Event-ID", id));
        gateway.open_answer(request.body(Body::empty()).unwrap()).await
    };
    let seen = sse::all(follow(&first, None).await).await;
    let ids: Vec<&str> = seen.iter().filter_map(|frame| frame.id.as_deref()).collect();
    let last = *ids.last().unwrap();
    let mut had: Vec<Option<&str>> = ids.into_iter().map(Some).collect();
    let (ms, _) = last.split_once('-').unwrap();
    let (ahead, farthest) = (format!("{ms}-40"), format!("{ms}-{}", u64::MAX));
    had.extend([None, Some("-1"), Some(&ahead), Some(&farthest)]);

    // It becomes the run of a process that is at work, and later gone.
    let set = async |what: &str| {
        let sql = format!("UPDATE threadkeep_gateway_runs SET {what}");
        first.postgres().await.batch_execute(&sql).await.unwrap();
    };
    let lives = "lease_expires_at = '2999-01-01T00:00:00.000000+00:00'";
    let working = "status = 'running', decided_status = NULL, owner_worker_id = 'gone'";
    set(&format!("{working}, {lives}")).await;
    let mut during = Vec::new();
    for last in &had {
        during.push(follow(&second, *last).await);
    }
    set("lease_expires_at = '2000-01-01T00:00:00.000000+00:00'").await;
    let shown = join_all(during.into_iter().map(sse::all)).await;
    let record = second.run("t", &run).await;
    let failure = json!({"message": record["error"], "name": "RunError"});
    assert_eq!(record["stop_reason"], "orphan_recovered");
    for (last, frames) in had.iter().zip(&shown) {
        let [.., error, end] = &frames[..] else { panic!("{last:?}: {frames:?}") };
        assert_eq!(
            (error.name.as_str(), &error.data, end.name.as_str()),
            ("error", &failure, "end"),
            "{last:?}"
        );
    }

    // After its end, at once and later; a client that has seen the outcome gets only the end.
    for moment in ["updated_at", "'2000-01-01T00:00:00.000000+00:00'"] {
        set(&format!("updated_at = {moment}")).await;
        let other = first.beside().await;
        for last in &had {
            let frames = sse::all(follow(&other, *last).await).await;
            assert_eq!(sse::names(&frames), ["error", "end"], "{moment} {last:?}");
            assert_eq!(frames[0].data, failure);
            let again = sse::all(follow(&other, frames[0].id.as_deref()).await).await;
            assert_eq!(sse::names(&again), ["end"], "{moment} {last:?}");
        }
    }
}

/// Everything that the run streams, from any process, with the same ids, so a client may switch between processes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_elsewhere_has_the_frames_of_every_mode_under_their_own_ids() {
    for mode in MODES {
        let name = format!("several-modes-{mode}");
        let (first, second) = two(mode, &name).await;
        let modes = ["values", "messages-tuple", "updates", "tasks", "checkpoints", "debug", "custom"];
        let mut body = question("work");
        body["stream_mode"] = json!(modes);
        let run = first.post("/api/threads/t/runs", body).await.ok();
        let run = run["run_id"].as_str().unwrap();
        let path = format!("/api/threads/t/runs/{run}/stream");
        let join = async |gateway: &Gateway, last: Option<&str>| {
            let request =
                last.into_iter().fold(Request::get(&path), |request, id| request.header("Last-Event-ID", id));
            Frames::of(gateway.open_answer(request.body(Body::empty()).unwrap()).await)
        };
        gate(&name).reached().await;
        let mut elsewhere = join(&second, None).await;
        let metadata = elsewhere.until("metadata").await;
        assert_eq!(metadata.data, json!({"run_id": run, "thread_id": "t"}));
        let here = join(&first, None).await;
        // A client of the first gateway reconnects to a third, which does not know the run.
        let mut left = join(&first, None).await;
        let seen = left.until("updates").await;
        drop(left);
        let third = first.beside().await;
        let back = join(&third, seen.id.as_deref()).await;
        let (here, elsewhere, back, ()) =
            tokio::join!(here.rest(), elsewhere.rest(), back.rest(), async { gate(&name).open() });
        assert_eq!(here[0], metadata);
        assert_eq!(elsewhere, here[1..], "{mode}");
        let at = here.iter().position(|frame| *frame == seen).unwrap();
        assert_eq!(back, here[at + 1..], "{mode}: nothing twice, nothing lost");
        for kind in ["values", "messages", "updates", "tasks", "checkpoints", "debug", "end"] {
            assert!(back.iter().any(|frame| frame.name == kind), "{kind}");
        }
        // Also for a while after the run has ended, on any gateway.
        let fourth = first.beside().await;
        assert_eq!(join(&fourth, seen.id.as_deref()).await.rest().await, back, "{mode}");
        // The conversation is deleted with the thread, including what was kept only for other processes.
        assert!(first.rows().await["gateway.db.run_frames"] > 0);
        assert_eq!(second.delete("/api/threads/t").await.status, 200);
        assert_eq!(first.rows().await["gateway.db.run_frames"], 0);
    }
}

/// Its first frames are kept nowhere any more. That is no gap for a client that has none of them, on any gateway.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_joins_a_long_run_elsewhere_begins_with_the_oldest_frame_that_is_kept() {
    let sections = json!({"stream_bridge": {"queue_maxsize": 8}});
    let setup = Setup { script: script("several-long"), sections, ..Setup::on("postgres", "delta") };
    let first = setup.start().await;
    let second = first.beside().await;
    first.create("t").await;
    let mut body = question("work");
    body["stream_mode"] = json!(["values", "messages-tuple", "updates", "tasks"]);
    let run = first.post("/api/threads/t/runs", body).await.ok();
    let path = format!("/api/threads/t/runs/{}/stream", run["run_id"].as_str().unwrap());
    gate("several-long").reached().await;
    let join = async |gateway: &Gateway| {
        Frames::of(gateway.open_answer(Request::get(&path).body(Body::empty()).unwrap()).await)
    };
    let (mut here, mut elsewhere) = (join(&first).await, join(&second).await);
    let oldest = here.next().await.unwrap();
    assert!(oldest.id.as_deref().is_some_and(|id| !id.ends_with("-0")), "{oldest:?}");
    assert_eq!(elsewhere.next().await.unwrap(), oldest);
    let mut later = join(&second).await;
    assert_eq!(later.next().await.unwrap(), oldest);
    for _ in 0..7 {
        let next = here.next().await;
        assert_eq!((elsewhere.next().await, later.next().await), (next.clone(), next));
    }
    gate("several-long").open();
    let (here, elsewhere, later) = tokio::join!(here.rest(), elsewhere.rest(), later.rest());
    assert_eq!(here.last().unwrap().name, "end");
    assert_eq!((&elsewhere, &later), (&here, &here));
}

#[tokio::test]
async fn a_run_that_nobody_follows_elsewhere_hands_on_nothing() {
    for mode in MODES {
        let name = format!("several-alone-{mode}");
        let (first, second) = two(mode, &name).await;
        let run = first.start_run("t", "work").await;
        gate(&name).reached().await;
        let stream = Request::get(format!("/api/threads/t/runs/{run}/stream")).body(Body::empty()).unwrap();
        let stream = first.open_answer(stream).await;
        // Waiting for the run elsewhere, or reading it, needs no frames.
        let place = format!("/api/threads/t/runs/{run}/join");
        let (joined, frames, ()) = tokio::join!(second.get(&place), sse::all(stream), async {
            second.state("t").await;
            gate(&name).open();
        });
        joined.ok();
        assert_eq!(frames.last().unwrap().name, "end");
        let followed = "SELECT 1 FROM threadkeep_gateway_runs WHERE followed";
        assert!(first.postgres().await.query(followed, &[]).await.unwrap().is_empty(), "{mode}");
        assert_eq!(first.rows().await["gateway.db.run_frames"], 0);
    }
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
    let sections = json!({"run_ownership": {"lease_seconds": 2, "grace_seconds": 1}});
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
            thread::sleep(Duration::from_secs(7));
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
            let sections = json!({"run_ownership": {"lease_seconds": 3, "grace_seconds": 1}});
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

#[tokio::test]
async fn leaving_the_stream_of_a_run_elsewhere_cancels_it_if_the_client_said_so() {
    let (first, second) = two("delta", "several-leave").await;
    let run = first.start_run("t", "work").await;
    gate("several-leave").reached().await;
    let path = |query: &str| format!("/api/threads/t/runs/{run}/stream{query}");
    let open =
        async |query: &str| second.open_answer(Request::get(path(query)).body(Body::empty()).unwrap()).await;
    drop(open("").await);
    let stays = open("?cancel_on_disconnect=true").await;
    assert_eq!(first.run("t", &run).await["status"], "running");
    drop(stays);
    until(&first, &run, "interrupted").await;
    first.join("t", &run).await;
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
        while asking.query("SELECT 1 FROM pg_locks WHERE NOT granted", &[]).await.unwrap().is_empty() {}
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

/// Forwards each connection to the next server in turn.
async fn balancer(servers: Vec<SocketAddr>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        for server in servers.iter().cycle() {
            let (mut client, _) = listener.accept().await.unwrap();
            let server = *server;
            tokio::spawn(async move {
                let mut server = TcpStream::connect(server).await.unwrap();
                // The first side to close ends it.
                let _ = copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    address
}

/// A client of both gateways, which opens a new connection, and so reaches the other gateway, for each request.
struct Balanced {
    base: String,
    client: Client,
}

impl Balanced {
    async fn before(gateways: [&Gateway; 2]) -> Arc<Self> {
        let servers = join_all(gateways.map(Gateway::listen)).await;
        rustls::crypto::ring::default_provider().install_default().ok();
        let client = Client::builder().no_proxy().pool_max_idle_per_host(0).build().unwrap();
        Arc::new(Self { base: format!("http://{}", balancer(servers).await), client })
    }

    async fn send(&self, method: Method, path: &str, body: Option<Value>, key: Option<&str>) -> (u16, Value) {
        let mut request = self.client.request(method, format!("{}{path}", self.base));
        if let Some(body) = body {
            request = request.json(&body);
        }
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap_or_default())
    }

    async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        self.send(Method::POST, path, Some(body), None).await
    }
}

/// Scenario 15, with two processes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_requests_through_a_balancer_one_gets_the_thread() {
    let (first, second) = two("delta", "several-parallel").await;
    let balanced = Balanced::before([&first, &second]).await;
    let asked = join_all((0..50).map(|_| {
        let balanced = Arc::clone(&balanced);
        tokio::spawn(async move { balanced.post("/api/threads/t/runs", question("work")).await })
    }));
    let answers: Vec<_> = asked.await.into_iter().map(Result::unwrap).collect();
    let statuses = |status| answers.iter().filter(|(found, _)| *found == status).count();
    assert_eq!((statuses(200), statuses(409)), (1, 49));

    // With one key, all get the same run.
    gate("several-parallel").open();
    let (_, run) = answers.into_iter().find(|(status, _)| *status == 200).unwrap();
    first.join("t", run["run_id"].as_str().unwrap()).await;
    let asked = join_all((0..10).map(|_| {
        let balanced = Arc::clone(&balanced);
        tokio::spawn(async move {
            balanced.send(Method::POST, "/api/threads/t/runs", Some(question("hi")), Some("k")).await
        })
    }));
    let mut runs: Vec<_> = asked.await.into_iter().map(|answer| answer.unwrap().1["run_id"].take()).collect();
    runs.dedup();
    assert!(runs.len() == 1 && runs[0].is_string(), "{runs:?}");
}

/// Scenario 6, with two processes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_and_a_run_through_a_balancer_exclude_each_other() {
    let (first, second) = two("delta", "several-delete").await;
    let balanced = Balanced::before([&first, &second]).await;
    for round in 0..100 {
        let thread = format!("t{round}");
        first.create(&thread).await;
        let (place, runs) = (format!("/api/threads/{thread}"), format!("/api/threads/{thread}/runs"));
        let (deleted, created) = tokio::join!(
            balanced.send(Method::DELETE, &place, None, None),
            balanced.post(&runs, question("hello"))
        );
        match (deleted.0, created.0) {
            (409, 200) => {
                first.join(&thread, created.1["run_id"].as_str().unwrap()).await;
                assert_eq!(texts(&second.state(&thread).await), ["hello", "You said: hello"]);
            }
            (200, 404 | 409) => assert_eq!(second.get(&format!("{place}/state")).await.status, 404),
            // Both succeed if the run, or the deletion, had ended before the other began.
            (200, 200) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Many concurrent conversations whose turns alternate between two gateways.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conversations_over_a_balancer_are_whole() {
    for mode in MODES {
        let (first, second) = two(mode, "several-turns").await;
        let balanced = Balanced::before([&first, &second]).await;
        let talks = join_all((0..6).map(|n| {
            let balanced = Arc::clone(&balanced);
            tokio::spawn(async move {
                let thread = format!("talk{n}");
                balanced.post("/api/threads", json!({ "thread_id": thread })).await;
                for turn in 0..5 {
                    let wait = format!("/api/threads/{thread}/runs/wait");
                    let (status, body) = balanced.post(&wait, question(&format!("q{turn}"))).await;
                    assert_eq!(status, 200, "{body}");
                }
            })
        }));
        talks.await.into_iter().for_each(Result::unwrap);
        let expected: Vec<String> =
            (0..5).flat_map(|turn| [format!("q{turn}"), format!("You said: q{turn}")]).collect();
        for n in 0..6 {
            let state = first.state(&format!("talk{n}")).await;
            assert_eq!(texts(&state), expected);
            assert_eq!(second.state(&format!("talk{n}")).await, state);
        }
    }
}

//! Streams of runs that another gateway works on.

use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use futures::future::join_all;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::several::{script, two, until};
use crate::sse::{self, Frames};
use crate::support::{Gateway, MODES, Setup, question};

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

/// Its process is gone, and nothing is left of its stream. A client has what that process sent: more than is kept here,
/// the same number of frames, or less.
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

/// Nobody followed the run elsewhere while it was at work. Its process has all its frames, or the last ones, or none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_comes_to_another_gateway_after_the_end_gets_what_the_owner_keeps() {
    let kept = [json!({}), json!({"queue_maxsize": 4}), json!({"total_max_bytes": 1})];
    for (n, bridge) in kept.into_iter().enumerate() {
        let name = format!("several-after-{n}");
        let sections = json!({ "stream_bridge": bridge });
        let setup = Setup { script: script(&name), sections, ..Setup::on("postgres", "delta") };
        let first = setup.start().await;
        first.create("t").await;
        first.create("u").await;
        let modes = json!(["values", "messages-tuple", "updates", "tasks"]);
        let mut body = question("hello");
        body["stream_mode"] = modes.clone();
        let done = first.post("/api/threads/t/runs", body).await.ok();
        let done = done["run_id"].as_str().unwrap();
        until(&first, done, "success").await;
        let looping = format!("{name}-loop");
        let mut body = json!({"input": question("loop")["input"], "config": {"recursion_limit": 2}});
        body["stream_mode"] = modes;
        let failed = first.post("/api/threads/t/runs", body).await.ok();
        let failed = failed["run_id"].as_str().unwrap();
        gate(&looping).reached().await;
        gate(&looping).open();
        until(&first, failed, "error").await;
        let join = async |gateway: &Gateway, run: &str, last: Option<&str>| {
            let request = Request::get(format!("/api/threads/t/runs/{run}/stream"));
            let request = last.into_iter().fold(request, |request, id| request.header("Last-Event-ID", id));
            sse::all(gateway.open_answer(request.body(Body::empty()).unwrap()).await).await
        };
        for run in [done, failed] {
            join(&first, run, None).await;
        }
        // Whatever it publishes takes the room of the runs that have ended.
        first.ask("u", "more").await;
        let client = first.postgres().await;
        for run in [done, failed] {
            // Its process may be slow to answer. What it has handed on, the next gateway finds.
            let handed_on = "SELECT 1 FROM threadkeep_gateway_run_frames WHERE ends AND run_id = $1";
            let answered = async {
                while client.query(handed_on, &[&run]).await.unwrap().is_empty() {
                    join(&first.beside().await, run, None).await;
                }
            };
            tokio::time::timeout(Duration::from_mins(10), answered).await.expect("nothing is handed on");
            let all = join(&first, run, None).await;
            let mut had: Vec<&str> = all.iter().filter_map(|frame| frame.id.as_deref()).collect();
            assert_eq!(had.first().is_some_and(|id| id.ends_with("-0")), n == 0, "{name}: {all:?}");
            if n > 0 {
                had.insert(0, "1-0");
            }
            let other = first.beside().await;
            for last in had.into_iter().map(Some).chain([None]) {
                let here = join(&first, run, last).await;
                assert_eq!(join(&other, run, last).await, here, "{name} {last:?}");
                let is_gap = n > 0 && last == Some("1-0");
                assert_eq!(here.last().unwrap().name, if is_gap { "gap" } else { "end" }, "{name} {last:?}");
            }
        }
    }
}

/// The run has ended, and the last of its frames are on their way, or will never come. A client of a gateway that has
/// not followed it does not take a part for the whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_comes_before_the_last_frames_of_an_ended_run_gets_its_state() {
    for mode in MODES {
        let name = format!("several-part-{mode}");
        let (first, second) = two(mode, &name).await;
        let run = first.start_run("t", "work").await;
        gate(&name).reached().await;
        let path = format!("/api/threads/t/runs/{run}/stream");
        let join = async |gateway: &Gateway| {
            Frames::of(gateway.open_answer(Request::get(&path).body(Body::empty()).unwrap()).await)
        };
        let mut elsewhere = join(&second).await;
        let mut seen = vec![elsewhere.until("metadata").await];
        gate(&name).open();
        seen.extend(elsewhere.rest().await);
        let last = "DELETE FROM threadkeep_gateway_run_frames WHERE ends RETURNING first_seq";
        let last: i64 = first.postgres().await.query_one(last, &[]).await.unwrap().get(0);
        let part = &seen[..usize::try_from(last).unwrap()];
        assert!(!part.is_empty(), "{mode}: it was followed before its end");
        let shown = join(&first.beside().await).await.rest().await;
        let (frames, outcome) = shown.split_at(part.len());
        assert_eq!(frames, part, "{mode}");
        assert_eq!(sse::names(outcome), ["values", "end"], "{mode}");
        assert_eq!(outcome[0].data["messages"], first.state("t").await["values"]["messages"], "{mode}");
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

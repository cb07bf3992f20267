//! Clients that wait for the end of a run that cannot be written or read: none is answered before it.

use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, Response};
use serde_json::{Value as Json, json};
use tempfile::TempDir;
use threadkeep_agent::model::scripted::gate;
use tokio::time::timeout;

use super::super::{frames, gated};
use super::*;
use threadkeep_records::{DATABASE_FILE, EventBackend, Lease, NewRun, Records, RecordsOptions};

/// A hang is a failure after this time.
const FOR_EVER: Duration = Duration::from_mins(10);

async fn answer(gateway: &Gateway, request: Request<Body>) -> Response<Body> {
    crate::http::router(Arc::clone(&gateway.app)).oneshot(request).await.unwrap()
}

async fn json_of(response: Response<Body>) -> Json {
    serde_json::from_slice(&to_bytes(response.into_body(), usize::MAX).await.unwrap()).unwrap()
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers[name].to_str().unwrap()
}

fn cancelling(run_id: &str) -> Request<Body> {
    let path = format!("/api/threads/t/runs/{run_id}/cancel?wait=true");
    Request::post(path).body(Body::empty()).unwrap()
}

/// From some write of a run on the database is unavailable for longer than any of its attempts. The state that it has
/// left by then is no result.
#[tokio::test]
async fn who_waits_for_a_run_whose_end_cannot_be_written_gets_no_state_as_its_result() {
    let mut not_ended = 0;
    for k in 1.. {
        let (gateway, _) = faulty(("sqlite", "delta"), "none").await;
        let records = &gateway.app.records;
        records.fail_from(k);
        let body = json!({"input": {"messages": [{"role": "user", "content": "next"}]}});
        let request = Request::post("/api/threads/t/runs/wait").header("content-type", "application/json");
        let answered = answer(&gateway, request.body(body.to_string().into()).unwrap()).await;
        let (status, headers) = (answered.status().as_u16(), answered.headers().clone());
        let body = json_of(answered).await;
        let active = records.runs().active_for_thread("t").await.unwrap();
        let failed = records.failed();
        records.fail_statement(0);
        if let Some(run) = active {
            not_ended += 1;
            assert_eq!((status, header(&headers, "retry-after")), (503, "1"), "{k}: {body}");
            assert!(body["detail"].as_str().unwrap().contains(&run.run_id), "{body}");
            let place = header(&headers, "content-location");
            assert!(place.ends_with(&run.run_id), "{place}");
            records::until_free(&gateway).await;
            let join = Request::get(format!("{place}/join")).body(Body::empty()).unwrap();
            let joined = json_of(answer(&gateway, join).await).await;
            assert!(matches!(joined["status"].as_str(), None | Some("error")), "{k}: {joined}");
        } else if failed == 0 {
            assert_eq!((status, &body["status"]), (200, &Json::Null), "{k}: {body}");
            break;
        }
    }
    assert!(not_ended > 0);
}

#[tokio::test]
async fn who_cancels_a_run_whose_end_cannot_be_written_is_not_answered_that_it_has_stopped() {
    let mut not_ended = 0;
    for k in 1.. {
        let name = format!("unended-{k}");
        let (gateway, _) = faulty(("sqlite", "delta"), &name).await;
        let run_id = gateway.create(ask("wait")).await.unwrap().run.run_id;
        gate(&name).reached().await;
        let records = &gateway.app.records;
        records.fail_from(k);
        let answered = answer(&gateway, cancelling(&run_id)).await;
        let failed = records.failed();
        let row = records.runs().get(&run_id).await.unwrap().unwrap();
        if row.status.is_active() {
            assert_eq!(
                (answered.status().as_u16(), header(answered.headers(), "retry-after")),
                (503, "1"),
                "{k}"
            );
            not_ended += usize::from(row.cancel_action.is_some());
        } else {
            assert_eq!(answered.status(), 204, "{k}");
        }
        if failed == 0 {
            break;
        }
    }
    assert!(not_ended > 0);
}

/// The records of one of several processes.
async fn process(dir: &TempDir, owner: &str) -> Records {
    let hour = Duration::from_hours(1);
    let options = RecordsOptions {
        event_backend: EventBackend::Memory,
        lease: Some(Lease::new(owner, hour, hour)),
        ..RecordsOptions::default()
    };
    Records::open(&dir.path().join(DATABASE_FILE), options).await.unwrap()
}

/// Its end is known from its row only, which cannot be read for a moment, as while a server fails over.
#[tokio::test]
async fn who_waits_for_a_run_of_another_process_whose_row_cannot_be_read_goes_on_waiting() {
    let dir = TempDir::new().unwrap();
    let (other, own) = (process(&dir, "other").await, process(&dir, "own").await);
    let parts = Parts { records: Some(own.clone()), ..Parts::default() };
    let gateway = Gateway::start_with(("memory", "full"), 3, &script("none"), parts).await;
    let run = NewRun { run_id: "r".into(), thread_id: "t".into(), ..NewRun::default() };
    other.runs().admit(run, MultitaskStrategy::Reject).await.unwrap();
    other.runs().start("r").await.unwrap();
    let router = crate::http::router(Arc::clone(&gateway.app));
    let answered = tokio::spawn(router.oneshot(cancelling("r")));
    let unread = async {
        while other.runs().get("r").await.unwrap().unwrap().cancel_action.is_none() {
            tokio::task::yield_now().await;
        }
        own.fail_reads(2);
        while own.reads_to_fail() > 0 && !answered.is_finished() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(FOR_EVER, unread).await.expect("nobody looks at its row");
    assert!(!answered.is_finished(), "the run works on: {:?}", answered.await);
    let end = RunEnd { status: RunStatus::Interrupted, error: None, ..RunEnd::failed("") };
    other.runs().finish("r", &end).await.unwrap();
    let answered = timeout(FOR_EVER, answered).await.expect("its end is not noticed");
    assert_eq!(answered.unwrap().unwrap().status(), 204);
}

/// The database is away for longer than a write is usually tried: followers in other processes get the rest of the
/// stream when it is back.
#[tokio::test]
async fn a_stream_is_handed_on_after_the_database_was_away() {
    let gateway = Gateway::start_on(("sqlite", "full"), &gated("handed-on")).await;
    let created = gateway.create(ask("wait")).await.unwrap();
    let run_id = created.run.run_id.clone();
    gate("handed-on").reached().await;
    let records = &gateway.app.records;
    records.fail_from(1);
    gateway.app.streams.hand_on("t".to_owned(), run_id.clone());
    let tried = async {
        while records.failed() < 5 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(FOR_EVER, tried).await.expect("it is tried again");
    records.fail_statement(0);
    gate("handed-on").open();
    let shown = frames(created.stream).await;
    let handed_on = async {
        loop {
            let batches = records.runs().frames(&run_id, 0, 100).await.unwrap();
            if batches.last().is_some_and(|batch| batch.ends) {
                return batches.iter().map(|batch| batch.frames.len()).sum::<usize>();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let handed_on = timeout(FOR_EVER, handed_on).await.expect("the rest is handed on");
    assert_eq!(handed_on + 1, shown.len(), "all but the end, which is none of the frames: {shown:?}");
}

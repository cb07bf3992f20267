//! A run whose stream has ended and whose row has not: it could not be written.

use std::sync::Arc;

use axum::body::Body;
use axum::http::Request;
use futures::StreamExt as _;
use serde_json::{Value, json};
use threadkeep_records::{CancelAction, DecideOutcome, RunEnd, RunStatus};
use tower::ServiceExt as _;

use super::super::router;
use super::Gateway;
use crate::streams::verdict::UNREAD;

/// What the event stream of the thread says at the end of its run.
async fn end_of(gateway: &Gateway) -> Value {
    let request = Request::post("/api/threads/t/stream/events").header("content-type", "application/json");
    let request = request.body(Body::from(json!({"channels": ["lifecycle"]}).to_string())).unwrap();
    let answer = router(Arc::clone(&gateway.app)).oneshot(request).await.unwrap();
    let mut pieces = answer.into_body().into_data_stream();
    let mut text = String::new();
    loop {
        text.push_str(std::str::from_utf8(&pieces.next().await.unwrap().unwrap()).unwrap());
        let events = text.lines().filter_map(|line| line.strip_prefix("data: "));
        let events = events.filter_map(|data| serde_json::from_str::<Value>(data).ok());
        let mut said = events.map(|mut event| event["params"]["data"].take());
        if let Some(end) =
            said.find(|data| ["completed", "failed", "interrupted"].map(Value::from).contains(&data["event"]))
        {
            return end;
        }
    }
}

/// What was decided or accepted is how it ends. Otherwise nothing says that it succeeded.
#[tokio::test]
async fn the_end_of_a_run_in_its_threads_events_is_no_success_unless_that_is_known() {
    let ends = [
        (None, "failed", json!(UNREAD)),
        (Some(RunStatus::Success), "completed", Value::Null),
        (Some(RunStatus::Error), "failed", json!("boom")),
        (Some(RunStatus::Interrupted), "interrupted", Value::Null),
    ];
    for (decided, event, error) in ends {
        let gateway = Gateway::start("full").await;
        gateway.record("r", RunStatus::Running).await;
        let runs = gateway.app.records.runs();
        if decided == Some(RunStatus::Interrupted) {
            runs.request_cancel("r", CancelAction::Interrupt).await.unwrap();
        } else if let Some(status) = decided {
            let end = RunEnd { status, error: error.as_str().map(str::to_owned), ..RunEnd::failed("") };
            assert_eq!(runs.decide("r", &end).await.unwrap(), DecideOutcome::Decided);
        }
        gateway.app.streams.open("r").end();
        let said = end_of(&gateway).await;
        assert_eq!((&said["event"], &said["error"]), (&json!(event), &error), "{decided:?}");
    }
}

//! The numbers of a thread's events, whatever clocks say: one that does not move, one of another process, and one that
//! is set back while clients follow the thread, after which events of later runs have lower numbers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use axum::http::Request;
use futures::StreamExt as _;
use serde_json::{Value as Json, json};
use threadkeep::id::{Clock, IdSource};
use tower::ServiceExt as _;

use super::{Gateway, STREAM_MODES, ask, options, script};
use crate::app::Parts;
use crate::runs::request::RunRequest;
use threadkeep_records::{MultitaskStrategy, NewRun, Records, RecordsOptions, RunEnd};

/// A clock that stands still until it is set, in milliseconds since the Unix epoch.
#[derive(Clone)]
struct Settable(Arc<AtomicU64>);

impl Settable {
    /// To what the machine's clock says, less this.
    fn set_back(&self, by: Duration) {
        let now = u64::try_from(chrono::Utc::now().timestamp_millis()).unwrap();
        self.0.store(now - u64::try_from(by.as_millis()).unwrap(), Ordering::SeqCst);
    }
}

impl Clock for Settable {
    fn now_ms(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

async fn follow(gateway: &Gateway, since: Option<u64>) -> BodyDataStream {
    let filter = json!({"channels": ["values", "lifecycle"], "since": since});
    let request = Request::post("/api/threads/t/stream/events").header("content-type", "application/json");
    let request = request.body(Body::from(filter.to_string())).unwrap();
    let answer = crate::http::router(Arc::clone(&gateway.app)).oneshot(request).await.unwrap();
    assert_eq!(answer.status(), 200);
    answer.into_body().into_data_stream()
}

/// A gateway whose ids and records have this clock.
async fn with_clock(clock: &Settable, script: &Json) -> Gateway {
    let ids = Arc::new(IdSource::seeded(clock.clone(), 1));
    let source = Arc::clone(&ids);
    let options = RecordsOptions {
        clock: threadkeep_records::Clock::from_fn(move || source.now()),
        ..RecordsOptions::default()
    };
    let records = Records::open_memory(options).await.unwrap();
    let parts = Parts { ids, records: Some(records), ..Parts::default() };
    Gateway::start_with(("memory", "full"), 3, script, parts).await
}

/// The events up to the end of a run.
async fn to_end(mut stream: BodyDataStream) -> Vec<Json> {
    let (mut text, mut events) = (String::new(), Vec::new());
    loop {
        while let Some((event, rest)) = text.split_once("\n\n") {
            let data = event.lines().find_map(|line| line.strip_prefix("data: "));
            let event: Option<Json> = data.map(|data| serde_json::from_str(data).unwrap());
            text = rest.to_owned();
            let Some(event) = event else { continue };
            let ends = event["params"]["data"]["event"] == "completed";
            events.push(event);
            if ends {
                return events;
            }
        }
        let more = tokio::time::timeout(Duration::from_mins(10), stream.next()).await;
        let more = more.expect("it goes on").expect("the stream goes on").unwrap();
        text.push_str(std::str::from_utf8(&more).unwrap());
    }
}

/// All of this run, from its beginning, and nothing else.
fn assert_all_of(run_id: &str, events: &[Json]) {
    assert_eq!(events[0]["params"]["data"]["event"], "running", "{events:?}");
    assert!(events.iter().any(|event| event["method"] == "values"), "{events:?}");
    let of_run = |event: &Json| event["event_id"].as_str().unwrap().starts_with(run_id);
    assert!(events.iter().all(of_run), "{events:?}");
}

fn last_seq(events: &[Json]) -> u64 {
    events.last().unwrap()["seq"].as_u64().unwrap()
}

#[tokio::test]
async fn a_client_gets_the_events_of_runs_that_come_after_the_clock_was_set_back() {
    let clock = Settable(Arc::default());
    clock.set_back(Duration::ZERO);
    let parts = Parts { ids: Arc::new(IdSource::seeded(clock.clone(), 1)), ..Parts::default() };
    let gateway = Gateway::start_with(("memory", "full"), 3, &script(), parts).await;
    let (_, one) = gateway.run(ask("one")).await;
    let events = to_end(follow(&gateway, None).await).await;
    assert_all_of(&one.run_id, &events);

    // It is connected when the clock is set.
    clock.set_back(Duration::ZERO);
    let stream = follow(&gateway, Some(last_seq(&events))).await;
    clock.set_back(Duration::from_hours(1));
    let (_, two) = gateway.run(ask("two")).await;
    let events = to_end(stream).await;
    assert_all_of(&two.run_id, &events);

    // It comes back later.
    let (_, three) = gateway.run(ask("three")).await;
    let events = to_end(follow(&gateway, Some(last_seq(&events))).await).await;
    assert_all_of(&three.run_id, &events);
}

/// It has more runs than are looked at, all of them of the time by which the clock is set back.
#[tokio::test]
async fn a_client_of_a_thread_of_many_runs_gets_those_that_come_after_the_clock_was_set_back() {
    let clock = Settable(Arc::default());
    clock.set_back(Duration::ZERO);
    let source = IdSource::seeded(clock.clone(), 1);
    let options = RecordsOptions {
        clock: threadkeep_records::Clock::from_fn(move || source.now()),
        ..RecordsOptions::default()
    };
    let records = Records::open_memory(options).await.unwrap();
    let parts = Parts { records: Some(records), ..Parts::default() };
    let gateway = Gateway::start_with(("memory", "full"), 3, &script(), parts).await;
    let runs = gateway.app.records.runs();
    for n in 0..100 {
        let run_id = format!("old-{n}");
        let run = NewRun { run_id: run_id.clone(), thread_id: "t".to_owned(), ..NewRun::default() };
        runs.admit(run, MultitaskStrategy::Reject).await.unwrap();
        runs.finish(&run_id, &RunEnd::failed("old")).await.unwrap();
    }
    let stream = follow(&gateway, None).await;
    clock.set_back(Duration::from_hours(1));
    let (_, run) = gateway.run(ask("hello")).await;
    // It begins with the end of the newest run that there was, of which nothing else is kept.
    let events = to_end(stream).await.into_iter().skip_while(|event| event["event_id"] != "old-99:end");
    assert_all_of(&run.run_id, &events.skip(1).collect::<Vec<_>>());
}

/// Or its runs are of a process whose clock is ahead of this one's: their numbers go on.
#[tokio::test]
async fn a_client_that_comes_back_gets_all_runs_since_although_the_clock_was_set_back_a_little() {
    let clock = Settable(Arc::default());
    clock.set_back(Duration::ZERO);
    let gateway = with_clock(&clock, &script()).await;
    let (_, one) = gateway.run(ask("one")).await;
    let mut events = to_end(follow(&gateway, None).await).await;
    assert_all_of(&one.run_id, &events);
    clock.0.fetch_sub(30_000, Ordering::SeqCst);
    let (_, two) = gateway.run(ask("two")).await;
    let (_, three) = gateway.run(ask("three")).await;
    for missed in [two, three] {
        let since = last_seq(&events);
        events = to_end(follow(&gateway, Some(since)).await).await;
        assert_all_of(&missed.run_id, &events);
    }
}

/// It begins in the very millisecond in which that one ended, or in a process whose clock is slow, and that one had
/// frames ahead of the clock.
#[tokio::test]
async fn a_run_has_greater_numbers_than_the_run_before_it() {
    let clock = Settable(Arc::default());
    clock.set_back(Duration::ZERO);
    // At most 32 frames have the same millisecond.
    let script = json!({"chunk_chars": 1, "rules": [{"answers": [{"text": "a".repeat(100)}]}]});
    let gateway = with_clock(&clock, &script).await;
    let mut last: Option<u64> = None;
    for back_ms in [0, 0, 5_000, 5_000] {
        clock.0.fetch_sub(back_ms, Ordering::SeqCst);
        let request = RunRequest { options: options(STREAM_MODES), ..ask("go") };
        let (_, run) = gateway.run(request).await;
        let events = to_end(follow(&gateway, None).await).await;
        assert_all_of(&run.run_id, &events);
        let first = events[0]["seq"].as_u64().unwrap();
        assert!(last.is_none_or(|last| first > last), "{first} after {last:?}");
        // A client with the run before gets all of it.
        assert_eq!(to_end(follow(&gateway, last).await).await, events);
        last = Some(last_seq(&events));
    }
}

/// It has failed, of which nothing but its row is kept: its `error` is published when a client asks for it.
#[tokio::test]
async fn the_end_of_a_run_has_the_number_of_its_time_whenever_it_is_said() {
    let clock = Settable(Arc::default());
    clock.set_back(Duration::from_hours(2));
    let gateway = with_clock(&clock, &script()).await;
    let runs = gateway.app.records.runs();
    let old = NewRun { run_id: "old".to_owned(), thread_id: "t".to_owned(), ..NewRun::default() };
    runs.admit(old, MultitaskStrategy::Reject).await.unwrap();
    runs.finish("old", &RunEnd::failed("old")).await.unwrap();
    clock.set_back(Duration::from_hours(1));
    let (_, run) = gateway.run(ask("hello")).await;
    clock.set_back(Duration::ZERO);
    let events = to_end(follow(&gateway, Some(1)).await).await;
    assert_eq!(events[0]["event_id"], "old:end");
    assert_all_of(&run.run_id, &events[1..]);
    let numbers: Vec<u64> = events.iter().map(|event| event["seq"].as_u64().unwrap()).collect();
    assert!(numbers.is_sorted_by(|one, next| one < next), "{numbers:?}");
}

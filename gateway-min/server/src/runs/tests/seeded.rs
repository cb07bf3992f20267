//! With a seed and a clock, the same conversation with subagents has the same stream and the same events, byte for byte.

use std::fmt::Write as _;

use chrono::DateTime;
use threadkeep::id::{Clock as _, IdSource};
use threadkeep_records::{Clock, DATABASE_FILE, Records, RecordsOptions};

use super::*;

const NOW_MS: u64 = 1_700_000_000_123;

struct Still;

impl threadkeep::id::Clock for Still {
    fn now_ms(&self) -> u64 {
        NOW_MS
    }
}

/// A lead that delegates twice, one after the other, to subagents of two turns.
fn delegating() -> Json {
    let task = |prompt: &str| json!([{"name": "task", "args": {"prompt": prompt, "subagent_type": "general-purpose"}}]);
    json!({"rules": [
        {"when": {"caller": "lead_agent"}, "answers": [
            {"text": "First.", "tool_calls": task("alpha"), "usage": {"input_tokens": 9, "output_tokens": 1}},
            {"text": "Then.", "tool_calls": task("bravo")},
            {"text": "Got {{tool_result}}"},
        ]},
        {"answers": [
            {"text": "I look.", "tool_calls": [{"name": "ls", "args": {}}], "usage": {"input_tokens": 9, "output_tokens": 1}},
            {"text": "Done with {{input}} [r1 ls]."},
        ]},
    ]})
}

/// The stream of a run on new stores, and what its records say afterwards.
async fn conversation(backend: &'static str, mode: &'static str) -> (String, String) {
    let directory = TempDir::new().unwrap();
    let clock = Clock::from_fn(|| DateTime::from_timestamp_millis(Still.now_ms().cast_signed()).unwrap());
    let of_records = RecordsOptions { clock, ..RecordsOptions::default() };
    let records = match backend {
        "memory" => Records::open_memory(of_records).await.unwrap(),
        _ => Records::open(&directory.path().join(DATABASE_FILE), of_records).await.unwrap(),
    };
    let parts = Parts {
        ids: Arc::new(IdSource::seeded(Still, 13)),
        records: Some(records.clone()),
        ..Parts::default()
    };
    let gateway = Gateway::start_with((backend, mode), 3, &delegating(), parts).await;
    let question = json!([{"type": "human", "content": "go", "id": "question"}]);
    let request = RunRequest {
        input: RunInput::Values(Map::from_iter([("messages".to_owned(), question)])),
        delegation: Delegation { enabled: true, max_concurrent: 3, max_total: 6 },
        options: RunOptions { stream_subgraphs: true, ..options(STREAM_MODES) },
        ..go_on()
    };
    let created = gateway.create(request).await.unwrap();
    let (mut stream, mut text) = (std::pin::pin!(created.stream), String::new());
    while let Some(frame) = stream.next().await {
        if let Frame::Event(event) = frame {
            let data = std::str::from_utf8(&event.data).unwrap();
            writeln!(text, "event: {}\ndata: {data}\nid: {}\n", event.name, event.id).unwrap();
        }
    }
    let row = gateway.row(&created.run.run_id).await;
    assert_eq!(row.status, RunStatus::Success, "{:?}", row.error);
    let mut query = EventQuery::new("t", row.run_id.clone());
    query.limit = EventQuery::MAX_LIMIT;
    let events = records.events().list(&query).await.unwrap();
    let executions = records.executions().of_thread("t").await.unwrap();
    (text, format!("{row:#?}\n{events:#?}\n{executions:#?}"))
}

#[tokio::test]
async fn a_seed_and_a_clock_decide_every_byte_of_a_stream_and_its_events() {
    for (backend, mode) in everywhere().filter(|(backend, _)| *backend != "postgres") {
        let (stream, recorded) = conversation(backend, mode).await;
        let (again, recorded_again) = conversation(backend, mode).await;
        for (first, second) in stream.lines().zip(again.lines()) {
            assert_eq!(first, second, "{backend}, {mode}");
        }
        assert_eq!((stream.len(), recorded), (again.len(), recorded_again), "{backend}, {mode}");
        for part in ["task_completed", "event: updates|tools:", "\"timestamp\":\"2023-11-14T22:13:20.123"] {
            assert!(stream.contains(part), "{part}");
        }
    }
}

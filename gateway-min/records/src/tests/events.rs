use serde_json::{Value, json};

use super::support::*;
use crate::*;

const BACKENDS: [EventBackend; 3] = [EventBackend::Memory, EventBackend::Database, EventBackend::Jsonl];

/// Records with the given backend, and a run `r` on each of the threads `t` and `u`.
async fn with_runs(backend: EventBackend) -> Fixture {
    let fixture = fixture_with(backend).await;
    for (thread_id, run_id) in [("t", "r"), ("u", "s")] {
        let new = NewThread {
            thread_id: thread_id.to_owned(),
            user_id: Some("ann".to_owned()),
            ..NewThread::default()
        };
        fixture.records.threads().create(new).await.unwrap();
        let run = NewRun { user_id: Some("bob".to_owned()), ..new_run(thread_id, run_id) };
        fixture.records.runs().admit(run, MultitaskStrategy::Reject).await.unwrap();
    }
    fixture
}

fn event(event_type: &str) -> NewEvent {
    NewEvent::new(event_type, "context", Value::Null)
}

fn message(n: u32) -> NewEvent {
    NewEvent::new("llm.ai.response", MESSAGE_CATEGORY, json!({ "n": n }))
}

async fn seqs(records: &Records, query: &EventQuery) -> Vec<i64> {
    records.events().list(query).await.unwrap().into_iter().map(|row| row.seq).collect()
}

#[tokio::test]
async fn appended_events_read_back() {
    for backend in BACKENDS {
        let fixture = with_runs(backend).await;
        let earlier = fixture.clock.now();
        fixture.clock.advance_micros(5);
        let content = json!({"text": "é\u{0}", "list": [1, 2.5, null]});
        let metadata = object(json!({"caller": "lead_agent"}));
        let past = NewEvent {
            metadata: metadata.clone(),
            created_at: Some(earlier),
            ..NewEvent::new("llm.human.input", MESSAGE_CATEGORY, content.clone())
        };
        let appended = fixture.records.events().append("t", "r", vec![past, event("run.end")]).await.unwrap();
        assert_eq!(appended, [1, 2]);
        let rows = fixture.records.events().list(&EventQuery::new("t", "r")).await.unwrap();
        let first = EventRow {
            thread_id: "t".to_owned(),
            run_id: "r".to_owned(),
            user_id: Some("bob".to_owned()),
            seq: 1,
            event_type: "llm.human.input".to_owned(),
            category: "message".to_owned(),
            content,
            metadata,
            created_at: earlier,
        };
        let second = EventRow {
            seq: 2,
            event_type: "run.end".to_owned(),
            category: "context".to_owned(),
            content: Value::Null,
            metadata: JsonObject::new(),
            created_at: fixture.clock.now(),
            ..first.clone()
        };
        assert_eq!(rows, [first, second]);
    }
}

#[tokio::test]
async fn numbers_are_the_threads_and_start_at_one() {
    for backend in BACKENDS {
        let fixture = with_runs(backend).await;
        let (records, events) = (&fixture.records, fixture.records.events());
        assert_eq!(events.append("t", "r", vec![event("a"), event("b")]).await.unwrap(), [1, 2]);
        assert_eq!(events.append("u", "s", vec![event("a")]).await.unwrap(), [1]);
        assert_eq!(events.append("t", "r", vec![]).await.unwrap(), [0; 0]);
        records.runs().finish("r", &end(RunStatus::Success)).await.unwrap();
        admit(records, "t", "r2").await;
        assert_eq!(events.append("t", "r2", vec![event("a")]).await.unwrap(), [3]);
        // A finished run may still append: its delivery receipt comes late.
        assert_eq!(events.append("t", "r", vec![event("c")]).await.unwrap(), [4]);
        assert_eq!(seqs(records, &EventQuery::new("t", "r")).await, [1, 2, 4]);
        assert_eq!(seqs(records, &EventQuery::new("t", "r2")).await, [3]);
        assert_eq!(seqs(records, &EventQuery::new("u", "s")).await, [1]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn parallel_appends_leave_no_gap() {
    for backend in BACKENDS {
        let fixture = with_runs(backend).await;
        let tasks = (0..40).map(|i| {
            let events = fixture.records.events().clone();
            let (thread_id, run_id) = if i % 2 == 0 { ("t", "r") } else { ("u", "s") };
            tokio::spawn(async move {
                events.append(thread_id, run_id, vec![event("x"); 1 + i / 2]).await.unwrap()
            })
        });
        for batch in futures::future::try_join_all(tasks).await.unwrap() {
            // A batch is contiguous.
            assert!(batch.windows(2).all(|pair| pair[1] == pair[0] + 1), "{batch:?}");
        }
        for (thread_id, run_id) in [("t", "r"), ("u", "s")] {
            let all = seqs(&fixture.records, &EventQuery::new(thread_id, run_id)).await;
            assert_eq!(all, (1..=210).collect::<Vec<_>>());
        }
    }
}

#[tokio::test]
async fn filters_are_exact_and_combine() {
    for backend in BACKENDS {
        let fixture = with_runs(backend).await;
        let task = |event_type: &str, task_id: Value| NewEvent {
            metadata: object(json!({ "task_id": task_id })),
            ..event(event_type)
        };
        let all = vec![
            task("subagent.start", json!("a")),
            task("subagent.step", json!("a")),
            task("subagent.step", json!("b\"\u{1}é")),
            event("run.end"),
            task("subagent.end", json!("a")),
            task("subagent.end", json!(1)),
        ];
        fixture.records.events().append("t", "r", all).await.unwrap();
        let base = EventQuery::new("t", "r");
        let types = |types: &[&str]| Some(types.iter().map(|t| (*t).to_owned()).collect());
        let task_id = |task_id: &str| Some(task_id.to_owned());
        for (query, expected) in [
            (EventQuery { event_types: types(&["subagent.step"]), ..base.clone() }, vec![2, 3]),
            (EventQuery { event_types: types(&["run.end", "subagent.start"]), ..base.clone() }, vec![1, 4]),
            (EventQuery { event_types: types(&["unknown"]), ..base.clone() }, vec![]),
            (EventQuery { event_types: types(&[" run.end", "RUN.END", "run", ""]), ..base.clone() }, vec![]),
            (EventQuery { event_types: types(&[]), ..base.clone() }, vec![]),
            (EventQuery { task_id: task_id("a"), ..base.clone() }, vec![1, 2, 5]),
            (EventQuery { task_id: task_id("b\"\u{1}é"), ..base.clone() }, vec![3]),
            (EventQuery { task_id: task_id("1"), ..base.clone() }, vec![]),
            (EventQuery { task_id: task_id(""), ..base.clone() }, vec![]),
            (EventQuery { after_seq: Some(4), ..base.clone() }, vec![5, 6]),
            (EventQuery { after_seq: Some(6), ..base.clone() }, vec![]),
            (EventQuery { limit: 2, ..base.clone() }, vec![1, 2]),
            // The limit applies after the other conditions.
            (EventQuery { task_id: task_id("a"), after_seq: Some(1), limit: 2, ..base.clone() }, vec![2, 5]),
            (
                EventQuery { task_id: task_id("a"), event_types: types(&["subagent.end"]), ..base.clone() },
                vec![5],
            ),
            (EventQuery::new("t", "s"), vec![]),
            (EventQuery::new("u", "r"), vec![]),
            (EventQuery::new("unknown", "unknown"), vec![]),
        ] {
            assert_eq!(seqs(&fixture.records, &query).await, expected, "{backend:?} {query:?}");
        }
    }
}

#[tokio::test]
async fn pages_go_through_2500_rows() {
    for backend in BACKENDS {
        let fixture = with_runs(backend).await;
        for _ in 0..5 {
            fixture.records.events().append("t", "r", vec![event("x"); 500]).await.unwrap();
        }
        let mut query = EventQuery::new("t", "r");
        assert_eq!(seqs(&fixture.records, &query).await.len(), 500);
        query.limit = EventQuery::MAX_LIMIT;
        let (mut pages, mut all) = (0, Vec::new());
        while pages < 3 {
            let page = seqs(&fixture.records, &query).await;
            let Some(last) = page.last() else { break };
            query.after_seq = Some(*last);
            all.extend(page);
            pages += 1;
        }
        assert_eq!((pages, all), (2, (1..=2500).collect()));
    }
}

#[tokio::test]
async fn limit_has_bounds() {
    for backend in BACKENDS {
        let fixture = with_runs(backend).await;
        for (limit, allowed) in [(0, false), (1, true), (2000, true), (2001, false)] {
            let result =
                fixture.records.events().list(&EventQuery { limit, ..EventQuery::new("t", "r") }).await;
            match result {
                Ok(rows) => assert!(allowed && rows.is_empty()),
                Err(error) => {
                    assert!(!allowed);
                    assert_eq!(
                        error.to_string(),
                        format!("invalid limit: {limit} is not between 1 and 2000")
                    );
                }
            }
        }
    }
}

#[tokio::test]
async fn only_messages_count() {
    for backend in BACKENDS {
        let fixture = with_runs(backend).await;
        let events = fixture.records.events();
        assert_eq!(events.count_messages("t").await.unwrap(), 0);
        let delivery = NewEvent::new("run.delivery", "outputs", json!({}));
        events.append("t", "r", vec![event("run.start"), delivery]).await.unwrap();
        assert_eq!(events.count_messages("t").await.unwrap(), 0);
        events.append("t", "r", vec![message(1), message(2)]).await.unwrap();
        assert_eq!(events.count_messages("t").await.unwrap(), 2);
        assert_eq!(events.count_messages("u").await.unwrap(), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn delivery_is_written_once() {
    for backend in BACKENDS {
        let fixture = with_runs(backend).await;
        let delivery = |n: u32| NewEvent::new("run.delivery", "outputs", json!({ "n": n }));
        let tasks = (0..10).map(|n| {
            let events = fixture.records.events().clone();
            tokio::spawn(async move { events.append_if_absent("t", "r", delivery(n)).await.unwrap() })
        });
        let written = futures::future::try_join_all(tasks).await.unwrap();
        assert_eq!(written.iter().flatten().collect::<Vec<_>>(), [&1]);
        // Other types and other runs do not prevent it.
        assert_eq!(
            fixture.records.events().append_if_absent("t", "r", event("run.end")).await.unwrap(),
            Some(2)
        );
        assert_eq!(fixture.records.events().append_if_absent("u", "s", delivery(0)).await.unwrap(), Some(1));
        assert_eq!(seqs(&fixture.records, &EventQuery::new("t", "r")).await, [1, 2]);
    }
}

/// Of two attempts to store the same events the one that comes first stores them, whichever it is.
#[tokio::test]
async fn what_an_attempt_in_doubt_stores_late_is_not_stored_twice() {
    let fixture = with_runs(EventBackend::Database).await;
    let (records, events) = (&fixture.records, fixture.records.events());
    let batch = |n: i64| {
        let time = fixture.clock.now() + chrono::TimeDelta::microseconds(n);
        [message(0), event("b")].map(|event| NewEvent { created_at: Some(time), ..event }).to_vec()
    };
    assert_eq!(events.append_once(("t", "r"), 0, batch(0)).await.unwrap(), [1, 2]);
    assert_eq!(events.append_once(("u", "s"), 0, batch(0)).await.unwrap(), [1, 2]);
    for _ in 0..2 {
        assert_eq!(events.append_once(("t", "r"), 0, batch(0)).await.unwrap(), [0; 0]);
    }
    // Both at once.
    let attempts = futures::join!(
        events.append_once(("t", "r"), 2, batch(1)),
        events.append_once(("t", "r"), 2, batch(1)),
    );
    let mut added = [attempts.0.unwrap(), attempts.1.unwrap()];
    added.sort();
    assert_eq!(added, [vec![], vec![3, 4]]);
    // What was given up may be stored after what follows it.
    assert_eq!(events.append_once(("t", "r"), 4, batch(3)).await.unwrap(), [5, 6]);
    assert_eq!(events.append_once(("t", "r"), 4, batch(2)).await.unwrap(), [7, 8]);
    assert_eq!(events.append_once(("t", "r"), 4, batch(3)).await.unwrap(), [0; 0]);
    assert_eq!(seqs(records, &EventQuery::new("t", "r")).await, (1..=8).collect::<Vec<_>>());
    // A long batch takes several statements.
    let long = |n| (0..600).flat_map(|_| batch(n)).collect::<Vec<_>>();
    assert_eq!(events.append_once(("t", "r"), 8, long(4)).await.unwrap().len(), 1200);
    assert_eq!(events.append_once(("t", "r"), 8, long(4)).await.unwrap(), [0; 0]);
    // The end of a run that is in doubt is written in parts; its transaction comes late.
    let (last, receipt) =
        (batch(5), NewEvent { created_at: Some(fixture.clock.now()), ..event("run.delivery") });
    assert_eq!(events.append_once(("t", "r"), 1208, last.clone()).await.unwrap(), [1209, 1210]);
    let stored = events.append_if_absent("t", "r", receipt.clone()).await.unwrap();
    assert_eq!(stored, Some(1211));
    events.conclude(("t", "r"), 1208, last.clone(), receipt.clone()).await.unwrap();
    let end = end(RunStatus::Success);
    records.conclude_and_decide(("t", "r"), (1208, last), receipt, &end).await.unwrap();
    let query = EventQuery { after_seq: Some(1208), ..EventQuery::new("t", "r") };
    assert_eq!(seqs(records, &query).await, [1209, 1210, 1211]);
    let gone = events.append_once(("t", "none"), 0, batch(0)).await;
    assert!(matches!(gone, Err(RecordsError::NotFound { .. })), "{gone:?}");
}

#[tokio::test]
async fn events_need_their_run() {
    for backend in BACKENDS {
        let fixture = with_runs(backend).await;
        for (thread_id, run_id) in [("t", "unknown"), ("t", "s"), ("unknown", "r")] {
            let error =
                fixture.records.events().append(thread_id, run_id, vec![event("x")]).await.unwrap_err();
            assert_eq!(error.to_string(), format!("Run {run_id} not found"));
        }
        // A reservation is not a run.
        let reservation = fixture.records.runs().reserve("v", WriterKind::CheckpointWrite).await.unwrap();
        let row_id = holder(&fixture.records, "v").await.unwrap();
        assert!(
            fixture.records.events().append("v", &row_id, vec![event("x")]).await.unwrap_err().is_not_found()
        );
        reservation.release().await.unwrap();
        assert_eq!(fixture.records.events().append("t", "r", vec![event("x")]).await.unwrap(), [1]);
    }
}

#[tokio::test]
async fn seeding_fills_a_feed_without_messages_once() {
    for backend in BACKENDS {
        let fixture = with_runs(backend).await;
        let (records, events) = (&fixture.records, fixture.records.events());
        events.append("t", "r", vec![event("run.start")]).await.unwrap();
        let seeds = || {
            let run = |n: u32, events| SeedRun { run_id: format!("checkpoint-seed-t-{n}"), events };
            vec![run(0, vec![message(0), message(1)]), run(1, vec![message(2)])]
        };
        assert!(events.seed("t", seeds()).await.unwrap());
        assert!(!events.seed("t", seeds()).await.unwrap());
        assert_eq!(seqs(records, &EventQuery::new("t", "checkpoint-seed-t-0")).await, [2, 3]);
        let rows = events.list(&EventQuery::new("t", "checkpoint-seed-t-1")).await.unwrap();
        assert_eq!((rows.len(), rows[0].seq, rows[0].user_id.as_deref()), (1, 4, Some("ann")));
        assert_eq!(events.count_messages("t").await.unwrap(), 3);
        assert_eq!(
            events.seed("unknown", seeds()).await.unwrap_err().to_string(),
            "Thread unknown not found"
        );
        assert_eq!(events.count_messages("unknown").await.unwrap(), 0);
    }
}

#[tokio::test]
async fn names_have_limits_and_a_bad_one_spoils_the_batch() {
    for backend in BACKENDS {
        let fixture = with_runs(backend).await;
        let events = fixture.records.events();
        let named = |event_type: &str, category: &str| NewEvent::new(event_type, category, Value::Null);
        for (bad, field) in [
            (named("", "context"), "event_type"),
            (named(&"é".repeat(33), "context"), "event_type"),
            (named("x", ""), "category"),
            (named("x", &"é".repeat(17)), "category"),
        ] {
            let error = events.append("t", "r", vec![event("x"), bad]).await.unwrap_err();
            assert!(matches!(error, RecordsError::Invalid { field: f, .. } if f == field), "{error}");
        }
        assert_eq!(seqs(&fixture.records, &EventQuery::new("t", "r")).await, [0; 0]);
        let longest = named(&"é".repeat(32), &"é".repeat(16));
        assert_eq!(events.append("t", "r", vec![longest]).await.unwrap(), [1]);
    }
}

#[tokio::test]
async fn long_trace_content_is_cut() {
    for backend in BACKENDS {
        let fixture = with_runs(backend).await;
        let trace = |content: Value| NewEvent {
            metadata: object(json!({"kept": 1})),
            ..NewEvent::new("llm.error", TRACE_CATEGORY, content)
        };
        let exact = Value::from("x".repeat(10_240));
        let (long, list) = ("é".repeat(5121), json!(["y".repeat(20_000)]));
        // 10241 bytes; the 10240th is the middle of a character.
        let odd = format!("x{}", "é".repeat(5120));
        let given = vec![
            trace(exact.clone()),
            trace(Value::from(long.clone())),
            trace(Value::from(odd.clone())),
            trace(list.clone()),
            NewEvent::new("llm.ai.response", MESSAGE_CATEGORY, list.clone()),
        ];
        fixture.records.events().append("t", "r", given).await.unwrap();
        let rows = fixture.records.events().list(&EventQuery::new("t", "r")).await.unwrap();
        let kept = object(json!({"kept": 1}));
        let cut = |length: usize| {
            object(json!({"kept": 1, "content_truncated": true, "original_byte_length": length}))
        };
        let expected = [
            (exact, kept),
            (Value::from("é".repeat(5120)), cut(10_242)),
            (Value::from(&odd[..10_239]), cut(10_241)),
            (Value::from(&list.to_string()[..10_240]), cut(20_004)),
            (list, JsonObject::new()),
        ];
        for (row, (content, metadata)) in rows.iter().zip(expected) {
            assert_eq!((&row.content, &row.metadata), (&content, &metadata), "{}", row.seq);
        }
    }
}

/// JSON is written with any depth, and read with 127 levels at most.
#[tokio::test]
async fn deep_content_is_stored_as_its_text() {
    for backend in BACKENDS {
        let fixture = with_runs(backend).await;
        let events = fixture.records.events();
        let depths = [120, 121, 126, 127, 128, 140];
        let nested =
            |depth: usize| (1..depth).fold(json!([]), |inner, _| Value::Array(vec![json!({}), inner]));
        for depth in depths {
            let deep = NewEvent::new("llm.ai.response", MESSAGE_CATEGORY, nested(depth));
            events.append("t", "r", vec![event("x"), deep]).await.unwrap();
        }
        let expected = 2 * depths.len();
        let next = events.append("t", "r", vec![event("x")]).await.unwrap();
        assert_eq!(next, [i64::try_from(expected).unwrap() + 1], "{backend:?}");
        assert_eq!(events.count_messages("t").await.unwrap(), depths.len() as u64, "{backend:?}");
        let rows = events.list(&EventQuery::new("t", "r")).await.unwrap();
        assert_eq!(rows.len(), expected + 1, "{backend:?}");
        for (row, depth) in rows.iter().filter(|row| row.category == MESSAGE_CATEGORY).zip(depths) {
            let (content, metadata) = match depth {
                120 => (nested(depth), JsonObject::new()),
                _ => (Value::from(nested(depth).to_string()), object(json!({"content_is_text": true}))),
            };
            assert_eq!((&row.content, &row.metadata), (&content, &metadata), "{backend:?} {depth}");
        }
    }
}

#[tokio::test]
async fn trace_limit_is_a_setting() {
    let clock = TestClock::new();
    let options = RecordsOptions { max_trace_content: 3, ..options(&clock, EventBackend::Database) };
    let records = lone(options).await;
    create_thread(&records, "t").await;
    admit(&records, "t", "r").await;
    records.events().append("t", "r", vec![NewEvent::new("x", TRACE_CATEGORY, json!("abcd"))]).await.unwrap();
    let rows = records.events().list(&EventQuery::new("t", "r")).await.unwrap();
    assert_eq!(rows[0].content, "abc");
}

#[tokio::test]
async fn memory_feed_ends_with_the_process_and_the_others_do_not() {
    let backends = [(EventBackend::Memory, 0), (EventBackend::Database, 1), (EventBackend::Jsonl, 1)];
    for (backend, expected) in backends {
        let fixture = with_runs(backend).await;
        fixture.records.events().append("t", "r", vec![message(1)]).await.unwrap();
        fixture.records.close().await;
        let reopened = fixture.reopen(backend).await;
        assert_eq!(reopened.events().count_messages("t").await.unwrap(), expected);
    }
}

//! What a turn costs, in counts that do not depend on the machine: commits, flushes, statements, bytes decoded. A
//! program of its own, because the bytes are counted per process; for the same reason its tests take turns.

// Helpers are test code too, but the lint does not know it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[cfg(target_os = "linux")]
mod memory;
#[allow(dead_code, reason = "shared with the tests of the routes")]
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{Gateway, Setup, connect};
use tokio::sync::Mutex;

/// Held by the test that counts.
static COUNTING: Mutex<()> = Mutex::const_new(());

/// The counters that say what a turn cost.
const COUNTERS: [&str; 5] = [
    "records_commits",
    "records_flushes",
    "records_round_trips",
    "records_statements",
    "values_decoded_bytes",
];
/// What only SQLite counts.
const SQLITE_COUNTERS: [&str; 2] = ["sqlite_commands", "sqlite_syncs"];

async fn counters(gateway: &Gateway) -> BTreeMap<&'static str, u64> {
    let Value::String(text) = gateway.get("/metrics").await.ok() else { panic!("a text") };
    let value = |name: &str| {
        let prefix = format!("threadkeep_{name}_total ");
        let line = text.lines().find_map(|line| line.strip_prefix(prefix.as_str()));
        line.unwrap_or_else(|| panic!("no {name}\n{text}")).parse().unwrap()
    };
    let sqlite = SQLITE_COUNTERS.iter().filter(|name| text.contains(**name));
    COUNTERS.iter().chain(sqlite).map(|name| (*name, value(name))).collect()
}

/// How often a run stores its totals while it is at work.
const PROGRESS: Duration = Duration::from_secs(5);

fn question(text: &str) -> Value {
    json!({"input": {"messages": [{"role": "user", "content": text}]}})
}

/// Streams a turn to its end and returns what it cost. One that may have stored its totals meanwhile does not count:
/// another one follows it.
async fn turn(gateway: &Gateway, thread: &str, more: Value) -> BTreeMap<&'static str, u64> {
    let mut body = question("The same question each time.");
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    loop {
        let (began, before) = (Instant::now(), counters(gateway).await);
        let answer = gateway.post(&format!("/api/threads/{thread}/runs/stream"), body.clone()).await;
        let Value::String(frames) = answer.ok() else { panic!("a stream") };
        assert!(
            frames.ends_with("event: end\ndata: null\n\n") && !frames.contains("event: error"),
            "{frames}"
        );
        let after = counters(gateway).await;
        if began.elapsed() < PROGRESS {
            return after.into_iter().map(|(name, count)| (name, count - before[name])).collect();
        }
    }
}

/// Stores enough for a dictionary, and waits until it is stored: a command with a flush, by another thread. The next one
/// needs fifty times as much.
async fn has_a_dictionary(gateway: &Gateway) {
    gateway.create("long").await;
    let store = connect(&gateway.data().join("checkpoints.db"));
    for turn in 0.. {
        let trained = "SELECT count(*) FROM dictionary";
        let trained: u32 = store.query_row(trained, [], |row| row.get(0)).unwrap();
        // The turn after it ends when the writer has counted it.
        let text = format!("{turn} {}", "of many long questions ".repeat(200));
        gateway.post("/api/threads/long/runs/wait", question(&text)).await.ok();
        if trained > 0 {
            break;
        }
    }
}

/// One flush of the checkpoints, one of the records; `durability: sync` waits for each superstep and the admission.
#[tokio::test]
async fn a_turn_flushes_twice_and_does_the_same_work_however_long_its_thread_is() {
    let _alone = COUNTING.lock().await;
    for mode in support::MODES {
        // Other tests do not wait for the disk.
        let database = json!({
            "backend": "sqlite", "checkpoint_channel_mode": mode, "checkpoint_delta": {"snapshot_frequency": 10},
            "sqlite_synchronous": "full",
        });
        // A third of that passes between two looks for leases of dead processes, which are statements as well.
        let sections = json!({"database": database, "run_ownership": {"lease_seconds": 86_400}});
        let gateway = Setup { sections, ..Setup::on("sqlite", mode) }.start().await;
        has_a_dictionary(&gateway).await;
        gateway.create("t").await;
        let updates = || json!({"stream_mode": ["updates", "messages-tuple"]});
        let (mut costs, mut decoded) = (Vec::new(), Vec::new());
        for _ in 0..=200 {
            costs.push(turn(&gateway, "t", updates()).await);
            decoded.push(counters(&gateway).await["values_decoded_bytes"]);
        }
        let at = |turn: usize, name: &str| costs[turn][name];
        for cost in &costs[1..] {
            assert_eq!((cost["records_flushes"], cost["sqlite_syncs"]), (1, 1), "{mode}: {cost:?}");
            // The input, the answer, the note.
            assert_eq!(cost["sqlite_commands"], 3, "{mode}: {cost:?}");
            // Admission, start, the last events with the decided end, the end.
            assert_eq!(cost["records_commits"], 4, "{mode}: {cost:?}");
            assert!(cost["records_statements"] <= 22, "{mode}: {cost:?}");
        }
        assert_eq!(at(20, "records_statements"), at(200, "records_statements"), "{mode}");
        // What is decoded after the end of a turn may count for it or for the next one, so twenty turns are counted at
        // once. Up to 64 turns, a turn also reads the notes of the earlier ones, which takes less than remembering them.
        let (early, late) = (decoded[100] - decoded[80], decoded[200] - decoded[180]);
        assert!(early > 0 && late * 10 <= early * 11, "{mode}: {early} bytes decoded, then {late}");

        let sync = turn(&gateway, "t", json!({"durability": "sync", "stream_mode": "updates"})).await;
        assert_eq!((sync["records_flushes"], sync["sqlite_syncs"]), (2, 2), "{mode}: {sync:?}");
        let exit = turn(&gateway, "t", json!({"durability": "exit", "stream_mode": "updates"})).await;
        assert_eq!((exit["records_flushes"], exit["sqlite_syncs"]), (1, 1), "{mode}: {exit:?}");
    }
}

/// A client that waits for the result of its run gets the whole conversation, of which each message was rendered before.
#[tokio::test]
async fn a_turn_that_is_waited_for_decodes_the_same_however_long_its_thread_is() {
    let _alone = COUNTING.lock().await;
    for mode in support::MODES {
        let gateway = Setup { frequency: 10, ..Setup::on("sqlite", mode) }.start().await;
        gateway.create("t").await;
        let mut decoded = Vec::new();
        for _ in 0..=200 {
            gateway.ask("t", "The same question each time.").await;
            decoded.push(counters(&gateway).await["values_decoded_bytes"]);
        }
        let (early, late) = (decoded[100] - decoded[80], decoded[200] - decoded[180]);
        assert!(early > 0 && late * 10 <= early * 11, "{mode}: {early} bytes decoded, then {late}");
    }
}

/// The records of a turn wait for the server four times, whatever its frames and however long its thread is: for the
/// admission, which sees that the thread exists and its feed has begun; the start, which shows that no other process has
/// taken the run over since the head was read; the last events with the decided end; and the end.
#[tokio::test]
async fn a_turn_on_postgres_waits_for_few_answers() {
    let _alone = COUNTING.lock().await;
    for mode in support::MODES {
        let gateway = Setup::on("postgres", mode).start().await;
        gateway.create("t").await;
        let mut trips = Vec::new();
        for _ in 0..20 {
            for stream_mode in ["updates", "values"] {
                let cost = turn(&gateway, "t", json!({"stream_mode": stream_mode})).await;
                trips.push((cost["records_round_trips"], cost["records_commits"]));
            }
        }
        // The first turn begins the feed, and a session prepares what it is asked for the first time.
        trips.sort_unstable();
        assert_eq!(trips[trips.len() / 2], (4, 4), "{mode}: {trips:?}");
    }
}

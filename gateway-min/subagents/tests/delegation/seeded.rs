//! Check 13: with a seed and a clock, the same conversation leaves the same bytes, in whatever order its subagents work.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde_json::{Value as Json, json};
use threadkeep::channel::Schema;
use threadkeep::id::{self, IdSource, ThreadId};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::Saver;
use threadkeep::state::StateAccessor;
use threadkeep_agent::model::scripted::{Gate, gate};
use threadkeep_agent::{Ended, Observer};
use threadkeep_memory::MemorySaver;
use threadkeep_records::{Clock, Records, RecordsOptions};
use threadkeep_sqlite::{Options, SqliteSaver};

use crate::support::{House, Seen, lead, subagent, task};

/// A clock that stands still.
struct Still;

impl Still {
    fn now() -> DateTime<Utc> {
        DateTime::from_timestamp_millis(1_700_000_000_123).unwrap()
    }
}

impl id::Clock for Still {
    fn now_ms(&self) -> u64 {
        1_700_000_000_123
    }
}

/// Opens the gates of three subagents when all have started, each after the one before has ended.
struct InOrder {
    seen: Seen,
    started: usize,
    closed: VecDeque<Gate>,
}

#[async_trait]
impl Observer for InOrder {
    async fn custom(&mut self, event: &Json) {
        self.seen.custom(event).await;
        self.started += usize::from(event["type"] == "task_started");
        let goes_on = event["type"] == "task_started" || event["type"] == "task_completed";
        if self.started == 3
            && goes_on
            && let Some(next) = self.closed.pop_front()
        {
            next.open();
        }
    }
}

/// Everything that can be read after the run.
#[derive(Debug, PartialEq)]
struct Everything {
    /// Each thread with all of its checkpoints, values and rows of tasks.
    threads: BTreeMap<String, String>,
    executions: Vec<String>,
    /// The events by delegation: those of different ones come in the order of their work.
    events: BTreeMap<String, Vec<Json>>,
    /// What models were asked, sorted.
    requests: Vec<String>,
}

/// A lead that delegates to three subagents of three turns at once, which begin at gates of their own.
fn script(run: &str) -> Json {
    let calls: Vec<Json> = ["a", "b", "c"].map(|prompt| task(prompt, "general-purpose")).to_vec();
    let rules = ["a", "b", "c"].map(|prompt| {
        let glob = json!([{"name": "glob", "args": {"pattern": prompt}}]);
        let mut rule = subagent(json!([
            {"text": "First.", "tool_calls": glob, "usage": {"input_tokens": 9, "output_tokens": 1},
             "gate": {"name": format!("{run} {prompt}")}},
            {"text": "Then.", "tool_calls": glob},
            {"text": "Done with {{input}} [r1 glob]."},
        ]));
        rule["when"]["contains"] = json!([prompt]);
        rule
    });
    lead(&calls, rules.to_vec())
}

/// Runs the conversation on new stores in this directory, the subagents one after the other in this order; without one, all
/// at once.
async fn conversation(
    mode: ChannelMode,
    sqlite: Option<&Path>,
    run: &str,
    order: &str,
) -> (Everything, Vec<Json>) {
    let options = RecordsOptions { clock: Clock::from_fn(Still::now), ..RecordsOptions::default() };
    let (saver, records): (Arc<dyn Saver>, _) = match sqlite {
        None => (Arc::new(MemorySaver::default()), Records::open_memory(options).await.unwrap()),
        Some(directory) => {
            let saver = SqliteSaver::open(directory.join("checkpoints.db"), &Options::default()).unwrap();
            (Arc::new(saver), Records::open(&directory.join("records.db"), options).await.unwrap())
        }
    };
    let table = Arc::new(Schema::thread_state().compile(mode, 3).unwrap());
    let ids = Arc::new(IdSource::seeded(Still, 13));
    let house = House::in_directory(
        tempfile::tempdir().unwrap(),
        records,
        StateAccessor::new(Arc::clone(&saver), table, ids),
        script(run),
        "",
    );
    let closed: VecDeque<Gate> = order.chars().map(|prompt| gate(&format!("{run} {prompt}"))).collect();
    if order.is_empty() {
        for prompt in ["a", "b", "c"] {
            gate(&format!("{run} {prompt}")).open();
        }
    }
    let mut observer = InOrder { seen: Seen::default(), started: 0, closed };
    let ended = house.run_observed("r", Some("go"), &mut observer).await.unwrap();
    assert!(matches!(ended, Ended::Done { .. }), "{ended:?}");

    let mut threads = BTreeMap::new();
    for thread in saver.threads(None, 100).await.unwrap() {
        let mut image = saver.read_thread(&ThreadId::from(thread.as_str())).await.unwrap();
        for tuple in image.checkpoints.values_mut() {
            // The rows are in the order in which the tasks ended; their places are in the rows.
            tuple.writes.sort_by_key(|row| row.index);
        }
        threads.insert(thread.to_string(), format!("{:#?}", image.checkpoints));
    }
    let executions = house.executions().await.iter().map(|row| format!("{row:#?}")).collect();
    let whole = observer.seen.events;
    let mut events: BTreeMap<String, Vec<Json>> = BTreeMap::new();
    for event in &whole {
        events.entry(event["task_id"].as_str().unwrap().to_owned()).or_default().push(event.clone());
    }
    let callers = ["lead_agent", "subagent:general-purpose"];
    let mut requests: Vec<String> =
        callers.iter().flat_map(|caller| house.requests(caller)).map(|request| request.to_string()).collect();
    requests.sort_unstable();
    (Everything { threads, executions, events, requests }, whole)
}

async fn same_bytes_in_any_order(mode: ChannelMode, on_disk: bool) {
    let store = if on_disk { "sqlite" } else { "memory" };
    let mut first: Option<(Everything, Vec<Json>)> = None;
    for (attempt, order) in ["abc", "abc", "cba", "bca", ""].into_iter().enumerate() {
        let directory = tempfile::tempdir().unwrap();
        let sqlite = on_disk.then(|| directory.path());
        let (found, events) = conversation(mode, sqlite, &format!("{store} {mode:?} {attempt}"), order).await;
        let Some((expected, in_order)) = &first else {
            assert_eq!((found.threads.len(), found.executions.len(), found.events.len()), (4, 3, 3));
            assert_eq!(found.requests.len(), 2 + 3 * 3);
            assert!(found.threads["t"].contains("svc_tool_receipt"), "bytes can be read in it");
            first = Some((found, events));
            continue;
        };
        assert_eq!(&found, expected, "{order}");
        if !order.is_empty() {
            let same = events[3..] == in_order[3..];
            assert_eq!(
                same,
                order == "abc",
                "after the starts, the same order gives the same stream: {order}"
            );
        }
    }
}

#[tokio::test]
async fn a_seed_and_a_clock_decide_every_byte_in_memory() {
    for mode in [ChannelMode::Delta, ChannelMode::Full] {
        same_bytes_in_any_order(mode, false).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_seed_and_a_clock_decide_every_byte_on_sqlite_and_over_threads() {
    for mode in [ChannelMode::Delta, ChannelMode::Full] {
        same_bytes_in_any_order(mode, true).await;
    }
}

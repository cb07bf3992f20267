//! The feed in memory. It is lost on restart, and bounded: beyond [`MAX_BYTES`], threads lose their whole feeds, least
//! recently written first; the thread being written loses its oldest events only if it is the only one left. A thread
//! without events is as after a restart: its next run fills the feed from the head. Only the last number of a lost feed
//! is kept, from which the thread continues.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use serde_json::Value;
use tokio::sync::Mutex;

use super::stripes::{Stripe, Stripes};
use super::{EventQuery, EventRow, MESSAGE_CATEGORY, Owner, PreparedEvent, run_owner, thread_owner};
use crate::db::Db;
use crate::error::RecordsError;

/// The approximate maximum size of the events of all threads: 64 MiB.
const MAX_BYTES: usize = 64 * 1024 * 1024;

/// The feeds by thread.
///
/// An append checks in the database that its run exists while it holds the thread's stripe, and a deletion holds it
/// from before the commit that deletes the rows until the feed is cleared. So an append that still found its run is
/// cleared with the rest, and a later one is refused, or is of a newer thread with the same id and begins a new feed.
#[derive(Debug)]
pub(super) struct MemoryFeed {
    stripes: Stripes,
    feeds: Mutex<Feeds>,
}

impl Default for MemoryFeed {
    fn default() -> Self {
        Self { stripes: Stripes::default(), feeds: Mutex::new(Feeds::new(MAX_BYTES)) }
    }
}

impl MemoryFeed {
    pub(super) async fn append(
        &self,
        db: &Db,
        thread_id: &str,
        run_id: &str,
        events: Vec<PreparedEvent>,
    ) -> Result<Vec<i64>, RecordsError> {
        let _stripe = self.stripes.hold(thread_id).await;
        let user_id = owner_of_run(db, thread_id, run_id).await?;
        let mut feeds = self.feeds.lock().await;
        let push = |event| feeds.push(thread_id, run_id, user_id.as_deref(), event);
        Ok(events.into_iter().map(push).collect())
    }

    pub(super) async fn append_if_absent(
        &self,
        db: &Db,
        thread_id: &str,
        run_id: &str,
        event: PreparedEvent,
    ) -> Result<Option<i64>, RecordsError> {
        let _stripe = self.stripes.hold(thread_id).await;
        let user_id = owner_of_run(db, thread_id, run_id).await?;
        let mut feeds = self.feeds.lock().await;
        if feeds.rows_of_run(thread_id, run_id).any(|row| row.event_type == event.event_type) {
            return Ok(None);
        }
        Ok(Some(feeds.push(thread_id, run_id, user_id.as_deref(), event)))
    }

    pub(super) async fn seed(
        &self,
        db: &Db,
        thread_id: &str,
        runs: Vec<(String, Vec<PreparedEvent>)>,
    ) -> Result<bool, RecordsError> {
        let _stripe = self.stripes.hold(thread_id).await;
        let owner: Option<Owner> = db.fetch_optional(thread_owner(thread_id)).await?;
        let (user_id,) = owner.ok_or_else(|| RecordsError::thread_not_found(thread_id))?;
        let mut feeds = self.feeds.lock().await;
        if feeds.rows(thread_id).any(is_message) {
            return Ok(false);
        }
        for (run_id, events) in runs {
            for event in events {
                feeds.push(thread_id, &run_id, user_id.as_deref(), event);
            }
        }
        Ok(true)
    }

    pub(super) async fn list(&self, query: &EventQuery) -> Vec<EventRow> {
        let wanted = |row: &&EventRow| {
            row.run_id == query.run_id
                && query.after_seq.is_none_or(|after| row.seq > after)
                && query.event_types.as_ref().is_none_or(|types| types.contains(&row.event_type))
                && query.task_id.as_ref().is_none_or(|task| {
                    row.metadata.get("task_id").and_then(Value::as_str) == Some(task.as_str())
                })
        };
        let limit = usize::try_from(query.limit).unwrap_or(usize::MAX);
        self.feeds.lock().await.rows(&query.thread_id).filter(wanted).take(limit).cloned().collect()
    }

    pub(super) async fn has_messages(&self, thread_id: &str) -> bool {
        self.feeds.lock().await.newest_rows(thread_id).any(is_message)
    }

    #[cfg(test)]
    pub(super) async fn count_messages(&self, thread_id: &str) -> u64 {
        let messages = self.feeds.lock().await.rows(thread_id).filter(|row| is_message(row)).count();
        messages.try_into().unwrap_or(u64::MAX)
    }

    /// Holds a thread whose rows are about to be deleted: nobody appends to it meanwhile.
    pub(super) async fn hold_to_delete(&self, thread_id: &str) -> Stripe {
        self.stripes.hold(thread_id).await
    }

    /// Whether the thread has a feed, perhaps one that has lost its events.
    pub(super) async fn exists(&self, thread_id: &str) -> bool {
        self.feeds.lock().await.by_thread.contains_key(thread_id)
    }

    /// Drops the feed of a thread that was held before its rows were deleted; returns how many events it had.
    pub(super) async fn forget_thread(&self, thread_id: &str, held: Stripe) -> u64 {
        let events = self.feeds.lock().await.forget(thread_id);
        drop(held);
        events.try_into().unwrap_or(u64::MAX)
    }

    /// Drops the events of a run whose row is deleted, also those of an append that has found it.
    pub(super) async fn forget_run(&self, thread_id: &str, run_id: &str) {
        let _stripe = self.stripes.hold(thread_id).await;
        self.feeds.lock().await.forget_run(thread_id, run_id);
    }
}

async fn owner_of_run(db: &Db, thread_id: &str, run_id: &str) -> Result<Option<String>, RecordsError> {
    let owner: Option<Owner> = db.fetch_optional(run_owner(thread_id, run_id)).await?;
    owner.map(|(user_id,)| user_id).ok_or_else(|| RecordsError::run_not_found(run_id))
}

fn is_message(row: &EventRow) -> bool {
    row.category == MESSAGE_CATEGORY
}

/// The events of all threads, up to a limit.
#[derive(Debug)]
struct Feeds {
    by_thread: HashMap<String, Feed>,
    /// The threads that have events, least recently written first.
    by_age: BTreeMap<u64, String>,
    /// The number of writes so far; the clock of [`Feed::written`].
    writes: u64,
    bytes: usize,
    max_bytes: usize,
}

/// The events of one thread.
#[derive(Debug, Default)]
struct Feed {
    rows: VecDeque<EventRow>,
    bytes: usize,
    last_seq: i64,
    /// The number of the first event of each run that has any, and of some whose events are dropped.
    began: HashMap<String, i64>,
    /// When it was last written: its key in [`Feeds::by_age`].
    written: u64,
}

impl Feeds {
    fn new(max_bytes: usize) -> Self {
        Self { by_thread: HashMap::new(), by_age: BTreeMap::new(), writes: 0, bytes: 0, max_bytes }
    }

    fn rows(&self, thread_id: &str) -> impl Iterator<Item = &EventRow> {
        self.by_thread.get(thread_id).into_iter().flat_map(|feed| &feed.rows)
    }

    /// Those of one run, which are near the end of the feed.
    fn rows_of_run(&self, thread_id: &str, run_id: &str) -> impl Iterator<Item = &EventRow> {
        let feed = self.by_thread.get(thread_id);
        let first = feed.and_then(|feed| feed.began.get(run_id)).copied().unwrap_or(i64::MAX);
        let of_run = move |row: &&EventRow| row.run_id == run_id;
        let later = feed.map(|feed| feed.rows.range(feed.rows.partition_point(|row| row.seq < first)..));
        later.into_iter().flatten().filter(of_run)
    }

    /// All of a thread, newest first.
    fn newest_rows(&self, thread_id: &str) -> impl Iterator<Item = &EventRow> {
        self.by_thread.get(thread_id).into_iter().flat_map(|feed| feed.rows.iter().rev())
    }

    /// Appends an event and returns its number; evicts older feeds to make room.
    fn push(&mut self, thread_id: &str, run_id: &str, user_id: Option<&str>, event: PreparedEvent) -> i64 {
        let feed = self.by_thread.entry(thread_id.to_owned()).or_default();
        feed.last_seq += 1;
        let seq = feed.last_seq;
        let row = EventRow {
            thread_id: thread_id.to_owned(),
            run_id: run_id.to_owned(),
            user_id: user_id.map(str::to_owned),
            seq,
            event_type: event.event_type,
            category: event.category,
            content: event.content,
            metadata: event.metadata,
            created_at: event.created_at,
        };
        let size = bytes(&row);
        if !feed.began.contains_key(run_id) {
            feed.began.insert(run_id.to_owned(), seq);
        }
        feed.rows.push_back(row);
        feed.bytes += size;
        self.bytes += size;
        self.by_age.remove(&feed.written);
        self.writes += 1;
        feed.written = self.writes;
        self.by_age.insert(self.writes, thread_id.to_owned());
        while self.bytes > self.max_bytes && self.by_age.len() > 1 {
            if let Some((_, oldest)) = self.by_age.pop_first() {
                self.clear(&oldest);
            }
        }
        self.shorten(thread_id);
        seq
    }

    /// Drops the events of a thread, but not its last number.
    fn clear(&mut self, thread_id: &str) {
        if let Some(feed) = self.by_thread.get_mut(thread_id) {
            tracing::debug!(thread_id, events = feed.rows.len(), "the event feed in memory is full");
            self.bytes -= feed.bytes;
            *feed = Feed { last_seq: feed.last_seq, ..Feed::default() };
        }
    }

    /// Drops the oldest events of the only thread that has any, down to the limit or to one event.
    fn shorten(&mut self, thread_id: &str) {
        let Some(feed) = self.by_thread.get_mut(thread_id) else { return };
        while self.bytes > self.max_bytes
            && feed.rows.len() > 1
            && let Some(row) = feed.rows.pop_front()
        {
            let size = bytes(&row);
            feed.bytes -= size;
            self.bytes -= size;
        }
        // Those of runs without an event are not needed. Not at each event: this goes through all of them.
        if feed.began.len() > 2 * feed.rows.len() {
            let left: HashSet<&str> = feed.rows.iter().map(|row| row.run_id.as_str()).collect();
            feed.began.retain(|run_id, _| left.contains(run_id.as_str()));
        }
    }

    /// Drops the events of one run. The others keep their numbers.
    fn forget_run(&mut self, thread_id: &str, run_id: &str) {
        let Some(feed) = self.by_thread.get_mut(thread_id) else { return };
        feed.rows.retain(|row| row.run_id != run_id);
        feed.began.remove(run_id);
        let left = feed.rows.iter().map(bytes).sum();
        self.bytes = self.bytes - feed.bytes + left;
        feed.bytes = left;
    }

    /// Drops everything about a thread; returns how many events it had.
    fn forget(&mut self, thread_id: &str) -> usize {
        let Some(feed) = self.by_thread.remove(thread_id) else { return 0 };
        self.by_age.remove(&feed.written);
        self.bytes -= feed.bytes;
        feed.rows.len()
    }
}

/// The approximate memory size of an event.
fn bytes(row: &EventRow) -> usize {
    let texts = [&row.thread_id, &row.run_id, &row.event_type, &row.category];
    let user = row.user_id.as_ref().map_or(0, String::len);
    let metadata = row.metadata.iter().map(|(key, value)| key.len() + value_bytes(value));
    size_of::<EventRow>()
        + user
        + texts.iter().map(|text| text.len()).sum::<usize>()
        + value_bytes(&row.content)
        + metadata.sum::<usize>()
}

fn value_bytes(value: &Value) -> usize {
    let below = match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(value_bytes).sum(),
        Value::Object(fields) => fields.iter().map(|(key, value)| key.len() + value_bytes(value)).sum(),
    };
    size_of::<Value>() + below
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::codec::JsonObject;

    fn event(text: &str) -> PreparedEvent {
        PreparedEvent {
            event_type: "llm.human.input".to_owned(),
            category: MESSAGE_CATEGORY.to_owned(),
            content: json!(text),
            metadata: JsonObject::new(),
            created_at: chrono::DateTime::UNIX_EPOCH,
        }
    }

    /// The numbers of a thread's events.
    fn numbers(feeds: &Feeds, thread_id: &str) -> Vec<i64> {
        feeds.rows(thread_id).map(|row| row.seq).collect()
    }

    /// The size of an event of one letter.
    fn one() -> usize {
        let mut feeds = Feeds::new(usize::MAX);
        feeds.push("a", "r", None, event("x"));
        feeds.bytes
    }

    #[test]
    fn the_thread_written_to_longest_ago_loses_its_feed_first_and_goes_on_counting() {
        let mut feeds = Feeds::new(5 * one());
        for thread in ["a", "a", "b", "c", "a"] {
            feeds.push(thread, "r", None, event("x"));
        }
        assert_eq!(numbers(&feeds, "a"), [1, 2, 3], "exactly full");
        feeds.push("c", "r", None, event("x"));
        assert_eq!((numbers(&feeds, "b"), numbers(&feeds, "c")), (vec![], vec![1, 2]), "b was oldest");
        assert_eq!(feeds.push("b", "r", None, event("x")), 2);
        assert_eq!(
            numbers(&feeds, "a"),
            [] as [i64; 0],
            "the whole feed, although one event would have sufficed"
        );
        assert_eq!((numbers(&feeds, "b"), numbers(&feeds, "c")), (vec![2], vec![1, 2]));
        assert_eq!(feeds.push("a", "r", None, event("x")), 4);
    }

    #[test]
    fn a_thread_alone_loses_its_oldest_events_and_keeps_its_newest() {
        let mut feeds = Feeds::new(3 * one());
        for _ in 0..5 {
            feeds.push("a", "r", None, event("x"));
        }
        assert_eq!(numbers(&feeds, "a"), [3, 4, 5]);
        feeds.push("a", "r", None, event(&"long".repeat(1000)));
        assert_eq!(numbers(&feeds, "a"), [6], "larger than the limit, and kept");
        feeds.push("a", "r", None, event("x"));
        assert_eq!(numbers(&feeds, "a"), [7]);
    }

    #[test]
    fn a_thread_alone_forgets_the_runs_whose_events_it_has_dropped() {
        let mut feeds = Feeds::new(3 * one());
        for run in 10..99 {
            for _ in 0..2 {
                feeds.push("a", &run.to_string(), None, event("x"));
            }
        }
        let feed = &feeds.by_thread["a"];
        assert!(feed.began.len() <= 2 * feed.rows.len(), "{:?}", feed.began);
        assert_eq!(feeds.rows_of_run("a", "98").count(), 2);
    }

    #[test]
    fn a_deleted_thread_begins_anew() {
        let mut feeds = Feeds::new(3 * one());
        feeds.push("a", "r", None, event("x"));
        assert_eq!((feeds.forget("a"), feeds.forget("a"), feeds.bytes), (1, 0, 0));
        assert_eq!(feeds.push("a", "r", None, event("x")), 1);
    }

    #[test]
    fn content_and_metadata_count() {
        let mut large = event("");
        large.content = json!({"text": ["x".repeat(1000)]});
        large.metadata.insert("more".to_owned(), json!("y".repeat(500)));
        let mut feeds = Feeds::new(usize::MAX);
        feeds.push("a", "r", None, large);
        assert!((1500..1500 + 1000).contains(&feeds.bytes), "{}", feeds.bytes);
    }

    proptest! {
        /// Whatever is written and deleted, the sums are correct, the limit holds, and a thread keeps its newest events
        /// without a gap.
        #[test]
        fn the_bound_holds_and_what_is_kept_is_the_end_of_each_feed(
            steps in prop::collection::vec((0_usize..4, 0_usize..2000, prop::bool::weighted(0.05)), 1..80),
            max_bytes in 500_usize..6000,
        ) {
            let mut feeds = Feeds::new(max_bytes);
            let mut last = [0_i64; 4];
            for (thread, length, deleted) in steps {
                let name = thread.to_string();
                if deleted {
                    feeds.forget(&name);
                    last[thread] = 0;
                } else {
                    last[thread] += 1;
                    prop_assert_eq!(feeds.push(&name, "r", None, event(&"x".repeat(length))), last[thread]);
                    prop_assert_eq!(numbers(&feeds, &name).pop(), Some(last[thread]));
                }
                let kept: Vec<&EventRow> = feeds.by_thread.values().flat_map(|feed| &feed.rows).collect();
                prop_assert_eq!(feeds.bytes, kept.iter().map(|row| bytes(row)).sum::<usize>());
                prop_assert!(feeds.bytes <= max_bytes || kept.len() == 1);
                for (thread, last) in last.iter().enumerate() {
                    let found = numbers(&feeds, &thread.to_string());
                    let first = last + 1 - i64::try_from(found.len()).unwrap();
                    prop_assert_eq!(&found, &(first..=*last).collect::<Vec<_>>());
                }
                let with_events = feeds.by_thread.values().filter(|feed| !feed.rows.is_empty()).count();
                prop_assert_eq!(feeds.by_age.len(), with_events);
            }
        }
    }
}

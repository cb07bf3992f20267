//! What readers remember of large metadata objects: a read of one checkpoint costs what was added since, and what it returns
//! is what the store holds, whatever other processes and the server did meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::future::join_all;
use serde_json::json;
use threadkeep::Error;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple};
use threadkeep::id::{ChannelName, IdSource};
use threadkeep::metadata::Entries;
use threadkeep::saver::{CheckpointSelector, Flush, Load, Rewrite, Saver, StepCommit};
use threadkeep_postgres::PostgresSaver;

use crate::common::damage::{connect, row_key};
use crate::common::proxy::Proxy;
use crate::common::talk::{MESSAGES, Talk};
use crate::common::{database, open};
use crate::history::Server;

/// The maps that notes carry along: an entry each for every turn.
const MAPS: [&str; 2] = ["run_durations", "run_message_ids"];

/// A thread whose checkpoints have both maps and no messages.
struct Noted {
    talk: Talk,
    maps: [Entries; 2],
}

impl Noted {
    fn new(thread: &str) -> Self {
        let mut talk = Talk::new(thread);
        talk.ids = IdSource::default();
        Self { talk, maps: Default::default() }
    }

    fn turns(&self) -> usize {
        self.maps[0].len()
    }

    /// Adds turns whose entries have this value, and returns a step that notes them.
    fn step(&mut self, turns: usize, value: &str) -> StepCommit {
        for n in self.turns()..self.turns() + turns {
            for map in &mut self.maps {
                map.insert((format!("run {n}").into(), Arc::new(json!(value))));
            }
        }
        let mut step = self.talk.empty();
        step.metadata.extra.insert("turns".to_owned(), json!(self.turns()));
        for (key, map) in MAPS.into_iter().zip(&self.maps) {
            step.metadata.extra.insert_object(key, map.clone());
        }
        step
    }

    async fn write(&mut self, saver: &PostgresSaver, turns: usize, value: &str) -> CheckpointKey {
        let step = self.step(turns, value);
        self.commit(saver, step).await
    }

    async fn commit(&mut self, saver: &PostgresSaver, step: StepCommit) -> CheckpointKey {
        saver.commit(step.clone()).await.unwrap();
        (self.talk.head, self.talk.step) = (Some(step.checkpoint.id), self.talk.step + 1);
        step.key()
    }

    fn head(&self) -> CheckpointSelector {
        CheckpointSelector::head(&self.talk.thread)
    }
}

/// The numbers of entries of a checkpoint's maps.
fn lengths(tuple: &CheckpointTuple) -> [usize; 2] {
    MAPS.map(|key| tuple.metadata.extra.object(key).map_or(0, |map| map.len()))
}

/// What a saver returns that has just opened the database.
async fn fresh(url: &str, at: &CheckpointSelector) -> Option<CheckpointTuple> {
    open(url).await.get(at).await.unwrap()
}

/// Checks a read against [`fresh`].
async fn check(url: &str, reader: &PostgresSaver, at: &CheckpointSelector) -> Option<CheckpointTuple> {
    let expected = fresh(url, at).await;
    assert_eq!(reader.get(at).await.unwrap(), expected);
    expected
}

/// The requests of a read, and the bytes of their answers.
async fn cost(proxy: &Proxy, saver: &PostgresSaver, at: &CheckpointSelector, turns: usize) -> [usize; 2] {
    let before = [proxy.requests(), proxy.answered()];
    assert_eq!(lengths(&saver.get(at).await.unwrap().unwrap()), [turns; 2]);
    [proxy.requests() - before[0], proxy.answered() - before[1]]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_costs_what_was_added_however_long_the_thread_is() {
    let database = database().await;
    let proxies = [Proxy::before(database.url()).await, Proxy::before(database.url()).await];
    // One process writes and reads; the other one only reads, and not each turn.
    let (writer, reader) = (open(proxies[0].url()).await, open(proxies[1].url()).await);
    let mut noted = Noted::new("t");
    let (mut own, mut others, mut ids) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let mut old = None;
    for turns in 1..=1_000 {
        let key = noted.write(&writer, 1, "took 3 seconds").await;
        own.insert(turns, cost(&proxies[0], &writer, &noted.head(), turns).await);
        ids.insert(turns, cost(&proxies[0], &writer, &CheckpointSelector::at(&key), turns).await);
        if turns % 10 == 0 {
            others.insert(turns, cost(&proxies[1], &reader, &noted.head(), turns).await);
        }
        if turns == 300 {
            old = Some(key);
        }
    }
    for costs in [own, others, ids] {
        let ([requests, early], [late_requests, late]) = (costs[&200], costs[&1_000]);
        assert_eq!((requests, late_requests), (1, 1));
        // A row lists a run of numbers for each turn and map, in two bytes, mostly the same ones.
        assert!(late <= early + 2 * 2 * 800, "{early} bytes after 200 turns, {late} after 1000");
        assert!(late < 8_000, "{late} bytes");
    }
    // An older checkpoint is among what is remembered, and the head remains so.
    for (at, turns) in [(CheckpointSelector::at(&old.unwrap()), 300), (noted.head(), 1_000)] {
        let [requests, bytes] = cost(&proxies[0], &writer, &at, turns).await;
        assert!(requests == 1 && bytes < 8_000, "{requests} requests, {bytes} bytes");
    }
    let new = open(proxies[1].url()).await;
    let [_, whole] = cost(&proxies[1], &new, &noted.head(), 1_000).await;
    assert!(whole > 50_000, "{whole} bytes");
}

/// Messages are the most of what a turn adds, and those of a thread in full mode are all read.
#[tokio::test(flavor = "multi_thread")]
async fn values_are_read_beside_what_is_remembered() {
    let database = database().await;
    let saver = open(database.url()).await;
    let mut noted = Noted::new("t");
    for n in 0..30 {
        let mut step = noted.talk.say(&crate::common::talk::note(n));
        step.metadata = noted.step(40, "took 3 seconds").metadata;
        saver.commit(step.clone()).await.unwrap();
        noted.talk.accept(&step);
        for load in [Load::All, Load::None, Load::Only([ChannelName::from(MESSAGES)].into())] {
            let tuple = check(database.url(), &saver, &CheckpointSelector { load, ..noted.head() }).await;
            assert_eq!(lengths(&tuple.unwrap()), [noted.turns(); 2]);
        }
    }
}

/// The walk of a lineage passes by metadata, which nobody asks it for.
#[tokio::test(flavor = "multi_thread")]
async fn a_history_reads_no_entries() {
    let database = database().await;
    let proxy = Proxy::before(database.url()).await;
    let saver = open(proxy.url()).await;
    let mut bytes = Vec::new();
    for (thread, turns) in [("short", 10), ("long", 500)] {
        let mut noted = Noted::new(thread);
        let mut step = noted.talk.say(&crate::common::talk::note(1));
        step.metadata = noted.step(turns, "took 3 seconds").metadata;
        saver.commit(step.clone()).await.unwrap();
        let channels = [MESSAGES.into()].into();
        saver.delta_history(&step.key(), &channels, None).await.unwrap();
        let before = proxy.answered();
        let history = saver.delta_history(&step.key(), &channels, None).await.unwrap();
        assert!(history[MESSAGES].seed.is_some());
        bytes.push(proxy.answered() - before);
    }
    assert!(bytes[1] < bytes[0] + 128, "{bytes:?}");
}

/// The row of a thread proves for sixteen writes that it goes on from a moment. After more of other processes, the same
/// statement returns all.
#[tokio::test(flavor = "multi_thread")]
async fn what_others_wrote_since_is_added_or_all_is_read_in_one_request() {
    let database = database().await;
    let proxy = Proxy::before(database.url()).await;
    let (reader, other) = (open(proxy.url()).await, open(database.url()).await);
    let mut noted = Noted::new("t");
    noted.write(&other, 300, "took 3 seconds").await;
    cost(&proxy, &reader, &noted.head(), 300).await;
    // Prepares the call.
    cost(&proxy, &reader, &noted.head(), 300).await;
    for (writes, is_whole) in [(0, false), (16, false), (17, true), (1, false), (40, true), (15, false)] {
        for n in 0..writes {
            noted.write(&other, usize::from(n == 0), "took 4 seconds").await;
        }
        let [requests, bytes] = cost(&proxy, &reader, &noted.head(), noted.turns()).await;
        assert_eq!((requests, bytes > 20_000), (1, is_whole), "{bytes} bytes after {writes} writes");
        check(database.url(), &reader, &noted.head()).await;
    }
    // Its own writes are known to go on from what it remembers.
    for _ in 0..40 {
        noted.write(&reader, 0, "").await;
    }
    let [requests, bytes] = cost(&proxy, &reader, &noted.head(), noted.turns()).await;
    assert!(requests == 1 && bytes < 10_000, "{requests} requests, {bytes} bytes");
}

/// Numbers that another process gave to other entries: after a rewrite, and in another life of the thread.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_remembered_is_not_used_after_a_rewrite_or_a_deletion() {
    let database = database().await;
    let url = database.url();
    let (reader, other) = (open(url).await, open(url).await);
    let mut noted = Noted::new("t");
    for turns in [100, 30] {
        noted.write(&other, turns, "took 3 seconds").await;
    }
    check(url, &reader, &noted.head()).await;

    let image = other.read_thread(&noted.talk.thread).await.unwrap();
    let remove = image.checkpoints.keys().next_back().cloned().into_iter().collect();
    other.rewrite_thread(&noted.talk.thread, &image.revision, Rewrite { remove, put: vec![] }).await.unwrap();
    let left = check(url, &reader, &noted.head()).await.unwrap();
    assert_eq!(lengths(&left), [100; 2]);
    noted.talk.head = Some(left.checkpoint.id);
    noted.maps = MAPS.map(|key| left.metadata.extra.object(key).unwrap());
    noted.write(&other, 30, "took 5 seconds").await;
    check(url, &reader, &noted.head()).await;

    other.delete_thread(&noted.talk.thread).await.unwrap();
    assert_eq!(check(url, &reader, &noted.head()).await, None);
    let mut again = Noted::new("t");
    again.write(&other, 130, "took 6 seconds").await;
    check(url, &reader, &again.head()).await;
    // Unseen by the reader, this time.
    other.delete_thread(&noted.talk.thread).await.unwrap();
    let mut again = Noted::new("t");
    again.write(&other, 131, "took 7 seconds").await;
    check(url, &reader, &again.head()).await;
}

/// The server loses the newest writes, and others give the same numbers to other entries. A process that only reads knows of
/// no loss, and the counts of the writes may be the same, less or more.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_server_has_lost_is_not_remembered() {
    let server = Server::start();
    let database = server.database().await;
    let url = database.url();
    let reader = open(url).await;
    let mut cases = Vec::new();
    for others in [0, 1, 2, 3, 4, 12, 17, 18, 40] {
        let mut noted = Noted::new(&format!("{others} others"));
        noted.write(&open(url).await, 100, "took 3 seconds").await;
        cases.push((others, noted));
    }
    server.back_up();
    let mut lost = Vec::new();
    for (_, noted) in &mut cases {
        let before = (noted.talk.head, noted.talk.step, noted.maps.clone());
        let writer = open(url).await;
        for _ in 0..3 {
            lost.push(noted.write(&writer, 2, "lost").await);
            reader.get(&noted.head()).await.unwrap().unwrap();
        }
        (noted.talk.head, noted.talk.step, noted.maps) = before;
    }
    server.restore();
    for (others, noted) in &mut cases {
        let writer = open(url).await;
        for _ in 0..*others {
            noted.write(&writer, 2, "written in its place").await;
        }
        let expected = fresh(url, &noted.head()).await;
        assert_eq!(reader.get(&noted.head()).await.unwrap(), expected, "{others} others");
        noted.write(&writer, 2, "and so on").await;
        check(url, &reader, &noted.head()).await;
    }
    for key in lost {
        assert_eq!(reader.get(&CheckpointSelector::at(&key)).await.unwrap(), None);
    }
}

/// What is not among the remembered is read, and damage to it is found; so is damage to the row.
#[tokio::test(flavor = "multi_thread")]
async fn damage_is_found_beside_what_is_remembered() {
    let database = database().await;
    let (saver, client) = (open(database.url()).await, connect(database.url()).await);
    let newest = "(SELECT max(seq) FROM threadkeep_element WHERE seq >= 8589934592)";
    let damages = [
        format!("DELETE FROM threadkeep_element WHERE seq = {newest}"),
        format!(
            "UPDATE threadkeep_element SET body = set_byte(body, 3, get_byte(body, 3) # 1) WHERE seq = {newest}"
        ),
        format!("UPDATE threadkeep_element SET seq = seq + 1 WHERE seq = {newest}"),
        "UPDATE threadkeep_checkpoint SET body = substring(body, 1, length(body) - 1) WHERE id = $1"
            .to_owned(),
        "UPDATE threadkeep_checkpoint SET body = substring(body, 1, 10) WHERE id = $1".to_owned(),
        "UPDATE threadkeep_checkpoint SET needs = needs[1:0] WHERE id = $1".to_owned(),
        "DELETE FROM threadkeep_checkpoint WHERE id = $1".to_owned(),
    ];
    for damage in damages {
        let mut noted = Noted::new("t");
        noted.write(&saver, 100, "took 3 seconds").await;
        check(database.url(), &saver, &noted.head()).await;
        let key = noted.write(&saver, 3, "took 4 seconds").await;
        let (_, _, id) = row_key(&key);
        let params: Vec<&(dyn tokio_postgres::types::ToSql + Sync)> =
            if damage.contains("$1") { vec![&id] } else { vec![] };
        assert_eq!(client.execute(&damage, &params).await.unwrap(), 1, "{damage}");
        for saver in [&saver, &open(database.url()).await] {
            let found = saver.get(&noted.head()).await;
            let noticed = matches!(found, Err(Error::Corrupt { .. } | Error::BrokenLineage { .. }));
            assert!(noticed, "{damage}: {:?}", found.map(|found| found.as_ref().map(lengths)));
        }
        open(database.url()).await.delete_thread(&noted.talk.thread).await.unwrap();
        // The process that read it learns that it was deleted.
        assert_eq!(saver.get(&noted.head()).await.unwrap(), None);
    }
}

/// Reads of the head and of older checkpoints share what they remember while the thread grows and is rewritten.
#[tokio::test(flavor = "multi_thread")]
async fn reads_at_the_same_time_return_what_their_checkpoints_have() {
    let database = database().await;
    let (reader, writer) = (open(database.url()).await, open(database.url()).await);
    let mut noted = Noted::new("t");
    let mut keys = vec![noted.write(&writer, 70, "turn 10").await];
    let reads = AtomicUsize::new(0);
    for round in 0..60 {
        let read = async |at: CheckpointSelector| {
            let Some(tuple) = reader.get(&at).await.unwrap() else {
                assert!(at.id.is_some(), "the thread has a head");
                return;
            };
            let turns = tuple.metadata.extra["turns"].as_u64().unwrap();
            assert_eq!(lengths(&tuple), [usize::try_from(turns).unwrap(); 2]);
            let map = tuple.metadata.extra.object(MAPS[0]).unwrap();
            assert_eq!(map.get(&format!("run {}", turns - 1)), Some(&json!(format!("turn {}", turns / 7))));
            reads.fetch_add(1, Ordering::Relaxed);
        };
        let old = keys.iter().rev().step_by(5).take(4).map(|key| read(CheckpointSelector::at(key)));
        let reading = async {
            futures::join!(join_all(old), join_all((0..4).map(|_| read(noted.head()))));
        };
        if round % 20 == 19 {
            let image = writer.read_thread(&noted.talk.thread).await.unwrap();
            let put = image.checkpoints.into_values().next_back().into_iter().collect();
            let rewrite = Rewrite { remove: BTreeSet::new(), put };
            let rewriting = writer.rewrite_thread(&noted.talk.thread, &image.revision, rewrite);
            futures::join!(reading, rewriting).1.unwrap();
        } else {
            reading.await;
        }
        let value = format!("turn {}", (noted.turns() + 7) / 7);
        let flush = if round % 2 == 0 { Flush::Now } else { Flush::WithNext };
        let step = StepCommit { flush, ..noted.step(7, &value) };
        let (read, committed) = futures::join!(read(noted.head()), writer.commit(step.clone()));
        let ((), key) = (read, committed.unwrap());
        (noted.talk.head, noted.talk.step) = (Some(step.checkpoint.id), noted.talk.step + 1);
        keys.push(key);
    }
    assert!(reads.into_inner() > 400);
}

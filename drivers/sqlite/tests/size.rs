//! What a long thread costs on disk and per step.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "a test")]

mod common;

use std::path::Path;

use common::{Lcg, MESSAGES, Talk, message};
use serde_json::json;
use tempfile::TempDir;
use threadkeep::checkpoint::Stored;
use threadkeep::metadata::Source;
use threadkeep::saver::{CheckpointSelector, Saver, StepCommit};
use threadkeep::value::Element;
use threadkeep_sqlite::{Options, SqliteSaver, Synchronous};

const STEPS: usize = 2000;

/// Bytes of the pages of each table, its indexes included.
fn table_bytes(path: &Path) -> Vec<(String, i64)> {
    let conn = rusqlite::Connection::open(path).unwrap();
    let mut statement =
        conn.prepare("SELECT name, sum(pgsize) FROM dbstat GROUP BY name ORDER BY name").unwrap();
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
    rows.map(Result::unwrap).collect()
}

/// Characters of messages as they are in transcripts: half of them below 0.7 KB, a tenth above 5 KB, some very long.
fn len(step: usize) -> usize {
    const TENTHS: [usize; 11] = [60, 130, 240, 360, 500, 680, 1_000, 1_500, 2_600, 5_000, 20_000];
    let place = step * 7919 % 1000;
    let (tenth, part) = (place / 100, place % 100);
    TENTHS[tenth] + (TENTHS[tenth + 1] - TENTHS[tenth]) * part / 100
}

#[tokio::test]
async fn a_thread_of_two_thousand_full_steps_takes_little_more_than_its_messages() {
    let (plain, raw) = two_thousand_steps(false).await;
    assert!(plain * 100 < raw * 125, "{plain} bytes for {raw} bytes of messages");
    // The messages are random words of a small vocabulary, each written in full.
    let (packed, _) = two_thousand_steps(true).await;
    assert!(packed * 100 < raw * 75, "{packed} bytes for {raw} bytes of messages");
}

/// The bytes of the file after two thousand steps, and those of the messages.
async fn two_thousand_steps(compression: bool) -> (u64, u64) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoints.db");
    let options = Options { synchronous: Synchronous::Normal, compression, ..Options::default() };
    let saver = SqliteSaver::open(&path, &options).unwrap();
    let mut talk = Talk::new("t");
    let mut raw = 0;
    for number in 0..STEPS {
        let message = message(number, len(number));
        raw += Element::from_json(&message).unwrap().bytes().len();
        let step = talk.say(&message);
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    }
    let head = saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    let list = head.checkpoint.channels[MESSAGES].stored.value().unwrap().as_list().unwrap();
    assert_eq!(*list, talk.messages);
    assert_eq!(list.len(), STEPS);
    saver.close().await;

    let file = std::fs::metadata(&path).unwrap().len();
    let tables = table_bytes(&path);
    let elements = tables.iter().find(|(name, _)| name == "element").unwrap().1;
    let others = tables.iter().filter(|(name, _)| name != "element" && name != "dictionary");
    let others: i64 = others.map(|(_, bytes)| bytes).sum();
    let steps = i64::try_from(STEPS).unwrap();
    println!("{raw} bytes of messages; file {file}, elements {elements}, others per step {}", others / steps);
    println!("{tables:?}");
    // The empty tables and indexes take a page each, whatever the length of the thread.
    let bare = 6 * i64::from(threadkeep_pages::PAGE_SIZE);
    assert!((others - bare) / steps < 100, "{others} bytes beside the elements");
    (file, raw as u64)
}

fn opened() -> (TempDir, SqliteSaver) {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { synchronous: Synchronous::Normal, ..Options::default() };
    let saver = SqliteSaver::open(dir.path().join("db"), &options).unwrap();
    (dir, saver)
}

/// Elements that the driver examined and stored for one step.
async fn cost(saver: &SqliteSaver, talk: &mut Talk, step: StepCommit) -> (u64, u64) {
    let before = saver.stats();
    saver.commit(step.clone()).await.unwrap();
    talk.accept(&step);
    let after = saver.stats();
    (after.elements_examined - before.elements_examined, after.elements_stored - before.elements_stored)
}

#[tokio::test]
async fn a_full_step_examines_what_it_changes_whatever_the_length_of_the_thread() {
    let (_dir, saver) = opened();
    let mut talk = Talk::new("t");
    let mut most = 0;
    for number in 0..1000 {
        let step = talk.say(&message(number, 50));
        let (examined, stored) = cost(&saver, &mut talk, step).await;
        assert_eq!(stored, 1, "the message stands in the write and in the list");
        most = most.max(examined);
    }
    // The written message twice, and the two ends of what the list had before.
    assert_eq!(most, 4);
}

#[tokio::test]
async fn replacing_recent_elements_costs_the_same_in_a_long_thread() {
    let (_dir, saver) = opened();
    let mut talk = Talk::new("t");
    let mut most = [0; 2];
    for number in 0..1000 {
        let step = talk.say(&message(number, 50));
        cost(&saver, &mut talk, step).await;
        // The engine stamps the message that came last.
        let stamped = Element::from_json(
            &json!({ "id": format!("m-{number:08}"), "stamp": number, "text": "x".repeat(40) }),
        );
        let mut step = talk.say(&message(0, 50));
        let mut list = talk.messages.clone();
        list.replace(number, stamped.unwrap());
        step.checkpoint.channels.get_mut(MESSAGES).unwrap().stored = Stored::Value(list.into());
        let (examined, stored) = cost(&saver, &mut talk, step).await;
        // The new element, and now and then a chunk of eight runs.
        assert!(stored <= 2, "{stored}");
        let half = &mut most[number / 500];
        *half = examined.max(*half);
    }
    assert_eq!(most[0], most[1], "the second half costs what the first does");
    assert!(most[1] <= 8, "{most:?}");
}

#[tokio::test]
async fn a_delta_step_examines_its_writes_and_a_snapshot_what_is_new_since_the_last() {
    let (_dir, saver) = opened();
    let mut talk = Talk::new("t");
    let mut list = talk.messages.clone();
    for number in 0..1000 {
        list.push(Element::from_json(&message(number, 50)).unwrap());
        let mut step = talk.say(&message(number, 50));
        let snapshot = number % 100 == 0;
        let entry = step.checkpoint.channels.get_mut(MESSAGES).unwrap();
        entry.stored = if snapshot { Stored::Snapshot(list.clone().into()) } else { Stored::Sentinel };
        let version = entry.version;
        let (examined, _) = cost(&saver, &mut talk, step).await;
        assert!(examined <= if snapshot { 103 } else { 1 }, "{number}: {examined}");
        if snapshot {
            list.rebase(version);
        }
        talk.version = Some(version);
    }
}

/// After reopening, the first step looks the whole list up by the hashes that it has, and stores nothing twice.
#[tokio::test]
async fn a_reopened_thread_is_looked_up_once() {
    let (dir, saver) = opened();
    let mut talk = Talk::new("t");
    for number in 0..300 {
        let step = talk.say(&message(number, 50));
        cost(&saver, &mut talk, step).await;
    }
    saver.close().await;
    let saver = SqliteSaver::open(dir.path().join("db"), &Options::default()).unwrap();
    let head = saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    talk.resume(&head);
    for (number, most) in [(300, 303), (301, 4)] {
        let step = talk.say(&message(number, 50));
        let (examined, stored) = cost(&saver, &mut talk, step).await;
        assert_eq!(stored, 1);
        assert!(examined <= most, "{examined}");
    }
}

/// Maps that get an entry a turn, and are rewritten whole each time, are stored by entry.
#[tokio::test]
async fn growing_metadata_maps_do_not_cost_their_length_each_turn() {
    let (dir, saver) = opened();
    let mut talk = Talk::new("t");
    let (mut durations, mut messages) = (serde_json::Map::new(), serde_json::Map::new());
    let mut lcg = Lcg::new(5);
    let mut uuid = || {
        format!(
            "{:08x}-{:04x}-4{:03x}-8000-{:012x}",
            lcg.next(),
            lcg.next() & 0xffff,
            lcg.next() & 0xfff,
            lcg.next()
        )
    };
    let turns = 300;
    let (mut raw, mut last) = (0, Vec::new());
    for number in 0..turns {
        let run = uuid();
        durations.insert(run.clone(), json!(number % 60));
        messages.insert(uuid(), json!(run));
        let mut step = talk.say(&message(number, 50));
        step.metadata.source = Source::Update;
        step.metadata.extra.insert("run_durations".into(), json!(durations));
        step.metadata.extra.insert("run_message_ids".into(), json!(messages));
        step.metadata.extra.insert("run_id".into(), json!(run));
        raw += serde_json::to_vec(&*step.metadata.extra).unwrap().len();
        last = vec![step.metadata.clone()];
        let (_, stored) = cost(&saver, &mut talk, step).await;
        // The message, the rest and two entries, and now and then a chunk of each map. The maps are cut when they have
        // eight entries.
        assert!(stored <= 6 || number == 7, "{number}: {stored}");
    }
    let head = saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    assert_eq!(vec![head.metadata], last);
    saver.close().await;
    let file = usize::try_from(std::fs::metadata(dir.path().join("db")).unwrap().len()).unwrap();
    println!("{raw} bytes of metadata, file {file}");
    assert!(file * 10 < raw, "{file} bytes for {raw} bytes of metadata");
}

//! The cost of a long thread, on disk and per step.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use serde_json::json;
use tempfile::TempDir;
use threadkeep::checkpoint::Stored;
use threadkeep::metadata::{Entries, Source};
use threadkeep::saver::{CheckpointSelector, ListQuery, Load, Rewrite, Saver, StepCommit};
use threadkeep::value::Element;
use threadkeep_sqlite::{Options, SqliteSaver, Synchronous};

use crate::common::{Lcg, MESSAGES, Talk, message};

const STEPS: usize = 2000;

/// Bytes of the pages of each table, including its indexes.
fn table_bytes(path: &Path) -> Vec<(String, i64)> {
    let conn = rusqlite::Connection::open(path).unwrap();
    let mut statement =
        conn.prepare("SELECT name, sum(pgsize) FROM dbstat GROUP BY name ORDER BY name").unwrap();
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
    rows.map(Result::unwrap).collect()
}

/// Message lengths as in transcripts: half of them below 0.7 KB, a tenth above 5 KB, some very long.
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
    // The messages are random words of a small vocabulary, each spelled out.
    let (packed, _) = two_thousand_steps(true).await;
    assert!(packed * 100 < raw * 75, "{packed} bytes for {raw} bytes of messages");
}

/// The size of the file after two thousand steps, and that of the messages.
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
    // The written message twice, and the two ends of the previous list.
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
        // The engine stamps the last message.
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

/// After reopening, the first step looks up the whole list by its known hashes, and stores nothing twice.
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

/// A note that adds to maps examines only what it adds, and so does a step that carries them over unchanged.
#[tokio::test]
async fn a_note_examines_what_it_adds_whatever_the_maps_hold() {
    let (_dir, saver) = opened();
    let mut talk = Talk::new("t");
    let (mut durations, mut messages) = (Entries::default(), Entries::default());
    let mut costs = Vec::new();
    for number in 0..2000 {
        // Keys in random order.
        let run = format!("run {}", (number * 7919) % 10_007);
        durations.insert((run.as_str().into(), Arc::new(json!(number))));
        messages.insert((format!("message of {run}").into(), Arc::new(json!(run))));
        let mut note = talk.empty();
        note.metadata.extra.insert_object("run_durations", durations.clone());
        note.metadata.extra.insert_object("run_message_ids", messages.clone());
        let mut carries = note.metadata.extra.clone();
        let (noted, _) = cost(&saver, &mut talk, note).await;
        carries.insert("goal".to_owned(), json!(number % 10));
        let mut step = talk.empty();
        step.metadata.extra = carries;
        let (carried, _) = cost(&saver, &mut talk, step).await;
        costs.push((noted, carried));
    }
    let most = |numbers: Range<usize>| costs[numbers].iter().max();
    // Two entries, and now and then a chunk of eight runs of each map. A step that adds nothing examines nothing.
    assert_eq!(most(20..60), Some(&(4, 0)), "{:?}", &costs[..60]);
    assert_eq!(most(1960..2000), most(20..60), "a note at 2,000 entries costs what one at 20 does");
    let head = saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    assert_eq!(head.metadata.extra.object("run_message_ids"), Some(messages));
}

/// A reader that has seen a note loads only what the next one added: on the head, on a page, on older checkpoints.
#[tokio::test]
async fn reading_a_note_loads_what_was_added_since_the_last_read() {
    let (dir, saver) = opened();
    let mut talk = Talk::new("t");
    let mut durations = Entries::default();
    let mut loads = Vec::new();
    let loaded = async |saver: &SqliteSaver, talk: &Talk| {
        let before = saver.stats().elements_loaded;
        let head = CheckpointSelector { load: Load::None, ..CheckpointSelector::head(&talk.thread) };
        let head = saver.get(&head).await.unwrap().unwrap();
        (saver.stats().elements_loaded - before, head.metadata.extra.object("run_durations"))
    };
    let mut ids = Vec::new();
    for number in 0..600 {
        let run = format!("run {}", (number * 7919) % 10_007);
        durations.insert((run.into(), Arc::new(json!(number))));
        let mut note = talk.empty();
        note.metadata.extra.insert_object("run_durations", durations.clone());
        note.metadata.extra.insert("note".to_owned(), json!("x".repeat(40 + number % 7)));
        cost(&saver, &mut talk, note).await;
        ids.push((talk.key(), durations.clone()));
        let (count, found) = loaded(&saver, &talk).await;
        assert_eq!(found, Some(durations.clone()));
        loads.push(count);
    }
    // The new entry, the rest of the note, and now and then a chunk.
    assert!(loads[70..].iter().all(|count| *count <= 3), "{loads:?}");
    for (key, entries) in ids.iter().step_by(97) {
        let found = saver.get(&CheckpointSelector::at(key)).await.unwrap().unwrap();
        assert_eq!(found.metadata.extra.object("run_durations").as_ref(), Some(entries));
    }
    let page = saver.list(&ListQuery { load: Load::None, ..ListQuery::new(&talk.thread) }).await.unwrap();
    let found = page.iter().rev().map(|tuple| tuple.metadata.extra.object("run_durations"));
    assert!(found.eq(ids.iter().map(|(_, entries)| Some(entries.clone()))));

    // Another process changes the last note, takes it back, and recreates the thread.
    let options = Options { synchronous: Synchronous::Normal, ..Options::default() };
    let other = SqliteSaver::open(dir.path().join("db"), &options).unwrap();
    let put = async |entries: &Entries| {
        let image = other.read_thread(&talk.thread).await.unwrap();
        let mut note = image.checkpoints.values().next_back().unwrap().clone();
        note.metadata.extra.insert_object("run_durations", entries.clone());
        let rewrite = Rewrite { put: vec![note], ..Rewrite::default() };
        other.rewrite_thread(&talk.thread, &image.revision, rewrite).await.unwrap();
    };
    let changed = |to: &str| {
        let mut changed = durations.clone();
        changed.insert(("run 0".into(), Arc::new(json!(to))));
        changed
    };
    put(&changed("one thing")).await;
    assert_eq!(loaded(&saver, &talk).await.1, Some(changed("one thing")));
    // The number of the changed entry is free again, and is given to another one.
    put(&durations).await;
    put(&changed("another")).await;
    assert_eq!(loaded(&saver, &talk).await.1, Some(changed("another")));
    let image = other.read_thread(&talk.thread).await.unwrap();
    let remove = [(talk.namespace.clone(), talk.head.unwrap())].into();
    let rewrite = Rewrite { remove, ..Rewrite::default() };
    other.rewrite_thread(&talk.thread, &image.revision, rewrite).await.unwrap();
    let (_, found) = loaded(&saver, &talk).await;
    assert_eq!(found.as_ref(), Some(&ids[598].1), "what is remembered is of a checkpoint that is gone");
    other.delete_thread(&talk.thread).await.unwrap();
    let mut talk = Talk::new("t");
    let changed: Entries = (0..600).map(|n| (format!("run {n}").into(), Arc::new(json!("new")))).collect();
    let mut note = talk.empty();
    note.metadata.extra.insert_object("run_durations", changed.clone());
    cost(&other, &mut talk, note).await;
    assert_eq!(loaded(&saver, &talk).await.1, Some(changed));
}

/// Maps that grow by an entry per turn, and are rewritten whole each time, are stored by entry.
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
        let (examined, stored) = cost(&saver, &mut talk, step).await;
        // Maps that share nothing with the previous ones are compared with them first.
        assert!(examined <= 10 || number == 7, "{number}: {examined}");
        // The message, the rest and two entries, and now and then a chunk of each map. The maps are split when they
        // have eight entries.
        assert!(stored <= 6 || number == 7, "{number}: {stored}");
    }
    let head = saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    assert_eq!(vec![head.metadata], last);
    saver.close().await;
    let file = usize::try_from(std::fs::metadata(dir.path().join("db")).unwrap().len()).unwrap();
    println!("{raw} bytes of metadata, file {file}");
    assert!(file * 10 < raw, "{file} bytes for {raw} bytes of metadata");
}

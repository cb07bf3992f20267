//! What a connection remembers of the database, beside reads of an older state and after a rollback.

use std::sync::Arc;

use futures::FutureExt as _;
use serde_json::json;
use threadkeep::Error;
use threadkeep::checkpoint::{INTERRUPT_CHANNEL, TaskWrites, Write};
use threadkeep::id::TaskId;
use threadkeep::saver::{CheckpointSelector, Saver};
use threadkeep::value::ChannelValue;

use super::common::Talk;
use super::faults::How;
use super::statements::Opened;
use crate::read::memory::Memory;
use crate::read::queries;
use crate::rows::directory;
use crate::sql::Db;
use crate::write::commit::Work;

const MAP: &str = "run_durations";

/// A read that began before a note was added does not see the note's row, although another read remembers its map.
#[tokio::test]
async fn a_read_goes_on_from_no_map_of_a_later_state() {
    let (store, mut talk) = (Opened::new(), Talk::new("t"));
    let note = |talk: &Talk, count: usize| {
        let mut step = talk.empty();
        let map = (0..count).map(|n| (n.to_string().into(), Arc::new(json!(n)))).collect();
        step.metadata.extra.insert_object(MAP, map);
        step
    };
    let first = note(&talk, 80);
    store.saver.commit(first.clone()).await.unwrap();
    talk.accept(&first);
    let [early, late] = [0, 1].map(|_| Db::reader(&store.dir.path().join("db"), &store.options).unwrap());
    early.execute("BEGIN", []).unwrap();
    directory::find_thread(&early, &talk.thread).unwrap();
    let second = note(&talk, 81);
    store.saver.commit(second).await.unwrap();

    let (memory, head) = (Memory::new(Arc::default()), CheckpointSelector::head(&talk.thread));
    let entries = |db: &Db, at: &CheckpointSelector| {
        let tuple = queries::get(db, &memory, at).unwrap().unwrap();
        tuple.metadata.extra.object(MAP).unwrap().len()
    };
    assert_eq!(entries(&late, &head), 81);
    assert_eq!(entries(&early, &head), 80);
    // In one state, an older checkpoint is read from what is remembered of a newer one.
    let loaded = memory.counters.stats().elements_loaded;
    assert_eq!(entries(&late, &CheckpointSelector { id: Some(first.checkpoint.id), ..head }), 80);
    assert_eq!(memory.counters.stats().elements_loaded - loaded, 1);
}

/// What readers remember is bounded by these bytes, and the second read loads only what was added.
#[tokio::test]
async fn a_read_counts_the_bytes_of_all_of_a_map() {
    let (store, mut talk) = (Opened::new(), Talk::new("t"));
    let memory = Memory::new(Arc::default());
    for count in [80, 81] {
        let mut step = talk.empty();
        let map = (0..count).map(|n| (n.to_string().into(), Arc::new(json!("x".repeat(1_000))))).collect();
        step.metadata.extra.insert_object(MAP, map);
        store.saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
        let db = Db::reader(&store.dir.path().join("db"), &store.options).unwrap();
        queries::get(&db, &memory, &CheckpointSelector::head(&talk.thread)).unwrap().unwrap();
        let thread = directory::thread(&db, &talk.thread).unwrap().unwrap();
        let (_, chain) = directory::chains(&db, thread.key).unwrap().remove(0);
        let bytes = memory.object(chain.key, MAP, thread.rewrites).unwrap().object.bytes;
        assert!((count * 1_000..count * 1_050).contains(&bytes), "{bytes} bytes of {count} entries");
    }
}

/// The writes of a task that was interrupted with this text.
fn interrupt(text: &str) -> TaskWrites {
    let value = ChannelValue::from_json(&json!(text.repeat(5))).unwrap();
    let write = Write { channel: INTERRUPT_CHANNEL.into(), value, overwrite: false };
    TaskWrites { task: TaskId::from_bytes([7; 16]), node: "model".into(), index: 0, writes: vec![write] }
}

/// The next dictionary has the number of one that was rolled back, and is another one.
#[tokio::test]
async fn a_dictionary_that_was_rolled_back_is_not_used() {
    let (store, mut talk) = (Opened::new(), Talk::new("t"));
    store.say(&mut talk, 0).await;
    let dictionary = |text: &str| Work::Dictionary(1, text.repeat(20).into_bytes());
    let questions = ["a first question of the model to its user ", "another question, which replaces it "];
    let at = talk.key();
    let put = async |text: &str| store.saver.put_writes(&at, &interrupt(text)).await;

    let lock = store.lock();
    store.faults().arm(0, How::NoRoom, "COMMIT");
    let mut stored = Box::pin(store.saver.write(dictionary(questions[0])));
    let (mut first, mut second) = (Box::pin(put(questions[0])), Box::pin(put(questions[1])));
    assert!(stored.as_mut().now_or_never().is_none(), "the lock is held");
    // The second one reads what the first one packed with the dictionary.
    assert!(first.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
    drop(lock);
    for result in [stored.await, first.await, second.await] {
        assert!(matches!(result, Err(Error::InDoubt { .. })), "{result:?}");
    }

    store.saver.write(dictionary(questions[1])).await.unwrap();
    for text in questions {
        put(text).await.unwrap();
    }
    let head = store.saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    assert_eq!(head.writes, [interrupt(questions[1])]);
    assert!(store.saver.check().await.unwrap().iter().all(|finding| finding.orphan));
}

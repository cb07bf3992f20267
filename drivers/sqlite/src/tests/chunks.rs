//! Chunks that describe a list and a map at once.

use std::sync::Arc;

use serde_json::json;
use threadkeep::checkpoint::{ChannelEntry, Stored};
use threadkeep::id::Version;
use threadkeep::saver::{Rewrite, Saver, StepCommit};
use threadkeep::value::{Element, ListValue};

use super::common::{MESSAGES, Talk, message};
use super::pieces::store;
use crate::Options;

/// A step with a list of these messages, and with a map of as many entries in its metadata.
fn step(talk: &Talk, counter: u64, numbers: impl Iterator<Item = usize> + Clone) -> StepCommit {
    let mut step = talk.empty();
    let list: ListValue = numbers.clone().map(|n| Element::from_json(&message(n, 40)).unwrap()).collect();
    let version = Version { counter, random: 0 };
    let entry = ChannelEntry { version, stored: Stored::Value(list.into()) };
    step.checkpoint.channels = [(MESSAGES.into(), entry)].into();
    let map = numbers.map(|n| (format!("{n:03}").into(), Arc::new(json!(n))));
    step.metadata.extra.insert_object("runs", map.collect());
    step
}

/// The messages of the list and the entries of the map have the same numbers, each in its own space, so that one chunk has the
/// runs of both.
#[tokio::test]
async fn a_rewrite_keeps_what_a_list_and_a_map_refer_to_through_one_chunk() {
    for piece in [1, Options::default().piece] {
        let (store, mut talk) = (store(piece), Talk::new("t"));
        let all = step(&talk, 1, 0..80);
        store.saver.commit(all.clone()).await.unwrap();
        talk.accept(&all);
        let before = store.saver.stats().elements_stored;
        let every_second = step(&talk, 2, (0..80).step_by(2));
        store.saver.commit(every_second.clone()).await.unwrap();
        let chunks = store.saver.stats().elements_stored - before;
        assert_eq!(chunks, 3, "of the forty runs of the list, which are those of the map");

        let image = store.saver.read_thread(&talk.thread).await.unwrap();
        let mut left = image.checkpoints.clone();
        let (oldest, _) = left.pop_first().unwrap();
        let mut root = left.first_entry().unwrap().into_mut().clone();
        root.parent = None;
        let rewrite = Rewrite { remove: [oldest].into(), put: vec![root] };
        let expected = image.clone().after(&rewrite).checkpoints;
        store.saver.rewrite_thread(&talk.thread, &image.revision, rewrite).await.unwrap();
        let read = store.saver.read_thread(&talk.thread).await.unwrap();
        assert!(read.checkpoints == expected, "pieces of {piece}");
        assert_eq!(store.saver.check().await.unwrap(), []);
        store.saver.sweep().await.unwrap();
        assert!(store.saver.read_thread(&talk.thread).await.unwrap().checkpoints == expected);

        // The check follows the chunk of a map, too.
        let conn = store.lock();
        let first_entry = "DELETE FROM element WHERE key & 4294967295 = 1073741824";
        assert_eq!(conn.execute(first_entry, []).unwrap(), 1);
        conn.execute_batch("COMMIT").unwrap();
        let found = store.saver.check().await.unwrap();
        assert!(matches!(&found[..], [one] if !one.orphan && one.what.contains("missing")), "{found:?}");
    }
}

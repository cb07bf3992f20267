//! Lists that say what they were made from.

#![allow(clippy::unwrap_used)] // A test.

#[allow(dead_code, reason = "each test uses its part")]
mod common;

use common::Map;
use serde_json::{Value as Json, json};
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, Stored};
use threadkeep::id::{CheckpointId, Namespace, Version};
use threadkeep::metadata::{Metadata, Source};
use threadkeep::saver::{CheckpointSelector, Flush, Saver, StepCommit};
use threadkeep::value::{Element, ListValue};
use threadkeep_kv::KvSaver;

fn id(n: u8) -> CheckpointId {
    CheckpointId::from_bytes([n; 16])
}

fn version(counter: u64) -> Version {
    Version { counter, random: 7 }
}

/// A list whose first three elements are those of the list under version 9.
fn list(elements: &[Json]) -> ListValue {
    let (same, new) = elements.split_at(3);
    let mut list: ListValue = same.iter().map(|element| Element::from_json(element).unwrap()).collect();
    list.rebase(version(9));
    for element in new {
        list.push(Element::from_json(element).unwrap());
    }
    list
}

/// A step after the checkpoint `parent`, while `n - 1` is the newest one.
fn step(n: u8, parent: u8, list: Option<(u64, ListValue)>) -> StepCommit {
    let existing = |n: u8| (n > 0).then(|| id(n));
    let channels = list.map(|(counter, list)| {
        let entry = ChannelEntry { version: version(counter), stored: Stored::Value(list.into()) };
        ("messages".into(), entry)
    });
    StepCommit {
        thread: "t".into(),
        namespace: Namespace::root(),
        parent: existing(parent),
        expected_head: existing(n - 1),
        checkpoint: Checkpoint {
            id: id(n),
            channels: channels.into_iter().collect(),
            next: Vec::new(),
            applied: Vec::new(),
        },
        metadata: Metadata::new(Source::Loop, i64::from(n)),
        writes: Vec::new(),
        pending: Vec::new(),
        flush: Flush::Now,
    }
}

/// Another list was stored under the version of the short one, with the same first and last element; that is all that is
/// checked of a list that names its base.
#[tokio::test(flavor = "multi_thread")]
async fn a_list_that_goes_on_from_a_short_one_has_its_elements() {
    let text = |n: u32| json!(format!("a message that is too long to be kept in its record {n}"));
    let long = (9, list(&[json!(0), json!(9), json!(2), text(1)]));
    let short = (9, list(&[json!(0), json!(1), json!(2)]));
    let next = list(&[json!(0), json!(1), json!(2), text(2)]);
    // Below the short one, where it is the long one that was stored last; and below neither.
    for (stored, parent) in [([&short, &long], 2), ([&long, &short], 3), ([&long, &short], 1)] {
        let saver = KvSaver::open(Map::default()).unwrap();
        saver.commit(step(1, 0, None)).await.unwrap();
        for (n, stored) in (2..).zip(stored) {
            saver.commit(step(n, 1, Some(stored.clone()))).await.unwrap();
        }
        saver.commit(step(4, parent, Some((10, next.clone())))).await.unwrap();
        let read = saver.get(&CheckpointSelector::head(&"t".into())).await.unwrap().unwrap();
        let stored = &read.checkpoint.channels["messages"].stored;
        assert_eq!(*stored, Stored::Value(next.clone().into()), "the parent is {parent}");
    }
}

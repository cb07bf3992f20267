use serde_json::json;
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, Stored};
use threadkeep::id::{IdSource, Version};
use threadkeep::metadata::{Metadata, Source};
use threadkeep::value::{Element, ListValue};

use super::*;
use crate::draft::LOOKED_UP;

/// `length` checkpoints of a thread as `read_thread` returns them, each with one more message.
fn thread(length: i64) -> Vec<CheckpointTuple> {
    let (ids, mut list, mut parent) = (IdSource::default(), ListValue::default(), None);
    let mut all = Vec::new();
    for n in 0..length {
        let text = format!("a message that is too long to stand in its list {n}");
        list.push(Element::from_json(&json!(text)).unwrap());
        let version = Version { counter: n.unsigned_abs() + 1, random: 0 };
        let mut read = list.clone();
        read.rebase(version);
        let entry = ChannelEntry { version, stored: Stored::Value(read.into()) };
        let id = ids.checkpoint_after(parent);
        let checkpoint = Checkpoint {
            id,
            channels: [("messages".into(), entry)].into(),
            next: Vec::new(),
            applied: Vec::new(),
        };
        all.push(CheckpointTuple {
            thread: "t".into(),
            namespace: "".into(),
            checkpoint,
            parent: parent.replace(id),
            metadata: Metadata::new(Source::Loop, n),
            writes: Vec::new(),
        });
    }
    all
}

fn planned(put: Vec<CheckpointTuple>) -> (Box<Change>, usize) {
    let (thread, state) = (ThreadId::from("t"), ThreadState::absent());
    let rewrite = Rewrite { put, ..Rewrite::default() };
    LOOKED_UP.set(0);
    let planned = plan(
        &thread,
        &state,
        &Snapshot::absent(&thread),
        &Revision::absent(),
        &rewrite,
        &History::first(Flush::Now),
    );
    match planned.unwrap() {
        Planned::Change(change, None) => (change, LOOKED_UP.get()),
        _ => panic!("a new thread is a change that removes nothing"),
    }
}

#[test]
fn a_new_thread_costs_what_its_checkpoints_add() {
    let ((_, short), (_, long)) = (planned(thread(100)), planned(thread(400)));
    assert!(
        short > 100 && long <= 5 * short,
        "{short} elements looked up for 100 checkpoints, {long} for 400"
    );
}

#[test]
fn only_a_long_new_thread_is_written_in_pieces() {
    let (mut change, _) = planned(thread(10));
    assert_eq!(change.pieces(PIECE).len(), 0);
    assert_eq!(change.pieces(3).len(), 3);
}

/// Their first and last elements are equal, which is all that is checked of a list that names another one as its base.
#[test]
fn two_lists_under_one_version_are_both_stored() {
    let version = Version { counter: 9, random: 0 };
    let mut put = thread(3);
    for (tuple, middle) in put[1..].iter_mut().zip(["1", "another 1"]) {
        let text = |end: &str| json!(format!("a message that is too long to stand in its list {end}"));
        let mut list: ListValue =
            ["0", middle, "2"].map(|end| Element::from_json(&text(end)).unwrap()).into_iter().collect();
        list.rebase(version);
        let entry = ChannelEntry { version, stored: Stored::Value(list.into()) };
        tuple.checkpoint.channels = [("messages".into(), entry)].into();
    }
    let (mut change, _) = planned(put);
    // Four messages, and the names of the records.
    assert_eq!(change.pieces(1).len() + 1, 5);
}

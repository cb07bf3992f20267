//! Lists of a thread that is written as a whole: in one transaction, and in pieces.

use serde_json::json;
use threadkeep::checkpoint::{ChannelEntry, CheckpointTuple, Stored};
use threadkeep::id::{ThreadId, Version};
use threadkeep::saver::{Revision, Rewrite, Saver};
use threadkeep::value::{Element, ListValue};

use super::common::{MESSAGES, Talk, message};
use super::pieces::store;
use crate::Options;

fn version(counter: u64) -> Version {
    Version { counter, random: 0 }
}

/// A list of these elements that says it was made from the one under `base`, as a list that was read does.
fn list(elements: &[serde_json::Value], base: Version) -> ListValue {
    let mut list: ListValue = elements.iter().map(|element| Element::from_json(element).unwrap()).collect();
    list.rebase(base);
    list
}

/// A chain with one list each, under these versions.
fn chain(lists: Vec<(Version, ListValue)>) -> (ThreadId, Vec<CheckpointTuple>) {
    let mut talk = Talk::new("t");
    let mut put = Vec::new();
    for (version, list) in lists {
        let mut step = talk.empty();
        let entry = ChannelEntry { version, stored: Stored::Value(list.into()) };
        step.checkpoint.channels = [(MESSAGES.into(), entry)].into();
        talk.accept(&step);
        put.push(CheckpointTuple {
            thread: step.thread,
            namespace: step.namespace,
            checkpoint: step.checkpoint,
            metadata: step.metadata,
            parent: step.parent,
            writes: Vec::new(),
        });
    }
    (talk.thread, put)
}

/// Writes a thread as a whole and reads the same back, whatever the size of its pieces; and again if every checkpoint of
/// it is put in place of itself.
async fn is_read_as_written(lists: Vec<(Version, ListValue)>) {
    for piece in [1, Options::default().piece] {
        let store = store(piece);
        let (thread, put) = chain(lists.clone());
        let rewrite = Rewrite { put: put.clone(), ..Rewrite::default() };
        store.saver.rewrite_thread(&thread, &Revision::absent(), rewrite).await.unwrap();
        let image = store.saver.read_thread(&thread).await.unwrap();
        let read: Vec<_> = image.checkpoints.into_values().collect();
        assert_eq!(read, put, "pieces of {piece}");

        let mut turned = put;
        turned.iter_mut().rev().zip(lists.iter()).for_each(|(tuple, (version, list))| {
            let entry = ChannelEntry { version: *version, stored: Stored::Value(list.clone().into()) };
            tuple.checkpoint.channels = [(MESSAGES.into(), entry)].into();
        });
        let rewrite = Rewrite { put: turned.clone(), ..Rewrite::default() };
        store.saver.rewrite_thread(&thread, &image.revision, rewrite).await.unwrap();
        let image = store.saver.read_thread(&thread).await.unwrap();
        assert_eq!(image.checkpoints.into_values().collect::<Vec<_>>(), turned, "pieces of {piece}");
        assert_eq!(store.saver.check().await.unwrap(), []);
    }
}

/// Their lengths, first and last elements are equal, which is all that is checked of a list that names another one as its base.
#[tokio::test]
async fn two_lists_under_one_version_are_two_lists() {
    let middle = |number| list(&[message(0, 300), message(number, 300), message(2, 300)], version(9));
    is_read_as_written(vec![(version(9), middle(1)), (version(9), middle(7)), (version(9), middle(1))]).await;
}

/// The second list is so short that its record contains it, and the third one goes on from it.
#[tokio::test]
async fn a_list_goes_on_from_a_short_one_that_replaced_another_under_its_version() {
    let long = [json!(0), json!(9), json!(2), message(3, 300)];
    let short = [json!(0), json!(1), json!(2)];
    let next = [json!(0), json!(1), json!(2), message(4, 300)];
    let lists = vec![
        (version(9), list(&long, version(9))),
        (version(9), list(&short, version(9))),
        (version(10), list(&next, version(9))),
    ];
    is_read_as_written(lists).await;
}

/// What stays as it is stored is not written, and what goes on from it refers to it nevertheless, not to another list.
#[tokio::test]
async fn a_list_goes_on_from_one_that_stays_as_it_is_stored() {
    let of = |numbers: &[usize]| -> Vec<_> { numbers.iter().map(|number| message(*number, 300)).collect() };
    let stored = list(&of(&[0, 1, 2]), version(9));
    let store = store(Options::default().piece);
    let (thread, mut put) = chain(vec![
        (version(9), list(&of(&[0, 5, 2]), version(9))),
        (version(9), stored.clone()),
        (version(10), list(&of(&[0, 1, 2, 3]), version(9))),
    ]);
    let rewrite = Rewrite { put: put.clone(), ..Rewrite::default() };
    store.saver.rewrite_thread(&thread, &Revision::absent(), rewrite).await.unwrap();
    // The first and the last one become others; the second one is put as it is.
    for (at, version, numbers) in [(0, version(9), &[0, 6, 2][..]), (2, version(10), &[0, 1, 2, 4])] {
        let entry =
            ChannelEntry { version, stored: Stored::Value(list(&of(numbers), self::version(9)).into()) };
        put[at].checkpoint.channels = [(MESSAGES.into(), entry)].into();
    }
    let image = store.saver.read_thread(&thread).await.unwrap();
    let rewrite = Rewrite { put: put.clone(), ..Rewrite::default() };
    store.saver.rewrite_thread(&thread, &image.revision, rewrite).await.unwrap();
    let image = store.saver.read_thread(&thread).await.unwrap();
    assert_eq!(image.checkpoints.into_values().collect::<Vec<_>>(), put);
}

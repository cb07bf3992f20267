//! A revision of a thread never repeats, so a rewrite that was planned on one state is never applied to another.

use std::collections::{BTreeSet, HashMap};

use serde_json::{Map, json};
use threadkeep::Error;
use threadkeep::checkpoint::{INTERRUPT_CHANNEL, TaskWrites, Write};
use threadkeep::id::TaskId;
use threadkeep::saver::{Revision, Rewrite, Saver, ThreadImage};
use threadkeep::value::ChannelValue;
use threadkeep_sqlite::{Options, SqliteSaver};

use crate::common::{Lcg, Talk, message};

/// Long enough for an element of its own.
fn long(text: &str) -> String {
    format!("{text}, and then some more so that it is stored by itself: {text}")
}

/// A rewrite that gives the head this note, or none.
fn note(image: &ThreadImage, text: Option<&str>) -> Rewrite {
    let mut head = image.checkpoints.values().next_back().unwrap().clone();
    let mut extra = Map::new();
    if let Some(text) = text {
        extra.insert("note".into(), json!(long(text)));
    }
    head.metadata.extra = extra.into();
    Rewrite { remove: BTreeSet::default(), put: vec![head] }
}

#[tokio::test]
async fn a_rewrite_planned_on_a_note_that_came_and_went_is_stale() {
    let dir = tempfile::tempdir().unwrap();
    let saver = SqliteSaver::open(dir.path().join("db"), &Options::default()).unwrap();
    let mut talk = Talk::new("t");
    for number in 0..2 {
        let step = talk.say(&message(number, 300));
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    }
    let read = || async { saver.read_thread(&talk.thread).await.unwrap() };
    let change = |image: ThreadImage, text| {
        let rewrite = note(&image, text);
        let (saver, thread) = (&saver, &talk.thread);
        async move { saver.rewrite_thread(thread, &image.revision, rewrite).await }
    };
    change(read().await, Some("A")).await.unwrap();
    let planned = read().await;
    change(read().await, None).await.unwrap();
    change(read().await, Some("B")).await.unwrap();
    let stale = change(planned, Some("A, changed")).await;
    assert!(matches!(stale, Err(Error::Stale { .. })), "{stale:?}");
    let head = read().await.checkpoints.into_values().next_back().unwrap();
    assert_eq!(head.metadata.extra.get("note"), Some(&json!(long("B"))));
}

/// Every revision, with its state.
#[derive(Default)]
struct Given {
    states: HashMap<Vec<u8>, String>,
    last: Option<(Revision, String)>,
}

impl Given {
    async fn note(&mut self, saver: &SqliteSaver, talk: &Talk, what: &str) {
        let image = saver.read_thread(&talk.thread).await.unwrap();
        let state = format!("{:?}", image.checkpoints);
        if image.revision != Revision::absent() {
            let bytes = format!("{:?}", image.revision).into_bytes();
            if let Some(before) = self.states.get(&bytes) {
                // The same revision: nothing happened since.
                assert_eq!(self.last.as_ref(), Some(&(image.revision.clone(), state.clone())), "{what}");
                assert_eq!(*before, state, "{what}");
            }
            self.states.insert(bytes, state.clone());
        }
        self.last = Some((image.revision, state));
    }
}

/// Any calls in any order: each revision belongs to one state, which never recurs under it.
#[tokio::test]
async fn no_revision_is_given_twice() {
    for seed in 0..12 {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        let mut saver = SqliteSaver::open(&path, &Options::default()).unwrap();
        let mut talk = Talk::new("t");
        let (mut random, mut given) = (Lcg::new(seed), Given::default());
        for turn in 0..60 {
            let what = if talk.head.is_none() { 0 } else { random.next() % 10 };
            match what {
                0..=2 => {
                    let step = talk.say(&message(random.next() % 3, 200));
                    saver.commit(step.clone()).await.unwrap();
                    talk.accept(&step);
                }
                3 | 4 => {
                    let image = saver.read_thread(&talk.thread).await.unwrap();
                    let rewrite = note(&image, [None, Some("A"), Some("B")][random.next() % 3]);
                    saver.rewrite_thread(&talk.thread, &image.revision, rewrite).await.unwrap();
                }
                5 | 6 => {
                    // A special write replaces the one before it.
                    let text = ["yes".to_owned(), long("A"), long("B")][random.next() % 3].clone();
                    let value = ChannelValue::from_json(&json!(text)).unwrap();
                    let write = Write { channel: INTERRUPT_CHANNEL.into(), value, overwrite: false };
                    let task = TaskId::from_bytes([7; 16]);
                    let row = TaskWrites { task, node: "model".into(), index: 0, writes: vec![write] };
                    saver.put_writes(&talk.key(), &row).await.unwrap();
                }
                7 => saver.sweep().await.unwrap(),
                8 => {
                    saver.close().await;
                    saver = SqliteSaver::open(&path, &Options::default()).unwrap();
                }
                _ => {
                    saver.delete_thread(&talk.thread).await.unwrap();
                    // The same ids and messages again.
                    talk = Talk::new("t");
                }
            }
            given.note(&saver, &talk, &format!("seed {seed}, turn {turn}, call {what}")).await;
        }
        assert!(given.states.len() > 20, "{} revisions", given.states.len());
    }
}

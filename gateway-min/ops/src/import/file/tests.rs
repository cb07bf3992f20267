//! What is held while a file is checked and given to a store.

use std::io::Write as _;

use serde_json::json;
use threadkeep::channel::Schema;
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, Stored, TaskWrites, Write};
use threadkeep::id::{CheckpointId, IdSource, Namespace, Version};
use threadkeep::metadata::{Metadata, Source as MadeBy};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::ThreadImage;
use threadkeep::value::ChannelValue;

use super::*;
use crate::archive::{MAX_PLACES, Source, Writer};

fn table() -> ChannelTable {
    Schema::thread_state().compile(ChannelMode::Delta, 10).unwrap()
}

/// The file of a thread of this many checkpoints, each of which says something long. Every tenth is a branch from the one
/// before its parent.
fn file(length: u64) -> ImportFile {
    let (ids, thread) = (IdSource::default(), ThreadId::from("t"));
    let named = tempfile::NamedTempFile::new().unwrap();
    let source = Source { program: "x".to_owned(), saver: "x".to_owned() };
    let mut writer = Writer::begin(&thread, source, None, named.as_file()).unwrap();
    let mut said: Vec<(CheckpointId, Vec<serde_json::Value>)> = Vec::new();
    let (mut newest, mut waiting): (Option<CheckpointId>, Vec<CheckpointTuple>) = (None, Vec::new());
    for number in 0..length {
        let id = ids.checkpoint_after(newest);
        let back = if number % 10 == 9 { 2 } else { 1 };
        let above = said.len().checked_sub(back).map(|at| said[at].clone());
        let message =
            json!({"type": "ai", "id": format!("m{number}"), "content": format!("{number}").repeat(50)});
        let mut messages = above.as_ref().map_or_else(Vec::new, |(_, messages)| messages.clone());
        messages.push(message.clone());
        let task = above.as_ref().map(|(parent, _)| {
            let (task, value) = (ids.task(), ChannelValue::from_json(&json!([message])).unwrap());
            let write = Write { channel: "messages".into(), value, overwrite: false };
            let row = TaskWrites { task, node: "model".into(), index: 0, writes: vec![write] };
            waiting.iter_mut().find(|tuple| tuple.checkpoint.id == *parent).unwrap().writes.push(row);
            task
        });
        let version = Version { counter: number + 1, random: number };
        let is_snapshot = task.is_none() || number % 10 == 5;
        let value = ChannelValue::from_json(&json!(messages)).unwrap();
        let stored = if is_snapshot { Stored::Snapshot(value) } else { Stored::Sentinel };
        let mut metadata = Metadata::new(MadeBy::Loop, 1);
        metadata.delta_marker = !is_snapshot;
        let channels = [("messages".into(), ChannelEntry { version, stored })].into();
        let checkpoint = Checkpoint { id, channels, next: Vec::new(), applied: task.into_iter().collect() };
        waiting.push(CheckpointTuple {
            thread: thread.clone(),
            namespace: Namespace::root(),
            checkpoint,
            parent: above.map(|(parent, _)| parent),
            metadata,
            writes: Vec::new(),
        });
        said.push((id, messages));
        if said.len() > 4 {
            said.remove(0);
            writer.checkpoint(&waiting.remove(0)).unwrap();
        }
        newest = Some(id);
    }
    for tuple in &waiting {
        writer.checkpoint(tuple).unwrap();
    }
    writer.end().unwrap();
    ImportFile::open(named.path(), MAX_PLACES).unwrap()
}

#[test]
fn a_check_holds_what_has_children_to_come() {
    let mut held = Vec::new();
    for length in [100, 1_000] {
        let checked = file(length).check(&table(), None).unwrap();
        assert_eq!(checked.checkpoints as u64, length);
        assert!(checked.refused.is_none(), "{:?}", checked.refused);
        assert_eq!(checked.damage(), None);
        held.push(checked.most_held);
    }
    assert!(held[0] == held[1] && held[1] <= 4, "{held:?}");
}

#[tokio::test]
async fn a_file_comes_in_parts_and_again() {
    let file = file(1_000);
    let checked = file.check(&table(), Some("another")).unwrap();
    let mut coming = file.coming(&checked);
    for _ in 0..2 {
        coming.rewind().await.unwrap();
        let mut came = 0;
        loop {
            let part = coming.next().await.unwrap();
            if part.is_empty() {
                break;
            }
            assert!(part.len() <= PART && part.iter().all(|tuple| tuple.thread.as_str() == "another"));
            came += part.len();
            assert!(coming.reader.as_ref().unwrap().held() <= 64 << 10, "of elements");
        }
        assert_eq!(came, 1_000);
    }
}

/// As if somebody wrote to the file between its check and its import.
#[tokio::test]
async fn a_file_that_changes_after_its_check_is_refused() {
    let one = file(300);
    let checked = one.check(&table(), None).unwrap();
    let other = file(301);
    let mut coming = other.coming(&checked);
    let error = loop {
        match coming.next().await {
            Ok(part) => assert!(!part.is_empty(), "it ended"),
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("changed while it was imported"), "{error}");
    assert!(coming.failed.is_some());
}

/// A pipe can be read once.
#[test]
fn what_cannot_be_read_twice_is_copied() {
    let mut copy = copied(&b"one\ntwo\n"[..]).unwrap();
    for _ in 0..2 {
        let mut text = String::new();
        copy.seek(SeekFrom::Start(0)).unwrap();
        io::Read::read_to_string(&mut copy, &mut text).unwrap();
        assert_eq!(text, "one\ntwo\n");
    }
    copy.write_all(b"three").unwrap();
}

/// Its metadata and values are as in an image of all of it.
#[test]
fn a_check_finds_what_verify_finds() {
    let table = table();
    let mut file = file(40);
    let mut text = String::new();
    io::Read::read_to_string(&mut file.begin().unwrap(), &mut text).unwrap();
    let archive = crate::archive::read(text.as_bytes()).unwrap();
    let checkpoints = archive.checkpoints.into_iter();
    let mut image = ThreadImage {
        checkpoints: checkpoints
            .map(|tuple| ((tuple.namespace.clone(), tuple.checkpoint.id), tuple))
            .collect(),
        ..ThreadImage::absent(&"t".into())
    };
    let places: Vec<_> = image.checkpoints.keys().cloned().collect();
    for (n, at) in places.iter().enumerate().skip(12) {
        let tuple = image.checkpoints.get_mut(at).unwrap();
        match n {
            15 => tuple.checkpoint.channels.get_mut("messages").unwrap().version.counter = 3,
            19 => tuple.writes.clear(),
            _ => {}
        }
    }
    let mut written = tempfile::tempfile().unwrap();
    let source = Source { program: "x".to_owned(), saver: "x".to_owned() };
    crate::archive::write(&image, source, None, &mut written).unwrap();
    file.file = written;
    let mut found = threadkeep::verify::verify_image(&image, &table);
    found.retain(|violation| !violation.rule.is_repairable());
    let checked = file.check(&table, None).unwrap();
    assert!(!found.is_empty());
    assert_eq!(checked.violations, Some((found[0].clone(), found.len())));
}

//! The bodies of the crate's fuzz targets: what a stored row may hold. Each takes any bytes, must not panic, and asserts that
//! what it reads is written back the same.
#![allow(clippy::expect_used, missing_docs, reason = "a fuzz target fails by panicking")]

use threadkeep::id::ChannelName;

use crate::record::{CheckpointRecord, TaskRecord, ThreadRecord};
use crate::{element, keys, packed};

/// The body of a checkpoint. The first byte says how many channels have a name.
pub fn checkpoint(data: &[u8]) {
    let Some((names, body)) = data.split_first() else { return };
    let names: Vec<ChannelName> = (0..*names).map(|n| format!("channel {n:03}").into()).collect();
    let Ok(record) = CheckpointRecord::decode(body, &names) else { return };
    let number = CheckpointRecord::names_of(body).expect("a body that was read");
    // It is written with only the names that it uses.
    let names: Vec<ChannelName> = record.names().into_iter().cloned().collect();
    let again = CheckpointRecord::decode(&record.encode(number), &names);
    assert_eq!(again.expect("a record that was written"), record);
}

/// The body of a task, and that of a thread.
pub fn row(data: &[u8]) {
    if let Ok(task) = TaskRecord::decode(data) {
        assert_eq!(TaskRecord::decode(&task.encode()).expect("a task that was written"), task);
    }
    if let Ok(thread) = ThreadRecord::decode(data) {
        assert_eq!(ThreadRecord::decode(&thread.encode()).expect("a thread that was written"), thread);
    }
}

/// The body of an element, compressed or not.
pub fn element(data: &[u8]) {
    let Ok(element) = element::decode(b"key", data) else { return };
    let body = element::encode(&element).expect("an element that was read");
    assert_eq!(element::decode(b"key", &body).expect("an element that was written"), element);
}

/// A key. The first byte is the number of the thread that it should be of.
pub fn key(data: &[u8]) {
    let Some((thread, key)) = data.split_first() else { return };
    let thread = u64::from(*thread);
    if let Some((namespace, id)) = keys::place(thread, key) {
        assert_eq!(keys::checkpoint(thread, &namespace, id), key);
    }
    if let Some(id) = keys::thread_id(key) {
        assert_eq!(keys::thread(&id), key);
    }
    for space in keys::SPACES {
        if let Some(number) = keys::element_number(thread, space, key) {
            assert_eq!(keys::element(thread, space, number), key);
        }
    }
    keys::range_of(key);
}

/// The rows of a bucket, after the key of its first one, which the first byte measures.
pub fn bucket(data: &[u8]) {
    let Some((len, rest)) = data.split_first() else { return };
    let Some((first, rows)) = rest.split_at_checked(usize::from(*len)) else { return };
    let read = |first: &[u8], rows: &[u8]| {
        let mut read = Vec::new();
        packed::decoded(first, rows, |key, value| {
            read.push((key.to_vec(), (value.to_vec(), false)));
            true
        })
        .map(|()| read)
    };
    let Ok(rows) = read(first, rows) else { return };
    let Some((first, _)) = rows.first() else { return };
    assert_eq!(read(first, &packed::encoded(&rows)).expect("a bucket that was written"), rows);
}

#[cfg(test)]
mod tests {
    /// Replays the whole corpus.
    fn replay(target: &str, body: fn(&[u8])) {
        let corpus = format!("{}/../../fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
        let files: Vec<_> = std::fs::read_dir(&corpus).unwrap().map(|file| file.unwrap().path()).collect();
        assert!(!files.is_empty(), "{corpus} is empty");
        for file in files {
            body(&std::fs::read(file).unwrap());
        }
    }

    #[test]
    fn the_corpus_of_every_kind_of_row_is_harmless() {
        replay("kv_checkpoint", super::checkpoint);
        replay("kv_row", super::row);
        replay("kv_element", super::element);
        replay("kv_key", super::key);
        replay("kv_bucket", super::bucket);
    }
}

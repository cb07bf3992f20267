//! The bodies of the driver's fuzz targets: what a stored row may hold. Each takes any bytes, must not panic, and
//! asserts that what it reads is written back the same.
#![allow(clippy::expect_used, missing_docs, reason = "a fuzz target fails by panicking")]

use threadkeep::id::{ChannelName, CheckpointId};
use threadkeep_layout::{chunk_bytes, chunk_runs, decode_names, encode_names};

use crate::record::{CheckpointRecord, ThreadBody, decode_tasks, encode_tasks, needs};

/// The body of a checkpoint. The first byte sets the other columns: bit 0 that it has a parent, bit 1 that an element
/// holds its metadata; the remaining bits how many channels have a name.
pub fn checkpoint(data: &[u8]) {
    let Some((columns, body)) = data.split_first() else { return };
    let parent = (columns & 1 != 0).then(|| CheckpointId::from_bytes([7; 16]));
    let extra = (columns & 2 != 0).then_some(9);
    let names: Vec<ChannelName> = (0..columns >> 2).map(|n| format!("channel {n:02}").into()).collect();
    let Ok(record) = CheckpointRecord::decode(body, parent, &names, extra) else { return };
    needs(&record, &[]);
    // It is written with only the names that it uses.
    let names: Vec<ChannelName> = record.names().into_iter().cloned().collect();
    let again = CheckpointRecord::decode(&record.encode(), parent, &names, extra);
    assert_eq!(again.expect("a record that was written"), record);
}

/// The tasks that ran from a checkpoint.
pub fn tasks(data: &[u8]) {
    let Ok(tasks) = decode_tasks(data) else { return };
    assert_eq!(decode_tasks(&encode_tasks(&tasks)).expect("tasks that were written"), tasks);
}

/// A chunk of a manifest.
pub fn chunk(data: &[u8]) {
    let Ok(runs) = chunk_runs(data) else { return };
    assert_eq!(chunk_runs(&chunk_bytes(&runs)).expect("a chunk that was written"), runs);
}

/// The names of channels, and the body of a thread's row.
pub fn names(data: &[u8]) {
    if let Ok(names) = decode_names(data) {
        assert_eq!(decode_names(&encode_names(names.iter())).expect("names that were written"), names);
    }
    if let Ok(body) = ThreadBody::decode(data) {
        assert_eq!(ThreadBody::decode(&body.encode()).expect("a body that was written"), body);
    }
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
        replay("postgres_checkpoint", super::checkpoint);
        replay("postgres_tasks", super::tasks);
        replay("postgres_chunk", super::chunk);
        replay("postgres_names", super::names);
    }
}

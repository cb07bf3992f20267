//! The body of the fuzz target: any file that could be imported.
#![allow(clippy::expect_used, clippy::panic, reason = "a fuzz target fails by panicking")]

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};
use threadkeep::saver::{Revision, ThreadImage};

use crate::archive::{ArchiveError, read, write};

/// Reads the bytes as they are, and with a valid `end` line. What can be read is written, and must read back the same.
pub fn archive(data: &[u8]) {
    // Unchanged, only a file with a valid hash is accepted.
    let _ = read(data);
    let Ok(archive) = read(&ended(data)[..]) else { return };
    let place =
        |tuple: &threadkeep::checkpoint::CheckpointTuple| (tuple.namespace.clone(), tuple.checkpoint.id);
    let image = ThreadImage {
        thread: archive.thread,
        revision: Revision::absent(),
        checkpoints: archive.checkpoints.into_iter().map(|tuple| (place(&tuple), tuple)).collect(),
    };
    let mut file = Vec::new();
    match write(&image, archive.source, archive.record, &mut file) {
        Ok(_) => {}
        Err(ArchiveError::Value { .. }) => return,
        Err(error) => panic!("what was read cannot be written: {error}"),
    }
    let again = read(&file[..]).expect("what was written can be read");
    let checkpoints: BTreeMap<_, _> = again.checkpoints.into_iter().map(|t| (place(&t), t)).collect();
    assert!(checkpoints == image.checkpoints, "the thread read back differs from the one written");
}

/// The lines, followed by the `end` line that counts and hashes them.
fn ended(data: &[u8]) -> Vec<u8> {
    let mut file = data.to_vec();
    if file.last() != Some(&b'\n') {
        file.push(b'\n');
    }
    let lines =
        file.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice::<Json>(line).ok());
    let (mut elements, mut checkpoints, mut tasks) = (0, 0, 0);
    for line in lines {
        elements += u64::from(line.get("element").is_some());
        if let Some(checkpoint) = line.get("checkpoint") {
            checkpoints += 1;
            tasks += checkpoint["tasks"].as_array().map_or(0, Vec::len);
        }
    }
    let blake3 = blake3::hash(&file).to_hex().to_string();
    let end =
        json!({"end": {"elements": elements, "checkpoints": checkpoints, "tasks": tasks, "blake3": blake3}});
    file.extend_from_slice(end.to_string().as_bytes());
    file.push(b'\n');
    file
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpus_of_exported_threads_is_harmless() {
        for input in threadkeep_testing::corpus("archive").unwrap() {
            super::archive(&input);
        }
    }
}

//! The body of the fuzz target: what Redis may return. Accepts any bytes, must not panic, and asserts that a decoded
//! entry encodes to the same bytes.
#![allow(clippy::expect_used, missing_docs, reason = "a fuzz target fails by panicking")]

use threadkeep::cache::HistoryKey;

use crate::codec::{open, seal, with_checksum};

/// A path and its seed, as an attacker who can compute checksums could write them. The first two bytes say where one
/// ends and the other begins.
pub fn cache_entry(data: &[u8]) {
    let key = HistoryKey { thread: "t".into(), namespace: "n".into(), channel: "messages".into() };
    assert_eq!(open(&key, data, Some(data)), None, "bytes without a checksum are a miss");
    let Some((middle, body)) = data.split_first_chunk() else { return };
    let (path, seed) = body.split_at(usize::from(u16::from_le_bytes(*middle)).min(body.len()));
    let (path, seed) = (with_checksum(&key, b"path", path), with_checksum(&key, b"seed", seed));
    let Some(found) = open(&key, &path, Some(&seed)) else { return };
    let sealed = seal(&key, &found).expect("no longer than before");
    let again = open(&key, &sealed.path, sealed.seed.as_ref().map(|seed| &seed.bytes[..]));
    assert_eq!(again, Some(found));
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpus_of_cache_entries_is_harmless() {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/cache_entry");
        let files: Vec<_> = std::fs::read_dir(corpus).unwrap().map(|file| file.unwrap().path()).collect();
        assert!(!files.is_empty(), "{corpus} is empty");
        for file in files {
            super::cache_entry(&std::fs::read(file).unwrap());
        }
    }
}

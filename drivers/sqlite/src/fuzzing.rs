//! The bodies of the driver's fuzz targets: what a stored row may hold. Each takes any bytes, must not panic, and
//! asserts that what it reads is written back the same.
#![allow(clippy::expect_used, missing_docs, reason = "a fuzz target fails by panicking")]

use tempfile::TempDir;
use threadkeep::value::Element;
use threadkeep_layout::{chunk_bytes, chunk_runs};

use crate::Options;
use crate::rows::element;
use crate::rows::pack;
use crate::rows::record::{CheckpointRecord, decode_floor, decode_tasks, encode_floor, encode_tasks};
use crate::rows::seal::{RowKey, seal, unseal};
use crate::sql::Db;

/// The body of a row of table `checkpoint`, whose ordinal is in the first two bytes.
pub fn checkpoint(data: &[u8]) {
    let Some((own, body)) = data.split_first_chunk() else { return };
    let own = u32::from(u16::from_le_bytes(*own));
    let Ok(record) = CheckpointRecord::decode(own, body) else { return };
    let again = CheckpointRecord::decode(own, &record.encode(own)).expect("a record that was written");
    assert_eq!(again, record);
}

/// The tasks of a row of table `checkpoint`.
pub fn tasks(data: &[u8]) {
    let Ok(tasks) = decode_tasks(data) else { return };
    assert_eq!(decode_tasks(&encode_tasks(&tasks)).expect("tasks that were written"), tasks);
}

/// A chunk of a manifest.
pub fn chunk(data: &[u8]) {
    let Ok(runs) = chunk_runs(data) else { return };
    assert_eq!(chunk_runs(&chunk_bytes(&runs)).expect("a chunk that was written"), runs);
}

/// The body of a row of table `scope`.
pub fn scope(data: &[u8]) {
    let Ok(floor) = decode_floor(data) else { return };
    assert_eq!(decode_floor(&encode_floor(floor)), Ok(floor));
}

/// A row of table `element`: its hash, then its body, compressed or not, with the one dictionary of its database.
pub fn element(data: &[u8]) {
    thread_local! {
        static DB: (TempDir, Db) = {
            let dir = tempfile::tempdir().expect("a temporary directory");
            let db = Db::writer(&dir.path().join("db"), &Options::default()).expect("a database");
            pack::add_dictionary(&db, 1, &b"{\"type\":\"human\",\"content\":\"hello\"}".repeat(40)).expect("a dictionary");
            (dir, db)
        };
    }
    let Some((hash, body)) = data.split_first_chunk() else { return };
    let place = RowKey::new("element", 7_i64);
    DB.with(|(_, db)| {
        if let Ok(element) = element::decode(db, place, *hash, body, None) {
            assert_eq!(Element::hash_of(element.bytes()), *hash, "the hash of an element");
        }
        let Ok(bytes) = db.unpack(place, body, None) else { return };
        let packed = db.pack(&bytes).expect("what was unpacked can be packed");
        assert_eq!(db.unpack(place, &packed, None).expect("what was packed can be unpacked"), bytes);
    });
}

/// Sealed bytes, as a row holds them and with one bit changed, as an attacker might; the last byte selects the bit.
pub fn sealed(data: &[u8]) {
    let Some((bit, body)) = data.split_last() else { return };
    let place = RowKey::new("checkpoint", 7_i64);
    assert!(
        unseal(place, b"context", data).is_err() || data.len() >= 4,
        "less than a checksum was taken for one"
    );
    let mut stored = seal(place, b"context", body.to_vec());
    assert_eq!(unseal(place, b"context", &stored).expect("it was just sealed"), body);
    let at = usize::from(*bit) % (stored.len() * 8);
    stored[at / 8] ^= 1 << (at % 8);
    assert!(unseal(place, b"context", &stored).is_err(), "a flipped bit was not seen");
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
        replay("sqlite_checkpoint", super::checkpoint);
        replay("sqlite_tasks", super::tasks);
        replay("sqlite_chunk", super::chunk);
        replay("sqlite_scope", super::scope);
        replay("sqlite_element", super::element);
        replay("sqlite_sealed", super::sealed);
    }
}

//! The keys of threads and namespaces: hashes of their texts, so that every key has a fixed size, whatever the text.

use threadkeep::id::{CheckpointId, Namespace, ThreadId};
use uuid::Uuid;

/// The key of a thread: the first sixteen bytes of the BLAKE3 hash of its id.
pub(crate) fn of_thread(thread: &ThreadId) -> Uuid {
    Uuid::from_bytes(short_hash(thread.as_str()))
}

/// The key of a namespace: empty for the root, else the first sixteen bytes of the BLAKE3 hash of its text.
pub(crate) fn of_namespace(namespace: &Namespace) -> Vec<u8> {
    match namespace.as_str() {
        "" => Vec::new(),
        text => short_hash(text).to_vec(),
    }
}

fn short_hash(text: &str) -> [u8; 16] {
    let mut short = [0; 16];
    short.copy_from_slice(&blake3::hash(text.as_bytes()).as_bytes()[..16]);
    short
}

/// A checkpoint id as a Postgres UUID; both are ordered by their bytes.
pub(crate) fn uuid(id: CheckpointId) -> Uuid {
    Uuid::from_bytes(*id.as_bytes())
}

/// The checkpoint id of a stored UUID.
pub(crate) fn id(uuid: Uuid) -> CheckpointId {
    CheckpointId::from_bytes(*uuid.as_bytes())
}

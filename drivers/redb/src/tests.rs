use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use redb::backends::InMemoryBackend;
use redb::{Builder, StorageBackend};
use threadkeep::Error;
use threadkeep_kv::Changes;

use super::*;

/// A disk whose flushes fail once `fails` is set.
#[derive(Debug, Clone, Default)]
struct Disk {
    bytes: Arc<InMemoryBackend>,
    fails: Arc<AtomicBool>,
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        self.bytes.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.bytes.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.bytes.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        if self.fails.load(Ordering::SeqCst) {
            return Err(io::Error::other("a test makes the flush fail"));
        }
        self.bytes.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.bytes.write(offset, data)
    }
}

fn opened(disk: &Disk) -> File {
    let db = Builder::new().create_with_backend(disk.clone()).unwrap();
    File { db, doubtful: AtomicBool::default() }
}

fn put(file: &File, key: &[u8]) -> Result<()> {
    file.write(Flush::Now, &mut |_| Ok(Changes::from([(key.to_vec(), Some(b"value".to_vec()))])))
}

fn has(file: &File, key: &[u8]) -> Result<bool> {
    file.snapshot()?.get(key).map(|found| found.is_some())
}

#[test]
fn a_commit_in_doubt_is_not_read_as_absent() {
    let disk = Disk::default();
    let file = opened(&disk);
    put(&file, b"before").unwrap();
    let older = file.snapshot().unwrap();
    disk.fails.store(true, Ordering::SeqCst);
    assert!(matches!(put(&file, b"doubtful"), Err(Error::InDoubt { .. })));
    for key in [&b"before"[..], b"doubtful"] {
        assert!(matches!(has(&file, key), Err(Error::Unavailable { .. })), "{:?}", has(&file, key));
    }
    assert!(matches!(put(&file, b"after"), Err(Error::Unavailable { .. })));
    // What was read before is of a moment before.
    assert_eq!(older.get(b"doubtful").unwrap(), None);
    drop(older);
    drop(file);
    disk.fails.store(false, Ordering::SeqCst);
    let file = opened(&disk);
    assert!(has(&file, b"before").unwrap());
    assert!(has(&file, b"doubtful").unwrap(), "the disk had it all along");
}

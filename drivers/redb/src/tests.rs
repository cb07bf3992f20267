use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redb::StorageBackend;
use redb::backends::InMemoryBackend;
use threadkeep::Error;

use super::*;

/// How long what must happen may take.
const PATIENCE: Duration = Duration::from_mins(10);

/// A disk whose flushes fail once `fails` is set, and whose reads fail while `reads_fail` is.
#[derive(Debug, Clone, Default)]
struct Disk {
    bytes: Arc<InMemoryBackend>,
    fails: Arc<AtomicBool>,
    reads_fail: Arc<AtomicBool>,
    pause: Arc<Mutex<Option<Pause>>>,
}

/// Before one of the next writes and flushes, somebody else is asked to do something, and waited for.
#[derive(Debug)]
struct Pause {
    /// The writes and flushes before it.
    left: usize,
    ask: Sender<()>,
    done: Receiver<()>,
}

impl Disk {
    /// A disk with these bytes.
    fn with(bytes: &[u8]) -> Self {
        let disk = Self::default();
        disk.bytes.set_len(bytes.len() as u64).unwrap();
        disk.bytes.write(0, bytes).unwrap();
        disk
    }

    fn all_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(self.bytes.len().unwrap()).unwrap()];
        self.bytes.read(0, &mut bytes).unwrap();
        bytes
    }

    fn pauses(&self) {
        let mut pause = self.pause.lock().unwrap();
        match pause.take() {
            Some(Pause { left: 0, ask, done }) => {
                ask.send(()).unwrap();
                done.recv_timeout(PATIENCE).unwrap();
            }
            Some(other) => *pause = Some(Pause { left: other.left - 1, ..other }),
            None => {}
        }
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        self.bytes.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if self.reads_fail.load(Ordering::SeqCst) {
            return Err(io::Error::other("a test makes the read fail"));
        }
        self.bytes.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.bytes.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.pauses();
        if self.fails.load(Ordering::SeqCst) {
            return Err(io::Error::other("a test makes the flush fail"));
        }
        self.bytes.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.pauses();
        self.bytes.write(offset, data)
    }
}

/// Nothing of it is kept in memory.
fn open(disk: &Disk) -> Result<File> {
    let opened = guarded(|| {
        let opened = checking(&mut Builder::new()).set_cache_size(0).create_with_backend(disk.clone());
        opened.map_err(unavailable)
    });
    File::new(opened?, None)
}

fn opened(disk: &Disk) -> File {
    open(disk).unwrap()
}

/// Rows on several pages.
const ROWS_OF_TESTS: usize = 400;

fn row(number: usize) -> (Vec<u8>, Vec<u8>) {
    (format!("row {number:04}").into_bytes(), format!("value {number:04} ").repeat(20).into_bytes())
}

fn put_rows(file: &File) {
    let changes: Changes = (0..ROWS_OF_TESTS).map(row).map(|(key, value)| (key, Some(value))).collect();
    file.write(Flush::Now, &mut |_| Ok(changes.clone())).unwrap();
}

/// The rows of a range, each of which is as it was written.
fn count_rows(file: &File) -> Result<usize> {
    let mut found = 0;
    file.snapshot()?.range(&b"row "[..]..&b"row!"[..], Order::Ascending, &mut |key, value| {
        let number = std::str::from_utf8(&key[4..]).unwrap().parse().unwrap();
        assert_eq!((key, value), (&*row(number).0, &*row(number).1));
        found += 1;
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(found)
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

/// A read that fails lets redb fail whatever else is under way, wherever that is: a commit may be on the disk by then.
#[test]
fn a_commit_that_the_failed_read_of_another_call_ends_is_in_doubt() {
    let mut stored_in_doubt = 0;
    for operations in 0.. {
        let disk = Disk::default();
        let file = opened(&disk);
        put_rows(&file);
        let older = file.snapshot().unwrap();
        let ((ask, asked), (done, wait)) = (channel(), channel());
        *disk.pause.lock().unwrap() = Some(Pause { left: operations, ask, done: wait });
        let (committed, met) = std::thread::scope(|threads| {
            let commit = threads.spawn(|| {
                let committed = put(&file, b"new");
                // The reader waits no longer.
                disk.pause.lock().unwrap().take();
                committed
            });
            let met = asked.recv_timeout(PATIENCE).is_ok();
            if met {
                disk.reads_fail.store(true, Ordering::SeqCst);
                assert!(older.get(&row(200).0).is_err());
                disk.reads_fail.store(false, Ordering::SeqCst);
                done.send(()).unwrap();
            }
            (commit.join().unwrap(), met)
        });
        drop(older);
        drop(file);
        let stored = has(&opened(&disk), b"new").unwrap();
        match committed {
            Ok(()) => assert!(stored),
            Err(Error::InDoubt { .. }) => stored_in_doubt += usize::from(stored),
            Err(error) => assert!(!stored, "before operation {operations}: {error}"),
        }
        if !met {
            break;
        }
    }
    assert!(stored_in_doubt > 0, "no read failed after the commit was on the disk");
}

#[test]
fn nothing_is_written_to_a_file_that_was_removed_or_replaced() {
    for replaced in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.redb");
        let store = RedbStore::open(&path).unwrap();
        let file = store.0.below();
        put(file, b"before").unwrap();
        let aside = dir.path().join("aside.redb");
        std::fs::rename(&path, &aside).unwrap();
        if replaced {
            std::fs::copy(&aside, &path).unwrap();
        }
        let refused = put(file, b"after");
        assert!(
            matches!(&refused, Err(Error::Unavailable { reason, .. }) if reason.contains(GONE)),
            "{refused:?}"
        );
        assert!(!has(file, b"after").unwrap());
        // Back in its place, it is the file that was opened.
        std::fs::rename(&aside, &path).unwrap();
        put(file, b"after").unwrap();
        drop(store);
        assert!(has(RedbStore::open(&path).unwrap().0.below(), b"after").unwrap());
    }
}

/// Bytes of each page of a file, and all of its first bytes.
fn damaged(bytes: &[u8], mut test: impl FnMut(&[u8], usize)) {
    let mut damaged = bytes.to_vec();
    for at in (0..bytes.len()).filter(|at| *at < 512 || at % 4096 % 1361 == 3) {
        damaged[at] ^= 0x10;
        test(&damaged, at);
        damaged[at] = bytes[at];
    }
}

/// The bytes of a file with rows that was closed.
fn closed() -> Vec<u8> {
    let disk = Disk::default();
    put_rows(&opened(&disk));
    disk.all_bytes()
}

#[test]
fn a_damaged_file_is_not_opened_or_has_every_row() {
    let mut refused = 0;
    damaged(&closed(), |bytes, at| match open(&Disk::with(bytes)) {
        Ok(file) => assert_eq!(count_rows(&file).unwrap(), ROWS_OF_TESTS, "byte {at}"),
        Err(_) => refused += 1,
    });
    assert!(refused > 20, "{refused} files were not opened");
}

#[test]
fn damage_while_a_file_is_open_is_an_error_and_no_panic() {
    let bytes = closed();
    let mut failed = 0;
    damaged(&bytes, |bytes, at| {
        let disk = Disk::with(&closed_once(bytes, at));
        let file = opened(&disk);
        disk.bytes.write(at as u64, &bytes[at..=at]).unwrap();
        let read = (0..ROWS_OF_TESTS).step_by(50).try_for_each(|number| has(&file, &row(number).0).map(drop));
        let written = put(&file, &row(7).0);
        failed += usize::from(read.is_err() || written.is_err());
        drop(file);
    });
    assert!(failed > 0, "no damage was noticed");
}

/// The bytes before this one was damaged.
fn closed_once(damaged: &[u8], at: usize) -> Vec<u8> {
    let mut bytes = damaged.to_vec();
    bytes[at] ^= 0x10;
    bytes
}

#[test]
fn a_panic_of_redb_is_an_error_and_one_of_a_plan_is_its_callers() {
    let error = guarded::<()>(|| panic!("arranged by the test, page {}", 7)).unwrap_err();
    assert!(matches!(&error, Error::Corrupt { .. }), "{error}");
    assert!(error.to_string().contains("page 7"), "{error}");
    let file = opened(&Disk::default());
    let panicked =
        catch_unwind(AssertUnwindSafe(|| file.write(Flush::Now, &mut |_| panic!("the plan's own"))));
    assert_eq!(panicked.unwrap_err().downcast_ref::<&str>(), Some(&"the plan's own"));
    put(&file, b"after").unwrap();
    assert!(has(&file, b"after").unwrap());
}

/// A flushed file without a name is lost.
#[cfg(unix)]
#[test]
fn the_directory_of_a_new_file_is_flushed_before_the_file_has_content() {
    use std::os::unix::fs::{MetadataExt as _, symlink};

    let dir = tempfile::tempdir().unwrap();
    let (here, there) = (dir.path().join("here"), dir.path().join("there"));
    for directory in [&here, &there] {
        std::fs::create_dir(directory).unwrap();
    }
    let (link, path) = (here.join("link"), there.join("file"));
    symlink(&path, &link).unwrap();
    let failed = place::open(&link, |_| Err(io::Error::other("a test makes the flush fail")));
    assert!(failed.unwrap_err().to_string().contains("a test makes"));
    // It exists by now, and its name may still be lost.
    for opened in [&link, &path] {
        let mut flushed = None;
        let file = place::open(opened, |directory| {
            flushed = Some(directory.metadata()?.ino());
            Ok(())
        });
        assert_eq!(file.unwrap().metadata().unwrap().len(), 0);
        assert_eq!(flushed, Some(std::fs::metadata(&there).unwrap().ino()), "{}", opened.display());
    }
    drop(RedbStore::open(&link).unwrap());
    place::open(&path, |_| panic!("it has its name for good")).unwrap();
}

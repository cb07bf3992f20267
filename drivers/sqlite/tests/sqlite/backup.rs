//! A backup of a store in use: one moment, one file, restored by putting it in the place of the store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};
use threadkeep::Error;
use threadkeep::saver::{CheckpointSelector, ListQuery, Saver};
use threadkeep_sqlite::{Options, SqliteSaver, copy_database};

use crate::common::{Talk, message};

const WRITERS: usize = 3;

/// Commits until it is stopped, and counts the acknowledged commits.
async fn write(
    saver: Arc<SqliteSaver>,
    thread: String,
    acknowledged: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
) {
    let mut talk = Talk::new(&thread);
    for number in 0.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let step = talk.say(&message(number, 500));
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
        acknowledged.store(talk.messages.len(), Ordering::SeqCst);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_backup_under_writers_holds_what_was_acknowledged_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let saver = Arc::new(SqliteSaver::open(dir.path().join("db"), &Options::default()).unwrap());
    // More than is copied in one step: writers commit between the steps.
    let mut ballast = Talk::new("ballast");
    for number in 0..300 {
        let step = ballast.say(&message(number, 100_000));
        saver.commit(step.clone()).await.unwrap();
        ballast.accept(&step);
    }
    let stop = Arc::<AtomicBool>::default();
    let counts: Vec<_> = (0..WRITERS).map(|_| Arc::<AtomicUsize>::default()).collect();
    let writers: Vec<_> = counts
        .iter()
        .enumerate()
        .map(|(i, count)| tokio::spawn(write(saver.clone(), format!("t{i}"), count.clone(), stop.clone())))
        .collect();
    let now = || counts.iter().map(|count| count.load(Ordering::SeqCst)).collect::<Vec<_>>();
    let (mut last, mut wanted) = (0, vec![5_usize; WRITERS]);
    for round in 0..8 {
        while now().iter().zip(&wanted).any(|(count, wanted)| count < wanted) {
            tokio::task::yield_now().await;
        }
        let before = now();
        let backup = dir.path().join(format!("backup-{round}"));
        saver.backup(&backup).await.unwrap();
        let after = now();
        #[cfg(unix)]
        {
            let metadata = std::fs::metadata(&backup).unwrap();
            assert_eq!(std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o777, 0o600);
        }
        assert!(std::fs::metadata(&backup).unwrap().len() > 5 << 20);
        // Restored where there is no other file.
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("db");
        std::fs::copy(&backup, &path).unwrap();
        let restored = SqliteSaver::open(&path, &Options::default()).unwrap();
        assert_eq!(restored.check().await.unwrap(), []);
        let mut total = 0;
        for i in 0..WRITERS {
            let thread = format!("t{i}").as_str().into();
            let stored = restored.list(&ListQuery::new(&thread)).await.unwrap();
            // One more may have been stored and not yet counted.
            assert!((before[i]..=after[i] + 1).contains(&stored.len()), "{} of {before:?}", stored.len());
            let head = restored.get(&CheckpointSelector::head(&thread)).await.unwrap().unwrap();
            let mut talk = Talk::new(&format!("t{i}"));
            talk.resume(&head);
            assert_eq!(talk.messages.len(), stored.len());
            // The thread continues from where the backup ends.
            restored.commit(talk.say(&message(0, 100))).await.unwrap();
            total += stored.len();
        }
        assert!(total > last, "each backup is newer");
        last = total;
        // More than there can be in this backup, however far ahead the writers are.
        wanted = after.iter().map(|count| count + 5).collect();
        restored.close().await;
    }
    stop.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.unwrap();
    }
    let left = std::fs::read_dir(dir.path())
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with(".threadkeep"));
    assert_eq!(left.count(), 0, "nothing half done is left");
}

#[tokio::test]
async fn every_page_of_a_backup_has_its_checksum() {
    let dir = tempfile::tempdir().unwrap();
    let saver = SqliteSaver::open(dir.path().join("db"), &Options::default()).unwrap();
    let mut talk = Talk::new("t");
    for number in 0..80 {
        let step = talk.say(&message(number, 2_000));
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    }
    let backup = dir.path().join("backup");
    saver.backup(&backup).await.unwrap();
    // Opened without a log, its pages can be read.
    let conn = threadkeep_pages::open(&backup, OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
    let verdict: String = conn.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(verdict, "ok");
    assert!(threadkeep_pages::is_sealed(&conn).unwrap());
    drop(conn);
    let mut bytes = std::fs::read(&backup).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&backup, bytes).unwrap();
    let damaged = SqliteSaver::open(&backup, &Options::default()).unwrap();
    assert!(!damaged.check().await.is_ok_and(|found| found.is_empty()));
}

#[tokio::test]
async fn a_backup_replaces_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let saver = SqliteSaver::open(&path, &Options::default()).unwrap();
    saver.commit(Talk::new("t").say(&message(0, 300))).await.unwrap();
    let other = dir.path().join("other");
    std::fs::write(&other, "mine").unwrap();
    for there in [&other, &path] {
        let error = saver.backup(there).await.unwrap_err();
        assert!(matches!(&error, Error::InvalidInput(text) if text.contains("exists")), "{error}");
    }
    assert_eq!(std::fs::read_to_string(&other).unwrap(), "mine");
    let error = saver.backup(dir.path().join("missing/backup")).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert_eq!(saver.check().await.unwrap(), []);
}

#[tokio::test]
async fn a_damaged_store_is_not_backed_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let saver = SqliteSaver::open(&path, &Options::default()).unwrap();
    saver.commit(Talk::new("t").say(&message(0, 300))).await.unwrap();
    // Changes a row and updates the checksum of its page.
    let conn = threadkeep_pages::open(&path, OpenFlags::default()).unwrap();
    conn.execute("UPDATE checkpoint SET body = x'1000'", []).unwrap();
    let backup = dir.path().join("backup");
    let error = saver.backup(&backup).await.unwrap_err();
    assert!(matches!(&error, Error::Corrupt { .. }), "{error}");
    assert!(error.to_string().contains("table checkpoint"), "{error}");
    assert!(!backup.exists());
}

/// Databases without checksums: those of older versions and of other programs.
#[tokio::test]
async fn any_sqlite_database_can_be_copied() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plain");
    let plain = Connection::open(&path).unwrap();
    plain.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(())).unwrap();
    plain.execute_batch("CREATE TABLE t (text TEXT); INSERT INTO t VALUES ('x'), ('y')").unwrap();
    let copy = dir.path().join("copy");
    copy_database(&path, &copy, Duration::from_secs(5)).await.unwrap().keep().unwrap();
    let count: i64 =
        Connection::open(&copy).unwrap().query_row("SELECT count(*) FROM t", [], |row| row.get(0)).unwrap();
    assert_eq!(count, 2);
    let missing = dir.path().join("missing");
    assert!(copy_database(&missing, &dir.path().join("other"), Duration::ZERO).await.is_err());
    assert!(!missing.exists());
}

#[tokio::test]
async fn a_backup_that_is_given_up_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let saver = SqliteSaver::open(dir.path().join("db"), &Options::default()).unwrap();
    saver.commit(Talk::new("t").say(&message(0, 300))).await.unwrap();
    let place = tempfile::tempdir().unwrap();
    let names = || std::fs::read_dir(place.path()).unwrap().count();
    let to = place.path().join("backup");
    let backup = loop {
        let mut backup = Box::pin(saver.backup(&to));
        // On a busy machine it may be complete before it is looked at.
        let Poll::Ready(made) = futures::poll!(&mut backup) else { break backup };
        made.unwrap();
        std::fs::remove_file(&to).unwrap();
    };
    assert_ne!(names(), 0, "it is being made, and its last step has a log");
    drop(backup);
    // The thread that makes it ends at its next step.
    let gone = async {
        while names() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(1), gone).await.expect("no file is left");

    // In another directory: that thread may still make a log, which it removes.
    let place = tempfile::tempdir().unwrap();
    let names = || std::fs::read_dir(place.path()).unwrap().count();
    let to = place.path().join("backup");
    let copied = saver.copied(&to).await.unwrap();
    assert_eq!((names(), to.exists()), (1, false), "it has no name yet");
    drop(copied);
    assert_eq!(names(), 0);
    saver.copied(&to).await.unwrap().keep().unwrap();
    assert_eq!((names(), to.exists()), (1, true));
}

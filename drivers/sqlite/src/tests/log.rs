//! The size of the log beside reads that always overlap.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use rusqlite::Connection;
use threadkeep::saver::Saver;

use super::common::{Talk, message};
use super::faults::How;
use super::statements::{Opened, all};
use crate::Options;

const BOUND: u64 = 1 << 20;

fn options(log_bound: u64, patience: Duration) -> Options {
    Options { log_bound: (log_bound, patience), compression: false, ..Options::default() }
}

/// Two connections, which take turns to read.
fn two(store: &Path) -> [Connection; 2] {
    [0, 1].map(|_| threadkeep_pages::open(store, rusqlite::OpenFlags::default()).unwrap())
}

fn begin(conn: &Connection) {
    conn.execute_batch("BEGIN").unwrap();
    conn.query_row("SELECT count(*) FROM checkpoint", [], |row| row.get::<_, i64>(0)).unwrap();
}

/// Reads through two connections, of which one is always in the middle of a read from when `begun` is sent.
fn read_until(stop: &AtomicBool, store: &Path, begun: &Sender<()>) {
    let conns = two(store);
    begin(&conns[0]);
    begun.send(()).unwrap();
    for (now, next) in [(0, 1), (1, 0)].into_iter().cycle() {
        begin(&conns[next]);
        std::thread::sleep(Duration::from_millis(1));
        conns[now].execute_batch("COMMIT").unwrap();
        if stop.load(Ordering::SeqCst) {
            return;
        }
    }
}

/// The largest size of the log while five megabytes are written beside such reads.
async fn largest_log(log_bound: u64) -> u64 {
    // Each read ends, however busy the machine is.
    let store = Opened::with(options(log_bound, Duration::from_mins(10)));
    let (stop, path) = (Arc::new(AtomicBool::new(false)), store.dir.path().join("db"));
    let mut talk = Talk::new("t");
    store.say(&mut talk, 0).await;
    let (begun, reads) = channel();
    let reading = std::thread::spawn({
        let (stop, path) = (stop.clone(), path.clone());
        move || read_until(&stop, &path, &begun)
    });
    // On a busy machine all would be written before the first read.
    reads.recv().unwrap();
    let own = two(&path);
    let mut largest = 0;
    for number in 0..50 {
        if log_bound == u64::MAX {
            // A read that began before the commit is under way when that moves the log. Those of the other thread may
            // all have begun after it, if the writer is late. With a bound, the writer would wait for this one.
            begin(&own[number % 2]);
            if number > 0 {
                own[(number + 1) % 2].execute_batch("COMMIT").unwrap();
            }
        }
        let step = talk.say(&message(number, 100_000));
        store.saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
        largest = largest.max(std::fs::metadata(path.with_file_name("db-wal")).unwrap().len());
    }
    drop(own);
    stop.store(true, Ordering::SeqCst);
    reading.join().unwrap();
    assert_eq!(all(&store.reopen(), &talk).await.len(), 51);
    assert_eq!(store.saver.check().await.unwrap(), []);
    largest
}

#[tokio::test]
async fn the_log_is_bounded_beside_reads_that_always_overlap() {
    let (bounded, unbounded) = (largest_log(BOUND).await, largest_log(u64::MAX).await);
    assert!(unbounded > 4 * BOUND, "{unbounded} bytes: the reads did not overlap");
    assert!(bounded < 2 * BOUND, "{bounded} bytes");
}

/// A read that does not end is given up, and waited for again when the log is twice as large.
#[tokio::test]
async fn a_long_read_does_not_stop_commits() {
    let store = Opened::with(options(BOUND, Duration::from_millis(20)));
    let mut talk = Talk::new("t");
    store.say(&mut talk, 0).await;
    let reader = threadkeep_pages::open(store.dir.path().join("db"), rusqlite::OpenFlags::default()).unwrap();
    reader.execute_batch("BEGIN; SELECT count(*) FROM checkpoint").unwrap();
    let count =
        || reader.query_row("SELECT count(*) FROM checkpoint", [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(count(), 1);
    for number in 0..30 {
        let step = talk.say(&message(number, 100_000));
        store.saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    }
    assert_eq!(count(), 1, "what it reads stays as it was");
    drop(reader);
    assert_eq!(all(&store.reopen(), &talk).await.len(), 31);
}

/// What reached the disk is unknown then, but not of what was committed before.
#[tokio::test]
async fn a_log_that_cannot_be_emptied_closes_the_store_for_writing() {
    let store = Opened::with(options(0, Duration::from_millis(200)));
    let mut talk = Talk::new("t");
    store.say(&mut talk, 0).await;
    store.faults().arm(0, How::NotDone, "PRAGMA wal_checkpoint");
    store.say(&mut talk, 1).await;
    assert!(store.faults().disarm());
    let refused = store.saver.commit(talk.say(&message(2, 300))).await;
    assert!(matches!(refused, Err(threadkeep::Error::Unavailable { .. })), "{refused:?}");
    assert_eq!(all(&store.reopen(), &talk).await.len(), 2);
}

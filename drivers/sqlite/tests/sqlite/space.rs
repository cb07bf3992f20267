//! The size of a database, and returning free space.

use std::path::Path;

use rusqlite::{Connection, OpenFlags};
use threadkeep::checkpoint::{INTERRUPT_CHANNEL, Write};
use threadkeep::id::TaskId;
use threadkeep::saver::{Saver, ThreadImage};
use threadkeep::value::ChannelValue;
use threadkeep_sqlite::{Options, SqliteSaver};

use crate::common::{Talk, message};

const PAGE: u64 = threadkeep_pages::PAGE_SIZE as u64;

/// Without compression, messages take as much space as they have bytes.
fn plain() -> Options {
    Options { compression: false, ..Options::default() }
}

async fn say(saver: &SqliteSaver, talk: &mut Talk, count: usize) {
    for number in 0..count {
        let step = talk.say(&message(number, 4_000));
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    }
}

/// A database of two threads of which the larger one was deleted.
async fn freed(path: &Path) -> (SqliteSaver, Talk, ThreadImage) {
    let saver = SqliteSaver::open(path, &plain()).unwrap();
    let (mut large, mut small) = (Talk::new("large"), Talk::new("small"));
    say(&saver, &mut large, 200).await;
    say(&saver, &mut small, 20).await;
    saver.delete_thread(&large.thread).await.unwrap();
    let image = saver.read_thread(&small.thread).await.unwrap();
    (saver, small, image)
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

#[tokio::test]
async fn freed_pages_are_given_back_a_few_at_a_time_while_others_write() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let (saver, mut small, image) = freed(&path).await;
    let other = SqliteSaver::open(&path, &plain()).unwrap();
    let before = saver.file_size().await.unwrap();
    assert!(before.incremental, "new databases can give room back");
    assert!(before.free * 2 > before.bytes, "{before:?}");

    let once = saver.vacuum(4).await.unwrap();
    assert_eq!((before.bytes - once.bytes, before.free - once.free), (4 * PAGE, 4 * PAGE));
    let (mut left, mut steps) = (once, 0);
    while left.free > 0 {
        left = saver.vacuum(4).await.unwrap();
        steps += 1;
        assert!(steps < 1_000);
        // A second handle writes in between, as a running gateway does.
        if steps % 5 == 0 {
            say(&other, &mut small, 1).await;
        }
    }
    assert!(steps > 10, "{steps}");
    let now = saver.read_thread(&small.thread).await.unwrap();
    for (place, tuple) in &image.checkpoints {
        assert!(now.checkpoints[place].checkpoint == tuple.checkpoint, "{place:?} is not as it was");
    }
    other.close().await;
    saver.close().await;
    assert_eq!(length(&path), left.bytes);
    assert!(length(&path) * 2 < before.bytes);
}

/// SQLite takes 0 for all pages.
#[tokio::test]
async fn a_vacuum_of_no_pages_gives_none_back() {
    let dir = tempfile::tempdir().unwrap();
    let (saver, ..) = freed(&dir.path().join("db")).await;
    let before = saver.file_size().await.unwrap();
    assert!(before.free > 0);
    assert_eq!(saver.vacuum(0).await.unwrap(), before);
    assert_eq!(saver.vacuum(u32::MAX).await.unwrap().free, 0, "all, and no error");
}

#[tokio::test]
async fn a_database_that_cannot_give_pages_back_can_after_it_was_written_anew() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let (saver, mut small, image) = freed(&path).await;
    saver.close().await;
    // As earlier versions created databases.
    let conn = threadkeep_pages::open(&path, OpenFlags::default()).unwrap();
    conn.execute_batch("PRAGMA auto_vacuum = NONE; VACUUM;").unwrap();
    drop(conn);
    let saver = SqliteSaver::open(&path, &plain()).unwrap();
    let mut large = Talk::new("large");
    say(&saver, &mut large, 200).await;
    saver.delete_thread(&large.thread).await.unwrap();
    let before = saver.file_size().await.unwrap();
    assert!(!before.incremental && before.free > 0, "{before:?}");
    assert_eq!(saver.vacuum(1_000).await.unwrap(), before, "nothing was done");

    let after = saver.vacuum_fully().await.unwrap();
    assert!(after.incremental && after.free == 0, "{after:?}");
    assert!(after.bytes <= before.bytes - before.free + PAGE, "a page of pointers more: {after:?}");
    let now = saver.read_thread(&small.thread).await.unwrap();
    assert!(now == image, "what is stored is not as it was");
    say(&saver, &mut small, 3).await;
    saver.close().await;
    let saver = SqliteSaver::open(&path, &plain()).unwrap();
    assert!(saver.file_size().await.unwrap().incremental);
    assert_eq!(saver.read_thread(&small.thread).await.unwrap().checkpoints.len(), 23);
}

#[tokio::test]
async fn the_bytes_of_a_thread_are_those_of_its_rows() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let (saver, small, _) = freed(&path).await;
    let conn = Connection::open(&path).unwrap();
    let sum = |sql| conn.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap().cast_unsigned();
    let rows = sum("SELECT sum(length(hash) + length(body)) FROM element")
        + sum("SELECT sum(length(id) + length(body) + ifnull(length(tasks), 0)) FROM checkpoint");
    assert!(rows > 20 * 4_000);
    assert_eq!(saver.stored_bytes(&small.thread).await.unwrap(), rows);
    assert_eq!(saver.stored_bytes(&"large".into()).await.unwrap(), 0);
}

/// Others wait for a transaction of a sweep as long as for one of a thread, however many threads there are.
#[tokio::test]
async fn a_sweep_holds_no_lock_for_threads_that_are_tidy() {
    let most = async |threads: usize| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        let saver = SqliteSaver::open(&path, &plain()).unwrap();
        for number in 0..threads {
            say(&saver, &mut Talk::new(&format!("tidy {number}")), 1).await;
        }
        let mut untidy = Talk::new("untidy");
        say(&saver, &mut untidy, 1).await;
        for number in 0..2 {
            let mut row = untidy.say(&message(1, 200)).writes.remove(0);
            row.task = TaskId::from_bytes([7; 16]);
            let value = ChannelValue::from_json(&message(number, 200)).unwrap();
            row.writes = vec![Write { channel: INTERRUPT_CHANNEL.into(), value, overwrite: false }];
            saver.put_writes(&untidy.key(), &row).await.unwrap();
        }
        // What only a damaged or killed store leaves: rows of a thread and of a namespace that do not exist.
        let conn = threadkeep_pages::open(&path, OpenFlags::default()).unwrap();
        conn.execute_batch(
            "INSERT INTO element VALUES (1 << 62, x'', x''), (1 << 62 | 7, x'', x''), ((1 << 31) - 1 << 32, x'', x'');
             INSERT INTO checkpoint VALUES (1 << 61, x'', x'', NULL), (5 << 40, x'', x'', NULL);",
        )
        .unwrap();
        assert_eq!(saver.check().await.unwrap().len(), 5);
        saver.close().await;
        let saver = SqliteSaver::open(&path, &plain()).unwrap();
        saver.sweep().await.unwrap();
        let most = saver.stats().most_rows;
        assert_eq!(saver.check().await.unwrap(), []);
        assert_eq!(saver.threads(None, 999).await.unwrap().len(), threads + 1);
        most
    };
    let (few, many) = (most(20).await, most(400).await);
    assert!(few > 3 && many <= few, "{few} rows in a transaction beside 20 threads, {many} beside 400");
}

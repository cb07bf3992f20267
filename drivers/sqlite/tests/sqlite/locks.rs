//! This process keeps its locks on the database, and another SQLite program that runs at the same time destroys
//! nothing.
//!
//! On Unix, closing any descriptor of a file drops every POSIX lock that the process holds on that file. A process that
//! opens the database other than through SQLite loses its locks this way, and the next SQLite program assumes that it
//! is alone.
#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};
use threadkeep::saver::{CheckpointSelector, ListQuery, Rewrite, Saver};
use threadkeep_sqlite::{Options, SqliteSaver, copy_database};

use crate::common::{Talk, message};

const DATABASE: &str = "THREADKEEP_TEST_LOCKS_DB";
const CHILD: &str = "locks::the_other_process";

/// The locks that a process holds on a file.
fn locks(process: u32, path: &Path) -> usize {
    let inode = format!(":{}", std::fs::metadata(path).unwrap().ino());
    let table = std::fs::read_to_string("/proc/locks").unwrap();
    let held = table.lines().filter(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        fields.contains(&"POSIX")
            && fields.contains(&process.to_string().as_str())
            && fields.iter().any(|field| field.ends_with(&inode))
    });
    held.count()
}

/// Asserts that a process has the database and its shared memory locked, as every open connection to a database with a
/// log does.
#[track_caller]
fn assert_locked(process: u32, path: &Path, when: &str) {
    for end in ["", "-shm"] {
        let file = PathBuf::from(format!("{}{end}", path.display()));
        // The system's table is read in pieces and can miss a line while others take locks. A lost lock stays lost:
        // open connections do not take it again.
        let held = (0..200).any(|_| {
            let held = locks(process, &file) > 0;
            if !held {
                std::thread::sleep(Duration::from_millis(5));
            }
            held
        });
        assert!(held, "{when}: no lock on {}", file.display());
    }
}

async fn say(saver: &SqliteSaver, talk: &mut Talk, bytes: usize) {
    let step = talk.say(&message(talk.messages.len(), bytes));
    saver.commit(step.clone()).await.unwrap();
    talk.accept(&step);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_locks_outlive_every_operation() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let held = |when: &str| assert_locked(std::process::id(), &path, when);
    // One of the handles is dropped, and has the file locked while it closes it.
    let options = Options { busy_timeout: Duration::from_mins(10), ..Options::default() };
    let mut talk = Talk::new("t");

    let saver = SqliteSaver::open(&path, &options).unwrap();
    held("created");
    say(&saver, &mut talk, 300).await;
    saver.close().await;
    assert_eq!(locks(std::process::id(), &path), 0, "a closed store holds no lock");

    let saver = SqliteSaver::open(&path, &options).unwrap();
    held("opened");
    let second = SqliteSaver::open_async(&path, options.clone()).await.unwrap();
    held("opened twice");
    say(&second, &mut talk, 300).await;
    held("written to by the second");
    second.close().await;
    held("one of two is closed");
    drop(SqliteSaver::open(&path, &options).unwrap());
    held("another one is dropped");
    SqliteSaver::open(dir.path().join("missing/db"), &options).unwrap_err();

    while !trained(&path) {
        say(&saver, &mut talk, 6_000).await;
        held("a dictionary is trained");
    }
    saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    assert_eq!(saver.check().await.unwrap(), []);
    held("checked");
    let mut image = saver.read_thread(&talk.thread).await.unwrap();
    let (_, mut head) = image.checkpoints.pop_last().unwrap();
    head.parent = None;
    head.checkpoint.applied.clear();
    let prune = Rewrite { remove: image.checkpoints.into_keys().collect(), put: vec![head] };
    saver.rewrite_thread(&talk.thread, &image.revision, prune).await.unwrap();
    held("rewritten");
    saver.backup(dir.path().join("backup")).await.unwrap();
    held("backed up");
    saver.backup(dir.path().join("backup")).await.unwrap_err();
    held("not backed up");
    saver.sweep().await.unwrap();
    held("swept");
    saver.vacuum(10).await.unwrap();
    held("vacuumed");
    saver.vacuum_fully().await.unwrap();
    held("written without free pages");
    saver.file_size().await.unwrap();
    saver.stored_bytes(&talk.thread).await.unwrap();
    saver.delete_thread(&talk.thread).await.unwrap();
    saver.flush(&talk.thread).await.unwrap();
    held("a thread is deleted");
}

/// SQLite counts in milliseconds of an `i32`, and rusqlite panics above that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_may_wait_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let (path, copy) = (dir.path().join("db"), dir.path().join("copy"));
    let options = Options { busy_timeout: Duration::MAX, ..Options::default() };
    let mut talk = Talk::new("t");
    for _ in 0..2 {
        let saver = SqliteSaver::open(&path, &options).unwrap();
        say(&saver, &mut talk, 300).await;
        saver.close().await;
    }
    let saver = SqliteSaver::open(&path, &options).unwrap();
    saver.backup(&copy).await.unwrap();
    copy_database(&path, &dir.path().join("another"), Duration::MAX).await.unwrap().keep().unwrap();
    assert_eq!(saver.check().await.unwrap(), []);
    let restored = SqliteSaver::open(&copy, &options).unwrap();
    let head = CheckpointSelector::head(&talk.thread);
    assert_eq!(restored.get(&head).await.unwrap(), saver.get(&head).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_closed_during_a_training_holds_no_lock() {
    /// The bytes of elements from which on a store looks whether there is enough.
    const LOOK: u64 = 128 * 1024;
    let dir = tempfile::tempdir().unwrap();
    for n in 0..8 {
        let path = dir.path().join(n.to_string());
        let saver = SqliteSaver::open(&path, &Options::default()).unwrap();
        let mut talk = Talk::new("t");
        // The last one makes it enough for a look, on a thread of its own, which has just begun.
        while saver.stats().bytes_stored < LOOK {
            say(&saver, &mut talk, 6_000).await;
        }
        saver.close().await;
        assert_eq!(locks(std::process::id(), &path), 0, "{n}");
    }
}

/// Reads through SQLite: this process must not open the file in any other way.
fn trained(path: &Path) -> bool {
    let conn = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
    conn.query_row("SELECT count(*) FROM dictionary", [], |row| row.get::<_, i64>(0)).unwrap() > 0
}

#[tokio::test]
async fn a_file_of_an_older_format_is_locked_too() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    // Pages without space for checksums, as the first versions created them.
    let plain = Connection::open(&path).unwrap();
    plain.execute_batch("PRAGMA page_size = 16384; VACUUM").unwrap();
    drop(plain);
    for when in ["migrated", "opened again"] {
        let saver = SqliteSaver::open(&path, &Options::default()).unwrap();
        assert_locked(std::process::id(), &path, when);
        saver.close().await;
    }
}

/// The process of the next test that has the store open: commits for ever, and prints what was acknowledged.
#[tokio::test]
async fn the_other_process() {
    let Ok(path) = std::env::var(DATABASE) else { return };
    let saver = SqliteSaver::open(&path, &Options::default()).unwrap();
    let mut talk = Talk::new("t");
    let head = saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap();
    talk.resume(&head.expect("the thread is there"));
    loop {
        say(&saver, &mut talk, 300).await;
        let mut out = std::io::stdout().lock();
        writeln!(out, "ack {}", talk.messages.len()).unwrap();
        out.flush().unwrap();
    }
}

/// A process that serves a store.
struct Serving {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Serving {
    fn start(path: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([CHILD, "--exact", "--nocapture"])
            .env(DATABASE, path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// The length of the thread at the next commit that is acknowledged.
    fn acknowledged(&mut self) -> usize {
        loop {
            let line = self.lines.next().expect("the child ended by itself").unwrap();
            if let Some(count) = line.strip_prefix("ack ") {
                return count.parse().unwrap();
            }
        }
    }

    /// Kills it; returns the last length that it acknowledged.
    fn kill(mut self) -> usize {
        self.child.kill().unwrap();
        let rest = self.lines.map_while(Result::ok);
        let last = rest.filter_map(|line| line.strip_prefix("ack ")?.parse().ok()).last();
        assert!(!self.child.wait().unwrap().success());
        last.unwrap_or_default()
    }
}

#[tokio::test]
async fn another_sqlite_program_beside_a_store_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let log = dir.path().join("db-wal");
    let saver = SqliteSaver::open(&path, &Options::default()).unwrap();
    say(&saver, &mut Talk::new("t"), 300).await;
    saver.close().await;
    for _ in 0..3 {
        let mut serving = Serving::start(&path);
        let mut acknowledged = serving.acknowledged();
        assert_locked(serving.child.id(), &path, "in the other process");
        let before = std::fs::metadata(&log).unwrap().ino();
        for _ in 0..10 {
            // As `sqlite3 db 'SELECT ...'` does: it opens, reads, and cleans up if it was the last.
            let plain = Connection::open(&path).unwrap();
            plain.query_row("SELECT count(*) FROM checkpoint", [], |_| Ok(())).unwrap();
            drop(plain);
            acknowledged = serving.acknowledged();
            assert_eq!(std::fs::metadata(&log).unwrap().ino(), before, "the log was deleted");
        }
        acknowledged = serving.kill().max(acknowledged);
        let saver = SqliteSaver::open(&path, &Options::default()).unwrap();
        let stored = saver.list(&ListQuery::new(&"t".into())).await.unwrap().len();
        assert!(stored >= acknowledged, "{stored} checkpoints are left of {acknowledged}");
        assert_eq!(saver.check().await.unwrap(), []);
        saver.close().await;
    }
}

//! Commits that wait for a flush: what a server crash loses of them, and the cost of a flush.

use threadkeep::Error;
use threadkeep::saver::{CheckpointSelector, Flush, Rewrite, Saver, StepCommit};
use threadkeep_postgres::{PostgresSaver, setup};
use threadkeep_testing::{PgBouncer, Postgres};

use crate::common::damage::connect;
use crate::common::proxy::Proxy;
use crate::common::talk::{Talk, note, texts};
use crate::common::{database, open, patient};

/// A thread, and the numbers of the notes in it.
struct Thread {
    talk: Talk,
    said: Vec<usize>,
}

impl Thread {
    async fn say(&mut self, saver: &PostgresSaver, n: usize, flush: Flush) -> StepCommit {
        let step = StepCommit { flush, ..self.talk.say(&note(n)) };
        saver.commit(step.clone()).await.unwrap();
        self.talk.accept(&step);
        self.said.push(n);
        step
    }

    /// The number of notes that are left; fails unless they are the first ones, each in a checkpoint of its own.
    async fn left(&self, saver: &PostgresSaver) -> usize {
        let head = saver.get(&CheckpointSelector::head(&self.talk.thread)).await.unwrap().unwrap();
        let found = texts(&head);
        let text = |n: &usize| note(*n)["content"].as_str().unwrap().to_owned();
        let expected: Vec<_> = self.said.iter().take(found.len()).map(text).collect();
        assert_eq!(found, expected);
        let chain = saver.read_thread(&self.talk.thread).await.unwrap().checkpoints;
        assert_eq!(chain.len(), found.len());
        found.len()
    }
}

/// The end of the server's log, and up to where it is on disk.
async fn log(url: &str) -> (i64, i64) {
    let query = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint,
                        pg_wal_lsn_diff(pg_current_wal_flush_lsn(), '0/0')::bigint";
    let row = connect(url).await.query_one(query, &[]).await.unwrap();
    (row.get(0), row.get(1))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_the_server_takes_only_what_came_after_the_last_flush() {
    takes_only_what_came_after_the_last_flush(false).await;
}

/// The flush asks for it in each transaction, not in a session that a pooler may exchange.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_the_server_behind_a_pooler_takes_only_what_came_after_the_last_flush() {
    takes_only_what_came_after_the_last_flush(true).await;
}

async fn takes_only_what_came_after_the_last_flush(pooled: bool) {
    let server = Postgres::start().unwrap();
    let database = server.database().await.unwrap();
    setup(database.url(), &patient()).await.unwrap();
    // Otherwise the server flushes the log by itself, five times a second.
    let admin = connect(database.url()).await;
    admin.batch_execute("ALTER SYSTEM SET wal_writer_delay = '10s'").await.unwrap();
    admin.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    drop(admin);
    let pooler = pooled.then(|| PgBouncer::start(&server).unwrap());
    let url = pooler.as_ref().map_or_else(|| database.url().to_owned(), |pooler| pooler.url(&database));
    let (saver, other) = (open(&url).await, open(&url).await);
    let (mut fresh, mut lost) = (0.., 0);
    let mut thread = Thread { talk: Talk::new("t"), said: Vec::new() };
    for round in 0..6 {
        thread.say(&saver, fresh.next().unwrap(), Flush::WithNext).await;
        thread.say(&saver, fresh.next().unwrap(), Flush::WithNext).await;
        let flush = if round % 3 == 0 { Flush::Now } else { Flush::WithNext };
        let step = thread.say(&saver, fresh.next().unwrap(), flush).await;
        match round % 3 {
            1 => saver.flush(&thread.talk.thread).await.unwrap(),
            // The same commit again, by another saver and for sure.
            2 => drop(other.commit(StepCommit { flush: Flush::Now, ..step }).await.unwrap()),
            _ => {}
        }
        let flushed = thread.said.len();
        for writer in [&saver, &other, &saver] {
            thread.say(writer, fresh.next().unwrap(), Flush::WithNext).await;
        }
        tokio::task::block_in_place(|| {
            server.crash().unwrap();
            server.resume().unwrap();
        });
        let left = thread.left(&saver).await;
        assert!(left >= flushed, "{left} notes are left of {flushed} that were flushed");
        if left < thread.said.len() {
            let next = StepCommit { flush: Flush::WithNext, ..thread.talk.say(&note(999)) };
            let refused = saver.commit(next).await;
            assert!(matches!(refused, Err(Error::Conflict { .. })), "{refused:?}");
        }
        let head = saver.get(&CheckpointSelector::head(&thread.talk.thread)).await.unwrap().unwrap();
        thread.talk.resume(&head);
        let gone = thread.said.split_off(left);
        lost += gone.len();
        // Both savers know what is gone. Something else takes its place, then it is committed again.
        thread.say(&other, fresh.next().unwrap(), Flush::Now).await;
        for (n, writer) in gone.into_iter().zip([&saver, &other, &saver]) {
            thread.say(writer, n, Flush::Now).await;
            assert_eq!(thread.left(&other).await, thread.said.len());
        }
    }
    assert!(lost > 0, "six crashes took nothing: the commits that wait for a flush were flushed");
}

/// An administrator turned `synchronous_commit` off for the whole server: what asks for a flush is flushed all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_does_not_flush_by_default_flushes_what_asks_for_it() {
    let server = Postgres::start().unwrap();
    let database = server.database().await.unwrap();
    setup(database.url(), &patient()).await.unwrap();
    let admin = connect(database.url()).await;
    admin.batch_execute("ALTER SYSTEM SET wal_writer_delay = '10s'").await.unwrap();
    admin.batch_execute("ALTER SYSTEM SET synchronous_commit = off").await.unwrap();
    admin.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    let off = "SHOW synchronous_commit";
    while connect(database.url()).await.query_one(off, &[]).await.unwrap().get::<_, String>(0) != "off" {
        tokio::task::yield_now().await;
    }
    drop(admin);
    let crash = || {
        tokio::task::block_in_place(|| {
            server.crash().unwrap();
            server.resume().unwrap();
        });
    };
    let (saver, cold) = (open(database.url()).await, open(database.url()).await);
    let mut thread = Thread { talk: Talk::new("t"), said: Vec::new() };
    // First, warm, cold, and flushed afterwards.
    for (n, writer) in [&saver, &saver, &cold, &saver].into_iter().enumerate() {
        if n == 3 {
            thread.say(writer, n, Flush::WithNext).await;
            writer.flush(&thread.talk.thread).await.unwrap();
        } else {
            thread.say(writer, n, Flush::Now).await;
        }
        crash();
        assert_eq!(thread.left(&saver).await, n + 1);
    }
    let task = thread.talk.task(thread.talk.messages.last().unwrap());
    saver.put_writes(&thread.talk.key(), &task).await.unwrap();
    crash();
    let image = saver.read_thread(&thread.talk.thread).await.unwrap();
    let (last, tuple) = image.checkpoints.last_key_value().unwrap();
    assert_eq!(tuple.writes, [task]);
    let remove = [last.clone()].into();
    saver
        .rewrite_thread(&thread.talk.thread, &image.revision, Rewrite { remove, put: vec![] })
        .await
        .unwrap();
    crash();
    assert_eq!(saver.read_thread(&thread.talk.thread).await.unwrap().checkpoints.len(), 3);
    saver.delete_thread(&thread.talk.thread).await.unwrap();
    crash();
    assert_eq!(saver.threads(None, 10).await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_waits_for_a_flush_is_one_request_and_so_is_the_flush() {
    let database = database().await;
    let proxy = Proxy::before(database.url()).await;
    let saver = open(proxy.url()).await;
    // Prepares the calls.
    let mut another = Thread { talk: Talk::new("another"), said: Vec::new() };
    for n in 0..2 {
        another.say(&saver, n, Flush::Now).await;
    }
    let mut thread = Thread { talk: Talk::new("t"), said: Vec::new() };
    for n in 0..10 {
        let before = proxy.requests();
        thread.say(&saver, n, if n % 3 == 0 { Flush::Now } else { Flush::WithNext }).await;
        assert_eq!(proxy.requests() - before, 1, "step {n}");
    }
    let (before, (end, _)) = (proxy.requests(), log(database.url()).await);
    saver.flush(&thread.talk.thread).await.unwrap();
    assert_eq!(proxy.requests() - before, 1);
    assert!(log(database.url()).await.1 >= end, "what was committed is on the disk");
    assert_eq!(thread.left(&saver).await, 10);
}

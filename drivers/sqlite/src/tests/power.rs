//! What a power loss leaves: everything flushed, and any sectors of the rest of the log.

use std::path::Path;
use std::time::Duration;

use futures::FutureExt;
use threadkeep::Error;
use threadkeep::id::CheckpointId;
use threadkeep::saver::{Flush, Saver, StepCommit};

use super::common::{Talk, message};
use super::statements::{Opened, all};
use crate::{Options, SqliteSaver, Synchronous};

const SECTOR: usize = 512;
/// The values of `PRAGMA synchronous`.
const NORMAL: u8 = 1;
const FULL: u8 = 2;

/// A store whose log is watched.
struct Watched {
    store: Opened,
    talk: Talk,
    /// The log up to here is on disk.
    flushed: usize,
    /// The acknowledged checkpoints, and how many of them are on disk.
    known: Vec<CheckpointId>,
    durable: usize,
}

impl Watched {
    fn new(options: Options) -> Self {
        Self { store: Opened::with(options), talk: Talk::new("t"), flushed: 0, known: vec![], durable: 0 }
    }

    fn log(&self) -> Vec<u8> {
        std::fs::read(self.store.dir.path().join("db-wal")).unwrap()
    }

    /// Notes what the transactions since the last call did to the log. One that wrote nothing flushed nothing.
    fn settle(&mut self, before: usize) {
        let grown = self.log().len();
        if self.store.faults().commits().contains(&FULL) && grown > before {
            self.flushed = grown;
        }
    }

    async fn say(&mut self, flush: Flush) {
        let before = if self.known.is_empty() { 0 } else { self.log().len() };
        let step = StepCommit { flush, ..self.talk.say(&message(self.known.len(), 700)) };
        self.store.saver.commit(step.clone()).await.unwrap();
        self.talk.accept(&step);
        self.known.push(step.checkpoint.id);
        if flush == Flush::Now {
            self.durable = self.known.len();
        }
        self.settle(before);
    }

    async fn flush(&mut self) {
        let before = self.log().len();
        self.store.saver.flush(&self.talk.thread).await.unwrap();
        self.durable = self.known.len();
        self.settle(before);
    }

    /// Checks what is left if the power is lost now; returns the number of checkpoints. `choices` selects the sectors
    /// that did not reach the disk.
    async fn lose_power(&self, choices: &mut u64) -> usize {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        std::fs::copy(self.store.dir.path().join("db"), &path).unwrap();
        let mut log = self.log();
        for sector in log[self.flushed..].chunks_mut(SECTOR) {
            *choices =
                choices.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            match *choices >> 61 {
                0 => sector.fill(0),
                1 => sector.fill(0xa5),
                _ => {}
            }
        }
        std::fs::write(dir.path().join("db-wal"), log).unwrap();
        let left = self.whole(&path).await;
        assert!(left >= self.durable, "{left} checkpoints are left of {} that were flushed", self.durable);
        left
    }

    /// Checks that a database is intact and has the first checkpoints of the thread; returns how many.
    async fn whole(&self, path: &Path) -> usize {
        let saver = SqliteSaver::open(path, &Options::default()).unwrap();
        let found = all(&saver, &self.talk).await;
        let ids: Vec<_> = found.iter().rev().map(|tuple| tuple.checkpoint.id).collect();
        assert_eq!(ids, self.known[..ids.len()], "what is left is what came first");
        for (tuple, count) in found.iter().rev().zip(1..) {
            let list = tuple.checkpoint.channels["messages"].stored.value().unwrap();
            assert_eq!(list.as_list().unwrap().len(), count);
        }
        assert_eq!(saver.check().await.unwrap(), [], "nothing half is left");
        saver.close().await;
        ids.len()
    }
}

#[tokio::test]
async fn what_the_power_takes_is_what_came_after_the_last_flush() {
    let mut choices = 7;
    let mut watched = Watched::new(Options::default());
    let (mut lost, mut turns) = (0, 0);
    for turn in 0..6 {
        for flush in
            [Flush::WithNext, Flush::WithNext, if turn % 2 == 0 { Flush::Now } else { Flush::WithNext }]
        {
            watched.say(flush).await;
            for _ in 0..3 {
                lost += usize::from(watched.lose_power(&mut choices).await < watched.known.len());
            }
        }
        if turn % 2 == 1 {
            watched.flush().await;
        }
        assert_eq!(watched.lose_power(&mut choices).await, watched.known.len(), "turn {turn} is flushed");
        turns += 1;
    }
    assert!(lost > turns, "steps that wait for a flush can be lost: {lost}");
    let flushes = watched.store.saver.stats().flushes;
    assert_eq!(flushes, turns as u64, "one flush a turn");
}

#[tokio::test]
async fn every_write_but_a_commit_that_may_wait_flushes_what_came_before() {
    let mut watched = Watched::new(Options::default());
    for what in 0..4 {
        watched.say(Flush::WithNext).await;
        assert!(watched.store.faults().commits().is_empty(), "settled");
        let before = watched.log().len();
        let (saver, talk) = (&watched.store.saver, &watched.talk);
        match what {
            0 => {
                let task = talk.say(&message(90, 30)).writes.remove(0);
                saver.put_writes(&talk.key(), &task).await.unwrap();
            }
            1 => saver.delete_thread(&"unknown".into()).await.unwrap(),
            // The same commit again, now for sure.
            2 => {
                let mut again = talk.empty();
                again.checkpoint.id = talk.key().id;
                (again.parent, again.expected_head) = (None, None);
                again.checkpoint.channels.clear();
                saver.commit(again).await.unwrap();
            }
            _ => saver.flush(&"unknown".into()).await.unwrap(),
        }
        watched.durable = watched.known.len();
        watched.settle(before);
        assert_eq!(watched.lose_power(&mut 3).await, watched.known.len(), "after call {what}");
    }
}

#[tokio::test]
async fn a_commit_that_needs_a_flush_gets_it_in_a_group_that_needs_none() {
    let store = Opened::new();
    let mut talks: Vec<_> = (0..6).map(|i| Talk::new(&format!("t{i}"))).collect();
    for talk in &mut talks {
        let step = talk.say(&message(0, 300));
        store.saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    }
    store.faults().commits();
    let lock = rusqlite::Connection::open(store.dir.path().join("db")).unwrap();
    lock.execute_batch("BEGIN IMMEDIATE").unwrap();
    let flushes =
        [Flush::WithNext, Flush::WithNext, Flush::Now, Flush::WithNext, Flush::Now, Flush::WithNext];
    let steps = talks.iter().zip(flushes);
    let mut waiting: Vec<_> = steps
        .map(|(talk, flush)| store.saver.commit(StepCommit { flush, ..talk.say(&message(1, 300)) }))
        .collect();
    for future in &mut waiting {
        assert!(future.now_or_never().is_none(), "the lock is held");
    }
    lock.execute_batch("ROLLBACK").unwrap();
    for result in futures::future::join_all(waiting).await {
        result.unwrap();
    }
    // The earlier ones need no flush and get none; the others are flushed together.
    assert_eq!(store.faults().commits(), [NORMAL, FULL]);
}

#[tokio::test]
async fn the_log_does_not_grow_for_ever_though_nobody_asks_for_a_flush() {
    // A dictionary that is trained is flushed, too.
    let mut watched = Watched::new(Options { compression: false, ..Options::default() });
    for _ in 0..600 {
        watched.say(Flush::WithNext).await;
    }
    assert_eq!(watched.store.saver.stats().flushes, 2);
}

#[tokio::test]
async fn a_store_that_never_flushes_is_not_made_to() {
    let mut watched = Watched::new(Options { synchronous: Synchronous::Normal, ..Options::default() });
    for flush in [Flush::WithNext, Flush::Now, Flush::WithNext] {
        watched.say(flush).await;
    }
    watched.store.saver.flush(&watched.talk.thread).await.unwrap();
    assert_eq!(watched.store.saver.stats().flushes, 0);
    assert_eq!(watched.store.faults().commits(), [NORMAL], "of the flush");
}

#[tokio::test]
async fn a_store_that_cannot_be_told_to_flush_acknowledges_nothing() {
    let mut watched = Watched::new(Options { busy_timeout: Duration::from_millis(20), ..Options::default() });
    watched.say(Flush::Now).await;
    watched.say(Flush::WithNext).await;
    for how in [super::faults::How::NotDone, super::faults::How::Done] {
        watched.store.faults().arm(0, how, "PRAGMA synchronous");
        let error = watched.store.saver.flush(&watched.talk.thread).await.unwrap_err();
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        assert!(watched.store.faults().disarm());
    }
    let before = watched.log().len();
    watched.store.saver.flush(&watched.talk.thread).await.unwrap();
    watched.durable = watched.known.len();
    watched.settle(before);
    assert_eq!(watched.lose_power(&mut 11).await, 2);
}

//! Commits that their caller carries out in place: when that happens, and that it changes nothing but the time it takes.
//! The future of a multi-threaded runtime's `block_on` is not on a worker, so these tests commit in place.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{join, join_all};
use threadkeep::Error;
use threadkeep::saver::{Flush, Saver, StepCommit};

use super::common::{Talk, message};
use super::faults::How;
use super::statements::{Opened, all};
use crate::error::{FULL, LOCKED, POISONED};
use crate::{Options, SqliteSaver};

/// Commits that were carried out in place, so far.
fn in_place(store: &Opened) -> u64 {
    store.saver.stats().in_place
}

async fn two(store: &Opened, talk: &mut Talk) {
    for number in 0..2 {
        store.say(talk, number).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_caller_that_is_alone_commits_in_place() {
    let store = Opened::new();
    let (mut talk, mut other) = (Talk::new("t"), Talk::new("other"));
    for number in 0..10 {
        store.say(&mut talk, number).await;
        assert_eq!(in_place(&store), number as u64, "each but the first");
    }
    // Another thread's commit shows that there are others.
    store.say(&mut other, 0).await;
    store.say(&mut talk, 10).await;
    assert_eq!(in_place(&store), 9);
    store.say(&mut talk, 11).await;
    assert_eq!(in_place(&store), 10);
    // Neither does a commit of another namespace, or one after the writes of a task, go on from the last commit.
    let mut inner = Talk::new("t");
    inner.namespace = "inner".into();
    store.say(&mut inner, 0).await;
    let mut step = talk.say(&message(12, 300));
    store.saver.put_writes(&talk.key(), &step.writes.remove(0)).await.unwrap();
    store.saver.commit(step.clone()).await.unwrap();
    talk.accept(&step);
    assert_eq!(in_place(&store), 10);
    // Nor does one from an older head.
    let stale = talk.say(&message(13, 300));
    store.say(&mut talk, 14).await;
    assert!(matches!(store.saver.commit(stale).await, Err(Error::Conflict { .. })));
    assert_eq!(in_place(&store), 11);
    assert_eq!(all(&store.reopen(), &talk).await.len(), 15);
    let stats = store.saver.stats();
    assert_eq!((stats.transactions, stats.committed), (stats.flushes + 1, stats.transactions));
}

#[test]
fn a_runtime_with_one_thread_and_workers_leave_the_work_to_the_thread() {
    let store = Arc::new(Opened::new());
    let talk = async |name: &str, store: &Opened| {
        let mut talk = Talk::new(name);
        for number in 0..5 {
            store.say(&mut talk, number).await;
        }
    };
    let single = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    single.block_on(talk("single", &store));
    let local = tokio::task::LocalSet::new();
    local.block_on(&single, talk("local", &store));
    let multi = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let shared = store.clone();
    multi.block_on(async { tokio::spawn(async move { talk("task", &shared).await }).await.unwrap() });
    assert_eq!(in_place(&store), 0);
    // Without a runtime, on a thread of its own.
    futures::executor::block_on(talk("none", &store));
    assert_eq!(in_place(&store), 4);
    local.block_on(&multi, talk("a local task of many threads", &store));
    assert_eq!(in_place(&store), 8);
}

/// A commit is carried out in its first poll. If its future is dropped afterwards, it has happened, like one that the
/// thread carries out.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_future_dropped_at_its_await_has_committed_and_one_never_polled_has_not() {
    let store = Opened::new();
    let mut talk = Talk::new("t");
    two(&store, &mut talk).await;
    let never = talk.say(&message(2, 300));
    drop(store.saver.commit(never));
    let before = in_place(&store);
    let step = talk.say(&message(3, 300));
    let mut future = Box::pin(store.saver.commit(step.clone()));
    assert!(future.as_mut().now_or_never().is_none(), "it lets others go first before it answers");
    assert_eq!(in_place(&store), before + 1);
    drop(future);
    talk.accept(&step);
    store.say(&mut talk, 4).await;
    assert_eq!(all(&store.saver, &talk).await.len(), 4);
}

/// A loop of commits in place, and something else in the same task: both get their turns.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_shares_the_task_is_polled_between_two_commits() {
    let store = Opened::new();
    let mut talk = Talk::new("t");
    two(&store, &mut talk).await;
    let (done, mut turns) = (AtomicBool::new(false), 0);
    let commits = async {
        for number in 2..22 {
            store.say(&mut talk, number).await;
        }
        done.store(true, Ordering::Relaxed);
    };
    let beside = async {
        while !done.load(Ordering::Relaxed) {
            turns += 1;
            tokio::task::yield_now().await;
        }
    };
    join(commits, beside).await;
    assert!(turns >= 20, "{turns}");
    assert_eq!(in_place(&store), 21);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn commits_of_one_task_that_are_made_together_share_a_flush() {
    let store = Opened::new();
    let mut talks: Vec<_> = (0..8).map(|i| Talk::new(&format!("t{i}"))).collect();
    for talk in &mut talks {
        store.say(talk, 0).await;
    }
    store.say(&mut talks[0], 1).await;
    let before = store.saver.stats();
    let lock = store.lock();
    let mut steps: Vec<_> = talks.iter().map(|talk| store.saver.commit(talk.say(&message(2, 300)))).collect();
    for step in &mut steps {
        assert!(step.now_or_never().is_none(), "the lock is held");
    }
    drop(lock);
    for done in join_all(steps).await {
        done.unwrap();
    }
    let after = store.saver.stats();
    assert_eq!((after.in_place, after.flushes), (before.in_place, before.flushes + 1));
}

/// With another program's lock on the database, a commit in place waits as long as any other, and its task does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_lock_is_waited_for_by_the_thread() {
    let store = Opened::with(Options { busy_timeout: Duration::from_millis(300), ..Options::default() });
    let mut talk = Talk::new("t");
    two(&store, &mut talk).await;
    let before = in_place(&store);
    let lock = store.lock();
    let step = talk.say(&message(2, 300));
    let error = store.saver.commit(step.clone()).await.unwrap_err();
    assert!(matches!(&error, Error::Unavailable { reason, .. } if reason.contains(LOCKED)), "{error}");
    assert_eq!(store.saver.stats().transactions, 2);
    drop(lock);
    store.saver.commit(step.clone()).await.unwrap();
    talk.accept(&step);
    store.say(&mut talk, 3).await;
    assert_eq!(in_place(&store), before + 1);

    // A patient one: on a busy machine the thread could give up before the task looks.
    let store = Opened::new();
    let mut talk = Talk::new("t");
    two(&store, &mut talk).await;
    let lock = store.lock();
    let step = talk.say(&message(2, 300));
    let mut commit = Box::pin(store.saver.commit(step));
    assert!(commit.as_mut().now_or_never().is_none(), "the lock is held");
    assert_eq!(store.saver.stats().transactions, 2);
    drop(lock);
    commit.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_failed_flush_in_place_is_in_doubt_and_refuses_what_follows_on_every_way() {
    for how in [How::NotDone, How::Done] {
        let store = Opened::new();
        let (mut talk, other) = (Talk::new("t"), Talk::new("other"));
        two(&store, &mut talk).await;
        let step = talk.say(&message(2, 300));
        store.faults().arm(0, how, "COMMIT");
        let error = store.saver.commit(step.clone()).await.unwrap_err();
        assert!(matches!(error, Error::InDoubt { .. }), "{error}");
        assert!(store.faults().disarm());
        for closed in [false, true] {
            let error = store.saver.commit(step.clone()).await.unwrap_err();
            assert!(matches!(&error, Error::InDoubt { .. }), "{error}");
            for never in [talk.say(&message(3, 300)), other.say(&message(0, 300))] {
                let error = store.saver.commit(never).await.unwrap_err();
                assert!(matches!(&error, Error::Unavailable { .. }), "{error}");
                assert!(closed || error.to_string().contains(POISONED), "{error}");
            }
            store.saver.close().await;
        }
        let reopened = store.reopen();
        assert_eq!(all(&reopened, &talk).await.len(), if how == How::Done { 3 } else { 2 });
        reopened.commit(step).await.unwrap();
        assert_eq!(all(&reopened, &talk).await.len(), 3);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_commit_in_place_without_room_is_in_doubt_until_it_is_repeated() {
    let store = Opened::new();
    let mut talk = Talk::new("t");
    two(&store, &mut talk).await;
    let step = talk.say(&message(2, 300));
    store.faults().arm(0, How::NoRoom, "COMMIT");
    let error = store.saver.commit(step.clone()).await.unwrap_err();
    assert!(matches!(&error, Error::InDoubt { reason, .. } if reason.contains(FULL)), "{error}");
    store.saver.commit(step.clone()).await.unwrap();
    talk.accept(&step);
    store.say(&mut talk, 3).await;
    assert_eq!(all(&store.reopen(), &talk).await.len(), 4);
}

/// Each commit says for itself whether it waits for the disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn commits_in_place_flush_when_they_ask_for_it() {
    let store = Opened::new();
    let mut talk = Talk::new("t");
    two(&store, &mut talk).await;
    store.faults().commits();
    for flush in [Flush::WithNext, Flush::WithNext, Flush::Now, Flush::WithNext] {
        let step = StepCommit { flush, ..talk.say(&message(2, 300)) };
        store.saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    }
    store.saver.flush(&talk.thread).await.unwrap();
    assert_eq!(store.faults().commits(), [1, 1, 2, 1, 2], "the last is the flush that was asked for");
    assert_eq!(in_place(&store), 5);
}

/// Eight writers on threads of their own, each of which may commit in place: all of them finish, and nothing is lost.
#[test]
fn writers_that_all_may_commit_in_place_share_the_writer() {
    const STEPS: usize = 40;
    let store = Arc::new(Opened::new());
    let together = Arc::new(std::sync::Barrier::new(8));
    let writers = (0..8).map(|i| {
        let (store, together) = (store.clone(), together.clone());
        std::thread::spawn(move || {
            let mut talk = Talk::new(&format!("t{i}"));
            together.wait();
            for number in 0..STEPS {
                futures::executor::block_on(store.say(&mut talk, number));
            }
            talk
        })
    });
    let writers: Vec<_> = writers.collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for writer in writers {
        let talk = writer.join().unwrap();
        assert_eq!(runtime.block_on(all(&store.saver, &talk)).len(), STEPS);
    }
    let stats = store.saver.stats();
    assert_eq!(stats.committed, 8 * STEPS as u64);
    assert!(stats.in_place <= stats.transactions && stats.flushes == stats.transactions, "{stats:?}");
}

/// A writer that goes on in place does not get in again while the thread has something to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_thread_comes_before_a_caller_that_goes_on() {
    let store = Opened::new();
    let mut talk = Talk::new("t");
    two(&store, &mut talk).await;
    let before = in_place(&store);
    store.saver.writer.wants();
    store.say(&mut talk, 2).await;
    assert_eq!(in_place(&store), before);
    // The thread was given it, and is done.
    store.say(&mut talk, 3).await;
    assert_eq!(in_place(&store), before + 1);
}

/// A panic in the middle of a transaction must leave nothing that goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_panic_in_place_ends_the_writer_and_keeps_what_was_acknowledged() {
    let store = Opened::new();
    let mut talk = Talk::new("t");
    two(&store, &mut talk).await;
    let step = talk.say(&message(2, 300));
    store.faults().arm(1, How::Panic, "INSERT");
    let commit = std::panic::AssertUnwindSafe(store.saver.commit(step.clone())).catch_unwind();
    commit.await.unwrap_err();
    let error = store.saver.commit(step.clone()).await.unwrap_err();
    assert!(matches!(error, Error::InDoubt { .. } | Error::Unavailable { .. }), "{error}");
    store.saver.close().await;
    drop(store.saver);
    let reopened = SqliteSaver::open(store.dir.path().join("db"), &Options::default()).unwrap();
    assert_eq!(all(&reopened, &talk).await.len(), 2);
    reopened.commit(step).await.unwrap();
}

//! Commits whose outcome only the file knows: nothing is written until it is known.

use std::time::Duration;

use futures::FutureExt;
use threadkeep::Error;
use threadkeep::saver::{Rewrite, Saver};

use super::common::{Talk, message};
use super::faults::How;
use super::statements::{Opened, all};
use crate::Options;
use crate::error::{CLOSED, FULL, LOCKED, POISONED};

/// Only the file knows the outcome of a failed COMMIT; until it is reopened nothing is written.
#[tokio::test]
async fn a_failed_commit_is_in_doubt_and_the_store_refuses_work_until_it_is_reopened() {
    for how in [How::NotDone, How::Done] {
        let store = Opened::new();
        let mut talk = Talk::new("t");
        store.say(&mut talk, 0).await;
        let step = talk.say(&message(1, 300));
        store.faults().arm(0, how, "COMMIT");
        let error = store.saver.commit(step.clone()).await.unwrap_err();
        assert!(matches!(error, Error::InDoubt { .. }), "{error}");
        // What was in doubt stays in doubt, even after the store is closed; what was never tried is known not to be
        // stored.
        for closed in [false, true] {
            let error = store.saver.commit(step.clone()).await.unwrap_err();
            assert!(matches!(&error, Error::InDoubt { .. }), "{error}");
            let error = store.saver.commit(talk.say(&message(2, 300))).await.unwrap_err();
            assert!(matches!(&error, Error::Unavailable { .. }), "{error}");
            if !closed {
                assert!(error.to_string().contains(POISONED), "{error}");
                store.saver.close().await;
            }
        }

        let reopened = store.reopen();
        let count = all(&reopened, &talk).await.len();
        assert_eq!(count, if how == How::Done { 2 } else { 1 });
        reopened.commit(step).await.unwrap();
        assert_eq!(all(&reopened, &talk).await.len(), 2, "repeating it is safe whatever happened");
    }
}

/// It is not begun: only what was in doubt before is still in doubt.
#[tokio::test]
async fn what_comes_while_the_store_is_being_closed_is_refused() {
    let store = Opened::new();
    let mut talk = Talk::new("t");
    store.say(&mut talk, 0).await;
    store.faults().arm(0, How::NotDone, "COMMIT");
    let doubtful = talk.say(&message(1, 300));
    let failed = store.saver.commit(doubtful.clone()).await;
    assert!(matches!(failed, Err(Error::InDoubt { .. })), "{failed:?}");

    let mut closing = Box::pin(store.saver.close());
    let mut repeated = Box::pin(store.saver.commit(doubtful));
    let mut new = Box::pin(store.saver.commit(talk.say(&message(2, 300))));
    let mut vacuum = Box::pin(store.saver.vacuum(1));
    {
        // The thread takes the order to close, and waits for the writer.
        let _held = store.saver.writer.held();
        assert!(closing.as_mut().now_or_never().is_none());
        assert!(repeated.as_mut().now_or_never().is_none());
        assert!(new.as_mut().now_or_never().is_none());
        assert!(vacuum.as_mut().now_or_never().is_none());
    }
    let error = repeated.await.unwrap_err();
    assert!(matches!(error, Error::InDoubt { .. }), "{error}");
    for error in [new.await.unwrap_err(), vacuum.await.unwrap_err()] {
        assert!(matches!(&error, Error::Unavailable { reason, .. } if reason == CLOSED), "{error}");
    }
    closing.await;
    assert_eq!(all(&store.reopen(), &talk).await.len(), 1);
}

/// Every command of the failed transaction is in doubt, and so is a repeat of it.
#[tokio::test]
async fn every_command_of_a_failed_commit_stays_in_doubt() {
    let store = Opened::new();
    let mut talks: Vec<_> = (0..4).map(|i| Talk::new(&format!("t{i}"))).collect();
    for talk in &mut talks {
        store.say(talk, 0).await;
    }
    let image = store.saver.read_thread(&talks[3].thread).await.unwrap();
    let lock = store.lock();
    store.faults().arm(0, How::Done, "COMMIT");
    let step = talks[0].say(&message(1, 300));
    let task = talks[1].say(&message(1, 300)).writes.remove(0);
    let remove = || Rewrite { remove: image.checkpoints.keys().cloned().collect(), put: vec![] };
    for round in 0..2 {
        let mut first = Box::pin(store.saver.commit(step.clone()));
        let at = talks[1].key();
        let mut second = Box::pin(store.saver.put_writes(&at, &task));
        let mut third = Box::pin(store.saver.delete_thread(&talks[2].thread));
        let mut fourth = Box::pin(store.saver.rewrite_thread(&talks[3].thread, &image.revision, remove()));
        if round == 0 {
            assert!(first.as_mut().now_or_never().is_none(), "the lock is held");
            assert!(second.as_mut().now_or_never().is_none());
            assert!(third.as_mut().now_or_never().is_none());
            while store.saver.queued() > 2 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            // The first one waits for the lock, the others in the queue; the fourth looks first whether its thread is
            // long.
            while store.saver.queued() != 3 {
                if store.saver.queued() < 3 {
                    assert!(fourth.as_mut().now_or_never().is_none());
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            lock.execute_batch("ROLLBACK").unwrap();
        }
        let results = [first.await.map(|_| ()), second.await, third.await, fourth.await];
        for result in results {
            assert!(matches!(result, Err(Error::InDoubt { .. })), "round {round}: {result:?}");
        }
    }
    let other = store.saver.delete_thread(&talks[0].thread).await;
    assert!(matches!(other, Err(Error::Unavailable { .. })), "{other:?}");
}

#[tokio::test]
async fn a_commit_in_doubt_is_so_until_a_later_transaction_took_its_place() {
    let store = Opened::with(Options { busy_timeout: Duration::from_millis(20), ..Options::default() });
    let (mut talk, mut other) = (Talk::new("t"), Talk::new("other"));
    store.say(&mut talk, 0).await;
    let step = talk.say(&message(1, 300));
    store.faults().arm(0, How::NoRoom, "COMMIT");
    store.saver.commit(step.clone()).await.unwrap_err();
    let lock = store.lock();
    let error = store.saver.commit(step.clone()).await.unwrap_err();
    assert!(matches!(&error, Error::InDoubt { reason, .. } if reason.contains(LOCKED)), "{error}");
    drop(lock);
    store.say(&mut other, 0).await;
    let lock = store.lock();
    let error = store.saver.commit(step.clone()).await.unwrap_err();
    assert!(matches!(&error, Error::Unavailable { .. }), "{error}");
    drop(lock);
    store.saver.commit(step).await.unwrap();
}

#[tokio::test]
async fn a_commit_without_room_is_in_doubt_and_can_be_repeated_when_there_is_room() {
    let store = Opened::new();
    let mut talk = Talk::new("t");
    store.say(&mut talk, 0).await;
    let step = talk.say(&message(1, 300));
    store.faults().arm(0, How::NoRoom, "COMMIT");
    let error = store.saver.commit(step.clone()).await.unwrap_err();
    assert!(matches!(&error, Error::InDoubt { reason, .. } if reason.contains(FULL)), "{error}");
    store.saver.commit(step.clone()).await.unwrap();
    talk.accept(&step);
    store.say(&mut talk, 2).await;
    assert_eq!(all(&store.reopen(), &talk).await.len(), 3);
}

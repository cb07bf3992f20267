//! Vacuums with failing statements and flushes.

use std::time::Duration;

use threadkeep::Error;
use threadkeep::saver::Saver;

use super::common::{Talk, message};
use super::faults::How;
use super::statements::{Opened, all};
use crate::Options;
use crate::error::{FULL, LOCKED, POISONED};

#[tokio::test]
async fn a_vacuum_with_a_failing_statement_changes_nothing_that_is_stored() {
    for (how, statement) in [
        (How::NotDone, "PRAGMA incremental"),
        (How::RolledBack, "PRAGMA incremental"),
        (How::NotDone, "BEGIN"),
    ] {
        let store = Opened::new();
        let (mut talk, mut other) = (Talk::new("t"), Talk::new("other"));
        store.say(&mut talk, 0).await;
        for number in 0..100 {
            store.say(&mut other, number).await;
        }
        store.saver.delete_thread(&other.thread).await.unwrap();
        let (before, size) = (all(&store.saver, &talk).await, store.saver.file_size().await.unwrap());
        store.faults().arm(0, how, statement);
        let error = store.saver.vacuum(2).await.unwrap_err();
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        assert!(store.faults().disarm());
        assert_eq!(store.saver.file_size().await.unwrap(), size);
        store.say(&mut talk, 1).await;
        assert!(store.saver.vacuum(2).await.unwrap().bytes < size.bytes);
        store.faults().arm(0, How::NotDone, "COMMIT");
        let error = store.saver.vacuum(2).await.unwrap_err();
        assert!(matches!(error, Error::InDoubt { .. }), "{error}");
        assert!(
            matches!(store.saver.vacuum(2).await, Err(Error::Unavailable { reason, .. }) if reason == POISONED)
        );
        let after = all(&store.reopen(), &talk).await;
        assert_eq!(after.len(), 2);
        assert_eq!(after[1].checkpoint, before[0].checkpoint);
    }
}

/// What reached the disk is unknown after a failed flush, as after a failed commit; a full disk and a lock are no such
/// failures.
#[tokio::test]
async fn a_full_vacuum_whose_flush_fails_closes_the_store_for_writing() {
    for how in [How::NotDone, How::Done, How::NoRoom] {
        let store = Opened::with(Options { busy_timeout: Duration::from_millis(20), ..Options::default() });
        let mut talk = Talk::new("t");
        store.say(&mut talk, 0).await;
        let lock = store.lock();
        let error = store.saver.vacuum_fully().await.unwrap_err();
        assert!(matches!(&error, Error::Unavailable { reason, .. } if reason.contains(LOCKED)), "{error}");
        drop(lock);
        store.faults().arm(0, how, "VACUUM");
        let error = store.saver.vacuum_fully().await.unwrap_err();
        assert!(store.faults().disarm());
        let step = talk.say(&message(1, 300));
        let after = store.saver.commit(step.clone()).await;
        if how == How::NoRoom {
            assert!(matches!(&error, Error::Unavailable { reason, .. } if reason.contains(FULL)), "{error}");
            after.unwrap();
            continue;
        }
        assert!(matches!(error, Error::InDoubt { .. }), "{how:?}: {error}");
        assert!(matches!(&after, Err(Error::Unavailable { reason, .. }) if reason == POISONED), "{after:?}");
        let reopened = store.reopen();
        reopened.commit(step).await.unwrap();
        assert_eq!(all(&reopened, &talk).await.len(), 2);
    }
}

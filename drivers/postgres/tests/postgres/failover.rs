//! A primary with a standby: the outcome of writes when one of them stops, hangs, or takes over.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use threadkeep::Error;
use threadkeep::id::IdSource;
use threadkeep::saver::{CheckpointSelector, Flush, Saver, StepCommit};
use threadkeep_postgres::{Options, PostgresSaver, setup};
use threadkeep_testing::{Cluster, Replication};
use tokio::task::{JoinHandle, block_in_place};

use crate::common::damage::connect;
use crate::common::talk::{Talk, note, texts};
use crate::common::{database, open, patient};

/// Sessions of the saver in which a commit waits for the standby.
const WAITING: &str = "SELECT count(*) FILTER (WHERE wait_event = 'SyncRep'),
    count(*) FILTER (WHERE wait_event_type = 'Lock')
    FROM pg_stat_activity WHERE application_name = 'threadkeep'";

async fn cluster(replication: Replication) -> Cluster {
    let cluster = block_in_place(|| Cluster::start(replication).unwrap());
    setup(&cluster.url("postgres"), &patient()).await.unwrap();
    cluster
}

fn talk(thread: &str) -> Talk {
    let mut talk = Talk::new(thread);
    talk.ids = IdSource::default();
    talk
}

async fn say(saver: &PostgresSaver, talk: &mut Talk, n: usize) -> Result<(), Error> {
    let step = talk.say(&note(n));
    saver.commit(step.clone()).await?;
    talk.accept(&step);
    Ok(())
}

fn commit(saver: &Arc<PostgresSaver>, step: &StepCommit) -> JoinHandle<Result<(), Error>> {
    let (saver, step) = (saver.clone(), step.clone());
    tokio::spawn(async move { saver.commit(step).await.map(|_| ()) })
}

/// Waits until this many commits wait for the standby, and this many others for one of those.
async fn waiting(url: &str, commits: i64, others: i64) {
    let client = connect(url).await;
    loop {
        let row = client.query_one(WAITING, &[]).await.unwrap();
        if (row.get::<_, i64>(0), row.get::<_, i64>(1)) == (commits, others) {
            return;
        }
        tokio::task::yield_now().await;
    }
}

async fn notes(saver: &PostgresSaver, talk: &Talk) -> usize {
    let head = saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap();
    head.map_or(0, |head| texts(&head).len())
}

/// A session that waits for the standby is ended: its commit is on the primary only. The next attempt finds it, and
/// must not acknowledge it before the standby has it.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_in_doubt_is_acknowledged_once_the_standby_has_it() {
    let cluster = cluster(Replication::Synchronous).await;
    let saver = Arc::new(open(&cluster.url("postgres")).await);
    let mut talk = talk("t");
    say(&saver, &mut talk, 0).await.unwrap();
    let url = cluster.primary_url("postgres");
    for (n, end) in [(1, "pg_terminate_backend"), (2, "pg_cancel_backend")] {
        cluster.freeze_standby().unwrap();
        let step = talk.say(&note(n));
        let committing = commit(&saver, &step);
        waiting(&url, 1, 0).await;
        let ended = format!("SELECT count({end}(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'");
        connect(&url).await.query_one(&ended, &[]).await.unwrap();
        // The second attempt, and the commit of another process that repeats it, wait again.
        let reader = connect(&url).await;
        let there = "SELECT count(*) FROM threadkeep_checkpoint";
        let expected = i64::try_from(n).unwrap() + 1;
        while reader.query_one(there, &[]).await.unwrap().get::<_, i64>(0) < expected {
            tokio::task::yield_now().await;
        }
        waiting(&url, 1, 0).await;
        let other = Arc::new(open(&cluster.url("postgres")).await);
        let repeating = commit(&other, &step);
        waiting(&url, 1, 1).await;
        assert!(!committing.is_finished() && !repeating.is_finished(), "{end}");
        cluster.thaw_standby().unwrap();
        committing.await.unwrap().unwrap();
        repeating.await.unwrap().unwrap();
        talk.accept(&step);
        assert_eq!(notes(&saver, &talk).await, n + 1);
    }
}

/// An administrator cancels the wait, then the primary is lost with what only it had.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_wait_acknowledges_nothing() {
    let cluster = cluster(Replication::Synchronous).await;
    let options = Options { patience: std::time::Duration::ZERO, ..Options::default() };
    let saver = Arc::new(PostgresSaver::connect(&cluster.url("postgres"), options).await.unwrap());
    let (mut one, mut two) = (talk("one"), talk("two"));
    say(&saver, &mut one, 0).await.unwrap();
    say(&saver, &mut two, 0).await.unwrap();
    cluster.hold_replication().unwrap();
    let url = cluster.primary_url("postgres");
    let (first, second) = (commit(&saver, &one.say(&note(1))), commit(&saver, &two.say(&note(1))));
    waiting(&url, 2, 0).await;
    let cancel = "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    connect(&url).await.query_one(cancel, &[]).await.unwrap();
    for committing in [first, second] {
        let done = committing.await.unwrap();
        assert!(matches!(done, Err(Error::InDoubt { .. })), "{done:?}");
    }
    block_in_place(|| {
        cluster.kill_primary().unwrap();
        cluster.promote().unwrap();
        cluster.rebuild().unwrap();
    });
    let patient = open(&cluster.url("postgres")).await;
    assert_eq!((notes(&patient, &one).await, notes(&patient, &two).await), (1, 1));
}

/// The server says in a warning that a wait was cancelled. A role or a database may be set to hear none.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_wait_acknowledges_nothing_where_warnings_are_turned_off() {
    let cluster = cluster(Replication::Synchronous).await;
    cluster.execute("ALTER DATABASE postgres SET client_min_messages = error").unwrap();
    let options = Options { patience: Duration::ZERO, ..Options::default() };
    let saver = PostgresSaver::connect(&cluster.url("postgres"), options).await.unwrap();
    let [mut grown, mut put, mut deleted, mut flushed] = ["grown", "put", "deleted", "flushed"].map(talk);
    for talk in [&mut grown, &mut put, &mut deleted, &mut flushed] {
        say(&saver, talk, 0).await.unwrap();
    }
    let unflushed = StepCommit { flush: Flush::WithNext, ..flushed.say(&note(1)) };
    saver.commit(unflushed).await.unwrap();
    cluster.hold_replication().unwrap();
    let (at, row) = (put.key(), put.task(put.messages.last().unwrap()));
    let step = grown.say(&note(1));
    // As one call, as a call with arrays, as a transaction, and as a lock.
    let calls = async {
        tokio::join!(
            saver.commit(step),
            saver.put_writes(&at, &row),
            saver.delete_thread(&deleted.thread),
            saver.flush(&flushed.thread),
        )
    };
    let url = cluster.primary_url("postgres");
    let cancelled = async {
        waiting(&url, 4, 0).await;
        let cancel =
            "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
        connect(&url).await.query_one(cancel, &[]).await.unwrap();
    };
    let ((committed, put, deleted, flushed), ()) = tokio::join!(calls, cancelled);
    for done in [committed.map(drop), put, deleted, flushed] {
        assert!(matches!(done, Err(Error::InDoubt { .. })), "{done:?}");
    }
}

/// A primary that becomes a standby refuses writes on the connections that are open to it.
#[tokio::test(flavor = "multi_thread")]
async fn a_demoted_primary_is_left_for_the_new_one() {
    let cluster = cluster(Replication::Synchronous).await;
    let saver = open(&cluster.url("postgres")).await;
    // Through one address, like that of a proxy: it leads to a server that refuses writes for a while.
    let single = open(&cluster.primary_url("postgres")).await;
    let mut talk = talk("t");
    say(&saver, &mut talk, 0).await.unwrap();
    say(&single, &mut talk, 1).await.unwrap();
    cluster.execute("ALTER SYSTEM SET default_transaction_read_only = on").unwrap();
    cluster.execute("SELECT pg_reload_conf()").unwrap();
    let url = cluster.primary_url("postgres");
    while connect(&url).await.query_one("SHOW transaction_read_only", &[]).await.unwrap().get::<_, String>(0)
        != "on"
    {
        tokio::task::yield_now().await;
    }
    let step = talk.say(&note(2));
    let single = Arc::new(single);
    let committing = commit(&single, &step);
    let hasty = Options { patience: std::time::Duration::ZERO, ..Options::default() };
    let refused = PostgresSaver::connect(&url, hasty).await.unwrap().commit(step.clone()).await.unwrap_err();
    assert!(
        matches!(&refused, Error::Unavailable { reason, .. } if reason.contains("target_session_attrs")),
        "{refused}"
    );
    assert!(!committing.is_finished());
    let admin = connect(&url).await;
    admin.batch_execute("SET transaction_read_only = off").await.unwrap();
    admin.batch_execute("ALTER SYSTEM RESET default_transaction_read_only").await.unwrap();
    admin.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    committing.await.unwrap().unwrap();
    talk.accept(&step);
    // And now the roles are swapped.
    block_in_place(|| {
        cluster.crash_primary().unwrap();
        cluster.promote().unwrap();
        cluster.rebuild().unwrap();
    });
    say(&saver, &mut talk, 3).await.unwrap();
    assert_eq!(notes(&saver, &talk).await, 4);
}

/// The primary hangs: its kernel still answers, and the connections to it stay open. Then it resumes and considers
/// itself the primary.
#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_hangs_is_left_for_the_new_one() {
    let cluster = cluster(Replication::Synchronous).await;
    let saver = Arc::new(open(&cluster.url("postgres")).await);
    let mut talk = talk("t");
    say(&saver, &mut talk, 0).await.unwrap();
    assert_eq!(notes(&saver, &talk).await, 1);
    cluster.freeze_primary().unwrap();
    let step = talk.say(&note(1));
    let committing = commit(&saver, &step);
    block_in_place(|| {
        cluster.promote().unwrap();
        cluster.thaw_old_primary().unwrap();
        cluster.rebuild().unwrap();
    });
    committing.await.unwrap().unwrap();
    talk.accept(&step);
    say(&saver, &mut talk, 2).await.unwrap();
    assert_eq!(notes(&saver, &talk).await, 3);
}

/// Several calls wait for a primary that hangs. The first one that learns of the new one is not the only one that goes there.
#[tokio::test(flavor = "multi_thread")]
async fn every_call_leaves_a_primary_that_hangs() {
    let cluster = cluster(Replication::Asynchronous).await;
    let saver = Arc::new(open(&cluster.url("postgres")).await);
    let mut talks: Vec<_> = (0..6).map(|n| talk(&format!("t{n}"))).collect();
    for talk in &mut talks {
        say(&saver, talk, 0).await.unwrap();
    }
    // A connection for each.
    join_all(talks.iter().map(|talk| notes(&saver, talk))).await;
    block_in_place(|| cluster.wait_until_standby_has_everything().unwrap());
    cluster.freeze_primary().unwrap();
    let calls: Vec<_> = talks
        .iter()
        .map(|talk| {
            let (saver, thread, step) = (saver.clone(), talk.thread.clone(), talk.say(&note(1)));
            tokio::spawn(async move {
                let head = saver.get(&CheckpointSelector::head(&thread)).await.unwrap();
                (head.map_or(0, |head| texts(&head).len()), saver.commit(step).await.map(|_| ()))
            })
        })
        .collect();
    block_in_place(|| cluster.promote().unwrap());
    // The old primary never answers.
    let done = tokio::time::timeout(Duration::from_mins(10), join_all(calls)).await;
    for done in done.expect("a call waits for a primary that hangs") {
        assert_eq!(done.unwrap(), (1, Ok(())));
    }
    for talk in &talks {
        assert_eq!(notes(&saver, talk).await, 2);
    }
    block_in_place(|| cluster.thaw_old_primary().unwrap());
}

/// The standby lacked some writes: acknowledged ones are gone, which is reported before anything else is acknowledged
/// on the thread.
#[tokio::test(flavor = "multi_thread")]
async fn what_an_asynchronous_standby_did_not_have_is_reported() {
    let cluster = cluster(Replication::Asynchronous).await;
    let saver = open(&cluster.url("postgres")).await;
    let (mut kept, mut lost) = (talk("kept"), talk("lost"));
    for talk in [&mut kept, &mut lost] {
        say(&saver, talk, 0).await.unwrap();
    }
    block_in_place(|| cluster.wait_until_standby_has_everything().unwrap());
    cluster.hold_replication().unwrap();
    for n in 1..4 {
        say(&saver, &mut lost, n).await.unwrap();
    }
    block_in_place(|| {
        cluster.kill_primary().unwrap();
        cluster.promote().unwrap();
    });
    say(&saver, &mut kept, 1).await.unwrap();
    let told = say(&saver, &mut lost, 4).await;
    assert!(matches!(&told, Err(Error::HistoryLost { thread, .. }) if *thread == lost.thread), "{told:?}");
    assert_eq!(notes(&saver, &lost).await, 1);
    let head = saver.get(&CheckpointSelector::head(&lost.thread)).await.unwrap().unwrap();
    lost.resume(&head);
    say(&saver, &mut lost, 5).await.unwrap();
    assert_eq!(notes(&open(&cluster.url("postgres")).await, &lost).await, 2);
}

/// While the server answers, a call may wait longer than its patience. That counts from when the server goes away.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_has_waited_for_longer_than_its_patience_is_repeated_when_its_session_ends() {
    let database = database().await;
    let patience = Duration::from_secs(12);
    let options = Options { patience, ..Options::default() };
    let saver = Arc::new(PostgresSaver::connect(database.url(), options).await.unwrap());
    let mut talk = talk("t");
    say(&saver, &mut talk, 0).await.unwrap();
    let locker = connect(database.url()).await;
    locker.batch_execute("BEGIN; SELECT * FROM threadkeep_thread FOR UPDATE").await.unwrap();
    let step = talk.say(&note(1));
    let committing = commit(&saver, &step);
    database.blocked().await.unwrap();
    tokio::time::sleep(patience + Duration::from_secs(1)).await;
    assert!(!committing.is_finished());
    // Returns when the session has ended.
    let end = "SELECT count(pg_terminate_backend(pid, 600000)) FROM pg_stat_activity
               WHERE wait_event_type = 'Lock' AND application_name = 'threadkeep'
               AND datname = current_database()";
    let ended = connect(database.url()).await.query_one(end, &[]).await.unwrap();
    assert_eq!(ended.get::<_, i64>(0), 1);
    locker.batch_execute("COMMIT").await.unwrap();
    committing.await.unwrap().unwrap();
    talk.accept(&step);
    assert_eq!(notes(&saver, &talk).await, 2);
}

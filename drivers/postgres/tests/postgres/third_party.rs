//! Another process acts during a write, or between a lost answer and the next attempt: the operation happens once,
//! before or after what the other process did, or the caller learns that it is in doubt.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::{IdSource, ThreadId};
use threadkeep::saver::{CheckpointSelector, Flush, Rewrite, Saver, StepCommit};
use threadkeep::value::Element;
use threadkeep::{Error, Result};
use threadkeep_postgres::PostgresSaver;
use threadkeep_testing::Database;
use tokio::sync::Barrier;

use crate::common::damage::connect;
use crate::common::proxy::{Cut, Proxy};
use crate::common::talk::{Talk, note, texts};
use crate::common::{database, open};

fn talk(thread: &str) -> Talk {
    let mut talk = Talk::new(thread);
    talk.ids = IdSource::default();
    talk
}

async fn say(saver: &PostgresSaver, talk: &mut Talk, n: usize) {
    let step = talk.say(&note(n));
    saver.commit(step.clone()).await.unwrap();
    talk.accept(&step);
}

/// The notes of a thread, which must be whole; none if it does not exist.
async fn notes(saver: &PostgresSaver, thread: &str) -> Option<Vec<usize>> {
    let image = saver.read_thread(&thread.into()).await.unwrap();
    let listed = saver.threads(None, 10_000).await.unwrap().contains(&thread.into());
    assert_eq!(listed, !image.checkpoints.is_empty(), "{thread}");
    let head = saver.get(&CheckpointSelector::head(&thread.into())).await.unwrap();
    assert_eq!(head.is_some(), listed, "{thread}");
    let number = |text: String| text.split(' ').nth(7).unwrap().parse().unwrap();
    head.map(|head| texts(&head).into_iter().map(number).collect())
}

/// A deletion and the creation of the thread start together, with varying distances between them. Whichever comes
/// first, the thread is whole or gone, and its author can continue.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_deletion_comes_before_or_after_a_creation() {
    let database = database().await;
    let (deleter, author) = (Arc::new(open(database.url()).await), Arc::new(open(database.url()).await));
    for round in 0..150_u32 {
        let thread = format!("t{round}");
        let mut talk = talk(&thread);
        let step = talk.say(&note(0));
        let barrier = Arc::new(Barrier::new(2));
        let deleting = tokio::spawn({
            let (saver, thread, barrier) = (deleter.clone(), thread.clone(), barrier.clone());
            async move {
                barrier.wait().await;
                saver.delete_thread(&thread.as_str().into()).await.unwrap();
            }
        });
        let creating = tokio::spawn({
            let (saver, step) = (author.clone(), step.clone());
            async move {
                barrier.wait().await;
                for _ in 0..round % 8 {
                    tokio::task::yield_now().await;
                }
                saver.commit(step).await.unwrap();
            }
        });
        deleting.await.unwrap();
        creating.await.unwrap();
        talk.accept(&step);
        match notes(&deleter, &thread).await {
            None => {
                let refused = author.commit(talk.say(&note(1))).await;
                assert!(matches!(refused, Err(Error::Conflict { found: None, .. })), "{refused:?}");
                assert_eq!(notes(&deleter, &thread).await, None);
            }
            Some(found) => {
                assert_eq!(found, [0]);
                say(&author, &mut talk, 1).await;
                assert_eq!(notes(&deleter, &thread).await.unwrap(), [0, 1]);
            }
        }
    }
}

/// The same, with the deletion held in the middle of its work.
#[tokio::test(flavor = "multi_thread")]
async fn a_creation_waits_for_a_deletion_that_has_begun() {
    let database = database().await;
    let admin = connect(database.url()).await;
    // The deletion of heads waits for this lock.
    admin.batch_execute("SELECT pg_advisory_lock(1)").await.unwrap();
    connect(database.url())
        .await
        .batch_execute(
            "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
                 'BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NULL; END';
             CREATE TRIGGER wait BEFORE DELETE ON threadkeep_head FOR EACH STATEMENT EXECUTE FUNCTION wait()",
        )
        .await
        .unwrap();
    let (deleter, author) = (Arc::new(open(database.url()).await), Arc::new(open(database.url()).await));
    let waiting = async |sessions: i64| {
        let query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
        while admin.query_one(query, &[]).await.unwrap().get::<_, i64>(0) < sessions {
            tokio::task::yield_now().await;
        }
    };
    let deleting = tokio::spawn(async move { deleter.delete_thread(&"t".into()).await });
    waiting(1).await;
    let mut talk = talk("t");
    let step = talk.say(&note(0));
    let creating = tokio::spawn({
        let (saver, step) = (author.clone(), step.clone());
        async move { saver.commit(step).await }
    });
    waiting(2).await;
    assert!(!creating.is_finished());
    admin.batch_execute("SELECT pg_advisory_unlock(1)").await.unwrap();
    deleting.await.unwrap().unwrap();
    creating.await.unwrap().unwrap();
    talk.accept(&step);
    say(&author, &mut talk, 1).await;
    assert_eq!(notes(&author, "t").await.unwrap(), [0, 1]);
}

/// What is in progress when its answer is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Create,
    /// The checkpoints of another thread are put.
    Copy,
    /// Another thread is copied.
    CopyRows,
    Commit,
    Put,
    Delete,
    DeleteSeen,
    Rewrite,
    RemoveAll,
    Flush,
}

/// What another process does before the next attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    GoesOn,
    Deletes,
    DeletesAndCreates,
    Rewrites,
}

impl Meanwhile {
    async fn act(self, saver: &PostgresSaver, thread: &str) {
        if matches!(self, Self::Deletes | Self::DeletesAndCreates) {
            saver.delete_thread(&thread.into()).await.unwrap();
        }
        match self {
            Self::Deletes => {}
            Self::DeletesAndCreates => say(saver, &mut talk(thread), 900).await,
            Self::GoesOn => {
                let mut other = talk(thread);
                if let Some(head) = saver.get(&CheckpointSelector::head(&thread.into())).await.unwrap() {
                    other.resume(&head);
                }
                say(saver, &mut other, 900).await;
            }
            Self::Rewrites => {
                let image = saver.read_thread(&thread.into()).await.unwrap();
                let put = image.checkpoints.values().next_back().cloned().into_iter().collect();
                let rewrite = Rewrite { put, ..Rewrite::default() };
                saver.rewrite_thread(&thread.into(), &image.revision, rewrite).await.unwrap();
            }
        }
    }
}

/// Every call is cut at every request, before and after the server carried it out; then another process acts; then the
/// call continues. The outcome is that of the call at one moment before or after the other process acted.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_and_a_third_party_before_the_next_attempt() {
    use Call::{
        Commit, Copy, CopyRows, Create, Delete, DeleteSeen, Flush as FlushIt, Put, RemoveAll,
        Rewrite as RewriteIt,
    };
    let calls = [Create, Copy, CopyRows, Commit, Put, Delete, DeleteSeen, RewriteIt, RemoveAll, FlushIt];
    let mut tried = 0;
    let database = database().await;
    let other = open(database.url()).await;
    for call in calls {
        for meanwhile in
            [Meanwhile::GoesOn, Meanwhile::Deletes, Meanwhile::DeletesAndCreates, Meanwhile::Rewrites]
        {
            for cut in [Cut::Before, Cut::After] {
                for nth in 0..12 {
                    let Some(done) = one(&database, &other, call, meanwhile, (cut, nth)).await else {
                        break;
                    };
                    tried += 1;
                    let (before, done, after) = done;
                    let what = format!("{call:?}, {cut:?} request {nth}, {meanwhile:?}: {done:?}, {after:?}");
                    check(call, meanwhile, before.as_deref(), &done, after.as_deref(), &what);
                }
            }
        }
    }
    assert!(tried > 60, "{tried}");
}

/// The repeat reads rows that the first attempt, whose author knew the thread, did not have to read.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_in_doubt_stays_in_doubt_if_its_repeat_meets_damage() {
    let database = database().await;
    let admin = connect(database.url()).await;
    for call in [Call::Commit, Call::Put] {
        let proxy = Proxy::before(database.url()).await;
        let subject = open(proxy.url()).await;
        let mut talk = talk(&format!("{call:?}"));
        for n in 0..3 {
            say(&subject, &mut talk, n).await;
        }
        let (key, task) = (talk.key(), talk.task(&Element::from_json(&note(3)).unwrap()));
        if call == Call::Put {
            // Its statement is prepared by now, as that of a commit is.
            let first = talk.task(&Element::from_json(&note(4)).unwrap());
            subject.put_writes(&key, &first).await.unwrap();
        }
        let step = talk.say(&note(5));
        proxy.cut(0, Cut::After);
        let (come, go) = proxy.hold_retry();
        let mut running: BoxFuture<'_, Result<()>> = match call {
            Call::Put => subject.put_writes(&key, &task).boxed(),
            _ => async { subject.commit(step).await.map(|_| ()) }.boxed(),
        };
        tokio::select! {
            done = &mut running => panic!("{call:?}: there was no other attempt: {done:?}"),
            () = come.notified() => {}
        }
        let damage = "UPDATE threadkeep_checkpoint SET body = set_byte(body, 0, get_byte(body, 0) # 1)";
        assert!(admin.execute(damage, &[]).await.unwrap() > 0);
        go.notify_one();
        let done = running.await;
        assert!(matches!(done, Err(Error::InDoubt { .. })), "{call:?}: {done:?}");
    }
}

/// Nothing keeps a copy whose answer is lost from being stored later, if there is nothing to copy any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_in_doubt_stays_in_doubt_if_its_source_is_gone() {
    let database = database().await;
    let other = open(database.url()).await;
    let mut doubts = 0;
    for cut in [Cut::Before, Cut::After] {
        for nth in 0..12 {
            let proxy = Proxy::before(database.url()).await;
            let subject = open(proxy.url()).await;
            let copy = ThreadId::from(format!("copy {cut:?} {nth}"));
            let source = source_for(&subject, &copy).await;
            proxy.cut(nth, cut);
            let (come, go) = proxy.hold_retry();
            let mut running = Box::pin(subject.copy_thread(&source, &copy));
            tokio::select! {
                done = &mut running => {
                    assert_eq!(done, Ok(2), "{copy}");
                    break;
                }
                () = come.notified() => {}
            }
            other.delete_thread(&source).await.unwrap();
            go.notify_one();
            let done = running.await;
            let found = other.read_thread(&copy).await.unwrap().checkpoints.len();
            match done {
                Ok(count) => assert_eq!(found, count, "{copy}"),
                Err(Error::InDoubt { .. }) => doubts += 1,
                other => panic!("{copy}: {other:?}"),
            }
        }
    }
    assert!(doubts > 0, "no copy was in doubt");
}

/// A thread of which this one may become a copy.
async fn source_for(saver: &PostgresSaver, thread: &ThreadId) -> ThreadId {
    let mut source = talk(&format!("the source of {thread}"));
    for n in 3..5 {
        say(saver, &mut source, n).await;
    }
    source.thread
}

/// A copy of another thread, for this one.
async fn copy_for(saver: &PostgresSaver, thread: &ThreadId) -> Rewrite {
    let image = saver.read_thread(&source_for(saver, thread).await).await.unwrap();
    let put = image.checkpoints.into_values();
    let put = put.map(|tuple| CheckpointTuple { thread: thread.clone(), ..tuple }).collect();
    Rewrite { put, ..Rewrite::default() }
}

type Outcome = (Option<Vec<usize>>, Result<()>, Option<Vec<usize>>);

/// What the other process saw before it acted, the call's result, and what exists then. None if nothing was cut.
async fn one(
    database: &Database,
    other: &PostgresSaver,
    call: Call,
    meanwhile: Meanwhile,
    (cut, nth): (Cut, usize),
) -> Option<Outcome> {
    let proxy = Proxy::before(database.url()).await;
    let subject = open(proxy.url()).await;
    let name = format!("{call:?} {meanwhile:?} {cut:?} {nth}");
    let mut talk = talk(&name);
    if !matches!(call, Call::Create | Call::Copy | Call::CopyRows) {
        for n in 0..3 {
            say(&subject, &mut talk, n).await;
        }
    }
    let thread = talk.thread.clone();
    let image = subject.read_thread(&thread).await.unwrap();
    let copied = if call == Call::Copy { copy_for(&subject, &thread).await } else { Rewrite::default() };
    let source = if call == Call::CopyRows { source_for(&subject, &thread).await } else { thread.clone() };
    let step = talk.say(&note(3));
    let task = talk.task(&Element::from_json(&note(3)).unwrap());
    let key = talk.head.map(|_| talk.key());
    if call == Call::Flush {
        let step = StepCommit { flush: Flush::WithNext, ..step.clone() };
        subject.commit(step).await.unwrap();
    }
    proxy.cut(nth, cut);
    let (come, go) = proxy.hold_retry();
    let mut running: BoxFuture<'_, Result<()>> = match call {
        Call::Create | Call::Commit => async { subject.commit(step).await.map(|_| ()) }.boxed(),
        Call::Put => async { subject.put_writes(key.as_ref().unwrap(), &task).await }.boxed(),
        Call::Copy => async { subject.rewrite_thread(&thread, &image.revision, copied).await }.boxed(),
        Call::CopyRows => async { subject.copy_thread(&source, &thread).await.map(drop) }.boxed(),
        Call::Delete => subject.delete_thread(&thread).boxed(),
        Call::DeleteSeen => subject.delete_seen(&thread, &image.revision).boxed(),
        Call::Flush => subject.flush(&thread).boxed(),
        Call::Rewrite | Call::RemoveAll => {
            let mut places = image.checkpoints.keys().cloned();
            let remove = match call {
                Call::Rewrite => places.next_back().into_iter().collect(),
                _ => places.collect(),
            };
            let rewrite = Rewrite { remove, put: vec![] };
            async { subject.rewrite_thread(&thread, &image.revision, rewrite).await }.boxed()
        }
    };
    tokio::select! {
        done = &mut running => {
            done.unwrap();
            assert!(!proxy.mend(), "{call:?}, {cut:?} request {nth}: there was no other attempt");
            return None;
        }
        () = come.notified() => {}
    }
    // The server carries out what it has received, or finds that the client is gone.
    let busy = "SELECT count(*) FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'";
    let admin = connect(database.url()).await;
    while admin.query_one(busy, &[]).await.unwrap().get::<_, i64>(0) > 0 {
        tokio::task::yield_now().await;
    }
    let before = notes(other, &name).await;
    if !(before.is_none() && meanwhile == Meanwhile::Rewrites) {
        meanwhile.act(other, &name).await;
    }
    go.notify_one();
    let done = running.await;
    let after = notes(other, &name).await;
    assert_eq!(notes(&subject, &name).await, after);
    Some((before, done, after))
}

/// What the call may return and leave. `before` is what the other process saw when it acted.
fn check(
    call: Call,
    meanwhile: Meanwhile,
    before: Option<&[usize]>,
    done: &Result<()>,
    after: Option<&[usize]>,
    what: &str,
) {
    let others = after.is_some_and(|notes| notes.contains(&900));
    let in_doubt = matches!(done, Err(Error::InDoubt { .. }));
    match meanwhile {
        // What the other process acknowledged is stored, unless the call came later and removed it.
        Meanwhile::GoesOn if call == Call::Delete && before.is_some() => assert_eq!(after, None, "{what}"),
        // A deletion that had not read the thread yet removes what it finds.
        Meanwhile::DeletesAndCreates if call == Call::Delete && before.is_some() => {
            assert!(others || after.is_none(), "{what}");
        }
        Meanwhile::GoesOn | Meanwhile::DeletesAndCreates => assert!(others, "{what}"),
        Meanwhile::Deletes | Meanwhile::Rewrites => assert!(!others, "{what}"),
    }
    let deleted = matches!(meanwhile, Meanwhile::Deletes | Meanwhile::DeletesAndCreates);
    match call {
        Call::Create | Call::Copy | Call::CopyRows | Call::Commit => {
            let there = after.is_some_and(|notes| notes.contains(&3));
            let happened = before.is_some_and(|notes| notes.contains(&3));
            if happened && deleted {
                assert!(!there, "{what}: it is back");
            }
            match done {
                Ok(()) => assert!(happened || there, "{what}"),
                Err(Error::Conflict { .. } | Error::Stale { .. }) => {
                    assert!(!happened && !there, "{what}");
                }
                _ => assert!(in_doubt && !there, "{what}"),
            }
        }
        Call::Put => match done {
            Ok(()) => {}
            Err(Error::NotFound { .. }) => assert!(deleted, "{what}"),
            _ => assert!(in_doubt, "{what}"),
        },
        Call::Rewrite => {
            let happened = before == Some(&[0, 1]);
            match done {
                Ok(()) => assert!(happened || after == Some(&[0, 1]), "{what}"),
                Err(Error::Stale { .. }) => assert!(!happened, "{what}"),
                _ => assert!(in_doubt, "{what}"),
            }
        }
        Call::RemoveAll | Call::DeleteSeen => match done {
            // It is gone, whichever of the two removed it.
            Ok(()) => assert!(deleted || before.is_none() || after.is_none(), "{what}"),
            Err(Error::Stale { .. }) => assert!(before.is_some(), "{what}"),
            _ => assert!(in_doubt, "{what}"),
        },
        Call::Delete | Call::Flush => assert_eq!(done, &Ok(()), "{what}"),
    }
}

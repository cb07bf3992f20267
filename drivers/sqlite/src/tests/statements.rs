//! Failing statements, full disks, locks and dropped futures: the state is that before or after, never in between.

use std::time::Duration;

use futures::FutureExt;
use serde_json::json;
use tempfile::TempDir;
use threadkeep::checkpoint::{CheckpointTuple, Stored, TaskWrites};
use threadkeep::id::ThreadId;
use threadkeep::saver::{CheckpointSelector, Flush, ListQuery, Rewrite, Saver, StepCommit};
use threadkeep::value::ListValue;
use threadkeep::{Error, Result};

use super::common::{Talk, message};
use super::faults::{Faults, How};
use crate::error::{CLOSED, FULL, LOCKED};
use crate::write::turn::QUEUE;
use crate::{Options, SqliteSaver};

pub(super) struct Opened {
    pub(super) dir: TempDir,
    pub(super) options: Options,
    pub(super) saver: SqliteSaver,
}

/// Options of a store that waits for the locks of others however busy the machine is.
pub(super) fn patient() -> Options {
    Options { busy_timeout: Duration::from_mins(10), ..Options::default() }
}

impl Opened {
    pub(super) fn new() -> Self {
        Self::with(patient())
    }

    pub(super) fn with(options: Options) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let saver = SqliteSaver::open(dir.path().join("db"), &options).unwrap();
        Self { dir, options, saver }
    }

    pub(super) fn faults(&self) -> &Faults {
        &self.options.faults
    }

    /// The same database through another handle.
    pub(super) fn reopen(&self) -> SqliteSaver {
        SqliteSaver::open(self.dir.path().join("db"), &patient()).unwrap()
    }

    /// Holds the write lock of the database.
    pub(super) fn lock(&self) -> rusqlite::Connection {
        let conn =
            threadkeep_pages::open(self.dir.path().join("db"), rusqlite::OpenFlags::default()).unwrap();
        conn.busy_timeout(patient().busy_timeout).unwrap();
        conn.execute_batch("BEGIN IMMEDIATE").unwrap();
        conn
    }

    pub(super) async fn say(&self, talk: &mut Talk, number: usize) {
        let step = talk.say(&message(number, 300));
        self.saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    }
}

pub(super) async fn all(saver: &SqliteSaver, talk: &Talk) -> Vec<CheckpointTuple> {
    saver.list(&ListQuery { namespace: None, ..ListQuery::new(&talk.thread) }).await.unwrap()
}

/// A step with one of everything: new names, a new namespace on request, writes, shared metadata and a large map.
pub(super) fn rich(talk: &Talk, number: usize) -> StepCommit {
    let mut step = talk.say(&message(number, 300));
    step.checkpoint.next = vec![format!("node-{number}").into()];
    let map: serde_json::Map<_, _> = (0..20).map(|i| (format!("run-{number}-{i}"), json!(i))).collect();
    step.metadata.extra =
        json!({ "run_id": format!("a run whose id is long enough {number}"), "run_durations": map })
            .as_object()
            .unwrap()
            .clone()
            .into();
    step
}

#[derive(Clone)]
enum Call {
    Commit(Box<StepCommit>),
    Put(TaskWrites),
    Delete,
    /// A flush of what is stored but not on disk.
    Flush,
    /// Deletes everything but the head, and gives that another title.
    Prune,
}

async fn call(saver: &SqliteSaver, talk: &Talk, call: Call) -> Result<()> {
    match call {
        Call::Commit(step) => saver.commit(*step).await.map(|_| ()),
        Call::Put(task) => saver.put_writes(&talk.key(), &task).await,
        Call::Delete => saver.delete_thread(&talk.thread).await,
        Call::Flush => saver.flush(&talk.thread).await,
        Call::Prune => {
            let mut image = saver.read_thread(&talk.thread).await?;
            let (place, mut head) = image.checkpoints.pop_last().unwrap();
            head.parent = None;
            head.checkpoint.applied.clear();
            head.metadata.extra.insert("pruned, says a text of its own element".into(), json!(true));
            let rewrite = Rewrite { remove: image.checkpoints.into_keys().collect(), put: vec![head] };
            assert!(!rewrite.remove.contains(&place));
            saver.rewrite_thread(&talk.thread, &image.revision, rewrite).await
        }
    }
}

/// Runs a test where commits go through the writer's thread, and where they are carried out in place.
fn in_both(test: impl AsyncFn()) {
    use tokio::runtime::Builder;
    Builder::new_current_thread().enable_all().build().unwrap().block_on(test());
    Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap().block_on(test());
}

/// Fails every statement of `what` once, in the way `how`. Each time the store is as before, and the same call then
/// succeeds; ends at the first number without a statement. Covers the transaction's own statements too, except COMMIT,
/// which has its own tests.
async fn fail_every_statement(how: How, what: impl Fn(&Talk) -> Call) {
    for nth in 0.. {
        let store = Opened::new();
        let mut talk = Talk::new("t");
        for number in 0..3 {
            store.say(&mut talk, number).await;
        }
        let before = all(&store.saver, &talk).await;
        let work = what(&talk);
        store.faults().arm(nth, how, "");
        let result = call(&store.saver, &talk, work.clone()).await;
        if !store.faults().disarm() {
            result.unwrap();
            assert!(nth > 3, "only {nth} statements were met");
            return;
        }
        match result {
            // COMMIT itself.
            Err(Error::InDoubt { .. }) => {
                let reopened = store.reopen();
                call(&reopened, &talk, work).await.unwrap();
                reopened.close().await;
                continue;
            }
            Err(Error::Unavailable { .. }) => {}
            other => panic!("statement {nth}: {other:?}"),
        }
        assert_eq!(all(&store.saver, &talk).await, before, "statement {nth}");
        call(&store.saver, &talk, work.clone()).await.unwrap();
        let after = all(&store.saver, &talk).await;
        assert_ne!(after, before, "statement {nth}");
        assert_eq!(all(&store.reopen(), &talk).await, after);
        if let Call::Commit(step) = &work
            && step.namespace == talk.namespace
        {
            // What the writer remembers is correct again: the next step builds on it.
            talk.accept(step);
            store.say(&mut talk, 50).await;
            let head = store.saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
            let list = head.checkpoint.channels["messages"].stored.value().unwrap();
            assert_eq!(*list, talk.messages.clone().into());
        }
    }
}

#[test]
fn a_commit_with_a_failing_statement_never_happened() {
    in_both(async || {
        for how in [How::NotDone, How::Done, How::RolledBack] {
            fail_every_statement(how, |talk| Call::Commit(Box::new(rich(talk, 9)))).await;
        }
    });
}

#[test]
fn a_commit_that_waits_for_a_flush_with_a_failing_statement_never_happened() {
    in_both(async || {
        for how in [How::NotDone, How::Done, How::RolledBack] {
            fail_every_statement(how, |talk| {
                Call::Commit(Box::new(StepCommit { flush: Flush::WithNext, ..rich(talk, 9) }))
            })
            .await;
        }
    });
}

/// A step with pending rows: what a task has left in two parts, and one of a task that had nothing to write.
fn beginning_with_rows(talk: &Talk) -> StepCommit {
    let step = rich(talk, 9);
    let row = rich(talk, 10).writes.remove(0);
    let longer = TaskWrites { writes: [&row.writes[..], &row.writes[..]].concat(), ..row.clone() };
    let silent = TaskWrites { task: talk.ids.task(), writes: Vec::new(), ..row.clone() };
    StepCommit { pending: vec![row, silent, longer], ..step }
}

#[test]
fn a_commit_with_pending_rows_with_a_failing_statement_never_happened() {
    in_both(async || {
        for how in [How::NotDone, How::Done, How::RolledBack] {
            fail_every_statement(how, |talk| Call::Commit(Box::new(beginning_with_rows(talk)))).await;
        }
    });
}

/// Whatever became of a commit in doubt, it has its pending rows as soon as it is there.
#[tokio::test]
async fn a_commit_in_doubt_has_its_pending_rows_if_it_is_stored() {
    for how in [How::NotDone, How::Done] {
        let store = Opened::new();
        let mut talk = Talk::new("t");
        store.say(&mut talk, 0).await;
        let before = all(&store.saver, &talk).await;
        let step = beginning_with_rows(&talk);
        store.faults().arm(0, how, "COMMIT");
        let error = store.saver.commit(step.clone()).await.unwrap_err();
        assert!(matches!(error, Error::InDoubt { .. }), "{error}");
        store.saver.close().await;
        let reopened = store.reopen();
        let rows = || async { all(&reopened, &talk).await[0].writes.clone() };
        if how == How::Done {
            assert_eq!(rows().await, TaskWrites::merged(&step.pending));
        } else {
            assert_eq!(all(&reopened, &talk).await, before);
        }
        reopened.commit(step.clone()).await.unwrap();
        assert_eq!(rows().await, TaskWrites::merged(&step.pending), "after the repeat");
    }
}

/// A failed flush flushes nothing; a repeated one does, and stored data is readable throughout.
#[tokio::test]
async fn a_flush_with_a_failing_statement_is_told_and_can_be_repeated() {
    for how in [How::NotDone, How::Done, How::RolledBack] {
        for nth in 0.. {
            let store = Opened::new();
            let mut talk = Talk::new("t");
            store.say(&mut talk, 0).await;
            let step = StepCommit { flush: Flush::WithNext, ..talk.say(&message(1, 300)) };
            store.saver.commit(step).await.unwrap();
            store.faults().commits();
            store.faults().arm(nth, how, "");
            let flushed = call(&store.saver, &talk, Call::Flush).await;
            if !store.faults().disarm() {
                flushed.unwrap();
                assert!(nth > 3, "only {nth} statements were met");
                break;
            }
            match flushed.unwrap_err() {
                Error::Unavailable { .. } => {
                    call(&store.saver, &talk, Call::Flush).await.unwrap();
                    assert_eq!(store.faults().commits().last(), Some(&2), "statement {nth}");
                }
                // COMMIT itself.
                Error::InDoubt { .. } => {}
                other => panic!("statement {nth}: {other:?}"),
            }
            assert_eq!(all(&store.reopen(), &talk).await.len(), 2, "statement {nth}");
        }
    }
}

#[tokio::test]
async fn the_first_commit_of_a_namespace_with_a_failing_statement_never_happened() {
    fail_every_statement(How::NotDone, |talk| {
        let mut step = Talk::new("t").say(&message(5, 300));
        step.namespace = "inner".into();
        step.thread = talk.thread.clone();
        Call::Commit(Box::new(step))
    })
    .await;
}

#[tokio::test]
async fn put_writes_with_a_failing_statement_never_happened() {
    for how in [How::NotDone, How::RolledBack] {
        fail_every_statement(how, |talk| Call::Put(rich(talk, 9).writes.remove(0))).await;
    }
}

#[tokio::test]
async fn a_deletion_with_a_failing_statement_never_happened() {
    for how in [How::NotDone, How::RolledBack] {
        fail_every_statement(how, |_| Call::Delete).await;
    }
}

#[tokio::test]
async fn a_rewrite_with_a_failing_statement_never_happened() {
    for how in [How::NotDone, How::Done, How::RolledBack] {
        fail_every_statement(how, |_| Call::Prune).await;
    }
}

#[tokio::test]
async fn a_rewrite_frees_what_nothing_refers_to_any_more() {
    let store = Opened::new();
    let (mut talk, mut other) = (Talk::new("t"), Talk::new("other"));
    for number in 0..5 {
        store.say(&mut talk, number).await;
        store.say(&mut other, number).await;
    }
    let count = || {
        let conn = rusqlite::Connection::open(store.dir.path().join("db")).unwrap();
        let one = |sql| conn.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap();
        (one("SELECT count(*) FROM element"), one("SELECT count(*) FROM checkpoint"))
    };
    let (elements, checkpoints) = count();
    // The head replaces its list by one message.
    let mut image = store.saver.read_thread(&talk.thread).await.unwrap();
    let (_, mut head) = image.checkpoints.pop_last().unwrap();
    head.parent = None;
    head.checkpoint.applied.clear();
    let only = Stored::Value(talk.messages.iter().skip(4).cloned().collect::<ListValue>().into());
    head.checkpoint.channels.get_mut("messages").unwrap().stored = only.clone();
    let rewrite = Rewrite { remove: image.checkpoints.into_keys().collect(), put: vec![head] };
    store.saver.rewrite_thread(&talk.thread, &image.revision, rewrite).await.unwrap();
    assert_eq!(count(), (elements - 4, checkpoints - 4), "four messages and four checkpoints are gone");
    let head = store.saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    assert_eq!(head.checkpoint.channels["messages"].stored, only);
    assert_eq!(all(&store.saver, &other).await.len(), 5, "another thread keeps what it has");

    let image = store.saver.read_thread(&talk.thread).await.unwrap();
    let nothing = Rewrite { remove: image.checkpoints.into_keys().collect(), put: vec![] };
    store.saver.rewrite_thread(&talk.thread, &image.revision, nothing).await.unwrap();
    assert_eq!(count(), (elements / 2, checkpoints / 2));
}

#[tokio::test]
async fn a_refused_command_leaves_the_others_of_its_transaction() {
    let store = Opened::new();
    let mut talks: Vec<_> = (0..5).map(|i| Talk::new(&format!("t{i}"))).collect();
    for talk in &mut talks {
        store.say(talk, 0).await;
    }
    let before = store.saver.stats().transactions;
    let lock = store.lock();
    let steps: Vec<_> = talks
        .iter()
        .enumerate()
        .map(|(i, talk)| {
            let mut step = talk.say(&message(1, 300));
            if i == 2 {
                step.expected_head = None;
            }
            step
        })
        .collect();
    let mut waiting: Vec<_> = steps.iter().map(|step| store.saver.commit(step.clone())).collect();
    for future in &mut waiting {
        assert!(future.now_or_never().is_none(), "the lock is held");
    }
    lock.execute_batch("ROLLBACK").unwrap();
    let results = futures::future::join_all(waiting).await;
    for (i, result) in results.iter().enumerate() {
        assert_eq!(matches!(result, Err(Error::Conflict { .. })), i == 2, "{result:?}");
        assert_eq!(result.is_ok(), i != 2);
        assert_eq!(all(&store.saver, &talks[i]).await.len(), if i == 2 { 1 } else { 2 });
    }
    assert_eq!(store.saver.stats().transactions, before + 1, "five commands were committed together");
}

#[tokio::test]
async fn a_command_that_fails_takes_nothing_of_the_others_with_it() {
    let store = Opened::new();
    let mut talks = [Talk::new("a"), Talk::new("b"), Talk::new("c")];
    for talk in &mut talks {
        store.say(talk, 0).await;
    }
    let lock = store.lock();
    store.faults().arm(1, How::NotDone, "INSERT INTO checkpoint");
    let mut waiting: Vec<_> =
        talks.iter().map(|talk| store.saver.commit(talk.say(&message(1, 300)))).collect();
    for future in &mut waiting {
        assert!(future.now_or_never().is_none());
    }
    drop(lock);
    let results = futures::future::join_all(waiting).await;
    assert!(matches!(results[..], [Ok(_), Err(Error::Unavailable { .. }), Ok(_)]), "{results:?}");
    for (talk, count) in talks.iter().zip([2, 1, 2]) {
        assert_eq!(all(&store.saver, talk).await.len(), count);
    }
}

#[tokio::test]
async fn a_locked_database_is_unavailable_and_works_again_when_the_lock_is_gone() {
    let store = Opened::with(Options { busy_timeout: Duration::from_millis(20), ..Options::default() });
    let mut talk = Talk::new("t");
    store.say(&mut talk, 0).await;
    let lock = store.lock();
    let step = talk.say(&message(1, 300));
    let error = store.saver.commit(step.clone()).await.unwrap_err();
    assert!(matches!(&error, Error::Unavailable { reason, .. } if reason.contains(LOCKED)), "{error}");
    assert_eq!(all(&store.saver, &talk).await.len(), 1, "reads go on");
    drop(lock);
    store.saver.commit(step).await.unwrap();
}

#[tokio::test]
async fn callers_that_waited_for_the_same_lock_get_the_error_at_the_same_time() {
    let store = Opened::with(Options { busy_timeout: Duration::from_millis(20), ..Options::default() });
    let talks: Vec<_> = (0..4).map(|i| Talk::new(&format!("t{i}"))).collect();
    let lock = store.lock();
    let mut waiting: Vec<_> =
        talks.iter().map(|talk| store.saver.commit(talk.say(&message(0, 300)))).collect();
    {
        // All begin before the first one can give up, however busy the machine is.
        let _held = store.saver.writer.held();
        for future in &mut waiting {
            assert!(future.now_or_never().is_none(), "the lock is held");
        }
    }
    let first = waiting.remove(0).await;
    // A later attempt would succeed.
    drop(lock);
    let results = futures::future::join_all(waiting).await;
    for result in [first].into_iter().chain(results) {
        assert!(matches!(result, Err(Error::Unavailable { .. })), "{result:?}");
    }
}

/// A caller that waited for a place in a full queue, and is not polled any more: neither the others wait for it, nor
/// does the closing of the store.
#[tokio::test]
async fn stalled_callers_hold_up_nobody() {
    let store = Opened::new();
    let thread = ThreadId::from("t");
    let flush = || store.saver.flush(&thread);
    let lock = store.lock();
    let mut first = flush();
    assert!(first.as_mut().now_or_never().is_none(), "the lock is held");
    while store.saver.queued() > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let mut queued: Vec<_> = (0..QUEUE).map(|_| flush()).collect();
    let mut stalled: Vec<_> = (0..QUEUE).map(|_| flush()).collect();
    for future in queued.iter_mut().chain(&mut stalled) {
        assert!(future.now_or_never().is_none(), "the lock is held");
    }
    assert_eq!(store.saver.queued(), QUEUE);
    lock.execute_batch("ROLLBACK").unwrap();
    first.await.unwrap();
    for result in futures::future::join_all(queued).await {
        result.unwrap();
    }
    let patience = patient().busy_timeout;
    let new = tokio::time::timeout(patience, flush()).await;
    new.expect("it waits for those that are stalled").unwrap();
    let closed = tokio::time::timeout(patience, store.saver.close()).await;
    closed.expect("it waits for those that are stalled");
    for result in futures::future::join_all(stalled).await {
        assert!(matches!(&result, Err(Error::Unavailable { reason, .. }) if reason == CLOSED), "{result:?}");
    }
}

/// A place that becomes free is taken by those who wait for one.
#[tokio::test]
async fn callers_that_wait_for_a_place_get_their_turn() {
    let store = Opened::new();
    let thread = ThreadId::from("t");
    let lock = store.lock();
    let mut waiting: Vec<_> = (0..3 * QUEUE).map(|_| store.saver.flush(&thread)).collect();
    for future in &mut waiting {
        assert!(future.now_or_never().is_none(), "the lock is held");
    }
    lock.execute_batch("ROLLBACK").unwrap();
    let done = tokio::time::timeout(patient().busy_timeout, futures::future::join_all(waiting)).await;
    for result in done.expect("nobody wakes them") {
        result.unwrap();
    }
}

#[tokio::test]
async fn a_full_disk_is_unavailable_and_the_store_goes_on_when_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    // A dictionary that is trained has no room either.
    let options = Options { compression: false, ..Options::default() };
    options.faults.bound(40);
    let saver = SqliteSaver::open(&path, &options).unwrap();
    let (mut talk, mut other) = (Talk::new("t"), Talk::new("other"));
    let first = other.say(&message(0, 300));
    saver.commit(first.clone()).await.unwrap();
    other.accept(&first);
    let mut stored = 0;
    let error = loop {
        let step = talk.say(&message(stored, 10_000));
        match saver.commit(step.clone()).await {
            Ok(_) => talk.accept(&step),
            Err(error) => break error,
        }
        stored += 1;
        assert!(stored < 1000, "the bound has no effect");
    };
    assert!(matches!(&error, Error::Unavailable { reason, .. } if reason.contains(FULL)), "{error}");
    assert_eq!(all(&saver, &talk).await.len(), stored, "everything acknowledged is there, and no more");
    saver.delete_thread(&talk.thread).await.unwrap();
    let step = other.say(&message(1, 10_000));
    saver.commit(step).await.unwrap();
    assert_eq!(all(&saver, &other).await.len(), 2);
}

/// A commit whose future is dropped happens all the same, in order.
#[tokio::test]
async fn a_dropped_future_does_not_cancel_its_command() {
    let store = Opened::new();
    let mut talk = Talk::new("t");
    store.say(&mut talk, 0).await;
    let lock = store.lock();
    let step = talk.say(&message(1, 300));
    let mut future = Box::pin(store.saver.commit(step.clone()));
    assert!(future.as_mut().now_or_never().is_none());
    drop(future);
    talk.accept(&step);
    drop(lock);
    store.say(&mut talk, 2).await;
    assert_eq!(all(&store.saver, &talk).await.len(), 3);
}

#[tokio::test]
async fn close_carries_out_what_is_queued_and_later_calls_are_refused() {
    let store = Opened::new();
    let mut talk = Talk::new("t");
    store.say(&mut talk, 0).await;
    let lock = store.lock();
    let step = talk.say(&message(1, 300));
    let commit = store.saver.commit(step);
    let mut commit = Box::pin(commit);
    assert!(commit.as_mut().now_or_never().is_none());
    let mut close = Box::pin(store.saver.close());
    assert!(close.as_mut().now_or_never().is_none());
    drop(lock);
    close.await;
    commit.await.unwrap();
    store.saver.close().await;
    let head = CheckpointSelector::head(&talk.thread);
    assert!(matches!(store.saver.get(&head).await, Err(Error::Unavailable { .. })));
    assert!(matches!(store.saver.delete_thread(&talk.thread).await, Err(Error::Unavailable { .. })));
    assert!(!store.dir.path().join("db-wal").exists(), "the log was moved into the database");
    assert_eq!(all(&store.reopen(), &talk).await.len(), 2);
}

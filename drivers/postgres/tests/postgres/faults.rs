//! The outcome of a write when the connection is cut at any of its requests, before or after the server carried it out,
//! and when any of its statements fails in the server.

use std::sync::atomic::{AtomicUsize, Ordering};

use threadkeep::checkpoint::{CheckpointKey, TaskWrites};
use threadkeep::id::ThreadId;
use threadkeep::saver::{Revision, Rewrite, Saver, StepCommit, ThreadImage};
use threadkeep::{Error, Result};
use threadkeep_postgres::PostgresSaver;

use crate::common::proxy::{Cut, Proxy};
use crate::common::talk::{Talk, note};
use crate::common::{database, open, open_impatient};

/// A write, and how to repeat it.
#[derive(Debug, Clone)]
enum Write {
    Commit(StepCommit),
    Put(CheckpointKey, TaskWrites),
    Delete(ThreadId),
    Rewrite(ThreadId, Revision, Rewrite),
}

impl Write {
    async fn run(&self, saver: &PostgresSaver) -> Result<()> {
        match self.clone() {
            Self::Commit(step) => saver.commit(step).await.map(|_| ()),
            Self::Put(at, task) => saver.put_writes(&at, &task).await,
            Self::Delete(thread) => saver.delete_thread(&thread).await,
            Self::Rewrite(thread, revision, rewrite) => {
                saver.rewrite_thread(&thread, &revision, rewrite).await
            }
        }
    }
}

const KINDS: [&str; 8] = [
    "first commit",
    "commit",
    "commit with pending rows",
    "commit to an unknown thread",
    "put_writes",
    "delete_thread",
    "rewrite_thread",
    "rewrite_thread, a long new thread",
];
/// Checkpoints of the long one: three statements.
const LONG: usize = 260;

/// A thread of its own for each attempt, made by `maker`; `subject` is the saver that will do the write, and may know
/// the thread already.
async fn prepare(kind: &str, maker: &PostgresSaver, subject: &PostgresSaver) -> (ThreadId, Write) {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    let mut talk = Talk::new(&format!("t{}", THREADS.fetch_add(1, Ordering::Relaxed)));
    let thread = talk.thread.clone();
    if kind == "first commit" {
        return (thread, Write::Commit(talk.say(&note(0))));
    }
    if kind == "rewrite_thread, a long new thread" {
        let mut put: Vec<_> = long_thread(maker).await.checkpoints.into_values().collect();
        for tuple in &mut put {
            tuple.thread = thread.clone();
        }
        return (
            thread,
            Write::Rewrite(talk.thread, Revision::absent(), Rewrite { put, ..Rewrite::default() }),
        );
    }
    let writer = if kind == "commit to an unknown thread" { maker } else { subject };
    for n in 0..4 {
        let step = talk.say(&note(n));
        writer.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    }
    let write = match kind {
        "put_writes" => Write::Put(talk.key(), talk.task(talk.messages.last().unwrap())),
        "commit with pending rows" => {
            let row = |n: usize| talk.task(talk.messages.get(n).unwrap());
            let pending = vec![row(0), row(1)];
            Write::Commit(StepCommit { pending, ..talk.say(&note(4)) })
        }
        "delete_thread" => Write::Delete(thread.clone()),
        "rewrite_thread" => {
            let image = maker.read_thread(&thread).await.unwrap();
            let (place, tuple) = image.checkpoints.last_key_value().unwrap();
            let mut other = tuple.clone();
            other.checkpoint.id = talk.ids.checkpoint_after(talk.head);
            let rewrite = Rewrite { remove: [place.clone()].into(), put: vec![other] };
            Write::Rewrite(thread.clone(), image.revision, rewrite)
        }
        _ => Write::Commit(talk.say(&note(4))),
    };
    (thread, write)
}

/// The thread that is copied, made when it is first asked for.
async fn long_thread(maker: &PostgresSaver) -> ThreadImage {
    let mut talk = Talk::new("long");
    let image = maker.read_thread(&talk.thread).await.unwrap();
    if !image.checkpoints.is_empty() {
        return image;
    }
    for n in 0..LONG {
        let step = talk.say(&note(n));
        maker.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    }
    maker.read_thread(&talk.thread).await.unwrap()
}

/// What is stored, without the revision, which differs in each life.
async fn stored(saver: &PostgresSaver, thread: &ThreadId) -> ThreadImage {
    ThreadImage { revision: Revision::absent(), ..saver.read_thread(thread).await.unwrap() }
}

/// The thread after a write of this kind without failures.
async fn after(kind: &str, maker: &PostgresSaver, thread: &ThreadId, write: &Write) -> ThreadImage {
    // On a copy of the thread, which is then deleted: the write itself is still to come.
    let copy: ThreadId = format!("{thread}-copy").into();
    let image = maker.read_thread(thread).await.unwrap();
    let put = image.checkpoints.into_values().map(|mut tuple| {
        tuple.thread = copy.clone();
        tuple
    });
    let put: Vec<_> = put.collect();
    if !put.is_empty() {
        maker
            .rewrite_thread(&copy, &Revision::absent(), Rewrite { put, ..Rewrite::default() })
            .await
            .unwrap();
    }
    let there = match write.clone() {
        Write::Commit(step) => Write::Commit(StepCommit { thread: copy.clone(), ..step }),
        Write::Put(at, task) => Write::Put(CheckpointKey { thread: copy.clone(), ..at }, task),
        Write::Delete(_) => Write::Delete(copy.clone()),
        Write::Rewrite(_, _, mut rewrite) => {
            rewrite.put.iter_mut().for_each(|tuple| tuple.thread = copy.clone());
            let revision = maker.read_thread(&copy).await.unwrap().revision;
            Write::Rewrite(copy.clone(), revision, rewrite)
        }
    };
    there.run(maker).await.unwrap_or_else(|error| panic!("{kind}: {error}"));
    let mut image = stored(maker, &copy).await;
    image.thread = thread.clone();
    image.checkpoints.values_mut().for_each(|tuple| tuple.thread = thread.clone());
    image
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_is_cut_off_happened_whole_or_not_at_all_and_can_be_repeated() {
    let database = database().await;
    let proxy = Proxy::before(database.url()).await;
    let maker = open(database.url()).await;
    for kind in KINDS {
        let mut cuts = 0;
        for cut in [Cut::Before, Cut::After, Cut::Stray] {
            for nth in 0.. {
                let subject = open_impatient(proxy.url()).await;
                let (thread, write) = prepare(kind, &maker, &subject).await;
                let before = stored(&maker, &thread).await;
                let after = after(kind, &maker, &thread, &write).await;
                assert_ne!(before, after);
                proxy.cut(nth, cut);
                let done = write.run(&subject).await;
                if !proxy.mend() {
                    assert_eq!(done, Ok(()), "{kind}, nothing cut");
                    break;
                }
                cuts += 1;
                let what = format!("{kind}, {cut:?} request {nth}: {done:?}");
                let found = stored(&maker, &thread).await;
                match &done {
                    Ok(()) => assert_eq!(found, after, "{what}"),
                    Err(Error::Unavailable { .. }) => assert_eq!(found, before, "{what}"),
                    Err(Error::InDoubt { .. }) => assert!(found == before || found == after, "{what}"),
                    Err(other) => panic!("{what}: {other}"),
                }
                match write.run(&subject).await {
                    Ok(()) => {}
                    // After a repeated rewrite, the caller must check whether it happened. One in doubt may still be in
                    // progress then.
                    Err(Error::Stale { .. })
                        if matches!(write, Write::Rewrite(..))
                            && (found == after || matches!(done, Err(Error::InDoubt { .. }))) => {}
                    Err(error) => panic!("{what}, repeated: {error}"),
                }
                assert_eq!(stored(&maker, &thread).await, after, "{what}, repeated");
            }
        }
        assert!(cuts >= 2, "{kind} was cut {cuts} times");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_patient_saver_gets_every_write_done_exactly_once() {
    let database = database().await;
    let proxy = Proxy::before(database.url()).await;
    let maker = open(database.url()).await;
    for kind in KINDS {
        let mut cuts = 0;
        for cut in [Cut::Before, Cut::After, Cut::Stray] {
            for nth in 0.. {
                let subject = open(proxy.url()).await;
                let (thread, write) = prepare(kind, &maker, &subject).await;
                let after = after(kind, &maker, &thread, &write).await;
                proxy.cut(nth, cut);
                let done = write.run(&subject).await;
                let was_cut = proxy.mend();
                assert_eq!(done, Ok(()), "{kind}, {cut:?} request {nth}");
                assert_eq!(stored(&maker, &thread).await, after, "{kind}, {cut:?} request {nth}");
                if !was_cut {
                    break;
                }
                cuts += 1;
            }
        }
        assert!(cuts >= 2, "{kind} was cut {cuts} times");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_whose_future_is_dropped_happened_whole_or_not_at_all() {
    let database = database().await;
    let maker = open(database.url()).await;
    let subject = open(database.url()).await;
    for kind in KINDS {
        // Polled this many times, each time when it was woken, and then dropped.
        for polls in 1..40 {
            let (thread, write) = prepare(kind, &maker, &subject).await;
            let before = stored(&maker, &thread).await;
            let after = after(kind, &maker, &thread, &write).await;
            let done = {
                let mut running = Box::pin(write.run(&subject));
                let mut left = polls;
                std::future::poll_fn(|cx| {
                    left -= 1;
                    match running.as_mut().poll(cx) {
                        std::task::Poll::Ready(done) => std::task::Poll::Ready(Some(done)),
                        std::task::Poll::Pending if left == 0 => std::task::Poll::Ready(None),
                        std::task::Poll::Pending => std::task::Poll::Pending,
                    }
                })
                .await
            };
            if let Some(done) = done {
                assert_eq!(done, Ok(()), "{kind}");
                assert_eq!(stored(&maker, &thread).await, after, "{kind}");
                break;
            }
            let found = stored(&maker, &thread).await;
            assert!(found == before || found == after, "{kind}, dropped after {polls} polls: {found:?}");
            // The saver continues, and what is in progress does not interfere.
            match write.run(&subject).await {
                Ok(()) => {}
                Err(Error::Stale { .. }) if matches!(write, Write::Rewrite(..)) => {}
                Err(error) => panic!("{kind}, repeated after {polls} polls: {error}"),
            }
            assert_eq!(stored(&maker, &thread).await, after, "{kind}, dropped after {polls} polls, repeated");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_of_which_one_statement_fails_leaves_nothing_and_can_be_repeated() {
    let database = database().await;
    let maker = open(database.url()).await;
    let client = crate::common::damage::connect(database.url()).await;
    let fail = "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN RAISE EXCEPTION 'the % of % fails', TG_OP, TG_TABLE_NAME; END $$";
    client.batch_execute(fail).await.unwrap();
    for kind in KINDS {
        let mut failed = Vec::new();
        for table in ["thread", "element", "checkpoint", "head"] {
            for event in ["INSERT", "UPDATE", "DELETE"] {
                for moment in ["BEFORE", "AFTER"] {
                    let subject = open_impatient(database.url()).await;
                    let (thread, write) = prepare(kind, &maker, &subject).await;
                    let before = stored(&maker, &thread).await;
                    let after = after(kind, &maker, &thread, &write).await;
                    let trigger = format!(
                        "CREATE TRIGGER fail {moment} {event} ON threadkeep_{table} FOR EACH ROW EXECUTE FUNCTION fail()"
                    );
                    client.batch_execute(&trigger).await.unwrap();
                    let done = write.run(&subject).await;
                    client.batch_execute(&format!("DROP TRIGGER fail ON threadkeep_{table}")).await.unwrap();
                    let what = format!("{kind}, {moment} {event} of {table}");
                    if done.is_ok() {
                        assert_eq!(stored(&maker, &thread).await, after, "{what}");
                        continue;
                    }
                    let told = done.unwrap_err().to_string();
                    assert!(
                        told.contains(&format!("the {event} of threadkeep_{table} fails")),
                        "{what}: {told}"
                    );
                    assert_eq!(stored(&maker, &thread).await, before, "{what}");
                    assert_eq!(write.run(&subject).await, Ok(()), "{what}, repeated");
                    assert_eq!(stored(&maker, &thread).await, after, "{what}, repeated");
                    failed.push((table, event));
                }
            }
        }
        failed.dedup();
        // A row that may exist already is inserted first, then updated.
        let both = &["INSERT", "UPDATE"];
        // A deletion inserts a row to reserve the thread's key, or updates the existing one.
        let claim = &["INSERT", "UPDATE", "DELETE"];
        let [thread, element, checkpoint, head]: [&[&str]; 4] = match kind {
            "first commit" => [&["INSERT"]; 4],
            // Onto a head that the saver knows: that row exists.
            "commit" => [&["UPDATE"], &["INSERT"], both, &["UPDATE"]],
            "delete_thread" => [claim, &["DELETE"], &["DELETE"], &["DELETE"]],
            "put_writes" => [&["UPDATE"], &[], both, &[]],
            "rewrite_thread" => [&["UPDATE"], &[], &["INSERT", "DELETE"], both],
            // The first statement creates it, the others update it.
            "rewrite_thread, a long new thread" => [both, &["INSERT"], &["INSERT"], &["INSERT"]],
            _ => [&["UPDATE"], &["INSERT"], both, both],
        };
        let expected = [("thread", thread), ("element", element), ("checkpoint", checkpoint), ("head", head)];
        let expected: Vec<_> =
            expected.iter().flat_map(|(table, events)| events.iter().map(|event| (*table, *event))).collect();
        assert_eq!(failed, expected, "{kind}");
    }
}

/// Each saver finds the thread missing; all but one find it created when they begin to write.
#[tokio::test(flavor = "multi_thread")]
async fn of_several_copies_to_one_thread_one_is_made() {
    let database = database().await;
    let maker = open(database.url()).await;
    let savers = futures::future::join_all((0..3).map(|_| open(database.url()))).await;
    for _ in 0..5 {
        let (thread, write) = prepare("rewrite_thread, a long new thread", &maker, &maker).await;
        let done = futures::future::join_all(savers.iter().map(|saver| write.run(saver))).await;
        let refused = done.iter().filter(|done| matches!(done, Err(Error::Stale { .. }))).count();
        assert!(refused == 2 && done.contains(&Ok(())), "{done:?}");
        let mut copy = stored(&maker, &thread).await;
        copy.checkpoints.values_mut().for_each(|tuple| tuple.thread = "long".into());
        assert!(copy.checkpoints == long_thread(&maker).await.checkpoints);
    }
}

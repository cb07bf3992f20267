//! A long new thread is written in pieces: complete or absent, whatever fails, and others get their turn in between.

use std::future::poll_fn;
use std::task::Poll;

use threadkeep::id::ThreadId;
use threadkeep::saver::{Revision, Rewrite, Saver, ThreadImage};
use threadkeep::value::{Element, ListValue};
use threadkeep::{Error, Result};

use super::common::{Talk, message};
use super::faults::How;
use super::statements::{Opened, patient, rich};
use crate::write::commit::Work;
use crate::write::stage::Piece;
use crate::{Options, SqliteSaver};

const COPY: &str = "copy";

/// A store whose new threads are written in pieces of this many checkpoints.
pub(super) fn store(piece: usize) -> Opened {
    // The tests count transactions, and how often the writer is waited for: no dictionary is trained meanwhile.
    Opened::with(Options { piece, compression: false, ..patient() })
}

/// A thread of this many steps with a fork, a second namespace, a note that repeats its parent, and a pending row.
pub(super) async fn thread(store: &Opened, steps: usize) -> Talk {
    let mut talk = Talk::new("t");
    for number in 0..steps {
        let step = rich(&talk, number);
        store.saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    }
    let note = talk.empty();
    store.saver.commit(note.clone()).await.unwrap();
    talk.accept(&note);
    let root = store.saver.read_thread(&talk.thread).await.unwrap().checkpoints.into_keys().next().unwrap().1;
    let mut fork = rich(&talk, 77);
    fork.parent = Some(root);
    store.saver.commit(fork.clone()).await.unwrap();
    talk.head = Some(fork.checkpoint.id);
    store.saver.put_writes(&talk.key(), &rich(&talk, 78).writes.remove(0)).await.unwrap();
    for number in 0..3 {
        let mut inner = Talk { namespace: "inner".into(), ..Talk::new("t") };
        inner.head =
            store.saver.list(&inner_of(&talk)).await.unwrap().first().map(|tuple| tuple.checkpoint.id);
        let mut step = inner.say(&message(number, 300));
        step.writes.clear();
        step.checkpoint.applied.clear();
        store.saver.commit(step).await.unwrap();
    }
    talk
}

fn inner_of(talk: &Talk) -> threadkeep::saver::ListQuery {
    threadkeep::saver::ListQuery {
        namespace: Some("inner".into()),
        ..threadkeep::saver::ListQuery::new(&talk.thread)
    }
}

/// How a copy is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Rows as they are stored.
    Rows,
    /// Checkpoints that were read.
    Put,
}

const WAYS: [Way; 2] = [Way::Rows, Way::Put];

async fn copy(saver: &SqliteSaver, way: Way) -> Result<usize> {
    let (from, to) = (ThreadId::from("t"), ThreadId::from(COPY));
    match way {
        Way::Rows => saver.copy_thread(&from, &to).await,
        Way::Put => {
            let mut put: Vec<_> = saver.read_thread(&from).await?.checkpoints.into_values().collect();
            for tuple in &mut put {
                tuple.thread = to.clone();
            }
            let count = put.len();
            let rewrite = Rewrite { put, ..Rewrite::default() };
            saver.rewrite_thread(&to, &Revision::absent(), rewrite).await?;
            Ok(count)
        }
    }
}

/// The copy with the name of its source.
async fn copied(saver: &SqliteSaver) -> ThreadImage {
    let mut image = saver.read_thread(&COPY.into()).await.unwrap();
    image.thread = "t".into();
    image.checkpoints.values_mut().for_each(|tuple| tuple.thread = "t".into());
    image
}

#[tokio::test]
async fn a_thread_in_pieces_is_the_thread() {
    let mut sizes = Vec::new();
    for (piece, way) in [1, 2, 7, 1000].into_iter().flat_map(|piece| WAYS.map(|way| (piece, way))) {
        let store = store(piece);
        let talk = thread(&store, 30).await;
        let source = store.saver.read_thread(&talk.thread).await.unwrap();
        assert_eq!(copy(&store.saver, way).await.unwrap(), source.checkpoints.len());
        let image = copied(&store.saver).await;
        assert!(image.checkpoints == source.checkpoints, "pieces of {piece}, {way:?}");
        assert_eq!(store.saver.check().await.unwrap(), []);
        let threads = store.saver.threads(None, 9).await.unwrap();
        assert_eq!(threads, [ThreadId::from(COPY), talk.thread.clone()]);
        sizes.push(store.saver.stored_bytes(&COPY.into()).await.unwrap());
        // It is an ordinary thread: it goes on, and is pruned and deleted as one.
        let image = store.saver.read_thread(&COPY.into()).await.unwrap();
        let head = image.checkpoints.values().rfind(|tuple| tuple.namespace.as_str().is_empty()).unwrap();
        let mut again = Talk::new(COPY);
        again.resume(head);
        store.say(&mut again, 99).await;
        store.saver.delete_thread(&COPY.into()).await.unwrap();
        assert_eq!(store.saver.check().await.unwrap(), []);
        assert!(copied(&store.saver).await.checkpoints.is_empty());
    }
    let (least, most) = (*sizes.iter().min().unwrap(), *sizes.iter().max().unwrap());
    assert!(most * 10 <= least * 11, "{sizes:?}");
}

/// A transaction writes one piece, and a lookup of an element is made for what a checkpoint adds, not for its list.
#[tokio::test]
async fn a_copy_costs_what_its_checkpoints_add() {
    let cost = async |steps: usize| {
        let store = store(8);
        thread(&store, steps).await;
        let before = store.saver.stats();
        copy(&store.saver, Way::Put).await.unwrap();
        let after = store.saver.stats();
        let transactions = after.transactions - before.transactions;
        assert!(transactions >= steps as u64 / 8, "{transactions} transactions for {steps} checkpoints");
        after.elements_examined - before.elements_examined
    };
    let (short, long) = (cost(40).await, cost(160).await);
    assert!(long <= 5 * short, "{short} elements looked up for 40 steps, {long} for 160");
}

/// Nor does it if the thread has few checkpoints and many elements: in one list, and in lists that replace each other.
#[tokio::test]
async fn no_transaction_of_a_copy_grows_with_the_elements_of_a_short_thread() {
    let most = async |elements: usize, lists: usize, way: Way| {
        let store = store(8);
        let mut talk = Talk::new("t");
        for list in 0..lists {
            talk.messages = ListValue::default();
            for number in 0..elements / lists {
                talk.messages.push(Element::from_json(&message(list * elements + number, 40)).unwrap());
            }
            store.say(&mut talk, list * elements + elements).await;
        }
        let source = store.saver.read_thread(&talk.thread).await.unwrap();
        // A handle of its own counts the copy only.
        let saver = SqliteSaver::open(store.dir.path().join("db"), &store.options).unwrap();
        copy(&saver, way).await.unwrap();
        assert!(copied(&saver).await.checkpoints == source.checkpoints);
        saver.close().await;
        saver.stats().most_rows
    };
    for (lists, way) in [1, 4].into_iter().flat_map(|lists| WAYS.map(|way| (lists, way))) {
        let (few, many) = (most(200, lists, way).await, most(800, lists, way).await);
        assert!(few > 40 && many * 4 <= few * 5, "{lists} lists: {few} rows in a transaction, then {many}");
    }
}

#[tokio::test]
async fn others_write_between_the_pieces_and_see_nothing_of_them() {
    for way in WAYS {
        others_write_between_the_pieces_of(way).await;
    }
}

async fn others_write_between_the_pieces_of(way: Way) {
    let store = store(4);
    thread(&store, 60).await;
    let (mut copying, mut other) = (Box::pin(copy(&store.saver, way)), Talk::new("other"));
    let mut turns = 0;
    let copied = loop {
        tokio::select! {
            biased;
            copied = &mut copying => break copied,
            () = store.say(&mut other, turns) => {
                turns += 1;
                let there = store.saver.threads(None, 9).await.unwrap();
                assert!(there.iter().all(|thread| ["t", "other", COPY].contains(&thread.as_str())), "{there:?}");
                assert_eq!(store.saver.check().await.unwrap(), [], "a copy at work is no defect");
            }
        }
    };
    assert_eq!(copied.unwrap(), 65);
    assert!(turns >= 4, "{way:?}: {turns} turns while pieces were written");
}

#[tokio::test]
async fn a_copy_with_a_failing_statement_never_happened() {
    let hows = [How::NotDone, How::Done, How::RolledBack, How::NoRoom];
    for (how, way) in hows.into_iter().flat_map(|how| WAYS.map(|way| (how, way))) {
        for nth in (0..).step_by(7) {
            let store = store(2);
            thread(&store, 3).await;
            store.faults().arm(nth, how, "");
            let result = copy(&store.saver, way).await;
            if !store.faults().disarm() {
                result.unwrap();
                assert!(nth > 40, "only {nth} statements were met");
                break;
            }
            match result {
                Err(Error::Unavailable { .. }) => {
                    assert!(copied(&store.saver).await.checkpoints.is_empty(), "{how:?} {nth}");
                    assert_eq!(store.saver.threads(None, 9).await.unwrap().len(), 1);
                    // A failed commit of a piece has closed this handle for writing.
                    let options = Options { piece: 2, ..patient() };
                    let again = SqliteSaver::open(store.dir.path().join("db"), &options).unwrap();
                    copy(&again, way).await.unwrap();
                    again.close().await;
                }
                // The last COMMIT, or a piece that was discarded.
                Err(Error::InDoubt { .. }) => {
                    let reopened = store.reopen();
                    let source = reopened.read_thread(&"t".into()).await.unwrap();
                    let found = copied(&reopened).await.checkpoints;
                    assert!(found.is_empty() || found == source.checkpoints, "{how:?} {nth}");
                    // Refused if it is there.
                    assert_eq!(copy(&reopened, way).await.is_ok(), found.is_empty(), "{how:?} {nth}");
                    assert!(copied(&reopened).await.checkpoints == source.checkpoints, "{how:?} {nth}");
                    reopened.close().await;
                    continue;
                }
                other => panic!("{how:?}, statement {nth}: {other:?}"),
            }
            let source = store.saver.read_thread(&"t".into()).await.unwrap();
            assert!(copied(&store.saver).await.checkpoints == source.checkpoints, "{how:?} {nth}");
            assert_eq!(store.saver.check().await.unwrap(), [], "{how:?} {nth}");
        }
    }
}

/// What is repeated of it is refused, and so known not to be stored; of the first attempt that is unknown.
#[tokio::test]
async fn a_copy_or_rewrite_in_doubt_stays_in_doubt_when_it_is_repeated() {
    for way in [None, Some(Way::Put), Some(Way::Rows)] {
        let mut doubts = 0;
        for nth in 0.. {
            let store = store(2);
            let talk = thread(&store, 3).await;
            let source = store.saver.read_thread(&talk.thread).await.unwrap();
            let (to, expected) = if way.is_some() {
                (COPY.into(), Revision::absent())
            } else {
                ("t".into(), source.revision.clone())
            };
            let mut put: Vec<_> = source.checkpoints.values().cloned().collect();
            for tuple in &mut put {
                tuple.thread = ThreadId::clone(&to);
            }
            let again = async || {
                if way == Some(Way::Rows) {
                    return copy(&store.saver, Way::Rows).await.map(drop);
                }
                let rewrite = Rewrite { put: put.clone(), ..Rewrite::default() };
                store.saver.rewrite_thread(&to, &expected, rewrite).await
            };
            store.faults().arm(nth, How::NotDone, "COMMIT");
            let first = again().await;
            store.faults().disarm();
            if first.is_ok() {
                // Of what comes after it, nobody waits for anything.
                break;
            }
            if matches!(first, Err(Error::InDoubt { .. })) {
                doubts += 1;
                for other in WAYS.into_iter().filter(|_| way.is_some()) {
                    let copied = copy(&store.saver, other).await;
                    assert!(matches!(copied, Err(Error::InDoubt { .. })), "{way:?}, {other:?}: {copied:?}");
                }
                for closed in [false, true] {
                    let repeated = again().await;
                    assert!(matches!(repeated, Err(Error::InDoubt { .. })), "closed: {closed}: {repeated:?}");
                    store.saver.close().await;
                }
            } else {
                // A piece, which nobody can see.
                for _ in 0..2 {
                    let repeated = again().await;
                    assert!(matches!(repeated, Err(Error::Unavailable { .. })), "{repeated:?}");
                    store.saver.close().await;
                }
            }
        }
        assert_eq!(doubts, 1, "only the last transaction is in doubt");
    }
}

/// A rewrite in one transaction looks first whether its thread is long, and may fail there.
#[tokio::test]
async fn a_short_rewrite_in_doubt_stays_in_doubt_after_close() {
    let store = store(1000);
    let talk = thread(&store, 3).await;
    let source = store.saver.read_thread(&talk.thread).await.unwrap();
    let remove: std::collections::BTreeSet<_> = source.checkpoints.keys().cloned().collect();
    let again = async || {
        let rewrite = Rewrite { remove: remove.clone(), ..Rewrite::default() };
        store.saver.rewrite_thread(&talk.thread, &source.revision, rewrite).await
    };
    store.faults().arm(0, How::NotDone, "COMMIT");
    for closed in [false, false, true] {
        if closed {
            store.saver.close().await;
        }
        let repeated = again().await;
        assert!(matches!(repeated, Err(Error::InDoubt { .. })), "closed: {closed}: {repeated:?}");
    }
    let other = store.saver.rewrite_thread(&COPY.into(), &Revision::absent(), Rewrite::default()).await;
    assert!(matches!(other, Err(Error::Unavailable { .. })), "{other:?}");
}

/// Waits until the database has no rows of threads that nobody can find.
pub(super) async fn nothing_remains(store: &Opened) {
    let rows = || {
        let conn = rusqlite::Connection::open(store.dir.path().join("db")).unwrap();
        let hidden = "SELECT count(*) FROM scope WHERE owner >= 4294967294";
        conn.query_row(hidden, [], |row| row.get::<_, i64>(0)).unwrap()
    };
    let cleared = async {
        while rows() > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    let patience = std::time::Duration::from_mins(10);
    tokio::time::timeout(patience, cleared).await.expect("hidden threads are left");
}

/// When a future is dropped, after it was polled for the last time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum When {
    /// Before the writer has begun with what was ordered.
    Queued,
    /// At once: the writer may be anywhere.
    AtOnce,
    /// When the answer is there, and nobody has seen it.
    Answered,
}

pub(super) const MOMENTS: [When; 3] = [When::Queued, When::AtOnce, When::Answered];

/// Polls a future this many times, each time when it was woken, and drops it. Returns its result if it has ended by
/// then. Otherwise everything that it had ordered has been carried out.
pub(super) async fn dropped<T>(
    store: &Opened,
    work: impl Future<Output = T>,
    (polls, when): (usize, When),
) -> Option<T> {
    let mut work = Box::pin(work);
    let mut lock = None;
    for poll in 1..=polls {
        if when == When::Queued {
            lock = Some(store.lock());
        }
        if let Poll::Ready(done) = futures::poll!(&mut work) {
            return Some(done);
        }
        if poll < polls || when == When::Answered {
            drop(lock.take());
            woken().await;
        }
    }
    drop(work);
    // A task orders what is to be cleared up.
    tokio::task::yield_now().await;
    drop(lock);
    store.saver.flush(&COPY.into()).await.unwrap();
    None
}

/// Waits until something that this task has polled wakes it.
async fn woken() {
    let mut is_woken = false;
    poll_fn(|_| if std::mem::replace(&mut is_woken, true) { Poll::Ready(()) } else { Poll::Pending }).await;
}

/// A dropped copy leaves nothing, wherever it was.
#[tokio::test]
async fn a_dropped_copy_leaves_nothing() {
    let store = store(2);
    thread(&store, 6).await;
    for (when, way) in MOMENTS.into_iter().flat_map(|when| WAYS.map(|way| (when, way))) {
        for polls in 1.. {
            let done = dropped(&store, copy(&store.saver, way), (polls, when)).await;
            nothing_remains(&store).await;
            // It may have been complete, without anybody who waited for it.
            store.saver.delete_thread(&COPY.into()).await.unwrap();
            assert_eq!(store.saver.check().await.unwrap(), [], "{when:?}, {polls} polls");
            if let Some(done) = done {
                assert_eq!(done.unwrap(), 11);
                // Nothing is carried out while a future is polled that is dropped before: some pieces, and the name.
                let pieces = if way == Way::Put { 6 } else { 2 };
                assert!(polls > pieces + 1 || when != When::Queued, "{way:?}: {polls} polls");
                break;
            }
        }
    }
}

/// What a killed process left is found an hour later, and swept.
#[tokio::test]
async fn what_a_killed_process_left_is_swept_when_nobody_can_need_it() {
    let store = store(1000);
    thread(&store, 3).await;
    let old = threadkeep::id::IdSource::seeded(Old, 1).checkpoint_after(None).to_string();
    let new = threadkeep::id::IdSource::default().checkpoint_after(None).to_string();
    for (token, findings) in [(new, 0), (old, 1)] {
        store.saver.write(Work::Stage(Box::new(Piece::empty(&token)))).await.unwrap();
        assert_eq!(store.saver.check().await.unwrap().len(), findings, "{token}");
        store.saver.sweep().await.unwrap();
        assert_eq!(store.saver.check().await.unwrap(), []);
    }
}

/// A clock of long ago.
struct Old;

impl threadkeep::id::Clock for Old {
    fn now_ms(&self) -> u64 {
        1_700_000_000_000
    }
}

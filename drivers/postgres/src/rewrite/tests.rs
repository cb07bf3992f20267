use futures::FutureExt;
use serde_json::json;
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, Stored, TaskWrites, Write};
use threadkeep::id::{IdSource, Version};
use threadkeep::metadata::{Metadata, Source};
use threadkeep::saver::{Saver, StepCommit};
use threadkeep::value::{ChannelValue, Element, ListValue};
use threadkeep_testing::postgres;
use threadkeep_testing::proxy::Proxy;

use super::*;
use crate::draft::LOOKED_UP;
use crate::{Options, PostgresSaver, setup};

/// `length` checkpoints of a thread as `read_thread` returns them, each with one more message.
fn thread(length: i64) -> Vec<CheckpointTuple> {
    let (ids, mut list, mut parent) = (IdSource::default(), ListValue::default(), None);
    let mut all = Vec::new();
    for n in 0..length {
        let text = format!("a message that is too long to stand in its list {n}");
        list.push(Element::from_json(&json!(text)).unwrap());
        let version = Version { counter: n.unsigned_abs() + 1, random: 0 };
        let mut read = list.clone();
        read.rebase(version);
        let entry = ChannelEntry { version, stored: Stored::Value(read.into()) };
        let id = ids.checkpoint_after(parent);
        let checkpoint = Checkpoint {
            id,
            channels: [("messages".into(), entry)].into(),
            next: Vec::new(),
            applied: Vec::new(),
        };
        all.push(CheckpointTuple {
            thread: "t".into(),
            namespace: "".into(),
            checkpoint,
            parent: parent.replace(id),
            metadata: Metadata::new(Source::Loop, n),
            writes: Vec::new(),
        });
    }
    all
}

fn planned(put: Vec<CheckpointTuple>) -> (Box<Change>, usize) {
    let (thread, state) = (ThreadId::from("t"), ThreadState::absent());
    let rewrite = Rewrite { put, ..Rewrite::default() };
    LOOKED_UP.set(0);
    let planned = plan(
        &thread,
        &state,
        &Snapshot::absent(&thread),
        &Revision::absent(),
        &rewrite,
        &History::first(Flush::Now),
    );
    match planned.unwrap() {
        Planned::Change(change, None) => (change, LOOKED_UP.get()),
        _ => panic!("a new thread is a change that removes nothing"),
    }
}

#[test]
fn a_new_thread_costs_what_its_checkpoints_add() {
    let ((_, short), (_, long)) = (planned(thread(100)), planned(thread(400)));
    assert!(
        short > 100 && long <= 5 * short,
        "{short} elements looked up for 100 checkpoints, {long} for 400"
    );
}

#[test]
fn only_a_long_new_thread_is_written_in_pieces() {
    let (mut change, _) = planned(thread(10));
    assert_eq!(change.pieces(PIECE).len(), 0);
    assert_eq!(change.pieces((3, usize::MAX)).len(), 3);
}

/// However few they are: a server takes no statement of a gigabyte.
#[test]
fn a_statement_for_a_new_thread_has_no_more_bytes_than_it_may_have() {
    const MOST: usize = 1000;
    // About sixty bytes each.
    let (mut change, _) = planned(thread(100));
    let pieces = change.pieces((usize::MAX, MOST));
    let all = || pieces.iter().chain([&*change]);
    for piece in all() {
        let [rows, elements] = piece.bytes();
        assert!(rows <= MOST && elements <= MOST, "{rows} bytes of rows, {elements} of elements");
    }
    let written: usize = all().map(Change::elements).sum();
    // The messages, and what the records need.
    assert!(written > 100, "{written} elements");
    let is_full = |piece: &Change| piece.bytes().iter().any(|bytes| *bytes > MOST / 2);
    assert!(pieces.iter().all(is_full), "pieces are not smaller than they need be");

    // One that is larger is written alone.
    let (mut change, _) = planned(thread(3));
    let elements = change.elements();
    let pieces = change.pieces((usize::MAX, 1));
    assert_eq!(pieces.len() + 1, elements);
    assert!(pieces.iter().chain([&*change]).all(|piece| piece.elements() == 1));
}

/// A server closes the connection on a message of a gigabyte, and the change would be in doubt. Here less is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_that_no_server_takes_is_refused_before_it_is_sent() {
    let database = postgres().unwrap().database().await.unwrap();
    setup(database.url(), &Options::patient()).await.unwrap();
    let saver = PostgresSaver::connect(database.url(), Options::patient()).await.unwrap();
    let (t, ids) = (ThreadId::from("t"), IdSource::default());
    let first = Rewrite { put: thread(1), ..Rewrite::default() };
    saver.rewrite_thread(&t, &Revision::absent(), first).await.unwrap();
    let before = saver.read_thread(&t).await.unwrap();
    let stored = before.checkpoints.values().next().unwrap();

    // Two digits are packed into a byte, and no better: five megabytes.
    let digits: Vec<String> = (0..650_000).map(|_| format!("{:016x}", rand::random::<u64>())).collect();
    let value = ChannelValue::from_json(&json!(digits.concat())).unwrap();
    let write = Write { channel: "title".into(), value: value.clone(), overwrite: false };
    let task = TaskWrites { task: ids.task(), node: "n".into(), index: 0, writes: vec![write] };
    let version = Version { counter: 9, random: 0 };
    let entry = ChannelEntry { version, stored: Stored::Value(value) };
    let mut put = stored.clone();
    put.checkpoint.channels.insert("title".into(), entry.clone());
    let id = ids.checkpoint_after(Some(stored.checkpoint.id));
    let step = StepCommit {
        thread: t.clone(),
        namespace: "".into(),
        parent: Some(stored.checkpoint.id),
        expected_head: Some(stored.checkpoint.id),
        checkpoint: Checkpoint {
            id,
            channels: [("title".into(), entry)].into(),
            next: Vec::new(),
            applied: Vec::new(),
        },
        metadata: Metadata::new(Source::Loop, 1),
        writes: Vec::new(),
        pending: Vec::new(),
        flush: Flush::Now,
    };
    let rewrite = Rewrite { put: vec![put], ..Rewrite::default() };
    for refused in [
        saver.put_writes(&stored.key(), &task).await,
        saver.commit(step).await.map(drop),
        saver.rewrite_thread(&t, &before.revision, rewrite).await,
    ] {
        let Err(Error::InvalidInput(text)) = refused else { panic!("{refused:?}") };
        assert!(
            text.starts_with("thread t: a change of ") && text.contains("too large for Postgres"),
            "{text}"
        );
    }
    assert_eq!(saver.read_thread(&t).await.unwrap(), before);
}

/// Their first and last elements are equal, which is all that is checked of a list that names another one as its base.
#[test]
fn two_lists_under_one_version_are_both_stored() {
    let version = Version { counter: 9, random: 0 };
    let mut put = thread(3);
    for (tuple, middle) in put[1..].iter_mut().zip(["1", "another 1"]) {
        let text = |end: &str| json!(format!("a message that is too long to stand in its list {end}"));
        let mut list: ListValue =
            ["0", middle, "2"].map(|end| Element::from_json(&text(end)).unwrap()).into_iter().collect();
        list.rebase(version);
        let entry = ChannelEntry { version, stored: Stored::Value(list.into()) };
        tuple.checkpoint.channels = [("messages".into(), entry)].into();
    }
    let (mut change, _) = planned(put);
    // Four messages, and the names of the records.
    assert_eq!(change.pieces((1, usize::MAX)).len() + 1, 5);
}

/// The first attempt at a creation arrives after the repeat has found no thread, and the thread is deleted before the
/// repeat writes: the creation took effect, and must not do so a second time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rewrite_in_doubt_does_not_bring_back_a_thread_that_was_deleted_since() {
    let database = postgres().unwrap().database().await.unwrap();
    setup(database.url(), &Options::patient()).await.unwrap();
    let open = async |url: &str| PostgresSaver::connect(url, Options::patient()).await.unwrap();
    let other = open(database.url()).await;
    let t = ThreadId::from("t");
    // As one statement, and in pieces.
    for (length, pieces) in [(1, 0), (200, 1)] {
        let rewrite = Arc::new(Rewrite { put: thread(length), ..Rewrite::default() });
        let (absent, asked, epoch) = (Revision::absent(), Asked::default(), rand::random());
        let (first_proxy, repeat_proxy) =
            (Proxy::before(database.url()).await, Proxy::before(database.url()).await);
        let (first, repeat) = (open(first_proxy.url()).await, open(repeat_proxy.url()).await);
        let is_writing = |proxy: &Proxy| proxy.statements().last().unwrap().contains("threadkeep_write");

        // BEGIN, the lock and the look come before.
        let (come, go_first) = first_proxy.hold(3 + pieces);
        let mut first = first.store.rewrite(&t, (&absent, &rewrite), epoch, (&asked, false)).boxed();
        tokio::select! {
            done = &mut first => panic!("{:?}", done.is_ok()),
            () = come.notified() => {}
        }
        assert!(is_writing(&first_proxy), "{length}");
        // And the look for graves.
        let (come, go_repeat) = repeat_proxy.hold(4);
        let mut repeat = repeat.store.rewrite(&t, (&absent, &rewrite), epoch, (&asked, true)).boxed();
        tokio::select! {
            done = &mut repeat => panic!("{:?}", done.is_ok()),
            () = come.notified() => {}
        }
        assert!(is_writing(&repeat_proxy), "{length}");

        go_first.notify_one();
        assert!(first.await.is_ok(), "{length}");
        assert_eq!(other.read_thread(&t).await.unwrap().checkpoints.len(), rewrite.put.len());
        other.delete_thread(&t).await.unwrap();
        go_repeat.notify_one();
        assert!(repeat.await.is_ok(), "{length}: it took effect");
        assert!(other.read_thread(&t).await.unwrap().checkpoints.is_empty(), "{length}");
    }
}

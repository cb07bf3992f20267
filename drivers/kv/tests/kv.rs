//! What the conformance suite cannot see: every byte of every row, groups of calls, what a step stores, other stores.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, LazyLock, Mutex};
use std::task::{Context, Waker};

use common::Map;
use serde_json::json;
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, CheckpointKey, Stored, TaskWrites, Write};
use threadkeep::id::{CheckpointId, Namespace, TaskId, Version};
use threadkeep::metadata::{Entries, Metadata, Source};
use threadkeep::saver::{CheckpointSelector, Flush, ListQuery, Load, Rewrite, Saver, StepCommit};
use threadkeep::value::{ChannelValue, Element, ListValue};
use threadkeep::{Error, Result};
use threadkeep_conformance::savers::Kv;
use threadkeep_conformance::{Case, Settings};
use threadkeep_kv::{FORMAT_VERSION, KvSaver, Packed, Plan, Snapshot, Store};
use tokio::runtime::{Handle, Runtime};

fn id(n: u8) -> CheckpointId {
    CheckpointId::from_bytes([n; 16])
}

fn task(n: u8) -> TaskWrites {
    let value =
        ChannelValue::from_json(&json!([format!("message {n}, which is longer than what is kept in place")]));
    let write = Write { channel: "messages".into(), value: value.unwrap(), overwrite: false };
    TaskWrites { task: TaskId::from_bytes([n; 16]), node: "model".into(), index: 0, writes: vec![write] }
}

/// The `n`-th step of a thread, with a list of `n` messages, and a large object in its metadata.
fn step(thread: &str, n: u8, runs: &Entries) -> StepCommit {
    let messages: Vec<_> =
        (0..n).map(|n| json!({"id": n, "content": "so it goes on and on and on ".repeat(3)})).collect();
    let version = Version { counter: u64::from(n), random: 7 };
    let value = ChannelValue::from_json(&json!(messages)).unwrap();
    let mut metadata = Metadata::new(Source::Loop, i64::from(n));
    metadata.extra.insert_object("runs", runs.clone());
    let parent = (n > 1).then(|| id(n - 1));
    StepCommit {
        thread: thread.into(),
        namespace: Namespace::root(),
        parent,
        expected_head: parent,
        checkpoint: Checkpoint {
            id: id(n),
            channels: [("messages".into(), ChannelEntry { version, stored: Stored::Value(value) })].into(),
            next: vec!["model".into()],
            applied: parent.map(|_| TaskId::from_bytes([n; 16])).into_iter().collect(),
        },
        metadata,
        writes: parent.map(|_| task(n)).into_iter().collect(),
        pending: Vec::new(),
        flush: Flush::Now,
    }
}

fn runs(n: usize) -> Entries {
    (0..n)
        .map(|n| (format!("run {n}").into(), Arc::new(json!({ "seconds": n, "tokens": 1000 + n }))))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_byte_is_corruption_or_changes_nothing() {
    let map = Arc::new(Map::default());
    let (noticed, all) = change_each_byte(&map, || KvSaver::open(map.clone())).await;
    // The others are those of the index, which is only a hint, and of the number of the next thread.
    assert!(noticed > all * 9 / 10, "{noticed} of {all}");
    let map = Arc::new(Map::default());
    let (noticed, all) = change_each_byte(&map, || KvSaver::open(Packed::new(map.clone()))).await;
    assert_eq!(noticed, all, "buckets have checksums");
}

/// Changes each byte that is stored, and reads everything. Returns how many changes were noticed; the others changed nothing.
async fn change_each_byte(map: &Map, open: impl Fn() -> Result<KvSaver>) -> (usize, usize) {
    let saver = open().unwrap();
    for n in 1..5 {
        saver.commit(step("t", n, &runs(40 + usize::from(n)))).await.unwrap();
    }
    saver
        .put_writes(&CheckpointKey { thread: "t".into(), namespace: Namespace::root(), id: id(4) }, &task(9))
        .await
        .unwrap();
    let whole = map.rows().clone();
    let image = saver.read_thread(&"t".into()).await.unwrap();
    let threads = saver.threads(None, 9).await.unwrap();
    let (mut noticed, mut all) = (0, 0);
    for (key, value) in &whole {
        for place in 0..value.len() {
            let mut changed = value.clone();
            changed[place] ^= 1 << (place % 8);
            map.rows().insert(key.clone(), changed);
            let read = match open() {
                Ok(saver) => match (saver.read_thread(&"t".into()).await, saver.threads(None, 9).await) {
                    (Ok(image), Ok(threads)) => Ok((image, threads)),
                    (Err(error), _) | (_, Err(error)) => Err(error),
                },
                Err(error) => Err(error),
            };
            match read {
                Ok(read) => assert_eq!(read, (image.clone(), threads.clone()), "{}", key.escape_ascii()),
                Err(Error::Corrupt { .. }) => noticed += 1,
                Err(other) => panic!("byte {place} of {}: {other:?}", key.escape_ascii()),
            }
            all += 1;
            *map.rows() = whole.clone();
        }
    }
    (noticed, all)
}

/// How a plan is carried out on a map.
type Way = Box<dyn Fn(&Map, Flush, &mut Plan<'_>) -> Result<()> + Send + Sync>;

/// A map that is written to in a way of its own.
struct Written {
    below: Arc<Map>,
    way: Way,
}

impl Store for Written {
    fn name(&self) -> &'static str {
        "written"
    }

    fn durable(&self) -> bool {
        false
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot + '_>> {
        self.below.snapshot()
    }

    fn write(&self, flush: Flush, plan: &mut Plan<'_>) -> Result<()> {
        (self.way)(&self.below, flush, plan)
    }
}

/// Notes the sizes of writes; each one waits until the test lets it go on.
fn slow(begun: Sender<usize>, go: Receiver<()>) -> Way {
    let go = Mutex::new(go);
    Box::new(move |below, flush, plan| {
        below.write(flush, &mut |rows| {
            let changes = plan(rows)?;
            let threads = changes.keys().filter(|key| key.first() == Some(&1)).count();
            begun.send(threads).unwrap();
            go.lock().unwrap().recv().unwrap();
            Ok(changes)
        })
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_during_a_write_share_the_next_one() {
    let ((begun, writes), (go_on, go)) = (channel(), channel());
    go_on.send(()).unwrap();
    let store = Written { below: Arc::default(), way: slow(begun, go) };
    let saver = KvSaver::open(store).unwrap();
    assert_eq!(writes.recv().unwrap(), 0, "the format");
    let call = |step: StepCommit| {
        let saver = saver.clone();
        let mut call: Pin<Box<dyn Future<Output = _> + Send>> =
            Box::pin(async move { saver.commit(step).await });
        // It is in the queue once it waits.
        assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        tokio::spawn(call)
    };
    let commit = |thread: String| call(step(&thread, 1, &Entries::default()));
    let first = commit("first".to_owned());
    assert_eq!(writes.recv().unwrap(), 1);
    let mut others: Vec<_> = (0..20).map(|n| commit(format!("thread {n}"))).collect();
    // One that is refused changes nothing of the others.
    let refused = call(step("first", 3, &Entries::default()));
    others.push(commit("thread 7".to_owned()));
    let mut rounds = Vec::new();
    let mut left = 20;
    go_on.send(()).unwrap();
    while left > 0 {
        let threads = writes.recv_timeout(std::time::Duration::from_mins(10)).unwrap();
        left -= threads;
        rounds.push(threads);
        go_on.send(()).unwrap();
    }
    // For calls that only find out that there is nothing to do.
    for _ in 0..50 {
        go_on.send(()).unwrap();
    }
    assert!(first.await.unwrap().is_ok());
    for other in others {
        assert!(other.await.unwrap().is_ok());
    }
    assert!(matches!(refused.await.unwrap(), Err(Error::Conflict { .. } | Error::NotFound { .. })));
    assert!(rounds.iter().any(|threads| *threads > 1), "{rounds:?}");
}

/// Damage where one call of a group writes is no answer to the others.
#[tokio::test(flavor = "multi_thread")]
async fn damage_fails_only_the_calls_of_a_group_that_meet_it() {
    fails_only_the_calls_that_meet_it(Error::corrupt("the store", "a page of this thread"), &THREE).await;
}

/// As of LMDB.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_the_store_refuses_fails_only_the_calls_of_a_group_that_have_it() {
    fails_only_the_calls_that_meet_it(too_long(), &THREE).await;
}

/// A client may send it again and again.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_the_store_refuses_leaves_most_calls_of_a_group_together() {
    let threads = ["a", "b", "c", "d", "e", "bad", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o"];
    let writes = fails_only_the_calls_that_meet_it(too_long(), &threads).await;
    assert_eq!(writes, [4, 1, 2, 8]);
}

const THREE: [&str; 3] = ["good", "bad", "better"];

fn too_long() -> Error {
    Error::InvalidInput("a key has more than 511 bytes".to_owned())
}

/// Calls that are stored together, of which the one on the thread `bad` fails. Returns how many each write stored.
async fn fails_only_the_calls_that_meet_it(error: Error, threads: &[&str]) -> Vec<usize> {
    let ((begun, writes), (go_on, go)) = (channel(), channel());
    go_on.send(()).unwrap();
    let (slow, refusal) = (slow(begun, go), error.clone());
    // Fails when it writes a thread whose name says so.
    let picky: Way = Box::new(move |below, flush, plan| {
        slow(below, flush, &mut |rows| {
            let changes = plan(rows)?;
            if changes.keys().any(|key| key.windows(3).any(|part| part == b"bad")) {
                return Err(refusal.clone());
            }
            Ok(changes)
        })
    });
    let saver = KvSaver::open(Written { below: Arc::default(), way: picky }).unwrap();
    assert_eq!(writes.recv().unwrap(), 0, "the format");
    let commit = |thread: &str| {
        let (saver, step) = (saver.clone(), step(thread, 1, &Entries::default()));
        let mut call: Pin<Box<dyn Future<Output = _>>> = Box::pin(async move { saver.commit(step).await });
        // It is in the queue once it waits.
        assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        call
    };
    let first = commit("first");
    assert_eq!(writes.recv().unwrap(), 1);
    let together: Vec<_> = threads.iter().map(|thread| commit(thread)).collect();
    for _ in 0..10 {
        go_on.send(()).unwrap();
    }
    assert!(first.await.is_ok());
    for (call, thread) in together.into_iter().zip(threads.iter().copied()) {
        let answer = call.await;
        assert_eq!(answer.clone().err(), (thread == "bad").then(|| error.clone()), "{thread}: {answer:?}");
        let found = saver.get(&CheckpointSelector::head(&thread.into())).await.unwrap();
        assert_eq!(found.is_some(), thread != "bad", "{thread}");
    }
    writes.try_iter().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_gets_the_answer_of_the_plan_that_was_stored() {
    let below = Arc::new(Map::default());
    let other = KvSaver::open(below.clone()).unwrap();
    let between = Arc::new(Mutex::new(None::<KvSaver>));
    let comes = between.clone();
    // As one with optimistic transactions: it notices at the end of a write that another one came between.
    let optimistic: Way = Box::new(move |below, flush, plan| {
        let between = comes.lock().unwrap().take();
        if let Some(other) = between {
            plan(&*below.snapshot()?)?;
            Handle::current().block_on(other.delete_thread(&"t".into()))?;
        }
        below.write(flush, plan)
    });
    let saver = KvSaver::open(Written { below, way: optimistic }).unwrap();
    let head = async || saver.get(&CheckpointSelector::head(&"t".into())).await.unwrap();
    saver.commit(step("t", 1, &runs(40))).await.unwrap();

    *between.lock().unwrap() = Some(other.clone());
    let late = saver.commit(step("t", 2, &runs(41))).await;
    assert!(matches!(late, Err(Error::Conflict { found: None, .. })), "{late:?}");
    assert_eq!(head().await, None);

    // The first plan finds the checkpoint, and has nothing to store.
    saver.commit(step("t", 1, &runs(40))).await.unwrap();
    *between.lock().unwrap() = Some(other.clone());
    saver.commit(step("t", 1, &runs(40))).await.unwrap();
    saver.commit(step("t", 2, &runs(41))).await.unwrap();
    let found = head().await.unwrap();
    assert_eq!((found.checkpoint.id, found.metadata.extra.object("runs")), (id(2), Some(runs(41))));
    assert_eq!(other.read_thread(&"t".into()).await.unwrap().checkpoints.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_stores_what_it_adds() {
    let map = Arc::new(Map::default());
    let saver = KvSaver::open(map.clone()).unwrap();
    let mut added = Vec::new();
    let mut objects = runs(1000);
    for n in 1..20_u8 {
        objects.insert((format!("new run {n}").into(), Arc::new(json!({ "seconds": n }))));
        let before = map.rows().clone();
        saver.commit(step("t", n, &objects)).await.unwrap();
        let after = map.rows().clone();
        added.push(after.iter().filter(|(key, value)| before.get(*key) != Some(*value)).count());
    }
    // The thread, the checkpoint, the task, two elements and an entry with their places in the index, and sometimes a chunk.
    assert!(added[2..].iter().all(|rows| *rows <= 11), "{added:?}");
    let bytes: usize = map.rows().iter().map(|(key, value)| key.len() + value.len()).sum();
    assert!(bytes < 150_000, "{bytes}");
    let listed = saver.list(&ListQuery::new(&"t".into())).await.unwrap();
    assert_eq!(listed[0].metadata.extra.object("runs"), Some(objects));
}

/// Each namespace is read from its end on, however long it is.
#[tokio::test(flavor = "multi_thread")]
async fn a_short_page_of_all_namespaces_reads_few_rows() {
    let map = Arc::new(Map::default());
    let saver = KvSaver::open(map.clone()).unwrap();
    for n in 1..=70 {
        for namespace in ["", "nested", "other"] {
            let step = step("t", n, &Entries::default());
            saver.commit(StepCommit { namespace: namespace.into(), ..step }).await.unwrap();
        }
    }
    let list = async |limit: Option<usize>, before: Option<u8>| {
        let before = before.map(id);
        let query =
            ListQuery { namespace: None, limit, before, load: Load::None, ..ListQuery::new(&"t".into()) };
        let found = saver.list(&query).await.unwrap();
        found.into_iter().map(|tuple| (tuple.checkpoint.id, tuple.namespace)).collect::<Vec<_>>()
    };
    let all = list(None, None).await;
    let namespaces = || ["", "nested", "other"].map(Namespace::from).into_iter();
    let expected: Vec<_> = (1..=70).rev().flat_map(|n| namespaces().map(move |of| (id(n), of))).collect();
    assert_eq!(all, expected);
    for limit in [1, 2, 63, 64, 65, 193, 209, 210, 500] {
        assert_eq!(list(Some(limit), None).await, all[..limit.min(all.len())], "{limit}");
        assert_eq!(list(Some(limit), Some(31)).await, all[120..][..limit.min(90)], "{limit} before");
    }
    let before = map.visits.load(Ordering::Relaxed);
    assert_eq!(list(Some(1), None).await, all[..1]);
    let visits = map.visits.load(Ordering::Relaxed) - before;
    assert!(visits < 20, "{visits} rows of 210 checkpoints");
}

/// In delta mode the list that a snapshot was made from is older than its parent.
#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_looks_at_what_its_list_adds() {
    let map = Arc::new(Map::default());
    let saver = KvSaver::open(map.clone()).unwrap();
    let element =
        |n: usize| Element::from_json(&json!({"id": n, "content": "so it goes on and on"})).unwrap();
    let mut list: ListValue = (0..500).map(element).collect();
    let entry =
        |n: u8, stored| ChannelEntry { version: Version { counter: u64::from(n), random: 7 }, stored };
    let mut reads = Vec::new();
    for n in 1..20_u8 {
        let mut step = step("t", n, &Entries::default());
        let stored = if n % 3 == 1 { Stored::Snapshot(list.clone().into()) } else { Stored::Sentinel };
        step.checkpoint.channels = [("messages".into(), entry(n, stored))].into();
        let before = map.reads.load(Ordering::Relaxed);
        saver.commit(step).await.unwrap();
        if n % 3 == 1 {
            reads.push(map.reads.load(Ordering::Relaxed) - before);
            list.rebase(Version { counter: u64::from(n), random: 7 });
            list.push(element(500 + usize::from(n)));
        }
        if n == 17 {
            let image = saver.read_thread(&"t".into()).await.unwrap();
            let put = image.checkpoints.into_values().filter(|tuple| tuple.checkpoint.id == id(17)).collect();
            let rewrite = Rewrite { put, ..Rewrite::default() };
            saver.rewrite_thread(&"t".into(), &image.revision, rewrite).await.unwrap();
        }
    }
    // The first one has no base, and after a rewrite nothing is remembered.
    let (first, last) = (reads.remove(0), reads.pop().unwrap());
    assert!(first > 500 && last > 500 && reads.iter().all(|reads| *reads < 40), "{first} {reads:?} {last}");
    let head = saver.get(&CheckpointSelector::head(&"t".into())).await.unwrap().unwrap();
    assert_eq!(head.checkpoint.channels["messages"].stored.value().unwrap().as_list().unwrap().len(), 506);
}

/// A conversion stores the notes of a thread one after the other, and each has all entries so far.
#[tokio::test(flavor = "multi_thread")]
async fn a_converted_note_looks_up_what_it_adds() {
    let reads = async |steps: u8| {
        let map = Arc::new(Map::default());
        let saver = KvSaver::open(map.clone()).unwrap();
        for n in 1..=steps {
            saver.commit(step("t", n, &runs(n.into()))).await.unwrap();
        }
        let image = saver.read_thread(&"t".into()).await.unwrap();
        let rewrite = Rewrite { put: image.checkpoints.values().cloned().collect(), ..Rewrite::default() };
        let before = map.reads.load(Ordering::Relaxed);
        saver.rewrite_thread(&"t".into(), &image.revision, rewrite).await.unwrap();
        let reads = map.reads.load(Ordering::Relaxed) - before;
        assert_eq!(saver.read_thread(&"t".into()).await.unwrap().checkpoints, image.checkpoints);
        reads
    };
    let (few, many) = (reads(50).await, reads(200).await);
    assert!(many <= 5 * few, "{few} values read for 50 notes, {many} for 200");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_of_something_else_is_refused() {
    let map = Map::default();
    map.rows().insert(b"any".to_vec(), b"thing".to_vec());
    assert!(matches!(KvSaver::open(map), Err(Error::InvalidInput(_))));

    let map = Arc::new(Map::default());
    let saver = KvSaver::open(map.clone()).unwrap();
    saver.commit(step("t", 1, &Entries::default())).await.unwrap();
    assert!(KvSaver::open(map.clone()).is_ok());
    let (key, value) = map.rows().iter().next().map(|(key, value)| (key.clone(), value.clone())).unwrap();
    assert!(value.len() == 5 && value[0] == 1, "the version and a checksum");
    map.rows().remove(&key);
    assert!(matches!(KvSaver::open(map.clone()), Err(Error::InvalidInput(_))));
    map.rows().insert(key, value);
    let saver = KvSaver::open(map).unwrap();
    assert!(saver.get(&CheckpointSelector::head(&"t".into())).await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_format_is_refused() {
    let map = Arc::new(Map::default());
    drop(KvSaver::open(map.clone()).unwrap());
    let key = map.rows().keys().next().unwrap().clone();
    let mut sum = blake3::Hasher::new();
    sum.update(&(key.len() as u64).to_le_bytes()).update(&key).update(&[2]);
    let value = [&[2], &sum.finalize().as_bytes()[..4]].concat();
    map.rows().insert(key, value);
    let refused = KvSaver::open(map).unwrap_err();
    assert!(matches!(refused, Error::NewerFormat { found: 2, supported: FORMAT_VERSION, .. }), "{refused:?}");
}

/// As one whose client is async: each operation waits for a runtime of its own.
struct Remote(Map);

impl Remote {
    fn ask() {
        static CLIENT: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());
        CLIENT.block_on(tokio::task::yield_now());
    }
}

impl Store for Remote {
    fn name(&self) -> &'static str {
        "remote"
    }

    fn durable(&self) -> bool {
        false
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot + '_>> {
        Self::ask();
        self.0.snapshot()
    }

    fn write(&self, flush: Flush, plan: &mut Plan<'_>) -> Result<()> {
        Self::ask();
        self.0.write(flush, plan)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_suite_opens_a_store_that_waits_for_a_runtime() {
    let open: fn(&Path) -> Result<Remote> = |_| {
        Remote::ask();
        Ok(Remote(Map::default()))
    };
    let factory = Kv { name: "remote", open, in_use: Some("already open"), used_bytes: None };
    let only = |case: &Case| case.name == "get_by_id_is_exact";
    let report = threadkeep_conformance::run(factory, Settings::default(), only).await;
    assert!(report.cases.len() == 1 && report.failed().is_empty(), "{report}");
}

/// What a server has under a name.
fn served(name: &Path) -> Arc<Map> {
    static MAPS: Mutex<BTreeMap<PathBuf, Arc<Map>>> = Mutex::new(BTreeMap::new());
    MAPS.lock().unwrap().entry(name.to_owned()).or_default().clone()
}

/// A client that takes what was there when it was opened, and what it wrote since, for all that is there.
struct Alone {
    server: Arc<Map>,
    seen: Map,
}

impl Alone {
    fn of(server: Arc<Map>) -> Self {
        let seen = Map::default();
        *seen.rows() = server.rows().clone();
        Self { server, seen }
    }
}

impl Store for Alone {
    fn name(&self) -> &'static str {
        "alone"
    }

    fn durable(&self) -> bool {
        true
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot + '_>> {
        self.seen.snapshot()
    }

    fn write(&self, flush: Flush, plan: &mut Plan<'_>) -> Result<()> {
        self.seen.write(flush, plan)?;
        *self.server.rows() = self.seen.rows().clone();
        Ok(())
    }
}

/// If all handles shared one client, its own lock would pass for a turn that all processes share.
#[tokio::test(flavor = "multi_thread")]
async fn each_handle_on_a_store_that_several_may_open_opens_it_for_itself() {
    const CASE: &str = "two_handles_share_one_store";
    let only = |case: &Case| case.name == CASE;
    let open: fn(&Path) -> Result<Arc<Map>> = |name| Ok(served(name));
    let factory = Kv { name: "served", open, in_use: None, used_bytes: None };
    let report = threadkeep_conformance::run(factory, Settings::default(), only).await;
    assert!(report.cases.len() == 1 && report.failed().is_empty(), "{report}");
    let open: fn(&Path) -> Result<Alone> = |name| Ok(Alone::of(served(name)));
    let factory = Kv { name: "alone", open, in_use: None, used_bytes: None };
    let report = threadkeep_conformance::run(factory, Settings::default(), only).await;
    assert_eq!(report.failed(), [CASE], "{report}");
}

/// What `make new-saver` writes compiles with what is there, and its first failure says what to write.
#[test]
fn a_new_saver_compiles_and_says_what_to_write() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("new");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/new-saver.sh");
    let run = |name: &str| Command::new(&script).arg(name).arg(&directory).output().unwrap();
    for name in ["", "Name", "a b", "../a"] {
        let refused = run(name);
        assert!(!refused.status.success() && !directory.exists(), "{name}");
    }
    // Crates that the new one uses, or that are here.
    for name in ["kv", "conformance", "layout", "redb"] {
        let refused = run(name);
        assert!(!refused.status.success() && !directory.exists(), "{name}");
        let says = String::from_utf8_lossy(&refused.stderr);
        assert!(says.contains(&format!("has a crate threadkeep-{name}")), "{says}");
    }
    let written = run("example");
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    assert!(!run("example").status.success(), "nothing is overwritten");
    let compile_and_run = Command::new(env!("CARGO"))
        .args(["test", "--offline", "--quiet", "--test", "conformance", "--", "get_by_id_is_exact"])
        .current_dir(&directory)
        .env("CARGO_TARGET_DIR", Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap())
        .output()
        .unwrap();
    let (out, errors) =
        (String::from_utf8_lossy(&compile_and_run.stdout), String::from_utf8_lossy(&compile_and_run.stderr));
    assert!(
        out.contains("the example saver does not support `snapshot` yet: in src/lib.rs"),
        "{out}\n{errors}"
    );
    assert!(!errors.contains("warning"), "{errors}");
}

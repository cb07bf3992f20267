//! Caches of threads: warm heads and the history cache. What they save is counted in calls and rows of the inner saver;
//! their results are compared with a reader without caches.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use serde_json::{Map, json};
use threadkeep::Result;
use threadkeep::cache::{CachedHistory, CachedSaver, HistoryCache, HistoryKey, MemoryCache};
use threadkeep::channel::Schema;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, Stored, TaskWrites};
use threadkeep::deletion::{Boundary, Keep, Prune, RUN_ID_KEY, delete_for_runs, prune};
use threadkeep::id::{ChannelName, CheckpointId, IdSource, Namespace, ThreadId};
use threadkeep::metadata::Source;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, ListQuery, Load, Revision, Rewrite, Saver, StepCommit,
    ThreadImage,
};
use threadkeep::state::{HistoryQuery, StateAccessor, StateSnapshot, Update};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::value::{ChannelValue, ListValue};
use threadkeep_memory::MemorySaver;
use tokio::sync::Notify;

/// What readers requested from a saver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Asked {
    /// Checkpoints read one by one.
    gets: usize,
    /// Walks.
    walks: usize,
    /// List elements returned.
    elements: usize,
    /// Path steps returned.
    steps: usize,
}

/// A memory saver that counts.
#[derive(Default)]
struct Counting {
    inner: MemorySaver,
    asked: Mutex<Asked>,
}

impl Counting {
    /// What was requested since the last call.
    fn take(&self) -> Asked {
        std::mem::take(&mut self.asked.lock().unwrap())
    }
}

fn elements(tuple: &CheckpointTuple) -> usize {
    let values = tuple.checkpoint.channels.values().filter_map(|entry| entry.stored.value());
    values.filter_map(|value| value.as_list()).map(ListValue::len).sum()
}

#[async_trait]
impl Saver for Counting {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        let found = self.inner.get(at).await?;
        let mut asked = self.asked.lock().unwrap();
        asked.gets += 1;
        asked.elements += found.as_ref().map_or(0, elements);
        Ok(found)
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        self.inner.list(query).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        self.inner.put_writes(at, task).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        self.inner.commit(step).await
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        self.inner.flush(thread).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        let paths = self.inner.delta_history(at, channels, reach).await?;
        let mut asked = self.asked.lock().unwrap();
        asked.walks += 1;
        for path in paths.values() {
            let seed = path.seed.as_ref().and_then(|seed| seed.value.as_list());
            asked.elements += seed.map_or(0, ListValue::len);
            asked.steps += path.steps.len();
        }
        Ok(paths)
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        self.inner.delete_thread(thread).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        self.inner.threads(after, limit).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        self.inner.read_thread(thread).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        self.inner.rewrite_thread(thread, expected, rewrite).await
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}

fn accessor(saver: Arc<dyn Saver>, mode: ChannelMode, frequency: u64) -> StateAccessor {
    let table = Schema::thread_state().compile(mode, frequency).unwrap();
    StateAccessor::new(saver, Arc::new(table), Arc::new(IdSource::default()))
}

async fn say(accessor: &StateAccessor, thread: &ThreadId, at: Option<CheckpointId>) -> StateSnapshot {
    let mut writer = StepWriter::open(accessor, thread, at).await.unwrap();
    step(&mut writer).await
}

async fn step(writer: &mut StepWriter) -> StateSnapshot {
    let write = writer.write("messages", json!([{"type": "ai", "content": "text"}]), false).unwrap();
    let task = writer.start_task(&"model".into(), 0);
    writer.finish_task(task, vec![write], Durability::WithCommit).await.unwrap();
    writer.commit(Source::Loop, vec![], Map::new()).await.unwrap().clone()
}

fn messages() -> BTreeSet<ChannelName> {
    ["messages".into()].into()
}

/// A cache that exposes its contents.
struct Shown(MemoryCache);

impl Shown {
    fn new() -> Arc<Self> {
        Arc::new(Self(MemoryCache::new(NonZeroUsize::new(16).unwrap())))
    }

    async fn ends(&self, thread: &ThreadId) -> Option<CheckpointId> {
        self.0.get(&key(thread)).await.map(|path| path.checkpoint)
    }
}

fn key(thread: &ThreadId) -> HistoryKey {
    HistoryKey { thread: thread.clone(), namespace: Namespace::root(), channel: "messages".into() }
}

#[async_trait]
impl HistoryCache for Shown {
    async fn get(&self, key: &HistoryKey) -> Option<CachedHistory> {
        self.0.get(key).await
    }

    async fn put(&self, key: &HistoryKey, path: &CachedHistory) {
        self.0.put(key, path).await;
    }

    async fn purge(&self, thread: &ThreadId) {
        self.0.purge(thread).await;
    }
}

/// A store with a history cache, and a thread with a few checkpoints in delta mode.
struct Cached {
    behind: Arc<Counting>,
    cache: Arc<Shown>,
    saver: Arc<CachedSaver>,
    accessor: StateAccessor,
    thread: ThreadId,
    made: Vec<StateSnapshot>,
}

impl Cached {
    async fn new(steps: usize) -> Self {
        let (behind, cache) = (Arc::new(Counting::default()), Shown::new());
        let saver = Arc::new(CachedSaver::new(behind.clone(), cache.clone()));
        let accessor = accessor(saver.clone(), ChannelMode::Delta, 1000);
        let thread = ThreadId::from("t");
        let mut made = vec![accessor.create(&thread, Map::new()).await.unwrap()];
        for _ in 0..steps {
            made.push(say(&accessor, &thread, None).await);
        }
        Self { behind, cache, saver, accessor, thread, made }
    }

    async fn path(&self, at: &CheckpointKey) -> Result<DeltaHistory> {
        self.saver.delta_history(at, &messages(), None).await
    }

    /// The cached path equals that of the inner saver, whatever was requested before.
    async fn agrees(&self, at: &CheckpointKey) {
        let behind = self.behind.inner.delta_history(at, &messages(), None).await;
        assert_eq!(self.path(at).await, behind);
    }
}

#[tokio::test]
async fn resolving_step_after_step_reads_as_much_at_step_300_as_at_step_3() {
    let store = Cached::new(1).await;
    let mut writer = StepWriter::open(&store.accessor, &store.thread, None).await.unwrap();
    for n in 0..300 {
        let state = step(&mut writer).await;
        store.behind.take();
        let path = &store.path(&state.key).await.unwrap()["messages"];
        assert_eq!(path.steps.len(), n + 2);
        let asked = store.behind.take();
        if n == 0 {
            assert_eq!(asked.walks, 1, "cold: nothing is known yet");
        } else {
            assert_eq!(
                asked,
                Asked { gets: 3, ..Asked::default() },
                "the checkpoint and its parent, and whether it is still there, at step {n}"
            );
        }
        assert_eq!(store.path(&state.key).await.unwrap()["messages"], *path);
        assert_eq!(
            store.behind.take(),
            Asked { gets: 1, ..Asked::default() },
            "only whether it is still there"
        );
    }
}

#[tokio::test]
async fn a_run_of_some_steps_is_resolved_from_the_path_before_it_and_a_long_one_in_one_walk() {
    let mut store = Cached::new(30).await;
    for (back, walks) in [(8, 0), (9, 1)] {
        let known = store.made.len() - 1;
        store.path(&store.made[known].key).await.unwrap();
        for _ in 0..back {
            store.made.push(say(&store.accessor, &store.thread, None).await);
        }
        store.behind.take();
        store.agrees(&store.made[known + back].key).await;
        assert_eq!(store.behind.take().walks, walks, "{back} steps later");
    }
}

#[tokio::test]
async fn forks_snapshots_and_rows_that_come_late_give_what_the_saver_gives() {
    let store = Cached::new(6).await;
    store.path(&store.made[4].key).await.unwrap();
    // A row under an ancestor of the known path, and a fork there.
    let late = TaskWrites {
        task: store.accessor.ids().task(),
        node: "n".into(),
        index: 0,
        writes: vec![
            store.accessor.write("messages", json!([{"type": "ai", "content": "late"}]), false).unwrap(),
        ],
    };
    store.saver.put_writes(&store.made[3].key, &late).await.unwrap();
    let fork = say(&store.accessor, &store.thread, Some(store.made[3].key.id)).await;
    let sibling = say(&store.accessor, &store.thread, Some(store.made[3].key.id)).await;
    for state in [&fork, &store.made[6], &sibling, &store.made[4], &fork, &store.made[3], &store.made[5]] {
        store.agrees(&state.key).await;
    }
    // The counters make a snapshot due: the path starts after it.
    let dense = accessor(store.saver.clone(), ChannelMode::Delta, 1);
    let snapshot = say(&dense, &store.thread, None).await;
    store.agrees(&snapshot.key).await;
    let behind = say(&store.accessor, &store.thread, None).await;
    store.agrees(&behind.key).await;
    assert_eq!(store.path(&behind.key).await.unwrap()["messages"].steps.len(), 1);
}

#[tokio::test]
async fn a_page_of_history_is_one_walk_of_the_saver() {
    let store = Cached::new(5).await;
    let head = &store.made[5].key;
    store.path(head).await.unwrap();
    store.behind.take();
    let reach = Some(store.made[2].key.id);
    let path = store.saver.delta_history(head, &messages(), reach).await;
    assert_eq!(store.behind.take().walks, 1);
    assert_eq!(path, store.behind.inner.delta_history(head, &messages(), reach).await);
}

/// A note on a snapshot applies nothing, but repeats the version: the rows of its ancestors lead to its value.
#[tokio::test]
async fn a_page_of_history_with_notes_on_snapshots_is_one_walk() {
    let behind = Arc::new(Counting::default());
    let accessor = accessor(behind.clone(), ChannelMode::Delta, 3);
    let thread = ThreadId::from("t");
    accessor.create(&thread, Map::new()).await.unwrap();
    let mut made = BTreeMap::new();
    for _ in 0..12 {
        let state = say(&accessor, &thread, None).await;
        let note = accessor.annotate(&state, Map::new()).await.unwrap();
        made.extend([state, note].map(|state| (state.key.id, state.values().unwrap())));
    }
    let image = behind.read_thread(&thread).await.unwrap();
    let is_snapshot = |tuple: &CheckpointTuple| {
        let entry = tuple.checkpoint.channels.get("messages");
        entry.is_some_and(|entry| matches!(entry.stored, Stored::Snapshot(_)))
    };
    let notes = image.checkpoints.values().filter(|tuple| tuple.checkpoint.applied.is_empty());
    let on_snapshots = notes.filter(|note| is_snapshot(note)).count();
    assert!(on_snapshots > 2, "{on_snapshots}");
    behind.take();
    let page = accessor.history(&thread, HistoryQuery { limit: Some(24), ..HistoryQuery::default() }).await;
    assert_eq!(behind.take().walks, 1);
    let page: BTreeMap<_, _> =
        page.unwrap().into_iter().map(|state| (state.key.id, state.values().unwrap())).collect();
    assert_eq!(page, made);
}

#[tokio::test]
async fn what_is_gone_is_not_served_and_what_was_made_anew_is_not_mistaken() {
    let store = Cached::new(4).await;
    let head = store.made[4].key.clone();
    store.path(&head).await.unwrap();
    let image = store.saver.read_thread(&store.thread).await.unwrap();

    // Without this cache, as another process would.
    store.behind.inner.delete_thread(&store.thread).await.unwrap();
    assert!(store.path(&head).await.unwrap_err().to_string().contains("has no checkpoint"));

    // The same ids with other versions: another thread, although every key is equal.
    let mut put: Vec<CheckpointTuple> = image.checkpoints.into_values().collect();
    let ids = IdSource::default();
    for tuple in &mut put {
        for entry in tuple.checkpoint.channels.values_mut() {
            entry.version = ids.version_after(Some(entry.version));
        }
        for write in tuple.writes.iter_mut().flat_map(|row| &mut row.writes) {
            write.value = ChannelValue::from_json(&json!([{"id": "new"}])).unwrap();
        }
    }
    let rewrite = Rewrite { remove: BTreeSet::new(), put };
    store.behind.inner.rewrite_thread(&store.thread, &Revision::absent(), rewrite).await.unwrap();
    store.agrees(&head).await;
}

#[tokio::test]
async fn deleting_and_pruning_a_thread_purges_it_and_deleting_for_runs_does_not() {
    let table = Schema::thread_state().compile(ChannelMode::Delta, 1000).unwrap();
    let other = ThreadId::from("other");
    let store = Cached::new(4).await;
    store.accessor.create(&other, Map::new()).await.unwrap();
    let kept = say(&store.accessor, &other, None).await;
    store.path(&kept.key).await.unwrap();

    // A branch created by a run beside the head's, with a row under an ancestor of the head.
    let head = store.made[4].key.clone();
    let image = store.saver.read_thread(&store.thread).await.unwrap();
    let mut writer =
        StepWriter::open(&store.accessor, &store.thread, Some(store.made[2].key.id)).await.unwrap();
    let write = writer.write("messages", json!([{"type": "ai", "content": "text"}]), false).unwrap();
    let task = writer.start_task(&"model".into(), 0);
    writer.finish_task(task, vec![write], Durability::WithCommit).await.unwrap();
    let run = Map::from_iter([(RUN_ID_KEY.to_owned(), json!("r1"))]);
    writer.commit(Source::Loop, vec![], run).await.unwrap();
    store.path(&head).await.unwrap();
    let plan =
        delete_for_runs(&*store.saver, &store.thread, &["r1".to_owned()].into(), &table).await.unwrap();
    assert_eq!((plan.rewrite.remove.len(), plan.rewrite.put.len()), (1, 1), "a checkpoint, and a row");
    assert_eq!(store.saver.read_thread(&store.thread).await.unwrap().checkpoints, image.checkpoints);
    assert_eq!(store.cache.ends(&store.thread).await, Some(head.id));
    store.agrees(&head).await;

    for boundary in [Boundary::KeepSet, Boundary::FreshSnapshot] {
        for n in 0..3 {
            // The older ones have a denser cadence, so that there is something to prune before a seed.
            let frequency = if n == 0 { 1 } else { 1000 };
            let accessor = accessor(store.saver.clone(), ChannelMode::Delta, frequency);
            let head = say(&accessor, &store.thread, None).await;
            store.path(&head.key).await.unwrap();
        }
        let head = store.accessor.get(&store.thread, None).await.unwrap().unwrap();
        assert_eq!(store.cache.ends(&store.thread).await, Some(head.key.id));
        let policy = Prune { boundary, ..Prune::keeping(Keep::Latest) };
        prune(&*store.saver, &store.thread, &policy, &table).await.unwrap();
        assert_eq!(store.cache.ends(&store.thread).await, None, "{boundary:?}");
        store.agrees(&head.key).await;
        assert_eq!(
            store
                .accessor
                .clone()
                .get(&store.thread, Some(head.key.id))
                .await
                .unwrap()
                .unwrap()
                .values()
                .unwrap(),
            head.values().unwrap()
        );
    }

    let next = say(&store.accessor, &store.thread, None).await;
    store.path(&next.key).await.unwrap();
    prune(&*store.saver, &store.thread, &Prune::keeping(Keep::Nothing), &table).await.unwrap();
    assert_eq!(store.cache.ends(&store.thread).await, None, "nothing is left of it");
    assert_eq!(store.cache.ends(&other).await, Some(kept.key.id), "other threads keep theirs");
    store.saver.delete_thread(&other).await.unwrap();
    assert_eq!(store.cache.ends(&other).await, None);
}

/// A cache that is slow to store a path.
struct Slow {
    cache: Arc<Shown>,
    come: Notify,
    go: Notify,
}

#[async_trait]
impl HistoryCache for Slow {
    async fn get(&self, key: &HistoryKey) -> Option<CachedHistory> {
        self.cache.get(key).await
    }

    async fn put(&self, key: &HistoryKey, path: &CachedHistory) {
        self.come.notify_one();
        self.go.notified().await;
        self.cache.put(key, path).await;
    }

    async fn purge(&self, thread: &ThreadId) {
        self.cache.purge(thread).await;
    }
}

/// As another process, whose purge comes before a path that was read before is stored.
#[tokio::test]
async fn a_path_that_is_stored_after_its_thread_was_deleted_does_not_stay() {
    for remove in ["the thread", "every checkpoint", "nothing"] {
        let store = Cached::new(3).await;
        let slow =
            Arc::new(Slow { cache: store.cache.clone(), come: Notify::default(), go: Notify::default() });
        let reader = CachedSaver::new(store.behind.clone(), slow.clone());
        let head = store.made[3].key.clone();
        let expected = store.behind.inner.delta_history(&head, &messages(), None).await;
        let channels = messages();
        let mut reading = reader.delta_history(&head, &channels, None);
        tokio::select! {
            read = &mut reading => panic!("nothing was stored: {read:?}"),
            () = slow.come.notified() => {}
        }
        match remove {
            "the thread" => store.saver.delete_thread(&store.thread).await.unwrap(),
            "every checkpoint" => {
                let image = store.saver.read_thread(&store.thread).await.unwrap();
                let remove = image.checkpoints.keys().cloned().collect();
                let rewrite = Rewrite { remove, put: Vec::new() };
                store.saver.rewrite_thread(&store.thread, &image.revision, rewrite).await.unwrap();
            }
            _ => {}
        }
        slow.go.notify_one();
        assert_eq!(reading.await, expected, "{remove}: what it was when it was read");
        let kept = (remove == "nothing").then_some(head.id);
        assert_eq!(store.cache.ends(&store.thread).await, kept, "{remove} was removed");
    }
}

/// A cache that does what it is asked for, and answers only from some time on.
struct Silent {
    cache: Arc<Shown>,
    answers: AtomicBool,
    asked: Notify,
}

impl Silent {
    async fn answer(&self) {
        if !self.answers.load(Ordering::Relaxed) {
            self.asked.notify_one();
            std::future::pending::<()>().await;
        }
    }
}

#[async_trait]
impl HistoryCache for Silent {
    async fn get(&self, key: &HistoryKey) -> Option<CachedHistory> {
        self.cache.get(key).await
    }

    async fn put(&self, key: &HistoryKey, path: &CachedHistory) {
        self.cache.put(key, path).await;
        self.answer().await;
    }

    async fn purge(&self, thread: &ThreadId) {
        // One that is given up does nothing.
        self.answer().await;
        self.cache.purge(thread).await;
    }
}

/// As those of a request whose client has gone.
#[tokio::test]
async fn what_a_call_that_was_given_up_leaves_in_the_cache_goes_with_the_next_call() {
    for given_up in ["a read", "a deletion", "a rewrite"] {
        let store = Cached::new(3).await;
        let (cache, asked) = (store.cache.clone(), Notify::default());
        let silent = Arc::new(Silent { cache, answers: AtomicBool::new(false), asked });
        let saver = CachedSaver::new(store.behind.clone(), silent.clone());
        let head = store.made[3].key.clone();
        if given_up != "a read" {
            store.path(&head).await.unwrap();
        }
        let channels = messages();
        let call = async {
            match given_up {
                "a read" => drop(saver.delta_history(&head, &channels, None).await),
                "a deletion" => saver.delete_thread(&store.thread).await.unwrap(),
                _ => {
                    let image = store.behind.inner.read_thread(&store.thread).await.unwrap();
                    let remove = image.checkpoints.keys().cloned().collect();
                    let rewrite = Rewrite { remove, put: Vec::new() };
                    saver.rewrite_thread(&store.thread, &image.revision, rewrite).await.unwrap();
                }
            }
        };
        tokio::select! {
            () = call => panic!("{given_up} ended"),
            () = silent.asked.notified() => {}
        }
        // As another process does, whose purge comes before the path.
        store.behind.inner.delete_thread(&store.thread).await.unwrap();
        assert_eq!(store.cache.ends(&store.thread).await, Some(head.id), "{given_up}");
        silent.answers.store(true, Ordering::Relaxed);
        saver.get(&CheckpointSelector::head(&"another".into())).await.unwrap();
        assert_eq!(store.cache.ends(&store.thread).await, None, "{given_up}");
    }
}

#[tokio::test]
async fn the_memory_cache_keeps_the_paths_that_were_used_last() {
    let cache = MemoryCache::new(NonZeroUsize::new(2).unwrap());
    let store = Cached::new(1).await;
    let paths = store.path(&store.made[1].key).await.unwrap();
    let path = CachedHistory {
        checkpoint: store.made[1].key.id,
        version: store.made[1].version("messages").unwrap(),
        history: paths["messages"].clone(),
    };
    let [a, b, c] = ["a", "b", "c"].map(|thread| key(&thread.into()));
    cache.put(&a, &path).await;
    cache.put(&b, &path).await;
    assert_eq!(cache.get(&a).await.as_ref(), Some(&path));
    cache.put(&c, &path).await;
    let mut kept = BTreeMap::new();
    for key in [&a, &b, &c] {
        kept.insert(key.thread.as_str(), cache.get(key).await.is_some());
    }
    assert_eq!(kept, [("a", true), ("b", false), ("c", true)].into());
    assert_eq!(format!("{cache:?}"), "MemoryCache(2 of 2 paths)");
    MemoryCache::new(NonZeroUsize::MAX).put(&a, &path).await;
}

/// Typical turns of a service, on one accessor.
async fn warm_turns(mode: ChannelMode, frequency: u64) {
    let behind = Arc::new(Counting::default());
    let accessor = accessor(behind.clone(), mode, frequency);
    let thread = ThreadId::from("t");
    accessor.create(&thread, Map::new()).await.unwrap();
    for turn in 0..50 {
        behind.take();
        let mut writer = StepWriter::open(&accessor, &thread, None).await.unwrap();
        for _ in 0..3 {
            step(&mut writer).await;
        }
        let head = accessor.get(&thread, None).await.unwrap().unwrap();
        let noted = accessor.annotate(&head, Map::new()).await.unwrap();
        let seen = accessor.get_loading(&thread, Some(noted.key.id), Load::Only(messages())).await.unwrap();
        assert_eq!(seen.unwrap().value("messages").unwrap().as_list().unwrap().len(), 3 * (turn + 1));
        assert_eq!(
            behind.take(),
            Asked { gets: 3, ..Asked::default() },
            "{mode:?}, turn {turn}: no value is read"
        );
    }
}

#[tokio::test]
async fn a_turn_on_a_warm_head_reads_no_value_in_either_mode() {
    warm_turns(ChannelMode::Full, 10).await;
    for frequency in [1, 10, 1000] {
        warm_turns(ChannelMode::Delta, frequency).await;
    }
}

#[tokio::test]
async fn a_warm_head_is_read_again_when_somebody_else_moved_deleted_or_converted_it() {
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        let behind = Arc::new(Counting::default());
        let (ours, theirs) = (accessor(behind.clone(), mode, 10), accessor(behind.clone(), mode, 10));
        let thread = ThreadId::from("t");
        ours.create(&thread, Map::new()).await.unwrap();
        let count = async || {
            let head = ours.get(&thread, None).await.unwrap()?;
            Some(head.value("messages").map_or(0, |value| value.as_list().unwrap().len()))
        };
        say(&ours, &thread, None).await;
        say(&theirs, &thread, None).await;
        assert_eq!(count().await, Some(2), "{mode:?}: moved");
        let old = ours.get(&thread, None).await.unwrap().unwrap();

        // A row that was added under the head meanwhile.
        let row = TaskWrites { task: ours.ids().task(), node: "n".into(), index: 0, writes: Vec::new() };
        behind.inner.put_writes(&old.key, &row).await.unwrap();
        assert_eq!(ours.get(&thread, None).await.unwrap().unwrap().writes, [row]);

        // The same checkpoint with a rewritten value.
        let image = behind.inner.read_thread(&thread).await.unwrap();
        let mut put = image.checkpoints[&(Namespace::root(), old.key.id)].clone();
        put.metadata.counters.clear();
        let entry = put.checkpoint.channels.get_mut("messages").unwrap();
        entry.version = ours.ids().version_after(Some(entry.version));
        entry.stored = Stored::Value(ChannelValue::from_json(&json!([])).unwrap());
        let rewrite = Rewrite { remove: BTreeSet::new(), put: vec![put] };
        behind.inner.rewrite_thread(&thread, &image.revision, rewrite).await.unwrap();
        assert_eq!(count().await, Some(0), "{mode:?}: rewritten");

        // The same value, stored completely instead of a sentinel: by a prune, and by a conversion.
        for marker in [mode == ChannelMode::Delta, false] {
            let next = say(&ours, &thread, None).await;
            let image = behind.inner.read_thread(&thread).await.unwrap();
            let mut put = image.checkpoints[&(Namespace::root(), next.key.id)].clone();
            (put.metadata.delta_marker, put.metadata.counters) = (marker, BTreeMap::new());
            let entry = put.checkpoint.channels.get_mut("messages").unwrap();
            entry.stored = Stored::Value(next.value("messages").unwrap().clone());
            let rewrite = Rewrite { remove: BTreeSet::new(), put: vec![put] };
            behind.inner.rewrite_thread(&thread, &image.revision, rewrite).await.unwrap();
            let warm = ours.get(&thread, None).await;
            let cold = accessor(behind.clone(), mode, 10).get(&thread, None).await;
            assert_eq!(warm, cold, "{mode:?}: stored whole, marker {marker}");
        }

        behind.inner.delete_thread(&thread).await.unwrap();
        assert_eq!(count().await, None, "{mode:?}: deleted");
        theirs.create(&thread, Map::new()).await.unwrap();
        assert_eq!(count().await, Some(0), "{mode:?}: made anew");
    }
}

#[tokio::test]
async fn an_update_on_an_older_checkpoint_reads_that_one_and_warms_the_new_head() {
    let behind = Arc::new(Counting::default());
    let accessor = accessor(behind.clone(), ChannelMode::Delta, 10);
    let thread = ThreadId::from("t");
    let first = accessor.create(&thread, Map::new()).await.unwrap();
    say(&accessor, &thread, None).await;
    let old = say(&accessor, &thread, None).await;
    say(&accessor, &thread, None).await;
    let write = accessor.write("title", json!("a title"), false).unwrap();
    let update = |at| Update { at, node: "u".into(), writes: vec![write.clone()], extra: Map::new() };
    let fork = accessor.update(&thread, update(Some(old.key.id))).await.unwrap();
    behind.take();
    let head = accessor.get(&thread, None).await.unwrap().unwrap();
    assert_eq!(head, fork);
    assert_eq!(behind.take(), Asked { gets: 1, ..Asked::default() });
    let before = accessor.get(&thread, Some(first.key.id)).await.unwrap().unwrap();
    assert_eq!(before.value("messages"), None);
}

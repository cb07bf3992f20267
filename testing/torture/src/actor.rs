//! Random work on threads, as agents and operators do it, with a book of the expected state of each checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, ensure};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Map, Value as Json, json};
use threadkeep::channel::{ChannelTable, Schema};
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::convert::convert;
use threadkeep::deletion::{
    Boundary, Keep, Prune, RetentionPolicy, copy_thread, delete_for_runs, enforce, prune,
};
use threadkeep::id::{CheckpointId, Clock, IdSource, ThreadId};
use threadkeep::metadata::Source;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{Flush, Saver};
use threadkeep::state::{HistoryQuery, StateAccessor, StateSnapshot, Update};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::verify::verify;
use threadkeep_conformance::Naive;

/// The number of steps between snapshots of a delta channel.
const CADENCE: u64 = 3;
/// The threads that an actor works on.
const THREADS: [&str; 3] = ["a", "b", "c"];

/// The expected state of each checkpoint: the texts of its messages.
pub type Book = BTreeMap<(ThreadId, CheckpointId), Arc<Vec<String>>>;

/// A clock that advances by a millisecond whenever it is read, so that a seed makes the same ids again.
struct Ticks(AtomicU64);

impl Clock for Ticks {
    fn now_ms(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}

/// The channels of the service, for a mode.
///
/// # Errors
/// None with this cadence.
pub fn table(mode: ChannelMode) -> threadkeep::Result<Arc<ChannelTable>> {
    Schema::thread_state().compile(mode, CADENCE).map(Arc::new)
}

/// An accessor that remembers nothing yet, with ids that depend on the seed.
///
/// # Errors
/// None.
pub fn accessor(saver: &Arc<dyn Saver>, mode: ChannelMode, seed: u64) -> threadkeep::Result<StateAccessor> {
    let ids = IdSource::seeded(Ticks(AtomicU64::new(1_700_000_000_000)), seed);
    Ok(StateAccessor::new(saver.clone(), table(mode)?, Arc::new(ids)))
}

/// The texts of the messages in a state.
///
/// # Errors
/// If it holds anything else.
pub fn texts(state: &StateSnapshot) -> anyhow::Result<Vec<String>> {
    let messages = state.json("messages")?.unwrap_or_else(|| json!([]));
    let messages = messages.as_array().context("messages are no list")?;
    let text = |message: &Json| message["content"].as_str().map(str::to_owned).context("no text");
    messages.iter().map(text).collect()
}

/// Adds a message at the head of a thread, which need not exist.
///
/// # Errors
/// The engine's.
pub async fn say(
    accessor: &StateAccessor,
    thread: &ThreadId,
    text: &str,
) -> threadkeep::Result<StateSnapshot> {
    let writes = vec![accessor.write("messages", json!([{ "type": "human", "content": text }]), false)?];
    accessor.update(thread, Update { at: None, node: "human".into(), writes, extra: Map::new() }).await
}

/// Works on a few threads, one operation at a time.
pub struct Actor {
    saver: Arc<dyn Saver>,
    full: StateAccessor,
    delta: StateAccessor,
    rng: StdRng,
    modes: BTreeMap<ThreadId, ChannelMode>,
    /// The expected state of each existing checkpoint.
    pub book: Book,
    /// The same for all checkpoints that ever existed.
    pub ever: Book,
    said: u64,
    runs: u64,
}

impl Actor {
    /// Works on an empty store.
    ///
    /// # Errors
    /// None.
    pub fn new(saver: Arc<dyn Saver>, seed: u64) -> threadkeep::Result<Self> {
        let ids = Arc::new(IdSource::seeded(Ticks(AtomicU64::new(1_700_000_000_000)), seed));
        let over = |mode| Ok(StateAccessor::new(saver.clone(), table(mode)?, ids.clone()));
        Ok(Self {
            full: over(ChannelMode::Full)?,
            delta: over(ChannelMode::Delta)?,
            saver,
            rng: StdRng::seed_from_u64(seed),
            modes: BTreeMap::new(),
            book: Book::new(),
            ever: Book::new(),
            said: 0,
            runs: 0,
        })
    }

    fn any_thread(&mut self) -> ThreadId {
        THREADS[self.rng.random_range(0..THREADS.len())].into()
    }

    fn text(&mut self) -> String {
        self.said += 1;
        let length = if self.rng.random_bool(0.1) { 3000 } else { self.rng.random_range(1..300) };
        let noise = (0..length).map(|_| char::from(self.rng.random_range(b'a'..=b'z')));
        format!("{} {}", self.said, noise.collect::<String>())
    }

    fn message(&mut self) -> Json {
        json!([{ "type": "ai", "content": self.text() }])
    }

    fn accessor(&self, thread: &ThreadId) -> StateAccessor {
        match self.modes.get(thread) {
            Some(ChannelMode::Delta) => self.delta.clone(),
            _ => self.full.clone(),
        }
    }

    fn older(&mut self, thread: &ThreadId) -> Option<CheckpointId> {
        let ids: Vec<_> = self.book.keys().filter(|(of, _)| of == thread).map(|(_, id)| *id).collect();
        if ids.is_empty() || !self.rng.random_bool(0.15) {
            return None;
        }
        Some(ids[self.rng.random_range(0..ids.len())])
    }

    fn note(&mut self, state: &StateSnapshot) -> anyhow::Result<()> {
        let key = (state.key.thread.clone(), state.key.id);
        let texts = Arc::new(texts(state)?);
        self.ever.insert(key.clone(), texts.clone());
        self.book.insert(key, texts);
        Ok(())
    }

    /// Does one operation.
    ///
    /// # Errors
    /// Those of the engine; none is expected.
    pub async fn step(&mut self) -> anyhow::Result<()> {
        let thread = self.any_thread();
        if !self.book.keys().any(|(of, _)| *of == thread) {
            let mode = if self.rng.random_bool(0.5) { ChannelMode::Full } else { ChannelMode::Delta };
            self.modes.insert(thread.clone(), mode);
            return self.turn(&thread).await;
        }
        match self.rng.random_range(0..100) {
            0..44 => self.turn(&thread).await,
            44..52 => {
                let text = self.text();
                let state = say(&self.accessor(&thread), &thread, &text).await?;
                self.note(&state)
            }
            52..60 => self.leave_pending(&thread).await,
            60..68 => self.annotate(&thread).await,
            68..94 => self.rewrite(&thread).await,
            94..97 => {
                let copy = self.any_thread();
                self.copy(&thread, copy).await
            }
            _ => {
                self.accessor(&thread).delete_thread(&thread).await?;
                self.book.retain(|(of, _), _| *of != thread);
                Ok(())
            }
        }
    }

    /// One to three supersteps, each with one to three tasks, with one flush at the end, a flush each, or none.
    async fn turn(&mut self, thread: &ThreadId) -> anyhow::Result<()> {
        let at = self.older(thread);
        let mut writer = StepWriter::open(&self.accessor(thread), thread, at).await?;
        // What had finished before belongs to the checkpoint that takes the head's place.
        let left: Vec<_> = writer.recovered().into_iter().cloned().collect();
        writer.begin_with(left);
        let later = self.rng.random_bool(0.5);
        if later {
            writer.set_flush(Flush::WithNext);
        }
        self.runs += 1;
        for _ in 0..self.rng.random_range(1..=3) {
            for index in 0..self.rng.random_range(1..=3) {
                let task = writer.start_task(&"worker".into(), index);
                // Some tasks write nothing.
                let mut writes = Vec::new();
                if self.rng.random_bool(0.85) {
                    writes.push(writer.write("messages", self.message(), false)?);
                }
                if index == 0 && self.rng.random_bool(0.3) {
                    writes.push(writer.write("title", json!(self.text()), false)?);
                }
                let when = if self.rng.random_bool(0.3) { Durability::Now } else { Durability::WithCommit };
                writer.finish_task(task, writes, when).await?;
            }
            let extra = Map::from_iter([("run_id".to_owned(), json!(format!("run {}", self.runs)))]);
            let state = writer.commit(Source::Loop, vec!["worker".into()], extra).await?.clone();
            self.note(&state)?;
        }
        if later && self.rng.random_bool(0.7) {
            writer.flush().await?;
        }
        Ok(())
    }

    /// A task that finishes before its siblings, in a run that never commits.
    async fn leave_pending(&mut self, thread: &ThreadId) -> anyhow::Result<()> {
        let mut writer = StepWriter::open(&self.accessor(thread), thread, None).await?;
        let task = writer.start_task(&"worker".into(), 0);
        let writes = vec![writer.write("messages", self.message(), false)?];
        writer.finish_task(task, writes, Durability::Now).await?;
        Ok(())
    }

    async fn annotate(&mut self, thread: &ThreadId) -> anyhow::Result<()> {
        let accessor = self.accessor(thread);
        let head = accessor.get(thread, None).await?.context("the head is gone")?;
        let runs: Map<_, _> = (0..self.runs).map(|run| (format!("run {run}"), json!(run))).collect();
        let extra = json!({ "writes": { "runtime_run_duration": {} }, "run_durations": runs });
        let extra = extra.as_object().cloned().unwrap_or_default();
        let state = accessor.annotate(&head, extra).await?;
        self.note(&state)
    }

    /// Prunes, enforces the retention policy, deletes for runs or converts.
    async fn rewrite(&mut self, thread: &ThreadId) -> anyhow::Result<()> {
        let accessor = self.accessor(thread);
        let (saver, table) = (self.saver.clone(), accessor.table());
        match self.rng.random_range(0..4) {
            0 => {
                let mut what = Prune::keeping(Keep::Last(self.rng.random_range(1..8)));
                if self.rng.random_bool(0.5) {
                    what.boundary = Boundary::FreshSnapshot;
                }
                prune(&*saver, thread, &what, table).await?;
            }
            1 => {
                let policy = RetentionPolicy {
                    prune_leaf_sibling_branches: true,
                    graft_duration_links: self.rng.random_bool(0.5),
                    ..RetentionPolicy::default()
                };
                enforce(&*saver, thread, &policy, table, false).await?;
            }
            2 => {
                let run = self.rng.random_range(0..=self.runs);
                let runs = BTreeSet::from([format!("run {run}"), format!("run {}", run + 1)]);
                delete_for_runs(&*saver, thread, &runs, table).await?;
            }
            _ => {
                let to = match self.modes.get(thread) {
                    Some(ChannelMode::Delta) => ChannelMode::Full,
                    _ => ChannelMode::Delta,
                };
                convert(&*saver, thread, &*self::table(to)?).await?;
                self.modes.insert(thread.clone(), to);
            }
        }
        self.forget_removed(thread).await
    }

    async fn copy(&mut self, from: &ThreadId, to: ThreadId) -> anyhow::Result<()> {
        if self.book.keys().any(|(of, _)| *of == to) {
            return Ok(());
        }
        copy_thread(&*self.saver, from, &to).await?;
        let mode = self.modes.get(from).copied().unwrap_or(ChannelMode::Full);
        self.modes.insert(to.clone(), mode);
        let copied: Vec<_> = self.book.iter().filter(|((of, _), _)| of == from).collect();
        let copied: Book =
            copied.into_iter().map(|((_, id), texts)| ((to.clone(), *id), texts.clone())).collect();
        self.ever.extend(copied.clone());
        self.book.extend(copied);
        Ok(())
    }

    /// A deletion chooses what to remove; what stays must read as before.
    async fn forget_removed(&mut self, thread: &ThreadId) -> anyhow::Result<()> {
        let image = self.saver.read_thread(thread).await?;
        let left: BTreeSet<_> = image.checkpoints.keys().map(|(_, id)| *id).collect();
        self.book.retain(|(of, id), _| of != thread || left.contains(id));
        Ok(())
    }
}

/// Fails unless a store holds exactly what the model holds. Returns the number of checkpoints.
///
/// # Errors
/// The first difference.
pub async fn compare(saver: &dyn Saver, model: &Naive) -> anyhow::Result<usize> {
    let mut count = 0;
    let there: BTreeSet<ThreadId> = saver.threads(None, usize::MAX).await?.into_iter().collect();
    let all: BTreeSet<ThreadId> = there.iter().cloned().chain(THREADS.map(ThreadId::from)).collect();
    for thread in &all {
        let image = saver.read_thread(thread).await?;
        let read: Vec<_> = image.checkpoints.values().collect();
        let expected = model.thread(thread);
        ensure!(there.contains(thread) != read.is_empty(), "threads() and read_thread({thread}) differ");
        ensure!(read == expected, "thread {thread}: {}", difference(&read, &expected));
        count += read.len();
    }
    Ok(count)
}

/// The expected state of each checkpoint of a model.
///
/// # Errors
/// If a checkpoint is not in the book.
pub fn book_of(model: &Naive, ever: &Book) -> anyhow::Result<Book> {
    let tuples = THREADS.into_iter().flat_map(|thread| model.thread(&thread.into()));
    let entry = |tuple: &CheckpointTuple| {
        let key = (tuple.thread.clone(), tuple.checkpoint.id);
        let texts = ever.get(&key).context("a checkpoint that nobody made")?;
        Ok((key, texts.clone()))
    };
    tuples.map(entry).collect()
}

fn difference<T: PartialEq + std::fmt::Debug>(read: &[T], expected: &[T]) -> String {
    let at = read.iter().zip(expected).position(|(a, b)| a != b);
    let shown = |of: &[T]| {
        let one = at.and_then(|at| of.get(at)).map(|one| format!("{one:?}"))?;
        Some(one.chars().take(600).collect::<String>())
    };
    format!(
        "{} checkpoints read, {} expected; the first difference: read {:?}, expected {:?}",
        read.len(),
        expected.len(),
        shown(read),
        shown(expected)
    )
}

/// The beginnings of texts, for a readable error.
fn starts(texts: &[String]) -> Vec<String> {
    texts.iter().map(|text| text.chars().take(12).collect()).collect()
}

/// Fails unless every checkpoint of the book has its expected state, read through an accessor that remembers nothing,
/// and every thread passes `verify`. Returns the number of compared states.
///
/// # Errors
/// The first difference.
pub async fn read_back(saver: &Arc<dyn Saver>, book: &Book) -> anyhow::Result<usize> {
    // A process in delta mode reads threads of either mode.
    let cold = accessor(saver, ChannelMode::Delta, 0)?;
    let threads: BTreeSet<&ThreadId> = book.keys().map(|(thread, _)| thread).collect();
    let mut count = 0;
    for thread in threads {
        let states = cold.history(thread, HistoryQuery::default()).await?;
        let expected = book.iter().filter(|((of, _), _)| of == thread).count();
        ensure!(states.len() == expected, "thread {thread}: {} states, expected {expected}", states.len());
        for state in &states {
            let known = book.get(&(thread.clone(), state.key.id)).context("a checkpoint from nowhere")?;
            let read = texts(state)?;
            ensure!(
                read == **known,
                "thread {thread}, checkpoint {} reads {:?}, expected {:?}",
                state.key.id,
                starts(&read),
                starts(known)
            );
        }
        count += states.len();
        verified(&**saver, thread).await?;
    }
    Ok(count)
}

/// Fails if `verify` finds anything in a thread.
///
/// # Errors
/// What it finds first.
pub async fn verified(saver: &dyn Saver, thread: &ThreadId) -> anyhow::Result<()> {
    let found = verify(saver, thread, &*table(ChannelMode::Delta)?).await?;
    ensure!(found.is_empty(), "verify: {}", found[0]);
    Ok(())
}

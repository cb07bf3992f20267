//! Test databases, and the binary.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Map, Value as Json, json};
use tempfile::TempDir;
use threadkeep::channel::Schema;
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, CheckpointTuple, Stored, TaskWrites, Write};
use threadkeep::id::{ChannelName, CheckpointId, Clock, IdSource, Namespace, TaskId, ThreadId, Version};
use threadkeep::metadata::{DURATION_NODE, Entries, Extra, Metadata, Source};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{Revision, Rewrite, Saver, ThreadImage};
use threadkeep::state::{HistoryQuery, StateAccessor, Update};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::value::{ChannelValue, ListValue};
use threadkeep_sqlite::{Options, SqliteSaver, Synchronous};
use threadkeep_testing::unconfigured;

pub(crate) const MODES: [ChannelMode; 2] = [ChannelMode::Full, ChannelMode::Delta];

/// A thread with one of everything.
pub(crate) const TALK: &str = "talk";
/// A short thread.
pub(crate) const OTHER: &str = "other";

/// A clock that advances by a second whenever it is read.
struct Seconds(AtomicU64);

impl Clock for Seconds {
    fn now_ms(&self) -> u64 {
        self.0.fetch_add(1_000, Ordering::Relaxed)
    }
}

/// A database that is identical in every test run.
pub(crate) struct Store {
    dir: TempDir,
    mode: ChannelMode,
    ids: Arc<IdSource>,
}

/// The output of a process.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Said {
    /// What it printed; it must have succeeded, and said nothing else than how far it was.
    pub(crate) fn done(self) -> String {
        // On a busy machine a command takes longer than the ten seconds after which it says so.
        let said: Vec<&str> = self.err.lines().filter(|line| !is_progress(line)).collect();
        assert!(self.code == 0 && said.is_empty(), "{self:?}");
        self.out
    }

    /// The documents that it printed; it must have succeeded.
    pub(crate) fn json(self) -> Vec<Json> {
        self.done().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// Whether a line is as `1,200 of 10,000 threads done`.
fn is_progress(line: &str) -> bool {
    let mut words = line.split(' ');
    let is_number = |word: Option<&str>| {
        word.is_some_and(|word| !word.is_empty() && word.chars().all(|c| c == ',' || c.is_ascii_digit()))
    };
    is_number(words.next()) && words.next() == Some("of") && is_number(words.next())
}

/// The binary with these arguments, in an environment without settings.
pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = unconfigured(env!("CARGO_BIN_EXE_threadkeep"));
    command.args(args);
    command
}

/// Runs the binary with nothing on stdin.
pub(crate) fn threadkeep(args: &[&str]) -> Said {
    let output = command(args).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr) }
}

/// A thread that is being made.
struct Made {
    ids: Arc<IdSource>,
    tuples: Vec<CheckpointTuple>,
    messages: ListValue,
}

impl Made {
    /// A step that adds these messages.
    fn step(&mut self, node: &str, messages: &Json, metadata: Metadata) {
        let ChannelValue::List(new) = ChannelValue::from_json(messages).unwrap() else { panic!("a list") };
        new.iter().for_each(|message| self.messages.push(message.clone()));
        let task = self.ids.task();
        let write = Write { channel: "messages".into(), value: new.into(), overwrite: false };
        let row = TaskWrites { task, node: node.into(), index: 0, writes: vec![write] };
        let applied = match self.tuples.last_mut() {
            Some(parent) => {
                parent.writes.push(row);
                vec![task]
            }
            None => Vec::new(),
        };
        let counter = self.messages.len() as u64;
        let version = Version { counter, random: counter };
        let entry = ChannelEntry { version, stored: Stored::Value(self.messages.clone().into()) };
        self.messages.rebase(version);
        self.add([("messages".into(), entry)].into(), applied, metadata);
    }

    /// A checkpoint that repeats the last one.
    fn note(&mut self, metadata: Metadata) {
        let channels = self.tuples.last().unwrap().checkpoint.channels.clone();
        self.add(channels, Vec::new(), metadata);
    }

    fn add(
        &mut self,
        channels: BTreeMap<ChannelName, ChannelEntry>,
        applied: Vec<TaskId>,
        metadata: Metadata,
    ) {
        let parent = self.tuples.last().map(|parent| parent.checkpoint.id);
        let id = self.ids.checkpoint_after(parent);
        let metadata = Metadata { step: i64::try_from(self.tuples.len()).unwrap() - 1, ..metadata };
        self.tuples.push(CheckpointTuple {
            thread: TALK.into(),
            namespace: Namespace::root(),
            checkpoint: Checkpoint { id, channels, next: Vec::new(), applied },
            parent,
            metadata,
            writes: Vec::new(),
        });
    }
}

impl Store {
    /// Turns with duration notes, a side branch, a nested namespace, pending rows, a title; and another thread.
    pub(crate) async fn new(mode: ChannelMode) -> Self {
        let clock = Seconds(AtomicU64::new(1_700_000_000_000));
        let ids = Arc::new(IdSource::seeded(clock, 11));
        let store = Self { dir: tempfile::tempdir().unwrap(), mode, ids };
        let saver = store.open().await;
        let accessor = store.accessor(&saver, mode);
        for turn in 0..6 {
            turn_of(&accessor, TALK, turn).await;
        }
        let talk = ThreadId::from(TALK);
        // The fourth turn is answered again; its first answer stays as a side branch.
        let history = accessor.history(&talk, HistoryQuery::default()).await.unwrap();
        let asked =
            history.iter().filter(|state| state.metadata.source == Source::Input).nth(2).unwrap().key.id;
        let mut writer = StepWriter::open(&accessor, &talk, Some(asked)).await.unwrap();
        step(&mut writer, "model", &said("ai", "a3-again"), Source::Loop, "r3-again").await;
        let mut inner =
            StepWriter::open(&accessor.clone().in_namespace("inner".into()), &talk, None).await.unwrap();
        step(&mut inner, "input", &said("human", "to the subagent"), Source::Input, "r3-again").await;
        step(&mut inner, "model", &said("ai", "from the subagent"), Source::Loop, "r3-again").await;
        let title = vec![accessor.write("title", json!("A talk about tables"), false).unwrap()];
        let update = Update { at: None, node: "title".into(), writes: title, extra: Map::new() };
        accessor.update(&talk, update).await.unwrap();
        // A task that finished before a crash.
        let mut crashed = StepWriter::open(&accessor, &talk, None).await.unwrap();
        let task = crashed.start_task(&"tools".into(), 0);
        let writes = vec![crashed.write("messages", said("ai", "a result"), false).unwrap()];
        crashed.finish_task(task, writes, Durability::Now).await.unwrap();
        for turn in 0..2 {
            turn_of(&accessor, OTHER, turn).await;
        }
        saver.close().await;
        store
    }

    /// A thread with this many turns in full mode, as the gateway writes them: a question, an answer, and a note with
    /// the durations and messages of all runs.
    pub(crate) async fn long(turns: usize) -> Self {
        let clock = Seconds(AtomicU64::new(1_700_000_000_000));
        let ids = Arc::new(IdSource::seeded(clock, 11));
        let store = Self { dir: tempfile::tempdir().unwrap(), mode: ChannelMode::Full, ids };
        let mut made = Made { ids: store.ids.clone(), tuples: Vec::new(), messages: ListValue::default() };
        let (mut durations, mut of_messages) = (Entries::default(), Entries::default());
        for turn in 0..turns {
            let run = format!("{turn:08}-0000-7000-8000-000000000000");
            let mut extra = Extra::from(Map::from_iter([("run_id".to_owned(), json!(run))]));
            for (node, kind, source) in [("input", "human", Source::Input), ("model", "ai", Source::Loop)] {
                let id = format!("{node}-{turn}");
                made.step(
                    node,
                    &said(kind, &id),
                    Metadata { extra: extra.clone(), ..Metadata::new(source, 0) },
                );
                of_messages.insert((id.into(), Arc::new(json!(run))));
            }
            durations.insert((run.as_str().into(), Arc::new(json!(3))));
            extra.insert_object("run_durations", durations.clone());
            extra.insert_object("run_message_ids", of_messages.clone());
            extra.insert("writes".to_owned(), json!({DURATION_NODE: {"run_ids": [run]}}));
            made.note(Metadata { extra, ..Metadata::new(Source::Update, 0) });
        }
        let saver = store.open().await;
        let rewrite = Rewrite { put: made.tuples, ..Rewrite::default() };
        saver.rewrite_thread(&TALK.into(), &Revision::absent(), rewrite).await.unwrap();
        saver.close().await;
        store
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("checkpoints.db")
    }

    pub(crate) fn file(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    /// Runs a command on this database, whose path is shown as `DB` in the output.
    pub(crate) fn run(&self, args: &[&str]) -> Said {
        let path = self.path().display().to_string();
        let said = threadkeep(&[args, &["--sqlite", &path]].concat());
        Said { code: said.code, out: said.out.replace(&path, "DB"), err: said.err.replace(&path, "DB") }
    }

    pub(crate) async fn open(&self) -> Arc<SqliteSaver> {
        let mut options = Options { synchronous: Synchronous::Normal, readers: 1, ..Options::default() };
        // A command beside it may stand still in the middle of a change.
        options.busy_timeout = Duration::from_mins(10);
        Arc::new(SqliteSaver::open_async(self.path(), options).await.unwrap())
    }

    pub(crate) fn accessor(&self, saver: &Arc<SqliteSaver>, mode: ChannelMode) -> StateAccessor {
        let table = Schema::thread_state().compile(mode, 4).unwrap();
        StateAccessor::new(saver.clone(), Arc::new(table), self.ids.clone())
    }

    /// Everything stored of a thread.
    pub(crate) async fn image(&self, thread: &str) -> ThreadImage {
        let saver = self.open().await;
        let image = saver.read_thread(&thread.into()).await.unwrap();
        saver.close().await;
        image
    }

    /// The state of every checkpoint of a thread, as a process in `mode` reads it.
    pub(crate) async fn states_in(
        &self,
        mode: ChannelMode,
        thread: &str,
    ) -> BTreeMap<(Namespace, CheckpointId), Map<String, Json>> {
        let saver = self.open().await;
        let mut states = BTreeMap::new();
        for namespace in ["", "inner"] {
            let accessor = self.accessor(&saver, mode).in_namespace(namespace.into());
            for state in accessor.history(&thread.into(), HistoryQuery::default()).await.unwrap() {
                states.insert((namespace.into(), state.key.id), state.values().unwrap());
            }
        }
        saver.close().await;
        states
    }

    /// The state of every checkpoint, as the process that wrote them reads it.
    pub(crate) async fn states(
        &self,
        thread: &str,
    ) -> BTreeMap<(Namespace, CheckpointId), Map<String, Json>> {
        self.states_in(self.mode, thread).await
    }
}

pub(crate) fn said(kind: &str, text: &str) -> Json {
    let content = format!("{text} {}", "and so on ".repeat(20));
    json!([{"type": kind, "id": text.replace(' ', "-"), "content": content}])
}

pub(crate) async fn step(writer: &mut StepWriter, node: &str, messages: &Json, source: Source, run: &str) {
    let write = writer.write("messages", messages.clone(), false).unwrap();
    let task = writer.start_task(&node.into(), 0);
    writer.finish_task(task, vec![write], Durability::WithCommit).await.unwrap();
    let next = if source == Source::Input { vec!["model".into()] } else { Vec::new() };
    let extra = Map::from_iter([("run_id".to_owned(), json!(run))]);
    writer.commit(source, next, extra).await.unwrap();
}

/// A question, an answer and a duration note.
pub(crate) async fn turn_of(accessor: &StateAccessor, thread: &str, turn: usize) {
    let run = format!("r{turn}");
    let mut writer = StepWriter::open(accessor, &thread.into(), None).await.unwrap();
    step(&mut writer, "input", &said("human", &format!("q{turn}")), Source::Input, &run).await;
    step(&mut writer, "model", &said("ai", &format!("a{turn}")), Source::Loop, &run).await;
    let extra = json!({"run_durations": {&run: 3}, "writes": {DURATION_NODE: {"run_ids": [&run]}}});
    accessor.annotate(writer.state().unwrap(), extra.as_object().unwrap().clone()).await.unwrap();
}

//! Test databases, and the binary.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Value as Json, json};
use tempfile::TempDir;
use threadkeep::channel::Schema;
use threadkeep::id::{CheckpointId, Clock, IdSource, Namespace, ThreadId};
use threadkeep::metadata::{DURATION_NODE, Source};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{Saver, ThreadImage};
use threadkeep::state::{HistoryQuery, StateAccessor, Update};
use threadkeep::step::{Durability, StepWriter};
use threadkeep_sqlite::{Options, SqliteSaver, Synchronous};

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
    /// What it printed; it must have succeeded.
    pub(crate) fn done(self) -> String {
        assert_eq!((self.code, self.err.as_str()), (0, ""), "{}", self.out);
        self.out
    }

    /// The documents that it printed; it must have succeeded.
    pub(crate) fn json(self) -> Vec<Json> {
        self.done().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// Runs the binary with nothing on stdin.
pub(crate) fn threadkeep(args: &[&str]) -> Said {
    let mut command = Command::new(env!("CARGO_BIN_EXE_threadkeep"));
    for name in ["SVC_CONFIG_PATH", "SVC_PROJECT_ROOT", "SVC_HOME", "RUST_LOG"] {
        command.env_remove(name);
    }
    let output = command.args(args).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr) }
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
        let options = Options { synchronous: Synchronous::Normal, readers: 1, ..Options::default() };
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

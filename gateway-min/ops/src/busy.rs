//! Passes over every thread beside a thread whose runs never pause, and one that is deleted meanwhile.

use std::collections::BTreeSet;
use std::sync::Arc;

use async_trait::async_trait;
use clap::{Command as Clap, FromArgMatches as _};
use serde_json::{Map, json};
use threadkeep::channel::Schema;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, IdSource, ThreadId};
use threadkeep::metadata::Source;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, ListQuery, Load, Revision, Rewrite, Saver, StepCommit,
    ThreadImage,
};
use threadkeep::state::StateAccessor;
use threadkeep::step::{Durability, StepWriter};
use threadkeep::{Error, Result};
use threadkeep_memory::MemorySaver;
use threadkeep_storage::{OpenSaver, Stores};

use super::*;

/// The thread in the middle of the list that somebody writes to between every plan and its change.
const BUSY: &str = "b";

/// The last thread of the list, which is deleted before anything is read of it.
const DELETED: &str = "d";

#[derive(Clone, Default)]
struct Busy {
    store: Arc<MemorySaver>,
    /// Whether the thread cannot be read page by page either.
    reads_fail: bool,
}

#[async_trait]
impl OpenSaver for Busy {
    async fn open(&self, _config: &threadkeep_config::Config) -> Result<Arc<dyn Saver>> {
        Ok(Arc::new(self.clone()))
    }
}

#[async_trait]
impl Saver for Busy {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        self.store.get(at).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        if self.reads_fail && query.thread.as_str() == BUSY && query.load != Load::None {
            return Err(Error::Stale { thread: query.thread.clone() });
        }
        self.store.list(query).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        self.store.put_writes(at, task).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        self.store.commit(step).await
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        self.store.flush(thread).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        self.store.delta_history(at, channels, reach).await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        self.store.delete_thread(thread).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        let mut threads = self.store.threads(after, limit).await?;
        if after.is_none() {
            threads.push(ThreadId::from(DELETED));
        }
        Ok(threads)
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        self.store.read_thread(thread).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        if thread.as_str() == BUSY {
            return Err(Error::Stale { thread: thread.clone() });
        }
        self.store.rewrite_thread(thread, expected, rewrite).await
    }

    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }
}

/// Four supersteps on each of the threads a, b and c.
async fn filled() -> Busy {
    let busy = Busy::default();
    let table = Schema::thread_state().compile(ChannelMode::Full, 10).unwrap();
    let accessor = StateAccessor::new(Arc::new(busy.clone()), Arc::new(table), Arc::new(IdSource::default()));
    for thread in ["a", BUSY, "c"] {
        let mut writer = StepWriter::open(&accessor, &ThreadId::from(thread), None).await.unwrap();
        for number in 0..4 {
            let task = writer.start_task(&"model".into(), 0);
            let write = writer
                .write("messages", json!([{"role": "user", "content": format!("{number}")}]), false)
                .unwrap();
            writer.finish_task(task, vec![write], Durability::WithCommit).await.unwrap();
            writer.commit(Source::Loop, vec![], Map::new()).await.unwrap();
        }
    }
    busy
}

/// The exit of a command on this store, without a configured one.
async fn run_on(store: &Busy, arguments: &[&str]) -> Exit {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("config.yaml");
    std::fs::write(&file, r#"{"config_version": 49, "database": {"backend": "memory"}}"#).unwrap();
    let file = file.display().to_string();
    let matches = OpsCommand::augment_subcommands(Clap::new("threadkeep"))
        .get_matches_from([&["threadkeep"], arguments, &["--config", &file]].concat());
    let command = OpsCommand::from_arg_matches(&matches).unwrap();
    run(&command, &Stores::with_saver(store.clone())).await
}

async fn lengths(store: &Busy) -> Vec<usize> {
    let mut lengths = Vec::new();
    for thread in ["a", BUSY, "c"] {
        lengths.push(store.read_thread(&ThreadId::from(thread)).await.unwrap().checkpoints.len());
    }
    lengths
}

#[tokio::test(start_paused = true)]
async fn a_prune_goes_on_past_a_busy_thread_and_ends_with_an_error() {
    let store = filled().await;
    let prune = ["prune", "apply", "--all", "--keep", "latest", "--yes"];
    assert_eq!(run_on(&store, &prune).await, Exit::Error);
    assert_eq!(lengths(&store).await, [1, 4, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_conversion_goes_on_past_a_busy_thread_and_ends_with_an_error() {
    let store = filled().await;
    assert_eq!(run_on(&store, &["convert", "--all", "--to", "delta"]).await, Exit::Error);
    let mut marked = Vec::new();
    for thread in ["a", BUSY, "c"] {
        let image = store.read_thread(&ThreadId::from(thread)).await.unwrap();
        marked.push(image.checkpoints.values().any(|tuple| tuple.metadata.delta_marker));
    }
    assert_eq!(marked, [true, false, true]);
}

#[tokio::test(start_paused = true)]
async fn an_export_goes_on_past_a_busy_thread_and_ends_with_an_error() {
    let store = Busy { reads_fail: true, ..filled().await };
    let to = tempfile::tempdir().unwrap();
    let out = to.path().display().to_string();
    assert_eq!(run_on(&store, &["export", "--all", "--out", &out]).await, Exit::Error);
    let mut files: Vec<_> = std::fs::read_dir(to.path())
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    assert_eq!(files, ["a.ndjson", "c.ndjson"]);
}

#[tokio::test]
async fn a_thread_that_was_deleted_meanwhile_stops_no_pass() {
    let store = filled().await;
    for command in [
        &["prune", "plan", "--all", "--keep", "latest"][..],
        &["retention", "plan", "--all"],
        &["retention", "apply", "--all", "--yes"],
        &["convert", "--all", "--to", "delta", "--dry-run"],
        &["verify", "--all"],
        &["threads", "list"],
        &["threads", "du"],
    ] {
        assert_eq!(run_on(&store, command).await, Exit::Done, "{command:?}");
    }
}

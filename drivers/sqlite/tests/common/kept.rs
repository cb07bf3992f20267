//! Threads with every kind of row, for the fixtures of all formats: what is stored in them, and how they go on.
#![allow(dead_code, unreachable_pub, reason = "each test uses its part")]

use std::sync::Arc;

use serde_json::{Map, Value as Json, json};
use threadkeep::channel::Schema;
use threadkeep::checkpoint::{CheckpointTuple, Stored, TaskWrites};
use threadkeep::id::{IdSource, NodeName};
use threadkeep::metadata::{DURATION_NODE, Source};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::Saver;
use threadkeep::state::{HistoryQuery, StateAccessor, Update};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::value::ChannelValue;
use threadkeep::verify::verify;

pub const THREADS: [(&str, ChannelMode); 2] = [("full", ChannelMode::Full), ("delta", ChannelMode::Delta)];

pub fn accessor(saver: &Arc<dyn Saver>, mode: ChannelMode) -> StateAccessor {
    let table = Schema::thread_state().compile(mode, 4).unwrap();
    StateAccessor::new(saver.clone(), Arc::new(table), Arc::new(IdSource::default()))
}

fn value(value: &ChannelValue) -> Json {
    value.to_json().unwrap()
}

fn row(row: &TaskWrites) -> Json {
    let writes = row.writes.iter().map(|write| {
        json!({"channel": write.channel.as_str(), "overwrite": write.overwrite, "value": value(&write.value)})
    });
    json!({"task": row.task.to_string(), "node": row.node.as_str(), "index": row.index,
           "writes": writes.collect::<Vec<_>>()})
}

fn checkpoint(tuple: &CheckpointTuple) -> Json {
    let channels = tuple.checkpoint.channels.iter().map(|(name, entry)| {
        let (kind, held) = match &entry.stored {
            Stored::Value(held) => ("value", value(held)),
            Stored::Snapshot(held) => ("snapshot", value(held)),
            Stored::Sentinel => ("sentinel", Json::Null),
            Stored::Held => panic!("everything is loaded"),
        };
        (name.to_string(), json!({"version": format!("{:?}", entry.version), "stored": kind, "value": held}))
    });
    json!({
        "namespace": tuple.namespace.as_str(),
        "id": tuple.checkpoint.id.to_string(),
        "parent": tuple.parent.map(|id| id.to_string()),
        "next": tuple.checkpoint.next.iter().map(NodeName::as_str).collect::<Vec<_>>(),
        "applied": tuple.checkpoint.applied.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "metadata": tuple.metadata.to_json(),
        "channels": channels.collect::<Map<_, _>>(),
        "writes": tuple.writes.iter().map(row).collect::<Vec<_>>(),
    })
}

/// Everything that is stored, by thread.
pub async fn contents(saver: &dyn Saver) -> Json {
    let mut all = Map::new();
    for thread in saver.threads(None, 100).await.unwrap() {
        let image = saver.read_thread(&thread).await.unwrap();
        let checkpoints: Vec<Json> = image.checkpoints.values().map(checkpoint).collect();
        all.insert(thread.to_string(), checkpoints.into());
    }
    all.into()
}

fn message(number: usize) -> Json {
    let texts = ["short", "a message that is too long to be stored inline, so it is an element of its own"];
    json!([{"type": "ai", "id": format!("m{number}"), "content": texts[number % 2], "n": number,
            "floats": [0.1, -1e300], "large": u64::MAX, "text": "gr\u{fc}\u{df}e \u{1f9f5}"}])
}

/// Two threads with every kind of row: snapshots and changes, parallel tasks, a fork, a note, a pending row with a
/// question, metadata that shares its entries, and a nested namespace.
pub async fn write(saver: &Arc<dyn Saver>) {
    for (thread, mode) in THREADS {
        let (thread, accessor) = (thread.into(), accessor(saver, mode));
        let mut ids = Vec::new();
        let mut writer = StepWriter::open(&accessor, &thread, None).await.unwrap();
        for step in 0..12_usize {
            for (index, durability) in [(1_u32, Durability::Now), (0, Durability::WithCommit)] {
                let task = writer.start_task(&"model".into(), index);
                let write = writer.write("messages", message(step * 2 + index as usize), false).unwrap();
                writer.finish_task(task, vec![write], durability).await.unwrap();
            }
            if step == 5 {
                let task = writer.start_task(&"titler".into(), 2);
                let write = writer.write("title", json!("A title"), false).unwrap();
                writer.finish_task(task, vec![write], Durability::WithCommit).await.unwrap();
            }
            let runs: Map<_, _> = (0..=step).map(|n| (format!("run-{n}"), json!(n))).collect();
            let extra = Map::from_iter([("run_durations".to_owned(), runs.into())]);
            let state = writer.commit(Source::Loop, vec!["model".into()], extra).await.unwrap();
            ids.push(state.key.id);
        }
        let writes = vec![accessor.write("messages", message(100), false).unwrap()];
        let fork = Update { at: Some(ids[3]), node: "human".into(), writes, extra: Map::new() };
        let head = accessor.update(&thread, fork).await.unwrap();
        let note = Map::from_iter([("writes".to_owned(), json!({ DURATION_NODE: {} }))]);
        accessor.annotate(&head, note).await.unwrap();
        let mut writer = StepWriter::open(&accessor, &thread, None).await.unwrap();
        let task = writer.start_task(&"model".into(), 0);
        let pending = vec![writer.write("messages", message(200), false).unwrap()];
        writer.finish_task(task, pending, Durability::Now).await.unwrap();
        writer.fail_task(writer.start_task(&"model".into(), 1), "it failed").await.unwrap();
        accessor.in_namespace("nested".into()).create(&thread, Map::new()).await.unwrap();
    }
}

/// Adds a message to each thread of a store that was opened this many times before, each time with this.
pub async fn goes_on(saver: &Arc<dyn Saver>, opened: usize) {
    for (thread, mode) in THREADS {
        let (thread, accessor) = (thread.into(), accessor(saver, mode));
        assert_eq!(verify(&**saver, &thread, accessor.table()).await.unwrap(), []);
        let history = accessor.history(&thread, HistoryQuery::default()).await.unwrap();
        assert_eq!(history.len(), 14 + opened);
        let writes = vec![accessor.write("messages", message(300 + opened), false).unwrap()];
        let update = Update { at: None, node: "human".into(), writes, extra: Map::new() };
        let state = accessor.update(&thread, update).await.unwrap();
        let messages = state.json("messages").unwrap().unwrap();
        // Four steps of two, the fork, and what was added here.
        assert_eq!(messages.as_array().unwrap().len(), 4 * 2 + 1 + opened + 1);
    }
}

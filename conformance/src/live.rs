//! Threads as the engine runs them: for cases about the saver and the engine together.

use std::sync::Arc;

use serde_json::{Map, Value as Json, json};
use threadkeep::Result;
use threadkeep::channel::{Behaviour, Fold, Schema};
use threadkeep::checkpoint::Write;
use threadkeep::id::{CheckpointId, IdSource, ThreadId};
use threadkeep::metadata::Source;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::Saver;
use threadkeep::state::{HistoryQuery, StateAccessor, StateSnapshot, Update};
use threadkeep::step::{Durability, StepWriter};

use crate::case::Failure;
use crate::kit::MESSAGES;

/// A channel that keeps the order of its writes and has no ids.
pub(crate) const LOG: &str = "log";

/// The service's thread state plus `log`, compiled for a mode and a cadence, on a saver.
pub(crate) fn accessor(saver: &Arc<dyn Saver>, mode: ChannelMode, frequency: u64) -> Result<StateAccessor> {
    let concat = Fold::new(Some(json!([])), |list, more| match (list, more) {
        (Json::Array(list), Json::Array(more)) => Ok(list.into_iter().chain(more).collect()),
        (_, other) => Err(threadkeep::Error::InvalidUpdate(format!("log takes lists, not {other}"))),
    });
    let schema = Schema::thread_state().with(LOG, Behaviour::Accumulating(Arc::new(concat)));
    let table = Arc::new(schema.compile(mode, frequency)?);
    Ok(StateAccessor::new(saver.clone(), table, Arc::new(IdSource::default())))
}

/// All modes and cadences that cases about both should cover.
pub(crate) const MODES: [(ChannelMode, u64); 5] = [
    (ChannelMode::Full, 10),
    (ChannelMode::Delta, 1),
    (ChannelMode::Delta, 2),
    (ChannelMode::Delta, 3),
    (ChannelMode::Delta, 1000),
];

/// A list of one message, whose text is its id.
pub(crate) fn message(id: &str) -> Json {
    json!([{ "type": "ai", "id": id, "content": id }])
}

/// A write of one message.
pub(crate) fn says(accessor: &StateAccessor, id: &str) -> Result<Write> {
    accessor.write(MESSAGES, message(id), false)
}

/// Creates a thread with an empty first checkpoint.
pub(crate) async fn create(accessor: &StateAccessor, thread: &str) -> Result<StateSnapshot> {
    accessor.create(&thread.into(), Map::new()).await
}

/// Opens a writer on the head or on an older checkpoint.
pub(crate) async fn open(
    accessor: &StateAccessor,
    thread: &str,
    at: Option<CheckpointId>,
) -> Result<StepWriter> {
    StepWriter::open(accessor, &thread.into(), at).await
}

/// A superstep of parallel tasks, each with these writes, that finish in the order of `finished`.
pub(crate) async fn parallel(
    writer: &mut StepWriter,
    tasks: Vec<Vec<Write>>,
    finished: &[usize],
) -> Result<StateSnapshot> {
    for place in finished {
        let index = u32::try_from(*place).unwrap_or(u32::MAX);
        let task = writer.start_task(&"worker".into(), index);
        let writes = tasks.get(*place).cloned().unwrap_or_default();
        let when = if place % 2 == 0 { Durability::Now } else { Durability::WithCommit };
        writer.finish_task(task, writes, when).await?;
    }
    writer.commit(Source::Loop, vec![], Map::new()).await.cloned()
}

/// A superstep with one task that writes one message.
pub(crate) async fn turn(writer: &mut StepWriter, id: &str) -> Result<StateSnapshot> {
    let write = writer.write(MESSAGES, message(id), false)?;
    parallel(writer, vec![vec![write]], &[0]).await
}

/// An update from outside, on the head or an older checkpoint, that writes one message.
pub(crate) async fn update(
    accessor: &StateAccessor,
    thread: &str,
    at: Option<CheckpointId>,
    writes: Vec<Write>,
) -> Result<StateSnapshot> {
    let update = Update { at, node: "outside".into(), writes, extra: Map::new() };
    accessor.update(&thread.into(), update).await
}

/// The ids of the messages in a state.
pub(crate) fn ids(state: &StateSnapshot) -> Result<Vec<String>> {
    let messages = state.json(MESSAGES)?.unwrap_or_default();
    let id = |message: &Json| message["id"].as_str().unwrap_or_default().to_owned();
    Ok(messages.as_array().into_iter().flatten().map(id).collect())
}

/// The state at a checkpoint, read back.
pub(crate) async fn at(
    accessor: &StateAccessor,
    thread: &str,
    id: Option<CheckpointId>,
) -> Result<StateSnapshot, Failure> {
    let state = accessor.get(&thread.into(), id).await?;
    state.ok_or_else(|| Failure::new(format_args!("thread {thread} has no checkpoint {id:?}")))
}

/// Every checkpoint with the ids of its messages, oldest first.
pub(crate) async fn whole_history(
    accessor: &StateAccessor,
    thread: &str,
) -> Result<Vec<(CheckpointId, Vec<String>)>> {
    let thread = ThreadId::from(thread);
    let states = accessor.history(&thread, HistoryQuery::default()).await?;
    states.iter().rev().map(|state| Ok((state.key.id, ids(state)?))).collect()
}

//! The supersteps with which a thread can be created, for example to take over a conversation.

use std::collections::BTreeMap;

use serde_json::{Map, Value};
use threadkeep::Error;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::checkpoint::Write;
use threadkeep::id::{ChannelName, NodeName, ThreadId};
use threadkeep::metadata::Source;
use threadkeep::saver::Flush;
use threadkeep::state::StateAccessor;
use threadkeep::step::{Durability, StepWriter};
use threadkeep::value::ChannelValue;
use threadkeep_subagents::owned;
use utoipa::ToSchema;

use super::described;
use super::error::ApiError;
use super::fields::{Fields, Flaw};
use super::run_body::{Command, messages};
use super::state::{known_channels, unprocessable};

const FAILED: &str = "Failed to create thread";
/// The maximum number of supersteps of a new thread: each becomes a checkpoint, whether or not the client waits.
pub(super) const MAX_STEPS: usize = 10_000;
/// The maximum number of updates of one: a reader of its checkpoint looks for each of its tasks among all.
const MAX_UPDATES: usize = 1000;

/// A superstep as sent: the updates of nodes that ran in parallel.
#[derive(Debug)]
pub(super) struct Superstep(Vec<StateUpdate>);

#[derive(Debug)]
struct StateUpdate {
    values: Map<String, Value>,
    node: NodeName,
}

/// A superstep of a new thread.
#[derive(Debug, ToSchema)]
#[allow(dead_code, reason = "described; read into a superstep")]
pub(super) struct SuperstepBody {
    /// The updates of its nodes, which ran in parallel.
    #[schema(max_items = 1000)]
    updates: Vec<StateUpdateBody>,
}

/// What a node wrote.
#[derive(Debug, ToSchema)]
#[allow(dead_code, reason = "described; read into a superstep")]
struct StateUpdateBody {
    /// Channel values, combined with the state as a run does.
    #[schema(schema_with = described::state_values_or_null)]
    values: Option<Map<String, Value>>,
    /// `{update}`: the same as `values`, which it replaces.
    #[schema(schema_with = described::update_command_or_null)]
    command: Option<Value>,
    /// The node.
    as_node: String,
}

impl Superstep {
    /// Reads a superstep.
    pub(super) fn from_fields(fields: &mut Fields<'_>) -> Self {
        let updates = fields.field("updates").required().at_most(MAX_UPDATES);
        Self(updates.items(StateUpdate::from_fields).unwrap_or_default())
    }
}

impl StateUpdate {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let values = fields.field("values").nullable().object();
        let command = Command::from_fields(fields);
        if command.resume.is_some() || command.goto.is_some() {
            let only = "A superstep is over: its command can only have an update";
            fields.refuse("command", Flaw::unsupported(only), Value::Null);
        }
        if values.is_some() && command.update.is_some() {
            let both = "An update has either values or a command";
            fields.refuse("command", Flaw::new("value_error", both), Value::Null);
        }
        Self {
            values: values.or(command.update).unwrap_or_default(),
            node: fields.field("as_node").required().text().unwrap_or_default().as_str().into(),
        }
    }
}

/// A superstep whose writes can be applied.
pub(super) struct PlannedStep(Vec<(NodeName, Vec<Write>)>);

/// The writes of the supersteps of a new thread, all of which can be applied after each other: a thread is created whole
/// or not at all. Each may change a value that has become long, so others are let in between two of them, and a client
/// that disconnects ends it.
///
/// # Errors
/// 400 for a malformed message, 422 for an unknown channel or a value that a channel refuses.
pub(super) async fn planned(
    accessor: &StateAccessor,
    supersteps: Vec<Superstep>,
) -> Result<Vec<PlannedStep>, ApiError> {
    let mut state: BTreeMap<ChannelName, Option<ChannelValue>> = BTreeMap::new();
    let mut steps = Vec::with_capacity(supersteps.len());
    for (index, superstep) in supersteps.into_iter().enumerate() {
        tokio::task::yield_now().await;
        let refuse = |error: &Error| unprocessable(format!("supersteps[{index}]: {error}"));
        let mut planned = Vec::new();
        for StateUpdate { mut values, node } in superstep.0 {
            known_channels(accessor, &values)?;
            owned::strip_values(&mut values);
            if let Some(sent) = values.remove(MESSAGES_CHANNEL).filter(|sent| !sent.is_null()) {
                let place = format!("supersteps[{index}].messages");
                values.insert(MESSAGES_CHANNEL.to_owned(), messages(&place, sent, accessor.ids())?.into());
            }
            let writes = values.into_iter().map(|(name, value)| accessor.write(&name, value, false));
            planned.push((node, writes.collect::<threadkeep::Result<Vec<_>>>().map_err(|e| refuse(&e))?));
        }
        let mut written: BTreeMap<&ChannelName, Vec<&Write>> = BTreeMap::new();
        for write in planned.iter().flat_map(|(_, writes)| writes) {
            written.entry(&write.channel).or_default().push(write);
        }
        for (name, writes) in written {
            if let Some(behaviour) = accessor.table().behaviour(name) {
                let current = state.remove(name).flatten();
                let value = behaviour.apply(name, current, &writes).map_err(|error| refuse(&error))?;
                state.insert(name.clone(), value);
            }
        }
        steps.push(PlannedStep(planned));
    }
    Ok(steps)
}

/// Writes the supersteps to a thread without a checkpoint. Returns the title that they make.
///
/// # Errors
/// 409 if another writer was faster, 500 if the store fails.
pub(super) async fn write(
    accessor: &StateAccessor,
    thread: &ThreadId,
    steps: Vec<PlannedStep>,
) -> Result<Option<String>, ApiError> {
    let engine = |error: Error| match error {
        Error::Conflict { .. } => ApiError::conflict(format!("Thread {thread} already exists")),
        error => ApiError::from_engine(thread, FAILED, &error),
    };
    accessor.create(thread, Map::new()).await.map_err(engine)?;
    let mut writer = StepWriter::open(accessor, thread, None).await.map_err(engine)?;
    writer.set_flush(Flush::WithNext);
    for PlannedStep(updates) in steps {
        // A store in memory waits for nothing.
        tokio::task::yield_now().await;
        for ((node, writes), index) in updates.into_iter().zip(0_u32..) {
            let task = writer.start_task(&node, index);
            writer.finish_task(task, writes, Durability::WithCommit).await.map_err(engine)?;
        }
        writer.commit(Source::Update, Vec::new(), Map::new()).await.map_err(engine)?;
    }
    writer.flush().await.map_err(engine)?;
    let title = writer.state().map(|state| state.json("title")).transpose().map_err(engine)?;
    Ok(title.flatten().as_ref().and_then(Value::as_str).map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;

    use futures::FutureExt as _;
    use serde_json::json;
    use threadkeep::channel::Schema;
    use threadkeep::id::IdSource;
    use threadkeep::mode::ChannelMode;
    use threadkeep_memory::MemorySaver;

    use super::*;

    #[tokio::test]
    async fn others_are_let_in_between_two_supersteps() {
        const STEPS: usize = 100;
        let table = Schema::thread_state().compile(ChannelMode::Full, 10).unwrap();
        let accessor = StateAccessor::new(
            Arc::new(MemorySaver::default()),
            Arc::new(table),
            Arc::new(IdSource::default()),
        );
        let step = |number: usize| {
            let values = Map::from_iter([("artifacts".to_owned(), json!([number]))]);
            Superstep(vec![StateUpdate { values, node: "n".into() }])
        };
        let mut planning = pin!(planned(&accessor, (0..STEPS).map(step).collect()));
        let mut waits = 0;
        let steps = loop {
            match planning.as_mut().now_or_never() {
                Some(steps) => break steps.unwrap(),
                None => waits += 1,
            }
        };
        assert_eq!((steps.len(), waits), (STEPS, STEPS));
    }
}

//! What a listing says of a checkpoint, from it, its parent and its children.

use std::collections::{HashMap, HashSet};
use std::mem::discriminant;

use serde_json::Value as Json;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::checkpoint::{ChannelEntry, CheckpointTuple, Stored, TaskWrites, Write};
use threadkeep::deletion::RUN_ID_KEY;
use threadkeep::foreign;
use threadkeep::id::{ChannelName, CheckpointId, Namespace, TaskId, ThreadId};
use threadkeep::metadata::Metadata;
use threadkeep::saver::{CheckpointSelector, ListQuery, Load, LocalKey};
use threadkeep::value::{ChannelValue, ListValue};

use crate::error::Result;
use crate::pages::Newest;
use crate::target::Target;

/// A line of the listing.
pub(super) struct Line {
    pub(super) by: Vec<String>,
    pub(super) run: Option<String>,
    pub(super) messages: Option<usize>,
    pub(super) pending: usize,
    pub(super) size: u64,
}

/// What newer checkpoints say about older ones, for a reader that goes from the newest to the oldest: the children of
/// each checkpoint, and the tasks that they applied.
#[derive(Default)]
pub(super) struct Newer(HashMap<LocalKey, Children>);

#[derive(Default)]
pub(super) struct Children {
    pub(super) ids: Vec<CheckpointId>,
    pub(super) applied: HashSet<TaskId>,
}

impl Newer {
    /// Reads the checkpoints from the newest one down to this one.
    pub(super) async fn than(
        target: &Target,
        thread: &ThreadId,
        namespace: Option<&Namespace>,
        id: CheckpointId,
    ) -> Result<Self> {
        let query = ListQuery { namespace: namespace.cloned(), load: Load::None, ..ListQuery::new(thread) };
        let (mut newest, mut newer) = (Newest::new(&**target.saver(), query), Self::default());
        loop {
            let page = newest.next().await?;
            page.iter().take_while(|tuple| tuple.checkpoint.id > id).for_each(|tuple| newer.add(tuple));
            if page.last().is_none_or(|last| last.checkpoint.id <= id) {
                return Ok(newer);
            }
        }
    }

    fn add(&mut self, tuple: &CheckpointTuple) {
        if let Some(parent) = tuple.parent {
            let children = self.0.entry((tuple.namespace.clone(), parent)).or_default();
            children.ids.push(tuple.checkpoint.id);
            children.applied.extend(&tuple.checkpoint.applied);
        }
    }

    pub(super) fn children(&self, tuple: &CheckpointTuple) -> Option<&Children> {
        self.0.get(&(tuple.namespace.clone(), tuple.checkpoint.id))
    }

    /// The rows under a checkpoint that no child applied.
    fn pending<'t>(&self, tuple: &'t CheckpointTuple) -> impl Iterator<Item = &'t TaskWrites> {
        let children = self.children(tuple);
        let is_pending =
            move |row: &&TaskWrites| children.is_none_or(|children| !children.applied.contains(&row.task));
        tuple.writes.iter().filter(is_pending)
    }
}

/// The lines of checkpoints that come newest first, all with their values. `newer` knows of those that came before, and
/// learns of these.
pub(super) async fn lines(target: &Target, page: &[CheckpointTuple], newer: &mut Newer) -> Result<Vec<Line>> {
    for tuple in page {
        newer.add(tuple);
    }
    let mut known: HashMap<LocalKey, CheckpointTuple> =
        page.iter().map(|tuple| ((tuple.namespace.clone(), tuple.checkpoint.id), tuple.clone())).collect();
    let mut messages = Messages { target, values: HashMap::new() };
    let mut lines = Vec::with_capacity(page.len());
    for tuple in page.iter().rev() {
        let parent = match tuple.parent {
            Some(id) => {
                let place = (tuple.namespace.clone(), id);
                if !known.contains_key(&place)
                    && let Some(parent) = stored_at(target, &tuple.thread, &place.0, id).await?
                {
                    known.insert(place.clone(), parent);
                }
                known.get(&place)
            }
            None => None,
        };
        let rows = parent.map_or(&[][..], |parent| &parent.writes);
        let by = tuple.checkpoint.applied.iter().filter_map(|task| rows.iter().find(|row| row.task == *task));
        lines.push(Line {
            by: by.map(|row| row.node.to_string()).collect(),
            run: tuple.metadata.extra.get(RUN_ID_KEY).and_then(Json::as_str).map(str::to_owned),
            messages: messages.count(tuple, parent).await,
            pending: newer.pending(tuple).count(),
            size: size(tuple, parent),
        });
    }
    lines.reverse();
    Ok(lines)
}

/// What a checkpoint adds, in bytes of encoded values.
fn size(tuple: &CheckpointTuple, parent: Option<&CheckpointTuple>) -> u64 {
    let metadata = Json::Object(own_metadata(tuple).to_json()).to_string().len();
    let held = |name: &ChannelName, entry: &ChannelEntry| {
        let held = parent.and_then(|parent| parent.checkpoint.channels.get(name));
        held.is_some_and(|held| {
            held.version == entry.version && discriminant(&held.stored) == discriminant(&entry.stored)
        })
    };
    let own = tuple.checkpoint.channels.iter().filter(|(name, entry)| !held(name, entry));
    let own: usize = own.filter_map(|(_, entry)| entry.stored.value()).map(ChannelValue::encoded_len).sum();
    let rows: usize =
        tuple.writes.iter().flat_map(|row| &row.writes).map(|write| write.value.encoded_len()).sum();
    (metadata + own + rows) as u64
}

/// The metadata of a checkpoint without the large maps, which notes carry along.
pub(super) fn own_metadata(tuple: &CheckpointTuple) -> Metadata {
    Metadata { extra: tuple.metadata.extra.split().0.into(), ..tuple.metadata.clone() }
}

/// Counts the messages of checkpoints, parents before their children: a state is derived from its parent's.
struct Messages<'a> {
    target: &'a Target,
    values: HashMap<LocalKey, Option<ChannelValue>>,
}

impl Messages<'_> {
    /// The number of messages; `None` if the state cannot be read.
    async fn count(&mut self, tuple: &CheckpointTuple, parent: Option<&CheckpointTuple>) -> Option<usize> {
        let channel = ChannelName::from(MESSAGES_CHANNEL);
        let value = match tuple.checkpoint.channels.get(&channel).map(|entry| &entry.stored) {
            None => return Some(0),
            Some(Stored::Value(value) | Stored::Snapshot(value)) => Some(value.clone()),
            // Only LangGraph knows its reducer.
            Some(Stored::Sentinel) if foreign::changed(tuple, parent, &channel) => None,
            Some(Stored::Sentinel) => self.replayed(tuple, parent, &channel).await,
            Some(Stored::Held) => None,
        };
        let count = value.as_ref().and_then(|value| value.as_list().map(ListValue::len));
        self.values.insert((tuple.namespace.clone(), tuple.checkpoint.id), value);
        count
    }

    async fn replayed(
        &self,
        tuple: &CheckpointTuple,
        parent: Option<&CheckpointTuple>,
        channel: &ChannelName,
    ) -> Option<ChannelValue> {
        let parent = parent?;
        let current = match parent.checkpoint.channels.get(channel).map(|entry| &entry.stored) {
            None => None,
            Some(Stored::Value(value) | Stored::Snapshot(value)) => Some(value.clone()),
            Some(_) => match self.values.get(&(parent.namespace.clone(), parent.checkpoint.id)) {
                Some(value) => Some(value.clone()?),
                None => Some(self.read(parent, channel).await?),
            },
        };
        let mut writes: Vec<&Write> = Vec::new();
        for task in &tuple.checkpoint.applied {
            let row = parent.writes.iter().find(|row| row.task == *task)?;
            writes.extend(row.writes.iter().filter(|write| write.channel == *channel));
        }
        self.target.table.behaviour(channel)?.apply(channel, current, &writes).ok()?
    }

    /// The value at a checkpoint, replayed from its nearest snapshot.
    async fn read(&self, tuple: &CheckpointTuple, channel: &ChannelName) -> Option<ChannelValue> {
        let accessor = self.target.accessor(&tuple.namespace);
        let load = Load::Only([channel.clone()].into());
        let state = accessor.get_loading(&tuple.thread, Some(tuple.checkpoint.id), load).await.ok()??;
        state.value(channel.as_str()).cloned()
    }
}

/// The checkpoint as it is stored, with every value, if it exists.
pub(super) async fn stored_at(
    target: &Target,
    thread: &ThreadId,
    namespace: &Namespace,
    id: CheckpointId,
) -> Result<Option<CheckpointTuple>> {
    let at = CheckpointSelector {
        namespace: namespace.clone(),
        id: Some(id),
        load: Load::All,
        ..CheckpointSelector::head(thread)
    };
    Ok(target.saver().get(&at).await?)
}

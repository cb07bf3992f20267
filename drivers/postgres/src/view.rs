//! Checkpoints assembled from rows and elements.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use serde_json::{Map, Value as Json};
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, CheckpointTuple, Stored, TaskWrites, Write};
use threadkeep::id::{ChannelName, Namespace, ThreadId, Version};
use threadkeep::metadata::{self, Metadata};
use threadkeep::saver::Load;
use threadkeep::value::{ChannelValue, Element, ListValue};
use threadkeep::{Error, Result};
use threadkeep_layout::{Form, Run, continuation, plain, push_run};

use crate::element::{Elements, Space};
use crate::record::{Extra, Kept, Rest, StoredChannel, TaskRecord};
use crate::rows::Node;

/// The most recent list of a channel, so that one that continues it need not be rebuilt.
struct LastList {
    runs: Vec<Run>,
    list: ListValue,
}

/// Loads values. A first pass, in which values are placeholders, collects the elements needed; a second one builds the
/// values.
pub(crate) struct Values<'a> {
    elements: &'a Elements,
    /// The needed elements, while they are collected.
    wanted: Option<Vec<Run>>,
    lists: HashMap<(Namespace, ChannelName), LastList>,
}

impl<'a> Values<'a> {
    /// The first pass.
    pub(crate) fn collecting(elements: &'a Elements) -> Self {
        Self { elements, wanted: Some(Vec::new()), lists: HashMap::new() }
    }

    /// The second pass, with everything loaded.
    pub(crate) fn loaded(elements: &'a Elements) -> Self {
        Self { elements, wanted: None, lists: HashMap::new() }
    }

    /// Whether this is the first pass.
    pub(crate) fn are_collected(&self) -> bool {
        self.wanted.is_some()
    }

    /// The result of the first pass, each element once.
    pub(crate) fn wanted(self) -> Vec<Run> {
        let mut wanted = self.wanted.unwrap_or_default();
        wanted.sort_unstable_by_key(|run| run.start);
        let mut runs: Vec<Run> = Vec::new();
        for run in wanted {
            match runs.last_mut() {
                Some(last) if run.start <= last.end() => last.len = last.len.max(run.end() - last.start),
                _ => push_run(&mut runs, run),
            }
        }
        runs
    }

    fn want(&mut self, runs: &[Run]) -> bool {
        match &mut self.wanted {
            Some(wanted) => {
                wanted.extend_from_slice(runs);
                true
            }
            None => false,
        }
    }

    /// A value. `place` is the channel's entry that has it, if any.
    fn value(
        &mut self,
        form: &Form,
        place: Option<(&Namespace, &ChannelName, Version)>,
    ) -> Result<ChannelValue> {
        let nothing_yet = || plain(Bytes::new());
        let mut list: ListValue = match form {
            Form::Plain(bytes) => return Ok(plain(bytes.clone())),
            Form::Shared(n) => {
                if self.want(&[Run { start: *n, len: 1 }]) {
                    return Ok(nothing_yet());
                }
                return Ok(plain(self.elements.get(Space::Values, *n)?.bytes().clone()));
            }
            Form::Tiny(elements) => elements.iter().cloned().map(Element::from_bytes).collect(),
            Form::List(manifest) => {
                let runs = self.elements.runs(manifest)?;
                if self.want(&runs) {
                    return Ok(nothing_yet());
                }
                match place {
                    Some((namespace, channel, _)) => self.continued(namespace, channel, runs)?,
                    None => self
                        .elements
                        .all(Space::Values, &runs)
                        .map(Result::<&Element>::cloned)
                        .collect::<Result<_>>()?,
                }
            }
        };
        if let Some((_, _, version)) = place {
            list.rebase(version);
        }
        Ok(list.into())
    }

    fn continued(
        &mut self,
        namespace: &Namespace,
        channel: &ChannelName,
        runs: Vec<Run>,
    ) -> Result<ListValue> {
        let key = (namespace.clone(), channel.clone());
        let (mut list, rest) = match self.lists.remove(&key).and_then(|last| last.continued(&runs)) {
            Some(made) => made,
            None => (ListValue::default(), runs.clone()),
        };
        for element in self.elements.all(Space::Values, &rest) {
            list.push(element?.clone());
        }
        self.lists.insert(key, LastList { runs, list: list.clone() });
        Ok(list)
    }

    /// What an entry stores.
    pub(crate) fn stored(
        &mut self,
        namespace: &Namespace,
        channel: &ChannelName,
        entry: &StoredChannel,
    ) -> Result<Stored> {
        let place = Some((namespace, channel, entry.version));
        Ok(match &entry.kept {
            Kept::Sentinel(_) => Stored::Sentinel,
            Kept::Value(form) => Stored::Value(self.value(form, place)?),
            Kept::Snapshot(form) => Stored::Snapshot(self.value(form, place)?),
        })
    }

    /// What a task wrote to the channels that `wants` names.
    pub(crate) fn task(
        &mut self,
        record: &TaskRecord,
        wants: impl Fn(&ChannelName) -> bool,
    ) -> Result<TaskWrites> {
        let mut writes = Vec::with_capacity(record.writes.len());
        for write in record.writes.iter().filter(|write| wants(&write.channel)) {
            writes.push(Write {
                channel: write.channel.clone(),
                value: self.value(&write.value, None)?,
                overwrite: write.overwrite,
            });
        }
        Ok(TaskWrites { task: record.task, node: record.node.clone(), index: record.index, writes })
    }

    /// A checkpoint with everything stored of it.
    pub(crate) fn tuple(
        &mut self,
        thread: &ThreadId,
        namespace: &Namespace,
        node: &Node,
        load: &Load,
    ) -> Result<CheckpointTuple> {
        let mut channels = BTreeMap::new();
        for (channel, entry) in &node.record.channels {
            let stored =
                if load.wants(channel) { self.stored(namespace, channel, entry)? } else { Stored::Held };
            channels.insert(channel.clone(), ChannelEntry { version: entry.version, stored });
        }
        let writes = node.tasks.iter().map(|task| self.task(task, |_| true)).collect::<Result<_>>()?;
        Ok(CheckpointTuple {
            thread: thread.clone(),
            namespace: namespace.clone(),
            checkpoint: Checkpoint {
                id: node.id,
                channels,
                next: node.record.next.clone(),
                applied: node.record.applied.clone(),
            },
            parent: node.record.parent,
            metadata: metadata(node, self.elements)?,
            writes,
        })
    }
}

impl LastList {
    /// If this list is a prefix of the list of these runs: this list, and the remaining runs.
    fn continued(self, runs: &[Run]) -> Option<(ListValue, Vec<Run>)> {
        Some((self.list, continuation(&self.runs, runs)?))
    }
}

/// The metadata of a checkpoint.
pub(crate) fn metadata(node: &Node, elements: &Elements) -> Result<Metadata> {
    let record = &node.record;
    let mut metadata = Metadata::new(record.source, record.step);
    metadata.delta_marker = record.delta_marker;
    metadata.parents =
        record.parents.iter().map(|(namespace, id)| (namespace.as_str().into(), *id)).collect();
    metadata.counters = record.counters.clone();
    metadata.extra = extra(&record.extra, elements)?;
    Ok(metadata)
}

/// `extra` metadata.
pub(crate) fn extra(extra: &Extra, elements: &Elements) -> Result<metadata::Extra> {
    let rest = match &extra.rest {
        Rest::Empty => Map::new(),
        Rest::Inline(bytes) => object(&Element::from_bytes(bytes.clone()))?,
        Rest::Shared(n) => object(elements.get(Space::Structure, *n)?)?,
    };
    let mut maps = Vec::with_capacity(extra.maps.len());
    for (key, runs) in &extra.maps {
        maps.push((key.clone(), elements.object(key, runs)?));
    }
    Ok(metadata::Extra::sharing(rest, maps))
}

fn object(element: &Element) -> Result<Map<String, Json>> {
    match element.to_json()? {
        Json::Object(map) => Ok(map),
        _ => Err(Error::corrupt("checkpoint metadata", "it is not an object")),
    }
}

//! Turns an operation of a program into a call that is valid at that point.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::json;
use threadkeep::Result;
use threadkeep::checkpoint::{
    ChannelEntry, Checkpoint, CheckpointKey, CheckpointTuple, ERROR_CHANNEL, RESUME_CHANNEL, Stored,
    TaskWrites, Write,
};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, TaskId, ThreadId, Version};
use threadkeep::metadata::{Counters, Metadata, Source};
use threadkeep::saver::{Flush, StepCommit};
use threadkeep::value::{ChannelValue, Element, ListValue};

use super::play::World;
use super::program::{ChainId, Change, Commit, Edit, Flaw, How, Kind, Order, Small, Target, When, Written};
use crate::kit::scatter;

pub(super) const CHANNELS: [&str; 3] = ["messages", "notes", "title"];
pub(super) const NAMESPACES: [&str; 2] = ["", "nested"];

/// The values of a checkpoint's channels. One version of a channel has one value everywhere.
pub(super) type Values = BTreeMap<ChannelName, ChannelValue>;

/// A commit, and what belongs to it.
#[derive(Debug, Clone)]
pub(super) struct Resolved {
    pub(super) parent: Option<CheckpointKey>,
    /// Rows to be put under the parent before the commit.
    pub(super) early: Vec<TaskWrites>,
    pub(super) step: StepCommit,
    /// The values of the new checkpoint's channels.
    pub(super) values: Values,
}

/// A rewrite of a thread, and the values of the checkpoints that it puts at new places.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) thread: ThreadId,
    pub(super) remove: Vec<CheckpointKey>,
    pub(super) put: Vec<CheckpointTuple>,
}

/// The item that a program's number selects.
fn pick<T>(items: &[T], n: u8) -> Option<&T> {
    items.get(usize::from(n).checked_rem(items.len())?)
}

/// The item this far before the last.
pub(super) fn pick_back<T>(items: &[T], back: u8) -> Option<&T> {
    items.iter().rev().nth(usize::from(back).checked_rem(items.len())?)
}

/// Grows with `n`, and soon crosses the middle of the range of the first byte.
fn checkpoint_id(n: u16) -> CheckpointId {
    let mut bytes = [0x5a; 16];
    bytes[..2].copy_from_slice(&(0x7ff4 + n).to_be_bytes());
    CheckpointId::from_bytes(bytes)
}

impl World<'_> {
    pub(super) fn resolve(&mut self, commit: &Commit) -> Result<Resolved> {
        let ChainId { thread, namespace } = commit.place;
        let attempt = self.attempts.entry((thread, namespace)).or_default();
        *attempt += 1;
        let n = *attempt;
        let thread = self.threads[usize::from(thread)].clone();
        let namespace = Namespace::new(NAMESPACES[usize::from(namespace)]);

        let chain = self.model.chain(&thread, &namespace);
        let expected_head = chain.last().map(|tuple| tuple.checkpoint.id);
        let parent = pick_back(&chain, commit.back).map(|tuple| (*tuple).clone());
        let parent_key = parent.as_ref().map(CheckpointTuple::key);
        let old = parent_key.as_ref().and_then(|key| self.values.get(key)).cloned().unwrap_or_default();

        let mut step = StepCommit {
            parent: parent_key.as_ref().map(|key| key.id),
            expected_head,
            checkpoint: Checkpoint {
                id: checkpoint_id(n),
                channels: BTreeMap::new(),
                next: ["model", "tools"][..usize::from(n % 3)].iter().map(|node| (*node).into()).collect(),
                applied: Vec::new(),
            },
            metadata: metadata(n),
            writes: Vec::new(),
            pending: Vec::new(),
            flush: [Flush::Now, Flush::WithNext][usize::from(n % 3 == 1)],
            thread,
            namespace,
        };
        if let Change::Write(Edit::Every(every), _) = commit.channels[0] {
            let map = multiples(every).map(|n| (format!("{n:02}").into(), Arc::new(json!(n))));
            step.metadata.extra.insert_object("many", map.collect());
        }
        let values = self.store_channels(&mut step, commit, parent.as_ref(), &old)?;
        count(&mut step, parent.as_ref(), n);
        if let Some(parent) = parent.as_ref().filter(|_| n % 4 == 3) {
            // It takes the parent's place; a row that comes twice is merged.
            step.pending = parent.writes.iter().chain(parent.writes.first()).cloned().collect();
        }
        let early = match &parent {
            Some(parent) => self.run_tasks(&mut step, commit, parent, &old)?,
            None => Vec::new(),
        };
        if let Some(flaw) = commit.flaw {
            spoil(&mut step, flaw);
        }
        Ok(Resolved { parent: parent_key, early, step, values })
    }

    /// Fills in the entries of the checkpoint; returns the values they stand for.
    fn store_channels(
        &mut self,
        step: &mut StepCommit,
        commit: &Commit,
        parent: Option<&CheckpointTuple>,
        old: &Values,
    ) -> Result<Values> {
        let entries = parent.map(|parent| &parent.checkpoint.channels);
        let last = entries.and_then(|entries| entries.values().map(|entry| entry.version.counter).max());
        let life = self.lives[usize::from(commit.place.thread)];
        let attempt = self.attempts.get(&(commit.place.thread, commit.place.namespace)).copied().unwrap_or(0);
        let new =
            Version { counter: last.unwrap_or(0) + 1, random: scatter(life << 16 | u64::from(attempt)) };
        let mut values = Values::new();
        for (name, change) in CHANNELS.into_iter().map(ChannelName::from).zip(commit.channels) {
            let had =
                entries.and_then(|entries| entries.get(&name)).map(|entry| entry.version).zip(old.get(&name));
            let (version, value, kind) = match (change, had) {
                (Change::Write(edit, kind), _) => (new, self.edit(old.get(&name), edit)?, Some(kind)),
                (Change::Again(kind), Some((version, value))) => (version, value.clone(), Some(kind)),
                (Change::Hold, Some((version, value))) => (version, value.clone(), None),
                (Change::Again(_) | Change::Hold, None) => continue,
            };
            let stored = match kind {
                None => Stored::Held,
                Some(Kind::Value) => Stored::Value(value.clone()),
                Some(Kind::Sentinel) if parent.is_some() => Stored::Sentinel,
                Some(Kind::Snapshot | Kind::Sentinel) => Stored::Snapshot(value.clone()),
            };
            step.checkpoint.channels.insert(name.clone(), ChannelEntry { version, stored });
            values.insert(name, value);
        }
        Ok(values)
    }

    /// Fills in the tasks of the commit; returns the rows that are put before it.
    fn run_tasks(
        &mut self,
        step: &mut StepCommit,
        commit: &Commit,
        parent: &CheckpointTuple,
        old: &Values,
    ) -> Result<Vec<TaskWrites>> {
        let mut early = Vec::new();
        for task in &commit.tasks {
            let row = self.new_row(task.id, &task.writes, old)?;
            match task.when {
                When::BeforeTheCommit => early.push(row.clone()),
                When::WithTheCommit => step.writes.push(row.clone()),
                When::Both => {
                    let mut part = row.clone();
                    part.writes.truncate(row.writes.len().div_ceil(2));
                    early.push(part);
                    step.writes.push(row.clone());
                }
            }
            if task.applied {
                step.checkpoint.applied.push(row.task);
            }
        }
        if let Some(row) = commit.reapply.and_then(|n| pick(&parent.writes, n)) {
            step.checkpoint.applied.push(row.task);
        }
        match commit.order {
            Order::AsStored => {}
            Order::Backwards => step.checkpoint.applied.reverse(),
            Order::ById => step.checkpoint.applied.sort_unstable(),
        }
        Ok(early)
    }

    /// The row of a [`super::program::Op::Put`], and the checkpoint to put it under.
    pub(super) fn resolve_put(
        &mut self,
        place: ChainId,
        back: u8,
        again: Option<u8>,
        task: u8,
        writes: &[Written],
    ) -> Result<Option<(CheckpointKey, TaskWrites)>> {
        let thread = self.threads[usize::from(place.thread)].clone();
        let namespace = Namespace::new(NAMESPACES[usize::from(place.namespace)]);
        let chain = self.model.chain(&thread, &namespace);
        let Some(at) = pick_back(&chain, back).map(|tuple| (*tuple).clone()) else {
            // In an empty namespace nothing can be put.
            let nowhere = CheckpointKey { thread, namespace, id: checkpoint_id(0) };
            return Ok(Some((nowhere, self.new_row(task, writes, &Values::new())?)));
        };
        let key = at.key();
        let old = self.values.get(&key).cloned().unwrap_or_default();
        let mut row = self.new_row(task, writes, &old)?;
        if let Some(known) = again.and_then(|n| pick(&at.writes, n)) {
            // More writes of an existing task. One that was applied takes none of them.
            let ordinary = known.writes.iter().filter(|write| !write.is_special()).cloned();
            let more = std::mem::take(&mut row.writes).into_iter();
            row = TaskWrites { writes: ordinary.chain(more).collect(), ..known.clone() };
        }
        Ok(Some((key, row)))
    }

    /// The rewrite of a [`super::program::Op::Rewrite`]; `None` if there is nothing to rewrite.
    pub(super) fn resolve_rewrite(&self, place: ChainId, back: u8, how: How) -> Option<Plan> {
        let thread = self.threads[usize::from(place.thread)].clone();
        let namespace = Namespace::new(NAMESPACES[usize::from(place.namespace)]);
        let chain = self.model.chain(&thread, &namespace);
        let it = (*pick_back(&chain, back)?).clone();
        let mut plan = Plan { thread, remove: Vec::new(), put: Vec::new() };
        match how {
            How::Remove => plan.remove.push(it.key()),
            How::DropPending => {
                let mut it = it;
                let key = it.key();
                it.writes.retain(|row| self.model.is_applied(&key, row));
                plan.put.push(it);
            }
            How::Root => {
                let mut family = BTreeSet::from([it.checkpoint.id]);
                for tuple in &chain {
                    if tuple.parent.is_some_and(|parent| family.contains(&parent)) {
                        family.insert(tuple.checkpoint.id);
                    }
                }
                plan.remove = chain.iter().map(|tuple| tuple.key()).collect();
                plan.remove.retain(|key| !family.contains(&key.id));
                plan.put.push(rooted(it.clone(), self.values.get(&it.key())?));
            }
            How::Copy => {
                let other = self.threads[1 - usize::from(place.thread)].clone();
                if !self.model.thread(&other).is_empty() {
                    return None;
                }
                plan.put = self.copied(place.thread);
                plan.thread = other;
            }
        }
        Some(plan)
    }

    /// A whole thread under the other thread's id.
    pub(super) fn copied(&self, from: u8) -> Vec<CheckpointTuple> {
        let [from, to] = [from, 1 - from].map(|n| &self.threads[usize::from(n)]);
        let copy = |tuple: &CheckpointTuple| CheckpointTuple { thread: to.clone(), ..tuple.clone() };
        self.model.thread(from).into_iter().map(copy).collect()
    }

    /// Records an executed rewrite.
    pub(super) fn accept_rewrite(&mut self, place: ChainId, plan: Plan) {
        for key in &plan.remove {
            self.values.remove(key);
        }
        if self.threads[usize::from(place.thread)] != plan.thread {
            self.accept_copy(place.thread, &plan.put);
        }
    }

    /// Records that a thread was copied to the other one, which has these checkpoints now.
    pub(super) fn accept_copy(&mut self, from: u8, copy: &[CheckpointTuple]) {
        let source = &self.threads[usize::from(from)];
        for tuple in copy {
            let of = CheckpointKey { thread: source.clone(), ..tuple.key() };
            let values = self.values.get(&of).cloned().unwrap_or_default();
            self.values.insert(tuple.key(), values);
        }
        for namespace in 0..2 {
            // Commits to the copy get ids after what was copied.
            let attempts = self.attempts.get(&(from, namespace)).copied().unwrap_or(0);
            let own = self.attempts.entry((1 - from, namespace)).or_default();
            *own = attempts.max(*own);
        }
    }

    fn new_row(&mut self, id: u8, writes: &[Written], values: &Values) -> Result<TaskWrites> {
        self.made += 1;
        let mut bytes = [0; 16];
        bytes[0] = id;
        bytes[8..].copy_from_slice(&self.made.to_be_bytes());
        let mut row = TaskWrites {
            task: TaskId::from_bytes(bytes),
            node: ["model", "tools"][usize::from(self.made.is_multiple_of(2))].into(),
            index: u32::try_from(self.made % 7).unwrap_or(0),
            writes: Vec::new(),
        };
        for written in writes {
            let channel = match written.to {
                Target::Channel(n) => CHANNELS[usize::from(n) % CHANNELS.len()],
                Target::Error => ERROR_CHANNEL,
                Target::Resume => RESUME_CHANNEL,
            };
            let value = match written.value {
                Small::Null => json!(null),
                Small::Empty | Small::Current => json!([]),
                Small::Text(n) => json!(format!("text {n}")),
                Small::List(n) => json!([{"id": n, "said": "in a write"}, {"id": n % 3}]),
                Small::Long(n) => json!([format!("{n} is a long one. ").repeat(30)]),
            };
            let value = match (written.value, values.get(channel)) {
                (Small::Current, Some(current)) => current.clone(),
                _ => ChannelValue::from_json(&value)?,
            };
            let mut write = Write { channel: channel.into(), value, overwrite: written.overwrite };
            if write.is_special() {
                // A task has one row per special channel, and none of them replaces a channel's value.
                write.overwrite = false;
                row.writes.retain(|other| other.channel != write.channel);
            }
            row.writes.push(write);
        }
        Ok(row)
    }

    fn edit(&mut self, old: Option<&ChannelValue>, edit: Edit) -> Result<ChannelValue> {
        let mut list = old.and_then(ChannelValue::as_list).cloned().unwrap_or_default();
        match edit {
            Edit::Null => return ChannelValue::from_json(&json!(null)),
            Edit::Text(n) => return ChannelValue::from_json(&json!(format!("text {n}"))),
            Edit::Append(count) => self.append(&mut list, count)?,
            Edit::Restart(count) => {
                list = ListValue::default();
                self.append(&mut list, count)?;
            }
            Edit::Replace(n) => {
                if let Some(at) = usize::from(n).checked_rem(list.len()) {
                    let id = list.get(at).and_then(Element::id).map(ToString::to_string);
                    self.made += 1;
                    let new = Element::from_json(&json!({"id": id, "said": format!("edit {}", self.made)}))?;
                    list.replace(at, new);
                }
            }
            Edit::Remove(n) => {
                if let Some(at) = usize::from(n).checked_rem(list.len()) {
                    list.remove(at);
                }
            }
            Edit::FromElsewhere(n) => {
                list.rebase(Version { counter: u64::MAX, random: n.into() });
                self.append(&mut list, 1)?;
            }
            Edit::Every(every) => {
                let element = |n| Element::from_json(&json!({"id": format!("e{n}"), "said": "one of many"}));
                list = multiples(every).map(element).collect::<Result<_>>()?;
            }
        }
        Ok(list.into())
    }

    /// Appends elements, some of them equal to others.
    fn append(&mut self, list: &mut ListValue, count: u8) -> Result<()> {
        for _ in 0..count {
            self.made += 1;
            let n = self.made % 23;
            let said = if n.is_multiple_of(5) {
                "a long message, ".repeat(20)
            } else {
                format!("message {}", n % 4)
            };
            list.push(Element::from_json(&json!({"id": format!("m{n}"), "said": said}))?);
        }
        Ok(())
    }
}

/// The numbers of the elements of an [`Edit::Every`]: without every second one, they are more runs than a saver lists in place.
fn multiples(every: u8) -> impl Iterator<Item = u8> {
    (0..48).step_by(usize::from(every.max(1)))
}

/// A checkpoint as a root: it has no parent and stores every value itself.
fn rooted(mut tuple: CheckpointTuple, values: &Values) -> CheckpointTuple {
    tuple.parent = None;
    tuple.checkpoint.applied.clear();
    for (name, entry) in &mut tuple.checkpoint.channels {
        if let (Stored::Sentinel, Some(value)) = (&entry.stored, values.get(name)) {
            entry.stored = Stored::Snapshot(value.clone());
        }
    }
    tuple
}

fn metadata(n: u16) -> Metadata {
    let sources = [Source::Input, Source::Loop, Source::Update, Source::Fork];
    let mut metadata = Metadata::new(sources[usize::from(n % 4)], i64::from(n) - 1);
    metadata.delta_marker = n.is_multiple_of(2);
    metadata.extra.insert("third".into(), json!(n % 3));
    metadata
}

/// Gives every second step counters; one that holds the channel has them if its parent has. They grow with `n`.
fn count(step: &mut StepCommit, parent: Option<&CheckpointTuple>, n: u16) {
    let channel = ChannelName::from(CHANNELS[0]);
    let held = step.checkpoint.channels.get(&channel).is_some_and(|entry| entry.stored == Stored::Held);
    let counts = match parent {
        Some(parent) if held => parent.metadata.counters.contains_key(&channel),
        _ => n.is_multiple_of(2),
    };
    if counts {
        step.metadata.counters.insert(channel, Counters { updates: n.into(), supersteps: u64::from(n) * 2 });
    }
}

fn spoil(step: &mut StepCommit, flaw: Flaw) {
    let ghost = |version| ChannelEntry { version, stored: Stored::Held };
    let nowhere = Version { counter: 0, random: 1 };
    match flaw {
        Flaw::StaleHead => {
            let parent = step.parent.filter(|parent| Some(*parent) != step.expected_head);
            step.expected_head = parent;
        }
        Flaw::UnknownParent => step.parent = Some(checkpoint_id(0)),
        Flaw::UnknownTask => step.checkpoint.applied.push(TaskId::from_bytes([0xee; 16])),
        Flaw::HoldsNothing => {
            step.checkpoint.channels.insert("never".into(), ghost(nowhere));
        }
        Flaw::HoldsAnotherVersion => {
            step.checkpoint.channels.insert(CHANNELS[0].into(), ghost(nowhere));
        }
        Flaw::CountsFromNothing => step.metadata.counters.clear(),
        Flaw::CountsFewer => {
            step.metadata.counters.insert(CHANNELS[0].into(), Counters { updates: 1, supersteps: 1 });
        }
        Flaw::OldId => step.checkpoint.id = step.expected_head.unwrap_or(step.checkpoint.id),
    }
}

//! A conversation that commits like the engine.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};
use threadkeep::checkpoint::{
    ChannelEntry, Checkpoint, CheckpointKey, CheckpointTuple, Stored, TaskWrites, Write,
};
use threadkeep::id::{CheckpointId, IdSource, Namespace, SystemClock, ThreadId, Version};
use threadkeep::metadata::{Metadata, Source};
use threadkeep::saver::{Flush, StepCommit};
use threadkeep::value::{ChannelValue, Element, ListValue};

/// The one list channel of a [`Talk`].
pub const MESSAGES: &str = "messages";

/// A thread in which each step appends to one list, which is stored whole, or in delta mode with periodic snapshots.
pub struct Talk {
    pub thread: ThreadId,
    pub ids: IdSource,
    pub head: Option<CheckpointId>,
    pub version: Option<Version>,
    pub messages: ListValue,
    pub step: i64,
    /// In delta mode: the number of steps between snapshots.
    pub snapshots: Option<i64>,
}

impl Talk {
    pub fn new(thread: &str) -> Self {
        let seed =
            thread.bytes().fold(7, |seed: u64, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte)));
        Self {
            thread: thread.into(),
            ids: IdSource::seeded(SystemClock, seed),
            head: None,
            version: None,
            messages: ListValue::default(),
            step: -1,
            snapshots: None,
        }
    }

    pub fn delta(thread: &str, snapshots: i64) -> Self {
        Self { snapshots: Some(snapshots), ..Self::new(thread) }
    }

    pub fn key(&self) -> CheckpointKey {
        CheckpointKey { thread: self.thread.clone(), namespace: Namespace::root(), id: self.head.unwrap() }
    }

    /// A superstep that appends `message`. The first one has no parent and so no writes.
    pub fn say(&self, message: &Json) -> StepCommit {
        let element = Element::from_json(message).unwrap();
        let mut messages = self.messages.clone();
        messages.push(element.clone());
        let version = self.ids.version_after(self.version);
        let mut step = self.empty();
        let stored = match self.snapshots {
            None => Stored::Value(messages.into()),
            Some(every) if (self.step + 1) % every == 0 => Stored::Snapshot(messages.into()),
            Some(_) => Stored::Sentinel,
        };
        step.checkpoint.channels.insert(MESSAGES.into(), ChannelEntry { version, stored });
        if self.head.is_some() {
            let task = self.task(&element);
            step.checkpoint.applied.push(task.task);
            step.writes.push(task);
        }
        step
    }

    /// A task that appends an element.
    pub fn task(&self, element: &Element) -> TaskWrites {
        let written = ChannelValue::List([element.clone()].into_iter().collect());
        let write = Write { channel: MESSAGES.into(), value: written, overwrite: false };
        TaskWrites { task: self.ids.task(), node: "model".into(), index: 0, writes: vec![write] }
    }

    /// A step that changes nothing.
    pub fn empty(&self) -> StepCommit {
        let held = |version| (MESSAGES.into(), ChannelEntry { version, stored: Stored::Held });
        let channels: BTreeMap<_, _> = self.version.map(held).into_iter().collect();
        StepCommit {
            thread: self.thread.clone(),
            namespace: Namespace::root(),
            parent: self.head,
            expected_head: self.head,
            checkpoint: Checkpoint {
                id: self.ids.checkpoint_after(self.head),
                channels,
                next: vec!["model".into()],
                applied: Vec::new(),
            },
            metadata: Metadata::new(Source::Loop, self.step),
            writes: Vec::new(),
            pending: Vec::new(),
            flush: Flush::Now,
        }
    }

    /// Records that `step` was committed, as the engine does.
    pub fn accept(&mut self, step: &StepCommit) {
        let before = self.head.replace(step.checkpoint.id);
        self.step += 1;
        let entry = &step.checkpoint.channels[MESSAGES];
        if matches!(entry.stored, Stored::Held) {
            return;
        }
        self.version = Some(entry.version);
        match entry.stored.value() {
            Some(value) => {
                self.messages = value.as_list().unwrap().clone();
                self.messages.rebase(entry.version);
            }
            None if before.is_some() => {
                let written = step.writes[0].writes[0].value.as_list().unwrap();
                self.messages.push(written.last().unwrap().clone());
            }
            None => {}
        }
    }

    /// Continues from a head that was read, in full mode.
    pub fn resume(&mut self, head: &CheckpointTuple) {
        let entry = &head.checkpoint.channels[MESSAGES];
        self.head = Some(head.checkpoint.id);
        self.step = head.metadata.step + 1;
        self.version = Some(entry.version);
        self.messages = entry.stored.value().unwrap().as_list().unwrap().clone();
    }
}

/// A short message.
pub fn note(n: usize) -> Json {
    json!({ "id": format!("m{n}"), "content": format!("this is what was said as number {n} of the thread") })
}

const WORDS: &str = "the of agent thread model answer because under window planning river seven reply token market \
                     lemon quickly index stored table between carefully paper remote value message green system \
                     checkpoint never always sometimes question history";

/// A chat message of about `len` bytes of text.
pub fn message(number: usize, len: usize) -> Json {
    let words: Vec<&str> = WORDS.split_whitespace().collect();
    let mut state = number as u64 + 1;
    let mut text = String::new();
    while text.len() < len {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push_str(words[usize::try_from(state >> 33).unwrap() % words.len()]);
        text.push(' ');
    }
    let role = if number.is_multiple_of(2) { "human" } else { "ai" };
    json!({ "type": role, "id": format!("m-{number:08}"), "content": text })
}

/// The texts of the messages in a checkpoint.
pub fn texts(tuple: &CheckpointTuple) -> Vec<String> {
    let list = tuple.checkpoint.channels[MESSAGES].stored.value().unwrap().to_json().unwrap();
    list.as_array().unwrap().iter().map(|m| m["content"].as_str().unwrap().to_owned()).collect()
}

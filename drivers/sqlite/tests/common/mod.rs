//! A conversation that commits like the engine, for the driver's tests.
#![allow(dead_code, unreachable_pub, reason = "each test uses its part")]

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};
use threadkeep::checkpoint::{
    ChannelEntry, Checkpoint, CheckpointKey, CheckpointTuple, Stored, TaskWrites, Write,
};
use threadkeep::id::{ChannelName, CheckpointId, IdSource, Namespace, SystemClock, ThreadId, Version};
use threadkeep::metadata::{Metadata, Source};
use threadkeep::saver::{Flush, StepCommit};
use threadkeep::value::{ChannelValue, Element, ListValue};

/// The one list channel of a [`Talk`].
pub const MESSAGES: &str = "messages";

/// A thread in full mode: each step appends to one list and stores the whole of it.
pub struct Talk {
    pub thread: ThreadId,
    pub namespace: Namespace,
    pub ids: IdSource,
    pub head: Option<CheckpointId>,
    pub version: Option<Version>,
    pub messages: ListValue,
    pub step: i64,
}

impl Talk {
    pub fn new(thread: &str) -> Self {
        let seed =
            thread.bytes().fold(7, |seed: u64, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte)));
        Self {
            thread: thread.into(),
            namespace: Namespace::root(),
            ids: IdSource::seeded(SystemClock, seed),
            head: None,
            version: None,
            messages: ListValue::default(),
            step: -1,
        }
    }

    pub fn key(&self) -> CheckpointKey {
        CheckpointKey {
            thread: self.thread.clone(),
            namespace: self.namespace.clone(),
            id: self.head.unwrap(),
        }
    }

    /// A superstep that appends `message`. The first one has no parent and so no writes.
    pub fn say(&self, message: &Json) -> StepCommit {
        let element = Element::from_json(message).unwrap();
        let mut messages = self.messages.clone();
        messages.push(element.clone());
        let version = self.ids.version_after(self.version);
        let mut step = self.empty();
        let value = Stored::Value(messages.into());
        step.checkpoint.channels.insert(MESSAGES.into(), ChannelEntry { version, stored: value });
        if self.head.is_some() {
            let task = self.ids.task();
            let written = ChannelValue::List([element].into_iter().collect());
            let write = Write { channel: MESSAGES.into(), value: written, overwrite: false };
            step.writes.push(TaskWrites { task, node: "model".into(), index: 0, writes: vec![write] });
            step.checkpoint.applied.push(task);
        }
        step
    }

    /// Continues from a head that was read.
    pub fn resume(&mut self, head: &CheckpointTuple) {
        let entry = &head.checkpoint.channels[MESSAGES];
        self.head = Some(head.checkpoint.id);
        self.step = head.metadata.step + 1;
        self.version = Some(entry.version);
        self.messages = entry.stored.value().unwrap().as_list().unwrap().clone();
    }

    /// A step that changes nothing.
    pub fn empty(&self) -> StepCommit {
        let id = self.ids.checkpoint_after(self.head);
        let channels = self.version.map(|version| {
            let channel: ChannelName = MESSAGES.into();
            (channel, ChannelEntry { version, stored: Stored::Held })
        });
        let channels: BTreeMap<_, _> = channels.into_iter().collect();
        StepCommit {
            thread: self.thread.clone(),
            namespace: self.namespace.clone(),
            parent: self.head,
            expected_head: self.head,
            checkpoint: Checkpoint { id, channels, next: vec!["model".into()], applied: Vec::new() },
            metadata: Metadata::new(Source::Loop, self.step),
            writes: Vec::new(),
            pending: Vec::new(),
            flush: Flush::Now,
        }
    }

    /// Records that `step` was committed, as the engine does.
    pub fn accept(&mut self, step: &StepCommit) {
        self.head = Some(step.checkpoint.id);
        self.step += 1;
        if let Some(ChannelEntry { version, stored: Stored::Value(ChannelValue::List(list)) }) =
            step.checkpoint.channels.get(MESSAGES)
        {
            self.messages = list.clone();
            self.messages.rebase(*version);
            self.version = Some(*version);
        }
    }
}

/// Pseudo-random numbers that are the same in every test run.
pub struct Lcg(u64);

impl Lcg {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap()
    }
}

const WORDS: &str = "the of agent thread model answer because under window planning river seven reply token market \
                     lemon quickly index stored table between carefully paper remote value message green system \
                     checkpoint never always sometimes question history";

/// A chat message of about `len` bytes of text.
pub fn message(number: usize, len: usize) -> Json {
    let words: Vec<&str> = WORDS.split_whitespace().collect();
    let mut lcg = Lcg::new(number as u64 + 1);
    let mut text = String::new();
    while text.len() < len {
        text.push_str(words[lcg.next() % words.len()]);
        text.push(' ');
    }
    let role = if number.is_multiple_of(2) { "human" } else { "ai" };
    json!({ "type": role, "id": format!("m-{number:08}"), "content": text })
}

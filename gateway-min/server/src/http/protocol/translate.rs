//! The frames of a run as events of the protocol.
//!
//! The events follow from the frames alone: two clients that follow a run get the same ones, under the same ids, whichever
//! process they ask. A run shows in the channels what its stream modes show; a run that the protocol started has them all.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::event::{Data, Said, Speaker};
use super::filter::Filter;
use super::message::Messages;
use super::tool::{self, Call};
use crate::streams::bridge::{Event, EventId};

/// The name of the thread's own graph.
pub(super) const GRAPH: &str = "lead_agent";

/// Slots of the events that are not a frame's only one.
const VALUES: u64 = 1;
const PASSED_ON: u64 = 80;
const LEFT: u64 = 98;

/// The place of an agent in the tree: empty for the run's own.
type Namespace = Vec<String>;

/// What a run's stream has said so far.
pub(super) struct Translator {
    run: Arc<str>,
    filter: Arc<Filter>,
    /// The newest frame.
    last: Option<EventId>,
    /// The newest frame but `error`.
    spoken: Option<EventId>,
    /// Whether the stream had the run's first frame.
    whole: bool,
    /// Places of which a frame between two messages was there.
    settled: BTreeSet<Namespace>,
    /// A state whose checkpoint may be the next frame: clients want to know the checkpoint first.
    held: Option<(EventId, Namespace, Bytes)>,
    /// Whether states come with their checkpoints, as far as is known.
    pairs: bool,
    messages: Messages,
    /// The calls of tools that are running, by their tasks.
    calls: BTreeMap<String, Call>,
    /// The agents that are at work within calls.
    entered: BTreeSet<Namespace>,
    /// Why the run failed.
    pub(super) failed: Option<String>,
}

/// What is needed of a checkpoint's frame, which has the whole state besides.
#[derive(Deserialize)]
struct CheckpointFrame {
    config: Config,
    parent_config: Option<Config>,
    metadata: Origin,
}

#[derive(Deserialize)]
struct Config {
    configurable: Configurable,
}

#[derive(Deserialize)]
struct Configurable {
    checkpoint_id: String,
}

#[derive(Deserialize)]
struct Origin {
    step: i64,
    source: String,
}

impl Translator {
    pub(super) fn new(run: &str, filter: Arc<Filter>) -> Self {
        Self {
            run: run.into(),
            filter,
            last: None,
            spoken: None,
            whole: true,
            settled: BTreeSet::new(),
            held: None,
            pairs: true,
            messages: Messages::default(),
            calls: BTreeMap::new(),
            entered: BTreeSet::new(),
            failed: None,
        }
    }

    /// The newest frame, if there was one.
    pub(super) fn last(&self) -> Option<EventId> {
        self.last
    }

    /// The newest frame that says something itself, if there was one. Why a run failed is said by its end.
    pub(super) fn spoken(&self) -> Option<EventId> {
        self.spoken
    }

    /// The events of the next frame.
    pub(super) fn frame(&mut self, event: &Event) -> Vec<Said> {
        let mut parts = event.name.split('|');
        let kind = parts.next().unwrap_or_default();
        let place: Namespace = parts.map(str::to_owned).collect();
        let run = Arc::clone(&self.run);
        let speaker = Speaker::of(&run, event.id);
        let mut said = Vec::new();
        if kind != "error" {
            self.spoken = Some(event.id);
        }
        if self.last.replace(event.id).is_none() {
            self.whole = event.id.seq == 0;
            if kind != "error" {
                said.push(speaker.running(json!({ "event": "running", "graph_name": GRAPH })));
            }
        }
        if kind == "checkpoints" {
            said.extend(self.checkpoint(&speaker, place, event));
            return said;
        }
        said.extend(self.let_go());
        self.enter(&speaker, &place, &mut said);
        match kind {
            "values" => self.values(&speaker, place, event, &mut said),
            "messages" if self.wants("messages") => {
                let from_start = self.whole || self.settled.contains(&place);
                said.extend(self.messages.frame(&speaker, &place, &parsed(event), from_start));
            }
            "updates" => self.updates(&speaker, place, event, &mut said),
            "tasks" => self.task(&speaker, place, event, &mut said),
            "custom" if self.wants("custom") => {
                let payload = parsed(event);
                let mut data = json!({});
                if let Some(name) = payload["type"].as_str() {
                    data["name"] = name.into();
                }
                data["payload"] = payload;
                said.push(speaker.say(0, "custom", &place, Data::Json(data)));
            }
            "error" => self.failed = parsed(event)["message"].as_str().map(str::to_owned),
            // `metadata` has said that the run is at work; `debug` is no channel.
            _ => {}
        }
        said
    }

    /// The events after the last frame: what was held back, and the ends of what the run left open.
    pub(super) fn end(&mut self, speaker: &Speaker<'_>) -> Vec<Said> {
        let mut said: Vec<Said> = self.let_go().into_iter().collect();
        if self.wants("messages") {
            said.extend(self.messages.end(speaker, self.failed.as_deref()));
        }
        let status = if self.failed.is_some() { "failed" } else { "interrupted" };
        for (place, slot) in std::mem::take(&mut self.entered).into_iter().zip(LEFT..) {
            said.push(speaker.say(slot, "lifecycle", &place, Data::Json(json!({ "event": status }))));
        }
        said
    }

    fn wants(&self, channel: &str) -> bool {
        self.filter.wants(channel)
    }

    /// A state, when its checkpoint is known, or known not to come.
    fn values(&mut self, speaker: &Speaker<'_>, place: Namespace, event: &Event, said: &mut Vec<Said>) {
        self.settled.insert(place.clone());
        if self.pairs {
            self.held = Some((event.id, place, event.data.clone()));
        } else {
            said.push(speaker.say(VALUES, "values", &place, Data::Text(event.data.clone())));
        }
    }

    /// The held state, which has no checkpoint.
    fn let_go(&mut self) -> Option<Said> {
        let (id, place, state) = self.held.take()?;
        self.pairs = false;
        let run = Arc::clone(&self.run);
        Some(Speaker::of(&run, id).say(VALUES, "values", &place, Data::Text(state)))
    }

    /// A checkpoint, and the state that was held for it.
    fn checkpoint(&mut self, speaker: &Speaker<'_>, place: Namespace, event: &Event) -> Vec<Said> {
        let held = self.held.take_if(|(_, at, _)| *at == place);
        let mut said: Vec<Said> = self.let_go().into_iter().collect();
        if self.wants("checkpoints")
            && let Ok(frame) = threadkeep::json::from_slice::<CheckpointFrame>(&event.data)
        {
            let Origin { step, source } = frame.metadata;
            let mut data =
                json!({ "id": frame.config.configurable.checkpoint_id, "step": step, "source": source });
            if let Some(parent) = frame.parent_config {
                data["parent_id"] = parent.configurable.checkpoint_id.into();
            }
            said.push(speaker.say(0, "checkpoints", &place, Data::Json(data)));
        }
        said.extend(held.map(|(_, place, state)| speaker.say(VALUES, "values", &place, Data::Text(state))));
        said
    }

    fn updates(&mut self, speaker: &Speaker<'_>, place: Namespace, event: &Event, said: &mut Vec<Said>) {
        if self.wants("updates") || self.messages.has_missed() {
            let Value::Object(by_node) = parsed(event) else { return };
            // A stop at a breakpoint is no node's; the run's end says it.
            let by_node = by_node.into_iter().filter(|(_, writes)| writes.is_object());
            for ((node, writes), slot) in by_node.zip(PASSED_ON..) {
                said.extend(self.messages.update(speaker, &place, (&node, &writes)));
                let data = json!({ "node": node, "values": writes });
                said.push(speaker.say(slot, "updates", &place, Data::Json(data)));
            }
        }
        self.settled.insert(place);
    }

    /// The start or the end of a task. That of a tool's is the start or the end of the call too, and of the agent within it.
    fn task(&mut self, speaker: &Speaker<'_>, place: Namespace, event: &Event, said: &mut Vec<Said>) {
        let mut left = None;
        if let Some(task) = tool::task(&event.data) {
            let within: Namespace = place.iter().cloned().chain([format!("tools:{}", task.id)]).collect();
            if let Some(call) = task.started() {
                said.push(speaker.say(0, "tools", &within, Data::Json(call.started())));
                self.calls.insert(task.id.clone(), call);
            } else {
                let call = self.calls.remove(&task.id);
                let ended = tool::ended(call.as_ref(), &task);
                let status = if ended["event"] == "tool-error" { "failed" } else { "completed" };
                said.push(speaker.say(0, "tools", &within, Data::Json(ended)));
                if self.entered.remove(&within) {
                    let data = Data::Json(json!({ "event": status }));
                    left = Some(speaker.say(LEFT, "lifecycle", &within, data));
                }
            }
        }
        said.push(speaker.say(PASSED_ON, "tasks", &place, Data::Text(event.data.clone())));
        said.extend(left);
        self.settled.insert(place);
    }

    /// Says that agents are at work within calls whose frames were not seen before.
    fn enter(&mut self, speaker: &Speaker<'_>, place: &[String], said: &mut Vec<Said>) {
        for (depth, slot) in (1..=place.len()).zip(0..) {
            let at = &place[..depth];
            if !self.entered.insert(at.to_vec()) {
                continue;
            }
            let mut data = Map::from_iter([("event".to_owned(), json!("started"))]);
            let task = at.last().and_then(|segment| segment.split_once(':')).map(|(_, task)| task);
            if let Some(call) = task.and_then(|task| self.calls.get(task)) {
                data.insert("graph_name".to_owned(), call.graph().into());
                data.insert("cause".to_owned(), json!({ "type": "toolCall", "tool_call_id": call.id }));
            }
            said.push(speaker.started(slot, at, Data::Json(data.into())));
        }
    }
}

/// The data of a frame, which this gateway wrote.
fn parsed(event: &Event) -> Value {
    threadkeep::json::from_slice(&event.data).unwrap_or_default()
}

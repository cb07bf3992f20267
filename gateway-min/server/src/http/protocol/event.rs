//! An event of the thread protocol: its place in the order of the thread, and its text.

use std::ops::Range;

use bytes::Bytes;
use serde_json::{Value, json};

use crate::streams::bridge::EventId;

/// The first millisecond that is counted, 2026-01-01 UTC: sequence numbers stay below 2^53 until 2095, so that JavaScript
/// clients can hold them.
const EPOCH_MS: u64 = 1_767_225_600_000;
/// Events per frame, and what they are for, in the order in which they are sent. What does not fit into its range, as in a
/// message with very many tool calls or at a run with more than eight questions, has the number of the range's last one.
const SLOTS: u64 = 128;
/// Slot 0 is that the run is at work; these are that agents are, the outer ones first.
const STARTED: Range<u64> = 1..4;
/// The frame's own events, and the ends of what the run left open.
const OWN: Range<u64> = STARTED.end..ASKED.start;
/// What follows the last frame of a run. The last two slots of an earlier frame are for the state before the next one.
const ASKED: Range<u64> = ENDED - 8..ENDED;
const ENDED: u64 = SLOTS - 1;

/// The place of a frame among those of its thread, as a number: whichever process follows the run finds the same one, and
/// a later frame has a greater one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place(u64);

impl Place {
    /// The place of the frame with this id.
    pub(super) fn of(id: EventId) -> Self {
        Self((id.unix_ms.saturating_sub(EPOCH_MS) * EventId::PER_MS + id.seq % EventId::PER_MS) * SLOTS)
    }

    /// Before every frame of this millisecond since the Unix epoch, and after those of earlier ones.
    pub(super) fn before_ms(unix_ms: u64) -> u64 {
        Self::of(EventId { unix_ms, seq: 0 }).0.saturating_sub(1)
    }

    /// The number of what comes before the frame's own events.
    pub(super) fn before(self) -> u64 {
        self.0.saturating_sub(1)
    }

    /// The number of the event in this slot of the range, from 0.
    fn slot(self, range: &Range<u64>, slot: u64) -> u64 {
        self.0 + (range.start + slot).min(range.end - 1)
    }
}

/// Whether there is a number of its own for this slot of the range, from 0.
fn fits(range: &Range<u64>, slot: u64) -> bool {
    slot < range.end - range.start
}

/// An event, before it is known who gets it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Said {
    /// The method, which is also the channel for all but `input.requested`.
    pub(super) method: &'static str,
    /// Where in the tree of agents; empty for the thread's own.
    pub(super) namespace: Vec<String>,
    /// The node, if one said it.
    pub(super) node: Option<String>,
    pub(super) data: Data,
    pub(super) seq: u64,
    /// Whether a client that resumes after this number gets the event again: it may lack it, because an earlier event
    /// has the same number, or it may lack what belongs to it, which is read again.
    pub(super) again: bool,
    /// The same in every stream that has the event.
    pub(super) id: String,
    pub(super) unix_ms: u64,
}

/// The data of an event.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Data {
    Json(Value),
    /// Text of a frame, which subscribers share.
    Text(Bytes),
}

/// Numbers and names the events of one frame, or of a run's end.
#[derive(Debug, Clone)]
pub(super) struct Speaker<'a> {
    run: &'a str,
    place: Place,
    /// The slots of the frame's own events.
    own: Range<u64>,
    unix_ms: u64,
}

impl<'a> Speaker<'a> {
    /// For the events of a run's frame.
    pub(super) fn of(run: &'a str, frame: EventId) -> Self {
        Self { run, place: Place::of(frame), own: OWN, unix_ms: frame.unix_ms }
    }

    /// For the frame's own events in these slots, which count from 0 then. Those that do not fit take no other's slot.
    pub(super) fn only(&self, slots: &Range<u64>) -> Self {
        let own = self.own.start + slots.start..self.own.start + slots.end;
        Self { own, ..self.clone() }
    }

    /// The event in this slot of the frame, from 0. Events of one frame differ in their slots.
    pub(super) fn say(&self, slot: u64, method: &'static str, namespace: &[String], data: Data) -> Said {
        self.within(&self.own, slot, method, namespace, data)
    }

    /// That an agent is at work, before what the frame says. The slot is how many agents there are around it.
    pub(super) fn started(&self, slot: u64, namespace: &[String], data: Data) -> Said {
        self.within(&STARTED, slot, "lifecycle", namespace, data)
    }

    fn within(
        &self,
        range: &Range<u64>,
        slot: u64,
        method: &'static str,
        namespace: &[String],
        data: Data,
    ) -> Said {
        let seq = self.place.slot(range, slot);
        let again = !fits(range, slot);
        let id = if again { format!("{}:{seq}.{slot}", self.run) } else { format!("{}:{seq}", self.run) };
        Said { namespace: namespace.to_vec(), again, ..self.root(method, seq, id, data) }
    }

    /// That the run is at work, before what the frame says.
    pub(super) fn running(&self, data: Value) -> Said {
        self.root("lifecycle", self.place.0, format!("{}:running", self.run), Data::Json(data))
    }

    /// What is known of the thread's state before the frame: `checkpoints`, then `values`. A client that was cut
    /// between the two gets both: the state may be another one by then.
    pub(super) fn snapshot(&self, method: &'static str, checkpoint: &str, data: Data) -> Said {
        let id = format!("{checkpoint}:{method}");
        let again = method == "checkpoints";
        let seq = self.place.before().saturating_sub(u64::from(again));
        Said { again, ..self.root(method, seq, id, data) }
    }

    /// What the run asks at its end. The slot is the question's, from 0.
    pub(super) fn ask(&self, slot: u64, question: &str, data: Value) -> Said {
        let id = format!("{}:input:{question}", self.run);
        let asked = self.root("input.requested", self.place.slot(&ASKED, slot), id, Data::Json(data));
        Said { again: !fits(&ASKED, slot), ..asked }
    }

    /// The run's end.
    pub(super) fn end(&self, data: Value) -> Said {
        self.root("lifecycle", self.place.0 + ENDED, format!("{}:end", self.run), Data::Json(data))
    }

    /// An event of the thread's own agent.
    fn root(&self, method: &'static str, seq: u64, id: String, data: Data) -> Said {
        let (namespace, unix_ms) = (Vec::new(), self.unix_ms);
        Said { method, namespace, node: None, data, seq, again: false, id, unix_ms }
    }
}

impl Said {
    /// From this node.
    pub(super) fn at(self, node: Option<&str>) -> Self {
        Self { node: node.map(str::to_owned), ..self }
    }

    /// Gives it this number, which an event before it has, if its own is not a greater one.
    pub(super) fn come_after(&mut self, seq: u64) {
        if self.seq <= seq {
            (self.seq, self.again) = (seq, true);
        }
    }

    /// The text of the server-sent event, in pieces.
    pub(super) fn encode(&self) -> Vec<Bytes> {
        let mut params = json!({ "namespace": self.namespace, "timestamp": self.unix_ms });
        if let Some(node) = &self.node {
            params["node"] = json!(node);
        }
        let params = params.to_string();
        // The data goes where the closing brace was.
        let before = format!(
            "event: {}\ndata: {{\"type\":\"event\",\"method\":\"{}\",\"params\":{},\"data\":",
            self.method,
            self.method,
            params.strip_suffix('}').unwrap_or(&params),
        );
        let id = self.id.replace(['\r', '\n'], " ");
        let after =
            format!("}},\"seq\":{},\"event_id\":{}}}\nid: {id}\n\n", self.seq, Value::from(id.as_str()));
        match &self.data {
            Data::Json(data) => vec![format!("{before}{data}{after}").into()],
            Data::Text(text) => vec![before.into(), text.clone(), after.into()],
        }
    }
}

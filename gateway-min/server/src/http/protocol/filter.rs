//! Which events a stream has: its channels, the places in the tree of agents, and what the client has already.

use std::fmt;

use serde_json::Value;

use super::event::{Data, Said};
use crate::http::fields::{Fields, Flaw, FromFields};

/// The channels, besides `custom:<name>`.
pub(super) const CHANNELS: [&str; 9] =
    ["values", "updates", "messages", "tools", "lifecycle", "input", "checkpoints", "tasks", "custom"];
/// A channel of events that a tool or a node names.
const NAMED: &str = "custom:";
/// The greatest number that JavaScript holds exactly.
pub(super) const MAX_INTEGER: i64 = (1 << 53) - 1;
/// The maximum number of places, and of channels.
pub(super) const MAX_ITEMS: usize = 1000;

/// The request of an event stream.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Filter {
    channels: Vec<String>,
    /// Only events at one of these places or below; everywhere if empty.
    namespaces: Vec<Vec<String>>,
    /// Only events at most so far below the place.
    depth: Option<usize>,
    /// Only events after this one.
    pub(super) since: Option<u64>,
}

impl fmt::Debug for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Filter").field("channels", &self.channels).finish_non_exhaustive()
    }
}

impl FromFields for Filter {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let depth = fields.field("depth").nullable().integer(&(0..=MAX_INTEGER));
        let since = fields.field("since").nullable().integer(&(0..=MAX_INTEGER));
        Self {
            channels: fields.field("channels").required().read(channels).unwrap_or_default(),
            namespaces: fields.field("namespaces").nullable().read(namespaces).unwrap_or_default(),
            depth: depth.and_then(|depth| usize::try_from(depth).ok()),
            since: since.and_then(|since| u64::try_from(since).ok()),
        }
    }
}

fn channels(sent: Value) -> Result<Vec<String>, (Flaw, Value)> {
    let list = strings(&sent)?;
    if list.is_empty() {
        return Err((Flaw::new("too_short", "List should have at least 1 item"), sent));
    }
    let known =
        |name: &String| CHANNELS.contains(&name.as_str()) || name.strip_prefix(NAMED).is_some_and(is_name);
    match list.iter().find(|name| !known(name)) {
        None => Ok(list),
        Some(unknown) => {
            let known: Vec<_> = CHANNELS.into_iter().chain(["custom:<name>"]).collect();
            Err((Flaw::literal(&known), unknown.as_str().into()))
        }
    }
}

fn is_name(name: &str) -> bool {
    !name.is_empty()
}

fn namespaces(sent: Value) -> Result<Vec<Vec<String>>, (Flaw, Value)> {
    let Value::Array(list) = sent else { return Err((no_list(), sent)) };
    if list.len() > MAX_ITEMS {
        return Err((Flaw::too_long(MAX_ITEMS, list.len()), Value::Null));
    }
    list.iter().map(strings).collect()
}

/// A list of strings.
pub(super) fn strings(sent: &Value) -> Result<Vec<String>, (Flaw, Value)> {
    let Value::Array(list) = sent else { return Err((no_list(), sent.clone())) };
    if list.len() > MAX_ITEMS {
        return Err((Flaw::too_long(MAX_ITEMS, list.len()), Value::Null));
    }
    let text = |item: &Value| match item {
        Value::String(text) => Ok(text.clone()),
        other => Err((Flaw::new("string_type", "Input should be a valid string"), other.clone())),
    };
    list.iter().map(text).collect()
}

fn no_list() -> Flaw {
    Flaw::new("list_type", "Input should be a valid list")
}

impl Filter {
    /// Whether an event of this channel may be in the stream.
    pub(super) fn wants(&self, channel: &str) -> bool {
        let of_it = |asked: &String| asked == channel || channel == "custom" && asked.starts_with(NAMED);
        self.channels.iter().any(of_it)
    }

    /// Whether the event is in the stream.
    pub(super) fn admits(&self, event: &Said) -> bool {
        self.since.is_none_or(|since| event.seq > since || event.again && event.seq == since)
            && self.is_subscribed(event)
            && self.reaches(&event.namespace)
    }

    fn is_subscribed(&self, event: &Said) -> bool {
        match event.method {
            "input.requested" => self.wants("input"),
            "custom" => {
                let name = match &event.data {
                    Data::Json(data) => data["name"].as_str(),
                    Data::Text(_) => None,
                };
                self.channels.iter().any(|channel| {
                    channel == "custom"
                        || channel.strip_prefix(NAMED).is_some_and(|asked| Some(asked) == name)
                })
            }
            channel => self.wants(channel),
        }
    }

    /// Whether the place is at or below one that was asked for, and not too far.
    fn reaches(&self, place: &[String]) -> bool {
        let near = |outer: &[String]| {
            is_below(place, outer) && self.depth.is_none_or(|depth| place.len() - outer.len() <= depth)
        };
        if self.namespaces.is_empty() { near(&[]) } else { self.namespaces.iter().any(|outer| near(outer)) }
    }
}

/// Whether `place` is `outer` or below it. A segment without a `:` names all executions of a node.
fn is_below(place: &[String], outer: &[String]) -> bool {
    let is_node = |segment: &str, node: &str| {
        !node.contains(':') && segment.split_once(':').is_some_and(|(name, _)| name == node)
    };
    place.len() >= outer.len() && place.iter().zip(outer).all(|(at, asked)| at == asked || is_node(at, asked))
}

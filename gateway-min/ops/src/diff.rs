//! `threadkeep checkpoints diff`: the differences between the states at two checkpoints.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json, json};
use threadkeep::id::CheckpointId;
use threadkeep::value::ChannelValue;

use super::checkpoints::At;
use super::error::Result;
use super::output::{Columns, Out, bytes, one_line, or_dash, short};
use super::state::CheckpointState;
use super::target::Target;

/// The maximum length of a message's text in the output.
const TEXT_CHARS: usize = 60;

/// A kind of difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Added,
    Removed,
    Changed,
}

impl Change {
    fn of<T: PartialEq>(a: Option<&T>, b: Option<&T>) -> Option<Self> {
        match (a, b) {
            (None, Some(_)) => Some(Self::Added),
            (Some(_), None) => Some(Self::Removed),
            (a, b) if a != b => Some(Self::Changed),
            _ => None,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Added => "added",
            Self::Removed => "removed",
            Self::Changed => "changed",
        }
    }

    fn sign(self) -> char {
        match self {
            Self::Added => '+',
            Self::Removed => '-',
            Self::Changed => '~',
        }
    }
}

/// An element of a list that differs.
#[derive(Debug, PartialEq)]
struct Item<'a> {
    change: Change,
    id: String,
    value: &'a Json,
}

pub(crate) async fn run(
    target: &Target,
    out: &mut Out,
    (a, b): (CheckpointId, CheckpointId),
    at: &At,
) -> Result<()> {
    let (thread, namespace) = at.place();
    let mut states = Vec::with_capacity(2);
    for id in [a, b] {
        let id = target.checkpoint(&thread, &namespace, Some(id)).await?;
        states.push(CheckpointState::read(target, &thread, &namespace, id).await?);
    }
    let (left, right) = (&states[0], &states[1]);
    let names: BTreeSet<&String> = left.values.keys().chain(right.values.keys()).collect();
    let mut table = Columns::new(&["CHANNEL", "CHANGE", "A>", "B>"]);
    let (mut lines, mut channels) = (Vec::new(), Map::new());
    for name in names {
        let (a, b) = (left.values.get(name), right.values.get(name));
        let (hidden_a, hidden_b) = (not_json(left, name), not_json(right, name));
        let hidden = (hidden_a != hidden_b).then_some(Change::Changed);
        let Some(change) = Change::of(a, b).or(hidden) else { continue };
        let size = |value: Option<&Json>, hidden: Option<&ChannelValue>| {
            let shown = value.map(|value| value.to_string().len());
            or_dash(hidden.map(ChannelValue::encoded_len).or(shown).map(|size| bytes(size as u64)))
        };
        table.row([name.clone(), change.as_str().to_owned(), size(a, hidden_a), size(b, hidden_b)]);
        let items = items(a, b);
        let moved = change == Change::Changed && items.is_empty() && (is_list(a) && is_list(b));
        for item in &items {
            lines.push(format!("{} {name} {}  {}", item.change.sign(), item.id, text(item.value)));
        }
        if moved {
            lines.push(format!("~ {name}  the same elements in another order"));
        }
        let items: Vec<Json> = items
            .iter()
            .map(|item| json!({"change": item.change.as_str(), "id": item.id, "value": item.value}))
            .collect();
        channels.insert(name.clone(), json!({"change": change.as_str(), "elements": items}));
    }
    if at.json {
        out.json(&json!({"thread": thread.as_str(), "namespace": namespace.as_str(), "a": a.to_string(),
                         "b": b.to_string(), "channels": channels}))?;
        return Ok(());
    }
    if channels.is_empty() {
        out.line("The states are equal.")?;
        return Ok(());
    }
    out.table(&table)?;
    if !lines.is_empty() {
        out.line("")?;
    }
    for line in lines {
        out.line(one_line(&line))?;
    }
    Ok(())
}

/// The value of a channel of which JSON can express only the length. Two of one length may differ.
fn not_json<'s>(state: &'s CheckpointState, name: &str) -> Option<&'s ChannelValue> {
    state.tuple.checkpoint.channels.get(state.not_json.get(name)?.as_str())?.stored.value()
}

fn is_list(value: Option<&Json>) -> bool {
    value.is_some_and(Json::is_array)
}

/// The elements that only one of two lists has, or that differ, by id. An element without an id is identified by its
/// content, so it is never "changed".
fn items<'a>(a: Option<&'a Json>, b: Option<&'a Json>) -> Vec<Item<'a>> {
    let (a, b) = (keyed(a), keyed(b));
    let mut items = Vec::new();
    let mut seen = BTreeSet::new();
    for (key, value) in &a.order {
        let change = Change::of(Some(*value), b.by_key.get(key).copied());
        if let Some(change) = change {
            items.push(Item { change, id: name(key), value: b.by_key.get(key).copied().unwrap_or(value) });
        }
        seen.insert(key.clone());
    }
    for (key, value) in &b.order {
        if !seen.contains(key) {
            items.push(Item { change: Change::Added, id: name(key), value });
        }
    }
    items
}

/// What identifies an element: its id or its content, and its number among equal ones.
type Key = (bool, String, usize);

struct Keyed<'a> {
    order: Vec<(Key, &'a Json)>,
    by_key: BTreeMap<Key, &'a Json>,
}

fn keyed(list: Option<&Json>) -> Keyed<'_> {
    let mut counts: BTreeMap<(bool, String), usize> = BTreeMap::new();
    let mut keyed = Keyed { order: Vec::new(), by_key: BTreeMap::new() };
    for value in list.and_then(Json::as_array).into_iter().flatten() {
        let (has_id, text) = match value.get("id").and_then(Json::as_str) {
            Some(id) => (true, id.to_owned()),
            None => (false, value.to_string()),
        };
        let number = counts.entry((has_id, text.clone())).or_default();
        let key = (has_id, text, *number);
        *number += 1;
        keyed.by_key.insert(key.clone(), value);
        keyed.order.push((key, value));
    }
    keyed
}

fn name((has_id, text, _): &Key) -> String {
    if *has_id { text.clone() } else { String::new() }
}

/// The beginning of an element's text.
fn text(value: &Json) -> String {
    let kind = value.get("type").and_then(Json::as_str).unwrap_or_default();
    let said = match value.get("content") {
        Some(Json::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => value.to_string(),
    };
    format!("{kind} {:?}", short(&said, TEXT_CHARS)).trim_start().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_told_by_their_ids_and_else_by_themselves() {
        let a = json!([{"id": "1", "v": 1}, {"id": "2", "v": 2}, "x", "x"]);
        let b = json!(["x", {"id": "1", "v": 9}, {"id": "3", "v": 3}]);
        let found: Vec<(Change, String)> =
            items(Some(&a), Some(&b)).into_iter().map(|item| (item.change, item.id)).collect();
        let id = str::to_owned;
        assert_eq!(
            found,
            [
                (Change::Changed, id("1")),
                (Change::Removed, id("2")),
                (Change::Removed, id("")),
                (Change::Added, id("3")),
            ]
        );
        assert_eq!(items(Some(&a), Some(&a)), []);
        assert_eq!(items(None, Some(&json!({"no": "list"}))), []);
    }
}

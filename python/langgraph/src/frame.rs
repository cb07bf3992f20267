//! What LangGraph keeps in a checkpoint besides its channels: three private channels.
//!
//! The nodes' seen versions are a list with an element a node, so that a step stores those of the nodes that ran. The small
//! rest is one value that fits into the checkpoint's row. What a caller put into the checkpoint and LangGraph does not
//! know is a third value, serialized by the caller.

use std::collections::BTreeMap;

use chrono::{DateTime, SecondsFormat, Utc};
use serde_json::{Map, Value as Json, json};
use threadkeep::foreign::{OWNER_KEY, owner};
use threadkeep::id::{CheckpointId, Version};
use threadkeep::value::{ChannelValue, Element, ListValue};
use threadkeep::{Error, Result};

use crate::version::{self, Label};

/// The channel of [`Frame`] and of the notes.
pub(crate) use threadkeep::foreign::FRAME;

/// The channel of the versions that nodes have seen.
pub(crate) const SEEN: &str = "__threadkeep_seen__";
/// The channel of other keys of a checkpoint.
pub(crate) const REST: &str = "__threadkeep_rest__";

/// What LangGraph keeps in a checkpoint besides its channels.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Frame {
    /// The version of LangGraph's format.
    pub v: Option<i64>,
    /// When it was made.
    pub ts: Option<String>,
    /// The channels that its step updated; `Some(None)` if LangGraph says that it does not know.
    pub updated: Option<Option<Vec<String>>>,
    /// The versions of channels that each node has seen.
    pub seen: BTreeMap<String, BTreeMap<String, Label>>,
    /// Other keys and their values, serialized by the caller.
    pub rest: Option<ChannelValue>,
}

pub(crate) fn is_private(channel: &str) -> bool {
    matches!(channel, FRAME | SEEN | REST)
}

/// The value of [`FRAME`]. `channels` are all channels in order, `notes` what the engine's types cannot hold.
pub(crate) fn encode(
    id: CheckpointId,
    frame: &Frame,
    channels: &[&str],
    notes: Map<String, Json>,
) -> Result<ChannelValue> {
    let mut map = notes;
    map.insert(OWNER_KEY.to_owned(), owner(id));
    if let Some(v) = frame.v {
        map.insert("v".to_owned(), json!(v));
    }
    if let Some(ts) = &frame.ts {
        map.insert("t".to_owned(), micros(ts).map_or_else(|| json!(ts), |micros| json!(micros)));
    }
    match &frame.updated {
        None => {}
        Some(None) => {
            map.insert("u".to_owned(), Json::Null);
        }
        Some(Some(updated)) => {
            map.insert(
                "u".to_owned(),
                mask(updated, channels).map_or_else(|| json!(updated), |mask| json!(mask)),
            );
        }
    }
    ChannelValue::from_json(&Json::Object(map))
}

/// The notes of a frame; nothing if it is the frame of another checkpoint.
pub(crate) fn notes(id: CheckpointId, value: &ChannelValue) -> Result<Map<String, Json>> {
    match value.to_json()? {
        Json::Object(map) if map.get(OWNER_KEY) == Some(&owner(id)) => Ok(map),
        _ => Ok(Map::new()),
    }
}

/// Reads what [`encode`] made. Returns the notes, too; nothing if it is the frame of another checkpoint.
pub(crate) fn decode(
    id: CheckpointId,
    value: &ChannelValue,
    channels: &[&str],
) -> Result<Option<(Frame, Map<String, Json>)>> {
    let Json::Object(mut map) = value.to_json()? else { return Err(damaged()) };
    if map.remove(OWNER_KEY) != Some(owner(id)) {
        return Ok(None);
    }
    let v = map.remove("v").map(|v| v.as_i64().ok_or_else(damaged)).transpose()?;
    let ts = match map.remove("t") {
        None => None,
        Some(Json::String(text)) => Some(text),
        Some(number) => Some(text(number.as_i64().ok_or_else(damaged)?).ok_or_else(damaged)?),
    };
    let updated = match map.remove("u") {
        None => None,
        Some(Json::Null) => Some(None),
        Some(Json::Array(names)) => {
            let names = names.into_iter().map(|name| name.as_str().map(str::to_owned).ok_or_else(damaged));
            Some(Some(names.collect::<Result<_>>()?))
        }
        Some(mask) => {
            let mask = mask.as_u64().ok_or_else(damaged)?;
            let named = channels.iter().enumerate().filter(|(at, _)| *at < 64 && mask >> at & 1 == 1);
            Some(Some(named.map(|(_, name)| (*name).to_owned()).collect()))
        }
    };
    Ok(Some((Frame { v, ts, updated, ..Frame::default() }, map)))
}

/// Reads what [`seen`] made.
pub(crate) fn nodes(seen: &ListValue) -> Result<BTreeMap<String, BTreeMap<String, Label>>> {
    seen.iter().map(node).collect()
}

/// The list of [`SEEN`], made from the parent's: what did not change is shared with it.
pub(crate) fn seen(frame: &Frame, parent: Option<&ListValue>) -> Result<ListValue> {
    let elements = frame.seen.iter().map(|(node, seen)| {
        let versions: Vec<Json> = seen
            .iter()
            .map(|(channel, label)| match version::parse(label) {
                Some(version) => json!([channel, version.counter, version.random]),
                None => json!([channel, label]),
            })
            .collect();
        Element::from_json(&json!([node, versions]))
    });
    let elements = elements.collect::<Result<Vec<_>>>()?;
    Ok(derive(parent, &elements.into_iter().collect()))
}

/// A list with these elements, as a change of `base`: a saver then looks only at what is new.
pub(crate) fn derive(base: Option<&ListValue>, new: &ListValue) -> ListValue {
    let Some(base) = base.filter(|base| base.base().is_some() && base.len() <= new.len() + 64) else {
        return new.clone();
    };
    let mut list = base.clone();
    while list.len() > new.len() {
        list.remove(list.len() - 1);
    }
    let equal = list.common(new);
    let shared = list.len();
    for (at, element) in new.iter_from(equal).cloned().enumerate() {
        if equal + at < shared {
            list.replace(equal + at, element); // Equal elements change nothing.
        } else {
            list.push(element);
        }
    }
    list
}

fn node(element: &Element) -> Result<(String, BTreeMap<String, Label>)> {
    let json = element.to_json()?;
    let name = json.get(0).and_then(Json::as_str).ok_or_else(damaged)?;
    let versions = json.get(1).and_then(Json::as_array).ok_or_else(damaged)?;
    let seen = versions.iter().map(|entry| {
        let channel = entry.get(0).and_then(Json::as_str).ok_or_else(damaged)?;
        let label = match (entry.get(1), entry.get(2)) {
            (Some(label), None) => label.clone(),
            (Some(counter), Some(random)) => {
                let counter = counter.as_u64().ok_or_else(damaged)?;
                json!(Version { counter, random: random.as_u64().ok_or_else(damaged)? }.to_string())
            }
            _ => return Err(damaged()),
        };
        Ok((channel.to_owned(), label))
    });
    Ok((name.to_owned(), seen.collect::<Result<_>>()?))
}

fn damaged() -> Error {
    Error::corrupt("a checkpoint of LangGraph", "its private channels cannot be read")
}

/// A time in microseconds, if exactly this text is made of it.
fn micros(ts: &str) -> Option<i64> {
    let micros = DateTime::parse_from_rfc3339(ts).ok()?.timestamp_micros();
    (text(micros).as_deref() == Some(ts)).then_some(micros)
}

fn text(micros: i64) -> Option<String> {
    let time: DateTime<Utc> = DateTime::from_timestamp_micros(micros)?;
    Some(time.to_rfc3339_opts(SecondsFormat::Micros, false))
}

/// The positions of sorted names among the channels.
fn mask(names: &[String], channels: &[&str]) -> Option<u64> {
    let sorted = names.windows(2).all(|pair| pair[0] < pair[1]);
    let bits = names.iter().map(|name| {
        let at = channels.iter().position(|channel| channel == name)?;
        (at < 64).then_some(1_u64 << at)
    });
    let bits = bits.collect::<Option<Vec<_>>>().filter(|_| sorted)?;
    Some(bits.into_iter().fold(0, |mask, bit| mask | bit))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(frame: &Frame, channels: &[&str]) -> Frame {
        let id = CheckpointId::from_bytes([7; 16]);
        let value = encode(id, frame, channels, Map::new()).unwrap();
        assert_eq!(decode(CheckpointId::from_bytes([8; 16]), &value, channels).unwrap(), None);
        let (back, notes) = decode(id, &value, channels).unwrap().unwrap();
        assert!(notes.is_empty());
        Frame { seen: nodes(&seen(frame, None).unwrap()).unwrap(), ..back }
    }

    #[test]
    fn a_frame_comes_back_whatever_its_keys() {
        let label = json!(version::next(None));
        let seen: BTreeMap<_, _> = [
            ("__input__".to_owned(), BTreeMap::new()),
            ("agent".to_owned(), [("a".to_owned(), label), ("b".to_owned(), json!(3))].into()),
        ]
        .into();
        for updated in [
            None,
            Some(None),
            Some(Some(vec![])),
            Some(Some(vec!["a".into(), "c".into()])),
            Some(Some(vec!["c".into(), "a".into()])),
            Some(Some(vec!["absent".into()])),
        ] {
            for ts in
                [None, Some("2026-05-04T06:32:42.235444+00:00"), Some("2026-05-04T06:32:42+00:00"), Some("x")]
            {
                let frame = Frame {
                    v: Some(4),
                    ts: ts.map(str::to_owned),
                    updated: updated.clone(),
                    seen: seen.clone(),
                    rest: None,
                };
                assert_eq!(round_trip(&frame, &["a", "b", "c"]), frame);
            }
        }
        let frame = Frame {
            ts: Some("2026-05-04T06:32:42.235444+00:00".into()),
            v: Some(4),
            updated: Some(Some(vec!["a".into()])),
            ..Frame::default()
        };
        let len =
            encode(CheckpointId::from_bytes([255; 16]), &frame, &["a"], Map::new()).unwrap().encoded_len();
        assert!(len <= 32, "{len} bytes do not fit into the row of a checkpoint");
    }

    #[test]
    fn a_derived_list_differs_only_where_it_changed() {
        let element = |n: u64| Element::from_json(&json!(n)).unwrap();
        let mut base: ListValue = (0..100).map(element).collect();
        base.rebase(Version { counter: 1, random: 1 });
        let new = (0..99).map(|n| element(if n == 50 { 500 } else { n })).chain([element(7)]).collect();
        let list = derive(Some(&base), &new);
        assert_eq!(list, new);
        assert_eq!(list.parts().len(), 4, "{:?}", list.parts());
        assert_eq!(list.len(), 100);
        let shorter = derive(Some(&base), &(0..60).map(element).collect());
        assert_eq!((shorter.len(), shorter.parts().len()), (60, 1));
        assert_eq!(derive(None, &new).base(), None);
    }
}

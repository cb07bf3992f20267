//! Checkpoints as LangGraph's own savers store them: the same values in other containers. They are cut apart without being
//! decoded, so nothing depends on the classes of their objects.

use std::collections::BTreeMap;

use bytes::{BufMut, Bytes, BytesMut};
use serde_json::{Map, Value as Json};
use threadkeep::id::CheckpointId;
use threadkeep::value::{ChannelValue, Codec, Element, Encoded};
use threadkeep::{Error, Result};

use crate::types::{Place, Put};
use crate::value::{MESSAGE_PACK, is_message_pack, plain, stored};
use crate::version::Label;

/// LangGraph's extension type of snapshots.
const SNAPSHOT: i8 = 7;
/// What a checkpoint has besides its values, in LangGraph's format.
const KEYS: [&str; 6] = ["v", "id", "ts", "channel_versions", "versions_seen", "updated_channels"];

/// A checkpoint that is one MessagePack map, as in LangGraph's SQLite saver: the put that stores it here, with every value.
///
/// # Errors
/// [`Error::InvalidInput`] if it is something else.
pub fn from_map(
    place: Place,
    id: CheckpointId,
    parent: Option<CheckpointId>,
    map: &Bytes,
    metadata: Map<String, Json>,
) -> Result<Put> {
    let mut parts = Parts::new(place, id, parent, metadata);
    for (key, value) in entries(map)? {
        if key == "channel_values" {
            for (channel, value) in entries(value.bytes())? {
                parts.value(channel, MESSAGE_PACK, value.bytes().clone())?;
            }
        } else if KEYS.contains(&key.as_str()) {
            parts.part(&key, value.to_json()?)?;
        } else {
            parts.rest.push((key, value));
        }
    }
    parts.put()
}

/// A checkpoint that is a JSON object, with its larger values beside it, as in LangGraph's Postgres saver: the put that
/// stores it here, with every value.
///
/// # Errors
/// [`Error::InvalidInput`] if it is something else.
pub fn from_json(
    place: Place,
    id: CheckpointId,
    parent: Option<CheckpointId>,
    checkpoint: Map<String, Json>,
    values: Vec<(String, String, Bytes)>,
    metadata: Map<String, Json>,
) -> Result<Put> {
    let mut parts = Parts::new(place, id, parent, metadata);
    for (key, value) in checkpoint {
        if key == "channel_values" {
            let Json::Object(values) = value else { return Err(not_one(&key)) };
            for (channel, value) in values {
                parts.put.values.insert(channel, ChannelValue::from_json(&value)?);
            }
        } else if KEYS.contains(&key.as_str()) {
            parts.part(&key, value)?;
        } else {
            parts.rest.push((key, Element::from_json(&value)?));
        }
    }
    for (channel, tag, bytes) in values {
        parts.value(channel, &tag, bytes)?;
    }
    parts.put()
}

/// A put, as it is collected.
struct Parts {
    put: Put,
    rest: Vec<(String, Element)>,
}

impl Parts {
    fn new(
        place: Place,
        id: CheckpointId,
        parent: Option<CheckpointId>,
        metadata: Map<String, Json>,
    ) -> Self {
        Self { rest: Vec::new(), put: Put::new(place, id, parent, metadata) }
    }

    fn put(mut self) -> Result<Put> {
        if !self.rest.is_empty() {
            self.put.frame.rest = Some(plain(map_of(&self.rest)?));
        }
        Ok(self.put)
    }

    fn value(&mut self, channel: String, tag: &str, bytes: Bytes) -> Result<()> {
        if is_message_pack(tag)
            && let Some(inner) = snapshot(&bytes)
        {
            self.put.snapshots.insert(channel.clone());
            self.put.values.insert(channel, stored(tag, inner)?);
            return Ok(());
        }
        let value = if is_message_pack(tag) && bytes[..] == [0xc0] {
            // Within a map, the absent object has no tag of its own.
            stored("null", Bytes::new())?
        } else {
            stored(tag, bytes)?
        };
        self.put.values.insert(channel, value);
        Ok(())
    }

    fn part(&mut self, key: &str, value: Json) -> Result<()> {
        let frame = &mut self.put.frame;
        match (key, value) {
            ("v", value) => frame.v = Some(value.as_i64().ok_or_else(|| not_one(key))?),
            ("ts", Json::String(ts)) => frame.ts = Some(ts),
            ("updated_channels", Json::Null) => frame.updated = Some(None),
            ("updated_channels", Json::Array(names)) => {
                let names = names.iter().map(|name| name.as_str().map(str::to_owned));
                frame.updated = Some(Some(names.collect::<Option<_>>().ok_or_else(|| not_one(key))?));
            }
            ("channel_versions", Json::Object(versions)) => {
                self.put.versions = versions.into_iter().collect();
            }
            ("versions_seen", Json::Object(seen)) => {
                for (node, versions) in seen {
                    let Json::Object(versions) = versions else { return Err(not_one(key)) };
                    frame.seen.insert(node, versions.into_iter().collect::<BTreeMap<String, Label>>());
                }
            }
            ("id", Json::String(id)) if id == self.put.id.to_string() => {}
            _ => return Err(not_one(key)),
        }
        Ok(())
    }
}

fn not_one(what: &str) -> Error {
    Error::InvalidInput(format!("it is not a checkpoint of LangGraph: {what} cannot be read"))
}

/// The entries of a MessagePack map with texts as keys, as slices. A map has the bytes of an array of its keys and values,
/// but for its header.
fn entries(map: &Bytes) -> Result<Vec<(String, Element)>> {
    let mut reader = &map[..];
    let len = rmp::decode::read_map_len(&mut reader).map_err(|_| not_one("a map"))?;
    let len = len.checked_mul(2).ok_or_else(|| not_one("a map"))?;
    let mut array = BytesMut::with_capacity(reader.len() + 5).writer();
    rmp::encode::write_array_len(&mut array, len).map_err(|_| not_one("a map"))?;
    let mut array = array.into_inner();
    array.put_slice(reader);
    let value = ChannelValue::from_encoded(Encoded { codec: Codec::MessagePack, bytes: array.freeze() })?;
    let list = value.as_list().ok_or_else(|| not_one("a map"))?;
    let elements: Vec<Element> = list.iter().cloned().collect();
    let pairs = elements.chunks_exact(2).map(|pair| match pair[0].to_json()? {
        Json::String(key) => Ok((key, pair[1].clone())),
        _ => Err(not_one("the key of a map")),
    });
    pairs.collect()
}

/// A MessagePack map of these entries.
fn map_of(entries: &[(String, Element)]) -> Result<Bytes> {
    let refuse = |_| not_one("a map");
    let len = u32::try_from(entries.len()).map_err(|_| not_one("a map"))?;
    let mut out = BytesMut::new().writer();
    rmp::encode::write_map_len(&mut out, len).map_err(refuse)?;
    for (key, value) in entries {
        rmp::encode::write_str(&mut out, key).map_err(refuse)?;
        out.get_mut().put_slice(value.bytes());
    }
    Ok(out.into_inner().freeze())
}

/// The value in a snapshot.
fn snapshot(bytes: &Bytes) -> Option<Bytes> {
    let mut reader = &bytes[..];
    let meta = rmp::decode::read_ext_meta(&mut reader).ok()?;
    (meta.typeid == SNAPSHOT && meta.size as usize == reader.len())
        .then(|| bytes.slice(bytes.len() - reader.len()..))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;
    use crate::value::typed;

    #[test]
    fn a_checkpoint_is_cut_apart_without_decoding_its_values() {
        let id = "1ef4f797-8335-6428-8001-8a1503f9b875";
        let place = Place::new("t", "");
        let small = json!({
            "v": 4, "ts": "2026-05-04T06:32:42.235444+00:00", "id": id, "pending_sends": [], "updated_channels": ["a"],
            "channel_versions": {"a": 1, "d": "2.5"}, "versions_seen": {"n": {"a": 1}},
        });
        let mut parts: Vec<(String, Element)> = small
            .as_object()
            .unwrap()
            .iter()
            .map(|(key, value)| (key.clone(), Element::from_json(value).unwrap()))
            .collect();
        // An extension type that nobody here knows, and a snapshot of a list.
        let unknown = Bytes::from_static(&[0x91, 0xd6, 99, 1, 2, 3, 4]);
        let values = [
            ("a".to_owned(), Element::from_bytes(unknown.clone())),
            ("d".to_owned(), Element::from_bytes(Bytes::from_static(&[0xd5, 7, 0x91, 5]))),
            ("n".to_owned(), Element::from_bytes(Bytes::from_static(&[0xc0]))),
        ];
        parts.push(("channel_values".to_owned(), Element::from_bytes(map_of(&values).unwrap())));
        let map = map_of(&parts).unwrap();
        let id = place.id(id).unwrap();
        let put = from_map(place.clone(), id, None, &map, Map::new()).unwrap();
        assert_eq!(typed(&put.values["a"]).unwrap(), ("msgpack".to_owned(), unknown));
        assert_eq!(typed(&put.values["d"]).unwrap().1[..], [0x91, 5]);
        assert_eq!(typed(&put.values["n"]).unwrap().0, "null");
        assert_eq!(put.snapshots, BTreeSet::from(["d".to_owned()]));
        assert_eq!(
            put.versions,
            BTreeMap::from([("a".to_owned(), json!(1)), ("d".to_owned(), json!("2.5"))])
        );
        assert_eq!(put.frame.v, Some(4));
        assert_eq!(put.frame.updated, Some(Some(vec!["a".to_owned()])));
        assert!(put.frame.rest.is_some());
        for wrong in [&b"\x90"[..], b"\x81\x01\x02", b"\x81\xa1v", b"\x81\xa1v\xc2", b""] {
            let wrong = Bytes::copy_from_slice(wrong);
            assert!(from_map(place.clone(), id, None, &wrong, Map::new()).is_err());
        }
    }
}

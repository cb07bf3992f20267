//! Objects of LangGraph's serializer, shown as the JSON of what they hold.
//!
//! LangGraph writes an object as an extension type with its module, its class and the arguments that make it again. Shown are
//! the arguments alone: of a message, its fields. Only reading knows this; what is stored stays as it is.

use serde_json::{Map, Number, Value as Json};

use super::{Element, MAX_DEPTH, corrupt};
use crate::Result;

/// The extension types of objects: module, class, arguments.
const OBJECTS: std::ops::RangeInclusive<i8> = 0..=5;
/// The extension type of a snapshot: a value.
const SNAPSHOT: i8 = 7;

/// The private extension types of the Python savers for a map whose lists are cut: its frame, and a list's header in it.
const FRAME: i8 = 85;
const HEADER: i8 = 86;

/// An entry without a value: the private extension type 84 of the Python savers, empty.
pub(super) const ABSENT: &[u8] = &[0xc7, 0, 84];

/// The JSON of one value; `None` if it cannot be shown as JSON.
pub(super) fn decode(bytes: &[u8]) -> Option<Json> {
    let mut reader = bytes;
    let value = value(&mut reader, MAX_DEPTH)?;
    reader.is_empty().then_some(value)
}

/// The frame of a map whose lists are cut, if this is one.
pub(super) fn frame(bytes: &[u8]) -> Option<&[u8]> {
    let mut reader = bytes;
    let meta = rmp::decode::read_ext_meta(&mut reader).ok().filter(|meta| meta.typeid == FRAME)?;
    (meta.size as usize == reader.len()).then_some(reader)
}

/// The JSON of a map whose lists are cut: where the frame has the header of a list, its elements follow.
pub(super) fn map<'a>(mut frame: &[u8], mut elements: impl Iterator<Item = &'a Element>) -> Result<Json> {
    let damaged = || corrupt("a map whose lists are cut cannot be read");
    let len = rmp::decode::read_map_len(&mut frame).map_err(|_| damaged())?;
    let mut map = Map::new();
    for _ in 0..len {
        let key = text(&mut frame).ok_or_else(damaged)?.to_owned();
        let mut ahead = frame;
        let json = match rmp::decode::read_ext_meta(&mut ahead) {
            Ok(meta) if meta.typeid == HEADER => {
                frame = ahead;
                let len = rmp::decode::read_array_len(&mut frame).map_err(|_| damaged())?;
                let list = (0..len).map(|_| elements.next().ok_or_else(damaged)?.to_json());
                list.collect::<Result<Vec<_>>>()?.into()
            }
            _ => value(&mut frame, MAX_DEPTH).ok_or_else(damaged)?,
        };
        map.insert(key, json);
    }
    if frame.is_empty() && elements.next().is_none() { Ok(Json::Object(map)) } else { Err(damaged()) }
}

/// The bytes from the fields of an object on, if it is one.
pub(super) fn fields(bytes: &[u8]) -> Option<&[u8]> {
    let mut reader = bytes;
    let meta = rmp::decode::read_ext_meta(&mut reader).ok().filter(|meta| OBJECTS.contains(&meta.typeid))?;
    (meta.size as usize == reader.len() && rmp::decode::read_array_len(&mut reader).ok()? >= 3)
        .then_some(())?;
    text(&mut reader)?;
    text(&mut reader)?;
    Some(reader)
}

fn value(reader: &mut &[u8], depth: usize) -> Option<Json> {
    use rmp::Marker;

    let depth = depth.checked_sub(1)?;
    let mut ahead = *reader;
    Some(match rmp::decode::read_marker(&mut ahead).ok()? {
        Marker::Null => {
            *reader = ahead;
            Json::Null
        }
        Marker::True | Marker::False => rmp::decode::read_bool(reader).ok()?.into(),
        Marker::F32 => Json::Number(Number::from_f64(rmp::decode::read_f32(reader).ok()?.into())?),
        Marker::F64 => Json::Number(Number::from_f64(rmp::decode::read_f64(reader).ok()?)?),
        Marker::U64 => rmp::decode::read_u64(reader).ok()?.into(),
        Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => text(reader)?.into(),
        Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => {
            let len = rmp::decode::read_array_len(reader).ok()?;
            (0..len).map(|_| value(reader, depth)).collect::<Option<Vec<_>>>()?.into()
        }
        Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => {
            let len = rmp::decode::read_map_len(reader).ok()?;
            let entries = (0..len).map(|_| Some((text(reader)?.to_owned(), value(reader, depth)?)));
            Json::Object(entries.collect::<Option<Map<_, _>>>()?)
        }
        Marker::FixExt1
        | Marker::FixExt2
        | Marker::FixExt4
        | Marker::FixExt8
        | Marker::FixExt16
        | Marker::Ext8
        | Marker::Ext16
        | Marker::Ext32 => extension(reader, depth)?,
        _ => rmp::decode::read_int::<i64, _>(reader).ok()?.into(),
    })
}

fn extension(reader: &mut &[u8], depth: usize) -> Option<Json> {
    let meta = rmp::decode::read_ext_meta(reader).ok()?;
    let (mut body, rest) = reader.split_at_checked(meta.size as usize)?;
    *reader = rest;
    let json = match meta.typeid {
        SNAPSHOT => value(&mut body, depth)?,
        object if OBJECTS.contains(&object) => {
            let Json::Array(mut parts) = value(&mut body, depth)? else { return None };
            if parts.len() < 3 { None } else { Some(parts.swap_remove(2)) }?
        }
        _ => return None,
    };
    body.is_empty().then_some(json)
}

fn text<'a>(reader: &mut &'a [u8]) -> Option<&'a str> {
    let len = rmp::decode::read_str_len(reader).ok()? as usize;
    let (text, rest) = reader.split_at_checked(len)?;
    *reader = rest;
    std::str::from_utf8(text).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{ChannelValue, Codec, Element, Encoded};

    /// An object as LangGraph writes it.
    fn object(of: i8, fields: &serde_json::Value) -> Vec<u8> {
        let parts = json!(["langchain_core.messages.human", "HumanMessage", fields, "model_validate_json"]);
        extension(of, &rmp_serde::to_vec_named(&parts).unwrap())
    }

    #[test]
    fn an_object_is_shown_as_its_fields_and_found_by_its_id() {
        let fields =
            json!({"content": "hello", "n": -1, "big": u64::MAX, "x": [1.5, null, true], "id": "m1"});
        let element = Element::from_bytes(object(5, &fields).into());
        assert_eq!(element.to_json().unwrap(), fields);
        assert_eq!(element.id().unwrap().as_ref(), "m1");
        let list = [vec![0x92], object(5, &fields), object(0, &json!("value"))].concat();
        let list = Encoded { codec: Codec::MessagePack, bytes: list.into() };
        let list = ChannelValue::from_encoded(list).unwrap();
        assert_eq!(list.to_json().unwrap(), json!([fields, "value"]));
    }

    /// A value of an extension type.
    fn extension(of: i8, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        rmp::encode::write_ext_meta(&mut bytes, u32::try_from(body.len()).unwrap(), of).unwrap();
        bytes.extend(body);
        bytes
    }

    #[test]
    fn a_map_whose_lists_are_cut_is_shown_as_a_map() {
        let fields = json!({"content": "hello"});
        let frame = [vec![0x82, 0xa1, b'n', 1, 0xa1, b'm'], extension(86, &[0x92])].concat();
        let parts = [extension(85, &frame), object(5, &fields), vec![0xa1, b'x']];
        let list = |parts: &[Vec<u8>]| {
            ChannelValue::List(parts.iter().map(|part| Element::from_bytes(part.clone().into())).collect())
        };
        assert_eq!(list(&parts).to_json().unwrap(), json!({"n": 1, "m": [fields, "x"]}));
        assert!(list(&parts[..2]).to_json().is_err(), "an element is missing");
        assert!(list(&[&parts[..], &[vec![1]]].concat()).to_json().is_err(), "one is left over");
        // A forged length reserves nothing.
        let forged = [vec![0x81, 0xa1, b'm'], extension(86, &[0xdd, 0xff, 0xff, 0xff, 0xff])].concat();
        assert!(list(&[extension(85, &forged)]).to_json().is_err());
    }

    #[test]
    fn what_is_no_object_is_corrupt_as_before() {
        for bytes in [
            object(84, &json!({})),
            object(6, &json!({})),
            vec![0xc4, 1, 1],
            vec![0xd4, 5, 0xc0],
            vec![0x81, 1, 2],
        ] {
            let element = Element::from_bytes(bytes.into());
            assert!(element.to_json().is_err(), "{element:?}");
            assert_eq!(element.id(), None);
        }
        let mut deep = vec![0xc0];
        for _ in 0..200 {
            deep = [vec![0x91], deep].concat();
        }
        assert_eq!(super::decode(&deep), None, "nesting is bounded");
    }
}

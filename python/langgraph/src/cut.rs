//! Maps whose lists are cut.
//!
//! LangGraph keeps the input of a graph in a channel of its own, `__start__`, as a map: each message in it would be stored
//! once more beside the list of messages. Such a map is stored as a list: its frame, then the elements of its lists, one
//! list after the other. The frame is the map itself with the header of each list in the place of the list.

use bytes::{BufMut, Bytes, BytesMut};
use threadkeep::value::{ChannelValue, Codec, Element, Encoded, ListValue};
use threadkeep::{Error, Result};

/// The MessagePack extension type of a frame.
const FRAME: i8 = 85;
/// The one of a list's header in it.
const HEADER: i8 = 86;
/// The most entries of a map that is cut.
const ENTRIES: u32 = 64;
/// The fewest bytes that elements have on average; shorter ones cost more than they save.
const WORTH: usize = 48;

/// A map as a list; `None` if it is no map or not worth it.
pub(crate) fn cut(bytes: &Bytes) -> Option<ListValue> {
    let values = entries(bytes)?;
    let lists: Vec<Option<ListValue>> = values
        .iter()
        .enumerate()
        .map(|(at, part)| if at % 2 == 0 { None } else { list(part.bytes()).filter(|list| !list.is_empty()) })
        .collect();
    let (count, size) = lists
        .iter()
        .flatten()
        .fold((0, 0), |(count, size), list| (count + list.len(), size + list.bytes_len()));
    let taken = values.iter().any(|part| extension(part.bytes(), HEADER).is_some());
    if count == 0 || size / count < WORTH || taken {
        return None;
    }
    let mut frame = BytesMut::with_capacity(bytes.len() - size + 64);
    frame.put_slice(&bytes[..header_len(bytes)?]);
    for (part, list) in values.iter().zip(&lists) {
        match list {
            Some(list) => {
                let header = part.bytes().len().checked_sub(list.bytes_len())?;
                frame.put_slice(&extended(HEADER, &part.bytes()[..header])?);
            }
            None => frame.put_slice(part.bytes()),
        }
    }
    let frame = Element::from_bytes(extended(FRAME, &frame)?);
    Some(std::iter::once(frame).chain(lists.iter().flatten().flat_map(ListValue::iter).cloned()).collect())
}

/// Whether a list is a map that was cut.
pub(crate) fn is_cut(list: &ListValue) -> bool {
    list.get(0).is_some_and(|first| extension(first.bytes(), FRAME).is_some())
}

/// The bytes of the map that was cut.
///
/// # Errors
/// [`Error::Corrupt`] if the list is not what [`cut`] made.
pub(crate) fn whole(list: &ListValue) -> Result<Bytes> {
    join(list).ok_or_else(|| Error::corrupt("a value of LangGraph", "the frame of its lists cannot be read"))
}

fn join(list: &ListValue) -> Option<Bytes> {
    let mut elements = list.iter();
    let frame = extension(elements.next()?.bytes(), FRAME)?;
    let mut out = BytesMut::with_capacity(frame.len() + list.bytes_len());
    out.put_slice(&frame[..header_len(&frame)?]);
    for part in entries(&frame)? {
        let Some(header) = extension(part.bytes(), HEADER) else {
            out.put_slice(part.bytes());
            continue;
        };
        out.put_slice(&header);
        let len = rmp::decode::read_array_len(&mut &header[..]).ok()?;
        for _ in 0..len {
            out.put_slice(elements.next()?.bytes());
        }
    }
    elements.next().is_none().then(|| out.freeze())
}

/// The keys and values of a small map, one after the other. A map has the bytes of an array of them, but for its header.
fn entries(map: &Bytes) -> Option<Vec<Element>> {
    let mut reader = &map[..];
    let len = rmp::decode::read_map_len(&mut reader).ok().filter(|len| *len <= ENTRIES)?;
    let mut array = BytesMut::with_capacity(reader.len() + 5).writer();
    rmp::encode::write_array_len(&mut array, len * 2).ok()?;
    let mut array = array.into_inner();
    array.put_slice(reader);
    Some(list(&array.freeze())?.iter().cloned().collect())
}

fn list(bytes: &Bytes) -> Option<ListValue> {
    let value =
        ChannelValue::from_encoded(Encoded { codec: Codec::MessagePack, bytes: bytes.clone() }).ok()?;
    value.as_list().cloned()
}

fn header_len(map: &Bytes) -> Option<usize> {
    let mut reader = &map[..];
    rmp::decode::read_map_len(&mut reader).ok()?;
    Some(map.len() - reader.len())
}

fn extended(kind: i8, body: &[u8]) -> Option<Bytes> {
    let mut out = BytesMut::with_capacity(body.len() + 6).writer();
    rmp::encode::write_ext_meta(&mut out, u32::try_from(body.len()).ok()?, kind).ok()?;
    let mut out = out.into_inner();
    out.put_slice(body);
    Some(out.freeze())
}

/// The body of one value of this extension type.
fn extension(bytes: &Bytes, kind: i8) -> Option<Bytes> {
    let mut reader = &bytes[..];
    let meta = rmp::decode::read_ext_meta(&mut reader).ok().filter(|meta| meta.typeid == kind)?;
    (meta.size as usize == reader.len()).then(|| bytes.slice(bytes.len() - reader.len()..))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn packed(value: &serde_json::Value) -> Bytes {
        rmp_serde::to_vec_named(value).unwrap().into()
    }

    #[test]
    fn a_map_shares_the_elements_of_its_lists() {
        let message = json!({"content": "x".repeat(100), "id": "h1"});
        let bytes = packed(&json!({"a": 1, "messages": [message, message], "z": [[], "text"], "none": []}));
        let list = cut(&bytes).unwrap();
        assert_eq!(list.get(1).unwrap().bytes(), &packed(&message));
        assert!(is_cut(&list));
        assert_eq!(whole(&list).unwrap(), bytes);
        let another = json!({"content": "y".repeat(100), "id": "h2"});
        let other =
            cut(&packed(&json!({"a": 1, "messages": [another, message], "z": [[], "text"], "none": []})));
        assert_eq!(other.unwrap().get(0), list.get(0), "the frame is stored once");
    }

    #[test]
    fn what_is_no_such_map_is_not_cut() {
        let long = "x".repeat(1000);
        for value in [
            json!([long]),
            json!(long),
            json!({"text": long}),
            json!({"numbers": (0..1000).collect::<Vec<_>>()}),
            json!({}),
            (0..65).map(|n| (n.to_string(), json!([long]))).collect::<serde_json::Map<_, _>>().into(),
        ] {
            assert_eq!(cut(&packed(&value)), None, "{value}");
        }
        // It has a private extension type already.
        let list = packed(&json!([long]));
        let taken =
            [&[0x82, 0xa1, b'a'][..], &list, &[0xa1, b'b'], &extended(HEADER, &[0x90]).unwrap()].concat();
        assert!(cut(&[&[0x81, 0xa1, b'a'][..], &list].concat().into()).is_some());
        assert_eq!(cut(&taken.into()), None);
        let damaged = packed(&json!({"a": [long]}));
        assert_eq!(cut(&damaged.slice(..damaged.len() - 1)), None);
    }

    #[test]
    fn a_missing_or_further_element_is_corrupt() {
        let list = cut(&packed(&json!({"a": ["x".repeat(100)]}))).unwrap();
        let mut shorter = list.clone();
        shorter.remove(1);
        let mut longer = list.clone();
        longer.push(Element::from_bytes(packed(&json!(1))));
        for list in [shorter, longer] {
            assert!(matches!(whole(&list), Err(Error::Corrupt { .. })), "{list:?}");
        }
    }

    fn value() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            any::<i64>().prop_map(|n| json!(n)),
            "[a-z]{0,200}".prop_map(|text| json!(text)),
            Just(json!(null)),
        ];
        leaf.prop_recursive(3, 40, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(|list| json!(list)),
                prop::collection::hash_map("[a-z]{0,3}", inner, 0..6).prop_map(|map| json!(map)),
            ]
        })
    }

    proptest! {
        #[test]
        fn every_map_comes_back_byte_for_byte(entries in prop::collection::hash_map("[a-z]{0,3}", value(), 0..6)) {
            let bytes = packed(&json!(entries));
            if let Some(list) = cut(&bytes) {
                prop_assert_eq!(whole(&list).unwrap(), bytes);
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let bytes = Bytes::from(bytes);
            if let Some(list) = cut(&bytes) {
                prop_assert_eq!(whole(&list).unwrap(), bytes.clone());
            }
            let frame = Element::from_bytes(extended(FRAME, &bytes).unwrap());
            let _ = whole(&std::iter::once(frame).collect());
        }
    }
}

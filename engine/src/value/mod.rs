//! Channel values as they travel to and from savers: encoded once, shared afterwards.
//!
//! A value is MessagePack. A saver never interprets it, except that an array can be cut between its top-level elements
//! ([`ListValue`]), so that an element in many values is stored once. Encoding is deterministic: object keys are
//! sorted, so equal values have equal bytes.

mod edit;
mod foreign;
mod list;
mod msgpack;
mod numbers;
mod origin;
mod places;

use bytes::Bytes;
use serde_json::Value as Json;

pub(crate) use edit::Edit;
pub use list::{Element, ElementHash, ListValue, Part};

use crate::error::{Error, Result};

/// The bytes of values and elements that this process has decoded into JSON: whether work depends on the length of a
/// thread shows here first.
pub fn decoded_bytes() -> u64 {
    msgpack::decoded()
}

#[cfg(test)]
thread_local! {
    pub(crate) static VISITED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
    /// How many elements of lists were compared with others.
    pub(crate) static COMPARED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Counts, in tests, the elements of lists that were visited to find one by its id, to remove some, or to add others
/// once: whether the work of an update depends on the length of a thread shows here first.
#[cfg(test)]
pub(crate) fn visited(elements: usize) {
    VISITED.set(VISITED.get() + elements);
}

#[cfg(not(test))]
pub(crate) fn visited(_: usize) {}

/// How to decode the bytes of an [`Encoded`] value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    /// MessagePack, maps with string keys.
    MessagePack,
}

/// A value outside memory: a codec and bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// How to decode the bytes.
    pub codec: Codec,
    /// The bytes; cloning shares them.
    pub bytes: Bytes,
}

/// The value of a channel: a list, cut into its elements, or anything else, whole.
#[derive(Debug, Clone, PartialEq)]
pub enum ChannelValue {
    /// Not a list.
    Plain(Encoded),
    /// A list.
    List(ListValue),
}

impl ChannelValue {
    /// Encodes a JSON value; an array becomes a [`ListValue`]. Every number that `value` holds is kept, but not one that
    /// was rounded when its text was parsed: see [`crate::json`].
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if the value is nested more than [`MAX_DEPTH`] deep.
    pub fn from_json(value: &Json) -> Result<Self> {
        match value {
            Json::Array(items) => {
                items.iter().map(Element::from_json).collect::<Result<ListValue>>().map(Self::List)
            }
            other => Ok(Self::Plain(Encoded { codec: Codec::MessagePack, bytes: msgpack::encode(other)? })),
        }
    }

    /// Decodes into JSON.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the bytes are not MessagePack that JSON can express.
    pub fn to_json(&self) -> Result<Json> {
        match self {
            Self::Plain(encoded) => msgpack::decode(&encoded.bytes),
            Self::List(list) => match list.get(0).and_then(|first| foreign::frame(first.bytes())) {
                Some(frame) => foreign::map(frame, list.iter_from(1)),
                None => list.iter().map(Element::to_json).collect::<Result<Vec<_>>>().map(Json::Array),
            },
        }
    }

    /// Parses stored bytes; an array is cut into elements without decoding them.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the bytes are not exactly one MessagePack value.
    pub fn from_encoded(encoded: Encoded) -> Result<Self> {
        match msgpack::cut_array(&encoded.bytes)? {
            Some(elements) => Ok(Self::List(elements.into_iter().map(Element::from_bytes).collect())),
            None => Ok(Self::Plain(encoded)),
        }
    }

    /// The whole value in one piece, for savers that do not share elements.
    pub fn to_encoded(&self) -> Encoded {
        match self {
            Self::Plain(encoded) => encoded.clone(),
            Self::List(list) => {
                Encoded { codec: Codec::MessagePack, bytes: msgpack::join_array(list.len(), list.iter()) }
            }
        }
    }

    /// Whether this is the JSON null.
    pub fn is_null(&self) -> bool {
        matches!(self, Self::Plain(encoded) if encoded.bytes[..] == [0xc0])
    }

    /// The entry of a channel that has a version and no value, as the Python savers store it for LangGraph: the channel was
    /// consumed or never filled.
    pub fn absent() -> Self {
        Self::Plain(Encoded { codec: Codec::MessagePack, bytes: Bytes::from_static(foreign::ABSENT) })
    }

    /// Whether it is [`Self::absent`]. A state shows such a channel as one without a value.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Plain(encoded) if encoded.bytes[..] == *foreign::ABSENT)
    }

    /// The elements, if the value is a list.
    pub fn as_list(&self) -> Option<&ListValue> {
        match self {
            Self::List(list) => Some(list),
            Self::Plain(_) => None,
        }
    }

    /// The encoded length of the value in one piece.
    pub fn encoded_len(&self) -> usize {
        match self {
            Self::Plain(encoded) => encoded.bytes.len(),
            Self::List(list) => msgpack::array_header_len(list.len()) + list.bytes_len(),
        }
    }
}

impl From<ListValue> for ChannelValue {
    fn from(list: ListValue) -> Self {
        Self::List(list)
    }
}

/// The maximum nesting of values; deeper input is refused before it can exhaust the stack.
pub const MAX_DEPTH: usize = 128;

pub(crate) fn corrupt(reason: impl std::fmt::Display) -> Error {
    Error::corrupt("channel value", reason)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn any_json() -> impl Strategy<Value = Json> {
        let leaf = prop_oneof![
            Just(Json::Null),
            any::<bool>().prop_map(Json::from),
            any::<i64>().prop_map(Json::from),
            any::<u64>().prop_map(Json::from),
            (-1e300..1e300_f64).prop_map(Json::from),
            ".{0,40}".prop_map(Json::from),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Json::from),
                prop::collection::btree_map(".{0,8}", inner, 0..6)
                    .prop_map(|m| Json::Object(m.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn json_survives_encoding_and_cutting(value in any_json()) {
            let channel = ChannelValue::from_json(&value).unwrap();
            prop_assert_eq!(channel.to_json().unwrap(), value.clone());
            let encoded = channel.to_encoded();
            prop_assert_eq!(encoded.bytes.len(), channel.encoded_len());
            prop_assert_eq!(&encoded.bytes[..], rmp_serde::to_vec_named(&value).unwrap());
            let back = ChannelValue::from_encoded(encoded).unwrap();
            prop_assert_eq!(back.to_json().unwrap(), value);
            prop_assert_eq!(back, channel);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let encoded = Encoded { codec: Codec::MessagePack, bytes: bytes.into() };
            if let Ok(value) = ChannelValue::from_encoded(encoded.clone()) {
                let _ = value.to_json();
                if let ChannelValue::List(list) = &value {
                    for element in list.iter() { let _ = element.id(); }
                }
            }
        }
    }

    #[test]
    fn an_entry_without_a_value_is_no_value_that_json_has() {
        let absent = ChannelValue::absent();
        assert!(absent.is_absent() && !absent.is_null() && absent.to_json().is_err());
        assert_eq!(ChannelValue::from_encoded(absent.to_encoded()).unwrap(), absent);
        for other in [json!(null), json!(""), json!([]), json!({})] {
            assert!(!ChannelValue::from_json(&other).unwrap().is_absent());
        }
    }

    #[test]
    fn too_deep_values_are_refused_both_ways() {
        let mut deep = json!(1);
        for _ in 0..=MAX_DEPTH {
            deep = json!({ "a": deep });
        }
        assert!(matches!(ChannelValue::from_json(&deep), Err(Error::InvalidInput(_))));
        let bytes = Bytes::from([vec![0x91; 100_000], vec![0xc0]].concat());
        let value = ChannelValue::from_encoded(Encoded { codec: Codec::MessagePack, bytes });
        assert!(value.and_then(|v| v.to_json()).is_err());
    }

    /// What is found by equal bytes must have the bytes that earlier versions stored, at each border of a header.
    #[test]
    fn an_element_takes_the_bytes_that_it_has() {
        let numbers = (0..64).flat_map(|bit| [1_u64 << bit, (1 << bit) - 1]);
        let borders =
            numbers.flat_map(|n| [json!(n), json!(n.cast_signed()), json!(n.cast_signed().wrapping_neg())]);
        let texts = [0, 10, 31, 32, 255, 256, 3000, 65_535, 65_536]
            .map(|len| json!({ "x".repeat(len): "x".repeat(len) }));
        let lists = [15, 16, 65_535, 65_536].map(|len| json!(vec![1.5; len]));
        let maps = [15, 16, 65_536].map(|len| (0..len).map(|n| (n.to_string(), json!(null))).collect());
        for value in borders.chain(texts).chain(lists).chain(maps) {
            let bytes = Element::from_json(&value).unwrap().bytes().clone();
            assert_eq!(bytes, rmp_serde::to_vec_named(&value).unwrap());
            let len = bytes.len();
            assert_eq!(bytes.try_into_mut().unwrap().capacity(), len);
        }
    }

    #[test]
    fn equal_objects_have_equal_bytes_whatever_their_key_order() {
        let a: Json = serde_json::from_str(r#"{"b":1,"a":[2]}"#).unwrap();
        let b: Json = serde_json::from_str(r#"{"a":[2],"b":1}"#).unwrap();
        assert_eq!(
            ChannelValue::from_json(&a).unwrap().to_encoded(),
            ChannelValue::from_json(&b).unwrap().to_encoded()
        );
    }
}

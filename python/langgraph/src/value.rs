//! LangGraph's serialized values as values of the engine.
//!
//! A serializer gives a tag and bytes. MessagePack is stored as it is, so that a list is cut into its elements, which are
//! exactly the bytes that each element has alone, and so are the lists of a map (see [`cut`]). Everything else is wrapped into one private extension type together
//! with its tag, and so is MessagePack that would not come back byte for byte.

use bytes::{BufMut, Bytes, BytesMut};
use threadkeep::value::{ChannelValue, Codec, Element, Encoded, ListValue};
use threadkeep::{Error, Result};

use crate::cut;

/// The MessagePack extension type of wrapped values.
const WRAPPED: i8 = 84;
/// The tag of MessagePack.
pub(crate) const MESSAGE_PACK: &str = "msgpack";
/// The tag of the absent object, which has no bytes.
const NULL: &str = "null";
const NIL: [u8; 1] = [0xc0];

/// A serialized value: its tag and its bytes.
pub type Typed = (String, Bytes);

/// Whether values with this tag are cut into elements if they are lists.
pub fn is_message_pack(tag: &str) -> bool {
    tag == MESSAGE_PACK
}

/// The value to store.
///
/// # Errors
/// [`Error::InvalidInput`] if it is too large.
pub fn stored(tag: &str, bytes: Bytes) -> Result<ChannelValue> {
    if tag == NULL && bytes.is_empty() {
        return Ok(plain(Bytes::from_static(&NIL)));
    }
    if tag == MESSAGE_PACK && bytes[..] != NIL && !is_wrapped(&bytes) {
        let encoded = Encoded { codec: Codec::MessagePack, bytes: bytes.clone() };
        if let Ok(value) = ChannelValue::from_encoded(encoded)
            // A list whose header is longer than necessary would come back shorter.
            && value.encoded_len() == bytes.len()
            && elements(&value).is_some() == value.as_list().is_some()
        {
            return Ok(cut::cut(&bytes).map_or(value, ChannelValue::List));
        }
    }
    wrap(tag, &bytes)
}

/// A list whose elements were serialized one by one, each as MessagePack.
pub fn list(elements: impl IntoIterator<Item = Element>) -> ChannelValue {
    ChannelValue::List(elements.into_iter().collect())
}

/// The elements of a stored value, if LangGraph has it as a list.
pub fn elements(value: &ChannelValue) -> Option<&ListValue> {
    value.as_list().filter(|list| !cut::is_cut(list))
}

/// What the serializer gave.
///
/// # Errors
/// [`Error::Corrupt`] if a wrapped value is damaged.
pub fn typed(value: &ChannelValue) -> Result<Typed> {
    if let Some(list) = value.as_list().filter(|list| cut::is_cut(list)) {
        return Ok((MESSAGE_PACK.to_owned(), cut::whole(list)?));
    }
    let bytes = value.to_encoded().bytes;
    if bytes[..] == NIL {
        return Ok((NULL.to_owned(), Bytes::new()));
    }
    match unwrap(&bytes) {
        Some(wrapped) => wrapped,
        None => Ok((MESSAGE_PACK.to_owned(), bytes)),
    }
}

pub(crate) fn plain(bytes: Bytes) -> ChannelValue {
    ChannelValue::Plain(Encoded { codec: Codec::MessagePack, bytes })
}

fn wrap(tag: &str, bytes: &Bytes) -> Result<ChannelValue> {
    let refuse = || Error::InvalidInput(format!("a value of {} bytes is too large", bytes.len()));
    let name = u32::try_from(tag.len()).map_err(|_| refuse())?;
    let len = u32::try_from(4 + tag.len() + bytes.len()).map_err(|_| refuse())?;
    let mut out = BytesMut::with_capacity(len as usize + 6).writer();
    rmp::encode::write_ext_meta(&mut out, len, WRAPPED).map_err(|_| refuse())?;
    let mut out = out.into_inner();
    out.put_u32(name);
    out.put_slice(tag.as_bytes());
    out.put_slice(bytes);
    Ok(plain(out.freeze()))
}

fn is_wrapped(bytes: &[u8]) -> bool {
    let mut reader = bytes;
    rmp::decode::read_ext_meta(&mut reader).is_ok_and(|meta| meta.typeid == WRAPPED)
}

fn unwrap(bytes: &Bytes) -> Option<Result<Typed>> {
    let mut reader = &bytes[..];
    let meta = rmp::decode::read_ext_meta(&mut reader).ok().filter(|meta| meta.typeid == WRAPPED)?;
    let body = bytes.slice(bytes.len() - reader.len()..);
    let parse = || {
        let name = u32::from_be_bytes(body.get(..4)?.try_into().ok()?) as usize;
        let tag = std::str::from_utf8(body.get(4..4_usize.checked_add(name)?)?).ok()?;
        (body.len() == meta.size as usize).then(|| (tag.to_owned(), body.slice(4 + name..)))
    };
    Some(parse().ok_or_else(|| Error::corrupt("a value of LangGraph", "its tag cannot be read")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_value_comes_back_byte_for_byte(
            tag in prop_oneof![Just("msgpack".to_owned()), Just("null".to_owned()), ".{0,8}"],
            bytes in prop::collection::vec(any::<u8>(), 0..60),
        ) {
            let bytes = Bytes::from(bytes);
            let value = stored(&tag, bytes.clone()).unwrap();
            prop_assert!(!value.is_absent());
            prop_assert_eq!(typed(&value).unwrap(), (tag, bytes));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 1..60)) {
            let _ = typed(&plain(bytes.into()));
        }
    }

    #[test]
    fn a_list_is_cut_and_other_things_are_not() {
        let list = Bytes::from_static(&[0x92, 0x01, 0xd6, 5, 1, 2, 3, 4]);
        let value = stored("msgpack", list.clone()).unwrap();
        assert_eq!(value.as_list().unwrap().len(), 2, "an extension type is an element");
        assert_eq!(typed(&value).unwrap().1, list);
        for (tag, bytes) in [
            ("msgpack", &[0xdc, 0, 1, 1][..]), // A header that is longer than necessary.
            ("msgpack", &[0xc0]),
            ("msgpack", &[0xc7, 0, 84]), // Our own extension types.
            ("msgpack", &[0x91, 0xd4, 85, 0x80]),
            ("msgpack", &[1, 2]),
            ("pickle", &[0x91, 1]),
            ("null", &[1]),
        ] {
            let value = stored(tag, Bytes::copy_from_slice(bytes)).unwrap();
            assert_eq!(value.as_list(), None, "{tag} {bytes:?}");
            assert!(!value.is_absent());
            assert_eq!(typed(&value).unwrap(), (tag.to_owned(), Bytes::copy_from_slice(bytes)));
        }
        assert!(stored("null", Bytes::new()).unwrap().is_null());
    }
}

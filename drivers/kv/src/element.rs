//! Elements: each distinct one of a thread is stored once, compressed where that pays.

use std::cell::RefCell;

use threadkeep::value::{Element, ElementHash};
use threadkeep::{Error, Result};
use threadkeep_layout::{Decoder, Packer, Unpacker, put_len};

use crate::keys::{self, Space, ThreadNumber};
use crate::rows;
use crate::store::Snapshot;

// The first byte of a row.
const AS_IS: u8 = 0;
const PACKED: u8 = 1;

thread_local! {
    // Creating one is expensive.
    static PACKER: RefCell<Option<Packer>> = const { RefCell::new(None) };
    static UNPACKER: RefCell<Option<Unpacker>> = const { RefCell::new(None) };
}

/// The body of an element's row.
///
/// # Errors
/// [`Error::InvalidInput`] if there is no memory to pack it.
pub(crate) fn encode(element: &Element) -> Result<Vec<u8>> {
    let bytes = element.bytes();
    let packed = PACKER.with_borrow_mut(|packer| match packer {
        Some(packer) => packer.pack(bytes),
        none => none.insert(Packer::new(b"")?).pack(bytes),
    });
    let packed = packed.map_err(|error| Error::InvalidInput(format!("an element does not pack: {error}")))?;
    let mut body = Vec::with_capacity(bytes.len() + 8);
    if let Some(packed) = packed {
        body.push(PACKED);
        put_len(&mut body, bytes.len());
        body.extend_from_slice(&packed);
    } else {
        body.push(AS_IS);
        body.extend_from_slice(bytes);
    }
    Ok(body)
}

/// Reads the body of the row with this key.
///
/// # Errors
/// [`Error::Corrupt`]
pub(crate) fn decode(key: &[u8], body: &[u8]) -> Result<Element> {
    let bytes = match body.split_first() {
        Some((&AS_IS, bytes)) => bytes.to_vec(),
        Some((&PACKED, packed)) => {
            let mut decoder = Decoder::new(packed);
            let len = decoder.uint().map_err(|error| rows::corrupt(key, error))?;
            UNPACKER
                .with_borrow_mut(|unpacker| match unpacker {
                    Some(unpacker) => unpacker.unpack(len, decoder.rest()),
                    none => none.insert(Unpacker::new(Vec::new())?).unpack(len, decoder.rest()),
                })
                .map_err(|error| rows::corrupt(key, error))?
        }
        _ => return Err(rows::corrupt(key, "unknown form of an element")),
    };
    Ok(Element::from_bytes(bytes.into_boxed_slice().into()))
}

/// The number of the element with this hash. The index only says where to look: the element itself decides.
pub(crate) fn find(
    rows: &dyn Snapshot,
    thread: ThreadNumber,
    space: Space,
    hash: &ElementHash,
) -> Result<Option<u32>> {
    let index = keys::index(thread, space, hash);
    let Some(value) = rows.get(&index)? else { return Ok(None) };
    let mut decoder = Decoder::new(&value);
    let number = decoder.u32().map_err(|error| rows::corrupt(&index, error))?;
    let key = keys::element(thread, space, number);
    let Some(body) = rows::get(rows, &key)? else { return Ok(None) };
    Ok((decode(&key, &body)?.hash() == hash).then_some(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_packed_where_it_pays() {
        for (text, packs) in [("text ".repeat(100), true), ("short".to_owned(), false)] {
            let element = Element::from_bytes(text.clone().into());
            let body = encode(&element).unwrap();
            assert_eq!(body.len() < text.len(), packs);
            assert_eq!(decode(b"key", &body).unwrap(), element);
            assert!(!packs || decode(b"key", &body[..body.len() - 1]).is_err());
        }
        assert!(matches!(decode(b"key", b""), Err(Error::Corrupt { .. })));
        assert!(matches!(decode(b"key", b"\x07"), Err(Error::Corrupt { .. })));
    }
}

//! MessagePack: encodes JSON, and finds the borders of values without decoding them.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use rmp::Marker;
use serde::Deserialize;
use serde_json::Value as Json;

use super::list::Element;
use super::{MAX_DEPTH, corrupt, foreign};
use crate::error::{Error, Result};
use crate::json::is_deeper;

pub(super) fn encode(value: &Json) -> Result<Bytes> {
    if is_deeper(value, MAX_DEPTH) {
        return Err(Error::InvalidInput(format!("the value is nested more than {MAX_DEPTH} levels deep")));
    }
    let bytes = rmp_serde::to_vec_named(value)
        .map_err(|e| Error::InvalidInput(format!("the value cannot be encoded as MessagePack: {e}")))?;
    // Shrink the allocation: a thread keeps these bytes as long as it is in memory.
    Ok(bytes.into_boxed_slice().into())
}

/// See [`super::decoded_bytes`].
static DECODED: AtomicU64 = AtomicU64::new(0);

pub(super) fn decoded() -> u64 {
    DECODED.load(Ordering::Relaxed)
}

pub(super) fn decode(bytes: &[u8]) -> Result<Json> {
    DECODED.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    let mut reader = rmp_serde::Deserializer::from_read_ref(bytes);
    reader.set_max_depth(MAX_DEPTH * 2 + 8);
    match Json::deserialize(&mut reader) {
        Ok(json) => Ok(json),
        // A value with LangGraph's extension types, perhaps.
        Err(error) => foreign::decode(bytes).ok_or_else(|| corrupt(error)),
    }
}

pub(super) fn array_header_len(len: usize) -> usize {
    match len {
        0..=15 => 1,
        16..=0xffff => 3,
        _ => 5,
    }
}

/// Writes an array header, followed by the elements' bytes.
pub(super) fn join_array<'a>(len: usize, elements: impl Iterator<Item = &'a Element> + Clone) -> Bytes {
    let size: usize = elements.clone().map(|e| e.bytes().len()).sum();
    let mut out = Vec::with_capacity(size + 5);
    let len = u32::try_from(len).unwrap_or(u32::MAX);
    // Writing into a Vec cannot fail.
    let _ = rmp::encode::write_array_len(&mut out, len);
    for element in elements {
        out.extend_from_slice(element.bytes());
    }
    out.into()
}

/// The bytes of each element if `bytes` are one array; `None` if they are one other value.
pub(super) fn cut_array(bytes: &Bytes) -> Result<Option<Vec<Bytes>>> {
    let mut cursor = Cursor { bytes, at: 0 };
    let len = match cursor.marker()? {
        Marker::FixArray(n) => u32::from(n),
        Marker::Array16 => cursor.number(2)?,
        Marker::Array32 => cursor.number(4)?,
        _ => {
            cursor.at = 0;
            cursor.skip(1)?;
            return if cursor.at == bytes.len() { Ok(None) } else { Err(trailing()) };
        }
    };
    // Each element takes at least a byte, so a forged length cannot reserve more than the input's size.
    let mut elements = Vec::with_capacity((len as usize).min(bytes.len() - cursor.at));
    for _ in 0..len {
        let start = cursor.at;
        cursor.skip(1)?;
        elements.push(bytes.slice(start..cursor.at));
    }
    if cursor.at == bytes.len() { Ok(Some(elements)) } else { Err(trailing()) }
}

fn trailing() -> Error {
    corrupt("bytes after the end of the value")
}

/// The string under `key` of a MessagePack map, found without decoding the rest.
pub(super) fn text_field<'a>(bytes: &'a [u8], key: &str) -> Option<&'a str> {
    let bytes = foreign::fields(bytes).unwrap_or(bytes);
    let mut cursor = Cursor { bytes, at: 0 };
    let entries = match cursor.marker().ok()? {
        Marker::FixMap(n) => u32::from(n),
        Marker::Map16 => cursor.number(2).ok()?,
        Marker::Map32 => cursor.number(4).ok()?,
        _ => return None,
    };
    for _ in 0..entries {
        let name = cursor.text().ok()?;
        if name == Some(key.as_bytes()) {
            return cursor.text().ok()?.and_then(|text| std::str::from_utf8(text).ok());
        }
        if name.is_none() {
            cursor.skip(1).ok()?;
        }
        cursor.skip(1).ok()?;
    }
    None
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or_else(|| corrupt("the value ends too early"))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn marker(&mut self) -> Result<Marker> {
        Ok(Marker::from_u8(self.take(1)?[0]))
    }

    fn number(&mut self, width: usize) -> Result<u32> {
        Ok(self.take(width)?.iter().fold(0, |n, byte| n << 8 | u32::from(*byte)))
    }

    /// Reads a string and returns its bytes; leaves the cursor unchanged if the next value is not a string.
    fn text(&mut self) -> Result<Option<&'a [u8]>> {
        let start = self.at;
        let len = match self.marker()? {
            Marker::FixStr(n) => u32::from(n),
            Marker::Str8 => self.number(1)?,
            Marker::Str16 => self.number(2)?,
            Marker::Str32 => self.number(4)?,
            _ => {
                self.at = start;
                return Ok(None);
            }
        };
        self.take(len as usize).map(Some)
    }

    /// Skips `count` values. Iterative: nesting uses no stack.
    fn skip(&mut self, count: u64) -> Result<()> {
        let mut left = count;
        while left > 0 {
            left -= 1;
            let payload = match self.marker()? {
                Marker::FixPos(_) | Marker::FixNeg(_) | Marker::Null | Marker::True | Marker::False => 0,
                Marker::U8 | Marker::I8 => 1,
                Marker::U16 | Marker::I16 | Marker::FixExt1 => 2,
                Marker::FixExt2 => 3,
                Marker::U32 | Marker::I32 | Marker::F32 => 4,
                Marker::FixExt4 => 5,
                Marker::U64 | Marker::I64 | Marker::F64 => 8,
                Marker::FixExt8 => 9,
                Marker::FixExt16 => 17,
                Marker::FixStr(n) => u32::from(n),
                Marker::Str8 | Marker::Bin8 => self.number(1)?,
                Marker::Str16 | Marker::Bin16 => self.number(2)?,
                Marker::Str32 | Marker::Bin32 => self.number(4)?,
                Marker::Ext8 => self.number(1)? + 1,
                Marker::Ext16 => self.number(2)? + 1,
                Marker::Ext32 => self.number(4)?.saturating_add(1),
                Marker::FixArray(n) => {
                    left += u64::from(n);
                    0
                }
                Marker::Array16 => {
                    left += u64::from(self.number(2)?);
                    0
                }
                Marker::Array32 => {
                    left += u64::from(self.number(4)?);
                    0
                }
                Marker::FixMap(n) => {
                    left += 2 * u64::from(n);
                    0
                }
                Marker::Map16 => {
                    left += 2 * u64::from(self.number(2)?);
                    0
                }
                Marker::Map32 => {
                    left += 2 * u64::from(self.number(4)?);
                    0
                }
                Marker::Reserved => return Err(corrupt("a reserved MessagePack marker")),
            };
            self.take(payload as usize)?;
        }
        Ok(())
    }
}

//! MessagePack: encodes JSON, and finds the borders of values without decoding them.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use rmp::Marker;
use rmp::encode::{
    ValueWriteError, write_array_len, write_bool, write_f64, write_map_len, write_nil, write_sint, write_str,
    write_uint,
};
use serde::Deserialize;
use serde_json::Value as Json;

use super::list::Element;
use super::{MAX_DEPTH, corrupt, foreign};
use crate::error::{Error, Result};

/// The bytes of a value, in an allocation of their length: a thread keeps them as long as it is in memory.
pub(super) fn encode(value: &Json) -> Result<Bytes> {
    let len = encoded_len(value, MAX_DEPTH).ok_or_else(|| {
        Error::InvalidInput(format!("the value is nested more than {MAX_DEPTH} levels deep"))
    })?;
    let mut out = Vec::with_capacity(len);
    put(&mut out, value)
        .map_err(|e| Error::InvalidInput(format!("the value cannot be encoded as MessagePack: {e}")))?;
    Ok(out.into_boxed_slice().into())
}

/// The number of bytes that [`put`] appends; `None` if the value is nested more than `levels` deep.
fn encoded_len(value: &Json, levels: usize) -> Option<usize> {
    Some(match value {
        Json::Null | Json::Bool(_) => 1,
        Json::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => match number {
                0..=0x7f => 1,
                0x80..=0xff => 2,
                0x100..=0xffff => 3,
                0x1_0000..=0xffff_ffff => 5,
                _ => 9,
            },
            (None, Some(number)) => match number {
                -0x20.. => 1,
                -0x80..-0x20 => 2,
                -0x8000..-0x80 => 3,
                -0x8000_0000..-0x8000 => 5,
                _ => 9,
            },
            (None, None) => 9,
        },
        Json::String(text) => text_len(text),
        Json::Array(items) => {
            let levels = levels.checked_sub(1)?;
            let mut len = array_header_len(items.len());
            for item in items {
                len += encoded_len(item, levels)?;
            }
            len
        }
        Json::Object(fields) => {
            let levels = levels.checked_sub(1)?;
            // Headers of maps and of arrays have the same lengths.
            let mut len = array_header_len(fields.len());
            for (key, field) in fields {
                len += text_len(key) + encoded_len(field, levels)?;
            }
            len
        }
    })
}

fn text_len(text: &str) -> usize {
    let header = match text.len() {
        0..=31 => 1,
        32..=0xff => 2,
        0x100..=0xffff => 3,
        _ => 5,
    };
    header + text.len()
}

/// Appends a value: numbers as short as they can be.
fn put(out: &mut Vec<u8>, value: &Json) -> std::result::Result<(), ValueWriteError> {
    match value {
        Json::Null => write_nil(out).map_err(ValueWriteError::InvalidMarkerWrite),
        Json::Bool(bit) => write_bool(out, *bit).map_err(ValueWriteError::InvalidMarkerWrite),
        Json::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
            (Some(number), ..) => write_uint(out, number).map(drop),
            (None, Some(number), _) => write_sint(out, number).map(drop),
            (None, None, number) => write_f64(out, number.unwrap_or(f64::NAN)),
        },
        Json::String(text) => {
            header_len(text.len())?;
            write_str(out, text)
        }
        Json::Array(items) => {
            write_array_len(out, header_len(items.len())?)?;
            items.iter().try_for_each(|item| put(out, item))
        }
        Json::Object(fields) => {
            write_map_len(out, header_len(fields.len())?)?;
            fields.iter().try_for_each(|(key, field)| {
                header_len(key.len())?;
                write_str(out, key)?;
                put(out, field)
            })
        }
    }
}

/// A length for a header.
fn header_len(len: usize) -> std::result::Result<u32, ValueWriteError> {
    u32::try_from(len).map_err(|error| ValueWriteError::InvalidMarkerWrite(std::io::Error::other(error)))
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
    let _ = write_array_len(&mut out, len);
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

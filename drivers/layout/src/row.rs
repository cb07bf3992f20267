//! What the rows of checkpoints and tasks have in common in all stores.

use bytes::Bytes;
use threadkeep::id::{CheckpointId, Version};
use threadkeep::metadata::{Counters, Source};

use crate::codec::{Decoder, Malformed, put_bytes, put_len, put_uint};
use crate::form::{FORM, Form, form_bits, put_form, take_form};

/// The version of all rows, in the high half of their first byte.
const VERSION: u8 = 1;

// The low half of the first byte: the source and the marker.
const SOURCE: u8 = 3;
const DELTA_MARKER: u8 = 1 << 2;

// The second byte: how the rest of `extra` is stored, and which optional fields are present.
const REST: u8 = 3;
const REST_INLINE: u8 = 1;
const REST_SHARED: u8 = 2;
const HAS_MAPS: u8 = 1 << 2;
const HAS_PARENTS: u8 = 1 << 3;
const HAS_COUNTERS: u8 = 1 << 4;
const KNOWN_FLAGS: u8 = REST | HAS_MAPS | HAS_PARENTS | HAS_COUNTERS;

// The byte of a write holds the form too.
const OVERWRITE: u8 = 1;

/// The first byte of a row, with these bits in its low half.
pub fn first_byte(bits: u8) -> u8 {
    VERSION << 4 | bits
}

/// The low half of the first byte of a row.
///
/// # Errors
/// [`Malformed`] if the row has another version.
pub fn bits_of(first: u8) -> Result<u8, Malformed> {
    if first >> 4 == VERSION { Ok(first & 0x0f) } else { Err(Malformed("unknown version of the row")) }
}

/// Reads the first byte of a row without bits.
///
/// # Errors
/// [`Malformed`]
pub fn take_plain_start(decoder: &mut Decoder<'_>) -> Result<(), Malformed> {
    if bits_of(decoder.byte()?)? == 0 { Ok(()) } else { Err(Malformed("unknown flags")) }
}

/// Metadata beside large objects: none, the bytes of an object, or the element that holds it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Rest {
    /// None.
    #[default]
    Empty,
    /// Its bytes.
    Inline(Bytes),
    /// The number of its element.
    Shared(u32),
}

/// Whether and how a [`Rest`] is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestKind {
    /// Not at all.
    Empty,
    /// As bytes.
    Inline,
    /// As an element.
    Shared,
}

impl Rest {
    /// How it is stored.
    pub fn kind(&self) -> RestKind {
        match self {
            Self::Empty => RestKind::Empty,
            Self::Inline(_) => RestKind::Inline,
            Self::Shared(_) => RestKind::Shared,
        }
    }
}

/// The first two bytes of a checkpoint's row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heading {
    /// What made the checkpoint.
    pub source: Source,
    /// Whether it was made in delta mode.
    pub delta_marker: bool,
    /// How the rest of its metadata is stored.
    pub rest: RestKind,
    /// Whether it has large objects in its metadata.
    pub maps: bool,
    /// Whether it has parents in other namespaces.
    pub parents: bool,
    /// Whether it has counters.
    pub counters: bool,
}

impl Heading {
    /// Appends it.
    pub fn put(&self, out: &mut Vec<u8>) {
        let source = match self.source {
            Source::Input => 0,
            Source::Loop => 1,
            Source::Update => 2,
            Source::Fork => 3,
        };
        let rest = match self.rest {
            RestKind::Empty => 0,
            RestKind::Inline => REST_INLINE,
            RestKind::Shared => REST_SHARED,
        };
        let flag = |is: bool, flag| if is { flag } else { 0 };
        out.push(first_byte(flag(self.delta_marker, DELTA_MARKER) | source));
        out.push(
            rest | flag(self.maps, HAS_MAPS)
                | flag(self.parents, HAS_PARENTS)
                | flag(self.counters, HAS_COUNTERS),
        );
    }

    /// Reads it.
    ///
    /// # Errors
    /// [`Malformed`]
    pub fn take(decoder: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let (first, flags) = (bits_of(decoder.byte()?)?, decoder.byte()?);
        if first & !(DELTA_MARKER | SOURCE) != 0 || flags & !KNOWN_FLAGS != 0 {
            return Err(Malformed("unknown flags"));
        }
        Ok(Self {
            source: match first & SOURCE {
                0 => Source::Input,
                1 => Source::Loop,
                2 => Source::Update,
                _ => Source::Fork,
            },
            delta_marker: first & DELTA_MARKER != 0,
            rest: match flags & REST {
                0 => RestKind::Empty,
                REST_INLINE => RestKind::Inline,
                REST_SHARED => RestKind::Shared,
                _ => return Err(Malformed("unknown form of metadata")),
            },
            maps: flags & HAS_MAPS != 0,
            parents: flags & HAS_PARENTS != 0,
            counters: flags & HAS_COUNTERS != 0,
        })
    }
}

/// Appends the parents in other namespaces.
pub fn put_parents(out: &mut Vec<u8>, parents: &[(String, CheckpointId)]) {
    put_len(out, parents.len());
    for (namespace, id) in parents {
        put_bytes(out, namespace.as_bytes());
        out.extend_from_slice(id.as_bytes());
    }
}

/// Reads what [`put_parents`] wrote.
///
/// # Errors
/// [`Malformed`]
pub fn take_parents(decoder: &mut Decoder<'_>) -> Result<Vec<(String, CheckpointId)>, Malformed> {
    let parent = |decoder: &mut Decoder<'_>| {
        let namespace = decoder.text()?.to_owned();
        Ok((namespace, CheckpointId::from_bytes(decoder.array()?)))
    };
    (0..decoder.count()?).map(|_| parent(decoder)).collect()
}

/// Appends the counters of a channel.
pub fn put_counters(out: &mut Vec<u8>, counters: Counters) {
    put_uint(out, counters.updates);
    put_uint(out, counters.supersteps);
}

/// Reads what [`put_counters`] wrote.
///
/// # Errors
/// [`Malformed`]
pub fn take_counters(decoder: &mut Decoder<'_>) -> Result<Counters, Malformed> {
    Ok(Counters { updates: decoder.uint()?, supersteps: decoder.uint()? })
}

/// Appends a version.
pub fn put_version(out: &mut Vec<u8>, version: Version) {
    put_uint(out, version.counter);
    out.extend_from_slice(&version.random.to_le_bytes());
}

/// Reads what [`put_version`] wrote.
///
/// # Errors
/// [`Malformed`]
pub fn take_version(decoder: &mut Decoder<'_>) -> Result<Version, Malformed> {
    Ok(Version { counter: decoder.uint()?, random: u64::from_le_bytes(decoder.array()?) })
}

/// Appends what a task wrote to a channel.
pub fn put_write(out: &mut Vec<u8>, overwrite: bool, value: &Form) {
    out.push(form_bits(value) | if overwrite { OVERWRITE } else { 0 });
    put_form(out, value);
}

/// Reads what [`put_write`] wrote.
///
/// # Errors
/// [`Malformed`]
pub fn take_write(decoder: &mut Decoder<'_>) -> Result<(bool, Form), Malformed> {
    let tag = decoder.byte()?;
    if tag & !(OVERWRITE | FORM) != 0 {
        return Err(Malformed("unknown flags"));
    }
    Ok((tag & OVERWRITE != 0, take_form(decoder, tag)?))
}

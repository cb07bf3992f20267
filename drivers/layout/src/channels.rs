//! What a checkpoint stores for its channels. A channel is named by its place in the checkpoint's list of names, which
//! is an element of its own; only SQLite numbers the names of a whole store, and shares the entries alone.

use std::collections::BTreeMap;

use threadkeep::id::{ChannelName, CheckpointId, Version};
use threadkeep::metadata::Counters;

use crate::codec::{Decoder, Malformed, put_len, put_uint};
use crate::form::{FORM, Form, form_bits, put_form, take_form};
use crate::row::{put_counters, put_version, take_counters, take_version};

// The byte of an entry: its kind, and the form of its value. Kind 0 and the other bits are for the driver.
const KIND: u8 = 3;
const SENTINEL: u8 = 1;
const VALUE: u8 = 2;
const SNAPSHOT: u8 = 3;

/// What a checkpoint stores for a channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredChannel<S> {
    /// The version of the channel.
    pub version: Version,
    /// The entry.
    pub kept: Kept<S>,
}

/// An entry without its version. `S` is what a sentinel holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kept<S> {
    /// A delta channel between snapshots.
    Sentinel(S),
    /// The value.
    Value(Form),
    /// A delta channel with its value.
    Snapshot(Form),
}

impl<S> Kept<S> {
    /// How its value is stored, if it has one.
    pub fn form(&self) -> Option<&Form> {
        match self {
            Self::Sentinel(_) => None,
            Self::Value(form) | Self::Snapshot(form) => Some(form),
        }
    }

    /// Its kind and its form as bits of the byte of the entry; [`put_kept`] writes the rest.
    pub fn bits(&self) -> u8 {
        match self {
            Self::Sentinel(_) => SENTINEL,
            Self::Value(form) => VALUE | form_bits(form),
            Self::Snapshot(form) => SNAPSHOT | form_bits(form),
        }
    }
}

/// What a sentinel holds: nothing, or the checkpoint at which the path of its channel begins.
pub trait Seed: Sized {
    /// Appends it.
    fn put(&self, out: &mut Vec<u8>);

    /// Reads what [`put`](Self::put) wrote.
    ///
    /// # Errors
    /// [`Malformed`]
    fn take(decoder: &mut Decoder<'_>) -> Result<Self, Malformed>;
}

impl Seed for () {
    fn put(&self, _: &mut Vec<u8>) {}

    fn take(_: &mut Decoder<'_>) -> Result<Self, Malformed> {
        Ok(())
    }
}

impl Seed for CheckpointId {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.as_bytes());
    }

    fn take(decoder: &mut Decoder<'_>) -> Result<Self, Malformed> {
        decoder.array().map(Self::from_bytes)
    }
}

/// Appends an entry, of which [`Kept::bits`] and the version were written before.
pub fn put_kept<S: Seed>(out: &mut Vec<u8>, kept: &Kept<S>) {
    match kept {
        Kept::Sentinel(seed) => seed.put(out),
        Kept::Value(form) | Kept::Snapshot(form) => put_form(out, form),
    }
}

/// Reads the byte of an entry. `own` are the bits that the driver adds to those of [`Kept::bits`].
///
/// # Errors
/// [`Malformed`] if others are set: what follows them may be anything, so nothing of it is read.
pub fn take_entry_bits(decoder: &mut Decoder<'_>, own: u8) -> Result<u8, Malformed> {
    let bits = decoder.byte()?;
    if bits & !(KIND | FORM | own) == 0 { Ok(bits) } else { Err(Malformed("unknown flags")) }
}

/// Reads what [`put_kept`] wrote after a byte with these bits.
///
/// # Errors
/// [`Malformed`]
pub fn take_kept<S: Seed>(decoder: &mut Decoder<'_>, bits: u8) -> Result<Kept<S>, Malformed> {
    Ok(match bits & KIND {
        SENTINEL if bits & FORM == 0 => Kept::Sentinel(S::take(decoder)?),
        VALUE => Kept::Value(take_form(decoder, bits)?),
        SNAPSHOT => Kept::Snapshot(take_form(decoder, bits)?),
        _ => return Err(Malformed("unknown kind of entry")),
    })
}

/// The places of channels in the list of a checkpoint's names.
#[derive(Debug)]
pub struct Places<'a>(BTreeMap<&'a ChannelName, u64>);

impl<'a> Places<'a> {
    /// Those in the list of these names.
    pub fn of(names: impl IntoIterator<Item = &'a ChannelName>) -> Self {
        Self(names.into_iter().zip(0..).collect())
    }

    fn put(&self, out: &mut Vec<u8>, channel: &ChannelName) {
        put_uint(out, self.0.get(channel).copied().unwrap_or_default());
    }
}

fn take_channel(decoder: &mut Decoder<'_>, names: &[ChannelName]) -> Result<ChannelName, Malformed> {
    names.get(decoder.u32()? as usize).cloned().ok_or(Malformed("a channel has no name"))
}

/// Appends the entries of a checkpoint.
pub fn put_channels<S: Seed>(
    out: &mut Vec<u8>,
    channels: &BTreeMap<ChannelName, StoredChannel<S>>,
    places: &Places<'_>,
) {
    put_len(out, channels.len());
    for (channel, entry) in channels {
        places.put(out, channel);
        out.push(entry.kept.bits());
        put_version(out, entry.version);
        put_kept(out, &entry.kept);
    }
}

/// Reads what [`put_channels`] wrote.
///
/// # Errors
/// [`Malformed`]
pub fn take_channels<S: Seed>(
    decoder: &mut Decoder<'_>,
    names: &[ChannelName],
) -> Result<BTreeMap<ChannelName, StoredChannel<S>>, Malformed> {
    let mut channels = BTreeMap::new();
    for _ in 0..decoder.count()? {
        let channel = take_channel(decoder, names)?;
        let bits = take_entry_bits(decoder, 0)?;
        let version = take_version(decoder)?;
        channels.insert(channel, StoredChannel { version, kept: take_kept(decoder, bits)? });
    }
    Ok(channels)
}

/// Appends the counters of all channels.
pub fn put_all_counters(out: &mut Vec<u8>, counters: &BTreeMap<ChannelName, Counters>, places: &Places<'_>) {
    put_len(out, counters.len());
    for (channel, counters) in counters {
        places.put(out, channel);
        put_counters(out, *counters);
    }
}

/// Reads what [`put_all_counters`] wrote.
///
/// # Errors
/// [`Malformed`]
pub fn take_all_counters(
    decoder: &mut Decoder<'_>,
    names: &[ChannelName],
) -> Result<BTreeMap<ChannelName, Counters>, Malformed> {
    let mut counters = BTreeMap::new();
    for _ in 0..decoder.count()? {
        let channel = take_channel(decoder, names)?;
        counters.insert(channel, take_counters(decoder)?);
    }
    Ok(counters)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads the only entry of a body, whose byte is `bits` and after which there is nothing.
    fn taken<S: Seed>(bits: u8) -> Result<BTreeMap<ChannelName, StoredChannel<S>>, Malformed> {
        take_channels(&mut Decoder::new(&[1, 0, bits]), &["c".into()])
    }

    /// All stores say the same of an entry that a later version of the format has written.
    #[test]
    fn flags_that_nobody_knows_are_refused_before_the_rest_of_an_entry() {
        let unknown = Malformed("unknown flags");
        for flag in [1 << 2, 1 << 6, 1 << 7] {
            for kind in [0, SENTINEL, VALUE, SNAPSHOT] {
                assert_eq!(taken::<()>(kind | flag), Err(unknown));
                assert_eq!(taken::<CheckpointId>(kind | flag), Err(unknown));
            }
        }
        assert_eq!(take_entry_bits(&mut Decoder::new(&[1 << 2]), 1 << 2), Ok(1 << 2), "a driver's own");
        assert_eq!(taken::<()>(SENTINEL), Err(Malformed("the row ends too early")));
    }

    #[test]
    fn a_sentinel_has_no_form_and_kind_0_is_none() {
        for bits in [0, SENTINEL | 1 << 3] {
            let kept = take_kept::<()>(&mut Decoder::new(&[]), bits);
            assert_eq!(kept, Err(Malformed("unknown kind of entry")));
        }
    }
}

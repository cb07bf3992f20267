//! Rows: every value ends with a checksum of its key and its bytes.

use std::fmt;
use std::ops::{ControlFlow, Range};

use threadkeep::{Error, Result};

use crate::keys::Key;
use crate::overlay::Overlay;
use crate::store::{Order, Snapshot};

/// Bytes of a checksum.
const SUM: usize = 4;

fn sum(key: &[u8], body: &[u8]) -> [u8; SUM] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(key.len() as u64).to_le_bytes());
    hasher.update(key);
    hasher.update(body);
    let mut sum = [0; SUM];
    sum.copy_from_slice(&hasher.finalize().as_bytes()[..SUM]);
    sum
}

/// The body with its checksum.
pub(crate) fn sealed(key: &[u8], mut body: Vec<u8>) -> Vec<u8> {
    let sum = sum(key, &body);
    body.extend_from_slice(&sum);
    body
}

/// The body without its checksum.
///
/// # Errors
/// [`Error::Corrupt`] if they do not match.
pub(crate) fn opened<'v>(key: &[u8], value: &'v [u8]) -> Result<&'v [u8]> {
    match value.split_last_chunk::<SUM>() {
        Some((body, own)) if *own == sum(key, body) => Ok(body),
        _ => Err(corrupt(key, "the checksum does not match")),
    }
}

/// The body without its checksum, which was compared before.
///
/// # Errors
/// [`Error::Corrupt`] if it is too short for one.
pub(crate) fn unsealed<'v>(key: &[u8], value: &'v [u8]) -> Result<&'v [u8]> {
    let body = value.split_last_chunk::<SUM>().map(|(body, _)| body);
    body.ok_or_else(|| corrupt(key, "there is no checksum"))
}

/// Damage in the row with this key.
pub(crate) fn corrupt(key: &[u8], reason: impl fmt::Display) -> Error {
    let mut place = String::from("the row with key ");
    for byte in key {
        place.extend(byte.escape_ascii().map(char::from));
    }
    Error::corrupt(place, reason)
}

/// The row with this key.
pub(crate) fn get(rows: &dyn Snapshot, key: &[u8]) -> Result<Option<Vec<u8>>> {
    let Some(mut value) = rows.get(key)? else { return Ok(None) };
    let len = opened(key, &value)?.len();
    value.truncate(len);
    Ok(Some(value))
}

/// Puts a row.
pub(crate) fn put(rows: &mut Overlay<'_>, key: Key, body: Vec<u8>) {
    let value = sealed(&key, body);
    rows.put(key, value);
}

/// Visits rows in the order of their keys.
pub(crate) fn each(
    rows: &dyn Snapshot,
    keys: Range<Key>,
    mut visit: impl FnMut(&[u8], &[u8]) -> Result<()>,
) -> Result<()> {
    rows.range(&keys.start..&keys.end, Order::Ascending, &mut |key, value| {
        visit(key, opened(key, value)?).map(ControlFlow::Continue)
    })
}

/// The greatest key in a range. Its row is not read.
pub(crate) fn last(rows: &dyn Snapshot, keys: Range<Key>) -> Result<Option<Key>> {
    let mut last = None;
    rows.range(&keys.start..&keys.end, Order::Descending, &mut |key, _| {
        last = Some(key.to_vec());
        Ok(ControlFlow::Break(()))
    })?;
    Ok(last)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_checksum_depends_on_every_bit_and_on_the_key(
            key in prop::collection::vec(any::<u8>(), 1..20), body in prop::collection::vec(any::<u8>(), 0..40), bit in any::<usize>(),
        ) {
            let mut value = sealed(&key, body.clone());
            prop_assert_eq!(opened(&key, &value).unwrap(), &body[..]);
            prop_assert!(opened(&key[1..], &value).is_err());
            let bit = bit % (value.len() * 8);
            value[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(opened(&key, &value).is_err());
            prop_assert!(opened(&key, &value[..3]).is_err());
        }
    }
}

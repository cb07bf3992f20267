//! The place of a row, and the checksum at its end.

use std::fmt;

use threadkeep::{Error, Result};

/// Identifies one row of the database in errors and checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowKey {
    /// The table.
    pub(crate) table: &'static str,
    /// The row's integer key.
    pub(crate) key: i64,
}

impl RowKey {
    pub(crate) fn new(table: &'static str, key: impl Into<i64>) -> Self {
        Self { table, key: key.into() }
    }

    pub(crate) fn corrupt(self, reason: impl fmt::Display) -> Error {
        Error::corrupt(self.to_string(), reason.to_string())
    }
}

impl fmt::Display for RowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "table {}, key {}", self.table, self.key)
    }
}

/// The key of row `low` of scope `high`.
pub(crate) fn join_key(high: u32, low: u32) -> i64 {
    i64::from(high) << 32 | i64::from(low)
}

/// The number of a row in its scope.
pub(crate) fn low_half(key: i64) -> u32 {
    let [.., a, b, c, d] = key.to_be_bytes();
    u32::from_be_bytes([a, b, c, d])
}

/// Bytes of a checksum.
const SUM: usize = 4;

/// Bytes that are enough for what most checksums cover besides the body.
const HEAD: usize = 64;

/// The checksum of a row: the first bytes of a BLAKE3 hash over its place and contents, so that a changed, moved or
/// swapped row fails.
pub(crate) fn checksum(place: RowKey, context: &[u8], body: &[u8]) -> [u8; SUM] {
    let (key, len) = (place.key.to_le_bytes(), (context.len() as u64).to_le_bytes());
    let parts = [place.table.as_bytes(), &key, &len, context];
    let mut hasher = blake3::Hasher::new();
    // A call of the hasher takes about as long as a block, so what comes before the body is put together first.
    let mut head = [0; HEAD];
    let size = parts.iter().map(|part| part.len()).sum();
    if let Some(head) = head.get_mut(..size) {
        let mut rest = &mut *head;
        for part in parts {
            let (place, more) = rest.split_at_mut(part.len());
            place.copy_from_slice(part);
            rest = more;
        }
        hasher.update(head);
    } else {
        for part in parts {
            hasher.update(part);
        }
    }
    hasher.update(body);
    let mut sum = [0; SUM];
    sum.copy_from_slice(&hasher.finalize().as_bytes()[..SUM]);
    sum
}

/// Appends the checksum to `body`. `context` is the rest of the row.
pub(crate) fn seal(place: RowKey, context: &[u8], mut body: Vec<u8>) -> Vec<u8> {
    let sum = checksum(place, context, &body);
    body.extend_from_slice(&sum);
    body
}

/// The body without its checksum.
///
/// # Errors
/// [`Error::Corrupt`] if the checksum is wrong.
pub(crate) fn unseal<'a>(place: RowKey, context: &[u8], stored: &'a [u8]) -> Result<&'a [u8]> {
    match stored.split_last_chunk::<SUM>() {
        Some((body, sum)) if *sum == checksum(place, context, body) => Ok(body),
        _ => Err(place.corrupt("the checksum does not match")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_checksum_depends_on_every_bit_and_on_the_place(
            body in prop::collection::vec(any::<u8>(), 1..40), bit in any::<usize>(), key in any::<i64>(),
        ) {
            let place = RowKey::new("checkpoint", key);
            let mut stored = seal(place, b"id", body.clone());
            prop_assert_eq!(unseal(place, b"id", &stored).unwrap(), &body[..]);
            prop_assert!(unseal(place, b"other", &stored).is_err());
            prop_assert!(unseal(RowKey::new("scope", key), b"id", &stored).is_err());
            prop_assert!(unseal(RowKey::new("checkpoint", key.wrapping_add(1)), b"id", &stored).is_err());
            let bit = bit % (stored.len() * 8);
            stored[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(unseal(place, b"id", &stored).is_err());
        }
    }

    /// It covers the parts one after the other, whatever their lengths: databases have these sums.
    #[test]
    fn a_checksum_is_that_of_its_parts() {
        for len in [0, 5, 16, 37, 38, 39, 40, 200] {
            let (place, context) = (RowKey::new("checkpoint", 7_i64), vec![3; len]);
            let parts = [b"checkpoint", &7_i64.to_le_bytes()[..], &len.to_le_bytes(), &context, b"body"];
            let whole = blake3::hash(&parts.concat());
            assert_eq!(checksum(place, &context, b"body"), whole.as_bytes()[..SUM], "{len}");
        }
    }

    #[test]
    fn less_than_a_checksum_is_none() {
        assert!(unseal(RowKey::new("name", 1_i64), b"", &[1, 2, 3]).is_err());
    }
}

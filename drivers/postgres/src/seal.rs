//! The checksum at the end of a stored row.

use threadkeep_layout::Malformed;

/// Bytes of a checksum.
const SUM: usize = 4;

/// What a checksum covers besides the body: the table and the other columns of the row, so that a changed, moved or
/// swapped row fails.
#[derive(Debug, Clone)]
pub(crate) struct Seal(blake3::Hasher);

impl Seal {
    /// The seal of rows of a table.
    pub(crate) fn of(table: &str) -> Self {
        Self(blake3::Hasher::new()).and(table.as_bytes())
    }

    /// Covers a column.
    pub(crate) fn and(mut self, column: &[u8]) -> Self {
        self.0.update(&(column.len() as u64).to_le_bytes());
        self.0.update(column);
        self
    }

    /// Covers a column that may be null.
    pub(crate) fn and_maybe(self, column: Option<&[u8]>) -> Self {
        match column {
            Some(column) => self.and(&[1]).and(column),
            None => self.and(&[0]),
        }
    }

    fn sum(mut self, body: &[u8]) -> [u8; SUM] {
        self.0.update(body);
        let mut sum = [0; SUM];
        sum.copy_from_slice(&self.0.finalize().as_bytes()[..SUM]);
        sum
    }

    /// Appends the checksum to `body`.
    pub(crate) fn close(self, mut body: Vec<u8>) -> Vec<u8> {
        let sum = self.sum(&body);
        body.extend_from_slice(&sum);
        body
    }

    /// The body without its checksum, which must match.
    pub(crate) fn open(self, stored: &[u8]) -> Result<&[u8], Malformed> {
        match stored.split_last_chunk::<SUM>() {
            Some((body, sum)) if *sum == self.sum(body) => Ok(body),
            _ => Err(Malformed("the checksum does not match")),
        }
    }

    /// The body, whatever its checksum is.
    pub(crate) fn unchecked(stored: &[u8]) -> Option<&[u8]> {
        stored.split_last_chunk::<SUM>().map(|(body, _)| body)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_checksum_depends_on_every_bit_and_on_the_row(
            body in prop::collection::vec(any::<u8>(), 1..40), bit in any::<usize>(), key in any::<[u8; 8]>(),
        ) {
            let seal = || Seal::of("checkpoint").and(&key).and_maybe(None);
            let mut stored = seal().close(body.clone());
            prop_assert_eq!(seal().open(&stored).unwrap(), &body[..]);
            prop_assert!(Seal::of("head").and(&key).and_maybe(None).open(&stored).is_err());
            prop_assert!(Seal::of("checkpoint").and(&key[1..]).and_maybe(None).open(&stored).is_err());
            prop_assert!(Seal::of("checkpoint").and(&key).and_maybe(Some(b"")).open(&stored).is_err());
            let bit = bit % (stored.len() * 8);
            stored[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(seal().open(&stored).is_err());
        }
    }

    #[test]
    fn less_than_a_checksum_is_none() {
        assert!(Seal::of("head").open(&[1, 2, 3]).is_err());
    }
}

//! Numbers and texts as bytes, and the checksum that ends a stored row.

use std::fmt;

use threadkeep::{Error, Result};

/// Names one row of the database, in errors and in checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// The table.
    pub(crate) table: &'static str,
    /// The row's integer key.
    pub(crate) key: i64,
}

impl Place {
    pub(crate) fn new(table: &'static str, key: impl Into<i64>) -> Self {
        Self { table, key: key.into() }
    }

    pub(crate) fn corrupt(self, reason: impl fmt::Display) -> Error {
        Error::corrupt(self.to_string(), reason.to_string())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "table {}, key {}", self.table, self.key)
    }
}

/// The key of row `low` of scope `high`.
pub(crate) fn join_key(high: u32, low: u32) -> i64 {
    i64::from(high) << 32 | i64::from(low)
}

/// The place of a row in its scope.
pub(crate) fn low_half(key: i64) -> u32 {
    let [.., a, b, c, d] = key.to_be_bytes();
    u32::from_be_bytes([a, b, c, d])
}

/// Bytes of a checksum.
const SUM: usize = 4;

/// The checksum of a row: the first bytes of a BLAKE3 hash over where the row stands and what it holds, so that a
/// row that was changed, moved or exchanged does not pass.
pub(crate) fn checksum(place: Place, context: &[u8], body: &[u8]) -> [u8; SUM] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(place.table.as_bytes());
    hasher.update(&place.key.to_le_bytes());
    hasher.update(&(context.len() as u64).to_le_bytes());
    hasher.update(context);
    hasher.update(body);
    let mut sum = [0; SUM];
    sum.copy_from_slice(&hasher.finalize().as_bytes()[..SUM]);
    sum
}

/// Ends `body` with its checksum. `context` is what else the row holds.
pub(crate) fn seal(place: Place, context: &[u8], mut body: Vec<u8>) -> Vec<u8> {
    let sum = checksum(place, context, &body);
    body.extend_from_slice(&sum);
    body
}

/// The body without its checksum.
///
/// # Errors
/// [`Error::Corrupt`] if the checksum is not right.
pub(crate) fn unseal<'a>(place: Place, context: &[u8], stored: &'a [u8]) -> Result<&'a [u8]> {
    match stored.split_last_chunk::<SUM>() {
        Some((body, sum)) if *sum == checksum(place, context, body) => Ok(body),
        _ => Err(place.corrupt("the checksum does not match")),
    }
}

/// Appends an unsigned number: seven bits a byte, low bits first.
pub(crate) fn put_uint(out: &mut Vec<u8>, number: impl Into<u64>) {
    let mut rest = number.into();
    while rest >= 0x80 {
        out.push((rest & 0x7f) as u8 | 0x80);
        rest >>= 7;
    }
    out.push((rest & 0x7f) as u8);
}

/// Appends a signed number, small magnitudes short.
pub(crate) fn put_int(out: &mut Vec<u8>, number: i64) {
    put_uint(out, (number.wrapping_shl(1) ^ (number >> 63)).cast_unsigned());
}

/// Appends a count or length.
pub(crate) fn put_len(out: &mut Vec<u8>, len: usize) {
    put_uint(out, len as u64);
}

/// Appends bytes behind their length.
pub(crate) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_len(out, bytes.len());
    out.extend_from_slice(bytes);
}

/// Why stored bytes do not decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Malformed(pub(crate) &'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// Reads what the `put_` functions wrote. Bounded by its input: no length that it reads makes it allocate or loop
/// beyond the bytes that are there.
#[derive(Debug)]
pub(crate) struct Decoder<'a>(&'a [u8]);

impl<'a> Decoder<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Malformed("the row ends too early"))?;
        self.0 = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Malformed("the row ends too early"))?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(crate) fn byte(&mut self) -> Result<u8, Malformed> {
        self.array().map(|[byte]| byte)
    }

    pub(crate) fn uint(&mut self) -> Result<u64, Malformed> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(Malformed("a number is too long"))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        u32::try_from(self.uint()?).map_err(|_| Malformed("a number is too large"))
    }

    pub(crate) fn int(&mut self) -> Result<i64, Malformed> {
        let raw = self.uint()?;
        Ok((raw >> 1).cast_signed() ^ -(raw & 1).cast_signed())
    }

    /// A count of things that take at least a byte each.
    pub(crate) fn count(&mut self) -> Result<usize, Malformed> {
        let count = usize::try_from(self.uint()?).unwrap_or(usize::MAX);
        if count > self.0.len() { Err(Malformed("a count is larger than the row")) } else { Ok(count) }
    }

    pub(crate) fn bytes(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.count()?;
        self.take(len)
    }

    pub(crate) fn text(&mut self) -> Result<&'a str, Malformed> {
        std::str::from_utf8(self.bytes()?).map_err(|_| Malformed("a text is not UTF-8"))
    }

    /// Checks that everything was read.
    /// Everything that was not read yet.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.0
    }

    pub(crate) fn finish(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed("bytes behind the end of the row")) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn numbers_and_bytes_survive(a in any::<u64>(), b in any::<i64>(), c in any::<u32>(), bytes in any::<Vec<u8>>()) {
            let mut out = Vec::new();
            put_uint(&mut out, a);
            put_int(&mut out, b);
            put_uint(&mut out, c);
            put_bytes(&mut out, &bytes);
            let mut decoder = Decoder::new(&out);
            prop_assert_eq!(decoder.uint(), Ok(a));
            prop_assert_eq!(decoder.int(), Ok(b));
            prop_assert_eq!(decoder.u32(), Ok(c));
            prop_assert_eq!(decoder.bytes(), Ok(&bytes[..]));
            prop_assert_eq!(decoder.finish(), Ok(()));
        }

        #[test]
        fn a_checksum_depends_on_every_bit_and_on_the_place(
            body in prop::collection::vec(any::<u8>(), 1..40), bit in any::<usize>(), key in any::<i64>(),
        ) {
            let place = Place::new("checkpoint", key);
            let mut stored = seal(place, b"id", body.clone());
            prop_assert_eq!(unseal(place, b"id", &stored).unwrap(), &body[..]);
            prop_assert!(unseal(place, b"other", &stored).is_err());
            prop_assert!(unseal(Place::new("scope", key), b"id", &stored).is_err());
            prop_assert!(unseal(Place::new("checkpoint", key.wrapping_add(1)), b"id", &stored).is_err());
            let bit = bit % (stored.len() * 8);
            stored[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(unseal(place, b"id", &stored).is_err());
        }
    }

    #[test]
    fn overlong_numbers_and_counts_are_refused() {
        assert!(Decoder::new(&[0xff; 11]).uint().is_err());
        assert!(Decoder::new(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02]).uint().is_err());
        assert_eq!(
            Decoder::new(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]).uint(),
            Ok(u64::MAX)
        );
        assert!(Decoder::new(&[200, 1, 0, 0]).count().is_err());
        assert!(Decoder::new(&[3, 0, 0]).bytes().is_err());
        assert!(unseal(Place::new("name", 1_i64), b"", &[1, 2, 3]).is_err());
    }
}

//! Compact encoding of numbers and text.

use std::fmt;

/// Appends an unsigned number: seven bits per byte, low bits first.
pub fn put_uint(out: &mut Vec<u8>, number: impl Into<u64>) {
    let mut rest = number.into();
    while rest >= 0x80 {
        out.push((rest & 0x7f) as u8 | 0x80);
        rest >>= 7;
    }
    out.push((rest & 0x7f) as u8);
}

/// Appends a signed number; small magnitudes are short.
pub fn put_int(out: &mut Vec<u8>, number: i64) {
    put_uint(out, (number.wrapping_shl(1) ^ (number >> 63)).cast_unsigned());
}

/// Appends a count or length.
pub fn put_len(out: &mut Vec<u8>, len: usize) {
    put_uint(out, len as u64);
}

/// Appends bytes, prefixed with their length.
pub fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_len(out, bytes.len());
    out.extend_from_slice(bytes);
}

/// Why stored bytes do not decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// Reads what the `put_` functions wrote. Bounded by its input: no length it reads can make it allocate or loop beyond
/// the available bytes.
#[derive(Debug)]
pub struct Decoder<'a>(&'a [u8]);

impl<'a> Decoder<'a> {
    /// Reads these bytes from the start.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Takes `len` bytes.
    pub fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Malformed("the row ends too early"))?;
        self.0 = rest;
        Ok(taken)
    }

    /// `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Malformed("the row ends too early"))?;
        self.0 = rest;
        Ok(*taken)
    }

    /// One byte.
    pub fn byte(&mut self) -> Result<u8, Malformed> {
        self.array().map(|[byte]| byte)
    }

    /// What [`put_uint`] wrote.
    pub fn uint(&mut self) -> Result<u64, Malformed> {
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

    /// What [`put_uint`] wrote for a number below 2^32.
    pub fn u32(&mut self) -> Result<u32, Malformed> {
        u32::try_from(self.uint()?).map_err(|_| Malformed("a number is too large"))
    }

    /// What [`put_int`] wrote.
    pub fn int(&mut self) -> Result<i64, Malformed> {
        let raw = self.uint()?;
        Ok((raw >> 1).cast_signed() ^ -(raw & 1).cast_signed())
    }

    /// A count of items that take at least a byte each.
    pub fn count(&mut self) -> Result<usize, Malformed> {
        let count = usize::try_from(self.uint()?).unwrap_or(usize::MAX);
        if count > self.0.len() { Err(Malformed("a count is larger than the row")) } else { Ok(count) }
    }

    /// What [`put_bytes`] wrote.
    pub fn bytes(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.count()?;
        self.take(len)
    }

    /// What [`put_bytes`] wrote for a text.
    pub fn text(&mut self) -> Result<&'a str, Malformed> {
        std::str::from_utf8(self.bytes()?).map_err(|_| Malformed("a text is not UTF-8"))
    }

    /// Everything not read yet.
    pub fn rest(&self) -> &'a [u8] {
        self.0
    }

    /// Checks that all input was read.
    pub fn finish(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed("bytes after the end of the row")) }
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
    }
}

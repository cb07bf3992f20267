//! Compresses elements, with or without a dictionary.
//!
//! Messages are short and alike: alone they compress to 0.4 of their size, with a dictionary of similar messages to 0.3
//! or less.

use std::io::{Error, ErrorKind, Read as _, Result};

use zstd::bulk::{Compressor, Decompressor};

const LEVEL: i32 = 3;
/// Shorter ones are stored uncompressed.
const SHORTEST: usize = 48;
/// The same without a dictionary. Each element then needs tables of codes of its own: making them takes four times as
/// long as compressing with those of a dictionary, and below this length the element becomes at most a seventh shorter,
/// below 160 bytes not at all.
const SHORTEST_ALONE: usize = 256;
/// Allocate at most this much up front; a larger declared length must be backed by actual output.
const AT_ONCE: u64 = 1 << 20;

/// Packs elements.
pub struct Packer {
    compressor: Compressor<'static>,
    shortest: usize,
}

impl Packer {
    /// With a dictionary; an empty one means none.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn new(dictionary: &[u8]) -> Result<Self> {
        let shortest = if dictionary.is_empty() { SHORTEST_ALONE } else { SHORTEST };
        Ok(Self { compressor: Compressor::with_dictionary(LEVEL, dictionary)?, shortest })
    }

    /// The packed bytes; `None` for short elements, and unless they save at least a sixteenth.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn pack(&mut self, bytes: &[u8]) -> Result<Option<Vec<u8>>> {
        if bytes.len() < self.shortest {
            return Ok(None);
        }
        let packed = self.compressor.compress(bytes)?;
        Ok((packed.len() < bytes.len() - bytes.len() / 16).then_some(packed))
    }
}

/// Unpacks what a [`Packer`] with the same dictionary packed.
pub struct Unpacker {
    dictionary: Vec<u8>,
    decompressor: Decompressor<'static>,
}

impl Unpacker {
    /// With a dictionary; an empty one means none.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn new(dictionary: Vec<u8>) -> Result<Self> {
        let decompressor = Decompressor::with_dictionary(&dictionary)?;
        Ok(Self { dictionary, decompressor })
    }

    /// Unpacks into a slice of exactly the original length. The caller checks the hash.
    ///
    /// # Errors
    /// As [`Self::unpack`].
    pub fn unpack_into(&mut self, bytes: &mut [u8], packed: &[u8]) -> Result<()> {
        let length = self.decompressor.decompress_to_buffer(packed, bytes)?;
        if length == bytes.len() { Ok(()) } else { Err(wrong_length()) }
    }

    /// The unpacked bytes, `length` of them. The caller checks the hash.
    ///
    /// # Errors
    /// If the packed bytes are damaged, or unpack to another length.
    pub fn unpack(&mut self, length: u64, packed: &[u8]) -> Result<Vec<u8>> {
        let bytes = match usize::try_from(length) {
            Ok(capacity) if length <= AT_ONCE => self.decompressor.decompress(packed, capacity)?,
            _ => {
                let mut bytes = Vec::new();
                let reader = zstd::stream::read::Decoder::with_dictionary(packed, &self.dictionary)?;
                reader.take(length.saturating_add(1)).read_to_end(&mut bytes)?;
                bytes
            }
        };
        if bytes.len() as u64 == length { Ok(bytes) } else { Err(wrong_length()) }
    }
}

fn wrong_length() -> Error {
    Error::new(ErrorKind::InvalidData, "the element's length is wrong")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(n: usize) -> Vec<u8> {
        b"once upon a midnight dreary, while I pondered ".repeat(n)
    }

    #[test]
    fn bytes_come_back_with_and_without_a_dictionary() {
        for dictionary in [Vec::new(), words(3)] {
            let (mut packer, mut unpacker) =
                (Packer::new(&dictionary).unwrap(), Unpacker::new(dictionary).unwrap());
            // The last one exceeds what is allocated up front.
            for bytes in [words(6), words(100), words(50_000)] {
                let packed = packer.pack(&bytes).unwrap().unwrap();
                assert!(packed.len() < bytes.len());
                assert_eq!(unpacker.unpack(bytes.len() as u64, &packed).unwrap(), bytes);
            }
        }
    }

    #[test]
    fn short_elements_are_packed_with_a_dictionary_only() {
        let (mut alone, mut packer) = (Packer::new(b"").unwrap(), Packer::new(&words(3)).unwrap());
        for len in [SHORTEST, SHORTEST_ALONE - 1] {
            assert!(alone.pack(&words(6)[..len]).unwrap().is_none());
            assert!(packer.pack(&words(6)[..len]).unwrap().is_some());
        }
        assert!(alone.pack(&words(6)[..SHORTEST_ALONE]).unwrap().is_some());
        assert!(packer.pack(&words(6)[..SHORTEST - 1]).unwrap().is_none());
    }

    #[test]
    fn what_does_not_get_shorter_is_not_packed() {
        let mut packer = Packer::new(b"").unwrap();
        let noise: Vec<u8> =
            (0..200_u32).flat_map(|n| n.wrapping_mul(2_654_435_769).rotate_left(n).to_le_bytes()).collect();
        assert!(packer.pack(&noise).unwrap().is_none());
    }

    #[test]
    fn a_wrong_length_is_refused_and_takes_no_memory() {
        let (mut packer, mut unpacker) = (Packer::new(b"").unwrap(), Unpacker::new(Vec::new()).unwrap());
        for bytes in [words(10), words(50_000)] {
            let packed = packer.pack(&bytes).unwrap().unwrap();
            let length = bytes.len() as u64;
            for wrong in [0, length - 1, length + 1, u64::MAX] {
                assert!(unpacker.unpack(wrong, &packed).is_err(), "{wrong} for {length}");
            }
            for (there, fits) in [(bytes.len(), true), (bytes.len() - 1, false), (bytes.len() + 1, false)] {
                let mut into = vec![0; there];
                assert_eq!(unpacker.unpack_into(&mut into, &packed).is_ok(), fits);
                assert!(!fits || into == bytes);
            }
            assert!(unpacker.unpack(length, &packed[..packed.len() - 1]).is_err());
        }
    }
}

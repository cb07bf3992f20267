//! The stored bytes of elements: compressed where that saves space, with the database's newest dictionary if it has one.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use bytes::{Bytes, BytesMut};
use rusqlite::params;
use threadkeep::{Error, Result};
use threadkeep_layout::{Decoder, Malformed, Packer as Zstd, Unpacker, put_uint};

use crate::error::unavailable;
use crate::rows::seal::{RowKey, seal, unseal};
use crate::sql::{Db, blob, integer};

const NEWEST: &str = "SELECT key, body FROM dictionary ORDER BY key DESC LIMIT 1";
const NEWEST_KEY: &str = "SELECT ifnull(max(key), 0) FROM dictionary";
const FIND: &str = "SELECT key, body FROM dictionary WHERE key = ?1";
const ALL: &str = "SELECT key, body FROM dictionary";
const ADD: &str = "INSERT INTO dictionary (key, body) VALUES (?1, ?2)";

// The first byte of an element.
const RAW: u8 = 0;
const ZSTD: u8 = 1;
const ZSTD_WITH_DICTIONARY: u8 = 2;

/// The number of a dictionary, from 1 on.
pub(crate) type DictionaryKey = u32;

/// Packs and unpacks the elements of one connection.
pub(crate) struct Packer {
    enabled: bool,
    with: Option<With>,
    /// Another connection may have stored a newer dictionary.
    look: bool,
    dictionaries: HashMap<DictionaryKey, Unpacker>,
}

/// What elements are packed with.
struct With {
    dictionary: Option<DictionaryKey>,
    packer: Zstd,
}

impl Packer {
    /// A packer that compresses, or one that can only unpack.
    pub(crate) fn new(enabled: bool) -> Self {
        Self { enabled, with: None, look: false, dictionaries: HashMap::new() }
    }

    /// Reads dictionaries again when they are needed next. One that was stored in a transaction that is rolled back may be
    /// followed by another one with its number.
    pub(crate) fn forget(&mut self) {
        self.with = None;
        self.dictionaries.clear();
    }

    /// Looks for a newer dictionary before it packs again. Those that it has are not read again: a dictionary that was
    /// committed never changes.
    pub(crate) fn others_wrote(&mut self) {
        self.look = true;
    }

    /// The stored form of `bytes`.
    pub(crate) fn pack(&mut self, db: &Db, bytes: &[u8]) -> Result<Vec<u8>> {
        if self.enabled {
            if std::mem::take(&mut self.look) {
                let newest = newest_dictionary(db)?;
                self.with.take_if(|with| with.dictionary.unwrap_or(0) != newest);
            }
            let with = match &mut self.with {
                Some(with) => with,
                none => none.insert(With::newest(db)?),
            };
            if let Some(packed) = with.packer.pack(bytes).map_err(failed)? {
                let mut body = Vec::with_capacity(packed.len() + 8);
                match with.dictionary {
                    None => body.push(ZSTD),
                    Some(number) => {
                        body.push(ZSTD_WITH_DICTIONARY);
                        put_uint(&mut body, number);
                    }
                }
                put_uint(&mut body, bytes.len() as u64);
                body.extend_from_slice(&packed);
                return Ok(body);
            }
        }
        let mut body = Vec::with_capacity(bytes.len() + 1);
        body.push(RAW);
        body.extend_from_slice(bytes);
        Ok(body)
    }

    /// The bytes of a stored form, in `slab` if there is one. The caller checks their hash.
    pub(crate) fn unpack(
        &mut self,
        db: &Db,
        place: RowKey,
        body: &[u8],
        slab: Option<&mut Slab>,
    ) -> Result<Bytes> {
        let malformed = |reason: Malformed| place.corrupt(reason);
        let mut decoder = Decoder::new(body);
        let dictionary = match decoder.byte().map_err(malformed)? {
            RAW => return Ok(Bytes::copy_from_slice(decoder.rest())),
            ZSTD => None,
            ZSTD_WITH_DICTIONARY => Some(decoder.u32().map_err(malformed)?),
            _ => return Err(place.corrupt("unknown codec")),
        };
        let length = decoder.uint().map_err(malformed)?;
        let unpacker = self.unpacker(db, dictionary)?;
        let packed = decoder.rest();
        let small = usize::try_from(length).ok().filter(|length| *length <= Slab::LARGEST);
        let bytes = match (slab, small) {
            (Some(slab), Some(length)) => slab.filled(length, |bytes| unpacker.unpack_into(bytes, packed)),
            _ => unpacker.unpack(length, packed).map(Bytes::from),
        };
        bytes.map_err(|error| place.corrupt(error))
    }

    fn unpacker(&mut self, db: &Db, dictionary: Option<DictionaryKey>) -> Result<&mut Unpacker> {
        // Dictionaries are numbered from 1.
        let number = dictionary.unwrap_or(0);
        Ok(match self.dictionaries.entry(number) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => {
                let missing = || place(number).corrupt("the row is missing");
                let bytes = match dictionary {
                    None => Vec::new(),
                    Some(number) => find(db, FIND, params![number])?.ok_or_else(missing)?.1,
                };
                unknown.insert(Unpacker::new(bytes).map_err(failed)?)
            }
        })
    }
}

/// Memory for the elements of one large read. A slab serves thousands of elements with a few allocations, but is held
/// as long as any of them: it is for elements that live and die together.
#[derive(Default)]
pub(crate) struct Slab(BytesMut);

impl Slab {
    /// Below the size from which an allocator requests memory from the system, and returns it, each time.
    const SIZE: usize = 64 << 10;
    /// Larger elements have an allocation of their own.
    const LARGEST: usize = 8 << 10;

    /// This many bytes, filled by `fill`.
    fn filled(
        &mut self,
        length: usize,
        fill: impl FnOnce(&mut [u8]) -> std::io::Result<()>,
    ) -> std::io::Result<Bytes> {
        if self.0.capacity() < length {
            self.0 = BytesMut::with_capacity(Self::SIZE);
        }
        self.0.resize(length, 0);
        let filled = fill(&mut self.0);
        let bytes = self.0.split().freeze();
        filled.map(|()| bytes)
    }
}

impl With {
    /// The newest dictionary, if there is one.
    fn newest(db: &Db) -> Result<Self> {
        let newest = find(db, NEWEST, [])?;
        let bytes = newest.as_ref().map_or(&[][..], |(_, bytes)| bytes);
        let packer = Zstd::new(bytes).map_err(failed)?;
        Ok(Self { dictionary: newest.map(|(number, _)| number), packer })
    }
}

/// The number of the newest dictionary, 0 if there is none.
pub(crate) fn newest_dictionary(db: &Db) -> Result<DictionaryKey> {
    db.one(NEWEST_KEY, [], |row| number(integer(row, 0)?)).map(Option::unwrap_or_default)
}

/// Stores a dictionary, unless another connection has stored this or a newer one meanwhile. The newest is used from now
/// on.
pub(crate) fn add_dictionary(db: &Db, number: DictionaryKey, bytes: &[u8]) -> Result<()> {
    if newest_dictionary(db)? < number {
        let place = place(number);
        db.execute(ADD, params![place.key, seal(place, b"", bytes.to_vec())])?;
    }
    db.forget_dictionary();
    Ok(())
}

/// The dictionaries that are damaged.
pub(crate) fn each_broken_dictionary(db: &Db, mut look: impl FnMut(RowKey, Error)) -> Result<()> {
    db.each(ALL, [], |row| {
        let place = RowKey::new("dictionary", integer(row, 0)?);
        if let Err(error) = unseal(place, b"", blob(row, 1)?) {
            look(place, error);
        }
        Ok(())
    })
}

fn find(db: &Db, sql: &str, params: impl rusqlite::Params) -> Result<Option<(DictionaryKey, Vec<u8>)>> {
    db.one(sql, params, |row| {
        let number = number(integer(row, 0)?)?;
        Ok((number, unseal(place(number), b"", blob(row, 1)?)?.to_vec()))
    })
}

fn number(key: i64) -> Result<DictionaryKey> {
    key.try_into().map_err(|_| RowKey::new("dictionary", key).corrupt("the key is out of range"))
}

fn place(number: DictionaryKey) -> RowKey {
    RowKey::new("dictionary", number)
}

fn failed(error: std::io::Error) -> Error {
    unavailable(format!("zstd: {error}"))
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::Options;

    fn opened() -> (TempDir, Db, Db) {
        let dir = tempfile::tempdir().unwrap();
        let open = || Db::writer(&dir.path().join("db"), &Options::default()).unwrap();
        let (one, other) = (open(), open());
        (dir, one, other)
    }

    #[test]
    fn the_dictionary_of_another_writer_is_used_and_one_that_is_known_is_not_read_again() {
        let text =
            b"a message that is as long as those that are packed with a dictionary, which it resembles";
        let (_dir, one, other) = opened();
        let packed_with = |db: &Db| {
            let body = db.pack(text).unwrap();
            let place = RowKey::new("element", 1_i64);
            for db in [&one, &other] {
                assert_eq!(db.unpack(place, &body, None).unwrap(), text[..]);
            }
            (body[0] == ZSTD_WITH_DICTIONARY).then(|| body[1])
        };
        assert_eq!([&one, &other].map(packed_with), [None; 2]);
        for number in 1..=2 {
            add_dictionary(&one, number.into(), &text.repeat(usize::from(number))).unwrap();
            add_dictionary(&other, number.into(), b"which comes too late").unwrap();
            other.others_wrote();
            assert_eq!([&one, &other].map(packed_with), [Some(number); 2]);
        }
        // Nobody reads this.
        one.execute("UPDATE dictionary SET body = x''", []).unwrap();
        for db in [&one, &other] {
            db.others_wrote();
            assert_eq!(packed_with(db), Some(2));
        }
        one.forget_dictionary();
        one.pack(text).unwrap_err();
    }

    #[test]
    fn pieces_of_a_slab_are_what_was_filled_in_whatever_failed_between() {
        let mut slab = Slab::default();
        let mut pieces = Vec::new();
        for n in 0..100_u8 {
            let length = usize::from(n) * 80;
            let failed = slab.filled(length, |bytes| {
                bytes.fill(255);
                Err(std::io::Error::other("damaged"))
            });
            assert!(failed.is_err());
            let filled = slab.filled(length, |bytes| {
                assert!(bytes.iter().all(|byte| *byte == 0));
                bytes.fill(n);
                Ok(())
            });
            pieces.push(filled.unwrap());
        }
        for (n, piece) in (0..100_u8).zip(pieces) {
            assert_eq!(piece, vec![n; usize::from(n) * 80]);
        }
    }
}

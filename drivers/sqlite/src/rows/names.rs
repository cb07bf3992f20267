//! Channel and node names as small numbers. Names are never deleted and are numbered upwards from 1, so what was read
//! stays valid, and a new name has a greater number.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rusqlite::params;
use threadkeep::{Error, Result};

use crate::rows::record::NameKey;
use crate::rows::seal::{RowKey, checksum};
use crate::sql::{Db, blob, integer, text};

const NEWER: &str = "SELECT key, text, sum FROM name WHERE key > ?1 ORDER BY key";
const ADD: &str = "INSERT INTO name (key, text, sum) VALUES (?1, ?2, ?3)";

/// The names read so far, all checked.
#[derive(Debug, Default)]
pub(crate) struct Names(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    texts: HashMap<NameKey, Arc<str>>,
    /// They are few and short, and a step looks up several: comparing them takes less time than hashing one.
    keys: BTreeMap<Arc<str>, NameKey>,
    last: NameKey,
}

impl Names {
    /// The text of a name.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if there is no such name, or a name is damaged.
    pub(crate) fn text(&self, db: &Db, key: NameKey) -> Result<Arc<str>> {
        let mut known = self.known();
        if !known.texts.contains_key(&key) {
            known.read_newer(db)?;
        }
        known.texts.get(&key).cloned().ok_or_else(|| place(key).corrupt("the row is missing"))
    }

    /// Reads all names.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a name is damaged.
    pub(crate) fn read(&self, db: &Db) -> Result<()> {
        self.known().read_newer(db)
    }

    /// The number of a name, if it has one.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a name is damaged.
    pub(crate) fn find(&self, db: &Db, name: &str) -> Result<Option<NameKey>> {
        let mut known = self.known();
        if let Some(key) = known.keys.get(name) {
            return Ok(Some(*key));
        }
        known.read_newer(db)?;
        Ok(known.keys.get(name).copied())
    }

    /// The number of a name; a new one gets the next. Only for the writer, inside its transaction: if that is rolled
    /// back, these names must be forgotten.
    pub(crate) fn intern(&self, db: &Db, name: &str) -> Result<NameKey> {
        if let Some(key) = self.find(db, name)? {
            return Ok(key);
        }
        let mut known = self.known();
        let key = known.last.checked_add(1).ok_or_else(|| {
            Error::InvalidInput("the store cannot hold more channel and node names".to_owned())
        })?;
        db.execute(ADD, params![key, name, checksum(place(key), name.as_bytes(), b"")])?;
        known.add(key, name);
        Ok(key)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn read_newer(&mut self, db: &Db) -> Result<()> {
        db.each(NEWER, [self.last], |row| {
            let number = integer(row, 0)?;
            let key = NameKey::try_from(number)
                .map_err(|_| RowKey::new("name", number).corrupt("the key is out of range"))?;
            let name = text(row, 1)?;
            if blob(row, 2)? != checksum(place(key), name.as_bytes(), b"") {
                return Err(place(key).corrupt("the checksum does not match"));
            }
            self.add(key, name);
            Ok(())
        })
    }

    fn add(&mut self, key: NameKey, name: &str) {
        let name: Arc<str> = name.into();
        self.texts.insert(key, name.clone());
        self.keys.insert(name, key);
        self.last = key;
    }
}

fn place(key: NameKey) -> RowKey {
    RowKey::new("name", key)
}

//! The file of API keys.
//!
//! A key has the form `tk_<id>_<secret>`: the id, which is not secret, identifies its record, and the secret is 256
//! random bits. The file holds a keyed BLAKE3 hash of the whole key: for a secret this random one hash suffices, and a
//! reader of the file cannot recover a key.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use chrono::{DateTime, SubsecRound as _, Utc};
use serde::{Deserialize, Serialize};

use crate::secret::Secret;
use crate::stamp::Stamp;
use threadkeep_files as files;

const PREFIX: &str = "tk_";
/// Separates the hashes of keys from all other hashes.
const HASH_CONTEXT: &str = "threadkeep 2026-11-21 API keys";
const VERSION: u32 = 1;
/// Only its owner may access the file.
const MODE: u32 = 0o600;

/// What a key allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Threads and runs.
    User,
    /// Threads, runs and the routes for administrators.
    Admin,
}

impl Role {
    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Admin => "admin",
        }
    }
}

impl FromStr for Role {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "user" => Ok(Self::User),
            "admin" => Ok(Self::Admin),
            _ => Err(format!("'{name}' is not a role; use user or admin")),
        }
    }
}

/// The stored record of a key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyRecord {
    /// Identifies the key in lists and for revocation.
    pub id: String,
    /// The user of the key.
    pub user: String,
    /// What it allows.
    pub role: Role,
    /// When it was created.
    pub created_at: DateTime<Utc>,
    /// The hash of the key.
    hash: KeyHash,
}

/// The hash of a key. Comparison takes constant time.
#[derive(Debug, Clone, PartialEq, Eq)]
struct KeyHash(blake3::Hash);

impl KeyHash {
    fn of(key: &Secret) -> Self {
        Self(blake3::Hasher::new_derive_key(HASH_CONTEXT).update(key.expose().as_bytes()).finalize())
    }
}

impl Serialize for KeyHash {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0.to_hex())
    }
}

impl<'de> Deserialize<'de> for KeyHash {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        blake3::Hash::from_hex(text).map(Self).map_err(serde::de::Error::custom)
    }
}

/// The whole file.
#[derive(Debug, Serialize, Deserialize)]
struct Content {
    version: u32,
    keys: Vec<KeyRecord>,
}

/// Why the keys cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The operating system refused.
    #[error("cannot use the API keys in {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The file was not written by this program, or is damaged.
    #[error("{} is not a file of API keys: {detail}; repair it, or remove it and create new keys", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// There is no key with this id.
    #[error("there is no key {id} in {}; list the keys with `threadkeep keys list`", path.display())]
    Unknown {
        /// The id.
        id: String,
        /// The file.
        path: PathBuf,
    },
    /// The user name is invalid.
    #[error("'{0}' is not a valid user name: use 1 to 128 characters without spaces and control characters")]
    User(String),
}

/// The content last read, with a trusted file stamp.
#[derive(Debug)]
struct Read {
    stamp: Stamp,
    keys: Arc<[KeyRecord]>,
}

/// The file of API keys; a missing file means that there are no keys. Clones share what was read last.
#[derive(Debug, Clone)]
pub struct KeyFile {
    path: PathBuf,
    read: Arc<Mutex<Option<Read>>>,
}

impl KeyFile {
    /// The file at this path. Does not read it yet.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), read: Arc::default() }
    }

    /// Creates a key and stores its hash. The key itself is only available here. Blocks.
    ///
    /// # Errors
    /// [`KeyError`]; then there is no new key.
    pub fn create(&self, user: &str, role: Role) -> Result<(KeyRecord, Secret), KeyError> {
        let odd = |c: char| c.is_whitespace() || c.is_control();
        if user.is_empty() || user.chars().count() > 128 || user.contains(odd) {
            return Err(KeyError::User(user.to_owned()));
        }
        let (id, secret) = (hex(&rand::random::<[u8; 6]>()), hex(&rand::random::<[u8; 32]>()));
        let key = Secret::new(format!("{PREFIX}{id}_{secret}"));
        let created_at = Utc::now().trunc_subsecs(0);
        let record = KeyRecord { id, user: user.to_owned(), role, created_at, hash: KeyHash::of(&key) };
        self.change(|keys| {
            keys.push(record.clone());
            Ok(())
        })?;
        Ok((record, key))
    }

    /// The keys, oldest first. Blocks.
    ///
    /// # Errors
    /// [`KeyError::Io`], [`KeyError::Invalid`].
    pub fn list(&self) -> Result<Vec<KeyRecord>, KeyError> {
        match fs::read(&self.path) {
            Ok(text) => self.parse(&text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(self.io(error)),
        }
    }

    /// Removes a key: the next request with it is refused. Blocks.
    ///
    /// # Errors
    /// [`KeyError`]; then the key is still valid.
    pub fn revoke(&self, id: &str) -> Result<KeyRecord, KeyError> {
        self.change(|keys| {
            let at = keys.iter().position(|record| record.id == id);
            let at = at.ok_or_else(|| KeyError::Unknown { id: id.to_owned(), path: self.path.clone() })?;
            Ok(keys.remove(at))
        })
    }

    /// The current record of a key. Blocks briefly.
    ///
    /// # Errors
    /// [`KeyError::Io`], [`KeyError::Invalid`].
    pub fn find(&self, key: &Secret) -> Result<Option<KeyRecord>, KeyError> {
        Ok(found(&self.current()?, key))
    }

    /// [`Self::find`] without blocking the reactor: in place if one look at the file shows that it is unchanged, else on
    /// another thread.
    ///
    /// # Errors
    /// See there.
    pub async fn find_async(&self, key: Secret) -> Result<Option<KeyRecord>, KeyError> {
        let unchanged = {
            let read = self.read.try_lock().ok();
            let read = read.as_ref().and_then(|read| read.as_ref());
            let unchanged = read.filter(|read| Stamp::of(&self.path).is_ok_and(|now| now == read.stamp));
            unchanged.map(|read| Arc::clone(&read.keys))
        };
        if let Some(keys) = unchanged {
            return Ok(found(&keys, &key));
        }
        let file = self.clone();
        // A panic or a stopping runtime refuses the request.
        tokio::task::spawn_blocking(move || file.find(&key)).await.unwrap_or(Ok(None))
    }

    /// The keys, read again if the file may have changed.
    fn current(&self) -> Result<Arc<[KeyRecord]>, KeyError> {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = match Stamp::of(&self.path) {
            Ok(stamp) => stamp,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                *read = None;
                return Ok(Arc::default());
            }
            Err(error) => return Err(self.io(error)),
        };
        if let Some(read) = &*read
            && read.stamp == stamp
        {
            return Ok(Arc::clone(&read.keys));
        }
        let keys: Arc<[KeyRecord]> = self.list()?.into();
        *read = stamp.is_trusted().then(|| Read { stamp, keys: Arc::clone(&keys) });
        Ok(keys)
    }

    /// Changes the keys under a lock against other processes.
    fn change<T>(
        &self,
        change: impl FnOnce(&mut Vec<KeyRecord>) -> Result<T, KeyError>,
    ) -> Result<T, KeyError> {
        let io = |error| self.io(error);
        if let Some(directory) = self.path.parent() {
            files::create_private_dir(directory).map_err(io)?;
        }
        // A separate lock file: the key file is replaced, and a lock on it would stay with the old one.
        let lock = File::create(self.path.with_added_extension("lock")).map_err(io)?;
        lock.lock().map_err(io)?;
        let mut keys = self.list()?;
        let changed = change(&mut keys)?;
        let content = serde_json::to_vec_pretty(&Content { version: VERSION, keys });
        let content = content.map_err(|error| self.io(error.into()))?;
        files::replace(&self.path, &content, MODE).map_err(io)?;
        Ok(changed)
    }

    fn parse(&self, text: &[u8]) -> Result<Vec<KeyRecord>, KeyError> {
        let invalid = |detail| KeyError::Invalid { path: self.path.clone(), detail };
        let content: Content = serde_json::from_slice(text).map_err(|error| invalid(error.to_string()))?;
        if content.version != VERSION {
            return Err(invalid(format!(
                "it has version {}, but this program supports {VERSION}",
                content.version
            )));
        }
        Ok(content.keys)
    }

    fn io(&self, source: io::Error) -> KeyError {
        KeyError::Io { path: self.path.clone(), source }
    }
}

/// The record of a key.
fn found(keys: &[KeyRecord], key: &Secret) -> Option<KeyRecord> {
    let (id, _) = key.expose().strip_prefix(PREFIX)?.split_once('_')?;
    let record = keys.iter().find(|record| record.id == id)?;
    (record.hash == KeyHash::of(key)).then(|| record.clone())
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a text cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> (tempfile::TempDir, KeyFile) {
        let dir = tempfile::tempdir().unwrap();
        let file = KeyFile::new(&dir.path().join("state/api-keys.json"));
        (dir, file)
    }

    #[test]
    fn a_key_is_found_until_it_is_revoked_and_its_text_is_nowhere() {
        let (dir, file) = file();
        assert_eq!(file.list().unwrap(), []);
        let (ann, key) = file.create("ann", Role::User).unwrap();
        let (bob, other) = file.create("bob", Role::Admin).unwrap();
        assert_ne!(key.expose(), other.expose());
        assert_eq!(file.list().unwrap(), [ann.clone(), bob.clone()]);
        assert_eq!(file.find(&key).unwrap(), Some(ann.clone()));
        assert_eq!(file.find(&other).unwrap(), Some(bob.clone()));

        let secret = key.expose().rsplit('_').next().unwrap();
        assert_eq!(secret.len(), 64);
        let stored = fs::read_to_string(&file.path).unwrap();
        assert!(stored.contains(&ann.id) && !stored.contains(secret), "{stored}");
        assert!(!format!("{file:?} {ann:?} {key:?}").contains(secret));

        // Another handle, like the command line's while a gateway runs.
        assert_eq!(KeyFile::new(&file.path).revoke(&ann.id).unwrap(), ann);
        assert_eq!(file.find(&key).unwrap(), None);
        assert_eq!(file.find(&other).unwrap(), Some(bob));
        let error = file.revoke(&ann.id).unwrap_err();
        assert!(matches!(&error, KeyError::Unknown { id, .. } if *id == ann.id), "{error}");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            assert_eq!(fs::metadata(&file.path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        drop(dir);
    }

    #[test]
    fn a_key_must_be_right_in_every_character() {
        let (_dir, file) = file();
        let (record, key) = file.create("ann", Role::User).unwrap();
        let key = key.expose();
        let mut wrong: Vec<String> = (0..key.len())
            .map(|at| {
                let other = if &key[at..=at] == "0" { "1" } else { "0" };
                format!("{}{other}{}", &key[..at], &key[at + 1..])
            })
            .collect();
        let shorter = key[..key.len() - 1].to_owned();
        wrong.extend([
            String::new(),
            "tk_".to_owned(),
            format!("tk_{}_", record.id),
            shorter,
            format!("{key}0"),
        ]);
        wrong.push(key.to_uppercase());
        for wrong in wrong {
            assert_eq!(file.find(&Secret::new(wrong.clone())).unwrap(), None, "{wrong}");
        }
    }

    #[test]
    fn a_key_that_was_read_before_counts_no_longer_than_the_file_has_it() {
        let (_dir, file) = file();
        let (record, key) = file.create("ann", Role::User).unwrap();
        // Old enough for the stamp to be trusted.
        let old = std::time::SystemTime::now() - std::time::Duration::from_hours(1);
        File::options().write(true).open(&file.path).unwrap().set_modified(old).unwrap();
        assert!(file.find(&key).unwrap().is_some());
        assert!(file.read.lock().unwrap().is_some(), "it was cached");
        file.revoke(&record.id).unwrap();
        assert!(file.find(&key).unwrap().is_none());
        fs::remove_file(&file.path).unwrap();
        assert_eq!(file.find(&key).unwrap(), None);
    }

    #[test]
    fn a_damaged_file_is_an_error_and_is_left_as_it_is() {
        let (_dir, file) = file();
        let (_, key) = file.create("ann", Role::User).unwrap();
        for damaged in ["", "[", "{}", r#"{"version":2,"keys":[]}"#, r#"{"version":1,"keys":[{"id":"x"}]}"#] {
            fs::write(&file.path, damaged).unwrap();
            for error in [
                file.find(&key).unwrap_err(),
                file.list().unwrap_err(),
                file.create("bob", Role::User).unwrap_err(),
                file.revoke("x").unwrap_err(),
            ] {
                assert!(matches!(error, KeyError::Invalid { .. }), "{damaged}: {error}");
            }
            assert_eq!(fs::read_to_string(&file.path).unwrap(), damaged);
        }
    }

    #[test]
    fn keys_made_at_once_are_all_kept() {
        let (_dir, file) = file();
        let mut ids: Vec<String> = std::thread::scope(|scope| {
            let make = |n| {
                let path = file.path.clone();
                scope.spawn(move || KeyFile::new(&path).create(&format!("u{n}"), Role::User).unwrap().0.id)
            };
            let made: Vec<_> = (0..8).map(make).collect();
            made.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut kept: Vec<String> = file.list().unwrap().into_iter().map(|record| record.id).collect();
        kept.sort();
        ids.sort();
        assert_eq!(kept, ids);
    }

    #[test]
    fn users_have_names() {
        let (_dir, file) = file();
        for odd in ["", "two words", "a\nb", &"x".repeat(129)] {
            assert!(matches!(file.create(odd, Role::User), Err(KeyError::User(_))), "{odd:?}");
        }
        assert_eq!(file.list().unwrap(), []);
        file.create("ann@example.org", Role::User).unwrap();
    }
}

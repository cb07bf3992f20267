//! Threads and chains by their texts.

use rusqlite::params;
use threadkeep::id::{Namespace, ThreadId};
use threadkeep::{Error, Result};

use crate::codec::{Place, seal, unseal};
use crate::record::{Ordinal, decode_floor, encode_floor};
use crate::sql::{Db, blob, integer, text};

const THREAD: &str = "SELECT key, id, hash FROM thread WHERE id = ?1 OR hash = ?2";
const ADD_THREAD: &str = "INSERT INTO thread (id, hash) VALUES (?1, ?2)";
const DROP_THREAD: &str = "DELETE FROM thread WHERE key = ?1";
const CHAIN: &str = "SELECT key, thread, namespace, hash, body FROM chain \
                     WHERE (thread = ?1 AND namespace = ?2) OR hash = ?3";
const CHAINS: &str = "SELECT key, thread, namespace, hash, body FROM chain WHERE thread = ?1 ORDER BY namespace";
const ADD_CHAIN: &str = "INSERT INTO chain (thread, namespace, hash, body) VALUES (?1, ?2, ?3, x'')";
const SET_CHAIN: &str = "UPDATE chain SET body = ?2 WHERE key = ?1";
const DROP_CHAINS: &str = "DELETE FROM chain WHERE thread = ?1";

/// The number of a thread.
pub(crate) type ThreadKey = u32;
/// The number of a chain.
pub(crate) type ChainKey = u32;

/// Keys of threads and chains take the high half of a positive 64-bit key.
const KEY_LIMIT: i64 = 1 << 31;

/// A namespace of a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chain {
    pub(crate) key: ChainKey,
    /// The greatest ordinal that was ever deleted: new ones are greater.
    pub(crate) floor: Ordinal,
}

/// The number of a thread, if it is known.
///
/// # Errors
/// [`Error::Corrupt`] if its row is damaged.
pub(crate) fn find_thread(db: &Db, thread: &ThreadId) -> Result<Option<ThreadKey>> {
    let hash = hash_of(&[thread.as_str().as_bytes()]);
    db.one(THREAD, params![thread.as_str(), hash], |row| {
        let place = Place::new("thread", integer(row, 0)?);
        if text(row, 1)? != thread.as_str() || integer(row, 2)? != hash {
            return Err(place.corrupt(format!("the id and its hash disagree; one of them is that of {thread}")));
        }
        short_key(place)
    })
}

/// Adds a thread.
pub(crate) fn add_thread(db: &Db, thread: &ThreadId) -> Result<ThreadKey> {
    db.execute(ADD_THREAD, params![thread.as_str(), hash_of(&[thread.as_str().as_bytes()])])?;
    new_key(db)
}

/// Deletes a thread and its chains from the directory.
pub(crate) fn drop_thread(db: &Db, thread: ThreadKey) -> Result<()> {
    db.execute(DROP_CHAINS, [thread])?;
    db.execute(DROP_THREAD, [thread])?;
    Ok(())
}

/// A chain of a thread, if it is known.
///
/// # Errors
/// [`Error::Corrupt`] if its row is damaged.
pub(crate) fn find_chain(db: &Db, thread: ThreadKey, namespace: &Namespace) -> Result<Option<Chain>> {
    let params = params![thread, namespace.as_str(), chain_hash(thread, namespace.as_str())];
    let found = db.one(CHAIN, params, |row| chain(row, thread).map(|(found, chain)| (found == *namespace, chain)))?;
    match found {
        Some((false, chain)) => Err(Place::new("chain", chain.key).corrupt("the hash is that of another namespace")),
        Some((true, chain)) => Ok(Some(chain)),
        None => Ok(None),
    }
}

/// Every chain of a thread.
pub(crate) fn chains(db: &Db, thread: ThreadKey) -> Result<Vec<(Namespace, Chain)>> {
    let mut chains = Vec::new();
    db.each(CHAINS, [thread], |row| {
        chains.push(chain(row, thread)?);
        Ok(())
    })?;
    Ok(chains)
}

/// Adds a chain to a thread.
pub(crate) fn add_chain(db: &Db, thread: ThreadKey, namespace: &Namespace) -> Result<Chain> {
    let hash = chain_hash(thread, namespace.as_str());
    db.execute(ADD_CHAIN, params![thread, namespace.as_str(), hash])?;
    let chain = Chain { key: new_key(db)?, floor: 0 };
    let body = seal(Place::new("chain", chain.key), &hash.to_le_bytes(), encode_floor(chain.floor));
    db.execute(SET_CHAIN, params![chain.key, body])?;
    Ok(chain)
}

fn chain(row: &rusqlite::Row<'_>, thread: ThreadKey) -> Result<(Namespace, Chain)> {
    let place = Place::new("chain", integer(row, 0)?);
    let (namespace, hash) = (text(row, 2)?, integer(row, 3)?);
    if integer(row, 1)? != i64::from(thread) || hash != chain_hash(thread, namespace) {
        return Err(place.corrupt("the thread, the namespace and their hash disagree"));
    }
    let body = unseal(place, &hash.to_le_bytes(), blob(row, 4)?)?;
    let floor = decode_floor(body).map_err(|reason| place.corrupt(reason))?;
    Ok((namespace.into(), Chain { key: short_key(place)?, floor }))
}

fn short_key(place: Place) -> Result<u32> {
    u32::try_from(place.key).map_err(|_| place.corrupt("the key is out of range"))
}

fn new_key(db: &Db) -> Result<u32> {
    match u32::try_from(db.last_key()) {
        Ok(key) if i64::from(key) < KEY_LIMIT => Ok(key),
        _ => Err(Error::InvalidInput("the store cannot hold more threads and namespaces".to_owned())),
    }
}

fn chain_hash(thread: ThreadKey, namespace: &str) -> i64 {
    hash_of(&[&thread.to_le_bytes(), namespace.as_bytes()])
}

fn hash_of(parts: &[&[u8]]) -> i64 {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(part);
    }
    let mut short = [0; 8];
    short.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    i64::from_le_bytes(short)
}

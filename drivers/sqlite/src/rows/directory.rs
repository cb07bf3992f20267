//! Threads and chains by their texts.
//!
//! Both are rows of one table: a thread belongs to owner 0, a chain (a namespace of a thread) to its thread. A thread that
//! is being written in pieces belongs to nobody until it is complete, and so does one whose rows are being deleted in
//! pieces. A row is looked up by its text *or* a hash of it and must match both, so that a damaged one is an error, not
//! an unknown text.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::{Row, params};
use threadkeep::id::{CheckpointId, Namespace, ThreadId};
use threadkeep::{Error, Result};

use crate::rows::record::{Ordinal, decode_floor, encode_floor};
use crate::rows::seal::{RowKey, seal, unseal};
use crate::sql::{Db, blob, integer, text};

const FIND: &str =
    "SELECT key, owner, text, hash, body FROM scope WHERE (owner = ?1 AND text = ?2) OR hash = ?3";
const OWNED: &str = "SELECT key, owner, text, hash, body FROM scope WHERE owner = ?1 ORDER BY text";
const ADD: &str = "INSERT INTO scope (owner, text, hash, body) VALUES (?1, ?2, ?3, x'')";
const FIRST_OWNED: &str =
    "SELECT key, owner, text, hash, body FROM scope WHERE owner = ?1 ORDER BY text LIMIT ?2";
const NEXT_OWNED: &str = "SELECT key, owner, text, hash, body FROM scope
    WHERE owner = ?1 AND text > ?2 ORDER BY text LIMIT 1";
const NAME: &str = "UPDATE scope SET owner = ?2, text = ?3, hash = ?4 WHERE key = ?1";
const SET_BODY: &str = "UPDATE scope SET body = ?2 WHERE key = ?1";
const DROP: &str = "DELETE FROM scope WHERE owner = ?1 OR key = ?1";
const AT: &str = "SELECT key, owner, text, hash, body FROM scope WHERE key = ?1";
const UPWARDS: &str = "SELECT key, owner, text, hash, body FROM scope ORDER BY key";
const DOWNWARDS: &str = "SELECT key, owner, text, hash, body FROM scope ORDER BY key DESC";
const THREADS: &str = "SELECT key, owner, text, hash, body FROM scope WHERE owner = 0 ORDER BY text LIMIT ?1";
/// A statement of its own: of `?1 IS NULL OR text > ?1`, SQLite cannot search the index for `text`.
pub(crate) const THREADS_AFTER: &str = "SELECT key, owner, text, hash, body FROM scope
    WHERE owner = 0 AND text > ?1 ORDER BY text LIMIT ?2";

/// The number of a thread.
pub(crate) type ThreadKey = u32;
/// The number of a chain.
pub(crate) type ChainKey = u32;

/// The owner of threads; no row has this key.
const NOBODY: u32 = 0;
/// The owner of threads that have no name yet; no row has this key.
const UNNAMED: u32 = u32::MAX;
/// The owner of threads that were deleted while some of their rows are left; no row has this key.
const DELETED: u32 = u32::MAX - 1;
/// After this time, nobody completes a thread without a name any more.
const ABANDONED: Duration = Duration::from_hours(1);
/// Keys take the high half of a positive 64-bit number.
const KEY_LIMIT: i64 = 1 << 31;

/// A thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Thread {
    pub(crate) key: ThreadKey,
    /// How often its rows were changed or removed; never decreases. The numbers of its elements may be reused each
    /// time.
    pub(crate) rewrites: u32,
}

impl Thread {
    /// The thread of a row of the directory, whose floor is the rewrite count.
    fn of(Chain { key, floor }: Chain) -> Self {
        Self { key, rewrites: floor }
    }
}

/// A namespace of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chain {
    pub(crate) key: ChainKey,
    /// The greatest ordinal ever deleted: new ones are greater.
    pub(crate) floor: Ordinal,
}

/// A thread, if it exists.
pub(crate) fn thread(db: &Db, thread: &ThreadId) -> Result<Option<Thread>> {
    Ok(find(db, NOBODY, thread.as_str())?.map(Thread::of))
}

/// The number of a thread, if it exists.
pub(crate) fn find_thread(db: &Db, id: &ThreadId) -> Result<Option<ThreadKey>> {
    Ok(thread(db, id)?.map(|thread| thread.key))
}

/// Counts a change or removal of rows of a thread.
pub(crate) fn rewritten(db: &Db, thread: &ThreadId) -> Result<()> {
    let Some(found) = find(db, NOBODY, thread.as_str())? else { return Ok(()) };
    let floor = found
        .floor
        .checked_add(1)
        .ok_or_else(|| Error::InvalidInput(format!("thread {thread} cannot be changed more often")))?;
    set_body(db, Chain { floor, ..found }, hash_of(NOBODY, thread.as_str()))
}

/// Adds a thread.
pub(crate) fn add_thread(db: &Db, thread: &ThreadId) -> Result<Thread> {
    add(db, NOBODY, thread.as_str()).map(Thread::of)
}

/// Adds a thread that nobody finds until it is [named](name). The token says when that was.
pub(crate) fn add_unnamed(db: &Db, token: &str) -> Result<Thread> {
    add(db, UNNAMED, token).map(Thread::of)
}

/// A thread without a name, if it exists.
pub(crate) fn find_unnamed(db: &Db, token: &str) -> Result<Option<Thread>> {
    Ok(find(db, UNNAMED, token)?.map(Thread::of))
}

/// Names a thread, which no other one may be called.
pub(crate) fn name(db: &Db, key: ThreadKey, thread: &ThreadId) -> Result<()> {
    give(db, key, NOBODY, thread.as_str())
}

/// Deletes a thread from the directory, except that [`next_deleted`] finds it. Its rows are to be deleted next.
pub(crate) fn mark_deleted(db: &Db, key: ThreadKey) -> Result<()> {
    give(db, key, DELETED, &text_of_deleted(key))
}

/// The next deleted thread of which rows may be left: the first one, or the one after another.
pub(crate) fn next_deleted(db: &Db, after: Option<ThreadKey>) -> Result<Option<ThreadKey>> {
    // Every text is greater than the empty one.
    let after = after.map(text_of_deleted).unwrap_or_default();
    db.one(NEXT_OWNED, params![DELETED, after], |row| Ok(checked(row)?.key))
}

fn text_of_deleted(key: ThreadKey) -> String {
    key.to_string()
}

/// Whether a row of the directory is a deleted thread of which rows may be left.
pub(crate) fn is_deleted(scope: &Scope) -> bool {
    scope.owner == DELETED
}

fn give(db: &Db, key: ThreadKey, owner: u32, text: &str) -> Result<()> {
    let hash = hash_of(owner, text);
    db.execute(NAME, params![key, owner, text, hash])?;
    set_body(db, Chain { key, floor: 0 }, hash)
}

/// Whether a row of the directory is a thread without a name that a process may be writing right now.
pub(crate) fn is_being_made(scope: &Scope) -> bool {
    let since = scope.text.parse().ok().map(|token: CheckpointId| Duration::from_millis(token.unix_ms()));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    scope.owner == UNNAMED && since.is_some_and(|since| now.saturating_sub(since) < ABANDONED)
}

/// Whether a row of the directory is a thread without a name that nobody completes any more.
pub(crate) fn is_abandoned(scope: &Scope) -> bool {
    scope.owner == UNNAMED && !is_being_made(scope)
}

/// A chain of a thread, if it exists.
pub(crate) fn find_chain(db: &Db, thread: ThreadKey, namespace: &Namespace) -> Result<Option<Chain>> {
    find(db, thread, namespace.as_str())
}

/// Adds a chain to a thread.
pub(crate) fn add_chain(db: &Db, thread: ThreadKey, namespace: &Namespace) -> Result<Chain> {
    add(db, thread, namespace.as_str())
}

/// Every chain of a thread.
pub(crate) fn chains(db: &Db, thread: ThreadKey) -> Result<Vec<(Namespace, Chain)>> {
    let mut chains = Vec::new();
    db.each(OWNED, [thread], |row| {
        let chain = checked(row)?;
        chains.push((text(row, 2)?.into(), chain));
        Ok(())
    })?;
    Ok(chains)
}

/// The first chains of a thread, up to a limit.
pub(crate) fn first_chains(db: &Db, thread: ThreadKey, limit: usize) -> Result<Vec<ChainKey>> {
    let mut chains = Vec::new();
    db.each(FIRST_OWNED, params![thread, i64::try_from(limit).unwrap_or(i64::MAX)], |row| {
        chains.push(checked(row)?.key);
        Ok(())
    })?;
    Ok(chains)
}

/// Deletes a thread and its chains from the directory.
pub(crate) fn drop_thread(db: &Db, thread: ThreadKey) -> Result<()> {
    db.execute(DROP, [thread]).map(|_| ())
}

/// Threads ordered by their texts.
pub(crate) fn threads(db: &Db, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
    let mut threads = Vec::new();
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let read = |row: &Row<'_>| {
        checked(row)?;
        threads.push(text(row, 2)?.into());
        Ok(())
    };
    match after {
        None => db.each(THREADS, [limit], read)?,
        Some(after) => db.each(THREADS_AFTER, params![after.as_str(), limit], read)?,
    }
    Ok(threads)
}

/// A row of the directory.
pub(crate) struct Scope {
    pub(crate) key: u32,
    pub(crate) owner: u32,
    pub(crate) text: String,
}

/// In which order the directory is read.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Order {
    Upwards,
    Downwards,
}

/// Passes every row of the directory to `look`, by number, or what is wrong with it.
pub(crate) fn each(db: &Db, order: Order, mut look: impl FnMut(RowKey, Result<Scope>)) -> Result<()> {
    let sql = match order {
        Order::Upwards => UPWARDS,
        Order::Downwards => DOWNWARDS,
    };
    db.each(sql, [], |row| {
        look(RowKey::new("scope", integer(row, 0)?), scope(row));
        Ok(())
    })
}

/// The row of the directory with this number, if there is one.
pub(crate) fn at(db: &Db, key: u32) -> Result<Option<Scope>> {
    db.one(AT, [key], scope)
}

fn scope(row: &Row<'_>) -> Result<Scope> {
    let key = checked(row)?.key;
    let owner = u32::try_from(integer(row, 1)?);
    let owner = owner.map_err(|_| place(key).corrupt("the owner is out of range"))?;
    Ok(Scope { key, owner, text: text(row, 2)?.to_owned() })
}

/// Deletes a chain from the directory.
pub(crate) fn drop_chain(db: &Db, chain: ChainKey) -> Result<()> {
    db.execute(DROP, [chain]).map(|_| ())
}

/// Stores the floor of a chain.
pub(crate) fn set_floor(db: &Db, thread: ThreadKey, namespace: &Namespace, chain: Chain) -> Result<()> {
    set_body(db, chain, hash_of(thread, namespace.as_str()))
}

fn set_body(db: &Db, chain: Chain, hash: i64) -> Result<()> {
    let body = seal(place(chain.key), &hash.to_le_bytes(), encode_floor(chain.floor));
    db.execute(SET_BODY, params![chain.key, body]).map(|_| ())
}

fn find(db: &Db, owner: u32, wanted: &str) -> Result<Option<Chain>> {
    db.one(FIND, params![owner, wanted, hash_of(owner, wanted)], |row| {
        let found = checked(row)?;
        if integer(row, 1)? == i64::from(owner) && text(row, 2)? == wanted {
            Ok(found)
        } else {
            Err(place(found.key).corrupt(format!("the hash is that of {wanted:?}, the text is not")))
        }
    })
}

fn add(db: &Db, owner: u32, text: &str) -> Result<Chain> {
    let hash = hash_of(owner, text);
    db.execute(ADD, params![owner, text, hash])?;
    let key = match u32::try_from(db.last_key()) {
        Ok(key) if i64::from(key) < KEY_LIMIT => key,
        _ => return Err(Error::InvalidInput("the store cannot hold more threads and namespaces".to_owned())),
    };
    let chain = Chain { key, floor: 0 };
    set_body(db, chain, hash)?;
    Ok(chain)
}

fn checked(row: &Row<'_>) -> Result<Chain> {
    let key = integer(row, 0)?;
    let place = RowKey::new("scope", key);
    let hash = integer(row, 3)?;
    let owner = u32::try_from(integer(row, 1)?).map_err(|_| place.corrupt("the owner is out of range"))?;
    if hash != hash_of(owner, text(row, 2)?) {
        return Err(place.corrupt("the owner, the text and their hash disagree"));
    }
    let body = unseal(place, &hash.to_le_bytes(), blob(row, 4)?)?;
    let floor = decode_floor(body).map_err(|reason| place.corrupt(reason))?;
    let key = u32::try_from(key).map_err(|_| place.corrupt("the key is out of range"))?;
    Ok(Chain { key, floor })
}

fn place(key: u32) -> RowKey {
    RowKey::new("scope", key)
}

fn hash_of(owner: u32, text: &str) -> i64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&owner.to_le_bytes());
    hasher.update(text.as_bytes());
    let mut short = [0; 8];
    short.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    i64::from_le_bytes(short)
}

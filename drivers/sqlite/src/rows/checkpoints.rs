//! Checkpoint rows: reading by position, finding by id, and writing.

use rusqlite::{Row, params};
use threadkeep::Result;
use threadkeep::id::CheckpointId;
use threadkeep_pages::Bound;

use crate::rows::directory::ChainKey;
use crate::rows::record::{CheckpointRecord, Ordinal, TaskRecord, decode_tasks, encode_tasks};
use crate::rows::seal::{RowKey, join_key, low_half, seal, unseal};
use crate::sql::{Db, blob, integer, optional_blob};

const NEWEST_UP_TO: &str =
    "SELECT key, id, body, tasks FROM checkpoint WHERE key BETWEEN ?1 AND ?2 ORDER BY key DESC LIMIT ?3";
const OLDEST_FIRST: &str =
    "SELECT key, id, body, tasks FROM checkpoint WHERE key BETWEEN ?1 AND ?2 ORDER BY key";
const ADD: &str = "INSERT INTO checkpoint (key, id, body) VALUES (?1, ?2, ?3)";
const ADD_ROW: &str = "INSERT INTO checkpoint (key, id, body, tasks) VALUES (?1, ?2, ?3, ?4)";
const SET_TASKS: &str = "UPDATE checkpoint SET tasks = ?2 WHERE key = ?1";
const SET_BODY: &str = "UPDATE checkpoint SET body = ?2 WHERE key = ?1";
const EXISTS: &str = "SELECT 1 FROM checkpoint WHERE key = ?1";
const REMOVE: &str = "DELETE FROM checkpoint WHERE key = ?1";
const STORED: &str = "SELECT coalesce(sum(length(id) + length(body) + coalesce(length(tasks), 0)), 0)
    FROM checkpoint WHERE key BETWEEN ?1 AND ?2";
const EXTENT: &str = "SELECT count(*), coalesce(max(key), 0), coalesce(sum(length(tasks)), 0)
    FROM checkpoint WHERE key BETWEEN ?1 AND ?2";
const HAS_MORE: &str = "SELECT 1 FROM checkpoint WHERE key BETWEEN ?1 AND ?2 LIMIT 1 OFFSET ?3";
const DROP_OLDEST: &str = "DELETE FROM checkpoint WHERE key IN
    (SELECT key FROM checkpoint WHERE key BETWEEN ?1 AND ?2 ORDER BY key LIMIT ?3)";

/// Distinguishes the checksum of the tasks from that of the body, whose context is the id.
const TASKS_CONTEXT: &[u8] = b"tasks";

/// A checkpoint row with valid checksums.
#[derive(Debug, Clone)]
pub(crate) struct CheckpointRow {
    pub(crate) ordinal: Ordinal,
    pub(crate) id: CheckpointId,
    place: RowKey,
    body: Vec<u8>,
    tasks: Option<Vec<u8>>,
}

impl CheckpointRow {
    /// What it holds.
    pub(crate) fn record(&self) -> Result<CheckpointRecord> {
        CheckpointRecord::decode(self.ordinal, &self.body).map_err(|reason| self.place.corrupt(reason))
    }

    /// Its bytes, but for those of its key and id.
    pub(crate) fn bytes(&self) -> usize {
        self.body.len() + self.tasks.as_ref().map_or(0, Vec::len)
    }

    /// Adds the whole row to a digest.
    pub(crate) fn digest(&self, hasher: &mut blake3::Hasher) {
        let (body, tasks) = (&self.body[..], self.tasks.as_deref().unwrap_or_default());
        hasher.update(&self.ordinal.to_le_bytes()).update(self.id.as_bytes());
        for part in [body, tasks] {
            hasher.update(&part.len().to_le_bytes()).update(part);
        }
    }

    /// The tasks that ran from it, in the order in which they were stored.
    pub(crate) fn tasks(&self) -> Result<Vec<TaskRecord>> {
        let tasks = self.tasks.as_deref().map(decode_tasks).transpose();
        tasks.map(Option::unwrap_or_default).map_err(|reason| self.place.corrupt(reason))
    }
}

/// Up to `limit` checkpoints of a chain, newest first, from `ordinal` down.
pub(crate) fn newest_up_to(
    db: &Db,
    chain: ChainKey,
    ordinal: Ordinal,
    limit: u32,
) -> Result<Vec<CheckpointRow>> {
    let mut found = Vec::new();
    db.each(NEWEST_UP_TO, params![join_key(chain, 0), join_key(chain, ordinal), limit], |row| {
        found.push(checkpoint(row)?);
        Ok(())
    })?;
    Ok(found)
}

/// Every checkpoint of a chain, oldest first.
pub(crate) fn all(db: &Db, chain: ChainKey) -> Result<Vec<CheckpointRow>> {
    let mut rows = newest_up_to(db, chain, Ordinal::MAX, u32::MAX)?;
    rows.reverse();
    Ok(rows)
}

/// Passes every row of a chain to `look`, oldest first: its place in the database, and the row or what is wrong with
/// it.
pub(crate) fn each(
    db: &Db,
    chain: ChainKey,
    mut look: impl FnMut(RowKey, Result<CheckpointRow>),
) -> Result<()> {
    db.each(OLDEST_FIRST, keys_of(chain), |row| {
        look(RowKey::new("checkpoint", integer(row, 0)?), checkpoint(row));
        Ok(())
    })
}

/// The head of a chain.
pub(crate) fn head(db: &Db, chain: ChainKey) -> Result<Option<CheckpointRow>> {
    Ok(newest_up_to(db, chain, Ordinal::MAX, 1)?.pop())
}

/// The checkpoint with this id, if it exists.
pub(crate) fn find(db: &Db, chain: ChainKey, id: CheckpointId) -> Result<Option<CheckpointRow>> {
    Ok(newest_not_after(db, chain, id)?.filter(|row| row.id == id))
}

/// The checkpoint with the greatest id that is not greater than `id`. Ids and ordinals have the same order, so this is
/// a binary search; it checks every row on the way, so that a damaged one cannot mislead it.
pub(crate) fn newest_not_after(db: &Db, chain: ChainKey, id: CheckpointId) -> Result<Option<CheckpointRow>> {
    let Some(head) = head(db, chain)? else { return Ok(None) };
    if head.id <= id {
        return Ok(Some(head));
    }
    // Invariant: no row at or below `low` is after `id`, and the last of them is `best`; every row from `high` on is
    // after it.
    let (mut low, mut high, mut best) = (0, head.ordinal, None);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        match newest_up_to(db, chain, middle, 1)?.pop().filter(|row| row.ordinal > low) {
            Some(row) if row.id > id => high = row.ordinal,
            Some(row) if row.id == id => return Ok(Some(row)),
            Some(row) => (low, best) = (middle, Some(row)),
            None => low = middle,
        }
    }
    Ok(best)
}

/// Adds a checkpoint.
pub(crate) fn add(
    db: &Db,
    chain: ChainKey,
    ordinal: Ordinal,
    id: CheckpointId,
    record: &CheckpointRecord,
) -> Result<()> {
    let place = place(chain, ordinal);
    let body = seal(place, id.as_bytes(), record.encode(ordinal));
    db.often(ADD, &[Bound::Integer(place.key), Bound::Blob(id.as_bytes()), Bound::Blob(&body)])
}

/// Adds a row of another chain as it is, sealed for its new place: nothing in it depends on the chain.
pub(crate) fn add_row(db: &Db, chain: ChainKey, row: &CheckpointRow) -> Result<()> {
    let (place, id) = (place(chain, row.ordinal), row.id.as_bytes());
    let body = seal(place, id, row.body.clone());
    let tasks = row.tasks.clone().map(|tasks| seal(place, TASKS_CONTEXT, tasks));
    db.execute(ADD_ROW, params![place.key, id, body, tasks]).map(|_| ())
}

/// Stores the tasks that ran from a checkpoint.
pub(crate) fn set_tasks(db: &Db, chain: ChainKey, ordinal: Ordinal, tasks: &[TaskRecord]) -> Result<()> {
    let place = place(chain, ordinal);
    let tasks = seal(place, TASKS_CONTEXT, encode_tasks(tasks));
    db.often(SET_TASKS, &[Bound::Integer(place.key), Bound::Blob(&tasks)])
}

/// Replaces the body of a checkpoint.
pub(crate) fn set_body(
    db: &Db,
    chain: ChainKey,
    ordinal: Ordinal,
    id: CheckpointId,
    record: &CheckpointRecord,
) -> Result<()> {
    let place = place(chain, ordinal);
    let body = seal(place, id.as_bytes(), record.encode(ordinal));
    db.execute(SET_BODY, params![place.key, body]).map(|_| ())
}

/// Whether there is a checkpoint with this ordinal. Does not look at what it holds.
pub(crate) fn exists(db: &Db, chain: ChainKey, ordinal: Ordinal) -> Result<bool> {
    Ok(db.one(EXISTS, [join_key(chain, ordinal)], |_| Ok(()))?.is_some())
}

/// Deletes a checkpoint.
pub(crate) fn remove(db: &Db, chain: ChainKey, ordinal: Ordinal) -> Result<()> {
    db.execute(REMOVE, [join_key(chain, ordinal)]).map(|_| ())
}

/// Deletes up to `limit` checkpoints of a chain, oldest first. Returns how many there were.
pub(crate) fn drop_oldest(db: &Db, chain: ChainKey, limit: usize) -> Result<usize> {
    let [from, to] = keys_of(chain);
    db.execute(DROP_OLDEST, params![from, to, i64::try_from(limit).unwrap_or(i64::MAX)])
}

/// What every commit to a chain, and every put of writes that adds some, makes greater: its checkpoints, the newest of
/// them, and the bytes of tasks.
pub(crate) type Extent = [i64; 3];

/// The extent of a chain. Looks at each row, but decodes none.
pub(crate) fn extent(db: &Db, chain: ChainKey) -> Result<Extent> {
    let extent =
        db.one(EXTENT, keys_of(chain), |row| Ok([integer(row, 0)?, integer(row, 1)?, integer(row, 2)?]))?;
    Ok(extent.unwrap_or_default())
}

/// Whether a chain has more than this many checkpoints.
pub(crate) fn has_more_than(db: &Db, chain: ChainKey, count: usize) -> Result<bool> {
    let [from, to] = keys_of(chain);
    let more = db.one(HAS_MORE, params![from, to, i64::try_from(count).unwrap_or(i64::MAX)], |_| Ok(()))?;
    Ok(more.is_some())
}

/// Bytes in the checkpoints of a chain.
pub(crate) fn stored_bytes(db: &Db, chain: ChainKey) -> Result<u64> {
    let bytes = db.one(STORED, keys_of(chain), |row| integer(row, 0))?;
    Ok(bytes.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or_default())
}

/// The keys that the checkpoints of a chain have.
fn keys_of(chain: ChainKey) -> [i64; 2] {
    [join_key(chain, 0), join_key(chain, Ordinal::MAX)]
}

/// The table and key of a checkpoint.
pub(crate) fn place(chain: ChainKey, ordinal: Ordinal) -> RowKey {
    RowKey::new("checkpoint", join_key(chain, ordinal))
}

fn checkpoint(row: &Row<'_>) -> Result<CheckpointRow> {
    let place = RowKey::new("checkpoint", integer(row, 0)?);
    let id = blob(row, 1)?.try_into().map_err(|_| place.corrupt("the id does not have sixteen bytes"))?;
    let id = CheckpointId::from_bytes(id);
    let body = unseal(place, id.as_bytes(), blob(row, 2)?)?.to_vec();
    let tasks = optional_blob(row, 3)?.map(|tasks| unseal(place, TASKS_CONTEXT, tasks));
    let tasks = tasks.transpose()?.map(<[u8]>::to_vec);
    Ok(CheckpointRow { ordinal: low_half(place.key), id, place, body, tasks })
}

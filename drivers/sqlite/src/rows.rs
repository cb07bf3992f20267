//! Checkpoint and task rows: reading them by place, finding a checkpoint by id, and writing them.

use rusqlite::{Row, params};
use threadkeep::Result;
use threadkeep::id::CheckpointId;

use crate::codec::{Place, seal, unseal};
use crate::directory::ChainKey;
use crate::record::{CheckpointRecord, Ordinal, TaskRecord};
use crate::sql::{Db, blob, integer};

const NEWEST_UP_TO: &str =
    "SELECT key, id, body FROM checkpoint WHERE key BETWEEN ?1 AND ?2 ORDER BY key DESC LIMIT ?3";
const ADD_CHECKPOINT: &str = "INSERT INTO checkpoint (key, id, body) VALUES (?1, ?2, ?3)";
const DROP_CHECKPOINTS: &str = "DELETE FROM checkpoint WHERE key BETWEEN ?1 AND ?2";
const TASKS: &str = "SELECT key, ord, body FROM task WHERE key = ?1 ORDER BY ord";
const PUT_TASK: &str = "INSERT INTO task (key, ord, body) VALUES (?1, ?2, ?3) \
                        ON CONFLICT (key, ord) DO UPDATE SET body = excluded.body";
const DROP_TASKS: &str = "DELETE FROM task WHERE key BETWEEN ?1 AND ?2";

/// A checkpoint row whose checksum was right.
#[derive(Debug, Clone)]
pub(crate) struct CheckpointRow {
    pub(crate) ordinal: Ordinal,
    pub(crate) id: CheckpointId,
    place: Place,
    body: Vec<u8>,
}

impl CheckpointRow {
    /// What it holds.
    pub(crate) fn record(&self) -> Result<CheckpointRecord> {
        CheckpointRecord::decode(self.ordinal, &self.body).map_err(|reason| self.place.corrupt(reason))
    }
}

/// A task row: its place under its checkpoint, and what it holds.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TaskRow {
    pub(crate) ord: u32,
    pub(crate) record: TaskRecord,
}

pub(crate) fn key_of(chain: ChainKey, ordinal: Ordinal) -> i64 {
    i64::from(chain) << 32 | i64::from(ordinal)
}

/// Up to `limit` checkpoints of a chain, newest first, from `ordinal` down.
pub(crate) fn newest_up_to(db: &Db, chain: ChainKey, ordinal: Ordinal, limit: u32) -> Result<Vec<CheckpointRow>> {
    let mut found = Vec::new();
    db.each(NEWEST_UP_TO, params![key_of(chain, 0), key_of(chain, ordinal), limit], |row| {
        found.push(checkpoint(row)?);
        Ok(())
    })?;
    Ok(found)
}

/// The head of a chain.
pub(crate) fn head(db: &Db, chain: ChainKey) -> Result<Option<CheckpointRow>> {
    Ok(newest_up_to(db, chain, Ordinal::MAX, 1)?.pop())
}

/// The checkpoint with this id, if it is there.
pub(crate) fn find(db: &Db, chain: ChainKey, id: CheckpointId) -> Result<Option<CheckpointRow>> {
    Ok(newest_not_after(db, chain, id)?.filter(|row| row.id == id))
}

/// The checkpoint with the greatest id that is not greater than `id`. Ids and ordinals have the same order, so this is
/// a binary search; every row on the way is checked, and a damaged one cannot mislead it.
pub(crate) fn newest_not_after(db: &Db, chain: ChainKey, id: CheckpointId) -> Result<Option<CheckpointRow>> {
    let Some(head) = head(db, chain)? else { return Ok(None) };
    if head.id <= id {
        return Ok(Some(head));
    }
    // Every row at or below `low` is not after `id`, the last of them is `best`; every row from `high` on is after it.
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
pub(crate) fn add_checkpoint(
    db: &Db,
    chain: ChainKey,
    ordinal: Ordinal,
    id: CheckpointId,
    record: &CheckpointRecord,
) -> Result<()> {
    let key = key_of(chain, ordinal);
    let body = seal(Place::new("checkpoint", key), id.as_bytes(), record.encode(ordinal));
    db.execute(ADD_CHECKPOINT, params![key, id.as_bytes(), body]).map(|_| ())
}

/// The task rows under a checkpoint, in the order in which they were stored.
pub(crate) fn tasks(db: &Db, chain: ChainKey, ordinal: Ordinal) -> Result<Vec<TaskRow>> {
    let mut tasks = Vec::new();
    db.each(TASKS, [key_of(chain, ordinal)], |row| {
        let place = Place { table: "task", key: integer(row, 0)?, ord: short(row, 1)? };
        let body = unseal(place, b"", blob(row, 2)?)?;
        let record = TaskRecord::decode(body).map_err(|reason| place.corrupt(reason))?;
        tasks.push(TaskRow { ord: place.ord, record });
        Ok(())
    })?;
    Ok(tasks)
}

/// Adds or replaces a task row.
pub(crate) fn put_task(db: &Db, chain: ChainKey, ordinal: Ordinal, task: &TaskRow) -> Result<()> {
    let key = key_of(chain, ordinal);
    let body = seal(Place { table: "task", key, ord: task.ord }, b"", task.record.encode());
    db.execute(PUT_TASK, params![key, task.ord, body]).map(|_| ())
}

/// Deletes every checkpoint and task row of a chain.
pub(crate) fn drop_chain(db: &Db, chain: ChainKey) -> Result<()> {
    let range = [key_of(chain, 0), key_of(chain, Ordinal::MAX)];
    db.execute(DROP_TASKS, range)?;
    db.execute(DROP_CHECKPOINTS, range)?;
    Ok(())
}

fn checkpoint(row: &Row<'_>) -> Result<CheckpointRow> {
    let place = Place::new("checkpoint", integer(row, 0)?);
    let id = blob(row, 1)?;
    let body = unseal(place, id, blob(row, 2)?)?.to_vec();
    let id = id.try_into().map_err(|_| place.corrupt("the id does not have sixteen bytes"))?;
    let ordinal = (place.key & i64::from(u32::MAX)) as Ordinal;
    Ok(CheckpointRow { ordinal, id: CheckpointId::from_bytes(id), place, body })
}

fn short(row: &Row<'_>, column: usize) -> Result<u32> {
    let number = integer(row, column)?;
    u32::try_from(number).map_err(|_| Place::new("task", integer(row, 0).unwrap_or_default()).corrupt("ord is out of range"))
}

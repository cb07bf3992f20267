//! Threads that are written as their checkpoints come.

use async_trait::async_trait;

use super::LocalKey;
use super::rewrite::{gap_of, wrong_by_itself};
use crate::checkpoint::CheckpointTuple;
use crate::error::{Error, Result};
use crate::id::{TaskId, ThreadId};

/// The checkpoints of a thread, a few at a time: by namespace and then by id, with every value and every row under them.
#[async_trait]
pub trait Coming: Send {
    /// Begins again: the first checkpoint is the next one.
    ///
    /// # Errors
    /// Why they do not come again.
    async fn rewind(&mut self) -> Result<()>;

    /// The next ones, each of them once; none after the last one.
    ///
    /// # Errors
    /// Why no more come.
    async fn next(&mut self) -> Result<Vec<CheckpointTuple>>;
}

/// All checkpoints of a thread that comes, for a saver that needs them at once.
///
/// # Errors
/// Those of `coming`, and of [`check_next`] if their order is wrong.
pub async fn collected(thread: &ThreadId, coming: &mut dyn Coming) -> Result<Vec<CheckpointTuple>> {
    let mut all: Vec<CheckpointTuple> = Vec::new();
    coming.rewind().await?;
    loop {
        let more = coming.next().await?;
        if more.is_empty() {
            return Ok(all);
        }
        for tuple in more {
            check_order(thread, &tuple, all.last().map(place).as_ref())?;
            all.push(tuple);
        }
    }
}

/// Refuses the next checkpoint of a thread that comes if it breaks a lineage: what [`Rewrite::check`](super::Rewrite::check)
/// is for a thread that is there as a whole. `last` is the one before; `parent` holds the tasks with rows under the parent of
/// this one, if it came.
///
/// # Errors
/// [`Error::InvalidInput`] saying why.
pub fn check_next(
    thread: &ThreadId,
    tuple: &CheckpointTuple,
    last: Option<&LocalKey>,
    parent: Option<&[TaskId]>,
) -> Result<()> {
    check_order(thread, tuple, last)?;
    match wrong_by_itself(thread, tuple).or_else(|| gap_of(tuple, parent)) {
        Some(why) => refuse(thread, tuple, &why),
        None => Ok(()),
    }
}

/// Refuses the next checkpoint of a thread that comes if it does not follow the one before, `last`.
///
/// # Errors
/// [`Error::InvalidInput`] if so.
pub fn check_order(thread: &ThreadId, tuple: &CheckpointTuple, last: Option<&LocalKey>) -> Result<()> {
    if last.is_some_and(|last| *last >= place(tuple)) {
        return refuse(thread, tuple, "it is out of order");
    }
    Ok(())
}

fn refuse(thread: &ThreadId, tuple: &CheckpointTuple, why: &str) -> Result<()> {
    let id = tuple.checkpoint.id;
    Err(Error::InvalidInput(format!("creation of thread {thread}, checkpoint {id}: {why}")))
}

fn place(tuple: &CheckpointTuple) -> LocalKey {
    (tuple.namespace.clone(), tuple.checkpoint.id)
}

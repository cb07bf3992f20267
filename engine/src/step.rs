//! The superstep writer: collects the writes of parallel tasks, applies them in live order, commits.

use std::collections::BTreeSet;

use serde_json::Value as Json;

use crate::checkpoint::{ERROR_CHANNEL, TaskWrites, Write};
use crate::error::{Error, Result};
use crate::id::{CheckpointId, IdSource, NodeName, TaskId, ThreadId};
use crate::metadata::{Extra, Source};
use crate::saver::Flush;
use crate::state::{KnownHead, RollbackPoint, StateAccessor, StateSnapshot, Step, plan};
use crate::value::ChannelValue;

/// Runs supersteps on a thread. It holds the live state, so that a superstep costs what it changes.
///
/// ```text
/// open -> start_task, finish_task (any number, in any order) -> commit -> start_task ... -> commit
/// ```
///
/// It is the only writer as long as its commits succeed; an [`Error::Conflict`] means that another writer moved the
/// head, and the writer must be opened again.
pub struct StepWriter {
    accessor: StateAccessor,
    thread: ThreadId,
    /// The state from which the tasks of the current superstep run.
    base: Option<StateSnapshot>,
    head: KnownHead,
    finished: Vec<(TaskWrites, bool)>,
    /// The rows that the checkpoint of the next commit begins with.
    pending: Vec<TaskWrites>,
    flush: Flush,
    /// Whether a commit of this writer may not be flushed yet.
    unflushed: bool,
    /// Set during a write, and after one in doubt: a writer whose future was dropped there does not know its own state.
    unsettled: bool,
}

/// One attempt at a task of a superstep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    /// The id of the attempt.
    pub id: TaskId,
    /// The node it runs.
    pub node: NodeName,
    /// Its index among the tasks of the superstep.
    pub index: u32,
}

/// When the writes of a finished task are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// At once, so that a crash does not repeat the task: for a task that finishes before its siblings.
    Now,
    /// With the commit of the superstep: for the last (or only) task.
    WithCommit,
}

impl StepWriter {
    /// Opens a writer on a checkpoint of a thread, or on its head. On an older checkpoint, the first commit forks.
    ///
    /// # Errors
    /// [`Error::NotFound`] if `at` does not exist, and as [`StateAccessor::get`].
    pub async fn open(accessor: &StateAccessor, thread: &ThreadId, at: Option<CheckpointId>) -> Result<Self> {
        let base = accessor.get(thread, None).await?;
        let head = accessor.known(thread, base.as_ref().map(|state| state.key.id));
        Self::on(accessor, base, head, at).await
    }

    /// As [`Self::open`], for a run that read the head earlier.
    ///
    /// # Errors
    /// As there, and [`Error::Conflict`] if another writer moved the head since.
    pub async fn open_known(
        accessor: &StateAccessor,
        mut head: KnownHead,
        at: Option<CheckpointId>,
    ) -> Result<Self> {
        let base = accessor.get_known(&mut head).await?;
        Self::on(accessor, base, head, at).await
    }

    /// As [`Self::open_known`] on the head itself, on the state that was captured there, without reading it again.
    pub fn open_captured(accessor: &StateAccessor, head: KnownHead, captured: &RollbackPoint) -> Self {
        Self::new(accessor, captured.snapshot().cloned(), head)
    }

    async fn on(
        accessor: &StateAccessor,
        mut base: Option<StateSnapshot>,
        head: KnownHead,
        at: Option<CheckpointId>,
    ) -> Result<Self> {
        if let Some(checkpoint) = at.filter(|at| Some(*at) != head.id()) {
            base = accessor.get(head.thread(), at).await?;
            if base.is_none() {
                return Err(Error::NotFound { thread: head.thread().clone(), checkpoint });
            }
        }
        Ok(Self::new(accessor, base, head))
    }

    fn new(accessor: &StateAccessor, base: Option<StateSnapshot>, head: KnownHead) -> Self {
        Self {
            accessor: accessor.clone(),
            thread: head.thread().clone(),
            base,
            head,
            finished: Vec::new(),
            pending: Vec::new(),
            flush: Flush::Now,
            unflushed: false,
            unsettled: false,
        }
    }

    /// When later commits are flushed; [`Flush::Now`] by default.
    ///
    /// For one flush per turn, set [`Flush::WithNext`], and call [`Self::flush`] after the last commit, before the turn
    /// is reported as done. Rows of [`Durability::Now`] are still flushed at once.
    pub fn set_flush(&mut self, flush: Flush) {
        self.flush = flush;
    }

    /// Flushes what this writer has committed but not flushed. Free if there is nothing.
    ///
    /// # Errors
    /// The saver's; it may be retried. [`Error::InDoubt`] instead of [`Error::Unavailable`]: the commits to be flushed
    /// are stored, and may survive a restart.
    pub async fn flush(&mut self) -> Result<()> {
        if self.unflushed {
            self.accessor.saver().flush(&self.thread).await.map_err(|error| match error {
                Error::Unavailable { saver, reason } => Error::InDoubt { saver, reason },
                error => error,
            })?;
            self.unflushed = false;
        }
        Ok(())
    }

    /// The live state; `None` before the first commit to an empty thread.
    pub fn state(&self) -> Option<&StateSnapshot> {
        self.base.as_ref()
    }

    /// The head as this writer knows it: the one it read when it was opened, then its own last commit.
    pub fn head(&self) -> &KnownHead {
        &self.head
    }

    /// The thread.
    pub fn thread(&self) -> &ThreadId {
        &self.thread
    }

    /// The source of the ids of its tasks and checkpoints.
    pub fn ids(&self) -> &IdSource {
        self.accessor.ids()
    }

    /// Creates a write. See [`StateAccessor::write`].
    ///
    /// # Errors
    /// As there.
    pub fn write(&self, channel: &str, value: Json, overwrite: bool) -> Result<Write> {
        self.accessor.write(channel, value, overwrite)
    }

    /// Starts an attempt at a task. `index` is its place among the tasks of the superstep: writes are applied in this
    /// order, whatever the order in which tasks finish.
    pub fn start_task(&self, node: &NodeName, index: u32) -> Task {
        Task { id: self.accessor.ids().task(), node: node.clone(), index }
    }

    /// Adds the writes of a finished task.
    ///
    /// # Errors
    /// The saver's; the task then does not count as finished.
    pub async fn finish_task(
        &mut self,
        task: Task,
        writes: Vec<Write>,
        durability: Durability,
    ) -> Result<()> {
        let row = TaskWrites { task: task.id, node: task.node, index: task.index, writes };
        let durable = durability == Durability::Now && self.put(&row).await?;
        self.finished.push((row, durable));
        Ok(())
    }

    /// Records that a task failed, on the checkpoint that it ran from. It has no other writes.
    ///
    /// # Errors
    /// The saver's.
    pub async fn fail_task(&mut self, task: Task, error: &str) -> Result<()> {
        let value = ChannelValue::from_json(&Json::from(error))?;
        let writes = vec![Write { channel: ERROR_CHANNEL.into(), value, overwrite: false }];
        self.put(&TaskWrites { task: task.id, node: task.node, index: task.index, writes }).await?;
        Ok(())
    }

    /// The tasks of the current superstep that finished before a crash: their rows are stored and no child has applied
    /// them. A resuming run passes each to [`Self::adopt`] instead of repeating the task.
    ///
    /// One for each place: a process that stood still may store the row of its attempt after another one has repeated
    /// the task and died.
    pub fn recovered(&self) -> Vec<&TaskWrites> {
        let Some(base) = self.base.as_ref().filter(|base| Some(base.key.id) == self.head.id()) else {
            return Vec::new();
        };
        let planned = |row: &&TaskWrites| base.next.get(row.index as usize) == Some(&row.node);
        let finished = |row: &&TaskWrites| !row.writes.iter().any(Write::is_special);
        let mut places = BTreeSet::new();
        base.writes.iter().filter(planned).filter(finished).filter(|row| places.insert(row.index)).collect()
    }

    /// Counts a recovered task as finished in this superstep.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if there is no such task to recover.
    pub fn adopt(&mut self, task: TaskId) -> Result<()> {
        let row = self.recovered().into_iter().find(|row| row.task == task).cloned();
        let row = row.ok_or_else(|| {
            Error::InvalidInput(format!("thread {} has no finished task {task} to recover", self.thread))
        })?;
        self.finished.push((row, true));
        Ok(())
    }

    /// Lets the checkpoint of the next commit begin with these rows, which are stored in the same change: those of
    /// tasks that had finished before it and that are still its next, so that they are not run again, or what belongs
    /// to it otherwise. See [`StepCommit::pending`](crate::saver::StepCommit::pending).
    pub fn begin_with(&mut self, rows: impl IntoIterator<Item = TaskWrites>) {
        self.pending.extend(rows);
    }

    /// Commits the superstep: applies the writes of its finished tasks, and stores writes, checkpoint and the rows that
    /// it [begins with](Self::begin_with) in one change. Returns the new state.
    ///
    /// # Errors
    /// [`Error::InvalidUpdate`] if the writes cannot be applied together, [`Error::Conflict`] if another writer moved
    /// the head, and the saver's. After an error the superstep is not committed and its tasks still count as finished.
    pub async fn commit(
        &mut self,
        source: Source,
        next: Vec<NodeName>,
        extra: impl Into<Extra>,
    ) -> Result<&StateSnapshot> {
        self.settled()?;
        self.finished.sort_by_key(|(row, _)| row.index);
        let step = Step { source, next, extra: extra.into() };
        let plan =
            plan(&self.accessor, &self.thread, self.base.as_ref(), self.head.id(), &self.finished, step)?;
        let mut plan = plan.with_pending(self.pending.clone());
        plan.commit.flush = self.flush;
        self.unsettled = true;
        self.unflushed = true;
        let committed = self.accessor.commit_known(&mut self.head, plan).await;
        self.unsettled = matches!(committed, Err(Error::InDoubt { .. }));
        let state = committed?;
        self.unflushed = self.flush == Flush::WithNext;
        self.finished.clear();
        self.pending.clear();
        Ok(self.base.insert(state))
    }

    /// Drops the finished tasks of the current superstep, and the rows that the next checkpoint would begin with, for a
    /// run that continues differently.
    pub fn discard(&mut self) {
        self.finished.clear();
        self.pending.clear();
    }

    /// Stores a row under the base; `false` if there is no base, so that the row waits for the commit.
    async fn put(&mut self, row: &TaskWrites) -> Result<bool> {
        self.settled()?;
        let Some(key) = self.base.as_ref().map(|base| base.key.clone()) else { return Ok(false) };
        self.unsettled = true;
        let stored = self.accessor.saver().put_writes(&key, row).await;
        self.unsettled = matches!(stored, Err(Error::InDoubt { .. }));
        stored.map(|()| true)
    }

    fn settled(&self) -> Result<()> {
        if self.unsettled {
            return Err(Error::InDoubt {
                saver: self.accessor.saver().capabilities().name,
                reason:
                    "an earlier write of this step writer was dropped before its outcome was known; open the \
                         writer again"
                        .to_owned(),
            });
        }
        Ok(())
    }
}

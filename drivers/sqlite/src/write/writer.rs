//! The writer: executes commands, as many as possible in one transaction. The module `turn` decides who runs it.
//!
//! Commands queued before the last one has been executed are committed together, with one flush. A refused command has
//! changed nothing and does not affect the others. One that fails after it has changed something rolls the transaction
//! back, and so does SQLite after some errors, such as a page that cannot be read; the others are executed again without
//! it. That is rare, and savepoints would cost every command copies of pages.
//!
//! A transaction waits for the disk (`synchronous=FULL`) unless all of it may reach the disk later (`NORMAL`). Both
//! append to the same log, and a flush covers the whole log, so the next transaction that waits flushes the earlier
//! ones too. A transaction that changes nothing would flush nothing; it writes a page if a caller waits for something
//! unflushed.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use threadkeep::id::{CheckpointId, Namespace, ThreadId};
use threadkeep::saver::Flush;
use threadkeep::{Error, Result};
use tokio::sync::{mpsc, oneshot};

use crate::care::space::{self, FileSize, Vacuum};
use crate::care::train::Trainer;
use crate::config::Synchronous;
use crate::error::{FULL, POISONED, in_doubt, unavailable};
use crate::sql::Db;
use crate::stats::Counters;
use crate::write::commit::{Work, WriterState};
use crate::write::doubt::Doubt;
use crate::write::log::LogBound;
use crate::write::turn::{Command, Message};

/// The most commands in one transaction, so that the first one does not wait long for its flush.
const BATCH: usize = 256;
/// Consecutive transactions that may be left unflushed, so that the log does not grow for ever.
const LEFT: u32 = 256;

const BEGIN: &str = "BEGIN IMMEDIATE";
const ROLLBACK: &str = "ROLLBACK";

/// The result of a command, and where it goes.
pub(crate) type Answer = (oneshot::Sender<Result<()>>, Result<()>);

/// The writer of a store.
pub(crate) struct Writer {
    store: WriterState,
    counters: Arc<Counters>,
    doubt: Arc<Doubt>,
    trainer: Trainer,
    /// What a flushed transaction waits for.
    synchronous: Synchronous,
    /// The current flush setting; none if unknown.
    flush: Option<Flush>,
    /// Transactions since the last flushed one.
    left: u32,
    /// Whether the log may hold something that is not on disk.
    unflushed: bool,
    log: LogBound,
    /// A commit failed: what reached the disk is unknown.
    poisoned: bool,
    /// The data version after the last commit, or in the last transaction if that was not committed; none if unknown.
    seen: Option<u32>,
    /// The checkpoint that the last transaction committed, if that was all it did.
    last: Option<(ThreadId, Namespace, CheckpointId)>,
}

impl Writer {
    pub(crate) fn new(
        db: Db,
        synchronous: Synchronous,
        trainer: Trainer,
        (pieces, log): ((usize, Arc<AtomicBool>), LogBound),
        (counters, doubt): (Arc<Counters>, Arc<Doubt>),
    ) -> Self {
        Self {
            store: WriterState::new(db, pieces, counters.clone()),
            counters,
            doubt,
            trainer,
            synchronous,
            flush: None,
            left: 0,
            unflushed: true,
            log,
            poisoned: false,
            seen: None,
            last: None,
        }
    }

    /// Moves the log into the database file and closes it.
    pub(crate) fn close(self) {
        // First, so that nobody else has the file open.
        drop(self.trainer);
        if !self.poisoned
            && let Err(error) = self.store.db.checkpoint_wal()
        {
            tracing::warn!(%error, "the write-ahead log was not emptied; the next opening does it");
        }
    }

    /// Executes `first` and whatever else is queued and can share its transaction. Returns the answers, to be sent when
    /// the writer is free again, and the message that ended the batch, if any.
    pub(crate) fn batch(
        &mut self,
        first: Command,
        queue: &mut mpsc::Receiver<Message>,
    ) -> (Vec<Answer>, Option<Message>) {
        let flush = self.flush_of(&first.work);
        let mut batch = Batch::new(flush, first.work);
        batch.queue = Some(queue);
        batch.replies.push(first.reply);
        let begun = if self.poisoned { Err(unavailable(POISONED)) } else { self.begin(flush) };
        if begun.is_err() {
            // They all fail at once: none has to wait for the same lock again.
            while batch.takes_one_more() {}
        }
        let results = self.carry_out(&mut batch, begun);
        (batch.replies.into_iter().zip(results).collect(), batch.behind)
    }

    /// Executes one command without waiting for other writers of the file. Returns the command if one of them holds the
    /// lock.
    pub(crate) fn alone(&mut self, work: Work) -> Result<Result<()>, Work> {
        let flush = self.flush_of(&work);
        let begun = if self.poisoned { Err(unavailable(POISONED)) } else { self.begin_at_once(flush) };
        let begun = match begun {
            Ok(false) => return Err(work),
            begun => begun.map(|_| ()),
        };
        let results = self.carry_out(&mut Batch::new(flush, work), begun);
        if matches!(results[..], [Ok(())]) {
            self.counters.in_place.add(1);
        }
        Ok(results.into_iter().next().unwrap_or(Ok(())))
    }

    /// Whether `work` commits onto the checkpoint that the last transaction committed, and nothing else. Then its caller
    /// knew the outcome of that transaction: it is alone, and nothing can share its flush.
    pub(crate) fn goes_on(&self, work: &Work) -> bool {
        let (Work::Commit(step), Some((thread, namespace, head))) = (work, &self.last) else { return false };
        step.expected_head == Some(*head) && step.thread == *thread && step.namespace == *namespace
    }

    fn flush_of(&self, work: &Work) -> Flush {
        if self.left < LEFT { work.flush() } else { Flush::Now }
    }

    /// Executes the commands of a batch, if its transaction could be begun. Returns each command's result.
    fn carry_out(&mut self, batch: &mut Batch<'_>, begun: Result<()>) -> Vec<Result<()>> {
        self.last = None;
        let outcome = begun.and_then(|()| self.transaction(batch));
        self.counters.commands.add(batch.commands.len() as u64);
        match outcome {
            Ok(mut results) => {
                self.trainer.look(&self.store.db, self.counters.bytes_stored.get());
                if let ([(Work::Commit(step), _)], [Ok(())]) = (&batch.commands[..], &results[..]) {
                    self.last = Some((step.thread.clone(), step.namespace.clone(), step.checkpoint.id));
                }
                for ((work, _), result) in batch.commands.iter().zip(&mut results) {
                    if let Err(error) = result {
                        *error = self.doubt.error(work, error.clone());
                    }
                }
                results
            }
            Err(error) => {
                tracing::warn!(%error, commands = batch.commands.len(), "a transaction failed");
                let errors = batch.commands.iter().map(|(work, failed)| {
                    // One that failed on its own was not part of what failed then.
                    self.doubt.error(work, failed.clone().unwrap_or_else(|| error.clone()))
                });
                errors.map(Err).collect()
            }
        }
    }

    /// Returns free space.
    pub(crate) fn vacuum(&mut self, vacuum: Vacuum) -> Result<FileSize> {
        if self.poisoned {
            return Err(unavailable(POISONED));
        }
        self.last = None;
        match vacuum {
            Vacuum::Pages(pages) => {
                self.begin(Flush::Now)?;
                if let Err(error) = space::give_back(&self.store.db, pages) {
                    self.roll_back();
                    return Err(nothing_kept(error));
                }
                self.commit()?;
            }
            Vacuum::Fully => {
                self.set_flush(Flush::Now)?;
                self.store.db.in_place()?;
                if let Err(error) = space::write_anew(&self.store.db) {
                    if matches!(error, Error::InDoubt { .. }) {
                        self.poisoned = true;
                        tracing::error!(%error, "a vacuum failed; the store must be reopened");
                    }
                    return Err(error);
                }
            }
        }
        FileSize::of(&self.store.db)
    }

    /// Takes the write lock for a transaction that is flushed now, or may be later.
    fn begin(&mut self, flush: Flush) -> Result<()> {
        self.set_flush(flush)?;
        let begun = self.store.db.when_free(BEGIN);
        self.begun(begun)
    }

    /// [`Self::begin`], unless another connection holds the lock. Returns whether it began.
    fn begin_at_once(&mut self, flush: Flush) -> Result<bool> {
        self.set_flush(flush)?;
        match self.store.db.at_once(BEGIN) {
            Ok(false) => Ok(false),
            begun => self.begun(begun.map(|_| ())).map(|()| true),
        }
    }

    /// Looks, in the transaction that has just begun, whether others have written.
    fn begun(&mut self, begun: Result<()>) -> Result<()> {
        let seen = begun.and_then(|()| self.store.db.data_version()).inspect_err(|_| self.roll_back());
        let seen = Some(seen?);
        if self.seen != seen {
            self.store.others_wrote();
            self.seen = seen;
            // The other connection may have left its commit unflushed.
            self.unflushed = true;
        }
        Ok(())
    }

    /// Sets when later transactions are flushed.
    fn set_flush(&mut self, flush: Flush) -> Result<()> {
        if self.flush != Some(flush) {
            let level = if flush == Flush::Now { self.synchronous } else { Synchronous::Normal };
            self.flush = None;
            self.store.db.wait_for(level, flush == Flush::Now)?;
            self.flush = Some(flush);
        }
        Ok(())
    }

    /// Executes the commands in the open transaction and commits it. Returns each command's result, or the error that
    /// affected all of them.
    fn transaction(&mut self, batch: &mut Batch<'_>) -> Result<Vec<Result<()>>> {
        let rows = self.store.db.rows();
        let (results, mut changed) = loop {
            match self.attempt(batch) {
                Attempt::Done { results, changed } => break (results, changed),
                Attempt::Without(place, error) => {
                    self.roll_back();
                    batch.commands[place].1 = Some(error);
                    if self.poisoned {
                        return Err(unavailable(POISONED));
                    }
                    self.begin(batch.flush)?;
                }
            }
        };
        let now = batch.flush == Flush::Now;
        if now && self.unflushed && !changed && results.iter().any(Result::is_ok) {
            if let Err(error) = self.store.db.touch() {
                self.roll_back();
                return Err(nothing_kept(error));
            }
            changed = true;
        }
        self.commit().inspect_err(|error| {
            if matches!(error, Error::InDoubt { .. }) {
                let tried = batch.commands.iter().filter(|(_, failed)| failed.is_none());
                self.doubt.add(tried.map(|(work, _)| work));
            }
        })?;
        if changed {
            self.doubt.clear();
        }
        self.counters.transaction(batch.commands.len(), self.store.db.rows() - rows);
        if now {
            self.left = 0;
            self.unflushed &= !changed;
            self.counters.flushes.add(u64::from(changed && self.synchronous == Synchronous::Full));
            self.bound_log();
        } else {
            self.left += 1;
            self.unflushed |= changed;
        }
        Ok(results)
    }

    /// Empties the log if it is too large. What was committed is safe whatever comes of this.
    fn bound_log(&mut self) {
        if let Err(error) = self.log.keep(&self.store.db) {
            self.poisoned |= matches!(error, Error::InDoubt { .. });
            tracing::error!(%error, "the write-ahead log was not emptied");
        }
    }

    /// Executes the commands that have not failed yet, in the open transaction. Commands that arrive meanwhile join it:
    /// with many writers that is most of them, and each flush serves more.
    fn attempt(&mut self, batch: &mut Batch<'_>) -> Attempt {
        let mut results = Vec::with_capacity(batch.commands.len());
        let mut changed = false;
        while results.len() < batch.commands.len() || batch.takes_one_more() {
            let place = results.len();
            let before = self.store.db.rows_written();
            let result = match &batch.commands[place] {
                (_, Some(failed)) => Err(failed.clone()),
                (work, None) => self.store.apply(work),
            };
            let wrote = self.store.db.rows_written() != before;
            match result {
                // Some errors roll the whole transaction back.
                Err(error) if wrote || self.store.db.is_autocommit() => {
                    return Attempt::Without(place, error);
                }
                result => results.push(result),
            }
            changed |= wrote;
        }
        Attempt::Done { results, changed }
    }

    /// Commits the open transaction.
    fn commit(&mut self) -> Result<()> {
        if let Err(gone) = self.store.db.in_place() {
            self.roll_back();
            return Err(gone);
        }
        let Err(failed) = self.store.db.commit() else {
            // Commits of other connections do not change it before something is read again.
            self.seen = self.store.db.data_version().ok();
            return Ok(());
        };
        self.roll_back();
        // A full disk is no sign of damage: the next commit overwrites the remains of this one. After any other failure
        // the file system may have dropped data that it had accepted.
        if failed.disk_full {
            return Err(in_doubt(format!("{}; {FULL}", failed.reason)));
        }
        self.poisoned = true;
        tracing::error!(reason = failed.reason, "a commit failed; the store must be reopened");
        Err(in_doubt(failed.reason))
    }

    /// Rolls the open transaction back and forgets everything remembered from it.
    fn roll_back(&mut self) {
        self.store.forget();
        if !self.store.db.is_autocommit()
            && let Err(error) = self.store.db.execute(ROLLBACK, [])
        {
            // The connection cannot be trusted to begin another transaction.
            self.poisoned = true;
            tracing::error!(%error, "a rollback failed; the store must be reopened");
        }
    }
}

/// The commands that share a transaction.
struct Batch<'q> {
    /// What all of them wait for.
    flush: Flush,
    /// Each with its error if it failed and what it had changed was rolled back.
    commands: Vec<(Work, Option<Error>)>,
    /// Where their results go; none for a command that is alone.
    replies: Vec<oneshot::Sender<Result<()>>>,
    /// Where more come from.
    queue: Option<&'q mut mpsc::Receiver<Message>>,
    /// The message after them, which cannot join.
    behind: Option<Message>,
}

impl Batch<'_> {
    fn new(flush: Flush, first: Work) -> Self {
        Self { flush, commands: vec![(first, None)], replies: Vec::new(), queue: None, behind: None }
    }

    /// Takes the next command from the queue, if there is one that can join. The flush setting of a transaction is
    /// fixed when it begins, so an unflushed one cannot take a command that needs a flush.
    fn takes_one_more(&mut self) -> bool {
        let Some(queue) = &mut self.queue else { return false };
        if self.behind.is_some() || self.commands.len() >= BATCH {
            return false;
        }
        match queue.try_recv() {
            Ok(Message::Work(Command { work, reply }))
                if self.flush == Flush::Now || work.flush() == self.flush =>
            {
                self.commands.push((work, None));
                self.replies.push(reply);
                true
            }
            other => {
                self.behind = other.ok();
                false
            }
        }
    }
}

/// The outcome of an attempt at the commands of a transaction.
enum Attempt {
    /// Each command was executed, or refused without effect.
    Done { results: Vec<Result<()>>, changed: bool },
    /// The command at this index failed half way, or its error rolled the transaction back.
    Without(usize, Error),
}

/// The error for every command of a transaction that was rolled back because of `error`.
fn nothing_kept(error: Error) -> Error {
    match error {
        Error::Unavailable { .. } | Error::Corrupt { .. } => error,
        other => unavailable(other.to_string()),
    }
}

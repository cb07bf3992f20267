//! The writer: one thread per open store that executes the queued commands, as many as possible in one transaction.
//!
//! Commands queued before the last one has been executed are committed together, with one flush. A refused command has
//! changed nothing and does not affect the others. One that fails after it has changed something rolls the transaction
//! back; the others are executed again without it. That is rare, and savepoints would cost every command copies of
//! pages.
//!
//! A transaction waits for the disk (`synchronous=FULL`) unless all of it may reach the disk later (`NORMAL`). Both
//! append to the same log, and a flush covers the whole log, so the next transaction that waits flushes the earlier
//! ones too. A transaction that changes nothing would flush nothing; it writes a page if a caller waits for something
//! unflushed.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use threadkeep::saver::Flush;
use threadkeep::{Error, Result};
use tokio::sync::{mpsc, oneshot};

use crate::care::space::{self, FileSize, Vacuum};
use crate::care::train::Trainer;
use crate::config::{Options, Synchronous};
use crate::error::{CANNOT_START, FULL, POISONED, in_doubt, unavailable};
use crate::sql::Db;
use crate::stats::Counters;
use crate::write::commit::{Work, WriterState};
use crate::write::doubt::Doubt;

/// Commands that may wait; further callers wait for a place in the queue.
const QUEUE: usize = 1024;
/// The most commands in one transaction, so that the first one does not wait long for its flush.
const BATCH: usize = 256;
/// Consecutive transactions that may be left unflushed, so that the log does not grow for ever.
const LEFT: u32 = 256;

const BEGIN: &str = "BEGIN IMMEDIATE";
const ROLLBACK: &str = "ROLLBACK";

/// A request to the writer.
pub(crate) enum Message {
    /// Execute a command, then answer.
    Work(Command),
    /// Return free space, then answer what is left.
    Vacuum(Vacuum, oneshot::Sender<Result<FileSize>>),
    /// Finish the queue, close the database, and answer.
    Close(oneshot::Sender<()>),
}

/// A command and its reply channel.
pub(crate) struct Command {
    pub(crate) work: Work,
    pub(crate) reply: oneshot::Sender<Result<()>>,
}

/// Starts the thread that writes through `db`.
///
/// # Errors
/// [`Error::Unavailable`] if the system cannot start another thread.
pub(crate) fn start(
    db: Db,
    (path, options): (&Path, &Options),
    (counters, doubt): (Arc<Counters>, Arc<Doubt>),
) -> Result<(mpsc::Sender<Message>, JoinHandle<()>)> {
    let (sender, queue) = mpsc::channel(QUEUE);
    let trainer = Trainer::new(path.to_owned(), options.clone(), sender.downgrade());
    let store = WriterState::new(db, counters.clone());
    let writer = Writer {
        store,
        counters,
        doubt,
        queue,
        trainer,
        synchronous: options.synchronous,
        flush: None,
        left: 0,
        unflushed: true,
        poisoned: false,
        seen: None,
    };
    let thread = std::thread::Builder::new()
        .name("threadkeep-sqlite".to_owned())
        .spawn(move || writer.run())
        .map_err(|error| unavailable(format!("{CANNOT_START}: {error}")))?;
    Ok((sender, thread))
}

struct Writer {
    store: WriterState,
    counters: Arc<Counters>,
    doubt: Arc<Doubt>,
    queue: mpsc::Receiver<Message>,
    trainer: Trainer,
    /// What a flushed transaction waits for.
    synchronous: Synchronous,
    /// The current flush setting; none if unknown.
    flush: Option<Flush>,
    /// Transactions since the last flushed one.
    left: u32,
    /// Whether the log may hold something that is not on disk.
    unflushed: bool,
    /// A commit failed: what reached the disk is unknown.
    poisoned: bool,
    /// The data version at the last transaction.
    seen: Option<i64>,
}

impl Writer {
    /// Works until it is closed or all senders are gone.
    fn run(mut self) {
        let mut next = None;
        let closing = loop {
            match next.take().or_else(|| self.queue.blocking_recv()) {
                Some(Message::Work(first)) => next = self.batch(first),
                // The caller may have stopped waiting.
                Some(Message::Vacuum(vacuum, reply)) => drop(reply.send(self.vacuum(vacuum))),
                Some(Message::Close(reply)) => break Some(reply),
                None => break None,
            }
        };
        if !self.poisoned
            && let Err(error) = self.store.db.checkpoint_wal()
        {
            tracing::warn!(%error, "the write-ahead log was not emptied; the next opening does it");
        }
        drop(self.store);
        if let Some(reply) = closing {
            // The caller may have stopped waiting.
            let _ = reply.send(());
        }
    }

    /// Executes `first` and whatever else is queued and can share its transaction. Returns the message that ended the
    /// batch, if any.
    fn batch(&mut self, first: Command) -> Option<Message> {
        let flush = if self.left < LEFT { first.work.flush() } else { Flush::Now };
        let mut batch = Batch { flush, commands: vec![(first, None)], behind: None };
        let begun = if self.poisoned { Err(unavailable(POISONED)) } else { self.begin(flush) };
        if begun.is_err() {
            // They all fail at once: none has to wait for the same lock again.
            while batch.takes_one_more(&mut self.queue) {}
        }
        let outcome = begun.and_then(|()| self.transaction(&mut batch));
        self.counters.commands.add(batch.commands.len() as u64);
        if outcome.is_ok() {
            self.trainer.look(&self.store.db, self.counters.bytes_stored.get());
        }
        match outcome {
            Ok(results) => {
                for ((command, _), result) in batch.commands.into_iter().zip(results) {
                    let result = result.map_err(|error| self.doubt.error(&command.work, error));
                    // The caller may have stopped waiting.
                    let _ = command.reply.send(result);
                }
            }
            Err(error) => {
                tracing::warn!(%error, commands = batch.commands.len(), "a transaction failed");
                for (command, _) in batch.commands {
                    let error = self.doubt.error(&command.work, error.clone());
                    let _ = command.reply.send(Err(error));
                }
            }
        }
        batch.behind
    }

    /// Returns free space.
    fn vacuum(&mut self, vacuum: Vacuum) -> Result<FileSize> {
        if self.poisoned {
            return Err(unavailable(POISONED));
        }
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
                space::write_anew(&self.store.db)?;
            }
        }
        FileSize::of(&self.store.db)
    }

    /// Takes the write lock for a transaction that is flushed now, or may be later.
    fn begin(&mut self, flush: Flush) -> Result<()> {
        self.set_flush(flush)?;
        let db = &self.store.db;
        let seen = db.execute(BEGIN, []).and_then(|_| db.data_version()).inspect_err(|_| self.roll_back());
        let seen = Some(seen?);
        if self.seen != seen {
            self.store.forget();
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
    fn transaction(&mut self, batch: &mut Batch) -> Result<Vec<Result<()>>> {
        let (results, mut changed) = loop {
            match self.attempt(batch) {
                Attempt::Done { results, changed } => break (results, changed),
                Attempt::Lost(error) => {
                    self.roll_back();
                    return Err(nothing_kept(error));
                }
                Attempt::Without(place, error) => {
                    self.roll_back();
                    if self.poisoned {
                        return Err(nothing_kept(error));
                    }
                    batch.commands[place].1 = Some(error);
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
                self.doubt.add(batch.commands.iter().map(|(command, _)| &command.work));
            }
        })?;
        if changed {
            self.doubt.clear();
        }
        self.counters.transaction(batch.commands.len());
        if now {
            self.left = 0;
            self.unflushed &= !changed;
            self.counters.flushes.add(u64::from(changed && self.synchronous == Synchronous::Full));
        } else {
            self.left += 1;
            self.unflushed |= changed;
        }
        Ok(results)
    }

    /// Executes the commands that have not failed yet, in the open transaction. Commands that arrive meanwhile join it:
    /// with many writers that is most of them, and each flush serves more.
    fn attempt(&mut self, batch: &mut Batch) -> Attempt {
        let mut results = Vec::with_capacity(batch.commands.len());
        let mut changed = false;
        while results.len() < batch.commands.len() || batch.takes_one_more(&mut self.queue) {
            let place = results.len();
            let before = self.store.db.rows_written();
            let result = match &batch.commands[place] {
                (_, Some(failed)) => Err(failed.clone()),
                (command, None) => self.store.apply(&command.work),
            };
            let wrote = self.store.db.rows_written() != before;
            match result {
                // Some errors roll the whole transaction back.
                Err(error) if self.store.db.is_autocommit() => return Attempt::Lost(error),
                Err(error) if wrote => return Attempt::Without(place, error),
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
        let Err(failed) = self.store.db.commit() else { return Ok(()) };
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
struct Batch {
    /// What all of them wait for.
    flush: Flush,
    /// Each with its error if it failed half way.
    commands: Vec<(Command, Option<Error>)>,
    /// The message after them, which cannot join.
    behind: Option<Message>,
}

impl Batch {
    /// Takes the next command from the queue, if there is one that can join. The flush setting of a transaction is
    /// fixed when it begins, so an unflushed one cannot take a command that needs a flush.
    fn takes_one_more(&mut self, queue: &mut mpsc::Receiver<Message>) -> bool {
        if self.behind.is_some() || self.commands.len() >= BATCH {
            return false;
        }
        match queue.try_recv() {
            Ok(Message::Work(command)) if self.flush == Flush::Now || command.work.flush() == self.flush => {
                self.commands.push((command, None));
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
    /// The command at this index failed half way.
    Without(usize, Error),
    /// The transaction was rolled back.
    Lost(Error),
}

/// The error for every command of a transaction that was rolled back because of `error`.
fn nothing_kept(error: Error) -> Error {
    match error {
        Error::Unavailable { .. } | Error::Corrupt { .. } => error,
        other => unavailable(other.to_string()),
    }
}

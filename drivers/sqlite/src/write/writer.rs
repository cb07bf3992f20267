//! The writer: one thread per open store that carries out what is queued, as one transaction.
//!
//! What is queued until the last command was carried out is committed together, with one flush. A command that is refused has
//! changed nothing, and leaves the others alone. One that fails after it has changed something takes the transaction with it;
//! the others are carried out again without it. That is rare, and savepoints for it would cost every command copies of pages.
//!
//! A transaction waits for the disk (`synchronous=FULL`) unless all of it may be on the disk later (`NORMAL`). Both append to
//! the same log, and a flush is of all of the log, so the next transaction that waits takes the earlier ones with it. A
//! transaction that changes nothing would flush nothing; it writes a page if somebody waits for what is not flushed.

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
use crate::write::commit::{Store, Work};
use crate::write::doubt::Doubt;

/// Commands that may wait; further callers wait for their place.
const QUEUE: usize = 1024;
/// Commands that one transaction carries out at most, so that nobody waits long for the first flush.
const BATCH: usize = 256;
/// Transactions in a row that are left to be flushed later, so that the log does not grow for ever.
const LEFT: u32 = 256;

const BEGIN: &str = "BEGIN IMMEDIATE";
const ROLLBACK: &str = "ROLLBACK";

/// What the writer is asked to do.
pub(crate) enum Message {
    /// Carry out a command, then answer.
    Work(Command),
    /// Give back free room, then answer what is left of it.
    Vacuum(Vacuum, oneshot::Sender<Result<FileSize>>),
    /// Do what is queued before this, close the database, and answer.
    Close(oneshot::Sender<()>),
}

/// A command and who waits for it.
pub(crate) struct Command {
    pub(crate) work: Work,
    pub(crate) reply: oneshot::Sender<Result<()>>,
}

/// Starts the thread that writes through `db`.
///
/// # Errors
/// [`Error::Unavailable`] if the system starts no more threads.
pub(crate) fn start(
    db: Db,
    (path, options): (&Path, &Options),
    (counters, doubt): (Arc<Counters>, Arc<Doubt>),
) -> Result<(mpsc::Sender<Message>, JoinHandle<()>)> {
    let (sender, queue) = mpsc::channel(QUEUE);
    let trainer = Trainer::new(path.to_owned(), options.clone(), sender.downgrade());
    let store = Store::new(db, counters.clone());
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
    store: Store,
    counters: Arc<Counters>,
    doubt: Arc<Doubt>,
    queue: mpsc::Receiver<Message>,
    trainer: Trainer,
    /// What a transaction waits for that is to be flushed.
    synchronous: Synchronous,
    /// When transactions are flushed now; none if that is not known.
    flush: Option<Flush>,
    /// Transactions since the last one that was flushed.
    left: u32,
    /// Whether something may be in the log that is not on the disk.
    unflushed: bool,
    /// A commit failed: what reached the disk is unknown.
    poisoned: bool,
    /// The data version at the last transaction.
    seen: Option<i64>,
}

impl Writer {
    /// Works until it is told to close, or nobody can send any more.
    fn run(mut self) {
        let mut next = None;
        let closing = loop {
            match next.take().or_else(|| self.queue.blocking_recv()) {
                Some(Message::Work(first)) => next = self.batch(first),
                // Whoever does not wait any more does not learn it.
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
            // The one who closes may have gone.
            let _ = reply.send(());
        }
    }

    /// Carries out `first` and what else is queued and can share its transaction. Answers the message that ended the row, if
    /// one did.
    fn batch(&mut self, first: Command) -> Option<Message> {
        let flush = if self.left < LEFT { first.work.flush() } else { Flush::Now };
        let mut batch = Batch { flush, commands: vec![(first, None)], behind: None };
        let begun = if self.poisoned { Err(unavailable(POISONED)) } else { self.begin(flush) };
        if begun.is_err() {
            // Nobody has to wait for the same lock once more.
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
                    // Whoever does not wait any more does not learn it.
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

    /// Gives back free room.
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

    /// Takes the write lock for a transaction that is flushed, or may be later.
    fn begin(&mut self, flush: Flush) -> Result<()> {
        self.set_flush(flush)?;
        let db = &self.store.db;
        let seen = db.execute(BEGIN, []).and_then(|_| db.data_version()).inspect_err(|_| self.roll_back());
        let seen = Some(seen?);
        if self.seen != seen {
            self.store.forget();
            self.seen = seen;
            // Whoever wrote may have left it for later.
            self.unflushed = true;
        }
        Ok(())
    }

    /// Says when the transactions from now on are flushed.
    fn set_flush(&mut self, flush: Flush) -> Result<()> {
        if self.flush != Some(flush) {
            let level = if flush == Flush::Now { self.synchronous } else { Synchronous::Normal };
            self.flush = None;
            self.store.db.wait_for(level, flush == Flush::Now)?;
            self.flush = Some(flush);
        }
        Ok(())
    }

    /// Carries out the commands in the open transaction and commits it. Answers each command's result, or the error
    /// that befell all of them.
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

    /// Carries out the commands that have not failed yet, in the open transaction. Whoever comes while others are carried
    /// out takes part: with many writers that is most of them, and each flush is for more.
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
                // Some errors roll the whole transaction back on their own.
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
        // A full disk is no sign of damage: the next commit overwrites what this one left of itself. After any
        // other failure the file system may have dropped what it had taken.
        if failed.disk_full {
            return Err(in_doubt(format!("{}; {FULL}", failed.reason)));
        }
        self.poisoned = true;
        tracing::error!(reason = failed.reason, "a commit failed; the store must be reopened");
        Err(in_doubt(failed.reason))
    }

    /// Gives up the open transaction and everything that may be remembered of it.
    fn roll_back(&mut self) {
        self.store.forget();
        if !self.store.db.is_autocommit()
            && let Err(error) = self.store.db.execute(ROLLBACK, [])
        {
            // The connection cannot be trusted to begin anew.
            self.poisoned = true;
            tracing::error!(%error, "a rollback failed; the store must be reopened");
        }
    }
}

/// The commands that share a transaction.
struct Batch {
    /// What all of them wait for.
    flush: Flush,
    /// With the error of each that failed half way.
    commands: Vec<(Command, Option<Error>)>,
    /// The message behind them, which cannot take part.
    behind: Option<Message>,
}

impl Batch {
    /// Takes the next command from the queue, if one is there that can take part. What a transaction waits for is settled
    /// when it begins, so one that does not wait has no room for whoever needs that.
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

/// How an attempt at the commands of a transaction ended.
enum Attempt {
    /// Each command is whole, or refused and without effect.
    Done { results: Vec<Result<()>>, changed: bool },
    /// The command at this place failed half way.
    Without(usize, Error),
    /// The transaction was rolled back.
    Lost(Error),
}

/// The error for every command of a transaction that was given up because of `error`.
fn nothing_kept(error: Error) -> Error {
    match error {
        Error::Unavailable { .. } | Error::Corrupt { .. } => error,
        other => unavailable(other.to_string()),
    }
}

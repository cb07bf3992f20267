//! The writer: one thread that executes the queued write transactions, as many as possible in one transaction of SQLite.
//!
//! What is queued before the last one has been executed is committed together, with one flush. A failed one is taken
//! back alone: from the second one on that changes something, each has a savepoint.
//!
//! A transaction waits for the disk (`synchronous=FULL`) if one of those in it does ([`Flush`]); the log is one file, so
//! that flush covers all earlier ones. A transaction that changes nothing would flush nothing; it writes a page if a
//! caller waits for something unflushed.
//!
//! Nothing is committed to a file that was removed, renamed or replaced ([`Files`]), until it is put back.
//!
//! After a commit that failed for another reason than a full disk, or a failed rollback, nothing more is written until the
//! database is opened again.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::{AtomicI32, Ordering};

use rusqlite::Connection;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc, oneshot};

use super::{Files, is_full};
use crate::commits::{Commits, Flush};
use crate::error::RecordsError;
use crate::failure::{DatabaseError, SqliteFailure as Failure};

/// Transactions that may wait; further callers wait for a place in the queue.
pub(crate) const QUEUE: usize = 1024;
/// The most in one transaction of SQLite, so that the first one does not wait long for its flush.
const BATCH: usize = 256;

const SAVEPOINT: &str = "SAVEPOINT one";
const RELEASE: &str = "RELEASE one";
const TAKE_BACK: &str = "ROLLBACK TO one; RELEASE one";

/// How the transaction in which some work was done ended.
#[derive(Debug, Clone)]
pub(crate) enum Committed {
    /// It was committed.
    Yes,
    /// It was rolled back.
    No(Failure),
    /// Nobody knows.
    InDoubt(Failure),
}

impl Committed {
    /// The result for a caller whose work succeeded.
    pub(crate) fn result(self) -> Result<(), RecordsError> {
        match self {
            Self::Yes => Ok(()),
            Self::No(failure) => Err(DatabaseError::from(failure).into()),
            Self::InDoubt(failure) => Err(RecordsError::InDoubt { cause: failure.into() }),
        }
    }
}

/// What some work left: whether it failed, and how its caller gets the result once the transaction has ended.
pub(crate) struct Answer {
    pub(crate) failed: bool,
    pub(crate) send: Box<dyn FnOnce(Committed) + Send>,
}

/// Work on the connection, or what to answer if no transaction could begin. Dropped on a closed store.
type Work = Box<dyn FnOnce(Result<&mut Connection, Failure>) -> Answer + Send>;

enum Message {
    Work(Flush, Work),
    /// Finish the queue, close the database, and answer.
    Close(oneshot::Sender<()>),
}

/// A handle on the thread. The thread ends when the last handle is dropped.
#[derive(Debug, Clone)]
pub(crate) struct Writer {
    queue: mpsc::Sender<Message>,
    /// Notified after the thread has taken messages from the queue.
    freed: Arc<Notify>,
    /// With which code the next commit fails; 0 if it does not.
    #[cfg(test)]
    failing: Arc<AtomicI32>,
}

impl Writer {
    /// Starts the thread. A database in memory has no files.
    pub(crate) fn start(
        connection: Connection,
        files: Option<Files>,
        commits: Arc<Commits>,
    ) -> Result<Self, DatabaseError> {
        let (queue, messages) = mpsc::channel(QUEUE);
        let freed = Arc::<Notify>::default();
        #[cfg(test)]
        let failing = Arc::<AtomicI32>::default();
        let thread = Thread {
            connection,
            files,
            messages,
            freed: freed.clone(),
            commits,
            flush: None,
            unflushed: true,
            poisoned: false,
            #[cfg(test)]
            failing: failing.clone(),
        };
        std::thread::Builder::new().name("threadkeep-records".to_owned()).spawn(move || thread.run())?;
        Ok(Self {
            queue,
            freed,
            #[cfg(test)]
            failing,
        })
    }

    /// Makes the next commit fail with this code.
    #[cfg(test)]
    pub(crate) fn fail_commit(&self, code: i32) {
        self.failing.store(code, Ordering::SeqCst);
    }

    /// Queues `work`. It is done even if the caller stops waiting for its answer.
    pub(crate) async fn send(
        &self,
        flush: Flush,
        work: impl FnOnce(Result<&mut Connection, Failure>) -> Answer + Send + 'static,
    ) -> Result<(), DatabaseError> {
        if self.put(Message::Work(flush, Box::new(work))).await { Ok(()) } else { Err(DatabaseError::Closed) }
    }

    /// Puts a message into the queue, or waits until there is room. Returns whether the thread still takes messages.
    ///
    /// A caller that waits has no place yet, as it may in [`mpsc::Sender::send`]: if nobody polls it any more, its place
    /// is lost to the others.
    async fn put(&self, mut message: Message) -> bool {
        loop {
            // Before the look at the queue, so that no room that is made after it is missed.
            let freed = self.freed.notified();
            message = match self.queue.try_send(message) {
                Ok(()) => return true,
                Err(TrySendError::Closed(_)) => return false,
                Err(TrySendError::Full(waiting)) => waiting,
            };
            tokio::select! {
                () = freed => {}
                () = self.queue.closed() => {}
            }
        }
    }

    /// How much waits.
    #[cfg(test)]
    pub(crate) fn queued(&self) -> usize {
        self.queue.max_capacity() - self.queue.capacity()
    }

    /// Finishes the queue and closes the database, which empties the log.
    pub(crate) async fn close(&self) {
        let (reply, closed) = oneshot::channel();
        if self.put(Message::Close(reply)).await {
            // An error means that the thread has ended for another reason.
            let _ = closed.await;
        }
    }
}

struct Thread {
    connection: Connection,
    files: Option<Files>,
    messages: mpsc::Receiver<Message>,
    freed: Arc<Notify>,
    commits: Arc<Commits>,
    /// What the connection is set to wait for; none if unknown.
    flush: Option<Flush>,
    /// Whether the log may hold something that is not on disk.
    unflushed: bool,
    /// A commit or a rollback failed: what reached the disk is unknown, so nothing more is written.
    poisoned: bool,
    #[cfg(test)]
    failing: Arc<AtomicI32>,
}

/// The work that shares a transaction.
struct Batch {
    flush: Flush,
    waiting: VecDeque<Work>,
    taken: usize,
    /// The message after it, which cannot join.
    behind: Option<Message>,
}

impl Batch {
    /// Takes what is queued. What a transaction waits for is settled when it begins, so one that does not wait cannot
    /// take work that needs a flush from then on.
    fn take(&mut self, messages: &mut mpsc::Receiver<Message>, begun: bool) {
        while self.behind.is_none() && self.taken < BATCH {
            match messages.try_recv() {
                Ok(Message::Work(flush, work))
                    if !begun || self.flush == Flush::Now || flush == self.flush =>
                {
                    if flush == Flush::Now {
                        self.flush = Flush::Now;
                    }
                    self.waiting.push_back(work);
                    self.taken += 1;
                }
                Ok(other) => self.behind = Some(other),
                Err(_) => break,
            }
        }
    }
}

impl Thread {
    fn run(mut self) {
        let mut next = None;
        let closing = loop {
            match next.take().or_else(|| self.messages.blocking_recv()) {
                Some(Message::Work(flush, work)) => {
                    next = self.batch(flush, work);
                    self.freed.notify_waiters();
                }
                Some(Message::Close(reply)) => break Some(reply),
                None => break None,
            }
        };
        drop(self.connection);
        if let Some(reply) = closing {
            // The caller may have stopped waiting.
            let _ = reply.send(());
        }
    }

    /// Does `first` and whatever else is queued and can share its transaction. Returns the message after that, if any.
    fn batch(&mut self, flush: Flush, first: Work) -> Option<Message> {
        let mut batch = Batch { flush, waiting: [first].into(), taken: 1, behind: None };
        batch.take(&mut self.messages, false);
        let mut done = Vec::with_capacity(batch.waiting.len());
        match self.attempt(&mut batch, &mut done) {
            Ok(changed) => {
                let committed = self.commit(changed, batch.flush);
                for answer in done {
                    (answer.send)(committed.clone());
                }
            }
            Err(failure) => {
                tracing::warn!(%failure, waiting = batch.taken, "the records' transaction failed");
                self.roll_back();
                for answer in done {
                    (answer.send)(Committed::No(failure.clone()));
                }
                for work in batch.waiting {
                    (work(Err(failure.clone())).send)(Committed::No(failure.clone()));
                }
            }
        }
        batch.behind
    }

    /// Begins a transaction and does the work in it; returns whether that changed anything. Work that arrives meanwhile
    /// joins it: with many callers that is most of it, and each flush serves more.
    fn attempt(&mut self, batch: &mut Batch, done: &mut Vec<Answer>) -> Result<bool, Failure> {
        self.begin(batch.flush)?;
        let (mut changed, mut succeeded) = (false, false);
        loop {
            let Some(work) = batch.waiting.pop_front() else {
                batch.take(&mut self.messages, true);
                if batch.waiting.is_empty() {
                    break;
                }
                continue;
            };
            if changed {
                self.run_sql(SAVEPOINT)?;
            }
            let before = self.connection.total_changes();
            let connection = &mut self.connection;
            let answer = catch_unwind(AssertUnwindSafe(|| work(Ok(connection))));
            let wrote = self.connection.total_changes() != before;
            let failed = answer.as_ref().is_ok_and(|answer| answer.failed);
            let panicked = answer.is_err();
            // A panic has dropped the way to the caller, who gets to know that.
            done.extend(answer);
            if self.connection.is_autocommit() {
                // Some errors, as that of a full disk, roll the whole transaction back.
                let lost = "the transaction was rolled back because of another's error".to_owned();
                let lost = Failure::new(lost);
                if changed {
                    return Err(lost);
                }
                self.begin(batch.flush)?;
            } else if failed || panicked {
                match (changed, wrote || panicked) {
                    (true, _) => self.connection.execute_batch(TAKE_BACK)?,
                    (false, true) => {
                        self.run_sql("ROLLBACK")?;
                        self.begin(batch.flush)?;
                    }
                    (false, false) => {}
                }
            } else {
                if changed {
                    self.run_sql(RELEASE)?;
                }
                changed |= wrote;
                succeeded = true;
            }
        }
        if batch.flush == Flush::Now && self.unflushed && !changed && succeeded {
            // A commit without a page flushes nothing.
            self.connection.execute_batch("PRAGMA user_version = 0")?;
            changed = true;
        }
        Ok(changed)
    }

    /// Takes the write lock. A transaction that begins as a reader and becomes a writer later can fail half-way with
    /// "busy", this one only waits at its beginning.
    fn begin(&mut self, flush: Flush) -> Result<(), Failure> {
        if self.poisoned {
            return Err(Failure::poisoned());
        }
        if self.flush != Some(flush) {
            // In WAL mode the log is flushed before it is moved into the file, so nothing is ever damaged.
            let level = match flush {
                Flush::Now => "PRAGMA synchronous = FULL",
                Flush::WithNext => "PRAGMA synchronous = NORMAL",
            };
            self.flush = None;
            self.connection.execute_batch(level)?;
            self.flush = Some(flush);
        }
        self.run_sql("BEGIN IMMEDIATE")
    }

    fn commit(&mut self, changed: bool, flush: Flush) -> Committed {
        // Also if nothing changed: what the callers have read may be of a file that is lost.
        if let Some(Err(failure)) = self.files.as_ref().map(Files::in_place) {
            tracing::error!(%failure, "nothing is written to the records");
            self.roll_back();
            return Committed::No(failure);
        }
        if let Err(failure) = self.run_commit() {
            self.roll_back();
            self.unflushed = true;
            // A full disk is no sign of damage: the next commit overwrites the remains of this one. After any other failure
            // the file system may have dropped data that it had accepted, also of earlier commits that nobody waited for:
            // the flush of a later one would succeed without them.
            self.poisoned |= !is_full(&failure);
            if self.poisoned {
                tracing::error!(%failure, "a commit of the records failed, so nothing more is written; restart the gateway");
            } else {
                tracing::error!(%failure, "a commit of the records failed");
            }
            return Committed::InDoubt(failure);
        }
        if changed {
            self.commits.add(flush);
            self.unflushed = flush == Flush::WithNext;
        }
        Committed::Yes
    }

    fn run_commit(&self) -> Result<(), Failure> {
        #[cfg(test)]
        {
            let code = self.failing.swap(0, Ordering::SeqCst);
            if code != 0 {
                return Err(rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(code), None).into());
            }
        }
        self.run_sql("COMMIT")
    }

    fn roll_back(&mut self) {
        if !self.connection.is_autocommit()
            && let Err(failure) = self.run_sql("ROLLBACK")
        {
            // The connection cannot be trusted to begin another transaction.
            self.poisoned = true;
            tracing::error!(%failure, "a transaction of the records could not be rolled back; restart the gateway");
        }
    }

    fn run_sql(&self, sql: &str) -> Result<(), Failure> {
        self.connection.prepare_cached(sql)?.execute([])?;
        Ok(())
    }
}

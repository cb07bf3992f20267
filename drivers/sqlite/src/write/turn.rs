//! Whose turn it is to run the writer: its thread, which executes the queue, or a caller that commits alone.
//!
//! A commit that goes through the queue wakes the writer's thread, and is woken by it, which takes half as long as the
//! flush. A caller that commits onto the checkpoint that it has just committed has nobody to share a flush with. So it
//! runs the writer itself ([`Writer::alone`]) if
//!
//! * the writer is idle and nothing waits in the queue, so that nobody is overtaken;
//! * the calling thread does not run other tasks: a worker of a runtime must not wait for a disk;
//! * no other program holds the lock of the database: only the writer's thread waits for it.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use threadkeep::id::ThreadId;
use threadkeep::saver::Revision;
use threadkeep::{Error, Result};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc, oneshot};

use crate::care::space::{FileSize, Vacuum};
use crate::care::train::Trainer;
use crate::config::Options;
use crate::error::{CANNOT_START, CLOSED, LOST, READ_ONLY, in_doubt, unavailable};
use crate::sql::Db;
use crate::stats::Counters;
use crate::write::commit::Work;
use crate::write::doubt::Doubt;
use crate::write::log::LogBound;
use crate::write::remains;
use crate::write::writer::Writer;

/// Commands that may wait; further callers wait for a place in the queue.
pub(crate) const QUEUE: usize = 1024;

/// A request to the writer's thread.
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

/// The way to the writer.
pub(crate) struct Turns {
    queue: mpsc::Sender<Message>,
    seat: Arc<Seat>,
    thread: Mutex<Option<JoinHandle<()>>>,
    doubt: Arc<Doubt>,
    /// Whether rows of deleted threads may be left.
    remains: Arc<AtomicBool>,
    /// Why a command is refused when the thread has ended.
    refusal: &'static str,
}

/// The writer, for one at a time.
struct Seat {
    /// None once it is closed. Poisoned if a panic interrupted it: then nobody uses it any more.
    writer: Mutex<Option<Writer>>,
    /// The thread has taken a message from the queue and wants the writer, or has it.
    wanted: AtomicBool,
    /// Notified after the thread has taken messages from the queue.
    freed: Notify,
}

impl Turns {
    /// Starts the thread that writes through `db`.
    ///
    /// # Errors
    /// [`threadkeep::Error::Unavailable`] if the system cannot start another thread.
    pub(crate) fn start(db: Db, (path, options): (&Path, &Options), counters: Arc<Counters>) -> Result<Self> {
        let (queue, messages) = mpsc::channel(QUEUE);
        let trainer = Trainer::new(path.to_owned(), options.clone(), queue.downgrade());
        let doubt = Arc::<Doubt>::default();
        let remains = Arc::new(AtomicBool::new(remains::are_there(&db)));
        let pieces = (options.piece(), remains.clone());
        let log = LogBound::of(options.log_bound());
        let writer = Writer::new(db, options.synchronous, trainer, (pieces, log), (counters, doubt.clone()));
        let seat = Arc::new(Seat::of(Some(writer)));
        let thread = std::thread::Builder::new().name("threadkeep-sqlite".to_owned());
        let (run, doubtful) = (seat.clone(), doubt.clone());
        let thread = thread
            .spawn(move || run.run(messages, &doubtful))
            .map_err(|error| unavailable(format!("{CANNOT_START}: {error}")))?;
        Ok(Self { queue, seat, thread: Mutex::new(Some(thread)), doubt, remains, refusal: CLOSED })
    }

    /// For a database that cannot be written: every command is refused.
    pub(crate) fn refusing() -> Self {
        let (queue, _) = mpsc::channel(1);
        let seat = Arc::new(Seat::of(None));
        let (doubt, remains) = (Arc::default(), Arc::default());
        Self { queue, seat, thread: Mutex::new(None), doubt, remains, refusal: READ_ONLY }
    }

    /// Executes a command.
    pub(crate) async fn write(&self, work: Work) -> Result<()> {
        let work = match self.in_place(work) {
            Ok(result) => {
                // What else this task waits for gets its turn, as it would while the thread does the work.
                tokio::task::yield_now().await;
                return result;
            }
            Err(work) => work,
        };
        let (reply, outcome) = oneshot::channel();
        let command = Message::Work(Command { work, reply });
        if let Some(refused) = self.send(command).await {
            let error = unavailable(self.refusal);
            return Err(match refused {
                Message::Work(command) => self.doubt.error(&command.work, error),
                _ => error,
            });
        }
        outcome.await.unwrap_or_else(|_| Err(in_doubt(LOST)))
    }

    /// Puts a message into the queue, or waits until there is room. Returns the message if the queue is closed.
    ///
    /// Without [`mpsc::Sender::send`], which gives a caller that waits its place before it is polled: if nobody polls it
    /// any more, the others lack that place, and the thread waits for its message when it closes the queue.
    async fn send(&self, mut message: Message) -> Option<Message> {
        loop {
            // Before the look at the queue, so that no room that is made after it is missed.
            let freed = self.seat.freed.notified();
            message = match self.queue.try_send(message) {
                Ok(()) => return None,
                Err(TrySendError::Closed(refused)) => return Some(refused),
                Err(TrySendError::Full(waiting)) => waiting,
            };
            tokio::select! {
                () = freed => {}
                () = self.queue.closed() => {}
            }
        }
    }

    /// The error of a rewrite that failed before its last command, or in it.
    pub(crate) fn doubt_of_rewrite(&self, thread: &ThreadId, expected: &Revision, error: Error) -> Error {
        self.doubt.of_rewrite(thread, expected, error)
    }

    /// Whether rows of deleted threads may be left.
    pub(crate) fn remains(&self) -> bool {
        self.remains.load(Ordering::Acquire)
    }

    /// Executes a command on the calling thread, or returns it if that is not its turn.
    fn in_place(&self, work: Work) -> Result<Result<()>, Work> {
        if !matches!(work, Work::Commit(_)) || tokio::runtime::worker_index().is_some() || !self.is_idle() {
            return Err(work);
        }
        match self.seat.writer.try_lock().as_deref_mut() {
            Ok(Some(writer)) if writer.goes_on(&work) => writer.alone(work),
            _ => Err(work),
        }
    }

    /// Whether the thread has nothing to do.
    fn is_idle(&self) -> bool {
        self.queued() == 0 && !self.seat.wanted.load(Ordering::Acquire)
    }

    /// The thread wants the writer, until it has had it.
    #[cfg(test)]
    pub(crate) fn wants(&self) {
        self.seat.wanted.store(true, Ordering::Release);
    }

    /// The writer, which nobody else gets meanwhile.
    #[cfg(test)]
    pub(crate) fn held(&self) -> std::sync::MutexGuard<'_, Option<Writer>> {
        self.seat.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of messages that wait for the thread.
    pub(crate) fn queued(&self) -> usize {
        self.queue.max_capacity() - self.queue.capacity()
    }

    /// Returns free space.
    pub(crate) async fn vacuum(&self, vacuum: Vacuum) -> Result<FileSize> {
        let (reply, outcome) = oneshot::channel();
        if self.send(Message::Vacuum(vacuum, reply)).await.is_some() {
            return Err(unavailable(self.refusal));
        }
        outcome.await.unwrap_or_else(|_| Err(in_doubt(LOST)))
    }

    /// Finishes the queue and closes the database.
    pub(crate) async fn close(&self) {
        let (reply, closed) = oneshot::channel();
        if self.send(Message::Close(reply)).await.is_none() {
            // An error means that the writer has ended for another reason.
            let _ = closed.await;
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // It has answered, so this takes no time; it only fails if the thread panicked.
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
    }
}

impl Seat {
    fn of(writer: Option<Writer>) -> Self {
        Self { writer: Mutex::new(writer), wanted: AtomicBool::new(false), freed: Notify::new() }
    }

    /// Executes the queue until it is closed or all senders are gone.
    fn run(&self, mut queue: mpsc::Receiver<Message>, doubt: &Doubt) {
        let mut next = None;
        let closing = loop {
            let Some(message) = next.take().or_else(|| queue.blocking_recv()) else { break None };
            self.wanted.store(true, Ordering::Release);
            // A panic in the middle of a transaction: what waits is answered as lost.
            let Ok(mut seat) = self.writer.lock() else { return };
            let Some(writer) = seat.as_mut() else { return };
            let mut answers = Vec::new();
            match message {
                Message::Work(first) => (answers, next) = writer.batch(first, &mut queue),
                // The caller may have stopped waiting.
                Message::Vacuum(vacuum, reply) => drop(reply.send(writer.vacuum(vacuum))),
                Message::Close(reply) => break Some(reply),
            }
            drop(seat);
            self.freed.notify_waiters();
            self.wanted.store(next.is_some(), Ordering::Release);
            // Only now: a caller that goes on alone finds the writer free.
            for (reply, result) in answers {
                // The caller may have stopped waiting.
                let _ = reply.send(result);
            }
        };
        let writer = self.writer.lock().ok().and_then(|mut seat| seat.take());
        // What came after the order to close is not begun. Nothing more can come.
        queue.close();
        let mut closing: Vec<_> = closing.into_iter().collect();
        while let Some(message) = queue.blocking_recv() {
            let closed = unavailable(CLOSED);
            // The callers may have stopped waiting.
            match message {
                Message::Work(Command { work, reply }) => drop(reply.send(Err(doubt.error(&work, closed)))),
                Message::Vacuum(_, reply) => drop(reply.send(Err(closed))),
                Message::Close(reply) => closing.push(reply),
            }
        }
        if let Some(writer) = writer {
            writer.close();
        }
        for reply in closing {
            // The caller may have stopped waiting.
            let _ = reply.send(());
        }
    }
}

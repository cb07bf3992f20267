//! The saver: the contract's methods as reads on the pool and commands to the writer.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use async_trait::async_trait;
use threadkeep::Result;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, ListQuery, Revision, Rewrite, Saver, StepCommit,
    ThreadImage,
};
use tokio::sync::{mpsc, oneshot};

use crate::care::backup;
use crate::care::check::{self, Finding};
use crate::care::space::{self, FileSize, Vacuum};
use crate::config::Options;
use crate::error::{CLOSED, LOST, SAVER, in_doubt, unavailable};
use crate::read::pool::Readers;
use crate::read::queries;
use crate::rows::directory;
use crate::sql::Db;
use crate::stats::{Counters, Stats};
use crate::write::commit::Work;
use crate::write::doubt::Doubt;
use crate::write::writer::{self, Command, Message};

/// A store of checkpoints in an SQLite database.
///
/// Its futures must run in a tokio runtime. Several processes may have the same file open; each commit tells whether
/// its head is still the one that the caller saw.
///
/// [`SqliteSaver::close`] is the orderly end. Dropping the last handle lets the writer finish what is queued and close
/// the file in its own time; nothing that was acknowledged is lost either way.
pub struct SqliteSaver {
    path: PathBuf,
    options: Options,
    readers: Readers,
    queue: mpsc::Sender<Message>,
    writer: Mutex<Option<JoinHandle<()>>>,
    counters: Arc<Counters>,
    doubt: Arc<Doubt>,
}

impl fmt::Debug for SqliteSaver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteSaver").field("path", &self.path).finish_non_exhaustive()
    }
}

impl SqliteSaver {
    /// Opens the database at `path` and creates it if there is none. The directory must exist. Blocks: see
    /// [`Self::open_async`].
    ///
    /// # Errors
    /// [`threadkeep::Error::NewerFormat`] if a newer version of this program wrote it;
    /// [`threadkeep::Error::InvalidInput`] if it is another program's database; [`threadkeep::Error::Corrupt`] if it is
    /// no database; [`threadkeep::Error::Unavailable`] if it cannot be opened or is locked.
    pub fn open(path: impl AsRef<Path>, options: &Options) -> Result<Self> {
        let path = path.as_ref();
        let db = Db::writer(path, options)?;
        let counters = Arc::<Counters>::default();
        let readers = Readers::open(path, options, counters.clone())?;
        let doubt = Arc::<Doubt>::default();
        let (queue, thread) = writer::start(db, (path, options), (counters.clone(), doubt.clone()))?;
        let (path, writer) = (path.to_owned(), Mutex::new(Some(thread)));
        Ok(Self { path, options: options.clone(), readers, queue, writer, counters, doubt })
    }

    /// [`Self::open`] on a thread that may block.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn open_async(path: impl AsRef<Path>, options: Options) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let open = tokio::task::spawn_blocking(move || Self::open(path, &options));
        open.await.map_err(|error| unavailable(error.to_string()))?
    }

    /// Carries out what is queued, moves the write-ahead log into the database file and closes it. Waits for reads that
    /// run; later calls are [`threadkeep::Error::Unavailable`]. Closing twice is fine.
    pub async fn close(&self) {
        self.readers.close().await;
        let (reply, closed) = oneshot::channel();
        if self.queue.send(Message::Close(reply)).await.is_ok() {
            // An error means that the writer has ended for another reason.
            let _ = closed.await;
        }
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(writer) = writer {
            // It has answered, so this takes no time; it only fails if the thread panicked.
            let _ = tokio::task::spawn_blocking(move || writer.join()).await;
        }
    }

    /// How much room the database takes.
    ///
    /// # Errors
    /// [`threadkeep::Error::Unavailable`] if the store is closed or busy.
    pub async fn file_size(&self) -> Result<FileSize> {
        self.readers.run(|db, _| FileSize::of(db)).await
    }

    /// Bytes that the rows of a thread take: its checkpoints, what ran from them, and its elements. 0 for a thread that is
    /// not there.
    ///
    /// # Errors
    /// As [`Self::file_size`].
    pub async fn stored_bytes(&self, thread: &ThreadId) -> Result<u64> {
        let thread = thread.clone();
        self.readers
            .run(move |db, _| match directory::find_thread(db, &thread)? {
                Some(key) => space::of_thread(db, key),
                None => Ok(0),
            })
            .await
    }

    /// Gives back at most `pages` free pages, in a transaction of its own between those of other writers, and answers
    /// what is left to give. Does nothing if the database cannot ([`FileSize::incremental`]). The file itself gets
    /// smaller when the write-ahead log is moved into it, at the latest when the store is closed.
    ///
    /// # Errors
    /// As a commit: [`threadkeep::Error::Unavailable`], [`threadkeep::Error::InDoubt`]. Nothing of what is stored changes
    /// in any case.
    pub async fn vacuum(&self, pages: u32) -> Result<FileSize> {
        self.give_back(Vacuum::Pages(pages)).await
    }

    /// Writes the database anew without free pages, and so that from then on [`Self::vacuum`] can give pages back. Takes
    /// the lock for as long as it lasts: other writers wait, in other processes until their `busy_timeout`. Takes up to
    /// twice the room of the database meanwhile.
    ///
    /// # Errors
    /// As [`Self::vacuum`].
    pub async fn vacuum_fully(&self) -> Result<FileSize> {
        self.give_back(Vacuum::Fully).await
    }

    async fn give_back(&self, vacuum: Vacuum) -> Result<FileSize> {
        let (reply, outcome) = oneshot::channel();
        self.queue.send(Message::Vacuum(vacuum, reply)).await.map_err(|_| unavailable(CLOSED))?;
        outcome.await.unwrap_or_else(|_| Err(in_doubt(LOST)))
    }

    /// Copies the store into a new file at `to`, which only the user may read, while others read and write. The copy holds
    /// what was committed at one moment, is one file without a log, and every row of it was looked at before it gets its
    /// name. To restore it, put it where the store was.
    ///
    /// It is one long read: the write-ahead log grows while it lasts. Dropping the future does not stop it.
    ///
    /// # Errors
    /// As [`copy_database`](crate::copy_database).
    pub async fn backup(&self, to: impl AsRef<Path>) -> Result<()> {
        let (from, to, options) = (self.path.clone(), to.as_ref().to_owned(), self.options.clone());
        let copying = tokio::task::spawn_blocking(move || backup::copy_store(&from, &to, &options));
        copying.await.map_err(|error| unavailable(error.to_string()))?
    }

    /// How many operations wait for the writer now.
    pub fn queued(&self) -> usize {
        self.queue.max_capacity() - self.queue.capacity()
    }

    /// What was counted since the store was opened.
    pub fn stats(&self) -> Stats {
        self.counters.stats()
    }

    /// Looks at every row of the database: checksums, references, what is referred to and missing, what is there and not
    /// referred to. Answers what was found; nothing for a database that is whole. It is one long read; writers go on.
    ///
    /// # Errors
    /// [`threadkeep::Error::Unavailable`] if the database cannot be read at all.
    pub async fn check(&self) -> Result<Vec<Finding>> {
        self.readers.run(|db, memory| check::check(db, &memory.names)).await
    }

    /// Deletes what nothing refers to ([`Finding::orphan`]), in one transaction. A replaced special write leaves such a
    /// value behind; nothing else does.
    ///
    /// # Errors
    /// [`threadkeep::Error::Corrupt`] if a row is damaged: then nothing is deleted, for what it referred to is not known.
    pub async fn sweep(&self) -> Result<()> {
        self.write(Work::Sweep).await
    }

    pub(crate) async fn write(&self, work: Work) -> Result<()> {
        let (reply, outcome) = oneshot::channel();
        let command = Message::Work(Command { work, reply });
        if let Err(mpsc::error::SendError(refused)) = self.queue.send(command).await {
            let error = unavailable(CLOSED);
            return Err(match refused {
                Message::Work(command) => self.doubt.error(&command.work, error),
                _ => error,
            });
        }
        outcome.await.unwrap_or_else(|_| Err(in_doubt(LOST)))
    }
}

#[async_trait]
impl Saver for SqliteSaver {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        let at = at.clone();
        self.readers.run(move |db, memory| queries::get(db, memory, &at)).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        let query = query.clone();
        self.readers.run(move |db, memory| queries::list(db, memory, &query)).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        self.write(Work::PutWrites(at.clone(), task.clone())).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        step.validate()?;
        let key = step.key();
        self.write(Work::Commit(Box::new(step))).await?;
        Ok(key)
    }

    async fn flush(&self, _: &ThreadId) -> Result<()> {
        self.write(Work::Flush).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        let (at, channels) = (at.clone(), channels.clone());
        self.readers
            .run(move |db, memory| queries::delta_history(db, &memory.names, &at, &channels, reach))
            .await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        self.write(Work::DeleteThread(thread.clone())).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        let after = after.cloned();
        self.readers.run(move |db, _| directory::threads(db, after.as_ref(), limit)).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        let thread = thread.clone();
        self.readers.run(move |db, memory| queries::read_thread(db, memory, &thread)).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        self.write(Work::Rewrite(thread.clone(), expected.clone(), Box::new(rewrite))).await
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { name: SAVER, durable: true, shared_elements: true }
    }
}

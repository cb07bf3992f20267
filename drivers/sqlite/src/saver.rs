//! The saver: the contract's methods as reads on the pool and commands to the writer.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use threadkeep::Result;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::{
    Capabilities, CheckpointSelector, Coming, DeltaHistory, ListQuery, Revision, Rewrite, Saver, StepCommit,
    Summary, ThreadImage, check_order,
};

use crate::care::backup::{self, BackupFile};
use crate::care::check::{self, Finding};
use crate::care::space::{self, FileSize, Vacuum};
use crate::care::{scopes, sweep};
use crate::config::Options;
use crate::error::{CANNOT_OPEN, GONE, SAVER, unavailable};
use crate::read::pool::Readers;
use crate::read::{queries, summary};
use crate::rows::{checkpoints, directory, element};
use crate::sql::{Db, FileId, file_id};
use crate::stats::{Counters, Stats};
use crate::write::commit::Work;
use crate::write::remains::{Clearing, Unfinished};
use crate::write::rewrite::revision_of;
use crate::write::size;
use crate::write::turn::Turns;

/// A thread with more elements, for each checkpoint that one transaction may write or rewrite, is written in pieces.
const ELEMENTS: usize = 8;
/// So is one with more bytes of elements.
const BYTES: usize = 4 << 20;

/// A store of checkpoints in an SQLite database.
///
/// Its futures must run in a tokio runtime. Several processes may have the same file open; each commit checks that its
/// head is still the one that the caller saw.
///
/// [`SqliteSaver::close`] is the orderly shutdown. If the last handle is dropped instead, the writer finishes the queue
/// and closes the file in the background; nothing acknowledged is lost either way.
pub struct SqliteSaver {
    path: PathBuf,
    /// The file that was opened: another one may have its name later.
    pub(crate) file: Option<FileId>,
    pub(crate) options: Options,
    pub(crate) readers: Readers,
    pub(crate) writer: Arc<Turns>,
    counters: Arc<Counters>,
}

impl fmt::Debug for SqliteSaver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteSaver").field("path", &self.path).finish_non_exhaustive()
    }
}

impl SqliteSaver {
    /// Opens the database at `path`, and creates it if it does not exist. The directory must exist. Blocks: see
    /// [`Self::open_async`].
    ///
    /// # Errors
    /// [`threadkeep::Error::NewerFormat`] if a newer version of this program wrote it;
    /// [`threadkeep::Error::InvalidInput`] if it is another program's database; [`threadkeep::Error::Corrupt`] if it is
    /// not a database; [`threadkeep::Error::Unavailable`] if it cannot be opened or is locked.
    pub fn open(path: impl AsRef<Path>, options: &Options) -> Result<Self> {
        let path = path.as_ref();
        let place = absolute(path)?;
        let db = Db::writer(path, options)?;
        let place = resolved(place);
        let counters = Arc::<Counters>::default();
        let readers = Readers::open(path, options, counters.clone())?;
        let writer = Arc::new(Turns::start(db, (&place, options), counters.clone())?);
        writer.begin_to_clear();
        let file = file_id(&place);
        Ok(Self { path: place, file, options: options.clone(), readers, writer, counters })
    }

    /// Opens an existing database that cannot be written, because of permissions or a read-only file system: it can be
    /// read, and every other method is [`threadkeep::Error::Unavailable`]. Blocks.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_read_only(path: impl AsRef<Path>, options: &Options) -> Result<Self> {
        let path = path.as_ref();
        let place = absolute(path)?;
        let counters = Arc::<Counters>::default();
        let readers = Readers::open_alone(path, options, counters.clone())?;
        let writer = Arc::new(Turns::refusing());
        let place = resolved(place);
        let file = file_id(&place);
        Ok(Self { path: place, file, options: options.clone(), readers, writer, counters })
    }

    /// [`Self::open`] on a blocking thread.
    pub async fn open_async(path: impl AsRef<Path>, options: Options) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let open = tokio::task::spawn_blocking(move || Self::open(path, &options));
        open.await.map_err(|error| unavailable(error.to_string()))?
    }

    /// Finishes the queue, moves the write-ahead log into the database file and closes it. Waits for running reads;
    /// later calls return [`threadkeep::Error::Unavailable`]. Closing twice is harmless.
    pub async fn close(&self) {
        self.readers.close().await;
        self.writer.close().await;
    }

    /// The size of the database.
    ///
    /// # Errors
    /// [`threadkeep::Error::Unavailable`] if the store is closed or busy.
    pub async fn file_size(&self) -> Result<FileSize> {
        self.readers.run(|db, _| FileSize::of(db)).await
    }

    /// The bytes of the rows of a thread: its checkpoints, their tasks, and its elements. 0 for a thread that does not
    /// exist.
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

    /// Returns at most `pages` free pages to the file system, in a transaction of its own between those of other
    /// writers, and returns the remaining size. Does nothing if the database does not support it
    /// ([`FileSize::incremental`]). The file itself shrinks when the write-ahead log is moved into it, at the latest
    /// when the store is closed.
    ///
    /// # Errors
    /// As a commit: [`threadkeep::Error::Unavailable`], [`threadkeep::Error::InDoubt`]. Stored data never changes.
    pub async fn vacuum(&self, pages: u32) -> Result<FileSize> {
        self.writer.vacuum(Vacuum::Pages(pages)).await
    }

    /// Rewrites the database without free pages, so that [`Self::vacuum`] can return pages from then on. Holds the
    /// write lock throughout: other writers wait, those in other processes until their `busy_timeout`. Needs up to
    /// twice the size of the database meanwhile.
    ///
    /// # Errors
    /// As [`Self::vacuum`].
    pub async fn vacuum_fully(&self) -> Result<FileSize> {
        self.writer.vacuum(Vacuum::Fully).await
    }

    /// Copies the store into a new file at `to`, readable only by the user, while others read and write. The copy holds
    /// what was committed at one moment, is one file without a log, and is renamed into place only after every row of
    /// it was checked. To restore it, put it in the place of the store.
    ///
    /// It is one long read: the write-ahead log grows meanwhile. Dropping the future stops it, and leaves no file.
    ///
    /// # Errors
    /// As [`copy_database`](crate::copy_database); [`threadkeep::Error::Unavailable`] if another file has the name of
    /// the store by now.
    pub async fn backup(&self, to: impl AsRef<Path>) -> Result<()> {
        self.copied(to).await?.keep()
    }

    /// [`Self::backup`] without the last step: the copy has no name yet, so that several can get theirs together.
    ///
    /// # Errors
    /// As [`Self::backup`].
    pub async fn copied(&self, to: impl AsRef<Path>) -> Result<BackupFile> {
        if file_id(&self.path) != self.file {
            return Err(unavailable(format!("{}: {GONE}", self.path.display())));
        }
        backup::copy_store(self.path.clone(), to.as_ref(), self.options.clone()).await
    }

    /// The number of operations that wait for the writer.
    pub fn queued(&self) -> usize {
        self.writer.queued()
    }

    /// The counts since the store was opened.
    pub fn stats(&self) -> Stats {
        self.counters.stats()
    }

    /// Checks every row of the database: checksums, missing references, and orphans. Returns the findings, none for an
    /// intact database. It is one long read; writers continue. A page that is damaged is a finding of each thread that has
    /// rows on it, and the other threads are checked.
    ///
    /// # Errors
    /// [`threadkeep::Error::Unavailable`] if the database cannot be read at all.
    pub async fn check(&self) -> Result<Vec<Finding>> {
        self.readers.run(|db, memory| check::check(db, &memory.names)).await
    }

    /// As [`Self::check`], of the rows of these threads only: what is wrong elsewhere is not found, and not read.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub async fn check_threads(&self, threads: Vec<ThreadId>) -> Result<Vec<Finding>> {
        self.readers.run(move |db, memory| check::check_threads(db, &memory.names, &threads)).await
    }

    /// The threads of a database whose list of threads is damaged, as far as it can be read; of an intact one, all. Which of
    /// them can be read [`Self::check`] says.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub async fn readable_threads(&self) -> Result<Vec<ThreadId>> {
        self.read(scopes::readable_threads).await
    }

    /// Deletes what nothing refers to ([`Finding::orphan`]), a thread at a time; a long one is written again beside itself.
    /// It is found in a long read, beside which writers continue.
    /// Only the replacement of a special write leaves such a value, and a process that was killed.
    ///
    /// # Errors
    /// [`threadkeep::Error::Corrupt`] if a row is damaged: then nothing is deleted, because what it referred to is
    /// unknown. [`threadkeep::Error::Stale`] if somebody wrote to a long thread meanwhile: repeat it.
    pub async fn sweep(&self) -> Result<()> {
        let most = self.options.long();
        for thread in self.read(sweep::untidy).await? {
            let name = thread.clone();
            if self.read(move |db| is_long(db, &name, most)).await? {
                self.write_again(&thread).await?;
            } else {
                self.write(Work::Tidy(thread)).await?;
            }
        }
        let lost = self.read(sweep::lost).await?;
        self.write(Work::Sweep(lost)).await?;
        self.writer.clear().await;
        Ok(())
    }

    async fn rewritten(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        let most = self.options.long();
        if *expected == Revision::absent() {
            let short = self.options.short();
            let is_short =
                rewrite.put.len() <= short && !size::has_more_than(&rewrite.put, short * ELEMENTS, BYTES);
            if rewrite.remove.is_empty() && !is_short {
                return self.write_in_pieces(thread, rewrite).await;
            }
        } else {
            let stored = thread.clone();
            if rewrite.put.len() > most || self.read(move |db| is_long(db, &stored, most)).await? {
                return self.rewrite_in_pieces(thread, expected, rewrite).await;
            }
        }
        let may_remove_all = rewrite.put.is_empty();
        let work = Work::Rewrite(thread.clone(), expected.clone(), Box::new(rewrite));
        if may_remove_all { self.write_and_clear(work).await } else { self.write(work).await }
    }

    /// A thread that comes at once is written as by a rewrite: quicker, if it is short.
    async fn created(&self, thread: &ThreadId, coming: &mut dyn Coming) -> Result<()> {
        coming.rewind().await?;
        let first = coming.next().await?;
        let second = if first.is_empty() { Vec::new() } else { coming.next().await? };
        if !second.is_empty() {
            return self.write_as_it_comes(thread, [first, second], coming).await;
        }
        let mut last = None;
        for tuple in &first {
            check_order(thread, tuple, last.as_ref())?;
            last = Some((tuple.namespace.clone(), tuple.checkpoint.id));
        }
        let rewrite = Rewrite { put: first, ..Rewrite::default() };
        self.rewritten(thread, &Revision::absent(), rewrite).await
    }

    /// Executes a command that may delete a thread, and deletes what is left of its rows.
    pub(crate) async fn write_and_clear(&self, work: Work) -> Result<()> {
        let mut unfinished =
            Unfinished { turns: &self.writer, order: Some(Work::Clear(Clearing::default())) };
        let written = self.write(work).await;
        unfinished.order = None;
        written?;
        self.writer.clear().await;
        Ok(())
    }

    pub(crate) async fn write(&self, work: Work) -> Result<()> {
        self.writer.write(work).await
    }

    pub(crate) async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Db) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.readers.run(move |db, _| read(db)).await
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
        self.write_and_clear(Work::DeleteThread(thread.clone())).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        let after = after.cloned();
        self.readers.run(move |db, _| directory::threads(db, after.as_ref(), limit)).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        let thread = thread.clone();
        self.readers.run(move |db, memory| queries::read_thread(db, memory, &thread)).await
    }

    async fn revision(&self, thread: &ThreadId) -> Result<Revision> {
        let thread = thread.clone();
        self.read(move |db| revision_of(db, &thread)).await
    }

    async fn delete_seen(&self, thread: &ThreadId, expected: &Revision) -> Result<()> {
        let deleted = self.delete_marked(thread, expected).await;
        deleted.map_err(|error| self.writer.doubt_of_rewrite(thread, expected, error))
    }

    async fn summary(&self, thread: &ThreadId) -> Result<Summary> {
        let thread = thread.clone();
        self.readers.run(move |db, memory| summary::summary(db, &memory.names, &thread)).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        let rewritten = self.rewritten(thread, expected, rewrite).await;
        rewritten.map_err(|error| self.writer.doubt_of_rewrite(thread, expected, error))
    }

    async fn create_thread(&self, thread: &ThreadId, coming: &mut dyn Coming) -> Result<()> {
        let created = self.created(thread, coming).await;
        created.map_err(|error| self.writer.doubt_of_rewrite(thread, &Revision::absent(), error))
    }

    async fn copy_thread(&self, from: &ThreadId, to: &ThreadId) -> Result<usize> {
        let copied = self.copied_thread(from, to).await;
        copied.map_err(|error| self.writer.doubt_of_rewrite(to, &Revision::absent(), error))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { name: SAVER, durable: true, shared_elements: true }
    }
}

/// Where a database is, for what opens it again later: the program may have changed its directory by then.
fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path)
        .map_err(|error| unavailable(format!("{}: {CANNOT_OPEN} ({error})", path.display())))
}

/// The file that SQLite has opened under this name: a link may lead elsewhere later.
fn resolved(path: PathBuf) -> PathBuf {
    if cfg!(unix) { path.canonicalize().unwrap_or(path) } else { path }
}

/// Whether a rewrite of a thread could hold the writer for long: it reads every row.
fn is_long(db: &Db, thread: &ThreadId, most: usize) -> Result<bool> {
    let Some(key) = directory::find_thread(db, thread)? else { return Ok(false) };
    let chains = directory::chains(db, key)?;
    for (_, chain) in &chains {
        if checkpoints::has_more_than(db, chain.key, most)? {
            return Ok(true);
        }
    }
    Ok(chains.len() > most || element::has_more_than(db, key, most * ELEMENTS, BYTES)?)
}

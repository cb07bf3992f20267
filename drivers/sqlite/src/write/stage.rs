//! Writing a long thread piece by piece, so that other commands get their turn in between.
//!
//! The pieces go to a thread that no method of the contract finds, and the last transaction gives it its name: readers
//! see all of it or nothing. A long thread is rewritten in the same way: what it will be is written beside it, and then
//! takes its name, unless somebody wrote to it meanwhile. What a process leaves when it ends in between is found by the
//! check and deleted by the sweep, see [`directory::is_being_made`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::{IdSource, ThreadId};
use threadkeep::saver::{Coming, LocalKey, Outline, Revision, Rewrite, ThreadImage, check_next};
use threadkeep::{Error, Result};
use threadkeep_layout::Related;

use crate::error::{NO_ROOM, SWEPT, unavailable};
use crate::read::queries;
use crate::read::view::Channel;
use crate::rows::checkpoints::{self, Extent};
use crate::rows::directory::{self, ChainKey, Thread};
use crate::rows::value::Room;
use crate::saver::SqliteSaver;
use crate::sql::Db;
use crate::write::commit::{Work, WriterState};
use crate::write::remains::{Clearing, Unfinished, pause};
use crate::write::rewrite::revision_of;
use crate::write::thread::{Node, ThreadState};

/// The most bytes of elements in a piece, except for a single one with more.
const BYTES: usize = 512 << 10;
/// The most elements in a piece, for each checkpoint in it.
const ELEMENTS: usize = 8;

/// A part of a thread that is being written.
#[derive(Debug)]
pub(crate) struct Piece {
    /// Identifies the thread until it has its name.
    token: String,
    /// The name that it will have.
    thread: ThreadId,
    /// Whether this is the first one.
    first: bool,
    tuples: Arc<[CheckpointTuple]>,
    /// How many of them are stored already.
    from: usize,
    /// The checkpoint before this piece.
    last: Option<LocalKey>,
    /// How many are stored after this transaction. The first one of a thread can have more elements than fit into one:
    /// some of them are stored, and the next transaction finds them.
    done: Arc<AtomicUsize>,
}

#[cfg(test)]
impl Piece {
    /// A first piece without checkpoints.
    pub(crate) fn empty(token: &str) -> Self {
        let (tuples, done) = (Arc::new([]), Arc::default());
        Self { token: token.to_owned(), first: true, thread: "t".into(), tuples, from: 0, last: None, done }
    }
}

/// The last step: a thread that was written in pieces takes a name, and the place of the thread that has it.
#[derive(Debug)]
pub(crate) struct Naming {
    /// The thread that was written; none if nothing is left of the one that it replaces.
    token: Option<String>,
    pub(crate) thread: ThreadId,
    /// What the caller had read of the replaced thread.
    pub(crate) expected: Revision,
    /// That thread, as it was then; none if there was none.
    mark: Option<Mark>,
}

/// What every change of a thread changes, without decoding its rows: two marks of a thread are equal only if it was not
/// written in between. Checkpoints and tasks are only added, which the extents show; every other change is counted.
#[derive(Debug, PartialEq)]
struct Mark {
    thread: Thread,
    chains: Vec<(ChainKey, Extent)>,
}

impl Mark {
    fn of(db: &Db, thread: &ThreadId) -> Result<Option<Self>> {
        let Some(thread) = directory::thread(db, thread)? else { return Ok(None) };
        let chains = directory::chains(db, thread.key)?.into_iter();
        let chains = chains.map(|(_, chain)| Ok((chain.key, checkpoints::extent(db, chain.key)?)));
        Ok(Some(Self { thread, chains: chains.collect::<Result<_>>()? }))
    }
}

impl SqliteSaver {
    /// Writes a thread that does not exist yet.
    pub(crate) async fn write_in_pieces(&self, thread: &ThreadId, rewrite: Rewrite) -> Result<()> {
        self.refuse_existing(thread).await?;
        rewrite.check(thread, BTreeMap::new())?;
        let absent = Naming { token: None, thread: thread.clone(), expected: Revision::absent(), mark: None };
        self.write_and_name(rewrite, absent).await
    }

    /// Writes what a long thread will be after a rewrite beside it, and then lets that take its place.
    pub(crate) async fn rewrite_in_pieces(
        &self,
        thread: &ThreadId,
        expected: &Revision,
        rewrite: Rewrite,
    ) -> Result<()> {
        let (image, mark) = self.read_marked(thread).await?;
        if image.revision != *expected {
            return Err(Error::Stale { thread: thread.clone() });
        }
        let outlines = image.checkpoints.iter();
        rewrite
            .check(thread, outlines.map(|(place, tuple)| (place.clone(), Outline::of(tuple))).collect())?;
        if rewrite.is_empty() {
            return Ok(());
        }
        self.put_in_place(image.after(&rewrite), mark).await
    }

    /// Deletes a thread that has this revision.
    pub(crate) async fn delete_marked(&self, thread: &ThreadId, expected: &Revision) -> Result<()> {
        let of = thread.clone();
        let (found, mark) = self.read(move |db| Ok((revision_of(db, &of)?, Mark::of(db, &of)?))).await?;
        if found != *expected {
            return Err(Error::Stale { thread: thread.clone() });
        }
        if mark.is_none() {
            return Ok(());
        }
        let naming = Naming { token: None, thread: thread.clone(), expected: found, mark };
        self.write_and_clear(Work::Name(Box::new(naming))).await
    }

    /// Writes a thread as it is beside itself, without what nothing in it refers to.
    pub(crate) async fn write_again(&self, thread: &ThreadId) -> Result<()> {
        let (image, mark) = self.read_marked(thread).await?;
        self.put_in_place(image, mark).await
    }

    async fn read_marked(&self, thread: &ThreadId) -> Result<(ThreadImage, Option<Mark>)> {
        let thread = thread.clone();
        let read = self
            .readers
            .run(move |db, memory| Ok((queries::read_thread(db, memory, &thread)?, Mark::of(db, &thread)?)));
        read.await
    }

    async fn put_in_place(&self, image: ThreadImage, mark: Option<Mark>) -> Result<()> {
        let put = image.checkpoints.into_values().collect();
        let naming = Naming { token: None, thread: image.thread, expected: image.revision, mark };
        self.write_and_name(Rewrite { put, ..Rewrite::default() }, naming).await
    }

    async fn write_and_name(&self, rewrite: Rewrite, naming: Naming) -> Result<()> {
        let mut put = rewrite.put;
        put.sort_by(|a, b| (&a.namespace, a.checkpoint.id).cmp(&(&b.namespace, b.checkpoint.id)));
        let mut staging = Staging::of(self, &naming.thread);
        staging.write(put).await?;
        staging.take_name(naming).await
    }

    /// Writes a thread that does not exist yet as its checkpoints come. `first` came already.
    pub(crate) async fn write_as_it_comes(
        &self,
        thread: &ThreadId,
        first: [Vec<CheckpointTuple>; 2],
        coming: &mut dyn Coming,
    ) -> Result<()> {
        self.refuse_existing(thread).await?;
        let mut staging = Staging::of(self, thread);
        if let Err(error) = staging.write_all(first, coming).await {
            staging.discard().await;
            return Err(error);
        }
        staging.take_new_name().await
    }

    pub(crate) async fn refuse_existing(&self, thread: &ThreadId) -> Result<()> {
        let name = thread.clone();
        match self.read(move |db| directory::find_thread(db, &name)).await? {
            Some(_) => Err(Error::Stale { thread: thread.clone() }),
            None => Ok(()),
        }
    }
}

/// A thread that is written in pieces and has no name yet. Dropped before it has one, it is deleted.
pub(crate) struct Staging<'a> {
    saver: &'a SqliteSaver,
    thread: ThreadId,
    token: Option<String>,
    lists: Related,
    last: Option<LocalKey>,
    unfinished: Unfinished<'a>,
}

impl<'a> Staging<'a> {
    pub(crate) fn of(saver: &'a SqliteSaver, thread: &ThreadId) -> Self {
        let unfinished = Unfinished { turns: &saver.writer, order: None };
        Self { saver, thread: thread.clone(), token: None, lists: Related::default(), last: None, unfinished }
    }

    async fn write_all(&mut self, first: [Vec<CheckpointTuple>; 2], coming: &mut dyn Coming) -> Result<()> {
        for more in first {
            self.write(more).await?;
        }
        loop {
            let more = coming.next().await?;
            if more.is_empty() {
                return Ok(());
            }
            self.write(more).await?;
        }
    }

    /// Writes the next checkpoints, by namespace and oldest first.
    async fn write(&mut self, tuples: Vec<CheckpointTuple>) -> Result<()> {
        let most = self.saver.options.piece();
        let mut left = tuples.into_iter();
        loop {
            let mut piece: Vec<_> = left.by_ref().take(most).collect();
            let Some(last) = piece.last().map(|last| (last.namespace.clone(), last.checkpoint.id)) else {
                return Ok(());
            };
            for tuple in &mut piece {
                for (channel, entry) in &mut tuple.checkpoint.channels {
                    entry.stored = self.lists.stored(&tuple.namespace, channel, entry.version, &entry.stored);
                }
            }
            self.write_piece(piece.into()).await?;
            self.last = Some(last);
        }
    }

    async fn write_piece(&mut self, tuples: Arc<[CheckpointTuple]>) -> Result<()> {
        let (token, mut first) = self.next_piece();
        let done = Arc::<AtomicUsize>::default();
        loop {
            let from = done.load(Ordering::Acquire);
            if from == tuples.len() {
                return Ok(());
            }
            let (token, thread, last) = (token.clone(), self.thread.clone(), self.last.clone());
            let (tuples, done) = (tuples.clone(), done.clone());
            let piece = Piece { token, thread, first, tuples, from, last, done };
            self.store(Work::Stage(Box::new(piece))).await?;
            first = false;
        }
    }

    /// Identifies the thread to its next piece; and whether that is the first one.
    pub(crate) fn next_piece(&mut self) -> (String, bool) {
        let first = self.token.is_none();
        let token = self.token.get_or_insert_with(|| IdSource::default().checkpoint_after(None).to_string());
        self.unfinished.order = Some(Work::Discard(token.clone()));
        (token.clone(), first)
    }

    /// Stores a piece, and lets others in.
    pub(crate) async fn store(&self, piece: Work) -> Result<()> {
        match self.saver.write(piece).await {
            // Nobody sees this piece, whether it was stored or not.
            Err(Error::InDoubt { saver, reason }) => return Err(Error::Unavailable { saver, reason }),
            written => written?,
        }
        pause().await;
        Ok(())
    }

    /// Deletes it before its process may end. What then is left, the sweep deletes.
    pub(crate) async fn discard(mut self) {
        if let Some(work) = self.unfinished.order.take()
            && self.saver.write(work).await.is_ok()
        {
            self.saver.writer.clear().await;
        }
    }

    /// Gives it the name of a thread that does not exist.
    pub(crate) async fn take_new_name(self) -> Result<()> {
        let (thread, expected) = (self.thread.clone(), Revision::absent());
        self.take_name(Naming { token: None, thread, expected, mark: None }).await
    }

    /// Gives it its name, if anything was written.
    async fn take_name(mut self, mut naming: Naming) -> Result<()> {
        naming.token = self.token.take();
        self.unfinished.order.get_or_insert_with(|| Work::Clear(Clearing::default()));
        let named = self.saver.write(Work::Name(Box::new(naming))).await;
        if matches!(named, Ok(()) | Err(Error::InDoubt { .. })) {
            self.unfinished.order = None;
        }
        named?;
        self.saver.writer.clear().await;
        Ok(())
    }
}

impl WriterState {
    /// Writes a piece.
    pub(crate) fn stage(&mut self, piece: &Piece) -> Result<()> {
        let thread = ThreadId::from(piece.token.as_str());
        let mut state = match self.threads.take_unnamed(&self.db, &thread)? {
            Some(state) => state,
            None if piece.first => ThreadState::new(directory::add_unnamed(&self.db, &piece.token)?),
            None => return Err(unavailable(SWEPT)),
        };
        state.room = Room { elements: self.piece * ELEMENTS, bytes: BYTES };
        let mut done = piece.from;
        for tuple in &piece.tuples[piece.from..] {
            let last = done.checked_sub(1).and_then(|last| piece.tuples.get(last));
            let last = last.map(|last| (last.namespace.clone(), last.checkpoint.id));
            let last = last.or_else(|| piece.last.clone());
            match self.stage_one(&mut state, (&thread, &piece.thread), tuple, last.as_ref()) {
                // Of this checkpoint, only elements are stored.
                Err(Error::Unavailable { reason, .. }) if reason == NO_ROOM => break,
                staged => staged?,
            }
            done += 1;
        }
        piece.done.store(done, Ordering::Release);
        state.room = Room::ANY;
        self.threads.put(thread, state);
        Ok(())
    }

    /// Writes a checkpoint of a thread, whose two names are the one that it has, and the one that it will have.
    fn stage_one(
        &self,
        state: &mut ThreadState,
        (thread, named): (&ThreadId, &ThreadId),
        tuple: &CheckpointTuple,
        last: Option<&LocalKey>,
    ) -> Result<()> {
        let (db, id) = (&self.db, tuple.checkpoint.id);
        let (chain, head) = match state.chain(db, &self.names, thread, &tuple.namespace)? {
            Some(chain) => (chain.chain, chain.head),
            None => (directory::add_chain(db, state.key, &tuple.namespace)?, None),
        };
        let parent = match (tuple.parent, &head) {
            (None, _) => None,
            (Some(parent), Some(head)) if head.id == parent => Some(Arc::clone(head)),
            (Some(parent), _) => {
                let row = checkpoints::find(db, chain.key, parent)?;
                row.map(|row| state.node(db, &self.names, thread, chain, &row)).transpose()?
            }
        };
        let above: Option<Vec<_>> =
            parent.as_ref().map(|parent| parent.tasks.iter().map(|row| row.task).collect());
        check_next(named, tuple, last, above.as_deref())?;
        let ordinal = head.map_or(0, |head| head.ordinal).checked_add(1);
        let ordinal = ordinal
            .ok_or_else(|| Error::InvalidInput("the thread cannot hold more checkpoints".to_owned()))?;
        let mut channels = Vec::with_capacity(tuple.checkpoint.channels.len());
        for (channel, entry) in &tuple.checkpoint.channels {
            let name = self.name(channel.as_str())?;
            let kept = self.kept(state, (chain.key, name), entry)?;
            let held = parent.iter().flat_map(|parent| &parent.channels);
            let held = held
                .into_iter()
                .find(|held| held.name == name && held.version == entry.version && held.kept == kept);
            let own = || Channel { name, origin: ordinal, version: entry.version, kept };
            channels.push(held.cloned().unwrap_or_else(own));
        }
        let tasks = tuple.writes.iter().map(|task| self.task(state, chain.key, task));
        let tasks = tasks.collect::<Result<Vec<_>>>()?;
        let from = parent.as_deref().map(|parent| (parent.ordinal, &parent.tasks[..]));
        let record = self.record(state, (&tuple.checkpoint, &tuple.metadata), from, &channels, ordinal)?;
        checkpoints::add(db, chain.key, ordinal, id, &record)?;
        if !tasks.is_empty() {
            checkpoints::set_tasks(db, chain.key, ordinal, &tasks)?;
        }
        let node = Node { ordinal, id, channels, counters: record.counters, tasks };
        state.moved(&tuple.namespace, chain, node);
        Ok(())
    }

    /// Gives a thread that was written in pieces its name, in place of the thread that has it.
    pub(crate) fn name_thread(&mut self, naming: &Naming) -> Result<()> {
        let Naming { token, thread, mark, .. } = naming;
        if Mark::of(&self.db, thread)? != *mark {
            return Err(Error::Stale { thread: thread.clone() });
        }
        self.threads.forget(thread);
        let Some(token) = token else {
            return mark.as_ref().map_or(Ok(()), |mark| self.drop_thread(mark.thread.key));
        };
        if let Some(mark) = mark {
            self.leave_to_be_cleared(mark.thread.key)?;
        }
        self.threads.forget(&token.as_str().into());
        let Some(written) = directory::find_unnamed(&self.db, token)? else {
            return Err(unavailable(SWEPT));
        };
        directory::name(&self.db, written.key, thread)
    }

    /// Deletes a thread that has no name yet, if it exists.
    pub(crate) fn discard(&mut self, token: &str) -> Result<()> {
        self.threads.forget(&token.into());
        match directory::find_unnamed(&self.db, token)? {
            Some(thread) => self.drop_thread(thread.key),
            None => Ok(()),
        }
    }
}

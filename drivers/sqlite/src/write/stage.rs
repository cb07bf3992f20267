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
use threadkeep::saver::{Outline, Revision, Rewrite, ThreadImage};
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
use crate::write::commit::{Work, WriterState, not_found};
use crate::write::remains::{Clearing, Unfinished, pause};
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
    /// Whether this is the first one.
    first: bool,
    tuples: Arc<[CheckpointTuple]>,
    /// How many of them are stored already.
    from: usize,
    /// How many are stored after this transaction. The first one of a thread can have more elements than fit into one:
    /// some of them are stored, and the next transaction finds them.
    done: Arc<AtomicUsize>,
}

#[cfg(test)]
impl Piece {
    /// A first piece without checkpoints.
    pub(crate) fn empty(token: &str) -> Self {
        Self { token: token.to_owned(), first: true, tuples: Arc::new([]), from: 0, done: Arc::default() }
    }
}

/// Cuts the checkpoints of a thread, by namespace and oldest first, into pieces.
struct Pieces {
    left: std::vec::IntoIter<CheckpointTuple>,
    most: usize,
    lists: Related,
}

impl Pieces {
    fn new(rewrite: Rewrite, most: usize) -> Self {
        let mut put = rewrite.put;
        put.sort_by(|a, b| (&a.namespace, a.checkpoint.id).cmp(&(&b.namespace, b.checkpoint.id)));
        Self { left: put.into_iter(), most, lists: Related::default() }
    }
}

impl Iterator for Pieces {
    type Item = Vec<CheckpointTuple>;

    fn next(&mut self) -> Option<Vec<CheckpointTuple>> {
        let mut piece: Vec<_> = self.left.by_ref().take(self.most).collect();
        for tuple in &mut piece {
            for (channel, entry) in &mut tuple.checkpoint.channels {
                entry.stored = self.lists.stored(&tuple.namespace, channel, entry.version, &entry.stored);
            }
        }
        (!piece.is_empty()).then_some(piece)
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
        let name = thread.clone();
        if self.read(move |db| directory::find_thread(db, &name)).await?.is_some() {
            return Err(Error::Stale { thread: thread.clone() });
        }
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

    async fn write_and_name(&self, rewrite: Rewrite, mut naming: Naming) -> Result<()> {
        let mut unfinished = Unfinished { turns: &self.writer, order: None };
        if !rewrite.put.is_empty() {
            let token = IdSource::default().checkpoint_after(None).to_string();
            unfinished.order = Some(Work::Discard(token.clone()));
            naming.token = Some(token.clone());
            let mut first = true;
            for tuples in Pieces::new(rewrite, self.options.piece()) {
                let (tuples, done) = (Arc::<[_]>::from(tuples), Arc::<AtomicUsize>::default());
                loop {
                    let from = done.load(Ordering::Acquire);
                    if from == tuples.len() {
                        break;
                    }
                    let (token, tuples, done) = (token.clone(), tuples.clone(), done.clone());
                    let piece = Piece { token, first, tuples, from, done };
                    match self.write(Work::Stage(Box::new(piece))).await {
                        // Nobody sees this piece, whether it was stored or not.
                        Err(Error::InDoubt { saver, reason }) => {
                            return Err(Error::Unavailable { saver, reason });
                        }
                        written => written?,
                    }
                    first = false;
                    pause().await;
                }
            }
        }
        unfinished.order.get_or_insert_with(|| Work::Clear(Clearing::default()));
        let named = self.write(Work::Name(Box::new(naming))).await;
        if matches!(named, Ok(()) | Err(Error::InDoubt { .. })) {
            unfinished.order = None;
        }
        named?;
        self.writer.clear().await;
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
            match self.stage_one(&mut state, &thread, tuple) {
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

    fn stage_one(&self, state: &mut ThreadState, thread: &ThreadId, tuple: &CheckpointTuple) -> Result<()> {
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
                let row = row.ok_or_else(|| not_found(thread, parent))?;
                Some(state.node(db, &self.names, thread, chain, &row)?)
            }
        };
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
        if let Some(mark) = mark {
            self.threads.forget(thread);
            self.leave_to_be_cleared(mark.thread.key)?;
        }
        let Some(token) = token else { return Ok(()) };
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

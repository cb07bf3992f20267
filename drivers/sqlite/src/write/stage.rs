//! Writing a long new thread piece by piece, so that other commands get their turn in between.
//!
//! The pieces go to a thread that no method of the contract finds, and the last transaction gives it its name: readers
//! see all of it or nothing. What a process leaves when it ends in between is found by the check and deleted by the
//! sweep, see [`directory::is_being_made`].

use std::collections::HashMap;
use std::sync::Arc;

use threadkeep::checkpoint::{CheckpointTuple, Stored};
use threadkeep::id::{ChannelName, IdSource, Namespace, ThreadId, Version};
use threadkeep::saver::Rewrite;
use threadkeep::value::{ChannelValue, ListValue};
use threadkeep::{Error, Result};

use crate::error::{SWEPT, unavailable};
use crate::read::view::Channel;
use crate::rows::checkpoints;
use crate::rows::directory::{self, ThreadKey};
use crate::rows::element;
use crate::saver::SqliteSaver;
use crate::write::commit::{Work, WriterState, not_found};
use crate::write::thread::{Node, ThreadState};

/// The most bytes of writes in a piece, except for a single checkpoint with more.
const BYTES: usize = 512 << 10;

/// A part of a thread that is being written.
#[derive(Debug)]
pub(crate) struct Piece {
    /// Identifies the thread until it has its name.
    token: String,
    /// Whether this is the first one.
    first: bool,
    tuples: Vec<CheckpointTuple>,
}

#[cfg(test)]
impl Piece {
    /// A first piece without checkpoints.
    pub(crate) fn empty(token: &str) -> Self {
        Self { token: token.to_owned(), first: true, tuples: Vec::new() }
    }
}

/// Cuts the checkpoints of a thread, by namespace and oldest first, into pieces.
struct Pieces {
    left: std::vec::IntoIter<CheckpointTuple>,
    most: usize,
    /// The latest list of each channel: one that extends it is related to it, so that only its end is looked at.
    lists: HashMap<(Namespace, ChannelName), (Version, ListValue)>,
}

impl Pieces {
    fn new(rewrite: Rewrite, most: usize) -> Self {
        let mut put = rewrite.put;
        put.sort_by(|a, b| (&a.namespace, a.checkpoint.id).cmp(&(&b.namespace, b.checkpoint.id)));
        Self { left: put.into_iter(), most, lists: HashMap::new() }
    }

    fn relate(&mut self, tuple: &mut CheckpointTuple) {
        for (name, entry) in &mut tuple.checkpoint.channels {
            let (Stored::Value(ChannelValue::List(list)) | Stored::Snapshot(ChannelValue::List(list))) =
                &mut entry.stored
            else {
                continue;
            };
            let place = (tuple.namespace.clone(), name.clone());
            if let Some((version, known)) = self.lists.get(&place)
                && list.starts_with(known)
            {
                let mut grown = known.clone();
                grown.rebase(*version);
                list.iter_from(known.len()).for_each(|element| grown.push(element.clone()));
                *list = grown;
            }
            self.lists.insert(place, (entry.version, list.clone()));
        }
    }
}

impl Iterator for Pieces {
    type Item = Vec<CheckpointTuple>;

    fn next(&mut self) -> Option<Vec<CheckpointTuple>> {
        let (mut piece, mut bytes) = (Vec::new(), 0);
        while piece.len() < self.most && bytes < BYTES {
            let Some(mut tuple) = self.left.next() else { break };
            self.relate(&mut tuple);
            let writes = tuple.writes.iter().flat_map(|row| &row.writes);
            bytes += writes.map(|write| write.value.encoded_len()).sum::<usize>();
            piece.push(tuple);
        }
        (!piece.is_empty()).then_some(piece)
    }
}

/// Deletes the pieces of a thread that was not completed, also if its future is dropped.
struct Unfinished<'a> {
    saver: &'a SqliteSaver,
    token: Option<String>,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Some(token) = self.token.take() {
            self.saver.writer.order(Work::Discard(token));
        }
    }
}

impl SqliteSaver {
    /// Writes a thread that does not exist yet.
    pub(crate) async fn write_in_pieces(
        &self,
        thread: &ThreadId,
        rewrite: Rewrite,
        most: usize,
    ) -> Result<()> {
        let name = thread.clone();
        if self.read(move |db| directory::find_thread(db, &name)).await?.is_some() {
            return Err(Error::Stale { thread: thread.clone() });
        }
        rewrite.check(thread, std::collections::BTreeMap::new())?;
        let token = IdSource::default().checkpoint_after(None).to_string();
        let mut unfinished = Unfinished { saver: self, token: Some(token.clone()) };
        for (number, tuples) in Pieces::new(rewrite, most).enumerate() {
            let piece = Piece { token: token.clone(), first: number == 0, tuples };
            match self.write(Work::Stage(Box::new(piece))).await {
                // Nobody sees this piece, whether it was stored or not.
                Err(Error::InDoubt { saver, reason }) => return Err(Error::Unavailable { saver, reason }),
                written => written?,
            }
        }
        let named = self.write(Work::Name(token, thread.clone())).await;
        if matches!(named, Ok(()) | Err(Error::InDoubt { .. })) {
            unfinished.token = None;
        }
        named
    }
}

impl WriterState {
    /// Writes a piece.
    pub(crate) fn stage(&mut self, piece: &Piece) -> Result<()> {
        let thread = ThreadId::from(piece.token.as_str());
        let mut state = match (self.threads.take(&self.db, &thread)?, piece.first) {
            (Some(state), _) => state,
            (None, true) => ThreadState::new(directory::add_unnamed(&self.db, &piece.token)?),
            (None, false) => ThreadState::new(self.unnamed(&piece.token)?),
        };
        for tuple in &piece.tuples {
            self.stage_one(&mut state, &thread, tuple)?;
        }
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

    /// Gives a thread that was written in pieces its name.
    pub(crate) fn name_thread(&mut self, token: &str, thread: &ThreadId) -> Result<()> {
        if directory::find_thread(&self.db, thread)?.is_some() {
            return Err(Error::Stale { thread: thread.clone() });
        }
        let key = self.unnamed(token)?;
        self.threads.take(&self.db, &token.into())?;
        directory::name(&self.db, key, thread)
    }

    /// Deletes a thread that has no name yet, if it exists.
    pub(crate) fn discard(&mut self, token: &str) -> Result<()> {
        self.threads.take(&self.db, &token.into())?;
        match directory::find_unnamed(&self.db, token)? {
            Some(key) => self.drop_thread(key),
            None => Ok(()),
        }
    }

    /// Deletes the rows of a thread.
    pub(crate) fn drop_thread(&self, key: ThreadKey) -> Result<()> {
        for (_, chain) in directory::chains(&self.db, key)? {
            checkpoints::drop_chain(&self.db, chain.key)?;
        }
        element::drop_thread(&self.db, key)?;
        directory::drop_thread(&self.db, key)
    }

    fn unnamed(&self, token: &str) -> Result<ThreadKey> {
        directory::find_unnamed(&self.db, token)?.ok_or_else(|| unavailable(SWEPT))
    }
}

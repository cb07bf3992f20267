//! Channel values to and from their stored forms.

use bytes::Bytes;
use threadkeep::Result;
use threadkeep::id::Version;
use threadkeep::value::{ChannelValue, Element, ElementHash, ListValue};
use threadkeep_layout::{Form, ListStore, plain};

use crate::error::{NO_ROOM, unavailable};
use crate::rows::directory::{ChainKey, ThreadKey};
use crate::rows::element::{Elements, Index, Space};
use crate::rows::record::NameKey;
use crate::sql::Db;
use crate::stats::Counters;

/// Names a stored list of a thread.
pub(crate) type ListKey = (ChainKey, NameKey, Version);

/// What may still be stored in the open transaction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    pub(crate) elements: usize,
    pub(crate) bytes: usize,
}

impl Room {
    /// No limit.
    pub(crate) const ANY: Self = Self { elements: usize::MAX, bytes: usize::MAX };

    /// Whether nothing more may be stored.
    pub(crate) fn is_full(self) -> bool {
        self.elements == 0 || self.bytes == 0
    }
}

/// Stores values of one thread.
pub(crate) struct Values<'a> {
    pub(crate) db: &'a Db,
    pub(crate) thread: ThreadKey,
    /// Read when it is needed.
    pub(crate) index: &'a mut Index,
    pub(crate) room: &'a mut Room,
    pub(crate) counters: &'a Counters,
}

impl Values<'_> {
    /// Stores an element.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if there is no room for it.
    pub(crate) fn element(&mut self, space: Space, element: &Element) -> Result<u32> {
        let (db, thread, counters) = (self.db, self.thread, self.counters);
        if let Some(seq) = self.index()?.find(space, element.hash(), counters) {
            return Ok(seq);
        }
        if self.room.is_full() {
            return Err(unavailable(NO_ROOM));
        }
        self.room.elements = self.room.elements.saturating_sub(1);
        self.room.bytes = self.room.bytes.saturating_sub(element.bytes().len());
        self.index()?.add(db, thread, space, element, counters)
    }

    fn index(&mut self) -> Result<&mut Index> {
        self.index.complete(self.db, self.thread)?;
        Ok(self.index)
    }
}

impl ListStore for Values<'_> {
    fn find(&mut self, hash: &ElementHash) -> Result<Option<u32>> {
        let counters = self.counters;
        Ok(self.index()?.find(Space::Values, hash, counters))
    }

    fn add(&mut self, element: &Element) -> Result<u32> {
        self.element(Space::Values, element)
    }

    fn add_chunk(&mut self, chunk: Bytes) -> Result<u32> {
        self.element(Space::Chunks, &Element::from_bytes(chunk))
    }
}

/// Reads a value. A list of a channel is marked as stored under `version`.
pub(crate) fn load(
    form: &Form,
    version: Option<Version>,
    elements: &mut Elements<'_>,
) -> Result<ChannelValue> {
    let mut list: ListValue = match form {
        Form::Plain(bytes) => return Ok(plain(bytes.clone())),
        Form::Shared(seq) => return Ok(plain(elements.get(Space::Values, *seq)?.bytes().clone())),
        Form::Tiny(elements) => elements.iter().cloned().map(Element::from_bytes).collect(),
        Form::List(manifest) => {
            let runs = elements.runs(manifest)?;
            elements.get_all(Space::Values, &runs)?.into_iter().collect()
        }
    };
    if let Some(version) = version {
        list.rebase(version);
    }
    Ok(list.into())
}

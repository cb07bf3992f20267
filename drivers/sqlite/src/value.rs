//! Channel values to and from their stored forms.

use bytes::Bytes;
use threadkeep::Result;
use threadkeep::id::Version;
use threadkeep::value::{ChannelValue, Codec, Element, Encoded, ListValue, Part};

use crate::directory::{ChainKey, ThreadKey};
use crate::element::{Elements, Index, Space};
use crate::manifest::{Builder, Shape, parts_fit};
use crate::record::{Form, NameKey};
use crate::sql::Db;
use crate::stats::Counters;

/// Values up to so many bytes stand where they are used; a row of their own would cost more.
pub(crate) const INLINE: usize = 32;

/// Names a stored list of a thread.
pub(crate) type ListKey = (ChainKey, NameKey, Version);

/// Stores values of one thread.
pub(crate) struct Values<'a> {
    pub(crate) db: &'a Db,
    pub(crate) thread: ThreadKey,
    /// Read when it is first needed.
    pub(crate) index: &'a mut Option<Index>,
    pub(crate) counters: &'a Counters,
}

impl Values<'_> {
    /// Stores an element.
    pub(crate) fn element(&mut self, space: Space, element: &Element) -> Result<u32> {
        let (db, thread, counters) = (self.db, self.thread, self.counters);
        self.index()?.store(db, thread, space, element, counters)
    }

    fn index(&mut self) -> Result<&mut Index> {
        if self.index.is_none() {
            *self.index = Some(Index::load(self.db, self.thread)?);
        }
        Ok(self.index.get_or_insert_default())
    }

    /// Stores a value. `base` finds what is remembered of the list that it was made from. For a list that was cut
    /// into elements, also answers what is to be remembered of it.
    pub(crate) fn store<'s>(
        &mut self,
        value: &ChannelValue,
        base: impl FnOnce(Version) -> Option<&'s Shape>,
    ) -> Result<(Form, Option<Shape>)> {
        let list = match value {
            ChannelValue::Plain(Encoded { codec: Codec::MessagePack, bytes }) if bytes.len() <= INLINE => {
                return Ok((Form::Plain(bytes.clone()), None));
            }
            ChannelValue::Plain(Encoded { codec: Codec::MessagePack, bytes }) => {
                let seq = self.element(Space::Values, &Element::from_bytes(bytes.clone()))?;
                return Ok((Form::Shared(seq), None));
            }
            ChannelValue::List(list) => list,
        };
        if let Some(elements) = tiny(list) {
            return Ok((Form::Tiny(elements), None));
        }
        let counters = self.counters;
        let builder = match list.base().and_then(base) {
            Some(base) if is_base(list, base, self.index()?, counters) => self.changes(list, base)?,
            _ => self.by_hashes(list)?,
        };
        let shape = builder.finish(|chunk| {
            self.element(Space::Chunks, &Element::from_bytes(Bytes::copy_from_slice(chunk)))
        })?;
        Ok((Form::List(shape.manifest()), Some(shape)))
    }

    /// Looks at the new elements only.
    fn changes(&mut self, list: &ListValue, base: &Shape) -> Result<Builder> {
        let mut builder = Builder::default();
        let mut at = 0;
        for part in list.parts() {
            match *part {
                Part::Base { start, len } => {
                    builder.take(base, start, len);
                    at += len;
                }
                Part::New { len } => {
                    for element in list.iter_from(at).take(len) {
                        builder.push(self.element(Space::Values, element)?);
                    }
                    at += len;
                }
            }
        }
        Ok(builder)
    }

    /// Looks at every element.
    fn by_hashes(&mut self, list: &ListValue) -> Result<Builder> {
        let mut builder = Builder::default();
        for element in list.iter() {
            builder.push(self.element(Space::Values, element)?);
        }
        Ok(builder)
    }
}

/// Whether `list` was made from the list behind `base`: its parts fit, and the elements at their borders are the
/// same. A version alone does not tell: a list can be carried from one channel to another.
fn is_base(list: &ListValue, base: &Shape, index: &Index, counters: &Counters) -> bool {
    let mut at = 0;
    let same = |place: usize, seq: Option<u32>| {
        let element = list.get(place);
        element.is_some_and(|e| seq.is_some() && index.find(Space::Values, e.hash(), counters) == seq)
    };
    parts_fit(list.parts(), base.len())
        && list.parts().iter().all(|part| match *part {
            Part::Base { start, len } => {
                at += len;
                same(at - len, base.seq_at(start)) && same(at - 1, base.seq_at(start + len - 1))
            }
            Part::New { len } => {
                at += len;
                true
            }
        })
        && at == list.len()
}

/// The elements of a list that is smaller than the manifest and rows of it would be.
fn tiny(list: &ListValue) -> Option<Vec<Bytes>> {
    if list.len() > INLINE {
        return None;
    }
    let mut size = 0;
    list.iter()
        .map(|element| {
            size += element.bytes().len() + 1;
            (size <= INLINE).then(|| element.bytes().clone())
        })
        .collect()
}

/// Reads a value. A list is told to be stored under `version`, if it is a channel's.
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

fn plain(bytes: Bytes) -> ChannelValue {
    ChannelValue::Plain(Encoded { codec: Codec::MessagePack, bytes })
}

//! A thread that is being changed: values become rows of elements, and what is stored already is referred to.

use bytes::Bytes;
use serde_json::Value as Json;
use threadkeep::checkpoint::{Stored, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, ThreadId, Version};
use threadkeep::metadata::{self, Entries, Metadata};
use threadkeep::value::{Element, ElementHash};
use threadkeep::{Error, Result};
use threadkeep_layout::{
    Builder, Decoder, Form, INLINE, ListStore, NUMBER_LIMIT, Numbers, Rest, Shape, draft, draft_entries,
    encode_names, put_uint,
};

use crate::element;
use crate::keys::{self, Space};
use crate::memo::{self, Known, Memo};
use crate::overlay::Overlay;
use crate::reader::{Reader, thread};
use crate::record::{CheckpointRecord, Extra, Kept, Mark, TaskRecord, ThreadRecord, WriteRecord};
use crate::rows;

/// A thread that is being changed. Nothing of it is stored before [`Draft::done`].
pub(crate) struct Draft<'t, 'o> {
    pub(crate) rows: &'t mut Overlay<'o>,
    pub(crate) id: ThreadId,
    pub(crate) thread: ThreadRecord,
    memo: &'t Memo,
    /// What the memo is given in the end.
    stored: memo::Stored,
}

impl<'t, 'o> Draft<'t, 'o> {
    /// Changes a thread, if it exists.
    pub(crate) fn of(rows: &'t mut Overlay<'o>, id: &ThreadId, memo: &'t Memo) -> Result<Option<Self>> {
        let found = thread(rows, id)?;
        Ok(found.map(|thread| Self { rows, id: id.clone(), thread, memo, stored: memo::Stored::default() }))
    }

    /// Changes a thread, which begins if it does not exist.
    pub(crate) fn of_any(rows: &'t mut Overlay<'o>, id: &ThreadId, memo: &'t Memo) -> Result<Self> {
        let thread = match thread(rows, id)? {
            Some(thread) => thread,
            None => {
                ThreadRecord { number: next_number(rows)?, mark: Mark::default(), next: [0; 3], tasks: 0 }
            }
        };
        Ok(Self { rows, id: id.clone(), thread, memo, stored: memo::Stored::default() })
    }

    pub(crate) fn reader(&self) -> Reader<'_> {
        Reader::new(&*self.rows, &self.id, &self.thread)
    }

    /// Stores that the thread was changed. `mark` is a new one.
    pub(crate) fn done(mut self, mark: Mark) {
        let from = std::mem::replace(&mut self.thread.mark, mark);
        rows::put(self.rows, keys::thread(&self.id), self.thread.encode());
        self.memo.note(self.thread.number, (from, mark), self.stored);
    }

    /// The number of an element, which is added if the thread does not have it.
    fn element(&mut self, space: Space, element: &Element) -> Result<u32> {
        let thread = self.thread.number;
        if let Some(number) = element::find(self.rows, thread, space, element.hash())? {
            return Ok(number);
        }
        let next = &mut self.thread.next[space as usize];
        let number = *next;
        if number >= NUMBER_LIMIT {
            return Err(Error::InvalidInput(format!("thread {} cannot hold more elements", self.id)));
        }
        *next += 1;
        rows::put(self.rows, keys::element(thread, space, number), element::encode(element)?);
        let mut value = Vec::new();
        put_uint(&mut value, number);
        self.rows.put(keys::index(thread, space, element.hash()), value);
        Ok(number)
    }

    /// What is stored for a channel that is not held, and the shape of its list. `base` is the shape of the list that it
    /// was made from, if that is known.
    pub(crate) fn kept(&mut self, stored: &Stored, base: Option<&Shape>) -> Result<(Kept, Option<Shape>)> {
        let mut value = |value| draft(self, value, |_| base).map(|stored| (stored.form, stored.shape));
        Ok(match stored {
            Stored::Value(whole) => value(whole).map(|(form, shape)| (Kept::Value(form), shape))?,
            Stored::Snapshot(whole) => value(whole).map(|(form, shape)| (Kept::Snapshot(form), shape))?,
            // One without a parent was refused before.
            Stored::Sentinel | Stored::Held => (Kept::Sentinel(()), None),
        })
    }

    /// Where the elements of a list are that was stored last for its channel, if that is remembered.
    pub(crate) fn remembered(&self, channel: &(Namespace, ChannelName), version: Version) -> Option<Shape> {
        self.memo.list(self.thread.number, self.thread.mark, channel, version)
    }

    /// Remembers what is stored under this version: a list, or a value whose elements are not stored.
    pub(crate) fn remember(
        &mut self,
        channel: (Namespace, ChannelName),
        version: Version,
        shape: Option<Shape>,
    ) {
        self.stored.lists.insert(channel, (version, shape));
    }

    /// A checkpoint's record with its metadata and nothing else.
    pub(crate) fn described(&mut self, metadata: &Metadata) -> Result<CheckpointRecord> {
        Ok(CheckpointRecord {
            parent: None,
            source: metadata.source,
            step: metadata.step,
            delta_marker: metadata.delta_marker,
            next: Vec::new(),
            applied: Vec::new(),
            parents: metadata.parents.iter().map(|(namespace, id)| (namespace.to_string(), *id)).collect(),
            counters: metadata.counters.clone(),
            extra: self.extra(&metadata.extra)?,
            channels: std::collections::BTreeMap::new(),
        })
    }

    /// `extra` metadata. It is mostly the same for all checkpoints of a run, so it is stored once and referred to; large
    /// objects, to which notes add an entry per run, are stored by entry.
    fn extra(&mut self, extra: &metadata::Extra) -> Result<Extra> {
        let (rest, large) = extra.split();
        let mut maps = Vec::with_capacity(large.len());
        for (key, entries) in large {
            let known = self.object(&key, entries)?;
            maps.push((key.clone(), known.shape.manifest()));
            self.stored.objects.insert(key, known);
        }
        if rest.is_empty() {
            return Ok(Extra { rest: Rest::Empty, maps });
        }
        let element = Element::from_json(&Json::Object(rest))?;
        let rest = if element.bytes().len() <= INLINE {
            Rest::Inline(element.bytes().clone())
        } else {
            Rest::Shared(self.element(Space::Structure, &element)?)
        };
        Ok(Extra { rest, maps })
    }

    fn object(&mut self, key: &str, entries: Entries) -> Result<Known> {
        let known = self.stored.objects.remove(key);
        let known = known.or_else(|| self.memo.object(self.thread.number, self.thread.mark, key));
        let last = known.as_ref().and_then(|known| Some((&known.entries, known.shape.last()?)));
        let (numbers, mut bytes) =
            draft_entries(&entries, last, |element| self.element(Space::Entries, element))?;
        let mut builder = Builder::default();
        let numbers = match (numbers, &known) {
            (Numbers::Behind(more), Some(known)) => {
                builder.take(&known.shape, 0, known.shape.len());
                bytes += known.bytes;
                more
            }
            (Numbers::Behind(all) | Numbers::All(all), _) => all,
        };
        for number in numbers {
            builder.push(number);
        }
        let shape = builder.finish(|chunk| self.add_chunk(Bytes::copy_from_slice(chunk)))?;
        Ok(Known { entries, bytes, shape })
    }

    /// Stores a checkpoint.
    pub(crate) fn put(
        &mut self,
        (namespace, id): (&Namespace, CheckpointId),
        record: &CheckpointRecord,
    ) -> Result<()> {
        let names = encode_names(record.names().into_iter().collect::<Vec<_>>().into_iter());
        let names = self.element(Space::Structure, &Element::from_bytes(names.into()))?;
        rows::put(self.rows, keys::checkpoint(self.thread.number, namespace, id), record.encode(names));
        Ok(())
    }

    /// Stores the writes of a task: in the place that it had, or after all others.
    pub(crate) fn put_task(
        &mut self,
        (namespace, id): (&Namespace, CheckpointId),
        task: &TaskWrites,
        place: Option<u64>,
    ) -> Result<()> {
        let mut writes = Vec::with_capacity(task.writes.len());
        for write in &task.writes {
            let value = draft(self, &write.value, |_| None)?.form;
            writes.push(WriteRecord { channel: write.channel.clone(), overwrite: write.overwrite, value });
        }
        let place = if let Some(place) = place {
            place
        } else {
            let next = self.thread.tasks.checked_add(1);
            let full = || Error::InvalidInput(format!("thread {} cannot hold more tasks", self.id));
            self.thread.tasks = next.ok_or_else(full)?;
            self.thread.tasks
        };
        let record = TaskRecord { place, node: task.node.clone(), index: task.index, writes };
        rows::put(self.rows, keys::task(self.thread.number, namespace, id, task.task), record.encode());
        Ok(())
    }
}

impl ListStore for Draft<'_, '_> {
    fn find(&mut self, hash: &ElementHash) -> Result<Option<u32>> {
        element::find(self.rows, self.thread.number, Space::Values, hash)
    }

    fn add(&mut self, element: &Element) -> Result<u32> {
        self.element(Space::Values, element)
    }

    fn add_chunk(&mut self, chunk: Bytes) -> Result<u32> {
        self.element(Space::Structure, &Element::from_bytes(chunk))
    }
}

/// A number that no thread had.
fn next_number(rows: &mut Overlay<'_>) -> Result<u64> {
    let key = keys::next_thread();
    let number = match rows::get(rows, &key)? {
        Some(body) => Decoder::new(&body).uint().map_err(|reason| rows::corrupt(&key, reason))?,
        None => 1,
    };
    let mut next = Vec::new();
    let full = || Error::InvalidInput("the store cannot hold more threads".to_owned());
    put_uint(&mut next, number.checked_add(1).ok_or_else(full)?);
    rows::put(rows, key, next);
    Ok(number)
}

/// What a record says of the list that another one was made from.
pub(crate) enum Base {
    /// Where its elements are.
    List(Shape),
    /// It was not cut into elements: there is nothing to refer to.
    Whole,
    /// It is not there.
    Elsewhere,
}

/// What a record stores of a channel under this version.
pub(crate) fn shape(
    reader: &mut Reader<'_>,
    record: &CheckpointRecord,
    channel: &ChannelName,
    version: Version,
) -> Result<Base> {
    let entry = record.channels.get(channel).filter(|entry| entry.version == version);
    Ok(match entry.and_then(|entry| entry.kept.form()) {
        Some(Form::List(manifest)) => Base::List(Shape::stored(manifest, |number| reader.chunk(number))?),
        Some(_) => Base::Whole,
        None => Base::Elsewhere,
    })
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Arc;

    use serde_json::Map;
    use threadkeep::metadata::Entry;

    use super::*;
    use crate::store::{Order, Snapshot, Visit};

    struct Nothing;

    impl Snapshot for Nothing {
        fn get(&self, _: &[u8]) -> Result<Option<Vec<u8>>> {
            Ok(None)
        }

        fn range(&self, _: Range<&[u8]>, _: Order, _: &mut Visit<'_>) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn numbers_that_are_used_up_are_refused() {
        let (mut rows, memo, id) = (Overlay::new(&Nothing), Memo::default(), ThreadId::from("t"));
        let mut last = Vec::new();
        put_uint(&mut last, u64::MAX);
        rows::put(&mut rows, keys::next_thread(), last);
        let refused = Draft::of_any(&mut rows, &id, &memo).err();
        assert!(matches!(refused, Some(Error::InvalidInput(_))), "{refused:?}");

        let thread = ThreadRecord { number: 1, mark: Mark::default(), next: [0; 3], tasks: u64::MAX };
        rows::put(&mut rows, keys::thread(&id), thread.encode());
        let mut draft = Draft::of(&mut rows, &id, &memo).unwrap().unwrap();
        let task = TaskWrites {
            task: threadkeep::id::TaskId::from_bytes([1; 16]),
            node: "model".into(),
            index: 0,
            writes: Vec::new(),
        };
        let refused = draft.put_task((&Namespace::root(), CheckpointId::from_bytes([1; 16])), &task, None);
        assert!(matches!(refused, Err(Error::InvalidInput(_))), "{refused:?}");
    }

    /// Without the values, a few threads with long ones would fill the memory.
    #[test]
    fn an_object_is_remembered_with_the_size_of_its_values() {
        let (mut rows, memo, id) = (Overlay::new(&Nothing), Memo::default(), ThreadId::from("t"));
        let long = |name: String| -> Entry { (name.into(), Arc::new(Json::from("x".repeat(1_000)))) };
        let mut entries: Entries = (0..8).map(|n| long(n.to_string())).collect();
        for (mark, sizes) in [([1; 16], 9_000..9_500), ([2; 16], 10_000..10_500)] {
            entries.insert(long(format!("with mark {}", mark[0])));
            let extra = metadata::Extra::sharing(Map::new(), vec![("notes".to_owned(), entries.clone())]);
            let mut draft = Draft::of_any(&mut rows, &id, &memo).unwrap();
            draft.extra(&extra).unwrap();
            let number = draft.thread.number;
            draft.done(mark);
            let known = memo.object(number, mark, "notes").unwrap();
            assert!(sizes.contains(&known.bytes), "{} bytes", known.bytes);
        }
    }
}

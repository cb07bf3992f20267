//! The contract's `rewrite_thread`, and the sweep of the elements that nothing refers to afterwards.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;

use threadkeep::checkpoint::{CheckpointTuple, Stored};
use threadkeep::id::{ChannelName, Namespace, ThreadId, Version};
use threadkeep::saver::{Outline, Revision, Rewrite};
use threadkeep::value::{ChannelValue, ListValue};
use threadkeep::{Error, Result};
use threadkeep_layout::{Decoder, Form, Related, Rest, Run, Shape};

use crate::change::{delete_thread, delete_under};
use crate::draft::Draft;
use crate::keys::{self, SPACES, Space, under};
use crate::memo::Memo;
use crate::overlay::Overlay;
use crate::queries::records;
use crate::reader::{Reader, revision, thread};
use crate::record::{CheckpointRecord, Mark, StoredChannel, TaskRecord};
use crate::rows;
use crate::store::Order;

pub(crate) fn rewrite_thread(
    rows: &mut Overlay<'_>,
    memo: &Memo,
    id: &ThreadId,
    (expected, rewrite): (&Revision, &Rewrite),
    mark: Mark,
) -> Result<()> {
    let found = thread(rows, id)?;
    if found.as_ref().map_or_else(Revision::absent, revision) != *expected {
        return Err(Error::Stale { thread: id.clone() });
    }
    let mut stored = BTreeMap::new();
    if let Some(found) = &found {
        let mut reader = Reader::new(&*rows, id, found);
        for (namespace, id, record) in records(&mut reader)? {
            let tasks = reader.tasks(&namespace, id)?.into_iter().map(|(task, _)| task).collect();
            let outline = Outline { parent: record.parent, applied: record.applied, tasks };
            stored.insert((namespace, id), outline);
        }
    }
    let mut left = stored.len();
    rewrite.check(id, stored.clone())?;
    if rewrite.is_empty() {
        return Ok(());
    }
    left -= rewrite.remove.len();
    if left == 0 && rewrite.put.is_empty() {
        return delete_thread(rows, memo, id);
    }

    let mut draft = Draft::of_any(rows, id, memo)?;
    let number = draft.thread.number;
    for (namespace, id) in &rewrite.remove {
        draft.rows.delete(keys::checkpoint(number, namespace, *id));
        delete_under(draft.rows, keys::tasks(number, namespace, *id))?;
    }
    let mut puts: Vec<_> = rewrite.put.iter().collect();
    puts.sort_by_key(|tuple| (&tuple.namespace, tuple.checkpoint.id));
    let mut lists = Lists::default();
    for tuple in puts {
        put(&mut draft, &mut lists, tuple)?;
    }
    sweep(&mut draft)?;
    memo.forget(number);
    draft.done(mark);
    Ok(())
}

/// Stores a checkpoint, in place of the one with its id.
fn put(draft: &mut Draft<'_, '_>, lists: &mut Lists, tuple: &CheckpointTuple) -> Result<()> {
    let (namespace, id) = (&tuple.namespace, tuple.checkpoint.id);
    delete_under(draft.rows, keys::tasks(draft.thread.number, namespace, id))?;
    let mut channels = BTreeMap::new();
    for (channel, entry) in &tuple.checkpoint.channels {
        let kept = lists.kept(draft, (namespace, channel), entry.version, &entry.stored)?;
        channels.insert(channel.clone(), StoredChannel { version: entry.version, kept });
    }
    let record = CheckpointRecord {
        parent: tuple.parent,
        next: tuple.checkpoint.next.clone(),
        applied: tuple.checkpoint.applied.clone(),
        channels,
        ..draft.described(&tuple.metadata)?
    };
    for task in &tuple.writes {
        draft.put_task((namespace, id), task, None)?;
    }
    draft.put((namespace, id), &record)
}

/// The previous list of each channel, and its shape.
#[derive(Default)]
struct Lists {
    related: Related,
    shapes: HashMap<(Namespace, ChannelName), (Version, Shape)>,
}

impl Lists {
    fn kept(
        &mut self,
        draft: &mut Draft<'_, '_>,
        (namespace, channel): (&Namespace, &ChannelName),
        version: Version,
        stored: &Stored,
    ) -> Result<crate::record::Kept> {
        let stored = self.related.stored(namespace, channel, version, stored);
        let base = stored.value().and_then(ChannelValue::as_list).and_then(ListValue::base);
        let place = (namespace.clone(), channel.clone());
        let shape = self.shapes.remove(&place).filter(|(version, _)| Some(*version) == base);
        let (kept, shape) = draft.kept(&stored, shape.as_ref().map(|(_, shape)| shape))?;
        self.shapes.extend(shape.map(|shape| (place, (version, shape))));
        Ok(kept)
    }
}

/// Deletes the elements that no row refers to.
fn sweep(draft: &mut Draft<'_, '_>) -> Result<()> {
    let number = draft.thread.number;
    let mut used = Used::default();
    let mut reader = draft.reader();
    let snapshot = reader.rows();
    rows::each(snapshot, under(keys::checkpoints(number)), |key, body| {
        let names = CheckpointRecord::names_of(body).map_err(|reason| rows::corrupt(key, reason))?;
        used.one(Space::Structure, names);
        let record = reader.decode(key, body)?;
        if let Rest::Shared(rest) = record.extra.rest {
            used.one(Space::Structure, rest);
        }
        for (_, manifest) in &record.extra.maps {
            let refers = manifest.refers(|chunk| reader.chunk(chunk))?;
            used.runs(Space::Entries, &refers.elements);
            used.runs(Space::Structure, &refers.chunks);
        }
        record
            .channels
            .values()
            .filter_map(|entry| entry.kept.form())
            .try_for_each(|form| used.form(&mut reader, form))
    })?;
    rows::each(snapshot, under(keys::all_tasks(number)), |key, body| {
        let record = TaskRecord::decode(body).map_err(|reason| rows::corrupt(key, reason))?;
        record.writes.iter().try_for_each(|write| used.form(&mut reader, &write.value))
    })?;
    let mut dead = Vec::new();
    for space in SPACES {
        let used = used.of(space);
        let elements = under(keys::elements(number, space));
        snapshot.range(&elements.start..&elements.end, Order::Ascending, &mut |key, _| {
            if keys::element_number(number, space, key).is_none_or(|element| !is_in(&used, element)) {
                dead.push(key.to_vec());
            }
            Ok(ControlFlow::Continue(()))
        })?;
        let index = under(keys::all_indexed(number, space));
        snapshot.range(&index.start..&index.end, Order::Ascending, &mut |key, value| {
            if Decoder::new(value).u32().is_ok_and(|element| !is_in(&used, element)) {
                dead.push(key.to_vec());
            }
            Ok(ControlFlow::Continue(()))
        })?;
    }
    for key in dead {
        draft.rows.delete(key);
    }
    Ok(())
}

/// The elements that rows refer to.
#[derive(Default)]
struct Used([Vec<Run>; 3]);

impl Used {
    fn one(&mut self, space: Space, number: u32) {
        self.runs(space, &[Run { start: number, len: 1 }]);
    }

    fn runs(&mut self, space: Space, runs: &[Run]) {
        self.0[space as usize].extend_from_slice(runs);
    }

    fn form(&mut self, reader: &mut Reader<'_>, form: &Form) -> Result<()> {
        let refers = form.refers(|chunk| reader.chunk(chunk))?;
        self.runs(Space::Values, &refers.elements);
        self.runs(Space::Structure, &refers.chunks);
        Ok(())
    }

    /// Their runs, ascending and apart.
    fn of(&mut self, space: Space) -> Vec<Run> {
        let mut runs = std::mem::take(&mut self.0[space as usize]);
        runs.sort_by_key(|run| run.start);
        runs.dedup_by(|next, last| {
            let joins = next.start <= last.end();
            if joins {
                last.len = last.len.max(next.end() - last.start);
            }
            joins
        });
        runs
    }
}

fn is_in(runs: &[Run], number: u32) -> bool {
    let after = runs.partition_point(|run| run.start <= number);
    after.checked_sub(1).and_then(|at| runs.get(at)).is_some_and(|run| number < run.end())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_are_joined_and_found(runs in prop::collection::vec((0..60_u32, 1..8_u32), 0..20)) {
            let mut used = Used::default();
            for (start, len) in &runs {
                used.runs(Space::Values, &[Run { start: *start, len: *len }]);
            }
            let joined = used.of(Space::Values);
            for number in 0..70 {
                let expected = runs.iter().any(|(start, len)| (*start..start + len).contains(&number));
                prop_assert_eq!(is_in(&joined, number), expected);
            }
        }
    }
}

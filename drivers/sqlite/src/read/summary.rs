//! The contract's `summary`: reads rows, and of the elements only those that hold small metadata.

use threadkeep::Result;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::ThreadId;
use threadkeep::metadata::{Metadata, WRITES_KEY, may_be_duration_only};
use threadkeep::saver::{Counted, Counter, Summary};
use threadkeep_layout::Run;

use crate::rows::checkpoints::{self, CheckpointRow};
use crate::rows::directory::{self, Chain};
use crate::rows::element::{Elements, Space};
use crate::rows::extra;
use crate::rows::names::Names;
use crate::rows::record::{CheckpointRecord, Extra, NameKey, Ordinal, Rest, TaskRecord};
use crate::sql::Db;

/// Rows that are held at a time.
const PAGE: u32 = 1_024;

/// The contract's `summary`.
pub(crate) fn summary(db: &Db, names: &Names, thread: &ThreadId) -> Result<Summary> {
    let Some(found) = directory::thread(db, thread)? else { return Ok(Summary::new()) };
    let messages = names.find(db, MESSAGES_CHANNEL)?;
    let mut summary = Summary::new();
    for (namespace, Chain { key, .. }) in directory::chains(db, found.key)? {
        let (mut counter, mut below) = (Counter::default(), Ordinal::MAX);
        while below > 0 {
            let rows = checkpoints::newest_up_to(db, key, below, PAGE)?;
            below = rows.last().map_or(0, |oldest| oldest.ordinal.saturating_sub(1));
            for counted in page(Elements::new(db, found.key), &rows, messages)? {
                counter.add(thread, counted)?;
            }
        }
        summary.extend(counter.summary(thread)?.map(|chain| (namespace, chain)));
    }
    Ok(summary)
}

/// Rows of a chain, by their ordinals and the places of tasks among those of their parents.
fn page(
    mut elements: Elements<'_>,
    rows: &[CheckpointRow],
    messages: Option<NameKey>,
) -> Result<Vec<Counted<Ordinal, u32>>> {
    let decoded = rows.iter().map(|row| Ok((row, row.record()?, row.tasks()?)));
    let decoded: Vec<(&CheckpointRow, CheckpointRecord, Vec<TaskRecord>)> = decoded.collect::<Result<_>>()?;
    let rests = decoded.iter().filter_map(|(_, record, _)| match record.extra.rest {
        Rest::Shared(seq) => Some(Run { start: seq, len: 1 }),
        Rest::Empty | Rest::Inline(_) => None,
    });
    elements.load(Space::Metadata, &rests.collect::<Vec<_>>())?;
    let counted = decoded.into_iter().map(|(row, record, tasks)| {
        let is_of_messages = |(name, _): &(NameKey, _)| Some(*name) == messages;
        let delta = record.delta_marker || record.counters.iter().any(is_of_messages);
        Ok(Counted {
            place: row.ordinal,
            id: row.id,
            parent: record.parent,
            tasks: (0..).take(tasks.len()).collect(),
            writes: tasks.iter().map(|task| task.writes.len()).sum(),
            delta,
            note: is_note(&mut elements, &record)?,
            step: record.step,
            applied: record.applied,
        })
    });
    counted.collect()
}

/// Whether a checkpoint only notes how long a run took. Its metadata is decoded only if it may say so.
fn is_note(elements: &mut Elements<'_>, record: &CheckpointRecord) -> Result<bool> {
    let may = match &record.extra.rest {
        Rest::Empty => false,
        Rest::Inline(bytes) => may_be_duration_only(bytes),
        Rest::Shared(seq) => may_be_duration_only(elements.get(Space::Metadata, *seq)?.bytes()),
    };
    // It may also be so large that it is stored by entry.
    let maps: Vec<_> = record.extra.maps.iter().filter(|(key, _)| key == WRITES_KEY).cloned().collect();
    if !may && maps.is_empty() {
        return Ok(false);
    }
    let mut metadata = Metadata::new(record.source, record.step);
    metadata.extra = extra::load(&Extra { rest: record.extra.rest.clone(), maps }, elements)?;
    Ok(metadata.is_duration_only())
}

//! The duration-only checkpoint: how long a run took and which messages it created, noted on the head after the run.
//!
//! The note repeats the head and includes the maps of earlier runs, so that one trailing leaf answers every history
//! read, and no read has to write.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value as Json, json};
use threadkeep::Error;
use threadkeep::checkpoint::{CheckpointKey, INTERRUPT_CHANNEL};
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::metadata::{DURATION_NODE, Entries, Extra};
use threadkeep::saver::{Flush, ListQuery, Load, Saver};
use threadkeep::state::{StateAccessor, StateSnapshot};

/// Metadata key: run id -> whole seconds.
pub const RUN_DURATIONS: &str = "run_durations";
/// Metadata key: message id -> run id.
pub const RUN_MESSAGE_IDS: &str = "run_message_ids";
/// How often a note is tried on a moving head.
const ATTEMPTS: usize = 3;
/// Up to how many entries malformed ones are looked for.
const SEARCHED: usize = 256;
/// How many checkpoints back the newest maps are searched.
const LOOK_BACK: usize = 256;

/// What to note.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunNotes {
    /// Run id -> whole seconds.
    pub durations: BTreeMap<String, u64>,
    /// Message id -> run id.
    pub messages: BTreeMap<String, String>,
}

/// The maps in a checkpoint's metadata, shared with it, so that carrying them forward does not cost their length.
#[derive(Debug, Clone, Default)]
pub struct NotedMaps {
    durations: Entries,
    messages: Entries,
}

impl NotedMaps {
    fn of(extra: &Extra) -> Self {
        let object = |key| extra.object(key).unwrap_or_default();
        Self { durations: object(RUN_DURATIONS), messages: object(RUN_MESSAGE_IDS) }
    }

    fn durations(&self) -> impl Iterator<Item = (&str, u64)> {
        self.durations.iter().filter_map(|(run, seconds)| duration(run, seconds))
    }

    fn messages(&self) -> impl Iterator<Item = (&str, &str)> {
        self.messages.iter().filter_map(|(message, run)| message_run(message, run))
    }

    fn is_empty(&self) -> bool {
        self.durations().next().is_none() && self.messages().next().is_none()
    }

    /// Their contents, without malformed entries.
    fn notes(&self) -> RunNotes {
        RunNotes {
            durations: self.durations().map(|(run, seconds)| (run.to_owned(), seconds)).collect(),
            messages: self.messages().map(|(message, run)| (message.to_owned(), run.to_owned())).collect(),
        }
    }

    fn add(&mut self, notes: &RunNotes) {
        for (run, seconds) in &notes.durations {
            self.durations.insert((run.as_str().into(), Arc::new(json!(seconds))));
        }
        for (message, run) in &notes.messages {
            self.messages.insert((message.as_str().into(), Arc::new(json!(run))));
        }
    }

    /// Adds them to a checkpoint's metadata, without empty maps. Malformed entries are left out of small maps; in larger
    /// ones they stay, because readers skip them, and a search would cost a turn the length of its thread.
    pub fn carry_to(mut self, extra: &mut Extra) {
        if self.durations.len() <= SEARCHED && self.messages.len() <= SEARCHED {
            drop_entries(&mut self.durations, |run, seconds| duration(run, seconds).is_none());
            drop_entries(&mut self.messages, |message, run| message_run(message, run).is_none());
        }
        for (key, entries) in [(RUN_DURATIONS, self.durations), (RUN_MESSAGE_IDS, self.messages)] {
            if !entries.is_empty() {
                extra.insert_object(key, entries);
            }
        }
    }
}

/// A duration entry, if well-formed.
fn duration<'e>(run: &'e str, seconds: &Json) -> Option<(&'e str, u64)> {
    Some((run, seconds.as_u64()?)).filter(|(run, _)| !run.is_empty())
}

/// A message entry, if well-formed.
fn message_run<'e>(message: &'e str, run: &'e Json) -> Option<(&'e str, &'e str)> {
    Some((message, run.as_str()?)).filter(|(message, run)| !message.is_empty() && !run.is_empty())
}

fn drop_entries(entries: &mut Entries, unwanted: impl Fn(&str, &Json) -> bool) {
    let unwanted: Vec<Arc<str>> =
        entries.iter().filter(|(key, value)| unwanted(key, value)).map(|(key, _)| key.clone()).collect();
    for key in unwanted {
        entries.remove(&key);
    }
}

impl RunNotes {
    fn is_empty(&self) -> bool {
        self.durations.is_empty() && self.messages.is_empty()
    }

    /// The entries of `self` that `known` does not have.
    fn news(&self, known: &NotedMaps) -> Self {
        let (mut durations, mut messages) = (self.durations.clone(), self.messages.clone());
        durations.retain(|run, seconds| known.durations.get(run).and_then(Json::as_u64) != Some(*seconds));
        messages.retain(|message, run| known.messages.get(message).and_then(Json::as_str) != Some(run));
        Self { durations, messages }
    }
}

/// Writes a duration-only checkpoint on the head of the thread. Returns it, or `None` if there is nothing to note: no
/// head, no new entries, a run that waits for the user, tasks left to run, or a head that keeps moving. With `own`, the
/// head that the caller has read, a note is written on that one only.
///
/// # Errors
/// The accessor's, except conflicts.
pub async fn note(
    accessor: &StateAccessor,
    thread: &ThreadId,
    own: Option<CheckpointId>,
    notes: &RunNotes,
) -> threadkeep::Result<Option<StateSnapshot>> {
    for _ in 0..ATTEMPTS {
        let Some(head) = accessor.get_loading(thread, None, Load::None).await? else { return Ok(None) };
        if own.is_some_and(|own| own != head.key.id) {
            return Ok(None);
        }
        // Rows of finished tasks are on this head, where the next run looks for them.
        if !head.next.is_empty() {
            return Ok(None);
        }
        let parked = head.writes.iter().flat_map(|row| &row.writes);
        if parked.into_iter().any(|write| write.channel.as_str() == INTERRUPT_CHANNEL) {
            return Ok(None);
        }
        let maps = newest_maps(&**accessor.saver(), &head.key, &head.metadata.extra).await?;
        let Some(extra) = noted(maps, &head, notes) else { return Ok(None) };
        match accessor.annotate(&head, extra).await {
            Err(Error::Conflict { .. }) => {}
            other => return other.map(Some),
        }
    }
    Ok(None)
}

/// As [`note`], on the head that the run has just written, without reading it: a head that moved since stays as it is.
/// `before` is the head on which the run started; mostly the note of the run before, with the newest maps. A power loss
/// may take the note, until the next turn is flushed.
///
/// # Errors
/// The accessor's, except conflicts.
pub async fn note_on(
    accessor: &StateAccessor,
    head: &StateSnapshot,
    before: Option<&StateSnapshot>,
    notes: &RunNotes,
) -> threadkeep::Result<Option<StateSnapshot>> {
    let of_start = before.map(|before| NotedMaps::of(&before.metadata.extra)).unwrap_or_default();
    let maps = if of_start.is_empty() {
        newest_maps(&**accessor.saver(), &head.key, &head.metadata.extra).await?
    } else {
        of_start
    };
    let Some(extra) = noted(maps, head, notes) else { return Ok(None) };
    match accessor.annotate_flushing(head, extra, Flush::WithNext).await {
        Err(Error::Conflict { .. }) => Ok(None),
        other => other.map(Some),
    }
}

/// The metadata of a note on this head; `None` if there is nothing new.
fn noted(mut maps: NotedMaps, head: &StateSnapshot, notes: &RunNotes) -> Option<Extra> {
    let news = notes.news(&maps);
    if news.is_empty() {
        return None;
    }
    maps.add(&news);
    let mut extra = head.metadata.extra.clone();
    maps.carry_to(&mut extra);
    let run_ids: Vec<&String> = news.durations.keys().collect();
    let message_ids: Vec<&String> = news.messages.keys().collect();
    extra.insert(
        "writes".to_owned(),
        json!({ DURATION_NODE: { "run_ids": run_ids, "message_ids": message_ids } }),
    );
    Some(extra)
}

/// The parsed result of [`newest_maps`].
pub async fn newest_notes(
    saver: &dyn Saver,
    head: &CheckpointKey,
    extra: &Extra,
) -> threadkeep::Result<RunNotes> {
    newest_maps(saver, head, extra).await.map(|maps| maps.notes())
}

/// The maps of the newest checkpoint that has any, searching back from `head` with the metadata `extra`: graph steps do
/// not carry them, so they are on the note of the previous run. Metadata is the same in both modes, so there is no
/// gate.
pub async fn newest_maps(
    saver: &dyn Saver,
    head: &CheckpointKey,
    extra: &Extra,
) -> threadkeep::Result<NotedMaps> {
    let own = NotedMaps::of(extra);
    if !own.is_empty() {
        return Ok(own);
    }
    // For short runs, which is almost always, the small page suffices.
    for limit in [8, LOOK_BACK] {
        let query = ListQuery {
            namespace: Some(head.namespace.clone()),
            before: Some(head.id),
            limit: Some(limit),
            load: Load::None,
            ..ListQuery::new(&head.thread)
        };
        let page = saver.list(&query).await?;
        let found =
            page.iter().map(|tuple| NotedMaps::of(&tuple.metadata.extra)).find(|maps| !maps.is_empty());
        if let Some(found) = found {
            return Ok(found);
        }
        if page.len() < limit {
            break;
        }
    }
    Ok(NotedMaps::default())
}

#[cfg(test)]
mod tests;

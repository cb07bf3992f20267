//! A put as a commit of the engine. Pure.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json};
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, Stored};
use threadkeep::id::{ChannelName, CheckpointId, Version};
use threadkeep::metadata::Counters;
use threadkeep::saver::{Flush, StepCommit};
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};

use crate::frame::{self, FRAME, REST, SEEN};
use crate::known::{CARRIED, Known, KnownChannel, KnownTask, LABELS, is_snapshot, rebased};
use crate::runs::Rows;
use crate::types::Put;
use crate::version::{self, Label};
use crate::{metadata, runs};

/// The channels whose values a put has to bring: those that are new, and those that the parent does not hold.
pub(crate) fn needs(
    parent: Option<&Known>,
    versions: &BTreeMap<String, Label>,
    new: &BTreeSet<String>,
    values: impl Iterator<Item = String>,
) -> BTreeSet<String> {
    let held = |name: &String| {
        !new.contains(name)
            && parent.is_some_and(|parent| {
                let old = parent.channels.get(name.as_str());
                old.is_some_and(|old| old.label.is_some() && old.label.as_ref() == versions.get(name))
                    && !parent.is_sentinel(name)
                    && !parent.is_translated(name)
            })
    };
    values.filter(|name| !held(name)).collect()
}

/// Which versions new values get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Versions {
    /// Those that LangGraph's versions name, if they do.
    Named,
    /// Others than any stored value has.
    Fresh,
}

/// The commit of a put, and what is known of its checkpoint once it is stored. `rows` are those of its run.
///
/// # Errors
/// [`Error::Stale`] if the parent does not hold what the put leaves to it.
pub(crate) fn plan(
    put: &Put,
    parent: Option<&Known>,
    rows: &Rows,
    head: Option<CheckpointId>,
    versions: Versions,
) -> Result<(StepCommit, Known)> {
    let given = metadata::counters(&put.metadata);
    let names: BTreeSet<&str> = [&put.held]
        .into_iter()
        .flatten()
        .chain(put.versions.keys())
        .chain(put.values.keys())
        .map(String::as_str)
        .collect();
    let mut plan = Plan {
        put,
        parent,
        versions,
        applied: applied(put, parent, rows, &names, &given),
        channels: BTreeMap::new(),
        known: Known::default(),
        labels: Map::new(),
    };
    for name in &names {
        plan.channel(name, given.get(*name).copied())?;
    }
    let counters = plan.known.counters.clone();
    let (metadata, mut notes) = metadata::split(put.metadata.clone(), counters);
    let labels = std::mem::take(&mut plan.labels);
    if !labels.is_empty() {
        notes.insert(LABELS.to_owned(), Json::Object(labels));
    }
    if plan.known.foreign {
        notes.insert(CARRIED.to_owned(), Json::Bool(true));
    }
    plan.private(&names.into_iter().collect::<Vec<_>>(), notes)?;
    let applied = plan.applied.iter().map(|task| task.id).collect();
    let Plan { channels, known, .. } = plan;
    let step = StepCommit {
        thread: put.place.thread.clone(),
        namespace: put.place.namespace.clone(),
        parent: put.parent,
        expected_head: head,
        checkpoint: Checkpoint { id: put.id, channels, next: Vec::new(), applied },
        metadata,
        writes: Vec::new(),
        pending: Vec::new(),
        flush: Flush::Now,
    };
    Ok((step, known))
}

/// The rows that the checkpoint applies, in the order in which LangGraph applies them. `names` are its channels,
/// `given` what it counts of those that are stored as changes.
///
/// A row that waits under the parent may have written a channel that the put only carries on as changes. At the
/// parent's version the channel has the parent's value, so a replay must not find the row, unless another channel needs
/// it. Nor must it find a row of which the put has no channel at all, as one of another program's task that died: a
/// checkpoint further on may have that channel again, and would replay the row.
fn applied<'p>(
    put: &Put,
    parent: Option<&'p Known>,
    rows: &Rows,
    names: &BTreeSet<&str>,
    given: &BTreeMap<ChannelName, Counters>,
) -> Vec<&'p KnownTask> {
    let Some(parent) = parent else { return Vec::new() };
    let is_carried = |name: &ChannelName| {
        parent.counters.contains_key(name)
            && carries(put, parent.channels.get(name), name.as_str(), given.get(name).copied())
    };
    let is_applied = |task: &&KnownTask| {
        let is_counted = task.channels.iter().any(|name| given.contains_key(name));
        let is_named = task.channels.iter().any(|name| names.contains(name.as_str()));
        // A step that counts changes counts its tasks, whatever they wrote.
        is_counted || ((is_named || !given.is_empty()) && !task.channels.iter().any(is_carried))
    };
    let mut rows = runs::applied(&parent.tasks, rows);
    rows.retain(is_applied);
    rows
}

/// Whether a put leaves a channel as `old`, its parent's, and says nothing else about it: the graph does not have the
/// channel.
fn carries(put: &Put, old: Option<&KnownChannel>, name: &str, counters: Option<Counters>) -> bool {
    let label = old.and_then(|old| old.label.as_ref());
    label.is_some()
        && label == put.versions.get(name)
        && !put.new.contains(name)
        && !put.values.contains_key(name)
        && !put.held.contains(name)
        && counters.is_none()
}

struct Plan<'p> {
    put: &'p Put,
    parent: Option<&'p Known>,
    versions: Versions,
    /// The rows that it applies.
    applied: Vec<&'p KnownTask>,
    channels: BTreeMap<ChannelName, ChannelEntry>,
    known: Known,
    /// The labels that are not the texts of their engine versions.
    labels: Map<String, Json>,
}

impl Plan<'_> {
    fn channel(&mut self, name: &str, counters: Option<Counters>) -> Result<()> {
        let put = self.put;
        let label = put.versions.get(name);
        let old = self.parent.and_then(|parent| parent.channels.get(name));
        let is_new = put.new.contains(name);
        let repeated = old.filter(|old| label.is_some() && old.label.as_ref() == label);
        let same = repeated.filter(|_| !is_new);
        let was_sentinel = self.parent.is_some_and(|parent| parent.is_sentinel(name));
        let translated = self.parent.is_some_and(|parent| parent.is_translated(name));
        // The parent's version names the parent's value.
        let may_name = self.versions == Versions::Named && !translated && !(is_new && repeated.is_some());
        let named = |label| Some(label).filter(|_| may_name).and_then(version::parse);
        let new_version = || match label {
            Some(label) => named(label).unwrap_or_else(|| version::fresh(version::counter(label))),
            None => version::fresh(old.map_or(0, |old| old.version.counter) + 1),
        };
        let is_carried = carries(put, old, name, counters);
        let kept = is_carried || (counters.is_none() && !was_sentinel && !translated);
        let (version, stored) = if let Some(old) = same.filter(|_| kept) {
            if was_sentinel {
                self.count(name, Counters::default());
            }
            (old.version, Stored::Held)
        } else if let Some(value) = put.values.get(name) {
            let value = match (value, old.and_then(|old| old.value.as_ref())) {
                (ChannelValue::List(list), Some(ChannelValue::List(base))) => {
                    frame::derive(Some(base), list).into()
                }
                (value, _) => value.clone(),
            };
            let stored =
                if put.snapshots.contains(name) { Stored::Snapshot(value) } else { Stored::Value(value) };
            (new_version(), stored)
        } else if put.held.contains(name) {
            let old = same.filter(|_| !was_sentinel && !translated);
            let old = old.ok_or_else(|| Error::Stale { thread: put.place.thread.clone() })?;
            (old.version, Stored::Held)
        } else if let Some(counters) = counters.filter(|_| self.parent.is_some()) {
            self.count(name, counters);
            (same.map_or_else(new_version, |old| old.version), Stored::Sentinel)
        } else {
            (new_version(), Stored::Value(ChannelValue::absent()))
        };
        // What a graph changed is in its own form.
        let is_parents = match stored {
            Stored::Held => !was_sentinel || !self.is_written(name),
            Stored::Sentinel => same.is_some() && !self.is_written(name),
            Stored::Value(_) | Stored::Snapshot(_) => false,
        };
        self.known.foreign |= translated && is_parents;
        match label {
            None => {
                self.labels.insert(name.to_owned(), Json::Null);
            }
            Some(label) if label.as_str() != Some(&version.to_string()) => {
                self.labels.insert(name.to_owned(), label.clone());
            }
            Some(_) => {}
        }
        self.entry(name, version, label.cloned(), stored);
        Ok(())
    }

    /// Whether the checkpoint applies a row that wrote the channel.
    fn is_written(&self, name: &str) -> bool {
        self.applied.iter().any(|task| task.channels.contains(name))
    }

    /// Counts a channel that is stored as changes. Readers expect at least as many changes as they find: never fewer
    /// than the parent claims and this checkpoint adds, whatever LangGraph gives.
    fn count(&mut self, name: &str, given: Counters) {
        let before = self.parent.and_then(|parent| parent.counters.get(name)).copied().unwrap_or_default();
        let is_written = u64::from(self.is_written(name));
        let counters = Counters {
            updates: given.updates.max(before.updates.saturating_add(is_written)),
            supersteps: given.supersteps.max(before.supersteps.saturating_add(1)),
        };
        self.known.counters.insert(name.into(), counters);
    }

    /// The private channels. One version for all of them takes the fewest bytes.
    fn private(&mut self, names: &[&str], notes: Map<String, Json>) -> Result<()> {
        let old = self.parent.and_then(|parent| parent.channels.get(FRAME));
        let version = version::fresh(old.map_or(0, |old| old.version.counter) + 1);
        let frame = frame::encode(self.put.id, &self.put.frame, names, notes)?;
        self.entry(FRAME, version, None, Stored::Value(frame));
        let seen = frame::seen(&self.put.frame, self.parent.and_then(|parent| parent.list(SEEN)))?;
        self.kept(SEEN, version, (!seen.is_empty()).then(|| seen.into()));
        self.kept(REST, version, self.put.frame.rest.clone());
        Ok(())
    }

    /// A private channel that is stored only where it differs from the parent's.
    fn kept(&mut self, name: &str, version: Version, value: Option<ChannelValue>) {
        let Some(value) = value else { return };
        let old = self.parent.and_then(|parent| parent.channels.get(name));
        match old.filter(|old| old.value.as_ref() == Some(&value)) {
            Some(old) => self.entry(name, old.version, None, Stored::Held),
            None => self.entry(name, version, None, Stored::Value(value)),
        }
    }

    fn entry(&mut self, name: &str, version: Version, label: Option<Label>, stored: Stored) {
        let (value, snapshot) = match &stored {
            Stored::Held => {
                let old = self.parent.and_then(|parent| parent.channels.get(name));
                old.map_or((None, false), |old| (old.value.clone(), old.snapshot))
            }
            stored => (stored.value().cloned().map(|value| rebased(value, version)), is_snapshot(stored)),
        };
        self.known.channels.insert(name.into(), KnownChannel { version, label, value, snapshot });
        self.channels.insert(name.into(), ChannelEntry { version, stored });
    }
}

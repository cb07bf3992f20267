//! The rows of a put of writes.

use std::collections::BTreeSet;

use threadkeep::Result;
use threadkeep::checkpoint::TaskWrites;

use crate::task::{Author, Kind, is_special, row};
use crate::types::PutWrites;

/// Whether it has both special and ordinary writes: then stored special ones stay, and one has to know which those are.
pub(crate) fn is_mixed(put: &PutWrites) -> bool {
    let special = put.writes.iter().filter(|(channel, _)| is_special(channel)).count();
    special > 0 && special < put.writes.len()
}

/// The rows of a put, without writes to the special channels in `stays`.
pub(crate) fn rows(put: &PutWrites, stays: &BTreeSet<String>) -> Result<Vec<TaskWrites>> {
    let by = Author { path: put.path.clone(), task: put.task.clone() };
    let (special, ordinary): (Vec<_>, Vec<_>) =
        put.writes.iter().cloned().partition(|(channel, _)| is_special(channel));
    // LangGraph has one place for each special channel: the last write to it counts.
    let mut last: Vec<(String, threadkeep::value::ChannelValue)> = Vec::new();
    for (channel, value) in special.into_iter().filter(|(channel, _)| !stays.contains(channel)) {
        match last.iter_mut().find(|(known, _)| *known == channel) {
            Some(known) => known.1 = value,
            None => last.push((channel, value)),
        }
    }
    let mut rows = Vec::new();
    if !last.is_empty() {
        rows.push(row(&by, Kind::Special, last)?);
    }
    if !ordinary.is_empty() {
        rows.push(row(&by, Kind::Ordinary, ordinary)?);
    }
    Ok(rows)
}

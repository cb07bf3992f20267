//! LangGraph's rows and the engine's.
//!
//! A task has one row of special writes (errors, interrupts, answers), which LangGraph may replace at any time, and a
//! row for each list of ordinary writes that was put for it: the same list again is the same row, and any other one
//! leaves it as it is ([`runs`]).

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json, json};
use threadkeep::Result;
use threadkeep::checkpoint::{
    ERROR_CHANNEL, INTERRUPT_CHANNEL, RESUME_CHANNEL, SCHEDULED_CHANNEL, TaskWrites, Write,
};
use threadkeep::id::TaskId;
use threadkeep::value::ChannelValue;

use crate::known::KnownTask;
use crate::runs;
use crate::types::Pending;

/// The channel of a row's first write where its task or its path do not fit into the row: a private one.
const TASK: &str = "__threadkeep_task__";
/// Distinguishes the id of a task's special row from that of its ordinary one.
const SPECIAL: [u8; 16] = *b"threadkeep spec.";
/// Distinguishes the ids of its ordinary rows, together with what they have.
const OWN: [u8; 16] = *b"threadkeep list.";
/// Distinguishes the ids of further rows of a list, as older versions stored it, together with their positions.
const FURTHER: [u8; 16] = *b"threadkeep more.";

/// The order in which LangGraph lists special writes; before ordinary ones.
const SPECIAL_ORDER: [&str; 4] = [RESUME_CHANNEL, INTERRUPT_CHANNEL, SCHEDULED_CHANNEL, ERROR_CHANNEL];

/// Whether LangGraph has one place for writes to this channel.
pub(crate) fn is_special(channel: &str) -> bool {
    SPECIAL_ORDER.contains(&channel)
}

/// Who wrote a row.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Author {
    pub(crate) path: String,
    pub(crate) task: String,
}

/// Which writes of a task a row has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Special,
    /// A part of a list of ordinary ones, from this position on: of older versions, and of other programs.
    Ordinary(usize),
    /// A whole list of ordinary ones, and its [`likeness`].
    Own(u64),
}

/// A hash of what a list has.
pub(crate) fn likeness(writes: &[(String, ChannelValue)]) -> u64 {
    let mut hasher = blake3::Hasher::new();
    let mut part = |kind: u8, bytes: &[u8]| {
        hasher.update(&[kind]).update(&(bytes.len() as u64).to_be_bytes()).update(bytes);
    };
    for (channel, value) in writes {
        part(0, channel.as_bytes());
        match value {
            ChannelValue::Plain(encoded) => part(1, &encoded.bytes[..]),
            ChannelValue::List(list) => {
                part(2, &(list.len() as u64).to_be_bytes());
                for element in list.iter() {
                    part(3, &element.hash()[..]);
                }
            }
        }
    }
    let hash = hasher.finalize();
    hash.as_bytes().first_chunk().map_or(0, |first| u64::from_be_bytes(*first))
}

/// The id of a row.
pub(crate) fn row_id(task: &str, kind: Kind) -> TaskId {
    let id = plain_id(task).unwrap_or_else(|| {
        let mut short = [0; 16];
        short.copy_from_slice(&blake3::hash(task.as_bytes()).as_bytes()[..16]);
        TaskId::from_bytes(short)
    });
    match kind {
        Kind::Ordinary(0) => id,
        Kind::Ordinary(from) => mask(mask(id, FURTHER), (from as u128).to_be_bytes()),
        Kind::Own(likeness) => own(id, likeness),
        Kind::Special => mask(id, SPECIAL),
    }
}

/// The id of a list's row, or from that, of its task.
fn own(id: TaskId, likeness: u64) -> TaskId {
    mask(mask(id, OWN), u128::from(likeness).to_be_bytes())
}

fn mask(id: TaskId, with: [u8; 16]) -> TaskId {
    let mut bytes = *id.as_bytes();
    bytes.iter_mut().zip(with).for_each(|(byte, mask)| *byte ^= mask);
    TaskId::from_bytes(bytes)
}

/// The id that a task's text is.
fn plain_id(task: &str) -> Option<TaskId> {
    task.parse::<TaskId>().ok().filter(|id| id.to_string() == task)
}

/// The row of these writes of a task; all of one kind.
pub(crate) fn row(author: &Author, kind: Kind, writes: Vec<(String, ChannelValue)>) -> Result<TaskWrites> {
    // A saver keeps the name of a node for ever. Paths with ids in them, or with the number of the step, as LangGraph has
    // them where a run stores its writes at its end, would be names without number.
    let path = author.path.as_str();
    let named = !path.contains('-') && !path.starts_with("~~") && path.len() <= 64;
    let mut note = Map::new();
    let from = match kind {
        Kind::Ordinary(from) => from,
        Kind::Special | Kind::Own(_) => 0,
    };
    if from > 0 || plain_id(&author.task).is_none() {
        note.insert("task".to_owned(), json!(author.task));
    }
    if !named {
        note.insert("path".to_owned(), json!(path));
    }
    match kind {
        Kind::Ordinary(from) if from > 0 => drop(note.insert("from".to_owned(), json!(from))),
        Kind::Own(likeness) => drop(note.insert("list".to_owned(), json!(likeness))),
        Kind::Ordinary(_) | Kind::Special => {}
    }
    let mut all = Vec::with_capacity(writes.len() + 1);
    if !note.is_empty() {
        let value = ChannelValue::from_json(&Json::Object(note))?;
        all.push(Write { channel: TASK.into(), value, overwrite: false });
    }
    let writes = writes.into_iter();
    all.extend(writes.map(|(channel, value)| Write { channel: channel.into(), value, overwrite: false }));
    let node = if named { path } else { "" };
    Ok(TaskWrites { task: row_id(&author.task, kind), node: node.into(), index: 0, writes: all })
}

/// Who wrote a row, and its kind.
pub(crate) fn author(row: &TaskWrites) -> Result<(Author, Kind)> {
    let mut path = row.node.to_string();
    let mut task = None;
    let mut ordinary = Kind::Ordinary(0);
    if let Some(first) = row.writes.first().filter(|write| write.channel.as_str() == TASK) {
        let json = first.value.to_json()?;
        task = json["task"].as_str().map(str::to_owned);
        if let Some(from) = json["from"].as_u64().and_then(|from| usize::try_from(from).ok()) {
            ordinary = Kind::Ordinary(from);
        }
        if let Some(likeness) = json["list"].as_u64() {
            ordinary = Kind::Own(likeness);
        }
        if let Some(long) = json["path"].as_str() {
            long.clone_into(&mut path);
        }
    }
    let kind = if writes(row).all(Write::is_special) { Kind::Special } else { ordinary };
    let task = task.unwrap_or_else(|| match kind {
        Kind::Ordinary(_) => row.task.to_string(),
        Kind::Own(likeness) => own(row.task, likeness).to_string(),
        Kind::Special => mask(row.task, SPECIAL).to_string(),
    });
    Ok((Author { path, task }, kind))
}

/// What a task wrote.
pub(crate) fn writes(row: &TaskWrites) -> impl Iterator<Item = &Write> {
    row.writes.iter().filter(|write| write.channel.as_str() != TASK)
}

/// The writes that readers are shown, by path, task and position.
pub(crate) fn pending(rows: &[TaskWrites]) -> Result<Vec<Pending>> {
    let tasks = rows.iter().map(KnownTask::new).collect::<Result<Vec<_>>>()?;
    let shown: BTreeSet<TaskId> =
        runs::shown(tasks.iter(), &BTreeMap::new()).into_iter().map(|task| task.id).collect();
    let is_shown = |task: &KnownTask| task.kind == Kind::Special || shown.contains(&task.id);
    let mut sorted: Vec<_> = tasks.iter().zip(rows).filter(|(task, _)| is_shown(task)).collect();
    sorted.sort_by(|(one, _), (other, _)| (&one.author, one.kind).cmp(&(&other.author, other.kind)));
    let mut all = Vec::new();
    for (KnownTask { author, kind, .. }, row) in sorted {
        let mut writes: Vec<&Write> = writes(row).collect();
        if *kind == Kind::Special {
            let place = |write: &Write| SPECIAL_ORDER.iter().position(|name| *name == write.channel.as_str());
            writes.sort_by_key(|write| place(write));
        }
        all.extend(writes.into_iter().map(|w| (author.task.clone(), w.channel.to_string(), w.value.clone())));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(n: i64) -> ChannelValue {
        ChannelValue::from_json(&json!(n)).unwrap()
    }

    #[test]
    fn rows_say_who_wrote_them() {
        for task in
            ["00000000-0000-0000-0000-000000000000", "1ef4f797-8335-6428-8001-8a1503f9b875", "task-1", ""]
        {
            for (path, node) in [
                ("", ""),
                ("~__pregel_pull, agent", "~__pregel_pull, agent"),
                ("~__pregel_push, 1ef4f797-8335-6428-8001-8a1503f9b875", ""),
                ("~~0000000003~__pregel_pull, agent", ""),
            ] {
                for (kind, channel) in [
                    (Kind::Ordinary(0), "messages"),
                    (Kind::Ordinary(3), "messages"),
                    (Kind::Own(u64::MAX - 1), "messages"),
                    (Kind::Special, ERROR_CHANNEL),
                ] {
                    let by = Author { path: path.to_owned(), task: task.to_owned() };
                    let row = row(&by, kind, vec![(channel.to_owned(), value(1))]).unwrap();
                    assert_eq!(author(&row).unwrap(), (by, kind));
                    assert_eq!(row.node.to_string(), node);
                    assert_eq!(writes(&row).count(), 1);
                }
            }
        }
    }

    #[test]
    fn writes_are_listed_by_path_then_task_then_position_with_special_ones_first() {
        let by = |path: &str, task: &str| Author { path: path.to_owned(), task: task.to_owned() };
        let ordinary = |path, task, n| {
            row(
                &by(path, task),
                Kind::Ordinary(0),
                vec![("a".to_owned(), value(n)), ("b".to_owned(), value(n))],
            )
        };
        let rows = [
            ordinary("p2", "t1", 1).unwrap(),
            ordinary("p1", "t3", 2).unwrap(),
            ordinary("p1", "t2", 3).unwrap(),
            row(
                &by("p1", "t3"),
                Kind::Special,
                vec![(ERROR_CHANNEL.to_owned(), value(4)), (RESUME_CHANNEL.to_owned(), value(5))],
            )
            .unwrap(),
        ];
        let listed: Vec<_> = pending(&rows)
            .unwrap()
            .into_iter()
            .map(|(task, channel, _)| format!("{task} {channel}"))
            .collect();
        assert_eq!(listed, ["t2 a", "t2 b", "t3 __resume__", "t3 __error__", "t3 a", "t3 b", "t1 a", "t1 b"]);
    }
}

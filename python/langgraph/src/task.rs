//! LangGraph's rows and the engine's.
//!
//! A task has one row of special writes (errors, interrupts, answers), which LangGraph may replace at any time, and one of
//! ordinary writes. Once a child has applied the ordinary row, it is final. If the task then runs again for another child and
//! writes more, what it has more is a further row: the first child keeps its history, and the other one has all writes.

use serde_json::{Value as Json, json};
use threadkeep::Result;
use threadkeep::checkpoint::{
    ERROR_CHANNEL, INTERRUPT_CHANNEL, RESUME_CHANNEL, SCHEDULED_CHANNEL, TaskWrites, Write,
};
use threadkeep::id::TaskId;
use threadkeep::value::ChannelValue;

use crate::types::Pending;

/// The channel of a row's first write where its task or its path do not fit into the row: a private one.
const TASK: &str = "__threadkeep_task__";
/// Distinguishes the id of a task's special row from that of its ordinary one.
const SPECIAL: [u8; 16] = *b"threadkeep spec.";
/// Distinguishes the ids of its further rows, together with their positions.
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
    /// The ordinary ones from this position on: 0, or where the rows end that are final.
    Ordinary(usize),
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
        Kind::Ordinary(from) => {
            let from = (from as u128).to_be_bytes();
            mask(mask(id, FURTHER), from)
        }
        Kind::Special => mask(id, SPECIAL),
    }
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
    let mut all = Vec::with_capacity(writes.len() + 1);
    let from = match kind {
        Kind::Ordinary(from) => from,
        Kind::Special => 0,
    };
    let plain = from == 0 && plain_id(&author.task).is_some();
    if !named || !plain {
        let task = if plain { Json::Null } else { json!(author.task) };
        let noted = if named { Json::Null } else { json!(path) };
        let mut note = json!({ "task": task, "path": noted });
        if from > 0 {
            note["from"] = json!(from);
        }
        let value = ChannelValue::from_json(&note)?;
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
    let mut from = 0;
    if let Some(first) = row.writes.first().filter(|write| write.channel.as_str() == TASK) {
        let json = first.value.to_json()?;
        task = json["task"].as_str().map(str::to_owned);
        from = json["from"].as_u64().and_then(|from| usize::try_from(from).ok()).unwrap_or(0);
        if let Some(long) = json["path"].as_str() {
            long.clone_into(&mut path);
        }
    }
    let kind = if writes(row).all(Write::is_special) { Kind::Special } else { Kind::Ordinary(from) };
    let task = task.unwrap_or_else(|| match kind {
        Kind::Ordinary(_) => row.task.to_string(),
        Kind::Special => mask(row.task, SPECIAL).to_string(),
    });
    Ok((Author { path, task }, kind))
}

/// What a task wrote.
pub(crate) fn writes(row: &TaskWrites) -> impl Iterator<Item = &Write> {
    row.writes.iter().filter(|write| write.channel.as_str() != TASK)
}

/// The writes of all rows, by path, task and position.
pub(crate) fn pending(rows: &[TaskWrites]) -> Result<Vec<Pending>> {
    let mut sorted = Vec::with_capacity(rows.len());
    for row in rows {
        sorted.push((author(row)?, row));
    }
    sorted.sort_by(|(one, _), (other, _)| one.cmp(other));
    let mut all = Vec::new();
    for ((author, kind), row) in sorted {
        let mut writes: Vec<&Write> = writes(row).collect();
        if kind == Kind::Special {
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

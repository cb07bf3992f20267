//! Tasks, with the names of their nodes and channels. SQLite has numbers for names, and a format of its own for tasks.

use threadkeep::id::{ChannelName, NodeName, TaskId};

use crate::codec::{Decoder, Malformed, put_bytes, put_len, put_uint};
use crate::form::Form;
use crate::row::{put_write, take_write};

/// One write of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteRecord {
    /// The channel that it is for.
    pub channel: ChannelName,
    /// Whether it replaces what the channel holds.
    pub overwrite: bool,
    /// The value.
    pub value: Form,
}

/// Appends the node of a task, its index, and what it wrote.
pub fn put_task(out: &mut Vec<u8>, node: &NodeName, index: u32, writes: &[WriteRecord]) {
    put_bytes(out, node.as_str().as_bytes());
    put_uint(out, index);
    put_len(out, writes.len());
    for write in writes {
        put_bytes(out, write.channel.as_str().as_bytes());
        put_write(out, write.overwrite, &write.value);
    }
}

/// Reads what [`put_task`] wrote.
///
/// # Errors
/// [`Malformed`]
pub fn take_task(decoder: &mut Decoder<'_>) -> Result<(NodeName, u32, Vec<WriteRecord>), Malformed> {
    let node = decoder.text()?.into();
    let index = decoder.u32()?;
    let mut writes = Vec::new();
    for _ in 0..decoder.count()? {
        let channel = decoder.text()?.into();
        let (overwrite, value) = take_write(decoder)?;
        writes.push(WriteRecord { channel, overwrite, value });
    }
    Ok((node, index, writes))
}

/// Appends the nodes that a checkpoint runs next.
pub fn put_nodes(out: &mut Vec<u8>, nodes: &[NodeName]) {
    put_len(out, nodes.len());
    for node in nodes {
        put_bytes(out, node.as_str().as_bytes());
    }
}

/// Reads what [`put_nodes`] wrote.
///
/// # Errors
/// [`Malformed`]
pub fn take_nodes(decoder: &mut Decoder<'_>) -> Result<Vec<NodeName>, Malformed> {
    (0..decoder.count()?).map(|_| decoder.text().map(NodeName::from)).collect()
}

/// Appends the ids of the tasks that made a checkpoint.
pub fn put_task_ids(out: &mut Vec<u8>, tasks: &[TaskId]) {
    put_len(out, tasks.len());
    for task in tasks {
        out.extend_from_slice(task.as_bytes());
    }
}

/// Reads what [`put_task_ids`] wrote.
///
/// # Errors
/// [`Malformed`]
pub fn take_task_ids(decoder: &mut Decoder<'_>) -> Result<Vec<TaskId>, Malformed> {
    (0..decoder.count()?).map(|_| decoder.array().map(TaskId::from_bytes)).collect()
}

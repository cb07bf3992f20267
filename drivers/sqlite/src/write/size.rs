//! How much a new thread stores: whether one transaction may write it.

use std::collections::HashMap;

use threadkeep::checkpoint::{CheckpointTuple, Stored};
use threadkeep::id::{ChannelName, Namespace};
use threadkeep::value::ChannelValue;

/// Whether checkpoints have more elements than this, or more bytes of them. What a list has in common with the beginning
/// of the one before it is counted once. Other equal elements, as those of most writes, are stored once and counted each
/// time. Metadata is not counted.
pub(crate) fn has_more_than(put: &[CheckpointTuple], elements: usize, bytes: usize) -> bool {
    let mut put: Vec<&CheckpointTuple> = put.iter().collect();
    put.sort_by(|a, b| (&a.namespace, a.checkpoint.id).cmp(&(&b.namespace, b.checkpoint.id)));
    let mut last: HashMap<(&Namespace, &ChannelName), &ChannelValue> = HashMap::new();
    let mut sum = Size::default();
    for tuple in put {
        for (channel, entry) in &tuple.checkpoint.channels {
            if let Stored::Value(value) | Stored::Snapshot(value) = &entry.stored {
                sum.add(value, last.insert((&tuple.namespace, channel), value));
            }
        }
        for write in tuple.writes.iter().flat_map(|task| &task.writes) {
            sum.add(&write.value, None);
        }
        if sum.elements > elements || sum.bytes > bytes {
            return true;
        }
    }
    false
}

#[derive(Default)]
struct Size {
    elements: usize,
    bytes: usize,
}

impl Size {
    /// Adds what a value has and the one before it has not.
    fn add(&mut self, value: &ChannelValue, before: Option<&ChannelValue>) {
        match value {
            ChannelValue::List(list) => {
                let shared = before.and_then(ChannelValue::as_list).map_or(0, |before| list.common(before));
                self.elements += list.len() - shared;
                self.bytes += list.iter_from(shared).map(|element| element.bytes().len()).sum::<usize>();
            }
            plain if before == Some(plain) => {}
            ChannelValue::Plain(encoded) => {
                self.elements += 1;
                self.bytes += encoded.bytes.len();
            }
        }
    }
}

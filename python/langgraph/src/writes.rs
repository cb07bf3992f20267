//! Storing what a task wrote.

use std::collections::BTreeSet;
use std::slice;

use threadkeep::Result;
use threadkeep::checkpoint::{CheckpointKey, TaskWrites};
use threadkeep::value::ChannelValue;

use crate::known::{Known, KnownTask};
use crate::steps::after;
use crate::store::LangGraph;
use crate::task::{Author, Kind, is_special, likeness, row};
use crate::types::PutWrites;

type Write = (String, ChannelValue);

impl LangGraph {
    /// Stores writes of a task under a checkpoint that exists.
    ///
    /// # Errors
    /// [`threadkeep::Error::NotFound`] if it does not exist; the saver's.
    pub(crate) async fn store_writes(&self, key: &CheckpointKey, put: &PutWrites) -> Result<()> {
        let (special, ordinary): (Vec<_>, Vec<_>) =
            put.writes.iter().cloned().partition(|(channel, _)| is_special(channel));
        let known = match self.memory.checkpoint(key) {
            Some(known) => known,
            None => self.learned(key).await?,
        };
        let by = Author { path: put.path.clone(), task: put.task.clone() };
        // Stored special writes stay if they come among others.
        let stays = if ordinary.is_empty() { BTreeSet::new() } else { special_of(&known, &put.task) };
        // Held, it would be copied when a row is added: all tasks of the step, for each of them.
        drop(known);
        let special = last_of_each(special, &stays);
        let first = !special.is_empty();
        if first {
            self.store_row(key, &row(&by, Kind::Special, special)?).await?;
        }
        if ordinary.is_empty() {
            return Ok(());
        }
        let kind = Kind::Own(likeness(&ordinary));
        let list: Vec<u64> = ordinary.iter().map(|write| likeness(slice::from_ref(write))).collect();
        match self.store_ordinary(key, &row(&by, kind, ordinary)?, &list).await {
            Err(error) if first => {
                Err(after(&format!("the special writes of task {} are stored", put.task), error))
            }
            stored => stored,
        }
    }

    async fn store_row(&self, key: &CheckpointKey, row: &TaskWrites) -> Result<()> {
        self.saver.put_writes(key, row).await?;
        self.memory.wrote(key, row)
    }

    /// Stores a list of ordinary writes. One that is stored is not changed, whichever run it is of.
    async fn store_ordinary(&self, key: &CheckpointKey, row: &TaskWrites, list: &[u64]) -> Result<()> {
        self.store_row(key, row).await?;
        self.runs.wrote(key, self.caller, &KnownTask::new(row)?, list);
        Ok(())
    }
}

/// The special channels that a task wrote.
fn special_of(known: &Known, task: &str) -> BTreeSet<String> {
    let rows = known.tasks.iter().filter(|row| row.author.task == task);
    rows.flat_map(|row| row.special.iter().cloned()).collect()
}

/// LangGraph has one place for each special channel: the last write to it counts.
fn last_of_each(special: Vec<Write>, stays: &BTreeSet<String>) -> Vec<Write> {
    let mut last: Vec<Write> = Vec::new();
    for (channel, value) in special.into_iter().filter(|(channel, _)| !stays.contains(channel)) {
        match last.iter_mut().find(|(known, _)| *known == channel) {
            Some(known) => known.1 = value,
            None => last.push((channel, value)),
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Map, json};
    use threadkeep_memory::MemorySaver;

    use super::*;
    use crate::store::Fence;
    use crate::types::{Place, Put};

    #[tokio::test]
    async fn a_row_is_added_to_what_is_known_of_its_checkpoint_without_a_copy() {
        let graphs = LangGraph::new(Arc::new(MemorySaver::default()), Fence::Fork);
        let place = Place::new("t", "");
        let id = place.id("1ef4f797-8335-6428-8001-000000000000").unwrap();
        graphs.put(&Put::new(place.clone(), id, None, Map::new())).await.unwrap();
        let known = || graphs.memory.checkpoint(&place.key(id)).unwrap();
        let before = Arc::as_ptr(&known());
        for (task, channels) in [("a", &["d"][..]), ("b", &["__error__"][..]), ("c", &["__error__", "d"][..])]
        {
            let write =
                |channel: &&str| ((*channel).to_owned(), ChannelValue::from_json(&json!(task)).unwrap());
            let writes = channels.iter().map(write).collect();
            let (task, path) = (task.to_owned(), String::new());
            graphs.put_writes(&PutWrites { place: place.clone(), id, task, path, writes }).await.unwrap();
            assert_eq!(Arc::as_ptr(&known()), before);
        }
        assert_eq!(known().tasks.len(), 4);
    }
}

//! Storing what a task wrote.

use std::collections::BTreeSet;
use std::sync::Arc;

use threadkeep::checkpoint::{CheckpointKey, TaskWrites};
use threadkeep::saver::{CheckpointSelector, Load};
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};

use crate::known::{Known, KnownTask};
use crate::steps::after;
use crate::store::{ATTEMPTS, LangGraph};
use crate::task::{Author, Kind, is_special, row};
use crate::types::PutWrites;

type Write = (String, ChannelValue);

impl LangGraph {
    /// Stores writes of a task under a checkpoint that exists.
    ///
    /// # Errors
    /// [`Error::NotFound`] if it does not exist; the saver's.
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
        let special = last_of_each(special, &stays);
        let first = !special.is_empty();
        if first {
            self.store_row(key, &row(&by, Kind::Special, special)?).await?;
        }
        if ordinary.is_empty() {
            return Ok(());
        }
        match self.store_ordinary(key, &by, ordinary, &known).await {
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

    /// Stores ordinary writes. Those that are stored already stay, and what this put has more is added: to the task's last
    /// row, or, if a child has applied that one, as a further row.
    async fn store_ordinary(
        &self,
        key: &CheckpointKey,
        by: &Author,
        writes: Vec<Write>,
        known: &Arc<Known>,
    ) -> Result<()> {
        let from = |at: usize| row(by, Kind::Ordinary(at), writes[at..].to_vec());
        let Some((last, end)) = last_row(&known.tasks, &by.task) else {
            return self.store_row(key, &from(0)?).await;
        };
        // A put that has no more than what is stored is a repeat, but its checkpoint may be gone.
        self.saver.put_writes(key, &from(if last < writes.len() { last } else { 0 })?).await?;
        if writes.len() <= end {
            return Ok(());
        }
        self.store_further(key, by, &writes)
            .await
            .map_err(|error| after(&format!("some writes of task {} may be stored", by.task), error))
    }

    /// Stores what a put has more than the rows of its task, after it was added to the last row in vain: the saver does not
    /// say whether that one was final.
    async fn store_further(&self, key: &CheckpointKey, by: &Author, writes: &[Write]) -> Result<()> {
        let from = |at: usize| row(by, Kind::Ordinary(at), writes[at..].to_vec());
        for _ in 0..ATTEMPTS {
            let stored = CheckpointSelector::at(key).loading(Load::None);
            let stored = self.saver.get(&stored).await?;
            let stored =
                stored.ok_or_else(|| Error::NotFound { thread: key.thread.clone(), checkpoint: key.id })?;
            let mut tasks = Vec::with_capacity(stored.writes.len());
            for row in &stored.writes {
                self.memory.wrote(key, row)?;
                tasks.push(KnownTask::new(row)?);
            }
            match last_row(&tasks, &by.task) {
                Some((_, end)) if end < writes.len() => self.saver.put_writes(key, &from(end)?).await?,
                _ => return Ok(()),
            }
        }
        Err(Error::Stale { thread: key.thread.clone() })
    }
}

/// Where the last row of a task's ordinary writes begins, and where it ends.
fn last_row(tasks: &[KnownTask], task: &str) -> Option<(usize, usize)> {
    let rows = tasks.iter().filter(|row| row.author.task == task).filter_map(|row| match row.kind {
        Kind::Ordinary(from) => Some((from, from + row.len)),
        Kind::Special => None,
    });
    rows.max()
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

//! Writes that arrived before their checkpoint: LangGraph hands both to executors, which may reorder them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use threadkeep::checkpoint::CheckpointKey;
use threadkeep::id::ThreadId;
use threadkeep::{Error, Result};

use crate::types::PutWrites;

/// The bytes that may wait in all.
const BYTES: usize = 64 << 20;

/// The waiting writes, by checkpoint.
#[derive(Default)]
pub(crate) struct WaitingRoom(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    writes: HashMap<CheckpointKey, Vec<Arc<PutWrites>>>,
    bytes: usize,
}

fn size(put: &PutWrites) -> usize {
    let values = put.writes.iter().map(|(channel, value)| channel.len() + value.encoded_len());
    256 + put.task.len() + put.path.len() + values.sum::<usize>()
}

impl WaitingRoom {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets writes wait for their checkpoint.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if too many wait already.
    pub(crate) fn wait(&self, key: &CheckpointKey, put: PutWrites) -> Result<()> {
        let mut this = self.lock();
        let size = size(&put);
        if this.bytes + size > BYTES {
            return Err(Error::InvalidInput(format!(
                "thread {}: checkpoint {} does not exist, and {} bytes of writes wait for such checkpoints already; \
                 put the checkpoint first",
                key.thread, key.id, this.bytes
            )));
        }
        this.bytes += size;
        this.writes.entry(key.clone()).or_default().push(Arc::new(put));
        Ok(())
    }

    /// The writes that wait for a checkpoint, in the order of their arrival. Each waits until it [left](Self::left).
    pub(crate) fn of(&self, key: &CheckpointKey) -> Vec<Arc<PutWrites>> {
        self.lock().writes.get(key).cloned().unwrap_or_default()
    }

    /// Writes that waited are stored.
    pub(crate) fn left(&self, key: &CheckpointKey, put: &Arc<PutWrites>) {
        let mut this = self.lock();
        let Some(waiting) = this.writes.get_mut(key) else { return };
        // Somebody else may have stored them, too.
        let Some(at) = waiting.iter().position(|one| Arc::ptr_eq(one, put)) else { return };
        waiting.remove(at);
        if waiting.is_empty() {
            this.writes.remove(key);
        }
        this.bytes -= size(put);
    }

    /// Drops what waits for checkpoints of a thread, which was deleted.
    pub(crate) fn forget(&self, thread: &ThreadId) {
        let mut this = self.lock();
        let gone: usize = this
            .writes
            .extract_if(|key, _| key.thread == *thread)
            .flat_map(|(_, waiting)| waiting)
            .map(|put| size(&put))
            .sum();
        this.bytes -= gone;
    }
}

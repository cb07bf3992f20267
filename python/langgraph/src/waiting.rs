//! Writes that arrived before their checkpoint: LangGraph hands both to executors, which may reorder them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use threadkeep::checkpoint::CheckpointKey;
use threadkeep::id::ThreadId;
use threadkeep::{Error, Result};

use crate::types::{Caller, PutWrites};

/// The bytes that may wait in all.
const BYTES: usize = 64 << 20;
/// How long writes wait before they make room for others. A put of their checkpoint comes within moments, or never: it was
/// refused, or its run was given up.
const PATIENCE: Duration = Duration::from_mins(10);

/// The waiting writes, by checkpoint.
#[derive(Default)]
pub(crate) struct WaitingRoom(Mutex<Waiting>);

/// Writes that wait, and who put them.
type Waiter = (Caller, Arc<PutWrites>);

#[derive(Default)]
struct Waiting {
    writes: HashMap<CheckpointKey, Vec<(Instant, Waiter)>>,
    bytes: usize,
}

impl Waiting {
    /// Drops writes.
    fn drop_if(&mut self, gone: impl Fn(&CheckpointKey, Instant) -> bool) {
        for (key, waiting) in &mut self.writes {
            waiting.retain(|(since, (_, put))| {
                let stays = !gone(key, *since);
                self.bytes -= if stays { 0 } else { size(put) };
                stays
            });
        }
        self.writes.retain(|_, waiting| !waiting.is_empty());
    }
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
    pub(crate) fn wait(
        &self,
        key: &CheckpointKey,
        caller: Caller,
        put: PutWrites,
        now: Instant,
    ) -> Result<()> {
        let mut this = self.lock();
        let size = size(&put);
        if this.bytes + size > BYTES {
            this.drop_if(|_, since| now.duration_since(since) >= PATIENCE);
        }
        if this.bytes + size > BYTES {
            return Err(Error::InvalidInput(format!(
                "thread {}: checkpoint {} does not exist, and {} bytes of writes wait for such checkpoints already; \
                 put the checkpoint first",
                key.thread, key.id, this.bytes
            )));
        }
        this.bytes += size;
        this.writes.entry(key.clone()).or_default().push((now, (caller, Arc::new(put))));
        Ok(())
    }

    /// The writes that wait for a checkpoint, in the order of their arrival. Each waits until it [left](Self::left).
    pub(crate) fn of(&self, key: &CheckpointKey) -> Vec<Waiter> {
        self.lock().writes.get(key).into_iter().flatten().map(|(_, waiter)| waiter.clone()).collect()
    }

    /// Whether writes wait for a checkpoint: these, or any if `None`.
    pub(crate) fn has(&self, key: &CheckpointKey, put: Option<&Arc<PutWrites>>) -> bool {
        let this = self.lock();
        let mut waiting = this.writes.get(key).into_iter().flatten();
        waiting.any(|(_, (_, one))| put.is_none_or(|put| Arc::ptr_eq(one, put)))
    }

    /// Writes that waited are stored.
    pub(crate) fn left(&self, key: &CheckpointKey, put: &Arc<PutWrites>) {
        let mut this = self.lock();
        let Some(waiting) = this.writes.get_mut(key) else { return };
        // Somebody else may have stored them, too.
        let Some(at) = waiting.iter().position(|(_, (_, one))| Arc::ptr_eq(one, put)) else { return };
        waiting.remove(at);
        if waiting.is_empty() {
            this.writes.remove(key);
        }
        this.bytes -= size(put);
    }

    /// Drops what waits for checkpoints of a thread, which was deleted.
    pub(crate) fn forget(&self, thread: &ThreadId) {
        self.lock().drop_if(|key, _| key.thread == *thread);
    }
}

#[cfg(test)]
mod tests {
    use threadkeep::id::CheckpointId;

    use super::*;
    use crate::types::Place;
    use crate::value::stored;

    /// Writes of about a megabyte.
    fn large(place: &Place, id: CheckpointId) -> PutWrites {
        let value = stored("bytes", vec![7; 1 << 20].into()).unwrap();
        let (task, path) = ("task".to_owned(), String::new());
        PutWrites { place: place.clone(), id, task, path, writes: vec![("a".to_owned(), value)] }
    }

    #[test]
    fn writes_whose_checkpoint_never_comes_make_room_for_others() {
        let room = WaitingRoom::default();
        let (place, other) = (Place::new("t", ""), Place::new("other", ""));
        let key = |n| place.key(CheckpointId::from_bytes([n; 16]));
        let then = Instant::now();
        let fill = |n, at| {
            let put = large(&place, key(n).id);
            (0..100).take_while(|_| room.wait(&key(n), Caller::default(), put.clone(), at).is_ok()).count()
        };
        assert_eq!(fill(1, then), 63);
        // They came moments ago.
        assert_eq!(fill(2, then + PATIENCE / 2), 0);
        assert_eq!(room.of(&key(1)).len(), 63);
        assert_eq!(fill(2, then + PATIENCE), 63);
        assert_eq!(room.of(&key(1)).len(), 0);
        for (_, put) in room.of(&key(2)).iter().take(3) {
            room.left(&key(2), put);
            room.left(&key(2), put);
        }
        assert_eq!(room.of(&key(2)).len(), 60);
        room.forget(&other.thread);
        assert_eq!(fill(3, then + PATIENCE), 3);
        room.forget(&place.thread);
        assert!(room.lock().writes.is_empty() && room.lock().bytes == 0);
    }
}

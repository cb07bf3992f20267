//! Writes that arrived before their checkpoint: LangGraph hands both to executors, which may reorder them.

use std::collections::{HashMap, VecDeque};
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

/// Held while what waits for a checkpoint is stored; contains the error of the last attempt, if that failed. Of two
/// attempts at one time, one could store an older write after the other has stored a newer one.
pub(crate) type Turn = Arc<futures::lock::Mutex<Option<Error>>>;

#[derive(Default)]
struct Waiting {
    queues: HashMap<CheckpointKey, Queue>,
    bytes: usize,
}

/// What waits for a checkpoint, in the order of its arrival. It ends once nothing waits.
#[derive(Default)]
struct Queue {
    writes: VecDeque<(Instant, Waiter)>,
    turn: Turn,
}

impl Waiting {
    /// Drops writes.
    fn drop_if(&mut self, gone: impl Fn(&CheckpointKey, &Turn, Instant) -> bool) {
        for (key, Queue { writes, turn }) in &mut self.queues {
            writes.retain(|(since, (_, put))| {
                let stays = !gone(key, turn, *since);
                self.bytes -= if stays { 0 } else { size(put) };
                stays
            });
        }
        self.queues.retain(|_, queue| !queue.writes.is_empty());
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
            // What is being stored stays: what is put now would be stored beside it.
            this.drop_if(|_, turn, since| {
                Arc::strong_count(turn) == 1 && now.duration_since(since) >= PATIENCE
            });
        }
        if this.bytes + size > BYTES {
            return Err(Error::InvalidInput(format!(
                "thread {}: checkpoint {} does not exist, and {} bytes of writes wait for such checkpoints already; \
                 put the checkpoint first",
                key.thread, key.id, this.bytes
            )));
        }
        this.bytes += size;
        let queue = this.queues.entry(key.clone()).or_default();
        queue.writes.push_back((now, (caller, Arc::new(put))));
        Ok(())
    }

    /// Whether writes wait for a checkpoint.
    pub(crate) fn has(&self, key: &CheckpointKey) -> bool {
        self.lock().queues.contains_key(key)
    }

    /// What has to be held to store what waits for a checkpoint; `None` if nothing does.
    pub(crate) fn turn(&self, key: &CheckpointKey) -> Option<Turn> {
        self.lock().queues.get(key).map(|queue| queue.turn.clone())
    }

    /// The writes that came first of those that wait since before the turn was asked for; `None` if none is left. They
    /// wait until they [left](Self::left).
    pub(crate) fn first(&self, key: &CheckpointKey, turn: &Turn) -> Option<Waiter> {
        let this = self.lock();
        // Another turn is of those that came when all of this one were gone.
        let queue = this.queues.get(key).filter(|queue| Arc::ptr_eq(&queue.turn, turn))?;
        queue.writes.front().map(|(_, waiter)| waiter.clone())
    }

    /// Writes that came [first](Self::first) are stored.
    pub(crate) fn left(&self, key: &CheckpointKey, put: &Arc<PutWrites>) {
        let mut this = self.lock();
        let Some(queue) = this.queues.get_mut(key) else { return };
        // They may be gone with their thread, and others wait.
        let are_first = queue.writes.front().is_some_and(|(_, (_, first))| Arc::ptr_eq(first, put));
        if !are_first {
            return;
        }
        queue.writes.pop_front();
        if queue.writes.is_empty() {
            this.queues.remove(key);
        }
        this.bytes -= size(put);
    }

    /// Drops what waits for checkpoints of a thread, which was deleted.
    pub(crate) fn forget(&self, thread: &ThreadId) {
        self.lock().drop_if(|key, _, _| key.thread == *thread);
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
        let len = |n| room.lock().queues.get(&key(n)).map_or(0, |queue| queue.writes.len());
        assert_eq!(fill(1, then), 63);
        // They came moments ago.
        assert_eq!(fill(2, then + PATIENCE / 2), 0);
        assert_eq!(len(1), 63);
        // They are being stored.
        let turn = room.turn(&key(1)).unwrap();
        assert_eq!(fill(2, then + PATIENCE), 0);
        drop(turn);
        assert_eq!(fill(2, then + PATIENCE), 63);
        assert_eq!(len(1), 0);
        let turn = room.turn(&key(2)).unwrap();
        for _ in 0..3 {
            let (_, put) = room.first(&key(2), &turn).unwrap();
            room.left(&key(2), &put);
            room.left(&key(2), &put);
        }
        assert_eq!(len(2), 60);
        room.forget(&other.thread);
        assert_eq!(fill(3, then + PATIENCE), 3);
        room.forget(&place.thread);
        assert!(room.lock().queues.is_empty() && room.lock().bytes == 0);
        assert_eq!(fill(2, then), 63);
        assert!(room.first(&key(2), &turn).is_none(), "they came after those of this turn were gone");
    }
}

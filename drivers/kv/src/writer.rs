//! Runs changes one group after the other: what is called while a group is being stored is stored together by the next.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use threadkeep::saver::Flush;
use threadkeep::{Error, Result};
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;

use crate::overlay::Overlay;
use crate::store::Store;

/// Makes the changes of one call, on those of the calls before it in its group.
type Change = Box<dyn FnMut(&mut Overlay<'_>) -> Result<()> + Send>;

struct Call {
    flush: Flush,
    change: Change,
    reply: oneshot::Sender<Result<()>>,
}

#[derive(Default)]
struct Queue {
    calls: Vec<Call>,
    /// Whether a thread works on them.
    busy: bool,
}

/// The one writer of a saver.
pub(crate) struct Writer {
    store: Arc<dyn Store>,
    queue: Mutex<Queue>,
}

impl Writer {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self { store, queue: Mutex::default() }
    }

    /// Stores what `change` puts and deletes. It goes on if the caller is dropped.
    pub(crate) async fn write(
        self: &Arc<Self>,
        flush: Flush,
        change: impl FnMut(&mut Overlay<'_>) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let (reply, answer) = oneshot::channel();
        let starts = {
            let mut queue = self.queue();
            queue.calls.push(Call { flush, change: Box::new(change), reply });
            !std::mem::replace(&mut queue.busy, true)
        };
        if starts {
            let turn = Turn { writer: self.clone(), over: false };
            spawn_blocking(move || turn.work());
        }
        answer.await.unwrap_or_else(|_| {
            let reason = "the thread that was storing it ended early".to_owned();
            Err(Error::InDoubt { saver: self.store.name(), reason })
        })
    }

    // A queue is whole whenever the lock is free, even if it is poisoned.
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the changes of calls, in one write.
    fn store(&self, mut calls: Vec<Call>) {
        let all_wait = calls.iter().all(|call| call.flush == Flush::WithNext);
        let flush = if all_wait { Flush::WithNext } else { Flush::Now };
        let mut outcomes = Vec::new();
        let written = self.store.write(flush, &mut |stored| {
            // What an earlier call of this plan answered was not stored.
            outcomes.clear();
            let mut group = Overlay::new(stored);
            for call in &mut calls {
                let first = group.changes.is_empty();
                let mut own = Overlay::new(&group);
                let outcome = (call.change)(&mut own).map(|()| own.changes);
                let outcome = outcome.map(|changes| group.changes.extend(changes));
                outcomes.push((outcome, first));
            }
            Ok(std::mem::take(&mut group.changes))
        });
        if calls.len() > 1 && matches!(written, Err(Error::Corrupt { .. } | Error::InvalidInput(_))) {
            // Nothing was stored. It is because of what some of them write: each gets the answer that is its own, and most of
            // the others still share a write.
            let rest = calls.split_off(calls.len() / 2);
            self.store(calls);
            return self.store(rest);
        }
        let mut outcomes = outcomes.into_iter();
        for call in calls {
            let outcome = match (&written, outcomes.next()) {
                (Ok(()), Some((outcome, _))) => outcome,
                (Err(_), Some((Err(refused), true))) => Err(refused),
                // It was refused because of changes that may not have been stored.
                (Err(failed), Some((Err(_), false))) => {
                    Err(Error::Unavailable { saver: self.store.name(), reason: failed.to_string() })
                }
                (Err(failed), _) => Err(failed.clone()),
                (Ok(()), None) => {
                    let reason = "the store did not ask what to write".to_owned();
                    Err(Error::Unavailable { saver: self.store.name(), reason })
                }
            };
            // Nobody waits for a call that was dropped.
            drop(call.reply.send(outcome));
        }
    }
}

/// The turn of the thread that works on the queue. If it panics, or never starts because its runtime ends, the calls that wait
/// end in doubt, and the next call takes the turn.
struct Turn {
    writer: Arc<Writer>,
    over: bool,
}

impl Turn {
    fn work(mut self) {
        while let Some(calls) = self.next() {
            self.writer.store(calls);
        }
    }

    /// What was called meanwhile; without any, the turn is over.
    fn next(&mut self) -> Option<Vec<Call>> {
        let mut queue = self.writer.queue();
        if queue.calls.is_empty() {
            queue.busy = false;
            self.over = true;
            return None;
        }
        Some(std::mem::take(&mut queue.calls))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if !self.over {
            let mut queue = self.writer.queue();
            queue.calls.clear();
            queue.busy = false;
        }
    }
}

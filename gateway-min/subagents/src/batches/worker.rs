//! The worker of a process: claims items of batches for the slots that it has.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use chrono::TimeDelta;
use threadkeep::id::ThreadId;
use threadkeep::state::StateAccessor;
use threadkeep_records::{RecordsError, on_its_own_thread, worker_name};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::budgets::Budgets;
use super::endings::Endings;
use super::leases::Leases;
use super::{Batching, item};
use crate::admission::{Class, Slot};
use crate::delegator::{CatchUpError, Delegator};

/// How long a subagent may go on when its item is lost, with what it takes to notice.
const STOPPED_WITHIN: Duration = Duration::from_secs(10);

/// The worker of a process. It works until it is stopped or dropped.
pub struct BatchWorker {
    worker: Arc<Worker>,
}

/// What the worker and its items share.
pub(super) struct Worker {
    pub(super) delegator: Arc<Delegator>,
    pub(super) batching: Arc<Batching>,
    pub(super) accessor: StateAccessor,
    pub(super) leases: Arc<Leases>,
    pub(super) endings: Endings,
    pub(super) budgets: Budgets,
    /// Set when it stops: nothing is claimed any more, and what was claimed is given back.
    pub(super) stop: CancellationToken,
    /// The loops, and the items at work.
    pub(super) tasks: TaskTracker,
    name: String,
}

impl BatchWorker {
    /// Starts the worker of a process that works on batches; `None` if it does not.
    ///
    /// # Errors
    /// There can be no thread that renews leases.
    pub async fn start(delegator: &Arc<Delegator>, accessor: StateAccessor) -> io::Result<Option<Self>> {
        let Some(batching) = delegator.batches.clone() else { return Ok(None) };
        let owner = delegator.records.runs().owner();
        let worker = Arc::new(Worker {
            endings: Endings::new(delegator.records.batches().clone()),
            leases: Arc::new(Leases::new(Duration::from_secs(batching.settings.lease_seconds))),
            stop: delegator.stopping.child_token(),
            tasks: TaskTracker::new(),
            name: worker_name(&owner.map_or_else(|| Uuid::new_v4().to_string(), str::to_owned)),
            budgets: Budgets::new(delegator.records.batches().clone()),
            delegator: Arc::clone(delegator),
            batching,
            accessor,
        });
        // From here, dropping it ends what it has started.
        let started = Self { worker };
        let worker = &started.worker;
        // It holds nothing else of the worker, which is dropped where it was made.
        let leases = Arc::clone(&worker.leases);
        let watching = leases.watch(delegator.records.batches().clone(), worker.tasks.clone(), worker.poll());
        on_its_own_thread("batch-leases", watching).await?;
        worker.batching.working.store(true, Ordering::Release);
        worker.tasks.spawn(Arc::clone(worker).claim_all());
        worker.tasks.spawn(Arc::clone(worker).sweep());
        Ok(Some(started))
    }

    /// Stops: claims nothing more, stops the subagents at work, and gives their items back, so that another process goes
    /// on with them at once. Returns when that is done. Any number of callers may call it.
    pub async fn stop(&self) {
        self.worker.stop.cancel();
        self.worker.tasks.close();
        self.worker.tasks.wait().await;
    }
}

impl Drop for BatchWorker {
    fn drop(&mut self) {
        self.worker.stop.cancel();
        self.worker.tasks.close();
    }
}

impl Worker {
    /// How long to wait for something to do.
    pub(super) fn poll(&self) -> Duration {
        Duration::from_secs_f64(self.batching.settings.poll_interval_seconds)
    }

    /// Counts what attempts used that nobody ended, and removes what items of deleted threads have left, now and then, until
    /// it is stopped.
    async fn sweep(self: Arc<Self>) {
        while !self.stop.is_cancelled() {
            if let Err(error) = self.remove_remains().await {
                tracing::warn!(%error, "what is left of deleted batch items is removed later");
            }
            if let Err(error) = self.count_uncounted().await {
                tracing::warn!(%error, "the tokens of batch items that nobody ended are counted later");
            }
            tokio::select! {
                biased;
                () = self.stop.cancelled() => {}
                () = tokio::time::sleep(self.leases.renewal()) => {}
            }
        }
    }

    /// Deletes the checkpoints of items whose thread was deleted while they may have been at work: after the longest time
    /// for which another process can have worked on, and which it did not survive if anything is left.
    async fn remove_remains(&self) -> Result<(), CatchUpError> {
        let batches = self.delegator.records.batches();
        for thread in batches.remains(self.longest()).await? {
            if self.stop.is_cancelled() {
                break;
            }
            // Whatever it contains: it is named after an item of a batch, whose id is random, so nobody else gets it.
            self.accessor.delete_thread(&ThreadId::from(thread.as_str())).await?;
            batches.forget_remains(&thread).await?;
        }
        Ok(())
    }

    /// The longest time for which a process can work on what is not its own any more.
    pub(super) fn longest(&self) -> TimeDelta {
        self.leases.length() + TimeDelta::from_std(STOPPED_WITHIN).unwrap_or_default()
    }

    /// Claims items until it is stopped.
    async fn claim_all(self: Arc<Self>) {
        let (mut turns, mut unanswered) = (Turns::default(), Vec::new());
        while !self.stop.is_cancelled() {
            let found = match self.pass(&mut turns, &mut unanswered).await {
                Ok(found) => found,
                Err(error) => {
                    tracing::warn!(%error, "no items of batches could be claimed; trying again");
                    false
                }
            };
            if !found {
                tokio::select! {
                    biased;
                    () = self.stop.cancelled() => {}
                    () = self.batching.wake.notified() => {}
                    () = tokio::time::sleep(self.poll()) => {}
                }
            }
        }
        if let Err(error) = self.give_back(&mut unanswered).await {
            tracing::warn!(%error, "items of batches that nobody works on are claimed when their leases have expired");
        }
        self.batching.working.store(false, Ordering::Release);
    }

    /// Gives back what claims without an answer may have got. Once a lease has expired, any worker does.
    async fn give_back(&self, unanswered: &mut Vec<Unanswered>) -> Result<(), RecordsError> {
        while let Some(Unanswered { batch_id, owner, until }) = unanswered.last() {
            if Instant::now() < *until {
                self.delegator.records.batches().release_unanswered(batch_id, owner).await?;
            }
            unanswered.pop();
        }
        Ok(())
    }

    /// Gives every batch with claimable items one turn. Returns whether anything was claimed.
    async fn pass(
        self: &Arc<Self>,
        turns: &mut Turns,
        unanswered: &mut Vec<Unanswered>,
    ) -> Result<bool, RecordsError> {
        self.give_back(unanswered).await?;
        let batches = self.delegator.records.batches();
        let mut claimable = batches.claimable().await?;
        turns.order(&mut claimable);
        let mut found = false;
        for (index, batch_id) in claimable.iter().enumerate() {
            let Some(slots) = self.slots(batch_id, claimable.len() - index).await else { return Ok(found) };
            let owner = turns.next_owner(&self.name);
            // Without another batch to turn to, there is nothing better to do than to wait for another process's claim.
            let (asked, waits) = (Instant::now(), turns.waits_for(batch_id) || claimable.len() == 1);
            let length = self.leases.length();
            let claimed = batches.claim(batch_id, &owner, length, slots.len(), waits).await;
            if let Err(RecordsError::InDoubt { .. }) = claimed {
                let until = Instant::now() + self.leases.renewal() * 3;
                unanswered.push(Unanswered { batch_id: batch_id.clone(), owner: owner.clone(), until });
            }
            let claimed = match claimed {
                // Its rows cannot be read. No other batch waits for that.
                Err(error) if !error.is_unavailable() => {
                    tracing::error!(batch_id, %error, "no items of a batch can be claimed");
                    turns.served(batch_id);
                    continue;
                }
                claimed => claimed?,
            };
            let Some(claimed) = claimed else {
                // Another process is at it; if it has no other batch to turn to, this one waits for it.
                turns.skipped.insert(batch_id.clone());
                found = true;
                continue;
            };
            turns.served(batch_id);
            found |= !claimed.items.is_empty();
            let batch = Arc::new(claimed.batch);
            for (item, slot) in claimed.items.into_iter().zip(slots) {
                let lost = self.leases.add(&item.claim, asked);
                let at_work =
                    item::AtWork { worker: Arc::clone(self), batch: Arc::clone(&batch), item, lost };
                self.tasks.spawn(at_work.work(slot));
            }
        }
        Ok(found)
    }

    /// A slot for an item of this batch, and its share of others that are free; `None` if there is none to be had, or the
    /// worker stops. Items are claimed only for slots, so that no lease runs out in a queue.
    async fn slots(&self, batch_id: &str, batches: usize) -> Option<Vec<Slot>> {
        let admission = &self.delegator.admission;
        let class = Class::Batch(batch_id.into());
        let first = tokio::select! {
            biased;
            () = self.stop.cancelled() => return None,
            slot = admission.acquire(&class) => slot.ok()?,
        };
        let free = admission.capacity().saturating_sub(admission.counts().running);
        let mut slots = vec![first];
        slots.extend((0..free / batches).map_while(|_| admission.try_acquire()));
        Some(slots)
    }
}

/// A claim whose answer was lost. Nobody works on what it got.
struct Unanswered {
    batch_id: String,
    owner: String,
    /// When the lease of that is over.
    until: Instant,
}

/// Whose turn it is: the batch that has waited longest for one.
#[derive(Default)]
struct Turns {
    number: u64,
    served: BTreeMap<String, u64>,
    /// Batches that another process was claiming from when it was their turn.
    skipped: HashSet<String>,
}

impl Turns {
    /// Sorts the batches by their last turns; those without one come first, in their order.
    fn order(&mut self, batches: &mut [String]) {
        self.served.retain(|batch, _| batches.contains(batch));
        self.skipped.retain(|batch| batches.contains(batch));
        batches.sort_by_key(|batch| self.served.get(batch).copied().unwrap_or_default());
    }

    fn next_owner(&mut self, name: &str) -> String {
        self.number += 1;
        format!("{name}:{}", self.number)
    }

    /// Whether to wait for another process's claim: it was skipped before.
    fn waits_for(&mut self, batch_id: &str) -> bool {
        self.skipped.remove(batch_id)
    }

    fn served(&mut self, batch_id: &str) {
        self.served.insert(batch_id.to_owned(), self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A large batch does not delay a later one: the batch that waited longest is next.
    #[test]
    fn batches_take_turns() {
        let mut turns = Turns::default();
        let mut order = Vec::new();
        for _ in 0..7 {
            let mut batches = ["old", "new", "newest"].map(str::to_owned);
            turns.order(&mut batches);
            turns.next_owner("w");
            turns.served(&batches[0]);
            order.push(batches[0].clone());
        }
        assert_eq!(order, ["old", "new", "newest", "old", "new", "newest", "old"]);
        assert_ne!(turns.next_owner("w"), turns.next_owner("w"), "no claim has the name of another");
    }
}

//! For tests of a store: damage that no method of a saver does, and operations that fail.
//!
//! This is what the conformance suite asks of a store besides its methods. See the tests of `drivers/redb`.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use threadkeep::checkpoint::CheckpointKey;
use threadkeep::id::TaskId;
use threadkeep::saver::Flush;
use threadkeep::{Error, Result};

use crate::keys::{self, Space, under};
use crate::reader::{Reader, thread};
use crate::record::CheckpointRecord;
use crate::rows;
use crate::store::{Changes, Order, Plan, Snapshot, Store, Visit};

/// Removes a checkpoint with the writes under it, and leaves everything that refers to it. Returns whether it existed.
///
/// # Errors
/// Those of the store.
pub fn lose_checkpoint(store: &dyn Store, key: &CheckpointKey) -> Result<bool> {
    damage(store, |rows| {
        let Some(found) = thread(rows, &key.thread)? else { return Ok(Changes::new()) };
        let own = keys::checkpoint(found.number, &key.namespace, key.id);
        let mut changes = Changes::new();
        if rows.get(&own)?.is_some() {
            changes.insert(own, None);
        }
        rows::each(rows, under(keys::tasks(found.number, &key.namespace, key.id)), |key, _| {
            changes.insert(key.to_vec(), None);
            Ok(())
        })?;
        Ok(changes)
    })
}

/// Removes the writes of a task under the checkpoint that it ran from. Returns whether they existed.
///
/// # Errors
/// Those of the store.
pub fn lose_writes(store: &dyn Store, at: &CheckpointKey, task: TaskId) -> Result<bool> {
    damage(store, |rows| {
        let Some(found) = thread(rows, &at.thread)? else { return Ok(Changes::new()) };
        let key = keys::task(found.number, &at.namespace, at.id, task);
        Ok(rows.get(&key)?.map(|_| (key, None)).into_iter().collect())
    })
}

/// Removes a checkpoint's parent link. Returns whether it had one.
///
/// # Errors
/// Those of the store.
pub fn lose_parent_link(store: &dyn Store, at: &CheckpointKey) -> Result<bool> {
    damage(store, |rows| {
        let Some(found) = thread(rows, &at.thread)? else { return Ok(Changes::new()) };
        let key = keys::checkpoint(found.number, &at.namespace, at.id);
        let Some(body) = rows::get(rows, &key)? else { return Ok(Changes::new()) };
        let mut record = Reader::new(rows, &at.thread, &found).decode(&key, &body)?;
        if record.parent.take().is_none() {
            return Ok(Changes::new());
        }
        let names = CheckpointRecord::names_of(&body).map_err(|reason| rows::corrupt(&key, reason))?;
        let value = rows::sealed(&key, record.encode(names));
        Ok([(key, Some(value))].into_iter().collect())
    })
}

/// Changes a byte of the newest element of a list of a checkpoint's thread. Returns whether there is one.
///
/// # Errors
/// Those of the store.
pub fn change_byte(store: &dyn Store, at: &CheckpointKey) -> Result<bool> {
    damage(store, |rows| {
        let Some(found) = thread(rows, &at.thread)? else { return Ok(Changes::new()) };
        let keys = under(keys::elements(found.number, Space::Values));
        let mut changes = Changes::new();
        rows.range(&keys.start..&keys.end, Order::Descending, &mut |key, value| {
            let mut value = value.to_vec();
            let middle = value.len() / 2;
            value.iter_mut().skip(middle).take(1).for_each(|byte| *byte ^= 1);
            changes.insert(key.to_vec(), Some(value));
            Ok(ControlFlow::Break(()))
        })?;
        Ok(changes)
    })
}

/// Makes changes that no method makes. Returns whether there were any.
fn damage(store: &dyn Store, plan: impl Fn(&dyn Snapshot) -> Result<Changes>) -> Result<bool> {
    let mut any = false;
    store.write(Flush::Now, &mut |rows| {
        let changes = plan(rows)?;
        any = !changes.is_empty();
        Ok(changes)
    })?;
    Ok(any)
}

/// Decides which operation of a [`Failing`] store fails.
#[derive(Debug, Clone)]
pub struct Fault {
    /// Operations before the one that fails; negative after it.
    left: Arc<AtomicI64>,
    failed: Arc<AtomicBool>,
}

impl Fault {
    /// Fails the `nth` operation from now, counted from 0. Returns what is set when it has failed.
    pub fn arm(&self, nth: u32) -> Arc<AtomicBool> {
        self.left.store(i64::from(nth), Ordering::SeqCst);
        self.failed.clone()
    }

    fn strikes(&self) -> bool {
        let strikes = self.left.fetch_sub(1, Ordering::SeqCst) == 0;
        if strikes {
            self.failed.store(true, Ordering::SeqCst);
        }
        strikes
    }
}

/// A store, one of whose operations fails: a snapshot, a read, a write before anything is stored, or one after that, which
/// leaves its outcome in doubt.
#[derive(Debug)]
pub struct Failing<S> {
    store: S,
    fault: Fault,
}

impl<S: Store> Failing<S> {
    /// The store, which fails once the [`Fault`] is armed.
    pub fn new(store: S) -> (Self, Fault) {
        let fault = Fault { left: Arc::new(AtomicI64::new(-1)), failed: Arc::default() };
        (Self { store, fault: fault.clone() }, fault)
    }
}

const REASON: &str = "a test makes this operation fail";

impl<S: Store> Store for Failing<S> {
    fn name(&self) -> &'static str {
        self.store.name()
    }

    fn durable(&self) -> bool {
        self.store.durable()
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot + '_>> {
        let name = self.name();
        if self.fault.strikes() {
            return Err(Error::Unavailable { saver: name, reason: REASON.to_owned() });
        }
        Ok(Box::new(FailingSnapshot { below: self.store.snapshot()?, name, fault: &self.fault }))
    }

    fn write(&self, flush: Flush, plan: &mut Plan<'_>) -> Result<()> {
        let name = self.name();
        if self.fault.strikes() {
            return Err(Error::Unavailable { saver: name, reason: REASON.to_owned() });
        }
        self.store
            .write(flush, &mut |rows| plan(&FailingSnapshot { below: rows, name, fault: &self.fault }))?;
        if self.fault.strikes() {
            return Err(Error::InDoubt { saver: name, reason: REASON.to_owned() });
        }
        Ok(())
    }
}

struct FailingSnapshot<'a, B> {
    below: B,
    name: &'static str,
    fault: &'a Fault,
}

impl<B> FailingSnapshot<'_, B> {
    fn strike(&self) -> Result<()> {
        if self.fault.strikes() {
            return Err(Error::Unavailable { saver: self.name, reason: REASON.to_owned() });
        }
        Ok(())
    }
}

impl<B: std::ops::Deref<Target: Snapshot>> Snapshot for FailingSnapshot<'_, B> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.strike()?;
        self.below.get(key)
    }

    fn range(&self, keys: Range<&[u8]>, order: Order, visit: &mut Visit<'_>) -> Result<()> {
        self.strike()?;
        self.below.range(keys, order, visit)
    }
}

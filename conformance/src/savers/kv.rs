//! Savers over a key-value store.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tempfile::TempDir;
use threadkeep::saver::Saver;
use threadkeep::{Error, Result};
use threadkeep_kv::{KvSaver, Store, testing};
use tokio::task::block_in_place;

use crate::{BoxError, Claim, Damage, Factory, Failing};

/// How long a store may take to be closed after its last handle was dropped, on any busy machine.
const CLOSING: Duration = Duration::from_mins(10);

const CLAIMS: &[Claim] = &[
    Claim::Durable,
    Claim::Killable,
    Claim::LoseCheckpoint,
    Claim::LoseWrites,
    Claim::LoseParentLink,
    Claim::ChangeByte,
    Claim::FailOperations,
    Claim::SharedElements,
    Claim::StoredBytes,
];
/// The last of [`CLAIMS`], which need [`Kv::used_bytes`].
const MEASURED: usize = 2;

/// The factory of a saver over a key-value store that keeps its files in a directory, or its keys under that name. Each
/// store of the suite has a temporary directory.
pub struct Kv<S> {
    /// The prefix of each case's name.
    pub name: &'static str,
    /// Opens the store in an existing directory.
    pub open: fn(&Path) -> Result<S>,
    /// For a store that is open once at a time, as embedded ones are: all handles of a case share it. This is what
    /// `open` says, as part of an [`Error::Unavailable`], while it is still open: a call that was dropped may be at
    /// work on it, so the factory tries again for ten minutes.
    ///
    /// `None` for one that several processes may have open, as on a server: each handle opens it for itself. Only then
    /// does the suite see whether one handle's writes come between another one's plan and its changes.
    pub in_use: Option<&'static str>,
    /// The bytes that the store takes for what it holds, without what it keeps free, for [`Claim::StoredBytes`] and
    /// [`Claim::SharedElements`].
    pub used_bytes: Option<fn(&S) -> Result<u64>>,
}

/// A temporary directory, and the store that is open in it, if its handles share one.
pub struct Directory<S> {
    directory: TempDir,
    opened: Mutex<Weak<S>>,
}

impl<S: Store + 'static> Kv<S> {
    /// The opened store of a handle.
    fn store(&self, place: &Directory<S>) -> Result<Arc<S>> {
        if self.in_use.is_none() {
            return self.at(place.directory.path()).map(Arc::new);
        }
        let mut opened = place.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(store) = opened.upgrade() {
            return Ok(store);
        }
        let store = Arc::new(self.at(place.directory.path())?);
        *opened = Arc::downgrade(&store);
        Ok(store)
    }

    fn at(&self, directory: &Path) -> Result<S> {
        let started = Instant::now();
        loop {
            match ((self.open)(directory), self.in_use) {
                (Err(Error::Unavailable { reason, .. }), Some(in_use))
                    if reason.contains(in_use) && started.elapsed() < CLOSING =>
                {
                    std::thread::sleep(Duration::from_millis(2));
                }
                (opened, _) => return opened,
            }
        }
    }
}

#[async_trait]
impl<S: Store + 'static> Factory for Kv<S> {
    type Storage = Directory<S>;

    fn name(&self) -> &'static str {
        self.name
    }

    fn claims(&self) -> &'static [Claim] {
        if self.used_bytes.is_some() { CLAIMS } else { &CLAIMS[..CLAIMS.len() - MEASURED] }
    }

    async fn create(&self) -> Result<Directory<S>, BoxError> {
        Ok(Directory { directory: tempfile::tempdir()?, opened: Mutex::default() })
    }

    // A store blocks, and one whose client is async waits for a runtime of its own, which async code must not do.
    async fn open(&self, place: &Directory<S>) -> Result<Arc<dyn Saver>, BoxError> {
        block_in_place(|| Ok(Arc::new(KvSaver::open(self.store(place)?)?) as Arc<dyn Saver>))
    }

    async fn damage(&self, place: &Directory<S>, damage: &Damage) -> Result<(), BoxError> {
        let done = block_in_place(|| {
            let store = self.store(place)?;
            match damage {
                Damage::LoseCheckpoint(key) => testing::lose_checkpoint(&store, key),
                Damage::LoseWrites(at, task) => testing::lose_writes(&store, at, *task),
                Damage::LoseParentLink(key) => testing::lose_parent_link(&store, key),
                Damage::ChangeByte(key) => testing::change_byte(&store, key),
            }
        })?;
        if done { Ok(()) } else { Err(format!("there is nothing to lose: {damage:?}").into()) }
    }

    async fn stored_bytes(&self, place: &Directory<S>) -> Result<u64, BoxError> {
        let used_bytes = self.used_bytes.ok_or("this factory has no `used_bytes`")?;
        Ok(block_in_place(|| used_bytes(&*self.store(place)?))?)
    }

    async fn open_failing(&self, place: &Directory<S>, nth: u32) -> Result<Failing, BoxError> {
        block_in_place(|| {
            let (store, fault) = testing::Failing::new(self.store(place)?);
            let saver = Arc::new(KvSaver::open(store)?);
            Ok(Failing { saver, failed: fault.arm(nth) })
        })
    }

    fn address(&self, place: &Directory<S>) -> Result<String, BoxError> {
        let path = place.directory.path();
        let text = path.to_str().ok_or_else(|| format!("the path {} is not UTF-8", path.display()))?;
        Ok(text.to_owned())
    }

    async fn open_at(&self, address: &str) -> Result<Arc<dyn Saver>, BoxError> {
        block_in_place(|| Ok(Arc::new(KvSaver::open(self.at(Path::new(address))?)?) as Arc<dyn Saver>))
    }
}

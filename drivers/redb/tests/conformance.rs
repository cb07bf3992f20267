//! The conformance suite on redb.

use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tempfile::TempDir;
use threadkeep::Error;
use threadkeep::saver::Saver;
use threadkeep_conformance::{BoxError, Claim, Damage, Factory, Failing};
use threadkeep_kv::{KvSaver, testing};
use threadkeep_redb::RedbStore;

struct Redb;

/// A file in a temporary directory, and the handle on it that is open, because redb opens a file once.
struct Place {
    dir: TempDir,
    open: Mutex<Weak<RedbStore>>,
}

const FILE: &str = "checkpoints.redb";

impl Place {
    fn store(&self) -> Result<Arc<RedbStore>, BoxError> {
        let mut open = self.open.lock().map_err(|error| error.to_string())?;
        if let Some(store) = open.upgrade() {
            return Ok(store);
        }
        let store = Arc::new(at(&self.dir.path().join(FILE))?);
        *open = Arc::downgrade(&store);
        Ok(store)
    }
}

/// Opens a file, once the handle before it is closed: a call that was dropped may still be working on it.
fn at(path: &Path) -> threadkeep::Result<RedbStore> {
    let started = Instant::now();
    loop {
        match RedbStore::open(path) {
            Err(Error::Unavailable { reason, .. })
                if reason.contains("already open") && started.elapsed() < Duration::from_mins(1) =>
            {
                std::thread::sleep(Duration::from_millis(2));
            }
            opened => return opened,
        }
    }
}

#[async_trait]
impl Factory for Redb {
    type Storage = Place;

    fn name(&self) -> &'static str {
        "redb"
    }

    fn claims(&self) -> &'static [Claim] {
        &[
            Claim::Durable,
            Claim::LoseCheckpoint,
            Claim::LoseWrites,
            Claim::LoseParentLink,
            Claim::ChangeByte,
            Claim::SharedElements,
            Claim::StoredBytes,
            Claim::FailOperations,
            Claim::Killable,
        ]
    }

    async fn create(&self) -> Result<Place, BoxError> {
        Ok(Place { dir: tempfile::tempdir()?, open: Mutex::default() })
    }

    async fn open(&self, place: &Place) -> Result<Arc<dyn Saver>, BoxError> {
        Ok(Arc::new(KvSaver::open(place.store()?)?))
    }

    async fn damage(&self, place: &Place, damage: &Damage) -> Result<(), BoxError> {
        let store = place.store()?;
        let done = match damage {
            Damage::LoseCheckpoint(key) => testing::lose_checkpoint(&store, key)?,
            Damage::LoseWrites(at, task) => testing::lose_writes(&store, at, *task)?,
            Damage::LoseParentLink(key) => testing::lose_parent_link(&store, key)?,
            Damage::ChangeByte(key) => testing::change_byte(&store, key)?,
        };
        if done { Ok(()) } else { Err(format!("there is nothing to lose: {damage:?}").into()) }
    }

    async fn stored_bytes(&self, place: &Place) -> Result<u64, BoxError> {
        Ok(place.store()?.used_bytes()?)
    }

    async fn open_failing(&self, place: &Place, nth: u32) -> Result<Failing, BoxError> {
        let (store, fault) = testing::Failing::new(place.store()?);
        let saver = Arc::new(KvSaver::open(store)?);
        Ok(Failing { saver, failed: fault.arm(nth) })
    }

    fn address(&self, place: &Place) -> Result<String, BoxError> {
        let path = place.dir.path().join(FILE).into_os_string();
        path.into_string().map_err(|path| format!("the path {} is not UTF-8", path.display()).into())
    }

    async fn open_at(&self, address: &str) -> Result<Arc<dyn Saver>, BoxError> {
        Ok(Arc::new(KvSaver::open(at(Path::new(address))?)?))
    }
}

fn main() -> ExitCode {
    threadkeep_conformance::main(Redb)
}

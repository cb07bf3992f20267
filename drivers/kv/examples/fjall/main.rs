//! A second store, to show that the saver is not made for one: [fjall](https://docs.rs/fjall), whose data is in logs and sorted
//! files rather than in a tree of pages. `store.rs` is the whole driver; here is the conformance suite on it.
//!
//! Run it with `cargo run -p threadkeep-kv --example fjall`.

mod store;

use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use store::FjallStore;
use tempfile::TempDir;
use threadkeep::Error;
use threadkeep::saver::Saver;
use threadkeep_conformance::{BoxError, Claim, Damage, Factory, Failing};
use threadkeep_kv::{KvSaver, testing};

struct Fjall;

/// A temporary directory, and the handle on it that is open, because fjall opens a directory once.
struct Place {
    dir: TempDir,
    open: Mutex<Weak<FjallStore>>,
}

impl Place {
    fn store(&self) -> Result<Arc<FjallStore>, BoxError> {
        let mut open = self.open.lock().map_err(|error| error.to_string())?;
        if let Some(store) = open.upgrade() {
            return Ok(store);
        }
        let store = Arc::new(at(self.dir.path())?);
        *open = Arc::downgrade(&store);
        Ok(store)
    }
}

/// Opens a directory, once the handle before it is closed: a call that was dropped may still be working on it.
fn at(path: &Path) -> threadkeep::Result<FjallStore> {
    let started = Instant::now();
    loop {
        match FjallStore::open(path) {
            Err(Error::Unavailable { reason, .. })
                if reason.contains("Locked") && started.elapsed() < Duration::from_mins(1) =>
            {
                std::thread::sleep(Duration::from_millis(2));
            }
            opened => return opened,
        }
    }
}

#[async_trait]
impl Factory for Fjall {
    type Storage = Place;

    fn name(&self) -> &'static str {
        "fjall"
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
        Ok(place.store()?.live_bytes()?)
    }

    async fn open_failing(&self, place: &Place, nth: u32) -> Result<Failing, BoxError> {
        let (store, fault) = testing::Failing::new(place.store()?);
        let saver = Arc::new(KvSaver::open(store)?);
        Ok(Failing { saver, failed: fault.arm(nth) })
    }

    fn address(&self, place: &Place) -> Result<String, BoxError> {
        Ok(place.dir.path().to_str().ok_or("the temporary directory's name is not UTF-8")?.to_owned())
    }

    async fn open_at(&self, address: &str) -> Result<Arc<dyn Saver>, BoxError> {
        Ok(Arc::new(KvSaver::open(at(Path::new(address))?)?))
    }
}

fn main() -> ExitCode {
    threadkeep_conformance::main(Fjall)
}

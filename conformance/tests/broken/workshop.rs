//! Opens savers with one fault.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use threadkeep::saver::Saver;
use threadkeep_conformance::{BoxError, Claim, Damage, Factory, Failing};
use threadkeep_memory::MemorySaver;

use super::{Broken, Fault, Shared};

/// Creates stores with one fault.
pub(crate) struct Workshop(pub(crate) Fault);

pub(crate) struct Storage {
    store: MemorySaver,
    shared: Arc<Mutex<Shared>>,
}

#[async_trait]
impl Factory for Workshop {
    type Storage = Storage;

    fn name(&self) -> &'static str {
        "broken"
    }

    fn claims(&self) -> &'static [Claim] {
        match self.0 {
            Fault::ForgetsOnReopening => &[Claim::Durable],
            _ => &[Claim::LoseCheckpoint, Claim::LoseWrites, Claim::LoseParentLink, Claim::FailOperations],
        }
    }

    async fn create(&self) -> Result<Storage, BoxError> {
        Ok(Storage { store: MemorySaver::new(), shared: Arc::default() })
    }

    async fn open(&self, place: &Storage) -> Result<Arc<dyn Saver>, BoxError> {
        let alone = matches!(self.0, Fault::SharesNothing | Fault::ForgetsOnReopening);
        let inner = if alone { MemorySaver::new() } else { place.store.clone() };
        Ok(Arc::new(Broken {
            inner,
            fault: self.0,
            shared: place.shared.clone(),
            failing: None,
            alone: tokio::sync::Mutex::const_new(()),
        }))
    }

    /// The memory saver has one operation per call.
    async fn open_failing(&self, place: &Storage, nth: u32) -> Result<Failing, BoxError> {
        let failed = Arc::new(AtomicBool::new(false));
        let failing = (nth == 0).then(|| failed.clone());
        let (inner, shared) = (place.store.clone(), place.shared.clone());
        Ok(Failing {
            saver: Arc::new(Broken {
                inner,
                fault: self.0,
                shared,
                failing,
                alone: tokio::sync::Mutex::const_new(()),
            }),
            failed,
        })
    }

    async fn damage(&self, place: &Storage, damage: &Damage) -> Result<(), BoxError> {
        let done = match damage {
            Damage::LoseCheckpoint(key) => place.store.lose_checkpoint(key),
            Damage::LoseWrites(at, task) => place.store.lose_writes(at, *task),
            Damage::LoseParentLink(key) => place.store.lose_parent_link(key),
            Damage::ChangeByte(_) => false,
        };
        if done { Ok(()) } else { Err("nothing to lose".into()) }
    }
}

//! The conformance suite on a store in memory, with everything that a store may claim without a disk.

mod common;

use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use common::Map;
use threadkeep::saver::Saver;
use threadkeep_conformance::{BoxError, Claim, Damage, Factory, Failing};
use threadkeep_kv::{KvSaver, testing};

struct Maps;

#[async_trait]
impl Factory for Maps {
    type Storage = Arc<Map>;

    fn name(&self) -> &'static str {
        "kv"
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
        ]
    }

    async fn create(&self) -> Result<Arc<Map>, BoxError> {
        Ok(Arc::default())
    }

    async fn open(&self, place: &Arc<Map>) -> Result<Arc<dyn Saver>, BoxError> {
        Ok(Arc::new(KvSaver::open(place.clone())?))
    }

    async fn damage(&self, place: &Arc<Map>, damage: &Damage) -> Result<(), BoxError> {
        let done = match damage {
            Damage::LoseCheckpoint(key) => testing::lose_checkpoint(place, key)?,
            Damage::LoseWrites(at, task) => testing::lose_writes(place, at, *task)?,
            Damage::LoseParentLink(key) => testing::lose_parent_link(place, key)?,
            Damage::ChangeByte(key) => testing::change_byte(place, key)?,
        };
        if done { Ok(()) } else { Err(format!("there is nothing to lose: {damage:?}").into()) }
    }

    async fn stored_bytes(&self, place: &Arc<Map>) -> Result<u64, BoxError> {
        Ok(place.rows().iter().map(|(key, value)| (key.len() + value.len()) as u64).sum())
    }

    async fn open_failing(&self, place: &Arc<Map>, nth: u32) -> Result<Failing, BoxError> {
        let (store, fault) = testing::Failing::new(place.clone());
        let saver = Arc::new(KvSaver::open(store)?);
        Ok(Failing { saver, failed: fault.arm(nth) })
    }
}

fn main() -> ExitCode {
    threadkeep_conformance::main(Maps)
}

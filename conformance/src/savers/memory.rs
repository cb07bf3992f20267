use std::sync::Arc;

use async_trait::async_trait;
use threadkeep::saver::Saver;
use threadkeep_memory::MemorySaver;

use crate::{BoxError, Claim, Damage, Factory};

/// The memory saver.
#[derive(Debug, Clone, Copy)]
pub struct Memory;

#[async_trait]
impl Factory for Memory {
    type Storage = MemorySaver;

    fn name(&self) -> &'static str {
        "memory"
    }

    fn claims(&self) -> &'static [Claim] {
        &[Claim::LoseCheckpoint, Claim::LoseWrites, Claim::LoseParentLink]
    }

    async fn create(&self) -> Result<MemorySaver, BoxError> {
        Ok(MemorySaver::new())
    }

    async fn open(&self, place: &MemorySaver) -> Result<Arc<dyn Saver>, BoxError> {
        Ok(Arc::new(place.clone()))
    }

    async fn damage(&self, place: &MemorySaver, damage: &Damage) -> Result<(), BoxError> {
        let done = match damage {
            Damage::LoseCheckpoint(key) => place.lose_checkpoint(key),
            Damage::LoseWrites(at, task) => place.lose_writes(at, *task),
            Damage::LoseParentLink(key) => place.lose_parent_link(key),
            Damage::ChangeByte(_) => return Err("there is no medium whose bytes could change".into()),
        };
        if done { Ok(()) } else { Err(format!("there is nothing to lose: {damage:?}").into()) }
    }
}

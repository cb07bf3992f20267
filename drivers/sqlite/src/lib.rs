//! Stub.
#![allow(missing_docs, clippy::all, clippy::pedantic)]
pub enum Synchronous {
    Full,
    Normal,
}
pub struct Options {
    pub synchronous: Synchronous,
}
impl Default for Options {
    fn default() -> Self {
        Self { synchronous: Synchronous::Full }
    }
}
#[derive(Clone)]
pub struct SqliteSaver;
impl SqliteSaver {
    pub async fn open_async(_: std::path::PathBuf, _: Options) -> threadkeep::Result<Self> {
        Ok(Self)
    }
    pub async fn close(&self) -> threadkeep::Result<()> {
        Ok(())
    }
}
use std::collections::BTreeSet;
use threadkeep::Result;
use threadkeep::checkpoint::*;
use threadkeep::id::*;
use threadkeep::saver::*;
#[async_trait::async_trait]
impl Saver for SqliteSaver {
    async fn get(&self, _: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        Ok(None)
    }
    async fn list(&self, _: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        Ok(vec![])
    }
    async fn put_writes(&self, _: &CheckpointKey, _: &TaskWrites) -> Result<()> {
        Ok(())
    }
    async fn commit(&self, s: StepCommit) -> Result<CheckpointKey> {
        Ok(s.key())
    }
    async fn delta_history(
        &self,
        _: &CheckpointKey,
        _: &BTreeSet<ChannelName>,
        _: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        Ok(Default::default())
    }
    async fn delete_thread(&self, _: &ThreadId) -> Result<()> {
        Ok(())
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities { name: "stub", durable: false, shared_elements: false }
    }
}

//! Managed definitions in the gateway's database, where all processes see them.

use async_trait::async_trait;
use threadkeep_records::{ReplaceOutcome, Subagents};

use super::{Document, ManagedStore, Replaced, StoreError};

/// Keeps each definition in a row.
#[derive(Debug, Clone)]
pub struct DbStore {
    rows: Subagents,
}

impl DbStore {
    /// The store in these records.
    pub fn new(rows: Subagents) -> Self {
        Self { rows }
    }
}

/// The text of a document, which is JSON.
fn text(content: &[u8]) -> String {
    String::from_utf8_lossy(content).into_owned()
}

#[async_trait]
impl ManagedStore for DbStore {
    async fn documents(&self) -> Result<Vec<Document>, StoreError> {
        let rows = self.rows.all().await?.into_iter();
        Ok(rows.map(|(name, text)| Document { name, content: Ok(text.into_bytes()) }).collect())
    }

    async fn insert(&self, name: &str, content: &[u8]) -> Result<bool, StoreError> {
        Ok(self.rows.insert(name, &text(content)).await?)
    }

    async fn replace(&self, name: &str, old: &[u8], new: &[u8]) -> Result<Replaced, StoreError> {
        Ok(match self.rows.replace(name, &text(old), &text(new)).await? {
            ReplaceOutcome::Replaced => Replaced::Done,
            ReplaceOutcome::Changed => Replaced::Changed,
            ReplaceOutcome::Missing => Replaced::Missing,
        })
    }

    async fn remove(&self, name: &str) -> Result<bool, StoreError> {
        Ok(self.rows.remove(name).await?)
    }
}

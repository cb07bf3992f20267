//! The managed definitions, as they were a moment ago.

use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::managed::{Document, Managed, ManagedStore, StoreError};

/// For how long a look at the store is good enough for a run.
const RECENT: Duration = Duration::from_secs(1);

/// The definitions that the store had when it was last looked at. They are parsed again only if their content changed.
#[derive(Default)]
pub(super) struct Cache {
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    /// When the store was last read.
    at: Option<Instant>,
    /// A digest of what was read.
    signature: Option<[u8; 32]>,
    managed: Arc<[Managed]>,
}

impl Cache {
    /// The definitions of at most a second ago.
    pub(super) async fn recent(&self, store: &dyn ManagedStore) -> Result<Arc<[Managed]>, StoreError> {
        let mut seen = self.seen.lock().await;
        if seen.at.is_none_or(|at| at.elapsed() >= RECENT) {
            seen.look(store).await?;
        }
        Ok(Arc::clone(&seen.managed))
    }

    /// The definitions as they are now.
    pub(super) async fn current(&self, store: &dyn ManagedStore) -> Result<Arc<[Managed]>, StoreError> {
        let mut seen = self.seen.lock().await;
        seen.look(store).await?;
        Ok(Arc::clone(&seen.managed))
    }

    /// The next caller looks at the store.
    pub(super) async fn expire(&self) {
        self.seen.lock().await.at = None;
    }
}

impl Seen {
    async fn look(&mut self, store: &dyn ManagedStore) -> Result<(), StoreError> {
        // The time before the look: what changes during it is seen by the next one.
        let now = Instant::now();
        let mut documents = store.documents().await?;
        documents.sort_by(|one, other| one.name.cmp(&other.name));
        let signature = signature(&documents);
        if self.signature != Some(signature) {
            self.managed = documents.iter().filter_map(parsed).collect();
            self.signature = Some(signature);
        }
        self.at = Some(now);
        Ok(())
    }
}

/// The definition, unless it is unusable. That is logged, as are keys that nothing reads: once for each content.
fn parsed(document: &Document) -> Option<Managed> {
    match Managed::of_document(document) {
        Ok(managed) => {
            let keys = managed.unknown_keys(document);
            if !keys.is_empty() {
                tracing::warn!(
                    name = document.name,
                    ?keys,
                    "the stored definition of a managed subagent has keys without an effect; correct or remove them"
                );
            }
            Some(managed)
        }
        Err(problem) => {
            tracing::warn!(
                name = document.name,
                problem,
                "a managed subagent is skipped because its stored definition cannot be used; correct or delete it"
            );
            None
        }
    }
}

/// A digest of the documents. Every part is preceded by its length, so that no two lists look alike.
fn signature(documents: &[Document]) -> [u8; 32] {
    let mut hash = Sha256::new();
    let mut add = |part: &[u8]| {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    };
    for Document { name, content } in documents {
        add(name.as_bytes());
        match content {
            Ok(content) => add(content),
            Err(problem) => add(format!("unreadable: {problem}").as_bytes()),
        }
    }
    hash.finalize().into()
}

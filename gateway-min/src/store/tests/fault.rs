//! Makes the k-th statement of a write fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::store::StoreError;

/// Counts the statements of write transactions, the commit among them; armed, it fails one.
#[derive(Clone, Debug, Default)]
pub(in crate::store) struct Fault(Arc<AtomicUsize>);

impl Fault {
    /// The `k`-th statement from now fails, from 1.
    pub(in crate::store) fn arm(&self, k: usize) {
        self.0.store(k, Ordering::SeqCst);
    }

    /// Forgets an armed fault; `true` if there was one that has not failed a statement yet.
    pub(in crate::store) fn disarm(&self) -> bool {
        self.0.swap(0, Ordering::SeqCst) > 0
    }

    pub(in crate::store) fn statement_done(&self) -> Result<(), StoreError> {
        let armed = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if armed == Ok(1) {
            return Err(StoreError::Unavailable { cause: sqlx::Error::Protocol("injected fault".into()) });
        }
        Ok(())
    }
}

//! Makes the k-th statement of a write fail, or lose the answer to the k-th commit.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::store::StoreError;

/// Counts the statements of write transactions, the commit among them; armed, it fails one.
#[derive(Clone, Debug, Default)]
pub(in crate::store) struct Fault {
    statement: Arc<AtomicUsize>,
    answer: Arc<AtomicUsize>,
}

impl Fault {
    /// The `k`-th statement from now fails, from 1.
    pub(in crate::store) fn arm(&self, k: usize) {
        self.statement.store(k, Ordering::SeqCst);
    }

    /// The `k`-th commit from now happens, from 1, and nobody is told.
    pub(in crate::store) fn arm_doubt(&self, k: usize) {
        self.answer.store(k, Ordering::SeqCst);
    }

    /// Forgets an armed fault; `true` if there was one that has not failed anything yet.
    pub(in crate::store) fn disarm(&self) -> bool {
        let left = [&self.statement, &self.answer].map(|armed| armed.swap(0, Ordering::SeqCst));
        left.iter().any(|left| *left > 0)
    }

    pub(in crate::store) fn statement_done(&self) -> Result<(), StoreError> {
        if is_next(&self.statement) {
            return Err(StoreError::Unavailable { cause: injected() });
        }
        Ok(())
    }

    pub(in crate::store) fn committed(&self) -> Result<(), StoreError> {
        if is_next(&self.answer) {
            return Err(StoreError::InDoubt { cause: injected() });
        }
        Ok(())
    }
}

fn is_next(armed: &AtomicUsize) -> bool {
    armed.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)) == Ok(1)
}

fn injected() -> sqlx::Error {
    sqlx::Error::Protocol("injected fault".into())
}

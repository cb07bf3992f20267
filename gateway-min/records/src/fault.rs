//! Makes the k-th statement of a write fail, or all from it on, or the next reads, or loses the k-th commit or the response
//! to it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::RecordsError;
use crate::failure::DatabaseError;

/// Counts the statements of write transactions, including the commit; fails one if armed. The same for reads outside them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fault {
    statement: Arc<AtomicUsize>,
    answer: Arc<AtomicUsize>,
    commit: Arc<AtomicUsize>,
    /// How many of the next reads fail.
    reads: Arc<AtomicUsize>,
    /// How many of the next statements with this text fail.
    text: Arc<Mutex<(&'static str, usize)>>,
    /// Whether the statements after the armed one fail, too.
    lasts: Arc<AtomicBool>,
    /// How many statements failed since it was armed.
    failed: Arc<AtomicUsize>,
    /// Held while a statement is counted and while all is disarmed: else one that fails could arm the next after that.
    counting: Arc<Mutex<()>>,
}

impl Fault {
    /// Makes the `k`-th statement from now, from 1, fail.
    pub(crate) fn arm(&self, k: usize) {
        self.statement.store(k, Ordering::SeqCst);
    }

    /// Makes the `k`-th statement from now, from 1, and all later ones fail.
    pub(crate) fn arm_lasting(&self, k: usize) {
        self.lasts.store(true, Ordering::SeqCst);
        self.arm(k);
    }

    /// How many statements failed since the last [`Self::disarm`].
    pub(crate) fn failed(&self) -> usize {
        self.failed.load(Ordering::SeqCst)
    }

    /// Makes the `k`-th commit from now, from 1, happen without a response.
    pub(crate) fn arm_doubt(&self, k: usize) {
        self.answer.store(k, Ordering::SeqCst);
    }

    /// Makes the `k`-th commit from now, from 1, not happen, without a response.
    pub(crate) fn arm_loss(&self, k: usize) {
        self.commit.store(k, Ordering::SeqCst);
    }

    /// Makes the next `reads` reads fail.
    pub(crate) fn arm_reads(&self, reads: usize) {
        self.reads.store(reads, Ordering::SeqCst);
    }

    /// Makes the next `times` statements fail whose text contains `text`.
    pub(crate) fn arm_text(&self, text: &'static str, times: usize) {
        *self.text.lock().unwrap_or_else(PoisonError::into_inner) = (text, times);
    }

    /// How many statements with a text are still to fail.
    pub(crate) fn texts_left(&self) -> usize {
        self.text.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    /// Fails a statement, if that is armed for its text.
    pub(crate) fn says(&self, sql: &str) -> Result<(), RecordsError> {
        let mut armed = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        if armed.1 == 0 || !sql.contains(armed.0) {
            return Ok(());
        }
        armed.1 -= 1;
        Err(RecordsError::Unavailable { cause: injected() })
    }

    /// How many reads are still to fail.
    pub(crate) fn reads_left(&self) -> usize {
        self.reads.load(Ordering::SeqCst)
    }

    /// Disarms; `true` if an armed fault was not used.
    pub(crate) fn disarm(&self) -> bool {
        let _counting = self.counting.lock().unwrap_or_else(PoisonError::into_inner);
        let armed = [&self.statement, &self.answer, &self.commit, &self.reads];
        let left = armed.map(|armed| armed.swap(0, Ordering::SeqCst));
        let (lasted, failed) =
            (self.lasts.swap(false, Ordering::SeqCst), self.failed.swap(0, Ordering::SeqCst));
        left.iter().any(|left| *left > 0) && !(lasted && failed > 0)
    }

    /// Fails a read, if that is armed.
    pub(crate) fn reads(&self) -> Result<(), RecordsError> {
        let left = self.reads.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if left.is_ok() { Err(RecordsError::Unavailable { cause: injected() }) } else { Ok(()) }
    }

    pub(crate) fn statement_done(&self) -> Result<(), RecordsError> {
        let _counting = self.counting.lock().unwrap_or_else(PoisonError::into_inner);
        if is_next(&self.statement) {
            if self.lasts.load(Ordering::SeqCst) {
                self.statement.store(1, Ordering::SeqCst);
            }
            self.failed.fetch_add(1, Ordering::SeqCst);
            return Err(RecordsError::Unavailable { cause: injected() });
        }
        Ok(())
    }

    /// Before a commit.
    pub(crate) fn commits(&self) -> Result<(), RecordsError> {
        if is_next(&self.commit) {
            return Err(RecordsError::InDoubt { cause: injected() });
        }
        Ok(())
    }

    pub(crate) fn committed(&self) -> Result<(), RecordsError> {
        if is_next(&self.answer) {
            return Err(RecordsError::InDoubt { cause: injected() });
        }
        Ok(())
    }
}

fn is_next(armed: &AtomicUsize) -> bool {
    armed.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)) == Ok(1)
}

fn injected() -> DatabaseError {
    DatabaseError::Internal("injected fault".into())
}

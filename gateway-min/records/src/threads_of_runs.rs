//! The threads of the runs that a process works on.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// More than a process works on at the same time.
const MAX_KNOWN_RUNS: usize = 10_000;

/// Which thread a run is of, for the runs that this process works on: its transactions lock the thread without asking.
#[derive(Clone, Debug, Default)]
pub(super) struct ThreadsOfRuns(Arc<Mutex<HashMap<String, String>>>);

impl ThreadsOfRuns {
    pub(super) fn get(&self, run_id: &str) -> Option<String> {
        self.lock().get(run_id).cloned()
    }

    /// From its admission.
    pub(super) fn add(&self, run_id: &str, thread_id: &str) {
        let mut known = self.lock();
        // Other processes end some of them. The database knows all.
        if known.len() >= MAX_KNOWN_RUNS {
            known.clear();
        }
        known.insert(run_id.to_owned(), thread_id.to_owned());
    }

    /// At its end.
    pub(super) fn remove(&self, run_id: &str) {
        self.lock().remove(run_id);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

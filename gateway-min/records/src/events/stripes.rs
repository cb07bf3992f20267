//! Who may append to the feed of a thread outside the database, in this process.

use std::array;
use std::sync::Arc;

use tokio::sync::{Mutex, OwnedMutexGuard};

/// How many threads are appended to at the same time.
const STRIPES: usize = 64;

/// Locks for threads, of which a few share one.
#[derive(Debug)]
pub(super) struct Stripes([Arc<Mutex<()>>; STRIPES]);

/// The lock of a thread, until it is dropped.
pub(super) type Stripe = OwnedMutexGuard<()>;

impl Default for Stripes {
    fn default() -> Self {
        Self(array::from_fn(|_| Arc::default()))
    }
}

impl Stripes {
    /// Waits for the lock of a thread.
    pub(super) async fn hold(&self, thread_id: &str) -> Stripe {
        let stripe = usize::from(blake3::hash(thread_id.as_bytes()).as_bytes()[0]) % STRIPES;
        Arc::clone(&self.0[stripe]).lock_owned().await
    }
}

//! What a key-value store has to do to hold checkpoints.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use threadkeep::Result;
use threadkeep::saver::Flush;

/// An ordered map from bytes to bytes, on disk or in memory. Its methods block; the saver calls them on threads that may.
///
/// Keys are compared byte by byte. A key is as long as the longest id of a thread or a namespace, which have no limit, and 48 bytes
/// more; a value as long as the longest element of a list.
///
/// **Errors**: [`Error::Unavailable`](threadkeep::Error::Unavailable) if nothing was written,
/// [`Error::InDoubt`](threadkeep::Error::InDoubt) if a change may have been stored,
/// [`Error::InvalidInput`](threadkeep::Error::InvalidInput) if nothing was written because a key or a value is too long
/// for the store, and [`Error::Corrupt`](threadkeep::Error::Corrupt) if the store notices damage. A write may hold the
/// changes of many calls; after the last two, each half of the calls is stored alone, until each call has the answer that
/// is its own.
pub trait Store: Send + Sync + 'static {
    /// The store's name in reports and errors.
    fn name(&self) -> &'static str;

    /// Whether changes survive the end of the process.
    fn durable(&self) -> bool;

    /// What is stored at this moment. Later writes do not change what it returns.
    ///
    /// After a write that ended in doubt, it shows what came of that write for good, also after the store is opened again.
    /// A store that does not know this fails until then: a caller who finds nothing takes the write for not done.
    ///
    /// # Errors
    /// See [`Store`].
    fn snapshot(&self) -> Result<Box<dyn Snapshot + '_>>;

    /// Stores what `plan` returns, completely or not at all.
    ///
    /// `plan` is called with what is stored then. No other write may be stored between that and its changes, also by
    /// another handle or process if the store allows several. If `plan` fails, nothing is stored, and its error is returned.
    ///
    /// A store that finds only at its commit that another write came between calls `plan` again, with what is stored by
    /// then. Only what the last call returned is stored.
    ///
    /// With [`Flush::Now`], the changes are on disk when this returns, together with all earlier ones, also if `plan`
    /// returned none. With [`Flush::WithNext`] they need only survive the end of the process, and a power loss may remove them
    /// together with all later ones. A store may always flush.
    ///
    /// # Errors
    /// See [`Store`], and those of `plan`.
    fn write(&self, flush: Flush, plan: &mut Plan<'_>) -> Result<()>;
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn durable(&self) -> bool {
        (**self).durable()
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot + '_>> {
        (**self).snapshot()
    }

    fn write(&self, flush: Flush, plan: &mut Plan<'_>) -> Result<()> {
        (**self).write(flush, plan)
    }
}

/// Decides what to change, from what is stored.
pub type Plan<'p> = dyn FnMut(&dyn Snapshot) -> Result<Changes> + 'p;

/// Values to put, and keys to delete: those without a value.
pub type Changes = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

/// What is stored, at one moment.
pub trait Snapshot {
    /// The value under a key.
    ///
    /// # Errors
    /// See [`Store`].
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>>;

    /// Visits the keys from `keys.start` to before `keys.end`, with their values, until `visit` breaks or fails. The range is
    /// empty if it ends before it starts.
    ///
    /// # Errors
    /// See [`Store`], and those of `visit`.
    fn range(&self, keys: Range<&[u8]>, order: Order, visit: &mut Visit<'_>) -> Result<()>;
}

/// Is given a key and its value.
pub type Visit<'v> = dyn FnMut(&[u8], &[u8]) -> Result<ControlFlow<()>> + 'v;

/// The order in which keys are visited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// The smallest key first.
    Ascending,
    /// The greatest key first.
    Descending,
}

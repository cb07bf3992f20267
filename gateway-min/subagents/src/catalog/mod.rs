//! Which subagents there are, who may use them, and what they take over from the run that delegates.
//!
//! Definitions come from three sources: this program, the configuration, and administrators over HTTP. [`Catalog`] puts
//! them together; [`Available`] is what one run may use; [`Definition`] is one of them.

mod available;
mod builtin;
mod cache;
mod definition;
mod edit;
mod inherit;
mod list;
mod resolve;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use threadkeep_config::Config;

use crate::managed::{Managed, ManagedStore, StoreError};

pub use available::{Available, Unavailable};
pub(crate) use builtin::DISALLOWED_TOOLS;
pub use definition::{Definition, ModelChoice, Source};
pub use edit::{Change, EditError};
pub use inherit::{DELEGATION_TOOLS, UnknownModel};
pub use list::{ConfigOverrides, Listed};

use cache::Cache;

/// All subagents.
pub struct Catalog {
    store: Arc<dyn ManagedStore>,
    cache: Cache,
    /// Whether commands may run on this machine; like the tools, fixed at start.
    host_bash: bool,
}

impl Catalog {
    /// The catalog whose managed definitions are in `store`; `at_start` is the configuration that the agents' tools were
    /// made from, of which it keeps whether there is `bash`.
    pub fn new(at_start: &Config, store: Arc<dyn ManagedStore>) -> Self {
        Self { store, cache: Cache::default(), host_bash: at_start.sandbox.allow_host_bash }
    }

    /// The subagents that a run may delegate to: all that are usable, or those of them that `allowed` names (service
    /// reference, "Request context keys (runs)"). Managed definitions are those of at most a second ago.
    ///
    /// # Errors
    /// [`StoreError`]: the managed definitions cannot be read.
    pub async fn available(
        &self,
        config: &Config,
        allowed: Option<&[String]>,
    ) -> Result<Available, StoreError> {
        let managed = self.cache.recent(&*self.store).await?;
        let definitions = resolve::definitions(config, &managed);
        Ok(Available::new(definitions, allowed, self.host_bash))
    }

    /// The managed definitions as they are now. One that cannot be read is not among them.
    async fn managed(&self) -> Result<Arc<[Managed]>, StoreError> {
        self.cache.current(&*self.store).await
    }
}

//! The store shared by all embedded clients of a process: checkpoints, and the records of subagents.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use threadkeep::cache::CachedSaver;
use threadkeep::saver::Saver;
use threadkeep_records::Records;
use threadkeep_storage::{Checkpoints, Stores, memory_cache, open_records};
use threadkeep_subagents::admission::Admission;
use tokio::sync::{Mutex, OnceCell};

use super::ClientError;
use threadkeep_config::Config;

/// An open store.
pub(super) struct SharedStore {
    checkpoints: Checkpoints,
    saver: Arc<dyn Saver>,
    /// The slots for subagents, which all clients of the store share.
    slots: Admission,
    /// The gateway's records, opened by the first client that needs them.
    records: OnceCell<Records>,
}

impl SharedStore {
    pub(super) fn saver(&self) -> &Arc<dyn Saver> {
        &self.saver
    }

    pub(super) fn slots(&self) -> &Admission {
        &self.slots
    }

    /// The records beside the checkpoints. The gateway may have them open at the same time.
    pub(super) async fn records(&self, config: &Config) -> Result<Records, ClientError> {
        Ok(self.records.get_or_try_init(|| open_records(config)).await?.clone())
    }
}

/// The open stores of this process, by the settings that identify them.
static OPEN: Mutex<Option<Open>> = Mutex::const_new(None);

#[derive(Default)]
struct Open {
    /// Kept until the process ends, because its contents exist nowhere else.
    memory: Option<Arc<SharedStore>>,
    /// Durable stores, each open while a client uses it.
    durable: HashMap<String, Weak<SharedStore>>,
}

/// The store of `stores` under this configuration, opened by the first client that needs it, with that client's history cache.
///
/// # Errors
/// [`threadkeep_config::ConfigError::SyncRedisCache`], [`threadkeep_storage::OpenError`].
pub(super) async fn process_wide(stores: &Stores, config: &Config) -> Result<Arc<SharedStore>, ClientError> {
    config.database.checkpoint_cache.check_sync()?;
    // Locked while a store is opened, so that two clients do not open the same one.
    let mut opened = OPEN.lock().await;
    let opened = opened.get_or_insert_default();
    opened.durable.retain(|_, store| store.strong_count() > 0);
    let identity = stores.identity(config);
    let open = match &identity {
        None => opened.memory.clone(),
        Some(identity) => opened.durable.get(identity).and_then(Weak::upgrade),
    };
    if let Some(store) = open {
        return Ok(store);
    }
    let store = Arc::new(self::open(stores, config).await?);
    match identity {
        None => opened.memory = Some(Arc::clone(&store)),
        Some(identity) => {
            opened.durable.insert(identity, Arc::downgrade(&store));
        }
    }
    Ok(store)
}

async fn open(stores: &Stores, config: &Config) -> Result<SharedStore, ClientError> {
    let checkpoints = stores.checkpoints(config).await?;
    let saver = match memory_cache(config) {
        Some(cache) => Arc::new(CachedSaver::new(checkpoints.saver(), Arc::new(cache))),
        None => checkpoints.saver(),
    };
    let slots = Admission::new(&config.subagent_runtime);
    Ok(SharedStore { checkpoints, saver, slots, records: OnceCell::new() })
}

/// Releases a store, and closes it if no other client uses it. A client that opens it meanwhile waits.
pub(super) async fn close(store: Arc<SharedStore>) {
    let _opening = OPEN.lock().await;
    if let Some(last) = Arc::into_inner(store) {
        if let Some(records) = last.records.get() {
            records.close().await;
        }
        last.checkpoints.close().await;
    }
}

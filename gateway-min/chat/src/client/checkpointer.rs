//! The store shared by all embedded clients of a process: checkpoints, and the records of subagents.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use threadkeep::cache::CachedSaver;
use threadkeep::saver::Saver;
use threadkeep_records::Records;
use threadkeep_storage::{
    Checkpoints, OpenError, Stores, existing_records_beside, form_difference, memory_cache,
    open_records_beside,
};
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
    /// The gateway's records: opened with the store if there are any, else created by the first client that needs them.
    records: OnceCell<Records>,
    /// Held, because their address is their identity, which other stores would have when these are gone.
    _stores: Stores,
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
        let created = || async {
            let records = open_records_beside(config).await?;
            // They remember it from now on.
            difference(&records, config).await;
            Ok::<_, OpenError>(records)
        };
        Ok(self.records.get_or_try_init(created).await?.clone())
    }

    /// See [`form_difference`]. Nothing is remembered before there are records.
    pub(super) async fn difference(&self, config: &Config) -> Option<String> {
        difference(self.records.get()?, config).await
    }
}

/// Logs the difference. That it is unknown is no reason not to work on the threads.
async fn difference(records: &Records, config: &Config) -> Option<String> {
    let found = form_difference(records, config).await;
    let found = found
        .inspect_err(|error| tracing::warn!(%error, "cannot read in which form this database is stored"));
    found.ok().flatten().inspect(|difference| tracing::warn!("{difference}"))
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
    let records = existing_records_beside(config).await.unwrap_or_else(|error| {
        tracing::warn!(%error, "a client cannot read the gateway's records");
        None
    });
    let records = OnceCell::new_with(records);
    Ok(SharedStore { checkpoints, saver, slots, records, _stores: stores.clone() })
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use async_trait::async_trait;
    use tempfile::TempDir;
    use threadkeep_config::{ConfigHandle, Environment, LoadOptions};
    use threadkeep_records::WriterKind;
    use threadkeep_storage::OpenSaver;

    use super::*;

    struct InMemory;

    #[async_trait]
    impl OpenSaver for InMemory {
        async fn open(&self, config: &Config) -> threadkeep::Result<Arc<dyn Saver>> {
            let opened = Stores::default().checkpoints(config).await;
            Ok(opened.expect("memory is always there").saver())
        }
    }

    fn in_memory() -> Arc<Config> {
        let dir = TempDir::new().unwrap();
        std::fs::write(dir.path().join("config.yaml"), "config_version: 49\ndatabase: {backend: memory}\n")
            .unwrap();
        let (config_path, environment) = (None, Environment::default());
        let options = LoadOptions { config_path, environment, working_dir: dir.path().to_owned() };
        ConfigHandle::open(&options).unwrap().last_known()
    }

    /// The next stores may be where the forgotten ones were.
    #[tokio::test]
    async fn clients_of_different_savers_share_nothing_also_if_the_program_forgets_its_stores() {
        let config = in_memory();
        let mut open: Vec<Arc<SharedStore>> = Vec::new();
        for _ in 0..100 {
            let store = process_wide(&Stores::with_saver(InMemory), &config).await.unwrap();
            assert!(!open.iter().any(|other| Arc::ptr_eq(other, &store)), "that is another saver");
            open.push(store);
        }
    }

    #[tokio::test]
    async fn clients_of_the_same_stores_share_one() {
        let config = in_memory();
        let stores = Stores::with_saver(InMemory);
        let first = process_wide(&stores, &config).await.unwrap();
        assert!(Arc::ptr_eq(&first, &process_wide(&stores.clone(), &config).await.unwrap()));
    }

    /// A client may be killed at any time, and may work for long.
    #[tokio::test]
    async fn what_a_client_reserves_has_a_lease_that_it_renews() {
        let dir = TempDir::new().unwrap();
        let text = format!(
            "config_version: 49\ndatabase: {{backend: sqlite, sqlite_dir: '{}'}}\nrun_ownership: {{lease_seconds: 1}}\n",
            dir.path().join("data").display()
        );
        std::fs::write(dir.path().join("config.yaml"), text).unwrap();
        let (config_path, environment) = (None, Environment::default());
        let options = LoadOptions { config_path, environment, working_dir: dir.path().to_owned() };
        let config = ConfigHandle::open(&options).unwrap().last_known();
        let store = process_wide(&Stores::default(), &config).await.unwrap();
        let records = store.records(&config).await.unwrap();
        let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
        let lease = async || records.runs().active_for_thread("t").await.unwrap().unwrap().lease_expires_at;
        let first = lease().await;
        assert!(first.is_some());
        let renewed = async {
            while lease().await == first {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_mins(10), renewed).await.expect("nobody renews it");
        reservation.release().await.unwrap();
        close(store).await;
    }
}

//! The configured history cache, and its keys.

use std::num::{NonZeroU64, NonZeroUsize};
use std::sync::Arc;

use async_trait::async_trait;
use threadkeep::cache::{CachedHistory, HistoryCache, HistoryKey, MemoryCache};
use threadkeep::id::ThreadId;
use threadkeep::mode::ChannelMode;
use threadkeep_config::{Backend, CheckpointCacheType, Config, Database};
use threadkeep_postgres::Address;
use threadkeep_redis::{InvalidUrl, RedisCache};

use crate::checkpoints::CHECKPOINT_FILE;
use crate::{OpenError, channel_mode};

/// The configured history cache. Only delta mode has histories to cache.
///
/// # Errors
/// [`OpenError::HistoryCache`].
pub fn history_cache(config: &Config) -> Result<Option<Arc<dyn HistoryCache>>, OpenError> {
    if let Some(redis) = redis_cache(config)? {
        return Ok(Some(Arc::new(redis)));
    }
    Ok(memory_cache(config).map(|memory| Arc::new(memory) as Arc<dyn HistoryCache>))
}

/// A history cache in memory with the configured limit, whatever the configured type; `None` without a cache.
pub fn memory_cache(config: &Config) -> Option<MemoryCache> {
    max_entries(config).map(MemoryCache::new)
}

/// The maximum number of entries of the history cache; `None` without a cache, whatever its type.
fn max_entries(config: &Config) -> Option<NonZeroUsize> {
    match channel_mode(config) {
        ChannelMode::Delta => NonZeroUsize::new(config.database.checkpoint_cache.max_entries),
        ChannelMode::Full => None,
    }
}

/// The Redis history cache, if configured.
pub(crate) fn redis_cache(config: &Config) -> Result<Option<RedisCache>, InvalidUrl> {
    let section = &config.database.checkpoint_cache;
    if section.kind != CheckpointCacheType::Redis || max_entries(config).is_none() {
        return Ok(None);
    }
    let settings = threadkeep_redis::Settings {
        key_prefix: key_prefix(&config.database),
        ttl_seconds: NonZeroU64::new(section.ttl_seconds),
    };
    RedisCache::open(section.redis_url.expose(), settings).map(Some)
}

/// The prefix of every Redis key: the configured one, or a hash of what identifies the database. User and password are
/// excluded, so changing them keeps the cache; only a database without a name has that of the user.
fn key_prefix(database: &Database) -> String {
    let configured = &database.checkpoint_cache.key_prefix;
    if !configured.is_empty() {
        return configured.clone();
    }
    let identity = match database.backend {
        // A different one in each process.
        Backend::Memory => vec![uuid::Uuid::new_v4().to_string()],
        Backend::Sqlite => {
            let path = database.sqlite_dir.join(CHECKPOINT_FILE);
            vec![std::path::absolute(&path).unwrap_or(path).display().to_string()]
        }
        Backend::Postgres => {
            let address = Address::parse(crate::postgres::url(database));
            let config = address.map(|address| address.config).unwrap_or_default();
            let ports = if config.get_ports().is_empty() { &[5432] } else { config.get_ports() };
            let ports = ports.iter().map(u16::to_string);
            let hosts = config.get_hosts().iter().map(|host| format!("{host:?}"));
            let addresses = config.get_hostaddrs().iter().map(ToString::to_string);
            let name = config.get_dbname().or(config.get_user());
            let names = [name, database.postgres_schema.as_deref()];
            let names = names.map(|name| name.unwrap_or_default().to_owned());
            hosts.chain(addresses).chain(ports).chain(names).collect()
        }
    };
    let mut hasher = blake3::Hasher::new();
    for part in &identity {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    format!("threadkeep:{}:", &hasher.finalize().to_hex()[..16])
}

/// The history cache for operator commands: it only purges what the command changes; nothing is read from it, because
/// an operator must see what is in the store.
pub(crate) struct PurgeOnly<C>(pub(crate) C);

#[async_trait]
impl<C: HistoryCache> HistoryCache for PurgeOnly<C> {
    async fn get(&self, _: &HistoryKey) -> Option<CachedHistory> {
        None
    }

    async fn put(&self, _: &HistoryKey, _: &CachedHistory) {}

    async fn purge(&self, thread: &ThreadId) {
        self.0.purge(thread).await;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use threadkeep_config::Secret;

    use super::*;

    fn postgres(url: &str) -> Database {
        Database { backend: Backend::Postgres, postgres_url: Some(Secret::new(url)), ..Database::default() }
    }

    #[test]
    fn each_database_has_a_prefix_of_its_own_for_every_user() {
        let sqlite =
            |dir: &str| Database { backend: Backend::Sqlite, sqlite_dir: dir.into(), ..Database::default() };
        let in_schema = Database { postgres_schema: Some("s".into()), ..postgres("postgres://h/d") };
        let databases = [
            sqlite("/a"),
            sqlite("/b"),
            postgres("postgres://h/d"),
            postgres("postgres://h/e"),
            postgres("postgres://i/d"),
            postgres("postgres://h:5433/d"),
            in_schema,
            Database::default(),
            Database::default(),
        ];
        let prefixes: BTreeSet<String> = databases.iter().map(key_prefix).collect();
        assert_eq!(prefixes.len(), databases.len(), "a memory database is another one each time");
        assert_eq!(key_prefix(&sqlite("/a")), key_prefix(&sqlite("/a")));
        for same in ["postgres://u:p@h/d", "postgresql://v:q@h/d", "host=h dbname=d user=u password=p"] {
            let prefix = key_prefix(&postgres(same));
            assert_eq!(prefix, key_prefix(&postgres("postgres://h/d")), "{same}");
        }
    }

    #[test]
    fn all_that_an_address_says_of_its_database_counts() {
        let prefix = |url: &str| key_prefix(&postgres(url));
        for [one, other] in [
            // As of managed servers.
            ["postgres://h/d?sslmode=verify-full", "postgres://i/d?sslmode=verify-full"],
            [
                "postgres://h/d?sslmode=require&sslrootcert=/r",
                "postgres://h/e?sslmode=require&sslrootcert=/r",
            ],
            ["host=h hostaddr=10.0.0.1 dbname=d", "host=h hostaddr=10.0.0.2 dbname=d"],
            ["postgres://u@h", "postgres://v@h"],
        ] {
            assert_ne!(prefix(one), prefix(other), "{one}");
        }
        for same in ["postgres://h/d?sslmode=verify-full&sslrootcert=/r", "postgres://d@h"] {
            assert_eq!(prefix(same), prefix("postgres://h/d"), "{same}");
        }
    }

    #[test]
    fn a_configured_prefix_is_taken_as_it_is() {
        let mut database = Database::default();
        database.checkpoint_cache.key_prefix = "mine:".into();
        assert_eq!(key_prefix(&database), "mine:");
    }
}

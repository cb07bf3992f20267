//! Derives the settings of the gateway's parts from the configuration. Each part has its own settings, so that it can
//! be used and tested without a configuration file.

use std::time::Duration;

use threadkeep::mode::ChannelMode;

use crate::app::CHECKPOINT_FILE;
use crate::config::{Backend, CheckpointChannelMode, Config, Database, RunEventsBackend, Secret};
use crate::runs::ownership::Terms;
use crate::store::{EventBackend, PostgresTarget, StoreError};

pub(crate) fn mode(config: &Config) -> ChannelMode {
    match config.database.checkpoint_channel_mode {
        CheckpointChannelMode::Full => ChannelMode::Full,
        CheckpointChannelMode::Delta => ChannelMode::Delta,
    }
}

/// The key prefix of the Redis history cache: as configured, or derived from what identifies the database. User and
/// password are excluded, so changing them keeps the cache.
pub(crate) fn history_cache_prefix(database: &Database) -> String {
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
            let url = database.postgres_url.as_ref().and_then(|url| url.expose().parse().ok());
            let url: tokio_postgres::Config = url.unwrap_or_default();
            let ports = if url.get_ports().is_empty() { &[5432] } else { url.get_ports() };
            let ports = ports.iter().map(u16::to_string);
            let hosts = url.get_hosts().iter().map(|host| format!("{host:?}"));
            let names = [url.get_dbname(), database.postgres_schema.as_deref()];
            hosts.chain(ports).chain(names.map(|name| name.unwrap_or_default().to_owned())).collect()
        }
    };
    let mut hasher = blake3::Hasher::new();
    for part in &identity {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    format!("threadkeep:{}:", &hasher.finalize().to_hex()[..16])
}

/// The default schema of the Postgres tables.
const POSTGRES_SCHEMA: &str = "public";

/// The URL of the Postgres server; a configuration with this backend but no URL is refused.
pub(crate) fn postgres_url(database: &Database) -> &str {
    database.postgres_url.as_ref().map_or("", Secret::expose)
}

/// The options for the checkpoints in Postgres.
pub(crate) fn postgres_options(database: &Database) -> threadkeep_postgres::Options {
    threadkeep_postgres::Options {
        schema: database.postgres_schema.clone().unwrap_or_else(|| POSTGRES_SCHEMA.to_owned()),
        connections: usize::try_from(database.pool_size).unwrap_or(usize::MAX),
        ..threadkeep_postgres::Options::default()
    }
}

/// The options for the gateway's records in Postgres: next to the checkpoints, with their own pool.
pub(crate) fn postgres_records(database: &Database) -> Result<PostgresTarget, StoreError> {
    let schema = database.postgres_schema.as_deref().unwrap_or(POSTGRES_SCHEMA);
    PostgresTarget::parse(postgres_url(database), schema, database.pool_size)
}

/// The terms on which this process owns its work; `None` if it is the only one on its database.
pub(crate) fn ownership(config: &Config) -> Option<Terms> {
    let section = &config.run_ownership;
    let shared = section.heartbeat_enabled.unwrap_or(config.database.backend == Backend::Postgres);
    shared.then(|| Terms {
        lease: Duration::from_secs(section.lease_seconds),
        grace: Duration::from_secs(section.grace_seconds),
    })
}

pub(crate) fn event_backend(config: &Config) -> EventBackend {
    match config.run_events.backend {
        RunEventsBackend::Memory => EventBackend::Memory,
        RunEventsBackend::Db => EventBackend::Database,
        RunEventsBackend::Jsonl => EventBackend::Jsonl,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn postgres(url: &str) -> Database {
        Database { backend: Backend::Postgres, postgres_url: Some(Secret::new(url)), ..Database::default() }
    }

    #[test]
    fn each_database_has_a_prefix_of_its_own_whoever_logs_in() {
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
        let prefixes: BTreeSet<String> = databases.iter().map(history_cache_prefix).collect();
        assert_eq!(prefixes.len(), databases.len(), "a memory database is another one each time");
        assert_eq!(history_cache_prefix(&sqlite("/a")), history_cache_prefix(&sqlite("/a")));
        for same in ["postgres://u:p@h/d", "postgresql://v:q@h/d", "host=h dbname=d user=u password=p"] {
            let prefix = history_cache_prefix(&postgres(same));
            assert_eq!(prefix, history_cache_prefix(&postgres("postgres://h/d")), "{same}");
        }
    }

    #[test]
    fn a_configured_prefix_is_taken_as_it_is() {
        let mut database = Database::default();
        database.checkpoint_cache.key_prefix = "mine:".into();
        assert_eq!(history_cache_prefix(&database), "mine:");
    }
}

//! The gateway's relational records.

use std::time::Duration;

use chrono::TimeDelta;
use threadkeep_config::{Backend, Config, RunEventsBackend};
use threadkeep_records::{DATABASE_FILE, EventBackend, Lease, Records, RecordsOptions};
use uuid::Uuid;

use crate::{OpenError, postgres};

/// The directory of `run_events.backend: jsonl` in the state directory.
const EVENT_DIRECTORY: &str = "run_events";

/// Opens the gateway's records, creating them if missing. If several processes may share them, this one gets a lease.
///
/// # Errors
/// [`OpenError::Records`].
pub async fn open_records(config: &Config) -> Result<Records, OpenError> {
    let database = &config.database;
    let options = RecordsOptions {
        event_backend: match config.run_events.backend {
            RunEventsBackend::Memory => EventBackend::Memory,
            RunEventsBackend::Db => EventBackend::Database,
            RunEventsBackend::Jsonl => EventBackend::Jsonl,
        },
        event_directory: config.state_dir.join(EVENT_DIRECTORY),
        max_trace_content: config.run_events.max_trace_content,
        lease: is_shared(config).then(|| lease(config)),
        ..RecordsOptions::default()
    };
    Ok(match database.backend {
        Backend::Memory => Records::open_memory(options).await?,
        Backend::Sqlite => Records::open(&database.sqlite_dir.join(DATABASE_FILE), options).await?,
        Backend::Postgres => Records::open_postgres(&postgres::records(database)?, options).await?,
    })
}

/// Whether several processes may use the database at the same time.
pub fn is_shared(config: &Config) -> bool {
    let configured = config.run_ownership.heartbeat_enabled;
    configured.unwrap_or(config.database.backend == Backend::Postgres)
}

/// The lease of a process that starts now.
fn lease(config: &Config) -> Lease {
    let length = Duration::from_secs(config.run_ownership.lease_seconds);
    Lease { owner: Uuid::new_v4().to_string(), length: TimeDelta::from_std(length).unwrap_or(TimeDelta::MAX) }
}

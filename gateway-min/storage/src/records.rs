//! The gateway's relational records.

use std::time::Duration;

use threadkeep_config::{Backend, Config, RunEventsBackend, RunOwnership};
use threadkeep_records::{DATABASE_FILE, EventBackend, Lease, Records, RecordsOptions};
use uuid::Uuid;

use crate::{OpenError, postgres};

/// The directory of `run_events.backend: jsonl` in the state directory.
const EVENT_DIRECTORY: &str = "run_events";

/// Opens the records for a gateway, creating them if missing. If several gateways may share them, this one gets a lease, which
/// it renews itself.
///
/// # Errors
/// [`OpenError::Records`].
pub async fn open_records(config: &Config) -> Result<Records, OpenError> {
    open(config, is_shared(config).then(|| lease(&config.run_ownership))).await
}

/// Opens the records for a program beside gateways, creating them if missing. It always has a lease: what it reserves is free
/// again soon after it dies, whether there are gateways or not.
///
/// # Errors
/// [`OpenError::Records`].
pub async fn open_records_beside(config: &Config) -> Result<Records, OpenError> {
    open(config, Some(lease_beside(&config.run_ownership))).await
}

/// As [`open_records_beside`], if there are records. It creates and upgrades nothing.
///
/// # Errors
/// [`OpenError::Records`], also for records of an older build.
pub async fn existing_records_beside(config: &Config) -> Result<Option<Records>, OpenError> {
    let database = &config.database;
    let options = options(config, Some(lease_beside(&config.run_ownership)));
    Ok(match database.backend {
        Backend::Memory => None,
        Backend::Sqlite => {
            let file = database.sqlite_dir.join(DATABASE_FILE);
            if !file.exists() {
                return Ok(None);
            }
            Some(Records::open_existing(&file, options).await?)
        }
        Backend::Postgres => {
            Records::open_existing_postgres(&postgres::records(database, false)?, options).await?
        }
    })
}

async fn open(config: &Config, lease: Option<Lease>) -> Result<Records, OpenError> {
    let (database, options) = (&config.database, options(config, lease));
    Ok(match database.backend {
        Backend::Memory => Records::open_memory(options).await?,
        Backend::Sqlite => Records::open(&database.sqlite_dir.join(DATABASE_FILE), options).await?,
        Backend::Postgres => Records::open_postgres(&postgres::records(database, false)?, options).await?,
    })
}

fn options(config: &Config, lease: Option<Lease>) -> RecordsOptions {
    RecordsOptions {
        event_backend: match config.run_events.backend {
            RunEventsBackend::Memory => EventBackend::Memory,
            RunEventsBackend::Db => EventBackend::Database,
            RunEventsBackend::Jsonl => EventBackend::Jsonl,
        },
        event_directory: config.state_dir.join(EVENT_DIRECTORY),
        max_trace_content: config.run_events.max_trace_content,
        lease,
        ..RecordsOptions::default()
    }
}

/// Whether several gateways may use the database at the same time.
pub fn is_shared(config: &Config) -> bool {
    let configured = config.run_ownership.heartbeat_enabled;
    configured.unwrap_or(config.database.backend == Backend::Postgres)
}

/// The lease of a process that starts now.
fn lease(terms: &RunOwnership) -> Lease {
    let (length, grace) =
        (Duration::from_secs(terms.lease_seconds), Duration::from_secs(terms.grace_seconds));
    Lease::new(&Uuid::new_v4().to_string(), length, grace)
}

/// The lease of a program beside gateways, which owns nothing but reservations.
pub(crate) fn lease_beside(terms: &RunOwnership) -> Lease {
    Lease { renews_reservations: true, ..lease(terms) }
}

//! Durable batches of delegations: `subagent_batches` and `subagent_batch_items`.
//!
//! A worker claims items of a batch for a limited time and renews that lease while it works. What it does counts only
//! while the lease is its own and has not expired: every change by a worker names the [`Claim`], and changes nothing if
//! another claim, a cancellation or a deletion came first. The result of an item, the end of its execution and the status
//! of its batch change in one transaction.
//!
//! A batch's row is the lock of its items: a transaction takes it before it changes an item in a way that others depend
//! on. It locks no second batch, so that two transactions never wait for each other. Leases are measured with one clock,
//! the server's in Postgres, because the clocks of several processes differ.

mod claim;
mod control;
mod finish;
mod lease;
mod read;
mod rows;
mod submit;

use chrono::{DateTime, Utc};

use super::db::{Db, WriteTx};
use super::error::{Entity, RecordsError};
use super::query::{Dialect, Sql, query};

pub use claim::{Claim, Claimed, ClaimedItem};
pub use control::RetryOutcome;
pub use finish::{ItemEnd, ItemResult};
pub use read::BatchesOf;
pub use rows::{BatchItemRow, BatchItemStatus, BatchRow, BatchStatus, ItemCounts};
pub use submit::{NewBatch, NewBatchItem, SubmittedBatch};

/// The error of an item that was cancelled with its batch.
pub const ITEM_CANCELLED: &str = "Cancelled by user";
/// The error of an item whose worker did not renew its lease, and that will be tried again.
pub const LEASE_EXPIRED: &str = "Previous worker lease expired; retrying";
/// The error of an item whose worker did not renew its lease, and that has no attempt left.
pub const LEASE_EXPIRED_LAST: &str = "Execution lease expired after the maximum retry count";

/// The repository of batches.
///
/// Every method is one transaction, except where it says otherwise: a dropped future leaves all of it or nothing.
#[derive(Clone, Debug)]
pub struct Batches {
    pub(super) db: Db,
}

/// The statuses of an item that has not ended.
const NOT_ENDED: &str = "('pending', 'queued', 'leased', 'running')";

impl Batches {
    /// Reads the time by which leases are measured.
    fn time(&self) -> Sql {
        match self.db.dialect() {
            Dialect::Sqlite => query("SELECT $1").bind(super::codec::time_text(self.db.clock.now())),
            Dialect::Postgres => query(
                "SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US') || '+00:00'",
            ),
        }
    }

    /// The end of a statement that locks the row it reads, once its holder has released it.
    fn for_update(&self) -> &'static str {
        match self.db.dialect() {
            // Only one transaction writes at a time.
            Dialect::Sqlite => "",
            Dialect::Postgres => " FOR UPDATE",
        }
    }

    /// Locks a batch for the rest of the transaction and reads it; `None` if there is no such batch.
    fn lock(&self, batch_id: &str) -> Sql {
        let mut sql = self.db.builder("SELECT * FROM subagent_batches WHERE id = ");
        sql.push_bind(batch_id).push(self.for_update());
        sql.build()
    }
}

/// The result of [`Batches::time`].
async fn now(tx: &mut WriteTx<'_>, time: Sql) -> Result<String, RecordsError> {
    let row: Option<(String,)> = tx.fetch_optional(time).await?;
    row.map(|(now,)| now).ok_or_else(|| not_found(Entity::Batch, "now"))
}

/// The time in a text of [`Batches::time`].
fn parsed(now: &str) -> Result<DateTime<Utc>, RecordsError> {
    let time = DateTime::parse_from_rfc3339(now);
    time.map(|time| time.with_timezone(&Utc)).map_err(|error| RecordsError::Corrupt {
        place: "the database's clock".to_owned(),
        detail: error.to_string(),
    })
}

fn not_found(entity: Entity, id: &str) -> RecordsError {
    RecordsError::NotFound { entity, id: id.to_owned() }
}

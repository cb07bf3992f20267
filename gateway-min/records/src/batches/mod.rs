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
//!
//! In Postgres the row is locked while others wait for the server's answers, so what a worker does for each item takes as
//! few round trips as possible: a claim two, a launch and an end one each. Their statements do not depend on what another
//! one returns, but on what it has left in the tables. All of a transaction have the same time, that of its begin: an end
//! that waits for the row counts from when it was sent, unless another process has claimed the item before it gets the row.

mod budget;
mod claim;
mod control;
mod finish;
mod lease;
mod read;
mod remains;
mod rows;
mod submit;
mod used;

use chrono::{DateTime, TimeDelta, Utc};

use super::db::Db;
use super::error::{Entity, RecordsError};
use super::query::{Builder, Dialect, Sql};

pub use budget::BudgetTokens;
pub use claim::{Claim, Claimed, ClaimedItem};
pub use control::RetryOutcome;
pub use finish::{Ended, ItemEnd, ItemResult};
pub use lease::Launch;
pub use rows::{BatchItemRow, BatchItemStatus, BatchRow, BatchStatus, ItemCounts};
pub use submit::{NewBatch, NewBatchItem, SubmittedBatch};
pub use used::{UncountedItem, UsedSoFar};

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
    /// The name under which this process owns rows of runs, if it has leases.
    pub(super) owner: Option<String>,
}

/// The name of the worker of a process that owns its rows under this name; each of its claims has a number besides.
pub fn worker_name(owner: &str) -> String {
    format!("worker:{owner}")
}

/// The statuses of an item that has not ended.
const NOT_ENDED: &str = "('pending', 'queued', 'leased', 'running')";

/// The time by which leases are measured, for one transaction.
#[derive(Clone)]
enum Now {
    /// That of this process, which shares its clock with all others.
    Here(DateTime<Utc>),
    /// The server's at the begin of the transaction.
    Server,
}

/// How Postgres writes a time as this crate does.
const AS_TEXT: (&str, &str) =
    ("(to_char((", ") AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US') || '+00:00')");

impl Now {
    /// Appends the time.
    fn push(&self, sql: &mut Builder) {
        self.push_after(sql, TimeDelta::zero());
    }

    /// Appends the time that comes `length` later.
    fn push_after(&self, sql: &mut Builder, length: TimeDelta) {
        match self {
            Self::Here(now) => {
                let later = now.checked_add_signed(length).unwrap_or(DateTime::<Utc>::MAX_UTC);
                sql.push_bind(super::codec::time_text(later));
            }
            Self::Server => {
                let micros = length.num_microseconds().unwrap_or(i64::MAX);
                let later = match micros {
                    0 => "transaction_timestamp()".to_owned(),
                    micros => format!("transaction_timestamp() + interval '{micros} microseconds'"),
                };
                sql.push(AS_TEXT.0).push(&later).push(AS_TEXT.1);
            }
        }
    }
}

/// How a transaction locks a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lock {
    /// Alone.
    Exclusive,
    /// Beside others that begin items of it, and nobody else.
    Shared,
}

impl Batches {
    /// The time for the statements of a transaction.
    fn now(&self) -> Now {
        match self.db.dialect() {
            Dialect::Sqlite => Now::Here(self.db.clock.now()),
            Dialect::Postgres => Now::Server,
        }
    }

    /// The statement that locks a batch for the rest of the transaction, for transactions that need not know it.
    fn locked(&self, batch_id: &str, lock: Lock) -> Sql {
        let mut sql = self.db.builder("SELECT id FROM subagent_batches WHERE id = ");
        sql.push_bind(batch_id);
        match (self.db.dialect(), lock) {
            (Dialect::Sqlite, _) => {}
            (Dialect::Postgres, Lock::Exclusive) => drop(sql.push(" FOR UPDATE")),
            (Dialect::Postgres, Lock::Shared) => drop(sql.push(" FOR SHARE")),
        }
        sql.build()
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

fn not_found(entity: Entity, id: &str) -> RecordsError {
    RecordsError::NotFound { entity, id: id.to_owned() }
}

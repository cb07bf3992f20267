//! Claiming items: what a worker may work on, and until when.

use chrono::TimeDelta;

use super::finish::{fail_execution, refresh};
use super::{BatchRow, BatchStatus, Batches, LEASE_EXPIRED, LEASE_EXPIRED_LAST, now, parsed};
use crate::codec::{Cells, time_text};
use crate::db::WriteTx;
use crate::error::RecordsError;
use crate::failure::DatabaseError;
use crate::query::{Dialect, FromRow, Row, query};

/// The right of a worker to work on an item, until its lease expires.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Claim {
    /// The batch.
    pub batch_id: String,
    /// The item.
    pub item_id: String,
    /// The name of this claim, which no other claim of the item has.
    pub owner: String,
    /// Which attempt at the item this is.
    pub attempt: i64,
}

/// A claimed item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimedItem {
    /// The right to work on it.
    pub claim: Claim,
    /// What the submission calls it.
    pub item_key: String,
    /// Its place in the submission.
    pub position: i64,
    /// The task.
    pub prompt: String,
    /// What its result is checked against.
    pub acceptance_criteria: Option<Vec<String>>,
}

/// Items that a worker has claimed, of one batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Claimed {
    /// The batch.
    pub batch: BatchRow,
    /// The items, in their order.
    pub items: Vec<ClaimedItem>,
}

impl FromRow for ClaimedItem {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let cells = Cells::new(row, "subagent_batch_items", &["id"]);
        Ok(Self {
            claim: Claim {
                batch_id: cells.text("batch_id")?,
                item_id: cells.text("id")?,
                owner: cells.text("lease_owner")?,
                attempt: cells.int("attempt")?,
            },
            item_key: cells.text("item_key")?,
            position: cells.int("position")?,
            prompt: cells.text("prompt")?,
            acceptance_criteria: cells.opt_json("acceptance_criteria")?,
        })
    }
}

/// How a transaction gets a batch that another one has locked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Locked {
    Skip,
    Wait,
}

impl Batches {
    /// The batches of which a worker could claim an item now, or of which leases have expired, oldest first.
    pub async fn claimable(&self) -> Result<Vec<String>, RecordsError> {
        let now: Option<(String,)> = self.db.fetch_optional(self.time()).await?;
        let now = now.map(|(now,)| now).unwrap_or_default();
        let batches: Vec<(String,)> = self
            .db
            .fetch_all(
                query(
                    "SELECT b.id FROM subagent_batches b WHERE b.status IN ('queued', 'running', 'paused') AND ( \
                     EXISTS (SELECT 1 FROM subagent_batch_items i WHERE i.batch_id = b.id \
                     AND i.status IN ('leased', 'running') AND i.lease_expires_at <= $1) \
                     OR (b.status <> 'paused' AND EXISTS (SELECT 1 FROM subagent_batch_items i \
                     WHERE i.batch_id = b.id AND i.status IN ('pending', 'queued')) \
                     AND (SELECT COUNT(*) FROM subagent_batch_items i WHERE i.batch_id = b.id \
                     AND i.status IN ('leased', 'running')) < b.max_running_items)) \
                     ORDER BY b.created_at, b.id",
                )
                .bind(now),
            )
            .await?;
        Ok(batches.into_iter().map(|(id,)| id).collect())
    }

    /// Claims at most `most` items of a batch for `lease`, under a name that no other call has used. Items whose lease has
    /// expired are given back first, also if `most` is 0 or the batch is paused; those without an attempt left fail.
    ///
    /// `None` if there is no such batch, or another process is claiming some of it and `waits` is false.
    pub async fn claim(
        &self,
        batch_id: &str,
        owner: &str,
        lease: TimeDelta,
        most: usize,
        waits: bool,
    ) -> Result<Option<Claimed>, RecordsError> {
        let (this, batch_id, owner) = (self.clone(), batch_id.to_owned(), owner.to_owned());
        let locked = if waits { Locked::Wait } else { Locked::Skip };
        let most = i64::try_from(most).unwrap_or(i64::MAX);
        let claimed = self.db.write_rows(move |tx| {
            Box::pin(async move { this.claim_in(tx, &batch_id, &owner, lease, most, locked).await })
        });
        claimed.await
    }

    async fn claim_in(
        &self,
        tx: &mut WriteTx<'_>,
        batch_id: &str,
        owner: &str,
        lease: TimeDelta,
        most: i64,
        locked: Locked,
    ) -> Result<Option<Claimed>, RecordsError> {
        let mut lock = self.db.builder("SELECT * FROM subagent_batches WHERE id = ");
        lock.push_bind(batch_id).push(self.for_update());
        if locked == Locked::Skip && self.db.dialect() == Dialect::Postgres {
            lock.push(" SKIP LOCKED");
        }
        let Some(batch): Option<BatchRow> = tx.fetch_optional(lock.build()).await? else { return Ok(None) };
        let now = now(tx, self.time()).await?;
        recover(tx, &batch, &now).await?;
        let mut batch = refresh(tx, batch, &now).await?;
        if most == 0 || !matches!(batch.status, BatchStatus::Queued | BatchStatus::Running) {
            return Ok(Some(Claimed { batch, items: Vec::new() }));
        }
        let at_work = query(
            "SELECT COUNT(*), COALESCE(SUM(CASE WHEN status = 'queued' THEN 0 ELSE 1 END), 0) \
             FROM subagent_batch_items WHERE batch_id = $1 AND status IN ('queued', 'leased', 'running')",
        );
        let (live, working): (i64, i64) =
            tx.fetch_optional(at_work.bind(&batch.id)).await?.unwrap_or_default();
        if live < batch.max_live_items {
            let promote = query(
                "UPDATE subagent_batch_items SET status = 'queued', updated_at = $3 WHERE id IN \
                 (SELECT id FROM subagent_batch_items WHERE batch_id = $1 AND status = 'pending' \
                 ORDER BY position LIMIT $2)",
            );
            tx.execute(promote.bind(&batch.id).bind(batch.max_live_items - live).bind(&now)).await?;
        }
        let claim = query(
            "UPDATE subagent_batch_items SET status = 'leased', attempt = attempt + 1, lease_owner = $3, \
             lease_expires_at = $4, started_at = $5, error = NULL, updated_at = $5 WHERE id IN \
             (SELECT id FROM subagent_batch_items WHERE batch_id = $1 AND status = 'queued' \
             ORDER BY position LIMIT $2) RETURNING *",
        );
        let claim =
            claim.bind(&batch.id).bind(most.min(batch.max_running_items - working).max(0)).bind(owner);
        let claim = claim.bind(time_text(parsed(&now)? + lease)).bind(&now);
        let mut items: Vec<ClaimedItem> = tx.fetch_all(claim).await?;
        items.sort_by_key(|item| item.position);
        if !items.is_empty() && batch.status == BatchStatus::Queued {
            batch.status = BatchStatus::Running;
            let running =
                query("UPDATE subagent_batches SET status = 'running', updated_at = $2 WHERE id = $1");
            tx.execute(running.bind(&batch.id).bind(&now)).await?;
        }
        Ok(Some(Claimed { batch, items }))
    }
}

/// Gives back the items whose lease has expired. Those without an attempt left fail, with their executions.
async fn recover(tx: &mut WriteTx<'_>, batch: &BatchRow, now: &str) -> Result<(), RecordsError> {
    let failed = query(
        "UPDATE subagent_batch_items SET status = 'failed', error = COALESCE(error, $4), lease_owner = NULL, \
         lease_expires_at = NULL, completed_at = $3, updated_at = $3 WHERE batch_id = $1 \
         AND status IN ('leased', 'running') AND lease_expires_at <= $3 AND attempt >= $2 RETURNING id",
    );
    let failed = failed.bind(&batch.id).bind(batch.max_attempts).bind(now).bind(LEASE_EXPIRED_LAST);
    let failed: Vec<(String,)> = tx.fetch_all(failed).await?;
    for (item_id,) in failed {
        fail_execution(tx, &item_id, LEASE_EXPIRED_LAST, now).await?;
    }
    let retried = query(
        "UPDATE subagent_batch_items SET status = 'queued', error = $3, lease_owner = NULL, lease_expires_at = NULL, \
         started_at = NULL, updated_at = $2 WHERE batch_id = $1 AND status IN ('leased', 'running') \
         AND lease_expires_at <= $2",
    );
    tx.execute(retried.bind(&batch.id).bind(now).bind(LEASE_EXPIRED)).await?;
    Ok(())
}

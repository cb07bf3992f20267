//! Claiming items: what a worker may work on, and until when.

use chrono::TimeDelta;

use super::finish::refreshed;
use super::{BatchRow, BatchStatus, Batches, LEASE_EXPIRED, LEASE_EXPIRED_LAST, Now};
use crate::codec::Cells;
use crate::error::RecordsError;
use crate::failure::DatabaseError;
use crate::query::{Dialect, FromRow, Row, Sql};
use crate::transaction::WriteTx;

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
        let mut sql = self.db.builder(
            "SELECT b.id FROM subagent_batches b WHERE b.status IN ('queued', 'running', 'paused') AND ( \
             EXISTS (SELECT 1 FROM subagent_batch_items i WHERE i.batch_id = b.id \
             AND i.status IN ('leased', 'running') AND i.lease_expires_at <= ",
        );
        self.now().push(&mut sql);
        sql.push(
            ") OR (b.status <> 'paused' AND EXISTS (SELECT 1 FROM subagent_batch_items i \
             WHERE i.batch_id = b.id AND i.status IN ('pending', 'queued')) \
             AND (SELECT COUNT(*) FROM subagent_batch_items i WHERE i.batch_id = b.id \
             AND i.status IN ('leased', 'running')) < b.max_running_items)) ORDER BY b.created_at, b.id",
        );
        let batches: Vec<(String,)> = self.db.fetch_all(sql.build()).await?;
        Ok(batches.into_iter().map(|(id,)| id).collect())
    }

    /// Claims at most `most` items of a batch for `lease`, under a name that no other call has used. Items whose lease has
    /// expired are given back first, also if `most` is 0 or the batch is paused; those without an attempt left fail.
    ///
    /// `None` if there is no such batch, or another process is claiming some of it and `waits` is false.
    ///
    /// # Errors
    /// After [`RecordsError::InDoubt`], what was claimed has to be given back: [`Self::release_unanswered`].
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
        let now = self.now();
        let Some(found) = tx.fetch_optional::<Found>(self.find(batch_id, locked, &now)).await? else {
            return Ok(None);
        };
        let Found { mut batch, has_expired } = found;
        if has_expired {
            batch = self.recover(tx, batch, &now).await?;
        }
        if most == 0 || !matches!(batch.status, BatchStatus::Queued | BatchStatus::Running) {
            return Ok(Some(Claimed { batch, items: Vec::new() }));
        }
        tx.queue(self.promotion(&batch, &now))?;
        let mut statements = vec![self.leasing(&batch, owner, lease, most, &now)];
        if batch.status == BatchStatus::Queued {
            statements.push(self.running(&batch, owner, &now));
        }
        let ran = tx.run_and_commit::<ClaimedItem>(statements).await?;
        let mut items: Vec<ClaimedItem> = ran.into_iter().flat_map(|ran| ran.rows).collect();
        items.sort_by_key(|item| item.position);
        if !items.is_empty() {
            batch.status = BatchStatus::Running;
        }
        Ok(Some(Claimed { batch, items }))
    }

    /// Locks the batch and reads it, and whether leases of it have expired. One that expires while the lock is waited for
    /// is found by the next claim.
    fn find(&self, batch_id: &str, locked: Locked, now: &Now) -> Sql {
        let mut sql = self.db.builder(
            "SELECT b.*, EXISTS (SELECT 1 FROM subagent_batch_items i WHERE i.batch_id = b.id \
             AND i.status IN ('leased', 'running') AND i.lease_expires_at <= ",
        );
        now.push(&mut sql);
        sql.push(") AS has_expired FROM subagent_batches b WHERE b.id = ").push_bind(batch_id);
        sql.push(self.for_update());
        if locked == Locked::Skip && self.db.dialect() == Dialect::Postgres {
            sql.push(" SKIP LOCKED");
        }
        sql.build()
    }

    /// Gives back the items whose lease has expired. Those without an attempt left fail, with their executions, and may
    /// end the batch. Returns the batch as it is then.
    async fn recover(
        &self,
        tx: &mut WriteTx<'_>,
        batch: BatchRow,
        now: &Now,
    ) -> Result<BatchRow, RecordsError> {
        const EXPIRED: &str = " AND status IN ('leased', 'running') AND lease_expires_at <= ";
        let mut failed =
            self.db.builder("UPDATE subagent_batch_items SET status = 'failed', error = COALESCE(error, ");
        failed
            .push_bind(LEASE_EXPIRED_LAST)
            .push("), lease_owner = NULL, lease_expires_at = NULL, completed_at = ");
        now.push(&mut failed);
        failed.push(", updated_at = ");
        now.push(&mut failed);
        failed.push(" WHERE batch_id = ").push_bind(&batch.id).push(" AND attempt >= ");
        failed.push_bind(batch.max_attempts).push(EXPIRED);
        now.push(&mut failed);
        failed.push(" RETURNING id");
        let failed: Vec<(String,)> = tx.fetch_all(failed.build()).await?;
        let failed: Vec<String> = failed.into_iter().map(|(id,)| id).collect();
        if !failed.is_empty() {
            let mut executions = self.db.builder("UPDATE executions SET status = 'failed', error = ");
            executions.push_bind(LEASE_EXPIRED_LAST).push(", delivered = TRUE, completed_at = ");
            now.push(&mut executions);
            executions.push(" WHERE NOT delivered AND ").push_text_in("execution_id", &failed);
            tx.queue(executions.build())?;
        }
        let mut retried = self.db.builder("UPDATE subagent_batch_items SET status = 'queued', error = ");
        retried
            .push_bind(LEASE_EXPIRED)
            .push(", lease_owner = NULL, lease_expires_at = NULL, started_at = NULL");
        retried.push(", updated_at = ");
        now.push(&mut retried);
        retried.push(" WHERE batch_id = ").push_bind(&batch.id).push(EXPIRED);
        now.push(&mut retried);
        tx.queue(retried.build())?;
        tx.queue(refreshed(&self.db, &batch.id, now))?;
        let sql = self.db.builder("SELECT * FROM subagent_batches WHERE id = ");
        let stored: Option<BatchRow> = tx.fetch_optional(sql.with_bind(&batch.id).build()).await?;
        Ok(stored.unwrap_or(batch))
    }

    /// Makes as many items live as may be.
    fn promotion(&self, batch: &BatchRow, now: &Now) -> Sql {
        let mut sql = self.db.builder("UPDATE subagent_batch_items SET status = 'queued', updated_at = ");
        now.push(&mut sql);
        sql.push(
            " WHERE id IN (SELECT id FROM subagent_batch_items WHERE status = 'pending' AND batch_id = ",
        );
        sql.push_bind(&batch.id).push(" ORDER BY position LIMIT (SELECT CASE WHEN COUNT(*) < ");
        sql.push_bind(batch.max_live_items).push(" THEN ").push_bind(batch.max_live_items);
        sql.push(" - COUNT(*) ELSE 0 END FROM subagent_batch_items WHERE status IN ('queued', 'leased', 'running') ");
        sql.push("AND batch_id = ").push_bind(&batch.id).push("))");
        sql.build()
    }

    /// Leases at most `most` live items, as far as they may be at work.
    fn leasing(&self, batch: &BatchRow, owner: &str, lease: TimeDelta, most: i64, now: &Now) -> Sql {
        let mut sql = self.db.builder(
            "UPDATE subagent_batch_items SET status = 'leased', attempt = attempt + 1, error = NULL, lease_owner = ",
        );
        sql.push_bind(owner).push(", lease_expires_at = ");
        now.push_after(&mut sql, lease);
        sql.push(", started_at = ");
        now.push(&mut sql);
        sql.push(", updated_at = ");
        now.push(&mut sql);
        sql.push(" WHERE id IN (SELECT id FROM subagent_batch_items WHERE status = 'queued' AND batch_id = ");
        sql.push_bind(&batch.id).push(" ORDER BY position LIMIT (SELECT CASE WHEN COUNT(*) + ");
        sql.push_bind(most).push(" <= ").push_bind(batch.max_running_items).push(" THEN ").push_bind(most);
        sql.push(" WHEN COUNT(*) < ").push_bind(batch.max_running_items);
        sql.push(" THEN ").push_bind(batch.max_running_items).push(" - COUNT(*) ELSE 0 END ");
        sql.push("FROM subagent_batch_items WHERE status IN ('leased', 'running') AND batch_id = ");
        sql.push_bind(&batch.id).push(")) RETURNING *");
        sql.build()
    }

    /// The batch runs, if this claim got an item.
    fn running(&self, batch: &BatchRow, owner: &str, now: &Now) -> Sql {
        let mut sql = self.db.builder("UPDATE subagent_batches SET status = 'running', updated_at = ");
        now.push(&mut sql);
        sql.push(" WHERE id = ").push_bind(&batch.id);
        sql.push(" AND EXISTS (SELECT 1 FROM subagent_batch_items WHERE status = 'leased' AND batch_id = ");
        sql.push_bind(&batch.id).push(" AND lease_owner = ").push_bind(owner).push(")");
        sql.build()
    }
}

/// A batch that is locked.
struct Found {
    batch: BatchRow,
    has_expired: bool,
}

impl FromRow for Found {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let has_expired = Cells::new(row, "subagent_batches", &["id"]).flag("has_expired")?;
        Ok(Self { batch: BatchRow::from_row(row)?, has_expired })
    }
}

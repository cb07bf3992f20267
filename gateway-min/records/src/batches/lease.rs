//! Working on a claimed item: starting, renewing, giving back.

use chrono::TimeDelta;

use super::{Batches, Claim, now, parsed};
use crate::codec::time_text;
use crate::error::RecordsError;
use crate::executions::{ExecutionRow, NewExecution, Opened, open_in};
use crate::query::{Sql, query};

/// Selects an item while a claim on it holds. The parameters are those of [`bound`].
const HELD: &str = "id = $1 AND lease_owner = $2 AND attempt = $3 AND status IN ('leased', 'running') \
    AND lease_expires_at > $4";

/// Binds the parameters of [`HELD`].
fn bound(sql: Sql, claim: &Claim, now: &str) -> Sql {
    sql.bind(&claim.item_id).bind(&claim.owner).bind(claim.attempt).bind(now)
}

impl Batches {
    /// Opens the execution of a claimed item and renews the lease, just before its subagent starts. `None`, and nothing
    /// happens, if the claim does not hold any more.
    pub async fn launch(
        &self,
        claim: &Claim,
        lease: TimeDelta,
        new: NewExecution,
    ) -> Result<Option<Opened>, RecordsError> {
        let (this, claim) = (self.clone(), claim.clone());
        let launched = self.db.write_rows(move |tx| {
            Box::pin(async move {
                // Under the batch's lock, so that no cancellation or deletion misses the execution.
                let batch: Option<super::BatchRow> = tx.fetch_optional(this.lock(&claim.batch_id)).await?;
                if batch.is_none() {
                    return Ok(None);
                }
                let now = now(tx, this.time()).await?;
                if tx.execute(this.renewal(&claim, lease, &now)?).await? == 0 {
                    return Ok(None);
                }
                open_in(tx, new, &now).await.map(Some)
            })
        });
        launched.await
    }

    /// The item's subagent starts, as this execution and with this model, after it waited this many milliseconds for a
    /// slot. False, and nothing happens, if the claim does not hold any more.
    pub async fn running(
        &self,
        claim: &Claim,
        execution: &ExecutionRow,
        model: &str,
        waited_ms: i64,
    ) -> Result<bool, RecordsError> {
        let started = query(
            "UPDATE executions SET status = 'running', model_name = $3, waited_ms = COALESCE(waited_ms, $4), \
             started_at = COALESCE(started_at, $5) WHERE execution_id = $1 AND attempt = $2",
        );
        let started =
            started.bind(&execution.execution_id).bind(execution.attempt).bind(model).bind(waited_ms);
        let (this, claim) = (self.clone(), claim.clone());
        let db = self.db.unflushed();
        let running = db.write_rows(move |tx| {
            Box::pin(async move {
                let now = now(tx, this.time()).await?;
                let mut sql = this.db.builder("UPDATE subagent_batch_items SET status = 'running', ");
                sql.push("started_at = $4, updated_at = $4 WHERE ").push(HELD);
                if tx.execute(bound(sql.build(), &claim, &now)).await? == 0 {
                    return Ok(false);
                }
                tx.execute(started.bind(&now)).await?;
                Ok(true)
            })
        });
        running.await
    }

    /// Renews the lease. False, and nothing happens, if the claim does not hold any more.
    pub async fn renew(&self, claim: &Claim, lease: TimeDelta) -> Result<bool, RecordsError> {
        let (this, claim) = (self.clone(), claim.clone());
        let db = self.db.unflushed();
        let renewed = db.write_rows(move |tx| {
            Box::pin(async move {
                let now = now(tx, this.time()).await?;
                tx.execute(this.renewal(&claim, lease, &now)?).await.map(|rows| rows > 0)
            })
        });
        renewed.await
    }

    fn renewal(&self, claim: &Claim, lease: TimeDelta, now: &str) -> Result<Sql, RecordsError> {
        let mut sql = self.db.builder("UPDATE subagent_batch_items SET lease_expires_at = $5 WHERE ");
        sql.push(HELD);
        Ok(bound(sql.build(), claim, now).bind(time_text(parsed(now)? + lease)))
    }

    /// Which of these claims hold.
    pub async fn held(&self, claims: Vec<Claim>) -> Result<Vec<Claim>, RecordsError> {
        if claims.is_empty() {
            return Ok(claims);
        }
        let now: Option<(String,)> = self.db.fetch_optional(self.time()).await?;
        let mut sql = self.db.builder(
            "SELECT id, lease_owner FROM subagent_batch_items WHERE status IN ('leased', 'running') \
             AND lease_expires_at > ",
        );
        let ids: Vec<String> = claims.iter().map(|claim| claim.item_id.clone()).collect();
        sql.push_bind(now.map(|(now,)| now).unwrap_or_default()).push(" AND ").push_text_in("id", &ids);
        let held: Vec<(String, String)> = self.db.fetch_all(sql.build()).await?;
        let holds =
            |claim: &Claim| held.iter().any(|(id, owner)| *id == claim.item_id && *owner == claim.owner);
        Ok(claims.into_iter().filter(holds).collect())
    }

    /// Gives a claimed item back whose subagent does not work any more, as if it had not been claimed: the attempt does
    /// not count, and the next worker goes on where this one stopped. False, and nothing happens, if the claim does not
    /// hold any more.
    pub async fn release(&self, claim: &Claim) -> Result<bool, RecordsError> {
        let (this, claim) = (self.clone(), claim.clone());
        let released = self.db.write_rows(move |tx| {
            Box::pin(async move {
                let now = now(tx, this.time()).await?;
                let mut sql = this.db.builder("UPDATE subagent_batch_items SET status = 'queued', ");
                sql.push(
                    "attempt = attempt - 1, lease_owner = NULL, lease_expires_at = NULL, started_at = NULL, ",
                );
                sql.push("updated_at = $4 WHERE ").push(HELD);
                tx.execute(bound(sql.build(), &claim, &now)).await.map(|rows| rows > 0)
            })
        });
        released.await
    }

    /// Whether the item of a claim exists: its thread was not deleted.
    pub async fn exists(&self, item_id: &str) -> Result<bool, RecordsError> {
        let sql = query("SELECT id FROM subagent_batch_items WHERE id = $1").bind(item_id);
        let found: Option<(String,)> = self.db.fetch_optional(sql).await?;
        Ok(found.is_some())
    }
}

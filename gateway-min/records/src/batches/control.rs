//! What owners do with batches: pause, resume, cancel, try an item again; and what a deletion of the thread takes.

use super::rows::ITEM_COLUMNS;
use super::{BatchItemRow, BatchRow, BatchStatus, Batches, ITEM_CANCELLED, NOT_ENDED, now};
use crate::db::WriteTx;
use crate::error::RecordsError;
use crate::query::{Sql, query};

/// How many items of a deleted thread one transaction deletes.
const ITEMS_PER_DELETION: i64 = 500;

/// What became of a retry.
#[derive(Clone, Debug, PartialEq)]
pub enum RetryOutcome {
    /// The item waits again.
    Retried(Box<BatchItemRow>),
    /// There is no such item, it has not failed, or its batch is cancelled.
    Refused,
}

impl Batches {
    /// Claims nothing more of a batch; items at work go on. A batch that has ended stays as it is. `None` if there is no
    /// such batch.
    pub async fn pause(&self, batch_id: &str) -> Result<Option<BatchRow>, RecordsError> {
        self.change(batch_id, |status| match status {
            BatchStatus::Queued | BatchStatus::Running => BatchStatus::Paused,
            other => other,
        })
        .await
    }

    /// Goes on with a paused batch. Any other stays as it is. `None` if there is no such batch.
    pub async fn resume(&self, batch_id: &str) -> Result<Option<BatchRow>, RecordsError> {
        self.change(
            batch_id,
            |status| if status == BatchStatus::Paused { BatchStatus::Queued } else { status },
        )
        .await
    }

    async fn change(
        &self,
        batch_id: &str,
        next: fn(BatchStatus) -> BatchStatus,
    ) -> Result<Option<BatchRow>, RecordsError> {
        let (this, batch_id) = (self.clone(), batch_id.to_owned());
        let changed = self.db.write_rows(move |tx| {
            Box::pin(async move {
                let batch: Option<BatchRow> = tx.fetch_optional(this.lock(&batch_id)).await?;
                let Some(batch) = batch else { return Ok(None) };
                let now = now(tx, this.time()).await?;
                set_status(tx, &batch.id, next(batch.status), &now).await
            })
        });
        changed.await
    }

    /// Cancels a batch with its items and their executions. One that has ended stays as it is. `None` if there is no such
    /// batch.
    pub async fn cancel(&self, batch_id: &str) -> Result<Option<BatchRow>, RecordsError> {
        let (this, batch_id) = (self.clone(), batch_id.to_owned());
        let cancelled = self.db.write_rows(move |tx| {
            Box::pin(async move {
                let batch: Option<BatchRow> = tx.fetch_optional(this.lock(&batch_id)).await?;
                let Some(batch) = batch else { return Ok(None) };
                let now = now(tx, this.time()).await?;
                if batch.status.is_terminal() {
                    return set_status(tx, &batch.id, batch.status, &now).await;
                }
                let executions = query(
                    "UPDATE executions SET status = 'cancelled', error = $2, completed_at = $3, delivered = TRUE \
                     WHERE NOT delivered AND thread_id = $4 AND execution_id IN \
                     (SELECT id FROM subagent_batch_items WHERE batch_id = $1 AND status NOT IN ('succeeded', 'failed'))",
                );
                let executions = executions.bind(&batch.id).bind(ITEM_CANCELLED).bind(&now);
                tx.execute(executions.bind(&batch.thread_id)).await?;
                let items = format!(
                    "UPDATE subagent_batch_items SET status = 'cancelled', error = $2, lease_owner = NULL, \
                     lease_expires_at = NULL, cancel_requested_at = $3, completed_at = $3, updated_at = $3 \
                     WHERE batch_id = $1 AND status IN {NOT_ENDED}"
                );
                let items = Sql { text: items.into(), values: Vec::new() };
                tx.execute(items.bind(&batch.id).bind(ITEM_CANCELLED).bind(&now)).await?;
                let sql = query(
                    "UPDATE subagent_batches SET status = 'cancelled', completed_at = $2, updated_at = $2 \
                     WHERE id = $1 RETURNING *",
                );
                tx.fetch_optional(sql.bind(&batch.id).bind(&now)).await
            })
        });
        cancelled.await
    }

    /// Tries a failed item again, as if it were new. Its batch goes on: a paused one stays paused.
    pub async fn retry(&self, batch_id: &str, item_id: &str) -> Result<RetryOutcome, RecordsError> {
        let (this, batch_id, item_id) = (self.clone(), batch_id.to_owned(), item_id.to_owned());
        let retried = self.db.write_rows(move |tx| {
            Box::pin(async move {
                let batch: Option<BatchRow> = tx.fetch_optional(this.lock(&batch_id)).await?;
                let Some(batch) = batch.filter(|batch| batch.status != BatchStatus::Cancelled) else {
                    return Ok(RetryOutcome::Refused);
                };
                let now = now(tx, this.time()).await?;
                let retry = format!(
                    "UPDATE subagent_batch_items SET status = 'pending', attempt = 0, lease_owner = NULL, \
                     lease_expires_at = NULL, cancel_requested_at = NULL, model_name = NULL, result = NULL, \
                     result_preview = NULL, result_truncated = FALSE, acceptance_verdict = NULL, error = NULL, \
                     stop_reason = NULL, token_usage = NULL, started_at = NULL, completed_at = NULL, updated_at = $3 \
                     WHERE batch_id = $1 AND id = $2 AND status = 'failed' RETURNING {ITEM_COLUMNS}"
                );
                let retry = Sql { text: retry.into(), values: Vec::new() };
                let item: Option<BatchItemRow> =
                    tx.fetch_optional(retry.bind(&batch.id).bind(&item_id).bind(&now)).await?;
                let Some(item) = item else { return Ok(RetryOutcome::Refused) };
                if batch.status != BatchStatus::Paused {
                    let status = query(
                        "UPDATE subagent_batches SET completed_at = NULL, updated_at = $2, status = CASE WHEN EXISTS \
                         (SELECT 1 FROM subagent_batch_items WHERE batch_id = $1 AND status IN ('leased', 'running')) \
                         THEN 'running' ELSE 'queued' END WHERE id = $1",
                    );
                    tx.execute(status.bind(&batch.id).bind(&now)).await?;
                }
                Ok(RetryOutcome::Retried(Box::new(item)))
            })
        });
        retried.await
    }

    /// Cancels the batches of a thread, so that no worker starts another of their items: the first part of the thread's
    /// deletion. Several transactions.
    pub async fn cancel_of_thread(&self, thread_id: &str) -> Result<(), RecordsError> {
        let sql = "SELECT id FROM subagent_batches WHERE thread_id = $1 AND status IN ('queued', 'running', 'paused')";
        let batches: Vec<(String,)> = self.db.fetch_all(query(sql).bind(thread_id)).await?;
        for (batch_id,) in batches {
            self.cancel(&batch_id).await?;
        }
        Ok(())
    }

    /// Deletes the items of a thread's batches. Several transactions: one for many thousands of prompts and results would
    /// keep other writers waiting.
    pub(crate) async fn delete_items_of_thread(&self, thread_id: &str) -> Result<(), RecordsError> {
        let items = query(
            "SELECT i.id, i.batch_id FROM subagent_batch_items i JOIN subagent_batches b \
            ON b.id = i.batch_id WHERE b.thread_id = $1 ORDER BY i.batch_id, i.id LIMIT $2",
        );
        let items = items.bind(thread_id).bind(ITEMS_PER_DELETION);
        loop {
            let found: Vec<(String, String)> = self.db.fetch_all(items.clone()).await?;
            if found.is_empty() {
                return Ok(());
            }
            let ids: Vec<String> = found.into_iter().map(|(id, _)| id).collect();
            let mut sql = self.db.builder("DELETE FROM subagent_batch_items WHERE ");
            sql.push_text_in("id", &ids);
            let sql = sql.build();
            self.db.unflushed().write_rows(move |tx| Box::pin(tx.execute(sql))).await?;
        }
    }
}

/// Sets the status of a batch that is locked.
async fn set_status(
    tx: &mut WriteTx<'_>,
    batch_id: &str,
    status: BatchStatus,
    now: &str,
) -> Result<Option<BatchRow>, RecordsError> {
    let sql = query("UPDATE subagent_batches SET status = $2, updated_at = $3 WHERE id = $1 RETURNING *");
    tx.fetch_optional(sql.bind(batch_id).bind(status.as_str()).bind(now)).await
}

//! What owners do with batches: pause, resume, cancel, try an item again; and what a deletion of the thread takes.

use super::rows::ITEM_COLUMNS;
use super::{BatchItemRow, BatchRow, BatchStatus, Batches, ITEM_CANCELLED, NOT_ENDED};
use crate::error::RecordsError;
use crate::query::query;
use crate::runs::{Reservation, ensure_held};
use crate::transaction::WriteTx;

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
                this.set_status(tx, &batch.id, next(batch.status)).await
            })
        });
        changed.await
    }

    /// Cancels a batch with its items and their executions. One that has ended stays as it is. `None` if there is no such
    /// batch.
    pub async fn cancel(&self, batch_id: &str) -> Result<Option<BatchRow>, RecordsError> {
        let (this, batch_id) = (self.clone(), batch_id.to_owned());
        let cancelled =
            self.db.write_rows(move |tx| Box::pin(async move { this.cancel_in(tx, &batch_id).await }));
        cancelled.await
    }

    /// [`Self::cancel`] in a transaction, which it commits.
    async fn cancel_in(
        &self,
        tx: &mut WriteTx<'_>,
        batch_id: &str,
    ) -> Result<Option<BatchRow>, RecordsError> {
        let batch: Option<BatchRow> = tx.fetch_optional(self.lock(batch_id)).await?;
        let Some(batch) = batch else { return Ok(None) };
        if batch.status.is_terminal() {
            return self.set_status(tx, &batch.id, batch.status).await;
        }
        let now = self.now();
        let mut executions =
            self.db.builder("UPDATE executions SET status = 'cancelled', delivered = TRUE, error = ");
        executions.push_bind(ITEM_CANCELLED).push(", completed_at = ");
        now.push(&mut executions);
        executions.push(" WHERE NOT delivered AND thread_id = ").push_bind(&batch.thread_id);
        executions.push(" AND execution_id IN (SELECT id FROM subagent_batch_items WHERE batch_id = ");
        executions.push_bind(&batch.id).push(" AND status NOT IN ('succeeded', 'failed'))");
        tx.queue(executions.build())?;
        let mut items = self.db.builder(
            "UPDATE subagent_batch_items SET status = 'cancelled', lease_owner = NULL, lease_expires_at = NULL, \
             error = ",
        );
        items.push_bind(ITEM_CANCELLED);
        for column in ["cancel_requested_at", "completed_at", "updated_at"] {
            items.push(", ").push(column).push(" = ");
            now.push(&mut items);
        }
        items.push(" WHERE batch_id = ").push_bind(&batch.id).push(" AND status IN ").push(NOT_ENDED);
        tx.queue(items.build())?;
        let mut sql = self.db.builder("UPDATE subagent_batches SET status = 'cancelled', completed_at = ");
        now.push(&mut sql);
        sql.push(", updated_at = ");
        now.push(&mut sql);
        sql.push(" WHERE id = ").push_bind(&batch.id).push(" RETURNING *");
        tx.fetch_and_commit(sql.build()).await
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
                let now = this.now();
                let mut retry = this.db.builder(
                    "UPDATE subagent_batch_items SET status = 'pending', attempt = 0, lease_owner = NULL, \
                     lease_expires_at = NULL, cancel_requested_at = NULL, model_name = NULL, result = NULL, \
                     result_preview = NULL, result_truncated = FALSE, acceptance_verdict = NULL, error = NULL, \
                     stop_reason = NULL, token_usage = NULL, started_at = NULL, completed_at = NULL, updated_at = ",
                );
                now.push(&mut retry);
                retry.push(" WHERE status = 'failed' AND batch_id = ").push_bind(&batch.id).push(" AND id = ");
                retry.push_bind(&item_id).push(" RETURNING ").push(ITEM_COLUMNS);
                let item: Option<BatchItemRow> = tx.fetch_optional(retry.build()).await?;
                let Some(item) = item else { return Ok(RetryOutcome::Refused) };
                if batch.status != BatchStatus::Paused {
                    let mut status = this.db.builder(
                        "UPDATE subagent_batches SET completed_at = NULL, status = CASE WHEN EXISTS \
                         (SELECT 1 FROM subagent_batch_items WHERE status IN ('leased', 'running') AND batch_id = ",
                    );
                    status.push_bind(&batch.id).push(") THEN 'running' ELSE 'queued' END, updated_at = ");
                    now.push(&mut status);
                    status.push(" WHERE id = ").push_bind(&batch.id);
                    tx.queue(status.build())?;
                }
                Ok(RetryOutcome::Retried(Box::new(item)))
            })
        });
        retried.await
    }

    /// Cancels the batches of the reserved thread, so that no worker starts another of their items: the first part of the
    /// thread's deletion. Several transactions, each of which looks for the reservation.
    ///
    /// # Errors
    /// [`RecordsError::NotFound`] if the reservation was recovered in the meantime: the batches of later runs go on.
    pub async fn cancel_of_thread(&self, deletion: &Reservation) -> Result<(), RecordsError> {
        let thread_id = deletion.thread_id();
        let sql = "SELECT id FROM subagent_batches WHERE thread_id = $1 AND status IN ('queued', 'running', 'paused')";
        let batches: Vec<(String,)> = self.db.fetch_all(query(sql).bind(thread_id)).await?;
        for (batch_id,) in batches {
            let (this, row) = (self.clone(), deletion.row_id().to_owned());
            let cancelled = self.db.write(thread_id, move |tx| {
                Box::pin(async move {
                    ensure_held(tx, &row).await?;
                    this.cancel_in(tx, &batch_id).await
                })
            });
            cancelled.await?;
        }
        Ok(())
    }

    /// Deletes the items of the reserved thread's batches. Several transactions: one for many thousands of prompts and
    /// results would keep other writers waiting. Each looks for the reservation.
    pub(crate) async fn delete_items_of_thread(&self, deletion: &Reservation) -> Result<(), RecordsError> {
        let thread_id = deletion.thread_id();
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
            let (sql, row) = (sql.build(), deletion.row_id().to_owned());
            let db = self.db.unflushed();
            let deleted = db.write(thread_id, move |tx| {
                Box::pin(async move {
                    ensure_held(tx, &row).await?;
                    tx.execute(sql).await
                })
            });
            deleted.await?;
        }
    }

    /// Sets the status of a batch that is locked, and commits.
    async fn set_status(
        &self,
        tx: &mut WriteTx<'_>,
        batch_id: &str,
        status: BatchStatus,
    ) -> Result<Option<BatchRow>, RecordsError> {
        let mut sql = self.db.builder("UPDATE subagent_batches SET status = ");
        sql.push_bind(status.as_str()).push(", updated_at = ");
        self.now().push(&mut sql);
        sql.push(" WHERE id = ").push_bind(batch_id).push(" RETURNING *");
        tx.fetch_and_commit(sql.build()).await
    }
}

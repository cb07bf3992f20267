//! How an attempt at an item ends, and with the last item its batch.

use serde_json::Value as Json;

use super::{BatchRow, BatchStatus, Batches, Claim, NOT_ENDED, now};
use crate::codec::object_text;
use crate::db::WriteTx;
use crate::error::RecordsError;
use crate::executions::{ExecutionEnd, ExecutionRow, ExecutionTokens, usage_json};
use crate::query::query;

/// What came of an attempt at an item.
#[derive(Clone, Debug, PartialEq)]
pub enum ItemResult {
    /// It has a result.
    Succeeded {
        /// The result, already cut.
        result: String,
        /// The beginning of it.
        preview: String,
        /// Whether the result was cut.
        truncated: bool,
        /// What the check of the criteria found.
        verdict: Option<Json>,
    },
    /// It has none; it is tried again if there is an attempt left.
    Failed {
        /// Why.
        error: String,
    },
}

/// The end of an attempt at an item.
#[derive(Clone, Debug, PartialEq)]
pub struct ItemEnd {
    /// What came of it.
    pub result: ItemResult,
    /// The model that did the work.
    pub model_name: Option<String>,
    /// Why it stopped early.
    pub stop_reason: Option<String>,
    /// The tokens of its model calls, if a provider reported any.
    pub token_usage: Option<ExecutionTokens>,
}

impl Batches {
    /// Ends an attempt: the item, its execution, and with the last item the batch, at once. Without an end of the execution
    /// the next attempt goes on with it; after the last attempt it fails with the item. False, and nothing happens, if the
    /// claim does not hold any more.
    pub async fn finalize(
        &self,
        claim: &Claim,
        end: ItemEnd,
        execution: Option<(ExecutionRow, ExecutionEnd)>,
    ) -> Result<bool, RecordsError> {
        let (this, claim) = (self.clone(), claim.clone());
        let finalized = self.db.write_rows(move |tx| {
            Box::pin(async move {
                let Some(batch) = tx.fetch_optional(this.lock(&claim.batch_id)).await? else {
                    return Ok(false);
                };
                let now = now(tx, this.time()).await?;
                let error = match &end.result {
                    ItemResult::Failed { error } => Some(error.clone()),
                    ItemResult::Succeeded { .. } => None,
                };
                let Some(is_last) = end_item(tx, &batch, &claim, end, &now).await? else { return Ok(false) };
                if let Some((row, end)) = execution {
                    let sql = query(
                        "UPDATE executions SET status = $3, error = $4, stop_reason = $5, usage_json = $6, \
                         completed_at = $7, delivered = TRUE WHERE execution_id = $1 AND attempt = $2",
                    );
                    let sql = sql.bind(&row.execution_id).bind(row.attempt).bind(end.status.as_str());
                    let sql = sql.bind(&end.error).bind(&end.stop_reason);
                    tx.execute(sql.bind(object_text(&usage_json(&end.usage))).bind(&now)).await?;
                } else if let Some(error) = error.filter(|_| is_last) {
                    fail_execution(tx, &claim.item_id, &error, &now).await?;
                }
                refresh(tx, batch, &now).await?;
                Ok(true)
            })
        });
        finalized.await
    }
}

/// Ends the execution of an item that has failed without it.
pub(super) async fn fail_execution(
    tx: &mut WriteTx<'_>,
    item_id: &str,
    error: &str,
    now: &str,
) -> Result<(), RecordsError> {
    let end = query(
        "UPDATE executions SET status = 'failed', error = $2, completed_at = $3, delivered = TRUE \
         WHERE execution_id = $1 AND NOT delivered",
    );
    tx.execute(end.bind(item_id).bind(error).bind(now)).await.map(drop)
}

/// Ends the attempt of the claim, if it holds. Returns whether no other attempt follows.
async fn end_item(
    tx: &mut WriteTx<'_>,
    batch: &BatchRow,
    claim: &Claim,
    end: ItemEnd,
    now: &str,
) -> Result<Option<bool>, RecordsError> {
    let usage = end.token_usage.map(|tokens| serde_json::json!(tokens).to_string());
    let (sql, is_last) = match &end.result {
        ItemResult::Succeeded { .. } => ("'succeeded'", true),
        ItemResult::Failed { .. } if claim.attempt >= batch.max_attempts => ("'failed'", true),
        ItemResult::Failed { .. } => ("'queued'", false),
    };
    let times = if is_last { "completed_at = $4" } else { "started_at = NULL" };
    let text = format!(
        "UPDATE subagent_batch_items SET status = {sql}, {times}, lease_owner = NULL, lease_expires_at = NULL, \
         updated_at = $4, model_name = $5, stop_reason = $6, token_usage = $7, error = $8, result = $9, \
         result_preview = $10, result_truncated = $11, acceptance_verdict = $12 WHERE id = $1 AND lease_owner = $2 \
         AND attempt = $3 AND status IN ('leased', 'running') AND lease_expires_at > $4"
    );
    let sql = crate::query::Sql { text: text.into(), values: Vec::new() };
    let sql = sql.bind(&claim.item_id).bind(&claim.owner).bind(claim.attempt).bind(now);
    let sql = sql.bind(&end.model_name).bind(&end.stop_reason).bind(usage);
    let sql = match end.result {
        ItemResult::Succeeded { result, preview, truncated, verdict } => {
            let verdict = verdict.map(|verdict| verdict.to_string());
            sql.bind(None::<String>).bind(result).bind(preview).bind(truncated).bind(verdict)
        }
        ItemResult::Failed { error } => {
            sql.bind(error).bind(None::<String>).bind(None::<String>).bind(false).bind(None::<String>)
        }
    };
    Ok((tx.execute(sql).await? > 0).then_some(is_last))
}

/// Ends a batch all of whose items have ended, however they did. A cancelled one stays cancelled. The batch is locked.
pub(super) async fn refresh(
    tx: &mut WriteTx<'_>,
    batch: BatchRow,
    now: &str,
) -> Result<BatchRow, RecordsError> {
    if batch.status.is_terminal() {
        return Ok(batch);
    }
    let unfinished =
        format!("SELECT id FROM subagent_batch_items WHERE batch_id = $1 AND status IN {NOT_ENDED} LIMIT 1");
    let unfinished = crate::query::Sql { text: unfinished.into(), values: Vec::new() };
    let unfinished: Option<(String,)> = tx.fetch_optional(unfinished.bind(&batch.id)).await?;
    if unfinished.is_some() {
        return Ok(batch);
    }
    let ended = query(
        "SELECT COALESCE(SUM(CASE WHEN status = 'failed' THEN 1 ELSE 0 END), 0), \
         COALESCE(SUM(CASE WHEN status = 'succeeded' THEN 1 ELSE 0 END), 0) \
         FROM subagent_batch_items WHERE batch_id = $1",
    );
    let (failed, succeeded): (i64, i64) = tx.fetch_optional(ended.bind(&batch.id)).await?.unwrap_or_default();
    let status = if failed > 0 && succeeded == 0 { BatchStatus::Failed } else { BatchStatus::Completed };
    let sql =
        query("UPDATE subagent_batches SET status = $2, completed_at = $3, updated_at = $3 WHERE id = $1");
    tx.execute(sql.bind(&batch.id).bind(status.as_str()).bind(now)).await?;
    let completed_at = super::parsed(now)?;
    Ok(BatchRow { status, completed_at: Some(completed_at), updated_at: completed_at, ..batch })
}

//! How an attempt at an item ends, and with the last item its batch.

use serde_json::Value as Json;

use super::lease::{push_held, push_holds};
use super::{Batches, Claim, Lock, NOT_ENDED, Now};
use crate::codec::object_text;
use crate::db::Db;
use crate::error::RecordsError;
use crate::executions::{ExecutionEnd, ExecutionRow, ExecutionTokens, usage_json};
use crate::query::{Builder, Sql};

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

/// An attempt that ends.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    /// The right to end it.
    pub claim: Claim,
    /// Its end.
    pub end: ItemEnd,
    /// Its execution with the end of that. Without one the next attempt goes on with the execution; after the last attempt
    /// it fails with the item.
    pub execution: Option<(ExecutionRow, ExecutionEnd)>,
}

impl Batches {
    /// Ends an attempt: the item, its execution, and with the last item the batch, at once. False, and nothing happens, if
    /// the claim does not hold any more.
    pub async fn finalize(
        &self,
        claim: &Claim,
        end: ItemEnd,
        execution: Option<(ExecutionRow, ExecutionEnd)>,
    ) -> Result<bool, RecordsError> {
        let ended = Ended { claim: claim.clone(), end, execution };
        let done = self.finalize_all(&claim.batch_id, vec![ended]).await?;
        Ok(done.first().is_some_and(|done| *done))
    }

    /// Ends attempts at items of one batch in one transaction, each as [`Self::finalize`] does.
    pub async fn finalize_all(&self, batch_id: &str, ended: Vec<Ended>) -> Result<Vec<bool>, RecordsError> {
        let (this, batch_id) = (self.clone(), batch_id.to_owned());
        let finalized = self.db.write_rows(move |tx| {
            Box::pin(async move {
                let now = this.now();
                tx.queue(this.locked(&batch_id, Lock::Exclusive))?;
                let (mut statements, mut items) = (Vec::new(), Vec::new());
                for Ended { claim, end, execution } in ended {
                    // Before the item, because then the claim holds no more.
                    if let Some((row, end)) = execution {
                        // Before the execution, whose earlier tokens it counts no more.
                        statements.push(this.count_used(&claim, &row, &end.usage, &now));
                        statements.push(this.end_execution(&claim, &row, &end, &now));
                    } else if let ItemResult::Failed { error } = &end.result {
                        statements.push(this.fail_execution(&claim, error, &now));
                    }
                    items.push(statements.len());
                    statements.push(this.end_item(&claim, end, &now));
                }
                statements.push(refreshed(&this.db, &batch_id, &now));
                let ran = tx.run_and_commit::<(String,)>(statements).await?;
                Ok(items.into_iter().map(|at| ran.get(at).is_some_and(|item| item.count > 0)).collect())
            })
        });
        finalized.await
    }

    fn end_execution(&self, claim: &Claim, row: &ExecutionRow, end: &ExecutionEnd, now: &Now) -> Sql {
        let mut sql = self.db.builder("UPDATE executions SET delivered = TRUE, counted = TRUE, status = ");
        sql.push_bind(end.status.as_str()).push(", error = ").push_bind(&end.error);
        sql.push(", stop_reason = ").push_bind(&end.stop_reason);
        sql.push(", usage_json = ").push_bind(object_text(&usage_json(&end.usage)));
        sql.push(", completed_at = ");
        now.push(&mut sql);
        sql.push(" WHERE execution_id = ").push_bind(&row.execution_id);
        sql.push(" AND attempt = ").push_bind(row.attempt).push(" AND ");
        push_holds(&mut sql, claim, now);
        sql.build()
    }

    /// Ends the execution of an item whose last attempt fails without it.
    fn fail_execution(&self, claim: &Claim, error: &str, now: &Now) -> Sql {
        let mut sql = self.db.builder("UPDATE executions SET delivered = TRUE, status = 'failed', error = ");
        sql.push_bind(error).push(", completed_at = ");
        now.push(&mut sql);
        sql.push(" WHERE NOT delivered AND execution_id = ").push_bind(&claim.item_id).push(" AND ");
        push_is_last(&mut sql, claim);
        sql.push(" AND ");
        push_holds(&mut sql, claim, now);
        sql.build()
    }

    /// Ends the attempt of the claim, if it holds.
    fn end_item(&self, claim: &Claim, end: ItemEnd, now: &Now) -> Sql {
        let usage = end.token_usage.map(|tokens| serde_json::json!(tokens).to_string());
        let mut sql =
            self.db.builder("UPDATE subagent_batch_items SET lease_owner = NULL, lease_expires_at = NULL");
        sql.push(", updated_at = ");
        now.push(&mut sql);
        sql.push(", model_name = ")
            .push_bind(end.model_name)
            .push(", stop_reason = ")
            .push_bind(end.stop_reason);
        sql.push(", token_usage = ").push_bind(usage);
        match end.result {
            ItemResult::Succeeded { result, preview, truncated, verdict } => {
                sql.push(", status = 'succeeded', error = NULL, result = ").push_bind(result);
                sql.push(", result_preview = ").push_bind(preview);
                sql.push(", result_truncated = ").push_bind(truncated);
                sql.push(", acceptance_verdict = ").push_bind(verdict.map(|verdict| verdict.to_string()));
                sql.push(", completed_at = ");
                now.push(&mut sql);
            }
            ItemResult::Failed { error } => {
                sql.push(", error = ").push_bind(error).push(", result = NULL, result_preview = NULL");
                sql.push(", result_truncated = FALSE, acceptance_verdict = NULL, status = CASE WHEN ");
                push_is_last(&mut sql, claim);
                sql.push(" THEN 'failed' ELSE 'queued' END, started_at = CASE WHEN ");
                push_is_last(&mut sql, claim);
                sql.push(" THEN started_at END, completed_at = CASE WHEN ");
                push_is_last(&mut sql, claim);
                sql.push(" THEN ");
                now.push(&mut sql);
                sql.push(" END");
            }
        }
        sql.push(" WHERE ");
        push_held(&mut sql, claim, now);
        sql.build()
    }
}

/// Whether no attempt follows that of the claim.
fn push_is_last(sql: &mut Builder, claim: &Claim) {
    sql.push_bind(claim.attempt).push(" >= (SELECT b.max_attempts FROM subagent_batches b WHERE b.id = ");
    sql.push_bind(&claim.batch_id).push(")");
}

/// Ends a batch all of whose items have ended, however they did. A cancelled one stays cancelled. The batch is locked.
pub(super) fn refreshed(db: &Db, batch_id: &str, now: &Now) -> Sql {
    let one = |sql: &mut Builder, condition: &str| {
        sql.push("EXISTS (SELECT 1 FROM subagent_batch_items WHERE batch_id = ").push_bind(batch_id);
        sql.push(" AND status ").push(condition).push(")");
    };
    let mut sql = db.builder("UPDATE subagent_batches SET status = CASE WHEN ");
    one(&mut sql, "= 'failed'");
    sql.push(" AND NOT ");
    one(&mut sql, "= 'succeeded'");
    sql.push(" THEN 'failed' ELSE 'completed' END, completed_at = ");
    now.push(&mut sql);
    sql.push(", updated_at = ");
    now.push(&mut sql);
    sql.push(" WHERE id = ")
        .push_bind(batch_id)
        .push(" AND status IN ('queued', 'running', 'paused') AND NOT ");
    one(&mut sql, &format!("IN {NOT_ENDED}"));
    sql.build()
}

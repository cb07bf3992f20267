//! The tokens of a batch: a sum in its row, which changes with the executions of its items.
//!
//! A change of what an execution has used is made under the lock of the batch, so that it is in the sum once. An execution
//! is counted when it has ended and the sum contains all that it used. One that somebody else ended, because its process
//! died or its batch was cancelled, is not: what it used is in its checkpoints, which these rows do not know.

use std::collections::BTreeMap;

use chrono::TimeDelta;

use super::lease::push_holds;
use super::{Batches, BudgetTokens, Claim, Lock, Now};
use crate::codec::{Cells, object_text, page_offset};
use crate::error::RecordsError;
use crate::execution_rows::sum;
use crate::executions::{ExecutionRow, ExecutionTokens, SUMMARY, usage_json};
use crate::failure::DatabaseError;
use crate::postgres::push_json;
use crate::query::{Builder, Dialect, FromRow, Row, Sql};

/// How many executions one call of [`Batches::uncounted`] returns.
const MOST: i64 = 500;

/// What an attempt at work has used by now.
#[derive(Clone, Debug, PartialEq)]
pub struct UsedSoFar {
    /// The right to work on it.
    pub claim: Claim,
    /// Its execution.
    pub row: ExecutionRow,
    /// All its tokens, by model.
    pub usage: BTreeMap<String, ExecutionTokens>,
}

/// An attempt that has ended, and whose tokens are not all in the sum of its batch.
#[derive(Clone, Debug, PartialEq)]
pub struct UncountedItem {
    /// The batch.
    pub batch_id: String,
    /// Its execution, without the definition.
    pub row: ExecutionRow,
}

impl FromRow for UncountedItem {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let batch_id = Cells::new(row, "executions", &["execution_id", "attempt"]).text("batch_id")?;
        Ok(Self { batch_id, row: ExecutionRow::from_row(row)? })
    }
}

/// A row by itself: one that is damaged takes no other with it.
struct Found(Result<UncountedItem, DatabaseError>);

impl FromRow for Found {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        Ok(Self(UncountedItem::from_row(row)))
    }
}

impl Batches {
    /// Stores what attempts at items of a batch have used by now, and returns what is used of the limit that binds the batch,
    /// by all batches that share it and by their run. An attempt whose claim does not hold any more changes nothing.
    /// Without any it only reads.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`], [`RecordsError::Corrupt`].
    pub async fn used_so_far(
        &self,
        batch_id: &str,
        used: Vec<UsedSoFar>,
    ) -> Result<BudgetTokens, RecordsError> {
        if used.is_empty() {
            return Ok(self.db.fetch_optional(self.budget_of(batch_id)).await?.unwrap_or_default());
        }
        let (this, batch_id) = (self.clone(), batch_id.to_owned());
        let db = self.db.unflushed();
        let stored = db.write_rows(move |tx| {
            Box::pin(async move {
                let now = this.now();
                tx.queue(this.locked(&batch_id, Lock::Exclusive))?;
                let mut statements = Vec::with_capacity(2 * used.len() + 1);
                for UsedSoFar { claim, row, usage } in &used {
                    // Before the execution, whose earlier tokens it counts no more.
                    statements.push(this.count_used(claim, row, usage, &now));
                    statements.push(this.store_used(claim, row, usage, &now));
                }
                statements.push(this.budget_of(&batch_id));
                let ran = tx.run_and_commit::<BudgetTokens>(statements).await?;
                Ok(ran
                    .into_iter()
                    .next_back()
                    .and_then(|ran| ran.rows.into_iter().next())
                    .unwrap_or_default())
            })
        });
        stored.await
    }

    /// The attempts that have ended this long ago and are not counted, in the order in which they ended, without the
    /// first `skipped`: at most 500, each or why its row cannot be read.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`].
    pub async fn uncounted(
        &self,
        after: TimeDelta,
        skipped: u64,
    ) -> Result<Vec<Result<UncountedItem, RecordsError>>, RecordsError> {
        let mut sql = self.db.builder("SELECT ");
        sql.push(SUMMARY).push(
            ", (SELECT i.batch_id FROM subagent_batch_items AS i WHERE i.id = e.execution_id) AS batch_id \
             FROM executions AS e WHERE kind = 'batch_item' AND NOT counted \
             AND status NOT IN ('pending', 'running') \
             AND EXISTS (SELECT 1 FROM subagent_batch_items AS i WHERE i.id = e.execution_id) AND completed_at <= ",
        );
        self.now().push_after(&mut sql, -after);
        sql.push(" ORDER BY completed_at, execution_id, attempt LIMIT ").push_bind(MOST);
        sql.push(" OFFSET ").push_bind(page_offset(skipped));
        let found: Vec<Found> = self.db.fetch_all(sql.build()).await?;
        Ok(found.into_iter().map(|Found(item)| item.map_err(RecordsError::from)).collect())
    }

    /// Counts an attempt that has ended, with all that it used. Nothing happens if it is counted, or has not ended.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`].
    pub async fn used(
        &self,
        batch_id: &str,
        row: &ExecutionRow,
        usage: &BTreeMap<String, ExecutionTokens>,
    ) -> Result<(), RecordsError> {
        let uncounted = |sql: &mut Builder| {
            sql.push("execution_id = ").push_bind(&row.execution_id);
            sql.push(" AND attempt = ").push_bind(row.attempt);
            sql.push(" AND NOT counted AND status NOT IN ('pending', 'running')");
        };
        let mut add = self.counting(batch_id, row, usage);
        add.push(" AND EXISTS (SELECT 1 FROM executions WHERE ");
        uncounted(&mut add);
        add.push(")");
        let mut store = self.db.builder("UPDATE executions SET counted = TRUE, usage_json = ");
        store.push_bind(object_text(&usage_json(usage))).push(" WHERE ");
        uncounted(&mut store);
        let lock = self.locked(batch_id, Lock::Exclusive);
        let statements = vec![add.build(), store.build()];
        let db = self.db.unflushed();
        let stored = db.write_rows(move |tx| {
            Box::pin(async move {
                tx.queue(lock)?;
                tx.run_and_commit::<(String,)>(statements).await.map(drop)
            })
        });
        stored.await
    }

    /// Puts these tokens of an execution in the place of those that it had, if the claim holds. The batch is locked.
    pub(super) fn count_used(
        &self,
        claim: &Claim,
        row: &ExecutionRow,
        usage: &BTreeMap<String, ExecutionTokens>,
        now: &Now,
    ) -> Sql {
        let mut sql = self.counting(&claim.batch_id, row, usage);
        sql.push(" AND ");
        push_holds(&mut sql, claim, now);
        sql.build()
    }

    fn store_used(
        &self,
        claim: &Claim,
        row: &ExecutionRow,
        usage: &BTreeMap<String, ExecutionTokens>,
        now: &Now,
    ) -> Sql {
        let mut sql = self.db.builder("UPDATE executions SET usage_json = ");
        sql.push_bind(object_text(&usage_json(usage)));
        sql.push(" WHERE execution_id = ").push_bind(&row.execution_id);
        sql.push(" AND attempt = ").push_bind(row.attempt).push(" AND ");
        push_holds(&mut sql, claim, now);
        sql.build()
    }

    /// Reads the tokens of a batch.
    pub(super) fn sum_of(&self, batch_id: &str) -> Sql {
        let sql = "SELECT id, input_tokens, output_tokens, total_tokens FROM subagent_batches WHERE id = ";
        self.db.builder(sql).with_bind(batch_id).build()
    }

    fn counting(
        &self,
        batch_id: &str,
        row: &ExecutionRow,
        usage: &BTreeMap<String, ExecutionTokens>,
    ) -> Builder {
        let new = sum(usage);
        let columns = [
            ("input_tokens", new.input_tokens),
            ("output_tokens", new.output_tokens),
            ("total_tokens", new.total_tokens),
        ];
        let mut sql = self.db.builder("UPDATE subagent_batches SET ");
        for (index, (column, tokens)) in columns.into_iter().enumerate() {
            sql.push(if index == 0 { "" } else { ", " }).push(column).push(" = ").push(column);
            sql.push(" + ").push_bind(i64::try_from(tokens).unwrap_or(i64::MAX)).push(" - ");
            self.push_used(&mut sql, row, column);
        }
        sql.push(" WHERE id = ").push_bind(batch_id);
        sql
    }

    /// Appends how many tokens of this kind are stored for an execution.
    fn push_used(&self, sql: &mut Builder, row: &ExecutionRow, column: &str) {
        match self.db.dialect() {
            Dialect::Sqlite => {
                sql.push("(SELECT COALESCE(SUM(json_extract(of_model.value, '$.").push(column);
                sql.push("')), 0) FROM executions AS e JOIN json_each(e.usage_json) AS of_model");
            }
            Dialect::Postgres => {
                sql.push("(SELECT COALESCE(SUM((of_model.value ->> '").push(column);
                sql.push("')::BIGINT), 0)::BIGINT FROM executions AS e CROSS JOIN LATERAL json_each(");
                push_json(sql, "e.usage_json");
                sql.push(") AS of_model");
            }
        }
        sql.push(" WHERE e.execution_id = ").push_bind(&row.execution_id);
        sql.push(" AND e.attempt = ").push_bind(row.attempt).push(")");
    }
}

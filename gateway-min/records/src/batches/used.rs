//! The tokens of a batch: a sum in its row, which changes with the executions of its items.
//!
//! A change of what an execution has used is made under the lock of the batch, so that it is in the sum once.

use std::collections::BTreeMap;

use super::lease::push_holds;
use super::{Batches, Claim, Lock, Now};
use crate::codec::object_text;
use crate::error::RecordsError;
use crate::executions::{ExecutionRow, ExecutionTokens, sum, usage_json};
use crate::query::{Builder, Dialect, Sql};

impl Batches {
    /// Stores the tokens of an attempt that was ended, without them, by somebody else.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`].
    pub async fn used(
        &self,
        batch_id: &str,
        row: &ExecutionRow,
        usage: &BTreeMap<String, ExecutionTokens>,
    ) -> Result<(), RecordsError> {
        let unknown = |sql: &mut Builder| {
            sql.push("execution_id = ").push_bind(&row.execution_id);
            sql.push(" AND attempt = ").push_bind(row.attempt).push(" AND usage_json = '{}'");
        };
        let mut add = self.counting(batch_id, row, usage);
        add.push(" AND EXISTS (SELECT 1 FROM executions WHERE ");
        unknown(&mut add);
        add.push(")");
        let mut store = self.db.builder("UPDATE executions SET usage_json = ");
        store.push_bind(object_text(&usage_json(usage))).push(" WHERE ");
        unknown(&mut store);
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
                sql.push("')::BIGINT), 0)::BIGINT FROM executions AS e CROSS JOIN LATERAL ");
                sql.push("json_each(replace(e.usage_json, '\\u0000', '\\ufffd')::json) AS of_model");
            }
        }
        sql.push(" WHERE e.execution_id = ").push_bind(&row.execution_id);
        sql.push(" AND e.attempt = ").push_bind(row.attempt).push(")");
    }
}

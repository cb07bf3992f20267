//! Reading batches.

use std::collections::BTreeMap;

use super::rows::{ITEM_COLUMNS, WithResult};
use super::{BatchItemRow, BatchItemStatus, BatchRow, Batches, ItemCounts};
use crate::codec::{Cells, page_offset};
use crate::db::Db;
use crate::error::RecordsError;
use crate::executions::ExecutionTokens;
use crate::failure::DatabaseError;
use crate::query::{Builder, FromRow, Row, Sql, query};

/// The bytes of results that one read returns, unless the first one is longer.
pub(crate) const RESULT_BYTES: i64 = 4 << 20;

/// How many items of a batch have a status.
pub(super) struct Counted {
    batch_id: String,
    status: BatchItemStatus,
    number: i64,
}

impl FromRow for Counted {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let cells = Cells::new(row, "subagent_batch_items", &["batch_id"]);
        Ok(Self {
            batch_id: cells.text("batch_id")?,
            status: cells.name("status")?,
            number: cells.int("number")?,
        })
    }
}

/// Counts the items of batches by status.
pub(super) fn counts(db: &Db, batch_ids: &[String]) -> Sql {
    let mut sql = db.builder("SELECT batch_id, status, COUNT(*) AS number FROM subagent_batch_items WHERE ");
    sql.push_text_in("batch_id", batch_ids).push(" GROUP BY batch_id, status");
    sql.build()
}

/// The rows of [`counts`] by batch.
pub(super) fn counted(rows: Vec<Counted>) -> BTreeMap<String, ItemCounts> {
    let mut all = BTreeMap::<String, ItemCounts>::new();
    for row in rows {
        let number = u64::try_from(row.number).unwrap_or_default();
        all.entry(row.batch_id).or_default().0.insert(row.status.as_str(), number);
    }
    all
}

struct Usage(BTreeMap<String, ExecutionTokens>);

impl FromRow for Usage {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        Cells::new(row, "executions", &["execution_id", "attempt"]).json("usage_json").map(Self)
    }
}

impl FromRow for ExecutionTokens {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let cells = Cells::new(row, "subagent_batches", &["id"]);
        let tokens = |column| Ok::<_, DatabaseError>(u64::try_from(cells.int(column)?).unwrap_or_default());
        Ok(Self {
            input_tokens: tokens("input_tokens")?,
            output_tokens: tokens("output_tokens")?,
            total_tokens: tokens("total_tokens")?,
        })
    }
}

impl Batches {
    /// A batch.
    pub async fn get(&self, batch_id: &str) -> Result<Option<BatchRow>, RecordsError> {
        self.db.fetch_optional(query("SELECT * FROM subagent_batches WHERE id = $1").bind(batch_id)).await
    }

    /// The batch of a thread with this submission key.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`], [`RecordsError::Corrupt`].
    pub async fn submitted(
        &self,
        thread_id: &str,
        submission_key: &str,
    ) -> Result<Option<BatchRow>, RecordsError> {
        let sql = query("SELECT * FROM subagent_batches WHERE thread_id = $1 AND submission_key = $2");
        self.db.fetch_optional(sql.bind(thread_id).bind(submission_key)).await
    }

    /// The newest batches of a thread, newest first.
    pub async fn of_thread(&self, thread_id: &str, limit: u32) -> Result<Vec<BatchRow>, RecordsError> {
        let sql =
            "SELECT * FROM subagent_batches WHERE thread_id = $1 ORDER BY created_at DESC, id DESC LIMIT $2";
        self.db.fetch_all(query(sql).bind(thread_id).bind(i64::from(limit))).await
    }

    /// The items of these batches by status. A batch without items is not in it.
    pub async fn counts(&self, batch_ids: &[String]) -> Result<BTreeMap<String, ItemCounts>, RecordsError> {
        Ok(counted(self.db.fetch_all(counts(&self.db, batch_ids)).await?))
    }

    /// How many batches have each status, those that have ended excluded, and how many items of them have each.
    pub async fn live_counts(&self) -> Result<(BTreeMap<String, u64>, ItemCounts), RecordsError> {
        let sql = "SELECT status, COUNT(*) FROM subagent_batches WHERE status IN ('queued', 'running', 'paused') \
                   GROUP BY status";
        let batches: Vec<(String, i64)> = self.db.fetch_all(query(sql)).await?;
        let batches =
            batches.into_iter().map(|(status, number)| (status, u64::try_from(number).unwrap_or_default()));
        let sql = "SELECT '' AS batch_id, status, COUNT(*) AS number FROM subagent_batch_items WHERE batch_id IN \
                   (SELECT id FROM subagent_batches WHERE status IN ('queued', 'running', 'paused')) GROUP BY status";
        let items = counted(self.db.fetch_all(query(sql)).await?).remove("").unwrap_or_default();
        Ok((batches.collect(), items))
    }

    /// The tokens of all that was done for a batch by now, in its one row: none if there is no such batch.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`], [`RecordsError::Corrupt`].
    pub async fn tokens(&self, batch_id: &str) -> Result<ExecutionTokens, RecordsError> {
        Ok(self.db.fetch_optional(self.sum_of(batch_id)).await?.unwrap_or_default())
    }

    /// The tokens by model of all that was done for the batches of a thread.
    pub async fn usage(&self, thread_id: &str) -> Result<BTreeMap<String, ExecutionTokens>, RecordsError> {
        let sql = "SELECT execution_id, attempt, usage_json FROM executions \
                   WHERE kind = 'batch_item' AND usage_json <> '{}' AND thread_id = $1";
        let mut sum = BTreeMap::<String, ExecutionTokens>::new();
        for Usage(usage) in self.db.fetch_all(query(sql).bind(thread_id)).await? {
            for (model, tokens) in usage {
                *sum.entry(model).or_default() += tokens;
            }
        }
        Ok(sum)
    }

    /// Items of a batch by position, from the `offset`-th on: all, or those with this status.
    pub async fn items(
        &self,
        batch_id: &str,
        status: Option<BatchItemStatus>,
        offset: u64,
        limit: u32,
    ) -> Result<Vec<BatchItemRow>, RecordsError> {
        let mut sql = self.selected(batch_id, status);
        sql.push(" ORDER BY position LIMIT ").push_bind(i64::from(limit));
        sql.push(" OFFSET ").push_bind(page_offset(offset));
        self.db.fetch_all(sql.build()).await
    }

    /// The same by position after `after`; `None` begins. An item whose status changes between two pages moves no other one to
    /// another page.
    pub async fn items_after(
        &self,
        batch_id: &str,
        status: Option<BatchItemStatus>,
        after: Option<i64>,
        limit: u32,
    ) -> Result<Vec<BatchItemRow>, RecordsError> {
        let mut sql = self.selected(batch_id, status);
        sql.push(" AND position > ").push_bind(after.unwrap_or(-1));
        sql.push(" ORDER BY position LIMIT ").push_bind(i64::from(limit));
        self.db.fetch_all(sql.build()).await
    }

    fn selected(&self, batch_id: &str, status: Option<BatchItemStatus>) -> Builder {
        let mut sql =
            self.db.builder(&format!("SELECT {ITEM_COLUMNS} FROM subagent_batch_items WHERE batch_id = "));
        sql.push_bind(batch_id);
        if let Some(status) = status {
            sql.push(" AND status = ").push_bind(status.as_str());
        }
        sql
    }

    /// Items of a batch with their results, by position after `after`; `None` begins. At most `limit`, and no more than 4 MiB of
    /// results unless the first is longer: one may be as long as a model's answer.
    pub async fn results(
        &self,
        batch_id: &str,
        after: Option<i64>,
        limit: u32,
    ) -> Result<Vec<(BatchItemRow, Option<String>)>, RecordsError> {
        let after = after.unwrap_or(-1);
        let sizes = query(
            "SELECT position, COALESCE(CAST(octet_length(result) AS BIGINT), 0) AS bytes FROM subagent_batch_items \
             WHERE batch_id = $1 AND position > $2 ORDER BY position LIMIT $3",
        );
        let sizes = sizes.bind(batch_id).bind(after).bind(i64::from(limit));
        let sizes: Vec<(i64, i64)> = self.db.fetch_all(sizes).await?;
        let (mut last, mut sum) = (after, 0);
        for (position, bytes) in sizes {
            sum += bytes;
            if last > after && sum > RESULT_BYTES {
                break;
            }
            last = position;
        }
        let sql = format!(
            "SELECT {ITEM_COLUMNS}, result FROM subagent_batch_items WHERE batch_id = $1 AND position > $2 \
             AND position <= $3 ORDER BY position"
        );
        let sql = Sql { text: sql.into(), values: Vec::new() };
        let rows: Vec<WithResult> = self.db.fetch_all(sql.bind(batch_id).bind(after).bind(last)).await?;
        Ok(rows.into_iter().map(|WithResult(item, result)| (item, result)).collect())
    }
}

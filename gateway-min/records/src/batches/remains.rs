//! What may be left of the items of a deleted thread.
//!
//! A worker writes an item's checkpoints to another store than its row, so one that has just launched an item may write the
//! first of them after the thread was deleted. It removes that itself when it notices; if it dies before it does, another
//! worker removes it.

use chrono::TimeDelta;

use super::{Batches, LEASE_EXPIRED_LAST};
use crate::error::RecordsError;
use crate::query::{Sql, query};

/// How many threads one call returns.
const MOST: i64 = 500;

impl Batches {
    /// The statement that notes the items of a thread that may be at work; its executions are deleted next.
    pub(crate) fn note_remains(&self, thread_id: &str) -> Sql {
        let mut sql = self
            .db
            .builder("INSERT INTO subagent_batch_remains (child_thread, deleted_at) SELECT child_thread, ");
        self.now().push(&mut sql);
        sql.push(" FROM executions WHERE kind = 'batch_item' AND thread_id = ").push_bind(thread_id);
        sql.push(" AND (status IN ('pending', 'running', 'cancelled') OR error = ")
            .push_bind(LEASE_EXPIRED_LAST);
        sql.push(") ON CONFLICT DO NOTHING");
        sql.build()
    }

    /// The threads of items that were deleted this long ago, while they may have been at work.
    pub async fn remains(&self, after: TimeDelta) -> Result<Vec<String>, RecordsError> {
        let mut sql = self.db.builder("SELECT child_thread FROM subagent_batch_remains WHERE deleted_at <= ");
        self.now().push_after(&mut sql, -after);
        sql.push(" ORDER BY deleted_at LIMIT ").push_bind(MOST);
        let threads: Vec<(String,)> = self.db.fetch_all(sql.build()).await?;
        Ok(threads.into_iter().map(|(thread,)| thread).collect())
    }

    /// Nothing is left of a thread of [`Self::remains`].
    pub async fn forget_remains(&self, child_thread: &str) -> Result<(), RecordsError> {
        let sql = query("DELETE FROM subagent_batch_remains WHERE child_thread = $1").bind(child_thread);
        let db = self.db.unflushed();
        db.write_rows(move |tx| Box::pin(async move { tx.execute(sql).await.map(drop) })).await
    }
}

//! The stream of runs that other processes follow: the last frames of each, in batches.
//!
//! Frames of a run are written only after another process has requested them ([`Runs::follow`]). The process that owns
//! the run sees the request where it polls for cancellations ([`Runs::noticed`]); of a run that has ended, as long as
//! it keeps the frames ([`Runs::followed`]).

use chrono::TimeDelta;
use serde_json::Value;

use super::Runs;
use crate::codec::{Cells, time_text};
use crate::error::RecordsError;
use crate::failure::DatabaseError;
use crate::query::{FromRow, Row, query};

/// How long frames of ended runs are kept if their own process does not remove them.
const LEFT_BEHIND: TimeDelta = TimeDelta::minutes(10);

/// Consecutive frames of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct FrameBatch {
    /// The number of the first one.
    pub first_seq: u64,
    /// The number after the last one.
    pub next_seq: u64,
    /// The frames, in the owning process's format.
    pub frames: Vec<Value>,
    /// Whether no more frames follow.
    pub ends: bool,
}

impl FromRow for FrameBatch {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let cells = Cells::new(row, "run_frames", &["run_id", "first_seq"]);
        Ok(Self {
            first_seq: cells.int("first_seq")?.unsigned_abs(),
            next_seq: cells.int("next_seq")?.unsigned_abs(),
            frames: cells.json("frames")?,
            ends: cells.flag("ends")?,
        })
    }
}

impl Runs {
    /// Requests the frames of a run from the process that owns it, or owned it when it ended and still keeps them.
    pub async fn follow(&self, run_id: &str) -> Result<(), RecordsError> {
        let sql = "UPDATE runs SET followed = TRUE WHERE run_id = $1 AND NOT followed";
        let (sql, id) = (query(sql).bind(run_id), run_id.to_owned());
        let followed = self.db.write_of_run(run_id, move |tx| {
            Box::pin(async move {
                if tx.execute(sql).await? > 0 {
                    tx.announce(&id);
                }
                Ok(())
            })
        });
        followed.await
    }

    /// Those of these runs that belonged to this process until they ended and that another process follows: the id of each,
    /// and that of its thread.
    pub async fn followed(&self, run_ids: &[String]) -> Result<Vec<(String, String)>, RecordsError> {
        let Some(owner) = self.owner().filter(|_| !run_ids.is_empty()) else { return Ok(Vec::new()) };
        let mut sql = self.db.builder("SELECT run_id, thread_id FROM runs WHERE followed AND ");
        sql.push_text_in("run_id", run_ids).push(" AND owner_worker_id = ").push_bind(owner);
        self.db.fetch_all(sql.build()).await
    }

    /// Stores frames of a run whose row exists, and removes those before `keep_from`. Storing the same batch again
    /// changes nothing.
    pub async fn append_frames(
        &self,
        thread_id: &str,
        run_id: &str,
        batch: &FrameBatch,
        keep_from: u64,
    ) -> Result<(), RecordsError> {
        let seq = |seq: u64| i64::try_from(seq).unwrap_or(i64::MAX);
        let sql = "INSERT INTO run_frames (run_id, thread_id, first_seq, next_seq, frames, ends, created_at) \
                   SELECT run_id, thread_id, $2, $3, $4, $5, $6 FROM runs WHERE run_id = $1 ON CONFLICT DO NOTHING";
        let insert = query(sql)
            .bind(run_id)
            .bind(seq(batch.first_seq))
            .bind(seq(batch.next_seq))
            .bind(Value::from(batch.frames.clone()).to_string())
            .bind(batch.ends)
            .bind(time_text(self.db.clock.now()));
        let old = query("DELETE FROM run_frames WHERE run_id = $1 AND next_seq <= $2 AND NOT ends");
        let (remove, id) = (old.bind(run_id).bind(seq(keep_from)), run_id.to_owned());
        let appended = self.db.write(thread_id, move |tx| {
            Box::pin(async move {
                tx.queue(insert)?;
                tx.queue(remove)?;
                tx.announce(&id);
                Ok(())
            })
        });
        appended.await
    }

    /// The frames of a run from this number on, oldest first: at most `batches` batches, the first of which may start
    /// before it.
    pub async fn frames(
        &self,
        run_id: &str,
        from: u64,
        batches: u32,
    ) -> Result<Vec<FrameBatch>, RecordsError> {
        let mut sql = self.db.builder("SELECT * FROM run_frames WHERE run_id = ");
        sql.push_bind(run_id).push(" AND (ends OR next_seq > ");
        sql.push_bind(i64::try_from(from).unwrap_or(i64::MAX)).push(") ORDER BY next_seq, first_seq LIMIT ");
        sql.push_bind(i64::from(batches));
        self.db.fetch_all(sql.build()).await
    }

    /// Removes the frames of a run that has ended, and abandoned frames of other runs.
    pub async fn forget_frames(&self, thread_id: &str, run_id: &str) -> Result<(), RecordsError> {
        let sql = "DELETE FROM run_frames WHERE run_id = $1 OR (created_at < $2 AND NOT EXISTS (SELECT 1 FROM runs \
                   WHERE runs.run_id = run_frames.run_id AND runs.status IN ('pending', 'running')))";
        let left_behind = time_text(self.db.clock.now() - LEFT_BEHIND);
        let sql = query(sql).bind(run_id).bind(left_behind);
        self.db.write(thread_id, move |tx| Box::pin(tx.execute(sql))).await.map(drop)
    }
}

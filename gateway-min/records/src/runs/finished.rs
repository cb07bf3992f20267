//! What a run notes for the process that ends it, which may be another one.
//!
//! - What had finished before the run went on with it: rows of the checkpoint that the run may add rows of its own to. A
//!   rollback restores the first and drops the others, also in a process that did not see the run begin.
//! - What the store lost of what it had acknowledged. A saver says so once, so no other process, and no later attempt,
//!   finds it again.

use super::Runs;
use crate::codec::Cells;
use crate::error::RecordsError;
use crate::failure::DatabaseError;
use crate::query::{FromRow, Row, query};

/// The column.
struct Finished(Option<Vec<String>>);

impl FromRow for Finished {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        Ok(Self(Cells::new(row, "runs", &["run_id"]).opt_json("finished_before")?))
    }
}

impl Runs {
    /// Notes which tasks had finished at the head from which the run goes on, before the run adds any. Only the run's owner
    /// does: who has taken it over reads this.
    ///
    /// # Errors
    /// [`RecordsError::NotFound`] if the run is not running, or another process's.
    pub async fn note_finished_before(&self, run_id: &str, tasks: &[String]) -> Result<(), RecordsError> {
        let sql = query(
            "UPDATE runs SET finished_before = $2 WHERE run_id = $1 AND operation_kind = 'run' AND status = 'running' \
             AND owner_worker_id IS NOT DISTINCT FROM $3 RETURNING run_id",
        );
        let sql = sql.bind(run_id).bind(serde_json::json!(tasks).to_string()).bind(self.owner());
        let noted = self.db.write_of_run(run_id, move |tx| {
            Box::pin(async move { tx.fetch_and_commit::<(String,)>(sql).await })
        });
        match noted.await? {
            Some(_) => Ok(()),
            None => Err(RecordsError::run_not_found(run_id)),
        }
    }

    /// Notes what the run, or its rollback, found lost of what its store had acknowledged. The run then ends in this
    /// error, whichever process ends it, and whatever else comes of it. The first note stays. Any process may have found
    /// it, also one that the run was taken over from; `false`, without a change, if the run has ended.
    pub async fn note_history_lost(&self, run_id: &str, lost: &str) -> Result<bool, RecordsError> {
        let sql = query(
            "UPDATE runs SET history_lost = COALESCE(history_lost, $2) WHERE run_id = $1 AND operation_kind = 'run' \
             AND status IN ('pending', 'running') RETURNING run_id",
        );
        let sql = sql.bind(run_id).bind(lost);
        let noted = self.db.write_of_run(run_id, move |tx| {
            Box::pin(async move { tx.fetch_and_commit::<(String,)>(sql).await })
        });
        Ok(noted.await?.is_some())
    }

    /// What [`Self::note_finished_before`] noted; `None` if the run did not go on from a head with anything left to run.
    ///
    /// # Errors
    /// [`RecordsError::Corrupt`] for what is no list.
    pub async fn finished_before(&self, run_id: &str) -> Result<Option<Vec<String>>, RecordsError> {
        let sql = query("SELECT run_id, finished_before FROM runs WHERE run_id = $1").bind(run_id);
        let found: Option<Finished> = self.db.fetch_optional(sql).await?;
        Ok(found.and_then(|found| found.0))
    }
}

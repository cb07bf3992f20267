//! What had finished before a run went on with it: rows of the checkpoint that the run may add rows of its own to. A rollback
//! restores the first and drops the others, also in a process that did not see the run begin.

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

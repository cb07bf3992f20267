//! What a start does about operations whose process is gone.

use chrono::{DateTime, TimeDelta, Utc};

use super::lifecycle::promote_waiting;
use super::{RunRow, Runs};
use crate::store::codec::time_text;
use crate::store::error::StoreError;

/// The error text of a run whose process ended before it did.
pub const RECOVERY_ERROR: &str = "Gateway restarted before this run reached a durable final state.";

/// The stop reason of such a run.
pub const RECOVERY_STOP_REASON: &str = "orphan_recovered";

/// What [`Runs::recover_orphans`] found and repaired.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recovered {
    /// The runs that are `error` now, as they are now.
    pub runs: Vec<RunRow>,
    /// The threads that dead writers had reserved and that are free now.
    pub released: Vec<String>,
    /// The runs that waited for what is over and hold their thread now; their workers are alive.
    pub promoted: Vec<String>,
}

impl Runs {
    /// Ends every active operation that no live worker can be working on: one without a lease, or
    /// with a lease that ended more than `grace` before `now`. Call it once at start, before the first
    /// admission.
    ///
    /// * Runs become `error` with [`RECOVERY_ERROR`] and [`RECOVERY_STOP_REASON`], waiting ones too.
    /// * Reservations are removed. They have no leases, so a process that starts beside others frees
    ///   the threads that those have reserved: one process a database.
    /// * Threads whose last run is among those runs get the status `error`. Any other thread that is
    ///   `running` though nothing holds it gets the status that its last run left.
    pub async fn recover_orphans(
        &self,
        now: DateTime<Utc>,
        grace: TimeDelta,
    ) -> Result<Recovered, StoreError> {
        let dead_before = time_text(now - grace);
        let now = time_text(now);
        let mut tx = self.db.write().await?;
        let released: Vec<(String,)> = tx
            .fetch_all(
                sqlx::query(
                    "DELETE FROM runs WHERE operation_kind <> 'run' \
                     AND (lease_expires_at IS NULL OR lease_expires_at < $1) RETURNING thread_id",
                )
                .bind(&dead_before),
            )
            .await?;
        let runs: Vec<RunRow> = tx
            .fetch_all(
                sqlx::query(
                    "UPDATE runs SET status = 'error', error = $3, stop_reason = $4, waiting = FALSE, updated_at = $2 \
                     WHERE operation_kind = 'run' AND status IN ('pending', 'running') \
                     AND (lease_expires_at IS NULL OR lease_expires_at < $1) RETURNING *",
                )
                .bind(&dead_before)
                .bind(&now)
                .bind(RECOVERY_ERROR)
                .bind(RECOVERY_STOP_REASON),
            )
            .await?;

        let mut promoted = Vec::new();
        for (thread_id,) in &released {
            promoted.extend(promote_waiting(&mut tx, thread_id, &now).await?);
        }
        for run in &runs {
            promoted.extend(promote_waiting(&mut tx, &run.thread_id, &now).await?);
            tx.execute(
                sqlx::query(
                    "UPDATE threads_meta SET status = 'error', updated_at = $3 WHERE thread_id = $1 AND $2 = \
                     (SELECT run_id FROM runs WHERE thread_id = $1 AND operation_kind = 'run' \
                     ORDER BY admission_seq DESC LIMIT 1)",
                )
                .bind(&run.thread_id)
                .bind(&run.run_id)
                .bind(&now),
            )
            .await?;
        }
        // A run row is final before its thread's status is: a process may have ended in between.
        tx.execute(
            sqlx::query(
                "UPDATE threads_meta SET updated_at = $1, status = COALESCE((SELECT CASE runs.status \
                 WHEN 'success' THEN 'idle' WHEN 'interrupted' THEN 'interrupted' ELSE 'error' END \
                 FROM runs WHERE runs.thread_id = threads_meta.thread_id AND operation_kind = 'run' \
                 ORDER BY admission_seq DESC LIMIT 1), 'idle') \
                 WHERE status = 'running' AND NOT EXISTS (SELECT 1 FROM runs \
                 WHERE runs.thread_id = threads_meta.thread_id AND runs.status IN ('pending', 'running'))",
            )
            .bind(&now),
        )
        .await?;
        tx.commit().await?;
        Ok(Recovered {
            runs,
            released: released.into_iter().map(|(thread_id,)| thread_id).collect(),
            promoted,
        })
    }
}

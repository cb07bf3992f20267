//! Ends operations whose process is gone: at start, and while others run.

use chrono::{DateTime, TimeDelta, Utc};
use tokio::time::Instant;

use super::lifecycle::promote_waiting;
use super::seen::MARK;
use super::{RunRow, Runs, SeenLeases, owes_restore, run_columns};
use crate::codec::time_text;
use crate::error::RecordsError;
use crate::query::{Builder, Sql, query};
use crate::threads::{AHEAD, ThreadStatus, touched};

/// The error of a run whose process ended before it did.
pub const RECOVERY_ERROR: &str = "Gateway restarted before this run reached a durable final state.";

/// The error of a run whose process has not renewed its lease.
pub const LEASE_EXPIRED_ERROR: &str = "Run lease expired \u{2014} owning worker is unreachable.";

/// The stop reason of both.
pub const RECOVERY_STOP_REASON: &str = "orphan_recovered";

/// What [`Runs::recover_orphans`] found and repaired.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recovered {
    /// The runs that were set to `error`, with their new values.
    pub runs: Vec<RunRow>,
    /// The threads that dead writers had reserved, which are now free.
    pub released: Vec<String>,
    /// Runs of dead processes that [owe a restore](RunRow::owes_restore): their rollback was requested and not carried
    /// out, or they are edits. They are this process's now, and still hold their threads: restore the state before
    /// them, and finish them. Where nobody asked for it, they have the error and the stop reason to end with.
    pub rollbacks: Vec<RunRow>,
    /// The runs that waited for dead operations and now hold their threads; their workers are alive.
    pub promoted: Vec<String>,
}

/// The rows that no process works on.
enum Dead {
    /// At start: without a lease, which are of a process that has ended, or with one that ended before this time.
    AtStart(String),
    /// With leases that have these [marks](MARK).
    Marked(Vec<String>),
    /// Those of this owner.
    Owned(String),
}

impl Dead {
    /// Appends which rows they are, with the statement's first parameter.
    fn push(&self, sql: &mut Builder) {
        match self {
            Self::AtStart(time) => {
                sql.push("(lease_expires_at IS NULL OR lease_expires_at < ").push_bind(time).push(")");
            }
            Self::Marked(marks) => {
                sql.push_text_in(MARK, marks);
            }
            Self::Owned(owner) => {
                sql.push("owner_worker_id = ").push_bind(owner);
            }
        }
    }
}

impl Runs {
    /// Ends every active operation that cannot have a live worker: one without a lease, or whose lease ended more than
    /// `grace` before `now`. Call it once at start, before the first admission. Processes that share a database must
    /// all have leases.
    ///
    /// * Runs become `error` with [`RECOVERY_ERROR`], or [`LEASE_EXPIRED_ERROR`] if they had a lease, and
    ///   [`RECOVERY_STOP_REASON`], including waiting ones; but a run with a [decided](Runs::decide) outcome ends with
    ///   that, and one that found acknowledged changes lost in [that](Runs::note_history_lost) error.
    /// * A run that [owes a restore](RunRow::owes_restore) is taken over, not ended ([`Recovered::rollbacks`]).
    /// * Reservations are removed.
    /// * Threads on which no run works any more get the status that results from their last run that has ended, if that
    ///   is one of these. Any other thread that is `running` without a holder gets the status that follows from its last
    ///   run.
    pub async fn recover_orphans(
        &self,
        now: DateTime<Utc>,
        grace: TimeDelta,
    ) -> Result<Recovered, RecordsError> {
        self.recover(now, &Dead::AtStart(time_text(now - grace)), LEASE_EXPIRED_ERROR).await
    }

    /// The same for operations with a lease, at any time: ends what other processes left that ended or stalled. `seen`
    /// is what this process's last look has seen: a clock that has jumped ends nothing. If there is nothing to end,
    /// takes no lock.
    pub async fn recover_expired(
        &self,
        now: DateTime<Utc>,
        grace: TimeDelta,
        seen: &mut SeenLeases,
    ) -> Result<Recovered, RecordsError> {
        let sql = "SELECT run_id, lease_expires_at FROM runs WHERE status IN ('pending', 'running') \
                   AND lease_expires_at IS NOT NULL";
        let leases: Vec<(String, String)> = self.db.fetch_all(query(sql)).await?;
        let over = seen.look(leases, Instant::now(), &time_text(now - grace));
        if over.is_empty() {
            return Ok(Recovered::default());
        }
        self.recover(now, &Dead::Marked(over), LEASE_EXPIRED_ERROR).await
    }

    /// The same for the operations of one process that is known to be gone, whatever their leases; the error of its
    /// runs is [`RECOVERY_ERROR`].
    pub async fn recover_owner(&self, now: DateTime<Utc>, owner: &str) -> Result<Recovered, RecordsError> {
        self.recover(now, &Dead::Owned(owner.to_owned()), RECOVERY_ERROR).await
    }

    async fn recover(
        &self,
        now: DateTime<Utc>,
        dead: &Dead,
        error_of_leased: &'static str,
    ) -> Result<Recovered, RecordsError> {
        let (now, ahead) = (time_text(now), time_text(now + AHEAD));
        // They are active, which an index has: a look at all runs that there ever were would keep all writers waiting.
        let mut sql = self.db.builder(
            "DELETE FROM runs WHERE operation_kind <> 'run' AND status IN ('pending', 'running') AND ",
        );
        dead.push(&mut sql);
        let release = sql.with(" RETURNING thread_id").build();
        let mut sql = self.db.builder(concat!(
            "UPDATE runs SET owner_worker_id = $2, lease_expires_at = $3, updated_at = $4, \
             stop_reason = CASE WHEN cancel_action = 'rollback' THEN stop_reason ELSE $7 END, \
             error = CASE WHEN history_lost IS NOT NULL THEN history_lost \
             WHEN cancel_action = 'rollback' THEN error \
             WHEN lease_expires_at IS NULL THEN $5 ELSE $6 END \
             WHERE operation_kind = 'run' AND status IN ('pending', 'running') AND ",
            owes_restore!(),
            " AND "
        ));
        dead.push(&mut sql);
        let lease = self.lease.as_deref();
        let take_over = sql
            .with(concat!(" RETURNING ", run_columns!()))
            .build()
            .bind(lease.map(|lease| lease.owner.as_str()))
            .bind(lease.map(|lease| time_text(lease.end(self.db.clock.now()))))
            .bind(&now)
            .bind(RECOVERY_ERROR)
            .bind(error_of_leased)
            .bind(RECOVERY_STOP_REASON);
        let mut sql = self.db.builder(concat!(
            "UPDATE runs SET waiting = FALSE, updated_at = $2, \
             status = CASE WHEN history_lost IS NULL THEN COALESCE(decided_status, 'error') ELSE 'error' END, \
             stop_reason = CASE WHEN decided_status IS NULL THEN $5 ELSE stop_reason END, \
             error = CASE WHEN history_lost IS NOT NULL THEN history_lost \
             WHEN decided_status IS NOT NULL THEN error \
             WHEN lease_expires_at IS NULL THEN $3 ELSE $4 END \
             WHERE operation_kind = 'run' AND status IN ('pending', 'running') AND NOT ",
            owes_restore!(),
            " AND "
        ));
        dead.push(&mut sql);
        let end = sql
            .with(concat!(" RETURNING ", run_columns!()))
            .build()
            .bind(&now)
            .bind(RECOVERY_ERROR)
            .bind(error_of_leased)
            .bind(RECOVERY_STOP_REASON);
        let recovered = self.db.write_everywhere(move |tx| {
            Box::pin(async move {
                let released: Vec<(String,)> = tx.fetch_all(release).await?;
                let rollbacks: Vec<RunRow> = tx.fetch_all(take_over).await?;
                let runs: Vec<RunRow> = tx.fetch_all(end).await?;
                let mut promoted = Vec::new();
                for (thread_id,) in &released {
                    promoted.extend(promote_waiting(tx, thread_id, &now).await?);
                }
                for run in &runs {
                    promoted.extend(promote_waiting(tx, &run.thread_id, &now).await?);
                    tx.execute(status_of_thread(run, &now, &ahead)).await?;
                }
                tx.execute(query(REPAIR_THREADS).bind(&now).bind(&ahead)).await?;
                let released = released.into_iter().map(|(thread_id,)| thread_id).collect();
                Ok(Recovered { runs, released, rollbacks, promoted })
            })
        });
        recovered.await
    }
}

/// Repairs threads whose process ended between ending the run and setting the thread's status.
const REPAIR_THREADS: &str = concat!(
    "UPDATE threads_meta SET updated_at = ",
    touched!("$1", "$2"),
    ", status = COALESCE((SELECT CASE runs.status \
     WHEN 'success' THEN 'idle' WHEN 'interrupted' THEN 'interrupted' ELSE 'error' END \
     FROM runs WHERE runs.thread_id = threads_meta.thread_id AND operation_kind = 'run' \
     ORDER BY admission_seq DESC LIMIT 1), 'idle') \
     WHERE status = 'running' AND NOT EXISTS (SELECT 1 FROM runs \
     WHERE runs.thread_id = threads_meta.thread_id AND runs.status IN ('pending', 'running'))"
);

/// Sets the status of the thread of a recovered run, if that is the last one that has ended, and none works on it. The
/// heir of the thread cannot be left to do so: if it never starts, it ends without.
fn status_of_thread(run: &RunRow, now: &str, ahead: &str) -> Sql {
    let sql = concat!(
        "UPDATE threads_meta SET status = $4, updated_at = ",
        touched!("$3", "$5"),
        " WHERE thread_id = $1 AND $2 = \
         (SELECT run_id FROM runs WHERE thread_id = $1 AND operation_kind = 'run' \
         AND status NOT IN ('pending', 'running') ORDER BY admission_seq DESC LIMIT 1) \
         AND NOT EXISTS (SELECT 1 FROM runs WHERE thread_id = $1 AND operation_kind = 'run' \
         AND status = 'running')"
    );
    let sql = query(sql).bind(&run.thread_id).bind(&run.run_id).bind(now);
    sql.bind(ThreadStatus::after(run.status).as_str()).bind(ahead)
}

//! Working on a claimed item: starting, renewing, giving back.

use chrono::TimeDelta;

use super::{Batches, Claim, Lock, Now};
use crate::codec::{object_text, time_text};
use crate::db::Db;
use crate::error::RecordsError;
use crate::executions::{ExecutionRow, NewExecution, child_thread};
use crate::query::{Builder, Sql, query};

/// The item of a claim, while that holds.
pub(super) fn push_held(sql: &mut Builder, claim: &Claim, now: &Now) {
    sql.push("id = ").push_bind(&claim.item_id).push(" AND lease_owner = ").push_bind(&claim.owner);
    sql.push(" AND attempt = ").push_bind(claim.attempt);
    sql.push(" AND status IN ('leased', 'running') AND lease_expires_at > ");
    now.push(sql);
}

/// Whether a claim holds.
pub(super) fn push_holds(sql: &mut Builder, claim: &Claim, now: &Now) {
    sql.push("EXISTS (SELECT 1 FROM subagent_batch_items WHERE ");
    push_held(sql, claim, now);
    sql.push(")");
}

/// How an attempt at an item begins.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Its execution.
    pub execution: NewExecution,
    /// The configured name of the model.
    pub model: String,
    /// How long it waited for a slot, in milliseconds.
    pub waited_ms: i64,
}

impl Batches {
    /// The subagent of a claimed item is about to start: opens its execution, or goes on with that of an earlier attempt,
    /// and renews the lease. `None`, and nothing happens, if the claim does not hold any more.
    pub async fn launch(
        &self,
        claim: &Claim,
        lease: TimeDelta,
        launch: Launch,
    ) -> Result<Option<ExecutionRow>, RecordsError> {
        let (this, claim) = (self.clone(), claim.clone());
        let launched = self.db.write_rows(move |tx| {
            Box::pin(async move {
                let now = this.now();
                // No cancellation or deletion misses the execution.
                tx.queue(this.locked(&claim.batch_id, Lock::Shared))?;
                let statements = vec![
                    this.go_on(&claim, &launch, &now),
                    this.open(&claim, &launch, &now),
                    this.started(&claim, lease, &now),
                ];
                let mut ran = tx.run_and_commit::<ExecutionRow>(statements).await?.into_iter();
                let (gone_on, opened) = (ran.next(), ran.next());
                if ran.next().is_none_or(|started| started.count == 0) {
                    return Ok(None);
                }
                let rows = gone_on.into_iter().chain(opened).flat_map(|ran| ran.rows);
                Ok(rows.last())
            })
        });
        launched.await
    }

    /// Goes on with the newest execution of the item, unless it was delivered. It has its whole time again: the item may
    /// have waited for a worker.
    fn go_on(&self, claim: &Claim, launch: &Launch, now: &Now) -> Sql {
        let new = &launch.execution;
        let mut sql = self.db.builder("UPDATE executions SET status = 'running', run_id = ");
        sql.push_bind(&new.run_id).push(", deadline = ").push_bind(time_text(new.deadline));
        sql.push(", model_name = ").push_bind(&launch.model);
        sql.push(", waited_ms = COALESCE(waited_ms, ").push_bind(launch.waited_ms);
        sql.push("), started_at = COALESCE(started_at, ");
        now.push(&mut sql);
        sql.push(") WHERE execution_id = ").push_bind(&new.execution_id);
        push_newest(&mut sql, new);
        sql.push(" AND ");
        push_holds(&mut sql, claim, now);
        sql.push(" RETURNING *");
        sql.build()
    }

    /// Opens a new execution of the item, unless there is one to go on with.
    fn open(&self, claim: &Claim, launch: &Launch, now: &Now) -> Sql {
        let new = &launch.execution;
        let mut sql = self.db.builder(
            "INSERT INTO executions (execution_id, attempt, thread_id, run_id, parent_execution, kind, tool_call_id, \
             child_thread, agent_name, definition_json, definition_digest, description, status, model_name, usage_json, \
             waited_ms, delivered, counted, deadline, created_at, started_at) SELECT ",
        );
        sql.push_bind(&new.execution_id).push(", last.attempt + 1, ").push_bind(&new.thread_id);
        sql.push(", ").push_bind(&new.run_id).push(", ").push_bind(&new.parent_execution);
        sql.push(", ").push_bind(new.kind.as_str()).push(", ").push_bind(&new.tool_call_id);
        let first = child_thread(&new.execution_id, 1);
        sql.push(", CASE WHEN last.attempt = 0 THEN ").push_bind(first.clone());
        sql.push(" ELSE ").push_bind(format!("{first}:")).push(" || (last.attempt + 1) END, ");
        sql.push_bind(&new.agent_name).push(", ").push_bind(object_text(&new.definition));
        sql.push(", ").push_bind(&new.definition_digest).push(", ").push_bind(&new.description);
        sql.push(", 'running', ").push_bind(&launch.model).push(", '{}', ").push_bind(launch.waited_ms);
        sql.push(", FALSE, FALSE, ").push_bind(time_text(new.deadline)).push(", ");
        now.push(&mut sql);
        sql.push(", ");
        now.push(&mut sql);
        sql.push(" FROM (SELECT COALESCE(MAX(attempt), 0) AS attempt FROM executions WHERE execution_id = ");
        sql.push_bind(&new.execution_id)
            .push(") AS last WHERE NOT EXISTS (SELECT 1 FROM executions WHERE execution_id = ");
        sql.push_bind(&new.execution_id);
        push_newest(&mut sql, new);
        sql.push(") AND ");
        push_holds(&mut sql, claim, now);
        sql.push(" RETURNING *");
        sql.build()
    }

    fn started(&self, claim: &Claim, lease: TimeDelta, now: &Now) -> Sql {
        let mut sql = self.db.builder("UPDATE subagent_batch_items SET status = 'running', started_at = ");
        now.push(&mut sql);
        sql.push(", updated_at = ");
        now.push(&mut sql);
        sql.push(", lease_expires_at = ");
        now.push_after(&mut sql, lease);
        sql.push(" WHERE ");
        push_held(&mut sql, claim, now);
        sql.build()
    }

    /// Renews the lease. False, and nothing happens, if the claim does not hold any more. On Postgres it has a connection of
    /// its own, as [`held`](Self::held) has, which works on the runtime that it was called on first.
    pub async fn renew(&self, claim: &Claim, lease: TimeDelta) -> Result<bool, RecordsError> {
        let now = self.now();
        let mut sql = self.db.builder("UPDATE subagent_batch_items SET lease_expires_at = ");
        now.push_after(&mut sql, lease);
        sql.push(" WHERE ");
        push_held(&mut sql, claim, &now);
        self.changes(&self.db.apart().unflushed(), sql.build()).await
    }

    /// Whether a statement changes anything; a transaction of its own.
    async fn changes(&self, db: &Db, sql: Sql) -> Result<bool, RecordsError> {
        let changed = db.write_rows(move |tx| {
            Box::pin(async move {
                let ran = tx.run_and_commit::<(String,)>(vec![sql]).await?;
                Ok(ran.iter().any(|ran| ran.count > 0))
            })
        });
        changed.await
    }

    /// Which of these claims hold.
    pub async fn held(&self, claims: Vec<Claim>) -> Result<Vec<Claim>, RecordsError> {
        if claims.is_empty() {
            return Ok(claims);
        }
        let mut sql = self.db.builder(
            "SELECT id, lease_owner FROM subagent_batch_items WHERE status IN ('leased', 'running') \
             AND lease_expires_at > ",
        );
        let ids: Vec<String> = claims.iter().map(|claim| claim.item_id.clone()).collect();
        self.now().push(&mut sql);
        sql.push(" AND ").push_text_in("id", &ids);
        let held: Vec<(String, String)> = self.db.apart().fetch_all(sql.build()).await?;
        let holds =
            |claim: &Claim| held.iter().any(|(id, owner)| *id == claim.item_id && *owner == claim.owner);
        Ok(claims.into_iter().filter(holds).collect())
    }

    /// Ends the leases of a worker whose process is certainly gone, or all of them (`None`) for a process that has no other
    /// beside it: their items are claimed again at once, as after the time of the lease.
    pub async fn end_leases(&self, worker: Option<&str>) -> Result<(), RecordsError> {
        let now = self.now();
        let mut sql = self.db.builder("UPDATE subagent_batch_items SET lease_expires_at = ");
        now.push(&mut sql);
        sql.push(" WHERE status IN ('leased', 'running') AND lease_expires_at > ");
        now.push(&mut sql);
        if let Some(worker) = worker {
            // Each claim has the worker's name and a number.
            let prefix = format!("{worker}:");
            sql.push(&format!(" AND substr(lease_owner, 1, {}) = ", prefix.chars().count()))
                .push_bind(prefix);
        }
        self.changes(&self.db, sql.build()).await.map(drop)
    }

    /// Gives a claimed item back whose subagent does not work any more, as if it had not been claimed: the attempt does
    /// not count, and the next worker goes on where this one stopped. False, and nothing happens, if the claim does not
    /// hold any more.
    pub async fn release(&self, claim: &Claim) -> Result<bool, RecordsError> {
        let now = self.now();
        let mut sql =
            self.db.builder("UPDATE subagent_batch_items SET status = 'queued', attempt = attempt - 1, ");
        sql.push("lease_owner = NULL, lease_expires_at = NULL, started_at = NULL, updated_at = ");
        now.push(&mut sql);
        sql.push(" WHERE ");
        push_held(&mut sql, claim, &now);
        self.changes(&self.db, sql.build()).await
    }

    /// Gives back what a [claim](Self::claim) whose answer was lost may have got under this name, as if it had not been
    /// made: nobody works on these items. Waits for that claim, if it is still under way.
    pub async fn release_unanswered(&self, batch_id: &str, owner: &str) -> Result<(), RecordsError> {
        let mut sql =
            self.db.builder("UPDATE subagent_batch_items SET status = 'queued', attempt = attempt - 1, ");
        sql.push("lease_owner = NULL, lease_expires_at = NULL, started_at = NULL, updated_at = ");
        self.now().push(&mut sql);
        sql.push(" WHERE status = 'leased' AND batch_id = ").push_bind(batch_id);
        sql.push(" AND lease_owner = ").push_bind(owner);
        let (lock, sql) = (self.locked(batch_id, Lock::Exclusive), sql.build());
        let released = self.db.write_rows(move |tx| {
            Box::pin(async move {
                tx.queue(lock)?;
                tx.run_and_commit::<(String,)>(vec![sql]).await.map(drop)
            })
        });
        released.await
    }

    /// Whether the item of a claim exists: its thread was not deleted.
    pub async fn exists(&self, item_id: &str) -> Result<bool, RecordsError> {
        let sql = query("SELECT id FROM subagent_batch_items WHERE id = $1").bind(item_id);
        let found: Option<(String,)> = self.db.fetch_optional(sql).await?;
        Ok(found.is_some())
    }
}

/// Selects the newest execution of the item that the thread has, if its result was not delivered.
fn push_newest(sql: &mut Builder, new: &NewExecution) {
    sql.push(" AND thread_id = ").push_bind(&new.thread_id);
    sql.push(" AND NOT delivered AND attempt = (SELECT MAX(attempt) FROM executions WHERE execution_id = ");
    sql.push_bind(&new.execution_id).push(" AND thread_id = ").push_bind(&new.thread_id).push(")");
}

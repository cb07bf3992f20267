//! Opening an execution: the transaction of [`Executions::open`](super::Executions::open), and what must hold for it.
//!
//! It has the lock of the thread, as has whatever ends a run, takes it over or deletes the thread: a run that is active
//! when it looks stays so until it commits, and the thread exists.

use super::codec::{object_text, time_text};
use super::db::Db;
use super::error::RecordsError;
use super::executions::{ExecutionRow, ExecutionStatus, NewExecution, Opened, child_thread, missing};
use super::query::{Builder, query};
use super::runs::push_active_run;
use super::transaction::WriteTx;

/// What delegates, and so what must hold for it to have an execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delegating {
    /// A run with a row, which must be active and this process's: another one may have ended it or taken it over, and
    /// the thread may be deleted by then.
    Run,
    /// An item of a batch, the parent execution, which must not have ended. The run of the batch may have.
    Item,
    /// A run without a row, as an embedded client's: nothing but itself ends it.
    Unrecorded,
}

/// [`Executions::open`](super::Executions::open) in a transaction.
pub(super) async fn open_in(
    (db, owner): (&Db, Option<&str>),
    tx: &mut WriteTx<'_>,
    new: NewExecution,
    now: &str,
) -> Result<Opened, RecordsError> {
    let newest = query("SELECT * FROM executions WHERE execution_id = $1 ORDER BY attempt DESC");
    let attempts: Vec<ExecutionRow> = tx.fetch_all(newest.bind(&new.execution_id)).await?;
    let last = attempts.first().map_or(0, |row| row.attempt);
    let own = attempts.into_iter().find(|row| row.thread_id == new.thread_id);
    let attempt = match own {
        Some(row) if !row.delivered => {
            let mut sql = db.builder("UPDATE executions SET run_id = ");
            sql.push_bind(&new.run_id).push(" WHERE execution_id = ").push_bind(&row.execution_id);
            sql.push(" AND attempt = ").push_bind(row.attempt).push(" AND ");
            push_may(&mut sql, &new, owner);
            if tx.execute(sql.build()).await? == 0 {
                return Err(refusal(&new));
            }
            let counted = row.counted || row.run_id == new.run_id;
            return Ok(Opened { row: ExecutionRow { run_id: new.run_id, ..row }, counted });
        }
        _ => last + 1,
    };
    let mut sql = db.builder(
        "INSERT INTO executions (execution_id, attempt, thread_id, run_id, parent_execution, kind, tool_call_id, \
         child_thread, agent_name, definition_json, definition_digest, description, status, usage_json, delivered, \
         counted, deadline, created_at) SELECT ",
    );
    sql.push_bind(&new.execution_id).push(", ").push_bind(attempt);
    sql.push(", ").push_bind(&new.thread_id).push(", ").push_bind(&new.run_id);
    sql.push(", ").push_bind(&new.parent_execution).push(", ").push_bind(new.kind.as_str());
    sql.push(", ")
        .push_bind(&new.tool_call_id)
        .push(", ")
        .push_bind(child_thread(&new.execution_id, attempt));
    sql.push(", ").push_bind(&new.agent_name).push(", ").push_bind(object_text(&new.definition));
    sql.push(", ").push_bind(&new.definition_digest).push(", ").push_bind(&new.description);
    sql.push(", ").push_bind(ExecutionStatus::Pending.as_str()).push(", '{}', FALSE, FALSE, ");
    sql.push_bind(time_text(new.deadline)).push(", ").push_bind(now).push(" WHERE ");
    push_may(&mut sql, &new, owner);
    sql.push(" RETURNING *");
    let row = tx.fetch_optional(sql.build()).await?.ok_or_else(|| refusal(&new))?;
    Ok(Opened { row, counted: false })
}

/// Appends: what delegates may have an execution.
fn push_may(sql: &mut Builder, new: &NewExecution, owner: Option<&str>) {
    match new.delegating {
        Delegating::Run => push_active_run(sql, &new.thread_id, &new.run_id, owner),
        Delegating::Item => {
            sql.push("EXISTS (SELECT 1 FROM executions AS item WHERE item.execution_id = ");
            sql.push_bind(&new.parent_execution).push(" AND item.thread_id = ").push_bind(&new.thread_id);
            sql.push(" AND item.kind = 'batch_item' AND item.status IN ('pending', 'running'))");
        }
        Delegating::Unrecorded => drop(sql.push("TRUE")),
    }
}

/// Why it may not.
fn refusal(new: &NewExecution) -> RecordsError {
    match (new.delegating, &new.parent_execution) {
        (Delegating::Item, Some(item)) => missing(item),
        _ => RecordsError::run_ended(&new.run_id),
    }
}

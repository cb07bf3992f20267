//! The rows of `executions`: every attempt of a subagent at a piece of delegated work.
//!
//! A row is written before the subagent's first checkpoint and says where those checkpoints are, so that a process that
//! goes on after a crash finds what there is, and a deleted thread takes its subagents with it. The first terminal
//! status wins, in the database.

use std::collections::BTreeMap;

use super::codec::{JsonObject, object_text, time_text};
use super::db::Db;
use super::error::{Entity, RecordsError};
pub use super::execution_rows::{
    ExecutionEnd, ExecutionKind, ExecutionRow, ExecutionStatus, ExecutionTokens, NewExecution, Opened,
};
use super::opening::{Delegating, open_in};
use super::query::{Sql, query};
use super::runs::push_active_run;

/// The thread of an attempt's checkpoints. No client can name it: ids of threads contain no colon.
pub(super) fn child_thread(execution_id: &str, attempt: i64) -> String {
    if attempt == 1 {
        format!("{CHILD_PREFIX}{execution_id}")
    } else {
        format!("{CHILD_PREFIX}{execution_id}:{attempt}")
    }
}

/// What the ids of subagents' threads begin with. Threads of clients have no colon in their ids.
pub const CHILD_PREFIX: &str = "subagent:";

/// All columns of an [`ExecutionRow`] but the definition.
pub(crate) const SUMMARY: &str = "execution_id, attempt, thread_id, run_id, parent_execution, kind, tool_call_id, child_thread, \
    agent_name, CAST(NULL AS TEXT) AS definition_json, definition_digest, description, status, error, stop_reason, \
    model_name, usage_json, waited_ms, delivered, counted, deadline, created_at, started_at, completed_at";

/// The rows of this condition without their definitions, oldest first.
fn summaries(condition: &str) -> Sql {
    let text = format!(
        "SELECT {SUMMARY} FROM executions AS e WHERE {condition} ORDER BY created_at, execution_id, attempt"
    );
    Sql { text: text.into(), values: Vec::new() }
}

/// The repository of executions.
///
/// Every method is one transaction: a dropped future leaves all of it or nothing.
#[derive(Clone, Debug)]
pub struct Executions {
    pub(super) db: Db,
    /// The name under which this process owns rows of runs, if it has leases.
    pub(super) owner: Option<String>,
}

impl Executions {
    /// The attempt to work on: the thread's newest one, unless its result was delivered, then a new one. An attempt that
    /// another run left undelivered now belongs to this run; it keeps its deadline.
    ///
    /// A copy of a thread has the ids of its source's executions, but not the executions: its attempts are its own, with
    /// numbers after the source's.
    ///
    /// # Errors
    /// [`RecordsError::RunEnded`], or [`RecordsError::NotFound`] for the parent execution, if what delegates may not
    /// any more ([`Delegating`]): a process that stood still takes no execution from a run that goes on with it, and
    /// leaves none in a thread that was deleted.
    pub async fn open(&self, new: NewExecution) -> Result<Opened, RecordsError> {
        let now = time_text(self.db.clock.now());
        let (db, owner, thread_id) = (self.db.clone(), self.owner.clone(), new.thread_id.clone());
        let opened = self.db.write(&thread_id, move |tx| {
            Box::pin(async move { open_in((&db, owner.as_deref()), tx, new, &now).await })
        });
        opened.await
    }

    /// The execution got a slot, after this many milliseconds, and works with this model. False, and nothing happens, if
    /// it has ended, belongs to another run or was deleted by now.
    pub async fn started(
        &self,
        row: &ExecutionRow,
        model: &str,
        waited_ms: i64,
    ) -> Result<bool, RecordsError> {
        let sql = query(
            "UPDATE executions SET status = $3, model_name = $4, waited_ms = COALESCE(waited_ms, $5), \
             started_at = COALESCE(started_at, $6) \
             WHERE execution_id = $1 AND attempt = $2 AND run_id = $7 AND status IN ('pending', 'running')",
        );
        let sql = sql.bind(&row.execution_id).bind(row.attempt).bind(ExecutionStatus::Running.as_str());
        let sql = sql.bind(model).bind(waited_ms).bind(time_text(self.db.clock.now())).bind(&row.run_id);
        let db = self.db.unflushed();
        let started = db.write(&row.thread_id, move |tx| Box::pin(async move { tx.execute(sql).await }));
        Ok(started.await? > 0)
    }

    /// Ends the execution, unless it has ended: the first end wins. Returns the row as it is then. A process that stood
    /// still ends nothing that another run goes on with.
    ///
    /// # Errors
    /// [`RecordsError::NotFound`] if its thread was deleted; [`RecordsError::Invalid`] if the status is not terminal.
    pub async fn finish(&self, row: &ExecutionRow, end: ExecutionEnd) -> Result<ExecutionRow, RecordsError> {
        if !end.status.is_terminal() {
            let problem = format!("an execution does not end as '{}'", end.status);
            return Err(RecordsError::Invalid { field: "status", problem });
        }
        let usage = usage_json(&end.usage);
        let now = time_text(self.db.clock.now());
        let (id, attempt, run_id) = (row.execution_id.clone(), row.attempt, row.run_id.clone());
        let finished = self.db.write(&row.thread_id, move |tx| {
            Box::pin(async move {
                let sql = query(
                    "UPDATE executions SET status = $3, error = $4, stop_reason = $5, usage_json = $6, \
                     completed_at = $7 WHERE execution_id = $1 AND attempt = $2 AND run_id = $8 \
                     AND status IN ('pending', 'running')",
                );
                let sql = sql.bind(&id).bind(attempt).bind(end.status.as_str()).bind(&end.error);
                tx.execute(sql.bind(&end.stop_reason).bind(object_text(&usage)).bind(now).bind(run_id))
                    .await?;
                let row = query("SELECT * FROM executions WHERE execution_id = $1 AND attempt = $2");
                tx.fetch_optional(row.bind(&id).bind(attempt)).await?.ok_or_else(|| missing(&id))
            })
        });
        finished.await
    }

    /// The parent has stored the result of the newest attempt at this execution of the thread.
    pub async fn delivered(&self, thread_id: &str, execution_id: &str) -> Result<(), RecordsError> {
        let sql = query(
            "UPDATE executions SET delivered = TRUE WHERE execution_id = $1 AND NOT delivered AND attempt = \
             (SELECT MAX(attempt) FROM executions WHERE execution_id = $1 AND thread_id = $2)",
        );
        let sql = sql.bind(execution_id).bind(thread_id);
        let db = self.db.unflushed();
        db.write(thread_id, move |tx| Box::pin(async move { tx.execute(sql).await.map(|_| ()) })).await
    }

    /// The thread's newest attempt at this execution, unless its result was delivered.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`], [`RecordsError::Corrupt`].
    pub async fn undelivered(
        &self,
        thread_id: &str,
        execution_id: &str,
    ) -> Result<Option<ExecutionRow>, RecordsError> {
        let sql = query(
            "SELECT * FROM executions WHERE thread_id = $1 AND execution_id = $2 ORDER BY attempt DESC LIMIT 1",
        );
        let newest: Option<ExecutionRow> =
            self.db.fetch_optional(sql.bind(thread_id).bind(execution_id)).await?;
        Ok(newest.filter(|row| !row.delivered))
    }

    /// The sums of this run, which is in no row, contain the tokens of these executions of it, each with its attempt. For
    /// a run with a row, its [`RunTotals`](crate::RunTotals) say so.
    pub async fn counted(
        &self,
        thread_id: &str,
        run_id: &str,
        attempts: &[(String, i64)],
    ) -> Result<(), RecordsError> {
        let Some(sql) = mark_counted(&self.db, run_id, attempts) else { return Ok(()) };
        let db = self.db.unflushed();
        db.write(thread_id, move |tx| Box::pin(async move { tx.execute(sql).await.map(|_| ()) })).await
    }

    /// Gives an execution to this run, which counts what was done for it and does not go on with it, and cancels it for
    /// this reason unless it has ended. False, and nothing happens, if it is counted or belongs to yet another run by
    /// now, as of two that ask one gets it, or if this run may not delegate any more.
    pub async fn take_over(
        &self,
        row: &ExecutionRow,
        (run_id, delegating): (&str, Delegating),
        error: &str,
        usage: &BTreeMap<String, ExecutionTokens>,
    ) -> Result<bool, RecordsError> {
        let at_work = "status IN ('pending', 'running')";
        let mut sql = self.db.builder("UPDATE executions SET run_id = ");
        sql.push_bind(run_id);
        for (column, value) in [
            ("status", ExecutionStatus::Cancelled.as_str().to_owned()),
            ("error", error.to_owned()),
            ("usage_json", object_text(&usage_json(usage))),
            ("completed_at", time_text(self.db.clock.now())),
        ] {
            sql.push(&format!(", {column} = CASE WHEN {at_work} THEN ")).push_bind(value);
            sql.push(&format!(" ELSE {column} END"));
        }
        sql.push(" WHERE execution_id = ").push_bind(&row.execution_id);
        sql.push(" AND attempt = ").push_bind(row.attempt).push(" AND run_id = ").push_bind(&row.run_id);
        sql.push(&format!(" AND (NOT counted OR {at_work})"));
        if delegating == Delegating::Run {
            sql.push(" AND ");
            push_active_run(&mut sql, &row.thread_id, run_id, self.owner.as_deref());
        }
        let sql = sql.build();
        let taken = self.db.write(&row.thread_id, move |tx| Box::pin(async move { tx.execute(sql).await }));
        Ok(taken.await? > 0)
    }

    /// The thread's executions with all attempts, oldest first, without their definitions.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`], [`RecordsError::Corrupt`].
    pub async fn of_thread(&self, thread_id: &str) -> Result<Vec<ExecutionRow>, RecordsError> {
        self.db.fetch_all(summaries("thread_id = $1").bind(thread_id)).await
    }

    /// The same without the items of batches, of which there may be thousands.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`], [`RecordsError::Corrupt`].
    pub async fn delegated_by_runs(&self, thread_id: &str) -> Result<Vec<ExecutionRow>, RecordsError> {
        self.db.fetch_all(summaries("thread_id = $1 AND kind <> 'batch_item'").bind(thread_id)).await
    }

    /// The newest attempt at one of these, without its definition.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`], [`RecordsError::Corrupt`].
    pub async fn newest(
        &self,
        thread_id: &str,
        execution_id: &str,
    ) -> Result<Option<ExecutionRow>, RecordsError> {
        let sql = summaries("thread_id = $1 AND execution_id = $2 AND kind <> 'batch_item'");
        let attempts = self.db.fetch_all(sql.bind(thread_id).bind(execution_id)).await?;
        Ok(attempts.into_iter().max_by_key(|row: &ExecutionRow| row.attempt))
    }

    /// Whether an attempt with this number is there, of whatever thread: numbers of deleted ones are given again.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`].
    pub async fn exists(&self, row: &ExecutionRow) -> Result<bool, RecordsError> {
        let sql = query("SELECT execution_id FROM executions WHERE execution_id = $1 AND attempt = $2");
        let sql = sql.bind(&row.execution_id).bind(row.attempt);
        let found: Option<(String,)> = self.db.fetch_optional(sql).await?;
        Ok(found.is_some())
    }

    /// The subagent's definition at the dispatch of an attempt.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`], [`RecordsError::Corrupt`].
    pub async fn definition(&self, row: &ExecutionRow) -> Result<Option<JsonObject>, RecordsError> {
        let sql = query("SELECT * FROM executions WHERE execution_id = $1 AND attempt = $2");
        let sql = sql.bind(&row.execution_id).bind(row.attempt);
        let whole: Option<ExecutionRow> = self.db.fetch_optional(sql).await?;
        Ok(whole.and_then(|row| row.definition))
    }

    /// Those of them that the thread's next run has to look at, oldest first: what has not ended, and the tasks whose result
    /// was not delivered or whose tokens no run has counted. Not what an item of a batch at work has delegated: it goes on
    /// without a run.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`], [`RecordsError::Corrupt`].
    pub async fn unsettled(&self, thread_id: &str) -> Result<Vec<ExecutionRow>, RecordsError> {
        let sql = summaries(
            "thread_id = $1 AND kind <> 'batch_item' AND (status IN ('pending', 'running') \
             OR kind = 'task' AND (NOT delivered OR NOT counted AND usage_json <> '{}')) \
             AND NOT EXISTS (SELECT 1 FROM executions AS item \
             WHERE item.execution_id = e.parent_execution AND item.thread_id = e.thread_id \
             AND item.kind = 'batch_item' AND item.status IN ('pending', 'running'))",
        );
        self.db.fetch_all(sql.bind(thread_id)).await
    }

    /// How many executions the thread has, whatever the number of their attempts.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`].
    pub async fn number(&self, thread_id: &str) -> Result<u64, RecordsError> {
        let sql = "SELECT COUNT(DISTINCT execution_id) FROM executions WHERE thread_id = $1";
        let found: Option<(i64,)> = self.db.fetch_optional(query(sql).bind(thread_id)).await?;
        Ok(found.map_or(0, |(number,)| u64::try_from(number).unwrap_or_default()))
    }

    /// The threads with the checkpoints of all attempts of the thread's executions.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`].
    pub async fn child_threads(&self, thread_id: &str) -> Result<Vec<String>, RecordsError> {
        let sql = "SELECT child_thread FROM executions WHERE thread_id = $1 ORDER BY created_at, execution_id, attempt";
        let found: Vec<(String,)> = self.db.fetch_all(query(sql).bind(thread_id)).await?;
        Ok(found.into_iter().map(|(thread,)| thread).collect())
    }
}

/// The statement that marks these attempts of a run as counted; `None` if there are none.
pub(super) fn mark_counted(db: &Db, run_id: &str, attempts: &[(String, i64)]) -> Option<Sql> {
    if attempts.is_empty() {
        return None;
    }
    let mut sql = db.builder("UPDATE executions SET counted = TRUE WHERE run_id = ");
    sql.push_bind(run_id).push(" AND (");
    for (index, (id, attempt)) in attempts.iter().enumerate() {
        sql.push(if index == 0 { "execution_id = " } else { " OR execution_id = " }).push_bind(id.as_str());
        sql.push(" AND attempt = ").push_bind(*attempt);
    }
    sql.push(")");
    Some(sql.build())
}

pub(super) fn usage_json(usage: &BTreeMap<String, ExecutionTokens>) -> JsonObject {
    usage.iter().map(|(model, tokens)| (model.clone(), serde_json::json!(tokens))).collect()
}

pub(super) fn missing(execution_id: &str) -> RecordsError {
    RecordsError::NotFound { entity: Entity::Execution, id: execution_id.to_owned() }
}

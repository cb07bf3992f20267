//! Admission: how a run gets its thread.
//!
//! # Waiting
//!
//! A new run may have to wait for a thread that is still being written. It is stored at once, with the status `pending`
//! and the flag `waiting`, which keeps it out of the index of active rows. When the holder ends, the same transaction
//! clears the flag of the waiting run that was admitted first: the thread passes on directly, and nothing can get in
//! between.
//!
//! * With `reject` a run waits for nobody at work. A run that is being cancelled is not: clients see it as `interrupted`
//!   from then on, so the new run waits for its last writes, unless others wait already.
//! * With `enqueue` a run waits for the holder of the thread, a run or another writer, and for all runs that already
//!   wait; at most [`QUEUE_MAX`] wait. It does not wait for a deletion, after which there is no thread.
//! * With `interrupt` and `rollback` a run takes the thread over from a run that still has to stop, and perhaps to
//!   restore the state from before it. As these strategies promise, it cancels all earlier runs, including waiting
//!   ones, which have done nothing yet and become `interrupted` at once. So of several runs that arrive while one run
//!   ends, exactly one runs, the last admitted; the others report their interruption, and no caller has to retry.
//!
//! All of this is in the table, so it holds between processes and after a crash.
//!
//! A [note](super::WriterKind::Note) refuses nobody: a run that does not wait in the queue is admitted after its end.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use tokio::time::Instant;

use super::{
    CancelAction, Lease, MultitaskStrategy, NewRun, OperationKind, RunRow, RunStatus, Runs, SELECT_HOLDER,
    run_columns, select_run,
};
use crate::codec::{cut, object_text, time_text};
use crate::commits::Flush;
use crate::error::RecordsError;
use crate::failure::DatabaseError;
use crate::query::{Sql, query};
use crate::transaction::WriteTx;

/// The maximum number of runs that wait for one thread.
pub const QUEUE_MAX: u32 = 100;

/// The outcome of admitting a run.
#[derive(Clone, Debug, PartialEq)]
pub enum Admission {
    /// The run holds the thread; start it.
    Admitted(RunRow),
    /// The run waits for earlier ones, which continue; start it when it holds the thread.
    Queued(RunRow),
    /// The run waits. Stop the predecessor, and start this run when that has finished.
    Waiting {
        /// The new run.
        run: RunRow,
        /// The id of the run that holds the thread and is marked for cancellation.
        predecessor: String,
        /// How it is cancelled: by the new run's strategy, or by an earlier request.
        action: CancelAction,
        /// The ids of runs that were waiting and are now `interrupted`.
        superseded: Vec<String>,
    },
    /// A run was admitted earlier with this idempotency key; nothing was changed.
    Existing(RunRow),
}

/// Whether a row of `threads_meta` is [visible](crate::ThreadRow::visible_to) to this user, if one is named.
macro_rules! visible {
    ($user:literal) => {
        concat!("COALESCE(user_id = ", $user, ", TRUE)")
    };
}

/// Whether the feed of this thread has messages. The newest one is found from the end, where a run leaves one.
macro_rules! has_messages {
    ($thread:literal) => {
        concat!(
            "(SELECT seq FROM run_events WHERE thread_id = ",
            $thread,
            " AND category = 'message' ORDER BY seq DESC LIMIT 1) IS NOT NULL"
        )
    };
}

impl Runs {
    /// Stores `run` with the status `pending` if its thread is free, or if `strategy` frees it or waits for it.
    ///
    /// Call this and start the run's work in one task that is not dropped half-way: if this future is dropped, the run
    /// may have been admitted, and then holds its thread until the next recovery.
    ///
    /// # Errors
    /// * [`RecordsError::NotFound`]: the thread has no row, for example because it was deleted meanwhile, or is not
    ///   [visible](NewRun::visible_to) to the run's user.
    /// * [`RecordsError::Conflict`]: another operation holds the thread, and `strategy` neither stops it nor waits.
    /// * [`RecordsError::QueueFull`]: [`QUEUE_MAX`] runs wait for the thread.
    /// * [`RecordsError::DuplicateRun`]: the run id is already used.
    pub async fn admit(&self, run: NewRun, strategy: MultitaskStrategy) -> Result<Admission, RecordsError> {
        let refused =
            || DatabaseError::Internal("a run was refused for the messages of its thread".to_owned());
        Ok(self.admit_if(run, strategy, false).await?.ok_or_else(refused)?)
    }

    /// As [`Runs::admit`], if the thread's feed in the database has messages; `None`, without a change, if it has none.
    ///
    /// # Errors
    /// See [`Runs::admit`].
    pub async fn admit_after_messages(
        &self,
        run: NewRun,
        strategy: MultitaskStrategy,
    ) -> Result<Option<Admission>, RecordsError> {
        self.admit_if(run, strategy, true).await
    }

    async fn admit_if(
        &self,
        run: NewRun,
        strategy: MultitaskStrategy,
        needs_messages: bool,
    ) -> Result<Option<Admission>, RecordsError> {
        let flush = if run.acknowledged { Flush::Now } else { Flush::WithNext };
        let db = self.db.flushing(flush);
        let (run, began) = (Arc::new(run), Instant::now());
        let admitted = loop {
            let (run, lease, now) = (Arc::clone(&run), self.lease.clone(), self.db.clock.now());
            let thread_id = run.thread_id.clone();
            let admitted = db.write(&thread_id, move |tx| {
                Box::pin(async move {
                    let row = RowToInsert {
                        run: &run,
                        kind: OperationKind::Run,
                        status: RunStatus::Pending,
                        waiting: false,
                        strategy,
                        now,
                        lease: lease.as_deref(),
                    };
                    if needs_messages {
                        admit_after_messages(tx, row).await
                    } else {
                        admit(tx, row).await.map(Some)
                    }
                })
            });
            let refused = match admitted.await {
                Ok(admitted) => break admitted,
                Err(refused) => refused,
            };
            if !self.is_past_note(&refused, began).await {
                return Err(refused);
            }
        };
        if let Some(Admission::Admitted(run) | Admission::Queued(run) | Admission::Waiting { run, .. }) =
            &admitted
        {
            db.threads_of_runs.add(&run.run_id, &run.thread_id);
        }
        Ok(admitted)
    }

    /// The run, if an admission with an [unknown outcome](RecordsError::InDoubt) stored it: read after that transaction,
    /// which by then has either happened or never will.
    pub async fn admitted(&self, run: &NewRun) -> Result<Option<RunRow>, RecordsError> {
        let sql = query(select_run!("run_id = $1")).bind(&run.run_id);
        self.db.write(&run.thread_id, move |tx| Box::pin(tx.fetch_optional(sql))).await
    }
}

async fn admit(tx: &mut WriteTx<'_>, row: RowToInsert<'_>) -> Result<Admission, RecordsError> {
    // The usual case first, in one round trip.
    match tx.fetch_and_commit(insertion(&row)).await? {
        Some(row) => Ok(Admission::Admitted(row)),
        None => admit_again(tx, row).await,
    }
}

async fn admit_after_messages(
    tx: &mut WriteTx<'_>,
    row: RowToInsert<'_>,
) -> Result<Option<Admission>, RecordsError> {
    if let Some(row) = tx.fetch_and_commit(insertion_after_messages(&row)).await? {
        return Ok(Some(Admission::Admitted(row)));
    }
    let sql = concat!(
        "SELECT ",
        has_messages!("$1"),
        " FROM threads_meta WHERE thread_id = $1 AND ",
        visible!("$2")
    );
    match tx.fetch_and_commit(query(sql).bind(&row.run.thread_id).bind(&row.run.visible_to)).await? {
        Some((false,)) => Ok(None),
        _ => admit_again(tx, row).await.map(Some),
    }
}

/// After an attempt that has stored nothing.
async fn admit_again(tx: &mut WriteTx<'_>, row: RowToInsert<'_>) -> Result<Admission, RecordsError> {
    let run = row.run;
    if let Some(key) = &run.idempotency_key {
        let sql = query(select_run!("idempotency_key = $1")).bind(key);
        if let Some(existing) = tx.fetch_optional(sql).await? {
            return Ok(Admission::Existing(existing));
        }
    }
    let sql = concat!("SELECT thread_id FROM threads_meta WHERE thread_id = $1 AND ", visible!("$2"));
    let thread = query(sql).bind(&run.thread_id).bind(&run.visible_to);
    if tx.fetch_optional::<(String,)>(thread).await?.is_none() {
        return Err(RecordsError::thread_not_found(&run.thread_id));
    }
    // Another process may have freed it meanwhile.
    match insert(tx, &row).await? {
        Some(run) => Ok(Admission::Admitted(run)),
        None => wait(tx, RowToInsert { waiting: true, ..row }).await,
    }
}

/// Handles a taken thread: makes the run wait, if its strategy allows it.
async fn wait(tx: &mut WriteTx<'_>, row: RowToInsert<'_>) -> Result<Admission, RecordsError> {
    let thread_id = &row.run.thread_id;
    let duplicate = || RecordsError::DuplicateRun { run_id: row.run.run_id.clone() };
    let holder: RunRow =
        tx.fetch_optional(query(SELECT_HOLDER).bind(thread_id)).await?.ok_or_else(duplicate)?;
    let action = match row.strategy {
        MultitaskStrategy::Interrupt => Some(CancelAction::Interrupt),
        MultitaskStrategy::Rollback => Some(CancelAction::Rollback),
        MultitaskStrategy::Enqueue if holder.operation_kind != OperationKind::Delete => {
            return enqueue(tx, row).await;
        }
        MultitaskStrategy::Reject if holder.cancel_action.is_some() && waiting(tx, thread_id).await? == 0 => {
            return enqueue(tx, row).await;
        }
        MultitaskStrategy::Enqueue | MultitaskStrategy::Reject => None,
    };
    let Some(action) = action.filter(|_| holder.operation_kind == OperationKind::Run) else {
        return Err(RecordsError::Conflict { thread_id: thread_id.clone(), holder: holder.operation_kind });
    };

    let action = mark_cancelled(tx, &holder, action, row.now)?;
    let superseded: Vec<(String,)> = tx
        .fetch_all(
            query(
                "UPDATE runs SET status = 'interrupted', waiting = FALSE, \
                 cancel_action = COALESCE(cancel_action, 'interrupt'), \
                 cancel_requested_at = COALESCE(cancel_requested_at, $2), updated_at = $2 \
                 WHERE thread_id = $1 AND waiting RETURNING run_id",
            )
            .bind(thread_id)
            .bind(time_text(row.now)),
        )
        .await?;
    let run = insert(tx, &row).await?.ok_or_else(duplicate)?;
    let superseded = superseded.into_iter().map(|(run_id,)| run_id).collect();
    Ok(Admission::Waiting { run, predecessor: holder.run_id, action, superseded })
}

/// Queues the run after all that hold the thread or wait for it.
async fn enqueue(tx: &mut WriteTx<'_>, row: RowToInsert<'_>) -> Result<Admission, RecordsError> {
    let thread_id = &row.run.thread_id;
    if waiting(tx, thread_id).await? >= i64::from(QUEUE_MAX) {
        return Err(RecordsError::QueueFull { thread_id: thread_id.clone(), waiting: QUEUE_MAX });
    }
    let run = insert(tx, &row).await?;
    run.map(Admission::Queued).ok_or_else(|| RecordsError::DuplicateRun { run_id: row.run.run_id.clone() })
}

/// How many runs wait for the thread.
async fn waiting(tx: &mut WriteTx<'_>, thread_id: &str) -> Result<i64, RecordsError> {
    let sql = query("SELECT COUNT(*) FROM runs WHERE thread_id = $1 AND waiting").bind(thread_id);
    let counted: Option<(i64,)> = tx.fetch_optional(sql).await?;
    Ok(counted.map_or(0, |(count,)| count))
}

/// Requests the cancellation of `run` and returns its action: an earlier request takes precedence.
pub(super) fn mark_cancelled(
    tx: &mut WriteTx<'_>,
    run: &RunRow,
    action: CancelAction,
    now: DateTime<Utc>,
) -> Result<CancelAction, RecordsError> {
    if let Some(earlier) = run.cancel_action {
        return Ok(earlier);
    }
    if run.decided_status.is_some() {
        // It ends anyway.
        return Ok(action);
    }
    let sql =
        "UPDATE runs SET cancel_action = $2, cancel_requested_at = $3, updated_at = $3 WHERE run_id = $1";
    tx.queue(query(sql).bind(&run.run_id).bind(action.as_str()).bind(time_text(now)))?;
    tx.announce(&run.run_id);
    Ok(action)
}

/// A new row of `runs`.
pub(super) struct RowToInsert<'a> {
    pub(super) run: &'a NewRun,
    pub(super) kind: OperationKind,
    pub(super) status: RunStatus,
    pub(super) waiting: bool,
    pub(super) strategy: MultitaskStrategy,
    pub(super) now: DateTime<Utc>,
    pub(super) lease: Option<&'a Lease>,
}

/// Inserts the row; `None` if a unique index forbids it, or there is no thread for a run that its user may see.
async fn insert(tx: &mut WriteTx<'_>, row: &RowToInsert<'_>) -> Result<Option<RunRow>, RecordsError> {
    tx.fetch_optional(insertion(row)).await
}

/// The columns of a new row, and their values, if `$condition` holds for a run.
macro_rules! insertion {
    ($condition:expr) => {
        concat!(
            "INSERT INTO runs (run_id, thread_id, assistant_id, user_id, status, operation_kind, waiting, \
             idempotency_key, model_name, multitask_strategy, metadata_json, kwargs_json, first_human_message, \
             follow_up_to_run_id, owner_worker_id, lease_expires_at, created_at, updated_at, edits) \
             SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $17, $19 \
             WHERE $6 <> 'run' OR EXISTS (SELECT 1 FROM threads_meta WHERE thread_id = $2 AND ",
            visible!("$18"),
            ")",
            $condition,
            " ON CONFLICT DO NOTHING RETURNING ",
            run_columns!()
        )
    };
}

/// The statement that does so.
pub(super) fn insertion(row: &RowToInsert<'_>) -> Sql {
    bound(insertion!(""), row)
}

/// The same for a run that waits for its thread's first messages.
fn insertion_after_messages(row: &RowToInsert<'_>) -> Sql {
    bound(insertion!(concat!(" AND ", has_messages!("$2"))), row)
}

fn bound(sql: &'static str, row: &RowToInsert<'_>) -> Sql {
    let run = row.run;
    query(sql)
        .bind(&run.run_id)
        .bind(&run.thread_id)
        .bind(&run.assistant_id)
        .bind(&run.user_id)
        .bind(row.status.as_str())
        .bind(row.kind.as_str())
        .bind(row.waiting)
        .bind(&run.idempotency_key)
        .bind(&run.model_name)
        .bind(row.strategy.as_str())
        .bind(object_text(&run.metadata))
        .bind(run.kwargs.to_string())
        .bind(run.first_human_message.as_deref().map(|text| cut(text, super::MESSAGE_PREVIEW_MAX_CHARS)))
        .bind(&run.follow_up_to_run_id)
        .bind(row.lease.map(|lease| lease.owner.as_str()))
        .bind(row.lease.map(|lease| time_text(lease.end(row.now))))
        .bind(time_text(row.now))
        .bind(&run.visible_to)
        .bind(run.edits)
}

//! Deletes a thread: its runs, its events and its row, atomically.

use std::sync::{Arc, OnceLock};

use super::Records;
use super::codec::time_text;
use super::db::detached;
use super::error::RecordsError;
use super::events::keep_numbers;
use super::persist::persistently;
use super::query::query;
use super::runs::{Reservation, RunRow, WriterKind, lost, select_run};

/// What [`Records::delete_thread`] deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeletedThread {
    /// Whether the thread had a row.
    pub thread: bool,
    /// How many runs it had.
    pub runs: u64,
    /// How many events it had.
    pub events: u64,
}

impl Records {
    /// Deletes all records of the reserved thread, including the reservation. The work continues if the future is
    /// dropped; after an error, unless it is [`RecordsError::InDoubt`], nothing is deleted and the thread is released.
    /// Only batches are an exception: first they are cancelled, and their items deleted a number at a time. Each of
    /// these transactions looks for the reservation, so that a process that stood still takes nothing of what came
    /// after it.
    ///
    /// Events outside the database are removed after the commit, and are held from before it, so that those of a newer
    /// thread with the same id stay. [`Events::has_remains`](super::Events::has_remains) finds those of a process that
    /// was cut off between the two, and a newer thread with the same id begins without them.
    ///
    /// # Errors
    /// [`RecordsError::Invalid`] if the reservation is not for a deletion, [`RecordsError::NotFound`] if it was
    /// recovered in the meantime, [`RecordsError::InDoubt`] if a commit is in doubt and a look at the rows did not
    /// settle it.
    pub async fn delete_thread(&self, reservation: Reservation) -> Result<DeletedThread, RecordsError> {
        if reservation.kind() != WriterKind::Delete {
            let problem =
                format!("deleting a thread needs a 'delete' reservation, not {:?}", reservation.kind());
            return Err(RecordsError::Invalid { field: "reservation", problem });
        }
        let records = self.clone();
        detached(async move { records.delete_reserved(reservation).await }).await
    }

    /// Deletes a run of the thread that has ended, and its events. Their numbers are not given again. The work continues
    /// if the future is dropped.
    ///
    /// Events outside the database are removed after the commit. If an attempt was cut off between the two, or could not
    /// remove them, another one does, although it finds no run.
    ///
    /// # Errors
    /// [`RecordsError::NotFound`]; [`RecordsError::Conflict`] if the run is active; that of the removal of its events.
    pub async fn delete_run(&self, thread_id: &str, run_id: &str) -> Result<(), RecordsError> {
        let (records, thread_id, run_id) = (self.clone(), thread_id.to_owned(), run_id.to_owned());
        detached(async move { records.delete_ended(&thread_id, &run_id).await }).await
    }

    async fn delete_ended(&self, thread_id: &str, run_id: &str) -> Result<(), RecordsError> {
        let (thread, id) = (thread_id.to_owned(), run_id.to_owned());
        let deleted = self.db.write(thread_id, move |tx| {
            Box::pin(async move {
                let sql = select_run!("run_id = $1 AND thread_id = $2 AND operation_kind = 'run'");
                let run = query(sql).bind(&id).bind(&thread);
                let run: RunRow =
                    tx.fetch_optional(run).await?.ok_or_else(|| RecordsError::run_not_found(&id))?;
                if run.status.is_active() {
                    return Err(RecordsError::Conflict {
                        thread_id: run.thread_id,
                        holder: run.operation_kind,
                    });
                }
                tx.execute(keep_numbers(&thread)).await?;
                let events = query("DELETE FROM run_events WHERE thread_id = $1 AND run_id = $2");
                tx.execute(events.bind(&thread).bind(&id)).await?;
                tx.execute(query("DELETE FROM run_frames WHERE run_id = $1").bind(&id)).await?;
                tx.execute(query("DELETE FROM runs WHERE run_id = $1").bind(&id)).await?;
                Ok(())
            })
        });
        let deleted = deleted.await;
        if deleted.as_ref().err().is_none_or(RecordsError::is_not_found) {
            self.events.forget_run(thread_id, run_id).await?;
        }
        deleted
    }

    async fn delete_reserved(&self, reservation: Reservation) -> Result<DeletedThread, RecordsError> {
        let thread_id = reservation.thread_id();
        self.batches.cancel_of_thread(&reservation).await?;
        self.batches.delete_items_of_thread(&reservation).await?;
        let feed = self.events.hold_to_delete(thread_id).await?;
        let mut deleted = self.delete_rows(&reservation).await?;
        deleted.events += feed.forget(thread_id).await.unwrap_or_else(|error| {
            // The rows are deleted. Another deletion removes the events, or they keep the id from being used again.
            tracing::error!(thread_id, %error, "the event file of a deleted thread remains; delete the thread again");
            0
        });
        reservation.forget();
        Ok(deleted)
    }

    /// Deletes the rows of the reserved thread. If the commit is in doubt, it is looked up whether they are deleted.
    async fn delete_rows(&self, reservation: &Reservation) -> Result<DeletedThread, RecordsError> {
        let thread_id = reservation.thread_id();
        let (thread, row) = (thread_id.to_owned(), reservation.row_id().to_owned());
        let remains = self.batches.note_remains(thread_id);
        let done = Arc::new(OnceLock::new());
        let doing = Arc::clone(&done);
        let deleted = self.db.write(thread_id, move |tx| {
            Box::pin(async move {
                if tx.execute(query("DELETE FROM runs WHERE run_id = $1").bind(&row)).await? == 0 {
                    return Err(lost(&row));
                }
                let runs = tx.execute(query("DELETE FROM runs WHERE thread_id = $1").bind(&thread)).await?;
                let events = query("DELETE FROM run_events WHERE thread_id = $1").bind(&thread);
                let events = tx.execute(events).await?;
                tx.execute(query("DELETE FROM run_frames WHERE thread_id = $1").bind(&thread)).await?;
                tx.execute(remains).await?;
                tx.execute(query("DELETE FROM executions WHERE thread_id = $1").bind(&thread)).await?;
                let batches = query("DELETE FROM subagent_batches WHERE thread_id = $1");
                tx.execute(batches.bind(&thread)).await?;
                tx.execute(query("DELETE FROM token_budgets WHERE thread_id = $1").bind(&thread)).await?;
                let threads = query("DELETE FROM threads_meta WHERE thread_id = $1").bind(&thread);
                let thread = tx.execute(threads).await? > 0;
                Ok(*doing.get_or_init(|| DeletedThread { thread, runs, events }))
            })
        });
        let deleted = deleted.await;
        let in_doubt = matches!(deleted, Err(RecordsError::InDoubt { .. }));
        if in_doubt
            && let Some(done) = done.get().copied()
            && let Ok(false) = persistently(|| self.has_old_rows(reservation)).await
        {
            return Ok(done);
        }
        deleted
    }

    /// Whether the thread, a run of it or its reservation has a row that is not newer than the reservation, looked up
    /// after every earlier write transaction of the thread, also one whose commit is in doubt. Newer ones do not count:
    /// after that commit another client may have created a thread with the same id.
    pub(super) async fn has_old_rows(&self, reservation: &Reservation) -> Result<bool, RecordsError> {
        let sql = "SELECT thread_id FROM threads_meta WHERE thread_id = $1 AND created_at <= $2 \
                   UNION ALL SELECT thread_id FROM runs WHERE thread_id = $1 AND created_at <= $2 LIMIT 1";
        let thread_id = reservation.thread_id();
        let rows = query(sql).bind(thread_id).bind(time_text(reservation.created_at()));
        let found = self.db.write(thread_id, move |tx| Box::pin(tx.fetch_optional::<(String,)>(rows)));
        Ok(found.await?.is_some())
    }
}

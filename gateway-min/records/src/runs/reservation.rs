//! Reservations: how a writer other than a run gets a thread, with a row of `runs` for the duration of its work.
//!
//! A process that owns runs renews its reservations with them. Any other one has no such task, and each reservation renews
//! itself ([`Renewal`]). What is not renewed any more is removed by a gateway ([`super::recovery`]), or by the next of
//! such other processes that wants the thread: there may be no gateway.

use std::time::Duration;

use chrono::{DateTime, Utc};
use tokio::sync::oneshot;
use tokio::time::Instant;
use uuid::Uuid;

use super::admission::{RowToInsert, insertion};
use super::lifecycle::promotion;
use super::{Lease, MultitaskStrategy, NewRun, OperationKind, RunRow, RunStatus, Runs, SELECT_HOLDER};
use crate::codec::time_text;
use crate::db::detached;
use crate::error::{Entity, RecordsError};
use crate::failure::DatabaseError;
use crate::own_thread::on_its_own_thread;
use crate::persist::until_available;
use crate::query::{Sql, query};
use crate::transaction::WriteTx;

/// What the row of a note begins with: processes know it by that. One of an earlier version takes it for any other
/// write.
const NOTE: &str = "note-";
/// How often a refused call looks whether the note has ended that holds its thread.
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// The longest that a call waits for notes: the process that writes one may have died. In tests none has, and on a busy
/// machine they take their time.
const NOTE_PATIENCE: Duration = if cfg!(test) { Duration::from_mins(10) } else { Duration::from_secs(5) };

/// The writers other than runs that hold a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriterKind {
    /// See [`OperationKind::CheckpointWrite`].
    CheckpointWrite,
    /// The same for a note of what a read had to look up. It takes milliseconds, and nobody asked for it: other writers
    /// and runs wait for its end, in all processes. It waits for nobody.
    Note,
    /// See [`OperationKind::ArtifactWrite`].
    ArtifactWrite,
    /// See [`OperationKind::Branch`].
    Branch,
    /// See [`OperationKind::Delete`].
    Delete,
}

impl From<WriterKind> for OperationKind {
    fn from(kind: WriterKind) -> Self {
        match kind {
            WriterKind::CheckpointWrite | WriterKind::Note => Self::CheckpointWrite,
            WriterKind::ArtifactWrite => Self::ArtifactWrite,
            WriterKind::Branch => Self::Branch,
            WriterKind::Delete => Self::Delete,
        }
    }
}

/// The right to write to a thread: while it exists, no run or other writer gets the thread.
///
/// Call [`Reservation::release`] when the work is done. A reservation that is dropped instead, by an error or with a
/// cancelled request, is released in the background, as soon as the database is available.
#[derive(Debug)]
#[must_use = "dropping a reservation releases the thread"]
pub struct Reservation {
    runs: Runs,
    thread_id: String,
    row_id: String,
    kind: WriterKind,
    created_at: DateTime<Utc>,
    held: bool,
    /// Dropped with it.
    _renewal: Option<Renewal>,
}

impl Reservation {
    /// The reserved thread.
    pub fn thread_id(&self) -> &str {
        &self.thread_id
    }

    /// The kind of work.
    pub fn kind(&self) -> WriterKind {
        self.kind
    }

    /// Whether the thread is still reserved: a process that stood still may have lost it to another one.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn is_held(&self) -> Result<bool, RecordsError> {
        let row: Option<(String,)> = self.runs.db.fetch_optional(query(HELD).bind(&self.row_id)).await?;
        Ok(row.is_some())
    }

    /// An error unless [`Self::is_held`].
    ///
    /// # Errors
    /// [`RecordsError::NotFound`] if it was recovered in the meantime; those of the database.
    pub async fn ensure_held(&self) -> Result<(), RecordsError> {
        if self.is_held().await? { Ok(()) } else { Err(lost(&self.row_id)) }
    }

    /// Releases the thread, to the first waiting run if there is one. After an error, or if the future is dropped,
    /// further attempts are made in the background.
    pub async fn release(mut self) -> Result<(), RecordsError> {
        delete_row(&self.runs, &self.thread_id, &self.row_id).await?;
        self.held = false;
        Ok(())
    }

    /// Its id, which no other reservation has.
    pub fn row_id(&self) -> &str {
        &self.row_id
    }

    /// When it was created, as in its row.
    pub(crate) fn created_at(&self) -> DateTime<Utc> {
        self.created_at
    }

    /// Its row was deleted with the thread.
    pub(crate) fn forget(mut self) {
        self.held = false;
    }
}

/// The reservation `$1`.
const HELD: &str = "SELECT thread_id FROM runs WHERE run_id = $1 AND operation_kind <> 'run'";

/// [`Reservation::ensure_held`] in a transaction of its thread: then nobody takes the thread before that has ended.
pub(crate) async fn ensure_held(tx: &mut WriteTx<'_>, row_id: &str) -> Result<(), RecordsError> {
    let row: Option<(String,)> = tx.fetch_optional(query(HELD).bind(row_id)).await?;
    row.map(drop).ok_or_else(|| lost(row_id))
}

/// The error of a writer that has lost its thread.
pub(crate) fn lost(row_id: &str) -> RecordsError {
    RecordsError::NotFound { entity: Entity::Reservation, id: row_id.to_owned() }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // Stop renewing its lease.
        self.runs.reserved().remove(&self.row_id);
        // Without a runtime the process is ending; the next start recovers the thread.
        if let (true, Ok(runtime)) = (self.held, tokio::runtime::Handle::try_current()) {
            let (runs, row_id, thread_id) = (self.runs.clone(), self.row_id.clone(), self.thread_id.clone());
            runtime.spawn(async move {
                // Without leases nobody else would release it. With them another process may have, which is no error.
                if let Err(error) = until_available(|| delete_row(&runs, &thread_id, &row_id)).await {
                    tracing::error!(%thread_id, %error, "a thread stays reserved until its lease expires or the next start");
                }
            });
        }
    }
}

async fn delete_row(runs: &Runs, thread_id: &str, row_id: &str) -> Result<(), RecordsError> {
    let sql = query("DELETE FROM runs WHERE run_id = $1 AND operation_kind <> 'run'").bind(row_id);
    let promotion = promotion(thread_id, &time_text(runs.db.clock.now()));
    let db = runs.db.unflushed();
    let deleted = db.write(thread_id, move |tx| {
        Box::pin(async move {
            tx.queue(sql)?;
            tx.queue(promotion)
        })
    });
    deleted.await
}

impl Runs {
    /// Reserves the thread, which need not have a row, for a writer that is not a run. Waits for a
    /// [note](WriterKind::Note) that holds it. The future can be dropped at any point; a reservation that was already
    /// created is released. A process whose [reservations renew themselves](Lease::renews_reservations) takes the
    /// thread from a writer whose lease and grace are over.
    ///
    /// # Errors
    /// [`RecordsError::Conflict`]: a run or another writer holds the thread.
    pub async fn reserve(&self, thread_id: &str, kind: WriterKind) -> Result<Reservation, RecordsError> {
        let (runs, thread_id) = (self.clone(), thread_id.to_owned());
        let reserving = async move {
            let began = Instant::now();
            loop {
                let refused = match reserve(runs.clone(), thread_id.clone(), kind).await {
                    Err(refused) if kind != WriterKind::Note => refused,
                    reserved => return reserved,
                };
                if !runs.is_past_note(&refused, began).await {
                    return Err(refused);
                }
            }
        };
        detached(reserving).await
    }

    /// Waits for the end of a note, if a call that began then was refused its thread because of one. Returns whether
    /// the thread is held by something else now, or by nothing: then the call has to be repeated.
    pub(super) async fn is_past_note(&self, refused: &RecordsError, began: Instant) -> bool {
        let RecordsError::Conflict { thread_id, holder: OperationKind::CheckpointWrite } = refused else {
            return false;
        };
        while began.elapsed() < NOTE_PATIENCE {
            match self.active_for_thread(thread_id).await {
                Ok(Some(holder)) if is_note(&holder) => tokio::time::sleep(LOOK_AGAIN).await,
                Ok(Some(holder)) => return holder.operation_kind != OperationKind::CheckpointWrite,
                Ok(None) => return true,
                // The refusal is a result all the same.
                Err(_) => return false,
            }
        }
        false
    }
}

/// Whether this holder of a thread is a note.
fn is_note(holder: &RunRow) -> bool {
    holder.operation_kind == OperationKind::CheckpointWrite && holder.run_id.starts_with(NOTE)
}

async fn reserve(runs: Runs, thread_id: String, kind: WriterKind) -> Result<Reservation, RecordsError> {
    let prefix = if kind == WriterKind::Note { NOTE } else { "" };
    let row_id = format!("{prefix}{}", Uuid::new_v4());
    let run = NewRun { run_id: row_id.clone(), thread_id: thread_id.clone(), ..NewRun::default() };
    let (lease, now) = (runs.lease.clone(), runs.db.clock.now());
    // Before there is anything to renew, because there may be no thread to do it.
    let renewal = match lease.as_deref().filter(|lease| lease.renews_reservations) {
        Some(lease) => Some(Renewal::start(&runs, lease).await?),
        None => None,
    };
    let reservation =
        Reservation { runs, thread_id, row_id, kind, created_at: now, held: true, _renewal: renewal };
    // Before the commit, because the row needs renewals from then on.
    reservation.runs.reserved().insert(reservation.row_id.clone());
    // A power loss ends the writer with its reservation, so that need not be on disk.
    let db = reservation.runs.db.unflushed();
    let inserted = db.write(&reservation.thread_id, move |tx| {
        Box::pin(async move {
            let row = RowToInsert {
                run: &run,
                kind: kind.into(),
                status: RunStatus::Running,
                waiting: false,
                strategy: MultitaskStrategy::Reject,
                now,
                lease: lease.as_deref(),
            };
            if tx.fetch_and_commit::<RunRow>(insertion(&row)).await?.is_some() {
                return Ok(Ok(()));
            }
            // A gateway looks for dead writers all the time, and does not go by a wall clock alone. There may be none.
            if let Some(lease) = lease.as_deref().filter(|lease| lease.renews_reservations) {
                tx.queue(removal(&run.thread_id, &time_text(lease.over_before(now))))?;
                tx.queue(promotion(&run.thread_id, &time_text(now)))?;
            }
            let sql = query(SELECT_HOLDER).bind(&run.thread_id);
            let holder: Option<RunRow> = tx.fetch_optional(sql).await?;
            // It was free by then, or is now.
            if holder.is_none() && tx.fetch_optional::<RunRow>(insertion(&row)).await?.is_some() {
                return Ok(Ok(()));
            }
            let (thread_id, run_id) = (run.thread_id.clone(), run.run_id.clone());
            // A result of the transaction, which is committed: the next in the queue after a dead writer has the thread now.
            Ok(Err(match holder {
                Some(holder) => RecordsError::Conflict { thread_id, holder: holder.operation_kind },
                None => RecordsError::DuplicateRun { run_id },
            }))
        })
    });
    match inserted.await.flatten() {
        Ok(()) => Ok(reservation),
        // Dropping it releases it, in case the commit happened.
        Err(error @ RecordsError::InDoubt { .. }) => Err(error),
        Err(error) => {
            reservation.forget();
            Err(error)
        }
    }
}

/// The statement that removes the reservation of the thread whose lease ended before this time.
fn removal(thread_id: &str, over_before: &str) -> Sql {
    let sql = "DELETE FROM runs WHERE thread_id = $1 AND operation_kind <> 'run' AND lease_expires_at < $2";
    query(sql).bind(thread_id).bind(over_before)
}

/// Renews the reservations of a process that does nothing else with its lease, on a thread of its own, until it is dropped:
/// the process may be busy for longer than a lease.
#[derive(Debug)]
struct Renewal {
    _dropped: oneshot::Sender<()>,
}

impl Renewal {
    async fn start(runs: &Runs, lease: &Lease) -> Result<Self, DatabaseError> {
        let (dropped, mut ended) = oneshot::channel::<()>();
        let runs = runs.clone();
        let pause = lease.length.to_std().unwrap_or(Duration::MAX) / 3;
        let renewing = async move {
            // An answer is an error: nothing is ever sent.
            while tokio::time::timeout(pause, &mut ended).await.is_err() {
                if let Err(error) = runs.renew(&[]).await {
                    tracing::warn!(%error, "cannot renew the lease of a reservation");
                }
            }
        };
        on_its_own_thread("reservations", renewing).await?;
        Ok(Self { _dropped: dropped })
    }
}

//! Leases: a process owns its rows for a limited time, and renews them to show that it is alive. A gateway that is the only
//! one has none; a program beside a gateway always has.
//!
//! A process that considers an owner dead ends the row ([`super::recovery`]), and an ended row never changes. A run that
//! is still to be rolled back it takes over instead: the row gets another owner. Only the owner of a row writes what its
//! run has used and how that ends, so one that comes back too late changes nothing.

use std::collections::BTreeSet;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};

use super::{Runs, owes_restore};
use crate::codec::{Cells, time_text};
use crate::error::RecordsError;
use crate::failure::DatabaseError;
use crate::query::{FromRow, Row, query};

/// The terms on which a process owns its rows.
#[derive(Clone, Debug)]
pub struct Lease {
    /// A name that no other process has, nor this one after a restart.
    pub owner: String,
    /// How long a row is owned without a renewal.
    pub length: TimeDelta,
    /// How much longer other processes wait for a renewal.
    pub grace: TimeDelta,
    /// Whether each reservation renews its own lease. Otherwise the process calls [`Runs::renew`] while it lives, as one does
    /// that also owns runs.
    pub renews_reservations: bool,
}

impl Lease {
    /// The terms of a process that renews what it owns.
    pub fn new(owner: &str, length: Duration, grace: Duration) -> Self {
        let delta = |duration| TimeDelta::from_std(duration).unwrap_or(TimeDelta::MAX);
        let owner = owner.to_owned();
        Self { owner, length: delta(length), grace: delta(grace), renews_reservations: false }
    }

    /// When a lease ends that is given now.
    pub(super) fn end(&self, now: DateTime<Utc>) -> DateTime<Utc> {
        now.checked_add_signed(self.length).unwrap_or(DateTime::<Utc>::MAX_UTC)
    }

    /// Leases that ended before this time are of dead processes.
    pub(super) fn over_before(&self, now: DateTime<Utc>) -> DateTime<Utc> {
        now.checked_sub_signed(self.grace).unwrap_or(DateTime::<Utc>::MIN_UTC)
    }
}

/// What a process must know about a run that it works on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Noticed {
    /// The run.
    pub run_id: String,
    /// Its thread.
    pub thread_id: String,
    /// Whether it was cancelled or ended elsewhere.
    pub stopped: bool,
    /// Whether another process requested its frames.
    pub followed: bool,
}

impl FromRow for Noticed {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let cells = Cells::new(row, "runs", &["run_id"]);
        Ok(Self {
            run_id: cells.text("run_id")?,
            thread_id: cells.text("thread_id")?,
            stopped: cells.flag("stopped")?,
            followed: cells.flag("followed")?,
        })
    }
}

impl Runs {
    /// The terms on which this process owns rows, if there may be other processes.
    pub fn lease(&self) -> Option<&Lease> {
        self.lease.as_deref()
    }

    /// The name under which this process owns rows, if there may be other processes.
    pub fn owner(&self) -> Option<&str> {
        self.lease().map(|lease| lease.owner.as_str())
    }

    /// Renews the leases of these runs and of all reservations held by this process, if it has a lease. Rows of others and
    /// ended rows are unchanged. On Postgres it has a connection of its own, which works on the runtime that it was called
    /// on first.
    pub async fn renew(&self, run_ids: &[String]) -> Result<(), RecordsError> {
        let Some(lease) = &self.lease else { return Ok(()) };
        let held: Vec<String> = run_ids.iter().cloned().chain(self.reserved().iter().cloned()).collect();
        if held.is_empty() {
            return Ok(());
        }
        // Rows of many threads, in no particular order, so that taking each thread's lock could deadlock.
        let mut sql = self.db.builder("UPDATE runs SET lease_expires_at = ");
        sql.push_bind(time_text(lease.end(self.db.clock.now())));
        sql.push(" WHERE status IN ('pending', 'running') AND owner_worker_id = ").push_bind(&lease.owner);
        sql.push(" AND ").push_text_in("run_id", &held);
        let sql = sql.build();
        self.db.apart().write_everywhere(move |tx| Box::pin(tx.execute(sql))).await.map(drop)
    }

    /// The runs without a lease that [owe a restore](super::RunRow::owes_restore). The gateway without leases, which is the
    /// only one, may have taken some of them over without knowing it; its other runs end as their tasks have decided.
    pub async fn owing_without_lease(&self) -> Result<Vec<String>, RecordsError> {
        let sql = concat!(
            "SELECT run_id FROM runs WHERE operation_kind = 'run' AND status IN ('pending', 'running') \
             AND lease_expires_at IS NULL AND ",
            owes_restore!()
        );
        let found: Vec<(String,)> = self.db.fetch_all(query(sql)).await?;
        Ok(found.into_iter().map(|(run_id,)| run_id).collect())
    }

    /// Which of these runs were cancelled, were ended, or are followed by another process.
    pub async fn noticed(&self, run_ids: &[String]) -> Result<Vec<Noticed>, RecordsError> {
        if run_ids.is_empty() {
            return Ok(Vec::new());
        }
        let mut sql = self.db.builder(
            "SELECT * FROM (SELECT run_id, thread_id, followed, \
             cancel_action IS NOT NULL OR status NOT IN ('pending', 'running') AS stopped FROM runs WHERE ",
        );
        sql.push_text_in("run_id", run_ids).push(") AS each WHERE stopped OR followed");
        self.db.fetch_all(sql.build()).await
    }

    /// The rows of the reservations that this process holds.
    pub(super) fn reserved(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! Keeps ownership of what this process works on, if several processes share a database.
//!
//! Each row of a run or another writer has an owner and a lease. The owner renews the leases of what its tasks work on,
//! and nothing else. A dead or stalled process renews nothing: when the lease and its grace have expired, any other
//! gateway, also one without leases, that has seen no renewal for a lease's length ends its runs and frees what it has
//! reserved, once; the successor of a dead process does not wait for that ([`super::instance`]). An owner that could
//! not renew in time considers its runs lost and stops them itself; it cannot end what others have ended, because the
//! end of a row is final, nor what others have taken over, because only its owner ends a row.

use std::io;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use chrono::{TimeDelta, Utc};
use tokio::sync::mpsc;
use tokio::task;
use tokio::time::{Instant, MissedTickBehavior};

use super::Runs;
use super::instance::Instance;
use threadkeep_config::Config;
use threadkeep_records::{
    Changes, Noticed, Records, RecordsError, Recovered, SeenLeases, on_its_own_thread, worker_name,
};

/// How often a process polls whether its runs were cancelled, ended or followed elsewhere, unless others say so.
const LOOK: Duration = Duration::from_millis(500);
/// How often where what others say does not arrive, as behind a pooler: one statement, of a process that has runs.
const LOOK_IF_MISSED: Duration = Duration::from_millis(20);

/// The terms on which rows are owned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// How long a row is owned without a renewal; at least a second.
    pub(crate) lease: Duration,
    /// How much longer other processes wait: more than the difference of the machines' clocks.
    pub(crate) grace: Duration,
}

impl Terms {
    /// The configured terms; none if this process is the only one on its database.
    pub(crate) fn of(config: &Config) -> Option<Self> {
        threadkeep_storage::is_shared(config).then(|| Self::configured(config))
    }

    /// The configured terms, also of a process that has no leases.
    pub(crate) fn configured(config: &Config) -> Self {
        let section = &config.run_ownership;
        Self {
            lease: Duration::from_secs(section.lease_seconds),
            grace: Duration::from_secs(section.grace_seconds),
        }
    }
}

/// Ends what this process's predecessor left, if that is certainly gone, and records this process for its successor.
/// Returns the lock to hold, and what was found. Without other processes there is nothing to lock, and all leases of batches
/// are a predecessor's; without a lock, the leases decide.
///
/// # Errors
/// The store's.
pub(crate) async fn take_over(
    records: &Records,
    state_dir: &Path,
) -> Result<(Option<Instance>, Recovered), RecordsError> {
    let none = Recovered::default;
    let Some(owner) = records.runs().owner().map(str::to_owned) else {
        records.batches().end_leases(None).await?;
        return Ok((None, none()));
    };
    let place = state_dir.to_owned();
    let entered = task::spawn_blocking(move || {
        let instance = Instance::enter(&place)?;
        Ok(instance.map(|mut instance| (instance.predecessor(), instance)))
    });
    let unlocked = |error: io::Error| {
        tracing::warn!(%error, "the state directory is not locked: after a kill, runs end only when their leases expire");
    };
    let (predecessor, mut instance) = match entered.await.unwrap_or_else(|error| Err(error.into())) {
        Ok(Some(entered)) => entered,
        Ok(None) => return Ok((None, none())),
        Err(error) => {
            unlocked(error);
            return Ok((None, none()));
        }
    };
    let recovered = match predecessor {
        Some(predecessor) => {
            records.batches().end_leases(Some(&worker_name(&predecessor))).await?;
            records.runs().recover_owner(Utc::now(), &predecessor).await?
        }
        None => none(),
    };
    let signed = task::spawn_blocking(move || instance.sign(&owner).map(|()| instance));
    let instance = signed.await.unwrap_or_else(|error| Err(error.into()));
    Ok((instance.map_err(unlocked).ok(), recovered))
}

/// Starts what maintains the ownership while the gateway lives. Leases are renewed on a thread and a runtime of their own: a
/// process whose threads are busy for long is not dead.
///
/// # Errors
/// There can be no such thread.
pub(crate) async fn keep(runs: &Arc<Runs>, terms: Terms) -> io::Result<()> {
    let (renewed, renewals) = mpsc::channel(1);
    on_its_own_thread("leases", own(Arc::downgrade(runs), terms, renewed)).await?;
    tokio::spawn(recover(Arc::downgrade(runs), terms, renewals));
    tokio::spawn(look(Arc::downgrade(runs), runs.records.changes()));
    Ok(())
}

/// Starts what looks for expired leases, in a gateway that has none: those of programs beside it, such as embedded
/// clients, and of gateways that had some before the configuration changed.
pub(crate) fn look_for_dead(runs: &Arc<Runs>, terms: Terms) {
    let runs = Arc::downgrade(runs);
    tokio::spawn(async move {
        let mut seen = SeenLeases::new(terms.lease);
        // Whether a look was cut off or failed: what it has taken over may be unknown here, and has no lease that ends.
        // That may be committed after the next look, too, so all later ones ask for it.
        let mut unsure = false;
        loop {
            tokio::time::sleep(terms.lease / 3).await;
            let Some(runs) = runs.upgrade() else { return };
            unsure |= !end_expired(&runs, terms, &mut seen).await;
            if unsure
                && !runs.is_stopping()
                && let Err(error) = runs.end_taken_over().await
            {
                tracing::warn!(%error, "cannot look for runs that were taken over without an answer");
            }
        }
    });
}

/// Renews this process's leases.
async fn own(runs: Weak<Runs>, terms: Terms, done: mpsc::Sender<()>) {
    let (pause, mut renewed) = (terms.lease / 3, Instant::now());
    loop {
        let next = Instant::now() + pause;
        let end = runs.upgrade().and_then(|runs| runs.local.first_end(renewed, terms.lease));
        tokio::time::sleep_until(end.map_or(next, |end| end.min(next))).await;
        let Some(runs) = runs.upgrade() else { return };
        runs.lose_expired(renewed, terms.lease);
        let asked = Instant::now();
        // Not after the end of a lease, which an unavailable database cannot report.
        let over = runs.local.first_end(renewed, terms.lease).unwrap_or(asked + pause);
        match tokio::time::timeout_at(over, runs.renew()).await {
            // Count from the request: the lease in the database cannot be older.
            Ok(Ok(())) => renewed = asked,
            Ok(Err(error)) => runs.renewal_failed(&error),
            Err(late) => runs.renewal_failed(&late),
        }
        if renewed == asked {
            // If the receiver has not seen the last one, it sees both.
            let _ = done.try_send(());
        } else {
            runs.lose_expired(renewed, terms.lease);
        }
    }
}

/// Ends what dead processes left, after each renewal: the rows of this process are renewed by then.
async fn recover(runs: Weak<Runs>, terms: Terms, mut renewals: mpsc::Receiver<()>) {
    let mut seen = SeenLeases::new(terms.lease);
    while renewals.recv().await.is_some() {
        let Some(runs) = runs.upgrade() else { return };
        end_expired(&runs, terms, &mut seen).await;
    }
}

/// Whether the look was completed. Otherwise, what it has taken over has a lease that ends, or is asked for
/// ([`look_for_dead`]).
async fn end_expired(runs: &Arc<Runs>, terms: Terms, seen: &mut SeenLeases) -> bool {
    let ending = runs.recover_expired(terms.grace, seen);
    let ended = tokio::time::timeout(terms.lease / 3, ending).await;
    if let Ok(Err(error)) = &ended {
        tracing::warn!(%error, "cannot look for runs of dead processes");
    }
    matches!(ended, Ok(Ok(())))
}

/// What a process looks at, because of a message or of the time.
enum Look {
    /// Its runs at work, and the kept streams of those that have ended.
    Everything,
    /// Its runs at work.
    AtWork,
    /// This run, at work or ended, if it is its own.
    Run(Arc<str>),
}

/// Polls whether runs of this process were cancelled, ended or followed elsewhere, those that have ended too while
/// their streams are kept.
async fn look(runs: Weak<Runs>, mut changes: Changes) {
    let mut poll = tokio::time::interval(LOOK);
    poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut often = false;
    loop {
        let look = tokio::select! {
            _ = poll.tick() => Look::Everything,
            heard = changes.next() => heard.map_or(Look::Everything, Look::Run),
            () = tokio::time::sleep(LOOK_IF_MISSED), if often => Look::AtWork,
        };
        let Some(runs) = runs.upgrade() else { return };
        let looked = match look {
            Look::Run(run_id) if runs.local.get(&run_id).is_none() => {
                runs.streams.hand_on_if_ended(&run_id).await
            }
            Look::Run(_) | Look::AtWork => runs.notice().await,
            Look::Everything => match runs.notice().await {
                Ok(()) => runs.streams.hand_on_ended().await,
                failed => failed,
            },
        };
        // A database that fails is not asked more often.
        often = looked.is_ok() && changes.are_missed();
        if let Err(error) = looked {
            tracing::debug!(%error, "cannot look for runs that were cancelled or are followed elsewhere");
        }
    }
}

impl Runs {
    async fn renew(&self) -> Result<(), RecordsError> {
        self.records.runs().renew(&self.local.ids()).await
    }

    /// Stops runs of this process that were cancelled or ended elsewhere, and forwards those that other processes
    /// follow.
    pub(super) async fn notice(self: &Arc<Self>) -> Result<(), RecordsError> {
        for Noticed { run_id, thread_id, stopped, followed } in
            self.records.runs().noticed(&self.local.ids()).await?
        {
            let Some(control) = self.local.get(&run_id) else { continue };
            if stopped {
                control.cancel.cancel();
            }
            if followed {
                self.streams.hand_on(thread_id, run_id);
            }
        }
        Ok(())
    }

    /// Stops the runs whose leases have ended.
    fn lose_expired(&self, renewed: Instant, lease: Duration) {
        for run_id in self.local.lose_expired(renewed, lease) {
            self.metrics.run_lost();
            tracing::error!(run_id, "stopping a run because its lease could not be renewed in time");
        }
    }

    fn renewal_failed(&self, error: &dyn std::error::Error) {
        self.metrics.renewal_failed();
        tracing::warn!(%error, "cannot renew leases");
    }

    /// Rolls back the runs without leases that owe that and that no task works on: this process, which is the only one
    /// without leases, took them over and did not hear of it.
    async fn end_taken_over(self: &Arc<Self>) -> Result<(), RecordsError> {
        for run_id in self.records.runs().owing_without_lease().await? {
            if self.local.get(&run_id).is_none() {
                tracing::warn!(run_id, "ending a run that was taken over without an answer");
                self.end_unfinished(&run_id, None).await?;
            }
        }
        Ok(())
    }

    /// Ends what dead processes left.
    async fn recover_expired(
        self: &Arc<Self>,
        grace: Duration,
        seen: &mut SeenLeases,
    ) -> Result<(), RecordsError> {
        let grace = TimeDelta::from_std(grace).unwrap_or(TimeDelta::MAX);
        let recovered = self.records.runs().recover_expired(Utc::now(), grace, seen).await?;
        self.metrics.runs_taken_over(recovered.runs.len() + recovered.rollbacks.len());
        for thread_id in &recovered.released {
            tracing::warn!(thread_id, "freed a thread that a writer whose process is gone had reserved");
        }
        for run in &recovered.runs {
            tracing::warn!(
                run_id = run.run_id,
                thread_id = run.thread_id,
                "ended a run whose process is gone"
            );
        }
        self.roll_back(recovered.rollbacks);
        for run_id in &recovered.promoted {
            if let Some(control) = self.local.get(run_id) {
                control.promoted.notify_one();
            }
        }
        Ok(())
    }
}

//! The runs that this process works on. The database decides what is active; this is how a request reaches the task
//! that does the work.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The handle of a run that this process works on.
#[derive(Debug)]
pub(crate) struct RunControl {
    /// Cancelled when the run should stop; the row says how.
    pub(crate) cancel: CancellationToken,
    /// Notified when the run's predecessor has ended.
    pub(crate) promoted: Notify,
    /// Before its row got its first lease.
    pub(crate) entered: Instant,
    /// Set when the run holds the thread.
    at_work: AtomicBool,
    /// Set when the process could not renew the run's lease.
    lost: AtomicBool,
    ended: watch::Sender<bool>,
}

impl RunControl {
    fn new() -> Self {
        Self {
            cancel: CancellationToken::new(),
            promoted: Notify::new(),
            entered: Instant::now(),
            at_work: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            ended: watch::Sender::new(false),
        }
    }

    /// Records that the run holds the thread.
    pub(crate) fn begun(&self) {
        self.at_work.store(true, Ordering::Relaxed);
    }

    /// Whether the run waits for its thread.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.at_work.load(Ordering::Relaxed)
    }

    /// Stops the run because other processes may have ended it.
    fn lose(&self) {
        self.lost.store(true, Ordering::Relaxed);
        self.cancel.cancel();
    }

    /// Whether the run was stopped because its lease was not renewed.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Waits until the run has done its last write.
    pub(crate) async fn ended(&self) {
        let mut ended = self.ended.subscribe();
        // An error means that the sender is dropped, and with it the run.
        let _ = ended.wait_for(|ended| *ended).await;
    }
}

/// The runs that this process works on.
#[derive(Debug, Clone, Default)]
pub(crate) struct LocalRuns(Arc<Mutex<HashMap<String, Arc<RunControl>>>>);

impl LocalRuns {
    fn with<T>(&self, use_map: impl FnOnce(&mut HashMap<String, Arc<RunControl>>) -> T) -> T {
        use_map(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds a run, which is removed when the guard is dropped, also by a panic of its task.
    pub(crate) fn enter(&self, run_id: &str) -> RunGuard {
        let control = Arc::new(RunControl::new());
        self.with(|runs| runs.insert(run_id.to_owned(), Arc::clone(&control)));
        RunGuard { runs: self.clone(), run_id: run_id.to_owned(), control }
    }

    pub(crate) fn get(&self, run_id: &str) -> Option<Arc<RunControl>> {
        self.with(|runs| runs.get(run_id).cloned())
    }

    /// The ids of the runs.
    pub(crate) fn ids(&self) -> Vec<String> {
        self.with(|runs| runs.keys().cloned().collect())
    }

    pub(crate) fn all(&self) -> Vec<Arc<RunControl>> {
        self.with(|runs| runs.values().cloned().collect())
    }

    /// When the first lease of the runs that are not being stopped ends. All were renewed at `renewed`, but those that
    /// began later.
    pub(crate) fn first_end(&self, renewed: Instant, lease: Duration) -> Option<Instant> {
        self.with(|runs| {
            let working = runs.values().filter(|run| !run.cancel.is_cancelled());
            working.map(|run| run.entered.max(renewed) + lease).min()
        })
    }

    /// Stops the runs whose leases have ended, because other processes may consider them dead by now. Returns their ids.
    pub(crate) fn lose_expired(&self, renewed: Instant, lease: Duration) -> Vec<String> {
        let now = Instant::now();
        let mut lost = Vec::new();
        self.with(|runs| {
            for (run_id, run) in runs {
                if !run.cancel.is_cancelled() && run.entered.max(renewed) + lease <= now {
                    run.lose();
                    lost.push(run_id.clone());
                }
            }
        });
        lost
    }
}

/// A run's entry in [`LocalRuns`].
#[derive(Debug)]
pub(crate) struct RunGuard {
    runs: LocalRuns,
    run_id: String,
    pub(crate) control: Arc<RunControl>,
}

impl Drop for RunGuard {
    fn drop(&mut self) {
        self.runs.with(|runs| {
            // The run may have been entered again meanwhile, to be rolled back.
            if runs.get(&self.run_id).is_some_and(|entered| Arc::ptr_eq(entered, &self.control)) {
                runs.remove(&self.run_id);
            }
        });
        self.control.ended.send_replace(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dropped_guard_takes_the_run_out_and_wakes_who_waits_for_its_end() {
        let runs = LocalRuns::default();
        let guard = runs.enter("r");
        let control = runs.get("r").unwrap();
        let waiter = tokio::spawn(async move { control.ended().await });
        drop(guard);
        waiter.await.unwrap();
        assert!(runs.get("r").is_none());
        assert!(runs.all().is_empty());
    }

    #[test]
    fn a_guard_takes_out_its_own_entry_only() {
        let runs = LocalRuns::default();
        let first = runs.enter("r");
        let second = runs.enter("r");
        drop(first);
        assert!(runs.get("r").is_some_and(|found| Arc::ptr_eq(&found, &second.control)));
        drop(second);
        assert!(runs.get("r").is_none());
    }

    /// The database was away for long; a run that began when it was back is not lost with those that were there before.
    #[tokio::test(start_paused = true)]
    async fn a_run_has_its_whole_lease_also_if_no_renewal_ever_succeeded() {
        let (runs, renewed, lease) = (LocalRuns::default(), Instant::now(), Duration::from_secs(5));
        assert_eq!(runs.first_end(renewed, lease), None);
        let _old = runs.enter("old");
        tokio::time::advance(Duration::from_secs(4)).await;
        assert_eq!(runs.first_end(renewed, lease), Some(renewed + lease));
        assert_eq!(runs.lose_expired(renewed, lease), [""; 0]);
        tokio::time::advance(Duration::from_secs(1)).await;
        let _young = runs.enter("young");
        let begun = Instant::now();
        assert_eq!(runs.lose_expired(renewed, lease), ["old"]);
        assert!(runs.get("old").unwrap().is_lost() && !runs.get("young").unwrap().is_lost());
        assert_eq!(runs.first_end(renewed, lease), Some(begun + lease), "the old one is being stopped");
        tokio::time::advance(Duration::from_millis(4999)).await;
        assert_eq!(runs.lose_expired(renewed, lease), [""; 0]);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(runs.lose_expired(renewed, lease), ["young"]);
        let renewed = Instant::now();
        let _next = runs.enter("next");
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(runs.first_end(renewed + Duration::from_secs(3), lease), Some(Instant::now() + lease));
    }
}

//! What this process has claimed, and until when it may work on it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chrono::TimeDelta;
use threadkeep_records::{Batches, Claim};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The claims of this process.
pub(super) struct Leases {
    /// How long a claim holds after it was made or renewed.
    length: Duration,
    held: Mutex<HashMap<Claim, Held>>,
}

struct Held {
    /// Cancelled when the claim does not hold any more.
    lost: CancellationToken,
    /// A time after which the lease was renewed; the lease ends no earlier than its length after that.
    renewed: Instant,
}

impl Leases {
    pub(super) fn new(length: Duration) -> Self {
        Self { length, held: Mutex::default() }
    }

    /// How long a claim is to hold.
    pub(super) fn length(&self) -> TimeDelta {
        TimeDelta::from_std(self.length).unwrap_or(TimeDelta::MAX)
    }

    /// How often claims are renewed: three times before they end.
    pub(super) fn renewal(&self) -> Duration {
        (self.length / 3).max(Duration::from_secs(1))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Claim, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a claim that was asked for at `asked`. The token is cancelled when it does not hold any more.
    pub(super) fn add(&self, claim: &Claim, asked: Instant) -> CancellationToken {
        let lost = CancellationToken::new();
        self.lock().insert(claim.clone(), Held { lost: lost.clone(), renewed: asked });
        lost
    }

    /// Whether this process still works on the item for an earlier claim, which it has lost.
    pub(super) fn has_earlier(&self, claim: &Claim) -> bool {
        self.lock().keys().any(|held| held.item_id == claim.item_id && held != claim)
    }

    /// Keeps a claim no longer.
    pub(super) fn remove(&self, claim: &Claim) {
        self.lock().remove(claim);
    }

    /// The claim was renewed, by a request made at `asked`.
    pub(super) fn renewed(&self, claim: &Claim, asked: Instant) {
        if let Some(held) = self.lock().get_mut(claim) {
            held.renewed = held.renewed.max(asked);
        }
    }

    /// When the claim ends, by this process's clock, unless it is renewed.
    pub(super) fn ends(&self, claim: &Claim) -> Instant {
        self.lock().get(claim).map_or_else(Instant::now, |held| held.renewed + self.length)
    }

    /// Looks after the claims until the last of these tasks is done.
    pub(super) async fn watch(self: Arc<Self>, batches: Batches, tasks: TaskTracker, poll: Duration) {
        let every = poll.min(self.renewal());
        loop {
            tokio::select! {
                biased;
                () = tasks.wait() => return,
                () = tokio::time::sleep(every) => {}
            }
            self.look(&batches).await;
        }
    }

    /// Looks after the claims once: those that do not hold are lost, and those that are due are renewed. What the database
    /// does not answer stays as it is until its time is up.
    async fn look(&self, batches: &Batches) {
        let now = Instant::now();
        let claims: Vec<Claim> = self.lock().keys().cloned().collect();
        match batches.held(claims.clone()).await {
            Ok(holding) => {
                for claim in claims.iter().filter(|claim| !holding.contains(claim)) {
                    self.lose(claim);
                }
            }
            Err(error) => tracing::warn!(%error, "the leases of batch items could not be checked"),
        }
        let due: Vec<Claim> = {
            let held = self.lock();
            let is_due = |held: &Held| !held.lost.is_cancelled() && now >= held.renewed + self.renewal();
            held.iter().filter(|(_, held)| is_due(held)).map(|(claim, _)| claim.clone()).collect()
        };
        for claim in due {
            let asked = Instant::now();
            match batches.renew(&claim, self.length()).await {
                Ok(true) => self.renewed(&claim, asked),
                Ok(false) => self.lose(&claim),
                Err(error) => tracing::warn!(item_id = claim.item_id, %error, "a lease was not renewed"),
            }
        }
    }

    fn lose(&self, claim: &Claim) {
        if let Some(held) = self.lock().get(claim) {
            held.lost.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(owner: &str) -> Claim {
        Claim { batch_id: "b".into(), item_id: "i".into(), owner: owner.into(), attempt: 1 }
    }

    /// An item that this process has lost and claimed again: the end of the first attempt takes nothing from the second.
    #[tokio::test(start_paused = true)]
    async fn claims_of_one_item_are_kept_apart() {
        let leases = Leases::new(Duration::from_secs(30));
        let (first, second) = (claim("w:1"), claim("w:2"));
        let lost = leases.add(&first, Instant::now());
        let kept = leases.add(&second, Instant::now() + Duration::from_secs(10));
        assert!(leases.has_earlier(&second));
        leases.lose(&first);
        assert!(lost.is_cancelled() && !kept.is_cancelled());
        leases.remove(&first);
        assert!(!leases.has_earlier(&second));
        assert_eq!(leases.ends(&second) - Instant::now(), Duration::from_secs(40));
        // A renewal that was asked for earlier does not shorten it.
        leases.renewed(&second, Instant::now());
        assert_eq!(leases.ends(&second) - Instant::now(), Duration::from_secs(40));
        assert_eq!(leases.ends(&first), Instant::now(), "what is not kept has ended");
    }
}

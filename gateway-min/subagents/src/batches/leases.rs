//! What this process has claimed, and until when it may work on it.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chrono::TimeDelta;
use threadkeep_records::{Batches, Claim};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The claims of this process.
pub(super) struct Leases {
    /// How long a claim holds after it was made or renewed.
    length: Duration,
    held: Mutex<HashMap<String, Held>>,
}

struct Held {
    claim: Claim,
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

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a claim that was asked for at `asked`. The token is cancelled when it does not hold any more.
    pub(super) fn add(&self, claim: &Claim, asked: Instant) -> CancellationToken {
        let lost = CancellationToken::new();
        let held = Held { claim: claim.clone(), lost: lost.clone(), renewed: asked };
        self.lock().insert(claim.item_id.clone(), held);
        lost
    }

    /// Keeps a claim no longer.
    pub(super) fn remove(&self, claim: &Claim) {
        self.lock().remove(&claim.item_id);
    }

    /// The claim was renewed, by a request made at `asked`.
    pub(super) fn renewed(&self, claim: &Claim, asked: Instant) {
        if let Some(held) = self.lock().get_mut(&claim.item_id) {
            held.renewed = held.renewed.max(asked);
        }
    }

    /// When the claim ends, by this process's clock, unless it is renewed.
    pub(super) fn ends(&self, claim: &Claim) -> Instant {
        self.lock().get(&claim.item_id).map_or_else(Instant::now, |held| held.renewed + self.length)
    }

    /// Looks after the claims once: those that do not hold are lost, and those that are due are renewed. What the database
    /// does not answer stays as it is until its time is up.
    pub(super) async fn look(&self, batches: &Batches) {
        let now = Instant::now();
        let claims: Vec<Claim> = self.lock().values().map(|held| held.claim.clone()).collect();
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
            let due = held
                .values()
                .filter(|held| !held.lost.is_cancelled() && now >= held.renewed + self.renewal());
            due.map(|held| held.claim.clone()).collect()
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
        if let Some(held) = self.lock().get(&claim.item_id).filter(|held| held.claim == *claim) {
            held.lost.cancel();
        }
    }
}

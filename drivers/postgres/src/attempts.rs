//! Operations are tried again while the database does not answer, and elsewhere if its server was replaced.

use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use threadkeep::{Error, Result};

use crate::error::{SILENT, Trouble, in_doubt, unavailable};
use crate::store::Store;
use crate::watch::Probed;

/// The first pause before a retry; each one is twice as long, up to the longest.
const PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// An attempt at an operation.
pub(crate) type Attempt<'a, T> = BoxFuture<'a, Result<T, Trouble>>;

impl Store {
    /// Retries a read until it finishes, or until patience runs out.
    pub(crate) async fn reading<'a, T>(&self, attempt: impl Fn() -> Attempt<'a, T> + Send) -> Result<T> {
        self.persist(false, move |_| attempt()).await
    }

    /// Retries a write. An attempt whose outcome is in doubt is repeated, and the repeat knows that an earlier one may
    /// have been carried out.
    pub(crate) async fn writing<'a, T>(&self, attempt: impl Fn(bool) -> Attempt<'a, T> + Send) -> Result<T> {
        self.persist(true, attempt).await
    }

    async fn persist<'a, T>(
        &self,
        writes: bool,
        attempt: impl Fn(bool) -> Attempt<'a, T> + Send,
    ) -> Result<T> {
        // The patience counts from then on: when the server was last heard of in the first attempt. Further ones do not
        // prolong it: one that brings the server down each time would be repeated for ever.
        let (mut since, mut is_first) = (Instant::now(), true);
        let (mut pause, mut doubt, mut suspected) = (PAUSE, false, false);
        loop {
            let mut heard = since;
            let done = self.watched(attempt(doubt), &mut heard).await;
            if std::mem::take(&mut is_first) {
                since = heard;
            }
            let reason = match done {
                Ok(done) => {
                    if doubt {
                        tracing::debug!(is_stored = true, "a write in doubt is settled");
                    }
                    return Ok(done);
                }
                Err(Trouble::Final(error)) if doubt => {
                    let error = unsettled(error);
                    if !matches!(error, Error::InDoubt { .. }) {
                        tracing::debug!(is_stored = false, "a write in doubt is settled");
                    }
                    return Err(error);
                }
                Err(Trouble::Final(error)) => return Err(error),
                Err(Trouble::Lost(error)) => {
                    self.connections.renew();
                    if std::mem::replace(&mut suspected, true) {
                        if let Error::HistoryLost { thread, .. } = &error {
                            self.threads.forget(thread);
                        }
                        return Err(if doubt { error.after_doubt() } else { error });
                    }
                    continue;
                }
                Err(Trouble::Again { reason, in_doubt: sent, renew }) => {
                    doubt |= writes && sent;
                    if renew {
                        self.connections.renew();
                    }
                    reason
                }
            };
            if since.elapsed() + pause > self.patience {
                return Err(if doubt { in_doubt(reason) } else { unavailable(reason) });
            }
            tracing::debug!(%reason, "the database did not answer; trying again");
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// Waits for an attempt. While there is no answer, a new connection is opened from time to time: if that leads to
    /// another server than the attempt began with, the one that was asked has been replaced, and may never answer. A
    /// server that is only slow is waited for: the patience counts from when it was last `heard` of. One that takes no
    /// more connections was heard of too, if there is only one: of several, a full standby says nothing of the primary.
    async fn watched<T>(&self, mut attempt: Attempt<'_, T>, heard: &mut Instant) -> Result<T, Trouble> {
        if self.patience.is_zero() {
            return attempt.await;
        }
        let pause = self.patience / 4;
        // Before the attempt takes a connection: it may be one to a server that is about to be left.
        let server = self.connections.server();
        loop {
            if let Ok(done) = tokio::time::timeout(pause, &mut attempt).await {
                return done;
            }
            let probed = tokio::select! {
                done = &mut attempt => return done,
                probed = self.connections.probe(server, pause) => probed,
            };
            match probed {
                Probed::Same => *heard = Instant::now(),
                Probed::Full if self.connections.has_one_server() => *heard = Instant::now(),
                Probed::Full | Probed::Silent if heard.elapsed() < self.patience => {}
                Probed::Full | Probed::Silent | Probed::Other => {
                    // Where there is no room for new connections, the open ones are kept.
                    let renew = probed != Probed::Full;
                    return Err(Trouble::Again { reason: SILENT.to_owned(), in_doubt: true, renew });
                }
            }
        }
    }
}

/// The error of a call whose earlier attempt is in doubt. That attempt may be stored, also if this one found the
/// store damaged; what else a later attempt is refused for says that it is not.
fn unsettled(error: Error) -> Error {
    match error {
        Error::Unavailable { reason, .. } => in_doubt(reason),
        damage @ (Error::Corrupt { .. } | Error::BrokenLineage { .. }) => in_doubt(damage.to_string()),
        settled => settled,
    }
}

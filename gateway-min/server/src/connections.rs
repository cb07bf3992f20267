//! The clients' connections: how many there are, and which one goes if there are too many.
//!
//! A connection either works, on a request that has arrived, or waits for one: for its head, for its body, or unused
//! after a response. Only the waiting ones cost a client nothing, so they make room for others.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::metrics::{Metrics, Refusal};
use threadkeep_config::Gateway;

/// Open files that are left for the stores, models and tools.
const RESERVED_FILES: usize = 256;

/// All connections of a gateway, and their limits.
#[derive(Debug)]
pub struct Connections {
    max: usize,
    pub(crate) header_timeout: Duration,
    pub(crate) body_timeout: Duration,
    metrics: Metrics,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    open: usize,
    next: u64,
    /// The waiting connections, the longest waiting first.
    waiting: BTreeMap<u64, CancellationToken>,
}

impl Connections {
    /// No connections, with limits as configured.
    pub(crate) fn new(settings: &Gateway, metrics: Metrics) -> Arc<Self> {
        Arc::new(Self {
            max: settings.max_connections.min(open_files().saturating_sub(RESERVED_FILES).max(1)),
            header_timeout: Duration::from_secs(settings.header_timeout_seconds),
            body_timeout: Duration::from_secs(settings.body_timeout_seconds),
            metrics,
            state: Mutex::default(),
        })
    }

    /// The number of open connections.
    pub(crate) fn open(&self) -> usize {
        self.lock().open
    }

    /// Counts a new connection, which waits; `None` if there is no room for it.
    pub(crate) fn admit(self: &Arc<Self>) -> Option<Arc<Connection>> {
        let mut state = self.lock();
        if state.open >= self.max {
            let Some((_, longest)) = state.waiting.pop_first() else {
                drop(state);
                self.refused(Refusal::Full);
                return None;
            };
            longest.cancel();
            self.refused(Refusal::Displaced);
        }
        state.open += 1;
        drop(state);
        let connection = Connection {
            all: Arc::clone(self),
            displaced: CancellationToken::new(),
            phase: Mutex::new(Phase::Working),
        };
        connection.waits();
        Some(Arc::new(connection))
    }

    pub(crate) fn refused(&self, why: Refusal) {
        tracing::debug!(why = why.as_str(), "a connection was closed or refused");
        self.metrics.refused(why);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The limit of open files of this process.
fn open_files() -> usize {
    #[cfg(unix)]
    {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX))
    }
    #[cfg(not(unix))]
    usize::MAX
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Since when, as a key of [`State::waiting`].
    Waiting(u64),
    Working,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Connection {
    all: Arc<Connections>,
    /// Cancelled when the connection should make room.
    pub(crate) displaced: CancellationToken,
    phase: Mutex<Phase>,
}

impl Connection {
    /// Whether it works on a request.
    pub(crate) fn is_working(&self) -> bool {
        *self.phase() == Phase::Working
    }

    fn waits(&self) {
        let mut phase = self.phase();
        let mut state = self.all.lock();
        let key = state.next;
        state.next += 1;
        state.waiting.insert(key, self.displaced.clone());
        *phase = Phase::Waiting(key);
    }

    fn works(&self) {
        let mut phase = self.phase();
        if let Phase::Waiting(key) = *phase {
            self.all.lock().waiting.remove(&key);
        }
        *phase = Phase::Working;
    }

    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.works();
        self.all.lock().open -= 1;
    }
}

/// One request of a connection. The connection waits again when this is dropped, after the response.
#[derive(Debug)]
pub(crate) struct Exchange {
    connection: Arc<Connection>,
    answered: AtomicBool,
}

impl Exchange {
    pub(crate) fn new(connection: Arc<Connection>) -> Arc<Self> {
        Arc::new(Self { connection, answered: AtomicBool::new(false) })
    }

    /// The whole request has arrived.
    pub(crate) fn arrived(&self) {
        // A body may be dropped late, when the connection is already waiting for the next request.
        if !self.answered.load(Ordering::Acquire) {
            self.connection.works();
        }
    }

    /// The response is complete, or abandoned.
    pub(crate) fn answered(&self) {
        if !self.answered.swap(true, Ordering::AcqRel) {
            self.connection.waits();
        }
    }

    pub(crate) fn refused(&self, why: Refusal) {
        self.connection.all.refused(why);
    }
}

//! Gates: where a scripted answer waits until a test lets it go on.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use tokio::sync::watch;

/// A point where scripted answers wait. Closed at first; once opened it stays open.
#[derive(Debug, Clone)]
pub struct Gate {
    opened: Arc<watch::Sender<bool>>,
    reached: Arc<watch::Sender<bool>>,
}

/// The gate with this name. There is one per name in the process, so that a test reaches a model that was
/// built from a configuration; tests that run together need names of their own.
pub fn gate(name: &str) -> Gate {
    static GATES: LazyLock<Mutex<HashMap<String, Gate>>> = LazyLock::new(Mutex::default);
    let mut gates = GATES.lock().unwrap_or_else(PoisonError::into_inner);
    gates.entry(name.to_owned()).or_insert_with(Gate::closed).clone()
}

impl Gate {
    fn closed() -> Self {
        let flag = || Arc::new(watch::channel(false).0);
        Self { opened: flag(), reached: flag() }
    }

    /// Lets every waiting and every later answer pass.
    pub fn open(&self) {
        self.opened.send_replace(true);
    }

    /// Returns as soon as an answer has come to the gate.
    pub async fn reached(&self) {
        wait_until_set(&self.reached).await;
    }

    /// Comes to the gate and waits until it is open.
    pub(super) async fn pass(&self) {
        self.reached.send_replace(true);
        wait_until_set(&self.opened).await;
    }
}

async fn wait_until_set(flag: &watch::Sender<bool>) {
    // It fails only when the sender is gone, which `flag` itself prevents.
    let _ = flag.subscribe().wait_for(|set| *set).await;
}

//! Gates: points at which a scripted answer waits for a test.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use tokio::sync::watch;

/// A point where scripted answers wait. Initially closed; once opened it stays open.
#[derive(Debug, Clone)]
pub struct Gate {
    opened: Arc<watch::Sender<bool>>,
    reached: Arc<watch::Sender<bool>>,
}

/// The gate with this name. Names are global to the process, so that a test can reach a model that was built from a
/// configuration; concurrent tests need different names.
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

    /// Returns as soon as an answer has reached the gate.
    pub async fn reached(&self) {
        wait_until_set(&self.reached).await;
    }

    /// Waits at the gate until it is open.
    pub(super) async fn pass(&self) {
        self.reached.send_replace(true);
        wait_until_set(&self.opened).await;
    }
}

async fn wait_until_set(flag: &watch::Sender<bool>) {
    // This fails only if the sender is dropped, which `flag` itself prevents.
    let _ = flag.subscribe().wait_for(|set| *set).await;
}

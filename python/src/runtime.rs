//! The runtime that the stores run on: one a process. A process that forks leaves it behind without its threads, so the
//! child makes its own.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::block_in_place;

use crate::errors::UnavailableError;

/// Threads that run what async callers wait for. Callers that wait themselves need none.
const WORKERS: usize = 2;

static RUNTIME: Mutex<Option<(u32, Arc<Runtime>)>> = Mutex::new(None);

/// The runtime of this process.
///
/// # Errors
/// If its threads cannot be started.
pub(crate) fn current() -> PyResult<Arc<Runtime>> {
    let process = std::process::id();
    let mut current = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((owner, runtime)) = &*current
        && *owner == process
    {
        return Ok(runtime.clone());
    }
    let runtime =
        Builder::new_multi_thread().worker_threads(WORKERS).thread_name("threadkeep").enable_all().build();
    let runtime = runtime.map_err(|error| UnavailableError::new_err(format!("no runtime: {error}")))?;
    let runtime = Arc::new(runtime);
    if let Some(parents) = current.replace((process, runtime.clone())) {
        // Its threads are the parent's: nothing in this process could stop them.
        std::mem::forget(parents);
        draw_own_numbers()?;
    }
    Ok(runtime)
}

/// Waits for a future in this thread. That may be one of the runtime, where Python runs while a result is handed over:
/// a destructor, perhaps.
pub(crate) fn wait<T>(runtime: &Runtime, future: impl Future<Output = T>) -> T {
    match Handle::try_current() {
        Ok(runtime) => block_in_place(|| runtime.block_on(future)),
        Err(_) => runtime.block_on(future),
    }
}

/// Lets this thread draw other random numbers than its parent process, whose generator a fork copies. Versions of channels
/// and marks of threads are drawn from it, and an equal one means that nothing has changed.
///
/// # Errors
/// If the operating system has no random numbers.
pub(crate) fn draw_own_numbers() -> PyResult<()> {
    rand::rng().reseed().map_err(|error| PyOSError::new_err(format!("no random numbers: {error}")))
}

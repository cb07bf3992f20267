//! Processes that fork. The child has the memory of its parent and none of its threads, so stores have to be at rest then:
//! no call is running, which could hold a lock for ever, and no SQLite file is open. SQLite notes in the memory of a process
//! which locks that process holds. A child with its parent's notes takes none, and is nobody for other programs, who then
//! delete the log that it writes to.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::{runtime, store};

/// Set in [`CALLS`] while the process forks.
const FORKING: usize = 1 << (usize::BITS - 1);
/// How often is asked whether that is over, or may begin.
const PAUSE: Duration = Duration::from_millis(1);

/// How many calls are running. Not under a lock, which the child could find locked.
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// A call that is running: the process does not fork meanwhile.
pub(crate) struct Running(());

impl Running {
    /// Waits while the process forks.
    pub(crate) async fn begin() -> Self {
        loop {
            match Self::now() {
                Some(running) => return running,
                None => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// Unless the process forks.
    pub(crate) fn now() -> Option<Self> {
        // Not made if the process forks: dropping it would count.
        moved(|calls| (calls & FORKING == 0).then_some(calls + 1)).then(|| Self(()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        CALLS.fetch_sub(1, Ordering::Release);
    }
}

fn moved(to: impl Fn(usize) -> Option<usize>) -> bool {
    CALLS.fetch_update(Ordering::AcqRel, Ordering::Acquire, to).is_ok()
}

/// Lets Python say when a process forks.
pub(crate) fn watch(py: Python<'_>) -> PyResult<()> {
    let os = py.import("os")?;
    // Elsewhere processes do not fork.
    let Some(register) = os.getattr_opt("register_at_fork")? else { return Ok(()) };
    let hooks = PyDict::new(py);
    hooks.set_item("before", wrap_pyfunction!(before, py)?)?;
    hooks.set_item("after_in_parent", wrap_pyfunction!(after_in_parent, py)?)?;
    hooks.set_item("after_in_child", wrap_pyfunction!(after_in_child, py)?)?;
    register.call((), Some(&hooks)).map(drop)
}

/// Waits until no call is running, and closes files. Calls that come later wait.
#[pyfunction]
fn before(py: Python<'_>) -> PyResult<()> {
    let runtime = runtime::current()?;
    py.detach(|| {
        // Another thread may be forking.
        while !moved(|calls| (calls & FORKING == 0).then_some(calls | FORKING)) {
            sleep(PAUSE);
        }
        while CALLS.load(Ordering::Acquire) != FORKING {
            sleep(PAUSE);
        }
        runtime.block_on(store::rest());
    });
    Ok(())
}

#[pyfunction]
fn after_in_parent() {
    CALLS.fetch_and(!FORKING, Ordering::Release);
}

#[pyfunction]
fn after_in_child() {
    CALLS.store(0, Ordering::Release);
}

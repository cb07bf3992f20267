//! Processes that fork. The child has the memory of its parent and none of its threads, so stores have to be at rest then:
//! no call is running, which could hold a lock for ever, and no SQLite file is open. SQLite notes in the memory of a process
//! which locks that process holds. A child with its parent's notes takes none, and is nobody for other programs, who then
//! delete the log that it writes to.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::call::HAND_OVERS;
use crate::gate::{Gate, Inside, PAUSE};
use crate::{runtime, shared};

/// The calls that are running.
static CALLS: Gate = Gate::new();

/// A call that is running: the process does not fork meanwhile.
pub(crate) struct Running(#[expect(dead_code, reason = "held until the call ends")] Inside);

impl Running {
    /// Waits while the process forks.
    pub(crate) async fn begin() -> Self {
        loop {
            match CALLS.enter() {
                Some(inside) => return Self(inside),
                None => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// At once, for what a call leaves to be done: a process that is about to fork waits for that, too.
    pub(crate) fn now() -> Self {
        Self(CALLS.stay())
    }
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
        // Another thread may be forking: then this waits for it first.
        CALLS.close();
        runtime.block_on(shared::rest());
    });
    // Another thread may have dropped a store meanwhile, which is being closed.
    while !CALLS.is_empty() {
        py.detach(|| CALLS.wait());
    }
    Ok(())
}

#[pyfunction]
fn after_in_parent() {
    CALLS.open();
}

/// Calls functions as if the process forked meanwhile: no call is running, and no SQLite file is open. They must not call
/// a store: that would wait for them.
#[pyfunction]
pub(crate) fn at_rest(py: Python<'_>, functions: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
    before(py)?;
    let done = functions.into_iter().try_for_each(|function| function.call0().map(drop));
    after_in_parent();
    done
}

#[pyfunction]
fn after_in_child() -> PyResult<()> {
    CALLS.reset();
    HAND_OVERS.reset();
    runtime::draw_own_numbers()
}

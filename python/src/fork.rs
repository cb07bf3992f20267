//! Processes that fork. The child has the memory of its parent and none of its threads, so stores have to be at rest then:
//! no call is running, which could hold a lock for ever, and no SQLite file is open. SQLite notes in the memory of a process
//! which locks that process holds. A child with its parent's notes takes none, and is nobody for other programs, who then
//! delete the log that it writes to.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use threadkeep::Error;
use tokio::task::futures::TaskLocalFuture;

use crate::call::{HAND_OVERS, panicked};
use crate::errors::exception;
use crate::gate::{Gate, Inside, PAUSE};
use crate::{runtime, shared};

/// The calls that are running.
static CALLS: Gate = Gate::new();

/// How many threads have a number.
static THREADS: AtomicUsize = AtomicUsize::new(0);
/// The number of the thread that the one which closes a connection waits for, as that of a connection of aiosqlite; 0
/// if there is none. Not under a lock, as a gate.
static AWAITED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Never that of another thread, also of one that has ended.
    static THREAD: usize = THREADS.fetch_add(1, Ordering::Relaxed) + 1;
    /// How often this thread has brought the stores to rest and did not let them go on yet.
    static RESTS: Cell<usize> = const { Cell::new(0) };
}

tokio::task_local! {
    /// The number of the thread that waits for what runs here, on another one.
    static CALLER: usize;
}

/// A call that is running: the process does not fork meanwhile.
pub(crate) struct Running(#[expect(dead_code, reason = "held until the call ends")] Inside);

impl Running {
    /// Waits while the process forks.
    ///
    /// # Errors
    /// [`Error::Unavailable`] in the thread that forks, and in one that it waits for: each would wait for itself.
    /// Python may run there meanwhile: other functions that are called before a fork, handlers of signals, and
    /// destructors, whenever memory is collected.
    pub(crate) async fn begin() -> threadkeep::Result<Self> {
        loop {
            if let Some(inside) = CALLS.enter() {
                return Ok(Self(inside));
            }
            if is_refused() {
                return Err(refusal());
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// At once, for what a call leaves to be done: a process that is about to fork waits for that, too.
    pub(crate) fn now() -> Self {
        Self(CALLS.stay())
    }
}

/// Whether calls of this thread are refused until the stores go on: it would wait for itself.
pub(crate) fn is_refused() -> bool {
    RESTS.get() > 0 || is_awaited()
}

fn is_awaited() -> bool {
    AWAITED.load(Ordering::Acquire) == caller()
}

fn caller() -> usize {
    CALLER.try_with(|number| *number).unwrap_or_else(|_| thread_number())
}

/// A task that this thread waits for. Its calls are refused as this thread's are, also if they began before.
pub(crate) fn for_this_thread<F: Future>(task: F) -> TaskLocalFuture<usize, F> {
    CALLER.scope(caller(), task)
}

fn refusal() -> Error {
    let reason = "this thread forks the process, or closes a connection; make the call later";
    Error::Unavailable { saver: "python", reason: reason.to_owned() }
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
    let rests = RESTS.get();
    if rests > 0 {
        // It is at rest already: a destructor that runs meanwhile closes a connection, too.
        RESTS.set(rests + 1);
        return Ok(());
    }
    let rested = py.detach(|| {
        runtime::wait(&runtime, async {
            // Another thread may be forking: then this waits for it first, unless that one waits for this thread.
            while !CALLS.shut() {
                if is_awaited() {
                    return Err(refusal());
                }
                tokio::time::sleep(PAUSE).await;
            }
            CALLS.wait();
            RESTS.set(1);
            shared::rest().await;
            Ok(())
        })
    });
    rested.map_err(exception)?;
    // Another thread may have dropped a store meanwhile, which is being closed.
    while !CALLS.is_empty() {
        py.detach(|| runtime::wait(&runtime, async { CALLS.wait() }));
    }
    Ok(())
}

#[pyfunction]
fn after_in_parent() {
    let rests = RESTS.get();
    RESTS.set(rests.saturating_sub(1));
    // Another thread may have closed it, where this one could not be brought to rest.
    if rests == 1 {
        CALLS.open();
    }
}

/// Calls functions as if the process forked meanwhile: no call is running, and no SQLite file is open. They may close
/// stores. Other calls fail, and must not be waited for. All are called, also if one raises: the first exception is raised.
/// `awaited` is the [`thread_number`] of a thread that they wait for: its calls fail, too.
#[pyfunction]
#[pyo3(signature = (functions, awaited=0))]
pub(crate) fn at_rest(py: Python<'_>, functions: Vec<Bound<'_, PyAny>>, awaited: usize) -> PyResult<()> {
    before(py)?;
    let _rest = Rest { awaited_before: AWAITED.swap(awaited, Ordering::AcqRel) };
    let mut done = Ok(());
    for function in functions {
        done = done.and(function.call0().map(drop));
    }
    done
}

/// The stores are at rest until it is dropped, also by a panic: other calls would wait for ever.
struct Rest {
    /// A destructor that closes a connection meanwhile waits for another thread.
    awaited_before: usize,
}

impl Drop for Rest {
    fn drop(&mut self) {
        AWAITED.store(self.awaited_before, Ordering::Release);
        after_in_parent();
    }
}

/// The number of this thread.
#[pyfunction]
pub(crate) fn thread_number() -> usize {
    THREAD.with(|number| *number)
}

/// Calls a function in a thread of its own, and waits for it. A signal, such as that of a keyboard interrupt, is
/// handled when the outcome is known.
#[pyfunction]
pub(crate) fn in_thread(py: Python<'_>, function: Py<PyAny>) -> PyResult<Py<PyAny>> {
    let (rests, caller) = (RESTS.get(), caller());
    let call = move || {
        // What this thread waits for must not wait for it.
        RESTS.set(rests);
        CALLER.sync_scope(caller, || Python::attach(move |py| function.call0(py)))
    };
    let called = py.detach(|| Builder::new().spawn(call).map(JoinHandle::join));
    called?.unwrap_or_else(|panic| Err(panicked(&*panic)))
}

#[pyfunction]
fn after_in_child() -> PyResult<()> {
    RESTS.set(0);
    AWAITED.store(0, Ordering::Release);
    CALLS.reset();
    HAND_OVERS.reset();
    runtime::draw_own_numbers()
}

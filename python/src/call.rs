//! A call of the store: Python waits for it, in this thread or in an event loop.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::Poll;
use std::thread;

use pyo3::exceptions::PyRuntimeError;
use pyo3::panic::PanicException;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::errors::exception;
use crate::gate::Gate;
use crate::raw::Output;
use crate::{fork, logs, runtime};

type Running = Pin<Box<dyn Future<Output = threadkeep::Result<Output>> + Send>>;

/// The results that are being handed to event loops, which runs Python on a thread of the runtime. Python ends a thread
/// that wants to run it while the interpreter shuts down, and the frames of Rust on that thread abort the process then.
pub(crate) static HAND_OVERS: Gate = Gate::new();

/// Lets the interpreter wait for results that are being handed over before it shuts down.
pub(crate) fn watch(py: Python<'_>) -> PyResult<()> {
    let at_exit = wrap_pyfunction!(at_exit, py)?;
    py.import("atexit")?.call_method1("register", (at_exit,)).map(drop)
}

/// Waits until no result is being handed over; later ones are dropped, because nobody waits for them.
#[pyfunction]
fn at_exit(py: Python<'_>) -> PyResult<()> {
    py.detach(|| HAND_OVERS.close());
    logs::pass_on(py)
}

/// A call that was not made yet.
#[pyclass(frozen)]
pub(crate) struct Call {
    call: Mutex<Option<Running>>,
    /// What is held until the call ends.
    held: Option<Py<PyAny>>,
}

impl Call {
    pub(crate) fn new(call: impl Future<Output = threadkeep::Result<Output>> + Send + 'static) -> Self {
        Self { call: Mutex::new(Some(Box::pin(call))), held: None }
    }

    /// The same call, which holds an object until it ends, also if nobody waits for it any more.
    pub(crate) fn holding(self, held: Py<PyAny>) -> Self {
        Self { held: Some(held), ..self }
    }

    fn take(&self) -> PyResult<Running> {
        let call = self.call.lock().unwrap_or_else(PoisonError::into_inner).take();
        call.ok_or_else(|| PyRuntimeError::new_err("the call was made already"))
    }
}

#[pymethods]
impl Call {
    /// Makes the call and returns its result. Other Python threads run meanwhile. A signal, such as that of a keyboard
    /// interrupt, is handled when the outcome is known.
    fn wait(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        made(py, self.take()?)
    }

    /// Makes the call while the running event loop does other things. A cancelled task does not cancel the call: it is
    /// executed completely.
    fn __await__(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let call = self.take()?;
        let event_loop = running_loop(py)?;
        let future = event_loop.call_method0("create_future")?;
        if HAND_OVERS.is_closed() || fork::is_refused() {
            // A function that runs at exit has a loop of its own, to which nothing is handed over any more. A
            // destructor may have one, too, on a thread whose calls are refused.
            let (value, error) = outcome(py, made(py, call));
            resolve(&future, value.bind(py), error.bind(py))?;
            return future.call_method0("__await__").map(Bound::unbind);
        }
        let (waiting, event_loop) = (future.clone().unbind(), event_loop.unbind());
        let held = self.held.as_ref().map(|held| held.clone_ref(py));
        runtime::current()?.spawn(fork::for_this_thread(async move {
            let done = caught(call).await;
            let Some(_inside) = HAND_OVERS.enter() else { return };
            Python::try_attach(|py| {
                drop(held);
                let done = done.and_then(|done| {
                    catch_unwind(AssertUnwindSafe(|| {
                        if let Err(error) = logs::pass_on(py) {
                            error.write_unraisable(py, None);
                        }
                        done.map_err(exception)?.into_python(py)
                    }))
                });
                let (value, error) = outcome(py, done.unwrap_or_else(|panic| Err(panicked(&*panic))));
                let handed = settle(py).and_then(|settle| {
                    event_loop.call_method1(py, "call_soon_threadsafe", (settle, waiting, value, error))
                });
                // An event loop that was closed meanwhile has no one waiting.
                drop(handed);
            });
        }));
        future.call_method0("__await__").map(Bound::unbind)
    }
}

fn made(py: Python<'_>, call: Running) -> PyResult<Py<PyAny>> {
    let runtime = runtime::current()?;
    let done = py.detach(|| runtime::wait(&runtime, call));
    // What Python raises meanwhile, such as the exception of a keyboard interrupt, is raised after the call is complete.
    logs::pass_on(py)?;
    done.map_err(exception)?.into_python(py)
}

/// The outcome of a call, or what it panicked with. An uncaught panic would end its task, and its caller would wait for
/// ever.
async fn caught(mut call: Running) -> thread::Result<threadkeep::Result<Output>> {
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| call.as_mut().poll(context))) {
        Ok(done) => done.map(Ok),
        Err(panic) => Poll::Ready(Err(panic)),
    })
    .await
}

/// What Python raises for a panic, as where a thread waits for the call itself.
pub(crate) fn panicked(panic: &(dyn Any + Send)) -> PyErr {
    let text = match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
        (Some(text), _) => text.as_str(),
        (None, Some(text)) => *text,
        (None, None) => "panic from Rust code",
    };
    PanicException::new_err(text.to_owned())
}

/// What a call returned, and what it raised: one of them is `None`.
fn outcome(py: Python<'_>, done: PyResult<Py<PyAny>>) -> (Py<PyAny>, Py<PyAny>) {
    match done {
        Ok(value) => (value, py.None()),
        Err(error) => (py.None(), error.into_value(py).into_any()),
    }
}

fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    static RUNNING: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let running = RUNNING
        .get_or_try_init(py, || py.import("asyncio")?.getattr("get_running_loop").map(Bound::unbind))?;
    running.bind(py).call0()
}

/// Python's function [`resolve`].
fn settle(py: Python<'_>) -> PyResult<&Py<PyAny>> {
    static SETTLE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    SETTLE.get_or_try_init(py, || wrap_pyfunction!(resolve, py).map(|resolve| resolve.into_any().unbind()))
}

/// Resolves a waiting future, in its event loop. A cancelled one stays as it is.
#[pyfunction]
fn resolve(future: &Bound<'_, PyAny>, value: &Bound<'_, PyAny>, error: &Bound<'_, PyAny>) -> PyResult<()> {
    if !future.call_method0("done")?.is_truthy()? {
        if error.is_none() {
            future.call_method1("set_result", (value,))?;
        } else {
            future.call_method1("set_exception", (error,))?;
        }
    }
    Ok(())
}

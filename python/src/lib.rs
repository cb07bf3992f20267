//! The native part of the Python package `threadkeep`: a store, its calls, and values on their way to Python.
//!
//! Values are encoded before a call and decoded after it, never while the store is waited for.

mod call;
mod codec;
mod errors;
mod fork;
mod gate;
mod known;
mod lists;
mod logs;
mod put;
mod raw;
mod runtime;
mod shape;
mod shared;
mod store;

use pyo3::prelude::*;

/// The native part of the package.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    errors::add(module)?;
    fork::watch(module.py())?;
    call::watch(module.py())?;
    logs::watch();
    module.add_function(wrap_pyfunction!(fork::at_rest, module)?)?;
    module.add_function(wrap_pyfunction!(fork::in_thread, module)?)?;
    module.add_function(wrap_pyfunction!(fork::thread_number, module)?)?;
    module.add_class::<store::Store>()?;
    module.add_class::<call::Call>()?;
    module.add_class::<raw::RawTuple>()?;
    module.add_class::<raw::RawHistory>()?;
    module.add_class::<raw::Decoder>()?;
    module.add_class::<codec::Codec>()?;
    module.add_class::<store::MovedPut>()
}

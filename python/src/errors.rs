//! The engine's errors as Python exceptions.

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::{PyErr, create_exception};
use threadkeep::Error;

create_exception!(threadkeep, ThreadkeepError, PyException, "An error of the checkpoint store.");
create_exception!(
    threadkeep,
    InvalidInputError,
    ThreadkeepError,
    "An argument is invalid; nothing was changed."
);
create_exception!(threadkeep, NotFoundError, ThreadkeepError, "The requested checkpoint does not exist.");
create_exception!(
    threadkeep,
    ConflictError,
    ThreadkeepError,
    "Another writer moved the thread's head. Read it and decide again."
);
create_exception!(
    threadkeep,
    StaleError,
    ThreadkeepError,
    "The thread was changed since it was read. Read it again and retry."
);
create_exception!(
    threadkeep,
    HistoryLostError,
    ThreadkeepError,
    "The store lost changes that it had acknowledged. Read the thread again and repeat what is missing."
);
create_exception!(
    threadkeep,
    BrokenLineageError,
    ThreadkeepError,
    "A row that the checkpoint needs is missing. Restore a backup."
);
create_exception!(threadkeep, CorruptError, ThreadkeepError, "Stored bytes are damaged. Restore a backup.");
create_exception!(
    threadkeep,
    NewerFormatError,
    ThreadkeepError,
    "A newer version of threadkeep wrote the store. Upgrade threadkeep."
);
create_exception!(
    threadkeep,
    UnavailableError,
    ThreadkeepError,
    "The store did not execute the call; nothing was written. Retry later."
);
create_exception!(
    threadkeep,
    InDoubtError,
    ThreadkeepError,
    "The call may have been executed, or some of its steps. Repeating it is safe."
);

/// The exception for an error.
pub(crate) fn exception(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::NotFound { .. } => NotFoundError::new_err(text),
        Error::Conflict { .. } => ConflictError::new_err(text),
        Error::Stale { .. } => StaleError::new_err(text),
        Error::HistoryLost { .. } => HistoryLostError::new_err(text),
        Error::BrokenLineage { .. } => BrokenLineageError::new_err(text),
        Error::Corrupt { .. } => CorruptError::new_err(text),
        Error::NewerFormat { .. } => NewerFormatError::new_err(text),
        Error::Unavailable { .. } => UnavailableError::new_err(text),
        Error::InDoubt { .. } => InDoubtError::new_err(text),
        Error::InvalidInput(_) => InvalidInputError::new_err(text),
        _ => ThreadkeepError::new_err(text),
    }
}

/// Adds the exceptions to the module.
pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("ThreadkeepError", py.get_type::<ThreadkeepError>())?;
    module.add("InvalidInputError", py.get_type::<InvalidInputError>())?;
    module.add("NotFoundError", py.get_type::<NotFoundError>())?;
    module.add("ConflictError", py.get_type::<ConflictError>())?;
    module.add("StaleError", py.get_type::<StaleError>())?;
    module.add("HistoryLostError", py.get_type::<HistoryLostError>())?;
    module.add("BrokenLineageError", py.get_type::<BrokenLineageError>())?;
    module.add("CorruptError", py.get_type::<CorruptError>())?;
    module.add("NewerFormatError", py.get_type::<NewerFormatError>())?;
    module.add("UnavailableError", py.get_type::<UnavailableError>())?;
    module.add("InDoubtError", py.get_type::<InDoubtError>())
}

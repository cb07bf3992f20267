//! Errors of calls that take several steps.

use threadkeep::Error;

/// The error of a call that failed after a step was done: it no longer says that nothing was written. `done` says what was.
#[must_use]
pub fn after(done: &str, error: Error) -> Error {
    match error {
        Error::Unavailable { saver, reason } => {
            Error::InDoubt { saver, reason: format!("{done}, and the rest was not done: {reason}") }
        }
        Error::InvalidInput(reason) => {
            Error::InvalidInput(format!("{reason}; {done}, and the rest was not done"))
        }
        other => other,
    }
}

//! Work on many rows is done on a thread of its own: on one of the runtime it would keep everything else waiting, for a third
//! of a second where a thread has 1,500 turns.

use std::panic::resume_unwind;

use crate::error::{CLOSED, Trouble, unavailable};

/// Work on so many rows, or more, is worth a change of threads: some milliseconds.
const MANY: usize = 500;

/// Does work on a number of rows, elsewhere if they are many.
///
/// # Errors
/// Those of the work, and [`threadkeep::Error::Unavailable`] if the runtime is shut down.
pub(crate) async fn aside<T, E>(
    rows: usize,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, Trouble>
where
    T: Send + 'static,
    E: Send + 'static,
    Trouble: From<E>,
{
    if rows < MANY {
        return Ok(work()?);
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done?),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            Err(_) => Err(unavailable(CLOSED).into()),
        },
    }
}

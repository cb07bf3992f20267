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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn many_rows_are_worked_on_while_other_tasks_go_on() {
        let (say, heard) = mpsc::channel();
        let wait = move || {
            heard.recv_timeout(Duration::from_mins(10)).map_err(|error| unavailable(error.to_string()))
        };
        let (heard, said) = futures::join!(aside(MANY, wait), async move { say.send(7) });
        said.unwrap();
        assert!(matches!(heard, Ok(7)));
    }

    #[tokio::test]
    #[should_panic(expected = "in the work")]
    async fn a_panic_is_passed_on() {
        let _ = aside(MANY, || -> Result<(), Trouble> { panic!("in the work") }).await;
    }
}

//! Work on many rows is done on another thread: on one of the runtime it would keep everything else waiting, for a third of a
//! second where a thread has 1,500 turns. Work that goes over a whole long thread gives way to what is short, too.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread::Builder;

use tokio::sync::oneshot;

use crate::error::{CLOSED, Trouble, unavailable};

/// From this number of rows on, work is worth a change of threads: it takes some milliseconds.
const MANY: usize = 500;
/// From this number of rows on, work gives way: it takes a tenth of a second.
const LONG: usize = 5_000;
/// How much longer others are served than such work, as `nice` counts: a quarter of the time falls to it beside one other thread.
#[cfg(target_os = "linux")]
const NICE: i32 = 5;

/// Does work on a number of rows, elsewhere if they are many.
///
/// # Errors
/// Those of the work, and [`threadkeep::Error::Unavailable`] if the runtime is shut down or the system starts no thread.
pub(crate) async fn aside<T, E>(
    rows: usize,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, Trouble>
where
    T: Send + 'static,
    E: Send + 'static,
    Trouble: From<E>,
{
    let done = match rows {
        0..MANY => return Ok(work()?),
        MANY..LONG => match tokio::task::spawn_blocking(work).await {
            Ok(done) => Ok(done),
            Err(error) => Err(error.try_into_panic().ok()),
        },
        LONG.. => given_way(work).await?,
    };
    match done {
        Ok(done) => Ok(done?),
        Err(Some(panic)) => resume_unwind(panic),
        Err(None) => Err(unavailable(CLOSED).into()),
    }
}

/// Drops what holds a number of rows, elsewhere if they are many: that takes a tenth of the time in which it was made.
pub(crate) fn dropped<T: Send + 'static>(rows: usize, value: T) {
    if rows >= MANY {
        // Without a thread, it is dropped here.
        drop(quiet(move || drop(value)));
    }
}

/// Does work on a thread of its own that gives way to others. `Err` is its panic; none if it was not done.
async fn given_way<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<Result<T, Option<Box<dyn Any + Send>>>, Trouble> {
    let (reply, done) = oneshot::channel();
    // Nothing of the work is seen again after its panic.
    let started = quiet(move || drop(reply.send(catch_unwind(AssertUnwindSafe(work)))));
    started.map_err(|error| unavailable(error.to_string()))?;
    Ok(done.await.map_or(Err(None), |done| done.map_err(Some)))
}

/// Starts a thread that gives way to others.
fn quiet(work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let thread = Builder::new().name("threadkeep-postgres".to_owned()).spawn(move || {
        #[cfg(target_os = "linux")]
        give_way();
        work();
    });
    thread.map(drop)
}

/// Lets this thread give way, unless the whole process does. Elsewhere than on Linux it would be the whole process.
#[cfg(target_os = "linux")]
fn give_way() {
    if rustix::process::getpriority_process(None) == Ok(0) {
        // If this fails, the work runs as others do.
        let _ = rustix::process::nice(NICE);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn many_rows_are_worked_on_while_other_tasks_go_on() {
        for rows in [MANY, LONG] {
            let (say, heard) = mpsc::channel();
            let wait = move || {
                heard.recv_timeout(Duration::from_mins(10)).map_err(|error| unavailable(error.to_string()))
            };
            let (heard, said) = futures::join!(aside(rows, wait), async move { say.send(7) });
            said.unwrap();
            assert!(matches!(heard, Ok(7)));
        }
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn work_on_a_long_thread_gives_way_and_no_other() {
        let nice =
            async |rows| aside(rows, || Ok::<_, Trouble>(rustix::process::getpriority_process(None))).await;
        let before = rustix::process::getpriority_process(None).unwrap();
        let long = if before == 0 { NICE } else { before };
        for (rows, expected) in
            [(MANY - 1, before), (MANY, before), (LONG, long), (MANY, before), (0, before)]
        {
            assert!(matches!(nice(rows).await, Ok(Ok(found)) if found == expected), "{rows} rows");
        }
    }

    #[tokio::test]
    async fn what_holds_many_rows_is_dropped_while_other_tasks_go_on() {
        struct Waits(mpsc::Receiver<()>, mpsc::Sender<std::thread::ThreadId>);
        impl Drop for Waits {
            fn drop(&mut self) {
                let _ = self.0.recv_timeout(Duration::from_mins(10));
                self.1.send(std::thread::current().id()).unwrap();
            }
        }
        let ((go, wait), (say, heard)) = (mpsc::channel(), mpsc::channel());
        dropped(MANY, Waits(wait, say));
        go.send(()).unwrap();
        assert_ne!(heard.recv_timeout(Duration::from_mins(10)).unwrap(), std::thread::current().id());
    }

    #[tokio::test]
    async fn a_panic_is_passed_on() {
        for rows in [0, MANY, LONG] {
            let work = aside(rows, || -> Result<(), Trouble> { panic!("in the work") });
            let panic = AssertUnwindSafe(work).catch_unwind().await.err().unwrap();
            assert_eq!(panic.downcast_ref::<&str>(), Some(&"in the work"), "{rows} rows");
        }
    }
}

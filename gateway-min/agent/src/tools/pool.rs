//! Threads for the work of tools that blocks.
//!
//! They are few, and apart from the threads on which the rest of the process blocks: what a model asks a tool to do must
//! not keep logins or the stores waiting. A thread cannot be interrupted, so work that may take long looks at its
//! [`Stop`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, oneshot};

use super::ToolError;

/// The maximum number of threads; further calls wait.
pub(super) const MAX_THREADS: usize = 8;
/// One permit for each thread.
pub(super) static THREADS: Semaphore = Semaphore::const_new(MAX_THREADS);
/// How long a call may work.
const MAX_TIME: Duration = Duration::from_secs(20);

/// Whether a call should stop.
#[derive(Debug)]
pub(super) struct Stop {
    cancelled: AtomicBool,
    deadline: Instant,
}

impl Stop {
    /// A stop after `time`.
    pub(super) fn after(time: Duration) -> Self {
        Self { cancelled: AtomicBool::new(false), deadline: Instant::now() + time }
    }

    /// Whether the call was dropped, or has worked for as long as a call may.
    pub(super) fn is_due(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed) || Instant::now() >= self.deadline
    }

    /// What the model reads about a call that was stopped.
    pub(super) fn notice() -> String {
        format!("[stopped after {} seconds: search fewer files or use a simpler pattern]", MAX_TIME.as_secs())
    }
}

/// Sets the stop of a call when the call is dropped.
struct Cancelling(Arc<Stop>);

impl Drop for Cancelling {
    fn drop(&mut self) {
        self.0.cancelled.store(true, Ordering::Relaxed);
    }
}

/// Runs work that blocks on one of the tools' threads, when one is free.
///
/// Dropping the future sets the work's [`Stop`]; work that has not started never does.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce(&Stop) -> Result<T, ToolError> + Send + 'static,
) -> Result<T, ToolError> {
    on(&THREADS, work).await
}

async fn on<T: Send + 'static>(
    threads: &'static Semaphore,
    work: impl FnOnce(&Stop) -> Result<T, ToolError> + Send + 'static,
) -> Result<T, ToolError> {
    let failed = |error: &dyn std::fmt::Display| {
        Err(ToolError::Failed(format!("the tool stopped unexpectedly: {error}")))
    };
    let permit = match threads.acquire().await {
        Ok(permit) => permit,
        Err(error) => return failed(&error),
    };
    let stop = Arc::new(Stop::after(MAX_TIME));
    let cancelling = Cancelling(Arc::clone(&stop));
    let (sender, result) = oneshot::channel();
    // Not a thread of the runtime, whose shutdown would wait for it.
    let started = std::thread::Builder::new().name("threadkeep-tool".to_owned()).spawn(move || {
        let done = work(&stop);
        drop(permit);
        // Fails if the call was dropped.
        let _ = sender.send(done);
    });
    let result = match started {
        Ok(_) => result.await.unwrap_or_else(|_| failed(&"it panicked")),
        Err(error) => failed(&error),
    };
    drop(cancelling);
    result
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const PATIENCE: Duration = Duration::from_mins(10);

    /// Works until it is stopped, and reports both.
    async fn until_stopped(threads: &'static Semaphore, report: mpsc::Sender<&'static str>) {
        let work = move |stop: &Stop| {
            report.send("started").unwrap();
            while !stop.is_due() {
                std::thread::sleep(Duration::from_millis(1));
            }
            // The deadline has not passed on any machine: it is the drop.
            assert!(stop.cancelled.load(Ordering::Relaxed));
            report.send("stopped").unwrap();
            Ok(())
        };
        on(threads, work).await.unwrap();
    }

    #[tokio::test]
    async fn a_dropped_call_stops_its_work_and_gives_its_thread_to_the_next() {
        static THREADS: Semaphore = Semaphore::const_new(1);
        let (report, reports) = mpsc::channel();
        let call = tokio::spawn(until_stopped(&THREADS, report));
        let next = move || reports.recv_timeout(PATIENCE).unwrap();
        let (started, next) = tokio::task::spawn_blocking(move || (next(), next)).await.unwrap();
        assert_eq!(started, "started");
        let waiting =
            tokio::spawn(on(&THREADS, |_| -> Result<(), ToolError> { unreachable!("never starts") }));
        tokio::task::yield_now().await;
        waiting.abort();
        assert!(waiting.await.unwrap_err().is_cancelled());
        call.abort();
        assert_eq!(tokio::task::spawn_blocking(next).await.unwrap(), "stopped");
        assert_eq!(on(&THREADS, |_| Ok(7)).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn work_that_panics_is_an_error_and_returns_its_thread() {
        static THREADS: Semaphore = Semaphore::const_new(1);
        let error = on(&THREADS, |_| -> Result<(), ToolError> { panic!("expected by the test") });
        let error = error.await.unwrap_err().to_string();
        assert_eq!(error, "the tool stopped unexpectedly: it panicked");
        assert_eq!(on(&THREADS, |_| Ok(7)).await.unwrap(), 7);
    }

    /// Tools fill their threads; the runtime has as many free as before, and its shutdown does not wait for them.
    #[test]
    fn tools_at_work_keep_neither_the_runtime_nor_its_shutdown_waiting() {
        static THREADS: Semaphore = Semaphore::const_new(4);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .max_blocking_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(std::sync::Mutex::new(released));
        for _ in 0..4 {
            let released = Arc::clone(&released);
            runtime.spawn(on(&THREADS, move |_| {
                // Does not look at its stop.
                let _ = released.lock().unwrap().recv();
                Ok(())
            }));
        }
        runtime.block_on(async {
            while THREADS.available_permits() > 0 {
                tokio::task::yield_now().await;
            }
            assert_eq!(tokio::task::spawn_blocking(|| 7).await.unwrap(), 7);
        });
        drop(runtime);
        drop(release);
    }
}

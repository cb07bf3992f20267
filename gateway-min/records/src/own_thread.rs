//! A thread for what must go on while a process is busy.

use std::io;
use std::thread;

use tokio::runtime::Builder;
use tokio::sync::oneshot;

/// Does work on a thread and a runtime of its own, until it ends. Returns when it has begun. Leases are renewed so: a process
/// whose threads are busy for long is not dead.
///
/// # Errors
/// There can be no such thread, or no such runtime.
pub async fn on_its_own_thread(
    name: &str,
    work: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let (begun, begins) = oneshot::channel();
    let working = move || {
        // Here, because it may not be dropped on the caller's runtime.
        let built = Builder::new_current_thread().enable_all().build();
        let (runtime, built) =
            built.map_or_else(|error| (None, Err(error)), |runtime| (Some(runtime), Ok(())));
        // The caller may have been given up meanwhile.
        let _ = begun.send(built);
        if let Some(runtime) = runtime {
            runtime.block_on(work);
        }
    };
    thread::Builder::new().name(name.to_owned()).spawn(working)?;
    begins.await.map_err(io::Error::other)?
}

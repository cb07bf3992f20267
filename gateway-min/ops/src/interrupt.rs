//! Ctrl-C during a pass over many threads: the first one ends the pass after the thread that it works on, so that the
//! command can report what it did; the second one ends the command at once. Each thread is changed completely or not at
//! all either way.

use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// A pass has begun: Ctrl-C no longer ends the process by itself.
static WATCHED: AtomicBool = AtomicBool::new(false);
/// Ctrl-C was pressed.
static ASKED: AtomicBool = AtomicBool::new(false);
/// It was pressed again.
static AGAIN: Notify = Notify::const_new();

/// Begins a pass.
pub(crate) fn watch() {
    // Without a runtime there is nothing that could be interrupted in between.
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    if WATCHED.swap(true, Ordering::Relaxed) {
        return;
    }
    #[cfg(unix)]
    let Ok(mut pressed) = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt()) else {
        return;
    };
    #[cfg(windows)]
    let Ok(mut pressed) = tokio::signal::windows::ctrl_c() else { return };
    runtime.spawn(async move {
        if pressed.recv().await.is_none() {
            return;
        }
        ASKED.store(true, Ordering::Relaxed);
        // Nobody may be reading stderr.
        let _ =
            writeln!(std::io::stderr(), "\nstopping after the current thread; Ctrl-C again stops at once");
        if pressed.recv().await.is_some() {
            AGAIN.notify_one();
        }
    });
}

/// Whether the pass is to end.
pub(crate) fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}

/// Waits until the command is to end at once.
pub(crate) async fn again() {
    AGAIN.notified().await;
}

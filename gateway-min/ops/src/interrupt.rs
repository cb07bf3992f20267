//! Ctrl-C, SIGTERM and SIGHUP during a command.
//!
//! In a pass over many threads, files or other parts, such as the batches of one thread, the first one ends the pass
//! after the part that it works on, so that the command can report what it did. Otherwise, and the second time, it ends
//! the command at once: its future is dropped, which removes what is half made. Each change happens completely or not
//! at all either way.

use std::io::Write as _;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use super::error::Exit;

/// How long a command has to end at once. One that computes, or waits for its input, does not notice.
const GRACE: Duration = Duration::from_secs(3);

/// The passes that would end after the part at work.
static PASSES: AtomicUsize = AtomicUsize::new(0);
/// A pass is to end.
static ASKED: AtomicBool = AtomicBool::new(false);
/// The command is to end.
static AT_ONCE: Notify = Notify::const_new();

/// A pass at work, until it is dropped.
pub(crate) struct Watched(());

impl Watched {
    /// Begins a pass, which looks at [`asked`] after each part.
    pub(crate) fn new() -> Self {
        PASSES.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        PASSES.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Ctrl-C and, on Unix, SIGTERM and SIGHUP. While there is one of these, they do not end the process by themselves.
pub struct Signals {
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    /// The terminal is gone; `None` if the process was started to outlive it.
    #[cfg(unix)]
    hangup: Option<tokio::signal::unix::Signal>,
    #[cfg(windows)]
    interrupt: tokio::signal::windows::CtrlC,
}

impl Signals {
    /// Catches them from now on.
    ///
    /// # Errors
    /// If the system refuses the handlers.
    pub fn new() -> std::io::Result<Self> {
        #[cfg(unix)]
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            #[cfg(unix)]
            interrupt: signal(SignalKind::interrupt())?,
            #[cfg(unix)]
            terminate: signal(SignalKind::terminate())?,
            #[cfg(unix)]
            hangup: if ignores_hangup() { None } else { Some(signal(SignalKind::hangup())?) },
            #[cfg(windows)]
            interrupt: tokio::signal::windows::ctrl_c()?,
        })
    }

    /// Waits for the next one; false if there will be none.
    pub async fn next(&mut self) -> bool {
        #[cfg(unix)]
        {
            let Self { interrupt, terminate, hangup } = self;
            let hung_up = async {
                match hangup {
                    Some(hangup) => hangup.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                received = interrupt.recv() => received.is_some(),
                received = terminate.recv() => received.is_some(),
                received = hung_up => received.is_some(),
            }
        }
        #[cfg(not(unix))]
        {
            self.interrupt.recv().await.is_some()
        }
    }
}

/// Whether this process ignores SIGHUP, as one that `nohup` starts: a handler would undo that. Only Linux says so;
/// elsewhere the signal is not caught.
#[cfg(unix)]
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // The lowest bit is that of the signal, whose number is 1.
    ignored.is_none_or(|mask| mask & 1 == 1)
}

/// From now on signals end the command as this module says, and not the process by themselves.
pub(crate) fn listen() {
    // Without handlers, the default action of a signal ends the process.
    let Ok(mut signals) = Signals::new() else { return };
    tokio::spawn(async move {
        while signals.next().await {
            if PASSES.load(Ordering::Relaxed) > 0 && !ASKED.swap(true, Ordering::Relaxed) {
                // Nobody may be reading stderr.
                let _ = writeln!(
                    std::io::stderr(),
                    "\nstopping after the current step; Ctrl-C again stops at once"
                );
                continue;
            }
            AT_ONCE.notify_one();
            tokio::select! {
                () = tokio::time::sleep(GRACE) => {}
                _ = signals.next() => {}
            }
            std::process::exit(Exit::Interrupted as i32);
        }
    });
}

#[cfg(test)]
thread_local! {
    /// [`ASKED`] of the command of one test, beside others.
    static ASKED_HERE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// What Ctrl-C does while there is a pass, to the command of this test.
#[cfg(test)]
pub(crate) fn ask_here() {
    ASKED_HERE.set(PASSES.load(Ordering::Relaxed) > 0);
}

/// Ends that: the next test may run on the same thread.
#[cfg(test)]
pub(crate) fn forget_here() {
    ASKED_HERE.set(false);
}

/// Whether the pass is to end.
pub(crate) fn asked() -> bool {
    #[cfg(test)]
    if ASKED_HERE.get() {
        return true;
    }
    ASKED.load(Ordering::Relaxed)
}

/// Waits until the command is to end at once.
pub(crate) async fn at_once() {
    AT_ONCE.notified().await;
}

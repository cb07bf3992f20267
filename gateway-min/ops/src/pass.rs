//! A pass over threads: what concerns one of them does not end it.

use threadkeep::id::ThreadId;

use super::error::{OpsError, Result};
use super::output::{number, one_line};
use super::pace::Pace;
use super::progress::Progress;
use super::target::Target;

/// A pass, and what went wrong in it.
///
/// A thread that is damaged, or that somebody keeps writing to, is named at once and left as it is; the pass goes on with
/// the others, and ends with an error.
pub(crate) struct Pass<'t> {
    progress: Progress,
    /// The store to whose other users it leaves the server in between, if it does.
    paced: Option<(&'t Target, Pace)>,
    /// What could not be done to a thread.
    verb: &'static str,
    threads: usize,
    /// Whether the threads were listed, not named. One that is missing was deleted since.
    listed: bool,
    left_out: u64,
    stopped: Option<OpsError>,
}

impl<'t> Pass<'t> {
    /// A pass over this number of threads, of each of which it is said what could not be done: `converted`.
    pub(crate) fn new(progress: Progress, verb: &'static str, threads: usize, listed: bool) -> Self {
        Self { progress, paced: None, verb, threads, listed, left_out: 0, stopped: None }
    }

    /// The same, with pauses for others that use the server of this store.
    pub(crate) fn giving_way(self, target: &'t Target) -> Self {
        Self { paced: Some((target, Pace::new())), ..self }
    }

    /// Whether there is time for the next thread, after a pause if others use the server.
    pub(crate) async fn goes_on(&mut self) -> bool {
        if self.stopped.is_none() {
            if let Some((target, pace)) = &mut self.paced {
                pace.rest(target).await;
            }
            self.stopped = self.progress.interrupted().err();
        }
        self.stopped.is_none()
    }

    /// Whether Ctrl-C ends it within a thread, between two changes.
    ///
    /// # Errors
    /// [`OpsError::Interrupted`] if so.
    pub(crate) fn interrupted(&self) -> Result<()> {
        self.progress.interrupted()
    }

    /// Notes what became of a thread, and returns what was done, if it was.
    pub(crate) fn note<T>(&mut self, thread: &ThreadId, done: Result<T>) -> Option<T> {
        match done {
            Ok(done) => {
                self.progress.next();
                return Some(done);
            }
            Err(OpsError::NoThread { .. }) if self.listed => {}
            Err(error) if error.is_of_one_thread() && (self.listed || self.threads > 1) => {
                self.left_out += 1;
                let (thread, error) = (one_line(thread.as_str()), one_line(&error.to_string()));
                self.progress.say(&format!("error: thread {thread}: {error}"));
            }
            Err(error) => self.stopped = Some(error),
        }
        None
    }

    /// Ends the pass.
    ///
    /// # Errors
    /// Why it ended early; else that threads were left out, or could not be listed.
    pub(crate) fn end(self, unlisted: Option<OpsError>) -> Result<()> {
        let Self { verb, threads, left_out, stopped, .. } = self;
        if let Some(error) = stopped.or(unlisted) {
            return Err(error);
        }
        if left_out > 0 {
            return Err(OpsError::Unsupported(format!(
                "{} of {} threads could not be {verb}: see above; repeat the command for those in use, and restore a backup \
                 (`threadkeep backup --out FILE` makes one, see docs/backup.md) for those that are damaged",
                number(left_out),
                number(threads as u64)
            )));
        }
        Ok(())
    }
}

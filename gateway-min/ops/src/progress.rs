//! Progress of a long operation: a bar if stderr is a terminal, otherwise an occasional line.

use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::error::{OpsError, Result};
use super::interrupt::{self, Watched};
use super::output::number;

/// How often a line is written if there is no bar.
const PACE: Duration = Duration::from_secs(10);

/// Of a pass that changes things and was interrupted.
const STAYS: &str = "; what was done stays, and the same command does the rest";
/// Of one that only reads.
const AGAIN: &str = "; the same command begins again";

/// How far a long operation is.
pub(crate) struct Progress {
    what: &'static str,
    rest: &'static str,
    bar: Option<ProgressBar>,
    total: u64,
    done: u64,
    said: Instant,
    /// Ctrl-C ends it after a part. With a single part there is nothing to wait for.
    _watched: Option<Watched>,
}

impl Progress {
    /// An operation that changes `total` parts. A single part is not reported.
    pub(crate) fn new(what: &'static str, total: u64) -> Self {
        Self::of(what, STAYS, total)
    }

    /// An operation that only reads them, and begins again when it is repeated.
    pub(crate) fn reading(what: &'static str, total: u64) -> Self {
        Self::of(what, AGAIN, total)
    }

    fn of(what: &'static str, rest: &'static str, total: u64) -> Self {
        let bar = (total > 1 && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(total);
            if let Ok(style) =
                ProgressStyle::with_template("[{bar:40}] {human_pos} of {human_len} {msg}, {eta} left")
            {
                bar.set_style(style);
            }
            bar.with_message(what)
        });
        let watched = (total > 1).then(Watched::new);
        Self { what, rest, bar, total, done: 0, said: Instant::now(), _watched: watched }
    }

    /// Records that `done` parts are done.
    pub(crate) fn at(&mut self, done: u64) {
        self.done = done;
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        } else if self.total > 1 && self.said.elapsed() >= PACE {
            self.said = Instant::now();
            // Nobody may be reading stderr.
            let _ = writeln!(std::io::stderr(), "{} of {} {}", number(done), number(self.total), self.what);
        }
    }

    /// Prints a line above the bar.
    pub(crate) fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(line),
            // Nobody may be reading stderr.
            None => drop(writeln!(std::io::stderr(), "{line}")),
        }
    }

    /// Whether Ctrl-C ends the operation here.
    ///
    /// # Errors
    /// [`OpsError::Interrupted`] if so.
    pub(crate) fn interrupted(&self) -> Result<()> {
        if interrupt::asked() { Err(self.error()) } else { Ok(()) }
    }

    pub(crate) fn error(&self) -> OpsError {
        let (done, total) = (number(self.done), number(self.total));
        OpsError::Interrupted { what: self.what, done, total, rest: self.rest }
    }

    /// Records one more part.
    pub(crate) fn next(&mut self) {
        self.at(self.done + 1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_pass_that_only_read_promises_no_rest() {
        let mut checking = Progress::reading("threads checked", 3);
        checking.next();
        assert_eq!(
            checking.error().to_string(),
            "interrupted: 1 of 3 threads checked; the same command begins again"
        );
        let error = Progress::new("threads converted", 3).error().to_string();
        assert!(error.ends_with("what was done stays, and the same command does the rest"), "{error}");
    }
}

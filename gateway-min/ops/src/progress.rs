//! Progress of a long operation: a bar if stderr is a terminal, otherwise an occasional line.

use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// How often a line is written if there is no bar.
const PACE: Duration = Duration::from_secs(10);

/// How far a long operation is.
pub(crate) struct Progress {
    what: &'static str,
    bar: Option<ProgressBar>,
    total: u64,
    done: u64,
    said: Instant,
}

impl Progress {
    /// An operation with `total` parts. A single part is not reported.
    pub(crate) fn new(what: &'static str, total: u64) -> Self {
        let bar = (total > 1 && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(total);
            if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:40}] {pos}/{len}, {eta} left") {
                bar.set_style(style);
            }
            bar.with_message(what)
        });
        Self { what, bar, total, done: 0, said: Instant::now() }
    }

    /// Records that `done` parts are done.
    pub(crate) fn at(&mut self, done: u64) {
        self.done = done;
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        } else if self.said.elapsed() >= PACE {
            self.said = Instant::now();
            // Nobody may be reading stderr.
            let _ = writeln!(std::io::stderr(), "{}: {done} of {}", self.what, self.total);
        }
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

//! Progress of long work: a bar if stderr is a terminal, else a line now and then.

use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// How often a line is written where no bar can be.
const PACE: Duration = Duration::from_secs(10);

/// How far a piece of long work is.
pub(crate) struct Progress {
    what: &'static str,
    bar: Option<ProgressBar>,
    total: u64,
    done: u64,
    said: Instant,
}

impl Progress {
    /// Work of so many parts. One part alone is not worth a word.
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

    /// Takes note that so many parts are done now.
    pub(crate) fn at(&mut self, done: u64) {
        self.done = done;
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        } else if self.said.elapsed() >= PACE {
            self.said = Instant::now();
            // Nobody may be there to read it.
            let _ = writeln!(std::io::stderr(), "{}: {done} of {}", self.what, self.total);
        }
    }

    /// Takes note of one more part.
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

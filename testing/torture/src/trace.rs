//! The operations on the files of a directory, in order: the material for power-loss images.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One operation. Files have numbers, because a name may come to mean another file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A file was created under a name.
    Create {
        /// The name.
        name: String,
        /// The file.
        file: usize,
    },
    /// A name was removed.
    Delete {
        /// The name.
        name: String,
    },
    /// Bytes were written.
    Write {
        /// The file.
        file: usize,
        /// Their offset.
        at: u64,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// A file changed its length.
    Truncate {
        /// The file.
        file: usize,
        /// Its length.
        length: u64,
    },
    /// Everything written to a file so far is on disk.
    Sync {
        /// The file.
        file: usize,
    },
    /// The names are on disk.
    SyncNames,
    /// The work began its `n`th change, counted from 1.
    Began(usize),
    /// The first `n` changes of the work were acknowledged as flushed.
    Promised(usize),
}

/// Whether an operation takes place, and succeeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It does, and succeeds.
    Do,
    /// It does not, and fails.
    Fail,
    /// It does, and fails all the same.
    DoAndFail,
}

/// The kind of operation that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A write.
    Write,
    /// A flush.
    Sync,
}

#[derive(Debug, Default)]
struct State {
    keep: bool,
    events: Vec<Event>,
    names: BTreeMap<String, usize>,
    files: usize,
    /// Files whose first flush makes names durable too, as SQLite does for a new log or journal.
    fresh: Vec<usize>,
    /// What fails, after how many of its kind, and how.
    fault: Option<(Operation, u32, Verdict)>,
}

/// Records the files of one directory.
#[derive(Debug, Default)]
pub struct Recorder {
    state: Mutex<State>,
}

impl Recorder {
    /// A recorder that keeps what happens.
    pub fn keeping() -> Self {
        let state = State { keep: true, ..State::default() };
        Self { state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, event: Event) {
        let mut state = self.state();
        if state.keep {
            state.events.push(event);
        }
    }

    /// Takes all recorded operations.
    pub fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.state().events)
    }

    /// The `n`th change of the work begins.
    pub fn began(&self, n: usize) {
        self.note(Event::Began(n));
    }

    /// The first `n` changes of the work were acknowledged as flushed.
    pub fn promised(&self, n: usize) {
        self.note(Event::Promised(n));
    }

    /// Makes the `nth` operation of this kind from now on fail, counted from 0.
    pub fn arm(&self, operation: Operation, nth: u32, how: Verdict) {
        self.state().fault = Some((operation, nth, how));
    }

    /// Disarms it; returns whether something failed.
    pub fn disarm(&self) -> bool {
        let mut state = self.state();
        let armed = state.fault.take();
        armed.is_none()
    }

    pub(crate) fn open(&self, name: &str, journal: bool) -> usize {
        let mut state = self.state();
        if let Some(file) = state.names.get(name) {
            return *file;
        }
        let file = state.files;
        state.files += 1;
        state.names.insert(name.to_owned(), file);
        if journal {
            state.fresh.push(file);
        }
        if state.keep {
            state.events.push(Event::Create { name: name.to_owned(), file });
        }
        file
    }

    pub(crate) fn delete(&self, name: &str, sync: bool) {
        self.state().names.remove(name);
        self.note(Event::Delete { name: name.to_owned() });
        if sync {
            self.note(Event::SyncNames);
        }
    }

    pub(crate) fn may_write(&self) -> Verdict {
        self.state().verdict(Operation::Write)
    }

    pub(crate) fn write(&self, file: usize, at: u64, bytes: &[u8]) {
        self.note(Event::Write { file, at, bytes: bytes.to_vec() });
    }

    pub(crate) fn truncate(&self, file: usize, length: u64) {
        self.note(Event::Truncate { file, length });
    }

    pub(crate) fn sync(&self, file: usize) -> Verdict {
        let mut state = self.state();
        let verdict = state.verdict(Operation::Sync);
        if verdict != Verdict::Fail && state.keep {
            state.events.push(Event::Sync { file });
            if let Some(at) = state.fresh.iter().position(|fresh| *fresh == file) {
                state.fresh.swap_remove(at);
                state.events.push(Event::SyncNames);
            }
        }
        verdict
    }
}

impl State {
    fn verdict(&mut self, operation: Operation) -> Verdict {
        match &mut self.fault {
            Some((which, 0, how)) if *which == operation => {
                let how = *how;
                self.fault = None;
                how
            }
            Some((which, before, _)) if *which == operation => {
                *before -= 1;
                Verdict::Do
            }
            _ => Verdict::Do,
        }
    }
}

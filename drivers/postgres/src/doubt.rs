//! The fate of an operation's earlier attempts whose answers were lost.
//!
//! Another process may have acted since: written more, rewritten the thread, deleted it, created it again. An operation
//! that took effect must not take effect a second time on top of that, and one that did not must not be reported as
//! done.

use std::sync::{Mutex, PoisonError};

use crate::history::{History, Moment, Since};

/// A request to the server in one attempt.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Request {
    /// To move the thread to this moment.
    Write {
        to: Moment,
        /// Whether the thread did not exist before.
        creates: bool,
    },
    /// To remove the thread, which was in this life.
    Removal { life: i64 },
}

/// The fate of the attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// One of them was carried out.
    Done,
    /// None was, and none will be once the thread has another mark.
    NotDone,
    Unknown,
}

/// The requests of one operation so far.
#[derive(Debug, Default)]
pub(crate) struct Asked(Mutex<Vec<Request>>);

impl Asked {
    fn requests<T>(&self, with: impl FnOnce(&mut Vec<Request>) -> T) -> T {
        with(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Records a request before it is sent.
    pub(crate) fn note(&self, request: Request) {
        self.requests(|requests| requests.push(request));
    }

    /// The server refused the last request.
    pub(crate) fn refused(&self) {
        self.requests(Vec::pop);
    }

    /// The lives of the thread whose grave proves that a request was carried out.
    pub(crate) fn lives(&self) -> Vec<i64> {
        let life = |request: &Request| match request {
            Request::Write { to, creates: true } => Some(to.life),
            Request::Write { .. } => None,
            Request::Removal { life } => Some(*life),
        };
        self.requests(|requests| requests.iter().filter_map(life).collect())
    }

    /// What the thread's history, and whether one of [`Self::lives`] has a grave, prove about the attempts.
    pub(crate) fn fate(&self, found: Option<&History>, buried: bool) -> Fate {
        let by_grave = if buried { Fate::Done } else { Fate::NotDone };
        let fate = |request: &Request| match request {
            Request::Write { to, creates } => match found.map(|found| found.since(to)) {
                Some(Since::Contained) => Fate::Done,
                Some(Since::Missing) => Fate::NotDone,
                None | Some(Since::AnotherLife) if *creates => by_grave,
                None | Some(Since::AnotherLife | Since::TooLongAgo) => Fate::Unknown,
            },
            Request::Removal { life } if found.is_some_and(|found| found.life == *life) => Fate::NotDone,
            Request::Removal { .. } => by_grave,
        };
        let fates: Vec<Fate> = self.requests(|requests| requests.iter().map(fate).collect());
        let any = |fate| fates.contains(&fate).then_some(fate);
        any(Fate::Done).or(any(Fate::Unknown)).unwrap_or(Fate::NotDone)
    }
}

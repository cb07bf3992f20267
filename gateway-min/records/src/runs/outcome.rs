//! How a run ends, and what comes of the calls that change its state.

use chrono::{DateTime, Utc};

use super::{CancelAction, RunStatus, RunTotals};

/// The result of [`Runs::start`](super::Runs::start).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartOutcome {
    /// This call made the run `running`.
    Started {
        /// The present, or when the thread's last run ended, if that is later: by the clock of another process, or as
        /// [`RunEnd::not_before`] said.
        after: DateTime<Utc>,
    },
    /// The run waits for its predecessor to end; nothing changed.
    Waiting,
    /// The run was cancelled before it started; nothing changed. Finish it.
    Cancelled(CancelAction),
    /// The run is no longer `pending`; nothing changed.
    NotPending(RunStatus),
}

/// The result of [`Runs::request_cancel`](super::Runs::request_cancel).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelOutcome {
    /// The cancellation is recorded; stop the run.
    Accepted,
    /// The run was already cancelled or is being cancelled; nothing changed.
    AlreadyInterrupted,
    /// The run had already ended with this status; nothing changed.
    AlreadyTerminal(RunStatus),
    /// The run does not exist.
    NotFound,
}

/// How a run ends.
#[derive(Clone, Debug, PartialEq)]
pub struct RunEnd {
    /// The final status.
    pub status: RunStatus,
    /// Why it failed.
    pub error: Option<String>,
    /// Why it stopped early.
    pub stop_reason: Option<String>,
    /// The title that its thread gets; `None` keeps the current one.
    pub display_name: Option<String>,
    /// See [`RunRow::left_checkpoint`](super::RunRow::left_checkpoint); `None` keeps the stored one.
    pub left_checkpoint: Option<String>,
    /// Whether a rollback of the run, if it was requested or the run is an [edit](super::NewRun::edits), is carried out or
    /// known to be impossible, or has nothing to restore. Without this a run whose rollback was accepted does not end, and
    /// an edit only as a `success`.
    pub rollback_settled: bool,
    /// The time of its last frame. That may be a little ahead of the clock: then the run ends at this time. One that is
    /// a minute ahead or more does not count.
    pub not_before: Option<DateTime<Utc>>,
    /// Its total usage and messages.
    pub totals: RunTotals,
}

impl RunEnd {
    /// Of a run that failed, if nothing is known of its usage.
    pub fn failed(error: &str) -> Self {
        Self {
            status: RunStatus::Error,
            error: Some(error.to_owned()),
            stop_reason: None,
            display_name: None,
            left_checkpoint: None,
            rollback_settled: false,
            not_before: None,
            totals: RunTotals::default(),
        }
    }
}

/// The result of [`Runs::decide`](super::Runs::decide).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecideOutcome {
    /// The outcome is stored.
    Decided,
    /// The run was cancelled and cannot end as a `success`, or has to be rolled back first, as an edit that fails; nothing
    /// changed. Carry out the cancellation and decide on another outcome.
    CancelRequested(CancelAction),
    /// The run had already ended with this status, possibly ended by another process; nothing changed. It no longer
    /// belongs to this process: write nothing for it.
    AlreadyTerminal(RunStatus),
    /// Another process has taken the run over, to roll it back; nothing changed. Write nothing for it.
    TakenOver,
}

/// The result of [`Runs::finish`](super::Runs::finish).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishOutcome {
    /// This call ended the run.
    Finished {
        /// The first waiting run, which now holds the thread; start it.
        promoted: Option<String>,
    },
    /// The run was cancelled and cannot end as a `success`, or has to be rolled back first, as an edit that fails; nothing
    /// changed. Carry out the cancellation and finish the run with another status.
    CancelRequested(CancelAction),
    /// The run had already ended with this status; nothing changed.
    AlreadyTerminal(RunStatus),
    /// Another process has taken the run over, to roll it back, and ends it; nothing changed.
    TakenOver,
}

//! The text of a result (service reference, "Results of delegations"). It is for the model and for people; nothing
//! parses it.

use super::{Ending, TEXT_MAX};
use crate::bounds::first;
use crate::contract::StopReason;

pub(super) fn of(ending: &Ending, stop_reason: Option<StopReason>) -> String {
    let capped = stop_reason.map(|reason| format!(" (capped: {})", reason.label())).unwrap_or_default();
    let head = match ending {
        Ending::Completed(report) => {
            let head = format!("Task Succeeded{capped}. Result: ");
            let Some(verdict) = &report.acceptance else { return head + &report.text };
            let end = format!("\n\n{}", verdict.section());
            // What is too long is cut at its end, and that must not be the checklist.
            let room = TEXT_MAX.saturating_sub(head.chars().count() + end.chars().count());
            return head + &within(&report.text, room) + &end;
        }
        Ending::PollingTimedOut { timeout, execution_status } => {
            return format!(
                "Task polling timed out after {} minutes. This may indicate the background task is stuck. Status: \
                 {execution_status}",
                timeout.as_secs() / 60
            );
        }
        Ending::Failed { .. } => format!("Task failed{capped}."),
        Ending::Cancelled { .. } | Ending::TimedOut { .. } => ending.status().phrase().to_owned(),
    };
    match ending.error() {
        Some(error) => format!("{head} Error: {error}"),
        None => head,
    }
}

/// A report of at most `max` characters, or the beginning of a longer one and a notice, together as long.
fn within(report: &str, max: usize) -> String {
    let total = report.chars().count();
    if total <= max {
        return report.to_owned();
    }
    let notice = format!("\n[report cut: it has {total} characters]");
    first(report, max.saturating_sub(notice.chars().count())).to_owned() + &notice
}

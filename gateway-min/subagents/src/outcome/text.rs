//! The text of a result (service reference, "Results of delegations"). It is for the model and for people; nothing
//! parses it.

use super::Ending;
use crate::contract::StopReason;

pub(super) fn of(ending: &Ending, stop_reason: Option<StopReason>) -> String {
    let capped = stop_reason.map(|reason| format!(" (capped: {})", reason.label())).unwrap_or_default();
    let head = match ending {
        Ending::Completed(report) => {
            let mut text = format!("Task Succeeded{capped}. Result: {}", report.text);
            if let Some(verdict) = &report.acceptance {
                text.push_str("\n\n");
                text.push_str(&verdict.section());
            }
            return text;
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

//! The system prompt of the lead agent.

use chrono::{DateTime, Utc};

/// The prompt for a run that starts `now`. `summary` is of what was said before the conversation begins.
pub(crate) fn system(now: DateTime<Utc>, tools: bool, summary: Option<&str>) -> String {
    let mut prompt = format!(
        "You are a capable assistant that works on the user's task until it is done. Today is {}.",
        now.format("%A, %Y-%m-%d")
    );
    if tools {
        prompt.push_str(
            "\n\nYou have tools. Paths are relative to this conversation's own directory. Call several tools at once \
             when their results do not depend on each other. When the request cannot be carried out without an \
             answer from the user, call ask_clarification instead of guessing.",
        );
    }
    if let Some(summary) = summary {
        prompt.push_str("\n\nSummary of the conversation so far:\n");
        prompt.push_str(summary);
    }
    prompt
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_told_if_there_is_one() {
        let now = DateTime::UNIX_EPOCH;
        assert!(!system(now, true, None).contains("Summary"));
        assert!(system(now, false, Some("They talked.")).ends_with("so far:\nThey talked."));
    }
}

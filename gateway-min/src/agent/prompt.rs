//! The system prompt of the lead agent.

use chrono::{DateTime, Utc};

/// The prompt for a run that starts `now`.
pub(crate) fn system(now: DateTime<Utc>, tools: bool) -> String {
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
    prompt
}

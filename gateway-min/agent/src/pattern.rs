//! The rules for the names of threads and agents, which are names of directories too.

/// A rule for a string.
#[derive(Debug, Clone, Copy)]
pub struct Pattern {
    /// As a regular expression, for the client.
    pub text: &'static str,
    allowed: fn(char) -> bool,
    max_len: usize,
}

impl Pattern {
    /// The ids of threads: the path parameter `{thread_id}`.
    pub const THREAD_ID: Self = Self {
        text: "^[A-Za-z0-9_-]{1,64}$",
        allowed: |c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'),
        max_len: 64,
    };
    /// The names of managed subagents.
    pub const SUBAGENT_NAME: Self = Self {
        text: "^[A-Za-z0-9-]{1,64}$",
        allowed: |c| c.is_ascii_alphanumeric() || c == '-',
        max_len: 64,
    };
    /// Agent names, after replacing `_` by `-` and lowercasing.
    pub const AGENT_NAME: Self = Self {
        text: "^[a-z0-9-]+$",
        allowed: |c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-',
        max_len: usize::MAX,
    };

    /// Whether the text matches the rule.
    pub fn matches(&self, text: &str) -> bool {
        !text.is_empty() && text.len() <= self.max_len && text.chars().all(self.allowed)
    }
}

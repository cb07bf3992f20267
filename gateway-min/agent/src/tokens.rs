//! The token usage of a model call.

use std::ops::AddAssign;

use serde_json::Value as Json;

/// The maximum counted for one answer: a larger number is a server's bug, and must not overflow the sums.
const MAX: i64 = 1 << 40;

/// Tokens of model calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Input tokens.
    pub input: i64,
    /// Output tokens.
    pub output: i64,
    /// Both, plus anything else the provider counts.
    pub total: i64,
}

impl Tokens {
    /// The usage of the call that returned this answer.
    pub fn of(answer: &Json) -> Self {
        let tokens = |key: &str| answer["usage_metadata"][key].as_i64().unwrap_or(0).clamp(0, MAX);
        let (input, output) = (tokens("input_tokens"), tokens("output_tokens"));
        Self { input, output, total: tokens("total_tokens").max(input + output) }
    }
}

impl AddAssign for Tokens {
    fn add_assign(&mut self, more: Self) {
        self.input += more.input;
        self.output += more.output;
        self.total += more.total;
    }
}

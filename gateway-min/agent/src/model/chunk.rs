//! The pieces a streamed answer is made of.

use serde_json::{Map, Value, json};

/// One piece of a streamed answer. Concatenated in order, the pieces make the answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelChunk {
    /// The next piece of the visible text.
    pub text: String,
    /// The next piece of the model's reasoning, where the provider shows it.
    pub reasoning: String,
    /// The next pieces of tool calls.
    pub tool_call_chunks: Vec<ToolCallChunk>,
    /// What the whole answer cost; on the last chunk only.
    pub usage: Option<Usage>,
    /// Why the answer ended (`stop`, `tool_calls`, `length`, ...). Marks the last chunk.
    pub finish_reason: Option<String>,
    /// The provider's id of the completion. It goes to `response_metadata`: it is no message id, as some
    /// servers repeat it, and a repeated message id would overwrite an older message.
    pub completion_id: Option<String>,
    /// Present on the last chunk of an answer that stands in for one the provider failed to give.
    pub fallback: Option<Fallback>,
}

impl ModelChunk {
    /// Whether this is the last chunk of its answer.
    pub fn is_last(&self) -> bool {
        self.finish_reason.is_some()
    }
}

/// One piece of one tool call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToolCallChunk {
    /// Which call of the answer it belongs to.
    pub index: u64,
    /// The call's id; on its first chunk.
    pub id: Option<String>,
    /// The tool's name; on its first chunk.
    pub name: Option<String>,
    /// The next piece of the arguments' JSON text.
    pub args: String,
}

/// The tokens one answer cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the request.
    pub input_tokens: u64,
    /// Tokens of the answer.
    pub output_tokens: u64,
    /// Both together, as the provider counts them.
    pub total_tokens: u64,
    /// How many input tokens came from the provider's cache.
    pub cache_read: Option<u64>,
    /// How many output tokens were reasoning.
    pub reasoning: Option<u64>,
}

impl Usage {
    /// The `usage_metadata` of a serialised message.
    pub fn to_value(self) -> Value {
        json!({
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "total_tokens": self.total_tokens,
            "input_token_details": detail("cache_read", self.cache_read),
            "output_token_details": detail("reasoning", self.reasoning),
        })
    }
}

fn detail(key: &str, tokens: Option<u64>) -> Map<String, Value> {
    tokens.map(|count| (key.to_owned(), count.into())).into_iter().collect()
}

/// Why an answer is a fallback.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fallback {
    /// The kind of the failure: [`ModelErrorKind::as_str`](super::ModelErrorKind::as_str).
    pub error_type: String,
    /// The failure in words; becomes the run's error.
    pub reason: String,
}

//! The chunks of a streamed answer.

use serde_json::{Map, Value, json};

/// One chunk of a streamed answer. Concatenated in order, the chunks make up the answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelChunk {
    /// The next piece of the visible text.
    pub text: String,
    /// The next piece of the model's reasoning, if the provider returns it.
    pub reasoning: String,
    /// Whether the provider takes its reasoning back with the answer. Some refuse the next request without it, others
    /// the field.
    pub takes_reasoning: bool,
    /// The next pieces of tool calls.
    pub tool_call_chunks: Vec<ToolCallChunk>,
    /// The usage of the whole answer; only on the last chunk.
    pub usage: Option<Usage>,
    /// Why the answer ended (`stop`, `tool_calls`, `length`, ...). Marks the last chunk.
    pub finish_reason: Option<String>,
    /// The provider's id of the completion. It goes to `response_metadata` and is not used as the message id, because
    /// some servers repeat it, and a repeated message id would overwrite an older message.
    pub completion_id: Option<String>,
    /// Set on the last chunk of an answer that replaces one the provider failed to give.
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
    /// The index of the call in the answer.
    pub index: u64,
    /// The call's id; on its first chunk.
    pub id: Option<String>,
    /// The tool's name; on its first chunk.
    pub name: Option<String>,
    /// The next piece of the arguments' JSON text.
    pub args: String,
    /// What the provider wants back with the call, unchanged (`extra_content`).
    pub extra: Option<Value>,
}

/// The token usage of one answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Input tokens.
    pub input_tokens: u64,
    /// Output tokens.
    pub output_tokens: u64,
    /// Input and output tokens, as counted by the provider.
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
    /// The failure as text; becomes the run's error.
    pub reason: String,
}

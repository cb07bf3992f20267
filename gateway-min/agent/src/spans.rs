//! The spans of an agent's work, and everything they may contain: names from this list, counts, outcomes. Never a
//! message, an error text, a key, or a value that a user or a model can choose freely.
//!
//! They go to the process's subscriber; without one, creating a span costs one check of a flag.

use tracing::field::Empty;
use tracing::{Span, info_span};

use crate::model::ModelChunk;
use crate::tools::ToolStatus;

/// The target of spans that may be exported.
pub const TRACE_TARGET: &str = "threadkeep::trace";
/// `otel.status_code` of a span whose work failed.
pub const TRACE_FAILED: &str = "ERROR";
/// The name of a tool that does not exist.
const OTHER: &str = "_OTHER";

/// A superstep at this node, one of the graph's own; `step` is its number in the thread.
pub(crate) fn superstep(node: &'static str, step: i64) -> Span {
    info_span!(
        target: TRACE_TARGET, "superstep",
        otel.name = %format_args!("superstep {node}"), threadkeep.node = node, threadkeep.step = step,
    )
}

/// A model call, including its retries. `model` is its configured name.
pub(crate) fn model_call(model: &str, provider: &str) -> Span {
    info_span!(
        target: TRACE_TARGET, "chat",
        otel.name = %format_args!("chat {model}"), otel.kind = "client", otel.status_code = Empty,
        gen_ai.operation.name = "chat", gen_ai.request.model = model, gen_ai.provider.name = provider,
        gen_ai.usage.input_tokens = Empty, gen_ai.usage.output_tokens = Empty, "error.type" = Empty,
    )
}

/// A chunk of the model's answer: only its usage and the kind of failure it reports.
pub(crate) fn model_answered(span: &Span, chunk: &ModelChunk) {
    if let Some(usage) = &chunk.usage {
        span.record("gen_ai.usage.input_tokens", usage.input_tokens);
        span.record("gen_ai.usage.output_tokens", usage.output_tokens);
    }
    if let Some(fallback) = &chunk.fallback {
        span.record("otel.status_code", TRACE_FAILED);
        span.record("error.type", fallback.error_type.as_str());
    }
}

/// A tool call; `name` is `None` for an unknown tool.
pub(crate) fn tool_call(name: Option<&str>) -> Span {
    let name = name.unwrap_or(OTHER);
    info_span!(
        target: TRACE_TARGET, "tool",
        otel.name = %format_args!("tool {name}"), otel.status_code = Empty, gen_ai.operation.name = "execute_tool",
        gen_ai.tool.name = name,
    )
}

/// Records the tool's result.
pub(crate) fn tool_answered(span: &Span, status: ToolStatus) {
    if status == ToolStatus::Error {
        span.record("otel.status_code", TRACE_FAILED);
    }
}

//! Every span of a trace, and all that may be in one: names from this list, ids of threads and runs, counts, outcomes.
//! Never a message, an error's text, a key, or a value that a client or a model chose freely.
//!
//! Where no traces are wanted, making a span costs a look at a flag.

use axum::http::{Method, StatusCode};
use threadkeep::saver::StepCommit;
use tracing::field::Empty;
use tracing::{Span, info_span};

use crate::model::ModelChunk;
use crate::store::RunStatus;
use crate::tools::ToolStatus;

/// The target of these spans, and of nothing else.
pub(super) const TARGET: &str = "threadkeep::trace";
/// What a span says whose work failed.
const FAILED: &str = "ERROR";
/// In the place of a word that is not one of those we know.
const OTHER: &str = "_OTHER";

/// A request; none of `route` is one that no route takes.
pub(super) fn request(method: &Method, route: Option<&str>) -> Span {
    let known = [
        Method::GET,
        Method::POST,
        Method::PUT,
        Method::PATCH,
        Method::DELETE,
        Method::HEAD,
        Method::OPTIONS,
    ];
    let method = if known.contains(method) { method.as_str() } else { OTHER };
    let span = info_span!(
        target: TARGET, "request",
        otel.name = %format_args!("{method} {}", route.unwrap_or("unknown route")), otel.kind = "server",
        otel.status_code = Empty, http.request.method = method, http.route = Empty, http.response.status_code = Empty,
    );
    if let Some(route) = route {
        span.record("http.route", route);
    }
    span
}

/// The request was answered.
pub(super) fn answered(span: &Span, status: StatusCode) {
    span.record("http.response.status_code", status.as_u16());
    if status.is_server_error() {
        span.record("otel.status_code", FAILED);
    }
}

/// A run, from when somebody may work on it until its last write.
pub(crate) fn run(thread_id: &str, run_id: &str) -> Span {
    info_span!(
        target: TARGET, "run",
        threadkeep.thread.id = thread_id, threadkeep.run.id = run_id, threadkeep.run.outcome = Empty,
        gen_ai.request.model = Empty, otel.status_code = Empty,
    )
}

/// The run that is worked on asks this model.
pub(crate) fn run_model(name: &str) {
    Span::current().record("gen_ai.request.model", name);
}

/// The run that is worked on has ended.
pub(crate) fn run_ended(status: RunStatus) {
    let span = Span::current();
    span.record("threadkeep.run.outcome", status.as_str());
    if status == RunStatus::Error {
        span.record("otel.status_code", FAILED);
    }
}

/// A superstep at this node, one of the graph's own; `step` is its number in the thread.
pub(crate) fn superstep(node: &'static str, step: i64) -> Span {
    info_span!(
        target: TARGET, "superstep",
        otel.name = %format_args!("superstep {node}"), threadkeep.node = node, threadkeep.step = step,
    )
}

/// A checkpoint on its way to the store; `bytes` are those of its values and writes.
pub(crate) fn commit(step: &StepCommit, bytes: u64) -> Span {
    info_span!(
        target: TARGET, "commit",
        otel.status_code = Empty, threadkeep.step = step.metadata.step, threadkeep.commit.bytes = bytes,
        threadkeep.commit.outcome = Empty,
    )
}

/// The commit came to this.
pub(crate) fn committed(span: &Span, outcome: &'static str, failed: bool) {
    span.record("threadkeep.commit.outcome", outcome);
    if failed {
        span.record("otel.status_code", FAILED);
    }
}

/// A call of a model, with its retries. `model` is the name it is configured under.
pub(crate) fn model_call(model: &str, provider: &str) -> Span {
    info_span!(
        target: TARGET, "chat",
        otel.name = %format_args!("chat {model}"), otel.kind = "client", otel.status_code = Empty,
        gen_ai.operation.name = "chat", gen_ai.request.model = model, gen_ai.provider.name = provider,
        gen_ai.usage.input_tokens = Empty, gen_ai.usage.output_tokens = Empty, "error.type" = Empty,
    )
}

/// A piece of the model's answer: of it only what it cost, and what kind of failure it stands for.
pub(crate) fn model_answered(span: &Span, chunk: &ModelChunk) {
    if let Some(usage) = &chunk.usage {
        span.record("gen_ai.usage.input_tokens", usage.input_tokens);
        span.record("gen_ai.usage.output_tokens", usage.output_tokens);
    }
    if let Some(fallback) = &chunk.fallback {
        span.record("otel.status_code", FAILED);
        span.record("error.type", fallback.error_type.as_str());
    }
}

/// A call of a tool; none of `name` is one that there is not.
pub(crate) fn tool_call(name: Option<&str>) -> Span {
    let name = name.unwrap_or(OTHER);
    info_span!(
        target: TARGET, "tool",
        otel.name = %format_args!("tool {name}"), otel.status_code = Empty, gen_ai.operation.name = "execute_tool",
        gen_ai.tool.name = name,
    )
}

/// The tool answered.
pub(crate) fn tool_answered(span: &Span, status: ToolStatus) {
    if status == ToolStatus::Error {
        span.record("otel.status_code", FAILED);
    }
}

//! Every span of a trace, and everything it may contain: names from this list, ids of threads and runs, counts,
//! outcomes. Never a message, an error text, a key, or a value that a client or a model can choose freely.
//!
//! Without traces, creating a span costs one check of a flag.

use axum::http::{Method, StatusCode};
use threadkeep::saver::StepCommit;
use threadkeep_agent::{TRACE_FAILED as FAILED, TRACE_TARGET as TARGET};
use tracing::field::Empty;
use tracing::{Span, info_span};

use threadkeep_records::RunStatus;

/// The method of a request that is none of the known ones.
const OTHER: &str = "_OTHER";

/// A request; `route` is `None` if no route matches.
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

/// Records the response.
pub(super) fn answered(span: &Span, status: StatusCode) {
    span.record("http.response.status_code", status.as_u16());
    if status.is_server_error() {
        span.record("otel.status_code", FAILED);
    }
}

/// A run, from its start until its last write.
pub(crate) fn run(thread_id: &str, run_id: &str) -> Span {
    info_span!(
        target: TARGET, "run",
        threadkeep.thread.id = thread_id, threadkeep.run.id = run_id, threadkeep.run.outcome = Empty,
        gen_ai.request.model = Empty, otel.status_code = Empty,
    )
}

/// Records the model of the current run.
pub(crate) fn run_model(name: &str) {
    Span::current().record("gen_ai.request.model", name);
}

/// Records that the current run has ended.
pub(crate) fn run_ended(status: RunStatus) {
    let span = Span::current();
    span.record("threadkeep.run.outcome", status.as_str());
    if status == RunStatus::Error {
        span.record("otel.status_code", FAILED);
    }
}

/// A checkpoint on its way to the store; `bytes` are those of its values and writes.
pub(crate) fn commit(step: &StepCommit, bytes: u64) -> Span {
    info_span!(
        target: TARGET, "commit",
        otel.status_code = Empty, threadkeep.step = step.metadata.step, threadkeep.commit.bytes = bytes,
        threadkeep.commit.outcome = Empty,
    )
}

/// Records the outcome of the commit.
pub(crate) fn committed(span: &Span, outcome: &'static str, failed: bool) {
    span.record("threadkeep.commit.outcome", outcome);
    if failed {
        span.record("otel.status_code", FAILED);
    }
}

//! The spans of requests, runs and commits, and all that may be in one: names from this list, ids of threads and runs,
//! counts, outcomes. Never a message, an error's text, a key, or a value that a client or a model chose freely. The
//! agent's own spans, under the same target and rule, are in its crate.
//!
//! Without an exporter, making a span costs a look at a flag.

use axum::http::{Method, StatusCode};
use threadkeep::saver::StepCommit;
use threadkeep_agent::{TRACE_FAILED as FAILED, TRACE_TARGET as TARGET};
use tracing::field::Empty;
use tracing::{Span, info_span};

use crate::store::RunStatus;

/// The method of a request that is none of the known ones.
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

//! The span of a request.

use axum::extract::{MatchedPath, Request};
use axum::middleware::Next;
use axum::response::Response;
use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry_http::HeaderExtractor;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::{Instrument as _, Span};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use super::spans;

/// Handles a request in its own span, which ends with the head of the response: a stream can last as long as its run,
/// which has its own span.
pub(crate) async fn traced(request: Request, next: Next) -> Response {
    let span = of(&request);
    if span.is_disabled() {
        return next.run(request).await;
    }
    let response = next.run(request).instrument(span.clone()).await;
    spans::answered(&span, response.status());
    response
}

fn of(request: &Request) -> Span {
    // Only the path's template: a span name must not contain ids.
    let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    let span = spans::request(request.method(), route);
    if !span.is_disabled() {
        let parent = TraceContextPropagator::new().extract(&HeaderExtractor(request.headers()));
        // Without an incoming trace, the span starts a new one.
        let _ = span.set_parent(parent);
    }
    span
}

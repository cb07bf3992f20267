//! What every response of the page has: the policy of its content, and errors that people can read.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{Html, IntoResponse as _, Redirect, Response};
use serde_json::Value;
use threadkeep_page::problem;

use super::super::auth::route;
use super::super::error::ApiError;
use super::super::extract::drained;
use super::session::Viewer;
use super::{SIGN_IN, is_page};
use crate::app::App;

/// What a page may load and do: its own script, style sheet and requests, nothing else.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
     form-action 'self'; frame-ancestors 'none'; base-uri 'none'";
/// The headers of every response of the page.
const HEADERS: [(HeaderName, &str); 5] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    // Addresses of threads are nobody else's business.
    (header::REFERRER_POLICY, "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
];
/// What clients of the API get whose address lacks its prefix.
const NO_API: &str = "Not Found. The API is below /api: its threads are at /api/threads";
/// The maximum bytes of an error's body.
const MAX_ERROR_BYTES: usize = 64 * 1024;

/// The layer around all routes that makes responses of the page what browsers and people need. Others pass unchanged.
pub(in crate::http) async fn present(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    if !app.has_page || !names_page(&request) || has_json(&request) {
        return next.run(request).await;
    }
    let reads = request.method().is_safe() && request.method() != Method::OPTIONS;
    let address = request.uri().path_and_query().map_or("/", |address| address.as_str()).to_owned();
    let (parts, body) = request.into_parts();
    let response = next.run(Request::from_parts(parts.clone(), body)).await;
    let status = response.status();
    let is_html = |response: &Response| {
        response
            .headers()
            .get(header::CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"text/html"))
    };
    let mut response = if status.as_u16() < 400 || is_html(&response) {
        response
    } else if status == StatusCode::UNAUTHORIZED {
        let next = if reads { address } else { "/".to_owned() };
        Redirect::to(&format!("{SIGN_IN}?next={}", percent_encoded(&next))).into_response()
    } else {
        let Viewer(session) = Viewer::of_error(&app, &parts.headers).await;
        let text = text_of(response).await;
        (status, Html(problem(&session, status.as_u16(), &text))).into_response()
    };
    let headers = response.headers_mut();
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}

/// The layer that refuses what is meant for the API: without its prefix, a request may name a page, or even a form.
pub(in crate::http) async fn only_for_pages(request: Request, next: Next) -> Response {
    if !names_page(&request) || !has_json(&request) {
        return next.run(request).await;
    }
    drained(request.into_body()).await;
    ApiError::not_found(NO_API).into_response()
}

/// Whether the route of a request belongs to the page.
fn names_page(request: &Request) -> bool {
    let route = route(request.extensions());
    !route.is_empty() && is_page(route)
}

/// Whether a request has a body of JSON, which no form has.
fn has_json(request: &Request) -> bool {
    let kind = request.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"))
}

/// The text of an error response.
async fn text_of(response: Response) -> String {
    let status = response.status();
    let body = to_bytes(response.into_body(), MAX_ERROR_BYTES).await.unwrap_or_default();
    let detail = serde_json::from_slice::<Value>(&body).ok().map(|mut body| body["detail"].take());
    let text = match detail {
        Some(Value::String(text)) => text,
        Some(detail) if detail[0]["msg"].is_string() => {
            detail[0]["msg"].as_str().unwrap_or_default().to_owned()
        }
        Some(_) => String::new(),
        None => String::from_utf8_lossy(&body).into_owned(),
    };
    if text.is_empty() { status.canonical_reason().unwrap_or_default().to_owned() } else { text }
}

/// An address as the value of a parameter.
fn percent_encoded(address: &str) -> String {
    let mut encoded = String::with_capacity(address.len());
    for byte in address.bytes() {
        if byte.is_ascii_alphanumeric() || b"/-_.~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            // Writing to a string does not fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

//! The page for browsers: fills the views of `threadkeep_page`, serves them, and signs people in.
//!
//! A page is read with the functions that the API's routes use; what its script changes goes through the API itself.

mod batches;
mod checkpoints;
mod conversation;
mod executions;
mod family;
mod health;
mod message;
mod overview;
mod present;
mod runs;
pub(super) mod session;
mod storage;
mod threads;
mod waiting;

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::DefaultBodyLimit;
use axum::http::{HeaderValue, header};
use axum::middleware;
use axum::response::{Html, IntoResponse as _, Redirect, Response};
use axum::routing::{Router, get, post};
use threadkeep_page::{SCRIPT, SCRIPT_PATH, STYLE, STYLE_PATH};

pub(super) use self::checkpoints::option;
pub(super) use self::present::{only_for_pages, present};
use super::error::ApiError;
use crate::app::App;

/// Where a person signs in.
pub(super) const SIGN_IN: &str = "/sign-in";
/// Where a person deletes a thread.
pub(super) const DELETE: &str = "/threads/{thread_id}/delete";
/// Pages that need no key.
pub(super) const PUBLIC: [&str; 3] = [SIGN_IN, STYLE_PATH, SCRIPT_PATH];
/// Assets never change: their address has a digest of their content.
const FOREVER: HeaderValue = HeaderValue::from_static("public, max-age=31536000, immutable");

/// What a handler of a page answers.
type Page = Result<Html<String>, ApiError>;
/// The parameters of a page's address. Unknown ones are ignored, as in any address that people share.
type Parameters = BTreeMap<String, String>;

/// How many lines an address skips; none if it does not say, and at most as many as a database counts.
fn offset(parameters: &Parameters) -> u64 {
    let offset = parameters.get("offset").and_then(|offset| offset.trim().parse().ok()).unwrap_or(0);
    i64::MAX.unsigned_abs().min(offset)
}

/// Whether a route, by its template, belongs to the page.
pub(super) fn is_page(route: &str) -> bool {
    let first = route.split('/').nth(1).unwrap_or_default();
    ["", "threads", "runs", "status", "sign-in", "sign-out", "page"].contains(&first)
}

/// The routes of the page.
pub(super) fn routes(app: &Arc<App>) -> Router<Arc<App>> {
    let forms = Router::new()
        .route("/threads", post(threads::create))
        .route(DELETE, post(threads::delete))
        .route("/threads/{thread_id}/storage", post(storage::remove))
        .route("/sign-out", post(session::sign_out))
        // A layer of all forms, so that none can be without it.
        .layer(middleware::from_fn_with_state(Arc::clone(app), session::only_from_the_page));
    // Its form needs no key, so anybody may send one.
    let sign_in = get(session::ask).post(session::sign_in);
    let sign_in = sign_in.layer(DefaultBodyLimit::max(session::MAX_FORM_BYTES));
    Router::new()
        .route("/", get(threads::list))
        .route("/threads", get(|| async { Redirect::to("/") }))
        .route("/runs", get(overview::show))
        .route("/status", get(health::show))
        .route("/threads/{thread_id}", get(conversation::show))
        .route(DELETE, get(threads::ask))
        .route("/threads/{thread_id}/checkpoints", get(checkpoints::tree))
        .route("/threads/{thread_id}/checkpoints/{checkpoint_id}", get(checkpoints::state))
        .route("/threads/{thread_id}/diff", get(checkpoints::difference))
        .route("/threads/{thread_id}/runs", get(runs::list))
        .route("/threads/{thread_id}/runs/{run_id}", get(runs::events))
        .route("/threads/{thread_id}/batches/{batch_id}", get(batches::show))
        .route("/threads/{thread_id}/executions/{execution_id}", get(executions::show))
        .route("/threads/{thread_id}/storage", get(storage::show))
        .route("/threads/{thread_id}/messages/{message_id}", get(message::show))
        .route(SIGN_IN, sign_in)
        .route(STYLE_PATH, get(|| async { asset("text/css; charset=utf-8", STYLE) }))
        .route(SCRIPT_PATH, get(|| async { asset("text/javascript; charset=utf-8", SCRIPT) }))
        .merge(forms)
}

fn asset(kind: &'static str, content: &'static str) -> Response {
    let kind = HeaderValue::from_static(kind);
    ([(header::CONTENT_TYPE, kind), (header::CACHE_CONTROL, FOREVER)], content).into_response()
}

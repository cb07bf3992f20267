//! Authentication on every route: the key of a request, and the threads it may access.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::BoxError;
use axum::body::{Body, BodyDataStream, Bytes, HttpBody as _};
use axum::extract::{FromRequestParts, MatchedPath, RawPathParams, Request, State};
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use futures::{FutureExt as _, Stream, StreamExt as _, stream};
use threadkeep::id::ThreadId;

use super::error::{ApiError, MAX_BODY_BYTES, OrApiError as _};
use super::extract::collected;
use super::origins;
use super::page::{self, session};
use super::threads::absent;
use crate::app::App;
use crate::auth::Principal;
use threadkeep_config::Secret;

/// The header of SDK clients.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// Routes that need no key.
const PUBLIC: [&str; 2] = ["/health", "/openapi.json"];
/// Writes whose answers show only what they did themselves, on a thread that was the caller's then: the records admit
/// their run, or reserve the thread for them. A client that repeats one does it twice.
const WRITES: [&str; 6] = [
    "/api/threads/{thread_id}/runs",
    "/api/threads/{thread_id}/runs/stream",
    "/api/threads/{thread_id}/state",
    "/api/threads/{thread_id}/branches",
    "/api/threads/{thread_id}/copy",
    "/api/threads/{thread_id}/compact",
];
/// How often a streaming response rechecks its API key.
const LOOK_EVERY: Duration = Duration::from_secs(2);
const NOT_AVAILABLE: &str = "Authentication is not available";
const FAILED: &str = "Failed to read thread";

/// Who sent a request.
#[derive(Debug, Clone)]
pub(super) struct Caller(pub(super) Principal);

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let principal = parts.extensions.get::<Principal>().cloned();
        principal.map(Self).ok_or_else(not_authenticated)
    }
}

/// The layer around all routes: admits requests with a valid key and records the caller. Another user's thread in the
/// path is not found, whatever the route. A long response, such as a stream, ends when its key is revoked; the run
/// treats this like a client that disconnects.
pub(super) async fn authenticate(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let route = route(request.extensions());
    if PUBLIC.contains(&route) || (app.has_page && page::PUBLIC.contains(&route)) {
        return next.run(request).await;
    }
    // A browser adds the cookie of a session by itself. Forms of the page are checked by their own layer.
    if let Some(key) = session_key(&app, request.headers())
        && !page::is_page(route)
        && origins::changes(&request)
        && !session::is_from_the_script(request.headers(), &key)
    {
        return session::not_from_the_page().into_response();
    }
    let admitted = match admitted(&app, request).await {
        Ok(admitted) => admitted,
        Err(error) => return error.into_response(),
    };
    let Admitted { request, principal, again } = admitted;
    let key = presented(&app, request.headers()).filter(|_| app.auth.is_on());
    let answer = next.run(request);
    let answer = match key {
        Some(key) => while_stands(Arc::clone(&app), key, answer).await,
        None => answer.await,
    };
    let again = again.filter(|_| answer.extensions().get::<ChecksThread>().is_none());
    // Another user may have created the thread meanwhile, also after its owner deleted it.
    if let Some(Again { thread, has_written }) = again
        && let Err(error) = check_thread(&app, &principal, &thread).await
    {
        // If only the check failed, what was done is reported, or the client would do it again.
        let is_done = answer.status().is_success() || answer.status().is_redirection();
        let has_written = has_written || answer.extensions().get::<HasWritten>().is_some();
        if !(has_written && is_done && error.status().is_server_error()) {
            return error.into_response();
        }
    }
    answer
}

/// Runs `answer` while the key is valid.
async fn while_stands(app: Arc<App>, key: Secret, answer: impl Future<Output = Response>) -> Response {
    let mut revoked = Box::pin(revoked(app, key));
    let answer = tokio::select! {
        biased;
        answer = answer => answer,
        () = &mut revoked => return not_authenticated().into_response(),
    };
    // There is no more to it than was there while the key was valid.
    if answer.body().size_hint().exact().is_some() {
        return answer;
    }
    let is_of_events =
        answer.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == "text/event-stream");
    let (parts, body) = answer.into_parts();
    let chunks = body.into_data_stream();
    let body = if is_of_events {
        Body::from_stream(chunks.take_until(revoked))
    } else {
        Body::from_stream(until_revoked(chunks, revoked))
    };
    Response::from_parts(parts, body)
}

/// The chunks until the key is revoked, and then an error: an end without one would be that of the whole body.
fn until_revoked(
    chunks: BodyDataStream,
    revoked: impl Future<Output = ()> + Unpin,
) -> impl Stream<Item = Result<Bytes, BoxError>> {
    stream::try_unfold((chunks, revoked), async |(mut chunks, mut revoked)| {
        tokio::select! {
            biased;
            () = &mut revoked => Err("the key of the request was revoked".into()),
            chunk = chunks.next() => Ok(chunk.transpose()?.map(|chunk| (chunk, (chunks, revoked)))),
        }
    })
}

/// Waits until the key is revoked. An unreadable key file revokes nothing: it admits no new request, and stops no work.
async fn revoked(app: Arc<App>, key: Secret) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        if let Ok(None) = app.auth.authenticate(Some(key.clone())).await {
            return;
        }
    }
}

/// An authenticated request.
struct Admitted {
    /// With its [`Principal`] as an extension.
    request: Request,
    principal: Principal,
    again: Option<Again>,
}

/// The thread in the path of a request, which is checked again before the answer.
struct Again {
    thread: ThreadId,
    /// Whether an answer that reports success shows nothing that somebody else may have written.
    has_written: bool,
}

/// In an answer's extensions: it is that of a write as in [`WRITES`], on a route that also reads.
#[derive(Debug, Clone, Copy)]
pub(super) struct HasWritten;

/// In an answer's extensions: its body checks the thread's owner itself, before it shows anything of the thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChecksThread;

/// Authenticates a request. The owner is checked after the whole body has arrived: a slow client must not be judged by
/// the thread's state when it started to send, nor by a key that was revoked since.
async fn admitted(app: &App, request: Request) -> Result<Admitted, ApiError> {
    let (mut parts, mut body) = request.into_parts();
    let mut principal = principal_of(app, &parts.headers).await?;
    let mut again = None;
    // An unparsable or unknown path is left to the router to refuse.
    if principal.sees().is_some()
        && let Ok(params) = RawPathParams::from_request_parts(&mut parts, &()).await
        && let Some((_, thread)) = params.iter().find(|(name, _)| *name == "thread_id")
    {
        let mut collecting = pin!(collected(body, MAX_BODY_BYTES));
        // Most bodies arrive with their heads.
        let collected = if let Some(collected) = collecting.as_mut().now_or_never() {
            collected?
        } else {
            let collected = collecting.await?;
            principal = principal_of(app, &parts.headers).await?;
            collected
        };
        body = Body::from(collected);
        let thread = ThreadId::from(thread);
        let owner = check_thread(app, &principal, &thread).await?;
        // The answer to a deletion shows nothing of the thread, and stays true if somebody uses its id again.
        let deletes = deletes(&parts);
        let writes = parts.method == Method::POST && WRITES.contains(&route(&parts.extensions));
        let has_written = deletes || writes;
        again = (owner.is_none() || !deletes).then_some(Again { thread, has_written });
    }
    parts.extensions.insert(principal.clone());
    Ok(Admitted { request: Request::from_parts(parts, body), principal, again })
}

/// Whether a request deletes something: through the API, or with the page's form.
fn deletes(request: &Parts) -> bool {
    let is_form = || route(&request.extensions) == page::DELETE && request.method == Method::POST;
    request.method == Method::DELETE || is_form()
}

/// The route of the request with these extensions, by its template; empty if there is none.
pub(super) fn route(extensions: &Extensions) -> &str {
    extensions.get::<MatchedPath>().map_or("", MatchedPath::as_str)
}

/// The principal of a request.
///
/// # Errors
/// See [`principal`].
pub(super) async fn principal_of(app: &App, headers: &HeaderMap) -> Result<Principal, ApiError> {
    principal(app, presented(app, headers)).await
}

/// The principal with this key.
///
/// # Errors
/// 401 if the key is refused, 503 if the keys cannot be read.
pub(super) async fn principal(app: &App, key: Option<Secret>) -> Result<Principal, ApiError> {
    let found = app.auth.authenticate(key).await;
    let found = found.map_err(|error| {
        tracing::error!(%error, "cannot authenticate requests");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, NOT_AVAILABLE)
    })?;
    found.ok_or_else(not_authenticated)
}

/// Checks that the principal may know of the thread: it is theirs, has no owner, or does not exist. Returns its owner,
/// unless the principal sees all threads anyway.
///
/// # Errors
/// 404 for another user's thread, 500 if the check fails.
pub(super) async fn check_thread(
    app: &App,
    principal: &Principal,
    thread: &ThreadId,
) -> Result<Option<String>, ApiError> {
    let Some(user) = principal.sees() else { return Ok(None) };
    let owner = app.records.threads().owner(thread.as_str()).await.or_internal(FAILED)?;
    if owner.as_deref().is_none_or(|owner| owner == user) { Ok(owner) } else { Err(absent(thread)) }
}

/// The request's key: in a header, else of its session.
fn presented(app: &App, headers: &HeaderMap) -> Option<Secret> {
    key(headers).or_else(|| session_key(app, headers))
}

/// The key of a request that has none but that of its session.
fn session_key(app: &App, headers: &HeaderMap) -> Option<Secret> {
    let uses_it = app.has_page && app.auth.is_on() && key(headers).is_none();
    if uses_it { session::key(headers) } else { None }
}

/// The request's key: `x-api-key`, else a bearer token.
pub(super) fn key(headers: &HeaderMap) -> Option<Secret> {
    let text = |value: &HeaderValue| value.to_str().ok().map(str::to_owned);
    if let Some(key) = headers.get(API_KEY) {
        return text(key).map(Secret::new);
    }
    let authorization = headers.get(header::AUTHORIZATION).and_then(text)?;
    let (scheme, key) = authorization.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| Secret::new(key.trim()))
}

fn not_authenticated() -> ApiError {
    ApiError::unauthorized("not_authenticated", "Authentication required")
}

/// 403 unless the caller is an administrator.
pub(super) fn require_admin(principal: &Principal, refusal: &'static str) -> Result<(), ApiError> {
    if principal.is_admin() { Ok(()) } else { Err(ApiError::new(StatusCode::FORBIDDEN, refusal)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_in_its_own_header_or_a_bearer_token() {
        for (headers, expected) in [
            (vec![], None),
            (vec![("x-api-key", "k")], Some("k")),
            (vec![("authorization", "Bearer k")], Some("k")),
            (vec![("authorization", "bearer  k ")], Some("k")),
            (vec![("authorization", "Basic k")], None),
            (vec![("authorization", "k")], None),
            (vec![("x-api-key", "k"), ("authorization", "Bearer other")], Some("k")),
            (vec![("x-api-key", ""), ("authorization", "Bearer other")], Some("")),
        ] {
            let mut map = HeaderMap::new();
            for (name, value) in &headers {
                map.insert(*name, HeaderValue::from_static(value));
            }
            assert_eq!(key(&map).as_ref().map(Secret::expose), expected, "{headers:?}");
        }
        let mut map = HeaderMap::new();
        map.insert("x-api-key", HeaderValue::from_bytes(b"\xff").unwrap());
        assert!(key(&map).is_none());
    }
}

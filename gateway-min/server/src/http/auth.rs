//! Who asks, on every route: the key of a request, and whose threads it may name.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequestParts, MatchedPath, RawPathParams, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use futures::StreamExt as _;
use threadkeep::id::ThreadId;

use super::error::ApiError;
use super::threads::absent;
use crate::app::App;
use crate::auth::Principal;
use crate::config::Secret;

/// The header of SDK clients.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// The routes that need no key.
const PUBLIC: [&str; 2] = ["/health", "/openapi.json"];
/// How often it is looked whether the key of a long answer still stands.
const LOOK_EVERY: Duration = Duration::from_secs(2);
const NOT_AVAILABLE: &str = "Authentication is not available";
const FAILED: &str = "Failed to read thread";

/// Who a request comes from.
#[derive(Debug, Clone)]
pub(super) struct Caller(pub(super) Principal);

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let principal = parts.extensions.get::<Principal>().cloned();
        principal.map(Self).ok_or_else(not_authenticated)
    }
}

/// The layer around all routes: lets in who has a key, and notes who that is. Another user's thread in the path is not
/// found, whatever the route would do with it. An answer that takes its time, as a stream does, ends when its key is
/// revoked: for the run it is as if the client had left.
pub(super) async fn authenticate(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str);
    if PUBLIC.contains(&route) {
        return next.run(request).await;
    }
    let (mut parts, body) = request.into_parts();
    match admitted(&app, &mut parts).await {
        Ok(principal) => {
            parts.extensions.insert(principal);
            let key = key(&parts.headers).filter(|_| app.auth.is_on());
            let answer = next.run(Request::from_parts(parts, body));
            match key {
                Some(key) => while_stands(app, key, answer).await,
                None => answer.await,
            }
        }
        Err(error) => error.into_response(),
    }
}

/// The answer, as long as the key stands.
async fn while_stands(app: Arc<App>, key: Secret, answer: impl Future<Output = Response>) -> Response {
    let mut revoked = Box::pin(revoked(app, key));
    let answer = tokio::select! {
        biased;
        answer = answer => answer,
        () = &mut revoked => return not_authenticated().into_response(),
    };
    if answer.headers().get(header::CONTENT_TYPE).is_none_or(|kind| kind != "text/event-stream") {
        return answer;
    }
    let (parts, body) = answer.into_parts();
    Response::from_parts(parts, Body::from_stream(body.into_data_stream().take_until(revoked)))
}

/// Waits until the key is revoked. A file that cannot be read revokes nothing: it lets nobody in, and stops no work.
async fn revoked(app: Arc<App>, key: Secret) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        if let Ok(None) = app.auth.authenticate(Some(key.clone())).await {
            return;
        }
    }
}

async fn admitted(app: &App, parts: &mut Parts) -> Result<Principal, ApiError> {
    let principal = principal(app, &parts.headers).await?;
    // A path that is not to be read is the route's to refuse, and so is one that no route has.
    if let Ok(params) = RawPathParams::from_request_parts(parts, &()).await
        && let Some((_, thread)) = params.iter().find(|(name, _)| *name == "thread_id")
    {
        check_thread(app, &principal, &ThreadId::from(thread)).await?;
    }
    Ok(principal)
}

async fn principal(app: &App, headers: &HeaderMap) -> Result<Principal, ApiError> {
    let found = app.auth.authenticate(key(headers)).await;
    let found = found.map_err(|error| {
        tracing::error!(%error, "nobody can be let in");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, NOT_AVAILABLE)
    })?;
    found.ok_or_else(not_authenticated)
}

/// Whether the thread is one that the principal may know of: their own, one without an owner, or none at all.
///
/// # Errors
/// 404 for another user's thread, 500 if that cannot be told.
pub(super) async fn check_thread(
    app: &App,
    principal: &Principal,
    thread: &ThreadId,
) -> Result<(), ApiError> {
    let Some(user) = principal.sees() else { return Ok(()) };
    let row = app.store.threads().get(thread.as_str(), None).await;
    let row = row.map_err(|error| ApiError::internal(FAILED, &error))?;
    if row.is_none_or(|row| row.visible_to(Some(user))) { Ok(()) } else { Err(absent(thread)) }
}

/// The key that a request carries: `x-api-key`, else a bearer token.
fn key(headers: &HeaderMap) -> Option<Secret> {
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

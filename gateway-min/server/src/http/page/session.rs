//! Signing in with a key, and telling the page's own requests from those that other pages cause.
//!
//! The session is a cookie with the key: it holds on every process and after a restart, and ends with the key. Scripts
//! cannot read it, and browsers do not send it with requests that other sites cause. A request that changes something
//! also needs the page's token, which only the page's own script and forms have.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Form, FromRequest as _, FromRequestParts, Query, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{AppendHeaders, Html, IntoResponse as _, Redirect, Response};
use threadkeep_config::Secret;
use threadkeep_page::{self as view, Session};

use super::super::auth::{self, Caller};
use super::super::error::ApiError;
use super::super::extract::collected;
use super::super::origins;
use super::Parameters;
use crate::app::App;
use crate::auth::Principal;

/// The cookie of a session.
const COOKIE: &str = "threadkeep_key";
/// The cookie of a session over HTTPS, which a browser then sends to this host only, and never without encryption.
const SECURE_COOKIE: &str = "__Host-threadkeep_key";
/// How long a browser keeps a session.
const SECONDS: u32 = 12 * 60 * 60;
/// The header with which the script proves that a request comes from the page.
const PROOF: HeaderName = HeaderName::from_static("x-page-token");
/// The field with which a form does.
const PROOF_FIELD: &str = "token";
/// Separates the page's tokens from all other hashes.
const TOKEN_CONTEXT: &str = "threadkeep 2026-11-23 page token";
/// The maximum bytes of a form.
pub(super) const MAX_FORM_BYTES: usize = 64 * 1024;
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const NOT_FROM_THE_PAGE: &str = "This request does not come from the page. Reload the page and try again.";

/// The key of a request's session.
pub(in crate::http) fn key(headers: &HeaderMap) -> Option<Secret> {
    // A browser sends the cookies of all ports of a host in one line: another program's may have any characters.
    let lines = headers.get_all(header::COOKIE).iter().map(|value| String::from_utf8_lossy(value.as_bytes()));
    let lines: Vec<_> = lines.collect();
    let pairs = lines.iter().flat_map(|line| line.split(';'));
    let pairs: Vec<(&str, &str)> = pairs.filter_map(|pair| pair.trim().split_once('=')).collect();
    let named = |name| pairs.iter().find(|(found, value)| *found == name && !value.is_empty());
    let (_, key) = named(SECURE_COOKIE).or_else(|| named(COOKIE))?;
    Some(Secret::new(*key))
}

/// What proves that a request of this session comes from the page.
fn token(key: &Secret) -> blake3::Hash {
    blake3::Hasher::new_derive_key(TOKEN_CONTEXT).update(key.expose().as_bytes()).finalize()
}

/// Whether this text is the token of the session. The comparison takes constant time.
fn is_token(text: &str, key: &Secret) -> bool {
    blake3::Hash::from_hex(text).is_ok_and(|sent| sent == token(key))
}

/// Whether the script of the page sent a request of this session.
pub(in crate::http) fn is_from_the_script(headers: &HeaderMap, key: &Secret) -> bool {
    headers.get(PROOF).and_then(|proof| proof.to_str().ok()).is_some_and(|proof| is_token(proof, key))
}

/// The refusal of a request that another page may have caused.
pub(in crate::http) fn not_from_the_page() -> ApiError {
    ApiError::new(StatusCode::FORBIDDEN, NOT_FROM_THE_PAGE)
}

/// Who looks at a page.
pub(super) struct Viewer(pub(super) Session);

impl FromRequestParts<Arc<App>> for Viewer {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        if !app.auth.is_on() {
            return Ok(Self(Session::default()));
        }
        let Caller(principal) = Caller::from_request_parts(parts, app).await?;
        Ok(Self::of(&principal, &parts.headers))
    }
}

impl Viewer {
    /// Who looks at the page of an error, which may have come before its request was admitted. Nobody, if the key does not say.
    pub(super) async fn of_error(app: &App, headers: &HeaderMap) -> Self {
        if !app.auth.is_on() {
            return Self(Session::default());
        }
        let principal = auth::principal_of(app, headers).await;
        principal.map_or_else(|_| Self(Session::default()), |principal| Self::of(&principal, headers))
    }

    fn of(principal: &Principal, headers: &HeaderMap) -> Self {
        let token = key(headers).map(|key| token(&key).to_hex().to_string());
        Self(Session { user: Some(principal.user().to_owned()), token })
    }
}

/// The layer around all forms: refuses those without the session's token. A form of a client with a key in a header needs
/// none, and neither does one without keys, where [`origins::guard`] looks at every request.
pub(super) async fn only_from_the_page(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let key = key(request.headers()).filter(|_| auth::key(request.headers()).is_none());
    let Some(key) = key.filter(|_| app.auth.is_on()) else { return Ok(next.run(request).await) };
    let (parts, body) = request.into_parts();
    let body = collected(body, MAX_FORM_BYTES).await?;
    let read = Request::from_parts(parts.clone(), Body::from(body.clone()));
    let fields = Form::<Vec<(String, String)>>::from_request(read, &()).await;
    let Form(fields) = fields.map_err(|error| ApiError::bad_request(error.to_string()))?;
    if !fields.iter().any(|(name, value)| name == PROOF_FIELD && is_token(value, &key)) {
        return Err(not_from_the_page());
    }
    Ok(next.run(Request::from_parts(parts, Body::from(body))).await)
}

/// The address to go on to after signing in: one of this page, whatever the request says.
fn next_address(parameters: &Parameters) -> &str {
    let next = parameters.get("next").map_or("/", String::as_str);
    // `//host` and `/\host` are addresses of other hosts.
    let is_ours =
        next.starts_with('/') && !next[1..].starts_with(['/', '\\']) && !next.contains(char::is_control);
    if is_ours && HeaderValue::from_str(next).is_ok() { next } else { "/" }
}

/// Asks for a key.
pub(super) async fn ask(State(app): State<Arc<App>>, Query(parameters): Query<Parameters>) -> Response {
    if !app.auth.is_on() {
        return Redirect::to("/").into_response();
    }
    Html(view::sign_in(next_address(&parameters), false)).into_response()
}

/// Signs in with a key.
pub(super) async fn sign_in(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    Form(fields): Form<Parameters>,
) -> Result<Response, ApiError> {
    // Another page must not sign a person in, with a key that is not theirs.
    if !origins::is_same_site(&headers) {
        return Err(not_from_the_page());
    }
    let next = next_address(&fields);
    if !app.auth.is_on() {
        return Ok(Redirect::to("/").into_response());
    }
    let key = Secret::new(fields.get("key").map_or("", |key| key.trim()));
    if auth::principal(&app, Some(key.clone()))
        .await
        .is_err_and(|error| error.status() == StatusCode::UNAUTHORIZED)
    {
        return Ok((StatusCode::UNAUTHORIZED, Html(view::sign_in(next, true))).into_response());
    }
    // A key that is valid has no character that ends a cookie; one that could not be checked does not become one.
    auth::principal(&app, Some(key.clone())).await?;
    let cookie = cookie(is_https(&headers), key.expose(), SECONDS)?;
    Ok(([(header::SET_COOKIE, cookie)], Redirect::to(next)).into_response())
}

/// Forgets the key, also that of a session which began the other way, with or without HTTPS.
pub(super) async fn sign_out() -> Result<Response, ApiError> {
    let gone = [cookie(false, "", 0)?, cookie(true, "", 0)?].map(|cookie| (header::SET_COOKIE, cookie));
    Ok((AppendHeaders(gone), Redirect::to(super::SIGN_IN)).into_response())
}

/// The cookie with this key, which the browser keeps for `seconds`.
fn cookie(is_https: bool, key: &str, seconds: u32) -> Result<HeaderValue, ApiError> {
    let (name, secure) = if is_https { (SECURE_COOKIE, "; Secure") } else { (COOKIE, "") };
    let cookie = format!("{name}={key}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}");
    HeaderValue::from_str(&cookie)
        .map_err(|_| ApiError::bad_request("The key has characters that no key has"))
}

/// Whether the browser uses HTTPS: a proxy ends it, so the browser's own word for it counts, or the proxy's.
fn is_https(headers: &HeaderMap) -> bool {
    let says = |name: HeaderName, https: fn(&str) -> bool| {
        headers.get(name).and_then(|value| value.to_str().ok()).is_some_and(https)
    };
    says(header::ORIGIN, |origin| origin.starts_with("https://"))
        || says(X_FORWARDED_PROTO, |proto| proto.eq_ignore_ascii_case("https"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect()
    }

    #[test]
    fn the_key_is_found_among_other_cookies() {
        for (line, expected) in [
            ("threadkeep_key=k", Some("k")),
            ("a=b; threadkeep_key=k; c=d", Some("k")),
            ("threadkeep_key=old; __Host-threadkeep_key=k", Some("k")),
            ("threadkeep_key=", None),
            ("xthreadkeep_key=k", None),
            ("", None),
        ] {
            let found = key(&headers(&[("cookie", line)]));
            assert_eq!(found.as_ref().map(Secret::expose), expected, "{line}");
        }
    }

    #[test]
    fn a_cookie_of_another_program_does_not_hide_the_key() {
        let mut headers = HeaderMap::new();
        for line in [&b"name=caf\xe9; threadkeep_key=k"[..], "threadkeep_key=k; name=caf\u{e9}".as_bytes()] {
            headers.insert(header::COOKIE, HeaderValue::from_bytes(line).unwrap());
            let found = key(&headers);
            assert_eq!(found.as_ref().map(Secret::expose), Some("k"), "{line:?}");
        }
    }

    #[test]
    fn a_token_is_of_one_session() {
        let (key, other) = (Secret::new("tk_a"), Secret::new("tk_b"));
        let text = token(&key).to_hex().to_string();
        assert!(is_token(&text, &key) && !is_token(&text, &other));
        assert!(!is_token("", &key) && !is_token("tk_a", &key));
    }

    #[test]
    fn after_signing_in_a_browser_stays_here() {
        let next =
            |text: &str| next_address(&Parameters::from([("next".to_owned(), text.to_owned())])).to_owned();
        assert_eq!(next("/threads/t?at=1"), "/threads/t?at=1");
        for elsewhere in ["https://evil.example", "//evil.example", "/\\evil.example", "evil", "", "/a\nb"] {
            assert_eq!(next(elsewhere), "/", "{elsewhere:?}");
        }
        assert_eq!(next_address(&Parameters::new()), "/");
    }

    #[test]
    fn a_cookie_over_https_stays_there() {
        let of = |pairs: &[(&'static str, &'static str)]| cookie(is_https(&headers(pairs)), "k", 7).unwrap();
        let plain = of(&[("origin", "http://localhost:8001")]);
        assert_eq!(plain, "threadkeep_key=k; Path=/; Max-Age=7; HttpOnly; SameSite=Strict");
        for https in [("origin", "https://gateway.example"), ("x-forwarded-proto", "https")] {
            let secure = of(&[https]);
            assert_eq!(
                secure,
                "__Host-threadkeep_key=k; Path=/; Max-Age=7; HttpOnly; SameSite=Strict; Secure"
            );
        }
        assert!(cookie(false, "a\nb", 7).is_err());
    }
}

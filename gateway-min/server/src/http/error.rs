//! Error responses.

use std::borrow::Borrow;
use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::Router;
use serde::Serialize;
use serde_json::Value;
use threadkeep::Error;
use threadkeep::id::ThreadId;

use super::fields::{Problems, bounded};
use threadkeep_records::RecordsError;

/// The maximum size of a request body. The reference names no limit; this one leaves room for a conversation with
/// images, and keeps a stray upload from filling the memory.
pub const MAX_BODY_BYTES: usize = 32 * 1024 * 1024;

/// When to retry while the database is unavailable.
const AWAY: Duration = Duration::from_secs(1);

/// A response with an error status and a JSON body (service reference, "Error bodies").
///
/// The body is `{"detail": "<text>"}` and nothing else. Request validation puts the list of problems in `detail`,
/// authentication an object with `code` and `message`.
#[derive(Debug, thiserror::Error)]
#[error("HTTP {}: {}", status.as_u16(), body.text())]
pub struct ApiError {
    status: StatusCode,
    body: Body,
    retry_after: Option<Duration>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Body {
    Text { detail: String },
    Coded { detail: Coded },
    Problems { detail: Problems },
}

#[derive(Debug, Serialize)]
struct Coded {
    code: &'static str,
    message: String,
}

impl Body {
    fn text(&self) -> &str {
        match self {
            Self::Text { detail } => detail,
            Self::Coded { detail } => &detail.message,
            Self::Problems { .. } => "the request is not valid",
        }
    }
}

impl ApiError {
    /// An error with this status and text, which is cut if it is very long: a text may repeat what the request says.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self { status, body: Body::Text { detail: bounded(detail) }, retry_after: None }
    }

    /// 400: the request is well-formed, but cannot be served.
    pub fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    /// 401, in the form of authentication errors.
    pub fn unauthorized(code: &'static str, message: impl Into<String>) -> Self {
        let detail = Coded { code, message: message.into() };
        Self { status: StatusCode::UNAUTHORIZED, body: Body::Coded { detail }, retry_after: None }
    }

    /// 404: what the request names does not exist.
    pub fn not_found(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, detail)
    }

    /// 409: the request conflicts with the current state.
    pub fn conflict(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, detail)
    }

    /// 503: not possible while the database is unavailable, which may pass soon.
    pub fn unavailable(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, detail).retry_after(AWAY)
    }

    /// 500 with the route's own text; 503 if the database is unavailable, which may pass soon; 409 with the text of a lost
    /// history. Any other cause is logged and not sent to the client.
    pub fn internal(detail: &'static str, cause: &(dyn std::error::Error + 'static)) -> Self {
        tracing::error!(%cause, "{detail}");
        Self::caused(detail, cause)
    }

    fn caused(detail: &'static str, cause: &(dyn std::error::Error + 'static)) -> Self {
        if let Some(lost @ Error::HistoryLost { .. }) = cause.downcast_ref::<Error>() {
            // It is reported once, by whatever comes first. Its text says which thread and what to do.
            return Self::conflict(lost.to_string());
        }
        if is_unavailable(cause) {
            return Self::unavailable(detail);
        }
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, detail)
    }

    /// An error of the engine in a thread route (service reference, "HTTP mapping (threads router)"): a mode mismatch is 409, a
    /// reconfiguration 503, changes of LangGraph 409, each with its own text; anything else is as [`Self::internal`] has it.
    pub fn from_engine(thread: &ThreadId, detail: &'static str, error: &Error) -> Self {
        match error {
            Error::ModeMismatch => Self::conflict(format!("Thread {thread}: {error}")),
            Error::ForeignChanges { .. } => Self::conflict(error.to_string()),
            Error::Reconfiguration(text) => Self::new(StatusCode::SERVICE_UNAVAILABLE, *text),
            other => {
                tracing::error!(cause = %other, %thread, "{detail}");
                Self::caused(detail, other)
            }
        }
    }

    /// Adds the header `Retry-After`, in whole seconds, rounded up.
    pub fn retry_after(mut self, delay: Duration) -> Self {
        self.retry_after = Some(delay);
        self
    }

    /// The error of a part of the request: its text begins with the part.
    pub fn about(mut self, part: &str) -> Self {
        if let Body::Text { detail } = &mut self.body {
            *detail = format!("{part}: {detail}");
        }
        self
    }

    /// Whether this is its text.
    pub fn is_text(&self, text: &str) -> bool {
        self.body.text() == text
    }

    /// What its body has in `detail`.
    pub(crate) fn detail(&self) -> Value {
        // Texts and lists of strings and values always have a JSON form.
        match &self.body {
            Body::Text { detail } => detail.as_str().into(),
            Body::Coded { detail } => serde_json::to_value(detail).unwrap_or_default(),
            Body::Problems { detail } => serde_json::to_value(detail).unwrap_or_default(),
        }
    }

    /// The status.
    pub fn status(&self) -> StatusCode {
        self.status
    }
}

/// Converts an internal failure to a response.
pub(crate) trait OrApiError<T, E> {
    /// [`ApiError::internal`] with this text.
    fn or_internal(self, detail: &'static str) -> Result<T, ApiError>
    where
        E: std::error::Error + 'static;

    /// [`ApiError::from_engine`] with this text.
    fn or_engine(self, thread: &ThreadId, detail: &'static str) -> Result<T, ApiError>
    where
        E: Borrow<Error>;
}

impl<T, E> OrApiError<T, E> for Result<T, E> {
    fn or_internal(self, detail: &'static str) -> Result<T, ApiError>
    where
        E: std::error::Error + 'static,
    {
        self.map_err(|error| ApiError::internal(detail, &error))
    }

    fn or_engine(self, thread: &ThreadId, detail: &'static str) -> Result<T, ApiError>
    where
        E: Borrow<Error>,
    {
        self.map_err(|error| ApiError::from_engine(thread, detail, error.borrow()))
    }
}

/// Whether the error means that the database is unavailable.
fn is_unavailable(error: &(dyn std::error::Error + 'static)) -> bool {
    error.downcast_ref().is_some_and(Error::is_unavailable)
        || error.downcast_ref().is_some_and(RecordsError::is_unavailable)
}

impl From<Problems> for ApiError {
    /// 422 with the list.
    fn from(detail: Problems) -> Self {
        let status = StatusCode::UNPROCESSABLE_ENTITY;
        Self { status, body: Body::Problems { detail }, retry_after: None }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body)).into_response();
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(delay) = self.retry_after {
            let seconds = delay.as_secs() + u64::from(delay.subsec_nanos() > 0);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// Adds the conventions of all routes: unknown paths and methods get JSON responses. Call it after all routes are
/// added.
pub fn with_conventions<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    router.fallback(|| async { ApiError::not_found("Not Found") }).method_not_allowed_fallback(|| async {
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
    })
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use axum::http::Request;
    use axum::routing::get;
    use serde_json::{Value, json};
    use threadkeep_testing::Log;
    use tower::ServiceExt;

    use super::super::fields::Flaw;
    use super::*;

    async fn parts(response: Response) -> (u16, Option<String>, String) {
        let status = response.status().as_u16();
        let kind = response.headers().get(header::CONTENT_TYPE);
        let kind = kind.map(|value| value.to_str().unwrap().to_owned());
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        (status, kind, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn every_error_is_a_json_body_of_its_status() {
        let problems = Problems::one(vec!["body".into()], Flaw::missing(), Value::Null);
        for (error, status, body, text) in [
            (ApiError::new(StatusCode::NOT_IMPLEMENTED, "no"), 501, r#"{"detail":"no"}"#, "HTTP 501: no"),
            (ApiError::bad_request("bad"), 400, r#"{"detail":"bad"}"#, "HTTP 400: bad"),
            (
                ApiError::not_found("Thread t not found"),
                404,
                r#"{"detail":"Thread t not found"}"#,
                "HTTP 404: Thread t not found",
            ),
            (ApiError::conflict("busy"), 409, r#"{"detail":"busy"}"#, "HTTP 409: busy"),
            (
                ApiError::unauthorized("not_authenticated", "Authentication required"),
                401,
                r#"{"detail":{"code":"not_authenticated","message":"Authentication required"}}"#,
                "HTTP 401: Authentication required",
            ),
            (
                problems.into(),
                422,
                r#"{"detail":[{"type":"missing","loc":["body"],"msg":"Field required","input":null}]}"#,
                "HTTP 422: the request is not valid",
            ),
        ] {
            assert_eq!((error.to_string().as_str(), error.status().as_u16()), (text, status));
            let json = Some("application/json".to_owned());
            assert_eq!(parts(error.into_response()).await, (status, json, body.to_owned()));
        }
    }

    #[test]
    fn retry_after_is_in_whole_seconds_rounded_up() {
        for (delay, expected) in [(0, "0"), (1, "1"), (1000, "1"), (29_001, "30")] {
            let error = ApiError::conflict("busy").retry_after(Duration::from_millis(delay));
            assert_eq!(error.into_response().headers()[header::RETRY_AFTER], expected);
        }
        assert!(!ApiError::bad_request("x").into_response().headers().contains_key(header::RETRY_AFTER));
    }

    /// The response to an engine error of thread `t-1`, and what was logged.
    async fn mapped(error: &Error) -> (u16, String, String) {
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
        let error = tracing::subscriber::with_default(subscriber, || {
            ApiError::from_engine(&"t-1".into(), "Failed to get thread state", error)
        });
        let (status, _, body) = parts(error.into_response()).await;
        (status, body, log.text())
    }

    /// Service reference, "HTTP mapping (threads router)".
    #[tokio::test]
    async fn engine_errors_map_as_the_reference_says() {
        let (status, body, log) = mapped(&Error::ModeMismatch).await;
        let detail = "Thread t-1: Thread requires delta mode; materialize and convert its checkpoints before using full mode.";
        let expected = json!({"detail": detail});
        assert_eq!(
            (status, serde_json::from_str::<Value>(&body).unwrap(), log.as_str()),
            (409, expected, "")
        );

        for text in [threadkeep::MODE_RECONFIGURATION, threadkeep::CADENCE_RECONFIGURATION] {
            let (status, body, _) = mapped(&Error::Reconfiguration(text)).await;
            assert_eq!((status, body), (503, json!({"detail": text}).to_string()));
        }

        let lost = Error::HistoryLost { thread: "t-1".into(), seen: "revision 4 instead of 6".into() };
        let (status, body, log) = mapped(&lost).await;
        assert_eq!((status, body), (409, json!({"detail": lost.to_string()}).to_string()));
        assert!(lost.to_string().contains("revision 4 instead of 6") && log.contains("ERROR"), "{log}");
        // Also where the other errors have the text of the route.
        let error = ApiError::internal("Failed to delete thread", &lost);
        let (status, _, body) = parts(error.into_response()).await;
        assert_eq!((status, body), (409, json!({"detail": lost.to_string()}).to_string()));

        let foreign = Error::ForeignChanges {
            thread: "t-1".into(),
            checkpoint: threadkeep::id::CheckpointId::from_bytes([1; 16]),
            channel: "messages".into(),
        };
        let (status, body, log) = mapped(&foreign).await;
        assert_eq!(
            (status, body, log.as_str()),
            (409, json!({"detail": foreign.to_string()}).to_string(), "")
        );
        assert!(foreign.to_string().contains("continue the thread with that graph"));

        for error in [Error::corrupt("blobs", "bad checksum"), Error::InvalidInput("odd".into())] {
            let (status, body, log) = mapped(&error).await;
            assert_eq!((status, body.as_str()), (500, r#"{"detail":"Failed to get thread state"}"#));
            for part in ["ERROR", "Failed to get thread state", "t-1", &error.to_string()] {
                assert!(log.contains(part), "{part}: {log}");
            }
        }
    }

    #[tokio::test]
    async fn a_database_that_is_away_is_a_503_to_come_back_from() {
        let (status, body, log) =
            mapped(&Error::Unavailable { saver: "postgres", reason: "connection refused".into() }).await;
        assert_eq!((status, body.as_str()), (503, r#"{"detail":"Failed to get thread state"}"#));
        assert!(log.contains("connection refused"), "{log}");
        for away in [
            RecordsError::Unavailable { cause: threadkeep_records::DatabaseError::Busy },
            RecordsError::InDoubt { cause: threadkeep_records::DatabaseError::Busy },
        ] {
            let response = ApiError::internal("Failed to create run", &away).into_response();
            assert_eq!(response.status(), 503);
            assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        }
        let other = RecordsError::DuplicateRun { run_id: "r".into() };
        assert_eq!(ApiError::internal("Failed to create run", &other).status(), 500);
    }

    #[tokio::test]
    async fn unknown_paths_and_methods_answer_in_json() {
        let app: Router = with_conventions(Router::new().route("/known", get(|| async { "" })));
        for (method, path, status, body) in [
            ("GET", "/unknown", 404, r#"{"detail":"Not Found"}"#),
            ("POST", "/known", 405, r#"{"detail":"Method Not Allowed"}"#),
            ("GET", "/known", 200, ""),
        ] {
            let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
            let response = app.clone().oneshot(request).await.unwrap();
            if status == 405 {
                assert_eq!(response.headers()[header::ALLOW], "GET,HEAD");
            }
            let (found, _, text) = parts(response).await;
            assert_eq!((found, text.as_str()), (status, body), "{method} {path}");
        }
    }
}

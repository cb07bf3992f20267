//! What a command is answered: a result, or an error of the protocol.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Value, json};

use crate::http::error::ApiError;

/// A kind of error, as the protocol names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Code {
    InvalidArgument,
    UnknownCommand,
    UnknownError,
    NoSuchRun,
    NoSuchNamespace,
    NoSuchInterrupt,
    NoSuchCheckpoint,
    NotSupported,
}

/// Why a command is refused.
#[derive(Debug)]
pub(super) struct Refusal {
    code: Code,
    error: ApiError,
}

impl Refusal {
    pub(super) fn new(code: Code, status: StatusCode, message: impl Into<String>) -> Self {
        Self { code, error: ApiError::new(status, message) }
    }

    /// 404 for what the command names.
    pub(super) fn absent(code: Code, message: impl Into<String>) -> Self {
        Self { code, error: ApiError::not_found(message) }
    }

    /// The error of a route as that of a command; `absent` if what it does not find is no thread.
    pub(super) fn of(error: ApiError, absent: Code) -> Self {
        let code = match error.status() {
            StatusCode::NOT_FOUND => absent,
            StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY => Code::InvalidArgument,
            StatusCode::NOT_IMPLEMENTED => Code::NotSupported,
            // A conflict, or a failure: the protocol has no name for them.
            _ => Code::UnknownError,
        };
        Self { code, error }
    }

    /// The response to the command with this id. It has the status of the same error on the other routes, and what that
    /// has in `detail`.
    pub(super) fn into_response(self, id: i64) -> Response {
        let detail = self.error.detail();
        let message = match &detail {
            Value::String(text) => text.clone(),
            problems => spelt(problems),
        };
        let body = json!({
            "type": "error", "id": id, "error": self.code, "message": message, "detail": detail,
        });
        let mut response = self.error.into_response();
        *response.body_mut() = Json(body).into_response().into_body();
        response
    }
}

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Self::of(error, Code::InvalidArgument)
    }
}

/// The first of a request's problems as text, and how many there are besides.
fn spelt(problems: &Value) -> String {
    let first = &problems[0];
    let place = first["loc"].as_array().into_iter().flatten().skip(1).map(|step| match step {
        Value::String(key) => key.clone(),
        index => index.to_string(),
    });
    let place = place.collect::<Vec<_>>().join(".");
    let text = first["msg"].as_str().unwrap_or_default();
    match problems.as_array().map_or(0, Vec::len) {
        0 | 1 => format!("{place}: {text}"),
        more => format!("{place}: {text} (and {} more)", more - 1),
    }
}

/// The response to a command that was done.
pub(super) fn done(id: i64, result: Value, applied_through: Option<u64>) -> Response {
    let mut body = json!({ "type": "success", "id": id, "result": result });
    if let Some(seq) = applied_through {
        body["meta"] = json!({ "applied_through_seq": seq });
    }
    Json(body).into_response()
}

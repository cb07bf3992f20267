//! What the OpenAPI document needs besides the types that routes read and write.

use serde_json::{Value, json};
use utoipa::openapi::{Info, OpenApi, Server};
use utoipa::{IntoResponses, ToSchema};

/// The body of an error response.
#[derive(Debug, ToSchema)]
#[allow(dead_code, reason = "described, never built: `ApiError` is what routes return")]
pub(crate) struct ErrorBody {
    /// The error as text; for an invalid request, the list of its problems.
    detail: Value,
    /// With a text: a machine-readable code.
    #[schema(required = false)]
    code: Option<String>,
}

/// The errors of routes that read state through the gate.
#[derive(Debug, IntoResponses)]
#[allow(dead_code, reason = "described, never built: `ApiError` is what routes return")]
pub(crate) enum Gated {
    /// The thread has delta checkpoints, and this process runs in full mode; or another writer is active on the thread
    #[response(status = 409)]
    Conflict(ErrorBody),
    /// The request is not valid
    #[response(status = 422)]
    Invalid(ErrorBody),
    /// The store failed; the log says why
    #[response(status = 500)]
    Failed(ErrorBody),
}

/// The OpenAPI document, without the routes.
pub(crate) fn document() -> OpenApi {
    let info = Info::builder().title("Threadkeep").version(env!("CARGO_PKG_VERSION")).description(Some(
        "Threads of agents, their state and their runs. Every route below `/api` also answers below `/api/langgraph`.",
    ));
    OpenApi::builder().info(info.build()).servers(Some([Server::new("/")])).build()
}

/// The document as served.
pub(crate) fn rendered(document: &OpenApi) -> Value {
    // The document consists of strings, lists and objects, which always have a JSON form.
    serde_json::to_value(document).unwrap_or_else(|error| json!({ "error": error.to_string() }))
}

//! What the description of the API needs beside the types that routes read and write.

use serde_json::{Value, json};
use utoipa::openapi::{Info, OpenApi, Server};
use utoipa::{IntoResponses, ToSchema};

/// The body of an answer with an error status.
#[derive(Debug, ToSchema)]
#[allow(dead_code, reason = "described, never built: `ApiError` is what routes return")]
pub(crate) struct ErrorBody {
    /// What is wrong, in words; for a request that is not valid, the list of its problems.
    detail: Value,
    /// Beside a text: the same for programs.
    #[schema(required = false)]
    code: Option<String>,
}

/// The refusals of the routes that read state through the gate.
#[derive(Debug, IntoResponses)]
#[allow(dead_code, reason = "described, never built: `ApiError` is what routes return")]
pub(crate) enum Gated {
    /// The thread has delta checkpoints, and this process runs in full mode; or the thread is busy with another
    /// operation that writes
    #[response(status = 409)]
    Conflict(ErrorBody),
    /// The request is not valid
    #[response(status = 422)]
    Invalid(ErrorBody),
    /// The store failed; the log says why
    #[response(status = 500)]
    Failed(ErrorBody),
}

/// The description of the API, before the routes are added to it.
pub(crate) fn document() -> OpenApi {
    let info = Info::builder().title("Threadkeep").version(env!("CARGO_PKG_VERSION")).description(Some(
        "Threads of agents, their state and their runs. Every route below `/api` also answers below `/api/langgraph`.",
    ));
    OpenApi::builder().info(info.build()).servers(Some([Server::new("/")])).build()
}

/// The document as it is served.
pub(crate) fn rendered(document: &OpenApi) -> Value {
    // A document is made of texts, lists and objects, which always have a JSON form.
    serde_json::to_value(document).unwrap_or_else(|error| json!({ "error": error.to_string() }))
}

//! What this gateway is, and what it can do beyond what every gateway can.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use threadkeep_subagents::batches::Batching;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::App;

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(features)).routes(routes!(info))
}

/// What this gateway can do.
#[derive(Debug, Serialize, ToSchema)]
struct Features {
    /// Durable batches of delegations.
    subagent_batches: BatchFeature,
}

/// Durable batches of delegations.
#[derive(Debug, Serialize, ToSchema)]
struct BatchFeature {
    /// The same as `worker_running`.
    enabled: bool,
    /// Whether batches can be read: there is a SQL database.
    repository_available: bool,
    /// Whether this process works on batches.
    worker_running: bool,
    /// How many subagents this process runs at once, if it works on batches.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_running: Option<usize>,
}

/// Read what this gateway can do.
#[utoipa::path(get, path = "/api/features", tag = "service",
    responses((status = 200, description = "What is available", body = Features)))]
async fn features(State(app): State<Arc<App>>) -> Json<Features> {
    let worker_running = app.batching.as_deref().is_some_and(Batching::is_working);
    Json(Features {
        subagent_batches: BatchFeature {
            enabled: worker_running,
            repository_available: app.has_batches,
            worker_running,
            max_running: worker_running.then(|| app.admission.capacity()),
        },
    })
}

/// What this server is, in the words of LangGraph's servers.
#[derive(Debug, Serialize, ToSchema)]
struct Info {
    /// The version of the gateway.
    version: &'static str,
    /// What it can do of what LangGraph's servers can.
    flags: Flags,
}

/// What a server can do of what LangGraph's servers can.
#[derive(Debug, Serialize, ToSchema)]
struct Flags {
    /// Assistants can be read.
    assistants: bool,
    /// Runs can be scheduled.
    crons: bool,
    /// Runs are traced to LangSmith.
    langsmith: bool,
}

/// Read what this server is: chat pages for LangGraph ask it first.
#[utoipa::path(get, path = "/api/info", tag = "service",
    responses((status = 200, description = "The version and what there is", body = Info)))]
async fn info() -> Json<Info> {
    let flags = Flags { assistants: true, crons: false, langsmith: false };
    Json(Info { version: env!("CARGO_PKG_VERSION"), flags })
}

//! The health check.

use axum::Json;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The routes of this file.
pub(crate) fn routes<S: Clone + Send + Sync + 'static>() -> OpenApiRouter<S> {
    OpenApiRouter::new().routes(routes!(health))
}

// Without mode and cadence, as the service reference requires ("Thread, checkpoint and run records").
/// The health of the gateway.
#[derive(Debug, Serialize, ToSchema)]
struct Health {
    /// Always `healthy`.
    status: &'static str,
    /// The name of the service.
    service: &'static str,
}

/// Check that the gateway answers.
#[utoipa::path(get, path = "/health", tag = "service", responses((status = 200, description = "It does", body = Health)))]
async fn health() -> Json<Health> {
    Json(Health { status: "healthy", service: "threadkeep" })
}

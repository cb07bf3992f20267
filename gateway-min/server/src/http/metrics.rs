//! The counters, for Prometheus.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::auth::{Caller, require_admin};
use super::error::ApiError;
use super::schema::ErrorBody;
use crate::app::App;
use crate::metrics;

const ADMINS_ONLY: &str = "Admin privileges are required to read metrics.";

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(read_metrics))
}

/// Read the gateway's counters. For administrators only.
#[utoipa::path(get, path = "/metrics", tag = "service",
    responses((status = 200, description = "The counters as OpenMetrics text", content_type = "application/openmetrics-text", body = String),
        (status = 403, description = "The caller is not an administrator", body = ErrorBody)))]
async fn read_metrics(State(app): State<Arc<App>>, Caller(caller): Caller) -> Result<Response, ApiError> {
    require_admin(&caller, ADMINS_ONLY)?;
    let text = app.metrics().await;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}

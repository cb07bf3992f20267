//! Runs: create in its three forms, on a thread and without one; read, cancel, join.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use threadkeep::Error;
use threadkeep::id::ThreadId;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::error::ApiError;
use super::extract::{ApiJson, ApiPath, ApiQuery, RunPath, ThreadPath};
use super::fields::{Fields, FromFields};
use super::run_body::RunBody;
use super::sse;
use crate::app::App;
use crate::runs::admission::{CreateError, Created};
use crate::runs::bridge::Subscription;
use crate::store::{
    CancelAction, CancelOutcome, NewThread, RunQuery, RunRow, RunStatus, StoreError, ThreadRow,
};

/// At most so many runs are listed at once.
const LIST_MAX: i64 = 100;

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(stream))
        .routes(routes!(wait))
        .routes(routes!(create_stateless))
        .routes(routes!(stream_stateless))
        .routes(routes!(wait_stateless))
        .routes(routes!(read))
        .routes(routes!(cancel))
        .routes(routes!(join))
        .routes(routes!(join_stream, stop_stream))
}

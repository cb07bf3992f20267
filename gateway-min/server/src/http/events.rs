//! The events of a run.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use serde_json::{Map, Value};
use threadkeep_agent::serialize::time;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::error::{ApiError, OrApiError as _};
use super::extract::{ApiPath, ApiQuery, RunPath};
use super::fields::{Fields, FromFields};
use super::schema::ErrorBody;
use crate::app::App;
use threadkeep_records::{EventQuery, EventRow};

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(list_events))
}

/// Which events of the run to list.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
struct EventParams {
    /// Only these types: comma-separated names, matched exactly.
    event_types: Option<String>,
    /// Only events of this delegated task (`metadata.task_id`); the limit counts these.
    task_id: Option<String>,
    /// Maximum number of events.
    #[param(minimum = 1, maximum = 2000, default = 500, required = false)]
    limit: u32,
    /// Only events after this position in the thread's feed.
    #[param(minimum = 1)]
    after_seq: Option<i64>,
}

impl FromFields for EventParams {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let limit = fields.field("limit").integer(&(1..=EventQuery::MAX_LIMIT.into()));
        Self {
            // An empty string means no condition.
            event_types: fields.field("event_types").text().filter(|types| !types.is_empty()),
            task_id: fields.field("task_id").text(),
            limit: limit.and_then(|n| n.try_into().ok()).unwrap_or(EventQuery::DEFAULT_LIMIT),
            after_seq: fields.field("after_seq").integer(&(1..=i64::MAX)),
        }
    }
}

/// An event of a thread's feed.
#[derive(Debug, Serialize, ToSchema)]
struct RunEvent {
    /// The thread.
    thread_id: String,
    /// The run, or the synthetic run of a seeded feed.
    run_id: String,
    /// Its position in the thread's feed, from 1.
    seq: i64,
    /// For example `llm.ai.response`.
    event_type: String,
    /// For example `message`.
    category: String,
    /// The event's content.
    content: Value,
    /// Its metadata.
    #[schema(value_type = Object)]
    metadata: Map<String, Value>,
    /// When it happened, ISO-8601 in UTC.
    created_at: String,
}

impl From<EventRow> for RunEvent {
    fn from(row: EventRow) -> Self {
        Self {
            thread_id: row.thread_id,
            run_id: row.run_id,
            seq: row.seq,
            event_type: row.event_type,
            category: row.category,
            content: row.content,
            metadata: row.metadata,
            created_at: time(row.created_at),
        }
    }
}

/// List the events of a run, oldest first.
///
/// The list is empty for a run that does not exist.
#[utoipa::path(get, path = "/api/threads/{thread_id}/runs/{run_id}/events", tag = "runs",
    params(("thread_id" = String, Path), ("run_id" = String, Path), EventParams),
    responses((status = 200, description = "The events", body = Vec<RunEvent>),
        (status = 422, description = "A parameter is out of its range", body = ErrorBody)))]
async fn list_events(
    State(app): State<Arc<App>>,
    ApiPath(RunPath { thread_id, run_id }): ApiPath<RunPath>,
    ApiQuery(params): ApiQuery<EventParams>,
) -> Result<Json<Vec<RunEvent>>, ApiError> {
    let query = EventQuery {
        event_types: params.event_types.map(|types| types.split(',').map(str::to_owned).collect()),
        task_id: params.task_id,
        after_seq: params.after_seq,
        limit: params.limit,
        ..EventQuery::new(thread_id.as_str(), run_id)
    };
    let rows = app.records.events().list(&query).await.or_internal("Failed to list run events")?;
    Ok(Json(rows.into_iter().map(RunEvent::from).collect()))
}

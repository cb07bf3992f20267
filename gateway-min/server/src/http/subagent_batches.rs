//! The durable batches of a thread: read, paused, resumed, cancelled, and their failed items tried again.
//!
//! Runs submit batches with a tool; no route creates or deletes one.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::{BoxError, Json};
use futures::{TryStreamExt as _, stream};
use serde::Serialize;
use serde_json::Value;
use threadkeep::id::ThreadId;
use threadkeep_agent::serialize::time;
use threadkeep_records::{
    BatchItemRow, BatchItemStatus, BatchRow, Batches, ItemCounts, RecordsError, RetryOutcome,
};
use threadkeep_subagents::batches::Batching;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::auth::Caller;
use super::error::{ApiError, OrApiError as _};
use super::executions::Usage;
use super::extract::{ApiPath, ApiQuery, ThreadPath};
use super::fields::{Fields, FromFields};
use super::schema::ErrorBody;
use crate::app::App;
use crate::auth::Principal;

const NO_REPOSITORY: &str = "Subagent batch repository not available";
const NO_WORKER: &str = "Subagent batch worker is not running";
const NOT_FOUND: &str = "Subagent batch not found";
const UNKNOWN_STATUS: &str = "Unknown batch item status";
const NOT_FAILED: &str = "Only failed items can be retried";
const READ_FAILED: &str = "Failed to read subagent batches";
const WRITE_FAILED: &str = "Failed to change the subagent batch";

/// How many items the export reads at once: each comes with its whole result.
const EXPORT_PAGE: u32 = 20;

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(list_batches))
        .routes(routes!(get_batch))
        .routes(routes!(list_items))
        .routes(routes!(pause_batch))
        .routes(routes!(resume_batch))
        .routes(routes!(cancel_batch))
        .routes(routes!(retry_item))
        .routes(routes!(export_results))
}

/// The path of a batch.
pub(super) struct BatchPath {
    pub(super) thread_id: ThreadId,
    batch_id: String,
}

impl FromFields for BatchPath {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let ThreadPath { thread_id } = ThreadPath::from_fields(fields);
        Self { thread_id, batch_id: fields.field("batch_id").required().text().unwrap_or_default() }
    }
}

/// The path of an item of a batch.
struct ItemPath {
    batch: BatchPath,
    item_id: String,
}

impl FromFields for ItemPath {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let batch = BatchPath::from_fields(fields);
        Self { batch, item_id: fields.field("item_id").required().text().unwrap_or_default() }
    }
}

/// How many batches to list.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
struct ListParams {
    /// Maximum number of batches, newest first.
    #[param(minimum = 1, maximum = 100, default = 20, required = false)]
    limit: u32,
}

impl FromFields for ListParams {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let limit = fields.field("limit").integer(&(1..=100));
        Self { limit: limit.and_then(|n| n.try_into().ok()).unwrap_or(20) }
    }
}

/// Which items to list.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
struct ItemParams {
    /// Items to skip.
    #[param(minimum = 0, default = 0, required = false)]
    offset: u64,
    /// Maximum number of items.
    #[param(minimum = 1, maximum = 500, default = 100, required = false)]
    limit: u32,
    /// Only items with this status: `pending`, `queued`, `leased`, `running`, `succeeded`, `failed` or `cancelled`.
    status: Option<String>,
}

impl FromFields for ItemParams {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let offset = fields.field("offset").integer(&(0..=i64::MAX));
        let limit = fields.field("limit").integer(&(1..=500));
        Self {
            offset: offset.and_then(|n| n.try_into().ok()).unwrap_or(0),
            limit: limit.and_then(|n| n.try_into().ok()).unwrap_or(100),
            status: fields.field("status").text(),
        }
    }
}

/// A batch.
#[derive(Debug, Serialize, ToSchema)]
struct Batch {
    /// The batch.
    id: String,
    /// The thread that submitted it.
    thread_id: String,
    /// What people call it.
    title: String,
    /// The subagent.
    subagent_type: String,
    /// `queued`, `running`, `paused`, `completed`, `failed` or `cancelled`.
    status: &'static str,
    /// How many items it has.
    total_items: i64,
    /// How many items may be queued or at work.
    max_live_items: i64,
    /// How many items may be at work.
    max_running_items: i64,
    /// How often an item is tried.
    max_attempts: i64,
    /// When it was submitted, ISO-8601 in UTC.
    created_at: String,
    /// When it last changed.
    updated_at: String,
    /// When it ended.
    #[schema(required = true)]
    completed_at: Option<String>,
    /// How many items have each status.
    counts: BTreeMap<&'static str, u64>,
}

impl Batch {
    fn new(row: BatchRow, counts: &ItemCounts) -> Self {
        Self {
            id: row.id,
            thread_id: row.thread_id,
            title: row.title,
            subagent_type: row.subagent_type,
            status: row.status.as_str(),
            total_items: row.total_items,
            max_live_items: row.max_live_items,
            max_running_items: row.max_running_items,
            max_attempts: row.max_attempts,
            created_at: time(row.created_at),
            updated_at: time(row.updated_at),
            completed_at: row.completed_at.map(time),
            counts: counts.iter().map(|(status, number)| (status.as_str(), number)).collect(),
        }
    }
}

/// An item of a batch.
#[derive(Debug, Serialize, ToSchema)]
struct BatchItem {
    /// The item.
    id: String,
    /// Its batch.
    batch_id: String,
    /// What the submission calls it.
    item_key: String,
    /// Its place in the submission, from 0.
    position: i64,
    /// `pending`, `queued`, `leased`, `running`, `succeeded`, `failed` or `cancelled`.
    status: &'static str,
    /// Which attempt this is or was; 0 before the first.
    attempt: i64,
    /// The model of the last attempt.
    #[schema(required = true)]
    model_name: Option<String>,
    /// The beginning of its result.
    #[schema(required = true)]
    result_preview: Option<String>,
    /// Whether the stored result is cut.
    result_truncated: bool,
    /// Why it has no result, or why an earlier attempt had none.
    #[schema(required = true)]
    error: Option<String>,
    /// Why the last attempt stopped early.
    #[schema(required = true)]
    stop_reason: Option<String>,
    /// The tokens of the last attempt; null if no provider reported any.
    #[schema(required = true)]
    token_usage: Option<Usage>,
    /// What its result is checked against.
    #[schema(required = true)]
    acceptance_criteria: Option<Vec<String>>,
    /// What the check found.
    #[schema(required = true, value_type = Option<Object>)]
    acceptance_verdict: Option<Value>,
    /// When the current or the last attempt started, ISO-8601 in UTC.
    #[schema(required = true)]
    started_at: Option<String>,
    /// When it ended.
    #[schema(required = true)]
    completed_at: Option<String>,
    /// When it was submitted.
    created_at: String,
    /// When it last changed.
    updated_at: String,
}

impl From<BatchItemRow> for BatchItem {
    fn from(row: BatchItemRow) -> Self {
        Self {
            id: row.id,
            batch_id: row.batch_id,
            item_key: row.item_key,
            position: row.position,
            status: row.status.as_str(),
            attempt: row.attempt,
            model_name: row.model_name,
            result_preview: row.result_preview,
            result_truncated: row.result_truncated,
            error: row.error,
            stop_reason: row.stop_reason,
            token_usage: row.token_usage.map(Usage::from),
            acceptance_criteria: row.acceptance_criteria,
            acceptance_verdict: row.acceptance_verdict,
            started_at: row.started_at.map(time),
            completed_at: row.completed_at.map(time),
            created_at: time(row.created_at),
            updated_at: time(row.updated_at),
        }
    }
}

/// A line of the export: an item with its result.
#[derive(Debug, Serialize)]
struct ResultLine {
    #[serde(flatten)]
    item: BatchItem,
    result: Option<String>,
}

/// The repository.
///
/// # Errors
/// 503 without a SQL database.
fn repository(app: &App) -> Result<&Batches, ApiError> {
    if app.has_batches {
        Ok(app.records.batches())
    } else {
        Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, NO_REPOSITORY))
    }
}

/// Whether this process works on batches.
pub(super) fn works_on_batches(app: &App) -> bool {
    app.batching.as_deref().is_some_and(Batching::is_working)
}

/// Checks that the batch is of this thread and, as far as it has an owner, the caller's.
///
/// # Errors
/// 404.
pub(super) async fn found(app: &App, caller: &Principal, path: &BatchPath) -> Result<BatchRow, ApiError> {
    let row = repository(app)?.get(&path.batch_id).await.or_internal(READ_FAILED)?;
    let is_visible = |row: &BatchRow| {
        row.thread_id == path.thread_id.as_str()
            && caller.sees().is_none_or(|user| row.user_id.as_deref().is_none_or(|of| of == user))
    };
    row.filter(is_visible).ok_or_else(not_found)
}

fn not_found() -> ApiError {
    ApiError::not_found(NOT_FOUND)
}

async fn shown(app: &App, row: BatchRow) -> Result<Batch, ApiError> {
    let counts =
        app.records.batches().counts(std::slice::from_ref(&row.id)).await.or_internal(READ_FAILED)?;
    Ok(Batch::new(row.clone(), &counts.get(&row.id).cloned().unwrap_or_default()))
}

/// The batch after a change.
async fn changed(app: &App, row: Result<Option<BatchRow>, RecordsError>) -> Result<Json<Batch>, ApiError> {
    // Deleted in the meantime.
    let row = row.or_internal(WRITE_FAILED)?.ok_or_else(not_found)?;
    if let Some(batching) = &app.batching {
        batching.wake();
    }
    shown(app, row).await.map(Json)
}

/// List the batches of a thread, newest first.
#[utoipa::path(get, path = "/api/threads/{thread_id}/subagent-batches", tag = "threads",
    params(("thread_id" = String, Path), ListParams),
    responses((status = 200, description = "The batches", body = Vec<Batch>),
        (status = 404, description = "No such thread", body = ErrorBody),
        (status = 503, description = "There is no SQL database", body = ErrorBody)))]
async fn list_batches(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    ApiQuery(ListParams { limit }): ApiQuery<ListParams>,
) -> Result<Json<Vec<Batch>>, ApiError> {
    let batches = repository(&app)?;
    let rows = batches.of_thread(thread_id.as_str(), limit).await.or_internal(READ_FAILED)?;
    let ids: Vec<String> = rows.iter().map(|row| row.id.clone()).collect();
    let counts = batches.counts(&ids).await.or_internal(READ_FAILED)?;
    let own = rows
        .into_iter()
        .filter(|row| caller.sees().is_none_or(|user| row.user_id.as_deref().is_none_or(|of| of == user)));
    let none = ItemCounts::default();
    Ok(Json(own.map(|row| Batch::new(row.clone(), counts.get(&row.id).unwrap_or(&none))).collect()))
}

/// Read a batch.
#[utoipa::path(get, path = "/api/threads/{thread_id}/subagent-batches/{batch_id}", tag = "threads",
    params(("thread_id" = String, Path), ("batch_id" = String, Path)),
    responses((status = 200, description = "The batch", body = Batch),
        (status = 404, description = "No such batch", body = ErrorBody),
        (status = 503, description = "There is no SQL database", body = ErrorBody)))]
async fn get_batch(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiPath(path): ApiPath<BatchPath>,
) -> Result<Json<Batch>, ApiError> {
    let row = found(&app, &caller, &path).await?;
    shown(&app, row).await.map(Json)
}

/// List items of a batch by position, without their results.
#[utoipa::path(get, path = "/api/threads/{thread_id}/subagent-batches/{batch_id}/items", tag = "threads",
    params(("thread_id" = String, Path), ("batch_id" = String, Path), ItemParams),
    responses((status = 200, description = "The items", body = Vec<BatchItem>),
        (status = 404, description = "No such batch", body = ErrorBody),
        (status = 422, description = "There is no such status", body = ErrorBody),
        (status = 503, description = "There is no SQL database", body = ErrorBody)))]
async fn list_items(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiPath(path): ApiPath<BatchPath>,
    ApiQuery(params): ApiQuery<ItemParams>,
) -> Result<Json<Vec<BatchItem>>, ApiError> {
    let row = found(&app, &caller, &path).await?;
    let status = params.status.map(|status| status.parse::<BatchItemStatus>()).transpose();
    let status = status.map_err(|_| ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, UNKNOWN_STATUS))?;
    let items = app.records.batches().items(&row.id, status, params.offset, params.limit).await;
    Ok(Json(items.or_internal(READ_FAILED)?.into_iter().map(BatchItem::from).collect()))
}

/// Pause a batch: items at work go on, no other is begun.
///
/// A batch that has ended stays as it is.
#[utoipa::path(post, path = "/api/threads/{thread_id}/subagent-batches/{batch_id}/pause", tag = "threads",
    params(("thread_id" = String, Path), ("batch_id" = String, Path)),
    responses((status = 200, description = "The batch", body = Batch),
        (status = 404, description = "No such batch", body = ErrorBody),
        (status = 503, description = "There is no SQL database", body = ErrorBody)))]
async fn pause_batch(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiPath(path): ApiPath<BatchPath>,
) -> Result<Json<Batch>, ApiError> {
    let row = found(&app, &caller, &path).await?;
    changed(&app, app.records.batches().pause(&row.id).await).await
}

/// Resume a paused batch.
///
/// Any other batch stays as it is.
#[utoipa::path(post, path = "/api/threads/{thread_id}/subagent-batches/{batch_id}/resume", tag = "threads",
    params(("thread_id" = String, Path), ("batch_id" = String, Path)),
    responses((status = 200, description = "The batch", body = Batch),
        (status = 404, description = "No such batch", body = ErrorBody),
        (status = 503, description = "There is no SQL database", body = ErrorBody)))]
async fn resume_batch(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiPath(path): ApiPath<BatchPath>,
) -> Result<Json<Batch>, ApiError> {
    let row = found(&app, &caller, &path).await?;
    changed(&app, app.records.batches().resume(&row.id).await).await
}

/// Cancel a batch with all its items that have not ended.
///
/// A batch that has ended stays as it is.
#[utoipa::path(post, path = "/api/threads/{thread_id}/subagent-batches/{batch_id}/cancel", tag = "threads",
    params(("thread_id" = String, Path), ("batch_id" = String, Path)),
    responses((status = 200, description = "The batch", body = Batch),
        (status = 404, description = "No such batch", body = ErrorBody),
        (status = 503, description = "This process does not work on batches, or there is no SQL database",
            body = ErrorBody)))]
async fn cancel_batch(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiPath(path): ApiPath<BatchPath>,
) -> Result<Json<Batch>, ApiError> {
    repository(&app)?;
    if !works_on_batches(&app) {
        return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, NO_WORKER));
    }
    let row = found(&app, &caller, &path).await?;
    changed(&app, app.records.batches().cancel(&row.id).await).await
}

/// Try a failed item again, as if it were new.
///
/// A paused batch stays paused. Items of a cancelled batch are not tried again.
#[utoipa::path(post, path = "/api/threads/{thread_id}/subagent-batches/{batch_id}/items/{item_id}/retry",
    tag = "threads",
    params(("thread_id" = String, Path), ("batch_id" = String, Path), ("item_id" = String, Path)),
    responses((status = 200, description = "The item", body = BatchItem),
        (status = 404, description = "No such batch", body = ErrorBody),
        (status = 409, description = "There is no such item, or it has not failed", body = ErrorBody),
        (status = 503, description = "There is no SQL database", body = ErrorBody)))]
async fn retry_item(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiPath(ItemPath { batch, item_id }): ApiPath<ItemPath>,
) -> Result<Json<BatchItem>, ApiError> {
    let row = found(&app, &caller, &batch).await?;
    match app.records.batches().retry(&row.id, &item_id).await.or_internal(WRITE_FAILED)? {
        RetryOutcome::Retried(item) => {
            if let Some(batching) = &app.batching {
                batching.wake();
            }
            Ok(Json((*item).into()))
        }
        RetryOutcome::Refused => Err(ApiError::conflict(NOT_FAILED)),
    }
}

/// Download the items of a batch with their results, one JSON document a line.
#[utoipa::path(get, path = "/api/threads/{thread_id}/subagent-batches/{batch_id}/results.jsonl", tag = "threads",
    params(("thread_id" = String, Path), ("batch_id" = String, Path)),
    responses((status = 200, description = "The items by position, each with `result`",
            content_type = "application/x-ndjson", body = String),
        (status = 404, description = "No such batch", body = ErrorBody),
        (status = 503, description = "There is no SQL database", body = ErrorBody)))]
async fn export_results(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiPath(path): ApiPath<BatchPath>,
) -> Result<Response, ApiError> {
    let row = found(&app, &caller, &path).await?;
    let name = format!("attachment; filename=\"{}-results.jsonl\"", row.id);
    let batches = app.records.batches().clone();
    let pages = stream::try_unfold(None, move |after| {
        let (batches, batch_id) = (batches.clone(), row.id.clone());
        async move {
            let page = batches.results(&batch_id, after, EXPORT_PAGE).await;
            // The answer has begun, so it can only break off.
            let page = page.inspect_err(|error| tracing::error!(%error, batch_id, "{READ_FAILED}"))?;
            let Some((last, _)) = page.last() else { return Ok(None) };
            let after = Some(last.position);
            Ok::<_, BoxError>(Some((stream::iter(page.into_iter().map(line)), after)))
        }
    });
    let headers =
        [(header::CONTENT_TYPE, "application/x-ndjson"), (header::CONTENT_DISPOSITION, name.as_str())];
    Ok((headers, Body::from_stream(pages.try_flatten())).into_response())
}

/// An item with its result as a line of the export.
fn line((item, result): (BatchItemRow, Option<String>)) -> Result<String, BoxError> {
    let mut line = serde_json::to_string(&ResultLine { item: item.into(), result })?;
    line.push('\n');
    Ok(line)
}

//! Searches and counts threads. Only reads their records, so their mode does not matter.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::assistants::is_lead_agent;
use super::auth::Caller;
use super::described;
use super::error::{ApiError, OrApiError as _};
use super::extract::ApiJson;
use super::fields::{Fields, Flaw, FromFields, Problems};
use super::schema::ErrorBody;
use super::select::Select;
use super::threads::Thread;
use crate::app::App;
use crate::auth::Principal;
use threadkeep_records::{
    FilterProblem, MetadataFilter, ThreadOrder, ThreadQuery, ThreadRow, ThreadSort, ThreadStatus,
};

const SEARCH_FAILED: &str = "Failed to search threads";
/// The maximum number of threads in a response.
const LIMIT_MAX: i64 = 1000;
/// The default limit.
const LIMIT_DEFAULT: u32 = 100;
/// The fields of a thread.
const THREAD_FIELDS: [&str; 7] =
    ["thread_id", "status", "created_at", "updated_at", "metadata", "values", "interrupts"];
const NO_EXTRACT: &str =
    "'extract' is not supported: found threads come without their state; read it per thread";
/// The metadata in which LangGraph's servers record a thread's assistant, and by which chat pages list threads.
const ASSISTANT_KEYS: [&str; 2] = ["graph_id", "assistant_id"];

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(search_threads)).routes(routes!(count_threads))
}

#[allow(clippy::option_option, reason = "threads without a title can be asked for")]
/// Which threads to find.
#[derive(Debug, ToSchema)]
struct ThreadFilter {
    /// Exact values of metadata keys: null, booleans, 64-bit integers, floats, strings.
    #[schema(required = false, schema_with = described::metadata_filter)]
    metadata: Map<String, Value>,
    /// `idle`, `busy` (or `running`), `interrupted` or `error`: the stored status, of the last run.
    status: Option<String>,
    /// Only these threads.
    ids: Option<Vec<String>>,
    /// Values of the state: only the `title` can be searched for.
    #[schema(value_type = Option<TitleOnly>)]
    values: Option<Option<String>>,
}

/// The part of a thread's values that can be searched for.
#[derive(Debug, ToSchema)]
#[allow(dead_code, reason = "described, never built")]
struct TitleOnly {
    /// The whole title; null for threads without one.
    #[schema(value_type = Option<String>, required = false)]
    title: Option<String>,
}

impl FromFields for ThreadFilter {
    const BODY_OPTIONAL: bool = true;

    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self {
            metadata: fields.field("metadata").nullable().object().unwrap_or_default(),
            status: fields.field("status").nullable().text(),
            ids: fields.field("ids").nullable().texts(),
            values: values(fields),
        }
    }
}

#[allow(clippy::option_option, reason = "threads without a title can be asked for")]
/// The title to find: the one value that the records of threads have. Anything else would need every thread's state.
fn values(fields: &mut Fields<'_>) -> Option<Option<String>> {
    let mut values = fields.field("values").nullable().fields()?;
    let named = values.peek("title").is_some();
    let title = values.field("title").nullable().text();
    for (name, value) in values.into_rest() {
        let flaw = Flaw::unsupported(
            "Threads can be searched by their metadata and their title, not by other values",
        );
        fields.refuse_in("values", &name, flaw, value);
    }
    named.then_some(title)
}

impl ThreadFilter {
    /// The query for all matching threads that the caller may see; `None` if nothing can match.
    fn query(self, caller: &Principal) -> Result<Option<ThreadQuery>, ApiError> {
        let status = match self.status.as_deref() {
            None => None,
            Some("busy") => Some(ThreadStatus::Running),
            Some(name) => match name.parse() {
                Ok(status) => Some(status),
                Err(_) => return Ok(None),
            },
        };
        let mut metadata = metadata_filter(&self.metadata)?;
        for key in ASSISTANT_KEYS {
            // Every thread is the lead agent's, unless its metadata names another.
            if self.metadata.get(key).and_then(Value::as_str).is_some_and(is_lead_agent) {
                metadata = metadata.or_without(key);
            }
        }
        let owner = caller.sees().map(str::to_owned);
        let ids = self.ids;
        Ok(Some(ThreadQuery { metadata, status, ids, title: self.values, owner, ..ThreadQuery::default() }))
    }
}

/// Checks the filter: 422 for values that cannot be matched, else 400 for keys. A refused key is an error, not ignored,
/// because ignoring it would find more than requested.
pub(super) fn metadata_filter(metadata: &Map<String, Value>) -> Result<MetadataFilter, ApiError> {
    MetadataFilter::parse(metadata).map_err(|rejection| {
        let mut problems = Problems::default();
        for (key, problem) in &rejection.rejected {
            if *problem == FilterProblem::Value {
                let loc = vec!["body".into(), "metadata".into(), key.as_str().into()];
                let flaw = Flaw::new("metadata_filter_value", format!("Input is refused: {problem}"));
                problems.add(loc, flaw, metadata.get(key).cloned().unwrap_or_default());
            }
        }
        if problems.is_empty() { ApiError::bad_request(rejection.to_string()) } else { problems.into() }
    })
}

/// Which threads to find, and which page of them.
#[derive(Debug, ToSchema)]
struct ThreadSearch {
    #[schema(inline)]
    #[serde(flatten)]
    filter: ThreadFilter,
    /// Maximum number of threads.
    #[schema(minimum = 1, maximum = 1000, default = 100, required = false)]
    limit: u32,
    /// Number of threads to skip.
    #[schema(required = false)]
    offset: u64,
    /// What to sort by [default: pinned threads first, then the most recently changed].
    #[schema(rename = "sort_by", value_type = Option<SortBy>)]
    order: Option<ThreadOrder>,
    /// The direction of `sort_by`; alone, that of `updated_at` [default: desc].
    #[schema(value_type = Option<SortOrder>)]
    #[allow(dead_code, reason = "described; read into the order")]
    sort_order: (),
    /// The fields to return of each thread [default: all].
    #[schema(value_type = Option<Vec<ThreadField>>)]
    select: Select,
}

impl FromFields for ThreadSearch {
    const BODY_OPTIONAL: bool = true;

    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let limit = fields.field("limit").integer(&(1..=LIMIT_MAX));
        let offset = fields.field("offset").integer(&(0..=i64::MAX));
        Self {
            filter: ThreadFilter::from_fields(fields),
            limit: limit.and_then(|n| n.try_into().ok()).unwrap_or(LIMIT_DEFAULT),
            offset: offset.and_then(|n| n.try_into().ok()).unwrap_or(0),
            order: order(fields),
            sort_order: (),
            select: {
                fields.field("extract").unsupported(NO_EXTRACT);
                Select::from_fields(fields, &THREAD_FIELDS)
            },
        }
    }
}

fn order(fields: &mut Fields<'_>) -> Option<ThreadOrder> {
    let by = fields.field("sort_by").nullable().one_of(&["thread_id", "status", "created_at", "updated_at"]);
    let direction = fields.field("sort_order").nullable().one_of(&["asc", "desc"]);
    let by = match by {
        Some("thread_id") => ThreadSort::ThreadId,
        Some("status") => ThreadSort::Status,
        Some("created_at") => ThreadSort::CreatedAt,
        Some(_) => ThreadSort::UpdatedAt,
        // A direction alone is that of the default key.
        None => direction.map(|_| ThreadSort::UpdatedAt)?,
    };
    Some(ThreadOrder { by, ascending: direction == Some("asc") })
}

/// What threads can be sorted by.
#[derive(Debug, ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "described, never built")]
enum SortBy {
    ThreadId,
    Status,
    CreatedAt,
    UpdatedAt,
}

/// A direction.
#[derive(Debug, ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "described, never built")]
pub(super) enum SortOrder {
    Asc,
    Desc,
}

/// A field of a thread.
#[derive(Debug, ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "described, never built")]
enum ThreadField {
    ThreadId,
    Status,
    CreatedAt,
    UpdatedAt,
    Metadata,
    Values,
    Interrupts,
}

/// Find threads: pinned ones first, then the most recently changed.
///
/// Beyond `gateway.history_max_bytes` for all threads together, the metadata of a thread is left out and has only
/// `svc_metadata_omitted`: read such a thread alone.
#[utoipa::path(post, path = "/api/threads/search", tag = "threads", request_body = Option<ThreadSearch>,
    responses((status = 200, description = "The threads, or the selected fields of them, with their titles as values",
            body = Vec<Thread>),
        (status = 400, description = "A metadata key cannot be searched for", body = ErrorBody),
        (status = 422, description = "The request is not valid", body = ErrorBody)))]
async fn search_threads(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiJson(body): ApiJson<ThreadSearch>,
) -> Result<Json<Vec<Value>>, ApiError> {
    let ThreadSearch { filter, limit, offset, order, select, .. } = body;
    let Some(query) = filter.query(&caller)? else { return Ok(Json(Vec::new())) };
    // What is not shown is not read.
    let metadata_bytes = Some(if select.wants("metadata") { app.history_max_bytes } else { 0 });
    let query = ThreadQuery { limit, offset, order, metadata_bytes, ..query };
    let rows = app.records.threads().search(&query).await.or_internal(SEARCH_FAILED)?;
    select.of_each(rows.into_iter().map(found), SEARCH_FAILED).map(Json)
}

/// A thread with only its title in `values`.
fn found(mut row: ThreadRow) -> Thread {
    let title = row.display_name.take();
    let mut thread = Thread::from(row);
    thread.values.extend(title.map(|title| ("title".to_owned(), json!(title))));
    thread
}

/// Count threads.
#[utoipa::path(post, path = "/api/threads/count", tag = "threads", request_body = Option<ThreadFilter>,
    responses((status = 200, description = "How many there are", content_type = "application/json", body = u64),
        (status = 400, description = "A metadata key cannot be searched for", body = ErrorBody),
        (status = 422, description = "The request is not valid", body = ErrorBody)))]
async fn count_threads(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiJson(body): ApiJson<ThreadFilter>,
) -> Result<Json<u64>, ApiError> {
    let Some(query) = body.query(&caller)? else { return Ok(Json(0)) };
    let count = app.records.threads().count(&query).await;
    count.map(Json).or_internal(SEARCH_FAILED)
}

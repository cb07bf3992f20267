//! Searches and counts threads. Only reads their records, so their mode does not matter.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::auth::Caller;
use super::error::{ApiError, OrApiError as _};
use super::extract::ApiJson;
use super::fields::{Fields, Flaw, FromFields, Problems};
use super::schema::ErrorBody;
use super::threads::Thread;
use crate::app::App;
use crate::auth::Principal;
use threadkeep_records::{FilterProblem, MetadataFilter, ThreadQuery, ThreadRow, ThreadStatus};

const SEARCH_FAILED: &str = "Failed to search threads";
/// The maximum number of threads in a response.
const LIMIT_MAX: i64 = 1000;
/// The default limit.
const LIMIT_DEFAULT: u32 = 100;

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(search_threads)).routes(routes!(count_threads))
}

/// Which threads to find. Other fields are ignored.
#[derive(Debug, ToSchema)]
struct ThreadFilter {
    /// Exact values of metadata keys: null, booleans, 64-bit integers, floats, strings.
    #[schema(value_type = Object, required = false)]
    metadata: Map<String, Value>,
    /// `idle`, `busy` (or `running`), `interrupted` or `error`: the stored status, of the last run.
    status: Option<String>,
    /// Only these threads.
    ids: Option<Vec<String>>,
}

impl FromFields for ThreadFilter {
    const BODY_OPTIONAL: bool = true;

    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self {
            metadata: fields.field("metadata").nullable().object().unwrap_or_default(),
            status: fields.field("status").nullable().text(),
            ids: fields.field("ids").nullable().texts(),
        }
    }
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
        let metadata = metadata_filter(&self.metadata)?;
        let owner = caller.sees().map(str::to_owned);
        Ok(Some(ThreadQuery { metadata, status, ids: self.ids, owner, ..ThreadQuery::default() }))
    }
}

/// Checks the filter: 422 for values that cannot be matched, else 400 for keys. A refused key is an error, not ignored,
/// because ignoring it would find more than requested.
fn metadata_filter(metadata: &Map<String, Value>) -> Result<MetadataFilter, ApiError> {
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

/// Which threads to find, and which page of them. Other fields are ignored.
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
        }
    }
}

/// Find threads: pinned ones first, then the most recently changed.
#[utoipa::path(post, path = "/api/threads/search", tag = "threads", request_body = Option<ThreadSearch>,
    responses((status = 200, description = "The threads, with their titles as values", body = Vec<Thread>),
        (status = 400, description = "A metadata key cannot be searched for", body = ErrorBody),
        (status = 422, description = "The request is not valid", body = ErrorBody)))]
async fn search_threads(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiJson(body): ApiJson<ThreadSearch>,
) -> Result<Json<Vec<Thread>>, ApiError> {
    let Some(query) = body.filter.query(&caller)? else { return Ok(Json(Vec::new())) };
    let query = ThreadQuery { limit: body.limit, offset: body.offset, ..query };
    let rows = app.store.threads().search(&query).await.or_internal(SEARCH_FAILED)?;
    Ok(Json(rows.into_iter().map(found).collect()))
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
    responses((status = 200, description = "How many there are", body = u64),
        (status = 400, description = "A metadata key cannot be searched for", body = ErrorBody),
        (status = 422, description = "The request is not valid", body = ErrorBody)))]
async fn count_threads(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiJson(body): ApiJson<ThreadFilter>,
) -> Result<Json<u64>, ApiError> {
    let Some(query) = body.query(&caller)? else { return Ok(Json(0)) };
    let count = app.store.threads().count(&query).await;
    count.map(Json).or_internal(SEARCH_FAILED)
}

//! Assistants, as far as SDK clients need them: the lead agent is the only one.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::described;
use super::error::ApiError;
use super::extract::{ApiJson, ApiPath, ApiQuery};
use super::fields::{Fields, Flaw, FromFields};
use super::schema::ErrorBody;
use super::search::{SortOrder, metadata_filter};
use super::select::Select;
use super::unsupported::fixed_assistants;
use crate::app::App;

/// The id of the assistant, and of its graph.
const LEAD_AGENT: &str = "lead_agent";
/// The assistant is built in and has no creation time.
const CREATED_AT: &str = "1970-01-01T00:00:00.000000+00:00";

/// What assistants can be sorted by.
const SORTS: [&str; 5] = ["assistant_id", "graph_id", "name", "created_at", "updated_at"];
/// The fields of an assistant.
const FIELDS: [&str; 10] = [
    "assistant_id",
    "graph_id",
    "name",
    "config",
    "context",
    "metadata",
    "description",
    "created_at",
    "updated_at",
    "version",
];

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(search_assistants))
        .routes(routes!(count_assistants))
        .routes(routes!(get_assistant, update_assistant, delete_assistant))
        .routes(routes!(get_subgraphs))
        .routes(routes!(get_subgraphs_of))
        .routes(routes!(list_versions))
        .routes(routes!(set_latest))
        .routes(routes!(get_assistant_graph))
        .routes(routes!(get_assistant_schemas))
}

/// Takes the field `name`, which names an assistant. The only one is the lead agent, also spelt `lead-agent`; an unknown
/// one is refused, because running another agent than the requested one would go unnoticed.
pub(super) fn named(fields: &mut Fields<'_>, name: &str) -> Option<String> {
    fields.field(name).nullable().read(|value| match value {
        Value::String(id) if is_lead_agent(&id) => Ok(id),
        Value::String(id) => Err((Flaw::new("unknown_assistant", only_one()), id.into())),
        other => Err((Flaw::new("string_type", "Input should be a valid string"), other)),
    })
}

/// What is said of another assistant than the lead agent.
pub(super) fn only_one() -> String {
    format!("Assistant not found; there is one, '{LEAD_AGENT}'")
}

/// Whether this names the lead agent.
pub(super) fn is_lead_agent(id: &str) -> bool {
    id.to_ascii_lowercase().replace('-', "_") == LEAD_AGENT
}

fn lead_agent() -> Value {
    json!({
        "assistant_id": LEAD_AGENT, "graph_id": LEAD_AGENT, "name": LEAD_AGENT, "config": {}, "context": {},
        "metadata": {"created_by": "system"}, "description": null, "created_at": CREATED_AT,
        "updated_at": CREATED_AT, "version": 1,
    })
}

/// Which assistants to find.
#[derive(Debug, ToSchema)]
struct AssistantFilter {
    /// Only those with this graph.
    graph_id: Option<String>,
    /// Only those whose name contains this.
    name: Option<String>,
    /// Exact values of metadata keys.
    #[schema(required = false, schema_with = described::metadata_filter)]
    metadata: Map<String, Value>,
    /// Maximum number of results.
    #[schema(minimum = 1, default = 10, required = false)]
    limit: i64,
    /// Number of results to skip.
    #[schema(minimum = 0, default = 0, required = false)]
    offset: i64,
}

impl AssistantFilter {
    fn conditions(fields: &mut Fields<'_>) -> Self {
        Self {
            graph_id: fields.field("graph_id").nullable().text(),
            name: fields.field("name").nullable().text(),
            metadata: fields.field("metadata").nullable().object().unwrap_or_default(),
            limit: 10,
            offset: 0,
        }
    }
}

impl FromFields for AssistantFilter {
    const BODY_OPTIONAL: bool = true;

    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self {
            limit: fields.field("limit").integer(&(1..=i64::MAX)).unwrap_or(10),
            offset: fields.field("offset").integer(&(0..=i64::MAX)).unwrap_or(0),
            ..Self::conditions(fields)
        }
    }
}

/// Which assistants to find, and what to return of them.
#[derive(Debug, ToSchema)]
struct AssistantSearch {
    #[schema(inline)]
    #[serde(flatten)]
    filter: AssistantFilter,
    /// What to sort by.
    #[allow(dead_code, reason = "described and checked only: one is always sorted")]
    sort_by: Option<AssistantSort>,
    /// The direction.
    #[allow(dead_code, reason = "described and checked only: one is always sorted")]
    sort_order: Option<SortOrder>,
    /// The fields to return of each assistant [default: all].
    #[schema(value_type = Option<Vec<AssistantField>>)]
    select: Select,
}

/// What assistants can be sorted by.
#[derive(Debug, ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "described, never built")]
enum AssistantSort {
    AssistantId,
    GraphId,
    Name,
    CreatedAt,
    UpdatedAt,
}

/// A field of an assistant.
#[derive(Debug, ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "described, never built")]
enum AssistantField {
    AssistantId,
    GraphId,
    Name,
    Config,
    Context,
    Metadata,
    Description,
    CreatedAt,
    UpdatedAt,
    Version,
}

impl FromFields for AssistantSearch {
    const BODY_OPTIONAL: bool = true;

    fn from_fields(fields: &mut Fields<'_>) -> Self {
        fields.field("sort_by").nullable().one_of(&SORTS);
        fields.field("sort_order").nullable().one_of(&["asc", "desc"]);
        Self {
            filter: AssistantFilter::from_fields(fields),
            sort_by: None,
            sort_order: None,
            select: Select::from_fields(fields, &FIELDS),
        }
    }
}

/// Which assistants to count.
#[derive(Debug, ToSchema)]
struct AssistantCount {
    /// Only those with this graph.
    #[allow(dead_code, reason = "described; read as a filter")]
    graph_id: Option<String>,
    /// Only those whose name contains this.
    #[allow(dead_code, reason = "described; read as a filter")]
    name: Option<String>,
    /// Exact values of metadata keys.
    #[schema(required = false, schema_with = described::metadata_filter)]
    #[allow(dead_code, reason = "described; read as a filter")]
    metadata: Map<String, Value>,
    #[schema(ignore)]
    filter: AssistantFilter,
}

impl FromFields for AssistantCount {
    const BODY_OPTIONAL: bool = true;

    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let filter = AssistantFilter::conditions(fields);
        Self { graph_id: None, name: None, metadata: Map::new(), filter }
    }
}

/// Which versions to list.
#[derive(Debug, ToSchema)]
struct VersionFilter {
    /// Exact values of metadata keys.
    #[schema(required = false, schema_with = described::metadata_filter)]
    metadata: Map<String, Value>,
    /// Maximum number of versions.
    #[schema(minimum = 1, default = 10, required = false)]
    limit: i64,
    /// Number of versions to skip.
    #[schema(minimum = 0, default = 0, required = false)]
    offset: i64,
}

impl FromFields for VersionFilter {
    const BODY_OPTIONAL: bool = true;

    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self {
            metadata: fields.field("metadata").nullable().object().unwrap_or_default(),
            limit: fields.field("limit").integer(&(1..=i64::MAX)).unwrap_or(10),
            offset: fields.field("offset").integer(&(0..=i64::MAX)).unwrap_or(0),
        }
    }
}

/// The version to use.
#[derive(Debug, ToSchema)]
struct LatestVersion {
    /// Its number.
    version: i64,
}

impl FromFields for LatestVersion {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self { version: fields.field("version").required().integer(&(i64::MIN..=i64::MAX)).unwrap_or(0) }
    }
}

/// How deep to look into a graph.
struct GraphParams;

impl FromFields for GraphParams {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        // Either way: the graph has no nested one.
        let xray = fields.field("xray").nullable();
        if xray.is_text_of(|text| text.parse::<i64>().is_ok()) {
            xray.integer(&(0..=i64::MAX));
        } else {
            xray.flag();
        }
        Self
    }
}

/// How deep to look for nested graphs.
struct SubgraphParams;

impl FromFields for SubgraphParams {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        fields.field("recurse").nullable().flag();
        Self
    }
}

impl AssistantFilter {
    /// Whether the lead agent is among what is looked for.
    ///
    /// # Errors
    /// Those of [`metadata_filter`].
    fn matches(&self) -> Result<bool, ApiError> {
        metadata_filter(&self.metadata)?;
        Ok(self.graph_id.as_deref().is_none_or(is_lead_agent)
            && self.name.as_deref().is_none_or(|name| LEAD_AGENT.contains(&name.to_lowercase()))
            && self.metadata.iter().all(|(key, value)| key == "created_by" && value == "system"))
    }
}

/// The path of an assistant.
struct AssistantPath {
    assistant_id: String,
}

impl FromFields for AssistantPath {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self { assistant_id: fields.field("assistant_id").required().text().unwrap_or_default() }
    }
}

/// The path of a nested graph.
struct SubgraphPath {
    assistant: AssistantPath,
}

impl FromFields for SubgraphPath {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        fields.field("namespace").required().text();
        Self { assistant: AssistantPath::from_fields(fields) }
    }
}

impl AssistantPath {
    fn check(&self) -> Result<(), ApiError> {
        let absent = || ApiError::not_found(format!("Assistant {} not found", self.assistant_id));
        if is_lead_agent(&self.assistant_id) { Ok(()) } else { Err(absent()) }
    }
}

/// Find assistants.
#[utoipa::path(post, path = "/api/assistants/search", tag = "assistants", request_body = Option<AssistantSearch>,
    responses((status = 200, description = "The assistants, or the selected fields of them", body = Vec<Value>)))]
async fn search_assistants(ApiJson(body): ApiJson<AssistantSearch>) -> Result<Json<Vec<Value>>, ApiError> {
    let AssistantSearch { filter, select, .. } = body;
    let found = filter.matches()? && filter.offset == 0 && filter.limit > 0;
    select.of_each(found.then(lead_agent), "Failed to search assistants").map(Json)
}

/// Count assistants.
#[utoipa::path(post, path = "/api/assistants/count", tag = "assistants", request_body = Option<AssistantCount>,
    responses((status = 200, description = "How many there are", content_type = "application/json", body = u64)))]
async fn count_assistants(ApiJson(body): ApiJson<AssistantCount>) -> Result<Json<u64>, ApiError> {
    body.filter.matches().map(|found| Json(found.into()))
}

/// Change an assistant.
///
/// Not supported.
#[utoipa::path(patch, path = "/api/assistants/{assistant_id}", tag = "assistants",
    params(("assistant_id" = String, Path)),
    responses((status = 501, description = "Not supported", body = ErrorBody)))]
async fn update_assistant(request: Request) -> ApiError {
    fixed_assistants(request).await
}

/// Delete an assistant.
///
/// Not supported.
#[utoipa::path(delete, path = "/api/assistants/{assistant_id}", tag = "assistants",
    params(("assistant_id" = String, Path), ("delete_threads" = Option<bool>, Query)),
    responses((status = 501, description = "Not supported", body = ErrorBody)))]
async fn delete_assistant(request: Request) -> ApiError {
    fixed_assistants(request).await
}

/// List the graphs nested in an assistant's: there are none.
#[utoipa::path(get, path = "/api/assistants/{assistant_id}/subgraphs", tag = "assistants",
    params(("assistant_id" = String, Path), ("recurse" = Option<bool>, Query)),
    responses((status = 200, description = "The nested graphs by namespace; empty", body = Object),
        (status = 404, description = "No such assistant", body = ErrorBody)))]
async fn get_subgraphs(
    ApiPath(path): ApiPath<AssistantPath>,
    ApiQuery(SubgraphParams): ApiQuery<SubgraphParams>,
) -> Result<Json<Value>, ApiError> {
    path.check().map(|()| Json(json!({})))
}

/// List the graphs nested in an assistant's in one namespace: there are none.
#[utoipa::path(get, path = "/api/assistants/{assistant_id}/subgraphs/{namespace}", tag = "assistants",
    params(("assistant_id" = String, Path), ("namespace" = String, Path), ("recurse" = Option<bool>, Query)),
    responses((status = 200, description = "The nested graphs by namespace; empty", body = Object),
        (status = 404, description = "No such assistant", body = ErrorBody)))]
async fn get_subgraphs_of(
    ApiPath(path): ApiPath<SubgraphPath>,
    ApiQuery(SubgraphParams): ApiQuery<SubgraphParams>,
) -> Result<Json<Value>, ApiError> {
    path.assistant.check().map(|()| Json(json!({})))
}

/// List the versions of an assistant: there is one.
#[utoipa::path(post, path = "/api/assistants/{assistant_id}/versions", tag = "assistants",
    params(("assistant_id" = String, Path)), request_body = Option<VersionFilter>,
    responses((status = 200, description = "The versions", body = Vec<Value>),
        (status = 404, description = "No such assistant", body = ErrorBody)))]
async fn list_versions(
    ApiPath(path): ApiPath<AssistantPath>,
    ApiJson(VersionFilter { metadata, limit, offset }): ApiJson<VersionFilter>,
) -> Result<Json<Vec<Value>>, ApiError> {
    path.check()?;
    let filter = AssistantFilter { graph_id: None, name: None, metadata, limit, offset };
    let found = filter.matches()? && offset == 0 && limit > 0;
    Ok(Json(found.then(lead_agent).into_iter().collect()))
}

/// Use a version of an assistant: the one that there is.
#[utoipa::path(post, path = "/api/assistants/{assistant_id}/latest", tag = "assistants",
    params(("assistant_id" = String, Path)), request_body = LatestVersion,
    responses((status = 200, description = "The assistant", body = Value),
        (status = 404, description = "No such assistant or version", body = ErrorBody)))]
async fn set_latest(
    ApiPath(path): ApiPath<AssistantPath>,
    ApiJson(LatestVersion { version }): ApiJson<LatestVersion>,
) -> Result<Json<Value>, ApiError> {
    path.check()?;
    let assistant = lead_agent();
    if assistant["version"] == version {
        return Ok(Json(assistant));
    }
    Err(ApiError::not_found(format!("Assistant {} has no version {version}", path.assistant_id)))
}

/// Read an assistant.
#[utoipa::path(get, path = "/api/assistants/{assistant_id}", tag = "assistants",
    params(("assistant_id" = String, Path)),
    responses((status = 200, description = "The assistant", body = Value),
        (status = 404, description = "No such assistant", body = ErrorBody)))]
async fn get_assistant(ApiPath(path): ApiPath<AssistantPath>) -> Result<Json<Value>, ApiError> {
    path.check().map(|()| Json(lead_agent()))
}

/// Read the graph of an assistant. Nodes and edges are not listed.
#[utoipa::path(get, path = "/api/assistants/{assistant_id}/graph", tag = "assistants",
    params(("assistant_id" = String, Path), ("xray" = Option<bool>, Query)),
    responses((status = 200, description = "The graph, without nodes and edges", body = Value),
        (status = 404, description = "No such assistant", body = ErrorBody)))]
async fn get_assistant_graph(
    ApiPath(path): ApiPath<AssistantPath>,
    ApiQuery(GraphParams): ApiQuery<GraphParams>,
) -> Result<Json<Value>, ApiError> {
    path.check().map(|()| Json(json!({"graph_id": LEAD_AGENT, "nodes": [], "edges": []})))
}

/// Read the schemas of an assistant: the channels of its state.
#[utoipa::path(get, path = "/api/assistants/{assistant_id}/schemas", tag = "assistants",
    params(("assistant_id" = String, Path)),
    responses((status = 200, description = "The schemas", body = Value),
        (status = 404, description = "No such assistant", body = ErrorBody)))]
async fn get_assistant_schemas(
    State(app): State<Arc<App>>,
    ApiPath(path): ApiPath<AssistantPath>,
) -> Result<Json<Value>, ApiError> {
    path.check()?;
    let channels: Map<String, Value> =
        app.threads.accessor().table().names().map(|name| (name.to_string(), json!({}))).collect();
    let state = json!({"type": "object", "properties": channels});
    Ok(Json(json!({
        "graph_id": LEAD_AGENT, "input_schema": state, "output_schema": state, "state_schema": state,
        "config_schema": null, "context_schema": null,
    })))
}

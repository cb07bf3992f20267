//! Assistants, as far as SDK clients need them: the lead agent is the only one.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::error::ApiError;
use super::extract::{ApiJson, ApiPath};
use super::fields::{Fields, FromFields};
use super::schema::ErrorBody;
use crate::app::App;

/// The id of the assistant, and of its graph.
const LEAD_AGENT: &str = "lead_agent";
/// The assistant is built in and has no creation time.
const CREATED_AT: &str = "1970-01-01T00:00:00.000000+00:00";

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(search_assistants))
        .routes(routes!(count_assistants))
        .routes(routes!(get_assistant))
        .routes(routes!(get_assistant_graph))
        .routes(routes!(get_assistant_schemas))
}

fn lead_agent() -> Value {
    json!({
        "assistant_id": LEAD_AGENT, "graph_id": LEAD_AGENT, "name": LEAD_AGENT, "config": {}, "context": {},
        "metadata": {"created_by": "system"}, "description": null, "created_at": CREATED_AT,
        "updated_at": CREATED_AT, "version": 1,
    })
}

/// Which assistants to find. Other fields are ignored.
#[derive(Debug, ToSchema)]
struct AssistantFilter {
    /// Only those with this graph.
    graph_id: Option<String>,
    /// Only those whose name contains this.
    name: Option<String>,
    /// Exact values of metadata keys.
    #[schema(value_type = Object, required = false)]
    metadata: Map<String, Value>,
    /// Maximum number of results.
    #[schema(minimum = 1, default = 10, required = false)]
    limit: i64,
    /// Number of results to skip.
    #[schema(minimum = 0, default = 0, required = false)]
    offset: i64,
}

impl FromFields for AssistantFilter {
    const BODY_OPTIONAL: bool = true;

    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self {
            graph_id: fields.field("graph_id").nullable().text(),
            name: fields.field("name").nullable().text(),
            metadata: fields.field("metadata").nullable().object().unwrap_or_default(),
            limit: fields.field("limit").integer(&(1..=i64::MAX)).unwrap_or(10),
            offset: fields.field("offset").integer(&(0..=i64::MAX)).unwrap_or(0),
        }
    }
}

impl AssistantFilter {
    fn matches(&self) -> bool {
        self.graph_id.as_deref().is_none_or(|graph| graph == LEAD_AGENT)
            && self.name.as_deref().is_none_or(|name| LEAD_AGENT.contains(&name.to_lowercase()))
            && self.metadata.iter().all(|(key, value)| key == "created_by" && value == "system")
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

impl AssistantPath {
    fn check(&self) -> Result<(), ApiError> {
        let absent = || ApiError::not_found(format!("Assistant {} not found", self.assistant_id));
        if self.assistant_id == LEAD_AGENT { Ok(()) } else { Err(absent()) }
    }
}

/// Find assistants.
#[utoipa::path(post, path = "/api/assistants/search", tag = "assistants", request_body = Option<AssistantFilter>,
    responses((status = 200, description = "The assistants", body = Vec<Value>)))]
async fn search_assistants(ApiJson(filter): ApiJson<AssistantFilter>) -> Json<Vec<Value>> {
    let found = filter.matches() && filter.offset == 0 && filter.limit > 0;
    Json(found.then(lead_agent).into_iter().collect())
}

/// Count assistants.
#[utoipa::path(post, path = "/api/assistants/count", tag = "assistants", request_body = Option<AssistantFilter>,
    responses((status = 200, description = "How many there are", body = u64)))]
async fn count_assistants(ApiJson(filter): ApiJson<AssistantFilter>) -> Json<u64> {
    Json(filter.matches().into())
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
    params(("assistant_id" = String, Path)),
    responses((status = 200, description = "The graph, without nodes and edges", body = Value),
        (status = 404, description = "No such assistant", body = ErrorBody)))]
async fn get_assistant_graph(ApiPath(path): ApiPath<AssistantPath>) -> Result<Json<Value>, ApiError> {
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

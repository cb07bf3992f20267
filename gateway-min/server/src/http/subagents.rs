//! The catalog of subagents: everyone reads it, administrators change the managed ones.

use std::sync::Arc;

use axum::Json;
use axum::extract::{FromRequest as _, Request, State};
use axum::http::StatusCode;
use serde::Serialize;
use serde_json::Value;
use threadkeep_agent::Pattern;
use threadkeep_subagents::catalog::{Change, ConfigOverrides, EditError, Listed, ModelChoice};
use threadkeep_subagents::managed::{Managed, StoreError};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::auth::{Caller, require_admin};
use super::described;
use super::error::ApiError;
use super::extract::{ApiJson, ApiPath, drained};
use super::fields::{Field, Fields, FromFields};
use super::schema::ErrorBody;
use crate::app::App;
use crate::auth::Principal;

const ADMINS_ONLY: &str = "Admin privileges are required to manage subagents.";
const READ_FAILED: &str = "Failed to read subagents";
const WRITE_FAILED: &str = "Failed to change the subagent";

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(list_subagents, create_subagent))
        .routes(routes!(change_subagent, delete_subagent))
}

/// All subagents.
#[derive(Debug, Serialize, ToSchema)]
struct SubagentList {
    /// By name; with the same name built-in, then configured, then managed ones.
    subagents: Vec<SubagentInfo>,
}

/// A subagent.
#[derive(Debug, Serialize, ToSchema)]
struct SubagentInfo {
    /// The name by which an agent asks for it.
    name: String,
    /// The name for people.
    #[schema(required = true)]
    display_name: Option<String>,
    /// When to delegate to it.
    description: String,
    /// Its system prompt; null unless an administrator asks.
    #[schema(required = true)]
    system_prompt: Option<String>,
    /// Its tools; null means all of the agent that delegates.
    #[schema(required = true)]
    tools: Option<Vec<String>>,
    /// Tools it never has.
    disallowed_tools: Vec<String>,
    /// Its skills; null means those of the agent that delegates.
    #[schema(required = true)]
    skills: Option<Vec<String>>,
    /// The name of its model, or `inherit`.
    model: String,
    /// The model calls it may make.
    max_turns: u32,
    /// Seconds it may take.
    timeout_seconds: u64,
    /// Whether it is enabled.
    enabled: bool,
    /// Who defined it: `builtin`, `config` or `managed`.
    source: &'static str,
    /// Whether it can be changed here.
    editable: bool,
    /// Whether it is not used because a definition before it has its name.
    conflict: bool,
    /// What the configuration sets for it: `timeout_seconds`, `max_turns`, `model`, `skills`.
    #[schema(value_type = Object)]
    config_overrides: ConfigOverrides,
}

impl SubagentInfo {
    fn new(listed: Listed, caller: &Principal) -> Self {
        let editable = listed.is_editable();
        let Listed { definition, enabled, conflict, config_overrides } = listed;
        Self {
            name: definition.name,
            display_name: definition.display_name,
            description: definition.description,
            system_prompt: caller.is_admin().then_some(definition.system_prompt),
            tools: definition.tools,
            disallowed_tools: definition.disallowed_tools,
            skills: definition.skills,
            model: definition.model.as_str().to_owned(),
            max_turns: definition.max_turns,
            timeout_seconds: definition.timeout.as_secs(),
            enabled,
            source: definition.source.as_str(),
            editable,
            conflict,
            config_overrides,
        }
    }
}

/// A new subagent. A field that is null counts as not sent; unknown fields are ignored.
#[derive(Debug, ToSchema)]
#[allow(dead_code, reason = "described; read as a definition")]
pub(super) struct NewSubagent {
    /// Its name; stored in lower case.
    #[schema(pattern = "^[A-Za-z0-9-]{1,64}$")]
    name: String,
    /// The name for people; without the space around it, blank means none.
    display_name: Option<String>,
    /// When to delegate to it.
    #[schema(min_length = 1, pattern = r"\S")]
    description: String,
    /// Its system prompt.
    #[schema(min_length = 1, pattern = r"\S")]
    system_prompt: String,
    /// Its tools [default: null, all of the agent that delegates].
    #[schema(required = false, schema_with = described::names_or_null)]
    tools: Option<Vec<String>>,
    /// Tools it never has, besides those that no managed subagent has.
    #[schema(required = false, schema_with = described::names_or_null)]
    disallowed_tools: Option<Vec<String>>,
    /// Its skills [default: null, those of the agent that delegates].
    #[schema(required = false, schema_with = described::names_or_null)]
    skills: Option<Vec<String>>,
    /// `inherit`, or the name of a configured model [default: inherit].
    model: Option<String>,
    /// The model calls it may make [default: 50].
    #[schema(minimum = 1, maximum = 4_294_967_295_u32)]
    max_turns: Option<u32>,
    /// Seconds it may take [default: 900].
    #[schema(minimum = 1, maximum = 9_223_372_036_854_775_807_u64)]
    timeout_seconds: Option<u64>,
    /// Whether runs may delegate to it [default: true].
    enabled: Option<bool>,
}

/// What to change of a subagent. What is not sent stays; unknown fields are ignored.
#[derive(Debug, ToSchema)]
#[allow(dead_code, reason = "described; read as a change")]
pub(super) struct SubagentChange {
    /// The name for people; null or blank means none.
    display_name: Option<String>,
    /// When to delegate to it.
    #[schema(required = false, min_length = 1, pattern = r"\S")]
    description: String,
    /// Its system prompt.
    #[schema(required = false, min_length = 1, pattern = r"\S")]
    system_prompt: String,
    /// Its tools; null means all of the agent that delegates.
    #[schema(required = false, schema_with = described::names_or_null)]
    tools: Option<Vec<String>>,
    /// Tools it never has, besides those that no managed subagent has.
    #[schema(required = false, schema_with = described::names)]
    disallowed_tools: Vec<String>,
    /// Its skills; null means those of the agent that delegates.
    #[schema(required = false, schema_with = described::names_or_null)]
    skills: Option<Vec<String>>,
    /// `inherit`, or the name of a configured model.
    #[schema(required = false)]
    model: String,
    /// The model calls it may make.
    #[schema(required = false, minimum = 1, maximum = 4_294_967_295_u32)]
    max_turns: u32,
    /// Seconds it may take.
    #[schema(required = false, minimum = 1, maximum = 9_223_372_036_854_775_807_u64)]
    timeout_seconds: u64,
    /// Whether runs may delegate to it.
    #[schema(required = false)]
    enabled: bool,
}

/// A definition from a body.
struct New(Managed);

impl FromFields for New {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let name = fields.field("name").nullable().required().text_matching(&Pattern::SUBAGENT_NAME);
        let description = fields.field("description").nullable().required().text_trimmed();
        let system_prompt = fields.field("system_prompt").nullable().required().text_trimmed();
        let mut new = Managed::new(
            name.unwrap_or_default().to_ascii_lowercase(),
            description.unwrap_or_default(),
            system_prompt.unwrap_or_default(),
        );
        new.display_name = fields.field("display_name").nullable().text().and_then(display_name);
        new.tools = fields.field("tools").nullable().names();
        new.disallowed_tools = fields.field("disallowed_tools").nullable().names().unwrap_or_default();
        new.skills = fields.field("skills").nullable().names();
        new.model = model(fields.field("model").nullable()).unwrap_or(new.model);
        new.max_turns = turns(fields.field("max_turns").nullable()).unwrap_or(new.max_turns);
        new.timeout_seconds =
            seconds(fields.field("timeout_seconds").nullable()).unwrap_or(new.timeout_seconds);
        new.enabled = fields.field("enabled").nullable().flag().unwrap_or(new.enabled);
        fields.ignore_others();
        Self(new)
    }
}

/// A change from a body.
struct Changed(Change);

impl FromFields for Changed {
    #[allow(
        clippy::redundant_closure_for_method_calls,
        reason = "the method is not general over the lifetime"
    )]
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let change = Change {
            display_name: or_null(fields, "display_name", |field| field.text().map(display_name))
                .map(Option::flatten),
            description: fields.field("description").text_trimmed(),
            system_prompt: fields.field("system_prompt").text_trimmed(),
            tools: or_null(fields, "tools", |field| field.names()),
            disallowed_tools: fields.field("disallowed_tools").names(),
            skills: or_null(fields, "skills", |field| field.names()),
            model: model(fields.field("model")),
            max_turns: turns(fields.field("max_turns")),
            timeout_seconds: seconds(fields.field("timeout_seconds")),
            enabled: fields.field("enabled").flag(),
        };
        fields.ignore_others();
        Self(change)
    }
}

/// A field for which null is a value: the outer `None` means that it was not sent.
#[allow(clippy::option_option, reason = "not sent, null, or a value")]
fn or_null<T>(
    fields: &mut Fields<'_>,
    name: &str,
    read: impl FnOnce(Field<'_>) -> Option<T>,
) -> Option<Option<T>> {
    let is_null = fields.peek(name).is_some_and(Value::is_null);
    let field = fields.field(name);
    if is_null { Some(None) } else { read(field).map(Some) }
}

fn display_name(text: String) -> Option<String> {
    Some(text.trim().to_owned()).filter(|name| !name.is_empty())
}

fn model(field: Field<'_>) -> Option<ModelChoice> {
    field.text().map(ModelChoice::from)
}

fn turns(field: Field<'_>) -> Option<u32> {
    field.integer(&(1..=u32::MAX.into())).and_then(|turns| u32::try_from(turns).ok())
}

fn seconds(field: Field<'_>) -> Option<u64> {
    field.integer(&(1..=i64::MAX)).and_then(|seconds| u64::try_from(seconds).ok())
}

/// The path of a subagent.
struct SubagentPath {
    name: String,
}

impl FromFields for SubagentPath {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let name = fields.field("name").required().text_matching(&Pattern::SUBAGENT_NAME);
        Self { name: name.unwrap_or_default().to_ascii_lowercase() }
    }
}

/// The request, if an administrator sent it. Nothing else of it was looked at by then.
async fn of_admin(caller: &Principal, request: Request) -> Result<Request, ApiError> {
    if let Err(error) = require_admin(caller, ADMINS_ONLY) {
        drained(request.into_body()).await;
        return Err(error);
    }
    Ok(request)
}

fn refused(error: EditError) -> ApiError {
    let text = error.to_string();
    match error {
        EditError::Reserved { .. } | EditError::Exists { .. } => ApiError::conflict(text),
        EditError::Missing { .. } => ApiError::not_found(text),
        EditError::UnknownModel { .. } => ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, text),
        EditError::Store(error) => failed(WRITE_FAILED, &error),
    }
}

fn failed(text: &'static str, error: &StoreError) -> ApiError {
    match error {
        StoreError::Db(error) => ApiError::internal(text, error),
        StoreError::File { .. } => ApiError::internal(text, error),
    }
}

/// List the subagents, also those that are disabled or in conflict.
#[utoipa::path(get, path = "/api/subagents", tag = "subagents",
    responses((status = 200, description = "The subagents", body = SubagentList)))]
async fn list_subagents(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
) -> Result<Json<SubagentList>, ApiError> {
    let config = app.config.current_async().await;
    let list = app.catalog.list(&config).await.map_err(|error| failed(READ_FAILED, &error))?;
    let subagents = list.into_iter().map(|listed| SubagentInfo::new(listed, &caller)).collect();
    Ok(Json(SubagentList { subagents }))
}

/// Create a managed subagent. For administrators only.
#[utoipa::path(post, path = "/api/subagents", tag = "subagents", request_body = NewSubagent,
    responses((status = 201, description = "The subagent", body = SubagentInfo),
        (status = 403, description = "The caller is not an administrator", body = ErrorBody),
        (status = 409, description = "The name is taken", body = ErrorBody)))]
async fn create_subagent(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    request: Request,
) -> Result<(StatusCode, Json<SubagentInfo>), ApiError> {
    let request = of_admin(&caller, request).await?;
    let ApiJson(New(new)) = ApiJson::from_request(request, &()).await?;
    let config = app.config.current_async().await;
    let listed = app.catalog.create(&config, new).await.map_err(refused)?;
    Ok((StatusCode::CREATED, Json(SubagentInfo::new(listed, &caller))))
}

/// Change a managed subagent. For administrators only.
#[utoipa::path(put, path = "/api/subagents/{name}", tag = "subagents", params(("name" = String, Path)),
    request_body = SubagentChange,
    responses((status = 200, description = "The subagent", body = SubagentInfo),
        (status = 403, description = "The caller is not an administrator", body = ErrorBody),
        (status = 404, description = "No such managed subagent", body = ErrorBody)))]
async fn change_subagent(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    path: Result<ApiPath<SubagentPath>, ApiError>,
    request: Request,
) -> Result<Json<SubagentInfo>, ApiError> {
    let request = of_admin(&caller, request).await?;
    let ApiJson(Changed(change)) = ApiJson::from_request(request, &()).await?;
    let ApiPath(SubagentPath { name }) = path?;
    let config = app.config.current_async().await;
    let listed = app.catalog.change(&config, &name, change).await.map_err(refused)?;
    Ok(Json(SubagentInfo::new(listed, &caller)))
}

/// Delete a managed subagent. For administrators only.
#[utoipa::path(delete, path = "/api/subagents/{name}", tag = "subagents", params(("name" = String, Path)),
    responses((status = 204, description = "It is deleted"),
        (status = 403, description = "The caller is not an administrator", body = ErrorBody),
        (status = 404, description = "No such managed subagent", body = ErrorBody)))]
async fn delete_subagent(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    path: Result<ApiPath<SubagentPath>, ApiError>,
    request: Request,
) -> Result<StatusCode, ApiError> {
    drained(of_admin(&caller, request).await?.into_body()).await;
    let ApiPath(SubagentPath { name }) = path?;
    app.catalog.delete(&name).await.map_err(refused)?;
    Ok(StatusCode::NO_CONTENT)
}

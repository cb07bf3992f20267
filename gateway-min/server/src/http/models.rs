//! The configured models, as shown to clients.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::error::ApiError;
use super::extract::ApiPath;
use super::fields::{Fields, FromFields, shortened};
use super::schema::ErrorBody;
use crate::app::App;
use threadkeep_config::Model;

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(list_models)).routes(routes!(get_model))
}

/// Every model, and display settings.
#[derive(Debug, Serialize, ToSchema)]
struct Models {
    /// In configuration order; the first is the default.
    models: Vec<ModelInfo>,
    /// Whether the cards of tasks show tokens.
    token_usage: TokenUsageInfo,
}

/// Whether the cards of tasks show tokens (`token_usage.enabled`).
#[derive(Debug, Serialize, ToSchema)]
struct TokenUsageInfo {
    enabled: bool,
}

/// A model that runs can use. Credentials and URLs are not shown.
#[derive(Debug, Serialize, ToSchema)]
struct ModelInfo {
    /// The name that runs use.
    name: String,
    /// The provider's name for it.
    model: String,
    /// The display name.
    #[schema(required = true)]
    display_name: Option<String>,
    /// A one-line description.
    #[schema(required = true)]
    description: Option<String>,
    /// Whether thinking can be switched on.
    supports_thinking: bool,
    /// Whether a reasoning effort can be requested.
    supports_reasoning_effort: bool,
}

impl From<&Model> for ModelInfo {
    fn from(model: &Model) -> Self {
        Self {
            name: model.name.clone(),
            model: model.model.clone(),
            display_name: model.display_name.clone(),
            description: model.description.clone(),
            supports_thinking: model.supports_thinking,
            supports_reasoning_effort: model.supports_reasoning_effort,
        }
    }
}

/// The path of a model.
struct ModelPath {
    name: String,
}

impl FromFields for ModelPath {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self { name: fields.field("name").required().text().unwrap_or_default() }
    }
}

/// List the currently configured models.
#[utoipa::path(get, path = "/api/models", tag = "models", responses((status = 200, description = "The models", body = Models)))]
async fn list_models(State(app): State<Arc<App>>) -> Json<Models> {
    let config = app.config.current_async().await;
    Json(Models {
        models: config.models.iter().map(ModelInfo::from).collect(),
        token_usage: TokenUsageInfo { enabled: config.token_usage.enabled },
    })
}

/// Read one model.
#[utoipa::path(get, path = "/api/models/{name}", tag = "models", params(("name" = String, Path)),
    responses((status = 200, description = "The model", body = ModelInfo),
        (status = 404, description = "No such model", body = ErrorBody)))]
async fn get_model(
    State(app): State<Arc<App>>,
    ApiPath(ModelPath { name }): ApiPath<ModelPath>,
) -> Result<Json<ModelInfo>, ApiError> {
    let config = app.config.current_async().await;
    let model = config.model(&name).map(ModelInfo::from);
    model.map(Json).ok_or_else(|| ApiError::not_found(format!("Model '{}' not found", shortened(name))))
}

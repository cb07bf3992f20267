//! The token usage of a thread's runs, and of its model's context.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use threadkeep::Error;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::ThreadId;
use threadkeep_agent::summary;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::error::{ApiError, OrApiError as _};
use super::extract::{ApiPath, ApiQuery, ThreadPath};
use super::fields::{Fields, FromFields};
use super::schema::ErrorBody;
use crate::app::App;
use crate::threads::lineage::messages_only;
use threadkeep_records::{ExecutionTokens, RunStatus, RunUsage};

const FAILED: &str = "Failed to read token usage";

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(token_usage))
}

/// Which runs count.
struct UsageParams {
    include_active: bool,
}

impl FromFields for UsageParams {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self { include_active: fields.field("include_active").flag().unwrap_or(false) }
    }
}

/// The tokens of a thread's runs, including failed and interrupted ones, and of its batches.
#[derive(Debug, Default, PartialEq, Serialize, ToSchema)]
struct TokenUsage {
    thread_id: String,
    /// Input and output together.
    total_tokens: i64,
    /// Input tokens.
    total_input_tokens: i64,
    /// Output tokens.
    total_output_tokens: i64,
    /// Number of runs.
    total_runs: i64,
    /// By model name.
    by_model: BTreeMap<String, ModelUsage>,
    /// By caller.
    by_caller: CallerUsage,
    /// The usage of the context; null if unknown.
    #[schema(required = true)]
    context_usage: Option<ContextUsage>,
}

/// The usage of one model.
#[derive(Debug, Default, PartialEq, Serialize, ToSchema)]
struct ModelUsage {
    tokens: i64,
    /// Runs that used it, possibly along with other models.
    runs: i64,
}

/// Tokens by caller.
#[derive(Debug, Default, PartialEq, Serialize, ToSchema)]
struct CallerUsage {
    lead_agent: i64,
    subagent: i64,
    /// Titles and summaries.
    middleware: i64,
}

/// How much of the model's context the current conversation uses.
#[derive(Debug, PartialEq, Serialize, ToSchema)]
struct ContextUsage {
    /// Estimated tokens.
    token_count: u64,
    /// The model's context window, if configured.
    #[schema(required = true)]
    max_context_tokens: Option<u64>,
    /// With one decimal.
    #[schema(required = true)]
    percentage: Option<f64>,
}

/// Read the token usage of a thread's runs and batches.
#[utoipa::path(get, path = "/api/threads/{thread_id}/token-usage", tag = "threads",
    params(("thread_id" = String, Path), ("include_active" = Option<bool>, Query)),
    responses((status = 200, description = "The sums; zeros for a thread without runs", body = TokenUsage),
        (status = 500, description = "The store failed; the log says why", body = ErrorBody)))]
async fn token_usage(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    ApiQuery(UsageParams { include_active }): ApiQuery<UsageParams>,
) -> Result<Json<TokenUsage>, ApiError> {
    let runs = app.records.runs().usage(thread_id.as_str()).await.or_internal(FAILED)?;
    let model = runs.first().and_then(|run| run.model_name.clone());
    let counted = runs.iter().filter(|run| include_active || !run.status.is_active());
    let mut usage = sum(counted.filter(|run| run.status != RunStatus::Pending));
    let batches = app.records.batches().usage(thread_id.as_str()).await.or_internal(FAILED)?;
    add_batches(&mut usage, batches);
    usage.thread_id = thread_id.to_string();
    usage.context_usage = match context(&app, &thread_id, model.as_deref()).await {
        Ok(context) => context,
        // It is reported once: the thread's next turn would not hear of it.
        Err(lost @ Error::HistoryLost { .. }) => {
            return Err(ApiError::from_engine(&thread_id, FAILED, &lost));
        }
        Err(error) => {
            tracing::warn!(thread = %thread_id, %error, "cannot determine the context usage");
            None
        }
    };
    Ok(Json(usage))
}

fn sum<'a>(runs: impl Iterator<Item = &'a RunUsage>) -> TokenUsage {
    let mut usage = TokenUsage::default();
    for run in runs {
        usage.total_runs += 1;
        usage.total_tokens += run.total_tokens;
        usage.total_input_tokens += run.total_input_tokens;
        usage.total_output_tokens += run.total_output_tokens;
        usage.by_caller.lead_agent += run.lead_agent_tokens;
        usage.by_caller.subagent += run.subagent_tokens;
        usage.by_caller.middleware += run.middleware_tokens;
        for (model, tokens) in &run.token_usage_by_model {
            let model = usage.by_model.entry(model.clone()).or_default();
            model.tokens += tokens["total_tokens"].as_i64().unwrap_or(0);
            model.runs += 1;
        }
    }
    usage
}

/// Adds what was done for the thread's batches, which no run counts.
fn add_batches(usage: &mut TokenUsage, batches: BTreeMap<String, ExecutionTokens>) {
    let signed = |tokens: u64| i64::try_from(tokens).unwrap_or(i64::MAX);
    for (model, tokens) in batches {
        usage.total_tokens += signed(tokens.total_tokens);
        usage.total_input_tokens += signed(tokens.input_tokens);
        usage.total_output_tokens += signed(tokens.output_tokens);
        usage.by_caller.subagent += signed(tokens.total_tokens);
        usage.by_model.entry(model).or_default().tokens += signed(tokens.total_tokens);
    }
}

async fn context(
    app: &App,
    thread: &ThreadId,
    model: Option<&str>,
) -> threadkeep::Result<Option<ContextUsage>> {
    let Some(head) = app.threads.accessor().get_loading(thread, None, messages_only()).await? else {
        return Ok(None);
    };
    let messages = head.json(MESSAGES_CHANNEL)?.unwrap_or_default();
    let config = app.config.current_async().await;
    let model = model.and_then(|name| config.model(name)).or(config.models.first());
    let max = model.and_then(|model| model.context_window);
    let count = messages.as_array().into_iter().flatten().map(summary::tokens).sum();
    Ok(Some(fill(count, max)))
}

#[allow(clippy::cast_precision_loss, reason = "a percentage with one decimal")]
fn fill(token_count: u64, max_context_tokens: Option<u64>) -> ContextUsage {
    let percentage = max_context_tokens.filter(|max| *max > 0);
    let percentage = percentage.map(|max| (token_count as f64 / max as f64 * 1000.0).round() / 10.0);
    ContextUsage { token_count, max_context_tokens, percentage }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentage_has_one_decimal_and_needs_a_context() {
        assert_eq!(fill(1, Some(3)).percentage, Some(33.3));
        assert_eq!(fill(2000, Some(1000)).percentage, Some(200.0));
        assert_eq!(
            fill(1, None),
            ContextUsage { token_count: 1, max_context_tokens: None, percentage: None }
        );
    }
}

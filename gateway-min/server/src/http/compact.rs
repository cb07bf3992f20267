//! Compaction: a summary replaces the beginning of a conversation.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use serde_json::{Value, json};
use threadkeep::Error;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::{NodeName, ThreadId};
use threadkeep::metadata::Source;
use threadkeep::state::StateSnapshot;
use threadkeep::step::{Durability, StepWriter};
use threadkeep_agent::summary::{self, Cut};
use threadkeep_agent::{AgentError, binding};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::assistants;
use super::auth::Caller;
use super::described::{self, AssistantName};
use super::error::{ApiError, OrApiError as _};
use super::exclusive::exclusively;
use super::extract::{ApiJson, ApiPath, ThreadPath};
use super::fields::{Fields, Flaw, FromFields, positive};
use super::schema::{ErrorBody, Gated};
use super::threads::{absent, existing};
use crate::app::App;
use threadkeep_config::{Config, ContextSize};
use threadkeep_records::WriterKind;
use threadkeep_subagents::budget;

const FAILED: &str = "Failed to compact thread context.";
const BUSY: &str = "Thread has a run in flight. Compact after the run finishes.";
const DISABLED: &str = "Context compaction is disabled.";
const NOT_ENOUGH: &str = "not_enough_messages";
const NODE: &str = "manual_compaction";
/// Maximum length of an agent or model name, in characters.
const NAME_MAX: usize = 128;

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(compact_thread))
}

/// How to compact.
#[derive(Debug, ToSchema)]
struct CompactThread {
    /// Compact even if the conversation has not reached the configured length.
    #[schema(default = true, required = false)]
    force: bool,
    /// How much to keep: `{type: "messages" | "tokens" | "fraction", value}` [default: as configured].
    #[schema(schema_with = described::kept_context_or_null)]
    keep: Option<ContextSize>,
    /// The agent: `lead_agent` is the only one.
    #[schema(value_type = Option<AssistantName>)]
    #[allow(dead_code, reason = "described and checked only")]
    agent_name: Option<String>,
    /// The model that writes the summary.
    #[schema(max_length = 128)]
    model_name: Option<String>,
}

impl FromFields for CompactThread {
    const BODY_OPTIONAL: bool = true;

    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self {
            force: fields.field("force").flag().unwrap_or(true),
            keep: fields.field("keep").nullable().read(keep),
            agent_name: assistants::named(fields, "agent_name"),
            model_name: fields.field("model_name").nullable().text_sized(&(0..=NAME_MAX)),
        }
    }
}

fn keep(sent: Value) -> Result<ContextSize, (Flaw, Value)> {
    let (count, share) = (positive(&sent["value"]), sent["value"].as_f64());
    let size = match sent["type"].as_str() {
        Some("messages") => count.map(ContextSize::Messages),
        Some("tokens") => count.map(ContextSize::Tokens),
        Some("fraction") => share.filter(|share| *share > 0.0 && *share <= 1.0).map(ContextSize::Fraction),
        _ => None,
    };
    let others = sent.as_object().is_some_and(|sent| sent.keys().any(|key| key != "type" && key != "value"));
    let rule = "Input should be {type: 'messages' or 'tokens', value: 1 or more} or {type: 'fraction', value: above 0, at most 1}";
    size.filter(|_| !others).ok_or_else(|| (Flaw::new("value_error", rule), sent))
}

/// The result of a compaction.
#[derive(Debug, Serialize, ToSchema)]
#[allow(clippy::struct_field_names, reason = "the names are those of the service")]
struct Compacted {
    thread_id: String,
    /// Whether anything was changed.
    compacted: bool,
    /// Why not: `not_enough_messages`.
    #[schema(required = true)]
    reason: Option<&'static str>,
    removed_message_count: usize,
    preserved_message_count: usize,
    summary_updated: bool,
    /// The head's checkpoint.
    #[schema(required = true)]
    checkpoint_id: Option<String>,
    /// Estimated tokens of the remaining messages.
    total_tokens: u64,
}

/// Replace the beginning of a conversation by a summary.
#[utoipa::path(post, path = "/api/threads/{thread_id}/compact", tag = "state", params(("thread_id" = String, Path)),
    request_body = Option<CompactThread>,
    responses((status = 200, description = "The result", body = Compacted),
        (status = 404, description = "No such thread, or it has no checkpoint", body = ErrorBody), Gated))]
async fn compact_thread(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    Caller(caller): Caller,
    ApiJson(body): ApiJson<CompactThread>,
) -> Result<Json<Compacted>, ApiError> {
    app.threads.accessor().check(&thread_id, None).await.or_engine(&thread_id, FAILED)?;
    existing(&app, &thread_id, FAILED).await?;
    let config = app.config.current_async().await;
    if !config.summarization.enabled {
        return Err(ApiError::conflict(DISABLED));
    }
    if let Some(name) = body.model_name.as_deref().filter(|name| config.model(name).is_none()) {
        return Err(ApiError::bad_request(AgentError::UnknownModel(name.to_owned()).to_string()));
    }
    let work = compact(Arc::clone(&app), thread_id.clone(), config, body);
    let kind = WriterKind::CheckpointWrite;
    exclusively((&app, &caller), &thread_id, kind, BUSY.to_owned(), FAILED, work).await.map(Json)
}

async fn compact(
    app: Arc<App>,
    thread: ThreadId,
    config: Arc<Config>,
    body: CompactThread,
) -> Result<Compacted, ApiError> {
    let engine = |error: Error| match error {
        Error::Conflict { .. } | Error::Stale { .. } => ApiError::conflict(BUSY),
        error => ApiError::from_engine(&thread, FAILED, &error),
    };
    let (accessor, settings) = (app.threads.accessor(), &config.summarization);
    // The summary is of these messages: a turn that is added while the model writes must not be lost.
    let mut known = accessor.known_head(&thread).await.map_err(engine)?;
    let point = accessor.capture(&mut known).await.map_err(engine)?;
    let head = point.snapshot().ok_or_else(|| absent(&thread))?;
    let messages = match head.json(MESSAGES_CHANNEL).map_err(engine)? {
        Some(Value::Array(messages)) => messages,
        _ => Vec::new(),
    };
    let name = body.model_name.as_deref().or(settings.model_name.as_deref());
    let summarizer = app.agents.summarizer(&config, name, name).await.or_internal(FAILED)?;
    let due = body.force || summarizer.is_due(&messages);
    let Some(mut cut) = summarizer.cut(&messages, body.keep).filter(|_| due) else {
        return Ok(unchanged(head, &messages));
    };
    if config.token_budget.enabled {
        budget::keep_summarized(&messages, &mut cut);
    }
    let Cut { at, preserved } = cut;
    let earlier = head.json(summary::CHANNEL).map_err(engine)?;
    let earlier = earlier.as_ref().and_then(Value::as_str);
    let (text, _) = summarizer.summarize(earlier, &messages[..at]).await;
    let text = text
        .ok_or_else(|| ApiError::internal(FAILED, &std::io::Error::other("the model returned no summary")))?;
    // An interrupted run goes on from the new head as from the old one: with what was to run next, and what has run of it.
    let mut writer = StepWriter::open_captured(accessor, known, &point);
    let task = writer.start_task(&NodeName::from(NODE), 0);
    let writes = vec![
        writer.write(MESSAGES_CHANNEL, json!(preserved), true).map_err(engine)?,
        writer.write(summary::CHANNEL, json!(text), false).map_err(engine)?,
    ];
    writer.finish_task(task, writes, Durability::WithCommit).await.map_err(engine)?;
    writer.begin_with(head.writes.clone());
    let extra = binding(&head.metadata.extra);
    let state = writer.commit(Source::Update, head.next.clone(), extra).await.map_err(engine)?.clone();
    Ok(Compacted {
        compacted: true,
        reason: None,
        removed_message_count: messages.len() - preserved.len(),
        summary_updated: true,
        ..unchanged(&state, &preserved)
    })
}

/// The answer if the head stays unchanged.
fn unchanged(head: &StateSnapshot, messages: &[Value]) -> Compacted {
    Compacted {
        thread_id: head.key.thread.to_string(),
        compacted: false,
        reason: Some(NOT_ENOUGH),
        removed_message_count: 0,
        preserved_message_count: messages.len(),
        summary_updated: false,
        checkpoint_id: Some(head.key.id.to_string()),
        total_tokens: messages.iter().map(summary::tokens).sum(),
    }
}

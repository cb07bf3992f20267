//! The batches of a thread, and the items of one.

use std::sync::Arc;

use axum::extract::{Query, State};
use axum::response::Html;
use threadkeep::id::ThreadId;
use threadkeep_page::{Batch, BatchLine, Excerpt, ItemLine, count, seconds};

use super::super::auth::Caller;
use super::super::error::{ApiError, OrApiError as _};
use super::super::extract::ApiPath;
use super::super::subagent_batches::{BatchPath, found, works_on_batches};
use super::session::Viewer;
use super::threads::head;
use super::{Page, Parameters, offset};
use crate::app::App;
use crate::auth::Principal;
use threadkeep_records::{BatchItemRow, BatchItemStatus, BatchRow, BatchStatus, ItemCounts};

const FAILED: &str = "Failed to read subagent batches";
/// Batches on a page.
const BATCHES: u32 = 50;
/// Items on a page.
const ITEMS: u32 = 100;
/// The maximum characters of a result in a list.
const PREVIEW_CHARS: usize = 300;

/// The batches of a thread that the caller may see.
pub(super) async fn of_thread(
    app: &App,
    caller: &Principal,
    thread: &ThreadId,
) -> Result<Vec<BatchLine>, ApiError> {
    if !app.has_batches {
        return Ok(Vec::new());
    }
    let batches = app.records.batches();
    let mut rows = batches.of_thread(thread.as_str(), BATCHES).await.or_internal(FAILED)?;
    rows.retain(|row| caller.sees().is_none_or(|user| row.user_id.as_deref().is_none_or(|of| of == user)));
    let ids: Vec<String> = rows.iter().map(|row| row.id.clone()).collect();
    let counts = batches.counts(&ids).await.or_internal(FAILED)?;
    Ok(rows.into_iter().map(|row| line(app, counts.get(&row.id), row)).collect())
}

fn line(app: &App, counts: Option<&ItemCounts>, row: BatchRow) -> BatchLine {
    let has_ended = row.status.is_terminal();
    let mut can = match row.status {
        BatchStatus::Paused => vec!["resume"],
        _ if has_ended => Vec::new(),
        _ => vec!["pause"],
    };
    if !has_ended && works_on_batches(app) {
        can.push("cancel");
    }
    let items = counts.into_iter().flat_map(ItemCounts::iter).filter(|(_, number)| *number > 0);
    BatchLine {
        status: row.status.as_str().to_owned(),
        has_ended,
        total: u64::try_from(row.total_items).unwrap_or_default(),
        items: items.map(|(status, number)| (status.as_str().to_owned(), number)).collect(),
        can,
        id: row.id,
        title: row.title,
        agent: row.subagent_type,
    }
}

/// `GET /threads/{thread_id}/batches/{batch_id}`
pub(super) async fn show(
    State(app): State<Arc<App>>,
    Viewer(session): Viewer,
    Caller(caller): Caller,
    ApiPath(path): ApiPath<BatchPath>,
    Query(parameters): Query<Parameters>,
) -> Page {
    let thread = head(&app, &path.thread_id).await?;
    let row = found(&app, &caller, &path).await?;
    let status = parameters.get("status").and_then(|status| status.parse::<BatchItemStatus>().ok());
    let offset = offset(&parameters);
    let batches = app.records.batches();
    let counts = batches.counts(std::slice::from_ref(&row.id)).await.or_internal(FAILED)?;
    let mut items = batches.items(&row.id, status, offset, ITEMS + 1).await.or_internal(FAILED)?;
    let has_more = items.len() > ITEMS as usize;
    items.truncate(ITEMS as usize);
    let can_retry = row.status != BatchStatus::Cancelled;
    let view = Batch {
        thread,
        batch: line(&app, counts.get(&row.id), row),
        status: status.map(|status| status.as_str().to_owned()).unwrap_or_default(),
        items: items.into_iter().map(|row| item(row, can_retry)).collect(),
        offset,
        page: ITEMS.into(),
        has_more,
    };
    Ok(Html(view.page(&session)))
}

fn item(row: BatchItemRow, can_retry: bool) -> ItemLine {
    let took = row.started_at.zip(row.completed_at).map(|(started, ended)| (ended - started).num_seconds());
    let mut facts: Vec<String> =
        took.and_then(|took| u64::try_from(took).ok()).map(seconds).into_iter().collect();
    if let Some(tokens) = row.token_usage.filter(|tokens| tokens.total_tokens > 0) {
        facts.push(format!("{} tokens", count(tokens.total_tokens)));
    }
    facts.extend(row.model_name);
    ItemLine {
        can_retry: can_retry && row.status == BatchItemStatus::Failed,
        id: row.id,
        key: row.item_key,
        status: row.status.as_str().to_owned(),
        attempt: u64::try_from(row.attempt).unwrap_or_default(),
        facts,
        preview: row.result_preview.map(|text| cut(&text)),
        error: row.error,
    }
}

/// The beginning of a result.
fn cut(text: &str) -> Excerpt {
    match text.char_indices().nth(PREVIEW_CHARS) {
        None => Excerpt { shown: text.to_owned(), whole: None },
        Some((end, _)) => Excerpt { shown: text[..end].to_owned(), whole: Some(text.len()) },
    }
}

//! The list of threads, and creating and deleting one.

use std::sync::Arc;

use axum::extract::{Query, State};
use axum::response::{Html, Redirect};
use futures::StreamExt as _;
use futures::stream;
use threadkeep::id::ThreadId;
use threadkeep::saver::{ListQuery, Load};
use threadkeep_agent::serialize::time;
use threadkeep_page::{Deletion, ThreadHead, ThreadLine, ThreadList};

use super::super::auth::Caller;
use super::super::delete;
use super::super::error::{ApiError, OrApiError as _};
use super::super::extract::{ApiPath, ThreadPath};
use super::super::threads::{absent, has_checkpoint, new_thread, status_text};
use super::session::Viewer;
use super::{Page, Parameters, offset};
use crate::app::App;
use crate::auth::Principal;
use threadkeep_records::{ThreadQuery, ThreadRow, ThreadStatus};

const FAILED: &str = "Failed to search threads";
const LOOK_FAILED: &str = "Failed to read thread";
/// Threads on a page.
const PAGE: u32 = 50;
/// The maximum number of threads that are searched: there is no index of parts of titles.
const SEARCHED: u32 = 5_000;
/// How many sizes are read at a time.
const SIZES: usize = 8;
/// The maximum number of runs that are counted.
const RUNS: u32 = 10_000;

/// `GET /`
pub(super) async fn list(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    Viewer(session): Viewer,
    Query(parameters): Query<Parameters>,
) -> Page {
    let parameter = |name: &str| parameters.get(name).map_or("", |value| value.trim());
    let offset = offset(&parameters);
    let status = match parameter("status") {
        "busy" => Some(ThreadStatus::Running),
        name => name.parse().ok(),
    };
    let query = ThreadQuery {
        status,
        owner: caller.sees().map(str::to_owned),
        // The page shows no metadata.
        metadata_bytes: Some(0),
        ..ThreadQuery::default()
    };
    let search = parameter("q");
    let found = if search.is_empty() {
        found(&app, query, offset).await?
    } else {
        searched(&app, query, search, offset).await?
    };
    let Found { mut rows, total, searched } = found;
    let more = rows.len() > PAGE as usize;
    rows.truncate(PAGE as usize);
    let shows_owners = caller.sees().is_some();
    let lines = stream::iter(rows).map(|row| line(&app, row, shows_owners)).buffered(SIZES).collect().await;
    let list = ThreadList {
        search: search.to_owned(),
        status: status.map(|status| status_text(status).to_owned()).unwrap_or_default(),
        lines,
        offset,
        next: more.then_some(offset.saturating_add(u64::from(PAGE))),
        previous: (offset > 0).then(|| offset.saturating_sub(u64::from(PAGE))),
        total,
        searched,
    };
    Ok(Html(list.page(&session)))
}

/// Threads found, one more than a page has if there are more.
struct Found {
    rows: Vec<ThreadRow>,
    total: u64,
    /// How many were searched, if not all.
    searched: Option<u64>,
}

async fn found(app: &App, query: ThreadQuery, offset: u64) -> Result<Found, ApiError> {
    let threads = app.records.threads();
    let total = threads.count(&query).await.or_internal(FAILED)?;
    let rows = threads.search(&ThreadQuery { limit: PAGE + 1, offset, ..query }).await.or_internal(FAILED)?;
    Ok(Found { rows, total, searched: None })
}

/// Searches titles and ids for a part, in either case. All of them are read in one statement: a thread that changes moves
/// to the front, so of parts that are read one after the other it could be in two or in none.
async fn searched(app: &App, query: ThreadQuery, part: &str, offset: u64) -> Result<Found, ApiError> {
    let part = part.to_lowercase();
    let has = |text: &str| text.to_lowercase().contains(&part);
    let threads = app.records.threads();
    let titles = ThreadQuery { limit: SEARCHED + 1, ..query.clone() };
    let mut titles = threads.titles(&titles).await.or_internal(FAILED)?;
    let all = titles.len() <= SEARCHED as usize;
    titles.truncate(SEARCHED as usize);
    titles.retain(|(id, title)| has(id) || title.as_deref().is_some_and(has));
    let total = titles.len() as u64;
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    let ids: Vec<String> =
        titles.into_iter().map(|(id, _)| id).skip(offset).take(PAGE as usize + 1).collect();
    let shown = ThreadQuery { ids: Some(ids.clone()), limit: PAGE + 1, ..query };
    let mut rows = threads.search(&shown).await.or_internal(FAILED)?;
    // They may have changed meanwhile.
    rows.sort_by_key(|row| ids.iter().position(|id| *id == row.thread_id));
    Ok(Found { rows, total, searched: (!all).then_some(u64::from(SEARCHED)) })
}

async fn line(app: &App, row: ThreadRow, shows_owners: bool) -> ThreadLine {
    // A size that cannot be read, for example of a damaged thread, does not hide the thread.
    let bytes = app.stored_bytes(&ThreadId::from(row.thread_id.as_str())).await;
    let updated_at = time(row.updated_at);
    ThreadLine {
        owner: row.user_id.clone().filter(|_| shows_owners),
        bytes,
        updated_at,
        thread: head_of(row),
    }
}

/// What a thread's pages have at the top, of its record.
pub(super) fn head_of(row: ThreadRow) -> ThreadHead {
    ThreadHead { status: status_text(row.status).to_owned(), id: row.thread_id, title: row.display_name }
}

/// What a thread's pages have at the top.
///
/// # Errors
/// 404 if there is neither a record nor a checkpoint.
pub(super) async fn head(app: &App, thread: &ThreadId) -> Result<ThreadHead, ApiError> {
    let row = app.records.threads().get(thread.as_str(), None).await.or_internal(LOOK_FAILED)?;
    match row {
        Some(row) => Ok(head_of(row)),
        // Another program wrote it.
        None if has_checkpoint(app, thread, LOOK_FAILED).await? => {
            let status = status_text(ThreadStatus::Idle).to_owned();
            Ok(ThreadHead { id: thread.to_string(), title: None, status })
        }
        None => Err(absent(thread)),
    }
}

/// `POST /threads`
pub(super) async fn create(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
) -> Result<Redirect, ApiError> {
    let id = new_thread(app, caller).await?;
    Ok(Redirect::to(&format!("/threads/{id}")))
}

/// `GET /threads/{thread_id}/delete`: what a deletion takes.
pub(super) async fn ask(
    State(app): State<Arc<App>>,
    Viewer(session): Viewer,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
) -> Page {
    let thread = head(&app, &thread_id).await?;
    let all = ListQuery { namespace: None, load: Load::None, ..ListQuery::new(&thread_id) };
    let checkpoints = app.threads.accessor().saver().list(&all).await.or_engine(&thread_id, LOOK_FAILED)?;
    let runs = app.records.runs().briefs(thread_id.as_str(), RUNS).await.or_internal(LOOK_FAILED)?;
    // An execution that was tried again has a row for each attempt, and one line of checkpoints.
    let delegations = app.records.executions().number(thread_id.as_str()).await.or_internal(LOOK_FAILED)?;
    let deletion = Deletion {
        thread,
        checkpoints: checkpoints.len() as u64,
        runs: runs.len() as u64,
        delegations,
        has_files: tokio::fs::try_exists(app.agents.thread_dir(thread_id.as_str())).await.unwrap_or(true),
    };
    Ok(Html(deletion.page(&session)))
}

/// `POST /threads/{thread_id}/delete`
pub(super) async fn delete(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
) -> Result<Redirect, ApiError> {
    // A separate task, so that a browser that goes away does not stop it half-way.
    let threads = Arc::clone(&app.threads);
    let task = threads.spawn(async move { deleted(&app, &caller, &thread_id).await });
    task.await.or_internal(LOOK_FAILED)??;
    Ok(Redirect::to("/"))
}

async fn deleted(app: &App, caller: &Principal, thread: &ThreadId) -> Result<(), ApiError> {
    delete::delete(app, caller, thread).await.map(|_| ())
}

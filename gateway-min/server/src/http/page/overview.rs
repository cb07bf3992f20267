//! The runs of all threads that the caller may see.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Html;
use threadkeep_page::{Overview, ThreadRun};

use super::super::auth::Caller;
use super::super::error::{ApiError, OrApiError as _};
use super::Page;
use super::runs::line;
use super::session::Viewer;
use crate::app::App;
use crate::auth::Principal;
use threadkeep_records::{RunQuery, RunStatus};

const FAILED: &str = "Failed to list runs";
/// Runs of each kind on the page.
const SHOWN: u32 = 50;

/// `GET /runs`
pub(super) async fn show(
    State(app): State<Arc<App>>,
    Viewer(session): Viewer,
    Caller(caller): Caller,
) -> Page {
    let view = Overview {
        process: app.records.runs().owner().map(str::to_owned),
        running: runs(&app, &caller, RunStatus::Running).await?,
        waiting: runs(&app, &caller, RunStatus::Pending).await?,
        failed: runs(&app, &caller, RunStatus::Error).await?,
        limit: SHOWN as usize,
    };
    Ok(Html(view.page(&session)))
}

async fn runs(app: &App, caller: &Principal, status: RunStatus) -> Result<Vec<ThreadRun>, ApiError> {
    let query = RunQuery { status: Some(status), limit: SHOWN, offset: 0 };
    let rows = app.records.runs().of_all_threads(caller.sees(), &query).await.or_internal(FAILED)?;
    let of = |row| ThreadRun { run: line(&row), thread: row.thread_id, process: row.owner_worker_id };
    Ok(rows.into_iter().map(of).collect())
}

//! Prunes threads: deletes them, or all their checkpoints but the newest.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;
use threadkeep::Error;
use threadkeep::deletion::{Boundary, DeletionPlan, Keep, Prune, Reason, carry_out, plan_prune};
use threadkeep::id::ThreadId;
use threadkeep::saver::{Rewrite, ThreadImage};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::auth::{Caller, check_thread};
use super::delete::delete;
use super::error::{ApiError, OrApiError as _};
use super::exclusive::exclusively;
use super::extract::ApiJson;
use super::fields::{Fields, FromFields};
use super::page::option;
use super::schema::ErrorBody;
use super::threads::{absent, has_checkpoint};
use crate::app::App;
use crate::auth::Principal;
use threadkeep_records::{CHILD_PREFIX, WriterKind};

const FAILED: &str = "Failed to prune threads";
const BUSY: &str = "Thread has work in flight. Prune it after the work finishes.";
/// The maximum number of threads in a request, as many as a search finds: they are pruned to the end, whether or not
/// the client waits, and a body has room for millions of ids.
const MAX_THREADS: usize = 1000;

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(prune_threads))
}

/// What to prune.
#[derive(Debug, ToSchema)]
struct PruneThreads {
    /// The threads.
    #[schema(max_items = 1000)]
    thread_ids: Vec<String>,
    /// `delete` the threads, or `keep_latest`: only the newest checkpoint of each [default: delete].
    #[schema(value_type = Option<PruneStrategy>)]
    strategy: Option<&'static str>,
}

/// How to prune.
#[derive(Debug, ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "described, never built")]
enum PruneStrategy {
    Delete,
    KeepLatest,
}

impl FromFields for PruneThreads {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self {
            thread_ids: fields
                .field("thread_ids")
                .required()
                .at_most(MAX_THREADS)
                .texts()
                .unwrap_or_default(),
            strategy: fields.field("strategy").nullable().one_of(&["delete", "keep_latest"]),
        }
    }
}

#[allow(clippy::struct_field_names, reason = "the names are those of the service")]
/// The result: every thread of the request is counted or in one of the lists.
#[derive(Debug, Default, Serialize, ToSchema)]
struct Pruned {
    /// How many threads were pruned.
    pruned_count: usize,
    /// Those that do not exist.
    not_found: Vec<String>,
    /// Those on which a run or another writer is active; they are unchanged.
    busy: Vec<String>,
}

/// Prune threads.
#[utoipa::path(post, path = "/api/threads/prune", tag = "threads", request_body = PruneThreads,
    responses((status = 200, description = "What was done", body = Pruned),
        (status = 409, description = "A thread is not pruned: it needs delta mode, and this process runs in full mode, \
            or it has delta channels that only LangGraph can replay; those before it were pruned", body = ErrorBody)))]
async fn prune_threads(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiJson(body): ApiJson<PruneThreads>,
) -> Result<Json<Pruned>, ApiError> {
    let keeps = body.strategy == Some("keep_latest");
    let threads = Arc::clone(&app.threads);
    // A separate task, so that a client that disconnects does not stop it half-way through a thread.
    let task = threads.spawn(async move {
        let mut pruned = Pruned::default();
        for id in body.thread_ids {
            let thread = ThreadId::from(id.as_str());
            // A subagent's checkpoints belong to the thread that delegated, and nothing here knows whose that is.
            let done = if id.starts_with(CHILD_PREFIX) {
                Err(absent(&thread))
            } else if keeps {
                keep_latest(&app, &caller, &thread).await
            } else {
                delete(&app, &caller, &thread).await.map(|_| ())
            };
            match done {
                Ok(()) => pruned.pruned_count += 1,
                Err(error) if error.status() == StatusCode::NOT_FOUND => pruned.not_found.push(id),
                Err(error) if error.is_text(BUSY) || error.is_text(super::delete::BUSY) => {
                    pruned.busy.push(id);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(pruned)
    });
    task.await.or_internal(FAILED)?.map(Json)
}

/// Removes all checkpoints of the thread but the head, which keeps its state.
async fn keep_latest(app: &Arc<App>, caller: &Principal, thread: &ThreadId) -> Result<(), ApiError> {
    check_thread(app, caller, thread).await?;
    let row = app.records.threads().get(thread.as_str(), None).await.or_internal(FAILED)?;
    if row.is_none() && !has_checkpoint(app, thread, FAILED).await? {
        return Err(absent(thread));
    }
    app.threads.accessor().check(thread, None).await.or_engine(thread, FAILED)?;
    let (work, target) = (Arc::clone(app), thread.clone());
    let work = async move {
        let accessor = work.threads.accessor();
        let what = Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(Keep::Latest) };
        let plan = |image: &ThreadImage| {
            let mut plan = plan_prune(image, &what, accessor.table())?;
            if only_langgraph_replays(&plan) {
                plan.rewrite = Rewrite::default(); // Changes nothing, as the response says.
            }
            Ok(plan)
        };
        match carry_out(&**accessor.saver(), &target, plan).await {
            Ok((_, plan)) => check_replayed(&plan, &target, "latest"),
            Err(Error::Stale { .. }) => Err(ApiError::conflict(BUSY)),
            Err(error) => Err(ApiError::from_engine(&target, FAILED, &error)),
        }
    };
    let kind = WriterKind::CheckpointWrite;
    exclusively((app, caller), thread, kind, BUSY.to_owned(), FAILED, work).await
}

/// Whether a plan with fresh snapshots would keep checkpoints that only LangGraph can replay others from: there, no
/// snapshot can be computed here.
fn only_langgraph_replays(plan: &DeletionPlan) -> bool {
    plan.verdicts.iter().any(|(_, reason)| *reason == Reason::Replay)
}

/// Refuses a plan with fresh snapshots that [`only_langgraph_replays`]. `keep` is what to keep, for the command that does.
///
/// # Errors
/// 409, with the remedy.
pub(super) fn check_replayed(plan: &DeletionPlan, thread: &ThreadId, keep: &str) -> Result<(), ApiError> {
    if !only_langgraph_replays(plan) {
        return Ok(());
    }
    let option = option(thread);
    Err(ApiError::conflict(format!(
        "Thread {thread} has delta channels that only LangGraph can replay, so no snapshot of them can be stored and nothing \
         was removed. Use `threadkeep prune apply {option} --keep {keep}`, which keeps what they are replayed from."
    )))
}

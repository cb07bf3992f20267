//! The stream of a thread: its runs, one after the other, from any client.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use bytes::Bytes;
use chrono::{DateTime, Utc};
use futures::StreamExt as _;
use futures::stream;
use serde_json::json;
use threadkeep::id::ThreadId;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::auth::{Caller, check_thread};
use super::error::{ApiError, OrApiError as _};
use super::extract::{ApiPath, ApiQuery, ThreadPath};
use super::fields::{Fields, FromFields};
use super::schema::ErrorBody;
use super::sse;
use super::threads::existing;
use crate::app::App;
use crate::auth::Principal;
use crate::streams::bridge::{Frame, HEARTBEAT, Subscription};
use threadkeep_records::{RunQuery, RunRow};

const FAILED: &str = "Failed to read thread";
/// How often the records are searched for new runs of other processes. This process announces its own.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How many runs are looked at: more do not start between two looks.
const LOOKED_AT: u32 = 100;

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(join_thread))
}

/// What to stream.
struct ThreadStreamParams {
    /// Whether to stream the frames of runs, besides their beginnings and ends.
    frames: bool,
}

impl FromFields for ThreadStreamParams {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let modes = fields.field("stream_mode").nullable().listed().each_of(&["run_modes", "lifecycle"]);
        Self { frames: modes.is_none_or(|modes| modes.is_empty() || modes.contains(&"run_modes")) }
    }
}

/// Follow all runs of a thread, from the active one on.
///
/// Each run begins with its `metadata` frame; after its last frame comes a `metadata` frame with the status `run_done`. The
/// stream does not end by itself. A client that reconnects with `Last-Event-ID` continues after that event.
#[utoipa::path(get, path = "/api/threads/{thread_id}/stream", tag = "threads",
    params(("thread_id" = String, Path), ("stream_mode" = inline(Option<Vec<ThreadStreamMode>>), Query)),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream", body = ref("#/components/schemas/StreamEvent")),
        (status = 404, description = "No such thread", body = ErrorBody)))]
async fn join_thread(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    ApiQuery(ThreadStreamParams { frames }): ApiQuery<ThreadStreamParams>,
    Caller(caller): Caller,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    existing(&app, &thread_id, FAILED).await?;
    let mut runs = RunsOf::new(app, caller, thread_id);
    runs.begin(sse::last_event_id(&headers)).await?;
    let frames = stream::unfold(runs, move |mut runs| async move {
        let frame = runs.next(frames).await?;
        Some((frame, runs))
    });
    Ok(sse::streaming(HeaderMap::new(), frames))
}

/// What a thread's stream has besides the frames of its runs.
#[derive(Debug, utoipa::ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "described, never built")]
enum ThreadStreamMode {
    RunModes,
    Lifecycle,
}

/// The runs of a thread in the order in which they are followed.
struct RunsOf {
    app: Arc<App>,
    caller: Principal,
    thread: ThreadId,
    /// The runs of the last look.
    known: BTreeSet<String>,
    /// Older runs than this are not new, although they are not among the known ones.
    since: Option<DateTime<Utc>>,
    waiting: VecDeque<(RunRow, Option<String>)>,
    current: Option<(String, Subscription)>,
}

impl RunsOf {
    fn new(app: Arc<App>, caller: Principal, thread: ThreadId) -> Self {
        let (known, waiting) = (BTreeSet::new(), VecDeque::new());
        Self { app, caller, thread, known, since: None, waiting, current: None }
    }

    /// Starts after this event, or with the active run.
    async fn begin(&mut self, last_event_id: Option<&str>) -> Result<(), ApiError> {
        let runs = self.look().await?;
        let last = last_event_id.and_then(|id| id.rsplit_once(':'));
        let seen = last.and_then(|(run, _)| runs.iter().position(|row| row.run_id == run));
        for (index, run) in runs.into_iter().enumerate() {
            let event = last.filter(|_| seen == Some(index)).map(|(_, event)| event.to_owned());
            if seen.map_or(run.status.is_active(), |seen| index >= seen) {
                self.waiting.push_back((run, event));
            }
        }
        Ok(())
    }

    /// The runs that appeared since the last look, oldest first.
    async fn look(&mut self) -> Result<Vec<RunRow>, ApiError> {
        let query = RunQuery { status: None, limit: LOOKED_AT, offset: 0 };
        let page = self.app.records.runs().list_by_thread(self.thread.as_str(), &query).await;
        let page = page.or_internal(FAILED)?;
        let since = self.since;
        let full = u32::try_from(page.len()).is_ok_and(|found| found == LOOKED_AT);
        self.since = page.last().filter(|_| full).map(|oldest| oldest.created_at);
        let known = page.iter().map(|run| run.run_id.clone()).collect();
        let known = std::mem::replace(&mut self.known, known);
        let is_new =
            |run: &RunRow| !known.contains(&run.run_id) && since.is_none_or(|since| run.created_at > since);
        Ok(page.into_iter().filter(is_new).rev().collect())
    }

    /// The next frame to send, in pieces; `None` if the stream is over: the gateway stops, or the thread is no longer the caller's.
    async fn next(&mut self, frames: bool) -> Option<Vec<Bytes>> {
        loop {
            if let Some((run_id, stream)) = &mut self.current {
                let Some(frame) = stream.next().await else {
                    self.current = None;
                    continue;
                };
                match frame {
                    Frame::Event(event) if frames || &*event.name == "metadata" => {
                        return Some(sse::encode_event_of(run_id, &event));
                    }
                    Frame::Event(_) => {}
                    Frame::Heartbeat | Frame::Gap(_) => return Some(sse::encode(&frame)),
                    Frame::End => {
                        let done = json!({"run_id": run_id, "thread_id": self.thread, "status": "run_done"});
                        self.current = None;
                        return Some(vec![format!("event: metadata\ndata: {done}\n\n").into()]);
                    }
                }
            } else if let Some((run, event)) = self.waiting.pop_front() {
                // The thread may have been deleted and created again, by another user.
                check_thread(&self.app, &self.caller, &self.thread).await.ok()?;
                let stream = self.app.streams.follow(&run, event.as_deref());
                self.current = Some((run.run_id, stream));
            } else if !self.wait().await? {
                return Some(sse::encode(&Frame::Heartbeat));
            }
        }
    }

    /// Waits for a new run; `false` if there is none for the time of a heartbeat.
    async fn wait(&mut self) -> Option<bool> {
        let beat = tokio::time::sleep(HEARTBEAT);
        tokio::pin!(beat);
        loop {
            let streams = Arc::clone(&self.app.streams);
            let announced = streams.announced();
            tokio::pin!(announced);
            // From here on, so that a run that starts during the look is not missed.
            announced.as_mut().enable();
            match self.look().await {
                Ok(found) => self.waiting.extend(found.into_iter().map(|run| (run, None))),
                // It may be back at the next look.
                Err(error) => tracing::debug!(%error, thread = %self.thread, "cannot look for new runs"),
            }
            if !self.waiting.is_empty() {
                return Some(true);
            }
            if self.app.runs.is_stopping() {
                return None;
            }
            tokio::select! {
                () = announced => {}
                () = tokio::time::sleep(LOOK_EVERY) => {}
                () = &mut beat => return Some(false),
            }
        }
    }
}

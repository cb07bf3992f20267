//! The stream of a thread: its runs, one after the other, from any client.

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream;
use serde_json::json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::auth::Caller;
use super::error::ApiError;
use super::extract::{ApiPath, ApiQuery, ThreadPath};
use super::fields::{Fields, FromFields};
use super::schema::ErrorBody;
use super::sse;
use super::thread_runs::{FAILED, RunsOf, Upcoming};
use super::threads::existing;
use crate::app::App;
use crate::streams::bridge::{Frame, Subscription};

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
/// stream does not end by itself. A client that reconnects with `Last-Event-ID` continues after that event. After a `gap` frame
/// the stream goes on with the oldest frame that is kept; what was lost is in the state of the thread.
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
    runs.after(sse::last_event_id(&headers)).await?;
    let frames = stream::unfold(Following { runs, frames, current: None }, |mut following| async move {
        let frame = following.next().await?;
        Some((frame, following))
    });
    Ok(sse::streaming(HeaderMap::new(), sse::kept_open(frames)))
}

/// What a thread's stream has besides the frames of its runs.
#[derive(Debug, utoipa::ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "described, never built")]
enum ThreadStreamMode {
    RunModes,
    Lifecycle,
}

/// A client's place in the stream of a thread.
struct Following {
    runs: RunsOf,
    /// Whether it gets frames of the runs.
    frames: bool,
    current: Option<(String, Subscription)>,
}

impl Following {
    /// The next frame to send, in pieces; `None` if the stream is over: the gateway stops, or the thread is no longer the caller's.
    async fn next(&mut self) -> Option<Vec<Bytes>> {
        loop {
            if let Some((run_id, stream)) = &mut self.current {
                match stream.next().await.unwrap_or(Frame::End) {
                    Frame::Event(event) if self.frames || &*event.name == "metadata" => {
                        return Some(sse::encode_event_of(run_id, &event));
                    }
                    Frame::Event(_) | Frame::Heartbeat => {}
                    // The client was too slow: it gets what is still there, and the end of the run.
                    gap @ Frame::Gap(_) => {
                        *stream = stream.again();
                        return Some(sse::encode(&gap));
                    }
                    Frame::End => {
                        let thread = self.runs.thread();
                        let done = json!({"run_id": run_id, "thread_id": thread, "status": "run_done"});
                        self.current = None;
                        return Some(vec![format!("event: metadata\ndata: {done}\n\n").into()]);
                    }
                }
            } else {
                match self.runs.next().await? {
                    Upcoming::Run(run, after) => {
                        let stream = self.runs.app().streams.follow(&run, after.as_deref());
                        self.current = Some((run.run_id.clone(), stream));
                    }
                    Upcoming::Nothing => {}
                }
            }
        }
    }
}

//! The thread protocol: commands to a thread, and the stream of its events.
//!
//! It is another language for what the other routes do. A command starts a run as the routes of runs start one; the events
//! are the frames of the thread's runs, translated. Nothing of it is kept: a stream is as long as its connection.
//!
//! Every event has a number, which grows along the thread and is the same in every stream and on every process, so that a
//! client that was away asks for what came `since` the last one it has.

mod block;
mod command;
pub(super) mod described;
mod event;
mod filter;
mod follow;
mod message;
mod read;
mod reply;
mod start;
#[cfg(test)]
mod tests;
mod tool;
mod translate;
mod waiting;

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use futures::stream;
use serde_json::Value;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use self::command::{Command, Sent};
use self::filter::Filter;
use self::follow::Following;
use self::reply::{Refusal, done};
use self::start::{Begun, Sender};
use super::auth::{Caller, HasWritten};
use super::error::ApiError;
use super::extract::{ApiJson, ApiPath, ThreadPath};
use super::schema::{CommandRefused, ErrorBody};
use super::sse;
use super::thread_runs::{FAILED, RunsOf};
use super::threads::existing;
use crate::app::App;

/// The routes of this folder.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(send_command)).routes(routes!(stream_events))
}

/// Send a command of the thread protocol.
///
/// `run.start` creates the thread if there is none. A command that is refused has the status of the same error elsewhere;
/// the methods that this gateway does not do are answered 501.
#[utoipa::path(post, path = "/api/threads/{thread_id}/commands", tag = "protocol", params(("thread_id" = String, Path)),
    request_body = ref("#/components/schemas/Command"),
    responses((status = 200, description = "The result", body = ref("#/components/schemas/CommandDone")), CommandRefused))]
async fn send_command(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    Caller(caller): Caller,
    headers: HeaderMap,
    ApiJson(sent): ApiJson<Sent>,
) -> Response {
    let id = sent.id;
    let sender = Sender { app: &app, caller: &caller, thread: &thread_id, headers: &headers };
    match carry_out(&sender, sent).await {
        Ok((result, applied_through)) => {
            let mut answer = done(id, result, applied_through);
            if applied_through.is_some() {
                answer.extensions_mut().insert(HasWritten);
            }
            answer
        }
        Err(refusal) => refusal.into_response(id),
    }
}

async fn carry_out(sender: &Sender<'_>, sent: Sent) -> Result<(Value, Option<u64>), Refusal> {
    let (app, thread) = (sender.app, sender.thread);
    let read = |result: Value| (result, None);
    let begun = |Begun { result, applied_through }: Begun| (result, Some(applied_through));
    match Command::of(sent)? {
        Command::Start(run) => sender.start(run).await.map(begun),
        Command::Respond(answers, run) => sender.respond(answers, run).await.map(begun),
        Command::Fork(run) => sender.fork(run).await.map(begun),
        Command::State(query) => read::state(app, thread, query).await.map(read),
        Command::Checkpoints(query) => read::checkpoints(app, thread, query).await.map(read),
        Command::Tree(query) => read::tree(app, thread, query).await.map(read),
    }
}

/// Follow the events of a thread.
///
/// The stream begins after the event `since`, or without it with the active run or else the newest one, and goes on with
/// the runs that follow. It does not end by itself, but when the thread is deleted. What is no longer kept of a run is
/// replaced by the state at the head.
#[utoipa::path(post, path = "/api/threads/{thread_id}/stream/events", tag = "protocol",
    params(("thread_id" = String, Path)), request_body = ref("#/components/schemas/EventFilter"),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream", body = ref("#/components/schemas/StreamEvent")),
        (status = 404, description = "No such thread", body = ErrorBody)))]
async fn stream_events(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    Caller(caller): Caller,
    ApiJson(filter): ApiJson<Filter>,
) -> Result<Response, ApiError> {
    existing(&app, &thread_id, FAILED).await?;
    let following = Following::begin(RunsOf::new(app, caller, thread_id), filter).await?;
    let events = stream::unfold(following, |mut following| async move {
        let pieces = following.next().await?;
        Some((pieces, following))
    });
    Ok(sse::streaming(HeaderMap::new(), sse::kept_open(events)))
}

//! The answer to a client that waits for a run, however long that takes.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use axum::{BoxError, Extension};
use futures::{Stream, stream};
use threadkeep::id::ThreadId;
use tokio::time::timeout;

use super::auth::{ChecksThread, check_thread};
use super::run_follow::finished;
use super::sse;
use crate::app::App;
use crate::auth::Principal;
use crate::streams::bridge::Subscription;

/// As [`finished`]. If the run takes longer than `beat`, the head goes ahead and line breaks follow it: proxies end
/// answers that say nothing for a while, often for a minute. What fails after the head breaks the answer off, so that
/// the client joins the run.
pub(super) async fn awaited(
    app: &Arc<App>,
    caller: &Principal,
    thread: &ThreadId,
    run_id: &str,
    stream: Subscription,
    beat: Duration,
) -> Response {
    let headers = sse::result_headers(thread, run_id);
    let (app, caller, thread, run_id) = (Arc::clone(app), caller.clone(), thread.clone(), run_id.to_owned());
    let mut answer = {
        let (app, thread) = (Arc::clone(&app), thread.clone());
        Box::pin(async move { finished(&app, &thread, &run_id, stream).await })
    };
    if let Ok(answer) = timeout(beat, &mut answer).await {
        return answer;
    }
    let result = async move {
        let (head, body) = answer.await.into_parts();
        // Another user may have created the thread meanwhile, also after its owner deleted it.
        check_thread(&app, &caller, &thread).await?;
        if !head.status.is_success() {
            return Err(BoxError::from(format!("the result of the run is an error: {}", head.status)));
        }
        Ok(to_bytes(body, usize::MAX).await?)
    };
    let head = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (sse::X_ACCEL_BUFFERING, HeaderValue::from_static("no")),
    ];
    (head, headers, Extension(ChecksThread), Body::from_stream(after_line_breaks(result, beat)))
        .into_response()
}

/// A line break for each `beat` until there is the result. JSON may begin with them.
fn after_line_breaks(
    result: impl Future<Output = Result<Bytes, BoxError>> + Send + 'static,
    beat: Duration,
) -> impl Stream<Item = Result<Bytes, BoxError>> + Send + 'static {
    stream::try_unfold(Some(Box::pin(result)), move |waiting| async move {
        let Some(mut result) = waiting else { return Ok(None) };
        let piece = timeout(beat, &mut result).await;
        match piece {
            Ok(result) => result.map(|result| Some((result, None))),
            Err(_late) => Ok(Some((Bytes::from_static(b"\n"), Some(result)))),
        }
    })
}

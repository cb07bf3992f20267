//! Creates several background runs at once.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::Value;
use threadkeep::id::ThreadId;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::auth::{Caller, check_thread};
use super::error::ApiError;
use super::extract::ApiJsonList;
use super::fields::{Fields, FromFields, Pattern};
use super::run_body::RunBody;
use super::runs::{Follow, checked, existing, record, start, stateless_thread};
use super::schema::ErrorBody;
use crate::app::App;
use crate::runs::admission::OnThread;
use threadkeep_records::CancelAction;

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(create_batch))
}

/// A run of a batch.
struct BatchedRun {
    thread_id: Option<ThreadId>,
    body: RunBody,
}

impl FromFields for BatchedRun {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        // The JavaScript client sends the names of its own options here.
        fields.rename(snake_case);
        let thread_id = fields.field("thread_id").nullable().text_matching(&Pattern::THREAD_ID);
        Self { thread_id: thread_id.map(ThreadId::from), body: RunBody::from_fields(fields) }
    }
}

/// `streamMode` as `stream_mode`.
fn snake_case(name: &str) -> String {
    let mut snake = String::with_capacity(name.len());
    for letter in name.chars() {
        if letter.is_ascii_uppercase() {
            snake.push('_');
        }
        snake.push(letter.to_ascii_lowercase());
    }
    snake
}

/// Create runs in the background, each on the thread that it names or on a new one.
///
/// If one cannot be created, those before it are cancelled, and the error says which one it is.
#[utoipa::path(post, path = "/api/runs/batch", tag = "runs", request_body = ref("#/components/schemas/RunBatch"),
    responses((status = 200, description = "The runs' records, in the order of the request", body = ref("#/components/schemas/RunRecords")),
        (status = 400, description = "A message, a model or a checkpoint is not valid", body = ErrorBody),
        (status = 404, description = "No such thread or checkpoint", body = ErrorBody),
        (status = 409, description = "A thread has an active run", body = ErrorBody)))]
async fn create_batch(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiJsonList(runs): ApiJsonList<BatchedRun>,
) -> Result<Json<Vec<Value>>, ApiError> {
    let threads = Arc::clone(&app.threads);
    // A separate task, so that a client that disconnects leaves all of them or none.
    let task = threads.spawn(async move {
        let mut created = Vec::with_capacity(runs.len());
        for (index, BatchedRun { thread_id, body }) in runs.into_iter().enumerate() {
            let started = async {
                let (thread, place, request) = if let Some(thread) = thread_id {
                    check_thread(&app, &caller, &thread).await?;
                    existing(&app, &thread).await?;
                    (thread, OnThread::Existing(&caller), checked(&app, body).await?)
                } else {
                    let request = checked(&app, body).await?;
                    let thread = stateless_thread(&app, &caller, &request).await?;
                    (thread, OnThread::Visible(&caller), request)
                };
                start(&app, &caller, &thread, place, request, Follow::No, None).await
            };
            match started.await {
                Ok(started) => created.push((started.run, started.kwargs)),
                Err(error) => {
                    for (run, _) in &created {
                        if let Err(error) = app.runs.cancel(&run.run_id, CancelAction::Interrupt).await {
                            tracing::warn!(run_id = run.run_id, %error, "cannot cancel a run of a refused batch");
                        }
                    }
                    return Err(error.about(&format!("Run {index} of the batch")));
                }
            }
        }
        Ok(created.into_iter().map(|(run, kwargs)| record(&run, kwargs)).collect())
    });
    task.await.map_err(|error| ApiError::internal("Failed to create runs", &error))?.map(Json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_javascript_client_become_those_of_the_api() {
        for (sent, read) in [("streamMode", "stream_mode"), ("assistant_id", "assistant_id"), ("x", "x")] {
            assert_eq!(snake_case(sent), read);
        }
    }
}

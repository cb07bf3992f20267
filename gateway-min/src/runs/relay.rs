//! Following a run that another process works on: through the database.
//!
//! What the other process streams stays there. What it stores is seen here: each new head as a `values` frame, a failure
//! as an `error` frame, the end. A client that asked for other frames gets the state instead.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value as Json, json};
use threadkeep::id::{CheckpointId, ThreadId};

use super::bridge::{Publisher, Subscription};
use crate::app::App;
use crate::serialize;
use crate::store::{CancelAction, EventQuery, RunRow, RunStatus, StoreError};

/// How often the database is asked what has become of a run.
pub(crate) const POLL: Duration = Duration::from_millis(250);

impl App {
    /// The stream of a run, whichever process works on it, from the event after `last_event_id`.
    pub(crate) fn follow(self: &Arc<Self>, run: &RunRow, last_event_id: Option<&str>) -> Subscription {
        if run.status.is_active()
            && self.is_foreign(run)
            && let Some(publisher) = self.bridge.open_absent(&run.run_id)
        {
            tokio::spawn(relay(Arc::clone(self), run.clone(), publisher));
        }
        self.bridge.subscribe(&run.run_id, last_event_id)
    }

    /// Whether another process works on the run, as far as its row tells.
    pub(crate) fn is_foreign(&self, run: &RunRow) -> bool {
        self.store.runs().owner().is_some_and(|owner| run.owner_worker_id.as_deref() != Some(owner))
    }
}

/// Publishes what the database tells of a run until it has ended. While the database is away, it waits.
async fn relay(app: Arc<App>, run: RunRow, publisher: Publisher) {
    let thread = ThreadId::from(run.thread_id.as_str());
    publisher.publish("metadata", &json!({"run_id": run.run_id, "thread_id": run.thread_id}));
    let abandoned = publisher.abandoned();
    let (mut shown, mut cancelled) = (None, false);
    loop {
        if abandoned.is_cancelled() && !cancelled {
            cancelled = app.cancel_run(&run.run_id, CancelAction::Interrupt).await.is_ok();
        }
        // The row first: what a run has written by its end is in the state that is read after it.
        match app.store.runs().get(&run.run_id).await {
            Ok(Some(row)) => {
                if row.status != RunStatus::Pending {
                    shown = show_head(&app, &thread, shown, &publisher).await;
                }
                if !row.status.is_active() {
                    if let Some(error) = failure(&app, &row).await {
                        publisher.publish("error", &error);
                    }
                    break;
                }
            }
            // Deleted with its thread.
            Ok(None) => break,
            Err(error) => tracing::warn!(run_id = run.run_id, %error, "a run elsewhere cannot be looked at"),
        }
        tokio::time::sleep(POLL).await;
    }
    publisher.end();
}

/// Publishes the head's values if it is not `shown`; returns what is shown now.
async fn show_head(
    app: &App,
    thread: &ThreadId,
    shown: Option<CheckpointId>,
    publisher: &Publisher,
) -> Option<CheckpointId> {
    let head = match app.accessor().get(thread, None).await {
        Ok(Some(head)) if Some(head.key.id) != shown => head,
        Ok(_) => return shown,
        Err(error) => {
            tracing::debug!(%thread, %error, "the head of a thread that is worked on elsewhere cannot be read");
            return shown;
        }
    };
    if let Ok(values) = serialize::values(&head) {
        publisher.publish("values", &Json::Object(values));
    }
    Some(head.key.id)
}

/// The data of the `error` frame of a run that failed; none if it ended otherwise.
async fn failure(app: &App, row: &RunRow) -> Option<Json> {
    let message = row.error.as_deref().filter(|_| row.status == RunStatus::Error)?;
    if row.cancel_action.is_some() {
        return None;
    }
    let query = EventQuery {
        event_types: Some(vec!["run.error".to_owned()]),
        ..EventQuery::new(&row.thread_id, &row.run_id)
    };
    let told: Result<Vec<_>, StoreError> = app.store.events().list(&query).await;
    let name = told.ok().and_then(|mut told| told.pop()).map(|mut event| event.content["name"].take());
    match name {
        // The model's failure is told by its answer.
        Some(Json::String(name)) if name == "LLMProviderError" => None,
        Some(Json::String(name)) => Some(json!({"message": message, "name": name})),
        _ => Some(json!({"message": message, "name": "RunError"})),
    }
}

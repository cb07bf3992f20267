//! Following a run that another process works on: through the database.
//!
//! The process that works on the run is asked for its frames ([`super::mirror`]), and they are shown here under their own
//! ids. Where it hands on none, because it is gone or the run was over before it could, the state that the run left is
//! shown instead: the head as a `values` frame, a failure as an `error` frame, the end.

use std::sync::Arc;
use std::time::Duration;

use chrono::Utc;
use serde_json::{Value as Json, json};
use threadkeep::id::ThreadId;
use threadkeep_agent::serialize;
use tokio::time::Instant;

use super::bridge::{Publisher, Subscription};
use super::mirror::decode;
use crate::app::App;
use crate::store::{CancelAction, EventQuery, RECOVERY_STOP_REASON, RunRow, RunStatus, StoreError};

/// How often the database is asked what has become of a run.
pub(crate) const POLL: Duration = Duration::from_millis(250);
/// How long the last frames of a run may come behind the end of its row.
const LAST_FRAMES: Duration = Duration::from_secs(2);
/// So many batches of frames are read at once.
const BATCHES: u32 = 32;

impl App {
    /// The stream of a run, whichever process works on it, from the event after `last_event_id`.
    pub(crate) fn follow(self: &Arc<Self>, run: &RunRow, last_event_id: Option<&str>) -> Subscription {
        if self.is_foreign(run)
            && self.may_have_frames(run)
            && let Some(publisher) = self.bridge.open_relayed(&run.run_id)
        {
            tokio::spawn(relay(Arc::clone(self), run.clone(), publisher));
        }
        self.bridge.subscribe(&run.run_id, last_event_id)
    }

    /// Whether frames of the run may be there: those of one that has ended stay for a while, for clients that lost their
    /// connection at its end.
    fn may_have_frames(&self, run: &RunRow) -> bool {
        let ended = (Utc::now() - run.updated_at).to_std().unwrap_or_default();
        run.status.is_active() || ended < self.bridge.cleanup_delay()
    }

    /// Whether another process works on the run, as far as its row tells.
    pub(crate) fn is_foreign(&self, run: &RunRow) -> bool {
        self.store.runs().owner().is_some_and(|owner| run.owner_worker_id.as_deref() != Some(owner))
    }
}

/// Publishes what another process streams of a run until it has ended. While the database is away, it waits.
async fn relay(app: Arc<App>, run: RunRow, publisher: Publisher) {
    let runs = app.store.runs();
    let abandoned = publisher.abandoned();
    let (mut asked, mut cancelled) = (false, false);
    let (mut next_seq, mut ended_at) = (0, None);
    loop {
        if abandoned.is_cancelled() && !cancelled {
            cancelled = app.cancel_run(&run.run_id, CancelAction::Interrupt).await.is_ok();
        }
        asked = asked || !run.status.is_active() || runs.follow(&run.run_id).await.is_ok();
        match look(&app, &run.run_id, &mut next_seq, &publisher).await {
            Ok(Seen::AtWork) => {}
            Ok(Seen::All) => break,
            // It was over when the client came: there are the frames that were handed on by then, or none.
            Ok(Seen::Ended(_)) if !run.status.is_active() => break,
            Ok(Seen::Ended(row)) => {
                let since = *ended_at.get_or_insert_with(Instant::now);
                let dead = row.stop_reason.as_deref() == Some(RECOVERY_STOP_REASON);
                if dead || since.elapsed() >= LAST_FRAMES {
                    show_outcome(&app, &row, next_seq == 0, &publisher).await;
                    break;
                }
            }
            Err(error) => tracing::warn!(run_id = run.run_id, %error, "a run elsewhere cannot be looked at"),
        }
        tokio::time::sleep(POLL).await;
    }
    publisher.end();
}

/// What a look at a run elsewhere found.
enum Seen {
    AtWork,
    /// Its row has ended; its last frames have not come.
    Ended(Box<RunRow>),
    /// There is nothing more to show.
    All,
}

/// Publishes the frames that have come.
async fn look(
    app: &App,
    run_id: &str,
    next_seq: &mut u64,
    publisher: &Publisher,
) -> Result<Seen, StoreError> {
    // The row first: the frames of a run that has ended by then may be all there.
    let row = app.store.runs().get(run_id).await?;
    loop {
        let batches = app.store.runs().frames(run_id, *next_seq, BATCHES).await?;
        let found = batches.len();
        for batch in batches {
            let frames = batch.frames.iter().filter_map(decode).filter(|event| event.id.seq >= *next_seq);
            frames.for_each(|event| publisher.repeat(event));
            *next_seq = batch.next_seq.max(*next_seq);
            if batch.ends {
                return Ok(Seen::All);
            }
        }
        if found < BATCHES as usize {
            break;
        }
    }
    Ok(match row {
        Some(row) if row.status.is_active() => Seen::AtWork,
        Some(row) => Seen::Ended(Box::new(row)),
        // Deleted with its thread.
        None => Seen::All,
    })
}

/// Publishes what an ended run left, to clients that have not seen its end, nor perhaps its beginning.
async fn show_outcome(app: &App, row: &RunRow, from_the_start: bool, publisher: &Publisher) {
    let thread = ThreadId::from(row.thread_id.as_str());
    if from_the_start {
        publisher.publish("metadata", &json!({"run_id": row.run_id, "thread_id": row.thread_id}));
    }
    let head = app.accessor().get(&thread, None).await;
    match head.and_then(|head| head.as_ref().map(serialize::values).transpose()) {
        Ok(Some(values)) => {
            publisher.publish("values", &Json::Object(values));
        }
        Ok(None) => {}
        Err(error) => tracing::debug!(%thread, %error, "the head that a run elsewhere left cannot be read"),
    }
    if let Some(error) = failure(app, row).await {
        publisher.publish("error", &error);
    }
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

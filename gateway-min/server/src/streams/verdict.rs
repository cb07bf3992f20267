//! What the end of a run shows to those who follow it. Only this file decides that, from how the run's row ended.
//!
//! A stream that ends with `end` alone says that the run succeeded, or did what a client had asked of it. Any other run
//! has an `error` frame before its `end`, here and on every other gateway, now and for a client that comes later.
//!
//! | How the run ended | Its row | Its stream | Its thread's event stream | `wait`, `join` |
//! |---|---|---|---|---|
//! | it succeeded | `success` | `end` | `completed` | the state |
//! | it waits for its user | `success` | `end` | `interrupted`, and the question | the state |
//! | it was cancelled by a client | `interrupted` | `end` | `interrupted` | the state, `status` |
//! | it was rolled back for a client | `error`, [`ROLLED_BACK`] | `end` | `failed` | `__error__` |
//! | its model failed, and its answer says so | `error`, the reason | `end` | `failed` | `__error__` |
//! | it failed, or its thread has another mode | `error`, the text | `error`, `end` | `failed` | `__error__` |
//! | its store lost acknowledged changes | `error`, the loss | `error`, `end` | `failed` | `__error__` |
//! | a dead process left a rollback that is impossible | `error`, why | `error`, `end` | `failed` | `__error__` |
//! | its process is gone, or lost its lease | `error`, which of both | `error`, `end` | `failed` | `__error__` |
//! | its task, or that of its rollback, panicked | `error`, that it did | `error`, `end` | `failed` | `__error__` |
//! | a stopping gateway interrupted it | `interrupted`, why | `error`, `end` | `interrupted` | the state, `status` |
//! | it was deleted | none | `error`, `end` | over with the thread | `__error__` |
//! | its row cannot be read | unknown | `error`, `end` | `failed` | 503 |
//!
//! A request with a `webhook` is refused, so nothing else hears of an end. A run that another process has taken over ends
//! when its row does: its stream stays open until then. Two streams end before that, and only in their own process;
//! followers on other gateways wait for the row:
//!
//! - those of a stopping gateway that leaves a restore to the next process, with the `error` [`LEFT`];
//! - those of a process that works on the run no longer and cannot say so in its row.
//!
//! A loss is found once, by whichever call meets it. So it is noted in the run's row at that moment
//! (`Runs::note_history_lost` of the records), and the row then has no other end, whichever process ends it.

use serde_json::{Value as Json, json};
use threadkeep_records::{EventQuery, Records, RecordsError, RunRow, RunStatus};

/// The error of a run that was rolled back as its client had asked.
pub(crate) const ROLLED_BACK: &str = "Rolled back by user";
/// The name of the error of a run whose model failed. Its answer shows that, and its stream has no `error`.
pub(crate) const MODEL_FAILED: &str = "LLMProviderError";
/// The name of the error of a run whose store lost acknowledged changes.
const HISTORY_LOST: &str = "CheckpointHistoryLostError";
/// What is shown of a run that failed without a text.
const UNEXPLAINED: &str = "The run failed; its row does not say why. The log of its gateway may.";
/// What is shown in the place of an end that cannot be read.
pub(crate) const UNREAD: &str =
    "Another process has ended this run, or ends it, and how cannot be read now. Read the run shortly.";
/// What is shown in the place of an end of which nothing is left.
pub(crate) const DELETED: &str =
    "This run was deleted, alone or with its thread, before its end was shown: how it ended is not known.";
/// What is shown in the place of an end that the next process brings about.
pub(crate) const LEFT: &str =
    "The gateway stopped before this run ended; the next one, or another one, ends it. Read the run shortly.";

/// The data of an `error` frame without a class of its own.
pub(crate) fn failure(message: &str) -> Json {
    json!({"message": message, "name": "RunError"})
}

/// Why a run that ended like this did not succeed; `None` for an end that `end` alone says, but for a
/// [failed model](MODEL_FAILED).
pub(crate) fn failed(status: RunStatus, error: Option<&str>) -> Option<&str> {
    match (status, error) {
        (RunStatus::Success, _) | (RunStatus::Interrupted, None) | (RunStatus::Error, Some(ROLLED_BACK)) => {
            None
        }
        (RunStatus::Error | RunStatus::Timeout | RunStatus::Interrupted, error) => {
            Some(error.unwrap_or(UNEXPLAINED))
        }
        (RunStatus::Pending | RunStatus::Running, error) => Some(error.unwrap_or(UNREAD)),
    }
}

/// The data of the `error` frame of an ended run; `None` if `end` alone says how it ended.
pub(super) async fn error_of(records: &Records, row: &RunRow) -> Option<Json> {
    let message = failed(row.status, row.error.as_deref())?;
    if row.history_lost.as_deref() == Some(message) {
        return Some(json!({"message": message, "name": HISTORY_LOST}));
    }
    let query = EventQuery {
        event_types: Some(["run.error".to_owned()].into()),
        ..EventQuery::new(&row.thread_id, &row.run_id)
    };
    let events: Result<Vec<_>, RecordsError> = records.events().list(&query).await;
    // An earlier one is not why it ended: its process may have died since.
    let event = events.ok().and_then(|mut events| events.pop());
    let name =
        event.filter(|event| event.content["message"] == message).map(|mut it| it.content["name"].take());
    match name {
        Some(Json::String(name)) if name == MODEL_FAILED => None,
        Some(Json::String(name)) => Some(json!({"message": message, "name": name})),
        _ => Some(failure(message)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_success_and_what_a_client_asked_for_end_without_an_error() {
        let statuses = [
            RunStatus::Pending,
            RunStatus::Running,
            RunStatus::Success,
            RunStatus::Error,
            RunStatus::Timeout,
            RunStatus::Interrupted,
        ];
        let errors = [None, Some(ROLLED_BACK), Some("boom")];
        let silent: Vec<_> = statuses
            .into_iter()
            .flat_map(|status| errors.map(|error| (status, error)))
            .filter(|(status, error)| failed(*status, *error).is_none())
            .collect();
        let expected = [
            (RunStatus::Success, None),
            (RunStatus::Success, Some(ROLLED_BACK)),
            (RunStatus::Success, Some("boom")),
            (RunStatus::Error, Some(ROLLED_BACK)),
            (RunStatus::Interrupted, None),
        ];
        assert_eq!(silent, expected);
    }

    #[test]
    fn a_loss_has_the_name_that_the_engine_gives_it() {
        let lost = threadkeep::Error::HistoryLost { thread: "t".into(), seen: String::new() };
        assert_eq!(lost.class_name(), HISTORY_LOST);
    }
}

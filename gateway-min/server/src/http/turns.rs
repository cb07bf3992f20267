//! Which run created which message of a conversation, and how long it took.
//!
//! The head's metadata contains maps that runs write when they end (see [`duration`]). Where these have gaps, the
//! stamps of human messages show where a run's turn begins, and the run's record its duration; results found that way
//! are noted for the next reader.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Value, json};
use threadkeep::id::ThreadId;
use threadkeep::saver::Load;
use threadkeep::state::StateSnapshot;
use threadkeep_agent::duration::{self, RunNotes};

use super::error::{ApiError, OrApiError as _};
use super::exclusive::written;
use super::history::HISTORY_FAILED;
use crate::app::App;

/// The field of a message, and the key of a human message's `additional_kwargs`, that names its run.
const RUN_ID: &str = "run_id";
/// The key of `additional_kwargs` with the run's duration in whole seconds, on its last answer.
const TURN_DURATION: &str = "turn_duration";

/// Sets the run of answers and tool results, and the duration on the last answer of each run. Returns what had to be
/// looked up and should be noted.
///
/// # Errors
/// Errors of the gate or a store, as responses of the history route.
pub(super) async fn attribute(
    app: &App,
    thread: &ThreadId,
    head: &StateSnapshot,
    messages: &mut [Value],
) -> Result<Option<RunNotes>, ApiError> {
    let known = duration::newest_notes(&**app.threads.accessor().saver(), &head.key, &head.metadata.extra)
        .await
        .or_engine(thread, HISTORY_FAILED)?;
    let runs = runs_of(messages, &known.messages);
    let of_runs: BTreeSet<&String> = runs.iter().flatten().collect();
    let mut missing = RunNotes::default();
    if of_runs.iter().any(|run| !known.durations.contains_key(*run)) {
        missing.durations = finished_runs(app, thread).await?;
        missing.durations.retain(|run, _| of_runs.contains(run) && !known.durations.contains_key(run));
    }
    let seconds = |run: &str| known.durations.get(run).or_else(|| missing.durations.get(run)).copied();
    stamp(messages, &runs, seconds);
    missing.messages = messages
        .iter()
        .zip(&runs)
        .filter_map(|(message, run)| Some((answer_id(message)?, run.as_ref()?)))
        .filter(|(id, run)| !known.messages.contains_key(*id) && seconds(run).is_some())
        .map(|(id, run)| (id.to_owned(), run.clone()))
        .collect();
    // Tasks are left, so a run is about to move the head; a note would only get in its way.
    let worth_it = head.next.is_empty() && !(missing.durations.is_empty() && missing.messages.is_empty());
    Ok(worth_it.then_some(missing))
}

/// The run of each answer and tool result: as noted, else that of the turn.
pub(super) fn runs_of(messages: &[Value], noted: &BTreeMap<String, String>) -> Vec<Option<String>> {
    let mut turn: Option<&str> = None;
    let run = |message| {
        match kind(message) {
            "human" => {
                turn = message["additional_kwargs"][RUN_ID].as_str();
                return None;
            }
            "ai" => {
                if let Some(run) = answer_id(message).and_then(|id| noted.get(id)) {
                    turn = Some(run);
                }
            }
            "tool" => {}
            _ => return None,
        }
        turn.map(str::to_owned)
    };
    messages.iter().map(run).collect()
}

/// Writes runs and durations onto the messages, over a client's copy from an earlier response.
fn stamp(messages: &mut [Value], runs: &[Option<String>], seconds: impl Fn(&str) -> Option<u64>) {
    let mut ended = BTreeSet::new();
    for (message, run) in messages.iter_mut().zip(runs).rev() {
        let answer = kind(message) == "ai";
        if !answer && kind(message) != "tool" {
            continue;
        }
        let Value::Object(fields) = message else { continue };
        fields.remove(RUN_ID);
        let kwargs = fields.get_mut("additional_kwargs").and_then(Value::as_object_mut);
        let duration = run.as_deref().filter(|run| answer && ended.insert(*run)).and_then(&seconds);
        if let Some(kwargs) = kwargs {
            kwargs.remove(TURN_DURATION);
            kwargs.extend(duration.map(|seconds| (TURN_DURATION.to_owned(), json!(seconds))));
        }
        fields.extend(run.as_ref().map(|run| (RUN_ID.to_owned(), json!(run))));
    }
}

fn kind(message: &Value) -> &str {
    message["type"].as_str().unwrap_or_default()
}

/// The id of a message, if it is an answer.
fn answer_id(message: &Value) -> Option<&str> {
    message["id"].as_str().filter(|id| kind(message) == "ai" && !id.is_empty())
}

/// The duration in whole seconds of each ended run of the thread.
async fn finished_runs(app: &App, thread: &ThreadId) -> Result<BTreeMap<String, u64>, ApiError> {
    let runs = app.records.runs().briefs(thread.as_str(), u32::MAX).await.or_internal(HISTORY_FAILED)?;
    let ended = runs.into_iter().filter(|run| !run.status.is_active());
    let seconds = ended.map(|run| {
        let seconds = (run.updated_at - run.created_at).num_seconds();
        (run.run_id, u64::try_from(seconds).unwrap_or(0))
    });
    Ok(seconds.collect())
}

/// Notes on the head what [`attribute`] had to look up, unless a writer is active on the thread; then a later reader
/// notes it.
pub(super) async fn note(app: Arc<App>, thread: ThreadId, missing: RunNotes) {
    let work = note_now(Arc::clone(&app), thread.clone(), missing);
    let noted = written(app.threads.noting(&thread, work).await, String::new(), NOTE_FAILED);
    // Other failures are already logged.
    if let Err(error) = noted
        && error.status() == StatusCode::CONFLICT
    {
        tracing::debug!(%thread, "not noting the durations of runs, the thread is busy");
    }
}

const NOTE_FAILED: &str = "Failed to note the durations of runs";

async fn note_now(app: Arc<App>, thread: ThreadId, mut missing: RunNotes) -> Result<(), ApiError> {
    let engine = |error| ApiError::from_engine(&thread, NOTE_FAILED, &error);
    let accessor = app.threads.accessor();
    let Some(head) = accessor.get_loading(&thread, None, Load::None).await.map_err(engine)? else {
        return Ok(());
    };
    // A run that has just ended has noted its own duration, perhaps rounded differently.
    let known =
        duration::newest_notes(&**accessor.saver(), &head.key, &head.metadata.extra).await.map_err(engine)?;
    missing.durations.retain(|run, _| !known.durations.contains_key(run));
    missing.messages.retain(|message, _| !known.messages.contains_key(message));
    duration::note(accessor, &thread, Some(head.key.id), &missing).await.map(|_| ()).map_err(engine)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn human(run: Option<&str>) -> Value {
        let kwargs = run.map_or(json!({}), |run| json!({"run_id": run}));
        json!({"type": "human", "content": "?", "id": "h", "additional_kwargs": kwargs})
    }

    fn message(kind: &str, id: &str) -> Value {
        json!({"type": kind, "content": "!", "id": id, "additional_kwargs": {}})
    }

    /// The runs of the messages; an empty string for none.
    fn runs(messages: &[Value], noted: &[(&str, &str)]) -> Vec<String> {
        let noted = noted.iter().map(|(message, run)| ((*message).to_owned(), (*run).to_owned())).collect();
        runs_of(messages, &noted).into_iter().map(Option::unwrap_or_default).collect()
    }

    #[test]
    fn a_turn_belongs_to_the_run_of_its_human_message() {
        let messages = [
            message("ai", "a0"),
            human(Some("r1")),
            message("ai", "a1"),
            message("tool", "t1"),
            message("system", "s"),
            message("ai", "a2"),
            human(None),
            message("ai", "a3"),
        ];
        assert_eq!(runs(&messages, &[]), ["", "", "r1", "r1", "", "r1", "", ""]);
    }

    #[test]
    fn a_noted_answer_belongs_to_its_run_and_so_does_what_follows() {
        let messages =
            [human(None), message("ai", "a1"), message("tool", "t1"), human(Some("r2")), message("ai", "a2")];
        let noted = [("a1", "r1"), ("a2", "r3"), ("t1", "never: only answers are noted")];
        assert_eq!(runs(&messages, &noted), ["", "r1", "r1", "", "r3"]);
    }

    #[test]
    fn the_last_answer_of_a_run_has_its_duration_and_old_copies_are_replaced() {
        let mut copied = message("ai", "a1");
        copied["run_id"] = json!("forged");
        copied["additional_kwargs"]["turn_duration"] = json!(99);
        let mut messages = [
            human(Some("r1")),
            copied.clone(),
            message("tool", "t1"),
            message("ai", "a2"),
            message("tool", "t2"),
            copied,
            human(Some("r2")),
            message("ai", "a3"),
        ];
        let mut of = runs_of(&messages, &BTreeMap::new());
        of[5] = None;
        stamp(&mut messages, &of, |run| (run == "r1").then_some(7));
        let shown: Vec<_> = messages
            .iter()
            .map(|m| (m.get("run_id").cloned(), m["additional_kwargs"].get("turn_duration").cloned()))
            .collect();
        let r = |run: &str| Some(json!(run));
        assert_eq!(
            shown,
            [
                (None, None),
                (r("r1"), None),
                (r("r1"), None),
                (r("r1"), Some(json!(7))),
                (r("r1"), None),
                (None, None),
                (None, None),
                (r("r2"), None),
            ]
        );
    }
}

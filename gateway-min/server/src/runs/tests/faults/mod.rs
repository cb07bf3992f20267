//! Every write and every read of a run, a rollback, a resume, a compaction and a branch fails once: what remains is
//! what was acknowledged before, every checkpoint of the thread can be read, and the thread can continue.

mod branches;
mod deletions;
mod late;
mod lost;
mod records;
mod replaced;
mod rollbacks;
mod saver;
mod shown;
mod takeover;
mod waiting;

use std::sync::Arc;

use crate::app::Parts;
use axum::body::Body;
use axum::http::Request;
use serde_json::{Value as Json, json};
use threadkeep::deletion::{RetentionPolicy, plan_retention};
use threadkeep::id::ThreadId;
use threadkeep::saver::Saver;
use threadkeep::state::{StateAccessor, StateSnapshot, Update};
use threadkeep_agent::Interrupts;
use threadkeep_agent::model::scripted::gate;
use tower::ServiceExt as _;

use self::saver::{Fault, Faults, FaultySaver, lost};
use super::left::left_by;
use super::{Gateway, On, SAVERS, ask, everywhere, from, go_on, options};
use crate::runs::request::{Resume, RunInput, RunOptions, RunRequest, StreamMode};
use threadkeep_records::{
    CancelAction, CancelOutcome, LEASE_EXPIRED_ERROR, MultitaskStrategy, Records, RunEnd, RunRow, RunStatus,
};

fn script(gate: &str) -> Json {
    json!({"rules": [
        {"when": {"caller": "middleware:summarization"}, "answers": [{"text": "They talked."}]},
        {"when": {"caller": "middleware:goal", "contains": ["ai: done"]},
         "answers": [{"text": json!({"satisfied": true, "blocker": "none"}).to_string()}]},
        {"when": {"caller": "middleware:goal"},
         "answers": [{"text": json!({"satisfied": false, "blocker": "goal_not_met_yet"}).to_string()}]},
        {"when": {"contains": ["tools"]}, "answers": [
            {"text": "Both.", "tool_calls": [{"name": "ls", "id": "a"}, {"name": "ls", "id": "b"}]}, {"text": "done"},
        ]},
        {"when": {"contains": ["steps"]}, "answers": [{"text": "begun"}, {"text": "done"}]},
        {"when": {"contains": ["break"]}, "answers": [
            {"error": {"kind": "fatal", "message": "no such model"}, "gate": {"name": gate}},
        ]},
        {"when": {"contains": ["fail"]}, "answers": [{"error": {"kind": "fatal", "message": "no such model"}}]},
        {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": gate}}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

/// A gateway whose saver fails on demand, with one turn in its thread.
async fn faulty(on: On, gate: &str) -> (Gateway, Faults) {
    faulty_with(on, gate, None).await
}

/// The same with these records.
async fn faulty_with(on: On, gate: &str, records: Option<Records>) -> (Gateway, Faults) {
    let faults = Faults::default();
    let wrap = {
        let faults = faults.clone();
        move |inner| Arc::new(FaultySaver { inner, faults }) as Arc<dyn Saver>
    };
    let parts = Parts { wrap_saver: Box::new(wrap), records, ..Parts::default() };
    let gateway = Gateway::start_with(on, 3, &script(gate), parts).await;
    gateway.run(ask("first")).await;
    (gateway, faults)
}

/// The contents of the messages.
fn said(state: &StateSnapshot) -> Vec<String> {
    let messages = state.json("messages").unwrap().unwrap_or_default();
    messages.as_array().unwrap().iter().map(|m| m["content"].as_str().unwrap().to_owned()).collect()
}

/// Waits until the run is at this gate, and its question is the last message that is stored.
async fn at_gate(gateway: &Gateway, name: &str, question: &str) {
    gate(name).reached().await;
    while said(&gateway.head().await.unwrap()).last().map(String::as_str) != Some(question) {
        tokio::task::yield_now().await;
    }
}

/// Every checkpoint can be read from the store alone, and the next run finds the thread free and continues from its
/// head.
async fn goes_on(gateway: &Gateway) {
    let history = gateway.history().await;
    let values: Vec<_> = history.iter().map(|state| state.values().unwrap()).collect();
    assert!(!values.is_empty());
    assert_eq!(gateway.app.records.runs().active_for_thread("t").await.unwrap(), None);
    let mut expected = said(&history[0]);
    let (_, row) = gateway.run(ask("next")).await;
    assert_eq!(row.status, RunStatus::Success, "{:?}", row.error);
    expected.extend(["next".to_owned(), "You said: next".to_owned()]);
    assert_eq!(said(&gateway.head().await.unwrap()), expected);
}

async fn count(gateway: &Gateway) -> usize {
    gateway.history().await.len()
}

#[tokio::test]
async fn a_run_whose_writes_fail_ends_in_error_and_leaves_its_completed_steps() {
    let whole = ["first", "You said: first", "two tools", "Both.", "", "", "done"];
    for on in everywhere() {
        for fault in [Fault::Refused, Fault::InDoubt] {
            let mut outcomes = Vec::new();
            for k in 1.. {
                let (gateway, faults) = faulty(on, "none").await;
                faults.write(k, fault);
                let (frames, row) = gateway.run(ask("two tools")).await;
                let fired = !faults.disarm();
                let left = said(&gateway.head().await.unwrap());
                let tools =
                    left.iter().enumerate().map(|(at, text)| if (4..6).contains(&at) { "" } else { text });
                assert_eq!(tools.collect::<Vec<_>>(), whole[..left.len()], "{on:?} {fault:?} {k}");
                let told = frames.iter().any(|(name, _)| name == "error");
                assert_eq!(told, row.status == RunStatus::Error, "{:?}", row.error);
                assert_eq!(row.error.is_some_and(|error| error.contains("injected fault")), told);
                assert_eq!(!told, left.len() == whole.len(), "a run is a success if all of it is stored");
                outcomes.push(told);
                goes_on(&gateway).await;
                if !fired {
                    break;
                }
            }
            // Input, model, one tool's row, tools, model; then the duration note, which fails no run; then none.
            let expected = match fault {
                Fault::Refused => vec![true, true, true, true, true, false, false],
                // A commit in doubt is repeated, which resolves the doubt; a row in doubt is not.
                _ => vec![false, false, true, false, false, false, false],
            };
            assert_eq!(outcomes, expected, "{on:?} {fault:?}");
        }
    }
}

/// A run that summarizes, continues for its goal, and reaches it: if a write fails, the conversation ends where it was
/// committed, and the goal is either still active or reached.
#[tokio::test]
async fn a_summary_and_a_goal_whose_writes_fail_leave_what_was_committed() {
    for on in everywhere() {
        let mut ends = Vec::new();
        for k in 1.. {
            let (gateway, faults) = faulty(on, "none").await;
            let summarization = json!({"enabled": true, "trigger": {"type": "messages", "value": 5},
                "keep": {"type": "messages", "value": 2}});
            gateway.configure("summarization", &summarization);
            let set = async |goal: Json| {
                let accessor = gateway.app.threads.accessor();
                let writes = vec![accessor.write("goal", goal, false).unwrap()];
                let update = Update { at: None, node: "n".into(), writes, extra: serde_json::Map::new() };
                accessor.update(&ThreadId::from("t"), update).await.unwrap();
            };
            set(json!({"objective": "Get it done", "status": "active"})).await;
            faults.write(k, Fault::Refused);
            let (_, row) = gateway.run(ask("in steps")).await;
            let fired = !faults.disarm();
            let head = gateway.head().await.unwrap();
            let (left, goal) = (said(&head), head.json("goal").unwrap().unwrap_or_default());
            assert_eq!(row.status == RunStatus::Error, row.error.is_some());
            assert_eq!(goal.is_null(), row.status == RunStatus::Success, "{on:?} {k}: {goal}");
            let summary = head.json("summary_text").unwrap();
            assert_eq!(
                summary.is_some(),
                left.first().map(String::as_str) != Some("first"),
                "both or neither"
            );
            ends.push((row.status == RunStatus::Error, left.len()));
            gateway.configure("summarization", &json!({"enabled": false}));
            set(Json::Null).await;
            goes_on(&gateway).await;
            if !fired {
                break;
            }
        }
        // Input, answer, continuation, summary, answer, goal; then the duration note; then none.
        let expected =
            [(true, 2), (true, 3), (true, 4), (true, 5), (true, 3), (true, 4), (false, 4), (false, 4)];
        assert_eq!(ends, expected, "{on:?}");
    }
}

#[tokio::test]
async fn a_run_whose_reads_fail_writes_nothing_or_all_of_it() {
    for on in everywhere() {
        for k in 1.. {
            let (gateway, faults) = faulty(on, "none").await;
            let before = count(&gateway).await;
            faults.read(k);
            let (_, row) = gateway.run(ask("more")).await;
            let fired = !faults.disarm();
            let left = said(&gateway.head().await.unwrap()).len();
            if row.status == RunStatus::Error {
                assert_eq!((left, count(&gateway).await), (2, before), "{on:?} {k}: nothing was written");
            } else {
                assert_eq!(left, 4, "{on:?} {k}");
            }
            goes_on(&gateway).await;
            if !fired {
                assert!(k > 2, "the gate, the capture");
                break;
            }
        }
    }
}

fn edit(request: RunRequest) -> RunRequest {
    let metadata = json!({"replay_kind": "edit"});
    RunRequest { metadata: metadata.as_object().unwrap().clone(), ..request }
}

/// Scenario 72, second half.
#[tokio::test]
async fn a_failed_edit_that_cannot_be_undone_shows_no_state_that_is_not_true() {
    for on @ (_, mode) in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        let base = gateway.head().await.unwrap();
        gateway.run(ask("second")).await;
        let before = gateway.head().await.unwrap();
        // The writes of the run: in delta mode the resume, then the input and the fallback answer; the restore fails.
        faults.write(if mode == "delta" { 4 } else { 3 }, Fault::Refused);
        let (frames, row) = gateway.run(edit(from(&base, ask("fail")))).await;
        assert!(!faults.disarm(), "it failed there");
        let names: Vec<&str> = frames.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["metadata", "values", "values", "end"], "{on:?}");
        assert_eq!(row.status, RunStatus::Error);
        assert_eq!(gateway.head().await.unwrap().json("title").unwrap(), before.json("title").unwrap());
        let (frames, _) = gateway.run(edit(from(&base, ask("fail")))).await;
        assert_eq!(frames.len(), 5, "an edit that can be undone shows the restored state");
        goes_on(&gateway).await;
    }
}

/// Scenario 51, and a resume whose writes fail: nothing is written, and there is no fallback.
#[tokio::test]
async fn a_resume_that_cannot_be_carried_out_fails_closed() {
    for saver in SAVERS {
        let (gateway, faults) = faulty((saver, "delta"), "none").await;
        let selected = gateway.history().await.pop().unwrap();
        let middle = gateway.head().await.unwrap();
        gateway.run(ask("second")).await;
        let (head, written) = (gateway.head().await.unwrap(), count(&gateway).await);

        faults.damage(middle.key.id);
        let (frames, row) = gateway.run(from(&middle, ask("third"))).await;
        faults.disarm();
        let text = format!("Run {} could not materialize resume checkpoint {}", row.run_id, middle.key.id);
        assert_eq!((row.status, row.error.as_deref()), (RunStatus::Error, Some(text.as_str())));
        let error = json!({"name": "RuntimeError", "message": text});
        assert!(frames.contains(&("error".to_owned(), error)));
        assert_eq!((gateway.head().await.unwrap().key, count(&gateway).await), (head.key.clone(), written));

        faults.write(1, Fault::Refused);
        let (_, row) = gateway.run(from(&selected, ask("third"))).await;
        assert!(!faults.disarm());
        assert_eq!((row.status, count(&gateway).await), (RunStatus::Error, written));

        // The run's input fails after the resume: the selected state is the head, and can be read.
        faults.write(2, Fault::Refused);
        let (_, row) = gateway.run(from(&middle, ask("third"))).await;
        assert!(!faults.disarm());
        assert_eq!((row.status, count(&gateway).await), (RunStatus::Error, written + 1));
        assert_eq!(said(&gateway.head().await.unwrap()), said(&middle));
        goes_on(&gateway).await;
    }
}

/// A value for an older checkpoint whose row cannot be stored: the run fails, and the value can be sent again.
#[tokio::test]
async fn a_value_that_cannot_be_kept_fails_the_run() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        let stopping = RunOptions {
            interrupt_before: Interrupts::Nodes(vec!["tools".to_owned()]),
            ..options([StreamMode::Values])
        };
        gateway.run(RunRequest { options: stopping, ..ask("two tools") }).await;
        let parked = gateway.head().await.unwrap();
        let resume = || {
            let input = RunInput::Resume(Resume { messages: None, value: json!("yes") });
            RunRequest { input, ..go_on() }
        };
        faults.write(1, Fault::Refused);
        let (_, row) = gateway.run(resume()).await;
        assert_eq!((row.status, gateway.head().await.unwrap().next), (RunStatus::Error, parked.next.clone()));
        let (_, row) = gateway.run(resume()).await;
        assert_eq!(row.status, RunStatus::Success, "{on:?}");
        assert_eq!(said(&gateway.head().await.unwrap()).last().unwrap(), "done");
    }
}

async fn post(gateway: &Gateway, path: &str, body: Json) -> (u16, Json) {
    let request =
        Request::post(path).header("content-type", "application/json").body(Body::from(body.to_string()));
    send(gateway, request.unwrap()).await
}

async fn send(gateway: &Gateway, request: Request<Body>) -> (u16, Json) {
    let answer = crate::http::router(Arc::clone(&gateway.app)).oneshot(request).await.unwrap();
    let status = answer.status().as_u16();
    let bytes = axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
    (status, serde_json::from_slice(&bytes).unwrap())
}

#[tokio::test]
async fn a_compaction_whose_write_fails_changes_nothing() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        gateway.configure("summarization", &json!({"enabled": true}));
        gateway.run(ask("second")).await;
        let (before, written) = (gateway.head().await.unwrap(), count(&gateway).await);
        let body = json!({"keep": {"type": "messages", "value": 2}});
        faults.write(1, Fault::Refused);
        let (status, answer) = post(&gateway, "/api/threads/t/compact", body.clone()).await;
        assert!(!faults.disarm());
        assert_eq!((status, &answer["detail"]), (500, &json!("Failed to compact thread context.")), "{on:?}");
        assert_eq!((gateway.head().await.unwrap().key, count(&gateway).await), (before.key, written));
        faults.write(1, Fault::InDoubt);
        let (status, answer) = post(&gateway, "/api/threads/t/compact", body).await;
        assert!(!faults.disarm());
        assert_eq!((status, &answer["compacted"]), (200, &json!(true)), "{answer}");
        assert_eq!(count(&gateway).await, written + 1, "once");
        assert_eq!(said(&gateway.head().await.unwrap()), ["second", "You said: second"]);
        goes_on(&gateway).await;
    }
}

/// Scenario 85: the text depends on what could not be read.
#[tokio::test]
async fn a_turn_that_cannot_be_looked_at_is_not_prepared_and_nothing_is_written() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        gateway.run(ask("second")).await;
        let before = gateway.history().await;
        let messages = before[0].json("messages").unwrap().unwrap();
        let edit = json!({"human_message_id": messages[2]["id"], "replacement_text": "other"});
        for (route, body) in
            [("regenerate", json!({"message_id": messages[3]["id"]})), ("edit-regenerate", edit)]
        {
            let mut texts = Vec::new();
            for k in 1.. {
                faults.read(k);
                let path = format!("/api/threads/t/runs/{route}/prepare");
                let (status, answer) = post(&gateway, &path, body.clone()).await;
                if faults.disarm() {
                    assert_eq!(status, 200, "{answer}");
                    break;
                }
                assert_eq!(status, 500, "{on:?} {route} {k}");
                texts.push(answer["detail"].as_str().unwrap().to_owned());
            }
            texts.dedup();
            let both = ["Failed to read latest checkpoint", "Failed to inspect checkpoint history"];
            assert_eq!(texts, both, "{on:?} {route}");
            // But a lost history is said, whichever read finds it.
            let text = json!(lost().to_string());
            for k in 1.. {
                faults.lose(k);
                let path = format!("/api/threads/t/runs/{route}/prepare");
                let (status, answer) = post(&gateway, &path, body.clone()).await;
                if faults.disarm() {
                    break;
                }
                assert_eq!((status, &answer["detail"]), (409, &text), "{on:?} {route} {k}");
            }
            assert_eq!(gateway.history().await, before);
        }
    }
}

/// A process stands still when it first reads the head for a run. Another one takes the run for lost and acknowledges a
/// turn: the run does not go on from that.
#[tokio::test]
async fn a_run_that_was_lost_before_it_started_leaves_the_thread_to_who_took_it() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        let (records, there) = (gateway.app.records.clone(), gateway.app.threads.accessor().clone());
        faults.before_read(async move {
            let lost = records.runs().active_for_thread("t").await.unwrap().unwrap();
            let end = RunEnd::failed(LEASE_EXPIRED_ERROR);
            records.runs().finish(&lost.run_id, &end).await.unwrap();
            let message = json!([{"type": "human", "content": "acknowledged", "id": "x"}]);
            let writes = vec![there.write("messages", message, false).unwrap()];
            let update = Update { at: None, node: "n".into(), writes, extra: serde_json::Map::new() };
            there.update(&ThreadId::from("t"), update).await.unwrap();
        });
        let (_, row) = gateway.run(ask("late")).await;
        assert_eq!(row.error.as_deref(), Some(LEASE_EXPIRED_ERROR), "{on:?}");
        assert_eq!(
            said(&gateway.head().await.unwrap()),
            ["first", "You said: first", "acknowledged"],
            "{on:?}"
        );
        goes_on(&gateway).await;
    }
}

/// An operator's retention pass, which finds the note of a duration to remove.
async fn remove_note(there: &StateAccessor) {
    let (saver, thread) = (there.saver(), ThreadId::from("t"));
    let image = saver.read_thread(&thread).await.unwrap();
    let plan = plan_retention(&image, &RetentionPolicy::default(), there.table()).unwrap();
    assert_eq!(plan.removed().count(), 1, "the note of the duration");
    saver.rewrite_thread(&thread, &image.revision, plan.rewrite).await.unwrap();
}

/// What remains of the state in which a run ended is shown: a pass removes the note, but not what it was on.
#[tokio::test]
async fn what_a_run_left_is_found_after_its_last_checkpoint_was_removed() {
    for on in everywhere() {
        let (gateway, _) = faulty(on, "none").await;
        let (_, one) = gateway.run(ask("second")).await;
        let expected = json!(["first", "You said: first", "second", "You said: second"]);
        assert_eq!(json!(left_by(&gateway, &one).await), expected, "{on:?}");
        remove_note(gateway.app.threads.accessor()).await;
        assert_eq!(json!(left_by(&gateway, &one).await), expected, "{on:?}");
        gateway.run(ask("third")).await;
        assert_eq!(json!(left_by(&gateway, &one).await), expected, "{on:?}");
    }
}

/// An operator's retention pass removes the note at the head after a run has read it: the run goes on from what is left.
#[tokio::test]
async fn a_run_goes_on_from_the_head_that_a_retention_pass_leaves() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        let there = gateway.app.threads.accessor().clone();
        faults.before_write(async move {
            remove_note(&there).await;
        });
        let (frames, row) = gateway.run(ask("second")).await;
        assert_eq!((row.status, row.error), (RunStatus::Success, None), "{on:?}");
        let metadata = frames.iter().filter(|(name, _)| name == "metadata").count();
        assert_eq!(metadata, 1, "{on:?}: {frames:?}");
        let all = ["first", "You said: first", "second", "You said: second"];
        assert_eq!(said(&gateway.head().await.unwrap()), all, "{on:?}");
        goes_on(&gateway).await;
    }
}

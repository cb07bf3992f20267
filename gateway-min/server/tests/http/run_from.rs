//! Runs from an older checkpoint: what they restore, where they continue, and what a cancelled one leaves (service
//! reference, "Resume and rollback in delta mode").

use axum::http::Method;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{ALL, Gateway, MODES, Setup, id, question, texts};

/// Calls a tool on `tool`, waits at `gate` on `wait`; else answers.
fn setup(backend: &'static str, mode: &'static str, gate: &str) -> Setup {
    let script = json!({"rules": [
        {"when": {"contains": ["tool"]}, "answers": [
            {"text": "Looking.", "tool_calls": [{"name": "ls", "id": "call"}]}, {"text": "done"},
        ]},
        {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": gate}}]},
        {"when": {"contains": ["which"]}, "answers": [
            {"tool_calls": [{"name": "ask_clarification", "args": {"question": "Which?"}}]},
        ]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]});
    Setup { script, ..Setup::on(backend, mode) }
}

async fn started(setup: Setup) -> Gateway {
    let gateway = setup.start().await;
    gateway.create("t").await;
    gateway
}

/// The body of a run from this checkpoint.
fn from(state: &Value, mut body: Value) -> Value {
    body["checkpoint"] = json!({"checkpoint_ns": "", "checkpoint_id": id(state)});
    body
}

async fn run(gateway: &Gateway, body: Value) -> Value {
    gateway.post("/api/threads/t/runs/wait", body).await.ok()
}

async fn update(gateway: &Gateway, values: Value) {
    gateway.post("/api/threads/t/state", json!({ "values": values })).await.ok();
}

/// The state at the checkpoint of a history entry.
async fn at(gateway: &Gateway, checkpoint: &str) -> Value {
    gateway.get(&format!("/api/threads/t/state/{checkpoint}")).await.ok()
}

fn parent(entry: &Value) -> &str {
    entry["parent_checkpoint_id"].as_str().unwrap_or_default()
}

/// The entries that were added since there were `count`.
fn since(history: &[Value], count: usize) -> Vec<&Value> {
    history[..history.len() - count].iter().rev().collect()
}

/// Scenarios 46, 47, 54, 55, 59, 60: every channel of the selected checkpoint is restored, whatever its kind.
#[tokio::test]
async fn a_run_from_an_older_checkpoint_restores_all_of_it_and_resets_what_came_later() {
    for backend in ["memory", "sqlite"] {
        let mut finals = Vec::new();
        for (mode, frequency) in [("full", 3), ("delta", 1), ("delta", 2), ("delta", 10)] {
            let gateway = started(Setup { frequency, ..setup(backend, mode, "none") }).await;
            gateway.ask("t", "one").await;
            update(&gateway, json!({"todos": ["a"], "uploaded_files": ["f"], "artifacts": ["x", "y"]})).await;
            let selected = gateway.state("t").await;
            gateway.ask("t", "two").await;
            update(
                &gateway,
                json!({"todos": ["b"], "artifacts": ["z"], "viewed_images": {"i": "j"}, "summary_text": "later",
                       "background_tasks": ["later"], "title": "another", "uploaded_files": null}),
            )
            .await;
            let head = gateway.state("t").await;
            let before = gateway.history("t").await;

            let mut body = from(&selected, question("three"));
            body["input"]["title"] = json!("given");
            let values = run(&gateway, body).await;
            let gateway = if backend == "sqlite" { gateway.reopen(mode).await } else { gateway };
            let state = gateway.state("t").await;
            assert_eq!(
                texts(&state),
                ["one", "You said: one", "three", "You said: three"],
                "{mode} {frequency}"
            );
            assert_eq!(values["title"], "given", "the input comes on top");
            let history = gateway.history("t").await;
            let written = since(&history, before.len());
            if mode == "delta" {
                let restored = at(&gateway, id(written[0])).await;
                assert_eq!(parent(&restored), id(&head));
                let metadata = &restored["metadata"];
                let step = head["metadata"]["step"].as_i64().unwrap() + 1;
                assert_eq!((&metadata["source"], &metadata["step"]), (&json!("update"), &json!(step)));
                assert_eq!(metadata["svc_checkpoint_channel_mode"], "delta");
                assert_eq!(
                    (metadata["svc_agent_name"].clone(), &restored["next"]),
                    (json!("__default__"), &json!([]))
                );
                let mut expected = selected["values"].clone();
                // What only the head had: a reducer channel starts empty, any other is null.
                let reset = json!({"viewed_images": {}, "summary_text": null, "background_tasks": null});
                expected.as_object_mut().unwrap().extend(reset.as_object().unwrap().clone());
                assert_eq!(restored["values"], expected);
                for pair in written.windows(2) {
                    assert_eq!(parent(pair[1]), id(pair[0]), "one line");
                }
                assert!(
                    history.iter().filter(|entry| parent(entry) == id(&selected)).count() == 1,
                    "no fork"
                );
            } else {
                assert_eq!(parent(written[0]), id(&selected), "a fork");
                assert!(written.iter().all(|entry| parent(entry) != id(&head)));
            }
            let old = at(&gateway, id(&head)).await;
            assert_eq!(old["values"], head["values"], "the abandoned turn stays in history");
            let mut values = state["values"].clone();
            for message in values["messages"].as_array_mut().unwrap() {
                for own in ["id", "additional_kwargs", "run_id"] {
                    message.as_object_mut().unwrap().remove(own);
                }
            }
            // In full mode the channels of the abandoned turn never existed; in delta mode they are reset.
            values.as_object_mut().unwrap().retain(|_, value| !value.is_null() && *value != json!({}));
            finals.push(values);
        }
        assert!(finals.windows(2).all(|pair| pair[0] == pair[1]), "every mode agrees: {finals:#?}");
    }
}

/// Scenario 50.
#[tokio::test]
async fn a_run_from_the_head_or_from_nowhere_writes_no_more_than_its_own_steps() {
    for (backend, mode) in ALL {
        let gateway = started(setup(backend, mode, "none")).await;
        gateway.ask("t", "one").await;
        let mut steps = Vec::new();
        for select in [false, true] {
            let (head, before) = (gateway.state("t").await, gateway.history("t").await.len());
            let body = if select { from(&head, question("more")) } else { question("more") };
            run(&gateway, body).await;
            let history = gateway.history("t").await;
            let written = since(&history, before);
            assert_eq!(parent(written[0]), id(&head));
            steps.push(written.len());
        }
        assert_eq!(steps, [3, 3], "input, model, duration: {backend} {mode}");
    }
}

/// Scenario 52.
#[tokio::test]
async fn a_run_from_the_empty_first_checkpoint_starts_the_conversation_anew() {
    for (backend, mode) in ALL {
        let gateway = started(setup(backend, mode, "none")).await;
        let empty = gateway.state("t").await;
        gateway.ask("t", "one").await;
        update(&gateway, json!({"artifacts": ["x"], "goal": {"objective": "x"}, "summary_text": "s"})).await;
        run(&gateway, from(&empty, question("two"))).await;
        let state = gateway.state("t").await;
        assert_eq!(texts(&state), ["two", "You said: two"], "{backend} {mode}");
        assert_eq!(state["values"]["title"], "two", "the title was reset, too");
        for gone in ["artifacts", "goal", "summary_text"] {
            let value = state["values"].get(gone).cloned().unwrap_or_default();
            assert!(value.is_null() || value == json!([]), "{gone}: {value}");
        }
    }
}

/// A checkpoint with pending nodes, from which a run continues after the thread has moved on elsewhere.
#[tokio::test]
async fn a_run_goes_on_from_an_older_checkpoint_that_waits_at_a_breakpoint() {
    for (backend, mode) in ALL {
        for going_on in [json!({"input": null}), json!({"command": {"resume": "yes"}})] {
            let gateway = started(setup(backend, mode, "none")).await;
            let mut body = question("tool");
            body["interrupt_before"] = json!(["tools"]);
            run(&gateway, body).await;
            let parked = gateway.state("t").await;
            assert_eq!(parked["next"], json!(["tools"]));
            gateway.ask("t", "something else").await;
            assert_eq!(gateway.state("t").await["next"], json!([]));

            let answer = gateway.post("/api/threads/t/runs/wait", from(&parked, going_on.clone())).await.ok();
            assert_eq!(answer.get("error"), None, "{backend} {mode}: {answer}");
            let state = gateway.state("t").await;
            let kinds: Vec<&str> = state["values"]["messages"]
                .as_array()
                .unwrap()
                .iter()
                .map(|m| m["type"].as_str().unwrap())
                .collect();
            assert_eq!(kinds, ["human", "ai", "tool", "ai"], "{backend} {mode} {going_on}");
            assert_eq!((texts(&state)[3], &state["next"]), ("done", &json!([])));
        }
    }
}

#[tokio::test]
async fn a_value_answers_the_question_of_an_older_checkpoint() {
    for (backend, mode) in ALL {
        let gateway = started(setup(backend, mode, "none")).await;
        gateway.ask("t", "ask me which").await;
        let asked = gateway.state("t").await;
        gateway.ask("t", "something else").await;
        run(&gateway, from(&asked, json!({"command": {"resume": "that one"}}))).await;
        let state = gateway.state("t").await;
        assert_eq!(texts(&state)[3..], ["that one", "You said: that one"], "{backend} {mode}");
        assert_eq!(texts(&state).len(), 5);
    }
}

#[tokio::test]
async fn a_value_for_an_older_checkpoint_that_asks_nothing_is_refused_and_changes_nothing() {
    for mode in MODES {
        let gateway = started(setup("sqlite", mode, "none")).await;
        gateway.ask("t", "one").await;
        let settled = gateway.state("t").await;
        gateway.ask("t", "two").await;
        let rows = gateway.rows().await;
        let body = from(&settled, json!({"command": {"resume": "yes"}}));
        let text = "Thread t waits for no answer: send messages as input instead of command.resume";
        gateway.post("/api/threads/t/runs", body).await.refused(409, text);
        assert_eq!(gateway.rows().await, rows);
    }
}

/// "resume cancelled": the head from before the run, with the turn that the run had abandoned.
#[tokio::test]
async fn a_run_from_an_older_checkpoint_that_is_rolled_back_leaves_the_head_from_before_it() {
    for (backend, mode) in ALL {
        let name = format!("from-rollback-{backend}-{mode}");
        let gateway = started(setup(backend, mode, &name)).await;
        gateway.ask("t", "one").await;
        let selected = gateway.state("t").await;
        gateway.ask("t", "two").await;
        update(&gateway, json!({"artifacts": ["x"], "goal": {"objective": "x"}, "title": "kept"})).await;
        let head = gateway.state("t").await;
        for action in ["rollback", "interrupt"] {
            let record = gateway.post("/api/threads/t/runs", from(&selected, question("wait"))).await.ok();
            let run = record["run_id"].as_str().unwrap();
            gate(&name).reached().await;
            while texts(&gateway.state("t").await).last() != Some(&"wait") {
                tokio::task::yield_now().await;
            }
            let cancelled = gateway.state("t").await;
            let path = format!("/api/threads/t/runs/{run}/cancel?wait=true&action={action}");
            assert_eq!(gateway.call(Method::POST, &path, None).await.status, 204);
            let state = gateway.state("t").await;
            if action == "interrupt" {
                assert_eq!(texts(&state), ["one", "You said: one", "wait"], "what it committed stays");
                continue;
            }
            assert_eq!(gateway.run("t", run).await["error"], "Rolled back by user");
            let nothing = |value: &Value| value.is_null() || *value == json!([]) || *value == json!({});
            let mut values = state["values"].clone();
            values
                .as_object_mut()
                .unwrap()
                .retain(|key, value| head["values"].get(key).is_some() || !nothing(value));
            assert_eq!((&values, &state["next"]), (&head["values"], &json!([])), "{backend} {mode}");
            assert_eq!(parent(&state), if mode == "delta" { id(&cancelled) } else { id(&head) });
            assert!(id(&state) > id(&cancelled), "the newest");
            assert_eq!(gateway.history("t").await[0]["checkpoint_id"], state["checkpoint_id"]);
        }
    }
}

/// The pending nodes of the thread are part of the state before a run.
#[tokio::test]
async fn a_thread_that_waited_at_a_breakpoint_waits_there_again_after_a_rollback() {
    for (backend, mode) in ALL {
        let name = format!("from-parked-{backend}-{mode}");
        let gateway = started(setup(backend, mode, &name)).await;
        let mut body = question("tool");
        body["interrupt_before"] = json!(["tools"]);
        run(&gateway, body).await;
        let parked = gateway.state("t").await;
        let record = gateway.start_run("t", "wait").await;
        gate(&name).reached().await;
        let path = format!("/api/threads/t/runs/{record}/cancel?wait=true&action=rollback");
        assert_eq!(gateway.call(Method::POST, &path, None).await.status, 204);
        let state = gateway.state("t").await;
        assert_eq!(
            (&state["values"], &state["next"]),
            (&parked["values"], &json!(["tools"])),
            "{backend} {mode}"
        );
        run(&gateway, json!({"input": null})).await;
        let state = gateway.state("t").await;
        assert_eq!((texts(&state)[3], &state["next"]), ("done", &json!([])));
    }
}

/// The binding of a checkpoint goes with its state, whichever run writes it again.
#[tokio::test]
async fn what_is_restored_keeps_the_agent_that_it_belongs_to() {
    for mode in MODES {
        let name = format!("from-binding-{mode}");
        let gateway = started(setup("sqlite", mode, &name)).await;
        gateway.ask_as("t", "writer", "one").await;
        let selected = gateway.state("t").await;
        gateway.ask_as("t", "critic", "two").await;
        let (head, before) = (gateway.state("t").await, gateway.history("t").await.len());
        assert_eq!(head["metadata"]["svc_agent_name"], "critic");
        let record = gateway.post("/api/threads/t/runs", from(&selected, question("wait"))).await.ok();
        gate(&name).reached().await;
        let path = format!(
            "/api/threads/t/runs/{}/cancel?wait=true&action=rollback",
            record["run_id"].as_str().unwrap()
        );
        assert_eq!(gateway.call(Method::POST, &path, None).await.status, 204);
        let history = gateway.history("t").await;
        let agents: Vec<&str> = since(&history, before)
            .iter()
            .map(|entry| entry["metadata"]["svc_agent_name"].as_str().unwrap())
            .collect();
        // The restored state belongs to the writer, the run to the default agent, and what is rolled back to the
        // critic.
        let expected: &[&str] =
            if mode == "delta" { &["writer", "__default__", "critic"] } else { &["__default__", "critic"] };
        assert_eq!(agents, expected);
    }
}

/// Scenario 57.
#[tokio::test]
async fn an_answer_that_is_made_again_twenty_times_stands_once() {
    for mode in MODES {
        let gateway = started(Setup { frequency: 3, ..setup("memory", mode, "none") }).await;
        gateway.ask("t", "one").await;
        gateway.ask("t", "two").await;
        let mut answers = Vec::new();
        for round in 0..20 {
            let before = gateway.history("t").await.len();
            let state = gateway.state("t").await;
            let messages = state["values"]["messages"].as_array().unwrap();
            assert_eq!(messages.len(), 4, "{mode} {round}");
            answers.push(messages[3]["id"].as_str().unwrap().to_owned());
            let body = json!({"message_id": messages[3]["id"]});
            let prepared = gateway.post("/api/threads/t/runs/regenerate/prepare", body).await.ok();
            run(
                &gateway,
                json!({"input": prepared["input"], "checkpoint": prepared["checkpoint"],
                "metadata": prepared["metadata"]}),
            )
            .await;
            let written = gateway.history("t").await.len() - before;
            // A page holds a hundred entries.
            if before + written < 100 {
                assert_eq!(written, if mode == "delta" { 4 } else { 3 }, "the same work each time");
            }
        }
        answers.sort_unstable();
        answers.dedup();
        assert_eq!(answers.len(), 20, "each time another answer");
        assert_eq!(texts(&gateway.state("t").await), ["one", "You said: one", "two", "You said: two"]);
    }
}

/// Scenario 71.
#[tokio::test]
async fn turns_and_rollbacks_that_alternate_leave_the_turns() {
    for (backend, mode) in ALL {
        let gateway = started(setup(backend, mode, "none")).await;
        let mut expected = Vec::new();
        for round in 0..4 {
            let text = format!("turn {round}");
            gateway.ask("t", &text).await;
            expected.extend([text.clone(), format!("You said: {text}")]);
            let record = gateway.start_run("t", "wait").await;
            while texts(&gateway.state("t").await).last() != Some(&"wait") {
                tokio::task::yield_now().await;
            }
            let path = format!("/api/threads/t/runs/{record}/cancel?wait=true&action=rollback");
            assert_eq!(gateway.call(Method::POST, &path, None).await.status, 204);
            assert_eq!(texts(&gateway.state("t").await), expected, "{backend} {mode}");
        }
        if mode == "delta" {
            let history = gateway.history("t").await;
            for pair in history.windows(2) {
                assert_eq!(parent(&pair[0]), id(&pair[1]), "one line");
            }
        }
    }
}

/// Scenario 82: the turn before is the one that the state comes from, not the one that it was written on top of.
#[tokio::test]
async fn a_turn_that_was_restored_onto_another_line_keeps_its_own_beginning() {
    for (backend, mode) in ALL {
        let gateway = started(setup(backend, mode, "none")).await;
        let empty = gateway.state("t").await;
        gateway.ask("t", "one").await;
        let first = gateway.state("t").await;
        run(&gateway, from(&empty, question("other"))).await;
        run(&gateway, from(&first, question("two"))).await;
        let state = gateway.state("t").await;
        assert_eq!(texts(&state), ["one", "You said: one", "two", "You said: two"]);
        let answer = |at: usize| state["values"]["messages"][at]["id"].clone();
        for (at, before) in [(1, vec![]), (3, vec!["one", "You said: one"])] {
            let body = json!({"message_id": answer(at)});
            let branch = gateway.post("/api/threads/t/branches", body).await.ok();
            let branch = branch["thread_id"].as_str().unwrap();
            let history = gateway.history(branch).await;
            let oldest = id(history.last().unwrap());
            let base = gateway.get(&format!("/api/threads/{branch}/state/{oldest}")).await.ok();
            let said = base["values"]["messages"].as_array().map_or(0, Vec::len);
            assert_eq!(said, before.len(), "{backend} {mode}: {base}");
        }
    }
}

#[tokio::test]
async fn a_branch_of_a_turn_that_was_made_again_begins_where_that_turn_does() {
    for (backend, mode) in ALL {
        let gateway = started(setup(backend, mode, "none")).await;
        gateway.ask("t", "one").await;
        gateway.ask("t", "two").await;
        for _ in 0..2 {
            let state = gateway.state("t").await;
            let body = json!({"message_id": state["values"]["messages"][3]["id"]});
            let prepared = gateway.post("/api/threads/t/runs/regenerate/prepare", body).await.ok();
            let (input, checkpoint) = (&prepared["input"], &prepared["checkpoint"]);
            run(
                &gateway,
                json!({"input": input, "checkpoint": checkpoint, "metadata": prepared["metadata"]}),
            )
            .await;
        }
        let state = gateway.state("t").await;
        let body = json!({"message_id": state["values"]["messages"][3]["id"]});
        let branch = gateway.post("/api/threads/t/branches", body).await.ok();
        let branch = branch["thread_id"].as_str().unwrap();
        let history = gateway.history(branch).await;
        assert_eq!(history.len(), 2, "{backend} {mode}");
        let base = gateway.get(&format!("/api/threads/{branch}/state/{}", id(&history[1]))).await.ok();
        assert_eq!(texts(&base), ["one", "You said: one"]);
        assert_eq!(gateway.state(branch).await["values"]["messages"], state["values"]["messages"]);
    }
}

//! `command.resume`: the answer to a question, continuing from a breakpoint, and where nothing waits for a value.

use axum::http::Method;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{ALL, Gateway, MODES, Setup, question, texts};

/// Asks `Which one?`, waits at `gate` or answers.
fn script(gate: &str) -> Value {
    json!({"rules": [
        {"when": {"contains": ["paint"]}, "answers": [{"text": "I ask.", "tool_calls": [
            {"name": "ls"},
            {"name": "ask_clarification", "args": {"question": "Which one?", "options": ["red", "blue"]}},
        ]}]},
        {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": gate}}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

async fn asked(backend: &'static str, mode: &'static str) -> Gateway {
    let gateway = Setup { script: script("none"), ..Setup::on(backend, mode) }.start().await;
    gateway.create("t").await;
    gateway.ask("t", "paint").await;
    let state = gateway.state("t").await;
    assert_eq!(state["next"], json!([]));
    assert_eq!(state["values"]["messages"][3]["name"], "ask_clarification");
    gateway
}

fn resume(value: &Value) -> Value {
    json!({"command": {"resume": value}})
}

const NOTHING: &str = "Thread t waits for no answer: send messages as input instead of command.resume";
const NO_ANSWER: &str =
    "Thread t waits for the answer to a question: command.resume must be a string or an object with messages";

#[tokio::test]
async fn a_run_that_must_not_ask_has_no_tool_for_it() {
    let ask = json!({"name": "ask_clarification", "args": {"question": "Which one?"}});
    let script =
        json!({"rules": [{"answers": [{"tool_calls": [ask]}, {"text": "I guess: {{tool_result}}"}]}]});
    for mode in MODES {
        let gateway = Setup { script: script.clone(), ..Setup::on("memory", mode) }.start().await;
        gateway.create("t").await;
        let mut body = question("paint");
        body["context"] = json!({"disable_clarification": true});
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        let state = gateway.state("t").await;
        let said = texts(&state);
        assert_eq!(said.len(), 4, "{said:?}");
        assert!(said[3].starts_with("I guess: Error: there is no tool `ask_clarification`"), "{said:?}");
    }
}

#[tokio::test]
async fn the_value_answers_the_question_of_the_last_run() {
    for (backend, mode) in ALL {
        for value in [json!("blue"), json!({"messages": [{"role": "user", "content": "blue"}]})] {
            let gateway = asked(backend, mode).await;
            let before = gateway.state("t").await;
            let record = gateway.post("/api/threads/t/runs", resume(&value)).await.ok();
            let run = record["run_id"].as_str().unwrap();
            gateway.join("t", run).await;
            assert_eq!(gateway.run("t", run).await["status"], "success");

            let state = gateway.state("t").await;
            assert_eq!(texts(&state)[..4], texts(&before)[..]);
            assert_eq!(texts(&state)[4..], ["blue", "You said: blue"], "{backend} {mode} {value}");
            let answer = &state["values"]["messages"][4];
            assert_eq!(
                (&answer["type"], &answer["additional_kwargs"]["run_id"]),
                (&json!("human"), &json!(run))
            );
            let events = gateway.get(&format!("/api/threads/t/runs/{run}/events")).await.ok();
            assert_eq!(events[1]["event_type"], "llm.human.input");
            assert_eq!(
                (&events[1]["content"]["content"], &events[1]["content"]["id"]),
                (&json!("blue"), &answer["id"])
            );
            // It is answered by now.
            gateway.post("/api/threads/t/runs/wait", resume(&value)).await.refused(409, NOTHING);
        }
    }
}

#[tokio::test]
async fn what_is_no_answer_to_a_question_is_refused_and_changes_nothing() {
    let gateway = asked("sqlite", "delta").await;
    let (rows, state) = (gateway.rows().await, gateway.state("t").await);
    for value in [
        json!(true),
        json!(3),
        json!(["blue"]),
        json!({"choice": "blue"}),
        json!({"messages": []}),
        json!({"messages": ["blue"], "title": "T"}),
    ] {
        gateway.post("/api/threads/t/runs", resume(&value)).await.refused(400, NO_ANSWER);
    }
    let malformed = gateway.post("/api/threads/t/runs", resume(&json!({"messages": [3]}))).await;
    assert_eq!(malformed.status, 400);
    assert_eq!((gateway.rows().await, gateway.state("t").await), (rows, state));
}

#[tokio::test]
async fn where_nothing_waits_a_value_is_refused_by_every_route_and_changes_nothing() {
    for mode in MODES {
        let gateway = Setup { script: script("none"), ..Setup::on("sqlite", mode) }.start().await;
        let routes = [
            "/api/threads/t/runs",
            "/api/threads/t/runs/stream",
            "/api/threads/t/runs/wait",
            "/api/runs",
            "/api/runs/stream",
            "/api/runs/wait",
        ];
        gateway.create("t").await;
        for turns in 0..2 {
            let rows = gateway.rows().await;
            for path in routes {
                let mut body = resume(&json!("blue"));
                if path.starts_with("/api/runs") {
                    body["config"] = json!({"configurable": {"thread_id": "t"}});
                }
                gateway.post(path, body).await.refused(409, NOTHING);
            }
            let unknown = gateway.post("/api/runs", resume(&json!("blue"))).await;
            assert_eq!(
                unknown.status, 409,
                "a thread that does not exist waits for nothing, and is not made"
            );
            assert_eq!(gateway.rows().await, rows, "{mode}, after {turns} turns");
            gateway.ask("t", "hello").await;
        }
        // No value, so nothing to refuse.
        let values = gateway.post("/api/threads/t/runs/wait", resume(&Value::Null)).await.ok();
        assert_eq!(values["messages"].as_array().unwrap().len(), 4);
    }
}

#[tokio::test]
async fn a_run_that_was_cancelled_or_stopped_at_a_breakpoint_is_resumed_with_any_value() {
    for mode in MODES {
        let name = format!("resume-{mode}");
        let gateway = Setup { mode, script: script(&name), ..Setup::default() }.start().await;
        gateway.create("t").await;
        let mut body = question("hello");
        body["interrupt_before"] = json!("*");
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        assert_eq!(gateway.state("t").await["next"], json!(["model"]));
        gateway.post("/api/threads/t/runs/wait", resume(&json!({"approved": true}))).await.ok();
        assert_eq!(texts(&gateway.state("t").await), ["hello", "You said: hello"]);

        let run = gateway.start_run("t", "wait").await;
        gate(&name).reached().await;
        gateway.call(Method::POST, &format!("/api/threads/t/runs/{run}/cancel?wait=true"), None).await;
        gate(&name).open();
        gateway.post("/api/threads/t/runs/wait", resume(&json!("go on"))).await.ok();
        let state = gateway.state("t").await;
        assert_eq!(texts(&state), ["hello", "You said: hello", "wait", "late"], "{mode}");
    }
}

/// When the run is created, it is not known what it will find.
#[tokio::test]
async fn a_run_that_takes_over_and_finds_nothing_that_waits_fails() {
    for mode in MODES {
        let name = format!("takes-over-{mode}");
        let gateway = Setup { mode, script: script(&name), ..Setup::default() }.start().await;
        gateway.create("t").await;
        gateway.ask("t", "hello").await;
        gateway.start_run("t", "wait").await;
        gate(&name).reached().await;
        let mut body = resume(&json!("blue"));
        body["multitask_strategy"] = json!("rollback");
        let answer = gateway.post("/api/threads/t/runs/wait", body).await.ok();
        assert_eq!((&answer["status"], &answer["error"]), (&json!("error"), &json!(NOTHING)), "{mode}");
        assert_eq!(texts(&gateway.state("t").await), ["hello", "You said: hello"]);
    }
}

#[tokio::test]
async fn the_gate_comes_before_the_question_who_waits() {
    let gateway = asked("sqlite", "delta").await.reopen("full").await;
    let answer = gateway.post("/api/threads/t/runs/wait", resume(&json!("blue"))).await.ok();
    let text = "Thread requires delta mode; materialize and convert its checkpoints before using full mode.";
    assert_eq!((&answer["status"], &answer["error"]), (&json!("error"), &json!(text)));
}

//! Conversations that grow too long during a run.

use std::sync::{Arc, Mutex};

use axum::http::{Method, header};
use axum::routing::post;
use axum::{Json, Router};
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{ALL, Gateway, MODES, Setup, texts};

const SUMMARIZER: &str = "middleware:summarization";

/// Calls a tool twice on `tool`; else answers. `summary` is the summarizing model's script.
fn setup(backend: &'static str, mode: &'static str, summary: Value, summarization: Value) -> Setup {
    let call = |id: &str, and: &str| json!({"text": "Looking.", "tool_calls": [{"name": "ls", "id": id}, {"name": "ls", "id": and}]});
    let script = json!({"rules": [
        {"when": {"caller": SUMMARIZER}, "answers": [summary]},
        {"when": {"contains": ["tool"]}, "answers": [
            call("a", "b"), call("c", "d"), {"text": "done", "usage": {"input_tokens": 3, "output_tokens": 2}},
        ]},
        {"answers": [{"text": "You said: {{input}}", "usage": {"input_tokens": 3, "output_tokens": 2}}]},
    ]});
    Setup { script, sections: json!({ "summarization": summarization }), ..Setup::on(backend, mode) }
}

fn talked() -> Value {
    json!({"text": "They talked.", "usage": {"input_tokens": 50, "output_tokens": 5}})
}

fn section(trigger: u64, keep: u64) -> Value {
    json!({"enabled": true, "trigger": {"type": "messages", "value": trigger},
           "keep": {"type": "messages", "value": keep}})
}

fn kinds(state: &Value) -> Vec<&str> {
    let messages = state["values"]["messages"].as_array().unwrap();
    messages.iter().map(|message| message["type"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_conversation_that_grows_too_long_gets_a_summary_and_keeps_everything_else() {
    for (backend, mode) in ALL {
        for frequency in [1, 2, 10] {
            let setup = Setup { frequency, ..setup(backend, mode, talked(), section(5, 2)) };
            let gateway = setup.start().await;
            gateway.create("t").await;
            gateway.ask("t", "one").await;
            let kept = json!({"uploaded_files": [{"name": "f"}], "artifacts": ["x"], "todos": ["y"], "title": "named"});
            gateway.post("/api/threads/t/state", json!({ "values": kept })).await.ok();
            let body = json!({"objective": "later"});
            gateway.call(Method::PUT, "/api/threads/t/goal", Some(body)).await.ok();
            let goal = gateway.get("/api/threads/t/goal").await.ok();
            gateway.ask("t", "two").await;
            assert_eq!(texts(&gateway.state("t").await).len(), 4, "not long yet");
            let before = gateway.history("t").await.len();

            let run = gateway.ask("t", "three").await;
            let gateway = if backend == "sqlite" { gateway.reopen(mode).await } else { gateway };
            let state = gateway.state("t").await;
            assert_eq!(
                texts(&state),
                ["You said: two", "three", "You said: three"],
                "{backend} {mode} {frequency}"
            );
            assert_eq!(state["values"]["summary_text"], "They talked.");
            for (channel, value) in kept.as_object().unwrap() {
                assert_eq!(&state["values"][channel], value, "{channel}");
            }
            assert_eq!(state["values"]["goal"]["objective"], goal["goal"]["objective"]);
            let record = gateway.run("t", &run).await;
            assert_eq!(record["status"], "success");
            assert!(record["middleware_tokens"].as_i64().unwrap() >= 55, "the summary is paid for: {record}");
            let history = gateway.history("t").await;
            let count = history.len() - before;
            assert!(
                history[..count]
                    .windows(2)
                    .all(|pair| pair[0]["parent_checkpoint_id"] == pair[1]["checkpoint_id"])
            );

            gateway.ask("t", "four").await;
            let state = gateway.state("t").await;
            assert_eq!(texts(&state).last(), Some(&"You said: four"));
            let old =
                history[history.len() - 3..].iter().map(|entry| entry["checkpoint_id"].as_str().unwrap());
            for checkpoint in old {
                gateway.get(&format!("/api/threads/t/state/{checkpoint}")).await.ok();
            }
        }
    }
}

/// In the middle of a turn with parallel calls, wherever the cut would fall.
#[tokio::test]
async fn no_tool_result_is_parted_from_its_call_and_the_question_stays() {
    for mode in MODES {
        for (trigger, keep) in [(3, 1), (4, 2), (4, 3), (6, 1), (7, 4)] {
            let call = |n: usize| {
                let calls = [2 * n, 2 * n + 1].map(|id| {
                    let index = id % 2;
                    json!({"index": index, "id": format!("c{id}"), "type": "function",
                           "function": {"name": "ls", "arguments": json!({"path": "."}).to_string()}})
                });
                json!({"role": "assistant", "content": "Looking.", "tool_calls": calls})
            };
            let done = json!({"role": "assistant", "content": "done"});
            let server = server(vec![call(0), call(1), call(2), call(3), done]).await;
            let gateway = server.gateway(mode, section(trigger, keep)).await;
            let run = gateway.ask("t", "use a tool").await;
            let record = gateway.run("t", &run).await;
            assert_eq!(
                (&record["status"], &record["error"]),
                (&json!("success"), &Value::Null),
                "{trigger} {keep}"
            );
            for asked in server.asked.lock().unwrap().iter() {
                let mut open: Vec<&Value> = Vec::new();
                for message in asked["messages"].as_array().unwrap() {
                    if message["role"] == "tool" {
                        let called = open.iter().position(|id| **id == message["tool_call_id"]);
                        open.remove(
                            called.unwrap_or_else(|| panic!("{trigger} {keep}: a result without its call")),
                        );
                    } else {
                        assert!(open.is_empty(), "{trigger} {keep}: a call without its result");
                    }
                    open.extend(
                        message["tool_calls"].as_array().into_iter().flatten().map(|call| &call["id"]),
                    );
                }
                assert!(
                    asked["messages"]
                        .as_array()
                        .unwrap()
                        .iter()
                        .any(|message| message["content"] == "use a tool")
                );
            }
            let state = gateway.state("t").await;
            assert_eq!(kinds(&state)[0], "human");
            assert_eq!(texts(&state).last(), Some(&"done"));
            assert_eq!(state["values"]["summary_text"], "They talked.", "{trigger} {keep}");
        }
    }
}

#[tokio::test]
async fn without_a_summary_the_conversation_stays_long_and_the_run_goes_on() {
    for mode in MODES {
        let failing = json!({"error": {"kind": "fatal", "message": "no summary"}});
        let gateway = setup("sqlite", mode, failing, section(2, 1)).start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        let run = gateway.ask("t", "use a tool").await;
        let record = gateway.run("t", &run).await;
        assert_eq!(
            (&record["status"], &record["llm_call_count"]),
            (&json!("success"), &json!(4)),
            "asked once a run"
        );
        let state = gateway.state("t").await;
        assert_eq!(kinds(&state), ["human", "ai", "human", "ai", "tool", "tool", "ai", "tool", "tool", "ai"]);
        assert_eq!(state["values"].get("summary_text"), None);
        let events =
            gateway.get(&format!("/api/threads/t/runs/{run}/events?event_types=llm.error")).await.ok();
        assert_eq!(events[0]["metadata"]["caller"], SUMMARIZER);
    }
}

#[tokio::test]
async fn a_run_that_is_cancelled_while_it_is_summarized_loses_nothing() {
    for mode in MODES {
        let name = format!("summary-{mode}");
        let mut waiting = talked();
        waiting["gate"] = json!({ "name": name });
        let gateway = setup("sqlite", mode, waiting, section(3, 1)).start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        let run = gateway.start_run("t", "two").await;
        gate(&name).reached().await;
        let path = format!("/api/threads/t/runs/{run}/cancel?wait=true");
        assert_eq!(gateway.call(Method::POST, &path, None).await.status, 204);
        assert_eq!(gateway.run("t", &run).await["status"], "interrupted");
        let state = gateway.state("t").await;
        assert_eq!((texts(&state), &state["next"]), (vec!["one", "You said: one", "two"], &json!(["model"])));
        gate(&name).open();
        gateway.post("/api/threads/t/runs/wait", json!({"input": null})).await.ok();
        let state = gateway.state("t").await;
        assert_eq!(
            (texts(&state), &state["values"]["summary_text"]),
            (vec!["two", "You said: two"], &json!("They talked."))
        );
    }
}

#[tokio::test]
async fn a_conversation_grows_as_long_as_nobody_says_when_it_is_too_long() {
    for summarization in [
        json!({"enabled": false, "trigger": {"type": "messages", "value": 2}, "keep": {"type": "messages", "value": 1}}),
        json!({"enabled": true, "keep": {"type": "messages", "value": 1}}),
        json!({"enabled": true, "trigger": {"type": "fraction", "value": 0.01}, "keep": {"type": "messages", "value": 1}}),
    ] {
        let gateway = setup("memory", "delta", talked(), summarization).start().await;
        gateway.create("t").await;
        for text in ["one", "two", "three"] {
            gateway.ask("t", text).await;
        }
        assert_eq!(texts(&gateway.state("t").await).len(), 6);
    }
}

/// A server of the OpenAI protocol that records the requests and gives these answers one after another.
struct Server {
    base: String,
    asked: Arc<Mutex<Vec<Value>>>,
}

async fn server(answers: Vec<Value>) -> Server {
    let asked: Arc<Mutex<Vec<Value>>> = Arc::default();
    let kept = Arc::clone(&asked);
    let answer = move |Json(body): Json<Value>| {
        let mut asked = kept.lock().unwrap();
        let chunk = |delta: &Value, finish: Value| {
            let choice = json!([{"index": 0, "delta": delta, "finish_reason": finish}]);
            format!("data: {}\n\n", json!({"id": "c", "object": "chat.completion.chunk", "choices": choice}))
        };
        let delta = &answers[asked.len()];
        asked.push(body);
        let reason = if delta.get("tool_calls").is_some() { "tool_calls" } else { "stop" };
        let frames = chunk(delta, Value::Null) + &chunk(&json!({}), json!(reason)) + "data: [DONE]\n\n";
        std::future::ready(([(header::CONTENT_TYPE, "text/event-stream")], frames))
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}/v1", listener.local_addr().unwrap());
    let router = Router::new().route("/v1/chat/completions", post(answer));
    tokio::spawn(async move { axum::serve(listener, router).await });
    Server { base, asked }
}

impl Server {
    /// A gateway whose agent calls this server, and whose summaries come from the script; with a thread `t`.
    async fn gateway(&self, mode: &'static str, mut summarization: Value) -> Gateway {
        let models = json!([
            {"name": "big", "use": "langchain_openai:ChatOpenAI", "model": "big", "api_key": "none", "base_url": self.base},
            {"name": "small", "use": "scripted", "model": "small", "script": "script.json"},
        ]);
        summarization["model_name"] = json!("small");
        let mut setup = setup("memory", mode, talked(), json!({}));
        setup.sections = json!({"models": models, "summarization": summarization});
        let gateway = setup.start().await;
        gateway.create("t").await;
        gateway
    }
}

#[tokio::test]
async fn the_model_is_told_the_summary_before_what_stays_and_not_as_a_system_message() {
    let answer = json!({"role": "assistant", "content": "answer"});
    let server = server(vec![answer.clone(), answer]).await;
    let gateway = server.gateway("delta", section(3, 1)).await;
    gateway.ask("t", "one").await;
    gateway.ask("t", "two").await;
    let asked = server.asked.lock().unwrap();
    let told: Vec<(&str, &str)> = asked[1]["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|message| (message["role"].as_str().unwrap(), message["content"].as_str().unwrap()))
        .collect();
    assert_eq!(told[0].0, "system");
    assert!(!told[0].1.contains("They talked."));
    assert_eq!(told[1..], [("user", "Summary of the conversation so far:\nThey talked."), ("user", "two")]);
    assert_eq!(asked.len(), 2, "the summary was another model's");
}

//! The commands of the thread protocol.

use axum::http::Request;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::protocol::asking;
use crate::support::{Answer, Gateway, MODES, Setup, id, texts};

/// Sends a command; its id is 7.
pub(crate) async fn command(gateway: &Gateway, thread: &str, method: &str, params: Value) -> Answer {
    let body = json!({"id": 7, "method": method, "params": params});
    gateway.post(&format!("/api/threads/{thread}/commands"), body).await
}

/// The parameters of `run.start` that ask `text`.
pub(crate) fn ask(text: &str) -> Value {
    json!({"assistant_id": "lead_agent", "input": {"messages": [{"type": "human", "content": text}]}})
}

/// The result of a command.
#[track_caller]
pub(crate) fn done(answer: Answer) -> Value {
    let body = answer.ok();
    assert_eq!((&body["type"], &body["id"]), (&json!("success"), &json!(7)), "{body}");
    body["result"].clone()
}

/// Checks that a command was refused with this status and code.
#[track_caller]
fn refused(answer: &Answer, status: u16, code: &str) {
    let body = &answer.body;
    assert_eq!((answer.status, body["error"].as_str()), (status, Some(code)), "{body}");
    assert_eq!((&body["type"], &body["id"]), (&json!("error"), &json!(7)), "{body}");
    assert!(!body["message"].as_str().unwrap().is_empty());
    assert!(!body["detail"].is_null());
}

/// Starts a run and waits for its last write.
async fn ran(gateway: &Gateway, params: Value) -> String {
    let result = done(command(gateway, "t", "run.start", params).await);
    let run = result["run_id"].as_str().unwrap().to_owned();
    gateway.join("t", &run).await;
    run
}

#[tokio::test]
async fn a_run_is_started_on_a_new_thread_and_then_on_an_old_one() {
    for mode in MODES {
        let gateway = Setup::on("sqlite", mode).start().await;
        let first = ran(&gateway, ask("one")).await;
        let mut params = ask("two");
        params["metadata"] = json!({"source": "page"});
        params["config"] = json!({"configurable": {"thread_id": "t"}, "tags": ["a"]});
        params["langsmith_tracer"] = Value::Null;
        let second = ran(&gateway, params).await;
        assert_ne!(first, second);
        assert_eq!(texts(&gateway.state("t").await), ["one", "You said: one", "two", "You said: two"]);
        let record = gateway.run("t", &second).await;
        assert_eq!((&record["status"], &record["metadata"]), (&json!("success"), &json!({"source": "page"})));
        assert_eq!(record["assistant_id"], "lead_agent");
        // No input: the run continues, and finds nothing to do.
        ran(&gateway, json!({"assistant_id": "lead_agent", "input": null})).await;
        assert_eq!(texts(&gateway.state("t").await).len(), 4);
    }
}

#[tokio::test]
async fn input_for_a_thread_at_work_waits_unless_its_client_wants_otherwise() {
    let name = "protocol-busy";
    let script = json!({"rules": [
        {"when": {"contains": ["wait"]}, "answers": [{"text": "Done.", "gate": {"name": name}}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]});
    let gateway = Setup { script, ..Setup::default() }.start().await;
    done(command(&gateway, "t", "run.start", ask("wait")).await);
    gate(name).reached().await;
    let mut rejecting = ask("no");
    rejecting["multitaskStrategy"] = json!("reject");
    refused(&command(&gateway, "t", "run.start", rejecting).await, 409, "unknown_error");
    let waiting = done(command(&gateway, "t", "run.start", ask("two")).await);
    gate(name).open();
    gateway.join("t", waiting["run_id"].as_str().unwrap()).await;
    assert_eq!(texts(&gateway.state("t").await), ["wait", "Done.", "two", "You said: two"]);
}

#[tokio::test]
async fn a_run_starts_from_a_checkpoint_that_is_named_in_its_configuration_or_by_a_fork() {
    for mode in MODES {
        let gateway = Setup::on("memory", mode).start().await;
        ran(&gateway, ask("one")).await;
        let base = id(&gateway.state("t").await).to_owned();
        ran(&gateway, ask("two")).await;
        let mut params = ask("another");
        params["config"] = json!({"configurable": {"checkpoint_id": base, "thread_id": "t"}});
        ran(&gateway, params).await;
        let expected = ["one", "You said: one", "another", "You said: another"];
        assert_eq!(texts(&gateway.state("t").await), expected);
        let params = json!({"checkpoint_id": base, "input": ask("third")["input"]});
        let result = done(command(&gateway, "t", "state.fork", params).await);
        assert_eq!(result["thread_id"], "t");
        gateway.join("t", result["run_id"].as_str().unwrap()).await;
        assert_eq!(texts(&gateway.state("t").await)[2..], ["third", "You said: third"]);
        for id in ["nothing", "01890000-0000-7000-8000-000000000000"] {
            let absent = command(&gateway, "t", "state.fork", json!({"checkpoint_id": id})).await;
            refused(&absent, 404, "no_such_checkpoint");
        }
    }
}

#[tokio::test]
async fn only_a_question_that_is_asked_can_be_answered() {
    for mode in MODES {
        let gateway = asking(mode).await;
        let answer =
            |id: &str, response: Value| json!({"namespace": [], "interrupt_id": id, "response": response});
        refused(
            &command(&gateway, "t", "input.respond", answer("q", json!("blue"))).await,
            404,
            "invalid_argument",
        );
        ran(&gateway, ask("paint")).await;
        let state = gateway.state("t").await;
        let question = state["values"]["messages"].as_array().unwrap().last().unwrap()["id"].clone();
        let question = question.as_str().unwrap();
        let unknown = command(&gateway, "t", "input.respond", answer("q", json!("blue"))).await;
        refused(&unknown, 404, "no_such_interrupt");
        let mut elsewhere = answer(question, json!("blue"));
        elsewhere["namespace"] = json!(["tools:1"]);
        refused(&command(&gateway, "t", "input.respond", elsewhere).await, 404, "no_such_interrupt");
        let odd = command(&gateway, "t", "input.respond", answer(question, json!({"approved": true}))).await;
        refused(&odd, 400, "invalid_argument");
        let mut several =
            json!({"responses": [answer(question, json!("blue"))], "metadata": {"source": "page"}});
        several["update"] = json!({"title": "Paint"});
        let result = done(command(&gateway, "t", "input.respond", several).await);
        let run = result["run_id"].as_str().unwrap();
        gateway.join("t", run).await;
        let state = gateway.state("t").await;
        assert_eq!(texts(&state).last(), Some(&"You said: blue"));
        assert_eq!(state["values"]["title"], "Paint");
        assert_eq!(gateway.run("t", run).await["metadata"], json!({"source": "page"}));
        let again = command(&gateway, "t", "input.respond", answer(question, json!("red"))).await;
        refused(&again, 404, "no_such_interrupt");
    }
}

#[tokio::test]
async fn an_answer_that_is_sent_again_with_its_key_is_the_same_run() {
    for mode in MODES {
        let gateway = asking(mode).await;
        ran(&gateway, ask("paint")).await;
        let state = gateway.state("t").await;
        let question = &state["values"]["messages"].as_array().unwrap().last().unwrap()["id"];
        let params = json!({"namespace": [], "interrupt_id": question, "response": "blue"});
        let body = json!({"id": 7, "method": "input.respond", "params": params}).to_string();
        let send = async |key: &str| {
            let request = Request::post("/api/threads/t/commands")
                .header("content-type", "application/json")
                .header("Idempotency-Key", key);
            gateway.send(request.body(body.clone().into()).unwrap()).await
        };
        let first = done(send("k").await);
        gateway.join("t", first["run_id"].as_str().unwrap()).await;
        assert_eq!(done(send("k").await), first, "{mode}");
        refused(&send("another").await, 404, "no_such_interrupt");
        assert_eq!(texts(&gateway.state("t").await).last(), Some(&"You said: blue"));
        assert_eq!(gateway.get("/api/threads/t/runs").await.ok().as_array().unwrap().len(), 2);
    }
}

#[tokio::test]
async fn a_thread_is_read_by_its_channels_its_checkpoints_and_its_agent() {
    for mode in MODES {
        let gateway = Setup::on("memory", mode).start().await;
        let run = ran(&gateway, ask("one")).await;
        let head = gateway.state("t").await;
        let state = done(command(&gateway, "t", "state.get", json!({"namespace": []})).await);
        assert_eq!((&state["values"], &state["checkpoint"]["id"]), (&head["values"], &head["checkpoint_id"]));
        let params = json!({"namespace": [], "keys": ["title"]});
        let state = done(command(&gateway, "t", "state.get", params).await);
        assert!(state["values"].get("messages").is_none());
        let params = json!({"namespace": [], "keys": ["nothing"]});
        refused(&command(&gateway, "t", "state.get", params).await, 422, "invalid_argument");
        let params = json!({"namespace": ["tools:1"]});
        refused(&command(&gateway, "t", "state.get", params).await, 404, "no_such_namespace");

        let listed = done(command(&gateway, "t", "state.listCheckpoints", json!({})).await);
        let ids = |listed: &Value| -> Vec<String> {
            let list = listed["checkpoints"].as_array().unwrap();
            list.iter().map(|checkpoint| checkpoint["id"].as_str().unwrap().to_owned()).collect()
        };
        let all: Vec<String> = gateway.history("t").await.iter().map(|entry| id(entry).to_owned()).collect();
        assert_eq!(ids(&listed), all);
        let params = json!({"limit": 1, "before": all[0]});
        let page = done(command(&gateway, "t", "state.listCheckpoints", params).await);
        assert_eq!(ids(&page), all[1..2]);
        assert!(page["checkpoints"][0]["step"].is_i64());

        for params in [json!({}), json!({"run_id": run})] {
            let tree = done(command(&gateway, "t", "agent.getTree", params).await)["tree"].clone();
            assert_eq!((&tree["status"], &tree["namespace"]), (&json!("completed"), &json!([])));
        }
        let params = json!({"run_id": "nothing"});
        refused(&command(&gateway, "t", "agent.getTree", params).await, 404, "no_such_run");
    }
}

#[tokio::test]
async fn what_is_not_done_is_refused_by_name() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    let subscription = json!({"subscription_id": "s"});
    let message = json!({"namespace": [], "message": {"role": "user", "content": "hi"}});
    for (method, params) in [
        ("subscription.subscribe", json!({"channels": ["values"]})),
        ("subscription.unsubscribe", subscription),
        ("subscription.reconnect", json!({"run_id": "r"})),
        ("input.inject", message),
    ] {
        refused(&command(&gateway, "t", method, params).await, 501, "not_supported");
    }
    refused(&command(&gateway, "t", "run.stop", json!({})).await, 422, "unknown_command");
    for (method, params) in [
        ("run.start", json!({"assistant_id": "other"})),
        ("run.start", json!({"assistant_id": "lead_agent", "stream_mode": "values"})),
        ("run.start", json!({"assistant_id": "lead_agent", "langsmith_tracer": {"project_name": "p"}})),
        ("run.start", json!({"assistant_id": "lead_agent", "multitaskStrategy": "later"})),
        ("run.start", json!({"assistant_id": "lead_agent", "config": {"configurable": {"thread_id": "u"}}})),
        ("input.respond", json!({"namespace": [], "interrupt_id": "q"})),
        ("input.respond", json!({"responses": []})),
        ("input.respond", json!({"responses": [], "interrupt_id": "q"})),
        ("state.get", json!({})),
        ("state.listCheckpoints", json!({"limit": 0})),
        ("state.listCheckpoints", json!({"before": "x"})),
        ("state.fork", json!({})),
        ("agent.getTree", json!({"run_id": 1})),
    ] {
        refused(&command(&gateway, "t", method, params).await, 422, "invalid_argument");
    }
    // Without an id there is nothing to name the answer by.
    let body = json!({"method": "agent.getTree", "params": {}});
    gateway.post("/api/threads/t/commands", body).await.invalid("missing", &json!(["body", "id"]));
    let body = json!({"id": 1, "method": "agent.getTree", "params": {}, "more": 1});
    gateway.post("/api/threads/t/commands", body).await.invalid("extra_forbidden", &json!(["body", "more"]));
    for method in ["input.respond", "state.fork", "state.get", "state.listCheckpoints", "agent.getTree"] {
        let params = match method {
            "input.respond" => json!({"namespace": [], "interrupt_id": "q", "response": "x"}),
            "state.fork" => json!({"checkpoint_id": "01890000-0000-7000-8000-000000000000"}),
            "state.get" => json!({"namespace": []}),
            _ => json!({}),
        };
        refused(&command(&gateway, "u", method, params).await, 404, "invalid_argument");
    }
    assert_eq!(gateway.get("/api/threads/u").await.status, 404, "nothing was created");
}

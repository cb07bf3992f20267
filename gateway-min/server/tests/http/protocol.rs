//! The event stream of the thread protocol.

use axum::body::Body;
use axum::http::{Request, Response};
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::protocol_commands::{ask, command, done};
use crate::sse::Frames;
use crate::support::{Gateway, MODES, Setup, question};

const ALL: [&str; 9] =
    ["values", "updates", "messages", "tools", "lifecycle", "input", "checkpoints", "tasks", "custom"];

/// Answers in pieces of four characters; on `wait`, waits at `gate` after the first of them; on `look`, calls a tool.
fn script(gate: &str) -> Value {
    json!({"chunk_chars": 4, "rules": [
        {"when": {"contains": ["wait"]}, "answers": [
            {"text": "One piece after the other.", "gate": {"name": gate, "after_chunks": 1}},
        ]},
        {"when": {"contains": ["look"]}, "answers": [
            {"tool_calls": [{"name": "ls", "id": "call-1"}]}, {"text": "done"},
        ]},
        {"when": {"contains": ["fail"]}, "answers": [{"error": {"kind": "fatal", "message": "no such model"}}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

async fn started(setup: Setup, gate: &str) -> Gateway {
    Setup { script: script(gate), ..setup }.start().await
}

async fn open(gateway: &Gateway, filter: Value) -> Response<Body> {
    let request = Request::post("/api/threads/t/stream/events").header("content-type", "application/json");
    gateway.open_answer(request.body(filter.to_string().into()).unwrap()).await
}

/// Follows the thread in all channels.
async fn follow(gateway: &Gateway, since: Option<u64>) -> Frames {
    let mut filter = json!({ "channels": ALL });
    if let Some(since) = since {
        filter["since"] = since.into();
    }
    Frames::of(open(gateway, filter).await)
}

/// The next event.
async fn next(events: &mut Frames) -> Value {
    let frame = events.next().await.expect("an event");
    assert_eq!((&frame.data["type"], &frame.data["method"]), (&json!("event"), &json!(frame.name)));
    assert_eq!(frame.data["event_id"].as_str(), frame.id.as_deref());
    frame.data
}

/// Whether the thread's run ends with this event.
fn is_end(event: &Value) -> bool {
    let at_root = event["params"]["namespace"] == json!([]);
    let status = event["params"]["data"]["event"].as_str().unwrap_or_default();
    at_root && event["method"] == "lifecycle" && ["completed", "failed", "interrupted"].contains(&status)
}

/// The events up to the end of the run.
async fn rest(events: &mut Frames) -> Vec<Value> {
    let mut all = Vec::new();
    loop {
        let event = next(events).await;
        let ends = is_end(&event);
        all.push(event);
        if ends {
            return all;
        }
    }
}

/// The events up to one of this method and event.
async fn until(events: &mut Frames, method: &str, kind: &str) -> Vec<Value> {
    let mut all = Vec::new();
    loop {
        let event = next(events).await;
        let found = event["method"] == method && event["params"]["data"]["event"] == kind;
        all.push(event);
        if found {
            return all;
        }
    }
}

fn seq(event: &Value) -> u64 {
    event["seq"].as_u64().unwrap()
}

fn in_order(events: &[Value]) {
    for pair in events.windows(2) {
        assert!(seq(&pair[0]) < seq(&pair[1]), "{pair:?}");
    }
}

fn methods(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["method"].as_str().unwrap()).collect()
}

/// The text of the messages that were streamed.
fn streamed(events: &[Value]) -> String {
    events.iter().filter_map(|event| event["params"]["data"]["delta"]["text"].as_str()).collect()
}

#[tokio::test]
async fn a_run_is_followed_from_its_beginning_to_its_end() {
    for mode in MODES {
        let gateway = started(Setup::on("sqlite", mode), "unused").await;
        let reply = command(&gateway, "t", "run.start", ask("look")).await.ok();
        let mut stream = follow(&gateway, None).await;
        let events = rest(&mut stream).await;
        in_order(&events);
        assert!(seq(&events[0]) > reply["meta"]["applied_through_seq"].as_u64().unwrap());
        let data = |event: &Value| event["params"]["data"].clone();
        assert_eq!(data(&events[0]), json!({"event": "running", "graph_name": "lead_agent"}));
        let end = data(events.last().unwrap());
        let head = gateway.state("t").await;
        assert_eq!((&end["event"], &end["checkpoint"]["id"]), (&json!("completed"), &head["checkpoint_id"]));
        // Each checkpoint comes directly before its state.
        let methods = methods(&events);
        let values = methods.iter().enumerate().filter(|(_, method)| **method == "values");
        let indexes: Vec<_> = values.map(|(index, _)| index).collect();
        assert_eq!(indexes.len(), 4);
        assert!(indexes.iter().all(|index| methods[index - 1] == "checkpoints"));
        let tools = events.iter().filter(|event| event["method"] == "tools");
        let tools: Vec<_> = tools.map(|event| event["params"]["data"]["event"].clone()).collect();
        assert_eq!(tools, ["tool-started", "tool-finished"]);
        assert_eq!(streamed(&events), "done");
        let last = data(events.iter().rfind(|event| event["method"] == "values").unwrap());
        assert_eq!(last["messages"], head["values"]["messages"]);
        for method in ["updates", "tasks"] {
            assert!(methods.contains(&method), "{method}");
        }
        // What comes next is in the same stream.
        command(&gateway, "t", "run.start", ask("hello")).await.ok();
        let more = rest(&mut stream).await;
        assert!(seq(events.last().unwrap()) < seq(&more[0]));
        assert_eq!(streamed(&more), "You said: hello");
    }
}

#[tokio::test]
async fn a_stream_that_was_cut_goes_on_after_the_last_event_with_nothing_twice() {
    for mode in MODES {
        let name = format!("protocol-since-{mode}");
        let gateway = started(Setup::on("memory", mode), &name).await;
        command(&gateway, "t", "run.start", ask("wait")).await.ok();
        gate(&name).reached().await;
        let mut whole = follow(&gateway, None).await;
        let before = until(&mut whole, "messages", "content-block-delta").await;
        gate(&name).open();
        let after = rest(&mut whole).await;
        let all: Vec<Value> = before.into_iter().chain(after).collect();
        in_order(&all);
        for (index, event) in all.iter().enumerate() {
            let mut again = follow(&gateway, Some(seq(event))).await;
            if index + 1 < all.len() {
                assert_eq!(rest(&mut again).await, all[index + 1..], "after {index}");
            }
        }
        // Without a number, all of the newest run, under the same names.
        assert_eq!(rest(&mut follow(&gateway, None).await).await, all);
    }
}

#[tokio::test]
async fn a_command_that_is_repeated_names_a_number_before_its_run() {
    let gateway = started(Setup::default(), "unused").await;
    let send = async || {
        let request = Request::post("/api/threads/t/commands")
            .header("content-type", "application/json")
            .header("Idempotency-Key", "k");
        let body = json!({"id": 7, "method": "run.start", "params": ask("hello")});
        gateway.send(request.body(body.to_string().into()).unwrap()).await.ok()
    };
    let first = send().await;
    let events = rest(&mut follow(&gateway, None).await).await;
    let again = send().await;
    assert_eq!(again["result"], first["result"]);
    for reply in [first, again] {
        assert!(reply["meta"]["applied_through_seq"].as_u64().unwrap() < seq(&events[0]), "{reply}");
    }
}

#[tokio::test]
async fn two_clients_get_what_each_asked_for_of_the_same_events() {
    let name = "protocol-two";
    let gateway = started(Setup::default(), name).await;
    command(&gateway, "t", "run.start", ask("wait")).await.ok();
    gate(name).reached().await;
    let mut whole = follow(&gateway, None).await;
    let filter = json!({"channels": ["messages", "lifecycle"], "namespaces": [[]], "depth": 0});
    let mut part = Frames::of(open(&gateway, filter).await);
    gate(name).open();
    let all = rest(&mut whole).await;
    let wanted = |event: &&Value| event["method"] == "messages" || event["method"] == "lifecycle";
    let expected: Vec<Value> = all.iter().filter(wanted).cloned().collect();
    assert_eq!(rest(&mut part).await, expected);
}

/// It is cancelled before the run at work ends, and shown after that end.
#[tokio::test]
async fn a_client_that_has_the_end_of_a_run_gets_that_of_the_cancelled_one_that_waited_for_it() {
    let name = "protocol-waited";
    let gateway = started(Setup::default(), name).await;
    command(&gateway, "t", "run.start", ask("wait")).await.ok();
    gate(name).reached().await;
    let waited = done(command(&gateway, "t", "run.start", ask("two")).await);
    let waited = waited["run_id"].as_str().unwrap();
    let mut stream = follow(&gateway, None).await;
    let path = format!("/api/threads/t/runs/{waited}/cancel?wait=true");
    assert_eq!(gateway.post(&path, json!({})).await.status, 204);
    gate(name).open();
    let first = rest(&mut stream).await;
    in_order(&first);
    let second = rest(&mut stream).await;
    let end = second.last().unwrap();
    assert_eq!(end["event_id"], format!("{waited}:end"));
    assert_eq!(end["params"]["data"]["event"], "interrupted");
    let since = seq(first.last().unwrap());
    assert!(second.iter().all(|event| seq(event) >= since), "{second:?}");
    assert_eq!(rest(&mut follow(&gateway, Some(since)).await).await, second);
}

#[tokio::test]
async fn what_is_no_longer_kept_is_replaced_by_the_state() {
    let name = "protocol-gap";
    let sections = json!({"stream_bridge": {"queue_maxsize": 2}});
    let gateway = started(Setup { sections, ..Setup::default() }, name).await;
    command(&gateway, "t", "run.start", ask("wait")).await.ok();
    gate(name).reached().await;
    let mut stream = follow(&gateway, None).await;
    gate(name).open();
    let events = rest(&mut stream).await;
    let methods = methods(&events);
    assert_eq!(methods[..3], ["checkpoints", "values", "lifecycle"], "{methods:?}");
    let shown = &events[1]["params"]["data"]["messages"];
    assert_eq!(shown[0]["content"], "wait");
    assert!(is_end(events.last().unwrap()));
    in_order(&events);
}

#[tokio::test]
async fn a_client_that_was_cut_before_the_state_gets_it_with_its_checkpoint() {
    for mode in MODES {
        let sections = json!({"stream_bridge": {"queue_maxsize": 2}});
        let gateway = started(Setup { sections, ..Setup::on("memory", mode) }, "unused").await;
        command(&gateway, "t", "run.start", ask("hello")).await.ok();
        rest(&mut follow(&gateway, None).await).await;
        let events = rest(&mut follow(&gateway, None).await).await;
        assert_eq!(methods(&events)[..2], ["checkpoints", "values"], "{mode}");
        let again = async |has: usize| rest(&mut follow(&gateway, Some(seq(&events[has]))).await).await;
        assert_eq!(again(0).await, events, "{mode}");
        assert_eq!(again(1).await, events[2..], "{mode}");
    }
}

#[tokio::test]
async fn a_run_that_ended_long_ago_is_its_state_and_its_end() {
    for mode in MODES {
        let gateway = started(Setup::on("sqlite", mode), "unused").await;
        command(&gateway, "t", "run.start", ask("hello")).await.ok();
        let events = rest(&mut follow(&gateway, None).await).await;
        command(&gateway, "t", "run.start", ask("fail")).await.ok();
        let mut failed = follow(&gateway, None).await;
        let failed = rest(&mut failed).await;
        let gateway = gateway.reopen(mode).await;
        let again = rest(&mut follow(&gateway, None).await).await;
        assert_eq!(methods(&again), ["checkpoints", "values", "lifecycle"]);
        in_order(&again);
        let (end, old) = (again.last().unwrap(), failed.last().unwrap());
        assert_eq!(end["event_id"], old["event_id"]);
        assert_eq!(end["params"]["data"], old["params"]["data"]);
        assert_eq!(end["params"]["data"]["event"], "failed");
        let error = end["params"]["data"]["error"].as_str().unwrap();
        assert!(error.contains("no such model"), "{error}");
        // A client that has the first run's end gets only the second's.
        let since = seq(events.last().unwrap());
        let more = rest(&mut follow(&gateway, Some(since)).await).await;
        assert_eq!(more.last().unwrap()["event_id"], end["event_id"]);
    }
}

#[tokio::test]
async fn a_question_is_asked_in_the_stream_and_its_answer_goes_on() {
    for mode in MODES {
        let gateway = asking(mode).await;
        command(&gateway, "t", "run.start", ask("paint")).await.ok();
        let mut stream = follow(&gateway, None).await;
        let events = rest(&mut stream).await;
        let [.., asked, end] = events.as_slice() else { panic!("{events:?}") };
        assert_eq!(asked["method"], "input.requested");
        assert_eq!(asked["params"]["data"]["payload"]["question"], "Which colour?");
        assert_eq!(end["params"]["data"]["event"], "interrupted");
        let answer = json!({
            "namespace": [], "interrupt_id": asked["params"]["data"]["interrupt_id"], "response": "blue",
        });
        let reply = command(&gateway, "t", "input.respond", answer).await;
        let run = done(reply)["run_id"].as_str().unwrap().to_owned();
        let more = rest(&mut stream).await;
        assert_eq!(streamed(&more), "You said: blue");
        assert!(more[0]["event_id"].as_str().unwrap().starts_with(&run));
        assert_eq!(more.last().unwrap()["params"]["data"]["event"], "completed");
    }
}

#[tokio::test]
async fn a_client_that_has_the_first_of_two_questions_gets_the_second() {
    let call =
        |id: &str, text: &str| json!({"name": "ask_clarification", "id": id, "args": {"question": text}});
    let calls = [call("c", "Which colour?"), call("d", "When?")];
    let script = json!({"rules": [{"answers": [{"tool_calls": calls}]}]});
    for mode in MODES {
        let gateway = Setup { script: script.clone(), ..Setup::on("memory", mode) }.start().await;
        command(&gateway, "t", "run.start", ask("paint")).await.ok();
        let events = rest(&mut follow(&gateway, None).await).await;
        in_order(&events);
        let [.., first, second, end] = events.as_slice() else { panic!("{events:?}") };
        assert_eq!(first["params"]["data"]["payload"]["question"], "Which colour?");
        assert_eq!(second["params"]["data"]["payload"]["question"], "When?");
        let more = rest(&mut follow(&gateway, Some(seq(first))).await).await;
        assert_eq!(more, [second.clone(), end.clone()]);
    }
}

/// The last three have the same number.
#[tokio::test]
async fn a_client_that_has_the_eighth_of_ten_questions_gets_the_others() {
    let call = |n: u64| {
        let args = json!({ "question": format!("Question {n}?") });
        json!({"name": "ask_clarification", "id": format!("c{n}"), "args": args})
    };
    let calls: Vec<Value> = (1..=10).map(call).collect();
    let script = json!({"rules": [{"answers": [{"tool_calls": calls}]}]});
    for mode in MODES {
        let gateway = Setup { script: script.clone(), ..Setup::on("memory", mode) }.start().await;
        command(&gateway, "t", "run.start", ask("paint")).await.ok();
        let events = rest(&mut follow(&gateway, None).await).await;
        let [.., seventh, eighth, ninth, tenth, end] = events.as_slice() else { panic!("{events:?}") };
        assert_eq!(tenth["params"]["data"]["payload"]["question"], "Question 10?");
        in_order(&[seventh.clone(), eighth.clone(), end.clone()]);
        assert_eq!([seq(ninth), seq(tenth)], [seq(eighth); 2]);
        // A client does not say which of them it has, and knows those that it gets again by their ids.
        let more = rest(&mut follow(&gateway, Some(seq(eighth))).await).await;
        assert_eq!(more, [ninth.clone(), tenth.clone(), end.clone()]);
    }
}

/// A gateway whose agent asks a question on `paint`.
pub(crate) async fn asking(mode: &'static str) -> Gateway {
    let ask = json!({"name": "ask_clarification", "args": {"question": "Which colour?"}});
    let script = json!({"rules": [
        {"when": {"contains": ["paint"]}, "answers": [{"tool_calls": [ask]}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]});
    Setup { script, ..Setup::on("memory", mode) }.start().await
}

#[tokio::test]
async fn the_stream_ends_with_its_thread_which_cannot_be_deleted_under_a_run() {
    let name = "protocol-deleted";
    let gateway = started(Setup::default(), name).await;
    command(&gateway, "t", "run.start", ask("wait")).await.ok();
    gate(name).reached().await;
    let mut stream = follow(&gateway, None).await;
    until(&mut stream, "messages", "content-block-delta").await;
    assert_eq!(gateway.delete("/api/threads/t").await.status, 409);
    gate(name).open();
    rest(&mut stream).await;
    assert!(gateway.delete("/api/threads/t").await.status < 300);
    assert_eq!(stream.rest().await, [], "nothing more, and the end");
    assert_eq!(open_status(&gateway).await, 404);
}

async fn open_status(gateway: &Gateway) -> u16 {
    open(gateway, json!({"channels": ["values"]})).await.status().as_u16()
}

#[tokio::test]
async fn a_run_of_another_process_is_followed_with_the_same_events() {
    for mode in MODES {
        let name = format!("protocol-several-{mode}");
        let first = started(Setup::on("postgres", mode), &name).await;
        let second = first.beside().await;
        command(&first, "t", "run.start", ask("wait")).await.ok();
        gate(&name).reached().await;
        let (mut here, mut there) = (follow(&first, None).await, follow(&second, None).await);
        let before = until(&mut there, "messages", "content-block-delta").await;
        gate(&name).open();
        let after = rest(&mut there).await;
        let all: Vec<Value> = before.into_iter().chain(after).collect();
        assert_eq!(rest(&mut here).await, all);
        // Cut on one, continued on the other.
        let middle = all.len() / 2;
        let mut again = follow(&first, Some(seq(&all[middle]))).await;
        assert_eq!(rest(&mut again).await, all[middle + 1..]);
    }
}

#[tokio::test]
async fn runs_of_the_other_routes_are_shown_in_the_channels_that_they_have() {
    let gateway = started(Setup::default(), "unused").await;
    gateway.create("t").await;
    let mut body = question("hello");
    body["stream_mode"] = json!(["values", "messages-tuple"]);
    gateway.post("/api/threads/t/runs/wait", body).await.ok();
    let events = rest(&mut follow(&gateway, None).await).await;
    let mut shown = methods(&events);
    shown.dedup();
    assert_eq!(shown, ["lifecycle", "values", "messages", "values", "lifecycle"]);
    in_order(&events);
}

#[tokio::test]
async fn a_malformed_filter_is_refused_by_name() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    for (filter, kind, loc) in [
        (json!({}), "missing", json!(["body", "channels"])),
        (json!({"channels": []}), "too_short", json!(["body", "channels"])),
        (json!({"channels": "values"}), "list_type", json!(["body", "channels"])),
        (json!({"channels": ["debug"]}), "literal_error", json!(["body", "channels"])),
        (json!({"channels": ["custom:"]}), "literal_error", json!(["body", "channels"])),
        (json!({"channels": ["values"], "since": -1}), "greater_than_equal", json!(["body", "since"])),
        (json!({"channels": ["values"], "since": "1"}), "int_type", json!(["body", "since"])),
        (json!({"channels": ["values"], "depth": -1}), "greater_than_equal", json!(["body", "depth"])),
        (json!({"channels": ["values"], "namespaces": [1]}), "list_type", json!(["body", "namespaces"])),
        (json!({"channels": ["values"], "namespaces": [[1]]}), "string_type", json!(["body", "namespaces"])),
        (json!({"channels": ["values"], "more": 1}), "extra_forbidden", json!(["body", "more"])),
    ] {
        gateway.post("/api/threads/t/stream/events", filter).await.invalid(kind, &loc);
    }
    gateway.delete("/api/threads/t").await.ok();
    assert_eq!(open_status(&gateway).await, 404);
}

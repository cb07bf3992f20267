//! What is refused before a run is created, in which order, and that a refused request leaves nothing.

use serde_json::{Map, Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{Gateway, MODES, Setup, question};

/// The routes that create a run on a thread, and those that name it in the body.
const ON_THREAD: [&str; 3] =
    ["/api/threads/t/runs", "/api/threads/t/runs/stream", "/api/threads/t/runs/wait"];
const STATELESS: [&str; 3] = ["/api/runs", "/api/runs/stream", "/api/runs/wait"];
/// The id of a checkpoint that does not exist.
const NONE: &str = "0190b0f0-0000-7000-8000-000000000000";
const BUSY: &str = "Thread t already has an active run";

/// Asserts that the answer has this status and exactly this body.
async fn refused(gateway: &Gateway, path: &str, body: &Value, status: u16, expected: &Value) {
    let answer = gateway.post(path, body.clone()).await;
    assert_eq!((answer.status, &answer.body), (status, expected), "{path} {body}");
    assert_eq!(answer.headers.get("content-location"), None, "{path} {body}: there is no run");
}

/// The body with one problem of a 422.
fn problem(kind: &str, loc: &Value, msg: &str, input: &Value) -> Value {
    json!({"detail": [{"type": kind, "loc": loc, "msg": msg, "input": input}]})
}

/// A body whose only flaw is this field.
fn with(name: &str, value: Value) -> Value {
    let mut body = question("hello");
    body[name] = value;
    body
}

#[tokio::test]
async fn a_malformed_body_is_422_with_the_problem_on_every_route_and_changes_nothing() {
    let gateway = Setup::on("sqlite", "delta").start().await;
    gateway.create("t").await;
    gateway.ask("t", "before").await;
    let (rows, history) = (gateway.rows().await, gateway.history("t").await);
    let unsupported = |name: &str| format!("Run option '{name}' is not supported by Threadkeep");
    let strategies = "Input should be 'reject', 'rollback', 'interrupt' or 'enqueue'".to_owned();
    let cases = [
        ("durabilty", json!("sync"), "extra_forbidden", "Extra inputs are not permitted".to_owned()),
        ("strict_resume", json!(false), "unsupported_run_option", unsupported("strict_resume")),
        ("webhook", json!("https://a.example"), "unsupported_run_option", unsupported("webhook")),
        ("after_seconds", json!(3), "unsupported_run_option", unsupported("after_seconds")),
        ("feedback_keys", json!(["a"]), "unsupported_run_option", unsupported("feedback_keys")),
        ("on_completion", json!("delete"), "unsupported_run_option", unsupported("on_completion")),
        ("multitask_strategy", json!("queue"), "literal_error", strategies.clone()),
        ("multitask_strategy", Value::Null, "literal_error", strategies),
        ("on_disconnect", Value::Null, "literal_error", "Input should be 'cancel' or 'continue'".to_owned()),
        ("if_not_exists", Value::Null, "literal_error", "Input should be 'create'".to_owned()),
        ("stream_subgraphs", Value::Null, "bool_type", "Input should be a valid boolean".to_owned()),
        (
            "stream_mode",
            json!(["values", "tools", "events"]),
            "unsupported_stream_mode",
            "Unsupported stream mode(s): tools, events".to_owned(),
        ),
        ("input", json!("hello"), "dict_type", "Input should be a valid dictionary".to_owned()),
    ];
    for path in ON_THREAD.into_iter().chain(STATELESS) {
        for (name, value, kind, msg) in &cases {
            let body = with(name, value.clone());
            let answer = gateway.post(path, body.clone()).await;
            let found = answer.body["detail"].as_array().map(|problems| {
                let problem = &problems[0];
                (problems.len(), problem["type"].clone(), problem["loc"].clone(), problem["msg"].clone())
            });
            let expected = (1, json!(kind), json!(["body", name]), json!(msg));
            assert_eq!((answer.status, found), (422, Some(expected)), "{path} {body}");
        }
        let bad = with("config", json!({"configurable": {"thread_id": "a/b"}}));
        let expected = problem(
            "string_pattern_mismatch",
            &json!(["body", "config", "configurable", "thread_id"]),
            "String should match pattern '^[A-Za-z0-9_-]{1,64}$'",
            &json!("a/b"),
        );
        let answer = gateway.post(path, bad).await;
        let mut found = answer.body;
        found["detail"][0].as_object_mut().unwrap().remove("ctx");
        assert_eq!((answer.status, found), (422, expected));
    }
    assert_eq!(gateway.rows().await, rows, "not one row was written");
    assert_eq!(gateway.history("t").await, history);
}

#[tokio::test]
async fn a_bad_thread_id_in_the_path_is_422() {
    let gateway = Setup::default().start().await;
    for form in ["", "/stream", "/wait"] {
        let answer = gateway.post(&format!("/api/threads/a.b/runs{form}"), question("hello")).await;
        answer.invalid("string_pattern_mismatch", &json!(["path", "thread_id"]));
    }
}

/// The flaws of a request, in the order of the checks, each with its answer.
fn flaws(stateless: bool) -> Vec<(Value, u16, Value)> {
    let text = |detail: &str| json!({ "detail": detail });
    let mut flaws = vec![
        (
            json!({"nope": 1}),
            422,
            problem("extra_forbidden", &json!(["body", "nope"]), "Extra inputs are not permitted", &json!(1)),
        ),
        (
            json!({"metadata": {"auth_token": "hunter2"}}),
            422,
            text(
                "Run metadata key 'auth_token' is reserved: metadata is stored; leave it out, no tool takes credentials from a request",
            ),
        ),
        (
            json!({"context": {"model_name": "gpt-9"}}),
            400,
            text("Model 'gpt-9' is not in the configured model allowlist"),
        ),
        (
            json!({"input": {"messages": [{"role": "user", "content": "x"}, {"role": "wizard", "content": "x"}]}}),
            400,
            text("Invalid message at input.messages[1]: unknown message type 'wizard'"),
        ),
        (
            json!({"checkpoint": {"thread_id": "other", "checkpoint_ns": ""}}),
            400,
            text("checkpoint thread_id does not match request thread_id"),
        ),
        (json!({"checkpoint_id": NONE}), 404, text(&format!("Checkpoint {NONE} not found"))),
        // All that is left: the thread is busy.
        (json!({"metadata": {"any": 1}}), 409, text(BUSY)),
    ];
    if stateless {
        for (flaw, ..) in &mut flaws {
            flaw["config"] = json!({"configurable": {"thread_id": "t"}});
        }
    }
    flaws
}

/// The body that has this flaw and all later ones.
fn from(flaws: &[(Value, u16, Value)]) -> Value {
    let mut body = Map::from_iter([("input".to_owned(), question("hello")["input"].clone())]);
    for (flaw, ..) in flaws.iter().rev() {
        body.extend(flaw.as_object().unwrap().clone());
    }
    Value::Object(body)
}

/// The runs of the thread, without what a run at work stores of itself every few seconds.
async fn runs(gateway: &Gateway) -> Value {
    let mut runs = gateway.get("/api/threads/t/runs").await.ok();
    for run in runs.as_array_mut().unwrap() {
        if run["status"] == "running" {
            let run = run.as_object_mut().unwrap();
            run.retain(|field, _| !["updated_at", "message_count"].contains(&field.as_str()));
        }
    }
    runs
}

/// Each request has one flaw less than the one before, so each answer shows that its check precedes the later ones.
#[tokio::test]
async fn the_checks_come_in_the_order_of_the_contract_and_a_refused_request_changes_nothing() {
    for mode in MODES {
        let name = format!("checks-{mode}");
        let script = json!({"rules": [
            {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": name}}]},
            {"answers": [{"text": "You said: {{input}}"}]},
        ]});
        let gateway = Setup { script, ..Setup::on("sqlite", mode) }.start().await;
        gateway.create("t").await;
        gateway.ask("t", "before").await;
        let run = gateway.start_run("t", "wait").await;
        gate(&name).reached().await;
        let (rows, history) = (gateway.rows().await, gateway.history("t").await);
        let before = runs(&gateway).await;
        for (paths, stateless) in [(ON_THREAD, false), (STATELESS, true)] {
            let flaws = flaws(stateless);
            for (at, (_, status, expected)) in flaws.iter().enumerate() {
                for path in paths {
                    refused(&gateway, path, &from(&flaws[at..]), *status, expected).await;
                }
            }
        }
        assert_eq!(gateway.rows().await, rows, "{mode}: not one row was written");
        assert_eq!(gateway.history("t").await, history);
        assert_eq!(runs(&gateway).await, before, "the run at work goes on");
        gate(&name).open();
        gateway.join("t", &run).await;
        assert_eq!(gateway.run("t", &run).await["status"], "success");
    }
}

/// After the form of the body and before everything else.
#[tokio::test]
async fn a_thread_without_a_record_is_404_behind_the_form_and_before_the_contents() {
    let gateway = Setup::on("sqlite", "full").start().await;
    gateway.create("t").await;
    let rows = gateway.rows().await;
    let flaws = flaws(false);
    for form in ["", "/stream", "/wait"] {
        let path = format!("/api/threads/none/runs{form}");
        let (_, status, expected) = &flaws[0];
        refused(&gateway, &path, &from(&flaws), *status, expected).await;
        for at in 1..flaws.len() {
            let expected = json!({"detail": "Thread none not found"});
            refused(&gateway, &path, &from(&flaws[at..]), 404, &expected).await;
        }
        let creating = with("if_not_exists", json!("create"));
        refused(&gateway, &path, &creating, 404, &json!({"detail": "Thread none not found"})).await;
    }
    assert_eq!(gateway.rows().await, rows);
}

#[tokio::test]
async fn a_stateless_request_that_is_refused_makes_no_thread() {
    let gateway = Setup::on("sqlite", "delta").start().await;
    gateway.create("t").await;
    let rows = gateway.rows().await;
    let flaws = flaws(false);
    for path in STATELESS {
        for name in [None, Some("new")] {
            for (flaw, status, expected) in &flaws[..flaws.len() - 1] {
                let mut body = from(&[(flaw.clone(), *status, expected.clone())]);
                if let Some(name) = name {
                    body["config"] = json!({"configurable": {"thread_id": name}});
                }
                refused(&gateway, path, &body, *status, expected).await;
            }
        }
    }
    assert_eq!(gateway.rows().await, rows, "no thread, no run, no checkpoint");
    gateway.get("/api/threads/new").await.refused(404, "Thread new not found");
}

#[tokio::test]
async fn selectors_are_checked_by_their_form_and_against_the_thread() {
    let gateway = Setup::on("sqlite", "delta").start().await;
    for thread in ["t", "other"] {
        gateway.create(thread).await;
        gateway.ask(thread, "hello").await;
    }
    let foreign = gateway.state("other").await["checkpoint_id"].as_str().unwrap().to_owned();
    let rows = gateway.rows().await;
    let cases = [
        (json!({"checkpoint": "x"}), 400, "checkpoint must be an object".to_owned()),
        (
            json!({"checkpoint": {"thread_id": "other", "checkpoint_id": foreign}}),
            400,
            "checkpoint thread_id does not match request thread_id".to_owned(),
        ),
        (json!({"checkpoint_id": foreign}), 404, format!("Checkpoint {foreign} not found")),
        (json!({"checkpoint_id": "no-id"}), 404, "Checkpoint no-id not found".to_owned()),
        (json!({"checkpoint_id": ""}), 404, "Checkpoint not found".to_owned()),
        (
            json!({"config": {"configurable": {"checkpoint_id": NONE}}}),
            404,
            format!("Checkpoint {NONE} not found"),
        ),
        // The object takes precedence over the id.
        (
            json!({"checkpoint": {"checkpoint_id": NONE}, "checkpoint_id": foreign}),
            404,
            format!("Checkpoint {NONE} not found"),
        ),
    ];
    for path in ON_THREAD {
        for (selector, status, detail) in &cases {
            let mut body = question("hello");
            body.as_object_mut().unwrap().extend(selector.as_object().unwrap().clone());
            refused(&gateway, path, &body, *status, &json!({ "detail": detail })).await;
        }
    }
    assert_eq!(gateway.rows().await, rows);
}

mod command;
mod context;
mod delegation;

use axum::body::to_bytes;
use axum::response::IntoResponse;
use threadkeep_agent::{Durability, Interrupts};

use super::*;
use crate::http::fields::Problems;
use crate::runs::request::{Change, Delegation, OnDisconnect, RunConfig, StreamMode};
use threadkeep_records::MultitaskStrategy;

const LIMITS: RunLimits =
    RunLimits { max_recursion_limit: 1000, max_running: 3, max_total_per_run: 6, internal_caller: false };
const ID: &str = "01890a5d-ac96-774b-bcce-b302099a8057";

/// The parsed body, or the list of its problems.
fn parse(body: &Value) -> Result<RunBody, Value> {
    let Value::Object(values) = body.clone() else { panic!("not an object: {body}") };
    let mut problems = Problems::default();
    let mut fields = Fields::new(values, vec!["body".into()], &mut problems);
    let parsed = RunBody::from_fields(&mut fields);
    fields.deny_others();
    if problems.is_empty() { Ok(parsed) } else { Err(json!(problems)) }
}

/// The run that a valid body starts on thread `t`, or the error.
fn try_request(body: &Value, limits: RunLimits) -> Result<RunRequest, ApiError> {
    parse(body).unwrap_or_else(|problems| panic!("{body}: {problems}")).into_request(
        &"t".into(),
        limits,
        &IdSource::default(),
    )
}

fn request(body: &Value) -> RunRequest {
    try_request(body, LIMITS).unwrap_or_else(|error| panic!("{body}: {error}"))
}

async fn answer(error: ApiError) -> (u16, Value) {
    let response = error.into_response();
    let status = response.status().as_u16();
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (status, serde_json::from_slice(&body).unwrap())
}

fn map(value: Value) -> Map<String, Value> {
    let Value::Object(map) = value else { panic!("not an object: {value}") };
    map
}

#[test]
fn an_empty_body_has_every_default() {
    let run = request(&json!({}));
    assert_eq!((&run.assistant_id, &run.agent, &run.checkpoint), (&None, &None, &None));
    assert_eq!(run.input, RunInput::Continue);
    assert_eq!(run.metadata, Map::new());
    assert_eq!(run.config, RunConfig { recursion_limit: 100, ..RunConfig::default() });
    let options = RunOptions { stream_modes: vec![StreamMode::Values], ..RunOptions::default() };
    assert_eq!(run.options, options);
    assert_eq!(options.on_disconnect, OnDisconnect::Cancel);
    assert_eq!(options.multitask_strategy.as_str(), "reject");
    assert_eq!(run.kwargs, json!({"input": null, "config": null}));
    assert_eq!(parse(&json!({})).unwrap().thread_id(), None);
}

/// What the Python and JavaScript clients and the React hook send by default.
#[test]
fn the_bodies_of_unmodified_clients_are_accepted() {
    for body in [
        json!({"input": {"messages": []}, "stream_mode": "values", "stream_subgraphs": false,
               "stream_resumable": false, "assistant_id": "lead_agent"}),
        json!({"input": null, "stream_mode": ["values", "messages-tuple", "updates", "custom"],
               "stream_subgraphs": true, "stream_resumable": true, "durability": "async", "assistant_id": "lead_agent",
               "on_disconnect": "continue", "command": null, "config": {"recursion_limit": 50}, "context": {},
               "metadata": {}, "checkpoint": null, "checkpoint_during": false, "if_not_exists": "create",
               "on_completion": "keep", "feedback_keys": [], "multitask_strategy": "interrupt"}),
    ] {
        request(&body);
    }
}

/// As `RemoteGraph` of LangGraph for JavaScript resumes a run.
#[test]
fn a_command_may_have_the_name_of_its_class() {
    let command = json!({"lg_name": "Command", "resume": true, "goto": []});
    let config = json!({"tags": [], "metadata": {}, "configurable": {}, "recursion_limit": 25});
    let sent = json!({
        "assistant_id": "lead_agent", "command": command, "config": config, "if_not_exists": "create",
        "stream_mode": ["values", "updates"], "stream_subgraphs": false,
    });
    assert_eq!(request(&sent).input, request(&json!({"command": {"resume": true}})).input);
    for (name, value) in [("lg_name", json!("Send")), ("node", json!("Command"))] {
        let problems = parse(&json!({"command": {name: value, "resume": true}})).map(drop).unwrap_err();
        assert_eq!(problems[0]["loc"], json!(["body", "command", name]), "{problems}");
    }
}

#[test]
fn null_is_an_absent_value_where_the_reference_allows_it() {
    for name in [
        "assistant_id",
        "input",
        "command",
        "metadata",
        "config",
        "context",
        "checkpoint_id",
        "checkpoint",
        "interrupt_before",
        "interrupt_after",
        "stream_mode",
        "stream_resumable",
        "webhook",
        "on_completion",
        "after_seconds",
        "feedback_keys",
        "durability",
        "checkpoint_during",
    ] {
        let run = request(&json!({name: null}));
        assert_eq!((run.input, run.options), (RunInput::Continue, request(&json!({})).options), "{name}");
    }
}

/// Each body has one flaw: its name, the type and text of the item, and the path below the field.
#[test]
fn every_flaw_of_a_body_is_refused_with_its_item() {
    let literal = |expected: &str| ("literal_error", format!("Input should be {expected}"));
    let no_text = || ("string_type", "Input should be a valid string".to_owned());
    let no_object = || ("dict_type", "Input should be a valid dictionary".to_owned());
    let no_list = || ("list_type", "Input should be a valid list".to_owned());
    let unsupported = |name: &str| {
        ("unsupported_run_option", format!("Run option '{name}' is not supported by Threadkeep"))
    };
    let modes = |names: &str| ("unsupported_stream_mode", format!("Unsupported stream mode(s): {names}"));
    let pattern =
        |pattern: &str| ("string_pattern_mismatch", format!("String should match pattern '{pattern}'"));
    let agent = || ("unknown_assistant", "Assistant not found; there is one, 'lead_agent'".to_owned());
    let node = || literal("'model' or 'tools'");
    let thread = || pattern("^[A-Za-z0-9_-]{1,64}$");
    let disconnect = || literal("'cancel' or 'continue'");
    let strategy = || literal("'reject', 'rollback', 'interrupt' or 'enqueue'");
    let none: &[Value] = &[];
    let cases = [
        ("assistant_id", json!(3), no_text(), none),
        ("assistant_id", json!("lead_agnet"), agent(), none),
        ("assistant_id", json!("a b"), agent(), none),
        ("assistant_id", json!(""), agent(), none),
        ("assistant_id", json!("fe096781-5601-53d2-b2f6-0d3403f7e9ca"), agent(), none),
        ("input", json!([]), no_object(), none),
        ("input", json!("hello"), no_object(), none),
        ("command", json!("resume"), no_object(), none),
        ("metadata", json!([]), no_object(), none),
        ("config", json!("x"), no_object(), none),
        ("config", json!({"configurable": 1}), no_object(), &[json!("configurable")]),
        ("config", json!({"context": []}), no_object(), &[json!("context")]),
        ("config", json!({"metadata": "x"}), no_object(), &[json!("metadata")]),
        (
            "config",
            json!({"configurable": {"thread_id": "a/b"}}),
            thread(),
            &[json!("configurable"), json!("thread_id")],
        ),
        (
            "config",
            json!({"configurable": {"thread_id": 7}}),
            no_text(),
            &[json!("configurable"), json!("thread_id")],
        ),
        (
            "config",
            json!({"configurable": {"checkpoint_id": 7}}),
            no_text(),
            &[json!("configurable"), json!("checkpoint_id")],
        ),
        ("context", json!([]), no_object(), none),
        ("checkpoint_id", json!(3), no_text(), none),
        ("interrupt_before", json!("model"), literal("'*'"), none),
        ("interrupt_before", json!(true), no_list(), none),
        ("interrupt_after", json!({}), no_list(), none),
        ("interrupt_after", json!(["model", 3]), node(), &[json!(1)]),
        ("interrupt_before", json!(["tools", "modle"]), node(), &[json!(1)]),
        ("stream_mode", json!("events"), modes("events"), none),
        ("stream_mode", json!(["values", "tools", "nope"]), modes("tools, nope"), none),
        ("stream_mode", json!([""]), modes(""), none),
        ("stream_mode", json!(1), no_list(), none),
        ("stream_mode", json!(["values", null]), no_text(), &[json!(1)]),
        ("stream_subgraphs", Value::Null, ("bool_type", "Input should be a valid boolean".to_owned()), none),
        ("stream_resumable", json!("yes"), unsupported("stream_resumable"), none),
        ("on_disconnect", Value::Null, disconnect(), none),
        ("on_disconnect", json!("stop"), disconnect(), none),
        ("multitask_strategy", Value::Null, strategy(), none),
        ("multitask_strategy", json!("queue"), strategy(), none),
        ("if_not_exists", Value::Null, literal("'create'"), none),
        ("if_not_exists", json!("ignore"), literal("'create'"), none),
        ("if_not_exists", json!("reject"), unsupported("if_not_exists"), none),
        ("webhook", json!("https://example.com"), unsupported("webhook"), none),
        ("on_completion", json!("delete"), unsupported("on_completion"), none),
        ("after_seconds", json!(0), unsupported("after_seconds"), none),
        ("feedback_keys", json!(["a"]), unsupported("feedback_keys"), none),
        ("feedback_keys", json!({}), unsupported("feedback_keys"), none),
        ("durability", json!("never"), unsupported("durability"), none),
        ("checkpoint_during", json!(1), unsupported("checkpoint_during"), none),
        (
            "langsmith_tracer",
            json!({}),
            ("extra_forbidden", "Extra inputs are not permitted".to_owned()),
            none,
        ),
        ("strict_resume", json!(false), unsupported("strict_resume"), none),
    ];
    for (name, value, (kind, msg), below) in cases {
        let problems = parse(&json!({name: value})).map(drop).unwrap_err();
        let loc: Vec<_> = [json!("body"), json!(name)].into_iter().chain(below.iter().cloned()).collect();
        let input = below.iter().fold(&value, |value, step| match step {
            Value::String(key) => &value[key],
            step => &value[usize::try_from(step.as_u64().unwrap()).unwrap()],
        });
        let item = &problems[0];
        assert_eq!(
            (&item["type"], &item["msg"], &item["loc"], &item["input"], problems.as_array().unwrap().len()),
            (&json!(kind), &json!(msg), &json!(loc), input, 1),
            "{name}: {value}"
        );
    }
}

#[test]
fn all_flaws_are_reported_at_once_in_the_order_of_the_fields() {
    let problems = parse(&json!({
        "webhook": "x", "unknown": 1, "assistant_id": 3, "stream_mode": "events", "on_disconnect": null, "input": [],
    }));
    let problems = problems.map(drop).unwrap_err();
    let names: Vec<_> = problems.as_array().unwrap().iter().map(|item| item["loc"][1].clone()).collect();
    assert_eq!(names, ["assistant_id", "input", "stream_mode", "on_disconnect", "webhook", "unknown"]);
}

#[test]
fn the_one_assistant_has_several_spellings() {
    for id in ["lead_agent", "lead-agent", "Lead_Agent"] {
        let run = request(&json!({"assistant_id": id}));
        assert_eq!((run.assistant_id.as_deref(), run.agent), (Some(id), None));
    }
}

#[test]
fn options_are_read() {
    let run = request(&json!({
        "interrupt_before": "*", "interrupt_after": ["tools", "model"], "stream_subgraphs": true,
        "stream_mode": ["messages", "values", "messages-tuple", "debug", "values"],
        "on_disconnect": "continue", "multitask_strategy": "rollback",
    }));
    assert_eq!(
        run.options,
        RunOptions {
            interrupt_before: Interrupts::All,
            interrupt_after: Interrupts::Nodes(vec!["tools".into(), "model".into()]),
            stream_modes: vec![StreamMode::MessagesTuple, StreamMode::Values, StreamMode::Debug],
            stream_subgraphs: true,
            on_disconnect: OnDisconnect::Continue,
            multitask_strategy: MultitaskStrategy::Rollback,
            durability: Durability::Async,
        }
    );
    let durability = |text| request(&json!({"durability": text})).options.durability;
    let durabilities = ["sync", "async", "exit"].map(durability);
    assert_eq!(durabilities, [Durability::Sync, Durability::Async, Durability::Async]);
    let strategy = |text| request(&json!({"multitask_strategy": text})).options.multitask_strategy.as_str();
    let strategies = ["reject", "rollback", "interrupt", "enqueue"];
    assert_eq!(strategies.map(strategy), strategies);
    assert_eq!(request(&json!({"stream_mode": []})).options.stream_modes, [StreamMode::Values]);
}

#[test]
fn every_stream_mode_has_its_frames() {
    for (mode, event) in [
        ("values", "values"),
        ("messages-tuple", "messages"),
        ("messages", "messages"),
        ("updates", "updates"),
        ("debug", "debug"),
        ("tasks", "tasks"),
        ("checkpoints", "checkpoints"),
        ("custom", "custom"),
    ] {
        let modes = request(&json!({"stream_mode": mode})).options.stream_modes;
        assert_eq!(modes.iter().map(|mode| mode.event()).collect::<Vec<_>>(), [event]);
    }
}

#[test]
fn the_recursion_limit_is_clamped_and_unusable_ones_are_ignored() {
    let limit = |sent: Value, max_recursion_limit| {
        let limits = RunLimits { max_recursion_limit, ..LIMITS };
        try_request(&json!({"config": {"recursion_limit": sent}}), limits).unwrap().config.recursion_limit
    };
    for (sent, expected) in [
        (json!(1), 1),
        (json!(250), 250),
        (json!(250.0), 250),
        (json!(1e300), 1000),
        (json!(1000), 1000),
        (json!(1001), 1000),
        (json!(u64::MAX), 1000),
        (json!(0), 100),
        (json!(-5), 100),
        (json!(2.5), 100),
        (json!("50"), 100),
        (json!(true), 100),
        (Value::Null, 100),
        (json!([]), 100),
    ] {
        assert_eq!(limit(sent.clone(), 1000), expected, "{sent}");
    }
    assert_eq!(limit(Value::Null, 20), 20, "the maximum also limits the default");
}

#[test]
fn known_context_keys_are_forwarded_and_others_are_not() {
    let shared = json!({
        "model_name": "m", "mode": "pro", "thinking_enabled": true, "reasoning_effort": "high", "is_plan_mode": true,
        "subagent_enabled": true, "max_concurrent_subagents": 3, "max_total_subagents": 6, "agent_name": "lead_agent",
        "is_bootstrap": true,
    });
    let mut context = map(shared.clone());
    context.extend(map(json!({
        "disable_clarification": true, "github_token": "gh", "non_interactive": true, "allowed_subagents": ["x"],
        "tool_groups": ["g"], "available_skills": ["s"],
        "__svc": 1, "thread_id": "other", "unknown": 1,
    })));
    for body in [json!({"context": context}), json!({"config": {"context": context}})] {
        let run = request(&body);
        assert_eq!(run.config.configurable, map(shared.clone()));
        let mut expected = map(shared.clone());
        expected.insert("disable_clarification".into(), json!(true));
        assert_eq!(run.config.context, expected);
        let internal = try_request(&body, RunLimits { internal_caller: true, ..LIMITS }).unwrap();
        expected.insert("non_interactive".into(), json!(true));
        assert_eq!(internal.config.context, expected);
        assert_eq!(internal.config.configurable, map(shared.clone()));
    }
}

#[test]
fn what_the_configuration_says_wins_over_the_context() {
    let run = request(&json!({
        "config": {"configurable": {"mode": "entry", "agent_name": null},
                   "context": {"mode": "inner", "model_name": "inner", "reasoning_effort": null}},
        "context": {"mode": "outer", "model_name": "outer", "reasoning_effort": "outer", "agent_name": "lead-agent"},
    }));
    let expected = json!({"mode": "entry", "model_name": "inner", "reasoning_effort": "outer", "agent_name": "lead-agent"});
    assert_eq!(run.config.configurable, map(expected.clone()));
    assert_eq!(run.config.context, map(expected));
}

#[test]
fn entries_that_belong_to_the_gateway_and_credentials_are_not_forwarded() {
    let entries = json!({
        "keep": 1, "nested": {"__x": 1}, "__svc_checkpoint_channel_mode": "delta", "__pregel_x": 1,
        "svc_checkpoint_channel_mode": "delta", "counters_since_delta_snapshot": {"messages": [1, 1]},
        "thread_id": "mine", "run_id": "forged", "checkpoint_id": ID, "checkpoint_ns": "x", "checkpoint_map": {},
        "run_durations": {}, "run_message_ids": {}, "auth_token": "s", "github_token": "s", "api_key": "s",
    });
    let run = request(&json!({"config": {"configurable": entries, "metadata": entries}}));
    let kept = map(json!({"keep": 1, "nested": {"__x": 1}}));
    assert_eq!(run.config.configurable, kept);
    assert_eq!(run.config.metadata, kept);
}

#[test]
fn secrets_in_a_configuration_are_not_in_the_record_of_its_run() {
    let body = json!({
        "input": {"messages": ["hi"]},
        "config": {"configurable": {"github_token": "hunter2", "a": 1},
                   "context": {"github_token": "hunter2", "nested": {"api_key": "hunter2"}}},
        "context": {"github_token": "hunter2-outer"},
    });
    let parsed = parse(&body).unwrap();
    assert!(!format!("{parsed:?}").contains("hunter2"));
    let run = request(&body);
    assert!(!format!("{:?} {:?} {run:?}", run.config, run.kwargs).contains("hunter2"));
    assert_eq!(
        run.kwargs,
        json!({
            "input": {"messages": ["hi"]},
            "config": {"configurable": {"github_token": "[redacted]", "a": 1},
                       "context": {"github_token": "[redacted]", "nested": {"api_key": "[redacted]"}}},
        })
    );
}

#[tokio::test]
async fn a_credential_in_the_metadata_comes_before_an_unknown_model() {
    let check = |body: Value| parse(&body).unwrap().check(|name| name == "known");
    for (body, status, detail) in [
        (
            json!({"metadata": {"auth_token": "hunter2"}, "context": {"model_name": "x"}}),
            422,
            RESERVED_METADATA,
        ),
        (json!({"context": {"model_name": "x"}}), 400, "Model 'x' is not in the configured model allowlist"),
        (
            json!({"config": {"configurable": {"model_name": "y"}}}),
            400,
            "Model 'y' is not in the configured model allowlist",
        ),
        (json!({"context": {"model_name": 7}}), 400, "Model '7' is not in the configured model allowlist"),
    ] {
        let error = check(body.clone()).unwrap_err();
        assert_eq!(answer(error).await, (status, json!({"detail": detail})), "{body}");
    }
    for body in [
        json!({}),
        json!({"context": {"model_name": null}}),
        json!({"context": {"model_name": "known"}, "metadata": {"nested": {"auth_token": 1}, "other": "auth_token"}}),
    ] {
        assert!(check(body.clone()).is_ok(), "{body}");
    }
}

#[test]
fn a_stateless_request_names_its_thread_in_the_configuration() {
    let body = parse(&json!({"config": {"configurable": {"thread_id": "t-1"}}})).unwrap();
    assert_eq!(body.thread_id(), Some("t-1"));
    assert_eq!(parse(&json!({"config": {"configurable": {"thread_id": null}}})).unwrap().thread_id(), None);
}

#[test]
fn messages_are_normalised_and_cannot_forge_what_the_gateway_sets() {
    let run = request(&json!({"input": {
        "messages": ["hi", {"role": "assistant", "content": "ho", "id": "m2",
                            "additional_kwargs": {"run_id": "forged", "svc_seq": 4, "files": [1]}}],
        "title": "T",
    }}));
    let RunInput::Values(input) = run.input else { panic!("{:?}", run.input) };
    let id = &input["messages"][0]["id"];
    assert!(id.as_str().is_some_and(|id| !id.is_empty()));
    assert_eq!(
        Value::Object(input.clone()),
        json!({
            "messages": [{"type": "human", "content": "hi", "id": id},
                         {"type": "ai", "content": "ho", "id": "m2", "additional_kwargs": {"files": [1]}}],
            "title": "T",
        })
    );
}

#[test]
fn one_message_is_a_list_and_no_messages_are_no_write() {
    for (input, expected) in [
        (json!({"messages": "hi"}), json!(["hi"])),
        (json!({"messages": {"type": "human", "content": "hi"}}), json!(["hi"])),
        (json!({"messages": []}), json!([])),
    ] {
        let RunInput::Values(values) = request(&json!({"input": input})).input else { panic!("{input}") };
        let texts: Vec<_> =
            values["messages"].as_array().unwrap().iter().map(|m| m["content"].clone()).collect();
        assert_eq!(json!(texts), expected);
    }
    for input in [json!({}), json!({"messages": null})] {
        assert_eq!(request(&json!({"input": input})).input, RunInput::Values(Map::new()), "{input}");
    }
}

#[tokio::test]
async fn a_malformed_message_is_named_by_its_place() {
    for (messages, place) in [
        (json!(["ok", {"type": "nonsense", "content": "x"}]), 1),
        (json!([{"content": []}, 3]), 1),
        (json!([{"type": "human"}]), 0),
        (json!({"type": "human"}), 0),
        (json!(7), 0),
    ] {
        let error = try_request(&json!({"input": {"messages": messages}}), LIMITS).unwrap_err();
        let (status, body) = answer(error).await;
        let prefix = format!("Invalid message at input.messages[{place}]: ");
        let detail = body["detail"].as_str().unwrap();
        assert!(
            status == 400 && detail.starts_with(&prefix) && detail.len() > prefix.len(),
            "{messages}: {body}"
        );
    }
}

#[test]
fn tags_reach_the_run_and_other_configuration_is_refused() {
    let run = request(&json!({"config": {"tags": ["a", "b"]}}));
    assert_eq!(run.config.tags, ["a", "b"]);
    let problems = parse(&json!({"config": {"max_concurrency": 3}})).unwrap_err();
    assert_eq!(problems[0]["loc"], json!(["body", "config", "max_concurrency"]));
}

#[test]
fn the_checkpoint_object_wins_over_the_ids_beside_it() {
    let other = ID.replace("01890a5d", "01890a5e");
    let third = ID.replace("01890a5d", "01890a5f");
    let configurable = json!({"configurable": {"checkpoint_id": third}});
    for (body, expected) in [
        (json!({"checkpoint_id": ID}), Some(ID)),
        (json!({"checkpoint": {"checkpoint_id": ID}, "checkpoint_id": other}), Some(ID)),
        (
            json!({"checkpoint": {"thread_id": "t", "checkpoint_ns": "", "checkpoint_id": ID, "checkpoint_map": {}}}),
            Some(ID),
        ),
        (
            json!({"checkpoint": {"checkpoint_id": null, "thread_id": null}, "checkpoint_id": other}),
            Some(&*other),
        ),
        (json!({"checkpoint": {}, "config": configurable}), Some(&*third)),
        (json!({"checkpoint_id": ID, "config": configurable}), Some(ID)),
        (json!({"checkpoint": {"checkpoint_ns": "", "checkpoint_map": null}}), None),
    ] {
        let selected = request(&body).checkpoint;
        assert_eq!(selected, expected.map(|id| id.parse().unwrap()), "{body}");
    }
}

#[tokio::test]
async fn a_bad_selector_is_a_400_and_one_that_names_nothing_a_404() {
    let mismatch = "checkpoint thread_id does not match request thread_id";
    let nested = "checkpoint checkpoint_ns must be empty: a run starts from the thread's own state";
    for (body, status, detail) in [
        (json!({"checkpoint": "x"}), 400, "checkpoint must be an object"),
        (json!({"checkpoint": [], "checkpoint_id": ID}), 400, "checkpoint must be an object"),
        (json!({"checkpoint": {"thread_id": "other", "checkpoint_id": ID}}), 400, mismatch),
        (json!({"checkpoint": {"thread_id": "other"}}), 400, mismatch),
        (json!({"checkpoint": {"thread_id": 7}}), 400, "checkpoint thread_id must be a string"),
        (json!({"checkpoint": {"checkpoint_id": 7}}), 400, "checkpoint checkpoint_id must be a string"),
        (json!({"checkpoint": {"checkpoint_ns": "sub", "checkpoint_id": ID}}), 400, nested),
        (json!({"checkpoint": {"checkpoint_ns": "sub"}}), 400, nested),
        (json!({"checkpoint_id": "nope"}), 404, "Checkpoint nope not found"),
        (json!({"checkpoint": {"checkpoint_id": "nope"}}), 404, "Checkpoint nope not found"),
        (json!({"checkpoint_id": ""}), 404, "Checkpoint not found"),
    ] {
        let error = try_request(&body, LIMITS).unwrap_err();
        assert_eq!(answer(error).await, (status, json!({"detail": detail})), "{body}");
    }
    let both = json!({"input": {"messages": [3]}, "checkpoint": "x"});
    let (_, body) = answer(try_request(&both, LIMITS).unwrap_err()).await;
    assert!(
        body["detail"].as_str().unwrap().starts_with("Invalid message"),
        "messages are checked first: {body}"
    );
}

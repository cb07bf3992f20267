//! What the context of a request asks for.

use super::*;

/// Each place of a context's keys, with its path.
fn places(key: &str, value: &Value) -> [(Value, Value); 3] {
    [
        (json!({"context": {key: value}}), json!(["body", "context", key])),
        (json!({"config": {"context": {key: value}}}), json!(["body", "config", "context", key])),
        (json!({"config": {"configurable": {key: value}}}), json!(["body", "config", "configurable", key])),
    ]
}

#[test]
fn known_keys_have_types_and_another_agent_is_refused_by_name() {
    for (key, value, kind) in [
        ("is_plan_mode", json!("yes"), "bool_type"),
        ("is_bootstrap", json!(1), "bool_type"),
        ("agent_name", json!("researcher"), "unknown_assistant"),
        ("agent_name", json!(7), "unknown_assistant"),
        ("mode", json!(1), "string_type"),
        ("reasoning_effort", json!(["high"]), "string_type"),
        ("thinking_enabled", json!("true"), "bool_type"),
        ("disable_clarification", json!(1), "bool_type"),
    ] {
        for (body, place) in places(key, &value) {
            let problems = parse(&body).map(drop).unwrap_err();
            let [problem] = problems.as_array().unwrap().as_slice() else { panic!("{body}: {problems}") };
            assert_eq!(
                (&problem["type"], &problem["loc"], &problem["input"]),
                (&json!(kind), &place, &value),
                "{body}"
            );
        }
    }
    for (key, value) in [
        ("is_plan_mode", json!(true)),
        ("is_bootstrap", Value::Null),
        ("agent_name", json!("lead-agent")),
        ("mode", json!("ultra")),
        ("secrets", json!({})),
        ("of_the_caller", json!([1])),
    ] {
        for (body, _) in places(key, &value) {
            assert!(parse(&body).is_ok(), "{body}");
        }
    }
}

#[test]
fn credentials_are_refused_and_not_repeated() {
    for (body, place) in &places("secrets", &json!({"ERP": "hunter2"}))[..2] {
        let problems = parse(body).map(drop).unwrap_err();
        assert_eq!((&problems[0]["type"], &problems[0]["loc"]), (&json!("unsupported"), place), "{body}");
        assert!(!problems.to_string().contains("hunter2"), "{problems}");
    }
}

#[test]
fn a_run_asks_nothing_if_its_context_or_its_internal_caller_says_so() {
    let forbids = |context: Value, internal_caller: bool| {
        let limits = RunLimits { internal_caller, ..LIMITS };
        try_request(&json!({ "context": context }), limits).unwrap().config.forbids_questions()
    };
    assert!(forbids(json!({"disable_clarification": true}), false));
    assert!(!forbids(json!({"disable_clarification": false}), false));
    assert!(!forbids(json!({}), false));
    assert!(!forbids(json!({"non_interactive": true}), false), "for internal callers only");
    assert!(forbids(json!({"non_interactive": true}), true));
    for (key, internal_caller) in [("disable_clarification", false), ("non_interactive", true)] {
        let limits = RunLimits { internal_caller, ..LIMITS };
        for (body, place) in places(key, &json!(true)) {
            let config = try_request(&body, limits).unwrap().config;
            assert!(config.forbids_questions(), "{place}");
            assert!(!config.configurable.contains_key(key), "{place}");
        }
    }
    let body = json!({"config": {"configurable": {"non_interactive": true}}});
    assert!(!try_request(&body, LIMITS).unwrap().config.forbids_questions(), "for internal callers only");
}

//! What a request says about delegation.

use super::*;

#[test]
fn delegation_is_off_until_it_is_asked_for_and_its_numbers_are_clamped() {
    let of = |context: Value| {
        let run = request(&json!({ "context": context }));
        let Delegation { enabled, max_concurrent, max_total } = run.delegation;
        (enabled, max_concurrent, max_total)
    };
    for (context, expected) in [
        (json!({}), (false, 3, 6)),
        (
            json!({"subagent_enabled": null, "max_concurrent_subagents": null, "max_total_subagents": null}),
            (false, 3, 6),
        ),
        (json!({"subagent_enabled": true}), (true, 3, 6)),
        (
            json!({"subagent_enabled": false, "max_concurrent_subagents": 1, "max_total_subagents": 1}),
            (false, 1, 1),
        ),
        (
            json!({"subagent_enabled": true, "max_concurrent_subagents": 0, "max_total_subagents": 0}),
            (true, 1, 1),
        ),
        (json!({"max_concurrent_subagents": 64, "max_total_subagents": 50}), (false, 3, 50)),
        (json!({"max_concurrent_subagents": 65, "max_total_subagents": 51}), (false, 3, 50)),
        (json!({"max_concurrent_subagents": 2.0, "max_total_subagents": -1e300}), (false, 2, 1)),
        (json!({"max_concurrent_subagents": u64::MAX, "max_total_subagents": i64::MIN}), (false, 3, 1)),
    ] {
        assert_eq!(of(context.clone()), expected, "{context}");
    }
    let run = request(&json!({
        "config": {"configurable": {"subagent_enabled": true}, "context": {"max_total_subagents": 2}},
        "context": {"subagent_enabled": false, "max_total_subagents": 9, "max_concurrent_subagents": 2},
    }));
    assert_eq!(run.delegation, Delegation { enabled: true, max_concurrent: 2, max_total: 2 });
}

#[test]
fn keys_of_delegation_of_another_type_are_refused_by_name_wherever_they_are() {
    for (key, values, kind) in [
        ("subagent_enabled", vec![json!("true"), json!(1), json!(0), json!([]), json!("")], "bool_type"),
        ("max_concurrent_subagents", vec![json!("3"), json!(true), json!(2.5), json!({})], "int_type"),
        ("max_total_subagents", vec![json!("6"), json!(false), json!(6.5), json!([6])], "int_type"),
    ] {
        for value in values {
            for (body, place) in [
                (json!({"context": {key: value}}), json!(["body", "context", key])),
                (json!({"config": {"context": {key: value}}}), json!(["body", "config", "context", key])),
                (
                    json!({"config": {"configurable": {key: value}}}),
                    json!(["body", "config", "configurable", key]),
                ),
            ] {
                let problems = parse(&body).map(drop).unwrap_err();
                assert_eq!(
                    (
                        problems.as_array().unwrap().len(),
                        &problems[0]["type"],
                        &problems[0]["loc"],
                        &problems[0]["input"]
                    ),
                    (1, &json!(kind), &place, &value),
                    "{body}"
                );
            }
        }
    }
}

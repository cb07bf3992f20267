//! Commands: an answer to what the thread waits for, a change of its state, where it goes on.

use super::*;

#[test]
fn an_answer_is_the_input() {
    let resumed = |answer: &Value| match request(&json!({"command": {"resume": answer}, "input": null})).input
    {
        RunInput::Resume(resume) => {
            assert_eq!(resume.value, *answer);
            resume.messages
        }
        other => panic!("{answer}: {other:?}"),
    };
    for opaque in [
        json!({"choice": 1}),
        json!(true),
        json!(["a"]),
        json!({"messages": null}),
        json!({"messages": [], "x": 1}),
    ] {
        assert_eq!(resumed(&opaque), None, "{opaque}");
    }
    let sent =
        json!({"role": "user", "content": "blue", "id": "m", "additional_kwargs": {"run_id": "forged"}});
    for answer in
        [json!("blue"), json!({"messages": "blue"}), json!({"messages": [sent]}), json!({"messages": sent})]
    {
        let messages = resumed(&answer).unwrap();
        assert_eq!(messages.len(), 1);
        assert_eq!(
            (&messages[0]["type"], &messages[0]["content"]),
            (&json!("human"), &json!("blue")),
            "{answer}"
        );
        assert!(messages[0]["id"].is_string() && messages[0]["additional_kwargs"].get("run_id").is_none());
    }
    let nothing = request(&json!({"command": {"resume": null}}));
    assert_eq!(nothing.input, RunInput::Continue);
}

#[test]
fn a_command_changes_the_state_goes_to_a_node_and_answers() {
    let change = |command: Value| match request(&json!({"command": command})).input {
        RunInput::Change(change) => change,
        other => panic!("{command}: {other:?}"),
    };
    let update = map(json!({"title": "T", "todos": [1]}));
    for sent in [json!({"title": "T", "todos": [1]}), json!([["title", "T"], ["todos", [1]]])] {
        let expected = Change { update: update.clone(), goto: None, resume: None };
        assert_eq!(change(json!({"update": sent, "goto": null, "resume": null})), expected);
    }
    let messages = change(json!({"update": {"messages": "hi"}})).update["messages"].clone();
    assert_eq!((&messages[0]["type"], &messages[0]["content"]), (&json!("human"), &json!("hi")));
    for (sent, node) in [
        (json!("model"), Some("model".into())),
        (json!(["tools"]), Some("tools".into())),
        (json!("__end__"), None),
    ] {
        let expected = Change { update: Map::new(), goto: Some(node), resume: None };
        assert_eq!(change(json!({ "goto": sent })), expected);
    }
    assert_eq!(request(&json!({"command": {"goto": []}})).input, RunInput::Continue);
    let all = change(json!({"update": {"title": "T"}, "goto": "model", "resume": "yes"}));
    assert_eq!((all.goto, all.resume.unwrap().value), (Some(Some("model".into())), json!("yes")));
    for (body, kind, loc) in [
        (json!({"command": {"goto": "modle"}}), "literal_error", json!(["body", "command", "goto"])),
        (json!({"command": {"goto": ["model", "tools"]}}), "value_error", json!(["body", "command", "goto"])),
        (
            json!({"command": {"goto": [{"node": "model", "input": 1}]}}),
            "literal_error",
            json!(["body", "command", "goto"]),
        ),
        (json!({"command": {"update": 3}}), "dict_type", json!(["body", "command", "update"])),
        (json!({"command": {"update": [["a"]]}}), "dict_type", json!(["body", "command", "update"])),
        (json!({"command": {"graph": "PARENT"}}), "extra_forbidden", json!(["body", "command", "graph"])),
        (json!({"command": {"resume": 1}, "input": {}}), "value_error", json!(["body", "command"])),
        (json!({"command": {"update": {}}, "input": {}}), "value_error", json!(["body", "command"])),
    ] {
        let problems = parse(&body).unwrap_err();
        assert_eq!((&problems[0]["type"], &problems[0]["loc"]), (&json!(kind), &loc), "{body}");
    }
}

#[tokio::test]
async fn a_malformed_message_in_an_answer_is_a_400_with_its_place() {
    let error = try_request(&json!({"command": {"resume": {"messages": ["ok", 3]}}}), LIMITS).unwrap_err();
    let (status, body) = answer(error).await;
    let detail = body["detail"].as_str().unwrap();
    assert!(status == 400 && detail.starts_with("Invalid message at command.resume.messages[1]: "), "{body}");
}

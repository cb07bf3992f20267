//! Every field of a request is done, or refused by name.

use serde_json::{Value, json};

use crate::support::{ALL, Answer, Gateway, MODES, Setup, id, question, says, texts};

/// A model that calls `ls` once when asked for tools, and answers.
fn script() -> Value {
    json!({"rules": [
        {"when": {"contains": ["tools"]}, "answers": [{"tool_calls": [{"name": "ls"}]}, {"text": "done"}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

async fn run(gateway: &Gateway, body: Value) -> Value {
    gateway.post("/api/threads/t/runs/wait", body).await.ok()
}

#[tokio::test]
async fn a_limit_that_is_clamped_may_be_any_number_above() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    for limit in [json!(u64::MAX), json!(1e300)] {
        let entries = gateway.post("/api/threads/t/history", json!({ "limit": limit })).await.ok();
        assert_eq!(entries.as_array().unwrap().len(), 1, "{limit}");
    }
    assert_eq!(gateway.get("/api/threads/t/runs?limit=18446744073709551615").await.ok(), json!([]));
}

#[tokio::test]
async fn a_command_updates_the_state_through_its_reducers() {
    for (backend, mode) in ALL {
        let gateway = Setup { script: script(), ..Setup::on(backend, mode) }.start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        let update = json!({"title": "Mine", "messages": [says("ai", "a", "by hand")], "artifacts": ["x"]});
        run(&gateway, json!({"command": {"update": update}})).await;
        let state = gateway.state("t").await;
        assert_eq!(
            texts(&state),
            ["one", "You said: one", "by hand"],
            "{backend} {mode}: appended, and no model ran"
        );
        assert_eq!((&state["values"]["title"], &state["next"]), (&json!("Mine"), &json!([])));
        // An update of a channel that does not exist fails the run and names the channel.
        let failed = run(&gateway, json!({"command": {"update": {"nonsense": 1}}})).await;
        assert_eq!(failed["status"], "error");
        assert!(failed["error"].as_str().unwrap().contains("nonsense"), "{failed}");
    }
}

#[tokio::test]
async fn a_command_goes_to_a_node() {
    for mode in MODES {
        let gateway = Setup { script: script(), ..Setup::on("sqlite", mode) }.start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        // The model answers what the update added.
        let ask = json!({"messages": [says("human", "h", "two")]});
        run(&gateway, json!({"command": {"update": ask, "goto": "model"}})).await;
        assert_eq!(texts(&gateway.state("t").await)[2..], ["two", "You said: two"], "{mode}");
        // A run that waits before its tools is ended.
        let mut stopping = question("tools");
        stopping["interrupt_before"] = json!(["tools"]);
        run(&gateway, stopping.clone()).await;
        assert_eq!(gateway.state("t").await["next"], json!(["tools"]));
        run(&gateway, json!({"command": {"goto": "__end__"}})).await;
        let ended = gateway.state("t").await;
        assert_eq!((&ended["next"], texts(&ended).len()), (&json!([]), 6));
        // And sent there again: the call is made, and answered.
        run(&gateway, json!({"command": {"goto": "tools"}})).await;
        let state = gateway.state("t").await;
        assert_eq!((texts(&state).len(), &state["next"]), (8, &json!([])));
        assert_eq!(state["values"]["messages"][6]["type"], "tool");
        assert_eq!(texts(&state)[7], "done");
    }
}

/// The rest of the run goes on after an update, at the node where it stopped, and not into the same breakpoint.
#[tokio::test]
async fn an_update_at_a_breakpoint_changes_the_state_and_the_run_goes_on() {
    for mode in MODES {
        let gateway = Setup { script: script(), ..Setup::on("memory", mode) }.start().await;
        gateway.create("t").await;
        let mut stopping = question("tools");
        stopping["interrupt_before"] = json!(["tools"]);
        run(&gateway, stopping).await;
        let body =
            json!({"command": {"update": {"title": "Seen"}, "resume": "yes"}, "interrupt_before": ["tools"]});
        run(&gateway, body).await;
        let state = gateway.state("t").await;
        assert_eq!((texts(&state).last(), &state["next"]), (Some(&"done"), &json!([])));
        assert_eq!(state["values"]["title"], "Seen");
    }
}

#[tokio::test]
async fn a_history_begins_at_its_checkpoint() {
    for (backend, mode) in ALL {
        let gateway = Setup::on(backend, mode).start().await;
        gateway.create("t").await;
        for text in ["one", "two"] {
            gateway.ask("t", text).await;
        }
        let whole = gateway.history("t").await;
        let page = async |body: Value| gateway.post("/api/threads/t/history", body).await.ok();
        for (index, entry) in whole.iter().enumerate() {
            let found = page(json!({"limit": 100, "checkpoint": entry["checkpoint"]})).await;
            let ids: Vec<&str> = found.as_array().unwrap().iter().map(id).collect();
            let expected: Vec<&str> = whole[index..].iter().map(id).collect();
            assert_eq!(ids, expected, "{backend} {mode}");
        }
        // The older of the two bounds counts.
        let (newer, older) = (&whole[1]["checkpoint"], id(&whole[4]));
        let found = page(json!({"checkpoint": newer, "before": older, "limit": 1})).await;
        assert_eq!(id(&found[0]), older);
        let missing = json!({"checkpoint_id": "0199aaaa-0000-7000-8000-000000000000"});
        let refused = gateway.post("/api/threads/t/history", json!({ "checkpoint": missing })).await;
        refused.refused(404, "Checkpoint 0199aaaa-0000-7000-8000-000000000000 not found");
        let other = json!({"checkpoint": {"thread_id": "other"}});
        let refused = gateway.post("/api/threads/t/history", other).await;
        refused.refused(400, "checkpoint thread_id does not match request thread_id");
    }
}

#[tokio::test]
async fn a_selection_returns_its_fields_and_no_others() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    gateway.ask("t", "one").await;
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let state = gateway.get("/api/threads/t/state?select=values&select=next").await.ok();
    assert_eq!(keys(&state), ["next", "values"]);
    let at = format!("/api/threads/t/state/{}?select=checkpoint_id", id(&gateway.state("t").await));
    assert_eq!(keys(&gateway.get(&at).await.ok()), ["checkpoint_id"]);
    let state =
        gateway.post("/api/threads/t/state/checkpoint", json!({"select": ["next"], "subgraphs": true})).await;
    assert_eq!(keys(&state.ok()), ["next"]);
    let history = gateway.post("/api/threads/t/history", json!({"select": ["checkpoint_id"]})).await.ok();
    assert_eq!(keys(&history[0]), ["checkpoint_id"]);
    // A single key of the values is what the Python SDK names; the whole of them goes first.
    let whole = gateway.state("t").await["values"].clone();
    for (select, expected) in [
        (json!(["values.title", "next"]), json!({"values": {"title": "one"}, "next": []})),
        (json!(["values.messages", "values.none"]), json!({"values": {"messages": whole["messages"]}})),
        (json!(["values.title", "values"]), json!({ "values": whole })),
    ] {
        let names: Vec<&str> = select.as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
        let path = format!("/api/threads/t/state?select={}", names.join("&select="));
        assert_eq!(gateway.get(&path).await.ok(), expected, "{path}");
        let body = json!({ "select": select });
        assert_eq!(gateway.post("/api/threads/t/state/checkpoint", body).await.ok(), expected, "{select}");
    }
    let history = gateway.post("/api/threads/t/history", json!({"select": ["values.title"]})).await.ok();
    assert_eq!(history[0], json!({"values": {"title": "one"}}));
    for select in ["run_id,status", "[\"run_id\",\"status\"]"] {
        let path = format!(
            "/api/threads/t/runs?select={}",
            select.replace('"', "%22").replace('[', "%5B").replace(']', "%5D")
        );
        assert_eq!(keys(&gateway.get(&path).await.ok()[0]), ["run_id", "status"]);
    }
    let found = gateway.post("/api/threads/search", json!({"select": ["thread_id", "values"]})).await.ok();
    assert_eq!(found[0], json!({"thread_id": "t", "values": {"title": "one"}}));
    let found = gateway.post("/api/assistants/search", json!({"select": ["graph_id"]})).await.ok();
    assert_eq!(found, json!([{"graph_id": "lead_agent"}]));
    for (answer, loc) in [
        (gateway.get("/api/threads/t/state?select=valeus").await, json!(["query", "select", 0])),
        (gateway.get("/api/threads/t/state?select=values.").await, json!(["query", "select", 0])),
        (
            gateway.post("/api/threads/search", json!({"select": ["values.title"]})).await,
            json!(["body", "select", 0]),
        ),
        (
            gateway.post("/api/threads/search", json!({"select": ["config"]})).await,
            json!(["body", "select", 0]),
        ),
        (
            gateway.post("/api/threads/t/history", json!({"select": ["x"]})).await,
            json!(["body", "select", 0]),
        ),
    ] {
        answer.invalid("literal_error", &loc);
    }
}

#[tokio::test]
async fn a_thread_is_created_with_the_state_that_its_supersteps_make() {
    for (backend, mode) in ALL {
        let gateway = Setup::on(backend, mode).start().await;
        let step =
            |messages: Value| json!({"updates": [{"values": {"messages": messages}, "as_node": "model"}]});
        let supersteps = json!([
            step(json!([says("human", "h1", "one"), says("ai", "a1", "1")])),
            {"updates": [
                {"values": {"messages": [says("human", "h2", "two")]}, "as_node": "first"},
                {"command": {"update": {"messages": [says("ai", "a2", "2")], "title": "Old"}}, "as_node": "second"},
            ]},
            step(json!([{"type": "remove", "id": "a1"}])),
        ]);
        let body = json!({"thread_id": "t", "supersteps": supersteps, "metadata": {"from": "there"}});
        assert_eq!(gateway.post("/api/threads", body.clone()).await.ok()["metadata"]["from"], "there");
        let gateway = if backend == "memory" { gateway } else { gateway.reopen(mode).await };
        let state = gateway.state("t").await;
        assert_eq!(texts(&state), ["one", "two", "2"], "{backend} {mode}");
        assert_eq!((&state["values"]["title"], &state["next"]), (&json!("Old"), &json!([])));
        let history = gateway.history("t").await;
        let steps: Vec<_> = history.iter().map(|entry| entry["metadata"]["step"].as_i64().unwrap()).collect();
        assert_eq!(steps, [2, 1, 0, -1]);
        let found = gateway.post("/api/threads/search", json!({"values": {"title": "Old"}})).await.ok();
        assert_eq!(found[0]["thread_id"], "t", "the title is in its record");
        // It goes on like any other thread.
        gateway.ask("t", "three").await;
        assert_eq!(texts(&gateway.state("t").await), ["one", "two", "2", "three", "You said: three"]);
        // Its state is not made of these supersteps.
        gateway.post("/api/threads", body.clone()).await.refused(409, "Thread t already exists");
        let mut lenient = body;
        lenient["if_exists"] = json!("do_nothing");
        assert_eq!(gateway.post("/api/threads", lenient).await.ok()["thread_id"], "t");
    }
}

#[tokio::test]
async fn a_thread_is_created_with_ten_thousand_supersteps_at_most() {
    let gateway = Setup::default().start().await;
    let many = vec![json!({"updates": []}); 10_001];
    let large = json!([{"updates": vec![json!({"as_node": "n"}); 1001]}]);
    for (supersteps, loc) in
        [(json!(many), json!(["body", "supersteps"])), (large, json!(["body", "supersteps", 0, "updates"]))]
    {
        let body = json!({"thread_id": "t", "supersteps": supersteps});
        gateway.post("/api/threads", body).await.invalid("too_long", &loc);
    }
    assert_eq!(gateway.get("/api/threads/t").await.status, 404);
}

#[tokio::test]
async fn supersteps_that_cannot_be_applied_leave_no_thread() {
    let gateway = Setup::on("sqlite", "delta").start().await;
    let rows = gateway.rows().await;
    let good = json!({"updates": [{"values": {"title": "T"}, "as_node": "n"}]});
    let with = |second: Value| json!({"thread_id": "t", "supersteps": [good, {"updates": second}]});
    for (second, status, part) in [
        (json!([{"values": {"nonsense": 1}, "as_node": "n"}]), 422, "nonsense"),
        (
            json!([{"values": {"messages": [{"type": "remove", "id": "gone"}]}, "as_node": "n"}]),
            422,
            "supersteps[1]: ",
        ),
        (
            json!([{"values": {"messages": [{"type": "x"}]}, "as_node": "n"}]),
            400,
            "supersteps[1].messages[0]",
        ),
        (
            json!([{"values": {"title": "a"}, "as_node": "n"}, {"values": {"title": "b"}, "as_node": "m"}]),
            422,
            "title",
        ),
        (json!([{"values": {}}]), 422, "as_node"),
        (json!([{"command": {"goto": "model"}, "as_node": "n"}]), 422, "command"),
        (json!([{"values": {}, "as_nod": "n", "as_node": "n"}]), 422, "as_nod"),
    ] {
        let refused = gateway.post("/api/threads", with(second.clone())).await;
        assert_eq!(refused.status, status, "{second}: {}", refused.body);
        assert!(refused.body.to_string().contains(part), "{second}: {}", refused.body);
        assert_eq!(gateway.get("/api/threads/t").await.status, 404);
    }
    assert_eq!(gateway.rows().await, rows);
}

#[tokio::test]
async fn a_joined_stream_has_the_frames_of_its_modes() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    let mut body = question("one");
    body["stream_mode"] = json!(["values", "updates", "messages-tuple"]);
    let run = gateway.post("/api/threads/t/runs", body).await.ok();
    let run = run["run_id"].as_str().unwrap();
    gateway.join("t", run).await;
    let names = async |query: &str| {
        let text = gateway.get(&format!("/api/threads/t/runs/{run}/stream{query}")).await.ok();
        let mut names: Vec<String> = text
            .as_str()
            .unwrap()
            .lines()
            .filter_map(|line| line.strip_prefix("event: "))
            .map(str::to_owned)
            .collect();
        names.dedup();
        names
    };
    assert!(names("").await.iter().any(|name| name == "values"));
    assert_eq!(names("?stream_mode=updates").await, ["metadata", "updates", "end"]);
    assert_eq!(
        names("?stream_mode=%5B%22messages%22%5D").await,
        ["metadata", "messages", "end"],
        "as JavaScript sends it"
    );
    let both = names("?stream_mode=updates&stream_mode=messages").await;
    assert!(
        both.iter().all(|name| name != "values") && both.contains(&"messages".to_owned()),
        "as Python sends it"
    );
    let refused = gateway.get(&format!("/api/threads/t/runs/{run}/stream?stream_mode=valeus")).await;
    refused.invalid("unsupported_stream_mode", &json!(["query", "stream_mode"]));
}

#[tokio::test]
async fn a_client_that_wants_no_body_gets_none() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    let request = axum::http::Request::builder().method("PATCH").uri("/api/threads/t");
    let request = request.header("prefer", "return=minimal").header("content-type", "application/json");
    let answer = gateway.send(request.body(json!({"metadata": {"a": 1}}).to_string().into()).unwrap()).await;
    assert_eq!((answer.status, answer.body), (204, Value::Null));
    assert_eq!(gateway.get("/api/threads/t").await.ok()["metadata"], json!({"a": 1}));
}

/// A misspelt name is never taken for another one.
#[tokio::test]
async fn what_the_gateway_does_not_do_is_refused_by_name() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    let refused = |answer: &Answer, field: &str| {
        assert_eq!(answer.status, 422, "{field}: {}", answer.body);
        let problems = answer.body["detail"].as_array().unwrap();
        assert!(problems.iter().any(|p| p["loc"][1] == field), "{field}: {}", answer.body);
    };
    for (method, path, field, value) in [
        ("POST", "/api/threads/t/runs", "assistant_id", json!("laed_agent")),
        ("POST", "/api/threads/t/runs/stream", "assistant_id", json!("laed_agent")),
        ("POST", "/api/runs/wait", "assistant_id", json!("laed_agent")),
        ("POST", "/api/threads", "assistant_id", json!("laed_agent")),
        ("POST", "/api/threads/t/runs", "interrupt_before", json!(["modle"])),
        ("POST", "/api/threads/t/runs", "webhook", json!("http://localhost")),
        ("POST", "/api/threads/t/runs", "langsmith_tracer", json!({})),
        ("POST", "/api/threads", "ttl", json!({"ttl": 3})),
        ("PATCH", "/api/threads/t", "ttl", json!(3)),
        ("PATCH", "/api/threads/t", "metdata", json!({})),
        ("POST", "/api/threads/search", "extract", json!({"a": "values.x"})),
        ("POST", "/api/threads/search", "values", json!({"messages": []})),
        ("POST", "/api/threads/search", "sort_by", json!("state_updated_at")),
        ("POST", "/api/threads/count", "values", json!({"messages": []})),
        ("POST", "/api/threads/count", "limit", json!(3)),
        ("POST", "/api/threads/t/state", "values_", json!({})),
        ("POST", "/api/threads/t/history", "checkpoint_id", json!("x")),
        ("POST", "/api/threads/t/compact", "agent_name", json!("other")),
    ] {
        let body = Some(json!({ field: value }));
        let answer = gateway.call(method.parse().unwrap(), path, body).await;
        refused(&answer, field);
    }
    for (path, field) in [
        ("/api/threads/t?include=ttl", "include"),
        ("/api/threads/t/goal?x=1", "x"),
        ("/health?x", "x"),
        ("/api/threads/t/runs?limits=3", "limits"),
        ("/api/models?page=2", "page"),
    ] {
        refused(&gateway.get(path).await, field);
    }
    assert_eq!(gateway.history("t").await.len(), 1, "nothing was written");
    let elsewhere = json!({"checkpoint": {"checkpoint_ns": "sub", "checkpoint_id": "0199aaaa-0000-7000-8000-000000000000"}});
    let refused = gateway.post("/api/threads/t/runs", elsewhere).await;
    refused.refused(400, "checkpoint checkpoint_ns must be empty: a run starts from the thread's own state");
}

#[tokio::test]
async fn tags_are_in_the_metadata_of_message_frames() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    let mut body = question("one");
    body["config"] = json!({"tags": ["a", "b"]});
    body["stream_mode"] = json!(["messages-tuple"]);
    let text = gateway.post("/api/threads/t/runs/stream", body).await.ok();
    let frames: Vec<Value> = text
        .as_str()
        .unwrap()
        .lines()
        .filter_map(|line| line.strip_prefix("data: ["))
        .map(|rest| serde_json::from_str(&format!("[{rest}")).unwrap())
        .collect();
    assert!(
        !frames.is_empty() && frames.iter().all(|frame| frame[1]["tags"] == json!(["a", "b"])),
        "{frames:?}"
    );
}

//! The catalog of subagents: who sees and changes what, and where definitions are kept.

use axum::body::Body;
use axum::http::{Method, Request};
use serde_json::{Value, json};
use threadkeep_config::{KeyFile, Role};
use threadkeep_testing::Log;

use crate::support::{Answer, DURABLE, Gateway, Setup, question};

const PATH: &str = "/api/subagents";

/// A gateway whose configuration has these sections besides its own.
fn configured(sections: Value) -> Setup {
    Setup { sections, ..Setup::default() }
}

fn new(name: &str) -> Value {
    json!({"name": name, "description": "d", "system_prompt": "p"})
}

async fn put(gateway: &Gateway, name: &str, body: Value) -> Answer {
    gateway.call(Method::PUT, &format!("{PATH}/{name}"), Some(body)).await
}

async fn list(gateway: &Gateway) -> Vec<Value> {
    gateway.get(PATH).await.ok()["subagents"].as_array().unwrap().clone()
}

/// The subagents with this name.
async fn listed(gateway: &Gateway, name: &str) -> Vec<Value> {
    list(gateway).await.into_iter().filter(|one| one["name"] == name).collect()
}

fn names(list: &[Value]) -> Vec<(&str, &str)> {
    list.iter().map(|one| (one["name"].as_str().unwrap(), one["source"].as_str().unwrap())).collect()
}

fn created(answer: Answer) -> Value {
    assert_eq!(answer.status, 201, "{}", answer.body);
    answer.body
}

#[tokio::test]
async fn the_list_has_every_subagent_by_name_with_its_effective_or_written_values() {
    let gateway = configured(json!({"subagents": {
        "max_turns": 9,
        "custom_agents": {
            "zed": {"description": "z", "system_prompt": "zp", "tools": ["ls"], "max_turns": 3},
            "bash": {"description": "b", "system_prompt": "bp"},
        },
        "agents": {
            "general-purpose": {"timeout_seconds": 60, "skills": []},
            "zed": {"max_turns": 5, "model": "m", "timeout_seconds": null},
        },
    }}))
    .start()
    .await;
    created(gateway.post(PATH, new("alpha")).await);
    let list = list(&gateway).await;
    assert_eq!(
        names(&list),
        [
            ("alpha", "managed"),
            ("bash", "builtin"),
            ("bash", "config"),
            ("general-purpose", "builtin"),
            ("zed", "config")
        ]
    );
    assert_eq!(
        list[0],
        json!({
            "name": "alpha", "display_name": null, "description": "d", "system_prompt": "p", "tools": null,
            "disallowed_tools": ["ask_clarification", "present_files", "task"], "skills": null, "model": "inherit",
            "max_turns": 50, "timeout_seconds": 900, "enabled": true, "source": "managed", "editable": true,
            "conflict": false, "config_overrides": {},
        })
    );
    let of = |index: usize, key: &str| list[index][key].clone();
    for (index, turns, seconds, conflict, overrides) in [
        (1, 9, 1800, false, json!({})),
        (2, 50, 900, true, json!({})),
        (3, 9, 60, false, json!({"timeout_seconds": 60, "skills": []})),
        (4, 3, 900, false, json!({"max_turns": 5, "model": "m"})),
    ] {
        assert_eq!(
            (
                of(index, "max_turns"),
                of(index, "timeout_seconds"),
                of(index, "conflict"),
                of(index, "config_overrides")
            ),
            (json!(turns), json!(seconds), json!(conflict), overrides),
            "{index}"
        );
        assert_eq!((of(index, "editable"), of(index, "enabled")), (json!(false), json!(true)));
    }
    assert_eq!(list[3]["skills"], json!([]), "with its override");
}

/// Scenario 72.
#[tokio::test]
async fn only_administrators_see_prompts_and_change_anything() {
    let gateway = configured(json!({"auth": {"enabled": true}})).start().await;
    let keys = KeyFile::new(&gateway.data().parent().unwrap().join("api-keys.json"));
    let key = |role| keys.create("ann", role).unwrap().1.expose().to_owned();
    let (admin, user) = (key(Role::Admin), key(Role::User));
    let send = async |key: &str, method: Method, path: &str, body: &str| {
        let request = Request::builder().method(method).uri(path).header("x-api-key", key);
        let request = request.header("content-type", "application/json").body(Body::from(body.to_owned()));
        gateway.send(request.unwrap()).await
    };
    let one = new("one").to_string();
    let refusal = "Admin privileges are required to manage subagents.";
    // The role is checked before the path and the body.
    for (method, path, body) in [
        (Method::POST, PATH, one.as_str()),
        (Method::POST, PATH, "not json"),
        (Method::PUT, "/api/subagents/one", "{}"),
        (Method::PUT, "/api/subagents/a.b", "["),
        (Method::DELETE, "/api/subagents/one", ""),
        (Method::DELETE, "/api/subagents/a.b", ""),
    ] {
        send(&user, method, path, body).await.refused(403, refusal);
    }
    let made = created(send(&admin, Method::POST, PATH, &one).await);
    assert_eq!(made["system_prompt"], "p");
    for (key, sees) in [(&admin, true), (&user, false)] {
        let list = send(key, Method::GET, PATH, "").await.ok();
        for one in list["subagents"].as_array().unwrap() {
            assert_eq!(one["system_prompt"].is_string(), sees, "{one}");
            assert!(one["description"].is_string());
        }
    }
    assert_eq!(send(&admin, Method::DELETE, "/api/subagents/one", "").await.status, 204);
}

/// Scenario 72.
#[tokio::test]
async fn names_are_unique_in_any_case_and_what_is_missing_is_not_found() {
    let custom = json!({"Mine": {"description": "d", "system_prompt": "p"}});
    let gateway = configured(json!({"subagents": {"custom_agents": custom}})).start().await;
    assert_eq!(created(gateway.post(PATH, new("Web-2")).await)["name"], "web-2");
    for name in ["web-2", "WEB-2"] {
        gateway.post(PATH, new(name)).await.refused(409, "Managed subagent 'web-2' already exists");
    }
    for (name, lower) in
        [("bash", "bash"), ("General-Purpose", "general-purpose"), ("mine", "mine"), ("MINE", "mine")]
    {
        let text = format!("Subagent name '{lower}' is reserved by a built-in or config.yaml definition.");
        gateway.post(PATH, new(name)).await.refused(409, &text);
    }
    let unknown = "Unknown model 'gone'. Use 'inherit' or a configured model name.";
    let mut with_model = new("other");
    with_model["model"] = json!("gone");
    gateway.post(PATH, with_model).await.refused(422, unknown);
    put(&gateway, "web-2", json!({"model": "gone"})).await.refused(422, unknown);
    let text = "Managed subagent 'nobody' not found";
    put(&gateway, "Nobody", json!({})).await.refused(404, text);
    gateway.delete("/api/subagents/nobody").await.refused(404, text);
    put(&gateway, "bash", json!({})).await.refused(404, "Managed subagent 'bash' not found");
    let place = json!(["path", "name"]);
    put(&gateway, "a.b", json!({})).await.invalid("string_pattern_mismatch", &place);
    gateway.delete("/api/subagents/a_b").await.invalid("string_pattern_mismatch", &place);
    assert_eq!(put(&gateway, "WEB-2", json!({"model": "m"})).await.ok()["model"], "m");
    let deleted = gateway.delete("/api/subagents/Web-2").await;
    assert_eq!((deleted.status, deleted.body), (204, Value::Null));
    gateway.delete("/api/subagents/web-2").await.refused(404, "Managed subagent 'web-2' not found");
}

/// Scenario 72.
#[tokio::test]
async fn a_new_subagent_is_trimmed_and_checked_and_null_is_not_sent() {
    let gateway = Setup::default().start().await;
    let made = created(
        gateway
            .post(
                PATH,
                json!({
                    "name": "one", "display_name": "  One ", "description": " d ", "system_prompt": "\np\n",
                    "tools": [" ls ", "bash", "ls"], "disallowed_tools": ["web", "task"], "skills": [],
                    "model": "m", "max_turns": 7, "timeout_seconds": 8, "enabled": false, "unknown": [1],
                }),
            )
            .await,
    );
    assert_eq!(
        made,
        json!({
            "name": "one", "display_name": "One", "description": "d", "system_prompt": "p", "tools": ["ls", "bash"],
            "disallowed_tools": ["ask_clarification", "present_files", "task", "web"], "skills": [], "model": "m",
            "max_turns": 7, "timeout_seconds": 8, "enabled": false, "source": "managed", "editable": true,
            "conflict": false, "config_overrides": {},
        })
    );
    assert_eq!(listed(&gateway, "one").await, [made]);
    let optional = [
        "display_name",
        "tools",
        "disallowed_tools",
        "skills",
        "model",
        "max_turns",
        "timeout_seconds",
        "enabled",
    ];
    let mut nulls = new("nulls");
    for field in optional {
        nulls[field] = Value::Null;
    }
    let mut plain = created(gateway.post(PATH, new("plain")).await);
    plain["name"] = json!("nulls");
    assert_eq!(created(gateway.post(PATH, nulls).await), plain);

    for (field, value, kind) in [
        ("name", json!("a.b"), "string_pattern_mismatch"),
        ("name", json!("a b"), "string_pattern_mismatch"),
        ("name", json!(""), "string_pattern_mismatch"),
        ("name", json!("a".repeat(65)), "string_pattern_mismatch"),
        ("name", Value::Null, "missing"),
        ("description", json!(" \n"), "string_too_short"),
        ("description", Value::Null, "missing"),
        ("system_prompt", json!(""), "string_too_short"),
        ("display_name", json!(5), "string_type"),
        ("max_turns", json!(0), "greater_than_equal"),
        ("max_turns", json!(true), "int_type"),
        ("timeout_seconds", json!(0), "greater_than_equal"),
        ("enabled", json!("maybe"), "bool_type"),
        ("tools", json!("ls"), "list_type"),
    ] {
        let mut body = new("bad");
        body[field] = value;
        gateway.post(PATH, body).await.invalid(kind, &json!(["body", field]));
    }
    for (field, value, kind) in
        [("tools", json!(["ls", " "]), "string_too_short"), ("skills", json!(["a", 5]), "string_type")]
    {
        let mut body = new("bad");
        body[field] = value;
        gateway.post(PATH, body).await.invalid(kind, &json!(["body", field, 1]));
    }
    let answer = gateway.post(PATH, json!({})).await;
    assert_eq!(answer.body["detail"].as_array().unwrap().len(), 3, "{}", answer.body);
    assert!(listed(&gateway, "bad").await.is_empty());
}

/// Scenario 72.
#[tokio::test]
async fn a_change_keeps_what_is_not_sent_and_null_is_a_value_only_where_it_can_be_one() {
    let gateway = Setup::default().start().await;
    let mut body = new("one");
    for (field, value) in [("display_name", json!("One")), ("tools", json!(["ls"])), ("skills", json!(["s"]))]
    {
        body[field] = value;
    }
    let before = created(gateway.post(PATH, body).await);
    assert_eq!(
        put(&gateway, "one", json!({"name": "two", "unknown": 1})).await.ok(),
        before,
        "nothing changes"
    );
    for (field, value, becomes) in [
        ("display_name", json!(" x "), json!("x")),
        ("display_name", json!(" "), Value::Null),
        ("description", json!(" new "), json!("new")),
        ("system_prompt", json!("other"), json!("other")),
        ("tools", Value::Null, Value::Null),
        ("tools", json!([]), json!([])),
        ("skills", Value::Null, Value::Null),
        ("display_name", json!("One"), json!("One")),
        ("display_name", Value::Null, Value::Null),
        ("disallowed_tools", json!(["web"]), json!(["ask_clarification", "present_files", "task", "web"])),
        ("disallowed_tools", json!([]), json!(["ask_clarification", "present_files", "task"])),
        ("model", json!("m"), json!("m")),
        ("max_turns", json!(1), json!(1)),
        ("timeout_seconds", json!(1), json!(1)),
        ("enabled", json!(false), json!(false)),
    ] {
        let mut expected = listed(&gateway, "one").await.remove(0);
        expected[field] = becomes;
        assert_eq!(put(&gateway, "one", json!({field: value})).await.ok(), expected, "{field}");
        assert_eq!(listed(&gateway, "one").await, [expected], "{field}");
    }
    for field in [
        "description",
        "system_prompt",
        "disallowed_tools",
        "model",
        "max_turns",
        "timeout_seconds",
        "enabled",
    ] {
        let answer = put(&gateway, "one", json!({field: null})).await;
        let problems = answer.body["detail"].as_array().map(|list| list[0]["loc"].clone());
        assert_eq!((answer.status, problems), (422, Some(json!(["body", field]))), "{}", answer.body);
    }
}

/// Scenario 73.
#[tokio::test]
async fn a_name_that_the_configuration_takes_later_is_a_conflict_until_it_is_free_again() {
    let mut gateway = Setup::default().start().await;
    created(gateway.post(PATH, new("mine")).await);
    let custom = json!({"Mine": {"description": "of the file", "system_prompt": "p"}});
    gateway.reconfigure(|setup| setup.sections = json!({"subagents": {"custom_agents": custom}}));
    let conflicts = |list: &[Value]| {
        list.iter()
            .filter(|one| one["name"].as_str().unwrap().eq_ignore_ascii_case("mine"))
            .map(|one| (one["source"].clone(), one["conflict"].clone(), one["description"].clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        conflicts(&list(&gateway).await),
        [(json!("config"), json!(false), json!("of the file")), (json!("managed"), json!(true), json!("d"))]
    );
    // It stays stored, and can be changed and deleted.
    assert_eq!(put(&gateway, "mine", json!({"max_turns": 2})).await.ok()["conflict"], true);
    gateway.reconfigure(|setup| setup.sections = json!({}));
    assert_eq!(conflicts(&list(&gateway).await), [(json!("managed"), json!(false), json!("d"))]);
    assert_eq!(gateway.delete("/api/subagents/mine").await.status, 204);
}

/// Scenario 73.
#[tokio::test]
async fn definitions_outlive_the_gateway_in_files_and_in_the_database() {
    for (backend, storage) in [("sqlite", "file"), ("sqlite", "db"), ("postgres", "db")] {
        let setup = Setup { backend, ..configured(json!({"agent_storage": {"backend": storage}})) };
        let gateway = setup.start().await;
        created(gateway.post(PATH, new("one")).await);
        put(&gateway, "one", json!({"max_turns": 4})).await.ok();
        let file = gateway.data().parent().unwrap().join("subagents/one.json");
        assert_eq!(file.exists(), storage == "file", "{backend} {storage}");
        let gateway = gateway.reopen("full").await;
        assert_eq!(listed(&gateway, "one").await[0]["max_turns"], 4, "{backend} {storage}");
        // Another process changes it, and this one sees it.
        if backend == "postgres" {
            let other = gateway.beside().await;
            put(&other, "one", json!({"max_turns": 5})).await.ok();
            assert_eq!(listed(&gateway, "one").await[0]["max_turns"], 5);
        }
        assert_eq!(gateway.delete("/api/subagents/one").await.status, 204, "{backend} {storage}");
        assert!(listed(&gateway, "one").await.is_empty());
    }
    assert_eq!(DURABLE, ["sqlite", "postgres"], "each is above");
}

/// Scenario 73.
#[tokio::test]
async fn a_file_that_cannot_be_read_is_skipped_with_one_warning() {
    let gateway = Setup::default().start().await;
    created(gateway.post(PATH, new("good")).await);
    let directory = gateway.data().parent().unwrap().join("subagents");
    std::fs::write(directory.join("bad.json"), "{\"name\": \"bad\", ").unwrap();
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
    let guard = tracing::subscriber::set_default(subscriber);
    for _ in 0..3 {
        assert_eq!(
            names(&list(&gateway).await),
            [("bash", "builtin"), ("general-purpose", "builtin"), ("good", "managed")]
        );
    }
    drop(guard);
    assert_eq!(log.text().matches("cannot be used").count(), 1, "{}", log.text());
    assert!(log.text().contains("bad"), "{}", log.text());
    // A person corrects it.
    std::fs::write(directory.join("bad.json"), new("bad").to_string()).unwrap();
    assert_eq!(listed(&gateway, "bad").await.len(), 1);
}

#[tokio::test]
async fn keys_without_an_effect_in_a_file_are_one_warning_that_names_them() {
    let gateway = Setup::default().start().await;
    created(gateway.post(PATH, new("typed")).await);
    let file = gateway.data().parent().unwrap().join("subagents/typed.json");
    let mut edited: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    edited["disalowed_tools"] = json!(["bash"]);
    edited["max_turn"] = json!(5);
    std::fs::write(&file, edited.to_string()).unwrap();
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone()).finish();
    let guard = tracing::subscriber::set_default(subscriber);
    for _ in 0..3 {
        assert_eq!(listed(&gateway, "typed").await[0]["max_turns"], 50);
    }
    drop(guard);
    let text = log.text();
    let warnings: Vec<&str> = text.lines().filter(|line| line.contains("keys without an effect")).collect();
    assert_eq!(warnings.len(), 1, "{text}");
    assert!(
        warnings[0].contains("typed") && warnings[0].contains(r#"["disalowed_tools", "max_turn"]"#),
        "{text}"
    );
    // A change over HTTP writes the known ones.
    put(&gateway, "typed", json!({"max_turns": 5})).await.ok();
    let stored: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!((stored.get("max_turn"), &stored["max_turns"]), (None, &json!(5)));
}

/// Scenario 74: what overrides what at dispatch is tested in the crate of the subagents; this is what clients see of it.
#[tokio::test]
async fn overrides_are_shown_beside_the_values_that_were_written() {
    let over = json!({"timeout_seconds": 5, "max_turns": 6, "model": "m", "skills": []});
    let gateway = configured(json!({"subagents": {
        "custom_agents": {"mine": {"description": "d", "system_prompt": "p", "skills": ["s"]}},
        "agents": {"mine": over, "theirs": over, "bash": over},
    }}))
    .start()
    .await;
    created(gateway.post(PATH, new("theirs")).await);
    for (name, turns, seconds, model, skills) in [
        ("mine", 50, 900, "inherit", json!(["s"])),
        ("theirs", 50, 900, "inherit", Value::Null),
        ("bash", 6, 5, "m", json!([])),
    ] {
        let one = listed(&gateway, name).await.remove(0);
        assert_eq!(one["config_overrides"], over, "{name}");
        assert_eq!(
            (&one["max_turns"], &one["timeout_seconds"], &one["model"], &one["skills"]),
            (&json!(turns), &json!(seconds), &json!(model), &skills),
            "{name}"
        );
    }
}

/// What a run that delegates to `name` gets as the result of its task.
async fn result_of_delegation(gateway: &Gateway, thread: &str, name: &str) -> String {
    gateway.create(thread).await;
    let mut body = question(name);
    body["context"] = json!({"subagent_enabled": true});
    let values = gateway.post(&format!("/api/threads/{thread}/runs/wait"), body).await.ok();
    let messages = values["messages"].as_array().unwrap();
    let result = messages.iter().find(|message| message["type"] == "tool").unwrap();
    result["content"].as_str().unwrap().to_owned()
}

/// Scenario 73.
#[tokio::test]
async fn runs_delegate_to_a_managed_subagent_as_soon_as_it_is_there_and_enabled() {
    let script = json!({"rules": [
        {"when": {"caller": "subagent"}, "answers": [{"text": "Reviewed."}]},
        {"answers": [
            {"tool_calls": [{"name": "task", "args": {"prompt": "review", "subagent_type": "{{input}}"}}]},
            {"text": "done"},
        ]},
    ]});
    for storage in ["file", "db"] {
        let sections = json!({"agent_storage": {"backend": storage}});
        let setup = Setup { backend: "sqlite", script: script.clone(), ..configured(sections) };
        let gateway = setup.start().await;
        let unknown = "Unknown subagent type 'reviewer'. Available: general-purpose";
        let used = "Task Succeeded. Result: Reviewed.";
        let ask = async |thread: &str| result_of_delegation(&gateway, thread, "reviewer").await;
        assert!(ask("t1").await.contains(unknown), "{storage}");
        created(gateway.post(PATH, new("Reviewer")).await);
        assert_eq!(ask("t2").await, used, "{storage}");
        put(&gateway, "reviewer", json!({"enabled": false})).await.ok();
        assert!(ask("t3").await.contains(unknown), "{storage}");
        put(&gateway, "reviewer", json!({"enabled": true})).await.ok();
        assert_eq!(ask("t4").await, used, "{storage}");
        gateway.delete("/api/subagents/reviewer").await;
        assert!(ask("t5").await.contains(unknown), "{storage}");
        assert!(result_of_delegation(&gateway, "t6", "bash").await.contains("not a secure boundary"));
    }
}

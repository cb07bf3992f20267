//! What is said between the tool and an agent that keeps to the protocol.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};
use threadkeep_agent::tools::{Tool as _, ToolStatus};
use threadkeep_config::Secret;

use crate::support::{Scene, tool};

#[tokio::test]
async fn the_text_of_the_agents_message_is_the_result() {
    let mut scene = Scene::new();
    let output = scene.run("prompted; say 'one '; say two; stop; cat >/dev/null").await;
    assert_eq!((output.content.as_str(), output.status), ("one two", ToolStatus::Success));
    scene.assert_nobody_is_left();
    let heard = scene.heard();
    let methods: Vec<&Json> = heard.iter().map(|message| &message["method"]).collect();
    assert_eq!(methods, ["initialize", "session/new", "session/prompt"]);
    assert_eq!(heard[0]["params"]["protocolVersion"], 1);
    assert_eq!(
        heard[0]["params"]["clientCapabilities"],
        json!({"fs": {"readTextFile": false, "writeTextFile": false}, "terminal": false})
    );
    let directory = scene.context.root.canonicalize().unwrap().join("acp-workspace");
    assert_eq!(heard[1]["params"], json!({"cwd": directory, "mcpServers": []}));
    assert_eq!(heard[2]["params"], json!({"sessionId": "s", "prompt": [{"type": "text", "text": "Do it"}]}));
}

/// Agents that have a key in their environment may want to be asked to use it.
#[tokio::test]
async fn an_agent_that_wants_it_is_asked_to_sign_in_with_its_key() {
    let script = r#"
hear; answer 0 '{"protocolVersion":1,"authMethods":[{"id":"chatgpt","name":"Log in"},{"id":"some-api-key","name":"Key"}]}'
hear; printf '{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"Authentication required"}}\n'
hear; answer 2 '{}'
hear; answer 3 '{"sessionId":"s"}'
hear; say done; answer 4 '{"stopReason":"end_turn"}'"#;
    let scene = Scene::new();
    let mut agent = scene.agent(script);
    agent.env.insert("SOME_API_KEY".into(), Secret::new("sk-1"));
    assert_eq!(scene.call(agent).await.content, "done");
    let heard = scene.heard();
    let methods: Vec<&Json> = heard.iter().map(|message| &message["method"]).collect();
    assert_eq!(methods, ["initialize", "session/new", "authenticate", "session/new", "session/prompt"]);
    assert_eq!(heard[2]["params"], json!({"methodId": "some-api-key"}));
    // Without the key nobody could sign in.
    let output = Scene::new().run(script).await;
    assert_eq!(output.content, "Error invoking ACP agent 'a': session/new failed: Authentication required");
}

#[tokio::test]
async fn the_agent_works_in_the_threads_own_directory() {
    let scene = Scene::new();
    let output = scene.run("prompted; echo made > made.txt; say done; stop").await;
    assert_eq!(output.content, "done");
    let made = std::fs::read_to_string(scene.context.root.join("acp-workspace/made.txt")).unwrap();
    assert_eq!(made, "made\n");
}

#[tokio::test]
async fn a_directory_that_leads_elsewhere_is_refused() {
    let scene = Scene::new();
    let elsewhere = tempfile::tempdir().unwrap();
    std::fs::create_dir(&scene.context.root).unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), scene.context.root.join("acp-workspace")).unwrap();
    let output = scene.run("touch started; prompted; stop").await;
    assert_eq!(
        output.content,
        "Error invoking ACP agent 'a': cannot use the directory `acp-workspace`: it leads out of the working directory"
    );
    assert!(!elsewhere.path().join("started").exists());
}

#[tokio::test]
async fn s75_an_agent_that_says_nothing_has_no_response() {
    for script in ["prompted; stop", "prompted; say ' '; stop"] {
        assert_eq!(Scene::new().run(script).await.content, "(no response)");
    }
}

#[tokio::test]
async fn another_reason_to_stop_is_named() {
    let output = Scene::new().run("prompted; say part; stop max_tokens").await;
    assert_eq!(output.content, "part\n\n[the agent stopped early: max_tokens]");
    let output = Scene::new().run("prompted; stop refusal").await;
    assert_eq!(output.content, "(no response)\n\n[the agent stopped early: refusal]");
}

#[tokio::test]
async fn s75_permissions_are_granted_only_if_configured_and_once_before_always() {
    let options = |kinds: &[&str]| {
        let options: Vec<Json> = kinds
            .iter()
            .map(|kind| json!({"optionId": format!("id of {kind}"), "name": kind, "kind": kind}))
            .collect();
        json!({"sessionId": "s", "toolCall": {"toolCallId": "c"}, "options": options})
    };
    for (kinds, approve, outcome) in [
        (
            ["reject_once", "allow_always", "allow_once"],
            true,
            json!({"outcome": "selected", "optionId": "id of allow_once"}),
        ),
        (
            ["reject_once", "allow_always", "x"],
            true,
            json!({"outcome": "selected", "optionId": "id of allow_always"}),
        ),
        (["reject_once", "reject_always", "x"], true, json!({"outcome": "cancelled"})),
        (["reject_once", "allow_always", "allow_once"], false, json!({"outcome": "cancelled"})),
    ] {
        let scene = Scene::new();
        let script = format!("prompted; ask p session/request_permission '{}'; hear; stop", options(&kinds));
        let mut agent = scene.agent(&script);
        agent.auto_approve_permissions = approve;
        scene.call(agent).await;
        assert_eq!(scene.heard()[3], json!({"jsonrpc": "2.0", "id": "p", "result": {"outcome": outcome}}));
    }
}

#[tokio::test]
async fn a_method_that_the_client_does_not_have_is_refused() {
    let scene = Scene::new();
    scene.run("prompted; ask 7 fs/read_text_file '{\"path\":\"/etc/passwd\"}'; hear; stop").await;
    let error = json!({"code": -32601, "message": "Method not found"});
    assert_eq!(scene.heard()[3], json!({"jsonrpc": "2.0", "id": "7", "error": error}));
}

#[tokio::test]
async fn remarks_on_the_standard_output_are_no_messages() {
    let script = "echo 'npm notice: new version'; prompted; echo; echo '[1]'; say yes; stop";
    assert_eq!(Scene::new().run(script).await.content, "yes");
}

#[tokio::test]
async fn the_model_is_a_hint_and_servers_are_handed_on_if_the_agent_can_use_them() {
    let stdio = json!({"name": "files", "command": "/bin/files", "args": [], "env": []});
    let http = json!({"type": "http", "name": "web", "url": "https://mcp.example/", "headers": []});
    let args = json!({"agent": "a", "prompt": "Do it"});
    for (capabilities, servers) in
        [("{}", json!([stdio])), (r#"{"mcpCapabilities":{"http":true}}"#, json!([stdio, http]))]
    {
        let scene = Scene::new();
        let script = format!(
            "hear; answer 0 '{{\"protocolVersion\":1,\"agentCapabilities\":{capabilities}}}'; \
             hear; answer 1 '{{\"sessionId\":\"s\"}}'; hear; stop"
        );
        let mut agent = scene.agent(&script);
        agent.model = Some("large".into());
        scene.invoke(agent, vec![stdio.clone(), http.clone()], args.clone()).await.unwrap();
        let params = &scene.heard()[1]["params"];
        assert_eq!((&params["mcpServers"], &params["_meta"]), (&servers, &json!({"model": "large"})));
    }
}

#[tokio::test]
async fn s75_an_unknown_agent_is_answered_with_the_known_ones() {
    let scene = Scene::new();
    let args = json!({"agent": "b", "prompt": "Do it"});
    let error = scene.invoke(scene.agent(""), vec![], args).await.unwrap_err();
    assert_eq!(error.to_string(), "Unknown agent 'b'. Available: a");
}

#[tokio::test]
async fn s75_a_command_that_is_missing_or_ends_at_once_says_so() {
    let scene = Scene::new();
    let mut agent = scene.agent("");
    agent.command = "no-such-agent".into();
    let output = scene.call(agent).await;
    assert_eq!(
        output.content,
        "Error invoking ACP agent 'a': the command 'no-such-agent' was not found on PATH. Install it, or set `command` to \
         its full path"
    );
    assert_eq!(output.status, ToolStatus::Error);
    let output = scene.run("echo 'no key' >&2; exit 3").await;
    assert_eq!(
        output.content,
        "Error invoking ACP agent 'a': it ended before it answered. The end of its standard error: no key"
    );
}

#[tokio::test]
async fn what_the_agent_refuses_is_the_reason() {
    let refused =
        r#"printf '{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"Authentication required"}}\n'"#;
    let output = Scene::new().run(&format!("initialized; hear; {refused}")).await;
    assert_eq!(output.content, "Error invoking ACP agent 'a': session/new failed: Authentication required");
    let output = Scene::new().run("hear; answer 0 '{\"protocolVersion\":2}'").await;
    assert_eq!(
        output.content,
        "Error invoking ACP agent 'a': it speaks version 2 of the Agent Client Protocol; version 1 is supported"
    );
    let output = Scene::new().run("initialized; hear; answer 1 '{}'").await;
    let malformed =
        "Error invoking ACP agent 'a': its answer to session/new is not one of the protocol: missing field";
    assert!(output.content.starts_with(malformed), "{}", output.content);
}

#[test]
fn without_agents_there_is_no_tool_and_with_them_it_lists_them() {
    assert!(tool(&BTreeMap::new(), vec![]).is_none());
    let scene = Scene::new();
    let agents = BTreeMap::from([("b".to_owned(), scene.agent("")), ("a".to_owned(), scene.agent(""))]);
    let spec = tool(&agents, vec![]).unwrap().spec();
    assert_eq!(spec.name, "invoke_acp_agent");
    let list = "Agents:\n- a: Does what its script says\n- b: Does what its script says";
    assert!(spec.description.ends_with(list), "{}", spec.description);
}

/// A program may print or answer with the key that it was given, or one that was handed on to it.
#[tokio::test]
async fn no_key_of_an_agent_or_of_its_servers_is_in_an_error() {
    let refused = r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"bad key sk-secret-1","data":"nor sk-secret-2, nor sk-secret-3"}}"#;
    let servers = vec![
        json!({"name": "a", "command": "/bin/true", "args": [], "env": [{"name": "K", "value": "sk-secret-2"}]}),
        json!({"type": "http", "name": "b", "url": "https://mcp.example/?key=sk-secret-4",
            "headers": [{"name": "Authorization", "value": "Bearer sk-secret-3"}]}),
    ];
    for script in [
        "echo \"bad key $KEY\" >&2; exit 3".to_owned(),
        // The end of what it says is shown, which begins within the key.
        "printf '%s%0495d' \"$KEY\" 0 >&2; exit 3".to_owned(),
        format!("initialized; hear; printf '%s\\n' '{refused}'; cat >/dev/null"),
        "initialized; hear; echo 'sk-secret-3 sk-secret-4' >&2; exit 3".to_owned(),
    ] {
        let scene = Scene::new();
        let mut agent = scene.agent(&script);
        agent.env.insert("KEY".to_owned(), Secret::new("sk-secret-1"));
        let output =
            scene.invoke(agent, servers.clone(), json!({"agent": "a", "prompt": "Do it"})).await.unwrap();
        assert_eq!(output.status, ToolStatus::Error, "{}", output.content);
        assert!(!output.content.contains("et-"), "{}", output.content);
        assert!(output.content.starts_with("Error invoking ACP agent 'a': "), "{}", output.content);
    }
}

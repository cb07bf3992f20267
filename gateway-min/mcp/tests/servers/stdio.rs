//! Servers on standard input and output.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use threadkeep_agent::tools::ToolStatus;
use threadkeep_config::{McpServer, Secret, ToolRouting};
use tokio::time::Instant;

use crate::support::{Scene, call, names};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_mins(10);

#[tokio::test]
async fn the_tools_of_a_server_are_listed_and_called() {
    let mut scene = Scene::new("ready; while hear; do text 'it is said'; done");
    let routing = ToolRouting { keywords: vec!["word".into()], priority: 1 };
    scene.configured.get_mut("s").unwrap().routing = [("say".to_owned(), routing)].into();
    let tools = scene.connected().await;
    assert_eq!(names(&tools), ["mcp_s_say", "mcp_s_other"]);
    let spec = tools[0].spec();
    assert_eq!((spec.description.as_str(), &spec.parameters["required"]), ("Says it", &json!(["what"])));
    assert!(tools[0].is_deferrable() && tools[0].routing().is_some() && tools[1].routing().is_none());
    let output = call(&tools[0], json!({"what": "it"})).await.unwrap();
    assert_eq!((output.content.as_str(), output.status), ("it is said", ToolStatus::Success));
    scene.tools().await;
    assert_eq!(scene.starts(), 1, "one connection for all runs");
}

/// Bug 37 of the facts: the start of a server blocked the gateway.
#[tokio::test]
async fn a_server_that_hangs_at_its_start_delays_all_runs_together_by_seconds() {
    for script in ["cat > /dev/null", "hear; cat > /dev/null", "initialize; hear; cat > /dev/null"] {
        let scene = Scene::new(script);
        scene.servers.connect(&scene.configured);
        let begun = Instant::now();
        assert_eq!(names(&scene.tools().await), Vec::<String>::new());
        // They wait for 5 s; the connection itself is given up after 30.
        assert!(begun.elapsed() < Duration::from_secs(25), "{:?}", begun.elapsed());
        // The time for which runs wait is over.
        let begun = Instant::now();
        for _ in 0..100 {
            assert!(scene.tools().await.is_empty());
        }
        // Not a measure of speed: a hundred waits of 5 s take longer.
        assert!(begun.elapsed() < Duration::from_mins(4), "{:?}", begun.elapsed());
        scene.until_started().await;
        assert_eq!(scene.starts(), 1);
        drop(scene.servers);
    }
}

#[tokio::test]
async fn a_server_that_cannot_be_started_is_left_out_and_not_tried_by_each_run() {
    let mut scene = Scene::new("echo oops >&2; exit 1");
    assert!(scene.tools().await.is_empty());
    scene.until_started().await;
    scene.until_nobody_is_left().await;
    for _ in 0..5 {
        assert!(scene.tools().await.is_empty());
    }
    assert_eq!(scene.starts(), 1);
    scene.configured.get_mut("s").unwrap().command = Some("no-such-server".into());
    assert!(scene.tools().await.is_empty());
}

#[tokio::test]
async fn a_server_that_died_is_started_again_for_the_next_call() {
    // The first process dies in a call, the others answer.
    let scene = Scene::new(
        "ready; if [ $(wc -l < \"$ROOT/starts\") = 1 ]; then hear; exit 1; fi; while hear; do text again; done",
    );
    let tools = scene.connected().await;
    let error = call(&tools[0], json!({"what": "it"})).await.unwrap_err().to_string();
    assert!(error.starts_with("the call of the server 's' failed: "), "{error}");
    assert!(error.ends_with("It may have done something nevertheless"), "{error}");
    assert_eq!(call(&tools[0], json!({"what": "it"})).await.unwrap().content, "again");
    assert_eq!(scene.starts(), 2);
    assert_eq!(names(&scene.tools().await).len(), 2);
}

#[tokio::test]
async fn a_call_that_hangs_ends_at_its_time_and_the_server_stays() {
    let mut scene =
        Scene::new("ready; hear; while hear; do case $method in tools/call) text late;; esac; done");
    scene.configured.get_mut("s").unwrap().timeout_seconds = 1;
    let tools = scene.connected().await;
    let error = call(&tools[0], json!({"what": "it"})).await.unwrap_err().to_string();
    assert_eq!(
        error,
        "the server 's' did not answer within 1 seconds. It may have done something nevertheless"
    );
    // All cores may be busy: a second may be too short for an answer.
    let answered = async {
        loop {
            match call(&tools[0], json!({"what": "it"})).await {
                Ok(output) => break output,
                Err(late) => assert_eq!(late.to_string(), error),
            }
        }
    };
    assert_eq!(tokio::time::timeout(PATIENCE, answered).await.unwrap().content, "late");
    assert_eq!(scene.starts(), 1);
}

/// A cancelled run sends the server a cancellation of its call.
#[tokio::test]
async fn a_call_that_is_dropped_is_cancelled_at_the_server() {
    let scene = Scene::new(
        "ready; hear; touch \"$ROOT/called\"; hear; [ $method = notifications/cancelled ] && touch \"$ROOT/told\"; cat > /dev/null",
    );
    let tools = scene.connected().await;
    tokio::select! {
        output = call(&tools[0], json!({"what": "it"})) => panic!("{output:?}"),
        () = scene.until("called") => {}
    }
    tokio::time::timeout(PATIENCE, scene.until("told")).await.unwrap();
}

#[tokio::test]
async fn an_error_of_a_tool_and_what_is_no_text_are_said() {
    let content = r#"[{"type":"text","text":"no"},{"type":"image","data":"AAAA","mimeType":"image/png"},{"type":"resource","resource":{"uri":"a://b","text":"inner"}},{"type":"resource_link","uri":"a://c","name":"c"}]"#;
    let scene = Scene::new(&format!(
        "ready; hear; answer '{{\"content\":{content},\"isError\":true}}'; \
         hear; answer '{{\"content\":[],\"structuredContent\":{{\"a\":1}}}}'; hear; answer '{{\"content\":[]}}'; cat > /dev/null"
    ));
    let tools = scene.connected().await;
    let output = call(&tools[0], json!({"what": "it"})).await.unwrap();
    assert_eq!(output.status, ToolStatus::Error);
    assert_eq!(
        output.content,
        "Error: no\n[an image was left out: image/png]\ninner\n[a link to a resource was left out: a://c]"
    );
    assert_eq!(call(&tools[1], json!({})).await.unwrap().content, "{\"a\":1}");
    assert_eq!(call(&tools[1], json!({})).await.unwrap().content, "(no output)");
}

#[tokio::test]
async fn a_line_without_an_end_does_not_fill_the_memory() {
    let mut scene = Scene::new("ready; hear; head -c 40000000 /dev/zero | tr '\\0' x; cat > /dev/null");
    scene.configured.get_mut("s").unwrap().timeout_seconds = 3;
    let tools = scene.connected().await;
    let error = call(&tools[0], json!({"what": "it"})).await.unwrap_err().to_string();
    assert!(error.contains("did not answer within 3 seconds") || error.contains("failed"), "{error}");
}

/// Its answers were queued without an end, and its pipe was never closed.
#[tokio::test]
async fn a_server_that_asks_on_without_reading_is_given_up() {
    let mut scene = Scene::new(
        r#"ready; hear; n=0; while printf '{"jsonrpc":"2.0","id":%s,"method":"ping"}\n' $n; do n=$((n+1)); done; sleep 1000"#,
    );
    scene.configured.get_mut("s").unwrap().timeout_seconds = 600;
    let tools = scene.connected().await;
    let error = call(&tools[0], json!({"what": "it"})).await.unwrap_err().to_string();
    assert!(error.starts_with("the call of the server 's' failed: "), "{error}");
    scene.until_nobody_is_left().await;
}

/// The client offers neither sampling, elicitation nor roots when it connects, and refuses them as the protocol says. The call
/// during which the server asks goes on.
#[tokio::test]
async fn what_a_server_may_not_ask_for_is_refused_with_the_protocols_error() {
    for (method, params) in [
        (
            "sampling/createMessage",
            r#"{"messages":[{"role":"user","content":{"type":"text","text":"x"}}],"maxTokens":5}"#,
        ),
        ("elicitation/create", r#"{"message":"Which?","requestedSchema":{"type":"object","properties":{}}}"#),
        ("roots/list", "{}"),
        ("something/else", "{}"),
    ] {
        let asks = format!(r#"{{"jsonrpc":"2.0","id":"asked","method":"{method}","params":{params}}}"#);
        let scene = Scene::new(&format!(
            "initialize; echo \"$first\" > \"$ROOT/initialize\"; list; hear; call=$id; printf '{asks}\\n'; \
             IFS= read -r refusal; echo \"$refusal\" > \"$ROOT/refusal\"; id=$call; text 'went on'; cat > /dev/null"
        ));
        let tools = scene.connected().await;
        assert_eq!(call(&tools[0], json!({"what": "it"})).await.unwrap().content, "went on", "{method}");
        let refusal: serde_json::Value = serde_json::from_str(&scene.read("refusal")).unwrap();
        assert_eq!(
            (&refusal["id"], &refusal["error"]["code"]),
            (&json!("asked"), &json!(-32601)),
            "{refusal}"
        );
        assert!(refusal.get("result").is_none(), "{refusal}");
        let hello: serde_json::Value = serde_json::from_str(&scene.read("initialize")).unwrap();
        let offered = hello["params"]["capabilities"].as_object().unwrap();
        assert!(offered.is_empty(), "{method} is not offered: {offered:?}");
    }
}

#[tokio::test]
async fn tools_that_change_are_listed_again() {
    let scene = Scene::new(
        r#"ready; printf '{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n'; hear; answer '{"tools":[{"name":"new","inputSchema":{"type":"object"}}]}'; cat > /dev/null"#,
    );
    scene.tools().await;
    let changed = async {
        while names(&scene.tools().await) != ["mcp_s_new"] {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, changed).await.unwrap();
}

/// The server says once that they have changed.
#[tokio::test]
async fn tools_that_could_not_be_listed_are_listed_later() {
    let scene = Scene::new(
        r#"ready; printf '{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n'; hear; printf '{"jsonrpc":"2.0","id":%s,"error":{"code":-32603,"message":"busy"}}\n' "$id"; hear; answer '{"tools":[{"name":"new","inputSchema":{"type":"object"}}]}'; cat > /dev/null"#,
    );
    scene.tools().await;
    let changed = async {
        while names(&scene.tools().await) != ["mcp_s_new"] {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, changed).await.unwrap();
}

#[tokio::test]
async fn a_cursor_that_is_given_again_and_again_ends_the_list() {
    let scene = Scene::new(
        r#"initialize; while hear; do echo listed >> "$ROOT/lists"; answer '{"tools":[{"name":"one","inputSchema":{"type":"object"}}],"nextCursor":""}'; done"#,
    );
    assert_eq!(names(&scene.connected().await), ["mcp_s_one"]);
    assert_eq!(scene.read("lists").lines().count(), 2);
}

#[tokio::test]
async fn cursors_that_lead_to_each_other_end_the_list() {
    let scene = Scene::new(
        r#"initialize; while hear; do echo listed >> "$ROOT/lists"; case $line in *'"cursor":"b"'*) next=a;; *) next=b;; esac; answer "{\"tools\":[{\"name\":\"one\",\"inputSchema\":{\"type\":\"object\"}}],\"nextCursor\":\"$next\"}"; done"#,
    );
    assert_eq!(names(&scene.connected().await), ["mcp_s_one"]);
    assert_eq!(scene.read("lists").lines().count(), 3);
}

#[tokio::test]
async fn a_malformed_tool_does_not_lose_the_others() {
    let object = r#"{"type":"object"}"#;
    let tools = [
        format!(r#"{{"name":"good","inputSchema":{object}}}"#),
        "null".to_owned(),
        format!(r#"{{"inputSchema":{object}}}"#),
        r#"{"name":"bad","inputSchema":"none"}"#.to_owned(),
        r#"{"name":"now","inputSchema":null}"#.to_owned(),
        format!(r#"{{"name":"hinted","inputSchema":{object},"outputSchema":"none","annotations":["none"]}}"#),
    ];
    let page = format!(r#"{{"tools":[{}],"nextCursor":"2"}}"#, tools.join(","));
    let last = format!(r#"{{"tools":[{{"name":"last","inputSchema":{object}}}]}}"#);
    let scene =
        Scene::new(&format!("initialize; hear; answer '{page}'; hear; answer '{last}'; cat > /dev/null"));
    assert_eq!(names(&scene.connected().await), ["mcp_s_good", "mcp_s_now", "mcp_s_hinted", "mcp_s_last"]);
}

/// Some servers say after each listing that their tools have changed.
#[tokio::test]
async fn tools_that_change_all_the_time_are_not_listed_all_the_time() {
    let scene = Scene::new(
        r#"initialize; while hear; do echo listed >> "$ROOT/lists"; answer '{"tools":[]}'; printf '{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n'; done"#,
    );
    let begun = Instant::now();
    scene.servers.connect(&scene.configured);
    let listed = async {
        scene.until("lists").await;
        while scene.read("lists").lines().count() < 4 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, listed).await.unwrap();
    // Not a measure of speed: before the third listing there is a pause of a second, and before the fourth.
    assert!(begun.elapsed() >= Duration::from_secs(2), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_server_ends_when_it_is_no_longer_configured_or_its_process_ends() {
    let daemon = "trap '' TERM; (setsid sh -c \"trap '' TERM; sleep 1000\" &) ; ready; sleep 1000";
    let scene = Scene::new(daemon);
    assert_eq!(scene.connected().await.len(), 2);
    assert!(scene.servers.tools(&std::collections::BTreeMap::new()).await.is_empty());
    scene.until_nobody_is_left().await;
    let scene = Scene::new(daemon);
    assert_eq!(scene.connected().await.len(), 2);
    let off = McpServer { enabled: false, ..scene.configured["s"].clone() };
    assert!(scene.servers.tools(&[("s".to_owned(), off)].into()).await.is_empty());
    scene.until_nobody_is_left().await;
}

/// A program may print the key that it was given, or quote it in an error or a result.
#[tokio::test]
async fn no_key_of_a_program_is_in_an_error() {
    let refused = r#"{"jsonrpc":"2.0","id":%s,"error":{"code":-32000,"message":"bad sk-secret-1"}}"#;
    let failed = r#"{"isError":true,"content":[{"type":"text","text":"bad sk-secret-1"}]}"#;
    for (script, calls, begins) in [
        // It dies in the first call, and says why it does not start again.
        (
            "if [ $(wc -l < \"$ROOT/starts\") = 1 ]; then ready; hear; exit 1; fi; echo \"bad $TOKEN\" >&2; exit 1"
                .to_owned(),
            2,
            "the server 's' is not available: ",
        ),
        // What is shown ends within the key.
        (
            "if [ $(wc -l < \"$ROOT/starts\") = 1 ]; then ready; hear; exit 1; fi; \
             printf '%0292d%s' 0 \"$TOKEN\" >&2; exit 1"
                .to_owned(),
            2,
            "the server 's' is not available: ",
        ),
        (format!("ready; while hear; do printf '{refused}\\n' \"$id\"; done"), 1, "the call of the server 's' failed: "),
        (format!("ready; while hear; do answer '{failed}'; done"), 1, "Error: bad ***"),
    ] {
        let mut scene = Scene::new(&script);
        let env = &mut scene.configured.get_mut("s").unwrap().env;
        env.insert("TOKEN".to_owned(), Secret::new("sk-secret-1"));
        let tool = Arc::clone(&scene.connected().await[0]);
        let mut said = String::new();
        for _ in 0..calls {
            let called = call(&tool, json!({"what": "it"})).await;
            said = called.map_or_else(|error| error.to_string(), |output| output.content);
        }
        assert!(said.starts_with(begins), "{said}");
        assert!(!said.contains("sk-se"), "{said}");
    }
}

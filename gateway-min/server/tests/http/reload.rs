//! Editing the configuration file while the gateway runs: what takes effect with the next run, and what after a
//! restart.

use std::sync::Arc;

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};
use threadkeep::mode::ModeRegister;
use threadkeep_gateway::app::App;
use threadkeep_gateway::http;
use tower::ServiceExt as _;

use crate::page::html;
use crate::support::{Gateway, Setup, question, texts};

/// The texts of a run's answer.
async fn said(gateway: &Gateway, thread: &str, text: &str) -> Vec<String> {
    gateway.create(thread).await;
    let values = gateway.post(&format!("/api/threads/{thread}/runs/wait"), question(text)).await.ok();
    let messages = values["messages"].as_array().unwrap();
    messages.iter().map(|message| message["content"].to_string()).collect()
}

#[tokio::test]
async fn a_broken_edit_keeps_the_last_good_configuration_and_metrics_say_so() {
    let mut gateway = Setup::default().start().await;
    let valid = async |gateway: &Gateway| {
        let Value::String(text) = gateway.get("/metrics").await.ok() else { panic!("a text") };
        text.contains("threadkeep_config_valid 1\n")
    };
    assert!(valid(&gateway).await);
    for broken in
        [json!({"title": {"max_words": "many"}}), json!({"models": "none"}), json!({"title": "$NOT_SET"})]
    {
        gateway.reconfigure(|setup| setup.sections = broken.clone());
        assert!(!valid(&gateway).await, "{broken}");
        assert_eq!(gateway.get("/api/models").await.ok()["models"][0]["name"], "m");
        assert_eq!(said(&gateway, "t", "hello").await.last().unwrap(), "\"You said: hello\"");
    }
    gateway.reconfigure(|setup| setup.sections = json!({"token_usage": {"enabled": false}}));
    assert!(valid(&gateway).await);
    assert_eq!(gateway.get("/api/models").await.ok()["token_usage"]["enabled"], false);
}

#[tokio::test]
async fn models_titles_compaction_and_loop_detection_follow_the_file() {
    let script = json!({"rules": [
        {"when": {"contains": ["loop"]}, "answers": [
            {"tool_calls": [{"name": "ls"}]}, {"tool_calls": [{"name": "ls"}]}, {"tool_calls": [{"name": "ls"}]},
            {"text": "done"},
        ]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]});
    let mut gateway = Setup { script, ..Setup::default() }.start().await;
    said(&gateway, "titled", "hello").await;
    assert_eq!(gateway.state("titled").await["values"]["title"], "hello");
    let disabled = "Context compaction is disabled.";
    gateway.post("/api/threads/titled/compact", json!({})).await.refused(409, disabled);
    said(&gateway, "free", "loop").await;
    let stopped = async |gateway: &Gateway, thread: &str| {
        gateway.get(&format!("/api/threads/{thread}/runs")).await.ok()[0]["stop_reason"].clone()
    };
    assert_eq!(stopped(&gateway, "free").await, Value::Null);

    gateway.reconfigure(|setup| {
        setup.sections = json!({
            "title": {"enabled": false}, "summarization": {"enabled": true},
            "loop_detection": {"warn_threshold": 1, "hard_limit": 2},
            "models": [
                {"name": "other", "use": "scripted", "model": "m", "script": "script.json"},
                {"name": "m", "use": "scripted", "model": "m", "script": "script.json"},
            ],
        });
    });
    said(&gateway, "untitled", "hello").await;
    assert_eq!(gateway.state("untitled").await["values"].get("title"), None);
    gateway.post("/api/threads/titled/compact", json!({})).await.ok();
    said(&gateway, "looping", "loop").await;
    assert_eq!(stopped(&gateway, "looping").await, "loop_capped");
    assert_eq!(gateway.get("/api/models").await.ok()["models"][0]["name"], "other");
    let mut body = question("hello");
    body["context"] = json!({"model_name": "other"});
    gateway.post("/api/threads/titled/runs/wait", body).await.ok();
}

/// The only live key of the database section.
#[tokio::test]
async fn the_number_of_states_kept_in_memory_follows_the_file() {
    let kept = async |gateway: &Gateway| {
        let Value::String(text) = gateway.get("/metrics").await.ok() else { panic!("a text") };
        let line =
            text.lines().find_map(|line| line.strip_prefix("threadkeep_warm_heads ")).unwrap().to_owned();
        line.parse::<u32>().unwrap()
    };
    let mut gateway = Setup::default().start().await;
    for n in 0..5 {
        said(&gateway, &format!("t{n}"), "hello").await;
    }
    assert_eq!(kept(&gateway).await, 5);
    for (limit, expected) in [(json!(2), 2), (json!(0), 6), (json!(1), 1)] {
        let database = json!({"backend": "memory", "checkpoint_delta": {"snapshot_frequency": 3},
            "checkpoint_graph_cache": {"accessor_graph_max": limit}});
        gateway.reconfigure(|setup| setup.sections = json!({ "database": database }));
        for n in 0..6 {
            said(&gateway, &format!("t{n}"), "again").await;
        }
        assert_eq!(kept(&gateway).await, expected, "{limit}");
    }
}

/// A changed mode is ignored until the restart; a changed cadence fails the next run. Both take effect with the
/// restart.
#[tokio::test]
async fn mode_and_cadence_wait_for_the_restart() {
    let mut gateway = Setup::on("sqlite", "full").start().await;
    said(&gateway, "t", "one").await;
    gateway.reconfigure(|setup| setup.mode = "delta");
    said(&gateway, "t", "two").await;
    let state = gateway.state("t").await;
    assert_eq!(state["metadata"].get("svc_checkpoint_channel_mode"), None, "{state}");
    gateway.reconfigure(|setup| setup.frequency += 1);
    let refused = gateway.post("/api/threads/t/runs/wait", question("three")).await.ok();
    let text =
        "checkpoint_delta.snapshot_frequency is restart-required and cannot change in a running process";
    assert_eq!((&refused["status"], &refused["error"]), (&json!("error"), &json!(text)));
    gateway.reconfigure(|setup| setup.frequency -= 1);
    said(&gateway, "t", "four").await;
    let gateway = gateway.reopen("delta").await;
    said(&gateway, "t", "five").await;
    let state = gateway.state("t").await;
    assert_eq!(state["metadata"]["svc_checkpoint_channel_mode"], "delta");
}

/// What tools may do is fixed at the start, like the other sections that are read once.
#[tokio::test]
async fn an_edit_of_the_sandbox_waits_for_the_restart() {
    let script = json!({"rules": [{"answers": [
        {"tool_calls": [{"name": "bash", "args": {"command": "echo from-the-shell", "description": "x"}}]},
        {"text": "done"},
    ]}]});
    let mut gateway = Setup { script, ..Setup::on("sqlite", "full") }.start().await;
    let ran = |said: &[String]| said.iter().any(|text| text.contains("from-the-shell"));
    assert!(!ran(&said(&gateway, "a", "go").await));
    gateway
        .reconfigure(|setup| setup.sections = json!({"sandbox": {"use": "local", "allow_host_bash": true}}));
    assert!(!ran(&said(&gateway, "b", "go").await));
    let gateway = gateway.reopen("full").await;
    let after = said(&gateway, "c", "go").await;
    assert!(ran(&after), "{after:?}");
}

/// Of the sections that are read once, those of which clients can see whether they are in use. The edit itself is
/// valid, and what is read for each request follows it.
#[tokio::test]
async fn an_edit_of_what_is_read_at_the_start_waits_for_the_restart() {
    let shows_tokens =
        async |gateway: &Gateway| gateway.get("/api/models").await.ok()["token_usage"]["enabled"].clone();
    let slots = async |gateway: &Gateway| {
        gateway.get("/api/features").await.ok()["subagent_batches"]["max_running"].clone()
    };
    let managed = async |gateway: &Gateway| {
        let list = gateway.get("/api/subagents").await.ok()["subagents"].take();
        list.as_array().unwrap().iter().any(|one| one["name"] == "one")
    };
    let sections = json!({"subagent_batches": {"enabled": true}, "subagent_runtime": {"max_running": 2}});
    let mut gateway = Setup { sections, ..Setup::on("sqlite", "full") }.start().await;
    gateway.reconfigure(|setup| {
        setup.sections = json!({
            "subagent_batches": {"enabled": true}, "subagent_runtime": {"max_running": 1},
            "agent_storage": {"backend": "db"}, "page": {"enabled": false}, "token_usage": {"enabled": false},
        });
    });
    assert_eq!(shows_tokens(&gateway).await, false, "the edit is read");
    assert_eq!(slots(&gateway).await, 2);
    assert_eq!(gateway.get("/status").await.status, 200);
    let one = json!({"name": "one", "description": "d", "system_prompt": "p"});
    assert_eq!(gateway.post("/api/subagents", one).await.status, 201);
    assert!(managed(&gateway).await);

    let mut gateway = gateway.reopen("full").await;
    assert_eq!(slots(&gateway).await, 1);
    assert_eq!(gateway.get("/status").await.status, 404);
    assert!(!managed(&gateway).await, "it was stored in a file");

    gateway.reconfigure(|setup| setup.sections = json!({"auth": {"enabled": true}}));
    assert_eq!(shows_tokens(&gateway).await, true, "the edit is read, and nobody has a key");
    assert_eq!(slots(&gateway).await, 1, "batches are worked on still");
    assert!(!managed(&gateway).await);
    let gateway = gateway.reopen("full").await;
    assert_eq!(gateway.get("/api/models").await.status, 401);
}

#[tokio::test]
async fn an_edit_of_the_backend_waits_for_the_restart_and_the_page_says_which_is_in_use() {
    let mut gateway = Setup::on("sqlite", "full").start().await;
    said(&gateway, "t", "one").await;
    gateway.reconfigure(|setup| {
        setup.backend = "memory";
        setup.sections = json!({"token_usage": {"enabled": false}});
    });
    assert_eq!(gateway.get("/api/models").await.ok()["token_usage"]["enabled"], false, "the edit is read");
    assert_eq!(texts(&gateway.state("t").await), ["one", "You said: one"]);
    let stores = |page: &str| ["sqlite", "memory"].map(|name| page.contains(&format!("<bdi>{name}</bdi>")));
    assert_eq!(stores(html(&gateway.get("/status").await)), [true, false]);
    let gateway = gateway.reopen("full").await;
    gateway.get("/api/threads/t").await.refused(404, "Thread t not found");
    assert_eq!(stores(html(&gateway.get("/status").await)), [false, true]);
}

#[tokio::test]
async fn the_event_feed_stays_where_it_was_until_the_restart() {
    let mut gateway = Setup { events: "memory", ..Setup::on("sqlite", "full") }.start().await;
    gateway.reconfigure(|setup| setup.events = "jsonl");
    gateway.create("t").await;
    gateway.ask("t", "one").await;
    let files = gateway.data().parent().unwrap().join("run_events");
    assert!(!files.exists());
    let gateway = gateway.reopen("full").await;
    let run = gateway.ask("t", "two").await;
    assert!(files.join("t.jsonl").is_file());
    let events = gateway.get(&format!("/api/threads/t/runs/{run}/events")).await.ok();
    let types: Vec<&str> =
        events.as_array().unwrap().iter().map(|e| e["event_type"].as_str().unwrap()).collect();
    assert!(types.starts_with(&["run.start", "llm.human.input", "llm.ai.response"]), "{types:?}");
    let gateway = gateway.reopen("full").await;
    let again = gateway.get(&format!("/api/threads/t/runs/{run}/events")).await.ok();
    assert_eq!(again, events, "it outlives the process");
    gateway.delete("/api/threads/t").await.ok();
    assert!(!files.join("t.jsonl").exists(), "it goes with the thread");
}

/// What the program has checked, such as whether it may listen beyond this machine, holds for what is served.
#[tokio::test]
async fn an_edit_during_the_start_waits_for_the_next_one() {
    let sections = json!({"auth": {"enabled": true}});
    let mut gateway = Setup { sections, ..Setup::default() }.start().await;
    let config = gateway.config();
    gateway.reconfigure(|setup| setup.sections = json!({"token_usage": {"enabled": false}}));
    assert!(!config.current().token_usage.enabled, "the edit is read");
    let started = App::start(config, Arc::new(ModeRegister::new())).await.unwrap();
    let request = Request::get("/api/models").body(Body::empty()).unwrap();
    assert_eq!(http::router(started).oneshot(request).await.unwrap().status(), 401);
}

//! The event feeds of runs that end in different ways, of concurrent runs, and of a process that dies during a run.

use std::sync::Arc;

use axum::http::Method;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{Gateway, MODES, Setup, question, texts};

/// Calls two tools, fails, circles, or waits at `gate` after a tool; else answers.
fn script(gate: &str) -> Value {
    json!({"rules": [
        {"when": {"contains": ["two tools"]}, "answers": [
            {"text": "Both.", "tool_calls": [{"name": "ls", "id": "a"}, {"name": "no_such_tool", "id": "b"}],
             "usage": {"input_tokens": 5, "output_tokens": 6}},
            {"text": "done"},
        ]},
        {"when": {"contains": ["fail"]}, "answers": [{"error": {"kind": "fatal", "message": "no such model"}}]},
        {"when": {"contains": ["loop"]}, "repeat_last": true, "answers": [{"tool_calls": [{"name": "ls"}]}]},
        {"when": {"contains": ["wait"]}, "answers": [
            {"tool_calls": [{"name": "ls"}]}, {"text": "late", "gate": {"name": gate}},
        ]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

async fn events(gateway: &Gateway, thread: &str, run: &str, query: &str) -> Vec<Value> {
    let path = format!("/api/threads/{thread}/runs/{run}/events{query}");
    gateway.get(&path).await.ok().as_array().unwrap().clone()
}

fn types(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["event_type"].as_str().unwrap()).collect()
}

fn numbers(events: &[Value]) -> Vec<u64> {
    events.iter().map(|event| event["seq"].as_u64().unwrap()).collect()
}

#[tokio::test]
async fn the_events_of_a_run_follow_its_steps_and_say_how_it_ended() {
    for mode in MODES {
        for store in ["memory", "db"] {
            let name = format!("events-{mode}-{store}");
            let gateway =
                Setup { mode, events: store, script: script(&name), ..Setup::default() }.start().await;
            gateway.create("t").await;
            let mut all = Vec::new();

            let run = gateway.ask("t", "two tools").await;
            let found = events(&gateway, "t", &run, "").await;
            let called = ["llm.ai.response", "llm.tool.result", "llm.tool.result", "llm.ai.response"];
            let expected =
                [&["run.start", "llm.human.input"][..], &called, &["run.end", "run.delivery"]].concat();
            assert_eq!(types(&found), expected);
            let categories: Vec<&str> = found.iter().map(|e| e["category"].as_str().unwrap()).collect();
            let messages = ["message"; 5];
            assert_eq!(categories, [&["trace"][..], &messages, &["outputs"; 2]].concat());
            let mut results: Vec<&str> =
                found[3..5].iter().map(|e| e["content"]["tool_call_id"].as_str().unwrap()).collect();
            results.sort_unstable();
            assert_eq!(results, ["a", "b"]);
            let metadata = &found[2]["metadata"];
            assert_eq!((&metadata["caller"], &metadata["llm_call_index"]), (&json!("lead_agent"), &json!(0)));
            assert_eq!(metadata["usage"]["total_tokens"], 11);
            assert!(metadata["latency_ms"].is_u64(), "{metadata}");
            assert_eq!(found[5]["metadata"]["llm_call_index"], 1);
            all.extend(found);

            let run = gateway.ask("t", "fail").await;
            let found = events(&gateway, "t", &run, "").await;
            let expected =
                ["run.start", "llm.human.input", "llm.error", "llm.ai.response", "run.error", "run.delivery"];
            assert_eq!(types(&found), expected, "the answer in its place is an answer");
            assert_eq!(
                (&found[2]["category"], &found[2]["metadata"]),
                (&json!("trace"), &json!({"caller": "lead_agent"}))
            );
            let reason = "model `m`: request refused: no such model (attempts: 1)";
            let content = json!({"error_type": "rejected", "reason": reason, "model": "m"});
            assert_eq!(found[2]["content"], content);
            all.extend(found);

            let mut body = question("loop");
            body["config"] = json!({"recursion_limit": 1});
            let record = gateway.post("/api/threads/t/runs", body).await.ok();
            let run = record["run_id"].as_str().unwrap();
            gateway.join("t", run).await;
            let found = events(&gateway, "t", run, "").await;
            let expected = ["run.start", "llm.human.input", "llm.ai.response", "run.error", "run.delivery"];
            assert_eq!(types(&found), expected);
            let error = &found[3];
            assert_eq!(
                (&error["category"], &error["content"]["name"]),
                (&json!("error"), &json!("GraphRecursionError"))
            );
            all.extend(found);

            let run = gateway.start_run("t", "wait").await;
            gate(&name).reached().await;
            gateway.call(Method::POST, &format!("/api/threads/t/runs/{run}/cancel?wait=true"), None).await;
            let found = events(&gateway, "t", &run, "").await;
            let expected =
                ["run.start", "llm.human.input", "llm.ai.response", "llm.tool.result", "run.delivery"];
            assert_eq!(types(&found), expected, "what it did until it was cancelled");
            all.extend(found);

            let expected: Vec<u64> = (1..=all.len() as u64).collect();
            assert_eq!(numbers(&all), expected, "{mode} {store}: one sequence over the runs of the thread");
        }
    }
}

/// The content of the events of this type, each with the number of answers before it.
fn contents<'a>(events: &'a [Value], event_type: &str) -> Vec<(usize, &'a Value)> {
    let mut answers = 0;
    let mut found = Vec::new();
    for event in events {
        answers += usize::from(event["event_type"] == "llm.ai.response");
        if event["event_type"] == event_type {
            found.push((answers, &event["content"]));
        }
    }
    found
}

#[tokio::test]
async fn loop_detection_notes_its_warning_and_its_stop_and_no_arguments() {
    let noted = |action: &str, layer: &str, tools: &[&str], count: u64| {
        json!({
            "name": "LoopDetectionMiddleware", "hook": "after_model", "action": action,
            "changes": {
                "detection_layer": layer, "tool_names": tools, "count": count, "threshold": count,
                "is_subagent": false, "agent_id": null,
            },
        })
    };
    let script = json!({"rules": [
        {"when": {"contains": ["loop"]}, "repeat_last": true, "answers": [
            {"tool_calls": [{"name": "ls", "args": {"path": "PRIVATE"}}, {"name": "glob", "args": {"pattern": "PRIVATE"}}]},
        ]},
        {"when": {"contains": ["often"]}, "answers": [
            {"tool_calls": [{"name": "ls", "args": {"path": "1"}}]}, {"tool_calls": [{"name": "ls", "args": {"path": "2"}}]},
            {"text": "enough"},
        ]},
        {"answers": [{"text": "fine"}]},
    ]});
    for mode in MODES {
        let setup = Setup { mode, script: script.clone(), ..Setup::default() };
        let overrides = json!({"ls": {"warn": 2, "hard_limit": 9}});
        let sections = json!({"loop_detection": {"tool_freq_overrides": overrides}});
        let gateway = Setup { sections, ..setup.clone() }.start().await;
        gateway.create("t").await;
        let run = gateway.ask("t", "often").await;
        let found = events(&gateway, "t", &run, "").await;
        let frequent = noted("warn", "tool_frequency", &["ls"], 2);
        assert_eq!(contents(&found, "middleware:loop_detection"), [(2, &frequent)]);
        assert_eq!(gateway.run("t", &run).await["stop_reason"], Value::Null);

        let gateway = setup.clone().start().await;
        gateway.create("t").await;
        let run = gateway.ask("t", "loop").await;
        let found = events(&gateway, "t", &run, "").await;
        let warned = noted("warn", "identical_call_set", &["glob", "ls"], 3);
        let stopped = noted("hard_stop", "identical_call_set", &["glob", "ls"], 5);
        assert_eq!(contents(&found, "middleware:loop_detection"), [(3, &warned), (5, &stopped)], "{mode}");
        let filtered = events(&gateway, "t", &run, "?event_types=middleware:loop_detection").await;
        assert_eq!(filtered.len(), 2);
        assert!(
            filtered.iter().all(|event| event["category"] == "middleware" && event["metadata"] == json!({}))
        );
        assert!(!json!(filtered).to_string().contains("PRIVATE"));
        assert_eq!(gateway.run("t", &run).await["stop_reason"], "loop_capped");

        let sections = json!({"loop_detection": {"enabled": false}});
        let gateway = Setup { sections, ..setup }.start().await;
        gateway.create("t").await;
        let run = gateway.ask("t", "loop").await;
        assert_eq!(contents(&events(&gateway, "t", &run, "").await, "middleware:loop_detection"), []);
    }
}

/// Two tools are called often in the same answers.
#[tokio::test]
async fn each_warning_that_falls_due_with_an_answer_is_noted_and_given() {
    let call = |tool: &str, arg: &str, value: &str| json!({"name": tool, "args": {arg: value}});
    let calls = |n: &str| json!({"tool_calls": [call("ls", "path", n), call("glob", "pattern", n)]});
    let directory = tempfile::tempdir().unwrap();
    let record = directory.path().join("calls.jsonl");
    let script = json!({
        "rules": [{"answers": [calls("1"), calls("2"), {"text": "enough"}]}],
        "record": record,
    });
    let often = json!({"warn": 2, "hard_limit": 9});
    let sections = json!({"loop_detection": {"tool_freq_overrides": {"ls": often, "glob": often}}});
    let gateway = Setup { script, sections, ..Setup::default() }.start().await;
    gateway.create("t").await;
    let run = gateway.ask("t", "go").await;
    let found = events(&gateway, "t", &run, "?event_types=middleware:loop_detection").await;
    let tools: Vec<&Value> = found.iter().map(|event| &event["content"]["changes"]["tool_names"]).collect();
    assert_eq!(tools, [&json!(["glob"]), &json!(["ls"])]);
    let requests = std::fs::read_to_string(record).unwrap();
    let warnings: Vec<usize> =
        requests.lines().map(|request| request.matches("[loop warning]").count()).collect();
    assert_eq!(warnings, [0, 0, 2], "once, before the last answer");
}

#[tokio::test]
async fn a_title_that_the_model_fails_to_give_is_an_error_of_its_own_caller_and_not_of_the_run() {
    let script = json!({"rules": [
        {"when": {"caller": "middleware:title"}, "answers": [{"error": {"kind": "fatal", "message": "no titles"}}]},
        {"answers": [{"text": "fine"}]},
    ]});
    let sections = json!({"title": {"model_name": "m"}});
    let gateway = Setup { script, sections, ..Setup::default() }.start().await;
    gateway.create("t").await;
    let run = gateway.ask("t", "hello").await;
    let found = events(&gateway, "t", &run, "?event_types=llm.error,run.error").await;
    assert_eq!(types(&found), ["llm.error"]);
    assert_eq!(found[0]["metadata"], json!({"caller": "middleware:title"}));
    assert_eq!(found[0]["content"]["reason"], "model `m`: request refused: no titles (attempts: 1)");
    assert_eq!(gateway.run("t", &run).await["status"], "success");
    assert_eq!(gateway.state("t").await["values"]["title"], "hello", "made of the question");
}

#[tokio::test]
async fn a_title_model_that_does_not_exist_fails_no_run() {
    for (enabled, title) in [(true, json!("hello")), (false, Value::Null)] {
        let script = json!({"rules": [{"answers": [{"text": "fine"}]}]});
        let sections = json!({"title": {"enabled": enabled, "model_name": "gone"}});
        let gateway = Setup { script, sections, ..Setup::default() }.start().await;
        gateway.create("t").await;
        let run = gateway.ask("t", "hello").await;
        assert_eq!(gateway.run("t", &run).await["status"], "success");
        assert_eq!(gateway.state("t").await["values"]["title"], title);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_at_the_same_time_number_the_events_of_their_own_threads() {
    for store in ["memory", "db"] {
        let script = script("none");
        let gateway = Arc::new(Setup { events: store, script, ..Setup::on("sqlite", "delta") }.start().await);
        let working = (0..8).map(|n| {
            let gateway = Arc::clone(&gateway);
            tokio::spawn(async move {
                let thread = format!("t{n}");
                gateway.create(&thread).await;
                let mut found = Vec::new();
                for text in ["two tools", "hello", "two tools"] {
                    let run = gateway.ask(&thread, text).await;
                    found.extend(events(&gateway, &thread, &run, "").await);
                }
                found
            })
        });
        for found in futures::future::join_all(working.collect::<Vec<_>>()).await {
            assert_eq!(numbers(&found.unwrap()), (1..=21).collect::<Vec<_>>(), "{store}");
        }
    }
}

/// The runtime of the first process stops with everything that it was doing, as if the process had died.
#[test]
fn a_process_that_died_in_a_run_leaves_an_error_and_a_thread_that_goes_on() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for mode in MODES {
        let name = format!("died-{mode}");
        let first = runtime();
        let (gateway, run, state) = first.block_on(async {
            let gateway = Setup { script: script(&name), ..Setup::on("sqlite", mode) }.start().await;
            gateway.create("t").await;
            gateway.ask("t", "before").await;
            let run = gateway.start_run("t", "wait").await;
            gate(&name).reached().await;
            let state = gateway.state("t").await;
            (gateway, run, state)
        });
        drop(first);
        runtime().block_on(async {
            let gateway = gateway.reopen_dead().await;
            let record = gateway.run("t", &run).await;
            assert_eq!(record["status"], "error");
            assert_eq!(record["error"], "Gateway restarted before this run reached a durable final state.");
            assert_eq!(record["stop_reason"], "orphan_recovered");
            let found = gateway.post("/api/threads/search", json!({"ids": ["t"]})).await.ok();
            assert_eq!(found[0]["status"], "error");
            assert_eq!(gateway.state("t").await, state, "the last completed step");
            let stop = format!("/api/threads/t/runs/{run}/cancel");
            let refused = gateway.call(Method::POST, &stop, None).await;
            refused.refused(409, &format!("Run {run} is not cancellable (status: error)"));
            let next = gateway.ask("t", "after").await;
            assert_eq!(gateway.run("t", &next).await["status"], "success");
            let state = gateway.state("t").await;
            assert_eq!(texts(&state)[5..], ["after", "You said: after"], "{mode}: {state}");
        });
    }
}

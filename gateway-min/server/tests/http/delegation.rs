//! Runs that delegate: what clients see, what is stored, what a deleted thread takes along.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::sse;
use crate::support::{ALL, Gateway, Setup, question};

/// A lead that delegates two tasks, and subagents of two turns.
fn script() -> Value {
    let task = |prompt: &str| json!({"name": "task", "args": {"prompt": prompt, "subagent_type": "general-purpose", "description": "d"}});
    json!({"rules": [
        {"when": {"caller": "subagent"}, "answers": [
            {"text": "Looking.", "tool_calls": [{"name": "ls", "args": {}}], "usage": {"input_tokens": 5, "output_tokens": 1}},
            {"text": "Done: {{input}}", "usage": {"input_tokens": 7, "output_tokens": 2}},
        ]},
        {"when": {"contains": ["delegate"]}, "answers": [
            {"text": "I delegate.", "tool_calls": [task("one"), task("two")], "usage": {"input_tokens": 10, "output_tokens": 2}},
            {"text": "Both are done.", "usage": {"input_tokens": 20, "output_tokens": 3}},
        ]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

fn delegating(text: &str) -> Value {
    let mut body = question(text);
    body["context"] = json!({"subagent_enabled": true});
    body["stream_mode"] = json!(["custom", "values"]);
    body
}

async fn delegated(gateway: &Gateway, thread: &str) -> Vec<sse::Frame> {
    gateway.create(thread).await;
    let path = format!("/api/threads/{thread}/runs/stream");
    let request = axum::http::Request::post(path).header("content-type", "application/json");
    let answer =
        gateway.open_answer(request.body(delegating("please delegate").to_string().into()).unwrap()).await;
    sse::all(answer).await
}

/// The rows of all tables but the one that remembers which threads were deleted.
async fn rows(gateway: &Gateway) -> BTreeMap<String, i64> {
    let mut rows = gateway.rows().await;
    rows.retain(|table, _| !table.ends_with("grave"));
    rows
}

#[tokio::test]
async fn clients_follow_subagents_and_find_what_they_did() {
    for (backend, mode) in ALL {
        let gateway = Setup { script: script(), ..Setup::on(backend, mode) }.start().await;
        delegated(&gateway, "other").await;
        let before = if backend == "memory" { None } else { Some(rows(&gateway).await) };
        let frames = delegated(&gateway, "t").await;
        let run = frames[0].data["run_id"].as_str().unwrap().to_owned();
        let custom: Vec<&Value> =
            frames.iter().filter(|frame| frame.name == "custom").map(|frame| &frame.data).collect();
        let of = |kind: &str| custom.iter().filter(|event| event["type"] == kind).count();
        assert_eq!(
            (of("task_started"), of("task_running"), of("task_completed")),
            (2, 6, 2),
            "{backend} {mode}"
        );
        let row = gateway.run("t", &run).await;
        assert_eq!(row["status"], "success", "{backend} {mode}: {row}");

        let usage = gateway.get("/api/threads/t/token-usage").await.ok();
        assert_eq!(usage["by_caller"], json!({"lead_agent": 35, "subagent": 30, "middleware": 0}));
        let events = gateway
            .get(&format!(
                "/api/threads/t/runs/{run}/events?event_types=subagent.start,subagent.step,subagent.end"
            ))
            .await
            .ok();
        let types: Vec<&str> =
            events.as_array().unwrap().iter().map(|event| event["event_type"].as_str().unwrap()).collect();
        assert_eq!(types.iter().filter(|kind| **kind == "subagent.step").count(), 6);
        assert_eq!((types.len(), *types.last().unwrap()), (10, "subagent.end"));

        let listed = gateway.get("/api/threads/t/executions").await.ok();
        let executions = listed["executions"].as_array().unwrap();
        assert_eq!(executions.len(), 2);
        for execution in executions {
            assert_eq!(
                (&execution["status"], &execution["delivered"], &execution["kind"]),
                (&json!("completed"), &json!(true), &json!("task"))
            );
            assert_eq!(execution["usage"]["total_tokens"], 15);
            assert_eq!((&execution["run_id"], &execution["children"]), (&json!(run), &json!([])));
        }

        let state = gateway.get("/api/threads/t/state").await.ok();
        assert_eq!(state["values"]["delegations"].as_array().unwrap().len(), 2);
        let child = format!("subagent:{}", executions[0]["execution_id"].as_str().unwrap());
        for path in [format!("/api/threads/{child}"), format!("/api/threads/{child}/state")] {
            assert_eq!(gateway.get(&path).await.status, 422, "no client can name it");
        }
        assert_eq!(gateway.delete(&format!("/api/threads/{child}")).await.status, 404);
        let stored = if backend == "memory" { None } else { Some(rows(&gateway).await) };
        for strategy in ["delete", "keep_latest"] {
            let pruned = json!({"thread_ids": [child], "strategy": strategy});
            let pruned = gateway.post("/api/threads/prune", pruned).await.ok();
            assert_eq!(pruned, json!({"pruned_count": 0, "not_found": [child], "busy": []}), "{strategy}");
        }
        if let Some(stored) = stored {
            assert_eq!(rows(&gateway).await, stored, "{backend} {mode}");
        }
        let found = gateway.post("/api/threads/search", json!({})).await.ok();
        assert_eq!(found.as_array().unwrap().len(), 2, "{found}");
        gateway.delete("/api/threads/t").await.ok();
        assert_eq!(gateway.get("/api/threads/t/executions").await.ok()["executions"], json!([]));
        if let Some(before) = before {
            assert_eq!(rows(&gateway).await, before, "{backend} {mode}: subagents go with their parent");
        }
    }
}

/// In two zones whose dates differ at any time.
#[tokio::test]
async fn prompts_have_the_date_of_the_configured_zone() {
    for (zone, hours) in [("Pacific/Kiritimati", 14), ("Etc/GMT+12", -12)] {
        let directory = tempfile::tempdir().unwrap();
        let record = directory.path().join("calls.jsonl");
        let mut script = script();
        script["record"] = json!(record);
        let variables = vec![("SVC_DATE_TIMEZONE", zone.to_owned())];
        let gateway = Setup { script, variables, ..Setup::default() }.start().await;
        let date = || {
            let there = chrono::Utc::now() + chrono::TimeDelta::hours(hours);
            there.format("%Y-%m-%d, %A").to_string()
        };
        let before = date();
        delegated(&gateway, "t").await;
        // Midnight may come in between.
        let dates = [before, date()];
        let mut callers = BTreeMap::new();
        for request in std::fs::read_to_string(record).unwrap().lines() {
            let request: Value = serde_json::from_str(request).unwrap();
            let system = request["system"].as_str().unwrap();
            let is_named = |date: &String| {
                system.contains(&format!("Today is {date}."))
                    || system.contains(&format!("<current_date>{date}</current_date>"))
            };
            assert!(dates.iter().any(is_named), "{zone}: {dates:?}: {system}");
            *callers.entry(request["caller"].as_str().unwrap().to_owned()).or_insert(0) += 1;
        }
        let expected = [("lead_agent", 2), ("subagent:general-purpose", 4)];
        let expected = BTreeMap::from(expected.map(|(caller, calls)| (caller.to_owned(), calls)));
        assert_eq!(callers, expected, "{zone}");
    }
}

#[tokio::test]
async fn a_run_that_does_not_ask_for_it_has_no_tool_to_delegate() {
    let gateway = Setup { script: script(), ..Setup::default() }.start().await;
    gateway.create("t").await;
    gateway.ask("t", "please delegate").await;
    let state = gateway.get("/api/threads/t/state").await.ok();
    let text = state["values"]["messages"][2]["content"].as_str().unwrap().to_owned();
    assert!(text.starts_with("Error: there is no tool `task`"), "{text}");
    assert_eq!(
        state["values"]["messages"][2]["additional_kwargs"],
        json!({}),
        "and its tools leave no receipts"
    );
}

/// Scenario 69, of a subagent: its audit events name it.
#[tokio::test]
async fn a_subagent_that_goes_round_in_circles_is_in_the_events_of_the_run() {
    let task = json!({"name": "task", "args": {"prompt": "circle", "subagent_type": "general-purpose"}});
    let script = json!({"rules": [
        {"when": {"caller": "subagent"}, "repeat_last": true, "answers": [{"tool_calls": [{"name": "ls", "args": {}}]}]},
        {"answers": [{"text": "I delegate.", "tool_calls": [task]}, {"text": "It was stopped."}]},
    ]});
    let gateway = Setup { script, ..Setup::default() }.start().await;
    let frames = delegated(&gateway, "t").await;
    let run = frames[0].data["run_id"].as_str().unwrap();
    let path = format!("/api/threads/t/runs/{run}/events?event_types=middleware:loop_detection");
    let events = gateway.get(&path).await.ok();
    let seen: Vec<[&Value; 3]> = events
        .as_array()
        .unwrap()
        .iter()
        .map(|event| &event["content"])
        .map(|event| [&event["action"], &event["changes"]["is_subagent"], &event["changes"]["agent_id"]])
        .collect();
    assert_eq!(
        json!(seen),
        json!([["warn", true, "general-purpose"], ["hard_stop", true, "general-purpose"]])
    );
    let listed = gateway.get("/api/threads/t/executions").await.ok();
    assert_eq!(listed["executions"][0]["stop_reason"], "loop_capped");
}

/// Scenario 76: the feed has a subagent's events while it works, twenty-five at a time; they can be read page by page, and
/// are no messages.
#[tokio::test]
async fn the_events_of_a_subagent_are_written_by_the_batch_and_read_by_the_page() {
    let task = |prompt: &str| json!({"name": "task", "args": {"prompt": prompt, "subagent_type": "general-purpose"}});
    for (backend, mode) in ALL {
        let gate = format!("feed-of-subagents-{backend}-{mode}");
        let mut answers: Vec<Value> = (0..15)
            .map(|turn| json!({"text": "On.", "tool_calls": [{"name": "glob", "args": {"pattern": turn.to_string()}}]}))
            .collect();
        answers.push(json!({"text": "Done.", "gate": {"name": gate}}));
        let script = json!({"rules": [
            {"when": {"caller": "subagent"}, "answers": answers},
            {"answers": [{"tool_calls": [task("work")]}, {"text": "It is done."}]},
        ]});
        let gateway = Setup { script, ..Setup::on(backend, mode) }.start().await;
        gateway.create("t").await;
        let run = gateway.post("/api/threads/t/runs", delegating("go")).await.ok();
        let run = run["run_id"].as_str().unwrap();
        threadkeep_agent::model::scripted::gate(&gate).reached().await;
        let feed = format!("/api/threads/t/runs/{run}/events");
        let read = async |query: &str| {
            gateway.get(&format!("{feed}?{query}")).await.ok().as_array().unwrap().clone()
        };
        // Of one start and thirty steps, a batch.
        let mut so_far = Vec::new();
        while so_far.is_empty() {
            so_far = read("event_types=subagent.start,subagent.step").await;
        }
        assert!((20..=25).contains(&so_far.len()), "{backend} {mode}: {}", so_far.len());
        threadkeep_agent::model::scripted::gate(&gate).open();
        gateway.join("t", run).await;
        let task_id = so_far[0]["metadata"]["task_id"].as_str().unwrap().to_owned();
        let all = read(&format!("task_id={task_id}")).await;
        assert_eq!(all.len(), 1 + 31 + 1, "{backend} {mode}");
        assert_eq!(all[..so_far.len()], so_far, "they stay as they were");
        let (mut paged, mut after) = (Vec::new(), String::new());
        loop {
            let page = read(&format!("task_id={task_id}&limit=7{after}")).await;
            let Some(last) = page.last() else { break };
            assert!(page.len() <= 7);
            after = format!("&after_seq={}", last["seq"]);
            paged.extend(page);
        }
        assert_eq!(paged, all, "{backend} {mode}");
        assert_eq!(read("task_id=none").await, [] as [Value; 0]);
        assert_eq!(gateway.get(&format!("{feed}?limit=0")).await.status, 422);
        assert_eq!(gateway.get(&format!("{feed}?limit=2001")).await.status, 422);
        // The conversation has the result and none of the steps.
        assert_eq!(gateway.state("t").await["values"]["messages"].as_array().unwrap().len(), 4);
        assert!(all.iter().all(|event| event["category"] == "subagent"), "{backend} {mode}");
    }
}

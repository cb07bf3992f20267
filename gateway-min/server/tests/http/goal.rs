//! The goal of a thread, and the usage of its runs.

use axum::http::Method;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{ALL, Answer, Gateway, MODES, Setup, id, question, texts};

async fn put(gateway: &Gateway, body: Value) -> Answer {
    gateway.call(Method::PUT, "/api/threads/t/goal", Some(body)).await
}

#[tokio::test]
async fn a_goal_is_set_read_and_cleared_on_the_head() {
    for (backend, mode) in ALL {
        let gateway = Setup::on(backend, mode).start().await;
        assert_eq!(gateway.get("/api/threads/t/goal").await.ok(), json!({"goal": null}));
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        let before = gateway.state("t").await;
        let set = put(&gateway, json!({"objective": "  Ship \n it ", "max_continuations": 3})).await.ok();
        let goal = &set["goal"];
        assert_eq!(
            *goal,
            json!({"objective": "Ship it", "status": "active", "created_at": goal["created_at"],
                   "updated_at": goal["created_at"], "continuation_count": 0, "max_continuations": 3,
                   "no_progress_count": 0, "max_no_progress_continuations": 2})
        );
        let gateway = if backend == "memory" { gateway } else { gateway.reopen(mode).await };
        assert_eq!(gateway.get("/api/threads/t/goal").await.ok(), set);
        let after = gateway.state("t").await;
        assert_eq!((&after["values"]["goal"], &after["next"]), (goal, &before["next"]));
        assert_eq!(after["values"]["messages"], before["values"]["messages"]);
        assert_eq!(after["parent_checkpoint_id"], before["checkpoint_id"]);
        let metadata = &after["metadata"];
        assert_eq!(metadata["step"], before["metadata"]["step"].as_i64().unwrap() + 1);
        assert_eq!(metadata["writes"], json!({"goal": {"goal": goal}}));
        for key in ["run_durations", "run_message_ids", "svc_agent_name"] {
            assert!(metadata.get(key).is_some(), "{key}");
            assert_eq!(metadata[key], before["metadata"][key]);
        }
        gateway.ask("t", "two").await;
        assert_eq!(gateway.get("/api/threads/t/goal").await.ok()["goal"]["objective"], goal["objective"]);
        assert_eq!(texts(&gateway.state("t").await), ["one", "You said: one", "two", "You said: two"]);

        let cleared = gateway.delete("/api/threads/t/goal").await.ok();
        assert_eq!(cleared, json!({"goal": null}));
        assert_eq!(gateway.state("t").await["values"]["goal"], Value::Null);
        let head = gateway.state("t").await;
        gateway.delete("/api/threads/t/goal").await.ok();
        assert_eq!(id(&gateway.state("t").await), id(&head), "there was nothing to clear");
    }
}

#[tokio::test]
async fn a_goal_makes_its_thread_and_a_bad_one_makes_nothing() {
    for mode in MODES {
        let gateway = Setup::on("sqlite", mode).start().await;
        let rows = gateway.rows().await;
        assert_eq!(gateway.delete("/api/threads/t/goal").await.ok(), json!({"goal": null}));
        let at = |field: &str| json!(["body", field]);
        let blank = put(&gateway, json!({"objective": " \n"})).await;
        blank.invalid("value_error", &at("objective"));
        assert_eq!(blank.body["detail"][0]["msg"], "Goal objective must not be empty.");
        put(&gateway, json!({"objective": ""})).await.invalid("string_too_short", &at("objective"));
        put(&gateway, json!({"objective": "x".repeat(4001)}))
            .await
            .invalid("string_too_long", &at("objective"));
        put(&gateway, json!({})).await.invalid("missing", &at("objective"));
        for (limit, kind) in [(9, "less_than_equal"), (-1, "greater_than_equal")] {
            let body = json!({"objective": "x", "max_continuations": limit});
            put(&gateway, body).await.invalid(kind, &at("max_continuations"));
        }
        assert_eq!(gateway.rows().await, rows);
        assert_eq!(put(&gateway, json!({"objective": "x"})).await.ok()["goal"]["max_continuations"], 8);
        assert_eq!(gateway.get("/api/threads/t").await.ok()["status"], "idle");
        assert_eq!(gateway.history("t").await.len(), 2);
    }
}

#[tokio::test]
async fn a_goal_waits_for_no_run() {
    for mode in MODES {
        let name = format!("goal-{mode}");
        let script = json!({"rules": [{"answers": [{"text": "late", "gate": {"name": name}}]}]});
        let gateway = Setup { script, ..Setup::on("sqlite", mode) }.start().await;
        gateway.create("t").await;
        let run = gateway.start_run("t", "wait").await;
        gate(&name).reached().await;
        let set = put(&gateway, json!({"objective": "x"})).await;
        set.refused(409, "Thread has a run in flight. Set the goal after the run finishes.");
        let clear = gateway.delete("/api/threads/t/goal").await;
        clear.refused(409, "Thread has a run in flight. Clear the goal after the run finishes.");
        gate(&name).open();
        gateway.join("t", &run).await;
    }
}

#[tokio::test]
async fn a_goal_is_written_in_the_other_mode_and_the_thread_stays_what_it_is() {
    let gateway = Setup { frequency: 10, ..Setup::on("sqlite", "delta") }.start().await;
    gateway.create("t").await;
    gateway.ask("t", "one").await;
    let gateway = gateway.reopen("full").await;
    let set = put(&gateway, json!({"objective": "x"})).await.ok();
    assert_eq!(gateway.get("/api/threads/t/goal").await.ok(), set);
    assert_eq!(gateway.get("/api/threads/t/state").await.status, 409, "it is a delta thread still");
    let gateway = gateway.reopen("delta").await;
    gateway.ask("t", "two").await;
    assert_eq!(texts(&gateway.state("t").await), ["one", "You said: one", "two", "You said: two"]);
    assert_eq!(gateway.get("/api/threads/t/goal").await.ok()["goal"]["objective"], "x");
}

#[tokio::test]
async fn the_tokens_of_all_runs_are_summed_and_a_mismatch_hides_the_context_only() {
    for mode in MODES {
        let sections = json!({"models": [
            {"name": "m", "use": "scripted", "model": "m", "script": "script.json", "context_window": 100},
        ]});
        let gateway = Setup { sections, ..Setup::on("sqlite", mode) }.start().await;
        let usage = async |gateway: &Gateway| gateway.get("/api/threads/t/token-usage").await.ok();
        let nothing = json!({"thread_id": "t", "total_tokens": 0, "total_input_tokens": 0,
            "total_output_tokens": 0, "total_runs": 0, "by_model": {},
            "by_caller": {"lead_agent": 0, "subagent": 0, "middleware": 0}, "context_usage": null});
        assert_eq!(usage(&gateway).await, nothing);
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        gateway.ask("t", "two").await;
        let seen = usage(&gateway).await;
        let context = &seen["context_usage"];
        let count = context["token_count"].as_u64().unwrap();
        assert!(count > 0);
        assert_eq!(context["percentage"].as_f64(), Some(f64::from(u32::try_from(count).unwrap())));
        let expected = json!({"thread_id": "t", "total_tokens": 14, "total_input_tokens": 6,
            "total_output_tokens": 8, "total_runs": 2, "by_model": {"m": {"tokens": 14, "runs": 2}},
            "by_caller": {"lead_agent": 14, "subagent": 0, "middleware": 0},
            "context_usage": {"token_count": count, "max_context_tokens": 100, "percentage": context["percentage"]}});
        assert_eq!(seen, expected);
        if mode == "delta" {
            let gateway = gateway.reopen("full").await;
            let mut hidden = expected;
            hidden["context_usage"] = Value::Null;
            assert_eq!(usage(&gateway).await, hidden);
        }
    }
}

#[tokio::test]
async fn a_run_at_work_counts_if_that_is_asked_for() {
    let script = json!({"rules": [{"answers": [{"text": "late", "gate": {"name": "usage"}}]}]});
    let gateway = Setup { script, ..Setup::default() }.start().await;
    gateway.create("t").await;
    let run = gateway.post("/api/threads/t/runs", question("x")).await.ok();
    gate("usage").reached().await;
    for (query, runs) in [("", 0), ("?include_active=false", 0), ("?include_active=true", 1)] {
        let usage = gateway.get(&format!("/api/threads/t/token-usage{query}")).await.ok();
        assert_eq!(usage["total_runs"], runs, "{query}");
    }
    gate("usage").open();
    gateway.join("t", run["run_id"].as_str().unwrap()).await;
}

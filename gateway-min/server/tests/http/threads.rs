//! Creating, reading and changing threads.

use axum::body::Body;
use axum::http::{Method, Request};
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{ALL, MODES, Setup, connect, question};

/// The fields of every thread.
fn keys(thread: &Value) -> Vec<&str> {
    thread.as_object().unwrap().keys().map(String::as_str).collect()
}

const KEYS: [&str; 7] =
    ["created_at", "interrupts", "metadata", "status", "thread_id", "updated_at", "values"];

#[tokio::test]
async fn a_thread_is_created_without_a_body_with_an_id_and_with_metadata() {
    for (backend, mode) in ALL {
        let gateway = Setup::on(backend, mode).start().await;
        for body in [None, Some(json!({})), Some(json!({"metadata": null, "thread_id": null}))] {
            let thread = gateway.call(Method::POST, "/api/threads", body).await.ok();
            assert_eq!(keys(&thread), KEYS);
            assert_eq!(
                uuid::Uuid::parse_str(thread["thread_id"].as_str().unwrap()).unwrap().get_version_num(),
                4
            );
            assert_eq!(
                (&thread["status"], &thread["metadata"], &thread["values"], &thread["interrupts"]),
                (&json!("idle"), &json!({}), &json!({}), &json!({}))
            );
            assert!(thread["created_at"].as_str().unwrap().ends_with("+00:00"), "{thread}");
        }
        let body = json!({
            "thread_id": "t_-9", "assistant_id": "lead_agent",
            "metadata": {"a": 1, "owner_id": "x", "user_id": "y", "nested": {"b": [2]}},
            "ttl": null, "supersteps": [],
        });
        let thread = gateway.post("/api/threads", body).await.ok();
        assert_eq!(thread["thread_id"], "t_-9");
        assert_eq!(thread["metadata"], json!({"a": 1, "nested": {"b": [2]}}));
    }
}

#[tokio::test]
async fn creating_a_thread_again_returns_it_unchanged_or_refuses() {
    for (backend, mode) in ALL {
        let gateway = Setup::on(backend, mode).start().await;
        let body = |a: u8| json!({"thread_id": "t", "metadata": {"a": a}});
        let first = gateway.post("/api/threads", body(1)).await.ok();
        gateway.ask("t", "hello").await;
        let head = gateway.state("t").await;
        let again = gateway.post("/api/threads", body(2)).await.ok();
        assert_eq!((&again["metadata"], &again["created_at"]), (&json!({"a": 1}), &first["created_at"]));
        assert_eq!(again["values"], json!({}));
        assert_eq!(gateway.state("t").await, head);

        let mut raise = body(3);
        raise["if_exists"] = json!("raise");
        let refused = gateway.post("/api/threads", raise.clone()).await;
        refused.refused(409, "Thread t already exists");
        assert_eq!(refused.body.as_object().unwrap().len(), 1, "nothing but the detail");
        raise["thread_id"] = json!("new");
        assert_eq!(gateway.post("/api/threads", raise).await.ok()["thread_id"], "new");
        let mut nothing = body(4);
        nothing["if_exists"] = json!("do_nothing");
        assert_eq!(gateway.post("/api/threads", nothing).await.ok()["metadata"], json!({"a": 1}));
    }
}

#[tokio::test]
async fn bad_ids_and_bad_fields_are_refused() {
    let gateway = Setup::default().start().await;
    for id in ["a".repeat(65).as_str(), "a/b", "a.b", "", "\u{e4}"] {
        let answer = gateway.post("/api/threads", json!({ "thread_id": id })).await;
        answer.invalid("string_pattern_mismatch", &json!(["body", "thread_id"]));
    }
    gateway
        .post("/api/threads", json!({"metadata": []}))
        .await
        .invalid("dict_type", &json!(["body", "metadata"]));
    gateway.get("/api/threads/a.b").await.invalid("string_pattern_mismatch", &json!(["path", "thread_id"]));
    let request = Request::post("/api/threads").header("content-type", "application/json");
    let answer = gateway.send(request.body(Body::from("{")).unwrap()).await;
    assert_eq!((answer.status, &answer.body["detail"][0]["type"]), (422, &json!("json_invalid")));
    assert_eq!(gateway.post("/api/threads/search", json!({})).await.ok(), json!([]));
}

#[tokio::test]
async fn a_fresh_thread_has_an_empty_state_and_one_entry_of_history() {
    for (backend, mode) in ALL {
        let gateway = Setup::on(backend, mode).start().await;
        let body = json!({"thread_id": "t", "metadata": {"topic": "x"}});
        let thread = gateway.post("/api/threads", body).await.ok();
        let state = gateway.state("t").await;
        assert_eq!((&state["values"], &state["next"], &state["tasks"]), (&json!({}), &json!([]), &json!([])));
        let mut metadata = json!({
            "source": "input", "step": -1, "parents": {}, "writes": null, "topic": "x",
            "created_at": thread["created_at"],
        });
        if mode == "delta" {
            metadata["svc_checkpoint_channel_mode"] = json!("delta");
        }
        assert_eq!(state["metadata"], metadata);
        let history = gateway.history("t").await;
        assert_eq!(history.len(), 1);
        assert_eq!((&history[0]["metadata"]["step"], &history[0]["values"]), (&json!(-1), &json!({})));
        assert_eq!(gateway.get("/api/threads/t").await.ok()["metadata"], json!({"topic": "x"}));
    }
}

/// Metadata of a thread is free except for the gateway's own names; metadata of a checkpoint has keys with a meaning.
#[tokio::test]
async fn thread_metadata_cannot_forge_what_checkpoints_mean() {
    let gateway = Setup::default().start().await;
    let metadata = json!({
        "svc_checkpoint_channel_mode": "delta", "counters_since_delta_snapshot": {"messages": [1, 1]},
        "source": 5, "step": "x", "parents": 7, "writes": {"runtime_run_duration": {}}, "created_at": 1,
        "run_durations": {"r": 1}, "run_message_ids": {"m": "r"}, "svc_agent_name": "other", "kept": true,
    });
    let thread = gateway.post("/api/threads", json!({"thread_id": "t", "metadata": metadata})).await.ok();
    let mut kept = metadata;
    kept.as_object_mut().unwrap().retain(|key, _| !key.starts_with("svc_"));
    assert_eq!(thread["metadata"], kept);
    let state = gateway.state("t").await;
    let created_at = &thread["created_at"];
    assert_eq!(
        state["metadata"],
        json!({"source": "input", "step": -1, "parents": {}, "writes": null, "created_at": created_at, "kept": true})
    );
}

#[tokio::test]
async fn creating_completes_a_thread_that_has_only_a_record_or_only_checkpoints() {
    for mode in MODES {
        let gateway = Setup::on("sqlite", mode).start().await;
        let body = json!({"thread_id": "t", "metadata": {"a": 1}});
        gateway.post("/api/threads", body.clone()).await.ok();
        let gateway = gateway
            .reopen_after(mode, |data| async move {
                for file in ["checkpoints.db", "checkpoints.db-wal", "checkpoints.db-shm"] {
                    std::fs::remove_file(data.join(file)).ok();
                }
            })
            .await;
        gateway.get("/api/threads/t/state").await.refused(404, "Thread t not found");
        assert_eq!(gateway.get("/api/threads/t").await.ok()["status"], "idle", "the record is enough");
        gateway.post("/api/threads", body.clone()).await.ok();
        assert_eq!(gateway.history("t").await.len(), 1);

        gateway.ask("t", "hello").await;
        let state = gateway.state("t").await;
        let gateway = gateway
            .reopen_after(mode, |data| async move {
                let db = connect(&data.join("gateway.db"));
                db.execute_batch("DELETE FROM threads_meta").unwrap();
            })
            .await;
        let thread = gateway.get("/api/threads/t").await.ok();
        assert_eq!(keys(&thread), KEYS);
        assert_eq!((&thread["status"], &thread["values"]), (&json!("idle"), &state["values"]));
        assert_eq!(thread["updated_at"], state["created_at"]);
        let metadata = thread["metadata"].as_object().unwrap();
        assert!(metadata.contains_key("run_id"));
        assert_eq!(metadata.contains_key("svc_checkpoint_channel_mode"), mode == "delta");
        assert_eq!(metadata.contains_key("counters_since_delta_snapshot"), mode == "delta");
        for key in ["created_at", "updated_at", "step", "source", "writes", "parents"] {
            assert!(!metadata.contains_key(key), "{key}");
        }
        let mut raise = body.clone();
        raise["if_exists"] = json!("raise");
        gateway.post("/api/threads", raise).await.refused(409, "Thread t already exists");
        assert_eq!(gateway.get("/api/threads/t").await.ok(), thread, "without a record as before");
        gateway.post("/api/threads", body).await.ok();
        assert_eq!(gateway.state("t").await, state, "the checkpoints are as they were");
        assert_eq!(gateway.get("/api/threads/t").await.ok()["metadata"], json!({"a": 1}));
    }
}

#[tokio::test]
async fn a_thread_that_is_not_there_is_not_found() {
    let gateway = Setup::default().start().await;
    gateway.get("/api/threads/t").await.refused(404, "Thread t not found");
    gateway.patch("/api/threads/t", json!({"metadata": {}})).await.refused(404, "Thread t not found");
    gateway.delete("/api/threads/t").await.refused(404, "Thread t not found");
    gateway.get("/api/threads/t/state").await.refused(404, "Thread t not found");
    gateway
        .post("/api/threads/t/state", json!({"values": {"title": "x"}}))
        .await
        .refused(404, "Thread t not found");
    assert_eq!(gateway.post("/api/threads/t/history", json!({})).await.ok(), json!([]));
}

#[tokio::test]
async fn reading_a_thread_shows_every_channel_and_complete_messages() {
    for (backend, mode) in ALL {
        let gateway = Setup::on(backend, mode).start().await;
        gateway.create("t").await;
        gateway.ask("t", "hello").await;
        let thread = gateway.get("/api/threads/t").await.ok();
        assert_eq!(thread["status"], "idle");
        assert_eq!(thread["values"]["title"], "hello");
        let answer = &thread["values"]["messages"][1];
        let fields: Vec<&str> = answer.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(
            fields,
            [
                "additional_kwargs",
                "content",
                "id",
                "invalid_tool_calls",
                "name",
                "response_metadata",
                "tool_calls",
                "type",
                "usage_metadata"
            ]
        );
        assert_eq!((&answer["type"], &answer["content"]), (&json!("ai"), &json!("You said: hello")));
    }
}

#[tokio::test]
async fn a_thread_is_busy_during_a_run_then_idle_interrupted_or_in_error() {
    for mode in MODES {
        let name = format!("status-{mode}");
        let script = json!({"rules": [
            {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": name}}]},
            {"when": {"contains": ["tool"]}, "answers": [{"tool_calls": [{"name": "ls"}]}, {"text": "done"}]},
            {"answers": [{"text": "now"}]},
        ]});
        let gateway = Setup { mode, script, ..Setup::default() }.start().await;
        let status = async || gateway.get("/api/threads/t").await.ok()["status"].as_str().unwrap().to_owned();
        let found = async |status: &str| {
            let found = gateway.post("/api/threads/search", json!({ "status": status })).await.ok();
            found
                .as_array()
                .unwrap()
                .iter()
                .map(|t| t["status"].as_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        gateway.create("t").await;
        let run = gateway.start_run("t", "wait").await;
        assert_eq!(status().await, "busy", "from the admission on");
        gate(&name).reached().await;
        assert_eq!(status().await, "busy");
        assert_eq!(found("busy").await, ["busy"]);
        assert_eq!(found("running").await, ["busy"]);
        assert_eq!(found("idle").await, Vec::<String>::new());
        gate(&name).open();
        gateway.join("t", &run).await;
        assert_eq!((status().await, found("idle").await), ("idle".to_owned(), vec!["idle".to_owned()]));

        let mut body = question("tool");
        body["interrupt_before"] = json!(["tools"]);
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        assert_eq!(status().await, "interrupted", "tasks are left to run");
        assert_eq!(gateway.state("t").await["next"], json!(["tools"]));
    }
}

#[tokio::test]
async fn a_patch_merges_metadata_and_pinning_leaves_the_time() {
    let gateway = Setup::default().start().await;
    let body = json!({"thread_id": "t", "metadata": {"a": 1, "b": {"x": 1}}});
    let first = gateway.post("/api/threads", body).await.ok();
    let patch =
        async |metadata: Value| gateway.patch("/api/threads/t", json!({ "metadata": metadata })).await.ok();
    let pinned = patch(json!({"svc_pinned": true})).await;
    assert_eq!(pinned["updated_at"], first["updated_at"]);
    assert_eq!(pinned["metadata"], json!({"a": 1, "b": {"x": 1}, "svc_pinned": true}));
    let patched = patch(json!({"b": {"y": 2}, "c": null, "user_id": "x", "owner_id": "x"})).await;
    assert_eq!(patched["metadata"], json!({"a": 1, "b": {"y": 2}, "c": null, "svc_pinned": true}));
    assert!(patched["updated_at"].as_str() > first["updated_at"].as_str());
    assert_eq!(patched["created_at"], first["created_at"]);
    assert_eq!((&patched["values"], keys(&patched)), (&json!({}), KEYS.to_vec()));
    assert_eq!(gateway.get("/api/threads/t").await.ok()["metadata"], patched["metadata"]);
    let answer = gateway.patch("/api/threads/t", json!({"metadata": "x"})).await;
    answer.invalid("dict_type", &json!(["body", "metadata"]));
}

/// A client can neither set nor change nor remove what the gateway notes under its own names.
#[tokio::test]
async fn the_gateways_own_metadata_cannot_be_forged() {
    for mode in MODES {
        let gateway = Setup::on("sqlite", mode).start().await;
        let forged = json!({
            "svc_branch": true, "svc_restored_checkpoint_id": "x", "svc_agent_name": "other", "svc_anything": 1,
            "svc_checkpoint_channel_mode": "delta",
            "branch_parent_thread_id": "other", "branch_parent_checkpoint_id": "x", "branch_parent_message_id": "x",
            "branch_created_at": "never", "owner_id": "bob", "user_id": "bob", "mine": 1, "svc_pinned": true,
        });
        let kept = json!({"mine": 1, "svc_pinned": true});
        let created = gateway.post("/api/threads", json!({"thread_id": "t", "metadata": forged})).await.ok();
        assert_eq!(created["metadata"], kept);
        assert_eq!(
            gateway.patch("/api/threads/t", json!({ "metadata": forged })).await.ok()["metadata"],
            kept
        );
        let state = gateway.state("t").await["metadata"].clone();
        for key in ["svc_branch", "svc_restored_checkpoint_id", "svc_anything", "svc_agent_name"] {
            assert!(state.get(key).is_none(), "{state}");
        }

        gateway.ask("t", "one").await;
        let last = gateway.state("t").await["values"]["messages"][1]["id"].clone();
        let branch = gateway.post("/api/threads/t/branches", json!({ "message_id": last })).await.ok();
        let branch = format!("/api/threads/{}", branch["thread_id"].as_str().unwrap());
        let before = gateway.get(&branch).await.ok()["metadata"].clone();
        assert_eq!((&before["svc_branch"], &before["branch_parent_thread_id"]), (&json!(true), &json!("t")));
        let mut rewritten = before.clone();
        rewritten["svc_branch"] = json!(false);
        rewritten["branch_parent_thread_id"] = Value::Null;
        let after = gateway.patch(&branch, json!({ "metadata": rewritten })).await.ok();
        assert_eq!(after["metadata"], before, "{mode}");

        // Creating a thread next to another leaves that one unchanged.
        let beside = json!({"thread_id": "beside", "metadata": {"svc_sidecar": true}});
        gateway.post("/api/threads", beside).await.ok();
        gateway.patch("/api/threads/beside", json!({"metadata": {"svc_sidecar": false}})).await.ok();
        gateway.ask("beside", "one").await;
        let last = gateway.state("beside").await["values"]["messages"][1]["id"].clone();
        let refused = gateway.post("/api/threads/beside/branches", json!({ "message_id": last })).await;
        refused.refused(409, "Branching is only available in the main conversation.");
    }
}

/// A run's configuration is stored in the metadata of its checkpoints, where the gateway also looks for its own notes.
#[tokio::test]
async fn a_runs_configuration_cannot_forge_what_checkpoints_mean() {
    for mode in MODES {
        let gateway = Setup::on("memory", mode).start().await;
        gateway.create("t").await;
        let forged =
            json!({"svc_restored_checkpoint_id": "x", "svc_agent_name": "x", "svc_other": "x", "mine": "x"});
        let mut body = question("one");
        body["config"] = json!({"metadata": forged, "configurable": forged});
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        for entry in gateway.history("t").await.iter().take(3) {
            let metadata = entry["metadata"].as_object().unwrap();
            assert_eq!(metadata["mine"], "x");
            assert_eq!(metadata["svc_agent_name"], "__default__");
            assert!(
                !metadata.contains_key("svc_restored_checkpoint_id") && !metadata.contains_key("svc_other")
            );
        }
    }
}

//! Reading and writing the state of a thread.

use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{ALL, Gateway, MODES, Setup, id, says, texts};

async fn update(gateway: &Gateway, body: Value) -> Value {
    gateway.post("/api/threads/t/state", body).await.ok()
}

#[tokio::test]
async fn a_state_has_the_fields_of_the_service_and_of_the_sdk() {
    for (backend, mode) in ALL {
        let gateway = Setup::on(backend, mode).start().await;
        gateway.create("t").await;
        gateway.ask("t", "hello").await;
        let history = gateway.history("t").await;
        let state = gateway.state("t").await;
        let keys: Vec<&str> = state.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(
            keys,
            [
                "checkpoint",
                "checkpoint_id",
                "created_at",
                "interrupts",
                "metadata",
                "next",
                "parent_checkpoint",
                "parent_checkpoint_id",
                "tasks",
                "values"
            ]
        );
        let reference = |entry: &Value| {
            json!({"id": id(entry), "ts": entry["created_at"], "thread_id": "t", "checkpoint_ns": "",
                   "checkpoint_id": id(entry), "checkpoint_map": null})
        };
        assert_eq!(id(&state), id(&history[0]));
        assert_eq!(state["checkpoint"], reference(&history[0]));
        assert_eq!(state["parent_checkpoint"], reference(&history[1]));
        assert_eq!(state["parent_checkpoint_id"], id(&history[1]));
        assert_eq!((&state["next"], &state["tasks"]), (&json!([]), &json!([])));
        assert_eq!(texts(&state), ["hello", "You said: hello"]);
        assert_eq!(state["values"]["title"], "hello");
        assert!(state["metadata"]["run_durations"].is_object(), "state shows metadata as it is");
    }
}

#[tokio::test]
async fn a_checkpoint_is_read_by_path_and_by_selector() {
    for (backend, mode) in ALL {
        let gateway = Setup::on(backend, mode).start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        gateway.ask("t", "two").await;
        let history = gateway.history("t").await;
        for entry in &history {
            let by_path = gateway.get(&format!("/api/threads/t/state/{}", id(entry))).await.ok();
            assert_eq!((id(&by_path), &by_path["next"]), (id(entry), &entry["next"]));
            let selector = json!({"checkpoint": entry["checkpoint"], "subgraphs": false});
            assert_eq!(gateway.post("/api/threads/t/state/checkpoint", selector).await.ok(), by_path);
        }
        let first_turn = history.iter().find(|entry| entry["metadata"]["step"] == 2).unwrap();
        let by_path = gateway.get(&format!("/api/threads/t/state/{}", id(first_turn))).await.ok();
        assert_eq!(texts(&by_path), ["one", "You said: one"]);
        let head = gateway.state("t").await;
        for body in [json!({}), json!({"checkpoint": null}), json!({"checkpoint": {"checkpoint_ns": ""}})] {
            assert_eq!(gateway.post("/api/threads/t/state/checkpoint", body).await.ok(), head);
        }

        let none = "0199aaaa-0000-7000-8000-000000000000";
        let missing = |id: &str| format!("Checkpoint {id} not found");
        gateway.get(&format!("/api/threads/t/state/{none}")).await.refused(404, &missing(none));
        gateway.get("/api/threads/t/state/x").await.refused(404, &missing("x"));
        gateway.get(&format!("/api/threads/u/state/{none}")).await.refused(404, "Thread u not found");
        for (checkpoint, status, detail) in [
            (json!({"checkpoint_id": none}), 404, missing(none)),
            (json!({"checkpoint_id": ""}), 404, "Checkpoint not found".to_owned()),
            (json!({"checkpoint_id": id(&head), "checkpoint_ns": "nested"}), 404, missing(id(&head))),
            (json!({"checkpoint_ns": "nested"}), 404, "Thread t has no checkpoint in nested".to_owned()),
            (json!({"checkpoint_id": 5}), 400, "checkpoint checkpoint_id must be a string".to_owned()),
            (
                json!({"thread_id": "u"}),
                400,
                "checkpoint thread_id does not match request thread_id".to_owned(),
            ),
            (json!("x"), 400, "checkpoint must be an object".to_owned()),
        ] {
            let answer =
                gateway.post("/api/threads/t/state/checkpoint", json!({ "checkpoint": checkpoint })).await;
            answer.refused(status, &detail);
        }
    }
}

#[tokio::test]
async fn an_update_replaces_what_channels_hold() {
    for (backend, mode) in ALL {
        let gateway = Setup::on(backend, mode).start().await;
        gateway.create("t").await;
        gateway.ask("t", "hello").await;
        let before = gateway.state("t").await;
        let values = json!({
            "messages": [says("human", "h", "other"), {"role": "assistant", "content": "answer", "id": "a"}],
            "artifacts": ["x", "y", "x"], "goal": {"objective": "g"}, "viewed_images": {"a": 1},
        });
        let state = update(&gateway, json!({"values": values})).await;
        assert_eq!(texts(&state), ["other", "answer"]);
        assert_eq!(state["values"]["messages"][1]["type"], "ai");
        assert_eq!(state["values"]["artifacts"], json!(["x", "y"]));
        assert_eq!(state["values"]["title"], "hello", "channels that are not named stay");
        assert_eq!((&state["next"], &state["tasks"]), (&json!([]), &json!([])));
        assert_eq!(state["parent_checkpoint_id"], before["checkpoint_id"]);
        let step = before["metadata"]["step"].as_i64().unwrap() + 1;
        let metadata = &state["metadata"];
        assert_eq!((&metadata["source"], &metadata["step"]), (&json!("update"), &json!(step)));
        assert_eq!(metadata["svc_agent_name"], before["metadata"]["svc_agent_name"]);
        assert!(metadata.get("run_durations").is_none() && metadata.get("run_id").is_none(), "{metadata}");
        assert_eq!(metadata.get("svc_checkpoint_channel_mode").is_some(), mode == "delta");

        let smaller = json!({"values": {"messages": {"role": "user", "content": "one"}, "artifacts": null,
            "viewed_images": {"b": 2}, "goal": null}, "as_node": "anything"});
        let state = update(&gateway, smaller).await;
        assert_eq!(texts(&state), ["one"]);
        assert!(!state["values"]["messages"][0]["id"].as_str().unwrap().is_empty());
        assert_eq!(state["values"]["artifacts"], json!([]));
        assert_eq!(state["values"]["viewed_images"], json!({"b": 2}));
        assert_eq!(state["values"]["goal"], Value::Null);
        assert_eq!(gateway.state("t").await, state);
        for nothing in [json!({"values": null}), json!({"values": {}}), json!({})] {
            let again = update(&gateway, nothing).await;
            assert_eq!(again["values"], state["values"]);
            assert_ne!(id(&again), id(&state));
        }
        let gateway = if backend == "memory" { gateway } else { gateway.reopen(mode).await };
        assert_eq!(gateway.state("t").await["values"], state["values"]);
        assert_eq!(texts(&gateway.state("t").await), ["one"]);
        gateway.ask("t", "next").await;
        assert_eq!(texts(&gateway.state("t").await), ["one", "next", "You said: next"]);
    }
}

#[tokio::test]
async fn the_title_is_copied_to_the_threads_record() {
    for mode in MODES {
        let gateway = Setup::on("memory", mode).start().await;
        gateway.create("t").await;
        let title = async || gateway.post("/api/threads/search", json!({})).await.ok()[0]["values"].clone();
        let first = update(&gateway, json!({"values": {"title": "First"}})).await;
        assert_eq!(title().await, json!({"title": "First"}));
        update(&gateway, json!({"values": {"title": "Second"}})).await;
        assert_eq!(title().await, json!({"title": "Second"}));
        let fork = json!({"checkpoint_id": id(&first), "values": {"summary_text": "s"}});
        update(&gateway, fork).await;
        assert_eq!(title().await, json!({"title": "First"}), "the title of the new head");
        update(&gateway, json!({"values": {"title": null}})).await;
        assert_eq!(title().await, json!({}));
    }
}

#[tokio::test]
async fn a_fork_from_before_the_title_takes_it_off_the_threads_record() {
    for mode in MODES {
        let gateway = Setup::on("memory", mode).start().await;
        gateway.create("t").await;
        let untitled = gateway.state("t").await;
        let found = async || gateway.post("/api/threads/search", json!({})).await.ok()[0]["values"].clone();
        update(&gateway, json!({"values": {"title": "First"}})).await;
        update(&gateway, json!({"values": {"summary_text": "s"}})).await;
        assert_eq!(found().await, json!({"title": "First"}), "{mode}");
        let fork = json!({"checkpoint_id": id(&untitled), "values": {"summary_text": "s"}});
        assert_eq!(update(&gateway, fork).await["values"].get("title"), None, "{mode}");
        assert_eq!(found().await, json!({}), "{mode}");
        let count = gateway.post("/api/threads/count", json!({"values": {"title": null}})).await.ok();
        assert_eq!(count, 1, "{mode}");
    }
}

#[tokio::test]
async fn unknown_fields_and_values_that_do_not_fit_are_refused() {
    for mode in MODES {
        let gateway = Setup::on("sqlite", mode).start().await;
        gateway.create("t").await;
        let rows = gateway.rows().await;
        let send = async |body: Value| gateway.post("/api/threads/t/state", body).await;
        let unknown = json!({"values": {"zeta": 1, "title": "x", "alpha": 2}});
        send(unknown).await.refused(422, "Unknown thread-state field(s): alpha, zeta");
        for (values, reason) in [
            (json!({"messages": 5}), "'messages': a message must be an object or a string, not a number"),
            (
                json!({"messages": [{"type": "remove", "id": "m"}]}),
                "'messages': cannot remove message m: no message of the thread has this id",
            ),
            (json!({"artifacts": "x"}), "'artifacts': this channel takes lists"),
            (json!({"viewed_images": []}), "'viewed_images': this channel takes objects"),
        ] {
            let detail = format!("Invalid value for thread-state field {reason}");
            send(json!({ "values": values })).await.refused(422, &detail);
        }
        send(json!({"values": []})).await.invalid("dict_type", &json!(["body", "values"]));
        send(json!({"as_node": 1})).await.invalid("string_type", &json!(["body", "as_node"]));
        let missing = gateway.call(axum::http::Method::POST, "/api/threads/t/state", None).await;
        missing.invalid("missing", &json!(["body"]));
        send(json!({"checkpoint_id": "", "values": {"title": "x"}}))
            .await
            .refused(404, "Checkpoint not found");
        send(json!({"checkpoint_id": "x"})).await.refused(404, "Checkpoint x not found");
        let none = "0199aaaa-0000-7000-8000-000000000000";
        let detail = format!("Checkpoint {none} not found");
        send(json!({"checkpoint_id": none, "values": {"title": "x"}})).await.refused(404, &detail);
        send(json!({"checkpoint": {"checkpoint_id": none}})).await.refused(404, &detail);
        send(json!({"checkpoint": {"thread_id": "u"}}))
            .await
            .refused(400, "checkpoint thread_id does not match request thread_id");
        let head = gateway.state("t").await;
        send(json!({"checkpoint": {"checkpoint_id": id(&head), "checkpoint_ns": "nested"}}))
            .await
            .refused(400, "checkpoint checkpoint_ns must be empty: only the thread's own state is written");
        assert_eq!(gateway.rows().await, rows, "nothing was written");
    }
}

/// Scenarios 8 and 75: an older checkpoint makes a fork, which becomes the head; the branch it left stays as it is.
#[tokio::test]
async fn an_update_of_an_older_checkpoint_is_a_fork_that_becomes_the_head() {
    for (backend, mode) in ALL {
        for by_object in [false, true] {
            let gateway = Setup::on(backend, mode).start().await;
            gateway.create("t").await;
            for text in ["one", "two", "three"] {
                gateway.ask("t", text).await;
            }
            let old_head = gateway.state("t").await;
            let history = gateway.history("t").await;
            let answered = |entry: &&Value| entry["metadata"]["step"] == 1;
            let base = id(history.iter().find(answered).unwrap()).to_owned();
            let base = gateway.get(&format!("/api/threads/t/state/{base}")).await.ok();
            assert_eq!(texts(&base), ["one", "You said: one"]);
            let mut body = json!({"values": {"summary_text": "s"}});
            if by_object {
                body["checkpoint"] = json!({"checkpoint_id": id(&base), "thread_id": "t"});
                body["checkpoint_id"] = json!(id(&old_head));
            } else {
                body["checkpoint_id"] = json!(id(&base));
            }
            let fork = update(&gateway, body).await;
            assert_eq!(fork["parent_checkpoint_id"], id(&base));
            assert!(id(&fork) > id(&old_head));
            assert_eq!(texts(&fork), ["one", "You said: one"], "nothing of the other branch");
            assert_eq!(fork["values"]["summary_text"], "s");
            assert_eq!(fork["metadata"]["svc_agent_name"], base["metadata"]["svc_agent_name"]);

            let gateway = if backend == "memory" { gateway } else { gateway.reopen(mode).await };
            assert_eq!(gateway.state("t").await, fork, "it is the head");
            let again = gateway.get(&format!("/api/threads/t/state/{}", id(&old_head))).await.ok();
            assert_eq!(again, old_head, "the other branch is as it was");
            assert_eq!(gateway.history("t").await.len(), history.len() + 1);
            gateway.ask("t", "other").await;
            let texts: Vec<_> = texts(&gateway.state("t").await).into_iter().map(str::to_owned).collect();
            assert_eq!(texts, ["one", "You said: one", "other", "You said: other"]);
        }
    }
}

#[tokio::test]
async fn a_checkpoint_keeps_the_agent_that_it_belongs_to() {
    for mode in MODES {
        let gateway = Setup::on("memory", mode).start().await;
        gateway.create("t").await;
        let as_agent = async |agent: &str| {
            gateway.ask_as("t", agent, "hello").await;
            gateway.state("t").await
        };
        let first = as_agent("first_agent").await;
        let second = as_agent("second-agent").await;
        assert_ne!(first["metadata"]["svc_agent_name"], second["metadata"]["svc_agent_name"]);
        let fork = update(&gateway, json!({"checkpoint_id": id(&first), "values": {}})).await;
        assert_eq!(fork["metadata"]["svc_agent_name"], first["metadata"]["svc_agent_name"]);
        let on_head = update(&gateway, json!({"checkpoint_id": id(&second)})).await;
        assert_eq!(on_head["metadata"]["svc_agent_name"], second["metadata"]["svc_agent_name"]);
    }
}

#[tokio::test]
async fn state_is_not_written_while_a_run_works_on_the_thread() {
    for mode in MODES {
        let name = format!("state-{mode}");
        let script = json!({"rules": [{"answers": [{"text": "late", "gate": {"name": name}}]}]});
        let gateway = Setup { script, ..Setup::on("sqlite", mode) }.start().await;
        gateway.create("t").await;
        let run = gateway.start_run("t", "hello").await;
        gate(&name).reached().await;
        let rows = gateway.rows().await;
        let refused = gateway.post("/api/threads/t/state", json!({"values": {"title": "x"}})).await;
        refused.refused(409, "Thread has a run in flight. Update state after the run finishes.");
        assert_eq!(refused.body.as_object().unwrap().len(), 1, "nothing but the detail");
        assert_eq!(gateway.rows().await, rows);
        assert_eq!(gateway.state("t").await["next"], json!(["model"]), "reading goes on");
        gate(&name).open();
        gateway.join("t", &run).await;
        let state = update(&gateway, json!({"values": {"title": "x"}})).await;
        assert_eq!(texts(&state), ["hello", "late"]);
    }
}

/// Consecutive updates never find the thread reserved by the previous one.
#[tokio::test(flavor = "multi_thread")]
async fn a_thread_is_free_again_when_an_update_has_answered() {
    let gateway = Setup::on("sqlite", "delta").start().await;
    gateway.create("t").await;
    for turn in 0..50 {
        update(&gateway, json!({"values": {"messages": [says("human", "h", &turn.to_string())]}})).await;
        let none = json!({"checkpoint_id": "0199aaaa-0000-7000-8000-000000000000"});
        assert_eq!(gateway.post("/api/threads/t/state", none).await.status, 404);
    }
    assert_eq!(gateway.history("t").await.len(), 51);
}

#[tokio::test]
async fn a_client_writes_back_what_it_read_but_cannot_claim_a_run() {
    for mode in MODES {
        let gateway = Setup::on("memory", mode).start().await;
        gateway.create("t").await;
        let run = gateway.ask("t", "hello").await;
        let mut messages = gateway.state("t").await["values"]["messages"].clone();
        assert_eq!(messages[0]["additional_kwargs"]["run_id"], run.as_str());
        let mut forged = says("human", "forged", "mine");
        forged["additional_kwargs"] = json!({"run_id": run, "svc_seq": 5, "mine": true});
        messages.as_array_mut().unwrap().push(forged);
        let state = update(&gateway, json!({"values": {"messages": messages}})).await;
        assert_eq!(state["values"]["messages"][0]["additional_kwargs"]["run_id"], run.as_str());
        assert_eq!(state["values"]["messages"][2]["additional_kwargs"], json!({"mine": true}));
    }
}

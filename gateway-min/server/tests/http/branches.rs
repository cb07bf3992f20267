//! Branching and copying threads.

use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{ALL, Gateway, MODES, Setup, id, texts};

const GONE: &str = "This turn can no longer be branched from.";
const NONE: &str = "0199aaaa-0000-7000-8000-000000000000";

/// The ids of the messages of a thread.
async fn message_ids(gateway: &Gateway, thread: &str) -> Vec<String> {
    let state = gateway.state(thread).await;
    let messages = state["values"]["messages"].as_array().unwrap().iter();
    messages.map(|message| message["id"].as_str().unwrap().to_owned()).collect()
}

async fn state_of(gateway: &Gateway, thread: &str) -> Value {
    gateway.state(thread).await["values"].clone()
}

/// A thread `t` with the turns one, two and three.
async fn three_turns(setup: Setup) -> (Gateway, Vec<String>) {
    let gateway = setup.start().await;
    gateway.create("t").await;
    for text in ["one", "two", "three"] {
        gateway.ask("t", text).await;
    }
    let ids = message_ids(&gateway, "t").await;
    (gateway, ids)
}

async fn branch(gateway: &Gateway, thread: &str, message: &str) -> Value {
    gateway.post(&format!("/api/threads/{thread}/branches"), json!({"message_id": message})).await.ok()
}

fn thread_of(branch: &Value) -> &str {
    branch["thread_id"].as_str().unwrap()
}

#[tokio::test]
async fn a_branch_has_the_state_of_the_turn_and_the_one_before_it() {
    for (backend, mode) in ALL {
        let (gateway, ids) = three_turns(Setup::on(backend, mode)).await;
        std::fs::create_dir_all(gateway.thread_dir("t")).unwrap();
        std::fs::write(gateway.thread_dir("t").join("a.txt"), "A").unwrap();
        gateway.post("/api/threads/t/state", json!({"values": {"thread_data": {"x": 1}}})).await.ok();
        let (source, history) = (state_of(&gateway, "t").await, gateway.history("t").await);

        let made = branch(&gateway, "t", &ids[3]).await;
        let new = thread_of(&made);
        assert_eq!(
            made,
            json!({"thread_id": new, "parent_thread_id": "t",
                   "parent_checkpoint_id": made["parent_checkpoint_id"],
                   "branched_from_message_id": ids[3], "workspace_clone_mode": "skipped_historical_turn",
                   "history_seed_mode": "seeded"})
        );
        let parent = made["parent_checkpoint_id"].as_str().unwrap();
        let parent = gateway.get(&format!("/api/threads/t/state/{parent}")).await.ok();
        assert_eq!(texts(&parent), ["one", "You said: one", "two", "You said: two"]);
        assert_eq!(parent["next"], json!([]));

        let checkpoints = gateway.history(new).await;
        assert_eq!(checkpoints.len(), 2, "{backend} {mode}");
        assert_eq!(checkpoints[1]["parent_checkpoint_id"], Value::Null);
        assert_eq!(checkpoints[0]["parent_checkpoint_id"], checkpoints[1]["checkpoint_id"]);
        let base = gateway.get(&format!("/api/threads/{new}/state/{}", id(&checkpoints[1]))).await.ok();
        assert_eq!(texts(&base), ["one", "You said: one"]);
        let head = gateway.state(new).await;
        assert_eq!(head["values"]["messages"], parent["values"]["messages"]);
        assert!(head["values"].get("thread_data").is_none());
        assert_eq!(head["next"], json!([]));
        let metadata = &head["metadata"];
        assert_eq!((&metadata["source"], &metadata["svc_branch"]), (&json!("update"), &json!(true)));
        assert_eq!(metadata["svc_agent_name"], "__default__");
        assert_eq!(metadata["branch_parent_checkpoint_id"], made["parent_checkpoint_id"]);
        assert_eq!(metadata.get("svc_checkpoint_channel_mode").is_some(), mode == "delta");

        let record = gateway.get(&format!("/api/threads/{new}")).await.ok();
        let mut expected = json!({"svc_branch": true, "branch_parent_thread_id": "t",
            "branch_parent_checkpoint_id": made["parent_checkpoint_id"], "branch_parent_message_id": ids[3]});
        expected["branch_created_at"] = record["metadata"]["branch_created_at"].clone();
        assert_eq!((&record["metadata"], &record["status"]), (&expected, &json!("idle")));
        let seeded = format!("/api/threads/{new}/runs/branch-seed-{new}-1/events");
        let events = gateway.get(&seeded).await.ok();
        let contents: Vec<_> = events.as_array().unwrap().iter().map(|e| &e["content"]["content"]).collect();
        assert_eq!(contents, [&json!("two"), &json!("You said: two")]);

        assert_eq!(state_of(&gateway, "t").await, source, "the source is as it was");
        assert_eq!(gateway.history("t").await, history);
        assert!(!gateway.thread_dir(new).exists());
    }
}

#[tokio::test]
async fn the_latest_turn_takes_the_files_along_and_a_title_is_taken_over_or_given() {
    for mode in MODES {
        let (gateway, ids) = three_turns(Setup::on("memory", mode)).await;
        assert_eq!(branch(&gateway, "t", &ids[5]).await["workspace_clone_mode"], "not_found");
        std::fs::create_dir_all(gateway.thread_dir("t").join("d")).unwrap();
        std::fs::write(gateway.thread_dir("t").join("d/a.txt"), "A").unwrap();
        let body = json!({"message_id": ids[5], "message_ids": [ids[5]], "title": "Mine"});
        let made = gateway.post("/api/threads/t/branches", body).await.ok();
        assert_eq!(made["workspace_clone_mode"], "current_thread_best_effort");
        let copied = gateway.thread_dir(thread_of(&made)).join("d/a.txt");
        assert_eq!(std::fs::read_to_string(copied).unwrap(), "A");
        assert_eq!(state_of(&gateway, thread_of(&made)).await["title"], "Mine");
        assert_eq!(state_of(&gateway, "t").await["title"], "one");
        let titles = gateway.post("/api/threads/search", json!({"ids": [thread_of(&made)]})).await.ok();
        assert_eq!(titles[0]["values"], json!({"title": "Mine"}));
    }
}

#[tokio::test]
async fn a_branch_goes_on_by_itself_and_outlives_its_source() {
    for (backend, mode) in ALL {
        for frequency in [1, 2, 10] {
            let (gateway, ids) = three_turns(Setup { frequency, ..Setup::on(backend, mode) }).await;
            let first = branch(&gateway, "t", &ids[3]).await;
            gateway.ask(thread_of(&first), "four").await;
            let again = message_ids(&gateway, thread_of(&first)).await;
            let second = branch(&gateway, thread_of(&first), &again[5]).await;
            gateway.delete("/api/threads/t").await.ok();
            let gateway = if backend == "memory" { gateway } else { gateway.reopen(mode).await };
            let expected = ["one", "You said: one", "two", "You said: two", "four", "You said: four"];
            assert_eq!(texts(&gateway.state(thread_of(&first)).await), expected);
            gateway.delete(&format!("/api/threads/{}", thread_of(&first))).await.ok();
            assert_eq!(texts(&gateway.state(thread_of(&second)).await), expected);
            gateway.ask(thread_of(&second), "five").await;
            assert_eq!(texts(&gateway.state(thread_of(&second)).await)[6..], ["five", "You said: five"]);
        }
    }
}

#[tokio::test]
async fn what_cannot_be_branched_from_is_refused_and_nothing_is_written() {
    for mode in MODES {
        let script = json!({"rules": [
            {"when": {"contains": ["file"]}, "answers": [
                {"text": "First,", "tool_calls": [{"name": "write_file", "args": {"path": "a", "content": "A"}}]},
                {"text": "done"},
            ]},
            {"answers": [{"text": "You said: {{input}}"}]},
        ]});
        let gateway = Setup { script, ..Setup::on("sqlite", mode) }.start().await;
        gateway.create("t").await;
        gateway.ask("t", "file").await;
        let ids = message_ids(&gateway, "t").await;
        gateway.create("empty").await;
        let sidecar = json!({"thread_id": "side", "metadata": {"svc_sidecar": true}});
        gateway.post("/api/threads", sidecar).await.ok();
        let rows = gateway.rows().await;
        let send = async |thread: &str, body: Value| {
            gateway.post(&format!("/api/threads/{thread}/branches"), body).await
        };
        for message in [&ids[0], &ids[1], &ids[2], "unknown"] {
            send("t", json!({"message_id": message})).await.refused(409, GONE);
        }
        send("t", json!({"message_id": ids[3], "message_ids": ["unknown"]})).await.refused(409, GONE);
        send("t", json!({"message_id": ids[3], "message_ids": [ids[0]]})).await.refused(409, GONE);
        send("empty", json!({"message_id": ids[3]})).await.refused(409, GONE);
        send("side", json!({"message_id": ids[3]}))
            .await
            .refused(409, "Branching is only available in the main conversation.");
        send("none", json!({"message_id": ids[3]})).await.refused(404, "Thread none not found");
        send("t", json!({"message_id": ""}))
            .await
            .invalid("string_too_short", &json!(["body", "message_id"]));
        send("t", json!({})).await.invalid("missing", &json!(["body", "message_id"]));
        let long = json!({"message_id": "m", "title": "x".repeat(257)});
        send("t", long).await.invalid("string_too_long", &json!(["body", "title"]));
        assert_eq!(gateway.rows().await, rows, "nothing was written");
        branch(&gateway, "t", &ids[3]).await;
        send("t", json!({"message_id": ids[3], "message_ids": [ids[1], ids[3]]})).await.ok();
    }
}

#[tokio::test]
async fn a_thread_at_work_is_neither_branched_nor_copied() {
    for mode in MODES {
        let name = format!("branch-{mode}");
        let script = json!({"rules": [
            {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": name}}]},
            {"answers": [{"text": "You said: {{input}}"}]},
        ]});
        let gateway = Setup { script, ..Setup::on("sqlite", mode) }.start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        let ids = message_ids(&gateway, "t").await;
        let run = gateway.start_run("t", "wait").await;
        gate(&name).reached().await;
        let refused = gateway.post("/api/threads/t/branches", json!({"message_id": ids[1]})).await;
        refused.refused(409, "Thread has work in flight. Branch it after the work finishes.");
        let refused = gateway.post("/api/threads/t/copy", json!({})).await;
        refused.refused(409, "Thread has work in flight. Copy it after the work finishes.");
        assert_eq!(gateway.post("/api/threads/count", json!({})).await.ok(), json!(1));
        gate(&name).open();
        gateway.join("t", &run).await;
        branch(&gateway, "t", &ids[1]).await;
    }
}

#[tokio::test]
async fn a_mismatch_names_the_source() {
    let (gateway, ids) = three_turns(Setup::on("sqlite", "delta")).await;
    let gateway = gateway.reopen("full").await;
    let rows = gateway.rows().await;
    let text = "Thread t: Thread requires delta mode; materialize and convert its checkpoints before using full mode.";
    gateway.post("/api/threads/t/branches", json!({"message_id": ids[5]})).await.refused(409, text);
    gateway.post("/api/threads/t/copy", json!({})).await.refused(409, text);
    assert_eq!(gateway.rows().await, rows);
}

/// As a stateless run creates it. The branch has one checkpoint.
#[tokio::test]
async fn a_thread_that_begins_with_the_turn_has_nothing_before_it() {
    for mode in MODES {
        let gateway = Setup::on("sqlite", mode).start().await;
        let question = json!({"input": {"messages": [{"role": "user", "content": "alone"}]}});
        let answer = gateway.post("/api/runs/wait", question).await;
        let place = answer.headers["content-location"].to_str().unwrap().to_owned();
        let alone = place.split('/').nth(3).unwrap();
        let ids = message_ids(&gateway, alone).await;
        let made = branch(&gateway, alone, &ids[1]).await;
        assert_eq!(gateway.history(thread_of(&made)).await.len(), 1);
        assert_eq!(texts(&gateway.state(thread_of(&made)).await), ["alone", "You said: alone"]);
    }
}

#[tokio::test]
async fn a_copy_has_the_whole_history_and_is_its_own() {
    for (backend, mode) in ALL {
        let (gateway, _) = three_turns(Setup::on(backend, mode)).await;
        let source = gateway.history("t").await;
        let copy = gateway.post("/api/threads/t/copy", json!({})).await.ok();
        let new = copy["thread_id"].as_str().unwrap();
        assert_ne!(new, "t");
        assert_eq!((&copy["status"], &copy["values"]), (&json!("idle"), &json!({})));
        let ids = |entries: &[Value]| entries.iter().map(|e| id(e).to_owned()).collect::<Vec<_>>();
        assert_eq!(ids(&gateway.history(new).await), ids(&source));
        assert_eq!(state_of(&gateway, new).await, state_of(&gateway, "t").await);
        for entry in &source {
            let at = |thread: &str| format!("/api/threads/{thread}/state/{}", id(entry));
            let (copied, original) = (gateway.get(&at(new)).await.ok(), gateway.get(&at("t")).await.ok());
            assert_eq!(copied["values"], original["values"]);
        }
        gateway.delete("/api/threads/t").await.ok();
        gateway.ask(new, "four").await;
        assert_eq!(
            texts(&gateway.state(new).await)[4..],
            ["three", "You said: three", "four", "You said: four"]
        );
        gateway.post("/api/threads/none/copy", json!({})).await.refused(404, "Thread none not found");
        gateway
            .get(&format!("/api/threads/{new}/state/{NONE}"))
            .await
            .refused(404, &format!("Checkpoint {NONE} not found"));
    }
}

/// A branch says that it has no files; a copy cannot.
#[tokio::test]
async fn a_copy_whose_files_cannot_be_copied_is_refused_and_leaves_nothing() {
    for mode in MODES {
        let (gateway, ids) = three_turns(Setup::on("sqlite", mode)).await;
        // A file in the place of the directory, which is no directory for the superuser either.
        let directory = gateway.thread_dir("t");
        if directory.exists() {
            std::fs::remove_dir_all(&directory).unwrap();
        }
        std::fs::create_dir_all(directory.parent().unwrap()).unwrap();
        std::fs::write(&directory, "no directory").unwrap();
        let rows = async || {
            let mut rows = gateway.rows().await;
            rows.retain(|table, _| !table.ends_with("grave"));
            rows
        };
        let before = rows().await;
        let refused = gateway.post("/api/threads/t/copy", json!({})).await;
        refused.refused(500, "Failed to copy thread");
        assert_eq!(rows().await, before, "{mode}");
        let left = std::fs::read_dir(directory.parent().unwrap()).unwrap().count();
        assert_eq!(left, 1, "{mode}: the directory of the thread itself");
        assert_eq!(branch(&gateway, "t", &ids[5]).await["workspace_clone_mode"], "failed", "{mode}");

        std::fs::remove_file(&directory).unwrap();
        gateway.post("/api/threads/t/copy", json!({})).await.ok();
    }
}

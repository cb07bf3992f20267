//! What a run reports of its files: the summary of the changes, and the receipt of what it delivered.

use axum::http::Method;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{Gateway, MODES, Setup, connect};

/// Writes, edits and reads files; in another script also with `bash`; fails or waits at `gate` after a write.
fn script(gate: &str) -> Value {
    let write =
        |path: &str, content: &str| json!({"name": "write_file", "args": {"path": path, "content": content}});
    json!({"rules": [
        {"when": {"contains": ["edit"]}, "answers": [
            {"tool_calls": [
                {"name": "str_replace", "args": {"path": "./a.txt", "old_str": "one", "new_str": "three"}},
                {"name": "bash", "args": {"command": "rm b/c.txt && printf SECRET > made && touch kept"}},
            ]},
            {"text": "edited"},
        ]},
        {"when": {"contains": ["write"]}, "answers": [
            {"tool_calls": [write("b/c.txt", "SECRET"), write("a.txt", "one"), write("../out", "SECRET"),
                {"name": "read_file", "args": {"path": "kept"}}]},
            {"tool_calls": [write("a.txt", "one")]},
            {"text": "written"},
        ]},
        {"when": {"contains": ["fail"]}, "answers": [
            {"tool_calls": [write("before-failing", "1")]},
            {"error": {"kind": "fatal", "message": "no such model"}},
        ]},
        {"when": {"contains": ["wait"]}, "answers": [
            {"tool_calls": [write("before-waiting", "1")]}, {"text": "late", "gate": {"name": gate}},
        ]},
        {"answers": [{"tool_calls": [{"name": "ls"}]}, {"text": "nothing to do"}]},
    ]})
}

async fn start(mode: &'static str, gate: &str) -> Gateway {
    let sections = json!({"sandbox": {"use": "local", "allow_host_bash": true}});
    let gateway = Setup { mode, script: script(gate), sections, ..Setup::default() }.start().await;
    gateway.create("t").await;
    let dir = gateway.thread_dir("t");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("kept"), "as it was").unwrap();
    gateway
}

async fn events(gateway: &Gateway, run: &str) -> Vec<Value> {
    let events = gateway.get(&format!("/api/threads/t/runs/{run}/events")).await.ok();
    events.as_array().unwrap().clone()
}

/// The types of a run's last events, after those of its messages.
fn last(events: &[Value]) -> Vec<&str> {
    let message = events.iter().rposition(|event| event["category"] == "message").unwrap();
    events[message + 1..].iter().map(|event| event["event_type"].as_str().unwrap()).collect()
}

fn summary(events: &[Value]) -> &Value {
    let found: Vec<&Value> = events.iter().filter(|e| e["event_type"] == "workspace_changes").collect();
    assert_eq!(found.len(), 1, "{events:?}");
    assert_eq!(found[0]["category"], "workspace");
    assert_eq!(found[0]["metadata"], json!({}));
    &found[0]["content"]
}

fn receipt(events: &[Value]) -> &Value {
    let last = events.last().unwrap();
    assert_eq!((&last["event_type"], &last["category"]), (&json!("run.delivery"), &json!("outputs")));
    &last["content"]
}

const COMPLETE: &str = r#"{"created":false,"deleted":false,"modified":false,"scan":false}"#;

fn changes(created: &Value, modified: &Value, deleted: &Value) -> Value {
    let complete: Value = serde_json::from_str(COMPLETE).unwrap();
    json!({"created": created, "modified": modified, "deleted": deleted, "truncated": complete})
}

#[tokio::test]
async fn a_run_says_which_files_it_created_changed_and_deleted_and_never_what_is_in_them() {
    for mode in MODES {
        let gateway = start(mode, "none").await;
        let run = gateway.ask("t", "write").await;
        let found = events(&gateway, &run).await;
        let created = json!([{"path": "a.txt", "size": 3}, {"path": "b/c.txt", "size": 6}]);
        assert_eq!(*summary(&found), changes(&created, &json!([]), &json!([])));
        assert_eq!(last(&found), ["run.end", "workspace_changes", "run.delivery"], "{mode}");
        let both = ["a.txt", "b/c.txt"];
        let delivered = json!({"presented": false, "paths": both, "by_tool": {"write_file": both}});
        assert_eq!(receipt(&found), &delivered, "once each, and not what was refused");

        let run = gateway.ask("t", "edit").await;
        let found = events(&gateway, &run).await;
        let expected = changes(
            &json!([{"path": "made", "size": 6}]),
            &json!([{"path": "a.txt", "size": 5}]),
            &json!([{"path": "b/c.txt", "size": 6}]),
        );
        assert_eq!(*summary(&found), expected, "a touched file has not changed");
        assert!(!summary(&found).to_string().contains("SECRET"));
        let delivered =
            json!({"presented": false, "paths": ["a.txt"], "by_tool": {"str_replace": ["a.txt"]}});
        assert_eq!(receipt(&found), &delivered, "what the command wrote is in the summary only");

        let run = gateway.ask("t", "look").await;
        let found = events(&gateway, &run).await;
        assert_eq!(last(&found), ["run.end", "run.delivery"], "nothing changed");
        assert_eq!(receipt(&found), &json!({"presented": false, "paths": [], "by_tool": {}}));
    }
}

#[tokio::test]
async fn a_failed_and_a_cancelled_run_tell_what_they_left_behind() {
    let gateway = start("delta", "files-cancelled").await;
    let run = gateway.ask("t", "fail").await;
    let found = events(&gateway, &run).await;
    assert_eq!(last(&found), ["run.error", "workspace_changes", "run.delivery"]);
    let created = json!([{"path": "before-failing", "size": 1}]);
    assert_eq!(*summary(&found), changes(&created, &json!([]), &json!([])));

    let run = gateway.start_run("t", "wait").await;
    gate("files-cancelled").reached().await;
    let stop = format!("/api/threads/t/runs/{run}/cancel?wait=true&action=rollback");
    assert_eq!(gateway.call(Method::POST, &stop, None).await.status, 204);
    let found = events(&gateway, &run).await;
    assert_eq!(last(&found), ["workspace_changes", "run.delivery"], "files are not rolled back");
    assert_eq!(receipt(&found)["by_tool"], json!({"write_file": ["before-waiting"]}));
    let created = json!([{"path": "before-waiting", "size": 1}]);
    assert_eq!(*summary(&found), changes(&created, &json!([]), &json!([])));
}

/// The first time only the receipt cannot be stored, the second time none of the feed.
#[tokio::test]
async fn a_feed_that_cannot_be_written_does_not_keep_a_run_from_its_end() {
    for (name, refused) in [("receipt", "NEW.event_type = 'run.delivery'"), ("feed", "TRUE")] {
        let gateway = Setup { script: script(name), ..Setup::on("sqlite", "delta") }.start().await;
        gateway.create("t").await;
        let run = gateway.start_run("t", "wait").await;
        gate(name).reached().await;
        let db = connect(&gateway.data().join("gateway.db"));
        let sql = format!(
            "CREATE TRIGGER refuse BEFORE INSERT ON run_events WHEN {refused} BEGIN SELECT RAISE(ABORT, 'full'); END"
        );
        db.execute_batch(&sql).unwrap();
        gate(name).open();
        gateway.join("t", &run).await;
        let record = gateway.run("t", &run).await;
        assert_eq!((&record["status"], &record["error"]), (&json!("success"), &Value::Null), "{name}");
        let found = events(&gateway, &run).await;
        let types: Vec<&str> = found.iter().map(|e| e["event_type"].as_str().unwrap()).collect();
        assert!(!types.contains(&"run.delivery"), "{types:?}");
        assert_eq!(types.contains(&"run.end"), name == "receipt", "{types:?}");

        db.execute_batch("DROP TRIGGER refuse").unwrap();
        let run = gateway.ask("t", "look").await;
        assert_eq!(receipt(&events(&gateway, &run).await)["paths"], json!([]));
    }
}

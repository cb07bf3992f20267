//! `kill -9` in the middle of three delegations: the next process finishes them, and asks no model for what it has
//! answered already.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value as Json, json};
use tempfile::TempDir;
use threadkeep_testing::unconfigured;

use super::{Gateway, configured, on_postgres, texts};

/// The script of a lead that delegates three tasks, and of subagents of three turns, with a record of what models are
/// asked. `last` is the lead's last answer.
fn delegating(record: &Path, last: &Json) -> String {
    let task = |prompt: &str| json!({"name": "task", "args": {"prompt": prompt, "subagent_type": "general-purpose"}});
    let script = json!({"record": record, "rules": [
        {"when": {"caller": "subagent"}, "answers": [
            {"text": "One.", "delay_ms": 2, "tool_calls": [{"name": "ls", "args": {}}], "usage": {"input_tokens": 5, "output_tokens": 1}},
            {"text": "Two.", "delay_ms": 2, "tool_calls": [{"name": "glob", "args": {"pattern": "*"}}], "usage": {"input_tokens": 6, "output_tokens": 1}},
            {"text": "Report on {{input}}.", "delay_ms": 2, "usage": {"input_tokens": 7, "output_tokens": 1}},
        ]},
        {"answers": [
            {"text": "I delegate.", "tool_calls": [task("a"), task("b"), task("c")]},
            last,
        ]},
    ]});
    script.to_string()
}

/// How often each caller's question with this many answers was asked.
fn requests(record: &Path) -> BTreeMap<(String, String, usize), usize> {
    let text = std::fs::read_to_string(record).unwrap_or_default();
    let mut counts = BTreeMap::new();
    for line in text.lines().filter_map(|line| serde_json::from_str::<Json>(line).ok()) {
        let messages = line["messages"].as_array().unwrap();
        let answered = messages.iter().filter(|message| message["type"] == "ai").count();
        let asked =
            messages.iter().find(|message| message["type"] == "human").unwrap()["content"].to_string();
        *counts.entry((line["caller"].as_str().unwrap().to_owned(), asked, answered)).or_default() += 1;
    }
    counts
}

/// A gateway that is killed as soon as its models were asked `asked` times; what the one that runs in `beside`, or else
/// the next one in its own directory, makes of it.
async fn killed_after(dir: TempDir, beside: Option<&TempDir>, asked: usize) -> TempDir {
    let (record, file) = (dir.path().join("requests.jsonl"), dir.path().join("script.json"));
    let script = delegating(&record, &json!({"text": "All three are done."}));
    // However late it is killed, its run has not ended.
    std::fs::write(&file, delegating(&record, &json!({"text": "never", "gate": {"name": "shut"}}))).unwrap();
    let gateway = Gateway::start(dir.path());
    let other = beside.map(|beside| {
        std::fs::write(beside.path().join("script.json"), &script).unwrap();
        Gateway::start(beside.path())
    });
    gateway.post("/api/threads", json!({"thread_id": "t"})).await;
    let context = json!({"subagent_enabled": true});
    let input = json!({"messages": [{"role": "user", "content": "research three things"}]});
    let (status, run) =
        gateway.post("/api/threads/t/runs", json!({"input": input, "context": context})).await;
    assert_eq!(status, 200, "{run}");
    while requests(&record).values().sum::<usize>() < asked {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    gateway.signal("-9");
    drop(gateway);
    std::fs::write(file, script).unwrap();
    let before = requests(&record);

    let gateway = other.unwrap_or_else(|| Gateway::start(dir.path()));
    let run = run["run_id"].as_str().unwrap();
    gateway.until(run, "error").await;
    let (status, values) = gateway.post("/api/threads/t/runs/wait", json!({"context": context})).await;
    assert_eq!(status, 200, "{asked}: {values}");
    assert_eq!(texts(&values).last(), Some(&"All three are done."), "{asked}");
    let results: Vec<&str> = texts(&values).into_iter().filter(|text| text.starts_with("Task ")).collect();
    let expected = ["a", "b", "c"].map(|task| format!("Task Succeeded. Result: Report on {task}."));
    assert_eq!(results, expected, "{asked}");

    // What was asked twice was under way when the process died: at most one question of each agent.
    let after = requests(&record);
    let mut repeated = BTreeMap::<_, usize>::new();
    for ((caller, question, answered), count) in &after {
        assert!(*count <= 2, "{asked}: {caller} {question} {answered}: {count}");
        if *count == 2 {
            *repeated.entry((caller, question)).or_default() += 1;
            assert!(before.contains_key(&(caller.clone(), question.clone(), *answered)));
        }
    }
    assert!(repeated.values().all(|count| *count == 1), "{asked}: {repeated:?}");
    assert_eq!(after.len(), 2 + 3 * 3, "{asked}: {after:?}");

    let executions = gateway.get("/api/threads/t/executions").await;
    let executions = executions["executions"].as_array().unwrap().clone();
    assert_eq!(executions.len(), 3, "{asked}: no orphan: {executions:?}");
    for execution in &executions {
        assert_eq!(
            (&execution["status"], &execution["attempt"], &execution["delivered"]),
            (&json!("completed"), &json!(1), &json!(true))
        );
        assert_eq!(execution["usage"]["total_tokens"], 21, "{asked}: no answer is counted twice");
    }
    let usage = gateway.get("/api/threads/t/token-usage").await;
    assert_eq!(usage["by_caller"]["subagent"], 63, "{asked}");
    let (code, text) = delegations(dir.path(), &["verify", "t"]);
    assert_eq!((code, text.as_str()), (0, "3 executions: what is recorded is what happened.\n"), "{asked}");
    dir
}

/// The command `threadkeep delegations`: its exit code and its output.
fn delegations(dir: &Path, arguments: &[&str]) -> (i32, String) {
    let mut command = unconfigured(env!("CARGO_BIN_EXE_threadkeep"));
    let command =
        command.current_dir(dir).arg("delegations").args(arguments).env("SVC_HOME", dir.join("state"));
    let output = command.output().unwrap();
    // Warnings about the server go to stderr.
    let text = if output.stdout.is_empty() { output.stderr } else { output.stdout };
    (output.status.code().unwrap(), String::from_utf8(text).unwrap())
}

/// The commands that show and check executions, beside the running gateway and on records that somebody changed.
#[tokio::test]
async fn delegations_can_be_listed_shown_and_checked() {
    let dir = killed_after(configured("delta"), None, 3).await;
    let (code, tree) = delegations(dir.path(), &["tree", "t"]);
    assert_eq!(code, 0, "{tree}");
    let is_done = |line: &&str| line.contains("general-purpose") && line.contains("completed");
    assert_eq!(tree.lines().filter(is_done).count(), 3, "{tree}");
    assert!(tree.lines().filter(is_done).all(|row| row.ends_with('Z')), "a time has its zone: {tree}");
    let (_, json) = delegations(dir.path(), &["tree", "t", "--json"]);
    // They begin side by side, so in any order.
    let mut rows = json.lines().map(|line| serde_json::from_str::<Json>(line).unwrap());
    let row = rows.find(|row| row["description"] == "a").unwrap();
    let id = row["execution_id"].as_str().unwrap();
    let (code, shown) = delegations(dir.path(), &["show", "t", &id[..8]]);
    assert_eq!(code, 0, "{shown}");
    assert!(shown.contains("Report on a.") && shown.contains("sha256"), "{shown}");
    for (arguments, wanted) in [(["tree", "nobody"], "nobody"), (["verify", "nobody"], "nobody")] {
        let (code, text) = delegations(dir.path(), &arguments);
        assert!(code != 0 && text.contains(wanted), "{text}");
    }

    let file = dir.path().join("state/data/gateway.db");
    let records = rusqlite::Connection::open(file).unwrap();
    let sql = "UPDATE executions SET usage_json = '{}' WHERE execution_id = ?";
    assert_eq!(records.execute(sql, [id]).unwrap(), 1);
    drop(records);
    let (code, text) = delegations(dir.path(), &["verify", "t"]);
    assert_eq!(
        (code, text),
        (
            3,
            format!(
                "{id}: 0 tokens are recorded, its checkpoints show 21\n3 executions: the records of 1 differ.\n"
            )
        )
    );
}

#[tokio::test]
async fn a_gateway_killed_among_its_subagents_is_continued_by_the_next_one() {
    for mode in ["full", "delta"] {
        for asked in [2, 5, 8, 10] {
            killed_after(configured(mode), None, asked).await;
        }
    }
}

#[tokio::test]
async fn so_it_is_on_postgres() {
    let server = threadkeep_testing::postgres().unwrap();
    for (mode, asked) in [("full", 4), ("delta", 7)] {
        let database = server.database().await.unwrap();
        killed_after(on_postgres(database.url(), mode), None, asked).await;
    }
}

#[tokio::test]
async fn a_gateway_beside_the_one_that_was_killed_goes_on_with_its_subagents() {
    let server = threadkeep_testing::postgres().unwrap();
    for (mode, asked) in [("full", 6), ("delta", 9)] {
        let database = server.database().await.unwrap();
        let [dir, beside] = [(); 2].map(|()| on_postgres(database.url(), mode));
        killed_after(dir, Some(&beside), asked).await;
    }
}

//! Batches over processes that are killed, or stand still past their leases.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value as Json, json};
use tempfile::TempDir;
use threadkeep_testing::{Postgres, postgres};

use super::{Gateway, configured, on_postgres};

const BATCHES: &str = "/api/threads/t/subagent-batches";

/// Makes the gateway in this directory work on batches, with a lead that submits `items`, and subagents of two turns with
/// `delay_ms` before each piece of an answer. Requests to models are recorded in the file that is returned.
fn with_batches(dirs: &[TempDir], items: usize, delay_ms: u64) -> PathBuf {
    let record = dirs[0].path().join("requests.jsonl");
    let items: Json =
        (0..items).map(|n| json!({"key": format!("k{n}"), "prompt": format!("item {n}.")})).collect();
    let call = json!({"name": "batch_task", "args": {"title": "Files", "items": items,
        "subagent_type": "general-purpose", "max_running_items": 9}});
    let script = json!({"record": record, "rules": [
        {"when": {"caller": "subagent"}, "answers": [
            {"text": "One.", "delay_ms": delay_ms, "tool_calls": [{"name": "ls", "args": {}}],
                "usage": {"input_tokens": 5, "output_tokens": 1}},
            {"text": "Two.", "delay_ms": delay_ms, "usage": {"input_tokens": 6, "output_tokens": 1}},
        ]},
        {"answers": [{"text": "", "tool_calls": [call]}, {"text": "Submitted."}]},
    ]});
    for dir in dirs {
        std::fs::write(dir.path().join("script.json"), script.to_string()).unwrap();
        let file = dir.path().join("config.yaml");
        let mut config: Json = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        config["subagent_batches"] =
            json!({"enabled": true, "poll_interval_seconds": 0.1, "lease_seconds": 10, "max_attempts": 10});
        std::fs::write(file, config.to_string()).unwrap();
    }
    record
}

/// How often each question of an item was asked, by its task and the number of answers before it.
fn requests(record: &Path) -> BTreeMap<(String, usize), usize> {
    let text = std::fs::read_to_string(record).unwrap_or_default();
    let mut counts = BTreeMap::new();
    for line in text.lines().filter_map(|line| serde_json::from_str::<Json>(line).ok()) {
        if line["caller"] == "lead_agent" {
            continue;
        }
        let messages = line["messages"].as_array().unwrap();
        let answered = messages.iter().filter(|message| message["type"] == "ai").count();
        let task = messages.iter().find(|message| message["type"] == "human").unwrap()["content"].to_string();
        *counts.entry((task, answered)).or_default() += 1;
    }
    counts
}

async fn submit(gateway: &Gateway) -> String {
    gateway.post("/api/threads", json!({"thread_id": "t"})).await;
    let input = json!({"messages": [{"role": "user", "content": "submit"}]});
    let body = json!({"input": input, "context": {"subagent_enabled": true}});
    let (status, values) = gateway.post("/api/threads/t/runs/wait", body).await;
    assert_eq!(status, 200, "{values}");
    let batches = gateway.get(BATCHES).await;
    let id = batches[0]["id"].as_str();
    id.unwrap_or_else(|| panic!("the run ended with {}, and there is no batch: {batches}", values["status"]))
        .to_owned()
}

/// Waits until `number` questions were asked, the lead's included.
async fn asked(record: &Path, number: usize) {
    let lines = || std::fs::read_to_string(record).unwrap_or_default().lines().count();
    while lines() < number {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn ended(gateway: &Gateway, id: &str) -> Json {
    loop {
        let batch = gateway.get(&format!("{BATCHES}/{id}")).await;
        if !batch["completed_at"].is_null() {
            return batch;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Every item has its result, once, and no answer that was stored was asked for again.
async fn whole(gateway: &Gateway, id: &str, record: &Path, items: usize, in_flight: usize) {
    let batch = ended(gateway, id).await;
    assert_eq!(
        (&batch["status"], &batch["counts"]["succeeded"]),
        (&json!("completed"), &json!(items)),
        "{batch}"
    );
    let executions = gateway.get("/api/threads/t/executions").await;
    let executions = executions["executions"].as_array().unwrap().clone();
    assert_eq!(executions.len(), items, "each item goes on with its execution");
    for execution in executions {
        assert_eq!((&execution["status"], &execution["delivered"]), (&json!("completed"), &json!(true)));
        assert_eq!(execution["usage"]["total_tokens"], 13, "no answer is counted twice");
    }
    let asked = requests(record);
    assert_eq!(asked.len(), 2 * items);
    let repeated: usize = asked.values().map(|count| count - 1).sum();
    assert!(repeated <= in_flight, "{repeated} questions were repeated, {in_flight} can have been under way");
    let usage = gateway.get("/api/threads/t/token-usage").await;
    assert_eq!(usage["by_caller"]["subagent"], 13 * items);
}

/// A number from the environment, for a longer trial.
fn number(name: &str, usual: usize) -> usize {
    std::env::var(name).map_or(usual, |text| text.parse().unwrap())
}

/// Check 3 of the delegation design: three processes with three slots each, of which one is killed again and again, and a
/// database that crashes. Small, unless `make batches-torture` asks for more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s62_a_batch_outlives_its_processes_and_crashes_of_the_database() {
    let (items, kills) = (number("BATCH_ITEMS", 60), number("BATCH_KILLS", 6));
    let crashes = number("BATCH_CRASHES", 1);
    let mut server = tokio::task::spawn_blocking(|| Postgres::start().unwrap()).await.unwrap();
    let database = server.database().await.unwrap();
    let dirs = [(); 3].map(|()| on_postgres(database.url(), "delta"));
    let record = with_batches(&dirs, items, 20);
    let mut gateways: Vec<Gateway> = dirs.iter().map(|dir| Gateway::start(dir.path())).collect();
    let id = submit(&gateways[0]).await;
    let disasters = kills + crashes;
    for disaster in 0..disasters {
        asked(&record, 10 + disaster * (2 * items - 20) / disasters).await;
        // The crashes are spread over the kills.
        if disaster * crashes / disasters != (disaster + 1) * crashes / disasters {
            server = tokio::task::spawn_blocking(move || {
                server.crash().unwrap();
                server.resume().unwrap();
                server
            })
            .await
            .unwrap();
            continue;
        }
        let at = disaster % 3;
        gateways[at].signal("-9");
        drop(gateways.remove(at));
        gateways.insert(at, Gateway::start(dirs[at].path()));
    }
    // A kill ends what three slots work on; a crash what all nine do.
    whole(&gateways[0], &id, &record, items, 3 * kills + 9 * crashes).await;
}

#[tokio::test]
async fn s62_the_next_process_in_the_directory_goes_on_with_a_batch_at_once() {
    let database = postgres().unwrap().database().await.unwrap();
    for dir in [configured("full"), on_postgres(database.url(), "delta")] {
        let dirs = [dir];
        let record = with_batches(&dirs, 12, 20);
        let file = dirs[0].path().join("config.yaml");
        let text = std::fs::read_to_string(&file).unwrap();
        // Nobody waits for an hour: the next process knows that the one before it is gone.
        let text = text.replace("\"lease_seconds\":10", "\"lease_seconds\":3600");
        assert!(text.contains("3600"), "{text}");
        std::fs::write(&file, text).unwrap();
        let gateway = Gateway::start(dirs[0].path());
        let id = submit(&gateway).await;
        asked(&record, 7).await;
        gateway.signal("-9");
        drop(gateway);
        let next = Gateway::start(dirs[0].path());
        whole(&next, &id, &record, 12, 3).await;
    }
}

/// A batch of three items that had ended when its process died, and whose rows were changed by this statement. It is to
/// be worked on again.
async fn changed(dirs: &[TempDir], sql: &str) -> String {
    with_batches(dirs, 3, 1);
    let gateway = Gateway::start(dirs[0].path());
    let id = submit(&gateway).await;
    ended(&gateway, &id).await;
    gateway.signal("-9");
    drop(gateway);
    let records = rusqlite::Connection::open(dirs[0].path().join("state/data/gateway.db")).unwrap();
    let again = "UPDATE subagent_batch_items SET status = 'pending', attempt = 0; \
                 UPDATE subagent_batches SET status = 'queued', completed_at = NULL;";
    records.execute_batch(&format!("{again} {sql}")).unwrap();
    id
}

/// The row of a batch cannot be read: the batches after it are worked on all the same.
#[tokio::test]
async fn a_damaged_batch_keeps_no_other_one_waiting() {
    let dirs = [configured("full")];
    changed(&dirs, "UPDATE subagent_batches SET execution_spec = 'damaged'").await;
    let next = Gateway::start(dirs[0].path());
    next.post("/api/threads", json!({"thread_id": "u"})).await;
    let input = json!({"messages": [{"role": "user", "content": "submit"}]});
    let body = json!({"input": input, "context": {"subagent_enabled": true}});
    let (status, values) = next.post("/api/threads/u/runs/wait", body).await;
    assert_eq!(status, 200, "{values}");
    let completed = async {
        while next.get("/api/threads/u/subagent-batches").await[0]["status"] != "completed" {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), completed).await.expect("nobody works on the other batch");
}

/// The executions of items cannot be read: their attempts fail, and the last ones end the batch.
#[tokio::test]
async fn items_whose_executions_are_damaged_are_not_tried_for_ever() {
    let dirs = [configured("full")];
    let id = changed(&dirs, "UPDATE executions SET delivered = FALSE, usage_json = 'damaged'").await;
    let next = Gateway::start(dirs[0].path());
    let ended = tokio::time::timeout(Duration::from_mins(10), ended(&next, &id)).await;
    let batch = ended.expect("they are tried for ever");
    assert_eq!((&batch["status"], &batch["counts"]["failed"]), (&json!("failed"), &json!(3)), "{batch}");
    let items = next.get(&format!("{BATCHES}/{id}/items")).await;
    let error = items[0]["error"].as_str().unwrap();
    assert!(error.contains("is damaged at executions"), "{error}");
    assert_eq!(items[0]["attempt"], 10);
}

/// It wakes up when its leases are over and another process has done its work: nothing of what it does then counts.
#[tokio::test]
async fn s52_a_process_that_stood_still_past_its_leases_changes_nothing() {
    let database = postgres().unwrap().database().await.unwrap();
    let dirs = [(); 2].map(|()| on_postgres(database.url(), "full"));
    // It stands still before an item is done, however late it is sent the signal. The other one need not wait.
    let record = with_batches(&dirs, 3, 10_000);
    let other = dirs[1].path().join("script.json");
    let script = std::fs::read_to_string(&other).unwrap().replace("\"delay_ms\":10000", "\"delay_ms\":1");
    assert!(!script.contains("10000"), "{script}");
    std::fs::write(other, script).unwrap();
    let first = Gateway::start(dirs[0].path());
    let id = submit(&first).await;
    asked(&record, 5).await;
    first.signal("-STOP");
    let second = Gateway::start(dirs[1].path());
    whole(&second, &id, &record, 3, 3).await;
    let items = second.get(&format!("{BATCHES}/{id}/items")).await;
    let executions = second.get("/api/threads/t/executions").await;
    for item in items.as_array().unwrap() {
        assert_eq!(item["attempt"], 2, "{item}");
    }
    first.signal("-CONT");
    let lost = "threadkeep_batch_attempts_total{outcome=\"lost\"} 3";
    loop {
        let metrics = first.client.get(format!("{}/metrics", first.base)).send().await.unwrap();
        if metrics.text().await.unwrap().contains(lost) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(second.get(&format!("{BATCHES}/{id}/items")).await, items);
    assert_eq!(second.get("/api/threads/t/executions").await, executions);
}

/// The most memory that a gateway may take more for 5,000 live items, of which 64 are at work. Their submission has all of
/// them in the conversation, and 64 subagents have agents of their own.
const LIVE_ITEMS_MAX: u64 = 128 << 20;

/// What waits is in the database: a gateway keeps what it works on.
#[tokio::test]
async fn five_thousand_live_items_take_bounded_memory() {
    let database = postgres().unwrap().database().await.unwrap();
    for dir in [configured("full"), on_postgres(database.url(), "delta")] {
        let items: Json =
            (0..5_000).map(|n| json!({"key": format!("k{n}"), "prompt": "x".repeat(200)})).collect();
        let call = json!({"name": "batch_task", "args": {"title": "Files", "items": items,
            "subagent_type": "general-purpose", "max_live_items": 5_000, "max_running_items": 64}});
        let script = json!({"rules": [
            {"when": {"caller": "subagent"}, "answers": [{"text": "never", "gate": {"name": "shut"}}]},
            {"when": {"contains": ["submit"]}, "answers": [{"text": "", "tool_calls": [call]}, {"text": "Submitted."}]},
            {"answers": [{"text": "Yes."}]},
        ]});
        std::fs::write(dir.path().join("script.json"), script.to_string()).unwrap();
        let file = dir.path().join("config.yaml");
        let mut config: Json = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        config["subagent_batches"] = json!({"enabled": true, "max_live_items_per_batch": 5_000});
        config["subagent_runtime"] = json!({"max_running": 64});
        // The submission is seconds of work for an unoptimized program, during which it may renew nothing.
        config["run_ownership"] = json!({"lease_seconds": 120, "grace_seconds": 4});
        std::fs::write(file, config.to_string()).unwrap();
        let gateway = Gateway::start(dir.path());
        gateway.post("/api/threads", json!({"thread_id": "t"})).await;
        // What a first turn opens is not the items'.
        gateway.ask("Hello").await;
        let resident = || {
            let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.child.id())).unwrap();
            let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
        };
        let before = resident();
        let id = submit(&gateway).await;
        let counts = loop {
            let counts = gateway.get(&format!("{BATCHES}/{id}")).await["counts"].clone();
            if counts["running"] == 64 {
                break counts;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        assert_eq!(counts["queued"], 5_000 - 64, "{counts}");
        let growth = resident().saturating_sub(before);
        println!("{growth} bytes for 5,000 live items in {}", dir.path().display());
        assert!(growth <= LIVE_ITEMS_MAX, "{growth} bytes");
    }
}

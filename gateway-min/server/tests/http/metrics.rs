//! `/metrics`: what is counted, and who may read it.

use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};
use threadkeep_config::{KeyFile, Role};
use tokio::time::Instant;

use crate::support::{Gateway, Setup, question};

/// The text, and from it the value of a line.
async fn read(gateway: &Gateway) -> String {
    let answer = gateway.get("/metrics").await;
    let kind = answer.headers["content-type"].to_str().unwrap().to_owned();
    assert!(kind.starts_with("application/openmetrics-text"), "{kind}");
    let Value::String(text) = answer.ok() else { panic!("a text") };
    text
}

#[track_caller]
fn value(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
    let line = line.unwrap_or_else(|| panic!("no {name}\n{text}"));
    let number = line.rsplit(' ').next().unwrap();
    number.split('.').next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn runs_commits_flushes_the_cache_and_bytes_are_counted() {
    let script = json!({"rules": [
        {"when": {"contains": ["stop"]}, "answers": [{"text": "x", "gate": {"name": "metrics"}}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]});
    let gateway = Setup { script, frequency: 1000, ..Setup::on("sqlite", "delta") }.start().await;
    let fresh = read(&gateway).await;
    assert_eq!(value(&fresh, "threadkeep_runs_total{outcome=\"success\"}"), 0);
    gateway.create("secret-thread").await;
    for n in 0..3 {
        gateway.ask("secret-thread", &format!("question {n}")).await;
    }
    let commits = value(&read(&gateway).await, "threadkeep_commit_seconds_count{outcome=\"ok\"}");
    let rows = gateway.rows().await["checkpoints.db.checkpoint"];
    assert_eq!(commits, u64::try_from(rows).unwrap(), "one a checkpoint");

    let run = gateway.start_run("secret-thread", "stop").await;
    threadkeep_agent::model::scripted::gate("metrics").reached().await;
    let mut queued = question("wait for it");
    queued["multitask_strategy"] = json!("enqueue");
    let waiting = gateway.post("/api/threads/secret-thread/runs", queued).await.ok();
    let request = Request::get(format!("/api/threads/secret-thread/runs/{run}/stream"));
    let followed = gateway.open_answer(request.body(Body::empty()).unwrap()).await;
    let busy = read(&gateway).await;
    for name in ["runs_active", "runs_waiting", "streams_open"] {
        assert_eq!(value(&busy, &format!("threadkeep_{name}")), 1, "{name}\n{busy}");
    }
    drop(followed);
    assert_eq!(value(&read(&gateway).await, "threadkeep_streams_open"), 0);
    let path = format!("/api/threads/secret-thread/runs/{run}/cancel?wait=true");
    assert_eq!(gateway.post(&path, json!({})).await.status, 204);
    gateway.join("secret-thread", waiting["run_id"].as_str().unwrap()).await;
    // Runs continue from the cached head; an older state is replayed, the second time from the cache.
    let entries = gateway.history("secret-thread").await;
    let older = entries[entries.len() / 2]["checkpoint_id"].as_str().unwrap();
    for _ in 0..2 {
        gateway.get(&format!("/api/threads/secret-thread/state/{older}")).await.ok();
    }

    let text = read(&gateway).await;
    assert_eq!(value(&text, "threadkeep_runs_total{outcome=\"success\"}"), 4);
    assert_eq!(value(&text, "threadkeep_runs_total{outcome=\"interrupted\"}"), 1);
    assert_eq!(value(&text, "threadkeep_runs_active"), 0);
    assert_eq!(value(&text, "threadkeep_runs_waiting"), 0);
    assert_eq!(value(&text, "threadkeep_config_valid"), 1);
    assert!(value(&text, "threadkeep_streams_kept") >= 1);
    assert!(value(&text, "threadkeep_replay_supersteps_count") > 0, "{text}");
    assert!(value(&text, "threadkeep_history_cache_lookups_total{result=\"hit\"}") > 0, "{text}");
    assert!(value(&text, "threadkeep_commit_values_bytes_total") > 0);
    assert!(value(&text, "threadkeep_database_bytes") > 0);
    let (commands, flushes) =
        (value(&text, "threadkeep_sqlite_commands_total"), value(&text, "threadkeep_sqlite_flushes_total"));
    assert!(commands >= commits && flushes <= commands && flushes > 0, "{text}");
    assert_eq!(value(&text, "threadkeep_sqlite_queued"), 0);
    // One size per flush, and all operations that were not refused.
    assert_eq!(value(&text, "threadkeep_sqlite_flush_commands_count"), flushes, "{text}");
    assert_eq!(value(&text, "threadkeep_sqlite_flush_commands_bucket{le=\"+Inf\"}"), flushes);
    assert!(value(&text, "threadkeep_sqlite_flush_commands_sum") <= commands);
    assert!(value(&text, "threadkeep_sqlite_flush_commands_sum") >= commits);
    assert!(text.ends_with("# EOF\n"), "{text}");
    for id in ["secret-thread", &run, "default"] {
        assert!(!text.contains(id), "{id}\n{text}");
    }
}

#[tokio::test]
async fn metrics_are_for_administrators() {
    let sections = json!({"auth": {"enabled": true}});
    let gateway = Setup { sections, ..Setup::default() }.start().await;
    let keys = KeyFile::new(&gateway.data().parent().unwrap().join("api-keys.json"));
    for (role, status) in [(Role::User, 403), (Role::Admin, 200)] {
        let (_, key) = keys.create("ann", role).unwrap();
        let request = Request::get("/metrics").header("x-api-key", key.expose()).body(Body::empty()).unwrap();
        let answer = gateway.send(request).await;
        if status == 403 {
            answer.refused(403, "Admin privileges are required to read metrics.");
        } else {
            answer.ok();
        }
    }
    assert_eq!(gateway.get("/metrics").await.status, 401);
}

/// An in-memory database has no file to measure, but its runs are counted all the same.
#[tokio::test]
async fn every_backend_has_metrics() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    gateway.post("/api/threads/t/runs/wait", question("hello")).await.ok();
    let text = read(&gateway).await;
    assert_eq!(value(&text, "threadkeep_runs_total{outcome=\"success\"}"), 1);
    assert!(!text.contains("threadkeep_database_bytes") && !text.contains("sqlite"), "{text}");
}

/// Prometheus gives up after ten seconds, and then has no figures of an outage at all.
#[tokio::test]
async fn metrics_do_not_wait_for_a_database_that_does_not_answer() {
    let sections = json!({"subagent_batches": {"enabled": true}});
    let gateway = Setup { sections, ..Setup::on("postgres", "delta") }.start().await;
    let mut held = gateway.postgres().await;
    let lock = held.transaction().await.unwrap();
    let sql = "LOCK TABLE threadkeep_gateway_subagent_batches IN ACCESS EXCLUSIVE MODE";
    lock.batch_execute(sql).await.unwrap();
    tokio::time::pause();
    let begun = Instant::now();
    let text = read(&gateway).await;
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    tokio::time::resume();
    assert_eq!(value(&text, "threadkeep_config_valid"), 1);
    assert!(!text.contains("threadkeep_batches{"), "{text}");
}

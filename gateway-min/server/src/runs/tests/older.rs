//! Runs from an older checkpoint, seen from inside.

use serde_json::{Map, json};
use threadkeep::state::{StateSnapshot, Update};
use threadkeep_agent::model::scripted::gate;

use super::{Gateway, MODES, ask, from, gated, script};
use crate::runs::request::RunRequest;
use threadkeep_records::{CancelAction, RunStatus};

#[tokio::test]
async fn resuming_from_an_older_checkpoint_is_linear_in_delta_mode_and_a_fork_in_full_mode() {
    for mode in MODES {
        let gateway = Gateway::start(mode, &script()).await;
        gateway.run(ask("one")).await;
        let selected = gateway.head().await.unwrap();
        gateway.run(ask("two")).await;
        let old = gateway.head().await.unwrap();
        let (_, row) = gateway.run(from(&selected, ask("three"))).await;
        let head = gateway.head().await.unwrap();
        let messages = head.json("messages").unwrap().unwrap();
        let texts: Vec<_> = messages.as_array().unwrap().iter().map(|m| m["content"].clone()).collect();
        assert_eq!(texts, ["one", "You said: one", "three", "You said: three"], "{mode}");
        let history = gateway.history().await;
        let children = |of: &StateSnapshot| history.iter().filter(|s| s.parent == Some(of.key.id)).count();
        assert_eq!(children(&selected), if mode == "delta" { 1 } else { 2 });
        assert_eq!(children(&old), usize::from(mode == "delta"));
        let of_run = history.iter().filter(|s| s.metadata.extra.get("run_id") == Some(&json!(row.run_id)));
        let expected = if mode == "delta" { 4 } else { 3 };
        assert_eq!(of_run.count(), expected, "input, answer, duration, and what restores the selected state");
        let read = gateway.app.threads.accessor().get(&"t".into(), Some(old.key.id)).await.unwrap().unwrap();
        assert_eq!(read.values().unwrap(), old.values().unwrap(), "the abandoned turn stays in history");
    }
}

/// Scenario 58: capture and resume see the same head, the one left by the previous writer.
#[tokio::test]
async fn a_resume_waits_for_who_writes_to_the_thread_and_goes_on_from_what_it_left() {
    for mode in MODES {
        let name = format!("resume-waits-{mode}");
        let gateway = Gateway::start(mode, &gated(&name)).await;
        gateway.run(ask("one")).await;
        let selected = gateway.head().await.unwrap();
        gateway.run(ask("two")).await;
        let lock = gateway.app.threads.lock("t").await;
        let created = gateway.create(from(&selected, ask("wait"))).await.unwrap();
        let accessor = gateway.app.threads.accessor();
        let writes = vec![accessor.write("title", json!("left"), false).unwrap()];
        let update = Update { at: None, node: "n".into(), writes, extra: Map::new() };
        let left = accessor.update(&"t".into(), update).await.unwrap();
        assert_eq!(gateway.head().await.unwrap().key, left.key, "the run waits");
        let runs = gateway.app.records.runs();
        assert_eq!(runs.get(&created.run.run_id).await.unwrap().unwrap().status, RunStatus::Pending);
        drop(lock);
        gate(&name).reached().await;
        let cancelled = gateway.head().await.unwrap();
        let history = gateway.history().await;
        let restored = history.iter().find(|state| state.key.id == cancelled.parent.unwrap()).unwrap();
        if mode == "delta" {
            assert_eq!(restored.parent, Some(left.key.id));
        } else {
            assert_eq!(restored.key, selected.key, "a fork");
        }
        gateway.app.runs.cancel(&created.run.run_id, CancelAction::Rollback).await.unwrap();
        gateway.row(&created.run.run_id).await;
        assert_eq!(gateway.head().await.unwrap().values().unwrap(), left.values().unwrap(), "{mode}");
    }
}

#[tokio::test]
async fn an_unknown_checkpoint_or_thread_is_refused_and_changes_nothing() {
    let gateway = Gateway::start("delta", &script()).await;
    let id = "0190b0f0-0000-7000-8000-000000000000";
    let request = RunRequest { checkpoint: Some(id.parse().unwrap()), ..ask("x") };
    assert_eq!(
        gateway.create(request).await.err().unwrap().to_string(),
        format!("Checkpoint {id} not found")
    );
    let error = gateway.create_on("nowhere", ask("x"), None).await.err().unwrap();
    assert_eq!(error.to_string(), "Thread nowhere not found");
    assert!(gateway.history().await.is_empty());
    assert_eq!(gateway.app.records.runs().active_for_thread("t").await.unwrap(), None);
}

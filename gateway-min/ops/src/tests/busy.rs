//! Passes over every thread beside a thread whose runs never pause, and one that is deleted meanwhile.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use serde_json::{Map, json};
use threadkeep::Error;
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::metadata::Counters;
use threadkeep::saver::{Rewrite, Saver as _};
use threadkeep_records::{
    DATABASE_FILE, Delegating, ExecutionEnd, ExecutionKind, ExecutionStatus, NewExecution, Records,
    RecordsOptions,
};

use super::commands::{carried_out, filled, lengths, run_on};
use super::store::{BUSY, Busy};
use crate::error::OpsError;
use crate::*;

#[tokio::test(start_paused = true)]
async fn a_prune_goes_on_past_a_busy_thread_and_ends_with_an_error() {
    let store = filled().await;
    let prune = ["prune", "apply", "--all", "--keep", "latest", "--yes"];
    assert_eq!(run_on(&store, &prune).await, Exit::Error);
    assert_eq!(lengths(&store).await, [1, 4, 1]);
}

/// Each batch is a change of its own, and stays.
#[tokio::test(start_paused = true)]
async fn a_pass_in_batches_that_stops_half_way_reports_what_it_removed() {
    let store = filled().await;
    store.passes.store(1, Ordering::SeqCst);
    let home = tempfile::tempdir().unwrap();
    let prune = ["prune", "apply", "--thread", BUSY, "--keep", "latest", "--batch", "1", "--yes", "--json"];
    let (result, printed) = carried_out(&store, home.path(), "memory", &prune).await;
    assert!(matches!(result, Err(OpsError::Checkpoints(Error::Stale { .. }))), "{result:?}");
    assert_eq!(lengths(&store).await, [4, 3, 4]);
    let lines: Vec<serde_json::Value> =
        printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 1, "{printed}");
    assert_eq!((&lines[0]["thread"], lines[0]["removed"].as_array().unwrap().len()), (&json!(BUSY), 1));
    assert_eq!(lines[0]["stats_after"]["checkpoint_rows"], 3, "{printed}");

    let prune = ["prune", "apply", "--thread", BUSY, "--keep", "latest", "--batch", "1", "--yes"];
    let (result, printed) = carried_out(&store, home.path(), "memory", &prune).await;
    assert_eq!((result.unwrap_err().exit(), printed.as_str()), (Exit::Error, ""), "nothing to report");
}

/// It is also the last change of a command that works on one thread only.
#[tokio::test]
async fn a_pass_in_batches_ends_after_a_batch_when_it_is_interrupted_and_reports_what_it_removed() {
    let store = Busy { interrupts: true, ..filled().await };
    store.passes.store(9, Ordering::SeqCst);
    let home = tempfile::tempdir().unwrap();
    let removed = "1 checkpoint of 1 thread was removed.";
    let cases: [(&[&str], &str, _); 2] =
        [(&[], removed, [4, 3, 4]), (&["--json"], "\"removed\":[\"", [4, 2, 4])];
    for (json, says, left) in cases {
        let prune = ["prune", "apply", "--thread", BUSY, "--keep", "latest", "--batch", "1", "--yes"];
        let prune = [&prune[..], json].concat();
        let (result, printed) = carried_out(&store, home.path(), "memory", &prune).await;
        crate::interrupt::forget_here();
        let error = result.unwrap_err();
        assert_eq!(error.exit(), Exit::Interrupted, "{error}");
        assert!(error.to_string().contains("0 of 1 threads done"), "{error}");
        assert!(printed.contains(says), "{printed}");
        assert_eq!(lengths(&store).await, left);
    }
}

/// Nothing was converted, which does not mean that there was nothing to convert.
#[tokio::test(start_paused = true)]
async fn a_conversion_that_fails_does_not_call_it_nothing_to_convert() {
    let store = filled().await;
    let home = tempfile::tempdir().unwrap();
    let convert = ["convert", "--thread", BUSY, "--to", "delta"];
    let (result, printed) = carried_out(&store, home.path(), "memory", &convert).await;
    assert!(matches!(result, Err(OpsError::Checkpoints(Error::Stale { .. }))), "{result:?}");
    assert_eq!(printed, "");
}

#[tokio::test(start_paused = true)]
async fn a_conversion_goes_on_past_a_busy_thread_and_ends_with_an_error() {
    let store = filled().await;
    assert_eq!(run_on(&store, &["convert", "--all", "--to", "delta"]).await, Exit::Error);
    let mut marked = Vec::new();
    for thread in ["a", BUSY, "c"] {
        let image = store.read_thread(&ThreadId::from(thread)).await.unwrap();
        marked.push(image.checkpoints.values().any(|tuple| tuple.metadata.delta_marker));
    }
    assert_eq!(marked, [true, false, true]);
}

#[tokio::test(start_paused = true)]
async fn an_export_goes_on_past_a_busy_thread_and_ends_with_an_error() {
    let store = Busy { reads_fail: true, ..filled().await };
    let to = tempfile::tempdir().unwrap();
    let out = to.path().display().to_string();
    assert_eq!(run_on(&store, &["export", "--all", "--out", &out]).await, Exit::Error);
    let mut files: Vec<_> = std::fs::read_dir(to.path())
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    assert_eq!(files, ["a.ndjson", "c.ndjson"]);
}

#[tokio::test]
async fn a_check_that_fails_half_way_reports_what_it_found() {
    let store = Busy { reads_fail: true, ..filled().await };
    let image = store.store.read_thread(&"a".into()).await.unwrap();
    let mut tuple = image.checkpoints.values().next().unwrap().clone();
    tuple.metadata.counters.insert("messages".into(), Counters { updates: 1, supersteps: 1 });
    let rewrite = Rewrite { put: vec![tuple], ..Rewrite::default() };
    store.store.rewrite_thread(&"a".into(), &image.revision, rewrite).await.unwrap();
    let home = tempfile::tempdir().unwrap();
    let (result, printed) = carried_out(&store, home.path(), "memory", &["verify", "--all"]).await;
    assert!(matches!(result, Err(OpsError::Checkpoints(Error::Unavailable { .. }))), "{result:?}");
    assert!(printed.contains("thread a") && printed.contains("not counted"), "{printed}");
}

#[tokio::test]
async fn sizes_and_plans_that_fail_half_way_report_what_they_have() {
    let store = Busy { reads_fail: true, ..filled().await };
    let home = tempfile::tempdir().unwrap();
    for (command, says) in [
        (&["threads", "du"][..], "total of 2 threads"),
        (&["prune", "plan", "--all", "--keep", "latest", "--summary"], "of thread a would be removed"),
    ] {
        let (result, printed) = carried_out(&store, home.path(), "memory", command).await;
        assert!(result.is_err() && printed.contains(says), "{command:?}: {result:?}\n{printed}");
    }
}

#[tokio::test]
async fn a_damaged_thread_is_passed_over_and_is_an_error() {
    let store = Busy { damaged: true, ..filled().await };
    let home = tempfile::tempdir().unwrap();
    for command in [
        &["threads", "list", "--json"][..],
        &["threads", "du", "--json"],
        &["prune", "plan", "--all", "--keep", "latest", "--json"],
        &["retention", "apply", "--all", "--yes", "--json"],
        &["convert", "--all", "--to", "delta", "--dry-run", "--json"],
        &["convert", "--all", "--to", "delta", "--json"],
        &["prune", "apply", "--all", "--keep", "latest", "--yes", "--json"],
        // One that was named is there, too.
        &["prune", "plan", "--thread", "a", BUSY, "c", "--keep", "latest", "--json"],
    ] {
        let (result, printed) = carried_out(&store, home.path(), "memory", command).await;
        let error = result.unwrap_err();
        assert_eq!(error.exit(), Exit::Error, "{command:?}");
        assert!(error.to_string().starts_with("1 of "), "{command:?}: {error}");
        for thread in ["a", "c"] {
            assert!(printed.contains(&format!("\"{thread}\"")), "{command:?}, {thread}: {printed}");
        }
    }
    let (result, _) = carried_out(&store, home.path(), "memory", &["threads", "show", BUSY]).await;
    assert!(matches!(result, Err(OpsError::Checkpoints(Error::Corrupt { .. }))), "{result:?}");
    assert_eq!(lengths(&Busy { damaged: false, ..store }).await, [1, 4, 1]);
}

/// The damage is in another part of that thread.
#[tokio::test]
async fn a_protected_checkpoint_of_a_damaged_thread_does_not_end_the_pass() {
    let store = Busy { damaged: true, short_reads: true, ..filled().await };
    let home = tempfile::tempdir().unwrap();
    let image = store.store.read_thread(&BUSY.into()).await.unwrap();
    for (_, id) in image.checkpoints.keys() {
        let id = id.to_string();
        let prune = ["prune", "apply", "--all", "--keep", "latest", "--yes", "--protect", &id];
        let (result, _) = carried_out(&store, home.path(), "memory", &prune).await;
        let error = result.unwrap_err().to_string();
        assert!(error.starts_with("1 of "), "{error}");
    }
    assert_eq!(lengths(&Busy { damaged: false, ..store }).await, [1, 4, 1]);
}

/// One that is damaged may have it, but a mistyped id would be one of another thread.
#[tokio::test]
async fn a_protected_id_that_is_found_nowhere_ends_the_command_and_names_the_threads_that_cannot_be_read() {
    let store = Busy { damaged: true, ..filled().await };
    let home = tempfile::tempdir().unwrap();
    let id_of = async |thread: &str| {
        let image = store.store.read_thread(&thread.into()).await.unwrap();
        image.checkpoints.keys().next().unwrap().1.to_string()
    };
    let (known, unread) = (id_of("a").await, id_of(BUSY).await);
    let nowhere = CheckpointId::from_bytes([7; 16]).to_string();
    for command in [
        &["prune", "apply", "--all", "--keep", "latest", "--yes"][..],
        &["prune", "plan", "--thread", "a", BUSY, "c", "--keep", "latest"],
        &["retention", "apply", "--all", "--leaf-sibling-branches", "--yes"],
    ] {
        let protect = [command, &["--protect", &known, &unread, &nowhere]].concat();
        let (result, printed) = carried_out(&store, home.path(), "memory", &protect).await;
        let error = result.unwrap_err();
        assert_eq!((error.exit(), printed.as_str()), (Exit::Error, ""), "{command:?}");
        let error = error.to_string();
        assert!(error.contains(&unread) && error.contains(&nowhere) && !error.contains(&known), "{error}");
        assert!(error.contains("1 selected thread cannot be read: b;"), "{error}");
    }
    assert_eq!(lengths(&Busy { damaged: false, ..store }).await, [4, 4, 4]);
}

#[tokio::test]
async fn a_damaged_subagent_does_not_keep_the_others_from_being_checked() {
    let store = Busy { damaged: true, ..filled().await };
    let home = tempfile::tempdir().unwrap();
    let records = Records::open(&home.path().join(DATABASE_FILE), RecordsOptions::default()).await.unwrap();
    let executions = records.executions();
    for id in [BUSY, "c"] {
        let new = NewExecution {
            execution_id: id.to_owned(),
            thread_id: "a".to_owned(),
            run_id: "r".to_owned(),
            delegating: Delegating::Unrecorded,
            parent_execution: None,
            kind: ExecutionKind::Task,
            tool_call_id: id.to_owned(),
            agent_name: "general-purpose".to_owned(),
            definition: Map::new(),
            definition_digest: String::new(),
            description: "work".to_owned(),
            deadline: records.now(),
        };
        let row = executions.open(new).await.unwrap().row;
        executions.started(&row, "model", 0).await.unwrap();
        let end = ExecutionEnd {
            status: ExecutionStatus::Completed,
            error: None,
            stop_reason: None,
            usage: BTreeMap::new(),
        };
        executions.finish(&row, end).await.unwrap();
    }
    records.close().await;
    let verify = ["delegations", "verify", "a"];
    let (result, printed) = carried_out(&store, home.path(), "sqlite", &verify).await;
    assert_eq!(result.unwrap(), Exit::Found, "{printed}");
    assert!(printed.contains("b: its checkpoints cannot be read") && printed.contains("page 7"), "{printed}");
    assert!(printed.contains("c: its checkpoints are gone"), "{printed}");
    assert!(printed.contains("2 executions: the records of 2 differ."), "{printed}");
}

#[tokio::test]
async fn a_thread_that_was_deleted_meanwhile_stops_no_pass() {
    let store = filled().await;
    for command in [
        &["prune", "plan", "--all", "--keep", "latest"][..],
        &["retention", "plan", "--all"],
        &["retention", "apply", "--all", "--yes"],
        &["convert", "--all", "--to", "delta", "--dry-run"],
        &["verify", "--all"],
        &["threads", "list"],
        &["threads", "du"],
    ] {
        assert_eq!(run_on(&store, command).await, Exit::Done, "{command:?}");
    }
}

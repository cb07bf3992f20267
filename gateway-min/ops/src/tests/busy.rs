//! Passes over every thread beside a thread whose runs never pause, and one that is deleted meanwhile; imports whose outcome
//! the store does not say.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use clap::{Command as Clap, FromArgMatches as _};
use serde_json::{Map, json};
use threadkeep::Error;
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::metadata::{Counters, Source};
use threadkeep::saver::{Rewrite, Saver as _};
use threadkeep::step::{Durability, StepWriter};
use threadkeep_records::{
    DATABASE_FILE, Delegating, ExecutionEnd, ExecutionKind, ExecutionStatus, NewExecution, NewThread,
    Records, RecordsOptions,
};
use threadkeep_storage::Stores;
use tokio::sync::Notify;

use super::store::{BUSY, Busy, IMPORTED, Import, accessor};
use crate::error::OpsError;
use crate::*;

/// Four supersteps on each of the threads a, b and c.
async fn filled() -> Busy {
    let busy = Busy::default();
    let accessor = accessor(&busy);
    for thread in ["a", BUSY, "c"] {
        let mut writer = StepWriter::open(&accessor, &ThreadId::from(thread), None).await.unwrap();
        for number in 0..4 {
            let task = writer.start_task(&"model".into(), 0);
            let write = writer
                .write("messages", json!([{"role": "user", "content": format!("{number}")}]), false)
                .unwrap();
            writer.finish_task(task, vec![write], Durability::WithCommit).await.unwrap();
            writer.commit(Source::Loop, vec![], Map::new()).await.unwrap();
        }
    }
    busy
}

/// The exit of a command on this store, without records.
async fn run_on(store: &Busy, arguments: &[&str]) -> Exit {
    let home = tempfile::tempdir().unwrap();
    match carried_out(store, home.path(), "memory", arguments).await.0 {
        Ok(exit) => exit,
        Err(error) => error.exit(),
    }
}

/// What became of a command on this store, whose records are in this directory, and what it printed.
async fn carried_out(
    store: &Busy,
    home: &Path,
    backend: &str,
    arguments: &[&str],
) -> (Result<Exit, OpsError>, String) {
    let file = home.join("config.yaml");
    let database = json!({"backend": backend, "sqlite_dir": home});
    std::fs::write(&file, json!({"config_version": 49, "database": database}).to_string()).unwrap();
    let file = file.display().to_string();
    let matches = OpsCommand::augment_subcommands(Clap::new("threadkeep"))
        .get_matches_from([&["threadkeep"], arguments, &["--config", &file]].concat());
    let command = OpsCommand::from_arg_matches(&matches).unwrap();
    let printed = Printed::default();
    let mut out = Out::to(printed.clone());
    let result = command.0.carry_out(&Stores::with_saver(store.clone()), &mut out).await;
    out.show().unwrap();
    let text = String::from_utf8(printed.0.lock().unwrap().clone()).unwrap();
    (result, text)
}

/// What a command prints.
#[derive(Clone, Default)]
struct Printed(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Printed {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

async fn lengths(store: &Busy) -> Vec<usize> {
    let mut lengths = Vec::new();
    for thread in ["a", BUSY, "c"] {
        lengths.push(store.read_thread(&ThreadId::from(thread)).await.unwrap().checkpoints.len());
    }
    lengths
}

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

/// What an import of a thread with three checkpoints says, and the record that it left, in a store where writing the
/// thread ends like this.
async fn imported(import: Import) -> (Result<Exit, OpsError>, Option<threadkeep_records::ThreadRow>) {
    imported_into(&Busy { import, ..filled().await }).await
}

/// The same of this store.
async fn imported_into(store: &Busy) -> (Result<Exit, OpsError>, Option<threadkeep_records::ThreadRow>) {
    let home = tempfile::tempdir().unwrap();
    let records = Records::open(&home.path().join(DATABASE_FILE), RecordsOptions::default()).await.unwrap();
    let file = home.path().join("a.ndjson").display().to_string();
    let export = ["export", "--thread", "a", "--out", &file];
    carried_out(store, home.path(), "sqlite", &export).await.0.unwrap();
    let import = ["import", &file, "--as", IMPORTED, "--owner", "bob"];
    let result = carried_out(store, home.path(), "sqlite", &import).await.0;
    let row = records.threads().get(IMPORTED, None).await.unwrap();
    // It does not hold the thread.
    let reserved = records.runs().reserve(IMPORTED, threadkeep_records::WriterKind::Branch).await.unwrap();
    reserved.release().await.unwrap();
    records.close().await;
    (result, row)
}

#[tokio::test]
async fn an_import_in_doubt_is_taken_for_done_only_if_all_of_it_is_there() {
    let (result, row) = imported(Import::AnswerLost).await;
    assert_eq!(result.unwrap(), Exit::Done);
    assert_eq!(row.unwrap().user_id.as_deref(), Some("bob"));
    let (result, row) = imported(Import::Lost).await;
    let error = result.unwrap_err();
    assert!(matches!(error, OpsError::InDoubt(_)), "{error}");
    let says = "is not there yet, and may still appear";
    assert!(error.to_string().contains(says) && error.to_string().contains("was lost"), "{error}");
    assert!(row.is_some(), "the thread may still appear, and must not be everybody's");
}

/// It was in doubt, and the command is repeated as its error says.
#[tokio::test]
async fn an_import_that_is_repeated_says_that_all_of_the_file_is_there() {
    let store = filled().await;
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("a.ndjson").display().to_string();
    let export = ["export", "--thread", "a", "--out", &file];
    carried_out(&store, home.path(), "memory", &export).await.0.unwrap();
    for (thread, all) in [("a", true), (BUSY, false)] {
        let import = ["import", &file, "--as", thread];
        let (result, printed) = carried_out(&store, home.path(), "memory", &import).await;
        let error = result.unwrap_err().to_string();
        assert!(error.contains(&format!("thread {thread} already exists")) && printed.is_empty(), "{error}");
        assert_eq!(error.contains("with every checkpoint of the file"), all, "{error}");
    }
}

#[tokio::test]
async fn an_import_that_was_not_written_leaves_no_record() {
    let (result, row) = imported(Import::Refused).await;
    assert!(result.unwrap_err().to_string().contains("the disk is full"));
    assert_eq!(row, None);
}

/// As the savers of Python do on the same store: they know no records, and so no reservation.
#[tokio::test]
async fn a_thread_that_another_program_began_during_an_import_gets_no_record_of_the_file() {
    for import in [Import::AnothersAfterLook, Import::AnothersBeforeWrite, Import::AnothersInstead] {
        let (result, row) = imported(import).await;
        let error = result.unwrap_err().to_string();
        assert!(error.contains("nothing was imported: thread imported already exists; "), "{error}");
        assert_eq!(row, None);
    }
}

/// The record says whose the file's thread is, and what failed wrote none.
#[tokio::test]
async fn a_failed_import_leaves_no_record_on_a_thread_that_another_program_began() {
    let store = Busy { import: Import::AnothersThenRefused, ..filled().await };
    let (result, row) = imported_into(&store).await;
    assert!(result.unwrap_err().to_string().contains("the disk is full"));
    assert_eq!(row, None);
    let others = store.read_thread(&IMPORTED.into()).await.unwrap();
    assert_eq!(others.checkpoints.len(), 1, "it is not the import's");
}

/// The advice of a record with another owner is to delete the thread.
#[tokio::test]
async fn a_thread_that_began_before_an_import_had_its_id_is_seen_before_the_record() {
    let store = Busy { import: Import::AnothersAfterLook, ..filled().await };
    let home = tempfile::tempdir().unwrap();
    let records = Records::open(&home.path().join(DATABASE_FILE), RecordsOptions::default()).await.unwrap();
    let new = NewThread { thread_id: IMPORTED.to_owned(), ..NewThread::default() };
    records.threads().create(new).await.unwrap();
    let file = home.path().join("a.ndjson").display().to_string();
    let export = ["export", "--thread", "a", "--out", &file];
    carried_out(&store, home.path(), "sqlite", &export).await.0.unwrap();
    let import = ["import", &file, "--as", IMPORTED, "--owner", "bob"];
    let error = carried_out(&store, home.path(), "sqlite", &import).await.0.unwrap_err().to_string();
    assert!(error.contains("already exists") && !error.contains("another owner"), "{error}");
    assert!(records.threads().get(IMPORTED, None).await.unwrap().is_some(), "it is not the import's");
    assert_eq!(store.read_thread(&IMPORTED.into()).await.unwrap().checkpoints.len(), 1);
    records.close().await;
}

/// The one that fails would take back the record that the other one counts on, and its thread would be everybody's.
#[tokio::test]
async fn of_two_imports_of_one_thread_at_once_one_is_refused() {
    let gate = Arc::<(Notify, Notify)>::default();
    let store = Busy { import: Import::Refused, gate: Some(gate.clone()), ..filled().await };
    let other = Busy { import: Import::Written, gate: None, ..store.clone() };
    let home = tempfile::tempdir().unwrap();
    let records = Records::open(&home.path().join(DATABASE_FILE), RecordsOptions::default()).await.unwrap();
    let file = home.path().join("a.ndjson").display().to_string();
    let export = ["export", "--thread", "a", "--out", &file];
    carried_out(&store, home.path(), "sqlite", &export).await.0.unwrap();
    let import = ["import", &file, "--as", IMPORTED, "--owner", "bob"];
    let beside = async {
        gate.0.notified().await;
        let beside = carried_out(&other, home.path(), "sqlite", &import).await.0;
        gate.1.notify_one();
        beside
    };
    let (first, second) = tokio::join!(carried_out(&store, home.path(), "sqlite", &import), beside);
    let (first, second) = (first.0.unwrap_err().to_string(), second.unwrap_err().to_string());
    assert!(first.contains("the disk is full"), "{first}");
    assert!(second.contains("nothing was imported") && second.contains("another import"), "{second}");
    assert!(records.threads().get(IMPORTED, None).await.unwrap().is_none());

    carried_out(&other, home.path(), "sqlite", &import).await.0.unwrap();
    let row = records.threads().get(IMPORTED, None).await.unwrap();
    assert_eq!(row.unwrap().user_id.as_deref(), Some("bob"));
    records.close().await;
}

#[tokio::test]
async fn a_record_that_was_there_before_a_failed_import_stays() {
    let store = Busy { import: Import::Refused, ..filled().await };
    let home = tempfile::tempdir().unwrap();
    let records = Records::open(&home.path().join(DATABASE_FILE), RecordsOptions::default()).await.unwrap();
    let new = NewThread { thread_id: IMPORTED.to_owned(), ..NewThread::default() };
    records.threads().create(new).await.unwrap();
    let file = home.path().join("a.ndjson").display().to_string();
    for command in [&["export", "--thread", "a", "--out", &file][..], &["import", &file, "--as", IMPORTED]] {
        let _ = carried_out(&store, home.path(), "sqlite", command).await;
    }
    assert!(records.threads().get(IMPORTED, None).await.unwrap().is_some());
    records.close().await;
}

/// Links and rows alone do not show that a version of a channel goes back.
#[tokio::test]
async fn a_file_of_a_damaged_thread_is_refused_as_verify_would_find_it() {
    let store = filled().await;
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("1.ndjson");
    let mut image = store.read_thread(&"a".into()).await.unwrap();
    image.thread = "damaged".into();
    let (_, last) = image.checkpoints.iter_mut().next_back().unwrap();
    last.checkpoint.channels.get_mut("messages").unwrap().version.counter = 0;
    let source = archive::Source { program: "x".to_owned(), saver: "x".to_owned() };
    archive::write(&image, source, None, std::fs::File::create(&file).unwrap()).unwrap();
    let file = file.display().to_string();
    let (result, _) = carried_out(&store, home.path(), "memory", &["import", &file]).await;
    let error = result.unwrap_err().to_string();
    assert!(error.contains("1.ndjson: nothing was imported") && error.contains("versions grow"), "{error}");
    assert!(store.read_thread(&"damaged".into()).await.unwrap().checkpoints.is_empty());
}

/// A thread that a store refuses is one file that cannot be imported.
#[tokio::test]
async fn a_file_with_a_broken_lineage_does_not_keep_the_others_from_being_imported() {
    let store = filled().await;
    let home = tempfile::tempdir().unwrap();
    let mut image = store.read_thread(&"a".into()).await.unwrap();
    let to = |name: &str| std::fs::File::create(home.path().join(name)).unwrap();
    let source = || archive::Source { program: "x".to_owned(), saver: "x".to_owned() };
    image.thread = "good".into();
    archive::write(&image, source(), None, to("2.ndjson")).unwrap();
    image.thread = "headless".into();
    image.checkpoints.pop_first();
    archive::write(&image, source(), None, to("1.ndjson")).unwrap();
    let directory = home.path().display().to_string();
    let (result, printed) = carried_out(&store, home.path(), "memory", &["import", &directory]).await;
    let error = result.unwrap_err().to_string();
    assert!(error.contains("1 of 2 files could not be imported"), "{error}");
    assert!(printed.contains("1 thread was imported"), "{printed}");
    assert_eq!(store.read_thread(&"good".into()).await.unwrap().checkpoints.len(), 4);
    let file = home.path().join("1.ndjson").display().to_string();
    let (result, _) = carried_out(&store, home.path(), "memory", &["import", &file]).await;
    let error = result.unwrap_err().to_string();
    assert!(error.contains("1.ndjson: nothing was imported"), "{error}");
}

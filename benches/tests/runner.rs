//! The runner's command line.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use threadkeep_benches::case::Backend;
use threadkeep_benches::row::{Row, parse};

fn workloads(directory: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_workloads"));
    command.current_dir(directory).env("RUST_BACKTRACE", "0").args(arguments);
    command.output().unwrap()
}

fn rows(directory: &Path) -> Vec<Row> {
    parse(&fs::read_to_string(directory.join("rows.jsonl")).unwrap()).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_matrix_gives_a_row_a_case_tables_and_plots() {
    let directory = tempfile::tempdir().unwrap();
    let run = "run --workload lean,plain --backend memory,sqlite-normal,raw-sqlite --mode full,delta:10 --turns 40 \
               --colds 1 --out rows.jsonl --scratch .";
    let done = workloads(directory.path(), &run.split_whitespace().collect::<Vec<_>>());
    assert!(done.status.success(), "{}", text(&done.stderr));
    let rows = rows(directory.path());
    assert_eq!(rows.len(), 10);
    for row in &rows {
        let found = &row.found;
        assert_eq!((found.turns_done, found.messages), (Some(40), Some(80)));
        assert_eq!((found.capped.as_deref(), found.error.as_deref()), (None, None));
        assert!(found.turn_p50_ms.unwrap() > 0.0 && found.head_warm_ms.unwrap() > 0.0);
        let on_disk = row.case.backend != Backend::Memory;
        assert_eq!(found.bytes_closed.is_some_and(|bytes| bytes > found.raw_bytes.unwrap() / 4), on_disk);
        assert_eq!(found.cold_head_ms.is_some(), on_disk);
        if row.case.backend != Backend::RawSqlite {
            assert_eq!(found.ok, Some(true));
            assert!(found.list100_ms.unwrap() > 0.0 && !found.curve.is_empty());
        }
        if row.case.backend == Backend::SqliteNormal {
            assert_eq!((found.flushes, &found.cold_digest), (Some(0), &found.digest));
        }
    }
    let left: Vec<_> =
        fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["rows.jsonl"], "databases are removed");

    let done = workloads(directory.path(), &["summarize", "rows.jsonl", "--plots", "plots"]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let tables = text(&done.stdout);
    assert!(
        tables.contains("lean, 40 turns, 128 B a message") && tables.contains("sqlite-normal  delta:10"),
        "{tables}"
    );
    let page = fs::read_to_string(directory.path().join("plots/index.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("Bytes over turns: plain, 40 turns"));
    assert!(directory.path().join("plots/lean-40-128-1-latency.svg").exists());
}

#[test]
fn conversations_are_written_by_several_tasks_and_each_is_checked() {
    let directory = tempfile::tempdir().unwrap();
    let run = "run --workload agent --backend sqlite-normal --mode delta:10 --turns 6 --threads 5 --writers 1,3 \
               --out rows.jsonl --scratch .";
    let done = workloads(directory.path(), &run.split_whitespace().collect::<Vec<_>>());
    assert!(done.status.success(), "{}", text(&done.stderr));
    let rows = rows(directory.path());
    let found: Vec<_> =
        rows.iter().map(|row| (row.case.writers, row.found.turns_done, row.found.ok)).collect();
    assert_eq!(found, [(1, Some(30), Some(true)), (3, Some(30), Some(true))]);
    assert!(rows.iter().all(|row| row.found.turns_per_s.unwrap() > 0.0));
}

#[test]
fn a_case_beyond_its_time_ends_early_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let run = "run --backend memory --mode full --turns 100000 --cap 0 --out rows.jsonl --scratch .";
    let done = workloads(directory.path(), &run.split_whitespace().collect::<Vec<_>>());
    assert!(done.status.success(), "{}", text(&done.stderr));
    let row = &rows(directory.path())[0];
    assert_eq!(
        (row.found.capped.as_deref(), row.found.turns_done, row.found.ok),
        (Some("time"), Some(1), Some(true))
    );
    assert!(text(&done.stdout).contains("full (capped at 1)"));
}

#[test]
fn rows_whose_states_differ_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let run = "run --backend memory --turns 3 --out rows.jsonl --scratch .";
    assert!(workloads(directory.path(), &run.split_whitespace().collect::<Vec<_>>()).status.success());
    assert!(workloads(directory.path(), &["summarize", "rows.jsonl"]).status.success());
    let mut rows = rows(directory.path());
    rows[1].found.digest = Some("0".repeat(16));
    let lines: Vec<String> = rows.iter().map(|row| serde_json::to_string(row).unwrap()).collect();
    fs::write(directory.path().join("rows.jsonl"), lines.join("\n")).unwrap();
    let done = workloads(directory.path(), &["summarize", "rows.jsonl"]);
    assert!(!done.status.success());
    let reason = "lean on memory in delta:10, 3 turns: the state differs from that of memory in full";
    assert!(text(&done.stderr).contains(reason), "{}", text(&done.stderr));
}

#[test]
fn a_case_that_fails_has_a_row_with_the_reason_and_fails_the_run() {
    let directory = tempfile::tempdir().unwrap();
    // A path at which no database can be created.
    let job = r#"{"case": {"workload": "lean", "backend": "sqlite", "mode": "full", "turns": 1, "size": 128, "threads": 1,
        "writers": 1, "seed": 0, "rep": 0, "cap_s": 1}, "target": "/dev/null/none", "phase": "write"}"#;
    let done = workloads(directory.path(), &["job", job]);
    assert!(!done.status.success());
    assert_eq!(text(&done.stderr).lines().count(), 1, "{}", text(&done.stderr));

    let run = "run --backend langgraph-sqlite,memory --mode full --turns 2 --out rows.jsonl --scratch . --python /bin/false";
    let done = workloads(directory.path(), &run.split_whitespace().collect::<Vec<_>>());
    assert!(!done.status.success());
    let rows = rows(directory.path());
    assert_eq!(rows.len(), 2, "the other cases are still measured");
    assert!(
        rows[0].found.error.as_deref().unwrap().contains("it printed nothing")
            && rows[1].found.ok == Some(true)
    );
}

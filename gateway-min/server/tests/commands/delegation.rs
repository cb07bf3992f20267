//! `threadkeep chat --subagents`: what it prints of subagents, and what becomes of them when it is stopped or killed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value as Json, json};
use tempfile::TempDir;

use super::chat::{chat, in_mode};

/// A lead that delegates three tasks and subagents of three turns, with a record of what models are asked. `third` is the
/// subagents' last answer.
fn with_delegations(dir: &TempDir, third: &Json) -> PathBuf {
    let last = json!({"text": "All three are done.", "usage": {"input_tokens": 20, "output_tokens": 3}});
    with_last_answers(dir, third, &last)
}

/// The same, with `last` as the lead's last answer.
fn with_last_answers(dir: &TempDir, third: &Json, last: &Json) -> PathBuf {
    let record = dir.path().join("requests.jsonl");
    let task = |prompt: &str| {
        let args = json!({"prompt": prompt, "subagent_type": "general-purpose", "description": format!("look at {prompt}")});
        json!({"name": "task", "args": args, "id": format!("call_{prompt}")})
    };
    let script = json!({"record": record, "rules": [
        {"when": {"caller": "subagent"}, "answers": [
            {"text": "One.", "delay_ms": 2, "tool_calls": [{"name": "ls"}], "usage": {"input_tokens": 5, "output_tokens": 1}},
            {"delay_ms": 2, "tool_calls": [{"name": "glob", "args": {"pattern": "*"}}], "usage": {"input_tokens": 6, "output_tokens": 1}},
            third,
        ]},
        {"when": {"contains": ["delegate"], "offered": ["task"]}, "answers": [
            {"text": "I delegate.", "tool_calls": [task("a"), task("b"), task("c")], "usage": {"input_tokens": 10, "output_tokens": 2}},
            last,
        ]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]});
    std::fs::write(dir.path().join("script.json"), script.to_string()).unwrap();
    record
}

fn report() -> Json {
    json!({"text": "Report on {{input}}.", "delay_ms": 2, "usage": {"input_tokens": 7, "output_tokens": 1}})
}

/// An answer that never comes.
fn never() -> Json {
    json!({"text": "never", "gate": {"name": "shut"}})
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

/// Exit code, records on stdout, stderr.
fn ran(command: &mut Command) -> (i32, Vec<Json>, String) {
    ended(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

fn ended(child: Child) -> (i32, Vec<Json>, String) {
    let output = child.wait_with_output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    let records = stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (output.status.code().unwrap_or(-1), records, String::from_utf8(output.stderr).unwrap())
}

fn custom(records: &[Json]) -> Vec<&Json> {
    records.iter().filter(|record| record["type"] == "custom").map(|record| &record["data"]).collect()
}

/// The texts of the conversation at the end.
fn texts(records: &[Json]) -> Vec<&str> {
    let values = records.iter().rfind(|record| record["type"] == "values").unwrap();
    values["data"]["messages"].as_array().unwrap().iter().filter_map(|it| it["content"].as_str()).collect()
}

/// A chat about delegations that is stopped with this signal as soon as its models were asked `asked` times.
fn stopped(dir: &TempDir, record: &Path, asked: usize, signal: &str) -> (i32, Vec<Json>, String) {
    let mut command = chat(dir, &["--subagents", "--json", "please delegate"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while requests(record).values().sum::<usize>() < asked {
        std::thread::sleep(Duration::from_millis(1));
    }
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    ended(child)
}

/// Status, attempt and error of each execution in the records.
fn executions(dir: &TempDir) -> Vec<(String, i64, Option<String>)> {
    let records = rusqlite::Connection::open(dir.path().join("state/data/gateway.db")).unwrap();
    let mut rows =
        records.prepare("SELECT status, attempt, error FROM executions ORDER BY tool_call_id").unwrap();
    let row = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
    rows.query_map([], row).unwrap().map(Result::unwrap).collect()
}

#[test]
fn json_shows_what_subagents_do_as_it_happens() {
    for mode in ["full", "delta"] {
        let dir = in_mode(mode);
        with_delegations(&dir, &report());
        let (code, records, err) = ran(&mut chat(&dir, &["--subagents", "--json", "please delegate"]));
        assert_eq!((code, &*err), (0, ""), "{mode}");
        for task in ["a", "b", "c"] {
            let id = format!("call_{task}");
            let events: Vec<&Json> =
                custom(&records).into_iter().filter(|event| event["task_id"] == *id).collect();
            let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
            let running = ["task_running"; 5];
            assert_eq!(kinds, [&["task_started"][..], &running, &["task_completed"]].concat(), "{mode}");
            assert_eq!(
                *events[0],
                json!({"type": "task_started", "task_id": id, "description": format!("look at {task}"), "model_name": "m"})
            );
            let indexes: Vec<i64> =
                events[1..6].iter().map(|event| event["message_index"].as_i64().unwrap()).collect();
            assert_eq!(indexes, [1, 2, 3, 4, 5]);
            let usage = json!({"input_tokens": 18, "output_tokens": 3, "total_tokens": 21});
            assert_eq!(
                *events[6],
                json!({"type": "task_completed", "task_id": id, "result": format!("Report on {task}."), "usage": usage,
                    "model_name": "m"})
            );
        }
        let usage = json!({"input_tokens": 84, "output_tokens": 14, "total_tokens": 98});
        assert_eq!(*records.last().unwrap(), json!({"type": "end", "data": {"usage": usage}}), "{mode}");
        let done = ("completed".to_owned(), 1, None);
        assert_eq!(executions(&dir), [done.clone(), done.clone(), done], "{mode}");
        let (_, records, _) = ran(&mut chat(&dir, &["--continue", "--json", "more"]));
        assert_eq!(texts(&records).last(), Some(&"You said: more"), "its threads are not among the user's");
    }
}

#[test]
fn nothing_is_delegated_unless_the_user_wants_it_and_limits_hold() {
    let dir = in_mode("full");
    let record = with_delegations(&dir, &report());
    let (code, records, _) = ran(&mut chat(&dir, &["--json", "please delegate"]));
    assert_eq!((code, texts(&records)), (0, vec!["please delegate", "You said: please delegate"]));
    assert!(!dir.path().join("state/data/gateway.db").exists(), "no records are needed");
    for (limit, started) in [("--max-concurrent-subagents", 2), ("--max-total-subagents", 1)] {
        std::fs::remove_file(&record).unwrap();
        let number = started.to_string();
        let arguments = ["--subagents", limit, &number, "--json", "please delegate"];
        let (code, records, _) = ran(&mut chat(&dir, &arguments));
        let begun = custom(&records).into_iter().filter(|event| event["type"] == "task_started").count();
        assert_eq!((code, begun), (0, started), "{limit}");
    }
}

#[test]
fn a_chat_that_was_killed_or_ended_goes_on_with_its_subagents() {
    for (mode, signal, code, asked) in [
        ("full", "-9", -1, 2),
        ("delta", "-9", -1, 5),
        ("full", "-TERM", 143, 6),
        ("delta", "-HUP", 143, 4),
        ("delta", "-9", -1, 9),
    ] {
        let case = format!("{mode} {signal} {asked}");
        let dir = in_mode(mode);
        // However late the signal is, the turn has not ended.
        let record = with_last_answers(&dir, &report(), &never());
        let (ended, _, err) = stopped(&dir, &record, asked, signal);
        assert_eq!(ended, code, "{case}: {err}");
        with_delegations(&dir, &report());
        let (code, records, err) = ran(&mut chat(&dir, &["--continue", "--json"]));
        assert_eq!((code, &*err), (0, ""), "{case}");
        let texts = texts(&records);
        let results: Vec<&str> = texts.iter().copied().filter(|text| text.starts_with("Task ")).collect();
        assert_eq!(
            results,
            ["a", "b", "c"].map(|task| format!("Task Succeeded. Result: Report on {task}.")),
            "{case}"
        );
        assert_eq!(texts.last(), Some(&"All three are done."), "{case}");
        let mut repeated = BTreeMap::<_, usize>::new();
        for ((caller, question, answered), count) in requests(&record) {
            assert!(count <= 2, "{case}: {caller} {question} {answered}: {count}");
            *repeated.entry((caller, question)).or_default() += count - 1;
        }
        assert!(repeated.values().all(|count| *count <= 1), "{case}: {repeated:?}");
        let done = ("completed".to_owned(), 1, None);
        assert_eq!(executions(&dir), [done.clone(), done.clone(), done], "{case}");

        let (code, _, err) = ran(&mut chat(&dir, &["--continue", "--json"]));
        assert!(code == 1 && err.contains("has nothing to go on with"), "{case}: {err}");
    }
}

#[test]
fn ctrl_c_cancels_subagents_and_counts_what_they_used() {
    let dir = in_mode("full");
    let record = with_delegations(&dir, &never());
    // Every subagent has two answers, and waits for the third.
    let (code, records, err) = stopped(&dir, &record, 10, "-INT");
    assert_eq!((code, &*err), (130, ""));
    let cancelled = custom(&records).into_iter().filter(|event| event["type"] == "task_cancelled");
    let usage = json!({"input_tokens": 11, "output_tokens": 2, "total_tokens": 13});
    let all: Vec<&Json> = cancelled.inspect(|event| assert_eq!(event["usage"], usage)).collect();
    assert_eq!(all.len(), 3, "{records:?}");
    let usage = json!({"input_tokens": 43, "output_tokens": 8, "total_tokens": 51});
    assert_eq!(*records.last().unwrap(), json!({"type": "end", "data": {"usage": usage}}));
    let left = ("cancelled".to_owned(), 1, Some("Cancelled by user".to_owned()));
    assert_eq!(executions(&dir), [left.clone(), left.clone(), left]);

    let (code, records, _) = ran(&mut chat(&dir, &["--continue", "--json"]));
    let texts = texts(&records);
    assert_eq!((code, texts.last()), (0, Some(&"All three are done.")));
    let results = texts.iter().filter(|text| text.starts_with("Task cancelled by user."));
    assert_eq!(results.count(), 3, "{texts:?}");
    let usage = json!({"input_tokens": 20, "output_tokens": 3, "total_tokens": 23});
    assert_eq!(records.last().unwrap()["data"]["usage"], usage, "what they used was counted once");
}

#[test]
fn a_new_question_turns_away_from_what_was_left() {
    let dir = in_mode("delta");
    let record = with_delegations(&dir, &never());
    stopped(&dir, &record, 10, "-9");
    let (code, records, err) = ran(&mut chat(&dir, &["--continue", "--json", "something else"]));
    assert_eq!((code, &*err), (0, ""));
    assert_eq!(texts(&records).last(), Some(&"You said: something else"));
    let usage = json!({"input_tokens": 33, "output_tokens": 6, "total_tokens": 39});
    assert_eq!(records.last().unwrap()["data"]["usage"], usage, "nobody else counts what was left");
    let told = "The run that delegated it ended, and the conversation went on without it".to_owned();
    let left = ("cancelled".to_owned(), 1, Some(told));
    assert_eq!(executions(&dir), [left.clone(), left.clone(), left]);
}

/// Scenario 78: hooks that are commands, of the lead agent's turn and of its subagents.
#[test]
fn s78_commands_are_run_at_the_start_and_the_stop_of_every_task() {
    let dir = in_mode("full");
    with_delegations(&dir, &report());
    let config = dir.path().join("config.yaml");
    let mut text: Json = serde_json::from_str(&std::fs::read_to_string(&config).unwrap()).unwrap();
    text["subagent_runtime"] = json!({"hooks": [
        {"command": ["sh", "-c", "cat >> $LOG"], "environment": {"LOG": dir.path().join("log").display().to_string()}},
        {"command": ["false"], "events": ["stop"]},
    ]});
    std::fs::write(&config, text.to_string()).unwrap();
    let (code, records, _) = ran(&mut chat(&dir, &["--subagents", "--json", "please delegate"]));
    assert_eq!((code, texts(&records).last()), (0, Some(&"All three are done.")));
    let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
    let log: Vec<Json> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of =
        |event: &str, kind: &str| log.iter().filter(|it| it["event"] == event && it["kind"] == kind).count();
    assert_eq!([of("start", "lead"), of("start", "subagent")], [1, 3]);
    assert_eq!([of("stop", "lead"), of("stop", "subagent")], [1, 3]);
    let (first, last) = (&log[0], &log[7]);
    assert_eq!((&first["kind"], &first["parent_task_id"]), (&json!("lead"), &Json::Null));
    assert_eq!((&last["kind"], &last["outcome"]), (&json!("lead"), &json!("completed")));
    assert!(log[1..7].iter().all(|it| it["parent_task_id"] == first["task_id"]), "{log:?}");
}

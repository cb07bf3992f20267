//! `threadkeep chat` without a terminal: what it prints, and how it ends.

use std::io::Write as _;
use std::process::{Command, Stdio};

use rusqlite::{Connection, OpenFlags};
use serde_json::{Value as Json, json};
use tempfile::TempDir;
use threadkeep_records::{CheckpointForm, DATABASE_FILE, Records, RecordsOptions};
use threadkeep_sqlite::{Options, SqliteSaver};

const MISMATCH: &str =
    "Thread requires delta mode; materialize and convert its checkpoints before using full mode.";

pub(crate) fn in_mode(mode: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    let script = json!({"chunk_chars": 13, "rules": [
        {"when": {"contains": ["one word"]}, "answers": [{"text": "All-together."}]},
        {"when": {"contains": ["hang"]}, "answers": [{"text": "never", "gate": {"name": "shut"}}]},
        {"when": {"contains": ["fail"]}, "answers": [{"error": {"kind": "fatal", "message": "no such model"}}]},
        {"when": {"contains": ["loop"]}, "repeat_last": true, "answers": [{"tool_calls": [{"name": "ls"}]}]},
        {"when": {"contains": ["ask me"]}, "answers": [
            {"text": "I have to know.", "tool_calls": [{"name": "ask_clarification",
                "args": {"question": "Which one?", "options": ["red", "blue"]}}]}]},
        {"when": {"contains": ["only a question"]}, "answers": [
            {"tool_calls": [{"name": "ask_clarification", "args": {"question": "Why?"}}]}]},
        {"when": {"contains": ["look"]}, "answers": [
            {"text": "Wait.", "tool_calls": [{"name": "ls", "id": "c"}]}, {"text": "Nothing here."}]},
        {"answers": [{"text": "You said: {{input}}", "usage": {"input_tokens": 3, "output_tokens": 4}}]},
    ]});
    std::fs::write(dir.path().join("script.json"), script.to_string()).unwrap();
    configure(&dir, mode);
    dir
}

pub(crate) fn configure(dir: &TempDir, mode: &str) {
    let config = json!({
        "config_version": 49,
        "database": {"backend": "sqlite", "checkpoint_channel_mode": mode},
        "models": [{"name": "m", "use": "scripted", "model": "m", "script": "script.json"}],
    });
    std::fs::write(dir.path().join("config.yaml"), config.to_string()).unwrap();
}

pub(crate) fn chat(dir: &TempDir, arguments: &[&str]) -> Command {
    let mut command = super::command(dir.path(), &[&["chat"], arguments].concat());
    // Without it the directory would have to be trusted.
    command.env("SVC_CONFIG_PATH", dir.path().join("config.yaml")).stdin(Stdio::null());
    command
}

/// Exit code, stdout, stderr.
fn ran(command: &mut Command) -> (i32, String, String) {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn said(code: i32, stdout: &str, stderr: &str) -> (i32, String, String) {
    (code, stdout.to_owned(), stderr.to_owned())
}

fn records(stdout: &str) -> Vec<Json> {
    stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn types(records: &[Json]) -> Vec<&str> {
    records.iter().map(|record| record["type"].as_str().unwrap()).collect()
}

#[test]
fn print_answers_on_stdout_and_fails_on_stderr() {
    let dir = in_mode("full");
    assert_eq!(ran(&mut chat(&dir, &["--print", "hi"])), said(0, "You said: hi\n", ""));
    assert_eq!(ran(&mut chat(&dir, &["hi"])), said(0, "You said: hi\n", ""), "there is no terminal");
    assert_eq!(ran(&mut chat(&dir, &["--print", "look"])), said(0, "Nothing here.\n", ""), "the last answer");
    let asked = "I have to know.\nWhich one?\n1. red\n2. blue\n";
    assert_eq!(ran(&mut chat(&dir, &["--print", "ask me"])), said(0, asked, ""), "a question ends the turn");
    assert_eq!(ran(&mut chat(&dir, &["--print", "only a question"])), said(0, "Why?\n", ""));
    let limit = ["--print", "loop", "--recursion-limit", "3"];
    let told = "Error: Recursion limit of 3 reached without hitting a stop condition.\n";
    assert_eq!(ran(&mut chat(&dir, &limit)), said(1, "", told));
    let (code, out, err) = ran(&mut chat(&dir, &["--print", "hi", "--config", "gone.yaml"]));
    assert!(code == 1 && out.is_empty() && err.starts_with("Error: ") && err.contains("gone.yaml"), "{err}");
}

#[test]
fn a_model_that_fails_is_told_in_its_answer_and_on_stderr() {
    let dir = in_mode("full");
    let (code, out, err) = ran(&mut chat(&dir, &["--print", "fail"]));
    assert_eq!(code, 1);
    assert!(!out.trim().is_empty() && !out.contains("Error:"), "{out}");
    let told = err.strip_prefix("Error: LLM request failed (error_type=").unwrap();
    assert!(
        told.contains(", error_reason=") && told.ends_with(")\n") && told.contains("no such model"),
        "{err}"
    );
    let (code, out, err) = ran(&mut chat(&dir, &["--json", "fail"]));
    let records = records(&out);
    assert_eq!((code, records.last().unwrap()["type"].as_str()), (1, Some("error")));
    assert_eq!(err, format!("Error: {}\n", records.last().unwrap()["data"]["message"].as_str().unwrap()));
}

#[test]
fn json_prints_each_event_and_a_failure_as_the_last_one() {
    let dir = in_mode("delta");
    let (code, out, err) = ran(&mut chat(&dir, &["--json", "look"]));
    assert_eq!((code, &*err), (0, ""));
    let events = records(&out);
    let messages = "messages-tuple";
    let order = ["values", messages, messages, "values", messages, "values", messages, "values", "end"];
    assert_eq!(types(&events), order, "{out}");
    assert_eq!(events[1]["data"]["content"], "Wait.");
    assert_eq!(events[2]["data"]["tool_calls"][0], json!({"name": "ls", "args": {}, "id": "c"}));
    assert_eq!(
        (&events[4]["data"]["type"], &events[4]["data"]["tool_call_id"]),
        (&json!("tool"), &json!("c"))
    );
    let (_, out, _) = ran(&mut chat(&dir, &["--json", "hi"]));
    let end = json!({"usage": {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}});
    assert_eq!(records(&out).last().unwrap()["data"], end);

    let (code, out, err) = ran(&mut chat(&dir, &["--json", "loop", "--recursion-limit", "2"]));
    let message = "Recursion limit of 2 reached without hitting a stop condition.";
    assert_eq!((code, err), (1, format!("Error: {message}\n")));
    let events = records(&out);
    assert_eq!(events.last().unwrap(), &json!({"type": "error", "data": {"message": message}}));
    assert!(!types(&events).contains(&"end"));
}

#[test]
fn a_thread_that_needs_delta_mode_is_refused_in_full_mode() {
    let dir = in_mode("delta");
    assert_eq!(ran(&mut chat(&dir, &["--print", "hi"])).0, 0);
    configure(&dir, "full");
    let error = format!("Error: {MISMATCH}\n");
    assert_eq!(ran(&mut chat(&dir, &["--continue", "--print", "more"])), said(1, "", &error));
    let record = json!({"type": "error", "data": {"message": MISMATCH}});
    let (code, out, err) = ran(&mut chat(&dir, &["--continue", "--json", "more"]));
    assert_eq!((code, records(&out), err), (1, vec![record], error));
    assert_eq!(ran(&mut chat(&dir, &["--print", "a new one"])), said(0, "You said: a new one\n", ""));
}

#[test]
fn the_message_comes_from_stdin_if_there_is_no_argument() {
    let dir = in_mode("full");
    for arguments in [&["--print"][..], &["--cli"], &[]] {
        let mut child = chat(&dir, arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all("grüße\n".as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "You said: grüße\n", "{arguments:?}");
    }
    let dir = in_mode("full");
    for arguments in [&["--print"][..], &["--json"], &["--print", " "], &["--cli"], &[]] {
        assert_eq!(ran(&mut chat(&dir, arguments)), said(2, "", "No message provided.\n"), "{arguments:?}");
    }
    assert!(!dir.path().join("state").exists(), "nothing was opened");
}

#[test]
fn a_wrong_command_line_ends_with_2() {
    let dir = in_mode("full");
    for wrong in [
        &["--print", "x", "--recursion-limit", "0"][..],
        &["--print", "x", "--json", "y"],
        &["one", "--print", "two"],
        &["--tui", "--recursion-limit", "5"],
        &["--continue", "--resume", "t"],
    ] {
        let (code, out, err) = ran(&mut chat(&dir, wrong));
        assert!(code == 2 && out.is_empty() && !err.is_empty(), "{wrong:?}: {code} {out} {err}");
    }
    let (code, out, err) = ran(&mut chat(&dir, &["--tui"]));
    assert!(code == 1 && out.is_empty() && err.starts_with("Error: ") && err.contains("terminal"), "{err}");
    let (code, help, _) = ran(&mut chat(&dir, &["--help"]));
    assert!(code == 0 && help.contains("Exit codes:") && help.contains("SVC_TUI=1"), "{help}");
}

#[test]
fn a_reader_that_goes_away_ends_it_quietly() {
    let dir = in_mode("full");
    for arguments in [["--print", "hi"], ["--json", "hi"], ["--print", "fail"], ["--json", "fail"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = chat(&dir, &arguments).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), &*err), (Some(1), ""), "{arguments:?}");
    }
}

#[test]
fn a_thread_is_gone_on_with_by_its_place_its_id_or_its_title() {
    let dir = in_mode("full");
    let (code, _, err) = ran(&mut chat(&dir, &["--continue", "--print", "x"]));
    assert_eq!((code, &*err), (1, "Error: there is no thread to continue\n"));
    for first in ["alpha", "beta"] {
        ran(&mut chat(&dir, &["--print", first]));
    }
    let asked = |arguments: &[&str]| {
        let (code, out, err) = ran(&mut chat(&dir, &[arguments, &["--json", "more"]].concat()));
        assert_eq!((code, &*err), (0, ""));
        let values = records(&out).into_iter().rfind(|record| record["type"] == "values").unwrap();
        let messages = values["data"]["messages"].as_array().unwrap().clone();
        (messages.len(), messages[0]["content"].as_str().unwrap().to_owned())
    };
    assert_eq!(asked(&["--continue"]), (4, "beta".to_owned()));
    assert_eq!(asked(&["--resume", "alpha"]), (4, "alpha".to_owned()));
    assert_eq!(asked(&["--continue"]), (6, "alpha".to_owned()), "it is the newest now");
    let (code, _, err) = ran(&mut chat(&dir, &["--resume", "gamma", "--print", "x"]));
    assert!(code == 1 && err.contains("'gamma'"), "{err}");
}

#[tokio::test]
async fn a_damaged_thread_keeps_no_other_one_from_being_found() {
    let dir = in_mode("full");
    ran(&mut chat(&dir, &["--print", "alpha"]));
    let path = dir.path().join("state/data/checkpoints.db");
    // This also registers the VFS of the file.
    SqliteSaver::open_async(&path, Options::default()).await.unwrap().close().await;
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE;
    let store = Connection::open_with_flags_and_vfs(&path, flags, c"threadkeep-pages").unwrap();
    assert_ne!(store.execute("UPDATE checkpoint SET body = x'1000'", []).unwrap(), 0);
    drop(store);
    let (code, _, err) = ran(&mut chat(&dir, &["--resume", "beta", "--print", "x"]));
    assert!(code == 1 && !err.contains("'beta'"), "every thread is damaged: {err}");

    ran(&mut chat(&dir, &["--print", "beta"]));
    assert_eq!(ran(&mut chat(&dir, &["--resume", "beta", "--print", "x"])), said(0, "You said: x\n", ""));
    let (code, _, err) = ran(&mut chat(&dir, &["--resume", "gamma", "--print", "x"]));
    assert!(code == 1 && err.contains("'gamma'; cannot read "), "{err}");
    let (code, _, err) = ran(&mut chat(&dir, &["--continue", "--print", "x"]));
    assert!(code == 1 && err.contains("cannot read ") && err.contains("--resume"), "{err}");
    let id = err.split_once("cannot read ").unwrap().1.split(':').next().unwrap();
    let (code, _, err) = ran(&mut chat(&dir, &["--resume", id, "--print", "x"]));
    assert!(code == 1 && err.contains("corrupt"), "{err}");
}

/// A checkout whose files would run a program, and read and send a secret.
#[test]
fn a_directory_that_nobody_trusted_decides_nothing() {
    let home = TempDir::new().unwrap();
    let dir = in_mode("full");
    std::fs::write(dir.path().join(".env"), "SVC_HOME=stolen\n").unwrap();
    let command = |arguments: &[&str]| {
        let mut command = super::command(dir.path(), arguments);
        command.env("HOME", home.path()).env_remove("XDG_CONFIG_HOME").env_remove("XDG_STATE_HOME");
        command.env_remove("SVC_HOME").stdin(Stdio::null());
        command
    };
    let chat = || command(&["chat", "--print", "hi"]);
    let (code, out, err) = ran(&mut chat());
    assert_eq!((code, err.lines().count()), (0, 1), "{err}");
    assert!(err.starts_with("Note: config.yaml, .env of this directory are not used"), "{err}");
    assert!(err.contains("threadkeep config trust"), "{err}");
    assert!(!out.contains("You said: hi") && !out.is_empty(), "the demo model answers: {out}");
    assert!(home.path().join(".local/state/threadkeep").exists());
    assert!(!dir.path().join("stolen").exists() && !dir.path().join(".svc").exists());

    let (code, out, err) = ran(&mut command(&["config", "trust"]));
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.contains("is trusted, as it is now: .env, config.yaml."), "{out}");
    assert_eq!(ran(&mut chat()), said(0, "You said: hi\n", ""));
    assert!(dir.path().join("stolen").exists(), "the .env is read");

    configure(&dir, "delta");
    let (code, out, err) = ran(&mut chat());
    assert!(
        code == 0 && !out.contains("You said: hi") && err.contains("not used"),
        "it was edited: {out}{err}"
    );
    assert_eq!(ran(&mut command(&["config", "trust", "--forget"])).0, 0);
}

#[tokio::test]
async fn a_chat_in_another_form_than_the_database_says_so_at_each_start() {
    let dir = in_mode("delta");
    let file = dir.path().join("state/data").join(DATABASE_FILE);
    let records = Records::open(&file, RecordsOptions::default()).await.unwrap();
    let form = CheckpointForm { mode: "full".to_owned(), frequency: 3 };
    assert_eq!(records.agree_on_form(&form).await.unwrap(), None);
    records.close().await;
    for _ in 0..2 {
        let (code, out, err) = ran(&mut chat(&dir, &["--print", "hi"]));
        assert_eq!((code, out.as_str(), err.lines().count()), (0, "You said: hi\n", 1), "{err}");
        assert!(err.starts_with("Note: the threads of this database are stored in full mode"), "{err}");
        assert!(err.contains("of this database is 3, and that of this process is 10"), "{err}");
        assert!(err.contains("'threadkeep convert --all --to delta --frequency 10'"), "{err}");
    }
}

/// Nobody can cancel a thread that blocks, as here on the script of the model.
#[cfg(unix)]
#[test]
fn a_second_signal_ends_a_chat_whatever_it_waits_for() {
    use std::time::{Duration, Instant};

    use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat, open};
    use rustix::process::{Pid, Signal, kill_process};

    let dir = in_mode("full");
    let script = dir.path().join("script.json");
    std::fs::remove_file(&script).unwrap();
    mknodat(CWD, &script, FileType::Fifo, 0o600.into(), 0).unwrap();
    let mut command = chat(&dir, &["--print", "hi"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let until = Instant::now() + Duration::from_mins(5);
    let pause = || std::thread::sleep(Duration::from_millis(5));
    // It can be opened once somebody reads it.
    let _unwritten = loop {
        match open(&script, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()) {
            Ok(pipe) => break pipe,
            Err(error) => assert!(Instant::now() < until, "it does not read the script: {error}"),
        }
        pause();
    };
    for signal in [Signal::INT, Signal::TERM] {
        kill_process(Pid::from_child(&child), signal).unwrap();
    }
    while child.try_wait().unwrap().is_none() {
        if Instant::now() >= until {
            child.kill().unwrap();
            panic!("it goes on after two signals");
        }
        pause();
    }
}

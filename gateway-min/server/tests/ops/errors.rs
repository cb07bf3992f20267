//! Errors name the remedy, and exit codes tell the kinds apart.

use std::process::Stdio;

use serde_json::json;
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::CheckpointId;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{Rewrite, Saver as _};

use threadkeep_records::{Records, RecordsOptions};

use super::store::{OTHER, Store, TALK, command, threadkeep};

#[tokio::test]
async fn what_is_not_there_is_named_with_what_is() {
    let store = Store::new(ChannelMode::Full).await;
    let said = store.run(&["threads", "show", "tlak"]);
    assert_eq!((said.code, said.out.as_str()), (1, ""));
    assert_eq!(said.err, "error: there is no thread tlak in DB; the nearest id is talk\n");
    let said = store.run(&["threads", "show", "something-else"]);
    assert_eq!(
        said.err,
        "error: there is no thread something-else in DB; `threadkeep threads list --sqlite DB` shows its threads\n",
        "what is not alike is not suggested"
    );
    let nobody = CheckpointId::from_bytes([7; 16]).to_string();
    let said = store.run(&["state", "get", "--thread", TALK, "--checkpoint", &nobody]);
    assert_eq!(said.code, 1);
    assert!(
        said.err.contains(&nobody) && said.err.contains("checkpoints list --thread talk --sqlite DB`"),
        "{}",
        said.err
    );
    let mut alike = store.image(TALK).await.checkpoints.keys().next().unwrap().1.to_string();
    alike.replace_range(35.., if alike.ends_with('0') { "1" } else { "0" });
    let said = store.run(&["state", "get", "--thread", TALK, "--checkpoint", &alike]);
    assert!(said.err.contains("the nearest id is 018bcfe5"), "{}", said.err);
    let said = store.run(&["state", "get", "--thread", TALK, "--namespace", "outer"]);
    assert!(said.code == 1 && said.err.contains("threads show talk --sqlite DB`"), "{}", said.err);
    let said = store.run(&["prune", "plan", "--thread", TALK, "--keep", "latest", "--protect", &nobody]);
    assert!(said.err.contains("checkpoints list --thread talk --sqlite DB`"), "{}", said.err);
    for args in [
        &["prune", "plan", "--thread", "tlak", "--keep", "latest"][..],
        &["convert", "--thread", "tlak", "--to", "full"],
    ] {
        let said = store.run(args);
        assert!(said.code == 1 && said.err.contains("the nearest id is talk"), "{}", said.err);
    }
}

#[test]
fn a_store_that_is_not_there_is_not_created() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoints.db").display().to_string();
    let said = threadkeep(&["threads", "list", "--sqlite", &path]);
    assert_eq!(said.code, 1);
    assert!(said.err.contains(&path) && said.err.contains("--config"), "{}", said.err);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing was made");
    let said = threadkeep(&["threads", "list", "--postgres", "postgres://user:hidden@127.0.0.1:1/db"]);
    assert!(said.code == 1 && said.err.contains("postgres") && !said.err.contains("hidden"), "{}", said.err);
    std::fs::write(&path, "no database").unwrap();
    let said = threadkeep(&["threads", "list", "--sqlite", &path]);
    assert!(said.code == 1 && said.err.contains(&path), "{}", said.err);
}

#[tokio::test]
async fn the_store_of_a_configuration_is_used() {
    let store = Store::new(ChannelMode::Delta).await;
    let config = store.file("config.yaml");
    let directory = store.path().parent().unwrap().display().to_string();
    let write = |backend: &str| {
        let database =
            json!({"backend": backend, "sqlite_dir": directory, "checkpoint_channel_mode": "delta"});
        std::fs::write(&config, json!({"config_version": 49, "database": database}).to_string()).unwrap();
    };
    write("sqlite");
    let threads = threadkeep(&["threads", "list", "--json", "--config", &config]).json();
    assert_eq!(threads.len(), 2);
    write("memory");
    let said = threadkeep(&["threads", "list", "--config", &config]);
    assert!(said.code == 1 && said.err.contains("memory"), "{}", said.err);
    let nowhere = json!({"backend": "sqlite", "sqlite_dir": store.file("nowhere")});
    std::fs::write(&config, json!({"config_version": 49, "database": nowhere}).to_string()).unwrap();
    let said = threadkeep(&["threads", "list", "--config", &config]);
    let setup = format!("`threadkeep setup --config {config}` creates the configured one");
    assert!(said.code == 1 && said.err.contains(&setup), "{}", said.err);
}

#[tokio::test]
async fn wrong_command_lines_have_a_code_of_their_own() {
    let store = Store::new(ChannelMode::Full).await;
    for args in [
        &["prune", "plan", "--thread", TALK][..],
        &["threads", "list", "--limit", "0"],
        &["checkpoints", "list", "--thread", TALK, "--limit", "0"],
        &["prune", "plan", "--thread", TALK, "--keep", "soon"],
        &["prune", "plan", "--keep", "latest"],
        &["prune", "plan", "--thread", TALK, "--all", "--keep", "latest"],
        &["verify", "--all", "--yes"],
        &["state", "get", "--thread", TALK, "--checkpoint", "no-id"],
        &["convert", "--all", "--to", "delta", "--frequency", "0"],
        &["nothing"],
    ] {
        let said = store.run(args);
        assert_eq!((said.code, said.out.as_str()), (2, ""), "{args:?}: {}", said.err);
    }
    let said = store.run(&["retention", "plan", "--thread", TALK, "--max-delete-per-run", "-1"]);
    assert_eq!((said.code, said.err.as_str()), (1, "error: max_delete_per_run must be >= 0, got -1\n"));
    let all = store.run(&["retention", "plan", "--all", "--max-delete-per-run", "-1"]);
    assert_eq!((all.code, all.err), (1, said.err), "it is not said of each thread");
    let help = threadkeep(&["retention", "apply", "--help"]).done();
    assert!(help.contains("Maximum checkpoints deleted per pass, newest first"), "{help}");
}

#[test]
fn every_command_teaches_with_an_example() {
    let overview = threadkeep(&["--help"]).done();
    for code in ["0  success", "1  an error", "2  an invalid", "3  verify", "4  nothing was changed"] {
        assert!(overview.contains(code), "{overview}");
    }
    for command in [
        "threads list",
        "threads show",
        "threads du",
        "checkpoints list",
        "checkpoints show",
        "checkpoints diff",
        "state get",
        "retention plan",
        "retention apply",
        "prune plan",
        "prune apply",
        "convert",
        "verify",
        "export",
        "import",
        "backup",
        "vacuum",
        "setup",
    ] {
        let words: Vec<&str> = command.split(' ').chain(["--help"]).collect();
        let help = threadkeep(&words).done();
        assert!(help.contains(&format!("  threadkeep {command}")), "{command}: {help}");
    }
}

#[tokio::test]
async fn the_records_are_not_taken_for_a_database_of_another_program() {
    let store = Store::new(ChannelMode::Full).await;
    let path = store.path().with_file_name("gateway.db");
    Records::open(&path, RecordsOptions::default()).await.unwrap().close().await;
    let said = threadkeep(&["threads", "list", "--sqlite", &path.display().to_string()]);
    assert_eq!(said.code, 1);
    assert!(said.err.contains("gateway's records") && said.err.contains("checkpoints.db"), "{}", said.err);
}

/// Runs the binary as a user who may write nothing.
#[cfg(unix)]
fn as_nobody(args: &[&str]) -> (i32, String, String) {
    use std::os::unix::process::CommandExt as _;
    let mut command = command(args);
    if rustix::process::geteuid().is_root() {
        command.uid(65_534).gid(65_534);
    }
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[cfg(unix)]
#[tokio::test]
async fn a_database_that_cannot_be_written_is_read_and_a_change_is_refused() {
    use std::os::unix::fs::PermissionsExt as _;
    let store = Store::new(ChannelMode::Delta).await;
    let path = store.path();
    let set = |mode_of_file, mode_of_directory| {
        let set = |path: &std::path::Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        set(&path, mode_of_file);
        set(path.parent().unwrap(), mode_of_directory);
    };
    let path_text = path.display().to_string();
    set(0o444, 0o555);
    for args in [
        &["threads", "list"][..],
        &["threads", "show", TALK],
        &["checkpoints", "list", "--thread", TALK],
        &["state", "get", "--thread", TALK],
        &["export", "--thread", TALK],
        &["verify", "--all"],
    ] {
        let (code, out, err) = as_nobody(&[args, &["--sqlite", &path_text]].concat());
        assert!(code == 0 && !out.is_empty(), "{args:?}: {err}");
    }
    let prune = ["prune", "apply", "--all", "--keep", "latest", "--yes", "--sqlite", &path_text];
    let (code, _, err) = as_nobody(&prune);
    assert_eq!(code, 1);
    assert!(
        err.contains("cannot be written, so nothing was changed") && err.contains("permissions"),
        "{err}"
    );
    assert!(!err.contains('\u{1b}'), "no colours in a log that is not on a terminal: {err}");
    set(0o644, 0o755);
}

/// What is on a disk that became read-only is to be saved on another one.
#[cfg(unix)]
#[tokio::test]
async fn a_store_that_cannot_be_written_is_backed_up_elsewhere() {
    use std::os::unix::fs::PermissionsExt as _;
    let store = Store::new(ChannelMode::Delta).await;
    let path = store.path();
    let records = path.with_file_name("gateway.db");
    Records::open(&records, RecordsOptions::default()).await.unwrap().close().await;
    let elsewhere = tempfile::tempdir().unwrap();
    let set = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    set(&path, 0o444);
    set(&records, 0o444);
    set(path.parent().unwrap(), 0o555);
    set(elsewhere.path(), 0o777);
    let out = elsewhere.path().join("b.db").display().to_string();
    let (code, _, err) = as_nobody(&["backup", "--out", &out, "--sqlite", &path.display().to_string()]);
    set(path.parent().unwrap(), 0o755);
    assert_eq!(code, 0, "{err}");
    assert!(elsewhere.path().join("b.gateway.db").exists());
    let (code, out, err) = as_nobody(&["verify", "--all", "--sqlite", &out]);
    assert!(code == 0 && out.contains("2 threads: no violations"), "{out}{err}");
}

/// A reader that leaves needs no more lines, but the exit code still says what was found.
#[tokio::test]
async fn a_reader_that_leaves_does_not_make_a_result_a_good_one() {
    let store = Store::new(ChannelMode::Delta).await;
    let saver = store.open().await;
    let image = saver.read_thread(&TALK.into()).await.unwrap();
    let unmarked = |tuple: &CheckpointTuple| {
        let mut tuple = tuple.clone();
        tuple.metadata.delta_marker = false;
        tuple
    };
    let marked = image.checkpoints.values().filter(|tuple| tuple.metadata.delta_marker);
    let rewrite = Rewrite { put: marked.map(unmarked).collect(), ..Rewrite::default() };
    saver.rewrite_thread(&TALK.into(), &image.revision, rewrite).await.unwrap();
    saver.close().await;
    let path = store.path().display().to_string();
    let gone = |args: &[&str]| {
        // Nobody reads from the first line on.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command(&[args, &["--sqlite", &path]].concat())
            .stdin(Stdio::null())
            .stdout(writer)
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for (args, expected) in [
        (&["verify", "--all"][..], Some(3)),
        (&["verify", "--all", "--json"], Some(3)),
        (&["threads", "list"], Some(0)),
        (&["threads", "show", "tlak"], Some(1)),
        // Half a thread is no export.
        (&["export", "--thread", TALK], Some(1)),
        // What was begun is done.
        (&["convert", "--all", "--to", "full", "--json"], Some(0)),
    ] {
        let (code, said) = gone(args);
        assert_eq!(code, expected, "{args:?}: {said}");
        assert!(!said.contains("panicked"), "{args:?}: {said}");
    }
    for thread in [TALK, OTHER] {
        let image = store.image(thread).await;
        assert!(image.checkpoints.values().all(|tuple| !tuple.metadata.is_delta()), "{thread}");
    }
}

/// The key is shown once. One that nobody got is an error.
#[test]
fn a_key_that_nobody_read_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.yaml");
    std::fs::write(&config, json!({"config_version": 49}).to_string()).unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let create = ["keys", "create", "--user", "ann", "--config", &config.display().to_string()];
    let output = command(&create)
        .env("SVC_HOME", dir.path().join("state"))
        .stdin(Stdio::null())
        .stdout(writer)
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("cannot write the output"), "{said}");
}

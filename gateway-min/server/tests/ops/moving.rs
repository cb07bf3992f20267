//! Exporting threads to files and importing them.

#[cfg(unix)]
use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Read as _};
#[cfg(unix)]
use std::process::Child;
use std::process::{Command, Stdio};

use threadkeep_ops::archive;
use threadkeep_records::{NewThread, Records, RecordsOptions};

use super::store::{MODES, Store, TALK, command, threadkeep};

#[tokio::test]
async fn an_exported_thread_is_imported_as_it_was() {
    for mode in MODES {
        let (store, elsewhere) = (Store::new(mode).await, Store::new(mode).await);
        let file = store.file("talk.ndjson");
        let said = store.run(&["export", "--thread", TALK, "--out", &file]).done();
        assert!(said.contains("22 checkpoints"), "{said}");
        let piped = store.run(&["export", "--thread", TALK]).done();
        assert_eq!(piped, std::fs::read_to_string(&file).unwrap(), "a file and stdout get the same");

        elsewhere.run(&["import", &file, "--as", "copy"]).done();
        let (image, copy) = (store.image(TALK).await, elsewhere.image("copy").await);
        assert_eq!(image.checkpoints.len(), copy.checkpoints.len());
        for (place, tuple) in &image.checkpoints {
            let mut tuple = tuple.clone();
            tuple.thread = "copy".into();
            assert!(copy.checkpoints[place] == tuple, "{place:?}");
        }
        assert_eq!(elsewhere.states("copy").await, store.states(TALK).await);
        elsewhere.run(&["verify", "--all"]).done();

        let there = elsewhere.run(&["import", &file]);
        assert_eq!(there.code, 1);
        assert!(there.err.contains("already exists") && there.err.contains("--as"), "{}", there.err);
        let there = store.run(&["export", "--thread", TALK, "--out", &file]);
        assert!(there.code == 1 && there.err.contains("another name"), "{}", there.err);
    }
}

#[tokio::test]
async fn a_damaged_file_is_refused_and_nothing_is_written() {
    let store = Store::new(MODES[0]).await;
    let whole = store.run(&["export", "--thread", TALK]).done();
    let lines: Vec<&str> = whole.lines().collect();
    let cut = format!("{}\n", lines[..lines.len() - 1].join("\n"));
    let changed = whole.replacen("and so on", "and so ON", 1);
    let half = &whole[..whole.len() / 2];
    for (name, text, says) in [
        ("cut", cut.as_str(), "without an 'end' line"),
        ("half", half, "without an 'end' line"),
        ("changed", &changed, "line 2: element 0 of messages does not match its hash"),
        ("other", "{\"a\": 1}\n", "not an exported thread"),
    ] {
        let file = store.file(name);
        std::fs::write(&file, text).unwrap();
        let refused = store.run(&["import", &file, "--as", "copy"]);
        assert_eq!((refused.code, refused.out.as_str()), (1, ""), "{name}");
        assert!(refused.err.contains(says), "{}", refused.err);
        assert!(store.image("copy").await.checkpoints.is_empty());
    }
}

#[tokio::test]
async fn the_record_of_the_gateway_travels_with_the_thread() {
    let (store, elsewhere) = (Store::new(MODES[1]).await, Store::new(MODES[1]).await);
    let open = |store: &Store| {
        let path = store.path().with_file_name("gateway.db");
        async move { Records::open(&path, RecordsOptions::default()).await.unwrap() }
    };
    let records = open(&store).await;
    let new = NewThread {
        thread_id: TALK.to_owned(),
        display_name: Some("Tables".to_owned()),
        user_id: Some("ann".to_owned()),
        ..NewThread::default()
    };
    let row = records.threads().create(new).await.unwrap().row;
    records.close().await;
    open(&elsewhere).await.close().await;
    let file = store.file("talk.ndjson");
    store.run(&["export", "--thread", TALK, "--out", &file]).done();
    let archive = archive::read(std::fs::read(&file).unwrap().as_slice()).unwrap();
    assert_eq!(archive.record.unwrap().owner.as_deref(), Some("ann"));

    // Who owns it is not for the file to say.
    let refused = elsewhere.run(&["import", &file, "--as", "copy"]);
    assert!(
        refused.code == 1 && refused.err.contains("--owner") && refused.err.contains("ann"),
        "{}",
        refused.err
    );
    assert!(elsewhere.image("copy").await.checkpoints.is_empty());
    elsewhere.run(&["import", &file, "--as", "copy", "--owner", "bob"]).done();
    elsewhere.run(&["import", &file, "--as", "everybodys", "--no-owner"]).done();
    let records = open(&elsewhere).await;
    for (thread, owner) in [("copy", Some("bob")), ("everybodys", None)] {
        let copy = records.threads().get(thread, None).await.unwrap().unwrap();
        assert_eq!((copy.display_name, copy.user_id.as_deref()), (row.display_name.clone(), owner));
    }
    records.close().await;
}

/// An owner that is not stored would make the thread everybody's once there is a gateway.
#[tokio::test]
async fn an_owner_is_refused_where_there_are_no_records() {
    let store = Store::new(MODES[0]).await;
    let file = store.file("talk.ndjson");
    store.run(&["export", "--thread", TALK, "--out", &file]).done();
    let refused = store.run(&["import", &file, "--as", "copy", "--owner", "bob"]);
    assert!(refused.code == 1 && refused.err.contains("threadkeep setup"), "{refused:?}");
    assert!(store.image("copy").await.checkpoints.is_empty());
    store.run(&["import", &file, "--as", "copy"]).done();
}

#[tokio::test]
async fn a_file_that_names_an_owner_is_refused_where_there_are_no_records() {
    let (store, elsewhere) = (Store::new(MODES[1]).await, Store::new(MODES[1]).await);
    let path = store.path().with_file_name("gateway.db");
    let records = Records::open(&path, RecordsOptions::default()).await.unwrap();
    let owner = Some("ann".to_owned());
    let new = NewThread { thread_id: TALK.to_owned(), user_id: owner, ..NewThread::default() };
    records.threads().create(new).await.unwrap();
    records.close().await;
    let file = store.file("talk.ndjson");
    store.run(&["export", "--thread", TALK, "--out", &file]).done();
    let refused = elsewhere.run(&["import", &file, "--as", "copy"]);
    for says in ["user ann", "threadkeep setup", "--owner", "--no-owner"] {
        assert!(refused.code == 1 && refused.err.contains(says), "{refused:?}");
    }
    assert!(elsewhere.image("copy").await.checkpoints.is_empty());
    elsewhere.run(&["import", &file, "--as", "copy", "--no-owner"]).done();
    assert_eq!(elsewhere.states_in(MODES[1], "copy").await, store.states(TALK).await);
}

/// Who owns a thread is in the records: without them every user would get it.
#[tokio::test]
async fn records_that_cannot_be_read_are_not_taken_for_none() {
    let (store, elsewhere) = (Store::new(MODES[1]).await, Store::new(MODES[1]).await);
    let file = store.file("talk.ndjson");
    store.run(&["export", "--thread", TALK, "--out", &file]).done();
    std::fs::write(elsewhere.path().with_file_name("gateway.db"), "no database").unwrap();
    let out = elsewhere.file("out.ndjson");
    for command in [
        &["import", &file, "--as", "copy"][..],
        &["import", &file, "--as", "copy", "--no-owner"],
        &["export", "--thread", TALK, "--out", &out],
        &["convert", "--all", "--to", "full"],
        &["batches", "list", TALK],
        &["delegations", "tree", TALK],
    ] {
        let refused = elsewhere.run(command);
        assert_eq!(refused.code, 1, "{command:?}: {}", refused.out);
        assert!(refused.err.contains("the gateway's records cannot be read"), "{command:?}: {}", refused.err);
    }
    assert!(elsewhere.image("copy").await.checkpoints.is_empty());
    assert!(!std::path::Path::new(&out).exists());
    assert_eq!(elsewhere.states_in(MODES[1], TALK).await, store.states(TALK).await, "nothing was converted");
    let listed = elsewhere.run(&["threads", "list"]);
    assert!(listed.code == 0 && listed.out.contains(TALK), "{listed:?}");
}

#[tokio::test]
async fn an_import_does_not_take_over_a_record_of_another_owner() {
    let store = Store::new(MODES[0]).await;
    let file = store.file("talk.ndjson");
    store.run(&["export", "--thread", TALK, "--out", &file]).done();
    let path = store.path().with_file_name("gateway.db");
    let records = Records::open(&path, RecordsOptions::default()).await.unwrap();
    let new = NewThread { thread_id: "copy".to_owned(), ..NewThread::default() };
    records.threads().create(new).await.unwrap();
    let refused = store.run(&["import", &file, "--as", "copy", "--owner", "bob"]);
    assert!(refused.code == 1 && refused.err.contains("with another owner"), "{refused:?}");
    assert!(refused.err.contains("--as"), "{}", refused.err);
    assert!(store.image("copy").await.checkpoints.is_empty());
    assert!(records.threads().get("copy", None).await.unwrap().is_some(), "it is not the import's");
    store.run(&["import", &file, "--as", "copy"]).done();
    records.close().await;
}

#[cfg(unix)]
#[tokio::test]
async fn an_export_follows_no_link_and_is_its_owners_alone() {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    let store = Store::new(MODES[0]).await;
    let (file, victim) = (store.file("out.ndjson"), store.file("victim"));
    std::fs::write(&victim, "precious").unwrap();
    symlink(&victim, format!("{file}.part")).unwrap();
    store.run(&["export", "--thread", TALK, "--out", &file]).done();
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let link = store.file("link.ndjson");
    symlink(store.file("nowhere"), &link).unwrap();
    let refused = store.run(&["export", "--thread", TALK, "--out", &link]);
    assert!(refused.code == 1 && refused.err.contains("already exists"), "{}", refused.err);
}

#[tokio::test]
async fn every_thread_is_exported_to_a_directory_and_imported_from_it() {
    let (store, elsewhere) = (Store::new(MODES[0]).await, tempfile::tempdir().unwrap());
    let directory = store.file("exported");
    let said = store.run(&["export", "--all", "--out", &directory]).done();
    assert!(said.contains("exported 2 threads"), "{said}");
    let again = store.run(&["export", "--all", "--out", &directory]).done();
    assert!(
        again.contains("exported 0 threads") && again.contains("the files of 2 threads that were there"),
        "{again}"
    );

    let config = elsewhere.path().join("config.yaml").display().to_string();
    let database = serde_json::json!({"backend": "sqlite", "sqlite_dir": elsewhere.path().join("data")});
    let content = serde_json::json!({"config_version": 49, "database": database});
    std::fs::write(&config, content.to_string()).unwrap();
    let missing = threadkeep(&["import", &directory, "--config", &config]);
    assert!(missing.code == 1 && missing.err.contains("threadkeep setup"), "{}", missing.err);
    for _ in 0..2 {
        let made = threadkeep(&["setup", "--config", &config]).done();
        assert!(made.contains("checkpoints.db: ready.") && made.contains("gateway.db: ready."), "{made}");
    }
    std::fs::write(format!("{directory}/broken.ndjson"), "{}\n").unwrap();
    let said = threadkeep(&["import", &directory, "--config", &config]);
    assert_eq!(said.code, 1, "{}", said.err);
    assert!(said.out.contains("2 threads were imported, with 28 checkpoints."), "{}", said.out);
    assert!(said.err.contains("broken.ndjson") && said.err.contains("1 of 3 files"), "{}", said.err);
    std::fs::remove_file(format!("{directory}/broken.ndjson")).unwrap();
    let again = threadkeep(&["import", &directory, "--config", &config]).done();
    assert!(again.contains("2 threads exist already"), "{again}");
    let listed = threadkeep(&["threads", "list", "--json", "--config", &config]).json();
    assert_eq!(listed.len(), 2);
    assert_eq!(listed[0]["status"], "idle", "the gateway serves it");
}

/// An import of a directory, which waits for this pipe in it until the file is closed.
#[cfg(unix)]
fn waiting_import(store: &Store, directory: &str, pipe: &str) -> (Child, File) {
    let pipe = format!("{directory}/{pipe}");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let path = store.path().display().to_string();
    let child = command(&["import", directory, "--sqlite", &path])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Opening waits until the command has opened it too.
    (child, OpenOptions::new().write(true).open(&pipe).unwrap())
}

/// Ctrl-C ends a pass after the file that it is working on, and the pass prints what it has done.
#[cfg(unix)]
#[tokio::test]
async fn an_interrupted_pass_reports_what_it_did() {
    let (store, other) = (Store::new(MODES[0]).await, Store::new(MODES[1]).await);
    let directory = store.file("exported");
    store.run(&["export", "--all", "--out", &directory]).done();
    other.run(&["prune", "apply", "--all", "--keep", "nothing", "--yes"]).done();
    // It is the second file.
    let (mut child, writer) = waiting_import(&other, &directory, "pipe.ndjson");
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains("stopping after the current step") {
        assert!(errors.read_line(&mut said).unwrap() > 0, "{said}");
    }
    drop(writer);
    errors.read_to_string(&mut said).unwrap();
    let output = child.wait_with_output().unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(out.contains("1 thread was imported"), "{out}");
    // The second one is empty, and was refused.
    assert!(said.contains("interrupted: 2 of 3 files done"), "{said}");
    assert_eq!(other.run(&["threads", "list", "--json"]).json().len(), 1);
}

/// A command that may take long leaves the processors to gateways, with all its threads.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_long_command_gives_way() {
    let nice_of = |stat: &str| {
        // The name of the program, in brackets, may hold spaces.
        let fields = stat.rsplit_once(')').unwrap().1;
        fields.split_whitespace().nth(16).unwrap().parse::<i32>().unwrap()
    };
    let ours = nice_of(&std::fs::read_to_string("/proc/self/stat").unwrap());
    let store = Store::new(MODES[0]).await;
    let directory = store.file("exported");
    store.run(&["export", "--all", "--out", &directory]).done();
    let (mut child, writer) = waiting_import(&store, &directory, "a-pipe.ndjson");
    let threads = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
    // One that ends meanwhile has no file any more.
    let stats =
        threads.filter_map(|thread| std::fs::read_to_string(thread.unwrap().path().join("stat")).ok());
    let nice: Vec<_> = stats.map(|stat| nice_of(&stat)).collect();
    assert!(nice.len() > 1 && nice.iter().all(|nice| *nice == (ours + 5).min(19)), "{nice:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    drop(writer);
}

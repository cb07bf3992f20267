//! Backups of a store that is in use, and their restore as `docs/backup.md` describes it.

use std::io::Read as _;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use threadkeep::mode::ChannelMode;
use threadkeep::saver::Saver as _;
use threadkeep_records::{NewThread, Records, RecordsOptions};
use threadkeep_sqlite::{Options, SqliteSaver};

use super::store::{MODES, OTHER, Store, TALK, command, threadkeep, turn_of};

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_under_writers_is_restored_as_described() {
    for mode in MODES {
        let store = Store::new(mode).await;
        let path = store.path().with_file_name("gateway.db");
        let records = Records::open(&path, RecordsOptions::default()).await.unwrap();
        let thread = NewThread {
            thread_id: TALK.to_owned(),
            display_name: Some("A talk".to_owned()),
            ..NewThread::default()
        };
        records.threads().create(thread).await.unwrap();
        let saver = store.open().await;
        let (stop, noted) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let mut writing = Vec::new();
        for thread in [OTHER, "another"] {
            let (accessor, stop) = (store.accessor(&saver, mode), stop.clone());
            writing.push(tokio::spawn(async move {
                for turn in 100.. {
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                    turn_of(&accessor, thread, turn).await;
                }
            }));
        }
        writing.push(tokio::spawn({
            let (records, stop, noted) = (records.clone(), stop.clone(), noted.clone());
            async move {
                while !stop.load(Ordering::SeqCst) {
                    let thread_id = format!("noted-{}", noted.load(Ordering::SeqCst));
                    let thread = NewThread { thread_id, ..NewThread::default() };
                    records.threads().create(thread).await.unwrap();
                    noted.fetch_add(1, Ordering::SeqCst);
                }
            }
        }));
        for round in 0..5 {
            let file = store.file(&format!("backup-{round}.db"));
            let before = [length(&saver, OTHER).await, length(&saver, "another").await];
            let noted = noted.load(Ordering::SeqCst);
            assert!(writing.iter().all(|writer| !writer.is_finished()), "a writer has failed");
            let said = store.run(&["backup", "--out", &file]).done();
            assert!(said.contains("checkpoints") && said.contains("records"), "{said}");

            let place = tempfile::tempdir().unwrap();
            let (db, gateway) = (place.path().join("checkpoints.db"), place.path().join("gateway.db"));
            std::fs::copy(&file, &db).unwrap();
            std::fs::copy(store.file(&format!("backup-{round}.gateway.db")), &gateway).unwrap();
            let path = db.display().to_string();
            let said = threadkeep(&["verify", "--all", "--sqlite", &path]);
            assert_eq!(said.code, 0, "{}{}", said.out, said.err);
            let shown = threadkeep(&["threads", "list", "--sqlite", &path]).done();
            assert!(shown.contains("A talk"), "{shown}");
            let restored = SqliteSaver::open(&db, &Options::default()).unwrap();
            assert!(length(&restored, OTHER).await >= before[0]);
            assert!(length(&restored, "another").await >= before[1]);
            restored.close().await;
            let restored = Records::open(&gateway, RecordsOptions::default()).await.unwrap();
            if let Some(last) = noted.checked_sub(1) {
                let row = restored.threads().get(&format!("noted-{last}"), None).await.unwrap();
                assert!(row.is_some(), "the newest of {noted} records");
            }
            restored.close().await;
        }
        stop.store(true, Ordering::SeqCst);
        for writer in writing {
            writer.await.unwrap();
        }
        records.close().await;
        saver.close().await;
    }
}

/// How many checkpoints a thread has.
async fn length(saver: &SqliteSaver, thread: &str) -> usize {
    saver.read_thread(&thread.into()).await.unwrap().checkpoints.len()
}

#[tokio::test]
async fn a_backup_replaces_no_file_and_leaves_none_after_an_error() {
    let store = Store::new(MODES[0]).await;
    Records::open(&store.path().with_file_name("gateway.db"), RecordsOptions::default())
        .await
        .unwrap()
        .close()
        .await;
    let file = store.file("backup.db");
    std::fs::write(&file, "mine").unwrap();
    let refused = store.run(&["backup", "--out", &file]);
    assert_eq!(refused.code, 1);
    assert!(refused.err.contains("exists"), "{}", refused.err);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
    assert!(!std::path::Path::new(&store.file("backup.gateway.db")).exists(), "nothing is left");

    std::fs::remove_file(&file).unwrap();
    let said = store.run(&["backup", "--out", &file, "--json"]).json();
    assert_eq!((&said[0]["checkpoints"], &said[0]["database"]), (&file.into(), &"DB".into()));
    assert!(said[0]["records"].as_str().unwrap().ends_with("backup.gateway.db"), "{said:?}");
}

#[tokio::test]
async fn what_is_imported_into_a_backup_is_in_its_own_records() {
    let store = Store::new(MODES[0]).await;
    let live = store.path().with_file_name("gateway.db");
    Records::open(&live, RecordsOptions::default()).await.unwrap().close().await;
    let (file, talk) = (store.file("backup.db"), store.file("talk.ndjson"));
    store.run(&["backup", "--out", &file]).done();
    store.run(&["export", "--thread", TALK, "--out", &talk]).done();
    threadkeep(&["import", &talk, "--as", "copy", "--owner", "bob", "--sqlite", &file]).done();
    let copied = store.path().with_file_name("backup.gateway.db");
    for (records, expected) in [(&live, None), (&copied, Some("bob".to_owned()))] {
        let records = Records::open(records, RecordsOptions::default()).await.unwrap();
        let row = records.threads().get("copy", None).await.unwrap();
        assert_eq!(row.and_then(|row| row.user_id), expected);
        records.close().await;
    }

    // A backup of the backup takes the records of that one along, under whatever name.
    let place = tempfile::tempdir().unwrap();
    let again = place.path().join("checkpoints.db").display().to_string();
    threadkeep(&["backup", "--sqlite", &file, "--out", &again]).done();
    let listed = threadkeep(&["threads", "list", "--json", "--sqlite", &again]).json();
    assert!(listed.iter().any(|thread| thread["owner"] == "bob"), "{listed:?}");
}

/// The gateway that wrote them may still serve them, and would refuse a newer schema.
#[tokio::test]
async fn no_command_upgrades_the_records_of_an_older_gateway() {
    let store = Store::new(MODES[0]).await;
    let path = store.path().with_file_name("gateway.db");
    let (talk, backup) = (store.file("talk.ndjson"), store.file("backup.db"));
    store.run(&["export", "--thread", TALK, "--out", &talk]).done();
    Records::open(&path, RecordsOptions::default()).await.unwrap().close().await;
    let records = rusqlite::Connection::open(&path).unwrap();
    let older =
        "ALTER TABLE runs DROP COLUMN finished_before; DELETE FROM _sqlx_migrations WHERE version = 17";
    records.execute_batch(older).unwrap();
    records.close().unwrap();
    let before = std::fs::read(&path).unwrap();
    let listed = store.run(&["threads", "list"]);
    assert!(listed.code == 0 && listed.out.contains(TALK), "{listed:?}");
    for command in [&["batches", "list", TALK][..], &["import", &talk, "--as", "copy"]] {
        let refused = store.run(command);
        assert!(refused.code == 1 && refused.err.contains("`threadkeep setup`"), "{refused:?}");
    }
    assert_eq!(store.run(&["backup", "--out", &backup]).code, 0);
    let copied = store.path().with_file_name("backup.gateway.db");
    let of_copy = std::fs::read(&copied).unwrap();
    let listed = threadkeep(&["threads", "list", "--sqlite", &backup]);
    assert!(listed.code == 0 && listed.out.contains(TALK), "{listed:?}");
    assert!(std::fs::read(&path).unwrap() == before && std::fs::read(&copied).unwrap() == of_copy);
}

/// The name of a backup need not end with `.db`, and one of each day differs in its ending only.
#[tokio::test]
async fn backups_of_two_days_have_records_of_their_own() {
    let store = Store::new(MODES[0]).await;
    let live = store.path().with_file_name("gateway.db");
    let records = Records::open(&live, RecordsOptions::default()).await.unwrap();
    let thread = NewThread { thread_id: TALK.to_owned(), ..NewThread::default() };
    records.threads().create(thread).await.unwrap();
    let names = ["a.db.2026-11-24", "a.db.2026-11-25", "a.db", "a"];
    let mut title: Option<String> = None;
    for name in names {
        let new = format!("As in {name}");
        assert!(records.threads().set_display_name(TALK, title.as_deref(), Some(&new)).await.unwrap());
        title = Some(new);
        store.run(&["backup", "--out", &store.file(name)]).done();
    }
    records.close().await;
    for name in names {
        let listed = threadkeep(&["threads", "list", "--json", "--sqlite", &store.file(name)]).json();
        let titles: Vec<_> = listed.iter().filter_map(|thread| thread["title"].as_str()).collect();
        assert!(titles.contains(&format!("As in {name}").as_str()), "{name}: {titles:?}");
    }
}

/// What is in the directory of backups.
#[cfg(unix)]
fn names(directory: &std::path::Path) -> Vec<String> {
    let names = std::fs::read_dir(directory).unwrap();
    names.map(|name| name.unwrap().file_name().into_string().unwrap()).collect()
}

/// The exit code of a backup that is sent this signal while it copies, and what it said. It leaves no file, also if the
/// signal is late.
#[cfg(unix)]
fn interrupted(store: &Store, signal: rustix::process::Signal) -> (Option<i32>, String) {
    use rustix::process::{Pid, kill_process};
    use std::time::{Duration, Instant};
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("backup.db").display().to_string();
    let path = store.path().display().to_string();
    let mut child = command(&["backup", "--out", &out, "--sqlite", &path])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if !names(place.path()).is_empty() {
            kill_process(Pid::from_child(&child), signal).unwrap();
            break;
        }
        assert!(begun.elapsed() < Duration::from_mins(10), "no copy was begun");
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    let code = child.wait().unwrap().code();
    assert_eq!(names(place.path()), Vec::<String>::new(), "{signal:?}: {said}");
    (code, said)
}

#[cfg(unix)]
#[tokio::test]
async fn what_is_half_made_is_removed_when_a_command_is_interrupted() {
    use rustix::process::Signal;
    let store = Store::new(MODES[0]).await;
    // Another program holds the records, so the copy of them waits.
    let records = rusqlite::Connection::open(store.path().with_file_name("gateway.db")).unwrap();
    records.execute_batch("CREATE TABLE held (x); BEGIN EXCLUSIVE").unwrap();
    for signal in [Signal::INT, Signal::TERM] {
        // It waits for five seconds. On a slower machine the signal comes when it has given up: then once more.
        let mut ended = (0..20).map(|_| interrupted(&store, signal));
        let in_time = ended.find(|(code, said)| *code != Some(1) || !said.contains("holds the lock"));
        let (code, said) = in_time.expect("they give up, and do not end when they are interrupted");
        assert_eq!(code, Some(130), "{signal:?}: {said}");
    }
}

#[tokio::test]
async fn a_backup_leaves_no_records_out_that_may_be_its_own() {
    let store = Store::new(ChannelMode::Full).await;
    // As an earlier version left it: the records of several backups had one place.
    let (from, to) = (store.file("a.2026-11-24"), store.file("copy.db"));
    std::fs::copy(store.path(), &from).unwrap();
    std::fs::write(store.file("a.gateway.db"), "records of one of them").unwrap();
    let said = threadkeep(&["backup", "--sqlite", &from, "--out", &to]);
    assert!(said.code == 1 && said.err.contains("rename it to"), "{said:?}");
    assert!(!std::path::Path::new(&to).exists(), "a copy without records");
}

//! A database with a damaged page: which threads are damaged, which are intact, and what helps.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Map, Value as Json, json};
use threadkeep::channel::{Behaviour, OrderedUnion, Schema};
use threadkeep::id::{IdSource, ThreadId};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::Saver as _;
use threadkeep::state::{StateAccessor, Update};
use threadkeep_records::{CheckpointForm, NewThread, Records, RecordsOptions};

use super::store::{MODES, OTHER, Said, Store, TALK, turn_of};

const PAGE: usize = 4_096;

#[tokio::test]
async fn verify_names_the_threads_of_a_damaged_page_and_checks_the_others() {
    let store = Store::new(MODES[0]).await;
    let saver = store.open().await;
    let accessor = store.accessor(&saver, MODES[0]);
    let mut all: BTreeSet<String> = (0..8).map(|number| format!("thread-{number}")).collect();
    for thread in &all {
        turn_of(&accessor, thread, 0).await;
    }
    saver.close().await;
    all.extend([TALK.to_owned(), OTHER.to_owned()]);
    let good = std::fs::read(store.path()).unwrap();
    let (mut ever, mut found) = (BTreeSet::new(), 0);
    for page in 0..good.len() / PAGE {
        let mut bytes = good.clone();
        bytes[page * PAGE + PAGE / 2] ^= 1;
        std::fs::write(store.path(), bytes).unwrap();
        let said = store.run(&["verify", "--all", "--json"]);
        if page == 0 {
            assert_eq!((said.code, said.out.as_str()), (1, ""), "{said:?}");
            let advice = "restore a backup (`threadkeep backup --out FILE` makes one)";
            assert!(said.err.lines().count() == 1 && said.err.contains(advice), "{said:?}");
            continue;
        }
        if said.code == 0 {
            continue; // A page that holds nothing.
        }
        found += 1;
        assert_eq!(said.code, 3, "page {page}: {said:?}");
        let lines: Vec<Json> = said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let (totals, lines) = lines.split_last().unwrap();
        let damaged: BTreeSet<String> =
            lines.iter().filter_map(|line| line["thread"].as_str()).map(str::to_owned).collect();
        assert_eq!(totals["violations"], lines.len());
        let saver = store.open().await;
        let mut intact = 0;
        for thread in all.difference(&damaged) {
            match saver.read_thread(&ThreadId::from(thread.as_str())).await {
                Ok(image) => {
                    assert!(!image.checkpoints.is_empty());
                    intact += 1;
                }
                // The directory does not name it any more.
                Err(error) => assert!(totals["threads"] != all.len(), "page {page}, {thread}: {error}"),
            }
        }
        assert!(totals["intact"].as_u64() <= Some(intact), "page {page}: {totals}");
        assert_eq!(
            totals["intact"].as_u64().unwrap() + damaged.len() as u64,
            totals["threads"].as_u64().unwrap()
        );
        saver.close().await;
        // The remedy: what can be read is saved, and the exit code says that this is not all.
        let directory = store.file(&format!("exported-{page}"));
        let exported = store.run(&["export", "--all", "--out", &directory]);
        let files = std::fs::read_dir(&directory).map_or(0, Iterator::count) as u64;
        assert!(files >= totals["intact"].as_u64().unwrap(), "page {page}: {exported:?}");
        assert_eq!(exported.code == 0, files == all.len() as u64, "page {page}: {exported:?}");
        if let Some(thread) = damaged.first() {
            let said = store.run(&["verify", "--thread", thread]);
            assert_eq!(said.code, 3, "page {page}: {said:?}");
            assert!(said.out.contains(thread) && said.out.contains("docs/backup.md"), "{said:?}");
            assert!(said.out.contains("`threadkeep backup --out FILE`"), "{said:?}");
        }
        ever.extend(damaged);
    }
    std::fs::write(store.path(), good).unwrap();
    store.run(&["verify", "--all"]).done();
    assert_eq!(ever, all, "each was damaged by some page");
    assert!(found > 10, "{found}");
}

/// A store of which one thread is damaged, and that thread.
async fn with_one_damaged_thread() -> (Store, String) {
    let store = Store::new(ChannelMode::Delta).await;
    let saver = store.open().await;
    let accessor = store.accessor(&saver, ChannelMode::Delta);
    for thread in ["a", "b", "c"] {
        for turn in 0..20 {
            turn_of(&accessor, thread, turn).await;
        }
    }
    saver.close().await;
    let good = std::fs::read(store.path()).unwrap();
    for page in 1..good.len() / PAGE {
        let mut bytes = good.clone();
        bytes[page * PAGE + PAGE / 2] ^= 1;
        std::fs::write(store.path(), bytes).unwrap();
        let said = store.run(&["verify", "--all", "--json"]);
        if said.code != 3 {
            continue;
        }
        let lines: Vec<Json> = said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let (totals, lines) = lines.split_last().unwrap();
        let damaged: BTreeSet<&str> = lines.iter().filter_map(|line| line["thread"].as_str()).collect();
        if let (Some(thread @ ("a" | "b")), 1, true) =
            (damaged.first().copied(), damaged.len(), totals["intact"] == 4)
        {
            return (store, thread.to_owned());
        }
    }
    panic!("no page has rows of one thread only");
}

#[tokio::test]
async fn a_damaged_thread_ends_no_pass_and_nothing_of_it_is_deleted() {
    let (store, damaged) = with_one_damaged_thread().await;
    let names_it = |said: &Said, command: &[&str]| {
        assert_eq!(said.code, 1, "{command:?}: {said:?}");
        assert!(said.err.contains(&format!("thread {damaged}: ")), "{command:?}: {said:?}");
        assert!(said.err.contains("1 of 5 threads could not be"), "{command:?}: {said:?}");
    };
    for command in [
        &["threads", "list"][..],
        &["threads", "du"],
        &["prune", "plan", "--all", "--keep", "latest"],
        &["retention", "plan", "--all"],
        &["convert", "--all", "--to", "full", "--dry-run"],
    ] {
        let said = store.run(command);
        // A list needs only the newest checkpoint, which may be intact.
        if said.code != 0 || command[1] != "list" {
            names_it(&said, command);
        }
        for thread in ["a", "b", "c", TALK, OTHER] {
            assert!(thread == damaged || said.out.contains(thread), "{command:?}, {thread}: {said:?}");
        }
    }
    let violations = || -> Vec<Json> {
        let said = store.run(&["verify", "--thread", &damaged, "--json"]);
        said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let found = violations();
    assert!(found.len() > 1, "{found:?}");
    for command in [
        &["prune", "apply", "--all", "--keep", "last:1", "--boundary", "fresh-snapshot", "--yes"][..],
        &["retention", "apply", "--all", "--yes"],
        &["convert", "--all", "--to", "full"],
    ] {
        names_it(&store.run(command), command);
    }
    let saver = store.open().await;
    for thread in ["a", "b", "c", TALK, OTHER] {
        match saver.read_thread(&ThreadId::from(thread)).await {
            Ok(image) => {
                assert!(thread != damaged && image.checkpoints.len() <= 2, "{thread}");
                assert!(image.checkpoints.values().all(|tuple| !tuple.metadata.is_delta()), "{thread}");
            }
            Err(error) => assert!(thread == damaged, "{thread}: {error}"),
        }
    }
    saver.close().await;
    assert_eq!(violations(), found, "nothing of it was changed");
    let shown = store.run(&["convert", "--thread", &damaged, "--to", "full"]);
    assert!(shown.code == 1 && !shown.out.contains("Nothing to convert"), "{shown:?}");
}

#[tokio::test]
async fn a_damaged_thread_does_not_end_the_import_of_a_directory() {
    let (store, damaged) = with_one_damaged_thread().await;
    let other = Store::new(ChannelMode::Delta).await;
    let saver = other.open().await;
    let accessor = other.accessor(&saver, ChannelMode::Delta);
    let dir = store.file("exported");
    std::fs::create_dir(&dir).unwrap();
    // Its own file comes first.
    for (file, thread) in [("1", damaged.as_str()), ("2", "new")] {
        turn_of(&accessor, thread, 0).await;
        other.run(&["export", "--thread", thread, "--out", &format!("{dir}/{file}.ndjson")]).done();
    }
    saver.close().await;
    let said = store.run(&["import", &dir]);
    assert!(said.out.contains("1 thread was imported") && said.out.contains("already"), "{said:?}");
    let listed = store.run(&["checkpoints", "list", "--thread", "new", "--json"]);
    assert!(listed.code == 0 && !listed.out.is_empty(), "{said:?}, {listed:?}");
}

/// The gateway's record of one thread cannot be read; its checkpoints and the other threads can.
#[tokio::test]
async fn a_damaged_record_of_a_thread_ends_no_pass() {
    let store = Store::new(ChannelMode::Full).await;
    let path = store.path().with_file_name("gateway.db");
    let records = Records::open(&path, RecordsOptions::default()).await.unwrap();
    for thread in [OTHER, TALK] {
        let new = NewThread { thread_id: thread.to_owned(), ..NewThread::default() };
        records.threads().create(new).await.unwrap();
    }
    records.close().await;
    let database = rusqlite::Connection::open(&path).unwrap();
    let damage = "UPDATE threads_meta SET metadata_json = '{' WHERE thread_id = ?1";
    assert_eq!(database.execute(damage, [OTHER]).unwrap(), 1);
    drop(database);

    let listed = store.run(&["threads", "list"]);
    assert!(listed.out.contains(OTHER) && listed.out.contains(TALK), "{listed:?}");
    let directory = store.file("exported");
    let exported = store.run(&["export", "--all", "--out", &directory]);
    let files = std::fs::read_dir(&directory).unwrap().map(|file| file.unwrap().file_name());
    assert_eq!(files.collect::<Vec<_>>(), ["talk.ndjson"], "{exported:?}");
    for (said, what) in [(listed, "read"), (exported, "exported")] {
        assert!(said.code == 1 && said.err.contains(&format!("thread {OTHER}: ")), "{said:?}");
        assert!(said.err.contains(&format!("1 of 2 threads could not be {what}")), "{said:?}");
        let advised = said.err.lines().filter(|line| line.contains("`threadkeep backup --out FILE`"));
        assert_eq!(advised.count(), 2, "of the thread, and of all: {said:?}");
    }
}

/// Gateways learn from the records that every thread has the other mode.
#[tokio::test]
async fn a_conversion_that_the_records_do_not_take_reports_what_it_converted() {
    let store = Store::new(ChannelMode::Delta).await;
    let path = store.path().with_file_name("gateway.db");
    let records = Records::open(&path, RecordsOptions::default()).await.unwrap();
    let form = CheckpointForm { mode: "delta".to_owned(), frequency: 10 };
    assert_eq!(records.agree_on_form(&form).await.unwrap(), None);
    records.close().await;
    let database = rusqlite::Connection::open(&path).unwrap();
    let refusal =
        "CREATE TRIGGER refusal BEFORE UPDATE ON store_settings BEGIN SELECT RAISE(ABORT, 'no room'); END";
    database.execute_batch(refusal).unwrap();
    let convert = ["convert", "--all", "--to", "full"];
    let said = store.run(&convert);
    assert!(said.code == 1 && said.out.contains("were converted to full mode."), "{said:?}");
    assert!(said.err.contains("every thread is in full mode") && said.err.contains("no room"), "{said:?}");
    database.execute_batch("DROP TRIGGER refusal").unwrap();
    drop(database);
    let again = store.run(&convert).done();
    assert!(again.contains("Nothing to convert"), "{again}");
}

/// The cadence is the one that the operator names, not that of a configuration which the command happens to read.
#[tokio::test]
async fn a_conversion_of_every_thread_is_what_the_database_remembers() {
    let store = Store::new(ChannelMode::Delta).await;
    let path = store.path().with_file_name("gateway.db");
    let records = Records::open(&path, RecordsOptions::default()).await.unwrap();
    let form = |mode: &str, frequency| CheckpointForm { mode: mode.to_owned(), frequency };
    assert_eq!(records.agree_on_form(&form("delta", 5)).await.unwrap(), None);
    store.run(&["convert", "--all", "--to", "full"]).done();
    assert_eq!(records.agree_on_form(&form("full", 5)).await.unwrap(), None);
    store.run(&["convert", "--all", "--to", "delta", "--frequency", "7", "--dry-run"]).done();
    assert_eq!(records.agree_on_form(&form("full", 5)).await.unwrap(), None);
    store.run(&["convert", "--all", "--to", "delta", "--frequency", "7"]).done();
    assert_eq!(records.agree_on_form(&form("delta", 7)).await.unwrap(), None);
    records.close().await;
}

/// Another program's channel, or rows that the reducer refuses, are of their thread.
#[tokio::test]
async fn a_thread_that_cannot_be_replayed_does_not_end_a_pass() {
    let store = Store::new(ChannelMode::Delta).await;
    let saver = store.open().await;
    let other = Schema::thread_state().with("log", Behaviour::Accumulating(Arc::new(OrderedUnion)));
    let table = other.compile(ChannelMode::Delta, 1_000).unwrap();
    let accessor = StateAccessor::new(saver.clone(), Arc::new(table), Arc::new(IdSource::default()));
    for n in 0..2 {
        let writes = vec![accessor.write("log", json!([n]), false).unwrap()];
        let update = Update { at: None, node: "n".into(), writes, extra: Map::new() };
        accessor.update(&"a".into(), update).await.unwrap();
    }
    saver.close().await;
    let said = store.run(&["convert", "--all", "--to", "full"]);
    assert!(said.code == 1 && said.err.contains("thread a: "), "{said:?}");
    assert!(said.err.contains("1 of 3 threads could not be"), "{said:?}");
    for thread in [TALK, OTHER] {
        let image = store.image(thread).await;
        assert!(image.checkpoints.values().all(|tuple| !tuple.metadata.is_delta()), "{thread}");
    }
    let keep = ["--keep", "latest", "--boundary", "fresh-snapshot"];
    let said = store.run(&[&["prune", "apply", "--all", "--yes"][..], &keep].concat());
    assert!(said.code == 1 && said.err.contains("thread a: "), "{said:?}");
    assert!(said.err.contains("1 of 3 threads could not be"), "{said:?}");
    assert_eq!(store.image("a").await.checkpoints.len(), 2);
    for thread in [TALK, OTHER] {
        let image = store.image(thread).await;
        let namespaces: BTreeSet<_> = image.checkpoints.keys().map(|(namespace, _)| namespace).collect();
        assert_eq!(image.checkpoints.len(), namespaces.len(), "the head of each namespace of {thread}");
    }
}

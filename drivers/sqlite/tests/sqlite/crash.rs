//! A process that is killed in the middle of its work loses nothing that was acknowledged.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

use threadkeep::saver::{CheckpointSelector, ListQuery, Saver};
use threadkeep_sqlite::{Options, SqliteSaver};

use crate::common::{MESSAGES, Talk, message};

const DATABASE: &str = "THREADKEEP_TEST_CRASH_DB";

/// Commits to this many threads for ever, and prints what was acknowledged. The commits of a single thread are carried
/// out in place, except those after writes of a task.
async fn commit_until_killed(path: &str, threads: usize) {
    let saver = SqliteSaver::open(path, &Options::default()).unwrap();
    let talks = (0..threads).map(async |i| {
        let mut talk = Talk::new(&format!("t{i}"));
        if let Some(head) = saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap() {
            talk.resume(&head);
        }
        for number in 0.. {
            let mut step = talk.say(&message(number, 300));
            if let (true, Some(task)) = (number % 2 == 0, step.writes.first()) {
                saver.put_writes(&talk.key(), task).await.unwrap();
                step.writes.clear();
            }
            saver.commit(step.clone()).await.unwrap();
            talk.accept(&step);
            let is_in_place = saver.stats().in_place > 0;
            assert!(threads > 1 || number < 9 || is_in_place, "nothing was committed in place");
            let mut out = std::io::stdout().lock();
            writeln!(out, "ack {} {}", talk.thread, step.checkpoint.id).unwrap();
            out.flush().unwrap();
        }
    });
    futures::future::join_all(talks).await;
}

/// Runs `test` as a child until it has acknowledged `count` commits, kills it, and returns everything that it
/// acknowledged.
fn killed_after(count: usize, test: &str, database: &Path) -> Vec<(String, String)> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(DATABASE, database)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut acknowledged = Vec::new();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut take = |line: &str| {
        if let Some((thread, id)) = line.strip_prefix("ack ").and_then(|rest| rest.split_once(' ')) {
            acknowledged.push((thread.to_owned(), id.to_owned()));
        }
        acknowledged.len()
    };
    while take(&lines.next().expect("the child ended by itself").unwrap()) < count {}
    // SIGKILL on Unix.
    child.kill().unwrap();
    for line in lines.map_while(Result::ok) {
        take(&line);
    }
    assert!(!child.wait().unwrap().success());
    acknowledged
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_acknowledged_survives_a_kill() {
    survives_a_kill("crash::what_was_acknowledged_survives_a_kill", 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_committed_in_place_survives_a_kill() {
    survives_a_kill("crash::what_was_committed_in_place_survives_a_kill", 1).await;
}

/// The child process is the test again, with the database in its environment.
async fn survives_a_kill(test: &str, threads: usize) {
    if let Ok(path) = std::env::var(DATABASE) {
        return commit_until_killed(&path, threads).await;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let mut acknowledged: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for round in 0..6 {
        for (thread, id) in killed_after(5 + 23 * round, test, &path) {
            acknowledged.entry(thread).or_default().push(id);
        }
        let saver = SqliteSaver::open(&path, &Options::default()).unwrap();
        for (thread, ids) in &acknowledged {
            let stored = saver.list(&ListQuery::new(&thread.as_str().into())).await.unwrap();
            let known: Vec<_> = stored.iter().rev().map(|tuple| tuple.checkpoint.id.to_string()).collect();
            assert!(ids.iter().all(|id| known.contains(id)), "{thread}: {ids:?} of {known:?}");
            for (i, tuple) in stored.iter().rev().enumerate() {
                let list = tuple.checkpoint.channels[MESSAGES].stored.value().unwrap();
                assert_eq!(list.as_list().unwrap().len(), i + 1);
                assert_eq!(tuple.checkpoint.applied.len(), usize::from(i > 0));
            }
        }
        saver.close().await;
        let conn = threadkeep_pages::open(&path, rusqlite::OpenFlags::default()).unwrap();
        let verdict: String = conn.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
        assert_eq!(verdict, "ok");
    }
    assert_eq!(acknowledged.len(), threads);
}

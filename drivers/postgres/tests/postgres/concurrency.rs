//! Several writers on one thread: savers of one process, and processes.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde_json::json;
use threadkeep::Error;
use threadkeep::id::IdSource;
use threadkeep::saver::{CheckpointSelector, Saver, ThreadImage};
use threadkeep_postgres::PostgresSaver;
use threadkeep_testing::pgbouncer;
use tokio::sync::Notify;

use crate::common::damage::connect;
use crate::common::proxy::Proxy;
use crate::common::talk::{MESSAGES, Talk, message};
use crate::common::{database, open};

/// An acknowledged append: its message, and its start and end.
#[derive(Debug, Clone)]
struct Said {
    what: String,
    begun: u64,
    ended: u64,
}

/// Appends `count` messages to thread `t`, and rereads the head whenever another writer was faster. `now` returns
/// moments.
async fn compete(saver: &PostgresSaver, name: &str, count: usize, now: impl Fn() -> u64) -> Vec<Said> {
    let mut said = Vec::new();
    let mut conflicts = 0;
    while said.len() < count {
        // Concurrent writers must not draw ids from the same seed.
        let mut talk = Talk::new("t");
        talk.ids = threadkeep::id::IdSource::default();
        if let Some(head) = saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap() {
            talk.resume(&head);
        }
        let what = format!("{name} says {}", said.len());
        let begun = now();
        let step = talk.say(&json!({ "id": what, "content": what }));
        match saver.commit(step).await {
            Ok(_) => said.push(Said { what, begun, ended: now() }),
            Err(Error::Conflict { .. }) => conflicts += 1,
            Err(error) => panic!("{name}: {error}"),
        }
        assert!(conflicts < 100_000, "{name} never wins");
    }
    said
}

/// Checks that the thread is the history of exactly these appends: each once, none lost, one chain, each state built on
/// the one before, and none before an append that had ended when it began.
fn check(image: &ThreadImage, said: &[Said]) {
    let mut state: Vec<String> = Vec::new();
    let mut parent = None;
    for ((_, id), tuple) in &image.checkpoints {
        assert_eq!(tuple.parent, parent, "the chain forks at {id}");
        parent = Some(*id);
        let list = tuple.checkpoint.channels[MESSAGES].stored.value().unwrap().to_json().unwrap();
        let list: Vec<String> = list
            .as_array()
            .unwrap()
            .iter()
            .map(|message| message["id"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(list[..list.len() - 1], state, "{id} was not made from the one before");
        state = list;
    }
    let mut expected: Vec<_> = said.iter().map(|said| said.what.clone()).collect();
    let mut found = state.clone();
    expected.sort();
    found.sort();
    assert_eq!(found, expected, "what is there and what was acknowledged");

    let mut latest_begin = 0;
    for what in &state {
        let said = said.iter().find(|said| said.what == *what).unwrap();
        assert!(latest_begin <= said.ended, "{what} stands behind something that began after it had ended");
        latest_begin = latest_begin.max(said.begun);
    }
}

async fn compete_over(url: &str) -> (ThreadImage, Vec<Said>) {
    let clock = Arc::new(AtomicU64::new(0));
    let mut writers = Vec::new();
    for n in 0..6 {
        let (saver, clock) = (open(url).await, clock.clone());
        writers.push(tokio::spawn(async move {
            let now = || clock.fetch_add(1, Ordering::SeqCst);
            compete(&saver, &format!("writer {n}"), 15, now).await
        }));
    }
    let mut said = Vec::new();
    for writer in writers {
        said.extend(writer.await.unwrap());
    }
    (open(url).await.read_thread(&"t".into()).await.unwrap(), said)
}

#[tokio::test(flavor = "multi_thread")]
async fn appends_of_many_savers_are_one_history() {
    let database = database().await;
    let (image, said) = compete_over(database.url()).await;
    assert_eq!(said.len(), 90);
    check(&image, &said);
}

/// A put that changes a row below a checkpoint that is not the head must know what the children of that applied, at the moment
/// of the write. Others that write all the time do not keep it from that.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_below_the_head_grows_beside_others_that_write() {
    let database = database().await;
    let saver = open(database.url()).await;
    let mut talk = Talk::new("t");
    let say = async |talk: &mut Talk, text: &str| {
        let step = talk.say(&json!({ "id": text, "content": text }));
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    };
    say(&mut talk, "first").await;
    let below = talk.key();
    let mut row = talk.task(talk.messages.last().unwrap());
    saver.put_writes(&below, &row).await.unwrap();
    say(&mut talk, "second").await;
    let at = CheckpointSelector::at(&below);
    let stored = saver.get(&at).await.unwrap().unwrap().writes;
    let mut applied = stored.iter().find(|other| other.task != row.task).unwrap().clone();

    let (done, written) = (AtomicBool::new(false), Notify::new());
    let others = async {
        let other = open(database.url()).await;
        while !done.load(Ordering::SeqCst) {
            let step = talk.say(&json!({ "id": talk.step, "content": "meanwhile" }));
            other.commit(step.clone()).await.unwrap();
            talk.accept(&step);
            written.notify_one();
        }
    };
    let puts = async {
        for _ in 0..20 {
            written.notified().await;
            row.writes.push(row.writes[0].clone());
            saver.put_writes(&below, &row).await.unwrap();
            applied.writes.push(applied.writes[0].clone());
            saver.put_writes(&below, &applied).await.unwrap();
        }
        done.store(true, Ordering::SeqCst);
    };
    tokio::join!(others, puts);
    let expected: Vec<_> =
        stored.into_iter().map(|other| if other.task == row.task { row.clone() } else { other }).collect();
    assert_eq!(saver.get(&at).await.unwrap().unwrap().writes, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn appends_of_many_savers_behind_a_pooler_are_one_history() {
    let database = database().await;
    let (image, said) = compete_over(&pgbouncer().unwrap().url(&database)).await;
    check(&image, &said);
}

#[tokio::test(flavor = "multi_thread")]
async fn appends_of_two_processes_are_one_history() {
    // Moments of two processes: the time since the machine started, which nobody sets back. It need not be finer than
    // the order of calls.
    let now = || {
        let now = clock_gettime(ClockId::Monotonic);
        let since = Duration::new(now.tv_sec.try_into().unwrap(), now.tv_nsec.try_into().unwrap());
        u64::try_from(since.as_nanos()).unwrap()
    };
    if let Ok(url) = std::env::var("THREADKEEP_TEST_COMPETE") {
        let said = compete(&open(&url).await, &std::process::id().to_string(), 30, now).await;
        let mut out = std::fs::File::create(std::env::var("THREADKEEP_TEST_SAID").unwrap()).unwrap();
        for Said { what, begun, ended } in said {
            writeln!(out, "{begun} {ended} {what}").unwrap();
        }
        return;
    }
    let database = database().await;
    let children: Vec<_> = (0..2)
        .map(|_| {
            let file = tempfile::NamedTempFile::new().unwrap();
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "concurrency::appends_of_two_processes_are_one_history"])
                .env("THREADKEEP_TEST_COMPETE", database.url())
                .env("THREADKEEP_TEST_SAID", file.path())
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            (child, file)
        })
        .collect();
    let mut said = Vec::new();
    for (mut child, file) in children {
        assert!(tokio::task::block_in_place(|| child.wait()).unwrap().success());
        for line in std::fs::read_to_string(file.path()).unwrap().lines() {
            let mut fields = line.splitn(3, ' ');
            let mut number = || fields.next().unwrap().parse().unwrap();
            let (begun, ended) = (number(), number());
            said.push(Said { what: fields.next().unwrap().to_owned(), begun, ended });
        }
    }
    assert_eq!(said.len(), 60);
    check(&open(database.url()).await.read_thread(&"t".into()).await.unwrap(), &said);
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_of_many_savers_under_one_checkpoint_are_all_kept() {
    let database = database().await;
    let maker = open(database.url()).await;
    let mut talk = Talk::new("t");
    let step = talk.say(&crate::common::talk::note(0));
    maker.commit(step.clone()).await.unwrap();
    talk.accept(&step);
    let element = talk.messages.last().unwrap().clone();
    let tasks: Vec<_> = (0..60).map(|_| talk.task(&element)).collect();
    let mut writers = Vec::new();
    for tasks in tasks.chunks(10) {
        // Each of them finds the thread changed by the others nearly every time.
        let (saver, at, tasks) = (open(database.url()).await, talk.key(), tasks.to_vec());
        writers.push(tokio::spawn(async move {
            for task in tasks {
                saver.put_writes(&at, &task).await.unwrap();
            }
        }));
    }
    for writer in writers {
        writer.await.unwrap();
    }
    let found = maker.get(&CheckpointSelector::at(&talk.key())).await.unwrap().unwrap().writes;
    assert_eq!(found.len(), tasks.len());
    assert!(tasks.iter().all(|task| found.contains(task)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thread_that_is_made_anew_under_a_read_is_read_whole() {
    let database = database().await;
    let proxy = Proxy::before(database.url()).await;
    let (reader, writer) = (Arc::new(open(proxy.url()).await), open(database.url()).await);
    // Two lives with elements of the same numbers.
    let lives = [0, 1].map(|life| {
        let mut talk = Talk::new("t");
        let steps: Vec<_> = (0..3)
            .map(|n| {
                let step = talk.say(&crate::common::talk::message(10 * life + n, 80));
                talk.accept(&step);
                step
            })
            .collect();
        (talk, steps)
    });
    let live = async |steps: &[threadkeep::saver::StepCommit]| {
        writer.delete_thread(&"t".into()).await.unwrap();
        for step in steps {
            writer.commit(step.clone()).await.unwrap();
        }
    };
    let [(_, first), (second, anew)] = &lives;
    live(first).await;
    // The first read prepares the statement for the rows. Later ones are a request for the rows and one for the values.
    reader.get(&CheckpointSelector::head(&"t".into())).await.unwrap().unwrap();
    proxy.statements();
    // Between the rows and the values of one read.
    let between = || {
        let asked = proxy.statements();
        assert!(matches!(&asked[..], [values] if values.starts_with("SELECT 0 AS kind")), "{asked:?}");
    };
    let (come, go) = proxy.hold(1);
    let reading = tokio::spawn({
        let reader = reader.clone();
        async move { reader.get(&CheckpointSelector::head(&"t".into())).await }
    });
    come.notified().await;
    between();
    live(anew).await;
    go.notify_one();
    let head = reading.await.unwrap().unwrap().unwrap();
    assert_eq!(head.checkpoint.id, anew[2].checkpoint.id);
    let found = head.checkpoint.channels[MESSAGES].stored.value().unwrap().as_list().unwrap().clone();
    assert_eq!(found, second.messages);

    // The same when the thread is gone.
    proxy.statements();
    let (come, go) = proxy.hold(1);
    let reading = tokio::spawn(async move { reader.get(&CheckpointSelector::head(&"t".into())).await });
    come.notified().await;
    between();
    writer.delete_thread(&"t".into()).await.unwrap();
    go.notify_one();
    assert_eq!(reading.await.unwrap(), Ok(None));
}

/// A server loses what was not flushed, and another process may write elements of the same numbers in its place.
#[tokio::test(flavor = "multi_thread")]
async fn a_thread_whose_newest_write_is_lost_under_a_read_is_read_whole() {
    let tables = ["thread", "head", "checkpoint", "element"];
    let each = |statements: &str| tables.map(|table| statements.replace("{t}", table)).concat();
    let at = CheckpointSelector::head(&"t".into());
    for goes_on in [false, true] {
        let database = database().await;
        let proxy = Proxy::before(database.url()).await;
        let (reader, writer) = (Arc::new(open(proxy.url()).await), open(database.url()).await);
        let server = connect(database.url()).await;
        let mut talk = Talk::new("t");
        for n in 0..2 {
            if n == 1 {
                // What is on the disk.
                server.batch_execute(&each("CREATE TABLE kept_{t} AS TABLE threadkeep_{t};")).await.unwrap();
            }
            let step = talk.say(&message(n, 80));
            writer.commit(step.clone()).await.unwrap();
            talk.accept(&step);
        }
        // The first read prepares the statement for the rows.
        let lost = reader.get(&at).await.unwrap().unwrap();
        proxy.statements();
        // Between the rows and the values of one read.
        let (come, go) = proxy.hold(1);
        let reading = tokio::spawn({
            let (reader, at) = (reader.clone(), at.clone());
            async move { reader.get(&at).await }
        });
        come.notified().await;
        let asked = proxy.statements();
        assert!(matches!(&asked[..], [values] if values.starts_with("SELECT 0 AS kind")), "{asked:?}");
        let lose = each("DELETE FROM threadkeep_{t}; INSERT INTO threadkeep_{t} TABLE kept_{t};");
        server.batch_execute(&lose).await.unwrap();
        let other = open(database.url()).await;
        let left = other.get(&at).await.unwrap().unwrap();
        if goes_on {
            let mut talk = Talk { ids: IdSource::default(), ..Talk::new("t") };
            talk.resume(&left);
            other.commit(talk.say(&message(2, 80))).await.unwrap();
        }
        let expected = other.get(&at).await.unwrap().unwrap();
        assert_eq!(expected == left, !goes_on);
        assert!(expected != lost);
        go.notify_one();
        assert_eq!(reading.await.unwrap(), Ok(Some(expected)));
    }
}

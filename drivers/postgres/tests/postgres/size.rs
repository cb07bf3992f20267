//! What is stored and sent: each element once, and a step costs only what it changes.

use threadkeep::saver::{CheckpointSelector, Rewrite, Saver, StepCommit};
use threadkeep::value::Element;
use threadkeep_postgres::PostgresSaver;
use tokio_postgres::Client;

use crate::common::damage::connect;
use crate::common::proxy::Proxy;
use crate::common::talk::{Talk, message};
use crate::common::{database, open};

async fn commit(saver: &PostgresSaver, talk: &mut Talk, step: StepCommit) {
    saver.commit(step.clone()).await.unwrap();
    talk.accept(&step);
}

/// The stored elements of lists and large values.
async fn elements(client: &Client) -> i64 {
    let count = "SELECT count(*) FROM threadkeep_element WHERE seq < 4294967296";
    client.query_one(count, &[]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_element_is_stored_once_in_a_thread_for_all_its_writers() {
    let database = database().await;
    let client = connect(database.url()).await;
    let savers = [open(database.url()).await, open(database.url()).await];
    let mut full = Talk::new("t");
    for n in 0..30 {
        // Alternating, so that each finds the other's write.
        let saver = &savers[n % 2];
        let step = full.say(&message(n, 100));
        commit(saver, &mut full, step).await;
        if n == 20 {
            let head = savers[1].get(&CheckpointSelector::head(&full.thread)).await.unwrap().unwrap();
            full.resume(&head);
        }
    }
    assert_eq!(elements(&client).await, 30, "in values and in writes, through two savers");

    // The same messages without their origin, from a saver that does not know the thread.
    full.messages = full.messages.iter().map(|e| Element::from_bytes(e.bytes().clone())).collect();
    let step = full.say(&message(30, 100));
    commit(&open(database.url()).await, &mut full, step).await;
    assert_eq!(elements(&client).await, 31, "in a list that is written again");

    let mut delta = Talk::delta("u", 10);
    for n in 0..30 {
        let step = delta.say(&message(n, 100));
        commit(&savers[n % 2], &mut delta, step).await;
    }
    assert_eq!(elements(&client).await, 61, "in snapshots and in writes");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_sends_and_stores_what_it_changes_however_long_the_thread_is() {
    let database = database().await;
    let client = connect(database.url()).await;
    let proxy = Proxy::before(database.url()).await;
    let saver = open(proxy.url()).await;
    for mut talk in [Talk::new("full"), Talk::delta("delta", 10)] {
        let mut sent = Vec::new();
        for n in 0..600 {
            let before = proxy.bytes();
            // All messages have one length, so that only the thread's length makes a difference.
            let step = talk.say(&message(n % 7, 100));
            commit(&saver, &mut talk, step).await;
            sent.push(proxy.bytes() - before);
        }
        let around = |n: usize| sent[n..n + 50].iter().sum::<usize>();
        let (early, late) = (around(20), around(550));
        // A longer list has more runs, until they no longer fit in its manifest.
        assert!(
            late <= early + 50 * 128,
            "{}: {early} bytes for 50 early steps, {late} for late ones",
            talk.thread
        );
        let bodies = "SELECT max(length(body) + coalesce(length(tasks), 0)) FROM threadkeep_checkpoint";
        let largest: i32 = client.query_one(bodies, &[]).await.unwrap().get(0);
        assert!(largest < 250, "{}: a checkpoint takes {largest} bytes", talk.thread);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_that_is_edited_all_over_stays_small_and_reads_back() {
    let database = database().await;
    let client = connect(database.url()).await;
    let saver = open(database.url()).await;
    let mut talk = Talk::new("t");
    for n in 0..200 {
        let step = talk.say(&message(n, 60));
        commit(&saver, &mut talk, step).await;
    }
    for n in 0..200 {
        // Every second one is replaced, so that no two neighbours were stored together.
        let edited =
            serde_json::json!({ "id": format!("m-{:08}", 2 * (n % 100)), "content": format!("edited {n}") });
        let index = 2 * (n % 100);
        let mut step = talk.empty();
        let mut messages = talk.messages.clone();
        messages.replace(index, Element::from_json(&edited).unwrap());
        let version = talk.ids.version_after(talk.version);
        let stored = threadkeep::checkpoint::Stored::Value(messages.into());
        let entry = threadkeep::checkpoint::ChannelEntry { version, stored };
        step.checkpoint.channels.insert(crate::common::talk::MESSAGES.into(), entry);
        commit(&saver, &mut talk, step).await;
    }
    let head =
        open(database.url()).await.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    let found = head.checkpoint.channels[crate::common::talk::MESSAGES]
        .stored
        .value()
        .unwrap()
        .as_list()
        .unwrap()
        .clone();
    assert_eq!(found, talk.messages);
    let largest = "SELECT max(length(body)) FROM threadkeep_checkpoint";
    let largest: i32 = client.query_one(largest, &[]).await.unwrap().get(0);
    assert!(largest < 250, "a checkpoint takes {largest} bytes");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rewrite_frees_what_nobody_refers_to() {
    let database = database().await;
    let client = connect(database.url()).await;
    let saver = open(database.url()).await;
    let mut talk = Talk::new("t");
    for n in 0..20 {
        let step = talk.say(&message(n, 100));
        commit(&saver, &mut talk, step).await;
    }
    // The five newest are removed, from the newest on.
    let image = saver.read_thread(&talk.thread).await.unwrap();
    let remove: std::collections::BTreeSet<_> = image.checkpoints.keys().rev().take(5).cloned().collect();
    let kept = image.checkpoints.keys().rev().nth(5).unwrap().1;
    saver.rewrite_thread(&talk.thread, &image.revision, Rewrite { remove, put: vec![] }).await.unwrap();
    // The last one's pending task wrote one more.
    assert_eq!(elements(&client).await, 16);
    let head = saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    assert_eq!((head.checkpoint.id, crate::common::talk::texts(&head).len()), (kept, 15));

    // What is stored next has other numbers.
    talk.resume(&head);
    let step = talk.say(&message(100, 100));
    commit(&saver, &mut talk, step).await;
    let newest = "SELECT max(seq) FROM threadkeep_element WHERE seq < 4294967296";
    assert_eq!(client.query_one(newest, &[]).await.unwrap().get::<_, i64>(0), 20);

    saver.delete_thread(&talk.thread).await.unwrap();
    for table in ["thread", "head", "checkpoint", "element"] {
        let left = format!("SELECT count(*) FROM threadkeep_{table}");
        assert_eq!(client.query_one(&left, &[]).await.unwrap().get::<_, i64>(0), 0, "{table}");
    }
}

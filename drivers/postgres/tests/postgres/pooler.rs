//! What a pooler relies on: a session that is free has nothing under way. When a client goes away, PgBouncer (1.18) gives
//! a session that is free to the next one, with the answers that are still to come.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep::saver::{CheckpointSelector, Flush, ListQuery, Rewrite, Saver, StepCommit};
use threadkeep_postgres::{Options, PostgresSaver};

use crate::common::proxy::{Cut, Proxy};
use crate::common::talk::{Talk, note};
use crate::common::{database, open};

/// Every call of a saver, on a thread of its own.
async fn use_all(saver: &PostgresSaver, other: &PostgresSaver, name: &str) {
    let mut talk = Talk::new(name);
    for n in 0..4 {
        let flush = if n % 2 == 0 { Flush::Now } else { Flush::WithNext };
        let step = StepCommit { flush, ..talk.say(&note(n)) };
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
        saver.put_writes(&talk.key(), &talk.task(talk.messages.last().unwrap())).await.unwrap();
        saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    }
    saver.flush(&talk.thread).await.unwrap();
    saver.list(&ListQuery::new(&talk.thread)).await.unwrap();
    // The saver does not know this commit.
    let step = talk.say(&note(4));
    other.commit(step.clone()).await.unwrap();
    talk.accept(&step);
    saver.commit(talk.say(&note(5))).await.unwrap();
    let image = saver.read_thread(&talk.thread).await.unwrap();
    let first = image.checkpoints.keys().next().unwrap().clone();
    let rewrite = Rewrite { remove: [first].into(), put: Vec::new() };
    // Refused: a child refers to it. The transaction is rolled back.
    drop(saver.rewrite_thread(&talk.thread, &image.revision, rewrite).await);
    let (place, _) = image.checkpoints.last_key_value().unwrap();
    let rewrite = Rewrite { remove: [place.clone()].into(), put: Vec::new() };
    saver.rewrite_thread(&talk.thread, &image.revision, rewrite).await.unwrap();
    saver.delete_thread(&talk.thread).await.unwrap();
}

async fn use_all_at_once(connections: usize) {
    let database = database().await;
    let proxy = Proxy::before(database.url()).await;
    let options = Options { connections, patience: Duration::from_mins(10), ..Options::default() };
    let saver = PostgresSaver::connect(proxy.url(), options).await.unwrap();
    let other = open(database.url()).await;
    let names: Vec<_> = (0..24).map(|n| format!("t{n}")).collect();
    join_all(names.iter().map(|name| use_all(&saver, &other, name))).await;
    assert!(proxy.requests() > 24 * 15, "{} requests", proxy.requests());
    assert_eq!(proxy.overlaps(), 0, "a free session had a statement under way");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_session_outside_of_a_transaction_has_two_statements_under_way() {
    use_all_at_once(2).await;
    use_all_at_once(16).await;
}

/// A call that its caller gives up leaves a statement under way: nobody else may use that session.
#[tokio::test(flavor = "multi_thread")]
async fn the_session_of_a_call_that_was_given_up_is_not_used_again() {
    let database = database().await;
    let proxy = Proxy::before(database.url()).await;
    let options = Options { connections: 2, patience: Duration::from_mins(10), ..Options::default() };
    let saver = Arc::new(PostgresSaver::connect(proxy.url(), options).await.unwrap());
    let mut talk = Talk::new("t");
    for n in 0..20 {
        let step = talk.say(&note(n));
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
        // The request reaches the proxy, and waits there while its caller goes away; a session of the pool is free.
        let (come, go) = proxy.hold(0);
        let reading = tokio::spawn({
            let (saver, thread) = (saver.clone(), ThreadId::from("t"));
            async move { saver.get(&CheckpointSelector::head(&thread)).await }
        });
        come.notified().await;
        reading.abort();
        assert!(reading.await.unwrap_err().is_cancelled());
        let others = async {
            for _ in 0..4 {
                saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
            }
        };
        let release = async {
            tokio::task::yield_now().await;
            go.notify_one();
        };
        tokio::join!(others, release);
    }
    assert_eq!(proxy.overlaps(), 0, "a free session had a statement under way");
}

/// A commit that lost is answered with the success of another thread's commit.
#[tokio::test(flavor = "multi_thread")]
async fn the_answer_to_another_commit_acknowledges_nothing() {
    let database = database().await;
    let proxy = Proxy::before(database.url()).await;
    let options = Options { patience: Duration::from_mins(10), ..Options::default() };
    let saver = PostgresSaver::connect(proxy.url(), options).await.unwrap();
    let other = open(database.url()).await;
    let (mut talk, mut beside) = (Talk::new("t"), Talk::new("beside"));
    let say = async |saver: &PostgresSaver, talk: &mut Talk, n| {
        let step = talk.say(&note(n));
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    };
    for n in 0..3 {
        say(&saver, &mut talk, n).await;
        say(&saver, &mut beside, n).await;
    }
    let lost = talk.say(&note(3));
    say(&other, &mut talk, 4).await;
    say(&saver, &mut beside, 3).await;
    proxy.cut(0, Cut::Earlier);
    let refused = saver.commit(lost).await;
    assert!(proxy.mend(), "the answer was not replaced");
    assert!(matches!(refused, Err(Error::Conflict { .. })), "{refused:?}");
    let head = other.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    assert_eq!(Some(head.checkpoint.id), talk.head);
}

//! A write that needs the children of a checkpoint has two transactions. Both are parts of the same attempt.

use futures::FutureExt;
use futures::future::BoxFuture;
use threadkeep::Result;
use threadkeep::saver::{Rewrite, Saver};
use threadkeep_postgres::PostgresSaver;

use crate::common::proxy::{Cut, Proxy};
use crate::common::talk::{Talk, note};
use crate::common::{database, open};

async fn say(saver: &PostgresSaver, talk: &mut Talk, n: usize) {
    let step = talk.say(&note(n));
    saver.commit(step.clone()).await.unwrap();
    talk.accept(&step);
}

/// The first attempt needs the children, and its end is lost. Before the next one, another process removes the row that
/// was to grow, so that one writes without them. It is all of the call: a further write would be on top of what others
/// have done since, and its failure would be the answer to a call that is stored.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_done_without_the_children_does_not_begin_again() {
    let database = database().await;
    let other = open(database.url()).await;
    for commits in [false, true] {
        let proxy = Proxy::before(database.url()).await;
        let subject = open(proxy.url()).await;
        // Opens a connection.
        say(&subject, &mut Talk::new(&format!("another, commits: {commits}")), 0).await;

        let mut talk = Talk::new(&format!("commits: {commits}"));
        say(&other, &mut talk, 0).await;
        say(&other, &mut talk, 1).await;
        let at = talk.key();
        let mut step = talk.say(&note(2));
        let mut row = step.writes[0].clone();
        other.put_writes(&at, &row).await.unwrap();
        say(&other, &mut talk, 3).await;
        // Its parent is not the newest one any more, and its row is stored there.
        step.expected_head = talk.head;
        step.checkpoint.id = talk.ids.checkpoint_after(talk.head);
        row.writes.push(row.writes[0].clone());

        // Begin, lock, read, nothing to write; and this is the end of the transaction.
        proxy.cut(4, Cut::Before);
        let (come, go) = proxy.hold_retry();
        let mut running: BoxFuture<'_, Result<()>> = if commits {
            async { subject.commit(step).await.map(|_| ()) }.boxed()
        } else {
            subject.put_writes(&at, &row).boxed()
        };
        tokio::select! {
            done = &mut running => panic!("there was no other attempt, commits: {commits}: {done:?}"),
            () = come.notified() => {}
        }
        let image = other.read_thread(&talk.thread).await.unwrap();
        let mut put: Vec<_> = image.checkpoints.into_values().collect();
        put.retain(|tuple| tuple.checkpoint.id == at.id);
        put[0].writes.retain(|stored| stored.task != row.task);
        let rewrite = Rewrite { put, ..Rewrite::default() };
        other.rewrite_thread(&talk.thread, &image.revision, rewrite).await.unwrap();
        proxy.statements();
        go.notify_one();
        running.await.unwrap();

        let ends = proxy.statements().iter().filter(|statement| *statement == "COMMIT").count();
        assert_eq!(ends, 1, "transactions of the second attempt, commits: {commits}");
        let image = other.read_thread(&talk.thread).await.unwrap();
        assert_eq!(image.checkpoints.len(), if commits { 4 } else { 3 });
        let parent = image.checkpoints.values().find(|tuple| tuple.checkpoint.id == at.id).unwrap();
        assert!(parent.writes.iter().any(|stored| stored.task == row.task), "commits: {commits}");
    }
}

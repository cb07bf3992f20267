//! Servers that lose what they acknowledged: a failover to a lagging replica, a restored backup. The loss is reported
//! before anything more is acknowledged on the thread, and then everyone continues from what is there.

use std::process::Command;

use threadkeep::Error;
use threadkeep::id::{IdSource, ThreadId};
use threadkeep::saver::{CheckpointSelector, Flush, ListQuery, Rewrite, Saver, StepCommit};
use threadkeep::value::Element;
use threadkeep_postgres::{PostgresSaver, setup};
use threadkeep_testing::{Database, Postgres};

use crate::common::talk::{Talk, note, texts};
use crate::common::{open, patient};

/// A server that can be backed up and restored.
pub(crate) struct Server(Postgres);

impl Server {
    pub(crate) fn start() -> Self {
        Self(Postgres::start().unwrap())
    }

    pub(crate) async fn database(&self) -> Database {
        let database = self.0.database().await.unwrap();
        setup(database.url(), &patient()).await.unwrap();
        database
    }

    /// Copies everything that is committed.
    pub(crate) fn back_up(&self) {
        self.while_stopped(
            r#"rm -rf "$1.backup" && cp -a "$1" "$1.backup" && rm -f "$1.backup/postmaster.pid""#,
        );
    }

    pub(crate) fn restore(&self) {
        self.while_stopped(r#"rm -rf "$1" && cp -a "$1.backup" "$1""#);
    }

    fn while_stopped(&self, script: &str) {
        tokio::task::block_in_place(|| {
            self.0.crash().unwrap();
            let data = self.0.data().unwrap();
            let done = Command::new("/bin/sh").args(["-ec", script, "backup"]).arg(data).status().unwrap();
            assert!(done.success());
            self.0.resume().unwrap();
        });
    }
}

/// One side of a conversation: its view, and ids of its own.
struct Side {
    saver: PostgresSaver,
    talk: Talk,
}

impl Side {
    async fn new(database: &Database, thread: &str) -> Self {
        let mut talk = Talk::new(thread);
        talk.ids = IdSource::default();
        Self { saver: open(database.url()).await, talk }
    }

    async fn say(&mut self, n: usize) -> Result<(), Error> {
        let step = self.talk.say(&note(n));
        self.saver.commit(step.clone()).await?;
        self.talk.accept(&step);
        Ok(())
    }

    /// As [`Self::say`], acknowledged before it is flushed.
    async fn say_unflushed(&mut self, n: usize) -> Result<(), Error> {
        let step = StepCommit { flush: Flush::WithNext, ..self.talk.say(&note(n)) };
        self.saver.commit(step.clone()).await?;
        self.talk.accept(&step);
        Ok(())
    }

    /// Rewrites the newest checkpoint as it is.
    async fn rewrite(&self) -> Result<(), Error> {
        let image = self.saver.read_thread(&self.talk.thread).await?;
        let put = image.checkpoints.into_values().next_back().into_iter().collect();
        let rewrite = Rewrite { put, ..Rewrite::default() };
        self.saver.rewrite_thread(&self.talk.thread, &image.revision, rewrite).await
    }

    async fn read(&mut self) -> Result<Vec<String>, Error> {
        match self.saver.get(&CheckpointSelector::head(&self.talk.thread)).await? {
            Some(head) => {
                self.talk.resume(&head);
                Ok(texts(&head))
            }
            None => Ok(Vec::new()),
        }
    }
}

fn content(notes: &[usize]) -> Vec<String> {
    notes.iter().map(|n| note(*n)["content"].as_str().unwrap().to_owned()).collect()
}

fn is_lost<T: std::fmt::Debug>(done: &Result<T, Error>, thread: &ThreadId) {
    let told = matches!(done, Err(error @ Error::HistoryLost { thread: of, .. })
        if of == thread && error.to_string().contains("this process knew write"));
    assert!(told, "{done:?}");
}

/// Each kind of call is the first one after the loss, with the given number of writes by another process.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_history_is_reported_by_whatever_comes_next_and_then_forgotten() {
    let server = Server::start();
    let database = server.database().await;
    let kinds = ["commit", "put_writes", "get", "list", "history", "image", "rewrite", "delete", "flush"];
    // Two are lost, so the other process stays below, reaches, or passes the same count.
    let mut cases = Vec::new();
    for kind in kinds {
        for others in [0, 1, 2, 3, 30] {
            let thread = format!("{kind} {others}");
            cases.push((kind, others, Side::new(&database, &thread).await));
        }
    }
    for (_, _, side) in &mut cases {
        for n in 0..4 {
            side.say(n).await.unwrap();
        }
    }
    server.back_up();
    for (_, _, side) in &mut cases {
        for n in 4..6 {
            side.say(n).await.unwrap();
        }
    }
    server.restore();
    for (kind, others, mut side) in cases {
        let thread = side.talk.thread.clone();
        let what = format!("{kind}, {others} writes by another process");
        let mut other = Side::new(&database, thread.as_str()).await;
        assert_eq!(other.read().await.unwrap(), content(&[0, 1, 2, 3]), "{what}");
        let mut expected = vec![0, 1, 2, 3];
        for n in 900..900 + others {
            other.say(n).await.unwrap();
            expected.push(n);
        }
        let saver = &side.saver;
        let told: Result<(), Error> = match kind {
            "commit" => side.say(6).await,
            "put_writes" => {
                let task = side.talk.task(&Element::from_json(&note(6)).unwrap());
                saver.put_writes(&side.talk.key(), &task).await
            }
            "get" => saver.get(&CheckpointSelector::at(&side.talk.key())).await.map(|_| ()),
            "list" => saver.list(&ListQuery::new(&thread)).await.map(|_| ()),
            "history" => {
                saver.delta_history(&side.talk.key(), &["messages".into()].into(), None).await.map(|_| ())
            }
            "image" => saver.read_thread(&thread).await.map(|_| ()),
            "rewrite" => {
                let image = other.saver.read_thread(&thread).await.unwrap();
                let remove = [image.checkpoints.first_key_value().unwrap().0.clone()].into();
                saver.rewrite_thread(&thread, &image.revision, Rewrite { remove, put: vec![] }).await
            }
            "delete" => saver.delete_thread(&thread).await,
            _ => saver.flush(&thread).await,
        };
        if others == 30 && !matches!(kind, "commit" | "put_writes") {
            // Enough writes that the row lists none of the known ones; the head proves the loss if there is one.
            assert!(
                !matches!(told, Err(Error::Corrupt { .. } | Error::BrokenLineage { .. })),
                "{what}: {told:?}"
            );
            continue;
        }
        is_lost(&told, &thread);
        // Reported once. Nothing known before is used any more.
        assert_eq!(side.read().await.unwrap(), content(&expected), "{what}");
        side.say(4).await.unwrap();
        side.say(7).await.unwrap();
        expected.extend([4, 7]);
        let mut fresh = Side::new(&database, thread.as_str()).await;
        for reader in [&mut side, &mut other, &mut fresh] {
            assert_eq!(reader.read().await.unwrap(), content(&expected), "{what}");
        }
        fresh.saver.read_thread(&thread).await.unwrap();
    }
}

/// The server lost the creation of a thread, a deletion, a rewrite, or a creation after a deletion.
#[tokio::test(flavor = "multi_thread")]
async fn lost_creations_deletions_and_rewrites_are_reported_too() {
    let server = Server::start();
    let database = server.database().await;
    let mut created = Side::new(&database, "created").await;
    let mut deleted = Side::new(&database, "deleted").await;
    let mut rewritten = Side::new(&database, "rewritten").await;
    let mut again = Side::new(&database, "again").await;
    let mut gone = Side::new(&database, "gone").await;
    for side in [&mut deleted, &mut rewritten, &mut again, &mut gone] {
        for n in 0..3 {
            side.say(n).await.unwrap();
        }
    }
    server.back_up();
    created.say(0).await.unwrap();
    deleted.saver.delete_thread(&"deleted".into()).await.unwrap();
    rewritten.rewrite().await.unwrap();
    again.saver.delete_thread(&"again".into()).await.unwrap();
    again.talk = Talk::new("again");
    again.say(10).await.unwrap();
    server.restore();
    // Another process deletes one after that, which is no loss.
    open(database.url()).await.delete_thread(&"gone".into()).await.unwrap();
    for (side, left) in [(&mut created, 0), (&mut deleted, 3), (&mut rewritten, 3), (&mut again, 3)] {
        let thread = side.talk.thread.clone();
        is_lost(&side.read().await, &thread);
        assert_eq!(side.read().await.unwrap().len(), left, "{thread}");
    }
    assert_eq!(gone.read().await.unwrap().len(), 0);
    gone.talk = Talk::new("gone");
    gone.say(0).await.unwrap();
}

/// A crash may lose what waits for a flush, and that is no error; but a later flush of it is.
#[tokio::test(flavor = "multi_thread")]
async fn a_flush_of_what_is_gone_is_not_acknowledged() {
    let server = Server::start();
    let database = server.database().await;
    let mut side = Side::new(&database, "t").await;
    side.say(0).await.unwrap();
    server.back_up();
    side.say_unflushed(1).await.unwrap();
    server.restore();
    is_lost(&side.saver.flush(&"t".into()).await, &"t".into());
    assert_eq!(side.read().await.unwrap(), content(&[0]));
    side.saver.flush(&"t".into()).await.unwrap();
    side.say(2).await.unwrap();
    assert_eq!(side.read().await.unwrap(), content(&[0, 2]));
}

/// What happens to a thread between a loss and the flush of what was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Between {
    Read,
    WrittenByAnother,
    Rewritten,
    /// It was lost as a whole.
    BegunByAnother,
}

/// The same after other calls: the remaining history that they found is flushed, which says nothing of what is to be
/// flushed now.
#[tokio::test(flavor = "multi_thread")]
async fn a_flush_of_what_is_gone_is_not_acknowledged_after_other_calls() {
    use Between::{BegunByAnother, Read, Rewritten, WrittenByAnother};
    let server = Server::start();
    let database = server.database().await;
    let mut cases = Vec::new();
    for case in [Read, WrittenByAnother, Rewritten, BegunByAnother] {
        let mut side = Side::new(&database, &format!("{case:?}")).await;
        if case != BegunByAnother {
            side.say(0).await.unwrap();
        }
        cases.push((case, side));
    }
    server.back_up();
    for (_, side) in &mut cases {
        side.say_unflushed(1).await.unwrap();
    }
    server.restore();
    for (case, mut side) in cases {
        let thread = side.talk.thread.clone();
        let mut other = Side::new(&database, thread.as_str()).await;
        let mut left = other.read().await.unwrap();
        match case {
            Read => {}
            WrittenByAnother | BegunByAnother => {
                other.say(900).await.unwrap();
                left.extend(content(&[900]));
            }
            Rewritten => side.rewrite().await.unwrap(),
        }
        // A loss that the caller allowed is no error of a read.
        assert_eq!(side.read().await.unwrap(), left, "{case:?}");
        is_lost(&side.saver.flush(&thread).await, &thread);
        // Reported once.
        side.saver.flush(&thread).await.unwrap();
        side.say(3).await.unwrap();
        left.extend(content(&[3]));
        assert_eq!(side.read().await.unwrap(), left, "{case:?}");
    }
}

/// A rewrite leaves nothing of a thread to write with; what is known to be flushed is still known.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_thread_that_was_rewritten_is_not_begun_again_without_a_report() {
    let server = Server::start();
    let database = server.database().await;
    server.back_up();
    let mut side = Side::new(&database, "t").await;
    side.say(0).await.unwrap();
    side.say(1).await.unwrap();
    side.rewrite().await.unwrap();
    server.restore();
    // Opens a connection: a commit on one that the crash closed is in doubt, and its repeat looks at the thread anyway.
    side.saver.get(&CheckpointSelector::head(&"another".into())).await.unwrap();
    side.talk = Talk::new("t");
    is_lost(&side.say(10).await, &"t".into());
    assert!(side.read().await.unwrap().is_empty());
    side.say(11).await.unwrap();
    assert_eq!(side.read().await.unwrap(), content(&[11]));
}

/// A revision identifies one state of a thread, whatever was lost and redone.
#[tokio::test(flavor = "multi_thread")]
async fn a_revision_never_comes_back() {
    let server = Server::start();
    let database = server.database().await;
    let mut seen = std::collections::HashSet::new();
    let mut side = Side::new(&database, "t").await;
    side.say(0).await.unwrap();
    server.back_up();
    for round in 0..3 {
        let mut side = Side::new(&database, "t").await;
        side.read().await.unwrap();
        for n in 0..3 {
            side.say(10 * round + n).await.unwrap();
            let image = side.saver.read_thread(&"t".into()).await.unwrap();
            assert!(seen.insert(image.revision), "round {round}, write {n}");
        }
        server.restore();
    }
}

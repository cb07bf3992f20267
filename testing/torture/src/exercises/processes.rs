//! Two processes on one store: both add to one thread, and nothing that was acknowledged to either is missing.
//!
//! On SQLite a third process keeps writing and moving the log into the file, and the store is opened again and again
//! meanwhile: opening a healthy file never fails.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, ensure};
use rusqlite::{Connection, OpenFlags};
use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep::mode::ChannelMode;
use threadkeep::state::StateAccessor;
use threadkeep_sqlite::SqliteSaver;

use crate::actor::{accessor, say, texts, verified};
use crate::child::{self, Child, Work};
use crate::exercise::{About, Turn};
use crate::storage::{Kind, PATIENCE, Storage, sqlite_options};

/// What it tries, and what each run of it does.
pub const ABOUT: About = About {
    what: "two processes on one store; opens beside constant checkpoints",
    needs: &["commits", "opens", "states"],
};

/// The thread that all processes add to.
const SHARED: &str = "shared";

/// The least that a file is opened beside the processes, however late that begins.
const OPENS: usize = 60;

/// Adds a message to the shared thread; retries after losing a race for the head.
pub async fn say_for_sure(accessor: &StateAccessor, text: &str) -> threadkeep::Result<()> {
    loop {
        match say(accessor, &SHARED.into(), text).await {
            Err(Error::Conflict { .. }) => {}
            other => return other.map(drop),
        }
    }
}

/// Writes to an SQLite file and moves its log into it, until the process is killed.
///
/// # Errors
/// The driver's; none is expected.
pub fn checkpoint_for_ever(path: &Path) -> anyhow::Result<()> {
    let db = threadkeep_pages::open(path, OpenFlags::default())?;
    db.busy_timeout(PATIENCE)?;
    // Not one of our tables; the first page changes all the same, because it counts the free pages. The schema must not
    // change in the loop: SQLite prepares a statement at most 50 times before it gives up with "database schema has
    // changed", whichever VFS it uses.
    db.execute_batch("CREATE TABLE IF NOT EXISTS beside (bytes)")?;
    child::say("ready");
    loop {
        db.execute_batch("INSERT INTO beside VALUES (zeroblob(40000)); DELETE FROM beside")?;
        checkpoint(&db)?;
    }
}

/// Stops the opening, however the turn ends.
struct Over(Arc<AtomicBool>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Opens a file and reads it, again and again. Returns how often.
fn open_until(path: &Path, done: &AtomicBool) -> rusqlite::Result<usize> {
    let mut count = 0;
    while count < OPENS || !done.load(Ordering::SeqCst) {
        let db = threadkeep_pages::open(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
        db.busy_timeout(PATIENCE)?;
        let _: i64 = db.query_row("SELECT count(*) FROM checkpoint", [], |row| row.get(0))?;
        count += 1;
    }
    Ok(count)
}

fn checkpoint(db: &Connection) -> rusqlite::Result<i64> {
    db.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| row.get(0))
}

/// Lets two processes share a store for a while.
///
/// # Errors
/// What was lost, or the error that a healthy store gave.
pub async fn run(turn: Turn) -> anyhow::Result<()> {
    let place = Storage::new(turn.saver).await?;
    let saver = place.open().await?;
    let ours = accessor(&saver, ChannelMode::Delta, turn.seed)?;
    say_for_sure(&ours, "first").await?;
    let seeds = [turn.seed * 2 + 1, turn.seed * 2 + 2];
    let mut other = Child::start(&turn, Work::Share, &place.address(), seeds[0])?;
    let mut beside = None;
    if turn.saver == Kind::Sqlite {
        let mut child = Child::start(&turn, Work::Checkpoint, &place.address(), 0)?;
        ensure!(child.hear().await? == "ready");
        beside = Some(child);
    }
    let done = Arc::new(AtomicBool::new(false));
    let _over = Over(done.clone());
    let opening = beside.is_some().then(|| {
        let (path, done) = (place.file(), done.clone());
        tokio::task::spawn_blocking(move || open_until(&path, &done))
    });
    let mut promised = BTreeSet::from(["first".to_owned()]);
    promised.insert(other.hear().await?);
    let rounds = 20 * turn.effort;
    for n in 0..rounds {
        let text = format!("{}/{n}", seeds[1]);
        say_for_sure(&ours, &text).await?;
        promised.insert(text);
        let reader = place.open().await.context("opening beside another process")?;
        let cold = accessor(&reader, ChannelMode::Delta, 0)?;
        let head = cold.get(&SHARED.into(), None).await?.context("the thread is not there")?;
        let read: BTreeSet<_> = texts(&head)?.into_iter().collect();
        ensure!(promised.is_subset(&read), "missing: {:?}", promised.difference(&read));
        turn.tally.add("opens", 1);
        turn.tally.add("states", 1);
    }
    done.store(true, Ordering::SeqCst);
    if let Some(opening) = opening {
        turn.tally.add("opens", opening.await?.context("opening beside checkpoints")?);
    }
    promised.extend(other.kill().await?.into_iter().filter(|line| line.contains('/')));
    if let Some(beside) = beside {
        beside.kill().await?;
    }
    let cold = accessor(&saver, ChannelMode::Delta, 0)?;
    let thread = ThreadId::from(SHARED);
    let head = cold.get(&thread, None).await?.context("the thread is not there")?;
    let all = texts(&head)?;
    let read: BTreeSet<_> = all.iter().cloned().collect();
    ensure!(read.len() == all.len(), "something was said twice: {all:?}");
    ensure!(promised.is_subset(&read), "missing: {:?}", promised.difference(&read));
    // The last one may have been stored before it was printed.
    ensure!(read.len() <= promised.len() + 1, "from nowhere: {:?}", read.difference(&promised));
    turn.tally.add("commits", all.len());
    verified(&*saver, &thread).await?;
    if turn.saver == Kind::Sqlite {
        let store = Arc::new(SqliteSaver::open(place.file(), &sqlite_options())?);
        let found = store.check().await?;
        ensure!(found.is_empty(), "check: {}", found[0]);
    }
    Ok(())
}

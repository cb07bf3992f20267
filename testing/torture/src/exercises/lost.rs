//! Stores that go back to an older state under living writers: what was acknowledged, and flushed, is gone.
//!
//! Postgres: a standby takes over that lacks the last commits, or a copy of the server's files is restored. Each writer
//! whose thread lost something gets a report before anything more is acknowledged to it there; then it goes on from what is
//! there. Without a report, nobody appends to a history that lacks what it knows.
//!
//! SQLite: an older backup takes the place of the file. Every commit is refused until the store is opened again.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::Saver;
use threadkeep::state::StateAccessor;
use threadkeep_postgres::setup;
use threadkeep_sqlite::SqliteSaver;
use threadkeep_testing::{BoxError, Cluster, Postgres, Replication};
use tokio::task::spawn_blocking;

use crate::actor::{accessor, say, texts, verified};
use crate::exercise::{About, Turn};
use crate::storage::{HUNG, Kind, open_at, postgres_options, scratch, sqlite_options};
use crate::trace::Recorder;
use crate::vfs;

/// What it tries, and what each run of it does.
pub const ABOUT: About = About {
    what: "a lagging standby takes over, or an older copy is restored, under writers that live on",
    needs: &["commits", "lost commits", "states"],
};

/// Commits of a writer between two events. Few enough that the row of a thread still lists what the others knew.
const QUOTA: usize = 3;
/// Before what was refused is tried again.
const PAUSE: Duration = Duration::from_millis(5);
/// Two savers write to one thread, and each to one of its own.
const PLACES: [(usize, &str); 4] = [(0, "shared"), (1, "shared"), (0, "one"), (1, "two")];

/// With the directory of the files as the first argument.
const BACK_UP: &str = r#"rm -rf "$1.backup" && cp -a "$1" "$1.backup" && rm -f "$1.backup/postmaster.pid""#;
const RESTORE: &str = r#"rm -rf "$1" && cp -a "$1.backup" "$1""#;

type Threads = BTreeMap<ThreadId, Vec<String>>;

/// Lets some stores go back.
///
/// # Errors
/// What was acknowledged on a lost history, or was wrong afterwards.
pub async fn run(turn: Turn) -> anyhow::Result<()> {
    match turn.saver {
        Kind::Memory => bail!("a store in memory has no older state"),
        Kind::Sqlite => replaced(&turn).await,
        Kind::Postgres => {
            let cluster = blocking(|| Cluster::start(Replication::Asynchronous)).await?;
            let url = cluster.url("postgres");
            setup(&url, &postgres_options()).await?;
            gone_back(&turn, Server::Followed(cluster), &url).await?;
            let server = blocking(Postgres::start).await?;
            let url = server.url("postgres");
            setup(&url, &postgres_options()).await?;
            gone_back(&turn, Server::Copied(server), &url).await
        }
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, BoxError> + Send + 'static,
) -> anyhow::Result<T> {
    spawn_blocking(work).await?.map_err(anyhow::Error::from_boxed)
}

/// How a server goes back.
enum Server {
    /// Its standby takes over.
    Followed(Cluster),
    /// A copy of its files is restored.
    Copied(Postgres),
}

impl Server {
    /// What is acknowledged from now on will be lost.
    fn begin_to_lose(&self) -> Result<(), BoxError> {
        match self {
            Self::Followed(cluster) => {
                cluster.wait_until_standby_has_everything()?;
                cluster.hold_replication()
            }
            Self::Copied(server) => while_stopped(server, BACK_UP),
        }
    }

    fn lose(&self) -> Result<(), BoxError> {
        match self {
            Self::Followed(cluster) => {
                cluster.kill_primary()?;
                cluster.promote()
            }
            Self::Copied(server) => while_stopped(server, RESTORE),
        }
    }

    fn mend(&self) -> Result<(), BoxError> {
        match self {
            Self::Followed(cluster) => cluster.rebuild(),
            Self::Copied(_) => Ok(()),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Followed(_) => "failovers to a lagging standby",
            Self::Copied(_) => "restored copies",
        }
    }
}

fn while_stopped(server: &Postgres, script: &str) -> Result<(), BoxError> {
    server.crash()?;
    let done = Command::new("/bin/sh").args(["-ec", script, "copy"]).arg(server.data()?).status()?;
    if !done.success() {
        return Err(format!("{script}: {done}").into());
    }
    server.resume()
}

/// Takes commits from the writers on a server, again and again.
async fn gone_back(turn: &Turn, server: Server, url: &str) -> anyhow::Result<()> {
    let server = Arc::new(server);
    let act = |act: fn(&Server) -> Result<(), BoxError>| {
        let server = server.clone();
        blocking(move || act(&server))
    };
    let savers = [open_at(Kind::Postgres, url).await?, open_at(Kind::Postgres, url).await?];
    let mut writers = writers(&savers, turn.seed)?;
    for _ in 0..2 * turn.effort {
        writers = all_write(writers, false).await?;
        act(Server::begin_to_lose).await?;
        let kept = look(turn, url, &writers).await?;
        writers = all_write(writers, false).await?;
        let known = look(turn, url, &writers).await?;
        // Some of these are under way meanwhile.
        let (written, lost) = tokio::join!(all_write(writers, true), act(Server::lose));
        lost?;
        writers = all_write(written?, true).await?;
        let left = look(turn, url, &writers).await?;
        turn.tally.add(server.name(), 1);
        compare(turn, &kept, &known, &left)?;
        for writer in &mut writers {
            ensure!(
                writer.reports > 0,
                "{}: writer {} got no report of the loss",
                writer.thread,
                writer.number
            );
            turn.tally.add("reports", std::mem::take(&mut writer.reports));
        }
        act(Server::mend).await?;
    }
    turn.tally.add("commits", writers.iter().map(|writer| writer.acknowledged).sum());
    Ok(())
}

/// Fails unless the store went back exactly as it was made to.
fn compare(turn: &Turn, kept: &Threads, known: &Threads, left: &Threads) -> anyhow::Result<()> {
    for (thread, left) in left {
        let (kept, known) = (&kept[thread], &known[thread]);
        ensure!(left.starts_with(kept), "{thread} reads {left:?}; the older state was {kept:?}");
        let lost = known.iter().filter(|text| !left.contains(text)).count();
        ensure!(
            lost == known.len() - kept.len(),
            "{thread} reads {left:?}, and read {known:?}: not all is lost"
        );
        ensure!(lost > 0, "{thread}: nothing was lost, so nothing was tried");
        turn.tally.add("lost commits", lost);
    }
    Ok(())
}

/// Replaces the file of a store by an older backup, again and again.
async fn replaced(turn: &Turn) -> anyhow::Result<()> {
    let directory = scratch()?;
    let _unflushed = vfs::record(directory.path(), Arc::new(Recorder::default()))?;
    let (path, backup) = (directory.path().join("checkpoints.db"), directory.path().join("backup.db"));
    let open = || SqliteSaver::open(&path, &sqlite_options()).map(Arc::new);
    let address = path.display().to_string();
    let mut stores = [open()?, open()?];
    let mut all = writers(&shared(&stores), turn.seed)?;
    for round in 0..5 * u64::from(turn.effort) {
        all = all_write(all, false).await?;
        let kept = look(turn, &address, &all).await?;
        stores[0].backup(&backup).await?;
        all = all_write(all, false).await?;
        let known = look(turn, &address, &all).await?;
        replace(&path, &backup)?;
        for writer in &mut all {
            for _ in 0..QUOTA {
                writer.is_refused().await?;
                turn.tally.add("refusals", 1);
            }
        }
        for store in &stores {
            store.close().await;
        }
        stores = [open()?, open()?];
        // Other seeds, because the old ones would make the same ids again.
        for (writer, fresh) in all.iter_mut().zip(writers(&shared(&stores), turn.seed ^ ((round + 1) << 32))?)
        {
            writer.engine = fresh.engine;
            // The refusals were the report.
            writer.known.clear();
        }
        all = all_write(all, false).await?;
        let left = look(turn, &address, &all).await?;
        turn.tally.add("replaced files", 1);
        compare(turn, &kept, &known, &left)?;
    }
    turn.tally.add("commits", all.iter().map(|writer| writer.acknowledged).sum());
    for store in &stores {
        let damage: Vec<_> = store.check().await?.into_iter().filter(|finding| !finding.orphan).collect();
        ensure!(damage.is_empty(), "check: {}", damage[0]);
        store.close().await;
    }
    Ok(())
}

fn shared(stores: &[Arc<SqliteSaver>; 2]) -> [Arc<dyn Saver>; 2] {
    stores.each_ref().map(|store| -> Arc<dyn Saver> { store.clone() })
}

/// As an operator does who takes the store for closed.
fn replace(path: &Path, backup: &Path) -> std::io::Result<()> {
    for end in ["-wal", "-shm"] {
        std::fs::remove_file(PathBuf::from(format!("{}{end}", path.display())))?;
    }
    std::fs::rename(backup, path)
}

/// Writes to one thread through one saver, and remembers what it was promised.
struct Writer {
    number: usize,
    engine: StateAccessor,
    thread: ThreadId,
    /// What it knows to be there, since a loss was reported to it.
    known: Vec<String>,
    refused: HashSet<String>,
    said: usize,
    acknowledged: usize,
    reports: usize,
}

fn writers(savers: &[Arc<dyn Saver>; 2], seed: u64) -> anyhow::Result<Vec<Writer>> {
    let mut writers = Vec::new();
    for (number, (saver, thread)) in PLACES.into_iter().enumerate() {
        writers.push(Writer {
            number,
            engine: accessor(&savers[saver], ChannelMode::Delta, seed * 8 + number as u64)?,
            thread: thread.into(),
            known: Vec::new(),
            refused: HashSet::new(),
            said: 0,
            acknowledged: 0,
            reports: 0,
        });
    }
    Ok(writers)
}

/// Lets each writer commit a few times, all at once. `may_lose` says that a loss may be reported.
async fn all_write(writers: Vec<Writer>, may_lose: bool) -> anyhow::Result<Vec<Writer>> {
    let writing: Vec<_> = writers.into_iter().map(|writer| tokio::spawn(writer.write(may_lose))).collect();
    let mut written = Vec::new();
    for writer in writing {
        written.push(tokio::time::timeout(HUNG, writer).await.context("a writer hangs")???);
    }
    Ok(written)
}

impl Writer {
    fn text(&mut self) -> String {
        self.said += 1;
        format!("{}/{}", self.number, self.said)
    }

    async fn write(mut self, may_lose: bool) -> anyhow::Result<Self> {
        let mut left = QUOTA;
        while left > 0 {
            let text = self.text();
            match say(&self.engine, &self.thread, &text).await {
                Ok(state) => {
                    let found = texts(&state)?;
                    ensure!(
                        found.starts_with(&self.known) && found.last() == Some(&text),
                        "{}: {text} was acknowledged on {found:?}, and no report said that {:?} is lost",
                        self.thread,
                        self.known
                    );
                    self.known = found;
                    self.acknowledged += 1;
                    left -= 1;
                }
                Err(error @ Error::HistoryLost { .. }) => {
                    ensure!(may_lose, "nothing was lost: {error}");
                    self.known.clear();
                    self.reports += 1;
                }
                // It may be there.
                Err(Error::InDoubt { .. }) => {}
                // The other one on this thread came first, or nothing was written.
                Err(Error::Conflict { .. } | Error::Unavailable { .. }) => {
                    self.refused.insert(text);
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(self)
    }

    /// Fails unless a commit is refused.
    async fn is_refused(&mut self) -> anyhow::Result<()> {
        let text = self.text();
        match say(&self.engine, &self.thread, &text).await.map(drop) {
            Err(Error::Unavailable { .. }) => {
                self.refused.insert(text);
                Ok(())
            }
            other => bail!("{}: the answer on a replaced file was {other:?}", self.thread),
        }
    }
}

/// Reads the threads as a process does that knows nothing: they have what the writers know, and are whole.
async fn look(turn: &Turn, address: &str, writers: &[Writer]) -> anyhow::Result<Threads> {
    let saver = open_at(turn.saver, address).await?;
    let cold = accessor(&saver, ChannelMode::Delta, 0)?;
    let mut threads = Threads::new();
    for Writer { thread, known, refused, .. } in writers {
        let head = cold.get(thread, None).await?;
        let read = head.as_ref().map(texts).transpose()?.unwrap_or_default();
        ensure!(read.starts_with(known), "{thread} reads {read:?}; without a report, {known:?} is there");
        let once: BTreeSet<_> = read.iter().collect();
        ensure!(once.len() == read.len(), "{thread}: something is there twice: {read:?}");
        let wrong = read.iter().find(|text| refused.contains(*text));
        ensure!(wrong.is_none(), "{thread}: {wrong:?} was refused and is there");
        verified(&*saver, thread).await?;
        turn.tally.add("states", 1);
        threads.insert(thread.clone(), read);
    }
    Ok(threads)
}

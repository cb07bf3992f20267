//! Power loss: the work is recorded once, then the power is lost at each of its flushes, and in between.
//!
//! Each image must open, hold what was acknowledged as flushed and only whole later writes, pass every check, and
//! accept a further commit. Plain SQLite, without our page checksums, reads the same image for comparison.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use rusqlite::{Connection, OpenFlags};
use threadkeep::id::ThreadId;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::Saver;
use threadkeep_conformance::Naive;
use threadkeep_sqlite::{Options, SqliteSaver};

use crate::actor::{Actor, Book, accessor, book_of, compare, read_back, say};
use crate::disk::{self, Disk};
use crate::exercise::{About, Tally, Turn};
use crate::storage::{scratch, sqlite_options};
use crate::trace::{Event, Recorder};
use crate::vfs;
use crate::witness::Witness;

/// What it tries, and what each run of it does.
pub const ABOUT: About = About {
    what: "the power goes at each flush and between; any unflushed sectors are kept, lost or torn",
    needs: &["flushes", "images", "states"],
};

const FILE: &str = "db";
/// SQLite's own VFS, without ours and the driver's.
const PLAIN: &std::ffi::CStr = c"unix";

/// The recorded work.
struct Recorded {
    events: Vec<Event>,
    /// What the model held before the first write, and after each one.
    past: Vec<Naive>,
    ever: Book,
}

/// Records some work, and checks images of it.
///
/// # Errors
/// How many images were wrong, and what was wrong with the first one.
pub async fn run(turn: Turn) -> anyhow::Result<()> {
    let steps = 30 + 10 * usize::try_from(turn.seed % 7)?;
    let recorded = record(turn.seed, steps).await?;
    let syncs = recorded.events.iter().filter(|event| matches!(event, Event::Sync { .. })).count();
    turn.tally.add("flushes", syncs);
    let mut rng = StdRng::seed_from_u64(turn.seed ^ 0x5eed);
    let points = points(&recorded.events, 100 * turn.effort as usize, &mut rng);
    let (mut disk, mut wrong, mut first) = (Disk::default(), 0, None);
    for (at, event) in recorded.events.iter().enumerate() {
        for n in 0..points.get(&at).copied().unwrap_or_default() {
            let image = disk.image(&mut rng);
            turn.tally.add("images", 1);
            let checked = check(&image, &disk, &recorded, &turn.tally).await;
            if let Err(error) = checked {
                wrong += 1;
                let before = event_name(event);
                first.get_or_insert(error.context(format!("image {n} before event {at} ({before})")));
            }
        }
        disk.follow(event);
    }
    match first {
        Some(error) => Err(error.context(format!("{wrong} images are wrong; the first"))),
        None => Ok(()),
    }
}

fn event_name(event: &Event) -> String {
    match event {
        Event::Write { file, at, bytes } => format!("write of {} bytes at {at} of file {file}", bytes.len()),
        other => format!("{other:?}"),
    }
}

/// How many images are made before which event: at each flush first, then anywhere.
fn points(events: &[Event], budget: usize, rng: &mut StdRng) -> BTreeMap<usize, usize> {
    let of = |wanted: &dyn Fn(&Event) -> bool| -> Vec<usize> {
        events.iter().enumerate().filter(|(_, event)| wanted(event)).map(|(at, _)| at).collect()
    };
    let flushes = of(&|event| matches!(event, Event::Sync { .. }));
    let changes =
        of(&|event| matches!(event, Event::Write { .. } | Event::Truncate { .. } | Event::Delete { .. }));
    let mut points = BTreeMap::new();
    for n in 0..budget {
        let from = if n % 3 == 2 { &changes } else { &flushes };
        if !from.is_empty() {
            *points.entry(from[rng.random_range(0..from.len())]).or_default() += 1;
        }
    }
    points
}

async fn record(seed: u64, steps: usize) -> anyhow::Result<Recorded> {
    let directory = scratch()?;
    let recorder = Arc::new(Recorder::keeping());
    let recording = vfs::record(directory.path(), recorder.clone())?;
    let path = directory.path().join(FILE);
    let mut saver = Arc::new(SqliteSaver::open(&path, &sqlite_options())?);
    let seen = Arc::new(Witness::new(saver.clone(), Some(recorder.clone())));
    let mut actor = Actor::new(seen.clone(), seed)?;
    for step in 0..steps {
        actor.step().await.with_context(|| format!("step {step}"))?;
        if step % 17 == 16 {
            // The log moves into the file, which is opened again.
            saver.close().await;
            saver = Arc::new(SqliteSaver::open(&path, &sqlite_options())?);
            seen.reopened(saver.clone());
        }
    }
    saver.close().await;
    seen.agreed().await?;
    drop(recording);
    Ok(Recorded { events: recorder.take(), past: seen.past().await, ever: actor.ever })
}

async fn check(
    image: &BTreeMap<String, Vec<u8>>,
    disk: &Disk,
    recorded: &Recorded,
    tally: &Tally,
) -> anyhow::Result<()> {
    let ours = scratch()?;
    let plain = scratch()?;
    disk::write(image, ours.path())?;
    disk::write(image, plain.path())?;
    let _unflushed = vfs::record(ours.path(), Arc::new(Recorder::default()))?;
    let by_plain = by_plain_sqlite(&plain.path().join(FILE));
    let by_us = by_us(&ours.path().join(FILE), disk, recorded, tally).await;
    match (by_us, by_plain) {
        (Ok(count), Ok(also)) => ensure!(count == also, "{count} checkpoints, and {also} for plain SQLite"),
        (Err(error), Ok(_)) => return Err(error.context("plain SQLite reads it")),
        (Ok(_), Err(error)) => bail!("we read it, plain SQLite does not: {error}"),
        (Err(error), Err(_)) => return Err(error.context("plain SQLite fails too")),
    }
    Ok(())
}

/// Returns the number of checkpoints.
fn by_plain_sqlite(path: &Path) -> anyhow::Result<usize> {
    let db = Connection::open_with_flags_and_vfs(path, OpenFlags::default(), PLAIN)?;
    let tables: i64 =
        db.query_row("SELECT count(*) FROM sqlite_schema WHERE name = 'checkpoint'", [], |row| row.get(0))?;
    if tables == 0 {
        return Ok(0);
    }
    let verdict: String = db.query_row("PRAGMA integrity_check", [], |row| row.get(0))?;
    ensure!(verdict == "ok", "integrity_check: {verdict}");
    let count: i64 = db.query_row("SELECT count(*) FROM checkpoint", [], |row| row.get(0))?;
    Ok(usize::try_from(count)?)
}

async fn by_us(path: &Path, disk: &Disk, recorded: &Recorded, tally: &Tally) -> anyhow::Result<usize> {
    let options = Options { readers: 1, ..sqlite_options() };
    let saver = Arc::new(SqliteSaver::open(path, &options).context("it does not open")?);
    let checked = whole(&saver, disk, recorded, tally).await;
    saver.close().await;
    checked
}

async fn whole(
    saver: &Arc<SqliteSaver>,
    disk: &Disk,
    recorded: &Recorded,
    tally: &Tally,
) -> anyhow::Result<usize> {
    let (promised, began) = (disk.promised, disk.began);
    let mut why = None;
    let mut found = None;
    for n in (promised..=began).rev() {
        match compare(&**saver, &recorded.past[n]).await {
            Ok(count) => {
                found = Some((n, count));
                break;
            }
            Err(error) => why = Some(error),
        }
    }
    let Some((n, count)) = found else {
        let why = why.context("nothing was begun")?;
        return Err(
            why.context(format!("it holds none of the states {promised} to {began}; the first of them"))
        );
    };
    tally.add("writes lost that may be", began - n);
    let left = book_of(&recorded.past[n], &recorded.ever)?;
    let shared: Arc<dyn Saver> = saver.clone();
    tally.add("states", read_back(&shared, &left).await?);
    let damage: Vec<_> = saver.check().await?.into_iter().filter(|finding| !finding.orphan).collect();
    ensure!(damage.is_empty(), "check: {}", damage[0]);
    let after = accessor(&shared, ChannelMode::Delta, 99)?;
    let threads: BTreeSet<_> = left.keys().map(|(thread, _)| thread.clone()).take(1).collect();
    for thread in threads.into_iter().chain([ThreadId::from("after")]) {
        let said = say(&after, &thread, "after the power came back").await.context("a further commit")?;
        let read = accessor(&shared, ChannelMode::Delta, 0)?.get(&thread, None).await?;
        ensure!(read.is_some_and(|read| read.key == said.key), "a further commit is not the head");
    }
    Ok(count)
}

//! Two properties under random work: no put changes an applied child, and no revision repeats.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::json;
use threadkeep::checkpoint::{CheckpointKey, INTERRUPT_CHANNEL, RESUME_CHANNEL, TaskWrites, Write};
use threadkeep::id::ThreadId;
use threadkeep::saver::{Rewrite, Saver, ThreadImage};
use threadkeep::value::ChannelValue;

use crate::actor::{Actor, read_back};
use crate::exercise::{About, Turn};
use crate::storage::Storage;

/// What it tries, and what each run of it does.
pub const ABOUT: About = About {
    what: "late puts to applied tasks change no state; no revision comes back",
    needs: &["states", "late puts", "revisions"],
};

/// The texts of notes. Few, so that contents repeat, which revisions must not.
const NOTES: [&str; 3] = ["first first first first first", "SECOND SECOND SECOND SECOND", "a third one"];

/// Checks both properties after each of a number of steps.
///
/// # Errors
/// What repeated, or what changed.
pub async fn run(turn: Turn) -> anyhow::Result<()> {
    let place = Storage::new(turn.saver).await?;
    let saver = place.open().await?;
    let mut actor = Actor::new(saver.clone(), turn.seed)?;
    let mut rng = StdRng::seed_from_u64(turn.seed ^ 0x9e7);
    // For each thread: its current revision, and all earlier ones.
    let mut now: BTreeMap<ThreadId, String> = BTreeMap::new();
    let mut before: BTreeSet<(ThreadId, String)> = BTreeSet::new();
    for step in 0..40 * turn.effort {
        actor.step().await?;
        let threads: BTreeSet<ThreadId> = actor.book.keys().map(|(thread, _)| thread.clone()).collect();
        for thread in threads {
            let image = saver.read_thread(&thread).await?;
            remember(&image, &mut now, &mut before).with_context(|| format!("step {step}"))?;
            match rng.random_range(0..6) {
                0 => put_late(&turn, &saver, &image, &mut rng).await?,
                1 => note(&saver, image, &mut rng).await?,
                _ => continue,
            }
            let image = saver.read_thread(&thread).await?;
            remember(&image, &mut now, &mut before).with_context(|| format!("step {step}"))?;
        }
        turn.tally.add("states", read_back(&saver, &actor.book).await?);
    }
    turn.tally.add("revisions", before.len());
    Ok(())
}

/// Fails if a thread returns to an earlier revision.
fn remember(
    image: &ThreadImage,
    now: &mut BTreeMap<ThreadId, String>,
    before: &mut BTreeSet<(ThreadId, String)>,
) -> anyhow::Result<()> {
    let revision = format!("{:?}", image.revision);
    let last = now.insert(image.thread.clone(), revision.clone());
    if last.as_ref() != Some(&revision) && !image.checkpoints.is_empty() {
        let new = before.insert((image.thread.clone(), revision.clone()));
        ensure!(new, "thread {} has {revision} again, last {last:?}", image.thread);
    }
    Ok(())
}

/// Puts more writes for a task that a child has applied.
async fn put_late(
    turn: &Turn,
    saver: &Arc<dyn Saver>,
    image: &ThreadImage,
    rng: &mut StdRng,
) -> anyhow::Result<()> {
    let applied: Vec<_> = image
        .checkpoints
        .values()
        .filter_map(|tuple| Some((tuple.parent?, tuple)))
        .flat_map(|(parent, tuple)| tuple.checkpoint.applied.iter().map(move |task| (parent, tuple, *task)))
        .collect();
    let Some((parent, tuple, task)) = applied.choose(rng).copied() else { return Ok(()) };
    let at = CheckpointKey { thread: image.thread.clone(), namespace: tuple.namespace.clone(), id: parent };
    let late = ChannelValue::from_json(&json!([{ "type": "ai", "id": "late", "content": "LATE" }]))?;
    let special = ChannelValue::from_json(&json!("x"))?;
    let write = |channel: &str, value: &ChannelValue| Write {
        channel: channel.into(),
        value: value.clone(),
        overwrite: false,
    };
    let choices = [
        vec![write("messages", &late)],
        vec![write(RESUME_CHANNEL, &special)],
        vec![write(INTERRUPT_CHANNEL, &special)],
        vec![write(RESUME_CHANNEL, &special), write("messages", &late)],
        vec![],
    ];
    for _ in 0..2 {
        let writes = choices.choose(rng).cloned().unwrap_or_default();
        let row = TaskWrites { task, node: "worker".into(), index: 0, writes };
        saver.put_writes(&at, &row).await?;
        turn.tally.add("late puts", 1);
    }
    Ok(())
}

/// Gives a checkpoint another note, or none.
async fn note(saver: &Arc<dyn Saver>, image: ThreadImage, rng: &mut StdRng) -> anyhow::Result<()> {
    let all: Vec<_> = image.checkpoints.into_values().collect();
    let Some(mut tuple) = all.choose(rng).cloned() else { return Ok(()) };
    let mut extra = tuple.metadata.extra.to_map();
    extra.remove("note");
    if rng.random_bool(0.7) {
        extra.insert("note".to_owned(), json!(NOTES.choose(rng)));
    }
    tuple.metadata.extra = extra.into();
    let rewrite = Rewrite { put: vec![tuple], ..Rewrite::default() };
    saver.rewrite_thread(&image.thread, &image.revision, rewrite).await?;
    Ok(())
}

//! Conversions while writers are open: either order works, or the writer gets an error and changes nothing.
//!
//! A writer opens a checkpoint in one mode; the thread is converted to the other mode, or pruned; the writer commits.
//! Afterwards every checkpoint reads as before, and `verify` finds nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Map, json};
use threadkeep::Error;
use threadkeep::convert::convert;
use threadkeep::deletion::{Boundary, Keep, Prune, prune};
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::metadata::Source;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::Saver;
use threadkeep::state::{HistoryQuery, StateSnapshot};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::verify::verify;

use crate::actor::{accessor, say, table, texts};
use crate::exercise::{About, Turn};
use crate::storage::Storage;

/// What it tries, and what each run of it does.
pub const ABOUT: About = About {
    what: "a thread is converted or pruned under an open writer, a fork, a note or a pending row",
    needs: &["conversions", "states"],
};

/// Converts some threads while they have writers.
///
/// # Errors
/// What reads differently than before.
pub async fn run(turn: Turn) -> anyhow::Result<()> {
    let place = Storage::new(turn.saver).await?;
    let saver = place.open().await?;
    let mut rng = StdRng::seed_from_u64(turn.seed);
    for n in 0..20 * turn.effort {
        let thread = ThreadId::from(format!("t{n}"));
        let mut did = Vec::new();
        let one = convert_one(&turn, &saver, &thread, &mut rng, &mut did).await;
        one.with_context(|| format!("thread {n}: {}", did.join(", then ")))?;
        turn.tally.add("conversions", 1);
    }
    Ok(())
}

fn other(mode: ChannelMode) -> ChannelMode {
    match mode {
        ChannelMode::Full => ChannelMode::Delta,
        ChannelMode::Delta => ChannelMode::Full,
    }
}

async fn convert_one(
    turn: &Turn,
    saver: &Arc<dyn Saver>,
    thread: &ThreadId,
    rng: &mut StdRng,
    did: &mut Vec<String>,
) -> anyhow::Result<()> {
    let mode = if rng.random_bool(0.5) { ChannelMode::Full } else { ChannelMode::Delta };
    let engine = accessor(saver, mode, rng.random())?;
    let mut known: BTreeMap<CheckpointId, Vec<String>> = BTreeMap::new();
    let mut ids = Vec::new();
    for n in 0..rng.random_range(1..8) {
        let state = say(&engine, thread, &format!("said {n}")).await?;
        ids.push(state.key.id);
        known.insert(state.key.id, texts(&state)?);
    }
    did.push(format!("{} steps in {mode} mode", ids.len()));

    let at = rng.random_bool(0.5).then(|| ids[rng.random_range(0..ids.len())]);
    let mut writer = StepWriter::open(&engine, thread, at).await?;
    let head = engine.get(thread, None).await?.context("the head is gone")?;
    let channel = if rng.random_bool(0.5) { "messages" } else { "title" };
    let task = writer.start_task(&"model".into(), 0);
    let value = if channel == "title" { json!("T") } else { json!([{ "type": "ai", "content": "new" }]) };
    let writes = vec![writer.write(channel, value, false)?];
    let when = if rng.random_bool(0.3) { Durability::Now } else { Durability::WithCommit };
    writer.finish_task(task, writes, when).await?;
    did.push(format!("a writer at {at:?} that writes {channel} ({when:?})"));

    let to = other(mode);
    let pruned = rng.random_bool(0.2);
    if pruned {
        let boundary = if rng.random_bool(0.5) { Boundary::KeepSet } else { Boundary::FreshSnapshot };
        let what = Prune { boundary, ..Prune::keeping(Keep::Last(rng.random_range(1..4))) };
        prune(&**saver, thread, &what, engine.table()).await?;
        did.push(format!("{what:?}"));
    } else {
        convert(&**saver, thread, &*table(to)?).await?;
        did.push(format!("a conversion to {to}"));
    }

    let made = if rng.random_bool(0.3) {
        did.push("a note on the head".to_owned());
        let extra = json!({ "writes": { "runtime_run_duration": {} }, "run_durations": { "r": 1 } });
        engine.annotate(&head, extra.as_object().cloned().unwrap_or_default()).await
    } else {
        did.push("the writer's commit".to_owned());
        writer.commit(Source::Loop, vec![], Map::new()).await.cloned()
    };
    match made {
        Ok(state) => {
            turn.tally.add("commits", 1);
            known.insert(state.key.id, texts(&state)?);
        }
        Err(Error::Conflict { .. } | Error::NotFound { .. } | Error::Stale { .. } | Error::ModeMismatch) => {
            did.push("it was refused".to_owned());
            turn.tally.add("refusals", 1);
        }
        Err(error) => return Err(error.into()),
    }
    // A process in delta mode reads everything at once; one in full mode after a later pass.
    expect(turn, saver, thread, ChannelMode::Delta, &known, pruned).await?;
    convert(&**saver, thread, &*table(to)?).await.context("a later pass")?;
    did.push(format!("a conversion to {to}"));
    expect(turn, saver, thread, to, &known, pruned).await?;
    let last = say(&accessor(saver, to, rng.random())?, thread, "goes on").await?;
    known.insert(last.key.id, texts(&last)?);
    expect(turn, saver, thread, to, &known, pruned).await
}

async fn expect(
    turn: &Turn,
    saver: &Arc<dyn Saver>,
    thread: &ThreadId,
    mode: ChannelMode,
    known: &BTreeMap<CheckpointId, Vec<String>>,
    pruned: bool,
) -> anyhow::Result<()> {
    let cold = accessor(saver, mode, 0)?;
    let states = cold.history(thread, HistoryQuery::default()).await?;
    ensure!(pruned || states.len() == known.len(), "{} checkpoints of {}", states.len(), known.len());
    let head = cold.get(thread, None).await?;
    let newest = states.first().map(|state: &StateSnapshot| state.key.id);
    ensure!(head.as_ref().map(|head| head.key.id) == newest, "the head is not the newest checkpoint");
    for state in states.iter().chain(&head) {
        let expected = known.get(&state.key.id).context("a checkpoint that nobody made")?;
        let read = texts(state)?;
        ensure!(read == *expected, "checkpoint {} reads {read:?}, expected {expected:?}", state.key.id);
    }
    turn.tally.add("states", states.len());
    let found = verify(&**saver, thread, &*table(ChannelMode::Delta)?).await?;
    ensure!(found.is_empty(), "verify: {}", found[0]);
    Ok(())
}

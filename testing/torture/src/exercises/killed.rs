//! kill -9 of a committing process: what it reported as acknowledged is stored, and nothing half.
//!
//! The child does what an actor does with the seed. The same actor on the memory saver shows what the store must hold
//! after each write.

use std::sync::Arc;

use anyhow::{Context as _, ensure};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use threadkeep::mode::ChannelMode;
use threadkeep_memory::MemorySaver;

use crate::actor::{Actor, accessor, book_of, compare, read_back, say};
use crate::child::{Child, Work, number};
use crate::exercise::{About, Turn};
use crate::storage::Storage;
use crate::witness::Witness;

/// What it tries, and what each run of it does.
pub const ABOUT: About = About { what: "kill -9 of a committing process", needs: &["kills", "commits"] };

/// Kills one process.
///
/// # Errors
/// What was lost.
pub async fn run(turn: Turn) -> anyhow::Result<()> {
    let place = Storage::new(turn.saver).await?;
    // So that the child dies at work and not at its start.
    drop(place.open().await?);
    let mut child = Child::start(&turn, Work::Act, &place.address_for_mortals(), turn.seed)?;
    let wanted = StdRng::seed_from_u64(turn.seed).random_range(1..60);
    let mut acknowledged = 0;
    while acknowledged < wanted {
        acknowledged = number(&child.hear().await?).context("the child said something else")?;
    }
    let last = child.kill().await?.iter().filter_map(|line| number(line)).max();
    place.left_by_mortals().await?;
    let acknowledged = last.unwrap_or(acknowledged).max(acknowledged);
    turn.tally.add("kills", 1);
    turn.tally.add("commits", acknowledged);

    let seen = Arc::new(Witness::new(Arc::new(MemorySaver::new()), None));
    let mut actor = Actor::new(seen.clone(), turn.seed)?;
    // One more write may have reached the store before its acknowledgement was printed.
    while seen.past().await.len() < acknowledged + 2 {
        actor.step().await?;
    }
    seen.agreed().await?;
    let past = seen.past().await;
    let saver = place.open().await?;
    let mut found = None;
    let mut why = None;
    for n in [acknowledged, acknowledged + 1] {
        match compare(&*saver, &past[n]).await {
            Ok(_) => found = Some(n),
            Err(error) => why = why.or(Some(error)),
        }
    }
    let n = found.ok_or_else(|| {
        let why = why.unwrap_or_else(|| anyhow::anyhow!("nothing to compare"));
        why.context(format!("after write {acknowledged} was acknowledged"))
    })?;
    turn.tally.add("states", read_back(&saver, &book_of(&past[n], &actor.ever)?).await?);
    let after = accessor(&saver, ChannelMode::Delta, turn.seed)?;
    let said = say(&after, &"after".into(), "after the kill").await?;
    ensure!(after.get(&"after".into(), None).await?.is_some_and(|head| head.key == said.key));
    Ok(())
}

//! Storms of creations and deletions, each followed by a commit and a read: every call is before or after the others.
//!
//! A thread is created while others delete it. Afterwards it has exactly what its creator committed, or it does not
//! exist; and the creator's next commit is accepted on what exists, or refused.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::Saver;
use tokio::sync::Barrier;

use crate::actor::{accessor, say, texts, verified};
use crate::exercise::{About, Turn};
use crate::storage::{Kind, Storage};

/// What it tries, and what each run of it does.
pub const ABOUT: About = About {
    what: "a thread is made while others delete it, then written to and read",
    needs: &["storms", "commits", "states"],
};

/// Runs a number of storms.
///
/// # Errors
/// The first state between before and after.
pub async fn run(turn: Turn) -> anyhow::Result<()> {
    let place = Storage::new(turn.saver).await?;
    let handles = [place.open().await?, place.open().await?, place.open().await?];
    let mut rng = StdRng::seed_from_u64(turn.seed);
    for round in 0..50 * turn.effort {
        storm(&turn, &place, &handles, &mut rng, round).await?;
    }
    let fresh = place.open().await?;
    for thread in fresh.threads(None, usize::MAX).await? {
        verified(&*fresh, &thread).await?;
    }
    Ok(())
}

async fn storm(
    turn: &Turn,
    place: &Storage,
    handles: &[Arc<dyn Saver>; 3],
    rng: &mut StdRng,
    round: u32,
) -> anyhow::Result<()> {
    let thread = ThreadId::from(format!("storm {round}"));
    let mode = if rng.random_bool(0.5) { ChannelMode::Full } else { ChannelMode::Delta };
    let maker = accessor(&handles[0], mode, turn.seed ^ u64::from(round) << 32)?;
    if rng.random_bool(0.5) {
        say(&maker, &thread, "an earlier life").await?;
    }
    let deleters = rng.random_range(1..=2);
    let lines = rng.random_range(1..=3_usize);
    let barrier = Arc::new(Barrier::new(deleters + 1));
    let mut deleting = Vec::new();
    for handle in &handles[1..=deleters] {
        let (handle, thread, barrier) = (handle.clone(), thread.clone(), barrier.clone());
        let pause = Duration::from_micros(rng.random_range(0..1500));
        deleting.push(tokio::spawn(async move {
            barrier.wait().await;
            // Shorter than any timer, so that the calls meet at every point of each other.
            let begun = Instant::now();
            while begun.elapsed() < pause {
                tokio::task::yield_now().await;
            }
            handle.delete_thread(&thread).await
        }));
    }
    barrier.wait().await;
    for line in 0..lines {
        // A deletion between the read of the head and the commit is a conflict, and the creator reads again.
        loop {
            match say(&maker, &thread, &format!("line {line}")).await {
                Err(Error::Conflict { .. } | Error::NotFound { .. }) => {}
                other => break drop(other?),
            }
        }
    }
    for deletion in deleting {
        deletion.await??;
    }
    turn.tally.add("storms", 1);
    turn.tally.add("commits", lines);

    // A process that knows nothing and one that took part see the same.
    let fresh = match turn.saver {
        Kind::Postgres => handles[1].clone(),
        Kind::Memory | Kind::Sqlite => place.open().await?,
    };
    let before = look(&fresh, &thread, turn).await?;
    if let Some(read) = &before {
        // A deletion removes a beginning, never something in the middle.
        let all: Vec<_> = std::iter::once("an earlier life".to_owned())
            .chain((0..lines).map(|line| format!("line {line}")))
            .collect();
        ensure!(all.ends_with(read), "{thread} reads {read:?} of {all:?}");
    }
    match say(&maker, &thread, "the end").await {
        Ok(_) => {
            let after = look(&fresh, &thread, turn).await?;
            let mut expected = before.unwrap_or_default();
            expected.push("the end".to_owned());
            ensure!(after.as_ref() == Some(&expected), "{thread} reads {after:?}, expected {expected:?}");
        }
        Err(Error::Conflict { .. } | Error::NotFound { .. }) => {
            bail!("{thread}: a commit on the head that was just read conflicts, and nobody else writes")
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// The content of a thread, or that it does not exist; by every way of reading.
async fn look(saver: &Arc<dyn Saver>, thread: &ThreadId, turn: &Turn) -> anyhow::Result<Option<Vec<String>>> {
    let cold = accessor(saver, ChannelMode::Delta, 0)?;
    let head = cold.get(thread, None).await?;
    let image = saver.read_thread(thread).await?;
    let listed = saver.threads(None, usize::MAX).await?.contains(thread);
    ensure!(
        head.is_some() == listed && image.checkpoints.is_empty() != listed,
        "{thread}: head {}, listed {listed}, {} checkpoints",
        head.is_some(),
        image.checkpoints.len()
    );
    turn.tally.add("states", 1);
    head.as_ref().map(texts).transpose()
}

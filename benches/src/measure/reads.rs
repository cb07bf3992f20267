//! Reads from the open store, in the process that wrote it.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use threadkeep::id::CheckpointId;
use threadkeep::state::{HistoryQuery, StateAccessor, StateSnapshot};

use super::{median, ms};
use crate::case::Case;
use crate::conversation::{Conversation, accessor, messages};
use crate::row::Found;
use crate::store::Store;
use crate::workload::digest;

/// Repeat a read this often, or until this much time has passed.
const TIMES: usize = 20;
const BUDGET: Duration = Duration::from_secs(2);
/// The same for pages of history.
const PAGES: usize = 5;
/// After a page that took longer, larger pages are skipped: a page decodes every message of each of its states, which
/// is billions of bytes for a thread of tens of thousands of messages.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reads through an accessor with nothing cached; only `head_kept_ms` uses the accessor that wrote the thread.
pub(super) async fn read(
    case: &Case,
    store: &Store,
    written: &Conversation,
    found: &mut Found,
) -> Result<()> {
    let fresh = || accessor(case.mode, store.saver.clone());
    let at = |id: Option<CheckpointId>| {
        let (fresh, thread) = (fresh(), written.thread().clone());
        async move { fresh?.get(&thread, id).await?.context("the checkpoint is gone") }
    };
    let head = at(None).await?;
    let list = messages(&head)?;
    found.messages = Some(list.len() as u64);
    found.digest = Some(digest(&list));
    drop(list);
    let parent = head.parent;
    if parent.is_some() {
        found.back_digest = Some(digest(&messages(&at(parent).await?)?));
    }
    found.head_warm_ms = repeat(TIMES, async || messages(&at(None).await?)).await?;
    found.head_state_ms = repeat(TIMES, async || at(None).await).await?;
    let (kept, thread) = (written.accessor(), written.thread());
    found.head_kept_ms = repeat(TIMES, async || Ok(kept.get(thread, None).await?)).await?;
    found.back_warm_ms = repeat(TIMES, async || messages(&at(parent).await?)).await?;

    let page = |limit: usize, before: Option<CheckpointId>| {
        let (fresh, thread) = (fresh(), thread.clone());
        let query = HistoryQuery { limit: Some(limit), before, ..HistoryQuery::default() };
        async move { Ok(fresh?.history(&thread, query).await?) }
    };
    for (limit, slot) in [
        (10, &mut found.list10_ms),
        (50, &mut found.list50_ms),
        (100, &mut found.list100_ms),
        (200, &mut found.list200_ms),
    ] {
        let reading = Instant::now();
        *slot = repeat(PAGES, async || decoded(page(limit, None).await?)).await?;
        if reading.elapsed() > PATIENCE {
            break;
        }
    }
    found.list100_state_ms = repeat(PAGES, async || page(100, None).await).await?;
    let old = oldest_quarter(&fresh()?, written).await?;
    found.list100_old_state_ms = repeat(PAGES, async || page(100, old).await).await?;
    Ok(())
}

/// Decodes every message of every state, as a client that receives the page would.
fn decoded(page: Vec<StateSnapshot>) -> Result<usize> {
    page.iter().map(|state| messages(state).map(|list| list.len())).sum()
}

/// A checkpoint with a quarter of the history before it.
async fn oldest_quarter(accessor: &StateAccessor, written: &Conversation) -> Result<Option<CheckpointId>> {
    let query = HistoryQuery { load: threadkeep::saver::Load::None, ..HistoryQuery::default() };
    let all = accessor.history(written.thread(), query).await?;
    Ok(all.get(all.len() * 3 / 4).map(|state| state.key.id))
}

async fn repeat<T>(times: usize, read: impl AsyncFn() -> Result<T>) -> Result<Option<f64>> {
    let (mut taken, started) = (Vec::new(), Instant::now());
    while taken.len() < times && (taken.is_empty() || started.elapsed() < BUDGET) {
        let reading = Instant::now();
        let value = read().await?;
        taken.push(reading.elapsed());
        drop(value);
    }
    Ok(median(taken).map(ms))
}

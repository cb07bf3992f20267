//! Making a large store: a few conversations are written step by step, and copied under many names.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _};
use serde_json::json;
use threadkeep::deletion::copy_thread;
use threadkeep::id::ThreadId;
use threadkeep::saver::Saver;

use super::MODE;
use crate::case::{Backend, Case, Each, Mode};
use crate::conversation::Conversation;
use crate::load::client;
use crate::load::gateway::Gateway;
use crate::store::Store;
use crate::workload::Workload;

/// The long threads, each with regenerated and edited turns and forks.
pub(super) const LONG: [(&str, Mode); 2] = [("long-full", Mode::Full), ("long-delta", MODE)];
/// Turns of the other threads.
const TURNS: usize = 6;
/// Threads that are copied at the same time.
const AT_ONCE: usize = 8;
/// Requests at the same time.
const REQUESTS: usize = 32;

/// The name of a short thread.
fn name(number: usize) -> String {
    format!("thread-{number:06}")
}

/// Writes the checkpoints of a store into the database of a gateway that does not run.
pub(super) async fn make(directory: &Path, url: Option<&str>, threads: usize, turns: usize) -> Result<()> {
    let file = directory.join("state/data/checkpoints.db");
    let store = if let Some(url) = url {
        Store::open(Backend::Postgres, url).await?
    } else {
        let file = file.to_str().context("the directory's name is not UTF-8")?;
        Store::open(Backend::SqliteNormal, file).await?
    };
    let made = fill(&store.saver, threads, turns).await;
    store.close().await;
    made
}

async fn fill(saver: &Arc<dyn Saver>, threads: usize, turns: usize) -> Result<()> {
    for (number, (long, mode)) in LONG.into_iter().enumerate() {
        conversation(saver, number, mode, turns, long).await?;
    }
    let short = ["short-full", "short-delta"];
    for (number, ((_, mode), name)) in LONG.into_iter().zip(short).enumerate() {
        conversation(saver, LONG.len() + number, mode, TURNS, name).await?;
    }
    let copies = futures::stream::iter(0..threads).map(|number| {
        let saver = saver.clone();
        async move {
            let from = short[number % short.len()].into();
            copy_thread(&*saver, &from, &ThreadId::from(name(number))).await
        }
    });
    copies.buffer_unordered(AT_ONCE).try_collect::<Vec<_>>().await?;
    for name in short {
        saver.delete_thread(&name.into()).await?;
    }
    Ok(())
}

async fn conversation(
    saver: &Arc<dyn Saver>,
    index: usize,
    mode: Mode,
    turns: usize,
    name: &str,
) -> Result<()> {
    let case = Case {
        workload: Workload::Agent,
        backend: Backend::Sqlite,
        mode,
        turns,
        size: 0,
        threads: 1,
        writers: 1,
        seed: 1,
        rep: 0,
        cap_s: u64::MAX,
        paired: false,
        flush: Each::Turn,
    };
    let mut conversation = Conversation::new(&case, index, saver.clone())?;
    for _ in 0..turns {
        conversation.turn(None).await?;
    }
    let made = conversation.thread().clone();
    copy_thread(&**saver, &made, &name.into()).await?;
    Ok(saver.delete_thread(&made).await?)
}

/// Makes the threads known to the gateway.
pub(super) async fn register(gateway: &Gateway, threads: usize) -> Result<()> {
    let client = client::http()?;
    let names = LONG.into_iter().map(|(long, _)| long.to_owned()).chain((0..threads).map(name));
    let requests = futures::stream::iter(names).map(|name| {
        let request = client.post(gateway.api().threads).json(&json!({ "thread_id": name }));
        async move { anyhow::Ok(request.send().await?.error_for_status()?) }
    });
    requests.buffer_unordered(REQUESTS).try_for_each(|_| async { Ok(()) }).await
}

//! Where a subagent's checkpoints are: in a hidden thread of its own, or in a namespace of its parent's thread.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::{Map, json};
use threadkeep::channel::Schema;
use threadkeep::id::{IdSource, Namespace, ThreadId};
use threadkeep::metadata::Source;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::Flush;
use threadkeep::state::StateAccessor;
use threadkeep::step::{Durability, StepWriter};

use super::StoreLocation;
use crate::case::Backend;
use crate::measure::{median, ms};
use crate::store::Store;

/// Subagents at once, and the commits of each.
const SUBAGENTS: usize = 16;
const COMMITS: usize = 50;

/// Compares both on SQLite and Postgres: rows of store and place, the time in which 16 subagents make 50 commits each,
/// and the time to read the parent's thread afterwards, which every retention pass does; in milliseconds, medians of
/// `rounds`.
///
/// # Errors
/// If a store cannot be opened or written.
pub async fn placement(rounds: usize, scratch: &Path) -> Result<Vec<Vec<String>>> {
    let mut rows = Vec::new();
    for backend in [Backend::Sqlite, Backend::Postgres] {
        let (mut hidden, mut nested) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
        for _ in 0..rounds {
            // In turn, so that what else the machine does falls on both.
            for (is_nested, (writes, reads)) in [(false, &mut hidden), (true, &mut nested)] {
                let (write, read) = round(backend, is_nested, scratch).await?;
                writes.push(write);
                reads.push(read);
            }
        }
        for (place, (writes, reads)) in [("hidden threads", hidden), ("namespaces", nested)] {
            let of = |times: Vec<Duration>| median(times).map_or(0.0, ms);
            rows.push(vec![
                backend.to_string(),
                place.to_owned(),
                format!("{:.0}", of(writes)),
                format!("{:.2}", of(reads)),
            ]);
        }
    }
    Ok(rows)
}

async fn round(backend: Backend, nested: bool, scratch: &Path) -> Result<(Duration, Duration)> {
    let location = StoreLocation::new(backend, scratch).await?;
    let store = Store::open(backend, &location.target()).await?;
    let table = Arc::new(Schema::thread_state().compile(ChannelMode::Delta, 10)?);
    let accessor = StateAccessor::new(Arc::clone(&store.saver), table, Arc::new(IdSource::default()));
    let parent = ThreadId::from("parent");
    commits(accessor.clone(), parent.clone(), 3).await?;
    let started = Instant::now();
    let subagents = (0..SUBAGENTS).map(|number| {
        if nested {
            let namespace = Namespace::from(format!("task:{number}"));
            tokio::spawn(commits(accessor.clone().in_namespace(namespace), parent.clone(), COMMITS))
        } else {
            tokio::spawn(commits(accessor.clone(), ThreadId::from(format!("subagent:{number}")), COMMITS))
        }
    });
    for subagent in subagents.collect::<Vec<_>>() {
        subagent.await?.context(if nested { "a namespace" } else { "a thread" })?;
    }
    let written = started.elapsed();
    let started = Instant::now();
    store.saver.read_thread(&parent).await?;
    let read = started.elapsed();
    store.close().await;
    Ok((written, read))
}

/// Commits one message after the other, as an agent's loop does.
async fn commits(accessor: StateAccessor, thread: ThreadId, count: usize) -> Result<()> {
    let mut writer = StepWriter::open(&accessor, &thread, None).await?;
    for number in 0..count {
        let task = writer.start_task(&"model".into(), 0);
        let text = format!("{number}: {}", "what an agent says. ".repeat(20));
        let message = json!({"type": "ai", "content": text, "id": format!("m{number}")});
        let writes = vec![writer.write("messages", json!([message]), false)?];
        writer.finish_task(task, writes, Durability::WithCommit).await?;
        writer.set_flush(if number + 1 == count { Flush::Now } else { Flush::WithNext });
        writer.commit(Source::Loop, vec!["model".into()], Map::new()).await?;
    }
    Ok(())
}

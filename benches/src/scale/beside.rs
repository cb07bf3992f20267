//! Turns of a gateway alone, and beside operators' commands on its store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use super::commands::Commands;
use super::large::LONG;
use crate::load::StoreKind;
use crate::load::client::{self, Conversation};
use crate::load::gateway::Gateway;
use crate::measure::{ms, percentile};

/// Threads whose turns are measured, one client each.
const CLIENTS: usize = 4;

/// Turns that were measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Turns {
    /// The store.
    pub store: StoreKind,
    /// What ran beside them; empty if nothing did.
    pub beside: String,
    /// How many turns.
    pub turns: usize,
    /// How many more ended with an error.
    pub failed: usize,
    /// Median, from the request to the end of the stream.
    pub p50_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// The slowest.
    pub max_ms: f64,
}

pub(super) async fn measure(
    gateway: &Gateway,
    commands: &Commands<'_>,
    store: StoreKind,
    turns: usize,
) -> Result<Vec<Turns>> {
    let client = client::http()?;
    let mut clients = Vec::new();
    for number in 0..CLIENTS {
        let frames = ["messages-tuple".to_owned()];
        clients.push(Conversation::create(&client, gateway.api(), None, number, &frames).await?);
    }
    let mut rows = Vec::new();
    let mut record = |beside: &str, (mut times, failed): (Vec<Duration>, usize)| -> Result<()> {
        times.sort_unstable();
        let at = |percent| percentile(&times, percent).map(ms).context("no turn was measured");
        let (turns, beside) = (times.len(), beside.to_owned());
        rows.push(Turns {
            store,
            beside,
            turns,
            failed,
            p50_ms: at(50.0)?,
            p99_ms: at(99.0)?,
            max_ms: at(100.0)?,
        });
        Ok(())
    };
    // The first turns of a thread are slower.
    let (mut clients, _) = while_working(clients, turns / 4, async || Ok(())).await?;
    for beside in [
        &["verify", "--all"][..],
        &["retention", "apply", "--all", "--yes"],
        &["prune", "apply", "--all", "--keep", "last:1000", "--boundary", "fresh-snapshot", "--yes"],
        &["backup", "--out", "beside.db"],
        &["copy of the longest thread"],
    ] {
        if beside[0] == "backup" && store == StoreKind::Postgres {
            continue;
        }
        let alone;
        (clients, alone) = while_working(clients, turns, async || Ok(())).await?;
        record("", alone)?;
        let times;
        (clients, times) = while_working(clients, turns, async || {
            if beside.len() == 1 {
                let copy = format!("{}/{}/copy", gateway.api().threads, LONG[0].0);
                client.post(copy).send().await?.error_for_status()?;
            } else {
                for old in ["beside.db", "beside.gateway.db"] {
                    // There is none the first time.
                    let _ = std::fs::remove_file(commands.directory.join(old));
                }
                commands.measure(beside).await.with_context(|| beside.join(" "))?;
            }
            Ok(())
        })
        .await?;
        record(&beside.join(" "), times)?;
    }
    Ok(rows)
}

/// Takes turns in all conversations while `work` is done, again and again until there are enough turns. Returns the time of
/// each that ended well, and how many did not.
async fn while_working(
    clients: Vec<Conversation>,
    turns: usize,
    work: impl AsyncFn() -> Result<()>,
) -> Result<(Vec<Conversation>, (Vec<Duration>, usize))> {
    let (over, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = JoinSet::new();
    for mut client in clients {
        let (over, done) = (over.clone(), done.clone());
        tasks.spawn(async move {
            let (mut times, mut failed) = (Vec::new(), 0);
            while !over.load(Ordering::Acquire) {
                match client.turn().await {
                    Ok(turn) => times.push(turn.whole),
                    Err(_) => failed += 1,
                }
                done.fetch_add(1, Ordering::AcqRel);
            }
            anyhow::Ok((client, times, failed))
        });
    }
    let mut worked = Ok(());
    while worked.is_ok() && done.load(Ordering::Acquire) < turns && !tasks.is_empty() {
        worked = work().await;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    over.store(true, Ordering::Release);
    let (mut clients, mut all, mut failures) = (Vec::new(), Vec::new(), 0);
    while let Some(ended) = tasks.join_next().await {
        let (client, times, failed) = ended??;
        clients.push(client);
        all.extend(times);
        failures += failed;
    }
    worked?;
    Ok((clients, (all, failures)))
}

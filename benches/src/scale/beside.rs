//! Turns of a gateway alone, and beside operators' commands on its store.

use std::cell::RefCell;
use std::fs;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures::future::try_join_all;
use reqwest::Client;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use tokio_postgres::NoTls;

use super::commands::Commands;
use super::large::LONG;
use crate::load::StoreKind;
use crate::load::client::{self, Conversation};
use crate::load::gateway::Gateway;
use crate::measure::{ms, percentile};

/// Clients whose turns are measured, each in a thread of its own.
const CLIENTS: u32 = 4;

/// The turns of a thread, after which its client begins another one: so threads are as long beside a command that takes
/// minutes as they are alone.
const TURNS: usize = 50;

/// How often turns alone and turns beside a command alternate: a machine is not as fast at every moment, and what it does
/// meanwhile falls on both.
const ALTERNATIONS: usize = 4;

/// The folder of the backups.
const BACKUPS: &str = "backups";

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
    /// Why what ran beside them failed, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
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
    (store, url): (StoreKind, Option<&str>),
    (turns, rate): (usize, Option<NonZeroU32>),
    say: &mut impl FnMut(&str),
) -> Result<Vec<Turns>> {
    let clients = Clients {
        client: client::http()?,
        gateway,
        period: rate.map(|rate| Duration::from_secs(1) * CLIENTS / rate.get()),
        begun: AtomicUsize::new(0),
        added: Mutex::default(),
    };
    let mut rows = Vec::new();
    let mut record = |beside: &str, error: Option<String>, (mut times, failed): (Vec<Duration>, usize)| {
        times.sort_unstable();
        let at = |percent| percentile(&times, percent).map(ms).context("no turn was measured");
        let (turns, beside) = (times.len(), beside.to_owned());
        rows.push(Turns {
            store,
            beside,
            turns,
            failed,
            error,
            p50_ms: at(50.0)?,
            p99_ms: at(99.0)?,
            max_ms: at(100.0)?,
        });
        anyhow::Ok(())
    };
    clients.while_working(turns / 4, async || Ok(())).await?;
    for beside in [
        &["verify", "--all"][..],
        // Before the passes that shorten that thread.
        &["copy of the longest thread"],
        &["retention", "apply", "--all", "--yes"],
        &["prune", "apply", "--all", "--keep", "last:1000", "--boundary", "fresh-snapshot", "--yes"],
        &["backup"],
    ] {
        if beside[0] == "backup" && store == StoreKind::Postgres {
            continue;
        }
        let (mut alone, mut with) = ((Vec::new(), 0), (Vec::new(), 0));
        let failure = RefCell::new(None);
        for _ in 0..ALTERNATIONS {
            let some = turns.div_ceil(ALTERNATIONS);
            add(&mut alone, clients.while_working(some, async || Ok(())).await?);
            let times = clients.while_working(some, async || {
                if let Err(error) = work(&clients, commands, beside).await {
                    failure.replace(Some(error));
                }
                Ok(())
            });
            add(&mut with, times.await?);
            remove_backups(commands)?;
        }
        record("", None, alone)?;
        let (name, error) = (beside.join(" "), failure.take().map(|error| format!("{error:#}")));
        if let Some(error) = &error {
            say(&format!("{name}: {error}"));
        }
        record(&name, error, with)?;
        clients.remove_added().await?;
        if let Some(url) = url {
            clear(url).await?;
        }
    }
    Ok(rows)
}

/// Adds times and failures to those of the same kind.
fn add(sum: &mut (Vec<Duration>, usize), (times, failed): (Vec<Duration>, usize)) {
    sum.0.extend(times);
    sum.1 += failed;
}

/// Carries out what turns are measured beside: a command, or a request for a copy.
async fn work(clients: &Clients<'_>, commands: &Commands<'_>, beside: &[&str]) -> Result<()> {
    if beside[0] == "backup" {
        let folder = commands.directory.join(BACKUPS);
        fs::create_dir_all(&folder)?;
        let name = format!("{BACKUPS}/{}.db", fs::read_dir(folder)?.count());
        return commands.measure(&["backup", "--out", &name]).await.map(drop);
    }
    if beside.len() > 1 {
        return commands.measure(beside).await.map(drop);
    }
    let copy = format!("{}/{}/copy", clients.gateway.api().threads, LONG[0].0);
    let copy: Json = clients.client.post(copy).send().await?.error_for_status()?.json().await?;
    clients.adds(copy["thread_id"].as_str().context("a copy has no id")?);
    Ok(())
}

/// Lets a server of Postgres clear away what was deleted, and write down what changed: it would do so beside the next row.
async fn clear(url: &str) -> Result<()> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.context("the Postgres server")?;
    let ended = tokio::spawn(connection);
    for statement in ["VACUUM (ANALYZE)", "CHECKPOINT"] {
        client.batch_execute(statement).await?;
    }
    drop(client);
    Ok(ended.await??)
}

/// Removes the backups, while no turns are measured: some file systems hold up flushes for as long as they free a large file.
fn remove_backups(commands: &Commands<'_>) -> Result<()> {
    let folder = commands.directory.join(BACKUPS);
    if folder.exists() { Ok(fs::remove_dir_all(folder)?) } else { Ok(()) }
}

/// Who takes turns.
struct Clients<'g> {
    client: Client,
    gateway: &'g Gateway,
    /// From one turn of a client to its next one, however long they take; none if each begins when the one before it has
    /// ended.
    period: Option<Duration>,
    /// The threads that were begun so far.
    begun: AtomicUsize,
    /// The threads that were not in the store before, and copies among them.
    added: Mutex<Vec<String>>,
}

impl Clients<'_> {
    fn adds(&self, thread: &str) {
        self.added.lock().unwrap_or_else(PoisonError::into_inner).push(thread.to_owned());
    }

    /// Deletes what was added, as much as the machine was slow: the next command works on the same store, which is compared
    /// with a smaller one afterwards.
    async fn remove_added(&self) -> Result<()> {
        let added = std::mem::take(&mut *self.added.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in added {
            let thread = format!("{}/{thread}", self.gateway.api().threads);
            self.client.delete(thread).send().await?.error_for_status()?;
        }
        Ok(())
    }

    /// Takes turns while `work` is done, again and again until there are enough turns. Returns the time of each that ended
    /// well, but for the first of a thread, which is slower; and how many did not. With a period, the time counts from the
    /// moment when the turn was due: a pause delays all that are due in it.
    async fn while_working(
        &self,
        turns: usize,
        work: impl AsyncFn() -> Result<()>,
    ) -> Result<(Vec<Duration>, usize)> {
        let (over, done) = (AtomicBool::new(false), AtomicUsize::new(0));
        let client = async |phase: u32| {
            let (mut times, mut failed) = (Vec::new(), 0);
            while !over.load(Ordering::Acquire) {
                let number = self.begun.fetch_add(1, Ordering::AcqRel);
                let frames = ["messages-tuple".to_owned()];
                let mut thread =
                    Conversation::create(&self.client, self.gateway.api(), None, number, &frames).await?;
                self.adds(thread.id());
                let (mut due, mut ended) = (Instant::now(), Instant::now());
                for turn in 0..TURNS {
                    let waited = match self.period {
                        Some(period) if turn > 0 => {
                            due += period;
                            tokio::time::sleep_until(due.into()).await;
                            // A timer that fires late is not the gateway's.
                            ended.saturating_duration_since(due)
                        }
                        _ => Duration::ZERO,
                    };
                    match thread.turn().await {
                        Ok(taken) if turn > 0 => times.push(waited + taken.whole),
                        // The clients do not begin at the same moments.
                        Ok(_) => due = Instant::now() + self.period.unwrap_or_default() * phase / CLIENTS,
                        Err(_) => failed += 1,
                    }
                    ended = Instant::now();
                    done.fetch_add(1, Ordering::AcqRel);
                    if over.load(Ordering::Acquire) {
                        break;
                    }
                }
            }
            anyhow::Ok((times, failed))
        };
        let working = async {
            let mut worked = Ok(());
            while worked.is_ok() && done.load(Ordering::Acquire) < turns {
                worked = work().await;
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            over.store(true, Ordering::Release);
            worked
        };
        let clients = try_join_all((0..CLIENTS).map(client));
        let (taken, worked) = tokio::join!(clients, working);
        worked?;
        let (times, failed): (Vec<_>, Vec<usize>) = taken?.into_iter().unzip();
        Ok((times.concat(), failed.iter().sum()))
    }
}

//! What operator commands and routes cost on a large store, how that grows, and what turns notice of the commands.
//!
//! Three stores are made: a small one, one with ten times the threads, and one that has long threads of ten times the turns
//! too, so that it shows with which of both a figure grows. Each command is a process of its own; each route is asked of a
//! gateway on the same store. What a command read and printed is counted too: unlike times, these figures say the same on
//! any machine.

mod beside;
mod commands;
mod large;
mod routes;
mod table;

use std::num::NonZeroU32;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use threadkeep_testing::{Database, Postgres};

use crate::case::Mode;
use crate::load::StoreKind;
use crate::load::client;
use crate::load::gateway::Gateway;

pub use beside::Turns;
pub use table::{Form, tables};

/// The mode of the gateways, which reads threads of both.
const MODE: Mode = Mode::Delta(10);
/// How many times fewer the threads, and the turns of the long ones, are in a smaller store.
const FACTOR: usize = 10;

/// What to measure.
#[derive(Debug, Clone)]
pub struct Scale {
    /// The gateway binary, which has the commands too.
    pub gateway: PathBuf,
    /// Directory for the stores, on the disk to measure.
    pub scratch: PathBuf,
    /// The stores.
    pub stores: Vec<StoreKind>,
    /// Threads of the larger stores.
    pub threads: usize,
    /// Turns of the long threads of the largest one.
    pub turns: usize,
    /// Turns that are measured alone, and at least beside each command.
    pub beside: usize,
    /// How many of these are due in a second; if none, a client begins its next one when the last one has ended.
    pub rate: Option<NonZeroU32>,
}

/// With what the work of a command or route may grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Grows {
    /// Nothing: it reads and prints a page.
    No,
    /// The thread that it works on.
    Thread,
    /// All threads.
    Store,
}

/// What a command or a request used. Of a request, CPU and memory are those of the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Used {
    /// From the start to the end.
    pub wall_ms: f64,
    /// CPU time.
    pub cpu_ms: f64,
    /// The most memory, in bytes.
    pub peak: u64,
    /// Bytes read from files and sockets.
    pub read: u64,
    /// Bytes printed or answered.
    pub printed: u64,
}

/// A command or a route on the three stores.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The store.
    pub store: StoreKind,
    /// What was run or asked.
    pub name: String,
    /// With what it may grow.
    pub grows: Grows,
    /// On the small store.
    pub small: Used,
    /// On the one with more threads.
    pub wide: Used,
    /// On the one with more threads and longer ones.
    pub large: Used,
}

/// What was run or asked of one store, with what it may grow, and what it used.
type Measured = (String, Grows, Used);

/// Everything that was measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Commands and routes.
    pub rows: Vec<Row>,
    /// Turns alone and beside commands, on the larger stores.
    pub turns: Vec<Turns>,
}

impl Report {
    /// Why rows of turns do not count: turns that did not end well, and commands that failed beside them.
    pub fn failures(&self) -> Vec<String> {
        let of = |row: &Turns| {
            let beside = if row.beside.is_empty() { "alone" } else { row.beside.as_str() };
            let name = format!("{:?}, turns, {beside}", row.store).to_lowercase();
            let turns = (row.failed > 0).then(|| format!("{name}: {} of them failed", row.failed));
            let command = row.error.as_ref().map(|error| format!("{name}: {error}"));
            turns.into_iter().chain(command)
        };
        self.turns.iter().flat_map(of).collect()
    }
}

impl Scale {
    /// Measures every store. What goes wrong while turns are measured beside commands is in [`Report::failures`].
    ///
    /// # Errors
    /// If a command that is measured by itself fails, or a request is refused; the text says which.
    pub async fn run(&self, mut say: impl FnMut(&str)) -> Result<Report> {
        ensure!(
            self.threads >= FACTOR && self.turns >= FACTOR,
            "a large store has at least ten threads and turns"
        );
        let needs_server = self.stores.contains(&StoreKind::Postgres);
        let server = needs_server.then(Postgres::start_flushing).transpose();
        let server = server.map_err(anyhow::Error::from_boxed)?;
        let mut report = Report::default();
        for store in &self.stores {
            let small = self.store(*store, (FACTOR, FACTOR), server.as_ref(), &mut report, &mut say).await?;
            let wide = self.store(*store, (1, FACTOR), server.as_ref(), &mut report, &mut say).await?;
            let large = self.store(*store, (1, 1), server.as_ref(), &mut report, &mut say).await?;
            // A route that one of them refuses has no row.
            for (name, grows, small) in small {
                let on = |store: &[Measured]| {
                    let row = store.iter().find(|(other, ..)| *other == name);
                    row.map(|(_, _, used)| *used)
                };
                if let (Some(wide), Some(large)) = (on(&wide), on(&large)) {
                    report.rows.push(Row { store: *store, name, grows, small, wide, large });
                }
            }
        }
        Ok(report)
    }

    /// Measures one store, whose threads and turns of long threads are fewer by these factors.
    async fn store(
        &self,
        store: StoreKind,
        by: (usize, usize),
        server: Option<&Postgres>,
        report: &mut Report,
        say: &mut impl FnMut(&str),
    ) -> Result<Vec<Measured>> {
        let database = match (store, server) {
            (StoreKind::Sqlite, _) => None,
            (StoreKind::Postgres, Some(server)) => {
                Some(server.database().await.map_err(anyhow::Error::from_boxed)?)
            }
            _ => anyhow::bail!("operators' commands work on SQLite and Postgres"),
        };
        let url = database.as_ref().map(Database::url);
        let directory = tempfile::Builder::new().prefix("threadkeep-scale-").tempdir_in(&self.scratch)?;
        let directory = directory.path();
        let (threads, turns) = (self.threads / by.0, self.turns / by.1);
        let kind = format!("{store:?}").to_lowercase();
        say(&format!("{kind}: {threads} threads, long ones of {turns} turns"));
        // It makes the store, with the configuration that the commands use.
        let gateway = Gateway::start(&self.gateway, directory, url, MODE)?;
        client::http()?.get(format!("{}/health", gateway.base())).send().await?.error_for_status()?;
        gateway.stop().await?;
        large::make(directory, url, threads, turns).await.context("making the store")?;
        let gateway = Gateway::again(&self.gateway, directory)?;
        large::register(&gateway, threads).await.context("creating threads")?;
        say(&format!("{kind}: routes that read"));
        let reading = routes::read(&gateway).await?;
        gateway.stop().await?;
        say(&format!("{kind}: commands that read"));
        let commands = commands::Commands { binary: &self.gateway, directory };
        let mut rows = commands.read().await?;
        // Before the turns: a prune beside them removes old ones, from which a branch begins here.
        say(&format!("{kind}: routes that change the store"));
        let old = commands.old()?;
        let gateway = Gateway::again(&self.gateway, directory)?;
        let changed = routes::change(&gateway, &old, say).await;
        gateway.stop().await?;
        let changed = changed?;
        if by == (1, 1) && self.beside > 0 {
            say(&format!("{kind}: turns beside commands"));
            let gateway = Gateway::again(&self.gateway, directory)?;
            let measured =
                beside::measure(&gateway, &commands, (store, url), (self.beside, self.rate), say).await;
            gateway.stop().await?;
            report.turns.extend(measured?);
        }
        say(&format!("{kind}: commands that change the store"));
        rows.extend(commands.change().await?);
        rows.extend(reading);
        rows.extend(changed);
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_and_commands_that_failed_beside_each_other_are_named() {
        let row = |beside: &str, failed, error: Option<&str>| Turns {
            store: StoreKind::Sqlite,
            beside: beside.to_owned(),
            turns: 9,
            failed,
            error: error.map(str::to_owned),
            p50_ms: 1.0,
            p99_ms: 2.0,
            max_ms: 3.0,
        };
        let turns = vec![
            row("", 0, None),
            row("verify --all", 0, None),
            row("", 2, None),
            row("vacuum", 1, Some("no")),
        ];
        let report = Report { turns, ..Report::default() };
        let named = [
            "sqlite, turns, alone: 2 of them failed",
            "sqlite, turns, vacuum: 1 of them failed",
            "sqlite, turns, vacuum: no",
        ];
        assert_eq!(report.failures(), named);
        let shown = tables(&report, Form::Aligned);
        assert!(
            shown.contains("beside vacuum (failed)") && shown.contains("beside verify --all  "),
            "{shown}"
        );
    }
}

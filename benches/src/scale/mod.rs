//! What each operator command and each reading route costs on a large store, how that grows, and what turns notice of the
//! commands.
//!
//! Two stores are made, one with ten times the threads of the other and long threads of ten times the turns. Each command is
//! a process of its own; each route is asked of a gateway on the same store. What a command read and printed is counted too:
//! unlike times, these figures say the same on any machine.

mod beside;
mod commands;
mod large;
mod routes;
mod table;

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
/// How much smaller the first store is.
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
    /// Threads of the larger store.
    pub threads: usize,
    /// Turns of its long threads.
    pub turns: usize,
    /// Turns that are measured alone, and at least beside each command.
    pub beside: usize,
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

/// A command or a route on both stores.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The store.
    pub store: StoreKind,
    /// What was run or asked.
    pub name: String,
    /// With what it may grow.
    pub grows: Grows,
    /// On the smaller store.
    pub small: Used,
    /// On the larger one.
    pub large: Used,
}

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
            let small = self.store(*store, FACTOR, server.as_ref(), &mut report, &mut say).await?;
            let large = self.store(*store, 1, server.as_ref(), &mut report, &mut say).await?;
            for ((name, grows, small), (_, _, large)) in small.into_iter().zip(large) {
                report.rows.push(Row { store: *store, name, grows, small, large });
            }
        }
        Ok(report)
    }

    /// Measures one store that is smaller by a factor.
    async fn store(
        &self,
        store: StoreKind,
        by: usize,
        server: Option<&Postgres>,
        report: &mut Report,
        say: &mut impl FnMut(&str),
    ) -> Result<Vec<(String, Grows, Used)>> {
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
        let (threads, turns) = (self.threads / by, self.turns / by);
        let kind = format!("{store:?}").to_lowercase();
        say(&format!("{kind}: {threads} threads, long ones of {turns} turns"));
        // It makes the store, with the configuration that the commands use.
        let gateway = Gateway::start(&self.gateway, directory, url, MODE)?;
        client::http()?.get(format!("{}/health", gateway.base())).send().await?.error_for_status()?;
        gateway.stop().await?;
        large::make(directory, url, threads, turns).await.context("making the store")?;
        let mut rows = Vec::new();
        let gateway = Gateway::again(&self.gateway, directory)?;
        large::register(&gateway, threads).await.context("creating threads")?;
        say(&format!("{kind}: routes"));
        rows.extend(routes::measure(&gateway).await?);
        gateway.stop().await?;
        say(&format!("{kind}: commands"));
        let looking = commands::Commands { binary: &self.gateway, directory };
        rows.splice(0..0, looking.read().await?);
        if by == 1 && self.beside > 0 {
            say(&format!("{kind}: turns beside commands"));
            let gateway = Gateway::again(&self.gateway, directory)?;
            let measured = beside::measure(&gateway, &looking, store, self.beside, say).await;
            gateway.stop().await?;
            report.turns.extend(measured?);
        }
        say(&format!("{kind}: commands that change the store"));
        let place = rows.iter().take_while(|(name, ..)| !name.starts_with('/')).count();
        let changing = looking.change(store).await?;
        rows.splice(place..place, changing);
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

//! Delegation: how long a subagent takes that has nothing to think about, how memory grows with many of them, and where
//! their checkpoints are best kept; and how many items of a batch a second workers end.

mod batches;
mod house;
mod placement;
mod work;

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use threadkeep_testing::{Database, Postgres};

use crate::case::Backend;

pub use batches::{batches, live, work};
pub use placement::placement;
pub use work::{Growth, dispatch, growth};

/// The stores that are measured.
pub const STORES: [Backend; 3] = [Backend::Memory, Backend::Sqlite, Backend::Postgres];

/// Where a fresh store is.
pub(crate) struct StoreLocation {
    pub(crate) directory: tempfile::TempDir,
    database: Option<Database>,
    /// The URL of a database that somebody else has.
    shared: Option<String>,
    _server: Option<Postgres>,
}

impl StoreLocation {
    /// A new directory in `scratch` and, for Postgres, a private server that flushes.
    pub(crate) async fn new(backend: Backend, scratch: &Path) -> Result<Self> {
        let directory = tempfile::tempdir_in(scratch).context("the scratch directory")?;
        let server = (backend == Backend::Postgres).then(Postgres::start_flushing).transpose();
        let server = server.map_err(anyhow::Error::from_boxed)?;
        let database = match &server {
            Some(server) => Some(server.database().await.map_err(anyhow::Error::from_boxed)?),
            None => None,
        };
        Ok(Self { directory, database, shared: None, _server: server })
    }

    /// A new directory in `scratch`, and a Postgres database that another process has.
    pub(crate) fn existing(url: &str, scratch: &Path) -> Result<Self> {
        let directory = tempfile::tempdir_in(scratch).context("the scratch directory")?;
        Ok(Self { directory, database: None, shared: Some(url.to_owned()), _server: None })
    }

    /// The database's URL, or the path of the file of checkpoints.
    pub(crate) fn target(&self) -> String {
        match self.url() {
            Some(url) => url.to_owned(),
            None => self.directory.path().join("checkpoints.db").display().to_string(),
        }
    }

    /// The database's URL.
    pub(crate) fn url(&self) -> Option<&str> {
        self.database.as_ref().map(Database::url).or(self.shared.as_deref())
    }
}

/// A table in Markdown.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut text = format!("| {} |\n|{}\n", head.join(" | "), "---|".repeat(head.len()));
    for row in rows {
        // Writing to a string does not fail.
        let _ = writeln!(text, "| {} |", row.join(" | "));
    }
    text
}

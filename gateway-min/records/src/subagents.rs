//! The definitions of managed subagents. What a definition says is its reader's business.

use crate::Records;
use crate::db::Db;
use crate::error::RecordsError;
use crate::query::query;

/// The definitions of managed subagents, by name.
#[derive(Clone, Debug)]
pub struct Subagents {
    db: Db,
}

/// What became of a replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplaceOutcome {
    /// The new definition is stored.
    Replaced,
    /// Another definition was stored than the expected one, and still is.
    Changed,
    /// There is none with this name.
    Missing,
}

impl Records {
    /// The definitions of managed subagents.
    pub fn subagents(&self) -> Subagents {
        Subagents { db: self.db.clone() }
    }
}

impl Subagents {
    /// All names with their definitions, by name.
    pub async fn all(&self) -> Result<Vec<(String, String)>, RecordsError> {
        self.db.fetch_all(query("SELECT name, definition FROM subagents ORDER BY name")).await
    }

    /// Stores a definition. Returns false, and changes nothing, if the name is taken.
    pub async fn insert(&self, name: &str, definition: &str) -> Result<bool, RecordsError> {
        let sql = "INSERT INTO subagents (name, definition) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING";
        let sql = query(sql).bind(name).bind(definition);
        self.db.write_everywhere(move |tx| Box::pin(tx.execute(sql))).await.map(|rows| rows > 0)
    }

    /// Replaces the definition `old`.
    pub async fn replace(&self, name: &str, old: &str, new: &str) -> Result<ReplaceOutcome, RecordsError> {
        let sql = "UPDATE subagents SET definition = $3 WHERE name = $1 AND definition = $2";
        let replace = query(sql).bind(name).bind(old).bind(new);
        let find = query("SELECT name, definition FROM subagents WHERE name = $1").bind(name);
        let replaced = self.db.write_everywhere(move |tx| {
            Box::pin(async move {
                if tx.execute(replace).await? > 0 {
                    return Ok(ReplaceOutcome::Replaced);
                }
                let found: Option<(String, String)> = tx.fetch_optional(find).await?;
                Ok(found.map_or(ReplaceOutcome::Missing, |_| ReplaceOutcome::Changed))
            })
        });
        replaced.await
    }

    /// Removes a definition. Returns false if there is none.
    pub async fn remove(&self, name: &str) -> Result<bool, RecordsError> {
        let sql = query("DELETE FROM subagents WHERE name = $1").bind(name);
        self.db.write_everywhere(move |tx| Box::pin(tx.execute(sql))).await.map(|rows| rows > 0)
    }
}

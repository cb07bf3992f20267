//! The floor: one table, and one flushed insert of the same bytes per checkpoint. It keeps nothing that a checkpoint
//! store needs: no lineage, no state at older checkpoints, no fence, no checksums.

use anyhow::{Result, bail};
use rusqlite::Connection;
use serde_json::Value as Json;
use threadkeep::value::{ChannelValue, Codec, Encoded};
use tokio_postgres::{Client, NoTls, Statement};

use crate::case::Backend;
use crate::workload::Step;

/// A raw store.
pub enum Raw {
    /// SQLite with a write-ahead log, `synchronous=FULL` and pages of 4 KiB.
    Sqlite(Connection),
    /// Postgres and its prepared insert.
    Postgres(Client, Statement),
}

impl Raw {
    /// Opens a raw store and creates its table if it is missing.
    ///
    /// # Errors
    /// The store's; and if `backend` is not a raw one.
    pub async fn open(backend: Backend, target: &str) -> Result<Self> {
        match backend {
            Backend::RawSqlite => {
                let db = Connection::open(target)?;
                db.execute_batch(
                    "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;
                     CREATE TABLE IF NOT EXISTS raw (seq INTEGER PRIMARY KEY, bytes BLOB NOT NULL) STRICT",
                )?;
                Ok(Self::Sqlite(db))
            }
            Backend::RawPostgres => {
                let (client, connection) = tokio_postgres::connect(target, NoTls).await?;
                drop(tokio::spawn(connection));
                client
                    .batch_execute(
                        "CREATE TABLE IF NOT EXISTS raw (seq bigserial PRIMARY KEY, bytes bytea NOT NULL)",
                    )
                    .await?;
                let insert = client.prepare("INSERT INTO raw (bytes) VALUES ($1)").await?;
                Ok(Self::Postgres(client, insert))
            }
            other => bail!("{other} is not a raw store"),
        }
    }

    /// Stores bytes; they are flushed when this returns.
    ///
    /// # Errors
    /// The store's.
    pub async fn insert(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Sqlite(db) => {
                db.prepare_cached("INSERT INTO raw (bytes) VALUES (?1)")?.execute([bytes])?;
            }
            Self::Postgres(client, insert) => {
                client.execute(insert, &[&bytes]).await?;
            }
        }
        Ok(())
    }

    /// Reads and decodes everything once, in insertion order.
    ///
    /// # Errors
    /// The store's.
    pub async fn read(&mut self) -> Result<Vec<Json>> {
        let mut messages = Vec::new();
        match self {
            Self::Sqlite(db) => {
                let mut select = db.prepare_cached("SELECT bytes FROM raw ORDER BY seq")?;
                let mut rows = select.query([])?;
                while let Some(row) = rows.next()? {
                    messages.extend(decode(row.get(0)?)?);
                }
            }
            Self::Postgres(client, _) => {
                for row in client.query("SELECT bytes FROM raw ORDER BY seq", &[]).await? {
                    messages.extend(decode(row.get(0))?);
                }
            }
        }
        Ok(messages)
    }
}

/// What is new in a superstep, as one MessagePack array.
///
/// # Errors
/// As [`ChannelValue::from_json`].
pub fn bytes(step: &Step) -> Result<Vec<u8>> {
    let value = ChannelValue::from_json(&Json::Array(step.emit.messages().to_vec()))?;
    Ok(value.to_encoded().bytes.to_vec())
}

fn decode(bytes: Vec<u8>) -> Result<Vec<Json>> {
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    let encoded = Encoded { codec: Codec::MessagePack, bytes: bytes.into() };
    match ChannelValue::from_encoded(encoded)?.to_json()? {
        Json::Array(messages) => Ok(messages),
        other => Ok(vec![other]),
    }
}

//! Our savers, opened by name.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use threadkeep::saver::Saver;
use threadkeep_memory::MemorySaver;
use threadkeep_postgres::PostgresSaver;
use threadkeep_sqlite::{Options, SqliteSaver, Synchronous};
use tokio_postgres::{Client, NoTls};

use crate::case::Backend;
use crate::meter::Server;

/// Bytes of all tables of a database and of their indexes.
const TABLES: &str = "SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class
    WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace";

/// A saver that is measured.
pub struct Store {
    /// The saver.
    pub saver: Arc<dyn Saver>,
    inner: Inner,
}

enum Inner {
    Memory,
    Sqlite(Arc<SqliteSaver>),
    Postgres(Arc<PostgresSaver>, Watch),
}

impl Store {
    /// Opens a saver: on the file or at the URL `target`. Tables are made where they are missing.
    ///
    /// # Errors
    /// The saver's; and if `backend` is none of ours.
    pub async fn open(backend: Backend, target: &str) -> Result<Self> {
        let options = match backend {
            Backend::Memory => {
                return Ok(Self { saver: Arc::new(MemorySaver::new()), inner: Inner::Memory });
            }
            Backend::Postgres => {
                let options = threadkeep_postgres::Options::default();
                threadkeep_postgres::setup(target, &options).await?;
                let saver = Arc::new(PostgresSaver::connect(target, options).await?);
                let watch = Watch::open(target).await?;
                return Ok(Self { saver: saver.clone(), inner: Inner::Postgres(saver, watch) });
            }
            Backend::Sqlite => Options::default(),
            Backend::SqlitePlain => Options { compression: false, ..Options::default() },
            Backend::SqliteNormal => Options { synchronous: Synchronous::Normal, ..Options::default() },
            other => bail!("{other} is not one of our savers"),
        };
        let saver = Arc::new(SqliteSaver::open_async(target, options).await?);
        Ok(Self { saver: saver.clone(), inner: Inner::Sqlite(saver) })
    }

    /// Bytes the store occupies now; 0 in memory.
    ///
    /// # Errors
    /// The store's.
    pub async fn bytes(&self) -> Result<u64> {
        match &self.inner {
            Inner::Memory => Ok(0),
            Inner::Sqlite(saver) => Ok(saver.file_size().await?.bytes),
            Inner::Postgres(_, watch) => watch.bytes().await,
        }
    }

    /// How often commits waited for the disk, if the store counts that.
    pub fn flushes(&self) -> Option<u64> {
        match &self.inner {
            Inner::Sqlite(saver) => Some(saver.stats().flushes),
            Inner::Memory | Inner::Postgres(..) => None,
        }
    }

    /// The server that the store uses.
    pub fn watch(&self) -> Option<&Watch> {
        match &self.inner {
            Inner::Postgres(_, watch) => Some(watch),
            Inner::Memory | Inner::Sqlite(_) => None,
        }
    }

    /// The store's settings and versions.
    ///
    /// # Errors
    /// The store's.
    pub async fn settings(&self, backend: Backend) -> Result<String> {
        Ok(match &self.inner {
            Inner::Memory => "nothing on disk".to_owned(),
            Inner::Sqlite(_) => {
                let synchronous = if backend == Backend::SqliteNormal { "NORMAL" } else { "FULL" };
                let packed = if backend == Backend::SqlitePlain { "uncompressed" } else { "zstd" };
                format!("SQLite {}, WAL, synchronous={synchronous}, {packed}", rusqlite::version())
            }
            Inner::Postgres(_, watch) => watch.settings().await?,
        })
    }

    /// Closes the store. A file's size afterwards is final.
    pub async fn close(self) {
        match self.inner {
            Inner::Memory => {}
            Inner::Sqlite(saver) => saver.close().await,
            Inner::Postgres(saver, _) => saver.close(),
        }
    }
}

/// Bytes of an SQLite database and its log.
pub fn file_bytes(path: &str) -> u64 {
    let bytes = |path: String| Path::new(&path).metadata().map_or(0, |file| file.len());
    bytes(path.to_owned()) + bytes(format!("{path}-wal"))
}

/// A session that observes a server.
pub struct Watch {
    client: Client,
    /// `None` if the server is on another machine.
    pub server: Option<Server>,
}

impl Watch {
    /// Connects to a database.
    ///
    /// # Errors
    /// If that fails.
    pub async fn open(url: &str) -> Result<Self> {
        let (client, connection) =
            tokio_postgres::connect(url, NoTls).await.context("the Postgres server")?;
        // It ends with the client, whose calls report its errors.
        drop(tokio::spawn(connection));
        let pid: i32 = client.query_one("SELECT pg_backend_pid()", &[]).await?.get(0);
        Ok(Self { client, server: u32::try_from(pid).ok().and_then(Server::of_session) })
    }

    /// Bytes of all tables and indexes.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn bytes(&self) -> Result<u64> {
        let bytes: i64 = self.client.query_one(TABLES, &[]).await?.get(0);
        Ok(bytes.try_into()?)
    }

    /// The server's current log position; the difference of two is the bytes written in between.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn log_position(&self) -> Result<u64> {
        let query = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint";
        let position: i64 = self.client.query_one(query, &[]).await?.get(0);
        Ok(position.try_into()?)
    }

    /// Its version, and what a commit waits for.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn settings(&self) -> Result<String> {
        let query =
            "SELECT format('Postgres %s, fsync=%s, synchronous_commit=%s', current_setting('server_version'),
                     current_setting('fsync'), current_setting('synchronous_commit'))";
        Ok(self.client.query_one(query, &[]).await?.get(0))
    }
}

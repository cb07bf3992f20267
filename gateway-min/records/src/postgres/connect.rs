//! The database, and opening a session at its primary.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::timeout;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Notification, Statement};
use tokio_util::task::AbortOnDropHandle;

use super::sql::Tables;
use crate::failure::DatabaseError;

/// How many statements stay prepared: more than a run has. Searches have any number of them.
const STATEMENTS: usize = 128;
/// How long a server may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// A connection, the task that drives it, and whether it has a session of the server to itself: a pooler may give each of its
/// transactions another one. The task, dropped, closes the connection at once.
pub type Connected = (Client, AbortOnDropHandle<()>, bool);

/// Opens a connection to the primary; the sender receives what it hears after a `LISTEN`. It may take for ever.
pub type Opener = Arc<
    dyn Fn(
            Option<UnboundedSender<Notification>>,
        ) -> BoxFuture<'static, Result<Connected, tokio_postgres::Error>>
        + Send
        + Sync,
>;

/// A database, and where in it the records are.
#[derive(Clone)]
pub struct PostgresTarget {
    opener: Opener,
    place: String,
    connections: usize,
    tables: Tables,
}

impl std::fmt::Debug for PostgresTarget {
    /// Omits the password, which the opener contains.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresTarget").field("place", &self.place).finish_non_exhaustive()
    }
}

impl PostgresTarget {
    /// A database whose primary this opens connections to, with the tables in this schema. `place` names it in errors; it
    /// has no password in it. At least two connections are used: one that waits for another process must not stop
    /// everything else.
    pub fn new(opener: Opener, place: String, schema: &str, connections: u32) -> Self {
        let connections = usize::try_from(connections).unwrap_or(usize::MAX).max(2);
        Self { opener, place, connections, tables: Tables::of(schema) }
    }

    /// The database's name in errors.
    pub(crate) fn place(&self) -> &str {
        &self.place
    }

    pub(crate) fn tables(&self) -> &Tables {
        &self.tables
    }

    /// The maximum number of connections, at least two.
    pub(super) fn connections(&self) -> usize {
        self.connections
    }

    /// Opens a session at the server, or at the primary of several.
    pub(crate) async fn open(&self) -> Result<Session, DatabaseError> {
        self.open_heard_by(None).await
    }

    /// The same; the sender receives what the session hears after a `LISTEN`.
    pub(super) async fn open_heard_by(
        &self,
        heard: Option<UnboundedSender<Notification>>,
    ) -> Result<Session, DatabaseError> {
        let opened = timeout(CONNECT, (self.opener)(heard)).await.map_err(|_| silent())?;
        let (client, driver, is_own) = opened?;
        Ok(Session { client, _driver: driver, is_own, prepared: Mutex::default() })
    }
}

/// A session, with the task that drives it and the statements that are prepared in it. Dropped, it is closed at once, whatever is
/// in progress on it.
pub(crate) struct Session {
    client: Client,
    _driver: AbortOnDropHandle<()>,
    is_own: bool,
    prepared: Mutex<HashMap<String, Statement>>,
}

impl std::ops::Deref for Session {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Session {
    /// Whether the server's session is this connection's alone: then statements may stay prepared in it, and it hears other
    /// processes. Behind a pooler another client may have prepared something else there under the same name.
    pub(crate) fn is_own(&self) -> bool {
        self.is_own
    }

    /// The statement, if it is prepared.
    pub(super) fn prepared(&self, text: &str) -> Option<Statement> {
        self.statements().get(text).cloned()
    }

    /// Prepares the statement, unless it is, or too many are.
    pub(super) async fn prepare_once(
        &self,
        text: String,
        types: &[Type],
    ) -> Result<(), tokio_postgres::Error> {
        if self.prepared(&text).is_some() || self.statements().len() >= STATEMENTS {
            return Ok(());
        }
        let statement = self.client.prepare_typed(&text, types).await?;
        self.statements().insert(text, statement);
        Ok(())
    }

    fn statements(&self) -> MutexGuard<'_, HashMap<String, Statement>> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The server did not answer in time.
pub(super) fn silent() -> DatabaseError {
    let problem = "the server does not answer; it may hang, or have been replaced";
    DatabaseError::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, problem))
}

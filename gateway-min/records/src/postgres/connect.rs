//! The database, and opening a session at its primary.

use std::time::Duration;

use threadkeep_postgres::{Address, Opener};
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_postgres::config::Host;
use tokio_postgres::{Client, Notification};

use super::sql::Tables;
use crate::error::RecordsError;
use crate::failure::DatabaseError;

/// How long a server may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// The servers, the database and the user.
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
    /// The database at this address, a URL or a `key=value` text, which is understood as the checkpoints' is: of several
    /// hosts, the primary is taken; TLS is used where the server has it, and demanded and verified with
    /// `sslmode=require` and stronger.
    ///
    /// # Errors
    /// [`RecordsError::Invalid`]. It does not repeat the address, which contains a password.
    pub fn new(address: &str, schema: &str, connections: u32) -> Result<Self, RecordsError> {
        let invalid = |problem: String| RecordsError::Invalid { field: "database.postgres_url", problem };
        let address = Address::parse(address).map_err(|error| invalid(error.to_string()))?;
        if address.config.get_hosts().is_empty() {
            return Err(invalid("it names no host".to_owned()));
        }
        let place = place(&address.config);
        Ok(Self {
            opener: address.opener().map_err(|error| invalid(error.to_string()))?,
            place,
            // One that waits for another process must not stop everything else.
            connections: usize::try_from(connections).unwrap_or(usize::MAX).max(2),
            tables: Tables::of(schema),
        })
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
        let (client, driver) = opened?;
        Ok(Session { client, driver })
    }
}

/// A session, with the task that drives it.
pub(crate) struct Session {
    client: Client,
    driver: JoinHandle<()>,
}

impl std::ops::Deref for Session {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Session {
    /// Closes the connection at once, whatever is in progress on it. Dropped, it says goodbye first.
    pub(super) fn cut(&self) {
        self.driver.abort();
    }
}

/// The database and its servers, without secrets.
fn place(config: &tokio_postgres::Config) -> String {
    let database = config.get_dbname().or(config.get_user()).unwrap_or_default();
    let ports = config.get_ports();
    let servers = config.get_hosts().iter().enumerate().map(|(n, host)| {
        let port = ports.get(n).or(ports.first()).copied().unwrap_or(5432);
        match host {
            Host::Tcp(name) => format!("{name}:{port}"),
            #[cfg(unix)]
            Host::Unix(path) => format!("{}:{port}", path.display()),
        }
    });
    format!("{database} on {}", servers.collect::<Vec<_>>().join(", "))
}

/// The server did not answer in time.
pub(super) fn silent() -> DatabaseError {
    let problem = "the server does not answer; it may hang, or have been replaced";
    DatabaseError::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_in_both_forms_and_never_repeated() {
        let parse = |address: &str| PostgresTarget::new(address, "public", 5);
        for address in ["postgres://u:hunter2@h:5433/d", "host=h port=5433 user=u password=hunter2 dbname=d"]
        {
            let target = parse(address).unwrap();
            assert_eq!(target.place(), "d on h:5433");
            assert!(!format!("{target:?}").contains("hunter2"));
        }
        let several = parse("postgres://u:hunter2@a,b:5433/d?target_session_attrs=read-write").unwrap();
        assert_eq!(several.place(), "d on a:5432, b:5433");
        for address in ["postgres://u:hunter2@h/d?nonsense=1", "mysql://u:hunter2@h/d", "hunter2", "user=u"] {
            let error = parse(address).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn a_pool_has_room_for_two_writers() {
        assert_eq!(PostgresTarget::new("postgres://u@h/d", "public", 1).unwrap().connections(), 2);
    }
}

//! The servers of a database, and opening a connection to the one that is the primary.

use std::path::Path;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgSslMode};
use sqlx::{ConnectOptions as _, Connection as _, Row as _};
use tokio::time::timeout;
use tokio_postgres::config::{Host, SslMode};

use super::sql::Tables;
use crate::error::RecordsError;

/// How long a server may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// How long to wait for the other servers after the first one has answered as a primary.
const GRACE: Duration = Duration::from_millis(250);

/// The timeline that a primary writes to; an error on a standby. Each promotion begins a new one.
const TIMELINE: &str =
    "SELECT pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 1, 8)";

/// The servers, the database and the user.
#[derive(Clone)]
pub struct PostgresTarget {
    servers: Vec<PgConnectOptions>,
    place: String,
    connections: usize,
    tables: Tables,
}

impl std::fmt::Debug for PostgresTarget {
    /// Omits the password, which the options contain.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresTarget").field("place", &self.place).finish_non_exhaustive()
    }
}

impl PostgresTarget {
    /// The database at this address, which is parsed as the checkpoints' is. Of several hosts, the primary is taken. TLS
    /// is used where the server has it; with `sslmode=require` and stronger it must, and the certificate is verified,
    /// against `root_certificates` or the system's.
    ///
    /// # Errors
    /// [`RecordsError::Invalid`]. It does not repeat the address, which contains a password.
    pub fn new(
        config: &tokio_postgres::Config,
        root_certificates: Option<&Path>,
        schema: &str,
        connections: u32,
    ) -> Result<Self, RecordsError> {
        let invalid = |problem: String| RecordsError::Invalid { field: "database.postgres_url", problem };
        if config.get_hosts().is_empty() {
            return Err(invalid("it names no host".to_owned()));
        }
        let database = config.get_dbname().or(config.get_user()).unwrap_or_default();
        let mut common = PgConnectOptions::new_without_pgpass()
            .disable_statement_logging()
            // Not known to poolers, and not needed: no number here is a float.
            .extra_float_digits(None)
            .database(database)
            .application_name(config.get_application_name().unwrap_or("threadkeep"))
            .ssl_mode(match config.get_ssl_mode() {
                SslMode::Disable => PgSslMode::Disable,
                SslMode::Prefer => PgSslMode::Prefer,
                _ => PgSslMode::VerifyFull,
            });
        if let Some(user) = config.get_user() {
            common = common.username(user);
        }
        if let Some(password) = config.get_password() {
            let password = std::str::from_utf8(password);
            common = common.password(password.map_err(|_| invalid("the password is not UTF-8".to_owned()))?);
        }
        if let Some(root) = root_certificates {
            common = common.ssl_root_cert(root);
        }
        let ports = config.get_ports();
        let (mut servers, mut shown) = (Vec::new(), Vec::new());
        for (n, host) in config.get_hosts().iter().enumerate() {
            let port = ports.get(n).or(ports.first()).copied().unwrap_or(5432);
            let (server, name) = match host {
                Host::Tcp(name) => (common.clone().host(name), name.clone()),
                #[cfg(unix)]
                Host::Unix(path) => (common.clone().socket(path), path.display().to_string()),
            };
            servers.push(server.port(port));
            shown.push(format!("{name}:{port}"));
        }
        Ok(Self {
            servers,
            place: format!("{database} on {}", shown.join(", ")),
            // One that waits for another process must not stop everything else.
            connections: usize::try_from(connections).unwrap_or(usize::MAX).max(2),
            tables: Tables::of(schema),
        })
    }

    /// Parses a URL or a `key=value` address.
    #[cfg(test)]
    pub(crate) fn parse(address: &str, schema: &str, connections: u32) -> Result<Self, RecordsError> {
        let invalid = |problem: String| RecordsError::Invalid { field: "database.postgres_url", problem };
        let address =
            threadkeep_postgres::Address::parse(address).map_err(|error| invalid(error.to_string()))?;
        Self::new(&address.config, address.root_certificates.as_deref(), schema, connections)
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

    /// Opens a connection to the server, or to the primary of several. All are asked at once, so that a hanging one
    /// delays nothing. If two claim to be the primary, the one promoted last is chosen.
    pub(crate) async fn open(&self) -> Result<PgConnection, sqlx::Error> {
        Ok(self.find().await?.0)
    }

    /// The same, with how it was opened.
    pub(super) async fn find(&self) -> Result<(PgConnection, &PgConnectOptions), sqlx::Error> {
        if let [only] = &self.servers[..] {
            return Ok((connect(only).await?, only));
        }
        let mut tries: FuturesUnordered<_> = self.servers.iter().map(primary).collect();
        let (mut best, mut failed) = (None::<Primary<'_>>, None);
        loop {
            let next = match &best {
                None => tries.next().await,
                Some(_) => timeout(GRACE, tries.next()).await.unwrap_or(None),
            };
            match next {
                None => break,
                Some(Ok(found)) if best.as_ref().is_none_or(|best| best.timeline < found.timeline) => {
                    best = Some(found);
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => failed = Some(error),
            }
        }
        match best {
            Some(Primary { connection, options, .. }) => Ok((connection, options)),
            None => Err(failed.unwrap_or(sqlx::Error::PoolTimedOut)),
        }
    }
}

struct Primary<'a> {
    connection: PgConnection,
    options: &'a PgConnectOptions,
    /// In hexadecimal digits, the same number for each.
    timeline: String,
}

async fn primary(options: &PgConnectOptions) -> Result<Primary<'_>, sqlx::Error> {
    let mut connection = connect(options).await?;
    let asked = async {
        let row = sqlx::raw_sql(TIMELINE).fetch_one(&mut connection).await?;
        row.try_get::<String, _>(0)
    };
    let timeline = timeout(CONNECT, asked).await.map_err(|_| silent())??;
    Ok(Primary { connection, options, timeline })
}

async fn connect(options: &PgConnectOptions) -> Result<PgConnection, sqlx::Error> {
    timeout(CONNECT, PgConnection::connect_with(options)).await.map_err(|_| silent())?
}

/// The server did not answer in time.
pub(super) fn silent() -> sqlx::Error {
    let problem = "the server does not answer; it may hang, or have been replaced";
    sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_in_both_forms_and_never_repeated() {
        let parse = |address: &str| PostgresTarget::parse(address, "public", 5);
        for address in ["postgres://u:hunter2@h:5433/d", "host=h port=5433 user=u password=hunter2 dbname=d"]
        {
            let target = parse(address).unwrap();
            assert_eq!(target.place(), "d on h:5433");
            assert!(!format!("{target:?}").contains("hunter2"));
            assert_eq!(target.servers[0].get_username(), "u");
        }
        let several = parse("postgres://u:hunter2@a,b:5433/d?target_session_attrs=read-write").unwrap();
        assert_eq!(several.place(), "d on a:5432, b:5433");
        for address in ["postgres://u:hunter2@h/d?nonsense=1", "mysql://u:hunter2@h/d", "hunter2"] {
            let error = parse(address).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn tls_is_preferred_and_checked_where_it_is_asked_for() {
        let mode =
            |address: &str| PostgresTarget::parse(address, "public", 5).unwrap().servers[0].get_ssl_mode();
        for preferred in ["postgres://u@h/d", "postgres://u@h/d?sslmode=prefer", "host=h user=u"] {
            assert!(matches!(mode(preferred), PgSslMode::Prefer), "{preferred}");
        }
        assert!(matches!(mode("postgres://u@h/d?sslmode=disable"), PgSslMode::Disable));
        for checked in [
            "postgres://u@h/d?sslmode=require",
            "postgres://u@h/d?sslmode=verify-full&sslrootcert=/some/file",
            "host=h user=u sslmode=require",
        ] {
            assert!(matches!(mode(checked), PgSslMode::VerifyFull), "{checked}");
        }
    }

    #[test]
    fn a_pool_has_room_for_two_writers() {
        assert_eq!(PostgresTarget::parse("postgres://u@h/d", "public", 1).unwrap().connections(), 2);
    }
}

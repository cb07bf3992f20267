//! What is specific to Postgres: opening connections, beginning write transactions and their locks, the names of the
//! tables, and SQL expressions that differ between databases.
//!
//! # Write transactions
//!
//! Those of one thread run one after the other, in any process: each begins by taking the thread's lock, which ends
//! with the transaction. A transaction for all threads takes a lock that every other one shares.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sqlx::error::DatabaseError;
use sqlx::postgres::{PgArguments, PgConnectOptions, PgPoolOptions, PgSslMode};
use sqlx::{AssertSqlSafe, ConnectOptions as _, PgPool, Postgres};
use tokio_postgres::config::{Host, SslMode};

use super::error::RecordsError;
use super::query::{Builder, Sql, Value};

pub(super) type Pool = PgPool;

/// How long an operation waits for a connection, also while the server starts.
const PATIENCE: Duration = Duration::from_secs(5);

/// The server, database and user.
#[derive(Clone)]
pub struct PostgresTarget {
    options: PgConnectOptions,
    place: String,
    connections: u32,
    tables: Tables,
}

impl std::fmt::Debug for PostgresTarget {
    /// Omits the password, which the options contain.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresTarget").field("place", &self.place).finish_non_exhaustive()
    }
}

impl PostgresTarget {
    /// The database at this address, which is parsed as the checkpoints' is. TLS is used with `sslmode=require` and
    /// stronger, and then always verified, against `root_certificates` or the system's.
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
        let [host] = config.get_hosts() else {
            return Err(invalid("it must name exactly one host".to_owned()));
        };
        let port = config.get_ports().first().copied().unwrap_or(5432);
        let mut options = PgConnectOptions::new_without_pgpass().port(port).disable_statement_logging();
        let shown = match host {
            Host::Tcp(name) => {
                options = options.host(name);
                name.clone()
            }
            #[cfg(unix)]
            Host::Unix(path) => {
                options = options.socket(path);
                path.display().to_string()
            }
        };
        if let Some(user) = config.get_user() {
            options = options.username(user);
        }
        if let Some(password) = config.get_password() {
            let password = std::str::from_utf8(password);
            options =
                options.password(password.map_err(|_| invalid("the password is not UTF-8".to_owned()))?);
        }
        let database = config.get_dbname().or(config.get_user()).unwrap_or_default();
        options = options.database(database);
        options = options.application_name(config.get_application_name().unwrap_or("threadkeep"));
        options = match config.get_ssl_mode() {
            SslMode::Require => options.ssl_mode(PgSslMode::VerifyFull),
            _ => options.ssl_mode(PgSslMode::Disable),
        };
        if let Some(root) = root_certificates {
            options = options.ssl_root_cert(root);
        }
        Ok(Self {
            place: format!("{database} on {shown}:{port}"),
            options,
            connections: connections.max(1),
            tables: Tables::of(schema),
        })
    }

    /// Parses a URL or a `key=value` address.
    #[cfg(test)]
    pub(super) fn parse(address: &str, schema: &str, connections: u32) -> Result<Self, RecordsError> {
        let invalid = |problem: String| RecordsError::Invalid { field: "database.postgres_url", problem };
        let address =
            threadkeep_postgres::Address::parse(address).map_err(|error| invalid(error.to_string()))?;
        Self::new(&address.config, address.root_certificates.as_deref(), schema, connections)
    }

    /// The database's name in errors.
    pub(super) fn place(&self) -> &str {
        &self.place
    }

    pub(super) fn tables(&self) -> &Tables {
        &self.tables
    }

    pub(super) async fn connect(&self) -> Result<Pool, sqlx::Error> {
        PgPoolOptions::new()
            .max_connections(self.connections)
            .acquire_timeout(PATIENCE)
            .connect_with(self.options.clone())
            .await
    }
}

/// The table names: prefixed, because others may use the schema.
#[derive(Clone, Debug)]
pub(super) struct Tables {
    prefix: Arc<str>,
}

/// The table names used in statements.
const NAMES: [&str; 4] = ["threads_meta", "runs", "run_events", "run_frames"];

impl Tables {
    fn of(schema: &str) -> Self {
        Self { prefix: format!("\"{}\".threadkeep_gateway_", schema.replace('"', "\"\"")).into() }
    }

    /// The table that lists the applied migrations.
    pub(super) fn migrations(&self) -> String {
        format!("{}migrations", self.prefix)
    }

    /// The lock number for a name, specific to these tables. A collision only makes two names wait for each other.
    fn lock(&self, name: &str) -> i64 {
        let mut key = [0; 8];
        let hash = blake3::Hasher::new().update(self.prefix.as_bytes()).update(name.as_bytes()).finalize();
        key.copy_from_slice(&hash.as_bytes()[..8]);
        i64::from_le_bytes(key)
    }

    /// A statement with the tables' full names.
    pub(super) fn qualify(&self, text: &str) -> String {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let mut qualified = String::with_capacity(text.len() + 2 * self.prefix.len());
        let (mut rest, mut before) = (text, ' ');
        while let Some(first) = rest.chars().next() {
            let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len()).max(first.len_utf8());
            let (word, after) = rest.split_at(end);
            if NAMES.contains(&word) && !matches!(before, '.' | '"' | '\'') {
                qualified.push_str(&self.prefix);
            }
            qualified.push_str(word);
            before = word.chars().next_back().unwrap_or(' ');
            rest = after;
        }
        qualified
    }
}

/// Which other transactions a write transaction excludes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scope<'a> {
    /// Those of this thread.
    Thread(&'a str),
    /// All.
    EveryThread,
}

/// The statements that begin a write transaction. The server ends it if its process stalls, so that others do not wait
/// for long.
pub(super) fn begin(tables: &Tables, scope: Scope<'_>) -> AssertSqlSafe<String> {
    let every_thread = tables.lock("");
    let lock = match scope {
        Scope::Thread(thread_id) => format!(
            "SELECT pg_advisory_xact_lock_shared({every_thread}), pg_advisory_xact_lock({})",
            // A thread's id is never empty.
            tables.lock(thread_id)
        ),
        Scope::EveryThread => format!("SELECT pg_advisory_xact_lock({every_thread})"),
    };
    AssertSqlSafe(format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = '5s'; \
         SET LOCAL lock_timeout = '10s'; {lock}"
    ))
}

/// A statement in Postgres form.
pub(super) fn prepared(sql: Sql, tables: &Tables) -> sqlx::query::Query<'static, Postgres, PgArguments> {
    let mut query = sqlx::query(AssertSqlSafe(tables.qualify(&sql.text)));
    for value in sql.values {
        query = match value {
            Value::Text(text) => query.bind(text.map(without_nul)),
            Value::Int(number) => query.bind(number),
            Value::Flag(flag) => query.bind(flag),
            Value::Texts(texts) => query.bind(texts.into_iter().map(without_nul).collect::<Vec<_>>()),
        };
    }
    query
}

/// Postgres text cannot contain NUL; JSON documents have it escaped.
fn without_nul(text: String) -> String {
    if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text }
}

/// The SQL around the list in "column is one of these texts".
pub(super) const TEXT_IN: (&str, &str) = (" = ANY(", ")");

/// Appends the text of the value at `key` of the JSON object in `column`.
pub(super) fn push_json_at(query: &mut Builder, column: &str, key: &str) {
    // The server cannot look into a document with an escaped NUL.
    query
        .push("(replace(")
        .push(column)
        .push(", '\\u0000', '\\ufffd')::json -> ")
        .push_bind(key)
        .push(")::text");
}

/// The text of a JSON value as [`push_json_at`] returns it.
pub(super) fn json_without_nul(text: &str) -> String {
    text.replace("\\u0000", "\\ufffd")
}

/// Whether the server reports that its files are damaged.
pub(super) fn is_corruption(error: &dyn DatabaseError) -> bool {
    matches!(error.code().as_deref(), Some("XX001" | "XX002"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_named_in_full_and_nothing_else_is_changed() {
        let tables = Tables::of("a\"b");
        assert_eq!(
            tables.qualify(
                "SELECT runs.run_id, 'runs' FROM runs WHERE EXISTS (SELECT 1 FROM run_events) -- r\u{fc}ns"
            ),
            "SELECT \"a\"\"b\".threadkeep_gateway_runs.run_id, 'runs' FROM \"a\"\"b\".threadkeep_gateway_runs WHERE EXISTS \
             (SELECT 1 FROM \"a\"\"b\".threadkeep_gateway_run_events) -- r\u{fc}ns"
        );
        for same in ["runs_one_active_per_thread", "first_runs", "s.runs", "\"runs\"", ""] {
            assert_eq!(tables.qualify(same), same);
        }
        assert_eq!(tables.migrations(), "\"a\"\"b\".threadkeep_gateway_migrations");
    }

    #[test]
    fn an_address_is_read_in_both_forms_and_never_repeated() {
        let parse = |address: &str| PostgresTarget::parse(address, "public", 5);
        for address in ["postgres://u:hunter2@h:5433/d", "host=h port=5433 user=u password=hunter2 dbname=d"]
        {
            let target = parse(address).unwrap();
            assert_eq!(target.place(), "d on h:5433");
            assert!(!format!("{target:?}").contains("hunter2"));
            assert_eq!(target.options.get_username(), "u");
        }
        for address in [
            "postgres://u:hunter2@h/d?nonsense=1",
            "mysql://u:hunter2@h/d",
            "postgres://u:hunter2@a,b/d",
            "hunter2",
        ] {
            let error = parse(address).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn tls_is_checked_where_it_is_asked_for() {
        let mode =
            |address: &str| PostgresTarget::parse(address, "public", 5).unwrap().options.get_ssl_mode();
        for plain in ["postgres://u@h/d", "postgres://u@h/d?sslmode=prefer", "host=h user=u"] {
            assert!(matches!(mode(plain), PgSslMode::Disable), "{plain}");
        }
        for checked in [
            "postgres://u@h/d?sslmode=require",
            "postgres://u@h/d?sslmode=verify-full&sslrootcert=/some/file",
            "host=h user=u sslmode=require",
        ] {
            assert!(matches!(mode(checked), PgSslMode::VerifyFull), "{checked}");
        }
    }
}

//! The numbered migrations of the database, and applying them.

use std::fmt::Write as _;
use std::io;
use std::pin::pin;
use std::time::{Duration, Instant};

use rusqlite::{Connection, TransactionBehavior};
use sha2::{Digest as _, Sha384};
use tokio::time::timeout;
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use super::error::RecordsError;
use super::failure::DatabaseError;
use super::postgres::{self, PostgresTarget, Tables};
use super::query::{Sql, query};
use super::sqlite::fetch_all;

/// A migration, for each database.
struct Step {
    name: &'static str,
    sqlite: &'static str,
    postgres: &'static str,
}

macro_rules! step {
    ($number:literal, $name:literal) => {
        Step {
            name: $name,
            sqlite: include_str!(concat!("migrations/sqlite/", $number, "_", $name, ".sql")),
            postgres: include_str!(concat!("migrations/postgres/", $number, "_", $name, ".sql")),
        }
    };
}

/// Migrations 1, 2, 3 ... A released migration never changes; append new ones.
const STEPS: &[Step] = &[
    step!("0001", "threads"),
    step!("0002", "runs"),
    step!("0003", "run_events"),
    step!("0004", "leases"),
    step!("0005", "run_queue"),
    step!("0006", "run_frames"),
    step!("0007", "store_settings"),
    step!("0008", "executions"),
    step!("0009", "subagents"),
    step!("0010", "counted"),
    step!("0011", "subagent_batches"),
    step!("0012", "batch_remains"),
    step!("0013", "left_checkpoint"),
    step!("0014", "batch_tokens"),
    step!("0015", "uncounted_items"),
    step!("0016", "events_given"),
    step!("0017", "finished_before"),
    step!("0018", "edits"),
    step!("0019", "token_budgets"),
    step!("0020", "frames_as_they_are"),
    step!("0021", "history_lost"),
];

/// Upgrades a SQLite database to the newest schema: applies all missing migrations or, after an error, none. Concurrent
/// processes apply them once.
///
/// # Errors
/// [`RecordsError::NewerSchema`] if a newer build wrote the database, [`RecordsError::Corrupt`] if an applied migration
/// differs from this build's.
pub(super) fn migrate_sqlite(connection: &mut Connection, place: &str) -> Result<(), RecordsError> {
    apply_sqlite(STEPS, connection, place)
}

/// Checks that a SQLite database that cannot be written has this build's schema.
///
/// # Errors
/// [`RecordsError::NewerSchema`], [`RecordsError::Corrupt`], and [`RecordsError::ReadOnly`] if it would have to be upgraded.
pub(super) fn check_sqlite(connection: &Connection, place: &str) -> Result<(), RecordsError> {
    let missing = missing_in_sqlite(connection, place)?;
    if missing == 0 {
        return Ok(());
    }
    let problem =
        format!("it was written by an older build and must be upgraded first, by {missing} migrations");
    let cause = DatabaseError::Io(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, problem));
    Err(RecordsError::ReadOnly { place: place.to_owned(), cause })
}

/// Checks that a SQLite database has this build's schema, and leaves it as it is.
///
/// # Errors
/// [`RecordsError::NewerSchema`], [`RecordsError::Corrupt`], [`RecordsError::OlderSchema`].
pub(super) fn check_existing_sqlite(connection: &Connection, place: &str) -> Result<(), RecordsError> {
    refuse_older(missing_in_sqlite(connection, place)?, place)
}

/// [`check_existing_sqlite`] for the tables in a Postgres database.
pub(super) async fn check_existing_postgres(
    pool: &postgres::Pool,
    target: &PostgresTarget,
) -> Result<(), RecordsError> {
    let tables = target.tables();
    let known = numbered(STEPS, |step| tables.qualify(step.postgres));
    let applied = applied_postgres(pool).await?.unwrap_or_default();
    refuse_older(missing(&known, &applied, target.place())?.len(), target.place())
}

fn refuse_older(missing: usize, place: &str) -> Result<(), RecordsError> {
    if missing > 0 {
        return Err(RecordsError::OlderSchema { place: place.to_owned(), missing });
    }
    Ok(())
}

/// How many migrations a SQLite database lacks.
fn missing_in_sqlite(connection: &Connection, place: &str) -> Result<usize, RecordsError> {
    let known = numbered(STEPS, |step| step.sqlite.to_owned());
    let there = query("SELECT name FROM sqlite_master WHERE name = '_sqlx_migrations'");
    let has_list = !fetch_all::<(String,)>(connection, &there)?.is_empty();
    let applied = if has_list { fetch_all(connection, &query(APPLIED_SQLITE))? } else { Vec::new() };
    Ok(missing(&known, &applied, place)?.len())
}

/// [`migrate_sqlite`] for the tables in a Postgres database.
pub(super) async fn migrate_postgres(
    pool: &postgres::Pool,
    target: &PostgresTarget,
) -> Result<(), RecordsError> {
    apply_postgres(STEPS, pool, target).await?;
    catch_up(pool, target.tables()).await
}

/// A step with its number, and the text that is applied.
struct Migration {
    version: i64,
    name: &'static str,
    text: String,
    checksum: Vec<u8>,
}

fn numbered(steps: &[Step], text: impl Fn(&Step) -> String) -> Vec<Migration> {
    let numbered = (1..).zip(steps).map(|(version, step)| {
        let text = text(step);
        Migration { version, name: step.name, checksum: Sha384::digest(text.as_bytes()).to_vec(), text }
    });
    numbered.collect()
}

/// The migrations that were not applied yet, if those that were are known and unchanged.
fn missing<'m>(
    known: &'m [Migration],
    applied: &[(i64, Vec<u8>)],
    place: &str,
) -> Result<Vec<&'m Migration>, RecordsError> {
    let find = |version: i64| known.iter().find(|migration| migration.version == version);
    if let Some((found, _)) = applied.iter().find(|(version, _)| find(*version).is_none()) {
        let supported = known.last().map_or(0, |migration| migration.version);
        return Err(RecordsError::NewerSchema { place: place.to_owned(), found: *found, supported });
    }
    let changed = |(version, checksum): &&(i64, Vec<u8>)| {
        find(*version).is_some_and(|migration| migration.checksum != *checksum)
    };
    if let Some((version, _)) = applied.iter().find(changed) {
        return Err(RecordsError::Corrupt {
            place: "the record of migrations".to_owned(),
            detail: format!("migration {version} is not the one that this build has"),
        });
    }
    Ok(known
        .iter()
        .filter(|migration| applied.iter().all(|(version, _)| *version != migration.version))
        .collect())
}

fn apply_sqlite(steps: &[Step], connection: &mut Connection, place: &str) -> Result<(), RecordsError> {
    let known = numbered(steps, |step| step.sqlite.to_owned());
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    tx.execute_batch(LIST_OF_MIGRATIONS).map_err(failed)?;
    let applied: Vec<(i64, Vec<u8>)> = fetch_all(&tx, &query(APPLIED_SQLITE))?;
    for migration in missing(&known, &applied, place)? {
        tx.execute_batch(&migration.text).map_err(failed)?;
        let sql = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
                   VALUES (?1, ?2, TRUE, ?3, 0)";
        tx.execute(sql, (migration.version, migration.name, &*migration.checksum)).map_err(failed)?;
    }
    tx.commit().map_err(failed)?;
    Ok(())
}

/// The migrations that were applied, in order.
const APPLIED_SQLITE: &str = "SELECT version, checksum FROM _sqlx_migrations ORDER BY version";

/// The list of applied migrations, as earlier builds created it.
const LIST_OF_MIGRATIONS: &str = "CREATE TABLE IF NOT EXISTS _sqlx_migrations ( \
     version BIGINT PRIMARY KEY, description TEXT NOT NULL, \
     installed_on TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP, success BOOLEAN NOT NULL, \
     checksum BLOB NOT NULL, execution_time BIGINT NOT NULL)";

async fn apply_postgres(
    steps: &[Step],
    pool: &postgres::Pool,
    target: &PostgresTarget,
) -> Result<(), RecordsError> {
    let tables = target.tables();
    let known = numbered(steps, |step| tables.qualify(step.postgres));
    // If nothing needs to be done, a role that can only read and write rows suffices.
    if let Some(applied) = applied_postgres(pool).await?
        && missing(&known, &applied, target.place())?.is_empty()
    {
        return Ok(());
    }
    reported(upgrade(&known, pool, target)).await
}

/// Applies what is missing in one transaction, after another process that does the same.
async fn upgrade(
    known: &[Migration],
    pool: &postgres::Pool,
    target: &PostgresTarget,
) -> Result<(), RecordsError> {
    let tables = target.tables();
    let mut tx = pool.begin_migration().await?;
    // As earlier builds created it.
    let list = "CREATE TABLE IF NOT EXISTS migrations (version BIGINT PRIMARY KEY, description TEXT NOT NULL, \
                installed_on TIMESTAMPTZ NOT NULL DEFAULT now(), success BOOLEAN NOT NULL, \
                checksum BYTEA NOT NULL, execution_time BIGINT NOT NULL)";
    tx.batch(&tables.qualify(list)).await?;
    let applied = rows(&tx.fetch_all(query(APPLIED)).await?)?;
    if applied.is_empty() {
        refuse_encoding(&tx.fetch_all(query(ENCODING)).await?, target.place())?;
    }
    for migration in missing(known, &applied, target.place())? {
        tx.batch(&migration.text).await?;
        let checksum = hex(&migration.checksum);
        let sql = "INSERT INTO migrations (version, description, success, checksum, execution_time) \
                   VALUES ($1, $2, TRUE, decode($3, 'hex'), 0)";
        tx.execute(query(sql).bind(migration.version).bind(migration.name).bind(checksum)).await?;
    }
    tx.commit().await
}

/// How the database stores texts.
const ENCODING: &str = "SELECT pg_catalog.getdatabaseencoding()::text";

/// Refuses a database in which only some texts can be stored: it would refuse messages later.
fn refuse_encoding(found: &[tokio_postgres::Row], place: &str) -> Result<(), RecordsError> {
    let encoding = found.first().map(|row| row.try_get::<_, String>(0)).transpose();
    match encoding.map_err(DatabaseError::from)?.as_deref() {
        // With SQL_ASCII the server stores what it is sent.
        None | Some("UTF8" | "SQL_ASCII") => Ok(()),
        Some(encoding) => Err(RecordsError::Invalid {
            field: "database.postgres_url",
            problem: format!(
                "the encoding of {place} is {encoding}, in which many texts cannot be stored; name a database that was created \
                 with TEMPLATE template0 ENCODING 'UTF8'"
            ),
        }),
    }
}

/// The numbers that the database draws: the tables and their columns.
const DRAWN: [(&str, &str); 2] = [("runs", "admission_seq"), ("run_events", "id")];

/// Moves the sequences beyond the numbers that are in the tables. Logical replication, with which servers are upgraded,
/// copies rows and not where sequences are; then every new run would have the number of an old one.
async fn catch_up(pool: &postgres::Pool, tables: &Tables) -> Result<(), RecordsError> {
    for (table, column) in DRAWN {
        let overtaken = |what: &str| {
            // A role that may not look at a sequence leaves it alone.
            let sql = format!(
                "SELECT {what} FROM (SELECT MAX({column}) AS newest FROM {table}) AS held CROSS JOIN \
                 (SELECT pg_catalog.pg_get_serial_sequence($1, '{column}')::regclass AS name) AS drawn \
                 WHERE newest > CASE WHEN has_sequence_privilege(name, 'UPDATE') AND has_sequence_privilege(name, 'USAGE') \
                 THEN COALESCE(pg_sequence_last_value(name), 0) ELSE newest END"
            );
            Sql { text: sql.into(), values: vec![tables.qualify(table).into()] }
        };
        if pool.fetch_all(overtaken("newest")).await?.is_empty() {
            continue;
        }
        tracing::warn!(
            table,
            "new rows would have numbers that old ones have; the sequence is moved beyond them"
        );
        // No other process writes meanwhile.
        let mut tx = pool.begin_migration().await?;
        tx.fetch_all(overtaken("setval(name, newest)")).await?;
        tx.commit().await?;
    }
    Ok(())
}

/// How often the log says that an upgrade goes on.
const REPORT: Duration = Duration::from_secs(10);

/// Does work that may take any time, and says so: nobody should think that it hangs, or not know whom it waits for.
async fn reported<T>(work: impl Future<Output = T>) -> T {
    let (mut work, started) = (pin!(work), Instant::now());
    loop {
        if let Ok(done) = timeout(REPORT, &mut work).await {
            return done;
        }
        tracing::warn!(
            seconds = started.elapsed().as_secs(),
            "the gateway's tables are being upgraded, by this process or another one, or another session has locked them \
             (pg_stat_activity shows it)"
        );
    }
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// The migrations that were applied, in order.
const APPLIED: &str = "SELECT version, checksum FROM migrations WHERE success ORDER BY version";

/// The same in a Postgres database, if it has the table.
async fn applied_postgres(pool: &postgres::Pool) -> Result<Option<Vec<(i64, Vec<u8>)>>, RecordsError> {
    match pool.fetch_all(query(APPLIED)).await {
        Ok(found) => Ok(Some(rows(&found)?)),
        // There is no such table, or no such schema.
        Err(DatabaseError::Postgres(error))
            if error.code().is_some_and(|code| matches!(code.code(), "42P01" | "3F000")) =>
        {
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

fn rows(found: &[tokio_postgres::Row]) -> Result<Vec<(i64, Vec<u8>)>, DatabaseError> {
    let read = |row: &tokio_postgres::Row| Ok((row.try_get(0)?, row.try_get(1)?));
    found.iter().map(read).collect::<Result<_, tokio_postgres::Error>>().map_err(DatabaseError::from)
}

/// Whether the tables were created.
pub(super) async fn is_in_postgres(client: &Client, tables: &Tables) -> Result<bool, DatabaseError> {
    let sql = "SELECT to_regclass($1) IS NOT NULL";
    let row = client.query_typed_one(sql, &[(&tables.migrations(), Type::TEXT)]).await?;
    Ok(row.try_get(0)?)
}

fn failed(error: rusqlite::Error) -> RecordsError {
    DatabaseError::from(error).into()
}

#[cfg(test)]
mod tests;

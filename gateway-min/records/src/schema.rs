//! The numbered migrations of the database, and applying them.

use rusqlite::{Connection, TransactionBehavior};
use sqlx::migrate::{AppliedMigration, Migrate, MigrateError, Migration, MigrationType, Migrator};
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Connection as _, Row as _, SqlSafeStr as _, SqlStr};

use super::error::RecordsError;
use super::postgres::{self, PostgresTarget, Scope, Tables};
use super::query::query;
use super::sqlite;

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
const STEPS: [Step; 11] = [
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
];

/// Upgrades a SQLite database to the newest schema: applies all missing migrations or, after an error, none. Concurrent
/// processes apply them once.
///
/// # Errors
/// [`RecordsError::NewerSchema`] if a newer build wrote the database, [`RecordsError::Corrupt`] if an applied migration
/// differs from this build's.
pub(super) fn migrate_sqlite(connection: &mut Connection, place: &str) -> Result<(), RecordsError> {
    apply_sqlite(&STEPS, connection, place)
}

/// The same for the tables in a Postgres database.
pub(super) async fn migrate_postgres(
    pool: &postgres::Pool,
    target: &PostgresTarget,
) -> Result<(), RecordsError> {
    apply_postgres(&STEPS, pool, target).await
}

fn apply_sqlite(steps: &[Step], connection: &mut Connection, place: &str) -> Result<(), RecordsError> {
    let migrator = migrator(steps, |step| step.sqlite.into_sql_str());
    let mut applying = || -> rusqlite::Result<Result<(), MigrateError>> {
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        tx.execute_batch(LIST_OF_MIGRATIONS)?;
        let sql = "SELECT version, checksum FROM _sqlx_migrations ORDER BY version";
        let applied = tx
            .prepare(sql)?
            .query_map([], |row| {
                Ok(AppliedMigration { version: row.get(0)?, checksum: row.get::<_, Vec<u8>>(1)?.into() })
            })?
            .collect::<rusqlite::Result<Vec<_>>>()?;
        let missing = match missing(&migrator, &applied) {
            Ok(missing) => missing,
            Err(error) => return Ok(Err(error)),
        };
        for migration in missing {
            tx.execute_batch(migration.sql.as_str())?;
            let sql = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
                       VALUES (?1, ?2, TRUE, ?3, 0)";
            tx.execute(sql, (migration.version, &*migration.description, &*migration.checksum))?;
        }
        tx.commit()?;
        Ok(Ok(()))
    };
    applied(&migrator, applying().map_err(sqlite::failed)?, place)
}

/// The list of applied migrations, as earlier builds created it.
const LIST_OF_MIGRATIONS: &str = "CREATE TABLE IF NOT EXISTS _sqlx_migrations ( \
     version BIGINT PRIMARY KEY, description TEXT NOT NULL, \
     installed_on TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP, success BOOLEAN NOT NULL, \
     checksum BLOB NOT NULL, execution_time BIGINT NOT NULL)";

/// The migrations that were not applied yet.
fn missing<'m>(
    migrator: &'m Migrator,
    applied: &[AppliedMigration],
) -> Result<Vec<&'m Migration>, MigrateError> {
    for row in applied {
        let known = migrator.iter().find(|migration| migration.version == row.version);
        match known {
            None => return Err(MigrateError::VersionMissing(row.version)),
            Some(known) if known.checksum != row.checksum => {
                return Err(MigrateError::VersionMismatch(row.version));
            }
            Some(_) => {}
        }
    }
    let is_missing = |migration: &&Migration| applied.iter().all(|row| row.version != migration.version);
    Ok(migrator.iter().filter(is_missing).collect())
}

async fn apply_postgres(
    steps: &[Step],
    pool: &postgres::Pool,
    target: &PostgresTarget,
) -> Result<(), RecordsError> {
    let tables = target.tables();
    let mut migrator = migrator(steps, |step| AssertSqlSafe(tables.qualify(step.postgres)).into_sql_str());
    // The migrator's own lock lasts longer than a transaction, which does not work through a pooler.
    migrator.set_locking(false);
    migrator.dangerous_set_table_name(tables.migrations());
    if is_newest(&migrator, pool).await? {
        return Ok(());
    }
    let mut held = pool.acquire().await?;
    let mut tx = held.dirty().begin_with(postgres::begin(tables, Scope::EveryThread)).await?;
    // The migrator prepares statements. Behind a pooler the session may be one in which an earlier one did.
    sqlx::raw_sql("DEALLOCATE ALL").execute(&mut *tx).await?;
    apply(&migrator, &mut *tx, target.place()).await?;
    tx.commit().await?;
    // What it prepared earlier is gone, so it is closed.
    drop(held);
    Ok(())
}

/// Whether the tables were created.
pub(super) async fn is_in_postgres(
    connection: &mut PgConnection,
    tables: &Tables,
) -> Result<bool, sqlx::Error> {
    let name = tables.migrations().replace('\'', "''");
    let sql = format!("SELECT to_regclass('{name}') IS NOT NULL");
    sqlx::raw_sql(AssertSqlSafe(sql)).fetch_one(connection).await?.try_get(0)
}

/// Whether exactly these migrations were applied. Then nothing needs to be done, and a role that can only read and
/// write rows suffices.
async fn is_newest(migrator: &Migrator, pool: &postgres::Pool) -> Result<bool, RecordsError> {
    let sql = query("SELECT version, checksum FROM migrations WHERE success ORDER BY version");
    let applied = match pool.fetch_all(sql).await {
        Ok(applied) => applied,
        // There is no such table, or no such schema.
        Err(sqlx::Error::Database(error)) if matches!(error.code().as_deref(), Some("42P01" | "3F000")) => {
            return Ok(false);
        }
        Err(error) => return Err(error.into()),
    };
    let applied = applied.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?)));
    let applied: Vec<(i64, Vec<u8>)> = applied.collect::<Result<_, sqlx::Error>>()?;
    let known = migrator.iter().map(|migration| (migration.version, &*migration.checksum));
    Ok(known.eq(applied.iter().map(|(version, checksum)| (*version, checksum.as_slice()))))
}

fn migrator(steps: &[Step], text: impl Fn(&Step) -> SqlStr) -> Migrator {
    let migrations = (1..).zip(steps).map(|(version, step)| {
        Migration::new(version, step.name.into(), MigrationType::Simple, text(step), false)
    });
    Migrator::with_migrations(migrations.collect())
}

async fn apply<C: Migrate>(migrator: &Migrator, connection: &mut C, place: &str) -> Result<(), RecordsError> {
    // Like `run`, whose future is not `Send`.
    applied(migrator, migrator.run_direct(None, connection, false).await, place)
}

fn applied(migrator: &Migrator, result: Result<(), MigrateError>, place: &str) -> Result<(), RecordsError> {
    match result {
        Ok(()) => Ok(()),
        Err(MigrateError::VersionMissing(found)) => {
            let supported = migrator.iter().map(|migration| migration.version).max().unwrap_or(0);
            Err(RecordsError::NewerSchema { place: place.to_owned(), found, supported })
        }
        Err(MigrateError::Execute(cause) | MigrateError::ExecuteMigration(cause, _)) => Err(cause.into()),
        Err(error) => Err(RecordsError::Corrupt {
            place: "the record of migrations".to_owned(),
            detail: error.to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use threadkeep_testing::postgres as server;

    use super::*;
    use crate::query::query;
    use crate::sqlite::{fetch_all, open_memory, open_writer};

    fn schema(connection: &Connection) -> Vec<(String,)> {
        let sql = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name";
        fetch_all(connection, &query(sql)).unwrap()
    }

    fn versions(connection: &Connection) -> Vec<(i64,)> {
        fetch_all(connection, &query("SELECT version FROM _sqlx_migrations ORDER BY version")).unwrap()
    }

    fn numbers() -> Vec<(i64,)> {
        (1..).take(STEPS.len()).map(|version| (version,)).collect()
    }

    fn broken() -> [Step; 2] {
        let broken = "CREATE TABLE x (a int); CREATE TABLE x (b int)";
        [step!("0001", "threads"), Step { name: "broken", sqlite: broken, postgres: broken }]
    }

    #[test]
    fn every_older_schema_becomes_the_newest() {
        let mut fresh = open_memory().unwrap();
        migrate_sqlite(&mut fresh, "fresh").unwrap();
        for older in 0..STEPS.len() {
            let mut old = open_memory().unwrap();
            apply_sqlite(&STEPS[..older], &mut old, "old").unwrap();
            assert_eq!(versions(&old).len(), older);
            migrate_sqlite(&mut old, "old").unwrap();
            assert_eq!(schema(&old), schema(&fresh));
            assert_eq!(versions(&old), versions(&fresh));
        }
    }

    #[test]
    fn failing_migration_takes_the_ones_before_it_back() {
        let mut old = open_memory().unwrap();
        apply_sqlite(&STEPS[..1], &mut old, "old").unwrap();
        let before = schema(&old);
        let error = apply_sqlite(&broken(), &mut old, "old").unwrap_err();
        assert!(error.to_string().contains("table x already exists"), "{error}");
        assert_eq!(schema(&old), before);
        assert_eq!(versions(&old), [(1,)]);
    }

    /// A database that the library sqlx migrated, as earlier builds did: the list of migrations is read as it is.
    #[test]
    fn list_of_migrations_of_earlier_builds_is_understood() {
        let mut old = open_memory().unwrap();
        migrate_sqlite(&mut old, "old").unwrap();
        let sql = query("SELECT checksum FROM _sqlx_migrations ORDER BY version");
        let checksums: Vec<(Vec<u8>,)> = fetch_all(&old, &sql).unwrap();
        let of = |step: &Step| <sha2::Sha384 as sha2::Digest>::digest(step.sqlite.as_bytes()).to_vec();
        assert_eq!(checksums, STEPS.iter().map(|step| (of(step),)).collect::<Vec<_>>());
    }

    #[test]
    fn processes_that_start_together_migrate_once() {
        for _ in 0..10 {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("gateway.db");
            // The file exists, as if another process had just opened it.
            drop(open_writer(&path).unwrap());
            let starts = (0..4).map(|_| {
                let path = path.clone();
                std::thread::spawn(move || migrate_sqlite(&mut open_writer(&path).unwrap(), "here"))
            });
            for start in starts.collect::<Vec<_>>() {
                start.join().unwrap().unwrap();
            }
            assert_eq!(versions(&open_writer(&path).unwrap()), numbers());
        }
    }

    /// The tables, columns and indexes in a Postgres schema, as text.
    async fn described(connection: &mut PgConnection, schema: &str) -> Vec<String> {
        let sql = "SELECT format('%s.%s %s %s %s', table_name, column_name, data_type, is_nullable, column_default) \
                   FROM information_schema.columns WHERE table_schema = $1 \
                   UNION ALL SELECT replace(indexdef, $1, 's') FROM pg_indexes WHERE schemaname = $1 ORDER BY 1";
        let rows = sqlx::query(sql).bind(schema).fetch_all(connection).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    #[tokio::test]
    async fn every_older_postgres_schema_becomes_the_newest_and_a_failure_is_taken_back() {
        let database = server().unwrap().database().await.unwrap();
        let in_schema = async |schema: &str| {
            let target = PostgresTarget::parse(database.url(), schema, 2).unwrap();
            (postgres::Pool::connect(&target).await.unwrap(), target)
        };
        let (pool, fresh) = in_schema("fresh").await;
        let mut admin = fresh.open().await.unwrap();
        sqlx::raw_sql("CREATE SCHEMA fresh").execute(&mut admin).await.unwrap();
        migrate_postgres(&pool, &fresh).await.unwrap();
        let newest = described(&mut admin, "fresh").await;
        assert!(newest.len() > 50, "{newest:?}");
        for older in 0..STEPS.len() {
            let name = format!("old{older}");
            let (pool, old) = in_schema(&name).await;
            sqlx::raw_sql(AssertSqlSafe(format!("CREATE SCHEMA {name}"))).execute(&mut admin).await.unwrap();
            apply_postgres(&STEPS[..older], &pool, &old).await.unwrap();
            let before = described(&mut admin, &name).await;
            if older == 1 {
                let error = apply_postgres(&broken(), &pool, &old).await.unwrap_err();
                assert!(error.to_string().contains("\"x\" already exists"), "{error}");
                assert_eq!(described(&mut admin, &name).await, before);
            }
            assert_ne!(before, newest);
            migrate_postgres(&pool, &old).await.unwrap();
            assert_eq!(described(&mut admin, &name).await, newest);
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn processes_that_start_together_on_postgres_migrate_once() {
        let database = server().unwrap().database().await.unwrap();
        let target = PostgresTarget::parse(database.url(), "public", 1).unwrap();
        let starts = (0..8).map(|_| {
            let target = target.clone();
            tokio::spawn(async move {
                migrate_postgres(&postgres::Pool::connect(&target).await.unwrap(), &target).await
            })
        });
        let all = futures::future::try_join_all(starts);
        for result in tokio::time::timeout(Duration::from_mins(1), all).await.unwrap().unwrap() {
            result.unwrap();
        }
        let sql = AssertSqlSafe(format!("SELECT version FROM {} ORDER BY 1", target.tables().migrations()));
        let mut connection = target.open().await.unwrap();
        let versions: Vec<(i64,)> = sqlx::query_as(sql).fetch_all(&mut connection).await.unwrap();
        assert_eq!(versions, numbers());
    }
}

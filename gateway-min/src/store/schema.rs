//! The numbered migrations of the database and how they are applied.

use std::path::Path;

use sqlx::SqlSafeStr as _;
use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};

use super::error::StoreError;
use super::sqlite::{BEGIN_WRITE, Pool};

/// Name and text of migration 1, 2, 3 ... A released migration never changes; a new one is added at
/// the end.
const MIGRATIONS: [(&str, &str); 4] = [
    ("threads", include_str!("migrations/sqlite/0001_threads.sql")),
    ("runs", include_str!("migrations/sqlite/0002_runs.sql")),
    ("run_events", include_str!("migrations/sqlite/0003_run_events.sql")),
    ("run_queue", include_str!("migrations/sqlite/0004_run_queue.sql")),
];

/// Brings the database to the newest schema: all missing migrations or, after an error, none.
/// Processes that start together apply them once.
///
/// # Errors
/// [`StoreError::NewerSchema`] if a newer build has written the database, [`StoreError::Corrupt`] if
/// an applied migration is not the one this build knows.
pub(super) async fn migrate(writer: &Pool, path: &Path) -> Result<(), StoreError> {
    migrate_to(&MIGRATIONS, writer, path).await
}

async fn migrate_to(
    known: &[(&'static str, &'static str)],
    writer: &Pool,
    path: &Path,
) -> Result<(), StoreError> {
    let migrations: Vec<Migration> = (1..)
        .zip(known)
        .map(|(version, (name, sql))| {
            Migration::new(version, (*name).into(), MigrationType::Simple, sql.into_sql_str(), false)
        })
        .collect();
    let supported = migrations.last().map_or(0, |migration| migration.version);
    let migrator = Migrator::with_migrations(migrations);

    let mut tx = writer.begin_with(BEGIN_WRITE).await?;
    // `run` does the same, but its future is not `Send`.
    match migrator.run_direct(None, &mut *tx, false).await {
        Ok(()) => Ok(tx.commit().await?),
        Err(MigrateError::VersionMissing(found)) => {
            Err(StoreError::NewerSchema { path: path.display().to_string(), found, supported })
        }
        Err(MigrateError::Execute(cause) | MigrateError::ExecuteMigration(cause, _)) => Err(cause.into()),
        Err(error) => Err(StoreError::Corrupt {
            place: "the record of migrations".to_owned(),
            detail: error.to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::sqlite::{open_memory, open_writer};

    async fn schema(pool: &Pool) -> Vec<(String,)> {
        let sql = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name";
        sqlx::query_as(sql).fetch_all(pool).await.unwrap()
    }

    async fn versions(pool: &Pool) -> Vec<(i64,)> {
        sqlx::query_as("SELECT version FROM _sqlx_migrations ORDER BY version").fetch_all(pool).await.unwrap()
    }

    #[tokio::test]
    async fn every_older_schema_becomes_the_newest() {
        let fresh = open_memory().await.unwrap();
        migrate(&fresh, Path::new("fresh")).await.unwrap();
        for older in 0..MIGRATIONS.len() {
            let pool = open_memory().await.unwrap();
            migrate_to(&MIGRATIONS[..older], &pool, Path::new("old")).await.unwrap();
            assert_eq!(versions(&pool).await.len(), older);
            migrate(&pool, Path::new("old")).await.unwrap();
            assert_eq!(schema(&pool).await, schema(&fresh).await);
            assert_eq!(versions(&pool).await, versions(&fresh).await);
        }
    }

    #[tokio::test]
    async fn failing_migration_takes_the_ones_before_it_back() {
        let pool = open_memory().await.unwrap();
        migrate_to(&MIGRATIONS[..1], &pool, Path::new("old")).await.unwrap();
        let before = schema(&pool).await;
        let broken = [MIGRATIONS[0], MIGRATIONS[1], ("broken", "CREATE TABLE x (a); CREATE TABLE x (b)")];
        let error = migrate_to(&broken, &pool, Path::new("old")).await.unwrap_err();
        assert!(error.to_string().contains("table x already exists"), "{error}");
        assert_eq!(schema(&pool).await, before);
        assert_eq!(versions(&pool).await, [(1,)]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn processes_that_start_together_migrate_once() {
        for _ in 0..10 {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("gateway.db");
            // The file exists, as after the first of them has opened it.
            open_writer(&path).await.unwrap().close().await;
            let starts = (0..4).map(|_| {
                let path = path.clone();
                tokio::spawn(async move { migrate(&open_writer(&path).await.unwrap(), &path).await })
            });
            for result in futures::future::try_join_all(starts).await.unwrap() {
                result.unwrap();
            }
            let pool = open_writer(&path).await.unwrap();
            assert_eq!(versions(&pool).await, [(1,), (2,), (3,), (4,)]);
        }
    }
}

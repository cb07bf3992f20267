//! The numbered migrations of the database and how they are applied.

use std::path::Path;

use sqlx::SqlSafeStr as _;
use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};

use super::error::StoreError;
use super::sqlite::{BEGIN_WRITE, Pool};

/// Name and text of migration 1, 2, 3 ... A released migration never changes; a new one is added at
/// the end.
const MIGRATIONS: [(&str, &str); 3] = [
    ("threads", include_str!("migrations/sqlite/0001_threads.sql")),
    ("runs", include_str!("migrations/sqlite/0002_runs.sql")),
    ("run_events", include_str!("migrations/sqlite/0003_run_events.sql")),
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
    match migrator.run(&mut *tx).await {
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

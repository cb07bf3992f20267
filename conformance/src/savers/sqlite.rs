use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use tempfile::TempDir;
use threadkeep::saver::Saver;
use threadkeep_sqlite::{Options, SqliteSaver, Synchronous};

use crate::{BoxError, Claim, Damage, Factory};

const FILE: &str = "checkpoints.db";

/// The SQLite saver, each store in a temporary directory.
#[derive(Debug, Clone, Copy)]
pub struct Sqlite;

async fn open(path: &Path) -> Result<Arc<dyn Saver>, BoxError> {
    // The suite kills processes but not machines, so a flush per commit would only cost time.
    let options = Options { synchronous: Synchronous::Normal, ..Options::default() };
    Ok(Arc::new(SqliteSaver::open_async(path, options).await?))
}

#[async_trait]
impl Factory for Sqlite {
    type Storage = TempDir;

    fn name(&self) -> &'static str {
        "sqlite"
    }

    fn claims(&self) -> &'static [Claim] {
        // Writes and parent links are covered by their row's checksum; losing one of them is corruption, which the
        // driver's own tests check byte by byte.
        &[Claim::Durable, Claim::LoseCheckpoint, Claim::Killable]
    }

    async fn create(&self) -> Result<TempDir, BoxError> {
        Ok(tempfile::tempdir()?)
    }

    async fn open(&self, place: &TempDir) -> Result<Arc<dyn Saver>, BoxError> {
        open(&place.path().join(FILE)).await
    }

    async fn damage(&self, place: &TempDir, damage: &Damage) -> Result<(), BoxError> {
        let Damage::LoseCheckpoint(key) = damage else { return Err("not claimed".into()) };
        let db = threadkeep_pages::open(place.path().join(FILE), rusqlite::OpenFlags::default())?;
        match db.execute("DELETE FROM checkpoint WHERE id = ?1", [key.id.as_bytes()])? {
            1 => Ok(()),
            rows => Err(format!("{rows} rows of checkpoint {}", key.id).into()),
        }
    }

    fn address(&self, place: &TempDir) -> Result<String, BoxError> {
        let path = place.path().join(FILE).into_os_string();
        path.into_string().map_err(|path| format!("the path {} is not UTF-8", path.display()).into())
    }

    async fn open_at(&self, address: &str) -> Result<Arc<dyn Saver>, BoxError> {
        open(Path::new(address)).await
    }
}

//! The conformance suite on the SQLite saver.

use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use tempfile::TempDir;
use threadkeep::saver::Saver;
use threadkeep_conformance::{BoxError, Claim, Damage, Factory};
use threadkeep_sqlite::{Options, SqliteSaver, Synchronous};

struct Sqlite;

#[async_trait]
impl Factory for Sqlite {
    type Place = TempDir;

    fn name(&self) -> &'static str {
        "sqlite"
    }

    fn claims(&self) -> &'static [Claim] {
        // Writes and parent links are sealed by their row's checksum; losing one of them is corruption, which the
        // driver's own tests look at byte by byte.
        &[Claim::Durable, Claim::LoseCheckpoint]
    }

    async fn create(&self) -> Result<TempDir, BoxError> {
        Ok(tempfile::tempdir()?)
    }

    async fn open(&self, place: &TempDir) -> Result<Arc<dyn Saver>, BoxError> {
        // The suite ends no machine, so a flush per commit would only take time.
        let options = Options { synchronous: Synchronous::Normal, ..Options::default() };
        Ok(Arc::new(SqliteSaver::open_async(place.path().join("checkpoints.db"), options).await?))
    }

    async fn damage(&self, place: &TempDir, damage: &Damage) -> Result<(), BoxError> {
        let Damage::LoseCheckpoint(key) = damage else { return Err("not claimed".into()) };
        let db = rusqlite::Connection::open(place.path().join("checkpoints.db"))?;
        match db.execute("DELETE FROM checkpoint WHERE id = ?1", [key.id.as_bytes()])? {
            1 => Ok(()),
            rows => Err(format!("{rows} rows of checkpoint {}", key.id).into()),
        }
    }
}

fn main() -> ExitCode {
    threadkeep_conformance::main(Sqlite)
}

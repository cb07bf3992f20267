use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tempfile::TempDir;
use threadkeep::saver::Saver;
use threadkeep_sqlite::{Options, SqliteSaver, Synchronous};

use crate::{BoxError, Claim, Damage, Factory};

const FILE: &str = "checkpoints.db";
/// How long a call waits for the lock of another handle, whose thread may get no time on a busy machine, or which is
/// dropped and still closes the file: less than a case may take.
const PATIENCE: Duration = Duration::from_mins(5);

/// The SQLite saver, each store in a temporary directory.
#[derive(Debug, Clone, Copy)]
pub struct Sqlite;

async fn open(path: &Path) -> Result<Arc<dyn Saver>, BoxError> {
    // The suite kills processes but not machines, so a flush per commit would only cost time.
    let options = Options { synchronous: Synchronous::Normal, busy_timeout: PATIENCE, ..Options::default() };
    Ok(Arc::new(SqliteSaver::open_async(path, options).await?))
}

/// A connection without the saver.
fn connect(place: &TempDir) -> rusqlite::Result<rusqlite::Connection> {
    let db = threadkeep_pages::open(place.path().join(FILE), rusqlite::OpenFlags::default())?;
    db.busy_timeout(PATIENCE)?;
    Ok(db)
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
        &[
            Claim::Durable,
            Claim::LoseCheckpoint,
            Claim::ChangeByte,
            Claim::SharedElements,
            Claim::StoredBytes,
            Claim::Killable,
            Claim::WritesAsItComes,
        ]
    }

    async fn create(&self) -> Result<TempDir, BoxError> {
        Ok(tempfile::tempdir()?)
    }

    async fn open(&self, place: &TempDir) -> Result<Arc<dyn Saver>, BoxError> {
        open(&place.path().join(FILE)).await
    }

    async fn damage(&self, place: &TempDir, damage: &Damage) -> Result<(), BoxError> {
        let db = connect(place)?;
        let rows = match damage {
            Damage::LoseCheckpoint(key) => {
                db.execute("DELETE FROM checkpoint WHERE id = ?1", [key.id.as_bytes()])?
            }
            Damage::ChangeByte(_) => {
                let newest = "SELECT key, body FROM element ORDER BY key DESC LIMIT 1";
                let read = |row: &rusqlite::Row<'_>| Ok((row.get::<_, i64>(0)?, row.get::<_, Vec<u8>>(1)?));
                let (key, mut body) = db.query_row(newest, [], read)?;
                let middle = body.len() / 2;
                body.get_mut(middle).map(|byte| *byte ^= 1).ok_or("the newest element is empty")?;
                db.execute("UPDATE element SET body = ?2 WHERE key = ?1", rusqlite::params![key, body])?
            }
            _ => return Err("not claimed".into()),
        };
        if rows == 1 { Ok(()) } else { Err(format!("{rows} rows: {damage:?}").into()) }
    }

    async fn stored_bytes(&self, place: &TempDir) -> Result<u64, BoxError> {
        let db = connect(place)?;
        let number = |name| db.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
        let bytes = (number("page_count")? - number("freelist_count")?) * number("page_size")?;
        Ok(u64::try_from(bytes)?)
    }

    fn address(&self, place: &TempDir) -> Result<String, BoxError> {
        let path = place.path().join(FILE).into_os_string();
        path.into_string().map_err(|path| format!("the path {} is not UTF-8", path.display()).into())
    }

    async fn open_at(&self, address: &str) -> Result<Arc<dyn Saver>, BoxError> {
        open(Path::new(address)).await
    }
}

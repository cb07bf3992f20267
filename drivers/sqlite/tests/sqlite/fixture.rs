//! Files of each format, stored in the repository: whatever changes later, they are read as they were written, and can be
//! continued.
//!
//! A new format needs a fixture of its own. `WRITE_FIXTURE=3 cargo test -p threadkeep-sqlite --test sqlite fixture` writes
//! that of format 3, once. Files of formats 1 and 2 have no checksums of pages, and those of format 1 no dictionaries;
//! their rows are those of format 3, so this writes them too.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rusqlite::Connection;
use serde_json::Value as Json;
use threadkeep::saver::Saver;
use threadkeep_sqlite::schema::FORMAT_VERSION;
use threadkeep_sqlite::{Options, SqliteSaver};

#[path = "../common/kept.rs"]
mod kept;

use kept::{THREADS, contents, write};

/// The formats that have a fixture: a file, compressed with zstd, and its contents, as [`contents`] returned them for the
/// saver that wrote it.
const VERSIONS: [u32; 3] = [1, 2, 3];
/// The first format whose pages have checksums.
const SEALED: u32 = 3;

fn open(path: &Path) -> Arc<SqliteSaver> {
    Arc::new(SqliteSaver::open(path, &Options::default()).unwrap())
}

/// The file of a format, and that of its contents.
fn fixture(version: u32) -> (PathBuf, PathBuf) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    (dir.join(format!("version_{version}.db.zst")), dir.join(format!("version_{version}.json")))
}

/// Writes the fixture of a format.
async fn write_fixture(version: u32) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    if version < SEALED {
        // A file that has pages already gets no checksums of them.
        Connection::open(&path).unwrap().execute_batch("PRAGMA page_size = 16384; VACUUM").unwrap();
    }
    let store = open(&path);
    let saver: Arc<dyn Saver> = store.clone();
    write(&saver).await;
    let written = serde_json::to_string(&contents(&*saver).await).unwrap();
    store.close().await;
    if version < SEALED {
        let conn = Connection::open(&path).unwrap();
        if version == 1 {
            let dictionaries: i64 =
                conn.query_row("SELECT count(*) FROM dictionary", [], |row| row.get(0)).unwrap();
            assert_eq!(dictionaries, 0, "no element needs one");
            conn.execute_batch("DROP TABLE dictionary; PRAGMA user_version = 1; VACUUM").unwrap();
        }
        assert_eq!(version_of(&conn), version);
        // Closed in this mode, it leaves no log.
        conn.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").unwrap();
        conn.close().unwrap();
    }
    let (file, expected) = fixture(version);
    std::fs::write(file, zstd::encode_all(&std::fs::read(&path).unwrap()[..], 19).unwrap()).unwrap();
    std::fs::write(expected, written + "\n").unwrap();
}

fn version_of(conn: &Connection) -> u32 {
    conn.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap()
}

/// The bytes of a file of a fixture.
fn stored(file: &Path) -> Vec<u8> {
    std::fs::read(file).unwrap_or_else(|error| panic!("the fixture {}: {error}", file.display()))
}

#[tokio::test]
async fn a_file_of_each_format_is_read_as_it_was_written_and_goes_on() {
    if let Ok(version) = std::env::var("WRITE_FIXTURE") {
        write_fixture(version.parse().unwrap()).await;
    }
    assert!(VERSIONS.contains(&FORMAT_VERSION), "format {FORMAT_VERSION} has no fixture");
    for version in VERSIONS {
        goes_on(version).await;
    }
}

async fn goes_on(version: u32) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let (file, expected) = fixture(version);
    std::fs::write(&path, zstd::decode_all(&stored(&file)[..]).unwrap()).unwrap();
    assert_eq!(version_of(&Connection::open(&path).unwrap()), version);
    let expected: Json = serde_json::from_slice(&stored(&expected)).unwrap();
    assert_eq!(expected.as_object().unwrap().len(), THREADS.len());
    for opened in 0..2 {
        let store = open(&path);
        let saver: Arc<dyn Saver> = store.clone();
        if opened == 0 {
            assert_eq!(contents(&*saver).await, expected);
        }
        assert_eq!(store.check().await.unwrap(), []);
        kept::goes_on(&saver, opened).await;
        store.close().await;
    }
    // One without checksums of pages gets the tables of the newest format of those.
    let left = if version < SEALED { SEALED - 1 } else { version };
    assert_eq!(version_of(&Connection::open(&path).unwrap()), left);
}

//! The rows of a file of each format of stores of ordered keys, kept in the repository as text: whatever changes later,
//! they are read as they were written, and can be continued. The file itself is redb's, whose format is not ours.
//!
//! A new format needs a fixture of its own. `WRITE_FIXTURE=1 cargo test -p threadkeep-redb --test fixture` writes that of
//! the current format, once.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers are test code too")]

use std::fmt::{Display, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde_json::Value as Json;
use threadkeep::saver::Saver;
use threadkeep_kv::FORMAT_VERSION;

#[path = "../../sqlite/tests/common/kept.rs"]
mod kept;

/// The formats that have a fixture: a line for each row, and the contents.
const VERSIONS: [u32; 1] = [1];

/// After this time a file is not being closed any more.
const CLOSING: Duration = Duration::from_mins(1);

/// The one table of the file.
const ROWS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("threadkeep");

fn open(path: &Path) -> Arc<dyn Saver> {
    Arc::new(once_closed(|| threadkeep_redb::open(path)))
}

/// Opens a file. The thread of a saver that was dropped closes it soon after that.
fn once_closed<T, E: Display>(open: impl Fn() -> Result<T, E>) -> T {
    let started = Instant::now();
    loop {
        match open() {
            Ok(opened) => return opened,
            Err(error) if error.to_string().contains("already open") && started.elapsed() < CLOSING => {
                sleep(Duration::from_millis(5));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// The rows of a format, and their contents.
fn fixture(version: u32) -> [PathBuf; 2] {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    ["txt", "json"].map(|form| dir.join(format!("version_{version}.{form}")))
}

fn stored(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap_or_else(|error| panic!("the fixture {}: {error}", file.display()))
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        write!(text, "{byte:02x}").unwrap();
    }
    text
}

fn bytes(hex: &str) -> Vec<u8> {
    let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(byte).collect()
}

/// Writes the fixture of the current format.
async fn write_fixture() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoints.redb");
    let saver = open(&path);
    kept::write(&saver).await;
    let contents = serde_json::to_string(&kept::contents(&*saver).await).unwrap();
    drop(saver);
    let mut text = String::new();
    let database = once_closed(|| Database::open(&path));
    let table = database.begin_read().unwrap().open_table(ROWS).unwrap();
    for row in table.iter().unwrap() {
        let (key, value) = row.unwrap();
        writeln!(text, "{} {}", hex(key.value()), hex(value.value())).unwrap();
    }
    let [rows, expected] = fixture(FORMAT_VERSION);
    std::fs::create_dir_all(rows.parent().unwrap()).unwrap();
    std::fs::write(rows, text).unwrap();
    std::fs::write(expected, contents + "\n").unwrap();
}

/// Makes a file with these rows.
fn restore(path: &Path, rows: &str) {
    let database = Database::create(path).unwrap();
    let transaction = database.begin_write().unwrap();
    {
        let mut table = transaction.open_table(ROWS).unwrap();
        for row in rows.lines() {
            let (key, value) = row.split_once(' ').unwrap();
            table.insert(&bytes(key)[..], &bytes(value)[..]).unwrap();
        }
    }
    transaction.commit().unwrap();
}

#[tokio::test]
async fn rows_of_each_format_are_read_as_they_were_written_and_go_on() {
    if std::env::var_os("WRITE_FIXTURE").is_some() {
        write_fixture().await;
    }
    assert!(VERSIONS.contains(&FORMAT_VERSION), "format {FORMAT_VERSION} has no fixture");
    for version in VERSIONS {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("checkpoints.redb");
        let [rows, expected] = fixture(version);
        restore(&path, &stored(&rows));
        let expected: Json = serde_json::from_str(&stored(&expected)).unwrap();
        assert_eq!(expected.as_object().unwrap().len(), kept::THREADS.len());
        for opened in 0..2 {
            let saver = open(&path);
            if opened == 0 {
                assert_eq!(kept::contents(&*saver).await, expected);
            }
            kept::goes_on(&saver, opened).await;
        }
    }
}

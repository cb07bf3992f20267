//! Foreign and damaged files, and several handles on one file.

use std::path::Path;
use std::time::Duration;

use rusqlite::types::Value as Cell;
use rusqlite::{Connection, OpenFlags, params_from_iter};
use serde_json::{Map, Value as Json, json};
use threadkeep::checkpoint::{ChannelEntry, CheckpointTuple, Stored};
use threadkeep::metadata::Counters;
use threadkeep::saver::{CheckpointSelector, ListQuery, Saver, Summary};
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};
use threadkeep_sqlite::schema::{APPLICATION_ID, FORMAT_VERSION};
use threadkeep_sqlite::{Options, SqliteSaver};

use crate::common::{MESSAGES, Talk, message};

fn open(path: &Path) -> Result<SqliteSaver> {
    SqliteSaver::open(path, &Options { readers: 1, ..Options::default() })
}

/// Longer than others hold a lock on any machine.
const PATIENCE: Duration = Duration::from_mins(10);

/// A connection that writes page checksums, so that its changes are found where they are. A handle that was dropped
/// may still have the file locked while it closes it.
fn raw(path: &Path) -> Connection {
    let conn = threadkeep_pages::open(path, OpenFlags::default()).unwrap();
    conn.busy_timeout(PATIENCE).unwrap();
    conn
}

#[tokio::test]
async fn a_newer_format_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    open(&path).unwrap().close().await;
    let conn = raw(&path);
    let application: i32 = conn.pragma_query_value(None, "application_id", |row| row.get(0)).unwrap();
    assert_eq!(application, APPLICATION_ID);
    conn.pragma_update(None, "user_version", FORMAT_VERSION + 1).unwrap();
    let error = open(&path).unwrap_err();
    assert_eq!(
        error,
        Error::NewerFormat {
            store: path.display().to_string(),
            found: FORMAT_VERSION + 1,
            supported: FORMAT_VERSION
        }
    );
}

#[test]
fn other_files_are_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("other");
    let conn = Connection::open(&path).unwrap();
    conn.execute_batch("CREATE TABLE notes (text TEXT); INSERT INTO notes VALUES ('mine')").unwrap();
    drop(conn);
    let before = std::fs::read(&path).unwrap();
    let error = open(&path).unwrap_err();
    assert!(matches!(&error, Error::InvalidInput(text) if text.contains("another program")), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), before);

    let path = dir.path().join("text");
    std::fs::write(&path, "not a database, but long enough to be looked at ".repeat(20)).unwrap();
    let error = open(&path).unwrap_err();
    assert!(matches!(&error, Error::Corrupt { .. }), "{error}");

    let error = open(&dir.path().join("missing").join("db")).unwrap_err();
    assert!(
        matches!(&error, Error::Unavailable { reason, .. } if reason.contains("directory exists")),
        "{error}"
    );
}

#[tokio::test]
async fn many_may_create_the_same_database_at_once() {
    // They wait for the one that creates it, however long that takes.
    let options = Options { readers: 1, busy_timeout: PATIENCE, ..Options::default() };
    for _ in 0..5 {
        let dir = tempfile::tempdir().unwrap();
        let opened: Vec<_> = std::thread::scope(|scope| {
            let open = || SqliteSaver::open(dir.path().join("db"), &options).unwrap();
            let threads: Vec<_> = (0..6).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (i, saver) in opened.iter().enumerate() {
            saver.commit(Talk::new(&format!("t{i}")).say(&message(0, 100))).await.unwrap();
        }
        let threads = (0..6).map(|i| format!("t{i}"));
        for thread in threads {
            assert!(
                opened[0].get(&CheckpointSelector::head(&thread.as_str().into())).await.unwrap().is_some()
            );
        }
    }
}

#[tokio::test]
async fn two_handles_see_each_others_commits_and_conflicts() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (open(&dir.path().join("db")).unwrap(), open(&dir.path().join("db")).unwrap());
    let mut talk = Talk::new("t");
    for number in 0..20 {
        // Alternating, so that what each remembers is always out of date.
        let (writer, other) = if number % 2 == 0 { (&a, &b) } else { (&b, &a) };
        let mut step = talk.say(&message(number, 200));
        step.checkpoint.next = vec![format!("node-{number}").into()];
        let rival = talk.say(&message(1000 + number, 200));
        writer.commit(step.clone()).await.unwrap();
        let error = other.commit(rival).await.unwrap_err();
        assert!(
            matches!(&error, Error::Conflict { found, .. } if *found == Some(step.checkpoint.id)),
            "{error}"
        );
        talk.accept(&step);
        let head = other.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
        assert_eq!(head.checkpoint.channels[MESSAGES].stored.value(), Some(&talk.messages.clone().into()));
        assert_eq!(head.checkpoint.next, step.checkpoint.next);
    }
    a.delete_thread(&talk.thread).await.unwrap();
    let mut again = Talk::new("t");
    let step = again.say(&message(0, 200));
    b.commit(step.clone()).await.unwrap();
    again.accept(&step);
    b.commit(again.say(&message(1, 200))).await.unwrap();
    assert_eq!(a.list(&ListQuery::new(&talk.thread)).await.unwrap().len(), 2);
}

/// A small database with every kind of row and of stored value.
async fn small(path: &Path) -> Talk {
    let saver = open(path).unwrap();
    let mut talk = Talk::new("t");
    let mut inner = Talk::new("t");
    inner.namespace = "inner".into();
    for number in 0..20 {
        let mut step = talk.say(&message(number, 5));
        let version = step.checkpoint.channels[MESSAGES].version;
        let mut set = |name: &str, value: &Json| {
            let stored = Stored::Value(ChannelValue::from_json(value).unwrap());
            step.checkpoint.channels.insert(name.into(), ChannelEntry { version, stored });
        };
        // Makes each message a run of its own, so that the runs are packed into chunks.
        set("noise", &json!([message(1000 + number, 1)]));
        if number == 0 {
            set("title", &json!("short"));
            set("state", &json!({ "long": "value that is stored by itself" }));
            set("tiny", &json!([1, 2, 3]));
        }
        if number < 3 {
            let durations: Map<_, _> = (0..8 + number).map(|i| (format!("run-{i}"), json!(i))).collect();
            let extra = json!({ "run_durations": durations, "graph": "a graph whose name is long" });
            step.metadata.extra = serde_json::from_value::<Map<_, _>>(extra).unwrap().into();
            step.metadata.counters.insert(MESSAGES.into(), Counters { updates: 1, supersteps: 2 });
            step.metadata.parents.insert(talk.namespace.clone(), step.checkpoint.id);
        }
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    }
    saver.commit(inner.say(&message(7, 5))).await.unwrap();
    saver.close().await;
    talk
}

/// Everything that can be read from the database, or the first error.
async fn look(saver: &SqliteSaver, talk: &Talk) -> Result<(Vec<CheckpointTuple>, Summary)> {
    let mut all = saver.list(&ListQuery { namespace: None, ..ListQuery::new(&talk.thread) }).await?;
    let inner = CheckpointSelector { namespace: "inner".into(), ..CheckpointSelector::head(&talk.thread) };
    all.extend(saver.get(&inner).await?);
    let middle = CheckpointSelector { id: talk.head, ..CheckpointSelector::head(&talk.thread) };
    all.extend(saver.get(&middle).await?);
    Ok((all, saver.summary(&talk.thread).await?))
}

/// The value with one bit of each of its bytes changed.
fn damages(cell: &Cell) -> Vec<Cell> {
    let one_bit = |bytes: &[u8]| -> Vec<Vec<u8>> {
        let damage = |at: usize| {
            let mut damaged = bytes.to_vec();
            damaged[at] ^= 1 << (at % 8);
            damaged
        };
        (0..bytes.len()).map(damage).collect()
    };
    match cell {
        Cell::Blob(bytes) => one_bit(bytes).into_iter().map(Cell::Blob).collect(),
        Cell::Text(text) => one_bit(text.as_bytes()).into_iter().map(Cell::Blob).collect(),
        Cell::Integer(number) => {
            let bytes = one_bit(&number.to_le_bytes()).into_iter();
            bytes.map(|bytes| Cell::Integer(i64::from_le_bytes(bytes.try_into().unwrap()))).collect()
        }
        Cell::Null => Vec::new(),
        Cell::Real(_) => unreachable!("no table holds one"),
    }
}

/// One changed byte in any column of any row is an error when it is read, or changes nothing that is read.
#[tokio::test]
async fn one_changed_byte_in_any_row_is_detected_or_harmless() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let talk = small(&path).await;
    let mut saver = open(&path).unwrap();
    let good = look(&saver, &talk).await.unwrap();
    assert_eq!(good.0.len(), 23);
    assert_eq!(saver.check().await.unwrap(), []);
    let conn = raw(&path);
    let (mut detected, mut harmless) = (0, 0);
    for (table, column, cast) in [
        ("scope", "owner", "INTEGER"),
        ("scope", "text", "TEXT"),
        ("scope", "hash", "INTEGER"),
        ("scope", "body", "BLOB"),
        ("name", "text", "TEXT"),
        ("name", "sum", "BLOB"),
        ("checkpoint", "id", "BLOB"),
        ("checkpoint", "body", "BLOB"),
        ("checkpoint", "tasks", "BLOB"),
        ("element", "hash", "BLOB"),
        ("element", "body", "BLOB"),
    ] {
        let set = format!("UPDATE {table} SET {column} = CAST(?1 AS {cast}) WHERE key = ?2");
        for (key, cell) in cells(&conn, table, column) {
            for damaged in damages(&cell) {
                conn.execute(&set, params_from_iter([damaged.clone(), Cell::Integer(key)])).unwrap();
                if table == "name" {
                    // Names are read once.
                    saver = open(&path).unwrap();
                }
                match look(&saver, &talk).await {
                    Err(Error::Corrupt { .. } | Error::BrokenLineage { .. }) => {
                        detected += 1;
                        // Trying all of them would take a while.
                        if detected % 5 == 0 {
                            let found = saver.check().await.unwrap();
                            let named = found.iter().any(|finding| !finding.orphan);
                            assert!(named, "the check does not see {table}.{column} of {key} as {damaged:?}");
                        }
                    }
                    Err(error) => panic!("{table}.{column} of {key}: {error}"),
                    Ok(read) => {
                        assert_eq!(read, good, "{table}.{column} of {key} as {damaged:?}");
                        harmless += 1;
                    }
                }
                let back = match &cell {
                    Cell::Text(text) => Cell::Blob(text.as_bytes().to_vec()),
                    other => other.clone(),
                };
                conn.execute(&set, params_from_iter([back, Cell::Integer(key)])).unwrap();
            }
        }
    }
    assert_eq!(look(&open(&path).unwrap(), &talk).await.unwrap(), good, "everything was put back");
    println!("{detected} detected, {harmless} harmless");
    assert!(detected > 1000 && harmless < detected / 10, "{detected} detected, {harmless} harmless");
}

/// The check reports a missing row, or what only it referred to is reported as an orphan and swept.
#[tokio::test]
async fn the_check_names_every_missing_row() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let copy = dir.path().join("copy");
    let talk = small(&path).await;
    let rows = |table: &str| cells(&raw(&path), table, "key");
    for table in ["scope", "name", "checkpoint", "element"] {
        for (key, _) in rows(table) {
            std::fs::copy(&path, &copy).unwrap();
            let conn = raw(&copy);
            conn.execute(&format!("DELETE FROM {table} WHERE key = ?1"), [key]).unwrap();
            drop(conn);
            let saver = open(&copy).unwrap();
            let found = saver.check().await.unwrap();
            assert!(!found.is_empty(), "a missing row of {table}, key {key}");
            assert!(found.iter().all(|finding| finding.to_string().contains(&finding.place)));
            if found.iter().all(|finding| finding.orphan) {
                let before = look(&saver, &talk).await.unwrap();
                saver.sweep().await.unwrap();
                assert_eq!(saver.check().await.unwrap(), [], "after a sweep");
                assert_eq!(look(&saver, &talk).await.unwrap(), before);
            } else if table == "checkpoint" {
                assert!(saver.sweep().await.is_ok(), "what is missing leaves what is there");
                assert_ne!(saver.check().await.unwrap(), []);
            }
            saver.close().await;
        }
    }
}

/// A damaged row keeps the sweep from deleting what the row may have referred to.
#[tokio::test]
async fn a_sweep_refuses_a_damaged_database() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let talk = small(&path).await;
    let conn = raw(&path);
    let (key, _) = cells(&conn, "checkpoint", "body")[3].clone();
    conn.execute("UPDATE checkpoint SET body = x'1000' WHERE key = ?1", [key]).unwrap();
    let saver = open(&path).unwrap();
    let elements = cells(&conn, "element", "key").len();
    assert!(matches!(saver.sweep().await, Err(Error::Corrupt { .. })));
    assert_eq!(cells(&conn, "element", "key").len(), elements);
    assert!(saver.check().await.unwrap().iter().all(|finding| !finding.orphan));
    assert!(look(&saver, &talk).await.is_err());
}

/// A replaced special write leaves its old value until a sweep.
#[tokio::test]
async fn replaced_special_writes_are_orphans() {
    let dir = tempfile::tempdir().unwrap();
    let saver = open(&dir.path().join("db")).unwrap();
    let mut talk = Talk::new("t");
    let step = talk.say(&message(0, 200));
    saver.commit(step.clone()).await.unwrap();
    talk.accept(&step);
    for text in ["the first question, which is long enough for a row of its own", "another one, no shorter"] {
        let value = ChannelValue::from_json(&json!(text.repeat(3))).unwrap();
        let mut row = talk.say(&message(1, 200)).writes.remove(0);
        row.writes = vec![threadkeep::checkpoint::Write {
            channel: threadkeep::checkpoint::INTERRUPT_CHANNEL.into(),
            value,
            overwrite: false,
        }];
        row.task = threadkeep::id::TaskId::from_bytes([7; 16]);
        saver.put_writes(&talk.key(), &row).await.unwrap();
    }
    let found = saver.check().await.unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].orphan && found[0].what.contains("1 elements"), "{found:?}");
    saver.sweep().await.unwrap();
    assert_eq!(saver.check().await.unwrap(), []);
}

/// A changed key of a row is an error when the row is read or missed, or changes nothing that is read; at worst it
/// hides the newest rows, and then the check reports it.
#[tokio::test]
async fn a_changed_key_is_detected_or_named_by_the_check() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let talk = small(&path).await;
    let good = look(&open(&path).unwrap(), &talk).await.unwrap();
    let conn = raw(&path);
    let (mut detected, mut hidden) = (0, 0);
    for table in ["scope", "name", "checkpoint", "element"] {
        let set = format!("UPDATE {table} SET key = ?1 WHERE key = ?2");
        // Every third row, in every bit of its key.
        for (key, _) in cells(&conn, table, "key").into_iter().step_by(3) {
            for bit in 0..63 {
                let damaged = key ^ (1 << bit);
                if conn.execute(&set, [damaged, key]).is_err() {
                    continue; // There is a row with that key.
                }
                let saver = open(&path).unwrap();
                match look(&saver, &talk).await {
                    Err(Error::Corrupt { .. } | Error::BrokenLineage { .. }) => detected += 1,
                    Err(error) => panic!("{table}, key {key} as {damaged}: {error}"),
                    Ok(read) if read == good => {}
                    Ok(read) => {
                        assert!(
                            read.0.iter().all(|tuple| good.0.contains(tuple)),
                            "{table}, key {key} as {damaged}"
                        );
                        let found = saver.check().await.unwrap();
                        assert!(!found.is_empty(), "nobody sees {table}, key {key} as {damaged}");
                        hidden += 1;
                    }
                }
                saver.close().await;
                conn.execute(&set, [key, damaged]).unwrap();
            }
        }
    }
    assert_eq!(look(&open(&path).unwrap(), &talk).await.unwrap(), good, "everything was put back");
    assert!(detected > 500 && hidden < detected / 5, "{detected} detected, {hidden} hidden");
}

/// The two tests above cover every column of every table (except those of `dictionary`, which is empty here and covered
/// by the training's test); a new column has to be added to them.
#[tokio::test]
async fn every_column_is_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    small(&path).await;
    let conn = raw(&path);
    let sql = "SELECT m.name || '.' || c.name FROM sqlite_schema m, pragma_table_info(m.name) c \
               WHERE m.type = 'table' AND m.name NOT LIKE 'sqlite_%' ORDER BY 1";
    let mut statement = conn.prepare(sql).unwrap();
    let columns = statement.query_map([], |row| row.get(0)).unwrap();
    let columns: Vec<String> = columns.map(rusqlite::Result::unwrap).collect();
    assert_eq!(
        columns,
        [
            "checkpoint.body",
            "checkpoint.id",
            "checkpoint.key",
            "checkpoint.tasks",
            "dictionary.body",
            "dictionary.key",
            "element.body",
            "element.hash",
            "element.key",
            "name.key",
            "name.sum",
            "name.text",
            "scope.body",
            "scope.hash",
            "scope.key",
            "scope.owner",
            "scope.text",
        ]
    );
}

fn cells(conn: &Connection, table: &str, column: &str) -> Vec<(i64, Cell)> {
    let mut statement = conn.prepare(&format!("SELECT key, {column} FROM {table}")).unwrap();
    let cells = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
    let cells: Vec<_> = cells.map(rusqlite::Result::unwrap).collect();
    assert!(!cells.is_empty());
    cells
}

/// Any byte of the file below the tables: headers, keys, pointers, free space.
#[tokio::test]
async fn a_changed_byte_of_the_file_is_detected_or_changes_nothing_that_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let talk = small(&path).await;
    let bytes = std::fs::read(&path).unwrap();
    let good = look(&open(&path).unwrap(), &talk).await.unwrap();
    let damaged = dir.path().join("damaged");
    let header = 0..100;
    let used = (100..bytes.len()).filter(|at| bytes[*at] != 0).step_by(23);
    let free = (100..bytes.len()).filter(|at| bytes[*at] == 0).step_by(4_999);
    let (mut tried, mut refused) = (0, 0);
    for at in header.chain(used).chain(free) {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1 << (at % 8);
        std::fs::write(&damaged, &bytes).unwrap();
        tried += 1;
        let read = match open(&damaged) {
            Ok(saver) => {
                let read = look(&saver, &talk).await;
                saver.close().await;
                read
            }
            Err(error) => Err(error),
        };
        match read {
            Ok(read) => assert_eq!(read, good, "byte {at}"),
            Err(_) => refused += 1,
        }
        for log in ["damaged-wal", "damaged-shm"] {
            // They exist only if the damage kept the handle from closing cleanly.
            let _ = std::fs::remove_file(dir.path().join(log));
        }
    }
    assert!(tried > 300 && refused > tried * 9 / 10, "{refused} of {tried} refused");
}

/// Earlier versions created files with larger pages.
#[tokio::test]
async fn a_file_with_larger_pages_is_served_with_checksums() {
    const LARGER: u32 = 16_384;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let conn = threadkeep_pages::open(&path, OpenFlags::default()).unwrap();
    conn.pragma_update(None, "page_size", LARGER).unwrap();
    threadkeep_pages::seal(&conn).unwrap();
    conn.execute_batch("VACUUM").unwrap();
    drop(conn);
    let talk = small(&path).await;
    let saver = open(&path).unwrap();
    assert_eq!(look(&saver, &talk).await.unwrap().0.len(), 23);
    assert_eq!(saver.check().await.unwrap(), []);
    saver.close().await;
    let conn = Connection::open(&path).unwrap();
    let [page, version] = ["page_size", "user_version"]
        .map(|name| conn.pragma_query_value(None, name, |row| row.get::<_, u32>(0)).unwrap());
    assert_eq!((page, version), (LARGER, FORMAT_VERSION));
    drop(conn);
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() - 3 * LARGER as usize / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let found = open(&path).unwrap().check().await.unwrap();
    assert!(found.iter().any(|finding| finding.what.contains("checksum")), "{found:?}");
}

/// A file from before page checksums is used as it is; one that claims to have them is not.
#[tokio::test]
async fn a_file_without_checksums_of_pages_stays_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let plain = Connection::open(&path).unwrap();
    plain.execute_batch("PRAGMA page_size = 16384; VACUUM").unwrap();
    drop(plain);
    let talk = small(&path).await;
    let saver = open(&path).unwrap();
    assert_eq!(look(&saver, &talk).await.unwrap().0.len(), 23);
    assert_eq!(saver.check().await.unwrap(), []);
    saver.close().await;
    assert!(!threadkeep_pages::is_sealed(&raw(&path)).unwrap());
    let conn = Connection::open(&path).unwrap();
    let version: u32 = conn.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
    assert_eq!(version, FORMAT_VERSION - 1);
    let read_only = || SqliteSaver::open_read_only(&path, &Options::default());
    read_only().unwrap().close().await;
    conn.pragma_update(None, "user_version", FORMAT_VERSION).unwrap();
    for opened in [open(&path), read_only()] {
        assert!(matches!(opened.unwrap_err(), Error::Corrupt { .. }));
    }
}

/// The handle that adds the tables to the empty database of another program asks for checksums. It does not get them,
/// and SQLite keeps the request for a vacuum.
#[tokio::test]
async fn a_vacuum_gives_a_file_without_checksums_of_pages_none() {
    let dir = tempfile::tempdir().unwrap();
    for page in [4_096, 8_192, 16_384] {
        let path = dir.path().join(page.to_string());
        let plain = Connection::open(&path).unwrap();
        plain.execute_batch(&format!("PRAGMA page_size = {page}; VACUUM")).unwrap();
        drop(plain);
        let saver = open(&path).unwrap();
        let mut talk = Talk::new("t");
        for number in 0..20 {
            let step = talk.say(&message(number, 5));
            saver.commit(step.clone()).await.unwrap();
            talk.accept(&step);
        }
        let read = async |saver: &SqliteSaver| saver.list(&ListQuery::new(&talk.thread)).await.unwrap();
        let good = read(&saver).await;
        saver.vacuum_fully().await.unwrap();
        assert_eq!(read(&saver).await, good, "{page}");
        saver.close().await;
        let conn = raw(&path);
        let version: u32 = conn.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
        assert_eq!((version, threadkeep_pages::is_sealed(&conn).unwrap()), (FORMAT_VERSION - 1, false));
        drop(conn);
        let saver = open(&path).unwrap();
        assert_eq!(read(&saver).await, good, "{page}");
        assert_eq!(saver.check().await.unwrap(), []);
        saver.close().await;
    }
}

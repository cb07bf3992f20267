use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags};

use super::{PAGE_SIZE, is_damage, is_sealed, open, seal};
use crate::sum::LARGEST;

const PAGE: usize = PAGE_SIZE as usize;

struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("db")
    }

    /// A database with a log, on several pages.
    fn fill(&self) -> Connection {
        self.fill_pages(PAGE)
    }

    fn fill_pages(&self, page: usize) -> Connection {
        let conn = open(self.path(), OpenFlags::default()).unwrap();
        conn.pragma_update(None, "page_size", i64::try_from(page).unwrap()).unwrap();
        seal(&conn).unwrap();
        conn.pragma_update(None, "auto_vacuum", "INCREMENTAL").unwrap();
        conn.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(())).unwrap();
        conn.execute_batch(
            "CREATE TABLE t (key INTEGER PRIMARY KEY, text TEXT);
             WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 400)
             INSERT INTO t SELECT i, printf('%0500d', i) FROM n",
        )
        .unwrap();
        conn
    }
}

fn all(conn: &Connection) -> rusqlite::Result<Vec<(i64, String)>> {
    let mut statement = conn.prepare("SELECT key, text FROM t ORDER BY key")?;
    statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
}

fn reopened(path: &Path) -> rusqlite::Result<Vec<(i64, String)>> {
    all(&open(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?)
}

#[test]
fn what_was_written_is_read_and_every_page_of_the_file_has_its_checksum() {
    for size in [PAGE, LARGEST] {
        let place = Place::new();
        let conn = place.fill_pages(size);
        assert!(is_sealed(&conn).unwrap());
        let good = all(&conn).unwrap();
        assert_eq!(good.len(), 400);
        drop(conn);
        assert_eq!(reopened(&place.path()).unwrap(), good);
        let bytes = std::fs::read(place.path()).unwrap();
        assert!(bytes.len() > 10 * size);
        for (number, page) in (0..).zip(bytes.chunks(size)) {
            assert!(crate::sum::is_whole(page, number), "page {number} of {size} bytes");
        }
        // Any other SQLite reads it.
        assert_eq!(all(&Connection::open(place.path()).unwrap()).unwrap(), good);
    }
}

#[test]
fn a_database_without_room_for_checksums_is_not_made() {
    let place = Place::new();
    let conn = open(place.path(), OpenFlags::default()).unwrap();
    conn.execute_batch("CREATE TABLE t (key INTEGER PRIMARY KEY, text TEXT)").unwrap_err();
    drop(conn);
    assert_eq!(std::fs::metadata(place.path()).unwrap().len(), 0);
}

/// Every byte that is looked at is one of a page, or of the header that is read before them.
#[test]
fn a_changed_byte_in_any_page_is_an_error_or_is_not_read() {
    for size in [PAGE, LARGEST] {
        let place = Place::new();
        drop(place.fill_pages(size));
        let good = reopened(&place.path()).unwrap();
        let bytes = std::fs::read(place.path()).unwrap();
        let (mut refused, mut unread) = (0, 0);
        let header = 0..100;
        for at in header.chain((100..bytes.len()).step_by(997)) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << (at % 8);
            std::fs::write(place.path(), damaged).unwrap();
            match reopened(&place.path()) {
                Ok(read) => {
                    // A page that no statement needs; or the file says that its pages have no checksums.
                    assert!(read == good || matches!(at, 16..=17 | 20), "byte {at} of pages of {size}");
                    unread += 1;
                }
                Err(_) => refused += 1,
            }
        }
        assert!(refused > 250 && unread < 20, "{refused} refused, {unread} not read");
        let mut damaged = bytes;
        damaged[2 * size + 3000] ^= 1;
        std::fs::write(place.path(), damaged).unwrap();
        let error = reopened(&place.path()).unwrap_err();
        assert!(is_damage(&error), "{error}");
    }
}

#[test]
fn a_page_in_the_place_of_another_is_damage() {
    let place = Place::new();
    drop(place.fill());
    let mut bytes = std::fs::read(place.path()).unwrap();
    let (from, to) = (5 * PAGE, 7 * PAGE);
    bytes.copy_within(from..from + PAGE, to);
    std::fs::write(place.path(), bytes).unwrap();
    assert!(is_damage(&reopened(&place.path()).unwrap_err()));
}

/// With a log and without, after a rollback, a vacuum and a crash.
#[test]
fn checksums_stay_right_whatever_writes() {
    let place = Place::new();
    let conn = place.fill();
    conn.execute_batch("BEGIN; UPDATE t SET text = 'gone'; ROLLBACK; DELETE FROM t WHERE key % 3 = 0")
        .unwrap();
    conn.execute_batch("PRAGMA incremental_vacuum").unwrap();
    let after = all(&conn).unwrap();
    // As a crash leaves it: the log and the file of a connection that is not closed.
    let crashed = place.dir.path().join("crashed");
    for end in ["", "-wal"] {
        let [from, to] = [place.path(), crashed.clone()].map(|path| format!("{}{end}", path.display()));
        std::fs::copy(from, to).unwrap();
    }
    assert_eq!(reopened_for_writing(&crashed), after);
    conn.pragma_update_and_check(None, "journal_mode", "DELETE", |_| Ok(())).unwrap();
    conn.execute_batch("UPDATE t SET text = text || 'x'; BEGIN; DELETE FROM t; ROLLBACK; VACUUM").unwrap();
    let after = all(&conn).unwrap();
    drop(conn);
    assert_eq!(reopened(&place.path()).unwrap(), after);
}

fn reopened_for_writing(path: &Path) -> Vec<(i64, String)> {
    let conn = open(path, OpenFlags::default()).unwrap();
    conn.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").unwrap();
    all(&conn).unwrap()
}

#[test]
fn what_another_program_wrote_into_a_sealed_file_is_damage() {
    let place = Place::new();
    drop(place.fill());
    let other = Connection::open(place.path()).unwrap();
    other.execute_batch("UPDATE t SET text = 'x' WHERE key = 300").unwrap();
    drop(other);
    assert!(is_damage(&reopened(&place.path()).unwrap_err()));
}

#[test]
fn a_database_without_checksums_is_used_as_it_is() {
    let place = Place::new();
    let plain = Connection::open(place.path()).unwrap();
    plain
        .execute_batch("CREATE TABLE t (key INTEGER PRIMARY KEY, text TEXT); INSERT INTO t VALUES (1, 'x')")
        .unwrap();
    drop(plain);
    let conn = open(place.path(), OpenFlags::default()).unwrap();
    assert!(!is_sealed(&conn).unwrap());
    conn.execute_batch("INSERT INTO t VALUES (2, 'y')").unwrap();
    assert_eq!(all(&conn).unwrap().len(), 2);
    drop(conn);
    assert_eq!(all(&Connection::open(place.path()).unwrap()).unwrap().len(), 2);
}

#[test]
fn many_may_open_it_at_once() {
    let place = Place::new();
    drop(place.fill());
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let path = place.path();
            scope.spawn(move || {
                let conn = open(path, OpenFlags::default()).unwrap();
                conn.busy_timeout(std::time::Duration::from_secs(30)).unwrap();
                for n in 0..25 {
                    let key = 1000 + writer * 100 + n;
                    conn.execute("INSERT INTO t VALUES (?1, 'from a thread')", [key]).unwrap();
                }
            });
        }
    });
    assert_eq!(reopened(&place.path()).unwrap().len(), 500);
}

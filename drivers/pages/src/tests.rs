use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags};

use super::{PAGE_SIZE, data_version, is_damage, is_sealed, open, seal};
use crate::sum::LARGEST;

const PAGE: usize = PAGE_SIZE as usize;

struct Folder {
    dir: tempfile::TempDir,
}

impl Folder {
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
        let place = Folder::new();
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
        // Plain SQLite reads it.
        assert_eq!(all(&Connection::open(place.path()).unwrap()).unwrap(), good);
    }
}

#[test]
fn a_database_without_room_for_checksums_is_not_made() {
    let place = Folder::new();
    let conn = open(place.path(), OpenFlags::default()).unwrap();
    conn.execute_batch("CREATE TABLE t (key INTEGER PRIMARY KEY, text TEXT)").unwrap_err();
    drop(conn);
    assert_eq!(std::fs::metadata(place.path()).unwrap().len(), 0);
}

/// Every byte that is read belongs to a page, or to the header that is read before the pages.
#[test]
fn a_changed_byte_in_any_page_is_an_error_or_is_not_read() {
    for size in [PAGE, LARGEST] {
        let place = Folder::new();
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
                    // A page that no statement needs.
                    assert_eq!(read, good, "byte {at} of pages of {size}");
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

/// SQLite looks for no log of such a file, so it does not read the first page again.
#[test]
fn a_changed_byte_in_the_first_page_of_an_immutable_file_is_an_error() {
    for size in [PAGE, LARGEST] {
        let place = Folder::new();
        let conn = place.fill_pages(size);
        let good = all(&conn).unwrap();
        drop(conn);
        let immutable = || {
            let name = format!("file:{}?immutable=1", place.path().display());
            all(&open(name, OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI)?)
        };
        let bytes = std::fs::read(place.path()).unwrap();
        assert_eq!(bytes[18..20], [2, 2], "it has had a log");
        let header = 0..100;
        for at in header.chain((100..size - 8).step_by(61)).chain(size - 8..size) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << (at % 8);
            std::fs::write(place.path(), damaged).unwrap();
            let read = immutable();
            // SQLite has its own words for a file that is no database, and for a size that pages cannot have.
            let is_refused = read.as_ref().is_err_and(|error| at < 18 || is_damage(error));
            assert!(is_refused, "byte {at} of pages of {size}: {:?}", read.err());
        }
        std::fs::write(place.path(), bytes).unwrap();
        assert_eq!(immutable().as_ref(), Ok(&good));
    }
}

/// The header says whether pages have checksums, and how large they are.
#[test]
fn a_header_that_denies_the_checksums_of_its_pages_is_an_error() {
    use std::os::unix::fs::FileExt;
    // The file may be shorter than one page of the size that the header shows.
    for (size, rows) in [(PAGE, 400), (PAGE, 3), (LARGEST, 400), (LARGEST, 3)] {
        let place = Folder::new();
        let conn = place.fill_pages(size);
        conn.execute("DELETE FROM t WHERE key > ?1", [rows]).unwrap();
        conn.execute_batch("VACUUM").unwrap();
        drop(conn);
        let good = reopened(&place.path()).unwrap();
        let bytes = std::fs::read(place.path()).unwrap();
        // It stays open: closing it would drop the locks of a connection.
        let file = std::fs::OpenOptions::new().write(true).open(place.path()).unwrap();
        for at in [16, 17, 20] {
            for value in (0..=u8::MAX).filter(|value| *value != bytes[at]) {
                file.write_all_at(&[value], at as u64).unwrap();
                for flags in [OpenFlags::SQLITE_OPEN_READ_ONLY, OpenFlags::default()] {
                    let read = open(place.path(), flags).and_then(|conn| all(&conn));
                    let is_refused = read.as_ref().is_err_and(is_damage);
                    assert!(is_refused, "byte {at} is {value} in pages of {size}: {:?}", read.err());
                }
            }
            file.write_all_at(&bytes[at..=at], at as u64).unwrap();
        }
        assert_eq!(reopened(&place.path()).unwrap(), good);
    }
}

/// A first page in the log is read in place of the one in the file, and repairs that when the log is moved.
#[test]
fn a_header_that_denies_the_checksums_is_passed_over_if_the_log_has_the_first_page() {
    let moving = Moving::new(PAGE);
    let mut denied = moving.before.clone();
    denied[20] = 0;
    moving.opens(&denied, "the header shows no checksums");
}

/// The text of a key.
fn text(conn: &Connection, key: i64) -> rusqlite::Result<String> {
    conn.query_row("SELECT text FROM t WHERE key = ?1", [key], |row| row.get(0))
}

/// SQLite takes what is missing of a page for zeros, which can look like a page without these rows.
#[test]
fn a_file_that_ends_within_its_last_page_hides_no_row() {
    for size in [PAGE, LARGEST] {
        let place = Folder::new();
        drop(place.fill_pages(size));
        let good = reopened(&place.path()).unwrap();
        let bytes = std::fs::read(place.path()).unwrap();
        let mut refused = 0;
        for len in (bytes.len() - size + 1..bytes.len()).step_by(size / 67) {
            std::fs::write(place.path(), &bytes[..len]).unwrap();
            let conn = open(place.path(), OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
            for (key, whole) in &good {
                match text(&conn, *key) {
                    Ok(text) => assert_eq!(text, *whole),
                    Err(error) => {
                        assert!(is_damage(&error), "key {key}, {len} bytes in pages of {size}: {error}");
                        refused += 1;
                    }
                }
            }
        }
        assert!(refused > 60, "{refused} reads were refused");
    }
}

/// With a log, SQLite takes the length of the database from it, and not from the file.
#[test]
fn a_file_beside_a_log_that_ends_within_a_page_hides_no_row() {
    let place = Folder::new();
    drop(place.fill());
    let writer = open(place.path(), OpenFlags::default()).unwrap();
    writer.execute("UPDATE t SET text = 'x' WHERE key = 7", []).unwrap();
    let good = all(&writer).unwrap();
    let log = |place: &Folder| place.path().with_file_name("db-wal");
    let (bytes, frames) = (std::fs::read(place.path()).unwrap(), std::fs::read(log(&place)).unwrap());
    let (mut refused, mut read) = (0, 0);
    for len in (PAGE + 1..bytes.len()).step_by(2_741) {
        let place = Folder::new();
        std::fs::write(place.path(), &bytes[..len]).unwrap();
        std::fs::write(log(&place), &frames).unwrap();
        let conn = open(place.path(), OpenFlags::default()).unwrap();
        for (key, whole) in &good {
            match text(&conn, *key) {
                Ok(text) => {
                    assert_eq!(text, *whole);
                    read += 1;
                }
                // A page of which nothing is in the file has words of SQLite's own.
                Err(error) => {
                    assert_ne!(error, rusqlite::Error::QueryReturnedNoRows, "key {key}, {len} bytes");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 100 && read > 100, "{refused} reads were refused, {read} were not");
}

#[test]
fn a_page_in_the_place_of_another_is_damage() {
    let place = Folder::new();
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
    let place = Folder::new();
    let conn = place.fill();
    conn.execute_batch("BEGIN; UPDATE t SET text = 'gone'; ROLLBACK; DELETE FROM t WHERE key % 3 = 0")
        .unwrap();
    conn.execute_batch("PRAGMA incremental_vacuum").unwrap();
    let after = all(&conn).unwrap();
    // As a crash leaves it: the log and the file of a connection that was not closed.
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
    let place = Folder::new();
    drop(place.fill());
    let other = Connection::open(place.path()).unwrap();
    other.execute_batch("UPDATE t SET text = 'x' WHERE key = 300").unwrap();
    drop(other);
    assert!(is_damage(&reopened(&place.path()).unwrap_err()));
}

#[test]
fn a_database_without_checksums_is_used_as_it_is() {
    let place = Folder::new();
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

/// A database whose log is about to be moved into it: both files before and the database afterwards. All of it is
/// flushed, so a power loss meanwhile leaves a mixture of the two databases, and the log.
struct Moving {
    before: Vec<u8>,
    log: Vec<u8>,
    after: Vec<u8>,
    rows: Vec<(i64, String)>,
}

impl Moving {
    fn new(page: usize) -> Self {
        let place = Folder::new();
        drop(place.fill_pages(page));
        let conn = open(place.path(), OpenFlags::default()).unwrap();
        // Changed, added and freed pages, and the first page, which has the size.
        conn.execute_batch(
            "DELETE FROM t WHERE key > 350; UPDATE t SET text = text || 'x' WHERE key % 5 = 0;
             INSERT INTO t SELECT key + 1000, text FROM t; PRAGMA user_version = 7",
        )
        .unwrap();
        let log = place.path().with_file_name("db-wal");
        let (before, log) = (std::fs::read(place.path()).unwrap(), std::fs::read(log).unwrap());
        let rows = all(&conn).unwrap();
        drop(conn);
        Self { before, log, after: std::fs::read(place.path()).unwrap(), rows }
    }

    /// Checks the content of the database if its file holds these bytes.
    #[track_caller]
    fn opens(&self, database: &[u8], what: &str) {
        let place = Folder::new();
        std::fs::write(place.path(), database).unwrap();
        std::fs::write(place.path().with_file_name("db-wal"), &self.log).unwrap();
        let conn = open(place.path(), OpenFlags::default()).unwrap();
        assert_eq!(all(&conn).as_ref(), Ok(&self.rows), "{what}");
        assert!(is_sealed(&conn).unwrap(), "{what}");
        let verdict: String = conn.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
        assert_eq!(verdict, "ok", "{what}");
        drop(conn);
        assert_eq!(reopened(&place.path()).as_ref(), Ok(&self.rows), "{what}, moved");
    }
}

const SECTOR: usize = 512;

#[test]
fn every_page_may_be_torn_while_the_log_is_moved() {
    for page in [PAGE, LARGEST] {
        let moving = Moving::new(page);
        let pages = moving.after.len() / page;
        assert_ne!(moving.before.get(..page), moving.after.get(..page), "the first page is moved too");
        for number in 0..pages {
            // All combinations for the first page, some for the others.
            let sectors = if number == 0 { 0..page / SECTOR - 1 } else { number % 8..1 };
            for cut in sectors {
                for new_first in [true, false] {
                    let mut torn = moving.before.clone();
                    torn.resize(torn.len().max((number + 1) * page), 0);
                    let middle = number * page + (cut + 1) * SECTOR;
                    let written = if new_first { number * page..middle } else { middle..(number + 1) * page };
                    torn[written.clone()].copy_from_slice(&moving.after[written]);
                    moving.opens(&torn, &format!("page {number} of {page} bytes torn after sector {cut}"));
                }
            }
        }
    }
}

/// A sector that was being written may hold anything.
#[test]
fn every_sector_may_be_lost_while_the_log_is_moved() {
    let moving = Moving::new(PAGE);
    for at in (0..moving.after.len() / SECTOR).filter(|at| *at < PAGE / SECTOR || at % 71 == 0) {
        for garbage in [0, 0xa5] {
            let mut torn = moving.after.clone();
            torn[at * SECTOR..(at + 1) * SECTOR].fill(garbage);
            moving.opens(&torn, &format!("sector {at} is all {garbage:#x}"));
        }
    }
}

/// What a power loss cuts off the end of the file is in the log.
#[test]
fn the_file_may_end_anywhere_while_the_log_is_moved() {
    let moving = Moving::new(PAGE);
    for len in (moving.before.len()..moving.after.len()).step_by(5_003) {
        moving.opens(&moving.after[..len], &format!("{len} bytes"));
    }
}

#[test]
fn a_half_written_database_without_checksums_opens_too() {
    let place = Folder::new();
    let plain = Connection::open(place.path()).unwrap();
    plain.execute_batch("CREATE TABLE t (key INTEGER PRIMARY KEY, text TEXT)").unwrap();
    plain.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(())).unwrap();
    plain.execute_batch("INSERT INTO t VALUES (1, 'x'); PRAGMA user_version = 7").unwrap();
    let copy = Folder::new();
    std::fs::copy(place.path().with_file_name("db-wal"), copy.path().with_file_name("db-wal")).unwrap();
    let mut torn = std::fs::read(place.path()).unwrap();
    torn[..SECTOR].fill(0);
    std::fs::write(copy.path(), torn).unwrap();
    let conn = open(copy.path(), OpenFlags::default()).unwrap();
    assert_eq!(all(&conn).unwrap().len(), 1);
    assert!(!is_sealed(&conn).unwrap());
    conn.execute_batch("INSERT INTO t VALUES (2, 'y')").unwrap();
    drop(conn);
    assert_eq!(all(&Connection::open(copy.path()).unwrap()).unwrap().len(), 2);
}

/// An intact file, opened again and again while another connection writes and moves the log.
#[test]
fn opening_while_the_log_is_moved_never_fails() {
    let place = Folder::new();
    let keeper = place.fill();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let begun = std::sync::Barrier::new(2);
    let patient = |flags| {
        let conn = open(place.path(), flags).unwrap();
        conn.busy_timeout(std::time::Duration::from_mins(10)).unwrap();
        conn
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            begun.wait();
            let conn = patient(OpenFlags::default());
            for number in 1.. {
                conn.pragma_update(None, "user_version", number).unwrap();
                conn.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())).unwrap();
                if stop.load(std::sync::atomic::Ordering::Relaxed) {
                    break;
                }
            }
        });
        // On a busy machine all of it could be over before the log is moved first.
        begun.wait();
        for round in 0..3_000 {
            let flags = if round % 2 == 0 { OpenFlags::SQLITE_OPEN_READ_ONLY } else { OpenFlags::default() };
            let read = patient(flags).query_row("SELECT text FROM t WHERE key = 7", [], |_| Ok(()));
            assert_eq!(read, Ok(()), "round {round}");
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(all(&keeper).unwrap().len(), 400);
}

/// The same while the log is created and deleted: the last connection to close deletes it.
#[test]
fn opening_while_the_log_is_made_and_deleted_never_fails() {
    let place = Folder::new();
    drop(place.fill());
    std::thread::scope(|scope| {
        for writer in 0..3 {
            let path = place.path();
            scope.spawn(move || {
                for number in 0..150 {
                    let conn = open(&path, OpenFlags::default()).unwrap();
                    conn.busy_timeout(std::time::Duration::from_mins(10)).unwrap();
                    let sql = "UPDATE t SET text = ?1 WHERE key = ?2";
                    assert_eq!(
                        conn.execute(sql, rusqlite::params!["x", writer]),
                        Ok(usize::from(writer > 0))
                    );
                    if number % 2 == 0 {
                        conn.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())).unwrap();
                    }
                }
            });
        }
    });
    assert_eq!(reopened(&place.path()).unwrap().len(), 400);
}

/// SQLite does not verify a log in use: a changed byte in it would be read as it is, and moved into the database.
#[test]
fn a_changed_byte_in_a_log_that_is_in_use_is_an_error_or_is_not_read() {
    use std::os::unix::fs::FileExt;
    let moving = Moving::new(PAGE);
    let place = Folder::new();
    std::fs::write(place.path(), &moving.before).unwrap();
    let path = place.path().with_file_name("db-wal");
    std::fs::write(&path, &moving.log).unwrap();
    let keeper = open(place.path(), OpenFlags::default()).unwrap();
    assert_eq!(all(&keeper).unwrap(), moving.rows);
    // SQLite locks the database and the index of the log, but not the log: opening it drops no lock.
    let log = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let (mut refused, mut unread) = (0, 0);
    for at in (32..moving.log.len()).step_by(2_741) {
        log.write_all_at(&[moving.log[at] ^ (1 << (at % 8))], at as u64).unwrap();
        let conn = open(place.path(), OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
        match all(&conn) {
            Ok(rows) => {
                assert_eq!(rows, moving.rows, "byte {at}");
                unread += 1;
            }
            Err(error) => {
                assert!(is_damage(&error), "byte {at}: {error}");
                // It is not moved into the database either.
                let moved = keeper.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
                assert!(moved.is_err_and(|error| is_damage(&error)), "byte {at}");
                refused += 1;
            }
        }
        log.write_all_at(&moving.log[at..=at], at as u64).unwrap();
    }
    assert!(refused > 3 * unread, "{refused} refused, {unread} not read");
    assert_eq!(all(&keeper).unwrap(), moving.rows);
    drop(keeper);
    assert_eq!(reopened(&place.path()).unwrap(), moving.rows);
}

/// A transaction that does not fit into the cache writes some pages of the log twice before their checksums are
/// correct.
#[test]
fn a_transaction_that_is_larger_than_the_cache_reads_what_it_wrote() {
    let place = Folder::new();
    let conn = place.fill();
    conn.execute_batch("PRAGMA cache_size = 10; BEGIN").unwrap();
    for round in 0..5 {
        let sql = "UPDATE t SET text = printf('%0400d', key * ?1) WHERE key % 400 BETWEEN ?1 * 50 AND 399";
        conn.execute(sql, [round]).unwrap();
        assert_eq!(all(&conn).unwrap().len(), 400);
    }
    conn.execute_batch("COMMIT").unwrap();
    let after = all(&conn).unwrap();
    assert_eq!(reopened(&place.path()).unwrap(), after);
    drop(conn);
    assert_eq!(reopened(&place.path()).unwrap(), after);
}

#[test]
fn many_may_open_it_at_once() {
    let place = Folder::new();
    drop(place.fill());
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let path = place.path();
            scope.spawn(move || {
                let conn = open(path, OpenFlags::default()).unwrap();
                conn.busy_timeout(std::time::Duration::from_mins(10)).unwrap();
                for n in 0..25 {
                    let key = 1000 + writer * 100 + n;
                    conn.execute("INSERT INTO t VALUES (?1, 'from a thread')", [key]).unwrap();
                }
            });
        }
    });
    assert_eq!(reopened(&place.path()).unwrap().len(), 500);
}

#[test]
fn the_data_version_changes_with_commits_here_and_once_those_of_others_are_seen() {
    let place = Folder::new();
    let (here, other) = (place.fill(), open(place.path(), OpenFlags::default()).unwrap());
    let write =
        |conn: &Connection| conn.execute("UPDATE t SET text = text || '.' WHERE key = 1", []).unwrap();
    write(&here);
    let committed = data_version(&here).unwrap();
    write(&other);
    assert_eq!(data_version(&here).unwrap(), committed, "nothing was read since");
    here.execute_batch("BEGIN IMMEDIATE").unwrap();
    let seen = data_version(&here).unwrap();
    assert_ne!(seen, committed);
    write(&here);
    here.execute_batch("COMMIT").unwrap();
    assert_ne!(data_version(&here).unwrap(), seen);

    let committed = data_version(&here).unwrap();
    here.execute_batch("BEGIN IMMEDIATE").unwrap();
    assert_eq!(data_version(&here).unwrap(), committed, "nobody has written");
}

use rusqlite::StatementStatus;

use super::*;
use crate::SqliteSaver;
use crate::rows::directory;

#[test]
fn a_statement_with_a_bound_limit_is_prepared_once() {
    const SQL: &str = "SELECT key FROM checkpoint WHERE key >= ?1 ORDER BY key LIMIT ?2";
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let writer = Db::writer(&path, &Options::default()).unwrap();
    let reader = Db::reader(&path, &Options::default()).unwrap();
    for db in [writer, reader] {
        for limit in 1..4 {
            db.each(SQL, (0, limit), |_| Ok(())).unwrap();
        }
        let statement = db.conn.prepare_cached(SQL).unwrap();
        assert_eq!(statement.get_status(StatementStatus::Run), 3);
        assert_eq!(statement.get_status(StatementStatus::RePrepare), 0);
    }
}

#[test]
fn a_resting_file_with_a_damaged_first_page_is_not_opened() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a?b#c%41");
    drop(Db::writer(&path, &Options::default()).unwrap());
    let opened = || {
        let file = resting_file(&path).unwrap();
        Db::of_resting_file(&file, &Options::default()).and_then(|db| db.check_format())
    };
    let good = std::fs::read(&path).unwrap();
    for at in (24..usize::from(threadkeep_pages::PAGE_SIZE)).step_by(97) {
        let mut damaged = good.clone();
        damaged[at] ^= 1;
        std::fs::write(&path, damaged).unwrap();
        let opened = opened();
        assert!(matches!(opened, Err(Error::Corrupt { .. })), "byte {at}: {opened:?}");
    }
    std::fs::write(&path, good).unwrap();
    opened().unwrap();
}

/// The log of a file that a link leads to is beside the file. Without what is in it, an older state would be read.
#[cfg(unix)]
#[test]
fn a_link_to_a_file_with_a_log_is_no_resting_file() {
    let dir = tempfile::tempdir().unwrap();
    let (path, elsewhere) = (dir.path().join("db"), dir.path().join("elsewhere"));
    std::fs::create_dir(&elsewhere).unwrap();
    let link = elsewhere.join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    assert_eq!(resting_file(&link), None, "there is no file");
    let db = Db::writer(&path, &Options::default()).unwrap();
    assert!(db.log_bytes() > 0);
    assert_eq!([&path, &link].map(|path| resting_file(path)), [None, None]);
    // The last connection that is closed empties the log.
    drop(db);
    let files = [&path, &link].map(|path| resting_file(path).unwrap());
    assert_eq!(files[0], files[1]);
    Db::of_resting_file(&files[1], &Options::default()).unwrap().check_format().unwrap();
}

/// A page of the list of threads costs the same wherever it begins.
#[test]
fn a_page_of_threads_looks_at_no_thread_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::writer(&dir.path().join("db"), &Options::default()).unwrap();
    db.execute("BEGIN", []).unwrap();
    for number in 0..2_000 {
        directory::add_thread(&db, &format!("thread-{number:04}").as_str().into()).unwrap();
    }
    db.execute("COMMIT", []).unwrap();
    let after = "thread-1997".into();
    let page = directory::threads(&db, Some(&after), 1).unwrap();
    assert_eq!(page, ["thread-1998".into()]);
    let statement = db.conn.prepare_cached(directory::THREADS_AFTER).unwrap();
    assert_eq!(statement.get_status(StatementStatus::Run), 1);
    let steps = statement.get_status(StatementStatus::VmStep);
    assert!((1..200).contains(&steps), "{steps} steps");
    // From the first one on, with ids that sort at the ends.
    for id in ["", "\u{10ffff}"] {
        directory::add_thread(&db, &id.into()).unwrap();
    }
    let mut all = directory::threads(&db, None, 5_000).unwrap();
    assert_eq!((all.len(), all[0].as_str(), all[2_001].as_str()), (2_002, "", "\u{10ffff}"));
    assert_eq!(directory::threads(&db, Some(&"".into()), 5_000).unwrap(), all.split_off(1));
}

/// Attempts something that takes longer than the patience each time, as in a process that stood still, and that is
/// free from an attempt on. Returns whether the last one found it free, and how long each might wait.
fn attempted(patience: Duration, free_from: usize) -> (bool, Vec<Duration>) {
    let mut left = Vec::new();
    let attempt = |time| {
        let began = Instant::now();
        while began.elapsed() <= patience {
            std::hint::spin_loop();
        }
        left.push(time);
        left.len() >= free_from
    };
    let is_free = patiently((patience, Duration::ZERO), attempt, |is_free| !is_free);
    (is_free, left)
}

#[test]
fn what_is_free_when_the_time_is_up_is_found_free() {
    let (patience, none) = (Duration::from_millis(1), Duration::ZERO);
    assert_eq!(attempted(patience, 1), (true, vec![patience]));
    assert_eq!(attempted(patience, 2), (true, vec![patience, none]));
    assert_eq!(attempted(patience, 3), (false, vec![patience, none]), "once more, and not for ever");
    assert_eq!(attempted(none, 2), (false, vec![none]), "without patience");
}

/// Another file system that is mounted in the place of the first may have files with the same inodes.
#[cfg(unix)]
#[tokio::test]
async fn a_file_with_the_same_inode_on_another_device_is_not_backed_up() {
    use std::os::unix::fs::MetadataExt;

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let mut saver = SqliteSaver::open(&path, &Options::default()).unwrap();
    let found = std::fs::metadata(&path).unwrap();
    assert_eq!(saver.file, Some((found.dev(), found.ino())));
    let to = dir.path().join("backup");
    saver.copied(&to).await.unwrap();
    saver.file = Some((!found.dev(), found.ino()));
    let refused = saver.copied(&to).await;
    assert!(matches!(&refused, Err(Error::Unavailable { .. })), "{refused:?}");
}

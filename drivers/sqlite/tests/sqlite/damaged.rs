//! Pages that do not match their checksums: the check reports what they damaged, and reads the rest.

use std::collections::BTreeSet;
use std::path::Path;

use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep::saver::Saver;
use threadkeep_sqlite::{Finding, Options, SqliteSaver};

use crate::common::{Talk, message};

const PAGE: usize = threadkeep_pages::PAGE_SIZE as usize;

fn open(path: &Path) -> threadkeep::Result<SqliteSaver> {
    // What a page damages does not depend on whether a dictionary was trained in time.
    SqliteSaver::open(path, &Options { readers: 1, compression: false, ..Options::default() })
}

/// Threads of several pages each, in one file without a log. Returns their ids.
async fn threads(path: &Path) -> BTreeSet<String> {
    let saver = open(path).unwrap();
    let ids: BTreeSet<String> =
        (0..60).map(|number| format!("thread-{number:02}-{}", "x".repeat(80))).collect();
    for id in &ids {
        let mut talk = Talk::new(id);
        for number in 0..4 {
            let step = talk.say(&message(number, 1_000));
            saver.commit(step.clone()).await.unwrap();
            talk.accept(&step);
        }
    }
    saver.close().await;
    ids
}

#[tokio::test]
async fn a_damaged_page_is_a_finding_and_the_other_threads_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    let (path, copy) = (dir.path().join("db"), dir.path().join("copy"));
    let ids = threads(&path).await;
    let good = std::fs::read(&path).unwrap();
    let (mut named, mut unlisted, mut hidden, mut all) = (BTreeSet::new(), 0, 0, 0);
    for page in 0..good.len() / PAGE {
        let mut bytes = good.clone();
        bytes[page * PAGE + PAGE / 2] ^= 1;
        std::fs::write(&copy, bytes).unwrap();
        if page == 0 {
            assert!(matches!(open(&copy), Err(Error::Corrupt { .. })), "the first page is needed for all");
            continue;
        }
        let saver = open(&copy).unwrap();
        let found = saver.check().await.unwrap();
        // The second page is read only by SQLite's own check, which has other words for it.
        let names_it = found.iter().any(|finding| page == 1 || finding.what.contains("checksum"));
        assert!(names_it && !found.is_empty(), "page {page}: {found:?}");
        assert!(found.iter().all(|finding| !finding.orphan), "page {page}: {found:?}");
        let damaged: BTreeSet<_> = found.iter().filter_map(|finding| finding.scope.clone()).collect();
        let damaged: BTreeSet<String> = damaged.into_iter().map(|(thread, _)| thread).collect();
        let listed: BTreeSet<String> =
            saver.readable_threads().await.unwrap().iter().map(ToString::to_string).collect();
        assert!(listed.is_subset(&ids), "page {page}: {listed:?}");
        let (some, rest): (Vec<_>, Vec<_>) = ids.iter().enumerate().partition(|(number, _)| number % 2 == 0);
        for wanted in [some, rest] {
            let wanted: Vec<ThreadId> = wanted.iter().map(|(_, id)| id.as_str().into()).collect();
            let of_wanted = |finding: &&Finding| {
                finding.scope.as_ref().is_some_and(|(thread, _)| wanted.contains(&thread.as_str().into()))
            };
            let of_wanted: Vec<Finding> = found.iter().filter(of_wanted).cloned().collect();
            assert_eq!(saver.check_threads(wanted.clone()).await.unwrap(), of_wanted, "page {page}");
        }
        // The first page of the directory is needed for all of it.
        hidden += usize::from(listed.len() * 2 < ids.len());
        unlisted += ids.len() - listed.len();
        for id in &listed {
            let read = saver.read_thread(&id.as_str().into()).await;
            assert!(read.is_err() || !damaged.contains(id), "page {page}: {id} is whole: {found:?}");
        }
        // The first pages of the two large tables are needed for all rows.
        all += usize::from(damaged.len() == ids.len());
        named.extend(damaged);
        saver.close().await;
        for log in ["-wal", "-shm"] {
            let _ = std::fs::remove_file(format!("{}{log}", copy.display()));
        }
    }
    assert_eq!(named, ids, "each thread was damaged by some page, and named");
    assert!(all <= 2, "{all} pages damage all threads");
    assert!(
        hidden <= 1 && unlisted > ids.len(),
        "{hidden}, {unlisted}: pages of the directory were damaged too"
    );
}

/// A changed byte of the header would turn the checks of all pages off, and move what is in them.
#[tokio::test]
async fn a_header_that_shows_no_checksums_of_pages_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    threads(&path).await;
    let mut bytes = std::fs::read(&path).unwrap();
    for reserved in [0, 9, 255] {
        bytes[20] = reserved;
        std::fs::write(&path, &bytes).unwrap();
        for opened in [open(&path), SqliteSaver::open_read_only(&path, &Options::default())] {
            assert!(matches!(opened, Err(Error::Corrupt { .. })), "{reserved}: {opened:?}");
        }
    }
}

//! Imports whose outcome the store does not say, or beside which somebody else begins the thread.

use std::path::Path;
use std::sync::Arc;

use threadkeep::saver::Saver as _;
use threadkeep_records::{DATABASE_FILE, NewThread, Records, RecordsOptions};
use tokio::sync::Notify;

use super::commands::{carried_out, filled};
use super::store::{BUSY, Busy, IMPORTED, Import};
use crate::error::OpsError;
use crate::*;

/// The file of thread a of this store, in this directory.
async fn exported(store: &Busy, home: &Path) -> String {
    let file = home.join("a.ndjson").display().to_string();
    let export = ["export", "--thread", "a", "--out", &file];
    carried_out(store, home, "memory", &export).await.0.unwrap();
    file
}

async fn open_records(home: &Path) -> Records {
    Records::open(&home.join(DATABASE_FILE), RecordsOptions::default()).await.unwrap()
}

/// Records that have a row for the imported thread.
async fn records_with_imported(home: &Path) -> Records {
    let records = open_records(home).await;
    let new = NewThread { thread_id: IMPORTED.to_owned(), ..NewThread::default() };
    records.threads().create(new).await.unwrap();
    records
}

/// What an import of a thread with three checkpoints says, and the record that it left, in a store where writing the
/// thread ends like this.
async fn imported(import: Import) -> (Result<Exit, OpsError>, Option<threadkeep_records::ThreadRow>) {
    imported_into(&Busy { import, ..filled().await }).await
}

/// The same of this store.
async fn imported_into(store: &Busy) -> (Result<Exit, OpsError>, Option<threadkeep_records::ThreadRow>) {
    let home = tempfile::tempdir().unwrap();
    let records = open_records(home.path()).await;
    let file = exported(store, home.path()).await;
    let import = ["import", &file, "--as", IMPORTED, "--owner", "bob"];
    let result = carried_out(store, home.path(), "sqlite", &import).await.0;
    let row = records.threads().get(IMPORTED, None).await.unwrap();
    // It does not hold the thread.
    let reserved = records.runs().reserve(IMPORTED, threadkeep_records::WriterKind::Branch).await.unwrap();
    reserved.release().await.unwrap();
    records.close().await;
    (result, row)
}

#[tokio::test]
async fn an_import_in_doubt_is_taken_for_done_only_if_all_of_it_is_there() {
    let (result, row) = imported(Import::AnswerLost).await;
    assert_eq!(result.unwrap(), Exit::Done);
    assert_eq!(row.unwrap().user_id.as_deref(), Some("bob"));
    let (result, row) = imported(Import::Lost).await;
    let error = result.unwrap_err();
    assert!(matches!(error, OpsError::InDoubt(_)), "{error}");
    let says = "is not there yet, and may still appear";
    assert!(error.to_string().contains(says) && error.to_string().contains("was lost"), "{error}");
    assert!(row.is_some(), "the thread may still appear, and must not be everybody's");
}

/// It was in doubt, and the command is repeated as its error says.
#[tokio::test]
async fn an_import_that_is_repeated_says_that_all_of_the_file_is_there() {
    let store = filled().await;
    let home = tempfile::tempdir().unwrap();
    let file = exported(&store, home.path()).await;
    for (thread, all) in [("a", true), (BUSY, false)] {
        let import = ["import", &file, "--as", thread];
        let (result, printed) = carried_out(&store, home.path(), "memory", &import).await;
        let error = result.unwrap_err().to_string();
        assert!(error.contains(&format!("thread {thread} already exists")) && printed.is_empty(), "{error}");
        assert_eq!(error.contains("with every checkpoint of the file"), all, "{error}");
    }
}

#[tokio::test]
async fn an_import_that_was_not_written_leaves_no_record() {
    let (result, row) = imported(Import::Refused).await;
    assert!(result.unwrap_err().to_string().contains("the disk is full"));
    assert_eq!(row, None);
}

/// As the savers of Python do on the same store: they know no records, and so no reservation.
#[tokio::test]
async fn a_thread_that_another_program_began_during_an_import_gets_no_record_of_the_file() {
    for import in [Import::AnothersAfterLook, Import::AnothersBeforeWrite, Import::AnothersInstead] {
        let (result, row) = imported(import).await;
        let error = result.unwrap_err().to_string();
        assert!(error.contains("nothing was imported: thread imported already exists; "), "{error}");
        assert_eq!(row, None);
    }
}

/// The record says whose the file's thread is, and what failed wrote none.
#[tokio::test]
async fn a_failed_import_leaves_no_record_on_a_thread_that_another_program_began() {
    let store = Busy { import: Import::AnothersThenRefused, ..filled().await };
    let (result, row) = imported_into(&store).await;
    assert!(result.unwrap_err().to_string().contains("the disk is full"));
    assert_eq!(row, None);
    let others = store.read_thread(&IMPORTED.into()).await.unwrap();
    assert_eq!(others.checkpoints.len(), 1, "it is not the import's");
}

/// The advice of a record with another owner is to delete the thread.
#[tokio::test]
async fn a_thread_that_began_before_an_import_had_its_id_is_seen_before_the_record() {
    let store = Busy { import: Import::AnothersAfterLook, ..filled().await };
    let home = tempfile::tempdir().unwrap();
    let records = records_with_imported(home.path()).await;
    let file = exported(&store, home.path()).await;
    let import = ["import", &file, "--as", IMPORTED, "--owner", "bob"];
    let error = carried_out(&store, home.path(), "sqlite", &import).await.0.unwrap_err().to_string();
    assert!(error.contains("already exists") && !error.contains("another owner"), "{error}");
    assert!(records.threads().get(IMPORTED, None).await.unwrap().is_some(), "it is not the import's");
    assert_eq!(store.read_thread(&IMPORTED.into()).await.unwrap().checkpoints.len(), 1);
    records.close().await;
}

/// The one that fails would take back the record that the other one counts on, and its thread would be everybody's.
#[tokio::test]
async fn of_two_imports_of_one_thread_at_once_one_is_refused() {
    let gate = Arc::<(Notify, Notify)>::default();
    let store = Busy { import: Import::Refused, gate: Some(gate.clone()), ..filled().await };
    let other = Busy { import: Import::Written, gate: None, ..store.clone() };
    let home = tempfile::tempdir().unwrap();
    let records = open_records(home.path()).await;
    let file = exported(&store, home.path()).await;
    let import = ["import", &file, "--as", IMPORTED, "--owner", "bob"];
    let beside = async {
        gate.0.notified().await;
        let beside = carried_out(&other, home.path(), "sqlite", &import).await.0;
        gate.1.notify_one();
        beside
    };
    let (first, second) = tokio::join!(carried_out(&store, home.path(), "sqlite", &import), beside);
    let (first, second) = (first.0.unwrap_err().to_string(), second.unwrap_err().to_string());
    assert!(first.contains("the disk is full"), "{first}");
    assert!(second.contains("nothing was imported") && second.contains("another import"), "{second}");
    assert!(records.threads().get(IMPORTED, None).await.unwrap().is_none());

    carried_out(&other, home.path(), "sqlite", &import).await.0.unwrap();
    let row = records.threads().get(IMPORTED, None).await.unwrap();
    assert_eq!(row.unwrap().user_id.as_deref(), Some("bob"));
    records.close().await;
}

#[tokio::test]
async fn a_record_that_was_there_before_a_failed_import_stays() {
    let store = Busy { import: Import::Refused, ..filled().await };
    let home = tempfile::tempdir().unwrap();
    let records = records_with_imported(home.path()).await;
    let file = exported(&store, home.path()).await;
    let import = ["import", &file, "--as", IMPORTED];
    carried_out(&store, home.path(), "sqlite", &import).await.0.unwrap_err();
    assert!(records.threads().get(IMPORTED, None).await.unwrap().is_some());
    records.close().await;
}

/// Links and rows alone do not show that a version of a channel goes back.
#[tokio::test]
async fn a_file_of_a_damaged_thread_is_refused_as_verify_would_find_it() {
    let store = filled().await;
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("1.ndjson");
    let mut image = store.read_thread(&"a".into()).await.unwrap();
    image.thread = "damaged".into();
    let (_, last) = image.checkpoints.iter_mut().next_back().unwrap();
    last.checkpoint.channels.get_mut("messages").unwrap().version.counter = 0;
    let source = archive::Source { program: "x".to_owned(), saver: "x".to_owned() };
    archive::write(&image, source, None, std::fs::File::create(&file).unwrap()).unwrap();
    let file = file.display().to_string();
    let (result, _) = carried_out(&store, home.path(), "memory", &["import", &file]).await;
    let error = result.unwrap_err().to_string();
    assert!(error.contains("1.ndjson: nothing was imported") && error.contains("versions grow"), "{error}");
    assert!(store.read_thread(&"damaged".into()).await.unwrap().checkpoints.is_empty());
}

/// A thread that a store refuses is one file that cannot be imported.
#[tokio::test]
async fn a_file_with_a_broken_lineage_does_not_keep_the_others_from_being_imported() {
    let store = filled().await;
    let home = tempfile::tempdir().unwrap();
    let mut image = store.read_thread(&"a".into()).await.unwrap();
    let to = |name: &str| std::fs::File::create(home.path().join(name)).unwrap();
    let source = || archive::Source { program: "x".to_owned(), saver: "x".to_owned() };
    image.thread = "good".into();
    archive::write(&image, source(), None, to("2.ndjson")).unwrap();
    image.thread = "headless".into();
    image.checkpoints.pop_first();
    archive::write(&image, source(), None, to("1.ndjson")).unwrap();
    let directory = home.path().display().to_string();
    let (result, printed) = carried_out(&store, home.path(), "memory", &["import", &directory]).await;
    let error = result.unwrap_err().to_string();
    assert!(error.contains("1 of 2 files could not be imported"), "{error}");
    assert!(printed.contains("1 thread was imported"), "{printed}");
    assert_eq!(store.read_thread(&"good".into()).await.unwrap().checkpoints.len(), 4);
    let file = home.path().join("1.ndjson").display().to_string();
    let (result, _) = carried_out(&store, home.path(), "memory", &["import", &file]).await;
    let error = result.unwrap_err().to_string();
    assert!(error.contains("1.ndjson: nothing was imported"), "{error}");
}

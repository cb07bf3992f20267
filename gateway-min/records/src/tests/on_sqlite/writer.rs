//! The thread that writes: what shares a transaction, and what does not.

use std::sync::mpsc;

use futures::FutureExt;
use futures::future::{BoxFuture, join_all};
use serde_json::json;

use super::support::*;
use crate::query::query;
use crate::sqlite::QUEUE;
use crate::*;

/// Queues `rest` while the writer's thread is at work on a first transaction, which changes something, and lets it go on
/// then. Returns the outcomes.
async fn behind_another(
    records: &Records,
    rest: Vec<tokio::task::JoinHandle<Result<(), RecordsError>>>,
    at_work: mpsc::Sender<()>,
    first: tokio::task::JoinHandle<Result<u64, RecordsError>>,
) -> Vec<Result<(), RecordsError>> {
    // Each has queued its work when it waits for the answer.
    tokio::task::yield_now().await;
    soon(async {
        while records.db.queued() < rest.len() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    at_work.send(()).unwrap();
    assert_eq!(first.await.unwrap().unwrap(), 1);
    let mut outcomes = Vec::new();
    for each in rest {
        outcomes.push(each.await.unwrap());
    }
    outcomes
}

/// Occupies the writer's thread until a message permits it to continue.
async fn held(records: &Records) -> (mpsc::Sender<()>, tokio::task::JoinHandle<Result<u64, RecordsError>>) {
    let (go_on, waits) = mpsc::channel();
    let (begun, holds) = tokio::sync::oneshot::channel();
    let db = records.db.clone();
    let first = tokio::spawn(async move {
        let work = db.write("t", move |tx| {
            Box::pin(async move {
                begun.send(()).unwrap();
                waits.recv().unwrap();
                tx.execute(query("UPDATE threads_meta SET display_name = 'first' WHERE thread_id = 't'"))
                    .await
            })
        });
        work.await
    });
    holds.await.unwrap();
    (go_on, first)
}

/// Creates a thread in a transaction that fails or panics after that.
fn create(
    records: &Records,
    id: &'static str,
    end: fn() -> Result<(), RecordsError>,
) -> tokio::task::JoinHandle<Result<(), RecordsError>> {
    let db = records.db.clone();
    tokio::spawn(async move {
        let insert = query(
            "INSERT INTO threads_meta (thread_id, status, metadata_json, pinned, created_at, updated_at) \
             VALUES ($1, 'idle', '{}', FALSE, '', '')",
        );
        let insert = insert.bind(id);
        let created = db.write(id, move |tx| {
            Box::pin(async move {
                tx.execute(insert).await?;
                end()
            })
        });
        created.await
    })
}

async fn ids(records: &Records) -> Vec<String> {
    let rows =
        records.db.fetch_all::<(String,)>(query("SELECT thread_id FROM threads_meta ORDER BY 1")).await;
    rows.unwrap().into_iter().map(|(id,)| id).collect()
}

fn fails() -> Result<(), RecordsError> {
    Err(RecordsError::thread_not_found("x"))
}

#[tokio::test]
async fn what_is_queued_is_committed_together_and_a_failure_is_taken_back_alone() {
    let fixture = fixture().await;
    let records = fixture.place.try_open(RecordsOptions::default()).await.unwrap();
    create_thread(&records, "t").await;
    let before = (records.commits().all(), records.commits().flushed());
    let (go_on, first) = held(&records).await;
    let panics: fn() -> Result<(), RecordsError> = || panic!("on purpose");
    let rest = vec![
        create(&records, "a", || Ok(())),
        create(&records, "b", fails),
        create(&records, "c", || Ok(())),
        create(&records, "d", panics),
        create(&records, "e", || Ok(())),
    ];
    let outcomes = behind_another(&records, rest, go_on, first).await;
    let good: Vec<bool> = outcomes.iter().map(Result::is_ok).collect();
    assert_eq!(good, [true, false, true, false, true], "{outcomes:?}");
    assert!(outcomes[1].as_ref().unwrap_err().is_not_found());
    assert!(matches!(outcomes[3], Err(RecordsError::Unavailable { .. })));
    assert_eq!(ids(&records).await, ["a", "c", "e", "t"]);
    assert_eq!(thread(&records, "t").await.display_name.as_deref(), Some("first"));
    let after = (records.commits().all(), records.commits().flushed());
    assert_eq!((after.0 - before.0, after.1 - before.1), (1, 1), "one transaction, one flush");
}

/// A caller that waits for the disk relies on what it has read, even if it changes nothing itself.
#[tokio::test]
async fn a_caller_that_waits_for_the_disk_and_changes_nothing_flushes_what_others_left() {
    let fixture = fixture().await;
    let records = fixture.place.try_open(RecordsOptions::default()).await.unwrap();
    create_thread(&records, "t").await;
    let flushes = || records.commits().flushed();
    let reads = async || {
        let read = records.db.write("t", |tx| {
            Box::pin(tx.fetch_optional::<(String,)>(query("SELECT thread_id FROM threads_meta")))
        });
        assert_eq!(read.await.unwrap().unwrap().0, "t");
    };
    let before = flushes();
    reads().await;
    assert_eq!(flushes(), before, "nothing to flush");
    records.threads().set_status("t", ThreadStatus::Running).await.unwrap();
    assert_eq!(flushes(), before);
    reads().await;
    assert_eq!(flushes(), before + 1);
    reads().await;
    assert_eq!(flushes(), before + 1, "once");
}

#[tokio::test]
async fn work_that_waits_for_anything_else_is_refused_and_taken_back() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    let waits = records.db.write("t", |tx| {
        Box::pin(async move {
            tx.execute(query("DELETE FROM threads_meta")).await?;
            std::future::pending::<()>().await;
            Ok(())
        })
    });
    let error = soon(waits).await.unwrap_err();
    assert!(error.to_string().contains("waited for something else"), "{error}");
    assert_eq!(ids(records).await, ["t"]);
}

/// After a failed flush the file system may have dropped what it had accepted before, so a later commit could be lost
/// although its own flush succeeds.
#[tokio::test]
async fn nothing_is_written_after_a_failed_flush_until_the_records_are_opened_again() {
    const FSYNC: i32 = 1034;
    let fixture = fixture().await;
    let records = fixture.place.try_open(RecordsOptions::default()).await.unwrap();
    create_thread(&records, "t").await;
    records.db.fail_commit(FSYNC);
    let failed = create(&records, "a", || Ok(())).await.unwrap().unwrap_err();
    assert!(matches!(failed, RecordsError::InDoubt { .. }), "{failed}");
    let refused = create(&records, "b", || Ok(())).await.unwrap().unwrap_err();
    assert!(matches!(refused, RecordsError::Unavailable { .. }), "{refused}");
    assert!(refused.to_string().contains("restart the gateway"), "{refused}");
    let ended = until_available(|| records.threads().set_status("t", ThreadStatus::Running));
    assert!(soon(ended).await.unwrap_err().to_string().contains("restart the gateway"));
    assert_eq!(ids(&records).await, ["t"], "what is there can be read");
    records.close().await;

    let records = fixture.place.try_open(RecordsOptions::default()).await.unwrap();
    create(&records, "b", || Ok(())).await.unwrap().unwrap();
    assert_eq!(ids(&records).await, ["b", "t"]);
}

#[tokio::test]
async fn a_commit_that_finds_the_disk_full_does_not_keep_later_ones_from_being_written() {
    const FULL: i32 = 13;
    let fixture = fixture().await;
    let records = fixture.place.try_open(RecordsOptions::default()).await.unwrap();
    records.db.fail_commit(FULL);
    let failed = create(&records, "a", || Ok(())).await.unwrap().unwrap_err();
    assert!(matches!(failed, RecordsError::InDoubt { .. }), "{failed}");
    create(&records, "b", || Ok(())).await.unwrap().unwrap();
    assert_eq!(ids(&records).await, ["b"]);
}

#[cfg(unix)]
#[tokio::test]
async fn a_file_that_is_removed_during_a_transaction_takes_back_all_that_shares_it() {
    let fixture = fixture().await;
    let records = fixture.place.try_open(RecordsOptions::default()).await.unwrap();
    create_thread(&records, "t").await;
    let (go_on, first) = held(&records).await;
    let (other, failing) = (create(&records, "a", || Ok(())), create(&records, "b", fails));
    soon(async {
        while records.db.queued() < 2 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    std::fs::remove_file(fixture.place.path()).unwrap();
    go_on.send(()).unwrap();
    for error in [first.await.unwrap().map(drop).unwrap_err(), other.await.unwrap().unwrap_err()] {
        assert!(error.to_string().contains("removed, renamed or replaced"), "{error}");
    }
    assert!(failing.await.unwrap().unwrap_err().is_not_found());
    assert_eq!(ids(&records).await, ["t"]);
}

/// A transaction for thread `t`.
fn touch(records: &Records) -> BoxFuture<'_, Result<u64, RecordsError>> {
    let touched = records.db.write("t", |tx| {
        Box::pin(tx.execute(query("UPDATE threads_meta SET pinned = TRUE WHERE thread_id = 't'")))
    });
    touched.boxed()
}

/// A caller that waited for a place in a full queue, and is not polled any more: neither the others wait for it, nor does
/// the closing of the records.
#[tokio::test]
async fn stalled_callers_hold_up_no_other_writer() {
    let fixture = fixture().await;
    let records = fixture.place.try_open(RecordsOptions::default()).await.unwrap();
    create_thread(&records, "t").await;
    let (go_on, first) = held(&records).await;
    let mut queued: Vec<_> = (0..QUEUE).map(|_| touch(&records)).collect();
    let mut stalled: Vec<_> = (0..QUEUE).map(|_| touch(&records)).collect();
    for future in queued.iter_mut().chain(&mut stalled) {
        assert!(future.now_or_never().is_none(), "the thread is at work");
    }
    assert_eq!(records.db.queued(), QUEUE);
    go_on.send(()).unwrap();
    assert_eq!(first.await.unwrap().unwrap(), 1);
    for result in join_all(queued).await {
        assert_eq!(result.unwrap(), 1);
    }
    assert_eq!(soon(touch(&records)).await.unwrap(), 1);
    soon(records.close()).await;
    for result in join_all(stalled).await {
        assert!(matches!(&result, Err(RecordsError::Unavailable { .. })), "{result:?}");
    }
}

/// A place that becomes free is taken by those who wait for one.
#[tokio::test]
async fn writers_that_wait_for_a_place_get_their_turn() {
    let fixture = fixture().await;
    let records = fixture.place.try_open(RecordsOptions::default()).await.unwrap();
    create_thread(&records, "t").await;
    let (go_on, first) = held(&records).await;
    let mut waiting: Vec<_> = (0..3 * QUEUE).map(|_| touch(&records)).collect();
    for future in &mut waiting {
        assert!(future.now_or_never().is_none(), "the thread is at work");
    }
    go_on.send(()).unwrap();
    assert_eq!(first.await.unwrap().unwrap(), 1);
    for result in soon(join_all(waiting)).await {
        assert_eq!(result.unwrap(), 1);
    }
}

/// Once the rows are gone, another process may use the id, and its events go to the same file.
#[tokio::test]
async fn the_event_file_of_a_deleted_thread_is_held_before_its_rows_go() {
    let fixture = fixture_with(EventBackend::Jsonl).await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    start(records, "t", "r").await;
    let event = NewEvent::new("run.end", "outputs", json!({}));
    records.events().append("t", "r", vec![event]).await.unwrap();
    records.runs().finish("r", &end(RunStatus::Success)).await.unwrap();
    let files: Vec<_> = std::fs::read_dir(fixture.place.event_directory()).unwrap().collect();
    let [Ok(file)] = &files[..] else { panic!("one file: {files:?}") };

    let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
    let (go_on, first) = held(records).await;
    let deleting = records.clone();
    let deletion = tokio::spawn(async move { deleting.delete_thread(reservation).await });
    soon(async {
        while records.db.queued() == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let another = std::fs::File::open(file.path()).unwrap();
    assert!(another.try_lock().is_err(), "the rows are about to go");
    go_on.send(()).unwrap();
    assert_eq!(first.await.unwrap().unwrap(), 1);
    assert_eq!(deletion.await.unwrap().unwrap().events, 1);
    assert!(!file.path().exists());
}

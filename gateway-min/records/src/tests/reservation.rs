use std::time::Duration;

use super::support::*;
use crate::*;

#[tokio::test]
async fn reservation_holds_the_thread_until_released() {
    let fixture = fixture().await;
    let runs = fixture.records.runs();
    // The thread need not have a row.
    let reservation = runs.reserve("t", WriterKind::CheckpointWrite).await.unwrap();
    assert_eq!((reservation.thread_id(), reservation.kind()), ("t", WriterKind::CheckpointWrite));
    let row = runs.active_for_thread("t").await.unwrap().unwrap();
    assert_eq!((row.operation_kind, row.status), (OperationKind::CheckpointWrite, RunStatus::Running));
    for kind in
        [WriterKind::CheckpointWrite, WriterKind::ArtifactWrite, WriterKind::Branch, WriterKind::Delete]
    {
        let error = runs.reserve("t", kind).await.unwrap_err();
        assert_eq!(error.to_string(), "Thread t already has an active checkpoint write");
    }
    reservation.release().await.unwrap();
    assert!(dump(&fixture.records).await.is_empty());
    runs.reserve("t", WriterKind::Delete).await.unwrap().release().await.unwrap();
}

/// In any process. Only other writers and runs wait for it: a second note is refused.
#[tokio::test]
async fn a_writer_waits_for_a_note() {
    let fixture = fixture().await;
    let other = fixture.reopen(EventBackend::Memory).await;
    for kind in
        [WriterKind::CheckpointWrite, WriterKind::ArtifactWrite, WriterKind::Branch, WriterKind::Delete]
    {
        let note = fixture.records.runs().reserve("t", WriterKind::Note).await.unwrap();
        let refused = other.runs().reserve("t", WriterKind::Note).await.unwrap_err();
        assert_eq!(refused.to_string(), "Thread t already has an active checkpoint write");
        let mut writer = Box::pin(other.runs().reserve("t", kind));
        let early = tokio::time::timeout(Duration::from_millis(50), &mut writer).await;
        assert!(early.is_err(), "{kind:?}: {early:?}");
        note.release().await.unwrap();
        let writer = writer.await.unwrap();
        let refused = fixture.records.runs().reserve("t", WriterKind::Note).await.unwrap_err();
        assert!(refused.is_conflict(), "a note waits for nobody: {refused}");
        writer.release().await.unwrap();
    }
}

/// Something else has taken the thread by the end of the note.
#[tokio::test]
async fn a_writer_that_waited_for_a_note_is_refused_by_a_run_that_waited_longer() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    let note = records.runs().reserve("t", WriterKind::Note).await.unwrap();
    let queued = records.runs().admit(new_run("t", "r"), MultitaskStrategy::Enqueue).await.unwrap();
    assert!(matches!(queued, Admission::Queued(_)), "{queued:?}");
    let mut writer = Box::pin(records.runs().reserve("t", WriterKind::CheckpointWrite));
    let early = tokio::time::timeout(Duration::from_millis(50), &mut writer).await;
    assert!(early.is_err(), "{early:?}");
    note.release().await.unwrap();
    let refused = writer.await.unwrap_err();
    assert_eq!(refused.to_string(), "Thread t already has an active run");
}

#[tokio::test]
async fn run_keeps_writers_out() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t").await;
    admit(&fixture.records, "t", "r").await;
    let before = dump(&fixture.records).await;
    let error = fixture.records.runs().reserve("t", WriterKind::Delete).await.unwrap_err();
    assert_eq!(error.to_string(), "Thread t already has an active run");
    assert_eq!(dump(&fixture.records).await, before);
}

#[tokio::test]
async fn reservations_are_not_runs() {
    let fixture = fixture().await;
    let runs = fixture.records.runs();
    let reservation = runs.reserve("t", WriterKind::CheckpointWrite).await.unwrap();
    let row_id = holder(&fixture.records, "t").await.unwrap();
    let before = dump(&fixture.records).await;
    assert_eq!(runs.get(&row_id).await.unwrap(), None);
    assert_eq!(runs.list_by_thread("t", &RunQuery { status: None, limit: 9, offset: 0 }).await.unwrap(), []);
    assert!(runs.start(&row_id).await.unwrap_err().is_not_found());
    assert!(runs.finish(&row_id, &end(RunStatus::Error)).await.unwrap_err().is_not_found());
    assert!(!runs.progress(&row_id, &RunTotals::default()).await.unwrap());
    assert_eq!(runs.request_cancel(&row_id, CancelAction::Interrupt).await.unwrap(), CancelOutcome::NotFound);
    assert_eq!(dump(&fixture.records).await, before);
    reservation.release().await.unwrap();
}

#[tokio::test]
async fn dropped_reservation_is_released_in_the_background() {
    let fixture = fixture().await;
    drop(fixture.records.runs().reserve("t", WriterKind::CheckpointWrite).await.unwrap());
    until_free(&fixture.records, "t").await;
    assert!(dump(&fixture.records).await.is_empty());
}

#[tokio::test]
async fn failed_release_is_repeated_in_the_background() {
    let fixture = fixture().await;
    for statement in [1, 2] {
        let reservation = fixture.records.runs().reserve("t", WriterKind::CheckpointWrite).await.unwrap();
        fixture.records.db.fault.arm(statement);
        let error = reservation.release().await.unwrap_err();
        assert!(matches!(error, RecordsError::Unavailable { .. }), "{error}");
        until_free(&fixture.records, "t").await;
    }
}

/// However long the database is unavailable when the writer leaves: nothing else would ever free the thread of a process
/// without leases.
#[tokio::test]
async fn a_reservation_that_cannot_be_released_is_released_when_the_database_is_back() {
    let fixture = fixture().await;
    for dropped in [true, false] {
        let reservation = fixture.records.runs().reserve("t", WriterKind::CheckpointWrite).await.unwrap();
        fixture.records.fail_from(1);
        if dropped {
            drop(reservation);
        } else {
            reservation.release().await.unwrap_err();
        }
        while fixture.records.failed() < 3 {
            tokio::task::yield_now().await;
        }
        assert!(holder(&fixture.records, "t").await.is_some());
        fixture.records.fail_statement(0);
        tokio::time::timeout(Duration::from_mins(10), until_free(&fixture.records, "t"))
            .await
            .expect("the thread stays reserved");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_parallel_reservations_one_succeeds() {
    let fixture = fixture().await;
    let tasks = (0..20).map(|_| {
        let runs = fixture.records.runs().clone();
        tokio::spawn(async move { runs.reserve("t", WriterKind::CheckpointWrite).await })
    });
    let results = futures::future::try_join_all(tasks).await.unwrap();
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
    assert!(results.iter().filter_map(|result| result.as_ref().err()).all(RecordsError::is_conflict));
}

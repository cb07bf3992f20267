//! Which write transactions wait for the disk: on Postgres, which may fail while a run continues, all of them.

use super::support::*;
use crate::db::Db;
use crate::query::{Dialect, query};
use crate::*;

/// What the commit of a write transaction will wait for, according to the database.
async fn waits(db: &Db) -> bool {
    if db.dialect() == Dialect::Sqlite {
        let sql = query("PRAGMA synchronous");
        let level = db.write("t", move |tx| Box::pin(tx.fetch_optional::<(i64,)>(sql)));
        let (level,) = level.await.unwrap().unwrap();
        assert!(level == 1 || level == 2, "{level}");
        return level == 2;
    }
    let sql = query("SHOW synchronous_commit");
    let setting = db.write("t", move |tx| Box::pin(tx.fetch_optional::<(String,)>(sql)));
    setting.await.unwrap().unwrap().0 == "on"
}

#[tokio::test]
async fn a_transaction_waits_for_the_disk_unless_it_is_told_not_to() {
    let fixture = fixture().await;
    let records = fixture.place.try_open(RecordsOptions::default()).await.unwrap();
    // The setting is per transaction, independent of the previous one on this connection.
    for _ in 0..2 {
        assert!(waits(&records.db).await);
        let in_postgres = records.db.dialect() == Dialect::Postgres;
        assert_eq!(waits(&records.db.unflushed()).await, in_postgres);
    }
}

/// What is acknowledged to a client is flushed: a thread, a run's admission (unless the client waits for its end), a
/// cancellation, its end. The steps between are not.
#[tokio::test]
async fn of_a_run_its_admission_and_how_it_ends_wait_for_the_disk() {
    let fixture = fixture_with(EventBackend::Database).await;
    let options = RecordsOptions { event_backend: EventBackend::Database, ..RecordsOptions::default() };
    let records = fixture.place.try_open(options).await.unwrap();
    let commits = records.commits();
    // Checks the number of commits, and of those that waited.
    let check = |all: u64, flushed: u64| {
        let flushed = if records.db.dialect() == Dialect::Postgres { all } else { flushed };
        assert_eq!((commits.all(), commits.flushed()), (all, flushed));
    };
    create_thread(&records, "t").await;
    admit(&records, "t", "r").await;
    check(2, 2);
    assert!(matches!(records.runs().start("r").await.unwrap(), StartOutcome::Started { .. }));
    let event = || NewEvent::new("run.start", "trace", serde_json::json!({}));
    records.events().append("t", "r", vec![event()]).await.unwrap();
    records
        .events()
        .append_if_absent("t", "r", NewEvent::new("run.delivery", "outputs", event().content))
        .await
        .unwrap();
    records.runs().progress("r", &RunTotals::default()).await.unwrap();
    records.runs().decide("r", &end(RunStatus::Success)).await.unwrap();
    check(7, 2);
    records.runs().finish("r", &end(RunStatus::Success)).await.unwrap();
    check(8, 3);
    records.threads().set_display_name("t", None, Some("x")).await.unwrap();
    let followed = NewRun { acknowledged: false, ..new_run("t", "s") };
    records.runs().admit(followed, MultitaskStrategy::Reject).await.unwrap();
    check(10, 4);
    records.runs().request_cancel("s", CancelAction::Interrupt).await.unwrap();
    check(11, 5);
    // A rolled back transaction is not a commit.
    assert!(records.threads().set_status("nowhere", ThreadStatus::Running).await.is_err());
    check(11, 5);
    let reservation = records.runs().reserve("u", WriterKind::CheckpointWrite).await.unwrap();
    reservation.release().await.unwrap();
    check(13, 5);
}

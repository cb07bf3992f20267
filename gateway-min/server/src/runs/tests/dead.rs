//! What a gateway without leases does about those of others, which are dead.

use threadkeep_records::{
    Clock, DATABASE_FILE, EventBackend, Lease, NewRun, Records, RecordsOptions, StartOutcome, WriterKind,
    until_available,
};

use super::*;

/// The records as a process of this name opens them, whose clock is this far behind.
async fn process(dir: &Path, owner: &str, behind: chrono::TimeDelta) -> Records {
    let hour = std::time::Duration::from_hours(1);
    let options = RecordsOptions {
        clock: Clock::from_fn(move || chrono::Utc::now() - behind),
        event_backend: EventBackend::Memory,
        lease: Some(Lease::new(owner, hour, hour)),
        ..RecordsOptions::default()
    };
    Records::open(&dir.join("data").join(DATABASE_FILE), options).await.unwrap()
}

/// The files of a gateway without leases, for which leases last a second.
fn configure(dir: &Path) {
    let config = json!({
        "config_version": 49,
        "database": {"backend": "sqlite", "sqlite_dir": dir.join("data")},
        "models": [{"name": "m", "use": "scripted", "model": "m", "script": "script.json"}],
        "run_ownership": {"heartbeat_enabled": false, "lease_seconds": 1, "grace_seconds": 0},
    });
    std::fs::write(dir.join("script.json"), script().to_string()).unwrap();
    std::fs::write(dir.join("config.yaml"), config.to_string()).unwrap();
}

/// Starts the run `r` on the thread `t`.
async fn work(records: &Records) {
    records.threads().create(NewThread { thread_id: "t".into(), ..NewThread::default() }).await.unwrap();
    let run = NewRun { run_id: "r".into(), thread_id: "t".into(), ..NewRun::default() };
    records.runs().admit(run, MultitaskStrategy::Reject).await.unwrap();
    assert!(matches!(records.runs().start("r").await.unwrap(), StartOutcome::Started { .. }));
}

/// Heartbeats were switched off after a gateway was killed; an embedded client dies beside the next one.
#[tokio::test]
async fn a_gateway_without_heartbeats_looks_for_the_leases_of_the_dead() {
    let dir = TempDir::new().unwrap();
    configure(dir.path());
    let killed = process(dir.path(), "killed", chrono::TimeDelta::zero()).await;
    work(&killed).await;
    let late = chrono::TimeDelta::hours(2);
    let (killed, client) =
        (process(dir.path(), "killed", late).await, process(dir.path(), "client", late).await);

    let app =
        App::start_with(open(dir.path()), Arc::new(ModeRegister::new()), Parts::default()).await.unwrap();
    let runs = app.records.runs();
    assert_eq!(runs.get("r").await.unwrap().unwrap().status, RunStatus::Running, "its lease lasts");
    // Their leases have been over for an hour from here on. The gateway writes to the file every moment, and on a busy
    // machine it may hold it for longer than a statement waits.
    let ids = ["r".to_owned()];
    until_available(|| killed.runs().renew(&ids)).await.unwrap();
    let reserved = until_available(|| client.runs().reserve("deleted", WriterKind::Delete)).await;
    std::mem::forget(reserved.unwrap());
    let ended = async {
        while runs.active_for_thread("t").await.unwrap().is_some()
            || runs.active_for_thread("deleted").await.unwrap().is_some()
        {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_mins(10), ended).await.expect("nobody looks for them");
    let row = runs.get("r").await.unwrap().unwrap();
    assert_eq!((row.status, row.error.as_deref()), (RunStatus::Error, Some(LEASE_EXPIRED_ERROR)));
    runs.reserve("deleted", WriterKind::Delete).await.unwrap().release().await.unwrap();
    app.close().await;
}

/// The gateway takes the run over, and does not hear that this is committed. From then on the run has no lease.
#[tokio::test]
async fn a_rollback_that_was_taken_over_without_an_answer_is_carried_out() {
    let dir = TempDir::new().unwrap();
    configure(dir.path());
    let killed = process(dir.path(), "killed", chrono::TimeDelta::zero()).await;
    work(&killed).await;
    killed.runs().request_cancel("r", CancelAction::Rollback).await.unwrap();
    let killed = process(dir.path(), "killed", chrono::TimeDelta::hours(2)).await;
    let app =
        App::start_with(open(dir.path()), Arc::new(ModeRegister::new()), Parts::default()).await.unwrap();
    let runs = app.records.runs();
    let row = runs.get("r").await.unwrap().unwrap();
    assert_eq!((row.status, row.owner_worker_id.as_deref()), (RunStatus::Running, Some("killed")));
    app.records.doubt_commit(1);
    let ids = ["r".to_owned()];
    until_available(|| killed.runs().renew(&ids)).await.unwrap();
    let ended = async {
        while runs.active_for_thread("t").await.unwrap().is_some() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_mins(10), ended).await.expect("nobody rolls it back");
    let row = runs.get("r").await.unwrap().unwrap();
    assert_eq!((row.status, row.error.as_deref()), (RunStatus::Error, Some("Rolled back by user")));
    assert_eq!(row.owner_worker_id, None, "the gateway had it");
    app.close().await;
}

//! What the tests share.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::store::*;

/// A clock that stands until it is moved.
#[derive(Clone)]
pub(super) struct TestClock(Arc<AtomicI64>);

impl TestClock {
    pub(super) fn new() -> Self {
        // 2026-01-02T03:04:05.000000+00:00
        Self(Arc::new(AtomicI64::new(1_767_323_045_000_000)))
    }

    pub(super) fn clock(&self) -> Clock {
        let this = self.clone();
        Clock::from_fn(move || this.now())
    }

    pub(super) fn now(&self) -> DateTime<Utc> {
        DateTime::from_timestamp_micros(self.0.load(Ordering::SeqCst)).unwrap()
    }

    pub(super) fn advance_micros(&self, micros: i64) {
        self.0.fetch_add(micros, Ordering::SeqCst);
    }
}

/// A store in a file of its own, with a clock that stands.
pub(super) struct Fixture {
    pub(super) store: Store,
    pub(super) clock: TestClock,
    pub(super) path: PathBuf,
    _directory: TempDir,
}

pub(super) async fn fixture() -> Fixture {
    fixture_with(EventBackend::Memory).await
}

pub(super) async fn fixture_with(event_backend: EventBackend) -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(DATABASE_FILE);
    let clock = TestClock::new();
    let store = reopen(&path, options_at(&path, &clock, event_backend)).await;
    Fixture { store, clock, path, _directory: directory }
}

impl Fixture {
    /// Opens its files as another process would.
    pub(super) async fn reopen(&self, event_backend: EventBackend) -> Store {
        reopen(&self.path, options_at(&self.path, &self.clock, event_backend)).await
    }
}

fn options_at(path: &Path, clock: &TestClock, event_backend: EventBackend) -> StoreOptions {
    StoreOptions { event_directory: path.with_file_name("run_events"), ..options(clock, event_backend) }
}

/// Opens the file at `path` as another process would.
pub(super) async fn reopen(path: &Path, options: StoreOptions) -> Store {
    let store = Store::open(path, options).await.unwrap();
    store.db.stop_flushing().await;
    store
}

pub(super) fn options(clock: &TestClock, event_backend: EventBackend) -> StoreOptions {
    StoreOptions { clock: clock.clock(), event_backend, ..StoreOptions::default() }
}

pub(super) fn object(value: Value) -> JsonObject {
    match value {
        Value::Object(object) => object,
        other => panic!("not an object: {other}"),
    }
}

pub(super) async fn create_thread(store: &Store, thread_id: &str) {
    let new = NewThread { thread_id: thread_id.to_owned(), ..NewThread::default() };
    assert!(store.threads().create(new).await.unwrap().created);
}

pub(super) fn new_run(thread_id: &str, run_id: &str) -> NewRun {
    NewRun {
        run_id: run_id.to_owned(),
        thread_id: thread_id.to_owned(),
        kwargs: json!({"input": null}),
        ..NewRun::default()
    }
}

/// Admits a run that gets its thread.
pub(super) async fn admit(store: &Store, thread_id: &str, run_id: &str) -> RunRow {
    match store.runs().admit(new_run(thread_id, run_id), MultitaskStrategy::Reject).await.unwrap() {
        Admission::Admitted(row) => row,
        other => panic!("not admitted: {other:?}"),
    }
}

/// Admits a run that gets its thread, and starts it.
pub(super) async fn start(store: &Store, thread_id: &str, run_id: &str) {
    admit(store, thread_id, run_id).await;
    assert_eq!(store.runs().start(run_id).await.unwrap(), StartOutcome::Started);
}

/// Admits a run that waits.
pub(super) async fn wait(
    store: &Store,
    thread_id: &str,
    run_id: &str,
    strategy: MultitaskStrategy,
) -> Admission {
    let admission = store.runs().admit(new_run(thread_id, run_id), strategy).await.unwrap();
    assert!(matches!(admission, Admission::Waiting { .. }), "{admission:?}");
    admission
}

pub(super) fn end(status: RunStatus) -> RunEnd {
    RunEnd { status, error: None, stop_reason: None, totals: RunTotals::default() }
}

pub(super) async fn run(store: &Store, run_id: &str) -> RunRow {
    store.runs().get(run_id).await.unwrap().unwrap()
}

pub(super) async fn thread(store: &Store, thread_id: &str) -> ThreadRow {
    store.threads().get(thread_id, None).await.unwrap().unwrap()
}

pub(super) async fn holder(store: &Store, thread_id: &str) -> Option<String> {
    store.runs().active_for_thread(thread_id).await.unwrap().map(|row| row.run_id)
}

/// Waits until nothing holds the thread any more: for releases in the background.
pub(super) async fn until_free(store: &Store, thread_id: &str) {
    soon(async {
        while holder(store, thread_id).await.is_some() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// Turns waiting for what never comes into a failure.
pub(super) async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_mins(1), future).await.expect("never happened")
}

/// Runs any SQL on the writing connection.
pub(super) async fn sql(store: &Store, sql: &'static str) {
    let mut tx = store.db.write().await.unwrap();
    tx.execute(sqlx::query(sql)).await.unwrap();
    tx.commit().await.unwrap();
}

/// All rows of all tables, as text, after the transactions that are under way.
pub(super) async fn dump(store: &Store) -> Vec<String> {
    let mut tx = store.db.write().await.unwrap();
    let mut rows: Vec<(String,)> = Vec::new();
    for table in [
        "SELECT json_array('thread', thread_id, assistant_id, user_id, display_name, status, metadata_json, pinned, \
         created_at, updated_at) FROM threads_meta ORDER BY 1",
        "SELECT json_array('run', admission_seq, run_id, thread_id, assistant_id, user_id, status, operation_kind, \
         waiting, idempotency_key, model_name, multitask_strategy, metadata_json, kwargs_json, error, stop_reason, \
         message_count, first_human_message, last_ai_message, total_input_tokens, total_output_tokens, total_tokens, \
         llm_call_count, lead_agent_tokens, subagent_tokens, middleware_tokens, token_usage_by_model, \
         follow_up_to_run_id, owner_worker_id, lease_expires_at, cancel_action, cancel_requested_at, created_at, \
         updated_at) FROM runs ORDER BY 1",
        "SELECT json_array('event', id, thread_id, run_id, user_id, event_type, category, content, event_metadata, \
         seq, created_at) FROM run_events ORDER BY 1",
    ] {
        rows.extend(tx.fetch_all::<(String,)>(sqlx::query(table)).await.unwrap());
    }
    rows.into_iter().map(|(row,)| row).collect()
}

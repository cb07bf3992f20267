//! Shared by the tests.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use tempfile::TempDir;
use threadkeep_testing::Database;
use tokio::sync::OnceCell;
use uuid::Uuid;

use crate::query::Dialect;
use crate::*;

/// The records in this schema of a database.
pub(crate) fn postgres_target(url: &str, schema: &str, connections: u32) -> PostgresTarget {
    let opener = threadkeep_postgres::Address::parse(url).unwrap().opener().unwrap();
    PostgresTarget::new(opener, "the test's database".to_owned(), schema, connections)
}

/// A clock that stands still until it is moved.
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

    pub(super) fn advance_seconds(&self, seconds: i64) {
        self.advance_micros(seconds * 1_000_000);
    }

    pub(super) fn advance_micros(&self, micros: i64) {
        self.0.fetch_add(micros, Ordering::SeqCst);
    }
}

/// The location of a store.
pub(super) enum Location {
    File { path: PathBuf, _directory: TempDir },
    Schema { url: String, name: String, directory: TempDir },
}

impl Location {
    /// A new SQLite file.
    pub(super) fn file() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self::File { path: directory.path().join(DATABASE_FILE), _directory: directory }
    }

    /// A new Postgres schema.
    pub(super) async fn schema() -> Self {
        static DATABASE: OnceCell<Database> = OnceCell::const_new();
        let database = DATABASE
            .get_or_init(async || threadkeep_testing::postgres().unwrap().database().await.unwrap())
            .await;
        let (url, name) = (database.url().to_owned(), format!("s{}", Uuid::new_v4().simple()));
        let place = Self::Schema { url, name, directory: tempfile::tempdir().unwrap() };
        place.execute("CREATE SCHEMA {s}").await;
        place
    }

    /// Opens it as another process would.
    pub(super) async fn open(&self, options: RecordsOptions) -> Records {
        let records = self.try_open(options).await.unwrap();
        records.db.stop_flushing();
        records
    }

    pub(super) async fn try_open(&self, options: RecordsOptions) -> Result<Records, RecordsError> {
        let options = RecordsOptions { event_directory: self.event_directory(), ..options };
        match self {
            Self::File { path, .. } => Records::open(path, options).await,
            Self::Schema { .. } => Records::open_postgres(&self.target(), options).await,
        }
    }

    /// The directory of feeds that are files.
    pub(super) fn event_directory(&self) -> PathBuf {
        match self {
            Self::File { path, .. } => path.with_file_name("run_events"),
            Self::Schema { directory, .. } => directory.path().to_owned(),
        }
    }

    fn target(&self) -> PostgresTarget {
        let Self::Schema { url, name, .. } = self else { panic!("not in Postgres") };
        postgres_target(url, name, 5)
    }

    /// Its name in errors.
    pub(super) fn describe(&self) -> String {
        self.target().place().to_owned()
    }

    pub(super) fn path(&self) -> &Path {
        let Self::File { path, .. } = self else { panic!("not a file") };
        path
    }

    /// Runs SQL on Postgres; `{s}` is the schema.
    pub(super) async fn execute(&self, sql: &str) {
        let Self::Schema { name, .. } = self else { panic!("not in Postgres") };
        let sql = sql.replace("{s}", &format!("\"{}\"", name.replace('"', "\"\"")));
        self.target().open().await.unwrap().batch_execute(&sql).await.unwrap();
    }
}

/// Records in their own location, with a clock that stands still.
pub(super) struct Fixture {
    pub(super) records: Records,
    pub(super) clock: TestClock,
    pub(super) place: Location,
}

impl Fixture {
    pub(super) async fn in_place(place: Location, event_backend: EventBackend) -> Self {
        let clock = TestClock::new();
        let records = place.open(options(&clock, event_backend)).await;
        Self { records, clock, place }
    }

    /// Opens the same location as a process that owns its rows under this name, for 30 seconds at a time.
    pub(super) async fn owner(&self, name: &str) -> Records {
        let lease = Lease::new(name, Duration::from_secs(30), Duration::from_secs(10));
        self.place
            .open(RecordsOptions { lease: Some(lease), ..options(&self.clock, EventBackend::Database) })
            .await
    }

    /// Opens the same location as a program beside gateways.
    pub(super) async fn client(&self, name: &str) -> Records {
        let lease = Lease::new(name, Duration::from_secs(30), Duration::from_secs(10));
        let lease = Lease { renews_reservations: true, ..lease };
        self.place
            .open(RecordsOptions { lease: Some(lease), ..options(&self.clock, EventBackend::Database) })
            .await
    }

    /// Lets time pass for leases. The server's clock in Postgres cannot be moved, so there the leases are.
    pub(super) async fn pass_seconds(&self, seconds: i64) {
        self.clock.advance_seconds(seconds);
        if self.records.db.dialect() == Dialect::Sqlite {
            return;
        }
        let text = format!(
            "UPDATE subagent_batch_items SET lease_expires_at = to_char((lease_expires_at::timestamptz - interval \
             '{seconds} seconds') AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US') || '+00:00' \
             WHERE lease_expires_at IS NOT NULL"
        );
        let sql = self.records.db.builder(&text).build();
        self.records.db.write_everywhere(move |tx| Box::pin(tx.execute(sql))).await.unwrap();
    }

    /// Opens the same location as another process would.
    pub(super) async fn reopen(&self, event_backend: EventBackend) -> Records {
        self.place.open(options(&self.clock, event_backend)).await
    }
}

/// Of a process that has watched all leases for long enough.
pub(super) fn watched() -> SeenLeases {
    SeenLeases::new(Duration::ZERO)
}

pub(super) fn options(clock: &TestClock, event_backend: EventBackend) -> RecordsOptions {
    RecordsOptions { clock: clock.clock(), event_backend, ..RecordsOptions::default() }
}

pub(super) fn object(value: Value) -> JsonObject {
    match value {
        Value::Object(object) => object,
        other => panic!("not an object: {other}"),
    }
}

pub(super) async fn create_thread(records: &Records, thread_id: &str) {
    let new = NewThread { thread_id: thread_id.to_owned(), ..NewThread::default() };
    assert!(records.threads().create(new).await.unwrap().created);
}

pub(super) fn new_run(thread_id: &str, run_id: &str) -> NewRun {
    NewRun {
        run_id: run_id.to_owned(),
        thread_id: thread_id.to_owned(),
        kwargs: json!({"input": null}),
        acknowledged: true,
        ..NewRun::default()
    }
}

/// Admits a run that gets its thread.
pub(super) async fn admit(records: &Records, thread_id: &str, run_id: &str) -> RunRow {
    match records.runs().admit(new_run(thread_id, run_id), MultitaskStrategy::Reject).await.unwrap() {
        Admission::Admitted(row) => row,
        other => panic!("not admitted: {other:?}"),
    }
}

/// Admits a run that gets its thread, and starts it.
pub(super) async fn start(records: &Records, thread_id: &str, run_id: &str) {
    admit(records, thread_id, run_id).await;
    assert!(matches!(records.runs().start(run_id).await.unwrap(), StartOutcome::Started { .. }));
}

/// Admits a run that waits.
pub(super) async fn wait(
    records: &Records,
    thread_id: &str,
    run_id: &str,
    strategy: MultitaskStrategy,
) -> Admission {
    let admission = records.runs().admit(new_run(thread_id, run_id), strategy).await.unwrap();
    assert!(matches!(admission, Admission::Waiting { .. }), "{admission:?}");
    admission
}

pub(super) fn end(status: RunStatus) -> RunEnd {
    RunEnd { status, error: None, ..RunEnd::failed("") }
}

/// The end of a run that is rolled back, if that was requested.
pub(super) fn settled(status: RunStatus) -> RunEnd {
    RunEnd { rollback_settled: true, ..end(status) }
}

pub(super) async fn run(records: &Records, run_id: &str) -> RunRow {
    records.runs().get(run_id).await.unwrap().unwrap()
}

pub(super) async fn thread(records: &Records, thread_id: &str) -> ThreadRow {
    records.threads().get(thread_id, None).await.unwrap().unwrap()
}

pub(super) async fn holder(records: &Records, thread_id: &str) -> Option<String> {
    records.runs().active_for_thread(thread_id).await.unwrap().map(|row| row.run_id)
}

/// Waits until nothing holds the thread any more, for releases in the background.
pub(super) async fn until_free(records: &Records, thread_id: &str) {
    soon(async {
        while holder(records, thread_id).await.is_some() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// Turns an endless wait into a failure.
pub(super) async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_mins(10), future).await.expect("never happened")
}

/// A write transaction on the thread `t` in Postgres that somebody holds open.
pub(super) struct OpenTransaction(tokio::task::JoinHandle<Result<(), RecordsError>>);

impl OpenTransaction {
    /// Begins it and runs a statement.
    pub(super) async fn begin(records: &Records, sql: &'static str) -> Self {
        let (begun, stands) = tokio::sync::oneshot::channel();
        let db = records.db.clone();
        let held = tokio::spawn(async move {
            let holding = db.write("t", move |tx| {
                Box::pin(async move {
                    tx.execute(query::query(sql)).await?;
                    begun.send(()).unwrap();
                    std::future::pending().await
                })
            });
            holding.await
        });
        stands.await.unwrap();
        Self(held)
    }

    /// Drops its future.
    pub(super) async fn give_up(self) {
        self.0.abort();
        assert!(self.0.await.unwrap_err().is_cancelled());
    }
}

/// Runs any SQL in a write transaction.
pub(super) async fn sql(records: &Records, sql: &'static str) {
    records.db.write_everywhere(move |tx| Box::pin(tx.execute(query::query(sql)))).await.unwrap();
}

/// All rows of all tables as text, after all running transactions.
pub(super) async fn dump(records: &Records) -> Vec<String> {
    let mut tables = Vec::new();
    for (columns, table) in [
        (
            "'thread', thread_id, assistant_id, user_id, display_name, status, metadata_json, pinned, created_at, \
             updated_at",
            "threads_meta",
        ),
        (
            "'run', admission_seq, run_id, thread_id, assistant_id, user_id, status, operation_kind, waiting, \
             idempotency_key, model_name, multitask_strategy, metadata_json, kwargs_json, error, stop_reason, \
             message_count, first_human_message, last_ai_message, total_input_tokens, total_output_tokens, \
             total_tokens, llm_call_count, lead_agent_tokens, subagent_tokens, middleware_tokens, \
             token_usage_by_model, follow_up_to_run_id, owner_worker_id, lease_expires_at, cancel_action, \
             cancel_requested_at, decided_status, left_checkpoint, followed, edits, created_at, updated_at",
            "runs",
        ),
        (
            "'event', id, thread_id, run_id, user_id, event_type, category, content, event_metadata, seq, created_at",
            "run_events",
        ),
        ("'frames', run_id, thread_id, first_seq, next_seq, frames, ends, created_at", "run_frames"),
        ("'subagent', name, definition", "subagents"),
        ("'batch', id, thread_id, status, total_items", "subagent_batches"),
        ("'item', id, batch_id, status, attempt", "subagent_batch_items"),
    ] {
        let row = match records.db.dialect() {
            Dialect::Sqlite => format!("json_array({columns})"),
            Dialect::Postgres => format!("json_build_array({columns})::text"),
        };
        tables.push(records.db.builder(&format!("SELECT {row} FROM {table} ORDER BY 1")).build());
    }
    let dumped = records.db.write_everywhere(move |tx| {
        Box::pin(async move {
            let mut rows = Vec::new();
            for table in tables {
                rows.extend(tx.fetch_all::<(String,)>(table).await?);
            }
            Ok(rows)
        })
    });
    dumped.await.unwrap().into_iter().map(|(row,)| row).collect()
}

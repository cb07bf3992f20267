use std::sync::Arc;

use threadkeep_testing::postgres as server;

use super::*;
use crate::postgres::Scope;
use crate::sqlite::{open_memory, open_writer};
use crate::tests::support::postgres_target;

fn schema(connection: &Connection) -> Vec<(String,)> {
    let sql = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name";
    fetch_all(connection, &query(sql)).unwrap()
}

fn versions(connection: &Connection) -> Vec<(i64,)> {
    fetch_all(connection, &query("SELECT version FROM _sqlx_migrations ORDER BY version")).unwrap()
}

fn numbers() -> Vec<(i64,)> {
    (1..).take(STEPS.len()).map(|version| (version,)).collect()
}

fn broken() -> [Step; 2] {
    let (first, broken) = (&STEPS[0], "CREATE TABLE x (a int); CREATE TABLE x (b int)");
    [
        Step { name: first.name, sqlite: first.sqlite, postgres: first.postgres },
        Step { name: "broken", sqlite: broken, postgres: broken },
    ]
}

#[test]
fn every_older_schema_becomes_the_newest() {
    let mut fresh = open_memory().unwrap();
    migrate_sqlite(&mut fresh, "fresh").unwrap();
    for older in 0..STEPS.len() {
        let mut old = open_memory().unwrap();
        apply_sqlite(&STEPS[..older], &mut old, "old").unwrap();
        assert_eq!(versions(&old).len(), older);
        migrate_sqlite(&mut old, "old").unwrap();
        assert_eq!(schema(&old), schema(&fresh));
        assert_eq!(versions(&old), versions(&fresh));
    }
}

/// A batch with an item of two attempts, and a task, as the build before sums of tokens wrote them.
const USED: &str = "INSERT INTO subagent_batches (id, thread_id, run_id, tool_call_id, submission_key, title, \
         subagent_type, status, total_items, max_live_items, max_running_items, max_attempts, execution_spec, created_at, \
         updated_at) VALUES ('b', 't', 'r', 'c', 'k', '', '', 'running', 1, 1, 1, 2, '{}', '', ''), \
         ('unused', 't', 'r', 'c', 'l', '', '', 'running', 1, 1, 1, 2, '{}', '', ''); \
         INSERT INTO subagent_batch_items (id, batch_id, item_key, position, prompt, status, attempt, result_truncated, \
         created_at, updated_at) VALUES ('i', 'b', 'k', 0, '', 'running', 2, FALSE, '', ''); \
         INSERT INTO executions (execution_id, attempt, thread_id, run_id, kind, tool_call_id, child_thread, agent_name, \
         definition_json, definition_digest, description, status, usage_json, delivered, deadline, created_at) VALUES \
         ('i', 1, 't', 'r', 'batch_item', 'c', 'x', '', '{}', '', '', 'failed', '{\"m\": {\"input_tokens\": 1, \
         \"output_tokens\": 2, \"total_tokens\": 3}, \"n\": {\"input_tokens\": 10, \"output_tokens\": 20, \
         \"total_tokens\": 30}}', TRUE, '', ''), \
         ('i', 2, 't', 'r', 'batch_item', 'c', 'y', '', '{}', '', '', 'running', '{\"m\": {\"input_tokens\": 100, \
         \"output_tokens\": 200, \"total_tokens\": 300}}', FALSE, '', ''), \
         ('e', 1, 't', 'r', 'task', 'c', 'z', '', '{}', '', '', 'running', '{\"m\": {\"input_tokens\": 7, \
         \"output_tokens\": 7, \"total_tokens\": 7}}', FALSE, '', '')";
const SUMS: &str = "SELECT id, input_tokens, output_tokens, total_tokens FROM subagent_batches ORDER BY id";

#[tokio::test]
async fn the_tokens_of_older_batches_are_added_up() {
    let expected = [("b".to_owned(), 111, 222, 333), ("unused".to_owned(), 0, 0, 0)];
    let mut old = open_memory().unwrap();
    apply_sqlite(&STEPS[..13], &mut old, "old").unwrap();
    old.execute_batch(USED).unwrap();
    migrate_sqlite(&mut old, "old").unwrap();
    let mut sums = old.prepare(SUMS).unwrap();
    let sums = sums.query_map((), |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)));
    assert_eq!(sums.unwrap().collect::<Result<Vec<(String, i64, i64, i64)>, _>>().unwrap(), expected);

    let database = server().unwrap().database().await.unwrap();
    let target = postgres_target(database.url(), "old", 2);
    let pool = postgres::Pool::connect(&target, Arc::default()).await.unwrap();
    let client = target.open().await.unwrap();
    client.batch_execute("CREATE SCHEMA old").await.unwrap();
    apply_postgres(&STEPS[..13], &pool, &target).await.unwrap();
    client.batch_execute(&target.tables().qualify(USED)).await.unwrap();
    migrate_postgres(&pool, &target).await.unwrap();
    let rows = client.query_typed(&target.tables().qualify(SUMS), &[]).await.unwrap();
    let sums: Vec<(String, i64, i64, i64)> =
        rows.iter().map(|row| (row.get(0), row.get(1), row.get(2), row.get(3))).collect();
    assert_eq!(sums, expected);
}

/// Items as the build before wrote them: one that ended with its tokens, one that was cancelled without them, one at
/// work; and a task, which a run counts.
const ENDED: &str = "INSERT INTO executions (execution_id, attempt, thread_id, run_id, kind, tool_call_id, child_thread, \
         agent_name, definition_json, definition_digest, description, status, usage_json, delivered, counted, deadline, \
         created_at) VALUES \
         ('ended', 1, 't', 'r', 'batch_item', 'c', 'w', '', '{}', '', '', 'failed', '{\"m\": {}}', TRUE, FALSE, '', ''), \
         ('cancelled', 1, 't', 'r', 'batch_item', 'c', 'x', '', '{}', '', '', 'cancelled', '{}', TRUE, FALSE, '', ''), \
         ('at work', 1, 't', 'r', 'batch_item', 'c', 'y', '', '{}', '', '', 'running', '{}', FALSE, FALSE, '', ''), \
         ('task', 1, 't', 'r', 'task', 'c', 'z', '', '{}', '', '', 'failed', '{\"m\": {}}', TRUE, FALSE, '', '')";
const COUNTED: &str = "SELECT execution_id FROM executions WHERE counted ORDER BY execution_id";

#[tokio::test]
async fn items_of_older_batches_that_ended_with_their_tokens_are_counted() {
    let mut old = open_memory().unwrap();
    apply_sqlite(&STEPS[..14], &mut old, "old").unwrap();
    old.execute_batch(ENDED).unwrap();
    migrate_sqlite(&mut old, "old").unwrap();
    let counted: Vec<(String,)> = fetch_all(&old, &query(COUNTED)).unwrap();
    assert_eq!(counted, [("ended".to_owned(),)]);

    let database = server().unwrap().database().await.unwrap();
    let target = postgres_target(database.url(), "old", 2);
    let pool = postgres::Pool::connect(&target, Arc::default()).await.unwrap();
    let client = target.open().await.unwrap();
    client.batch_execute("CREATE SCHEMA old").await.unwrap();
    apply_postgres(&STEPS[..14], &pool, &target).await.unwrap();
    client.batch_execute(&target.tables().qualify(ENDED)).await.unwrap();
    migrate_postgres(&pool, &target).await.unwrap();
    let rows = client.query_typed(&target.tables().qualify(COUNTED), &[]).await.unwrap();
    assert_eq!(rows.iter().map(|row| row.get(0)).collect::<Vec<String>>(), ["ended"]);
}

#[test]
fn failing_migration_takes_the_ones_before_it_back() {
    let mut old = open_memory().unwrap();
    apply_sqlite(&STEPS[..1], &mut old, "old").unwrap();
    let before = schema(&old);
    let error = apply_sqlite(&broken(), &mut old, "old").unwrap_err();
    assert!(error.to_string().contains("table x already exists"), "{error}");
    assert_eq!(schema(&old), before);
    assert_eq!(versions(&old), [(1,)]);
}

/// A database that the library sqlx migrated, as earlier builds did: the list of migrations is read as it is.
#[test]
fn list_of_migrations_of_earlier_builds_is_understood() {
    let mut old = open_memory().unwrap();
    migrate_sqlite(&mut old, "old").unwrap();
    let sql = query("SELECT checksum FROM _sqlx_migrations ORDER BY version");
    let checksums: Vec<(Vec<u8>,)> = fetch_all(&old, &sql).unwrap();
    let of = |step: &Step| <sha2::Sha384 as sha2::Digest>::digest(step.sqlite.as_bytes()).to_vec();
    assert_eq!(checksums, STEPS.iter().map(|step| (of(step),)).collect::<Vec<_>>());
}

#[test]
fn processes_that_start_together_migrate_once() {
    for _ in 0..10 {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gateway.db");
        // The file exists, as if another process had just opened it.
        drop(open_writer(&path).unwrap());
        let starts = (0..4).map(|_| {
            let path = path.clone();
            std::thread::spawn(move || {
                let mut connection = open_writer(&path).unwrap();
                // The first one migrates as long as its disk takes.
                connection.busy_timeout(Duration::from_mins(10)).unwrap();
                migrate_sqlite(&mut connection, "here")
            })
        });
        for start in starts.collect::<Vec<_>>() {
            start.join().unwrap().unwrap();
        }
        assert_eq!(versions(&open_writer(&path).unwrap()), numbers());
    }
}

/// The tables, columns, how these are stored, and indexes in a Postgres schema, as text.
async fn described(client: &Client, schema: &str) -> Vec<String> {
    let sql = "SELECT format('%s.%s %s %s %s', table_name, column_name, data_type, is_nullable, column_default) \
                   FROM information_schema.columns WHERE table_schema = $1 \
                   UNION ALL SELECT format('%s %s is stored as %s', relname, attname, attstorage) \
                   FROM pg_attribute JOIN pg_class ON attrelid = pg_class.oid \
                   JOIN pg_namespace ON relnamespace = pg_namespace.oid \
                   WHERE nspname = $1 AND relkind = 'r' AND attnum > 0 AND NOT attisdropped \
                   UNION ALL SELECT replace(indexdef, $1, 's') FROM pg_indexes WHERE schemaname = $1 ORDER BY 1";
    let rows = client.query_typed(sql, &[(&schema, Type::TEXT)]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[tokio::test]
async fn every_older_postgres_schema_becomes_the_newest_and_a_failure_is_taken_back() {
    let database = server().unwrap().database().await.unwrap();
    let in_schema = async |schema: &str| {
        let target = postgres_target(database.url(), schema, 2);
        (postgres::Pool::connect(&target, Arc::default()).await.unwrap(), target)
    };
    let (pool, fresh) = in_schema("fresh").await;
    let admin = fresh.open().await.unwrap();
    admin.batch_execute("CREATE SCHEMA fresh").await.unwrap();
    migrate_postgres(&pool, &fresh).await.unwrap();
    let newest = described(&admin, "fresh").await;
    assert!(newest.len() > 50, "{newest:?}");
    for older in 0..STEPS.len() {
        let name = format!("old{older}");
        let (pool, old) = in_schema(&name).await;
        admin.batch_execute(&format!("CREATE SCHEMA {name}")).await.unwrap();
        apply_postgres(&STEPS[..older], &pool, &old).await.unwrap();
        let before = described(&admin, &name).await;
        if older == 1 {
            let error = apply_postgres(&broken(), &pool, &old).await.unwrap_err();
            assert!(error.to_string().contains("\"x\" already exists"), "{error}");
            assert_eq!(described(&admin, &name).await, before);
        }
        assert_ne!(before, newest);
        migrate_postgres(&pool, &old).await.unwrap();
        assert_eq!(described(&admin, &name).await, newest);
    }
}

/// Waits until a session of this database has waited for such a lock for longer than `limit`, unless `work` ends before.
async fn until_stuck<T>(admin: &Client, work: &tokio::task::JoinHandle<T>, lock: &str, limit: Duration) {
    let sql = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = '{lock}' \
             AND clock_timestamp() - query_start > interval '{} ms'",
        limit.as_millis()
    );
    let stuck = async {
        while !work.is_finished() && admin.query_typed_one(&sql, &[]).await.unwrap().get::<_, i64>(0) == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), stuck).await.expect("nobody waits");
    assert!(!work.is_finished(), "it did not wait");
}

/// One of a table with many rows does; so does one that waits for another gateway's.
#[tokio::test]
async fn a_migration_may_take_longer_than_an_answer() {
    let database = server().unwrap().database().await.unwrap();
    let target = postgres_target(database.url(), "long", 2);
    // On a busy machine other statements take seconds, too.
    let (limit, longer) = (Duration::from_secs(6), Duration::from_secs(9));
    // In its transaction, the holder of a lock would see since when others wait as it was at its first look.
    let (admin, holder) = (target.open().await.unwrap(), target.open().await.unwrap());
    // For the sessions that begin later.
    let limits = "CREATE SCHEMA long; DO $$ BEGIN \
                      EXECUTE format('ALTER DATABASE %I SET statement_timeout = 6000', current_database()); \
                      EXECUTE format('ALTER DATABASE %I SET lock_timeout = 6000', current_database()); END $$";
    admin.batch_execute(limits).await.unwrap();
    let pool = postgres::Pool::connect_within(&target, Arc::default(), limit).await.unwrap();
    apply_postgres(&STEPS[..13], &pool, &target).await.unwrap();
    // As of an earlier gateway that is at it.
    let mut earlier = pool.begin(Scope::EveryThread).await.unwrap();
    earlier.execute(query("SET LOCAL idle_in_transaction_session_timeout = 0")).await.unwrap();
    let (of, there) = (pool.clone(), target.clone());
    let upgrade = tokio::spawn(async move { migrate_postgres(&of, &there).await });
    until_stuck(&admin, &upgrade, "advisory", longer).await;

    holder.batch_execute("BEGIN; LOCK TABLE long.threadkeep_gateway_executions").await.unwrap();
    drop(earlier);
    until_stuck(&admin, &upgrade, "relation", longer).await;
    holder.batch_execute("COMMIT").await.unwrap();
    tokio::time::timeout(Duration::from_mins(10), upgrade).await.unwrap().unwrap().unwrap();
    let sql = format!("SELECT version FROM {} ORDER BY 1", target.tables().migrations());
    let rows = admin.query_typed(&sql, &[]).await.unwrap();
    assert_eq!(rows.iter().map(|row| (row.get(0),)).collect::<Vec<(i64,)>>(), numbers());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn processes_that_start_together_on_postgres_migrate_once() {
    let database = server().unwrap().database().await.unwrap();
    let target = postgres_target(database.url(), "public", 1);
    let starts = (0..8).map(|_| {
        let target = target.clone();
        tokio::spawn(async move {
            migrate_postgres(&postgres::Pool::connect(&target, Arc::default()).await.unwrap(), &target).await
        })
    });
    let all = futures::future::try_join_all(starts);
    for result in tokio::time::timeout(Duration::from_mins(10), all).await.unwrap().unwrap() {
        result.unwrap();
    }
    let sql = format!("SELECT version FROM {} ORDER BY 1", target.tables().migrations());
    let rows = target.open().await.unwrap().query_typed(&sql, &[]).await.unwrap();
    assert_eq!(rows.iter().map(|row| (row.get(0),)).collect::<Vec<(i64,)>>(), numbers());
}

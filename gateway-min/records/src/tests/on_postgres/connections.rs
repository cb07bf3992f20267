//! Connections: none is lost, poisoned or misdirected, whatever happens to its user, its server, or what is between.

use std::task::Poll;
use std::time::{Duration, Instant};

use futures::future::{join_all, poll_immediate};
use threadkeep_testing::{Cluster, Replication, pgbouncer, postgres};
use tokio::task::spawn_blocking;
use tokio_postgres::Client;

use super::support::*;
use crate::*;

async fn count(client: &Client, sql: &str) -> i64 {
    client.query_typed_one(sql, &[]).await.unwrap().get(0)
}

fn target(url: &str, schema: &str) -> PostgresTarget {
    postgres_target(url, schema, 2)
}

async fn turn(records: &Records, thread: &str, run: &str) {
    start(records, thread, run).await;
    let event = NewEvent::new("run.start", "trace", serde_json::json!({"thread": thread}));
    records.events().append(thread, run, vec![event]).await.unwrap();
    let finished = records.runs().finish(run, &end(RunStatus::Success)).await.unwrap();
    assert_eq!(finished, FinishOutcome::Finished { promoted: None });
}

/// Requests that are dropped while they wait for a thread's lock, after any number of waits, leave neither an open
/// transaction nor a lock behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_is_dropped_while_it_waits_leaves_nothing_behind() {
    let database = postgres().unwrap().database().await.unwrap();
    let place = target(database.url(), "public");
    let options = || RecordsOptions { event_backend: EventBackend::Database, ..RecordsOptions::default() };
    let records = Records::open_postgres(&place, options()).await.unwrap();
    let other = Records::open_postgres(&place, options()).await.unwrap();
    create_thread(&records, "t").await;
    start(&records, "t", "r").await;
    let admin = place.open().await.unwrap();
    for waits in 0..12 {
        // Another process works on the thread. The server does not end that, however long this takes on a busy machine.
        let update = "UPDATE threads_meta SET status = status WHERE thread_id = 't' \
                      AND set_config('idle_in_transaction_session_timeout', '0', true) = '0'";
        let blocking = OpenTransaction::begin(&other, update).await;
        let begun = Instant::now();
        let mut leaving = Vec::new();
        for _ in 0..4 {
            leaving.push(Box::pin(records.runs().request_cancel("r", CancelAction::Interrupt)));
        }
        // Let them come as far as the lock, or a part of the way.
        for _ in 0..waits * waits {
            // They wait for the lock for ten seconds.
            if begun.elapsed() > Duration::from_secs(3) {
                break;
            }
            for future in &mut leaving {
                assert!(poll_immediate(future.as_mut()).await.is_none());
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(leaving);
        blocking.give_up().await;
        // Within the time that the server would need to end them.
        soon(records.threads().set_status("t", ThreadStatus::Running)).await.unwrap();
        soon(other.threads().set_status("t", ThreadStatus::Running)).await.unwrap();
        let stuck = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                     AND state LIKE 'idle in transaction%' AND state_change < now() - interval '3 seconds'";
        let open = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                    AND pid <> pg_backend_pid() AND xact_start IS NOT NULL AND application_name = 'threadkeep'";
        let locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid() AND database = \
                     (SELECT oid FROM pg_database WHERE datname = current_database())";
        // What a dropped request had sent may begin only after a look that saw no transaction, and is taken back then.
        soon(async {
            let mut looks = 0;
            while count(&admin, open).await > 0 || count(&admin, locks).await > 0 {
                // After a moment in which the whole machine stood still, this process takes them back, too.
                looks = if count(&admin, stuck).await == 0 { 0 } else { looks + 1 };
                assert!(looks < 50, "after {waits} waits");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
    }
    let row = run(&records, "r").await;
    assert_eq!(row.cancel_action, None, "none got the lock");
    turn_after(&records).await;
}

async fn turn_after(records: &Records) {
    records.runs().finish("r", &end(RunStatus::Success)).await.unwrap();
    turn(records, "t", "next").await;
}

/// One busy thread does not take the connections of the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_wait_for_one_thread_do_not_hold_up_the_others() {
    let database = postgres().unwrap().database().await.unwrap();
    let records =
        Records::open_postgres(&target(database.url(), "public"), RecordsOptions::default()).await.unwrap();
    create_thread(&records, "t").await;
    let held = OpenTransaction::begin(&records, "SELECT 1").await;
    let mut waiting = Box::pin(join_all(
        (0..20).map(|_| records.threads().set_status("t", ThreadStatus::Running)).collect::<Vec<_>>(),
    ));
    assert!(matches!(futures::poll!(waiting.as_mut()), Poll::Pending));
    create_thread(&records, "u").await;
    assert!(records.threads().get("t", None).await.unwrap().is_some());
    held.give_up().await;
    for done in waiting.await {
        done.unwrap();
    }
}

/// A pooler gives each transaction another session: what one client prepared there is not what another one means.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_work_behind_a_pooler_in_transaction_mode() {
    let database = postgres().unwrap().database().await.unwrap();
    let url = pgbouncer().unwrap().url(&database);
    let admin = target(database.url(), "public").open().await.unwrap();
    admin.batch_execute("CREATE SCHEMA one; CREATE SCHEMA two").await.unwrap();
    let lease = |owner: &str| Some(Lease::new(owner, Duration::from_mins(1), Duration::ZERO));
    let mut stores = Vec::new();
    for (schema, owner) in [("one", "a"), ("one", "b"), ("two", "c")] {
        let options = RecordsOptions {
            event_backend: EventBackend::Database,
            lease: lease(owner),
            ..RecordsOptions::default()
        };
        // The first of a schema migrates it.
        stores.push(Records::open_postgres(&target(&url, schema), options).await.unwrap());
    }
    let all = stores.iter().enumerate().flat_map(|(n, records)| {
        (0..8).map(move |k| async move {
            let thread = format!("{n}-{k}");
            create_thread(records, &thread).await;
            for j in 0..5 {
                turn(records, &thread, &format!("{thread}-{j}")).await;
            }
        })
    });
    join_all(all).await;
    for (records, threads) in [(&stores[0], 16), (&stores[2], 8)] {
        let found = records.threads().search(&ThreadQuery { limit: 100, ..ThreadQuery::default() }).await;
        assert_eq!(found.unwrap().len(), threads);
    }
    // The records of all, through other records.
    let all =
        "SELECT count(*) FROM one.threadkeep_gateway_run_events WHERE content::json ->> 'thread' = thread_id";
    assert_eq!(count(&admin, all).await, 80);
}

/// Each connection knows it by itself, whatever others do at the pooler meanwhile.
#[tokio::test]
async fn a_connection_knows_whether_it_has_a_session_to_itself() {
    let database = postgres().unwrap().database().await.unwrap();
    for (url, own) in [(database.url().to_owned(), true), (pgbouncer().unwrap().url(&database), false)] {
        assert_eq!(target(&url, "public").open().await.unwrap().is_own(), own, "{url}");
    }
}

/// What a connection had prepared is gone: its statement is asked on another one.
#[tokio::test]
async fn a_statement_that_is_not_prepared_any_more_is_asked_on_another_connection() {
    let database = postgres().unwrap().database().await.unwrap();
    let records =
        Records::open_postgres(&target(database.url(), "public"), RecordsOptions::default()).await.unwrap();
    create_thread(&records, "t").await;
    assert!(records.threads().get("t", None).await.unwrap().is_some());
    for _ in 0..3 {
        let forget =
            records.db.write("t", |tx| Box::pin(async move { tx.queue(query::query("DEALLOCATE ALL")) }));
        // It goes with the commit, on the connection that is used next.
        forget.await.unwrap();
        assert!(records.threads().get("t", None).await.unwrap().is_some());
        records.threads().set_status("t", ThreadStatus::Running).await.unwrap();
    }
}

/// A transaction that is dropped, or a future in the middle of a statement, gives its session back.
#[tokio::test]
async fn sessions_do_not_pile_up() {
    let database = postgres().unwrap().database().await.unwrap();
    let place = target(database.url(), "public");
    let records = Records::open_postgres(&place, RecordsOptions::default()).await.unwrap();
    create_thread(&records, "t").await;
    for _ in 0..50 {
        OpenTransaction::begin(&records, "SELECT 1").await.give_up().await;
        let _dropped = poll_immediate(Box::pin(records.threads().get("t", None))).await;
        let _dropped = poll_immediate(Box::pin(records.threads().set_status("t", ThreadStatus::Idle))).await;
    }
    soon(records.threads().set_status("t", ThreadStatus::Error)).await.unwrap();
    let admin = place.open().await.unwrap();
    let sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                    AND pid <> pg_backend_pid() AND application_name = 'threadkeep'";
    // Two of the pool, and the one that listens.
    soon(async { while count(&admin, sessions).await > 3 {} }).await;
    records.close().await;
    soon(async { while count(&admin, sessions).await > 0 {} }).await;
}

/// With several hosts the primary is found, and found again after a failover.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_go_on_after_a_failover() {
    let cluster = spawn_blocking(|| Cluster::start(Replication::Synchronous).unwrap()).await.unwrap();
    let place = target(&cluster.url("postgres"), "public");
    let records = Records::open_postgres(&place, RecordsOptions::default()).await.unwrap();
    create_thread(&records, "t").await;
    let cluster = spawn_blocking(move || {
        cluster.crash_primary().unwrap();
        cluster.promote().unwrap();
        cluster.rebuild().unwrap();
        cluster
    })
    .await
    .unwrap();
    assert!(records.threads().get("t", None).await.unwrap().is_some());
    turn(&records, "t", "r").await;
    drop(cluster);
}

#[tokio::test]
async fn tls_is_used_where_the_server_has_it() {
    let database = postgres().unwrap().database().await.unwrap();
    for (more, expected) in [("", 1), ("?sslmode=prefer", 1), ("?sslmode=disable", 0)] {
        let connection = target(&format!("{}{more}", database.url()), "public").open().await.unwrap();
        let mine = "SELECT count(*) FROM pg_stat_ssl WHERE pid = pg_backend_pid() AND ssl";
        assert_eq!(count(&connection, mine).await, expected, "{more}");
    }
}

#[tokio::test]
async fn every_legal_name_of_a_schema_works() {
    let database = postgres().unwrap().database().await.unwrap();
    let admin = target(database.url(), "public").open().await.unwrap();
    for schema in [
        "{s}",
        "runs threads_meta.migrations",
        "$1 $2 $$",
        "a\"b\"\"c",
        "a'b''c\\'",
        "two\nlines\r\n; --",
        "/* \" */ %s",
        &"\u{fc}".repeat(31),
    ] {
        let create = format!("CREATE SCHEMA \"{}\"", schema.replace('"', "\"\""));
        admin.batch_execute(&create).await.unwrap();
        let place = target(database.url(), schema);
        let open = async || {
            let opened = Records::open_existing_postgres(&place, RecordsOptions::default()).await;
            opened.unwrap_or_else(|error| panic!("{schema:?}: {error}"))
        };
        assert!(open().await.is_none(), "{schema:?}");
        let records = Records::open_postgres(&place, RecordsOptions::default()).await;
        let records = records.unwrap_or_else(|error| panic!("{schema:?}: {error}"));
        create_thread(&records, "t").await;
        turn(&records, "t", "r").await;
        records.close().await;
        let again = open().await.unwrap();
        assert_eq!(run(&again, "r").await.status, RunStatus::Success);
    }
}

/// What a process does with a run wakes the others, without a poll.
#[tokio::test]
async fn processes_tell_each_other_of_what_concerns_them() {
    let database = postgres().unwrap().database().await.unwrap();
    let place = target(database.url(), "public");
    let records = Records::open_postgres(&place, RecordsOptions::default()).await.unwrap();
    let other = Records::open_postgres(&place, RecordsOptions::default()).await.unwrap();
    let mut heard = other.changes();
    // It listens.
    soon(async { while heard.next().await.is_some() {} }).await;
    create_thread(&records, "t").await;
    start(&records, "t", "r").await;
    records.runs().follow("r").await.unwrap();
    soon(heard.of("r")).await;
    let batch = FrameBatch { first_seq: 0, next_seq: 1, frames: vec![serde_json::json!(0)], ends: true };
    records.runs().append_frames("t", "r", &batch, 0).await.unwrap();
    soon(heard.of("r")).await;
    assert_eq!(other.runs().frames("r", 0, 10).await.unwrap(), [batch]);
    records.runs().request_cancel("r", CancelAction::Interrupt).await.unwrap();
    soon(heard.of("r")).await;
}

/// So it knows when only polling finds what they did: behind a pooler, and until it listens again.
#[tokio::test]
async fn a_process_knows_whether_it_hears_the_others() {
    let database = postgres().unwrap().database().await.unwrap();
    let missed = async |changes: &Changes, expected: bool| {
        while changes.are_missed() != expected {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let direct = target(database.url(), "public");
    let records = Records::open_postgres(&direct, RecordsOptions::default()).await.unwrap();
    let mut changes = records.changes();
    soon(async { while changes.next().await.is_some() {} }).await;
    assert!(!changes.are_missed(), "it listens");
    let admin = direct.open().await.unwrap();
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
               WHERE datname = current_database() AND query LIKE 'LISTEN %'";
    assert_eq!(admin.query(end, &[]).await.unwrap().len(), 1);
    soon(missed(&changes, true)).await;
    soon(missed(&changes, false)).await;

    let pooled = target(&pgbouncer().unwrap().url(&database), "public");
    let records = Records::open_postgres(&pooled, RecordsOptions::default()).await.unwrap();
    soon(missed(&records.changes(), true)).await;
}

/// Queued statements go with the commit. One that the server refuses takes all back, and the error says so; no session is
/// left over.
#[tokio::test]
async fn a_queued_statement_that_is_refused_takes_the_others_back() {
    let database = postgres().unwrap().database().await.unwrap();
    let records =
        Records::open_postgres(&target(database.url(), "public"), RecordsOptions::default()).await.unwrap();
    create_thread(&records, "t").await;
    let admin = target(database.url(), "public").open().await.unwrap();
    // A worker that vacuums the tables may be in the database, too.
    let sessions = "SELECT count(*) FROM pg_stat_activity \
                    WHERE datname = current_database() AND backend_type = 'client backend'";
    for last in ["INSERT INTO threads_meta SELECT * FROM threads_meta", "no SQL"].repeat(5) {
        let refused = records.db.write("t", move |tx| {
            Box::pin(async move {
                tx.queue(query::query("UPDATE threads_meta SET status = 'error'"))?;
                tx.queue(query::query(last))?;
                tx.queue(query::query("UPDATE threads_meta SET status = 'running'"))
            })
        });
        let error = refused.await.unwrap_err();
        assert!(matches!(error, RecordsError::Unavailable { .. }), "{error}");
        assert_eq!(thread(&records, "t").await.status, ThreadStatus::Idle);
        assert!(count(&admin, sessions).await <= 3, "two of the pool, and this one");
    }
}

/// A statement that cannot be sent: what was sent before it is not committed without it.
#[tokio::test]
async fn a_queued_statement_that_cannot_be_sent_keeps_the_commit_from_being_sent() {
    let database = postgres().unwrap().database().await.unwrap();
    // Behind a pooler it is not prepared before.
    let urls = [database.url().to_owned(), pgbouncer().unwrap().url(&database)];
    // More parameters than the protocol can count.
    let too_many = || (0..70_000).fold(query::query("SELECT 1"), |sql, n: i64| sql.bind(n));
    for (url, commits_at_once) in urls.iter().flat_map(|url| [(url, false), (url, true)]) {
        let records =
            Records::open_postgres(&target(url, "public"), RecordsOptions::default()).await.unwrap();
        records
            .threads()
            .create(NewThread { thread_id: "t".to_owned(), ..NewThread::default() })
            .await
            .unwrap();
        let unsent = records.db.write("t", move |tx| {
            Box::pin(async move {
                tx.queue(query::query("UPDATE threads_meta SET status = 'error'"))?;
                if commits_at_once {
                    return tx.fetch_and_commit::<(i64,)>(too_many()).await.map(drop);
                }
                tx.queue(too_many())?;
                tx.queue(query::query("UPDATE threads_meta SET status = 'running'"))
            })
        });
        let error = unsent.await.unwrap_err();
        assert!(matches!(error, RecordsError::Unavailable { .. }), "{error}");
        assert_eq!(soon(thread(&records, "t")).await.status, ThreadStatus::Idle);
    }
}

/// How often the records of a run wait for the server: once for its admission, its start, its last events with its
/// decided end, and its end.
#[tokio::test]
async fn a_run_costs_four_round_trips() {
    let database = postgres().unwrap().database().await.unwrap();
    let options = RecordsOptions { event_backend: EventBackend::Database, ..RecordsOptions::default() };
    let records = Records::open_postgres(&target(database.url(), "public"), options).await.unwrap();
    create_thread(&records, "t").await;
    for run_id in ["r1", "r2", "r3"] {
        let before = records.commits().round_trips();
        admit(&records, "t", run_id).await;
        assert!(matches!(records.runs().start(run_id).await.unwrap(), StartOutcome::Started { .. }));
        let event = |kind: &str| NewEvent::new(kind, "trace", serde_json::json!({}));
        let events = (0..20).map(|_| event("llm.ai.response")).collect();
        let end = end(RunStatus::Success);
        let decided = records.conclude_and_decide(("t", run_id), (0, events), event("run.delivery"), &end);
        assert_eq!(decided.await.unwrap(), DecideOutcome::Decided);
        let finished = records.runs().finish(run_id, &end).await.unwrap();
        assert_eq!(finished, FinishOutcome::Finished { promoted: None });
        // The first one prepares its statements.
        let trips = records.commits().round_trips() - before;
        assert!(trips == 4 || run_id == "r1", "{trips}");
    }
    assert_eq!(records.events().list(&EventQuery::new("t", "r3")).await.unwrap().last().unwrap().seq, 63);
}

/// Another process changes a table, as a migration does: what was prepared before is prepared again.
#[tokio::test]
async fn a_table_that_another_process_changed_is_read_as_it_is_now() {
    let database = postgres().unwrap().database().await.unwrap();
    let place = target(database.url(), "public");
    let records = Records::open_postgres(&place, RecordsOptions::default()).await.unwrap();
    create_thread(&records, "t").await;
    let admin = place.open().await.unwrap();
    for (n, run_id) in ["r1", "r2", "r3"].into_iter().enumerate() {
        assert!(records.threads().get("t", None).await.unwrap().is_some());
        turn(&records, "t", run_id).await;
        for table in ["threads_meta", "runs", "run_events"] {
            let sql = format!("ALTER TABLE threadkeep_gateway_{table} ADD COLUMN added_{n} TEXT");
            admin.batch_execute(&sql).await.unwrap();
        }
    }
    assert_eq!(run(&records, "r3").await.status, RunStatus::Success);
}

/// A statement that is not the first of its transaction fails then, and nothing is changed. Its session would fail it
/// again and again, and is the one that is used next.
#[tokio::test]
async fn a_session_in_which_a_statement_no_longer_fits_is_not_used_again() {
    let database = postgres().unwrap().database().await.unwrap();
    let place = target(database.url(), "public");
    let records = Records::open_postgres(&place, RecordsOptions::default()).await.unwrap();
    create_thread(&records, "t").await;
    let admin = place.open().await.unwrap();
    let touch = || {
        records.db.write("t", |tx| {
            Box::pin(async move {
                tx.execute(query::query("UPDATE threads_meta SET status = 'idle'")).await?;
                tx.fetch_all::<ThreadRow>(query::query("SELECT * FROM threads_meta LIMIT 9")).await
            })
        })
    };
    for n in 0..3 {
        assert_eq!(persistently(touch).await.unwrap().len(), 1, "{n}");
        let sql = format!("ALTER TABLE threadkeep_gateway_threads_meta ADD COLUMN added_{n} TEXT");
        admin.batch_execute(&sql).await.unwrap();
    }
    assert_eq!(persistently(touch).await.unwrap().len(), 1);
}

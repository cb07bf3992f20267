//! Connections and transactions with a real server.

use std::sync::Arc;
use std::time::Duration;

use threadkeep_testing::postgres;
use tokio_postgres::NoTls;

use super::{BEGIN, Connections, Lease, Transaction};
use crate::Options;
use crate::config::Target;
use crate::error::Trouble;
use crate::sql::Statement;
use crate::watch::Probed;

/// A mixed-up answer can come before the next statement of a transaction is sent. What was sent so far must not be
/// committed without it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_committed_if_the_last_statements_fail_before_all_are_sent() {
    let database = postgres().unwrap().database().await.unwrap();
    let (other, connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    other.batch_execute("CREATE TABLE half (n int)").await.unwrap();
    let options = Options::patient();
    let target = Target::parse(database.url(), options.patience).unwrap();
    let connections = Connections::new(target, &options).unwrap();

    for (early, rows) in [(true, 0), (false, 1)] {
        let transaction = Transaction::on(connections.lease().await.unwrap());
        transaction.begin(transaction.execute("INSERT INTO half VALUES (1)")).await.unwrap();
        let stray = || Trouble::Again { reason: "mixed up".to_owned(), in_doubt: true, renew: true };
        let done = transaction.commit(async {
            if early {
                return Err(stray());
            }
            transaction.execute("SELECT 1").await
        });
        assert_eq!(done.await.is_err(), early);
        drop(transaction);
        // Waits until the transaction has ended.
        other.batch_execute("BEGIN; LOCK half IN ACCESS EXCLUSIVE MODE; COMMIT").await.unwrap();
        let count = other.query_one("SELECT count(*) FROM half", &[]).await.unwrap();
        assert_eq!(count.get::<_, i64>(0), rows, "the answers failed early: {early}");
    }
}

/// A process that stands still in a transaction holds its locks, until the server ends the session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_stands_still_in_a_transaction_does_not_hold_its_locks_for_ever() {
    let database = postgres().unwrap().database().await.unwrap();
    let (other, connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    other.batch_execute("CREATE TABLE locked (n int)").await.unwrap();
    let options = Options::patient();
    let target = Target::parse(database.url(), options.patience).unwrap();
    let connections = Connections::new(target, &options).unwrap();

    let transaction = Transaction::on(connections.lease().await.unwrap());
    let lock = transaction.execute("LOCK locked IN ACCESS EXCLUSIVE MODE");
    transaction.begin(lock).await.unwrap();
    let limit = transaction.query("SELECT current_setting('idle_in_transaction_session_timeout')", &[]);
    assert_eq!(limit.await.unwrap()[0].get::<_, String>(0), "30s");
    transaction.execute("SET LOCAL idle_in_transaction_session_timeout = '100ms'").await.unwrap();
    other.batch_execute("INSERT INTO locked VALUES (1)").await.unwrap();
    // What it does next is done on another connection.
    assert!(matches!(transaction.query("SELECT 1", &[]).await, Err(Trouble::Again { .. })));
    drop(transaction);
    let mut lease = connections.lease().await.unwrap();
    let asked = Statement::planned("SELECT n FROM locked".to_owned());
    assert_eq!(lease.query(&asked, &[]).await.unwrap().len(), 1);
    let asked =
        Statement::planned("SELECT current_setting('idle_in_transaction_session_timeout')".to_owned());
    let limit = lease.query(&asked, &[]);
    assert_eq!(limit.await.unwrap()[0].get::<_, String>(0), "0", "the limit ends with the transaction");
}

/// A process that stands still takes no answer either. Then the server is not idle: it waits for the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_does_not_take_a_long_answer_does_not_hold_its_locks_for_ever() {
    let database = postgres().unwrap().database().await.unwrap();
    let (other, connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    other.batch_execute("CREATE TABLE locked (n int)").await.unwrap();
    // Holds the answer back until nobody reads it.
    other.batch_execute("SELECT pg_advisory_lock(1)").await.unwrap();
    let (client, mut connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    tokio::spawn(async move {
        tokio::select! {
            _ = &mut connection => {}
            _ = stopped => {}
        }
        // Open, and not read any more.
        std::future::pending::<()>().await;
        drop(connection);
    });
    // Only this limit: a test that is late between two statements is idle.
    client
        .batch_execute(&BEGIN.replace("tcp_user_timeout = '30s'", "tcp_user_timeout = '1s'"))
        .await
        .unwrap();
    client.batch_execute("LOCK locked IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let long = "SELECT pg_advisory_xact_lock(1), repeat('x', 100000000)";
    let asked = tokio::spawn(async move { client.simple_query(long).await });
    let waits =
        "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'advisory' AND datname = current_database()";
    while other.query(waits, &[]).await.unwrap().is_empty() {
        assert!(!asked.is_finished(), "it was answered too early");
        tokio::task::yield_now().await;
    }
    stop.send(()).unwrap();
    other.batch_execute("SELECT pg_advisory_unlock(1)").await.unwrap();
    let inserted = other.batch_execute("INSERT INTO locked VALUES (1)");
    tokio::time::timeout(Duration::from_mins(10), inserted).await.expect("its locks are held").unwrap();
    asked.abort();
}

/// The answers to both parts may come between the looks at the first and at the second.
#[tokio::test]
async fn the_part_sent_first_says_why_a_transaction_failed() {
    let refused = |reason: &str| Trouble::Again { reason: reason.to_owned(), in_doubt: false, renew: false };
    let first = async {
        tokio::task::yield_now().await;
        Err::<(), _>(refused("the cause"))
    };
    let then = async { Err::<(), _>(refused("current transaction is aborted")) };
    match super::in_order(first, then).await {
        Err(Trouble::Again { reason, .. }) => assert_eq!(reason, "the cause"),
        other => panic!("{other:?}"),
    }
}

/// The session of a connection.
async fn process(lease: &mut Lease) -> i32 {
    let asked = Statement::planned("SELECT pg_backend_pid()".to_owned());
    lease.query(&asked, &[]).await.unwrap()[0].get(0)
}

#[tokio::test]
async fn the_connection_that_was_used_last_is_used_next() {
    let database = postgres().unwrap().database().await.unwrap();
    let options = Options::patient();
    let target = Target::parse(database.url(), options.patience).unwrap();
    let connections = Connections::new(target, &options).unwrap();
    let (mut one, mut two) = (connections.lease().await.unwrap(), connections.lease().await.unwrap());
    let (first, second) = (process(&mut one).await, process(&mut two).await);
    assert_ne!(first, second);
    drop(two);
    drop(one);
    for _ in 0..3 {
        assert_eq!(process(&mut connections.lease().await.unwrap()).await, first);
    }
    // While it is in use, the other one is.
    let _used = connections.lease().await.unwrap();
    assert_eq!(process(&mut connections.lease().await.unwrap()).await, second);
}

#[tokio::test]
async fn a_connection_that_nobody_uses_is_closed() {
    let database = postgres().unwrap().database().await.unwrap();
    let (other, connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    let options = Options::patient();
    let target = || Target::parse(database.url(), options.patience).unwrap();
    let open = async || {
        let count = "SELECT count(*) FROM pg_stat_activity
                     WHERE datname = current_database() AND pid <> pg_backend_pid()";
        other.query_one(count, &[]).await.unwrap().get::<_, i64>(0)
    };
    // By the call that would take it next.
    let connections = Connections::idle_for(target(), &options, Duration::ZERO).unwrap();
    let first = process(&mut connections.lease().await.unwrap()).await;
    assert_ne!(process(&mut connections.lease().await.unwrap()).await, first);
    drop(connections);
    // And if nobody does.
    let connections = Arc::new(Connections::idle_for(target(), &options, Duration::from_millis(30)).unwrap());
    connections.close_idle();
    let (one, two) = (connections.lease().await.unwrap(), connections.lease().await.unwrap());
    drop((one, two));
    let closed = async { while open().await > 0 {} };
    tokio::time::timeout(Duration::from_mins(10), closed).await.unwrap();
}

/// Sessions may differ in how they write a time: a setting was changed, or a pooler's other client did it.
#[tokio::test]
async fn a_server_is_not_taken_for_another_one_because_its_sessions_write_times_in_another_way() {
    let database = postgres().unwrap().database().await.unwrap();
    let (other, connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    let options = Options::patient();
    let target = Target::parse(database.url(), options.patience).unwrap();
    let connections = Connections::new(target, &options).unwrap();
    connections.meet(&mut connections.lease().await.unwrap()).await;
    let began = connections.server();
    assert_eq!(connections.probe(began, options.patience).await, Probed::Same);
    for setting in ["TimeZone = 'Asia/Tokyo'", "TimeZone = 'America/Lima'", "DateStyle = 'German'"] {
        let set = format!("ALTER DATABASE {} SET {setting}", database.name());
        other.batch_execute(&set).await.unwrap();
        assert_eq!(connections.probe(began, options.patience).await, Probed::Same, "{setting}");
    }
}

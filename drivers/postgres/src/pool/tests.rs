//! Transactions with a real server.

use threadkeep_testing::postgres;
use tokio_postgres::NoTls;

use super::{Connections, Transaction};
use crate::Options;
use crate::config::Target;
use crate::error::Trouble;

/// A mixed-up answer can come before the next statement of a transaction is sent. What was sent so far must not be
/// committed without it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_committed_if_the_last_statements_fail_before_all_are_sent() {
    let database = postgres().unwrap().database().await.unwrap();
    let (other, connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    other.batch_execute("CREATE TABLE half (n int)").await.unwrap();
    let options = Options::default();
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

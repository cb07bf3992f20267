//! How long `setup` waits, and when a program needs it.

use std::pin::pin;
use std::time::Duration;

use threadkeep::saver::Saver;
use threadkeep::{Error, Result};
use threadkeep_postgres::schema::is_wanted;
use threadkeep_postgres::{Options, PostgresSaver, setup};
use threadkeep_testing::postgres;
use tokio::net::TcpListener;

use crate::common::damage::connect;
use crate::common::talk::{Talk, note};
use crate::common::{database, patient};

fn hasty() -> Options {
    Options { patience: Duration::from_millis(500), ..Options::default() }
}

/// The error of `call`, which has an end.
async fn error<T>(call: impl Future<Output = Result<T>>) -> Error {
    let done = tokio::time::timeout(Duration::from_mins(10), call).await.expect("it never ends");
    done.err().expect("it succeeds")
}

#[tokio::test(flavor = "multi_thread")]
async fn setup_waits_no_longer_than_its_patience_and_is_wanted_only_for_missing_tables() {
    // It accepts connections, and says nothing.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = format!("postgres://u@{}/d?sslmode=disable", listener.local_addr().unwrap());
    let accepting = tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok(accepted) = listener.accept().await {
            held.push(accepted);
        }
    });
    for error in
        [error(setup(&silent, &hasty())).await, error(PostgresSaver::connect(&silent, hasty())).await]
    {
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        assert!(!is_wanted(&error), "{error}");
    }
    accepting.abort();

    // Another session has a lock.
    let locked = database().await;
    let holder = connect(locked.url()).await;
    holder.batch_execute("BEGIN; LOCK threadkeep_format IN ACCESS EXCLUSIVE MODE").await.unwrap();
    // In its transaction, the holder of the lock would see no session that begins after its first look.
    let watch = connect(locked.url()).await;
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let waiting = async || watch.query_one(waits, &[]).await.unwrap().get::<_, i64>(0);
    // On a busy machine its patience may end before it comes to the lock.
    let refused = async {
        loop {
            let (options, mut has_waited) = (hasty(), false);
            let mut refused = pin!(error(setup(locked.url(), &options)));
            let refused = loop {
                tokio::select! {
                    refused = &mut refused => break refused,
                    sessions = waiting() => has_waited |= sessions > 0,
                }
            };
            assert!(matches!(&refused, Error::Unavailable { .. }), "{refused}");
            assert!(!is_wanted(&refused), "{refused}");
            if has_waited {
                break;
            }
        }
    };
    tokio::time::timeout(Duration::from_mins(10), refused).await.expect("it does not come to the lock");
    // Its session waits no longer either.
    let gone = async { while waiting().await > 0 {} };
    tokio::time::timeout(Duration::from_mins(10), gone).await.unwrap();
    holder.batch_execute("COMMIT").await.unwrap();
    setup(locked.url(), &patient()).await.unwrap();

    let empty = postgres().unwrap().database().await.unwrap();
    let missing = error(PostgresSaver::connect(empty.url(), patient())).await;
    assert!(is_wanted(&missing), "{missing}");
    setup(empty.url(), &patient()).await.unwrap();
    let older = "UPDATE threadkeep_format SET version = version - 1";
    connect(empty.url()).await.batch_execute(older).await.unwrap();
    let older = error(PostgresSaver::connect(empty.url(), patient())).await;
    assert!(is_wanted(&older), "{older}");

    let nowhere = error(PostgresSaver::connect("postgres://u@127.0.0.1:1/d", hasty())).await;
    assert!(!is_wanted(&nowhere), "{nowhere}");
    let wrong = empty.url().replacen("threadkeep:", "threadkeep:wrong", 1);
    let wrong = error(PostgresSaver::connect(&wrong, hasty())).await;
    assert!(!is_wanted(&wrong), "{wrong}");
}

/// What `setup` has committed is done, also if the server's settings cannot be read to warn of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_may_not_read_the_settings_sets_up_and_connects() {
    let database = postgres().unwrap().database().await.unwrap();
    let admin = connect(database.url()).await;
    let role = format!("{}_owner", database.name());
    let hardened = format!(
        "CREATE ROLE {role} LOGIN PASSWORD 'secret'; GRANT USAGE, CREATE ON SCHEMA public TO {role};
         REVOKE SELECT ON pg_catalog.pg_settings FROM PUBLIC"
    );
    admin.batch_execute(&hardened).await.unwrap();
    let mut url = url::Url::parse(database.url()).unwrap();
    url.set_username(&role).unwrap();
    url.set_password(Some("secret")).unwrap();
    setup(url.as_str(), &patient()).await.unwrap();
    let saver = PostgresSaver::connect(url.as_str(), patient()).await.unwrap();
    saver.commit(Talk::new("t").say(&note(0))).await.unwrap();
    drop(saver);
    admin.batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await.unwrap();
}

/// Aurora refuses to say it to any role.
#[tokio::test(flavor = "multi_thread")]
async fn of_several_servers_a_primary_that_does_not_say_its_timeline_is_found() {
    let database = postgres().unwrap().database().await.unwrap();
    let admin = connect(database.url()).await;
    let role = format!("{}_blind", database.name());
    let hardened = format!(
        "CREATE ROLE {role} LOGIN PASSWORD 'secret'; GRANT USAGE, CREATE ON SCHEMA public TO {role};
         REVOKE EXECUTE ON FUNCTION pg_catalog.pg_current_wal_insert_lsn() FROM PUBLIC"
    );
    admin.batch_execute(&hardened).await.unwrap();
    let url = url::Url::parse(database.url()).unwrap();
    let server = format!("{}:{}", url.host_str().unwrap(), url.port().unwrap_or(5432));
    let several = format!("postgres://{role}:secret@{server},{server}/{}", database.name());
    setup(&several, &patient()).await.unwrap();
    let saver = PostgresSaver::connect(&several, patient()).await.unwrap();
    saver.commit(Talk::new("t").say(&note(0))).await.unwrap();
    drop(saver);
    admin.batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await.unwrap();
}

//! Servers that restart, end sessions, restrict a role, or are slow.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use threadkeep::Error;
use threadkeep::saver::{CheckpointSelector, Saver};
use threadkeep::value::Element;
use threadkeep_postgres::schema::FORMAT_VERSION;
use threadkeep_postgres::{Options, PostgresSaver, setup};
use threadkeep_testing::{Postgres, pgbouncer, postgres};
use tokio::sync::Notify;
use tokio_postgres::NoTls;
use tokio_postgres::error::SqlState;
use url::Url;

use crate::common::damage::connect;
use crate::common::proxy::Proxy;
use crate::common::talk::{Talk, note, texts};
use crate::common::{database, open, open_impatient, patient};

/// Appends `count` notes, each commit once from the caller's view.
pub(crate) async fn append(saver: &PostgresSaver, talk: &mut Talk, from: usize, count: usize) {
    for n in from..from + count {
        let step = talk.say(&note(n));
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    }
}

/// Asserts that a thread has exactly these notes, in this order.
pub(crate) async fn has(saver: &PostgresSaver, talk: &Talk, notes: std::ops::Range<usize>) {
    let head = saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    let expected: Vec<_> = notes.clone().map(|n| note(n)["content"].as_str().unwrap().to_owned()).collect();
    assert_eq!(texts(&head), expected);
    let chain = saver.read_thread(&talk.thread).await.unwrap().checkpoints;
    assert_eq!(chain.len(), notes.len(), "a checkpoint for each");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_crashes_between_and_under_commits_loses_and_doubles_nothing() {
    let server = Arc::new(Postgres::start().unwrap());
    let database = server.database().await.unwrap();
    setup(database.url(), &patient()).await.unwrap();
    let saver = open(database.url()).await;
    let mut talk = Talk::new("t");
    append(&saver, &mut talk, 0, 5).await;
    // Between two commits.
    tokio::task::block_in_place(|| {
        server.crash().unwrap();
        server.resume().unwrap();
    });
    append(&saver, &mut talk, 5, 5).await;
    has(&saver, &talk, 0..10).await;
    // During commits.
    let restarts = tokio::task::spawn_blocking(move || {
        for _ in 0..3 {
            server.crash().unwrap();
            server.resume().unwrap();
        }
        server
    });
    let mut done = 10;
    while !restarts.is_finished() {
        append(&saver, &mut talk, done, 1).await;
        done += 1;
    }
    let _server = restarts.await.unwrap();
    append(&saver, &mut talk, done, 1).await;
    has(&saver, &talk, 0..done + 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_server_is_down_nothing_is_written_and_the_error_says_so() {
    let server = Postgres::start().unwrap();
    let database = server.database().await.unwrap();
    setup(database.url(), &patient()).await.unwrap();
    let saver = open_impatient(database.url()).await;
    let mut talk = Talk::new("t");
    append(&saver, &mut talk, 0, 3).await;
    server.crash().unwrap();
    let step = talk.say(&note(3));
    // A broken connection may be found only by using it.
    while let Err(error) = saver.commit(step.clone()).await {
        if matches!(error, Error::Unavailable { .. }) {
            break;
        }
        assert!(matches!(error, Error::InDoubt { .. }), "{error}");
    }
    let read = saver.get(&CheckpointSelector::head(&talk.thread)).await;
    assert!(matches!(read, Err(Error::Unavailable { .. })), "{read:?}");
    server.resume().unwrap();
    has(&saver, &talk, 0..3).await;
    saver.commit(step).await.unwrap();
    has(&saver, &talk, 0..4).await;
}

async fn terminated_again_and_again(url: &str, admin: &str) {
    let saver = open(url).await;
    let mut talk = Talk::new("t");
    append(&saver, &mut talk, 0, 2).await;
    let (killer, progress) = (connect(admin).await, Arc::new(Notify::new()));
    let killing = tokio::spawn({
        let progress = progress.clone();
        async move {
            let mut ended = 0;
            let kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                        WHERE datname = current_database() AND pid <> pg_backend_pid()";
            // After each successful commit, so that it hits the next one.
            loop {
                progress.notified().await;
                ended += killer.query_one(kill, &[]).await.unwrap().get::<_, i64>(0);
                if ended >= 50 {
                    return ended;
                }
            }
        }
    });
    let mut done = 2;
    while !killing.is_finished() {
        append(&saver, &mut talk, done, 1).await;
        done += 1;
        progress.notify_one();
    }
    killing.await.unwrap();
    has(&saver, &talk, 0..done).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_are_ended_while_appending_lose_and_double_nothing() {
    let database = database().await;
    terminated_again_and_again(database.url(), database.url()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_are_ended_behind_a_pooler_lose_and_double_nothing() {
    let database = database().await;
    terminated_again_and_again(&pgbouncer().unwrap().url(&database), database.url()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_may_only_change_rows_is_enough() {
    let database = postgres().unwrap().database().await.unwrap();
    let options = Options { schema: "agents \"1\"".to_owned(), ..patient() };
    setup(database.url(), &options).await.unwrap();
    let owner = connect(database.url()).await;
    // Roles belong to the server, which the tests share.
    let role = format!("{}_dml", database.name());
    owner
        .batch_execute(&format!(
            "CREATE ROLE {role} LOGIN PASSWORD 'secret';
             GRANT USAGE ON SCHEMA \"agents \"\"1\"\"\" TO {role};
             GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA \"agents \"\"1\"\"\" TO {role};"
        ))
        .await
        .unwrap();
    let mut url = Url::parse(database.url()).unwrap();
    url.set_username(&role).unwrap();
    url.set_password(Some("secret")).unwrap();
    let saver = PostgresSaver::connect(url.as_str(), options.clone()).await.unwrap();
    let mut talk = Talk::delta("t", 3);
    append(&saver, &mut talk, 0, 10).await;
    saver.put_writes(&talk.key(), &talk.task(&Element::from_json(&note(10)).unwrap())).await.unwrap();
    let image = saver.read_thread(&talk.thread).await.unwrap();
    assert_eq!(image.checkpoints.len(), 10);
    let (last, _) = image.checkpoints.last_key_value().unwrap();
    let removal = threadkeep::saver::Rewrite { remove: [last.clone()].into(), put: vec![] };
    saver.rewrite_thread(&talk.thread, &image.revision, removal).await.unwrap();
    assert_eq!(saver.threads(None, 10).await.unwrap(), [talk.thread.clone()]);
    saver.delete_thread(&talk.thread).await.unwrap();
    assert_eq!(saver.threads(None, 10).await.unwrap(), []);
    // There is nothing to do.
    setup(url.as_str(), &options).await.unwrap();
    // There is, which takes the owner.
    let version =
        |version: u32| format!("UPDATE \"agents \"\"1\"\"\".threadkeep_format SET version = {version}");
    owner.batch_execute(&version(FORMAT_VERSION - 1)).await.unwrap();
    let refused = setup(url.as_str(), &options).await.unwrap_err();
    assert!(
        matches!(&refused, Error::Unavailable { reason, .. } if reason.contains("OWNER TO") && reason.contains("42501")),
        "{refused}"
    );
    assert!(!refused.to_string().contains("SELECT, INSERT"), "{refused}");
    owner.batch_execute(&version(FORMAT_VERSION)).await.unwrap();

    let function = "FUNCTION \"agents \"\"1\"\"\".threadkeep_write";
    for (less, again) in [
        (
            format!("REVOKE INSERT ON ALL TABLES IN SCHEMA \"agents \"\"1\"\"\" FROM {role}"),
            format!("GRANT INSERT ON ALL TABLES IN SCHEMA \"agents \"\"1\"\"\" TO {role}"),
        ),
        (
            format!("REVOKE EXECUTE ON {function} FROM PUBLIC"),
            format!("GRANT EXECUTE ON {function} TO {role}"),
        ),
    ] {
        owner.batch_execute(&less).await.unwrap();
        let step = Talk::new(&less).say(&note(0));
        let error = saver.commit(step.clone()).await.unwrap_err();
        assert!(
            matches!(error, Error::Unavailable { .. }) && error.to_string().contains("SELECT, INSERT"),
            "{error}"
        );
        owner.batch_execute(&again).await.unwrap();
        saver.commit(step).await.unwrap();
    }
    drop(saver);
    owner.batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_processes_may_set_up_and_write_at_once() {
    if let Ok(url) = std::env::var("THREADKEEP_TEST_SET_UP") {
        setup(&url, &patient()).await.unwrap();
        append(&open(&url).await, &mut Talk::new(&std::process::id().to_string()), 0, 3).await;
        return;
    }
    let database = postgres().unwrap().database().await.unwrap();
    let children: Vec<_> = (0..10)
        .map(|_| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "servers::ten_processes_may_set_up_and_write_at_once"])
                .env("THREADKEEP_TEST_SET_UP", database.url())
                .spawn()
                .unwrap()
        })
        .collect();
    for mut child in children {
        assert!(tokio::task::block_in_place(|| child.wait()).unwrap().success());
    }
    assert_eq!(open(database.url()).await.threads(None, 100).await.unwrap().len(), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_format_is_refused() {
    let database = database().await;
    let client = connect(database.url()).await;
    client.batch_execute("UPDATE threadkeep_format SET version = version + 1").await.unwrap();
    let (found, supported) = (FORMAT_VERSION + 1, FORMAT_VERSION);
    let expected = Error::NewerFormat { store: "schema public".to_owned(), found, supported };
    let opened = PostgresSaver::connect(database.url(), patient()).await;
    assert_eq!(opened.err(), Some(expected.clone()));
    assert_eq!(setup(database.url(), &patient()).await, Err(expected));
    client.batch_execute("UPDATE threadkeep_format SET version = -1").await.unwrap();
    let opened = PostgresSaver::connect(database.url(), patient()).await;
    assert!(matches!(opened, Err(Error::Corrupt { .. })), "{opened:?}");
}

/// As managed servers are while their disk is nearly full.
#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_is_set_to_read_only_is_not_called_a_standby() {
    let database = database().await;
    let admin = connect(database.url()).await;
    let read_only = format!("ALTER DATABASE {} SET default_transaction_read_only = on", database.name());
    admin.batch_execute(&read_only).await.unwrap();
    let saver = open_impatient(database.url()).await;
    let error = saver.commit(Talk::new("t").say(&note(0))).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert!(error.to_string().contains("default_transaction_read_only"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_threads_share_few_connections() {
    let database = database().await;
    let client = connect(database.url()).await;
    let sessions = async || {
        let count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'threadkeep'
                     AND datname = current_database()";
        client.query_one(count, &[]).await.unwrap().get::<_, i64>(0)
    };
    // The one that set up the tables may end later.
    while sessions().await > 0 {
        tokio::task::yield_now().await;
    }
    let options = Options { connections: 2, ..patient() };
    let saver = PostgresSaver::connect(database.url(), options).await.unwrap();
    let talks = join_all((0..64).map(|n| {
        let saver = &saver;
        async move {
            let mut talk = Talk::new(&format!("t{n}"));
            append(saver, &mut talk, 0, 5).await;
            talk
        }
    }));
    for talk in talks.await {
        has(&saver, &talk, 0..5).await;
    }
    let open = sessions().await;
    assert!((1..=2).contains(&open), "{open} connections");
}

/// The patience counts from when the server was last heard of, not from when it was asked.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_answer_is_waited_for_although_a_new_connection_is_refused() {
    let database = database().await;
    let mut other = Url::parse(database.url()).unwrap();
    let name = other.path().trim_start_matches('/').to_owned();
    other.set_path("/postgres");
    let admin = connect(other.as_str()).await;
    let proxy = Proxy::before(database.url()).await;
    let patience = Duration::from_secs(12);
    let options = Options { patience, ..Options::default() };
    let saver = Arc::new(PostgresSaver::connect(proxy.url(), options).await.unwrap());
    let mut talk = Talk::new("t");
    append(&saver, &mut talk, 0, 1).await;

    let locker = connect(database.url()).await;
    locker.batch_execute("BEGIN; SELECT * FROM threadkeep_thread FOR UPDATE").await.unwrap();
    let step = talk.say(&note(1));
    let committed = {
        let (saver, step) = (saver.clone(), step.clone());
        tokio::spawn(async move { saver.commit(step).await })
    };
    database.blocked().await.unwrap();
    tokio::time::sleep(patience + Duration::from_secs(1)).await;
    let allow = async |allowed: bool| {
        let statement = format!("ALTER DATABASE \"{name}\" ALLOW_CONNECTIONS {allowed}");
        admin.batch_execute(&statement).await.unwrap();
    };
    // Until a look at the server, which comes every quarter of the patience, has found that.
    allow(false).await;
    let refused = async {
        while proxy.refused() == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), refused).await.expect("nothing looks at the server");
    allow(true).await;
    locker.batch_execute("COMMIT").await.unwrap();
    committed.await.unwrap().unwrap();
    talk.accept(&step);
    has(&saver, &talk, 0..2).await;
}

/// A server at its limit of connections answers those that it has: they are not given up because it refuses another.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_answer_is_waited_for_although_the_server_has_no_room_for_another_connection() {
    let database = postgres().unwrap().database().await.unwrap();
    let patience = Duration::from_secs(12);
    let options = Options { patience, ..Options::default() };
    setup(database.url(), &patient()).await.unwrap();
    let owner = connect(database.url()).await;
    let role = format!("{}_limited", database.name());
    owner
        .batch_execute(&format!(
            "CREATE ROLE {role} LOGIN PASSWORD 'secret';
             GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role};"
        ))
        .await
        .unwrap();
    let mut url = Url::parse(database.url()).unwrap();
    url.set_username(&role).unwrap();
    url.set_password(Some("secret")).unwrap();
    let admin = connect(database.url()).await;
    let limit = async |sessions: i32| {
        let limit = format!("ALTER ROLE {role} CONNECTION LIMIT {sessions}");
        admin.batch_execute(&limit).await.unwrap();
    };
    limit(1).await;
    let saver = Arc::new(PostgresSaver::connect(url.as_str(), options).await.unwrap());
    let mut talk = Talk::new("t");
    append(&saver, &mut talk, 0, 1).await;
    let refused = tokio_postgres::connect(url.as_str(), NoTls).await.err().unwrap();
    assert_eq!(refused.code(), Some(&SqlState::TOO_MANY_CONNECTIONS), "{refused}");

    owner.batch_execute("BEGIN; SELECT * FROM threadkeep_thread FOR UPDATE").await.unwrap();
    let step = talk.say(&note(1));
    let committed = {
        let (saver, step) = (saver.clone(), step.clone());
        tokio::spawn(async move { saver.commit(step).await })
    };
    database.blocked().await.unwrap();
    tokio::time::sleep(patience * 3 / 2).await;
    // Nor because it takes another one in the end, and says which it is.
    limit(-1).await;
    tokio::time::sleep(patience).await;
    assert!(!committed.is_finished());
    owner.batch_execute("COMMIT").await.unwrap();
    committed.await.unwrap().unwrap();
    talk.accept(&step);
    has(&saver, &talk, 0..2).await;
    drop(saver);
    owner.batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await.unwrap();
}

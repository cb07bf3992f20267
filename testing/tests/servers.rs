//! The servers start, are private, and end with their handles.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;

use threadkeep_testing::{Cluster, Postgres, Redis, Replication, pgbouncer, postgres, redis, unconfigured};
use tokio_postgres::{Client, NoTls};
use url::Url;

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

async fn number(client: &Client, query: &str) -> i64 {
    client.query_one(query, &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn each_database_is_empty_and_is_dropped_with_its_handle() {
    let (one, two) =
        (postgres().unwrap().database().await.unwrap(), postgres().unwrap().database().await.unwrap());
    let client = connect(one.url()).await;
    client.batch_execute("CREATE TABLE t (n bigint); INSERT INTO t VALUES (7)").await.unwrap();
    assert_eq!(number(&client, "SELECT n FROM t").await, 7);
    let other = connect(two.url()).await;
    let tables = "SELECT count(*) FROM pg_tables WHERE tablename = 't'";
    assert_eq!(number(&other, tables).await, 0);
    let named = format!("SELECT count(*) FROM pg_database WHERE datname = '{}'", one.name());
    assert_eq!(number(&other, &named).await, 1);
    drop(one);
    // Also while a session is open. On a busy machine the handle does not wait for it.
    let dropped = std::time::Instant::now();
    while number(&other, &named).await != 0 {
        assert!(dropped.elapsed() < std::time::Duration::from_mins(10), "the database is still there");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_server_for_measurements_flushes() {
    let server = Postgres::start_flushing().unwrap();
    let database = server.database().await.unwrap();
    let client = connect(database.url()).await;
    let settings =
        [("fsync", "on"), ("full_page_writes", "on"), ("synchronous_commit", "on"), ("ssl", "off")];
    for (setting, value) in settings {
        let found: String = client.query_one(&format!("SHOW {setting}"), &[]).await.unwrap().get(0);
        assert_eq!(found, value, "{setting}");
    }
}

#[tokio::test]
async fn the_pooler_leads_to_the_same_database_and_keeps_no_session() {
    let database = postgres().unwrap().database().await.unwrap();
    let url = pgbouncer().unwrap().url(&database);
    assert_ne!(url, database.url());
    let through = connect(&url).await;
    through.batch_execute("CREATE TABLE t (n bigint); INSERT INTO t VALUES (9)").await.unwrap();
    assert_eq!(number(&connect(database.url()).await, "SELECT n FROM t").await, 9);
    through.batch_execute("BEGIN").await.unwrap();
    let other = connect(&url).await;
    let [a, b] = [&through, &other].map(|client| client.query_typed("SELECT pg_backend_pid()", &[]));
    let (a, b) = (a.await.unwrap()[0].get::<_, i32>(0), b.await.unwrap()[0].get::<_, i32>(0));
    assert_ne!(a, b, "a transaction has a server connection to itself");
}

#[tokio::test]
async fn a_crashed_postgres_comes_back_with_what_it_had() {
    let server = Postgres::start().unwrap();
    let database = server.database().await.unwrap();
    let client = connect(database.url()).await;
    client.batch_execute("CREATE TABLE t (n bigint); INSERT INTO t VALUES (11)").await.unwrap();
    server.crash().unwrap();
    assert!(tokio_postgres::connect(database.url(), NoTls).await.is_err());
    server.resume().unwrap();
    assert_eq!(number(&connect(database.url()).await, "SELECT n FROM t").await, 11);
    assert!(server.certificate().unwrap().exists());
}

#[tokio::test]
async fn a_server_and_its_directory_end_with_the_handle() {
    let server = Postgres::start().unwrap();
    let url = server.url("postgres");
    let certificate = server.certificate().unwrap();
    let directory = certificate.parent().and_then(Path::parent).unwrap().to_owned();
    assert!(directory.exists());
    drop(server);
    assert!(!directory.exists());
    assert!(tokio_postgres::connect(&url, NoTls).await.is_err());
}

fn ask_redis(url: &str, command: &str) -> std::io::Result<String> {
    let url = Url::parse(url).unwrap();
    let mut stream = TcpStream::connect((url.host_str().unwrap(), url.port().unwrap_or(6379)))?;
    let auth = url.password().map(|password| format!("AUTH {password}\r\n")).unwrap_or_default();
    stream.write_all(format!("{auth}{command}\r\nQUIT\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[test]
fn redis_answers_and_a_crashed_one_comes_back_empty() {
    assert!(ask_redis(redis().unwrap().url(), "PING").unwrap().contains("+PONG"));
    let server = Redis::start().unwrap();
    ask_redis(server.url(), "SET key kept").unwrap();
    assert!(ask_redis(server.url(), "GET key").unwrap().contains("kept"));
    server.crash().unwrap();
    assert!(ask_redis(server.url(), "GET key").is_err());
    server.resume().unwrap();
    assert!(ask_redis(server.url(), "GET key").unwrap().contains("$-1"));
}

#[test]
fn a_server_ends_with_its_process_however_that_ends() {
    let Some(file) = std::env::var_os("THREADKEEP_TESTING_CHILD") else {
        let file = tempfile::NamedTempFile::new().unwrap();
        let name = "a_server_ends_with_its_process_however_that_ends";
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env("THREADKEEP_TESTING_CHILD", file.path())
            .spawn()
            .unwrap();
        let url = loop {
            let text = std::fs::read_to_string(file.path()).unwrap();
            if let Some(url) = text.strip_suffix('\n') {
                break url.to_owned();
            }
            assert!(child.try_wait().unwrap().is_none(), "the child ended too early");
            std::thread::yield_now();
        };
        assert!(ask_redis(&url, "PING").unwrap().contains("+PONG"));
        child.kill().unwrap();
        child.wait().unwrap();
        let killed = std::time::Instant::now();
        while ask_redis(&url, "PING").is_ok() {
            assert!(killed.elapsed() < std::time::Duration::from_mins(10), "the server goes on");
            std::thread::yield_now();
        }
        return;
    };
    let server = Redis::start().unwrap();
    std::fs::write(file, format!("{}\n", server.url())).unwrap();
    loop {
        std::thread::park();
    }
}

/// Installed programs are found on the `PATH`, so this runs in a second process with a different one.
#[test]
fn without_programs_and_packages_the_error_says_what_to_install() {
    const CHILD: &str = "THREADKEEP_TEST_WITHOUT_PROGRAMS";
    if std::env::var(CHILD).is_ok() {
        let error = redis().map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("redis-server") && error.contains("containers"), "{error}");
        return;
    }
    let path = std::env::var_os("PATH").unwrap();
    let program =
        |name: &str| std::env::split_paths(&path).map(|place| place.join(name)).find(|file| file.is_file());
    drop(Redis::start().unwrap()); // Installed by now, even if it was missing before.
    let directory = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(program("rm").unwrap(), directory.path().join("rm")).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "without_programs_and_packages_the_error_says_what_to_install", "--nocapture"])
        .env("PATH", directory.path())
        .env_remove("THREADKEEP_REDIS_TEST_URL")
        .env(CHILD, "yes")
        .output()
        .unwrap();
    let ran = String::from_utf8_lossy(&child.stdout).contains("1 passed");
    assert!(child.status.success() && ran, "{child:?}");
}

#[test]
fn the_environment_of_the_machine_configures_no_program_of_the_gateway() {
    const CHILD: &str = "THREADKEEP_TEST_UNCONFIGURED";
    if std::env::var(CHILD).is_err() {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_environment_of_the_machine_configures_no_program_of_the_gateway"])
            .envs(
                [CHILD, "SVC_HOME", "GATEWAY_PORT", "OTEL_SERVICE_NAME", "RUST_LOG"].map(|name| (name, "1")),
            )
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && printed.contains("1 passed"), "{printed}");
        return;
    }
    let shown = unconfigured("env").output().unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout);
    let has = |start: &str| shown.lines().any(|line| line.starts_with(start));
    assert!(has(CHILD) && !["SVC_", "GATEWAY_", "OTEL_", "RUST_LOG"].into_iter().any(has), "{shown}");
}

/// Also of a sender that stands still: it would never notice that its server is gone.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_primary_leaves_no_process() {
    let cluster = tokio::task::block_in_place(|| Cluster::start(Replication::Synchronous)).unwrap();
    let client = connect(&cluster.primary_url("postgres")).await;
    let sender = "SELECT pid::bigint FROM pg_stat_replication WHERE application_name <> 'pg_basebackup'";
    let sender = number(&client, sender).await;
    tokio::task::block_in_place(|| {
        cluster.hold_replication().unwrap();
        cluster.kill_primary().unwrap();
    });
    let is_there = || Path::new("/proc").join(sender.to_string()).exists();
    let began = std::time::Instant::now();
    while is_there() {
        assert!(began.elapsed() < std::time::Duration::from_mins(10), "process {sender} is still there");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    // The standby notices when it is scheduled.
    let mut report = cluster.report();
    while !report.contains("could not connect to the primary server") {
        assert!(began.elapsed() < std::time::Duration::from_mins(10), "the standby's log: {report}");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        report = cluster.report();
    }
    assert!(report.contains("primary, port") && report.contains("no process"), "{report}");
    assert!(report.contains("postgres: startup"), "the standby's processes: {report}");
    assert!(report.contains("could not connect to the primary server"), "the standby's log: {report}");
}

/// The answer to a request to promote may be lost, or come too early on a slow machine.
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_that_was_promoted_already_becomes_the_primary() {
    let cluster = tokio::task::block_in_place(|| Cluster::start(Replication::Synchronous)).unwrap();
    let (client, old) = (connect(&cluster.standby_url("postgres")).await, cluster.primary_url("postgres"));
    tokio::task::block_in_place(|| cluster.kill_primary()).unwrap();
    client.simple_query("SELECT pg_promote(true, 600)").await.unwrap();
    tokio::task::block_in_place(|| cluster.promote()).unwrap();
    assert_ne!(cluster.primary_url("postgres"), old);
}

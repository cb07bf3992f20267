//! The same commands on Postgres.

use std::time::Duration;

use serde_json::{Value as Json, json};
use tempfile::TempDir;
use threadkeep::mode::ChannelMode;
use threadkeep_config::{Config, Environment, LoadOptions};
use threadkeep_postgres::{Options, setup};
use threadkeep_records::{NewThread, Records};
use threadkeep_storage::{Existing, open_records};
use threadkeep_testing::{Database, postgres};
use tokio_postgres::NoTls;

use super::store::{MODES, Said, Store, TALK, threadkeep};

fn run(database: &Database, args: &[&str]) -> Said {
    without_warnings(threadkeep(&[args, &["--postgres", database.url()]].concat()))
}

/// The test servers do not flush, which every command warns of.
fn without_warnings(mut said: Said) -> Said {
    let expected =
        |line: &&str| !line.contains("the server has fsync=off") && !line.contains("full_page_writes=off");
    said.err = said.err.split_inclusive('\n').filter(expected).collect();
    said
}

#[tokio::test]
async fn a_thread_is_moved_to_postgres_looked_at_pruned_converted_and_verified() {
    let database = postgres().unwrap().database().await.unwrap();
    setup(database.url(), &Options::default()).await.unwrap();
    for mode in MODES {
        let store = Store::new(mode).await;
        let file = store.file("talk.ndjson");
        store.run(&["export", "--thread", TALK, "--out", &file]).done();
        let copy = format!("copy-{mode}");
        run(&database, &["import", &file, "--as", &copy]).done();

        let graph = ["checkpoints", "list", "--graph", "--thread"];
        let there = run(&database, &[&graph[..], &[&copy]].concat()).done();
        assert_eq!(there, store.run(&[&graph[..], &[TALK]].concat()).done());
        let usage = run(&database, &["threads", "du", "--thread", &copy, "--json"]).json().remove(0);
        assert_eq!(usage["checkpoints"], 22, "{usage}");
        let stored = usage["stored_bytes"].as_u64().unwrap();
        assert!((5_000..100_000).contains(&stored), "{usage}");
        let show = |said: Said| {
            let mut shown = said.json().remove(0);
            shown["namespaces"].take()
        };
        let there = show(run(&database, &["threads", "show", &copy, "--json"]));
        assert_eq!(there, show(store.run(&["threads", "show", TALK, "--json"])));

        let prune = ["--keep", "last:3", "--boundary", "fresh-snapshot", "--thread", &copy, "--json"];
        let plan = run(&database, &[&["prune", "plan"], &prune[..]].concat()).json().remove(0);
        let applied = run(&database, &[&["prune", "apply", "--yes"], &prune[..]].concat()).json().remove(0);
        assert_eq!(plan["removed"], applied["removed"].as_array().unwrap().len());
        assert_eq!(plan["stats_after"], applied["stats_after"]);
        run(&database, &["convert", "--all", "--to", "full"]).done();
        let state = |said: Said| said.json().remove(0)["values"].take();
        let get = ["state", "get", "--json", "--thread"];
        let head = state(run(&database, &[&get[..], &[&copy]].concat()));
        assert_eq!(head, state(store.run(&[&get[..], &[TALK]].concat())));
        run(&database, &["verify", "--all"]).done();
    }
    let listed = run(&database, &["threads", "list", "--json"]).json();
    assert_eq!(listed.len(), 2);
    assert!(run(&database, &["vacuum"]).done().contains("autovacuum"));
    let backup = run(&database, &["backup", "--out", "backup-of-postgres"]);
    assert!(backup.code == 1 && backup.err.contains("pg_dump"), "{}", backup.err);
    let missing = run(&database, &["threads", "show", "copy"]);
    assert!(missing.code == 1 && missing.err.contains("copy-full"), "{}", missing.err);
}

/// The gateway's records, which are made if they are not there.
async fn records(config: &str, dir: &TempDir) -> Records {
    let options = LoadOptions {
        config_path: Some(config.into()),
        environment: Environment::default(),
        working_dir: dir.path().to_owned(),
    };
    open_records(&Config::load(&options).unwrap().config).await.unwrap()
}

/// A command leaves the server to others half of the time, and is not one of them: nor are its sessions for the records.
#[tokio::test]
async fn sessions_of_commands_have_a_name_of_their_own() {
    let database = postgres().unwrap().database().await.unwrap();
    setup(database.url(), &Options::default()).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.yaml").display().to_string();
    let settings = json!({"config_version": 49, "database": {
        "backend": "postgres", "postgres_url": database.url(),
    }});
    std::fs::write(&config, settings.to_string()).unwrap();
    let gateways = records(&config, &dir).await;
    let command = Existing::postgres(database.url()).await.unwrap();
    while !command.is_serving().await.unwrap() {
        gateways.threads().get("t", None).await.unwrap();
    }
    gateways.close().await;
    while command.is_serving().await.unwrap() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let found = command.records().unwrap().threads().get("t", None).await.unwrap();
    assert!(found.is_none() && !command.is_serving().await.unwrap());

    let (client, connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    let names = "SELECT DISTINCT application_name FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid()";
    let names: Vec<String> = client.query(names, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    assert_eq!(names, ["threadkeep command"]);
    command.close().await;
}

/// In the schema that the configuration names, where a gateway has created its tables.
#[tokio::test]
async fn the_gateways_records_in_postgres_are_seen() {
    let database = postgres().unwrap().database().await.unwrap();
    let options = Options { schema: "own".to_owned(), ..Options::default() };
    setup(database.url(), &options).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.yaml").display().to_string();
    let settings = json!({"config_version": 49, "database": {
        "backend": "postgres", "postgres_url": database.url(), "postgres_schema": "own",
    }});
    std::fs::write(&config, settings.to_string()).unwrap();
    let run = |args: &[&str]| without_warnings(threadkeep(&[args, &["--config", &config]].concat()));

    let store = Store::new(ChannelMode::Full).await;
    let file = store.file("talk.ndjson");
    store.run(&["export", "--thread", TALK, "--out", &file]).done();
    run(&["import", &file]).done();
    let list = ["threads", "list", "--json"];
    assert_eq!(run(&list).json()[0]["owner"], Json::Null, "there are no records, and none are made");

    let records = records(&config, &dir).await;
    let new = NewThread {
        thread_id: TALK.to_owned(),
        display_name: Some("Tables".to_owned()),
        user_id: Some("ann".to_owned()),
        ..NewThread::default()
    };
    records.threads().create(new).await.unwrap();
    records.close().await;
    let listed = &run(&list).json()[0];
    assert_eq!((&listed["owner"], &listed["title"]), (&"ann".into(), &"Tables".into()));
    assert_eq!(run(&["threads", "show", TALK, "--json"]).json()[0]["record"]["owner"], "ann");
}

/// A server without room on its disk, which triggers play: where the change is made, and when it is committed.
const FULL: [&str; 2] = [
    "CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE OR DELETE ON threadkeep_checkpoint
        FOR EACH ROW EXECUTE FUNCTION full_disk()",
    "CREATE CONSTRAINT TRIGGER full_disk AFTER INSERT OR UPDATE OR DELETE ON threadkeep_checkpoint
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION full_disk()",
];

#[tokio::test]
async fn a_full_disk_of_the_server_is_one_error_with_its_remedy_and_changes_nothing() {
    let database = postgres().unwrap().database().await.unwrap();
    setup(database.url(), &Options::default()).await.unwrap();
    let (client, connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    let function = "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$";
    client.batch_execute(function).await.unwrap();
    let store = Store::new(ChannelMode::Delta).await;
    let file = store.file("talk.ndjson");
    store.run(&["export", "--thread", TALK, "--out", &file]).done();
    run(&database, &["import", &file]).done();
    let thread = || run(&database, &["export", "--thread", TALK]).done();
    let before = thread();
    let commands = [
        &["import", &file, "--as", "copy"][..],
        &["retention", "apply", "--thread", TALK, "--yes"],
        &["prune", "apply", "--all", "--keep", "last:3", "--boundary", "fresh-snapshot", "--yes"],
        &["convert", "--all", "--to", "full"],
    ];
    for full in FULL {
        client.batch_execute(full).await.unwrap();
        for command in commands {
            let said = run(&database, command);
            assert_eq!((said.code, said.err.lines().count()), (1, 1), "{command:?}: {said:?}");
            let remedy = "nothing was written: the server's disk is full; free some space, then retry";
            assert!(said.err.contains(remedy), "{full}, {command:?}: {said:?}");
        }
        client.batch_execute("DROP TRIGGER full_disk ON threadkeep_checkpoint").await.unwrap();
        assert_eq!(thread(), before, "{full}");
        assert_eq!(run(&database, &["threads", "list", "--json"]).json().len(), 1, "{full}");
    }
    // There is room again: each does what it could not do.
    for command in commands {
        run(&database, command).done();
    }
    assert_ne!(thread(), before);
    run(&database, &["verify", "--all"]).done();
}

/// With the gateway's records on the same server, of which the import writes first.
#[tokio::test]
async fn records_on_a_full_disk_of_the_server_name_the_remedy() {
    let database = postgres().unwrap().database().await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.yaml").display().to_string();
    let settings = json!({"config_version": 49, "database": {
        "backend": "postgres", "postgres_url": database.url(),
    }});
    std::fs::write(&config, settings.to_string()).unwrap();
    let run = |args: &[&str]| without_warnings(threadkeep(&[args, &["--config", &config]].concat()));
    run(&["setup"]).done();
    let store = Store::new(ChannelMode::Full).await;
    let file = store.file("talk.ndjson");
    store.run(&["export", "--thread", TALK, "--out", &file]).done();
    let (client, connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    let full = "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$;
        CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE OR DELETE ON threadkeep_gateway_threads_meta
            FOR EACH ROW EXECUTE FUNCTION full_disk()";
    client.batch_execute(full).await.unwrap();
    let said = run(&["import", &file]);
    assert_eq!((said.code, said.err.lines().count()), (1, 1), "{said:?}");
    let remedy = "nothing was changed: the server's disk is full; free some space, then retry";
    assert!(said.err.contains(remedy), "{said:?}");
    client.batch_execute("DROP FUNCTION full_disk() CASCADE").await.unwrap();
    assert_eq!(run(&["threads", "list", "--json"]).json().len(), 0, "nothing was imported");
    run(&["import", &file]).done();
    run(&["verify", "--all"]).done();
}

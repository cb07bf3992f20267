//! The same commands on Postgres.

use serde_json::{Value as Json, json};
use threadkeep::mode::ChannelMode;
use threadkeep_config::{Config, Environment, LoadOptions};
use threadkeep_postgres::{Options, setup};
use threadkeep_records::NewThread;
use threadkeep_storage::open_records;
use threadkeep_testing::{Database, postgres};

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
        assert!(usage["logical_bytes"].as_u64().unwrap() > 0 && usage["stored_bytes"].is_null(), "{usage}");

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

    let options = LoadOptions {
        config_path: Some(config.clone().into()),
        environment: Environment::default(),
        working_dir: dir.path().to_owned(),
    };
    let records = open_records(&Config::load(&options).unwrap().config).await.unwrap();
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

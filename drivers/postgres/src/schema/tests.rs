use threadkeep_testing::{Database, postgres};
use tokio_postgres::NoTls;

use super::*;

/// Every column, index, constraint and setting that the tables of a database have, and every function.
async fn shape(database: &Database) -> Vec<String> {
    let (client, connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    let tables = "SELECT concat_ws(' ', c.relname, c.reloptions::text, a.attnum::text, a.attname, a.atttypid::regtype::text,
                         a.attnotnull::text, a.attstorage::text, pg_get_indexdef(c.oid))
                  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
                  WHERE c.relnamespace = 'public'::regnamespace AND a.attnum > 0 ORDER BY 1";
    let functions = "SELECT pg_get_functiondef(oid) FROM pg_proc
                     WHERE pronamespace = 'public'::regnamespace ORDER BY 1";
    let version = "SELECT 'version ' || version FROM threadkeep_format";
    let mut lines = Vec::new();
    for query in [tables, functions, version] {
        lines.extend(client.query(query, &[]).await.unwrap().iter().map(|row| row.get(0)));
    }
    lines
}

async fn database() -> Database {
    postgres().unwrap().database().await.unwrap()
}

#[test]
fn each_setting_that_loses_or_hides_commits_is_a_risk_and_no_other_is() {
    let safe = ["fsync=on", "full_page_writes=on", "synchronous_commit=remote_apply", "data_checksums=on"];
    assert_eq!(risks(&safe).count(), 0);
    for (setting, _) in RISKS {
        let found: Vec<_> = risks(&[&safe[..], &[setting]].concat()).map(|(risk, _)| risk).collect();
        assert_eq!(found, [setting]);
    }
}

#[tokio::test]
async fn every_older_version_becomes_what_a_fresh_one_is() {
    let options = Options::patient();
    let fresh = database().await;
    setup(fresh.url(), &options).await.unwrap();
    let expected = shape(&fresh).await;
    assert!(expected.contains(&format!("version {FORMAT_VERSION}")), "{expected:?}");
    assert!(expected.len() > 25, "{expected:?}");
    assert_eq!(expected.iter().filter(|line| line.starts_with("CREATE OR REPLACE FUNCTION")).count(), 7);
    for version in 0..=FORMAT_VERSION {
        let old = database().await;
        migrate(old.url(), &options, version).await.unwrap();
        for time in ["once", "twice"] {
            setup(old.url(), &options).await.unwrap();
            assert_eq!(shape(&old).await, expected, "from version {version}, {time}");
        }
    }
}

/// As after `pg_dump --table='threadkeep*'`, and on a subscriber of logical replication.
#[tokio::test]
async fn functions_that_were_not_restored_with_the_tables_are_wanted_and_created() {
    let (options, restored) = (Options::patient(), database().await);
    setup(restored.url(), &options).await.unwrap();
    let expected = shape(&restored).await;
    let (client, connection) = tokio_postgres::connect(restored.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    for gone in [
        "threadkeep_commit",
        "threadkeep_head_beyond",
        "threadkeep_write, threadkeep_head, threadkeep_by_id, threadkeep_by_id_beyond, threadkeep_lineage",
    ] {
        client.batch_execute(&format!("DROP FUNCTION {gone}")).await.unwrap();
        let refused = crate::PostgresSaver::connect(restored.url(), options.clone()).await.unwrap_err();
        assert!(is_wanted(&refused), "{refused}");
        setup(restored.url(), &options).await.unwrap();
        assert_eq!(shape(&restored).await, expected);
    }
}

/// As Debezium creates one, among others.
#[tokio::test]
async fn a_publication_for_all_tables_stops_no_setup_and_no_upgrade() {
    let (options, old) = (Options::patient(), database().await);
    let (client, connection) = tokio_postgres::connect(old.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute("CREATE PUBLICATION everything FOR ALL TABLES").await.unwrap();
    migrate(old.url(), &options, FORMAT_VERSION - 1).await.unwrap();
    setup(old.url(), &options).await.unwrap();
    assert!(shape(&old).await.contains(&format!("version {FORMAT_VERSION}")));
}

/// A database that has a version was created by the migrations as they were then: to change one, add a version.
#[test]
fn what_leads_to_a_version_never_changes() {
    let hash =
        |migration: &fn(&str) -> String| blake3::hash(migration("s").as_bytes()).to_hex()[..16].to_owned();
    let found: Vec<_> = MIGRATIONS.iter().map(hash).collect();
    assert_eq!(
        found,
        [
            "86909961b440b6fc",
            "2051a18c0d595085",
            "629fe3b5ffa63a53",
            "b496f8f8fcba77d3",
            "5b85ac3b2b085522",
            "e3b81b23dded17e4",
            "7256c42815f40394",
        ]
    );
}

#[tokio::test]
async fn a_migration_that_fails_leaves_nothing_behind() {
    let database = database().await;
    let (client, connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    // Takes the name of the last table.
    client.batch_execute("CREATE VIEW threadkeep_element AS SELECT 1").await.unwrap();
    let error = setup(database.url(), &Options::patient()).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    let left = "SELECT relname::text FROM pg_class WHERE relname LIKE 'threadkeep%'
                UNION ALL SELECT proname::text FROM pg_proc WHERE proname LIKE 'threadkeep%'";
    let left: Vec<String> = client.query(left, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    assert_eq!(left, ["threadkeep_element"]);
    client.batch_execute("DROP VIEW threadkeep_element").await.unwrap();
    setup(database.url(), &Options::patient()).await.unwrap();
}

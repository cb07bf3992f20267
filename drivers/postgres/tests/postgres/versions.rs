//! Stores of each version of the format, kept in the repository as SQL without the functions.
//!
//! A new version with other rows or tables needs a fixture of its own. Once `ABOUT`, `TABLES` and `COLUMNS` describe it,
//! this writes it:
//! `WRITE_FIXTURE=1 cargo test -p threadkeep-postgres --test postgres versions`

use std::path::{Path, PathBuf};

use threadkeep::Error;
use threadkeep::id::IdSource;
use threadkeep::saver::{CheckpointSelector, Flush, Rewrite, Saver, StepCommit};
use threadkeep_postgres::schema::FORMAT_VERSION;
use threadkeep_postgres::{PostgresSaver, setup};
use threadkeep_testing::postgres;

use crate::common::damage::connect;
use crate::common::talk::{Talk, note, texts};
use crate::common::{database, open, patient};

/// The versions, each with the one whose fixture has its tables and rows.
const VERSIONS: [(u32, u32); 6] = [(2, 3), (3, 3), (4, 6), (5, 6), (6, 6), (7, 6)];

const ABOUT: &str = "-- A store as version 6 of the format makes it, without its functions: a thread in full mode, one
-- in delta mode, one that was rewritten. Each has ten notes and the writes of a task that nobody has applied; a few
-- commits waited for a flush.
";
/// The tables of version 6.
const TABLES: &str = "CREATE TABLE threadkeep_format (version int NOT NULL);
INSERT INTO threadkeep_format VALUES (6);
CREATE TABLE threadkeep_thread (
    id uuid PRIMARY KEY, epoch bigint NOT NULL, revision bigint NOT NULL, name bytea NOT NULL, body bytea NOT NULL,
    nonce uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000'
) WITH (fillfactor = 50);
CREATE INDEX threadkeep_thread_name ON threadkeep_thread (substring(name, 1, 512));
CREATE TABLE threadkeep_head (
    thread uuid NOT NULL, ns bytea NOT NULL, head uuid NOT NULL, name bytea NOT NULL, sum bytea NOT NULL,
    PRIMARY KEY (thread, ns)
) WITH (fillfactor = 70);
CREATE TABLE threadkeep_checkpoint (
    thread uuid NOT NULL, id uuid NOT NULL, parent uuid, seed uuid, names int NOT NULL, extra int,
    ns bytea NOT NULL, body bytea NOT NULL, tasks bytea, needs bigint[],
    PRIMARY KEY (thread, ns, id)
);
CREATE TABLE threadkeep_element (
    thread uuid NOT NULL, hash uuid NOT NULL, seq bigint NOT NULL, body bytea NOT NULL, size int,
    PRIMARY KEY (thread, seq)
);
ALTER TABLE threadkeep_element ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE TABLE threadkeep_grave (
    thread uuid NOT NULL, life bigint NOT NULL, at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (thread, life)
);
CREATE INDEX threadkeep_grave_at ON threadkeep_grave (at);
";
/// The columns of the tables with rows.
const COLUMNS: [(&str, &str); 4] = [
    ("thread", "id, epoch, revision, name, body, nonce"),
    ("head", "thread, ns, head, name, sum"),
    ("checkpoint", "thread, id, parent, seed, names, extra, ns, body, tasks, needs"),
    ("element", "thread, hash, seq, body, size"),
];

/// Functions with the names, arguments and results of those of version 3.
const FUNCTIONS: &str = "
CREATE FUNCTION threadkeep_write(uuid, bytea, bigint, bigint, bigint, bigint, bytea, boolean, bigint[], uuid[], int[],
    bytea[], bytea[], uuid[], uuid[], uuid[], int[], int[], text[], bytea[], bytea[], bytea[], uuid[], bytea[], bytea[])
    RETURNS boolean LANGUAGE sql AS 'SELECT true';
CREATE FUNCTION threadkeep_head(uuid, bytea) RETURNS TABLE (
    kind int, ns bytea, k1 uuid, k2 uuid, k3 uuid, n1 bigint, n2 bigint, b1 bytea, b2 bytea
) LANGUAGE plpgsql AS 'BEGIN END';
CREATE FUNCTION threadkeep_by_id(uuid, bytea, uuid) RETURNS TABLE (
    kind int, ns bytea, k1 uuid, k2 uuid, k3 uuid, n1 bigint, n2 bigint, b1 bytea, b2 bytea
) LANGUAGE plpgsql AS 'BEGIN END';
CREATE FUNCTION threadkeep_lineage(uuid, bytea, uuid, uuid) RETURNS TABLE (
    kind int, ns bytea, k1 uuid, k2 uuid, k3 uuid, n1 bigint, n2 bigint, b1 bytea, b2 bytea
) LANGUAGE plpgsql AS 'BEGIN END';
";

/// The file with a store of this version.
fn fixture(version: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/version_{version}.sql"))
}

/// The store of this version, as SQL.
fn store(version: u32) -> String {
    let file = fixture(version);
    std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("the fixture {}: {error}", file.display()))
}

/// Writes the fixture of the current version: what that of version 3 holds.
async fn write_fixture() {
    let database = database().await;
    let saver = open(database.url()).await;
    for mut talk in [Talk::new("full"), Talk::delta("delta", 4), Talk::new("rewritten")] {
        talk.ids = IdSource::default();
        for n in 0..10 {
            let flush = if n % 3 == 1 { Flush::WithNext } else { Flush::Now };
            let step = StepCommit { flush, ..talk.say(&note(n)) };
            saver.commit(step.clone()).await.unwrap();
            talk.accept(&step);
        }
        saver.put_writes(&talk.key(), &talk.task(talk.messages.last().unwrap())).await.unwrap();
        if talk.thread.as_str() == "rewritten" {
            let image = saver.read_thread(&talk.thread).await.unwrap();
            let mut places = image.checkpoints.keys().cloned();
            let remove = places.next().into_iter().collect();
            // The second one is the first one now.
            let mut root = image.checkpoints[&places.next().unwrap()].clone();
            root.parent = None;
            root.checkpoint.applied.clear();
            let rewrite = Rewrite { remove, put: vec![root] };
            saver.rewrite_thread(&talk.thread, &image.revision, rewrite).await.unwrap();
        }
    }
    let client = connect(database.url()).await;
    let mut text = ABOUT.to_owned() + TABLES;
    for (table, columns) in COLUMNS {
        let values = vec!["%L"; columns.split(',').count()].join(", ");
        let rows = format!(
            "SELECT format('INSERT INTO threadkeep_{table} ({columns}) VALUES ({values});', {columns})
             FROM threadkeep_{table} ORDER BY 1"
        );
        for row in client.query(&rows, &[]).await.unwrap() {
            text.push_str(row.get(0));
            text.push('\n');
        }
    }
    std::fs::write(fixture(FORMAT_VERSION), text).unwrap();
}

/// Makes a database what this version left.
async fn leave(url: &str, version: u32, of: u32) {
    let client = connect(url).await;
    client.batch_execute(&store(of)).await.unwrap();
    match version {
        3 => client.batch_execute(FUNCTIONS).await.unwrap(),
        // Their functions are those of version 7, which `setup` creates here, without the ones that are new since. That
        // for the lineage is replaced.
        4..=6 => {
            setup(url, &patient()).await.unwrap();
            let beyond = "DROP FUNCTION threadkeep_head_beyond, threadkeep_by_id_beyond";
            client.batch_execute(beyond).await.unwrap();
            if version == 4 {
                client.batch_execute("DROP FUNCTION threadkeep_commit").await.unwrap();
            }
        }
        // None, as after a dump of the tables alone was restored.
        _ => {}
    }
    client.batch_execute(&format!("UPDATE threadkeep_format SET version = {version}")).await.unwrap();
}

fn refused<T: std::fmt::Debug>(done: Result<T, Error>) {
    match done {
        Err(Error::Unavailable { reason, .. }) => {
            assert!(reason.starts_with("the tables are missing"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_of_each_version_is_refused_until_it_is_set_up_and_keeps_what_it_has() {
    if std::env::var_os("WRITE_FIXTURE").is_some() {
        write_fixture().await;
    }
    let known = VERSIONS.iter().any(|(version, _)| *version == FORMAT_VERSION);
    assert!(known, "version {FORMAT_VERSION} has no fixture");
    for (version, of) in VERSIONS {
        let database = postgres().unwrap().database().await.unwrap();
        leave(database.url(), version, of).await;
        refused(PostgresSaver::connect(database.url(), patient()).await);

        setup(database.url(), &patient()).await.unwrap();
        let (one, two) = (open(database.url()).await, open(database.url()).await);
        for (thread, all) in [("full", true), ("delta", false), ("rewritten", true)] {
            let mut talk = Talk::new(thread);
            let before = one.read_thread(&talk.thread).await.unwrap();
            let length = if thread == "rewritten" { 9 } else { 10 };
            assert_eq!(before.checkpoints.len(), length, "{thread}");
            let head = one.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
            assert_eq!(head.writes.len(), 1, "the writes that nobody has applied");
            talk.head = Some(head.checkpoint.id);
            if !all {
                let step = talk.empty();
                assert_eq!(one.commit(step.clone()).await.unwrap(), step.key());
                continue;
            }
            talk.resume(&head);
            let mut expected = texts(&head);
            let last = note(9)["content"].as_str().unwrap().to_owned();
            assert_eq!((expected.len(), expected.last()), (10, Some(&last)));
            // Two processes continue in turn, from the mark that the older version wrote.
            for (n, saver) in [&one, &two, &two, &one].into_iter().enumerate() {
                let step: StepCommit = talk.say(&note(100 + n));
                saver.commit(step.clone()).await.unwrap();
                talk.accept(&step);
                expected.push(note(100 + n)["content"].as_str().unwrap().to_owned());
                let read = open(database.url()).await.get(&CheckpointSelector::head(&talk.thread)).await;
                assert_eq!(texts(&read.unwrap().unwrap()), expected, "{thread}");
            }
            let after = two.read_thread(&talk.thread).await.unwrap();
            for (place, tuple) in &before.checkpoints {
                let mut found = after.checkpoints[place].clone();
                // Tasks were added to the former head.
                found.writes.truncate(tuple.writes.len());
                assert_eq!(&found, tuple, "{thread}");
            }
        }
    }
}

/// The rights that an administrator granted on version 3 suffice after `setup`.
#[tokio::test(flavor = "multi_thread")]
async fn rights_are_carried_over_to_what_is_new() {
    let database = postgres().unwrap().database().await.unwrap();
    let owner = connect(database.url()).await;
    owner.batch_execute(&store(3)).await.unwrap();
    owner.batch_execute(FUNCTIONS).await.unwrap();
    let role = format!("{}_older", database.name());
    let functions = "threadkeep_write, threadkeep_head, threadkeep_by_id, threadkeep_lineage";
    owner
        .batch_execute(&format!(
            "CREATE ROLE {role} LOGIN PASSWORD 'secret';
             ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;
             REVOKE EXECUTE ON FUNCTION {functions} FROM PUBLIC;
             GRANT USAGE ON SCHEMA public TO {role};
             GRANT SELECT, INSERT, UPDATE, DELETE
                 ON threadkeep_thread, threadkeep_head, threadkeep_checkpoint, threadkeep_element TO {role};
             GRANT SELECT ON threadkeep_format TO {role};
             GRANT EXECUTE ON FUNCTION {functions} TO {role};"
        ))
        .await
        .unwrap();
    setup(database.url(), &patient()).await.unwrap();
    let mut url = url::Url::parse(database.url()).unwrap();
    url.set_username(&role).unwrap();
    url.set_password(Some("secret")).unwrap();
    let saver = open(url.as_str()).await;
    let mut talk = Talk::new("t");
    for n in 0..3 {
        let step = talk.say(&note(n));
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
        // The same again: nothing to write, but something to wait for.
        saver.commit(step).await.unwrap();
    }
    saver.delete_thread(&talk.thread).await.unwrap();
    assert_eq!(saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap(), None);
    drop(saver);
    owner.batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await.unwrap();
}

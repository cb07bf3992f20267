//! Stores that older versions of the format created.

use threadkeep::Error;
use threadkeep::saver::{CheckpointSelector, Saver, StepCommit};
use threadkeep_postgres::{PostgresSaver, setup};
use threadkeep_testing::postgres;

use crate::common::damage::connect;
use crate::common::talk::{Talk, note, texts};
use crate::common::{open, patient};

const STORE: &str = include_str!("../fixtures/version_3.sql");

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

fn refused<T: std::fmt::Debug>(done: Result<T, Error>) {
    match done {
        Err(Error::Unavailable { reason, .. }) => {
            assert!(reason.starts_with("the tables are missing"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_store_is_refused_until_it_is_set_up_and_keeps_what_it_has() {
    for version in [2, 3] {
        let database = postgres().unwrap().database().await.unwrap();
        let client = connect(database.url()).await;
        client.batch_execute(STORE).await.unwrap();
        if version == 3 {
            client.batch_execute(FUNCTIONS).await.unwrap();
        }
        client.batch_execute(&format!("UPDATE threadkeep_format SET version = {version}")).await.unwrap();
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
    owner.batch_execute(STORE).await.unwrap();
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

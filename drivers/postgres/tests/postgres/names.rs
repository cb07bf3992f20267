//! Names of schemas, threads, namespaces and channels, whatever they contain.

use serde_json::json;
use threadkeep::Error;
use threadkeep::saver::{CheckpointSelector, Saver};
use threadkeep::value::ChannelValue;
use threadkeep_postgres::{Options, PostgresSaver, setup};

use crate::common::talk::{Talk, note};
use crate::common::{database, open, patient};
use crate::servers::{append, has};

#[tokio::test(flavor = "multi_thread")]
async fn schemas_are_stores_of_their_own() {
    let database = database().await;
    let options = Options { schema: "an other's $$".to_owned(), ..patient() };
    let before = PostgresSaver::connect(database.url(), options.clone()).await;
    assert!(
        matches!(&before, Err(Error::Unavailable { reason, .. }) if reason.contains("setup")),
        "{before:?}"
    );
    setup(database.url(), &options).await.unwrap();
    let (one, two) =
        (open(database.url()).await, PostgresSaver::connect(database.url(), options).await.unwrap());
    let mut talk = Talk::new("t");
    append(&one, &mut talk, 0, 3).await;
    assert_eq!(two.get(&CheckpointSelector::head(&talk.thread)).await.unwrap(), None);
    append(&two, &mut Talk::new("t"), 0, 1).await;
    has(&one, &talk, 0..3).await;
}

/// Whatever a schema is called, it is quoted, and nothing in it is taken for a part of a statement.
#[tokio::test(flavor = "multi_thread")]
async fn every_legal_name_of_a_schema_works() {
    let database = database().await;
    for schema in [
        "{s}",
        "{s}.x{q}{o}{n}{t}{l}{epoch}{next}",
        "$1 $2 $$ $body$",
        "a\"b\"\"c",
        "a'b''c\\'",
        "two\nlines\r\n; --",
        "/* \" */ %s",
        "SELECT",
        &"\u{fc}".repeat(31),
    ] {
        let options = Options { schema: schema.to_owned(), ..patient() };
        setup(database.url(), &options).await.unwrap_or_else(|error| panic!("{schema:?}: {error}"));
        let saver = PostgresSaver::connect(database.url(), options).await.unwrap();
        let mut talk = Talk::new("t");
        append(&saver, &mut talk, 0, 3).await;
        has(&saver, &talk, 0..3).await;
        saver.delete_thread(&talk.thread).await.unwrap();
        assert_eq!(saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap(), None, "{schema:?}");
        append(&saver, &mut Talk::new("t"), 0, 1).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nul_bytes_survive_wherever_a_text_stands() {
    let database = database().await;
    let saver = open(database.url()).await;
    let mut talk = Talk::new("a\0thread");
    let odd =
        json!({ "id": "m\u{0}1", "content": "a\u{0}b, and much more, so that it is stored as an element" });
    append(&saver, &mut talk, 0, 1).await;
    let mut step = talk.say(&odd);
    step.metadata
        .extra
        .insert("k\0ey".into(), json!("a value with \u{0} in it, and long enough for an element"));
    let large: serde_json::Map<_, _> = (0..20).map(|n| (format!("{n}\0"), json!("\u{0}"))).collect();
    step.metadata.extra.insert("map\0".into(), large.into());
    step.metadata.parents.insert("ns\0".into(), talk.head.unwrap());
    step.checkpoint.next = vec!["no\0de".into()];
    let small = ChannelValue::from_json(&json!("\u{0}")).unwrap();
    let entry = threadkeep::checkpoint::ChannelEntry {
        version: talk.version.unwrap(),
        stored: threadkeep::checkpoint::Stored::Value(small),
    };
    step.checkpoint.channels.insert("chan\0nel".into(), entry);
    step.writes[0].node = "\0".into();
    step.writes[0].writes[0].channel = "chan\0nel".into();
    saver.commit(step.clone()).await.unwrap();
    let mut nested = Talk::new("a\0thread").say(&odd);
    nested.namespace = "name\0space".into();
    saver.commit(nested.clone()).await.unwrap();

    let reader = open(database.url()).await;
    let image = reader.read_thread(&talk.thread).await.unwrap();
    let found = &image.checkpoints[&("".into(), step.checkpoint.id)];
    assert_eq!((&found.checkpoint, &found.metadata), (&step.checkpoint, &step.metadata));
    assert_eq!(image.checkpoints[&("".into(), talk.head.unwrap())].writes, step.writes);
    assert_eq!(
        image.checkpoints[&("name\0space".into(), nested.checkpoint.id)].checkpoint,
        nested.checkpoint
    );
    assert_eq!(reader.threads(None, 10).await.unwrap(), [talk.thread]);
}

#[tokio::test(flavor = "multi_thread")]
async fn long_ids_are_ids_too() {
    let database = database().await;
    let saver = open(database.url()).await;
    // Beyond what fits in an index, with the difference at the end.
    let ids: Vec<String> = ["a", "b", "c"].map(|end| "x".repeat(10_000) + end).into();
    for (n, id) in ids.iter().enumerate() {
        let mut step = Talk::new(id).say(&note(n));
        step.namespace = id.as_str().into();
        saver.commit(step).await.unwrap();
    }
    let threads = saver.threads(None, 2).await.unwrap();
    assert_eq!(threads, [ids[0].as_str().into(), ids[1].as_str().into()]);
    assert_eq!(saver.threads(threads.last(), 2).await.unwrap(), [ids[2].as_str().into()]);
    let head = saver.read_thread(&ids[1].as_str().into()).await.unwrap();
    assert_eq!(head.checkpoints.keys().next().unwrap().0.as_str(), ids[1]);
}

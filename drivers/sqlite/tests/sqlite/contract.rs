//! Promises of the contract that this driver could break in its own way.

use std::collections::BTreeSet;

use serde_json::{Map, Value as Json, json};
use tempfile::TempDir;
use threadkeep::Error;
use threadkeep::checkpoint::{ChannelEntry, CheckpointTuple, Stored};
use threadkeep::id::{CheckpointId, Namespace};
use threadkeep::saver::{CheckpointSelector, ListQuery, Load, Saver, StepCommit};
use threadkeep::value::{Element, ListValue};
use threadkeep_sqlite::{Options, SqliteSaver};

use crate::common::{MESSAGES, Talk, message};

fn open() -> (TempDir, SqliteSaver) {
    let dir = tempfile::tempdir().unwrap();
    let saver = SqliteSaver::open(dir.path().join("db"), &Options::default()).unwrap();
    (dir, saver)
}

async fn put(saver: &SqliteSaver, talk: &mut Talk, step: StepCommit) -> CheckpointId {
    saver.commit(step.clone()).await.unwrap();
    talk.accept(&step);
    step.checkpoint.id
}

async fn say(saver: &SqliteSaver, talk: &mut Talk, number: usize) -> CheckpointId {
    let step = talk.say(&message(number, 200));
    put(saver, talk, step).await
}

fn ids(tuples: &[CheckpointTuple]) -> Vec<CheckpointId> {
    tuples.iter().map(|tuple| tuple.checkpoint.id).collect()
}

#[tokio::test]
async fn ids_are_found_exactly_in_chains_of_any_length() {
    let (_dir, saver) = open();
    let mut talk = Talk::new("t");
    let mut known = Vec::new();
    for number in 0..40 {
        known.push(say(&saver, &mut talk, number).await);
        for id in &known {
            let selector = CheckpointSelector {
                id: Some(*id),
                load: Load::None,
                ..CheckpointSelector::head(&talk.thread)
            };
            assert_eq!(saver.get(&selector).await.unwrap().unwrap().checkpoint.id, *id);
            let mut bytes = *id.as_bytes();
            bytes[15] ^= 1;
            let near = CheckpointSelector { id: Some(CheckpointId::from_bytes(bytes)), ..selector };
            assert_eq!(saver.get(&near).await.unwrap(), None);
        }
    }
    for id in [CheckpointId::from_bytes([0; 16]), CheckpointId::from_bytes([255; 16])] {
        let selector = CheckpointSelector { id: Some(id), ..CheckpointSelector::head(&talk.thread) };
        assert_eq!(saver.get(&selector).await.unwrap(), None);
    }
}

#[tokio::test]
async fn listings_page_filter_and_merge_namespaces() {
    let (_dir, saver) = open();
    let (mut root, mut inner) = (Talk::new("t"), Talk::new("t"));
    inner.namespace = "inner".into();
    let mut all = Vec::new();
    for number in 0..150 {
        let talk = if number % 3 == 0 { &mut inner } else { &mut root };
        let mut step = talk.say(&message(number, 50));
        // The ids of the two namespaces are in the order of the commits.
        step.checkpoint.id = talk.ids.checkpoint_after(all.last().copied());
        step.metadata.extra =
            json!({ "turn": number / 10, "odd": number % 2 == 1 }).as_object().unwrap().clone().into();
        all.push(put(&saver, talk, step).await);
    }
    all.reverse();
    let everything = ListQuery { namespace: None, load: Load::None, ..ListQuery::new(&root.thread) };
    let list = async |query: ListQuery| ids(&saver.list(&query).await.unwrap());
    assert_eq!(list(everything.clone()).await, all);
    for limit in [0, 1, 7, 64, 65, 1000] {
        let page = list(ListQuery { limit: Some(limit), ..everything.clone() }).await;
        assert_eq!(page, all[..limit.min(150)]);
    }
    for start in [0, 1, 64, 149] {
        let page = list(ListQuery { before: Some(all[start]), limit: Some(5), ..everything.clone() }).await;
        assert_eq!(page, all[start + 1..(start + 6).min(150)]);
    }
    let one = list(ListQuery { namespace: Some("inner".into()), ..everything.clone() }).await;
    assert_eq!(one.len(), 50);
    let filter: Map<String, Json> = json!({ "turn": 3, "odd": true }).as_object().unwrap().clone();
    let found = saver.list(&ListQuery { filter, limit: Some(4), ..everything.clone() }).await.unwrap();
    assert_eq!(found.len(), 4);
    assert!(
        found.iter().all(|tuple| tuple.metadata.extra["turn"] == 3 && tuple.metadata.extra["odd"] == true)
    );
    assert_eq!(list(ListQuery { thread: "unknown".into(), ..everything.clone() }).await, []);
    assert_eq!(list(ListQuery { namespace: Some("unknown".into()), ..everything }).await, []);
}

#[tokio::test]
async fn values_are_taken_over_through_any_number_of_steps() {
    let (_dir, saver) = open();
    let mut talk = Talk::new("t");
    say(&saver, &mut talk, 0).await;
    for _ in 0..5 {
        let step = talk.empty();
        put(&saver, &mut talk, step).await;
    }
    let head = saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    let entry = &head.checkpoint.channels[MESSAGES];
    assert_eq!(Some(entry.version), talk.version);
    assert_eq!(entry.stored.value(), Some(&talk.messages.clone().into()));
    assert_eq!(
        entry.stored.value().unwrap().as_list().unwrap().base(),
        talk.version,
        "the answer says what is stored"
    );
}

/// Two channels that are written in one step have the same version. A list carried from one to the other names that
/// version as its base, and must not be taken for the other channel's.
#[tokio::test]
async fn a_list_carried_to_another_channel_is_stored_as_it_is() {
    let (_dir, saver) = open();
    let mut talk = Talk::new("t");
    let list = |from: usize| -> ListValue {
        (from..from + 4).map(|number| Element::from_json(&message(number, 100)).unwrap()).collect()
    };
    let mut step = talk.say(&message(0, 100));
    let version = step.checkpoint.channels[MESSAGES].version;
    for (channel, from) in [("a", 100), ("b", 200)] {
        let entry = ChannelEntry { version, stored: Stored::Value(list(from).into()) };
        step.checkpoint.channels.insert(channel.into(), entry);
    }
    put(&saver, &mut talk, step).await;

    let mut carried = list(100);
    carried.rebase(version);
    carried.push(Element::from_json(&message(9, 100)).unwrap());
    let mut step = talk.say(&message(1, 100));
    let version = step.checkpoint.channels[MESSAGES].version;
    let entry = ChannelEntry { version, stored: Stored::Value(carried.clone().into()) };
    step.checkpoint.channels.insert("b".into(), entry);
    put(&saver, &mut talk, step).await;
    let head = saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    assert_eq!(head.checkpoint.channels["b"].stored.value(), Some(&carried.into()));
}

#[tokio::test]
async fn refusals_store_nothing() {
    let (_dir, saver) = open();
    let mut talk = Talk::new("t");
    say(&saver, &mut talk, 0).await;
    let first = talk.head;
    say(&saver, &mut talk, 1).await;
    let query = ListQuery { namespace: None, ..ListQuery::new(&talk.thread) };
    let before = saver.list(&query).await.unwrap();

    let good = talk.say(&message(2, 200));
    let stale = StepCommit { expected_head: first, ..good.clone() };
    let error = saver.commit(stale).await.unwrap_err();
    assert!(
        matches!(&error, Error::Conflict { expected, found, .. } if *expected == first && *found == talk.head),
        "{error}"
    );
    let nowhere = StepCommit { parent: Some(CheckpointId::from_bytes([1; 16])), ..good.clone() };
    assert!(matches!(saver.commit(nowhere).await, Err(Error::NotFound { .. })));
    let mut unapplied = good.clone();
    unapplied.checkpoint.applied.push(talk.ids.task());
    assert!(matches!(saver.commit(unapplied).await, Err(Error::InvalidInput(_))));
    let mut unheld = good.clone();
    let entry = ChannelEntry { version: talk.ids.version_after(talk.version), stored: Stored::Held };
    unheld.checkpoint.channels.insert("title".into(), entry);
    assert!(matches!(saver.commit(unheld).await, Err(Error::InvalidInput(_))));
    let mut small = good.clone();
    small.checkpoint.id = CheckpointId::from_bytes([0; 16]);
    assert!(matches!(saver.commit(small).await, Err(Error::InvalidInput(_))));
    let mut elsewhere = talk.key();
    elsewhere.namespace = "inner".into();
    assert!(matches!(saver.put_writes(&elsewhere, &good.writes[0]).await, Err(Error::NotFound { .. })));
    elsewhere.thread = "unknown".into();
    assert!(matches!(saver.put_writes(&elsewhere, &good.writes[0]).await, Err(Error::NotFound { .. })));
    let other = StepCommit { thread: "unknown".into(), ..good.clone() };
    assert!(matches!(saver.commit(other).await, Err(Error::Conflict { found: None, .. })));

    assert_eq!(saver.list(&query).await.unwrap(), before);
    put(&saver, &mut talk, good).await;
    assert_eq!(saver.list(&query).await.unwrap().len(), 3);
}

/// Values that are too deep are refused by the encoder, in the middle of a commit: nothing of it may remain.
#[tokio::test]
async fn metadata_that_cannot_be_encoded_stores_nothing() {
    let (_dir, saver) = open();
    let mut talk = Talk::new("t");
    say(&saver, &mut talk, 0).await;
    let mut deep = json!(1);
    for _ in 0..200 {
        deep = json!([deep]);
    }
    let mut step = talk.say(&message(1, 200));
    step.checkpoint.next = vec!["a node of this step only".into()];
    step.metadata.extra.insert("deep".into(), deep);
    assert!(matches!(saver.commit(step.clone()).await, Err(Error::InvalidInput(_))));
    step.metadata.extra.clear();
    put(&saver, &mut talk, step.clone()).await;
    let head = saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    assert_eq!(head.checkpoint.next, step.checkpoint.next);
    assert_eq!(head.checkpoint.applied, step.checkpoint.applied);
}

#[tokio::test]
async fn a_deleted_thread_is_gone_and_begins_anew() {
    let (dir, saver) = open();
    let (mut talk, mut other) = (Talk::new("t"), Talk::new("other"));
    for number in 0..5 {
        say(&saver, &mut talk, number).await;
        say(&saver, &mut other, number).await;
    }
    let mut inner = Talk::new("t");
    inner.namespace = "inner".into();
    say(&saver, &mut inner, 1).await;
    let kept = saver.list(&ListQuery::new(&other.thread)).await.unwrap();
    saver.delete_thread(&talk.thread).await.unwrap();
    saver.delete_thread(&talk.thread).await.unwrap();
    let all = ListQuery { namespace: None, ..ListQuery::new(&talk.thread) };
    assert_eq!(saver.list(&all).await.unwrap(), []);
    assert_eq!(saver.list(&ListQuery::new(&other.thread)).await.unwrap(), kept);
    let mut again = Talk::new("t");
    say(&saver, &mut again, 7).await;
    assert_eq!(saver.list(&all).await.unwrap().len(), 1);
    saver.delete_thread(&again.thread).await.unwrap();
    saver.delete_thread(&other.thread).await.unwrap();
    saver.close().await;
    let conn = rusqlite::Connection::open(dir.path().join("db")).unwrap();
    for table in ["scope", "checkpoint", "element"] {
        let rows: i64 =
            conn.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0)).unwrap();
        assert_eq!(rows, 0, "{table}");
    }
}

#[tokio::test]
async fn a_lineage_with_a_missing_row_is_broken() {
    let (dir, saver) = open();
    let mut talk = Talk::new("t");
    let mut known = Vec::new();
    for number in 0..6 {
        let mut step = talk.say(&message(number, 200));
        if number > 0 {
            step.checkpoint.channels.get_mut(MESSAGES).unwrap().stored = Stored::Sentinel;
        }
        known.push(put(&saver, &mut talk, step).await);
    }
    let channels = BTreeSet::from([MESSAGES.into()]);
    let history = saver.delta_history(&talk.key(), &channels, None).await.unwrap();
    assert_eq!(history[MESSAGES].steps.len(), 5);
    assert_eq!(saver.summary(&talk.thread).await.unwrap()[&Namespace::root()].checkpoints, 6);

    let conn = threadkeep_pages::open(dir.path().join("db"), rusqlite::OpenFlags::default()).unwrap();
    conn.execute("UPDATE checkpoint SET tasks = NULL WHERE id = ?1", [known[2].as_bytes()]).unwrap();
    let error = saver.delta_history(&talk.key(), &channels, None).await.unwrap_err();
    assert!(matches!(&error, Error::BrokenLineage { checkpoint, .. } if *checkpoint == known[3]), "{error}");
    let error = saver.summary(&talk.thread).await.unwrap_err();
    assert!(matches!(&error, Error::BrokenLineage { checkpoint, .. } if *checkpoint == known[3]), "{error}");
    conn.execute("DELETE FROM checkpoint WHERE id = ?1", [known[2].as_bytes()]).unwrap();
    let error = saver.delta_history(&talk.key(), &channels, None).await.unwrap_err();
    assert!(matches!(&error, Error::BrokenLineage { checkpoint, .. } if *checkpoint == known[3]), "{error}");
    let error = saver.summary(&talk.thread).await.unwrap_err();
    assert!(matches!(&error, Error::BrokenLineage { checkpoint, .. } if *checkpoint == known[3]), "{error}");
    let child = CheckpointSelector { id: Some(known[3]), ..CheckpointSelector::head(&talk.thread) };
    assert!(matches!(saver.get(&child).await, Err(Error::BrokenLineage { .. })));
}

#[tokio::test]
async fn threads_and_namespaces_of_any_text_are_kept_apart() {
    let (_dir, saver) = open();
    let texts = ["", "a", "A", "a\0", "a\0b", "%", "ä", "a ", " a"];
    for (number, text) in texts.iter().enumerate() {
        let mut talk = Talk::new(text);
        say(&saver, &mut talk, number).await;
        let mut inner = Talk::new("shared");
        inner.namespace = Namespace::new(*text);
        say(&saver, &mut inner, number).await;
    }
    for (number, text) in texts.iter().enumerate() {
        let content = |tuple: CheckpointTuple| {
            tuple.checkpoint.channels[MESSAGES].stored.value().unwrap().to_json().unwrap()[0].clone()
        };
        let head = saver.get(&CheckpointSelector::head(&(*text).into())).await.unwrap().unwrap();
        assert_eq!(content(head), message(number, 200));
        let inner =
            CheckpointSelector { namespace: (*text).into(), ..CheckpointSelector::head(&"shared".into()) };
        assert_eq!(content(saver.get(&inner).await.unwrap().unwrap()), message(number, 200));
    }
}

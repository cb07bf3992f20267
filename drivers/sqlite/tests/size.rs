//! What a long thread costs on disk and per step.

mod common;

use std::path::Path;

use common::{MESSAGES, Talk, message};
use threadkeep::saver::{CheckpointSelector, Saver};
use threadkeep::value::Element;
use threadkeep_sqlite::{Options, SqliteSaver, Synchronous};

const STEPS: usize = 2000;

/// Bytes of the pages of each table, its indexes included.
fn table_bytes(path: &Path) -> Vec<(String, i64)> {
    let conn = rusqlite::Connection::open(path).unwrap();
    let mut statement = conn.prepare("SELECT name, sum(pgsize) FROM dbstat GROUP BY name ORDER BY name").unwrap();
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
    rows.map(Result::unwrap).collect()
}

fn len(step: usize) -> usize {
    500 + step * 7919 % 1000
}

#[tokio::test]
async fn a_thread_of_two_thousand_full_steps_takes_little_more_than_its_messages() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoints.db");
    let options = Options { synchronous: Synchronous::Normal, ..Options::default() };
    let saver = SqliteSaver::open(&path, &options).unwrap();
    let mut talk = Talk::new("t");
    let mut raw = 0;
    for number in 0..STEPS {
        let message = message(number, len(number));
        raw += Element::from_json(&message).unwrap().bytes().len();
        let step = talk.say(&message);
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    }
    let head = saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    let list = head.checkpoint.channels[MESSAGES].stored.value().unwrap().as_list().unwrap();
    assert_eq!(*list, talk.messages);
    assert_eq!(list.len(), STEPS);
    saver.close().await;

    let file = std::fs::metadata(&path).unwrap().len();
    let tables = table_bytes(&path);
    let elements = tables.iter().find(|(name, _)| name == "element").unwrap().1;
    let others: i64 = tables.iter().filter(|(name, _)| name != "element").map(|(_, bytes)| bytes).sum();
    let steps = i64::try_from(STEPS).unwrap();
    println!("{raw} bytes of messages; file {file}, elements {elements}, others per step {}", others / steps);
    println!("{tables:?}");
    assert!(file * 100 < raw as u64 * 125, "{file} bytes for {raw} bytes of messages");
    // The empty tables and indexes take a page each, whatever the length of the thread.
    let bare = 9 * 16_384;
    assert!((others - bare) / steps < 100, "{others} bytes beside the elements");
}

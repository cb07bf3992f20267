use rusqlite::OptionalExtension as _;
use serde_json::json;
use threadkeep::saver::{CheckpointSelector, Saver};
use threadkeep::value::Element;
use threadkeep::{Error, Result};

use super::{STAGES, samples, trained};
use crate::tests::common::{MESSAGES, Talk};
use crate::write::commit::Work;
use crate::{Options, SqliteSaver};

/// A message that is similar to the others but not equal.
fn message(number: usize) -> serde_json::Value {
    let word = |at: usize| ["checkpoint", "thread", "reducer", "lineage", "snapshot", "channel"][at % 6];
    let words: Vec<_> = (0..250).map(|at| word(at * at + number * 7 + at * number / 3)).collect();
    json!({ "type": "ai", "id": format!("lc_run--{number:032x}"), "content": words.join(" "), "n": number })
}

async fn talk(saver: &SqliteSaver, talk: &mut Talk, numbers: std::ops::Range<usize>) {
    for number in numbers {
        let step = talk.say(&message(number));
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    }
}

async fn head(saver: &SqliteSaver, talk: &Talk) -> Result<bool> {
    let head = saver.get(&CheckpointSelector::head(&talk.thread)).await?.unwrap();
    Ok(head.checkpoint.channels[MESSAGES].stored.value() == Some(&talk.messages.clone().into()))
}

fn sizes(path: &std::path::Path) -> Vec<(u8, i64)> {
    let conn = rusqlite::Connection::open(path).unwrap();
    let mut statement = conn.prepare("SELECT body, length(body) FROM element ORDER BY key").unwrap();
    let row = |row: &rusqlite::Row<'_>| Ok((row.get::<_, Vec<u8>>(0)?[0], row.get(1)?));
    statement.query_map([], row).unwrap().map(std::result::Result::unwrap).collect()
}

#[tokio::test]
async fn a_dictionary_is_trained_used_and_needed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let options = Options::default();
    let saver = SqliteSaver::open(&path, &options).unwrap();
    let mut one = Talk::new("t");
    let train = |stage| samples(&path, &options, stage).and_then(|samples| trained(samples, stage)).unwrap();
    talk(&saver, &mut one, 0..40).await;
    assert_eq!(train(&STAGES[0]), None, "there is too little to train on");
    talk(&saver, &mut one, 40..200).await;
    let dictionary = train(&STAGES[0]).unwrap();
    assert_eq!(train(&STAGES[1]), None, "there is too little for a large one");
    saver.write(Work::Dictionary(1, dictionary.clone())).await.unwrap();
    saver.write(Work::Dictionary(1, b"another, which comes too late".to_vec())).await.unwrap();
    talk(&saver, &mut one, 200..250).await;
    assert!(head(&saver, &one).await.unwrap());
    let sizes = sizes(&path);
    let mean = |codec: u8| {
        let of: Vec<i64> = sizes.iter().filter(|(c, _)| *c == codec).map(|(_, size)| *size).collect();
        of.iter().sum::<i64>() / i64::try_from(of.len()).unwrap()
    };
    assert!(sizes.iter().rev().take(50).all(|(codec, _)| *codec == 2), "from then on it is used");
    assert!(mean(2) * 3 < mean(1) * 2, "{} bytes with the dictionary, {} without", mean(2), mean(1));
    saver.close().await;

    // Another process finds the dictionary; one that does not compress reads what is compressed.
    for compression in [true, false] {
        let options = Options { compression, ..Options::default() };
        let saver = SqliteSaver::open(&path, &options).unwrap();
        assert!(head(&saver, &one).await.unwrap());
        let at = one.messages.len();
        talk(&saver, &mut one, at..at + 1).await;
        assert_eq!(self::sizes(&path).last().unwrap().0, if compression { 2 } else { 0 });
        assert_eq!(saver.check().await.unwrap(), []);
        saver.close().await;
    }

    let conn = threadkeep_pages::open(&path, rusqlite::OpenFlags::default()).unwrap();
    conn.execute("UPDATE dictionary SET body = CAST(substr(body, 1, 999) || x'00' AS BLOB)", []).unwrap();
    let saver = SqliteSaver::open(&path, &options).unwrap();
    assert!(matches!(head(&saver, &one).await, Err(Error::Corrupt { .. })));
    assert_ne!(saver.check().await.unwrap(), []);
    conn.execute("DELETE FROM dictionary", []).unwrap();
    assert!(matches!(head(&saver, &one).await, Err(Error::Corrupt { .. })));
}

/// The dictionary that the newest message was packed with. Parts of lists are elements of other spaces.
fn newest(path: &std::path::Path) -> Option<u8> {
    let conn = rusqlite::Connection::open(path).unwrap();
    let sql = "SELECT body FROM element WHERE key >> 30 & 3 = 0 ORDER BY key DESC LIMIT 1";
    let body: Vec<u8> = conn.query_row(sql, [], |row| row.get(0)).optional().unwrap()?;
    (body[0] == 2).then(|| body[1])
}

/// One of each size; elements of before each stay readable.
#[tokio::test]
async fn a_store_trains_its_dictionaries_by_itself() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let saver = SqliteSaver::open(&path, &Options::default()).unwrap();
    let mut one = Talk::new("t");
    let trained = async {
        for stage in 1..=STAGES.len() {
            while newest(&path).is_none_or(|number| usize::from(number) < stage) {
                let at = one.messages.len();
                for number in at..at + 30 {
                    // Longer than what is used of it.
                    let words =
                        [message(number), message(number + 1), message(number + 2), message(number + 3)];
                    one.messages.push(Element::from_json(&json!(words)).unwrap());
                }
                talk(&saver, &mut one, at + 30..at + 31).await;
            }
        }
    };
    tokio::time::timeout(std::time::Duration::from_mins(10), trained).await.expect("no dictionary");
    saver.close().await;
    let saver = SqliteSaver::open(&path, &Options::default()).unwrap();
    assert!(head(&saver, &one).await.unwrap());
    assert_eq!(saver.check().await.unwrap(), []);
    let conn = rusqlite::Connection::open(&path).unwrap();
    let mut statement = conn.prepare("SELECT length(body) FROM dictionary ORDER BY key").unwrap();
    let lengths: Vec<i64> =
        statement.query_map([], |row| row.get(0)).unwrap().map(std::result::Result::unwrap).collect();
    assert!(lengths.len() == STAGES.len() && lengths.is_sorted(), "{lengths:?}");
}

#[tokio::test]
async fn a_file_of_the_first_format_is_carried_over() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let plain = Options { compression: false, ..Options::default() };
    // Its pages had no checksums.
    let conn = rusqlite::Connection::open(&path).unwrap();
    conn.execute_batch("PRAGMA page_size = 16384; VACUUM").unwrap();
    drop(conn);
    let saver = SqliteSaver::open(&path, &plain).unwrap();
    let mut one = Talk::new("t");
    talk(&saver, &mut one, 0..5).await;
    saver.close().await;
    let conn = rusqlite::Connection::open(&path).unwrap();
    conn.execute_batch("DROP TABLE dictionary; PRAGMA user_version = 1").unwrap();
    drop(conn);
    for round in 0..2 {
        let saver = SqliteSaver::open(&path, &Options::default()).unwrap();
        assert!(head(&saver, &one).await.unwrap());
        talk(&saver, &mut one, 5 + round..6 + round).await;
        assert_eq!(saver.check().await.unwrap(), []);
        saver.close().await;
    }
    let codecs: Vec<u8> = sizes(&path).into_iter().map(|(codec, _)| codec).collect();
    assert_eq!(codecs, [0, 0, 0, 0, 0, 1, 1]);
    let conn = threadkeep_pages::open(&path, rusqlite::OpenFlags::default()).unwrap();
    let version: i32 = conn.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
    assert_eq!((version, threadkeep_pages::is_sealed(&conn).unwrap()), (2, false));
}

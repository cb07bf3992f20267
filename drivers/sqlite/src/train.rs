//! Training the dictionary of a database, once there is enough in it, on a thread of its own.

use std::path::{Path, PathBuf};

use threadkeep::Result;
use tokio::sync::{mpsc, oneshot};

use crate::commit::Work;
use crate::config::Options;
use crate::error::unavailable;
use crate::pack;
use crate::seal::Place;
use crate::sql::{Db, blob, integer};
use crate::writer::{Command, Message};

/// Elements of all kinds, spread over the threads and over their lengths: every one whose number has this remainder.
const SAMPLE: &str = "SELECT key, body FROM element WHERE key % ?1 = ?2 LIMIT ?3";

/// New bytes before the first look whether there is enough.
const FIRST_LOOK: u64 = 512 * 1024;
/// A dictionary is trained on at least so many bytes.
const ENOUGH: usize = 512 * 1024;
/// And on at most so many.
const PLENTY: usize = 6 << 20;
/// Bytes of one element that are looked at.
const LONGEST: usize = 8 * 1024;
const SAMPLES: u32 = 8000;
/// A dictionary costs its bytes once; it pays from some hundred messages on.
const DICTIONARY: usize = 48 * 1024;

/// When the writer has a dictionary trained.
pub(crate) struct Trainer {
    path: PathBuf,
    options: Options,
    queue: mpsc::WeakSender<Message>,
    /// The number of stored bytes at which to look next; none if nothing is to be done any more.
    next: Option<u64>,
}

impl Trainer {
    pub(crate) fn new(path: PathBuf, options: Options, queue: mpsc::WeakSender<Message>) -> Self {
        let next = options.compression.then_some(FIRST_LOOK);
        Self { path, options, queue, next }
    }

    /// Starts training if enough was stored since the last look.
    pub(crate) fn look(&mut self, db: &Db, stored: u64) {
        if self.next.is_none_or(|next| stored < next) {
            return;
        }
        self.next = match pack::has_dictionary(db) {
            Ok(true) => None,
            _ => Some(stored.saturating_mul(2)),
        };
        if self.next.is_none() {
            return;
        }
        let (path, options, queue) = (self.path.clone(), self.options.clone(), self.queue.clone());
        let train = move || match train(&path, &options) {
            Ok(Some(dictionary)) => {
                // The writer may have been closed meanwhile; nobody waits for the answer.
                let (reply, _) = oneshot::channel();
                let command = Command { work: Work::Dictionary(dictionary), reply };
                if let Some(queue) = queue.upgrade() {
                    drop(queue.blocking_send(Message::Work(command)));
                }
            }
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "no compression dictionary could be trained"),
        };
        let started = std::thread::Builder::new().name("threadkeep-train".to_owned()).spawn(train);
        if let Err(error) = started {
            tracing::warn!(%error, "no compression dictionary can be trained");
        }
    }
}

/// A dictionary for the database at `path`; none if there is too little in it.
fn train(path: &Path, options: &Options) -> Result<Option<Vec<u8>>> {
    let db = Db::reader(path, options)?;
    let mut samples: Vec<Vec<u8>> = Vec::new();
    let mut size = 0;
    // All of them, or each seventh if that is plenty.
    for stride in [7, 1] {
        samples.clear();
        size = 0;
        db.each(SAMPLE, rusqlite::params![stride, 0, SAMPLES], |row| {
            let place = Place::new("element", integer(row, 0)?);
            let mut bytes = db.unpack(place, blob(row, 1)?, None)?.to_vec();
            bytes.truncate(LONGEST);
            if size < PLENTY {
                size += bytes.len();
                samples.push(bytes);
            }
            Ok(())
        })?;
        if size >= 2 * ENOUGH {
            break;
        }
    }
    if size < ENOUGH {
        return Ok(None);
    }
    let dictionary = zstd::dict::from_samples(&samples, DICTIONARY);
    dictionary.map(Some).map_err(|error| unavailable(format!("zstd: {error}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use threadkeep::saver::{CheckpointSelector, Saver};
    use threadkeep::{Error, Result};

    use super::train;
    use crate::commit::Work;
    use crate::fault::common::{MESSAGES, Talk};
    use crate::{Options, SqliteSaver};

    /// A message that is like the others and not the same.
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
        talk(&saver, &mut one, 0..60).await;
        assert_eq!(train(&path, &options).unwrap(), None, "there is too little to train on");
        talk(&saver, &mut one, 60..450).await;
        let dictionary = train(&path, &options).unwrap().unwrap();
        saver.write(Work::Dictionary(dictionary.clone())).await.unwrap();
        saver.write(Work::Dictionary(b"another, which comes too late".to_vec())).await.unwrap();
        talk(&saver, &mut one, 450..500).await;
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
            assert_eq!(super::tests::sizes(&path).last().unwrap().0, if compression { 2 } else { 0 });
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

    #[tokio::test]
    async fn a_store_trains_its_dictionary_by_itself() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        let saver = SqliteSaver::open(&path, &Options::default()).unwrap();
        let mut one = Talk::new("t");
        let trained = async {
            while sizes(&path).last().is_none_or(|(codec, _)| *codec != 2) {
                let at = one.messages.len();
                talk(&saver, &mut one, at..at + 50).await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_mins(2), trained).await.expect("no dictionary");
        assert!(head(&saver, &one).await.unwrap());
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
}

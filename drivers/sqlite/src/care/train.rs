//! Training the dictionary of a database, once there is enough in it, on a thread of its own.

use std::path::{Path, PathBuf};

use threadkeep::Result;
use tokio::sync::{mpsc, oneshot};

use crate::config::Options;
use crate::error::unavailable;
use crate::rows::pack;
use crate::rows::seal::Place;
use crate::sql::{Db, blob, integer};
use crate::write::commit::Work;
use crate::write::writer::{Command, Message};

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
mod tests;

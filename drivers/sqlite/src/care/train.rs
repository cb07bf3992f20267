//! Training the dictionary of a database, once it has enough data, on a thread of its own.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use threadkeep::Result;
use tokio::sync::{mpsc, oneshot};

use crate::config::Options;
use crate::error::unavailable;
use crate::rows::pack;
use crate::rows::seal::RowKey;
use crate::sql::{Db, blob, integer};
use crate::write::commit::Work;
use crate::write::turn::{Command, Message};

/// Elements of all kinds, spread over threads and lengths: each one whose number has this remainder.
const SAMPLE: &str = "SELECT key, body FROM element WHERE key % ?1 = ?2 LIMIT ?3";

/// New bytes before the first check whether there is enough.
const FIRST_LOOK: u64 = 512 * 1024;
/// A dictionary is trained on at least this many bytes.
const ENOUGH: usize = 512 * 1024;
/// A dictionary is trained on at most this many bytes.
const PLENTY: usize = 6 << 20;
/// Bytes of one element that are used.
const LONGEST: usize = 8 * 1024;
const SAMPLES: u32 = 8000;
/// A dictionary costs its own bytes once; it pays off after a few hundred messages.
const DICTIONARY: usize = 48 * 1024;

/// Decides when the writer has a dictionary trained.
pub(crate) struct Trainer {
    path: PathBuf,
    options: Options,
    queue: mpsc::WeakSender<Message>,
    /// The number of stored bytes at which to check next; none once there is nothing left to do.
    next: Option<u64>,
    /// Whether the writer is closed; held while a training has the file open.
    closed: Arc<Mutex<bool>>,
}

/// A closed store has no connection: this waits for that of a training.
impl Drop for Trainer {
    fn drop(&mut self) {
        *self.closed.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }
}

impl Trainer {
    pub(crate) fn new(path: PathBuf, options: Options, queue: mpsc::WeakSender<Message>) -> Self {
        let next = options.compression.then_some(FIRST_LOOK);
        Self { path, options, queue, next, closed: Arc::default() }
    }

    /// Starts training if enough was stored since the last check.
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
        let closed = self.closed.clone();
        let read = move || {
            let closed = closed.lock().unwrap_or_else(PoisonError::into_inner);
            if *closed { Ok(None) } else { samples(&path, &options) }
        };
        let train = move || match read().and_then(trained) {
            Ok(Some(dictionary)) => {
                // The writer may have been closed meanwhile; the answer is not needed.
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

/// What a dictionary for the database at `path` is trained on; none if there is too little data.
fn samples(path: &Path, options: &Options) -> Result<Option<Vec<Vec<u8>>>> {
    let db = Db::reader(path, options)?;
    let mut samples: Vec<Vec<u8>> = Vec::new();
    let mut size = 0;
    // Every seventh element if that is enough, else all of them.
    for stride in [7, 1] {
        samples.clear();
        size = 0;
        db.each(SAMPLE, rusqlite::params![stride, 0, SAMPLES], |row| {
            let place = RowKey::new("element", integer(row, 0)?);
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
    Ok((size >= ENOUGH).then_some(samples))
}

/// A dictionary, if there is something to train it on.
fn trained(samples: Option<Vec<Vec<u8>>>) -> Result<Option<Vec<u8>>> {
    let Some(samples) = samples else { return Ok(None) };
    let dictionary = zstd::dict::from_samples(&samples, DICTIONARY);
    dictionary.map(Some).map_err(|error| unavailable(format!("zstd: {error}")))
}

#[cfg(test)]
mod tests;

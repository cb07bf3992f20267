//! Training the dictionaries of a database, once it has enough data, on a thread of its own.

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

/// Elements of all kinds, spread over threads: one in ?1 of those after ?2. Of long ones little would be used.
const SAMPLE: &str = "SELECT key, body FROM element \
     WHERE key > ?2 AND key % ?1 = 0 AND length(body) <= ?3 ORDER BY key LIMIT ?4";

/// A dictionary is trained on about this many bytes at most.
const PLENTY: usize = 6 << 20;
/// Bytes of one element that are used.
const LONGEST: usize = 8 * 1024;
/// Elements that are stored in more bytes are not read.
const LONG: u32 = 64 * 1024;
/// Elements that are read at once.
const PAGE: u32 = 100;

/// What a dictionary is trained on, and how long it is: it costs its own bytes once.
struct Stage {
    /// One element in this many is a sample; if those are not enough, one in the next number.
    strides: &'static [u32],
    /// The bytes of the samples are at least this many.
    enough: usize,
    /// Bytes of the dictionary.
    size: usize,
}

/// A small dictionary soon, because all that is stored before it takes half as much again; it pays off after some fifty
/// messages of two kilobytes. A large one, which makes messages a fiftieth smaller, once the database has seven megabytes
/// of elements: after as many more it pays off, too.
const STAGES: [Stage; 2] = [
    Stage { strides: &[7, 1], enough: 128 * 1024, size: 16 * 1024 },
    Stage { strides: &[7], enough: 1024 * 1024, size: 48 * 1024 },
];

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
        let next = options.compression.then_some(STAGES[0].enough as u64);
        Self { path, options, queue, next, closed: Arc::default() }
    }

    /// Starts training if enough was stored since the last check.
    pub(crate) fn look(&mut self, db: &Db, stored: u64) {
        if self.next.is_none_or(|next| stored < next) {
            return;
        }
        self.next = Some(stored.saturating_mul(2));
        // What cannot be read now is looked for again.
        let Ok(newest) = pack::newest_dictionary(db) else { return };
        let Some(stage) = STAGES.get(newest as usize) else {
            self.next = None;
            return;
        };
        let (path, options, queue) = (self.path.clone(), self.options.clone(), self.queue.clone());
        let closed = self.closed.clone();
        let read = move || {
            let closed = closed.lock().unwrap_or_else(PoisonError::into_inner);
            if *closed { Ok(None) } else { samples(&path, &options, stage) }
        };
        let train = move || match read().and_then(|samples| trained(samples, stage)) {
            Ok(Some(dictionary)) => {
                // The writer may have been closed meanwhile; the answer is not needed.
                let (reply, _) = oneshot::channel();
                let command = Command { work: Work::Dictionary(newest + 1, dictionary), reply };
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

/// What the dictionary of a stage is trained on, of the database at `path`; none if there is too little data.
fn samples(path: &Path, options: &Options, stage: &Stage) -> Result<Option<Vec<Vec<u8>>>> {
    let db = Db::reader(path, options)?;
    for stride in stage.strides {
        let mut samples: Vec<Vec<u8>> = Vec::new();
        let (mut size, mut last) = (0, 0);
        loop {
            let (mut read, after) = (0, last);
            db.each(SAMPLE, rusqlite::params![stride, after, LONG, PAGE], |row| {
                read += 1;
                last = integer(row, 0)?;
                let bytes = db.unpack(RowKey::new("element", last), blob(row, 1)?, None)?;
                let sample = bytes[..bytes.len().min(LONGEST)].to_vec();
                size += sample.len();
                samples.push(sample);
                Ok(())
            })?;
            if read < PAGE || size >= PLENTY {
                break;
            }
        }
        if size >= stage.enough {
            return Ok(Some(samples));
        }
    }
    Ok(None)
}

/// The dictionary of a stage, if there is something to train it on.
fn trained(samples: Option<Vec<Vec<u8>>>, stage: &Stage) -> Result<Option<Vec<u8>>> {
    let Some(samples) = samples else { return Ok(None) };
    let dictionary = zstd::dict::from_samples(&samples, stage.size);
    dictionary.map(Some).map_err(|error| unavailable(format!("zstd: {error}")))
}

#[cfg(test)]
mod tests;

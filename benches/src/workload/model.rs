//! The expected messages of a thread: a naive fold, and the digest by which stores are compared.

use std::collections::{HashSet, VecDeque};
use std::fmt::Write as _;
use std::sync::Arc;

use serde_json::Value as Json;
use sha2::{Digest as _, Sha256};
use threadkeep::channel::REMOVE_ALL_MESSAGES;

use super::{Emit, REACH, Start, Turn};

/// The messages of a thread, folded without the engine.
#[derive(Debug, Clone, Default)]
pub struct Model {
    messages: Vec<Arc<Json>>,
    /// The messages before each of the last turns, and the number of the first of these turns.
    starts: VecDeque<Vec<Arc<Json>>>,
    first: usize,
    /// Ids of all messages that ever existed: a message with a new id needs no search.
    seen: HashSet<String>,
}

impl Model {
    /// Folds a turn.
    pub fn turn(&mut self, turn: &Turn) {
        if let Start::Turn(number) = turn.start {
            // A script reaches back at most as far as `starts` does; a violation shows in the digest.
            if let Some(start) = number.checked_sub(self.first).and_then(|place| self.starts.get(place)) {
                self.messages.clone_from(start);
            }
        }
        self.starts.push_back(self.messages.clone());
        if self.starts.len() > REACH {
            self.starts.pop_front();
            self.first += 1;
        }
        for step in &turn.steps {
            if let (Emit::All(_), Some(last)) = (&step.emit, self.messages.len().checked_sub(1)) {
                self.messages.truncate(last);
            }
            for message in step.emit.messages() {
                self.fold(message);
            }
        }
    }

    fn fold(&mut self, message: &Json) {
        let id = &message["id"];
        let is_new = id.as_str().is_some_and(|id| !self.seen.contains(id));
        let place = if is_new { None } else { self.messages.iter().rposition(|have| have["id"] == *id) };
        if message["type"] != "remove" {
            if let Some(place) = place {
                self.messages[place] = Arc::new(message.clone());
            } else {
                self.seen.extend(id.as_str().map(str::to_owned));
                self.messages.push(Arc::new(message.clone()));
            }
        } else if *id == REMOVE_ALL_MESSAGES {
            self.messages.clear();
        } else if let Some(place) = place {
            self.messages.remove(place);
        }
    }

    /// The messages.
    pub fn messages(&self) -> &[Arc<Json>] {
        &self.messages
    }

    /// [`digest`] of the messages.
    pub fn digest(&self) -> String {
        digest(self.messages.iter().map(|message| &**message))
    }
}

/// The first 16 hexadecimal digits of SHA-256 over `type`, `id` and `content` of every message, each with a line end.
pub fn digest<'a>(messages: impl IntoIterator<Item = &'a Json>) -> String {
    let mut hasher = Sha256::new();
    for message in messages {
        for field in ["type", "id", "content"] {
            hasher.update(message[field].as_str().unwrap_or_default());
            hasher.update("\n");
        }
    }
    hasher.finalize()[..8].iter().fold(String::new(), |mut text, byte| {
        // Writing into a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

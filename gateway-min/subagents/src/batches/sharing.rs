//! The limit of a run and its batches is one, whichever processes work on these. The run writes what it has used of it
//! itself and with its direct subagents, and reads what the items have; their processes do the reverse ([`budgets`]).
//!
//! The limit belongs to the turn, as the lead's budget does: a run that goes on with the turn goes on with the limit, and
//! a turn that is answered again from its question has its own. So its name is that of the turn's first answer.
//!
//! [`budgets`]: super::budgets

use serde_json::Value as Json;
use threadkeep_agent::Tokens;
use threadkeep_records::Batches;
use tokio::sync::Mutex;

use crate::budget::first_answer;
use crate::progress::{signed, unsigned};

/// The name of the limit that binds the batches of a turn with this first answer.
pub(super) fn budget_id(thread_id: &str, answer: &str) -> String {
    format!("{thread_id}:{answer}")
}

/// What a run exchanges with its batches.
#[derive(Debug)]
pub(crate) struct Sharing {
    batches: Batches,
    thread_id: String,
    run_id: String,
    /// Locked during a database request.
    known: Mutex<Known>,
}

#[derive(Debug)]
enum Known {
    /// Nobody has looked whether an earlier run of the turn has left batches.
    Unread,
    /// There are none yet. Nobody but this run submits one.
    NoBatch,
    /// There are some.
    Shared {
        /// The name of the limit.
        id: String,
        /// What the run has written.
        written: Tokens,
    },
}

impl Sharing {
    pub(crate) fn new(batches: Batches, thread_id: &str, run_id: &str) -> Self {
        let (thread_id, run_id) = (thread_id.to_owned(), run_id.to_owned());
        Self { batches, thread_id, run_id, known: Mutex::new(Known::Unread) }
    }

    /// The run has submitted a batch, whose limit has the name of this answer.
    pub(crate) async fn submitted(&self, answer: &str) {
        let mut known = self.known.lock().await;
        if !matches!(*known, Known::Shared { .. }) {
            let id = budget_id(&self.thread_id, answer);
            *known = Known::Shared { id, written: Tokens::default() };
        }
    }

    /// Writes what the run has used without its batches, and returns what these have; `None` if there are none, or that
    /// cannot be read now. `turn` is the run's, if the caller has it.
    pub(crate) async fn exchange(&self, own: Tokens, turn: Option<&[Json]>) -> Option<Tokens> {
        let mut known = self.known.lock().await;
        let (id, used) = match &*known {
            Known::NoBatch => return None,
            Known::Shared { id, written } => (id.clone(), (own != *written).then(|| unsigned(own))),
            // Whether there is anything to share is read first.
            Known::Unread => {
                let Some(answer) = first_answer(turn?) else {
                    *known = Known::NoBatch;
                    return None;
                };
                (budget_id(&self.thread_id, answer), None)
            }
        };
        match self.batches.budget(&id, (&self.thread_id, &self.run_id), used).await {
            Ok(Some(found)) => {
                match &mut *known {
                    Known::Shared { written, .. } => *written = own,
                    unread => *unread = Known::Shared { id, written: Tokens::default() },
                }
                Some(signed(found.batches))
            }
            Ok(None) => {
                if let Known::Unread = &*known {
                    *known = Known::NoBatch;
                }
                None
            }
            Err(error) => {
                tracing::warn!(
                    run_id = self.run_id,
                    %error,
                    "a run and its batches do not know yet what the others have used"
                );
                None
            }
        }
    }
}

//! What a tool reports while it works.

use serde_json::Value as Json;
use tokio::sync::mpsc;

use super::loop_detection::Verdict;
use crate::Tokens;

/// How many reports wait for the loop; a tool that makes more waits.
const WAITING: usize = 64;

/// A report of a tool that is still working.
#[derive(Debug, Clone, PartialEq)]
pub enum Report {
    /// An event for the run's clients, in the stream mode `custom`.
    Custom(Json),
    /// What models did for the tool, once at its end.
    Usage {
        /// The configured name of the model.
        model: String,
        /// Who asked it.
        caller: String,
        /// How often.
        calls: u64,
        /// The tokens of these calls.
        tokens: Tokens,
    },
    /// Loop detection judged an answer of the subagent with this name.
    LoopChecked {
        /// The subagent.
        agent: String,
        /// The verdict.
        verdict: Verdict,
    },
}

/// Where a tool sends its reports. They reach the run's observer in this order, and before the tool's result.
#[derive(Debug, Clone)]
pub struct Reports(mpsc::Sender<Report>);

impl Reports {
    /// Reports that nobody reads.
    pub fn unread() -> Self {
        Self(mpsc::channel(1).0)
    }

    /// Reports, and where to read them.
    pub fn channel() -> (Self, mpsc::Receiver<Report>) {
        let (sender, receiver) = mpsc::channel(WAITING);
        (Self(sender), receiver)
    }

    /// Sends a report; without a reader it is dropped.
    pub async fn send(&self, report: Report) {
        // The reader is gone when the run is.
        let _ = self.0.send(report).await;
    }
}

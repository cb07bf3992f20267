//! What the tool `task` returns: the text for the model, and metadata for programs.
//!
//! Programs read the metadata ([`Recorded`]) and never the text. A [`TaskOutcome`] cannot hold a status that the
//! contract does not have, nor a verdict on a task that did not complete.

mod recorded;
mod text;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use threadkeep_agent::receipts::{Receipt, sha256};

use crate::acceptance::AcceptanceVerdict;
use crate::bounds::bounded;
use crate::citations::CitationVerdict;
use crate::contract::{Status, StopReason};

pub use recorded::Recorded;

/// The longest text of a result in the parent's conversation, in characters. Batches keep as much.
pub(crate) const TEXT_MAX: usize = 100_000;

/// The keys in the metadata of a result, which is the `additional_kwargs` of its tool message (service reference,
/// "Results of delegations").
pub mod keys {
    /// How the delegation ended.
    pub const STATUS: &str = "subagent_status";
    /// Which limit ended it early.
    pub const STOP_REASON: &str = "subagent_stop_reason";
    /// Why it did not complete.
    pub const ERROR: &str = "subagent_error";
    /// The report, bounded.
    pub const RESULT_BRIEF: &str = "subagent_result_brief";
    /// SHA-256 of the whole report.
    pub const RESULT_SHA256: &str = "subagent_result_sha256";
    /// The model that the subagent used.
    pub const MODEL_NAME: &str = "subagent_model_name";
    /// The tokens it used.
    pub const TOKEN_USAGE: &str = "subagent_token_usage";
    /// The receipts of its tool calls.
    pub const TOOL_RECEIPTS: &str = "subagent_tool_receipts";
    /// The verdict on its citations.
    pub const RECEIPT_VERDICT: &str = "subagent_receipt_verdict";
    /// The verdict on the criteria of the delegation.
    pub const ACCEPTANCE_VERDICT: &str = "subagent_acceptance_verdict";
}

/// How a delegation ended, and what it left.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskOutcome {
    /// How it ended.
    pub ending: Ending,
    /// Which limit ended it early.
    pub stop_reason: Option<StopReason>,
    /// The model that the subagent used.
    pub model_name: Option<String>,
    /// The tokens it used; `None` if its provider reports none.
    pub usage: Option<TokenUsage>,
    /// The receipts of its tool calls; `None` if none were harvested.
    pub receipts: Option<Vec<Receipt>>,
}

/// How a delegation ended.
#[allow(clippy::large_enum_variant, reason = "there is one a delegation, and most complete")]
#[derive(Debug, Clone, PartialEq)]
pub enum Ending {
    /// With a report.
    Completed(Report),
    /// Without one.
    Failed {
        /// Why.
        error: Option<String>,
    },
    /// It was cancelled.
    Cancelled {
        /// Why.
        error: Option<String>,
    },
    /// It took longer than its time limit.
    TimedOut {
        /// Which limit.
        error: Option<String>,
    },
    /// It reported no end.
    PollingTimedOut {
        /// Its time limit.
        timeout: Duration,
        /// The last status of the execution.
        execution_status: String,
    },
}

/// What a subagent reported, and what is known of it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Report {
    /// Its last message.
    pub text: String,
    /// The verdict on its citations, if receipts were harvested.
    pub citations: Option<CitationVerdict>,
    /// The verdict on the criteria, if some were given and could be checked.
    pub acceptance: Option<AcceptanceVerdict>,
}

/// Tokens that a subagent used, of all its model calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TokenUsage {
    /// Tokens of the requests.
    #[serde(rename = "input_tokens")]
    pub input: u64,
    /// Tokens of the answers.
    #[serde(rename = "output_tokens")]
    pub output: u64,
    /// Both, as the provider counts them.
    #[serde(rename = "total_tokens")]
    pub total: u64,
}

impl Ending {
    /// The status that the metadata has.
    pub const fn status(&self) -> Status {
        match self {
            Self::Completed(_) => Status::Completed,
            Self::Failed { .. } => Status::Failed,
            Self::Cancelled { .. } => Status::Cancelled,
            Self::TimedOut { .. } => Status::TimedOut,
            Self::PollingTimedOut { .. } => Status::PollingTimedOut,
        }
    }

    /// Why it did not complete, if that is known.
    fn error(&self) -> Option<&str> {
        match self {
            Self::Failed { error } | Self::Cancelled { error } | Self::TimedOut { error } => {
                error.as_deref().map(str::trim).filter(|error| !error.is_empty())
            }
            Self::Completed(_) | Self::PollingTimedOut { .. } => None,
        }
    }
}

impl TaskOutcome {
    /// An ending of which nothing else is known.
    pub fn new(ending: Ending) -> Self {
        Self { ending, stop_reason: None, model_name: None, usage: None, receipts: None }
    }

    /// A failure before a subagent started.
    pub fn failed(error: impl Into<String>) -> Self {
        Self::new(Ending::Failed { error: Some(error.into()) })
    }

    /// The text of the tool message.
    pub fn text(&self) -> String {
        text::of(&self.ending, self.stop_reason)
    }

    /// The metadata of the tool message, for its `additional_kwargs`.
    pub fn metadata(&self) -> Map<String, Value> {
        let mut found = Map::new();
        let mut put = |key: &str, value: Value| found.insert(key.to_owned(), value);
        put(keys::STATUS, json!(self.ending.status()));
        if let Some(reason) = self.stop_reason {
            put(keys::STOP_REASON, json!(reason));
        }
        match &self.ending {
            Ending::Completed(report) => {
                if !report.text.trim().is_empty() {
                    put(keys::RESULT_BRIEF, json!(bounded(&report.text)));
                    put(keys::RESULT_SHA256, json!(sha256(&report.text)));
                }
                if let Some(verdict) = &report.citations {
                    put(keys::RECEIPT_VERDICT, json!(verdict));
                }
                if let Some(verdict) = &report.acceptance {
                    put(keys::ACCEPTANCE_VERDICT, json!(verdict));
                }
            }
            ending => {
                let unexplained = matches!(ending, Ending::Failed { .. }).then(|| Status::Failed.phrase());
                if let Some(error) = ending.error().or(unexplained) {
                    put(keys::ERROR, json!(bounded(error)));
                }
            }
        }
        if let Some(model) = self.model_name.as_deref().map(str::trim).filter(|name| !name.is_empty()) {
            put(keys::MODEL_NAME, json!(model));
        }
        if let Some(usage) = self.usage {
            put(keys::TOKEN_USAGE, json!(usage));
        }
        if let Some(receipts) = self.receipts.as_deref().filter(|receipts| !receipts.is_empty()) {
            put(keys::TOOL_RECEIPTS, json!(receipts));
        }
        found
    }
}

#[cfg(test)]
mod tests;

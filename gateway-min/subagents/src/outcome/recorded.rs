//! The metadata of a result, read back.

use serde::Deserialize as _;
use serde_json::{Map, Value};
use threadkeep_agent::receipts::{Receipt, contiguous, sha256};

use super::{TokenUsage, keys};
use crate::acceptance::AcceptanceVerdict;
use crate::bounds::bounded;
use crate::citations::CitationVerdict;
use crate::contract::{Status, StopReason};

/// A status that earlier versions wrote: out of turns, with or without a report.
const LEGACY_OUT_OF_TURNS: &str = "max_turns_reached";

/// What the metadata of a result says. Malformed parts count as absent.
#[derive(Debug, Clone, PartialEq)]
pub struct Recorded {
    /// How the delegation ended.
    pub status: Status,
    /// Which limit ended it early.
    pub stop_reason: Option<StopReason>,
    /// The report, bounded.
    pub result_brief: Option<String>,
    /// SHA-256 of the whole report.
    pub result_sha256: Option<String>,
    /// Why it did not complete.
    pub error: Option<String>,
    /// The model that the subagent used.
    pub model_name: Option<String>,
    /// The tokens it used.
    pub usage: Option<TokenUsage>,
    /// The receipts of its tool calls.
    pub receipts: Vec<Receipt>,
    /// The verdict on its citations.
    pub citations: Option<CitationVerdict>,
    /// The verdict on the criteria.
    pub acceptance: Option<AcceptanceVerdict>,
}

impl Recorded {
    /// Reads a tool message's `additional_kwargs`. `None` if they are not those of a delegation's result.
    pub fn from_metadata(metadata: &Map<String, Value>) -> Option<Self> {
        let text = |key: &str| {
            let text = metadata.get(key).and_then(Value::as_str).map(str::trim);
            text.filter(|text| !text.is_empty()).map(str::to_owned)
        };
        let result_brief = text(keys::RESULT_BRIEF);
        let (status, stop_reason) = match metadata.get(keys::STATUS)?.as_str()? {
            LEGACY_OUT_OF_TURNS if result_brief.is_some() => {
                (Status::Completed, Some(StopReason::TurnCapped))
            }
            LEGACY_OUT_OF_TURNS => (Status::Failed, Some(StopReason::TurnCapped)),
            status => {
                let reason = metadata.get(keys::STOP_REASON).and_then(Value::as_str);
                (Status::parse(status)?, reason.and_then(StopReason::parse))
            }
        };
        let usage = metadata.get(keys::TOKEN_USAGE).and_then(|usage| TokenUsage::deserialize(usage).ok());
        let completed = |key: &str| metadata.get(key).filter(|_| status == Status::Completed);
        Some(Self {
            status,
            stop_reason,
            result_sha256: text(keys::RESULT_SHA256).filter(|digest| is_sha256(digest)),
            error: text(keys::ERROR),
            model_name: text(keys::MODEL_NAME),
            usage,
            receipts: metadata.get(keys::TOOL_RECEIPTS).and_then(contiguous).unwrap_or_default(),
            citations: completed(keys::RECEIPT_VERDICT).and_then(CitationVerdict::from_json),
            acceptance: completed(keys::ACCEPTANCE_VERDICT).and_then(AcceptanceVerdict::from_json),
            result_brief,
        })
    }

    /// What a ledger keeps as the result: the report, or why there is none.
    pub fn ledger_brief(&self) -> String {
        let brief = self.result_brief.as_deref().or(self.error.as_deref());
        bounded(brief.unwrap_or(self.status.phrase()))
    }

    /// The digest that a ledger keeps: of the whole report, or of [`ledger_brief`](Self::ledger_brief).
    pub fn ledger_digest(&self) -> String {
        self.result_sha256.clone().unwrap_or_else(|| sha256(&self.ledger_brief()))
    }
}

fn is_sha256(digest: &str) -> bool {
    digest.len() == 64 && digest.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

//! The verdict on a report's citations.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use threadkeep_agent::receipts::{Receipt, ReceiptStatus};

use super::claims::claims_actions;
use super::parse::cited;

const SOURCE: &str = "receipt_citations";
const REQUIREMENT: &str = "cited_ids_in_execution_record";
/// What a ledger says of claims without a citation (service reference, "Citations").
const NO_CITATIONS: &str = "citations: UNVERIFIED \u{2014} action claims without receipt citations";
/// What a ledger says after the counts (service reference, "Citations").
const LIMITS: &str = " \u{2014} execution evidence only, does not validate claim correctness";

/// Which citations of a report refer to a call that succeeded: `subagent_receipt_verdict` (service reference,
/// "Citations").
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CitationVerdict {
    source: String,
    requirement: String,
    /// Whether no citation failed, or nothing was claimed that needs one.
    pub citation_resolved: bool,
    /// The ids of all citations.
    pub cited: Vec<String>,
    /// Those of calls that succeeded.
    pub resolved: Vec<String>,
    /// Those of calls that did not, or of another tool.
    pub failed: Vec<FailedCitation>,
    /// Those that no receipt has.
    pub unknown: Vec<String>,
    /// Whether the report claims actions and cites nothing.
    pub no_citation_claims: bool,
}

/// A citation of a receipt that does not support it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedCitation {
    /// The receipt's id.
    pub id: String,
    /// Why.
    pub reason: String,
}

impl CitationVerdict {
    /// Checks the citations of `report` against `receipts`, those that its author saw.
    pub fn of(report: &str, receipts: &[Receipt]) -> Self {
        let citations = cited(report);
        let (mut resolved, mut failed, mut unknown) = (Vec::new(), Vec::new(), Vec::new());
        for citation in &citations {
            let id = citation.id();
            match receipts.iter().find(|receipt| receipt.number == citation.number) {
                None => unknown.push(id),
                Some(receipt) => match reason_against(receipt, citation.anchor.as_deref()) {
                    Some(reason) => failed.push(FailedCitation { id, reason }),
                    None => resolved.push(id),
                },
            }
        }
        let no_citation_claims = citations.is_empty() && claims_actions(report, !receipts.is_empty());
        Self {
            source: SOURCE.to_owned(),
            requirement: REQUIREMENT.to_owned(),
            citation_resolved: failed.is_empty() && unknown.is_empty() && !no_citation_claims,
            cited: citations.iter().map(super::Citation::id).collect(),
            resolved,
            failed,
            unknown,
            no_citation_claims,
        }
    }

    /// A stored verdict; `None` if it is malformed or contradicts itself.
    pub fn from_json(stored: &Value) -> Option<Self> {
        let verdict = Self::deserialize(stored).ok()?;
        let judged = verdict.resolved.len() + verdict.failed.len() + verdict.unknown.len();
        let clean = verdict.failed.is_empty() && verdict.unknown.is_empty();
        let consistent = verdict.source == SOURCE
            && verdict.requirement == REQUIREMENT
            && judged == verdict.cited.len()
            && !(verdict.no_citation_claims && judged > 0)
            && verdict.citation_resolved == (clean && !verdict.no_citation_claims);
        consistent.then_some(verdict)
    }

    /// The verdict in a ledger's entry; `None` for a report that claims nothing.
    pub fn ledger_text(&self) -> Option<String> {
        if self.no_citation_claims {
            return Some(NO_CITATIONS.to_owned());
        }
        if self.cited.is_empty() {
            return None;
        }
        let counts = [(self.failed.len(), "failed"), (self.unknown.len(), "unknown")];
        let more = counts.into_iter().filter(|(count, _)| *count > 0);
        let more: Vec<String> = more.map(|(count, what)| format!(", {count} {what}")).collect();
        Some(format!("citations: {} resolved{}{LIMITS}", self.resolved.len(), more.concat()))
    }
}

/// Why a receipt does not support its citation.
fn reason_against(receipt: &Receipt, anchor: Option<&str>) -> Option<String> {
    let stamp = &receipt.stamp;
    if stamp.status != ReceiptStatus::Success {
        return Some(format!("receipt status={}", stamp.status.as_str()));
    }
    let anchor = anchor.filter(|anchor| *anchor != stamp.tool_name)?;
    Some(format!("cited as {anchor}, receipt is of {}", stamp.tool_name))
}

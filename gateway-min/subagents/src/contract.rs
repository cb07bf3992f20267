//! The words in which the result of a delegation is recorded. The file `contracts/subagent_status_contract.json` at the
//! root of the repository lists them for clients; a test keeps it equal.

use serde::{Deserialize, Serialize};

/// How a delegation ended: `subagent_status` (service reference, "Status vocabularies").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The subagent ended with a report.
    Completed,
    /// It ended without one.
    Failed,
    /// It was cancelled.
    Cancelled,
    /// It took longer than its time limit.
    TimedOut,
    /// It reported no end within its time limit and a grace period.
    PollingTimedOut,
}

impl Status {
    /// Every status, in the order of the contract file.
    pub const ALL: [Self; 5] =
        [Self::Completed, Self::Failed, Self::Cancelled, Self::TimedOut, Self::PollingTimedOut];

    /// The value in metadata, events and ledgers.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::TimedOut => "timed_out",
            Self::PollingTimedOut => "polling_timed_out",
        }
    }

    /// The status of this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == name)
    }

    /// What a ledger says of a delegation that left no text (service reference, "Results of delegations").
    pub const fn phrase(self) -> &'static str {
        match self {
            Self::Completed => "Task Succeeded.",
            Self::Failed => "Task failed.",
            Self::Cancelled => "Task cancelled by user.",
            Self::TimedOut => "Task timed out.",
            Self::PollingTimedOut => "Task polling timed out.",
        }
    }
}

/// Which limit ended a subagent early: `subagent_stop_reason` (service reference, "Status vocabularies").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// Its token budget.
    TokenCapped,
    /// Its number of turns.
    TurnCapped,
    /// It repeated the same tool calls.
    LoopCapped,
}

impl StopReason {
    /// Every reason, in the order of the contract file.
    pub const ALL: [Self; 3] = [Self::TokenCapped, Self::TurnCapped, Self::LoopCapped];

    /// The value in metadata, events and ledgers.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::TokenCapped => "token_capped",
            Self::TurnCapped => "turn_capped",
            Self::LoopCapped => "loop_capped",
        }
    }

    /// The reason of this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.as_str() == name)
    }

    /// The reason in the text of a result.
    pub const fn label(self) -> &'static str {
        match self {
            Self::TokenCapped => "token budget",
            Self::TurnCapped => "turn budget",
            Self::LoopCapped => "repeated tool-call loop",
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_contract_file_and_the_types_agree() {
        let file: Value =
            serde_json::from_str(include_str!("../../../contracts/subagent_status_contract.json")).unwrap();
        let mut keys: Vec<&str> = file.as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(keys, ["description", "status", "stop_reason", "version"], "and nothing else");
        assert_eq!(file["version"], 2);
        assert_eq!(file["status"], json!(Status::ALL.map(Status::as_str)));
        assert_eq!(file["stop_reason"], json!(StopReason::ALL.map(StopReason::as_str)));
        assert_eq!(file["status"], json!(Status::ALL), "as serde writes them");
        assert_eq!(file["stop_reason"], json!(StopReason::ALL));
    }

    #[test]
    fn names_are_read_back_and_others_are_not() {
        assert!(Status::ALL.iter().all(|status| Status::parse(status.as_str()) == Some(*status)));
        assert!(StopReason::ALL.iter().all(|reason| StopReason::parse(reason.as_str()) == Some(*reason)));
        assert_eq!((Status::parse("Completed"), Status::parse("max_turns_reached")), (None, None));
        assert_eq!(StopReason::parse("subagent_limit_capped"), None);
    }
}

//! How an execution ends, and what its parent gets.

use serde_json::Value as Json;
use threadkeep::state::StateSnapshot;
use threadkeep_agent::Ended;
use threadkeep_agent::model::message;
use threadkeep_records::{ExecutionEnd, ExecutionRow, ExecutionStatus};

use crate::acceptance::{self, AcceptanceVerdict};
use crate::citations::CitationVerdict;
use crate::contract::StopReason;
use crate::evidence::harvest;
use crate::execution::{CANCELLED, End, ExecutionError, Work, messages};
use crate::outcome::{Ending, Report, TaskOutcome, TokenUsage};
use crate::progress::Progress;

/// The error of a failed model call that says nothing else.
const LLM_FAILED: &str = "LLM request failed";
/// The result of a subagent that said nothing.
const NO_RESPONSE: &str = "No response generated";

impl Work {
    /// The terminal status of the execution.
    pub(crate) fn end(
        &self,
        end: End,
        state: Option<&StateSnapshot>,
    ) -> Result<ExecutionEnd, ExecutionError> {
        let progress = Progress::of(state)?;
        let messages = messages(state)?;
        let (status, error, stop_reason) = match end {
            End::Refused(refused) => (ExecutionStatus::Failed, Some(refused.to_string()), None),
            End::Agent(Err(error)) => (ExecutionStatus::Failed, Some(error.to_string()), None),
            // A cancelled parent comes first, even if the time is up as well.
            End::TimedOut if !self.cancel.is_cancelled() => {
                let seconds = self.definition.timeout.as_secs();
                let error = format!("Execution timed out after {seconds} seconds");
                (ExecutionStatus::TimedOut, Some(error), None)
            }
            End::TimedOut | End::Stopped | End::Agent(Ok(Ended::Cancelled)) => {
                (ExecutionStatus::Cancelled, Some(CANCELLED.to_owned()), None)
            }
            End::Agent(Ok(Ended::Done { stop_reason, .. })) => {
                let reason = progress.stop_reason.clone().or(stop_reason);
                let reason = reason.as_deref().and_then(StopReason::parse);
                let (status, error) = self.judged(&messages, reason, state);
                (status, error, reason)
            }
        };
        let usage = progress.by_model();
        let stop_reason = stop_reason.map(|reason| reason.as_str().to_owned());
        Ok(ExecutionEnd { status, error, stop_reason, usage })
    }

    /// The status of an agent that stopped by itself: by its last answer.
    fn judged(
        &self,
        messages: &[Json],
        reason: Option<StopReason>,
        state: Option<&StateSnapshot>,
    ) -> (ExecutionStatus, Option<String>) {
        let answer = messages.iter().rfind(|message| message::kind(message) == "ai");
        let text = answer.map(message::text).filter(|text| !text.trim().is_empty());
        if let Some(detail) = answer.and_then(message::fallback_reason) {
            let detail = Some(detail.to_owned()).filter(|detail| !detail.is_empty());
            return (ExecutionStatus::Failed, text.or(detail).or_else(|| Some(LLM_FAILED.to_owned())));
        }
        // Stopped before its next model call.
        let unfinished = state.is_some_and(|state| !state.next.is_empty());
        if unfinished && text.is_none() {
            let error = match reason {
                Some(StopReason::TurnCapped) | None => {
                    format!("Reached max_turns={}", self.definition.max_turns)
                }
                Some(reason) => format!("Reached the limit of its {}", reason.label()),
            };
            return (ExecutionStatus::Failed, Some(error));
        }
        (ExecutionStatus::Completed, None)
    }

    /// What the parent gets of an execution that has ended.
    pub(crate) async fn outcome(
        &self,
        row: &ExecutionRow,
        state: Option<&StateSnapshot>,
    ) -> Result<TaskOutcome, ExecutionError> {
        let messages = messages(state)?;
        let progress = Progress::of(state)?;
        let error = row.error.clone();
        let completed = row.status == ExecutionStatus::Completed;
        let receipts = if self.receipts { harvest(completed, &messages) } else { None };
        let ending = match row.status {
            ExecutionStatus::Completed => {
                let text = report(&messages);
                let citations = receipts.as_deref().map(|receipts| CitationVerdict::of(&text, receipts));
                let acceptance = self.accepted(&progress, &messages).await;
                Ending::Completed(Report { text, citations, acceptance })
            }
            ExecutionStatus::Cancelled => Ending::Cancelled { error },
            ExecutionStatus::TimedOut => Ending::TimedOut { error },
            ExecutionStatus::Failed | ExecutionStatus::Pending | ExecutionStatus::Running => {
                Ending::Failed { error }
            }
        };
        let usage = progress.tokens().map(|tokens| TokenUsage {
            input: tokens.input_tokens,
            output: tokens.output_tokens,
            total: tokens.total_tokens,
        });
        Ok(TaskOutcome {
            ending,
            stop_reason: row.stop_reason.as_deref().and_then(StopReason::parse),
            model_name: Some(row.model_name.clone().unwrap_or_else(|| self.model.clone())),
            usage,
            receipts,
        })
    }

    /// The verdict on the criteria, by the files of the thread and the commands that ran.
    async fn accepted(&self, progress: &Progress, messages: &[Json]) -> Option<AcceptanceVerdict> {
        let mut commands = progress.commands.clone();
        commands.add(messages);
        let workspace = self.delegator.agents.thread_dir(&self.row.thread_id);
        acceptance::check(self.criteria.as_ref()?, &workspace, commands.executions()).await
    }
}

/// The report: the text of the last answer or, without an answer, of the last message.
pub(crate) fn report(messages: &[Json]) -> String {
    let answer = messages.iter().rfind(|message| message::kind(message) == "ai").or(messages.last());
    let text = answer.map(message::text).unwrap_or_default();
    if text.trim().is_empty() { NO_RESPONSE.to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_report_without_a_word_is_no_response() {
        let answer = |text: &str| json!({"type": "ai", "content": text});
        for text in ["", "\n\n", " "] {
            assert_eq!(report(&[answer("I look."), answer(text)]), NO_RESPONSE, "{text:?}");
        }
        assert_eq!(report(&[]), NO_RESPONSE);
        assert_eq!(report(&[answer("\n\nDone. ")]), "\n\nDone. ", "as it is");
    }
}

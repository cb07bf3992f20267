//! How an attempt at an item ends: it is written, the item is given back, or the attempt does not count.

use std::time::Duration;

use serde_json::json;
use threadkeep::id::ThreadId;
use threadkeep_records::{
    Ended, ExecutionEnd, ExecutionRow, ExecutionStatus, ExecutionTokens, ItemEnd, ItemResult, OperationKind,
    persistently,
};

use super::AttemptEnd;
use super::endings::Unwritten;
use super::item::{AtWork, Why};
use super::subagent::{Done, Joined};
use crate::bounds::first;
use crate::execution::ExecutionError;
use crate::outcome::Ending;
use crate::progress::Progress;

/// The longest error of an item, in characters (delegation, section 5.6).
const ERROR_MAX: usize = 4_000;

/// The pauses between the attempts to write how an attempt ends, as long as the database is unavailable.
const PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

impl AtWork {
    /// The subagent ended by itself.
    pub(super) async fn ended(&self, ended: Joined, row: &ExecutionRow) -> AttemptEnd {
        match ended {
            Ok(Ok(Some(done))) => self.finalize(done).await,
            Ok(Ok(None)) if self.worker.stop.is_cancelled() => self.release(Some(row)).await,
            // It was cancelled, because the claim does not hold any more.
            Ok(Ok(None)) => self.abandoned(row).await,
            // Nothing was done: what the batch has used could not be read.
            Ok(Err(ExecutionError::Records(error))) if error.is_unavailable() => {
                tracing::warn!(item_id = self.item.claim.item_id, %error, "a batch item could not be started");
                self.release(Some(row)).await
            }
            Ok(Err(error)) => self.unfinished(&error, row).await,
            Err(panic) => self.failed(&panic.to_string(), Some(row)).await,
        }
    }

    /// The subagent was stopped.
    pub(super) async fn interrupted(
        &self,
        why: Why,
        ended: Option<Joined>,
        row: &ExecutionRow,
        timeout: Duration,
    ) -> AttemptEnd {
        match (why, ended) {
            (Why::Lost, _) => self.abandoned(row).await,
            // It was faster.
            (_, Some(Ok(Ok(Some(done))))) => self.finalize(done).await,
            (Why::Stopping, _) => self.release(Some(row)).await,
            (Why::Stuck, _) => {
                let error =
                    format!("Execution timed out after {} seconds and did not stop", timeout.as_secs());
                self.ended_without(ExecutionStatus::TimedOut, &error, Some(row)).await
            }
        }
    }

    async fn finalize(&self, done: Done) -> AttemptEnd {
        let settings = &self.worker.batching.settings;
        let Done { outcome, row, end } = done;
        let (result, counts_as) = match outcome.ending {
            Ending::Completed(report) => {
                let result = first(&report.text, settings.max_result_chars);
                let succeeded = ItemResult::Succeeded {
                    result: result.to_owned(),
                    preview: first(result, settings.result_preview_max_chars).to_owned(),
                    truncated: result.len() < report.text.len(),
                    verdict: report.acceptance.map(|verdict| json!(verdict)),
                };
                (succeeded, AttemptEnd::Succeeded)
            }
            Ending::Failed { error } | Ending::Cancelled { error } | Ending::TimedOut { error } => {
                let error = error.unwrap_or_else(|| "Task failed.".to_owned());
                (ItemResult::Failed { error: first(&error, ERROR_MAX).to_owned() }, AttemptEnd::Failed)
            }
            Ending::PollingTimedOut { .. } => {
                (ItemResult::Failed { error: "Task polling timed out.".to_owned() }, AttemptEnd::Failed)
            }
        };
        let tokens = |usage: crate::outcome::TokenUsage| ExecutionTokens {
            input_tokens: usage.input,
            output_tokens: usage.output,
            total_tokens: usage.total,
        };
        let item = ItemEnd {
            result,
            model_name: outcome.model_name,
            stop_reason: outcome.stop_reason.map(|reason| reason.as_str().to_owned()),
            token_usage: outcome.usage.map(tokens),
        };
        self.write_end(item, Some(&row), Some(end), counts_as).await
    }

    /// A store failed, not the subagent: the next attempt goes on where this one stopped.
    async fn unfinished(&self, error: &ExecutionError, row: &ExecutionRow) -> AttemptEnd {
        let error = first(&error.to_string(), ERROR_MAX).to_owned();
        let result = ItemResult::Failed { error };
        let item = ItemEnd { result, model_name: None, stop_reason: None, token_usage: None };
        self.write_end(item, Some(row), None, AttemptEnd::Failed).await
    }

    /// The attempt failed for a reason of ours; it costs an attempt, so that nothing is tried for ever.
    pub(super) async fn failed(&self, error: &str, row: Option<&ExecutionRow>) -> AttemptEnd {
        self.ended_without(ExecutionStatus::Failed, error, row).await
    }

    /// Ends the attempt in place of its subagent, with the tokens that its checkpoints show. If they cannot be read,
    /// its execution is not ended: the next attempt goes on with it, and after the last one its tokens are counted
    /// later.
    async fn ended_without(
        &self,
        status: ExecutionStatus,
        error: &str,
        row: Option<&ExecutionRow>,
    ) -> AttemptEnd {
        let error = first(error, ERROR_MAX).to_owned();
        let (mut end, mut tokens) = (None, None);
        if let Some(row) = row
            && let Ok(progress) = self.progress(row).await
        {
            let usage = progress.by_model();
            end = Some(ExecutionEnd { status, error: Some(error.clone()), stop_reason: None, usage });
            tokens = progress.tokens();
        }
        let item = ItemEnd {
            result: ItemResult::Failed { error },
            model_name: None,
            stop_reason: None,
            token_usage: tokens,
        };
        self.write_end(item, row, end, AttemptEnd::Failed).await
    }

    async fn write_end(
        &self,
        end: ItemEnd,
        row: Option<&ExecutionRow>,
        execution_end: Option<ExecutionEnd>,
        counts_as: AttemptEnd,
    ) -> AttemptEnd {
        let claim = self.item.claim.clone();
        let ended = Ended { execution: row.cloned().zip(execution_end), claim, end };
        let mut pause = PAUSE;
        loop {
            match self.worker.endings.end(ended.clone()).await {
                Ok(true) => return counts_as,
                Ok(false) => return self.without_claim(row).await,
                Err(Unwritten { error, may_pass }) => {
                    // If nobody writes it, the next claim finds the subagent's work done; after the last one nobody
                    // looks.
                    let item_id = &ended.claim.item_id;
                    tracing::warn!(item_id, error, "the end of a batch item was not recorded");
                    if !(may_pass && self.may_try_again(&mut pause).await) {
                        return AttemptEnd::Lost;
                    }
                }
            }
        }
    }

    /// Waits before the next attempt to write; false if there is none: the claim is lost, or the process stops.
    async fn may_try_again(&self, pause: &mut Duration) -> bool {
        let next = (*pause * 2).min(LONGEST_PAUSE);
        let pause = std::mem::replace(pause, next);
        tokio::select! {
            biased;
            () = self.lost.cancelled() => false,
            () = self.worker.stop.cancelled() => false,
            () = tokio::time::sleep(pause) => true,
        }
    }

    async fn without_claim(&self, row: Option<&ExecutionRow>) -> AttemptEnd {
        match row {
            Some(row) => self.abandoned(row).await,
            None => AttemptEnd::Lost,
        }
    }

    /// Gives the item back; the subagent has stopped.
    pub(super) async fn release(&self, row: Option<&ExecutionRow>) -> AttemptEnd {
        let (batches, claim) = (self.worker.delegator.records.batches(), &self.item.claim);
        let mut pause = PAUSE;
        loop {
            match persistently(|| batches.release(claim)).await {
                Ok(true) => return AttemptEnd::Released,
                Ok(false) => return self.without_claim(row).await,
                Err(error) if error.may_pass() && self.may_try_again(&mut pause).await => {}
                Err(error) => {
                    let item_id = &claim.item_id;
                    tracing::warn!(item_id, %error, "a batch item stays claimed until its lease expires");
                    return AttemptEnd::Lost;
                }
            }
        }
    }

    /// The attempt does not count; the subagent has stopped. Records what it used, and leaves nothing of a deleted
    /// thread.
    async fn abandoned(&self, row: &ExecutionRow) -> AttemptEnd {
        let records = &self.worker.delegator.records;
        match self.progress(row).await {
            Ok(progress) if !progress.usage.is_empty() => {
                if let Err(error) = records.batches().used(&self.batch.id, row, &progress.by_model()).await {
                    tracing::warn!(execution_id = row.execution_id, %error, "the tokens of an attempt were not recorded");
                }
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(execution_id = row.execution_id, %error, "the tokens of an attempt cannot be read");
            }
        }
        if let Err(error) = self.clean_up(row).await {
            tracing::warn!(thread = row.child_thread, %error, "the checkpoints of a deleted batch item may remain");
        }
        AttemptEnd::Lost
    }

    /// Deletes the subagent's checkpoints if its thread is gone: it may have written one after the deletion looked. A
    /// worker that stops does not wait for a deletion to end; another one removes what that leaves.
    async fn clean_up(&self, row: &ExecutionRow) -> Result<(), ExecutionError> {
        let records = &self.worker.delegator.records;
        loop {
            if !records.batches().exists(&row.execution_id).await? {
                // Whatever it contains: the id of an item is of its batch's, which is random and never given again.
                return Ok(self
                    .worker
                    .accessor
                    .delete_thread(&ThreadId::from(row.child_thread.as_str()))
                    .await?);
            }
            let holder = records.runs().active_for_thread(&row.thread_id).await?;
            if holder.is_none_or(|holder| holder.operation_kind != OperationKind::Delete) {
                return Ok(());
            }
            tokio::select! {
                biased;
                () = self.worker.stop.cancelled() => return Ok(()),
                () = tokio::time::sleep(self.worker.poll()) => {}
            }
        }
    }

    async fn progress(&self, row: &ExecutionRow) -> threadkeep::Result<Progress> {
        let thread = ThreadId::from(row.child_thread.as_str());
        Progress::of(self.worker.accessor.get(&thread, None).await?.as_ref())
    }
}

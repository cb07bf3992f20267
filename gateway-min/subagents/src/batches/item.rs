//! One attempt at one item: from its claim to its result, or until the claim does not hold any more.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use chrono::TimeDelta;
use serde_json::{Map, Value as Json, json};
use threadkeep::id::{IdSource, ThreadId};
use threadkeep::step::StepWriter;
use threadkeep_agent::AgentError;
use threadkeep_agent::model::message;
use threadkeep_agent::tools::Reports;
use threadkeep_records::{
    BatchRow, ClaimedItem, Delegating, Ended, ExecutionEnd, ExecutionKind, ExecutionRow, ExecutionStatus,
    ExecutionTokens, ItemEnd, ItemResult, Launch, NewExecution, OperationKind, persistently,
};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::endings::Unwritten;
use super::spec::Spec;
use super::worker::Worker;
use super::{AttemptEnd, ItemBudget};
use crate::acceptance::Criteria;
use crate::admission::Slot;
use crate::bounds::first;
use crate::catalog::Definition;
use crate::execution::{End, ExecutionError, Work};
use crate::outcome::{Ending, TaskOutcome};
use crate::progress::Progress;
use crate::prompts;
use crate::watched::{GRACE, STOPS_WITHIN, Settled};

/// The longest error of an item, in characters (delegation, section 5.6).
const ERROR_MAX: usize = 4_000;

/// How often to look whether an earlier attempt of this process, whose claim was lost, has stopped.
const STOPPED_EVERY: Duration = Duration::from_millis(50);
/// The pauses between the attempts to write how an attempt ends, as long as the database is unavailable.
const PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// An item that this process has claimed. Its lease is renewed until it is dropped, also by a runtime that ends.
pub(super) struct AtWork {
    pub(super) worker: Arc<Worker>,
    pub(super) batch: Arc<BatchRow>,
    pub(super) item: ClaimedItem,
    /// Cancelled when the claim does not hold any more.
    pub(super) lost: CancellationToken,
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.worker.leases.remove(&self.item.claim);
    }
}

/// What came of a subagent's work.
pub(crate) struct Done {
    outcome: TaskOutcome,
    row: ExecutionRow,
    end: ExecutionEnd,
}

/// Why the subagent was not waited for any longer.
enum Why {
    Lost,
    Stopping,
    Stuck,
}

impl Why {
    /// How the work ends for extensions.
    fn ends_as(&self) -> ExecutionStatus {
        match self {
            Self::Lost | Self::Stopping => ExecutionStatus::Cancelled,
            Self::Stuck => ExecutionStatus::TimedOut,
        }
    }
}

impl AtWork {
    /// Works on the item in this slot, which is given back at the end.
    pub(super) async fn work(self, slot: Slot) {
        let waited = i64::try_from(slot.waited().as_millis()).unwrap_or(i64::MAX);
        let end = self.attempt(waited).await;
        let batching = Arc::clone(&self.worker.batching);
        drop(self);
        batching.count(end);
        drop(slot);
        batching.wake();
    }

    async fn attempt(&self, waited: i64) -> AttemptEnd {
        while self.worker.leases.has_earlier(&self.item.claim) {
            tokio::select! {
                () = self.lost.cancelled() => return AttemptEnd::Lost,
                () = tokio::time::sleep(STOPPED_EVERY) => {}
            }
        }
        let prepared = match self.prepare().await {
            Ok(prepared) => prepared,
            Err(error) => return self.failed(&error, None).await,
        };
        let (spec, model) = prepared;
        let row = match self.launch(&spec.definition, &model, waited).await {
            Ok(Some(row)) => row,
            Ok(None) => return AttemptEnd::Lost,
            Err(error) if error.is_unavailable() => {
                tracing::warn!(item_id = self.item.claim.item_id, %error, "a batch item could not be started");
                return self.release(None).await;
            }
            // Its execution cannot be read, later neither.
            Err(error) => return self.failed(&error.to_string(), None).await,
        };
        let account = self.worker.budgets.of(&self.batch, spec.budget.as_ref());
        let budget = account.map(|account| ItemBudget::new(account, self.item.claim.clone(), row.clone()));
        let cancel = self.worker.stop.child_token();
        let criteria: Option<Vec<Json>> =
            self.item.acceptance_criteria.as_ref().map(|list| list.iter().map(|text| json!(text)).collect());
        let criteria = criteria.as_deref().and_then(Criteria::normalise);
        let work = Arc::new(Work {
            delegator: Arc::clone(&self.worker.delegator),
            accessor: self.worker.accessor.clone().with_ids(Arc::new(IdSource::default())),
            counted: false,
            row: row.clone(),
            model,
            messages: vec![message::human(self.task(criteria.as_ref()))],
            sections: prompts::sections(spec.receipts, criteria.is_some(), false),
            definition: Arc::new(spec.definition),
            criteria,
            budget: budget.as_ref().map(ItemBudget::budget),
            item: budget,
            receipts: spec.receipts,
            reports: Reports::unread(),
            namespace: String::new(),
            cancel: cancel.clone(),
            settled: Settled::default(),
            begun: Mutex::default(),
        });
        let (deadline, timeout) = (work.deadline() + GRACE, work.definition.timeout);
        let executor = Arc::clone(&work);
        let mut running = tokio::spawn(async move { executor.work_on_item().await });
        // Extensions learn of the end from the subagent or, if it failed, panicked or was given up, here: before anybody
        // can begin the next attempt, which is the same task for them.
        match self.wait(&mut running, deadline).await {
            Ok(ended) => {
                work.stopped(ExecutionStatus::Failed).await;
                self.ended(ended, &row).await
            }
            Err(why) => {
                // Before anything else: while the subagent works, nobody else must begin.
                let ended = stopped(&cancel, running).await;
                work.stopped(why.ends_as()).await;
                self.interrupted(why, ended, &row, timeout).await
            }
        }
    }

    /// Waits for the subagent, as long as its work can count.
    async fn wait(&self, running: &mut JoinHandle<Worked>, deadline: Instant) -> Result<Joined, Why> {
        loop {
            let ends = self.worker.leases.ends(&self.item.claim);
            tokio::select! {
                biased;
                ended = &mut *running => return Ok(ended),
                () = self.lost.cancelled() => return Err(Why::Lost),
                () = self.worker.stop.cancelled() => return Err(Why::Stopping),
                () = tokio::time::sleep_until(deadline) => return Err(Why::Stuck),
                () = tokio::time::sleep_until(ends) => {
                    if self.worker.leases.ends(&self.item.claim) <= Instant::now() {
                        return Err(Why::Lost);
                    }
                }
            }
        }
    }

    /// The definition and the model, or why there is none.
    async fn prepare(&self) -> Result<(Spec, String), String> {
        let spec = Spec::from_json(&self.batch.execution_spec)
            .map_err(|error| format!("the batch was submitted by another version of Threadkeep: {error}"))?;
        let config = self.worker.delegator.config.current_async().await;
        let model =
            spec.definition.model_within(Some(&spec.model), &config).map_err(|error| error.to_string())?;
        let model = model.name.clone();
        Ok((spec, model))
    }

    async fn launch(
        &self,
        definition: &Definition,
        model: &str,
        waited_ms: i64,
    ) -> Result<Option<ExecutionRow>, threadkeep_records::RecordsError> {
        let timeout = TimeDelta::from_std(definition.timeout).unwrap_or(TimeDelta::MAX);
        let now = self.worker.delegator.records.now();
        let definition_json = match serde_json::to_value(definition) {
            Ok(Json::Object(map)) => map,
            _ => Map::new(),
        };
        let execution = NewExecution {
            execution_id: self.item.claim.item_id.clone(),
            thread_id: self.batch.thread_id.clone(),
            run_id: self.batch.run_id.clone(),
            delegating: Delegating::Item,
            parent_execution: None,
            kind: ExecutionKind::BatchItem,
            tool_call_id: self.batch.tool_call_id.clone(),
            agent_name: definition.name.clone(),
            definition: definition_json,
            definition_digest: definition.digest(),
            description: self.item.item_key.clone(),
            deadline: now.checked_add_signed(timeout).unwrap_or(chrono::DateTime::<chrono::Utc>::MAX_UTC),
        };
        let (asked, length) = (Instant::now(), self.worker.leases.length());
        let launch = Launch { execution, model: model.to_owned(), waited_ms };
        let row = self.worker.delegator.records.batches().launch(&self.item.claim, length, launch).await?;
        if row.is_some() {
            self.worker.leases.renewed(&self.item.claim, asked);
        }
        Ok(row)
    }

    /// The task as the subagent reads it.
    fn task(&self, criteria: Option<&Criteria>) -> String {
        let task = format!(
            "Item key: {}\nThis item may be tried again after a failure. Use its key to recognise what an earlier attempt \
             has already done, and to avoid doing it twice.\n\n{}",
            self.item.item_key, self.item.prompt
        );
        criteria.map_or_else(|| task.clone(), |criteria| format!("{task}\n\n{}", criteria.section()))
    }

    /// The subagent ended by itself.
    async fn ended(&self, ended: Joined, row: &ExecutionRow) -> AttemptEnd {
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
    async fn interrupted(
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
    async fn failed(&self, error: &str, row: Option<&ExecutionRow>) -> AttemptEnd {
        self.ended_without(ExecutionStatus::Failed, error, row).await
    }

    /// Ends the attempt in place of its subagent, with the tokens that its checkpoints show. If they cannot be read, its
    /// execution is not ended: the next attempt goes on with it, and after the last one its tokens are counted later.
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
                    // If nobody writes it, the next claim finds the subagent's work done; after the last one nobody looks.
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
    async fn release(&self, row: Option<&ExecutionRow>) -> AttemptEnd {
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

    /// The attempt does not count; the subagent has stopped. Records what it used, and leaves nothing of a deleted thread.
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

    /// Deletes the subagent's checkpoints if its thread is gone: it may have written one after the deletion looked. A worker
    /// that stops does not wait for a deletion to end; another one removes what that leaves.
    async fn clean_up(&self, row: &ExecutionRow) -> Result<(), ExecutionError> {
        let records = &self.worker.delegator.records;
        loop {
            if !records.batches().exists(&row.execution_id).await? {
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

type Worked = Result<Option<Done>, ExecutionError>;
type Joined = Result<Worked, tokio::task::JoinError>;

/// Stops a subagent and waits for it; what came of it if it had ended, `None` if it had to be given up.
async fn stopped(cancel: &CancellationToken, mut running: JoinHandle<Worked>) -> Option<Joined> {
    cancel.cancel();
    if let Ok(ended) = tokio::time::timeout(STOPS_WITHIN, &mut running).await {
        return Some(ended);
    }
    running.abort();
    // Returns when it is dropped, so that it writes nothing afterwards.
    let _ = tokio::time::timeout(Duration::from_secs(1), running).await;
    None
}

impl Work {
    /// Works on an item of a batch that was launched: from its task, or from where an earlier process stopped. `None` if it
    /// was cancelled.
    async fn work_on_item(&self) -> Worked {
        let thread = ThreadId::from(self.row.child_thread.as_str());
        let mut writer = StepWriter::open(&self.accessor, &thread, None).await?;
        // One that has ended spends nothing any more, and must not wait for the sum of its batch.
        let is_done = writer.state().is_some_and(|state| state.next.is_empty());
        if let Some(item) = self.item.as_ref().filter(|_| !is_done) {
            item.begin(Progress::of(writer.state())?.by_model()).await?;
        }
        self.begin(writer.state().is_some()).await;
        let ended = match self.run(&mut writer).await? {
            End::Agent(Err(AgentError::Engine(error))) => {
                self.stopped(ExecutionStatus::Failed).await;
                return Err(error.into());
            }
            End::Agent(Err(AgentError::Stopping)) => {
                self.stopped(ExecutionStatus::Cancelled).await;
                return Ok(None);
            }
            ended => ended,
        };
        let state = writer.state().cloned();
        let end = self.end(ended, state.as_ref())?;
        if end.status == ExecutionStatus::Cancelled {
            self.stopped(end.status).await;
            return Ok(None);
        }
        let row = ExecutionRow {
            status: end.status,
            error: end.error.clone(),
            stop_reason: end.stop_reason.clone(),
            ..self.row.clone()
        };
        let outcome = self.outcome(&row, state.as_ref()).await?;
        self.stopped(row.status).await;
        Ok(Some(Done { outcome, row, end }))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Scenario 64: whatever becomes of an attempt after its launch, its subagent has stopped before anybody else may
    /// begin, also one that does not listen.
    #[tokio::test(start_paused = true)]
    async fn s64_a_subagent_that_does_not_stop_is_ended_before_its_item_is_given_back() {
        let steps = Arc::new(AtomicU64::new(0));
        let (cancel, counted) = (CancellationToken::new(), Arc::clone(&steps));
        let running = tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(10)).await;
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        assert!(stopped(&cancel, running).await.is_none());
        let after = steps.load(Ordering::Relaxed);
        assert!(after >= 400, "it had its time to stop: {after}");
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(steps.load(Ordering::Relaxed), after, "it does nothing afterwards");
        // One that ends by itself is waited for, with its result.
        let (cancel, done) = (CancellationToken::new(), CancellationToken::new());
        let (asked, ended) = (cancel.clone(), done.clone());
        let running = tokio::spawn(async move {
            asked.cancelled().await;
            tokio::time::sleep(Duration::from_secs(2)).await;
            ended.cancel();
            Ok(None)
        });
        assert!(matches!(stopped(&cancel, running).await, Some(Ok(Ok(None)))));
        assert!(done.is_cancelled());
    }
}

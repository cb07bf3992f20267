//! One attempt at one item: from its claim to its result, or until the claim does not hold any more.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use chrono::TimeDelta;
use serde_json::{Map, Value as Json, json};
use threadkeep::id::IdSource;
use threadkeep_agent::model::message;
use threadkeep_agent::tools::Reports;
use threadkeep_records::{
    BatchRow, ClaimedItem, Delegating, ExecutionKind, ExecutionRow, ExecutionStatus, Launch, NewExecution,
};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::spec::Spec;
use super::subagent::{Joined, Worked, stopped};
use super::worker::Worker;
use super::{AttemptEnd, ItemBudget};
use crate::acceptance::Criteria;
use crate::admission::Slot;
use crate::catalog::Definition;
use crate::execution::Work;
use crate::prompts;
use crate::watched::{GRACE, Settled};

/// How often to look whether an earlier attempt of this process, whose claim was lost, has stopped.
const STOPPED_EVERY: Duration = Duration::from_millis(50);

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

/// Why the subagent was not waited for any longer.
pub(super) enum Why {
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
            // Its execution cannot be read, which waiting does not change.
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
}

//! The token budgets of batches. A run's limit binds the sum of what it uses itself, of its subagents and of the items of
//! all its batches: in every process that works on them, and over restarts.
//!
//! The row of a batch has the sum of its items. Of a batch with a limit it is written after every answer of an item's model,
//! and before the work on an item begins, together with what the item has used before: in one transaction, which returns
//! what all processes have used for the run. Before each model call of an item it is read once more: others may have
//! used the limit up while the item's tools were at work. So the excess is at most the model calls under way. What the
//! run itself writes is in `sharing`.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use async_trait::async_trait;
use serde_json::Value as Json;
use threadkeep_agent::model::message;
use threadkeep_agent::{Middleware, Tokens};
use threadkeep_records::{
    BatchRow, Batches, BudgetTokens, Claim, ExecutionRow, ExecutionTokens, RecordsError, UsedSoFar,
    persistently,
};

use super::spec::RunBudget;
use crate::budget::{Budget, most};
use crate::progress::signed;

/// The budgets of the batches that this process works on.
pub(super) struct Budgets {
    batches: Batches,
    known: Mutex<HashMap<String, Weak<Account>>>,
}

impl Budgets {
    pub(super) fn new(batches: Batches) -> Self {
        Self { batches, known: Mutex::default() }
    }

    /// The budget of a batch, if its run had one.
    pub(super) fn of(&self, batch: &BatchRow, run: Option<&RunBudget>) -> Option<Arc<Account>> {
        let run = run?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, account| account.strong_count() > 0);
        if let Some(account) = known.get(&batch.id).and_then(Weak::upgrade) {
            return Some(account);
        }
        let account = Arc::new(Account {
            batches: self.batches.clone(),
            batch_id: batch.id.clone(),
            before: run.used,
            budget: Budget::new(run.settings, None),
            unwritten: Mutex::default(),
            writing: tokio::sync::Mutex::default(),
        });
        known.insert(batch.id.clone(), Arc::downgrade(&account));
        Some(account)
    }
}

/// The budget of one batch.
pub(super) struct Account {
    batches: Batches,
    batch_id: String,
    /// What the run had used when it submitted the batch. It has written what it used since.
    before: ExecutionTokens,
    budget: Arc<Budget>,
    /// What is not in the batch's row yet, by execution and attempt.
    unwritten: Mutex<HashMap<(String, i64), UsedSoFar>>,
    /// Held by the one who writes: what is noted meanwhile is written together, next.
    writing: tokio::sync::Mutex<()>,
}

impl Account {
    fn unwritten(&self) -> MutexGuard<'_, HashMap<(String, i64), UsedSoFar>> {
        self.unwritten.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, used: UsedSoFar) {
        let attempt = (used.row.execution_id.clone(), used.row.attempt);
        self.unwritten().insert(attempt, used);
    }

    /// Writes what was noted, and takes over what all processes have used. Not cancel-safe.
    async fn write(&self) -> Result<(), RecordsError> {
        let _writing = self.writing.lock().await;
        let next = std::mem::take(&mut *self.unwritten());
        if next.is_empty() {
            // Another item has written it.
            return Ok(());
        }
        let spent = self.budget.spent();
        match self.batches.used_so_far(&self.batch_id, next.values().cloned().collect()).await {
            Ok(found) => {
                let mut used = self.of_all(found);
                // What this process has spent while it was written is in no row yet.
                used += self.budget.spent_since(spent);
                self.budget.at_least(used);
                Ok(())
            }
            Err(error) => {
                let mut unwritten = self.unwritten();
                for (attempt, used) in next {
                    unwritten.entry(attempt).or_insert(used);
                }
                Err(error)
            }
        }
    }

    /// What the run and all its batches have used, as the rows say.
    fn of_all(&self, found: BudgetTokens) -> Tokens {
        let mut used = most(signed(self.before), signed(found.run));
        used += signed(found.batches);
        used
    }

    /// Takes over what all processes have written. What this one has not, it knows.
    async fn read(&self) -> Result<(), RecordsError> {
        let found = self.batches.used_so_far(&self.batch_id, Vec::new()).await?;
        self.budget.at_least(self.of_all(found));
        Ok(())
    }

    /// [`Self::write`], which goes on if the future is dropped: it also writes what others have noted.
    async fn written(self: &Arc<Self>) -> Result<(), RecordsError> {
        let this = Arc::clone(self);
        let writing = tokio::spawn(async move { this.write().await });
        // It does not panic, and is not aborted while anybody waits.
        writing.await.unwrap_or(Ok(()))
    }
}

/// What an attempt at an item counts its tokens on.
#[derive(Clone)]
pub(crate) struct ItemBudget {
    account: Arc<Account>,
    claim: Claim,
    row: ExecutionRow,
}

impl ItemBudget {
    pub(super) fn new(account: Arc<Account>, claim: Claim, row: ExecutionRow) -> Self {
        // It is long, and stored.
        Self { account, claim, row: ExecutionRow { definition: None, ..row } }
    }

    /// The budget that binds the batch.
    pub(super) fn budget(&self) -> Arc<Budget> {
        Arc::clone(&self.account.budget)
    }

    fn note(&self, usage: BTreeMap<String, ExecutionTokens>) {
        self.account.note(UsedSoFar { claim: self.claim.clone(), row: self.row.clone(), usage });
    }

    /// Begins the attempt, which has used this before.
    ///
    /// # Errors
    /// What the batch has used cannot be read: nothing may be spent.
    pub(crate) async fn begin(&self, usage: BTreeMap<String, ExecutionTokens>) -> Result<(), RecordsError> {
        self.note(usage);
        persistently(|| self.account.written()).await
    }

    /// The attempt has used this by now. If it cannot be written, the process still counts it, and writes it with what
    /// comes next.
    pub(crate) async fn has_used(&self, usage: BTreeMap<String, ExecutionTokens>) {
        self.note(usage);
        if let Err(error) = self.account.written().await {
            tracing::warn!(
                batch_id = self.claim.batch_id,
                %error,
                "other processes do not know yet what an item of a batch has used"
            );
        }
    }

    /// The tokens of the whole batch, as this process knows them.
    #[cfg(test)]
    fn used(&self) -> Tokens {
        self.account.budget.used()
    }
}

#[async_trait]
impl Middleware for ItemBudget {
    async fn exchange(&self, turn: &[Json]) {
        // An answer is written before it is stored, with what others have used by then.
        if turn.last().is_some_and(|last| message::kind(last) == "ai") {
            return;
        }
        if let Err(error) = self.account.read().await {
            tracing::warn!(
                batch_id = self.claim.batch_id,
                %error,
                "an item of a batch does not know yet what others have used"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;
    use serde_json::json;
    use threadkeep_config::TokenBudget;
    use threadkeep_records::{
        Delegating, ExecutionKind, JsonObject, Launch, NewBatch, NewExecution, Records, RecordsOptions,
    };

    use super::*;
    use crate::batches::{Sharing, begin_run, new_batch};

    fn tokens(total: u64) -> BTreeMap<String, ExecutionTokens> {
        let tokens = ExecutionTokens { input_tokens: total, output_tokens: 0, total_tokens: total };
        BTreeMap::from([("m".to_owned(), tokens)])
    }

    fn spent(total: i64) -> Tokens {
        Tokens { input: total, output: 0, total }
    }

    async fn launched(records: &Records, number: usize) -> (BatchRow, Vec<(Claim, ExecutionRow)>) {
        begin_run(records).await;
        records.batches().submit(new_batch(number)).await.unwrap();
        claimed(records, "b", number).await
    }

    /// Claims and launches this number of items of a batch.
    async fn claimed(
        records: &Records,
        batch_id: &str,
        number: usize,
    ) -> (BatchRow, Vec<(Claim, ExecutionRow)>) {
        let batches = records.batches();
        let claimed = batches.claim(batch_id, "w", TimeDelta::hours(1), number, true).await.unwrap().unwrap();
        let mut rows = Vec::new();
        for item in claimed.items {
            let execution = NewExecution {
                execution_id: item.claim.item_id.clone(),
                thread_id: "t".into(),
                run_id: "r".into(),
                delegating: Delegating::Item,
                parent_execution: None,
                kind: ExecutionKind::BatchItem,
                tool_call_id: "c".into(),
                agent_name: "s".into(),
                definition: JsonObject::new(),
                definition_digest: "d".into(),
                description: item.item_key,
                deadline: records.now(),
            };
            let launch = Launch { execution, model: "m".into(), waited_ms: 0 };
            let row = batches.launch(&item.claim, TimeDelta::hours(1), launch).await.unwrap().unwrap();
            rows.push((item.claim, row));
        }
        (claimed.batch, rows)
    }

    /// What two processes and the run have used is known to both after the next answer of each; what could not be written
    /// is not lost, and nothing is counted twice.
    #[tokio::test]
    async fn each_process_knows_what_all_have_used() {
        let records = Records::open_memory(RecordsOptions::default()).await.unwrap();
        let (batch, rows) = launched(&records, 2).await;
        let run = RunBudget { settings: TokenBudget::default(), used: tokens(12)["m"] };
        let of = |(claim, row): &(Claim, ExecutionRow)| {
            // Processes share nothing.
            let account = Budgets::new(records.batches().clone()).of(&batch, Some(&run)).unwrap();
            ItemBudget::new(account, claim.clone(), row.clone())
        };
        let (one, other) = (of(&rows[0]), of(&rows[1]));
        one.begin(tokens(100)).await.unwrap();
        assert_eq!(one.used(), spent(112), "what the attempt had used before");
        other.begin(BTreeMap::new()).await.unwrap();
        assert_eq!(other.used(), spent(112));
        one.budget().spend(spent(10));
        one.has_used(tokens(110)).await;
        other.budget().spend(spent(5));
        other.has_used(tokens(5)).await;
        assert_eq!((one.used(), other.used()), (spent(122), spent(127)));
        // An answer that cannot be written now.
        records.fail_with("AS run_input_tokens", 1);
        one.budget().spend(spent(20));
        one.has_used(tokens(130)).await;
        assert_eq!(one.used(), spent(142), "it knows its own");
        one.budget().spend(spent(1));
        one.has_used(tokens(131)).await;
        assert_eq!(one.used(), spent(148));
        assert_eq!(records.batches().tokens("b").await.unwrap().total_tokens, 136);
        // The same process goes on after a restart.
        let again = of(&rows[0]);
        again.begin(tokens(131)).await.unwrap();
        assert_eq!(again.used(), spent(148), "once");
    }

    /// Two batches of a run have one limit, with what the run uses after their submission; another run's has its own.
    #[tokio::test]
    async fn the_batches_of_a_run_share_its_limit() {
        let records = Records::open_memory(RecordsOptions::default()).await.unwrap();
        let batches = records.batches();
        begin_run(&records).await;
        let run = RunBudget { settings: TokenBudget::default(), used: tokens(12)["m"] };
        let mut items = Vec::new();
        for (id, budget_id) in [("b", Some("t:a")), ("c", Some("t:a")), ("d", None)] {
            let budget_id = budget_id.map(str::to_owned);
            let new = NewBatch { id: id.into(), submission_key: id.into(), budget_id, ..new_batch(1) };
            batches.submit(new).await.unwrap();
            let (batch, mut rows) = claimed(&records, id, 1).await;
            let (claim, row) = rows.remove(0);
            let account = Budgets::new(batches.clone()).of(&batch, Some(&run)).unwrap();
            items.push(ItemBudget::new(account, claim, row));
        }
        for item in &items {
            item.begin(BTreeMap::new()).await.unwrap();
        }
        items[0].budget().spend(spent(100));
        items[0].has_used(tokens(100)).await;
        let of_run = Sharing::new(batches.clone(), "t", "r");
        let turn = [json!({"type": "human"}), json!({"type": "ai", "id": "a"})];
        assert_eq!(of_run.exchange(spent(12), Some(&turn)).await, Some(spent(100)));
        assert_eq!(of_run.exchange(spent(40), None).await, Some(spent(100)));
        items[1].budget().spend(spent(5));
        items[1].has_used(tokens(5)).await;
        items[2].budget().spend(spent(3));
        items[2].has_used(tokens(3)).await;
        assert_eq!((items[1].used(), items[2].used()), (spent(145), spent(15)));
        // A run that goes on with the turn in another process; a turn that is answered again has another limit.
        let next = Sharing::new(batches.clone(), "t", "r");
        assert_eq!(next.exchange(spent(40), None).await, None, "a subagent does not know the turn");
        assert_eq!(next.exchange(spent(40), Some(&turn)).await, Some(spent(105)));
        let other = [json!({"type": "human"}), json!({"type": "ai", "id": "e"})];
        assert_eq!(Sharing::new(batches.clone(), "t", "r").exchange(spent(1), Some(&other)).await, None);
        // What cannot be read now is read with the next call.
        records.fail_with("AS run_input_tokens", 1);
        assert_eq!(next.exchange(spent(41), None).await, None);
        assert_eq!(next.exchange(spent(41), None).await, Some(spent(105)));
        items[2].has_used(tokens(3)).await;
        items[0].has_used(tokens(100)).await;
        assert_eq!(items[0].used(), spent(146));
    }

    /// Items of one process share a budget as long as one of them is at work.
    #[tokio::test]
    async fn a_batch_has_one_budget_in_a_process() {
        let records = Records::open_memory(RecordsOptions::default()).await.unwrap();
        let (batch, _) = launched(&records, 1).await;
        let budgets = Budgets::new(records.batches().clone());
        let run: RunBudget =
            serde_json::from_value(json!({"settings": TokenBudget::default(), "used": tokens(1)["m"]}))
                .unwrap();
        let first = budgets.of(&batch, Some(&run)).unwrap();
        assert!(Arc::ptr_eq(&first, &budgets.of(&batch, Some(&run)).unwrap()));
        assert!(budgets.of(&batch, None).is_none());
    }
}

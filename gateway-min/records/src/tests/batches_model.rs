//! Random operations of several workers on batches, with time that jumps, compared with a small model.

use std::collections::BTreeMap;

use chrono::TimeDelta;
use proptest::prelude::*;

use super::batches::{batch, execution, failed, submit, succeeded};
use super::support::*;
use crate::*;

/// No jump of time ends within minutes of the end of a lease, because the server's clock moves too.
const LEASE_SECONDS: i64 = 35 * 60;
const MAX_ATTEMPTS: i64 = 2;

#[derive(Clone, Debug)]
enum Step {
    Submit { items: usize, live: u32, running: u32 },
    Claim { batch: usize, most: usize },
    Launch(usize),
    Renew(usize),
    Release(usize),
    Succeed(usize),
    Fail(usize),
    Pause(usize),
    Resume(usize),
    Cancel(usize),
    Retry { batch: usize, item: usize },
    Pass(i64),
}

fn step() -> impl Strategy<Value = Step> {
    let (batch, claim) = (0..3usize, 0..6usize);
    prop_oneof![
        1 => (1..6usize, 1..4u32, 1..4u32)
            .prop_map(|(items, live, running)| Step::Submit { items, live, running: running.min(live) }),
        6 => (batch.clone(), 0..4usize).prop_map(|(batch, most)| Step::Claim { batch, most }),
        4 => claim.clone().prop_map(Step::Launch),
        2 => claim.clone().prop_map(Step::Renew),
        1 => claim.clone().prop_map(Step::Release),
        3 => claim.clone().prop_map(Step::Succeed),
        3 => claim.prop_map(Step::Fail),
        1 => batch.clone().prop_map(Step::Pause),
        2 => batch.clone().prop_map(Step::Resume),
        1 => batch.clone().prop_map(Step::Cancel),
        2 => (batch, 0..6usize).prop_map(|(batch, item)| Step::Retry { batch, item }),
        2 => (1..5i64).prop_map(|tens| Step::Pass(tens * 600)),
    ]
}

struct Item {
    status: BatchItemStatus,
    attempt: i64,
    /// The claim and the end of its lease.
    lease: Option<(String, i64)>,
}

struct Batch {
    status: BatchStatus,
    live: usize,
    running: usize,
    items: Vec<Item>,
}

impl Batch {
    fn count(&self, statuses: &[BatchItemStatus]) -> usize {
        self.items.iter().filter(|item| statuses.contains(&item.status)).count()
    }

    fn refresh(&mut self) {
        if self.status.is_terminal() || self.items.iter().any(|item| !item.status.is_terminal()) {
            return;
        }
        let failed =
            self.count(&[BatchItemStatus::Failed]) > 0 && self.count(&[BatchItemStatus::Succeeded]) == 0;
        self.status = if failed { BatchStatus::Failed } else { BatchStatus::Completed };
    }
}

#[derive(Default)]
struct Model {
    now: i64,
    batches: Vec<Batch>,
    /// Every claim that was ever made, and its place.
    claims: Vec<(Claim, usize, usize)>,
}

impl Model {
    fn claim(&mut self, batch: usize, owner: &str, most: usize) -> Vec<usize> {
        use BatchItemStatus::{Failed, Leased, Pending, Queued, Running};
        let now = self.now;
        let batch = &mut self.batches[batch];
        for item in &mut batch.items {
            if item.lease.as_ref().is_some_and(|(_, expires)| *expires <= now) {
                item.lease = None;
                item.status = if item.attempt >= MAX_ATTEMPTS { Failed } else { Queued };
            }
        }
        batch.refresh();
        if most == 0 || !matches!(batch.status, BatchStatus::Queued | BatchStatus::Running) {
            return Vec::new();
        }
        while batch.count(&[Queued, Leased, Running]) < batch.live {
            let Some(item) = batch.items.iter_mut().find(|item| item.status == Pending) else { break };
            item.status = Queued;
        }
        let mut claimed = Vec::new();
        while claimed.len() < most && batch.count(&[Leased, Running]) < batch.running {
            let Some(position) = batch.items.iter().position(|item| item.status == Queued) else { break };
            let item = &mut batch.items[position];
            item.status = Leased;
            item.attempt += 1;
            item.lease = Some((owner.to_owned(), now + LEASE_SECONDS));
            claimed.push(position);
        }
        if !claimed.is_empty() {
            batch.status = BatchStatus::Running;
        }
        claimed
    }

    /// The item of a claim that holds.
    fn held(&mut self, (claim, batch, position): &(Claim, usize, usize)) -> Option<&mut Item> {
        let now = self.now;
        let item = &mut self.batches[*batch].items[*position];
        let holds =
            item.lease.as_ref().is_some_and(|(owner, expires)| *owner == claim.owner && *expires > now);
        holds.then_some(item)
    }
}

struct Checked {
    fixture: Fixture,
    model: Model,
    /// The newest execution of each item that was launched.
    rows: BTreeMap<String, ExecutionRow>,
}

impl Checked {
    fn place(&self, back: usize) -> Option<(Claim, usize, usize)> {
        let claims = &self.model.claims;
        claims.len().checked_sub(back + 1).map(|at| claims[at].clone())
    }

    async fn take(&mut self, number: usize, step: Step) {
        let batches = self.fixture.records.batches().clone();
        let id = |batch: usize| format!("b{batch}");
        let lease = TimeDelta::seconds(LEASE_SECONDS);
        match step {
            Step::Submit { items, live, running } => {
                let new = batch(&id(self.model.batches.len()), items, live, running);
                assert!(submit(&self.fixture.records, new).await.is_new);
                let pending = || Item { status: BatchItemStatus::Pending, attempt: 0, lease: None };
                self.model.batches.push(Batch {
                    status: BatchStatus::Queued,
                    live: live as usize,
                    running: running as usize,
                    items: (0..items).map(|_| pending()).collect(),
                });
            }
            Step::Pass(seconds) => {
                self.fixture.pass_seconds(seconds).await;
                self.model.now += seconds;
            }
            Step::Claim { batch, most } if batch < self.model.batches.len() => {
                let owner = format!("w{}:{number}", number % 3);
                let claimed = batches.claim(&id(batch), &owner, lease, most, true).await.unwrap().unwrap();
                let expected = self.model.claim(batch, &owner, most);
                let found = claimed.items.iter().map(|item| usize::try_from(item.position).unwrap());
                assert_eq!(found.collect::<Vec<_>>(), expected);
                let claims = claimed.items.into_iter().zip(expected);
                self.model.claims.extend(claims.map(|(item, position)| (item.claim, batch, position)));
            }
            Step::Launch(back) | Step::Renew(back) => {
                let Some(place) = self.place(back) else { return };
                let done = match step {
                    Step::Launch(_) => {
                        let new = execution(&self.fixture, &place.0);
                        let row = batches.launch(&place.0, lease, new).await.unwrap();
                        let launched = row.is_some();
                        self.rows.extend(row.map(|row| (row.execution_id.clone(), row)));
                        launched
                    }
                    _ => batches.renew(&place.0, lease).await.unwrap(),
                };
                let expires = self.model.now + LEASE_SECONDS;
                let held = self.model.held(&place);
                assert_eq!(done, held.is_some());
                let Some(item) = held else { return };
                item.lease = Some((place.0.owner.clone(), expires));
                if matches!(step, Step::Launch(_)) {
                    item.status = BatchItemStatus::Running;
                }
            }
            Step::Release(back) | Step::Succeed(back) | Step::Fail(back) => {
                let Some(place) = self.place(back) else { return };
                let row = self.rows.get(&place.0.item_id).cloned();
                let n = self.model.now.unsigned_abs();
                let tokens = ExecutionTokens { input_tokens: n, output_tokens: 1, total_tokens: n + 1 };
                let usage = BTreeMap::from([("m".to_owned(), tokens)]);
                let execution = |status| {
                    let usage = usage.clone();
                    Some((row.clone()?, ExecutionEnd { status, error: None, stop_reason: None, usage }))
                };
                let (completed, lost) =
                    (execution(ExecutionStatus::Completed), execution(ExecutionStatus::Failed));
                let done = match step {
                    Step::Release(_) => {
                        if let Some(row) = &row {
                            let (claim, row, usage) = (place.0.clone(), row.clone(), usage.clone());
                            let used = UsedSoFar { claim, row, usage };
                            batches.used_so_far(&place.0.batch_id, vec![used]).await.unwrap();
                        }
                        batches.release(&place.0).await
                    }
                    Step::Succeed(_) => batches.finalize(&place.0, succeeded("r"), completed).await,
                    _ => batches.finalize(&place.0, failed("e"), lost).await,
                };
                let held = self.model.held(&place);
                assert_eq!(done.unwrap(), held.is_some());
                let Some(item) = held else { return };
                item.lease = None;
                item.status = match step {
                    Step::Succeed(_) => BatchItemStatus::Succeeded,
                    Step::Fail(_) if item.attempt >= MAX_ATTEMPTS => BatchItemStatus::Failed,
                    _ => BatchItemStatus::Queued,
                };
                if matches!(step, Step::Release(_)) {
                    item.attempt -= 1;
                }
                self.model.batches[place.1].refresh();
            }
            Step::Pause(batch) | Step::Resume(batch) | Step::Cancel(batch)
                if batch < self.model.batches.len() =>
            {
                let (row, model) = match step {
                    Step::Pause(_) => (batches.pause(&id(batch)).await, &mut self.model.batches[batch]),
                    Step::Resume(_) => (batches.resume(&id(batch)).await, &mut self.model.batches[batch]),
                    _ => (batches.cancel(&id(batch)).await, &mut self.model.batches[batch]),
                };
                if !model.status.is_terminal() {
                    model.status = match (&step, model.status) {
                        (Step::Pause(_), _) => BatchStatus::Paused,
                        (Step::Resume(_), BatchStatus::Paused) => BatchStatus::Queued,
                        (Step::Cancel(_), _) => BatchStatus::Cancelled,
                        (_, status) => status,
                    };
                }
                for item in model.items.iter_mut().filter(|item| !item.status.is_terminal()) {
                    if model.status == BatchStatus::Cancelled {
                        item.lease = None;
                        item.status = BatchItemStatus::Cancelled;
                    }
                }
                assert_eq!(row.unwrap().unwrap().status, model.status);
            }
            Step::Retry { batch, item } if batch < self.model.batches.len() => {
                let items = batches.items(&id(batch), None, item as u64, 1).await.unwrap();
                let Some(row) = items.first() else { return };
                let outcome = batches.retry(&id(batch), &row.id).await.unwrap();
                let model = &mut self.model.batches[batch];
                let may = model.items[item].status == BatchItemStatus::Failed
                    && model.status != BatchStatus::Cancelled;
                assert_eq!(matches!(outcome, RetryOutcome::Retried(_)), may);
                if may {
                    model.items[item] = Item { status: BatchItemStatus::Pending, attempt: 0, lease: None };
                    let at_work = model.count(&[BatchItemStatus::Leased, BatchItemStatus::Running]) > 0;
                    if model.status != BatchStatus::Paused {
                        model.status = if at_work { BatchStatus::Running } else { BatchStatus::Queued };
                    }
                }
            }
            _ => {}
        }
    }

    /// The stored batches are the model's.
    async fn compare(&self) {
        for (number, batch) in self.model.batches.iter().enumerate() {
            let id = format!("b{number}");
            let row = self.fixture.records.batches().get(&id).await.unwrap().unwrap();
            assert_eq!(
                (row.status, row.completed_at.is_some()),
                (batch.status, batch.status.is_terminal()),
                "{id}"
            );
            let items = self.fixture.records.batches().items(&id, None, 0, 100).await.unwrap();
            let found: Vec<_> = items.iter().map(|item| (item.status, item.attempt)).collect();
            let expected: Vec<_> = batch.items.iter().map(|item| (item.status, item.attempt)).collect();
            assert_eq!(found, expected, "{id}");
        }
        let batches = self.fixture.records.batches();
        let mut sum = ExecutionTokens::default();
        for number in 0..self.model.batches.len() {
            sum += batches.tokens(&format!("b{number}")).await.unwrap();
        }
        let used = batches.usage("t").await.unwrap();
        assert_eq!(sum, used.get("m").copied().unwrap_or_default(), "the sums are those of the executions");
    }
}

#[test]
fn random_operations_of_several_workers_match_the_model() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let config = ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(steps in proptest::collection::vec(step(), 10..80))| {
        runtime.block_on(async {
            let mut checked = Checked { fixture: fixture().await, model: Model::default(), rows: BTreeMap::new() };
            checked.take(0, Step::Submit { items: 4, live: 3, running: 2 }).await;
            for (number, step) in steps.into_iter().enumerate() {
                checked.take(number, step.clone()).await;
                checked.compare().await;
            }
        });
    });
}

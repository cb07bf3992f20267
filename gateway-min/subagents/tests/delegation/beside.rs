//! A batch beside interactive delegations, with a worker that claims its items from the database, and time that passes when
//! everything that can happen has happened.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use threadkeep_agent::tools::{Tool, ToolContext, ToolError, ToolOutput, ToolSource, ToolSpec};
use threadkeep_config::Config;
use threadkeep_records::BatchStatus;
use threadkeep_subagents::admission::{Class, Slot};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::batches::{ended, submitted, worker};
use crate::support::House;

const ITEMS: usize = 90;
const SLOTS: usize = 3;
/// How long an item takes, a delegation, and from one delegation to the next, in half seconds.
const ITEM: u64 = 2;
const DELEGATION: u64 = 1;
const EVERY: u64 = 2;

/// The time, and when each item at work began.
struct Clock {
    now: watch::Sender<u64>,
    at_work: Mutex<Vec<u64>>,
    begun: Mutex<usize>,
}

/// The tool that items spend their time with.
struct Work(Arc<Clock>);

#[async_trait]
impl ToolSource for Work {
    async fn tools(&self, _: &Config) -> Vec<Arc<dyn Tool>> {
        vec![Arc::new(Self(Arc::clone(&self.0)))]
    }
}

#[async_trait]
impl Tool for Work {
    fn spec(&self) -> ToolSpec {
        let parameters = json!({"type": "object", "properties": {}});
        ToolSpec { name: "work".into(), description: "Takes its time".into(), parameters }
    }

    async fn call(&self, _: &ToolContext, _: Json) -> Result<ToolOutput, ToolError> {
        let clock = &self.0;
        let mut now = clock.now.subscribe();
        let begun = *now.borrow();
        clock.at_work.lock().unwrap().push(begun);
        *clock.begun.lock().unwrap() += 1;
        now.wait_for(|now| *now >= begun + ITEM)
            .await
            .map_err(|error| ToolError::Failed(error.to_string()))?;
        let mut at_work = clock.at_work.lock().unwrap();
        let place = at_work.iter().position(|other| *other == begun).expect("it is at work");
        at_work.swap_remove(place);
        Ok(ToolOutput::text("done"))
    }
}

impl Clock {
    /// Whether all items whose time is up have noticed.
    fn is_settled(&self) -> bool {
        let now = *self.now.borrow();
        self.at_work.lock().unwrap().iter().all(|begun| begun + ITEM > now)
    }
}

/// A delegation that waits for a slot, or has it.
struct Delegation {
    arrived: u64,
    waiting: Option<JoinHandle<Slot>>,
    held: Option<(u64, Slot)>,
}

/// Works on the batch, beside delegations or alone. Returns after how many half seconds the last item began, and how
/// many each delegation waited.
async fn worked(beside: bool) -> (u64, Vec<u64>) {
    let clock =
        Arc::new(Clock { now: watch::Sender::new(0), at_work: Mutex::default(), begun: Mutex::default() });
    let keys: Vec<String> = (0..ITEMS).map(|n| n.to_string()).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let answers = json!([{"text": "", "tool_calls": [{"name": "work", "args": {}}]}, {"text": "Done."}]);
    let house = submitted(&keys, answers, "subagent_runtime: {max_running: 3}").await;
    let house = house.with_source(Arc::new(Work(Arc::clone(&clock))));
    let worker = worker(&house).await;
    let (mut delegations, mut waits) = (Vec::<Delegation>::new(), Vec::new());
    let mut now = 0;
    loop {
        quiet(&house, &clock, &mut delegations, &mut waits).await;
        if *clock.begun.lock().unwrap() == ITEMS {
            break;
        }
        if beside && now % EVERY == 0 {
            let admission = house.delegator.admission.clone();
            let before = admission.counts().waiting_interactive;
            let waiting = tokio::spawn(async move { admission.acquire(&Class::Interactive).await.unwrap() });
            while house.delegator.admission.counts().waiting_interactive == before && !waiting.is_finished() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            delegations.push(Delegation { arrived: now, waiting: Some(waiting), held: None });
            quiet(&house, &clock, &mut delegations, &mut waits).await;
        }
        now += 1;
        let goes_on = |held: &(u64, Slot)| held.0 + DELEGATION > now;
        delegations.retain(|delegation| delegation.held.as_ref().is_none_or(goes_on));
        clock.now.send_replace(now);
    }
    clock.now.send_replace(u64::MAX);
    drop(delegations);
    assert_eq!(ended(&house).await.status, BatchStatus::Completed);
    worker.stop().await;
    (now, waits)
}

/// Waits until every slot is taken and works, or the last item has begun: nothing more happens at this time.
async fn quiet(house: &House, clock: &Clock, delegations: &mut [Delegation], waits: &mut Vec<u64>) {
    let settled = async {
        loop {
            let now = *clock.now.borrow();
            for delegation in delegations.iter_mut() {
                if let Some(waiting) = delegation.waiting.take_if(|waiting| waiting.is_finished()) {
                    delegation.held = Some((now, waiting.await.unwrap()));
                    waits.push(now - delegation.arrived);
                }
            }
            let delegated = delegations.iter().filter(|delegation| delegation.held.is_some()).count();
            let is_last = *clock.begun.lock().unwrap() == ITEMS;
            let at_work = clock.at_work.lock().unwrap().len();
            if clock.is_settled() && (is_last || at_work + delegated == SLOTS) {
                return;
            }
            assert!(house.delegator.admission.counts().running <= SLOTS);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), settled)
        .await
        .expect("a slot stays empty, or nobody gets it");
}

/// Check 6 of the delegation design, through the database: nobody waits for longer than an item takes, and the batch has four
/// fifths of the throughput that it has alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_from_the_database_delays_nobody_by_more_than_an_item_and_keeps_its_share() {
    let (alone, _) = worked(false).await;
    assert_eq!(alone, ITEM * (ITEMS / SLOTS - 1) as u64, "no slot is ever empty");
    let (beside, waits) = worked(true).await;
    assert!(waits.len() >= 30, "{} delegations", waits.len());
    assert!(waits.iter().all(|waited| *waited <= ITEM), "{waits:?}");
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    let share = alone as f64 / beside as f64;
    assert!(share >= 0.8, "the batch had {share} of its throughput alone: {alone}, {beside}");
}

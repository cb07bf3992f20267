//! Batches whose process dies.

use std::sync::Arc;
use std::time::Duration;

use chrono::TimeDelta;
use serde_json::{Map, json};
use threadkeep::channel::Schema;
use threadkeep::id::{IdSource, ThreadId};
use threadkeep::mode::ChannelMode;
use threadkeep::state::StateAccessor;
use threadkeep_agent::goal_state;
use threadkeep_agent::model::scripted::gate;
use threadkeep_agent::tools::ToolSource;
use threadkeep_records::{
    BatchItemStatus, BatchStatus, Delegating, ExecutionKind, JsonObject, Launch, NewBatch, NewBatchItem,
    NewExecution,
};

use crate::batch_budgets::{LEFT, LIMITED, sum, turn, until_counted, used};
use crate::batches::{
    Between, Held, SECTIONS, WORKER, batch, delete_thread, ended, gate_name, remains, repeated, rows,
    submitted, submitted_with, two_items, two_turns, until_removed, worker,
};
use crate::support::{House, Seen, THREAD, lead};

/// A process that is gone while its worker has items: its runtime ends where it stands.
fn killed_at(house: &House, name: &str) {
    let process = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let worker = process.block_on(async {
                let worker = worker(house).await;
                gate(name).reached().await;
                worker
            });
            // Its tasks first: dropping the worker would tell them to stop.
            drop(process);
            std::mem::forget(worker);
        });
    });
}

#[tokio::test]
async fn s62_an_item_that_died_with_its_process_goes_on_where_it_stopped() {
    let name = gate_name("killed");
    let house = submitted(&["a", "b"], two_turns(&name), "").await;
    let keys: Vec<_> = rows(&house).await.into_iter().map(|row| (row.id, row.item_key)).collect();
    killed_at(&house, &name);
    let left = rows(&house).await;
    assert!(left.iter().any(|row| row.status == BatchItemStatus::Running), "{left:?}");
    let next = house.restarted();
    gate(&name).open();
    let second = worker(&next).await;
    let batch = ended(&next).await;
    second.stop().await;
    assert_eq!(batch.status, BatchStatus::Completed);
    let rows = rows(&next).await;
    assert_eq!(rows.iter().map(|row| (row.id.clone(), row.item_key.clone())).collect::<Vec<_>>(), keys);
    assert!(rows.iter().all(|row| row.status == BatchItemStatus::Succeeded));
    assert!(rows.iter().any(|row| row.attempt == 2), "{rows:?}");
    // No stored answer was asked for again: at most the ones under way when it died.
    let requests = next.requests(WORKER).len();
    assert!((4..=6).contains(&requests), "{requests} requests");
    assert_eq!(next.executions().await.len(), 2, "each goes on with its execution");
}

/// Two processes die, each in the middle of two items, and their tokens bind the third.
#[tokio::test]
async fn kills_give_no_budget_of_a_batch_back() {
    let gates = ["kill-1", "kill-2"].map(gate_name);
    let mut answers: Vec<_> = (0..8).map(|number| turn(number, 100)).collect();
    for (at, name) in [2, 4].into_iter().zip(&gates) {
        answers[at]["gate"] = json!({"name": name});
    }
    let sections =
        format!("{LIMITED}\nsubagent_runtime: {{max_running: 2}}\nloop_detection: {{enabled: false}}");
    let house = submitted(&["a", "b"], json!(answers), &sections).await;
    killed_at(&house, &gates[0]);
    gate(&gates[0]).open();
    let next = house.restarted();
    killed_at(&next, &gates[1]);
    gate(&gates[1]).open();
    let last = next.restarted();
    let worker = worker(&last).await;
    ended(&last).await;
    worker.stop().await;
    let used = used(&last).await;
    // The calls under way when the limit is reached. Those under way at a kill are asked again: so is one whose answer the
    // batch knew of and no checkpoint had. The last process may still have counted that one, as its provider did.
    assert!((LEFT - 100..LEFT + 2 * 100).contains(&used), "{used} tokens");
    assert_eq!(sum(&last).await, used);
    let asked = last.requests(WORKER).len() as u64 * 100;
    assert!(asked <= used + 4 * 100, "{asked} of {used}");
}

/// The process of the last attempt dies: the item fails, and its tokens are added, once.
#[tokio::test]
async fn the_tokens_of_a_dead_worker_are_added_once() {
    let name = gate_name("dead");
    let settings = SECTIONS.replace("lease_seconds: 10", "lease_seconds: 10, max_attempts: 1");
    let house = submitted_with(&["a"], two_turns(&name), &settings).await;
    killed_at(&house, &name);
    let next = house.restarted();
    let worker = worker(&next).await;
    until_counted(&next).await;
    worker.stop().await;
    assert_eq!((sum(&next).await, used(&next).await), (6, 6));
}

fn in_mode(house: &House, mode: ChannelMode) -> StateAccessor {
    let table = Schema::thread_state().compile(mode, 3).unwrap();
    StateAccessor::new(Arc::clone(house.accessor.saver()), Arc::new(table), Arc::new(IdSource::default()))
}

/// A batch with one item, which was launched and then cancelled.
async fn cancelled(house: &House, id: &str) {
    let records = &house.delegator.records;
    let (batches, lease) = (records.batches(), TimeDelta::seconds(10));
    let item = NewBatchItem { key: "a".into(), prompt: "p".into(), acceptance_criteria: None };
    let new = NewBatch {
        id: id.into(),
        thread_id: THREAD.into(),
        run_id: "r".into(),
        tool_call_id: "c".into(),
        submission_key: id.into(),
        title: "t".into(),
        subagent_type: "general-purpose".into(),
        max_live_items: 1,
        max_running_items: 1,
        max_attempts: 1,
        execution_spec: JsonObject::new(),
        budget_id: None,
        items: vec![item],
    };
    batches.submit(new).await.unwrap();
    let claim = batches.claim(id, "dead", lease, 1, true).await.unwrap().unwrap().items.remove(0).claim;
    let execution = NewExecution {
        execution_id: claim.item_id.clone(),
        thread_id: THREAD.into(),
        run_id: "r".into(),
        delegating: Delegating::Item,
        parent_execution: None,
        kind: ExecutionKind::BatchItem,
        tool_call_id: "c".into(),
        agent_name: "general-purpose".into(),
        definition: JsonObject::new(),
        definition_digest: "d".into(),
        description: "a".into(),
        deadline: records.now(),
    };
    let launch = Launch { execution, model: "main".into(), waited_ms: 0 };
    batches.launch(&claim, lease, launch).await.unwrap().unwrap();
    batches.cancel(id).await.unwrap();
}

/// The first one has checkpoints that a process in its mode cannot read.
#[tokio::test]
async fn an_attempt_that_a_process_cannot_count_keeps_no_other_one_waiting() {
    let house = House::new(lead(&[], vec![]), SECTIONS).await;
    house.begin("r").await;
    cancelled(&house, "first").await;
    cancelled(&house, "second").await;
    let rows = house.executions().await;
    let unreadable = ThreadId::from(rows[0].child_thread.as_str());
    in_mode(&house, ChannelMode::Delta).create(&unreadable, Map::new()).await.unwrap();
    let mut next = house.restarted();
    next.accessor = in_mode(&house, ChannelMode::Full);
    let worker = worker(&next).await;
    let counted = async {
        while !house.executions().await[1].counted {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), counted).await.expect("the other one was not counted");
    worker.stop().await;
    assert!(!house.executions().await[0].counted, "a process in the other mode can count it");
}

/// A process that dies between the write of the batch and that of the call's message.
fn killed_between(house: &House) {
    let process = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let mut observer = Between::default();
            let reached = Arc::clone(&observer.0);
            let held: Vec<_> = std::iter::from_fn(|| house.delegator.admission.try_acquire()).collect();
            let worker = process.block_on(worker(house));
            let mut running = Box::pin(house.run_observed("r1", Some("go"), &mut observer));
            process.block_on(async {
                tokio::select! {
                    ended = &mut running => panic!("{ended:?}"),
                    () = reached.notified() => {}
                }
            });
            // Its tasks first: dropping the others would tell them to stop.
            drop(process);
            std::mem::forget((running, worker, held));
        });
    });
}

#[tokio::test]
async fn s62_a_call_that_is_repeated_after_a_kill_finds_its_batch() {
    let house = two_items().await;
    killed_between(&house);
    repeated(&house).await;
}

/// A goal is set before the next run: the call is repeated from another checkpoint.
#[tokio::test]
async fn s62_a_call_that_is_repeated_from_another_head_finds_its_batch() {
    let house = two_items().await;
    killed_between(&house);
    house.settled().await;
    let goal = json!({"objective": "Get it done", "status": "active"});
    goal_state::set(&house.accessor, &ThreadId::from(THREAD), Map::new(), &goal).await.unwrap();
    repeated(&house).await;
}

/// The next run may not use the subagent any more, or its process works on no batches.
#[tokio::test]
async fn s62_a_repeated_call_that_would_be_refused_by_now_finds_its_batch() {
    for is_allowed in [false, true] {
        let house = two_items().await;
        killed_between(&house);
        let first = batch(&house).await;
        let mut next = house.restarted();
        let mut started = None;
        if !is_allowed {
            next.allowed = Some(vec!["another".to_owned()]);
            started = Some(worker(&next).await);
        }
        next.run("r2", None, &mut Seen::default()).await.unwrap();
        let results = next.results().await;
        let metadata = &results[0]["additional_kwargs"];
        let found = (results.len(), &metadata["subagent_batch_id"]);
        assert_eq!(found, (1, &json!(first.id)), "{is_allowed}: {results:?}");
        assert_eq!(metadata["subagent_batch_error"], json!(false), "{is_allowed}");
        if let Some(worker) = started {
            ended(&next).await;
            worker.stop().await;
        }
    }
}

/// The process dies after an item has written its first checkpoint, which comes after the deletion of its thread, and before
/// it looks after its leases: nobody but another process can remove that.
#[tokio::test]
async fn a_kill_between_a_deletion_and_the_clean_up_of_an_item_leaves_no_checkpoints() {
    let name = gate_name("remains");
    let house = submitted(&["a"], json!([{"text": "never", "gate": {"name": name}}]), "").await;
    // It looks after its leases every thirty seconds, and claims at once.
    house.reconfigure(
        "poll_interval_seconds: 0.1, lease_seconds: 10",
        "poll_interval_seconds: 60, lease_seconds: 90",
    );
    let source = Arc::<Held>::default();
    let first = house.restarted().with_source(Arc::clone(&source) as Arc<dyn ToolSource>);
    let process = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let child = std::thread::scope(|threads| {
        let at_work = threads.spawn(|| {
            let (worker, child) = process.block_on(async {
                let worker = worker(&first).await;
                source.reached.notified().await;
                let child = house.executions().await.remove(0).child_thread;
                delete_thread(&house).await;
                source.open.notify_one();
                gate(&name).reached().await;
                (worker, child)
            });
            drop(process);
            std::mem::forget(worker);
            child
        });
        at_work.join().unwrap()
    });
    let left = house.accessor.get(&ThreadId::from(child.as_str()), None).await.unwrap();
    assert!(left.is_some(), "it was written after the deletion");
    assert_eq!(remains(&house).await, [child.as_str()]);
    house.reconfigure(
        "poll_interval_seconds: 60, lease_seconds: 90",
        "poll_interval_seconds: 0.1, lease_seconds: 10",
    );
    let next = house.restarted();
    let second = worker(&next).await;
    until_removed(&next, &child).await;
    second.stop().await;
}

//! Subagents that no cancellation reaches: the run goes on without them, and they can write nothing later.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use threadkeep::Result;
use threadkeep::channel::Schema;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, IdSource, ThreadId};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{
    Capabilities, CheckpointSelector, Coming, DeltaHistory, ListQuery, Revision, Rewrite, Saver, StepCommit,
    Summary, ThreadImage,
};
use threadkeep::state::StateAccessor;
use threadkeep_agent::Ended;
use threadkeep_agent::model::scripted::gate;
use threadkeep_memory::MemorySaver;
use threadkeep_records::{CHILD_PREFIX, Clock, ExecutionRow, ExecutionStatus, Records, RecordsOptions};
use threadkeep_subagents::hooks::{HookStore, Hooks, LifecycleHooks, TaskConclusion, TaskInfo};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::batches::{batch, ended, gate_name, items_call, until_lost, worker};
use crate::restart::killed_at;
use crate::support::{House, Seen, Still, lead, subagent, task, ticking};

/// What happens to a commit of a subagent.
#[derive(Clone, Copy, PartialEq)]
enum Trouble {
    /// It waits until the gate opens.
    Hangs,
    /// The store does not answer to anybody who reads the thread either.
    Silence,
    Panics,
    /// It waits until the gate opens, and panics.
    PanicsLate,
    /// It fails once.
    Fails,
    /// It panics, and the next read of the thread fails.
    PanicsUnread,
    /// It panics, and the store does not answer to anybody who reads the thread.
    PanicsSilent,
    /// None, but as many reads of the thread fail as the test asks for.
    Unread,
}

/// A store that has trouble with the commit of a subagent's first tool result.
struct Troubled {
    inner: MemorySaver,
    trouble: Trouble,
    commits: AtomicUsize,
    unread: AtomicUsize,
    /// The thread that is not read; any subagent's if there is none.
    unreadable: Mutex<Option<String>>,
    reached: Semaphore,
    gate: Semaphore,
}

impl Troubled {
    fn new(trouble: Trouble) -> Arc<Self> {
        let (reached, gate) = (Semaphore::new(0), Semaphore::new(0));
        let (inner, commits, unread) = (MemorySaver::default(), AtomicUsize::new(0), AtomicUsize::new(0));
        let unreadable = Mutex::default();
        Arc::new(Self { inner, trouble, commits, unread, unreadable, reached, gate })
    }

    async fn reached(&self) {
        self.reached.acquire().await.unwrap().forget();
    }

    fn open(&self) {
        self.gate.add_permits(Semaphore::MAX_PERMITS / 2);
    }

    /// Whether this read of the thread fails.
    fn fails(&self, thread: &ThreadId) -> bool {
        let less = |left: usize| left.checked_sub(1);
        let unreadable = self.unreadable.lock().unwrap().clone();
        thread.as_str().starts_with(CHILD_PREFIX)
            && unreadable.is_none_or(|unreadable| unreadable == thread.as_str())
            && self.unread.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok()
    }

    fn is_silent(&self, thread: &ThreadId) -> bool {
        matches!(self.trouble, Trouble::Silence | Trouble::PanicsSilent)
            && thread.as_str().starts_with(CHILD_PREFIX)
            && self.commits.load(Ordering::SeqCst) > 2
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Saver for Troubled {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        if self.is_silent(&at.thread) {
            self.reached.add_permits(1);
            self.gate.acquire().await.unwrap().forget();
        }
        if self.fails(&at.thread) {
            let reason = "expected by the test".to_owned();
            return Err(threadkeep::Error::Unavailable { saver: "troubled", reason });
        }
        self.inner.get(at).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        self.inner.list(query).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        self.inner.put_writes(at, task).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        // The input, the answer, the tool's result.
        if self.trouble != Trouble::Unread
            && step.key().thread.as_str().starts_with(CHILD_PREFIX)
            && self.commits.fetch_add(1, Ordering::SeqCst) == 2
        {
            self.reached.add_permits(1);
            if self.trouble == Trouble::Fails {
                let reason = "expected by the test".to_owned();
                return Err(threadkeep::Error::Unavailable { saver: "troubled", reason });
            }
            if self.trouble == Trouble::PanicsUnread {
                self.unread.store(1, Ordering::SeqCst);
            }
            let panics = [Trouble::Panics, Trouble::PanicsUnread, Trouble::PanicsSilent];
            assert!(!panics.contains(&self.trouble), "expected by the test");
            self.gate.acquire().await.unwrap().forget();
            assert!(self.trouble != Trouble::PanicsLate, "expected by the test");
        }
        self.inner.commit(step).await
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        self.inner.flush(thread).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        self.inner.delta_history(at, channels, reach).await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        self.inner.delete_thread(thread).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        self.inner.threads(after, limit).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        self.inner.read_thread(thread).await
    }

    async fn revision(&self, thread: &ThreadId) -> Result<Revision> {
        self.inner.revision(thread).await
    }

    async fn delete_seen(&self, thread: &ThreadId, expected: &Revision) -> Result<()> {
        self.inner.delete_seen(thread, expected).await
    }

    async fn summary(&self, thread: &ThreadId) -> Result<Summary> {
        self.inner.summary(thread).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        self.inner.rewrite_thread(thread, expected, rewrite).await
    }

    async fn create_thread(&self, thread: &ThreadId, coming: &mut dyn Coming) -> Result<()> {
        self.inner.create_thread(thread, coming).await
    }

    async fn copy_thread(&self, from: &ThreadId, to: &ThreadId) -> Result<usize> {
        self.inner.copy_thread(from, to).await
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}

/// Notes how tasks end.
#[derive(Default)]
struct Ends(Mutex<Vec<&'static str>>);

#[async_trait]
impl LifecycleHooks for Ends {
    async fn on_task_stop(&self, _: &HookStore, _: &HookStore, _: &TaskInfo, outcome: TaskConclusion) {
        self.0.lock().unwrap().push(outcome.as_str());
    }
}

async fn house(saver: &Arc<Troubled>) -> (House, Arc<Ends>) {
    delegating(saver, &task("x", "general-purpose"), "").await
}

/// A house on this store whose lead makes this call.
async fn delegating(saver: &Arc<Troubled>, call: &Json, sections: &str) -> (House, Arc<Ends>) {
    let answers = subagent(json!([
        {"text": "First.", "tool_calls": [{"name": "ls", "args": {}}], "usage": {"input_tokens": 5, "output_tokens": 1}},
        {"text": "Second.", "usage": {"input_tokens": 7, "output_tokens": 2}},
    ]));
    scripted(saver, lead(std::slice::from_ref(call), vec![answers]), sections).await
}

/// A house on this store with this script.
async fn scripted(saver: &Arc<Troubled>, script: Json, sections: &str) -> (House, Arc<Ends>) {
    let records = Records::open_memory(ticking()).await.unwrap();
    let table = Schema::thread_state().compile(ChannelMode::Delta, 3).unwrap();
    let (saver, ids) = (Arc::clone(saver) as Arc<dyn Saver>, Arc::new(IdSource::default()));
    let accessor = StateAccessor::new(saver, Arc::new(table), ids);
    let mut house = House::in_directory(tempfile::tempdir().unwrap(), records, accessor, script, sections);
    let ends = Arc::new(Ends::default());
    let hooks = Hooks::new(vec![Arc::clone(&ends) as Arc<dyn LifecycleHooks>]);
    Arc::get_mut(&mut house.delegator).unwrap().hooks = Arc::new(hooks);
    (house, ends)
}

/// Puts the clock forward. While it stands it would go on by itself whenever the database is waited for, so it stands for
/// no longer than that.
async fn wait(seconds: u64) {
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(seconds)).await;
    tokio::time::resume();
}

async fn only(house: &House) -> ExecutionRow {
    let [row] = &house.executions().await[..] else { panic!("one execution") };
    row.clone()
}

/// Until the slot is given back.
async fn slot_is_back(house: &House) {
    while house.delegator.admission.counts().running > 0 {
        tokio::task::yield_now().await;
    }
}

/// Until extensions have learnt of an end.
async fn until_ended(ends: &Ends) {
    let ended = async {
        while ends.0.lock().unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), ended).await.expect("extensions never learnt of the end");
}

const RESULT: &str = "Task polling timed out after 30 minutes. This may indicate the background task is stuck. Status: running";

/// Scenario 11 and bug 12.
#[tokio::test]
async fn a_stuck_subagent_is_given_up_a_minute_after_its_time_and_can_write_nothing_later() {
    for wakes_up in [true, false] {
        let saver = Troubled::new(Trouble::Hangs);
        let (house, ends) = house(&saver).await;
        let mut seen = Seen::default();
        let (ended, still) = tokio::join!(house.run("r", Some("go"), &mut seen), async {
            saver.reached().await;
            wait(30 * 60).await;
            // Its time is up, and the cancellation does not reach it.
            assert_eq!(only(&house).await.status, ExecutionStatus::Running);
            // The clock goes on meanwhile, on a busy machine for seconds.
            wait(30).await;
            assert_eq!(only(&house).await.status, ExecutionStatus::Running);
            // From now on the stores have four seconds to end it, and it keeps its slot for five.
            let still = Still::begin();
            tokio::time::advance(Duration::from_secs(31)).await;
            still
        });
        assert!(matches!(ended.unwrap(), Ended::Done { .. }));
        let usage = json!({"input_tokens": 5, "output_tokens": 1, "total_tokens": 6});
        assert_eq!(seen.types(), ["task_started", "task_running", "task_running", "task_timed_out"]);
        let last = seen.events.last().unwrap();
        assert_eq!((last.get("error"), &last["usage"]), (None, &usage), "as its checkpoints show");
        let result = &house.results().await[0];
        assert_eq!(result["content"], RESULT);
        let metadata = &result["additional_kwargs"];
        assert_eq!(
            (&metadata["subagent_status"], &metadata["subagent_token_usage"]),
            (&json!("polling_timed_out"), &usage)
        );
        assert_eq!(metadata.get("subagent_error"), None);
        assert_eq!(house.ledger().await[0]["status"], "polling_timed_out");
        let row = only(&house).await;
        assert_eq!(
            (row.status, row.delivered, row.tokens().unwrap().total_tokens),
            (ExecutionStatus::TimedOut, true, 6)
        );
        assert_eq!(row.error.as_deref(), Some("Execution timed out after 1800 seconds and did not stop"));
        assert_eq!(house.delegator.admission.counts().running, 1, "it still has its slot");
        drop(still);
        if wakes_up {
            saver.open();
        } else {
            wait(10).await;
        }
        slot_is_back(&house).await;
        assert_eq!(only(&house).await, row, "the first end stays");
        assert_eq!(seen.used.iter().map(|(.., tokens)| tokens.total).collect::<Vec<_>>(), [6], "once");
        assert_eq!(*ends.0.lock().unwrap(), ["failed"], "once");
    }
}

/// The same where the store leaves the watch without an answer as well: the run goes on, and the next one records the end.
#[tokio::test]
async fn a_store_that_does_not_answer_keeps_no_run_waiting_and_the_end_is_recorded_later() {
    let saver = Troubled::new(Trouble::Silence);
    let (house, ends) = house(&saver).await;
    let mut seen = Seen::default();
    let (ended, ()) = tokio::join!(house.run("r", Some("go"), &mut seen), async {
        saver.reached().await;
        wait(31 * 60).await;
        // Each answer of the database is one turn of the runtime at least: the watch has begun to wait.
        only(&house).await;
        only(&house).await;
        wait(10).await;
    });
    assert!(matches!(ended.unwrap(), Ended::Done { .. }));
    assert_eq!(house.results().await[0]["content"], RESULT);
    assert_eq!(seen.events.last().unwrap()["usage"], Json::Null, "unknown is not zero");
    assert_eq!(*ends.0.lock().unwrap(), ["failed"], "extensions learn of it all the same");
    wait(10).await;
    slot_is_back(&house).await;
    assert_eq!(only(&house).await.status, ExecutionStatus::Running);
    saver.open();
    let head = house.state().await;
    let caught_up = house.delegator.catch_up(&house.accessor, "t", "r2", Some(&head)).await.unwrap();
    assert_eq!(caught_up.iter().map(|used| used.tokens().total).collect::<Vec<_>>(), [6]);
    let row = only(&house).await;
    assert_eq!((row.status, row.tokens().unwrap().total_tokens), (ExecutionStatus::Cancelled, 6));
    house.count("r2").await;
    let again = house.delegator.catch_up(&house.accessor, "t", "r3", Some(&head)).await.unwrap();
    assert_eq!(again, [], "once");
}

/// Bug 11.
#[tokio::test]
async fn a_cancelled_run_waits_for_a_stuck_subagent_no_longer_than_ten_seconds() {
    let saver = Troubled::new(Trouble::Hangs);
    let (house, ends) = house(&saver).await;
    let (mut seen, cancel) = (Seen::default(), CancellationToken::new());
    let (ended, still) = tokio::join!(house.run_until("r", Some("go"), &mut seen, cancel.clone()), async {
        saver.reached().await;
        cancel.cancel();
        // The watch begins to wait in one of these turns.
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        only(&house).await;
        // It has had its five seconds. The run waits for ten: the rest takes none of them, however busy the machine is.
        let still = Still::begin();
        tokio::time::advance(Duration::from_secs(6)).await;
        still
    });
    assert_eq!(ended.unwrap(), Ended::Cancelled);
    let row = only(&house).await;
    assert_eq!(
        (row.status, row.error.as_deref(), row.tokens().unwrap().total_tokens),
        (ExecutionStatus::Cancelled, Some("Cancelled by user"), 6)
    );
    assert_eq!(seen.used.iter().map(|(.., tokens)| tokens.total).collect::<Vec<_>>(), [6], "once");
    assert_eq!(*ends.0.lock().unwrap(), ["aborted"], "once");
    drop(still);
    only(&house).await;
    wait(5).await;
    slot_is_back(&house).await;
    assert_eq!(only(&house).await, row);
}

#[tokio::test]
async fn a_subagent_that_panics_fails_and_leaves_nothing_at_work() {
    let saver = Troubled::new(Trouble::Panics);
    let (house, ends) = house(&saver).await;
    let seen = house.ask("go").await;
    let content = house.results().await[0]["content"].as_str().unwrap().to_owned();
    assert!(content.starts_with("Task failed. Error: RuntimeError: "), "{content}");
    let last = seen.events.last().unwrap();
    assert_eq!((&last["type"], &last["usage"]["total_tokens"]), (&json!("task_failed"), &json!(6)));
    assert!(last["error"].as_str().unwrap().starts_with("RuntimeError: "), "{last}");
    let row = only(&house).await;
    assert_eq!(
        (row.status, row.delivered, row.tokens().unwrap().total_tokens),
        (ExecutionStatus::Failed, true, 6)
    );
    assert_eq!(seen.used.iter().map(|(.., tokens)| tokens.total).collect::<Vec<_>>(), [6], "once");
    assert_eq!(*ends.0.lock().unwrap(), ["failed"]);
    assert_eq!(house.delegator.admission.counts().running, 0);
}

#[tokio::test]
async fn a_subagent_whose_end_cannot_be_recorded_has_an_end_for_extensions_too() {
    let saver = Troubled::new(Trouble::PanicsUnread);
    let (house, ends) = house(&saver).await;
    house.ask("go").await;
    assert_eq!(saver.unread.load(Ordering::SeqCst), 0, "the end was not recorded");
    assert!(house.results().await[0]["content"].as_str().unwrap().starts_with("Task failed."));
    assert_eq!(*ends.0.lock().unwrap(), ["failed"], "once");
    assert_eq!(house.delegator.admission.counts().running, 0);
}

/// The result of another call could not be stored, say: nobody waits for the subagent any more.
#[tokio::test]
async fn a_subagent_that_panics_after_its_run_was_dropped_has_an_end_for_extensions_too() {
    let saver = Troubled::new(Trouble::PanicsLate);
    let (house, ends) = house(&saver).await;
    let mut seen = Seen::default();
    tokio::select! {
        biased;
        () = saver.reached() => {}
        ended = house.run("r", Some("go"), &mut seen) => panic!("{ended:?}"),
    }
    saver.open();
    until_ended(&ends).await;
    slot_is_back(&house).await;
    assert_eq!(*ends.0.lock().unwrap(), ["failed"], "once");
    assert_eq!(only(&house).await.status, ExecutionStatus::Running, "the next run records it");
}

/// The run is dropped while the end is recorded: it is recorded all the same, and extensions learn of it.
#[tokio::test]
async fn the_end_of_a_subagent_that_failed_is_recorded_also_if_its_run_is_dropped_meanwhile() {
    let saver = Troubled::new(Trouble::PanicsSilent);
    let (house, ends) = house(&saver).await;
    let mut seen = Seen::default();
    tokio::select! {
        biased;
        () = async {
            saver.reached().await;
            // The read with which the record of the end begins.
            saver.reached().await;
        } => {}
        ended = house.run("r", Some("go"), &mut seen) => panic!("{ended:?}"),
    }
    saver.open();
    until_ended(&ends).await;
    assert_eq!(*ends.0.lock().unwrap(), ["failed"], "once");
    assert_eq!(only(&house).await.status, ExecutionStatus::Failed);
}

/// Scenario 78 for what stops an item where it cannot say so itself: a panic, its store, its time, the loss of its claim.
#[tokio::test]
async fn an_item_that_cannot_say_so_itself_has_an_end_for_extensions_too() {
    // A lease that no clock put forward here ends.
    let sections =
        "subagent_batches: {enabled: true, poll_interval_seconds: 0.1, lease_seconds: 3600, max_attempts: 1}";
    for (trouble, is_cancelled, end) in [
        (Trouble::Panics, false, "failed"),
        (Trouble::Fails, false, "failed"),
        (Trouble::Hangs, false, "failed"),
        (Trouble::Hangs, true, "aborted"),
    ] {
        let saver = Troubled::new(trouble);
        let (house, ends) = delegating(&saver, &items_call(&["a"]), sections).await;
        let worker = worker(&house).await;
        house.ask("go").await;
        saver.reached().await;
        if is_cancelled {
            let id = batch(&house).await.id;
            house.delegator.records.batches().cancel(&id).await.unwrap();
            until_lost(&house).await;
        } else if trouble == Trouble::Hangs {
            wait(30 * 60).await;
            // Its time is up, and the cancellation does not reach it.
            assert!(!batch(&house).await.status.is_terminal());
            wait(60).await;
            while !batch(&house).await.status.is_terminal() {
                wait(1).await;
            }
        } else {
            ended(&house).await;
        }
        worker.stop().await;
        assert_eq!(*ends.0.lock().unwrap(), [end], "once");
        assert_eq!(house.delegator.admission.counts().running, 0);
    }
}

/// A subagent has ended, its process died before its result was delivered, and the store does not give it back at once.
#[tokio::test]
async fn a_stored_result_is_delivered_although_its_store_fails_at_first() {
    for failures in [1, 2] {
        let saver = Troubled::new(Trouble::Unread);
        let (house, _) = house(&saver).await;
        // Started, three messages, completed.
        killed_at(&house, Some("go"), 5);
        house.settled().await;
        // Only the call itself reads the subagent's thread.
        house.count("r1").await;
        let next = house.restarted();
        saver.unread.store(failures, Ordering::SeqCst);
        let mut seen = Seen::default();
        let mut ended = next.run("r2", None, &mut seen).await;
        if failures == 2 {
            let error = ended.unwrap_err().to_string();
            assert!(error.contains("makes the call again"), "{error}");
            assert_eq!(
                next.results().await,
                Vec::<Json>::new(),
                "nothing that the next run would not repeat"
            );
            assert!(!only(&next).await.delivered);
            assert_eq!(seen.types(), ["task_started"], "no end of what goes on");
            seen = Seen::default();
            ended = next.run("r3", None, &mut seen).await;
        }
        assert!(matches!(ended, Ok(Ended::Done { .. })), "{failures}: {ended:?}");
        assert_eq!(next.results().await[0]["content"], "Task Succeeded. Result: Second.", "{failures}");
        assert_eq!(next.ledger().await[0]["status"], "completed", "{failures}");
        let row = only(&next).await;
        assert_eq!((row.status, row.delivered), (ExecutionStatus::Completed, true), "{failures}");
        assert_eq!(seen.types(), ["task_started", "task_completed"], "{failures}");
        assert!(seen.used.is_empty(), "{failures}: the run that died has counted it");
    }
}

/// What is at work beside such a call is not cancelled with its run, which would be its end for good.
#[tokio::test]
async fn what_is_at_work_beside_a_result_that_cannot_be_read_goes_on() {
    let saver = Troubled::new(Trouble::Unread);
    let name = gate_name("beside-unread");
    let short =
        json!({"when": {"caller": "subagent", "contains": ["short"]}, "answers": [{"text": "Short."}]});
    let long = subagent(json!([{"text": "Long.", "gate": {"name": name}}]));
    let calls = [task("short", "general-purpose"), task("long", "general-purpose")];
    let (house, _) = scripted(&saver, lead(&calls, vec![short, long]), "").await;
    // Both have started; of the short one its message and its end.
    killed_at(&house, Some("go"), 4);
    house.settled().await;
    house.count("r1").await;
    let next = house.restarted();
    let ended = |row: &ExecutionRow| row.status == ExecutionStatus::Completed;
    let short = next.executions().await.into_iter().find(ended).unwrap();
    *saver.unreadable.lock().unwrap() = Some(short.child_thread);
    saver.unread.store(2, Ordering::SeqCst);
    let mut seen = Seen::default();
    let (failed, ()) = tokio::join!(next.run("r2", None, &mut seen), async {
        while saver.unread.load(Ordering::SeqCst) > 0 {
            tokio::task::yield_now().await;
        }
        gate(&name).open();
    });
    let error = failed.unwrap_err().to_string();
    assert!(error.contains("makes the call again"), "{error}");
    let rows = next.executions().await;
    assert!(rows.iter().all(ended), "{rows:?}");
    let requests = next.requests("subagent:general-purpose").len();
    next.run("r3", None, &mut Seen::default()).await.unwrap();
    let results = next.results().await;
    let texts: Vec<_> = results.iter().map(|result| result["content"].as_str().unwrap()).collect();
    assert_eq!(texts, ["Task Succeeded. Result: Short.", "Task Succeeded. Result: Long."]);
    assert_eq!(next.requests("subagent:general-purpose").len(), requests, "no further call");
    assert!(next.executions().await.iter().all(|row| row.delivered));
}

/// The same where the database with its execution is away: for less time than the call waits for it, and for longer.
#[tokio::test]
async fn a_stored_result_is_delivered_although_the_database_is_away_at_first() {
    for lasts in [false, true] {
        let saver = Troubled::new(Trouble::Unread);
        let (house, _) = house(&saver).await;
        // Started, three messages, completed.
        killed_at(&house, Some("go"), 5);
        house.settled().await;
        // Only the call itself writes.
        house.count("r1").await;
        let next = house.restarted();
        let records = &next.delegator.records;
        if lasts {
            records.fail_from(1);
        } else {
            records.fail_statement(1);
        }
        let mut seen = Seen::default();
        let mut ended = next.run("r2", None, &mut seen).await;
        assert!(!records.fail_statement(0), "{lasts}: it was away");
        if lasts {
            let error = ended.unwrap_err().to_string();
            assert!(error.contains("makes the call again"), "{error}");
            assert_eq!(next.results().await, Vec::<Json>::new());
            assert!(!only(&next).await.delivered);
            assert!(seen.events.is_empty(), "{:?}", seen.events);
            ended = next.run("r3", None, &mut seen).await;
        }
        assert!(matches!(ended, Ok(Ended::Done { .. })), "{lasts}: {ended:?}");
        assert_eq!(next.results().await[0]["content"], "Task Succeeded. Result: Second.", "{lasts}");
        let row = only(&next).await;
        assert_eq!((row.status, row.delivered), (ExecutionStatus::Completed, true), "{lasts}");
        assert_eq!(seen.types(), ["task_started", "task_completed"], "{lasts}");
    }
}

/// A call that no earlier run can have begun has nothing to lose: its model reads that it failed, and the run goes on.
#[tokio::test]
async fn a_new_call_fails_if_the_database_is_away_for_long() {
    let saver = Troubled::new(Trouble::Unread);
    let (house, _) = house(&saver).await;
    let records = &house.delegator.records;
    records.fail_from(1);
    let seen = house.ask("go").await;
    assert!(!records.fail_statement(0), "it was away");
    let result = &house.results().await[0];
    let content = result["content"].as_str().unwrap();
    assert!(content.starts_with("Task failed. Error: RunStoreError: "), "{content}");
    assert_eq!(result["additional_kwargs"]["subagent_status"], "failed");
    assert_eq!(house.ledger().await[0]["status"], "failed");
    assert!(seen.events.is_empty(), "{:?}", seen.events);
    assert!(house.executions().await.is_empty());
}

/// What ends a subagent at its time is that time, not another look at a clock, which may have been set back meanwhile: here
/// one that does not move.
#[tokio::test]
async fn a_subagent_whose_time_is_up_timed_out_whatever_the_clock_says() {
    let answers = subagent(json!([{"text": "never said", "gate": {"name": "whatever-the-clock-says"}}]));
    for has_slot in [true, false] {
        let now = chrono::Utc::now();
        let options = RecordsOptions { clock: Clock::from_fn(move || now), ..RecordsOptions::default() };
        let records = Records::open_memory(options).await.unwrap();
        let table = Schema::thread_state().compile(ChannelMode::Delta, 3).unwrap();
        let ids = Arc::new(IdSource::default());
        let accessor = StateAccessor::new(Arc::new(MemorySaver::default()), Arc::new(table), ids);
        let script = lead(&[task("x", "general-purpose")], vec![answers.clone()]);
        let directory = tempfile::tempdir().unwrap();
        let sections = "subagents: {timeout_seconds: 1}";
        let house = House::in_directory(directory, records, accessor, script, sections);
        let slots: Vec<_> = std::iter::from_fn(|| house.delegator.admission.try_acquire())
            .take(if has_slot { 0 } else { usize::MAX })
            .collect();
        let seen = house.ask("go").await;
        drop(slots);
        let error = "Execution timed out after 1 seconds";
        let last = seen.events.last().unwrap();
        assert_eq!((&last["type"], &last["error"]), (&json!("task_timed_out"), &json!(error)), "{has_slot}");
        let result = &house.results().await[0];
        assert_eq!(result["content"], format!("Task timed out. Error: {error}"), "{has_slot}");
        let row = only(&house).await;
        assert_eq!(
            (row.status, row.error.as_deref()),
            (ExecutionStatus::TimedOut, Some(error)),
            "{has_slot}"
        );
    }
}

//! Calls of external agents, with a tool in the place of the one that starts programs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use threadkeep::channel::Schema;
use threadkeep::id::{IdSource, ThreadId};
use threadkeep::mode::ChannelMode;
use threadkeep::state::StateAccessor;
use threadkeep_agent::Ended;
use threadkeep_agent::tools::{Tool, ToolContext, ToolError, ToolOutput, ToolSpec, ToolStatus};
use threadkeep_memory::MemorySaver;
use threadkeep_records::{
    Clock, Delegating, ExecutionKind, ExecutionRow, ExecutionStatus, Records, RecordsOptions, WriterKind,
};
use threadkeep_subagents::external::{ENDING, TIMED_OUT};
use threadkeep_subagents::{delete_checkpoints, recheck};
use tokio::sync::Notify;

use crate::batches;
use crate::support::{House, Seen, THREAD, lead, subagent, task};

const AGENTS: &str =
    "acp_agents: {coder: {command: coder, description: Codes, model: large, env: {KEY: sk-1}}}";

/// Does what its prompt says.
#[derive(Default)]
struct Fake {
    /// The prompt `hang` or `wait` was read.
    hangs: Notify,
    /// Ends a `wait`.
    goes_on: Notify,
}

#[async_trait]
impl Tool for Fake {
    fn spec(&self) -> ToolSpec {
        let parameters = json!({"type": "object", "properties": {}});
        ToolSpec { name: "invoke_acp_agent".into(), description: "Calls agents".into(), parameters }
    }

    async fn call(&self, _: &ToolContext, args: Json) -> Result<ToolOutput, ToolError> {
        let failed = |text: &str| ToolOutput { status: ToolStatus::Error, ..ToolOutput::text(text) };
        match (args["agent"].as_str(), args["prompt"].as_str()) {
            (Some("coder"), Some("hang")) => {
                self.hangs.notify_one();
                std::future::pending().await
            }
            (Some("coder"), Some("wait")) => {
                self.hangs.notify_one();
                self.goes_on.notified().await;
                Ok(ToolOutput::text("waited"))
            }
            (Some("coder"), Some("take long")) => {
                Ok(ToolOutput { artifact: json!({ENDING: TIMED_OUT}), ..failed("Error: timed out") })
            }
            (Some("coder"), Some("fail")) => Ok(failed("Error: failed")),
            (Some("coder"), Some(prompt)) => Ok(ToolOutput::text(format!("did: {prompt}"))),
            _ => Err(ToolError::Failed("Unknown agent".into())),
        }
    }
}

fn call(agent: &str, prompt: &str) -> Json {
    json!({"name": "invoke_acp_agent", "args": {"agent": agent, "prompt": prompt}})
}

async fn house(script: Json, sections: &str, fake: &Arc<Fake>) -> House {
    House::new(script, sections).await.with_external(Arc::clone(fake) as Arc<dyn Tool>)
}

fn ends(rows: &[ExecutionRow]) -> Vec<(i64, &str, Option<&str>, bool)> {
    rows.iter().map(|row| (row.attempt, row.status.as_str(), row.error.as_deref(), row.delivered)).collect()
}

#[tokio::test]
async fn each_call_has_a_row_that_says_how_it_ended() {
    let calls =
        [call("coder", "work"), call("coder", "take long"), call("coder", "fail"), call("nobody", "work")];
    let house = house(lead(&calls, vec![]), AGENTS, &Arc::default()).await;
    let seen = house.ask("Go").await;
    assert_eq!(seen.types(), Vec::<&str>::new(), "no events of tasks");
    assert_eq!(house.ledger().await, Vec::<Json>::new());
    let results = house.results().await;
    let contents: Vec<&str> = results.iter().map(|result| result["content"].as_str().unwrap()).collect();
    assert_eq!(contents, ["did: work", "Error: timed out", "Error: failed", "Error: Unknown agent"]);
    let mut rows = house.executions().await;
    rows.sort_by_key(|row| row.description.clone());
    assert_eq!(
        ends(&rows),
        [
            (1, "failed", Some("Error: failed"), true),
            (1, "timed_out", Some("Error: timed out"), true),
            (1, "completed", None, true),
        ]
    );
    let row = &rows[2];
    assert_eq!((row.kind, row.agent_name.as_str()), (ExecutionKind::Acp, "coder"));
    assert_eq!((row.model_name.as_deref(), row.description.as_str()), (Some("large"), "work"));
    assert_eq!(row.parent_execution, None);
    assert!(!format!("{row:?}").contains("sk-1"), "{row:?}");
    // There is nothing of it to check, and nothing to delete but the row.
    assert_eq!(recheck(row, None, &[]).unwrap(), Vec::<String>::new());
    let thread = ThreadId::from(THREAD);
    let seen = house.accessor.look(&thread).await.unwrap();
    let records = &house.delegator.records;
    let reservation = records.runs().reserve(THREAD, WriterKind::Delete).await.unwrap();
    delete_checkpoints(records, &house.accessor, &reservation, seen).await.unwrap();
}

#[tokio::test]
async fn without_agents_or_without_delegation_there_is_no_tool() {
    let tools = |house: &House| {
        let request = house.requests("lead_agent").remove(0);
        request["tools"].to_string()
    };
    let script = || lead(&[], vec![]);
    let with = house(script(), AGENTS, &Arc::default()).await;
    with.ask("Go").await;
    assert!(tools(&with).contains("invoke_acp_agent"));
    let none = House::new(script(), "").await;
    none.ask("Go").await;
    assert!(!tools(&none).contains("invoke_acp_agent"));
    let mut off = house(script(), AGENTS, &Arc::default()).await;
    off.allowed = Some(vec![]);
    off.ask("Go").await;
    assert!(!tools(&off).contains("invoke_acp_agent"));
}

#[tokio::test]
async fn a_subagent_calls_external_agents_only_if_its_definition_says_so() {
    let agents = "subagents: {custom_agents: {manager: {description: Manages, system_prompt: Manage, \
                  tools: [invoke_acp_agent]}}}";
    for (name, permitted) in [("manager", true), ("general-purpose", false)] {
        let answers =
            json!([{"text": "", "tool_calls": [call("coder", "work")]}, {"text": "{{tool_result}}"}]);
        let script = lead(&[task("Manage it", name)], vec![subagent(answers)]);
        let house = house(script, &format!("{AGENTS}\n{agents}"), &Arc::default()).await;
        house.ask("Go").await;
        let rows = house.executions().await;
        let external: Vec<&ExecutionRow> = rows.iter().filter(|row| row.kind == ExecutionKind::Acp).collect();
        let result = house.results().await[0]["content"].to_string();
        if permitted {
            let manager = rows.iter().find(|row| row.kind == ExecutionKind::Task).unwrap();
            assert_eq!(external[0].parent_execution.as_ref(), Some(&manager.execution_id));
            assert_eq!((external[0].status, external[0].delivered), (ExecutionStatus::Completed, true));
            assert!(result.contains("did: work"), "{result}");
        } else {
            assert!(
                external.is_empty() && result.contains("there is no tool `invoke_acp_agent`"),
                "{result}"
            );
        }
    }
}

/// The process dies in the middle of a call: the next run makes the call again, as a second attempt.
#[tokio::test]
async fn a_call_that_its_process_did_not_survive_is_made_again() {
    let mut script = lead(&[call("coder", "hang")], vec![]);
    let other = json!({"when": {"contains": ["Never mind"]}, "answers": [{"text": "Fine."}]});
    script["rules"].as_array_mut().unwrap().insert(0, other);
    let fake = Arc::<Fake>::default();
    let house = house(script, AGENTS, &fake).await;
    let mut seen = Seen::default();
    tokio::select! {
        ended = house.run("r1", Some("Go"), &mut seen) => panic!("{ended:?}"),
        () = fake.hangs.notified() => {}
    }
    assert_eq!(ends(&house.executions().await), [(1, "running", None, false)]);
    let interrupted = Some("Its run ended before it");
    let next = house.restarted().with_external(Arc::clone(&fake) as Arc<dyn Tool>);
    let mut seen = Seen::default();
    tokio::select! {
        ended = next.run("r2", None, &mut seen) => panic!("{ended:?}"),
        () = fake.hangs.notified() => {}
    }
    assert_eq!(
        ends(&next.executions().await),
        [(1, "cancelled", interrupted, true), (2, "running", None, false)]
    );
    // A new question turns away from it.
    let last = next.restarted().with_external(Arc::new(Fake::default()));
    let ended = last.run("r3", Some("Never mind"), &mut Seen::default()).await.unwrap();
    assert!(matches!(ended, Ended::Done { .. }));
    assert_eq!(
        ends(&last.executions().await),
        [(1, "cancelled", interrupted, true), (2, "cancelled", interrupted, true)]
    );
}

/// A process stood still before it delegated: its run has ended, and another one goes on with the call. It stores
/// no result, and no execution.
#[tokio::test]
async fn a_run_that_has_ended_stores_nothing_of_what_it_delegates() {
    for call in [call("coder", "work"), task("Work", "general-purpose")] {
        let script = lead(&[call], vec![subagent(json!([{"text": "ok"}]))]);
        let house = house(script, AGENTS, &Arc::default()).await.recorded();
        let error = house.run("r1", Some("Go"), &mut Seen::default()).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "no result of a tool call was stored: Run r1 has ended or was deleted, so nothing was stored for it; start \
             another run; the next run of the thread makes the call again"
        );
        assert_eq!((house.results().await, house.executions().await), (vec![], vec![]));
        house.begin("r2").await;
        house.run("r2", None, &mut Seen::default()).await.unwrap();
        let results = house.results().await;
        assert_eq!((results.len(), &results[0]["status"]), (1, &json!("success")), "{results:?}");
        assert_eq!(house.executions().await[0].run_id, "r2");
    }
}

/// Another run takes the recorded call over; false if none is recorded yet.
fn taken_over(records: &Records) -> bool {
    let records = records.clone();
    let taking = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let executions = records.executions();
            let rows = executions.of_thread(THREAD).await.unwrap();
            let Some(row) = rows.first() else { return false };
            let run = ("r2", Delegating::Unrecorded);
            executions.take_over(row, run, "taken over", &BTreeMap::new()).await.unwrap()
        })
    });
    taking.join().unwrap()
}

/// A process stands still after it has recorded a call, and another run takes the call over: the agent is not called.
#[tokio::test]
async fn a_call_that_another_run_has_taken_over_reaches_no_agent() {
    let (taken, place) = (Arc::<AtomicBool>::default(), Arc::<OnceLock<Records>>::default());
    let (done, opened) = (Arc::clone(&taken), Arc::clone(&place));
    // The clock is read between the two.
    let clock = Clock::from_fn(move || {
        if let Some(records) = opened.get()
            && !done.swap(true, Ordering::SeqCst)
        {
            done.store(taken_over(records), Ordering::SeqCst);
        }
        chrono::Utc::now()
    });
    let records = Records::open_memory(RecordsOptions { clock, ..RecordsOptions::default() }).await.unwrap();
    assert!(place.set(records.clone()).is_ok());
    let table = Schema::thread_state().compile(ChannelMode::Full, 3).unwrap();
    let ids = Arc::new(IdSource::default());
    let accessor = StateAccessor::new(Arc::new(MemorySaver::default()), Arc::new(table), ids);
    let directory = tempfile::tempdir().unwrap();
    let script = lead(&[call("coder", "work")], vec![]);
    let house = House::in_directory(directory, records, accessor, script, AGENTS)
        .with_external(Arc::<Fake>::default() as Arc<dyn Tool>);
    let error = house.run("r1", Some("Go"), &mut Seen::default()).await.unwrap_err().to_string();
    assert!(error.contains("Run r1 has ended") && error.ends_with("makes the call again"), "{error}");
    assert!(taken.load(Ordering::SeqCst), "it was taken over");
    let rows = house.executions().await;
    assert_eq!(
        (ends(&rows), rows[0].run_id.as_str()),
        (vec![(1, "cancelled", Some("taken over"), false)], "r2")
    );
    assert_eq!(house.results().await, Vec::<Json>::new());
}

/// A batch goes on without the run that submitted it, and so does what its items have asked external agents for.
#[tokio::test]
async fn the_call_of_a_batch_item_is_left_alone_by_the_runs_of_its_thread() {
    let manager = "subagents: {custom_agents: {manager: {description: Manages, system_prompt: Manage, tools: \
                   [invoke_acp_agent]}}}\nsubagent_batches: {enabled: true, poll_interval_seconds: 0.1}";
    let submit = json!({"name": "batch_task", "args": {"title": "One", "items": [{"key": "a", "prompt": "do it"}],
        "subagent_type": "manager"}});
    let item =
        subagent(json!([{"text": "", "tool_calls": [call("coder", "wait")]}, {"text": "{{tool_result}}"}]));
    let mut script = lead(&[submit], vec![item]);
    let other = json!({"when": {"contains": ["Anything else"]}, "answers": [{"text": "No."}]});
    script["rules"].as_array_mut().unwrap().insert(0, other);
    let fake = Arc::<Fake>::default();
    let house = house(script, &format!("{AGENTS}\n{manager}"), &fake).await;
    let worker = batches::worker(&house).await;
    house.ask("go").await;
    fake.hangs.notified().await;
    let external = async || {
        let rows = house.executions().await.into_iter();
        rows.filter(|row| row.kind == ExecutionKind::Acp).collect::<Vec<_>>()
    };
    let before = external().await;
    assert_eq!(ends(&before), [(1, "running", None, false)]);
    let ended = house.run("r2", Some("Anything else?"), &mut Seen::default()).await.unwrap();
    assert!(matches!(ended, Ended::Done { .. }));
    house.delegator.abandon(&house.accessor, THREAD, "r3").await.unwrap();
    assert_eq!(external().await, before);
    fake.goes_on.notify_one();
    batches::ended(&house).await;
    assert_eq!(ends(&external().await), [(1, "completed", None, true)]);
    assert_eq!(batches::rows(&house).await[0].result_preview.as_deref(), Some("waited"));
    worker.stop().await;
}

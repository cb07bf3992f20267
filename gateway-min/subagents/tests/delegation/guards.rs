//! What guards a subagent at work: against loops, long conversations, and observers that fail.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use threadkeep::id::ThreadId;
use threadkeep_agent::receipts::LEDGER_KEY;
use threadkeep_agent::tools::WorkUsage;
use threadkeep_agent::tools::loop_detection::Verdict;
use threadkeep_agent::{Ended, Observer};
use threadkeep_records::Records;
use threadkeep_subagents::hooks::{HookStore, Hooks, LifecycleHooks, TaskConclusion, TaskInfo};

use crate::batches::{ended, submitted, worker};
use crate::support::{House, Seen, Still, THREAD, lead, subagent, task};

/// Keeps what loop detection said of whom.
#[derive(Default)]
struct Loops {
    seen: Seen,
    verdicts: Vec<(Option<String>, bool)>,
}

#[async_trait]
impl Observer for Loops {
    async fn custom(&mut self, event: &Json) {
        self.seen.custom(event).await;
    }

    fn used(&mut self, usage: &WorkUsage) {
        self.seen.used(usage);
    }

    fn loop_checked(&mut self, subagent: Option<&str>, verdict: &Verdict) {
        if *verdict != Verdict::Proceed {
            self.verdicts.push((subagent.map(str::to_owned), matches!(verdict, Verdict::Stop(_))));
        }
    }
}

/// Scenario 69.
#[tokio::test]
async fn a_subagent_in_a_circle_is_warned_at_the_third_call_and_stopped_at_the_fifth() {
    let circle = json!({"when": {"caller": "subagent"}, "repeat_last": true, "answers": [
        {"text": "Again.", "tool_calls": [{"name": "ls", "args": {}}]},
    ]});
    let house = House::new(lead(&[task("x", "general-purpose")], vec![circle]), "").await;
    for run in ["r1", "r2"] {
        let mut loops = Loops::default();
        house.run_observed(run, Some("go"), &mut loops).await.unwrap();
        let agent = Some("general-purpose".to_owned());
        assert_eq!(loops.verdicts, [(agent.clone(), false), (agent, true)], "{run}: each starts clean");
    }
    let results = house.results().await;
    assert_eq!(results.len(), 2);
    for result in &results {
        assert_eq!(result["additional_kwargs"]["subagent_stop_reason"], "loop_capped", "{result}");
    }
    let requests = house.requests("subagent:general-purpose");
    assert_eq!(requests.len(), 2 * 5, "no further model call");
    let is_warned = |request: &Json| request["messages"].to_string().contains("loop_warning");
    assert_eq!(
        requests[..5].iter().map(is_warned).collect::<Vec<_>>(),
        [false, false, false, true, false],
        "once"
    );

    // Reading a file page by page is no circle.
    let pages: Vec<Json> = (0..6)
        .map(|page| json!({"text": "Next.", "tool_calls": [{"name": "read_file", "args": {"path": "f", "start_line": page * 200 + 1, "end_line": page * 200 + 40}}]}))
        .chain([json!({"text": "Read."})])
        .collect();
    let house = House::new(lead(&[task("x", "general-purpose")], vec![subagent(json!(pages))]), "").await;
    let mut loops = Loops::default();
    house.run_observed("r", Some("go"), &mut loops).await.unwrap();
    assert_eq!(loops.verdicts, []);
}

/// Scenario 71.
#[tokio::test]
async fn a_summary_of_a_subagents_conversation_keeps_what_it_was_told() {
    let calls = |turn: usize| json!({"text": format!("{turn}."), "tool_calls": [{"name": "glob", "args": {"pattern": turn.to_string()}}]});
    let answers: Vec<Json> = (0..4).map(calls).collect();
    let found = json!({"when": {"caller": "subagent", "offered": ["ls"], "anywhere": ["It searched."]}, "answers": [
        {"text": "Found it."}, {"text": "Found it."}, {"text": "Found it."},
    ]});
    let summarizing =
        json!({"when": {"caller": "middleware:summarization"}, "answers": [{"text": "It searched."}]});
    let sections = "summarization: {enabled: true, trigger: {type: messages, value: 5}, keep: {type: messages, value: 2}}";
    let rules = vec![summarizing, found, subagent(json!(answers))];
    let house = House::new(lead(&[task("find the needle", "general-purpose")], rules), sections).await;
    house.ask("go").await;
    assert!(!house.requests("middleware:summarization").is_empty(), "it was summarized");
    let requests = house.requests("subagent:general-purpose");
    let (first, last) = (&requests[0], requests.last().unwrap());
    let first_system = first["system"].as_str().unwrap();
    assert!(last["system"].as_str().unwrap().starts_with(first_system), "{last}");
    assert!(first_system.contains("<current_date>"), "{first_system}");
    let is_task =
        |message: &Json| message["type"] == "human" && message.to_string().contains("find the needle");
    assert!(last["messages"].as_array().unwrap().iter().any(is_task), "{last}");
    assert!(last.to_string().contains("It searched."), "{last}");
    assert_eq!(house.results().await[0]["content"], "Task Succeeded. Result: Found it.");
    let child = ThreadId::from(house.executions().await[0].child_thread.as_str());
    let said = house.accessor.get(&child, None).await.unwrap().unwrap().json("messages").unwrap().unwrap();
    let answers: Vec<&Json> =
        said.as_array().unwrap().iter().filter(|message| message["type"] == "ai").collect();
    assert!(answers.len() > 1, "the last of those before the summary are kept: {said}");
    assert!(answers.iter().all(|answer| answer["additional_kwargs"][LEDGER_KEY].is_array()), "{said}");
    assert_eq!(house.state().await.json("summary_text").unwrap().unwrap_or_default(), Json::Null);
}

/// What summaries of a subagent's conversation cost, also one that failed, the subagent has used.
#[tokio::test]
async fn the_summaries_of_a_subagents_conversation_are_counted_as_its_own() {
    for summary in ["It searched.", ""] {
        let house =
            House::new(lead(&[task("x", "general-purpose")], summarized(summary, 900)), SUMMARIES).await;
        let seen = house.ask("go").await;
        assert_eq!(house.requests("middleware:summarization").len(), 1, "{summary:?}");
        assert_eq!(house.results().await[0]["content"], "Task Succeeded. Result: Found it.", "{summary:?}");
        let calls = house.requests("subagent:general-purpose").len() as u64;
        let tokens = |total: &Json| total["total_tokens"].as_u64().unwrap();
        let total = calls * 6 + 910;
        let caller = "subagent:general-purpose".to_owned();
        let used: Vec<_> = seen
            .used
            .iter()
            .map(|(model, caller, calls, sum)| (&model[..], caller, *calls, sum.total))
            .collect();
        let own = i64::try_from(calls).unwrap() * 6;
        assert_eq!(used, [("main", &caller, calls, own), ("other", &caller, 1, 910)], "{summary:?}");
        let row = house.executions().await.remove(0);
        assert_eq!(row.usage["other"].total_tokens, 910, "{summary:?}");
        assert_eq!(row.tokens().unwrap().total_tokens, total, "{summary:?}");
        let shown = &house.results().await[0]["additional_kwargs"]["subagent_token_usage"];
        assert_eq!(tokens(shown), total, "{summary:?}");
        let running = seen.events.iter().rfind(|event| event["type"] == "task_running").unwrap();
        assert_eq!(tokens(&running["usage"]), total, "{summary:?}");
    }
    // It counts on the subagent's budget: no model call follows.
    let sections = format!("{SUMMARIES}\nsubagents: {{token_budget: {{enabled: true, max_tokens: 1000}}}}");
    let house =
        House::new(lead(&[task("x", "general-purpose")], summarized("It searched.", 990)), &sections).await;
    house.ask("go").await;
    assert_eq!(house.results().await[0]["additional_kwargs"]["subagent_stop_reason"], "token_capped");
    assert_eq!(house.requests("subagent:general-purpose").len(), 2);
}

/// Another model summarizes conversations of five messages.
pub(crate) const SUMMARIES: &str = "summarization: {enabled: true, model_name: other, trigger: {type: messages, value: 5}, \
     keep: {type: messages, value: 2}}";

/// A subagent that searches until its conversation has this summary, or four times. Each call has used something, the summary
/// ten tokens more than those of its input.
pub(crate) fn summarized(summary: &str, input_tokens: u64) -> Vec<Json> {
    let usage = json!({"input_tokens": 5, "output_tokens": 1});
    let found = json!({"text": "Found it.", "usage": usage});
    let calls = |turn: usize| {
        let call = json!({"name": "glob", "args": {"pattern": turn.to_string()}});
        json!({"text": format!("{turn}."), "tool_calls": [call], "usage": usage})
    };
    let answers: Vec<Json> = (0..4).map(calls).chain([found.clone()]).collect();
    let summary = json!({"text": summary, "usage": {"input_tokens": input_tokens, "output_tokens": 10}});
    vec![
        json!({"when": {"caller": "middleware:summarization"}, "answers": [summary]}),
        json!({"when": {"caller": "subagent", "anywhere": ["It searched."]}, "answers": [found, found, found]}),
        subagent(json!(answers)),
    ]
}

/// Scenario 44, second half: a summary in the middle of a run takes no delegation off its total.
#[tokio::test]
async fn a_summary_gives_no_delegation_back() {
    let ask = |prompt: &str| json!({"text": "I delegate.", "tool_calls": [task(prompt, "general-purpose")]});
    let rules = json!({"rules": [
        {"when": {"caller": "middleware:summarization"}, "answers": [{"text": "It delegated."}]},
        {"when": {"caller": "subagent"}, "answers": [{"text": "ok"}]},
        {"when": {"caller": "lead_agent"}, "repeat_last": true, "answers": [ask("a"), ask("b"), ask("c"), ask("d")]},
    ]});
    let sections = "summarization: {enabled: true, trigger: {type: messages, value: 4}, keep: {type: messages, value: 2}}";
    let mut house = House::new(rules, sections).await;
    house.limits.total = 2;
    house.ask("go").await;
    assert!(!house.requests("middleware:summarization").is_empty(), "it was summarized");
    assert_eq!(house.executions().await.len(), 2);
    assert_eq!(house.ledger().await.len(), 2);
    let shown = house.requests("lead_agent").last().unwrap().to_string();
    assert!(shown.contains("## Work already delegated"), "{shown}");
}

/// Scenario 13.
#[tokio::test]
async fn an_observer_that_fails_stops_the_subagents_with_its_run() {
    /// Fails when it hears of a tool's result, while another subagent waits.
    struct Failing;

    #[async_trait]
    impl Observer for Failing {
        async fn message_added(
            &mut self,
            message: threadkeep_agent::Added<'_>,
        ) -> Result<(), threadkeep_agent::ObserverError> {
            match message {
                threadkeep_agent::Added::ToolResult { .. } => {
                    Err(std::io::Error::other("the journal is full").into())
                }
                _ => Ok(()),
            }
        }
    }

    let waiting = json!({"when": {"caller": "subagent", "contains": ["wait"]}, "answers": [
        {"text": "never said", "gate": {"name": "scenario-13"}},
    ]});
    let calls = [task("wait", "general-purpose"), task("x", "general-purpose")];
    let house = House::new(lead(&calls, vec![waiting, subagent(json!([{"text": "ok"}]))]), "").await;
    let error = house.run_observed("r", Some("go"), &mut Failing).await.unwrap_err();
    assert!(error.to_string().contains("the journal is full"), "{error}");
    // Nobody waits for them any more; they settle by themselves.
    let settled = async {
        while house.delegator.admission.counts().running > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_mins(10), settled).await.expect("they go on");
    let rows = house.executions().await;
    assert!(rows.iter().all(|row| row.status.is_terminal()), "{rows:?}");
}

/// Bug 15: every result of a step with several calls is followed, also when a summary has made the conversation shorter.
#[tokio::test]
async fn every_result_of_every_step_is_followed_also_after_a_summary() {
    let calls = |turn: usize| {
        let calls: Vec<Json> = (0..3)
            .map(|call| json!({"name": "glob", "args": {"pattern": format!("{turn}.{call}")}}))
            .collect();
        json!({"text": format!("Turn {turn}."), "tool_calls": calls})
    };
    let answers: Vec<Json> = (0..4).map(calls).collect();
    let found = json!({"when": {"caller": "subagent", "anywhere": ["It searched."]}, "answers": [
        calls(4), {"text": "Found it."}, {"text": "Found it."}, {"text": "Found it."},
    ]});
    let summarizing =
        json!({"when": {"caller": "middleware:summarization"}, "answers": [{"text": "It searched."}]});
    let sections = "summarization: {enabled: true, trigger: {type: messages, value: 8}, keep: {type: messages, value: 2}}";
    let rules = vec![summarizing, found, subagent(json!(answers))];
    let house = House::new(lead(&[task("x", "general-purpose")], rules), sections).await;
    let seen = house.ask("go").await;
    assert!(!house.requests("middleware:summarization").is_empty(), "it was summarized");
    let steps: Vec<&Json> = seen.events.iter().filter(|event| event["type"] == "task_running").collect();
    let mut numbers: Vec<u64> = steps.iter().map(|event| event["message_index"].as_u64().unwrap()).collect();
    // Calls end in any order.
    numbers.sort_unstable();
    assert_eq!(numbers, (1..=steps.len() as u64).collect::<Vec<_>>());
    let requests = house.requests("subagent:general-purpose").len();
    let of = |kind: &str| steps.iter().filter(|event| event["message"]["type"] == kind).count();
    assert_eq!(
        (of("ai"), of("tool")),
        (requests, 3 * (requests - 1)),
        "three results each turn but the last"
    );
    let ids: BTreeSet<String> = steps.iter().map(|event| event["message"]["id"].to_string()).collect();
    assert_eq!(ids.len(), steps.len(), "none twice");
}

/// Bug 10: who waits gets the slot when all of the one before is written.
#[tokio::test]
async fn a_slot_is_given_back_when_everything_is_written() {
    /// Notes at each start and end how the executions of the thread stand.
    struct Standing(Records, Mutex<Vec<Vec<&'static str>>>);

    impl Standing {
        async fn note(&self) {
            // Extensions have three seconds.
            let _still = Still::begin();
            let rows = self.0.executions().of_thread(THREAD).await.unwrap();
            let mut statuses: Vec<_> = rows.iter().map(|row| row.status.as_str()).collect();
            statuses.sort_unstable();
            self.1.lock().unwrap().push(statuses);
        }
    }

    #[async_trait]
    impl LifecycleHooks for Standing {
        async fn on_task_start(&self, _: &HookStore, _: &HookStore, _: &TaskInfo) {
            self.note().await;
        }

        async fn on_task_stop(&self, _: &HookStore, _: &HookStore, _: &TaskInfo, _: TaskConclusion) {
            self.note().await;
        }
    }

    let calls = [task("a", "general-purpose"), task("b", "general-purpose")];
    let script = lead(&calls, vec![subagent(json!([{"text": "ok"}]))]);
    let mut house = House::new(script, "subagent_runtime: {max_running: 1}").await;
    let standing = Arc::new(Standing(house.delegator.records.clone(), Mutex::default()));
    let hooks = Hooks::new(vec![Arc::clone(&standing) as Arc<dyn LifecycleHooks>]);
    Arc::get_mut(&mut house.delegator).unwrap().hooks = Arc::new(hooks);
    house.ask("go").await;
    let noted = standing.1.lock().unwrap();
    // The second one may not have its row yet when the first one starts and ends.
    let waiting = |rows: &[&str], first: &str| {
        rows == [first] || rows.iter().collect::<BTreeSet<_>>() == BTreeSet::from([&first, &"pending"])
    };
    assert!(waiting(&noted[0], "running") && waiting(&noted[1], "completed"), "{noted:?}");
    assert_eq!(noted[2..], [["completed", "running"], ["completed", "completed"]]);
}

/// The next attempt at an item is the same task for extensions: it must not begin before they know of the last one's
/// end.
#[tokio::test]
async fn extensions_know_of_the_end_of_an_attempt_while_its_item_is_still_at_work() {
    /// Notes at each start and end how the one item stands.
    struct Standing(Records, Mutex<Vec<String>>);

    impl Standing {
        async fn note(&self, what: &str) {
            // Extensions have three seconds.
            let _still = Still::begin();
            let batches = self.0.batches();
            let batch = batches.of_thread(THREAD, 1).await.unwrap().remove(0);
            let item = batches.items(&batch.id, None, 0, 1).await.unwrap().remove(0);
            let noted = format!("{what}, {} in attempt {}", item.status.as_str(), item.attempt);
            self.1.lock().unwrap().push(noted);
        }
    }

    #[async_trait]
    impl LifecycleHooks for Standing {
        async fn on_task_start(&self, _: &HookStore, _: &HookStore, _: &TaskInfo) {
            self.note("starts").await;
        }

        async fn on_task_stop(&self, _: &HookStore, _: &HookStore, _: &TaskInfo, outcome: TaskConclusion) {
            self.note(outcome.as_str()).await;
        }
    }

    let failing = json!([{"error": {"kind": "fatal", "message": "no"}}]);
    let mut house = submitted(&["a"], failing, "").await;
    let standing = Arc::new(Standing(house.delegator.records.clone(), Mutex::default()));
    let hooks = Hooks::new(vec![Arc::clone(&standing) as Arc<dyn LifecycleHooks>]);
    Arc::get_mut(&mut house.delegator).unwrap().hooks = Arc::new(hooks);
    let worker = worker(&house).await;
    ended(&house).await;
    worker.stop().await;
    let noted =
        |attempt: i64| ["starts", "failed"].map(|what| format!("{what}, running in attempt {attempt}"));
    let expected: Vec<String> = (1..=3).flat_map(noted).collect();
    assert_eq!(*standing.1.lock().unwrap(), expected);
}

/// Scenario 43, second half.
#[tokio::test]
async fn a_new_run_has_all_of_its_delegations_and_one_that_goes_on_leaves_calls_to_theirs() {
    let gate = json!({"name": "scenario-43"});
    let waiting = json!({"when": {"caller": "subagent", "contains": ["wait"]}, "answers": [{"text": "ok", "gate": gate}]});
    let rules = json!({"rules": [
        waiting,
        subagent(json!([{"text": "ok"}])),
        {"when": {"caller": "lead_agent", "contains": ["stop"]}, "answers": [
            {"tool_calls": [task("wait", "general-purpose")]},
            {"tool_calls": [task("more", "general-purpose")]},
            {"text": "Done."},
        ]},
        {"when": {"caller": "lead_agent"}, "answers": [
            {"tool_calls": [task("x", "general-purpose"), task("y", "general-purpose")]}, {"text": "Done."},
        ]},
    ]});
    let mut house = House::new(rules, "").await;
    house.limits.total = 1;
    for run in ["r1", "r2"] {
        house.run(run, Some("go"), &mut Seen::default()).await.unwrap();
    }
    assert_eq!(house.executions().await.len(), 2, "one each");
    let cancel_at = Some(("task_started", tokio_util::sync::CancellationToken::new()));
    let mut seen = Seen { cancel_at, ..Seen::default() };
    assert_eq!(house.run("r3", Some("stop"), &mut seen).await.unwrap(), Ended::Cancelled);
    house.run("r4", None, &mut Seen::default()).await.unwrap();
    let runs: Vec<Json> = house.ledger().await.iter().map(|entry| entry["run_id"].clone()).collect();
    assert_eq!(runs, ["r1", "r2", "r3", "r4"], "the call of r3 is not one of r4");
}

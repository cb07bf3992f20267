//! What guards a subagent at work: against loops, long conversations, and observers that fail.

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use threadkeep_agent::tools::loop_detection::Verdict;
use threadkeep_agent::{Observer, Tokens};

use crate::support::{House, Seen, lead, subagent, task};

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

    fn used(&mut self, model: &str, caller: &str, calls: u64, tokens: Tokens) {
        self.seen.used(model, caller, calls, tokens);
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
    assert_eq!(house.state().await.json("summary_text").unwrap().unwrap_or_default(), Json::Null);
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
                threadkeep_agent::Added::ToolResult(_) => {
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
    while house.delegator.admission.counts().running > 0 {
        tokio::task::yield_now().await;
    }
    let rows = house.executions().await;
    assert!(rows.iter().all(|row| row.status.is_terminal()), "{rows:?}");
}

//! Runs of an agent on a store.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use threadkeep::channel::Schema;
use threadkeep::id::{IdSource, ThreadId};
use threadkeep::mode::ChannelMode;
use threadkeep::state::{StateAccessor, StateSnapshot};
use threadkeep::step::StepWriter;
use threadkeep_config::{ContextSize, Summarization};
use threadkeep_memory::MemorySaver;

use super::*;
use crate::model::message;
use crate::model::scripted::ScriptedModel;
use crate::tools::{Tool, ToolError, ToolOutput, ToolSettings, ToolSpec, asks};
use crate::{Before, Observer, ObserverError, RunTerms, View};

const MODES: [ChannelMode; 2] = [ChannelMode::Full, ChannelMode::Delta];

fn accessor(mode: ChannelMode) -> StateAccessor {
    let table = Schema::thread_state().compile(mode, 3).unwrap();
    StateAccessor::new(Arc::new(MemorySaver::default()), Arc::new(table), Arc::new(IdSource::default()))
}

fn model(answers: &Json) -> RetryingModel {
    scripted(&json!([{"answers": answers}]))
}

/// A model that answers by these rules.
fn scripted(rules: &Json) -> RetryingModel {
    let script = json!({ "rules": rules }).to_string();
    RetryingModel::new(Arc::new(ScriptedModel::from_json("m", &script).unwrap()))
}

/// A run of this agent on the thread; without a question it goes on with what broke off. Returns what came of it and
/// the thread's messages.
async fn run(
    agent: &Agent,
    accessor: &StateAccessor,
    observer: &mut dyn Observer,
    question: Option<&str>,
) -> (Result<Ended, AgentError>, Vec<Json>) {
    let mut writer = StepWriter::open(accessor, &ThreadId::from("t"), None).await.unwrap();
    let input = question.map(|text| Map::from_iter([("messages".to_owned(), json!([message::human(text)]))]));
    let mut session = Session::new(RunTerms::new("r", 10), &mut writer, observer);
    let ended = agent.run(&mut session, input.map(Into::into)).await;
    let messages = conversation(session.writer.state()).unwrap();
    (ended, messages)
}

/// Ends after every other call.
struct Slow;

#[async_trait]
impl Tool for Slow {
    fn spec(&self) -> ToolSpec {
        let (name, description) = ("slow".to_owned(), String::new());
        ToolSpec { name, description, parameters: json!({"type": "object", "properties": {}}) }
    }

    async fn call(&self, _: &ToolContext, _: Json) -> Result<ToolOutput, ToolError> {
        tokio::time::sleep(Duration::from_secs(1)).await;
        Ok(ToolOutput::text("done"))
    }
}

/// Stores nothing, and no result of this tool.
struct Storing {
    fails_for: &'static str,
}

#[async_trait]
impl Observer for Storing {
    async fn message_added(&mut self, message: Added<'_>) -> Result<(), ObserverError> {
        match message {
            Added::ToolResult { message, .. } if message["name"] == self.fails_for => {
                Err("the disk is full".into())
            }
            _ => Ok(()),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_question_that_was_stored_before_its_run_broke_off_still_ends_the_run() {
    for mode in MODES {
        let accessor = accessor(mode);
        let ask = json!({"name": "ask_clarification", "args": {"question": "Which one?"}});
        let answers = json!([{"tool_calls": [ask, {"name": "slow"}]}, {"text": "The left one."}]);
        let mut toolbox = Toolbox::builtin(&ToolSettings::default());
        toolbox.add(Arc::new(Slow));
        let agent = Agent::new(model(&answers), toolbox, ToolContext::new("t", "r", "/nonexistent"));
        let (ended, _) = run(&agent, &accessor, &mut Storing { fails_for: "slow" }, Some("go")).await;
        assert!(matches!(ended, Err(AgentError::Observer(_))), "{ended:?}");
        let (ended, messages) = run(&agent, &accessor, &mut Storing { fails_for: "" }, None).await;
        assert!(matches!(ended, Ok(Ended::Done { .. })), "{ended:?}");
        assert!(asks(&messages), "the user is asked: {messages:?}");
        assert_eq!(messages.len(), 4, "{messages:?}");
    }
}

/// Counts its calls.
struct Counting(Arc<AtomicUsize>);

#[async_trait]
impl Tool for Counting {
    fn spec(&self) -> ToolSpec {
        let (name, description) = ("count".to_owned(), String::new());
        ToolSpec { name, description, parameters: json!({"type": "object", "properties": {}}) }
    }

    async fn call(&self, _: &ToolContext, _: Json) -> Result<ToolOutput, ToolError> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(ToolOutput::text("counted"))
    }
}

/// Of two calls the first has ended when the run breaks off; a run goes on with this input. Returns how often the first
/// was made, and the thread's messages.
async fn changed(mode: ChannelMode, writes: Json, next: Next) -> (usize, Vec<Json>) {
    let accessor = accessor(mode);
    let calls = json!([{"name": "count"}, {"name": "slow"}]);
    let answers = json!([{"tool_calls": calls}, {"text": "Done."}, {"text": "Done again."}]);
    let counted = Arc::<AtomicUsize>::default();
    let mut toolbox = Toolbox::new();
    toolbox.add(Arc::new(Counting(Arc::clone(&counted))));
    toolbox.add(Arc::new(Slow));
    let agent = Agent::new(model(&answers), toolbox, ToolContext::new("t", "r", "/nonexistent"));
    let (ended, _) = run(&agent, &accessor, &mut Storing { fails_for: "slow" }, Some("go")).await;
    assert!(matches!(ended, Err(AgentError::Observer(_))), "{ended:?}");
    let Json::Object(writes) = writes else { panic!("channels") };
    let input = Input { next, ..Input::from(writes) };
    let mut writer = StepWriter::open(&accessor, &ThreadId::from("t"), None).await.unwrap();
    let mut observer = Storing { fails_for: "" };
    let mut session = Session::new(RunTerms::new("r", 10), &mut writer, &mut observer);
    let ended = agent.run(&mut session, Some(input)).await;
    assert!(matches!(ended, Ok(Ended::Done { .. })), "{ended:?}");
    (counted.load(Ordering::SeqCst), conversation(writer.state()).unwrap())
}

#[tokio::test(start_paused = true)]
async fn a_change_of_the_state_leaves_the_run_what_has_finished() {
    for mode in MODES {
        for next in [Next::Stay, Next::Go(Some(TOOLS.into()))] {
            let system = json!({"type": "system", "content": "Hurry.", "id": "s"});
            for writes in [json!({"title": "Seen"}), json!({ "messages": [system] })] {
                let (counted, messages) = changed(mode, writes, next.clone()).await;
                assert_eq!(counted, 1, "{mode} {next:?}");
                let kinds: Vec<&str> = messages.iter().map(message::kind).collect();
                let kinds: Vec<&str> = kinds.into_iter().filter(|kind| *kind != "system").collect();
                assert_eq!(kinds, ["human", "ai", "tool", "tool", "ai"], "{mode} {next:?}");
                let results = messages.iter().filter(|message| message::kind(message) == "tool");
                let texts: Vec<String> = results.map(message::text).collect();
                assert_eq!(texts, ["counted", "done"], "{mode} {next:?}");
            }
        }
    }
}

/// What has finished belongs to an answer that is no longer there.
#[tokio::test(start_paused = true)]
async fn the_calls_of_another_answer_are_made() {
    for mode in MODES {
        let call = |name: &str| json!({"type": "tool_call", "name": name, "args": {}, "id": name});
        let answer =
            json!({"type": "ai", "content": "", "id": "a", "tool_calls": [call("slow"), call("count")]});
        let (counted, messages) = changed(mode, json!({ "messages": [answer] }), Next::Stay).await;
        assert_eq!(counted, 2, "{mode}");
        let results = messages.iter().filter(|message| message::kind(message) == "tool");
        assert_eq!(results.map(message::text).collect::<Vec<_>>(), ["done", "counted"], "{mode}");
    }
}

/// A person adds a call to the answer, or takes one away, before the run goes on.
#[tokio::test(start_paused = true)]
async fn each_call_of_a_changed_answer_is_made_once() {
    for mode in MODES {
        for next in [Next::Stay, Next::Go(Some(TOOLS.into()))] {
            for names in [&["count"][..], &["count", "slow", "count"]] {
                let call = |(at, name): (usize, &&str)| json!({"type": "tool_call", "name": name, "args": {}, "id": format!("c{at}")});
                let calls: Vec<Json> = names.iter().enumerate().map(call).collect();
                let answer = json!({"type": "ai", "content": "", "id": "a", "tool_calls": calls});
                let (counted, messages) = changed(mode, json!({ "messages": [answer] }), next.clone()).await;
                let made = names.iter().filter(|name| **name == "count").count();
                // One of the answer before.
                assert_eq!(counted, 1 + made, "{mode} {next:?} {names:?}");
                let results = messages.iter().filter(|message| message::kind(message) == "tool");
                let results: Vec<&Json> = results.map(|result| &result["tool_call_id"]).collect();
                let ids: Vec<&Json> = calls.iter().map(|call| &call["id"]).collect();
                assert_eq!(results, ids, "{mode} {next:?}");
            }
        }
    }
}

/// Remembers the kinds of the messages of the turn at each model call.
struct Turns(Mutex<Vec<Vec<String>>>);

impl Middleware for Turns {
    fn before_model(&self, view: &View<'_>) -> Result<Before, AgentError> {
        let kinds = view.turn.iter().map(|message| message::kind(message).to_owned()).collect();
        self.0.lock().unwrap().push(kinds);
        Ok(Before::default())
    }
}

/// What a run is charged is read from its turn.
#[tokio::test]
async fn a_turn_begins_with_its_question_also_after_a_summary() {
    for mode in MODES {
        let accessor = accessor(mode);
        let turns = Arc::new(Turns(Mutex::default()));
        let context = ToolContext::new("t", "r", "/nonexistent");
        let mut agent = Agent::new(model(&json!([{"text": "Yes."}])), Toolbox::new(), context);
        agent.middleware = vec![Arc::clone(&turns) as Arc<dyn Middleware>];
        agent.summarizer = Some(Summarizer {
            model: model(&json!([{"text": "They talked."}])),
            settings: Summarization {
                trigger: vec![ContextSize::Messages(5)],
                keep: ContextSize::Messages(3),
                ..Summarization::default()
            },
            window: None,
        });
        for question in ["one", "two", "three"] {
            let (ended, _) = run(&agent, &accessor, &mut Storing { fails_for: "" }, Some(question)).await;
            assert!(matches!(ended, Ok(Ended::Done { .. })), "{ended:?}");
        }
        assert_eq!(*turns.0.lock().unwrap(), [["human"], ["human"], ["human"]]);
        let writer = StepWriter::open(&accessor, &ThreadId::from("t"), None).await.unwrap();
        let messages = conversation(writer.state()).unwrap();
        let kinds: Vec<&str> = messages.iter().map(message::kind).collect();
        assert_eq!(kinds, ["human", "ai", "human", "ai"], "the first turn is in the summary");
    }
}

/// A run with this goal, whose models answer by these rules. Returns what came of it and the thread's last state.
async fn pursued(rules: &Json, goal: Json) -> (Ended, StateSnapshot) {
    let context = ToolContext::new("t", "r", "/nonexistent");
    let agent = Agent::new(scripted(rules), Toolbox::new(), context);
    let accessor = accessor(ChannelMode::Full);
    let mut writer = StepWriter::open(&accessor, &ThreadId::from("t"), None).await.unwrap();
    let mut observer = Storing { fails_for: "" };
    let mut session = Session::new(RunTerms::new("r", 10), &mut writer, &mut observer);
    let messages = json!([message::human("go")]);
    let input = Map::from_iter([("messages".to_owned(), messages), ("goal".to_owned(), goal)]);
    let ended = agent.work(&mut session, Some(input.into()), || async { Ok(false) }).await.unwrap();
    (ended, session.writer.state().unwrap().clone())
}

/// It stays in the conversation, which each model call reads.
#[tokio::test]
async fn what_a_judge_says_is_missing_is_cut_also_in_the_conversation() {
    let verdict = json!({"satisfied": false, "blocker": "goal_not_met_yet", "reason": "x".repeat(5000)});
    let rules = json!([
        {"when": {"caller": "middleware:goal"}, "answers": [{"text": verdict.to_string()}]},
        {"answers": [{"text": "First."}, {"text": "Second."}]},
    ]);
    let goal = json!({"objective": "Ship it", "status": "active", "max_continuations": 1});
    let (_, state) = pursued(&rules, goal).await;
    let messages = conversation(Some(&state)).unwrap();
    let kinds: Vec<&str> = messages.iter().map(message::kind).collect();
    assert_eq!(kinds, ["human", "ai", "human", "ai"]);
    let told = message::text(&messages[2]);
    assert_eq!(told.matches('x').count(), 1000, "{told}");
}

/// The next answer may be as long again; a filter of content would cut it off as well.
#[tokio::test]
async fn a_goal_is_pursued_after_an_answer_that_was_only_too_long() {
    let verdict = json!({"satisfied": false, "blocker": "goal_not_met_yet", "reason": "more"}).to_string();
    let reached = json!({"satisfied": true, "blocker": "none"}).to_string();
    for (reason, said, expected) in [
        ("length", 4, None),
        ("model_length", 4, None),
        ("max_tokens", 4, None),
        ("content_filter", 2, Some("safety_capped")),
    ] {
        let rules = json!([
            {"when": {"caller": "middleware:goal", "contains": ["two."]}, "answers": [{"text": reached}]},
            {"when": {"caller": "middleware:goal"}, "answers": [{"text": verdict}]},
            {"answers": [{"text": "One, ", "finish_reason": reason}, {"text": "two."}]},
        ]);
        let (ended, state) = pursued(&rules, json!({"objective": "Count", "status": "active"})).await;
        let stop_reason = expected.map(str::to_owned);
        assert_eq!(ended, Ended::Done { stop_reason, fallback: None }, "{reason}");
        assert_eq!(conversation(Some(&state)).unwrap().len(), said, "{reason}");
        let left = state.json("goal").unwrap().unwrap_or_default();
        assert_eq!(left["last_evaluation"]["stand_down_reason"].as_str(), expected, "{reason}");
    }
}

#[tokio::test]
async fn a_run_whose_last_answer_the_provider_cut_off_says_so() {
    let call = json!([{"name": "count"}]);
    for (answers, expected) in [
        (json!([{"text": "Yes", "finish_reason": "length"}]), Some("model_length_capped")),
        (json!([{"text": "Yes", "finish_reason": "content_filter"}]), Some("safety_capped")),
        (json!([{"text": "Yes"}]), None),
        (json!([{"tool_calls": call, "finish_reason": "length"}, {"text": "Yes"}]), None),
    ] {
        let mut toolbox = Toolbox::new();
        toolbox.add(Arc::new(Counting(Arc::default())));
        let agent = Agent::new(model(&answers), toolbox, ToolContext::new("t", "r", "/nonexistent"));
        let accessor = accessor(ChannelMode::Full);
        let (ended, _) = run(&agent, &accessor, &mut Storing { fails_for: "" }, Some("go")).await;
        let stop_reason = expected.map(str::to_owned);
        assert_eq!(ended.unwrap(), Ended::Done { stop_reason, fallback: None }, "{answers}");
    }
}

#[tokio::test]
async fn a_run_that_was_cancelled_before_its_first_step_stores_nothing() {
    for mode in MODES {
        let accessor = accessor(mode);
        let context = ToolContext::new("t", "r", "/nonexistent");
        let agent = Agent::new(model(&json!([{"text": "Yes."}])), Toolbox::new(), context);
        let mut writer = StepWriter::open(&accessor, &ThreadId::from("t"), None).await.unwrap();
        let (terms, mut observer) = (RunTerms::new("r", 10), Storing { fails_for: "" });
        terms.cancel.cancel();
        let mut session = Session::new(terms, &mut writer, &mut observer);
        let input = Map::from_iter([("messages".to_owned(), json!([message::human("go")]))]);
        assert_eq!(agent.run(&mut session, Some(input.into())).await.unwrap(), Ended::Cancelled);
        assert_eq!(accessor.get(&ThreadId::from("t"), None).await.unwrap(), None);
    }
}

//! What a subagent reports while it works, as events of the run that delegated.

use std::collections::BTreeMap;

use async_trait::async_trait;
use serde_json::{Map, Value as Json};
use threadkeep::state::StateSnapshot;
use threadkeep::step::Task;
use threadkeep_agent::model::message;
use threadkeep_agent::tools::loop_detection::Verdict;
use threadkeep_agent::tools::{Nested, NestedEvent, Report, Reports};
use threadkeep_agent::{Added, Observer, ObserverError, Origin, TaskInput, Tokens};
use threadkeep_agent::{serialize, summary};
use threadkeep_records::ExecutionTokens;

use crate::batches::ItemBudget;
use crate::events;
use crate::progress::{self, Progress};
use crate::watched::Settled;

/// Passes on what a subagent says.
pub(crate) struct ChildObserver {
    reports: Reports,
    settled: Settled,
    task_id: String,
    agent: String,
    model: String,
    /// The number of the last answer, counted from the first message, also over a restart.
    answer: u64,
    /// How many calls that answer makes. Their results have the numbers after it, in the order of the calls: they may be
    /// reported in another one, and by another process.
    calls: u64,
    /// The highest number so far.
    total: u64,
    /// The tokens used so far, those before a restart included.
    usage: Option<ExecutionTokens>,
    /// The same by model, for an item of a batch with a budget.
    item: Option<(ItemBudget, BTreeMap<String, ExecutionTokens>)>,
    /// The place of the call, if the run's clients follow what happens inside of it.
    namespace: Option<String>,
    /// Reports for which there was no time to wait: those of one superstep at most.
    pending: Vec<Report>,
}

impl ChildObserver {
    /// An observer of the subagent `agent`, which goes on from `state`, for the call at this place.
    pub(crate) fn new(
        reports: Reports,
        settled: Settled,
        (task_id, namespace): (&str, &str),
        agent: &str,
        model: &str,
        item: Option<ItemBudget>,
        state: Option<&StateSnapshot>,
    ) -> threadkeep::Result<Self> {
        let progress = Progress::of(state)?;
        let said = state.map(|state| state.json("messages")).transpose()?.flatten();
        let said = said.as_ref().and_then(Json::as_array);
        let answer = said.and_then(|said| said.iter().rfind(|message| message::kind(message) == "ai"));
        Ok(Self {
            namespace: reports.wants_nested().then(|| namespace.to_owned()),
            reports,
            settled,
            task_id: task_id.to_owned(),
            agent: agent.to_owned(),
            model: model.to_owned(),
            answer: progress.messages,
            calls: answer.map_or(0, calls),
            total: progress.messages,
            usage: progress.tokens(),
            item: item.map(|item| (item, progress.by_model())),
            pending: Vec::new(),
        })
    }

    /// Sends a report now or, without room, with the next ones.
    fn pass(&mut self, report: Report) {
        if self.settled.is() {
            return;
        }
        if !self.pending.is_empty() {
            self.pending.push(report);
        } else if let Err(report) = self.reports.try_send(report) {
            self.pending.push(*report);
        }
    }

    /// Counts the tokens of an answer of `model`; whether its provider reported any.
    fn count(&mut self, model: &str, answer: &Json) -> bool {
        let is_known = answer["usage_metadata"].is_object();
        if is_known {
            let tokens = Tokens::of(answer);
            progress::add(self.usage.get_or_insert_default(), tokens);
            if let Some((_, usage)) = &mut self.item {
                progress::add(usage.entry(model.to_owned()).or_default(), tokens);
            }
        }
        is_known
    }

    /// Passes on what the subagent's loop reports, if somebody wants it.
    fn nest(
        &mut self,
        step: i64,
        event: impl FnOnce() -> threadkeep::Result<NestedEvent>,
    ) -> threadkeep::Result<()> {
        if let Some(namespace) = self.namespace.clone() {
            self.pass(Report::Nested(Nested { namespace, step, event: event()? }));
        }
        Ok(())
    }

    /// Sends what could not be sent at once.
    pub(crate) async fn flush(&mut self) {
        for report in std::mem::take(&mut self.pending) {
            self.send(report).await;
        }
    }

    /// Sends a report, unless the execution has ended without this subagent, which was stuck.
    async fn send(&self, report: Report) {
        if !self.settled.is() {
            self.reports.send(report).await;
        }
    }
}

#[async_trait]
impl Observer for ChildObserver {
    fn model_answered(&mut self, model: &str, caller: &str, answer: &Json) {
        // Its own answers are messages. Other processes learn of this one with the next of them.
        if caller == summary::CALLER {
            self.count(model, answer);
        }
    }

    async fn message_added(&mut self, message: Added<'_>) -> Result<(), ObserverError> {
        let (message, number) = match message {
            Added::Human(_) => return Ok(()),
            Added::Answer { message, .. } => {
                let model = self.model.clone();
                if self.count(&model, message)
                    && let Some((item, usage)) = &self.item
                {
                    item.has_used(usage.clone()).await;
                }
                self.answer += self.calls + 1;
                self.calls = calls(message);
                (message, self.answer)
            }
            Added::ToolResult { message, index } => (message, self.answer + 1 + u64::from(index)),
        };
        self.total = self.total.max(number);
        let mut message = message.clone();
        serialize::complete_message(&mut message);
        let event = events::running(&self.task_id, &message, (number, self.total), self.usage, &self.model);
        self.flush().await;
        self.send(Report::Custom(event)).await;
        Ok(())
    }

    fn loop_checked(&mut self, _: Option<&str>, verdict: &Verdict) {
        if *verdict != Verdict::Proceed {
            self.pass(Report::LoopChecked { agent: self.agent.clone(), verdict: verdict.clone() });
        }
    }

    fn tools_promoted(&mut self, _: Option<&str>, names: &[String]) {
        if !names.is_empty() {
            self.pass(Report::ToolsPromoted { agent: self.agent.clone(), names: names.to_vec() });
        }
    }

    fn task_started(&mut self, step: i64, task: &Task, input: TaskInput<'_>) -> threadkeep::Result<()> {
        self.nest(step, || {
            let input = match input {
                TaskInput::State(Some(state)) => Json::Object(serialize::values(state)?),
                TaskInput::State(None) => Json::Object(Map::new()),
                TaskInput::Call(call) => call.clone(),
            };
            Ok(NestedEvent::TaskStarted(task.clone(), input))
        })
    }

    fn message(&mut self, step: i64, task: &Task, origin: Option<Origin<'_>>, message: &Json) {
        let origin = origin.map(|origin| (origin.provider.to_owned(), origin.model.to_owned()));
        // Making this one cannot fail.
        let _ = self.nest(step, || Ok(NestedEvent::Message(task.clone(), origin, message.clone())));
    }

    fn task_ended(&mut self, step: i64, task: &Task, outcome: threadkeep::Result<&Json, &str>) {
        let outcome = outcome.cloned().map_err(str::to_owned);
        // Making this one cannot fail.
        let _ = self.nest(step, || Ok(NestedEvent::TaskEnded(task.clone(), outcome)));
    }

    fn committed(&mut self, state: &StateSnapshot) -> threadkeep::Result<()> {
        self.nest(state.metadata.step, || Ok(NestedEvent::Committed(Box::new(state.clone()))))
    }
}

/// How many results follow an answer.
fn calls(answer: &Json) -> u64 {
    (message::tool_calls(answer).len() + message::invalid_tool_calls(answer).len()) as u64
}

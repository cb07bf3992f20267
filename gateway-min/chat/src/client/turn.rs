//! A turn: the task that runs it, and the stream of its events.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use async_trait::async_trait;
use futures::{Stream, StreamExt as _};
use serde_json::{Map, Value as Json, json};
use threadkeep::state::{StateAccessor, StateSnapshot};
use threadkeep::step::{StepWriter, Task};
use threadkeep_agent::model::message;
use threadkeep_agent::serialize;
use threadkeep_agent::tools::{WorkUsage, questions};
use threadkeep_agent::{
    AGENT_BINDING, AgentSpec, Breakpoints, DEFAULT_AGENT, Durability, Observer, Origin, RunTerms, Session,
    Tokens,
};
use threadkeep_storage::Checkpoints;
use threadkeep_subagents::hooks::{TaskConclusion, TaskInfo};
use threadkeep_subagents::{ledger, limit_tokens};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::agent::{Core, thread_id};
use super::event::Translator;
use super::queue::{self, Receiver, queue};
use super::{ClientError, End, Event, Message, TurnOptions, Usage, Values};
use threadkeep_agent::Pattern;

/// The default maximum number of supersteps of a turn.
const RECURSION_LIMIT: u64 = 100;

/// The events of a turn, in order: any number of events, and finally either [`Event::End`] or an error.
///
/// Dropping it stops the turn at the next point where nothing is half-written; what it had committed stays.
#[derive(Debug)]
pub struct Turn {
    thread_id: String,
    events: Receiver,
    cancel: CancellationToken,
    finished: bool,
    _stop: DropGuard,
}

impl Turn {
    /// The turn's thread.
    pub fn thread_id(&self) -> &str {
        &self.thread_id
    }

    /// Stops the turn at the next point where nothing is half-written. The stream then ends with [`Event::End`].
    pub fn cancel(&self) {
        self.cancel.cancel();
    }

    /// Waits for the end of the turn, and returns the text of its last answer, and the question to the user with which
    /// the turn may end.
    ///
    /// # Errors
    /// The error that ends the stream.
    pub async fn answer(mut self) -> Result<String, ClientError> {
        let mut answer = Answer::default();
        while let Some(event) = self.next().await {
            answer.hear(&event?);
        }
        Ok(answer.into_text())
    }
}

/// Collects the text of a turn's last answer from its events, and the questions with which the turn ends.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    id: String,
    text: String,
    questions: Vec<String>,
}

impl Answer {
    /// Adds the next event.
    pub(crate) fn hear(&mut self, event: &Event) {
        match event {
            Event::MessagesTuple(Message::Ai { content, id, .. }) => {
                if *id != self.id {
                    (self.id, self.text) = (id.clone(), String::new());
                }
                self.text.push_str(content);
            }
            Event::Values(values) => {
                let asked = questions(&values.messages).into_iter();
                self.questions = asked.map(|(_, question)| message::text(question)).collect();
            }
            Event::MessagesTuple(Message::Tool { .. }) | Event::Custom(_) | Event::End(_) => {}
        }
    }

    /// What the user reads: a question is in no answer, but in the result of the tool that asks it.
    pub(crate) fn into_text(self) -> String {
        let said = (!self.text.is_empty()).then_some(self.text);
        said.into_iter().chain(self.questions).collect::<Vec<_>>().join("\n")
    }
}

impl Stream for Turn {
    type Item = Result<Event, ClientError>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if this.finished {
            return Poll::Ready(None);
        }
        // The task sends how the turn ended, unless it panicked.
        let item = ready!(this.events.poll(context)).unwrap_or(Err(ClientError::Died));
        this.finished = matches!(item, Ok(Event::End(_)) | Err(_));
        Poll::Ready(Some(item))
    }
}

/// Starts a turn. Without a text the thread goes on where it stopped.
pub(super) fn start(core: Arc<Core>, text: Option<&str>, thread: Option<&str>, options: TurnOptions) -> Turn {
    let (sender, events) = queue();
    let thread_id = thread.map_or_else(|| core.ids.text(), str::to_owned);
    let cancel = CancellationToken::new();
    let (stop, tracker) = (cancel.clone(), core.turns.clone());
    let (thread, input) = (thread_id.clone(), text.map(message::human));
    tracker.spawn(async move {
        let options = options.or(&core.defaults);
        let work = Box::pin(work(&core, &thread, input, &options, &sender, &cancel));
        let ended = sender.pace(work, &cancel, &core.closing).await;
        sender.send(ended.map(|usage| Event::End(End { usage })));
    });
    Turn { thread_id, events, cancel: stop.clone(), finished: false, _stop: stop.drop_guard() }
}

/// Sends the events of a turn, and adds up its token usage.
struct Sender<'a> {
    events: &'a queue::Sender,
    translator: Translator,
    tokens: Tokens,
    /// The executions whose tokens are among these, each with its attempt.
    executions: Vec<(String, i64)>,
}

impl Sender<'_> {
    fn send(&self, events: impl IntoIterator<Item = Event>) {
        for event in events {
            self.events.send(Ok(event));
        }
    }
}

#[async_trait]
impl Observer for Sender<'_> {
    fn message(&mut self, _: i64, _: &Task, _: Option<Origin<'_>>, message: &Json) {
        let mut message = message.clone();
        serialize::complete_message(&mut message);
        let event = self.translator.message(&message);
        self.send(event);
    }

    fn task_ended(&mut self, _: i64, task: &Task, outcome: threadkeep::Result<&Json, &str>) {
        if let Ok(update) = outcome {
            let events = self.translator.written(task.node.as_str(), update);
            self.send(events);
        }
    }

    fn committed(&mut self, state: &StateSnapshot) -> threadkeep::Result<()> {
        self.send([Event::Values(Values::of(serialize::values(state)?))]);
        Ok(())
    }

    fn model_answered(&mut self, _: &str, _: &str, answer: &Json) {
        self.tokens += Tokens::of(answer);
    }

    fn used(&mut self, usage: &WorkUsage) {
        let attempt = (usage.work_id.clone(), usage.attempt);
        if !self.executions.contains(&attempt) {
            self.executions.push(attempt);
            self.tokens += usage.tokens();
        }
    }

    async fn custom(&mut self, event: &Json) {
        self.send([Event::Custom(event.clone())]);
    }
}

/// Runs a turn; returns its token usage.
async fn work(
    core: &Core,
    thread: &str,
    input: Option<Json>,
    options: &TurnOptions,
    events: &queue::Sender,
    cancel: &CancellationToken,
) -> Result<Usage, ClientError> {
    let thread = thread_id(thread)?;
    let current = core.config.current_async().await;
    if let Some(guard) = core.guard {
        guard.check_cadence(&current)?;
    }
    let accessor = core.accessor.clone().unwrap_or_else(|| forgetful(core));
    accessor.check(&thread, None).await?;
    let run_id = core.ids.text();
    let thinking = options.thinking_enabled.unwrap_or(true);
    let spec = AgentSpec {
        run_id: &run_id,
        thread_id: thread.as_str(),
        model_name: options.model_name.as_deref(),
        thinking: Some(thinking),
        reasoning_effort: options.reasoning_effort.as_deref(),
    };
    let mut agent = core.agents.lead(&spec).await?;
    let mut writer = StepWriter::open(&accessor, &thread, None).await?;
    let state = writer.state();
    if input.is_none() && state.is_none_or(|state| state.next.is_empty()) {
        return Err(ClientError::Invalid(format!(
            "thread '{thread}' has nothing to go on with; start a turn with a message"
        )));
    }
    let left = ledger::has_unfinished(state)?;
    let limits = core.delegation.limits(options, &current, left && input.is_none());
    let mut uncounted = Vec::new();
    let mut records = None;
    if left || limits.is_some() {
        core.delegation.check_free(thread.as_str()).await?;
        let delegator = core.delegation.delegator().await?;
        records = Some(delegator.records.clone());
        uncounted.extend(delegator.catch_up(&accessor, thread.as_str(), &run_id, state).await?);
        if left && input.is_some() {
            // Nobody goes on with what the thread has turned away from.
            uncounted.extend(delegator.abandon(&accessor, thread.as_str(), &run_id).await?);
        }
        delegator.equip(&mut agent, &accessor, limits, None).await?;
    } else {
        limit_tokens(&mut agent, &current);
    }
    let binding = binding(options)?;
    let mut metadata = Map::from_iter([
        ("run_id".to_owned(), json!(run_id)),
        ("thinking_enabled".to_owned(), json!(thinking)),
        (AGENT_BINDING.to_owned(), json!(binding)),
    ]);
    metadata.extend(options.model_name.as_ref().map(|name| ("model_name".to_owned(), json!(name))));
    let mut sender = Sender {
        events,
        translator: Translator::default(),
        tokens: Tokens::default(),
        executions: Vec::new(),
    };
    for usage in &uncounted {
        sender.used(usage);
    }
    let limit = options.recursion_limit.unwrap_or(RECURSION_LIMIT).max(1);
    let info = TaskInfo::lead(&run_id, thread.as_str(), &binding);
    let terms = RunTerms {
        run_id: run_id.clone(),
        metadata,
        recursion_limit: limit.min(u64::from(current.max_recursion_limit)),
        breakpoints: Breakpoints::default(),
        cancel: cancel.clone(),
        durability: Durability::default(),
    };
    let mut session = Session::new(terms, &mut writer, &mut sender);
    let input = input.map(|input| Map::from_iter([("messages".to_owned(), json!([input]))]).into());
    let hooks = &core.delegation.hooks;
    hooks.started(&info.task_id, &info).await;
    // No other run waits for the thread: there are no runs here.
    let ended = agent.work(&mut session, input, || async { Ok(false) }).await;
    hooks.stopped(&info.task_id, &info, TaskConclusion::of_lead(&ended)).await;
    let counted = match records {
        Some(records) => records.executions().counted(thread.as_str(), &run_id, &sender.executions).await,
        None => Ok(()),
    };
    ended?;
    counted?;
    writer.flush().await?;
    let Tokens { input, output, total } = sender.tokens;
    Ok(Usage { input_tokens: input, output_tokens: output, total_tokens: total })
}

/// An accessor of a store that lasts for one turn.
fn forgetful(core: &Core) -> StateAccessor {
    StateAccessor::new(Checkpoints::in_memory().saver(), Arc::clone(&core.table), Arc::clone(&core.ids))
}

/// The agent to which the thread's checkpoints are bound.
fn binding(options: &TurnOptions) -> Result<String, ClientError> {
    let Some(name) = &options.agent_name else { return Ok(DEFAULT_AGENT.to_owned()) };
    let normalised = name.to_ascii_lowercase().replace('_', "-");
    if !Pattern::AGENT_NAME.matches(&normalised) {
        let rule = Pattern::AGENT_NAME.text;
        return Err(ClientError::Invalid(format!(
            "'{name}' is not a valid agent name: it must match {rule}"
        )));
    }
    Ok(normalised)
}

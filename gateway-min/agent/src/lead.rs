//! The loop of the lead agent.

use std::sync::Arc;
use std::time::Instant;

use chrono::Utc;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use serde_json::{Map, Value as Json, json};
use threadkeep::checkpoint::{TaskWrites, Write};
use threadkeep::id::NodeName;
use threadkeep::metadata::Source;
use threadkeep::state::StateSnapshot;
use threadkeep::step::{Durability, Task};
use threadkeep::value::ChannelValue;
use threadkeep_config::{LoopDetection, Title};
use tracing::Instrument as _;

use crate::model::{ChunkAssembler, Earlier, ModelRequest, RetryingModel, message};
use crate::summary::{self, Cut, Summarizer};
use crate::tools::loop_detection::{self, STOP_REASON, Verdict, WARNING_NAME};
use crate::tools::{ToolContext, Toolbox, dangling};
use crate::{Added, AgentError, Ended, Input, Next, Origin, Session, TaskInput, prompt, spans, title};

const INPUT: &str = "__input__";
/// The node that calls the model.
pub const MODEL: &str = "model";
const TOOLS: &str = "tools";
/// The nodes of the graph, at which a run can stop and with which it can continue.
pub const NODES: [&str; 2] = [MODEL, TOOLS];
/// The name that stands for the end of the graph.
pub const END: &str = "__end__";
const SUMMARIZATION: &str = "summarization";
/// The lead agent, as scripts and the sums of usage name it.
pub(crate) const CALLER: &str = "lead_agent";

/// The lead agent of one run: its model, its tools, its settings.
pub struct LeadAgent {
    /// Who asks the model: `lead_agent`, or `subagent:` and a name. Scripts and the sums of usage tell callers apart.
    pub caller: String,
    /// The model that answers.
    pub model: RetryingModel,
    /// The model that writes titles; `None` cuts them from the first message.
    pub title_model: Option<RetryingModel>,
    /// Summarizes long conversations; `None` lets them grow.
    pub summarizer: Option<Summarizer>,
    /// The tools that the model can call.
    pub toolbox: Arc<Toolbox>,
    /// Where tool calls run.
    pub tool_context: ToolContext,
    /// Whether and how the thread gets a title.
    pub title: Title,
    /// When the model is considered to be going round in circles.
    pub loop_detection: LoopDetection,
    /// Whether the model should think; `None` leaves it to the model.
    pub thinking: Option<bool>,
    /// Passed to the model unchanged.
    pub reasoning_effort: Option<String>,
}

/// The result of a superstep.
#[derive(Default)]
struct Stepped {
    stop_reason: Option<String>,
    fallback: Option<String>,
}

impl LeadAgent {
    /// An agent with this model and these tools: titles from the first message, default loop detection, no summaries.
    pub fn new(model: RetryingModel, toolbox: Toolbox, tool_context: ToolContext) -> Self {
        Self {
            caller: CALLER.to_owned(),
            model,
            title_model: None,
            summarizer: None,
            toolbox: Arc::new(toolbox),
            tool_context,
            title: Title::default(),
            loop_detection: LoopDetection::default(),
            thinking: None,
            reasoning_effort: None,
        }
    }

    /// Runs until the graph has nothing more to run; what it committed is on disk then, unless it was cancelled: the
    /// caller flushes that or takes it back. Not cancel-safe: use [`RunTerms::cancel`](crate::RunTerms::cancel), which
    /// stops it at the next point where nothing is half-written.
    ///
    /// # Errors
    /// [`AgentError`]; the head then is the last completed superstep, with the failed node next.
    pub async fn run(&self, session: &mut Session<'_>, input: Option<Input>) -> Result<Ended, AgentError> {
        let ended = self.steps(session, input).await;
        if let Ok(Ended::Cancelled) = ended {
            return ended;
        }
        let flushed = session.writer.flush().await;
        let ended = ended?;
        flushed?;
        Ok(ended)
    }

    async fn steps(&self, session: &mut Session<'_>, input: Option<Input>) -> Result<Ended, AgentError> {
        let mut resumed = input.as_ref().is_none_or(|input| input.next == Next::Stay);
        match input {
            Some(input) => {
                let span = spans::superstep(INPUT, next_step(session.writer.state()));
                self.input(session, input).instrument(span).await?;
            }
            None => {
                if let Some(state) = session.writer.state() {
                    session.observer.committed(state)?;
                }
            }
        }
        let mut conversation = Conversation::of(session.writer.state())?;
        let mut ended = Ended::Done { stop_reason: None, fallback: None };
        let mut summarizes = true;
        loop {
            let Some(state) = session.writer.state() else { return Ok(ended) };
            let next = state.next.clone();
            let Some(node) = next.first() else { return Ok(ended) };
            if session.terms.cancel.is_cancelled() {
                return Ok(Ended::Cancelled);
            }
            // A resumed run is before the node at which it stopped, and must not stop there again.
            if session.terms.breakpoints.before.any_of(&next) && !std::mem::take(&mut resumed) {
                session.observer.interrupted(state)?;
                return Ok(ended);
            }
            if session.steps == session.terms.recursion_limit {
                return Err(AgentError::RecursionLimit(session.terms.recursion_limit));
            }
            session.steps += 1;
            let step = |session: &Session<'_>| next_step(session.writer.state());
            let stepped = match node.as_str() {
                MODEL => {
                    // After a failed summary, do not try again in this run.
                    summarizes = summarizes && self.shorten(session, &next, &mut conversation).await?;
                    let span = spans::superstep(MODEL, step(session));
                    self.model_step(session, node, &mut conversation).instrument(span).await?
                }
                TOOLS => {
                    let span = spans::superstep(TOOLS, step(session));
                    self.tools_step(session, &next, &mut conversation).instrument(span).await?
                }
                other => return Err(AgentError::UnknownNode(other.to_owned())),
            };
            let Some(stepped) = stepped else { return Ok(Ended::Cancelled) };
            if let Ended::Done { stop_reason, fallback } = &mut ended {
                *stop_reason = stepped.stop_reason.or(stop_reason.take());
                *fallback = stepped.fallback;
            }
            resumed = false;
            let Some(state) = session.writer.state() else { return Ok(ended) };
            session.observer.committed(state)?;
            if session.terms.breakpoints.after.any_of(&next) && !state.next.is_empty() {
                session.observer.interrupted(state)?;
                return Ok(ended);
            }
        }
    }

    /// The superstep of the run's input.
    async fn input(&self, session: &mut Session<'_>, input: Input) -> Result<(), AgentError> {
        let mut writes = Vec::new();
        for (channel, mut value) in input.writes {
            if channel == "messages" {
                stamp_run(&mut value, &session.terms.run_id);
            }
            writes.push(session.writer.write(&channel, value, false)?);
        }
        let humans: Vec<Json> = messages_of(&writes)?.into_iter().filter(|m| m["type"] == "human").collect();
        let next = match input.next {
            Next::Go(Some(node)) if node.as_str() == TOOLS => {
                let answer = match messages_of(&writes)?.into_iter().rfind(|m| m["type"] == "ai") {
                    Some(answer) => Some(answer),
                    None => Conversation::of(session.writer.state())?
                        .whole()?
                        .into_iter()
                        .rfind(|m| m["type"] == "ai"),
                };
                // A task a call; none if there is nothing to call.
                let calls = answer.as_ref().map(calls).unwrap_or_default().len();
                vec![node; calls.max(1)]
            }
            Next::Go(node) => node.into_iter().collect(),
            Next::Stay => session.writer.state().map(|state| state.next.clone()).unwrap_or_default(),
        };
        let task = session.writer.start_task(&INPUT.into(), 0);
        session.writer.finish_task(task, writes, Durability::WithCommit).await?;
        session.commit(Source::Input, next).await?;
        for message in humans {
            session.added(Added::Human(&message)).await?;
        }
        if let Some(state) = session.writer.state() {
            session.observer.committed(state)?;
        }
        Ok(())
    }

    /// Replaces the beginning of a long conversation by a summary, in its own superstep, so that it is not lost if the
    /// following model call fails. `false`, without a change, if there is no summary.
    async fn shorten(
        &self,
        session: &mut Session<'_>,
        next: &[NodeName],
        conversation: &mut Conversation,
    ) -> Result<bool, AgentError> {
        let Some(summarizer) = &self.summarizer else { return Ok(true) };
        let whole = conversation.whole()?;
        if !summarizer.is_due(&whole) {
            return Ok(true);
        }
        let Some(Cut { at, preserved }) = summarizer.cut(&whole, None) else { return Ok(true) };
        let step = next_step(session.writer.state());
        let task = session.writer.start_task(&SUMMARIZATION.into(), 0);
        session.observer.task_started(step, &task, TaskInput::State(session.writer.state()))?;
        let earlier = earlier_summary(session.writer.state())?;
        let (text, answer) = tokio::select! {
            biased;
            () = session.terms.cancel.cancelled() => return Ok(false),
            made = summarizer.summarize(earlier.as_deref(), &whole[..at]) => made,
        };
        let model = summarizer.model.name();
        session.observer.model_answered(model, summary::CALLER, &answer);
        let Some(text) = text else {
            tracing::warn!(
                run_id = session.terms.run_id,
                "the conversation stays long: the model returned no summary"
            );
            session.observer.task_ended(step, &task, Err("the model returned no summary"));
            return Ok(false);
        };
        let update = json!({ "messages": preserved, (summary::CHANNEL): text });
        let writes = vec![
            session.writer.write("messages", json!(preserved), true)?,
            session.writer.write(summary::CHANNEL, json!(text), false)?,
        ];
        session.observer.task_ended(step, &task, Ok(&update));
        session.writer.finish_task(task, writes, Durability::WithCommit).await?;
        session.commit(Source::Loop, next.to_vec()).await?;
        if let Some(state) = session.writer.state() {
            session.observer.committed(state)?;
        }
        *conversation = Conversation { earlier: Earlier::default(), turn: preserved };
        Ok(true)
    }

    /// One model call, whose answer is added to the conversation. `None` if it was cancelled.
    async fn model_step(
        &self,
        session: &mut Session<'_>,
        node: &NodeName,
        conversation: &mut Conversation,
    ) -> Result<Option<Stepped>, AgentError> {
        let step = next_step(session.writer.state());
        let task = session.writer.start_task(node, 0);
        session.observer.task_started(step, &task, TaskInput::State(session.writer.state()))?;
        let asked = Instant::now();
        let Some(mut answer) = self.ask(session, step, &task, conversation).await? else { return Ok(None) };
        let latency = asked.elapsed();

        let fallback = message::fallback_reason(&answer).map(str::to_owned);
        let mut stop_reason = None;
        conversation.turn.push(answer.clone());
        let verdict = loop_detection::assess(&self.loop_detection, &conversation.turn);
        if let Verdict::Stop(finding) = &verdict {
            answer = message::strip_tool_calls(&answer, &finding.stop_notice());
            conversation.turn.pop();
            conversation.turn.push(answer.clone());
            stop_reason = Some(STOP_REASON.to_owned());
        }
        let next = vec![NodeName::from(TOOLS); calls(&answer).len()];
        let mut update = Map::from_iter([("messages".to_owned(), json!([answer]))]);
        if let Some(title) = self.title(session, conversation, next.is_empty()).await? {
            update.insert("title".to_owned(), json!(title));
        }
        session.observer.model_answered(self.model.name(), &self.caller, &answer);
        session.added(Added::Answer { message: &answer, caller: &self.caller, latency }).await?;
        session.observer.loop_checked(&verdict);
        let mut writes = Vec::new();
        for (channel, value) in &update {
            writes.push(session.writer.write(channel, value.clone(), false)?);
        }
        let update = Json::Object(update);
        session.observer.task_ended(step, &task, Ok(&update));
        session.writer.finish_task(task, writes, Durability::WithCommit).await?;
        session.commit(Source::Loop, next).await?;
        Ok(Some(Stepped { stop_reason, fallback }))
    }

    /// Streams an answer of the model to its end. `None` if the run was cancelled meanwhile.
    async fn ask(
        &self,
        session: &mut Session<'_>,
        step: i64,
        task: &Task,
        conversation: &Conversation,
    ) -> Result<Option<Json>, AgentError> {
        let tools = self.toolbox.specs();
        let mut messages = dangling::repaired(&conversation.turn);
        if let Verdict::Warn(finding) = loop_detection::assess(&self.loop_detection, &conversation.turn) {
            messages.push(message::hidden(WARNING_NAME, finding.warning()));
        }
        let summary = earlier_summary(session.writer.state())?;
        let summary = summary.map(|summary| prompt::summary(&summary));
        let request = ModelRequest {
            system: Some(prompt::system(Utc::now(), !tools.is_empty())),
            earlier: conversation.earlier.clone().after(summary),
            messages,
            tools,
            caller: self.caller.clone(),
            thinking: self.thinking,
            reasoning_effort: self.reasoning_effort.clone(),
            attempt: 0,
        };
        let origin = Origin { provider: self.model.provider(), model: self.model.name() };
        let mut assembler = ChunkAssembler::new(self.model.name());
        let mut chunks = self.model.stream(request);
        loop {
            let chunk = tokio::select! {
                biased;
                () = session.terms.cancel.cancelled() => return Ok(None),
                chunk = chunks.next() => chunk,
            };
            let Some(chunk) = chunk else { break };
            let dictionary = assembler.push(&chunk);
            session.observer.message(step, task, Some(origin), &dictionary);
        }
        Ok(Some(assembler.finish()))
    }

    /// The title, if this answer ends the thread's first exchange.
    async fn title(
        &self,
        session: &mut Session<'_>,
        conversation: &Conversation,
        last: bool,
    ) -> Result<Option<String>, AgentError> {
        let config = &self.title;
        let has_title =
            session.writer.state().is_some_and(|s| s.value("title").is_some_and(|t| !t.is_null()));
        if !config.enabled || !last || has_title || conversation.is_beyond_first_exchange()? {
            return Ok(None);
        }
        let conversation = conversation.whole()?;
        if !title::is_due(&conversation) {
            return Ok(None);
        }
        let Some(model) = &self.title_model else { return Ok(Some(title::local(config, &conversation))) };
        let (title, answer) = tokio::select! {
            () = session.terms.cancel.cancelled() => return Ok(None),
            made = title::by_model(config, model, &conversation) => made,
        };
        if let Some(answer) = answer {
            session.observer.model_answered(model.name(), title::CALLER, &answer);
        }
        Ok(Some(title))
    }

    /// Runs the tool calls of the last answer in parallel; adds their results to the conversation. `None` if they were
    /// cancelled.
    async fn tools_step(
        &self,
        session: &mut Session<'_>,
        next: &[NodeName],
        conversation: &mut Conversation,
    ) -> Result<Option<Stepped>, AgentError> {
        let step = next_step(session.writer.state());
        let answer = match conversation.turn.iter().rfind(|m| m["type"] == "ai") {
            Some(answer) => Some(answer.clone()),
            // Someone has added a question since.
            None => conversation.whole()?.into_iter().rfind(|m| m["type"] == "ai"),
        };
        let calls = answer.as_ref().map(calls).unwrap_or_default();
        let mut results: Vec<Option<Json>> = vec![None; calls.len()];
        for row in session.writer.recovered().into_iter().cloned().collect::<Vec<TaskWrites>>() {
            let recovered = messages_of(&row.writes)?.pop();
            if let (Some(slot), Some(result)) = (results.get_mut(row.index as usize), recovered) {
                session.writer.adopt(row.task)?;
                *slot = Some(result);
            }
        }
        let mut running = FuturesUnordered::new();
        for ((call, node), index) in calls.iter().zip(next).zip(0_u32..) {
            if results[index as usize].is_some() {
                continue;
            }
            let task = session.writer.start_task(node, index);
            session.observer.task_started(step, &task, TaskInput::Call(call))?;
            running.push(async move { (task, self.toolbox.run(&self.tool_context, call).await) });
        }
        let mut ends_run = false;
        loop {
            let (task, done) = tokio::select! {
                biased;
                () = session.terms.cancel.cancelled() => return Ok(None),
                done = running.next() => match done {
                    Some(done) => done,
                    None => break,
                },
            };
            ends_run |= done.ends_run;
            let tool = done.message["name"].as_str().unwrap_or_default();
            session.observer.files_written(tool, &done.written);
            let write = session.writer.write("messages", json!([done.message]), false)?;
            let result = messages_of(std::slice::from_ref(&write))?.pop().unwrap_or_default();
            session.added(Added::ToolResult(&result)).await?;
            session.observer.message(step, &task, None, &result);
            results[task.index as usize] = Some(result.clone());
            let mut writes = vec![write];
            let mut update = Map::from_iter([("messages".to_owned(), json!([result]))]);
            // The commit that follows at once makes the last one durable.
            let last = running.is_empty();
            if last
                && ends_run
                && let Some(title) = self.title(session, conversation, true).await?
            {
                writes.push(session.writer.write("title", json!(title), false)?);
                update.insert("title".to_owned(), json!(title));
            }
            let update = Json::Object(update);
            session.observer.task_ended(step, &task, Ok(&update));
            let durability = if last { Durability::WithCommit } else { Durability::Now };
            session.writer.finish_task(task, writes, durability).await?;
        }
        drop(running);
        let next = if ends_run { Vec::new() } else { vec![MODEL.into()] };
        session.commit(Source::Loop, next).await?;
        conversation.turn.extend(results.into_iter().flatten());
        Ok(Some(Stepped::default()))
    }
}

/// The calls of an answer, one task each, including unreadable ones, whose result is an error.
fn calls(answer: &Json) -> Vec<&Json> {
    message::tool_calls(answer).iter().chain(message::invalid_tool_calls(answer)).collect()
}

pub(crate) fn next_step(state: Option<&StateSnapshot>) -> i64 {
    state.map_or(-1, |state| state.metadata.step + 1)
}

/// The summary of what preceded the conversation.
fn earlier_summary(state: Option<&StateSnapshot>) -> Result<Option<String>, AgentError> {
    let summary = state.map(|state| state.json(summary::CHANNEL)).transpose()?.flatten();
    Ok(summary.and_then(|summary| summary.as_str().map(str::to_owned)))
}

/// The conversation of a run: the current turn, decoded, and what came before it, which only a model needs, and not
/// every one. So the work of a turn does not grow with its thread.
struct Conversation {
    earlier: Earlier,
    /// From the user's last message on.
    turn: Vec<Json>,
}

impl Conversation {
    /// How many messages decide whether a long conversation is beyond its first exchange.
    const BEGINNING: usize = 32;

    fn of(state: Option<&StateSnapshot>) -> Result<Self, AgentError> {
        let Some(ChannelValue::List(messages)) = state.and_then(|state| state.value("messages")) else {
            return Ok(Self { earlier: Earlier::default(), turn: conversation(state)? });
        };
        let mut turn = Vec::new();
        for message in messages.iter().rev() {
            turn.push(message.to_json()?);
            if turn.last().is_some_and(message::is_from_user) {
                break;
            }
        }
        turn.reverse();
        Ok(Self { earlier: Earlier::new(messages.clone(), messages.len() - turn.len()), turn })
    }

    /// All messages.
    fn whole(&self) -> Result<Vec<Json>, AgentError> {
        let mut messages = self.earlier.decode()?;
        messages.extend_from_slice(&self.turn);
        Ok(messages)
    }

    /// Whether its beginning shows that the first exchange is over.
    fn is_beyond_first_exchange(&self) -> Result<bool, AgentError> {
        let mut beginning = self.earlier.first(Self::BEGINNING)?;
        beginning.extend_from_slice(&self.turn);
        Ok(!title::is_first_exchange(&beginning))
    }
}

pub(crate) fn conversation(state: Option<&StateSnapshot>) -> Result<Vec<Json>, AgentError> {
    Ok(match state.map(|state| state.json("messages")).transpose()?.flatten() {
        Some(Json::Array(messages)) => messages,
        _ => Vec::new(),
    })
}

/// The messages in writes to the messages channel.
fn messages_of(writes: &[Write]) -> Result<Vec<Json>, AgentError> {
    let mut messages = Vec::new();
    for write in writes.iter().filter(|w| w.channel.as_str() == "messages") {
        if let Json::Array(more) = write.value.to_json()? {
            messages.extend(more);
        }
    }
    Ok(messages)
}

/// Stamps the run's human messages with its id, over a client's stamp, because it distinguishes turns.
fn stamp_run(messages: &mut Json, run_id: &str) {
    let stamp = |message: &mut Json| {
        let role = message.get("type").or_else(|| message.get("role")).and_then(Json::as_str);
        if !matches!(role, Some("human" | "user")) {
            return;
        }
        if let Some(map) = message.as_object_mut() {
            let kwargs = map.entry("additional_kwargs").or_insert_with(|| json!({}));
            if !kwargs.is_object() {
                *kwargs = json!({});
            }
            kwargs["run_id"] = json!(run_id);
        }
    };
    match messages {
        Json::Array(list) => list.iter_mut().for_each(stamp),
        one => stamp(one),
    }
}

//! An agent and the loop in which it works: the lead agent of a run, or a subagent.

mod calls;
mod conversation;
mod model_step;
mod tools_step;

use std::sync::Arc;

use serde_json::{Map, Value as Json, json};
use threadkeep::checkpoint::TaskWrites;
use threadkeep::id::NodeName;
use threadkeep::metadata::Source;
use threadkeep::state::StateSnapshot;
use threadkeep::step::{Durability, Task};
use threadkeep_config::{LoopDetection, Title, ToolSearch};
use tracing::Instrument as _;

use crate::model::{RetryingModel, message};
use crate::prompt::Prompt;
use crate::skills::{self, Skill};
use crate::summary::{self, Cut, Summarizer};
use crate::tools::deferred::Deferred;
use crate::tools::{ASK_CLARIFICATION, ToolContext, Toolbox};
use crate::{Added, AgentError, DateZone, Ended, Input, Middleware, Next, Session, TaskInput, spans};
pub(crate) use conversation::conversation;
use conversation::{Conversation, earlier_summary, messages_of, stamp_run};

const INPUT: &str = "__input__";
/// The node that calls the model.
pub const MODEL: &str = "model";
pub(crate) const TOOLS: &str = "tools";
/// The nodes of the graph, at which a run can stop and with which it can continue.
pub const NODES: [&str; 2] = [MODEL, TOOLS];
/// The name that stands for the end of the graph.
pub const END: &str = "__end__";
const SUMMARIZATION: &str = "summarization";
/// The lead agent, as scripts and the sums of usage name it.
pub(crate) const CALLER: &str = "lead_agent";

/// The agent of one run, a lead agent or a subagent: its model, its tools, its settings.
pub struct Agent {
    /// Who asks the model: `lead_agent`, or `subagent:` and a name. Scripts and the sums of usage tell callers apart.
    pub caller: String,
    /// Its system prompt.
    pub prompt: Prompt,
    /// The zone of the date in its prompt.
    pub zone: DateZone,
    /// What accompanies its model calls, in this order.
    pub middleware: Vec<Arc<dyn Middleware>>,
    /// The model that answers.
    pub model: RetryingModel,
    /// The model that writes titles; `None` cuts them from the first message.
    pub title_model: Option<RetryingModel>,
    /// Summarizes long conversations; `None` lets them grow.
    pub summarizer: Option<Summarizer>,
    /// The tools that the model can call.
    pub toolbox: Arc<Toolbox>,
    /// Which of them have to be loaded first; `None`: none.
    pub deferred: Option<Arc<Deferred>>,
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
enum Stepped {
    /// It was committed.
    On { stop_reason: Option<String>, fallback: Option<String> },
    /// There was none: the run ends here, for this reason.
    Stop(String),
    /// It was cancelled.
    Cancelled,
}

impl Agent {
    /// An agent with this model and these tools: titles from the first message, default loop detection, no summaries.
    pub fn new(model: RetryingModel, toolbox: Toolbox, tool_context: ToolContext) -> Self {
        Self {
            caller: CALLER.to_owned(),
            prompt: Prompt::default(),
            zone: DateZone::default(),
            middleware: Vec::new(),
            model,
            title_model: None,
            summarizer: None,
            toolbox: Arc::new(toolbox),
            deferred: None,
            tool_context,
            title: Title::default(),
            loop_detection: LoopDetection::default(),
            thinking: None,
            reasoning_effort: None,
        }
    }

    /// The tools that the model has after these messages, which begin with the user's last one.
    fn tools(&self, turn: &[Json]) -> Arc<Toolbox> {
        match &self.deferred {
            Some(deferred) => Arc::new(self.toolbox.loaded(&deferred.loaded(turn))),
            None => Arc::clone(&self.toolbox),
        }
    }

    /// Takes away the tool with which the agent asks the user: nobody is there to answer.
    pub fn ask_nothing(&mut self) {
        let mut toolbox = (*self.toolbox).clone();
        toolbox.retain(|tool| tool != ASK_CLARIFICATION);
        self.toolbox = Arc::new(toolbox);
    }

    /// Gives the agent these skills.
    pub fn learn(&mut self, skills: Vec<Skill>) {
        self.prompt.sections.extend(skills::section(&skills));
        if let Some(tool) = skills::tool(skills) {
            let mut toolbox = (*self.toolbox).clone();
            toolbox.add(tool);
            self.toolbox = Arc::new(toolbox);
        }
    }

    /// Defers the tools that can be, if the configuration says so: the model has to load them before it calls them. What
    /// an agent must not have is taken out of its toolbox before.
    pub fn defer(&mut self, settings: &ToolSearch) {
        self.deferred = Deferred::of(&self.toolbox, settings);
        let Some(deferred) = &self.deferred else { return };
        if let Some(search) = deferred.tool() {
            let mut toolbox = (*self.toolbox).clone();
            toolbox.add(search);
            self.toolbox = Arc::new(toolbox);
        }
        self.prompt.sections.extend(deferred.section());
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
            // It may have ended, and its thread be another's by now.
            Some(_) if session.terms.cancel.is_cancelled() => return Ok(Ended::Cancelled),
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
            let Ended::Done { stop_reason, fallback } = &mut ended else { return Ok(ended) };
            match stepped {
                Stepped::On { stop_reason: why, fallback: of_answer } => {
                    *stop_reason = why.or(stop_reason.take());
                    *fallback = of_answer;
                }
                Stepped::Stop(why) => {
                    *stop_reason = stop_reason.take().or(Some(why));
                    return Ok(ended);
                }
                Stepped::Cancelled => return Ok(Ended::Cancelled),
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
        // What has finished of the calls with which the run goes on is not made again.
        let mut rows: Vec<TaskWrites> = Vec::new();
        if input.goes_on(session.writer.state())? {
            rows.extend(session.writer.recovered().into_iter().cloned());
        }
        let next = input.nodes(session.writer.state())?;
        rows.extend(input.rows);
        let mut writes = Vec::new();
        for (channel, mut value) in input.writes {
            if channel == "messages" {
                stamp_run(&mut value, &session.terms.run_id);
            }
            writes.push(session.writer.write(&channel, value, false)?);
        }
        let humans: Vec<Json> = messages_of(&writes)?.into_iter().filter(|m| m["type"] == "human").collect();
        let task = session.writer.start_task(&INPUT.into(), 0);
        session.writer.finish_task(task, writes, Durability::WithCommit).await?;
        session.writer.begin_with(rows);
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
    /// following model call fails. `false`, with the conversation as it was, if there is no summary.
    async fn shorten(
        &self,
        session: &mut Session<'_>,
        next: &[NodeName],
        conversation: &mut Conversation,
    ) -> Result<bool, AgentError> {
        let Some(summarizer) = &self.summarizer else { return Ok(true) };
        if !summarizer.is_due(&conversation.whole()?) {
            return Ok(true);
        }
        // As it is stored, because what is preserved is stored again.
        let whole = conversation::conversation(session.writer.state())?;
        let Some(Cut { at, mut preserved }) = summarizer.cut(&whole, None) else { return Ok(true) };
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
        let mut update = Map::new();
        for middleware in &self.middleware {
            let view = model_step::view(session, &conversation.turn, None);
            update.extend(middleware.after_summary(&view, model, &answer)?);
        }
        let Some(text) = text else {
            tracing::warn!(
                run_id = session.terms.run_id,
                "the conversation stays long: the model returned no summary"
            );
            session.observer.task_ended(step, &task, Err("the model returned no summary"));
            if !update.is_empty() {
                self.store(session, task, update, next).await?;
            }
            return Ok(false);
        };
        if let Some(question) = message::turn_start(&whole).filter(|question| *question < at)
            && let Some(kept) = preserved.first_mut()
        {
            for middleware in &self.middleware {
                middleware.summarized(kept, &whole[question + 1..at]);
            }
        }
        update.insert("messages".to_owned(), json!(preserved));
        update.insert(summary::CHANNEL.to_owned(), json!(text));
        let shown = Json::Object(update.clone());
        session.observer.task_ended(step, &task, Ok(&shown));
        self.store(session, task, update, next).await?;
        // What is preserved may begin before the current turn, which alone is charged to this run.
        *conversation = Conversation::of(session.writer.state())?;
        Ok(true)
    }

    /// The superstep of [`Self::shorten`].
    async fn store(
        &self,
        session: &mut Session<'_>,
        task: Task,
        update: Map<String, Json>,
        next: &[NodeName],
    ) -> Result<(), AgentError> {
        let mut writes = Vec::new();
        for (channel, value) in update {
            let replaces = channel == "messages";
            writes.push(session.writer.write(&channel, value, replaces)?);
        }
        session.writer.finish_task(task, writes, Durability::WithCommit).await?;
        session.commit(Source::Loop, next.to_vec()).await?;
        if let Some(state) = session.writer.state() {
            session.observer.committed(state)?;
        }
        Ok(())
    }
}

pub(crate) fn next_step(state: Option<&StateSnapshot>) -> i64 {
    state.map_or(-1, |state| state.metadata.step.saturating_add(1))
}

#[cfg(test)]
mod tests;

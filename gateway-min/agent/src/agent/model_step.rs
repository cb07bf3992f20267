//! The superstep of a model call.

use futures::StreamExt as _;
use serde_json::{Map, Value as Json, json};
use threadkeep::id::NodeName;
use threadkeep::metadata::Source;
use threadkeep::step::{Durability, Task};

use super::conversation::{calls, kept};
use super::{Agent, Conversation, Stepped, TOOLS, earlier_summary, next_step};
use crate::model::{ChunkAssembler, ModelRequest, capped, message};
use crate::tools::dangling;
use crate::tools::loop_detection::{self, Finding, STOP_REASON, Verdict, WARNING_NAME, WARNINGS_MAX};
use crate::{Added, AgentError, Origin, Session, TaskInput, View, prompt, title};

impl Agent {
    /// One model call, whose answer is added to the conversation.
    pub(super) async fn model_step(
        &self,
        session: &mut Session<'_>,
        node: &NodeName,
        conversation: &mut Conversation,
    ) -> Result<Stepped, AgentError> {
        let step = next_step(session.writer.state());
        self.exchange(&conversation.turn).await;
        let mut shown = Vec::new();
        for middleware in &self.middleware {
            let before = middleware.before_model(&view(session, &conversation.turn, None))?;
            if let Some(reason) = before.stop {
                return Ok(Stepped::Stop(reason));
            }
            shown.extend(before.messages);
        }
        if let Some(deferred) = &self.deferred
            && !conversation.turn.iter().any(|message| message::kind(message) == "ai")
        {
            session.observer.tools_promoted(None, &deferred.promoted(&conversation.turn));
        }
        let task = session.writer.start_task(node, 0);
        session.observer.task_started(step, &task, TaskInput::State(session.writer.state()))?;
        let asked = session.writer.ids().now();
        let Some(mut answer) = self.ask(session, step, &task, conversation, shown).await? else {
            return Ok(Stepped::Cancelled);
        };
        let latency = (session.writer.ids().now() - asked).to_std().unwrap_or_default();

        let fallback = message::fallback_reason(&answer).map(str::to_owned);
        let mut stop_reason = None;
        for middleware in &self.middleware {
            let view = view(session, &conversation.turn, stop_reason.as_deref());
            let limited = middleware.limit_calls(&view, &mut answer)?;
            stop_reason = stop_reason.or(limited);
        }
        conversation.turn.push(answer.clone());
        let verdict = loop_detection::assess(&self.loop_detection, &conversation.turn);
        if let Verdict::Stop(finding) = &verdict {
            answer = message::strip_tool_calls(&answer, &finding.stop_notice());
            conversation.turn.pop();
            conversation.turn.push(answer.clone());
            stop_reason = stop_reason.or(Some(STOP_REASON.to_owned()));
        }
        let mut writes = Map::new();
        let answered = conversation.turn.pop();
        for middleware in &self.middleware {
            let view = view(session, &conversation.turn, stop_reason.as_deref());
            let after = middleware.after_model(&view, &mut answer)?;
            stop_reason = stop_reason.or(after.stop_reason);
            writes.extend(after.writes);
        }
        conversation.turn.extend(answered.map(|_| kept(answer.clone())));
        let next = vec![NodeName::from(TOOLS); calls(&answer).len()];
        if next.is_empty() {
            let capped = capped(answer["response_metadata"]["finish_reason"].as_str());
            stop_reason = stop_reason.or(capped.map(str::to_owned));
        }
        let mut update = Map::from_iter([("messages".to_owned(), json!([answer]))]);
        update.append(&mut writes);
        if let Some(title) = self.title(session, conversation, next.is_empty()).await? {
            update.insert("title".to_owned(), json!(title));
        }
        session.observer.model_answered(self.model.name(), &self.caller, &answer);
        session.added(Added::Answer { message: &answer, caller: &self.caller, latency }).await?;
        session.observer.loop_checked(None, &verdict);
        let mut writes = Vec::new();
        for (channel, value) in &update {
            writes.push(session.writer.write(channel, value.clone(), false)?);
        }
        let update = Json::Object(update);
        session.observer.task_ended(step, &task, Ok(&update));
        session.writer.finish_task(task, writes, Durability::WithCommit).await?;
        session.commit(Source::Loop, next).await?;
        self.exchange(&conversation.turn).await;
        Ok(Stepped::On { stop_reason, fallback })
    }

    async fn exchange(&self, turn: &[Json]) {
        for middleware in &self.middleware {
            middleware.exchange(turn).await;
        }
    }

    /// Streams an answer of the model to its end. `None` if the run was cancelled meanwhile.
    async fn ask(
        &self,
        session: &mut Session<'_>,
        step: i64,
        task: &Task,
        conversation: &Conversation,
        shown: Vec<Json>,
    ) -> Result<Option<Json>, AgentError> {
        let tools = self.tools(&conversation.turn).specs();
        let mut messages = dangling::repaired(&conversation.turn);
        if let Verdict::Warn(findings) = loop_detection::assess(&self.loop_detection, &conversation.turn) {
            let warnings = findings.iter().take(WARNINGS_MAX).map(Finding::warning);
            messages.extend(warnings.map(|warning| message::hidden(WARNING_NAME, warning)));
        }
        // At the end, so that a provider's cache of what precedes them stays valid.
        messages.extend(shown);
        let summary = earlier_summary(session.writer.state())?;
        let summary = summary.map(|summary| prompt::summary(&summary));
        let request = ModelRequest {
            system: Some(self.prompt.system(&self.zone.date(session.writer.ids().now()), &tools)),
            earlier: conversation.earlier.clone().after(summary),
            messages,
            tools,
            caller: self.caller.clone(),
            thinking: self.thinking,
            reasoning_effort: self.reasoning_effort.clone(),
            attempt: 0,
        };
        let origin = Origin { provider: self.model.provider(), model: self.model.name() };
        let mut assembler = ChunkAssembler::new(&session.writer.ids().text(), self.model.name());
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
    pub(super) async fn title(
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
}

pub(super) fn view<'v>(session: &'v Session<'_>, turn: &'v [Json], stop_reason: Option<&'v str>) -> View<'v> {
    let (state, ids) = (session.writer.state(), session.writer.ids());
    View { run_id: &session.terms.run_id, state, ids, turn, stop_reason }
}

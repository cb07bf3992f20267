//! The superstep of the tool calls.

use std::pin::pin;
use std::sync::Arc;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use serde_json::{Map, Value as Json, json};
use threadkeep::checkpoint::TaskWrites;
use threadkeep::id::NodeName;
use threadkeep::metadata::Source;
use threadkeep::step::Durability;
use tokio::time::Instant;

use super::{Agent, Conversation, MODEL, Stepped, calls, messages_of, next_step};
use crate::tools::{Report, Reports, ToolContext};
use crate::{Added, AgentError, Observer, Session, TaskInput};

impl Agent {
    /// Runs the tool calls of the last answer in parallel; adds their results to the conversation.
    ///
    /// When the run is cancelled, tools that say how fast they stop are asked to, and awaited that long; the others are
    /// dropped.
    pub(super) async fn tools_step(
        &self,
        session: &mut Session<'_>,
        next: &[NodeName],
        conversation: &mut Conversation,
    ) -> Result<Stepped, AgentError> {
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
        let (reports, mut reported) = Reports::channel(session.observer.wants_nested());
        let cancel = session.terms.cancel.clone();
        let state = session.writer.state().cloned().map(Arc::new);
        let (mut running, mut contexts, mut stops_within) = (FuturesUnordered::new(), Vec::new(), None);
        for ((call, node), index) in calls.iter().zip(next).zip(0_u32..) {
            let mut context = ToolContext {
                index,
                state: state.clone(),
                cancel: cancel.clone(),
                reports: reports.clone(),
                ..self.tool_context.clone()
            };
            contexts.push((context.clone(), *call));
            if results[index as usize].is_some() {
                continue;
            }
            let task = session.writer.start_task(node, index);
            context.namespace = format!("{node}:{}", task.id);
            // Calls draw in any order, so each from its own.
            context.ids = Arc::new(session.writer.ids().derived(&task.id.to_string()));
            session.observer.task_started(step, &task, TaskInput::Call(call))?;
            let bound = self.toolbox.stops_within(call);
            stops_within = stops_within.max(bound);
            let cancelled = cancel.clone();
            running.push(async move {
                let mut work = pin!(self.toolbox.run(&context, call));
                if bound.is_some() {
                    return (task, Some(work.await));
                }
                tokio::select! {
                    biased;
                    () = cancelled.cancelled() => (task, None),
                    done = &mut work => (task, Some(done)),
                }
            });
        }
        let mut ends_run = false;
        loop {
            let (task, done) = tokio::select! {
                biased;
                () = cancel.cancelled() => {
                    let observer = &mut *session.observer;
                    let deadline = Instant::now() + stops_within.unwrap_or_default();
                    let stopped = async { while running.next().await.is_some() {} };
                    let mut stopped = pin!(tokio::time::timeout_at(deadline, stopped));
                    loop {
                        tokio::select! {
                            biased;
                            // Subagents are awaited whether or not their last reports can be shown.
                            Some(report) = reported.recv() => drop(observe(observer, report).await),
                            _ = &mut stopped => break,
                        }
                    }
                    while let Ok(report) = reported.try_recv() {
                        drop(observe(observer, report).await);
                    }
                    return Ok(Stepped::Cancelled);
                }
                Some(report) = reported.recv() => {
                    observe(session.observer, report).await?;
                    continue;
                }
                done = running.next() => match done {
                    Some((task, Some(done))) => (task, done),
                    Some((_, None)) => return Ok(Stepped::Cancelled),
                    None => break,
                },
            };
            // What the tool reported before its result is shown before it.
            while let Ok(report) = reported.try_recv() {
                observe(session.observer, report).await?;
            }
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
            for (channel, value) in done.writes {
                writes.push(session.writer.write(&channel, value.clone(), false)?);
                update.insert(channel, value);
            }
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
        for (context, call) in &contexts {
            self.toolbox.stored(context, call).await;
        }
        conversation.turn.extend(results.into_iter().flatten());
        Ok(Stepped::On { stop_reason: None, fallback: None })
    }
}

/// Passes on what a tool reported while it worked.
async fn observe(observer: &mut dyn Observer, report: Report) -> threadkeep::Result<()> {
    match report {
        Report::Custom(event) => observer.custom(&event).await,
        Report::Usage { model, caller, calls, tokens } => observer.used(&model, &caller, calls, tokens),
        Report::LoopChecked { agent, verdict } => observer.loop_checked(Some(&agent), &verdict),
        Report::Nested(nested) => observer.nested(&nested)?,
    }
    Ok(())
}

//! The superstep of the tool calls.

use std::pin::pin;
use std::sync::Arc;

use serde_json::{Map, Value as Json, json};
use threadkeep::checkpoint::TaskWrites;
use threadkeep::id::NodeName;
use threadkeep::metadata::Source;
use threadkeep::step::Durability;
use tokio::time::Instant;

use super::calls::Calls;
use super::conversation::calls;
use super::{Agent, Conversation, MODEL, Stepped, messages_of, next_step};
use crate::tools::{Report, Reports, ToolContext, is_question};
use crate::{Added, AgentError, Observer, Session, TaskInput};

impl Agent {
    /// Runs the tool calls of the last answer in parallel; adds their results to the conversation.
    ///
    /// If the result of one cannot be read now, the step fails when the others have ended: their results are stored,
    /// and the next run makes that call alone.
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
        // What was loaded when the model answered, not what a result of this superstep loads.
        let answered = conversation.turn.iter().rposition(|m| m["type"] == "ai").unwrap_or_default();
        let toolbox = self.tools(&conversation.turn[..answered]);
        let mut results: Vec<Option<Json>> = vec![None; calls.len()];
        let mut ends_run = false;
        for row in session.writer.recovered().into_iter().cloned().collect::<Vec<TaskWrites>>() {
            let recovered = messages_of(&row.writes)?.pop();
            if let (Some(slot), Some(result)) = (results.get_mut(row.index as usize), recovered) {
                session.writer.adopt(row.task)?;
                // It was asked before the run broke off; only the user can answer it.
                ends_run |= is_question(&result);
                *slot = Some(result);
            }
        }
        let (reports, mut reported) = Reports::channel(session.observer.wants_nested());
        let cancel = session.terms.cancel.clone();
        let state = session.writer.state().cloned().map(Arc::new);
        let (mut running, mut contexts, mut stops_within) = (Calls::new(), Vec::new(), None);
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
            let (bound, toolbox) = (toolbox.stops_within(call), &toolbox);
            stops_within = stops_within.max(bound);
            let cancelled = cancel.clone();
            running.push(async move {
                let mut work = pin!(toolbox.run(&context, call));
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
        let mut unread = None;
        loop {
            let (task, done) = tokio::select! {
                biased;
                () = cancel.cancelled() => {
                    let observer = &mut *session.observer;
                    let deadline = Instant::now() + stops_within.unwrap_or_default();
                    let stopped = async {
                        loop {
                            tokio::select! {
                                biased;
                                // Subagents are awaited whether or not their last reports can be shown.
                                Some(report) = reported.recv() => {
                                    drop(running.beside(observe(observer, report)).await);
                                }
                                stopped = running.next() => if stopped.is_none() { break },
                            }
                        }
                    };
                    // What still runs then is dropped.
                    drop(tokio::time::timeout_at(deadline, stopped).await);
                    while let Ok(report) = reported.try_recv() {
                        drop(observe(observer, report).await);
                    }
                    return Ok(Stepped::Cancelled);
                }
                Some(report) = reported.recv() => {
                    running.beside(observe(session.observer, report)).await?;
                    continue;
                }
                done = running.next() => match done {
                    Some((_, Some(Err(error @ AgentError::Unread(_))))) => {
                        unread = unread.or(Some(error));
                        continue;
                    }
                    Some((task, Some(done))) => (task, done?),
                    Some((_, None)) => return Ok(Stepped::Cancelled),
                    None => break,
                },
            };
            // What the tool reported before its result is shown before it.
            while let Ok(report) = reported.try_recv() {
                running.beside(observe(session.observer, report)).await?;
            }
            ends_run |= done.ends_run;
            let tool = done.message["name"].as_str().unwrap_or_default();
            session.observer.files_written(tool, &done.written);
            let write = session.writer.write("messages", json!([done.message]), false)?;
            let result = messages_of(std::slice::from_ref(&write))?.pop().unwrap_or_default();
            let added = Added::ToolResult { message: &result, index: task.index };
            running.beside(session.added(added)).await?;
            session.observer.message(step, &task, None, &result);
            results[task.index as usize] = Some(result.clone());
            let mut writes = vec![write];
            let mut update = Map::from_iter([("messages".to_owned(), json!([result]))]);
            for (channel, value) in done.writes {
                writes.push(session.writer.write(&channel, value.clone(), false)?);
                update.insert(channel, value);
            }
            // The commit that follows at once makes the last one durable.
            let last = running.is_empty() && unread.is_none();
            if last
                && ends_run
                && let Some(title) = running.beside(self.title(session, conversation, true)).await?
            {
                writes.push(session.writer.write("title", json!(title), false)?);
                update.insert("title".to_owned(), json!(title));
            }
            let update = Json::Object(update);
            session.observer.task_ended(step, &task, Ok(&update));
            let durability = if last { Durability::WithCommit } else { Durability::Now };
            running.beside(session.writer.finish_task(task, writes, durability)).await?;
        }
        drop(running);
        if let Some(error) = unread {
            return Err(error);
        }
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
        Report::Usage(usage) => observer.used(&usage),
        Report::LoopChecked { agent, verdict } => observer.loop_checked(Some(&agent), &verdict),
        Report::ToolsPromoted { agent, names } => observer.tools_promoted(Some(&agent), &names),
        Report::Nested(nested) => observer.nested(&nested)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use async_trait::async_trait;
    use threadkeep::channel::Schema;
    use threadkeep::id::{IdSource, ThreadId};
    use threadkeep::mode::ChannelMode;
    use threadkeep::state::StateAccessor;
    use threadkeep::step::StepWriter;
    use threadkeep_memory::MemorySaver;
    use tokio::sync::Mutex;

    use super::*;
    use crate::model::scripted::ScriptedModel;
    use crate::model::{RetryingModel, message};
    use crate::tools::{Tool, ToolError, ToolOutput, ToolSpec, Toolbox};
    use crate::{Ended, ObserverError, RunTerms};

    /// The one transaction of a database that writes.
    type Transaction = Arc<Mutex<()>>;

    /// Holds the transaction for a while, twice; or, without one, reports.
    struct Writing(Option<Transaction>);

    #[async_trait]
    impl Tool for Writing {
        fn spec(&self) -> ToolSpec {
            let name = if self.0.is_some() { "write" } else { "report" };
            let (name, description) = (name.to_owned(), String::new());
            ToolSpec { name, description, parameters: json!({"type": "object", "properties": {}}) }
        }

        fn stops_within(&self) -> Option<Duration> {
            Some(Duration::from_secs(5))
        }

        async fn call(&self, context: &ToolContext, _: Json) -> Result<ToolOutput, ToolError> {
            if let Some(transaction) = &self.0 {
                for _ in 0..2 {
                    let _held = transaction.lock().await;
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            } else {
                context.reports.send(Report::Custom(json!("first"))).await;
                tokio::time::sleep(Duration::from_millis(1500)).await;
                context.reports.send(Report::Custom(json!("second"))).await;
            }
            Ok(ToolOutput::text("done"))
        }
    }

    /// Stores what it observes, in a transaction.
    struct Storing {
        transaction: Transaction,
        seen: Vec<String>,
        cancel: Option<tokio_util::sync::CancellationToken>,
    }

    #[async_trait]
    impl Observer for Storing {
        async fn custom(&mut self, event: &Json) {
            if let Some(cancel) = &self.cancel {
                cancel.cancel();
            }
            let _held = self.transaction.lock().await;
            self.seen.push(event.as_str().unwrap().to_owned());
        }

        async fn message_added(&mut self, message: Added<'_>) -> Result<(), ObserverError> {
            let _held = self.transaction.lock().await;
            if let Added::ToolResult { message, .. } = message {
                self.seen.push(message["name"].as_str().unwrap().to_owned());
            }
            Ok(())
        }
    }

    /// A run in which a call reports while others hold the transaction. It ends although the observer waits for that
    /// transaction.
    async fn run(cancelled: bool) -> (Ended, Vec<String>) {
        let transaction = Transaction::default();
        let script = json!({"rules": [{"answers": [
            {"tool_calls": [{"name": "write"}, {"name": "report"}, {"name": "write"}]}, {"text": "Done."},
        ]}]});
        let model = ScriptedModel::from_json("m", &script.to_string()).unwrap();
        let mut toolbox = Toolbox::new();
        toolbox.add(Arc::new(Writing(Some(Arc::clone(&transaction)))));
        toolbox.add(Arc::new(Writing(None)));
        let context = ToolContext::new("t", "r", "/nonexistent");
        let agent = Agent::new(RetryingModel::new(Arc::new(model)), toolbox, context);
        let table = Schema::thread_state().compile(ChannelMode::Delta, 3).unwrap();
        let saver = Arc::new(MemorySaver::default());
        let accessor = StateAccessor::new(saver, Arc::new(table), Arc::new(IdSource::default()));
        let mut writer = StepWriter::open(&accessor, &ThreadId::from("t"), None).await.unwrap();
        let terms = RunTerms::new("r", 10);
        let cancel = cancelled.then(|| terms.cancel.clone());
        let mut observer = Storing { transaction, seen: Vec::new(), cancel };
        let mut session = Session::new(terms, &mut writer, &mut observer);
        let input = Map::from_iter([("messages".to_owned(), json!([message::human("go")]))]);
        let running = agent.run(&mut session, Some(input.into()));
        let ended = tokio::time::timeout(Duration::from_mins(10), running)
            .await
            .expect("it does not wait for itself");
        (ended.unwrap(), observer.seen)
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_goes_on_while_the_observer_waits_for_what_it_holds() {
        let (ended, seen) = run(false).await;
        assert!(matches!(ended, Ended::Done { .. }), "{ended:?}");
        assert_eq!(seen, ["first", "second", "report", "write", "write"]);
    }

    /// A tool whose store does not answer, beside another one.
    struct Unanswered;

    #[async_trait]
    impl Tool for Unanswered {
        fn spec(&self) -> ToolSpec {
            let (name, description) = ("unanswered".to_owned(), String::new());
            ToolSpec { name, description, parameters: json!({"type": "object", "properties": {}}) }
        }

        async fn call(&self, _: &ToolContext, _: Json) -> Result<ToolOutput, ToolError> {
            Err(ToolError::Unread("no answer".to_owned()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn calls_beside_one_whose_result_cannot_be_read_end_and_are_kept() {
        let script =
            json!({"rules": [{"answers": [{"tool_calls": [{"name": "unanswered"}, {"name": "report"}]}]}]});
        let model = ScriptedModel::from_json("m", &script.to_string()).unwrap();
        let mut toolbox = Toolbox::new();
        toolbox.add(Arc::new(Unanswered));
        toolbox.add(Arc::new(Writing(None)));
        let context = ToolContext::new("t", "r", "/nonexistent");
        let agent = Agent::new(RetryingModel::new(Arc::new(model)), toolbox, context);
        let table = Schema::thread_state().compile(ChannelMode::Delta, 3).unwrap();
        let saver = Arc::new(MemorySaver::default());
        let accessor = StateAccessor::new(saver, Arc::new(table), Arc::new(IdSource::default()));
        let thread = ThreadId::from("t");
        let mut writer = StepWriter::open(&accessor, &thread, None).await.unwrap();
        let mut observer = Storing { transaction: Transaction::default(), seen: Vec::new(), cancel: None };
        let mut session = Session::new(RunTerms::new("r", 10), &mut writer, &mut observer);
        let input = Map::from_iter([("messages".to_owned(), json!([message::human("go")]))]);
        let error = agent.run(&mut session, Some(input.into())).await.unwrap_err();
        assert!(matches!(&error, AgentError::Unread(reason) if reason == "no answer"), "{error}");
        assert_eq!(observer.seen, ["first", "second", "report"]);
        let next = StepWriter::open(&accessor, &thread, None).await.unwrap();
        let kept = next.recovered();
        assert_eq!(kept.iter().map(|row| row.index).collect::<Vec<_>>(), [1]);
    }

    #[tokio::test(start_paused = true)]
    async fn so_it_does_after_a_cancellation() {
        let (ended, seen) = run(true).await;
        assert_eq!((ended, seen), (Ended::Cancelled, vec!["first".to_owned(), "second".to_owned()]));
    }
}

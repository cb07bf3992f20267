//! The work of a run: from its checkpoint and input to the end of its agent.

use serde_json::{Map, Value as Json};
use threadkeep::Error;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::CheckpointId;
use threadkeep::saver::Load;
use threadkeep::state::{KnownHead, RollbackPoint, StateAccessor, StateSnapshot};
use threadkeep::step::StepWriter;
use threadkeep_agent::tools::WorkUsage;
use threadkeep_agent::{Ended, Input, Next, RunTerms, Session, pending_answer};
use threadkeep_records::persistently;
use threadkeep_subagents::ledger;

use super::{Worker, restoring};
use crate::runs::error::RunError;
use crate::runs::progress;
use crate::runs::request::RunInput;
use crate::runs::resume::{self, Resumed};
use crate::telemetry::spans;

/// How often a run reads the head again because an operator's pass removed the one that it had read.
const HEADS_MAX: usize = 5;

impl Worker<'_> {
    /// Works on the run, from the head that is left if a pass removes a note at the head before the run has written.
    pub(super) async fn execute(&mut self, accessor: &StateAccessor) -> Result<Ended, RunError> {
        let mut again = 0;
        loop {
            let mut read = None;
            match self.attempt(accessor, again > 0, &mut read).await {
                Err(error) if again < HEADS_MAX && error.is_head_removed(read) => again += 1,
                ended => return ended,
            }
        }
    }

    /// One attempt; `read` is set to the head that it read. What was shown and counted before is not shown and counted
    /// `again`.
    async fn attempt(
        &mut self,
        accessor: &StateAccessor,
        again: bool,
        read: &mut Option<CheckpointId>,
    ) -> Result<Ended, RunError> {
        let (spec, thread) = (self.spec, &self.thread);
        let mut head = if let Some(head) = self.first_head.take() {
            head?
        } else {
            let head = accessor.known_head(thread).await?;
            // Then no other process wrote to the thread between the run's start and that read, and from there on each
            // write carries the head.
            self.reporter.owned.check().await?;
            head
        };
        if spec.checkpoint.is_some() {
            accessor.check(thread, spec.checkpoint).await?;
        }
        *read = head.id();
        self.head = Some(head.clone());
        if !again {
            self.reporter.frames.metadata(&spec.run_id);
        }
        self.workspace = self.look_at_workspace().await;
        match accessor.capture(&mut head).await {
            Ok(point) => {
                self.note_finished_before(&point).await?;
                self.rollback = Some(point);
            }
            Err(error @ (Error::Conflict { .. } | Error::HistoryLost { .. })) => return Err(error.into()),
            Err(error) => {
                tracing::warn!(run_id = spec.run_id, %error, "no rollback possible: cannot read the state before the run");
            }
        }
        // Before the first write: a run whose agent cannot be built leaves its thread unchanged, in either mode.
        let delegator = &self.runs.delegator;
        if spec.delegates().is_some() {
            let head = self.rollback.as_ref().and_then(RollbackPoint::snapshot);
            let uncounted = delegator.catch_up(accessor, &spec.thread_id, &spec.run_id, head).await?;
            if !again {
                self.count(&uncounted);
            }
        }
        let mut agent = delegator.agents.lead(&spec.agent()).await?;
        if !spec.asks {
            agent.ask_nothing();
        }
        delegator.equip(&mut agent, accessor, spec.delegates(), None).await?;
        spans::run_model(agent.model.name());
        if self.guard.control.cancel.is_cancelled() {
            return Ok(Ended::Cancelled);
        }
        self.reporter.owned.before_first_write().await?;
        let at = self.linearized(accessor, &mut head).await;
        self.head = Some(head.clone());
        let mut writer = match (&self.rollback, spec.checkpoint) {
            (Some(captured), None) => StepWriter::open_captured(accessor, head, captured),
            _ => StepWriter::open_known(accessor, head, at?).await?,
        };
        let input = self.input(accessor, writer.state()).await?;
        if ledger::has_unfinished(writer.state())? {
            let (thread_id, run_id) = (&spec.thread_id, &spec.run_id);
            let uncounted = match pending_answer(input.as_ref(), writer.state())? {
                // The calls of this answer go on, but not those that it no longer has.
                Some(answer) => {
                    let withdrawn = ledger::withdrawn(thread_id, writer.state(), &answer)?;
                    delegator.withdraw(accessor, thread_id, run_id, &withdrawn).await?
                }
                // Nobody goes on with what the thread has turned away from.
                None if input.is_some() => delegator.abandon(accessor, thread_id, run_id).await?,
                None => Vec::new(),
            };
            if !again {
                self.count(&uncounted);
            }
        }
        self.reporter.owned.before_first_write().await?;
        let (records, run_id) = (&self.runs.records, &spec.run_id);
        let progress =
            progress::report(self.reporter.usage.watch(), self.runs.progress_every, |totals| async move {
                records.runs().progress(run_id, &totals).await.map(|_| ())
            });
        let terms = RunTerms {
            run_id: spec.run_id.clone(),
            metadata: spec.metadata.clone(),
            recursion_limit: spec.recursion_limit,
            breakpoints: spec.breakpoints.clone(),
            cancel: self.guard.control.cancel.clone(),
            durability: spec.durability,
        };
        let mut session = Session::new(terms, &mut writer, &mut self.reporter);
        // A run that waits for the thread goes first, and evaluates the goal after its own turn.
        let yields = || async { Ok(records.runs().is_waited_for(&spec.thread_id).await?) };
        let ended = tokio::select! {
            biased;
            ended = agent.work(&mut session, input, yields) => ended.map_err(RunError::from),
            never = progress => match never {},
        };
        self.head = Some(writer.head().clone());
        self.left = writer.state().cloned();
        ended
    }

    /// Counts what earlier runs did not.
    fn count(&mut self, uncounted: &[WorkUsage]) {
        for usage in uncounted {
            self.reporter.usage.count(usage);
        }
    }

    /// The head before the run has started.
    pub(super) async fn read_head(&self) -> threadkeep::Result<KnownHead> {
        let accessor = self.runs.threads.accessor_for_run().await?;
        accessor.known_head(&self.thread).await
    }

    /// Notes which rows were there before the run adds some, for a process that has to roll it back. There are none, and it
    /// adds none, where nothing is left to run.
    async fn note_finished_before(&self, point: &RollbackPoint) -> Result<(), RunError> {
        let Some(state) = point.snapshot().filter(|state| !state.next.is_empty()) else { return Ok(()) };
        let tasks: Vec<String> = state.writes.iter().map(|row| row.task.to_string()).collect();
        let runs = self.runs.records.runs();
        persistently(|| runs.note_finished_before(&self.spec.run_id, &tasks)).await?;
        Ok(())
    }

    /// The agent's input; `None` continues with the thread's next nodes.
    async fn input(
        &self,
        accessor: &StateAccessor,
        state: Option<&StateSnapshot>,
    ) -> Result<Option<Input>, RunError> {
        if let RunInput::Values(values) = &self.spec.input {
            return Ok(Some(values.clone().into()));
        }
        let mut rows = Vec::new();
        let answer = match self.spec.input.resume() {
            Some(resume) => match resume::resolve(&self.thread, state, resume)? {
                Resumed::Answer(messages) => Some(messages),
                // The run goes on from the checkpoint of the change.
                Resumed::GoOn(_) if matches!(self.spec.input, RunInput::Change(_)) => {
                    rows.push(resume::row(&resume.value)?);
                    None
                }
                Resumed::GoOn(state) => {
                    resume::keep(accessor, state, &resume.value).await?;
                    None
                }
            },
            None => None,
        };
        let RunInput::Change(change) = &self.spec.input else {
            let answer = answer.map(|messages| (MESSAGES_CHANNEL.to_owned(), messages.into()));
            return Ok(answer.map(|answer| Map::from_iter([answer]).into()));
        };
        let mut writes = change.update.clone();
        if let Some(answer) = answer {
            let messages = writes.entry(MESSAGES_CHANNEL).or_insert_with(|| Json::Array(Vec::new()));
            if let Json::Array(messages) = messages {
                messages.extend_from_slice(answer);
            }
        }
        let next = match &change.goto {
            Some(goto) => Next::Go(goto.clone()),
            None if answer.is_some() => return Ok(Some(writes.into())),
            None => Next::Stay,
        };
        Ok(Some(Input { writes, next, rows }))
    }

    /// The checkpoint to open: `None` for the head, including after the selected state was written onto the head.
    async fn linearized(
        &self,
        accessor: &StateAccessor,
        head: &mut KnownHead,
    ) -> Result<Option<CheckpointId>, RunError> {
        let Some(selected) = self.spec.checkpoint else { return Ok(None) };
        let source = accessor.get_loading(&self.thread, Some(selected), Load::None).await?;
        let mut extra = source.map(|state| restoring(selected, &state.metadata.extra)).unwrap_or_default();
        // Part of the run, and rolled back with it.
        extra.insert("run_id".to_owned(), self.spec.run_id.as_str().into());
        match accessor.linearize(head, selected, extra).await {
            Ok(restored) => Ok(if restored.is_some() { None } else { Some(selected) }),
            Err(error @ (Error::NotFound { .. } | Error::BrokenLineage { .. } | Error::Corrupt { .. })) => {
                let (run, checkpoint) = (self.spec.run_id.clone(), selected);
                tracing::error!(run_id = run, %checkpoint, %error, "cannot read the checkpoint to resume from");
                Err(RunError::NotMaterialized { run, checkpoint })
            }
            Err(error) => Err(error.into()),
        }
    }
}

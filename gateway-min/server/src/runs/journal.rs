//! The event feed of a run, written in batches. Events at the run's end wait for [`Journal::close`], so that a failing
//! feed does not keep the run from ending.

use std::time::Duration;

use serde_json::{Value as Json, json};
use threadkeep_agent::model::message;
use threadkeep_agent::tools::Changes;
use threadkeep_agent::tools::loop_detection::Verdict;

use super::delivery::Delivery;
use super::subagent_events;
use threadkeep_records::{
    DecideOutcome, EventQuery, EventRow, NewEvent, Records, RecordsError, RunEnd, persistently,
};

/// How many events are buffered before they are written.
const BATCH: usize = 20;
/// The same for events of subagents.
const SUBAGENT_BATCH: usize = 25;
/// How often a write is tried whose outcome is unknown each time.
const ATTEMPTS: usize = 3;

/// Collects the events of one run.
pub(crate) struct Journal {
    records: Records,
    thread_id: String,
    run_id: String,
    pending: Vec<NewEvent>,
    /// Whether the feed may have the first of the buffered events.
    in_doubt: bool,
    /// The position in the feed of the last event that is known to be written; 0 if none is.
    written: i64,
    answers: Vec<String>,
    delivery: Delivery,
}

impl Journal {
    pub(crate) fn new(records: Records, thread_id: &str, run_id: &str) -> Self {
        Self {
            records,
            thread_id: thread_id.to_owned(),
            run_id: run_id.to_owned(),
            pending: Vec::new(),
            in_doubt: false,
            written: 0,
            answers: Vec::new(),
            delivery: Delivery::default(),
        }
    }

    pub(crate) async fn start(&mut self) -> Result<(), RecordsError> {
        self.add(NewEvent::new("run.start", "trace", json!({ "run_id": self.run_id }))).await
    }

    pub(crate) async fn human_input(&mut self, message: &Json) -> Result<(), RecordsError> {
        self.add(NewEvent::new("llm.human.input", "message", message.clone())).await
    }

    pub(crate) async fn ai_response(
        &mut self,
        message: &Json,
        caller: &str,
        latency: Duration,
    ) -> Result<(), RecordsError> {
        let mut event = NewEvent::new("llm.ai.response", "message", message.clone());
        event.metadata.insert("caller".to_owned(), json!(caller));
        event.metadata.insert("usage".to_owned(), message["usage_metadata"].clone());
        event.metadata.insert("latency_ms".to_owned(), json!(latency.as_millis()));
        event.metadata.insert("llm_call_index".to_owned(), json!(self.answers.len()));
        self.answers.push(message["id"].as_str().unwrap_or_default().to_owned());
        self.add(event).await
    }

    pub(crate) async fn tool_result(&mut self, message: &Json) -> Result<(), RecordsError> {
        self.add(NewEvent::new("llm.tool.result", "message", message.clone())).await
    }

    /// A model call failed for good; `answer` is its fallback. The event contains nothing of the request.
    pub(crate) fn llm_error(&mut self, answer: &Json, model: &str, caller: &str) {
        let Some(reason) = message::fallback_reason(answer) else { return };
        let error_type = &answer["additional_kwargs"][message::ERROR_TYPE];
        let content = json!({ "error_type": error_type, "reason": reason, "model": model });
        let mut event = NewEvent::new("llm.error", "trace", content);
        event.metadata.insert("caller".to_owned(), json!(caller));
        self.hold(event);
    }

    /// What loop detection did about an answer of the lead agent, or of the named subagent, if anything. A warning is reported once per cause,
    /// because [`assess`](threadkeep_agent::tools::loop_detection::assess) returns it once.
    pub(crate) fn loop_detection(&mut self, subagent: Option<&str>, verdict: &Verdict) {
        let (action, findings) = match verdict {
            Verdict::Proceed => return,
            Verdict::Warn(findings) => ("warn", findings.as_slice()),
            Verdict::Stop(finding) => ("hard_stop", std::slice::from_ref(finding)),
        };
        for finding in findings {
            let changes = json!({
                "detection_layer": finding.layer.as_str(),
                "tool_names": finding.tool_names,
                "count": finding.count,
                "threshold": finding.threshold,
                "is_subagent": subagent.is_some(),
                "agent_id": subagent,
            });
            let content = json!({
                "name": "LoopDetectionMiddleware", "hook": "after_model", "action": action, "changes": changes,
            });
            self.hold(NewEvent::new("middleware:loop_detection", "middleware", content));
        }
    }

    /// The user's message, or the task of the named subagent, has loaded deferred tools by its words.
    pub(crate) fn tools_promoted(&mut self, subagent: Option<&str>, names: &[String]) {
        if names.is_empty() {
            return;
        }
        let changes = json!({ "tool_names": names, "is_subagent": subagent.is_some(), "agent_id": subagent });
        let content = json!({
            "name": "ToolSearchMiddleware", "hook": "before_model", "action": "auto_promote", "changes": changes,
        });
        self.hold(NewEvent::new("middleware:tool_search", "middleware", content));
    }

    /// An event of a tool that is still working: of a subagent, it belongs to the feed. It is written with others, at the
    /// latest when its task ends; a failing feed keeps neither the tool nor the stream from going on.
    pub(crate) async fn custom(&mut self, event: &Json) {
        let Some((event, last)) = subagent_events::of(event) else { return };
        self.hold(event);
        if !last && self.pending.len() < SUBAGENT_BATCH {
            return;
        }
        if let Err(error) = self.flush().await {
            let run_id = &self.run_id;
            tracing::warn!(run_id, %error, "the events of a subagent are written later");
        }
    }

    /// The ids of the answers so far.
    pub(crate) fn answers(&self) -> impl Iterator<Item = &str> {
        self.answers.iter().map(String::as_str)
    }

    /// The run reached its end.
    pub(crate) fn end(&mut self) {
        self.hold(NewEvent::new("run.end", "outputs", json!({})));
    }

    /// The run failed.
    pub(crate) fn error(&mut self, name: &str, message: &str) {
        self.hold(NewEvent::new("run.error", "error", json!({ "name": name, "message": message })));
    }

    /// What the run changed in its thread's directory.
    pub(crate) fn workspace_changes(&mut self, changes: &Changes) {
        self.hold(NewEvent::new("workspace_changes", "workspace", json!(changes)));
    }

    /// A call of `tool` wrote these files, relative to the thread's directory.
    pub(crate) fn delivered(&mut self, tool: &str, written: &[String]) {
        self.delivery.add(tool, written);
    }

    /// Writes the buffered events, and the delivery receipt, which is written once. A failing feed does not keep a run
    /// from ending.
    pub(crate) async fn close(&mut self) {
        let (receipt, last) = (self.receipt(), self.pending.clone());
        let (events, run) = (self.records.events(), (self.thread_id.as_str(), self.run_id.as_str()));
        if self.in_doubt || events.conclude(run, self.written, last, receipt.clone()).await.is_err() {
            self.close_apart(receipt).await;
        }
        self.pending.clear();
    }

    /// The same, and decides how the run will end, if one transaction can do both; else `None`.
    pub(crate) async fn close_and_decide(&mut self, end: &RunEnd) -> Option<DecideOutcome> {
        if !self.records.events().are_in_database() {
            self.close().await;
            return None;
        }
        let (receipt, last) = (self.receipt(), self.pending.clone());
        let run = (self.thread_id.as_str(), self.run_id.as_str());
        let decided = if self.in_doubt {
            None
        } else {
            self.records.conclude_and_decide(run, (self.written, last), receipt.clone(), end).await.ok()
        };
        if decided.is_none() {
            self.close_apart(receipt).await;
        }
        self.pending.clear();
        decided
    }

    fn receipt(&self) -> NewEvent {
        NewEvent::new("run.delivery", "outputs", self.delivery.receipt())
    }

    /// Writes the last events after an attempt to write all at once, one after the other: perhaps only one of them cannot
    /// be stored, and some may be there already.
    async fn close_apart(&mut self, receipt: NewEvent) {
        self.in_doubt = true;
        let stored = self.write().await;
        let (events, thread_id, run_id) = (self.records.events(), &self.thread_id, &self.run_id);
        if let Err(error) = stored {
            tracing::error!(thread_id, run_id, %error, "the last events of the run are lost");
        }
        let written = persistently(|| events.append_if_absent(thread_id, run_id, receipt.clone())).await;
        if let Err(error) = written {
            tracing::error!(thread_id, run_id, %error, "the receipt of the run is lost");
        }
    }

    /// Buffers an event that need not be stored at once: it is written with the next batch.
    fn hold(&mut self, event: NewEvent) {
        self.pending.push(NewEvent { created_at: Some(self.records.now()), ..event });
    }

    async fn add(&mut self, event: NewEvent) -> Result<(), RecordsError> {
        self.hold(event);
        if self.pending.len() >= BATCH { self.flush().await } else { Ok(()) }
    }

    /// Writes the buffered events. While it is unknown whether they are written they stay buffered, and the run goes on.
    async fn flush(&mut self) -> Result<(), RecordsError> {
        match self.write().await {
            Err(error) if self.in_doubt => {
                tracing::warn!(run_id = self.run_id, %error, "whether events of the run are stored is asked later");
                Ok(())
            }
            done => done,
        }
    }

    /// Writes the buffered events, each once: after a write in doubt only those that the feed does not have.
    async fn write(&mut self) -> Result<(), RecordsError> {
        let mut written = Ok(());
        for _ in 0..ATTEMPTS {
            if self.in_doubt {
                self.records.events().settle(&self.thread_id).await;
                let found = persistently(|| self.found()).await?;
                self.wrote(&found);
            }
            if self.pending.is_empty() {
                return Ok(());
            }
            written = match self.append().await {
                Ok(positions) => {
                    self.wrote(&positions);
                    Ok(())
                }
                Err(error) if self.in_doubt => Err(error),
                Err(error) => return Err(error),
            };
        }
        written
    }

    /// The feed has the first of the buffered events at these positions, and none of the others.
    fn wrote(&mut self, positions: &[i64]) {
        self.in_doubt = false;
        self.written = positions.last().copied().unwrap_or(self.written);
        // After a conclusion in doubt, the receipt has one of them.
        self.pending.drain(..positions.len().min(self.pending.len()));
    }

    async fn append(&mut self) -> Result<Vec<i64>, RecordsError> {
        // If this is dropped, the events may be stored all the same.
        self.in_doubt = true;
        let (events, run) = (self.records.events(), (self.thread_id.as_str(), self.run_id.as_str()));
        let appended = events.append_once(run, self.written, self.pending.clone()).await;
        self.in_doubt = matches!(appended, Err(RecordsError::InDoubt { .. }));
        let positions = appended?;
        if !positions.is_empty() {
            return Ok(positions);
        }
        // An earlier attempt stored the first of them after it was looked for.
        self.in_doubt = true;
        self.found().await
    }

    /// The positions of the buffered events that the feed has: nobody else writes events of the run.
    async fn found(&self) -> Result<Vec<i64>, RecordsError> {
        let query = EventQuery {
            after_seq: Some(self.written),
            limit: EventQuery::MAX_LIMIT,
            ..EventQuery::new(self.thread_id.as_str(), self.run_id.as_str())
        };
        let is_first = |found: &EventRow| {
            let first = self.pending.first();
            first.is_some_and(|event| {
                event.event_type == found.event_type && event.created_at == Some(found.created_at)
            })
        };
        let found = self.records.events().list(&query).await?;
        Ok(found.into_iter().skip_while(|event| !is_first(event)).map(|event| event.seq).collect())
    }
}

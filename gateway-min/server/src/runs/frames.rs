//! The frames of a run's stream: what each stream mode shows of a superstep.

use std::sync::Arc;

use bytes::Bytes;
use chrono::{DateTime, SecondsFormat, Utc};
use serde_json::{Map, Value as Json, json};
use threadkeep::Result;
use threadkeep::id::CheckpointId;
use threadkeep::metadata::COUNTERS_KEY;
use threadkeep::mode::CHECKPOINT_MODE_METADATA_KEY;
use threadkeep::state::{StateSnapshot, TaskView};
use threadkeep::step::Task;
use threadkeep_agent::Origin;
use threadkeep_agent::serialize::{self, Rendered};
use threadkeep_agent::tools::{Nested, NestedEvent};

use super::request::StreamMode;
use crate::streams::bridge::Publisher;

/// Publishes the frames of one run in the requested modes. Nothing is rendered for other modes.
#[derive(Clone)]
pub(crate) struct Frames {
    publisher: Arc<Publisher>,
    rendered: Arc<Rendered>,
    modes: Vec<StreamMode>,
    thread: String,
    /// Scalar entries of the run's configuration, included in every message frame.
    run_metadata: Map<String, Json>,
    /// Whether what happens inside of tool calls is shown too.
    subgraphs: bool,
    /// The place whose frames these are; `None` for the run's own graph.
    namespace: Option<String>,
}

impl Frames {
    pub(crate) fn new(
        (publisher, rendered): (Arc<Publisher>, Arc<Rendered>),
        (modes, subgraphs): (Vec<StreamMode>, bool),
        thread: &str,
        run_metadata: Map<String, Json>,
    ) -> Self {
        let thread = thread.to_owned();
        Self { publisher, rendered, modes, thread, run_metadata, subgraphs, namespace: None }
    }

    /// Whether [`Self::nested`] is wanted (`stream_subgraphs`).
    pub(crate) fn wants_nested(&self) -> bool {
        self.subgraphs
    }

    /// What an agent inside of a tool call reports: the same frames, with the place of the call in their names, as
    /// `messages|tools:<task>`.
    pub(crate) fn nested(&self, Nested { namespace, step, event }: &Nested) -> Result<()> {
        let frames = Self { namespace: Some(namespace.clone()), ..self.clone() };
        match event {
            NestedEvent::TaskStarted(task, input) => {
                frames.task_started(*step, task, || Ok(input.clone()))?;
            }
            NestedEvent::Message(task, origin, message) => {
                let origin = origin.as_ref().map(|(provider, model)| Origin { provider, model });
                frames.message(*step, task, origin, message);
            }
            NestedEvent::TaskEnded(task, outcome) => {
                if let Ok(update) = outcome {
                    frames.updates(task.node.as_str(), update);
                }
                frames.task_ended(*step, task, outcome.as_ref().map_err(String::as_str));
            }
            NestedEvent::Committed(state) => frames.committed(state)?,
        }
        Ok(())
    }

    fn publish(&self, event: &str, data: &Json) {
        self.publish_text(event, data.to_string().into());
    }

    fn publish_text(&self, event: &str, data: Bytes) {
        match &self.namespace {
            None => self.publisher.publish_text(event, data),
            Some(namespace) => self.publisher.publish_text(&format!("{event}|{namespace}"), data),
        };
    }

    fn wants(&self, mode: StreamMode) -> bool {
        self.modes.contains(&mode)
    }

    /// Gives the frames later ids than this time has.
    pub(crate) fn begin_after(&self, time: DateTime<Utc>) {
        self.publisher.begin_after(time);
    }

    /// The time of the newest frame.
    pub(crate) fn latest(&self) -> Option<DateTime<Utc>> {
        self.publisher.latest()
    }

    /// The first frame of a run.
    pub(crate) fn metadata(&self, run_id: &str) {
        self.publish("metadata", &json!({ "run_id": run_id, "thread_id": self.thread }));
    }

    /// The frame for an error that ends the run.
    pub(crate) fn error(&self, name: &str, message: &str) {
        self.publish("error", &json!({ "message": message, "name": name }));
    }

    /// A task starts. `input` is rendered only if requested.
    pub(crate) fn task_started(
        &self,
        step: i64,
        task: &Task,
        input: impl FnOnce() -> Result<Json>,
    ) -> Result<()> {
        if !self.shows_tasks() {
            return Ok(());
        }
        let payload = json!({
            "id": task.id.to_string(),
            "name": task.node.as_str(),
            "input": input()?,
            "triggers": [trigger(task)],
            "metadata": {},
        });
        self.task("task", step, &payload);
        Ok(())
    }

    /// A task ended, with its writes or with an error.
    pub(crate) fn task_ended(&self, step: i64, task: &Task, outcome: Result<&Json, &str>) {
        if !self.shows_tasks() {
            return;
        }
        let payload = json!({
            "id": task.id.to_string(),
            "name": task.node.as_str(),
            "error": outcome.err(),
            "result": outcome.ok(),
            "interrupts": [],
        });
        self.task("task_result", step, &payload);
    }

    fn shows_tasks(&self) -> bool {
        self.wants(StreamMode::Tasks) || self.wants(StreamMode::Debug)
    }

    fn task(&self, kind: &str, step: i64, payload: &Json) {
        if self.wants(StreamMode::Tasks) {
            self.publish("tasks", payload);
        }
        self.debug(kind, step, payload);
    }

    fn debug(&self, kind: &str, step: i64, payload: &Json) {
        if self.wants(StreamMode::Debug) {
            let timestamp = self.publisher.now().to_rfc3339_opts(SecondsFormat::Micros, false);
            let frame = json!({ "step": step, "timestamp": timestamp, "type": kind, "payload": payload });
            self.publish("debug", &frame);
        }
    }

    /// A message or a chunk of one, as a task produces it.
    pub(crate) fn message(&self, step: i64, task: &Task, origin: Option<Origin<'_>>, message: &Json) {
        if !self.wants(StreamMode::MessagesTuple) {
            return;
        }
        let mut message = message.clone();
        serialize::complete_message(&mut message);
        let place = format!("{}:{}", task.node, task.id);
        let namespace =
            self.namespace.as_ref().map_or_else(|| place.clone(), |outer| format!("{outer}|{place}"));
        let mut metadata = self.run_metadata.clone();
        for (key, value) in [
            ("thread_id", json!(self.thread)),
            ("langgraph_step", json!(step)),
            ("langgraph_node", json!(task.node.as_str())),
            ("langgraph_triggers", json!([trigger(task)])),
            ("langgraph_path", json!(["__pregel_pull", task.node.as_str()])),
            ("langgraph_checkpoint_ns", json!(namespace)),
            ("checkpoint_ns", json!(namespace)),
        ] {
            metadata.insert(key.to_owned(), value);
        }
        if let Some(origin) = origin {
            metadata.insert("ls_provider".to_owned(), json!(origin.provider));
            metadata.insert("ls_model_name".to_owned(), json!(origin.model));
            metadata.insert("ls_model_type".to_owned(), json!("chat"));
        }
        // Moved: `json!` would copy both, for each token.
        self.publish("messages", &Json::Array(vec![message, Json::Object(metadata)]));
    }

    /// What a node wrote.
    pub(crate) fn updates(&self, node: &str, writes: &Json) {
        if self.wants(StreamMode::Updates) {
            self.publish_text("updates", format!("{{{}:{writes}}}", Json::from(node)).into());
        }
    }

    /// An event of a tool that is still working.
    pub(crate) fn custom(&self, event: &Json) {
        if self.wants(StreamMode::Custom) {
            self.publish("custom", event);
        }
    }

    /// The whole state.
    pub(crate) fn values(&self, state: &StateSnapshot) -> Result<()> {
        if self.wants(StreamMode::Values) {
            self.publish_text("values", self.rendered.values(state, &[])?.into());
        }
        Ok(())
    }

    /// A superstep was committed: the whole state, and the checkpoint.
    pub(crate) fn committed(&self, state: &StateSnapshot) -> Result<()> {
        self.values(state)?;
        if self.wants(StreamMode::Checkpoints) || self.wants(StreamMode::Debug) {
            let payload = self.checkpoint(state)?;
            if self.wants(StreamMode::Checkpoints) {
                self.publish("checkpoints", &payload);
            }
            self.debug("checkpoint", state.metadata.step, &payload);
        }
        Ok(())
    }

    /// The run stops before or after a node, as requested.
    pub(crate) fn interrupted(&self, state: &StateSnapshot) -> Result<()> {
        self.updates("__interrupt__", &json!([]));
        if self.wants(StreamMode::Values) {
            let values = self.rendered.values(state, &[("__interrupt__", &json!([]))])?;
            self.publish_text("values", values.into());
        }
        Ok(())
    }

    fn checkpoint(&self, state: &StateSnapshot) -> Result<Json> {
        let namespace = self.namespace.as_deref().unwrap_or(state.key.namespace.as_str());
        let config = |id: CheckpointId| {
            json!({ "configurable": {
                "thread_id": self.thread, "checkpoint_ns": namespace, "checkpoint_id": id.to_string(),
            }})
        };
        let task = |task: TaskView| json!({ "id": task.id.to_string(), "name": task.name.as_str(), "interrupts": task.interrupts, "state": null });
        // No event says the mode (service reference, "Events").
        let mut metadata = serialize::metadata(&state.metadata);
        metadata.retain(|key, _| ![CHECKPOINT_MODE_METADATA_KEY, COUNTERS_KEY].contains(&key.as_str()));
        let mut payload = json!({
            "config": config(state.key.id),
            "parent_config": state.parent.map(config),
            "metadata": metadata,
            "next": state.next,
            "tasks": state.tasks().into_iter().map(task).collect::<Vec<_>>(),
        });
        payload["values"] = Json::Object(serialize::values(state)?);
        Ok(payload)
    }
}

fn trigger(task: &Task) -> String {
    format!("branch:to:{}", task.node)
}

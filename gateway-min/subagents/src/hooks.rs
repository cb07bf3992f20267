//! Lifecycle hooks: what an extension learns of the start and the end of tasks (service reference, "Events"). Extensions
//! are commands of the configuration, or code that implements [`LifecycleHooks`].

mod command;

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::FutureExt as _;
use serde_json::{Map, Value as Json};
use threadkeep_agent::Ended;
use threadkeep_config::HookCommand;
use threadkeep_records::ExecutionStatus;

use command::CommandHook;

/// How long all hooks together may take for one notification.
const MAX_TIME: Duration = Duration::from_secs(3);

/// Values that hooks keep: those of the process, or those of one task.
pub type HookStore = Mutex<Map<String, Json>>;

/// Whose task it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskKind {
    /// The lead agent's: its run.
    Lead,
    /// A subagent's: one execution.
    Subagent,
}

impl TaskKind {
    /// The name in the contract.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Lead => "lead",
            Self::Subagent => "subagent",
        }
    }
}

/// How a task ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskConclusion {
    /// With a result.
    Completed,
    /// It was cancelled.
    Aborted,
    /// In any other way.
    Failed,
}

impl TaskConclusion {
    /// The name in the contract.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Aborted => "aborted",
            Self::Failed => "failed",
        }
    }
}

impl TaskConclusion {
    /// How a lead agent's work ended. A fallback answer for a model that failed is a failure.
    pub fn of_lead<E>(ended: &Result<Ended, E>) -> Self {
        match ended {
            Ok(Ended::Done { fallback: None, .. }) => Self::Completed,
            Ok(Ended::Cancelled) => Self::Aborted,
            Ok(Ended::Done { .. }) | Err(_) => Self::Failed,
        }
    }
}

impl From<ExecutionStatus> for TaskConclusion {
    fn from(status: ExecutionStatus) -> Self {
        match status {
            ExecutionStatus::Completed => Self::Completed,
            ExecutionStatus::Cancelled => Self::Aborted,
            _ => Self::Failed,
        }
    }
}

/// A task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskInfo {
    /// The execution; for the lead agent, its run.
    pub task_id: String,
    /// The run.
    pub run_id: String,
    /// Its thread.
    pub thread_id: String,
    /// Whose task it is.
    pub kind: TaskKind,
    /// The task that delegated it; `None` for the lead agent's.
    pub parent_task_id: Option<String>,
    /// The agent.
    pub agent_name: String,
    /// Whether another process had begun it.
    pub resumed: bool,
}

impl TaskInfo {
    /// The task of a lead agent, which is its run.
    pub fn lead(run_id: &str, thread_id: &str, agent_name: &str) -> Self {
        Self {
            task_id: run_id.to_owned(),
            run_id: run_id.to_owned(),
            thread_id: thread_id.to_owned(),
            kind: TaskKind::Lead,
            parent_task_id: None,
            agent_name: agent_name.to_owned(),
            resumed: false,
        }
    }
}

/// What an extension does at the start and at the end of tasks.
#[async_trait]
pub trait LifecycleHooks: Send + Sync {
    /// A task starts: it has a slot.
    async fn on_task_start(&self, app: &HookStore, task: &HookStore, info: &TaskInfo) {
        let _ = (app, task, info);
    }

    /// A task that started has ended.
    async fn on_task_stop(
        &self,
        app: &HookStore,
        task: &HookStore,
        info: &TaskInfo,
        outcome: TaskConclusion,
    ) {
        let _ = (app, task, info, outcome);
    }
}

/// The extensions of a process.
///
/// All of them together get three seconds for a notification. One that takes longer, or panics, is logged, and the task
/// goes on.
#[derive(Default)]
pub struct Hooks {
    extensions: Vec<Arc<dyn LifecycleHooks>>,
    app: HookStore,
    /// By the id that the outside knows a task by, which is the model's id of the call, and the task's own: the items of a
    /// batch have the call of the batch, and calls of several threads the same id.
    tasks: Mutex<HashMap<(String, String), Arc<HookStore>>>,
}

impl Hooks {
    /// These extensions, in the order in which they are notified.
    pub fn new(extensions: Vec<Arc<dyn LifecycleHooks>>) -> Self {
        Self { extensions, ..Self::default() }
    }

    /// The commands of the configuration (`subagent_runtime.hooks`), in its order.
    pub fn configured(commands: &[HookCommand]) -> Self {
        let hooks = commands.iter().cloned().map(CommandHook::new);
        Self::new(hooks.map(|hook| Arc::new(hook) as Arc<dyn LifecycleHooks>).collect())
    }

    /// Notifies of a start. `external_id` is the id that the outside knows the task by.
    pub async fn started(&self, external_id: &str, info: &TaskInfo) {
        if self.extensions.is_empty() {
            return;
        }
        let task = Arc::<HookStore>::default();
        self.tasks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert((external_id.to_owned(), info.task_id.clone()), Arc::clone(&task));
        let all = async {
            for extension in &self.extensions {
                caught(info, extension.on_task_start(&self.app, &task, info)).await;
            }
        };
        within(info, all).await;
    }

    /// Notifies of the end of a task that failed without saying so, if it was notified of the start and not of the end.
    pub async fn broke_off(&self, external_id: &str, info: &TaskInfo) {
        let key = (external_id.to_owned(), info.task_id.clone());
        if self.tasks.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&key) {
            self.stopped(external_id, info, TaskConclusion::Failed).await;
        }
    }

    /// Notifies of an end.
    pub async fn stopped(&self, external_id: &str, info: &TaskInfo, outcome: TaskConclusion) {
        if self.extensions.is_empty() {
            return;
        }
        let key = (external_id.to_owned(), info.task_id.clone());
        let task = self.tasks.lock().unwrap_or_else(PoisonError::into_inner).remove(&key).unwrap_or_default();
        let all = async {
            for extension in &self.extensions {
                caught(info, extension.on_task_stop(&self.app, &task, info, outcome)).await;
            }
        };
        within(info, all).await;
    }
}

async fn caught(info: &TaskInfo, notified: impl Future<Output = ()>) {
    if AssertUnwindSafe(notified).catch_unwind().await.is_err() {
        tracing::error!(task_id = info.task_id, "a lifecycle hook panicked");
    }
}

async fn within(info: &TaskInfo, all: impl Future<Output = ()>) {
    if tokio::time::timeout(MAX_TIME, all).await.is_err() {
        tracing::warn!(task_id = info.task_id, "the lifecycle hooks took longer than three seconds");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Remembering(Mutex<Vec<String>>);

    #[async_trait]
    impl LifecycleHooks for Remembering {
        async fn on_task_start(&self, app: &HookStore, task: &HookStore, info: &TaskInfo) {
            task.lock().unwrap().insert("seen".into(), info.agent_name.clone().into());
            app.lock().unwrap().insert("tasks".into(), 1.into());
        }

        async fn on_task_stop(
            &self,
            app: &HookStore,
            task: &HookStore,
            _: &TaskInfo,
            outcome: TaskConclusion,
        ) {
            let (app, task) = (app.lock().unwrap(), task.lock().unwrap());
            self.0.lock().unwrap().push(format!("{} {} {}", app["tasks"], task["seen"], outcome.as_str()));
        }
    }

    /// Takes as long as it likes, or panics.
    struct Hostile;

    #[async_trait]
    impl LifecycleHooks for Hostile {
        async fn on_task_start(&self, _: &HookStore, _: &HookStore, _: &TaskInfo) {
            panic!("expected by the test");
        }

        async fn on_task_stop(&self, _: &HookStore, _: &HookStore, _: &TaskInfo, _: TaskConclusion) {
            std::future::pending::<()>().await;
        }
    }

    pub(super) fn info() -> TaskInfo {
        TaskInfo {
            task_id: "e".into(),
            run_id: "r".into(),
            thread_id: "t".into(),
            kind: TaskKind::Subagent,
            parent_task_id: Some("r".into()),
            agent_name: "bash".into(),
            resumed: false,
        }
    }

    /// Scenario 78.
    #[tokio::test(start_paused = true)]
    async fn every_extension_is_notified_and_none_delays_a_task_for_more_than_three_seconds() {
        let remembering = Arc::new(Remembering(Mutex::default()));
        let hooks = Hooks::new(vec![Arc::clone(&remembering) as Arc<dyn LifecycleHooks>, Arc::new(Hostile)]);
        hooks.started("call_0", &info()).await;
        let before = tokio::time::Instant::now();
        hooks.stopped("call_0", &info(), ExecutionStatus::Cancelled.into()).await;
        assert_eq!(before.elapsed(), MAX_TIME);
        assert_eq!(*remembering.0.lock().unwrap(), ["1 \"bash\" aborted"]);
        assert!(hooks.tasks.lock().unwrap().is_empty());
    }

    /// The items of a batch have the call of the batch.
    #[tokio::test]
    async fn tasks_of_one_call_have_values_of_their_own() {
        let remembering = Arc::new(Remembering(Mutex::default()));
        let hooks = Hooks::new(vec![Arc::clone(&remembering) as Arc<dyn LifecycleHooks>]);
        let items =
            ["a", "b"].map(|name| TaskInfo { task_id: name.into(), agent_name: name.into(), ..info() });
        for item in &items {
            hooks.started("call_0", item).await;
        }
        for item in &items {
            hooks.stopped("call_0", item, TaskConclusion::Completed).await;
        }
        assert_eq!(*remembering.0.lock().unwrap(), ["1 \"a\" completed", "1 \"b\" completed"]);
        assert!(hooks.tasks.lock().unwrap().is_empty());
    }

    #[test]
    fn an_end_has_one_of_three_names() {
        let names = |status: ExecutionStatus| TaskConclusion::from(status).as_str();
        assert_eq!(names(ExecutionStatus::Completed), "completed");
        assert_eq!(names(ExecutionStatus::Cancelled), "aborted");
        assert_eq!((names(ExecutionStatus::Failed), names(ExecutionStatus::TimedOut)), ("failed", "failed"));
        assert_eq!((TaskKind::Lead.as_str(), TaskKind::Subagent.as_str()), ("lead", "subagent"));
    }
}

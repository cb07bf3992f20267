//! A lead agent that delegates, with scripted models, on the stores of its program.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use threadkeep::channel::Schema;
use threadkeep::id::{IdSource, ThreadId};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::Saver;
use threadkeep::state::{StateAccessor, StateSnapshot};
use threadkeep::step::StepWriter;
use threadkeep_agent::model::message;
use threadkeep_agent::tools::{Tool, ToolSource, WorkUsage};
use threadkeep_agent::{
    AgentBuilder, AgentError, AgentSpec, Ended, Input, Observer, RunTerms, Session, Tokens,
};
use threadkeep_config::{ConfigHandle, Environment, LoadOptions};
use threadkeep_records::{
    Clock, Delegating, ExecutionRow, MultitaskStrategy, NewRun, NewThread, Records, RecordsOptions, RunEnd,
    RunStatus, until_available,
};
use threadkeep_subagents::Delegator;
use threadkeep_subagents::admission::Admission;
use threadkeep_subagents::batches::Batching;
use threadkeep_subagents::catalog::Catalog;
use threadkeep_subagents::ledger::{self, Limits};
use threadkeep_subagents::managed::FileStore;
use threadkeep_testing::Database;
use tokio_util::sync::CancellationToken;

use crate::store;

pub(crate) const THREAD: &str = "t";
/// The file of the requests that models got.
const RECORD: &str = "calls.jsonl";

/// A process: its configuration, its stores, its subagents.
pub(crate) struct House {
    pub(crate) delegator: Arc<Delegator>,
    pub(crate) accessor: StateAccessor,
    pub(crate) limits: Limits,
    pub(crate) allowed: Option<Vec<String>>,
    directory: Arc<tempfile::TempDir>,
    /// The last to go.
    database: Option<Arc<Database>>,
}

/// What a process keeps its threads in.
pub(crate) struct Stores {
    pub(crate) saver: Arc<dyn Saver>,
    pub(crate) records: Records,
    pub(crate) mode: ChannelMode,
    /// The database that they are in, if it is a test's own.
    pub(crate) database: Option<Database>,
}

/// Records whose clock moves with that of the runtime, which a test can put forward.
pub(crate) fn ticking() -> RecordsOptions {
    let (started, now) = (tokio::time::Instant::now(), chrono::Utc::now());
    RecordsOptions { clock: Clock::from_fn(move || now + started.elapsed()), ..RecordsOptions::default() }
}

/// Stops the clock of the test's runtime until it is dropped: no time is up meanwhile, however busy the machine is.
/// After ten minutes the clock goes on by itself, so that what is stuck fails.
pub(crate) struct Still {
    _ended: mpsc::Sender<()>,
}

impl Still {
    pub(crate) fn begin() -> Self {
        let (ended, waits) = mpsc::channel::<()>();
        // A stopped clock does not go on while the runtime waits for such a thread.
        tokio::task::spawn_blocking(move || waits.recv_timeout(Duration::from_mins(10)));
        tokio::time::pause();
        Self { _ended: ended }
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        tokio::time::resume();
    }
}

/// What the observer of a run saw.
#[derive(Default)]
pub(crate) struct Seen {
    /// The events of tools, in order.
    pub(crate) events: Vec<Json>,
    /// Model, caller, calls and tokens of what was done for tools.
    pub(crate) used: Vec<(String, String, u64, Tokens)>,
    /// The executions for which it was done, each with its attempt.
    pub(crate) counted: Vec<(String, i64)>,
    /// Cancels the run at the first event of this type.
    pub(crate) cancel_at: Option<(&'static str, CancellationToken)>,
}

#[async_trait]
impl Observer for Seen {
    async fn custom(&mut self, event: &Json) {
        self.events.push(event.clone());
        if let Some((kind, cancel)) = &self.cancel_at
            && event["type"] == *kind
        {
            cancel.cancel();
        }
    }

    fn used(&mut self, usage: &WorkUsage) {
        let attempt = (usage.work_id.clone(), usage.attempt);
        if self.counted.contains(&attempt) {
            return;
        }
        self.counted.push(attempt);
        for (model, calls, tokens) in &usage.models {
            self.used.push((model.clone(), usage.caller.clone(), *calls, *tokens));
        }
    }
}

impl Seen {
    /// The types of the events.
    pub(crate) fn types(&self) -> Vec<&str> {
        self.events.iter().map(|event| event["type"].as_str().unwrap()).collect()
    }
}

impl House {
    /// A process with this script for every model, and further sections of the configuration.
    pub(crate) async fn new(script: Json, sections: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let Stores { saver, records, mode, database } = store::open(directory.path(), ticking()).await;
        let table = Schema::thread_state().compile(mode, 3).unwrap();
        let accessor = StateAccessor::new(saver, Arc::new(table), Arc::new(IdSource::default()));
        let house = Self::in_directory(directory, records, accessor, script, sections);
        Self { database: database.map(Arc::new), ..house }
    }

    /// A process with this script, on its stores, in this directory.
    pub(crate) fn in_directory(
        directory: tempfile::TempDir,
        records: Records,
        accessor: StateAccessor,
        mut script: Json,
        sections: &str,
    ) -> Self {
        script["record"] = json!(directory.path().join(RECORD));
        std::fs::write(directory.path().join("script.json"), script.to_string()).unwrap();
        let config = format!(
            "models:\n  - {{name: main, use: scripted, model: main, script: script.json}}\n  - {{name: other, use: \
             scripted, model: other, script: script.json}}\n{sections}\n"
        );
        std::fs::write(directory.path().join("config.yaml"), config).unwrap();
        Self::on(Arc::new(directory), records, accessor)
    }

    fn on(directory: Arc<tempfile::TempDir>, records: Records, accessor: StateAccessor) -> Self {
        let options = LoadOptions {
            config_path: Some(directory.path().join("config.yaml")),
            environment: Environment::from_iter([(
                "SVC_HOME".to_owned(),
                directory.path().join("state").display().to_string(),
            )]),
            working_dir: directory.path().to_owned(),
        };
        let config = ConfigHandle::open_trusted(&options).unwrap();
        let current = config.current();
        let settings = &current.subagent_batches;
        let batches = settings.enabled.then(|| Arc::new(Batching::new(settings.clone())));
        let delegator = Delegator {
            records,
            delegating: Delegating::Unrecorded,
            agents: Arc::new(AgentBuilder::new(config.clone(), &current)),
            admission: Admission::new(&current.subagent_runtime),
            catalog: Arc::new(Catalog::new(&current, Arc::new(FileStore::new(directory.path())))),
            config,
            hooks: Arc::default(),
            external: Arc::new(|_| None),
            stopping: CancellationToken::new(),
            batches,
        };
        Self {
            delegator: Arc::new(delegator),
            accessor,
            limits: Limits { concurrent: 3, total: 6 },
            allowed: None,
            directory,
            database: None,
        }
    }

    /// The same process with this tool for external agents, if the configuration has any.
    pub(crate) fn with_external(mut self, tool: Arc<dyn Tool>) -> Self {
        let delegator = Arc::get_mut(&mut self.delegator).expect("nobody else has it yet");
        delegator.external =
            Arc::new(move |config| (!config.acp_agents.is_empty()).then(|| Arc::clone(&tool)));
        self
    }

    /// The same process as a gateway, whose runs have rows.
    pub(crate) fn recorded(mut self) -> Self {
        let delegator = Arc::get_mut(&mut self.delegator).expect("nobody else has it yet");
        delegator.delegating = Delegating::Run;
        self
    }

    /// The same process whose agents also have the tools of this source.
    pub(crate) fn with_source(mut self, source: Arc<dyn ToolSource>) -> Self {
        let delegator = Arc::get_mut(&mut self.delegator).expect("nobody else has it yet");
        let config = delegator.config.clone();
        delegator.agents = Arc::new(AgentBuilder::new(config.clone(), &config.current()).with_source(source));
        self
    }

    /// Changes the text of the configuration, for the next process.
    pub(crate) fn reconfigure(&self, from: &str, to: &str) {
        let path = self.directory.path().join("config.yaml");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{text}");
        std::fs::write(path, text.replace(from, to)).unwrap();
    }

    /// The same stores in a process that has just started.
    pub(crate) fn restarted(&self) -> Self {
        let records = self.delegator.records.clone();
        let house = Self::on(Arc::clone(&self.directory), records, self.accessor.clone());
        let database = self.database.clone();
        Self { limits: self.limits, allowed: self.allowed.clone(), database, ..house }
    }

    /// A run with this question; `None` goes on where the thread stopped.
    pub(crate) async fn run(
        &self,
        run: &str,
        question: Option<&str>,
        seen: &mut Seen,
    ) -> Result<Ended, AgentError> {
        let cancel = seen.cancel_at.as_ref().map(|(_, cancel)| cancel.clone()).unwrap_or_default();
        self.run_until(run, question, seen, cancel).await
    }

    /// The same with any observer.
    pub(crate) async fn run_observed(
        &self,
        run: &str,
        question: Option<&str>,
        observer: &mut dyn Observer,
    ) -> Result<Ended, AgentError> {
        self.run_until(run, question, observer, CancellationToken::new()).await
    }

    pub(crate) async fn run_until(
        &self,
        run: &str,
        question: Option<&str>,
        observer: &mut dyn Observer,
        cancel: CancellationToken,
    ) -> Result<Ended, AgentError> {
        let input = question.map(|question| {
            Map::from_iter([("messages".to_owned(), json!([message::human(question)]))]).into()
        });
        self.run_from(run, input, observer, cancel).await
    }

    /// The same from any input.
    pub(crate) async fn run_from(
        &self,
        run: &str,
        input: Option<Input>,
        observer: &mut dyn Observer,
        cancel: CancellationToken,
    ) -> Result<Ended, AgentError> {
        if self.delegator.batches.is_some() {
            self.begin(run).await;
        }
        let spec = AgentSpec {
            run_id: run,
            thread_id: THREAD,
            model_name: None,
            thinking: None,
            reasoning_effort: None,
        };
        let mut agent = self.delegator.agents.lead(&spec).await?;
        let equipped =
            self.delegator.equip(&mut agent, &self.accessor, Some(self.limits), self.allowed.as_deref());
        equipped.await.unwrap();
        let thread = ThreadId::from(THREAD);
        let mut writer = StepWriter::open(&self.accessor, &thread, None).await?;
        let delegator = &self.delegator;
        let mut uncounted = delegator.catch_up(&self.accessor, THREAD, run, writer.state()).await.unwrap();
        if input.is_some() && ledger::has_unfinished(writer.state())? {
            uncounted.extend(delegator.abandon(&self.accessor, THREAD, run).await.unwrap());
        }
        for used in uncounted {
            observer.used(&used);
        }
        let terms = RunTerms { cancel, ..RunTerms::new(run, 1000) };
        let mut session = Session::new(terms, &mut writer, observer);
        let ended = agent.run(&mut session, input).await;
        self.count(run).await;
        if self.delegator.batches.is_some() {
            let end = RunEnd { status: RunStatus::Success, error: None, ..RunEnd::failed("") };
            let runs = self.delegator.records.runs();
            until_available(|| runs.finish(run, &end)).await.unwrap();
        }
        ended
    }

    /// Gives a run a row, as a gateway does: only such a run submits batches. Ends that of a run whose process has died.
    pub(crate) async fn begin(&self, run: &str) {
        let (threads, runs) = (self.delegator.records.threads(), self.delegator.records.runs());
        threads.create(NewThread { thread_id: THREAD.into(), ..NewThread::default() }).await.unwrap();
        if let Some(dead) = runs.active_for_thread(THREAD).await.unwrap() {
            runs.finish(&dead.run_id, &RunEnd::failed("its process has died")).await.unwrap();
        }
        let new = NewRun { run_id: run.into(), thread_id: THREAD.into(), ..NewRun::default() };
        runs.admit(new, MultitaskStrategy::Reject).await.unwrap();
        runs.start(run).await.unwrap();
    }

    /// Does what the end of a run's record does: its sums contain what was done for its executions.
    pub(crate) async fn count(&self, run: &str) {
        let rows = self.executions().await.into_iter();
        let ended = rows.filter(|row| row.run_id == run && row.status.is_terminal());
        let attempts: Vec<_> = ended.map(|row| (row.execution_id, row.attempt)).collect();
        self.delegator.records.executions().counted(THREAD, run, &attempts).await.unwrap();
    }

    /// A run that is expected to end by itself.
    pub(crate) async fn ask(&self, question: &str) -> Seen {
        let mut seen = Seen::default();
        let ended = self.run("r", Some(question), &mut seen).await.unwrap();
        assert!(matches!(ended, Ended::Done { .. }), "{ended:?}");
        seen
    }

    /// Waits for what a dead process has left in the writers' queues: with a process, its queue would have died.
    pub(crate) async fn settled(&self) {
        self.accessor.saver().flush(&ThreadId::from(THREAD)).await.unwrap();
        let unknown = NewRun { run_id: "unknown".into(), thread_id: THREAD.into(), ..NewRun::default() };
        assert_eq!(self.delegator.records.runs().admitted(&unknown).await.unwrap(), None);
    }

    /// Whether the thread has a checkpoint, after what a dead process has left.
    pub(crate) async fn is_begun(&self) -> bool {
        self.settled().await;
        self.accessor.get(&ThreadId::from(THREAD), None).await.unwrap().is_some()
    }

    pub(crate) async fn state(&self) -> StateSnapshot {
        self.accessor.get(&ThreadId::from(THREAD), None).await.unwrap().unwrap()
    }

    pub(crate) async fn messages(&self) -> Vec<Json> {
        self.state().await.json("messages").unwrap().unwrap().as_array().unwrap().clone()
    }

    /// The results of tools in the conversation.
    pub(crate) async fn results(&self) -> Vec<Json> {
        self.messages().await.into_iter().filter(|message| message["type"] == "tool").collect()
    }

    pub(crate) async fn ledger(&self) -> Vec<Json> {
        self.state()
            .await
            .json("delegations")
            .unwrap()
            .and_then(|list| list.as_array().cloned())
            .unwrap_or_default()
    }

    pub(crate) async fn executions(&self) -> Vec<ExecutionRow> {
        self.delegator.records.executions().of_thread(THREAD).await.unwrap()
    }

    /// The requests that models got from this caller.
    pub(crate) fn requests(&self, caller: &str) -> Vec<Json> {
        let text = std::fs::read_to_string(self.directory.path().join(RECORD)).unwrap_or_default();
        let requests = text.lines().map(|line| serde_json::from_str(line).unwrap());
        requests.filter(|request: &Json| request["caller"] == caller).collect()
    }
}

/// A `task` call in a script.
pub(crate) fn task(prompt: &str, subagent: &str) -> Json {
    json!({"name": "task", "args": {"prompt": prompt, "subagent_type": subagent}})
}

/// A lead that makes these calls, then says what came of them; subagents answer as `rules` say.
pub(crate) fn lead(calls: &[Json], rules: Vec<Json>) -> Json {
    let mut all = vec![json!({"when": {"caller": "lead_agent"}, "answers": [
        {"text": "I delegate.", "tool_calls": calls, "usage": {"input_tokens": 10, "output_tokens": 2}},
        {"text": "Got: {{tool_result}}", "usage": {"input_tokens": 20, "output_tokens": 3}},
    ]})];
    all.extend(rules);
    json!({"rules": all})
}

/// What subagents answer, one after the other.
pub(crate) fn subagent(answers: Json) -> Json {
    json!({"when": {"caller": "subagent"}, "answers": answers})
}

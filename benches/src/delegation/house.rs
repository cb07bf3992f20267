//! A lead agent and its subagents on one store, with models that answer at once.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use serde_json::{Map, Value as Json, json};
use threadkeep::channel::Schema;
use threadkeep::id::{IdSource, ThreadId};
use threadkeep::mode::ChannelMode;
use threadkeep::state::StateAccessor;
use threadkeep::step::StepWriter;
use threadkeep_agent::model::message;
use threadkeep_agent::{AgentBuilder, AgentSpec, Ended, Observer, RunTerms, Session};
use threadkeep_config::{ConfigHandle, Environment, LoadOptions};
use threadkeep_postgres::Address;
use threadkeep_records::{
    Delegating, ExecutionKind, MultitaskStrategy, NewRun, NewThread, PostgresTarget, Records, RecordsOptions,
};
use threadkeep_subagents::Delegator;
use threadkeep_subagents::admission::Admission;
use threadkeep_subagents::batches::{BatchWorker, Batching};
use threadkeep_subagents::catalog::Catalog;
use threadkeep_subagents::ledger::Limits;
use threadkeep_subagents::managed::FileStore;
use tokio_util::sync::CancellationToken;

use super::StoreLocation;
use crate::case::Backend;
use crate::store::Store;

/// The process that delegates.
pub(super) struct House {
    delegator: Arc<Delegator>,
    pub(super) accessor: StateAccessor,
    limits: Limits,
    _store: Store,
}

/// A script in which the lead makes `tasks` calls at once, and each subagent answers `turns` times.
pub(super) fn script(tasks: usize, turns: usize) -> Json {
    let calls: Vec<Json> = (0..tasks)
        .map(|task| json!({"name": "task", "args": {"prompt": format!("task {task}"), "subagent_type": "general-purpose"}}))
        .collect();
    let mut answers: Vec<Json> = (1..turns)
        .map(|turn| json!({"text": "Looking.", "tool_calls": [{"name": "glob", "args": {"pattern": turn.to_string()}}]}))
        .collect();
    answers.push(json!({"text": "Done."}));
    json!({"rules": [
        {"when": {"caller": "subagent"}, "answers": answers},
        {"answers": [{"tool_calls": calls}, {"text": "All is done."}]},
    ]})
}

/// The id of a thread's run.
fn run_of(thread: &str) -> String {
    format!("run of {thread}")
}

impl House {
    pub(super) async fn open(
        backend: Backend,
        location: &StoreLocation,
        script: &Json,
        at_once: usize,
    ) -> Result<Self> {
        let directory = location.directory.path();
        std::fs::write(directory.join("script.json"), script.to_string())?;
        // A private server or a file.
        let durable = backend != Backend::Memory;
        let kind = match backend {
            Backend::Postgres => "postgres",
            _ => "sqlite",
        };
        let url = location.url().unwrap_or_default();
        let sections = format!(
            "database: {{backend: {kind}, postgres_url: '{url}'}}\nmodels: [{{name: main, use: scripted, model: main, script: script.json}}]\nsubagent_runtime: \
             {{max_running: {at_once}}}\nloop_detection: {{enabled: false}}\ntitle: {{enabled: false}}\n\
             subagent_batches: {{enabled: {durable}, poll_interval_seconds: 0.1, default_max_running_items: 64, \
             max_live_items_per_batch: 5000, default_max_live_items: 5000}}\n"
        );
        let path = directory.join("config.yaml");
        std::fs::write(&path, sections)?;
        let home = ("SVC_HOME".to_owned(), directory.join("state").display().to_string());
        let config = ConfigHandle::open_trusted(&LoadOptions {
            config_path: Some(path),
            environment: Environment::from_iter([home]),
            working_dir: directory.to_owned(),
        })?;
        let current = config.current();
        let store = Store::open(backend, &location.target()).await?;
        let options = RecordsOptions::default();
        let records = match (backend, location.url()) {
            (Backend::Memory, _) => Records::open_memory(options).await?,
            (_, Some(url)) => {
                let opener = Address::parse(url)?.opener()?;
                let target = PostgresTarget::new(opener, "Postgres".to_owned(), "public", 10);
                Records::open_postgres(&target, options).await?
            }
            (_, None) => Records::open(&directory.join("gateway.db"), options).await?,
        };
        let table = Schema::thread_state().compile(ChannelMode::Delta, 10)?;
        let accessor =
            StateAccessor::new(Arc::clone(&store.saver), Arc::new(table), Arc::new(IdSource::default()));
        let delegator = Arc::new(Delegator {
            records,
            delegating: Delegating::Unrecorded,
            agents: Arc::new(AgentBuilder::new(config.clone(), &current)),
            admission: Admission::new(&current.subagent_runtime),
            catalog: Arc::new(Catalog::new(&current, Arc::new(FileStore::new(directory)))),
            config,
            hooks: Arc::default(),
            external: Arc::new(|_| None),
            stopping: CancellationToken::new(),
            batches: durable.then(|| Arc::new(Batching::new(current.subagent_batches.clone()))),
        });
        let limits = Limits { concurrent: at_once, total: at_once };
        Ok(Self { delegator, accessor, limits, _store: store })
    }

    /// A worker for the batches of this store.
    pub(super) async fn worker(&self) -> Result<BatchWorker> {
        let started = BatchWorker::start(&self.delegator, self.accessor.clone()).await?;
        started.context("this store has no batches")
    }

    /// The records.
    pub(super) fn records(&self) -> &Records {
        &self.delegator.records
    }

    /// Gives the run of the next [`Self::turn`] of this thread a row: without one it submits no batch.
    pub(super) async fn admit(&self, thread: &str) -> Result<()> {
        let records = self.records();
        let new = NewThread { thread_id: thread.to_owned(), ..NewThread::default() };
        records.threads().create(new).await?;
        let run = NewRun { run_id: run_of(thread), thread_id: thread.to_owned(), ..NewRun::default() };
        records.runs().admit(run, MultitaskStrategy::Reject).await?;
        Ok(())
    }

    /// A turn of this thread.
    pub(super) async fn turn(&self, thread: &str, observer: &mut dyn Observer) -> Result<()> {
        let run_id = run_of(thread);
        let spec = AgentSpec {
            run_id: &run_id,
            thread_id: thread,
            model_name: None,
            thinking: None,
            reasoning_effort: None,
        };
        let mut agent = self.delegator.agents.lead(&spec).await?;
        self.delegator.equip(&mut agent, &self.accessor, Some(self.limits), None).await?;
        let mut writer = StepWriter::open(&self.accessor, &ThreadId::from(thread), None).await?;
        let mut session = Session::new(RunTerms::new(&run_id, 100), &mut writer, observer);
        let question = Map::from_iter([("messages".to_owned(), json!([message::human("go")]))]);
        let ended = agent.run(&mut session, Some(question.into())).await?;
        anyhow::ensure!(matches!(ended, Ended::Done { fallback: None, .. }), "the turn ended as {ended:?}");
        let rows = self.delegator.records.executions().of_thread(thread).await?;
        let failed =
            rows.iter().find(|row| row.kind == ExecutionKind::Task && row.status.as_str() != "completed");
        failed.map_or(Ok(()), |row| Err(anyhow::anyhow!("{:?}", row.error)).context("a subagent failed"))
    }
}

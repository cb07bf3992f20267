//! The embedded client: the lead agent in this process, without a server.
//!
//! ```no_run
//! # async fn example() -> Result<(), threadkeep_chat::client::ClientError> {
//! use threadkeep_chat::client::{Client, ClientOptions, TurnOptions};
//!
//! let client = Client::open(ClientOptions::default()).await?;
//! let answer = client.chat("What is in this directory?", Some("my-thread"), TurnOptions::default()).await?;
//! println!("{answer}");
//! client.close().await;
//! # Ok(())
//! # }
//! ```
//!
//! It runs the same agent as the gateway, on the same store, subagents included, but without runs: no run rows, no event feed, no
//! duration-only checkpoints, no rollback, no degraded reader. A thread that both use is one thread, and neither waits
//! for the other: a commit on a head that the other has moved fails the turn with [`threadkeep::Error::Conflict`]. What
//! the turn committed before stays on the thread, and the next turn continues from what the other wrote. A turn that delegates, or
//! that finds delegations which have not ended, is refused at once while a run of a gateway is at work on the thread
//! ([`ClientError::RunAtWork`]): it would take the run's subagents away.
//!
//! A thread that needs delta mode is refused in full mode before the agent is built, with
//! [`threadkeep::Error::ModeMismatch`] as the only item of the turn's stream.
//!
//! With [`TurnOptions::subagent_enabled`] the agent delegates. The executions are rows of the gateway's records beside the
//! checkpoints, so that a turn which was killed goes on with its subagents ([`Client::resume`]), here or in a gateway. A
//! client with a checkpointer of its own, or without one, keeps the rows in memory.
//!
//! Features of the service's client that this gateway does not have: plan mode, memory, uploads, artifacts and further
//! middlewares.

mod agent;
mod checkpointer;
mod delegation;
mod deletion;
mod error;
mod event;
mod model;
mod options;
mod queue;
mod threads;
mod turn;

use std::fmt;
use std::sync::Arc;

use serde_json::{Map, Value as Json};
use threadkeep::channel::Schema;
use threadkeep::id::IdSource;
use threadkeep::mode::ModeRegister;
use threadkeep::state::StateAccessor;
use threadkeep_agent::goal::CONTINUATIONS_MAX;
use threadkeep_agent::goal_state::{self, EMPTY_OBJECTIVE, OBJECTIVE_MAX};
use threadkeep_records::Records;
use threadkeep_storage::channel_mode;
use threadkeep_subagents::TASK_TOOL;
use threadkeep_subagents::ledger::TASK;

pub use agent::Agent;
pub use error::ClientError;
pub use event::{End, Event, Message, ToolCall, Usage, Values};
pub use model::ModelInfo;
pub use options::{Checkpointer, ClientOptions, Configuration, TurnOptions};
pub(crate) use threads::Listed;
pub use threads::{PendingWrite, ThreadCheckpoint, ThreadHistory, ThreadList, ThreadSummary};
pub(crate) use turn::Answer;
pub use turn::Turn;

use agent::{Core, Guard, thread_id};
use checkpointer::SharedStore;
use delegation::RecordsSource;
use options::open_config;
use threadkeep_config::Config;

/// A client of the agents in this process. See the [module](self).
pub struct Client {
    core: Arc<Core>,
    /// The process-wide store, if this client uses it.
    store: Option<Arc<SharedStore>>,
    /// What it stores otherwise than its database remembers.
    difference: Option<String>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("config", &self.core.config).finish_non_exhaustive()
    }
}

impl Client {
    /// Loads the configuration, freezes mode and cadence from it, and opens the store. If the gateway's records of the
    /// store remember another mode or cadence, the log says so, and what to do.
    ///
    /// # Errors
    /// [`ClientError::Config`], also for a history cache in Redis, which only the gateway supports;
    /// [`threadkeep::Error::Reconfiguration`] if the process has frozen another mode or cadence; [`ClientError::Start`]
    /// if the store cannot be opened.
    pub async fn open(options: ClientOptions) -> Result<Self, ClientError> {
        let config = open_config(options.config).await?;
        let current = config.current_async().await;
        let guard = Guard(options.frozen_in.unwrap_or_else(|| ModeRegister::process().as_ref()));
        guard.freeze(&current)?;
        let table = Schema::thread_state().compile(channel_mode(&current), current.snapshot_frequency())?;
        let (saver, store) = match options.checkpointer {
            Checkpointer::ProcessWide(stores) => {
                let store = checkpointer::process_wide(&stores, &current).await?;
                (Some(Arc::clone(store.saver())), Some(store))
            }
            Checkpointer::Own(saver) => (Some(saver), None),
            Checkpointer::Stateless => (None, None),
        };
        let difference = match &store {
            Some(store) => store.difference(&current).await,
            None => None,
        };
        let (table, ids) = (Arc::new(table), Arc::new(IdSource::default()));
        let accessor = saver.map(|saver| {
            let followed = config.clone();
            StateAccessor::new(saver, Arc::clone(&table), Arc::clone(&ids))
                .remembering(move || followed.last_known().accessor_graph_max())
        });
        let source = store.clone().map_or(RecordsSource::Client, RecordsSource::Shared);
        let core = Core::new(config, current, source, (table, ids), accessor, options.turn, Some(guard));
        Ok(Self { core: Arc::new(core), store, difference })
    }

    /// Starts a turn: adds `message` to the thread and streams what follows.
    ///
    /// Without `thread_id` the turn creates a thread, whose id is [`Turn::thread_id`]. The turn runs in its own task,
    /// so the caller may read slowly (the turn waits when 16 MiB of events are unread); dropping the [`Turn`] stops it at the next point where nothing is half-written.
    pub fn stream(&self, message: &str, thread_id: Option<&str>, options: TurnOptions) -> Turn {
        turn::start(Arc::clone(&self.core), Some(message), thread_id, options)
    }

    /// Starts a turn without a message: the thread goes on where its last turn stopped, in whichever process that was.
    /// Subagents go on too: a result that was stored is not asked for again.
    ///
    /// The turn fails with [`ClientError::Invalid`] if the thread has nothing to go on with, and with
    /// [`ClientError::RunAtWork`] if that belongs to a run of a gateway which is at work.
    pub fn resume(&self, thread_id: &str, options: TurnOptions) -> Turn {
        turn::start(Arc::clone(&self.core), None, Some(thread_id), options)
    }

    /// Whether [`Self::resume`] has something to go on with.
    ///
    /// # Errors
    /// As [`Self::get_thread`].
    pub async fn is_unfinished(&self, thread_id: &str) -> Result<bool, ClientError> {
        let state = self.accessor()?.get(&self::thread_id(thread_id)?, None).await?;
        Ok(state.is_some_and(|state| !state.next.is_empty()))
    }

    /// Deletes a thread, if it exists: its subagents, its checkpoints, its working directory, and the gateway's records of
    /// it. No turn may be running on it.
    ///
    /// # Errors
    /// [`ClientError::Stateless`]; [`RecordsError::Conflict`](threadkeep_records::RecordsError::Conflict) if a run of a
    /// gateway holds the thread, and [`threadkeep::Error::Stale`] if somebody wrote to it meanwhile: nothing of the
    /// conversation is deleted then. The errors of the stores; a deletion that failed can be repeated.
    pub async fn delete_thread(&self, thread_id: &str) -> Result<(), ClientError> {
        deletion::delete(&self.core, self.accessor()?, &self::thread_id(thread_id)?).await
    }

    /// Runs a turn, and returns the text of its last answer, and the question to the user with which it may end.
    ///
    /// # Errors
    /// The error that ends the turn's stream. A failing model is not an error: the fallback answer reports it.
    pub async fn chat(
        &self,
        message: &str,
        thread_id: Option<&str>,
        options: TurnOptions,
    ) -> Result<String, ClientError> {
        self.stream(message, thread_id, options).answer().await
    }

    /// The `limit` threads of the store that were written last, newest first. Reads the head of every thread, in either
    /// mode. A thread whose head is damaged is left out, and named in the log.
    ///
    /// # Errors
    /// [`ClientError::Stateless`], and the saver's.
    pub async fn list_threads(&self, limit: usize) -> Result<ThreadList, ClientError> {
        let Listed { list, damaged } = self.listed_threads(limit).await?;
        for (thread, error) in damaged {
            tracing::warn!(%thread, %error, "a list of threads leaves out a damaged one");
        }
        Ok(list)
    }

    /// As [`Self::list_threads`], with the threads that are left out.
    pub(crate) async fn listed_threads(&self, limit: usize) -> Result<Listed, ClientError> {
        threads::list(self.accessor()?, limit).await
    }

    /// Whether there is a thread with this id, in either mode. Reads no other one.
    pub(crate) async fn has_thread(&self, id: &str) -> Result<bool, ClientError> {
        let Ok(thread) = self::thread_id(id) else { return Ok(false) };
        Ok(threads::exists(self.accessor()?, &thread).await?)
    }

    /// Every checkpoint of a thread with its values, oldest first; `None` if the thread does not exist.
    ///
    /// # Errors
    /// [`ClientError::Stateless`], [`threadkeep::Error::ModeMismatch`], and the saver's.
    pub async fn get_thread(&self, thread_id: &str) -> Result<Option<ThreadHistory>, ClientError> {
        threads::get(self.accessor()?, &self::thread_id(thread_id)?).await
    }

    /// The thread's current values, as in [`Event::Values`]; `None` if the thread does not exist.
    ///
    /// # Errors
    /// As [`Self::get_thread`].
    pub async fn get_values(&self, thread_id: &str) -> Result<Option<Values>, ClientError> {
        let state = self.accessor()?.get(&self::thread_id(thread_id)?, None).await?;
        Ok(state.map(|state| threadkeep_agent::serialize::values(&state)).transpose()?.map(Values::of))
    }

    /// The goal of a thread, in either mode: an object with `objective`, `status` and progress.
    ///
    /// # Errors
    /// [`ClientError::Stateless`], and the saver's.
    pub async fn get_goal(&self, thread_id: &str) -> Result<Option<Json>, ClientError> {
        let goal = goal_state::read(self.accessor()?, &self::thread_id(thread_id)?).await?;
        Ok(Some(goal).filter(|goal| !goal.is_null()))
    }

    /// Sets the goal of a thread, which is created if it does not exist: at the end of each turn a model judges whether
    /// the goal is reached, and if not, the agent continues by itself, at most `max_continuations` times (0 to 8;
    /// default 8).
    ///
    /// # Errors
    /// [`ClientError::Invalid`] for an empty objective or one of more than 4,000 characters, or a number out of range;
    /// [`ClientError::Stateless`]; [`threadkeep::Error::Conflict`], and the saver's.
    pub async fn set_goal(
        &self,
        thread_id: &str,
        objective: &str,
        max_continuations: Option<i64>,
    ) -> Result<Json, ClientError> {
        let thread = self::thread_id(thread_id)?;
        let objective = goal_state::normalized(objective);
        let limit = max_continuations.unwrap_or(CONTINUATIONS_MAX);
        let problem = if objective.is_empty() {
            Some(EMPTY_OBJECTIVE.to_owned())
        } else if objective.chars().count() > OBJECTIVE_MAX {
            Some(format!("Goal objective must have at most {OBJECTIVE_MAX} characters."))
        } else if !(0..=CONTINUATIONS_MAX).contains(&limit) {
            Some(format!("max_continuations must be between 0 and {CONTINUATIONS_MAX}."))
        } else {
            None
        };
        if let Some(problem) = problem {
            return Err(ClientError::Invalid(problem));
        }
        let goal = goal_state::new(&objective, limit, self.core.ids.now());
        let extra = Map::from_iter([("writes".to_owned(), Json::Null)]);
        goal_state::set(self.accessor()?, &thread, extra, &goal).await?;
        Ok(goal)
    }

    /// Clears the goal of a thread, if it has one.
    ///
    /// # Errors
    /// [`ClientError::Stateless`], [`threadkeep::Error::Conflict`], and the saver's.
    pub async fn clear_goal(&self, thread_id: &str) -> Result<(), ClientError> {
        Ok(goal_state::clear(self.accessor()?, &self::thread_id(thread_id)?).await?)
    }

    /// The configured models, without credentials and URLs; the first is the default.
    pub async fn models(&self) -> Vec<ModelInfo> {
        self.core.config.current_async().await.models.iter().map(ModelInfo::from).collect()
    }

    /// The model of this name.
    pub async fn model(&self, name: &str) -> Option<ModelInfo> {
        self.core.config.current_async().await.model(name).map(ModelInfo::from)
    }

    /// The agent's built-in tools: their names and the descriptions shown to the model. `task` is among them if turns delegate by
    /// default.
    pub fn tools(&self) -> Vec<(String, String)> {
        let builtin = self.core.agents.builtin(&self.core.config.current());
        let specs = builtin.specs().into_iter().map(|spec| (spec.name, spec.description));
        let delegates = self.core.defaults.subagent_enabled == Some(true);
        specs.chain(delegates.then(|| (TASK.to_owned(), TASK_TOOL.to_owned()))).collect()
    }

    /// Says that the process is about to end: from now on, a turn that is cancelled leaves its subagents to
    /// [`Self::resume`], instead of cancelling them for good.
    pub fn stop(&self) {
        self.core.delegation.stopping.cancel();
    }

    /// Waits for the last writes of running turns, and closes the store if no other client of the process uses it.
    /// Without this call, nothing acknowledged is lost either.
    pub async fn close(self) {
        self.core.turns.close();
        self.core.closing.cancel();
        self.core.turns.wait().await;
        let Self { core, store, .. } = self;
        drop(core);
        if let Some(store) = store {
            checkpointer::close(store).await;
        }
    }

    /// The client's current configuration.
    pub(crate) async fn config(&self) -> Arc<Config> {
        self.core.config.current_async().await
    }

    /// What its user should know of the mode and the cadence, as the log of a program says it.
    pub(crate) fn difference(&self) -> Option<&str> {
        self.difference.as_deref()
    }

    /// The gateway's records, which this client has open.
    pub(crate) async fn records(&self) -> Result<&Records, ClientError> {
        self.core.delegation.records().await
    }

    fn accessor(&self) -> Result<&StateAccessor, ClientError> {
        self.core.accessor.as_ref().ok_or(ClientError::Stateless)
    }
}

//! One run of an agent: its writer, its terms, and its observer.

use serde_json::{Map, Value as Json};
use threadkeep::id::NodeName;
use threadkeep::metadata::Source;
use threadkeep::saver::Flush;
use threadkeep::step::StepWriter;
use tokio_util::sync::CancellationToken;

use crate::{Added, AgentError, Observer};

/// The terms of a run.
#[derive(Debug, Clone)]
pub struct RunTerms {
    /// The run's id.
    pub run_id: String,
    /// Metadata of every checkpoint of the run.
    pub metadata: Map<String, Json>,
    /// The maximum number of supersteps, including continuations for the goal.
    pub recursion_limit: u64,
    /// Where the run stops for the user.
    pub breakpoints: Breakpoints,
    /// Stops the run at the next point where nothing is half-written.
    pub cancel: CancellationToken,
    /// When each superstep is on disk.
    pub durability: Durability,
}

/// When the supersteps of a run are on disk, so that they survive a power loss: what a client requests as `durability`.
/// A crash of the process loses none of them in any case, and each is a checkpoint of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Durability {
    /// Each before the next one starts.
    Sync,
    /// All when the run ends: one flush for the whole turn.
    #[default]
    Async,
}

impl RunTerms {
    /// A run of at most `recursion_limit` supersteps, with no other terms.
    pub fn new(run_id: impl Into<String>, recursion_limit: u64) -> Self {
        Self {
            run_id: run_id.into(),
            metadata: Map::new(),
            recursion_limit,
            breakpoints: Breakpoints::default(),
            cancel: CancellationToken::new(),
            durability: Durability::default(),
        }
    }
}

/// A run in progress.
pub struct Session<'a> {
    pub(crate) terms: RunTerms,
    pub(crate) writer: &'a mut StepWriter,
    pub(crate) observer: &'a mut dyn Observer,
    /// Supersteps taken so far.
    pub(crate) steps: u64,
}

impl<'a> Session<'a> {
    /// A run that has not started. It continues from the state of `writer`.
    pub fn new(terms: RunTerms, writer: &'a mut StepWriter, observer: &'a mut dyn Observer) -> Self {
        Self { terms, writer, observer, steps: 0 }
    }

    /// Commits the superstep. The last one is flushed, and with it those before it.
    pub(crate) async fn commit(&mut self, source: Source, next: Vec<NodeName>) -> Result<(), AgentError> {
        let waits = next.is_empty() || self.terms.durability == Durability::Sync;
        self.writer.set_flush(if waits { Flush::Now } else { Flush::WithNext });
        self.writer.commit(source, next, self.terms.metadata.clone()).await?;
        Ok(())
    }

    /// Reports a message that is added to the conversation.
    pub(crate) async fn added(&mut self, message: Added<'_>) -> Result<(), AgentError> {
        self.observer.message_added(message).await.map_err(AgentError::Observer)
    }
}

/// Where a run stops although the graph could continue.
#[derive(Debug, Clone, Default)]
pub struct Breakpoints {
    /// Nodes to stop before.
    pub before: Interrupts,
    /// Nodes to stop after.
    pub after: Interrupts,
}

/// Nodes before or after which a run stops for the user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Interrupts {
    /// Nowhere.
    #[default]
    None,
    /// At every node (`"*"`).
    All,
    /// At these nodes.
    Nodes(Vec<String>),
}

impl Interrupts {
    /// Whether it contains one of these nodes.
    pub fn any_of(&self, nodes: &[NodeName]) -> bool {
        match self {
            Self::None => false,
            Self::All => !nodes.is_empty(),
            Self::Nodes(names) => nodes.iter().any(|node| names.iter().any(|name| name == node.as_str())),
        }
    }
}

/// How a run ended, if it did not fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// The graph has nothing more to run, or stops at a breakpoint.
    Done {
        /// Why it stopped early, for example `loop_capped`.
        stop_reason: Option<String>,
        /// The reason of the fallback answer, if the model failed.
        fallback: Option<String>,
    },
    /// The run was cancelled; what was committed stays.
    Cancelled,
}

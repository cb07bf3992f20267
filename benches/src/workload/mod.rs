//! What a store is asked to do, as data: turns of supersteps. Nothing here knows a store: [`crate::conversation`] sends
//! the turns to our savers, [`crate::raw`] sends their bytes to raw stores, and [`Model`] computes the expected state.

mod agent;
mod model;
mod plain;
mod scripted;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use threadkeep::id::NodeName;
use threadkeep::metadata::Source;

pub use model::{Model, digest};

/// What a conversation consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Workload {
    /// A model alone: three checkpoints and two messages per turn, of a given size.
    Lean,
    /// An agent with 18 hooks around the model: 21 checkpoints per turn, and its first hook sends all messages again.
    Lead,
    /// Realistic messages, two per turn, without forks: open the head, two supersteps, a note of the run's duration.
    Plain,
    /// Realistic messages with tool calls, regenerated and edited turns, forks, and an occasional compaction.
    Agent,
}

impl Workload {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Lean, Self::Lead, Self::Plain, Self::Agent];

    /// Its name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Lean => "lean",
            Self::Lead => "lead",
            Self::Plain => "plain",
            Self::Agent => "agent",
        }
    }

    /// Whether messages have a given size, and the Python savers receive the same ones.
    pub const fn is_sized(self) -> bool {
        matches!(self, Self::Lean | Self::Lead)
    }

    /// The conversation with this seed; messages have `size` bytes if the workload has a size.
    pub fn script(self, size: usize, seed: u64) -> Box<dyn Script> {
        match self {
            Self::Lean | Self::Lead => Box::new(scripted::Scripted::new(self == Self::Lead, size)),
            Self::Plain => Box::new(plain::Plain::new(seed)),
            Self::Agent => Box::new(agent::Agent::new(seed)),
        }
    }

    /// The messages of a conversation after `turns` turns.
    pub fn expected(self, size: usize, seed: u64, turns: usize) -> Model {
        let (mut script, mut model) = (self.script(size, seed), Model::default());
        for _ in 0..turns {
            model.turn(&script.turn());
        }
        model
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Workload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|workload| workload.as_str() == text);
        found.ok_or_else(|| format!("{text} is none of lean, lead, plain and agent"))
    }
}

/// An endless sequence of turns.
pub trait Script: Send {
    /// The next turn.
    fn turn(&mut self) -> Turn;
}

/// A turn: a run on a thread.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    /// Where it starts.
    pub start: Start,
    /// Its supersteps. Each leads to the next one, the last one to the end.
    pub steps: Vec<Step>,
    /// Whether a final checkpoint notes how long the run took, as the gateway's runs do.
    pub note: bool,
}

/// Where a turn starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// On the live state: the writer of the previous turn continues.
    Live,
    /// On the head, read from the store.
    Head,
    /// On the state at which this turn (counted from 0) began: a fork that replaces it. At most [`REACH`] turns back.
    Turn(usize),
}

/// The most turns back at which a fork starts.
pub const REACH: usize = 16;

/// A superstep with one task.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// The node that runs.
    pub node: NodeName,
    /// What the checkpoint's source is.
    pub source: Source,
    /// What the node writes to the channel `messages`.
    pub emit: Emit,
}

/// What a node writes.
#[derive(Debug, Clone, PartialEq)]
pub enum Emit {
    /// Nothing.
    Nothing,
    /// These messages: new ones, replacements and removals.
    Messages(Vec<Json>),
    /// All messages of the thread again, with the last one replaced by this one.
    All(Json),
}

impl Emit {
    /// The new messages.
    pub fn messages(&self) -> &[Json] {
        match self {
            Self::Nothing => &[],
            Self::Messages(messages) => messages,
            Self::All(last) => std::slice::from_ref(last),
        }
    }
}

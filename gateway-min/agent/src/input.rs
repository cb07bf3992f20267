//! What a run of the lead agent starts with.

use serde_json::{Map, Value as Json};
use threadkeep::id::NodeName;

use crate::MODEL_NODE;

/// The first superstep of a run: writes to the state, and the nodes after it.
#[derive(Debug, Clone, PartialEq)]
pub struct Input {
    /// Values, by channel.
    pub writes: Map<String, Json>,
    /// What runs then.
    pub next: Next,
}

/// The nodes after the input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// This node; `None` to end.
    Go(Option<NodeName>),
    /// Those that the thread has next already.
    Stay,
}

impl From<Map<String, Json>> for Input {
    /// Input for the model.
    fn from(writes: Map<String, Json>) -> Self {
        Self { writes, next: Next::Go(Some(MODEL_NODE.into())) }
    }
}

//! Runs: admission, the worker that lives one run, its stream, its events, its duration.

pub(crate) mod admission;
pub mod bridge;
mod cancel;
pub(crate) mod control;
pub(crate) mod duration;
pub(crate) mod frames;
pub(crate) mod journal;
#[cfg(test)]
mod tests;
pub(crate) mod worker;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum StreamMode {
    Values,
    Messages,
    Updates,
    Debug,
    Tasks,
    Checkpoints,
    Custom,
}

pub(crate) struct RunRequest {
    pub checkpoint_id: Option<String>,
    pub assistant_id: Option<String>,
    pub model_name: Option<String>,
    pub metadata: serde_json::Map<String, serde_json::Value>,
    pub kwargs: serde_json::Value,
    pub input: Option<serde_json::Map<String, serde_json::Value>>,
    pub strategy: crate::store::MultitaskStrategy,
    pub thinking: Option<bool>,
    pub reasoning_effort: Option<String>,
    pub recursion_limit: u64,
    pub breakpoints: crate::agent::Breakpoints,
    pub stream_modes: std::collections::BTreeSet<StreamMode>,
    pub cancel_on_disconnect: bool,
    pub checkpoint_metadata: serde_json::Map<String, serde_json::Value>,
}

//! How a run comes to be: checks, admission by the database, and the task that works on it.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value as Json, json};
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::saver::{CheckpointSelector, Load};
use uuid::Uuid;

use super::StreamMode;
use super::bridge::Subscription;
use super::frames::Frames;
use super::worker::{AGENT_BINDING, RunSpec, work};
use crate::agent::{Breakpoints, RunInput};
use crate::app::App;
use crate::model::message;
use crate::store::{
    Admission, CancelAction, MultitaskStrategy, NewEvent, NewRun, NewThread, RunRow, SeedRun, StoreError,
};

/// The binding of a run without an assistant of its own.
const DEFAULT_AGENT: &str = "__default__";

/// Why a run was not created. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CreateError {
    /// The thread has no row.
    #[error("Thread {0} not found")]
    ThreadNotFound(String),
    /// The selected checkpoint is not there.
    #[error("Checkpoint {0} not found")]
    CheckpointNotFound(String),
    /// The selected checkpoint could not be looked up.
    #[error("Failed to validate checkpoint")]
    CheckpointUnreadable(#[source] threadkeep::Error),
    /// The head, which would fill the empty event feed, cannot be read.
    #[error("{0}")]
    HeadUnreadable(threadkeep::Error),
    /// The model is not configured.
    #[error("Model '{0}' is not in the configured model allowlist")]
    UnknownModel(String),
    /// The gateway is stopping.
    #[error("the gateway is stopping; try again in a moment")]
    Stopping,
    /// The records refuse the run: another operation holds the thread, or the store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A run that was admitted, and the stream of what it does.
pub(crate) struct Created {
    pub(crate) run: RunRow,
    pub(crate) stream: Subscription,
}

//! What callers pass and get: LangGraph's calls with their values serialized.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json};
use threadkeep::checkpoint::CheckpointKey;
use threadkeep::id::{CheckpointId, Namespace, ThreadId};
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};

use crate::frame::Frame;
use crate::version::Label;

/// A namespace of a thread.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Place {
    /// The thread.
    pub thread: ThreadId,
    /// The namespace in it.
    pub namespace: Namespace,
}

impl Place {
    /// A place.
    pub fn new(thread: &str, namespace: &str) -> Self {
        Self { thread: thread.into(), namespace: namespace.into() }
    }

    /// A checkpoint there.
    pub(crate) fn key(&self, id: CheckpointId) -> CheckpointKey {
        CheckpointKey { thread: self.thread.clone(), namespace: self.namespace.clone(), id }
    }

    /// Parses the id of a checkpoint of this place.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if it is not a UUID in its usual text form.
    pub fn id(&self, text: &str) -> Result<CheckpointId> {
        let id = text.parse::<CheckpointId>().ok().filter(|id| id.to_string() == text);
        id.ok_or_else(|| {
            Error::InvalidInput(format!(
                "thread {}: the checkpoint id {text:?} is not a UUID in lower case; use the ids that LangGraph draws",
                self.thread
            ))
        })
    }
}

/// Whose calls these are. A number may be another's once its owner has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Caller {
    /// A run of a graph.
    Run(u64),
    /// What belongs to no run, as an update of the state: by the thread or the task that makes its calls.
    Other(u64),
}

impl Default for Caller {
    fn default() -> Self {
        Self::Other(0)
    }
}

impl Caller {
    /// The number of the run, if they are one's.
    pub(crate) fn run(self) -> Option<u64> {
        match self {
            Self::Run(run) => Some(run),
            Self::Other(_) => None,
        }
    }
}

/// A checkpoint to store.
#[derive(Debug, Clone)]
pub struct Put {
    /// Where.
    pub place: Place,
    /// Its id.
    pub id: CheckpointId,
    /// Its parent.
    pub parent: Option<CheckpointId>,
    /// The head that its author saw with the parent; `None` if that is the parent itself. Only asked for with
    /// [`Fence::Error`](crate::Fence::Error).
    pub seen: Option<CheckpointId>,
    /// What LangGraph keeps in it besides channels.
    pub frame: Frame,
    /// The version of each channel.
    pub versions: BTreeMap<String, Label>,
    /// The channels whose version is new.
    pub new: BTreeSet<String>,
    /// The values that [`crate::LangGraph::needs`] asks for.
    pub values: BTreeMap<String, ChannelValue>,
    /// The channels that have a value which is not among `values`: their parent's.
    pub held: BTreeSet<String>,
    /// The values that are snapshots of delta channels.
    pub snapshots: BTreeSet<String>,
    /// Its metadata.
    pub metadata: Map<String, Json>,
}

impl Put {
    /// A checkpoint without channels.
    pub fn new(
        place: Place,
        id: CheckpointId,
        parent: Option<CheckpointId>,
        metadata: Map<String, Json>,
    ) -> Self {
        Self {
            place,
            id,
            parent,
            seen: None,
            frame: Frame::default(),
            versions: BTreeMap::new(),
            new: BTreeSet::new(),
            values: BTreeMap::new(),
            held: BTreeSet::new(),
            snapshots: BTreeSet::new(),
            metadata,
        }
    }
}

/// Writes of a task to store.
#[derive(Debug, Clone)]
pub struct PutWrites {
    /// Where.
    pub place: Place,
    /// The checkpoint that the task ran from.
    pub id: CheckpointId,
    /// The task.
    pub task: String,
    /// Its path.
    pub path: String,
    /// Channels and values.
    pub writes: Vec<(String, ChannelValue)>,
}

/// A stored write: task, channel and value.
pub type Pending = (String, String, ChannelValue);

/// A stored checkpoint.
#[derive(Debug, Clone)]
pub struct Tuple {
    /// Whether its messages are another program's, JSON objects: the gateway's or those of a command of it. That wrote
    /// the checkpoint, or a graph that only carries them on.
    pub foreign: bool,
    /// Where.
    pub place: Place,
    /// Its id.
    pub id: CheckpointId,
    /// Its parent.
    pub parent: Option<CheckpointId>,
    /// What LangGraph keeps in it besides channels.
    pub frame: Frame,
    /// The version of each channel.
    pub versions: BTreeMap<String, Label>,
    /// The channels that have a value.
    pub values: BTreeMap<String, ChannelValue>,
    /// The values that are snapshots of delta channels.
    pub snapshots: BTreeSet<String>,
    /// Its metadata.
    pub metadata: Map<String, Json>,
    /// The writes of the tasks that ran from it, by task path, task and position.
    pub writes: Vec<Pending>,
    /// The head at the time of the read, if [`Fence::Error`](crate::Fence::Error) may ask for it: [`Put::seen`].
    pub head: Option<CheckpointId>,
}

/// Which checkpoints to list, newest first.
#[derive(Debug, Clone, Default)]
pub struct ListRequest {
    /// The thread; all if `None`.
    pub thread: Option<ThreadId>,
    /// The namespace; all if `None`.
    pub namespace: Option<Namespace>,
    /// Only this checkpoint.
    pub id: Option<CheckpointId>,
    /// Only older ones.
    pub before: Option<CheckpointId>,
    /// At most this many.
    pub limit: Option<usize>,
    /// Only those whose metadata has these values.
    pub filter: Map<String, Json>,
}

/// The value that a replay starts from.
#[derive(Debug, Clone, PartialEq)]
pub struct Seed {
    /// The value.
    pub value: ChannelValue,
    /// Whether it is a snapshot of a delta channel.
    pub snapshot: bool,
    /// Whether it has the messages of another program: [`Tuple::foreign`].
    pub foreign: bool,
}

/// What changed a delta channel on the way to a checkpoint.
#[derive(Debug, Clone, Default)]
pub struct ChannelReplay {
    /// The nearest older value.
    pub seed: Option<Seed>,
    /// The writes since, oldest first.
    pub writes: Vec<Pending>,
}

/// Which checkpoints a prune keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// The newest of each namespace, and what its delta channels are replayed from.
    KeepLatest,
    /// None.
    Delete,
}

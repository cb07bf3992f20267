//! `threadkeep state`: the state of a thread at a checkpoint.

use std::collections::BTreeSet;

use clap::Subcommand;
use serde_json::{Map, Value as Json, json};
use threadkeep::checkpoint::{CheckpointTuple, Stored};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, ThreadId};

use super::checkpoints::{At, raw, source};
use super::error::{OpsError, Result};
use super::output::{Out, one_line, or_dash};
use super::target::{StoreArgs, Target};
use super::threads::mode;

/// Inspect the state of a thread.
#[derive(Debug, Subcommand)]
pub(crate) enum StateCommand {
    /// Print the values of every channel, as a run that starts from the checkpoint would see them.
    ///
    /// Reads threads of either mode, whatever the mode of the gateway.
    #[command(after_help = "\
Examples:
  threadkeep state get --thread my-thread
  threadkeep state get --thread my-thread --checkpoint 01a1fcab-c4a2-7779-938b-69cfe3835bcf
  threadkeep state get --thread my-thread --json | jq '.values.messages[-1].content'

--json prints the values and the checkpoint's metadata as one document.")]
    Get {
        #[command(flatten)]
        at: At,
        /// The checkpoint [default: the head].
        #[arg(long, value_name = "CHECKPOINT")]
        checkpoint: Option<CheckpointId>,
    },
}

/// The state at a checkpoint.
pub(crate) struct CheckpointState {
    pub(crate) tuple: CheckpointTuple,
    pub(crate) values: Map<String, Json>,
    /// The channels whose values JSON cannot express.
    pub(crate) not_json: BTreeSet<String>,
}

impl CheckpointState {
    /// Materializes an existing checkpoint. Unknown channels are shown as stored; of values that JSON cannot express, such as
    /// bytes of Python's, the length (`{"not_json": {"bytes": N}}`).
    pub(crate) async fn read(
        target: &Target,
        thread: &ThreadId,
        namespace: &Namespace,
        id: CheckpointId,
    ) -> Result<Self> {
        let unknown = |channel: &ChannelName| {
            OpsError::Unsupported(format!(
                "thread {thread}, checkpoint {id}: channel {channel} is stored as changes, and this program cannot replay it"
            ))
        };
        let tuple = raw(target, thread, namespace, id).await?;
        let Some(state) = target.accessor(namespace).get(thread, Some(id)).await? else {
            return Err(OpsError::NoCheckpoint {
                thread: thread.clone(),
                checkpoint: id,
                near: String::new(),
            });
        };
        let (mut values, mut not_json) = (state.values()?, BTreeSet::new());
        for (name, entry) in &tuple.checkpoint.channels {
            if target.table.behaviour(name).is_none() {
                let value = match (&entry.stored, entry.stored.value()) {
                    (_, Some(value)) if value.is_absent() => continue,
                    // One value that JSON cannot express hides no other.
                    (_, Some(value)) => value.to_json().unwrap_or_else(|_| {
                        not_json.insert(name.to_string());
                        json!({"not_json": {"bytes": value.encoded_len()}})
                    }),
                    (Stored::Sentinel, _) => return Err(unknown(name)),
                    _ => continue,
                };
                values.insert(name.to_string(), value);
            }
        }
        Ok(Self { tuple, values, not_json })
    }
}

impl StateCommand {
    pub(crate) fn store(&self) -> &StoreArgs {
        match self {
            Self::Get { at, .. } => &at.store,
        }
    }

    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<()> {
        let Self::Get { at, checkpoint } = self;
        let (thread, namespace) = at.place();
        let id = target.checkpoint(&thread, &namespace, *checkpoint).await?;
        let state = CheckpointState::read(target, &thread, &namespace, id).await?;
        let CheckpointState { tuple, values, .. } = state;
        if at.json {
            let next: Vec<String> = tuple.checkpoint.next.iter().map(ToString::to_string).collect();
            out.json(&json!({
                "thread": thread.as_str(), "namespace": namespace.as_str(), "checkpoint": id.to_string(),
                "parent": tuple.parent.map(|id| id.to_string()), "created_at": id.created_at(), "mode": mode(&tuple),
                "next": next, "metadata": tuple.metadata.to_json(), "values": values,
            }))?;
            return Ok(());
        }
        out.line(format!(
            "# thread {}, checkpoint {id}, {} mode, {} step {}, parent {}",
            one_line(thread.as_str()),
            mode(&tuple),
            source(&tuple),
            tuple.metadata.step,
            or_dash(tuple.parent),
        ))?;
        // Pretty JSON escapes control characters.
        out.line(serde_json::to_string_pretty(&values).map_err(std::io::Error::from)?)?;
        Ok(())
    }
}

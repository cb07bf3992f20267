//! What a program that knows no reducer of a graph must know before it changes threads that LangGraph wrote to.

use threadkeep::Result;
use threadkeep::channel::ChannelTable;
use threadkeep::checkpoint::{CheckpointTuple, Stored};
use threadkeep::deletion::{self, DeletionPlan, Lineage, Prune};
use threadkeep::foreign::ForeignChanges;
use threadkeep::id::{ChannelName, ThreadId};
use threadkeep::saver::{ListQuery, Load, LocalKey, Saver, ThreadImage};

use crate::frame::{self, FRAME};

/// Whether LangGraph wrote a checkpoint, which was read with its values. One whose frame cannot be read counts as
/// LangGraph's, so that it stays as it is.
pub fn wrote(tuple: &CheckpointTuple) -> bool {
    frame::is_of_langgraph(tuple).unwrap_or(true)
}

/// Plans the pruning of a thread that LangGraph may have written to: nothing of LangGraph's is replayed. Its delta channels
/// keep what they are replayed from, with [`deletion::Reason::Replay`], whatever the boundary.
///
/// # Errors
/// As [`deletion::plan_prune`].
pub fn plan_prune(image: &ThreadImage, prune: &Prune, table: &ChannelTable) -> Result<DeletionPlan> {
    deletion::plan_prune_beside(image, prune, table, wrote)
}

/// A channel of a checkpoint that is stored as changes which only LangGraph can replay, if there is one.
///
/// # Errors
/// The saver's.
pub async fn changed_channel(saver: &dyn Saver, tuple: &CheckpointTuple) -> Result<Option<ChannelName>> {
    let channels = &tuple.checkpoint.channels;
    let has_changes = channels.values().any(|entry| entry.stored == Stored::Sentinel);
    // A checkpoint after one of LangGraph's has a frame, too.
    if !has_changes || !channels.contains_key(FRAME) {
        return Ok(None);
    }
    let image = saver.read_thread(&tuple.thread).await?;
    let place: LocalKey = (tuple.namespace.clone(), tuple.checkpoint.id);
    Ok(ForeignChanges::new(&Lineage::new(&image), wrote).at(&place).next().cloned())
}

/// The table to verify a thread with if LangGraph wrote it, whose reducers are not known here.
pub async fn foreign_table(saver: &dyn Saver, thread: &ThreadId) -> Option<ChannelTable> {
    // What cannot be read is reported by the verification.
    is_of_langgraph(saver, thread).await.unwrap_or_default().then(ChannelTable::foreign)
}

/// Whether LangGraph wrote a thread last, or another program went on from there.
async fn is_of_langgraph(saver: &dyn Saver, thread: &ThreadId) -> Result<bool> {
    let query = ListQuery { namespace: None, limit: Some(1), load: Load::None, ..ListQuery::new(thread) };
    let newest = saver.list(&query).await?;
    Ok(newest.iter().any(|tuple| tuple.checkpoint.channels.contains_key(FRAME)))
}

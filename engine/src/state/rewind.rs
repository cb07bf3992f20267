//! Going back: resuming from an older checkpoint, and rolling a cancelled run back.

use serde_json::{Map, Value as Json};

use super::{StateAccessor, StateSnapshot, Update};
use crate::channel::MESSAGES_CHANNEL;
use crate::checkpoint::Write;
use crate::error::{Error, Result};
use crate::id::{CheckpointId, NodeName, ThreadId};
use crate::mode::ChannelMode;
use crate::value::ChannelValue;

/// The node as which a resume from an older checkpoint is written.
const RESUME_NODE: &str = "checkpoint_resume";
/// The node as which a rollback is written.
const RESTORE_NODE: &str = "rollback_restore";

/// The state before a run, to which a cancelled run is rolled back: the head with its pending writes, or nothing.
#[derive(Debug, Clone)]
pub struct RollbackPoint(Option<StateSnapshot>);

impl RollbackPoint {
    /// The head that was captured; none if the thread had no checkpoint.
    pub fn snapshot(&self) -> Option<&StateSnapshot> {
        self.0.as_ref()
    }
}

impl StateAccessor {
    /// Captures the head for a later [`Self::restore`]. Values are shared, not copied.
    ///
    /// # Errors
    /// As [`StateAccessor::get`].
    pub async fn capture(&self, thread: &ThreadId) -> Result<RollbackPoint> {
        self.get(thread, None).await.map(RollbackPoint)
    }

    /// Prepares a run that resumes from `selected`. In delta mode the selected state is written onto the head as a
    /// new head: every selected channel restored, newer channels reset, and what was to run next is to run next. Rows
    /// of tasks that had finished there stay there, as they do behind a fork. Returns the new head; `None` if nothing
    /// was written, because `selected` is the head already or the mode is full, in which a run forks instead
    /// (service reference, "Resume and rollback in delta mode").
    ///
    /// # Errors
    /// [`Error::NotFound`] if `selected` does not exist; nothing is written on any error.
    pub async fn linearize(
        &self,
        thread: &ThreadId,
        selected: CheckpointId,
        extra: Map<String, Json>,
    ) -> Result<Option<StateSnapshot>> {
        let Some(head) = self.get(thread, None).await? else {
            return Err(Error::NotFound { thread: thread.clone(), checkpoint: selected });
        };
        if self.table.mode() == ChannelMode::Full || head.key.id == selected {
            return Ok(None);
        }
        let target = self.get(thread, Some(selected)).await?;
        let target =
            target.ok_or_else(|| Error::NotFound { thread: thread.clone(), checkpoint: selected })?;
        let writes = self.replacement(&target, &head)?;
        let update = Update { at: Some(head.key.id), node: NodeName::from(RESUME_NODE), writes, extra };
        self.update_on(thread, Some(&head), Some(head.key.id), update, target.next.clone()).await.map(Some)
    }

    /// Restores the captured state after a cancelled run, as a new head. In delta mode it is written onto the
    /// cancelled head; in full mode it forks from the captured checkpoint. What was to run next is to run next again,
    /// and pending writes of the captured head are attached to the restored one. A thread that had no checkpoint loses
    /// all of them. Where nothing was written since, nothing is written. Returns the restored head.
    ///
    /// Not cancel-safe: a dropped call may have restored the state without its pending writes.
    ///
    /// # Errors
    /// [`Error::Conflict`] if another writer moved the head, and the saver's.
    pub async fn restore(
        &self,
        thread: &ThreadId,
        point: &RollbackPoint,
        extra: Map<String, Json>,
    ) -> Result<Option<StateSnapshot>> {
        let Some(captured) = &point.0 else {
            self.delete_thread(thread).await?;
            return Ok(None);
        };
        let head = self.get(thread, None).await?;
        let head =
            head.ok_or_else(|| Error::NotFound { thread: thread.clone(), checkpoint: captured.key.id })?;
        if head.key == captured.key && head.writes == captured.writes {
            return Ok(Some(head));
        }
        let (base, writes) = match self.table.mode() {
            ChannelMode::Delta => (&head, self.replacement(captured, &head)?),
            ChannelMode::Full => {
                let messages = captured.value(MESSAGES_CHANNEL).cloned();
                let write = |value| Write { channel: MESSAGES_CHANNEL.into(), value, overwrite: true };
                (captured, messages.map(write).into_iter().collect())
            }
        };
        let update = Update { at: None, node: NodeName::from(RESTORE_NODE), writes, extra };
        let next = captured.next.clone();
        let mut restored = self.update_on(thread, Some(base), Some(head.key.id), update, next).await?;
        for row in &captured.writes {
            self.saver.put_writes(&restored.key, row).await?;
        }
        restored.writes = captured.writes.clone();
        Ok(Some(restored))
    }

    /// The writes that turn the state of `head` into that of `target`: a selected channel is replaced by its selected
    /// value; one that only the head has is reset to what it starts with, or to null.
    fn replacement(&self, target: &StateSnapshot, head: &StateSnapshot) -> Result<Vec<Write>> {
        let null = ChannelValue::from_json(&Json::Null)?;
        let mut writes = Vec::new();
        for name in self.table.names() {
            let value = match (target.channels.get(name), head.channels.get(name)) {
                (Some(channel), _) => channel.value.clone().ok_or_else(|| target.not_loaded(name))?,
                (None, Some(_)) => null.clone(),
                (None, None) => continue,
            };
            let overwrite = self.table.behaviour(name).is_some_and(|b| b.reducer().is_some());
            writes.push(Write { channel: name.clone(), value, overwrite });
        }
        Ok(writes)
    }
}

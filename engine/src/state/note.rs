//! Notes: checkpoints that repeat their parent's state with other metadata.

use std::sync::Arc;

use super::{Plan, StateAccessor, StateSnapshot};
use crate::checkpoint::{ChannelEntry, Checkpoint, CheckpointKey, Stored};
use crate::error::{Error, Result};
use crate::metadata::{Extra, Metadata, Source};
use crate::mode::gate;
use crate::saver::{Flush, Load, StepCommit};

/// How often a note is planned again because its head was stored in another form.
const ATTEMPTS: usize = 8;

impl StateAccessor {
    /// Writes a checkpoint that repeats `head` with other metadata: the form of a duration-only checkpoint. Stores only
    /// a reference to what `head` stores; marker, counters and next nodes are those of `head`, as it is stored by then:
    /// a conversion or a prune does not make it fail.
    ///
    /// # Errors
    /// [`Error::ModeMismatch`], [`Error::Conflict`] if `head` is no longer the head, [`Error::NotFound`] if it is gone,
    /// [`Error::Stale`] if it is converted again and again, and the saver's.
    pub async fn annotate(&self, head: &StateSnapshot, extra: impl Into<Extra>) -> Result<StateSnapshot> {
        self.annotate_flushing(head, extra, Flush::Now).await
    }

    /// As [`Self::annotate`], flushed as requested: a power loss may leave `head` without what may be flushed later.
    ///
    /// # Errors
    /// As there.
    pub async fn annotate_flushing(
        &self,
        head: &StateSnapshot,
        extra: impl Into<Extra>,
        flush: Flush,
    ) -> Result<StateSnapshot> {
        let extra = extra.into();
        gate(self.table.mode(), &head.metadata)?;
        let mut committed = self.commit(self.plan_note(head, extra.clone(), flush)).await;
        for _ in 1..ATTEMPTS {
            let Err(Error::Stale { .. }) = committed else { break };
            let head = self.as_stored(head).await?;
            committed = self.commit(self.plan_note(&head, extra.clone(), flush)).await;
        }
        committed
    }

    /// The same state as it is stored now.
    async fn as_stored(&self, state: &StateSnapshot) -> Result<StateSnapshot> {
        let CheckpointKey { thread, id, .. } = &state.key;
        let stored = self.tuple(thread, Some(*id), Load::None).await?;
        let stored = stored.ok_or_else(|| Error::NotFound { thread: thread.clone(), checkpoint: *id })?;
        let mut state = StateSnapshot { metadata: stored.metadata, ..state.clone() };
        for (name, channel) in Arc::make_mut(&mut state.channels) {
            channel.complete = !state.metadata.counters.contains_key(name);
        }
        Ok(state)
    }

    fn plan_note(&self, head: &StateSnapshot, extra: Extra, flush: Flush) -> Plan {
        let id = self.ids.checkpoint_after(Some(head.key.id));
        let step = head.metadata.step.saturating_add(1);
        let metadata = Metadata { source: Source::Update, step, extra, ..head.metadata.clone() };
        let held = head.channels.iter();
        let held =
            held.map(|(name, c)| (name.clone(), ChannelEntry { version: c.version, stored: Stored::Held }));
        let commit = StepCommit {
            thread: head.key.thread.clone(),
            namespace: head.key.namespace.clone(),
            parent: Some(head.key.id),
            expected_head: Some(head.key.id),
            checkpoint: Checkpoint {
                id,
                channels: held.collect(),
                next: head.next.clone(),
                applied: Vec::new(),
            },
            metadata: metadata.clone(),
            writes: Vec::new(),
            pending: Vec::new(),
            flush,
        };
        let state = StateSnapshot {
            key: CheckpointKey { id, ..head.key.clone() },
            parent: Some(head.key.id),
            metadata,
            applied: Vec::new(),
            writes: Vec::new(),
            ..head.clone()
        };
        Plan { commit, state }
    }
}

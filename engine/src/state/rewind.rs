//! Going back: resuming from an older checkpoint, and rolling back a cancelled run.

use std::collections::BTreeSet;

use serde_json::{Map, Value as Json};

use super::{KnownHead, StateAccessor, StateSnapshot};
use crate::channel::MESSAGES_CHANNEL;
use crate::checkpoint::Write;
use crate::error::{Error, Result};
use crate::id::{CheckpointId, Namespace, TaskId, ThreadId};
use crate::mode::ChannelMode;
use crate::saver::{LocalKey, Revision, Rewrite, doubt_or};
use crate::value::ChannelValue;

/// The node recorded for a resume from an older checkpoint.
const RESUME_NODE: &str = "checkpoint_resume";
/// The node recorded for a rollback.
const RESTORE_NODE: &str = "rollback_restore";
/// How often a deletion is tried on a thread whose rows keep changing.
const ATTEMPTS: usize = 8;

/// The state before a run, to which a cancelled run is rolled back: the head with its pending writes, or nothing.
#[derive(Debug, Clone)]
pub struct RollbackPoint {
    state: Option<StateSnapshot>,
    /// Whether the run is another process's, which may be about to write.
    elsewhere: bool,
}

impl RollbackPoint {
    /// The captured head; `None` if the thread had no checkpoint.
    pub fn snapshot(&self) -> Option<&StateSnapshot> {
        self.state.as_ref()
    }
}

impl StateAccessor {
    /// Captures the state at the known head for a later [`Self::restore`]. Values are shared, not copied.
    ///
    /// # Errors
    /// [`Error::Conflict`] if another writer moved the head, and as [`StateAccessor::get`].
    pub async fn capture(&self, head: &mut KnownHead) -> Result<RollbackPoint> {
        let state = self.get_known(head).await?;
        Ok(RollbackPoint { state, elsewhere: false })
    }

    /// The state that a head was captured in before a run of another process, with the rows of the tasks that had finished
    /// before it. Without a checkpoint: that the thread had none. That process may still be about to write: [`Self::restore`] moves
    /// the head in any case, so that it gets [`Error::Conflict`].
    ///
    /// # Errors
    /// [`Error::NotFound`], and as [`StateAccessor::get`].
    pub async fn captured_at(
        &self,
        thread: &ThreadId,
        at: Option<CheckpointId>,
        finished_before: impl Fn(TaskId) -> bool,
    ) -> Result<RollbackPoint> {
        let Some(at) = at else { return Ok(RollbackPoint { state: None, elsewhere: true }) };
        let found = self.get(thread, Some(at)).await?;
        let mut found = found.ok_or_else(|| Error::NotFound { thread: thread.clone(), checkpoint: at })?;
        // Nothing is pending at the end of a graph: what ran from there was the run's.
        let ended = found.next.is_empty();
        found.writes.retain(|row| !ended && finished_before(row.task));
        Ok(RollbackPoint { state: Some(found), elsewhere: true })
    }

    /// Prepares a run that resumes from `selected`. In delta mode the selected state is written onto the known head as
    /// a new head: every selected channel is restored, newer channels are reset, and the next nodes are those of
    /// `selected`. Rows of tasks that had finished there stay there, as after a fork. Returns the new head; `None` if
    /// nothing was written, because `selected` is already the head or the mode is full, in which a run forks instead
    /// (service reference, "Resume and rollback in delta mode").
    ///
    /// # Errors
    /// [`Error::NotFound`] if `selected` does not exist, [`Error::Conflict`] if another writer moved the head; nothing
    /// is written in these cases.
    pub async fn linearize(
        &self,
        head: &mut KnownHead,
        selected: CheckpointId,
        extra: Map<String, Json>,
    ) -> Result<Option<StateSnapshot>> {
        let thread = head.thread().clone();
        let Some(onto) = self.get_known(head).await? else {
            return Err(Error::NotFound { thread, checkpoint: selected });
        };
        if self.table.mode() == ChannelMode::Full || onto.key.id == selected {
            return Ok(None);
        }
        let target = self.get(&thread, Some(selected)).await?;
        let target = target.ok_or(Error::NotFound { thread, checkpoint: selected })?;
        let writes = self.replacement(&target, &onto)?;
        let plan = self.plan_update(head, Some(&onto), RESUME_NODE.into(), writes, extra, target.next)?;
        self.commit_known(head, plan).await.map(Some)
    }

    /// Restores the captured state after a cancelled run, as a new head. `head` is the run's known head: the last one
    /// it wrote. In delta mode the state is written onto it; in full mode it forks from the captured checkpoint, unless
    /// a prune has removed that since. The next nodes are restored, and so are the pending writes of the captured head,
    /// in the same change. A thread that had no checkpoint loses everything that the run created. Where nothing was
    /// written since, nothing is written, unless the run is another process's ([`Self::captured_at`]). Returns the
    /// restored head.
    ///
    /// # Errors
    /// [`Error::Conflict`] if another writer moved the head: nothing changes. [`Error::InDoubt`] if a commit in doubt
    /// may still arrive. The saver's.
    pub async fn restore(
        &self,
        head: &mut KnownHead,
        point: &RollbackPoint,
        extra: Map<String, Json>,
    ) -> Result<Option<StateSnapshot>> {
        let Some(captured) = &point.state else {
            self.delete_known(head).await?;
            return Ok(None);
        };
        // The head written here fences out a commit that may still arrive.
        let settled = !head.is_in_doubt();
        let found = self.get_known(head).await?.ok_or_else(|| Error::NotFound {
            thread: captured.key.thread.clone(),
            checkpoint: captured.key.id,
        })?;
        let unchanged = found.key == captured.key && found.writes == captured.writes;
        if settled && unchanged && !point.elsewhere {
            return Ok(Some(found));
        }
        let (base, writes) = match self.table.mode() {
            ChannelMode::Delta => (&found, self.replacement(captured, &found)?),
            ChannelMode::Full => {
                let messages = captured.value(MESSAGES_CHANNEL).cloned();
                let write = |value| Write { channel: MESSAGES_CHANNEL.into(), value, overwrite: true };
                (captured, messages.map(write).into_iter().collect())
            }
        };
        let (next, more, pending) = (captured.next.clone(), extra.clone(), captured.writes.clone());
        let plan = self.plan_update(head, Some(base), RESTORE_NODE.into(), writes, more, next.clone())?;
        let restored = match self.commit_known(head, plan.with_pending(pending.clone())).await {
            Err(Error::NotFound { checkpoint, .. }) if checkpoint == captured.key.id => {
                let writes = self.replacement(captured, &found)?;
                let plan = self.plan_update(head, Some(&found), RESTORE_NODE.into(), writes, extra, next)?;
                self.commit_known(head, plan.with_pending(pending)).await?
            }
            committed => committed?,
        };
        Ok(Some(restored))
    }

    /// Deletes a thread that contains only what the writer with this head created.
    ///
    /// # Errors
    /// [`Error::Conflict`] if it contains another writer's checkpoint: nothing changes. The saver's.
    async fn delete_known(&self, head: &mut KnownHead) -> Result<()> {
        let thread = head.thread().clone();
        let mut doubt = None;
        // The revision that the attempt in doubt expects, and what it removes.
        let mut attempt: Option<(Revision, BTreeSet<LocalKey>)> = None;
        for _ in 0..ATTEMPTS {
            let image = self.saver.read_thread(&thread).await;
            let image = image.map_err(|error| doubt_or(doubt.clone(), error))?;
            if let Some((expected, removed)) = &attempt {
                if removed.iter().all(|place| !image.checkpoints.contains_key(place)) {
                    // It was carried out. What is there by now was begun by another writer.
                    head.cleared();
                    return Ok(());
                }
                if image.revision != *expected {
                    // It was not, and will be refused.
                    doubt = None;
                }
            }
            // Any other commit in doubt is refused now: the head that it names is gone.
            if image.checkpoints.is_empty() && head.id().is_none() && head.is_in_doubt() {
                return Err(Error::InDoubt {
                    saver: self.saver.capabilities().name,
                    reason: format!("the first commit to thread {thread} may still arrive"),
                });
            }
            let newest = |namespace: &Namespace| {
                image.checkpoints.keys().filter(|(of, _)| of == namespace).map(|(_, id)| *id).max()
            };
            if !image.checkpoints.is_empty() {
                // Each commit named the head before it, so everything leading to this head is the writer's own.
                let settled = head.settle(newest(&self.namespace));
                settled.map_err(|error| doubt_or(doubt.clone(), error))?;
            }
            if let Some((namespace, _)) = image.checkpoints.keys().find(|(of, _)| *of != self.namespace) {
                let (found, namespace) = (newest(namespace), namespace.clone());
                return Err(Error::Conflict { thread, namespace, expected: None, found });
            }
            let remove: BTreeSet<LocalKey> = image.checkpoints.into_keys().collect();
            let rewrite = Rewrite { remove: remove.clone(), ..Rewrite::default() };
            let deleted = if rewrite.is_empty() {
                Ok(())
            } else {
                self.saver.rewrite_thread(&thread, &image.revision, rewrite).await
            };
            self.warm.forget(&thread);
            match deleted {
                Ok(()) => {
                    head.cleared();
                    return Ok(());
                }
                Err(Error::Stale { .. }) => {}
                Err(error @ Error::InDoubt { .. }) => {
                    doubt.get_or_insert(error);
                    attempt = Some((image.revision, remove));
                }
                Err(error) => return Err(doubt_or(doubt, error)),
            }
        }
        Err(doubt_or(doubt, Error::Stale { thread }))
    }

    /// The writes that turn the state of `head` into that of `target`: a selected channel gets its selected value; one
    /// that only the head has is reset to its initial value, or to null.
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

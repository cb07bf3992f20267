//! Deleting a thread as the caller saw it.

use std::collections::BTreeSet;

use super::StateAccessor;
use crate::error::{Error, Result};
use crate::id::ThreadId;
use crate::saver::{LocalKey, Revision, Rewrite, doubt_or};

/// A thread as it was when its deletion was decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenThread {
    thread: ThreadId,
    /// `None` if it could not be read.
    contents: Option<(Revision, BTreeSet<LocalKey>)>,
}

impl StateAccessor {
    /// Looks at a thread that is to be deleted. A damaged thread, which cannot be read, can be deleted too.
    ///
    /// # Errors
    /// The saver's, except those that say that the thread is damaged.
    pub async fn look(&self, thread: &ThreadId) -> Result<SeenThread> {
        let contents = match self.saver.read_thread(thread).await {
            Ok(image) => Some((image.revision, image.checkpoints.into_keys().collect())),
            Err(Error::Corrupt { .. } | Error::BrokenLineage { .. } | Error::InvalidInput(_)) => None,
            Err(error) => return Err(error),
        };
        Ok(SeenThread { thread: thread.clone(), contents })
    }

    /// Deletes a thread, in every namespace, unless it has changed since `seen`. A damaged thread has no revision to
    /// compare, so it is deleted if it is still damaged.
    ///
    /// # Errors
    /// [`Error::Stale`] if the thread has changed: nothing is deleted. The saver's.
    pub async fn delete_seen(&self, seen: SeenThread) -> Result<()> {
        let SeenThread { thread, contents } = seen;
        let deleted = match contents {
            Some((revision, remove)) => {
                let rewrite = Rewrite { remove: remove.clone(), ..Rewrite::default() };
                match self.saver.rewrite_thread(&thread, &revision, rewrite).await {
                    Err(doubt @ Error::InDoubt { .. }) => match self.saver.read_thread(&thread).await {
                        // What is there by now was begun by another writer.
                        Ok(image) if remove.iter().all(|place| !image.checkpoints.contains_key(place)) => {
                            Ok(())
                        }
                        Ok(_) => Err(doubt),
                        Err(error) => Err(doubt_or(Some(doubt), error)),
                    },
                    done => done,
                }
            }
            None if self.look(&thread).await?.contents.is_some() => {
                Err(Error::Stale { thread: thread.clone() })
            }
            None => self.saver.delete_thread(&thread).await,
        };
        self.warm.forget(&thread);
        deleted
    }
}

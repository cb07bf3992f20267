//! Deleting checkpoints and threads, and copying them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, stream};
use threadkeep::deletion;
use threadkeep::id::ThreadId;
use threadkeep::saver::{ListQuery, Load, LocalKey, Rewrite, ThreadImage};
use threadkeep::{Error, Result};

use crate::reading::AT_ONCE;
use crate::removal;
use crate::steps::after;
use crate::store::{ATTEMPTS, LangGraph};
use crate::types::Strategy;

impl LangGraph {
    /// Deletes a thread.
    ///
    /// # Errors
    /// The saver's.
    pub async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        let deleted = self.saver.delete_thread(thread).await;
        self.forget(thread, &deleted);
        deleted
    }

    /// Deletes a thread that somebody began to put and gave up, unless others have written to it: `put` are the checkpoints
    /// that it may have, and the tasks with writes under each. Returns whether nothing of it is left.
    ///
    /// # Errors
    /// [`Error::Stale`] if others keep changing it. The saver's.
    pub async fn take_back(
        &self,
        thread: &ThreadId,
        put: &BTreeMap<LocalKey, BTreeSet<String>>,
    ) -> Result<bool> {
        for _ in 0..ATTEMPTS {
            let image = self.saver.read_thread(thread).await?;
            if image.checkpoints.is_empty() {
                return Ok(true);
            }
            if !removal::is_part_of(&image, put) {
                return Ok(false);
            }
            let rewrite = Rewrite { remove: image.checkpoints.into_keys().collect(), ..Rewrite::default() };
            let done = self.saver.rewrite_thread(thread, &image.revision, rewrite).await;
            self.forget(thread, &done);
            match done {
                Err(Error::Stale { .. }) => {}
                done => return done.map(|()| true),
            }
        }
        Err(Error::Stale { thread: thread.clone() })
    }

    /// Deletes the checkpoints that these runs made, in all threads, except those that a delta channel of another is
    /// replayed from.
    ///
    /// # Errors
    /// The saver's. Some threads are done then; repeat it.
    pub async fn delete_for_runs(&self, runs: &BTreeSet<String>) -> Result<()> {
        if runs.is_empty() {
            return Ok(());
        }
        let threads = self.threads().await?;
        // Once a thread fails, no other one is begun; those in progress are completed, so that it is known what was done.
        let (changed, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let (changed, failed) = (&changed, &failed);
        let deleted: Vec<BoxFuture<'_, _>> = threads
            .iter()
            .map(|thread| {
                let one = async move {
                    if failed.load(Ordering::Relaxed) {
                        return Ok(());
                    }
                    let done = self.delete_runs_of(thread, runs).await;
                    changed.fetch_add(usize::from(matches!(done, Ok(true))), Ordering::Relaxed);
                    failed.fetch_or(done.is_err(), Ordering::Relaxed);
                    done.map(drop)
                };
                one.boxed()
            })
            .collect();
        let done: Vec<Result<()>> = stream::iter(deleted).buffer_unordered(AT_ONCE).collect().await;
        let mut errors: Vec<Error> = done.into_iter().filter_map(Result::err).collect();
        // One that is in doubt says more than one that wrote nothing.
        errors.sort_by_key(|error| !matches!(error, Error::InDoubt { .. }));
        match (errors.into_iter().next(), changed.load(Ordering::Relaxed)) {
            (None, _) => Ok(()),
            (Some(error), 0) => Err(error),
            (Some(error), done) => {
                Err(after(&format!("{done} of {} threads were changed", threads.len()), error))
            }
        }
    }

    /// Returns whether anything was deleted.
    async fn delete_runs_of(&self, thread: &ThreadId, runs: &BTreeSet<String>) -> Result<bool> {
        if !self.has_run(thread, runs).await? {
            return Ok(false);
        }
        self.rewrite(thread, |image| removal::without_runs(image, runs)).await
    }

    /// Whether one of these runs wrote to a thread. Reads no values: most threads have nothing of a run.
    async fn has_run(&self, thread: &ThreadId, runs: &BTreeSet<String>) -> Result<bool> {
        for run in runs {
            let query = ListQuery {
                namespace: None,
                limit: Some(1),
                filter: [(deletion::RUN_ID_KEY.to_owned(), run.as_str().into())].into_iter().collect(),
                load: Load::None,
                ..ListQuery::new(thread)
            };
            if !self.saver.list(&query).await?.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Deletes old checkpoints of threads, one after the other.
    ///
    /// # Errors
    /// The saver's. Some threads are done then; repeat it.
    pub async fn prune(&self, threads: &[ThreadId], strategy: Strategy) -> Result<()> {
        for (done, thread) in threads.iter().enumerate() {
            let pruned = match strategy {
                Strategy::Delete => self.delete_thread(thread).await,
                Strategy::KeepLatest => self.rewrite(thread, removal::keep_latest).await.map(drop),
            };
            pruned.map_err(|error| match done {
                0 => error,
                done => after(&format!("{done} of {} threads were pruned", threads.len()), error),
            })?;
        }
        Ok(())
    }

    /// Copies a thread. Nothing happens if it does not exist.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if the target exists. The saver's.
    pub async fn copy_thread(&self, from: &ThreadId, to: &ThreadId) -> Result<()> {
        let any = ListQuery { namespace: None, limit: Some(1), load: Load::None, ..ListQuery::new(from) };
        if self.saver.list(&any).await?.is_empty() {
            return Ok(());
        }
        let copied = deletion::copy_thread(&*self.saver, from, to).await;
        // If the target exists, writes may wait for checkpoints of it: they stay.
        self.memory.forget_thread(to);
        if matches!(copied, Err(Error::InvalidInput(_))) && self.saver.list(&any).await?.is_empty() {
            // It was deleted since the look.
            return Ok(());
        }
        copied.map(drop)
    }

    /// Returns whether there was anything to change.
    async fn rewrite(&self, thread: &ThreadId, change: impl Fn(&ThreadImage) -> Rewrite) -> Result<bool> {
        for _ in 0..ATTEMPTS {
            let image = self.saver.read_thread(thread).await?;
            let rewrite = change(&image);
            if rewrite.is_empty() {
                return Ok(false);
            }
            let done = self.saver.rewrite_thread(thread, &image.revision, rewrite).await;
            self.memory.forget_thread(thread);
            match done {
                Err(Error::Stale { .. }) => {}
                done => return done.map(|()| true),
            }
        }
        Err(Error::Stale { thread: thread.clone() })
    }
}

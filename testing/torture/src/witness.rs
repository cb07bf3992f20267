//! A saver with the naive model next to it: the model repeats what the saver does, and the two must agree.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError, RwLock};

use anyhow::ensure;
use async_trait::async_trait;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, Flush, ListQuery, Revision, Rewrite, Saver, StepCommit,
    ThreadImage,
};
use threadkeep::{Error, Result};
use threadkeep_conformance::{Naive, Refusal};
use tokio::sync::Mutex;

use crate::trace::Recorder;

/// Is notified of each write, by its number from 1.
pub trait Watch: Send + Sync {
    /// It begins.
    fn began(&self, n: usize);
    /// It was acknowledged. If it was flushed before that, all earlier ones are on disk too.
    fn acknowledged(&self, n: usize, flush: Flush);
}

impl Watch for Recorder {
    fn began(&self, n: usize) {
        Self::began(self, n);
    }

    fn acknowledged(&self, n: usize, flush: Flush) {
        if flush == Flush::Now {
            self.promised(n);
        }
    }
}

/// A saver whose writes are serialized and repeated on the model.
pub struct Witness {
    inner: RwLock<Arc<dyn Saver>>,
    watch: Option<Arc<dyn Watch>>,
    state: Mutex<State>,
}

struct State {
    model: Naive,
    /// The model before the first write, and after each one.
    past: Vec<Naive>,
    /// If a write is in doubt: the model with it.
    doubt: Option<Naive>,
    disagreement: Option<String>,
}

impl Witness {
    /// A witness of an empty store. `watch` is notified of each write.
    pub fn new(inner: Arc<dyn Saver>, watch: Option<Arc<dyn Watch>>) -> Self {
        let model = Naive::default();
        let state = State { past: vec![model.clone()], model, doubt: None, disagreement: None };
        Self { inner: RwLock::new(inner), watch, state: Mutex::new(state) }
    }

    fn inner(&self) -> Arc<dyn Saver> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Continues with another handle on the same store.
    pub fn reopened(&self, saver: Arc<dyn Saver>) {
        *self.inner.write().unwrap_or_else(PoisonError::into_inner) = saver;
    }

    /// The current model.
    pub async fn model(&self) -> Naive {
        self.state.lock().await.model.clone()
    }

    /// The model with the last write, if that is in doubt.
    pub async fn doubt(&self) -> Option<Naive> {
        self.state.lock().await.doubt.clone()
    }

    /// The model before the first write, and after each one.
    pub async fn past(&self) -> Vec<Naive> {
        self.state.lock().await.past.clone()
    }

    /// Fails if a write was accepted that the contract refuses, or vice versa.
    ///
    /// # Errors
    /// The write.
    pub async fn agreed(&self) -> anyhow::Result<()> {
        let first = self.state.lock().await.disagreement.clone().unwrap_or_default();
        ensure!(first.is_empty(), "the saver and the model disagree: {first}");
        Ok(())
    }

    async fn write<T>(
        &self,
        flush: Flush,
        model: impl FnOnce(&mut Naive) -> Result<(), Vec<Refusal>> + Send,
        carry_out: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        let mut state = self.state.lock().await;
        let number = state.past.len();
        if let Some(watch) = &self.watch {
            watch.began(number);
        }
        let got = carry_out.await;
        let mut next = state.model.clone();
        let expected = model(&mut next);
        match (&got, &expected) {
            (Ok(_), Ok(())) => {
                state.model = next;
                if let Some(watch) = &self.watch {
                    watch.acknowledged(number, flush);
                }
            }
            (Err(Error::Unavailable { .. } | Error::Stale { .. }), _) => {}
            (Err(Error::InDoubt { .. }), _) => state.doubt = Some(next),
            (Err(error), Err(reasons)) if reasons.iter().any(|reason| reason.is(error)) => {}
            (got, expected) => {
                let got = got.as_ref().map(|_| ()).map_err(ToString::to_string);
                let text = format!("write {number} returned {got:?}; the contract says {expected:?}");
                state.disagreement.get_or_insert(text);
            }
        }
        let now = state.model.clone();
        state.past.push(now);
        got
    }
}

#[async_trait]
impl Saver for Witness {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        self.inner().get(at).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        self.inner().list(query).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        self.write(Flush::Now, |model| model.put_writes(at, task), self.inner().put_writes(at, task)).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        let known = step.clone();
        self.write(step.flush, |model| model.commit(&known), self.inner().commit(step)).await
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        self.write(Flush::Now, |_| Ok(()), self.inner().flush(thread)).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        self.inner().delta_history(at, channels, reach).await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        let delete = |model: &mut Naive| {
            model.delete_thread(thread);
            Ok(())
        };
        self.write(Flush::Now, delete, self.inner().delete_thread(thread)).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        self.inner().threads(after, limit).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        self.inner().read_thread(thread).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        let key = |(namespace, id): &(_, _)| CheckpointKey {
            thread: thread.clone(),
            namespace: Clone::clone(namespace),
            id: *id,
        };
        let remove: Vec<_> = rewrite.remove.iter().map(key).collect();
        let put = rewrite.put.clone();
        let model = |model: &mut Naive| model.rewrite(&remove, &put);
        self.write(Flush::Now, model, self.inner().rewrite_thread(thread, expected, rewrite)).await
    }

    async fn revision(&self, thread: &ThreadId) -> Result<Revision> {
        self.inner().revision(thread).await
    }

    async fn delete_seen(&self, thread: &ThreadId, expected: &Revision) -> Result<()> {
        let delete = |model: &mut Naive| {
            model.delete_thread(thread);
            Ok(())
        };
        self.write(Flush::Now, delete, self.inner().delete_seen(thread, expected)).await
    }

    async fn copy_thread(&self, from: &ThreadId, to: &ThreadId) -> Result<usize> {
        let model = |model: &mut Naive| {
            let copied = |tuple: &CheckpointTuple| CheckpointTuple { thread: to.clone(), ..tuple.clone() };
            let put: Vec<_> = model.thread(from).into_iter().map(copied).collect();
            if !put.is_empty() && !model.thread(to).is_empty() {
                return Err(vec![Refusal::Stale]);
            }
            model.rewrite(&[], &put)
        };
        self.write(Flush::Now, model, self.inner().copy_thread(from, to)).await
    }

    fn capabilities(&self) -> Capabilities {
        self.inner().capabilities()
    }
}

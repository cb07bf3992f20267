//! Reading checkpoints.

use std::collections::{BTreeMap, BTreeSet};

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::saver::{CheckpointSelector, ListQuery, Load};
use threadkeep::{Error, Result};

use crate::known::Known;
use crate::store::{Fence, LangGraph};
use crate::types::{ChannelReplay, ListRequest, Place, Tuple};
use crate::{foreign, history, read};

/// Threads listed at once.
const THREADS: usize = 256;
/// Threads read at once, where all are. On Postgres each is a wait.
pub(crate) const AT_ONCE: usize = 16;

impl LangGraph {
    /// A checkpoint, or the head.
    ///
    /// # Errors
    /// The saver's.
    pub async fn get(&self, place: &Place, id: Option<CheckpointId>) -> Result<Option<Tuple>> {
        let rows = self.memory.rows();
        let Some(found) = self.found(place, id).await? else { return Ok(None) };
        let key = found.key();
        let head = match id {
            None => {
                self.memory.is_head(place, Some(key.id));
                None
            }
            Some(_) if self.fence == Fence::Error => self.read_head(place).await?,
            Some(_) => None,
        };
        self.memory.read(&key, Known::new(&found)?, rows);
        Ok(self.shown(found).await?.map(|shown| Tuple { head, ..shown }))
    }

    /// Reads a checkpoint. Its values are not read if they are remembered: what they are of, and the rows under it, always
    /// are.
    async fn found(&self, place: &Place, id: Option<CheckpointId>) -> Result<Option<CheckpointTuple>> {
        let remembered = self.memory.remembered(place, id);
        let load = remembered.as_ref().map_or(Load::All, |known| known.missing());
        let (thread, namespace) = (place.thread.clone(), place.namespace.clone());
        let mut at = CheckpointSelector { thread, namespace, id, load };
        let Some(mut found) = self.saver.get(&at).await? else { return Ok(None) };
        if remembered.is_none_or(|known| known.complete(&mut found)) {
            return Ok(Some(found));
        }
        at.load = Load::All;
        self.saver.get(&at).await
    }

    /// A checkpoint as LangGraph has it; `None` if it was deleted since it was read, and its values have to be read, too.
    async fn shown(&self, mut found: CheckpointTuple) -> Result<Option<Tuple>> {
        match foreign::complete(&self.saver, &mut found).await {
            Err(Error::NotFound { .. }) => Ok(None),
            completed => completed.and_then(|()| read::tuple(&found)).map(Some),
        }
    }

    /// Checkpoints, newest first.
    ///
    /// # Errors
    /// The saver's.
    pub async fn list(&self, request: &ListRequest) -> Result<Vec<Tuple>> {
        let threads = match &request.thread {
            Some(thread) => vec![thread.clone()],
            None => self.threads().await?,
        };
        let listed: Vec<BoxFuture<'_, _>> =
            threads.iter().map(|thread| self.list_thread(thread, request).boxed()).collect();
        let listed: Vec<Vec<Tuple>> = stream::iter(listed).buffered(AT_ONCE).try_collect().await?;
        let mut found: Vec<Tuple> = listed.into_iter().flatten().collect();
        if threads.len() > 1 {
            found.sort_by_key(|tuple| std::cmp::Reverse(tuple.id));
            found.truncate(request.limit.unwrap_or(usize::MAX));
        }
        Ok(found)
    }

    async fn list_thread(&self, thread: &ThreadId, request: &ListRequest) -> Result<Vec<Tuple>> {
        let mut found = Vec::new();
        let mut query = ListQuery {
            thread: thread.clone(),
            namespace: request.namespace.clone(),
            before: request.before,
            limit: request.limit,
            filter: request.filter.clone(),
            load: Load::All,
        };
        if let Some(id) = request.id {
            // Nothing is newer than itself: one checkpoint of each namespace has this id.
            query.limit = None;
            query.load = Load::None;
            let all = self.saver.list(&query).await?;
            for tuple in all.into_iter().filter(|tuple| tuple.checkpoint.id == id) {
                if let Some(tuple) = self.saver.get(&CheckpointSelector::at(&tuple.key())).await? {
                    found.extend(self.shown(tuple).await?);
                }
            }
            found.truncate(request.limit.unwrap_or(usize::MAX));
            return Ok(found);
        }
        // What LangGraph's metadata lack, the engine's may have: its source, say.
        let matches =
            |tuple: &Tuple| request.filter.iter().all(|(key, value)| tuple.metadata.get(key) == Some(value));
        loop {
            let page = self.saver.list(&query).await?;
            let (len, last) = (page.len(), page.last().map(|tuple| tuple.checkpoint.id));
            for tuple in page {
                found.extend(self.shown(tuple).await?.filter(|tuple| matches(tuple)));
            }
            let Some(limit) = request.limit else { return Ok(found) };
            let left = limit.saturating_sub(found.len());
            if left == 0 || len < query.limit.unwrap_or(usize::MAX) {
                return Ok(found);
            }
            query.before = last;
            query.limit = Some(left);
        }
    }

    pub(crate) async fn threads(&self) -> Result<Vec<ThreadId>> {
        let mut all: Vec<ThreadId> = Vec::new();
        loop {
            let page = self.saver.threads(all.last(), THREADS).await?;
            let len = page.len();
            all.extend(page);
            if len < THREADS {
                return Ok(all);
            }
        }
    }

    /// What delta channels are replayed from at a checkpoint, or at the head; nothing if it does not exist.
    ///
    /// # Errors
    /// [`Error::BrokenLineage`] if an ancestor is missing. The saver's.
    pub async fn history(
        &self,
        place: &Place,
        id: Option<CheckpointId>,
        channels: &BTreeSet<String>,
    ) -> Result<BTreeMap<String, ChannelReplay>> {
        let nothing = || channels.iter().map(|channel| (channel.clone(), ChannelReplay::default())).collect();
        let id = match id {
            Some(id) => id,
            None => match self.read_head(place).await? {
                Some(head) => head,
                None => return Ok(nothing()),
            },
        };
        let names = channels.iter().map(|channel| channel.as_str().into()).collect();
        match history::replay(&*self.saver, place, id, &names).await {
            Err(Error::NotFound { .. }) => Ok(nothing()),
            found => Ok(found?.into_iter().map(|(channel, replay)| (channel.to_string(), replay)).collect()),
        }
    }
}

//! Reading checkpoints.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use serde_json::{Map, Value as Json};
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::{CheckpointSelector, ListQuery, Load, LocalKey};
use threadkeep::{Error, Result};

use crate::frame::FRAME;
use crate::known::Known;
use crate::store::{ATTEMPTS, Fence, LangGraph};
use crate::task::{self, Kind};
use crate::types::{ChannelReplay, ListRequest, Place, Tuple};
use crate::{filter, foreign, history, read};

/// Threads listed at once.
const THREADS: usize = 256;
/// Threads read at once, where all are. On Postgres each is a wait.
pub(crate) const AT_ONCE: usize = 16;

/// Checkpoints of a page whose values are not read.
const PAGE: usize = 256;

/// How checkpoints are searched.
struct Search<'r> {
    /// The part of the filter that the saver decides.
    filter: Map<String, Json>,
    /// Whether the saver chooses all that match, and hardly anything else: of what lacks a source, it knows one.
    chooses: bool,
    /// What to load meanwhile. If it is not everything, the values are read of what was found.
    load: Load,
    request: &'r ListRequest,
}

impl<'r> Search<'r> {
    fn new(request: &'r ListRequest) -> Self {
        let filter = filter::exact(&request.filter);
        let chooses = request.id.is_none() && filter.len() == request.filter.len();
        // More may be looked at than is found.
        let is_wide =
            request.id.is_some() || request.limit.is_some() && (request.thread.is_none() || !chooses);
        let load = match (is_wide, request.filter.is_empty()) {
            (false, _) => Load::All,
            (true, true) => Load::None,
            (true, false) => Load::Only([FRAME].into_iter().map(ChannelName::from).collect()),
        };
        Self { filter, chooses, load, request }
    }

    /// Whether a checkpoint is asked for. What LangGraph's metadata lack, the engine's may have: its source, say.
    fn matches(&self, tuple: &CheckpointTuple) -> Result<bool> {
        let filter = &self.request.filter;
        Ok(self.request.id.is_none_or(|id| tuple.checkpoint.id == id)
            && (filter.is_empty() || filter::matches(filter, &read::metadata(tuple)?)))
    }
}

impl LangGraph {
    /// A checkpoint, or the head.
    ///
    /// # Errors
    /// The saver's.
    pub async fn get(&self, place: &Place, id: Option<CheckpointId>) -> Result<Option<Tuple>> {
        let since = self.memory.changes();
        let Some(found) = self.found(place, id).await? else {
            if id.is_none() && self.fence == Fence::Error {
                self.runs.found_none(place, self.caller);
            }
            return Ok(None);
        };
        let key = found.key();
        let head = match id {
            None => {
                self.memory.is_head(place, Some(key.id));
                (self.fence == Fence::Error).then_some(key.id)
            }
            Some(_) if self.fence == Fence::Error => self.read_head(place).await?,
            Some(_) => None,
        };
        let _known = self.memory.learned(&key, Known::new(&found)?, since);
        self.runs.read(&key, self.caller, id.is_none(), found.writes.iter().map(|row| row.task));
        Ok(self.shown(found).await?.map(|shown| Tuple { head, ..shown }))
    }

    /// Reads a checkpoint. Its values are not read if they are remembered: what they are of, and the rows under it, always
    /// are.
    async fn found(&self, place: &Place, id: Option<CheckpointId>) -> Result<Option<CheckpointTuple>> {
        let remembered = self.memory.remembered(place, id);
        let load = remembered.as_ref().map_or(Load::All, |(_, known)| known.missing());
        let (thread, namespace) = (place.thread.clone(), place.namespace.clone());
        let mut at = CheckpointSelector { thread, namespace, id, load };
        let Some(mut found) = self.saver.get(&at).await? else { return Ok(None) };
        if remembered.is_none_or(|(id, known)| id == found.checkpoint.id && known.complete(&mut found)) {
            return Ok(Some(found));
        }
        at.load = Load::All;
        self.saver.get(&at).await
    }

    /// A checkpoint as LangGraph has it; `None` if it was deleted since it was read, and its values have to be read, too.
    async fn shown(&self, mut found: CheckpointTuple) -> Result<Option<Tuple>> {
        match foreign::complete(&self.saver, &mut found).await {
            Err(Error::NotFound { .. }) => Ok(None),
            completed => completed.and_then(|_| read::tuple(&found)).map(Some),
        }
    }

    /// Checkpoints, newest first. Those of one thread without a limit are of one moment; others may be deleted while their
    /// values are read, and are not listed then.
    ///
    /// # Errors
    /// [`Error::Stale`] if others keep deleting what is found, so that there may be more than would be answered. The saver's.
    pub async fn list(&self, request: &ListRequest) -> Result<Vec<Tuple>> {
        // A subgraph of a run that goes back begins with what it had before that time.
        if let (Some(thread), Some(namespace), Some(_)) =
            (&request.thread, &request.namespace, request.before)
        {
            let place = Place { thread: thread.clone(), namespace: namespace.clone() };
            self.runs.goes_back(&place, self.caller);
        }
        let listed = self.whole_list(request).await?;
        match self.fence {
            Fence::Fork => Ok(listed),
            Fence::Error => self.with_heads(listed).await,
        }
    }

    /// Adds the heads that a run sees which goes on from one of these, as a subgraph does whose run goes back in time.
    async fn with_heads(&self, mut listed: Vec<Tuple>) -> Result<Vec<Tuple>> {
        let places: HashSet<Place> = listed.iter().map(|tuple| tuple.place.clone()).collect();
        let heads: Vec<BoxFuture<'_, _>> = places.iter().map(|place| self.read_head(place).boxed()).collect();
        let heads: Vec<Option<CheckpointId>> = stream::iter(heads).buffered(AT_ONCE).try_collect().await?;
        let heads: HashMap<&Place, Option<CheckpointId>> = places.iter().zip(heads).collect();
        for tuple in &mut listed {
            tuple.head = heads.get(&tuple.place).copied().flatten();
        }
        Ok(listed)
    }

    async fn whole_list(&self, request: &ListRequest) -> Result<Vec<Tuple>> {
        let mut search = Search::new(request);
        for _ in 1..ATTEMPTS {
            let (listed, gone) = self.listed(&search).await?;
            // Without what was deleted since it was found there may be too few, and others come in its place.
            if request.limit.is_none() || gone.is_none() {
                return Ok(listed);
            }
        }
        // Others go on deleting what is found: its values are read in the moment in which it is found.
        search.load = Load::All;
        match self.listed(&search).await? {
            (listed, None) => Ok(listed),
            (_, Some(thread)) => Err(Error::Stale { thread }),
        }
    }

    /// What is found, and a thread of which something was deleted, or is not asked for any more, once its values are read.
    async fn listed(&self, search: &Search<'_>) -> Result<(Vec<Tuple>, Option<ThreadId>)> {
        let request = search.request;
        let threads = match &request.thread {
            Some(thread) => vec![thread.clone()],
            None => self.threads().await?,
        };
        let listed: Vec<BoxFuture<'_, _>> =
            threads.iter().map(|thread| self.found_in(thread, search).boxed()).collect();
        let listed: Vec<Vec<CheckpointTuple>> = stream::iter(listed).buffered(AT_ONCE).try_collect().await?;
        let mut found: Vec<CheckpointTuple> = listed.into_iter().flatten().collect();
        if threads.len() > 1 {
            found.sort_by_key(|tuple| std::cmp::Reverse(tuple.checkpoint.id));
        }
        found.truncate(request.limit.unwrap_or(usize::MAX));
        let of: Vec<ThreadId> = found.iter().map(|tuple| tuple.thread.clone()).collect();
        let whole: Vec<Option<CheckpointTuple>> = if search.load == Load::All {
            found.into_iter().map(Some).collect()
        } else {
            let loaded: Vec<BoxFuture<'_, _>> = found
                .iter()
                .map(|tuple| async { self.saver.get(&CheckpointSelector::at(&tuple.key())).await }.boxed())
                .collect();
            stream::iter(loaded).buffered(AT_ONCE).try_collect().await?
        };
        let (mut listed, mut gone) = (Vec::with_capacity(whole.len()), None);
        for (tuple, thread) in whole.into_iter().zip(of) {
            let shown = match tuple {
                Some(tuple) if search.load == Load::All || search.matches(&tuple)? => {
                    self.shown(tuple).await?
                }
                _ => None,
            };
            match shown {
                Some(shown) => listed.push(shown),
                None => gone = Some(thread),
            }
        }
        Ok((listed, gone))
    }

    /// What is asked for of a thread, with the values that the search loads.
    async fn found_in(&self, thread: &ThreadId, search: &Search<'_>) -> Result<Vec<CheckpointTuple>> {
        let request = search.request;
        let mut query = ListQuery {
            thread: thread.clone(),
            namespace: request.namespace.clone(),
            before: request.before,
            limit: None,
            filter: search.filter.clone(),
            load: search.load.clone(),
        };
        // Of a page, few may match that the saver does not choose itself.
        let (mut found, mut least) = (Vec::new(), if search.chooses { 0 } else { PAGE });
        loop {
            let left = request.limit.map(|limit| limit.saturating_sub(found.len()));
            query.limit = match request.id {
                None => left.map(|left| left.max(least)),
                // Each namespace may have one of this id, and a page would end between them.
                Some(_) => None,
            };
            if left == Some(0) {
                return Ok(found);
            }
            let mut page = self.saver.list(&query).await?;
            let is_last = query.limit.is_none_or(|limit| page.len() < limit);
            let asked_for = page.iter().map(|tuple| search.matches(tuple)).collect::<Result<Vec<bool>>>()?;
            let is_enough = left.is_some_and(|left| asked_for.iter().filter(|is| **is).count() >= left);
            if !is_last && !is_enough && query.namespace.is_none() {
                // The next page begins below an id, which several namespaces may have: it must not be cut in two.
                let last = page.last().map(|tuple| tuple.checkpoint.id);
                page.truncate(page.iter().position(|tuple| Some(tuple.checkpoint.id) == last).unwrap_or(0));
                if page.is_empty() {
                    least = least.max(left.unwrap_or_default()) * 2;
                    continue;
                }
            }
            query.before = page.last().map(|tuple| tuple.checkpoint.id);
            found.extend(page.into_iter().zip(asked_for).filter_map(|(tuple, is)| is.then_some(tuple)));
            if is_last || is_enough {
                return Ok(found);
            }
        }
    }

    /// The checkpoints of a thread, and the tasks with writes under each: once for special writes (`true`), and once
    /// for others, because each kind is stored by itself. No channel's value is read.
    ///
    /// # Errors
    /// The saver's.
    pub async fn written(&self, thread: &ThreadId) -> Result<BTreeMap<LocalKey, BTreeSet<(String, bool)>>> {
        let query = ListQuery { namespace: None, load: Load::None, ..ListQuery::new(thread) };
        let mut written = BTreeMap::new();
        for tuple in self.saver.list(&query).await? {
            let tasks = tuple.writes.iter().map(|row| {
                let (author, kind) = task::author(row)?;
                Ok((author.task, kind == Kind::Special))
            });
            let tasks = tasks.collect::<Result<BTreeSet<_>>>()?;
            written.insert((tuple.namespace, tuple.checkpoint.id), tasks);
        }
        Ok(written)
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
        match history::replay(&self.saver, place, id, &names).await {
            Err(Error::NotFound { .. }) => Ok(nothing()),
            found => Ok(found?.into_iter().map(|(channel, replay)| (channel.to_string(), replay)).collect()),
        }
    }
}

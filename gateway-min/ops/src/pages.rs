//! Reads a thread page by page, so that a command holds a part of it, however long it is.

use std::collections::{BTreeMap, VecDeque};

use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::{CheckpointId, Namespace, ThreadId};
use threadkeep::saver::{ListQuery, Load, Saver};
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};

/// Checkpoints of a page. A page whose lists are long has more, because each page loads a list as a whole.
const PAGE: usize = 500;
/// Checkpoints of the longest page, whatever is in its lists: what a page holds besides them grows with it.
const LONGEST: usize = 10_000;
/// How many elements of a list make a page one checkpoint longer, of those that are only looked at.
const PER_LOOK: usize = 4;
/// The same of those that an export writes, which takes more memory for each.
const PER_EXPORT: usize = 16;

/// The length of the page after this one, if this many elements of a list make it one checkpoint longer.
fn next_page(page: &[CheckpointTuple], per_checkpoint: usize) -> usize {
    let values = page.iter().flat_map(|tuple| tuple.checkpoint.channels.values());
    let lists = values.filter_map(|entry| entry.stored.value()?.as_list());
    let longer = lists.map(threadkeep::value::ListValue::len).max().unwrap_or_default() / per_checkpoint;
    (PAGE + longer).min(LONGEST)
}

/// The checkpoints of a thread, newest first. Pages may be of different moments.
pub(crate) struct Newest<'a> {
    saver: &'a dyn Saver,
    query: ListQuery,
    done: bool,
}

impl<'a> Newest<'a> {
    /// Those that the query selects. Its limit is how many will be used; there may be more.
    pub(crate) fn new(saver: &'a dyn Saver, query: ListQuery) -> Self {
        let limit = query.limit.map_or(PAGE, |limit| limit.saturating_add(1).min(PAGE));
        Self { saver, query: ListQuery { limit: Some(limit), ..query }, done: false }
    }

    /// Whether there are checkpoints after the last page.
    pub(crate) async fn has_more(&self) -> Result<bool> {
        let next = ListQuery { limit: Some(1), load: Load::None, ..self.query.clone() };
        Ok(!self.done && !self.saver.list(&next).await?.is_empty())
    }

    /// The next page; empty after the last one.
    pub(crate) async fn next(&mut self) -> Result<Vec<CheckpointTuple>> {
        while !self.done {
            let limit = self.query.limit.unwrap_or(PAGE);
            let mut page = self.saver.list(&self.query).await?;
            self.done = page.len() < limit;
            if !self.done && self.query.namespace.is_none() {
                // The next page begins below an id, which several namespaces may have: it must not be cut in two.
                let last = page.last().map(|tuple| tuple.checkpoint.id);
                page.truncate(page.iter().position(|tuple| Some(tuple.checkpoint.id) == last).unwrap_or(0));
                if page.is_empty() {
                    self.query.limit = Some(limit * 2);
                    continue;
                }
            }
            self.query.before = page.last().map(|tuple| tuple.checkpoint.id);
            self.query.limit = Some(next_page(&page, PER_LOOK));
            return Ok(page);
        }
        Ok(Vec::new())
    }
}

/// The bound of a query for this checkpoint and older ones; `None` if no id is above it.
pub(crate) fn through(id: CheckpointId) -> Option<CheckpointId> {
    let next = u128::from_be_bytes(*id.as_bytes()).checked_add(1)?;
    Some(CheckpointId::from_bytes(next.to_be_bytes()))
}

/// A checkpoint as the first pass saw it.
struct Seen {
    id: CheckpointId,
    /// The rows under it. More may have been added since.
    rows: usize,
    digest: [u8; 16],
}

/// A thread, oldest first by namespace, as it was at one moment.
///
/// A first pass notes a digest of each checkpoint; the second one returns the checkpoints, and ends with
/// [`Error::Stale`] if one has changed meanwhile. So all of them were stored like this between the two passes. Rows and
/// checkpoints that a run adds meanwhile are left out.
pub(crate) struct Oldest<'a> {
    saver: &'a dyn Saver,
    thread: ThreadId,
    left: VecDeque<(Namespace, VecDeque<Seen>)>,
    page: usize,
}

impl<'a> Oldest<'a> {
    /// The first pass. The thread may be absent: then there is no page.
    pub(crate) async fn open(saver: &'a dyn Saver, thread: &ThreadId) -> Result<Self> {
        let query = ListQuery { namespace: None, load: Load::None, ..ListQuery::new(thread) };
        let mut newest = Newest::new(saver, query);
        let mut namespaces: BTreeMap<Namespace, VecDeque<Seen>> = BTreeMap::new();
        loop {
            let page = newest.next().await?;
            if page.is_empty() {
                break;
            }
            for tuple in page {
                let (id, rows, digest) = (tuple.checkpoint.id, tuple.writes.len(), digest(&tuple));
                namespaces.entry(tuple.namespace).or_default().push_front(Seen { id, rows, digest });
            }
        }
        Ok(Self { saver, thread: thread.clone(), left: namespaces.into_iter().collect(), page: PAGE })
    }

    /// The number of checkpoints that are left.
    pub(crate) fn left(&self) -> u64 {
        self.left.iter().map(|(_, seen)| seen.len() as u64).sum()
    }

    /// The next page; empty after the last one.
    pub(crate) async fn next(&mut self) -> Result<Vec<CheckpointTuple>> {
        let Some((namespace, seen)) = self.left.front_mut() else { return Ok(Vec::new()) };
        let expected: Vec<Seen> = seen.drain(..self.page.min(seen.len())).collect();
        let query = ListQuery {
            namespace: Some(namespace.clone()),
            // Newer ones may have been added since.
            before: expected.last().and_then(|seen| through(seen.id)),
            limit: Some(expected.len()),
            ..ListQuery::new(&self.thread)
        };
        if seen.is_empty() {
            self.left.pop_front();
        }
        let mut page = self.saver.list(&query).await?;
        page.reverse();
        for (tuple, seen) in page.iter_mut().zip(&expected) {
            tuple.writes.truncate(seen.rows);
        }
        let same = page.len() == expected.len()
            && page
                .iter()
                .zip(&expected)
                .all(|(tuple, seen)| tuple.checkpoint.id == seen.id && digest(tuple) == seen.digest);
        if !same {
            return Err(Error::Stale { thread: self.thread.clone() });
        }
        self.page = next_page(&page, PER_EXPORT);
        Ok(page)
    }
}

/// Everything of a checkpoint but the values of its channels, which change only together with the rest: a conversion
/// changes counters or the marker, and a prune counters or a parent.
fn digest(tuple: &CheckpointTuple) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    let mut add = |part: &[u8]| {
        hasher.update(&part.len().to_le_bytes()).update(part);
    };
    let metadata = &tuple.metadata;
    let (rest, large) = metadata.extra.split();
    let facts = (tuple.parent, &tuple.checkpoint.next, &tuple.checkpoint.applied);
    add(format!("{facts:?}").as_bytes());
    let facts =
        (metadata.source, metadata.step, metadata.delta_marker, &metadata.parents, &metadata.counters);
    add(format!("{facts:?}").as_bytes());
    add(format!("{rest:?}").as_bytes());
    for (key, map) in large {
        add(key.as_bytes());
        add(&map.len().to_le_bytes());
    }
    for (name, entry) in &tuple.checkpoint.channels {
        add(name.as_str().as_bytes());
        add(entry.version.to_string().as_bytes());
    }
    for row in &tuple.writes {
        add(format!("{:?}", (row.task, &row.node, row.index)).as_bytes());
        for write in &row.writes {
            add(write.channel.as_str().as_bytes());
            add(&[u8::from(write.overwrite)]);
            match &write.value {
                ChannelValue::Plain(encoded) => add(&encoded.bytes),
                ChannelValue::List(list) => list.iter().for_each(|element| add(element.hash())),
            }
        }
    }
    let mut short = [0; 16];
    short.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    short
}

//! What checkpoints say about each other, and a thread read for that, a part at a time.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use serde_json::Value;
use threadkeep::Error;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::deletion::RUN_ID_KEY;
use threadkeep::id::{ChannelName, CheckpointId, Namespace, TaskId, ThreadId};
use threadkeep::saver::{Counted, Counter, ListQuery, Load, Saver};
use threadkeep_page::{CheckpointLine, Node};

/// Checkpoints that are read at a time.
pub(super) const READ: usize = 1_000;

/// The checkpoints of a thread's own graph, and how many its nested graphs have. They are read `read` at a time, and held all at
/// once only if the thread was written to meanwhile: what is shown is of one moment.
pub(super) async fn walked(
    saver: &dyn Saver,
    thread: &ThreadId,
    shown: Range<usize>,
    read: usize,
) -> threadkeep::Result<(Walk, usize)> {
    match paged(saver, thread, shown.clone(), read).await {
        Ok(Some(walked)) => return Ok(walked),
        // Of two moments, or damage, which the next read finds again.
        Ok(None) | Err(Error::BrokenLineage { .. }) => {}
        Err(error) => return Err(error),
    }
    let all = ListQuery { namespace: None, load: Load::None, ..ListQuery::new(thread) };
    let (mut walk, mut nested) = (Walk::showing(shown), 0);
    for tuple in saver.list(&all).await? {
        if tuple.namespace.as_str().is_empty() {
            walk.add(tuple)?;
        } else {
            nested += 1;
        }
    }
    Ok((walk, nested))
}

/// The same, page by page; `None` if the pages together are not what the thread is after them.
async fn paged(
    saver: &dyn Saver,
    thread: &ThreadId,
    shown: Range<usize>,
    read: usize,
) -> threadkeep::Result<Option<(Walk, usize)>> {
    let mut walk = Walk::showing(shown);
    let mut query = ListQuery { load: Load::None, limit: Some(read), ..ListQuery::new(thread) };
    loop {
        let page = saver.list(&query).await?;
        query.before = page.last().map(|tuple| tuple.checkpoint.id);
        let is_last = page.len() < read;
        for tuple in page {
            walk.add(tuple)?;
        }
        if is_last {
            break;
        }
    }
    let mut now = saver.summary(thread).await?;
    let same = std::mem::take(&mut walk.counter).summary(thread)? == now.remove(&Namespace::root());
    let nested: u64 = now.values().map(|chain| chain.checkpoints).sum();
    Ok(same.then_some((walk, usize::try_from(nested).unwrap_or(usize::MAX))))
}

/// The checkpoints of a thread, newest first. It holds of each who its parent is, and of those that are shown, and of their
/// parents, everything but values.
pub(super) struct Walk {
    /// The places of those that are shown.
    shown: Range<usize>,
    pub(super) nodes: Vec<Node>,
    /// Those that are shown.
    ids: Vec<CheckpointId>,
    /// Their parents that did not come yet.
    wanted: HashSet<CheckpointId>,
    family: Family,
    counter: Counter<CheckpointId, TaskId>,
}

impl Walk {
    fn showing(shown: Range<usize>) -> Self {
        let (nodes, ids, wanted) = (Vec::new(), Vec::new(), HashSet::new());
        Self { shown, nodes, ids, wanted, family: Family::default(), counter: Counter::default() }
    }

    /// Adds a checkpoint, older than those before it.
    ///
    /// # Errors
    /// [`Error::BrokenLineage`] if it lacks a row that a child applied.
    fn add(&mut self, tuple: CheckpointTuple) -> threadkeep::Result<()> {
        self.counter.add(&tuple.thread, Counted::of(&tuple))?;
        let (is_shown, id) = (self.shown.contains(&self.nodes.len()), tuple.checkpoint.id);
        self.nodes.push(node(&tuple));
        if is_shown {
            self.ids.push(id);
            self.wanted.extend(tuple.parent);
        } else {
            // All its children came before it, and nobody asks what they applied.
            self.family.applied.remove(&id);
        }
        if self.wanted.remove(&id) || is_shown {
            self.family.add(tuple);
        } else {
            self.family.note(&tuple);
        }
        Ok(())
    }

    /// The lines of those that are shown.
    pub(super) fn lines(&self) -> Vec<CheckpointLine> {
        let shown = self.ids.iter().filter_map(|id| self.family.by_id.get(id));
        shown.map(|tuple| self.family.line(tuple)).collect()
    }
}

fn node(tuple: &CheckpointTuple) -> Node {
    Node { id: tuple.checkpoint.id.to_string(), parent: tuple.parent.map(|id| id.to_string()) }
}

/// What checkpoints say about each other: the rows that a child applied are those of its parent.
#[derive(Default)]
pub(super) struct Family {
    pub(super) by_id: HashMap<CheckpointId, CheckpointTuple>,
    applied: HashMap<CheckpointId, HashSet<TaskId>>,
}

impl Family {
    /// Adds a checkpoint.
    pub(super) fn add(&mut self, tuple: CheckpointTuple) {
        self.note(&tuple);
        self.by_id.insert(tuple.checkpoint.id, tuple);
    }

    /// Notes what a checkpoint applied.
    fn note(&mut self, tuple: &CheckpointTuple) {
        if let Some(parent) = tuple.parent {
            self.applied.entry(parent).or_default().extend(&tuple.checkpoint.applied);
        }
    }

    /// A checkpoint that was added, as a line.
    pub(super) fn line(&self, tuple: &CheckpointTuple) -> CheckpointLine {
        let (checkpoint, metadata) = (&tuple.checkpoint, &tuple.metadata);
        let rows =
            tuple.parent.and_then(|parent| self.by_id.get(&parent)).map_or(&[][..], |parent| &parent.writes);
        let by = checkpoint.applied.iter().filter_map(|task| rows.iter().find(|row| row.task == *task));
        let applied = self.applied.get(&checkpoint.id);
        let is_pending = |task: &TaskId| applied.is_none_or(|applied| !applied.contains(task));
        let messages = ChannelName::from(MESSAGES_CHANNEL);
        let form = if metadata.is_duration_only() {
            "note"
        } else if !metadata.is_delta() || !checkpoint.channels.contains_key(&messages) {
            "full"
        } else if metadata.counters.contains_key(&messages) {
            "sentinel"
        } else {
            // The counters of a channel are absent where it has a snapshot.
            "snapshot"
        };
        CheckpointLine {
            id: checkpoint.id.to_string(),
            parent: tuple.parent.map(|id| id.to_string()),
            created_at: checkpoint.id.created_at(),
            by: by.map(|row| row.node.to_string()).collect(),
            source: format!("{:?}", metadata.source).to_lowercase(),
            step: metadata.step,
            run: metadata.extra.get(RUN_ID_KEY).and_then(Value::as_str).map(str::to_owned),
            form,
            pending: tuple.writes.iter().filter(|row| is_pending(&row.task)).count(),
            next: checkpoint.next.iter().map(ToString::to_string).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use async_trait::async_trait;
    use threadkeep::checkpoint::{Checkpoint, CheckpointKey, TaskWrites};
    use threadkeep::metadata::{Metadata, Source};
    use threadkeep::saver::{
        Capabilities, CheckpointSelector, DeltaHistory, Revision, Rewrite, StepCommit, ThreadImage,
    };
    use threadkeep_memory::MemorySaver;

    use super::*;

    /// Checkpoints newest first, each with two tasks; its parent is near or far, and it applied one or both of the parent's.
    fn tree_of(count: u8) -> Vec<CheckpointTuple> {
        let id = |n: u8| CheckpointId::from_bytes([n; 16]);
        let task = |n: u8, of: u8| TaskId::from_bytes([[n; 8], [of; 8]].concat().try_into().unwrap());
        let tuple = |n: u8| {
            let parent = (n > 0).then(|| if n.is_multiple_of(3) { n / 2 } else { n - 1 });
            let applied = parent.into_iter().flat_map(|parent| (0..=n % 2).map(move |of| task(parent, of)));
            let row = |of: u8| {
                let node = format!("node {n} {of}").as_str().into();
                TaskWrites { task: task(n, of), node, index: of.into(), writes: Vec::new() }
            };
            CheckpointTuple {
                thread: "t".into(),
                namespace: Namespace::root(),
                checkpoint: Checkpoint {
                    id: id(n),
                    channels: [].into(),
                    next: Vec::new(),
                    applied: applied.collect(),
                },
                parent: parent.map(id),
                metadata: Metadata::new(Source::Loop, n.into()),
                writes: (0..2).map(row).collect(),
            }
        };
        (0..count).rev().map(tuple).collect()
    }

    #[test]
    fn a_walk_shows_what_the_whole_thread_says() {
        let tuples = tree_of(60);
        let mut whole = Family::default();
        tuples.iter().cloned().for_each(|tuple| whole.add(tuple));
        for (offset, length) in (0..70).flat_map(|offset| [1, 7, 100].map(|length| (offset, length))) {
            let mut walk = Walk::showing(offset..offset + length);
            tuples.iter().cloned().for_each(|tuple| walk.add(tuple).unwrap());
            let expected: Vec<_> =
                tuples.iter().skip(offset).take(length).map(|tuple| whole.line(tuple)).collect();
            assert_eq!(format!("{:?}", walk.lines()), format!("{expected:?}"), "{length} from {offset}");
            assert_eq!(walk.nodes.len(), tuples.len());
            assert!(walk.family.by_id.len() <= 2 * length, "{} are held", walk.family.by_id.len());
        }
    }

    /// Rewrites the thread just before one of its lists.
    struct Rewritten {
        inner: MemorySaver,
        /// The lists until then.
        left: AtomicUsize,
        rewrite: Rewrite,
    }

    #[async_trait]
    impl Saver for Rewritten {
        async fn list(&self, query: &ListQuery) -> threadkeep::Result<Vec<CheckpointTuple>> {
            if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
                rewrite(&self.inner, self.rewrite.clone()).await;
            }
            self.inner.list(query).await
        }

        async fn get(&self, at: &CheckpointSelector) -> threadkeep::Result<Option<CheckpointTuple>> {
            self.inner.get(at).await
        }

        async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> threadkeep::Result<()> {
            self.inner.put_writes(at, task).await
        }

        async fn commit(&self, step: StepCommit) -> threadkeep::Result<CheckpointKey> {
            self.inner.commit(step).await
        }

        async fn flush(&self, thread: &ThreadId) -> threadkeep::Result<()> {
            self.inner.flush(thread).await
        }

        async fn delta_history(
            &self,
            at: &CheckpointKey,
            channels: &BTreeSet<ChannelName>,
            reach: Option<CheckpointId>,
        ) -> threadkeep::Result<DeltaHistory> {
            self.inner.delta_history(at, channels, reach).await
        }

        async fn delete_thread(&self, thread: &ThreadId) -> threadkeep::Result<()> {
            self.inner.delete_thread(thread).await
        }

        async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> threadkeep::Result<Vec<ThreadId>> {
            self.inner.threads(after, limit).await
        }

        async fn read_thread(&self, thread: &ThreadId) -> threadkeep::Result<ThreadImage> {
            self.inner.read_thread(thread).await
        }

        async fn rewrite_thread(
            &self,
            thread: &ThreadId,
            expected: &Revision,
            rewrite: Rewrite,
        ) -> threadkeep::Result<()> {
            self.inner.rewrite_thread(thread, expected, rewrite).await
        }

        fn capabilities(&self) -> Capabilities {
            self.inner.capabilities()
        }
    }

    async fn rewrite(saver: &MemorySaver, rewrite: Rewrite) {
        let revision = saver.read_thread(&"t".into()).await.unwrap().revision;
        saver.rewrite_thread(&"t".into(), &revision, rewrite).await.unwrap();
    }

    async fn filled(tuples: &[CheckpointTuple]) -> MemorySaver {
        let saver = MemorySaver::default();
        let put = tuples.iter().rev().cloned().collect();
        rewrite(&saver, Rewrite { put, ..Rewrite::default() }).await;
        saver
    }

    #[tokio::test]
    async fn a_thread_that_is_rewritten_while_it_is_read_is_shown_as_it_was_at_one_moment() {
        let tuples = tree_of(40);
        let parents: HashSet<_> = tuples.iter().filter_map(|tuple| tuple.parent).collect();
        let place = |tuple: &CheckpointTuple| (Namespace::root(), tuple.checkpoint.id);
        let is_leaf = |tuple: &&CheckpointTuple| !parents.contains(&tuple.checkpoint.id);
        let leaves = Rewrite { remove: tuples.iter().filter(is_leaf).map(place).collect(), put: Vec::new() };
        let (newer, older) = tuples.split_at(25);
        let gone: HashSet<_> = older.iter().map(|tuple| tuple.checkpoint.id).collect();
        let roots = newer.iter().filter(|tuple| tuple.parent.is_some_and(|parent| gone.contains(&parent)));
        let root = |tuple: &CheckpointTuple| {
            let mut root = tuple.clone();
            (root.parent, root.checkpoint.applied) = (None, Vec::new());
            root
        };
        let prune = Rewrite { remove: older.iter().map(place).collect(), put: roots.map(root).collect() };
        let mut newest = tree_of(41).remove(0);
        newest.parent = Some(tuples[0].checkpoint.id);
        newest.checkpoint.applied.clear();
        let more = Rewrite { put: vec![newest], ..Rewrite::default() };
        let thread = ThreadId::from("t");
        let seen = async |saver: &dyn Saver, read: usize| {
            let (walk, nested) = walked(saver, &thread, 3..20, read).await.unwrap();
            format!("{nested} {:?} {:?}", walk.nodes, walk.lines())
        };
        for change in [leaves, prune, more] {
            let whole = filled(&tuples).await;
            let before = seen(&whole, 1_000).await;
            rewrite(&whole, change.clone()).await;
            let after = seen(&whole, 1_000).await;
            assert_ne!(before, after);
            // Six pages and the summary, then one list.
            for left in 1..=9 {
                let (inner, rewrite) = (filled(&tuples).await, change.clone());
                let saver = Rewritten { inner, left: left.into(), rewrite };
                let found = seen(&saver, 7).await;
                assert!(found == before || found == after, "rewritten before list {left}: {found}");
            }
        }
    }
}

//! The contract's `summary`: one statement reads rows, and of the elements only those that hold names and small metadata.
//! And the size of a thread, which the server adds up.

use threadkeep::Result;
use threadkeep::id::{CheckpointId, TaskId, ThreadId};
use threadkeep::metadata::{Metadata, WRITES_KEY, may_be_duration_only};
use threadkeep::saver::{Counted, Counter, Summary};
use tokio_postgres::types::Type;

use crate::aside::aside;
use crate::element::{Elements, Space};
use crate::error::Trouble;
use crate::keys;
use crate::pool::Param;
use crate::read::{check_heads, namespace_of};
use crate::record::{CheckpointRecord, Extra, Rest};
use crate::rows::{Node, Snapshot, column};
use crate::store::Store;
use crate::view::extra;

impl Store {
    /// The contract's `summary`.
    pub(crate) async fn summary(&self, thread: &ThreadId) -> Result<Summary, Trouble> {
        let key = keys::of_thread(thread);
        let params: [Param<'_>; 1] = [(&key, Type::UUID)];
        let mut snapshot = self.snapshot(thread, &self.sql.outlines, &params).await?;
        let mut nodes = snapshot.nodes.values().flat_map(|nodes| nodes.values());
        if nodes.any(|node| node.record.extra.maps.iter().any(|(key, _)| key == WRITES_KEY)) {
            // So large that it is stored by entry, which that statement leaves out.
            snapshot = self.snapshot(thread, &self.sql.all, &params).await?;
        }
        let of = thread.clone();
        aside(snapshot.size(), move || counted(&of, &snapshot)).await
    }

    /// Bytes in the rows of a thread's checkpoints and elements, as they are stored.
    pub(crate) async fn stored_bytes(&self, thread: &ThreadId) -> Result<u64, Trouble> {
        let key = keys::of_thread(thread);
        let rows = self.query(&self.sql.stored, &[(&key, Type::UUID)]).await?;
        let bytes = rows.first().map(|row| column::<i64>(row, 0)).transpose()?;
        Ok(bytes.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or_default())
    }
}

fn counted(thread: &ThreadId, snapshot: &Snapshot) -> Result<Summary> {
    check_heads(thread, snapshot, None)?;
    let mut summary = Summary::new();
    for (ns, nodes) in &snapshot.nodes {
        let Some(namespace) = namespace_of(snapshot, ns) else { continue };
        let mut counter: Counter<CheckpointId, TaskId> = Counter::default();
        for Node { id, record, tasks } in nodes.values().rev() {
            let metadata = outline(record, &snapshot.elements)?;
            let counted = Counted {
                place: *id,
                id: *id,
                parent: record.parent,
                applied: record.applied.clone(),
                tasks: tasks.iter().map(|task| task.task).collect(),
                writes: tasks.iter().map(|task| task.writes.len()).sum(),
                delta: metadata.is_delta(),
                note: metadata.is_duration_only(),
                step: record.step,
            };
            counter.add(thread, counted)?;
        }
        summary.extend(counter.summary(thread)?.map(|chain| (namespace.clone(), chain)));
    }
    Ok(summary)
}

/// What a summary says of the metadata of a checkpoint.
fn outline(record: &CheckpointRecord, elements: &Elements) -> Result<Metadata> {
    let mut metadata = Metadata::new(record.source, record.step);
    (metadata.delta_marker, metadata.counters) = (record.delta_marker, record.counters.clone());
    let Extra { rest, maps } = &record.extra;
    let maps: Vec<_> = maps.iter().filter(|(key, _)| key == WRITES_KEY).cloned().collect();
    let may = match rest {
        Rest::Empty => false,
        Rest::Inline(bytes) => may_be_duration_only(bytes),
        Rest::Shared(n) => may_be_duration_only(elements.get(Space::Structure, *n)?.bytes()),
    };
    if may || !maps.is_empty() {
        metadata.extra = extra(&Extra { rest: rest.clone(), maps }, elements)?;
    }
    Ok(metadata)
}

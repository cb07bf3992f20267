//! What deletions remove. What a remaining checkpoint's delta channels are replayed from stays; a checkpoint whose parent goes is
//! grafted onto its nearest remaining ancestor. A gateway's that restores the state of one that goes names the nearest
//! remaining one that that one continued.

use std::collections::{BTreeMap, BTreeSet};

use threadkeep::deletion::{Lineage, RUN_ID_KEY};
use threadkeep::id::CheckpointId;
use threadkeep::metadata::RESTORED_KEY;
use threadkeep::saver::{LocalKey, Rewrite, ThreadImage};

use crate::task::{self, Author};

/// Keeps the newest checkpoint of each namespace.
pub(crate) fn keep_latest(image: &ThreadImage) -> Rewrite {
    let heads = Lineage::new(image).heads().into_iter().collect();
    keeping(image, &heads)
}

/// Removes what these runs made.
pub(crate) fn without_runs(image: &ThreadImage, runs: &BTreeSet<String>) -> Rewrite {
    let others = image.checkpoints.iter().filter(|(_, tuple)| {
        let run = tuple.metadata.extra.get(RUN_ID_KEY).and_then(serde_json::Value::as_str);
        run.is_none_or(|run| !runs.contains(run))
    });
    let others = others.map(|(place, _)| place.clone()).collect();
    keeping(image, &others)
}

/// Whether a thread has only these checkpoints, and under each only writes of these tasks.
pub(crate) fn is_part_of(image: &ThreadImage, put: &BTreeMap<LocalKey, BTreeSet<String>>) -> bool {
    image.checkpoints.iter().all(|(place, tuple)| {
        put.get(place).is_some_and(|tasks| {
            let is_theirs = |(author, _): (Author, _)| tasks.contains(&author.task);
            tuple.writes.iter().all(|row| task::author(row).is_ok_and(is_theirs))
        })
    })
}

fn keeping(image: &ThreadImage, wanted: &BTreeSet<LocalKey>) -> Rewrite {
    let lineage = Lineage::new(image);
    let keep = lineage.replay_closure(wanted);
    let nearest = |of: &LocalKey| {
        let mut ancestors = lineage.lineage(of).map(|tuple| tuple.checkpoint.id);
        ancestors.find(|id| keep.contains(&(of.0.clone(), *id)))
    };
    let left = lineage.left_of(|at| !keep.contains(at));
    let mut rewrite = Rewrite::default();
    for (place, tuple) in &image.checkpoints {
        if !keep.contains(place) {
            rewrite.remove.insert(place.clone());
            continue;
        }
        let going = |id: CheckpointId| {
            let at = (place.0.clone(), id);
            (image.checkpoints.contains_key(&at) && !keep.contains(&at)).then_some(at)
        };
        let parent = lineage.parent(tuple).and_then(|parent| going(parent.checkpoint.id));
        // Where nothing is left of what it restored, the name says so.
        let restored = tuple.metadata.restored().and_then(|id| left.get(&(place.0.clone(), id)));
        let restored = restored.filter(|_| parent.is_some() || lineage.is_whole(tuple));
        if parent.is_none() && restored.is_none() {
            continue;
        }
        let mut grafted = tuple.clone();
        if let Some(parent) = parent {
            grafted.parent = nearest(&parent);
            // Its rows went with its parent. It stores its values: a checkpoint that does not keeps its parent.
            grafted.checkpoint.applied.clear();
        }
        if let Some(restored) = restored {
            grafted.metadata.extra.insert(RESTORED_KEY.to_owned(), restored.to_string().into());
        }
        rewrite.put.push(grafted);
    }
    rewrite
}

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};
    use threadkeep::checkpoint::{Checkpoint, CheckpointTuple};
    use threadkeep::id::{Namespace, TaskId, ThreadId};
    use threadkeep::metadata::{Metadata, Source};
    use threadkeep::saver::Outline;

    use super::*;

    #[test]
    fn a_damaged_checkpoint_that_restores_a_removed_one_stays_as_it_is() {
        let (thread, namespace) = (ThreadId::from("t"), Namespace::root());
        let id = |n: u8| CheckpointId::from_bytes([n; 16]);
        let tuple = |n: u8, parent: Option<u8>, applied: Vec<TaskId>, extra: Json| CheckpointTuple {
            thread: thread.clone(),
            namespace: namespace.clone(),
            checkpoint: Checkpoint { id: id(n), channels: BTreeMap::new(), next: Vec::new(), applied },
            parent: parent.map(id),
            metadata: Metadata {
                extra: extra.as_object().unwrap().clone().into(),
                ..Metadata::new(Source::Loop, n.into())
            },
            writes: Vec::new(),
        };
        let task = TaskId::from_bytes([7; 16]);
        let restores = json!({ RESTORED_KEY: id(2).to_string() });
        // Its parent is there, or is missing, or is there without the row that it applied.
        for (parent, applied, put) in [(1, vec![], vec![id(4)]), (3, vec![], vec![]), (1, vec![task], vec![])]
        {
            let mut image = ThreadImage::absent(&thread);
            for tuple in [
                tuple(1, None, Vec::new(), json!({})),
                tuple(2, Some(1), Vec::new(), json!({ RUN_ID_KEY: "r" })),
                tuple(4, Some(parent), applied, restores.clone()),
            ] {
                image.checkpoints.insert((namespace.clone(), tuple.checkpoint.id), tuple);
            }
            let rewrite = without_runs(&image, &BTreeSet::from(["r".to_owned()]));
            assert_eq!(rewrite.remove, BTreeSet::from([(namespace.clone(), id(2))]));
            assert_eq!(rewrite.put.iter().map(|tuple| tuple.checkpoint.id).collect::<Vec<_>>(), put);
            assert!(rewrite.put.iter().all(|tuple| tuple.metadata.restored() == Some(id(1))));
            let stored = image.checkpoints.iter().map(|(at, tuple)| (at.clone(), Outline::of(tuple)));
            rewrite.check(&thread, stored.collect()).unwrap();
        }
    }
}

//! What deletions remove. What a remaining checkpoint's delta channels are replayed from stays; a checkpoint whose parent goes is
//! grafted onto its nearest remaining ancestor.

use std::collections::{BTreeMap, BTreeSet};

use threadkeep::deletion::{Lineage, RUN_ID_KEY};
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
    let mut rewrite = Rewrite::default();
    for (place, tuple) in &image.checkpoints {
        if !keep.contains(place) {
            rewrite.remove.insert(place.clone());
            continue;
        }
        let Some(parent) = tuple.parent else { continue };
        if keep.contains(&(place.0.clone(), parent)) || lineage.parent(tuple).is_none() {
            continue;
        }
        let mut grafted = tuple.clone();
        let ancestors = lineage.lineage(place).skip(1);
        grafted.parent =
            ancestors.map(|tuple| tuple.checkpoint.id).find(|id| keep.contains(&(place.0.clone(), *id)));
        // Its rows went with its parent. It stores its values: a checkpoint that does not keeps its parent.
        grafted.checkpoint.applied.clear();
        rewrite.put.push(grafted);
    }
    rewrite
}

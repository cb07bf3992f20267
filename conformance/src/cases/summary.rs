//! [`threadkeep::saver::Saver::summary`].

use serde_json::{Map, Value as Json, json};
use threadkeep::id::{CheckpointId, Namespace};
use threadkeep::metadata::DURATION_NODE;
use threadkeep::saver::{ChainSummary, Summary};

use super::rewrite::{removing, rewrite, tree};
use crate::case::{Case, Outcome, case, check_eq};
use crate::factory::Store;
use crate::kit::{MESSAGES, Step, id, plain, task, write};

pub(super) const CASES: &[Case] =
    &[case!(Core, summary_counts_everything, "an operator would prune the wrong thread, or none")];

/// A chain with no checkpoint of delta mode and no note, whose head has step 0.
fn chain(
    checkpoints: u64,
    [roots, leaves]: [u64; 2],
    [rows, pending, writes]: [u64; 3],
    [first, head]: [CheckpointId; 2],
) -> ChainSummary {
    ChainSummary {
        checkpoints,
        delta: 0,
        notes: 0,
        roots,
        leaves,
        rows,
        pending,
        writes,
        first,
        head,
        step: 0,
    }
}

async fn summary_counts_everything(store: Store) -> Outcome {
    let saver = store.open().await?;
    check_eq!(saver.summary(&"t".into()).await?, Summary::new(), "of an unknown thread");
    let tree = tree(&*saver).await?;
    Step::first("t2", 1).value("title", plain("another thread")?).commit(&*saver).await?;
    // Four tasks ran, each for one checkpoint, and one is pending.
    let root = ChainSummary { step: 5, ..chain(5, [1, 2], [5, 1, 5], [id(1), id(5)]) };
    let nested = ChainSummary { step: 1, ..chain(1, [1, 1], [0, 0, 0], [id(1), id(1)]) };
    let expected: Summary = [(Namespace::root(), root.clone()), ("nested".into(), nested.clone())].into();
    check_eq!(saver.summary(&"t".into()).await?, expected, "of a thread with a fork and another namespace");

    // A row with two writes that a sibling applied is not pending; one that nobody applied, with a part of it, is.
    let [.., third, fourth, fifth] = &tree.keys[..] else { return Ok(()) };
    let two = task(7, [write(MESSAGES, plain(1)?), write("title", plain("t")?)]);
    let mut six = Step::fork(third, fifth, 6).sentinel(MESSAGES).held("title", 1).runs(two.clone());
    six.commit.metadata.delta_marker = true;
    let six = six.commit(&*saver).await?;
    saver.put_writes(third, &task(8, two.writes)).await?;
    // What names the node of a note elsewhere is none.
    let seven = Step::after(&six, 7).held(MESSAGES, 6).held("title", 1);
    let seven = seven.meta("run_id", DURATION_NODE.into()).commit(&*saver).await?;
    let note = json!({ DURATION_NODE: { "seconds": 1 } });
    let eight = Step::after(&seven, 8).held(MESSAGES, 6).held("title", 1);
    let eight = eight.meta("writes", note).meta("run_id", "r".into()).commit(&*saver).await?;
    // Some savers store a map of many entries by entry.
    let mut large: Map<String, Json> = (0..40).map(|n| (format!("node {n}"), json!(n))).collect();
    let nine = Step::after(&eight, 9).held(MESSAGES, 6).held("title", 1);
    let nine = nine.meta("writes", large.clone().into()).commit(&*saver).await?;
    large.insert(DURATION_NODE.to_owned(), json!({}));
    let ten = Step::after(&nine, 10).held(MESSAGES, 6).held("title", 1);
    ten.meta("writes", large.into()).commit(&*saver).await?;
    let root = ChainSummary { delta: 1, notes: 2, step: 10, ..chain(10, [1, 3], [7, 2, 9], [id(1), id(10)]) };
    let expected: Summary = [(Namespace::root(), root.clone()), ("nested".into(), nested)].into();
    check_eq!(saver.summary(&"t".into()).await?, expected, "of one with notes and two pending rows");

    // The fork and the nested namespace go.
    rewrite(&*saver, "t", removing([fourth, &tree.nested])).await?;
    let root = ChainSummary { checkpoints: 9, leaves: 2, pending: 3, ..root };
    check_eq!(saver.summary(&"t".into()).await?, [(Namespace::root(), root)].into(), "after a rewrite");
    saver.delete_thread(&"t".into()).await?;
    check_eq!(saver.summary(&"t".into()).await?, Summary::new(), "of a thread that is gone");
    Ok(())
}

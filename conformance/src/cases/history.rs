//! [`threadkeep::saver::Saver::delta_history`].

use std::collections::BTreeSet;

use threadkeep::checkpoint::{CheckpointKey, ERROR_CHANNEL, INTERRUPT_CHANNEL, Write};
use threadkeep::id::CheckpointId;
use threadkeep::saver::{ChannelHistory, HistoryStep, Saver, Seed};
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};

use crate::case::{Case, Failure, Outcome, case, check, check_eq};
use crate::factory::{Damage, Store};
use crate::kit::{
    MESSAGES, Step, channels, id, key, list, not_found, path, plain, says, task, task_id, version, write,
};

pub(super) const CASES: &[Case] = &[
    case!(
        Delta,
        history_replays_only_applied_writes,
        "a checkpoint would contain what never happened on its line"
    ),
    case!(Delta, history_stops_at_the_nearest_value, "a read would walk to the root, or apply writes twice"),
    case!(Delta, history_reaches_back_as_far_as_asked, "a page of history would need a call for each entry"),
    case!(
        Delta,
        history_of_a_never_written_channel_has_no_seed_and_no_writes,
        "an unwritten channel would be taken for damage"
    ),
    case!(
        Delta,
        history_with_a_missing_ancestor_is_broken_lineage,
        "a damaged thread would look like a short one",
        needs LoseCheckpoint
    ),
    case!(
        Delta,
        history_with_missing_writes_is_broken_lineage,
        "a damaged thread would look like a short one",
        needs LoseWrites
    ),
    case!(
        Delta,
        history_with_a_sentinel_at_the_root_is_broken_lineage,
        "a damaged thread would look like an empty one",
        needs LoseParentLink
    ),
    case!(
        Delta,
        history_of_an_unknown_checkpoint_is_not_found,
        "a deleted checkpoint would look like an empty one"
    ),
    case!(
        Delta,
        history_of_several_channels_keeps_them_apart,
        "one channel's snapshot would cut another one short"
    ),
];

/// Steps, each with the number of tasks that it applied and its writes.
fn steps<const N: usize>(steps: [(u16, usize, Vec<Write>); N]) -> Vec<HistoryStep> {
    steps.into_iter().map(|(n, tasks, writes)| HistoryStep { checkpoint: id(n), tasks, writes }).collect()
}

fn seed(n: u16, value: ChannelValue) -> Seed {
    Seed { checkpoint: id(n), value, version: version(n) }
}

fn append(text: &str) -> Result<Write> {
    Ok(write(MESSAGES, list([text])?))
}

async fn history_replays_only_applied_writes(store: Store) -> Outcome {
    let saver = store.open().await?;
    let root = Step::first("t", 1).snapshot(MESSAGES, list(["seed"])?).commit(&*saver).await?;
    // Under the root: what one child applied, what its sibling applied, and what no child applied.
    saver.put_writes(&root, &says(1, "pending")?).await?;
    saver.put_writes(&root, &says(2, "two")?).await?;
    let busy = task(
        3,
        [
            append("three")?,
            write("title", plain("not messages")?),
            write(INTERRUPT_CHANNEL, plain("special")?),
            append("three again")?,
            write(ERROR_CHANNEL, plain("special")?),
        ],
    );
    let left = Step::after(&root, 2).sentinel(MESSAGES).runs(busy).applies(2).commit(&*saver).await?;
    let right = Step::fork(&root, &left, 3).sentinel(MESSAGES).runs(says(4, "four")?).applies(2);
    let right = right.brings(says(5, "failed")?).commit(&*saver).await?;
    saver.put_writes(&root, &says(6, "late")?).await?;

    let seed = Some(seed(1, list(["seed"])?));
    let expected = steps([(2, 2, vec![append("three")?, append("three again")?, append("two")?])]);
    let got = path(&*saver, &left, None).await?;
    check_eq!(got, ChannelHistory { seed: seed.clone(), steps: expected }, "the left child");
    let expected = steps([(3, 2, vec![append("four")?, append("two")?])]);
    let got = path(&*saver, &right, None).await?;
    check_eq!(got, ChannelHistory { seed, steps: expected }, "the right child");
    let special = saver.delta_history(&left, &channels([ERROR_CHANNEL]), None).await?;
    let nothing = ChannelHistory { seed: None, steps: vec![] };
    check_eq!(
        special.get(ERROR_CHANNEL),
        Some(&nothing),
        "the channel of errors, which no checkpoint stores"
    );
    Ok(())
}

async fn history_stops_at_the_nearest_value(store: Store) -> Outcome {
    let saver = store.open().await?;
    let one = Step::first("t", 1).snapshot(MESSAGES, list(["1"])?).commit(&*saver).await?;
    let two = Step::after(&one, 2).sentinel(MESSAGES).runs(says(2, "2")?).commit(&*saver).await?;
    let three = Step::after(&two, 3).snapshot(MESSAGES, list(["1", "2", "3"])?).runs(says(3, "3")?);
    let three = three.commit(&*saver).await?;
    let four = Step::after(&three, 4).sentinel(MESSAGES).runs(says(4, "4")?).commit(&*saver).await?;
    let five = Step::after(&four, 5).held(MESSAGES, 4).commit(&*saver).await?;
    let six = Step::after(&five, 6).value(MESSAGES, list(["6"])?).runs(says(6, "6")?).commit(&*saver).await?;
    let seven = Step::after(&six, 7).held(MESSAGES, 6).commit(&*saver).await?;
    let eight = Step::after(&seven, 8).sentinel(MESSAGES).runs(says(8, "8")?).commit(&*saver).await?;

    let snapshot = list(["1", "2", "3"])?;
    for (at, expected_seed, expected) in [
        (one, seed(1, list(["1"])?), steps([])),
        (two, seed(1, list(["1"])?), steps([(2, 1, vec![append("2")?])])),
        (three, seed(3, snapshot.clone()), steps([])),
        (four, seed(3, snapshot.clone()), steps([(4, 1, vec![append("4")?])])),
        (five, seed(3, snapshot), steps([(4, 1, vec![append("4")?]), (5, 0, vec![])])),
        (six, seed(6, list(["6"])?), steps([])),
        // A held value is stored there, too.
        (seven, Seed { checkpoint: id(7), value: list(["6"])?, version: version(6) }, steps([])),
        (
            eight,
            Seed { checkpoint: id(7), value: list(["6"])?, version: version(6) },
            steps([(8, 1, vec![append("8")?])]),
        ),
    ] {
        let expected = ChannelHistory { seed: Some(expected_seed), steps: expected };
        check_eq!(path(&*saver, &at, None).await?, expected, "at {}", at.id);
    }
    Ok(())
}

/// Nine checkpoints: snapshots at 1, 4 and 7, sentinels between; each applies one write.
async fn cadence(saver: &dyn Saver) -> Result<Vec<CheckpointKey>, Failure> {
    let mut keys = vec![Step::first("t", 1).snapshot(MESSAGES, list(["1"])?).commit(saver).await?];
    for n in 2..=9_u16 {
        let step = Step::after(&keys[keys.len() - 1], n).runs(says(n, &n.to_string())?);
        let all: Vec<String> = (1..=n).map(|n| n.to_string()).collect();
        let step = if n % 3 == 1 { step.snapshot(MESSAGES, plain(all)?) } else { step.sentinel(MESSAGES) };
        keys.push(step.commit(saver).await?);
    }
    Ok(keys)
}

async fn history_reaches_back_as_far_as_asked(store: Store) -> Outcome {
    let saver = store.open().await?;
    let keys = cadence(&*saver).await?;
    let between = CheckpointId::from_bytes({
        let mut bytes = *id(5).as_bytes();
        bytes[15] = 0xff;
        bytes
    });
    for (at, reach, expected_seed) in [
        (9, None, 7),
        (9, Some(id(9)), 7),
        (9, Some(id(8)), 7),
        (9, Some(id(7)), 7),
        (9, Some(id(6)), 4),
        (9, Some(between), 4),
        (9, Some(id(4)), 4),
        (9, Some(id(3)), 1),
        (9, Some(id(1)), 1),
        (7, Some(id(7)), 7),
        (7, Some(id(6)), 4),
        (6, Some(id(9)), 4),
        (2, Some(id(2)), 1),
    ] {
        let got = path(&*saver, &keys[at - 1], reach).await?;
        let seeds: Vec<String> = (1..=expected_seed).map(|n: u16| n.to_string()).collect();
        let at = u16::try_from(at)?;
        let expected: Result<Vec<_>> = (expected_seed + 1..=at)
            .map(|n| Ok(HistoryStep { checkpoint: id(n), tasks: 1, writes: vec![append(&n.to_string())?] }))
            .collect();
        let expected = ChannelHistory { seed: Some(seed(expected_seed, plain(seeds)?)), steps: expected? };
        check_eq!(got, expected, "from {at} with reach {reach:?}");
    }
    Ok(())
}

async fn history_of_a_never_written_channel_has_no_seed_and_no_writes(store: Store) -> Outcome {
    let saver = store.open().await?;
    let one = Step::first("t", 1).value("title", plain("t")?).commit(&*saver).await?;
    let two = Step::after(&one, 2).held("title", 1).runs(task(1, [write("title", plain("x")?)]));
    let two = two.commit(&*saver).await?;
    for at in [&one, &two] {
        let nothing = ChannelHistory { seed: None, steps: vec![] };
        check_eq!(path(&*saver, at, None).await?, nothing, "messages at {}", at.id);
        let none = saver.delta_history(at, &BTreeSet::new(), None).await?;
        check_eq!(none.len(), 0, "paths when no channel is asked for");
    }
    // After the first write there is a path, and it starts where the channel did not exist yet.
    let three = Step::after(&two, 3).sentinel(MESSAGES).runs(says(3, "first")?).commit(&*saver).await?;
    let four = Step::after(&three, 4).held(MESSAGES, 3).commit(&*saver).await?;
    for reach in [None, Some(one.id)] {
        let expected =
            ChannelHistory { seed: None, steps: steps([(3, 1, vec![append("first")?]), (4, 0, vec![])]) };
        check_eq!(path(&*saver, &four, reach).await?, expected, "the path of a first write, reach {reach:?}");
    }
    Ok(())
}

/// Damages a thread of [`cadence`] and fails unless exactly the paths that need the lost rows are refused.
async fn broken(
    store: Store,
    damage: Damage,
    refused: &[(u16, Option<u16>)],
    fine: &[(u16, Option<u16>)],
) -> Outcome {
    let saver = store.open().await?;
    cadence(&*saver).await?;
    drop(saver);
    store.damage(damage).await?;

    let saver = store.open().await?;
    for (at, reach) in refused {
        let got = path(&*saver, &key("t", id(*at)), reach.map(id)).await;
        check!(
            matches!(&got, Err(Error::BrokenLineage { thread, .. }) if thread.as_str() == "t"),
            "expected BrokenLineage from {at} with reach {reach:?}, got {got:?}"
        );
    }
    for (at, reach) in fine {
        let got = path(&*saver, &key("t", id(*at)), reach.map(id)).await?;
        check!(
            got.seed.is_some(),
            "the path from {at} with reach {reach:?} needs nothing that is gone: {got:?}"
        );
    }
    Ok(())
}

async fn history_with_a_missing_ancestor_is_broken_lineage(store: Store) -> Outcome {
    let gone = Damage::LoseCheckpoint(key("t", id(5)));
    broken(store, gone, &[(6, None), (9, Some(6)), (9, Some(1))], &[(9, None), (7, None), (4, Some(1))]).await
}

async fn history_with_missing_writes_is_broken_lineage(store: Store) -> Outcome {
    // Checkpoint 5 applied task 5, whose writes are under checkpoint 4.
    let gone = Damage::LoseWrites(key("t", id(4)), task_id(5));
    broken(store, gone, &[(5, None), (6, None), (9, Some(4))], &[(9, None), (4, Some(1))]).await
}

async fn history_with_a_sentinel_at_the_root_is_broken_lineage(store: Store) -> Outcome {
    let gone = Damage::LoseParentLink(key("t", id(5)));
    broken(store, gone, &[(5, None), (6, None), (9, Some(6))], &[(9, None), (4, Some(1))]).await
}

async fn history_of_an_unknown_checkpoint_is_not_found(store: Store) -> Outcome {
    let saver = store.open().await?;
    let root = Step::first("t", 1).snapshot(MESSAGES, list(["a"])?).commit(&*saver).await?;
    for at in [
        key("t", id(2)),
        key("t", id(0)),
        key("u", id(1)),
        CheckpointKey { namespace: "nested".into(), ..root },
    ] {
        for channels in [channels([MESSAGES]), BTreeSet::new()] {
            let got = saver.delta_history(&at, &channels, None).await;
            check_eq!(got, not_found(&at), "the history of {at:?}");
        }
    }
    Ok(())
}

async fn history_of_several_channels_keeps_them_apart(store: Store) -> Outcome {
    let saver = store.open().await?;
    let note = |text| -> Result<Write> { Ok(write("notes", list([text])?)) };
    let one = Step::first("t", 1).snapshot(MESSAGES, list(["1"])?).commit(&*saver).await?;
    let two = Step::after(&one, 2).snapshot("notes", list(["n2"])?).held(MESSAGES, 1);
    let two = two.runs(task(2, [note("n2")?])).commit(&*saver).await?;
    let three = Step::after(&two, 3).sentinel("notes").sentinel(MESSAGES);
    let three = three.runs(task(3, [note("n3")?, append("3")?])).runs(task(4, [append("3b")?]));
    let three = three.commit(&*saver).await?;
    let four = Step::after(&three, 4).held("notes", 3).snapshot(MESSAGES, list(["1", "3", "3b", "4"])?);
    let four = four.runs(says(5, "4")?).commit(&*saver).await?;

    let got = saver.delta_history(&four, &channels(["notes", MESSAGES, "other"]), None).await?;
    let expected = [
        (MESSAGES, ChannelHistory { seed: Some(seed(4, list(["1", "3", "3b", "4"])?)), steps: vec![] }),
        (
            "notes",
            ChannelHistory {
                seed: Some(seed(2, list(["n2"])?)),
                steps: steps([(3, 2, vec![note("n3")?]), (4, 1, vec![])]),
            },
        ),
        ("other", ChannelHistory { seed: None, steps: vec![] }),
    ];
    check_eq!(got, expected.map(|(name, path)| (name.into(), path)).into(), "three channels in one call");
    let got = saver.delta_history(&four, &channels(["notes", MESSAGES]), Some(id(3))).await?;
    let at_two = Some(Seed { checkpoint: id(2), value: list(["1"])?, version: version(1) });
    let expected = [
        (
            MESSAGES,
            ChannelHistory {
                seed: at_two,
                steps: steps([(3, 2, vec![append("3")?, append("3b")?]), (4, 1, vec![append("4")?])]),
            },
        ),
        (
            "notes",
            ChannelHistory {
                seed: Some(seed(2, list(["n2"])?)),
                steps: steps([(3, 2, vec![note("n3")?]), (4, 1, vec![])]),
            },
        ),
    ];
    check_eq!(got, expected.map(|(name, path)| (name.into(), path)).into(), "reaching further back");
    Ok(())
}

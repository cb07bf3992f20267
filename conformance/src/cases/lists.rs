//! Lists that name the stored list they were made from ([`threadkeep::value::ListValue::base`]): a saver may store only
//! what is new, but must read back the whole list.

use serde_json::json;
use threadkeep::checkpoint::{CheckpointKey, Stored};
use threadkeep::id::Version;
use threadkeep::saver::Saver;
use threadkeep::value::{Element, ListValue};

use crate::case::{Case, Outcome, case, check_eq};
use crate::factory::Store;
use crate::kit::{MESSAGES, Step, get, message, messages, path, stored, task, version, write};

pub(super) const CASES: &[Case] = &[
    case!(Core, list_edits_on_a_base_read_back_equal, "an edited or removed message would come back"),
    case!(Core, list_bases_may_be_old, "a snapshot after ten sentinels would miss what they wrote"),
    case!(Core, list_bases_may_be_on_another_branch, "a regenerated answer would carry the old one along"),
    case!(
        Core,
        list_bases_are_told_by_their_version,
        "an answer would be stored under the messages of another conversation"
    ),
    case!(
        Core,
        list_bases_that_the_store_does_not_hold_do_no_harm,
        "a state that is copied to another thread or store would lose its messages"
    ),
    case!(Core, list_bases_hold_in_writes_too, "a compaction that keeps the last messages would lose them"),
    case!(Core, lists_with_equal_elements_keep_each_of_them, "of two equal messages one would be lost"),
];

/// Commits `list` under a new version on top of `last`, and declares it held, as the engine does.
async fn keep(saver: &dyn Saver, last: &mut Option<CheckpointKey>, n: u16, list: &mut ListValue) -> Outcome {
    let step = match &*last {
        None => Step::first("t", n),
        Some(last) => Step::after(last, n),
    };
    let stored = if n.is_multiple_of(2) { Stored::Value } else { Stored::Snapshot };
    let step = step.store(MESSAGES, version(n), stored(list.clone().into()));
    let key = step.commit(saver).await?;
    list.rebase(version(n));
    check_eq!(get(saver, &key).await?, Some(step.tuple([])), "the list of step {n}, just committed");
    *last = Some(key);
    Ok(())
}

async fn list_edits_on_a_base_read_back_equal(store: Store) -> Outcome {
    let saver = store.open().await?;
    let mut list = messages(0..40)?;
    let mut last = None;
    let mut kept: Vec<ListValue> = Vec::new();
    for n in 1..=12_u16 {
        match n {
            2 => list.push(message("m40", "appended")?),
            3 => list.replace(0, message("m0", "the first, edited")?),
            4 => list.replace(40, message("m40", "the last, edited")?),
            5 => list.remove(20),
            6 => {
                list.remove(0);
                list.remove(list.len() - 1);
            }
            7 => {
                list.replace(10, message("m11", "edited")?);
                list.remove(11);
                list.push(message("m50", "new")?);
                list.push(message("m51", "new")?);
                list.remove(5);
                list.replace(list.len() - 1, message("m51", "new, edited")?);
            }
            9 => {
                while !list.is_empty() {
                    list.remove(list.len() / 2);
                }
            }
            11 => list = messages(0..3)?,
            // Unchanged at a new version, and empty on an empty base.
            8 | 10 => {}
            _ => list.push(message("m3", "after a new beginning")?),
        }
        keep(&*saver, &mut last, n, &mut list).await?;
        kept.push(list.clone());
    }
    for (n, list) in (1..).zip(kept) {
        let key = crate::kit::key("t", crate::kit::id(n));
        let got = stored(&*saver, &key, MESSAGES).await?.and_then(|stored| stored.value().cloned());
        check_eq!(got, Some(list.into()), "the list of step {n}, after all steps");
    }
    Ok(())
}

async fn list_bases_may_be_old(store: Store) -> Outcome {
    let saver = store.open().await?;
    let mut list = messages(0..10)?;
    let mut last = None;
    keep(&*saver, &mut last, 1, &mut list).await?;
    // Ten steps of delta mode: nothing is held, so the base stays the snapshot.
    for n in 2..=11_u16 {
        let Some(parent) = &last else { continue };
        let new = message(&format!("s{n}"), "said in delta mode")?;
        let row = task(n, [write(MESSAGES, [new.clone()].into_iter().collect::<ListValue>().into())]);
        list.push(new);
        if n == 6 {
            list.replace(3, message("m3", "edited in delta mode")?);
        }
        last = Some(Step::after(parent, n).sentinel(MESSAGES).runs(row).commit(&*saver).await?);
    }
    check_eq!(list.base(), Some(version(1)), "the base before the snapshot");
    keep(&*saver, &mut last, 12, &mut list).await?;
    list.push(message("m13", "after the second snapshot")?);
    keep(&*saver, &mut last, 13, &mut list).await
}

async fn list_bases_may_be_on_another_branch(store: Store) -> Outcome {
    let saver = store.open().await?;
    let mut list = messages(0..5)?;
    let mut last = None;
    keep(&*saver, &mut last, 1, &mut list).await?;
    let Some(root) = last.clone() else { return Ok(()) };
    list.push(message("left", "only on the left branch")?);
    keep(&*saver, &mut last, 2, &mut list).await?;
    let Some(left) = last else { return Ok(()) };
    // The right branch starts from the root, and has a list that was made from the left one.
    list.remove(5);
    list.push(message("right", "only on the right branch")?);
    let right = Step::fork(&root, &left, 3).value(MESSAGES, list.clone().into());
    let right_key = right.commit(&*saver).await?;
    check_eq!(get(&*saver, &right_key).await?, Some(right.tuple([])), "the right branch");
    list.rebase(version(3));
    list.push(message("more", "further on the right branch")?);
    let more = Step::after(&right_key, 4).snapshot(MESSAGES, list.into());
    let more_key = more.commit(&*saver).await?;
    check_eq!(get(&*saver, &more_key).await?, Some(more.tuple([])), "further on the right branch");
    Ok(())
}

/// The parent holds another list than the base, as long as the base or longer: only its version tells them apart.
async fn list_bases_are_told_by_their_version(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (thread, others) in [("alike", 100..103), ("longer", 100..110)] {
        let mut base = messages(0..3)?;
        let first = Step::first(thread, 1).value(MESSAGES, base.clone().into());
        let root = first.commit(&*saver).await?;
        base.rebase(version(1));
        let second =
            Step::after(&root, 2).store(MESSAGES, version(2), Stored::Value(messages(others)?.into()));
        let parent = second.commit(&*saver).await?;
        base.push(message("m3", "on the older list")?);
        let third = Step::after(&parent, 3).value(MESSAGES, base.into());
        let key = third.commit(&*saver).await?;
        check_eq!(
            get(&*saver, &key).await?,
            Some(third.tuple([])),
            "the list whose base is older than its parent's"
        );
        check_eq!(get(&*saver, &parent).await?, Some(second.tuple([])), "its parent");
    }
    Ok(())
}

async fn list_bases_that_the_store_does_not_hold_do_no_harm(store: Store) -> Outcome {
    let saver = store.open().await?;
    let mut list = messages(0..20)?;
    let mut last = None;
    keep(&*saver, &mut last, 1, &mut list).await?;
    list.push(message("m20", "the branch point")?);

    // In another thread, in another namespace, and after the thread with the base was deleted.
    let foreign = Step::first("u", 2).value(MESSAGES, list.clone().into());
    let nested = Step::first("t", 2).namespace("nested").snapshot(MESSAGES, list.clone().into());
    for step in [&foreign, &nested] {
        let key = step.commit(&*saver).await?;
        check_eq!(get(&*saver, &key).await?, Some(step.tuple([])), "with the base in another place: {key:?}");
    }
    saver.delete_thread(&"t".into()).await?;
    let anew = Step::first("t", 2).value(MESSAGES, list.clone().into());
    let key = anew.commit(&*saver).await?;
    check_eq!(get(&*saver, &key).await?, Some(anew.tuple([])), "with the base deleted");

    // From a different store.
    list.rebase(Version { counter: 77, random: 77 });
    list.remove(3);
    list.push(message("m21", "from elsewhere")?);
    let next = Step::after(&key, 3).snapshot(MESSAGES, list.into());
    let key = next.commit(&*saver).await?;
    check_eq!(get(&*saver, &key).await?, Some(next.tuple([])), "with a base that was never here");
    Ok(())
}

async fn list_bases_hold_in_writes_too(store: Store) -> Outcome {
    let saver = store.open().await?;
    let mut list = messages(0..30)?;
    let mut last = None;
    keep(&*saver, &mut last, 1, &mut list).await?;
    let Some(root) = last else { return Ok(()) };
    // A compaction overwrites the channel with the tail of its list.
    for _ in 0..25 {
        list.remove(0);
    }
    list.push(message("summary", "what was said before")?);
    let mut compaction = write(MESSAGES, list.clone().into());
    compaction.overwrite = true;
    let row = task(1, [compaction.clone()]);
    saver.put_writes(&root, &row).await?;
    let two = Step::after(&root, 2).sentinel(MESSAGES).applies(1).commit(&*saver).await?;
    check_eq!(get(&*saver, &root).await?.map(|tuple| tuple.writes), Some(vec![row]), "the task writes");
    let steps = path(&*saver, &two, None).await?.steps;
    check_eq!(steps.first().map(|step| &step.writes), Some(&vec![compaction]), "the write in the history");
    let three = Step::after(&two, 3).snapshot(MESSAGES, list.into());
    let key = three.commit(&*saver).await?;
    check_eq!(get(&*saver, &key).await?, Some(three.tuple([])), "the snapshot after it");
    Ok(())
}

async fn lists_with_equal_elements_keep_each_of_them(store: Store) -> Outcome {
    let saver = store.open().await?;
    let same = Element::from_json(&json!("same"))?;
    let mut list: ListValue = vec![same.clone(); 5].into_iter().collect();
    let mut last = None;
    keep(&*saver, &mut last, 1, &mut list).await?;
    list.push(same.clone());
    list.push(Element::from_json(&json!("other"))?);
    list.push(same.clone());
    keep(&*saver, &mut last, 2, &mut list).await?;
    list.remove(0);
    list.push(same.clone());
    keep(&*saver, &mut last, 3, &mut list).await?;
    let fresh: Vec<Element> = ["other", "same", "same", "other"]
        .into_iter()
        .map(|text| Element::from_json(&json!(text)))
        .collect::<Result<_, _>>()?;
    let mut fresh: ListValue = fresh.into_iter().collect();
    keep(&*saver, &mut last, 4, &mut fresh).await?;
    // Elements that other elements contain, and the same bytes as a plain value.
    let mut nested: ListValue = [json!(["same"]), json!([["same"]]), json!([]), json!("same"), json!(null)]
        .iter()
        .map(Element::from_json)
        .collect::<Result<_, _>>()?;
    keep(&*saver, &mut last, 5, &mut nested).await
}

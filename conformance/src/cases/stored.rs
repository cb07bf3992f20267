//! What a store takes on its medium, and what it does when that was changed under it.

use threadkeep::Error;
use threadkeep::checkpoint::CheckpointKey;
use threadkeep::saver::{CheckpointSelector, Rewrite};
use threadkeep::value::{Element, ListValue};

use crate::case::{Case, Failure, Outcome, case, check, check_eq};
use crate::factory::{Damage, Store};
use crate::kit::{MESSAGES, Step, get, id, key, scatter};

pub(super) const CASES: &[Case] = &[
    case!(
        Core,
        equal_elements_are_stored_once,
        "a conversation would take the square of its length",
        needs SharedElements
    ),
    case!(
        Deletion,
        freed_space_is_free,
        "a store whose threads are pruned and deleted would grow for ever",
        needs StoredBytes
    ),
    case!(
        Durability,
        a_changed_byte_is_corruption,
        "a disk that changes a byte would change what was said",
        needs ChangeByte
    ),
];

/// The number of elements of a list here, and the bytes of each.
const ELEMENTS: u64 = 64;
const SIZE: usize = 4096;

/// Elements that no compression makes much smaller; other ones for another seed.
fn elements(seed: u64) -> Result<ListValue, Failure> {
    let element = |n: u64| {
        let mut state = seed * 1_000 + n;
        let mut text = String::with_capacity(SIZE);
        while text.len() < SIZE {
            state = scatter(state);
            text.extend(state.to_be_bytes().map(|byte| char::from(b' ' + byte % 90)));
        }
        Element::from_json(&text.into())
    };
    Ok((0..ELEMENTS).map(element).collect::<Result<_, _>>()?)
}

const ALL: u64 = ELEMENTS * SIZE as u64;

async fn equal_elements_are_stored_once(store: Store) -> Outcome {
    const CHECKPOINTS: u16 = 16;
    let saver = store.open().await?;
    let mut last: Option<CheckpointKey> = None;
    let mut one = 0;
    for n in 1..=CHECKPOINTS {
        // Without a base: what is equal is found by its content.
        let list: ListValue =
            elements(1)?.iter().chain(elements(1 + u64::from(n))?.iter().take(1)).cloned().collect();
        let step = last.as_ref().map_or_else(|| Step::first("t", n), |last| Step::after(last, n));
        last = Some(step.value(MESSAGES, list.into()).commit(&*saver).await?);
        if n == 1 {
            one = store.stored_bytes().await?;
        }
    }
    let all = store.stored_bytes().await?;
    let more = all.saturating_sub(one);
    let unshared = u64::from(CHECKPOINTS - 1) * ALL;
    check!(
        more < unshared / 4,
        "{} checkpoints with the same {ELEMENTS} elements and a new one took {more} bytes more than one; their lists have {unshared}",
        CHECKPOINTS - 1
    );
    Ok(())
}

async fn freed_space_is_free(store: Store) -> Outcome {
    let saver = store.open().await?;
    Step::first("u", 1).commit(&*saver).await?;
    let empty = store.stored_bytes().await?;
    let freed = |before: u64, after: u64, what: &str| -> Outcome {
        let (took, left) = (before.saturating_sub(empty), after.saturating_sub(empty));
        check!(left < took / 4, "{what}: {took} bytes before, {left} afterwards");
        Ok(())
    };
    // The older checkpoint's elements are its own.
    let first = Step::first("t", 1).value(MESSAGES, elements(1)?.into()).commit(&*saver).await?;
    let mut second = Step::after(&first, 2).value(MESSAGES, ListValue::default().into());
    second.commit(&*saver).await?;
    let before = store.stored_bytes().await?;
    check!(before > empty + ALL / 2, "{ALL} bytes were stored in {} bytes", before - empty);
    second.commit.parent = None;
    let image = saver.read_thread(&first.thread).await?;
    let rewrite = Rewrite {
        remove: [(first.namespace.clone(), first.id)].into_iter().collect(),
        put: vec![second.tuple([])],
    };
    saver.rewrite_thread(&first.thread, &image.revision, rewrite).await?;
    freed(before, store.stored_bytes().await?, "after a rewrite that removed the only user of its elements")?;

    let second = second.commit.key();
    Step::after(&second, 3).value(MESSAGES, elements(2)?.into()).commit(&*saver).await?;
    let before = store.stored_bytes().await?;
    saver.delete_thread(&second.thread).await?;
    freed(before, store.stored_bytes().await?, "after the thread was deleted")
}

async fn a_changed_byte_is_corruption(store: Store) -> Outcome {
    let saver = store.open().await?;
    let first = Step::first("t", 1).value(MESSAGES, elements(1)?.into());
    first.commit(&*saver).await?;
    let second = Step::after(&key("t", id(1)), 2).value(MESSAGES, elements(2)?.into());
    let second_key = second.commit(&*saver).await?;
    drop(saver);
    store.damage(Damage::ChangeByte(second_key.clone())).await?;
    let saver = store.open().await?;
    let read = saver.get(&CheckpointSelector::at(&second_key)).await;
    check!(matches!(read, Err(Error::Corrupt { .. })), "reading what was changed gave {}", told(&read));
    let image = saver.read_thread(&second_key.thread).await;
    check!(matches!(image, Err(Error::Corrupt { .. })), "reading the whole thread gave {}", told(&image));
    check_eq!(
        get(&*saver, &key("t", id(1))).await?,
        Some(first.tuple([])),
        "the checkpoint that was not changed"
    );
    Ok(())
}

/// Not with the values, which are long.
fn told<T>(read: &Result<T, Error>) -> String {
    match read {
        Ok(_) => "a value".to_owned(),
        Err(error) => format!("{error:?}"),
    }
}

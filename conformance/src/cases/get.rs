//! [`threadkeep::saver::Saver::get`].

use serde_json::json;
use threadkeep::Result;
use threadkeep::checkpoint::{CheckpointTuple, Stored};
use threadkeep::id::CheckpointId;
use threadkeep::metadata::{Counters, Source};
use threadkeep::saver::{CheckpointSelector, ListQuery, Load, Rewrite};
use threadkeep::value::{ChannelValue, Codec, Element, Encoded, ListValue};

use crate::case::{Case, Outcome, case, check_eq};
use crate::factory::Store;
use crate::kit::{MESSAGES, Step, channels, get, head, id, key, list, plain, says, task, version, write};

pub(super) const CASES: &[Case] = &[
    case!(Core, get_head_is_the_greatest_id, "a thread would continue from an old state"),
    case!(Core, get_by_id_is_exact, "a client that names a checkpoint would get the state of another one"),
    case!(Core, get_unknown_is_none, "a deleted or mistyped id would show somebody else's state"),
    case!(Core, get_returns_what_was_committed, "a resumed run would not be in the state it left"),
    case!(
        Core,
        get_loads_what_was_asked,
        "a value that was not loaded would be taken for one that was never written"
    ),
    case!(
        Core,
        get_includes_writes_in_stored_order,
        "finished tasks would run again, or be applied in another order"
    ),
    case!(Core, namespaces_are_separate, "a nested graph would overwrite the state of its parent"),
];

async fn get_head_is_the_greatest_id(store: Store) -> Outcome {
    let saver = store.open().await?;
    // The first byte crosses the middle of its range: ids compare as unsigned bytes. The last one is a fork.
    let bytes = [0x01_u8, 0x7f, 0x80, 0xfe, 0xff];
    for (n, byte) in bytes.into_iter().enumerate() {
        let before = n.checked_sub(1).map(|n| CheckpointId::from_bytes([bytes[n]; 16]));
        let mut step = Step::first("t", 1).value("n", plain(byte)?);
        step.commit.checkpoint.id = CheckpointId::from_bytes([byte; 16]);
        step.commit.parent = if byte == 0xff { Some(CheckpointId::from_bytes([0x01; 16])) } else { before };
        step.commit.expected_head = before;
        step.commit(&*saver).await?;
        check_eq!(head(&*saver, "t").await?, Some(step.tuple([])), "the head after commit {n}");
    }
    Ok(())
}

async fn get_by_id_is_exact(store: Store) -> Outcome {
    let saver = store.open().await?;
    let one = Step::first("t", 10).value("n", plain(1)?);
    let two = Step::after(&one.commit(&*saver).await?, 20).value("n", plain(2)?);
    let three = Step::after(&two.commit(&*saver).await?, 30).value("n", plain(3)?);
    three.commit(&*saver).await?;
    for step in [&one, &two, &three] {
        let key = step.commit.key();
        check_eq!(get(&*saver, &key).await?, Some(step.tuple([])), "checkpoint {}", key.id);
    }
    for n in [9, 11, 19, 21, 31] {
        check_eq!(get(&*saver, &key("t", id(n))).await?, None, "an id next to those that are there");
    }
    Ok(())
}

async fn get_unknown_is_none(store: Store) -> Outcome {
    let saver = store.open().await?;
    check_eq!(head(&*saver, "t").await?, None, "the head of a thread in an empty store");
    check_eq!(get(&*saver, &key("t", id(1))).await?, None, "an id in an empty store");

    let there = Step::first("t", 1).value("n", plain(1)?).commit(&*saver).await?;
    check_eq!(head(&*saver, "u").await?, None, "the head of a thread that does not exist");
    check_eq!(get(&*saver, &key("u", there.id)).await?, None, "the id of another thread");
    let nested = CheckpointSelector { namespace: "nested".into(), ..CheckpointSelector::head(&there.thread) };
    check_eq!(saver.get(&nested).await?, None, "the head of a namespace that does not exist");
    let nested = CheckpointSelector { id: Some(there.id), ..nested };
    check_eq!(saver.get(&nested).await?, None, "the id of another namespace");
    Ok(())
}

async fn get_returns_what_was_committed(store: Store) -> Outcome {
    let saver = store.open().await?;
    let mut first = Step::first("t", 1)
        .value("title", plain("Tides")?)
        .snapshot(MESSAGES, list(["hello"])?)
        .meta("writes", json!({"input": {"text": "hello"}}));
    first.commit.metadata.source = Source::Input;
    first.commit.metadata.step = -1;
    let root = first.commit(&*saver).await?;

    let tasks =
        [task(5, [write(MESSAGES, list(["a"])?)]), task(4, []), task(3, [write("title", plain("Ebb")?)])];
    let mut second = Step::after(&root, 2)
        .value("title", plain("Ebb")?)
        .sentinel(MESSAGES)
        .snapshot("notes", list([])?)
        .runs(tasks[0].clone())
        .runs(tasks[1].clone())
        .runs(tasks[2].clone());
    second.commit.checkpoint.next = vec!["tools".into(), "model".into(), "tools".into()];
    let metadata = &mut second.commit.metadata;
    metadata.source = Source::Fork;
    metadata.step = 7;
    metadata.delta_marker = true;
    metadata.counters.insert(MESSAGES.into(), Counters { updates: 1, supersteps: 3 });
    metadata.parents.insert("".into(), id(77));
    metadata.parents.insert("tools:5".into(), id(78));
    second.commit(&*saver).await?;

    check_eq!(get(&*saver, &root).await?, Some(first.tuple(tasks)), "the first checkpoint");
    check_eq!(head(&*saver, "t").await?, Some(second.tuple([])), "the second checkpoint");

    // Values are bytes, as channels, as elements of a list and in the writes of a task.
    let values = OPAQUE.iter().map(|bytes| opaque(bytes)).collect::<Result<Vec<_>>>()?;
    let elements: ListValue = OPAQUE.iter().map(|bytes| Element::from_bytes(bytes.to_vec().into())).collect();
    let mut third = Step::after(&second.commit.key(), 3).snapshot("elements", elements.into());
    for (n, value) in values.iter().enumerate() {
        third = third.value(&format!("value {n}"), value.clone());
    }
    let third_key = third.commit(&*saver).await?;
    let row = task(6, values.into_iter().map(|value| write("title", value)).collect::<Vec<_>>());
    saver.put_writes(&third_key, &row).await?;
    check_eq!(get(&*saver, &third_key).await?, Some(third.tuple([row])), "values that are no JSON");
    Ok(())
}

/// MessagePack that no JSON expresses, or that JSON expresses in other bytes.
const OPAQUE: [&[u8]; 13] = [
    // The value of a channel that has none, bytes, a time, and an object of LangGraph's, shown as `{"id": "x"}`.
    &[0xc7, 0, 84],
    &[0xc4, 3, 0x00, 0xff, 0x80],
    &[0xd6, 0xff, 0, 0, 0, 1],
    &[0xc7, 11, 5, 0x93, 0xa1, b'm', 0xa1, b'C', 0x81, 0xa2, b'i', b'd', 0xa1, b'x'],
    // Keys that are not sorted, a key that is there twice, and one that is a number.
    &[0x82, 0xa1, b'b', 1, 0xa1, b'a', 2],
    &[0x82, 0xa1, b'a', 1, 0xa1, b'a', 2],
    &[0x81, 1, 0xa1, b'x'],
    // 1.5 in four bytes, no number, minus zero, and one: as a float, as an integer, and in more bytes than it needs.
    &[0xca, 0x3f, 0xc0, 0, 0],
    &[0xcb, 0x7f, 0xf8, 0, 0, 0, 0, 0, 0],
    &[0xcb, 0x80, 0, 0, 0, 0, 0, 0, 0],
    &[0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0],
    &[1],
    &[0xcd, 0, 1],
];

fn opaque(bytes: &[u8]) -> Result<ChannelValue> {
    ChannelValue::from_encoded(Encoded { codec: Codec::MessagePack, bytes: bytes.to_vec().into() })
}

async fn get_loads_what_was_asked(store: Store) -> Outcome {
    let saver = store.open().await?;
    let root = Step::first("t", 1).snapshot(MESSAGES, list(["a"])?).commit(&*saver).await?;
    let step = Step::after(&root, 2)
        .sentinel(MESSAGES)
        .value("title", plain("Tides")?)
        .snapshot("notes", list(["n"])?)
        .store("todos", version(9), Stored::Value(list(["t"])?));
    let at = CheckpointSelector::at(&step.commit(&*saver).await?);
    saver.put_writes(&step.commit.key(), &says(1, "pending")?).await?;

    // What is loaded equals what was stored; the rest is held, and keeps its version.
    let expected = |loaded: &[&str]| -> CheckpointTuple {
        let mut tuple = step.tuple([]);
        for (name, entry) in &mut tuple.checkpoint.channels {
            if !loaded.contains(&name.as_str()) {
                entry.stored = Stored::Held;
            }
        }
        tuple
    };
    for loaded in [vec![], vec!["title"], vec![MESSAGES, "notes"], vec!["todos", "title"]] {
        let only = loaded.iter().map(|name| (*name).into()).collect();
        let mut tuple = saver.get(&at.clone().loading(Load::Only(only))).await?;
        if let Some(tuple) = &mut tuple {
            check_eq!(tuple.writes, [says(1, "pending")?], "task writes, with some channels loaded");
            tuple.writes.clear();
        }
        check_eq!(tuple, Some(expected(&loaded)), "with {loaded:?} loaded");
    }
    let unknown = Load::Only(channels(["never written"]));
    let tuple = saver.get(&at.clone().loading(unknown)).await?;
    check_eq!(
        tuple.map(|tuple| tuple.checkpoint),
        Some(expected(&[]).checkpoint),
        "with only a channel loaded that the checkpoint does not have"
    );
    // Lineage, metadata and the task writes come with any load.
    let bare = CheckpointTuple { writes: vec![says(1, "pending")?], ..expected(&[]) };
    let head = CheckpointSelector::head(&at.thread).loading(Load::None);
    check_eq!(saver.get(&head).await?.as_ref(), Some(&bare), "the head with nothing loaded");
    let newest = ListQuery { limit: Some(1), load: Load::None, ..ListQuery::new(&at.thread) };
    check_eq!(saver.list(&newest).await?, [bare], "a list with nothing loaded");
    Ok(())
}

async fn get_includes_writes_in_stored_order(store: Store) -> Outcome {
    let saver = store.open().await?;
    let first = Step::first("t", 1);
    let root = first.commit(&*saver).await?;
    let mut rows = Vec::new();
    for n in [3, 1, 2] {
        let mut row = says(n, &format!("task {n}"))?;
        row.index = 10 - u32::from(n);
        saver.put_writes(&root, &row).await?;
        rows.push(row);
        check_eq!(get(&*saver, &root).await?, Some(first.tuple(rows.clone())), "after putting task {n}");
    }
    rows.extend([task(6, []), says(5, "task 5")?]);
    let child = Step::after(&root, 2).applies(1).runs(rows[4].clone());
    let mut child = child.applies(6).applies(3);
    child.commit.writes.insert(0, rows[3].clone());
    child.commit(&*saver).await?;
    check_eq!(
        get(&*saver, &root).await?,
        Some(first.tuple(rows)),
        "with the writes that came with the commit"
    );
    check_eq!(head(&*saver, "t").await?, Some(child.tuple([])), "the child has no writes under it");
    Ok(())
}

async fn namespaces_are_separate(store: Store) -> Outcome {
    let saver = store.open().await?;
    // Names that begin alike, or that a collation takes for equal.
    let names = ["", "nested", "nested|deeper", "nested:", "Nested", "nested ", "nest", "n%", "nested\u{0}"];
    let mut steps = Vec::new();
    for name in names {
        let first = Step::first("t", 1).namespace(name).value("who", plain(format!("1 of {name:?}"))?);
        let root = first.commit(&*saver).await?;
        let row = says(1, name)?;
        saver.put_writes(&root, &row).await?;
        let second = Step::after(&root, 2).value("who", plain(format!("2 of {name:?}"))?);
        second.commit(&*saver).await?;
        steps.push((name, row, first, second));
    }
    for (name, row, first, second) in steps {
        let at =
            |id| CheckpointSelector { id, namespace: name.into(), ..CheckpointSelector::head(&"t".into()) };
        let first = first.tuple([row]);
        check_eq!(
            saver.get(&at(Some(id(1)))).await?,
            Some(first.clone()),
            "the first checkpoint of {name:?}"
        );
        check_eq!(saver.get(&at(None)).await?, Some(second.tuple([])), "the head of {name:?}");
        let only = ListQuery { namespace: Some(name.into()), ..ListQuery::new(&"t".into()) };
        check_eq!(saver.list(&only).await?, [second.tuple([]), first], "the list of {name:?}");
    }
    // One of them is removed.
    let image = saver.read_thread(&"t".into()).await?;
    let gone = |name: &str| name == "nested";
    let places = image.checkpoints.keys().filter(|(namespace, _)| gone(namespace.as_str())).cloned();
    let rewrite = Rewrite { remove: places.collect(), put: Vec::new() };
    saver.rewrite_thread(&"t".into(), &image.revision, rewrite).await?;
    for name in names {
        let only = ListQuery { namespace: Some(name.into()), ..ListQuery::new(&"t".into()) };
        let left = saver.list(&only).await?.len();
        check_eq!(left, if gone(name) { 0 } else { 2 }, "what is left of {name:?} without \"nested\"");
    }
    Ok(())
}

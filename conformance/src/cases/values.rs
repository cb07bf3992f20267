//! Unusual ids, texts, values and metadata: everything legal must survive.

use serde_json::{Value as Json, json};
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, Stored, TaskWrites, Write};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, TaskId, Version};
use threadkeep::metadata::Counters;
use threadkeep::saver::{CheckpointSelector, ListQuery, Load, Revision, Rewrite};
use threadkeep::value::ChannelValue;

use crate::case::{Case, Outcome, case, check, check_eq};
use crate::factory::Store;
use crate::kit::{
    MESSAGES, Step, channels, dump, get, id, list, path, plain, replayed, says, scatter, stored, task,
    version, write,
};

pub(super) const CASES: &[Case] = &[
    case!(
        Core,
        odd_texts_survive,
        "an id with a quote, a NUL byte or an emoji would hit other rows, or none"
    ),
    case!(Core, extreme_ids_and_versions_survive, "a number beyond the signed range would change"),
    case!(Core, odd_metadata_survives, "what a client stored beside a checkpoint would change"),
    case!(Core, large_values_survive, "a long message would be cut off"),
    case!(Core, many_tasks_survive, "of a step with many tasks some would run again"),
    case!(Core, null_and_empty_values_are_values, "a channel that was emptied would count as never written"),
    case!(Core, kinds_of_storage_may_differ_at_one_version, "a snapshot would turn into a sentinel, or back"),
    case!(
        Core,
        equal_versions_elsewhere_are_other_values,
        "channels written in one step share a version; one would get the value of another"
    ),
    case!(Core, held_values_survive_many_generations, "a title would be lost after a hundred turns"),
];

/// Texts that break quoting, patterns, terminated strings, collations or normalisation.
const ODD: [&str; 19] = [
    "",
    " ",
    "a",
    "A",
    "a ",
    "a\u{0}",
    "a\u{0}b",
    "'; DROP TABLE checkpoints; --",
    "\"quoted\" \\ back\\slash",
    "100%_",
    "line\nbreak\ttab\r",
    "a.b",
    "$set",
    "../a/b:c*",
    "\u{e9}",
    "e\u{301}",
    "\u{1f9f5}\u{200d}\u{1f4dc} \u{202e}right to left",
    "null",
    "{\"json\": [1, 2]}",
];

async fn odd_texts_survive(store: Store) -> Outcome {
    let saver = store.open().await?;
    // Each text is a thread, a namespace in it, a channel, a node, a value and an element. They all differ, so each
    // must find its own rows.
    let long = "k\u{f6}nigsallee-".repeat(150);
    // They differ only at their ends.
    let (longer, other) = (format!("{long}a"), format!("{long}b"));
    let texts: Vec<&str> = ODD.into_iter().chain([&*long, &*longer, &*other]).collect();
    let mut steps = Vec::new();
    for text in &texts {
        let mut first = Step::first(text, 1).namespace(text);
        for (n, channel) in texts.iter().enumerate() {
            first = first.value(channel, plain(format!("{n} of {text}"))?);
        }
        first.commit.checkpoint.next = texts.iter().map(|text| (*text).into()).collect();
        let root = first.commit(&*saver).await?;
        let mut row = task(1, [write(text, plain(*text)?), write(MESSAGES, list([text, "", text])?)]);
        row.node = (*text).into();
        saver.put_writes(&root, &row).await?;
        steps.push((*text, first, row));
    }
    for (text, first, row) in steps {
        let expected = first.tuple([row]);
        check_eq!(get(&*saver, &first.commit.key()).await?, Some(expected.clone()), "thread {text:?}");
        let at = CheckpointSelector {
            namespace: text.into(),
            load: Load::Only(channels([text])),
            ..CheckpointSelector::head(&text.into())
        };
        let value = saver.get(&at).await?.and_then(|tuple| {
            tuple.checkpoint.channels.get(text).and_then(|entry| entry.stored.value().cloned())
        });
        let whole = expected.checkpoint.channels.get(text).and_then(|entry| entry.stored.value().cloned());
        check_eq!(value, whole, "channel {text:?} of thread {text:?}, loaded alone");
        let namespaces: Vec<Namespace> =
            dump(&*saver, text).await?.into_iter().map(|tuple| tuple.namespace).collect();
        check_eq!(namespaces, [Namespace::new(text)], "the namespaces of thread {text:?}");
    }
    Ok(())
}

async fn extreme_ids_and_versions_survive(store: Store) -> Outcome {
    let saver = store.open().await?;
    let ids = [[0x00; 16], [0x7f; 16], [0x80; 16], [0xff; 16]];
    let numbers = [0, i64::MAX.unsigned_abs(), i64::MAX.unsigned_abs() + 1, u64::MAX];
    let mut last: Option<CheckpointKey> = None;
    let mut expected = Vec::new();
    for (bytes, number) in ids.into_iter().zip(numbers) {
        let counter = numbers.iter().map(|n| (format!("c{n}"), Version { counter: *n, random: number }));
        let mut step = match &last {
            None => Step::first("t", 1),
            Some(last) => Step::after(last, 1),
        };
        for (channel, version) in counter {
            step = step.store(&channel, version, Stored::Value(plain(format!("{channel} {number}"))?));
        }
        step.commit.checkpoint.id = CheckpointId::from_bytes(bytes);
        if let Some(last) = &last {
            let mut row = says(1, "x")?;
            row.task = TaskId::from_bytes(bytes);
            row.index = if bytes[0] == 0xff { u32::MAX } else { 0x8000_0000 };
            saver.put_writes(last, &row).await?;
            step.commit.checkpoint.applied = vec![row.task];
            if let Some((_, rows)) = expected.last_mut() {
                *rows = vec![row];
            }
        }
        last = Some(step.commit(&*saver).await?);
        expected.push((step, Vec::<TaskWrites>::new()));
    }
    for (step, rows) in expected {
        let at = step.commit.key();
        check_eq!(get(&*saver, &at).await?, Some(step.tuple(rows)), "checkpoint {}", at.id);
    }
    Ok(())
}

async fn odd_metadata_survives(store: Store) -> Outcome {
    let saver = store.open().await?;
    let mut deep = json!("the bottom");
    for level in 0..100 {
        deep = if level % 2 == 0 { json!([deep]) } else { json!({ "deeper": deep }) };
    }
    let odd: serde_json::Map<String, Json> =
        ODD.iter().map(|text| ((*text).to_owned(), json!(text))).collect();
    let mut step = Step::first("t", 1)
        .meta("deep", deep)
        .meta("odd", Json::Object(odd))
        .meta("numbers", json!([0, -1, i64::MIN, i64::MAX, u64::MAX, 0.5, -2.25e10, 1.0]))
        .meta("nothing", json!({"null": null, "list": [], "map": {}, "text": ""}))
        .meta("long", json!("x".repeat(100_000)));
    for text in ODD {
        step = step.meta(&format!("key {text}"), json!(text));
        step.commit.metadata.parents.insert(text.into(), id(9));
        step.commit.metadata.counters.insert(text.into(), Counters { updates: 1 << 40, supersteps: 0 });
    }
    step.commit.metadata.step = i64::MAX;
    let other = Step::after(&step.commit(&*saver).await?, 2);
    other.commit(&*saver).await?;

    check_eq!(
        get(&*saver, &step.commit.key()).await?,
        Some(step.tuple([])),
        "the checkpoint with odd metadata"
    );
    let keys = ["deep", "odd", "numbers", "nothing", "key a.b", "key $set", "key a\u{0}b"];
    for key in keys.into_iter().chain(["key '; DROP TABLE checkpoints; --"]) {
        let mut query = ListQuery::new(&"t".into());
        query.filter.insert(key.to_owned(), step.commit.metadata.extra[key].clone());
        check_eq!(saver.list(&query).await?, [step.tuple([])], "filtered by {key:?}");
    }
    Ok(())
}

async fn large_values_survive(store: Store) -> Outcome {
    let saver = store.open().await?;
    let text = (0..20_000).map(|n| scatter(n).to_string()).collect::<Vec<_>>().join(" ");
    let many: Vec<Json> =
        (0..5_000).map(|n| json!({"id": format!("m{n}"), "content": format!("number {n}")})).collect();
    let step = Step::first("t", 1)
        .value("text", plain(text.clone())?)
        .value("map", plain(json!({"key": text, "list": many}))?)
        .snapshot("elements", plain(many.clone())?)
        .snapshot("one element", list([&text])?)
        .snapshot("empty elements", plain(vec![""; 70_000])?);
    let root = step.commit(&*saver).await?;
    let row = task(1, [write(MESSAGES, plain(many)?), write(MESSAGES, list([&text, "", &text])?)]);
    saver.put_writes(&root, &row).await?;
    let got = get(&*saver, &root).await?;
    // Compared in parts, by size and equality, because a difference should not print megabytes.
    for (name, entry) in &step.commit.checkpoint.channels {
        let got = got.as_ref().and_then(|tuple| tuple.checkpoint.channels.get(name));
        let sizes = [got, Some(entry)]
            .map(|entry| entry.and_then(|entry| entry.stored.value()).map(ChannelValue::encoded_len));
        check_eq!(sizes[0], sizes[1], "the size of channel {name}");
        check!(got == Some(entry), "channel {name} has its size and differs in content");
    }
    check!(got.is_some_and(|tuple| tuple.writes == [row]), "the task writes differ");
    Ok(())
}

/// More rows than a store returns, or changes, in one request if nobody asks for the next page.
async fn many_tasks_survive(store: Store) -> Outcome {
    const TASKS: u16 = 1_100;
    let saver = store.open().await?;
    let root = Step::first("t", 1).snapshot(MESSAGES, list([])?).commit(&*saver).await?;
    let mut step = Step::after(&root, 2).sentinel(MESSAGES);
    for n in 0..TASKS {
        step = step.runs(says(n, &n.to_string())?);
    }
    let key = step.commit(&*saver).await?;
    let rows = |tuple: &CheckpointTuple| tuple.writes.clone();
    let expected = &step.commit.writes;
    // Compared by number and equality, because a difference should not print all of them.
    let whole = |found: Option<Vec<TaskWrites>>, what: &str| -> Outcome {
        check_eq!(found.as_ref().map(Vec::len), Some(expected.len()), "the number of rows of {what}");
        check!(found.as_ref() == Some(expected), "the rows of {what} differ");
        Ok(())
    };
    whole(get(&*saver, &root).await?.as_ref().map(rows), "get")?;
    whole(dump(&*saver, "t").await?.last().map(rows), "list")?;
    let image = saver.read_thread(&root.thread).await?;
    whole(image.checkpoints.values().next().map(rows), "read_thread")?;
    let said: Vec<String> = (0..TASKS).map(|n| n.to_string()).collect();
    check!(replayed(&*saver, &key).await? == json!(said), "the messages of all tasks differ");
    let applied = get(&*saver, &key).await?.map(|tuple| tuple.checkpoint.applied);
    check!(applied == Some(step.commit.checkpoint.applied), "the applied tasks differ");
    let put = image.checkpoints.into_values().map(|tuple| CheckpointTuple { thread: "u".into(), ..tuple });
    let copy = Rewrite { put: put.collect(), ..Rewrite::default() };
    saver.rewrite_thread(&"u".into(), &Revision::absent(), copy).await?;
    whole(dump(&*saver, "u").await?.last().map(rows), "a copy")
}

async fn null_and_empty_values_are_values(store: Store) -> Outcome {
    let saver = store.open().await?;
    let values =
        [json!(null), json!([]), json!({}), json!(""), json!(0), json!(false), json!([null]), json!([[]])];
    let mut first = Step::first("t", 1);
    let mut writes: Vec<Write> = Vec::new();
    for (n, value) in values.iter().enumerate() {
        first = first.value(&format!("value {n}"), plain(value.clone())?);
        first = first.snapshot(&format!("snapshot {n}"), plain(value.clone())?);
        writes.push(write(MESSAGES, plain(value.clone())?));
        writes.push(Write { overwrite: true, ..write(MESSAGES, plain(value.clone())?) });
    }
    let root = first.commit(&*saver).await?;
    let row = task(1, writes);
    saver.put_writes(&root, &row).await?;
    check_eq!(get(&*saver, &root).await?, Some(first.tuple([row])), "the checkpoint");
    let names: Vec<&str> = first.commit.checkpoint.channels.keys().map(ChannelName::as_str).collect();
    let mut next = Step::after(&root, 2);
    for name in names {
        next = next.held(name, 1);
    }
    let next = next.commit(&*saver).await?;
    let held = get(&*saver, &next).await?.map(|tuple| tuple.checkpoint.channels);
    check_eq!(held, Some(first.commit.checkpoint.channels.clone()), "held over by a child");
    Ok(())
}

async fn kinds_of_storage_may_differ_at_one_version(store: Store) -> Outcome {
    let saver = store.open().await?;
    // A snapshot that falls due in a step which did not write the channel comes at an unchanged version; so does a
    // sentinel behind a value when a thread changes from full mode to delta mode.
    let value = list(["a", "b"])?;
    let kinds = [
        Stored::Value(value.clone()),
        Stored::Sentinel,
        Stored::Snapshot(value.clone()),
        Stored::Sentinel,
        Stored::Value(value.clone()),
        Stored::Snapshot(value),
    ];
    let mut steps: Vec<Step> = Vec::new();
    for (n, kind) in (1..).zip(&kinds) {
        let step = match steps.last() {
            None => Step::first("t", n),
            Some(last) => Step::after(&last.commit.key(), n),
        };
        let step = step.store(MESSAGES, version(1), kind.clone());
        step.commit(&*saver).await?;
        steps.push(step);
    }
    for (step, kind) in steps.iter().zip(&kinds) {
        let at = step.commit.key();
        check_eq!(stored(&*saver, &at, MESSAGES).await?.as_ref(), Some(kind), "at {}", at.id);
        check_eq!(replayed(&*saver, &at).await?, json!(["a", "b"]), "replayed at {}", at.id);
        let nearest = if *kind == Stored::Sentinel { step.commit.parent } else { Some(at.id) };
        let seed = path(&*saver, &at, None).await?.seed.map(|seed| seed.checkpoint);
        check_eq!(seed, nearest, "the seed at {}", at.id);
    }
    Ok(())
}

async fn equal_versions_elsewhere_are_other_values(store: Store) -> Outcome {
    let saver = store.open().await?;
    let mut steps = Vec::new();
    for thread in ["t", "u"] {
        for namespace in ["", "nested"] {
            let mut step = Step::first(thread, 1).namespace(namespace);
            for channel in ["a", "b", "c"] {
                let text = format!("{channel} of {thread}/{namespace}");
                step = step
                    .value(channel, plain(text.clone())?)
                    .snapshot(&format!("list {channel}"), list([&text])?);
            }
            step.commit(&*saver).await?;
            steps.push(step);
        }
    }
    for step in &steps {
        let at = step.commit.key();
        check_eq!(get(&*saver, &at).await?, Some(step.tuple([])), "{at:?}");
    }
    saver.delete_thread(&"t".into()).await?;
    for step in &steps[2..] {
        let at = step.commit.key();
        check_eq!(get(&*saver, &at).await?, Some(step.tuple([])), "{at:?} after deleting the other thread");
    }
    // One of two namespaces is deleted, with only its own values.
    let [left, going] = [&steps[2], &steps[3]].map(|step| step.commit.key());
    let image = saver.read_thread(&going.thread).await?;
    let remove = [(going.namespace.clone(), going.id)].into();
    let rewrite = Rewrite { remove, put: Vec::new() };
    saver.rewrite_thread(&going.thread, &image.revision, rewrite).await?;
    check_eq!(get(&*saver, &going).await?, None, "{going:?} after its deletion");
    check_eq!(get(&*saver, &left).await?, Some(steps[2].tuple([])), "{left:?} after deleting the other one");
    Ok(())
}

async fn held_values_survive_many_generations(store: Store) -> Outcome {
    let saver = store.open().await?;
    let first = Step::first("t", 1)
        .value("title", plain("Tides")?)
        .snapshot("notes", list(["n1", "n2"])?)
        .value(MESSAGES, list(["0"])?);
    let root = first.commit(&*saver).await?;
    let mut keys = vec![root.clone()];
    for n in 2..=120 {
        let parent = keys.last().unwrap_or(&root);
        // Every tenth generation is a fork from five checkpoints earlier, and continues from there.
        let from = if n % 10 == 0 { &keys[keys.len() - 6] } else { parent };
        let step = Step::fork(from, parent, n).held("title", 1).held("notes", 1);
        keys.push(step.value(MESSAGES, list([&n.to_string()])?).commit(&*saver).await?);
    }
    let expected = &first.commit.checkpoint.channels;
    for key in &keys {
        let Some(tuple) = get(&*saver, key).await? else {
            check_eq!(None, Some(key), "a checkpoint of the chain");
            continue;
        };
        for channel in ["title", "notes"] {
            check_eq!(
                tuple.checkpoint.channels.get(channel),
                expected.get(channel),
                "{channel} at {}",
                key.id
            );
        }
    }
    Ok(())
}

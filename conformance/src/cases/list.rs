//! [`threadkeep::saver::Saver::list`].

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value as Json, json};
use threadkeep::checkpoint::CheckpointKey;
use threadkeep::id::Namespace;
use threadkeep::metadata::{Counters, Source};
use threadkeep::saver::{ListQuery, Load, Saver};

use crate::case::{Case, Failure, Outcome, case, check_eq};
use crate::factory::Store;
use crate::kit::{MESSAGES, Step, all, channels, get, id, ids, key, list, plain, says};

pub(super) const CASES: &[Case] = &[
    case!(Core, list_is_newest_first, "history would be shown in the wrong order"),
    case!(
        Core,
        list_before_is_exclusive,
        "a page of history would repeat the last entry of the page before it"
    ),
    case!(Core, list_limit_bounds_matches, "a filtered page would come out short although there is more"),
    case!(Core, list_filters_on_metadata, "the checkpoints of one run could not be found"),
    case!(Core, list_all_namespaces, "retention would not see the checkpoints of nested graphs"),
    case!(Core, list_unknown_thread_is_empty, "a deleted thread would have a history"),
    case!(Core, list_returns_what_get_returns, "history would show another state than the checkpoint itself"),
];

/// From here on, a float holds only every second integer.
const BIG: u64 = 1 << 53;

/// A chain of eight checkpoints of thread `t`, the last one a fork from the third. Odd ones come from run `odd`.
async fn chain(store: &Store) -> Result<Arc<dyn Saver>, Failure> {
    let saver = store.open().await?;
    let mut keys: Vec<CheckpointKey> = Vec::new();
    for n in 1..=8_u16 {
        let step = match (n, keys.last()) {
            (_, None) => Step::first("t", n),
            (8, Some(head)) => Step::fork(&keys[2], head, n),
            (_, Some(head)) => Step::after(head, n),
        };
        let mut step = step.value(MESSAGES, list(["m"])?);
        step = step.meta("run_id", json!(if n % 2 == 1 { "odd" } else { "even" })).meta("n", json!(n));
        step = step.meta("big", json!(BIG + u64::from(n)));
        step = step.meta("writes", json!({"agent": {"n": n, "list": [n, null]}}));
        let metadata = &mut step.commit.metadata;
        metadata.source = if n == 1 { Source::Input } else { Source::Loop };
        metadata.delta_marker = n == 5;
        if n > 5 {
            metadata.counters.insert(MESSAGES.into(), Counters { updates: 1, supersteps: u64::from(n) });
        }
        keys.push(step.commit(&*saver).await?);
    }
    Ok(saver)
}

fn filter(json: Json) -> Map<String, Json> {
    match json {
        Json::Object(map) => map,
        _ => Map::new(),
    }
}

async fn list_is_newest_first(store: Store) -> Outcome {
    let saver = chain(&store).await?;
    check_eq!(ids(&*saver, &all("t")).await?, [8, 7, 6, 5, 4, 3, 2, 1].map(id), "the whole thread");
    Ok(())
}

async fn list_before_is_exclusive(store: Store) -> Outcome {
    let saver = chain(&store).await?;
    for (before, expected) in [
        (id(4), vec![3, 2, 1]),
        (id(8), vec![7, 6, 5, 4, 3, 2, 1]),
        (id(100), vec![8, 7, 6, 5, 4, 3, 2, 1]),
        (id(1), vec![]),
        (id(0), vec![]),
    ] {
        let query = ListQuery { before: Some(before), ..all("t") };
        let expected: Vec<_> = expected.into_iter().map(id).collect();
        check_eq!(ids(&*saver, &query).await?, expected, "before {before}");
        let query = ListQuery { limit: Some(2), ..query };
        let two = &expected[..expected.len().min(2)];
        check_eq!(ids(&*saver, &query).await?, two, "two before {before}");
    }
    // Page by page, each before the last entry of the previous one.
    let (mut pages, mut before) = (Vec::new(), None);
    loop {
        let page = ids(&*saver, &ListQuery { before, limit: Some(3), ..all("t") }).await?;
        before = page.last().copied();
        if page.is_empty() {
            break;
        }
        pages.push(page);
    }
    check_eq!(
        pages,
        [vec![8, 7, 6], vec![5, 4, 3], vec![2, 1]].map(|page| page.into_iter().map(id).collect::<Vec<_>>()),
        "pages of three"
    );
    Ok(())
}

async fn list_limit_bounds_matches(store: Store) -> Outcome {
    let saver = chain(&store).await?;
    // Rows under some of the checkpoints do not count.
    for n in [8, 7, 6, 3] {
        for task in 100..103 {
            saver.put_writes(&key("t", id(n)), &says(task, "pending")?).await?;
        }
    }
    let odd = filter(json!({"run_id": "odd"}));
    for (limit, filter, expected) in [
        (0, Map::new(), vec![]),
        (1, Map::new(), vec![8]),
        (3, Map::new(), vec![8, 7, 6]),
        (8, Map::new(), vec![8, 7, 6, 5, 4, 3, 2, 1]),
        (usize::MAX, Map::new(), vec![8, 7, 6, 5, 4, 3, 2, 1]),
        (0, odd.clone(), vec![]),
        (2, odd.clone(), vec![7, 5]),
        (4, odd.clone(), vec![7, 5, 3, 1]),
        (5, odd, vec![7, 5, 3, 1]),
    ] {
        let query = ListQuery { limit: Some(limit), filter, ..all("t") };
        let expected: Vec<_> = expected.into_iter().map(id).collect();
        check_eq!(ids(&*saver, &query).await?, expected, "limit {limit}, filter {:?}", query.filter);
    }
    Ok(())
}

async fn list_filters_on_metadata(store: Store) -> Outcome {
    let saver = chain(&store).await?;
    for (wanted, expected) in [
        (json!({"run_id": "even"}), vec![8, 6, 4, 2]),
        (json!({"run_id": "even", "n": 6}), vec![6]),
        (json!({"run_id": "odd", "n": 6}), vec![]),
        (json!({"n": 3}), vec![3]),
        (json!({"n": "3"}), vec![]),
        (json!({"n": 3.0}), vec![]),
        (json!({"big": BIG + 3}), vec![3]),
        (json!({"source": "input"}), vec![1]),
        (json!({"step": 4}), vec![4]),
        (json!({"svc_checkpoint_channel_mode": "delta"}), vec![5]),
        (json!({"counters_since_delta_snapshot": {"messages": [1, 7]}}), vec![7]),
        (json!({"writes": {"agent": {"list": [2, null], "n": 2}}}), vec![2]),
        (json!({"writes": {"agent": {"n": 2}}}), vec![]),
        (json!({"absent": null}), vec![]),
        // Texts and keys are compared exactly, and a key is no path.
        (json!({"run_id": "Even"}), vec![]),
        (json!({"run_id": "even "}), vec![]),
        (json!({"run_id": "eve"}), vec![]),
        (json!({"run_id": "%"}), vec![]),
        (json!({"Run_id": "even"}), vec![]),
        (json!({"n": [3]}), vec![]),
        (json!({"n": true}), vec![]),
        (json!({"writes.agent.n": 2}), vec![]),
        (json!({"writes": {"agent.n": 2}}), vec![]),
        (json!({"writes": {"agent": {"list": [null, 2], "n": 2}}}), vec![]),
        (json!({"run_id": null}), vec![]),
    ] {
        let query = ListQuery { filter: filter(wanted), ..all("t") };
        let expected: Vec<_> = expected.into_iter().map(id).collect();
        check_eq!(ids(&*saver, &query).await?, expected, "filter {:?}", query.filter);
    }
    let query = ListQuery {
        before: Some(id(7)),
        limit: Some(2),
        filter: filter(json!({"run_id": "odd"})),
        ..all("t")
    };
    check_eq!(ids(&*saver, &query).await?, [id(5), id(3)], "filter, before and limit together");
    Ok(())
}

async fn list_all_namespaces(store: Store) -> Outcome {
    let saver = store.open().await?;
    let mut steps = BTreeMap::new();
    for (namespace, numbers) in [("", [1, 4, 7]), ("nested", [2, 5, 8]), ("tools:1", [3, 6, 9])] {
        let mut last: Option<CheckpointKey> = None;
        for n in numbers {
            let step = match &last {
                Some(last) => Step::after(last, n),
                None => Step::first("t", n).namespace(namespace),
            };
            let step = step.value("n", plain(n)?).value("title", plain("x")?).meta("even", json!(n % 2 == 0));
            last = Some(step.commit(&*saver).await?);
            steps.insert(n, step);
        }
    }
    Step::first("other", 10).commit(&*saver).await?;

    let everywhere = ListQuery { namespace: None, ..all("t") };
    let found = saver.list(&everywhere).await?;
    let found: Vec<_> = found.iter().map(|tuple| (tuple.checkpoint.id, tuple.namespace.as_str())).collect();
    let expected: Vec<_> =
        (1..=9).rev().map(|n| (id(n), ["tools:1", "", "nested"][usize::from(n % 3)])).collect();
    check_eq!(found, expected, "all namespaces, merged by id");

    let page = ListQuery { before: Some(id(8)), limit: Some(3), ..everywhere.clone() };
    check_eq!(ids(&*saver, &page).await?, [7, 6, 5].map(id), "a page over all namespaces");
    let even = ListQuery { filter: filter(json!({"even": true})), ..everywhere.clone() };
    check_eq!(ids(&*saver, &even).await?, [8, 6, 4, 2].map(id), "a filter over all namespaces");
    let page = ListQuery { before: Some(id(8)), limit: Some(2), ..even };
    check_eq!(ids(&*saver, &page).await?, [6, 4].map(id), "a filtered page over all namespaces");
    for load in [Load::Only(channels(["n"])), Load::None] {
        let some = ListQuery { load, ..everywhere.clone() };
        let expected: Vec<_> = steps.values().rev().map(|step| some.load.of(step.tuple([]))).collect();
        check_eq!(saver.list(&some).await?, expected, "all namespaces, loaded in part");
    }
    for (namespace, expected) in [("", vec![7, 4, 1]), ("nested", vec![8, 5, 2]), ("nest", vec![])] {
        let query = ListQuery { namespace: Some(Namespace::new(namespace)), ..all("t") };
        let expected: Vec<_> = expected.into_iter().map(id).collect();
        check_eq!(ids(&*saver, &query).await?, expected, "namespace {namespace:?}");
    }
    Ok(())
}

async fn list_unknown_thread_is_empty(store: Store) -> Outcome {
    let saver = store.open().await?;
    check_eq!(saver.list(&all("t")).await?, [], "an empty store");
    Step::first("t", 1).commit(&*saver).await?;
    let everywhere = ListQuery { namespace: None, ..all("u") };
    check_eq!(saver.list(&everywhere).await?, [], "another thread");
    Ok(())
}

async fn list_returns_what_get_returns(store: Store) -> Outcome {
    let saver = chain(&store).await?;
    let listed = saver.list(&all("t")).await?;
    saver.put_writes(&listed[0].key(), &says(1, "late")?).await?;
    let mut child = Step::after(&listed[0].key(), 9).sentinel(MESSAGES).value("title", list(["t"])?);
    child = child.applies(1);
    child.commit(&*saver).await?;

    let listed = saver.list(&all("t")).await?;
    check_eq!(listed.len(), 9, "how many are listed");
    for tuple in listed {
        let key = tuple.key();
        check_eq!(Some(tuple), get(&*saver, &key).await?, "the listed checkpoint, and the same one by id");
    }
    let some = ListQuery { load: Load::Only(channels([MESSAGES])), limit: Some(1), ..all("t") };
    let listed = saver.list(&some).await?;
    let mut expected = child.tuple([]);
    if let Some(entry) = expected.checkpoint.channels.get_mut("title") {
        entry.stored = threadkeep::checkpoint::Stored::Held;
    }
    check_eq!(listed, [expected], "listed with one channel loaded");
    Ok(())
}

//! Every rule of `verify` is broken once and named; what can be repaired is.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use serde_json::{Map, json};
use threadkeep::Error;
use threadkeep::channel::{Behaviour, ChannelTable, OrderedUnion, Schema};
use threadkeep::checkpoint::{CheckpointTuple, Stored};
use threadkeep::convert::plan_conversion;
use threadkeep::deletion::{Boundary, Keep, Lineage, Prune, RetentionPolicy, plan_prune, plan_retention};
use threadkeep::id::{IdSource, ThreadId, Version};
use threadkeep::metadata::{Counters, Source};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::fallback::image_history;
use threadkeep::saver::{Rewrite, Saver, ThreadImage};
use threadkeep::state::{HistoryQuery, StateAccessor};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::value::ChannelValue;
use threadkeep::verify::{Repair, Rule, repair, verify, verify_image};
use threadkeep_memory::MemorySaver;

struct Store {
    saver: MemorySaver,
    accessor: StateAccessor,
    thread: ThreadId,
}

impl Store {
    /// A delta thread of eight steps with a snapshot every third.
    async fn new() -> Self {
        let saver = MemorySaver::new();
        let table = Arc::new(Schema::thread_state().compile(ChannelMode::Delta, 3).unwrap());
        let accessor = StateAccessor::new(Arc::new(saver.clone()), table, Arc::new(IdSource::default()));
        let thread = ThreadId::from("t");
        for n in 0..8 {
            let mut writer = StepWriter::open(&accessor, &thread, None).await.unwrap();
            let message = json!([{ "type": "ai", "content": "text", "id": format!("m{n}") }]);
            let write = writer.write("messages", message, false).unwrap();
            let task = writer.start_task(&"n".into(), 0);
            writer.finish_task(task, vec![write], Durability::WithCommit).await.unwrap();
            let title = writer.write("title", json!(format!("title {n}")), false).unwrap();
            let task = writer.start_task(&"n".into(), 1);
            writer.finish_task(task, vec![title], Durability::WithCommit).await.unwrap();
            writer.commit(Source::Loop, vec![], Map::new()).await.unwrap();
        }
        Self { saver, accessor, thread }
    }

    fn table(&self) -> &ChannelTable {
        self.accessor.table()
    }

    async fn image(&self) -> ThreadImage {
        self.saver.read_thread(&self.thread).await.unwrap()
    }

    async fn readable(&self) -> bool {
        self.accessor.history(&self.thread, HistoryQuery::default()).await.is_ok()
    }
}

type Breaking = fn(&mut ThreadImage);

/// The `n`-th checkpoint.
fn nth(image: &mut ThreadImage, n: usize) -> &mut CheckpointTuple {
    image.checkpoints.values_mut().nth(n).unwrap()
}

#[tokio::test]
async fn a_thread_that_is_whole_has_no_violation() {
    let store = Store::new().await;
    assert_eq!(verify(&store.saver, &store.thread, store.table()).await.unwrap(), []);
    assert_eq!(verify(&store.saver, &"unknown".into(), store.table()).await.unwrap(), []);
}

#[tokio::test]
async fn every_rule_is_named_when_it_is_broken() {
    let store = Store::new().await;
    let image = store.image().await;
    // 0: first, 1, 2: changes, 3: snapshot, 4, 5: changes, 6: snapshot, 7: changes.
    let breakings: [(Rule, usize, Breaking); 11] = [
        (Rule::ParentIsThere, 5, |image| {
            let place = image.checkpoints.keys().nth(4).unwrap().clone();
            image.checkpoints.remove(&place);
        }),
        (Rule::ParentIsOlder, 4, |image| nth(image, 4).parent = Some(nth(image, 6).checkpoint.id)),
        (Rule::WritesAreThere, 5, |image| drop(nth(image, 4).writes.remove(0))),
        (Rule::OneRowATask, 4, |image| {
            let row = nth(image, 4).writes[0].clone();
            nth(image, 4).writes.push(row);
        }),
        (Rule::Replayable, 0, |image| {
            nth(image, 0).checkpoint.channels.get_mut("messages").unwrap().stored = Stored::Sentinel;
        }),
        (Rule::SnapshotIsReplay, 6, |image| {
            let entry = nth(image, 6).checkpoint.channels.get_mut("messages").unwrap();
            let shorter = json!([{"type": "human", "id": "other", "content": "not what was said"}]);
            entry.stored = Stored::Snapshot(ChannelValue::from_json(&shorter).unwrap());
        }),
        (Rule::Marked, 4, |image| nth(image, 4).metadata.delta_marker = false),
        (Rule::Counted, 4, |image| nth(image, 4).metadata.counters.clear()),
        (Rule::NotCounted, 6, |image| {
            nth(image, 6).metadata.counters.insert("messages".into(), Counters::default());
        }),
        (Rule::OneValueAVersion, 7, |image| {
            let version = nth(image, 6).checkpoint.channels["title"].version;
            nth(image, 7).checkpoint.channels.get_mut("title").unwrap().version = version;
        }),
        (Rule::VersionsGrow, 7, |image| {
            let version = Version { counter: 1, random: 1 };
            nth(image, 7).checkpoint.channels.get_mut("title").unwrap().version = version;
        }),
    ];
    for (rule, place, breaking) in breakings {
        let mut broken = image.clone();
        let at = broken.checkpoints.keys().nth(place).unwrap().clone();
        breaking(&mut broken);
        let found = verify_image(&broken, store.table());
        let named = found.iter().find(|violation| violation.rule == rule);
        let named = named.unwrap_or_else(|| panic!("{rule} is not named: {found:?}"));
        assert_eq!(named.at, Some(at.clone()), "{rule}");
        assert!(named.to_string().contains(&at.1.to_string()), "{named}");
    }
    let mut understated = image.clone();
    nth(&mut understated, 5)
        .metadata
        .counters
        .insert("messages".into(), Counters { updates: 1, supersteps: 2 });
    let found = verify_image(&understated, store.table());
    assert_eq!(found.len(), 1);
    assert!(
        found[0].to_string().contains("claims 1 updates and 2 supersteps, but there are 2 and 2"),
        "{}",
        found[0]
    );
    // A deletion or a conversion may leave counters that claim more than there is to replay.
    nth(&mut understated, 5)
        .metadata
        .counters
        .insert("messages".into(), Counters { updates: 9, supersteps: 9 });
    assert_eq!(verify_image(&understated, store.table()), []);
}

/// Nothing is written to its channel, so only the version determines its value: that of the parent.
#[tokio::test]
async fn a_snapshot_that_its_step_did_not_write_is_what_is_replayed_at_its_version() {
    let store = Store::new().await;
    let said = |messages: usize| {
        let message = |n| json!({ "type": "ai", "content": "text", "id": format!("m{n}") });
        Stored::Snapshot(ChannelValue::from_json(&(0..messages).map(message).collect()).unwrap())
    };
    // 5: changes, 6: a snapshot, to which only the title is written.
    for (messages, expected) in [(6, 0), (5, 1)] {
        let mut image = store.image().await;
        let version = nth(&mut image, 5).checkpoint.channels["messages"].version;
        let snapshot = nth(&mut image, 6);
        snapshot.checkpoint.applied.remove(0);
        let entry = snapshot.checkpoint.channels.get_mut("messages").unwrap();
        (entry.version, entry.stored) = (version, said(messages));
        let at = Some((snapshot.namespace.clone(), snapshot.checkpoint.id));
        let found = verify_image(&image, store.table());
        assert_eq!(found.len(), expected, "{found:?}");
        assert!(found.iter().all(|found| found.rule == Rule::OneValueAVersion && found.at == at));
    }
}

/// What a read refuses is a violation, and no deletion or conversion stores it as the value.
#[tokio::test]
async fn a_row_that_lost_its_writes_is_named_and_nothing_is_made_of_it() {
    let lost = |tuple: &mut CheckpointTuple| {
        for row in &mut tuple.writes {
            row.writes.retain(|write| write.channel.as_str() != "messages");
        }
    };
    let some: Breaking = |_| ();
    let all: Breaking = |image| {
        nth(image, 3).checkpoint.channels.remove("messages");
        let counters = Counters { updates: 0, supersteps: 1 };
        nth(image, 4).metadata.counters.insert("messages".into(), counters);
    };
    for (under, breaking, missing) in [
        (4, some, "2 updates of channel messages since its snapshot, found 1"),
        (3, all, "no write of channel messages was found"),
    ] {
        let store = Store::new().await;
        let mut broken = store.image().await;
        let revision = broken.revision.clone();
        lost(nth(&mut broken, under));
        breaking(&mut broken);
        let at = nth(&mut broken, under + 1).key();
        let put = broken.checkpoints.clone().into_values().collect();
        let rewrite = Rewrite { put, ..Rewrite::default() };
        store.saver.rewrite_thread(&store.thread, &revision, rewrite).await.unwrap();
        let read = store.accessor.get(&store.thread, Some(at.id)).await;
        assert_eq!(read, Err(Error::broken(&store.thread, at.id, missing)));
        let advice = "`threadkeep backup --out FILE`";
        assert!(read.unwrap_err().to_string().contains(advice));

        let found = verify(&store.saver, &store.thread, store.table()).await.unwrap();
        let named = found.iter().find(|violation| violation.rule == Rule::Replayable);
        let named = named.unwrap_or_else(|| panic!("{missing}: {found:?}"));
        assert_eq!(named.at, Some((at.namespace.clone(), at.id)));
        assert!(named.found.contains(missing) && !named.found.contains(advice), "{named}");
        let keep = Keep::Last(8 - (under + 1));
        let cut = Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(keep) };
        let cut = plan_prune(&broken, &cut, store.table());
        assert!(matches!(cut, Err(Error::BrokenLineage { .. })), "{cut:?}");
        let full = Schema::thread_state().compile(ChannelMode::Full, 3).unwrap();
        let converted = plan_conversion(&broken, &full);
        assert!(matches!(converted, Err(Error::BrokenLineage { .. })), "{converted:?}");
        let Repair { left, .. } = repair(&store.saver, &store.thread, store.table()).await.unwrap();
        assert!(left.iter().any(|violation| violation.rule == Rule::Replayable), "{left:?}");
    }
}

/// Its children may store the damaged channel, and replay the others.
#[tokio::test]
async fn a_channel_that_cannot_be_replayed_makes_no_other_one_a_violation() {
    let store = Store::new().await;
    let notes = Behaviour::Accumulating(Arc::new(OrderedUnion));
    let table = Schema::thread_state().with("notes", notes).compile(ChannelMode::Delta, 3).unwrap();
    let mut image = store.image().await;
    // 3: snapshot, 4, 5: changes, 6: snapshot, 7: changes. 3 also stores notes, to which nothing is written since.
    let version = Version { counter: 1, random: 1 };
    for n in 3..8_u64 {
        let tuple = nth(&mut image, usize::try_from(n).unwrap());
        let stored = match n {
            3 => Stored::Snapshot(ChannelValue::from_json(&json!(["a"])).unwrap()),
            _ => Stored::Sentinel,
        };
        let entry = threadkeep::checkpoint::ChannelEntry { version, stored };
        tuple.checkpoint.channels.insert("notes".into(), entry);
        if n > 3 {
            let counters = Counters { updates: 0, supersteps: n - 3 };
            tuple.metadata.counters.insert("notes".into(), counters);
            tuple.metadata.delta_marker = true;
        }
    }
    assert_eq!(verify_image(&image, &table), []);

    for row in &mut nth(&mut image, 4).writes {
        row.writes.clear();
    }
    let broken = nth(&mut image, 5).checkpoint.id;
    let found = verify_image(&image, &table);
    let places: Vec<_> = found.iter().map(|found| (found.rule, found.at.as_ref().unwrap().1)).collect();
    assert_eq!(places, [(Rule::Replayable, broken)], "{found:?}");
}

#[tokio::test]
async fn repair_puts_right_what_needs_no_guess() {
    let store = Store::new().await;
    let mut image = store.image().await;
    let whole = image.clone();
    nth(&mut image, 1).metadata.delta_marker = false;
    nth(&mut image, 1).metadata.counters.clear();
    nth(&mut image, 5).metadata.counters.clear();
    nth(&mut image, 6).metadata.counters.insert("messages".into(), Counters { updates: 1, supersteps: 1 });
    let put = image.checkpoints.into_values().collect();
    let broken = Rewrite { put, ..Rewrite::default() };
    store.saver.rewrite_thread(&store.thread, &whole.revision, broken).await.unwrap();
    assert!(!store.readable().await);

    let Repair { repaired, left } = repair(&store.saver, &store.thread, store.table()).await.unwrap();
    let rules: Vec<_> = repaired.iter().map(|violation| violation.rule).collect();
    assert_eq!(rules, [Rule::Marked, Rule::Counted, Rule::Counted, Rule::NotCounted]);
    assert_eq!(left, []);
    assert_eq!(store.image().await.checkpoints, whole.checkpoints, "it is as it was before it was broken");
    let again = repair(&store.saver, &store.thread, store.table()).await.unwrap();
    assert_eq!(again, Repair::default());
}

#[tokio::test]
async fn repair_leaves_what_would_need_a_guess() {
    let store = Store::new().await;
    let image = store.image().await;
    let key = image.checkpoints.values().nth(4).unwrap().key();
    assert!(store.saver.lose_checkpoint(&key));
    let before = store.image().await;
    let Repair { repaired, left } = repair(&store.saver, &store.thread, store.table()).await.unwrap();
    assert_eq!(repaired, []);
    assert!(left.iter().any(|violation| violation.rule == Rule::ParentIsThere), "{left:?}");
    assert!(left.iter().any(|violation| violation.rule == Rule::Replayable), "{left:?}");
    assert_eq!(store.image().await, before);
}

/// A rewrite that puts a damaged checkpoint again is refused, with all that it changes elsewhere.
#[tokio::test]
async fn repair_puts_right_what_it_can_beside_a_checkpoint_that_it_cannot() {
    // A checkpoint that lost its parent, one that lost a row, and a root that stores changes.
    let lost: [fn(&MemorySaver, &ThreadImage) -> bool; 3] = [
        |saver, image| saver.lose_checkpoint(&image.checkpoints.values().nth(3).unwrap().key()),
        |saver, image| {
            let parent = image.checkpoints.values().nth(3).unwrap();
            saver.lose_writes(&parent.key(), parent.writes[1].task)
        },
        |saver, image| saver.lose_parent_link(&image.checkpoints.values().nth(4).unwrap().key()),
    ];
    for lose in lost {
        let store = Store::new().await;
        let mut image = store.image().await;
        nth(&mut image, 4).metadata.counters.clear();
        nth(&mut image, 7).metadata.delta_marker = false;
        let (damaged, unmarked) = (nth(&mut image, 4).key(), nth(&mut image, 7).key());
        let put = image.checkpoints.values().cloned().collect();
        let broken = Rewrite { put, ..Rewrite::default() };
        store.saver.rewrite_thread(&store.thread, &image.revision, broken).await.unwrap();
        assert!(lose(&store.saver, &image));

        let Repair { repaired, left } = repair(&store.saver, &store.thread, store.table()).await.unwrap();
        let repaired: Vec<_> = repaired.into_iter().map(|done| (done.rule, done.at.unwrap().1)).collect();
        assert_eq!(repaired, [(Rule::Marked, unmarked.id)]);
        let at = Some((damaged.namespace, damaged.id));
        assert!(left.iter().any(|found| found.rule == Rule::Counted && found.at == at), "{left:?}");
        assert!(left.iter().all(|found| found.rule != Rule::Marked), "{left:?}");
    }
}

/// An impossible value of a channel is distinguished from one that the schema does not know.
#[tokio::test]
async fn a_channel_that_the_schema_does_not_have_is_no_violation_unless_it_must_be_replayed() {
    let store = Store::new().await;
    let mut image = store.image().await;
    let version = Version { counter: 50, random: 50 };
    let value = Stored::Value(ChannelValue::from_json(&json!("of another schema")).unwrap());
    let entry = threadkeep::checkpoint::ChannelEntry { version, stored: value };
    nth(&mut image, 7).checkpoint.channels.insert("foreign".into(), entry.clone());
    assert_eq!(verify_image(&image, store.table()), []);
    let sentinel = threadkeep::checkpoint::ChannelEntry { stored: Stored::Sentinel, ..entry };
    nth(&mut image, 7).checkpoint.channels.insert("foreign".into(), sentinel);
    let found = verify_image(&image, store.table());
    let text = found.iter().find(|v| v.rule == Rule::Replayable).unwrap().to_string();
    assert!(text.contains("cannot replay it"), "{text}");
}

#[tokio::test]
async fn what_cannot_be_read_is_a_violation_and_an_unavailable_store_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let saver = threadkeep_sqlite::SqliteSaver::open(&path, &threadkeep_sqlite::Options::default()).unwrap();
    let store = Store::new().await;
    let put = store.image().await.checkpoints.into_values().collect();
    let copy = Rewrite { put, ..Rewrite::default() };
    let absent = threadkeep::saver::Revision::absent();
    saver.rewrite_thread(&store.thread, &absent, copy).await.unwrap();
    assert_eq!(verify(&saver, &store.thread, store.table()).await.unwrap(), []);
    saver.close().await;
    let closed = verify(&saver, &store.thread, store.table()).await;
    assert!(matches!(closed, Err(Error::Unavailable { .. })), "{closed:?}");
}

/// What `read` returns. Where it does not end, the test fails.
fn ends<T: Send + 'static>(read: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(read()));
    result.recv_timeout(Duration::from_mins(10)).expect("it does not end")
}

/// A thread whose second checkpoint names the third one as its parent: no API makes that, a damaged store may hold it.
async fn cyclic() -> (Store, ThreadImage) {
    let store = Store::new().await;
    let mut image = store.image().await;
    nth(&mut image, 1).parent = Some(nth(&mut image, 2).checkpoint.id);
    nth(&mut image, 1).checkpoint.applied.clear();
    (store, image)
}

#[tokio::test]
async fn a_cycle_of_parents_is_a_broken_lineage() {
    let (store, mut image) = cyclic().await;
    let (older, at) = (nth(&mut image, 1).checkpoint.id, nth(&mut image, 2).key());
    let broken = Error::broken(&store.thread, older, format!("its parent {} is not older", at.id));
    let key = at.clone();
    let history = ends(move || image_history(&image, &key, &["messages".into()].into(), None));
    assert_eq!(history, Err(broken));
}

#[tokio::test]
async fn a_cycle_of_parents_ends_every_plan() {
    let (store, mut image) = cyclic().await;
    let (older, at) = (nth(&mut image, 1).checkpoint.id, nth(&mut image, 2).key());
    let last = image.checkpoints.keys().next_back().unwrap().clone();
    let cycle = image.clone();
    let walked = ends(move || Lineage::new(&cycle).lineage(&last).count());
    assert_eq!(walked, 7, "from the last checkpoint to the second");
    // A picture of the thread begins at its roots.
    let lineage = Lineage::new(&image);
    let mut open: Vec<_> = image.checkpoints.values().filter(|at| lineage.parent(at).is_none()).collect();
    assert_eq!(open.len(), 2, "the first checkpoint, and the one whose parent is not older");
    let mut drawn = 0;
    while let Some(tuple) = open.pop() {
        drawn += 1;
        open.extend(lineage.children(&(tuple.namespace.clone(), tuple.checkpoint.id)));
    }
    assert_eq!(drawn, image.checkpoints.len());
    for keep in [Keep::Last(6), Keep::Last(7)] {
        let (cycle, table) = (image.clone(), store.table().clone());
        let plan = ends(move || plan_prune(&cycle, &Prune::keeping(keep), &table));
        assert_eq!(plan.unwrap().removed().count(), 1, "{keep:?}");
    }
    for graft_duration_links in [false, true] {
        let policy = RetentionPolicy {
            prune_leaf_sibling_branches: true,
            graft_duration_links,
            ..RetentionPolicy::default()
        };
        let (cycle, table) = (image.clone(), store.table().clone());
        let plan = ends(move || plan_retention(&cycle, &policy, &table));
        assert_eq!(plan.unwrap().removed().count(), 0);
    }
    let (cycle, table) = (image.clone(), store.table().clone());
    let value = ends(move || {
        let lineage = Lineage::new(&cycle);
        lineage.value(lineage.get(&(at.namespace, at.id)).unwrap(), &"messages".into(), &table)
    });
    assert!(matches!(value, Err(Error::BrokenLineage { .. })), "{value:?}");
    let (cycle, table) = (image, store.table().clone());
    let found = ends(move || verify_image(&cycle, &table));
    let rules = found.iter().filter(|v| v.at.as_ref().is_some_and(|place| place.1 == older));
    let rules: Vec<Rule> = rules.map(|violation| violation.rule).collect();
    assert!(rules.contains(&Rule::ParentIsOlder), "{found:?}");
    assert!(!rules.contains(&Rule::ParentIsThere), "{found:?}");
}

//! Retention, pruning, deletion by run and copies, scenario by scenario, in both modes on every embedded saver.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Map, Value as Json, json};
use threadkeep::Error;
use threadkeep::channel::Schema;
use threadkeep::checkpoint::{Stored, TaskWrites};
use threadkeep::deletion::{
    Boundary, Keep, Lineage, Prune, Reason, RetentionPolicy, RetentionReport, STATS_KEYS, copy_thread,
    delete_for_runs, enforce, plan_prune, plan_retention, prune,
};
use threadkeep::id::{CheckpointId, IdSource, Namespace, ThreadId};
use threadkeep::metadata::{DURATION_NODE, RESTORED_KEY, Source};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{CheckpointSelector, Flush, Saver, StepCommit, ThreadImage};
use threadkeep::state::{HistoryQuery, StateAccessor, StateSnapshot, Update};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::value::ChannelValue;
use threadkeep_memory::MemorySaver;
use threadkeep_sqlite::{Options, SqliteSaver};

struct Store {
    saver: Arc<dyn Saver>,
    accessor: StateAccessor,
    thread: ThreadId,
    _dir: Option<tempfile::TempDir>,
}

/// The same scenario in both modes on both savers.
fn stores() -> Vec<Store> {
    let mut stores = Vec::new();
    for (mode, frequency) in [(ChannelMode::Full, 10), (ChannelMode::Delta, 3), (ChannelMode::Delta, 1000)] {
        for sqlite in [false, true] {
            let dir = sqlite.then(|| tempfile::tempdir().unwrap());
            let saver: Arc<dyn Saver> = match &dir {
                Some(dir) => Arc::new(SqliteSaver::open(dir.path().join("db"), &Options::default()).unwrap()),
                None => Arc::new(MemorySaver::new()),
            };
            let table = Arc::new(Schema::thread_state().compile(mode, frequency).unwrap());
            let accessor = StateAccessor::new(saver.clone(), table, Arc::new(IdSource::default()));
            stores.push(Store { saver, accessor, thread: "t".into(), _dir: dir });
        }
    }
    stores
}

impl Store {
    async fn turn(&self, n: usize, at: Option<CheckpointId>) -> StateSnapshot {
        let mut writer = StepWriter::open(&self.accessor, &self.thread, at).await.unwrap();
        for (kind, node) in [("human", "input"), ("ai", "agent")] {
            let message =
                json!([{ "type": kind, "content": format!("{kind} {n}"), "id": format!("{kind}{n}") }]);
            let write = writer.write("messages", message, false).unwrap();
            let task = writer.start_task(&node.into(), 0);
            writer.finish_task(task, vec![write], Durability::WithCommit).await.unwrap();
            let extra = Map::from_iter([("run_id".to_owned(), json!(format!("run{n}")))]);
            writer.commit(Source::Loop, Vec::new(), extra).await.unwrap();
        }
        writer.state().unwrap().clone()
    }

    async fn turns(&self, count: usize) -> Vec<StateSnapshot> {
        let mut heads = Vec::new();
        for n in 0..count {
            heads.push(self.turn(n, None).await);
        }
        heads
    }

    /// A duration-only checkpoint on the head.
    async fn note(&self) -> StateSnapshot {
        let head = self.accessor.get(&self.thread, None).await.unwrap().unwrap();
        let mut extra = head.metadata.extra.to_map();
        extra.insert("run_durations".into(), json!({ "run": 3 }));
        extra.insert("writes".into(), json!({ DURATION_NODE: { "run_ids": ["run"], "message_ids": [] } }));
        self.accessor.annotate(&head, extra).await.unwrap()
    }

    async fn pend(&self, at: Option<CheckpointId>) {
        let mut writer = StepWriter::open(&self.accessor, &self.thread, at).await.unwrap();
        let write = writer.write("title", json!("pending"), false).unwrap();
        let task = writer.start_task(&"n".into(), 0);
        writer.finish_task(task, vec![write], Durability::Now).await.unwrap();
    }

    async fn states(&self) -> BTreeMap<CheckpointId, Map<String, Json>> {
        let history = self.accessor.history(&self.thread, HistoryQuery::default()).await.unwrap();
        history.into_iter().map(|state| (state.key.id, state.values().unwrap())).collect()
    }

    async fn image(&self) -> ThreadImage {
        self.saver.read_thread(&self.thread).await.unwrap()
    }

    async fn enforce(&self, policy: &RetentionPolicy) -> RetentionReport {
        let table = self.accessor.table();
        enforce(&*self.saver, &self.thread, policy, table, true).await.unwrap()
    }

    async fn prune(&self, asked: &Prune) -> Vec<CheckpointId> {
        let plan = prune(&*self.saver, &self.thread, asked, self.accessor.table()).await.unwrap();
        plan.removed().map(|place| place.1).collect()
    }

    /// Runs a deletion, and checks that it leaves the states of everything else unchanged. Returns what was removed.
    async fn only_removes(&self, before: &BTreeMap<CheckpointId, Map<String, Json>>, gone: &[CheckpointId]) {
        let mut expected = before.clone();
        for id in gone {
            assert!(expected.remove(id).is_some(), "{id} was not there");
        }
        assert_eq!(self.states().await, expected);
    }
}

fn siblings() -> RetentionPolicy {
    RetentionPolicy { prune_leaf_sibling_branches: true, ..RetentionPolicy::default() }
}

#[tokio::test]
async fn a_linear_thread_loses_nothing() {
    for store in stores() {
        let heads = store.turns(4).await;
        let before = store.states().await;
        for policy in [RetentionPolicy::default(), siblings()] {
            let report = store.enforce(&policy).await;
            assert!(report.deleted_checkpoint_ids.is_empty());
            assert_eq!(report.protected_head_ids, BTreeMap::from([(Namespace::root(), heads[3].key.id)]));
            assert_eq!(report.stats_before, report.stats_after);
            assert_eq!(report.stats_before.keys().copied().collect::<BTreeSet<_>>(), STATS_KEYS.into());
            assert!(report.stats_before["write_rows"] > 0, "a thread writes rows with every turn");
        }
        assert_eq!(store.states().await, before);
    }
}

#[tokio::test]
async fn a_trailing_duration_leaf_goes_and_takes_no_value_with_it() {
    for store in stores() {
        let heads = store.turns(2).await;
        let blobs = deletion_stats(&store).await;
        let leaf = store.note().await;
        let with_leaf = deletion_stats(&store).await;
        assert_eq!(with_leaf["blob_rows"], blobs["blob_rows"], "the clone shares every value");
        let before = store.states().await;
        let report = store.enforce(&RetentionPolicy::default()).await;
        assert_eq!(report.deleted_checkpoint_ids, [leaf.key.id]);
        assert_eq!(report.stats_after["checkpoint_rows"], report.stats_before["checkpoint_rows"] - 1);
        for same in ["blob_rows", "blob_bytes", "write_rows", "write_bytes"] {
            assert_eq!(report.stats_after[same], report.stats_before[same], "{same}");
        }
        store.only_removes(&before, &[leaf.key.id]).await;
        let head = store.accessor.get(&store.thread, None).await.unwrap().unwrap();
        assert_eq!(head.key.id, heads[1].key.id, "the newest is the run's last one, and can be resumed");
        store.turn(2, None).await;
        let gone = store.accessor.get(&store.thread, Some(leaf.key.id)).await.unwrap();
        assert!(gone.is_none(), "no other checkpoint replaces a deleted one");
    }
}

async fn deletion_stats(store: &Store) -> BTreeMap<&'static str, u64> {
    threadkeep::deletion::Stats::of(&store.image().await).to_map()
}

#[tokio::test]
async fn a_duration_link_stays_unless_it_is_grafted() {
    for store in stores() {
        let heads = store.turns(2).await;
        let link = store.note().await;
        let next = store.turn(2, None).await;
        let before = store.states().await;
        assert!(store.enforce(&siblings()).await.deleted_checkpoint_ids.is_empty());

        let graft = RetentionPolicy { graft_duration_links: true, ..RetentionPolicy::default() };
        let report = store.enforce(&graft).await;
        assert_eq!(report.deleted_checkpoint_ids, [link.key.id]);
        assert_eq!(
            report.stats_after["write_rows"], report.stats_before["write_rows"],
            "rows move, none goes"
        );
        store.only_removes(&before, &[link.key.id]).await;
        let image = store.image().await;
        let lineage = Lineage::new(&image);
        let ids: Vec<_> =
            lineage.lineage(&(Namespace::root(), next.key.id)).map(|t| t.checkpoint.id).collect();
        assert_eq!(ids[2], heads[1].key.id, "the run's first step is a child of the turn before it");
        assert!(store.enforce(&graft).await.deleted_checkpoint_ids.is_empty());
    }
}

#[tokio::test]
async fn a_pending_link_is_not_grafted() {
    for store in stores() {
        store.turns(1).await;
        let link = store.note().await;
        store.turn(1, None).await;
        store.pend(Some(link.key.id)).await;
        let graft = RetentionPolicy { graft_duration_links: true, ..RetentionPolicy::default() };
        assert!(store.enforce(&graft).await.deleted_checkpoint_ids.is_empty());
    }
}

/// In delta mode a run that forks from an older checkpoint is written onto the head, and only names what it forked from.
#[tokio::test]
async fn what_a_later_run_forked_from_stays_also_if_it_only_names_it() {
    for store in stores() {
        let heads = store.turns(2).await;
        let selected = store.note().await.key.id;
        store.turn(2, Some(heads[0].key.id)).await;
        let mut known = store.accessor.known_head(&store.thread).await.unwrap();
        let extra = Map::from_iter([(RESTORED_KEY.to_owned(), json!(selected.to_string()))]);
        let restored = store.accessor.linearize(&mut known, selected, extra).await.unwrap();
        let forked = match &restored {
            Some(restored) => {
                assert_ne!(restored.parent, Some(selected));
                restored.key.id
            }
            None => store.turn(3, Some(selected)).await.key.id,
        };
        let before = store.states().await;
        for policy in [RetentionPolicy::default(), siblings()] {
            let plan = plan_retention(&store.image().await, &policy, store.accessor.table()).unwrap();
            let stays = |id| plan.verdicts.iter().any(|(place, reason)| place.1 == id && !reason.goes());
            assert!(stays(selected) && stays(heads[1].key.id) && stays(forked), "{:?}", plan.verdicts);
            assert!(store.enforce(&RetentionPolicy::default()).await.deleted_checkpoint_ids.is_empty());
        }
        let grafting = RetentionPolicy { graft_duration_links: true, ..RetentionPolicy::default() };
        let gone = store.enforce(&grafting).await.deleted_checkpoint_ids;
        assert_eq!(gone.contains(&selected), restored.is_none(), "a name cannot be grafted");
        store.only_removes(&before, &gone).await;
        let runs = BTreeSet::from(["run1".to_owned()]);
        let table = store.accessor.table();
        let deleted = delete_for_runs(&*store.saver, &store.thread, &runs, table).await.unwrap();
        assert_eq!(deleted.removed().count(), 0, "a survivor goes on from it");
    }
}

/// A walk back goes along the names of what was restored, as along parents.
#[tokio::test]
async fn a_prune_leaves_the_name_of_the_nearest_checkpoint_that_stays() {
    for store in stores() {
        let heads = store.turns(3).await;
        let restore = async |id: CheckpointId| {
            let extra = Map::from_iter([(RESTORED_KEY.to_owned(), json!(id.to_string()))]);
            let update = Update { at: None, node: "restore".into(), writes: Vec::new(), extra };
            store.accessor.update(&store.thread, update).await.unwrap().key.id
        };
        let first = restore(heads[1].key.id).await;
        store.turn(3, None).await;
        let second = restore(first).await;
        // The head that the first one was written onto is no part of what it continues.
        let (continued, other) = (heads[0].key.id, heads[2].key.id);
        // One that is damaged would be refused if it was put.
        let mut damaged = store.image().await;
        let place = (Namespace::root(), second);
        damaged.checkpoints.get_mut(&place).unwrap().parent = Some(CheckpointId::from_bytes([0; 16]));
        let fresh = Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(Keep::Latest) };
        let asked = Prune { protect: [continued].into(), ..fresh };
        let plan = plan_prune(&damaged, &asked, store.accessor.table()).unwrap();
        assert!(plan.rewrite.put.iter().all(|tuple| tuple.checkpoint.id != second));

        for protected in [vec![continued, other], vec![other]] {
            let before = store.states().await;
            let protect: BTreeSet<_> = protected.iter().copied().collect();
            let latest = Prune { boundary: Boundary::FreshSnapshot, protect, ..Prune::keeping(Keep::Latest) };
            let gone = store.prune(&latest).await;
            store.only_removes(&before, &gone).await;
            let image = store.image().await;
            let ids: Vec<_> = image.checkpoints.keys().map(|place| place.1).collect();
            assert_eq!(ids, [&protected[..], &[second]].concat());
            // In the end nothing is left of it, and the name says so.
            let named = image.checkpoints[&(Namespace::root(), second)].metadata.restored();
            assert_eq!(named, Some(continued));
        }
    }
}

/// A saver may hold a row of one task under several checkpoints.
#[tokio::test]
async fn a_link_stays_if_a_task_has_rows_under_it_and_under_its_parent() {
    for store in stores() {
        let head = store.turns(1).await.remove(0);
        let (first, second) = (store.note().await, store.note().await);
        let mut fork = StepWriter::open(&store.accessor, &store.thread, Some(head.key.id)).await.unwrap();
        let message = |text: &str| json!([{"type": "human", "content": text, "id": text}]);
        let task = fork.start_task(&"n".into(), 0);
        let id = task.id;
        let write = fork.write("messages", message("parent's"), false).unwrap();
        fork.finish_task(task, vec![write], Durability::WithCommit).await.unwrap();
        fork.commit(Source::Loop, Vec::new(), Map::new()).await.unwrap();

        // A child of the link that applies a row of the same task.
        let (image, ids) = (store.image().await, IdSource::default());
        let link = &image.checkpoints[&(Namespace::root(), second.key.id)];
        let mut checkpoint = link.checkpoint.clone();
        checkpoint.id = ids.checkpoint_after(fork.state().map(|state| state.key.id));
        checkpoint.applied = vec![id];
        for (name, entry) in &mut checkpoint.channels {
            entry.stored = Stored::Held;
            if name.as_str() == "messages" {
                entry.version = ids.version_after(Some(entry.version));
                let whole = second.json("messages").unwrap().unwrap();
                let whole = [whole.as_array().unwrap().as_slice(), &[message("link's")[0].clone()]].concat();
                entry.stored = match store.accessor.table().mode() {
                    ChannelMode::Full => Stored::Value(ChannelValue::from_json(&json!(whole)).unwrap()),
                    ChannelMode::Delta => Stored::Sentinel,
                };
            }
        }
        let mut metadata = link.metadata.clone();
        metadata.extra = Map::new().into();
        for counters in metadata.counters.values_mut() {
            counters.updates += 1;
            counters.supersteps += 1;
        }
        let write = store.accessor.write("messages", message("link's"), false).unwrap();
        let step = StepCommit {
            thread: store.thread.clone(),
            namespace: Namespace::root(),
            parent: Some(second.key.id),
            expected_head: fork.state().map(|state| state.key.id),
            checkpoint,
            metadata,
            writes: vec![TaskWrites { task: id, node: "n".into(), index: 0, writes: vec![write] }],
            pending: Vec::new(),
            flush: Flush::Now,
        };
        store.saver.commit(step).await.unwrap();

        let before = store.states().await;
        let graft = RetentionPolicy { graft_duration_links: true, ..RetentionPolicy::default() };
        let gone = store.enforce(&graft).await.deleted_checkpoint_ids;
        assert_eq!(gone, [first.key.id], "the first has no rows");
        store.only_removes(&before, &gone).await;
    }
}

#[tokio::test]
async fn a_superseded_head_goes_only_if_asked_for_and_one_layer_a_pass() {
    for store in stores() {
        let heads = store.turns(2).await;
        let base = heads[0].key.id;
        store.turn(2, Some(base)).await;
        let before = store.states().await;
        assert!(store.enforce(&RetentionPolicy::default()).await.deleted_checkpoint_ids.is_empty());
        let first = store.enforce(&siblings()).await.deleted_checkpoint_ids;
        assert_eq!(first, [heads[1].key.id]);
        let second = store.enforce(&siblings()).await.deleted_checkpoint_ids;
        assert_eq!(second, [heads[1].parent.unwrap()], "the parent of the old head is a leaf now");
        assert!(store.enforce(&siblings()).await.deleted_checkpoint_ids.is_empty());
        store.only_removes(&before, &[first[0], second[0]]).await;
        let rows = store.image().await.checkpoints[&(Namespace::root(), base)].writes.len();
        assert_eq!(rows, 1, "the rows that made the old line are gone, those of the new one are there");
    }
}

#[tokio::test]
async fn protected_ids_and_pending_writes_stay() {
    for store in stores() {
        let heads = store.turns(2).await;
        store.turn(2, Some(heads[0].key.id)).await;
        let old = heads[1].key.id;
        let protect = RetentionPolicy { protect_checkpoint_ids: BTreeSet::from([old]), ..siblings() };
        assert!(store.enforce(&protect).await.deleted_checkpoint_ids.is_empty());

        store.pend(Some(old)).await;
        assert!(store.enforce(&siblings()).await.deleted_checkpoint_ids.is_empty());
        let plan = plan_retention(&store.image().await, &siblings(), store.accessor.table()).unwrap();
        let verdict = plan.verdicts.iter().find(|(place, _)| place.1 == old).unwrap().1;
        assert_eq!(verdict, Reason::PendingWrites);
        let before = store.states().await;
        let lax = RetentionPolicy { strict_pending_write_guard: false, ..siblings() };
        assert_eq!(store.enforce(&lax).await.deleted_checkpoint_ids, [old]);
        store.only_removes(&before, &[old]).await;
    }
}

#[tokio::test]
async fn the_cap_bounds_a_pass_and_the_order_is_newest_first() {
    for store in stores() {
        let base = store.turns(1).await[0].key.id;
        let mut leaves = Vec::new();
        for n in 1..4 {
            leaves.push(store.turn(n, Some(base)).await.key.id);
        }
        let capped = |cap| RetentionPolicy { max_delete_per_run: Some(cap), ..siblings() };
        let none = store.enforce(&capped(0)).await;
        assert!(none.deleted_checkpoint_ids.is_empty());
        assert_eq!(none.stats_before, none.stats_after);
        assert_eq!(store.enforce(&capped(1)).await.deleted_checkpoint_ids, [leaves[1]]);
        let rest = store.enforce(&capped(1)).await.deleted_checkpoint_ids;
        assert!(rest[0] > leaves[0], "what the first pass left bare is newer: {rest:?}");
    }
}

#[tokio::test]
async fn a_negative_cap_is_refused_before_anything_is_read() {
    for store in stores() {
        store.turns(1).await;
        store.note().await;
        let before = store.image().await;
        let policy = RetentionPolicy { max_delete_per_run: Some(-1), ..RetentionPolicy::default() };
        let table = store.accessor.table();
        let error = enforce(&*store.saver, &store.thread, &policy, table, true).await.unwrap_err();
        assert_eq!(error.to_string(), "max_delete_per_run must be >= 0, got -1");
        assert_eq!(store.image().await, before);
    }
    // A store that never answers, which must not be asked.
    let dir = tempfile::tempdir().unwrap();
    let saver = SqliteSaver::open(dir.path().join("db"), &Options::default()).unwrap();
    saver.close().await;
    let table = Schema::thread_state().compile(ChannelMode::Full, 1).unwrap();
    let refused = async |cap| {
        let policy = RetentionPolicy { max_delete_per_run: Some(cap), ..RetentionPolicy::default() };
        enforce(&saver, &"t".into(), &policy, &table, true).await.unwrap_err()
    };
    assert!(matches!(refused(-1).await, Error::InvalidInput(_)));
    assert!(matches!(refused(0).await, Error::Unavailable { .. }), "{}", refused(0).await);
}

#[tokio::test]
async fn an_unknown_thread_gives_an_empty_report() {
    for store in stores() {
        let report = store.enforce(&siblings()).await;
        assert!(report.protected_head_ids.is_empty() && report.deleted_checkpoint_ids.is_empty());
        assert_eq!(report.stats_before, STATS_KEYS.map(|key| (key, 0)).into());
        assert_eq!(report.stats_after, report.stats_before);
        store.turns(1).await;
        let table = store.accessor.table();
        let bare = enforce(&*store.saver, &store.thread, &siblings(), table, false).await.unwrap();
        assert!(bare.stats_before.is_empty() && bare.stats_after.is_empty());
    }
}

#[tokio::test]
async fn each_namespace_has_its_head_and_none_is_emptied() {
    for store in stores() {
        store.turns(2).await;
        let inner = store.accessor.clone().in_namespace("tools:1".into());
        inner.create(&store.thread, Map::new()).await.unwrap();
        let write = inner.write("title", json!("eleven"), false).unwrap();
        let update = Update { at: None, node: "n".into(), writes: vec![write], extra: Map::new() };
        let nested = inner.update(&store.thread, update).await.unwrap();
        store.turns(1).await;
        // A namespace in which only a note is left.
        let lone = store.accessor.clone().in_namespace("lone".into());
        let mut extra = Map::new();
        extra.insert("writes".into(), json!({ DURATION_NODE: {} }));
        let note = lone.create(&store.thread, extra).await.unwrap();

        let report = store.enforce(&siblings()).await;
        assert!(report.deleted_checkpoint_ids.is_empty());
        assert_eq!(report.protected_head_ids[&Namespace::from("tools:1")], nested.key.id);
        assert_eq!(report.protected_head_ids[&Namespace::from("lone")], note.key.id);
        let read = inner.get(&store.thread, None).await.unwrap().unwrap();
        assert_eq!(read.json("title").unwrap(), Some(json!("eleven")));
    }
}

#[tokio::test]
async fn of_two_stacked_leaves_one_goes_a_pass() {
    for store in stores() {
        store.turns(1).await;
        let lower = store.note().await.key.id;
        let upper = store.note().await.key.id;
        let policy = RetentionPolicy::default();
        assert_eq!(store.enforce(&policy).await.deleted_checkpoint_ids, [upper]);
        assert_eq!(store.enforce(&policy).await.deleted_checkpoint_ids, [lower]);
        assert!(store.enforce(&policy).await.deleted_checkpoint_ids.is_empty());
    }
}

#[tokio::test]
async fn a_checkpoint_that_inherits_the_notes_is_no_duration_leaf() {
    for store in stores() {
        store.turns(1).await;
        let noted = store.note().await;
        // As the writers of titles and goals do: the notes stay, a channel changes.
        let mut extra = noted.metadata.extra.to_map();
        extra.insert("writes".into(), json!({ "runtime_interrupt_title": { "title": "a title" } }));
        let write = store.accessor.write("title", json!("a title"), false).unwrap();
        let update = Update { at: None, node: "title".into(), writes: vec![write], extra };
        let title = store.accessor.update(&store.thread, update).await.unwrap();
        let report = store.enforce(&RetentionPolicy::default()).await;
        assert!(report.deleted_checkpoint_ids.is_empty());
        assert_eq!(report.protected_head_ids[&Namespace::root()], title.key.id);
        // An exact clone on top of it is one.
        let clone = store.note().await.key.id;
        assert_eq!(store.enforce(&RetentionPolicy::default()).await.deleted_checkpoint_ids, [clone]);
    }
}

fn in_full_mode() -> (MemorySaver, Store) {
    let saver = MemorySaver::new();
    let table = Arc::new(Schema::thread_state().compile(ChannelMode::Full, 1).unwrap());
    let shared: Arc<dyn Saver> = Arc::new(saver.clone());
    let accessor = StateAccessor::new(shared.clone(), table, Arc::default());
    (saver, Store { saver: shared, accessor, thread: "t".into(), _dir: None })
}

fn lose_parent(saver: &MemorySaver, of: &StateSnapshot) {
    let mut lost = of.key.clone();
    lost.id = of.parent.unwrap();
    assert!(saver.lose_checkpoint(&lost));
}

#[tokio::test]
async fn a_missing_ancestor_stops_nothing_but_its_children() {
    let (saver, store) = in_full_mode();
    let heads = store.turns(3).await;
    let orphan = store.turn(3, Some(heads[0].key.id)).await;
    let main = store.turn(4, Some(heads[2].key.id)).await;
    let leaf = store.note().await.key.id;
    lose_parent(&saver, &orphan);
    let report = store.enforce(&siblings()).await;
    assert_eq!(report.deleted_checkpoint_ids, [leaf]);
    assert_eq!(report.protected_head_ids[&Namespace::root()], main.key.id);
    let plan = plan_retention(&store.image().await, &siblings(), store.accessor.table()).unwrap();
    let verdict = plan.verdicts.iter().find(|(place, _)| place.1 == orphan.key.id).unwrap().1;
    assert_eq!(verdict, Reason::BrokenLineage);
}

/// The second of five turns lost its first checkpoint. One side branch goes off from it, one from the next turn. Returns
/// the last states of the turns, and those of the branches.
async fn damaged() -> (Store, Vec<StateSnapshot>, [StateSnapshot; 2]) {
    let (saver, store) = in_full_mode();
    let mut turns = store.turns(4).await;
    let branches = [store.turn(4, Some(turns[1].key.id)).await, store.turn(5, Some(turns[2].key.id)).await];
    let last = store.turn(6, Some(turns[3].key.id)).await;
    turns.push(last);
    lose_parent(&saver, &turns[1]);
    (store, turns, branches)
}

/// A damaged checkpoint cannot be put again without the rows that a child applied: that child stays, the rest goes.
#[tokio::test]
async fn what_continues_a_damaged_checkpoint_keeps_nothing_else_from_being_removed() {
    let (store, _, [side, other]) = damaged().await;
    let deleted = async || store.enforce(&siblings()).await.deleted_checkpoint_ids;
    assert_eq!(deleted().await, [other.key.id, side.key.id]);
    assert_eq!(deleted().await, [other.parent.unwrap()]);
    assert!(deleted().await.is_empty());
    let plan = plan_retention(&store.image().await, &siblings(), store.accessor.table()).unwrap();
    let verdict = plan.verdicts.iter().find(|(place, _)| Some(place.1) == side.parent).unwrap().1;
    assert_eq!(verdict, Reason::BrokenLineage);

    for boundary in [Boundary::KeepSet, Boundary::FreshSnapshot] {
        for batch in [None, Some(1)] {
            let (store, turns, [side, _]) = damaged().await;
            let protect = [turns[1].key.id].into();
            let asked = Prune { boundary, protect, batch, ..Prune::keeping(Keep::Latest) };
            while !store.prune(&asked).await.is_empty() {}
            let left: Vec<_> = store.image().await.checkpoints.into_keys().map(|place| place.1).collect();
            let (next, branch) = (turns[2].parent.unwrap(), side.parent.unwrap());
            assert_eq!(left, [turns[1].key.id, next, branch, turns[4].key.id], "{boundary:?}, {batch:?}");
        }
    }

    let (store, _, [side, other]) = damaged().await;
    let runs = BTreeSet::from(["run4".to_owned(), "run5".to_owned()]);
    let table = store.accessor.table();
    let plan = delete_for_runs(&*store.saver, &store.thread, &runs, table).await.unwrap();
    let gone: Vec<_> = plan.removed().map(|place| place.1).collect();
    assert_eq!(gone, [other.key.id, other.parent.unwrap(), side.key.id]);
}

/// It and its child would be put again.
#[tokio::test]
async fn a_duration_link_on_a_damaged_checkpoint_is_not_grafted() {
    let (saver, store) = in_full_mode();
    let heads = store.turns(2).await;
    store.note().await;
    store.turn(2, None).await;
    let link = store.note().await.key.id;
    store.turn(3, None).await;
    lose_parent(&saver, &heads[1]);
    let graft = RetentionPolicy { graft_duration_links: true, ..RetentionPolicy::default() };
    assert_eq!(store.enforce(&graft).await.deleted_checkpoint_ids, [link]);
}

#[tokio::test]
async fn a_keep_set_reaches_back_to_the_nearest_value_of_each_channel() {
    let saver: Arc<dyn Saver> = Arc::new(MemorySaver::new());
    let table = Arc::new(Schema::thread_state().compile(ChannelMode::Delta, 3).unwrap());
    let accessor = StateAccessor::new(saver.clone(), table, Arc::default());
    let store = Store { saver, accessor, thread: "t".into(), _dir: None };
    store.turns(5).await;
    let image = store.image().await;
    let lineage = Lineage::new(&image);
    let messages = ["messages".into()];
    for (at, tuple) in &image.checkpoints {
        let keep = lineage.keep_set(at, &messages);
        assert_eq!(keep, lineage.keep_set(at, &messages));
        assert_eq!(lineage.keep_set(at, &[]), BTreeSet::from([at.clone()]), "no channels");
        let behind = tuple.metadata.counters.get("messages").map_or(0, |counters| counters.updates);
        assert_eq!(keep.len() as u64, behind + 1, "back to the snapshot");
        let unknown = lineage.keep_set(at, &["unknown".into()]);
        assert_eq!(unknown.len(), lineage.lineage(at).count(), "back to the root");
    }
    let snapshots = image.checkpoints.values();
    let snapshots =
        snapshots.filter(|t| matches!(t.checkpoint.channels["messages"].stored, Stored::Snapshot(_)));
    assert_eq!(snapshots.count(), 4, "the first of all, and one in three");
}

#[tokio::test]
async fn a_prune_by_time_keeps_what_was_created_at_that_moment() {
    for store in stores() {
        let third = store.turns(6).await[2].key.id;
        let moment = third.unix_ms();
        for since in [moment, moment + 1] {
            let before = store.states().await;
            let head = *before.last_key_value().unwrap().0;
            let older = |id: &CheckpointId| id.unix_ms() < since && *id != head;
            let older: Vec<_> = before.keys().rev().copied().filter(older).collect();
            let asked = Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(Keep::Since(since)) };
            assert_eq!(store.prune(&asked).await, older);
            store.only_removes(&before, &older).await;
            assert_eq!(store.states().await.contains_key(&third), since == moment);
        }
    }
}

#[tokio::test]
async fn a_pruned_thread_keeps_its_head_and_its_kept_history() {
    for store in stores() {
        store.turns(13).await;
        let before = store.states().await;
        let ids: Vec<_> = before.keys().rev().copied().collect();
        for boundary in [Boundary::KeepSet, Boundary::FreshSnapshot] {
            let asked = Prune { boundary, ..Prune::keeping(Keep::Last(3)) };
            store.prune(&asked).await;
            let now = store.states().await;
            assert!(now.iter().all(|(id, state)| before[id] == *state), "every survivor is as it was");
            assert!(ids[..3].iter().all(|id| now.contains_key(id)));
            if boundary == Boundary::FreshSnapshot {
                assert_eq!(now.len(), 3);
            }
        }
        assert_eq!(store.prune(&Prune::keeping(Keep::Last(3))).await, [], "nothing is left to do");
        store.prune(&Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(Keep::Latest) }).await;
        assert_eq!(store.states().await.into_iter().collect::<Vec<_>>(), [(ids[0], before[&ids[0]].clone())]);
        let next = store.turn(99, None).await;
        let read = store.accessor.get(&store.thread, None).await.unwrap().unwrap();
        assert_eq!(read.values().unwrap(), next.values().unwrap(), "and the conversation goes on");
        assert_eq!(read.json("messages").unwrap().unwrap().as_array().unwrap().len(), 28);
    }
}

#[tokio::test]
async fn pruning_in_batches_gets_where_one_pass_does() {
    for store in stores() {
        store.turns(9).await;
        let before = store.states().await;
        let asked = Prune { batch: Some(2), ..Prune::keeping(Keep::Last(2)) };
        let mut passes = 0;
        while !store.prune(&asked).await.is_empty() {
            passes += 1;
            let now = store.states().await;
            assert!(now.iter().all(|(id, state)| before[id] == *state), "after {passes} passes");
            assert!(passes < 20);
        }
        let done = store.states().await;
        assert_eq!(
            store.prune(&Prune::keeping(Keep::Last(2))).await,
            [],
            "an unbounded pass finds nothing more"
        );
        assert_eq!(store.states().await, done);
    }
}

#[tokio::test]
async fn deleting_a_run_leaves_what_a_survivor_replays() {
    for store in stores() {
        let heads = store.turns(3).await;
        let side = store.turn(7, Some(heads[0].key.id)).await;
        store.turn(8, Some(heads[2].key.id)).await;
        let before = store.states().await;
        let delete = async |runs: &[&str]| {
            let runs = runs.iter().map(|run| (*run).to_owned()).collect();
            let table = store.accessor.table();
            delete_for_runs(&*store.saver, &store.thread, &runs, table).await.unwrap()
        };
        assert_eq!(
            delete(&["run1", "unknown"]).await.removed().count(),
            0,
            "the trunk needs the second turn"
        );
        assert_eq!(store.states().await, before);
        let gone: Vec<_> = delete(&["run7"]).await.removed().map(|place| place.1).collect();
        assert_eq!(gone, [side.key.id, side.parent.unwrap()]);
        store.only_removes(&before, &gone).await;
        let rows = store.image().await.checkpoints[&(Namespace::root(), heads[0].key.id)].writes.len();
        assert_eq!(rows, 1, "the run's rows under a survivor are gone");
        let gone = delete(&["run2", "run8"]).await.removed().count();
        assert_eq!(gone, 4, "a run and the one that came after it go together");
        assert_eq!(store.accessor.get(&store.thread, None).await.unwrap().unwrap().key.id, heads[1].key.id);
    }
}

#[tokio::test]
async fn a_copy_is_its_own() {
    for store in stores() {
        let heads = store.turns(3).await;
        store.turn(7, Some(heads[0].key.id)).await;
        store.pend(None).await;
        let before = store.image().await;
        let states = store.states().await;
        let copy = ThreadId::from("copy");
        assert_eq!(copy_thread(&*store.saver, &store.thread, &copy).await.unwrap(), 8);
        assert_eq!(store.image().await, before, "the source is untouched");
        let again = copy_thread(&*store.saver, &store.thread, &copy).await.unwrap_err();
        assert!(again.to_string().contains("already exists"), "{again}");
        store.saver.delete_thread(&store.thread).await.unwrap();
        let none = copy_thread(&*store.saver, &store.thread, &"other".into()).await.unwrap_err();
        assert!(matches!(none, Error::InvalidInput(_)), "{none}");
        assert!(store.saver.get(&CheckpointSelector::head(&"other".into())).await.unwrap().is_none());

        let store = Store { thread: copy, ..store };
        assert_eq!(store.states().await, states, "the copy has every state, at every id");
        let head = store.accessor.get(&store.thread, None).await.unwrap().unwrap();
        assert_eq!(head.writes.len(), 1, "and what is pending");
        store.turn(9, None).await;
    }
}

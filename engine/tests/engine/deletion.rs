//! Random programs with deletions between the steps: every remaining checkpoint keeps its state, in both modes and at
//! any cadence, and the thread can continue.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Map, Value as Json, json};
use threadkeep::channel::Schema;
use threadkeep::deletion::{
    Boundary, DeletionPlan, Keep, Prune, Reason, RetentionPolicy, copy_thread, delete_for_runs, enforce,
    plan_delete_for_runs, plan_prune, plan_retention, prune,
};
use threadkeep::id::{CheckpointId, IdSource, Namespace, ThreadId};
use threadkeep::metadata::{DURATION_NODE, RESTORED_KEY, Source};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{LocalKey, Saver, ThreadImage};
use threadkeep::state::{HistoryQuery, StateAccessor, Update};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::verify::verify_image;
use threadkeep_memory::MemorySaver;
use threadkeep_sqlite::{Options, SqliteSaver, Synchronous};

#[derive(Debug, Clone)]
enum Op {
    /// A superstep of a run, from the head or an older checkpoint, with this many tasks that each write a message.
    Step {
        nested: bool,
        at: Option<usize>,
        tasks: u8,
        run: u8,
    },
    /// An update on an older checkpoint or the head.
    Update {
        at: Option<usize>,
        title: bool,
    },
    /// The state of an older checkpoint again, as a run that resumes from it in delta mode, or one that is rolled back,
    /// leaves it: only its name says what it continues.
    Restore(usize),
    /// A duration-only checkpoint, which has what its head says of itself.
    Annotate,
    /// A task whose rows stay pending.
    Abandon,
    Prune {
        keep: Keep,
        boundary: Boundary,
        protect: Vec<usize>,
        batch: Option<usize>,
    },
    Runs(BTreeSet<u8>),
    Retain {
        siblings: bool,
        strict: bool,
        graft: bool,
        cap: Option<i64>,
        protect: Vec<usize>,
    },
    /// The thread is copied, and the copy continues in its place.
    Move,
}

fn op() -> impl Strategy<Value = Op> {
    let keep = prop_oneof![
        4 => Just(Keep::Latest),
        6 => (0..6_usize).prop_map(Keep::Last),
        1 => Just(Keep::Since(u64::MAX)),
        1 => Just(Keep::Nothing),
    ];
    let boundary = prop_oneof![Just(Boundary::KeepSet), Just(Boundary::FreshSnapshot)];
    let some = || prop::collection::vec(any::<usize>(), 0..3);
    prop_oneof![
        20 => (prop::bool::weighted(0.2), prop::option::weighted(0.2, any::<usize>()), 0..3_u8, 0..5_u8)
            .prop_map(|(nested, at, tasks, run)| Op::Step { nested, at, tasks, run }),
        4 => (prop::option::of(any::<usize>()), any::<bool>()).prop_map(|(at, title)| Op::Update { at, title }),
        3 => any::<usize>().prop_map(Op::Restore),
        3 => Just(Op::Annotate),
        2 => Just(Op::Abandon),
        3 => (keep, boundary, some(), prop::option::of(0..5_usize))
            .prop_map(|(keep, boundary, protect, batch)| Op::Prune { keep, boundary, protect, batch }),
        2 => prop::collection::btree_set(0..5_u8, 0..4).prop_map(Op::Runs),
        3 => (any::<bool>(), any::<bool>(), any::<bool>(), prop::option::of(0..4_i64), some())
            .prop_map(|(siblings, strict, graft, cap, protect)| Op::Retain { siblings, strict, graft, cap, protect }),
        1 => Just(Op::Move),
    ]
}

type States = BTreeMap<LocalKey, Map<String, Json>>;

struct Run {
    saver: Arc<dyn Saver>,
    accessor: StateAccessor,
    thread: ThreadId,
    /// The state of every existing checkpoint.
    states: States,
    said: u32,
}

impl Run {
    fn new(saver: Arc<dyn Saver>, (mode, frequency): (ChannelMode, u64)) -> Self {
        let table = Arc::new(Schema::thread_state().compile(mode, frequency).unwrap());
        let accessor = StateAccessor::new(saver.clone(), table, Arc::new(IdSource::default()));
        Self { saver, accessor, thread: "t0".into(), states: States::new(), said: 0 }
    }

    fn pick(&self, namespace: &Namespace, at: usize) -> Option<CheckpointId> {
        let ids: Vec<_> = self.states.keys().filter(|(ns, _)| ns == namespace).map(|(_, id)| *id).collect();
        (!ids.is_empty()).then(|| ids[at % ids.len()])
    }

    fn protected(&self, protect: &[usize]) -> BTreeSet<CheckpointId> {
        protect.iter().filter_map(|at| self.pick(&Namespace::root(), *at)).collect()
    }

    fn say(&mut self) -> Json {
        self.said += 1;
        // Occasionally an earlier message is written again, which replaces it.
        let id = if self.said.is_multiple_of(7) { self.said / 2 } else { self.said };
        json!([{"type": "ai", "content": format!("text {}", self.said), "id": format!("m{id}")}])
    }

    /// Runs one operation. `None` if it did not delete anything.
    async fn run(&mut self, op: &Op) -> Option<DeletionPlan> {
        let table = self.accessor.table();
        let before = self.saver.read_thread(&self.thread).await.unwrap();
        let planned = match op {
            Op::Prune { keep, boundary, protect, batch } => {
                let protect = self.protected(protect);
                let asked = Prune { keep: *keep, boundary: *boundary, protect, batch: *batch };
                let planned = plan_prune(&before, &asked, table).unwrap();
                assert_eq!(prune(&*self.saver, &self.thread, &asked, table).await.unwrap(), planned);
                self.judge_prune(&asked, &planned);
                if *boundary == Boundary::KeepSet {
                    for tuple in &planned.rewrite.put {
                        let old = &before.checkpoints[&(tuple.namespace.clone(), tuple.checkpoint.id)];
                        assert_eq!(
                            tuple.checkpoint.channels, old.checkpoint.channels,
                            "something new is stored"
                        );
                    }
                }
                planned
            }
            Op::Runs(runs) => {
                let runs = runs.iter().map(|run| format!("r{run}")).collect();
                let planned = plan_delete_for_runs(&before, &runs, table).unwrap();
                let done = delete_for_runs(&*self.saver, &self.thread, &runs, table).await.unwrap();
                assert_eq!(done, planned);
                for place in planned.removed() {
                    let run = &before.checkpoints[place].metadata.extra["run_id"];
                    assert!(runs.contains(run.as_str().unwrap()));
                }
                Self::judge_names(&before, &planned);
                planned
            }
            Op::Retain { siblings, strict, graft, cap, protect } => {
                let policy = RetentionPolicy {
                    prune_leaf_sibling_branches: *siblings,
                    strict_pending_write_guard: *strict,
                    graft_duration_links: *graft,
                    max_delete_per_run: *cap,
                    protect_checkpoint_ids: self.protected(protect),
                    ..RetentionPolicy::default()
                };
                let planned = plan_retention(&before, &policy, table).unwrap();
                let report = enforce(&*self.saver, &self.thread, &policy, table, true).await.unwrap();
                Self::judge_retention(&before, &policy, &planned);
                Self::judge_names(&before, &planned);
                let deleted: Vec<_> = planned.removed().map(|place| place.1).collect();
                assert_eq!(report.deleted_checkpoint_ids, deleted);
                let after = self.saver.read_thread(&self.thread).await.unwrap();
                let counted = threadkeep::deletion::Stats::of(&after).to_map();
                assert_eq!(report.stats_after, counted, "the stats of what is there now");
                planned
            }
            _ => {
                self.write(op).await;
                return None;
            }
        };
        let gone: BTreeSet<&LocalKey> = planned.removed().collect();
        assert_eq!(gone, planned.rewrite.remove.iter().collect(), "what is reported is what is removed");
        assert_eq!(planned.verdicts.len(), before.checkpoints.len(), "a verdict for each");
        for place in gone {
            self.states.remove(place).unwrap();
        }
        Some(planned)
    }

    async fn write(&mut self, op: &Op) {
        let root = Namespace::root();
        let made = match op {
            Op::Step { nested, at, tasks, run } => {
                let namespace = if *nested { "inner".into() } else { root };
                let at = at.and_then(|at| self.pick(&namespace, at));
                let accessor = self.accessor.clone().in_namespace(namespace);
                let mut writer = StepWriter::open(&accessor, &self.thread, at).await.unwrap();
                for index in 0..*tasks {
                    let write = writer.write("messages", self.say(), false).unwrap();
                    let task = writer.start_task(&"node".into(), index.into());
                    let durability = if index == 0 { Durability::Now } else { Durability::WithCommit };
                    writer.finish_task(task, vec![write], durability).await.unwrap();
                }
                let extra = Map::from_iter([("run_id".to_owned(), json!(format!("r{run}")))]);
                writer.commit(Source::Loop, vec!["node".into()], extra).await.unwrap().clone()
            }
            Op::Update { at, title } => {
                let at = at.and_then(|at| self.pick(&root, at));
                let write = if *title {
                    self.said += 1;
                    self.accessor.write("title", json!(format!("title {}", self.said)), false)
                } else {
                    let said = self.say();
                    self.accessor.write("messages", said, self.said.is_multiple_of(5))
                };
                let update =
                    Update { at, node: "update".into(), writes: vec![write.unwrap()], extra: Map::new() };
                self.accessor.update(&self.thread, update).await.unwrap()
            }
            Op::Restore(at) => {
                let Some(at) = self.pick(&root, *at) else { return };
                let mut extra = Map::from_iter([(RESTORED_KEY.to_owned(), json!(at.to_string()))]);
                extra.insert("run_id".to_owned(), json!("r0"));
                let mut head = self.accessor.known_head(&self.thread).await.unwrap();
                let restored = self.accessor.linearize(&mut head, at, extra.clone()).await.unwrap();
                if let Some(made) = restored {
                    made
                } else {
                    let update = Update { at: Some(at), node: "restore".into(), writes: Vec::new(), extra };
                    self.accessor.update(&self.thread, update).await.unwrap()
                }
            }
            Op::Annotate => {
                let Some(head) = self.accessor.get(&self.thread, None).await.unwrap() else { return };
                let mut extra = head.metadata.extra.to_map();
                extra.insert("writes".into(), json!({ DURATION_NODE: { "run_ids": ["r"] } }));
                self.accessor.annotate(&head, extra).await.unwrap()
            }
            Op::Abandon => {
                let said = self.say();
                let mut writer = StepWriter::open(&self.accessor, &self.thread, None).await.unwrap();
                let write = writer.write("messages", said, false).unwrap();
                let task = writer.start_task(&"node".into(), 0);
                writer.finish_task(task, vec![write], Durability::Now).await.unwrap();
                return;
            }
            Op::Move => {
                let from = self.thread.clone();
                self.thread = format!("{from}x").into();
                let before = self.saver.read_thread(&from).await.unwrap();
                match copy_thread(&*self.saver, &from, &self.thread).await {
                    Ok(count) => assert_eq!(count, before.checkpoints.len()),
                    Err(error) => assert!(before.checkpoints.is_empty(), "{error}"),
                }
                self.saver.delete_thread(&from).await.unwrap();
                return;
            }
            Op::Prune { .. } | Op::Runs(_) | Op::Retain { .. } => return,
        };
        self.states.insert((made.key.namespace.clone(), made.key.id), made.values().unwrap());
    }

    fn judge_prune(&self, asked: &Prune, planned: &DeletionPlan) {
        for (place, reason) in &planned.verdicts {
            let newer = self.states.keys().filter(|(ns, id)| *ns == place.0 && *id > place.1).count();
            let wanted = match asked.keep {
                Keep::Nothing => false,
                Keep::Latest | Keep::Since(_) => newer == 0,
                Keep::Last(count) => newer < count.max(1),
            };
            let wanted = wanted || asked.protect.contains(&place.1);
            assert!(!(wanted && reason.goes()), "{place:?} was to be kept, and is {reason:?}");
            let complete = asked.batch.is_none() && asked.boundary == Boundary::FreshSnapshot;
            assert!(!complete || wanted || reason.goes(), "{place:?} was to go, and is {reason:?}");
        }
        if asked.batch.is_none() {
            assert!(planned.verdicts.iter().all(|(_, reason)| *reason != Reason::Cap));
        }
        let capped = planned.verdicts.iter().any(|(_, reason)| *reason == Reason::Cap);
        assert!(!capped || asked.batch == Some(0) || planned.removed().next().is_some(), "no progress");
    }

    /// What a remaining checkpoint restores stays, if it was there.
    fn judge_names(before: &ThreadImage, planned: &DeletionPlan) {
        let removed: BTreeSet<&LocalKey> = planned.removed().collect();
        for (place, tuple) in before.checkpoints.iter().filter(|(place, _)| !removed.contains(place)) {
            let restored = tuple.metadata.restored().map(|id| (place.0.clone(), id));
            assert!(!restored.is_some_and(|at| removed.contains(&at)), "{place:?} names what goes");
        }
    }

    fn judge_retention(before: &ThreadImage, policy: &RetentionPolicy, planned: &DeletionPlan) {
        let parents: BTreeSet<LocalKey> = before
            .checkpoints
            .iter()
            .filter_map(|((ns, _), tuple)| Some((ns.clone(), tuple.parent?)))
            .collect();
        let removed: Vec<&LocalKey> = planned.removed().collect();
        for place in &removed {
            let tuple = &before.checkpoints[*place];
            let leaf = !parents.contains(*place);
            assert!(leaf || policy.graft_duration_links && tuple.metadata.is_duration_only());
            assert!(tuple.metadata.is_duration_only() || policy.prune_leaf_sibling_branches);
            assert!(!policy.protect_checkpoint_ids.contains(&place.1));
            assert!(tuple.parent.is_some());
        }
        assert!(policy.max_delete_per_run.is_none_or(|cap| removed.len() <= usize::try_from(cap).unwrap()));
        for namespace in ["", "inner"].map(Namespace::from) {
            let real = before
                .checkpoints
                .iter()
                .filter(|((ns, _), t)| *ns == namespace && !t.metadata.is_duration_only());
            if let Some((head, _)) = real.max_by_key(|(place, _)| place.1) {
                assert!(!removed.contains(&head), "a head goes");
            }
        }
    }

    /// Every existing checkpoint has its state, and there are no others.
    async fn check(&self, after: &Op) {
        for namespace in ["", "inner"].map(Namespace::from) {
            let accessor = self.accessor.clone().in_namespace(namespace.clone());
            let read = accessor.history(&self.thread, HistoryQuery::default()).await.unwrap();
            let read: States =
                read.iter().map(|s| ((namespace.clone(), s.key.id), s.values().unwrap())).collect();
            let expected: States = self
                .states
                .iter()
                .filter(|((ns, _), _)| *ns == namespace)
                .map(|(p, s)| (p.clone(), s.clone()))
                .collect();
            assert_eq!(read, expected, "after {after:?}");
            let image = self.saver.read_thread(&self.thread).await.unwrap();
            assert_eq!(verify_image(&image, self.accessor.table()), [], "after {after:?}");
            for (place, state) in &expected {
                let alone = accessor.get(&self.thread, Some(place.1)).await.unwrap().unwrap();
                assert_eq!(alone.values().unwrap(), *state, "read alone, after {after:?}");
            }
        }
    }
}

fn modes() -> impl Strategy<Value = (ChannelMode, u64)> {
    prop::sample::select(vec![
        (ChannelMode::Full, 10),
        (ChannelMode::Delta, 1),
        (ChannelMode::Delta, 2),
        (ChannelMode::Delta, 3),
        (ChannelMode::Delta, 10),
        (ChannelMode::Delta, 1000),
    ])
}

async fn survivors_keep_their_states(saver: Arc<dyn Saver>, mode: (ChannelMode, u64), ops: &[Op]) {
    let mut run = Run::new(saver, mode);
    for op in ops {
        if run.run(op).await.is_some() || matches!(op, Op::Move) {
            run.check(op).await;
        }
    }
    run.check(&Op::Abandon).await;
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn survivors_keep_their_states_in_memory(mode in modes(), ops in prop::collection::vec(op(), 1..60)) {
        block_on(survivors_keep_their_states(Arc::new(MemorySaver::new()), mode, &ops));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn survivors_keep_their_states_on_sqlite(mode in modes(), ops in prop::collection::vec(op(), 1..50)) {
        let dir = tempfile::tempdir().unwrap();
        let options = Options { synchronous: Synchronous::Normal, ..Options::default() };
        let saver = Arc::new(SqliteSaver::open(dir.path().join("db"), &options).unwrap());
        block_on(survivors_keep_their_states(saver.clone(), mode, &ops));
        prop_assert_eq!(block_on(saver.check()).unwrap(), [], "every row is intact, and nothing is orphaned");
    }
}
